"""Two replicas on two logical CPUs, in a process of their own: devices are split before TensorFlow starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

PROGRAM = """
import sys
import numpy as np
import tensorflow as tf

device = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(device, [tf.config.LogicalDeviceConfiguration()] * 2)

import importlib
keras = importlib.import_module(sys.argv[1])
from sparsekit.frozen import attach
from sparsekit.masks import MaskSet
from sparsekit.training.callbacks import WeightUpdate
from sparsekit.updates import Annealing, EvolutionStrategy, SPSA, UniformNoise, fit_with_update, update_step
from sparsekit.weights import prunable_weights
from sparsekit.flavour import native

rng = np.random.default_rng(0)
x, y = rng.normal(size=(64, 6)).astype("float32"), rng.normal(size=(64, 2)).astype("float32")


def build(learning_rate=0.0):
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(8, "tanh"), keras.layers.Dense(2)]
    model = keras.Sequential([keras.layers.Input((6,)), *layers])
    model.compile(optimizer=keras.optimizers.SGD(learning_rate), loss="mse", jit_compile=False)
    masks = np.random.default_rng(2)
    attach(model, MaskSet.from_arrays({r.path: masks.random(r.shape) < 0.5 for r in prunable_weights(model)}))
    return model


def copies(model):
    found = []
    for ref in prunable_weights(model):
        variable = native(ref.variable)
        variable = getattr(variable, "_variable", variable)
        found.append([part.numpy() for part in getattr(variable, "values", [variable])])
    return found


strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
rules = [
    UniformNoise(0.1),
    lambda w, mask, step, seed: w + tf.random.stateless_normal(w.shape, seed),
    Annealing(0.1, temperature=1.0),
    EvolutionStrategy(4),
    SPSA(0.01, 0.1),
]
for rule in rules:
    with strategy.scope():
        mirrored = build()
    single = build()
    start = [pair[0] for pair in copies(single)]
    for model in (mirrored, single):
        fit_with_update(model, (x, y), rule, batch_size=64, epochs=2, shuffle=False, seed=5, verbose=0)
    for first, (one, two), (alone,) in zip(start, copies(mirrored), copies(single)):
        assert np.array_equal(one, two), "replicas drifted apart"
        assert (one[first == 0] == 0).all()
        assert (one != first)[first != 0].mean() > 0.5
        # Losses of halves round differently from the loss of the whole; noise alone does not.
        tolerance = 0 if isinstance(rule, UniformNoise) else 1e-4
        np.testing.assert_allclose(one, alone, rtol=tolerance, atol=tolerance)

# The own loop and the callback, beside gradient steps that move the masked weights, reach every replica, too.
with strategy.scope():
    mirrored = build(0.1)
masked = [one == 0 for one, _ in copies(mirrored)]
update_step(mirrored, UniformNoise(0.1))(x[:32], y[:32])
mirrored.fit(x, y, batch_size=32, callbacks=[WeightUpdate(UniformNoise(0.1), every=3)], verbose=0)
for (one, two), zero in zip(copies(mirrored), masked):
    assert np.array_equal(one, two)
    assert np.array_equal(one == 0, zero)
print("replicas agree")
"""


@pytest.mark.parametrize("flavour", ["keras", "tf_keras"])
def test_every_replica_moves_by_the_same_bits(flavour):
    done = subprocess.run([sys.executable, "-c", PROGRAM, flavour], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "replicas agree" in done.stdout
