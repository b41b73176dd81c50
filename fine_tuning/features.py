"""From texts to what a model reads: ragged arrays of ids, and which examples make the n-th batch.

Everything is unpadded: the instances of pretraining.data with no position masked.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from data_prep import counter_rng
from data_prep.counter_rng import Stream
from data_prep.ragged import offsets_of, ragged_range
from data_prep.shards import token_dtype
from data_prep.tokenizer import Tokenizer
from pretraining.micro_batches import Instances

# Texts that are encoded together; more are not faster.
_CHUNK = 1024
# Batches whose texts are sorted by length together: enough that few lengths meet in a batch, and few enough
# that a small training set does not give the same batches in every epoch.
POOL_BATCHES = 4


@dataclass(frozen=True)
class Features:
    """Instances in the order of their examples.

    Attributes:
        instances: token ids and segments of n examples.
        truncated: how many of them were cut to the maximum length.
    """

    instances: Instances
    truncated: int

    def __len__(self) -> int:
        return len(self.instances)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each instance, int64 [n]."""
        return np.diff(self.instances.offsets)


def sentence_features(tokenizer: Tokenizer, columns: Sequence[Sequence[str]], max_length: int) -> Features:
    """`[CLS] text [SEP]` of each text of the one column, at most `max_length` tokens (Devlin et al. 2019, figure 4)."""
    (texts,) = columns
    room = max_length - 2
    pieces, lengths, truncated = [np.empty(0, dtype=np.int32)], [], 0
    for first in range(0, len(texts), _CHUNK):
        for ids in tokenizer.encode(texts[first : first + _CHUNK]):
            truncated += len(ids) > room
            pieces.append(ids[:room])
            lengths.append(len(pieces[-1]))
    lengths = np.array(lengths, dtype=np.int64)
    offsets = offsets_of(lengths + 2)
    tokens = np.empty(offsets[-1], dtype=token_dtype(tokenizer.vocab_size))
    tokens[offsets[:-1]] = tokenizer.cls_id
    tokens[ragged_range(offsets[:-1] + 1, lengths)] = np.concatenate(pieces)
    tokens[offsets[1:] - 1] = tokenizer.sep_id
    return Features(_unmasked(tokens, offsets, segment_a=lengths + 2), int(truncated))


FEATURES: dict[str, Callable[[Tokenizer, Sequence[Sequence[str]], int], Features]] = {
    "classification": sentence_features,
}


def select(instances: Instances, rows: np.ndarray) -> Instances:
    """The instances with these numbers (int64 [n], any order), which have no masked positions."""
    starts = instances.offsets[rows]
    lengths = instances.offsets[rows + 1] - starts
    tokens = instances.tokens[ragged_range(starts, lengths)]
    return _unmasked(tokens, offsets_of(lengths), instances.segment_a[rows])


def _unmasked(tokens: np.ndarray, offsets: np.ndarray, segment_a: np.ndarray) -> Instances:
    no_masks, none = np.zeros(len(offsets), dtype=np.int64), np.empty(0, dtype=np.int64)
    return Instances(tokens, offsets, segment_a, None, no_masks, none, tokens[:0])


def epoch_batches(lengths: np.ndarray, batch_size: int, seed: int, epoch: int) -> list[np.ndarray]:
    """Cut an epoch into batches, each of texts of similar length, in random order.

    A pure function of the arguments: examples are shuffled, sorted by length within pools of POOL_BATCHES
    batches, cut, and the batches shuffled.

    Args:
        lengths: int64 [n], tokens of each example.
        batch_size: examples per batch; one batch of the epoch may have fewer.
        seed, epoch: decide the order.
    Returns:
        Numbers of the examples of each batch, longest first; every example is in exactly one.
    """
    key = counter_rng.key(seed, Stream.BATCH_ORDER, epoch)
    rows = _permutation(counter_rng.key(key, 0), len(lengths))
    pools = np.arange(len(rows)) // (batch_size * POOL_BATCHES)
    rows = rows[np.lexsort((-lengths[rows], pools))]
    batches = [rows[first : first + batch_size] for first in range(0, len(rows), batch_size)]
    return [batches[i] for i in _permutation(counter_rng.key(key, 1), len(batches))]


def _permutation(key: int, n: int) -> np.ndarray:
    return np.argsort(counter_rng.derive(key, np.arange(n)), kind="stable")
