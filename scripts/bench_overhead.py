"""Cost of holding the masks: whole training step, masked against plain, beside TFMOT's wrapped model on the same work.

All variants run interleaved in one process; each figure is the median over rounds of the ratio to the plain step of
the same Keras in the same round.

    python scripts/bench_overhead.py [--rounds 21] [--steps 20]
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf
import tf_keras
from rich.console import Console
from rich.table import Table

import sparsekit

SPARSITY = 0.9


def mlp(module):
    layers = module.layers
    return module.Sequential(
        [layers.Input((784,))] + [layers.Dense(1024, activation="relu") for _ in range(2)] + [layers.Dense(10)]
    )


def cnn(module):
    layers = module.layers
    return module.Sequential(
        [
            layers.Input((28, 28, 1)),
            layers.Conv2D(32, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(64, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(128, activation="relu"),
            layers.Dense(10),
        ]
    )


def compiled(module, build):
    module.utils.set_random_seed(0)
    model = build(module)
    model.compile(module.optimizers.Adam(), module.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def plain_step(model):
    return tf.function(lambda x, y: model.train_step((x, y)), autograph=False)


def masked_step(module, build, **options):
    model = compiled(module, build)
    sparsekit.prune(model, SPARSITY)
    return sparsekit.train_step(model, **options)


def tfmot_step(build, frequency: int):
    # Importing TFMOT switches tf.keras to tf_keras for the whole process: put the environment back.
    before = os.environ.get("TF_USE_LEGACY_KERAS")
    import tensorflow_model_optimization as tfmot

    if before is None:
        os.environ.pop("TF_USE_LEGACY_KERAS", None)
    pruning = tfmot.sparsity.keras
    schedule = pruning.ConstantSparsity(SPARSITY, begin_step=0, frequency=frequency)
    model = pruning.prune_low_magnitude(build(tf_keras), pruning_schedule=schedule)
    model.compile(tf_keras.optimizers.Adam(), tf_keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    # What its UpdatePruningStep callback does on each batch.
    callback = pruning.UpdatePruningStep()
    callback.set_model(model)
    callback.on_train_begin()
    step = plain_step(model)

    def run(x, y):
        callback.on_train_batch_begin(0)
        return step(x, y)

    return run


def measure(steps: dict, batch, rounds: int, repeats: int) -> dict[str, list[float]]:
    for step in steps.values():
        for _ in range(3):
            step(*batch)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    names = list(steps)
    for turn in range(rounds):
        # The order rotates, so that no variant always runs after the same one.
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            started = time.perf_counter()
            for _ in range(repeats):
                logs = steps[name](*batch)
            float(logs["loss"])
            seconds[name].append((time.perf_counter() - started) / repeats)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--steps", type=int, default=20, help="steps a round and variant")
    parser.add_argument("--no-tfmot", action="store_true")
    options = parser.parse_args()
    generator = np.random.default_rng(0)
    for title, build, shape, size in (
        ("MLP 784-1024-1024-10, batch 128", mlp, (784,), 128),
        ("small CNN, batch 64", cnn, (28, 28, 1), 64),
    ):
        batch = (
            tf.constant(generator.normal(size=(size, *shape)).astype("float32")),
            tf.constant(generator.integers(0, 10, size)),
        )
        steps, plain = {}, {}
        for module in (keras, tf_keras):
            name = "keras" if module is keras else "tf_keras"
            base = f"{name} plain"
            plain[base] = base
            steps[base] = plain_step(compiled(module, build))
            for label, extra in (
                ("masked", {}),
                ("masked, constraint", {"enforce": "constraint"}),
                ("masked, dynamic", {"masks": "dynamic"}),
            ):
                steps[f"{name} {label}"] = masked_step(module, build, **extra)
                plain[f"{name} {label}"] = base
        if not options.no_tfmot:
            for frequency in (100, 1):
                label = f"TFMOT, frequency {frequency}"
                steps[label] = tfmot_step(build, frequency)
                plain[label] = "tf_keras plain"
        seconds = measure(steps, batch, options.rounds, options.steps)
        table = Table(title=f"{title}, Adam, sparsity {SPARSITY}; median of {options.rounds} rounds")
        for column in ("step", "milliseconds", "times the plain step"):
            table.add_column(column, justify="left" if column == "step" else "right")
        for label, values in seconds.items():
            ratio = statistics.median(v / p for v, p in zip(values, seconds[plain[label]], strict=True))
            table.add_row(label, f"{statistics.median(values) * 1e3:.2f}", f"{ratio:.3f}")
        Console().print(table)


if __name__ == "__main__":
    main()
