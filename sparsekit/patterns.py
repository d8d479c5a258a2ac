"""Which structure the zeros follow: scores + density -> keep. NumPy only."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np

from .errors import ArgumentError
from .ranking import Scores, first


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
        flat = Scores.of(scores)
        return flat.keep(first(flat, zeros)).reshape(scores.shape)
