"""Counter-based random numbers: every draw is a pure function of a key and a number.

Nothing random is state, so any part of a run can be computed again, elsewhere or later, from its numbers
alone. The mixing function is the finaliser of SplitMix64 (Steele, Lea & Flood 2014, "Fast Splittable
Pseudorandom Number Generators", figure 17), which passes BigCrush when fed a counter.
"""

import enum

import numpy as np

GOLDEN_GAMMA = 0x9E3779B97F4A7C15
MASK_64 = 0xFFFFFFFFFFFFFFFF


class Stream(enum.IntEnum):
    """Tags that keep the uses of one seed apart. Numbers are part of the on-disk format: never reuse one."""

    INSTANCE = 1
    INSTANCE_ORDER = 2
    MASK_POSITION = 3
    MASK_ACTION = 4
    MASK_REPLACEMENT = 5
    TRUNCATION = 6
    BLOCK_ORDER = 7
    WINDOW_ORDER = 8
    DYNAMIC_MASK = 9
    DROPOUT = 10
    INITIALISATION = 11
    SEGMENTS = 13
    BATCH_ORDER = 14


def _mix_int(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK_64
    return z ^ (z >> 31)


def key(*parts: int) -> int:
    """Fold seed, stream tag and further numbers (each taken modulo 2^64) into one 64-bit key."""
    state = 0
    for part in parts:
        state = _mix_int((state + GOLDEN_GAMMA + _mix_int((part + GOLDEN_GAMMA) & MASK_64)) & MASK_64)
    return state


def _mix(z: np.ndarray) -> np.ndarray:
    z ^= z >> np.uint64(30)
    z *= np.uint64(0xBF58476D1CE4E5B9)
    z ^= z >> np.uint64(27)
    z *= np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return z


def derive(keys: np.ndarray | int, numbers: np.ndarray | int) -> np.ndarray:
    """Hash (key, number) pairs to uniform 64-bit words, elementwise with broadcasting.

    Args:
        keys: uint64 of any shape, or one key.
        numbers: non-negative integers of a shape that broadcasts with `keys`.
    Returns:
        uint64 array of the broadcast shape; it can serve as keys again.
    """
    with np.errstate(over="ignore"):
        spread = _mix((np.asarray(numbers).astype(np.uint64) + np.uint64(1)) * np.uint64(GOLDEN_GAMMA))
        return _mix(np.asarray(keys, dtype=np.uint64) + spread)


def uniform(words: np.ndarray) -> np.ndarray:
    """Map uint64 words to float64 in [0, 1), with the full 53 bits of a double."""
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


def below(words: np.ndarray, bounds: np.ndarray | int) -> np.ndarray:
    """Map uint64 words to integers in [0, bound), elementwise; the bias is under 2^-21 for bounds to 2^31."""
    return (uniform(words) * np.asarray(bounds)).astype(np.int64)
