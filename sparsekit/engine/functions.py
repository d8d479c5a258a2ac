"""Sparse ops for a kernel whose kept positions are constants and whose kept values are one vector."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tensorflow as tf

from sparsekit.engine.build import library
from sparsekit.errors import ArgumentError, MaskError

ACTIVATIONS = (None, "linear", "relu")
DISTRIBUTIONS = ("uniform", "normal")

_POINTERS = ("row_pointers", "column_pointers")


@dataclass(frozen=True, eq=False)
class Structure:
    """Where the kept weights of one kernel are, in both orders that the kernels walk.

    The value vector has the order of `kernel[keep]` (C order). Each field is an int32 tensor, or a `tf.Variable` of
    unknown length where the mask may change.

    Args:
        shape: shape of the kernel; all axes but the last count as inputs.
        row_pointers: (in + 1,) where each input's kept weights begin in the value vector.
        columns: (kept,) the output of each kept weight.
        column_pointers: (out + 1,) the same by outputs.
        rows: (kept,) the input of each kept weight, ordered by outputs.
        permutation: (kept,) its place in the value vector, ordered by outputs.
    """

    shape: tuple[int, ...]
    row_pointers: Any
    columns: Any
    column_pointers: Any
    rows: Any
    permutation: Any

    @classmethod
    def from_mask(cls, keep: Any) -> Structure:
        """Index arrays of a mask.

        Args:
            keep: bool array or tensor of rank 2 or more with known shape, True = keep.

        Raises:
            MaskError: `keep` is not boolean, or of a lower rank.
            EngineError: the engine's ops cannot be used on this machine.
        """
        if not isinstance(keep, tf.Tensor | tf.Variable):
            keep = np.asarray(keep)
        if keep.dtype not in (np.bool_, tf.bool):
            raise MaskError(f"keep has dtype {keep.dtype}; give a bool array, True = keep")
        if len(keep.shape) < 2 or None in tuple(keep.shape):
            raise MaskError(f"keep has shape {keep.shape}; give the shape of a kernel with 2 or more known axes")
        shape = tuple(int(axis or 0) for axis in keep.shape)
        flat = tf.reshape(keep, (int(np.prod(shape[:-1])), shape[-1]))
        return cls(shape, *library().sparsekit_structure(flat))

    @property
    def inputs(self) -> int:
        """Product of all axes but the last."""
        return int(np.prod(self.shape[:-1]))

    @property
    def outputs(self) -> int:
        """Length of the last axis."""
        return int(self.shape[-1])

    def arrays(self) -> tuple[Any, ...]:
        """The five index arrays in the order in which the ops take them."""
        return self.row_pointers, self.columns, self.column_pointers, self.rows, self.permutation

    def in_variables(self) -> Structure:
        """The same with its index arrays in variables, to which those of another mask can be assigned."""
        pointers = {name: tf.Variable(getattr(self, name), trainable=False) for name in _POINTERS}
        others = {name: varying(getattr(self, name)) for name in ("columns", "rows", "permutation")}
        return replace(self, **pointers, **others)


def varying(array: Any) -> tf.Variable:
    """A variable that starts with this vector and can be given vectors of other lengths."""
    return tf.Variable(array, trainable=False, shape=[None])


def sparse_dense(
    x: Any, values: Any, structure: Structure, bias: Any = None, activation: str | None = None
) -> tf.Tensor:
    """`activation(x @ kernel + bias)` where only kept values exist, with gradients for x, values and bias.

    Sums are taken in float32 whatever the dtype of x, and the result has the dtype of x. Rank above 2: the leading axes
    of x count as batch.

    Args:
        x: (..., in) floating.
        values: (kept,) floating, in the order of `kernel[keep]`.
        structure: positions of the kept weights of a kernel (in, out).
        bias: (out,) floating, or None.
        activation: None, "linear" or "relu".

    Raises:
        ArgumentError: an activation that is not fused, or an x whose last axis is not `in`.
        EngineError: the engine's ops cannot be used on this machine.
    """
    if activation not in ACTIVATIONS:
        raise ArgumentError(f"activation is {activation!r}; {ACTIVATIONS} are fused, apply others to the result")
    x = tf.convert_to_tensor(x)
    if x.shape.rank is None or x.shape.rank < 1 or x.shape[-1] not in (None, structure.inputs):
        raise ArgumentError(f"x has shape {x.shape}; its last axis must have the kernel's {structure.inputs} inputs")
    flat = x if x.shape.rank == 2 else tf.reshape(x, (-1, structure.inputs))
    y = library().sparsekit_dense(
        tf.cast(flat, tf.float32),
        tf.cast(values, tf.float32),
        *structure.arrays(),
        [] if bias is None else [tf.cast(bias, tf.float32)],
        relu=activation == "relu",
    )
    if x.shape.rank != 2:
        y = tf.reshape(y, tf.concat([tf.shape(x)[:-1], [structure.outputs]], 0))
        y.set_shape([*x.shape[:-1], structure.outputs])
    return tf.cast(y, x.dtype)


def gather_values(kernel: Any, structure: Structure) -> tf.Tensor:
    """Kept values of a kernel, float32 (kept,); differentiable.

    Args:
        kernel: floating, of the structure's shape.
        structure: positions of the kept weights.
    """
    flat = tf.reshape(tf.cast(kernel, tf.float32), (structure.inputs, structure.outputs))
    return library().sparsekit_gather(flat, structure.row_pointers, structure.columns)


def scatter_values(values: Any, structure: Structure) -> tf.Tensor:
    """Kernel of the structure's shape, float32: values at the kept positions, 0 elsewhere; differentiable.

    Args:
        values: (kept,) floating.
        structure: positions of the kept weights.
    """
    flat = library().sparsekit_scatter(
        tf.cast(values, tf.float32), structure.row_pointers, structure.columns, outputs=structure.outputs
    )
    return tf.reshape(flat, structure.shape)


@tf.RegisterGradient("SparsekitDense")
def _dense_gradient(op: Any, dy: tf.Tensor) -> list[tf.Tensor | None]:
    x, values, row_pointers, columns = op.inputs[:4]
    has_bias = len(op.inputs) > 7
    gates = [op.outputs[0]] if op.get_attr("relu") else []
    # Only a tape knows what it was asked for: the first layer of a model needs no gradient of its input.
    skipped = getattr(op, "skip_input_indices", None) or ()
    dx, dvalues, dbias = library().sparsekit_dense_grad(
        dy,
        x,
        values,
        row_pointers,
        columns,
        gates,
        input_gradient=0 not in skipped,
        bias_gradient=has_bias and 7 not in skipped,
    )
    gradients = [None if 0 in skipped else dx, dvalues, None, None, None, None, None]
    if has_bias:
        gradients.append(None if 7 in skipped else dbias)
    return gradients


@tf.RegisterGradient("SparsekitDenseGrad")
def _no_second_gradient(op: Any, *_: tf.Tensor) -> None:
    raise ArgumentError("the sparse engine has no second derivatives; use engine='dense' for a gradient of a gradient")


@tf.RegisterGradient("SparsekitGather")
def _gather_gradient(op: Any, dvalues: tf.Tensor) -> list[tf.Tensor | None]:
    _, row_pointers, columns = op.inputs
    outputs = op.inputs[0].shape[1]
    return [library().sparsekit_scatter(dvalues, row_pointers, columns, outputs=outputs), None, None]


@tf.RegisterGradient("SparsekitScatter")
def _scatter_gradient(op: Any, dense: tf.Tensor) -> list[tf.Tensor | None]:
    _, row_pointers, columns = op.inputs
    return [library().sparsekit_gather(dense, row_pointers, columns), None, None]


def noise_update(
    variable: Any,
    *,
    seed: Any,
    step: Any,
    index: int,
    amplitude: Any,
    keep: Any = None,
    distribution: str = "uniform",
) -> Any:
    """Add random noise to a variable in one pass over its memory; the op that does it, for control dependencies.

    The noise of an element depends on (seed, step, index, position) alone: the same bits on any number of threads and
    on every replica, others on each step. `noise_key_counter` gives the same numbers to TensorFlow's own ops.

    Args:
        variable: float32 `tf.Variable`.
        seed: two integers; their lower 32 bits count.
        step: integer scalar; its lower 32 bits count.
        index: number of this variable among those that are updated with one seed.
        amplitude: scalar: half the width of the uniform noise, or the standard deviation of the normal one.
        keep: bool of the variable's shape, True = may move; elsewhere +0.0 is written. None moves all.
        distribution: "uniform" in (-amplitude, amplitude), of 2**16 values, or "normal".

    Raises:
        ArgumentError: an unknown distribution, or a variable that is not float32.
        EngineError: the engine's ops cannot be used on this machine.
    """
    if not isinstance(variable, tf.Variable) or variable.dtype != tf.float32:
        raise ArgumentError(f"noise_update got {type(variable).__name__}; give a float32 tf.Variable")
    return library().sparsekit_noise_update(
        variable.handle,
        *_noise_inputs(seed, step, amplitude, keep, distribution),
        index=index,
        normal=distribution == "normal",
    )


def noised(
    weight: Any,
    *,
    seed: Any,
    step: Any,
    index: int,
    amplitude: Any,
    keep: Any = None,
    distribution: str = "uniform",
) -> tf.Tensor:
    """The tensor that `noise_update` would leave in a variable of this value; arguments as there."""
    return library().sparsekit_noised(
        weight, *_noise_inputs(seed, step, amplitude, keep, distribution), index=index, normal=distribution == "normal"
    )


def noise_key_counter(seed: Any, step: Any, index: Any) -> tuple[tf.Tensor, tf.Tensor]:
    """Key and counter with which TensorFlow's own stateless ops draw the numbers of `noise_update`.

    With the signed 16-bit halves h of `StatelessRandomUniformFullIntV2` with alg=1, lower half first,
    `w + amplitude * ((2 * h + 1) / 2**16)` is `noise_update` bit for bit; with `StatelessRandomNormalV2` the two agree
    to rounding.

    Args:
        seed: two integers; their lower 32 bits count.
        step: integer scalar; its lower 32 bits count.
        index: number of the variable.
    """
    word = tf.constant(0xFFFFFFFF, tf.int64)
    first, second = tf.unstack(tf.bitwise.bitwise_and(tf.cast(seed, tf.int64), word))
    high = tf.bitwise.bitwise_and(tf.cast(step, tf.int64), word)
    low = tf.bitwise.bitwise_and(tf.cast(index, tf.int64), word)
    key = tf.bitwise.bitwise_or(first, tf.bitwise.left_shift(second, tf.constant(32, tf.int64)))
    counter = tf.bitwise.bitwise_or(low, tf.bitwise.left_shift(high, tf.constant(32, tf.int64)))
    return tf.bitcast([key], tf.uint64), tf.bitcast(tf.stack([tf.zeros_like(counter), counter]), tf.uint64)


def _noise_inputs(seed: Any, step: Any, amplitude: Any, keep: Any, distribution: str) -> tuple[Any, ...]:
    if distribution not in DISTRIBUTIONS:
        raise ArgumentError(f"distribution is {distribution!r}; give one of {DISTRIBUTIONS}")
    masks = [] if keep is None else [keep]
    return tf.cast(seed, tf.int64), tf.cast(step, tf.int64), tf.cast(amplitude, tf.float32), masks
