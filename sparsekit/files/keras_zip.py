"""Read .keras files: a zip that holds the config, the weights and, from us, the masks."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import FileError
from .masks_group import MEMBER, unpacked
from .stored import StoredMasks


def read_json(path: Path, member: str) -> dict[str, Any]:
    """A JSON member of the zip.

    Raises:
        FileError: if it is missing or damaged.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            found = json.loads(archive.read(member))
    except KeyError as error:
        raise FileError(f"'{path}' is a zip file without '{member}', so no .keras file.") from error
    except (zipfile.BadZipFile, OSError, ValueError, RecursionError, EOFError, NotImplementedError) as error:
        raise FileError(f"'{path}' is a damaged .keras file; get the file again from where it came.") from error
    if not isinstance(found, dict):
        raise FileError(f"'{member}' in '{path}' is no dictionary; the file is damaged.")
    return found


def keras_version(path: Path) -> str:
    """Version of the Keras that wrote the file."""
    return str(read_json(path, "metadata.json").get("keras_version", ""))


def read_masks(path: Path) -> StoredMasks | None:
    """The masks in the zip, or None."""
    with zipfile.ZipFile(path) as archive:
        if MEMBER not in archive.namelist():
            return None
        with np.load(io.BytesIO(archive.read(MEMBER)), allow_pickle=False) as arrays:
            return unpacked(lambda name: arrays[name], path)
