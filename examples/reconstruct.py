"""Prune the demo's network in one shot and restore the outputs of its layers, without labels and without training.

Accuracy of the dense, the pruned and the reconstructed network, and each layer's output error before and after.

    python examples/reconstruct.py
    python examples/reconstruct.py --flavour tf_keras --sparsity 0.9
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import sparsekit
from sparsekit.demo import BATCH, EPOCHS, Digits, build_model, load_digits
from sparsekit.flavour import get
from sparsekit.updates import Reconstruction


@dataclass(frozen=True)
class Outcome:
    """Test accuracies, and what was done to each layer."""

    dense: float
    pruned: float
    restored: float
    layers: Reconstruction

    @property
    def recovered(self) -> float:
        """Part of the lost accuracy that came back."""
        return (self.restored - self.pruned) / max(self.dense - self.pruned, 1e-9)


def trained(keras: Any, digits: Digits, epochs: int) -> Any:
    """The demo's network, trained densely."""
    keras.utils.set_random_seed(0)
    model = build_model(keras)
    model.fit(digits.x_train, digits.y_train, batch_size=BATCH, epochs=epochs, verbose=0)
    return model


def prune_and_restore(model: Any, digits: Digits, sparsity: float, samples: int, method: str) -> Outcome:
    def accuracy() -> float:
        return model.evaluate(digits.x_test, digits.y_test, verbose=0, return_dict=True)["accuracy"]

    dense = accuracy()
    sparsekit.prune(model, sparsity=sparsity)
    pruned = accuracy()
    # Images alone: the labels stay where they are.
    layers = sparsekit.reconstruct(model, digits.x_train[:samples], samples=samples, method=method)
    report = sparsekit.report(model)
    assert report.violations == 0
    return Outcome(dense, pruned, accuracy(), layers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sparsity", type=float, default=0.8)
    parser.add_argument("--samples", type=int, default=512, help="unlabelled images to restore from")
    parser.add_argument("--method", default="least_squares", choices=("least_squares", "obs", "dsnot"))
    parser.add_argument("--epochs", type=int, default=EPOCHS, help="of the dense training")
    parser.add_argument("--flavour", default="keras", choices=("keras", "tf_keras"))
    arguments = parser.parse_args()
    digits = load_digits(quick=False)
    model = trained(get(arguments.flavour).keras, digits, arguments.epochs)
    outcome = prune_and_restore(model, digits, arguments.sparsity, arguments.samples, arguments.method)
    print(f"test accuracy, dense                       {outcome.dense:.3f}")
    print(f"pruned to {100 * arguments.sparsity:g} % in one shot                {outcome.pruned:.3f}")
    print(
        f"reconstructed from {arguments.samples} unlabelled images   {outcome.restored:.3f}, "
        f"{100 * outcome.recovered:.0f} % of what was lost"
    )
    print(outcome.layers)


if __name__ == "__main__":
    main()
