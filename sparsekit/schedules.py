"""How sparsity grows over a run: optimizer update -> sparsity, and whether masks are chosen anew there."""

from __future__ import annotations

import math
import numbers
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import ClassVar

from .errors import ArgumentError


@dataclass(frozen=True)
class Schedule(ABC):
    """A sparsity for each optimizer update.

    Steps count optimizer updates, not batches: with gradient accumulation a batch is not a step.

    Args:
        final_sparsity: fraction of zeros from `end_step` on, in [0, 1).
        end_step: update at which the final sparsity is reached.
        begin_step: update at which the masks are chosen for the first time.
        initial_sparsity: fraction of zeros at `begin_step`, in [0, final_sparsity].
        frequency: number of updates between two choices of the masks.

    Raises:
        ArgumentError: for values outside these ranges.
    """

    name: ClassVar[str]

    final_sparsity: float = 0.8
    end_step: int = 1000
    begin_step: int = 0
    initial_sparsity: float = 0.0
    frequency: int = 100

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            kind, words = (int, "a whole number") if isinstance(field.default, int) else (float, "a number")
            if isinstance(value, bool) or not isinstance(value, numbers.Integral if kind is int else numbers.Real):
                raise ArgumentError(f"{field.name}={value!r} must be {words}, for example {field.default}.")
        if not 0.0 <= self.initial_sparsity <= self.final_sparsity < 1.0:
            raise ArgumentError(
                f"A schedule needs 0 <= initial_sparsity <= final_sparsity < 1; "
                f"got {self.initial_sparsity} and {self.final_sparsity}."
            )
        if not 0 <= self.begin_step <= self.end_step:
            raise ArgumentError(
                f"A schedule needs 0 <= begin_step <= end_step; got {self.begin_step} and {self.end_step}."
            )
        if self.frequency < 1:
            raise ArgumentError(f"frequency={self.frequency} must be at least 1 update.")

    @abstractmethod
    def shape(self, progress: float) -> float:
        """How much of the way from initial to final sparsity is gone; both in [0, 1]."""

    def sparsity_at(self, step: int) -> float:
        """Sparsity that holds after update number `step` (0 = before the first)."""
        if step < self.begin_step:
            return 0.0
        if step >= self.end_step:
            return self.final_sparsity
        progress = (step - self.begin_step) / (self.end_step - self.begin_step)
        return self.initial_sparsity + (self.final_sparsity - self.initial_sparsity) * self.shape(progress)

    def is_update(self, step: int) -> bool:
        """Whether the masks are chosen anew after update number `step`."""
        if step == self.end_step:
            return True
        return self.begin_step <= step < self.end_step and (step - self.begin_step) % self.frequency == 0


class Polynomial(Schedule):
    """Steep at first, flat at the end: `1 - (1 - progress) ** 3`.

    Reference: Zhu and Gupta, 2017, To prune, or not to prune.

    >>> schedule = Polynomial(final_sparsity=0.8, end_step=100, frequency=50)
    >>> [round(schedule.sparsity_at(step), 3) for step in (0, 50, 100, 200)]
    [0.0, 0.7, 0.8, 0.8]
    >>> [step for step in range(200) if schedule.is_update(step)]
    [0, 50, 100]
    """

    name = "polynomial"

    def shape(self, progress: float) -> float:
        return 1.0 - (1.0 - progress) ** 3


class Linear(Schedule):
    """The same step each time: `progress`.

    >>> Linear(final_sparsity=0.8, end_step=100).sparsity_at(25)
    0.2
    """

    name = "linear"

    def shape(self, progress: float) -> float:
        return progress


class Cosine(Schedule):
    """Flat at both ends: `(1 - cos(pi * progress)) / 2`.

    >>> round(Cosine(final_sparsity=0.8, end_step=100).sparsity_at(50), 6)
    0.4
    """

    name = "cosine"

    def shape(self, progress: float) -> float:
        return (1.0 - math.cos(math.pi * progress)) / 2.0
