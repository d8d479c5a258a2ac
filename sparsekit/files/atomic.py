"""Write a file so that a reader, a crash or a full disk never meets half of it."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

import h5py

from ..errors import FileError


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str], *, overwrite: bool = True) -> Iterator[Path]:
    """Give a temporary path in the folder of `path`; what is written there becomes `path` in one step at the end.

    The temporary name ends like `path`, since Keras picks its format by the ending. If anything fails, the temporary
    file goes away and a file that stood at `path` is as before.

    Raises:
        FileError: if the target exists and `overwrite` is False, cannot be written, or the disk is full.
    """
    target = Path(path)
    check_name(target)
    if not overwrite and target.exists():
        raise FileError(f"'{target}' exists already; give another name, or overwrite=True to replace it.")
    if not target.parent.is_dir():
        raise FileError(f"The folder '{target.parent}' does not exist; create it before saving '{target.name}'.")
    temporary = target.with_name(f".{os.getpid()}.{os.urandom(4).hex()}.{target.name}")
    try:
        yield temporary
        _flush(temporary)
        if overwrite:
            os.replace(temporary, target)
        else:
            _link(temporary, target)
        _flush(target.parent)
    except OSError as error:
        raise FileError(cannot_write(target, error)) from error
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def h5_file(path: Path) -> Iterator[h5py.File]:
    """A new HDF5 file that is made in memory and then written as a whole.

    Where the disk fills up under the HDF5 library, it raises errors that are no OSError, and can crash the process.

    Raises:
        OSError: if it cannot be written.
    """
    with h5py.File(path.name, "w", driver="core", backing_store=False, block_size=1 << 24) as file:
        yield file
        file.flush()
        image = file.id.get_file_image()
    path.write_bytes(image)


def check_name(target: Path) -> None:
    """Raise FileError unless a file may have this name."""
    try:
        folder = target.is_dir()
        # The temporary file has a longer name.
        target.with_name(f".{'0' * 18}.{target.name}").is_dir()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "there is a zero byte in it"
        raise FileError(
            f"'{str(target)[:80]}...' cannot be the name of a file: {reason}; give a shorter one."
        ) from error
    if folder:
        raise FileError(f"'{target}' is a folder; give the name of a file in it.")


def cannot_write(target: Path, error: OSError) -> str:
    """One sentence for a write that failed."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"'{target}' cannot be written because the disk is full; free some space or save elsewhere."
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT):
        return f"'{target}' cannot be written: {os.strerror(error.errno)}; choose a folder that you may write to."
    return f"'{target}' cannot be written: {error.strerror or str(error).partition(chr(10))[0] or 'no reason given'}."


def _flush(path: Path) -> None:
    """Have the disk hold what was written, so that a power cut after the rename cannot leave an empty file."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _link(temporary: Path, target: Path) -> None:
    """Give the file its name only if nobody took that name since we looked."""
    try:
        os.link(temporary, target)
    except FileExistsError as error:
        raise FileError(f"'{target}' exists already; give another name, or overwrite=True to replace it.") from error
    except OSError:
        # Some network and FAT file systems have no hard links.
        if target.exists():
            raise FileError(f"'{target}' exists already; give another name, or overwrite=True to replace it.") from None
        os.replace(temporary, target)
