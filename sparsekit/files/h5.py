"""Read the HDF5 files that Keras 1, 2 and 3 write, checking everything before it is used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py

from ..errors import FileError
from .checksums import FLAVOUR, expect_checksums
from .configs import parsed, version
from .hdf5_index import Group
from .masks_group import GROUP, unpacked
from .stored import StoredArray, StoredMask, StoredModel

_OPTIMIZER = "optimizer_weights"
_ASIDE = "sparsekit_optimizer_weights"


def set_optimizer_aside(file: h5py.File) -> None:
    """Move the optimizer's state to where Keras 3 does not look for it.

    It would build the optimizer for none of the weights of the layers, and the next fit would fail with "Unknown
    variable". Without a state it makes a fresh one, and `load` finds the state where it is now.
    """
    if _OPTIMIZER in file:
        file.move(_OPTIMIZER, _ASIDE)


def read_h5(file: Group) -> StoredModel:
    """Everything that a Keras .h5 file holds; the arrays are read later.

    Raises:
        FileError: if the file is damaged.
    """
    expect_checksums(file)
    path = file.path
    config = _json(file, "model_config")
    if config is not None and not isinstance(config, dict):
        raise FileError(f"The model_config in '{path}' is no dictionary; the file is damaged.")
    weights: Group | None = file
    if not {"layer_names", "layer_names0"} & set(file.attributes):
        weights = file.group("model_weights") if "model_weights" in file else None
    layers, top_level = [], []
    written_by, backend = _text(file, "keras_version"), _text(file, "backend")
    if weights is not None:
        written_by, backend = written_by or _text(weights, "keras_version"), backend or _text(weights, "backend")
        layers = [(name, _arrays(weights.group(name))) for name in names(weights, "layer_names")]
        if "top_level_model_weights" in weights:
            top_level = _arrays(weights.group("top_level_model_weights"))
    if config is None and not layers:
        new = _weights_of_keras_3(file)
        if new is not None:
            return new
    training = _json(file, "training_config")
    optimizer = next((name for name in (_ASIDE, _OPTIMIZER) if name in file), None)
    return StoredModel(
        format="h5",
        keras_version=version(written_by),
        config=config,
        training_config=training if isinstance(training, dict) else None,
        layers=layers,
        top_level=top_level,
        optimizer=[] if optimizer is None else _arrays(file.group(optimizer)),
        masks=_masks(file, path),
        flavour=_text(file, FLAVOUR) or None,
        backend=backend,
    )


def _weights_of_keras_3(file: Group) -> StoredModel | None:
    """A .weights.h5 holds arrays by their place in the model's objects, not by layers."""
    if not {"layers", "_layer_checkpoint_dependencies", "vars"} & set(file.members):
        return None
    file.check_closed()
    arrays = [StoredArray(one.name, one.shape, one.read) for one in file.datasets()]
    weights = [array for array in arrays if not array.name.startswith("optimizer/")]
    return StoredModel(
        format="weights.h5",
        keras_version="3" if "layers" in file else "2",
        config=None,
        training_config=None,
        layers=[("", weights)],
        top_level=[],
        optimizer=[array for array in arrays if array.name.startswith("optimizer/")],
        masks=_masks(file, file.path),
    )


def _masks(file: Group, path: Path) -> list[StoredMask]:
    if GROUP not in file:
        return []
    masks = file.group(GROUP)
    return unpacked(list(masks.members), lambda name: masks.dataset(name).read(), path)


def _arrays(owner: Group) -> list[StoredArray]:
    found = []
    for name in names(owner, "weight_names"):
        dataset = owner.dataset(name)
        found.append(StoredArray(name, dataset.shape, dataset.read))
    return found


def names(owner: Group, attribute: str) -> list[str]:
    """A list of names, which Keras cuts into numbered pieces if it is too long for one attribute."""
    if attribute in owner.attributes:
        pieces = [owner.attributes[attribute]]
    else:
        pieces = []
        while f"{attribute}{len(pieces)}" in owner.attributes:
            pieces.append(owner.attributes[f"{attribute}{len(pieces)}"])
    return [str(name) for piece in pieces for name in (piece if isinstance(piece, list) else [piece])]


def _text(owner: Group, attribute: str) -> str:
    """A string attribute; `""` if it is not there."""
    value = owner.attributes.get(attribute)
    if isinstance(value, list):
        value = value[0] if len(value) == 1 else None
    return value if isinstance(value, str) else ""


def _json(file: Group, attribute: str) -> Any:
    """A JSON attribute, or None."""
    if attribute not in file.attributes:
        return None
    return parsed(_text(file, attribute), attribute, file.path)
