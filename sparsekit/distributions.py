"""How an overall sparsity is spread over the weights: sizes (and scores) -> number of zeros each. NumPy only."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

import numpy as np

from .errors import ArgumentError
from .patterns import smallest, zeros_for


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
        return [zeros_for(int(np.prod(shape, dtype=np.int64)), sparsity) for shape in shapes]


def ranked_zeros(
    parts: Sequence[Callable[[], np.ndarray]], sizes: Sequence[int], zeros: int, floors: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Spread `zeros` by one ranking over all weights, leaving each weight at least its floor.

    Args:
        parts: functions giving the scores of one weight each (higher = keep).
        sizes: number of positions of each weight.
        zeros: how many positions to drop over all weights.
        floors: how many positions each weight keeps at least.

    Returns:
        `(zeros of each weight, indices of the weights that the ranking alone would have taken below their floor)`.

    Raises:
        ArgumentError: if the floors leave no room for that many zeros.
    """
    limits = [size - min(floor, size) for size, floor in zip(sizes, floors, strict=True)]
    if zeros > sum(limits):
        raise ArgumentError(
            f"{zeros} of {sum(sizes)} weights cannot be dropped while each weight keeps its min_keep "
            f"({sum(sizes) - sum(limits)} in all); lower the sparsity or min_keep."
        )
    result = [0] * len(sizes)
    open_ = list(range(len(sizes)))
    held: list[int] = []
    while zeros > 0 and open_:
        counts = _counts([parts[i] for i in open_], zeros)
        over = [i for i, count in zip(open_, counts, strict=True) if count > limits[i]]
        if not over:
            for i, count in zip(open_, counts, strict=True):
                result[i] = count
            break
        # What these weights may not give has to come from the others: rank the rest again.
        for i in over:
            result[i] = limits[i]
            zeros -= limits[i]
            open_.remove(i)
            held.append(i)
    return result, sorted(held)


def _counts(parts: Sequence[Callable[[], np.ndarray]], zeros: int) -> list[int]:
    """How many of the `zeros` lowest scores fall into each part; ties go to the earlier part."""
    threshold, ties = smallest(parts, zeros)
    counts: list[int] = []
    for part in parts:
        scores = part()
        equal = min(ties, int(np.count_nonzero(scores == threshold)))
        counts.append(int(np.count_nonzero(scores < threshold)) + equal)
        ties -= equal
    return counts
