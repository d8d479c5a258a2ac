"""Forward pass and loss of a model, with its logs, and nothing else: no tape, no optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from ..errors import ArgumentError
from ..flavour import Flavour

Batch = tuple[Any, Any, Any]


class Objective:
    """What a model is measured by on one batch.

    Args:
        flavour: the model's Keras.
        model: the model, compiled unless `loss` is given or no loss is needed.
        loss: loss for a model that is not compiled, as a Keras loss or its name.
        training: run layers as in training: dropout drops, BatchNormalization uses and moves its statistics.
    """

    def __init__(self, flavour: Flavour, model: Any, loss: Any, training: bool) -> None:
        self._flavour = flavour
        self._model = model
        self._loss = None if loss is None else flavour.keras.losses.get(loss)
        self._training = training
        self.compiled = flavour.is_compiled(model)
        if self.compiled and self._loss is not None:
            raise ArgumentError(f"The model '{model.name}' is compiled with its own loss; leave loss= away.")

    @property
    def has_loss(self) -> bool:
        """Whether a batch gives a loss."""
        model = self._model
        if self._loss is not None or model.losses:
            return True
        if not self.compiled:
            return False
        given = model._compile_loss if self._flavour.is_keras3 else model.compiled_loss._user_losses
        return given is not None or type(model).compute_loss is not self._flavour.keras.Model.compute_loss

    def measure(self, batch: Batch) -> tuple[tf.Tensor, dict[str, Any]]:
        """Loss of a batch (this replica's share, float32 scalar) and the logs after it has been counted in.

        Without data there is no pass: the loss is NaN and the logs are empty.
        """
        x, y, sample_weight = batch
        if x is None:
            return tf.constant(float("nan")), {}
        y_pred, loss = self._forward(batch)
        if not self.compiled:
            return loss, {"loss": loss} if self.has_loss else {}
        model = self._model
        if self._flavour.is_keras3 and self.has_loss:
            # Keras scales each replica's loss by the number of replicas.
            whole = loss * tf.distribute.get_strategy().num_replicas_in_sync
            model._loss_tracker.update_state(whole, sample_weight=tf.shape(tf.nest.flatten(x)[0])[0])
        return loss, model.compute_metrics(x, y, y_pred, sample_weight)

    def loss(self, batch: Batch) -> tf.Tensor:
        """The loss alone. tf_keras counts it in metrics all the same: see `counters`."""
        return tf.constant(float("nan")) if batch[0] is None else self._forward(batch)[1]

    def _forward(self, batch: Batch) -> tuple[Any, tf.Tensor]:
        x, y, sample_weight = batch
        model = self._model
        y_pred = self._predict(x)
        if not self.has_loss:
            return y_pred, tf.constant(float("nan"))
        if not self.compiled:
            return y_pred, self._own_loss(y, y_pred, sample_weight)
        if self._flavour.is_keras3:
            loss = model._compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=self._training)
        else:
            loss = model.compute_loss(x, y, y_pred, sample_weight)
        return y_pred, tf.cast(loss, tf.float32)

    def counters(self) -> list[Any]:
        """Variables that a pass writes to and that must not remember passes on trial."""
        model = self._model
        if not self.compiled:
            found = []
        elif self._flavour.is_keras3:
            found = list(model.metrics_variables)
        else:
            found = [variable for metric in model.metrics for variable in metric.variables]
        return found + list(model.non_trainable_variables) if self._training else found

    def build(self, batch: Batch) -> None:
        """Create the variables of the metrics, which Keras 3 makes on the first batch of fit."""
        if self.compiled and self._flavour.is_keras3 and batch[0] is not None:
            self._model._symbolic_build(data_batch=batch)

    def _predict(self, x: Any) -> Any:
        model = self._model
        if self._flavour.is_keras3 and not model._call_has_training_arg:
            return model(x)
        return model(x, training=self._training)

    def _own_loss(self, y: Any, y_pred: Any, sample_weight: Any) -> tf.Tensor:
        assert self._loss is not None
        function: Callable = self._loss
        if isinstance(function, self._flavour.keras.losses.Loss):
            loss = function(y, y_pred, sample_weight=sample_weight)
        else:
            values = tf.cast(function(y, y_pred), tf.float32)
            weights = 1.0 if sample_weight is None else tf.cast(sample_weight, tf.float32)
            loss = tf.reduce_mean(values * weights)
        extra = [tf.cast(value, tf.float32) for value in self._model.losses]
        return tf.add_n([tf.cast(loss, tf.float32), *extra])
