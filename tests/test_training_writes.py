"""The optimizer's own write holds the masks where it is the last one; where it is not, they are held after it."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import tensorflow as tf
from models import KERAS, X, Y, assert_held, both, mlp, warmed

import sparsekit
from sparsekit.engine import build

pytestmark = pytest.mark.skipif(build.compiler() is None, reason="no C++ compiler")
BATCH = (tf.constant(X), tf.constant(Y))


def pruned(flavour: str, optimizer=None):
    assert build.available(), build.reason()
    return sparsekit.prune(warmed(mlp(flavour, optimizer), epochs=1), 0.5)


def ops_of(model, **options) -> Counter:
    """How many ops of each kind the compiled step has."""
    step = sparsekit.train_step(model, **options)
    step(*BATCH)
    definition = step._run.get_concrete_function((*BATCH, None)).graph.as_graph_def()
    nodes = list(definition.node) + [node for f in definition.library.function for node in f.node_def]
    return Counter(node.op for node in nodes)


@both
@pytest.mark.parametrize("masks", ["static", "dynamic"])
def test_the_last_write_of_adam_masks_and_nothing_has_to_after_it(flavour: str, masks: str) -> None:
    model = pruned(flavour)
    kinds = ops_of(model, masks=masks)
    assert kinds["SparsekitAssignKept"] == 2
    assert kinds["SparsekitHold"] == 0
    assert_held(model, sparsekit.masks_of(model))


def shifted(flavour: str):
    """An SGD whose update does not end with the write that can mask."""
    sgd = KERAS[flavour].optimizers.SGD

    class Shifted(sgd):
        def update_step(self, gradient, variable, *args):
            super().update_step(gradient, variable, *args)
            variable.assign(tf.convert_to_tensor(variable) + 1.0)

    return Shifted(0.1)


@both
@pytest.mark.parametrize("masks", ["static", "dynamic"])
def test_a_write_that_comes_later_is_followed_by_a_hold(flavour: str, masks: str) -> None:
    model = pruned(flavour, shifted(flavour))
    kinds = ops_of(model, masks=masks)
    assert kinds["SparsekitHold"] == 2
    assert_held(model, sparsekit.masks_of(model))


@both
def test_an_average_written_over_the_weights_is_followed_by_a_hold(flavour: str) -> None:
    optimizer = KERAS[flavour].optimizers.SGD(0.1, use_ema=True, ema_overwrite_frequency=1)
    model = pruned(flavour, optimizer)
    step = sparsekit.train_step(model)
    for _ in range(3):
        step(*BATCH)
        assert_held(model, sparsekit.masks_of(model))


@both
def test_dense_weights_written_between_two_steps_are_zero_after_the_next(flavour: str) -> None:
    model = pruned(flavour)
    dense = [np.ones_like(array) for array in model.get_weights()]
    step = sparsekit.train_step(model)
    step(*BATCH)
    model.set_weights(dense)
    step(*BATCH)
    assert_held(model, sparsekit.masks_of(model))


@both
@pytest.mark.parametrize("masks", ["static", "dynamic"])
def test_same_bits_as_two_passes(flavour: str, masks: str, monkeypatch) -> None:
    trained = []
    for ready in (True, False):
        monkeypatch.setattr("sparsekit.engine.masking.ready", lambda ready=ready: ready)
        model = pruned(flavour)
        kinds = ops_of(model, masks=masks)
        assert (kinds["SparsekitAssignKept"] > 0) == ready
        trained.append(model.get_weights())
    for fused, apart in zip(*trained, strict=True):
        assert fused.tobytes() == apart.tobytes()


@both
def test_nothing_of_it_stays_on_the_variables(flavour: str) -> None:
    model = pruned(flavour)
    sparsekit.retrain(model, (X, Y), verbose=0, engine="dense")
    for variable in model.trainable_variables:
        native = getattr(variable, "_value", variable)
        assert not {"assign_sub", "assign_add"} & set(vars(native))
