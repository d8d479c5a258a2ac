"""What makes a weight worth keeping: weight + evidence -> scores, higher = keep. NumPy only."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np


@dataclass(frozen=True)
class Evidence:
    """What a criterion may know beside the weight itself.

    Args:
        path: name of the weight.
        seed: the caller's seed.
    """

    path: str
    seed: int = 0


class Criterion(ABC):
    """A way to score weights.

    `elementwise` says that a position's score follows from its own value alone. Such a criterion is also called on
    parts of a weight, from several threads.

    `zeros_lowest` says that a zero gets the lowest of all scores and a value that is not finite a score that is not:
    then the scores need not be looked through for them.
    """

    name: ClassVar[str]
    needs: ClassVar[frozenset[str]] = frozenset()
    elementwise: ClassVar[bool] = False
    zeros_lowest: ClassVar[bool] = False

    @abstractmethod
    def score(self, weight: np.ndarray, evidence: Evidence) -> np.ndarray:
        """Score every position.

        Args:
            weight: float array, finite, read-only.
            evidence: what is known about it.

        Returns:
            float array of the same shape, finite, higher = keep. The same call gives the same scores.
        """


class Magnitude(Criterion):
    """Keep the largest absolute values (Janowsky, 1989, Pruning versus clipping in neural networks)."""

    name = "magnitude"
    elementwise = True
    zeros_lowest = True

    def score(self, weight: np.ndarray, evidence: Evidence) -> np.ndarray:
        del evidence
        return np.abs(weight)


class Random(Criterion):
    """Keep a random choice, the same for the same seed and path: the baseline each criterion has to beat."""

    name = "random"

    def score(self, weight: np.ndarray, evidence: Evidence) -> np.ndarray:
        generator = np.random.default_rng([evidence.seed, zlib.crc32(evidence.path.encode())])
        return generator.random(weight.shape, dtype=np.float32)
