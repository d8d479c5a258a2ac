"""The bridge between Keras 3 (on TensorFlow) and tf_keras: the only file that imports either of them.

The model decides: `flavour_of(model)` answers which Keras is its own, and everything that differs between the two
is a method of `Flavour`. Its parts stand in `flavour_base` (models, layers, variables), `flavour_runs` (optimizers,
training) and `flavour_files`; the rest of the project knows this module only.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from .errors import ModelTypeError
from .flavour_base import NAMES, key_of, native, shadowed
from .flavour_files import Files
from .flavour_runs import Runs


@dataclass(frozen=True)
class Flavour(Files, Runs):
    """One of the two Kerases, and all that differs between them.

    Args:
        name: `"keras"` (Keras 3) or `"tf_keras"` (Keras 2).
        keras: the imported top-level module.
    """


@functools.cache
def get(name: str) -> Flavour:
    """Import one of the two Kerases.

    Args:
        name: `"keras"` or `"tf_keras"`.

    Raises:
        ModelTypeError: if it is not installed, or if Keras 3 runs on another backend than TensorFlow.
    """
    if name not in NAMES:
        raise ModelTypeError(f"flavour={name!r} is not known; give 'keras' (Keras 3) or 'tf_keras'.")
    if importlib.util.find_spec(name) is None:
        raise ModelTypeError(f"{name} is not installed; run `pip install {name.replace('_', '-')}`.")
    module = importlib.import_module(name)
    if name == "keras":
        _check_backend(module)
    return Flavour(name, module)


def _check_backend(keras: ModuleType) -> None:
    if not keras.__version__.startswith("3."):
        raise ModelTypeError(f"keras {keras.__version__} is not Keras 3; run `pip install 'keras>=3'`.")
    backend = keras.backend.backend()
    if backend != "tensorflow":
        raise ModelTypeError(
            f"Keras runs on the {backend} backend here; sparsekit needs TensorFlow: set "
            "KERAS_BACKEND=tensorflow before keras is imported."
        )


def _loaded() -> Iterator[Flavour]:
    """The Kerases that this process has imported: a model's own is always among them."""
    for name in NAMES:
        module = sys.modules.get(name)
        if module is not None and hasattr(module, "Model"):
            yield get(name)


def flavour_of(model: Any) -> Flavour:
    """Which Keras a model belongs to.

    Raises:
        ModelTypeError: if the object is not a Keras model on TensorFlow, naming its class and what to pass.
    """
    for flavour in _loaded():
        if isinstance(model, flavour.keras.Model):
            return flavour
        if flavour.is_layer(model):
            raise ModelTypeError(f"{_type_name(model)} is a layer; pass the whole model that holds it.")
    hint = "pass the model object itself, a keras.Model or tf_keras.Model"
    if isinstance(model, (list, tuple)):
        hint = "pass the model that holds these layers, not a list of them"
    elif isinstance(model, (str, bytes)) or hasattr(model, "__fspath__"):
        hint = "open the file first: sparsekit.load(path)"
    elif type(model).__module__.split(".")[0] == "torch" or any(
        base.__module__.startswith("torch.") for base in type(model).__mro__
    ):
        hint = "sparsekit works on Keras models on TensorFlow, not on PyTorch modules"
    raise ModelTypeError(f"{_type_name(model)} is not a Keras model; {hint}.")


def flavour_of_optimizer(optimizer: Any) -> Flavour:
    """Which Keras an optimizer belongs to.

    Raises:
        ModelTypeError: if it is no optimizer of either.
    """
    for flavour in _loaded():
        if flavour.is_optimizer(optimizer):
            return flavour
    raise ModelTypeError(
        f"{_type_name(optimizer)} is not a Keras optimizer; pass an object such as keras.optimizers.Adam()."
    )


def _type_name(obj: Any) -> str:
    kind = type(obj)
    return f"{kind.__module__}.{kind.__qualname__}"


__all__ = ["NAMES", "Flavour", "flavour_of", "flavour_of_optimizer", "get", "key_of", "native", "shadowed"]
