"""Hostile content in files that are whole: an error of ours or a model that works; no code, no other file is read."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hostile import MODULE, SECRET, SIGN, hostile
from survival import NAMES, assert_one_sentence, in_a_process_of_its_own, survives, written

from sparsekit.errors import SparsekitError
from sparsekit.files import inspect_file
from sparsekit.files.equivalence import sample_inputs
from sparsekit.flavour import flavour_of


def judge(broken: Path, model: Any, what: str) -> None:
    """What holds for a file that is looked into, and for the model that comes of it."""
    if model is not None:
        arrays = [np.asarray(array) for array in model.get_weights()]
        if getattr(model, "optimizer", None) is not None:
            arrays += [np.asarray(v) for v in flavour_of(model).optimizer_variables(model.optimizer)]
        assert not any(np.any(array == SECRET) for array in arrays if array.dtype.kind == "f"), "Another file was read."
        trains(model, what)
    try:
        info = inspect_file(broken)
    except SparsekitError as error:
        assert_one_sentence(error)
    else:
        assert info.raw_bytes == broken.stat().st_size
    assert SIGN not in os.environ, "Code was run."
    assert MODULE not in sys.modules, "A module was imported."


def trains(model: Any, what: str) -> None:
    """One step of fit. A config that was changed may ask for what its layers or this data cannot do."""
    fed = sample_inputs(model, free=6, batch=4)
    x = next(iter(fed.values())) if len(fed) == 1 else fed
    model.run_eagerly = True
    model.predict(x, verbose=0)
    if getattr(model, "optimizer", None) is not None:
        try:
            model.fit(x, np.zeros((4, *model.outputs[0].shape[1:])), batch_size=4, verbose=0)
        except ValueError as error:
            # As a model compiled without a loss does; a file may say so.
            if not str(error).startswith("No loss"):
                raise


@pytest.mark.parametrize("name", NAMES)
def test_hostile_files(name, tmp_path):
    assert survives(written("keras", name, tmp_path), range(12), hostile, judge) > 0


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("flavour", ["keras", "tf_keras"])
@pytest.mark.parametrize("name", NAMES)
def test_thousands_of_hostile_files(flavour, name, tmp_path):
    """In a process of its own: a crash there is a failure here."""
    written(flavour, name, tmp_path)
    code = "import pathlib, test_files_hostile as f; f.survives(pathlib.Path("
    in_a_process_of_its_own(f"{code}{str(tmp_path)!r}) / {name!r}, range(100, 400), f.hostile, f.judge)", 3000)
