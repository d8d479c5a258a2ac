"""One pass instead of several for what each training step does with a mask; used where the library is built already."""

from __future__ import annotations

from collections.abc import Sequence
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


def drop_smallest(weight: Any, keep: Any, zeros: Any) -> tf.Tensor:
    """The mask with the smallest magnitudes dropped until `zeros` positions are; of equal ones the first go first.

    Args:
        weight: float32.
        keep: bool of the weight's shape, True = keep; what it drops stays dropped.
        zeros: integer scalar.
    """
    return library().sparsekit_drop_smallest(weight, keep, tf.cast(zeros, tf.int64))


def shrink(
    keep: tf.Variable, alive: tf.Variable, arrays: list[Any], structure: Sequence[Any] = (), share: float = 0.0
) -> tf.Tensor:
    """Take masked values out of the vectors of a kernel's kept values, and out of its mask; all of that or nothing.

    Args:
        keep: bool `tf.Variable`, the mask of the kernel; loses the positions of what is taken out.
        alive: bool `tf.Variable` (kept,), True = stays; all True afterwards.
        arrays: float32 `tf.Variable`s (kept,) of unknown length: values and optimizer slots.
        structure: the five index arrays of the mask in `tf.Variable`s, to be made those of the narrower one.
        share: do it only where more than this share of the values is masked.

    Returns:
        Bool scalar, whether anything was taken out.
    """
    handles = [[variable.handle for variable in variables] for variables in (arrays, structure)]
    return library().sparsekit_shrink(keep.handle, alive.handle, *handles, share=share)


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
