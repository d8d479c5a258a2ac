"""What the engine computes with the kept values of a kernel alone: one class a kind of layer.

Only exact classes of the model's own Keras are taken; a subclass may do anything with its kernel.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from sparsekit.engine.conv_functions import ConvStructure, sparse_conv1d, sparse_conv2d
from sparsekit.engine.functions import Structure, sparse_dense
from sparsekit.flavour import Flavour

# `product(x, bias, activation)`: what a layer does with a kernel; bias None or a vector, activation None or "relu".
Product = Callable[..., Any]


class Operation(ABC):
    """What one kernel is used for; `shape` is the kernel's."""

    shape: tuple[int, ...]

    @property
    @abstractmethod
    def bias_shape(self) -> tuple[int, ...]:
        """Shape of a bias for each of the outputs."""

    @abstractmethod
    def dense(self, x: Any, kernel: Any) -> Any:
        """The product with the full kernel, by TensorFlow's own op."""

    @abstractmethod
    def structure(self, keep: Any) -> Any:
        """Index arrays of a mask of the kernel's shape, an array or a tensor."""

    @abstractmethod
    def sparse(
        self, x: Any, values: Any, structure: Any, bias: Any, activation: str | None, input_gradient: bool
    ) -> Any:
        """The same product from the kept values, with bias and activation."""

    @abstractmethod
    def multiplications(self, x_shape: tuple[int, ...]) -> int:
        """Multiplications of the dense product for an input of this shape."""

    @abstractmethod
    def why_not(self, x_shape: tuple[int | None, ...]) -> str | None:
        """Why an input of this shape cannot be used; None if it can."""

    @abstractmethod
    def key(self) -> str:
        """Text that tells apart operations that may take different times on the same input."""


@dataclass(frozen=True)
class Matrix(Operation):
    """A sum over the last axes of the input and the first ones of the kernel.

    Args:
        shape: shape of the kernel.
        contracted: how many axes are summed over.
    """

    shape: tuple[int, ...]
    contracted: int = 1

    @property
    def inputs(self) -> int:
        return math.prod(self.shape[: self.contracted])

    @property
    def outputs(self) -> int:
        return math.prod(self.bias_shape)

    @property
    def bias_shape(self) -> tuple[int, ...]:
        return self.shape[self.contracted :]

    def dense(self, x: Any, kernel: Any) -> Any:
        kernel = tf.convert_to_tensor(kernel)
        return tf.tensordot(x, kernel, self.contracted)

    def structure(self, keep: Any) -> Structure:
        return Structure.from_mask(tf.reshape(keep, (self.inputs, self.outputs)))

    def sparse(
        self, x: Any, values: Any, structure: Any, bias: Any, activation: str | None, input_gradient: bool
    ) -> Any:
        del input_gradient  # the op's gradient finds out by itself
        x = tf.convert_to_tensor(x)
        lead = tf.shape(x)[: -self.contracted]
        if self.contracted > 1:
            known = x.shape[: -self.contracted]
            x = tf.reshape(x, tf.concat([lead, [self.inputs]], 0))
            x.set_shape([*known, self.inputs])
        y = sparse_dense(x, values, structure, bias, activation)
        rest = self.bias_shape
        if len(rest) > 1:
            known = y.shape[:-1]
            y = tf.reshape(y, tf.concat([lead, rest], 0))
            y.set_shape([*known, *rest])
        return y

    def multiplications(self, x_shape: tuple[int, ...]) -> int:
        return math.prod(x_shape) * self.outputs

    def why_not(self, x_shape: tuple[int | None, ...]) -> str | None:
        return None if len(x_shape) > self.contracted else "its input has no batch axis"

    def key(self) -> str:
        return f"matrix {self.inputs}x{self.outputs}"


@dataclass(frozen=True)
class Convolution(Operation):
    """A convolution, channels last.

    Args:
        shape: shape of the kernel.
        strides: one number for each spatial axis.
        padding: `"same"`, `"valid"` or `"causal"`.
        dilation: one number for each spatial axis.
        groups: number of channel groups.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    padding: str
    dilation: tuple[int, ...]
    groups: int

    @property
    def bias_shape(self) -> tuple[int, ...]:
        return self.shape[-1:]

    def dense(self, x: Any, kernel: Any) -> Any:
        padding = self.padding.upper()
        if self.padding == "causal":
            x = tf.pad(x, [[0, 0], [(self.shape[0] - 1) * self.dilation[0], 0], [0, 0]])
            padding = "VALID"
        return tf.nn.convolution(x, tf.convert_to_tensor(kernel), list(self.strides), padding, dilations=self.dilation)

    def structure(self, keep: Any) -> ConvStructure:
        return ConvStructure.from_mask(keep, self.strides, self.padding, self.dilation, self.groups)

    def sparse(
        self, x: Any, values: Any, structure: Any, bias: Any, activation: str | None, input_gradient: bool
    ) -> Any:
        run = sparse_conv1d if len(self.shape) == 3 else sparse_conv2d
        return run(x, values, structure, bias, activation, input_gradient)

    def multiplications(self, x_shape: tuple[int, ...]) -> int:
        positions = 1
        for size, kernel, stride, dilation in zip(
            x_shape[1:-1], self.shape[:-2], self.strides, self.dilation, strict=True
        ):
            lost = (kernel - 1) * dilation if self.padding == "valid" else 0
            positions *= max(0, -(-(size - lost) // stride))
        return x_shape[0] * positions * math.prod(self.shape)

    def why_not(self, x_shape: tuple[int | None, ...]) -> str | None:
        return None if len(x_shape) == len(self.shape) else "its input has more than one batch axis"

    def key(self) -> str:
        return f"convolution {self.shape} {self.strides} {self.padding} {self.dilation} {self.groups}"


class LayerForm(ABC):
    """A kind of layer whose kernels the engine can stand in for.

    `classes` are the names of the exact classes, `roles` those of the kernels.
    """

    classes: tuple[str, ...]
    roles: tuple[str, ...] = ("kernel",)

    def fits(self, flavour: Flavour, layer: Any) -> bool:
        return any(type(layer) is getattr(flavour.keras.layers, name, None) for name in self.classes)

    @abstractmethod
    def why_not(self, layer: Any, training: bool = True) -> str | None:
        """Why this one cannot be taken; None if it can."""

    @abstractmethod
    def operation(self, layer: Any, role: str) -> Operation:
        """What the layer uses a kernel for."""

    @abstractmethod
    def call(self, flavour: Flavour, layer: Any, products: Mapping[str, Product]) -> Callable[..., Any]:
        """The layer's `call`, with its products with kernels done by others."""


class FeedForward(LayerForm):
    """One kernel, then a bias, then an activation."""

    def call(self, flavour: Flavour, layer: Any, products: Mapping[str, Product]) -> Callable[..., Any]:
        product, activation = products["kernel"], layer.activation
        fused = "relu" if activation is flavour.keras.activations.relu else None
        applied = None if fused or activation is flavour.keras.activations.linear else activation

        def call(inputs: Any, training: Any = None) -> Any:
            del training
            y = product(inputs, layer.bias if layer.use_bias else None, fused)
            return y if applied is None else applied(y)

        return call


class DenseForm(FeedForward):
    classes = ("Dense",)

    def why_not(self, layer: Any, training: bool = True) -> str | None:
        return None

    def operation(self, layer: Any, role: str) -> Operation:
        return Matrix(tuple(int(n) for n in layer.kernel.shape))


class ConvForm(FeedForward):
    classes = ("Conv1D", "Conv2D")

    def why_not(self, layer: Any, training: bool = True) -> str | None:
        return None if layer.data_format == "channels_last" else "it works on channels first"

    def operation(self, layer: Any, role: str) -> Operation:
        shape = tuple(int(n) for n in layer.kernel.shape)
        return Convolution(shape, tuple(layer.strides), layer.padding, tuple(layer.dilation_rate), layer.groups)


class EinsumForm(LayerForm):
    classes = ("EinsumDense",)

    def why_not(self, layer: Any, training: bool = True) -> str | None:
        return None if _contracted(layer.equation) else f"its equation {layer.equation} is no matrix product"

    def operation(self, layer: Any, role: str) -> Matrix:
        return Matrix(tuple(int(n) for n in layer.kernel.shape), _contracted(layer.equation))

    def call(self, flavour: Flavour, layer: Any, products: Mapping[str, Product]) -> Callable[..., Any]:
        product, activation, bias = products["kernel"], layer.activation, layer.bias
        # A bias over some of the output's axes only is broadcast, which the op does not do.
        whole = bias is not None and tuple(bias.shape) == self.operation(layer, "kernel").bias_shape
        fused = activation is flavour.keras.activations.relu and (whole or bias is None)

        def call(inputs: Any, training: Any = None) -> Any:
            del training
            flat = tf.reshape(tf.convert_to_tensor(bias), [-1]) if whole else None
            y = product(inputs, flat, "relu" if fused else None)
            if bias is not None and not whole:
                y = y + tf.convert_to_tensor(bias)
            return y if fused or activation is None else activation(y)

        return call


def _contracted(equation: str) -> int:
    """How many axes `equation` sums over if it is a matrix product after reshaping, else 0."""
    if "." in equation or equation.count(",") != 1 or "->" not in equation:
        return 0
    sides, output = equation.replace(" ", "").split("->")
    inputs, kernel = sides.split(",")
    for count in range(1, min(len(inputs), len(kernel))):
        lead, summed, rest = inputs[:-count], inputs[-count:], kernel[count:]
        letters = lead + summed + rest
        if kernel[:count] == summed and output == lead + rest and len(set(letters)) == len(letters):
            return count
    return 0


class Cell(LayerForm):
    roles = ("kernel", "recurrent_kernel")

    def why_not(self, layer: Any, training: bool = True) -> str | None:
        drops = training and (layer.dropout or layer.recurrent_dropout)
        return "it drops inputs or states at random" if drops else None

    def operation(self, layer: Any, role: str) -> Operation:
        return Matrix(tuple(int(n) for n in getattr(layer, role).shape))


class LSTMForm(Cell):
    classes = ("LSTMCell",)

    def call(self, flavour: Flavour, layer: Any, products: Mapping[str, Product]) -> Callable[..., Any]:
        gate, activation = layer.recurrent_activation, layer.activation

        def call(inputs: Any, states: Any, training: Any = None) -> Any:
            del training
            h, c = states[0], states[1]
            z = products["kernel"](inputs, layer.bias if layer.use_bias else None) + products["recurrent_kernel"](h)
            i, f, g, o = tf.split(z, 4, axis=1)
            c = gate(f) * c + gate(i) * activation(g)
            h = gate(o) * activation(c)
            return h, [h, c]

        return call


class GRUForm(Cell):
    classes = ("GRUCell",)

    def why_not(self, layer: Any, training: bool = True) -> str | None:
        # Its recurrent kernel is used in two parts, of which the second needs what came of the first.
        return super().why_not(layer, training) if layer.reset_after else "it resets the state before its product"

    def call(self, flavour: Flavour, layer: Any, products: Mapping[str, Product]) -> Callable[..., Any]:
        gate, activation = layer.recurrent_activation, layer.activation

        def call(inputs: Any, states: Any, training: Any = None) -> Any:
            del training
            nested = tf.nest.is_nested(states)
            h = states[0] if nested else states
            biases = tf.unstack(tf.convert_to_tensor(layer.bias)) if layer.use_bias else (None, None)
            x_z, x_r, x_h = tf.split(products["kernel"](inputs, biases[0]), 3, axis=-1)
            h_z, h_r, h_h = tf.split(products["recurrent_kernel"](h, biases[1]), 3, axis=-1)
            z = gate(x_z + h_z)
            candidate = activation(x_h + gate(x_r + h_r) * h_h)
            h = z * h + (1 - z) * candidate
            return h, [h] if nested else h

        return call


FORMS: tuple[LayerForm, ...] = (DenseForm(), ConvForm(), EinsumForm(), LSTMForm(), GRUForm())


def form_of(flavour: Flavour, layer: Any) -> LayerForm | None:
    """The kind of a layer, or None if the engine does not know its class."""
    return next((form for form in FORMS if form.fits(flavour, layer)), None)


def dense_product(operation: Operation, kernel: Any) -> Product:
    """A product with a full kernel."""

    def product(x: Any, bias: Any = None, activation: str | None = None) -> Any:
        y = operation.dense(_floating(x), kernel)
        if bias is not None:
            y = y + tf.reshape(tf.convert_to_tensor(bias), operation.bias_shape)
        return tf.nn.relu(y) if activation == "relu" else y

    return product


def sparse_product(operation: Operation, values: Any, structure: Any, input_gradient: bool = True) -> Product:
    """A product with the kept values of a kernel; the first layer of a model needs no gradient of its input."""

    def product(x: Any, bias: Any = None, activation: str | None = None) -> Any:
        return operation.sparse(_floating(x), values, structure, bias, activation, input_gradient)

    return product


def _floating(x: Any) -> Any:
    """Whole numbers and bools as float32, which is what a product of Keras with them and a kernel gives."""
    x = tf.convert_to_tensor(x)
    return x if x.dtype.is_floating else tf.cast(x, tf.float32)
