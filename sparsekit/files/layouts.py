"""Arrays as Keras 1, Theano and CuDNN laid them out, in the layout of today."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .keras1 import CONVOLUTIONS
from .stored import StoredArray

# Keras 1 called every kernel W.
_OLD_KERNEL = re.compile(r".*_W(_\d+)?(:0)?")


def of_today(arrays: list[StoredArray], cells: Sequence[str]) -> list[StoredArray]:
    """The arrays of one layer of a file, with those of recurrent cells as one kernel, recurrent kernel and bias.

    Args:
        arrays: in the file's order.
        cells: class of each recurrent cell in the layer, in order.
    """
    return _from_cudnn(_from_gates(arrays, list(cells)))


def convolution(array: StoredArray, layer: Any, backend: str) -> StoredArray:
    """The kernel of a convolution as its layer takes it: positions, then channels in, then channels out.

    Args:
        array: as the file has it.
        layer: the layer that it is for.
        backend: what the file's Keras ran on.
    """
    kind = type(layer).__name__
    if kind not in CONVOLUTIONS:
        return array
    rank = len(array.shape)
    first = getattr(layer, "data_format", None) == "channels_first"
    if _OLD_KERNEL.fullmatch(array.name):
        if kind == "Conv1D" and rank == 4:
            # It was one of a picture of width 1, and before Keras 1.1 with the channels in front.
            if array.shape[1] != 1:
                array = _changed(array, (array.shape[2], 1, array.shape[1], array.shape[0]), _channels_last)
            array = _changed(array, (array.shape[0], *array.shape[2:]), lambda values: values[:, 0])
        elif kind in ("Conv2D", "Conv3D") and first:
            array = _changed(array, (*array.shape[2:], array.shape[1], array.shape[0]), _channels_last)
    if backend == "theano":
        turned = tuple(range(len(array.shape) - 2))
        array = _changed(array, array.shape, lambda values: np.flip(values, turned))
    return array


def _channels_last(values: np.ndarray) -> np.ndarray:
    """(out, in, positions) as (positions, in, out)."""
    return np.transpose(values, (*range(2, values.ndim), 1, 0))


def _from_gates(arrays: list[StoredArray], cells: list[str]) -> list[StoredArray]:
    """Keras 1 kept the weights of each gate apart: 12 arrays for an LSTM, 9 for a GRU."""
    found: list[StoredArray] = []
    while arrays:
        kind = cells[0].removesuffix("Cell") if cells and _is_gate(arrays[:3]) else ""
        # LSTM's gates were in the order i, c, f, o.
        order = {"LSTM": (0, 2, 1, 3), "GRU": (0, 1, 2)}.get(kind, ())
        gates = [arrays[3 * gate : 3 * gate + 3] for gate in order]
        if not gates or not all(map(_is_gate, gates)):
            found.append(arrays[0])
            arrays = arrays[1:]
            continue
        cells = cells[1:]
        for place in range(3):
            parts = [gate[place] for gate in gates]
            shape = (*parts[0].shape[:-1], sum(part.shape[-1] for part in parts))

            def joined(parts: list[StoredArray] = parts) -> np.ndarray:
                return np.concatenate([part.read() for part in parts], axis=-1)

            found.append(StoredArray(parts[0].name, shape, joined))
        arrays = arrays[3 * len(order) :]
    return found


def _is_gate(arrays: Sequence[StoredArray]) -> bool:
    if [len(array.shape) for array in arrays] != [2, 2, 1]:
        return False
    units = arrays[2].shape[0]
    return arrays[1].shape == (units, units) and arrays[0].shape[1] == units


def _from_cudnn(arrays: list[StoredArray]) -> list[StoredArray]:
    """CuDNN has the matrix of each gate the other way round and two biases, which an LSTM adds up."""
    found = list(arrays)
    for place in range(len(arrays) - 2):
        kernel, recurrent, bias = arrays[place : place + 3]
        if [len(one.shape) for one in (kernel, recurrent, bias)] != [2, 2, 1] or not recurrent.shape[0]:
            continue
        gates = recurrent.shape[1] // recurrent.shape[0]
        width = gates * recurrent.shape[0]
        if gates not in (3, 4) or kernel.shape[1] != width or recurrent.shape[1] != width or bias.shape != (2 * width,):
            continue

        def turned(gate: np.ndarray) -> np.ndarray:
            return gate.T.reshape(gate.shape, order="F")

        found[place] = _changed(kernel, kernel.shape, _each_gate(gates, turned))
        found[place + 1] = _changed(recurrent, recurrent.shape, _each_gate(gates, np.transpose))
        if gates == 4:
            found[place + 2] = _changed(bias, (width,), lambda values: values.reshape(2, -1).sum(axis=0))
        else:
            found[place + 2] = _changed(bias, (2, width), lambda values: values.reshape(2, -1))
    return found


def _each_gate(gates: int, change: Callable[[np.ndarray], np.ndarray]) -> Callable[[np.ndarray], np.ndarray]:
    return lambda values: np.concatenate([change(gate) for gate in np.split(values, gates, axis=1)], axis=1)


def _changed(array: StoredArray, shape: tuple[int, ...], change: Callable[[np.ndarray], np.ndarray]) -> StoredArray:
    read = array.read
    return StoredArray(array.name, shape, lambda: change(read()))
