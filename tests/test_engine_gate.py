"""What the gate measures, keeps and decides; what it never does is time anything here."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from models import KERAS, both

import sparsekit
from sparsekit.engine import build, gate, timings
from sparsekit.engine.batches import batch_spec, most_elements, steps_of
from sparsekit.engine.layers import Convolution, Matrix
from sparsekit.engine.sites import find_sites
from sparsekit.engine.timings import Use
from sparsekit.errors import ArgumentError, EngineError
from sparsekit.flavour import flavour_of
from sparsekit.frozen import frozen_masks

RNG = np.random.default_rng(9)
X = RNG.normal(size=(40, 6)).astype("float32")
Y = RNG.normal(size=(40, 2)).astype("float32")


def model_of(flavour: str = "keras") -> Any:
    k = KERAS[flavour]
    k.utils.set_random_seed(1)
    layers = [k.layers.Input((6,)), k.layers.Dense(8, "relu", name="first"), k.layers.Dense(2, name="last")]
    model = k.Sequential(layers, name="net")
    model.compile(k.optimizers.Adam(0.01), "mse")
    return sparsekit.prune(model, 0.75)


@pytest.fixture
def long_runs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every run is long enough; times come from the list `[(seconds dense, seconds sparse), ...]`, in turn."""
    times: list[Any] = []
    monkeypatch.setattr(gate, "_SLOW_MULTIPLICATIONS_PER_S", 1e-6)
    monkeypatch.setattr(timings, "both_seconds", lambda use, keep: times.pop(0))
    monkeypatch.setattr(timings, "known", lambda use, keep: True)
    monkeypatch.setattr(gate, "whole_gain", lambda *_: 1.5)
    return times


@both
def test_only_what_wins_is_swapped(flavour: str, long_runs: list[Any]) -> None:
    long_runs += [(10.0, 2.0), (1.0, 0.95)]
    history = sparsekit.retrain(model_of(flavour), (X, Y), batch_size=8, verbose=0)
    report = history.engine
    assert report.engine == "sparse"
    assert [(s.path, s.sparsity, s.dense_s, s.sparse_s) for s in report.swapped] == [("first/kernel", 0.75, 10.0, 2.0)]
    assert report.gain == 1.5
    assert report.reason == "last/kernel stays dense: sparse takes 950.00 ms and dense 1000.00 ms"


@pytest.mark.parametrize("long", [True, False])
def test_a_forced_run_reports_times_if_it_is_long(long: bool, long_runs: list[Any], monkeypatch: Any) -> None:
    if not long:
        monkeypatch.setattr(gate, "_SLOW_MULTIPLICATIONS_PER_S", 5e9)
        monkeypatch.setattr(timings, "known", lambda use, keep: False)
    # What loses is swapped all the same.
    long_runs += [(10.0, 2.0), (1.0, 3.0)]
    report = sparsekit.retrain(model_of(), (X, Y), batch_size=8, engine="sparse", verbose=0).engine
    times = [(10.0, 2.0), (1.0, 3.0)] if long else [(None, None)] * 2
    assert [(s.dense_s, s.sparse_s) for s in report.swapped] == times
    assert [s.path for s in report.swapped] == ["first/kernel", "last/kernel"]
    assert report.gain == (1.5 if long else None)


def test_nothing_is_swapped_where_nothing_wins(long_runs: list[Any]) -> None:
    long_runs += [(1.0, 1.0), (1.0, 3.0)]
    history = sparsekit.retrain(model_of(), (X, Y), batch_size=8, verbose=0)
    assert history.engine.engine == "dense"
    assert history.engine.swapped == ()


def test_a_short_run_measures_and_builds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("a short run must not come here")

    for owner, name in ((timings, "both_seconds"), (timings, "dense_seconds"), (build, "library"), (gate, "probe")):
        monkeypatch.setattr(owner, name, never)
    monkeypatch.setattr("sparsekit.engine.masking.ready", lambda: False)
    history = sparsekit.retrain(model_of(), (X, Y), batch_size=8, verbose=0)
    assert history.engine == gate.EngineReport(
        "dense", reason="5 steps of this size are too few to be worth the measuring", advice=history.engine.advice
    )


@pytest.mark.parametrize(("dense_s", "builds"), [(1e-3, False), (100.0, True)])
def test_building_has_to_pay(dense_s: float, builds: bool, long_runs: list[Any], monkeypatch: Any) -> None:
    # 5 steps save at most 5 * 2 * dense_s: 10 ms, or 1000 s.
    long_runs += [(10.0, 1.0)] * 2
    built: list[bool] = []
    monkeypatch.setattr(build, "cached", lambda: False)
    monkeypatch.setattr(build, "reason", lambda: None)
    monkeypatch.setattr(build, "available", lambda: built.append(True) or True)
    monkeypatch.setattr(timings, "dense_seconds", lambda use: dense_s)
    monkeypatch.setattr("sparsekit.engine.masking.ready", lambda: False)
    history = sparsekit.retrain(model_of(), (X, Y), batch_size=8, verbose=0)
    assert built == [True] * builds
    assert history.engine.engine == ("sparse" if builds else "dense")
    if not builds:
        assert "too short to pay for building" in history.engine.reason


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch, long_runs: list[Any]) -> None:
    line = "the engine cannot be built: none of c++ is on the path"

    def missing() -> Any:
        raise EngineError(line)

    monkeypatch.setattr(build, "cached", lambda: False)
    monkeypatch.setattr(build, "reason", lambda: line)
    monkeypatch.setattr(build, "library", missing)
    monkeypatch.setattr("sparsekit.engine.masking.ready", lambda: False)
    model = model_of()
    history = sparsekit.retrain(model, (X, Y), batch_size=8, verbose=0)
    assert (history.engine.engine, history.engine.reason) == ("dense", line)
    with pytest.raises(EngineError, match="none of c"):
        sparsekit.retrain(model, (X, Y), engine="sparse", verbose=0)


def test_words() -> None:
    with pytest.raises(ArgumentError, match="engine='fast' is not known; give one of auto, dense, sparse"):
        sparsekit.retrain(model_of(), (X, Y), engine="fast")
    with pytest.raises(ArgumentError, match="engine='dense' is not known"):
        sparsekit.accelerate(model_of(), engine="dense")


@both
def test_a_probe_sees_shapes_and_uses(flavour: str) -> None:
    k = KERAS[flavour]
    inputs = k.layers.Input((5, 4, 3))
    x = k.layers.Conv2D(6, 3, padding="same", activation="relu", name="a")(inputs)
    x = k.layers.Conv2D(6, 1, name="b")(x)
    twice = k.layers.Dense(6, name="c")
    model = k.Model(inputs, k.layers.Dense(2, name="d")(twice(twice(x))), name="probed")
    sparsekit.prune(model, 0.5)
    before = [vars(layer).keys() for layer in model.layers]
    sites, _ = find_sites(flavour_of(model), model, frozen_masks(model))
    uses, reasons = gate.probe(flavour_of(model), model, sites, tf.TensorSpec((7, 5, 4, 3)))
    assert reasons == {}
    assert uses == {
        "a/kernel": [Use(Convolution((3, 3, 3, 6), (1, 1), "same", (1, 1), 1), (7, 5, 4, 3), True, False)],
        "b/kernel": [Use(Convolution((1, 1, 6, 6), (1, 1), "valid", (1, 1), 1), (7, 5, 4, 6), False, True)],
        "c/kernel": [Use(Matrix((6, 6)), (7, 5, 4, 6), False, True)] * 2,
        "d/kernel": [Use(Matrix((6, 2)), (7, 5, 4, 6), False, True)],
    }
    # Forward and two gradients, 7 * 5 * 4 positions.
    assert uses["a/kernel"][0].multiplications == 2 * 140 * 3 * 3 * 3 * 6
    assert uses["d/kernel"][0].multiplications == 3 * 140 * 6 * 2
    assert [vars(layer).keys() for layer in model.layers] == before


@both
def test_kernels_that_are_read_elsewhere_are_left_alone(flavour: str) -> None:
    k = KERAS[flavour]

    class Tied(k.Model):
        def __init__(self):
            super().__init__(name="tied")
            self.first = k.layers.Dense(6, name="first")
            self.last = k.layers.Dense(2, name="last")

        def call(self, x, training=None):
            x = self.first(x)
            return self.last(tf.matmul(x, tf.convert_to_tensor(self.first.kernel), transpose_b=True))

    model = Tied()
    model(X)
    model.compile(k.optimizers.Adam(0.01), "mse")
    sparsekit.prune(model, 0.5)
    history = sparsekit.retrain(model, (X, Y), engine="sparse", verbose=0)
    assert len(history.engine.swapped) == 1
    assert "first/kernel stays dense: the model reads it outside of its layer" in history.engine.reason


def test_results_are_kept_and_damage_is_survived(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARSEKIT_CACHE_DIR", str(tmp_path))
    use, measured = Use(Matrix((6, 8)), (4, 6), True, True), []

    def measure(runners: list[Any]) -> list[float]:
        measured.append(len(runners))
        return [0.5]

    monkeypatch.setattr(timings, "median_seconds", measure)
    assert timings.dense_seconds(use) == timings.dense_seconds(use) == 0.5
    assert measured == [1]
    # Another shape is another question.
    timings.dense_seconds(Use(Matrix((6, 8)), (8, 6), True, True))
    assert measured == [1, 1]
    for damage in ("", "[1, 2", '{"a": 3, "b": ["x"]}', "[]"):
        (tmp_path / "gate.json").write_text(damage)
        timings.dense_seconds(use)
    assert measured == [1] * 6
    assert [file.name for file in tmp_path.iterdir()] == ["gate.json"]


def test_length_of_a_run_and_its_batches() -> None:
    model = model_of()
    arrays = {"x": X, "y": Y, "batch_size": 16, "epochs": 3}
    assert steps_of(arrays) == 3 * 3  # 16 + 16 + 8 samples
    assert steps_of({**arrays, "initial_epoch": 1}) == 2 * 3
    assert steps_of({**arrays, "validation_split": 0.5}) == 3 * 2
    assert steps_of({**arrays, "steps_per_epoch": 7}) == 3 * 7
    assert batch_spec(model, arrays) == (tf.TensorSpec((16, 6)), tf.TensorSpec((16, 2)))

    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(10)
    assert steps_of({"x": dataset, "epochs": 2}) == 2 * 4
    assert steps_of({"x": dataset.filter(lambda *_: True)}) is None
    assert batch_spec(model, {"x": dataset}) == (tf.TensorSpec((10, 6)), tf.TensorSpec((10, 2)))

    class Pairs(keras.utils.PyDataset):
        def __len__(self):
            return 5

        def __getitem__(self, index):
            return X[:4], Y[:4]

    assert steps_of({"x": Pairs()}) == 5
    assert batch_spec(model, {"x": Pairs()}) == (tf.TensorSpec((4, 6)), tf.TensorSpec((4, 2)))
    assert most_elements(model, arrays) == 16 * 6
    assert most_elements(model, {"x": dataset}) == most_elements(model, {"x": Pairs()}) == 1024 * 6
    # A generator is not touched; the model's own inputs stand in for its batches.
    generator = iter([(X, Y)])
    assert steps_of({"x": generator}) is None
    assert batch_spec(model, {"x": generator}) == (tf.TensorSpec((32, 6)),)
    assert next(generator)[0] is X


@both
def test_accelerated_inference(flavour: str) -> None:
    model = model_of(flavour)
    expected = np.asarray(model(X))
    before = [vars(layer).keys() for layer in model.layers]
    fast = sparsekit.accelerate(model, engine="sparse")
    np.testing.assert_allclose(np.asarray(fast(X[:8])), expected[:8], rtol=1e-5, atol=1e-6)
    assert fast.predict(X, batch_size=16).shape == (40, 2)
    np.testing.assert_allclose(fast.predict(X, batch_size=16), expected, rtol=1e-5, atol=1e-6)
    assert [s.path for s in fast.report.swapped] == ["first/kernel", "last/kernel"]
    # The model is as before, also for training.
    assert [vars(layer).keys() for layer in model.layers] == before
    sparsekit.retrain(model, (X, Y), verbose=0)
    again = sparsekit.accelerate(model, engine="sparse")
    np.testing.assert_allclose(again.predict(X), np.asarray(model(X)), rtol=1e-5, atol=1e-6)


def test_accelerate_says_what_it_cannot() -> None:
    model = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(2)])
    with pytest.raises(EngineError, match="the model has no zeros"):
        sparsekit.accelerate(model, engine="sparse")
    fast = sparsekit.accelerate(model)
    np.testing.assert_allclose(np.asarray(fast(X)), np.asarray(model(X)), rtol=1e-6)
    assert (fast.report.engine, fast.report.reason) == ("dense", "the model has no zeros")
