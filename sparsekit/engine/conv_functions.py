"""Convolutions whose kernel is the vector of its kept values, with gradients for use inside any TensorFlow program."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from sparsekit.engine import build
from sparsekit.errors import ArgumentError, MaskError

# A block of operand channels should fit into the first-level cache, but its lists need enough entries on average to pay
# for reading and writing their sums once more.
_BLOCK_VECTORS = 512
_FORWARD_ENTRIES = 6
_BACKWARD_ENTRIES = 10
_STRIP_COLS = 8

Index = tuple[Any, Any, Any]


@dataclass(frozen=True, eq=False)
class ConvStructure:
    """Where the kept values of a convolution kernel stand; constant while its values train.

    Args:
        keep: bool array of the kernel's Keras shape, True = keep; the values are `kernel[keep]`, in that order.
        strides: rows and columns (1-D: columns only, rows 1).
        padding: "same", "valid" or, for 1-D only, "causal".
        dilation: rows and columns.
        groups: number of channel groups.
        forward: int32 vectors starts, taps and places of the lists by output channel.
        backward: the same by input channel.
    """

    keep: np.ndarray
    strides: tuple[int, int]
    padding: str
    dilation: tuple[int, int]
    groups: int
    forward: Index
    backward: Index

    @classmethod
    def from_mask(
        cls,
        keep: np.ndarray,
        strides: int | tuple[int, ...] = 1,
        padding: str = "valid",
        dilation: int | tuple[int, ...] = 1,
        groups: int = 1,
    ) -> ConvStructure:
        """Index the kept positions of a kernel.

        Args:
            keep: bool array [rows, cols, in/groups, out], or [cols, in/groups, out] for 1-D; True = keep.
            strides: one number, or one for each spatial axis.
            padding: "same", "valid" or, for 1-D only, "causal".
            dilation: one number, or one for each spatial axis.
            groups: number of channel groups; it divides the number of output channels.

        Raises:
            MaskError: `keep` is not a bool array of rank 3 or 4 without empty axes.
            ArgumentError: strides, dilation, groups or padding cannot be used.
        """
        keep = np.asarray(keep)
        if keep.dtype != np.bool_ or keep.ndim not in (3, 4) or keep.size == 0:
            raise MaskError(
                f"keep is a {keep.dtype} array of shape {keep.shape}, but a bool array [rows, cols, in/groups, out] or "
                "[cols, in/groups, out] without empty axes is needed"
            )
        spatial = keep.ndim - 2
        stride = _pair(strides, spatial, "strides")
        dilate = _pair(dilation, spatial, "dilation")
        if padding not in ("same", "valid") and not (padding == "causal" and spatial == 1):
            raise ArgumentError(f'padding is {padding!r}, but "same", "valid" or, in 1-D only, "causal" is needed')
        if groups < 1 or keep.shape[-1] % groups:
            raise ArgumentError(f"groups is {groups}, but a divisor of the {keep.shape[-1]} output channels is needed")
        full = keep if spatial == 2 else keep[np.newaxis]
        forward, backward = _indices(full, stride, dilate, groups)
        return cls(keep, stride, padding, dilate, groups, forward, backward)

    @property
    def rank(self) -> int:
        """Number of spatial axes, 1 or 2."""
        return self.keep.ndim - 2

    @property
    def filters(self) -> int:
        """Number of output channels."""
        return self.keep.shape[-1]

    @property
    def channels(self) -> int:
        """Number of input channels, all groups together."""
        return self.keep.shape[-2] * self.groups

    def _attributes(self) -> dict[str, Any]:
        window = (1, *self.keep.shape[:1]) if self.rank == 1 else self.keep.shape[:2]
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

    @tf.custom_gradient
    def run(x: tf.Tensor, values: tf.Tensor, bias: tf.Tensor) -> Any:
        y = ops.sparsekit_conv(x, values, bias, *structure.forward, filters=structure.filters, relu=relu, **attributes)

        def gradient(dy: tf.Tensor) -> Any:
            dx, dvalues, dbias = ops.sparsekit_conv_grad(
                x,
                values,
                y if relu else dy,
                dy,
                *structure.backward,
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


def _indices(keep: np.ndarray, strides: tuple[int, int], dilation: tuple[int, int], groups: int) -> tuple[Index, Index]:
    """Lists by output channel and by input channel, each in blocks of operand channels."""
    rows, cols, group_channels, filters = keep.shape
    channels, taps = group_channels * groups, rows * cols
    row, col, channel, out = np.nonzero(keep)
    channel = channel + out // (filters // groups) * group_channels
    tap = row * cols + col

    reach = [(size - 1) * d // s for size, d, s in zip((rows, cols), dilation, strides, strict=True)]
    kept = max(out.size / (channels * filters / groups), 1e-9)
    strip_rows = 1 if taps == 1 else 2
    vectors = (strip_rows + reach[0]) * (_STRIP_COLS + reach[1])
    block = _block(channels, vectors, _FORWARD_ENTRIES / kept)
    forward = _index(channel // block * filters + out, -(-channels // block) * filters, channel * taps + tap)

    slots, counts = [], []
    for size, d, s in zip((rows, cols), dilation, strides, strict=True):
        used, slot = np.unique(np.arange(size) * d % s, return_inverse=True)
        slots.append(slot)
        counts.append(used.size)
    phase = slots[0][row] * counts[1] + slots[1][col]
    vectors = (1 + reach[0]) * (_STRIP_COLS + reach[1])
    block = _block(filters, vectors, _BACKWARD_ENTRIES * counts[0] * counts[1] / kept)
    blocks = -(-filters // block)
    backward = _index(
        (phase * blocks + out // block) * channels + channel,
        counts[0] * counts[1] * blocks * channels,
        out * taps + tap,
    )
    return forward, backward


def _block(channels: int, vectors: int, wanted: float) -> int:
    """Channels of a block: what fits or what the lists need, in blocks of about one size."""
    least = max(_BLOCK_VECTORS // vectors, min(wanted, channels), 1)
    return math.ceil(channels / max(int(channels // least), 1))


def _index(lists: np.ndarray, count: int, taps: np.ndarray) -> Index:
    places = np.argsort(lists, kind="stable")
    starts = np.concatenate([[0], np.cumsum(np.bincount(lists, minlength=count))])
    # Outside of any graph, so that a traced step captures the tensors instead of copying them into its constants.
    with tf.init_scope():
        return tuple(tf.constant(part, tf.int32) for part in (starts, taps[places], places))  # type: ignore[return-value]
