"""The sparse file: all of a model's .h5, with each array as its non-zero values and their gaps. No pickle.

It is an HDF5 file with two byte arrays. `head` is compressed JSON: the attributes of the .h5, the names of its layers
and arrays, and how each array is coded. `data` holds the coded arrays.

A coded array is a list of parts. One part holds the positions of the values whose bits are not all zero: the number of
zeros before each, as one byte (255: add 255 and go on), entropy-coded. The other parts hold the values, byte by byte
plane: the plane of signs and exponents compresses, those of mantissas mostly do not and stay as they are. -0.0 and NaN
come back as they were, since bits are kept and not numbers.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import tensorflow as tf

from ..errors import FileError
from ..flavour import Flavour
from . import masks_group
from .atomic import h5_file
from .configs import parsed_dict, version
from .hdf5_index import Dataset, Group
from .stored import StoredArray, StoredModel

MARK = "sparsekit_sparse"
_VERSION = 1
_RAW, _ZLIB = 0, 1
# Below this share of zeros their positions cost more than they save.
_WORTH = 0.05
_SAMPLE = 1 << 16
# A file may claim this many bytes of weights for each of its own; 99.9 % zeros is 1000.
_MAX_RATIO, _ALWAYS = 4000, 64 << 20
_ATTRIBUTES = ("model_config", "training_config", "keras_version", "backend")


@dataclass(frozen=True)
class Sizes:
    """Sizes of one model in bytes, side by side.

    Args:
        dense: its values as they lie in memory and in a plain .h5.
        sparse: the coded values.
        bound: the entropy bound: bits of the non-zero values plus the information in where they are.
    """

    dense: int
    sparse: int
    bound: float


def write_sparse(model: Any, flavour: Flavour, path: Path, include_optimizer: bool) -> Sizes:
    """Write a model as a sparse file.

    Returns:
        How large it is in each form.
    """
    with h5py.File(path.name, "w", driver="core", backing_store=False) as dense:
        flavour.write_h5(model, dense, include_optimizer)
        packer = Packer()
        weights = dense["model_weights"]
        head: dict[str, Any] = {
            "flavour": flavour.name,
            "attributes": {name: _text(dense.attrs[name]) for name in _ATTRIBUTES if name in dense.attrs},
            "layers": [[name, packer.group(weights[name])] for name in _names(weights, "layer_names")],
            "top_level": packer.group(weights["top_level_model_weights"]),
            "optimizer": packer.group(dense["optimizer_weights"]) if "optimizer_weights" in dense else [],
        }
    masks = masks_group.pack(model, zeros_tell=True)
    head["masks"] = {name: packer.add(array) for name, array in masks.items()}
    head["arrays"] = packer.table
    coded = zlib.compress(json.dumps(head, separators=(",", ":")).encode(), 9)
    with h5_file(path) as file:
        file.attrs[MARK] = _VERSION
        file.attrs["crc"] = zlib.crc32(coded)
        file.create_dataset("head", data=np.frombuffer(coded, np.uint8))
        data = file.create_dataset("data", (packer.size,), np.uint8)
        offset = 0
        for block in packer.blocks:
            data[offset : offset + len(block)] = np.frombuffer(block, np.uint8)
            offset += len(block)
    return Sizes(packer.dense, packer.size, packer.bound)


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _names(group: h5py.Group, attribute: str) -> list[str]:
    """A list of names, which Keras cuts into numbered pieces if it is too long for one attribute."""
    pieces = [group.attrs[attribute]] if attribute in group.attrs else []
    while attribute not in group.attrs and f"{attribute}{len(pieces)}" in group.attrs:
        pieces.append(group.attrs[f"{attribute}{len(pieces)}"])
    return [_text(name) for piece in pieces for name in np.ravel(piece)]


def read_sparse(file: Group) -> StoredModel:
    """What a sparse file holds; its arrays are decoded when they are read.

    Raises:
        FileError: if it is damaged or from a later version.
    """
    path = file.path
    try:
        if int(file.attributes[MARK]) > _VERSION:
            raise FileError(f"'{path}' was written by a later sparsekit; run `pip install -U sparsekit`.")
        coded, data = file.dataset("head").read().tobytes(), file.dataset("data")
        if zlib.crc32(coded) != int(file.attributes["crc"]):
            raise ValueError("The checksum of the head differs.")
        if data.dtype != np.uint8 or len(data.shape) != 1:
            raise ValueError("The data is no array of bytes.")
        head = json.loads(_inflate(coded, _ALWAYS))
        arrays = [Coded(entry, data) for entry in head["arrays"]]
        dense = sum(array.nbytes for array in arrays)
        if dense > _ALWAYS + _MAX_RATIO * path.stat().st_size:
            raise ValueError(f"It claims {dense} bytes of weights.")
        masks, attributes = head["masks"], head["attributes"]

        def stored(group: list[Any]) -> list[StoredArray]:
            return [StoredArray(str(name), arrays[index].shape, arrays[index].read) for name, index in group]

        return StoredModel(
            format="sparse.h5",
            keras_version=version(attributes["keras_version"]),
            config=parsed_dict(attributes["model_config"], "model_config", path),
            training_config=(
                parsed_dict(attributes["training_config"], "training_config", path)
                if "training_config" in attributes
                else None
            ),
            layers=[(str(name), stored(group)) for name, group in head["layers"]],
            top_level=stored(head["top_level"]),
            optimizer=stored(head["optimizer"]),
            masks=masks_group.unpacked(list(masks), lambda name: arrays[masks[name]].read(), path),
            flavour=str(head["flavour"]),
        )
    except FileError:
        raise
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError, zlib.error) as error:
        raise FileError(_damaged(path)) from error


def _damaged(path: Path | None) -> str:
    return f"'{path}' is a damaged sparse file (truncated or changed bytes); get the file again from where it came."


class Packer:
    """Codes arrays one after another and keeps the table of where they are."""

    def __init__(self) -> None:
        self.table: list[dict[str, Any]] = []
        self.blocks: list[bytes] = []
        self.size = self.dense = 0
        self.bound = 0.0

    def group(self, group: h5py.Group) -> list[list[Any]]:
        return [[name, self.add(group[name][()])] for name in _names(group, "weight_names")]

    def add(self, array: np.ndarray) -> int:
        """Code one array; gives its place in the table."""
        array = np.asarray(array)
        dtype = "bfloat16" if array.dtype.name == "bfloat16" else array.dtype.str
        values = np.ascontiguousarray(array).reshape(-1).view(np.dtype(f"<u{array.dtype.itemsize}"))
        entry: dict[str, Any] = {"dtype": dtype, "shape": list(array.shape)}
        kept = np.flatnonzero(values != 0)
        share = 1 - len(kept) / values.size if values.size else 0.0
        self.dense += array.nbytes
        if 0 < share < 1:
            entropy = -share * np.log2(share) - (1 - share) * np.log2(1 - share)
            self.bound += values.size * entropy / 8
        self.bound += len(kept) * array.dtype.itemsize
        check = zlib.crc32(values.view(np.uint8).data)
        parts = []
        if share > _WORTH:
            entry["kept"] = len(kept)
            parts.append(self._part(gaps(kept)))
            values = values[kept]
        planes = values.view(np.uint8).reshape(-1, array.dtype.itemsize)
        parts += [self._part(np.ascontiguousarray(planes[:, place])) for place in range(planes.shape[1])]
        self.table.append({**entry, "parts": parts, "crc": check})
        return len(self.table) - 1

    def decoder(self, number: int) -> Coded:
        """What reads an array back out of the blocks."""
        return Coded(self.table[number], b"".join(self.blocks))

    def _part(self, raw: np.ndarray) -> list[int]:
        """Store one run of bytes the shortest of three ways, which a piece from its middle decides."""
        start = max(0, (raw.size - _SAMPLE) // 2)
        sample = raw[start : start + _SAMPLE].tobytes()
        plain, coded = len(sample), len(_deflate(sample, zlib.Z_HUFFMAN_ONLY))
        matched = len(_deflate(sample, zlib.Z_DEFAULT_STRATEGY))
        method, block = _RAW, raw.tobytes()
        if min(coded, matched) < 0.97 * plain:
            # Random gaps need no search for repetitions, which is the slow part; those of a pattern gain by it.
            strategy = zlib.Z_DEFAULT_STRATEGY if matched < 0.9 * coded else zlib.Z_HUFFMAN_ONLY
            method, block = _ZLIB, _deflate(block, strategy)
        self.blocks.append(block)
        place, self.size = self.size, self.size + len(block)
        return [method, place, len(block), raw.size]


def gaps(kept: np.ndarray) -> np.ndarray:
    """Positions as the number of dropped ones before each, in bytes."""
    skipped = np.diff(kept, prepend=-1) - 1
    wide = skipped // 255
    if not wide.any():
        return skipped.astype(np.uint8)
    ends = np.cumsum(wide + 1) - 1
    coded = np.full(int(ends[-1]) + 1, 255, np.uint8)
    coded[ends] = skipped % 255
    return coded


def positions(coded: np.ndarray) -> np.ndarray:
    """What `gaps` coded."""
    ends = coded != 255
    return (np.cumsum(coded, dtype=np.int64) + np.cumsum(ends, dtype=np.int64))[ends] - 1


def _deflate(raw: bytes, strategy: int) -> bytes:
    packer = zlib.compressobj(6, zlib.DEFLATED, 15, 9, strategy)
    return packer.compress(raw) + packer.flush()


def _inflate(coded: bytes, most: int) -> bytes:
    """Unpack at most so many bytes."""
    unpacker = zlib.decompressobj()
    raw = unpacker.decompress(coded, most)
    if unpacker.unconsumed_tail or not unpacker.eof:
        raise ValueError("There is more or less data than it says.")
    return raw


class Coded:
    """One array of the file."""

    def __init__(self, entry: dict[str, Any], data: Dataset | bytes) -> None:
        self.dtype = np.dtype(tf.bfloat16.as_numpy_dtype if entry["dtype"] == "bfloat16" else entry["dtype"])
        if self.dtype.kind not in "fiub" and self.dtype.name != "bfloat16":
            raise ValueError(f"{self.dtype} is no number.")
        self.shape = tuple(int(n) for n in entry["shape"])
        if min(self.shape, default=0) < 0:
            raise ValueError(f"The shape {self.shape} is impossible.")
        self.size = 1
        for n in self.shape:
            self.size *= n
        self.nbytes = self.size * self.dtype.itemsize
        self.kept = None if entry.get("kept") is None else int(entry["kept"])
        self._parts = [tuple(int(n) for n in part) for part in entry["parts"]]
        self._crc, self._data = int(entry["crc"]), data

    def read(self) -> np.ndarray:
        """The values.

        Raises:
            FileError: if the bytes are damaged.
        """
        try:
            return self._read()
        except FileError:
            raise
        except (ValueError, IndexError, zlib.error) as error:
            raise FileError(_damaged(getattr(self._data, "path", None))) from error

    def _read(self) -> np.ndarray:
        width, count = self.dtype.itemsize, self.size if self.kept is None else self.kept
        parts = list(self._parts)
        places = None
        if self.kept is not None:
            places = positions(self._part(parts.pop(0), 2 * self.size + 1))
            if len(places) != count or (count and places[-1] >= self.size):
                raise ValueError("The positions do not fit the shape.")
        if len(parts) != width:
            raise ValueError("A plane of bytes is missing.")
        planes = np.empty((count, width), np.uint8)
        for place, part in enumerate(parts):
            planes[:, place] = self._part(part, count)
        values = planes.reshape(-1).view(np.dtype(f"<u{width}"))
        if places is not None:
            full = np.zeros(self.size, values.dtype)
            full[places] = values
            values = full
        if zlib.crc32(values.view(np.uint8).data) != self._crc:
            raise ValueError("The checksum differs.")
        return values.view(self.dtype).reshape(self.shape)

    def _part(self, part: tuple[int, ...], most: int) -> np.ndarray:
        method, place, length, size = part
        whole = len(self._data) if isinstance(self._data, bytes) else self._data.shape[0]
        if min(part) < 0 or place + length > whole or size > most:
            raise ValueError("A part lies outside of the data.")
        if isinstance(self._data, bytes) or not length:
            block = self._data[place : place + length] if isinstance(self._data, bytes) else b""
        else:
            block = self._data.read(place, place + length).tobytes()
        raw = block if method == _RAW else _inflate(block, size)
        if len(raw) != size:
            raise ValueError("A part has another length than it says.")
        return np.frombuffer(raw, np.uint8)
