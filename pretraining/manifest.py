"""What a checkpoint says about itself: its manifest with the small TrainState, judged before anything is believed.

The manifest has a hash of its own beside those of the files, so that no changed byte of a checkpoint goes unnoticed.
"""

import hashlib
import json
import re
from dataclasses import dataclass, field, fields
from pathlib import Path

from data_prep.errors import UserError
from data_prep.shards import canonical_json, file_sha256, write_atomically

FOLDER = "checkpoints"
MANIFEST = "checkpoint.json"
NAME = re.compile(r"step-\d{8,}")
FORMAT_VERSION = 3
# DeepSpeed's names; those of other files in a checkpoint do not matter.
MODEL_STATES = "mp_rank_00_model_states.pt"
OPTIMIZER_STATES = re.compile(r"(?:[a-z0-9]+_)?zero_pp_rank_(\d+)_mp_rank_00_optim_states\.pt")
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

    @property
    def is_sharded(self) -> bool:
        """Whether each rank has saved its part of the optimizer, as under ZeRO; else rank 0 has saved all of it."""
        return not self.manifest["whole_optimizer"]


def step_of(path: Path) -> int:
    """The step that the name of a checkpoint's folder says."""
    return int(path.name.rpartition("-")[2])


def checkpoint_folders(run_folder: Path) -> list[Path]:
    """Folders of a run's checkpoints, the newest first, by their names; half written ones have other names."""
    found = [
        path for path in (run_folder / FOLDER).glob("step-*") if NAME.fullmatch(path.name) and path.is_dir()
    ]
    return sorted(found, key=step_of, reverse=True)


def newest_step(run_folder: Path) -> int:
    """The step of the newest checkpoint by its name, 0 if there is none; for messages."""
    return max(map(step_of, checkpoint_folders(run_folder)), default=0)


def write_manifest(path: Path, manifest: dict) -> None:
    """Write the manifest of the checkpoint in a folder, durably, with a hash of itself."""
    content = manifest | {"sha256": _sha256(manifest)}
    write_atomically(path / MANIFEST, (json.dumps(content, indent=1, sort_keys=True) + "\n").encode())


def _sha256(manifest: dict) -> str:
    rest = {name: value for name, value in manifest.items() if name != "sha256"}
    return hashlib.sha256(canonical_json(rest).encode()).hexdigest()


def read_manifest(path: Path) -> tuple[dict, list[tuple[str, dict]]]:
    """The manifest of a checkpoint, and its files with sizes and hashes; raises whatever is wrong with it."""
    manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    if manifest["format_version"] != FORMAT_VERSION:
        raise ValueError(f"format version {manifest['format_version']}, this program reads {FORMAT_VERSION}")
    if manifest["sha256"] != _sha256(manifest):
        raise ValueError("it was changed, its sha256 differs")
    state = TrainState.from_dict(manifest["train_state"])
    if NAME.fullmatch(path.name) and step_of(path) != state.step:
        raise ValueError(f"it is of step {state.step}, the folder is called {path.name}")
    entries = sorted((name, dict(entry)) for name, entry in manifest["files"].items())
    if not all({"bytes", "sha256"} <= entry.keys() for _, entry in entries):
        raise ValueError("it does not say what its files hold")
    if not isinstance(manifest["identity"], dict) or not isinstance(manifest["world_size"], int):
        raise ValueError("it does not say what run it belongs to")
    parts = 0 if manifest["whole_optimizer"] else manifest["world_size"]
    _check_names([name for name, _ in entries], parts)
    return manifest, entries


def _check_names(names: list[str], parts: int) -> None:
    """Each file of a checkpoint must be named, or its absence would go unnoticed."""
    found = [int(match[1]) for name in names if (match := OPTIMIZER_STATES.fullmatch(name))]
    if MODEL_STATES not in names or sorted(found) != list(range(parts)):
        raise ValueError(f"it does not name {MODEL_STATES} and the optimizer states of {parts} ranks")


def fault_of(path: Path, entry: dict) -> list[str]:
    """What is wrong with a file of a checkpoint, by its entry in the manifest; empty if nothing is."""
    try:
        size = path.stat().st_size
        if size != entry["bytes"]:
            return [f"{path.name} has {size:,} of {entry['bytes']:,} bytes"]
        if file_sha256(path) != entry["sha256"]:
            return [f"{path.name} was changed (its sha256 differs)"]
    except FileNotFoundError:
        return [f"{path.name} is missing"]
    except OSError as error:
        return [f"{path.name} cannot be read ({error.strerror or error})"]
    return []
