"""What a preparation of shards is: its settings, its plan and the fingerprint that every result carries.

The plan is made once, from the inputs and the settings, and written down; every worker and every restart reads
it. Number and content of the tasks come from the input bytes alone.
"""

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from importlib.metadata import version
from itertools import zip_longest
from pathlib import Path

from data_prep.errors import UserError
from data_prep.inputs import InputFile, InputSplit, ReadOptions, find_inputs, split_inputs
from data_prep.instances import InstanceSettings
from data_prep.masking import MaskPolicy
from data_prep.shards import (
    FORMAT_VERSION,
    MANIFEST,
    SPLITS,
    TOKENIZER_FOLDER,
    WORK_FOLDER,
    ShardSet,
    canonical_json,
    write_atomically,
)
from data_prep.tokenizer import Tokenizer

PLAN = "plan.json"
# Everything whose version can change the bytes of a shard.
LIBRARIES = ("numpy", "sentencepiece", "sentencex", "mwparserfromhell", "webdataset", "safetensors")


@dataclass(frozen=True)
class ShardSettings:
    """Everything that decides what the shards hold, but for the inputs and the tokenizer.

    Attributes:
        read: how inputs are read.
        instances: what instances look like.
        masked_lm_prob: share of the tokens that static masks predict.
        max_predictions: bound per instance; None for no bound.
        eval_fraction: share of the documents that is held out for evaluation, chosen by hash.
        split_bytes: input bytes per tokenize task.
        bucket_bytes: input bytes per instances task; a bucket has to fit in memory.
    """

    read: ReadOptions = field(default_factory=ReadOptions)
    instances: InstanceSettings = field(default_factory=InstanceSettings)
    masked_lm_prob: float = 0.15
    max_predictions: int | None = None
    eval_fraction: float = 0.01
    split_bytes: int = 64 << 20
    bucket_bytes: int = 64 << 20


def held_out(digest: bytes, eval_fraction: float) -> bool:
    """Whether the document with this hash belongs to evaluation: a function of its text alone.

    The sets for two fractions are nested, so a tokenizer that left out more also left out these.
    """
    return int.from_bytes(digest[8:], "big") < eval_fraction * 2.0**64


class Plan:
    """What is to be done in a work folder; all processes of one preparation read the same plan."""

    def __init__(self, output: Path, content: dict):
        self.output = output
        self.work = output / WORK_FOLDER
        self.content = content
        self.fingerprint = hashlib.sha256(canonical_json(content).encode()).hexdigest()
        self.settings = _settings_from(content["settings"])
        self.inputs = [InputFile(**file) for file in content["inputs"]]
        self.splits = [InputSplit(**split) for split in content["splits"]]
        self.buckets = {split: content["buckets"][split] for split in SPLITS}

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, as it was copied beside the shards."""
        return Tokenizer(self.output / TOKENIZER_FOLDER)

    @cached_property
    def policy(self) -> MaskPolicy:
        """How static masks are drawn."""
        return MaskPolicy.for_tokenizer(
            self.content["tokenizer"],
            rate=self.settings.masked_lm_prob,
            max_predictions=self.settings.max_predictions,
        )

    def token_file(self, task: int) -> Path:
        """Result of a tokenize task."""
        return self.work / f"tokens-{task:06d}.safetensors"

    def entry_file(self, split: str, group: int) -> Path:
        """Manifest entry of a finished shard."""
        return self.work / f"{split}-{group:06d}.json"


def _settings_from(values: dict) -> ShardSettings:
    rest = {name: value for name, value in values.items() if name not in ("read", "instances")}
    return ShardSettings(ReadOptions(**values["read"]), InstanceSettings(**values["instances"]), **rest)


def make_plan(inputs: list[str], tokenizer_folder: Path, output: Path, settings: ShardSettings) -> Plan:
    """Plan the work that makes these shards in `output`; writes nothing.

    Raises:
        UserError: nothing to read, or a tokenizer that has seen held-out documents.
    """
    tokenizer = Tokenizer(tokenizer_folder)
    _check_tokenizer(tokenizer, settings)
    # Absolute: array elements and restarts may begin in other folders.
    files = [replace(file, path=os.path.abspath(file.path)) for file in find_inputs(inputs, settings.read)]
    files.sort(key=lambda file: file.path)
    total = sum(file.size for file in files)
    buckets = max(1, -(-total // settings.bucket_bytes))
    content = {
        "format_version": FORMAT_VERSION,
        "settings": asdict(settings),
        "inputs": [asdict(file) for file in files],
        "splits": [asdict(split) for split in split_inputs(files, settings.split_bytes)],
        "buckets": {"train": buckets, "eval": max(1, round(buckets * settings.eval_fraction))},
        "tokenizer": tokenizer.describe(),
        "versions": library_versions(),
    }
    return Plan(output, json.loads(json.dumps(content)))


def begin_plan(plan: Plan, tokenizer_folder: Path) -> None:
    """Write a plan and the tokenizer's copy to the output folder, or find that the same plan is there already.

    Raises:
        UserError: the folder holds other work.
    """
    path = plan.work / PLAN
    if path.is_file():
        _check_same(plan.output, json.loads(path.read_text(encoding="utf-8")), plan.content)
        return
    leftover = next(plan.output.glob("*.tar"), None)
    if leftover:
        raise UserError(
            f"{leftover}: a shard without a manifest or a plan; choose another --output or delete {plan.output}"
        )
    plan.work.mkdir(parents=True, exist_ok=True)
    _copy_tokenizer(Tokenizer(tokenizer_folder), plan.output / TOKENIZER_FOLDER)
    write_atomically(path, canonical_json(plan.content).encode())


def load_plan(output: Path, settings: ShardSettings) -> Plan:
    """The plan that `begin_plan` wrote.

    Raises:
        UserError: there is none, or it was made with other settings.
    """
    path = output / WORK_FOLDER / PLAN
    if not path.is_file():
        raise UserError(f"{path}: there is no plan here yet; run `shards` with `--only plan` first")
    content = json.loads(path.read_text(encoding="utf-8"))
    _check_same(output, {"settings": content["settings"]}, {"settings": asdict(settings)})
    return Plan(output, content)


def library_versions() -> dict[str, str]:
    """Versions of everything that can change the bytes of a shard."""
    return {name: version(name) for name in LIBRARIES} | {"python": ".".join(map(str, sys.version_info[:2]))}


def _check_tokenizer(tokenizer: Tokenizer, settings: ShardSettings) -> None:
    trained_with = tokenizer.description.get("eval_fraction", settings.eval_fraction)
    if trained_with < settings.eval_fraction:
        raise UserError(
            f"--eval_fraction {settings.eval_fraction}: the tokenizer in {tokenizer.folder} was trained with "
            f"--eval_fraction {trained_with} and has seen documents that would be held out now; "
            "train it again with the same fraction"
        )


def _copy_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in tokenizer.files():
        write_atomically(folder / name, (tokenizer.folder / name).read_bytes())


def _check_same(output: Path, there: dict, now: dict) -> None:
    if there != now:
        raise UserError(
            f"{output}: it holds the unfinished work of another command ({differences(there, now)}); "
            f"give the same settings again, choose another --output, or delete {output}"
        )


def differences(old: object, new: object, name: str = "") -> str:
    """The keys in which two nested values differ, with both values, for a message.

    Lists are those of files: the first file that differs is named.
    """
    if isinstance(old, dict) and isinstance(new, dict):
        parts = [
            differences(old.get(key), new.get(key), f"{name}.{key}" if name else key)
            for key in sorted(old.keys() | new.keys())
            if old.get(key) != new.get(key)
        ]
        return ", ".join(parts)
    if isinstance(old, list) and isinstance(new, list):
        first = next(b or a for a, b in zip_longest(old, new) if a != b)
        return f"{name}: {first.get('path', first.get('name'))} is not the same"
    return f"{name}: {old} there, {new} now"


def finished_shards(plan: Plan) -> dict | None:
    """The manifest in the plan's folder if the same shards are finished there, None if there are none.

    What a command that was killed behind its last write has left is removed.

    Raises:
        UserError: shards with other settings are there.
    """
    if not (plan.output / MANIFEST).is_file():
        return None
    manifest = ShardSet.open(plan.output).manifest
    there = {name: manifest[name] for name in ("settings", "inputs", "tokenizer")}
    now = {
        "settings": plan.content["settings"],
        "inputs": input_names(plan.inputs),
        "tokenizer": plan.content["tokenizer"],
    }
    if there != now:
        raise UserError(
            f"{plan.output}: it holds shards that were made with other settings ({differences(there, now)}); "
            "choose another --output or delete the folder"
        )
    shutil.rmtree(plan.work, ignore_errors=True)
    return manifest


def input_names(files: Sequence[InputFile]) -> list[dict]:
    """Inputs as results name them: without the machine's own folders, so that copies give equal bytes."""
    paths = [os.path.abspath(file.path) for file in files]  # relative and absolute ones may be mixed
    common = os.path.commonpath([os.path.dirname(path) for path in paths])
    return [
        {"name": os.path.relpath(path, common), "bytes": file.size}
        for path, file in zip(paths, files, strict=True)
    ]
