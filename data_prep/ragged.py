"""Ragged arrays: pieces of different lengths, end to end in one array, and the offsets at which they begin."""

import numpy as np


def offsets_of(lengths: np.ndarray) -> np.ndarray:
    """Where each piece begins, and the total at the end: int64 [n+1] for lengths [n]."""
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def ragged_range(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Concatenation of arange(start, start + length) for every pair; int64 [sum(lengths)]."""
    offsets = offsets_of(lengths)
    return np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], lengths)
