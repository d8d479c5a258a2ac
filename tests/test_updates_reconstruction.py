"""Least squares after a prune: outputs come back, errors never rise, zeros stay."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from models import KERAS, both, values

import sparsekit
from sparsekit.errors import ArgumentError
from sparsekit.frozen import attach, frozen_masks
from sparsekit.masks import MaskSet
from sparsekit.updates import forget_dense, reconstruct
from sparsekit.updates.least_squares import error_change, obs_rows, solve_on_support, solve_with_held_out

_RNG = np.random.default_rng(11)
# Inputs with correlated columns: where a weight goes, its neighbours can take over.
IMAGES = _RNG.normal(size=(96, 10, 10, 1)).astype("float32").cumsum(axis=1).cumsum(axis=2) / 10
ROWS = (_RNG.normal(size=(200, 4)) @ _RNG.normal(size=(4, 12)) + 0.1 * _RNG.normal(size=(200, 12))).astype("float32")
STEPS = ROWS.reshape(100, 6, 4)


def prune_half(model: Any, sparsity: float = 0.6) -> None:
    sparsekit.prune(model, sparsity, scope="layer")


def images_model(flavour: str) -> Any:
    k = KERAS[flavour]
    k.utils.set_random_seed(4)
    layers = [k.layers.Conv2D(6, 3, strides=2, padding="same", use_bias=False), k.layers.BatchNormalization()]
    layers += [k.layers.ReLU(), k.layers.Conv2D(5, 2, dilation_rate=2, activation="relu"), k.layers.Flatten()]
    layers += [k.layers.Dense(8, "tanh"), k.layers.Dense(3, "softmax")]
    return k.Sequential([k.layers.Input((10, 10, 1)), *layers])


def sequence_model(flavour: str) -> Any:
    k = KERAS[flavour]
    k.utils.set_random_seed(4)
    inputs = k.layers.Input((6, 4))
    x = k.layers.Conv1D(8, 3, padding="causal", activation="relu")(inputs)
    x = k.layers.EinsumDense("abc,cde->abde", (None, 3, 4), bias_axes="de")(x)
    x = k.layers.EinsumDense("abcd,cde->abe", (None, 5), activation="tanh")(x)
    x = x + k.layers.MultiHeadAttention(2, 3)(x, x)
    return k.Model(inputs, k.layers.Dense(2)(x))


def outputs(model: Any, layer: Any, data: np.ndarray) -> np.ndarray:
    """Output of a layer inside the whole model."""
    k = KERAS["keras"] if isinstance(model, KERAS["keras"].Model) else KERAS["tf_keras"]
    return np.asarray(k.Model(model.inputs[0], layer.output)(data, training=False))


@both
@pytest.mark.parametrize(("make", "data"), [(images_model, IMAGES), (sequence_model, STEPS)])
def test_no_layers_output_error_rises_and_most_fall(flavour, make, data):
    model = make(flavour)
    with_outputs = [layer for layer in model.layers if layer.weights]
    dense = {layer.name: outputs(model, layer, data) for layer in with_outputs}
    prune_half(model)
    masks, before = frozen_masks(model).to_masks(), values(model)

    def errors() -> dict[str, float]:
        return {la.name: float(np.sum((outputs(model, la, data) - dense[la.name]) ** 2)) for la in with_outputs}

    start = errors()
    result = reconstruct(model, data, batch_size=32)
    end = errors()
    for layer in with_outputs:
        assert end[layer.name] <= start[layer.name] * (1 + 1e-4), layer.name
    assert end[with_outputs[-1].name] < 0.7 * start[with_outputs[-1].name]
    for row in result.rows:
        assert row.error_before is None or row.error_after <= row.error_before
    for path in masks:
        assert (values(model)[path][~masks[path]] == 0).all()
    changed = {path for path in before if (values(model)[path] != before[path]).any()}
    assert set(result.changed) <= changed
    assert len(result.changed) >= 4
    assert all(path in str(result) for path in result.changed)


@both
def test_accuracy_comes_back(flavour):
    """A classifier pruned to a fifth of its weights gives half of its lost answers back, without labels."""
    k = KERAS[flavour]
    k.utils.set_random_seed(0)
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(10, 20))
    labels = rng.integers(0, 10, 1500)
    data = (centres[labels] + 0.5 * rng.normal(size=(1500, 20))).astype("float32")
    model = k.Sequential([k.layers.Input((20,)), k.layers.Dense(64, "relu"), k.layers.Dense(10)])
    loss = k.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(k.optimizers.Adam(0.01), loss, jit_compile=False)
    model.fit(data[:1000], labels[:1000], epochs=5, verbose=0)

    def accuracy() -> float:
        return float(np.mean(np.argmax(model.predict(data[1000:], verbose=0), axis=1) == labels[1000:]))

    dense = accuracy()
    prune_half(model, 0.85)
    pruned = accuracy()
    assert dense - pruned > 0.1, "the test needs something to recover"
    reconstruct(model, (data[:512], labels[:512]))
    assert accuracy() >= pruned + 0.5 * (dense - pruned)


def test_the_solution_is_the_least_squares_one_on_the_support():
    rng = np.random.default_rng(0)
    rows, lacking = rng.normal(size=(50, 6)), rng.normal(size=(50, 3))
    support = rng.random((6, 3)) < 0.6
    found = solve_on_support(rows.T @ rows, rows.T @ lacking, support, 1e-9, tolerance=1e-10)
    for column in range(3):
        kept = support[:, column]
        expected = np.linalg.lstsq(rows[:, kept], lacking[:, column], rcond=None)[0]
        np.testing.assert_allclose(found[kept, column], expected, rtol=1e-6)
        assert (found[~kept, column] == 0).all()
    before, after = np.sum(lacking**2), np.sum((rows @ found - lacking) ** 2)
    assert error_change(rows.T @ rows, rows.T @ lacking, found) == pytest.approx(after - before)


def test_obs_is_least_squares_where_all_removed_rows_come_first():
    rng = np.random.default_rng(1)
    rows, dense = rng.normal(size=(60, 7)), rng.normal(size=(7, 2))
    support = np.array([[False, False], [False, False], [False, True]] + [[True, True]] * 4)
    found = obs_rows(rows.T @ rows, dense, support, ridge=1e-12)
    for column in range(2):
        kept = support[:, column]
        expected = np.linalg.lstsq(rows[:, kept], rows @ dense[:, column], rcond=None)[0]
        np.testing.assert_allclose(found[kept, column], expected, rtol=1e-6)
        assert (found[~kept, column] == 0).all()


def test_obs_leaves_a_dense_matrix_alone():
    rng = np.random.default_rng(1)
    dense = rng.normal(size=(4, 3))
    np.testing.assert_array_equal(obs_rows(np.eye(4), dense, np.ones((4, 3), bool)), dense)


@both
def test_the_obs_method_lowers_errors_too(flavour):
    model = images_model(flavour)
    prune_half(model)
    masks = frozen_masks(model).to_masks()
    result = reconstruct(model, IMAGES, method="obs", batch_norm=False)
    assert len(result.changed) >= 3
    assert all(row.error_after <= row.error_before for row in result.rows)
    assert result.rows[-1].error_after < result.rows[-1].error_before
    for path in masks:
        assert (values(model)[path][~masks[path]] == 0).all()


def test_a_change_that_does_not_hold_on_the_other_half_is_not_made():
    gram = np.eye(2)
    assert solve_with_held_out((gram, gram), (np.ones((2, 1)), -np.ones((2, 1))), np.ones((2, 1), bool)) is None
    found = solve_with_held_out((gram, gram), (np.ones((2, 1)), np.ones((2, 1))), np.ones((2, 1), bool))
    np.testing.assert_allclose(found, 1.0, rtol=1e-2)


@pytest.mark.parametrize("kind", ["model", "list", "mapping", "remembered"])
def test_the_dense_weights_may_be_given_in_any_form(kind):
    model = images_model("keras")
    twin = images_model("keras")
    twin.set_weights(model.get_weights())
    reference = {"model": twin, "list": model.get_weights(), "mapping": values(model), "remembered": None}[kind]
    prune_half(model)
    if kind != "remembered":
        forget_dense(model)
    assert len(reconstruct(model, IMAGES, reference=reference).changed) >= 4


def test_pruning_in_steps_keeps_the_first_dense_model_and_training_ends_it():
    results = []
    for steps in ([0.6], [0.3, 0.6]):
        model = images_model("keras")
        for sparsity in steps:
            prune_half(model, sparsity)
        results.append([row.error_before for row in reconstruct(model, IMAGES).rows])
    assert results[0] == pytest.approx(results[1])
    model.compile(loss="mse", jit_compile=False)
    sparsekit.retrain(model, (IMAGES, np.zeros((96, 3))), update="uniform_noise", verbose=0)
    with pytest.raises(ArgumentError, match="was trained since"):
        reconstruct(model, IMAGES)
    prune_half(model, 0.7)
    assert reconstruct(model, IMAGES).changed


@pytest.mark.parametrize("kind", ["array", "pair", "dataset", "generator", "sequence"])
def test_data_is_what_fit_takes(kind):
    k = KERAS["tf_keras"]

    class Batches(k.utils.Sequence):
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> tuple:
            return IMAGES[32 * index :][:32], np.zeros(32)

    data = {
        "array": IMAGES,
        "pair": (IMAGES.astype("float64"), np.zeros(96)),
        "dataset": tf.data.Dataset.from_tensor_slices((IMAGES, np.zeros(96))).batch(32).repeat(),
        "generator": ((IMAGES[i : i + 32], np.zeros(32)) for i in (0, 32, 64)),
        "sequence": Batches(),
    }[kind]
    results = []
    for given in (IMAGES, data):
        model = images_model("tf_keras")
        prune_half(model)
        results.append(reconstruct(model, given, samples=96, batch_size=32))
    errors = [[row.error_after for row in result.rows] for result in results]
    np.testing.assert_allclose(*errors, rtol=1e-3)


@both
def test_what_cannot_be_reconstructed_is_named(flavour):
    k = KERAS[flavour]
    layers = k.layers
    fixed = layers.Dense(4, name="fixed", trainable=False)
    loop = layers.TimeDistributed(layers.Dense(4, name="inside"), name="loop")
    stack = [layers.Dense(4, name="whole"), loop, layers.LSTM(3, name="recurrent"), layers.Dense(3, name="last")]
    model = k.Sequential([layers.Input((6, 4)), fixed, *stack])
    prune_half(model)
    masks = {path: keep for path, keep in frozen_masks(model).to_masks().items() if "whole" not in path}
    whole = next(path for path in values(model) if path.endswith("whole/kernel"))
    attach(model, MaskSet.from_arrays({**masks, whole: np.ones((4, 4), bool)}))
    before = values(model)
    result = reconstruct(model, STEPS)
    reasons = {"/".join(row.path.split("/")[-3:]): row.reason for row in result.rows if row.status == "skipped"}
    assert any("whole" in path and reason == "not pruned" for path, reason in reasons.items())
    assert any("recurrent" in path and "LSTM" in reason for path, reason in reasons.items())
    assert any(path.endswith("last/kernel") for path in result.changed)
    for path, value in values(model).items():
        if not any(path.rsplit("/", 1)[0] == done.rsplit("/", 1)[0] for done in result.changed):
            np.testing.assert_array_equal(value, before[path], err_msg=path)


def test_biases_and_statistics_stay_when_asked():
    model = images_model("keras")
    prune_half(model)
    before = values(model)
    reconstruct(model, IMAGES, bias=False, batch_norm=False, exclude="Conv2D")
    moved = {path for path, value in values(model).items() if (value != before[path]).any()}
    assert moved
    assert all("dense" in path and path.endswith("kernel") for path in moved)


@both
def test_statistics_and_biases_come_nearer_to_the_dense_outputs(flavour):
    """Statistics are a row of their own and need no change of a kernel; a bias lowers its layer's error further."""
    errors = []
    for bias in (False, True):
        model = images_model(flavour)
        prune_half(model)
        start = values(model)
        result = reconstruct(model, IMAGES, bias=bias, include=lambda ref: ref.shape == (8, 3))
        statistics, last = result.rows
        assert statistics.path.endswith("moving_mean")
        assert statistics.error_after < 0.9 * statistics.error_before
        moved = {path.split("/")[-1] for path, value in values(model).items() if (value != start[path]).any()}
        assert moved == {"moving_mean", "moving_variance", "kernel"} | ({"bias"} if bias else set())
        errors.append(last.error_after)
    assert errors[1] < errors[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, r"The dense weights of .* are not known .*; pass reference="),
        (
            {"reference": [np.zeros(3)]},
            r"reference is 1 arrays; give the dense model, its get_weights\(\) \(11 arrays\)",
        ),
        ({"reference": 5}, r"reference is a int; give the dense model"),
        ({"reference": {"nobody": np.zeros(3)}}, r"reference names 'nobody', and .* has no such weight"),
        ({"method": "magic"}, r"method='magic' is not known; give one of least_squares, obs"),
        ({"samples": 0}, r"samples=0 must be a whole number >= 1"),
    ],
)
def test_what_cannot_run_is_refused_and_changes_nothing(arguments, message):
    model = images_model("keras")
    before = values(model)
    with pytest.raises(ArgumentError, match=message):
        reconstruct(model, IMAGES, **arguments)
    for path, value in values(model).items():
        np.testing.assert_array_equal(value, before[path])


def test_data_without_samples_is_refused():
    model = images_model("keras")
    prune_half(model)
    with pytest.raises(ArgumentError, match="data holds no sample"):
        reconstruct(model, IMAGES[:0])
    with pytest.raises(ArgumentError, match="data is a int"):
        reconstruct(model, 5)
