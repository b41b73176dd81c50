"""The optimizer: parameter groups, the fused kernels of this machine.

AdamW: Loshchilov & Hutter 2019, "Decoupled Weight Decay Regularization", algorithm 2, which is what BERT
trains with (Devlin et al. 2019, appendix A.2), with the bias correction of Kingma & Ba 2015. LAMB is in lamb.py.
"""

import importlib
import importlib.util
import json
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import Field

from data_prep.errors import UserError
from pretraining.strict_json import LARGEST, Errors, StrictModel, check

if TYPE_CHECKING:
    import torch


class OptimizerSettings(StrictModel):
    """ "params" of the JSON's "optimizer", with DeepSpeed's defaults; `lr` is the peak rate, per step."""

    lr: float = Field(gt=0, le=LARGEST)
    betas: list[Annotated[float, Field(ge=0, lt=1)]] = Field([0.9, 0.999], min_length=2, max_length=2)
    eps: float = Field(1e-8, gt=0, le=LARGEST)
    weight_decay: float = Field(0.0, ge=0, le=LARGEST)


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
            "Lamb",
            "with the trust ratios of whole parameters, in torch's fused and foreach kernels",
            _build_lamb,
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
