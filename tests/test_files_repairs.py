"""Each repair on a config that needs it, written by hand where today's tf_keras does not write it any more."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import h5py
import numpy as np
import pytest
import tf_keras
from legacy_models import CONVERTED, IMAGE, SERIES, L, filled, write

import sparsekit
from sparsekit.errors import FileError
from sparsekit.files import inspect_file
from sparsekit.files.equivalence import same_predictions
from sparsekit.files.repairs import REPAIRS, repair
from sparsekit.flavour import flavour_of, get


def layers(config: dict[str, Any]) -> list[dict[str, Any]]:
    return config["config"]["layers"]


def as_it_is(config: dict[str, Any]) -> None:
    """tf_keras writes what needs the repair by itself."""


def bare_list(config: dict[str, Any]) -> None:
    without_input_layer(config)
    config["config"] = layers(config)


def without_input_layer(config: dict[str, Any]) -> None:
    del layers(config)[0]


def with_dtypes(config: dict[str, Any]) -> None:
    for layer in layers(config)[1:]:
        for value in layer["config"].values():
            if isinstance(value, dict) and value.get("class_name") in ("GlorotUniform", "Zeros"):
                value["config"]["dtype"] = "float32"


def of_tensorflow(config: dict[str, Any]) -> None:
    value = layers(config)[1]["config"]["kernel_initializer"]
    value.update(module="tensorflow.python.ops.init_ops_v2", registered_name="GlorotUniform")


def without_modules(config: dict[str, Any]) -> None:
    inner = layers(config)[1]["config"]["layer"]
    del inner["module"], inner["registered_name"]


def old_gru(config: dict[str, Any]) -> None:
    del layers(config)[1]["config"]["reset_after"]


def slash(config: dict[str, Any]) -> None:
    layers(config)[1]["config"]["name"] = "block/dense"


def unheard_of(config: dict[str, Any]) -> None:
    layers(config)[1]["config"]["lora_of_old"] = None


def convolution2d(config: dict[str, Any]) -> None:
    conv = layers(config)[1]
    conv["class_name"] = "Convolution2D"
    conv["config"] = {
        **{key: conv["config"][key] for key in ("name", "trainable", "activation")},
        **{"nb_filter": 4, "nb_row": 3, "nb_col": 2, "subsample": [2, 1], "border_mode": "same", "dim_ordering": "tf"},
        **{"init": "glorot_uniform", "bias": True, "W_constraint": {"name": "MaxNorm", "m": 2, "axis": 0}},
        **{"W_regularizer": {"name": "WeightRegularizer", "l1": 0.0, "l2": 0.01}, "b_regularizer": None},
    }


def output_dim(config: dict[str, Any]) -> None:
    without_input_layer(config)
    for layer in layers(config):
        old = layer["config"]
        old["output_dim"] = old.pop("units")
        old.update(init="uniform", input_dim=None, W_regularizer=None)
    layers(config)[0]["config"]["input_dtype"] = layers(config)[0]["config"].pop("dtype")


def mode(config: dict[str, Any]) -> None:
    layers(config)[1]["config"].update(mode=0, gamma_init="one", beta_init="zero")


def cudnn(config: dict[str, Any]) -> None:
    inner = layers(config)[1]["config"]["layer"]
    inner.update(class_name="CuDNNLSTM", module="keras.layers")
    for keyword in ("activation", "recurrent_activation", "dropout", "recurrent_dropout", "time_major", "unroll"):
        del inner["config"][keyword]


def old_rng(config: dict[str, Any]) -> None:
    layers(config)[2]["config"]["rng_type"] = "stateful"


def chain(*made: Callable[[], Any]) -> Callable[[], Any]:
    return lambda: tf_keras.Sequential([one() for one in made])


DENSE = chain(lambda: L.Dense(4, input_shape=(5,)), lambda: L.Dense(3))


def cudnn_arrays(weights: h5py.Group) -> None:
    """What cuDNN takes: the matrix of each gate transposed, in Fortran's order; biases for inputs and states."""
    found: list[h5py.Dataset] = []
    weights.visititems(lambda _, item: found.append(item) if isinstance(item, h5py.Dataset) else None)
    for array in found:
        name, values = array.name, array[()]
        if name.endswith("bias:0"):
            values = np.concatenate([values - 1, np.ones_like(values)])
        else:
            order = "C" if "recurrent" in name else "F"
            gates = [gate.ravel(order) for gate in np.split(values, 4, axis=1)]
            shape = (values.shape[0], values.shape[1] // 4)
            gates = [gate.reshape(shape[::-1]).T if order == "C" else gate.reshape(shape) for gate in gates]
            values = np.concatenate(gates, axis=1)
        del weights.file[name]
        weights.file[name] = values


def turned(weights: h5py.Group) -> None:
    weights.file.attrs["backend"] = "theano"
    kernels: list[h5py.Dataset] = []
    weights.visititems(lambda name, item: kernels.append(item) if name.endswith("kernel:0") else None)
    kernels[0][...] = kernels[0][()][::-1, ::-1]


# rule -> what makes the arrays those of an old file.
ARRAYS: dict[str, Callable[[h5py.Group], None]] = {"CuDNN layer": cudnn_arrays, "kernels of Theano": turned}
# rule -> a model, and what makes its config an old one.
CASES: dict[str, tuple[Callable[[], Any], Callable[[dict[str, Any]], None]]] = {
    "list-style Sequential": (DENSE, bare_list),
    "class of Keras 1": (
        chain(lambda: L.Conv2D(4, (3, 2), strides=(2, 1), padding="same", input_shape=IMAGE)),
        convolution2d,
    ),
    "keywords of Keras 1": (DENSE, output_dim),
    "mode of a BatchNormalization": (CONVERTED["BatchNormalization"], mode),
    "CuDNN layer": (CONVERTED["Bidirectional LSTM"], cudnn),
    "kernels of Theano": (chain(lambda: L.Conv2D(4, (3, 2), input_shape=IMAGE)), as_it_is),
    "Sequential without InputLayer": (DENSE, without_input_layer),
    "input shape given twice": (DENSE, as_it_is),
    "calls of a nested model": (CONVERTED["nested Sequential"], as_it_is),
    "slash in a layer name": (DENSE, slash),
    "tensors as call arguments": (CONVERTED["LSTM states"], as_it_is),
    "single output in a list": (CONVERTED["shared"], as_it_is),
    "class of a wrapped layer": (chain(lambda: L.Bidirectional(L.GRU(4), input_shape=SERIES)), without_modules),
    "axis as a list": (CONVERTED["BatchNormalization"], as_it_is),
    "dtype policy": (CONVERTED["mixed_float16"], as_it_is),
    "initializer of TensorFlow": (DENSE, of_tensorflow),
    "initializer dtype": (DENSE, with_dtypes),
    "score_mode": (CONVERTED["attention"], as_it_is),
    "ThresholdedReLU": (CONVERTED["activations"], as_it_is),
    "LeakyReLU alpha": (CONVERTED["activations"], as_it_is),
    "Embedding input_length": (CONVERTED["Embedding"], as_it_is),
    "GRU reset_after": (chain(lambda: L.GRU(4, reset_after=False, input_shape=SERIES)), old_gru),
    "time_major": (chain(lambda: L.LSTM(4, input_shape=SERIES)), as_it_is),
    "groups": (CONVERTED["DepthwiseConv2D"], as_it_is),
    "rng_type": (chain(lambda: L.Rescaling(1.0, input_shape=IMAGE), lambda: L.RandomFlip()), old_rng),
    "noise_shape": (CONVERTED["noise"], as_it_is),
    "softmax_robust_masking": (CONVERTED["attention"], as_it_is),
    "attention shapes": (CONVERTED["attention"], as_it_is),
    "kernel settings of a separable convolution": (CONVERTED["SeparableConv2D"], as_it_is),
    "trainable of a layer without weights": (CONVERTED["noise"], as_it_is),
    "empty keywords": (DENSE, unheard_of),
}


def old_file(rule: str, path: Any) -> tuple[Any, Any]:
    """The model of a case, and its file with the config made old."""
    build, change = CASES[rule]
    model = filled(build)
    write(model, path)
    with h5py.File(path, "r+") as file:
        config = json.loads(file.attrs["model_config"])
        change(config)
        file.attrs["model_config"] = json.dumps(config)
        file.attrs["keras_version"] = "2.1.6"
        ARRAYS.get(rule, lambda weights: None)(file["model_weights"])
    return model, path


def test_every_rule_has_a_case():
    assert set(CASES) == {rule.name for rule in REPAIRS}


@pytest.mark.parametrize("rule", CASES)
def test_the_rule_is_applied_named_and_right(rule, tmp_path):
    original, path = old_file(rule, tmp_path / "old.h5")
    assert rule in {one.name for one in inspect_file(path).repairs}
    model = sparsekit.load(path)
    assert flavour_of(model).name == "keras"
    assert same_predictions(original, model)


@pytest.mark.parametrize("rule", [rule.name for rule in REPAIRS if rule.flavour is None])
def test_rules_for_both_serve_tf_keras_too(rule, tmp_path):
    original, path = old_file(rule, tmp_path / "old.h5")
    model = sparsekit.load(path, flavour="tf_keras")
    x = np.ones((2, *original.input_shape[1:]), "float32")
    np.testing.assert_allclose(np.asarray(model(x)), np.asarray(original(x)), atol=1e-6)


@pytest.mark.parametrize(("kind", "keyword", "value"), [("LSTM", "time_major", True), ("DepthwiseConv2D", "groups", 2)])
def test_what_keras_3_cannot_do_is_no_repair(kind, keyword, value):
    config = {"class_name": kind, "config": {"name": "mine", keyword: value}}
    with pytest.raises(FileError, match=rf"'mine' \({kind}\) has {keyword}={value!r}.*flavour='tf_keras'"):
        repair(config, get("keras"), "2.11.0")


def test_the_config_given_stays_as_it_is():
    model = CONVERTED["nested Sequential"]()
    config = {"class_name": "Functional", "config": model.get_config()}
    before = copy.deepcopy(config)
    repaired, applied = repair(config, get("keras"), "2.11.0")
    assert applied
    assert repaired != config
    assert config == before


def test_a_file_of_keras_3_needs_no_repair(tmp_path):
    keras = get("keras").keras
    model = keras.Sequential([keras.layers.Input((5,)), keras.layers.Dense(3), keras.layers.BatchNormalization()])
    sparsekit.save(model, tmp_path / "new.h5")
    assert inspect_file(tmp_path / "new.h5").repairs == ()
