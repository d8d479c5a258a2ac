"""Which structure the zeros follow: scores + density -> keep. NumPy only."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

import numpy as np

from .errors import ArgumentError

# A pass over scores goes in pieces that stay in the cache.
_CHUNK = 1 << 18
_SAMPLE = 1 << 17


def zeros_for(size: int, sparsity: float) -> int:
    """Number of zeros that `sparsity` means for `size` weights: `round(sparsity * size)`.

    The product is first rounded to 1e-6, so that `0.7` and `1 - 0.3` mean the same count.
    """
    return round(round(sparsity * size, 6))


class Pattern(ABC):
    """A structure of zeros."""

    name: ClassVar[str]

    @abstractmethod
    def check(self, shape: tuple[int, ...]) -> None:
        """Raise ArgumentError if a weight of this shape cannot carry the pattern."""

    @abstractmethod
    def select(self, scores: np.ndarray, density: float) -> np.ndarray:
        """Choose what is kept.

        Args:
            scores: float array of any shape, higher = keep, no NaN.
            density: fraction to keep, in [0, 1].

        Returns:
            bool array of the same shape, True = keep, with exactly `zeros_for(size, 1 - density)` zeros.
        """


class Unstructured(Pattern):
    """Any position may be zero.

    Among equal scores the lower flat index is dropped first, so the count is exact and the choice is the same
    on every machine: the dropped positions are the first ones of a stable ascending sort.
    """

    name = "unstructured"

    def check(self, shape: tuple[int, ...]) -> None:
        del shape

    def select(self, scores: np.ndarray, density: float) -> np.ndarray:
        if not 0.0 <= density <= 1.0:
            raise ArgumentError(f"density={density} must lie in [0, 1].")
        zeros = zeros_for(scores.size, 1.0 - density)
        if zeros == 0:
            return np.ones(scores.shape, dtype=np.bool_)
        if zeros == scores.size:
            return np.zeros(scores.shape, dtype=np.bool_)
        threshold, ties = smallest([lambda: scores], zeros)
        return keep_above(scores, threshold, ties)


def keep_above(scores: np.ndarray, threshold: float, ties: int) -> np.ndarray:
    """Keep what scores above `threshold`, and of the equal ones all but the first `ties` by flat index."""
    keep = scores >= threshold
    if ties:
        flat = scores.reshape(-1)
        first = _first_equal(flat, threshold, ties)
        keep.reshape(-1)[first] = False
    return keep


def _first_equal(flat: np.ndarray, value: float, count: int) -> np.ndarray:
    """Flat indices of the first `count` elements equal to `value`."""
    found: list[np.ndarray] = []
    for start in range(0, flat.size, _CHUNK):
        if count <= 0:
            break
        here = np.flatnonzero(flat[start : start + _CHUNK] == value)[:count]
        if here.size:
            found.append(here + start)
            count -= here.size
    return np.concatenate(found) if found else np.empty(0, dtype=np.int64)


def smallest(parts: Sequence[Callable[[], np.ndarray]], count: int) -> tuple[float, int]:
    """Threshold under which the `count` smallest of many scores lie, without sorting or joining them.

    Args:
        parts: functions that give one float array of scores each; each is called twice, one at a time, so only
            one of the arrays has to be in memory.
        count: how many scores to take, between 1 and the total number.

    Returns:
        `(threshold, ties)`: all scores below `threshold` are taken, and `ties` (>= 1) of those equal to it.
    """
    # A sample brackets the threshold; one pass counts what lies below and collects what lies inside the bracket,
    # which is a percent of the data. Only that is partitioned.
    sizes: list[int] = []
    samples: list[np.ndarray] = []
    for part in parts:
        flat = part().reshape(-1)
        sizes.append(flat.size)
        samples.append(flat[:: max(1, flat.size // _SAMPLE)].copy())
    total = sum(sizes)
    weights = np.concatenate(
        [np.full(s.size, n / max(s.size, 1)) for s, n in zip(samples, sizes, strict=True)]
    )
    sample = np.concatenate(samples)
    order = np.argsort(sample, kind="stable")
    ranks = np.cumsum(weights[order])
    margin = 4.0 * total / np.sqrt(sample.size) + weights.max()
    low_at = int(np.searchsorted(ranks, count - margin))
    high_at = int(np.searchsorted(ranks, count + margin))
    low = sample[order[low_at]] if low_at > 0 else -np.inf
    high = sample[order[high_at]] if high_at < sample.size else np.inf

    below, inside = _bracket(parts, low, high)
    if not below < count <= below + inside.size:
        below, inside = _bracket(parts, -np.inf, np.inf)
    inside.partition(count - below - 1)
    threshold = inside[count - below - 1]
    ties = count - below - int(np.count_nonzero(inside < threshold))
    return threshold, ties


def _bracket(parts: Sequence[Callable[[], np.ndarray]], low: float, high: float) -> tuple[int, np.ndarray]:
    """How many scores lie below `low`, and the scores within [low, high]."""
    below = 0
    inside: list[np.ndarray] = []
    for part in parts:
        flat = part().reshape(-1)
        for start in range(0, flat.size, _CHUNK):
            piece = flat[start : start + _CHUNK]
            from_low = piece >= low
            below += piece.size - int(np.count_nonzero(from_low))
            inside.append(piece[from_low & (piece <= high)])
    return below, np.concatenate(inside)
