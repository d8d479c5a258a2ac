"""Layers as what they are to least squares: rows of inputs times a matrix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from ..flavour import Flavour, native
from ..weights import WeightRef, read

_KINDS = ("Dense", "Conv1D", "Conv2D", "EinsumDense")
_OTHERS = ("Transpose", "Depthwise", "Separable")


@dataclass(frozen=True, eq=False)
class LinearLayer:
    """A layer whose output before the activation is `rows(inputs) @ matrix + bias`.

    Args:
        ref: its kernel.
        layer: the layer.
        kind: Dense, Conv1D, Conv2D or EinsumDense.
        bias: its bias variable if that runs over all outputs, else None.
    """

    ref: WeightRef
    layer: Any
    kind: str
    bias: Any

    @property
    def path(self) -> str:
        return self.ref.path

    def rows(self, inputs: tf.Tensor) -> tf.Tensor:
        """Inputs as float32 (rows, in): one row for each position that the kernel is applied to."""
        inputs = tf.cast(inputs, tf.float32)
        if self.kind == "EinsumDense":
            letters, kernel, _ = _letters(self.layer.equation)
            summed = [letter for letter in kernel if letter in letters]
            free = [axis for axis, letter in enumerate(letters) if letter not in summed]
            lead = inputs.shape.rank - len(letters)
            order = [*range(lead), *(lead + a for a in free), *(lead + letters.index(letter) for letter in summed)]
            inputs = tf.transpose(inputs, order)
        elif self.kind != "Dense":
            inputs = self._patches(inputs)
        return tf.reshape(inputs, (-1, self._inputs))

    def matrix(self, kernel: np.ndarray) -> np.ndarray:
        """An array of the kernel's shape as (in, out)."""
        return np.transpose(kernel, self._order).reshape(self._inputs, -1)

    def kernel(self, matrix: np.ndarray) -> np.ndarray:
        """(in, out) back in the kernel's shape."""
        shape = [self.ref.shape[axis] for axis in self._order]
        return np.transpose(matrix.reshape(shape), np.argsort(self._order))

    def read_bias(self) -> np.ndarray:
        return read(self.bias).reshape(-1)

    def write(self, matrix: np.ndarray, bias: np.ndarray | None) -> None:
        native(self.ref.variable).assign(self.kernel(matrix).astype(np.float32))
        if bias is not None:
            native(self.bias).assign(bias.reshape(self.bias.shape).astype(np.float32))

    def computes(self, inputs: tf.Tensor, outputs: tf.Tensor) -> bool:
        """Whether the layer does with its kernel what this class believes; a subclass may do something else."""
        matrix = tf.constant(self.matrix(self.ref.numpy()).astype(np.float32))
        result = self.rows(inputs) @ matrix
        if self.bias is not None:
            result += self.read_bias().astype(np.float32)
        if int(tf.size(result)) != int(tf.size(outputs)):
            return False
        result = self.layer.activation(tf.reshape(result, self._output_shape(outputs)))
        half = outputs.dtype.size < 4
        expected, found = tf.cast(outputs, tf.float32).numpy(), tf.cast(result, tf.float32).numpy()
        size = float(np.sqrt(np.mean(expected**2))) + 1e-12
        return bool(np.sqrt(np.mean((self._ordered(expected) - found) ** 2)) < (3e-2 if half else 1e-3) * size)

    @property
    def _order(self) -> list[int]:
        """Axes of the kernel, those that inputs are summed over first."""
        rank = len(self.ref.shape)
        if self.kind != "EinsumDense":
            return list(range(rank))
        letters, kernel, _ = _letters(self.layer.equation)
        summed = [axis for axis in range(rank) if kernel[axis] in letters]
        return summed + [axis for axis in range(rank) if axis not in summed]

    @property
    def _inputs(self) -> int:
        if self.kind == "EinsumDense":
            letters, kernel, _ = _letters(self.layer.equation)
            sizes = zip(kernel, self.ref.shape, strict=True)
            return int(np.prod([size for letter, size in sizes if letter in letters]))
        return int(np.prod(self.ref.shape[:-1]))

    def _output_shape(self, outputs: tf.Tensor) -> list[int]:
        if self.kind != "EinsumDense" and getattr(self.layer, "data_format", None) == "channels_first":
            shape = list(outputs.shape)
            return [shape[0], *shape[2:], shape[1]]
        return list(outputs.shape)

    def _ordered(self, outputs: np.ndarray) -> np.ndarray:
        channels_first = getattr(self.layer, "data_format", None) == "channels_first"
        return np.moveaxis(outputs, 1, -1) if channels_first else outputs

    def _patches(self, inputs: tf.Tensor) -> tf.Tensor:
        """What a convolution's kernel sees at each place, (batch, ..., kernel places * channels)."""
        layer = self.layer
        if layer.data_format == "channels_first":
            inputs = tf.transpose(inputs, [0, *range(2, inputs.shape.rank), 1])
        size, strides, rates = list(layer.kernel_size), list(layer.strides), list(layer.dilation_rate)
        padding = layer.padding.upper()
        if padding == "CAUSAL":
            inputs, padding = tf.pad(inputs, [[0, 0], [rates[0] * (size[0] - 1), 0], [0, 0]]), "VALID"
        if self.kind == "Conv1D":
            inputs = inputs[:, None]
            size, strides, rates = [1, *size], [1, *strides], [1, *rates]
        return tf.image.extract_patches(inputs, [1, *size, 1], [1, *strides, 1], [1, *rates, 1], padding)


def linear_layer(flavour: Flavour, ref: WeightRef) -> LinearLayer | str:
    """The least-squares view of a kernel's layer, or the reason why there is none."""
    layer = ref.layer
    if layer is None or ref.role != "kernel":
        return "not the kernel of a layer"
    kinds = [kind for kind in _KINDS if isinstance(layer, getattr(flavour.keras.layers, kind))]
    if not kinds or any(word in type(layer).__name__ for word in _OTHERS):
        return f"no least squares for {type(layer).__name__}"
    kind = kinds[0]
    if getattr(layer, "groups", 1) != 1:
        return "grouped convolution"
    bias = layer.bias if getattr(layer, "bias", None) is not None else None
    if kind == "EinsumDense":
        letters, kernel, outputs = _letters(layer.equation)
        free = [letter for letter in kernel if letter not in letters]
        if any(letter in letters and letter in outputs for letter in kernel):
            return "an equation in which inputs and kernel share an axis of the output"
        if outputs != "".join([letter for letter in letters if letter not in kernel] + free):
            return "an equation that reorders its axes"
        if bias is not None and int(np.prod(bias.shape)) != _size(ref, kernel, free):
            return "a bias that does not run over all outputs"
    return LinearLayer(ref, layer, kind, bias)


def _size(ref: WeightRef, kernel: str, letters: list[str]) -> int:
    return int(np.prod([size for letter, size in zip(kernel, ref.shape, strict=True) if letter in letters]))


def _letters(equation: str) -> tuple[str, str, str]:
    """Letters of inputs, kernel and outputs; an ellipsis stands for leading axes and goes."""
    left, outputs = equation.replace("...", "").replace(" ", "").split("->")
    inputs, kernel = left.split(",")
    return inputs, kernel, outputs
