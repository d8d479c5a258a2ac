"""Time and memory of a global prune of a large model, beside one np.partition over the joined magnitudes.

    python scripts/bench_prune.py [--millions 100] [--rounds 7] [--flavour keras]

Time: both sides run interleaved in one process, each round on a model with fresh weights and no masks; medians. The
partition starts from magnitudes that are joined already, which takes about as long again and is shown apart: `prune`
reads, scores, ranks, checks for NaN, freezes the masks and zeroes the weights in its time.
Memory: each figure is taken in a process of its own, as the highest resident size (VmHWM, reset before) over the
resident size before, in units of the weights' bytes.
"""

from __future__ import annotations

import argparse
import ctypes
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
from rich.console import Console
from rich.table import Table

import sparsekit

SPARSITY = 0.9
SHAPES = {"6 layers": 6, "1 layer": 1}


def build(flavour, layers, millions):
    """Square Dense layers with normal weights."""
    k = importlib.import_module(flavour)
    side = round((millions * 1e6 / layers) ** 0.5)
    dense = [k.layers.Dense(side, use_bias=False, kernel_initializer="zeros") for _ in range(layers)]
    return fill(k.Sequential([k.layers.Input((side,)), *dense]))


def fill(model):
    generator = np.random.default_rng(0)
    for weight in model.weights:
        weight.assign(generator.standard_normal(weight.shape, dtype=np.float32))
    return model


def prune(model):
    sparsekit.prune(model, SPARSITY, scope="global")


def join(model):
    return np.concatenate([np.abs(np.asarray(weight)).reshape(-1) for weight in model.weights])


def partition(magnitudes):
    return np.partition(magnitudes, int(SPARSITY * magnitudes.size))


def seconds(function, *arguments):
    start = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - start


def times(flavour, layers, millions, rounds):
    """Medians of (join, partition, prune)."""
    found = []
    for _ in range(rounds):
        model = build(flavour, layers, millions)
        joining = seconds(join, model)
        magnitudes = join(model)
        ranking = seconds(partition, magnitudes)
        del magnitudes
        found.append((joining, ranking, seconds(prune, model)))
    return [statistics.median(column) for column in zip(*found, strict=True)]


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
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    work(model)
    return (resident("VmHWM") - before) / (4 * sum(int(np.prod(weight.shape)) for weight in model.weights))


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
    for name in ("model", "join, s", "partition, s", "prune, s", "prune / partition", "peak of prune", "peak of peer"):
        table.add_column(name, justify="right")
    for name, layers in SHAPES.items():
        joining, ranking, pruning = times(options.flavour, layers, options.millions, options.rounds)
        peaks = [peak_apart(what, options.flavour, layers, options.millions) for what in ("prune", "peer")]
        figures = [f"{joining:.3f}", f"{ranking:.3f}", f"{pruning:.3f}", f"{pruning / ranking:.2f}"]
        table.add_row(name, *figures, *(f"{p:.2f} x weights" for p in peaks))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
