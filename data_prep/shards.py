"""The shard format, version 1: the only code that writes or reads shards.

A shard set is a folder with `manifest.json`, `tokenizer/`, `train-000000.tar`, …, `eval-000000.tar`, … A shard
is a plain WebDataset tar whose samples are *blocks* of up to 512 instances as ragged arrays (see `Block`), so
the cost of tar and Python is paid once per block. Instances are numbered in storage order over all shards of a
split: the *storage number*.
"""

import hashlib
import io
import json
import os
import tarfile
import threading
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

from data_prep.errors import UserError

FORMAT = "bert-shards"
FORMAT_VERSION = 1
BLOCK_INSTANCES = 512
SPLITS = ("train", "eval")
MANIFEST = "manifest.json"
TOKENIZER_FOLDER = "tokenizer"
WORK_FOLDER = ".work"  # what an unfinished preparation keeps


@dataclass(frozen=True)
class Block:
    """Up to 512 instances as ragged arrays; instance i is tokens[offsets[i]:offsets[i+1]].

    Attributes:
        tokens: uint16 or uint32 [T], original ids of `[CLS] A [SEP] B [SEP]`.
        offsets: uint32 [n+1].
        segment_a: uint16 [n], number of leading positions in segment 0 (`[CLS] A [SEP]`).
        next_sentence_labels: uint8 [n], 1 = B comes from another document; None without a sentence task.
        masked_lm_offsets: uint32 [n+1].
        masked_lm_positions: uint16 [M], positions within the instance, ascending.
        masked_lm_inputs: [M] in the dtype of tokens, what the input shows there.
    """

    tokens: np.ndarray
    offsets: np.ndarray
    segment_a: np.ndarray
    next_sentence_labels: np.ndarray | None
    masked_lm_offsets: np.ndarray
    masked_lm_positions: np.ndarray
    masked_lm_inputs: np.ndarray

    def __len__(self) -> int:
        return len(self.segment_a)


MEMBERS = tuple(field.name for field in fields(Block))


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest unsigned type that the format has for ids of this vocabulary."""
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


def shard_name(split: str, number: int) -> str:
    """File name of a shard: `train-000000.tar`."""
    return f"{split}-{number:06d}.tar"


def canonical_json(value: object) -> str:
    """One spelling for equal values, so that it can be hashed and compared.

    It is ASCII, which holds file names that are not UTF-8 too.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file so that it is there whole or not at all, also after a power cut."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


def sync(path: Path) -> None:
    """Make a file's content, or the names in a folder, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_sha256(path: Path) -> str:
    """Hex sha256 of a file."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def write_shard(path: Path, blocks: Iterable[Block]) -> dict:
    """Write blocks as one tar and return its manifest entry; the bytes depend on the blocks alone.

    Returns:
        {"name", "bytes", "sha256", "instances", "tokens", "blocks": [[offset, length, instances, crc32], …]}
    """
    import webdataset  # imports torch, which only the processes that write shards should pay for

    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    spans, instances, tokens = [], 0, 0
    with open(temporary, "wb") as file:
        with webdataset.TarWriter(file, mtime=0, encoder=False) as writer:
            for number, block in enumerate(blocks):
                start = writer.tarstream.offset
                writer.write({"__key__": f"{path.stem}-{number:06d}"} | _members(block))
                spans.append([start, writer.tarstream.offset - start, len(block)])
                instances += len(block)
                tokens += len(block.tokens)
        file.flush()
        os.fsync(file.fileno())
    # The checksums are taken from the finished file: what is promised is what a reader will find.
    with open(temporary, "rb") as file:
        for span in spans:
            file.seek(span[0])
            span.append(zlib.crc32(file.read(span[1])))
    entry = {
        "name": path.name,
        "bytes": temporary.stat().st_size,
        "sha256": file_sha256(temporary),
        "instances": instances,
        "tokens": tokens,
        "blocks": spans,
    }
    os.replace(temporary, path)
    sync(path.parent)
    return entry


def _members(block: Block) -> dict[str, bytes]:
    members = {}
    for name in MEMBERS:
        array = getattr(block, name)
        if array is not None:
            buffer = io.BytesIO()
            np.lib.format.write_array(buffer, np.ascontiguousarray(array), allow_pickle=False)
            members[f"{name}.npy"] = buffer.getvalue()
    return members


def parse_block(data: bytes) -> Block:
    """Parse the tar bytes of one block."""
    arrays = dict.fromkeys(MEMBERS)
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        for member in tar:
            name = member.name.split(".")[1]
            start = member.offset_data
            arrays[name] = np.lib.format.read_array(
                io.BytesIO(data[start : start + member.size]), allow_pickle=False
            )
    return Block(**arrays)


def manifest_bytes(manifest: dict) -> bytes:
    """The file form of a manifest: one spelling, with a digest of all the rest, so that no byte can change unseen."""
    content = {name: value for name, value in manifest.items() if name != "digest"}
    digest = hashlib.sha256(canonical_json(content).encode()).hexdigest()
    return (canonical_json(content | {"digest": digest}) + "\n").encode()


class ShardSet:
    """A shard set that was checked on opening; every block is checked again when it is read."""

    def __init__(self, folder: Path, manifest: dict, manifest_sha256: str):
        self.folder = folder
        self.manifest = manifest
        self.manifest_sha256 = manifest_sha256
        self._files: dict[str, int] = {}
        self._lock = threading.Lock()
        self._tables = {split: _block_table(manifest["splits"][split]) for split in SPLITS}

    @classmethod
    def open(cls, folder: str | Path) -> "ShardSet":
        """Read the manifest and check names, sizes and the tokenizer against it.

        Raises:
            UserError: the folder is not a whole shard set of this format version.
        """
        folder = Path(folder)
        path = folder / MANIFEST
        if not folder.is_dir():
            raise UserError(
                f"{folder}: there is no such shard folder; make one with "
                "`python data_prep/run.py shards --input TEXT --tokenizer FOLDER --output FOLDER`"
            )
        if not path.is_file():
            raise UserError(
                f"{path}: a finished shard set has this file; "
                + (
                    "run the same `shards` command again to finish it"
                    if (folder / WORK_FOLDER).is_dir()
                    else "give the --output folder of a `shards` command"
                )
            )
        data = path.read_bytes()
        try:
            manifest = json.loads(data)
            found = (manifest["format"], manifest["format_version"])
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{path}: this is not a manifest of a shard set ({error!r}); make the shards again"
            ) from None
        if found != (FORMAT, FORMAT_VERSION):
            raise UserError(
                f"{path}: format {found[0]!r} version {found[1]!r}, but this program reads {FORMAT!r} version "
                f"{FORMAT_VERSION}; make the shards again"
            )
        if data != manifest_bytes(manifest):
            raise UserError(f"{path}: it was changed after it was written; make the shards again")
        _check_files(folder, manifest)
        return cls(folder, manifest, hashlib.sha256(data).hexdigest())

    @property
    def tokenizer_folder(self) -> Path:
        """The tokenizer that the ids belong to."""
        return self.folder / TOKENIZER_FOLDER

    @property
    def settings(self) -> dict:
        """The settings that the shards were made with."""
        return self.manifest["settings"]

    def block_offsets(self, split: str) -> np.ndarray:
        """int64 [n_blocks+1]: storage number of each block's first instance, and the total."""
        return self._tables[split][0]

    def read_block(self, split: str, block_index: int) -> Block:
        """Read one block; safe to call from several threads.

        Raises:
            UserError: it cannot be read, or its bytes are not those that were written.
        """
        offsets, shard_of_block = self._tables[split]
        shard_index, within = shard_of_block[block_index]
        shard = self.manifest["splits"][split]["shards"][shard_index]
        start, length, _, crc = shard["blocks"][within]
        try:
            data = os.pread(self._descriptor(shard["name"]), length, start)
        except OSError as error:
            raise UserError(
                f"{self.folder / shard['name']}: it cannot be read ({error.strerror}); see that it is there and its disk "
                "too, and run the same command again"
            ) from error
        if zlib.crc32(data) != crc:
            raise UserError(
                f"{self.folder / shard['name']}: block {within} (bytes {start} to {start + length}) was changed after it "
                "was written (its crc32 differs); make the shards again or copy this file again from a good place"
            )
        return parse_block(data)

    def _descriptor(self, name: str) -> int:
        with self._lock:
            if name not in self._files:
                self._files[name] = os.open(self.folder / name, os.O_RDONLY)
            return self._files[name]

    def close(self) -> None:
        """Close the files."""
        with self._lock:
            for descriptor in self._files.values():
                os.close(descriptor)
            self._files.clear()


def _block_table(split: dict) -> tuple[np.ndarray, list[tuple[int, int]]]:
    sizes, places = [], []
    for shard_index, shard in enumerate(split["shards"]):
        for within, block in enumerate(shard["blocks"]):
            sizes.append(block[2])
            places.append((shard_index, within))
    return np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]).astype(np.int64), places


def _check_files(folder: Path, manifest: dict) -> None:
    wanted = {
        shard["name"]: shard["bytes"] for split in SPLITS for shard in manifest["splits"][split]["shards"]
    }
    for name, size in wanted.items():
        path = folder / name
        if not path.is_file():
            raise UserError(
                f"{path}: this shard is in {MANIFEST} but not in the folder; copy it there or make the shards again"
            )
        if path.stat().st_size != size:
            raise UserError(
                f"{path}: {path.stat().st_size:,} bytes, but {MANIFEST} says {size:,}; copy it again or make the shards again"
            )
    for path in sorted(folder.glob("*.tar")):
        if path.name not in wanted:
            raise UserError(f"{path}: this shard is not in {MANIFEST}; move it away or make the shards again")
    for name, digest in manifest["tokenizer"]["files"].items():
        path = folder / TOKENIZER_FOLDER / name
        if not path.is_file() or file_sha256(path) != digest:
            raise UserError(
                f"{path}: this is not the tokenizer that the shards were made with (its sha256 differs); "
                "copy the right one there or make the shards again"
            )


def verify(folder: str | Path) -> Iterator[tuple[str, int]]:
    """Check every byte of a shard set; yields (name, bytes) after each shard that is as it was written.

    The manifest and the tokenizer are checked before the first shard.

    Raises:
        UserError: something differs; the sentence names the file.
    """
    shard_set = ShardSet.open(folder)
    for split in SPLITS:
        block_index = 0
        for shard in shard_set.manifest["splits"][split]["shards"]:
            for _ in shard["blocks"]:
                _check_block(shard_set, split, block_index, shard["name"])
                block_index += 1
            if file_sha256(shard_set.folder / shard["name"]) != shard["sha256"]:
                raise UserError(
                    f"{shard_set.folder / shard['name']}: its sha256 is not the one in {MANIFEST}; "
                    "copy it again or make the shards again"
                )
            yield shard["name"], shard["bytes"]
    shard_set.close()


def _check_block(shard_set: ShardSet, split: str, block_index: int, name: str) -> None:
    block = shard_set.read_block(split, block_index)
    if not _is_sound(block, shard_set.manifest["tokenizer"]["vocab_size"]):
        raise UserError(
            f"{shard_set.folder / name}: block {block_index} of {split} holds impossible numbers; make the shards again"
        )


def _is_sound(block: Block, vocab_size: int) -> bool:
    lengths = np.diff(block.offsets.astype(np.int64))
    masks = np.diff(block.masked_lm_offsets.astype(np.int64))
    sizes_agree = (
        len(lengths) == len(block) == len(masks)
        and block.offsets[-1] == len(block.tokens)
        and block.masked_lm_offsets[-1] == len(block.masked_lm_positions) == len(block.masked_lm_inputs)
        and bool((masks >= 0).all())
    )
    return sizes_agree and bool(
        (lengths >= block.segment_a).all()
        and (block.masked_lm_positions < np.repeat(lengths, masks)).all()
        and block.tokens.max(initial=0) < vocab_size
    )
