"""Learning-rate schedules as pure functions of the step, and the "scheduler" of a DeepSpeed JSON.

Three types are DeepSpeed's own, value for value; WarmupPolynomialLR, WarmupExponentialLR and WarmupStableDecayLR are
written in the same style. The optimizer's lr is the peak of every schedule, and stands in the JSON once.

Updates are numbered, from `first_step`, and a rate is a function of the number. DeepSpeed's schedules and the
original BERT number from 0: the first update runs at the start of the warm-up, the last one just above the end of
the decay. NVIDIA's BERT numbers from 1: the first update is above the start, the last one at the very end.
"""

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any, Literal

from pydantic import Field

from data_prep.errors import UserError
from pretraining.strict_json import LARGEST, Errors, StrictModel, check

MOST_STEPS = 10**12
_DEEPSPEEDS_WARMUP = 1000  # steps, where a schedule of its own says nothing
_SHAPES: dict[str, Callable[[float], float]] = {
    "linear": lambda progress: 1 - progress,
    "1-sqrt": lambda progress: 1 - math.sqrt(progress),
    "cosine": lambda progress: (1 + math.cos(math.pi * progress)) / 2,
}


class ScheduleSettings(StrictModel):
    """ "params" of the JSON's "scheduler"; lengths are in optimizer steps.

    `warmup_max_lr` is the optimizer's lr once the file has been read. `total_num_steps` is None where the
    schedule has no end, or gets it from the length of the run.
    """

    warmup_max_lr: float | None = Field(None, gt=0)
    total_num_steps: None = None


class ConstantSchedule(ScheduleSettings):
    """No "scheduler" entry: the optimizer's lr from the first step on."""


class WarmupSchedule(ScheduleSettings):
    """A warm-up, of `warmup_num_steps` or else `warmup_ratio` of the run (not rounded), then the peak or a decay."""

    warmup_num_steps: int | None = Field(None, gt=0, le=MOST_STEPS)
    warmup_ratio: None = None
    warmup_type: Literal["log", "linear"] = "log"
    first_step: Literal[0] = 0


class WarmupLR(WarmupSchedule):
    """DeepSpeed's: a warm-up, then constant."""

    warmup_min_lr: float = Field(0.0, ge=0)


class DecayingSchedule(WarmupSchedule):
    """A schedule with an end."""

    warmup_ratio: float | None = Field(None, gt=0, lt=1)
    total_num_steps: int | None = Field(None, gt=0, le=MOST_STEPS)


class WarmupDecayLR(DecayingSchedule):
    """DeepSpeed's: a warm-up, then a linear decay from there to `warmup_min_lr` at total_num_steps."""

    warmup_min_lr: float = Field(0.0, ge=0)


class WarmupCosineLR(DecayingSchedule):
    """DeepSpeed's: a warm-up, then half a cosine, which is a step ahead; the min_ratios are of the optimizer's lr."""

    warmup_min_ratio: float = Field(0.0, ge=0, le=1)
    cos_min_ratio: float = Field(0.0001, ge=0, le=1)


class NumberedSchedule(DecayingSchedule):
    """A linear warm-up from 0, then a decay to `decay_min_ratio` of the optimizer's lr at total_num_steps."""

    warmup_type: Literal["linear"] = "linear"
    first_step: Literal[0, 1] = 0
    decay_min_ratio: float = Field(0.0, ge=0, lt=1)


class WarmupPolynomialLR(NumberedSchedule):
    """After a warm-up over w of N steps, update n runs at a power of what is left:

    - `rebase` true: lr · ((N − n) / (N − w))^degree, from lr at the end of the warm-up;
    - `rebase` false: lr · (1 − n / N)^degree, wherever the warm-up ends, so that the rate falls there. With degree
      0.5 and first_step 1 it is the PolyWarmUpScheduler of NVIDIA's BERT (DeepLearningExamples, schedulers.py), with
      degree 1 and first_step 0 the original BERT (google-research/bert, optimization.py).
    """

    degree: float = Field(1.0, gt=0)
    rebase: bool = True


class WarmupExponentialLR(DecayingSchedule):
    """After a warm-up at lr_offset + lr · (n / w)^warmup_degree, update n runs at lr_offset + lr · rate^((n − w) / k).

    The rate is `decay_rate` and k `decay_step`, which are the same in a shorter run. With warmup_degree 2 it is the
    schedule "EE" of DeepSpeed's BERT (DeepSpeedExamples, bing_bert), whose offset comes on top of the peak too.
    """

    warmup_type: Literal["linear"] = "linear"
    warmup_degree: float = Field(1.0, gt=0)
    decay_rate: float = Field(gt=0, lt=1)
    decay_step: int = Field(gt=0, le=MOST_STEPS)
    lr_offset: float = Field(0.0, ge=0, le=LARGEST)


class WarmupStableDecayLR(NumberedSchedule):
    """A warm-up, then constant, then a decay over the last `decay_num_steps`, or `decay_ratio` of the run.

    Hu et al. 2024, "MiniCPM", section 4; the shape 1 − √progress is from Hägele et al. 2024, "Scaling Laws and
    Compute-Optimal Training Beyond Fixed Training Durations", section 3.
    """

    decay_num_steps: int | None = Field(None, gt=0, le=MOST_STEPS)
    decay_ratio: float | None = Field(None, gt=0, lt=1)
    decay_type: Literal["linear", "1-sqrt", "cosine"] = "linear"


_DEEPSPEEDS = (WarmupLR, WarmupDecayLR, WarmupCosineLR)
_OURS = (WarmupPolynomialLR, WarmupExponentialLR, WarmupStableDecayLR)
SCHEDULES = {kind.__name__: kind for kind in (*_DEEPSPEEDS, *_OURS)}


class _Scheduler(StrictModel):
    type: Literal[tuple(SCHEDULES)]
    params: dict[str, Any] = {}


def learning_rate(schedule: ScheduleSettings, step: int) -> float:
    """The learning rate of the update that follows `step` applied updates (0 for the first).

    Of DeepSpeed's types it is that of its scheduler at `last_batch_iteration = step`. Skipped updates do not count
    as steps. Beyond the end the rate stays what it is there.
    """
    peak = schedule.warmup_max_lr
    if not isinstance(schedule, WarmupSchedule):
        return peak
    if isinstance(schedule, DecayingSchedule) and schedule.total_num_steps is None:
        raise ValueError("a decaying schedule needs its end: make it with schedule_for")
    number, warmup = step + schedule.first_step, _warmup_steps(schedule)
    if isinstance(schedule, WarmupExponentialLR):
        return schedule.lr_offset + peak * _exponential(schedule, number, warmup)
    start, end = _start_and_end(schedule)
    if number < warmup:
        is_linear = schedule.warmup_type == "linear"
        rise = number / warmup if is_linear else math.log(number + 1) / math.log(warmup)
        return start + (peak - start) * min(1.0, rise)  # the log of a fraction of steps goes beyond it
    return end + (peak - end) * _left(schedule, number, warmup)


def _exponential(schedule: WarmupExponentialLR, number: int, warmup: float) -> float:
    if number < warmup:
        return (number / warmup) ** schedule.warmup_degree
    return schedule.decay_rate ** ((number - warmup) / schedule.decay_step)


def _start_and_end(schedule: WarmupSchedule) -> tuple[float, float]:
    """The rates at which the warm-up starts and the decay ends."""
    match schedule:
        case WarmupLR() | WarmupDecayLR():
            return schedule.warmup_min_lr, schedule.warmup_min_lr
        case WarmupCosineLR():
            ratios = schedule.warmup_min_ratio, schedule.cos_min_ratio
        case NumberedSchedule():
            ratios = 0.0, schedule.decay_min_ratio
    return ratios[0] * schedule.warmup_max_lr, ratios[1] * schedule.warmup_max_lr


def _left(schedule: WarmupSchedule, number: int, warmup: float) -> float:
    """The share, 1 to 0, of the way from the end of the decay up to the peak, for an update after the warm-up."""
    if isinstance(schedule, WarmupLR):
        return 1.0
    total = schedule.total_num_steps
    length = max(1, total - warmup)
    match schedule:
        case WarmupCosineLR():
            return _SHAPES["cosine"](min(1.0, (number - warmup + 1) / length))
        case WarmupPolynomialLR(rebase=False):
            return (1.0 - min(1.0, number / total)) ** schedule.degree
        case WarmupStableDecayLR():
            # Lengths that were rounded for a shorter run may overlap by a step.
            begin = max(warmup, total - _decay_steps(schedule))
            progress = 1.0 if number >= total else max(0.0, number - begin) / (total - begin or 1)
            return _SHAPES[schedule.decay_type](progress)
    degree = schedule.degree if isinstance(schedule, WarmupPolynomialLR) else 1.0
    return (max(0, total - number) / length) ** degree


def _warmup_steps(schedule: WarmupSchedule) -> float:
    steps = _steps(schedule.warmup_num_steps, schedule.warmup_ratio, schedule.total_num_steps)
    # DeepSpeed's floor: log(1) would divide by zero.
    return max(2, steps) if isinstance(schedule, _DEEPSPEEDS) else steps


def _decay_steps(schedule: WarmupStableDecayLR) -> float:
    return _steps(schedule.decay_num_steps, schedule.decay_ratio, schedule.total_num_steps)


def _steps(number: int | None, ratio: float | None, total: int | None) -> float:
    # Of the decimals as they are written: 7 % of 100 steps are 7, and not 7.000000000000001.
    return number if ratio is None else float(Fraction(str(ratio)) * total)


def schedule_for(schedule: ScheduleSettings, max_steps: int | None) -> tuple[ScheduleSettings, str | None]:
    """Fit the schedule to a run of `max_steps` steps (None: as long as the schedule itself).

    A decay ends with the run. Warm-up and decay keep their shares of the schedule, but what is written in steps is
    never made longer. Returns the schedule and a sentence that says what was changed, or None.

    Raises:
        UserError: a decaying schedule has no end, or the run no room for what is written in steps.
    """
    total = schedule.total_num_steps
    if not isinstance(schedule, DecayingSchedule) or (total and max_steps in (None, total)):
        return schedule, None
    if max_steps is None:
        raise UserError(
            "scheduler.params.total_num_steps is absent, and a decaying schedule needs an end: write it, or give "
            "--max_steps"
        )
    fitted = schedule.model_copy(update={"total_num_steps": max_steps})
    if total is None:
        if fault := _lack_of_room(fitted, "--max_steps"):
            raise UserError(
                f"scheduler.params.{fault}: write less, or total_num_steps so that it can shrink in proportion"
            )
        return fitted, None
    written = {name: getattr(schedule, name, None) for name in ("warmup_num_steps", "decay_num_steps")}
    shrunk = {name: min(n, max(1, round(n * max_steps / total))) for name, n in written.items() if n}
    fitted = fitted.model_copy(update=shrunk)
    note = f"schedule: --max_steps {max_steps} replaces total_num_steps {total}, and the warm-up is "
    note += _say(_warmup_steps(fitted), schedule.warmup_num_steps, schedule.warmup_ratio)
    if isinstance(fitted, WarmupStableDecayLR):
        note += f", the decay {_say(_decay_steps(fitted), schedule.decay_num_steps, schedule.decay_ratio)}"
    return fitted, note


def _say(steps: float, number: int | None, ratio: float | None) -> str:
    return f"{steps:.10g} steps (written: {f'{ratio:g} of the run' if number is None else number})"


def _lack_of_room(schedule: DecayingSchedule, end: str) -> str | None:
    """What is too long for a run whose length the user has written under the name `end`, or None."""
    total, warmup = schedule.total_num_steps, _warmup_steps(schedule)
    if schedule.warmup_ratio is None and schedule.warmup_num_steps >= total:
        return f"warmup_num_steps is {schedule.warmup_num_steps} but {end} is {total}"
    if isinstance(schedule, WarmupStableDecayLR) and warmup + _decay_steps(schedule) > total:
        name = "decay_num_steps" if schedule.decay_ratio is None else "decay_ratio"
        return (
            f"{name} is {getattr(schedule, name):.10g} but {end} is {total}, of which the warm-up leaves "
            f"{total - warmup:.10g} steps"
        )
    return None


def read_schedule(
    section: Any, lr: float | None, errors: Errors, notes: list[str]
) -> ScheduleSettings | None:
    """The JSON's "scheduler", in which the warm-up ends at the optimizer's lr; None after adding its errors.

    Args:
        section: None if the file has none.
        lr: of the optimizer; None if it is not known, since its own section is wrong.
        errors, notes: get a sentence for each error, and for each thing that is not as DeepSpeed has it.
    """
    entry = None if section is None else check(_Scheduler, section, "scheduler", errors)
    schedule = entry and check(SCHEDULES[entry.type], entry.params, "scheduler.params", errors)
    if schedule is None:
        return ConstantSchedule(warmup_max_lr=lr) if section is None and lr is not None else None
    if isinstance(schedule, _DEEPSPEEDS) and schedule.warmup_num_steps is schedule.warmup_ratio is None:
        schedule = schedule.model_copy(update={"warmup_num_steps": _DEEPSPEEDS_WARMUP})
    if not _check_lengths(schedule, errors) or lr is None:
        return None
    _check_peak(schedule, lr, errors)
    if isinstance(schedule, WarmupDecayLR) and schedule.warmup_max_lr is None and lr != 0.001:
        notes.append(
            f"scheduler: the warm-up ends at the optimizer's lr {lr:g}, not at DeepSpeed's default 0.001"
        )
    return schedule.model_copy(update={"warmup_max_lr": lr})


def _check_lengths(schedule: WarmupSchedule, errors: Errors) -> bool:
    """Whether each length is given in one way, and all fit into the run."""
    faults = []
    for steps, ratio in (("warmup_num_steps", "warmup_ratio"), ("decay_num_steps", "decay_ratio")):
        given = [name for name in (steps, ratio) if getattr(schedule, name, None) is not None]
        if len(given) == 2:
            faults.append(f'"scheduler.params.{steps}" and "{ratio}" are both given; write one of them')
        if not given and hasattr(schedule, steps):
            faults.append(f'"scheduler.params" has neither "{steps}" nor "{ratio}"; write one of them')
    if not faults and schedule.total_num_steps and (fault := _lack_of_room(schedule, "total_num_steps")):
        faults.append(f'"scheduler.params": {fault}; write less')
    for fault in faults:
        errors.add(fault)
    return not faults


def _check_peak(schedule: WarmupSchedule, lr: float, errors: Errors) -> None:
    peak, least = schedule.warmup_max_lr, getattr(schedule, "warmup_min_lr", 0.0)
    if peak is not None and peak != lr:
        errors.add(
            f'"scheduler.params.warmup_max_lr" is {peak:g} but "optimizer.params.lr" is {lr:g}; write the same number '
            "or leave warmup_max_lr out"
        )
    elif least > lr:
        errors.add(
            f'"scheduler.params.warmup_min_lr" is {least:g}, above "optimizer.params.lr" {lr:g}; write less'
        )
