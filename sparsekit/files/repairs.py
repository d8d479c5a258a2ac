"""What older Kerases wrote and today's refuse, as one table of small repairs of a config in memory.

To add a repair: one function, one line in `REPAIRS`, one test that builds such a file.
"""

from __future__ import annotations

import copy
import functools
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ..errors import FileError
from ..flavour import Flavour
from .keras1 import class_of_keras_1, cudnn_layer, kernels_of_theano, keywords_of_keras_1, mode_of_normalization

MODELS = ("Sequential", "Functional", "Model")
_RECURRENT = ("RNN", "LSTM", "GRU", "SimpleRNN", "ConvLSTM1D", "ConvLSTM2D", "ConvLSTM3D", "Bidirectional")
_WRAPPERS = ("Bidirectional", "TimeDistributed", "RNN", "StackedRNNCells", "ConvLSTM2D", "SpectralNormalization")


@dataclass(frozen=True)
class Node:
    """One object in a config.

    Args:
        entry: its dictionary, with `"class_name"` and `"config"`.
        flavour: the Keras that is going to build it.
        version: `(major, minor)` of the Keras that wrote it.
        standalone: whether that was the keras package and not tf.keras.
        backend: what that Keras ran on, `""` if it is not known.
    """

    entry: dict[str, Any]
    flavour: Flavour
    version: tuple[int, int]
    standalone: bool
    backend: str

    @property
    def kind(self) -> str:
        return str(self.entry["class_name"]).split(">")[-1]

    @property
    def config(self) -> dict[str, Any]:
        return self.entry["config"]

    @property
    def name(self) -> str:
        return str(self.config.get("name", self.kind)) if isinstance(self.config, dict) else self.kind

    @property
    def is_model(self) -> bool:
        return self.kind in MODELS

    def accepts(self, keyword: str) -> bool:
        """Whether this Keras' class knows a keyword; classes of the user's own are taken to know all."""
        known = _keywords(getattr(self.flavour.keras.layers, self.kind, None))
        return known is None or keyword in known

    def drop(self, keyword: str, *harmless: Any) -> bool:
        """Take a keyword out that this Keras does not know, if it says nothing.

        Raises:
            FileError: if it asks for something that this Keras cannot do.
        """
        if not isinstance(self.config, dict) or keyword not in self.config or self.accepts(keyword):
            return False
        value = self.config[keyword]
        if harmless and value not in harmless:
            raise FileError(
                f"Layer '{self.name}' ({self.kind}) has {keyword}={value!r}, which {self.flavour.label} cannot do; "
                "load the file with flavour='tf_keras'."
            )
        del self.config[keyword]
        return True


@dataclass(frozen=True)
class Repair:
    """One rule.

    Args:
        name: what reports call it.
        flavour: the Keras that needs it, or None for both.
        fix: changes one node in place and tells whether it did.
    """

    name: str
    flavour: str | None
    fix: Callable[[Node], bool]


@dataclass(frozen=True)
class Applied:
    """A repair that a file needs: its name and the layer."""

    name: str
    layer: str


def repair(
    config: dict[str, Any], flavour: Flavour, keras_version: str, backend: str = ""
) -> tuple[dict[str, Any], list[Applied]]:
    """A copy of a model config that this Keras can read, and what had to change.

    Args:
        config: the config as the file has it; it stays as it is.
        flavour: the Keras that is going to build it.
        keras_version: version that wrote it, for example `"2.2.4-tf"`.
        backend: what that Keras ran on, for example `"theano"`.

    Raises:
        FileError: if the config asks for something that this Keras cannot do.
    """
    numbers = [int(n) for n in re.findall(r"\d+", keras_version)[:2]]
    version = (numbers + [2, 0][len(numbers) :])[:2]
    applied = []
    try:
        config = copy.deepcopy(config)
        for rule in REPAIRS:
            # Each rule sees what the ones before it made of the whole config: a wrapper looks at the class inside.
            for entry in _entries(config) if rule.flavour in (None, flavour.name) else ():
                node = Node(entry, flavour, (version[0], version[1]), not keras_version.endswith("-tf"), backend)
                if rule.fix(node):
                    applied.append(Applied(rule.name, node.name))
    except (AttributeError, TypeError, KeyError, IndexError, RecursionError) as error:
        raise FileError("The model config in the file makes no sense; the file is damaged.") from error
    return config, applied


def _entries(value: Any) -> Iterator[dict[str, Any]]:
    """Every object in a config, outer ones first, so that a rule may change what is inside."""
    if isinstance(value, dict):
        if isinstance(value.get("class_name"), str) and isinstance(value.get("config"), (dict, list)):
            yield value
        for inner in list(value.values()):
            yield from _entries(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _entries(inner)


@functools.cache
def _keywords(kind: Any) -> frozenset[str] | None:
    """All keywords that a layer class takes, those of its bases included while it passes them on."""
    if not inspect.isclass(kind):
        return None
    found: set[str] = set()
    for base in kind.__mro__:
        if "__init__" not in vars(base):
            continue
        parameters = inspect.signature(vars(base)["__init__"]).parameters.values()
        found |= {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            break
    else:
        return None
    # Keras 3's Layer takes these through its own keyword arguments.
    return frozenset(found | {"batch_input_shape", "input_shape", "batch_shape", "input_dim", "build_config"})


# --- models ---


def _list_of_layers(node: Node) -> bool:
    """Up to Keras 2.1 a Sequential's config was the bare list of its layers."""
    if node.kind != "Sequential" or not isinstance(node.config, list):
        return False
    node.entry["config"] = {"name": str(node.entry.get("name", "sequential")), "layers": node.config}
    return True


def _missing_input_layer(node: Node) -> bool:
    """A Sequential saved without its InputLayer: the first layer knows the input shape."""
    if node.kind != "Sequential" or not isinstance(node.config, dict) or not node.config.get("layers"):
        return False
    first = node.config["layers"][0]
    if not isinstance(first, dict) or first.get("class_name") == "InputLayer" or first.get("class_name") in MODELS:
        return False
    settings = first.get("config")
    shape = settings.pop("batch_input_shape", None) if isinstance(settings, dict) else None
    if settings is None or shape is None:
        return False
    dtype = settings.get("dtype")
    if first["class_name"] == "Embedding":
        # Embeddings look rows up; their own dtype is that of the rows.
        dtype = "int32"
    name = settings.get("name", first["class_name"])
    entry = {"class_name": "InputLayer", "config": {"batch_input_shape": shape, "name": f"{name}_input"}}
    entry["config"]["dtype"] = dtype if isinstance(dtype, str) and "mixed" not in dtype else "float32"
    node.config["layers"].insert(0, entry)
    return True


def _first_shape_twice(node: Node) -> bool:
    """The input shape stands in the InputLayer and once more in the layer behind it."""
    layers = node.config.get("layers") if node.is_model and isinstance(node.config, dict) else None
    if not layers or (node.kind == "Sequential" and layers[0].get("class_name") != "InputLayer"):
        return False
    found = False
    for layer in layers:
        if layer.get("class_name") == "InputLayer":
            continue
        if isinstance(layer.get("config"), dict) and layer.get("class_name") not in MODELS:
            found |= layer["config"].pop("batch_input_shape", None) is not None
    return found


def _nested_model_calls(node: Node) -> bool:
    """Keras 2 counted a nested model's own creation as its first call; its real calls begin at 1."""
    if not node.is_model or node.version[0] >= 3 or not isinstance(node.config, dict):
        return False
    nested = [one for one in node.config.get("layers", ()) if isinstance(one, dict) and one.get("class_name") in MODELS]
    changed = False
    for layer in nested:
        name, calls = layer.get("name"), len(layer.get("inbound_nodes") or ())
        places = list(_references(node.config, name))
        used = {place[1] for place in places}
        if calls and used and min(used) >= 1 and (_has_input(layer) or max(used) >= calls):
            for place in places:
                place[1] -= 1
            changed = True
    return changed


def _has_input(model: dict[str, Any]) -> bool:
    layers = model["config"].get("layers") if isinstance(model.get("config"), dict) else None
    return bool(layers) and isinstance(layers[0], dict) and layers[0].get("class_name") == "InputLayer"


def _references(config: dict[str, Any], name: Any) -> Iterator[list[Any]]:
    """Every `[layer, call, output]` triple of a functional config that names this layer."""

    def walk(value: Any) -> Iterator[list[Any]]:
        if isinstance(value, list):
            if len(value) >= 3 and value[0] == name and isinstance(value[1], int) and isinstance(value[2], int):
                yield value
            for inner in value:
                yield from walk(inner)
        elif isinstance(value, dict):
            for inner in value.values():
                yield from walk(inner)

    for layer in config.get("layers", ()):
        if isinstance(layer, dict):
            yield from walk(layer.get("inbound_nodes"))
    yield from walk(config.get("input_layers"))
    yield from walk(config.get("output_layers"))


def _tensors_as_arguments(node: Node) -> bool:
    """Tensors among a call's keyword arguments, and the initial states of an RNN, which stood among its inputs."""
    if not node.is_model or node.version[0] >= 3 or not isinstance(node.config, dict):
        return False
    layers = [layer for layer in node.config.get("layers", ()) if isinstance(layer, dict)]
    known = {layer.get("name") for layer in layers if isinstance(layer.get("name"), str)}
    changed = False
    for layer in layers:
        calls: Any = layer.get("inbound_nodes")
        for position, call in enumerate(calls if isinstance(calls, list) else []):
            if not isinstance(call, list) or not all(isinstance(one, list) and len(one) in (3, 4) for one in call):
                continue
            keywords = {key: value for one in call for key, value in (one[3] if len(one) == 4 else {}).items()}
            inputs = [_tensor(one) for one in call]
            states = inputs[1:] if str(layer.get("class_name")) in _RECURRENT else []
            if not states and not any(_is_tensor(value, known) for value in keywords.values()):
                continue
            keywords = {key: _tensor(value) if _is_tensor(value, known) else value for key, value in keywords.items()}
            if states:
                inputs = inputs[:1]
                keywords["initial_state"] = states
            calls[position] = {"args": inputs if len(inputs) == 1 else [inputs], "kwargs": keywords}
            changed = True
    return changed


def _is_tensor(value: Any, layers: set[Any]) -> bool:
    return isinstance(value, list) and len(value) == 3 and isinstance(value[0], str) and value[0] in layers


def _tensor(place: list[Any]) -> dict[str, Any]:
    """A reference to a layer's output as Keras 3 writes it; it looks at the place only."""
    return {
        "class_name": "__keras_tensor__",
        "config": {"shape": [], "dtype": "float32", "keras_history": place[:3]},
    }


def _single_in_a_list(node: Node) -> bool:
    """Keras 2 wrote a single input or output as a list of one; Keras 3 would return such a list."""
    if node.kind not in ("Functional", "Model") or node.version[0] >= 3 or not isinstance(node.config, dict):
        return False
    changed = False
    for key in ("input_layers", "output_layers"):
        places = node.config.get(key)
        if isinstance(places, list) and len(places) == 1 and isinstance(places[0], list):
            node.config[key] = places[0]
            changed = True
    return changed


# --- layers ---


def _slash_in_name(node: Node) -> bool:
    """Keras 3 keeps `/` for paths and refuses it in names."""
    changed = False
    if isinstance(node.config, dict) and "/" in str(node.config.get("name", "")):
        node.config["name"] = plain_name(node.config["name"])
        changed = True
    if "/" in str(node.entry.get("name", "")):
        node.entry["name"] = plain_name(node.entry["name"])
    if node.is_model and isinstance(node.config, dict):
        for layer in node.config.get("layers", ()):
            if isinstance(layer, dict) and "/" in str(layer.get("name", "")):
                for place in _references(node.config, layer["name"]):
                    place[0] = plain_name(place[0])
    return changed


def plain_name(name: str) -> str:
    """A layer's name as Keras 3 takes it."""
    return name.replace("/", "_")


def _wrapped_class(node: Node) -> bool:
    """A layer inside a wrapper is looked up by its module, which Keras 2 did not write, or which was another."""
    if node.kind not in _WRAPPERS or not isinstance(node.config, dict):
        return False
    changed = False
    for key in ("layer", "backward_layer", "cell", "cells"):
        inner = node.config.get(key)
        for entry in inner if isinstance(inner, list) else [inner]:
            if not isinstance(entry, dict):
                continue
            kind = str(entry.get("class_name"))
            if kind in ("Functional", "Model"):
                entry.update(module="keras.src.models.functional", class_name="Functional", registered_name=None)
                changed = True
            elif not entry.get("module") and (kind in MODELS or hasattr(node.flavour.keras.layers, kind)):
                entry.update(module="keras" if kind in MODELS else "keras.layers", registered_name=None)
                changed = True
    return changed


def _one_axis(node: Node) -> bool:
    """The one axis of a BatchNormalization as a list; inside a wrapper or nested model Keras 3 wants a number."""
    axis = node.config.get("axis") if isinstance(node.config, dict) else None
    if node.kind != "BatchNormalization" or not isinstance(axis, list) or len(axis) != 1:
        return False
    node.config["axis"] = axis[0]
    return True


def _dtype_policy(node: Node) -> bool:
    """tf_keras writes a mixed-precision policy as an object, Keras 3 has another class for it."""
    policy = node.config.get("dtype") if isinstance(node.config, dict) else None
    if not isinstance(policy, dict) or policy.get("class_name") not in ("Policy", "PolicyV1"):
        return False
    node.config["dtype"] = policy["config"]["name"]
    return True


def _initializer_dtype(node: Node) -> bool:
    """Initializers of TensorFlow 1 knew their dtype; today the variable does."""
    if not isinstance(node.config, dict) or "dtype" not in node.config or "name" in node.config:
        return False
    if not hasattr(node.flavour.keras.initializers, node.kind):
        return False
    del node.config["dtype"]
    return True


def _initializer_of_tensorflow(node: Node) -> bool:
    """An initializer of TensorFlow's instead of Keras'; all of them have a namesake."""
    if not re.fullmatch(r"tensorflow\.python\.ops\.init_ops(_v2)?", str(node.entry.get("module"))):
        return False
    if not hasattr(node.flavour.keras.initializers, node.kind):
        return False
    node.entry.update(module="keras.initializers", registered_name=None)
    return True


def _score_mode(node: Node) -> bool:
    """Keras 3 takes the word `dot` for its function `dot`; it is the default, so that it need not be said."""
    if node.kind != "Attention" or node.config.get("score_mode") != "dot":
        return False
    del node.config["score_mode"]
    return True


def _thresholded_relu(node: Node) -> bool:
    """ThresholdedReLU(theta) became ReLU(threshold=theta)."""
    if node.kind != "ThresholdedReLU":
        return False
    node.entry["class_name"] = "ReLU"
    node.config["threshold"] = node.config.pop("theta", 1.0)
    return True


def _slope(node: Node) -> bool:
    """LeakyReLU(alpha) became LeakyReLU(negative_slope)."""
    if node.kind != "LeakyReLU" or "alpha" not in node.config:
        return False
    node.config["negative_slope"] = node.config.pop("alpha")
    return True


def _input_length(node: Node) -> bool:
    """Embedding wrote the length of its input, which it never needed."""
    return node.kind == "Embedding" and node.config.pop("input_length", None) is not None


def _reset_after(node: Node) -> bool:
    """Before Keras had `reset_after`, every GRU was one without; today's default is the other."""
    if node.kind not in ("GRU", "GRUCell") or "reset_after" in node.config or not node.standalone:
        return False
    node.config["reset_after"] = False
    return True


def _dropped(keyword: str, *harmless: Any) -> Callable[[Node], bool]:
    return lambda node: node.drop(keyword, *harmless)


def _attention_shapes(node: Node) -> bool:
    """MultiHeadAttention wrote the shapes that it was built for; Keras 3 sees them when it is called."""
    found = [node.drop(keyword) for keyword in ("query_shape", "key_shape", "value_shape")]
    return any(found)


def _kernel_of_separable(node: Node) -> bool:
    """Separable and depthwise convolutions wrote settings of a kernel that they do not have."""
    if not node.kind.startswith(("Separable", "Depthwise")):
        return False
    found = [node.drop(f"kernel_{what}") for what in ("initializer", "regularizer", "constraint")]
    return any(found)


def _trainable_without_weights(node: Node) -> bool:
    """Layers without weights whose class takes no `trainable` any more."""
    return node.kind != "InputLayer" and not node.is_model and node.drop("trainable")


def _empty_keywords(node: Node) -> bool:
    """Keywords that this Keras does not know and that say nothing."""
    if not isinstance(node.config, dict) or node.is_model or node.kind == "InputLayer":
        return False
    empty = [key for key, value in node.config.items() if value is None and not node.accepts(key)]
    for key in empty:
        del node.config[key]
    return bool(empty)


REPAIRS: tuple[Repair, ...] = (
    Repair("list-style Sequential", None, _list_of_layers),
    Repair("class of Keras 1", None, class_of_keras_1),
    Repair("keywords of Keras 1", None, keywords_of_keras_1),
    Repair("mode of a BatchNormalization", None, mode_of_normalization),
    Repair("CuDNN layer", None, cudnn_layer),
    Repair("kernels of Theano", None, kernels_of_theano),
    Repair("Sequential without InputLayer", "keras", _missing_input_layer),
    Repair("input shape given twice", "keras", _first_shape_twice),
    Repair("calls of a nested model", "keras", _nested_model_calls),
    Repair("slash in a layer name", "keras", _slash_in_name),
    Repair("tensors as call arguments", "keras", _tensors_as_arguments),
    Repair("single output in a list", "keras", _single_in_a_list),
    Repair("class of a wrapped layer", "keras", _wrapped_class),
    Repair("axis as a list", "keras", _one_axis),
    Repair("dtype policy", "keras", _dtype_policy),
    Repair("initializer of TensorFlow", None, _initializer_of_tensorflow),
    Repair("initializer dtype", "keras", _initializer_dtype),
    Repair("score_mode", "keras", _score_mode),
    Repair("ThresholdedReLU", "keras", _thresholded_relu),
    Repair("LeakyReLU alpha", "keras", _slope),
    Repair("Embedding input_length", "keras", _input_length),
    Repair("GRU reset_after", None, _reset_after),
    Repair("time_major", "keras", _dropped("time_major", False)),
    Repair("groups", "keras", _dropped("groups", 1)),
    Repair("rng_type", "keras", _dropped("rng_type")),
    Repair("noise_shape", "keras", _dropped("noise_shape", None)),
    Repair("softmax_robust_masking", "keras", _dropped("softmax_robust_masking", False)),
    Repair("attention shapes", "keras", _attention_shapes),
    Repair("kernel settings of a separable convolution", "keras", _kernel_of_separable),
    Repair("trainable of a layer without weights", "keras", _trainable_without_weights),
    Repair("empty keywords", "keras", _empty_keywords),
)
