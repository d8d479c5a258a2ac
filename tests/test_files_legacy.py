"""Files of Keras 2, one for each kind of layer, predict the same after loading."""

from __future__ import annotations

import hashlib

import h5py
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from legacy_models import CONVERTED, KEPT, NO_FILE, L, filled, write

import sparsekit
from sparsekit.errors import SparsekitWarning
from sparsekit.files.equivalence import sample_inputs
from sparsekit.flavour import flavour_of, key_of


def outputs(model, fed):
    inputs = fed if flavour_of(model).takes_dict(model) else list(fed.values())
    inputs = inputs[0] if isinstance(inputs, list) and len(inputs) == 1 else inputs
    return [np.asarray(one) for one in tf.nest.flatten(model(inputs, training=False))]


def assert_same(model, original, tolerance=1e-5):
    fed = sample_inputs(original, seed=5)
    found, wanted = outputs(model, fed), outputs(original, fed)
    assert [one.shape for one in found] == [one.shape for one in wanted]
    for one, other in zip(found, wanted, strict=True):
        scale = max(1.0, np.abs(other).max(initial=0))
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance * scale)


def classes_in(config):
    """Names of all classes in a config."""
    inner = list(config.values()) if isinstance(config, dict) else config if isinstance(config, (list, tuple)) else []
    found = set().union(*map(classes_in, inner))
    return found | {config["class_name"]} if isinstance(config, dict) and "class_name" in config else found


def test_every_layer_of_tf_keras_is_in_one_of_the_models():
    classes = {kind for kind in vars(L).values() if isinstance(kind, type) and issubclass(kind, L.Layer)}
    known = {kind.__name__ for kind in classes}
    found = set().union(*(classes_in(build().get_config()) for build in {**CONVERTED, **KEPT}.values()))
    assert known - found == set(NO_FILE)


@pytest.mark.parametrize("kind", CONVERTED)
def test_becomes_a_keras_3_model_that_predicts_the_same(kind, tmp_path):
    original = filled(CONVERTED[kind])
    path = write(original, tmp_path / "old.h5")
    before = hashlib.sha256(path.read_bytes()).hexdigest()
    model = sparsekit.load(path)
    assert flavour_of(model).name == "keras"
    assert_same(model, original, 1e-3 if kind == "mixed_float16" else 1e-5)
    assert hashlib.sha256(path.read_bytes()).hexdigest() == before


@pytest.mark.parametrize("kind", KEPT)
def test_stays_a_tf_keras_model_where_keras_3_differs(kind, tmp_path):
    original = filled(KEPT[kind])
    model = sparsekit.load(write(original, tmp_path / "old.h5"))
    assert flavour_of(model).name == "tf_keras"
    assert_same(model, original)


@pytest.mark.parametrize("flavour", ["keras", "tf_keras"])
def test_flavour_can_be_forced(flavour, tmp_path):
    original = filled(CONVERTED["Bidirectional LSTM"])
    model = sparsekit.load(write(original, tmp_path / "old.h5"), flavour=flavour)
    assert flavour_of(model).name == flavour
    assert_same(model, original)


@pytest.mark.parametrize("flavour", ["keras", "tf_keras"])
def test_weights_of_a_nested_model_follow_their_names(flavour, tmp_path):
    """With one layer frozen when it was saved, the order in the file is another than that of the layers."""

    def build(trainable):
        inner = tf_keras.Sequential([L.Dense(5, name="a", input_shape=(5,)), L.Dense(5, name="b")], name="inner")
        inner.layers[0].trainable = trainable
        x = L.Input((5,))
        return tf_keras.Model(x, inner(x))

    frozen, free = filled(lambda: build(False)), filled(lambda: build(True))
    free.set_weights(frozen.get_weights()[2:] + frozen.get_weights()[:2])
    path = write(frozen, tmp_path / "frozen.h5")
    with h5py.File(write(free, tmp_path / "free.h5"), "r") as file:
        config = file.attrs["model_config"]
    with h5py.File(path, "r+") as file:
        file.attrs["model_config"] = config
    model = sparsekit.load(path, flavour=flavour)
    x = np.random.default_rng(0).normal(size=(3, 5)).astype("float32")
    np.testing.assert_allclose(np.asarray(model(x)), np.asarray(frozen(x)), atol=1e-5)


def test_training_goes_on_with_the_settings_of_the_file(tmp_path):
    original = filled(CONVERTED["Dense"])
    original.compile(tf_keras.optimizers.Adam(0.03, beta_1=0.7), "mse", metrics=["mae"])
    x, y = np.ones((8, 5), "float32"), np.zeros((8, 3), "float32")
    original.fit(x, y, batch_size=4, epochs=2, verbose=0)
    model = sparsekit.load(write(original, tmp_path / "old.h5"))
    assert flavour_of(model).name == "keras"
    assert float(model.optimizer.learning_rate) == pytest.approx(0.03)
    assert model.optimizer.beta_1 == 0.7
    assert int(model.optimizer.iterations) == 4
    history = model.fit(x, y, batch_size=4, verbose=0).history
    assert int(model.optimizer.iterations) == 6
    assert set(history) == {"loss", "mean_absolute_error"} or set(history) == {"loss", "mae"}


def square_layers():
    """Weights of one shape, whose moments could be taken for one another's."""
    return tf_keras.Sequential([L.Dense(5, use_bias=False, input_shape=(5,)), L.Dense(5, use_bias=False)])


def moments(model):
    """By weight in their order: first moment, second moment, ... as arrays."""
    found = {}
    for key, slot, _ in flavour_of(model).slots(model.optimizer):
        found.setdefault(key, []).append(np.asarray(slot))
    return [found[key_of(variable)] for variable in model.trainable_variables]


@pytest.mark.parametrize("flavour", ["keras", "tf_keras"])
@pytest.mark.parametrize("name", ["Adam", "SGD", "Adagrad", "RMSprop", "Adamax"])
@pytest.mark.parametrize("era", ["legacy", "of today"])
def test_moments_come_back_to_their_weights_whoever_wrote_them(tmp_path, era, name, flavour):
    """Old optimizers wrote all first moments and then all second ones, today's keep those of one weight together."""
    optimizers = tf_keras.optimizers.legacy if era == "legacy" else tf_keras.optimizers
    original = filled(square_layers)
    original.compile(getattr(optimizers, name)(0.02, **({"momentum": 0.9} if name == "SGD" else {})), "mse")
    data = np.random.default_rng(0).normal(size=(2, 8, 5)).astype("float32")
    original.fit(*data, verbose=0, epochs=2, batch_size=4)
    model = sparsekit.load(write(original, tmp_path / "old.h5"), flavour=flavour)
    assert flavour_of(model).name == flavour
    assert int(model.optimizer.iterations) == 4
    assert float(model.optimizer.learning_rate) == pytest.approx(0.02)
    for found, expected in zip(moments(model), moments(original), strict=True):
        assert len(found) == len(expected) > 0
        for ours, theirs in zip(found, expected, strict=True):
            assert np.any(theirs)
            np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("flavour", ["keras", "tf_keras"])
@pytest.mark.parametrize("era", ["legacy", "of today"])
@pytest.mark.parametrize(
    ("written", "count"),
    [
        (np.float32(12), 12),
        (np.float32(1e30), 0),
        (np.float32(np.nan), 0),
        (np.int64(-7), 0),
        (np.uint64(2**64 - 1), 0),
    ],
    ids=str,
)
def test_a_damaged_count_of_updates_is_left_out(tmp_path, written, count, era, flavour):
    optimizers = tf_keras.optimizers.legacy if era == "legacy" else tf_keras.optimizers
    original = filled(square_layers)
    original.compile(optimizers.Adam(0.02), "mse")
    original.fit(np.ones((4, 5), "float32"), np.zeros((4, 5), "float32"), verbose=0)
    path = write(original, tmp_path / "old.h5")
    with h5py.File(path, "r+") as file:
        group = file["optimizer_weights"]
        first, *others = list(group.attrs["weight_names"])
        del group[first]
        group["Adam/iterations:0"] = written
        group.attrs["weight_names"] = [b"Adam/iterations:0", *(np.bytes_(name) for name in others)]
    model = sparsekit.load(path, flavour=flavour)
    assert int(model.optimizer.iterations) == count


@pytest.mark.parametrize(("name", "count"), [("Adadelta", 0), ("Nadam", 1)])
def test_moments_that_cannot_be_told_apart_start_anew(tmp_path, name, count):
    """The count too, or Adam would take its first steps for late ones; unless a schedule follows it (Nadam has one)."""
    original = filled(square_layers)
    original.compile(getattr(tf_keras.optimizers.legacy, name)(0.02), "mse")
    original.fit(np.ones((4, 5), "float32"), np.zeros((4, 5), "float32"), verbose=0)
    with pytest.warns(SparsekitWarning, match=f"moments of the optimizer '{name}' .* start anew"):
        model = sparsekit.load(write(original, tmp_path / "old.h5"), flavour="tf_keras")
    assert int(model.optimizer.iterations) == count
    assert not any(np.any(array) for arrays in moments(model) for array in arrays)
