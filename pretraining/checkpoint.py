"""Checkpoints: whole or not there, checked before anything is loaded, and the small TrainState.

A checkpoint is written to a folder with a temporary name, hashed into its own manifest and renamed; only then
does `latest` move. DeepSpeed's own files are inside, in its own layout. Between `save` and `finish` a thread of
each rank writes; the ranks publish together, so a checkpoint is that of all ranks or none.
"""

import errno
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from data_prep.errors import UserError
from data_prep.plan import differences
from data_prep.shards import file_sha256, sync, write_atomically
from pretraining.checkpoint_writer import Writer
from pretraining.distributed import AgreedError

FOLDER = "checkpoints"
LATEST = "latest"
MANIFEST = "checkpoint.json"
PARTIAL = ".partial"
NAME = re.compile(r"step-\d{8,}")
FORMAT_VERSION = 1
# What reading a manifest can raise if something else lies in its place.
NOT_OURS = (OSError, ValueError, KeyError, TypeError, AttributeError, UserError)


@dataclass
class TrainState:
    """Everything about a run that is not a tensor; the data position is arithmetic on it.

    Attributes:
        step: global batches taken from the data, skipped ones counted.
        skipped_steps: of these, those whose update was skipped because a gradient overflowed.
        consumed: position in the order of instances (order.py) behind the last batch.
        tokens: real tokens trained on, in all phases.
        seed: of everything random.
        lanes, window: of the order.
        manifest_sha256: of the shard set.
        phase: number of the training phase, from 1; each has shards and a counter of its own.
        skipped_ranges: half-open ranges of positions that are left out (after a rollback); sorted and disjoint.
        rollbacks: how often the run has gone back to a checkpoint (trouble.py).
        earlier_steps, earlier_samples: of the phases before this one; its curves begin there.
        history: of the last steps, the position before each and its loss, None if its update was skipped.
    """

    seed: int
    lanes: int
    window: int
    manifest_sha256: str
    step: int = 0
    skipped_steps: int = 0
    consumed: int = 0
    tokens: int = 0
    phase: int = 1
    skipped_ranges: list[tuple[int, int]] = field(default_factory=list)
    rollbacks: int = 0
    earlier_steps: int = 0
    earlier_samples: int = 0
    history: list[tuple[int, float | None]] = field(default_factory=list)

    @property
    def applied_steps(self) -> int:
        """Updates that were applied; the learning rate is a function of it."""
        return self.step - self.skipped_steps

    @property
    def global_step(self) -> int:
        """The x axis of the curves, which goes on from phase to phase."""
        return self.earlier_steps + self.step

    @classmethod
    def from_dict(cls, values: dict) -> "TrainState":
        """Read it back from JSON."""
        known = {field.name for field in fields(cls)}
        if set(values) != known:
            raise UserError(
                f"the train state has the fields {sorted(values)}, but this program writes {sorted(known)}"
            )
        pairs = {name: [tuple(pair) for pair in values[name]] for name in ("skipped_ranges", "history")}
        return cls(**values | pairs)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that is on disk, and what its manifest says."""

    path: Path
    manifest: dict

    @property
    def state(self) -> TrainState:
        """The train state at its step."""
        return TrainState.from_dict(self.manifest["train_state"])

    @property
    def world_size(self) -> int:
        """The number of ranks that saved it."""
        return self.manifest["world_size"]


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
        self.folder = run_folder / FOLDER
        self.identity = identity
        self.rank = rank
        self.world_size = world_size
        self._gather = gather
        self._say = say
        self._pending: tuple[Writer, Path, Path, dict] | None = None

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
        return final

    def _agree(self, problem: Exception | None, value: object) -> list:
        """Wait for all ranks and return their values; if one has a problem, all of them end with it."""
        full = isinstance(problem, OSError) and problem.errno in (errno.ENOSPC, errno.EDQUOT)
        text = problem.strerror if full else str(problem)
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
            _write_manifest(partial, manifest)
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
                there, and must not count as one that is kept.
        """
        if self.rank == 0:
            steps = [(_step_of(path), path) for path in self._candidates()]
            for number, path in [pair for pair in steps if pair[0] <= step][keep:]:
                if not keep_every or number % keep_every:
                    shutil.rmtree(path)

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
        for path in self._candidates():
            if _step_of(path) > _step_of(checkpoint.path):
                shutil.rmtree(path)
                continue
            try:
                manifest, _ = read_manifest(path)
            except NOT_OURS:  # a damaged one stays as it is
                continue
            _write_manifest(path, manifest | {"train_state": manifest["train_state"] | known})
        write_atomically(self.folder / LATEST, (checkpoint.path.name + "\n").encode())

    def remove_partial(self) -> None:
        """Delete what killed runs have left half written; for the one run that is at work in the folder."""
        if self.rank == 0:
            for path in self.folder.glob(f"*{PARTIAL}"):
                shutil.rmtree(path)

    def _candidates(self) -> list[Path]:
        """Checkpoint folders, the newest first."""
        return sorted(
            (path for path in self.folder.glob("step-*") if NAME.fullmatch(path.name) and path.is_dir()),
            reverse=True,
        )

    def newest_whole(self, before: int | None = None) -> Checkpoint | None:
        """The newest checkpoint whose every byte is right; damaged ones are named and passed over.

        All ranks call it and get the same answer. Only if there is no checkpoint at all is it None.

        Args:
            before: only those of an earlier step than this count.
        Raises:
            UserError: checkpoints are there and none of them is whole.
        """
        names = [path.name for path in self._candidates() if before is None or _step_of(path) < before]
        candidates = self._gather(names)[0]
        for name in candidates:
            path = self.folder / name
            manifest, faults = self._inspect(path)
            if not faults:
                return Checkpoint(path, manifest)
            if self.rank == 0:
                self._say(f"checkpoint {path} is damaged and passed over: {'; '.join(faults)}")
        if candidates:
            raise UserError(
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
            manifest, entries, faults = {}, [], [f"{MANIFEST} is not one of ours ({error!r})"]
        else:
            faults = []
        for name, entry in entries[self.rank :: self.world_size]:
            faults += _fault(path / name, entry)
        return manifest, [fault for part in self._gather(faults) for fault in part]

    def check_identity(self, checkpoint: Checkpoint) -> None:
        """Refuse to go on with other settings than those that the checkpoint was made with.

        Raises:
            UserError: naming each setting, its old and its new value.
        """
        old, new = checkpoint.manifest["identity"], json.loads(json.dumps(self.identity))
        if old != new:
            raise UserError(
                f"{checkpoint.path}: the run was made with other settings ({differences(old, new)}); give the old ones "
                "again, or start a new run with another --output"
            )


def _step_of(path: Path) -> int:
    return int(path.name.rpartition("-")[2])


def _lack_of_room(folder: Path, needed: int) -> OSError | None:
    free = shutil.disk_usage(folder).free
    if free >= needed:
        return None
    return OSError(
        errno.ENOSPC, f"No space left on device: {needed:,} bytes are needed and {free:,} are free"
    )


def _write_manifest(path: Path, manifest: dict) -> None:
    write_atomically(path / MANIFEST, (json.dumps(manifest, indent=1, sort_keys=True) + "\n").encode())


def read_manifest(path: Path) -> tuple[dict, list[tuple[str, dict]]]:
    """The manifest of a checkpoint, and its files with sizes and hashes; raises whatever is wrong with it."""
    manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    if manifest["format_version"] != FORMAT_VERSION:
        raise ValueError(f"format version {manifest['format_version']}, this program reads {FORMAT_VERSION}")
    TrainState.from_dict(manifest["train_state"])
    entries = sorted((name, dict(entry)) for name, entry in manifest["files"].items())
    if not entries or not all({"bytes", "sha256"} <= entry.keys() for _, entry in entries):
        raise ValueError("it does not say which files belong to it")
    if not isinstance(manifest["identity"], dict) or not isinstance(manifest["world_size"], int):
        raise ValueError("it does not say what run it belongs to")
    return manifest, entries


def _fault(path: Path, entry: dict) -> list[str]:
    if not path.is_file():
        return [f"{path.name} is missing"]
    size = path.stat().st_size
    if size != entry["bytes"]:
        return [f"{path.name} has {size:,} of {entry['bytes']:,} bytes"]
    return [] if file_sha256(path) == entry["sha256"] else [f"{path.name} was changed (its sha256 differs)"]


def newest_step(run_folder: Path) -> int:
    """The step of the newest checkpoint by its name, 0 if there is none; for messages."""
    steps = [_step_of(path) for path in (run_folder / FOLDER).glob("step-*") if NAME.fullmatch(path.name)]
    return max(steps, default=0)


def whole_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint in a folder, for one process.

    Raises:
        UserError: a byte of it is not as it was written.
    """
    return Checkpoints(path.parent.parent, {}, 0, 1, lambda value: [value], print).whole(path)
