"""Time and memory of a global prune of a large model, beside one np.partition over the joined magnitudes.

    python scripts/bench_prune.py [--millions 100] [--rounds 7] [--flavour keras]

Time: both sides run interleaved in one process, each round on a model with fresh weights and no masks; medians. The
partition starts from magnitudes that are joined already, which takes about as long again and is shown apart: `prune`
reads, scores, ranks, checks for NaN, freezes the masks and zeroes the weights in its time.
On a machine with other work the processor seconds of both sides tell more; a partition runs on one core and `prune` on
all, so that their ratio is what a single core would show.
Memory: each figure is taken in a process of its own, as the highest resident size while it runs (VmHWM, reset before)
less the resident size before, in units of the weights' bytes; memory that TensorFlow kept from building the model is
taken up first.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import tensorflow as tf
from rich.console import Console
from rich.table import Table

import sparsekit

SPARSITY = 0.9
SHAPES = {"6 layers": 6, "1 layer": 1}


def build(flavour, layers, millions):
    """Square Dense layers with normal weights."""
    k = importlib.import_module(flavour)
    side = round((millions * 1e6 / layers) ** 0.5)
    # Not zeros to be filled later: TensorFlow keeps a large tensor of zeros for the next time.
    normal = k.initializers.RandomNormal(seed=0)
    dense = [k.layers.Dense(side, use_bias=False, kernel_initializer=normal) for _ in range(layers)]
    return k.Sequential([k.layers.Input((side,)), *dense])


def prune(model):
    sparsekit.prune(model, SPARSITY, scope="global")


def join(model):
    return np.concatenate([np.abs(np.asarray(weight)).reshape(-1) for weight in model.weights])


def partition(magnitudes):
    return np.partition(magnitudes, int(SPARSITY * magnitudes.size))


def seconds(function, *arguments):
    """Seconds by the clock, and of the processor over all threads."""
    start = time.perf_counter(), time.process_time()
    function(*arguments)
    return time.perf_counter() - start[0], time.process_time() - start[1]


def times(flavour, layers, millions, rounds):
    """Medians over rounds: what -> (seconds, processor seconds)."""
    found = {"join": [], "partition": [], "prune": []}
    for _ in range(rounds):
        model = build(flavour, layers, millions)
        found["join"].append(seconds(join, model))
        magnitudes = join(model)
        found["partition"].append(seconds(partition, magnitudes))
        del magnitudes
        found["prune"].append(seconds(prune, model))
    return {what: [statistics.median(column) for column in zip(*runs, strict=True)] for what, runs in found.items()}


def resident(field):
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split(f"{field}:")[1].split()[0])


def peak(what, flavour, layers, millions):
    """Extra memory of one call in this process, over the weights."""
    work = {"prune": prune, "peer": lambda model: partition(join(model))}[what]
    # Libraries load parts of themselves on first use.
    work(build(flavour, 2, 0.01))
    model = build(flavour, layers, millions)
    gc.collect()
    ballast = take_what_is_free(model.weights[0].shape)
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    work(model)
    del ballast
    return (resident("VmHWM") - before) / (4 * sum(int(np.prod(weight.shape)) for weight in model.weights))


def take_what_is_free(shape):
    """TensorFlow keeps freed memory for the next tensor. Hold tensors until one has to be paid for."""
    ballast, paid = [], 0
    while paid < 0.9 * 4 * np.prod(shape):
        before = resident("VmRSS")
        ballast.append(tf.ones(shape))
        paid = resident("VmRSS") - before
    return ballast


def peak_apart(*arguments):
    command = [sys.executable, __file__, "--peak", *map(str, arguments)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", type=float, default=100.0)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--flavour", choices=("keras", "tf_keras"), default="keras")
    parser.add_argument("--peak", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak:
        what, flavour, layers, millions = options.peak
        print(peak(what, flavour, int(layers), float(millions)))
        return
    table = Table(title=f"{options.millions:g} million float32 weights, {SPARSITY:.0%} pruned, {options.flavour}")
    for name in ("model", "", "join", "partition", "prune", "prune / partition", "peak of prune", "peak of peer"):
        table.add_column(name, justify="right")
    for name, layers in SHAPES.items():
        medians = times(options.flavour, layers, options.millions, options.rounds)
        peaks = [peak_apart(what, options.flavour, layers, options.millions) for what in ("prune", "peer")]
        for row, clock in enumerate(("seconds", "processor seconds")):
            figures = [medians[what][row] for what in ("join", "partition", "prune")]
            table.add_row(
                name if row == 0 else "",
                clock,
                *(f"{figure:.3f}" for figure in figures),
                f"{figures[2] / figures[1]:.2f}",
                *(f"{p:.2f} x weights" if row == 0 else "" for p in peaks),
            )
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
