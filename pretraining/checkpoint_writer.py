"""One rank's files of a checkpoint: copied into memory while training stands still, written while it goes on.

Of the time that a save takes, serialising into memory is about as long as copying; hashing, writing and fsync
take several times that and need the copy only. They are a thread's work, which meets the other ranks never: when
all threads are done, the ranks agree on it between two steps (checkpoint.py).
"""

import contextlib
import hashlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

from data_prep.shards import sync


class Writer:
    """DeepSpeed's checkpoint engine, but for writing: what it is to save is kept, then written by `start`.

    An error is remembered until `finish`: a rank that raised in the middle of a save would leave the others
    waiting for it.

    Args:
        inner: DeepSpeed's own, for all that is not writing.
    """

    def __init__(self, inner):
        self.inner = inner
        self.files: dict[str, dict] = {}
        self.problem: BaseException | None = None
        self._copies: dict[Path, list[bytes]] = {}
        self._thread: threading.Thread | None = None

    def __getattr__(self, name: str):
        return getattr(self.inner, name)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        try:
            os.makedirs(path, exist_ok=exist_ok)
        except OSError as error:
            self.problem = self.problem or error

    def save(self, state_dict, path: str) -> None:
        import torch

        with _without_crc():
            copy = _Copy()
            torch.save(state_dict, copy)
        self._copies[Path(path)] = copy.chunks

    @property
    def bytes(self) -> int:
        """What `start` is going to write."""
        return sum(len(chunk) for chunks in self._copies.values() for chunk in chunks)

    def start(self) -> None:
        """Write the copies in a thread; what they were made of may change from here on."""
        # A daemon: a run that ends with an error must not wait for its disk.
        self._thread = threading.Thread(target=self._write_all, name="checkpoint", daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """Whether the thread is at its end, by success or by an error."""
        return not self._thread.is_alive()

    def finish(self) -> None:
        """Wait for the thread; then `files` and `problem` say what became of it."""
        self._thread.join()

    def _write_all(self) -> None:
        try:
            while self._copies and not self.problem:
                path, chunks = self._copies.popitem()
                self.files[path.name] = _write(path, chunks)
                sync(path.parent)
        # Whatever it is, want of memory too: a checkpoint that lacks a file must not be published.
        except BaseException as error:
            self.problem = error
        finally:
            self._copies.clear()


class _Copy:
    """A file in memory. torch.save hands it views of the tensors' own memory, so each is copied."""

    def __init__(self):
        self.chunks: list[bytes] = []

    def write(self, data) -> int:
        self.chunks.append(bytes(data))
        return len(data)

    def flush(self) -> None:
        pass


@contextlib.contextmanager
def _without_crc() -> Iterator[None]:
    """Let torch.save leave out its CRC-32, half of its time: the sha256 of the whole file does the same work."""
    import torch

    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def _write(path: Path, chunks: list[bytes]) -> dict:
    """Write a file durably, letting go of the chunks; its entry in the manifest."""
    digest, size = hashlib.sha256(), 0
    chunks.reverse()
    with open(path, "wb") as file:
        while chunks:
            chunk = chunks.pop()
            digest.update(chunk)
            size += file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": size, "sha256": digest.hexdigest()}
