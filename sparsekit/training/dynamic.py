"""Masks that change while a model trains: functions that run in the graph after each optimizer update."""

from __future__ import annotations

import copy
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from ..engine import masking
from ..frozen import FrozenMask, FrozenMasks, keep_only
from ..schedules import Schedule
from .enforcement import assign, hold, on_all_replicas

# `settle(share)`: let go of masked values, where more than this share of a kernel's values is masked.
Settle = Callable[[float], None]

# Zeros that come one by one are taken out of the kept values when the update count is a multiple of this, ...
_SETTLE_EVERY = 100
# ... and only where they are more than this share.
_SETTLE_SHARE = 1 / 16


class Dynamic(ABC):
    """Holds the masked weights at zero after an update and changes the masks; the same on every replica."""

    frozen: FrozenMasks
    settle: Settle | None = None
    zeros_stay = False
    # Whether no masked value is left once a step that changed masks has settled.
    settles_at_once = False

    @abstractmethod
    def __call__(self, updates: Any, masks: Iterable[FrozenMask]) -> None:
        """Hold weights and change the masks.

        Args:
            updates: integer tensor, number of optimizer updates so far.
            masks: masks of the weights to hold; what else there is has been held.
        """

    def over(self, frozen: FrozenMasks, settle: Settle | None = None) -> Dynamic:
        """The same for other masks; `settle` is called in the graph once some have changed."""
        other = copy.copy(self)
        other.frozen, other.settle = frozen, settle
        return other


class ZerosStay(Dynamic):
    """A weight that is exactly zero after an update is masked from then on; nothing grows back.

    Args:
        frozen: masks of the model.
        fused: do it with the engine's one-pass op.
    """

    zeros_stay = True

    def __init__(self, frozen: FrozenMasks, fused: bool = False) -> None:
        self.frozen = frozen
        self.fused = fused

    def __call__(self, updates: Any, masks: Iterable[FrozenMask]) -> None:
        settle = self.settle

        def update(strategy: tf.distribute.Strategy) -> None:
            for mask in masks:
                assign(strategy, mask.variable, self._hold_and_drop, mask.keep)
            if settle is not None:
                due = tf.equal(tf.cast(updates, tf.int64) % _SETTLE_EVERY, 0)
                tf.cond(due, functools.partial(settle, _SETTLE_SHARE), lambda: None)

        on_all_replicas(update)

    def _hold_and_drop(self, weight: tf.Variable, keep: tf.Variable) -> None:
        if self.fused and weight.dtype == tf.float32:
            masking.hold(weight, keep, drop=True)
            return
        held = keep_only(keep, weight)
        weight.assign(held)
        keep.assign(tf.not_equal(held, tf.zeros([], held.dtype)))


class Gradual(Dynamic):
    """Drop the smallest weights along a schedule; zeros stay.

    Reference: Zhu and Gupta, 2017, To prune, or not to prune.

    Args:
        frozen: masks of the model.
        schedule: sparsity of each weight after a number of updates.
        first_update: how many updates the optimizer had made when the schedule began.
        fused: hold the weights with the engine's one-pass op.
    """

    settles_at_once = True

    def __init__(self, frozen: FrozenMasks, schedule: Schedule, first_update: int = 0, fused: bool = False) -> None:
        self.frozen = frozen
        self.fused = fused
        self.schedule = schedule
        # The schedule as a table, so that the graph needs no formula of it.
        steps = [s for s in range(schedule.begin_step, schedule.end_step + 1) if schedule.is_update(s)]
        self._steps = np.array([step + first_update for step in steps], dtype=np.int64)
        self._sparsity = np.array([schedule.sparsity_at(step) for step in steps], dtype=np.float64)
        if schedule.is_update(0):
            self._drop(tf.constant(self._sparsity[0]))

    def __call__(self, updates: Any, masks: Iterable[FrozenMask]) -> None:
        hold(masks, self.fused)
        updates = tf.cast(tf.convert_to_tensor(updates), tf.int64)
        at = tf.equal(tf.constant(self._steps), updates)

        def drop() -> None:
            self._drop(tf.reduce_max(tf.where(at, tf.constant(self._sparsity), tf.zeros([], tf.float64))))

        # A branch with variables of all replicas cannot be taken inside a replica.
        on_all_replicas(lambda _: tf.cond(tf.reduce_any(at), drop, lambda: None))

    def _drop(self, sparsity: tf.Tensor) -> None:
        strategy = tf.distribute.get_strategy()
        for mask in self.frozen:
            assign(strategy, mask.keep, self._keep_largest, mask.variable, sparsity, mask.size)
        hold(self.frozen, self.fused)
        if self.settle is not None:
            self.settle(0.0)

    def _keep_largest(self, keep: tf.Variable, weight: Any, sparsity: tf.Tensor, whole: int | None) -> None:
        """Drop the smallest magnitudes; what is dropped stays so, and of equal ones the first is dropped first."""
        current, weight = tf.convert_to_tensor(keep), tf.convert_to_tensor(weight)
        size = tf.size(current)
        whole = whole or int(np.prod(current.shape))
        zeros = tf.cast(tf.round(tf.round(sparsity * (whole * 1e6)) / 1e6), tf.int32) - (whole - size)
        if self.fused and weight.dtype == tf.float32:
            keep.assign(masking.drop_smallest(weight, current, zeros))
            return
        zeros = tf.maximum(zeros, size - tf.math.count_nonzero(current, dtype=tf.int32))
        scores = tf.where(current, tf.abs(tf.cast(weight, tf.float32)), tf.constant(-1.0))
        order = tf.argsort(tf.reshape(scores, [-1]), stable=True)
        # A slice of `zeros` elements would have XLA compile anew for each length.
        flat = tf.scatter_nd(order[:, None], tf.range(size) >= zeros, [size])
        keep.assign(tf.reshape(flat, tf.shape(current)))
