"""One pass instead of several for what each training step does with a mask; used where the library is built already."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from sparsekit.engine.build import cached, library


def ready() -> bool:
    """Whether the ops can be used at once: the library is built and this program holds no GPU to move weights to."""
    return cached() and not tf.config.list_logical_devices("GPU")


def keep_only(keep: Any, value: Any) -> tf.Tensor:
    """`value` where kept, +0.0 elsewhere, over its own memory where possible.

    Args:
        keep: bool of the value's shape, True = keep.
        value: float32.
    """
    return library().sparsekit_keep_only(value, keep)


def hold(variable: tf.Variable, keep: tf.Variable, drop: bool = False) -> None:
    """Set a variable's masked positions to +0.0 in place.

    Args:
        variable: float32 `tf.Variable`.
        keep: bool `tf.Variable` of the same shape, True = keep.
        drop: also mask each position that is zero now.
    """
    library().sparsekit_hold(variable.handle, keep.handle, drop=drop)


def assign_kept(variable: tf.Variable, keep: tf.Variable, delta: Any, subtract: bool, drop: bool = False) -> Any:
    """Add to a variable (or subtract from it) in place and set its masked positions to +0.0, in one pass.

    Args:
        variable: float32 `tf.Variable`.
        keep: bool `tf.Variable` of the same shape, True = keep.
        delta: float32 of the same shape.
        subtract: subtract instead of adding.
        drop: also mask each position that is zero then.
    """
    delta = tf.convert_to_tensor(delta, tf.float32)
    return library().sparsekit_assign_kept(variable.handle, keep.handle, delta, subtract=subtract, drop=drop)
