"""All code of the README runs, and each of its three recipes loses what it says, beside a line that holds."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import sparsekit
from sparsekit.cli import main

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", TEXT, flags=re.MULTILINE | re.DOTALL)

# One worker runs the blocks once for all tests of this file.
pytestmark = pytest.mark.xdist_group("readme")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, int]]:
    """Run the Python blocks in order, as one script; the outcome of each recipe by its heading."""
    here = Path.cwd()
    os.chdir(tmp_path_factory.mktemp("readme"))
    names: dict[str, Any] = {}
    found = {}
    try:
        for language, code in BLOCKS:
            if language != "python":
                continue
            heading = re.findall(r"^\*\*(\d)\. ", TEXT[: TEXT.index(code)], flags=re.MULTILINE)
            exec(compile(code, "README.md", "exec"), names)
            if "held = " in code:
                found[heading[-1]] = names["lost"], names["held"]
        found["violations"] = 0, names["sparsekit"].report(names["model"]).violations
    finally:
        os.chdir(here)
    return found


def test_blocks_are_of_kinds_that_are_run():
    assert {language for language, _ in BLOCKS} == {"python", "bash"}


def test_gradient_mask_with_a_warm_optimizer_loses_all_zeros(outcomes):
    lost, held = outcomes["1"]
    zeros = round(0.9 * 20 * 32) + round(0.9 * 32 * 3)
    assert lost == pytest.approx(zeros, rel=0.02)
    assert held == 0


def test_constraint_on_todays_zeros_loses_all_zeros(outcomes):
    lost, held = outcomes["2"]
    assert lost == pytest.approx(round(0.9 * 20 * 32) + round(0.9 * 32 * 3), rel=0.02)
    assert held == 0


def test_mask_over_all_weights_freezes_new_biases(outcomes):
    assert outcomes["3"] == (3, 0)
    assert outcomes["violations"] == (0, 0)


def test_shell_commands_work(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    np.savez("digits.npz", x=rng.random((40, 6), dtype=np.float32), y=rng.integers(0, 3, 40))
    model = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(40), keras.layers.Dense(3, "softmax")])
    model.compile("adam", "sparse_categorical_crossentropy")
    sparsekit.save(model, "model.h5")
    ran = []
    for line in (line for language, code in BLOCKS if language == "bash" for line in code.splitlines()):
        words = shlex.split(line, comments=True)
        if words[0].startswith("./"):
            assert os.access(ROOT / words[0], os.X_OK)
            continue
        assert words[0] == "sparsekit"
        assert main(words[1:]) == 0
        ran.append(words[1])
    assert ran == ["prune", "retrain", "inspect"]
    assert "90.00 %" in capsys.readouterr().out
