"""What a model file holds, read without building the model."""

from __future__ import annotations

import json
import math
import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import FileError
from ..weights import is_kernel
from .keras_zip import as_stored
from .loading import candidates, read_stored, sniff
from .repairs import MODELS, Applied, repair
from .safety import check_known, check_safe
from .sparse_file import Packer
from .stored import StoredArray, StoredModel


@dataclass(frozen=True)
class StoredWeight:
    """One weight in a file.

    Args:
        name: as the file calls it.
        layer: the layer that it belongs to.
        shape: its shape.
        zeros: how many of its values are exactly zero.
        prunable: whether `prune` would take it by default.
    """

    name: str
    layer: str
    shape: tuple[int, ...]
    zeros: int
    prunable: bool

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def sparsity(self) -> float:
        return self.zeros / self.size if self.size else 0.0


@dataclass(frozen=True)
class FileInfo:
    """What a model file holds.

    Args:
        path: the file.
        format: `"h5"`, `"sparse.h5"`, `"keras"`, or `"unknown"`.
        keras_version: version that wrote it; `""` if it does not say.
        problem: why it cannot be loaded as it is, in one sentence; None if nothing is seen that would stop it.
        repairs: what `load` changes in its config in memory, as `Applied(name, layer)`.
        layers: `(name, class)` of every layer, nested ones included.
        weights: its weights in the file's order.
        optimizer: class of the optimizer that it was trained with, or None.
        loss: the loss that it was trained with, or None.
        masked: number of weights that have a mask in the file.
        raw_bytes: size of the file.
        gzip_bytes: size of the file after gzip, or None where the file could not be read.
        sparse_bytes: about the size that it has, or would have, as a .sparse.h5; None where it could not be read.
    """

    path: Path
    format: str
    keras_version: str
    problem: str | None
    repairs: tuple[Applied, ...]
    layers: tuple[tuple[str, str], ...]
    weights: tuple[StoredWeight, ...]
    optimizer: str | None
    loss: Any
    masked: int
    raw_bytes: int
    gzip_bytes: int | None
    sparse_bytes: int | None

    @property
    def parameters(self) -> int:
        return sum(weight.size for weight in self.weights)

    @property
    def sparsity(self) -> float:
        """Fraction of the prunable weights' values that are exactly zero."""
        prunable = [weight for weight in self.weights if weight.prunable]
        size = sum(weight.size for weight in prunable)
        return sum(weight.zeros for weight in prunable) / size if size else 0.0


def inspect_file(path: str | os.PathLike[str], *, custom_objects: dict[str, Any] | None = None) -> FileInfo:
    """Say what a model file holds, also for files that cannot be loaded.

    Args:
        path: the file.
        custom_objects: as for `load`; what is given here is not reported as missing.

    Raises:
        FileError: if there is no such file.
    """
    path = Path(path)
    if not path.is_file():
        sniff(path)
    raw, zipped = path.stat().st_size, None
    stored, weights, repairs, problem, kind, sparse = None, [], [], None, "unknown", None
    try:
        kind = sniff(path)
        zipped = _gzip_size(path)
        if kind == "keras":
            stored = as_stored(path)
            weights = _weights(stored)
        else:
            stored = read_stored(path)
            kind = stored.format
            weights = _weights(stored)
        sparse = _sparse_size(stored)
        repairs = _repairs(stored, custom_objects, path)
    except FileError as error:
        problem = str(error)
    training = (stored.training_config if stored else None) or {}
    optimizer = training.get("optimizer_config")
    return FileInfo(
        path=path,
        format=kind,
        keras_version=stored.keras_version if stored else "",
        problem=problem,
        repairs=tuple(repairs),
        layers=tuple(_layers(stored.config)) if stored and stored.config else (),
        weights=tuple(weights),
        optimizer=str(optimizer.get("class_name")).split(">")[-1] if isinstance(optimizer, dict) else None,
        loss=training.get("loss"),
        masked=len(stored.masks) if stored else 0,
        raw_bytes=raw,
        gzip_bytes=zipped,
        sparse_bytes=sparse,
    )


def _repairs(stored: StoredModel, custom_objects: dict[str, Any] | None, path: Path) -> list[Applied]:
    """The repairs that the first Keras to be tried needs; finds the reason too if the model cannot be built."""
    if stored.config is None:
        raise FileError(
            f"'{path}' holds weights only and no model; give the model, or a function that builds it: "
            "sparsekit.load(path, model=build)."
        )
    flavours = candidates(stored, custom_objects, None, path)
    check_safe(stored.config, path)
    check_safe(stored.training_config, path)
    config, applied = stored.config, []
    # A .keras file is opened by the Keras that wrote it.
    if stored.format != "keras":
        config, applied = repair(config, flavours[0], stored.keras_version, stored.backend)
    check_known(config, flavours, custom_objects, path)
    return applied


def _weights(stored: StoredModel) -> list[StoredWeight]:
    groups = [*stored.layers, ("", stored.top_level)]
    return [_weight(array, layer) for layer, arrays in groups for array in arrays]


def _weight(array: StoredArray, layer: str) -> StoredWeight:
    values = array.read()
    zeros = values.size - int(np.count_nonzero(values))
    role = array.name.split(":")[0].rsplit("/", 1)[-1]
    floating = values.dtype.kind == "f" or values.dtype.name == "bfloat16"
    return StoredWeight(array.name, layer, array.shape, zeros, floating and len(array.shape) >= 2 and is_kernel(role))


def _layers(config: Any) -> list[tuple[str, str]]:
    """Name and class of each layer; models are gone into."""
    settings = config.get("config")
    entries = settings.get("layers", []) if isinstance(settings, dict) else settings
    found = []
    for entry in entries if isinstance(entries, list) else []:
        if not isinstance(entry, dict):
            continue
        kind, inner = str(entry.get("class_name")), entry.get("config")
        name = inner.get("name") if isinstance(inner, dict) else entry.get("name")
        found.append((str(name), kind.split(">")[-1]))
        if kind in MODELS:
            found += _layers(entry)
    return found


def _sparse_size(stored: StoredModel) -> int:
    packer = Packer()
    for _, arrays in [*stored.layers, ("", stored.top_level), ("", stored.optimizer)]:
        for array in arrays:
            packer.add(array.read())
    head = [stored.config, stored.training_config, packer.table]
    return packer.size + len(zlib.compress(json.dumps(head).encode(), 9))


def _gzip_size(path: Path) -> int:
    packer, size = zlib.compressobj(6, wbits=31), 0
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            size += len(packer.compress(block))
    return size + len(packer.flush())
