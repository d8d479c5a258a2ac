"""What a run will see: one batch of its data, and how many steps it takes."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

Spec = Any

# Stands for the length of an axis that a data set does not tell.
_UNKNOWN = 1024
# What Keras takes if nobody says so.
_BATCH = 32


def batch_spec(model: Any, arguments: Mapping[str, Any]) -> tuple[Spec, ...] | None:
    """Types of one batch as `(x, y, sample_weight)`, shorter where there is less; None where it cannot be seen.

    A data set is drawn from only where it does not tell its shapes: a batch that is taken may be missing afterwards,
    and the next shuffle is another one.

    Args:
        model: a model.
        arguments: what fit will get.
    """
    x: Any = _numbers(arguments.get("x"))
    size = arguments.get("batch_size") or _BATCH
    if isinstance(x, tf.data.Dataset):
        told = _told(x)
        if told is not None:
            return told
        found = next(iter(x.take(1)), None)
        return None if found is None else _specs(found)
    if _is_arrays(x):
        parts = [x, *(_numbers(arguments.get(name)) for name in ("y", "sample_weight"))]
        while parts and parts[-1] is None:
            parts.pop()
        return tuple(tf.nest.map_structure(lambda a: _spec_of_rows(a, size), part) for part in parts)
    if hasattr(x, "__getitem__") and hasattr(x, "__len__") and not isinstance(x, (list, tuple, dict)) and len(x):
        with _unmoved_generators():
            return _specs(x[0])
    return _from_inputs(model, size)


def steps_of(arguments: Mapping[str, Any]) -> int | None:
    """Number of training steps of a run; None if nobody can know before."""
    epochs = int(arguments.get("epochs") or 1) - int(arguments.get("initial_epoch") or 0)
    x: Any = _numbers(arguments.get("x"))
    size = arguments.get("batch_size") or _BATCH
    steps: Any = arguments.get("steps_per_epoch")
    if steps is None:
        if isinstance(x, tf.data.Dataset):
            steps = int(x.cardinality())
        elif _is_arrays(x):
            samples = int(tf.nest.flatten(x)[0].shape[0]) * (1.0 - float(arguments.get("validation_split") or 0.0))
            steps = math.ceil(samples / size)
        elif hasattr(x, "__len__"):
            steps = len(x)
    return None if steps is None or steps < 0 else int(steps) * max(epochs, 0)


def most_elements(model: Any, arguments: Mapping[str, Any]) -> int | None:
    """A bound on the numbers in one batch of an input, without a look at data that has to be loaded.

    Args:
        model: a model.
        arguments: what fit will get.
    """
    x: Any = _numbers(arguments.get("x"))
    size = arguments.get("batch_size") or _BATCH
    shapes: list[Any]
    if _is_arrays(x):
        shapes = [(size, *leaf.shape[1:]) for leaf in tf.nest.flatten(x)]
    elif isinstance(x, tf.data.Dataset):
        inputs = x.element_spec[0] if isinstance(x.element_spec, tuple) else x.element_spec
        shapes = [getattr(spec, "shape", None) for spec in tf.nest.flatten(inputs)]
    else:
        shapes = [(None, *tuple(tensor.shape)[1:]) for tensor in getattr(model, "inputs", None) or ()]
    if not shapes or any(shape is None or getattr(shape, "rank", 0) is None for shape in shapes):
        return None
    return max(math.prod(int(n or _UNKNOWN) for n in shape) for shape in shapes)


def _numbers(x: Any) -> Any:
    """Lists of plain numbers, which tf_keras takes, as an array."""
    plain = isinstance(x, list) and all(isinstance(leaf, (bool, int, float, str)) for leaf in tf.nest.flatten(x))
    return np.asarray(x) if plain else x


def _is_arrays(x: Any) -> bool:
    leaves = tf.nest.flatten(x)
    return bool(leaves) and all(len(getattr(leaf, "shape", ())) > 0 for leaf in leaves)


def _told(dataset: tf.data.Dataset) -> tuple[Spec, ...] | None:
    """What a data set says of its batches; None if it leaves more open than their number of samples."""
    specs = dataset.element_spec
    parts = specs if isinstance(specs, tuple) else (specs,)
    leaves = tf.nest.flatten(parts)
    if not all(isinstance(leaf, tf.TensorSpec) and leaf.shape.rank is not None for leaf in leaves):
        return None
    if any(None in tuple(leaf.shape)[1:] for leaf in leaves):
        return None
    size = _batch_size(dataset)

    def whole(leaf: tf.TensorSpec) -> tf.TensorSpec:
        dtype = tf.float32 if leaf.dtype == tf.float64 else leaf.dtype
        return tf.TensorSpec([size if n is None else n for n in tuple(leaf.shape)], dtype)

    return tuple(tf.nest.map_structure(whole, part) for part in parts)


def _batch_size(dataset: tf.data.Dataset) -> int:
    """The number that the last `batch` of a pipeline was called with, as far as that can be followed back."""
    while True:
        size = tf.get_static_value(getattr(dataset, "_batch_size", None)) if hasattr(dataset, "_batch_size") else None
        if size is not None:
            return int(size)
        sources = dataset._inputs() if hasattr(dataset, "_inputs") else []
        if len(sources) != 1:
            return _BATCH
        dataset = sources[0]


@contextlib.contextmanager
def _unmoved_generators() -> Iterator[None]:
    """Have data that augments at random draw in the run what it would have drawn without a look before."""
    before, numpy_before = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(before)
        np.random.set_state(numpy_before)


def _specs(batch: Any) -> tuple[Spec, ...]:
    parts = list(batch) if isinstance(batch, (tuple, list)) else [batch]
    while parts and parts[-1] is None:
        parts.pop()
    return tuple(tf.nest.map_structure(_spec, part) for part in parts)


def _spec_of_rows(array: Any, size: int) -> Any:
    if isinstance(array, tf.SparseTensor) or hasattr(array, "tocoo"):
        dtype = tf.float32 if array.dtype in (np.float64, tf.float64) else array.dtype
        return tf.SparseTensorSpec((min(size, int(array.shape[0])), *array.shape[1:]), dtype)
    return _spec(array[:size])


def _spec(value: Any) -> Any:
    if isinstance(value, (tf.RaggedTensor, tf.SparseTensor)):
        return tf.type_spec_from_value(value)
    value = value if isinstance(value, tf.Tensor) else np.asarray(value)
    dtype = tf.float32 if value.dtype in (np.float64, tf.float64) else value.dtype
    return tf.TensorSpec(value.shape, dtype)


def _from_inputs(model: Any, size: int) -> tuple[Spec, ...] | None:
    inputs = getattr(model, "inputs", None)
    if not inputs or any(None in tuple(tensor.shape)[1:] for tensor in inputs):
        return None
    specs = [tf.TensorSpec((size, *tuple(tensor.shape)[1:]), tensor.dtype) for tensor in inputs]
    return (specs[0] if len(specs) == 1 else specs,)
