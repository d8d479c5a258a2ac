"""Read .keras files: a zip that holds the config, the weights and, from us, the masks."""

from __future__ import annotations

import io
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import FileError
from .configs import parsed_dict, version
from .hdf5_index import index
from .masks_group import MEMBER, unpacked
from .stored import StoredArray, StoredMask, StoredModel

_DAMAGED = (zipfile.BadZipFile, OSError, ValueError, RecursionError, EOFError, NotImplementedError, MemoryError)
# Deflate reaches about 1000 on constant data; more is a bomb.
_MAX_RATIO = 1100


def member(path: Path, name: str) -> bytes:
    """One member of the zip.

    Raises:
        FileError: if it is missing, damaged or far larger than the file.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            info = archive.getinfo(name)
            if info.file_size > _MAX_RATIO * max(path.stat().st_size, 1):
                raise FileError(f"'{name}' in '{path}' claims {info.file_size:,} bytes; the file is damaged.")
            return archive.read(info)
    except KeyError as error:
        raise FileError(f"'{path}' is a zip file without '{name}', so no .keras file.") from error
    except FileError:
        raise
    except Exception as error:
        # zlib and the zip reader have errors of their own that share no base.
        raise FileError(f"'{path}' is a damaged .keras file; get the file again from where it came.") from error


def read_json(path: Path, name: str) -> dict[str, Any]:
    """A JSON member of the zip.

    Raises:
        FileError: if it is missing or damaged.
    """
    return parsed_dict(member(path, name), f"member '{name}'", path)


def read_masks(path: Path) -> list[StoredMask]:
    """The masks in the zip."""
    with zipfile.ZipFile(path) as archive:
        if MEMBER not in archive.namelist():
            return []
    try:
        with np.load(io.BytesIO(member(path, MEMBER)), allow_pickle=False) as arrays:
            return unpacked(arrays.files, lambda name: arrays[name], path)
    except _DAMAGED as error:
        if isinstance(error, FileError):
            raise
        raise FileError(f"The masks in '{path}' are damaged.") from error


def as_stored(path: Path) -> StoredModel:
    """What a .keras file holds. Its weights are named by their place in the model's objects, not by layers.

    Raises:
        FileError: if it is damaged.
    """
    config = read_json(path, "config.json")
    written_by = version(read_json(path, "metadata.json").get("keras_version"))
    if not written_by:
        raise FileError(f"'{path}' does not say which Keras wrote it; the file is damaged.")
    arrays, optimizer = [], []
    with tempfile.TemporaryDirectory() as folder:
        weights = Path(folder) / "model.weights.h5"
        weights.write_bytes(member(path, weights.name))
        held = index(weights)
        held.check_closed()
        for dataset in held.datasets():
            values = dataset.read()
            (optimizer if dataset.name.startswith("optimizer/") else arrays).append(
                StoredArray(dataset.name, dataset.shape, lambda values=values: values)
            )
    training = config.get("compile_config")
    training = dict(training) if isinstance(training, dict) else None
    if training is not None:
        training["optimizer_config"] = training.pop("optimizer", None)
    return StoredModel(
        format="keras",
        keras_version=written_by,
        config=config,
        training_config=training,
        layers=[("", arrays)] if arrays else [],
        top_level=[],
        optimizer=optimizer,
        masks=read_masks(path),
    )
