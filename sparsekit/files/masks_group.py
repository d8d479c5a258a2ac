"""Masks inside a model file: a group of an .h5, or one member of a .keras zip, which every Keras ignores."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from ..errors import FileError
from ..frozen import frozen_masks
from ..masks import unpack
from ..weights import all_weights, read
from .configs import parsed_dict
from .stored import StoredMask

GROUP = "sparsekit_masks"
MEMBER = "sparsekit_masks.npz"
_VERSION = 1


def pack(model: Any, *, zeros_tell: bool = False) -> dict[str, np.ndarray]:
    """A model's masks as arrays of bytes: an index in JSON and one bit a position; empty if it has no masks.

    Args:
        model: a model.
        zeros_tell: leave the bits of a mask out where the weight is zero in the same places and nowhere else.
    """
    frozen = list(frozen_masks(model))
    if not frozen:
        return {}
    positions = {ref.path: position for position, ref in enumerate(all_weights(model))}
    index, arrays = [], {}
    for number, one in enumerate(frozen):
        keep = read(one.keep)
        index.append(
            {
                "path": one.path,
                "shape": list(keep.shape),
                "pattern": one.pattern,
                "target": one.target,
                "position": positions[one.path],
            }
        )
        if not (zeros_tell and np.array_equal(keep, read(one.variable) != 0)):
            arrays[f"bits_{number}"] = np.packbits(keep.reshape(-1))
    head = json.dumps({"version": _VERSION, "masks": index}).encode()
    return {"index": np.frombuffer(head, dtype=np.uint8), **arrays}


def unpacked(names: Collection[str], read: Callable[[str], np.ndarray], path: Path) -> list[StoredMask]:
    """Read what `pack` made.

    Args:
        names: the arrays that are there.
        read: gives the array of a name.
        path: the file, for messages.

    Raises:
        FileError: if the masks are damaged or come from a later version.
    """
    if not names:
        return []
    try:
        head = parsed_dict(read("index").tobytes(), "list of masks", path)
        if head["version"] > _VERSION:
            raise FileError(f"The masks in '{path}' were written by a later sparsekit; run `pip install -U sparsekit`.")
        masks = []
        for number, entry in enumerate(head["masks"]):
            shape = tuple(int(n) for n in entry["shape"])
            bits = f"bits_{number}"
            masks.append(
                StoredMask(
                    path=str(entry["path"]),
                    shape=shape,
                    pattern=str(entry["pattern"]),
                    target=None if entry["target"] is None else float(entry["target"]),
                    position=int(entry["position"]),
                    keep=unpack(read(bits), shape) if bits in names else None,
                )
            )
        return masks
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        if isinstance(error, FileError):
            raise
        raise FileError(
            f"The masks in '{path}' are damaged; open it with plain Keras and call sparsekit.freeze on the model."
        ) from error


def write_masks(file: h5py.File, model: Any) -> None:
    """Put a model's masks into an open .h5 file; nothing if it has none."""
    arrays = pack(model)
    if not arrays:
        return
    group = file.create_group(GROUP)
    for name, array in arrays.items():
        group.create_dataset(name, data=array)
