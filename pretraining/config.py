"""The user's DeepSpeed JSON: read, checked with all errors in one message, and lowered to what DeepSpeed gets.

DeepSpeed itself takes JSON that it does not understand, fills gaps with surprising defaults and stops at the first
assertion. Here a key is interpreted, passed through, or refused with a reason; nothing is ignored in silence.
The schemas of zero_optimization, fp16 and bf16 are DeepSpeed's own. Batch sizes are counted in instances.
"""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from data_prep.errors import UserError
from pretraining.distributed import Capabilities, import_deepspeed
from pretraining.loss_scale import check_options
from pretraining.optimizer import LambSettings, OptimizerSettings, read_optimizer
from pretraining.schedules import ScheduleSettings, read_schedule
from pretraining.strict_json import Errors, StrictModel, check, parse, refuse_auto
from pretraining.zero_section import check_zero

Precision = Literal["fp32", "bf16", "fp16"]

PASSED_THROUGH = (
    *("communication_data_type", "wall_clock_breakdown", "memory_breakdown"),
    *("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"),
)
_MASTERS = "it needs DeepSpeed's own CPU optimizer and trains less exactly; leave it out"
_OLD_OFFLOAD = 'this is the old name; write "offload_optimizer": {"device": "cpu"}'
_MOVES = "it moves parameters, and a run could not go on with other ranks or at another stage; leave it out"
_CLAMP = 'it is of DeepSpeed\'s Lamb; with "type": "Lamb" write "trust_ratio_clamp": [min_coeff, max_coeff] instead'
_REFUSED_AT_TOP = {  # reason: keys
    'DeepSpeed has dropped apex; write "fp16" or "bf16"': "amp",
    'this is the old name; write "bf16"': "bfloat16",
    'the precision comes from "fp16" or "bf16"; write one of them': "torch_autocast",
    "pretraining writes TensorBoard, metrics.jsonl and its speed by itself; leave it out": "tensorboard wandb comet "
    "csv_monitor flops_profiler comms_logger autotuning timers log_level dump_state",
    "pretraining decides how checkpoints are written and resumed; leave it out": "checkpoint",
    "the encoder is trained with data parallelism only; leave it out": "pipeline tensor_parallel expert_parallel "
    "hybrid_engine sequence_parallel_size use_data_before_expert_parallelism",
    "gradients are averaged over the ranks in one reduction, which this would change; leave it out": "compile "
    "managed_gradient_accumulation prescale_gradients gradient_allreduce_op gradient_predivide_factor disable_allgather",
    "the order of the data is a function of the seed; leave it out": "data_efficiency curriculum_learning "
    "dataloader_drop_last",
    "the batch is the same on any number of ranks without it; leave it out": "elasticity",
    "nothing here uses it; leave it out": "activation_checkpointing aio weight_quantization",
    "DeepSpeed has removed it; leave it out": "compression_training quantize_training progressive_layer_drop eigenvalue "
    "sparse_attention sparse_gradients graph_harvesting nebula",
}
REFUSED = {
    "": {key: reason for reason, keys in _REFUSED_AT_TOP.items() for key in keys.split()},
    "zero_optimization": {
        **dict.fromkeys(("round_robin_gradients", "parameter_alignment"), _MOVES),
        "offload_param": "it is for stage 3 only; leave it out",
        "zenflow": "it reduces gradients in its own way; leave it out",
        "legacy_stage1": "DeepSpeed has removed it; leave it out",
        "stage3_gather_fp16_weights_on_model_save": "it is for stage 3 only; leave it out",
        "elastic_checkpoint": "checkpoints move between numbers of ranks without it; leave it out",
        **dict.fromkeys(("cpu_offload", "cpu_offload_param", "cpu_offload_use_pin_memory"), _OLD_OFFLOAD),
    },
    "fp16": {"fp16_master_weights_and_grads": _MASTERS},
    "bf16": {"bf16_master_weights_and_grads": _MASTERS, "bf16_optimizer_states": _MASTERS},
    "optimizer.params": {
        "max_grad_norm": 'write "gradient_clipping" at the top level instead',
        "amsgrad": "AdamW is trained without it; leave it out",
        **dict.fromkeys(("max_coeff", "min_coeff"), _CLAMP),
        "eps_inside_sqrt": "eps is added to the root, as in the papers; leave it out",
    },
    "optimizer": {"legacy_fusion": "it chooses between DeepSpeed's own kernels; leave it out"},
    "scheduler.params": {"last_batch_iteration": "the position comes from the checkpoint; leave it out"},
}
_NORM = "skipped updates and the gradient norm need it"
NEEDED_ON = {
    "zero_optimization": {"compute_grad_norm": _NORM, "load_from_fp32_weights": "a resumed run needs it"},
    "bf16": {"check_grad_overflow": _NORM},
}
DEEPSPEED_SCHEMAS = {
    "zero_optimization": ("deepspeed.runtime.zero.config", "DeepSpeedZeroConfig"),
    "fp16": ("deepspeed.runtime.precision_config", "DeepSpeedFP16Config"),
    "bf16": ("deepspeed.runtime.precision_config", "DeepSpeedBF16Config"),
}
DEFAULT_MICRO_BATCH_SIZE = 32
NEVER = 1_000_000_000  # DeepSpeed prints a progress line of its own every so many steps


class _Document(StrictModel):
    train_batch_size: int | None = Field(None, gt=0)
    train_micro_batch_size_per_gpu: int | None = Field(None, gt=0)
    gradient_accumulation_steps: int | None = Field(None, gt=0)
    gradient_clipping: float = Field(1.0, ge=0)  # 1.0 is DeepSpeed's default; 0 switches clipping off
    optimizer: dict[str, Any]
    scheduler: dict[str, Any] | None = None
    zero_optimization: dict[str, Any] = {}
    fp16: dict[str, Any] = {}
    bf16: dict[str, Any] = {}
    data_types: dict[str, Any] = {}
    communication_data_type: Precision | None = None
    steps_per_print: int | None = None
    wall_clock_breakdown: bool = False
    memory_breakdown: bool = False
    zero_allow_untested_optimizer: bool = False
    zero_force_ds_cpu_optimizer: bool = True


class _DataTypes(StrictModel):
    grad_accum_dtype: Literal["fp32"] | None = None


@dataclass(frozen=True)
class DeepSpeedSettings:
    """A DeepSpeed JSON that was found right by itself; what depends on the machine is checked by `lower`.

    Batch sizes are None where the file leaves them out. `sections` holds the checked objects and flags that
    DeepSpeed gets as they are written; `notes` are sentences about settings that do not reach DeepSpeed.
    """

    path: str
    train_batch_size: int | None
    train_micro_batch_size_per_gpu: int | None
    gradient_accumulation_steps: int | None
    gradient_clipping: float
    precision: Precision
    optimizer: OptimizerSettings
    schedule: ScheduleSettings
    sections: Mapping[str, Any]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Lowered:
    """One run on one machine: `engine_config` is what `deepspeed.initialize` gets, the rest is driven by us.

    A micro-batch has at most `micro_batch_size` instances and `micro_batch_tokens` tokens (None: no such bound), and no
    rank runs more than `max_micro_steps` of them in any step. `optimizer_device` is where the update runs (CPU under offload). `replacements` says
    what is replaced on this machine and why; `DeepSpeedSettings.notes` holds what differs anywhere.
    """

    engine_config: dict[str, Any]
    train_batch_size: int
    micro_batch_size: int
    micro_batch_tokens: int | None
    max_micro_steps: int
    precision: Precision
    optimizer: OptimizerSettings
    schedule: ScheduleSettings
    gradient_clipping: float
    optimizer_device: str
    replacements: list[str]


def read_deepspeed_json(path: str | Path) -> DeepSpeedSettings:
    """Read and check a DeepSpeed JSON. Raises one UserError with a sentence for each error that it has."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as a DeepSpeed JSON: {error}") from error
    errors = Errors(str(path), REFUSED)
    document = parse(text, errors)
    errors.raise_any()
    return _interpret(document, errors)


def _interpret(document: dict[str, Any], errors: Errors) -> DeepSpeedSettings:
    refuse_auto(document, errors)
    given = check(_Document, document, "", errors)
    sections = {
        name: _check_deepspeed(document, name, errors) for name in DEEPSPEED_SCHEMAS if name in document
    }
    notes: list[str] = []
    optimizer = read_optimizer(document.get("optimizer"), errors, notes)
    schedule = read_schedule(document.get("scheduler"), optimizer and optimizer.lr, errors, notes)
    check_options(sections.get("fp16"), errors)
    enabled = [name for name in ("fp16", "bf16") if (sections.get(name) or {}).get("enabled")]
    if len(enabled) == 2:
        errors.add('"fp16" and "bf16" are both enabled; set "enabled" to false in one of them')
    forced = document.get("zero_force_ds_cpu_optimizer")
    sections["zero_optimization"] = check_zero(
        sections.get("zero_optimization"), forced, enabled, errors, notes
    )
    if not {"train_batch_size", "train_micro_batch_size_per_gpu"} & document.keys():
        errors.add('"train_batch_size" is missing; write the number of instances of one optimizer step')
    if (
        dtypes := check(_DataTypes, document.get("data_types", {}), "data_types", errors)
    ) and dtypes.grad_accum_dtype:
        sections["data_types"] = {"grad_accum_dtype": "fp32"}
    errors.raise_any()
    if given.steps_per_print is not None:
        notes.append("steps_per_print: the progress line is pretraining's own, DeepSpeed's is off")
    sections |= {key: document[key] for key in PASSED_THROUGH if document.get(key) is not None}
    return DeepSpeedSettings(
        path=errors.path,
        train_batch_size=given.train_batch_size,
        train_micro_batch_size_per_gpu=given.train_micro_batch_size_per_gpu,
        gradient_accumulation_steps=given.gradient_accumulation_steps,
        gradient_clipping=float(given.gradient_clipping),
        precision=enabled[0] if enabled else "fp32",
        optimizer=optimizer,
        schedule=schedule,
        sections={
            key: value for key, value in sections.items() if key not in ("fp16", "bf16") or key in enabled
        },
        notes=tuple(notes),
    )


def _check_deepspeed(document: dict[str, Any], name: str, errors: Errors) -> dict[str, Any]:
    """The object under `name` without refused keys, checked by DeepSpeed's own schema."""
    import_deepspeed()
    module, schema = DEEPSPEED_SCHEMAS[name]
    section = document[name]
    check(getattr(importlib.import_module(module), schema), section, name, errors)
    if not isinstance(section, dict):
        return {}
    for key, reason in NEEDED_ON.get(name, {}).items():
        if section.get(key) is False:
            errors.add(f'"{name}.{key}" is false; {reason}; leave it out')
    return {key: value for key, value in section.items() if key not in REFUSED.get(name, {})}


def lower(
    settings: DeepSpeedSettings,
    *,
    world_size: int,
    device: Literal["cpu", "cuda"],
    capabilities: Capabilities,
    seq_len: int = 1,
    micro_batch_tokens: int | None = None,
) -> Lowered:
    """Turn the settings into a run on this machine, or raise one UserError with all that does not fit it.

    DeepSpeed sees accumulation 1 and a batch of one micro-batch per rank, because micro-steps are driven by
    `distributed.gradient_accumulation`; optimizer and scheduler are objects of ours. `micro_batch_tokens` is at least
    `seq_len`, the tokens of the longest instance.
    """
    errors = Errors(settings.path, REFUSED)
    notes: list[str] = []
    longest_fit = micro_batch_tokens and micro_batch_tokens // seq_len
    batch, micro_batch, micro_steps = _plan_batch(settings, world_size, longest_fit, errors)
    sections = dict(settings.sections)
    precision = _choose_precision(settings.precision, device, capabilities, notes, errors)
    if precision != settings.precision:
        del sections[settings.precision]
        if sections.pop("communication_data_type", None):
            notes.append(f"communication_data_type: gradients are reduced in {precision}, like the rest")
        if precision == "bf16":
            sections["bf16"] = {"enabled": True}
    stage = sections["zero_optimization"]["stage"]
    if stage == 1 and precision != "fp32" and "data_types" in sections:
        errors.add(
            f'"data_types.grad_accum_dtype" with stage 1 and {precision} is another optimizer class in DeepSpeed; '
            "leave data_types out (micro-steps are summed in fp32 anyway) or write stage 2"
        )
    offload = sections["zero_optimization"].get("offload_optimizer") or {}
    is_offloaded = offload.get("device") == "cpu"
    if isinstance(settings.optimizer, LambSettings):
        _place_lamb(sections, is_offloaded, errors)
    errors.raise_any()
    engine_config = {
        "train_batch_size": micro_batch * world_size,
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": settings.gradient_clipping if stage else 0.0,  # at stage 0 `Unsharded` clips
        "steps_per_print": NEVER,
        **sections,
    }
    return Lowered(
        engine_config=engine_config,
        train_batch_size=batch,
        micro_batch_size=micro_batch,
        micro_batch_tokens=micro_batch_tokens,
        max_micro_steps=micro_steps,
        precision=precision,
        optimizer=settings.optimizer,
        schedule=settings.schedule,
        gradient_clipping=settings.gradient_clipping,
        optimizer_device="cpu" if is_offloaded else device,
        replacements=notes,
    )


def _place_lamb(sections: dict[str, Any], is_offloaded: bool, errors: Errors) -> None:
    sections["zero_allow_untested_optimizer"] = True  # DeepSpeed knows no LAMB that knows its partitions
    if is_offloaded:
        errors.add(
            '"optimizer.type" is "Lamb" and "zero_optimization.offload_optimizer" moves it to the CPU, where the ranks '
            "cannot add up the norms of its trust ratios; leave offload_optimizer out or train with AdamW"
        )


def _plan_batch(
    settings: DeepSpeedSettings, world_size: int, longest_fit: int | None, errors: Errors
) -> tuple[int, int, int]:
    """Instances per step, instances per micro-step at most, and micro-steps at most of the rank with the largest share.

    Ranks take turns, so shares differ by at most one and need not divide evenly. With a token budget, which holds
    `longest_fit` of the longest instances, each micro-batch but a rank's last has at least that many (or all that
    its bound in instances allows): the bound holds whatever the lengths, and is the same on every rank.
    """
    batch, micro_batch = settings.train_batch_size, settings.train_micro_batch_size_per_gpu
    accumulation = settings.gradient_accumulation_steps
    if batch is None:
        batch = micro_batch * (accumulation or 1) * world_size
    if accumulation is not None and micro_batch is None:
        micro_batch = max(1, batch // (accumulation * world_size))
    if accumulation is not None and batch != micro_batch * accumulation * world_size:
        product = micro_batch * accumulation * world_size
        errors.add(
            f'"train_batch_size" {batch} is not "train_micro_batch_size_per_gpu" {micro_batch} × '
            f'"gradient_accumulation_steps" {accumulation} × {world_size} ranks = {product}; leave '
            f"gradient_accumulation_steps out (any number of ranks trains the batch) or write train_batch_size {product}"
        )
    if batch < world_size:
        errors.add(
            f'"train_batch_size" {batch} is below the {world_size} ranks: more ranks than instances; start fewer '
            "ranks or write a larger batch"
        )
    share = -(-batch // world_size)
    micro_batch = min(micro_batch or (share if longest_fit else DEFAULT_MICRO_BATCH_SIZE), share)
    fewest = min(micro_batch, longest_fit or micro_batch)
    return batch, micro_batch, -(-share // fewest)


def _choose_precision(
    asked: Precision, device: str, capabilities: Capabilities, notes: list[str], errors: Errors
) -> Precision:
    if asked == "bf16" and capabilities.bf16 is None:
        if device == "cuda":
            errors.add('"bf16" is enabled but this GPU has none; enable "fp16" instead')
        else:
            notes.append("bf16: this processor emulates it slowly; without the section the run is in fp32")
    if asked != "fp16" or capabilities.fp16:
        return asked
    if capabilities.bf16:
        notes.append(f"fp16 → bf16: no fp16 on this processor, but bf16 in hardware ({capabilities.bf16})")
        return "bf16"
    notes.append("fp16 → fp32: neither fp16 nor bf16 in hardware on this processor")
    return "fp32"
