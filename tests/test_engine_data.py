"""What the engine looks at before a run changes nothing about the run, whatever the data and the layers are."""

from __future__ import annotations

import functools
import gc
import weakref
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from models import KERAS, both, values
from test_engine_gate import long_runs as long_runs
from test_engine_swap import FIT, X, Y, mlp, own_step

import sparsekit
from sparsekit.engine import gate
from sparsekit.engine.batches import batch_spec, steps_of
from sparsekit.engine.swap import Swap
from sparsekit.errors import EngineError
from sparsekit.flavour import flavour_of


def agree(make: Any, data: Any, *, sparse: str = "sparse", **arguments: Any) -> Any:
    """The history of the sparse run, whose numbers are those of the dense one."""
    found: list[Any] = []
    for engine in ("dense", sparse):
        np.random.seed(3)
        model = sparsekit.prune(make(), 0.5)
        history = sparsekit.retrain(model, data(), engine=engine, **{"shuffle": False, "verbose": 0, **arguments})
        found.append((values(model), history))
    for left, right in zip(found[0][0].values(), found[1][0].values(), strict=True):
        np.testing.assert_allclose(right, left, rtol=1e-5, atol=2e-6)
    return found[1][1].engine


def adam(flavour: str) -> Any:
    return mlp(flavour, KERAS[flavour].optimizers.Adam(0.01))


@both
def test_the_order_of_a_data_set_stays(flavour: str) -> None:
    def shuffled() -> tf.data.Dataset:
        return tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(40, seed=3).batch(8).prefetch(1)

    assert agree(lambda: adam(flavour), shuffled, epochs=2).engine == "sparse"


@both
def test_no_batch_is_taken_from_data_that_comes_once(flavour: str) -> None:
    specs = (tf.TensorSpec((None, 6)), tf.TensorSpec((None, 2)))

    def once() -> tf.data.Dataset:
        batches = iter([(X[i : i + 8], Y[i : i + 8]) for i in range(0, 40, 8)])
        return tf.data.Dataset.from_generator(lambda: batches, output_signature=specs)

    assert agree(lambda: adam(flavour), once, steps_per_epoch=5).engine == "sparse"


@both
def test_data_that_draws_at_random_draws_the_same(flavour: str) -> None:
    utils = KERAS[flavour].utils

    class Augmented(utils.PyDataset if flavour == "keras" else utils.Sequence):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            rows = slice(8 * index, 8 * index + 8)
            return X[rows] + np.random.normal(size=(8, 6)).astype("float32"), Y[rows]

    assert agree(lambda: adam(flavour), Augmented).engine == "sparse"


def test_what_a_data_set_tells_of_its_batches() -> None:
    model, pairs = adam("keras"), tf.data.Dataset.from_tensor_slices((X.astype("float64"), Y))
    seven = (tf.TensorSpec((7, 6)), tf.TensorSpec((7, 2)))
    for dataset in (pairs.batch(7).map(lambda x, y: (x, y)).prefetch(2), pairs.batch(7, drop_remainder=True)):
        assert batch_spec(model, {"x": dataset}) == seven
    assert batch_spec(model, {"x": pairs.batch(3).unbatch().batch(7).repeat()}) == seven
    # The width is seen in a batch alone.
    ragged = tf.data.Dataset.from_generator(lambda: iter([X[:5]]), output_signature=tf.TensorSpec((None, None)))
    assert batch_spec(model, {"x": ragged}) == (tf.TensorSpec((5, 6)),)


def test_lists_of_numbers() -> None:
    assert steps_of({"x": X.tolist(), "batch_size": 16, "epochs": 2}) == 2 * 3
    data = (X.tolist(), Y.tolist())
    assert agree(lambda: adam("tf_keras"), lambda: data, **{**FIT, "epochs": 2}).engine == "sparse"


@both
@pytest.mark.parametrize("engine", ["auto", "sparse"])
def test_a_layer_of_sparse_inputs_stays_dense(flavour: str, engine: str, long_runs: list[Any]) -> None:
    long_runs += [(2.0, 1.0)] * 2
    k = KERAS[flavour]

    def make() -> Any:
        k.utils.set_random_seed(1)
        inputs = k.layers.Input((6,), sparse=True)
        model = k.Model(inputs, k.layers.Dense(2, name="last")(k.layers.Dense(8, name="first")(inputs)))
        model.compile(k.optimizers.Adam(0.01), "mse")
        return model

    sparse = tf.sparse.from_dense(np.where(X > 0, X, 0.0).astype("float32"))

    def data() -> tf.data.Dataset:
        return tf.data.Dataset.from_tensor_slices((sparse, Y)).batch(8)

    report = agree(make, data, sparse=engine)
    assert [weight.path for weight in report.swapped] == ["last/kernel"]
    assert "first/kernel stays dense: its input is no plain tensor" in str(report.reason)


@both
def test_layers_of_whole_numbers(flavour: str) -> None:
    whole = (np.abs(X) * 3).astype("int64")
    k = KERAS[flavour]

    def make() -> Any:
        k.utils.set_random_seed(1)
        layers = [k.layers.Input((6,), dtype="int64"), k.layers.Dense(8, "relu"), k.layers.Dense(2)]
        model = k.Sequential(layers)
        model.compile(k.optimizers.Adam(0.01), "mse")
        return model

    assert len(agree(make, lambda: (whole, Y), **FIT).swapped) == 2
    model = sparsekit.prune(make(), 0.5)
    np.testing.assert_allclose(
        sparsekit.accelerate(model, engine="sparse").predict(whole),
        model.predict(whole, verbose=0),
        rtol=1e-5,
        atol=1e-6,
    )


@both
def test_a_layer_that_takes_gradients_itself_stays_dense(flavour: str, long_runs: list[Any]) -> None:
    long_runs += [(2.0, 1.0)] * 6
    k = KERAS[flavour]

    class Slope(k.layers.Layer):
        def __init__(self):
            super().__init__()
            self.within = k.layers.Dense(6, "tanh")

        def build(self, shape):
            self.within.build(shape)
            self.built = True

        def call(self, x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = self.within(x)
            return tape.gradient(y, x)

        def compute_output_shape(self, shape):
            return shape

    def make() -> Any:
        k.utils.set_random_seed(1)
        inputs = k.layers.Input((6,))
        model = k.Model(inputs, k.layers.Dense(2)(Slope()(k.layers.Dense(6)(inputs))))
        model.compile(k.optimizers.Adam(0.01), "mse")
        return model

    report = agree(make, lambda: (X, Y), sparse="auto", **FIT)
    assert report.engine == "dense"
    assert "no second derivatives" in report.reason
    with pytest.raises(EngineError, match="no second derivatives"):
        sparsekit.retrain(sparsekit.prune(make(), 0.5), (X, Y), engine="sparse", **FIT)


def squares(layer: Any) -> tf.Tensor:
    return tf.reduce_sum(layer.kernel**2)


@pytest.mark.parametrize("wrap", [lambda f, layer: lambda: f(layer), functools.partial], ids=["lambda", "partial"])
def test_a_penalty_that_reads_a_kernel_stays_dense(long_runs: list[Any], wrap: Any) -> None:
    long_runs += [(2.0, 1.0)] * 2

    def make() -> Any:
        model = adam("tf_keras")
        model.add_loss(wrap(squares, model.layers[0]))
        model.compile(model.optimizer, "mse")
        return model

    report = agree(make, lambda: (X, Y), sparse="auto", **FIT)
    assert report.engine == "dense"
    assert "first/kernel outside of its layer" in report.reason


def test_a_model_that_cannot_be_traced_beforehand_is_refused(long_runs: list[Any]) -> None:
    model = sparsekit.prune(adam("keras"), 0.5)
    with pytest.raises(EngineError, match="cannot be tried out beforehand"):
        sparsekit.retrain(model, (X[:, :5], Y), engine="sparse", **FIT)
    # Without the engine it is Keras that says what is wrong.
    with pytest.raises(ValueError, match="expected axis -1"):
        sparsekit.retrain(model, (X[:, :5], Y), engine="auto", **FIT)
    with pytest.raises(ValueError, match="expected axis -1"):
        sparsekit.accelerate(model, engine="auto")(X[:, :5])


def test_scipy_matrices_are_told_apart_from_arrays() -> None:
    class Matrix:
        """What tells a SciPy matrix apart: it has a shape and no length."""

        shape, dtype = (40, 6), np.dtype("float64")

        def tocoo(self):
            raise AssertionError

        def __len__(self):
            raise TypeError("sparse array length is ambiguous")

    arguments = {"x": Matrix(), "batch_size": 16}
    assert steps_of(arguments) == 3
    assert batch_spec(keras.Sequential(), arguments) == (tf.SparseTensorSpec((16, 6), tf.float32),)


@both
@pytest.mark.parametrize("where", ["verify", "say"])
def test_an_interrupt_before_the_first_step_leaves_the_optimizer_alone(
    flavour: str, where: str, monkeypatch: Any
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(*{"verify": (Swap, "verify"), "say": (gate, "say")}[where], interrupted)
    model = sparsekit.prune(own_step(KERAS[flavour], False), 0.5)
    with pytest.raises(KeyboardInterrupt) as caught:
        sparsekit.retrain(model, (X, Y), engine="sparse", **FIT)
    # The traceback is alive, as in a notebook, and with it what the run had made.
    assert caught.tb is not None
    assert flavour_of(model).update_method() not in vars(model.optimizer)


@both
def test_nothing_of_a_run_stays_in_memory(flavour: str, monkeypatch: Any) -> None:
    made: list[Any] = []
    original = Swap.__post_init__

    def counted(self: Any) -> None:
        made.append(weakref.ref(self))
        original(self)

    monkeypatch.setattr(Swap, "__post_init__", counted)
    model = sparsekit.prune(adam(flavour), 0.5)
    for _ in range(2):
        sparsekit.retrain(model, (X, Y), engine="sparse", **FIT)
    gc.collect()
    assert [reference() for reference in made] == [None, None]
