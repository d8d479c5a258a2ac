"""Look through a file's configs for code and for names that nobody knows, before any of it is built."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import FileError
from ..flavour import Flavour
from .repairs import MODELS

# Where Keras' own layers, losses and so on live. `keras.utils` and `keras.saving` hold functions that fetch and unpack
# files, and any other module would be imported, which runs it.
_KERAS_MODULES = re.compile(
    r"(keras|tf_keras|tensorflow\.keras|tensorflow\.python\.keras)(\.src)?"
    r"(\.(activations|constraints|dtype_policies|engine|initializers|layers|losses|metrics|mixed_precision|models"
    r"|optimizers|ops|quantizers|random|regularizers)(\.\w+)*)?"
)
# TensorFlow functions without side effects; others read and write files or load libraries.
_PURE = re.compile(r"(compat\.v[12]\.)?((math|nn|linalg|image|signal|strings|bitwise|dtypes|__operators__)\.)?\w+")
_IMPURE = ("py_function", "numpy_function", "load_library", "load_op_library", "print", "py_func", "raw_ops")
_TF_CALLS = ("TFOpLambda", "SlicingOpLambda")
_TF_MEMBERS = ("ClassMethod", "InstanceMethod", "InstanceProperty")


def check_safe(config: Any, path: Path) -> None:
    """Refuse a config that brings code along or calls what is none of a model's business.

    Raises:
        FileError: naming the layer, with `safe=False` as the way out for a file that is trusted.
    """
    for entry in _entries(config):
        kind, settings = str(entry["class_name"]).split(">")[-1], entry.get("config")
        settings = settings if isinstance(settings, dict) else {}
        name = settings.get("name", kind)
        if kind == "__lambda__" or (kind == "Lambda" and _brings_code(settings)):
            raise FileError(
                f"'{path}' holds Python code (Lambda layer '{name}'), which would run with your rights; "
                "if you trust the file, load it with safe=False."
            )
        if kind in _TF_CALLS and not _is_pure(settings.get("function")):
            raise FileError(
                f"Layer '{name}' in '{path}' calls tf.{settings.get('function')}, "
                "which may do more than compute; if you trust the file, load it with safe=False."
            )
        if kind in _TF_MEMBERS and not str(settings.get("cls_symbol")).endswith("Tensor"):
            raise FileError(
                f"Layer '{name}' in '{path}' calls a member of a TensorFlow class; "
                "if you trust the file, load it with safe=False."
            )


def check_known(
    config: Any, flavours: list[Flavour], custom_objects: dict[str, Any] | None, path: Path, otherwise: str = ""
) -> None:
    """Name every class and function in a model config that must come from the user.

    Args:
        config: of a model.
        flavours: where classes may be known.
        custom_objects: what the user gave.
        path: the file, for messages.
        otherwise: another way out.

    Raises:
        FileError: listing them, with the `custom_objects` argument to give.
    """
    custom = custom_objects or {}
    missing: dict[str, str] = {}

    def known(name: str, registered: Any, places: tuple[str, ...]) -> bool:
        short = name.split(">")[-1]
        if name in custom or short in custom or (isinstance(registered, str) and registered in custom):
            return True
        for flavour in flavours:
            if any(hasattr(getattr(flavour.keras, place, None), short) for place in places):
                return True
            if any(flavour.registered(one) for one in (name, registered) if isinstance(one, str)):
                return True
        return False

    for entry in _layer_entries(config):
        kind = str(entry["class_name"])
        if kind in (*MODELS, *_TF_CALLS, *_TF_MEMBERS, "InputLayer"):
            continue
        if not known(kind, entry.get("registered_name"), ("layers", "models")):
            missing.setdefault(kind.split(">")[-1], "layer")
        settings = entry.get("config")
        for key in ("activation", "recurrent_activation"):
            value = settings.get(key) if isinstance(settings, dict) else None
            if isinstance(value, str) and not known(value, None, ("activations",)):
                missing.setdefault(value, "activation")
    for entry in _entries(config):
        module, kind = entry.get("module"), str(entry["class_name"])
        if isinstance(module, str) and module != "builtins" and not _KERAS_MODULES.fullmatch(module):
            if not known(kind, entry.get("registered_name"), ()):
                missing.setdefault(kind, "object")
        elif (
            kind == "function"
            and isinstance(entry.get("config"), str)
            and not known(entry["config"], entry.get("registered_name"), ("activations", "losses", "metrics", "ops"))
        ):
            missing.setdefault(entry["config"], "function")
    if missing:
        listed = ", ".join(f"{what} '{name}'" for name, what in missing.items())
        given = ", ".join(f"'{name}': {name if name.isidentifier() else '...'}" for name in missing)
        raise FileError(
            f"'{path}' uses {listed} of your own, whose code is not in the file; "
            f"pass it: sparsekit.load(path, custom_objects={{{given}}}){otherwise}."
        )


def _brings_code(settings: dict[str, Any]) -> bool:
    function = settings.get("function")
    return (
        not isinstance(function, (str, dict))
        or settings.get("function_type") == "lambda"
        or (isinstance(function, dict) and function.get("class_name") == "__lambda__")
    )


def _is_pure(function: Any) -> bool:
    return (
        isinstance(function, str)
        and _PURE.fullmatch(function) is not None
        and not any(part in _IMPURE for part in function.split("."))
    )


def _entries(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        if isinstance(value.get("class_name"), str):
            yield value
        for inner in value.values():
            yield from _entries(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _entries(inner)


def _layer_entries(value: Any) -> Iterator[dict[str, Any]]:
    """The model, its layers at any depth, and what wrappers wrap."""
    if not isinstance(value, dict) or not isinstance(value.get("class_name"), str):
        return
    yield value
    settings = value.get("config")
    if isinstance(settings, list):
        inner = settings
    elif isinstance(settings, dict):
        inner = [settings.get(key) for key in ("layer", "backward_layer", "cell")]
        inner += settings["layers"] if isinstance(settings.get("layers"), list) else []
        inner += settings["cells"] if isinstance(settings.get("cells"), list) else []
    else:
        inner = []
    for one in inner:
        yield from _layer_entries(one)
