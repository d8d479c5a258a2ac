"""Open a saved model, whichever Keras wrote it and in whichever format."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ArgumentError, FileError, MaskError, ModelTypeError, SparsekitWarning
from ..flavour import NAMES, Flavour, flavour_of, get
from ..frozen import attach
from ..masks import Mask, MaskSet
from ..weights import all_weights
from .compiling import check_training, compile_as_stored
from .equivalence import same_predictions
from .h5 import read_h5
from .hdf5_index import index
from .keras_zip import as_stored, read_masks
from .rebuild import SLACK, build, check_rules, put_weights, why_not_built
from .repairs import repair
from .safety import check_known, check_safe
from .sparse_file import MARK, read_sparse
from .stored import StoredMask, StoredModel

_GIVE_MODEL = ", or a function that builds the model: sparsekit.load(path, model=build)"
_HDF5_MAGIC = b"\x89HDF\r\n\x1a\n"


def load(
    path: str | os.PathLike[str],
    *,
    custom_objects: dict[str, Any] | None = None,
    flavour: str | None = None,
    safe: bool = True,
    model: Any = None,
) -> Any:
    """Open a saved model: .h5, .hdf5, .keras or .sparse.h5, written by Keras 1, 2 or 3 or by tf_keras.

    The file is never changed. The model comes compiled if the file says how, and with its masks if it carries any.

    Args:
        path: the file.
        custom_objects: name -> class or function, for layers, losses and metrics of your own.
        flavour: `"keras"` or `"tf_keras"` to force one. By default a Keras 3 model where it predicts the same as the
            tf_keras model of the same file.
        safe: False allows files that bring Python code along (Lambda layers); the code runs.
        model: for files that hold weights only, or the weights of a model class of your own: a model of the same
            layers, or a function that builds it.

    Returns:
        A `keras.Model` or a `tf_keras.Model`.

    Raises:
        FileError: if the file cannot be opened, in one sentence that names the reason and the way out.
    """
    path = Path(path)
    if flavour is not None and flavour not in NAMES:
        raise ArgumentError(f"flavour={flavour!r} is not known; give 'keras' (Keras 3) or 'tf_keras'.")
    if sniff(path) == "keras":
        if model is not None:
            raise FileError(f"'{path}' holds a whole model; leave model= out.")
        loaded = _load_keras(path, custom_objects, flavour, safe)
        restore_masks(loaded, read_masks(path), path)
        return loaded
    stored = read_stored(path)
    if model is not None:
        loaded, notes = _fill(model, stored, path), []
    else:
        loaded, notes = _build(stored, path, custom_objects, flavour, safe)
    for note in notes:
        warnings.warn(note, SparsekitWarning, stacklevel=2)
    restore_masks(loaded, stored.masks, path)
    return loaded


def sniff(path: Path) -> str:
    """Which format a file has, by its first bytes: `"h5"` or `"keras"`.

    Raises:
        FileError: if there is no such file or it is neither.
    """
    if not os.path.exists(path):
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
    if not head:
        raise FileError(f"'{path}' is empty; the download or copy of it was cut off.")
    if head == _HDF5_MAGIC:
        return "h5"
    if zipfile.is_zipfile(path):
        return "keras"
    if head.startswith(b"PK"):
        raise FileError(f"'{path}' is a damaged .keras file; get the file again from where it came.")
    if head.startswith((b"version ", b"<!DOCTYP", b"<html")):
        raise FileError(
            f"'{path}' is a text file, perhaps a Git LFS pointer or a web page instead of the model; download it again."
        )
    raise FileError(
        f"'{path}' is neither an HDF5 nor a .keras file; sparsekit opens .h5, .hdf5, .keras and .sparse.h5 files."
    )


def read_stored(path: Path) -> StoredModel:
    """What an HDF5 file holds, plain or sparse.

    Raises:
        FileError: if it is damaged.
    """
    file = index(path)
    return read_sparse(file) if MARK in file.attributes else read_h5(file)


def candidates(
    stored: StoredModel, custom_objects: dict[str, Any] | None, flavour: str | None, path: Path
) -> list[Flavour]:
    """The Kerases in which a file may be built, the wanted one first.

    Raises:
        FileError: if the file comes from a Keras that is newer than any known.
    """
    if stored.major > 3:
        raise FileError(f"'{path}' was written by Keras {stored.keras_version}; sparsekit opens files up to Keras 3.")
    if flavour is not None:
        return [get(flavour)]
    own = _flavour_of_objects(custom_objects)
    if own is not None:
        return [own]
    if stored.flavour in NAMES:
        # A file that sparsekit wrote comes back as the model that it was.
        return [get(stored.flavour)]
    if stored.major == 3:
        return [get("keras")]
    found = []
    for name in NAMES:
        try:
            found.append(get(name))
        except ModelTypeError:
            # One of the two is enough.
            continue
    return found or [get("keras")]


def _flavour_of_objects(custom_objects: dict[str, Any] | None) -> Flavour | None:
    """The Keras of the user's own layers: a layer of one does not work in the other."""
    for name in NAMES:
        for one in (custom_objects or {}).values():
            if isinstance(one, type) and any(base.__module__.split(".")[0] == name for base in one.__mro__[1:]):
                return get(name)
    return None


def _build(
    stored: StoredModel,
    path: Path,
    custom_objects: dict[str, Any] | None,
    flavour: str | None,
    safe: bool,
) -> tuple[Any, list[str]]:
    """Build the model of a file that holds one, in the best Keras for it."""
    if stored.config is None:
        if not stored.layers:
            raise FileError(f"'{path}' is an HDF5 file, but no Keras model: it has neither a config nor layers.")
        count = sum(len(arrays) for _, arrays in stored.layers)
        raise FileError(
            f"'{path}' holds weights only ({count} arrays) and no model; give the model, or a function that builds it: "
            "sparsekit.load(path, model=build)."
        )
    flavours = candidates(stored, custom_objects, flavour, path)
    if safe:
        check_safe(stored.config, path)
        check_safe(stored.training_config, path)
    settings = stored.config.get("config")
    # The config of a model class of the user's own lists no layers, and the class alone often makes no weights.
    listed = not isinstance(settings, dict) or "layers" in settings
    built: dict[str, Any] = {}
    errors: list[FileError] = []
    for one in flavours:
        try:
            config, _ = repair(stored.config, one, stored.keras_version, stored.backend)
        except FileError as error:
            errors.append(error)
            continue
        check_known(config, flavours, custom_objects, path, "" if listed else _GIVE_MODEL)
        try:
            built[one.name] = build(stored, config, one, custom_objects, path, safe)
        except FileError as error:
            errors.append(error)
    if not built:
        raise errors[0]
    if len(built) == 2 and not same_predictions(built["tf_keras"], built["keras"]):
        del built["keras"]
    model = built.get("keras", built.get("tf_keras"))
    return model, compile_as_stored(model, stored, flavour_of(model), custom_objects)


def _fill(model: Any, stored: StoredModel, path: Path) -> Any:
    """Put the weights of a file into the model that the user gave or builds."""
    built: Any = model() if callable(model) and not hasattr(model, "get_weights") else model
    flavour = flavour_of(built)
    if stored.format != "weights.h5":
        put_weights(built, stored, flavour, path)
        return built
    before = built.get_weights()
    try:
        with _named(path, ".weights.h5") as named:
            flavour.load_weights(built, named)
    except Exception as error:
        built.set_weights(before)
        raise FileError(
            f"The weights in '{path}' do not fit the model '{built.name}'; give the model that the file was saved from."
        ) from error
    return built


@contextlib.contextmanager
def _named(path: Path, ending: str) -> Iterator[Path]:
    """The file under a name with the ending by which Keras picks the format."""
    if path.name.endswith(ending):
        yield path
        return
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / f"model{ending}"
        shutil.copyfile(path, copy)
        yield copy


def _load_keras(path: Path, custom_objects: dict[str, Any] | None, flavour: str | None, safe: bool) -> Any:
    """Open a .keras file with the loader of the Keras that wrote it."""
    stored = as_stored(path)
    if safe:
        check_safe(stored.config, path)
    own = get("keras" if stored.major == 3 else "tf_keras")
    if stored.major > 3 or (flavour is not None and flavour != own.name):
        raise FileError(
            f"'{path}' was written by Keras {stored.keras_version}; "
            + (
                "sparsekit opens files up to Keras 3."
                if stored.major > 3
                else f"a .keras file opens in its own Keras only: leave flavour out, or give {own.name!r}."
            )
        )
    check_known(stored.config, [own], custom_objects, path)
    limit = 2 * stored.size + SLACK
    try:
        check_training(stored, own, custom_objects)
        with _named(path, ".keras") as named:
            model = own.load_keras(named, custom_objects, safe, limit)
    except Exception as error:
        raise FileError(why_not_built(error, own, path)) from error
    check_rules(model, own, path)
    return model


def restore_masks(model: Any, stored: list[StoredMask], path: Path) -> None:
    """Freeze the masks of a file for the model that was loaded from it."""
    if not stored:
        return
    refs = all_weights(model)
    known = {ref.path: ref for ref in refs}
    masks, targets = [], {}
    for one in stored:
        ref = known.get(one.path)
        if ref is None or ref.shape != one.shape:
            ref = refs[one.position] if 0 <= one.position < len(refs) else None
        if ref is None or ref.shape != one.shape:
            raise FileError(f"'{path}' carries a mask for '{one.path}' {one.shape}, which its model does not have.")
        masks.append(Mask(ref.path, ref.numpy() != 0 if one.keep is None else one.keep, one.pattern))
        if one.target is not None:
            targets[ref.path] = one.target
    try:
        restored = MaskSet(masks)
    except MaskError as error:
        raise FileError(f"'{path}' carries two masks for one weight; the file is damaged.") from error
    changed = sum(int(np.count_nonzero(known[mask.path].numpy()[~mask.keep])) for mask in masks)
    if changed:
        warnings.warn(
            f"{changed} weights in '{path}' are not zero where its masks say so, because something else trained and "
            "saved it; they are zero now.",
            SparsekitWarning,
            stacklevel=3,
        )
    attach(model, restored, targets)
