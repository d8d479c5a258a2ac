"""`retrain` takes whatever fit takes."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from models import KERAS, X, Y, both, mlp, retrain_watched, values, warmed

import sparsekit
from sparsekit.errors import ArgumentError

# Keras 3 says of any data that is not an array that fit's own default shuffle=True is ignored.
pytestmark = pytest.mark.filterwarnings("ignore:`shuffle=True` was passed:UserWarning")

WEIGHT = np.linspace(0.1, 2.0, len(X)).astype("float32")


def sequence(flavour: str):
    k = KERAS[flavour]
    base = k.utils.PyDataset if flavour == "keras" else k.utils.Sequence

    class Batches(base):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            part = slice(16 * index, 16 * index + 16)
            return X[part], Y[part]

    return Batches()


def endless():
    while True:
        for start in range(0, 64, 16):
            yield X[start : start + 16], Y[start : start + 16]


FORMS = {
    "pair": lambda _: ((X, Y), {"batch_size": 16}),
    "triple": lambda _: ((X, Y, WEIGHT), {"batch_size": 16}),
    "bare array": lambda _: (X, {"y": Y, "batch_size": 16}),
    "sample_weight argument": lambda _: ((X, Y), {"sample_weight": WEIGHT, "batch_size": 16}),
    "tensors": lambda _: ((tf.constant(X), tf.constant(Y)), {"batch_size": 16}),
    "tf.data": lambda _: (tf.data.Dataset.from_tensor_slices((X, Y)).batch(16), {}),
    "tf.data with weights": lambda _: (tf.data.Dataset.from_tensor_slices((X, Y, WEIGHT)).batch(16), {}),
    "sequence": lambda flavour: (sequence(flavour), {}),
    "generator": lambda _: (endless(), {"steps_per_epoch": 4}),
}


@pytest.mark.parametrize("form", list(FORMS))
@both
def test_form_of_data(flavour: str, form: str) -> None:
    data, arguments = FORMS[form](flavour)
    model = sparsekit.prune(mlp(flavour), 0.5)
    history = retrain_watched(model, data, epochs=2, **arguments)
    assert len(history.history["loss"]) == 2


@pytest.mark.parametrize("form", ["triple", "sample_weight argument", "tf.data with weights"])
@both
def test_sample_weights_count(flavour: str, form: str) -> None:
    """The loss of a first, single step is the weighted one."""
    data, arguments = FORMS[form](flavour)
    if isinstance(data, tf.data.Dataset):
        data = tf.data.Dataset.from_tensors((X, Y, WEIGHT))
    else:
        arguments["batch_size"] = 64
    model = sparsekit.prune(mlp(flavour), 0.5)
    errors = np.square(model.predict(X, verbose=0) - Y).mean(axis=1)
    history = sparsekit.retrain(model, data, verbose=0, **arguments)
    assert history.history["loss"][0] == pytest.approx((errors * WEIGHT).mean(), rel=1e-5)


@pytest.mark.parametrize("kind", ["dict", "list"])
@both
def test_several_inputs(flavour: str, kind: str) -> None:
    k = KERAS[flavour]
    left, right = k.layers.Input((3,), name="left"), k.layers.Input((3,), name="right")
    joined = k.layers.Concatenate()([k.layers.Dense(8, "tanh")(left), k.layers.Dense(8, "tanh")(right)])
    model = k.Model([left, right], k.layers.Dense(2)(joined))
    model.compile("adam", "mse")
    x = {"left": X[:, :3], "right": X[:, 3:]} if kind == "dict" else [X[:, :3], X[:, 3:]]
    sparsekit.prune(model, 0.5)
    retrain_watched(model, (x, Y), batch_size=16, validation_data=(x, Y))
    retrain_watched(model, tf.data.Dataset.from_tensor_slices(((x if kind == "dict" else tuple(x)), Y)).batch(16))


@both
def test_validation(flavour: str) -> None:
    model = sparsekit.prune(warmed(mlp(flavour)), 0.5)
    history = retrain_watched(model, (X, Y), validation_data=(X, Y), epochs=2)
    assert history.history["val_loss"][-1] == pytest.approx(model.evaluate(X, Y, verbose=0), rel=1e-5)
    history = retrain_watched(model, (X, Y), validation_split=0.25, epochs=2)
    assert len(history.history["val_loss"]) == 2
    history = retrain_watched(model, (X, Y), validation_data=tf.data.Dataset.from_tensor_slices((X, Y)).batch(8))
    assert len(history.history["val_loss"]) == 1


@both
def test_class_weight(flavour: str) -> None:
    k = KERAS[flavour]
    labels = np.repeat([0, 1], 32)
    k.utils.set_random_seed(1)
    model = k.Sequential([k.layers.Input((6,)), k.layers.Dense(8), k.layers.Dense(2, "softmax")])
    model.compile("adam", "sparse_categorical_crossentropy")
    sparsekit.prune(model, 0.5)
    losses = -np.log(model.predict(X, verbose=0)[np.arange(64), labels])
    history = retrain_watched(model, (X, labels), class_weight={0: 0.5, 1: 3.0}, batch_size=64)
    weights = np.where(labels == 0, 0.5, 3.0)
    # tf_keras and Keras 3 both divide by the batch size, not by the sum of the weights.
    assert history.history["loss"][0] == pytest.approx((weights * losses).mean(), rel=1e-4)


def test_data_that_cannot_be_taken_apart_changes_nothing() -> None:
    model = sparsekit.prune(mlp("keras"), 0.5)
    before, optimizer = values(model), model.optimizer
    with pytest.raises(ArgumentError, match=r"data is a tuple of 4; give \(x, y\) or \(x, y, sample_weight\)"):
        sparsekit.retrain(model, (X, X, X, X), optimizer="sgd")
    assert model.optimizer is optimizer
    assert all((values(model)[path] == value).all() for path, value in before.items())


@pytest.mark.parametrize("name", ["y", "sample_weight"])
def test_the_same_thing_given_twice(name: str) -> None:
    model = sparsekit.prune(mlp("keras"), 0.5)
    with pytest.raises(ArgumentError, match=f"{name} is in data and given as {name}= too; give it once"):
        sparsekit.retrain(model, (X, Y, WEIGHT), **{name: Y})
