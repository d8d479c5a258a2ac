"""Cost of a weight update without gradients, per batch, beside forward and loss alone and beside the SGD(0) recipe.

All sides run in turn within each round; the medians over the rounds and their ratios are printed. CPU time, summed over
all threads, says more than wall time on a machine that others use, too.
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

import sparsekit
from sparsekit.engine import build
from sparsekit.updates import UniformNoise, update_step


def mlp() -> tuple[keras.Model, tuple[int, ...]]:
    layers = [keras.layers.Dense(1024, activation="relu"), keras.layers.Dense(1024, activation="relu")]
    return keras.Sequential([keras.Input((784,)), *layers, keras.layers.Dense(10)]), (784,)


def cnn() -> tuple[keras.Model, tuple[int, ...]]:
    layers = keras.layers
    stack = [layers.Conv2D(32, 3, activation="relu"), layers.MaxPooling2D(), layers.Conv2D(64, 3, activation="relu")]
    stack += [layers.MaxPooling2D(), layers.Flatten(), layers.Dense(128, activation="relu"), layers.Dense(10)]
    return keras.Sequential([keras.Input((28, 28, 1)), *stack]), (28, 28, 1)


def sides(make, batch: int, jit: bool, sparsity: float) -> dict:
    """Name -> function that runs one batch. Every side has its own model."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    rng = np.random.default_rng(0)
    shape = make()[1]
    x = tf.constant(rng.normal(size=(batch, *shape)).astype(np.float32))
    y = tf.constant(rng.integers(0, 10, batch).astype(np.int32))

    def compiled(optimizer=None):
        model = make()[0]
        model.compile(optimizer=optimizer, loss=loss, jit_compile=jit)
        return model

    def pruned(model):
        if sparsity:
            sparsekit.prune(model, sparsity)
        return model

    plain = make()[0]
    forward = tf.function(lambda a, b: loss(b, plain(a, training=False)), jit_compile=jit or None)
    ours = update_step(pruned(compiled()), UniformNoise(1e-4))
    tensorflow_only = update_step(pruned(compiled()), UniformNoise(1e-4), fused=False)
    recipe_model = compiled(keras.optimizers.SGD(0.0))

    def recipe() -> None:
        recipe_model.train_on_batch(x, y)
        for weight in recipe_model.trainable_weights:
            if len(weight.shape) > 1:
                weight.assign_add(tf.random.uniform(weight.shape, -1e-4, 1e-4))

    return {
        "forward + loss": lambda: forward(x, y).numpy(),
        "update_step(UniformNoise)": lambda: float(ours(x, y)["loss"]),
        "the same on TensorFlow's ops": lambda: float(tensorflow_only(x, y)["loss"]),
        "SGD(0) + assign_add loop": recipe,
    }


def measured(functions: dict, rounds: int, repeats: int) -> dict[str, tuple[float, float]]:
    """Median milliseconds a batch: wall time and CPU time."""
    for function in functions.values():
        for _ in range(3):
            function()
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            wall, cpu = time.perf_counter(), time.process_time()
            for _ in range(repeats):
                function()
            times[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    scale = 1e3 / repeats
    return {
        name: (statistics.median(wall for wall, _ in pairs) * scale, statistics.median(cpu for _, cpu in pairs) * scale)
        for name, pairs in times.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--sparsity", type=float, default=0.0, help="prune first; 0 leaves the model dense")
    parser.add_argument("--jit", action="store_true", help="compile with XLA, Keras 3's own default")
    arguments = parser.parse_args()
    engine = "yes" if build.available() else f"no ({build.reason()})"
    print(f"TensorFlow {tf.__version__}, Keras {keras.__version__}, {os.cpu_count()} cores, engine: {engine}")
    for name, make in (("MLP 784-1024-1024-10", mlp), ("CNN 32-64-128", cnn)):
        functions = sides(make, arguments.batch, arguments.jit, arguments.sparsity)
        medians = measured(functions, arguments.rounds, arguments.repeats)
        base_wall, base_cpu = medians["forward + loss"]
        print(f"\n{name}, batch {arguments.batch}, median of {arguments.rounds} rounds")
        print(f"  {'':<30} {'wall time':>19} {'CPU time':>19}")
        for side, (wall, cpu) in medians.items():
            print(f"  {side:<30} {wall:8.2f} ms {wall / base_wall:5.2f} x {cpu:8.2f} ms {cpu / base_cpu:5.2f} x")


if __name__ == "__main__":
    main()
