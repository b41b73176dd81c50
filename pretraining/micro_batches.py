"""Instances end to end, longest first, cut into micro-batches of tensors.

A micro-batch is bounded by instances, by tokens, or by both. Instances are cheap to hold (2 bytes per token);
tensors (24 bytes per token) are built when a micro-batch is asked for. Nothing here is padded.
"""

import itertools
from collections.abc import Sequence

import numpy as np
import torch

from data_prep.ragged import offsets_of
from data_prep.shards import Block
from pretraining.model import MicroBatch

# Instances that are gathered and masked together: temporary arrays (8 bytes per token) stay at a few MB.
CHUNK = 1024

Instances = Block  # of any number of instances, with int64 offsets


def _take_ragged(flat: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The pieces flat[starts[i] : starts[i] + lengths[i]] end to end, and their offsets int64 [n+1]."""
    offsets = offsets_of(lengths)
    values = np.empty(offsets[-1], flat.dtype)
    shifts = starts - offsets[:-1]
    for first in range(0, len(starts), CHUNK):
        rows = slice(first, first + CHUNK)
        begin, end = offsets[first], offsets[min(first + CHUNK, len(starts))]
        index = np.repeat(shifts[rows], lengths[rows])
        index += np.arange(begin, end)
        # The indices are right by construction; with mode="raise" numpy would copy through a buffer.
        np.take(flat, index, out=values[begin:end], mode="clip")
    return values, offsets


def rows_longest_first(lengths: np.ndarray) -> np.ndarray:
    """Places of the lengths [n] in falling order, int64 [n]; equal ones stay in order."""
    # Instances have at most 65,535 tokens (their positions are 16 bits), for which numpy has a radix sort.
    return np.argsort(~lengths.astype(np.uint16), kind="stable")


def gather(columns: dict[str, np.ndarray], slot: np.ndarray, row: np.ndarray, masks: bool) -> Instances:
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


def micro_batch_bounds(offsets: np.ndarray, max_instances: int, max_tokens: int | None = None) -> list[int]:
    """Where each micro-batch begins, and the number of instances at the end.

    Args:
        offsets: int64 [n+1], at which each instance begins, and all tokens at the end.
        max_instances, max_tokens: at most, but an instance that alone has more tokens stands alone.
    """
    bounds, instances = [0], len(offsets) - 1
    while (first := bounds[-1]) < instances:
        stop = min(first + max_instances, instances)
        if max_tokens is not None:
            too_far = offsets[first] + max_tokens + 1
            stop = max(first + 1, min(stop, int(np.searchsorted(offsets, too_far)) - 1))
        bounds.append(stop)
    return bounds


def cut_micro_batches(
    instances: Instances, max_instances: int, max_tokens: int | None = None, pin: bool = False
) -> MicroBatches:
    """Sort by length (descending, stable) and cut.

    Args:
        max_instances, max_tokens: see `micro_batch_bounds`.
        pin: build the tensors in pinned memory, for asynchronous copies to a GPU.
    """
    lengths = np.diff(instances.offsets)
    if (np.diff(lengths) > 0).any():
        rows = rows_longest_first(lengths)
        columns = {name: array[None] for name, array in vars(instances).items() if array is not None}
        instances = gather(columns, np.zeros_like(rows), rows, masks=True)
    return MicroBatches(instances, micro_batch_bounds(instances.offsets, max_instances, max_tokens), pin)
