"""The optimizer and the learning rate: parameter groups, the fused kernels of this machine, pure schedules.

AdamW: Loshchilov & Hutter 2019, "Decoupled Weight Decay Regularization", algorithm 2, which is what BERT
trains with (Devlin et al. 2019, appendix A.2), with the bias correction of Kingma & Ba 2015. LAMB is in lamb.py.
"""

import importlib
import importlib.util
import json
import math
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import Field

from data_prep.errors import UserError
from pretraining.strict_json import Errors, StrictModel, check

if TYPE_CHECKING:
    import torch


class OptimizerSettings(StrictModel):
    """ "params" of the JSON's "optimizer", with DeepSpeed's defaults; `lr` is the peak rate, per step."""

    lr: float = Field(gt=0)
    betas: list[Annotated[float, Field(ge=0, lt=1)]] = Field([0.9, 0.999], min_length=2, max_length=2)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.0, ge=0)


class AdamWSettings(OptimizerSettings):
    """Of "AdamW"."""

    algorithm: ClassVar[str] = "AdamW"

    adam_w_mode: bool = True
    bias_correction: Literal[True] = True
    torch_adam: bool = False


class LambSettings(OptimizerSettings):
    """Of "Lamb"; what the options do is told at `lamb.Lamb`."""

    algorithm: ClassVar[str] = "Lamb"

    bias_correction: bool = True
    grad_averaging: bool = True
    trust_ratio_clamp: list[Annotated[float, Field(gt=0)]] | None = Field(None, min_length=2, max_length=2)
    layer_adaptation_for_no_decay: bool = False


OPTIMIZERS = {"adam": AdamWSettings, "adamw": AdamWSettings, "lamb": LambSettings}


class _Optimizer(StrictModel):
    type: str
    params: dict[str, Any]


class ScheduleSettings(StrictModel):
    """ "params" of the JSON's "scheduler", with DeepSpeed's names and defaults; lengths in optimizer steps.

    `warmup_max_lr` is the optimizer's lr once the file has been read. `total_num_steps` is None where the
    schedule has no end, or gets it from the length of the run.
    """

    warmup_num_steps: int = Field(1000, gt=0)
    warmup_type: Literal["log", "linear"] = "log"
    warmup_max_lr: float | None = Field(None, gt=0)
    total_num_steps: None = None


class ConstantSchedule(ScheduleSettings):
    """No "scheduler" entry: the optimizer's lr from the first step on."""


class WarmupLR(ScheduleSettings):
    """A warm-up, then constant."""

    warmup_min_lr: float = Field(0.0, ge=0)


class WarmupDecayLR(ScheduleSettings):
    """A warm-up, then a linear decay from there to `warmup_min_lr` at the last step."""

    warmup_min_lr: float = Field(0.0, ge=0)
    total_num_steps: int | None = Field(None, gt=0)


class WarmupCosineLR(ScheduleSettings):
    """A warm-up, then half a cosine; the ratios are of the optimizer's lr."""

    warmup_min_ratio: float = Field(0.0, ge=0)
    cos_min_ratio: float = Field(0.0001, ge=0)
    total_num_steps: int | None = Field(None, gt=0)


SCHEDULES = {schedule.__name__: schedule for schedule in (WarmupLR, WarmupDecayLR, WarmupCosineLR)}


def learning_rate(schedule: ScheduleSettings, step: int) -> float:
    """The learning rate of the update that follows `step` applied updates (0 for the first).

    The values are those of DeepSpeed's scheduler of the same name at `last_batch_iteration = step`, so the first
    update runs at the start of the warm-up, as in the original BERT. Skipped updates do not count as steps.
    """
    peak = schedule.warmup_max_lr
    if isinstance(schedule, ConstantSchedule):
        return peak
    is_cosine = isinstance(schedule, WarmupCosineLR)
    least = schedule.warmup_min_ratio * peak if is_cosine else schedule.warmup_min_lr
    warmup = max(2, schedule.warmup_num_steps)  # DeepSpeed's floor: log(1) would divide by zero
    if step < warmup:
        is_linear = schedule.warmup_type == "linear"
        rise = step / warmup if is_linear else math.log(step + 1) / math.log(warmup)
        return least + (peak - least) * rise
    if isinstance(schedule, WarmupLR):
        return peak
    if schedule.total_num_steps is None:
        raise ValueError("a decaying schedule needs its end: make it with schedule_for")
    length = max(1, schedule.total_num_steps - warmup)
    if not is_cosine:
        return least + (peak - least) * max(0.0, (schedule.total_num_steps - step) / length)
    least = schedule.cos_min_ratio * peak
    progress = min(1.0, (step - warmup + 1) / length)
    return least + (peak - least) * (1 + math.cos(math.pi * progress)) / 2


def schedule_for(schedule: ScheduleSettings, max_steps: int | None) -> tuple[ScheduleSettings, str | None]:
    """Fit the schedule to a run of `max_steps` steps (None: as long as the schedule itself).

    A decay ends with the run. The warm-up keeps its share of the schedule but is never longer than written.
    Returns the schedule and a sentence that says what was changed, or None.
    """
    total = schedule.total_num_steps
    if not isinstance(schedule, (WarmupDecayLR, WarmupCosineLR)) or (total and max_steps in (None, total)):
        return schedule, None
    if max_steps is None:
        raise UserError(
            "scheduler.params.total_num_steps is absent, and a decaying schedule needs an end: write it, or give "
            "--max_steps"
        )
    warmup = schedule.warmup_num_steps
    if total is not None:
        warmup = min(warmup, max(1, round(warmup * max_steps / total)))
    elif warmup >= max_steps:
        raise UserError(
            f"scheduler.params.warmup_num_steps is {warmup} but --max_steps is {max_steps}: write fewer warm-up steps, "
            "or total_num_steps so that the warm-up can shrink in proportion"
        )
    fitted = schedule.model_copy(update={"total_num_steps": max_steps, "warmup_num_steps": warmup})
    if total is None:
        return fitted, None
    return fitted, (
        f"schedule: --max_steps {max_steps} replaces total_num_steps {total}, and the warm-up is {warmup} steps "
        f"(written: {schedule.warmup_num_steps})"
    )


def read_optimizer(section: Any, errors: Errors, notes: list[str]) -> OptimizerSettings | None:
    """Check the JSON's "optimizer"; None if there are errors, which are added."""
    entry = check(_Optimizer, section, "optimizer", errors)
    if entry is None:
        return None
    kind = OPTIMIZERS.get(entry.type.lower())
    if kind is None:
        errors.add(f'"optimizer.type" is {json.dumps(entry.type)}; write "AdamW" or "Lamb"')
        return None
    settings = check(kind, entry.params, "optimizer.params", errors)
    if isinstance(settings, AdamWSettings):
        if not settings.adam_w_mode and settings.weight_decay:
            errors.add(
                '"optimizer.params.adam_w_mode" is false, which adds the weight decay to the gradient; BERT is trained '
                "with AdamW; leave it out"
            )
        if settings.torch_adam:
            notes.append("torch_adam: the AdamW kernel is chosen by the device")
    elif settings is not None:
        clamp = settings.trust_ratio_clamp
        if clamp is None:
            notes.append(
                "Lamb: the trust ratio is not clamped (DeepSpeed's own optimizer clamps it at 0.01 and 10)"
            )
        elif clamp[0] > clamp[1]:
            errors.add(f'"optimizer.params.trust_ratio_clamp" is {clamp}; write the smaller bound first')
    return settings


def parameter_groups(model: "torch.nn.Module", weight_decay: float) -> list[dict[str, Any]]:
    """Two groups: matrices with weight decay, then biases and LayerNorm weights without (BERT's rule).

    Parameters keep the order of `named_parameters`, so the groups are the same on every rank and run; a tied
    decoder weight appears once. Groups without parameters are left out.
    """
    trained = [p for _, p in model.named_parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


class OptimizerChoice(NamedTuple):
    """An implementation: its name, why it was chosen, and `build(groups, settings) -> torch.optim.Optimizer`."""

    name: str
    why: str
    build: Callable[[Iterable[dict[str, Any]], OptimizerSettings], "torch.optim.Optimizer"]


def choose_optimizer(settings: OptimizerSettings, device_type: str) -> OptimizerChoice:
    """The fastest implementation that is here already; nothing is compiled.

    AdamW on CUDA: NVIDIA apex's FusedAdam, else DeepSpeed's if it was built at installation, else torch's.
    """
    if isinstance(settings, LambSettings):
        return OptimizerChoice(
            "Lamb", "of pretraining, exact under ZeRO, on torch's fused and foreach kernels", _build_lamb
        )
    if device_type != "cuda":
        why = "one vectorised pass over each tensor"
        return OptimizerChoice("torch.optim.AdamW(fused=True)", why, _build_torch)
    apex_fault = _apex_fault()
    if apex_fault is None:
        build = partial(_build_fused_adam, "apex.optimizers")
        return OptimizerChoice("apex.optimizers.FusedAdam", "NVIDIA's apex is installed", build)
    if _deepspeed_adam_is_built():
        build = partial(_build_fused_adam, "deepspeed.ops.adam")
        return OptimizerChoice("deepspeed.ops.adam.FusedAdam", f"{apex_fault}; DeepSpeed's is built", build)
    why = f"{apex_fault}; DeepSpeed's FusedAdam was not built when DeepSpeed was installed (DS_BUILD_FUSED_ADAM=1)"
    return OptimizerChoice("torch.optim.AdamW(fused=True)", why, _build_torch)


def refuse_apex_look_alike() -> None:
    """Raise UserError if an installed package named apex is not NVIDIA's; its files are looked at, not run."""
    spec = importlib.util.find_spec("apex")
    if spec is None or spec.origin is None:
        return  # a folder of this name without an __init__.py, such as a checkout of the repository
    folders = map(Path, spec.submodule_search_locations or ())
    if not any((folder / "optimizers" / "fused_adam.py").is_file() for folder in folders):
        raise UserError(
            f"{spec.origin}: this apex is not NVIDIA's (the one on PyPI is a web toolkit), whose place it takes; "
            "pip uninstall apex, and if you want NVIDIA's kernels, build theirs from its repository"
        )


def _apex_fault() -> str | None:
    """Why apex's FusedAdam cannot be used, or None."""
    refuse_apex_look_alike()
    spec = importlib.util.find_spec("apex")
    if spec is None or spec.origin is None:
        return "NVIDIA's apex is not installed"
    if importlib.util.find_spec("amp_C") is None:
        return "NVIDIA's apex is installed without its CUDA extensions"
    return None


def _deepspeed_adam_is_built() -> bool:
    from deepspeed.git_version_info import accelerator_name, installed_ops

    return accelerator_name == "cuda" and bool(installed_ops.get("fused_adam"))


def _build_torch(groups: Iterable[dict[str, Any]], settings: OptimizerSettings) -> "torch.optim.Optimizer":
    import torch

    return torch.optim.AdamW(
        groups, lr=settings.lr, betas=tuple(settings.betas), eps=settings.eps, fused=True
    )


def _build_lamb(groups: Iterable[dict[str, Any]], settings: OptimizerSettings) -> "torch.optim.Optimizer":
    from pretraining.lamb import Lamb

    clamp, all_adapt = settings.trust_ratio_clamp, settings.layer_adaptation_for_no_decay
    # By the parameters, not by the rate: without weight decay matrices adapt too.
    adapting = [group | {"layer_adaptation": all_adapt or group["params"][0].dim() > 1} for group in groups]
    return Lamb(
        adapting,
        settings.lr,
        betas=tuple(settings.betas),
        eps=settings.eps,
        bias_correction=settings.bias_correction,
        grad_averaging=settings.grad_averaging,
        trust_ratio_clamp=tuple(clamp) if clamp else None,
    )


def _build_fused_adam(
    module: str, groups: Iterable[dict[str, Any]], settings: OptimizerSettings
) -> "torch.optim.Optimizer":
    fused_adam = importlib.import_module(module).FusedAdam
    return fused_adam(groups, lr=settings.lr, betas=tuple(settings.betas), eps=settings.eps, adam_w_mode=True)
