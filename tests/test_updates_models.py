"""Each style of updating without gradients on each kind of model, and what a model holds besides its kernels."""

from __future__ import annotations

from typing import Any

import models
import numpy as np
import pytest
import tensorflow as tf
from models import KERAS, X, Y, both, values

import sparsekit
from sparsekit.updates import SPSA, UniformNoise, fit_with_update, update_step

STYLES = {
    "retrain": lambda model, rule: sparsekit.retrain(model, (X, Y), update=rule, batch_size=16, verbose=0),
    "own loop": lambda model, rule: [sparsekit.update_step(model, rule)(X[at::4], Y[at::4]) for at in range(4)],
    "callback": lambda model, rule: model.fit(
        X, Y, batch_size=16, callbacks=[sparsekit.callbacks.WeightUpdate(rule, data=(X, Y))], verbose=0
    ),
}


def made(flavour: str, kind: str) -> Any:
    """A model of a kind, compiled, half pruned."""
    k = KERAS[flavour]
    k.utils.set_random_seed(1)

    class Whole(k.Model):
        def __init__(self) -> None:
            super().__init__()
            inputs = k.layers.Input((6,))
            inner = k.Sequential([k.layers.Input((6,)), k.layers.Dense(8, "tanh")])
            self.body = k.Model(inputs, inner(inputs))
            self.head = k.layers.Dense(2)

        def call(self, inputs: Any) -> Any:
            return self.head(self.body(inputs))

    if kind == "nested in a subclass":
        model = Whole()
        model(X)
    else:
        policy = "mixed_float16" if kind == "mixed precision" else "float32"
        layers = [k.layers.Dense(8, "tanh", dtype=policy), k.layers.Dense(2, dtype=policy)]
        layers += [k.layers.Activation("linear", dtype="float32")]
        model = k.Sequential([k.layers.Input((6,)), *layers])
    optimizer = k.optimizers.Adam(0.01)
    if kind == "mixed precision":
        optimizer = k.mixed_precision.LossScaleOptimizer(optimizer)
    model.compile(optimizer, loss="mse", jit_compile=kind == "jit_compile")
    return sparsekit.prune(model, 0.5, scope="layer")


@both
@pytest.mark.parametrize("kind", ["mixed precision", "jit_compile", "nested in a subclass"])
@pytest.mark.parametrize("style", list(STYLES))
def test_every_style_moves_survivors_of_every_kind_of_model(flavour, kind, style):
    model = made(flavour, kind)
    masks, before = sparsekit.masks_of(model), values(model)
    assert len(masks) == 2
    for rule in (UniformNoise(0.05), SPSA(0.01, 0.01)):
        STYLES[style](model, rule)
        models.assert_held(model, masks)
        models.assert_moved(model, masks, before)
        assert all(np.isfinite(value).all() for value in values(model).values())


@both
def test_callbacks_of_fit_see_logs_and_may_stop(flavour):
    model = models.mlp(flavour, metrics=["mae"], jit_compile=False)
    k = KERAS[flavour]
    seen = []
    watch = k.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append((batch, set(logs))))
    # Noise far larger than the weights, from the second step on, never comes back below the first loss.
    stop = k.callbacks.EarlyStopping("val_loss", patience=1, restore_best_weights=True)
    start = values(model)
    rule = UniformNoise(lambda step: tf.where(step < 1, 0.0, 100.0))
    arguments = {"validation_data": (X, Y), "callbacks": [watch, stop], "verbose": 0}
    history = fit_with_update(model, (X, Y), rule, batch_size=64, epochs=9, **arguments)
    assert seen == [(0, {"loss", "mae"})] * 2
    assert set(history.history) == {"loss", "mae", "val_loss", "val_mae"}
    assert len(history.history["loss"]) == 2, "stopped after the second of nine epochs"
    for path, value in values(model).items():
        np.testing.assert_array_equal(value, start[path], err_msg="the first epoch added noise of size 0")


@both
@pytest.mark.parametrize("training", [False, True])
def test_counters_and_statistics_of_layers_are_no_weights_to_move(flavour, training):
    """In training the layers themselves write to them, as in fit; no noise is added to either."""
    k = KERAS[flavour]

    class Counted(k.layers.Layer):
        def build(self, shape: Any) -> None:
            self.calls = self.add_weight(name="calls", shape=(), dtype="int32", initializer="zeros", trainable=False)
            self.scale = self.add_weight(name="table", shape=(6, 6), initializer="ones", trainable=False)

        def call(self, inputs: Any, training: bool = False) -> Any:
            if training:
                self.calls.assign(self.calls + 1)
            return inputs

    stack = [Counted(), k.layers.BatchNormalization(), k.layers.Dense(2)]
    model = k.Sequential([k.layers.Input((6,)), *stack])
    model.compile(loss="mse", jit_compile=False)
    before = values(model)
    step = update_step(model, UniformNoise(0.5), training=training)
    for _ in range(3):
        step(X, Y)
    after = values(model)
    changed = {path.split("/")[-1] for path in after if (after[path] != before[path]).any()}
    statistics = {"calls", "moving_mean", "moving_variance"}
    assert changed == ({"kernel"} | statistics if training else {"kernel"})
    if training:
        assert {path: int(value) for path, value in after.items() if path.endswith("calls")}.popitem()[1] == 3
        mean = next(value for path, value in after.items() if path.endswith("moving_mean"))
        np.testing.assert_allclose(mean, X.mean(axis=0) * (1 - 0.99**3), rtol=1e-4, atol=1e-6)
