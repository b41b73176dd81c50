"""Where parameters lie in the tensors that an optimizer holds, and their norms, whole or cut by ZeRO.

ZeRO-1 and 2 give the optimizer one flat tensor per group and rank, in which parameters lie end to end and are cut at
the borders (Rajbhandari et al. 2020, "ZeRO", section 5). Each rank sums the squares of its slices, and one all-reduce
gives all ranks the norms of the whole parameters.
"""

import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Numbers that a CPU works on at once, so that what one kernel leaves is still in the cache for the next.
CPU_CHUNK = 1_048_576
# On a CPU torch sums the squares of a float32 tensor in float32: of 31 million numbers the norm is off by 2e-3, of a
# piece of this length by 3e-7 (by 3e-5 if all are equal). CUDA kernels cut into pieces by themselves.
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
        slices = [(number, length) for number, _, length in _overlaps(zero, group)]
        parameters = len(zero.round_robin_bit16_meta[group])
        return cls(parameters, [slices], zero.real_dp_process_group[group])


def _overlaps(zero, group: int) -> Iterator[tuple[int, int, int]]:
    """Of each parameter that this rank's partition holds something of: its number, and start and length of that in it."""
    size = zero.partition_size[group]
    start = torch.distributed.get_rank(zero.real_dp_process_group[group]) * size
    place = 0
    offsets, metas = zero.round_robin_bit16_offsets[group], zero.round_robin_bit16_meta[group]
    for number, (offset, meta) in enumerate(zip(offsets, metas, strict=True)):
        assert offset == place, "the parameters do not lie end to end"
        place += meta.numel()
        first = max(offset, start)
        length = min(place, start + size) - first
        if length > 0:
            yield number, first - offset, length


def fill_partitions(zero, originals: Mapping[int, Tensor]) -> None:
    """Put the weights as they were before DeepSpeed rounded them to 16 bits into the fp32 partitions that it made.

    Args:
        zero: DeepSpeed's ZeRO optimizer at stage 1 or 2.
        originals: float32, by the id of the parameter.
    """
    for group, parameters in enumerate(zero.bit16_groups):
        flat, place = zero.single_partition_of_fp32_groups[group].detach(), 0
        for number, start, length in _overlaps(zero, group):
            original = originals[id(parameters[number])].view(-1)
            flat[place : place + length].copy_(original[start : start + length])
            place += length


class Layout:
    """How the tensors of a group are cut for the work on them.

    A chunk is worked on at once, a part is what a tensor gives to it, and a piece is of one parameter.

    Args:
        slices: where the parameters lie.
        device: of the tensors.

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

    def combine(self, *piece_norms: Sequence[Tensor]) -> Tensor:
        """[several, n] float64: norms of whole parameters, from those of this rank's pieces in each of several lists.

        A collective call of the process group, with one all-reduce, whatever this rank holds.
        """
        squares = torch.zeros(
            len(piece_norms), self.slices.parameters, dtype=torch.float64, device=self.numbers.device
        )
        for row, norms in zip(squares, piece_norms, strict=True):
            if norms:
                row.index_add_(0, self.numbers, torch.stack(list(norms)).double().square())
        if self.slices.process_group is not None:
            torch.distributed.all_reduce(squares, group=self.slices.process_group)
        return squares.sqrt()

    def norms(self, *tensors: Sequence[Tensor]) -> Tensor:
        """[several, n] float64: norms of whole parameters in each of several lists of tensors; a collective call."""
        pieces = [self.pieces(those) for those in tensors]
        return self.combine(*(torch._foreach_norm(those) if those else [] for those in pieces))


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
