"""The optimizer and the learning rate: parameter groups, the fused AdamW of this machine, pure schedules.

AdamW: Loshchilov & Hutter 2019, "Decoupled Weight Decay Regularization", algorithm 2, which is what BERT
trains with (Devlin et al. 2019, appendix A.2), with the bias correction of Kingma & Ba 2015.
"""

import importlib
import importlib.util
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from data_prep.errors import UserError

if TYPE_CHECKING:
    import torch

DECAYING_SCHEDULES = ("WarmupDecayLR", "WarmupCosineLR")


@dataclass(frozen=True)
class OptimizerSettings:
    """The JSON's "optimizer" entry. `lr` is the peak learning rate, per step of the whole batch."""

    type: str
    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float


@dataclass(frozen=True)
class ScheduleSettings:
    """The JSON's "scheduler" entry, in DeepSpeed's terms; all learning rates are absolute, all lengths in steps.

    `type` is WarmupLR, WarmupDecayLR, WarmupCosineLR or Constant (no entry). `peak_lr` is the optimizer's lr.
    `start_lr` is the rate at step 0, and for WarmupDecayLR at the end too; `end_lr` is the cosine's end.
    """

    type: str
    peak_lr: float
    start_lr: float = 0.0
    end_lr: float = 0.0
    warmup_type: str = "log"
    warmup_num_steps: int = 1000
    total_num_steps: int | None = None


def learning_rate(schedule: ScheduleSettings, step: int) -> float:
    """The learning rate of the update that follows `step` applied updates (0 for the first).

    The values are those of DeepSpeed's scheduler of the same name at `last_batch_iteration = step`, so the first
    update runs at `start_lr`, as in the original BERT. Skipped updates do not count as steps.
    """
    if schedule.type == "Constant":
        return schedule.peak_lr
    warmup = max(2, schedule.warmup_num_steps)  # DeepSpeed's floor: log(1) would divide by zero
    if step < warmup:
        is_linear = schedule.warmup_type == "linear"
        rise = step / warmup if is_linear else math.log(step + 1) / math.log(warmup)
        return schedule.start_lr + (schedule.peak_lr - schedule.start_lr) * rise
    if schedule.type == "WarmupLR":
        return schedule.peak_lr
    if schedule.total_num_steps is None:
        raise ValueError("a decaying schedule needs its end: make it with schedule_for")
    length = max(1, schedule.total_num_steps - warmup)
    if schedule.type == "WarmupDecayLR":
        left = max(0.0, (schedule.total_num_steps - step) / length)
        return schedule.start_lr + (schedule.peak_lr - schedule.start_lr) * left
    progress = min(1.0, (step - warmup + 1) / length)
    cosine = (1 + math.cos(math.pi * progress)) / 2
    return schedule.end_lr + (schedule.peak_lr - schedule.end_lr) * cosine


def schedule_for(schedule: ScheduleSettings, max_steps: int | None) -> tuple[ScheduleSettings, str | None]:
    """Fit the schedule to a run of `max_steps` steps (None: as long as the schedule itself).

    A decay ends with the run. The warm-up keeps its share of the schedule but is never longer than written.
    Returns the schedule and a sentence that says what was changed, or None.
    """
    total = schedule.total_num_steps
    if schedule.type not in DECAYING_SCHEDULES or max_steps in (None, total):
        if schedule.type in DECAYING_SCHEDULES and total is None:
            raise UserError(
                f"scheduler.params.total_num_steps is absent, and {schedule.type} needs an end: write it, or give "
                "--max_steps"
            )
        return schedule, None
    warmup = schedule.warmup_num_steps
    if total is not None:
        warmup = min(warmup, max(1, round(warmup * max_steps / total)))
    elif warmup >= max_steps:
        raise UserError(
            f"scheduler.params.warmup_num_steps is {warmup} but --max_steps is {max_steps}: write fewer warm-up steps, "
            "or total_num_steps so that the warm-up can shrink in proportion"
        )
    fitted = replace(schedule, total_num_steps=max_steps, warmup_num_steps=warmup)
    if total is None:
        return fitted, None
    return fitted, (
        f"schedule: --max_steps {max_steps} replaces total_num_steps {total}, and the warm-up is {warmup} steps "
        f"(written: {schedule.warmup_num_steps})"
    )


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


class AdamWChoice(NamedTuple):
    """An implementation: its name, why it was chosen, and `build(groups, settings) -> torch.optim.Optimizer`."""

    name: str
    why: str
    build: Callable[[Iterable[dict[str, Any]], OptimizerSettings], "torch.optim.Optimizer"]


def choose_adamw(device_type: str) -> AdamWChoice:
    """The fastest AdamW that is here already; nothing is compiled.

    On CUDA: NVIDIA apex's FusedAdam, else DeepSpeed's if it was built at installation, else torch's.
    """
    if device_type != "cuda":
        why = "one vectorised pass over the flat partition"
        return AdamWChoice("torch.optim.AdamW(fused=True)", why, _build_torch)
    apex_fault = _apex_fault()
    if apex_fault is None:
        build = partial(_build_fused_adam, "apex.optimizers")
        return AdamWChoice("apex.optimizers.FusedAdam", "NVIDIA's apex is installed", build)
    if _deepspeed_adam_is_built():
        build = partial(_build_fused_adam, "deepspeed.ops.adam")
        return AdamWChoice("deepspeed.ops.adam.FusedAdam", f"{apex_fault}; DeepSpeed's is built", build)
    why = f"{apex_fault}; DeepSpeed's FusedAdam was not built when DeepSpeed was installed (DS_BUILD_FUSED_ADAM=1)"
    return AdamWChoice("torch.optim.AdamW(fused=True)", why, _build_torch)


def _apex_fault() -> str | None:
    """Why apex's FusedAdam cannot be used, or None; looks at files only, since a look-alike may do anything."""
    spec = importlib.util.find_spec("apex")
    if spec is None:
        return "NVIDIA's apex is not installed"
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    if not any((folder / "optimizers" / "fused_adam.py").is_file() for folder in folders):
        return "the installed package apex is not NVIDIA's (PyPI's apex is a web toolkit) and is passed over"
    if importlib.util.find_spec("amp_C") is None:
        return "NVIDIA's apex is installed without its CUDA extensions"
    return None


def _deepspeed_adam_is_built() -> bool:
    from deepspeed.git_version_info import accelerator_name, installed_ops

    return accelerator_name == "cuda" and bool(installed_ops.get("fused_adam"))


def _build_torch(groups: Iterable[dict[str, Any]], settings: OptimizerSettings) -> "torch.optim.Optimizer":
    import torch

    return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps, fused=True)


def _build_fused_adam(
    module: str, groups: Iterable[dict[str, Any]], settings: OptimizerSettings
) -> "torch.optim.Optimizer":
    fused_adam = importlib.import_module(module).FusedAdam
    return fused_adam(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps, adam_w_mode=True)
