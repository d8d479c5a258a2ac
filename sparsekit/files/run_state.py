"""Everything that a training run depends on, taken from the live objects and put back, in one file without pickle."""

from __future__ import annotations

import json
import os
import random
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from ..errors import FileError
from ..flavour import NAMES, Flavour, native
from ..frozen import frozen_masks
from ..weights import all_weights, read
from .atomic import replacing

_VERSION = 2


@dataclass
class RunState:
    """Where a run stands.

    Args:
        epoch: number of whole epochs that are done.
        batches: number of batches of the next epoch that are done.
        history: metric -> one value for each epoch done.
        plan: what must be the same when the run goes on: data, batch size, seed.
        arrays: name -> values of every variable.
        callbacks: for each callback what it remembers.
        finished: whether all epochs are done.
        begun: what tells this run from another: name -> digest or settings at its beginning.
        left: the same at its last save, or at the end of the call, where that differs.
        random: states of the random number generators of Python and NumPy, where it was read from a file.
    """

    epoch: int = 0
    batches: int = 0
    history: dict[str, list[float]] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=dict)
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    callbacks: list[dict[str, Any]] = field(default_factory=list)
    finished: bool = False
    begun: dict[str, Any] = field(default_factory=dict)
    left: dict[str, Any] = field(default_factory=dict)
    random: tuple[Any, Any] | None = None

    def put_random(self) -> None:
        """Set the random number generators of Python and NumPy."""
        if self.random is not None:
            random.setstate(self.random[0])
            np.random.set_state(self.random[1])


# The first part of an array's name -> what it is, for messages.
_KINDS = {
    "weight": "the weights",
    "optimizer": "the optimizer",
    "random": "the layers that draw random numbers",
    "mask": "the masks",
    "extra": "the masks",
    "metric": "the metrics",
}


def variables_of(model: Any, flavour: Flavour, random_states: list[Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    """Every variable that the next step depends on, by a name that is the same in each process."""
    # By place, since a model built a second time in one process gets other names: dense_1, dense_2, ...
    refs = all_weights(model)
    place = {ref.path: f"{position}:{ref.role}" for position, ref in enumerate(refs)}
    found = {f"weight:{place[ref.path]}": ref.variable for ref in refs}
    for position, variable in enumerate(flavour.optimizer_variables(model.optimizer)):
        found[f"optimizer:{position}"] = variable
    for position, variable in enumerate(random_states):
        found[f"random:{position}"] = variable
    for mask in frozen_masks(model):
        found[f"mask:{place[mask.path]}"] = mask.keep
    found.update({f"extra:{position}": variable for position, variable in enumerate(extra.values())})
    return {name: variable for name, variable in found.items() if tf.as_dtype(variable.dtype) != tf.string}


def metric_variables(model: Any) -> dict[str, Any]:
    """The running sums of the metrics, which the logs of an epoch come from."""
    variables = [variable for metric in model.metrics for variable in metric.variables]
    return {f"metric:{position}": variable for position, variable in enumerate(variables)}


def take(variables: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Copies of the values of variables."""
    return {name: np.array(read(variable)) for name, variable in variables.items()}


def check_same(variables: Mapping[str, Any], arrays: Mapping[str, np.ndarray], path: Path) -> None:
    """Raise FileError if the arrays are not those of these variables."""
    for name, variable in variables.items():
        if name not in arrays or tuple(variable.shape) != arrays[name].shape:
            raise FileError(
                f"The checkpoint in '{path.parent}' belongs to another model, optimizer or call (it differs in "
                f"{_KINDS[name.split(':')[0]]}); give another folder, or delete this one to begin anew."
            )


def put(variables: Mapping[str, Any], arrays: Mapping[str, np.ndarray], path: Path) -> None:
    """Give variables their values back, all or none.

    Raises:
        FileError: if they are not the same variables.
    """
    check_same(variables, arrays, path)
    for name, variable in variables.items():
        native(variable).assign(arrays[name])


def write(path: Path, state: RunState) -> None:
    """Write a state in one step, so that the file is the last good one whatever happens.

    Raises:
        FileError: if the disk is full or the folder cannot be written to.
    """
    index = {name: [array.dtype.name, list(array.shape)] for name, array in state.arrays.items()}
    version, numbers, gauss_position, has_gauss, gauss = np.random.get_state()
    meta = {
        "version": _VERSION,
        "epoch": state.epoch,
        "batches": state.batches,
        "history": state.history,
        "plan": state.plan,
        "callbacks": state.callbacks,
        "finished": state.finished,
        "begun": state.begun,
        "left": state.left,
        "index": index,
        "python_random": random.getstate(),
        "numpy_random": [version, np.asarray(numbers).tolist(), gauss_position, has_gauss, gauss],
    }
    with replacing(path) as temporary, zipfile.ZipFile(temporary, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("state.json", json.dumps(meta))
        for position, array in enumerate(state.arrays.values()):
            with archive.open(f"{position}", "w", force_zip64=True) as member:
                member.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def load(path: Path) -> RunState | None:
    """Read a state; None if there is none.

    Raises:
        FileError: if the file is damaged or from a later version.
    """
    if not path.exists():
        return None
    try:
        with zipfile.ZipFile(path) as archive:
            meta = json.loads(archive.read("state.json"))
            if meta["version"] > _VERSION:
                raise FileError(f"'{path}' was written by a later sparsekit; run `pip install -U sparsekit`.")
            if meta["version"] < _VERSION:
                raise FileError(
                    f"'{path}' was written by an earlier sparsekit, which did not say of which run it is; delete the "
                    f"folder '{path.parent}' to begin anew."
                )
            arrays = {}
            for position, (name, (dtype, shape)) in enumerate(meta["index"].items()):
                flat = np.frombuffer(archive.read(f"{position}"), dtype=tf.as_dtype(dtype).as_numpy_dtype)
                arrays[name] = flat.reshape(shape)
    except FileError:
        raise
    except (zipfile.BadZipFile, OSError, ValueError, KeyError, TypeError, AttributeError, EOFError) as error:
        raise FileError(
            f"The checkpoint '{path}' is damaged; delete the folder '{path.parent}' to begin anew."
        ) from error
    version, numbers, internal = meta["python_random"]
    kind, keys, position, has_gauss, gauss = meta["numpy_random"]
    return RunState(
        epoch=meta["epoch"],
        batches=meta["batches"],
        history=meta["history"],
        plan=meta["plan"],
        arrays=arrays,
        callbacks=meta["callbacks"],
        finished=meta["finished"],
        begun=meta["begun"],
        left=meta["left"],
        random=(
            (version, tuple(numbers), internal),
            (kind, np.array(keys, dtype=np.uint32), position, has_gauss, gauss),
        ),
    )


# What the callbacks of both Kerases remember of a run: best value, patience so far, batches since the last save. Their
# settings look the same from outside but are not: EarlyStopping flips the sign of its min_delta when it begins.
_REMEMBERED = (
    "best",
    "best_epoch",
    "wait",
    "stopped_epoch",
    "cooldown_counter",
    "epochs_since_last_save",
    "_batches_seen_since_last_saving",
    "_last_batch_seen",
)


def remembered(callback: Any) -> dict[str, Any]:
    """What one of Keras' own callbacks has counted so far; nothing for a class of the user's own."""
    if type(callback).__module__.split(".")[0] not in NAMES:
        return {}
    found = {name: vars(callback)[name] for name in _REMEMBERED if name in vars(callback)}
    return {
        name: value.item() if isinstance(value, np.generic) else value
        for name, value in found.items()
        if value is None or isinstance(value, (bool, int, float, np.generic))
    }


def best_weights(callbacks: list[Any]) -> dict[str, np.ndarray]:
    """The weights that callbacks keep to put back at the end."""
    return {
        f"callback:{place}:{position}": np.asarray(weight)
        for place, callback in enumerate(callbacks)
        for position, weight in enumerate(getattr(callback, "best_weights", None) or ())
    }


class FolderLock:
    """One run a folder: held by the operating system, which lets go when the process ends, however it ends."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "lock"
        self._handle: int | None = None

    def __enter__(self) -> FolderLock:
        handle = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            _lock(handle)
        except OSError as error:
            os.close(handle)
            raise FileError(
                f"Another run is training in '{self._path.parent}'; wait for it, or give another checkpoint folder."
            ) from error
        self._handle = handle
        return self

    def __exit__(self, *_: Any) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


def _lock(handle: int) -> None:
    try:
        import fcntl
    except ImportError:
        import msvcrt

        msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
    else:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
