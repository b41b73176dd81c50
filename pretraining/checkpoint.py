"""Checkpoints: whole or not there, and checked before anything is loaded.

A checkpoint is written to a folder with a temporary name, hashed into its own manifest and renamed; only then
does `latest` move. DeepSpeed's own files are inside, in its own layout. Between `save` and `finish` a thread of
each rank writes; the ranks publish together, so a checkpoint is that of all ranks or none.
"""

import errno
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from data_prep.errors import UserError
from data_prep.plan import differences
from data_prep.shards import sync, write_atomically
from pretraining.checkpoint_writer import Writer
from pretraining.distributed import AgreedError
from pretraining.manifest import (
    FOLDER,
    FORMAT_VERSION,
    MANIFEST,
    NOT_OURS,
    Checkpoint,
    TrainState,
    checkpoint_folders,
    fault_of,
    read_manifest,
    step_of,
    write_manifest,
)

LATEST = "latest"
PARTIAL = ".partial"


class Checkpoints:
    """The checkpoints of one run.

    Args:
        run_folder: the run's folder.
        identity: settings that a resumed run must share, name → value; they are stored in each checkpoint.
        rank, world_size: of this process.
        gather: collects one object of every rank on all ranks (`all_gather_object`), which also waits for them.
        say: prints a line for the user; called on rank 0 only.
    """

    def __init__(
        self,
        run_folder: Path,
        identity: dict,
        rank: int,
        world_size: int,
        gather: Callable[[object], list],
        say: Callable[[str], None],
    ):
        self.run_folder = run_folder
        self.folder = run_folder / FOLDER
        self.identity = identity
        self.rank = rank
        self.world_size = world_size
        self._gather = gather
        self._say = say
        self._pending: tuple[Writer, Path, Path, dict] | None = None
        self._damaged: set[str] = set()

    def save(self, engine, state: TrainState) -> None:
        """Begin to save the engine and the state; every rank calls it at the same step.

        Returns as soon as everything is copied into memory; `finish` publishes what is written meanwhile.
        """
        self.finish()
        final = self.folder / f"step-{state.step:08d}"
        partial = final.with_name(final.name + PARTIAL)
        if self.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        writer = Writer(engine.checkpoint_engine)
        engine.checkpoint_engine = writer
        try:
            # For who converts it with DeepSpeed's own tool; a run here reads the files as they are.
            client_state = {"universal_checkpoint_info": {"universal_checkpoint_version": 0.2}}
            engine.save_checkpoint(
                str(self.folder), tag=partial.name, client_state=client_state, save_latest=False
            )
        except OSError as error:
            # DeepSpeed copies its scripts there by itself, on rank 0, when the others are at its last barrier.
            import torch

            writer.problem = error
            torch.distributed.barrier()
        finally:
            engine.checkpoint_engine = writer.inner
        # Asked before, since until the attempt had failed nobody else could write on a disk that it fills.
        needed = sum(self._gather(writer.bytes))
        if self.rank == 0 and not writer.problem:
            writer.problem = _lack_of_room(self.folder, needed)
        manifest = {
            "format_version": FORMAT_VERSION,
            "world_size": self.world_size,
            "whole_optimizer": not engine.zero_optimization(),
            "train_state": asdict(state),
            "identity": self.identity,
        }
        self._pending = writer, partial, final, manifest
        writer.start()

    @property
    def is_written(self) -> bool:
        """Whether this rank's part of a save that was begun is on the disk, or has failed; False if none was."""
        return self._pending is not None and self._pending[0].is_done

    def finish(self) -> Path | None:
        """Wait for the save that was begun, and publish it; every rank calls it. None if none was begun.

        Raises:
            UserError: the disk is full or refuses to be written; older checkpoints are as they were.
        """
        if self._pending is None:
            return None
        (writer, partial, final, manifest), self._pending = self._pending, None
        writer.finish()
        try:
            parts = self._agree(writer.problem, writer.files)
            manifest["files"] = {name: entry for part in parts for name, entry in part.items()}
            self._agree(self._publish(partial, final, manifest) if self.rank == 0 else None, None)
        except UserError:
            if self.rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
            raise
        self._damaged.discard(final.name)
        return final

    def _agree(self, problem: BaseException | None, value: object) -> list:
        """Wait for all ranks and return their values; if one has a problem, all of them end with it."""
        full = isinstance(problem, OSError) and problem.errno in (errno.ENOSPC, errno.EDQUOT)
        text = problem.strerror if full else str(problem) or type(problem).__name__
        answers = self._gather(((text, full) if problem else None, value))
        problems = [answer for answer, _ in answers if answer]
        if problems:
            text, full = problems[0]
            remedy = "make room on the disk" if full else "mend that"
            raise AgreedError(
                f"{self.folder}: a checkpoint could not be written ({text}); {remedy} and run the same command again: "
                "it goes on from the last checkpoint"
            )
        return [value for _, value in answers]

    def _publish(self, partial: Path, final: Path, manifest: dict) -> Exception | None:
        try:
            write_manifest(partial, manifest)
            if final.exists():
                shutil.rmtree(final)
            partial.rename(final)
            sync(self.folder)
            write_atomically(self.folder / LATEST, (final.name + "\n").encode())
        except OSError as error:
            return error
        return None

    def prune(self, step: int, keep: int, keep_every: int = 0) -> None:
        """Delete old checkpoints; not the newest `keep`, nor those of steps that `keep_every` (0: none) divides.

        Args:
            step: of the newest whole one. What lies beyond it is damaged, since the run would have gone on from
                there. That must not count as one that is kept, nor what else `newest_whole` has passed over.
        """
        if self.rank:
            return
        old = [path for path in checkpoint_folders(self.run_folder) if step_of(path) <= step]
        whole = [path for path in old if path.name not in self._damaged and os.path.exists(path / MANIFEST)]
        # Damaged ones go when whole ones of their age do.
        for path in old[old.index(whole[keep - 1]) + 1 :] if len(whole) > keep else ():
            if not keep_every or step_of(path) % keep_every:
                try:
                    self._delete(path)
                except OSError as error:
                    self._say(
                        f"{path}: this old checkpoint could not be deleted ({error}); delete it by hand"
                    )

    def _delete(self, path: Path) -> None:
        """Delete a checkpoint; its manifest goes first, so that what cannot be deleted never looks whole.

        Raises:
            OSError: the manifest is still there.
        """
        (path / MANIFEST).unlink(missing_ok=True)
        try:
            shutil.rmtree(path)
        except OSError as error:
            self._say(
                f"{path}: the rest of this checkpoint could not be deleted ({error}); delete it by hand"
            )

    def go_back(self, checkpoint: Checkpoint, state: TrainState) -> None:
        """Make a checkpoint the newest, and let all that stay know what the state says is skipped; all ranks call it.

        Whoever goes on from one of them, after a kill too, does not meet the trouble again.

        Raises:
            UserError: the disk refuses to be written.
        """
        problem = None
        if self.rank == 0:
            try:
                self._forget_later(checkpoint, state)
            except OSError as error:
                problem = error
        self._agree(problem, None)

    def _forget_later(self, checkpoint: Checkpoint, state: TrainState) -> None:
        known = {"skipped_ranges": state.skipped_ranges, "rollbacks": state.rollbacks}
        for path in checkpoint_folders(self.run_folder):
            if step_of(path) > step_of(checkpoint.path):
                self._delete(path)
                continue
            try:
                manifest, _ = read_manifest(path)
            except NOT_OURS:  # a damaged one stays as it is
                continue
            write_manifest(path, manifest | {"train_state": manifest["train_state"] | known})
        write_atomically(self.folder / LATEST, (checkpoint.path.name + "\n").encode())

    def remove_partial(self) -> None:
        """Delete what killed runs have left half written; for rank 0 of the one run that is at work in the folder."""
        for path in self.folder.glob(f"*{PARTIAL}"):
            shutil.rmtree(path)

    def newest_whole(self, before: int | None = None) -> Checkpoint | None:
        """The newest checkpoint whose every byte is right; damaged ones are named and passed over.

        All ranks call it and get the same answer. Only if there is no checkpoint at all is it None.

        Args:
            before: only those of an earlier step than this count.
        Raises:
            UserError: checkpoints are there and none of them is whole.
        """
        names = [
            path.name
            for path in checkpoint_folders(self.run_folder)
            if before is None or step_of(path) < before
        ]
        candidates = self._gather(names)[0]
        for name in candidates:
            path = self.folder / name
            manifest, faults = self._inspect(path)
            if not faults:
                return Checkpoint(path, manifest)
            self._damaged.add(name)
            if self.rank == 0:
                self._say(f"checkpoint {path} is damaged and passed over: {'; '.join(faults)}")
        if candidates:
            raise AgreedError(
                f"{self.folder}: none of its {len(candidates)} checkpoints is whole; restore one from a copy, or start anew "
                "with another --output"
            )
        return None

    def whole(self, path: Path) -> Checkpoint:
        """The checkpoint in a folder, not necessarily of this run; all ranks call it and share the hashing.

        Raises:
            UserError: a byte of it is not as it was written.
        """
        manifest, faults = self._inspect(path)
        if faults:
            raise AgreedError(
                f"checkpoint {path} is damaged: {'; '.join(faults)}; take another one of the run"
            )
        return Checkpoint(path, manifest)

    def _inspect(self, path: Path) -> tuple[dict, list[str]]:
        """Manifest of a checkpoint and what is wrong with its files; the ranks share the hashing."""
        try:
            manifest, entries = read_manifest(path)
        except NOT_OURS as error:
            reason = str(error) if isinstance(error, OSError | ValueError | UserError) else repr(error)
            manifest, entries, faults = {}, [], [f"{MANIFEST} cannot be trusted ({reason})"]
        else:
            faults = []
        for name, entry in entries[self.rank :: self.world_size]:
            faults += fault_of(path / name, entry)
        return manifest, [fault for part in self._gather(faults) for fault in part]

    def check_identity(self, checkpoint: Checkpoint) -> None:
        """Refuse to go on with other settings than those that the checkpoint was made with.

        Raises:
            UserError: naming each setting, its old and its new value.
        """
        old, new = checkpoint.manifest["identity"], json.loads(json.dumps(self.identity))
        if old != new:
            raise AgreedError(
                f"{checkpoint.path}: the run was made with other settings ({differences(old, new)}); give the old ones "
                "again, or start a new run with another --output"
            )


def _lack_of_room(folder: Path, needed: int) -> OSError | None:
    free = shutil.disk_usage(folder).free
    if free >= needed:
        return None
    return OSError(
        errno.ENOSPC, f"No space left on device: {needed:,} bytes are needed and {free:,} are free"
    )


def whole_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint in a folder, for one process.

    Raises:
        UserError: a byte of it is not as it was written.
    """
    return Checkpoints(path.parent.parent, {}, 0, 1, lambda value: [value], print).whole(path)
