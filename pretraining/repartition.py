"""The optimizer state that some number of ranks has saved, cut anew for another number.

ZeRO-1 and 2 lay the parameters of a group end to end, pad the end and cut the line into one partition per rank
(Rajbhandari et al. 2020, "ZeRO", section 5). The fp32 weights and the moments are kept in these partitions; what
else an optimizer keeps is the same on all ranks. Another number of ranks changes the padding and the cuts and
nothing else, so each rank can read its own piece of the line out of the files as they are: nothing is converted
on the disk, and nothing half converted can be left behind. Without ZeRO (unsharded.py) the line is in one piece.
"""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from data_prep.errors import UserError
from pretraining.distributed import AgreedError
from pretraining.loss_scale import go_on_with_options
from pretraining.manifest import MODEL_STATES, Checkpoint

# Names in the file of a rank, by DeepSpeed (deepspeed/checkpoint/constants.py).
STATES, MOMENTS, WEIGHTS = "optimizer_state_dict", "base_optimizer_state", "single_partition_of_fp32_groups"
PADDINGS = "group_paddings"
# They describe the old cuts, and are read by converters only.
OLD_CUTS = (PADDINGS, "partition_count", "param_slice_mappings")


class Group(NamedTuple):
    """A parameter group under ZeRO: numbers in its line without the end's padding, and in one partition."""

    numel: int
    partition_size: int


def cut(part_of: Callable[[int], Tensor], ranks: int, size: int, start: int, stop: int) -> Tensor:
    """The numbers [start, stop) of a line that lies in partitions; zeros where the partitions hold nothing.

    Args:
        part_of: the 1-D partition of a rank, which may end early; asked for those only that are needed.
        ranks, size: the number of partitions, and of numbers in each.
    """
    pieces, place = [], start
    for rank in range(start // size, min(ranks, -(-stop // size))):
        part, first = part_of(rank), rank * size
        end = min(stop, first + len(part))
        if place < end:
            pieces.append(part[place - first : end - first])
            place = end
    like = pieces[0] if pieces else part_of(0)
    return torch.cat([*pieces, like.new_zeros(stop - place)])


def repartition(state_of: Callable[[int], dict], ranks: int, groups: list[Group], rank: int) -> dict:
    """The state that `rank` would have saved, in the form of DeepSpeed's, if the layout had been `groups`.

    Args:
        state_of: the state that one of the old ranks has saved.
        ranks: how many there were.
        groups: of the optimizer that is to load the result.
        rank: among the new ranks.
    Raises:
        UserError: the partitions are not those of these groups.
    """
    first = state_of(0)
    moments, sizes = first[MOMENTS], _partition_sizes(first)
    for number, (group, size) in enumerate(zip(groups, sizes, strict=True)):
        if not group.numel <= ranks * size < group.numel + 2 * ranks:
            raise AgreedError(
                f"the optimizer state of {ranks} ranks holds {ranks * size:,} numbers in group {number}, and the model "
                f"has {group.numel:,}; it is of another model"
            )

    def piece(number: int, part_of: Callable[[int], Tensor]) -> Tensor:
        group, size = groups[number], sizes[number]
        start = min(rank * group.partition_size, group.numel)
        stop = min(start + group.partition_size, group.numel)
        own = cut(part_of, ranks, size, start, stop)
        return torch.cat([own, own.new_zeros(group.partition_size - len(own))])

    def moments_of(number: int, index: int) -> dict:
        return {
            name: piece(number, lambda r, name=name: state_of(r)[MOMENTS]["state"][index][name])
            if isinstance(value, Tensor) and value.shape == (sizes[number],)
            else value
            for name, value in moments["state"][index].items()
        }

    indices = [group["params"][0] for group in moments["param_groups"]]
    return {name: value for name, value in first.items() if name not in OLD_CUTS} | {
        MOMENTS: moments
        | {"state": {index: moments_of(number, index) for number, index in enumerate(indices)}},
        WEIGHTS: [
            piece(number, lambda r, n=number: state_of(r)[WEIGHTS][n]) for number in range(len(groups))
        ],
    }


def _partition_sizes(state: dict) -> list[int]:
    """Numbers in one partition of each group; the weights are saved without the padding, rank by rank."""
    return [len(own) + padding for own, padding in zip(state[WEIGHTS], state[PADDINGS], strict=True)]


def as_partition(weights: Sequence[Sequence[Tensor]], state: dict[str, Any]) -> dict[str, Any]:
    """A whole optimizer as the one partition of one rank under ZeRO.

    Args:
        weights: the parameters of each group.
        state: of an optimizer of these, as its `state_dict` gives it.
    """
    moments, groups = {}, []
    for number, (group, tensors) in enumerate(zip(state["param_groups"], weights, strict=True)):
        states = [state["state"].get(index, {}) for index in group["params"]]
        moments[number] = {
            name: _line([each[name] for each in states])
            if isinstance(value, Tensor) and value.shape == tensors[0].shape
            else value
            for name, value in states[0].items()
        }
        groups.append({**group, "params": [number]})
    return {
        MOMENTS: {"state": moments, "param_groups": groups},
        WEIGHTS: [_line(tensors) for tensors in weights],
        PADDINGS: [0] * len(groups),
    }


def _line(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def load(engine, checkpoint: Checkpoint, rank: int, world_size: int) -> None:
    """Load parameters, optimizer and loss scaler of a checked checkpoint into the engine; all ranks call it.

    The options of the loss scaler are those that the engine was made with.

    Args:
        engine: a DeepSpeed engine at ZeRO stage 1 or 2, or without ZeRO with an `Unsharded` optimizer.
        checkpoint: of any number of ranks, with or without ZeRO.
        rank, world_size: of this process.
    """
    is_sharded = engine.zero_optimization()
    same_layout = checkpoint.is_sharded == is_sharded and (
        not is_sharded or checkpoint.world_size == world_size
    )
    asked = engine.optimizer.loss_scaler
    # Without optimizer states DeepSpeed does not ask for the number of ranks.
    load_files(engine, checkpoint, load_optimizer_states=same_layout)
    if not same_layout:
        load_optimizer(engine, rank, repartitioned(engine, checkpoint, rank))
    go_on_with_options(engine.optimizer, asked)


def load_files(engine, checkpoint: Checkpoint, **options: bool) -> None:
    """Let DeepSpeed load what the options of its load_checkpoint name; the schedule is never its own."""
    loaded, _ = engine.load_checkpoint(
        str(checkpoint.path.parent), tag=checkpoint.path.name, load_lr_scheduler_states=False, **options
    )
    if loaded is None:
        raise UserError(f"{checkpoint.path}: DeepSpeed found nothing to load in it")


def optimizer_state(engine) -> dict[str, Any]:
    """What the engine's optimizer holds on this rank, in the form of ZeRO's."""
    return engine.optimizer.state_dict() if engine.zero_optimization() else engine.optimizer.partition()


def load_optimizer(engine, rank: int, state: dict[str, Any]) -> None:
    """Load an optimizer state that is cut for this rank; what it does not hold stays as it is."""
    if not engine.zero_optimization():
        engine.optimizer.load_partition(state)
        return
    engine.optimizer.load_state_dict(
        {rank: optimizer_state(engine) | state}, load_from_fp32_weights=engine.zero_load_from_fp32_weights()
    )


def repartitioned(engine, checkpoint: Checkpoint, rank: int) -> dict[str, Any]:
    """The optimizer state of a checkpoint as `rank` of the engine's layout would have saved it."""
    if not engine.zero_optimization():
        rank = 0

    @functools.cache
    def state_of(saved_rank: int) -> dict[str, Any]:
        if not checkpoint.is_sharded:
            return _whole_state(engine, checkpoint)
        (path,) = checkpoint.path.glob(f"*zero_pp_rank_{saved_rank}_mp_rank_00_optim_states.pt")
        return _read(path)[STATES]

    ranks = checkpoint.world_size if checkpoint.is_sharded else 1
    return repartition(state_of, ranks, _groups(engine), rank)


def _read(path: Path) -> dict[str, Any]:
    # Mapped, so that of each file only the pieces that are needed are read.
    return torch.load(path, map_location="cpu", mmap=True, weights_only=False)


def _whole_state(engine, checkpoint: Checkpoint) -> dict[str, Any]:
    saved = _read(checkpoint.path / MODEL_STATES)
    optimizer = engine.optimizer
    groups = (
        optimizer.bit16_groups
        if engine.zero_optimization()
        else [group["params"] for group in optimizer.param_groups]
    )
    weights = [[saved["module"][engine.param_names[value]] for value in group] for group in groups]
    return as_partition(weights, saved["optimizer"])


def _groups(engine) -> list[Group]:
    optimizer = engine.optimizer
    if not engine.zero_optimization():
        numels = [sum(value.numel() for value in group["params"]) for group in optimizer.param_groups]
        return [Group(numel, numel) for numel in numels]
    return [
        Group(offsets[-1] + meta[-1].numel(), size)
        for offsets, meta, size in zip(
            optimizer.round_robin_bit16_offsets,
            optimizer.round_robin_bit16_meta,
            optimizer.partition_size,
            strict=True,
        )
    ]
