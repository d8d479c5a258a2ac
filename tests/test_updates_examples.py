"""The example of reconstruction does on fewer digits what it claims."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

from models import KERAS, both, values

from sparsekit.demo import Digits, load_digits

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
