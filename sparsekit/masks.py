"""Which weights are kept: one boolean array a weight, True = keep. NumPy only."""

from __future__ import annotations

import contextlib
import math
import os
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np

from .errors import MaskError

# What NumPy, zipfile and zlib raise for a file that was cut short, changed, or never was an .npz.
_DAMAGED = (OSError, ValueError, KeyError, EOFError, RuntimeError, MemoryError, zipfile.BadZipFile, zlib.error)


@dataclass(frozen=True, eq=False)
class Mask:
    """The kept positions of one weight.

    Args:
        path: name of the weight inside its model, for example `"dense/kernel"`.
        keep: bool array with the shape of the weight, True = keep. Stored as a read-only copy.
        pattern: name of the structure that the zeros follow.

    Raises:
        MaskError: if `keep` is not boolean or `path` is empty.
    """

    path: str
    keep: np.ndarray
    pattern: str = "unstructured"

    def __post_init__(self) -> None:
        if not isinstance(self.path, str) or not self.path:
            raise MaskError(f"A mask needs the path of its weight as a non-empty string; got {self.path!r}.")
        keep = np.asarray(self.keep)
        if keep.dtype != np.bool_:
            raise MaskError(
                f"The mask of '{self.path}' has dtype {keep.dtype}; it must be bool (True = keep), "
                "for example `weight != 0`."
            )
        if not _is_constant(keep):
            keep = keep.copy()
            keep.flags.writeable = False
        object.__setattr__(self, "keep", keep)

    @classmethod
    def from_zeros(cls, path: str, weight: np.ndarray) -> Mask:
        """Read a mask from a pruned weight: keep what is not exactly zero."""
        return cls(path, np.asarray(weight) != 0)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.keep.shape

    @property
    def size(self) -> int:
        return self.keep.size

    @property
    def zeros(self) -> int:
        """Number of positions held at zero."""
        return self.size - int(np.count_nonzero(self.keep))

    @property
    def sparsity(self) -> float:
        """Fraction of positions held at zero, in [0, 1]; 0 for an empty weight."""
        return self.zeros / self.size if self.size else 0.0

    @property
    def density(self) -> float:
        """Fraction of positions kept, `1 - sparsity`."""
        return 1.0 - self.sparsity

    def union(self, other: Mask) -> Mask:
        """Keep what either mask keeps."""
        if self.path != other.path or self.shape != other.shape:
            raise MaskError(
                f"Masks of '{self.path}' {self.shape} and '{other.path}' {other.shape} cannot be joined; "
                "both must belong to the same weight."
            )
        return Mask(self.path, self.keep | other.keep, self.pattern)


def _is_constant(array: np.ndarray) -> bool:
    """Whether nobody can write to the memory of an array: a read-only view may look at one that changes."""
    while not array.flags.writeable:
        if array.base is None:
            return True
        if not isinstance(array.base, np.ndarray):
            return False
        array = array.base
    return False


class MaskSet(Mapping[str, np.ndarray]):
    """The masks of one model: weight path -> read-only bool array, True = keep.

    `masks.mask(path)` gives the `Mask` object with its counts.

    Args:
        masks: `Mask` objects, each with its own path.

    Raises:
        MaskError: if two masks share a path.
    """

    def __init__(self, masks: Iterable[Mask] = ()) -> None:
        self._masks: dict[str, Mask] = {}
        for mask in masks:
            if not isinstance(mask, Mask):
                raise MaskError(f"A MaskSet holds Mask objects; got {type(mask).__name__}; see MaskSet.from_arrays.")
            if mask.path in self._masks:
                raise MaskError(f"Two masks are given for '{mask.path}'; each weight has one.")
            self._masks[mask.path] = mask

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> MaskSet:
        """Build a set from plain arrays: path -> bool array, True = keep."""
        return cls(Mask(path, keep) for path, keep in arrays.items())

    def __getitem__(self, path: str) -> np.ndarray:
        return self.mask(path).keep

    def __iter__(self) -> Iterator[str]:
        return iter(self._masks)

    def __len__(self) -> int:
        return len(self._masks)

    def __eq__(self, other: object) -> bool:
        """Whether both keep the same positions of the same weights."""
        # Mapping would compare the values with ==, which has no single answer for arrays.
        if not isinstance(other, MaskSet):
            return NotImplemented
        return self.keys() == other.keys() and all(np.array_equal(self[path], other[path]) for path in self)

    def __repr__(self) -> str:
        return f"MaskSet({len(self)} weights, {self.size} positions, sparsity {self.sparsity:.4f})"

    def mask(self, path: str) -> Mask:
        """The `Mask` of one weight."""
        try:
            return self._masks[path]
        except KeyError:
            known = ", ".join(list(self._masks)[:5]) or "none"
            raise KeyError(f"No mask for '{path}'; known paths: {known}.") from None

    @property
    def size(self) -> int:
        return sum(mask.size for mask in self._masks.values())

    @property
    def zeros(self) -> int:
        return sum(mask.zeros for mask in self._masks.values())

    @property
    def sparsity(self) -> float:
        """Fraction of the masked weights' positions that are held at zero."""
        return self.zeros / self.size if self.size else 0.0

    @property
    def density(self) -> float:
        return 1.0 - self.sparsity

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write all masks to one compressed `.npz`, one bit a position, no pickle, atomically."""
        arrays: dict[str, np.ndarray] = {
            "paths": np.array(list(self._masks), dtype=np.str_),
            "patterns": np.array([mask.pattern for mask in self._masks.values()], dtype=np.str_),
        }
        for index, mask in enumerate(self._masks.values()):
            arrays[f"shape_{index}"] = np.array(mask.shape, dtype=np.int64)
            arrays[f"bits_{index}"] = np.packbits(mask.keep.reshape(-1))
        target = os.fspath(path)
        temporary = f"{target}.{os.getpid()}.tmp"
        try:
            with open(temporary, "wb") as file:
                np.savez_compressed(file, allow_pickle=False, **arrays)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, target)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
            raise

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> MaskSet:
        """Read what `save` wrote.

        Raises:
            MaskError: if the file is not a mask file or is damaged.
        """
        with open(path, "rb") as file:
            try:
                masks = _read_masks(file)
            except _DAMAGED as error:
                raise MaskError(f"'{path}' is not a mask file written by MaskSet.save: {error}") from error
        return cls(masks)


def _read_masks(file: BinaryIO) -> list[Mask]:
    data = np.load(file, allow_pickle=False)
    if isinstance(data, np.ndarray):
        raise ValueError("it holds a single array")
    masks = []
    for index, (name, pattern) in enumerate(zip(data["paths"], data["patterns"], strict=True)):
        keep = unpack(data[f"bits_{index}"], tuple(int(n) for n in data[f"shape_{index}"]))
        masks.append(Mask(str(name), keep, str(pattern)))
    return masks


def unpack(bits: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Turn packed bits (uint8, `np.packbits` order) back into a bool array of `shape`.

    Raises:
        MaskError: if the number of bytes does not fit the shape.
    """
    size = math.prod(shape)
    if min(shape, default=0) < 0 or bits.dtype != np.uint8 or bits.ndim != 1 or bits.size != (size + 7) // 8:
        raise MaskError(f"{bits.size} bytes of packed mask do not fit the shape {shape}.")
    return np.unpackbits(bits, count=size).astype(np.bool_).reshape(shape)
