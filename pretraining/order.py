"""Which instance is the n-th of a run: pure functions of seed and numbers, no I/O, nothing to replay.

Positions: g counts the instances of a run over all epochs and all ranks, n = g mod N those of an epoch, and
the answer is a storage number, the place of an instance in the shard set. Rank r of R trains the g with
g mod R = r (`step_share` says what a skipped range changes about it). In each epoch

    storage ──permute blocks──> list ──cut into lanes──> lane j ──shuffle in windows──> number q of lane j

and instance n is number n div L of lane n mod L. Reading is near sequential in each lane, while a batch is
drawn from L places of the corpus; every instance comes exactly once per epoch whatever N, L and R are.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from data_prep import counter_rng
from data_prep.counter_rng import Stream

# 384 = 2^7 * 3 is a multiple of 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96 and 128 ranks, which therefore
# read no block twice. It is a constant, not a function of the cluster, so that the same command on another
# cluster gives the same run. At one rank the reader holds about 1.5 blocks per lane: 384 * 1.5 * 131 kB =
# 75 MB for blocks of 512 instances of 128 tokens; R ranks hold a share of that each.
DEFAULT_LANES = 384
# Half a block of 512: neighbours in storage end up 85 instances of their lane, and so 33,000 instances of the
# run, apart, while a lane rarely needs more than two blocks at a time.
DEFAULT_WINDOW = 256

_EPOCH_TABLES = 2  # a batch may straddle two epochs
_WINDOW_TABLES = 4


class Schedule(NamedTuple):
    """Where and for how long instances are needed; every field has the shape of the g asked for."""

    storage: np.ndarray  # int64, storage numbers
    window: np.ndarray  # int64, number of the window counted over all epochs; it never falls as g grows
    last_window: np.ndarray  # int64, the last window in which this lane needs the block of the instance


def advance(
    consumed: int, count: int, skipped_ranges: Sequence[tuple[int, int]]
) -> tuple[list[tuple[int, int]], int]:
    """Give the positions of the next `count` instances when some ranges of g are left out.

    Args:
        consumed: position before the first of them; it may lie inside a skipped range.
        count: number of instances.
        skipped_ranges: half-open (start, stop) ranges of g, sorted and disjoint.
    Returns:
        The half-open ranges of g, in order, and the position after the last one.
    """
    ranges = []
    for start, stop in skipped_ranges:
        if count == 0 or start >= consumed + count:
            break
        if start > consumed:
            ranges.append((consumed, start))
            count -= start - consumed
        consumed = max(consumed, stop)
    if count:
        ranges.append((consumed, consumed + count))
        consumed += count
    return ranges, consumed


def share(start: int, stop: int, rank: int, world_size: int) -> np.ndarray:
    """Positions g in [start, stop) that belong to this rank (g mod world_size = rank): int64, ascending."""
    return np.arange(start + (rank - start) % world_size, stop, world_size, dtype=np.int64)


def step_share(ranges: Sequence[tuple[int, int]], rank: int, world_size: int) -> np.ndarray:
    """Positions g that a rank trains in a step whose global batch lies in these ranges (see `advance`).

    They are those with g mod world_size = rank; after a gap the ranks take turns as if it were not there. Counted by
    g alone, a gap of another length than a multiple of world_size would give one rank too many and another none.

    Returns:
        int64 [n], ascending; ranks differ by at most one in n.
    """
    gap, parts, end = 0, [], ranges[0][0]
    for start, stop in ranges:
        gap += start - end
        parts.append(share(start, stop, (rank + gap) % world_size, world_size))
        end = stop
    return np.concatenate(parts)


def _shuffled(words: np.ndarray, sizes: np.ndarray | None = None) -> np.ndarray:
    """Permute the numbers 0..n-1 by uniform words, along the last axis.

    The number replaces the low bits of its word, so that no two are equal and any sorting algorithm gives the
    same answer on any machine, several times faster than a stable argsort.

    Args:
        words: uint64 [..., n]; overwritten.
        sizes: [...]; numbers from sizes[i] on keep their places at the end of row i.
    Returns:
        int64 [..., n].
    """
    numbers = np.arange(words.shape[-1], dtype=np.uint64)
    low_bits = np.uint64((1 << (len(numbers) - 1).bit_length()) - 1)
    words &= ~low_bits
    if sizes is not None:
        words[numbers >= sizes[..., None].astype(np.uint64)] = ~low_bits
    words |= numbers
    words.sort(axis=-1)
    return (words & low_bits).astype(np.int64)


class _EpochTable(NamedTuple):
    """The permuted blocks of an epoch as one list of instances."""

    starts: np.ndarray  # int64 [n_blocks + 1], list position where each block begins
    shifts: np.ndarray  # int64 [n_blocks], storage number minus list position


class _WindowTable(NamedTuple):
    """Window w of every lane in one epoch; rows of lanes are filled in when first asked for."""

    known: np.ndarray  # bool [lanes]
    storage: np.ndarray  # int64 [lanes, width]
    last_window: np.ndarray  # int64 [lanes, width], counted in the epoch


@dataclass(frozen=True, eq=False)
class Order:
    """The order of a shard set's training instances.

    Args:
        block_offsets: int64 [n_blocks + 1], the storage number at which each block begins, and N at the end.
        seed: of the run.
        lanes: L, places of the corpus from which a batch is drawn.
        window: instances that are shuffled together in a lane.
    Raises:
        ValueError: the offsets do not count at least one instance from 0 upwards, or a number is below 1.
    """

    block_offsets: np.ndarray
    seed: int
    lanes: int = DEFAULT_LANES
    window: int = DEFAULT_WINDOW

    def __post_init__(self) -> None:
        offsets = np.asarray(self.block_offsets, dtype=np.int64)
        if offsets.ndim != 1 or offsets.size < 2 or offsets[0] != 0 or (np.diff(offsets) < 0).any():
            raise ValueError("block_offsets must rise from 0")
        if offsets[-1] < 1 or self.lanes < 1 or self.window < 1:
            raise ValueError("an order needs at least one instance, lane and window place")
        object.__setattr__(self, "block_offsets", offsets)
        for name, size in (("_epoch_table", _EPOCH_TABLES), ("_window_table", _WINDOW_TABLES)):
            cached = functools.lru_cache(maxsize=size)(getattr(self, name))
            object.__setattr__(self, name, cached)

    @property
    def instances_per_epoch(self) -> int:
        """N."""
        return int(self.block_offsets[-1])

    def epoch(self, g: np.ndarray | int) -> np.ndarray | int:
        """Number of the epoch, from 0, in which the position g lies."""
        return g // self.instances_per_epoch

    def instances(self, g: np.ndarray | int) -> np.ndarray:
        """Storage numbers, int64 of the shape of g, of the instances at the positions g (any, in any order).

        Ascending positions are fast: a batch needs few windows. A first position in a new epoch costs a sort
        of the blocks, any other one row of one window.
        """
        return self.schedule(g).storage

    def schedule(self, g: np.ndarray | int) -> Schedule:
        """Storage numbers as `instances` gives them, and the windows that tell how long blocks are needed."""
        shape = np.shape(g)
        g = np.asarray(g, dtype=np.int64).reshape(-1)
        epoch = self.epoch(g)
        n = g - epoch * self.instances_per_epoch
        number = n // self.lanes
        lane = n - number * self.lanes
        window = number // self.window
        place = number - window * self.window
        last_window = epoch * self._windows_per_epoch  # the number in its epoch is added below
        clock = last_window + window
        storage = np.empty_like(g)
        cuts = np.flatnonzero(np.diff(clock)) + 1
        for start, stop in itertools.pairwise([0, *cuts.tolist(), len(g)] if len(g) else []):
            rows = lane[start:stop]
            table = self._window_rows(int(epoch[start]), int(window[start]), rows)
            storage[start:stop] = table.storage[rows, place[start:stop]]
            last_window[start:stop] += table.last_window[rows, place[start:stop]]
        return Schedule(storage.reshape(shape), clock.reshape(shape), last_window.reshape(shape))

    def lane_span(self, lane: np.ndarray | int) -> tuple[np.ndarray | int, np.ndarray | int]:
        """First position in an epoch's list, and number of instances, of each lane."""
        quotient, remainder = divmod(self.instances_per_epoch, self.lanes)
        return lane * quotient + np.minimum(lane, remainder), quotient + (lane < remainder)

    def lanes_of_rank(self, rank: int, world_size: int, epoch: int = 0) -> np.ndarray:
        """Lanes a rank reads in an epoch: L/gcd(R, L) of them, each shared by R/gcd(R, L) ranks; ascending.

        They differ between epochs where N is no multiple of the gcd, because g mod R decides about the rank.
        """
        step = math.gcd(world_size, self.lanes)
        return np.arange((rank - epoch * self.instances_per_epoch) % step, self.lanes, step)

    @property
    def _windows_per_epoch(self) -> int:
        return -(-self.instances_per_epoch // (self.lanes * self.window))

    def _epoch_table(self, epoch: int) -> _EpochTable:
        key = counter_rng.key(self.seed, Stream.BLOCK_ORDER, epoch)
        sizes = np.diff(self.block_offsets)
        blocks = _shuffled(counter_rng.derive(key, np.arange(len(sizes))))
        starts = np.zeros(len(sizes) + 1, dtype=np.int64)
        np.cumsum(sizes[blocks], out=starts[1:])
        return _EpochTable(starts, self.block_offsets[blocks] - starts[:-1])

    def _window_table(self, epoch: int, window: int) -> _WindowTable:
        shape = (self.lanes, self._window_width(window))
        return _WindowTable(np.zeros(self.lanes, bool), np.empty(shape, np.int64), np.empty(shape, np.int64))

    def _window_width(self, window: int) -> int:
        longest_lane = -(-self.instances_per_epoch // self.lanes)
        return min(self.window, longest_lane - window * self.window)

    def _window_rows(self, epoch: int, window: int, lanes: np.ndarray) -> _WindowTable:
        """The table of a window with the rows of these lanes filled in."""
        table = self._window_table(epoch, window)
        missing = np.unique(lanes[~table.known[lanes]])
        if missing.size:
            storage, last_window = self._lane_windows(epoch, window, missing)
            table.storage[missing], table.last_window[missing] = storage, last_window
            # Last, so that another thread never reads a row that is half there.
            table.known[missing] = True
        return table

    def _lane_windows(self, epoch: int, window: int, lanes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Storage numbers and last windows, int64 [len(lanes), width]; unused past the end of a lane."""
        blocks = self._epoch_table(epoch)
        lane_start, lane_length = (column[:, None] for column in self.lane_span(lanes))
        first = window * self.window
        position = lane_start + first + np.arange(self._window_width(window))
        block = (
            np.searchsorted(blocks.starts, np.minimum(position, self.instances_per_epoch - 1), "right") - 1
        )
        needed_until = np.minimum(blocks.starts[block + 1], lane_start + lane_length) - 1
        storage = position + blocks.shifts[block]
        last_window = (needed_until - lane_start) // self.window

        epoch_key = counter_rng.key(self.seed, Stream.WINDOW_ORDER, epoch)
        keys = counter_rng.derive(counter_rng.derive(epoch_key, lanes), window)
        words = counter_rng.derive(keys[:, None], np.arange(position.shape[1]))
        places = _shuffled(words, lane_length[:, 0] - first)
        row = np.arange(len(lanes))[:, None]
        return storage[row, places], last_window[row, places]
