"""Which tokens the model must predict, and what it sees there: the only 80/10/10 code of the project.

Static masks (drawn once, stored in the shards) and dynamic masks (drawn again in every epoch) are the same
function with other keys.
"""

from dataclasses import dataclass

import numpy as np

from data_prep.counter_rng import Stream, below, derive, uniform

POSITION_BITS = 16


@dataclass(frozen=True)
class MaskPolicy:
    """How masks are drawn (Devlin et al. 2019, section 3.1, task 1).

    Attributes:
        vocab_size: number of ids.
        mask_id: id of [MASK].
        never_masked_ids: ids that are never predicted ([CLS], [SEP], [PAD], [MASK]).
        replacement_ids: ids [R] from which a random replacement is drawn (all but the special ones).
        rate: share of an instance's tokens, special ones counted, that are predicted.
        max_predictions: upper bound per instance; None for no bound.
        mask_share: share of the predicted positions that show [MASK].
        random_share: share that show a random id; what is left shows the original id.
    """

    vocab_size: int
    mask_id: int
    never_masked_ids: tuple[int, ...]
    replacement_ids: np.ndarray
    rate: float = 0.15
    max_predictions: int | None = None
    mask_share: float = 0.8
    random_share: float = 0.1

    @classmethod
    def for_tokenizer(cls, description: dict, **options) -> "MaskPolicy":
        """Make the policy from a tokenizer's description (its ids; see `Tokenizer.describe`)."""
        special = description["special_ids"]
        unmaskable = tuple(sorted(special[name] for name in ("pad", "cls", "sep", "mask")))
        ordinary = np.setdiff1d(np.arange(description["vocab_size"]), list(special.values()))
        return cls(description["vocab_size"], special["mask"], unmaskable, ordinary, **options)


@dataclass(frozen=True)
class Masks:
    """Masks of n instances as ragged arrays: offsets uint32[n+1], positions uint16[M], inputs [M].

    `positions` ascend within an instance; `inputs` is what the model sees there, in the tokens' dtype.
    """

    offsets: np.ndarray
    positions: np.ndarray
    inputs: np.ndarray


def number_to_predict(lengths: np.ndarray, candidates: np.ndarray, policy: MaskPolicy) -> np.ndarray:
    """Exact number of predictions per instance, int64[n]: the rate of its length, at least one if it can be."""
    count = np.maximum(1, np.rint(lengths * policy.rate).astype(np.int64))
    if policy.max_predictions is not None:
        count = np.minimum(count, policy.max_predictions)
    return np.minimum(count, candidates)


def draw_masks(tokens: np.ndarray, offsets: np.ndarray, keys: np.ndarray, policy: MaskPolicy) -> Masks:
    """Draw the masks of n instances; each is a pure function of its tokens, its key and the policy.

    Args:
        tokens: ids [T] of all instances, unmasked; instance i is tokens[offsets[i]:offsets[i+1]].
        offsets: [n+1].
        keys: uint64 [n], one per instance.
        policy: how to draw.
    Returns:
        Masks. The positions of an instance are those with the smallest hashes, so their number is exact and
        every set of that size is equally likely.
    """
    lengths = np.diff(offsets).astype(np.int64)
    n, longest = len(lengths), int(lengths.max(initial=0))
    if longest >= 1 << POSITION_BITS:
        raise ValueError(f"an instance of {longest} tokens does not fit 16-bit positions")
    inside = np.arange(longest) < lengths[:, None]  # [n, longest]
    unmaskable = np.zeros(policy.vocab_size, dtype=bool)
    unmaskable[list(policy.never_masked_ids)] = True
    blocked = np.ones((n, longest), dtype=bool)
    blocked[inside] = unmaskable[tokens]
    count = number_to_predict(lengths, longest - blocked.sum(axis=1), policy)

    chosen = _smallest_hashes(derive(keys, int(Stream.MASK_POSITION)), blocked, count)
    row = np.repeat(np.arange(n), count)
    mask_offsets = np.zeros(n + 1, dtype=np.uint32)
    np.cumsum(count, out=mask_offsets[1:])
    original = tokens[offsets[:-1].astype(np.int64)[row] + chosen]
    inputs = _replace(original, derive(keys, int(Stream.MASK_ACTION))[row], chosen, policy)
    return Masks(mask_offsets, chosen.astype(np.uint16), inputs)


def _smallest_hashes(keys: np.ndarray, blocked: np.ndarray, count: np.ndarray) -> np.ndarray:
    """Positions int64[sum(count)] of the count[i] smallest hashes of row i, ascending within a row."""
    longest = blocked.shape[1]
    if longest == 0:
        return np.zeros(0, dtype=np.int64)
    # Hash and position share one word, so that a plain row sort (vectorised in numpy) replaces an argsort.
    position_mask = np.uint64((1 << POSITION_BITS) - 1)
    words = derive(keys[:, None], np.arange(longest)) & ~position_mask | np.arange(longest, dtype=np.uint64)
    words[blocked] = np.uint64(0xFFFFFFFFFFFFFFFF)
    words.sort(axis=1)
    widest = int(count.max(initial=0))
    taken = np.arange(widest) < count[:, None]
    positions = np.where(taken, (words[:, :widest] & position_mask).astype(np.uint16), np.uint16(0xFFFF))
    positions.sort(axis=1)
    return positions[taken].astype(np.int64)


def _replace(original: np.ndarray, keys: np.ndarray, positions: np.ndarray, policy: MaskPolicy) -> np.ndarray:
    """What the input shows at the chosen positions: [MASK], a random id or the original one."""
    words = derive(keys, positions)
    action = uniform(words)
    pick = below(derive(words, int(Stream.MASK_REPLACEMENT)), len(policy.replacement_ids))
    random_ids = policy.replacement_ids[pick]
    inputs = np.where(action < policy.mask_share + policy.random_share, random_ids, original)
    inputs[action < policy.mask_share] = policy.mask_id
    return inputs.astype(original.dtype)
