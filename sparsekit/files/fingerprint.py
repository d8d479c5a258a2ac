"""Tell one training run from another: short digests of what it began with, and the settings of its optimizer."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from ..frozen import frozen_masks
from ..weights import all_weights, read

# Beyond this many bytes an array is looked at in rows of an even distance; reading it all would be felt.
_WHOLE = 1 << 28


def of_arrays(arrays: Iterable[np.ndarray]) -> str:
    """A digest of shapes, dtypes and values."""
    digest = hashlib.blake2b(digest_size=16)
    for array in arrays:
        digest.update(f"{array.dtype} {array.shape} ".encode())
        if array.dtype.hasobject:
            digest.update(repr(array.tolist()).encode())
        elif array.size:
            rows = array[:: math.ceil(array.nbytes / _WHOLE)] if array.ndim else array
            digest.update(np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def of_weights(model: Any) -> str:
    """A digest of a model's floating weights, as the masks leave them; counters and seeds do not count."""
    frozen = frozen_masks(model)
    pairs = ((read(ref.variable), frozen.get(ref.variable)) for ref in all_weights(model))
    return _of_kept((value, None if mask is None else read(mask.keep)) for value, mask in pairs)


def of_saved_weights(arrays: Mapping[str, np.ndarray]) -> str:
    """The same of the arrays of a saved state."""
    named = ((name.removeprefix("weight:"), value) for name, value in arrays.items() if name.startswith("weight:"))
    return _of_kept((value, arrays.get(f"mask:{place}")) for place, value in named)


def of_masks(model: Any) -> str:
    """A digest of a model's masks, each by the place of its weight."""
    frozen = frozen_masks(model)
    masks = (frozen.get(ref.variable) for ref in all_weights(model))
    return of_arrays(np.zeros(0, np.bool_) if mask is None else read(mask.keep) for mask in masks)


def of_settings(part: Any) -> dict[str, str]:
    """Setting -> text of it, of an optimizer or another object of Keras."""
    described = describe(part)
    settings = described if isinstance(described, dict) else {"class": described}
    return {name: json.dumps(value, sort_keys=True) for name, value in settings.items()}


def describe(part: Any) -> Any:
    """A setting as plain values for JSON: an object by its class and config, a function by its name."""
    if part is None or isinstance(part, (bool, int, float, str)):
        return part
    if isinstance(part, np.generic):
        return part.item()
    if isinstance(part, Mapping):
        # Keras numbers the names of objects anew in each process.
        return {str(name): describe(value) for name, value in part.items() if name != "name"}
    if isinstance(part, (list, tuple)):
        return [describe(one) for one in part]
    if isinstance(part, np.ndarray) or tf.is_tensor(part):
        return of_arrays([np.asarray(part)])
    name = getattr(part, "__qualname__", type(part).__qualname__)
    if isinstance(part, type) or not hasattr(part, "get_config"):
        return name
    try:
        return {"class": name, **describe(part.get_config())}
    except NotImplementedError:
        return name


def _of_kept(pairs: Iterable[tuple[np.ndarray, np.ndarray | None]]) -> str:
    floating = ((value, keep) for value, keep in pairs if tf.as_dtype(value.dtype).is_floating)
    return of_arrays(value if keep is None else value[keep] for value, keep in floating)
