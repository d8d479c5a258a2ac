"""Convolutions whose kernel is the vector of its kept values, with gradients for use inside any TensorFlow program."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tensorflow as tf

from sparsekit.engine import build
from sparsekit.engine.functions import varying
from sparsekit.errors import ArgumentError, MaskError

Index = tuple[Any, Any, Any]


@dataclass(frozen=True, eq=False)
class ConvStructure:
    """Where the kept values of a convolution kernel stand.

    The value vector has the order of `kernel[keep]` (C order).

    Args:
        shape: the kernel's Keras shape.
        strides: rows and columns (1-D: columns only, rows 1).
        padding: "same", "valid" or, for 1-D only, "causal".
        dilation: rows and columns.
        groups: number of channel groups.
        forward: int32 vectors starts, taps and places of the lists by output channel; tensors, or `tf.Variable`s of
            unknown length where the mask may change.
        backward: the same by input channel.
    """

    shape: tuple[int, ...]
    strides: tuple[int, int]
    padding: str
    dilation: tuple[int, int]
    groups: int
    forward: Index
    backward: Index

    @classmethod
    def from_mask(
        cls,
        keep: Any,
        strides: int | tuple[int, ...] = 1,
        padding: str = "valid",
        dilation: int | tuple[int, ...] = 1,
        groups: int = 1,
    ) -> ConvStructure:
        """Index the kept positions of a kernel.

        Args:
            keep: bool array or tensor of known shape [rows, cols, in/groups, out], or [cols, in/groups, out] for 1-D;
                True = keep.
            strides: one number, or one for each spatial axis.
            padding: "same", "valid" or, for 1-D only, "causal".
            dilation: one number, or one for each spatial axis.
            groups: number of channel groups; it divides the number of output channels.

        Raises:
            MaskError: `keep` is not a bool array of rank 3 or 4 without empty axes.
            ArgumentError: strides, dilation, groups or padding cannot be used.
            EngineError: the engine's library cannot be built.
        """
        if not isinstance(keep, tf.Tensor | tf.Variable):
            keep = np.asarray(keep)
        shape = tuple(int(axis or 0) for axis in keep.shape)
        if keep.dtype not in (np.bool_, tf.bool) or len(shape) not in (3, 4) or 0 in shape:
            raise MaskError(
                f"keep is a {tf.as_dtype(keep.dtype).name} array of shape {shape}, but a bool array "
                "[rows, cols, in/groups, out] or [cols, in/groups, out] without empty axes is needed"
            )
        spatial = len(shape) - 2
        stride = _pair(strides, spatial, "strides")
        dilate = _pair(dilation, spatial, "dilation")
        if padding not in ("same", "valid") and not (padding == "causal" and spatial == 1):
            raise ArgumentError(f'padding is {padding!r}, but "same", "valid" or, in 1-D only, "causal" is needed')
        if groups < 1 or shape[-1] % groups:
            raise ArgumentError(f"groups is {groups}, but a divisor of the {shape[-1]} output channels is needed")
        full = tf.reshape(keep, shape if spatial == 2 else (1, *shape))
        arrays = build.library().sparsekit_conv_structure(
            full, strides=list(stride), dilations=list(dilate), groups=groups
        )
        return cls(shape, stride, padding, dilate, groups, tuple(arrays[:3]), tuple(arrays[3:]))

    def arrays(self) -> tuple[Any, ...]:
        """All index arrays, in the order of the fields."""
        return *self.forward, *self.backward

    def in_variables(self) -> ConvStructure:
        """The same with its index arrays in variables, to which those of another mask can be assigned."""
        forward, backward = (tuple(varying(array) for array in index) for index in (self.forward, self.backward))
        return replace(self, forward=forward, backward=backward)

    @property
    def rank(self) -> int:
        """Number of spatial axes, 1 or 2."""
        return len(self.shape) - 2

    @property
    def filters(self) -> int:
        """Number of output channels."""
        return self.shape[-1]

    @property
    def channels(self) -> int:
        """Number of input channels, all groups together."""
        return self.shape[-2] * self.groups

    def _attributes(self) -> dict[str, Any]:
        window = (1, *self.shape[:1]) if self.rank == 1 else self.shape[:2]
        causal = self.padding == "causal"
        return {
            "kernel": list(window),
            "strides": list(self.strides),
            "dilations": list(self.dilation),
            "padding": "EXPLICIT" if causal else self.padding.upper(),
            "pads": [0, 0, (window[1] - 1) * self.dilation[1], 0] if causal else [],
        }


def sparse_conv2d(
    x: Any,
    values: Any,
    structure: ConvStructure,
    bias: Any = None,
    activation: str | None = None,
    input_gradient: bool = True,
) -> tf.Tensor:
    """Convolve a batch of images with a kernel given by its kept values.

    Args:
        x: float32 [batch, rows, cols, channels].
        values: float32 [kept], the kernel's values in the order of `kernel[keep]`.
        structure: where the values stand; its mask has rank 4.
        bias: float32 [filters] or None.
        activation: None or "relu", applied in the same pass.
        input_gradient: False saves the work of the gradient for `x`, which is then None (a model's first layer).

    Returns:
        float32 [batch, out rows, out cols, filters].

    Raises:
        ArgumentError: the structure is not 2-D, or the activation is unknown.
        EngineError: the engine's library cannot be built.
    """
    if structure.rank != 2:
        raise ArgumentError("the structure is 1-D, but sparse_conv2d needs a 2-D one; use sparse_conv1d")
    return _convolve(x, values, structure, bias, activation, input_gradient)


def sparse_conv1d(
    x: Any,
    values: Any,
    structure: ConvStructure,
    bias: Any = None,
    activation: str | None = None,
    input_gradient: bool = True,
) -> tf.Tensor:
    """Convolve a batch of sequences with a kernel given by its kept values.

    Args:
        x: float32 [batch, steps, channels].
        values: float32 [kept], the kernel's values in the order of `kernel[keep]`.
        structure: where the values stand; its mask has rank 3.
        bias: float32 [filters] or None.
        activation: None or "relu", applied in the same pass.
        input_gradient: False saves the work of the gradient for `x`, which is then None (a model's first layer).

    Returns:
        float32 [batch, out steps, filters].

    Raises:
        ArgumentError: the structure is not 1-D, or the activation is unknown.
        EngineError: the engine's library cannot be built.
    """
    if structure.rank != 1:
        raise ArgumentError("the structure is 2-D, but sparse_conv1d needs a 1-D one; use sparse_conv2d")
    y = _convolve(tf.expand_dims(x, 1), values, structure, bias, activation, input_gradient)
    return tf.squeeze(y, 1)


def _convolve(
    x: Any,
    values: Any,
    structure: ConvStructure,
    bias: Any,
    activation: str | None,
    input_gradient: bool,
) -> tf.Tensor:
    if activation not in (None, "relu"):
        raise ArgumentError(f'activation is {activation!r}, but None or "relu" is needed; apply others afterwards')
    ops = build.library()
    attributes = structure._attributes()
    relu = activation == "relu"
    # Read outside of the function below, which may not touch variables.
    forward, backward = (tuple(map(tf.convert_to_tensor, i)) for i in (structure.forward, structure.backward))

    @tf.custom_gradient
    def run(x: tf.Tensor, values: tf.Tensor, bias: tf.Tensor) -> Any:
        y = ops.sparsekit_conv(x, values, bias, *forward, filters=structure.filters, relu=relu, **attributes)

        def gradient(dy: tf.Tensor) -> Any:
            dx, dvalues, dbias = ops.sparsekit_conv_grad(
                x,
                values,
                y if relu else dy,
                dy,
                *backward,
                relu=relu,
                input_gradient=input_gradient,
                bias_gradient=has_bias,
                **attributes,
            )
            return dx if input_gradient else None, dvalues, dbias

        return y, gradient

    has_bias = bias is not None
    x = tf.convert_to_tensor(x, tf.float32)
    if x.shape.rank is not None and x.shape[-1] not in (None, structure.channels):
        raise ArgumentError(f"x has {x.shape[-1]} channels, but the kernel needs {structure.channels}")
    return run(
        x,
        tf.convert_to_tensor(values, tf.float32),
        tf.convert_to_tensor(bias, tf.float32) if has_bias else tf.zeros([0]),
    )


def _pair(value: int | tuple[int, ...], spatial: int, name: str) -> tuple[int, int]:
    numbers = (value,) * spatial if isinstance(value, int) else tuple(value)
    if len(numbers) != spatial or any(number < 1 for number in numbers):
        raise ArgumentError(f"{name} is {value!r}, but one positive number or {spatial} of them are needed")
    return (1, numbers[0]) if spatial == 1 else (numbers[0], numbers[1])
