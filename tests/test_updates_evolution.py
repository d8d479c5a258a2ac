"""Rules that compare losses: they accept, restore, rank and descend as their authors say."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest
import tensorflow as tf
from models import KERAS, X, both, values

from sparsekit.errors import ArgumentError
from sparsekit.frozen import attach
from sparsekit.masks import MaskSet
from sparsekit.updates import CMAES, SPSA, Annealing, EvolutionStrategy, update_step
from sparsekit.updates.evolution import centered_ranks

ROOT = Path(__file__).resolve().parent.parent
TARGET = np.float32(X @ np.linspace(-1, 1, 12).reshape(6, 2))


def linear(flavour: str = "keras") -> Any:
    """Least squares in 12 weights, four of which are pruned, from zero."""
    k = KERAS[flavour]
    model = k.Sequential([k.layers.Input((6,)), k.layers.Dense(2, kernel_initializer="zeros", name="only")], name="m")
    model.compile(loss="mse", jit_compile=False)
    path = next(path for path in values(model) if path.endswith("kernel"))
    attach(model, MaskSet.from_arrays({path: np.arange(12).reshape(6, 2) % 3 != 0}))
    return model


def loss_of(model: Any) -> float:
    return float(np.mean((X @ values(model)[kernel(model)] - TARGET) ** 2))


def kernel(model: Any) -> str:
    return next(path for path in values(model) if path.endswith("kernel"))


@both
@pytest.mark.parametrize(
    ("rule", "steps"),
    [
        (Annealing(0.1), 120),
        (EvolutionStrategy(16, sigma=0.05, learning_rate=0.02), 60),
        (SPSA(0.01, 0.02), 200),
        (CMAES(0.1), 40),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, int) else "",
)
def test_a_search_descends_on_the_kept_weights(flavour, rule, steps):
    model = linear(flavour)
    step = update_step(model, rule)
    start = loss_of(model)
    batch = tf.constant(X), tf.constant(TARGET)
    for _ in range(steps):
        step(*batch)
    keep = np.arange(12).reshape(6, 2) % 3 != 0
    lowest = 0.0
    for column in range(2):
        kept = X[:, keep[:, column]]
        fitted = kept @ np.linalg.lstsq(kept, TARGET[:, column], rcond=None)[0]
        lowest += np.mean((fitted - TARGET[:, column]) ** 2) / 2
    assert loss_of(model) - lowest < 0.25 * (start - lowest)
    assert (values(model)[kernel(model)][~keep] == 0).all()
    np.testing.assert_array_equal(values(model)[kernel(model).replace("kernel", "bias")], 0)


@pytest.mark.parametrize("fused", [None, False])
def test_a_rejected_step_is_taken_back_bit_for_bit(fused):
    model = linear()
    model.layers[0].kernel.assign(np.linalg.lstsq(X, TARGET, rcond=None)[0] * (np.arange(12).reshape(6, 2) % 3 != 0))
    step = update_step(model, Annealing(10.0), fused=fused)
    before = values(model)[kernel(model)]
    for _ in range(5):
        step(X, TARGET)
        np.testing.assert_array_equal(values(model)[kernel(model)], before)


def test_annealing_keeps_what_lowers_the_loss_and_only_that():
    model = linear()
    step = update_step(model, Annealing(0.05))
    losses, moved = [loss_of(model)], 0
    for _ in range(30):
        before = values(model)[kernel(model)]
        step(X, TARGET)
        losses.append(loss_of(model))
        changed = (values(model)[kernel(model)] != before).any()
        assert changed == (losses[-1] < losses[-2])
        moved += changed
    assert 0 < moved < 30


def test_a_hot_annealing_takes_what_raises_the_loss():
    model = linear()
    step = update_step(model, Annealing(5.0, temperature=1e9))
    for _ in range(3):
        step(X, TARGET)
    assert loss_of(model) > 10 * loss_of(linear())


def test_a_loss_that_is_not_finite_is_never_accepted():
    for rule in (Annealing(0.1, temperature=1e9), SPSA(2.0**-6, 0.1)):
        model = linear()
        model.layers[0].kernel.assign(np.ones((6, 2)) * (np.arange(12).reshape(6, 2) % 3 != 0))
        update_step(model, rule)(X, TARGET * np.inf)
        np.testing.assert_allclose(values(model)[kernel(model)][0, 1], 1.0, rtol=1e-6)


def test_ranks_run_from_best_to_worst_and_sum_to_zero():
    ranks = centered_ranks(tf.constant([3.0, 1.0, math.nan, 2.0, 2.0])).numpy()
    np.testing.assert_allclose(ranks, [-0.25, 0.5, -0.5, 0.125, 0.125])
    np.testing.assert_allclose(centered_ranks(tf.fill([4], 7.0)), 0.0)


def test_equal_losses_leave_the_weights_bit_for_bit():
    model = linear()
    model.layers[0].kernel.assign(np.random.default_rng(0).normal(size=(6, 2)))
    step = update_step(model, EvolutionStrategy(4))
    before = values(model)[kernel(model)]
    step(X * 0, TARGET)
    np.testing.assert_array_equal(values(model)[kernel(model)], before)


def test_the_population_is_seeds_not_copies():
    """The graph is the same for any population, so what a step holds at a time is, too."""
    sizes = set()
    for population in (4, 256):
        step = update_step(linear(), EvolutionStrategy(population))
        traced = step._compiled.get_concrete_function((tf.constant(X), tf.constant(TARGET), None))
        graph = traced.graph.as_graph_def()
        sizes.add((len(graph.node), sum(len(inner.node_def) for inner in graph.library.function)))
    assert len(sizes) == 1


MEMORY = """
import re
import keras
import numpy as np
from sparsekit.updates import EvolutionStrategy, update_step


def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) / 1024


x, y = np.ones((2, 1000), "float32"), np.ones((2, 1000), "float32")
peaks = []
for population in (4, 100):
    model = keras.Sequential([keras.layers.Input((1000,)), keras.layers.Dense(1000)])
    model.compile(loss="mse", jit_compile=False)
    step = update_step(model, EvolutionStrategy(population))
    for _ in range(2):
        step(x, y)
    peaks.append(peak())
    del model, step
print(peaks[1] - peaks[0])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
def test_peak_memory_does_not_grow_with_the_population():
    """The kernel has 4 MB; 96 more copies of it would take 366 MiB."""
    done = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    assert float(done.stdout) < 60


def test_spsa_follows_the_slope():
    """On a linear loss the estimate is exact: the step is -rate * (direction . gradient) * direction."""
    k = KERAS["keras"]
    model = k.Sequential([k.layers.Input((3,)), k.layers.Dense(1, use_bias=False)])
    model.compile(loss=lambda y, p: tf.reduce_mean(p), jit_compile=False)
    step = update_step(model, SPSA(0.5, 0.25, distribution="rademacher"))
    before = model.layers[0].kernel.numpy()[:, 0]
    x = np.array([[1.0, 2.0, 4.0]], "float32")
    step(x, np.zeros((1, 1)))
    change = model.layers[0].kernel.numpy()[:, 0] - before
    slope = np.abs(change[0]) / 0.25
    # All three moved by rate * slope; the slope is |d . x| for a direction d of signs against which they moved.
    np.testing.assert_allclose(np.abs(change), 0.25 * slope, rtol=1e-4)
    assert slope == pytest.approx(-np.sign(change) @ x[0], rel=1e-4)


def test_cma_leaves_numpys_generator_alone():
    np.random.seed(5)
    expected = np.random.rand()
    np.random.seed(5)
    step = update_step(linear(), CMAES())
    step(X, TARGET)
    assert np.random.rand() == expected


def test_cma_refuses_a_large_selection():
    with pytest.raises(ArgumentError, match="was given 64 kept weights and works for 2 to 10; select fewer"):
        update_step(models.mlp("keras"), CMAES(max_weights=10))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: EvolutionStrategy(population=3), r"population=3 must be an even number >= 2"),
        (lambda: EvolutionStrategy(sigma=0), r"sigma=0 must be a finite number > 0"),
        (lambda: SPSA(distribution="uniform"), r"distribution='uniform' is not known; give one of normal, rademacher"),
        (lambda: Annealing(temperature=-1), r"temperature=-1 must be a finite number >= 0"),
        (lambda: CMAES(population=1), r"population=1 must be a whole number >= 2"),
    ],
)
def test_bad_settings_are_refused(make, message):
    with pytest.raises(ArgumentError, match=message):
        make()
