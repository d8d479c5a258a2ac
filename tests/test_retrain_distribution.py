"""Two replicas on logical CPUs: they hold the same zeros and stay equal bit for bit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
sys.path.insert(0, {tests!r})
import numpy as np
import tensorflow as tf

tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
)
import {flavour} as k
import sparsekit
from models import X, Y, assert_held, assert_moved, values, warmed
from sparsekit.flavour import native
from sparsekit.schedules import Linear

strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


def build(optimizer):
    k.utils.set_random_seed(1)
    model = k.Sequential([k.layers.Input((6,)), k.layers.Dense(8, "tanh"), k.layers.Dense(2)])
    model.compile(optimizer, "mse")
    return model


def replicas(variable):
    variable = native(variable)
    variable = getattr(variable, "_variable", variable)
    return [v.numpy() for v in strategy.experimental_local_results(variable)]


def check(model, masks, before):
    assert_held(model, masks)
    assert_moved(model, masks, before)
    from sparsekit.frozen import frozen_masks

    for variable in [*model.trainable_variables, *(mask.keep for mask in frozen_masks(model))]:
        one, two = replicas(variable)
        np.testing.assert_array_equal(one, two)


def adam():
    return k.optimizers.Adam(0.01, use_ema=True, global_clipnorm=1.0)


for case in (
    dict(),
    dict(enforce="constraint"),
    dict(masks="dynamic"),
    dict(schedule=Linear(0.75, end_step=3, frequency=1)),
    *([dict(steps_per_execution=2)] if k.__name__ == "tf_keras" else []),  # Keras 3 itself fails there
):
    with strategy.scope():
        model = warmed(build(adam()))
        sparsekit.prune(model, 0.5)
    masks, before = sparsekit.masks_of(model), values(model)
    sparsekit.retrain(model, (X, Y), batch_size=16, verbose=0, **case)
    check(model, masks, before)
    print("held", case)

# Outside of the scope, and as one replica would have trained.
alone = sparsekit.prune(build(k.optimizers.SGD(0.1)), 0.5)
with strategy.scope():
    model = build(k.optimizers.SGD(0.1))
sparsekit.prune(model, 0.5)
for each in (model, alone):
    sparsekit.retrain(each, (X, Y), batch_size=16, shuffle=False, verbose=0)
for value, expected in zip(values(model).values(), values(alone).values(), strict=True):
    np.testing.assert_allclose(value, expected, atol=1e-6)
print("equal")

with strategy.scope():
    model = sparsekit.prune(build(k.optimizers.SGD(0.1)), 0.5)
    masks, before = sparsekit.masks_of(model), values(model)
    step = sparsekit.train_step(model)
    optimizer = sparsekit.masked(k.optimizers.SGD(0.1, momentum=0.9), model)
    optimizer.build(model.trainable_variables)
sparsekit.strip(model)
sparsekit.freeze(model, masks)


@tf.function
def own(x, y):
    def replica(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
        gradients = tape.gradient(loss, [native(v) for v in model.trainable_variables])
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))

    strategy.run(replica, args=(x, y))


for _ in range(3):
    own(X, Y)
check(model, masks, before)
print("own loop")

k.mixed_precision.set_global_policy("mixed_float16")
with strategy.scope():
    model = warmed(build(k.optimizers.Adam(0.01)))
    sparsekit.prune(model, 0.5)
masks, before = sparsekit.masks_of(model), values(model)
sparsekit.retrain(model, (X, Y), batch_size=16, verbose=0)
check(model, masks, before)
print("mixed")
"""


@pytest.mark.parametrize("flavour", ["keras", "tf_keras"])
def test_two_replicas(flavour: str) -> None:
    """In a program of its own, since devices can be set up only once."""
    program = PROGRAM.format(tests=str(Path(__file__).parent), flavour=flavour)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert done.stdout.split("\n")[-4:-1] == ["equal", "own loop", "mixed"]
