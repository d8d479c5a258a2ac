"""The demo makes the trip that it shows, and its digits are real and apart."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import sparsekit
from sparsekit import cli, demo


@pytest.fixture(scope="module")
def digits() -> demo.Digits:
    return demo.load_digits(quick=False)


@pytest.mark.parametrize(
    ("flavour", "options"), [("keras", ""), ("tf_keras", "--enforce constraint --masks dynamic --sparsity 0.8")]
)
def test_demo(flavour, options, digits, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    few = demo.Digits(digits.x_train[:256], digits.y_train[:256], digits.x_test[:64], digits.y_test[:64])
    monkeypatch.setattr(demo, "load_digits", lambda quick: few)
    assert cli.main(f"demo --quick --out out --flavour {flavour} {options}".split()) == cli.OK
    out = capsys.readouterr().out
    assert "seconds per epoch" in out
    assert "no violations" in out
    assert max(map(len, out[out.index("A file with zeros") :].splitlines())) <= 80
    for name in ("pruned", "retrained"):
        report = sparsekit.report(sparsekit.load(f"out/digits_{name}.h5", flavour=flavour))
        assert (round(report.sparsity, 3), report.violations) == (0.8 if options else 0.9, 0)
    assert cli.main(["retrain", "out/digits_pruned.h5", "more.h5", "--data", "out/digits.npz"]) == cli.OK
    assert {path.name for path in Path("out").glob("*.png")} == {
        "sparsity.png",
        "zeros_conv2d_kernel.png",
        "zeros_dense_kernel.png",
    }


def test_demo_digits_are_apart(digits):
    assert (len(digits.x_train), len(digits.x_test)) == (4000, 1000)
    assert set(np.unique(digits.y_train)) == set(np.unique(digits.y_test)) == set(range(10))
    assert (digits.x_train.min(), digits.x_train.max()) == (0.0, 1.0)
    assert not {x.tobytes() for x in digits.x_train} & {x.tobytes() for x in digits.x_test}
