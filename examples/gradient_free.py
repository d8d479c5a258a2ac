"""Train a small network on handwritten digits without a single gradient, pruned before it learns anything.

An evolution strategy, SPSA and annealing move the same half-pruned network by forward passes alone. The picture shows
test accuracy against the number of passes.

    python examples/gradient_free.py --out gradient_free.png
"""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import matplotlib
import numpy as np
from sklearn.datasets import load_digits

import sparsekit
from sparsekit.updates import SPSA, Annealing, EvolutionStrategy, update_step

matplotlib.use("Agg")
import matplotlib.pyplot as plt

BATCH = 256


def digits() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """1797 real digits of 8 x 8 pixels: 1400 to learn from, 397 to test on."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))
    images, labels = (images[order] / 16).astype("float32"), labels[order]
    return images[:1400], labels[:1400], images[1400:], labels[1400:]


def network() -> keras.Model:
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(32, activation="relu"), keras.layers.Dense(10)]
    model = keras.Sequential([keras.Input((64,)), *layers])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=None, loss=loss, metrics=["accuracy"], jit_compile=False)
    return sparsekit.prune(model, sparsity=0.5)


def curve(rule, passes_each: int, budget: int) -> tuple[list[int], list[float]]:
    """Test accuracy after so many forward passes, and the zeros held all along."""
    train_x, train_y, test_x, test_y = digits()
    model = network()
    step = update_step(model, rule, include=["*/kernel", "*/bias"])
    rng = np.random.default_rng(0)
    passes, accuracies = [], []
    steps = budget // passes_each
    for number in range(steps + 1):
        if number % max(1, steps // 40) == 0 or number == steps:
            accuracy = model.evaluate(test_x, test_y, batch_size=1000, verbose=0, return_dict=True)["accuracy"]
            passes.append(number * passes_each)
            accuracies.append(accuracy)
        chosen = rng.choice(len(train_x), BATCH, replace=False)
        step(train_x[chosen], train_y[chosen])
    report = sparsekit.report(model)
    assert report.violations == 0
    print(f"{type(rule).__name__:<18} {accuracies[0]:.3f} -> {accuracies[-1]:.3f}, sparsity {report.sparsity:.2f}")
    return passes, accuracies


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="gradient_free.png", help="the picture to write")
    parser.add_argument("--passes", type=int, default=16_000, help="forward passes for each rule")
    arguments = parser.parse_args()
    half = arguments.passes // 2
    rules = {
        "evolution strategy (64 candidates)": (EvolutionStrategy(64, 0.05, 0.05, decay=0.5 ** (65 / half)), 65),
        "SPSA (2 passes a step)": (SPSA(0.01, 0.01, decay=0.1 ** (2 / arguments.passes)), 2),
        "annealing (accept if better)": (Annealing(0.03), 2),
    }
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for label, (rule, passes_each) in rules.items():
        axes.plot(*curve(rule, passes_each, arguments.passes), label=label)
    axes.axhline(0.85, color="0.6", linewidth=1, linestyle="--")
    axes.set(xlabel="forward passes (batch 256)", ylabel="test accuracy", ylim=(0, 1))
    axes.set_title("Learning digits without gradients, half of the weights pruned", fontsize=11)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(arguments.out, dpi=150)
    print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
