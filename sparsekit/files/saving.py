"""Write a model as a plain Keras file that opens without sparsekit, with its masks riding along."""

from __future__ import annotations

import os
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import FileError, SparsekitWarning
from ..flavour import Flavour, flavour_of
from ..frozen import frozen_masks
from .atomic import check_name, h5_file, replacing
from .checksums import FLAVOUR, add_checksums
from .compiling import spell_out
from .h5 import set_optimizer_aside
from .masks_group import MEMBER, pack, write_masks
from .sparse_file import write_sparse


def save(model: Any, path: str | os.PathLike[str], *, overwrite: bool = True, include_optimizer: bool = True) -> None:
    """Write a model to a plain Keras file: .h5, .hdf5 or .keras, in the Keras that it belongs to; or to a .sparse.h5.

    The file appears whole or not at all. Masks ride along, one bit a weight, where every Keras ignores them. A plain
    file opens without sparsekit; a .sparse.h5 is far smaller and opens with `sparsekit.load` only. Checksums ride
    along too: `sparsekit.load` refuses a file of which a bit has changed, whereas plain Keras takes it. An HDF5 file is
    made in memory first.

    In the .h5 of a Keras 3 model the optimizer's moments and number of updates are kept where `sparsekit.load` finds
    them and Keras' own loader does not: as soon as it finds any of them, it builds the optimizer for none of the
    layers' weights, and the next fit fails. With plain Keras such a file comes with a fresh optimizer of the same
    settings; a .keras file keeps the optimizer for both.

    Args:
        model: a Keras model.
        path: the file to write; its ending decides the format.
        overwrite: whether a file that is there may be replaced.
        include_optimizer: False leaves the optimizer's state out, which is often two thirds of the file.

    Warns:
        SparsekitWarning: if pruned weights have come back, or if an HDF5 file cannot rebuild a model that is a class
            of one's own.

    Raises:
        ModelTypeError: if `model` is no Keras model.
        FileError: if the model cannot be written in this format, or the file cannot be written.
    """
    flavour = flavour_of(model)
    target = Path(path)
    name = target.name.lower()
    check_name(target)
    if not name.endswith((".h5", ".hdf5", ".keras")):
        raise FileError(f"'{target}' has no known ending; give a name in .h5, .hdf5, .keras or .sparse.h5.")
    broken = frozen_masks(model).violations()
    if broken:
        warnings.warn(
            f"{sum(broken.values())} pruned weights are not zero ({', '.join(list(broken)[:3])}) and are saved as they "
            "are: something but sparsekit.retrain has trained the model since, for example a plain fit.",
            SparsekitWarning,
            stacklevel=2,
        )
    with replacing(target, overwrite=overwrite) as temporary:
        try:
            if name.endswith(".sparse.h5"):
                write_sparse(model, flavour, temporary, include_optimizer)
            elif name.endswith(".keras"):
                flavour.save_keras(model, temporary, include_optimizer)
                _append_masks(temporary, model)
            else:
                with h5_file(temporary) as file:
                    flavour.write_h5(model, file, include_optimizer)
                    if flavour.is_keras3:
                        set_optimizer_aside(file)
                        spell_out(file, flavour)
                    file.attrs[FLAVOUR] = flavour.name
                    write_masks(file, model)
                    add_checksums(file)
        except NotImplementedError as error:
            raise FileError(
                f"'{type(model).__name__}' has no get_config(), which a file needs to rebuild it; "
                "add one, or save only its weights with model.save_weights()."
            ) from error
    if not name.endswith(".keras") and _is_own_class(model, flavour):
        warnings.warn(
            f"'{type(model).__name__}' is a model class of your own, whose weights '{target.name}' cannot make by "
            "itself; open it with sparsekit.load(path, model=build), where build() makes the model and calls it once, "
            "or save a .keras file.",
            SparsekitWarning,
            stacklevel=2,
        )


def _append_masks(path: Path, model: Any) -> None:
    arrays = pack(model)
    if not arrays:
        return
    with zipfile.ZipFile(path, "a") as archive, archive.open(MEMBER, "w") as member:
        np.savez_compressed(member, allow_pickle=False, **arrays)


def _is_own_class(model: Any, flavour: Flavour) -> bool:
    """Whether a model is neither Sequential nor made of a graph of layers, so that its config does not list them."""
    return not isinstance(model, flavour.keras.Sequential) and not hasattr(model, "_nodes_by_depth")
