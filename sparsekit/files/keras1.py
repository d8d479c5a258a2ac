"""Repairs of configs that Keras 1 wrote, and of those of CuDNN's recurrent layers: the same in the words of Keras 2."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import FileError

if TYPE_CHECKING:
    from .repairs import Node

_CLASSES = {
    "Convolution1D": "Conv1D",
    "Convolution2D": "Conv2D",
    "Convolution3D": "Conv3D",
    "AtrousConvolution1D": "Conv1D",
    "AtrousConvolution2D": "Conv2D",
    "SeparableConvolution2D": "SeparableConv2D",
}
_MERGES = {"sum": "Add", "mul": "Multiply", "ave": "Average", "max": "Maximum", "concat": "Concatenate"}
_KEYWORDS = {
    "output_dim": "units",
    "nb_filter": "filters",
    "filter_length": "kernel_size",
    "subsample": "strides",
    "subsample_length": "strides",
    "stride": "strides",
    "atrous_rate": "dilation_rate",
    "border_mode": "padding",
    "dim_ordering": "data_format",
    "pool_length": "pool_size",
    "length": "size",
    "bias": "use_bias",
    "p": "rate",
    "sigma": "stddev",
    "inner_activation": "recurrent_activation",
    "dropout_W": "dropout",
    "dropout_U": "recurrent_dropout",
    "W_regularizer": "kernel_regularizer",
    "U_regularizer": "recurrent_regularizer",
    "b_regularizer": "bias_regularizer",
    "W_constraint": "kernel_constraint",
    "b_constraint": "bias_constraint",
}
# The file has the values that these began with, and the shape of the input stands elsewhere too.
_NEEDLESS = ("init", "inner_init", "forget_bias_init", "gamma_init", "beta_init", "consume_less", "weights", "dropout")
_SIZES = (("nb_row", "nb_col"), ("kernel_dim1", "kernel_dim2", "kernel_dim3"))
_ORDERINGS = {"th": "channels_first", "tf": "channels_last"}


def class_of_keras_1(node: Node) -> bool:
    """Layers had other names, and one layer merged in every way."""
    if node.kind in _CLASSES:
        node.entry["class_name"] = _CLASSES[node.kind]
        return True
    if node.kind != "Merge" or not isinstance(node.config, dict):
        return False
    mode = node.config.get("mode")
    if mode not in _MERGES or node.config.get("layers"):
        raise FileError(
            f"Layer '{node.name}' (Merge) of Keras 1 merges with mode={mode!r} "
            f"{'inside of a Sequential ' if node.config.get('layers') else ''}which no later Keras has; build the "
            "model anew, and give it the weights: sparsekit.load(path, model=build)."
        )
    node.entry["class_name"] = _MERGES[mode]
    axis = {"axis": node.config["concat_axis"]} if mode == "concat" else {}
    node.entry["config"] = {"name": node.name, "trainable": True, **axis}
    return True


def keywords_of_keras_1(node: Node) -> bool:
    """Layers' keywords had other names."""
    config = node.config
    if not isinstance(config, dict) or node.is_model or not hasattr(node.flavour.keras.layers, node.kind):
        return False
    before = dict(config)
    if "input_dtype" in config:
        dtype = config.pop("input_dtype")
        if node.kind == "InputLayer":
            config["dtype"] = dtype
    for names in _SIZES:
        if set(names) <= set(config):
            config["kernel_size"] = [config.pop(name) for name in names]
    for old, new in _KEYWORDS.items():
        if old in config and not node.accepts(old):
            new = new.replace("kernel_", "embeddings_") if node.kind == "Embedding" else new
            config[new] = config.pop(old)
    for name in _NEEDLESS:
        if name in config and not node.accepts(name):
            del config[name]
    if config == before:
        return False
    if node.kind != "Embedding":
        for name in ("input_dim", "input_length"):
            config.pop(name, None)
    if config.get("data_format") in _ORDERINGS:
        config["data_format"] = _ORDERINGS[config["data_format"]]
    for name, value in config.items():
        if isinstance(value, dict) and "name" in value and "class_name" not in value:
            config[name] = _settings_of_keras_1(value)
    return True


def _settings_of_keras_1(old: dict[str, Any]) -> dict[str, Any] | None:
    """A regularizer or constraint, whose class stood among its settings."""
    settings = {key: value for key, value in old.items() if key != "name"}
    if "l1" in settings or "l2" in settings:
        return {"class_name": "L1L2", "config": {key: float(settings.get(key, 0.0)) for key in ("l1", "l2")}}
    if "m" in settings:
        settings["max_value"] = settings.pop("m")
    return {"class_name": str(old["name"]), "config": settings}


def mode_of_normalization(node: Node) -> bool:
    """BatchNormalization had three modes, of which one is left."""
    if node.kind != "BatchNormalization" or not isinstance(node.config, dict) or "mode" not in node.config:
        return False
    mode = node.config.pop("mode")
    if mode != 0:
        raise FileError(
            f"Layer '{node.name}' (BatchNormalization) of Keras 1 has mode={mode!r}, which no later Keras has; build "
            "the model anew, and give it the weights: sparsekit.load(path, model=build)."
        )
    return True


def cudnn_layer(node: Node) -> bool:
    """CuDNNLSTM and CuDNNGRU run on a GPU only; LSTM and GRU(reset_after=True) compute the same."""
    if node.kind not in ("CuDNNLSTM", "CuDNNGRU") or not isinstance(node.config, dict):
        return False
    node.entry["class_name"] = node.kind.removeprefix("CuDNN")
    node.config.update(activation="tanh", recurrent_activation="sigmoid")
    if node.kind == "GRU":
        node.config["reset_after"] = True
    return True


def kernels_of_theano(node: Node) -> bool:
    """Theano turns the kernel of a convolution by 180 degrees before it slides over the picture."""
    return node.backend == "theano" and node.kind in CONVOLUTIONS


CONVOLUTIONS = ("Conv1D", "Conv2D", "Conv3D", "Conv2DTranspose", "ConvLSTM2D")
