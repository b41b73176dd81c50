"""The section zero_optimization of the DeepSpeed JSON: which stages train, and what does not go together there."""

from collections.abc import Sequence
from typing import Any

from pretraining.strict_json import Errors


def check_zero(
    section: dict[str, Any] | None,
    force_cpu_optimizer: Any,
    precisions: Sequence[str],
    errors: Errors,
    notes: list[str],
) -> dict[str, Any]:
    """The section that DeepSpeed gets; without one it is stage 0, as DeepSpeed has it.

    Args:
        section: without keys that are refused; its values are checked by DeepSpeed's schema.
        force_cpu_optimizer: "zero_force_ds_cpu_optimizer" of the file.
        precisions: of 16 bits that the file enables. Machines without them train in fp32, but a file is right on all
            machines or on none.
        errors, notes: get the sentences.
    """
    if section is None:
        notes.append("zero_optimization: not in the file, so stage 0: every rank holds the whole optimizer")
        section = {"stage": 0}
    stage, offload = section.get("stage"), section.get("offload_optimizer")
    if stage is None:
        errors.add(
            '"zero_optimization.stage" is missing; write 1 or 2, or 0 for a whole optimizer on each rank in fp32'
        )
    if stage == 3:
        errors.add('"zero_optimization.stage" is 3; a BERT needs no more than 2; write 2')
    for name in precisions if stage == 0 else ():
        errors.add(
            f'"zero_optimization.stage" is 0, as without the section, and "{name}" is enabled, for which DeepSpeed has '
            f"other optimizer classes at stage 0 that reduce and scale otherwise; write 1 or 2, or leave {name} out"
        )
    device = offload.get("device") if isinstance(offload, dict) else None
    if device not in (None, "none"):
        _check_offload(device, stage, force_cpu_optimizer, errors)
    if stage != 0:
        return section
    unused = [key for key in section if key != "stage"]
    if unused:
        notes.append(f"zero_optimization: stage 0 cuts nothing and has no use for {', '.join(unused)}")
    return {"stage": 0}


def _check_offload(device: Any, stage: Any, force_cpu_optimizer: Any, errors: Errors) -> None:
    if stage == 0:
        errors.add(
            '"zero_optimization.offload_optimizer" is for stages 1 and 2; leave it out or write stage 2'
        )
    elif device == "nvme":
        errors.add(
            '"zero_optimization.offload_optimizer.device" is "nvme"; write "cpu" or leave the object out'
        )
    elif device == "cpu" and force_cpu_optimizer is not False:
        errors.add(
            '"zero_optimization.offload_optimizer" needs "zero_force_ds_cpu_optimizer": false at the top level, since '
            "pretraining brings its own optimizer; add it or leave offload_optimizer out"
        )
