"""Time a product with a kernel and its gradients in both forms; results are kept in the engine's cache."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from sparsekit.engine import build
from sparsekit.engine.layers import Operation, dense_product, sparse_product
from sparsekit.errors import EngineError

_MIN_ROUNDS, _MAX_ROUNDS, _ENOUGH_S = 7, 31, 0.3
_KEPT_ENTRIES = 2000


@dataclass(frozen=True)
class Use:
    """One product of a layer with a kernel, as a model makes it.

    Args:
        operation: what is done.
        x_shape: shape of a batch.
        relu: whether a ReLU comes with it.
        input_gradient: whether the gradient of its input is asked for.
        times: how often a step makes it (loops of recurrent layers).
        backward: whether gradients are asked for at all.
    """

    operation: Operation
    x_shape: tuple[int, ...]
    relu: bool
    input_gradient: bool
    times: int = 1
    backward: bool = True

    @property
    def multiplications(self) -> int:
        """Of forward and backward together."""
        passes = 1 + self.backward * (1 + self.input_gradient)
        return self.times * passes * self.operation.multiplications(self.x_shape)


def onednn() -> bool:
    """Whether TensorFlow's dense ops of this process use oneDNN."""
    from tensorflow.python.util import _pywrap_util_port

    return bool(_pywrap_util_port.IsMklEnabled())


def threads() -> int:
    """How many threads an op of this process may use."""
    return tf.config.threading.get_intra_op_parallelism_threads() or len(os.sched_getaffinity(0))


def dense_seconds(use: Use) -> float:
    """Time of the dense form, forward and backward."""
    return _remembered("dense", use, None, lambda: median_seconds([_runner(use, None)]))[0]


def both_seconds(use: Use, keep: np.ndarray) -> tuple[float, float]:
    """Times of the dense and the sparse form, measured in turn."""

    dense, sparse = _remembered("both", use, keep, lambda: median_seconds([_runner(use, None), _runner(use, keep)]))
    return dense, sparse


def known(use: Use, keep: np.ndarray) -> bool:
    """Whether `both_seconds` has its answer already."""
    return _key("both", use, keep) in _load()


def median_seconds(runners: list[Callable[[], Any]]) -> list[float]:
    """Median time of each of several functions, run in turn."""
    for runner in runners:
        runner()
        runner()
    rounds: list[list[float]] = []
    begin = time.perf_counter()
    while len(rounds) < _MIN_ROUNDS or (
        len(rounds) < _MAX_ROUNDS and time.perf_counter() - begin < _ENOUGH_S * len(runners)
    ):
        rounds.append([])
        for runner in runners:
            start = time.perf_counter()
            runner()
            rounds[-1].append(time.perf_counter() - start)
    return [statistics.median(column) for column in zip(*rounds, strict=True)]


def _runner(use: Use, keep: np.ndarray | None) -> Callable[[], Any]:
    rng = np.random.default_rng(0)
    operation = use.operation
    x = tf.constant(rng.standard_normal(use.x_shape, np.float32))
    bias = tf.zeros([int(np.prod(operation.bias_shape))])
    shape = operation.shape
    size = int(np.prod(shape)) if keep is None else int(np.count_nonzero(keep))
    weights = tf.constant(rng.standard_normal(size, np.float32) * 0.1)
    structure = None if keep is None else operation.structure(keep)

    def forward(x: Any, weights: Any, bias: Any) -> Any:
        if structure is None:
            product = dense_product(operation, tf.reshape(weights, shape))
        else:
            product = sparse_product(operation, weights, structure, use.input_gradient)
        return product(x, bias, "relu" if use.relu else None)

    def both_ways(x: Any, weights: Any, bias: Any) -> Any:
        targets = [weights, bias, *([x] if use.input_gradient else [])]
        with tf.GradientTape() as tape:
            tape.watch(targets)
            y = forward(x, weights, bias)
        return tape.gradient(y, targets, output_gradients=tf.ones_like(y))

    run = tf.function(both_ways if use.backward else forward, autograph=False)
    return lambda: run(x, weights, bias)


def _key(kind: str, use: Use, keep: np.ndarray | None) -> str:
    kept = "" if keep is None else f" kept {int(np.count_nonzero(keep))} {_library_name()}"
    gradient = ("both gradients" if use.input_gradient else "weight gradient") if use.backward else "forward"
    return (
        f"{kind} {use.operation.key()} on {use.x_shape} relu {use.relu} {gradient}{kept} "
        f"threads {threads()} onednn {onednn()} tensorflow {tf.__version__}"
    )


@functools.cache
def _library_name() -> str:
    path = build.info().path
    return path.stem if path is not None else "none"


def _remembered(kind: str, use: Use, keep: np.ndarray | None, measure: Callable[[], list[float]]) -> list[float]:
    key = _key(kind, use, keep)
    found = _load().get(key)
    if found is None:
        found = measure()
        _remember(key, found)
    return found


def _path() -> Path:
    return build.cache_dir() / "gate.json"


def _load() -> dict[str, list[float]]:
    """What is known; a file that cannot be read or is damaged knows nothing."""
    try:
        entries = json.loads(_path().read_text())
    except (OSError, ValueError, EngineError):
        return {}
    if not isinstance(entries, dict):
        return {}
    return {
        key: value
        for key, value in entries.items()
        if isinstance(value, list) and value and all(isinstance(v, float) and v > 0 for v in value)
    }


def _remember(key: str, value: list[float]) -> None:
    """Keep a result for later processes, where the cache can be written."""
    entries = {**_load(), key: value}
    entries = dict(list(entries.items())[-_KEPT_ENTRIES:])
    with contextlib.suppress(OSError, EngineError):
        path = _path()
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle, partial = tempfile.mkstemp(dir=path.parent, prefix="gate-")
        with os.fdopen(handle, "w") as file:
            json.dump(entries, file)
        os.replace(partial, path)
