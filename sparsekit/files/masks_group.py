"""Masks inside a model file: a group of an .h5, or one member of a .keras zip, which every Keras ignores."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from ..errors import FileError
from ..frozen import frozen_masks
from ..masks import Mask, MaskSet, unpack
from ..weights import all_weights
from .stored import StoredMasks

GROUP = "sparsekit_masks"
MEMBER = "sparsekit_masks.npz"
_VERSION = 1


def pack(model: Any) -> dict[str, np.ndarray] | None:
    """A model's masks as arrays of bytes: an index in JSON and one bit a position; None if it has no masks."""
    frozen = list(frozen_masks(model))
    if not frozen:
        return None
    positions = {ref.path: position for position, ref in enumerate(all_weights(model))}
    index, arrays = [], {}
    for number, one in enumerate(frozen):
        mask = one.mask()
        index.append(
            {
                "path": one.path,
                "shape": list(mask.shape),
                "pattern": mask.pattern,
                "target": one.target,
                "position": positions[one.path],
            }
        )
        arrays[f"bits_{number}"] = np.packbits(mask.keep.reshape(-1))
    head = json.dumps({"version": _VERSION, "masks": index}).encode()
    return {"index": np.frombuffer(head, dtype=np.uint8), **arrays}


def unpacked(read: Callable[[str], np.ndarray], path: Path) -> StoredMasks:
    """Read what `pack` made.

    Args:
        read: gives the array of a name.
        path: the file, for messages.

    Raises:
        FileError: if the masks are damaged or come from a later version.
    """
    try:
        head = json.loads(read("index").tobytes())
        if head["version"] > _VERSION:
            raise FileError(
                f"The masks in '{path}' were written by a later sparsekit; run `pip install -U sparsekit`."
            )
        masks, targets, positions = [], {}, {}
        for number, entry in enumerate(head["masks"]):
            name, shape = str(entry["path"]), tuple(int(n) for n in entry["shape"])
            masks.append(Mask(name, unpack(read(f"bits_{number}"), shape), str(entry["pattern"])))
            positions[name] = int(entry["position"])
            if entry["target"] is not None:
                targets[name] = float(entry["target"])
        return StoredMasks(MaskSet(masks), targets, positions)
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        if isinstance(error, FileError):
            raise
        raise FileError(
            f"The masks in '{path}' are damaged; open it with plain Keras and call sparsekit.freeze on the model."
        ) from error


def write_masks(file: h5py.File, model: Any) -> None:
    """Put a model's masks into an open .h5 file; nothing if it has none."""
    arrays = pack(model)
    if arrays is None:
        return
    group = file.create_group(GROUP)
    for name, array in arrays.items():
        group.create_dataset(name, data=array)
