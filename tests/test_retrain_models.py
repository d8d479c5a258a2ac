"""The user's own model survives: losses, regularisers, train_step, optimizers, metrics."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from models import KERAS, X, Y, assert_held, both, mlp, retrain_watched, values

import sparsekit
from sparsekit.flavour import get

LABELS = np.arange(64) % 3


def branching(flavour: str):
    """Two outputs with their own losses and metrics, regularisers, batch norm and dropout."""
    k = KERAS[flavour]
    k.utils.set_random_seed(5)
    inputs = k.layers.Input((6,))
    h = k.layers.Dense(12, "relu", kernel_regularizer=k.regularizers.L2(0.05))(inputs)
    h = k.layers.BatchNormalization()(h)
    h = k.layers.Dropout(0.25, seed=3)(h)
    value = k.layers.Dense(2, activity_regularizer=k.regularizers.L1(0.01), name="value")(h)
    kind = k.layers.Dense(3, "softmax", name="kind")(h)
    model = k.Model(inputs, {"value": value, "kind": kind})
    model.compile(
        k.optimizers.AdamW(0.01),
        loss={"value": "mse", "kind": "sparse_categorical_crossentropy"},
        loss_weights={"value": 0.7, "kind": 2.0},
        metrics={"kind": ["accuracy"]},
        weighted_metrics={"value": ["mae"]},
    )
    return model


@pytest.mark.parametrize("enforce", ["gradient", "constraint"])
@both
def test_without_zeros_it_is_plain_fit(flavour: str, enforce: str) -> None:
    """Masks that keep everything change neither history nor weights."""
    k = KERAS[flavour]
    targets = {"value": Y, "kind": LABELS}
    weights = {"value": np.linspace(0, 1, 64).astype("float32"), "kind": np.ones(64, "float32")}
    results = []
    for plain in (True, False):
        model = branching(flavour)
        arguments = {"batch_size": 16, "epochs": 2, "shuffle": False, "verbose": 0}
        k.utils.set_random_seed(9)
        if plain:
            history = model.fit(X, targets, sample_weight=weights, validation_data=(X, targets), **arguments)
        else:
            sparsekit.freeze(
                model, {path: np.ones(v.shape, bool) for path, v in values(model).items() if path.endswith("kernel")}
            )
            history = sparsekit.retrain(
                model, (X, targets, weights), validation_data=(X, targets), enforce=enforce, **arguments
            )
        results.append((history.history, values(model)))
    (plain_history, plain_weights), (history, ours) = results
    assert plain_history.keys() == history.keys()
    for name, series in plain_history.items():
        np.testing.assert_allclose(history[name], series, rtol=1e-5, err_msg=name)
    for value, expected in zip(ours.values(), plain_weights.values(), strict=True):
        np.testing.assert_allclose(value, expected, atol=1e-6)


@both
def test_several_outputs_and_regularisers(flavour: str) -> None:
    model = sparsekit.prune(branching(flavour), 0.5)
    history = retrain_watched(model, (X, {"value": Y, "kind": LABELS}), batch_size=16, epochs=2)
    assert any("accuracy" in name for name in history.history)


@both
def test_a_regulariser_alone_moves_survivors_only(flavour: str) -> None:
    k = KERAS[flavour]
    model = k.Sequential([k.layers.Input((6,)), k.layers.Dense(4, kernel_regularizer=k.regularizers.L2(0.1))])
    model.compile(k.optimizers.SGD(0.5), "mse")
    sparsekit.prune(model, 0.5)
    masks, before = sparsekit.masks_of(model), values(model)
    sparsekit.retrain(model, (np.zeros_like(X), np.zeros((64, 4))), batch_size=64, verbose=0)
    assert_held(model, masks)
    (path,) = masks
    # The gradient of 0.1 w**2 is 0.2 w.
    np.testing.assert_allclose(values(model)[path], (1 - 0.5 * 0.2) * before[path], rtol=1e-5)


def own_step_model(flavour: str, kind: str):
    k = KERAS[flavour]

    class Own(k.Model):
        """Trains by hand: through the compiled optimizer, or by writing to the weights."""

        def train_step(self, data):
            x, y = data
            variables = self.trainable_variables
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(self(x, training=True) - y))
            gradients = tape.gradient(loss, variables)
            if kind == "xla":
                self.inner(gradients)
            elif kind == "optimizer":
                self.optimizer.apply_gradients(zip(gradients, variables, strict=True))
            else:
                for gradient, variable in zip(gradients, variables, strict=True):
                    variable.assign(variable - 0.1 * gradient)
            return {"my_loss": loss}

        @tf.function(jit_compile=True)
        def inner(self, gradients):
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))

    k.utils.set_random_seed(1)
    inputs = k.layers.Input((6,))
    return Own(inputs, k.layers.Dense(2)(k.layers.Dense(8, "tanh")(inputs)))


@pytest.mark.parametrize(("enforce", "masks"), [("gradient", "static"), ("constraint", "dynamic")])
@pytest.mark.parametrize("kind", ["optimizer", "assign", "xla"])
@both
def test_own_train_step(flavour: str, kind: str, enforce: str, masks: str) -> None:
    k = KERAS[flavour]
    model = own_step_model(flavour, kind)
    model.compile(k.optimizers.Adam(0.01), loss="mse")
    model.fit(X, Y, verbose=0)
    sparsekit.prune(model, 0.5)
    history = retrain_watched(model, (X, Y), batch_size=16, epochs=2, enforce=enforce, masks=masks)
    assert set(history.history) == {"my_loss"} | ({"sparsity"} if masks == "dynamic" else set())


def test_dynamic_masks_follow_a_train_step_that_writes_weights() -> None:
    class Zeroing(keras.Model):
        """Writes a zero into the first weight, once."""

        def train_step(self, data):
            kernel = self.layers[-1].kernel
            first = tf.constant([[1.0], [0.0], [0.0]]) * tf.cast(self.count == 0, tf.float32)
            kernel.assign((kernel + 1.0) * (1.0 - first))
            self.count.assign_add(1.0)
            return {"loss": tf.constant(0.0)}

    inputs = keras.layers.Input((3,))
    model = Zeroing(inputs, keras.layers.Dense(1, kernel_initializer="ones")(inputs))
    model.count = tf.Variable(0.0)
    model.compile(loss="mse")
    (path,) = (path for path in values(model) if path.endswith("kernel"))
    sparsekit.freeze(model, {path: np.array([[True], [False], [True]])})
    sparsekit.retrain(model, (X[:8, :3], Y[:8, :1]), batch_size=2, masks="dynamic", verbose=0)
    assert values(model)[path].ravel().tolist() == [0.0, 0.0, 5.0]
    assert sparsekit.masks_of(model)[path].ravel().tolist() == [False, False, True]


@pytest.mark.parametrize(
    ("where", "enforce"), [("attributes", "gradient"), ("dict", "constraint"), ("sub-models", "gradient")]
)
@both
def test_two_optimizers(flavour: str, enforce: str, where: str) -> None:
    """As a GAN has: each warmed, each with its own clip and momentum; neither revives a zero nor counts one."""
    k = KERAS[flavour]

    class Pair(k.Model):
        def __init__(self):
            super().__init__()
            self.first = k.Sequential([k.layers.Input((6,)), k.layers.Dense(8)])
            self.second = k.Sequential([k.layers.Input((8,)), k.layers.Dense(2)])

        def compile(self, one, two):
            super().compile()
            if where == "attributes":
                self.one, self.two = one, two
            elif where == "dict":
                self.both = {"one": one, "two": two}
            else:
                self.first.compile(one)
                self.second.compile(two)

        def optimizers(self):
            if where == "attributes":
                return self.one, self.two
            return tuple(self.both.values()) if where == "dict" else (self.first.optimizer, self.second.optimizer)

        def call(self, x):
            return self.second(self.first(x))

        def train_step(self, data):
            x, y = data
            for part, optimizer in zip((self.first, self.second), self.optimizers(), strict=True):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean(tf.square(self(x) - y))
                gradients = tape.gradient(loss, part.trainable_variables)
                optimizer.apply_gradients(zip(gradients, part.trainable_variables, strict=True))
            return {"loss": loss}

    model = Pair()
    model(X)
    model.compile(k.optimizers.SGD(0.05, momentum=0.9, clipnorm=0.1), k.optimizers.Adam(0.01))
    model.fit(X, Y, verbose=0)
    sparsekit.prune(model, 0.5)
    if where == "attributes":
        retrain_watched(model, (X, Y), batch_size=16, enforce=enforce)
        return
    # One step on all data moves the first layer by exactly the clipped norm of the masked gradient.
    masks, before = sparsekit.masks_of(model), values(model)
    for _, slot, fresh in get(flavour).slots(model.optimizers()[0]):
        slot.assign(tf.fill(slot.shape, fresh))
    sparsekit.retrain(model, (X, Y), batch_size=64, enforce=enforce, verbose=0)
    assert_held(model, masks)
    path = next(iter(masks))
    assert np.linalg.norm(values(model)[path] - before[path]) == pytest.approx(0.05 * 0.1, rel=1e-4)


@both
def test_custom_compile_and_metrics_survive(flavour: str) -> None:
    model = mlp(flavour, metrics=["mae"])
    sparsekit.prune(model, 0.5)
    optimizer = model.optimizer
    history = retrain_watched(model, (X, Y))
    assert "mae" in history.history
    assert model.optimizer is optimizer
    history = retrain_watched(model, (X, Y), loss="mae", steps_per_execution=2)
    assert history.history["loss"][0] == pytest.approx(history.history["mae"][0], rel=1e-5)
    assert model.optimizer is optimizer
    assert int(optimizer.iterations) == 4
