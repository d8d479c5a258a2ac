"""What goes into and comes out of layers while a model runs on calibration data."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from ..errors import ArgumentError
from ..flavour import Flavour, key_of, native
from ..weights import all_weights, read


def input_batches(data: Any, samples: int, batch_size: int) -> list[Any]:
    """Model inputs of the first samples, in batches; labels are dropped.

    Args:
        data: arrays, `(x, ...)`, a tf.data.Dataset of batches, a PyDataset or Sequence, or an iterable of batches.
        samples: number of samples to take.
        batch_size: samples a batch where `data` is arrays.

    Raises:
        ArgumentError: if there is no data.
    """
    if isinstance(data, tuple):
        if not data:
            raise ArgumentError("data is an empty tuple; give x or (x, y).")
        data = data[0]
    if _is_arrays(data):
        count = min(samples, len(tf.nest.flatten(data)[0]))
        batches = [
            tf.nest.map_structure(lambda a, i=start: _tensor(a[i : min(i + batch_size, count)]), data)
            for start in range(0, count, batch_size)
        ]
    else:
        batches, left = [], samples
        for element in _elements(data):
            inputs = element[0] if isinstance(element, tuple) else element
            size = len(tf.nest.flatten(inputs)[0])
            batches.append(tf.nest.map_structure(lambda a, n=left: _tensor(a[:n]), inputs))
            left -= size
            if left <= 0:
                break
    if not batches:
        raise ArgumentError("data holds no sample; give arrays, (x, y), a tf.data.Dataset or an iterable of batches.")
    return batches


def _tensor(array: Any) -> tf.Tensor:
    tensor = tf.convert_to_tensor(array)
    return tf.cast(tensor, tf.float32) if tensor.dtype == tf.float64 else tensor


def _is_arrays(data: Any) -> bool:
    leaves = tf.nest.flatten(data) if isinstance(data, (list, dict)) else [data]
    return all(isinstance(leaf, (np.ndarray, tf.Tensor)) for leaf in leaves)


def _elements(data: Any) -> Iterator[Any]:
    if hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        # A Keras Sequence may be infinite when iterated over.
        return (data[index] for index in range(len(data)))
    try:
        return iter(data)
    except TypeError:
        raise ArgumentError(
            f"data is a {type(data).__name__}; give arrays, (x, y), a tf.data.Dataset or an iterable of batches."
        ) from None


class Tap:
    """Runs a model and keeps what passes through some of its layers.

    Args:
        flavour: the model's Keras.
        model: the model.
        layers: the layers to listen to.
    """

    def __init__(self, flavour: Flavour, model: Any, layers: list[Any]) -> None:
        self._flavour = flavour
        self._model = model
        self._layers = layers

    def run(self, inputs: Any) -> dict[int, list[tuple[tf.Tensor, tf.Tensor]]]:
        """Run one batch: id of a layer -> its calls as (input, output), layers in the order of their first call.

        A layer that takes several inputs, or that another one runs inside a loop, has an empty list.
        """
        seen: dict[int, list[tuple[tf.Tensor, tf.Tensor]]] = {}
        with contextlib.ExitStack() as stack:
            for layer in self._layers:
                stack.enter_context(_listening(layer, seen))
            if self._flavour.is_keras3 and not self._model._call_has_training_arg:
                self._model(inputs)
            else:
                self._model(inputs, training=False)
        return {
            number: calls if all(_is_value(a) and _is_value(b) for a, b in calls) else []
            for number, calls in seen.items()
        }


@contextlib.contextmanager
def _listening(layer: Any, seen: dict[int, list]) -> Iterator[None]:
    call = layer.call
    attributes = vars(layer)
    shadowed = attributes.get("call")

    def listen(*args: Any, **kwargs: Any) -> Any:
        outputs = call(*args, **kwargs)
        first = args[0] if args else next(iter(kwargs.values()), None)
        seen.setdefault(id(layer), []).append((first, outputs))
        return outputs

    attributes["call"] = listen
    try:
        yield
    finally:
        if shadowed is None:
            del attributes["call"]
        else:
            attributes["call"] = shadowed


def _is_value(tensor: Any) -> bool:
    return isinstance(tensor, tf.Tensor) and not tf.is_symbolic_tensor(tensor)


class Values:
    """A set of values for a model's weights, to be put in and taken out again.

    Args:
        pairs: `(tf.Variable, array)`.
    """

    def __init__(self, pairs: list[tuple[Any, np.ndarray]]) -> None:
        self._pairs = pairs

    @classmethod
    def of(cls, model: Any, given: Any) -> Values:
        """From a model of the same architecture, a list as of `get_weights()`, or a mapping of weight paths.

        Raises:
            ArgumentError: if number, names or shapes do not fit.
        """
        if isinstance(given, Mapping):
            refs = {ref.path: ref.variable for ref in all_weights(model)}
            unknown = [path for path in given if path not in refs]
            if unknown:
                raise ArgumentError(
                    f"reference names '{unknown[0]}', and '{model.name}' has no such weight; its paths are, for "
                    f"example, {', '.join(itertools.islice(refs, 3))}."
                )
            pairs = [(refs[path], np.asarray(array)) for path, array in given.items()]
        else:
            arrays = given.get_weights() if hasattr(given, "get_weights") else given
            if not isinstance(arrays, (list, tuple)) or len(arrays) != len(model.weights):
                count = f"{len(arrays)} arrays" if isinstance(arrays, (list, tuple)) else f"a {type(given).__name__}"
                raise ArgumentError(
                    f"reference is {count}; give the dense model, its get_weights() ({len(model.weights)} arrays) or "
                    "a mapping of weight paths to arrays."
                )
            pairs = list(zip(model.weights, [np.asarray(array) for array in arrays], strict=True))
        for variable, array in pairs:
            if tuple(variable.shape) != array.shape:
                raise ArgumentError(
                    f"reference has shape {array.shape} for '{variable.name}', which has {tuple(variable.shape)}; it "
                    "must come from the same architecture."
                )
        return cls([(native(v), a) for v, a in pairs if tf.as_dtype(v.dtype).is_floating])

    def array(self, variable: Any) -> np.ndarray | None:
        """The value for one variable, None if there is none."""
        key = key_of(variable)
        return next((array for own, array in self._pairs if key_of(own) == key), None)

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Put the values into the model; take them out in the end, whatever happens."""
        before = [np.array(read(variable)) for variable, _ in self._pairs]
        try:
            for variable, array in self._pairs:
                variable.assign(array)
            yield
        finally:
            for (variable, _), array in zip(self._pairs, before, strict=True):
                variable.assign(array)
