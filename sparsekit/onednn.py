"""Keep users clear of a crash of TensorFlow's own: the command line by a look at the model file before TensorFlow
starts, programs by a warning.

In TensorFlow 2.21, oneDNN's gradient of a 1x1 convolution with strides (a usual shortcut of residual networks) writes
outside its memory on some CPUs: `Conv2DBackpropFilter` with a 1x1 filter, strides 2 and an input of even height ends
the process, in a plain `fit` just as well. The setting that avoids it is read when TensorFlow is imported.
"""

from __future__ import annotations

import json
import os
import sys
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import h5py

SETTING = "TF_ENABLE_ONEDNN_OPTS"


def avoid_crash(path: Path) -> str | None:
    """Switch oneDNN off for this process if the model in the file needs that and nobody decided otherwise.

    Returns:
        One sentence to show, or None if nothing was done.
    """
    if SETTING in os.environ or "tensorflow" in sys.modules:
        return None
    names = list(strided_pointwise(_config(path)))
    if not names:
        return None
    os.environ[SETTING] = "0"
    return (
        f"{SETTING}=0 for this run, since oneDNN's gradient of 1x1 convolutions with strides "
        f"({', '.join(names[:3])}) crashes TensorFlow on some CPUs; set the variable yourself to decide."
    )


def strided_pointwise(config: Any) -> Iterator[str]:
    """Names of the layers in a model's config that are convolutions with a 1x1 kernel and strides above 1."""
    if isinstance(config, list):
        for part in config:
            yield from strided_pointwise(part)
    elif isinstance(config, dict):
        kernel, strides = config.get("kernel_size"), config.get("strides")
        if isinstance(kernel, list) and isinstance(strides, list) and set(kernel) == {1} and set(strides) != {1}:
            yield str(config.get("name", "unnamed"))
        for part in config.values():
            yield from strided_pointwise(part)


def warning_of_crash(layers: Iterable[Any]) -> str | None:
    """One sentence for a program that is about to train these layers with oneDNN on; None if there is no need."""
    if SETTING in os.environ:
        return None
    names = [
        layer.name
        for layer in layers
        if _is_one(getattr(layer, "kernel_size", None)) and not _is_one(getattr(layer, "strides", (1,)))
    ]
    if not names:
        return None
    return (
        f"oneDNN's gradient of 1x1 convolutions with strides ({', '.join(names[:3])}) crashes TensorFlow on some CPUs: "
        f"set {SETTING}=0 before TensorFlow is imported to avoid it, or {SETTING}=1 to be asked no more."
    )


def _is_one(sizes: Any) -> bool:
    return isinstance(sizes, (list, tuple)) and set(sizes) == {1}


def _config(path: Path) -> Any:
    """The model's config in the file; None where there is none, which the loader then says in its own words."""
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                return json.loads(archive.read("config.json"))
        with h5py.File(path, "r") as file:
            return json.loads(file.attrs["model_config"])
    except (OSError, KeyError, ValueError, RuntimeError, TypeError, zipfile.BadZipFile, RecursionError):
        return None
