"""Counter-based random numbers and the 80/10/10 masks that are drawn from them."""

from itertools import combinations
from math import comb, sqrt

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep.counter_rng import Stream, below, derive, key, uniform
from data_prep.masking import MaskPolicy, Masks, draw_masks

WORD = 1 << 64
SPECIAL = {"pad": 0, "unk": 1, "cls": 2, "sep": 3, "mask": 4}
VOCAB = 1000
FAST = settings(max_examples=100, deadline=None)
KEYS = st.integers(0, WORD - 1)


def splitmix64(seed: int, number: int = 0) -> int:
    """Output `number` (from 0) of SplitMix64 with this seed, in plain Python after the paper's figure 17."""
    state = (seed + (number + 1) * 0x9E3779B97F4A7C15) % WORD
    state = ((state ^ state >> 30) * 0xBF58476D1CE4E5B9) % WORD
    state = ((state ^ state >> 27) * 0x94D049BB133111EB) % WORD
    return state ^ state >> 31


def finaliser(state: int) -> int:
    return splitmix64(state - 0x9E3779B97F4A7C15)


def chi_square(observed: np.ndarray) -> float:
    """Chi-square against equal frequencies, in standard deviations of its own distribution."""
    observed = observed.astype(float).ravel()
    statistic = ((observed - observed.mean()) ** 2 / observed.mean()).sum()
    return (statistic - (len(observed) - 1)) / sqrt(2 * (len(observed) - 1))


# Random numbers


def test_reference_is_splitmix64():
    """The reference of the tests below gives the outputs that other implementations print for seed 1234567."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert [splitmix64(1234567, number) for number in range(4)] == published


@FAST
@given(st.lists(st.integers(-(1 << 70), 1 << 70), max_size=6))
def test_key_folds_parts_through_splitmix64(parts):
    """A key is the fold of its parts: each is hashed and added to the state, and the sum is hashed."""
    state = 0
    for part in parts:
        state = splitmix64(state + splitmix64(part))
    assert key(*parts) == state


@FAST
@given(st.lists(KEYS, min_size=1, max_size=5), st.lists(KEYS, min_size=1, max_size=5))
def test_derive_hashes_key_plus_counter_output(keys, numbers):
    """derive(key, n) is the finaliser of the key plus SplitMix64's n-th output from seed 0, with broadcasting."""
    words = derive(np.array(keys, dtype=np.uint64)[:, None], np.array(numbers, dtype=np.uint64))
    assert words.dtype == np.uint64
    assert words.tolist() == [[finaliser(one + splitmix64(0, number)) for number in numbers] for one in keys]
    assert int(derive(keys[0], numbers[0])) == int(words[0, 0])


@pytest.mark.parametrize("shift", [0, 8, 28, 48, 56])
@pytest.mark.parametrize("what", ["counters", "keys", "nested"])
def test_words_are_uniform(what, shift):
    """Any byte of the words is uniform (chi-square): over counters, over keys that count, and over both."""
    counter = np.arange(1 << 17)
    words = {
        "counters": lambda: derive(key(7), counter),
        "keys": lambda: derive(counter.astype(np.uint64), 3),
        "nested": lambda: derive(derive(key(7), counter >> 8), counter & 255),
    }[what]()
    assert len(np.unique(words)) == len(words)
    assert abs(chi_square(np.bincount((words >> np.uint64(shift)).astype(np.uint8), minlength=256))) < 5


def test_neighbouring_counters_are_independent():
    """Pairs of words of neighbouring counters fill the square evenly (chi-square on 64 × 64 cells)."""
    cells = below(derive(key(3), np.arange(1 << 18)), 64)
    assert abs(chi_square(np.bincount(cells[:-1:2] * 64 + cells[1::2], minlength=4096))) < 5


def test_streams_differ():
    """Under one seed or one key no two streams agree in more bits than chance gives."""
    counter = np.arange(2000)
    assert len(set(Stream)) == len(Stream.__members__)
    for first, second in combinations(Stream, 2):
        for a, b in (
            (derive(key(0, first), counter), derive(key(0, second), counter)),
            (derive(counter.astype(np.uint64), int(first)), derive(counter.astype(np.uint64), int(second))),
        ):
            differing = np.bitwise_count(a ^ b).mean()
            assert abs(differing - 32) < 6 * 4 / sqrt(len(counter)), (first, second)


def test_uniform_and_below_stay_inside_and_reach_the_ends():
    """uniform is in [0, 1), below in [0, bound) for the extreme words too, and every integer is as likely."""
    extremes = np.array([0, WORD - 1], dtype=np.uint64)
    assert uniform(extremes).tolist() == [0.0, 1 - 2.0**-53]
    for bound in (1, 2, 3, 5, 7, 1000, (1 << 31) - 1, 1 << 31):
        assert below(extremes, bound).tolist() == [0, bound - 1]
    words = derive(key(1), np.arange(100_000))
    assert abs(chi_square(np.bincount(below(words, 77), minlength=77))) < 5
    assert below(words[:3], np.array([1, 2, 3])).tolist() == [
        int(w / WORD * (i + 1)) for i, w in enumerate(words[:3].tolist())
    ]


# Masks


def policy(**options) -> MaskPolicy:
    return MaskPolicy.for_tokenizer({"vocab_size": VOCAB, "special_ids": SPECIAL}, **options)


def instances(lengths: np.ndarray, seed: int = 0, dtype=np.uint16) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and offsets of `[CLS] A [SEP] B [SEP]` with random ordinary and unknown ids."""
    random = np.random.default_rng(seed)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    tokens = random.integers(5, VOCAB, offsets[-1]).astype(dtype)
    tokens[random.random(len(tokens)) < 0.02] = SPECIAL["unk"]
    tokens[offsets[:-1]] = SPECIAL["cls"]
    tokens[offsets[1:] - 1] = SPECIAL["sep"]
    tokens[offsets[:-1] + random.integers(2, lengths - 2)] = SPECIAL["sep"]
    return tokens, offsets


def rows(masks: Masks) -> list[tuple[list[int], list[int]]]:
    bounds = masks.offsets.tolist()
    return [
        (masks.positions[low:high].tolist(), masks.inputs[low:high].tolist())
        for low, high in zip(bounds[:-1], bounds[1:], strict=True)
    ]


@pytest.fixture(scope="module")
def many():
    """17,000 instances of 8 to 160 tokens and their masks: more than 200,000 predictions."""
    lengths = np.random.default_rng(1).integers(8, 161, 17_000)
    tokens, offsets = instances(lengths)
    keys = derive(key(5), np.arange(len(lengths)))
    masks = draw_masks(tokens, offsets, keys, policy())
    assert len(masks.positions) > 200_000
    original = tokens[np.repeat(offsets[:-1], np.diff(masks.offsets)) + masks.positions]
    return tokens, offsets, keys, masks, original


@FAST
@given(
    st.lists(st.lists(st.sampled_from([0, 1, 2, 3, 4, 5, 6, 999]), max_size=40), max_size=6),
    st.sampled_from([0.0, 0.15, 0.5, 1.0]),
    st.sampled_from([None, 1, 3]),
    st.integers(0, 1000),
)
def test_counts_are_exact_and_special_tokens_are_spared(sequences, rate, max_predictions, seed):
    """Each instance has rate × length predictions, at least one, at most the bound and its maskable tokens;
    they ascend, lie inside, and are never [PAD], [CLS], [SEP] or [MASK]."""
    tokens = np.array([token for sequence in sequences for token in sequence], dtype=np.uint16)
    offsets = np.concatenate([[0], np.cumsum([len(sequence) for sequence in sequences])]).astype(np.int64)
    keys = derive(key(seed), np.arange(len(sequences)))
    masks = draw_masks(tokens, offsets, keys, policy(rate=rate, max_predictions=max_predictions))
    assert (masks.offsets.dtype, masks.positions.dtype, masks.inputs.dtype) == ("uint32", "uint16", "uint16")
    found = rows(masks)
    assert len(found) == len(sequences)
    for (positions, _), sequence in zip(found, sequences, strict=True):
        maskable = [place for place, token in enumerate(sequence) if token not in (0, 2, 3, 4)]
        wanted = max(1, round(len(sequence) * rate))
        assert len(positions) == min(wanted, max_predictions or wanted, len(maskable))
        assert positions == sorted(set(positions))
        assert set(positions) <= set(maskable)


def test_special_tokens_are_spared_in_bulk(many):
    """Among 200,000 predictions there is no special token, and all positions ascend within their instance."""
    tokens, offsets, _, masks, original = many
    assert not np.isin(original, [0, 2, 3, 4]).any()
    assert (original == SPECIAL["unk"]).any()
    row = np.repeat(np.arange(len(offsets) - 1), np.diff(masks.offsets))
    assert (np.diff(row * (1 << 16) + masks.positions.astype(np.int64)) > 0).all()
    assert (masks.positions < np.diff(offsets)[row]).all()


def test_shares_are_80_10_10(many):
    """80 % show [MASK], 10 % a random id and 10 % the original, each within 5 standard errors of 200,000 draws."""
    *_, masks, original = many
    number = len(original)
    by_chance = 0.1 / len(policy().replacement_ids) * (original != SPECIAL["unk"]).mean()
    shown_mask = (masks.inputs == SPECIAL["mask"]).mean()
    shown_original = (masks.inputs == original).mean()
    for share, expected in (
        (shown_mask, 0.8),
        (shown_original, 0.1 + by_chance),
        (1 - shown_mask - shown_original, 0.1 - by_chance),
    ):
        assert abs(share - expected) < 5 * sqrt(expected * (1 - expected) / number)


def test_what_is_shown_does_not_depend_on_the_place(many):
    """The share of [MASK] is the same in every tenth of the positions: place and action are drawn apart."""
    *_, masks, _ = many
    shown = masks.inputs == SPECIAL["mask"]
    for tenth in np.array_split(np.argsort(masks.positions, kind="stable"), 10):
        assert abs(shown[tenth].mean() - 0.8) < 5 * sqrt(0.16 / len(tenth))


def test_every_set_of_positions_is_equally_likely():
    """In 60,000 draws from one instance of 20 tokens each of its 17 ordinary positions, and each of their 680
    triples, comes up equally often (chi-square)."""
    number, length = 60_000, 20
    tokens = np.full((number, length), 7, dtype=np.uint16)
    tokens[:, 0], tokens[:, 8], tokens[:, 19] = SPECIAL["cls"], SPECIAL["sep"], SPECIAL["sep"]
    offsets = np.arange(number + 1) * length
    masks = draw_masks(tokens.ravel(), offsets, derive(key(2), np.arange(number)), policy())
    positions = masks.positions.reshape(number, 3).astype(int)
    ordinary = np.setdiff1d(np.arange(length), [0, 8, 19])
    frequency = np.bincount(positions.ravel(), minlength=length)
    assert frequency[[0, 8, 19]].sum() == 0
    # Drawing three of 17 without putting back makes the frequencies steadier than chi-square's, by this factor.
    statistic = ((frequency[ordinary] - number * 3 / 17) ** 2 / (number * 3 / 17)).sum() / (1 - 2 / 16)
    assert (statistic - 16) / sqrt(32) < 5
    triples = {triple: place for place, triple in enumerate(combinations(ordinary.tolist(), 3))}
    assert len(triples) == comb(17, 3)
    counts = np.bincount([triples[tuple(row)] for row in positions.tolist()], minlength=len(triples))
    assert abs(chi_square(counts)) < 5


def test_random_ids_are_uniform_and_never_special(many):
    """Random replacements are uniform over the ordinary ids (chi-square) and never one of the special ids."""
    tokens, offsets, keys, masks, original = many
    drawn = draw_masks(tokens, offsets, keys, policy(mask_share=0.0, random_share=1.0)).inputs
    assert drawn.min() == 5
    assert drawn.max() == VOCAB - 1
    assert abs(chi_square(np.bincount(drawn, minlength=VOCAB)[5:])) < 5
    replaced = masks.inputs[(masks.inputs != SPECIAL["mask"]) & (masks.inputs != original)]
    assert replaced.min() >= 5
    assert abs(chi_square(np.bincount(replaced, minlength=VOCAB)[5:])) < 5


def test_masks_do_not_depend_on_neighbours(many):
    """Instances drawn one by one, or in another order, have the masks that they have in a ragged call of all."""
    tokens, offsets, keys, masks, _ = many
    together = rows(masks)
    for i in range(300):
        one = tokens[offsets[i] : offsets[i + 1]]
        assert rows(draw_masks(one, np.array([0, len(one)]), keys[i : i + 1], policy())) == [together[i]]
    order = np.random.default_rng(3).permutation(300)
    shuffled = np.concatenate([tokens[offsets[i] : offsets[i + 1]] for i in order])
    lengths = np.diff(offsets)[order]
    again = draw_masks(shuffled, np.concatenate([[0], np.cumsum(lengths)]), keys[order], policy())
    assert rows(again) == [together[i] for i in order]


def test_masks_are_a_function_of_the_key(many):
    """The same keys give the same masks; other keys give masks that share only what chance gives."""
    tokens, offsets, keys, masks, _ = many
    again = draw_masks(tokens, offsets, keys.copy(), policy())
    assert all(
        np.array_equal(getattr(masks, name), getattr(again, name))
        for name in ("offsets", "positions", "inputs")
    )
    other = draw_masks(tokens, offsets, derive(keys, 1), policy())
    flags = np.zeros((2, len(tokens)), dtype=bool)
    for flag, drawn in zip(flags, (masks, other), strict=True):
        flag[np.repeat(offsets[:-1], np.diff(drawn.offsets)) + drawn.positions] = True
    shared = flags.all(axis=0).sum() / flags[0].sum()
    assert 0.14 < shared < 0.18


def test_wide_ids_and_impossible_lengths():
    """uint32 ids stay uint32, no instance gives no masks, and 65,536 tokens, which 16-bit positions cannot
    hold, are refused while 65,535 are not."""
    tokens, offsets = instances(np.array([20, 30]), dtype=np.uint32)
    assert draw_masks(tokens, offsets, derive(0, np.arange(2)), policy()).inputs.dtype == np.uint32
    nothing = draw_masks(tokens[:0], np.zeros(1, dtype=np.int64), np.zeros(0, dtype=np.uint64), policy())
    assert (nothing.offsets.tolist(), len(nothing.positions)) == ([0], 0)
    longest = np.full(65_536, 9, dtype=np.uint16)
    masks = draw_masks(longest[1:], np.array([0, 65_535]), derive(0, np.arange(1)), policy(rate=1.0))
    assert masks.positions.tolist() == list(range(65_535))
    with pytest.raises(ValueError, match="16-bit"):
        draw_masks(longest, np.array([0, 65_536]), derive(0, np.arange(1)), policy())
