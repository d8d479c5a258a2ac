"""Masks that change while the engine trains: what is dropped leaves values, slots and index arrays within the step."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from models import KERAS, both, values
from test_engine_ops import arrays_of, with_engine
from test_engine_swap import FIT, images, make_optimizer, mlp, run_both, warm

import sparsekit
from sparsekit.engine import functions as engine
from sparsekit.engine import gate, masking, timings
from sparsekit.flavour import flavour_of
from sparsekit.schedules import Linear, Polynomial

RNG = np.random.default_rng(5)
X = RNG.normal(size=(40, 6)).astype("float32")
Y = RNG.normal(size=(40, 2)).astype("float32")

# The ops ------------------------------------------------------------------------------------------------------------


@with_engine
@pytest.mark.parametrize("shape", [(1, 1), (30, 20), (400, 300)])
@pytest.mark.parametrize("density", [0.0, 0.4, 1.0])
def test_masked_values_are_taken_out_by_position_inside_a_function(shape, density):
    rng = np.random.default_rng(0)
    keep = rng.random(shape) < density
    alive = rng.random(np.count_nonzero(keep)) < 0.7
    vectors = [rng.normal(size=alive.shape).astype(np.float32) for _ in range(3)]
    mask, lives = tf.Variable(keep), engine.varying(alive)
    arrays = [engine.varying(vector) for vector in vectors]

    @tf.function
    def shrink():
        masking.shrink(mask, lives, arrays)
        return [tf.convert_to_tensor(array) for array in arrays]

    expected = keep.copy()
    expected[keep] = alive
    for result, array, vector in zip(shrink(), arrays, vectors, strict=True):
        assert np.array_equal(result, vector[alive])
        assert np.array_equal(array, vector[alive])
    assert np.array_equal(mask, expected)
    assert np.array_equal(lives, np.ones(np.count_nonzero(alive), bool))


@with_engine
def test_values_that_do_not_fit_their_mask_stay_as_they_are():
    mask, lives, array = tf.Variable([[True, True]]), engine.varying([True, False]), engine.varying([1.0, 2.0, 3.0])
    with pytest.raises(tf.errors.InvalidArgumentError, match="vectors of 2 values"):
        masking.shrink(mask, lives, [array])
    array.assign([1.0, 2.0])
    mask.assign([[True, False]])
    with pytest.raises(tf.errors.InvalidArgumentError, match="keeps 1 weights, but there are 2 values"):
        masking.shrink(mask, lives, [array])
    assert np.array_equal(array, [1.0, 2.0])
    assert np.array_equal(lives, [True, False])


@with_engine
@settings(max_examples=40, deadline=None)
@given(st.integers(0, 300), st.integers(0, 300), st.sampled_from([0.0, 0.2, 1.0]), st.sampled_from([0.0, 0.7, 1.0]))
def test_index_arrays_become_those_of_the_narrower_mask(inputs, outputs, density, stays):
    rng = np.random.default_rng(inputs + outputs)
    keep = rng.random((inputs, outputs)) < density
    alive = rng.random(np.count_nonzero(keep)) < stays
    mask, lives = tf.Variable(keep), engine.varying(alive)
    arrays = [engine.varying(np.flatnonzero(keep).astype(np.float32))]
    structure = engine.Structure.from_mask(keep).in_variables()
    changed = masking.shrink(mask, lives, arrays, structure.arrays())
    assert bool(changed) is not bool(alive.all())
    keep[keep] = alive
    assert np.array_equal(mask, keep)
    assert np.array_equal(arrays[0], np.flatnonzero(keep))
    assert np.array_equal(lives, np.ones(np.count_nonzero(keep), bool))
    for array, expected in zip(structure.arrays(), arrays_of(keep), strict=True):
        assert np.array_equal(array, expected)


@with_engine
def test_few_masked_values_may_wait():
    mask, lives, array = tf.Variable([[True] * 4]), engine.varying([True, True, False, True]), engine.varying([1.0] * 4)
    assert not masking.shrink(mask, lives, [array], share=0.25)
    assert (int(tf.size(array)), np.count_nonzero(mask)) == (4, 4)
    assert masking.shrink(mask, lives, [array], share=0.24)
    assert (int(tf.size(array)), np.count_nonzero(mask)) == (3, 3)


@with_engine
def test_a_mask_that_somebody_read_keeps_its_old_value_for_him():
    mask, lives, array = tf.Variable([[True, True]]), engine.varying([True, False]), engine.varying([1.0, 2.0])
    before = mask.value()
    masking.shrink(mask, lives, [array])
    assert np.array_equal(before, [[True, True]])
    assert np.array_equal(mask, [[True, False]])


@with_engine
@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("row_pointers", lambda array: array[1:], "row_pointers must rise from 0"),
        ("columns", lambda array: array + 1, "are not those of the mask"),
        ("columns", lambda array: array - 5, "are not those of the mask"),
        ("column_pointers", lambda array: array + 1, "column_pointers must rise from 0"),
        ("rows", lambda array: array[1:], "rows must be a vector of 11"),
        ("permutation", lambda array: array + 1, "do not belong together"),
        ("permutation", lambda array: array * 0, "do not belong together"),
        ("permutation", lambda array: array * 0 + 3, "do not belong together"),
    ],
)
def test_index_arrays_of_another_mask_are_refused_and_nothing_is_changed(name, change, says):
    keep = np.ones((3, 4), bool)
    keep[2, 3] = False
    alive = np.ones(11, bool)
    alive[3] = False
    good = engine.Structure.from_mask(keep)
    structure = dataclasses.replace(good, **{name: change(getattr(good, name))}).in_variables()
    mask, lives, array = tf.Variable(keep), engine.varying(alive), engine.varying(np.arange(11, dtype=np.float32))
    held = [v.numpy() for v in (mask, lives, array, *structure.arrays())]
    with pytest.raises(tf.errors.InvalidArgumentError, match=says):
        masking.shrink(mask, lives, [array], structure.arrays())
    for variable, before in zip((mask, lives, array, *structure.arrays()), held, strict=True):
        assert np.array_equal(variable, before)


def smallest_dropped(weight, keep, zeros):
    """By a stable sort, in which what is dropped already comes first."""
    order = np.argsort(np.where(keep, np.abs(weight), -1.0), axis=None, kind="stable")
    left = keep.copy().reshape(-1)
    left[order[:zeros]] = False
    return left.reshape(keep.shape)


@with_engine
@settings(max_examples=60, deadline=None)
@given(st.integers(0, 40), st.sampled_from([0.0, 0.5, 1.0]), st.integers(-2, 45), st.integers(0, 2**32 - 1))
def test_the_smallest_are_dropped_and_the_first_of_equal_ones(size, density, zeros, seed):
    rng = np.random.default_rng(seed)
    # Few magnitudes, so that most are equal to another; both signs, zeros, denormal and infinite ones.
    weight = rng.choice(np.array([0.0, -0.0, 1e-42, -1e-42, 1.0, -1.0, 1.0 + 2**-23, np.inf], np.float32), size)
    keep = rng.random(size) < density
    zeros = min(zeros, size)
    expected = smallest_dropped(weight, keep, max(zeros, 0))
    assert np.array_equal(masking.drop_smallest(weight, keep, zeros), expected)


@with_engine
@pytest.mark.parametrize("levels", [3, 2**20])
def test_what_is_dropped_does_not_depend_on_threads(levels):
    rng = np.random.default_rng(0)
    weight = (rng.integers(0, levels, (500, 400)) - levels / 2).astype(np.float32)
    keep = rng.random(weight.shape) < 0.6
    for zeros in (0, 80_500, 150_000, 200_000):
        assert np.array_equal(masking.drop_smallest(weight, keep, zeros), smallest_dropped(weight, keep, zeros))


# Runs ---------------------------------------------------------------------------------------------------------------

# One of each kind: no slots, moments, those that start above zero, one of the older classes, and what wraps updates.
KINDS = [
    ("keras", "SGD"),
    ("keras", "Nadam"),
    ("keras", "Ftrl"),
    ("keras", "Lamb"),
    ("tf_keras", "Adam"),
    ("tf_keras", "Adagrad"),
    ("tf_keras", "legacy.Adam"),
]


@pytest.mark.parametrize(("flavour", "name"), KINDS, ids=str)
def test_masks_that_follow_a_schedule(flavour: str, name: str) -> None:
    """From 20 to 80 % within the epochs, with averages of weights where there are any."""

    def make() -> Any:
        model = mlp(flavour, make_optimizer(flavour, name, not name.startswith("legacy.")))
        warm(model)
        return sparsekit.prune(model, 0.2)

    _, sparse = run_both(make, epochs=3, schedule=Polynomial(0.8, end_step=14, frequency=3))
    assert sparsekit.masks_of(sparse).sparsity == pytest.approx(0.8, abs=0.02)


@both
def test_a_schedule_with_clipping_accumulation_and_several_steps_a_call(flavour: str) -> None:
    k = KERAS[flavour]
    more = {"gradient_accumulation_steps": 2} if flavour == "keras" else {}

    def make() -> Any:
        optimizer = k.optimizers.Adam(0.05, global_clipnorm=0.1, use_ema=True, ema_overwrite_frequency=3, **more)
        return sparsekit.prune(mlp(flavour, optimizer), 0.2)

    run_both(make, epochs=4, schedule=Polynomial(0.8, end_step=7, frequency=3), steps_per_execution=2)


def sequences(k: Any) -> tuple[Any, tuple[int, ...]]:
    layers = [
        k.layers.Input((4, 5)),
        k.layers.EinsumDense("abc,cd->abd", output_shape=(None, 4), activation="relu", name="a"),
        k.layers.LSTM(5, name="b"),
        k.layers.Dense(2, name="c"),
    ]
    return k.Sequential(layers, name="sequences"), (4, 5)


@both
@pytest.mark.parametrize("build", [images, sequences])
def test_a_schedule_for_every_kind_of_layer(flavour: str, build: Any) -> None:
    k = KERAS[flavour]

    def make() -> Any:
        k.utils.set_random_seed(1)
        model, _ = build(k)
        model.compile(k.optimizers.Adam(0.01), "mse")
        return model

    x = np.random.default_rng(1).normal(size=(16, *build(k)[1])).astype("float32")
    run_both(make, x, Y[:16], epochs=3, schedule=Polynomial(0.8, end_step=5, frequency=2))


@both
def test_masks_that_follow_zeros(flavour: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ftrl with a strong L1 penalty makes exact zeros, which are masked from then on."""
    monkeypatch.setattr("sparsekit.training.dynamic._SETTLE_EVERY", 4)
    k = KERAS[flavour]

    def make() -> Any:
        optimizer = k.optimizers.Ftrl(0.1, l1_regularization_strength=0.02)
        return sparsekit.prune(mlp(flavour, optimizer), 0.3)

    first = sparsekit.masks_of(make()).sparsity
    _, sparse = run_both(make, epochs=4, masks="dynamic")
    assert sparsekit.masks_of(sparse).sparsity > first


def watched_lengths(flavour: str, model: Any) -> tuple[list[tuple[int, ...]], list[int]]:
    """Numbers of values that steps see, and one entry for each time that a step is traced."""
    k = KERAS[flavour]
    lengths: list[tuple[int, ...]] = []
    traces: list[int] = []

    def note() -> None:
        optimizer = flavour_of(model).optimizer_variables(model.optimizer)
        vectors = [v for v in (*model.trainable_variables, *optimizer) if len(v.shape) == 1]
        lengths.append(tuple(sorted({int(tf.size(getattr(v, "_value", v))) for v in vectors})))

    class Note(k.metrics.Mean):
        def update_state(self, y_true, y_pred, sample_weight=None):
            traces.append(1)
            tf.py_function(note, [], [])
            return super().update_state(y_pred)

    model.compile(model.optimizer, "mse", metrics=[Note(name="note")])
    return lengths, traces


@both
def test_values_and_slots_become_fewer_without_a_new_trace(flavour: str) -> None:
    k = KERAS[flavour]
    model = mlp(flavour, k.optimizers.Adam(0.02))
    lengths, traces = watched_lengths(flavour, model)
    schedule = Linear(0.75, begin_step=1, end_step=13, frequency=4, initial_sparsity=0.25)
    sparsekit.retrain(model, (X, Y), schedule=schedule, engine="sparse", epochs=3, **FIT)
    # Kernels of 6 x 8 and 8 x 2, biases of 8 and 2, at 0, 25, 42, 58 and 75 % zeros.
    assert {n for seen in lengths for n in seen} <= {2, 8, 48, 16, 36, 12, 28, 9, 20, 7, 4}
    # Epochs have five batches: within one the numbers change.
    assert len({*lengths[:5]}) >= 2
    assert lengths[-1] == (2, 4, 8, 12)
    # Keras 3 traces once more to make the metric.
    assert len(traces) <= 2


@both
def test_an_error_in_the_step_leaves_values_and_slots_that_agree(flavour: str) -> None:
    """Whatever part of the step was done, its kernels and slots are whole, and masked positions are zero."""
    k = KERAS[flavour]
    model = mlp(flavour, k.optimizers.Adam(0.02))
    steps = []

    def fail() -> None:
        steps.append(1)
        if len(steps) == 8:
            raise ValueError("stop")

    class Fail(k.metrics.Mean):
        def update_state(self, y_true, y_pred, sample_weight=None):
            tf.py_function(fail, [], [])
            return super().update_state(y_pred)

    model.compile(model.optimizer, "mse", metrics=[Fail(name="fail")])
    schedule = Linear(0.75, end_step=20, frequency=1)
    with pytest.raises(tf.errors.OpError, match="stop"):
        sparsekit.retrain(model, (X, Y), schedule=schedule, engine="sparse", epochs=4, **FIT)
    assert [v.shape for v in values(model).values()] == [(6, 8), (8,), (8, 2), (2,)]
    assert sparsekit.report(model).violations == 0
    assert 0.2 < sparsekit.report(model).sparsity < 0.4
    model.compile("sgd", "mse")
    sparsekit.retrain(model, (X, Y), engine="sparse", **FIT)


@both
def test_a_killed_run_with_a_schedule_goes_on_from_its_checkpoints(flavour: str, tmp_path: Any) -> None:
    k = KERAS[flavour]

    def run(engine: str, folder: str, killed: bool = False) -> Any:
        model = mlp(flavour, k.optimizers.Adam(0.02))

        def stop(batch: int, logs: Any) -> None:
            if killed and int(model.optimizer.iterations) == 9:
                raise KeyboardInterrupt

        callbacks = [k.callbacks.LambdaCallback(on_train_batch_end=stop)]
        arguments = {"batch_size": 8, "verbose": 0, "checkpoint_dir": tmp_path / folder, "checkpoint_every": 3}
        schedule = Polynomial(0.8, end_step=14, frequency=3)
        sparsekit.retrain(model, (X, Y), engine=engine, epochs=4, callbacks=callbacks, schedule=schedule, **arguments)
        return model

    whole = run("dense", "whole")
    with pytest.raises(KeyboardInterrupt):
        run("sparse", "parts", killed=True)
    resumed = run("sparse", "parts")
    assert sparsekit.masks_of(resumed) == sparsekit.masks_of(whole)
    for left, right in zip(whole.get_weights(), resumed.get_weights(), strict=True):
        np.testing.assert_allclose(right, left, rtol=1e-5, atol=1e-6)


# Runs that become sparse --------------------------------------------------------------------------------------------


@pytest.fixture
def long_runs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, ...]]:
    """Every run is long enough; the sparse form wins from some sparsity on. `[(inputs, sparsity), ...]` was timed."""
    asked: list[tuple[float, ...]] = []

    def both_seconds(use: Any, keep: np.ndarray) -> tuple[float, float]:
        sparsity = 1.0 - np.count_nonzero(keep) / keep.size
        asked.append((keep.shape[0], sparsity))
        return 1.0, 0.5 if sparsity >= {6: 0.45, 8: 0.7}[keep.shape[0]] else 2.0

    monkeypatch.setattr(gate, "_SLOW_MULTIPLICATIONS_PER_S", 1e-6)
    monkeypatch.setattr(timings, "both_seconds", both_seconds)
    monkeypatch.setattr(timings, "known", lambda use, keep: True)
    monkeypatch.setattr(gate, "whole_gain", lambda *_: 1.5)
    return asked


@both
def test_a_run_that_becomes_sparse_is_swapped_at_an_epochs_end(flavour: str, long_runs: list[Any]) -> None:
    k = KERAS[flavour]
    schedule = Linear(0.75, end_step=15, frequency=5)  # 0, 25, 50 and 75 % at the ends of epochs
    seen: list[Any] = []

    def run(engine: str) -> tuple[Any, Any]:
        model = mlp(flavour, k.optimizers.Adam(0.02))
        own = model.optimizer
        look = k.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs: seen.append([w.shape for w in model.get_weights()])
        )
        history = sparsekit.retrain(
            model, (X, Y), engine=engine, schedule=schedule, epochs=6, callbacks=[look], validation_data=(X, Y), **FIT
        )
        assert model.optimizer is own
        assert all("call" not in vars(layer) for layer in model.layers)
        return model, history

    (dense, dense_history), (auto, history) = run("dense"), run("auto")
    report = history.engine
    # After two epochs the first kernel wins, after three both do.
    assert (report.engine, report.from_epoch) == ("sparse", 3)
    assert [(s.path, s.sparsity) for s in report.swapped] == [("first/kernel", 0.75), ("last/kernel", 0.75)]
    assert report.gain == 1.5
    assert [inputs for inputs, sparsity in long_runs if sparsity == 0.5] == [6, 8]
    # Where nothing has changed nothing is asked again.
    assert [inputs for inputs, sparsity in long_runs if sparsity == 0.75] == [6, 8]
    assert {*map(tuple, seen)} == {((6, 8), (8,), (8, 2), (2,))}
    assert sparsekit.masks_of(auto) == sparsekit.masks_of(dense)
    for left, right in zip(dense.get_weights(), auto.get_weights(), strict=True):
        np.testing.assert_allclose(right, left, rtol=1e-5, atol=1e-6)
    for name, column in dense_history.history.items():
        np.testing.assert_allclose(history.history[name], column, rtol=1e-5)
    auto.fit(X, Y, **FIT)


def test_a_run_is_not_swapped_after_its_last_epoch(long_runs: list[Any]) -> None:
    model = mlp("keras", KERAS["keras"].optimizers.Adam(0.02))
    history = sparsekit.retrain(model, (X, Y), schedule=Linear(0.75, end_step=5, frequency=5), **FIT)
    assert history.engine.engine == "dense"
    assert "no weight is sparse enough" in history.engine.reason
    assert long_runs == []


def test_static_masks_are_chosen_for_once(long_runs: list[Any]) -> None:
    model = sparsekit.prune(mlp("keras", KERAS["keras"].optimizers.Adam(0.02)), 0.5)
    more = KERAS["keras"].callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: sparsekit.prune(model, 0.75))
    history = sparsekit.retrain(model, (X, Y), epochs=3, callbacks=[more], **FIT)
    assert [s.path for s in history.engine.swapped] == ["first/kernel"]
    assert history.engine.from_epoch == 0
