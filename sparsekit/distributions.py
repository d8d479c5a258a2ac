"""How an overall sparsity is spread over the weights: their shapes -> number of zeros each. NumPy only."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from .patterns import zeros_for


class Distribution(ABC):
    """Per-weight share of an overall sparsity."""

    name: ClassVar[str]

    @abstractmethod
    def zeros(self, shapes: Sequence[tuple[int, ...]], sparsity: float) -> list[int]:
        """Number of zeros for each weight.

        Args:
            shapes: shape of each weight.
            sparsity: overall fraction of zeros, in [0, 1].
        """


class Uniform(Distribution):
    """Every weight gets the same sparsity."""

    name = "uniform"

    def zeros(self, shapes: Sequence[tuple[int, ...]], sparsity: float) -> list[int]:
        return [zeros_for(_size(shape), sparsity) for shape in shapes]


class ErdosRenyiKernel(Distribution):
    """Large weights become sparser: the density of each goes with the sum of its dimensions over their product.

    A weight that this would make denser than dense stays dense, and the others make up for it.

    References: Mocanu et al., 2018, Scalable training of artificial neural networks with adaptive sparse connectivity
    inspired by network science; Evci et al., 2020, Rigging the lottery: making all tickets winners.
    """

    name = "erk"

    def zeros(self, shapes: Sequence[tuple[int, ...]], sparsity: float) -> list[int]:
        sizes = np.array([_size(shape) for shape in shapes], dtype=np.float64)
        raw = np.array([sum(shape) for shape in shapes], dtype=np.float64)
        kept = np.zeros_like(sizes)
        left = sizes.sum() - zeros_for(int(sizes.sum()), sparsity)
        dense = np.zeros(len(sizes), dtype=bool)
        while left > 0 and not dense.all():
            kept = np.where(dense, sizes, raw * (left - sizes[dense].sum()) / raw[~dense].sum())
            over = ~dense & (kept > sizes)
            if not over.any():
                break
            dense |= over
        return [round(zeros) for zeros in sizes - kept]


def _size(shape: tuple[int, ...]) -> int:
    return int(np.prod(shape, dtype=np.int64))
