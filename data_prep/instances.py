"""Token documents to MLM/NSP instances, after Devlin et al. 2019, section 3.1 and appendix A.2.

Pure functions: every draw is keyed by (seed, document hash, duplicate, k), so an instance depends on its
document, on the documents that share its bucket and on the settings, and on nothing else.

Three deliberate differences from the script that was published with the paper:

- the 10 % of short sequences are drawn per instance, not per document, so long documents have them too;
- the random/actual coin is thrown first and is always fair: an actual next sentence is found even where one
  sentence fills the instance (it is followed by the next one) or ends the document (the one before it joins;
  a document of one sentence is cut at a random token). In the script one sentence is always "random";
- a random next sentence never comes from the same document.
"""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from data_prep.counter_rng import Stream, derive, key, uniform
from data_prep.masking import MaskPolicy, draw_masks
from data_prep.ragged import offsets_of, ragged_range
from data_prep.shards import BLOCK_INSTANCES, Block

SPECIAL_TOKENS = 3  # [CLS] A [SEP] B [SEP]
_DRAWS = 6


@dataclass(frozen=True)
class InstanceSettings:
    """What instances look like.

    Attributes:
        seq_len: longest instance in tokens, special ones counted.
        short_seq_prob: share of instances with a target length drawn from 2 to the longest.
        random_next_prob: share of instances whose B comes from another document.
        duplicates: how often each document is used, with other cuts, partners and masks.
        seed: of everything random.
    """

    seq_len: int = 128
    short_seq_prob: float = 0.1
    random_next_prob: float = 0.5
    duplicates: int = 1
    seed: int = 0


@dataclass(frozen=True)
class TokenDocuments:
    """D documents of S sentences as ragged arrays.

    Attributes:
        tokens: ids [T] without special tokens.
        sentence_offsets: int64 [S+1] into tokens; no sentence is empty.
        document_offsets: int64 [D+1] into the sentences; no document is empty.
        hashes: uint64 [D, 2], the 128-bit hash of each document's text.
    """

    tokens: np.ndarray
    sentence_offsets: np.ndarray
    document_offsets: np.ndarray
    hashes: np.ndarray

    def __len__(self) -> int:
        return len(self.hashes)

    @classmethod
    def from_lengths(cls, tokens, sentence_tokens, document_sentences, hashes) -> "TokenDocuments":
        """Make it from the number of tokens of each sentence [S] and of sentences of each document [D]."""
        return cls(tokens, offsets_of(sentence_tokens), offsets_of(document_sentences), hashes)

    def take(self, index: np.ndarray) -> "TokenDocuments":
        """The documents at these places, in this order."""
        count = np.diff(self.document_offsets)[index]
        sentences = ragged_range(self.document_offsets[:-1][index], count)
        lengths = np.diff(self.sentence_offsets)[sentences]
        tokens = self.tokens[ragged_range(self.sentence_offsets[:-1][sentences], lengths)]
        return self.from_lengths(tokens, lengths, count, self.hashes[index])


@dataclass(frozen=True)
class Pairs:
    """n instances as token ranges: A = tokens[a_start:a_end], B = tokens[b_start:b_end]; all arrays [n].

    `keys` (uint64) identify the instances: their masks and their order are drawn from them.
    """

    a_start: np.ndarray
    a_end: np.ndarray
    b_start: np.ndarray
    b_end: np.ndarray
    labels: np.ndarray
    keys: np.ndarray

    def take(self, index: np.ndarray) -> "Pairs":
        """The instances at these places, in this order."""
        return Pairs(*(getattr(self, name)[index] for name in self.__dataclass_fields__))


def build_pairs(documents: TokenDocuments, settings: InstanceSettings) -> Pairs:
    """All instances of a bucket, in a random order.

    Raises:
        ValueError: fewer than two documents (there is no random next sentence then).
    """
    if len(documents) < 2:
        raise ValueError("a bucket needs at least two documents")
    document_keys = derive(key(settings.seed, Stream.INSTANCE), documents.hashes[:, 0])
    document_keys = derive(document_keys, documents.hashes[:, 1])
    rows, keys = [], []
    for duplicate in range(settings.duplicates):
        duplicate_keys = derive(document_keys, duplicate)
        chosen, owner, k = _choose_segments(documents, duplicate_keys, settings)
        rows.append(chosen)
        keys.append(derive(duplicate_keys[owner], k))
    chosen, keys = np.concatenate(rows), np.concatenate(keys)
    pairs = _truncate(
        Pairs(*chosen.T[:4], chosen[:, 4].astype(np.uint8), keys), settings.seq_len - SPECIAL_TOKENS
    )
    return pairs.take(np.argsort(derive(keys, int(Stream.INSTANCE_ORDER)), kind="stable"))


def _choose_segments(
    documents: TokenDocuments, document_keys: np.ndarray, settings: InstanceSettings
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cut every document into A and B: rows (a_start, a_end, b_start, b_end, label), document and k of each."""
    longest = settings.seq_len - SPECIAL_TOKENS
    offsets = documents.sentence_offsets.tolist()
    bounds = documents.document_offsets.tolist()
    draws = _draws(documents, document_keys)
    short = (draws[0] < settings.short_seq_prob).tolist()
    short_target = (2 + draws[1] * (longest - 1)).astype(np.int64).tolist()
    is_random = (draws[2] < settings.random_next_prob).tolist()
    cut, other, place = draws[3].tolist(), draws[4].tolist(), draws[5].tolist()
    rows, owner, numbers = [], [], []
    last = len(bounds) - 1
    for document in range(last):
        first, end = bounds[document], bounds[document + 1]
        i, k = first, 0
        while i < end:
            w = first + k  # every instance uses up a sentence at least: k stays below the document's count
            target = short_target[w] if short[w] else longest
            j = min(bisect_left(offsets, offsets[i] + target, i + 1, end), end)
            if is_random[w] or (end - first == 1 and offsets[end] - offsets[first] == 1):
                middle = i + 1 + int(cut[w] * (j - i - 1))
                partner = int(other[w] * (last - 1))
                partner += partner >= document
                b_first, b_end = bounds[partner], bounds[partner + 1]
                b = b_first + int(place[w] * (b_end - b_first))
                missing = target - (offsets[middle] - offsets[i])
                stop = min(bisect_left(offsets, offsets[b] + missing, b + 1, b_end), b_end)
                rows.append((offsets[i], offsets[middle], offsets[b], offsets[stop], 1))
                i = middle
            else:
                a_start, a_end, stop = _actual_next(offsets, first, i, j, end, cut[w])
                rows.append((a_start, a_end, a_end, offsets[stop], 0))
                i = stop
            owner.append(document)
            numbers.append(k)
            k += 1
    return np.array(rows, dtype=np.int64), np.array(owner), np.array(numbers)


def _actual_next(
    offsets: list[int], first: int, i: int, j: int, end: int, cut: float
) -> tuple[int, int, int]:
    """Token range of A, and the sentence behind B, for sentences i to j of a document from `first` to `end`."""
    if j - i == 1 and j < end:
        j += 1
    elif j - i == 1 and i > first:
        i -= 1
    elif j - i == 1:
        return offsets[i], offsets[i] + 1 + int(cut * (offsets[j] - offsets[i] - 1)), j
    return offsets[i], offsets[i + 1 + int(cut * (j - i - 1))], j


def _draws(documents: TokenDocuments, document_keys: np.ndarray) -> list[np.ndarray]:
    """`_DRAWS` uniform numbers for each sentence of each document, as float64 [S] each."""
    counts = np.diff(documents.document_offsets)
    k = ragged_range(np.zeros(len(counts), dtype=np.int64), counts)
    words = derive(derive(np.repeat(document_keys, counts), k), int(Stream.SEGMENTS))
    return [uniform(derive(words, number)) for number in range(_DRAWS)]


def _truncate(pairs: Pairs, longest: int) -> Pairs:
    """Shorten A and B to `longest` tokens together: always the longer one, at a random end each time."""
    a, b = pairs.a_end - pairs.a_start, pairs.b_end - pairs.b_start
    excess = np.maximum(a + b - longest, 0)
    # Token by token the longer one loses (B where they are equal): first the difference, then in turns.
    level = np.maximum(excess - np.abs(a - b), 0)
    from_longer = excess - level
    lost_a = np.where(a > b, from_longer, 0) + level // 2
    lost_b = excess - lost_a
    keys = derive(pairs.keys, int(Stream.TRUNCATION))
    front_a, front_b = _heads(derive(keys, 0), lost_a), _heads(derive(keys, 1), lost_b)
    return Pairs(
        pairs.a_start + front_a,
        pairs.a_end - (lost_a - front_a),
        pairs.b_start + front_b,
        pairs.b_end - (lost_b - front_b),
        pairs.labels,
        pairs.keys,
    )


def _heads(keys: np.ndarray, tosses: np.ndarray) -> np.ndarray:
    """Number of heads among tosses[i] fair coins of key i, int64[n]."""
    heads = np.zeros(len(keys), dtype=np.int64)
    remaining = tosses.copy()
    number = 0
    while True:
        active = np.flatnonzero(remaining > 0)
        if len(active) == 0:
            return heads
        bits = np.minimum(remaining[active], 64).astype(np.uint64)
        words = derive(keys[active], number) >> (np.uint64(64) - bits)
        heads[active] += np.bitwise_count(words)
        remaining[active] -= 64
        number += 1


def assemble_blocks(
    documents: TokenDocuments, pairs: Pairs, special_ids: dict[str, int], policy: MaskPolicy
) -> Iterator[Block]:
    """Turn instances into blocks of `BLOCK_INSTANCES`, static masks drawn; memory is that of one block."""
    for start in range(0, len(pairs.keys), BLOCK_INSTANCES):
        part = pairs.take(slice(start, start + BLOCK_INSTANCES))
        a, b = part.a_end - part.a_start, part.b_end - part.b_start
        offsets = offsets_of(a + b + SPECIAL_TOKENS)
        tokens = np.empty(offsets[-1], dtype=documents.tokens.dtype)
        begin = offsets[:-1]
        tokens[begin] = special_ids["cls"]
        tokens[begin + a + 1] = tokens[offsets[1:] - 1] = special_ids["sep"]
        tokens[ragged_range(begin + 1, a)] = documents.tokens[ragged_range(part.a_start, a)]
        tokens[ragged_range(begin + a + 2, b)] = documents.tokens[ragged_range(part.b_start, b)]
        masks = draw_masks(tokens, offsets, part.keys, policy)
        yield Block(
            tokens=tokens,
            offsets=offsets.astype(np.uint32),
            segment_a=(a + 2).astype(np.uint16),
            next_sentence_labels=part.labels,
            masked_lm_offsets=masks.offsets,
            masked_lm_positions=masks.positions,
            masked_lm_inputs=masks.inputs,
        )
