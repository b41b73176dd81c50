"""Trained weights from wherever they lie: a run folder, one of its checkpoints, or a Hugging Face folder.

What comes out is always the same: float32 tensors under our names, the configuration, and the tokenizer.
"""

import contextlib
import hashlib
import io
import json
import pickle
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from data_prep.errors import UserError
from data_prep.shards import TOKENIZER_FOLDER
from data_prep.tokenizer import Tokenizer
from pretraining.checkpoint import Checkpoints, whole_checkpoint
from pretraining.huggingface import (
    HEADS,
    absent_heads,
    config_for_weights,
    from_huggingface,
    standard_layout,
)
from pretraining.manifest import (
    FOLDER,
    MANIFEST,
    MODEL_STATES,
    NOT_OURS,
    Checkpoint,
    checkpoint_folders,
    read_manifest,
)
from pretraining.model import BertConfig

CONFIG_FILE = "config.json"
SAFETENSORS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLE_FILE = "pytorch_model.bin"
EXPECTED = (
    f"a run folder (with {FOLDER}/), a checkpoint folder (with {MANIFEST}) or a Hugging Face folder "
    f"(with {CONFIG_FILE} and {SAFETENSORS_FILE})"
)
# Where tokenizers that agree on every piece can still differ: case, accents, width, spaces, unknown characters.
PROBE = "The Quick BROWN fox's ﬁrst Élan,  ＡＢＣ ½ 한국어를 배우다 学习 \u200bnaïve☃"


@dataclass(frozen=True)
class Pretrained:
    """A trained model on the CPU.

    Attributes:
        config: of the model; next_sentence says whether there is a pooler.
        state_dict: float32, names and shapes of our BertForPreTraining (the vocabulary padded); heads that the
            source lacks are absent.
        tokenizer_folder: what Tokenizer opens.
        source: a phrase for messages, like "checkpoint runs/x/checkpoints/step-00000300".
    """

    config: BertConfig
    state_dict: dict[str, Tensor]
    tokenizer_folder: Path
    source: str

    def open_tokenizer(self) -> Tokenizer:
        """The tokenizer, checked against the model's vocabulary."""
        tokenizer = Tokenizer(self.tokenizer_folder)
        if tokenizer.vocab_size > self.config.vocab_size:
            raise UserError(
                f"{self.tokenizer_folder}: the tokenizer has {tokenizer.vocab_size:,} pieces and the model of "
                f"{self.source} only {self.config.vocab_size:,}; put the tokenizer there that it was trained with"
            )
        return tokenizer


def load_pretrained(path: str | Path) -> Pretrained:
    """Load the weights of a run folder (its newest whole checkpoint), a checkpoint or a Hugging Face folder.

    Raises:
        UserError: it is none of these, or is damaged.
    """
    path = Path(path)
    if not path.is_dir():
        found = "a file" if path.exists() else "nothing there"
        raise UserError(f"{path}: found {found}; expected {EXPECTED}")
    if (path / FOLDER).is_dir():
        return _from_run(path)
    if (path / MANIFEST).is_file():
        return _from_checkpoint(whole_checkpoint(path))
    if (path / CONFIG_FILE).is_file():
        return _from_huggingface(path)
    raise UserError(f"{path}: found {_contents(path)}; expected {EXPECTED}")


def _contents(folder: Path) -> str:
    names = sorted(path.name for path in folder.iterdir())
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"a folder with {', '.join(names[:5])}{more}" if names else "an empty folder"


def _say(line: str) -> None:
    # Not on stdout: there a program's own output goes, which another program may read.
    print(line, file=sys.stderr)


def _from_run(folder: Path) -> Pretrained:
    alone = Checkpoints(folder, {}, 0, 1, lambda value: [value], _say)
    checkpoint = alone.newest_whole()
    if checkpoint is None:
        raise UserError(f"{folder / FOLDER}: found no checkpoint; train the run until it has saved one")
    return _from_checkpoint(checkpoint)


def _from_checkpoint(checkpoint: Checkpoint) -> Pretrained:
    path = checkpoint.path
    try:
        model, precision = (
            checkpoint.manifest["identity"]["model"],
            checkpoint.manifest["identity"]["precision"],
        )
    except (KeyError, TypeError):
        raise UserError(f"{path / MANIFEST}: it names no model and precision; expected {EXPECTED}") from None
    tokenizer_folder = path.resolve().parent.parent / TOKENIZER_FOLDER
    if not tokenizer_folder.is_dir():
        raise UserError(
            f"{tokenizer_folder}: found no tokenizer beside the checkpoints; copy the folder {TOKENIZER_FOLDER}/ of the "
            "shards there that the run was trained on"
        )
    read = _read_module if precision == "fp32" else _read_masters
    state_dict = {name: tensor.detach().float() for name, tensor in read(path).items()}
    return Pretrained(BertConfig.from_dict(model), state_dict, tokenizer_folder, f"checkpoint {path}")


def _read_module(path: Path) -> dict[str, Tensor]:
    states = torch.load(path / MODEL_STATES, map_location="cpu", weights_only=True)
    return states["module"]


def _read_masters(path: Path) -> dict[str, Tensor]:
    """The optimizer's float32 weights out of the ranks' partitions; the module's are rounded to 16 bits.

    DeepSpeed unpickles its own classes there, as it does when a run goes on.
    """
    from pretraining.distributed import import_deepspeed

    import_deepspeed()
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    # It prints each file and a progress bar.
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return get_fp32_state_dict_from_zero_checkpoint(str(path.parent), tag=path.name)


def _from_huggingface(folder: Path) -> Pretrained:
    values = _read_object(folder / CONFIG_FILE)
    weights, ignored = standard_layout(_read_weights(folder))
    try:
        config = config_for_weights(values, weights)
        state_dict = from_huggingface(weights, config)
    except UserError as error:
        raise UserError(f"{folder}: {error}") from None
    if ignored:
        more = f" and {len(ignored) - 3} more" if len(ignored) > 3 else ""
        _say(f"{folder}: weights for other tasks are left out: {', '.join(ignored[:3])}{more}")
    state_dict = {name: tensor.float() for name, tensor in state_dict.items()}
    return Pretrained(config, state_dict, folder, f"folder {folder}")


def _read_object(path: Path) -> dict:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path}: this is not JSON ({error}); copy it again from a good place") from None
    if not isinstance(values, dict):
        raise UserError(f"{path}: expected a JSON object; copy it again from a good place")
    return values


def _read_weights(folder: Path) -> dict[str, Tensor]:
    if (folder / SAFETENSORS_FILE).is_file():
        return _read_safetensors(folder / SAFETENSORS_FILE)
    if (folder / INDEX_FILE).is_file():
        return _read_sharded(folder)
    if (folder / PICKLE_FILE).is_file():
        return _read_pickle(folder / PICKLE_FILE)
    raise UserError(
        f"{folder}: found {_contents(folder)}, so no weights; expected {SAFETENSORS_FILE}, {INDEX_FILE} with its parts, "
        f"or {PICKLE_FILE}"
    )


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: it cannot be read ({error}); copy it again from a good place") from None


def _read_sharded(folder: Path) -> dict[str, Tensor]:
    index = _read_object(folder / INDEX_FILE).get("weight_map")
    if not isinstance(index, dict) or not index:
        raise UserError(f"{folder / INDEX_FILE}: it has no weight_map; copy it again from a good place")
    weights = {}
    for name in sorted(set(map(str, index.values()))):
        # A name with a path in it could lead anywhere.
        if Path(name).name != name or not (folder / name).is_file():
            raise UserError(
                f"{folder / name}: {INDEX_FILE} names this part and it is not there; copy it there"
            )
        weights |= _read_safetensors(folder / name)
    if weights.keys() != index.keys():
        differing = sorted(weights.keys() ^ index.keys())[0]
        raise UserError(f"{folder / INDEX_FILE}: it and its parts disagree on {differing}; copy them again")
    return weights


def _read_pickle(path: Path) -> dict[str, Tensor]:
    try:
        weights = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            f"{path}: it is not a file of plain weights ({reason}); use {SAFETENSORS_FILE}"
        ) from None
    if not isinstance(weights, dict) or not all(isinstance(value, Tensor) for value in weights.values()):
        raise UserError(f"{path}: expected names and tensors only; use {SAFETENSORS_FILE}")
    return weights


@dataclass(frozen=True)
class StartingPoint:
    """What a run that starts from other weights takes over.

    Attributes:
        config: of the model to train.
        weights: by our names; heads that are absent start fresh. None if the run goes on from a checkpoint.
        sha256: of the weights that the run started from.
        notes: lines for the user.
        checkpoint: of an earlier phase, whose weights are loaded with its optimizer (phase.py).
    """

    config: BertConfig
    weights: dict[str, Tensor] | None
    sha256: str
    notes: tuple[str, ...] = ()
    checkpoint: Checkpoint | None = None


def starting_point(
    folder: Path, shard_set, run_folder: Path, *, dropout: float, next_sentence: bool
) -> StartingPoint:
    """Prepare to train on from the weights in `folder`.

    A run that has a checkpoint already, and was started from the folder of this name, does not read it again:
    it may have moved on or be gone.

    Raises:
        UserError: the folder cannot be read, or the shards were not made with its tokenizer.
    """
    changes = {
        "hidden_dropout_prob": dropout,
        "attention_probs_dropout_prob": dropout,
        "next_sentence": next_sentence,
    }
    known = recorded("init_from", folder, run_folder)
    if known:
        model, sha256 = known
        return StartingPoint(replace(BertConfig.from_dict(model), **changes), None, sha256)
    pretrained = load_pretrained(folder)
    check_tokenizer("init_from", pretrained.open_tokenizer(), pretrained.tokenizer_folder, shard_set)
    config = replace(pretrained.config, **changes)
    weights = pretrained.state_dict
    notes = [f"weights start from {pretrained.source}"]
    wanted = tuple(HEADS) if next_sentence else ("masked_lm_head",)
    fresh = [head for head in absent_heads(weights) if head in wanted]
    if fresh:
        notes.append(f"{', '.join(fresh)}: not among these weights, so random at the start")
    dropped = [head for head in HEADS if head not in (*wanted, *absent_heads(weights))]
    if dropped:
        notes.append(f"{', '.join(dropped)}: left out, as --no_next_sentence asks")
    return StartingPoint(config, weights, weights_sha256(weights), tuple(notes))


def recorded(option: str, folder: Path, run_folder: Path) -> tuple[dict, str] | None:
    """Model and hash of what the run started from, as its newest readable checkpoint has them.

    None if there is no checkpoint, or if this option named another folder at the last start.
    """
    try:
        settings = json.loads((run_folder / "settings.json").read_text(encoding="utf-8"))
        if settings["arguments"][option] != str(folder):
            return None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    for path in checkpoint_folders(run_folder):
        with contextlib.suppress(*NOT_OURS):
            identity = read_manifest(path)[0]["identity"]
            if identity[option]:
                return identity["model"], identity[option]
    return None


def check_tokenizer(option: str, theirs: Tokenizer, folder: Path, shard_set) -> None:
    """Refuse shards that were not made with the tokenizer in `folder`, which came with an option of this name."""
    ours = Tokenizer(shard_set.tokenizer_folder)
    if theirs.fingerprint == ours.fingerprint or _same_ids(theirs, ours):
        return
    raise UserError(
        f"--{option} {folder}: the shards in {shard_set.folder} were made with another tokenizer; "
        "make shards with this one: python data_prep/run.py shards --input TEXT --output FOLDER "
        f"--tokenizer {folder}"
    )


def _same_ids(left: Tokenizer, right: Tokenizer) -> bool:
    if (left.vocab_size, left.special_ids) != (right.vocab_size, right.special_ids):
        return False
    everything = range(left.vocab_size)
    return left.pieces(everything) == right.pieces(everything) and all(
        np.array_equal(a, b) for a, b in zip(left.encode([PROBE]), right.encode([PROBE]), strict=True)
    )


def weights_sha256(weights: dict[str, Tensor]) -> str:
    """One hash of names, shapes and values, the same from whatever files the weights came."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        tensor = weights[name].contiguous()
        digest.update(f"{name} {list(tensor.shape)}\n".encode())
        digest.update(tensor.numpy().data)
    return digest.hexdigest()
