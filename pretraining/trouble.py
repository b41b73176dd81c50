"""Trouble in training: what counts as such, what is kept of it, and the way back to a good checkpoint.

Every rule is a function of numbers that all ranks share (sums over the ranks, DeepSpeed's agreed overflow flag), so
all ranks find the same trouble at the same step, whichever of them has the number that is not finite.

A step whose loss or gradient is not finite is skipped when the run has gone back. Where the trouble is a row of bad
steps (a loss scale at its floor, a sustained spike), the update before the row is skipped too: the first bad loss
was computed with the weights that it made (Chowdhery et al. 2022, "PaLM", section 5.1, skips in the same way).
"""

import itertools
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from data_prep.shards import write_atomically
from pretraining.distributed import AgreedError, all_true, gather_objects
from pretraining.manifest import TrainState
from pretraining.repartition import load

FOLDER = "trouble"
SPIKE_STEPS = 5
SPIKE_WINDOW = 95
SPIKE_RISE = 0.1
HISTORY = 120  # steps that TrainState remembers; skipped updates, which have no loss, are among them


class TroubleError(Exception):
    """Training cannot go on from here; all ranks raise it together.

    Args:
        reason: a phrase, like "the loss is nan".
        step: at which it was found.
        first_step: the first of the steps that are to be skipped; `step` is the last.
        start, stop: the positions of their global batches.
    """

    def __init__(self, reason: str, step: int, first_step: int, start: int, stop: int):
        super().__init__(f"step {step:,}: {reason}")
        self.reason = reason
        self.step = step
        self.first_step = first_step
        self.start = start
        self.stop = stop


def loss_scale_cannot_fall(scaler) -> bool:
    """Whether an overflow in the coming step finds no smaller loss scale; always so without dynamic scaling.

    DeepSpeed would raise an error in the middle of the step: its scaler is told not to, and the overflow is found
    here after the step, which has left the weights as they were.
    """
    if not scaler.dynamic:
        return True
    scaler.raise_error_at_min_scale = False
    return scaler.cur_scale == scaler.min_scale and 1 in (scaler.delayed_shift, scaler.cur_hysteresis)


def find_trouble(state: TrainState, loss: float, scaler, cannot_fall: bool, spike_factor: float) -> None:
    """Judge the newest step of the history; the same on every rank.

    An update that is skipped because a gradient overflowed is what dynamic loss scaling expects now and then, and
    the loss may be infinite then. Anything else that is not finite is trouble.

    Args:
        state: with the step in its history.
        loss: of the step; the history has None if its update was skipped.
        scaler: DeepSpeed's.
        cannot_fall: what `loss_scale_cannot_fall` said before the step.
        spike_factor: see `is_spike`; 0 for no such rule.
    Raises:
        TroubleError: what was found.
    """
    skipped = state.history[-1][1] is None
    if skipped and cannot_fall and scaler.dynamic:
        row = next((i for i, (_, past) in enumerate(reversed(state.history)) if past is not None), HISTORY)
        reason = f"gradients overflow at the smallest loss scale, {scaler.min_scale:g} (min_loss_scale)"
        raise _trouble(state, reason, row + 1)
    if skipped and cannot_fall:
        raise _trouble(state, f"a gradient is not finite (the loss is {loss:g})", 1)
    if not skipped and not math.isfinite(loss):
        raise _trouble(state, f"the loss is {loss}", 1)
    places = [place for place, (_, past) in enumerate(state.history) if past is not None]
    losses = [state.history[place][1] for place in places]
    if spike_factor and not skipped and is_spike(losses, spike_factor):
        before = statistics.median(losses[:-SPIKE_STEPS])
        reason = f"the loss is {loss:.4f} after a median of {before:.4f}, and has been that high for {SPIKE_STEPS} steps"
        raise _trouble(state, reason, len(state.history) - places[-SPIKE_STEPS] + 1)


def is_spike(losses: Sequence[float], factor: float) -> bool:
    """Whether the newest SPIKE_STEPS losses all stand out from the SPIKE_WINDOW losses before them.

    Each must lie more than `factor` median absolute deviations, and more than SPIKE_RISE of the median, above the
    median. One outlier is no spike, nor is a slow rise, whose window rises too.
    """
    if len(losses) < SPIKE_WINDOW + SPIKE_STEPS:
        return False
    window, newest = losses[-SPIKE_WINDOW - SPIKE_STEPS : -SPIKE_STEPS], losses[-SPIKE_STEPS:]
    median = statistics.median(window)
    deviation = statistics.median(abs(loss - median) for loss in window)
    return min(newest) > median + max(factor * deviation, SPIKE_RISE * median)


def check_weights(engine, state: TrainState) -> None:
    """Raise TroubleError if a number of the model or its optimizer is not finite; a collective call, before a save.

    The last update shows in the next loss only, and until then it would be in the checkpoint. It takes one pass over
    what is about to be copied.
    """
    zero = engine.optimizer
    moments = [
        value
        for entries in zero.optimizer.state.values()
        for value in entries.values()
        if torch.is_tensor(value)
    ]
    tensors = [*engine.module.parameters(), *zero.single_partition_of_fp32_groups, *moments]
    # The extremes are NaN if one number is, and are found many times faster than isfinite().all().
    extremes = [torch.stack(tensor.detach().aminmax()).float() for tensor in tensors if tensor.numel()]
    finite = torch.stack([pair.to(engine.device) for pair in extremes]).isfinite().all()
    if not all_true(bool(finite)):
        raise _trouble(state, "a weight or moment is not finite after the update", 1)


def _trouble(state: TrainState, reason: str, steps: int) -> TroubleError:
    """Trouble whose last `steps` steps are to be skipped, as far as the history goes back."""
    steps = min(steps, len(state.history))
    start = state.history[-steps][0]
    return TroubleError(reason, state.step, state.step - steps + 1, start, state.consumed)


def skip(state: TrainState, trouble: TroubleError) -> TrainState:
    """The state of a checkpoint before the trouble, from which a run goes on without the bad batches."""
    merged: list[tuple[int, int]] = []
    for start, stop in sorted([*state.skipped_ranges, (trouble.start, trouble.stop)]):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], stop)
        else:
            merged.append((start, stop))
    return replace(state, skipped_ranges=merged, rollbacks=state.rollbacks + 1)


def go_back(trainer, trouble: TroubleError, run_folder: Path, max_rollbacks: int) -> str:
    """Keep the evidence, load the newest checkpoint from before the trouble, and skip its batches; collective.

    Returns:
        One sentence about it.
    Raises:
        AgreedError: there is no checkpoint to go back to, or the run has gone back too often.
    """
    trainer.publish()
    world, checkpoints, rollbacks = trainer.world, trainer.checkpoints, trainer.state.rollbacks
    found = trainer.last_local_sums()
    bad_ranks = [rank for rank, sums in enumerate(gather_objects(found)) if not all(map(math.isfinite, sums))]
    evidence = run_folder / FOLDER
    if world.rank == 0:
        try:
            write_evidence(evidence, trainer, trouble, bad_ranks)
        except OSError as error:
            print(f"{evidence}: the evidence could not be written ({error})", flush=True)
    advice = "lower the learning rate, lengthen the warm-up or look at the evidence"
    if rollbacks >= max_rollbacks:
        raise AgreedError(
            f"{trouble}: the run has diverged, and has gone back {rollbacks} times, as often as --max_rollbacks allows; "
            f"the checkpoints are good, the evidence is in {evidence}; {advice}, with another --output, or go on with "
            f"--max_rollbacks {rollbacks + 1}"
        )
    checkpoint = checkpoints.newest_whole(before=trouble.first_step)
    if checkpoint is None:
        raise AgreedError(
            f"{trouble}: the run has diverged, and no checkpoint from before step {trouble.first_step:,} is there to go "
            f"back to; the evidence is in {evidence}; {advice}, with another --output or a shorter --save_interval"
        )
    # What was skipped since that checkpoint was made stays skipped.
    state = replace(
        checkpoint.state, skipped_ranges=trainer.state.skipped_ranges, rollbacks=trainer.state.rollbacks
    )
    state = skip(state, trouble)
    checkpoints.go_back(checkpoint, state)
    load(trainer.engine, checkpoint, world.rank, world.world_size)
    trainer.restart(state)
    return (
        f"{trouble}; the run has gone back to step {state.step:,} and leaves out the batches of "
        f"{_steps(trouble)} (rollback {state.rollbacks} of {max_rollbacks})"
    )


def write_evidence(folder: Path, trainer, trouble: TroubleError, bad_ranks: list[int]) -> Path:
    """Write what is known about the trouble to FOLDER/step-N.json (or step-N-2.json …), on rank 0.

    Numbers that are not finite are null. Gradients are not there any more: DeepSpeed frees them in its step, so only
    their norm is kept.

    Args:
        folder: for it.
        trainer: at the step of the trouble, with the weights as they are.
        trouble: what was found.
        bad_ranks: those whose own sums of the last step are not finite; one alone may be a broken device.
    """
    state, engine = trainer.state, trainer.engine
    oldest = state.step - len(state.history) + 1
    content = {
        "step": trouble.step,
        "reason": trouble.reason,
        "skipped_steps": [trouble.first_step, trouble.step],
        "positions": _left_between(trouble.start, trouble.stop, state.skipped_ranges),
        "losses": [[oldest + i, _finite(loss)] for i, (_, loss) in enumerate(state.history)],
        "gradient_norm": _finite(float(engine.get_global_grad_norm() or 0.0)),
        "loss_scale": float(engine.optimizer.loss_scale),
        "ranks_not_finite": bad_ranks,
        "rollbacks": state.rollbacks,
        "parameter_norms": {
            name: _finite(float(parameter.detach().float().norm()))
            for name, parameter in engine.module.named_parameters()
        },
    }
    folder.mkdir(exist_ok=True)
    names = (f"step-{trouble.step}{f'-{n}' if n > 1 else ''}.json" for n in itertools.count(1))
    path = next(folder / name for name in names if not (folder / name).exists())
    write_atomically(path, (json.dumps(content, indent=1) + "\n").encode())
    return path


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _left_between(start: int, stop: int, skipped_ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The positions in [start, stop) that were trained: those that no earlier skipped range holds."""
    left = []
    for first, last in [*skipped_ranges, (stop, stop)]:
        if start < min(first, stop):
            left.append((start, min(first, stop)))
        start = max(start, last)
    return left


def _steps(trouble: TroubleError) -> str:
    if trouble.first_step == trouble.step:
        return f"step {trouble.step:,}"
    return f"steps {trouble.first_step:,} to {trouble.step:,}"
