"""What an HDF5 file holds, found by a process of its own; the numbers are then read by offset, without the library."""

from __future__ import annotations

import base64
import json
import math
import os
import subprocess
import sys
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import FileError

_CHILD = Path(__file__).with_name("hdf5_child.py")
_TIMEOUT = 150
_DEFLATE, _SHUFFLE, _CHECKSUM = 1, 2, 3
# What deflate reaches at most on constant data is about 1000; a file that claims more is hostile.
_MAX_RATIO = 1100


@dataclass(frozen=True, eq=False)
class Dataset:
    """One array of numbers in an HDF5 file.

    Args:
        path: the file.
        name: path of the array inside the file.
        entry: shape, dtype and place, as found by the other process, and the checksum of its values if there is one.
    """

    path: Path
    name: str
    entry: dict[str, Any] = field(repr=False)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.entry["shape"])

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(self.entry["dtype"])

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def check(self) -> None:
        """Refuse an array that is not wholly in this file, before anything is allocated for it.

        Raises:
            FileError: if it is elsewhere, no numbers, or larger than the file can hold.
        """
        layout, size = self.entry["layout"], self.path.stat().st_size
        if layout == "outside":
            raise FileError(f"'{self.path}' keeps '{self.name}' in another file, which is not opened.")
        if layout == "filtered":
            raise FileError(
                f"'{self.path}' stores '{self.name}' with the HDF5 filter '{self.entry['filter']}', which is not read; "
                "open the model in plain Keras and save it again."
            )
        if layout == "other" or self.entry["kind"] not in "fiub":
            raise FileError(f"'{self.path}' holds '{self.name}' as {self.entry['dtype']}, which is no number.")
        fits = {
            "contiguous": lambda: self.entry["offset"] + self.nbytes <= size,
            "inline": lambda: len(self.entry["data"]) * 3 // 4 <= self.nbytes + 2,
            "chunked": lambda: (
                all(offset + length <= size for _, _, offset, length in self.entry["pieces"])
                and self.nbytes <= _MAX_RATIO * sum(piece[3] for piece in self.entry["pieces"])
                and all(self.entry["chunk"])
            ),
        }
        if layout not in fits or not fits[layout]():
            raise FileError(f"'{self.path}' is damaged: '{self.name}' claims more bytes than there are in the file.")

    def read(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """The values; of a contiguous vector also a part.

        Raises:
            FileError: if they cannot be read.
        """
        self.check()
        try:
            if self.entry["layout"] == "contiguous":
                values = self._contiguous(start, stop)
            else:
                values = self._inline() if self.entry["layout"] == "inline" else self._chunked()
                values = values if start == 0 and stop is None else values[start:stop]
        except (OSError, ValueError, IndexError, TypeError, zlib.error) as error:
            raise FileError(f"'{self.path}' is damaged: '{self.name}' cannot be read.") from error
        if "crc" in self.entry and zlib.crc32(np.ascontiguousarray(values).data) != self.entry["crc"]:
            raise FileError(changed(self.path, f"'{self.name}'"))
        return values

    def _contiguous(self, start: int, stop: int | None) -> np.ndarray:
        count = math.prod(self.shape)
        if start or stop is not None:
            count = min(stop if stop is not None else count, count) - start
        with open(self.path, "rb") as file:
            file.seek(self.entry["offset"] + start * self.dtype.itemsize)
            values = np.fromfile(file, self.dtype, count)
        if values.size != count:
            raise ValueError("The file ends early.")
        return values if start or stop is not None else values.reshape(self.shape)

    def _inline(self) -> np.ndarray:
        return np.frombuffer(base64.b64decode(self.entry["data"]), self.dtype).reshape(self.shape)

    def _chunked(self) -> np.ndarray:
        chunk = tuple(self.entry["chunk"])
        length, width = math.prod(chunk) * self.dtype.itemsize, self.dtype.itemsize
        if length > max(_MAX_RATIO * self.path.stat().st_size, 1 << 20):
            raise ValueError("A piece is larger than the file can hold.")
        values = np.zeros(self.shape, self.dtype)
        with open(self.path, "rb") as file:
            for place, mask, offset, size in self.entry["pieces"]:
                file.seek(offset)
                block = file.read(size)
                for number, kind in reversed(list(enumerate(self.entry["filters"]))):
                    if mask >> number & 1:
                        continue
                    if kind == _DEFLATE:
                        block = zlib.decompressobj().decompress(block, length + 4)
                    elif kind == _CHECKSUM:
                        block = block[:-4]
                    elif kind == _SHUFFLE:
                        block = np.frombuffer(block, np.uint8).reshape(width, -1).T.tobytes()
                piece = np.frombuffer(block, self.dtype, math.prod(chunk)).reshape(chunk)
                target = tuple(slice(p, min(p + c, n)) for p, c, n in zip(place, chunk, self.shape, strict=True))
                values[target] = piece[tuple(slice(0, s.stop - s.start) for s in target)]
        return values


def changed(path: Path, what: str) -> str:
    """One sentence for a file that is not as sparsekit wrote it."""
    return (
        f"'{path}' is damaged: {what} has changed since sparsekit wrote the file; get it again from where it came or, "
        "if you changed it on purpose, open it with plain Keras and save it anew."
    )


@dataclass(frozen=True, eq=False)
class Group:
    """A group of an HDF5 file.

    Args:
        path: the file.
        name: path of the group inside the file.
        attributes: its attributes that are strings, numbers or lists of them.
        members: name -> entry of what it holds.
    """

    path: Path
    name: str
    attributes: dict[str, Any] = field(repr=False)
    members: dict[str, Any] = field(repr=False)

    def __contains__(self, name: str) -> bool:
        return name in self.members

    def group(self, name: str) -> Group:
        """A group below this one.

        Raises:
            FileError: if it is not there.
        """
        entry = self._find(name)
        if "members" not in entry:
            raise FileError(f"'{self.path}' is damaged: '{name}' should be a group.")
        return Group(self.path, name, entry["attributes"], entry["members"])

    def dataset(self, name: str) -> Dataset:
        """An array below this group.

        Raises:
            FileError: if it is not there, or not wholly in this file.
        """
        entry = self._find(name)
        if "shape" not in entry:
            raise FileError(f"'{self.path}' is damaged: '{name}' should be an array of numbers.")
        found = Dataset(self.path, name, entry)
        found.check()
        return found

    def check_closed(self) -> None:
        """Refuse what leads out of the file, before a reader that would follow it opens the file.

        Raises:
            FileError: naming the link or the array.
        """
        for group in (self, *self.groups()):
            for name, entry in group.members.items():
                if "link" in entry:
                    group._find(name)
        for dataset in self.datasets():
            dataset.check()

    def _find(self, name: str) -> dict[str, Any]:
        here: dict[str, Any] = {"attributes": self.attributes, "members": self.members}
        for part in name.split("/"):
            if not part:
                continue
            if part not in here.get("members", {}):
                raise FileError(f"'{self.path}' is damaged or incomplete: it lists '{name}', which is not there.")
            here = here["members"][part]
            if "link" in here:
                raise FileError(f"'{self.path}' links '{name}' to another place, which is not followed.")
        return here

    def groups(self) -> list[Group]:
        """Every group below this one, at any depth."""
        found: list[Group] = []
        for name, entry in self.members.items():
            if "members" in entry:
                group = Group(
                    self.path, f"{self.name}/{name}" if self.name else name, entry["attributes"], entry["members"]
                )
                found += [group, *group.groups()]
        return found

    def datasets(self) -> list[Dataset]:
        """Every array below this group, at any depth."""
        return [
            Dataset(self.path, f"{group.name}/{name}" if group.name else name, entry)
            for group in (self, *self.groups())
            for name, entry in group.members.items()
            if "shape" in entry
        ]


def index(path: Path) -> Group:
    """What an HDF5 file holds. A file that crashes the HDF5 library, or keeps it busy for ever, does so elsewhere.

    Raises:
        FileError: if the file is damaged.
    """
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "HDF5_USE_FILE_LOCKING": "FALSE"}
    # What this process has on its path by other means is to be found there, too.
    environment["PYTHONPATH"] = os.pathsep.join(entry for entry in sys.path if entry)
    try:
        done = subprocess.run(
            [sys.executable, str(_CHILD), os.fspath(path.absolute())],
            capture_output=True,
            timeout=_TIMEOUT,
            env=environment,
            check=False,
        )
        if done.returncode == 0:
            tree = json.loads(done.stdout)
            return Group(path, "", tree["attributes"], tree["members"])
        reason = done.stderr.decode("utf-8", "replace").strip().rsplit("\n", 1)[-1]
    except subprocess.TimeoutExpired:
        reason = "It keeps the HDF5 library busy for ever."
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        reason = str(error)
    if reason.startswith(("ModuleNotFoundError", "ImportError")):
        raise FileError(f"'{path}' cannot be read because h5py does not work here: {reason}.")
    raise FileError(
        f"'{path}' is a damaged HDF5 file (truncated or changed bytes); get the file again from where it came."
    ) from (OSError(reason) if reason else None)
