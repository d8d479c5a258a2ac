"""Time whole training steps with Adam: plain fit of the dense model, retrain on the dense engine, on the sparse one.

Each side trains a model of its own; the sides take turns, and the median epoch counts, without the first one of each
call, in which functions are traced. One process for each of TensorFlow's two dense settings; the last column compares
with the faster plain fit of the two.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

SETTING = "TF_ENABLE_ONEDNN_OPTS"
SIDES = ("plain", "dense", "sparse", "auto")


def models() -> dict[str, Any]:
    """Name -> (function that makes a compiled model, shape of a sample, batch size)."""
    import keras

    k = keras.layers
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def compiled(layers: list[Any]) -> Any:
        model = keras.Sequential(layers)
        model.compile(keras.optimizers.Adam(1e-4), loss)
        return model

    def mlp() -> Any:
        return compiled([k.Input((784,)), k.Dense(2048, "relu"), k.Dense(2048, "relu"), k.Dense(10)])

    def cnn() -> Any:
        first = k.Conv2D(64, 3, padding="same", activation="relu")
        others = [k.Conv2D(n, 3, strides=s, padding="same", activation="relu") for n, s in ((64, 1), (128, 2))]
        return compiled([k.Input((32, 32, 3)), first, *others, k.GlobalAveragePooling2D(), k.Dense(10)])

    def small_cnn() -> Any:
        layers: list[Any] = [k.Input((28, 28, 1))]
        for filters in (32, 64):
            layers += [k.Conv2D(filters, 3, activation="relu"), k.MaxPooling2D()]
        return compiled([*layers, k.Flatten(), k.Dense(128, "relu"), k.Dense(10)])

    return {
        "MLP 784-2048-2048-10": (mlp, (784,), 64),
        "CNN 3x3: 64, 64, 128": (cnn, (32, 32, 3), 32),
        "CNN of the demo's size": (small_cnn, (28, 28, 1), 64),
    }


def marker(model: Any, marks: list[float], side: str, bytes_held: dict[str, int]) -> Callable[..., float]:
    """A learning rate schedule that notes when it is called, and what the model holds then."""
    import numpy as np

    def mark(epoch: int, rate: float) -> float:
        marks.append(time.perf_counter())
        variables = [*model.trainable_variables, *model.optimizer.variables]
        bytes_held[side] = sum(4 * int(np.prod(v.shape)) for v in variables)
        return rate

    return mark


def measure(name: str, sparsity: float, rounds: int, steps: int) -> dict[str, Any]:
    """Seconds a step of each side, and bytes of weights and optimizer while training."""
    import keras
    import numpy as np

    import sparsekit
    from sparsekit.engine import gate

    # "auto" as it decides for a run of any length.
    gate._WORTH = 0.0
    make, shape, batch = models()[name]
    rng = np.random.default_rng(0)
    x = rng.standard_normal((steps * batch, *shape), np.float32)
    y = rng.integers(0, 10, steps * batch)
    sides = {side: make() for side in SIDES}
    for side, model in sides.items():
        if side != "plain":
            sparsekit.prune(model, sparsity)
    times: dict[str, list[float]] = {side: [] for side in SIDES}
    bytes_held: dict[str, int] = {}
    for _ in range(rounds):
        for side, model in sides.items():
            marks: list[float] = []
            mark = marker(model, marks, side, bytes_held)
            # Keras' own schedule reads no weights, so that nothing is carried back for it.
            callbacks = [keras.callbacks.LearningRateScheduler(mark)]
            arguments = {"batch_size": batch, "epochs": 4, "verbose": 0, "callbacks": callbacks}
            if side == "plain":
                model.fit(x, y, **arguments)
            else:
                sparsekit.retrain(model, (x, y), engine=side, **arguments)
            times[side] += [(after - before) / steps for before, after in itertools.pairwise(marks[1:])]
    return {
        "seconds": {side: statistics.median(column) for side, column in times.items()},
        "memory": bytes_held["sparse"] / bytes_held["plain"],
    }


def child(arguments: argparse.Namespace) -> None:
    for name in models():
        if arguments.model in name:
            print(json.dumps([name, measure(name, arguments.sparsity, arguments.rounds, arguments.steps)]), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sparsity", type=float, default=0.9)
    parser.add_argument("--rounds", type=int, default=4, help="calls of each side; three epochs of each count")
    parser.add_argument("--steps", type=int, default=20, help="steps an epoch")
    parser.add_argument("--model", default="", help="only models whose name holds this")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments)
        return
    found: dict[str, dict[str, Any]] = {}
    for setting in ("0", "1"):
        environment = {**os.environ, SETTING: setting, "TF_CPP_MIN_LOG_LEVEL": "3"}
        command = [sys.executable, __file__, "--child", *sys.argv[1:]]
        output = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
        for line in output.splitlines():
            if line.startswith("["):
                name, result = json.loads(line)
                found.setdefault(name, {})[setting] = result
    print(f"{'model':24} {'oneDNN':>6} " + " ".join(f"{side:>9}" for side in SIDES) + "   sparse   auto/dense  memory")
    for name, settings in found.items():
        fastest = min(result["seconds"]["plain"] for result in settings.values())
        for setting, result in settings.items():
            seconds = result["seconds"]
            print(
                f"{name:24} {setting:>6} "
                + " ".join(f"{seconds[side] * 1e3:6.2f} ms" for side in SIDES)
                + f"   {fastest / seconds['sparse']:5.2f}x  {seconds['dense'] / seconds['auto']:8.2f}x"
                + f"  {result['memory']:6.2f}"
            )
    print("sparse: against the faster plain fit; memory: weights and optimizer while training, sparse / plain.")


if __name__ == "__main__":
    main()
