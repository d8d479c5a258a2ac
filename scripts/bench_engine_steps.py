"""Time whole training steps with Adam: plain fit of the dense model, retrain on the dense engine, on the sparse one.

Each side trains a model of its own in one call; the sides take turns, an epoch each, and medians over the rounds count.
One process for each of TensorFlow's two dense settings; the column `sparse` compares with the faster plain fit of the
two. Among the models are those of the examples and of the demo. Then what masks that change cost on the engine, in
epochs of 100 steps: masks chosen anew once in each, ten times in each, or held wherever a weight becomes zero.
All of it takes more than ten minutes; `--model MLP` takes three.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

SETTING = "TF_ENABLE_ONEDNN_OPTS"
SIDES = ("plain", "dense", "sparse", "auto")
CHANGING = ("sparse", "schedule", "often", "zeros stay")
# Updates between two choices of masks, and as many in "often", which shows what a choice costs by itself.
FREQUENCY, OFTEN = 100, 10

# (seconds, seconds of CPU) a step, one for each round.
Times = list[tuple[float, float]]


def models() -> dict[str, tuple[Callable[[], Any], tuple[int, ...], int, int]]:
    """Name -> (function that makes a compiled model, shape of a sample, batch size, steps an epoch)."""
    import keras

    from sparsekit.demo import build_model

    k = keras.layers

    def compiled(layers: list[Any]) -> Any:
        model = keras.Sequential(layers)
        model.compile(keras.optimizers.Adam(1e-4), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    def mlp() -> Any:
        return compiled([k.Input((784,)), k.Dense(2048, "relu"), k.Dense(2048, "relu"), k.Dense(10)])

    def cnn() -> Any:
        first = k.Conv2D(64, 3, padding="same", activation="relu")
        others = [k.Conv2D(n, 3, strides=s, padding="same", activation="relu") for n, s in ((64, 1), (128, 2))]
        return compiled([k.Input((32, 32, 3)), first, *others, k.GlobalAveragePooling2D(), k.Dense(10)])

    def own_loop() -> Any:
        return compiled([k.Input((20,)), k.Dense(64, "relu"), k.Dense(3)])

    def gradient_free() -> Any:
        return compiled([k.Input((64,)), k.Dense(32, "relu"), k.Dense(10)])

    return {
        "MLP 784-2048-2048-10": (mlp, (784,), 64, 20),
        "CNN 3x3: 64, 64, 128": (cnn, (32, 32, 3), 32, 4),
        "demo": (lambda: build_model(keras), (28, 28, 1), 64, 20),
        "examples/own_loop": (own_loop, (20,), 64, 300),
        "examples/gradient_free": (gradient_free, (64,), 256, 300),
    }


class Turns:
    """Lets one side after the other run, from one `next` to the following."""

    def __init__(self, sides: tuple[str, ...]) -> None:
        self._order, self._turn, self._changed = list(sides), 0, threading.Condition()

    def wait(self, side: str) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._order[self._turn] == side)

    def next(self, side: str, done: bool = False) -> None:
        with self._changed:
            if done:
                self._order.remove(side)
                self._turn %= max(len(self._order), 1)
            else:
                self._turn = (self._turn + 1) % len(self._order)
            self._changed.notify_all()
        if not done:
            self.wait(side)


def marked(model: Any, turns: Turns, side: str, steps: int, times: Times, held: dict[str, int]) -> None:
    """Give a model a metric that is told of each epoch's beginning, by which time nothing is put back for it."""
    import keras

    begun: list[tuple[float, float]] = []

    class Mark(keras.metrics.Mean):
        def reset_state(self) -> None:
            super().reset_state()
            if begun:
                ended = time.perf_counter(), time.process_time()
                times.append(((ended[0] - begun[-1][0]) / steps, (ended[1] - begun[-1][1]) / steps))
            variables = [*model.trainable_variables, *model.optimizer.variables]
            held[side] = sum(4 * math.prod(v.shape) for v in variables)
            turns.next(side)
            begun.append((time.perf_counter(), time.process_time()))

        def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
            super().update_state(0.0)

    model.compile(model.optimizer, model.loss, metrics=[Mark(name="mark")])


def run(name: str, sides: dict[str, dict[str, Any]], sparsity: float, rounds: int, steps: int | None = None) -> Any:
    """Times of each side, and bytes of weights and optimizer while it trains.

    Args:
        name: of the model.
        sides: side -> arguments of `retrain`; without any it is a plain fit.
        sparsity: of the pruned models.
        rounds: epochs that count.
        steps: steps an epoch.
    """
    import numpy as np

    import sparsekit

    make, shape, batch, usual = models()[name]
    steps = steps or usual
    rng = np.random.default_rng(0)
    x = rng.standard_normal((steps * batch, *shape), np.float32)
    y = rng.integers(0, 3, steps * batch)
    turns, errors = Turns(tuple(sides)), []
    times: dict[str, Times] = {side: [] for side in sides}
    held: dict[str, int] = {}

    def train(side: str, model: Any, arguments: dict[str, Any]) -> None:
        turns.wait(side)
        try:
            # One epoch to trace in, and one whose beginning marks the end of the last that counts.
            fit = {"batch_size": batch, "epochs": rounds + 2, "verbose": 0}
            if arguments:
                sparsekit.retrain(model, (x, y), **arguments, **fit)
            else:
                model.fit(x, y, **fit)
        except Exception as error:
            errors.append(error)
        finally:
            turns.next(side, done=True)

    threads = []
    for side, arguments in sides.items():
        model = make()
        if arguments:
            sparsekit.prune(model, sparsity)
        marked(model, turns, side, steps, times[side], held)
        threads.append(threading.Thread(target=train, args=(side, model, arguments)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    # Keras may reset metrics once more before it begins.
    return {side: column[-rounds:] for side, column in times.items()}, held


def middle(column: Times, base: Times | None = None, which: int = 0) -> float:
    """Median time, or the median over the rounds of the ratio to another side's."""
    if base is None:
        return statistics.median(one[which] for one in column)
    return statistics.median(one[which] / other[which] for one, other in zip(column, base, strict=True))


def child(arguments: argparse.Namespace) -> None:
    import sparsekit
    from sparsekit.engine import gate

    # "auto" as it decides for a run of any length.
    gate._WORTH = 0.0
    warnings.simplefilter("ignore", sparsekit.errors.ScheduleWarning)
    chosen = [name for name in models() if arguments.model in name]
    engines: dict[str, dict[str, Any]] = {side: {"engine": side} for side in SIDES if side != "plain"}
    for name in chosen:
        # What is no bigger than an example is not worth a second process.
        if name.startswith("examples") and arguments.setting == "1":
            continue
        times, held = run(name, {"plain": {}, **engines}, arguments.sparsity, arguments.rounds)
        result = {
            "seconds": {side: middle(column) for side, column in times.items()},
            "auto": 1 / middle(times["auto"], times["dense"]),
            "memory": held["sparse"] / held["plain"],
        }
        print(json.dumps(["engines", name, result]), flush=True)
    for name in chosen if arguments.setting == "1" else []:
        if name.startswith("examples"):
            continue
        ways: dict[str, dict[str, Any]] = {
            "schedule": {"schedule": slow(arguments.sparsity, FREQUENCY)},
            "often": {"schedule": slow(arguments.sparsity, OFTEN)},
            "zeros stay": {"masks": "dynamic"},
        }
        sides = {side: {"engine": "sparse", **ways.get(side, {})} for side in CHANGING}
        # What is to be seen is smaller than what the clock differs by from one epoch to the next.
        times, _ = run(name, sides, arguments.sparsity, 3 * arguments.rounds, FREQUENCY)
        costs = {way: [middle(times[way], times["sparse"], which) - 1 for which in (0, 1)] for way in ways}
        print(json.dumps(["changing", name, {"seconds": middle(times["sparse"]), **costs}]), flush=True)


def slow(sparsity: float, frequency: int) -> Any:
    """So slow a schedule that the work of a step stays the same, while each choice drops some weights."""
    from sparsekit.schedules import Linear

    end = sparsity + 0.1 * (1 - sparsity)
    return Linear(end, initial_sparsity=sparsity, end_step=10_000, frequency=frequency)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sparsity", type=float, default=0.9)
    parser.add_argument("--rounds", type=int, default=7, help="epochs of each side that count")
    parser.add_argument("--model", default="", help="only models whose name holds this")
    parser.add_argument("--setting", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.setting:
        child(arguments)
        return
    found: dict[str, dict[str, Any]] = {}
    changing: dict[str, Any] = {}
    for setting in ("0", "1"):
        environment = {**os.environ, SETTING: setting, "TF_CPP_MIN_LOG_LEVEL": "3"}
        command = [sys.executable, __file__, "--setting", setting, *sys.argv[1:]]
        output = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
        for line in filter(lambda line: line.startswith("["), output.splitlines()):
            kind, name, result = json.loads(line)
            if kind == "engines":
                found.setdefault(name, {})[setting] = result
            else:
                changing[name] = result
    print(f"{'model':24} {'oneDNN':>6} " + " ".join(f"{side:>9}" for side in SIDES) + "   sparse   auto/dense  memory")
    for name, settings in found.items():
        fastest = min(result["seconds"]["plain"] for result in settings.values())
        for setting, result in settings.items():
            seconds = result["seconds"]
            print(
                f"{name:24} {setting:>6} "
                + " ".join(f"{seconds[side] * 1e3:6.2f} ms" for side in SIDES)
                + f"   {fastest / seconds['sparse']:5.2f}x  {result['auto']:8.2f}x  {result['memory']:6.2f}"
            )
    print("sparse: against the faster plain fit; auto/dense: how much faster auto is than the dense engine;")
    print("memory: weights and optimizer while training, sparse / plain.\n")
    heads = (f"a schedule, frequency={FREQUENCY}", f"frequency={OFTEN}", "zeros stay (dynamic)")
    print(f"{'masks that change':24} {'static':>9}" + "".join(f"  {head:>26}" for head in heads))
    for name, result in changing.items():
        costs = (f"{wall:+7.1%} (CPU {cpu:+6.1%})" for wall, cpu in (result[way] for way in CHANGING[1:]))
        print(f"{name:24} {result['seconds'] * 1e3:6.2f} ms" + "".join(f"  {cost:>26}" for cost in costs))


if __name__ == "__main__":
    main()
