"""Zeros stay zero and the survivors train as if the rest did not exist: every optimizer class of both Kerases."""

from __future__ import annotations

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import sparsekit
import sparsekit.weights
from sparsekit.frozen import frozen_masks

BATCHES = 4
RNG = np.random.default_rng(7)
X = RNG.normal(size=(BATCHES * 8, 6)).astype("float32")
Y = RNG.normal(size=(BATCHES * 8, 2)).astype("float32")
KEEP = RNG.random((6, 5)) < 0.4
START = RNG.normal(size=(6, 5)).astype("float32")
# A rate at which each optimizer moves weights visibly within a few steps and stays finite.
RATES = {"Adadelta": 1.0, "Adagrad": 0.05, "Ftrl": 0.1, "Lion": 1e-3, "SGD": 0.05, "Muon": 1e-2}
# Their update of one position depends on other positions, also on pruned ones: row and column means of the whole
# matrix (Adafactor), orthogonalisation (Muon). There is no model without the pruned weights to compare with.
MIXING = {"Adafactor", "Muon"}


def classes_of(module, base) -> dict[str, type]:
    """Optimizer classes that a user can name, found in the library itself."""
    return {
        name: kind
        for name, kind in vars(module).items()
        if isinstance(kind, type)
        and issubclass(kind, base)
        and kind is not base
        and name not in ("Optimizer", "LossScaleOptimizer", "MultiOptimizer")
    }


OPTIMIZERS = {
    **{("keras", n): k for n, k in classes_of(keras.optimizers, keras.optimizers.Optimizer).items()},
    **{("tf_keras", n): k for n, k in classes_of(tf_keras.optimizers, tf_keras.optimizers.Optimizer).items()},
    **{
        ("tf_keras", f"legacy.{n}"): k
        for n, k in classes_of(tf_keras.optimizers.legacy, tf_keras.optimizers.legacy.Optimizer).items()
    },
}
MODULES = {"keras": keras, "tf_keras": tf_keras}


def make_optimizer(flavour: str, name: str, ema: bool):
    arguments = {"learning_rate": RATES.get(name.removeprefix("legacy."), 0.01)}
    if name in ("SGD", "legacy.SGD", "RMSprop", "legacy.RMSprop"):
        arguments["momentum"] = 0.9
    if ema:
        arguments |= {"use_ema": True, "ema_momentum": 0.5}
    return OPTIMIZERS[flavour, name](**arguments)


def make_model(flavour: str, optimizer, run_eagerly: bool = False):
    module = MODULES[flavour]
    model = module.Sequential([module.layers.Input((6,)), module.layers.Dense(5), module.layers.Dense(2)])
    model.compile(optimizer, "mse", run_eagerly=run_eagerly)
    model.layers[0].set_weights([START, np.zeros(5, "float32")])
    model.layers[1].set_weights([np.full((5, 2), 0.3, "float32"), np.zeros(2, "float32")])
    if not isinstance(optimizer, tf_keras.optimizers.legacy.Optimizer):
        # Keras 3 would build it while tracing, where ScheduleFreeAdamW cannot copy the weights that it starts from.
        optimizer.build(model.trainable_variables)
    return model


def test_all_optimizers_are_found() -> None:
    names = {name for flavour, name in OPTIMIZERS if flavour == "keras"}
    assert {"SGD", "Adam", "AdamW", "Nadam", "RMSprop", "Ftrl", "Lion", "Lamb", "Muon", "Adafactor"} <= names
    assert ("tf_keras", "Adam") in OPTIMIZERS
    assert ("tf_keras", "legacy.Adam") in OPTIMIZERS


CASES = [
    (flavour, name, ema)
    for (flavour, name), ema in itertools.product(OPTIMIZERS, (False, True))
    if not (ema and name.startswith("legacy."))
]


@pytest.mark.parametrize("enforce", ["gradient", "constraint"])
@pytest.mark.parametrize("masks", ["static", "dynamic"])
@pytest.mark.parametrize(("flavour", "name", "ema"), CASES, ids=lambda value: str(value))
def test_zeros_stay_zero(flavour: str, name: str, ema: bool, masks: str, enforce: str) -> None:
    for warm in (False, True):
        # The warm run is compiled, the fresh one is not: the same promise, and half of the tracing.
        model = make_model(flavour, make_optimizer(flavour, name, ema), run_eagerly=not warm)
        if warm:
            model.fit(X, Y, batch_size=8, shuffle=False, verbose=0)
        sparsekit.freeze(model, {weight_path(model): KEEP})
        kernel = model.layers[0].kernel
        before = kernel.numpy()
        broken: list[int] = []
        # Steps of one size (Lion) can lead back to where a weight began.
        moved = np.zeros(KEEP.shape, bool)

        class Watch(MODULES[flavour].callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None, kernel=kernel, broken=broken, moved=moved, before=before):
                broken.append(int(np.count_nonzero(kernel.numpy()[~KEEP])))
                moved |= kernel.numpy() != before

        sparsekit.retrain(
            model, (X, Y), epochs=2, batch_size=8, masks=masks, enforce=enforce, callbacks=[Watch()], verbose=0
        )
        after = kernel.numpy()
        assert broken == [0] * (2 * BATCHES), f"warm={warm}"
        assert np.array_equal(after[~KEEP], np.zeros((~KEEP).sum(), "float32"))
        assert not np.signbit(after[~KEEP]).any()
        assert np.isfinite(after).all()
        assert moved[KEEP].all(), f"warm={warm}: survivors must move"
        assert not frozen_masks(model).violations()


def weight_path(model) -> str:
    return next(path for path in (ref.path for ref in sparsekit.weights.all_weights(model)) if path.endswith("kernel"))


@pytest.mark.parametrize("enforce", ["gradient", "constraint"])
@pytest.mark.parametrize(
    ("flavour", "name", "ema"), [c for c in CASES if c[1] not in MIXING], ids=lambda value: str(value)
)
def test_survivors_equal_a_model_without_the_pruned_weights(flavour: str, name: str, ema: bool, enforce: str) -> None:
    """The reference holds the kept values as one vector and scatters them into the kernel: the rest does not exist."""
    optimizer = make_optimizer(flavour, name, ema)
    model = make_model(flavour, optimizer)
    sparsekit.freeze(model, {weight_path(model): KEEP})
    sparsekit.retrain(model, (X, Y), epochs=2, batch_size=8, shuffle=False, enforce=enforce, verbose=0)

    reference = make_optimizer(flavour, name, ema)
    make = MODULES["keras"].Variable if flavour == "keras" else tf.Variable
    values = make(START[KEEP])
    others = [make(v) for v in (np.zeros(5, "float32"), np.full((5, 2), 0.3, "float32"), np.zeros(2, "float32"))]
    variables = [values, *others]
    positions = np.argwhere(KEEP)
    if not name.startswith("legacy."):
        reference.build(variables)

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            tensors = [tf.convert_to_tensor(v) for v in variables]
            tape.watch(tensors)
            hidden = x @ tf.scatter_nd(positions, tensors[0], KEEP.shape) + tensors[1]
            loss = tf.reduce_mean((hidden @ tensors[2] + tensors[3] - y) ** 2)
        reference.apply_gradients(list(zip(tape.gradient(loss, tensors), variables, strict=True)))

    for start in list(range(0, len(X), 8)) * 2:
        step(X[start : start + 8], Y[start : start + 8])
    if ema:
        reference.finalize_variable_values(variables)
    np.testing.assert_allclose(model.layers[0].kernel.numpy()[KEEP], values.numpy(), rtol=2e-5, atol=1e-6)
    np.testing.assert_allclose(model.layers[1].kernel.numpy(), others[1].numpy(), rtol=2e-5, atol=1e-6)
