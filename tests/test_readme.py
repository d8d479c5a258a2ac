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


def test_blocks_are_of_kinds_that_are_run():
    assert {language for language, _ in BLOCKS} == {"python", "bash"}


def test_python_blocks_run_and_each_recipe_has_both_outcomes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    outcomes = {}
    for language, code in BLOCKS:
        if language == "python":
            exec(compile(code, "README.md", "exec"), names)
            if "held = " in code:
                recipe = re.findall(r"^\*\*(\d)\. ", TEXT[: TEXT.index(code)], flags=re.MULTILINE)[-1]
                outcomes[recipe] = names["lost"], names["held"]
    zeros = 0.9 * (20 * 32 + 32 * 3)
    # 1: moments from before the prune bring the zeros back. 2: so does a constraint that looks at today's zeros.
    for recipe in ("1", "2"):
        lost, held = outcomes[recipe]
        assert lost == pytest.approx(zeros, rel=0.02)
        assert held == 0
    # 3: all biases of the new layer are frozen; ours move, and no pruned weight came back.
    assert outcomes["3"] == (3, 0)
    assert sparsekit.report(names["model"]).violations == 0


def test_shell_commands_work(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    Path("demo_output").mkdir()
    np.savez("demo_output/digits.npz", x=rng.random((40, 6), dtype=np.float32), y=rng.integers(0, 3, 40))
    model = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(40), keras.layers.Dense(3, "softmax")])
    model.compile("adam", "sparse_categorical_crossentropy")
    sparsekit.save(model, "demo_output/digits_dense.h5")
    ran = []
    for line in (line for language, code in BLOCKS if language == "bash" for line in code.splitlines()):
        words = shlex.split(line, comments=True)
        if words[0].startswith("./"):
            assert os.access(ROOT / words[0], os.X_OK)
            continue
        assert words[0] == "sparsekit"
        assert main(words[1:]) == 0
        ran.append(words[1])
    assert ran == ["prune", "retrain", "inspect", "engine"]
    assert "90.00 %" in capsys.readouterr().out
