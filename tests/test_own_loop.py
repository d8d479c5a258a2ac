"""`masked` and `train_step` in loops that users write themselves."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from models import KERAS, X, Y, assert_held, assert_moved, both, mlp, values, warmed

import sparsekit
from sparsekit.errors import ArgumentError, SparsekitWarning

BATCHES = [(X[i : i + 16], Y[i : i + 16]) for i in range(0, 64, 16)]
EXAMPLE = Path(__file__).parents[1] / "examples" / "own_loop.py"


def tape_step(model, optimizer, graph: bool = True, jit: bool | None = None):
    """The step of the usual tutorial."""

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    return tf.function(step, jit_compile=jit) if graph else step


def run(step, batches=BATCHES) -> None:
    for x, y in batches:
        step(tf.constant(x), tf.constant(y))


@both
def test_the_example(flavour: str, capsys) -> None:
    spec = importlib.util.spec_from_file_location("own_loop", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main(flavour)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    for line in lines:
        before, after = (float(part) for part in line.split("accuracy ")[1].split("  ")[0].split(" -> "))
        assert after > before
        assert "sparsity 0.9" in line
        assert line.endswith("zeros lost 0")


@pytest.mark.parametrize("masks", ["static", "dynamic"])
@pytest.mark.parametrize("graph", [True, False])
@both
def test_own_tape_with_a_warm_optimizer(flavour: str, graph: bool, masks: str) -> None:
    k = KERAS[flavour]
    model = mlp(flavour)
    optimizer = k.optimizers.AdamW(0.01, use_ema=True, global_clipnorm=1.0)
    run(tape_step(model, optimizer))
    sparsekit.prune(model, 0.5)
    assert sparsekit.masked(optimizer, model, masks=masks) is optimizer
    assert isinstance(optimizer, k.optimizers.AdamW)
    held, before = sparsekit.masks_of(model), values(model)
    step = tape_step(model, optimizer, graph)
    for batch in BATCHES:
        run(step, [batch])
        assert_held(model, held)
    assert_moved(model, held, before)
    optimizer.finalize_variable_values(model.trainable_variables)
    assert_held(model, held)


@both
def test_apply_with_and_without_variables(flavour: str) -> None:
    """Keras 3 knows `apply(gradients)`, tf_keras `minimize`; all go the same way."""
    k = KERAS[flavour]
    model = sparsekit.prune(mlp(flavour), 0.5)
    masks = sparsekit.masks_of(model)
    optimizer = sparsekit.masked(k.optimizers.Adam(0.1), model)
    for _ in range(2):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(X, training=True) - Y))
        if flavour == "tf_keras":
            optimizer.minimize(loss, model.trainable_variables, tape=tape)
        else:
            gradients = tape.gradient(loss, [v.value for v in model.trainable_variables])
            if not optimizer.built:
                optimizer.build(model.trainable_variables)
            optimizer.apply(gradients)
        assert_held(model, masks)
    assert int(optimizer.iterations) == 2


@both
def test_under_xla(flavour: str) -> None:
    model = sparsekit.prune(warmed(mlp(flavour)), 0.5)
    masks, before = sparsekit.masks_of(model), values(model)
    optimizer = sparsekit.masked(KERAS[flavour].optimizers.SGD(0.1, momentum=0.9), model, masks="dynamic")
    if flavour == "keras":
        optimizer.build(model.trainable_variables)
    run(tape_step(model, optimizer, jit=flavour == "keras"))
    assert_held(model, masks)
    assert_moved(model, masks, before)


@both
def test_a_masked_optimizer_in_plain_fit(flavour: str) -> None:
    """Compiled into the model it holds the zeros in fit and train_on_batch, also under weight averaging."""
    k = KERAS[flavour]
    model = warmed(mlp(flavour, k.optimizers.Adam(0.01, use_ema=True)))
    sparsekit.prune(model, 0.5)
    masks, before = sparsekit.masks_of(model), values(model)
    model.compile(sparsekit.masked(model.optimizer, model), "mse")
    model.fit(X, Y, batch_size=16, verbose=0)
    assert_held(model, masks)
    model.train_on_batch(X, Y)
    assert_held(model, masks)
    assert_moved(model, masks, before)
    sparsekit.retrain(model, (X, Y), verbose=0)
    model.fit(X, Y, verbose=0)
    assert_held(model, masks)


@both
def test_traced_once_and_right_after_prune_strip_freeze(flavour: str) -> None:
    """A function traced before follows a later prune, lets go after strip, and holds again after a new one."""
    k = KERAS[flavour]
    model = sparsekit.prune(mlp(flavour), 0.25)
    optimizer = sparsekit.masked(k.optimizers.Adam(0.01), model)
    step = tape_step(model, optimizer)
    run(step)
    sparsekit.prune(model, 0.5)
    masks = sparsekit.masks_of(model)
    run(step)
    assert_held(model, masks)
    sparsekit.strip(model)
    run(step, BATCHES * 2)
    assert all((v != 0).all() for path, v in values(model).items() if path.endswith("kernel"))
    sparsekit.prune(model, 0.75)
    masks = sparsekit.masks_of(model)
    run(step)
    assert_held(model, masks)
    assert step.experimental_get_tracing_count() <= 2


@pytest.mark.parametrize(
    ("eager", "masks", "enforce"),
    [(False, "static", "gradient"), (False, "dynamic", "constraint"), (True, "dynamic", "gradient")],
)
@both
def test_train_step(flavour: str, eager: bool, masks: str, enforce: str) -> None:
    model = warmed(mlp(flavour, metrics=["mae"], run_eagerly=eager))
    sparsekit.prune(model, 0.5)
    held, before = sparsekit.masks_of(model), values(model)
    step = sparsekit.train_step(model, masks=masks, enforce=enforce)
    for x, y in BATCHES:
        model.reset_metrics()
        logs = step(x, y)
        assert_held(model, held)
    assert set(logs) == {"loss", "mae"}
    assert float(logs["loss"]) > 0
    assert_moved(model, held, before)
    assert "train_step" not in vars(model)
    assert all(v.constraint is None for v in model.trainable_variables)


@both
def test_train_step_equals_fit(flavour: str) -> None:
    results = []
    weight = np.linspace(0, 1, 16).astype("float32")
    for way in ("fit", "step"):
        model = sparsekit.prune(mlp(flavour), 0.5)
        if way == "fit":
            sparsekit.retrain(model, (X, Y, np.tile(weight, 4)), batch_size=16, shuffle=False, verbose=0)
        else:
            step = sparsekit.train_step(model)
            for x, y in BATCHES:
                step(x, y, weight)
        results.append(values(model))
    for value, expected in zip(results[1].values(), results[0].values(), strict=True):
        np.testing.assert_allclose(value, expected, atol=1e-6)


@both
def test_train_step_is_traced_once(flavour: str) -> None:
    k = KERAS[flavour]
    traces = []

    class Counting(k.layers.Layer):
        def call(self, x):
            traces.append(1)
            return x

    model = k.Sequential([k.layers.Input((6,)), Counting(), k.layers.Dense(2)])
    model.compile("adam", "mse")
    step = sparsekit.train_step(sparsekit.prune(model, 0.5))
    step(*BATCHES[0])
    first = len(traces)
    for x, y in BATCHES[1:]:
        step(x, y)
        step(tf.constant(x), tf.constant(y))
    assert len(traces) == first


@both
def test_train_step_sees_later_masks_and_compiles(flavour: str) -> None:
    k = KERAS[flavour]
    model = warmed(mlp(flavour))
    first = next(path for path in values(model) if path.endswith("kernel"))
    sparsekit.prune(model, 0.5, include=first)
    step = sparsekit.train_step(model)
    step(*BATCHES[0])
    sparsekit.prune(model, 0.5)
    masks = sparsekit.masks_of(model)
    assert len(masks) == 2
    step(*BATCHES[1])
    assert_held(model, masks)
    model.compile(k.optimizers.SGD(0.1, momentum=0.9), "mae")
    step(*BATCHES[2])
    assert_held(model, masks)
    assert int(model.optimizer.iterations) == 1
    sparsekit.strip(model)
    for x, y in BATCHES * 2:
        step(x, y)
    assert all((v != 0).all() for path, v in values(model).items() if path.endswith("kernel"))
    sparsekit.prune(model, 0.75)
    step(*BATCHES[0])
    assert_held(model, sparsekit.masks_of(model))


@both
def test_mixed_precision_steps(flavour: str) -> None:
    k = KERAS[flavour]
    k.mixed_precision.set_global_policy("mixed_float16")
    try:
        model = sparsekit.prune(warmed(mlp(flavour, k.optimizers.SGD(0.05, momentum=0.9))), 0.5)
    finally:
        k.mixed_precision.set_global_policy("float32")
    masks, before = sparsekit.masks_of(model), values(model)
    step = sparsekit.train_step(model)
    for x, y in BATCHES:
        step(x, y)
    assert_held(model, masks)
    assert_moved(model, masks, before)


@both
def test_without_masks(flavour: str) -> None:
    model = mlp(flavour)
    with pytest.raises(ArgumentError, match=r"has no masks; call sparsekit.prune\(model, sparsity=...\)"):
        sparsekit.train_step(model)
    with pytest.raises(ArgumentError, match=r"has no masks; call sparsekit.prune\(model, sparsity=...\)"):
        sparsekit.masked(KERAS[flavour].optimizers.Adam(), model)
    with pytest.raises(ArgumentError, match=r"masks='both' is not known; give one of static, dynamic"):
        sparsekit.masked(KERAS[flavour].optimizers.Adam(), sparsekit.prune(model, 0.5), masks="both")


@both
def test_masked_is_seen_by_the_fit_of_a_model_that_has_trained_before(flavour: str) -> None:
    model = warmed(mlp(flavour), epochs=1)
    sparsekit.prune(model, 0.5)
    sparsekit.masked(model.optimizer, model)
    before = values(model)
    model.fit(X, Y, batch_size=16, verbose=0)
    assert_held(model, sparsekit.masks_of(model))
    assert_moved(model, sparsekit.masks_of(model), before)


@both
def test_a_crash_of_onednn_is_warned_of_before_training(flavour: str, monkeypatch) -> None:
    k = KERAS[flavour]
    layers = [k.layers.Input((4, 4, 3)), k.layers.Conv2D(5, 1, strides=2, name="shortcut"), k.layers.Flatten()]
    model = k.Sequential([*layers, k.layers.Dense(2)])
    model.compile("sgd", "mse")
    sparsekit.prune(model, 0.5)
    monkeypatch.setattr("sparsekit.api.onednn", lambda: True)
    sparsekit.train_step(model)  # TF_ENABLE_ONEDNN_OPTS is set: the user has decided
    monkeypatch.delenv("TF_ENABLE_ONEDNN_OPTS")
    with pytest.warns(
        SparsekitWarning, match=r"1x1 convolutions with strides \(shortcut\) crashes .* TF_ENABLE_ONEDNN_OPTS=0"
    ):
        sparsekit.train_step(model)
    monkeypatch.setattr("sparsekit.api.onednn", lambda: False)
    sparsekit.train_step(model)
