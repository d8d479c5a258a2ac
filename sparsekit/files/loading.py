"""Open a saved model, whichever Keras wrote it and in whichever format."""

from __future__ import annotations

import copy
import os
import warnings
import zipfile
from pathlib import Path
from typing import Any

from ..errors import FileError, SparsekitWarning
from ..flavour import NAMES, get
from ..frozen import attach
from ..masks import Mask, MaskSet
from ..weights import all_weights
from .compiling import compile_as_stored
from .h5 import opened, read_h5
from .keras_zip import keras_version, read_masks
from .rebuild import build
from .stored import StoredMasks

_HDF5_MAGIC = b"\x89HDF\r\n\x1a\n"


def load(
    path: str | os.PathLike[str],
    *,
    custom_objects: dict[str, Any] | None = None,
    flavour: str | None = None,
    safe: bool = True,
    model: Any = None,
) -> Any:
    """Open a saved model: .h5, .hdf5, .keras or .sparse.h5, written by Keras 2, tf_keras or Keras 3.

    The file is never changed. The model comes compiled if the file says how, and with its masks if it carries any.

    Args:
        path: the file.
        custom_objects: name -> class or function, for layers, losses and metrics of your own.
        flavour: `"keras"` or `"tf_keras"` to force one. By default a Keras 3 model where it predicts the same.
        safe: False allows files that bring Python code along (Lambda layers); the code runs.
        model: for files that hold weights only: a model of the same layers, or a function that builds it.

    Returns:
        A `keras.Model` or a `tf_keras.Model`.

    Raises:
        FileError: if the file cannot be opened, in one sentence that names the reason and the way out.
    """
    path = Path(path)
    if flavour is not None and flavour not in NAMES:
        raise FileError(f"flavour={flavour!r} is not known; give 'keras' (Keras 3) or 'tf_keras'.")
    kind = sniff(path)
    if kind == "keras":
        version = keras_version(path)
        chosen = get(flavour or ("keras" if version.startswith("3") else "tf_keras"))
        loaded = chosen.keras.models.load_model(path, custom_objects=custom_objects, safe_mode=safe)
        masks = read_masks(path)
        if masks is not None:
            restore_masks(loaded, masks, path)
        return loaded
    with opened(path) as file:
        stored = read_h5(file, path)
        chosen = get(flavour or ("keras" if stored.major >= 3 else "tf_keras"))
        loaded = build(stored, copy.deepcopy(stored.config), chosen, custom_objects, path)
        for note in compile_as_stored(loaded, stored, chosen, custom_objects):
            warnings.warn(note, SparsekitWarning, stacklevel=2)
        if stored.masks is not None:
            restore_masks(loaded, stored.masks, path)
    return loaded


def sniff(path: Path) -> str:
    """Which format a file has, by its first bytes: `"h5"` or `"keras"`.

    Raises:
        FileError: if there is no such file or it is neither.
    """
    if not path.exists():
        raise FileError(f"There is no file '{path}'.")
    if path.is_dir():
        raise FileError(
            f"'{path}' is a folder (a TensorFlow SavedModel?); sparsekit opens .h5, .hdf5, .keras and .sparse.h5 files."
        )
    try:
        with open(path, "rb") as file:
            head = file.read(8)
    except OSError as error:
        raise FileError(f"'{path}' cannot be read: {error.strerror}.") from error
    if head == _HDF5_MAGIC:
        return "h5"
    if zipfile.is_zipfile(path):
        return "keras"
    raise FileError(
        f"'{path}' is neither an HDF5 nor a .keras file; sparsekit opens .h5, .hdf5, .keras and .sparse.h5 files."
    )


def restore_masks(model: Any, stored: StoredMasks, path: Path) -> None:
    """Freeze the masks of a file for the model that was loaded from it."""
    refs = all_weights(model)
    known = {ref.path for ref in refs}
    masks, targets = [], {}
    for name in stored.masks:
        mask = stored.masks.mask(name)
        if name not in known:
            position = stored.positions[name]
            if position >= len(refs) or refs[position].shape != mask.shape:
                raise FileError(f"'{path}' carries a mask for '{name}', which its model does not have.")
            mask = Mask(refs[position].path, mask.keep, mask.pattern)
        masks.append(mask)
        if name in stored.targets:
            targets[mask.path] = stored.targets[name]
    attach(model, MaskSet(masks), targets)
