"""The loss scale of fp16: one for all of a step, and what a run that goes on keeps of it.

The scale itself is DeepSpeed's DynamicLossScaler's: it falls when gradients overflow, whose update is skipped
(Micikevicius et al. 2018, "Mixed Precision Training", section 3.2), and grows after a window of steps without. But
ZeRO's step lets it move the scale before the gradients are divided by it. On a step on which the scale grows they
would be divided by twice what the loss was multiplied by: half of the update would be lost, and half of the norm
that is clipped.
"""

import math
from collections.abc import Mapping
from typing import Any

from pretraining.strict_json import Errors

# Those that DeepSpeed's scaler was made with; the rest of it is state.
_OPTIONS = ("scale_window", "min_scale", "delayed_shift", "consecutive_hysteresis")
_LARGEST_POWER = 127  # of two in float32, in which the loss is scaled


def hold_loss_scale(optimizer) -> None:
    """Let the coming step use the scale as it is now, from its first backward pass to its update.

    What the scaler decides during `engine.step()` counts from the next step's call on. Nothing of this is state.

    Args:
        optimizer: the engine's; only DeepSpeed's at ZeRO stage 1 or 2 can have a scale that moves.
    """
    if optimizer.loss_scaler.dynamic:
        optimizer.override_loss_scale(optimizer.loss_scaler.cur_scale)


def go_on_with_options(optimizer, asked) -> None:
    """Give the scaler that a checkpoint has brought the options of the run that goes on; its state stays.

    DeepSpeed takes the scaler out of the checkpoint as a whole, so that a changed JSON would say nothing.

    Args:
        optimizer: DeepSpeed's, with the scaler of the checkpoint.
        asked: the scaler that it had before. It stays if one of the two is not dynamic, which has no state.
    """
    saved = optimizer.loss_scaler
    if not (saved.dynamic and asked.dynamic):
        optimizer.loss_scaler, optimizer.dynamic_loss_scale = asked, asked.dynamic
        return
    for name in _OPTIONS:
        setattr(saved, name, getattr(asked, name))
    saved.cur_scale = max(saved.cur_scale, saved.min_scale)
    saved.cur_hysteresis = min(saved.cur_hysteresis, saved.delayed_shift)


def check_options(section: Mapping[str, Any] | None, errors: Errors) -> None:
    """Refuse options of dynamic scaling that DeepSpeed's schema takes and that cannot train.

    Args:
        section: "fp16" of the DeepSpeed JSON, if it is there.
        errors: gets the sentences.
    """
    if not section or not section.get("enabled"):
        return
    if static := section.get("loss_scale"):
        if isinstance(static, float | int) and static > 2.0**_LARGEST_POWER:
            errors.add(
                f'"fp16.loss_scale" is {static:g}, above 2^{_LARGEST_POWER}; write 0 for a dynamic one'
            )
        return
    hysteresis = section.get("hysteresis", 2)
    floor, power = section.get("min_loss_scale", 1), section.get("initial_scale_power", 16)
    if isinstance(hysteresis, int) and hysteresis < 1:
        errors.add(
            f'"fp16.hysteresis" is {hysteresis}, with which the loss scale never falls; write 1 for a scale that falls '
            "at every overflow"
        )
    if not (isinstance(floor, int) and isinstance(power, int) and floor > 0):
        return  # its schema has complained
    if not math.log2(floor) <= power <= _LARGEST_POWER:
        errors.add(
            f'"fp16.initial_scale_power" is {power}: the first loss scale, 2^{power}, is not between '
            f'"fp16.min_loss_scale" {floor} and 2^{_LARGEST_POWER}; write 16'
        )
