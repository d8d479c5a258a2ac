"""How large and how fast model files are: plain .h5, its gzip, and the sparse file, side by side.

Speeds are megabytes of dense weights for each second of one core's time: `taskset -c 0 python scripts/bench_files.py`.
"""

from __future__ import annotations

import argparse
import gzip
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np

import sparsekit
from sparsekit.files.sparse_file import write_sparse
from sparsekit.flavour import get


def dense_model(units: int) -> Any:
    """Two square layers with weights as training leaves them: fresh uniform ones would compress by themselves."""
    model = keras.Sequential([keras.layers.Input((units,)), keras.layers.Dense(units), keras.layers.Dense(units)])
    rng = np.random.default_rng(0)
    model.set_weights([rng.normal(scale=0.05, size=w.shape).astype("float32") for w in model.get_weights()])
    return model


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--units", type=int, default=3500, help="width of the two layers (3500: 98 MB)")
    arguments.add_argument("--rounds", type=int, default=5)
    given = arguments.parse_args()
    model = dense_model(given.units)
    megabytes = sum(w.nbytes for w in model.get_weights()) / 1e6
    print(f"{megabytes:.0f} MB of dense weights; median of {given.rounds} interleaved rounds; MB/s of one core")
    print("sparsity | .h5 MB  gzip MB  sparse MB  x bound | write .h5  sparse | read .h5  sparse")
    with tempfile.TemporaryDirectory() as folder:
        plain, sparse = Path(folder) / "model.h5", Path(folder) / "model.sparse.h5"
        for sparsity in (0.5, 0.8, 0.9, 0.95, 0.99):
            sparsekit.prune(model, sparsity)
            jobs: dict[str, Callable[[], Any]] = {
                "write plain": lambda: sparsekit.save(model, plain),
                "write sparse": lambda: sparsekit.save(model, sparse),
                "read plain": lambda: sparsekit.load(plain),
                "read sparse": lambda: sparsekit.load(sparse),
            }
            seconds: dict[str, list[float]] = {name: [] for name in jobs}
            for turn in range(given.rounds + 1):
                for name, job in jobs.items():
                    begun = time.process_time()
                    job()
                    if turn:
                        seconds[name].append(time.process_time() - begun)
            speed = {name: megabytes / statistics.median(times) for name, times in seconds.items()}
            bound = write_sparse(model, get("keras"), Path(folder) / "again.h5", True).bound / 1e6
            zipped = len(gzip.compress(plain.read_bytes(), 6)) / 1e6
            sizes = [path.stat().st_size / 1e6 for path in (plain, sparse)]
            print(
                f"{sparsity:8.0%} | {sizes[0]:6.1f}  {zipped:7.1f}  {sizes[1]:9.1f}  {sizes[1] / bound:7.3f} |"
                f" {speed['write plain']:9.0f}  {speed['write sparse']:6.0f} |"
                f" {speed['read plain']:8.0f}  {speed['read sparse']:6.0f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
