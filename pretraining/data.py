"""From the order and the shards to micro-batches.

    positions g ──Order──> storage numbers ──BlockCache──> Instances (numpy) ──MicroBatches──> tensors

A background thread reads, draws masks and sorts by length, a few steps ahead, and keeps what it makes compact
(2 bytes per token). Tensors (24 bytes per token) are built when the loop asks for a micro-batch: a step of
65,536 instances never has more than one micro-batch of them in memory. Nothing here is padded.
"""

import itertools
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import numpy as np
import torch

from data_prep import counter_rng
from data_prep.counter_rng import Stream
from data_prep.masking import MaskPolicy, draw_masks
from data_prep.ragged import offsets_of
from data_prep.shards import Block, ShardSet
from pretraining.model import MicroBatch
from pretraining.order import Order, advance, share

Masking = Literal["static", "dynamic"]

# Instances that are gathered and masked together: temporary arrays (8 bytes per token) stay at a few MB.
_CHUNK = 1024
# Instances of the evaluation that are sorted by length together.
_EVALUATION_POOL = 4096

Instances = Block  # of any number of instances, with int64 offsets


def _take_ragged(flat: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The pieces flat[starts[i] : starts[i] + lengths[i]] end to end, and their offsets int64 [n+1]."""
    offsets = offsets_of(lengths)
    values = np.empty(offsets[-1], flat.dtype)
    shifts = starts - offsets[:-1]
    for first in range(0, len(starts), _CHUNK):
        rows = slice(first, first + _CHUNK)
        begin, end = offsets[first], offsets[min(first + _CHUNK, len(starts))]
        index = np.repeat(shifts[rows], lengths[rows])
        index += np.arange(begin, end)
        # The indices are right by construction; with mode="raise" numpy would copy through a buffer.
        np.take(flat, index, out=values[begin:end], mode="clip")
    return values, offsets


def _longest_first(lengths: np.ndarray) -> np.ndarray:
    # Instances have at most 65,535 tokens (their positions are 16 bits), for which numpy has a radix sort.
    return np.argsort(~lengths.astype(np.uint16), kind="stable")


def _gather(columns: dict[str, np.ndarray], slot: np.ndarray, row: np.ndarray, masks: bool) -> Instances:
    """Copy instances out of columns [slots, width] that hold a block's members in each slot."""

    def ragged(name: str, offsets: str) -> tuple[np.ndarray, np.ndarray]:
        column, start = columns[name], columns[offsets][slot, row].astype(np.int64)
        lengths = columns[offsets][slot, row + 1] - start
        return _take_ragged(column.reshape(-1), slot * column.shape[1] + start, lengths)

    tokens, offsets = ragged("tokens", "offsets")
    labels = columns.get("next_sentence_labels")
    labels = None if labels is None else labels[slot, row]
    mask_offsets, positions, inputs = np.zeros(len(row) + 1, dtype=np.int64), tokens[:0], tokens[:0]
    if masks:
        positions, mask_offsets = ragged("masked_lm_positions", "masked_lm_offsets")
        inputs, _ = ragged("masked_lm_inputs", "masked_lm_offsets")
    segment_a = columns["segment_a"][slot, row]
    return Instances(tokens, offsets, segment_a, labels, mask_offsets, positions, inputs)


class BlockCache:
    """The blocks that the current windows of a rank's lanes need, in memory, each read once per lane.

    Each member of a block is a row of a column [slots, width]. So any set of instances is gathered by a few
    numpy calls, although neighbours in a batch lie in hundreds of blocks.
    """

    def __init__(self, shard_set: ShardSet, split: str):
        self.blocks_read = 0
        self.bytes_read = 0  # of the arrays
        self.columns: dict[str, np.ndarray] = {}
        self._shard_set = shard_set
        self._split = split
        self._offsets = shard_set.block_offsets(split)
        self._slot_of_block = np.full(len(self._offsets) - 1, -1, dtype=np.int64)
        self._block_in_slot = np.empty(0, dtype=np.int64)  # -1 in a free slot
        self._last_use = np.empty(0, dtype=np.int64)

    def hold(self, storage: np.ndarray, now: int, last_use: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Have the blocks of some instances in memory.

        Args:
            storage: int64 [n], storage numbers.
            now: time on the caller's clock, which never goes back; blocks last used before it are let go.
            last_use: int64 [n], time until which the block of each instance stays.
        Returns:
            Slot, and row within it, of each instance, int64 [n]; valid until the next call.
        Raises:
            UserError: a block's bytes are not those that were written.
        """
        done = (self._last_use < now) & (self._block_in_slot >= 0)
        self._slot_of_block[self._block_in_slot[done]] = -1
        self._block_in_slot[done] = -1
        block = np.searchsorted(self._offsets, storage, side="right") - 1
        missing = np.unique(block[self._slot_of_block[block] < 0])
        for number, slot in zip(missing.tolist(), self._free_slots(len(missing)).tolist(), strict=True):
            self._read(number, slot)
        slot = self._slot_of_block[block]
        np.maximum.at(self._last_use, slot, last_use)
        return slot, storage - self._offsets[block]

    def _free_slots(self, count: int) -> np.ndarray:
        free = np.flatnonzero(self._block_in_slot < 0)
        slots = len(self._block_in_slot)
        if len(free) < count:
            added = max(count - len(free), slots // 2)
            self._block_in_slot = np.append(self._block_in_slot, np.full(added, -1))
            self._last_use = np.append(self._last_use, np.full(added, -1))
            free = np.append(free, np.arange(slots, slots + added))
        return free[:count]

    def _read(self, number: int, slot: int) -> None:
        block = self._shard_set.read_block(self._split, number)
        self.blocks_read += 1
        for name, values in vars(block).items():
            if values is not None:
                self.bytes_read += values.nbytes
                self._room(name, len(values), values.dtype)[slot, : len(values)] = values
        self._block_in_slot[slot] = number
        self._slot_of_block[number] = slot
        self._last_use[slot] = -1

    def _room(self, name: str, width: int, dtype: np.dtype) -> np.ndarray:
        """The column, grown if it lacks slots or is narrower than this block."""
        column = self.columns.get(name, np.empty((0, 0), dtype))
        old_slots, old_width = column.shape
        slots = len(self._block_in_slot)
        if old_slots < slots or old_width < width:
            # Blocks are about equally long: an eighth more makes a second widening unlikely.
            grown = np.empty((slots, old_width if width <= old_width else width * 9 // 8), dtype)
            grown[:old_slots, :old_width] = column
            self.columns[name] = column = grown
        return column


def gather_instances(shard_set: ShardSet, split: str, storage_numbers: np.ndarray) -> Instances:
    """The instances with these storage numbers (int64 [n], any order, repeats allowed), with stored masks."""
    cache = BlockCache(shard_set, split)
    slot, row = cache.hold(storage_numbers, 0, np.zeros_like(storage_numbers))
    return _gather(cache.columns, slot, row, masks=True)


def mask_policy(shard_set: ShardSet, rate: float | None = None) -> MaskPolicy:
    """How masks are drawn: at a rate of their own without a bound, or (None) as the stored ones were."""
    bound = None
    if rate is None:
        rate, bound = (shard_set.settings[name] for name in ("masked_lm_prob", "max_predictions"))
    return MaskPolicy.for_tokenizer(shard_set.manifest["tokenizer"], rate=rate, max_predictions=bound)


def load_share(
    order: Order, cache: BlockCache, g: np.ndarray, *, masking: Masking, seed: int, policy: MaskPolicy | None
) -> Instances:
    """The instances at some positions, longest first (equal lengths in the order of g), with their masks.

    Args:
        order: of the training instances.
        cache: of the blocks of the "train" split.
        g: int64 [n], ascending and not before the positions of the last call with this cache.
        masking: "static" for the stored masks, "dynamic" for new ones in each epoch, functions of (seed,
            epoch, storage number) (Liu et al. 2019, "RoBERTa", section 4.1).
        seed, policy: of the dynamic masks.
    Raises:
        UserError: a block's bytes are not those that were written.
    """
    if not len(g):
        none, zero = np.empty(0, dtype=np.uint16), np.zeros(1, dtype=np.int64)
        return Instances(none, zero, none, None, zero, none, none)
    schedule = order.schedule(g)
    slot, row = cache.hold(schedule.storage, int(schedule.window[0]), schedule.last_window)
    offsets = cache.columns["offsets"]
    longest_first = _longest_first(offsets[slot, row + 1] - offsets[slot, row])
    slot, row = slot[longest_first], row[longest_first]
    instances = _gather(cache.columns, slot, row, masks=masking == "static")
    if masking == "static":
        return instances
    epochs = order.epoch(g)
    numbers = range(int(epochs[0]), int(epochs[-1]) + 1)
    epoch_keys = np.array([counter_rng.key(seed, Stream.DYNAMIC_MASK, e) for e in numbers], dtype=np.uint64)
    keys = counter_rng.derive(epoch_keys[epochs - epochs[0]], schedule.storage)
    return _draw_dynamic_masks(instances, keys[longest_first], policy)


def _draw_dynamic_masks(instances: Instances, keys: np.ndarray, policy: MaskPolicy) -> Instances:
    parts = []
    for first in range(0, len(instances), _CHUNK):
        offsets = instances.offsets[first : first + _CHUNK + 1]
        tokens = instances.tokens[offsets[0] : offsets[-1]]
        parts.append(draw_masks(tokens, offsets - offsets[0], keys[first : first + _CHUNK], policy))
    return replace(
        instances,
        masked_lm_offsets=offsets_of(np.concatenate([np.diff(part.offsets) for part in parts])),
        masked_lm_positions=np.concatenate([part.positions for part in parts]),
        masked_lm_inputs=np.concatenate([part.inputs for part in parts]),
    )


class MicroBatches(Sequence[MicroBatch]):
    """The micro-batches of a share. Tensors are built anew on each access, and nothing keeps them."""

    def __init__(self, instances: Instances, bounds: list[int], pin: bool = False):
        self.instances = instances
        self._ranges = list(itertools.pairwise(bounds))
        self._pin = pin

    def __len__(self) -> int:
        return len(self._ranges)

    def __getitem__(self, index: int) -> MicroBatch:
        first, stop = self._ranges[index]
        x, tensor = self.instances, self._tensor
        begin, end = x.offsets[first], x.offsets[stop]
        starts, lengths = x.offsets[first:stop] - begin, np.diff(x.offsets[first : stop + 1])
        position_ids = np.arange(end - begin) - np.repeat(starts, lengths)
        token_type_ids = (position_ids >= np.repeat(x.segment_a[first:stop], lengths)).astype(np.int64)
        mask_counts = np.diff(x.masked_lm_offsets[first : stop + 1])
        chosen = slice(x.masked_lm_offsets[first], x.masked_lm_offsets[stop])
        masked_lm_positions = np.repeat(starts, mask_counts) + x.masked_lm_positions[chosen]
        input_ids = x.tokens[begin:end].astype(np.int64)
        masked_lm_labels = input_ids[masked_lm_positions]
        input_ids[masked_lm_positions] = x.masked_lm_inputs[chosen]
        labels = None if x.next_sentence_labels is None else x.next_sentence_labels[first:stop]
        return MicroBatch(
            input_ids=tensor(input_ids),
            token_type_ids=tensor(token_type_ids),
            position_ids=tensor(position_ids),
            lengths=lengths,
            cls_positions=tensor(starts),
            masked_lm_positions=tensor(masked_lm_positions),
            masked_lm_labels=tensor(masked_lm_labels),
            next_sentence_labels=None if labels is None else tensor(labels.astype(np.int64)),
        )

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).pin_memory() if self._pin else torch.from_numpy(array)


def cut_micro_batches(
    instances: Instances, max_instances: int, max_tokens: int | None = None, pin: bool = False
) -> MicroBatches:
    """Sort by length (descending, stable) and cut.

    Args:
        max_instances, max_tokens: at most, but an instance that alone has more tokens stands alone.
        pin: build the tensors in pinned memory, for asynchronous copies to a GPU.
    """
    lengths = np.diff(instances.offsets)
    if (np.diff(lengths) > 0).any():
        rows = _longest_first(lengths)
        columns = {name: array[None] for name, array in vars(instances).items() if array is not None}
        instances = _gather(columns, np.zeros_like(rows), rows, masks=True)
    bounds = [0]
    while (first := bounds[-1]) < len(instances):
        stop = min(first + max_instances, len(instances))
        if max_tokens is not None:
            too_far = instances.offsets[first] + max_tokens + 1
            stop = max(first + 1, min(stop, int(np.searchsorted(instances.offsets, too_far)) - 1))
        bounds.append(stop)
    return MicroBatches(instances, bounds, pin)


@dataclass(frozen=True)
class StepShare:
    """What a rank trains in one step; `micro_batches` may be empty if there are more ranks than instances."""

    start: int  # position before the global batch
    stop: int  # position after it
    ranges: list[tuple[int, int]]  # half-open ranges of g that the global batch occupies
    micro_batches: MicroBatches
    instances: int  # of this rank, as are the numbers below
    tokens: int
    masked_lm_count: int
    max_length: int  # tokens of the longest instance
    wait_seconds: float = 0.0  # that the consumer waited for the share


class TrainingBatches(Iterator[StepShare]):
    """An endless iterator over the steps of one rank, prepared by a background thread.

    What it yields is a pure function of the arguments other than `depth` and `pin`. What goes wrong in the
    thread, such as a UserError for a block with other bytes than were written, is raised by `next`.

    Args:
        order, shard_set: the training instances.
        consumed: position at which to begin.
        train_batch_size: instances of the global batch.
        rank, world_size: the rank trains the positions g with g mod world_size = rank.
        skipped_ranges: half-open ranges of g that are left out; sorted and disjoint.
        masking, seed, policy: see `load_share`; no policy means that of the stored masks.
        max_instances, max_tokens, pin: see `cut_micro_batches`.
        depth: steps that are prepared ahead of the one being trained, at least 1.
    """

    def __init__(
        self,
        order: Order,
        shard_set: ShardSet,
        *,
        consumed: int,
        train_batch_size: int,
        rank: int,
        world_size: int,
        masking: Masking,
        seed: int,
        policy: MaskPolicy | None = None,
        max_instances: int,
        max_tokens: int | None = None,
        skipped_ranges: Sequence[tuple[int, int]] = (),
        depth: int = 2,
        pin: bool = False,
    ):
        self.cache = BlockCache(shard_set, "train")
        self._consumed = consumed
        self._advance = partial(advance, count=train_batch_size, skipped_ranges=skipped_ranges)
        self._share = partial(share, rank=rank, world_size=world_size)
        if masking == "dynamic" and policy is None:
            policy = mask_policy(shard_set)
        self._load = partial(load_share, order, self.cache, masking=masking, seed=seed, policy=policy)
        self._cut = partial(cut_micro_batches, max_instances=max_instances, max_tokens=max_tokens, pin=pin)
        self._ready: queue.SimpleQueue[StepShare | BaseException | None] = queue.SimpleQueue()
        # Taken before a step is prepared and given back when it is fetched, so that the thread waits in one
        # place only and `close` can wake it there.
        self._places = threading.Semaphore(depth)
        self._closed = False
        self._thread = threading.Thread(target=self._produce, name="TrainingBatches", daemon=True)
        self._thread.start()

    def __next__(self) -> StepShare:
        started = time.perf_counter()
        item = self._ready.get()
        if isinstance(item, BaseException) or item is None:
            self._ready.put(item)  # the same answer to whoever asks again
            raise item or StopIteration
        self._places.release()
        return replace(item, wait_seconds=time.perf_counter() - started)

    def close(self) -> None:
        """End the thread and wait for it; further `next` calls give what was ready and then stop."""
        self._closed = True
        self._places.release()
        self._thread.join()
        self._ready.put(None)

    def _produce(self) -> None:
        try:
            while self._places.acquire() and not self._closed:
                self._ready.put(self._next_share())
        except BaseException as error:
            self._ready.put(error)

    def _next_share(self) -> StepShare:
        start, (ranges, self._consumed) = self._consumed, self._advance(self._consumed)
        instances = self._load(np.concatenate([self._share(*part) for part in ranges]))
        return StepShare(
            start,
            self._consumed,
            ranges,
            self._cut(instances),
            instances=len(instances),
            tokens=len(instances.tokens),
            masked_lm_count=len(instances.masked_lm_positions),
            max_length=int(np.diff(instances.offsets[:2]).sum()),  # the longest comes first
        )


def evaluation_batches(
    shard_set: ShardSet, split: str, rank: int, world_size: int, max_instances: int, limit: int = 0
) -> Iterator[MicroBatch]:
    """A rank's part of a split once, with the stored masks, in micro-batches of at most `max_instances`.

    The rank gets the storage numbers s with s mod world_size = rank below `limit` (0: all), so ranks may get
    unequal numbers. Raises UserError if a block's bytes are not those that were written.
    """
    total = int(shard_set.block_offsets(split)[-1])
    numbers = share(0, min(total, limit) if limit else total, rank, world_size)
    pool = -(-_EVALUATION_POOL // max_instances) * max_instances
    for first in range(0, len(numbers), pool):
        instances = gather_instances(shard_set, split, numbers[first : first + pool])
        yield from cut_micro_batches(instances, max_instances)
