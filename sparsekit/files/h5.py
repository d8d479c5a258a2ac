"""Read the HDF5 files that Keras 1, 2 and 3 write, checking everything before it is used."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from ..errors import FileError
from .masks_group import GROUP, unpacked
from .stored import StoredArray, StoredMasks, StoredModel

# What HDF5's own compression can reach at most on constant data is about 1000; a file that claims more is hostile.
_MAX_RATIO = 1100


@contextlib.contextmanager
def opened(path: Path) -> Iterator[h5py.File]:
    """Open an HDF5 file for reading.

    Raises:
        FileError: if it is damaged.
    """
    with guarded(path):
        file = h5py.File(path, "r")
    try:
        yield file
    finally:
        with guarded(path):
            file.close()


@contextlib.contextmanager
def guarded(path: Path) -> Iterator[None]:
    """Whatever h5py says about a damaged file, in one sentence. Only reading goes in here, nothing that builds."""
    try:
        yield
    except FileError:
        raise
    except (OSError, RuntimeError, KeyError, ValueError, TypeError, AttributeError, MemoryError) as error:
        raise FileError(
            f"'{path}' is a damaged HDF5 file (truncated or changed bytes); get the file again from where it came."
        ) from error


def read_h5(file: h5py.File, path: Path) -> StoredModel:
    """Everything that a Keras .h5 file holds; the arrays are read later, while the file is open.

    Raises:
        FileError: if the file is damaged.
    """
    with guarded(path):
        return _read(file, path)


def _read(file: h5py.File, path: Path) -> StoredModel:
    config = read_json(file, "model_config", path)
    if config is not None and not isinstance(config, dict):
        raise FileError(f"The model config in '{path}' is no dictionary; the file is damaged.")
    weights = file
    if "layer_names" not in file.attrs and "layer_names0" not in file.attrs:
        weights = group(file, "model_weights", path) if "model_weights" in file else None
    layers, top_level = [], []
    version = text(file.attrs.get("keras_version"))
    if weights is not None:
        version = version or text(weights.attrs.get("keras_version"))
        for name in names(weights, "layer_names"):
            layers.append((name, _arrays(group(weights, name, path), path)))
        if "top_level_model_weights" in weights:
            top_level = _arrays(group(weights, "top_level_model_weights", path), path)
    optimizer = []
    if "optimizer_weights" in file:
        optimizer = _arrays(group(file, "optimizer_weights", path), path)
    training = read_json(file, "training_config", path)
    return StoredModel(
        format="h5",
        keras_version=version,
        config=config,
        training_config=training if isinstance(training, dict) else None,
        layers=layers,
        top_level=top_level,
        optimizer=optimizer,
        masks=_masks(file, path),
    )


def _masks(file: h5py.File, path: Path) -> StoredMasks | None:
    if GROUP not in file:
        return None
    masks = group(file, GROUP, path)
    return unpacked(lambda name: array(masks, name, path).read(), path)


def _arrays(owner: h5py.Group, path: Path) -> list[StoredArray]:
    return [array(owner, name, path) for name in names(owner, "weight_names")]


def array(owner: h5py.Group, name: str, path: Path) -> StoredArray:
    """One dataset, checked: it lies in this file, holds numbers and is not larger than the file can hold."""
    found = _get(owner, name, path)
    if not isinstance(found, h5py.Dataset):
        raise FileError(f"'{path}' is damaged: '{name}' should be an array of numbers.")
    if found.external or found.is_virtual:
        raise FileError(f"'{path}' keeps '{name}' in another file, which is not opened; save the model into one file.")
    if found.dtype.kind not in "fiub" and found.dtype.name != "bfloat16":
        raise FileError(f"'{path}' holds '{name}' as {found.dtype}, which is no number; the file is damaged.")
    stored = found.id.get_storage_size()
    if found.nbytes > stored * (_MAX_RATIO if found.chunks else 1):
        raise FileError(
            f"'{path}' is damaged: '{name}' claims {found.nbytes:,} bytes and has {stored:,} in the file."
        )

    def read() -> np.ndarray:
        with guarded(path):
            return np.asarray(found[()])

    return StoredArray(name, tuple(found.shape), read)


def group(owner: h5py.Group, name: str, path: Path) -> h5py.Group:
    found = _get(owner, name, path)
    if not isinstance(found, h5py.Group):
        raise FileError(f"'{path}' is damaged: '{name}' should be a group.")
    return found


def _get(owner: h5py.Group, name: str, path: Path) -> Any:
    """A member by its path; links that lead to other files are not followed."""
    here: Any = owner
    for part in name.split("/"):
        if not part:
            continue
        if not isinstance(here, h5py.Group) or part not in here:
            raise FileError(f"'{path}' is damaged or incomplete: it lists '{name}', which is not there.")
        if isinstance(here.get(part, getlink=True), h5py.ExternalLink):
            raise FileError(f"'{path}' links '{name}' to another file, which is not opened.")
        here = here[part]
    return here


def names(owner: h5py.Group, attribute: str) -> list[str]:
    """A list of names, which Keras cuts into numbered pieces if it is too long for one attribute."""
    if attribute in owner.attrs:
        return [text(name) for name in np.ravel(owner.attrs[attribute])]
    found: list[str] = []
    number = 0
    while f"{attribute}{number}" in owner.attrs:
        found += [text(name) for name in np.ravel(owner.attrs[f"{attribute}{number}"])]
        number += 1
    return found


def text(value: Any) -> str:
    """A string attribute, which is bytes in old files."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, np.ndarray) and value.size == 1:
        return text(value.reshape(-1)[0])
    return "" if value is None or isinstance(value, h5py.Empty) else str(value)


def read_json(file: h5py.File, attribute: str, path: Path) -> Any:
    """A JSON attribute, or None."""
    if attribute not in file.attrs:
        return None
    try:
        return json.loads(text(file.attrs[attribute]))
    except (ValueError, RecursionError) as error:
        raise FileError(f"The {attribute} in '{path}' is no valid JSON; the file is damaged.") from error
