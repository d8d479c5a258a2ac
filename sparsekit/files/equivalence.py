"""Whether two models predict the same: the proof that a converted model is the one in the file."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from ..flavour import flavour_of

TOLERANCE = 1e-5
# What an axis of free length becomes: enough for recurrent nets, then for convolutional ones with many poolings.
_FREE = (8, 32, 96, 224)
# Layers that look rows up -> what they call the number of rows.
_TABLES = {"Embedding": "input_dim", "CategoryEncoding": "num_tokens"}
# Above this many values in one layer's output the check would cost more than the load.
_MOST_VALUES = 2**27


def same_predictions(one: Any, other: Any) -> bool:
    """Whether two models give the same outputs, in rank and in values, for random input.

    Values are the same if they differ by at most 1e-5, times the largest output where that is above 1.

    Args:
        one: a model of either Keras; its inputs decide what is fed.
        other: a model with inputs of the same names.
    """
    if not one.inputs or not other.inputs or len(one.inputs) != len(other.inputs):
        return False
    for free in _FREE:
        if max(_largest(one, free), _largest(other, free)) > _MOST_VALUES:
            return False
        fed = sample_inputs(one, free)
        try:
            wanted = _outputs(one, fed)
        except (ValueError, TypeError, tf.errors.OpError):
            # Too short for this net; one more try with a longer axis.
            continue
        try:
            return _equal(wanted, _outputs(other, fed))
        except (ValueError, TypeError, LookupError, tf.errors.OpError):
            return False
    return False


def sample_inputs(model: Any, free: int = 32, batch: int = 3, seed: int = 0) -> dict[str, np.ndarray]:
    """Random input for a model, by the name of its input layers.

    Whole numbers below the size of the smallest table where the model looks rows up, normal numbers elsewhere.
    """
    flavour = flavour_of(model)
    rng = np.random.default_rng(seed)
    sizes = [(layer, _TABLES.get(type(layer).__name__)) for layer in flavour.layers(model)]
    tables = [getattr(layer, size) for layer, size in sizes if size is not None]
    fed = {}
    for name, tensor in zip(flavour.input_names(model), model.inputs, strict=True):
        fixed = tensor.shape[0] if tensor.shape[0] is not None else batch
        shape = (fixed, *(free if n is None else int(n) for n in tensor.shape[1:]))
        dtype = tf.as_dtype(tensor.dtype)
        if dtype == tf.string:
            fed[name] = rng.choice(np.array(["a", "b", "c", "some words"], dtype=object), size=shape)
        elif tables or dtype.is_integer or dtype.is_bool:
            fed[name] = rng.integers(0, min([*tables, 2 if dtype.is_bool else 100]), size=shape).astype(
                dtype.as_numpy_dtype
            )
        else:
            fed[name] = rng.normal(size=shape).astype(dtype.as_numpy_dtype)
    return fed


def _outputs(model: Any, fed: dict[str, np.ndarray]) -> Any:
    names = flavour_of(model).input_names(model)
    if set(names) != set(fed):
        # The input layer of a Sequential may have been made up; there is only one then.
        fed = dict(zip(names, fed.values(), strict=True))
    inputs: Any = [tf.constant(fed[name]) for name in names]
    if flavour_of(model).takes_dict(model):
        inputs = dict(zip(names, inputs, strict=True))
    elif len(inputs) == 1:
        (inputs,) = inputs
    try:
        return model(inputs, training=False)
    finally:
        flavour_of(model).forget_states(model)


def _equal(wanted: Any, found: Any) -> bool:
    single = tf.is_tensor(wanted), tf.is_tensor(found)
    if single[0] != single[1]:
        return False
    ours, theirs = tf.nest.flatten(wanted), tf.nest.flatten(found)
    if len(ours) != len(theirs):
        return False
    for a, b in zip(ours, theirs, strict=True):
        if a.shape != b.shape or a.dtype.is_floating != b.dtype.is_floating:
            return False
        x, y = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
        if not np.array_equal(np.isnan(x), np.isnan(y)):
            return False
        x, y = np.nan_to_num(x), np.nan_to_num(y)
        coarse = 100 if a.dtype in (tf.float16, tf.bfloat16) else 1
        if np.max(np.abs(x - y), initial=0) > coarse * TOLERANCE * max(1.0, np.max(np.abs(x), initial=0)):
            return False
    return True


def _largest(model: Any, free: int) -> int:
    """Number of values in the largest output of any layer, for a batch of 3."""
    sizes = [1]
    for shape in flavour_of(model).output_shapes(model):
        sizes.append(3 * int(np.prod([free if n is None else int(n) for n in shape[1:]], dtype=np.float64)))
    return max(sizes)
