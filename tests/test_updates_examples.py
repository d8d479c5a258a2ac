"""The examples of updates without gradients do in a shorter run what they claim."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
from models import KERAS, both, values

from sparsekit.demo import Digits, load_digits
from sparsekit.updates import SPSA, EvolutionStrategy

EXAMPLES = Path(__file__).parents[1] / "examples"


def example(name: str) -> Any:
    """An example as a module."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # A dataclass looks its module up by name.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@both
def test_reconstruction_gives_back_half_of_what_a_prune_to_80_percent_takes(flavour):
    """The demo's own network on its digits, trained for less long; 512 images, no labels, no training."""
    reconstruct = example("reconstruct")
    digits = load_digits(quick=False)
    few = Digits(digits.x_train[:1000], digits.y_train[:1000], digits.x_test, digits.y_test)
    model = reconstruct.trained(KERAS[flavour], few, epochs=3)
    iterations = int(model.optimizer.iterations)
    outcome = reconstruct.prune_and_restore(model, few, 0.8, 512, "least_squares")
    assert outcome.dense - outcome.pruned > 0.05, "the test needs something to recover"
    assert outcome.recovered >= 0.5
    assert int(model.optimizer.iterations) == iterations, "nothing was trained"
    assert len(outcome.layers.changed) == 4
    assert all(row.error_after < row.error_before for row in outcome.layers.rows)
    zeros = sum((values(model)[path] == 0).sum() for path in outcome.layers.changed)
    assert zeros / sum(values(model)[path].size for path in outcome.layers.changed) >= 0.8 - 1e-5


@pytest.mark.parametrize(
    ("rule", "passes_each", "budget"),
    [
        (EvolutionStrategy(64, 0.05, 0.1, decay=0.3 ** (1 / 100)), 65, 6500),
        (SPSA(0.01, 0.03, decay=0.1 ** (1 / 3000)), 2, 6000),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, int) else "",
)
def test_a_pruned_network_learns_real_digits_from_forward_passes_alone(rule, passes_each, budget):
    passes, accuracies = example("gradient_free").curve(rule, passes_each, budget)
    assert passes[-1] <= budget
    assert accuracies[0] < 0.2, "chance is 0.1"
    assert accuracies[-1] >= 0.85


def test_the_picture_of_the_curves_is_written(tmp_path, monkeypatch):
    out = tmp_path / "curves.png"
    monkeypatch.setattr(sys, "argv", ["gradient_free.py", "--passes", "65", "--out", str(out)])
    example("gradient_free").main()
    assert out.read_bytes().startswith(b"\x89PNG")
