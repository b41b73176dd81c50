"""LAMB: You et al. 2019, "Large Batch Optimization for Deep Learning", algorithm 2; exact under ZeRO-1 and 2.

The trust ratio of a parameter needs the norms of the whole parameter and of its whole update, but ZeRO gives the
optimizer one flat tensor per group and rank, in which parameters lie end to end and are cut at the borders. The places
of the parameters are known, so each rank sums the squares of its slices, and one all-reduce of [2, parameters] numbers
gives all ranks the norms.
"""

import itertools
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw

# After so many steps Adam's bias corrections are exactly 1 for any betas that float32 tells from 1.
NO_BIAS_CORRECTION = 1e9
# Numbers that a CPU works on at once, so that what one kernel leaves is still in the cache for the next.
CPU_CHUNK = 1048576
# On a CPU torch sums the squares of a float32 tensor in float32: of 31 million numbers the norm is off by 2e-3, of a
# piece of this length by 1e-6 at most. CUDA kernels cut into pieces by themselves.
CPU_PIECE = 32_768


@dataclass(frozen=True)
class Slices:
    """Where the parameters of one group lie in the tensors that the optimizer holds.

    Attributes:
        parameters: their number n, on all ranks together.
        slices: for each tensor, of its slices end to end from its start, the number of the parameter and the length;
            what is left of the tensor is padding.
        process_group: the ranks that hold the other slices; None if every parameter is whole.
    """

    parameters: int
    slices: list[list[tuple[int, int]]]
    process_group: Any = None

    @classmethod
    def of_whole(cls, tensors: Sequence[Tensor]) -> "Slices":
        """Each tensor is a parameter."""
        return cls(len(tensors), [[(number, tensor.numel())] for number, tensor in enumerate(tensors)])

    @classmethod
    def of_partition(cls, zero, group: int) -> "Slices":
        """The one tensor is this rank's partition of a group.

        Args:
            zero: DeepSpeed's ZeRO optimizer at stage 1 or 2, without round-robin gradients.
            group: its number.
        """
        process_group, size = zero.real_dp_process_group[group], zero.partition_size[group]
        start = torch.distributed.get_rank(process_group) * size
        slices, place = [], 0
        offsets, metas = zero.round_robin_bit16_offsets[group], zero.round_robin_bit16_meta[group]
        for number, (offset, meta) in enumerate(zip(offsets, metas, strict=True)):
            assert offset == place, "the parameters do not lie end to end"
            place += meta.numel()
            length = min(place, start + size) - max(offset, start)
            if length > 0:
                slices.append((number, length))
        return cls(len(metas), [slices], process_group)


class _Layout:
    """How the tensors of a group are cut for the work on them.

    A chunk is worked on at once, a part is what a tensor gives to it, and a piece is of one parameter.

    Attributes:
        slices: what is cut.
        chunks: for each chunk the range of its parts and that of its pieces.
        numbers: [pieces] int64, the parameter of each piece.
    """

    def __init__(self, slices: Slices, device: torch.device):
        piece_size, chunk_size = (
            (CPU_PIECE, CPU_CHUNK) if device.type == "cpu" else (sys.maxsize, sys.maxsize)
        )
        self.slices = slices
        cuts = list(_cut(slices, piece_size, chunk_size))
        self.numbers = torch.tensor([cut.parameter for cut in cuts], dtype=torch.int64, device=device)
        tensors = range(len(slices.slices))
        self._pieces = [[cut.length for cut in cuts if cut.tensor == tensor] for tensor in tensors]
        parts = [list(group) for _, group in itertools.groupby(cuts, key=lambda cut: (cut.tensor, cut.chunk))]
        self._parts = [
            [sum(cut.length for cut in part) for part in parts if part[0].tensor == tensor]
            for tensor in tensors
        ]
        self.chunks = []
        part_stop = piece_stop = 0
        for _, group in itertools.groupby(parts, key=lambda part: part[0].chunk):
            part_start, piece_start = part_stop, piece_stop
            for part in group:
                part_stop, piece_stop = part_stop + 1, piece_stop + len(part)
            self.chunks.append((slice(part_start, part_stop), slice(piece_start, piece_stop)))

    def parts(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """All parts, as 1-D views."""
        return _split(tensors, self._parts)

    def pieces(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """All pieces, as 1-D views, in the order of `numbers`."""
        return _split(tensors, self._pieces)


class _Cut(NamedTuple):
    tensor: int
    chunk: int
    parameter: int
    length: int


def _cut(slices: Slices, piece_size: int, chunk_size: int) -> Iterator[_Cut]:
    done = 0
    for tensor, of_tensor in enumerate(slices.slices):
        for parameter, length in of_tensor:
            while length:
                piece = min(length, piece_size, chunk_size - done % chunk_size)
                yield _Cut(tensor, done // chunk_size, parameter, piece)
                length, done = length - piece, done + piece


def _split(tensors: Sequence[Tensor], lengths: list[list[int]]) -> list[Tensor]:
    views: list[Tensor] = []
    for tensor, of_tensor in zip(tensors, lengths, strict=True):
        views += tensor.view(-1)[: sum(of_tensor)].split(of_tensor)
    return views


class Lamb(torch.optim.Optimizer):
    """LAMB with float32 states named as torch's AdamW names them.

    A group may have `"layer_adaptation": False`: its parameters take Adam's step at the plain learning rate, as those
    without weight decay do in NVIDIA's BERT.

    Args:
        params: parameters or groups.
        lr: learning rate η.
        betas: β1 and β2.
        eps: added to the root of the second moment.
        weight_decay: λ, decoupled, inside the norm of the update.
        bias_correction: divide the moments by 1 − β^t, as algorithm 2 does.
        grad_averaging: weigh a new gradient with 1 − β1 in the first moment; else with 1 (the state exp_avg is
            kept averaged either way, and the update made larger).
        trust_ratio_clamp: bounds of the trust ratio; None for none.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        bias_correction: bool = True,
        grad_averaging: bool = True,
        trust_ratio_clamp: tuple[float, float] | None = None,
    ):
        defaults = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
        defaults |= {"bias_correction": bias_correction, "grad_averaging": grad_averaging}
        defaults |= {"trust_ratio_clamp": trust_ratio_clamp, "layer_adaptation": True}
        super().__init__(params, defaults)
        # By the first tensor of a group: groups are saved, layouts belong to the ranks of this run.
        self._layouts: dict[int, _Layout] = {}
        self._trust_ratios: dict[int, Tensor] = {}

    def shard(self, zero) -> None:
        """Learn where parameters lie in the flat partitions; once, after `deepspeed.initialize`.

        Args:
            zero: the engine's optimizer at ZeRO stage 1 or 2, which holds this one.
        """
        for number, flat in enumerate(zero.single_partition_of_fp32_groups):
            self._layouts[id(flat)] = _Layout(Slices.of_partition(zero, number), flat.device)

    def trust_ratios(self, group: dict[str, Any]) -> Tensor | None:
        """[n] float64: those of the last step, by parameter of the group; None without layer adaptation."""
        return self._trust_ratios.get(id(group["params"][0]))

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """One update, which leaves the negative update in the gradients.

        With partitions a collective call, whatever this rank holds of a group.
        """
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            if weights:
                self._step(group, weights)

    def _step(self, group: dict[str, Any], weights: list[Tensor]) -> None:
        states = [self._state(weight) for weight in weights]
        layout = self._layout(weights)
        gradients = [weight.grad for weight in weights]
        weight_parts, descent_parts = layout.parts(weights), layout.parts(gradients)
        weight_pieces, descent_pieces = layout.pieces(weights), layout.pieces(gradients)
        exp_avgs, exp_avg_sqs = (
            layout.parts([state[name] for state in states]) for name in ("exp_avg", "exp_avg_sq")
        )
        norms: tuple[list[Tensor], list[Tensor]] = [], []
        for parts, pieces in layout.chunks:
            _descend(
                group,
                states[0]["step"],
                weight_parts[parts],
                descent_parts[parts],
                exp_avgs[parts],
                exp_avg_sqs[parts],
            )
            if group["layer_adaptation"]:
                norms[0].extend(torch._foreach_norm(weight_pieces[pieces]))
                norms[1].extend(torch._foreach_norm(descent_pieces[pieces]))
        torch._foreach_add_([state["step"] for state in states], 1)
        if group["layer_adaptation"]:
            ratios = self._trust_ratios[id(weights[0])] = _trust_ratios(group, layout, norms)
            factors = ratios[layout.numbers].to(weights[0].dtype).unbind()
        for parts, pieces in layout.chunks:
            if group["layer_adaptation"]:
                torch._foreach_mul_(descent_pieces[pieces], factors[pieces])
            torch._foreach_add_(weight_parts[parts], descent_parts[parts], alpha=group["lr"])

    def _layout(self, weights: list[Tensor]) -> _Layout:
        key = id(weights[0])
        if key not in self._layouts:
            self._layouts[key] = _Layout(Slices.of_whole(weights), weights[0].device)
        return self._layouts[key]

    def _state(self, weight: Tensor) -> dict[str, Tensor]:
        state = self.state[weight]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=weight.device)
            state["exp_avg"] = torch.zeros_like(weight)
            state["exp_avg_sq"] = torch.zeros_like(weight)
        return state


def _descend(
    group: dict[str, Any],
    step: Tensor,
    weights: list[Tensor],
    gradients: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
) -> None:
    """Update the moments and replace the gradients by the negative updates, −(r + λx) with r = m̂ / (√v̂ + ε).

    torch's fused AdamW takes its step from zero, at the rate 1: what it leaves is −r.
    """
    # The kernel adds 1 to the count, in each chunk.
    count = step.clone() if group["bias_correction"] else torch.full_like(step, NO_BIAS_CORRECTION)
    copies = [gradient.clone() for gradient in gradients]
    torch._foreach_zero_(gradients)
    beta1, beta2 = group["betas"]
    adamw(
        gradients,
        copies,
        exp_avgs,
        exp_avg_sqs,
        [],
        [count.clone() for _ in weights],
        fused=True,
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=1.0 if group["grad_averaging"] else 1 / (1 - beta1),
        weight_decay=0.0,
        eps=group["eps"],
        maximize=False,
    )
    if group["weight_decay"]:
        torch._foreach_add_(gradients, weights, alpha=-group["weight_decay"])


def _trust_ratios(group: dict[str, Any], layout: _Layout, norms: tuple[list[Tensor], list[Tensor]]) -> Tensor:
    """[n] float64: the ratios of a group's parameters, from the norms of this rank's pieces of weights and updates."""
    squares = torch.zeros(2, layout.slices.parameters, dtype=torch.float64, device=layout.numbers.device)
    for row, of_pieces in zip(squares, norms, strict=True):
        if of_pieces:
            row.index_add_(0, layout.numbers, torch.stack(of_pieces).double().square())
    if layout.slices.process_group is not None:
        torch.distributed.all_reduce(squares, group=layout.slices.process_group)
    weight_norms, update_norms = squares.sqrt()
    ratios = weight_norms / update_norms
    if group["trust_ratio_clamp"]:
        ratios = ratios.clamp(*group["trust_ratio_clamp"])
    return torch.where((weight_norms > 0) & (update_norms > 0), ratios, 1.0)
