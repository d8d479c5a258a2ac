"""What a model file holds, whatever its format: the one thing that readers make and builders take."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True, eq=False)
class StoredArray:
    """One array in a file, read only when asked for.

    Args:
        name: as the file calls it, for example `"dense/kernel:0"`.
        shape: its shape.
        read: gives the values.
    """

    name: str
    shape: tuple[int, ...]
    read: Callable[[], np.ndarray] = field(repr=False)

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, eq=False)
class StoredMask:
    """A mask that rides along in a file.

    Args:
        path: path of its weight when it was saved.
        shape: shape of the weight.
        pattern: name of the structure of the zeros.
        target: sparsity that was asked for, if known.
        position: place of the weight in the order of the model's weights; finds a weight that another Keras, or the
            same after loading, calls by another name.
        keep: bool array, True = keep; None if the weight's own zeros are the mask.
    """

    path: str
    shape: tuple[int, ...]
    pattern: str
    target: float | None
    position: int
    keep: np.ndarray | None = field(repr=False)


@dataclass(frozen=True, eq=False)
class StoredModel:
    """A model as a file holds it.

    Args:
        format: `"h5"`, `"sparse.h5"` or `"keras"`.
        keras_version: version that wrote the file, for example `"2.3.1"`; `""` if the file does not say.
        config: the model's config as the file has it, or None for weights only.
        training_config: optimizer, loss and metrics, or None.
        layers: `(layer name, its arrays)` in the file's order.
        top_level: arrays that the model itself owns.
        optimizer: arrays of the optimizer.
        masks: masks that ride along.
        flavour: the Keras of the model that was saved, where the file says it.
        backend: what its Keras ran on, where the file says it.
    """

    format: str
    keras_version: str
    config: dict[str, Any] | None
    training_config: dict[str, Any] | None
    layers: list[tuple[str, list[StoredArray]]]
    top_level: list[StoredArray]
    optimizer: list[StoredArray]
    masks: list[StoredMask]
    flavour: str | None = None
    backend: str = ""

    @property
    def major(self) -> int:
        """Major version of the Keras that wrote the file; 2 if the file does not say, as only old ones do not."""
        head = self.keras_version.split(".")[0]
        return int(head) if head else 2

    @property
    def size(self) -> int:
        """Number of values in all weights."""
        return sum(array.size for _, arrays in self.layers for array in arrays) + sum(
            array.size for array in self.top_level
        )
