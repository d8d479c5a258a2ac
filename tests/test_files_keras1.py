"""Whole files of Keras 1, of Theano and of CuDNN's layers, written by hand; today's tf_keras model is the oracle."""

from __future__ import annotations

import json
from typing import Any

import h5py
import numpy as np
import pytest
import tf_keras
from legacy_models import IMAGE, SERIES, L, filled

import sparsekit
from sparsekit.errors import FileError
from sparsekit.files import inspect_file
from sparsekit.files.equivalence import same_predictions
from sparsekit.flavour import flavour_of


def handwritten(path: Any, config: Any, weights: dict[str, dict[str, Any]], **attributes: str) -> Any:
    """A file of before `model.save` was what it is: layer -> array name -> values."""
    with h5py.File(path, "w") as file:
        file.attrs["model_config"] = json.dumps(config).encode()
        group = file.create_group("model_weights")
        group.attrs["layer_names"] = [name.encode() for name in weights]
        for name, value in attributes.items():
            group.attrs[name] = value.encode()
        for layer, arrays in weights.items():
            place = group.create_group(layer)
            place.attrs["weight_names"] = [name.encode() for name in arrays]
            for name, values in arrays.items():
                place[name] = values
    return path


def layer(kind: str, name: str, **settings: Any) -> dict[str, Any]:
    return {"class_name": kind, "config": {"name": name, "trainable": True, **settings}}


def sequential(shape: tuple[int, ...], *layers: dict[str, Any]) -> dict[str, Any]:
    layers[0]["config"].update(batch_input_shape=[None, *shape], input_dtype="float32")
    return {"class_name": "Sequential", "config": list(layers)}


def opened(path: Any, original: Any, rule: str) -> Any:
    """The file opens in both Kerases and predicts as the original does."""
    assert rule in {one.name for one in inspect_file(path).repairs}
    assert same_predictions(original, sparsekit.load(path, flavour="tf_keras"))
    model = sparsekit.load(path)
    assert same_predictions(original, model)
    return model


INPUT = {"input_dtype": "float32", "sparse": False}
DENSE = {"init": "glorot_uniform", "activation": "linear", "W_regularizer": None, "bias": True, "input_dim": None}


@pytest.mark.parametrize("order", ["tf", "th"])
@pytest.mark.parametrize("backend", ["tensorflow", "theano"])
def test_a_picture_net_of_keras_1(order, backend, tmp_path):
    where = "channels_last" if order == "tf" else "channels_first"
    shape = IMAGE if order == "tf" else (IMAGE[2], *IMAGE[:2])
    original = filled(
        lambda: tf_keras.Sequential(
            [
                L.Conv2D(3, (3, 2), strides=(1, 2), activation="relu", data_format=where, input_shape=shape),
                L.MaxPooling2D(2, data_format=where),
                L.BatchNormalization(axis=-1 if order == "tf" else 1),
                L.Flatten(),
                L.Dense(2),
            ]
        )
    )
    kernel, bias, *statistics, dense, dense_bias = original.get_weights()
    kernel = kernel[::-1, ::-1] if backend == "theano" else kernel
    kernel = kernel if order == "tf" else np.transpose(kernel, (3, 2, 0, 1))
    ends = ("gamma", "beta", "running_mean", "running_std")
    path = handwritten(
        tmp_path / "old.h5",
        sequential(
            shape,
            layer(
                "Convolution2D",
                "convolution2d_1",
                **{"nb_filter": 3, "nb_row": 3, "nb_col": 2, "subsample": [1, 2], "border_mode": "valid"},
                **{"dim_ordering": order, "activation": "relu", "init": "he_normal", "bias": True},
                **{"W_regularizer": {"name": "WeightRegularizer", "l1": 0.0, "l2": 0.5}, "b_constraint": None},
            ),
            layer("MaxPooling2D", "pool", pool_size=[2, 2], strides=[2, 2], border_mode="valid", dim_ordering=order),
            layer("BatchNormalization", "norm", mode=0, axis=-1 if order == "tf" else 1, epsilon=1e-3, momentum=0.99),
            layer("Dropout", "dropout_1", p=0.5),
            layer("Flatten", "flatten_1"),
            layer("Dense", "dense_1", output_dim=2, **DENSE),
        ),
        {
            "convolution2d_1": {"convolution2d_1_W": kernel, "convolution2d_1_b": bias},
            "pool": {},
            "norm": {f"norm_{end}": values for end, values in zip(ends, statistics, strict=True)},
            "dropout_1": {},
            "flatten_1": {},
            "dense_1": {"dense_1_W": dense, "dense_1_b": dense_bias},
        },
        keras_version="1.2.2",
        backend=backend,
    )
    if order == "th":
        # TensorFlow computes a convolution with the channels in front on some CPUs only.
        model = sparsekit.load(path, flavour="keras")
        assert [w.tobytes() for w in model.get_weights()] == [w.tobytes() for w in original.get_weights()]
    else:
        model = opened(path, original, "keywords of Keras 1")
        assert flavour_of(model).name == "keras"
    assert model.layers[0].data_format == where
    assert float(model.layers[0].kernel_regularizer.l2) == 0.5


@pytest.mark.parametrize("activation", ["sigmoid", "hard_sigmoid"])
def test_a_recurrent_net_of_keras_1_with_an_array_for_each_gate(activation, tmp_path):
    gates = {"recurrent_activation": activation}
    original = filled(
        lambda: tf_keras.Sequential(
            [
                L.Embedding(9, 5, input_length=6),
                L.Conv1D(3, 2, padding="same"),
                L.Bidirectional(L.LSTM(4, return_sequences=True, **gates)),
                L.GRU(3, reset_after=False, **gates),
            ]
        )
    )
    table, kernel, bias, *lstm = original.get_weights()

    def apart(name: str, arrays: list[Any], gates: str, order: str) -> dict[str, Any]:
        parts = [dict(zip(gates, np.split(array, len(gates), axis=-1), strict=True)) for array in arrays]
        return {f"{name}_{what}_{g}": part[g] for g in order for what, part in zip("WUb", parts, strict=True)}

    recurrent = {"init": "glorot_uniform", "inner_init": "orthogonal", "activation": "tanh", "dropout_W": 0.0}
    recurrent |= {"inner_activation": activation, "dropout_U": 0.0, "consume_less": "cpu", "input_dim": 5}
    both = layer("LSTM", "lstm_1", output_dim=4, return_sequences=True, forget_bias_init="one", **recurrent)
    path = handwritten(
        tmp_path / "old.h5",
        {
            "class_name": "Sequential",
            "config": [
                layer(
                    "Embedding",
                    "embedding_1",
                    **{"input_dim": 9, "output_dim": 5, "init": "uniform", "input_length": 6, "mask_zero": False},
                    **{"batch_input_shape": [None, 6], "input_dtype": "int32", "dropout": 0.0, "W_constraint": None},
                ),
                layer("Convolution1D", "conv", nb_filter=3, filter_length=2, border_mode="same", subsample_length=1),
                layer("Bidirectional", "bidirectional_1", layer=both, merge_mode="concat"),
                layer("GRU", "gru_1", output_dim=3, **recurrent),
            ],
        },
        {
            "embedding_1": {"embedding_1_W": table},
            "conv": {"conv_W": kernel[:, None], "conv_b": bias},
            "bidirectional_1": {
                **apart("forward_lstm_1", lstm[:3], "ifco", "icfo"),
                **apart("backward_lstm_1", lstm[3:6], "ifco", "icfo"),
            },
            "gru_1": apart("gru_1", lstm[6:], "zrh", "zrh"),
        },
        keras_version="1.2.0",
    )
    model = opened(path, original, "keywords of Keras 1")
    # Keras 3 has another hard_sigmoid.
    assert flavour_of(model).name == ("keras" if activation == "sigmoid" else "tf_keras")


@pytest.mark.parametrize(("mode", "kind"), [("sum", "Add"), ("concat", "Concatenate")])
def test_a_merge_of_keras_1(mode, kind, tmp_path):
    x = L.Input((5,))
    a, b = L.Dense(4)(x), L.Dense(4)(x)
    original = filled(lambda: tf_keras.Model(x, getattr(L, kind)()([a, b])))
    merge = {"mode": mode, "mode_type": "raw", "concat_axis": -1, "dot_axes": -1, "output_shape": None}
    entries = [
        {"class_name": "InputLayer", "config": {"name": "input_1", **INPUT, "batch_input_shape": [None, 5]}},
        layer("Dense", "a", output_dim=4, **DENSE),
        layer("Dense", "b", output_dim=4, **DENSE),
        {"class_name": "Merge", "config": {"name": "merge_1", **merge}},
    ]
    calls = [[], [[["input_1", 0, 0]]], [[["input_1", 0, 0]]], [[["a", 0, 0], ["b", 0, 0]]]]
    for entry, inbound in zip(entries, calls, strict=True):
        entry.update(name=entry["config"]["name"], inbound_nodes=inbound)
    config = {"name": "model_1", "layers": entries, "input_layers": [["input_1", 0, 0]]}
    first, first_bias, second, second_bias = original.get_weights()
    weights = {"a": {"a_W": first, "a_b": first_bias}, "b": {"b_W": second, "b_b": second_bias}}
    model_config = {"class_name": "Model", "config": {**config, "output_layers": [["merge_1", 0, 0]]}}
    path = handwritten(tmp_path / "old.h5", model_config, weights, keras_version="1.2.2")
    assert flavour_of(opened(path, original, "class of Keras 1")).name == "keras"


@pytest.mark.parametrize(
    ("entry", "match"),
    [
        (layer("Merge", "m", mode="cos"), r"'m' \(Merge\) of Keras 1 merges with mode='cos'.*model=build"),
        (layer("Merge", "m", mode="sum", layers=[1]), r"'m' \(Merge\) .* inside of a Sequential"),
        (layer("BatchNormalization", "n", mode=2), r"'n' \(BatchNormalization\) of Keras 1 has mode=2.*model=build"),
        (layer("Highway", "h"), r"layer 'Highway' of your own.*custom_objects"),
    ],
)
def test_what_no_keras_does_any_more_is_named(entry, match, tmp_path):
    config = sequential((5,), layer("Dense", "d", output_dim=5, **DENSE), entry)
    weights = {"d": {"d_W": np.ones((5, 5)), "d_b": np.ones(5)}}
    path = handwritten(tmp_path / "old.h5", config, weights, keras_version="1.2.2")
    with pytest.raises(FileError, match=match):
        sparsekit.load(path)
    assert inspect_file(path).problem is not None


def test_cudnn_gru_is_a_gru_with_reset_after(tmp_path):
    original = filled(lambda: tf_keras.Sequential([L.GRU(4, input_shape=SERIES)]))
    kernel, recurrent, bias = original.get_weights()

    def each(values: Any, change: Any) -> Any:
        return np.concatenate([change(gate) for gate in np.split(values, 3, axis=1)], axis=1)

    # One gate after the other in memory, and each as a matrix of (units, inputs).
    arrays = {
        "cu_dnngru_1/kernel:0": each(kernel, lambda gate: gate.T.ravel().reshape(gate.shape)),
        "cu_dnngru_1/recurrent_kernel:0": each(recurrent, np.transpose),
        "cu_dnngru_1/bias:0": bias.reshape(-1),
    }
    config = sequential(SERIES, layer("CuDNNGRU", "cu_dnngru_1", units=4, return_sequences=False, stateful=False))
    config["config"][0]["config"].pop("input_dtype")
    path = handwritten(tmp_path / "old.h5", config, {"cu_dnngru_1": arrays}, keras_version="2.2.4")
    model = opened(path, original, "CuDNN layer")
    assert flavour_of(model).name == "keras"
    given = sparsekit.load(path, model=lambda: tf_keras.Sequential([L.GRU(4, input_shape=SERIES)]))
    assert same_predictions(original, given)
