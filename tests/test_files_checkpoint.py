"""A run that was stopped goes on from where it stood and ends with the same bits."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import resumed_run as run
import tensorflow as tf
from models import KERAS, both

from sparsekit.errors import ArgumentError, FileError
from sparsekit.files.checkpoint import STATE, Checkpoints
from sparsekit.files.run_state import FolderLock
from sparsekit.frozen import frozen_masks


class StoppedError(Exception):
    """What ends a run in these tests."""


def stop():
    raise StoppedError


@pytest.fixture(scope="module", autouse=True)
def deterministic():
    tf.config.experimental.enable_op_determinism()
    yield
    # There is no public way back.
    from tensorflow.python.framework import config

    config.disable_op_determinism()


def ends_the_same(one, other):
    (model, history), (other_model, other_history) = one, other
    assert [w.tobytes() for w in model.get_weights()] == [w.tobytes() for w in other_model.get_weights()]
    assert history.epoch == other_history.epoch == [0, 1, 2]
    assert history.history == other_history.history


@both
@pytest.mark.parametrize("kind", ["arrays", "dataset"])
def test_stopped_twice_it_ends_as_if_it_had_not_been(flavour, kind, tmp_path):
    """An epoch has 6 or 7 batches: the first stop is within the second, the next one within the third epoch."""
    whole = run.train(flavour, kind, tmp_path / "whole", [])
    for after in (10, 6):
        with pytest.raises(StoppedError):
            run.train(flavour, kind, tmp_path / "parts", [run.stopper(flavour, after, stop)])
    parts = run.train(flavour, kind, tmp_path / "parts", [])
    ends_the_same(parts, whole)
    assert frozen_masks(parts[0]).violations() == {}


@both
def test_a_finished_run_is_given_back_without_training(flavour, tmp_path):
    whole = run.train(flavour, "arrays", tmp_path, [])
    again = run.train(flavour, "arrays", tmp_path, [run.stopper(flavour, 1, stop)])
    ends_the_same(again, whole)


@both
def test_callbacks_remember_their_best_value(flavour, tmp_path):
    def early():
        return KERAS[flavour].callbacks.EarlyStopping(monitor="loss", patience=1, min_delta=1e9)

    with pytest.raises(StoppedError):
        run.train(flavour, "arrays", tmp_path, [run.stopper(flavour, 8, stop), early()])
    _, history = run.train(flavour, "arrays", tmp_path, [run.stopper(flavour, 10**6, stop), early()])
    assert history.epoch == [0, 1]


def killed_and_whole(flavour, masks, tmp_path, kills):
    def program(folder, kill):
        place = tmp_path / folder
        return subprocess.run(
            [sys.executable, run.__file__, flavour, masks, place, f"{place}.npz", kill],
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])},
            capture_output=True,
            check=False,
        )

    for kill in kills:
        assert program("parts", kill).returncode == -signal.SIGKILL
        # What a killed write leaves behind.
        assert kill[0] != "w" or [file for file in (tmp_path / "parts").iterdir() if file.name.startswith(".")]
    for folder in ("whole", "parts"):
        done = program(folder, "-1")
        assert done.returncode == 0, done.stderr.decode()
    with np.load(tmp_path / "whole.npz") as whole, np.load(tmp_path / "parts.npz") as parts:
        assert whole.files == parts.files
        for name in whole.files:
            assert whole[name].tobytes() == parts[name].tobytes(), name


def test_killed_within_an_epoch_and_while_a_checkpoint_is_written(tmp_path):
    killed_and_whole("keras", "dynamic", tmp_path, ["10", "w2"])
    assert not [file for file in (tmp_path / "parts").iterdir() if file.name.startswith(".")]


@pytest.mark.slow
@both
@pytest.mark.parametrize("masks", ["static", "dynamic"])
def test_killed_many_times(flavour, masks, tmp_path):
    killed_and_whole(flavour, masks, tmp_path, ["w1", "1", "4", "w1", "3", "6", "w2", "2"])


def test_two_runs_in_one_folder_are_told_apart(tmp_path):
    tmp_path.mkdir(exist_ok=True)
    with FolderLock(tmp_path), pytest.raises(FileError, match="Another run is training in"):
        run.train("keras", "arrays", tmp_path, [])


def test_a_full_disk_leaves_the_last_good_checkpoint(tmp_path, monkeypatch):
    with pytest.raises(StoppedError):
        run.train("keras", "arrays", tmp_path, [run.stopper("keras", 8, stop)])
    before = (tmp_path / STATE).read_bytes()

    def full(_handle):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(FileError, match="disk is full"):
            run.train("keras", "arrays", tmp_path, [])
    assert (tmp_path / STATE).read_bytes() == before
    ends_the_same(run.train("keras", "arrays", tmp_path, []), run.train("keras", "arrays", tmp_path / "whole", []))


def test_another_call_or_model_is_refused_before_anything_changes(tmp_path):
    run.train("keras", "arrays", tmp_path, [])
    with pytest.raises(FileError, match="belongs to a call with batch_size=16, this one has 8"):
        run.train("keras", "arrays", tmp_path, [], batch_size=8)
    keras = KERAS["keras"]
    other = keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(3)])
    other.compile("adam", "mse")
    before = [w.copy() for w in other.get_weights()]
    with pytest.raises(FileError, match="belongs to another model, optimizer or call"):
        Checkpoints(tmp_path).fit(other, epochs=3, x=run.X, y=run.Y, batch_size=16, validation_split=0.1, verbose=0)
    assert all(np.array_equal(a, b) for a, b in zip(other.get_weights(), before, strict=True))


def test_a_damaged_checkpoint_is_named(tmp_path):
    run.train("keras", "arrays", tmp_path, [])
    content = (tmp_path / STATE).read_bytes()
    for damaged in (content[: len(content) // 2], b"", content[:200] + b"\xff" * 40 + content[240:]):
        (tmp_path / STATE).write_bytes(damaged)
        with pytest.raises(FileError, match="is damaged; delete the folder"):
            run.train("keras", "arrays", tmp_path, [])


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"x": (pair for pair in [(run.X, run.Y)])}, "generator cannot be read again"),
        ({"x": run.X, "y": run.Y, "steps_per_epoch": 3}, "steps_per_epoch cannot be used"),
    ],
)
def test_data_that_cannot_be_taken_up_again_is_refused(arguments, match, tmp_path):
    with pytest.raises(ArgumentError, match=match):
        Checkpoints(tmp_path).fit(run.model_of("keras"), verbose=0, **arguments)


@pytest.mark.parametrize("every", [0, -1, 1.5, True])
def test_every_steps_is_a_whole_number(every, tmp_path):
    with pytest.raises(ArgumentError, match="every_steps"):
        Checkpoints(tmp_path, every_steps=every)
