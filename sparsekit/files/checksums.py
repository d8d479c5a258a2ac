"""Checksums of all that is in an .h5, riding along in it: HDF5 keeps none of its own, and a changed bit goes unseen."""

from __future__ import annotations

import json
import sys
import zlib
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from ..errors import FileError
from .hdf5_child import Reader
from .hdf5_index import Dataset, Group, changed

# Attribute that says of which Keras the model was that sparsekit saved. A file has both, or the one that is missing was
# damaged.
FLAVOUR = "sparsekit_flavour"
NAME = "sparsekit_checksums"


def add_checksums(file: h5py.File) -> None:
    """Put the checksums of all that is in an open .h5 into it."""
    tree = Reader(file, sys.maxsize).tree
    found = Group(Path(file.filename), "", tree["attributes"], tree["members"])
    arrays = {
        one.name: [_of(_shape(one)), zlib.crc32(np.ascontiguousarray(file[one.name][()]).data)]
        for one in found.datasets()
        if one.entry["kind"] in "fiub"
    }
    attributes = {
        group.name: {name: _of(value) for name, value in group.attributes.items()} for group in (found, *found.groups())
    }
    coded = json.dumps({"attributes": attributes, "arrays": arrays}).encode()
    file.create_dataset(NAME, data=np.frombuffer(coded, np.uint8))


def expect_checksums(file: Group) -> None:
    """Compare attributes and shapes of a file with its checksums; the values of an array are compared once it is read.

    Files that sparsekit did not write have none. What was added to a file later is none of ours.

    Raises:
        FileError: if something has changed since sparsekit wrote it.
    """
    if FLAVOUR not in file.attributes and NAME not in file:
        return
    what = NAME
    try:
        sums = json.loads(file.dataset(NAME).read().tobytes())
        for name, wanted in sums["attributes"].items():
            what = name
            group = file.group(name) if name else file
            for what, crc in wanted.items():
                if _of(group.attributes[what]) != crc:
                    raise ValueError("It differs.")
        for what, (shape, crc) in sums["arrays"].items():
            dataset = file.dataset(what)
            if _of(_shape(dataset)) != shape:
                raise ValueError("It differs.")
            dataset.entry["crc"] = crc
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise FileError(changed(file.path, f"'{what}'")) from error


def _shape(dataset: Dataset) -> Any:
    return [dataset.entry["shape"], dataset.entry["dtype"]]


def _of(value: Any) -> int:
    return zlib.crc32(json.dumps(value).encode())
