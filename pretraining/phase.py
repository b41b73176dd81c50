"""A further phase of training: the weights and the optimizer of another run's checkpoint, on other shards.

BERT is trained on short sequences first and on long ones later (Devlin et al. 2019, appendix A.2). What goes on is
the model and, if asked for, the optimizer's moments and its count of steps for the bias correction; shards, order,
batch, schedule, hyper-parameters and loss scaler are those of the new run. NVIDIA's BERT keeps the moments and
starts the count and the loss scaler anew; both are a choice here, and the loss scaler is always new.
"""

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import torch

from data_prep.errors import UserError
from data_prep.shards import TOKENIZER_FOLDER
from data_prep.tokenizer import Tokenizer
from pretraining.checkpoint import Checkpoints
from pretraining.distributed import World, gather_objects
from pretraining.loading import StartingPoint, check_tokenizer, recorded
from pretraining.manifest import (
    FOLDER,
    MANIFEST,
    NOT_OURS,
    Checkpoint,
    TrainState,
    checkpoint_folders,
    read_manifest,
)
from pretraining.model import BertConfig
from pretraining.repartition import (
    MOMENTS,
    WEIGHTS,
    load_files,
    load_optimizer,
    optimizer_state,
    repartitioned,
)


def phase_start(
    folder: Path, shard_set, run_folder: Path, *, dropout: float, next_sentence: bool
) -> StartingPoint:
    """Prepare to go on from the newest checkpoint in a run folder, or from the checkpoint in `folder`.

    A run that has a checkpoint already, and was started from the folder of this name, does not read it again.
    The files themselves are checked when the ranks are together (`load_phase`).

    Raises:
        UserError: there is no checkpoint, its model is another one, or the shards were made with another tokenizer.
    """
    changes = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    known = recorded("phase_from", folder, run_folder)
    if known:
        config = replace(BertConfig.from_dict(known[0]), **changes)
        _check_objectives(folder, config, next_sentence)
        return StartingPoint(config, None, known[1])
    checkpoint = _named_checkpoint(folder)
    run = checkpoint.path.parent.parent
    if run.resolve() == run_folder.resolve():
        raise UserError(f"--phase_from {folder}: this phase would write there too; give another --output")
    config = replace(BertConfig.from_dict(checkpoint.manifest["identity"]["model"]), **changes)
    _check_objectives(folder, config, next_sentence)
    tokenizer = run / TOKENIZER_FOLDER
    if not tokenizer.is_dir():
        raise UserError(
            f"{tokenizer}: found no tokenizer of the earlier phase; copy its shards' {TOKENIZER_FOLDER}/ there"
        )
    check_tokenizer("phase_from", Tokenizer(tokenizer), tokenizer, shard_set)
    files = json.dumps(checkpoint.manifest["files"], sort_keys=True).encode()
    note = f"phase {checkpoint.state.phase + 1}: goes on from {checkpoint.path}"
    return StartingPoint(config, None, hashlib.sha256(files).hexdigest(), (note,), checkpoint)


def _check_objectives(folder: Path, config: BertConfig, next_sentence: bool) -> None:
    if config.next_sentence != next_sentence:
        option = "give --no_next_sentence" if next_sentence else "leave --no_next_sentence out"
        has = "with" if config.next_sentence else "without"
        raise UserError(f"--phase_from {folder}: that run was trained {has} next sentences; {option}")


def _named_checkpoint(folder: Path) -> Checkpoint:
    """The checkpoint in the folder, or the newest one of the run folder, as far as its manifest can tell."""
    for path in [folder] if (folder / MANIFEST).is_file() else checkpoint_folders(folder):
        try:
            return Checkpoint(path.resolve(), read_manifest(path)[0])
        except NOT_OURS:
            continue
    raise UserError(
        f"--phase_from {folder}: found no checkpoint; expected a run folder (with {FOLDER}/) or a checkpoint folder "
        f"(with {MANIFEST})"
    )


def next_phase(checkpoint: Checkpoint, fresh: TrainState) -> TrainState:
    """The state at the start of the phase after a checkpoint: a data counter of its own, curves that go on."""
    before = checkpoint.state
    return replace(
        fresh,
        tokens=before.tokens,
        phase=before.phase + 1,
        earlier_steps=before.earlier_steps + before.step,
        earlier_samples=before.earlier_samples
        + before.step * checkpoint.manifest["identity"]["train_batch_size"],
    )


def load_phase(engine, checkpoint: Checkpoint, world: World, *, keep_moments: bool, keep_step: bool) -> None:
    """Load weights, and moments if asked for, into a new engine; of any number of ranks; a collective call.

    Args:
        engine: a DeepSpeed engine as for `repartition.load`, whose hyper-parameters and loss scaler stay.
        checkpoint: of the earlier phase.
        world: this rank.
        keep_moments: else they are zero.
        keep_step: whether the count of steps for the bias correction goes on with the moments; else it is 0.
    Raises:
        UserError: a byte of the checkpoint is not as it was written.
    """
    run = checkpoint.path.parent.parent
    Checkpoints(run, {}, world.rank, world.world_size, gather_objects, print).whole(checkpoint.path)
    load_files(engine, checkpoint, load_module_only=True, load_optimizer_states=False)
    theirs, ours = repartitioned(engine, checkpoint, world.rank), optimizer_state(engine)
    state = ours | {WEIGHTS: theirs[WEIGHTS]}
    if keep_moments:
        state[MOMENTS] = ours[MOMENTS] | {"state": theirs[MOMENTS]["state"]}
    load_optimizer(engine, world.rank, state)
    if engine.zero_optimization():
        engine.optimizer.update_lp_params()  # an earlier phase in 16 bits has rounded the model's own
    if keep_moments:
        _set_step(engine.optimizer.optimizer, theirs, keep_step)


def _set_step(optimizer: torch.optim.Optimizer, theirs: dict, keep: bool) -> None:
    """Torch's optimizers count in the state of each tensor, apex's and DeepSpeed's in the parameter group."""
    for group, saved in zip(optimizer.param_groups, theirs[MOMENTS]["param_groups"], strict=True):
        if "step" in saved:
            group["step"] = saved["step"] if keep else 0
        for parameter in group["params"]:
            count = optimizer.state[parameter].get("step")
            if count is not None and not keep:
                optimizer.state[parameter]["step"] = count * 0
