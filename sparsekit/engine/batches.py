"""What a run will see: one batch of its data, and how many steps it takes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

Spec = Any

# Stands for the length of an axis that a data set does not tell.
_UNKNOWN = 1024


def batch_spec(model: Any, arguments: Mapping[str, Any]) -> tuple[Spec, ...] | None:
    """Types of one batch as `(x, y, sample_weight)`, shorter where there is less; None where it cannot be seen.

    Args:
        model: a model.
        arguments: what fit will get.
    """
    x: Any = arguments.get("x")
    size = arguments.get("batch_size") or 32
    if isinstance(x, tf.data.Dataset):
        found = next(iter(x.take(1)), None)
        return None if found is None else _specs(found)
    if _is_arrays(x):
        parts = [arguments.get(name) for name in ("x", "y", "sample_weight")]
        while parts and parts[-1] is None:
            parts.pop()
        return tuple(tf.nest.map_structure(lambda a: _spec(np.asarray(a[:size])), part) for part in parts)
    if hasattr(x, "__getitem__") and hasattr(x, "__len__") and len(x):
        return _specs(x[0])
    return _from_inputs(model, size)


def steps_of(arguments: Mapping[str, Any]) -> int | None:
    """Number of training steps of a run; None if nobody can know before."""
    epochs = int(arguments.get("epochs") or 1) - int(arguments.get("initial_epoch") or 0)
    x: Any = arguments.get("x")
    size = arguments.get("batch_size") or 32
    steps: Any = arguments.get("steps_per_epoch")
    if steps is None:
        if isinstance(x, tf.data.Dataset):
            steps = int(x.cardinality())
        elif _is_arrays(x):
            samples = len(tf.nest.flatten(x)[0]) * (1.0 - float(arguments.get("validation_split") or 0.0))
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
    x: Any = arguments.get("x")
    size = arguments.get("batch_size") or 32
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


def _is_arrays(x: Any) -> bool:
    leaves = tf.nest.flatten(x)
    return bool(leaves) and all(hasattr(leaf, "shape") and hasattr(leaf, "__getitem__") for leaf in leaves)


def _specs(batch: Any) -> tuple[Spec, ...]:
    parts = list(batch) if isinstance(batch, (tuple, list)) else [batch]
    while parts and parts[-1] is None:
        parts.pop()
    return tuple(tf.nest.map_structure(_spec, part) for part in parts)


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
