"""Callbacks for an ordinary `model.fit` of either Keras."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from ..errors import ArgumentError, SparsekitWarning
from ..frozen import frozen_masks
from ..updates.rules import as_rule
from ..updates.step import UpdateStep
from ..weights import Selector
from .enforcement import holding


def _nothing(*_: Any, **__: Any) -> None:
    """A hook that this callback has no use for."""


class WeightUpdate:
    """Move weights by a rule during an ordinary fit, beside the model's optimizer.

    The rule runs as one compiled function after every `every`-th batch. Pruned weights are zero again whenever Keras
    has called back, and in the end; inside a batch an ordinary fit's optimizer moves them, which `retrain` prevents.
    With `steps_per_execution` above 1 Keras calls back after several batches only: the updates that are due are then
    made together, in the same number, and a warning says so. `retrain(update=...)` and `update_step` have no such
    limit.

    It is a callback for both Kerases, which ask for its methods and not for its class.

    Args:
        rule: as in `update_step`. A rule that compares losses (annealing, evolution) needs `data`.
        every: number of batches from one update to the next.
        data: `(x, y)` or `(x, y, sample_weight)` as arrays: one batch on which such a rule measures the loss.
        include: as in `update_step`, like `exclude`, `masks` and `seed`.

    Raises:
        ArgumentError: for an unknown rule, for `every` below 1, or if data is missing.
    """

    def __init__(
        self,
        rule: Any,
        *,
        every: int = 1,
        data: tuple | None = None,
        include: Selector | Iterable[Selector] | None = None,
        exclude: Selector | Iterable[Selector] | None = None,
        masks: str = "static",
        seed: int = 0,
    ) -> None:
        self.rule = as_rule(rule)
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ArgumentError(f"every={every!r} must be a whole number of batches >= 1.")
        if self.rule.compares_losses and data is None:
            raise ArgumentError(
                f"{type(self.rule).__name__} compares losses, and a callback never sees the batches of fit; pass "
                "data=(x, y) to measure on, or use retrain(update=...)."
            )
        if data is not None and not (isinstance(data, tuple) and 2 <= len(data) <= 3):
            raise ArgumentError("data must be a tuple (x, y) or (x, y, sample_weight) of arrays.")
        self.every = every
        self.data = data
        self.model: Any = None
        self.params: dict[str, Any] = {}
        self._settings = {"include": include, "exclude": exclude, "masks": masks, "seed": seed}
        self._step: UpdateStep | None = None
        self._hold: Callable[[], None] = _nothing
        self._batches = self._epoch_start = 0
        self._warned = False
        self._batch: tuple = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("on_"):
            return _nothing
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def set_model(self, model: Any) -> None:
        self.model = model

    def set_params(self, params: dict[str, Any]) -> None:
        self.params = params

    @property
    def updates(self) -> int:
        """Number of updates in this run."""
        return 0 if self._step is None else self._step.count

    def on_train_begin(self, logs: dict | None = None) -> None:
        self._step = UpdateStep(self.model, self.rule, counts=False, **self._settings)
        self._hold = holding(frozen_masks(self.model))
        self._batches = self._epoch_start = 0
        self._warned = False
        # As tensors, so that they are not copied for each update.
        self._batch = tf.nest.map_structure(tf.convert_to_tensor, self.data or ())

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        self._epoch_start = self._batches

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        assert self._step is not None
        steps = self.params.get("steps")
        # The last call of an epoch may name batches that the data no longer had.
        done = batch + 1 if steps is None else min(batch + 1, steps)
        self._batches = self._epoch_start + done
        due = self._batches // self.every - self._step.count
        if due and not self._warned and (due > 1 or self._batches % self.every):
            self._warned = True
            warnings.warn(
                "Keras calls back after several batches at once (steps_per_execution), so that an update after every "
                f"{self.every} cannot come in its place: those that are due are made together; use "
                "retrain(update=...) for updates inside the step.",
                SparsekitWarning,
                stacklevel=2,
            )
        for _ in range(due):
            self._step(*self._batch)
        self._hold()

    def on_train_end(self, logs: dict | None = None) -> None:
        # The optimizer may just have written its average over the weights.
        self._hold()

    # tf_keras asks which batch hooks a callback has.
    def _implements_train_batch_hooks(self) -> bool:
        return True

    def _implements_test_batch_hooks(self) -> bool:
        return False

    def _implements_predict_batch_hooks(self) -> bool:
        return False
