"""Small models, data and checks that several tests share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tf_keras

import sparsekit
from sparsekit.masks import MaskSet
from sparsekit.weights import all_weights

KERAS: dict[str, Any] = {"keras": keras, "tf_keras": tf_keras}
both = pytest.mark.parametrize("flavour", list(KERAS))

_RNG = np.random.default_rng(3)
X = _RNG.normal(size=(64, 6)).astype("float32")
Y = _RNG.normal(size=(64, 2)).astype("float32")


def mlp(flavour: str, optimizer: Any = None, **compile_arguments: Any) -> Any:
    """6 -> 8 -> 2, compiled with mse; the same weights on each call. `optimizer=False` leaves it uncompiled."""
    k = KERAS[flavour]
    k.utils.set_random_seed(1)
    model = k.Sequential([k.layers.Input((6,)), k.layers.Dense(8, "tanh"), k.layers.Dense(2)])
    if optimizer is not False:
        model.compile(optimizer or k.optimizers.Adam(0.01), **{"loss": "mse", **compile_arguments})
    return model


def warmed(model: Any, epochs: int = 2) -> Any:
    """Train densely, so that optimizer slots hold something that pushes zeros away."""
    model.fit(X, Y, batch_size=16, epochs=epochs, verbose=0)
    return model


def values(model: Any) -> dict[str, np.ndarray]:
    """Copies of all variables by path."""
    return {ref.path: np.array(ref.numpy()) for ref in all_weights(model)}


def assert_held(model: Any, masks: MaskSet) -> None:
    """Every position that the masks drop is exactly zero, and there is one."""
    now = values(model)
    assert masks
    for path in masks:
        assert not masks[path].all()
        assert np.count_nonzero(now[path][~masks[path]]) == 0, path


def assert_moved(model: Any, masks: MaskSet, before: dict[str, np.ndarray]) -> None:
    """Of each masked weight, survivors changed."""
    now = values(model)
    for path in masks:
        assert (now[path] != before[path])[masks[path]].mean() > 0.3, path


def each_batch(flavour: str, check: Callable[[], None]) -> Any:
    """A callback that runs a check after each batch and counts its calls."""

    class EachBatch(KERAS[flavour].callbacks.Callback):
        calls = 0

        def on_train_batch_end(self, batch, logs=None):
            check()
            self.calls += 1

    return EachBatch()


def retrain_watched(model: Any, data: Any, callbacks: tuple = (), **arguments: Any) -> Any:
    """`retrain`, with zeros and moving survivors checked after each batch and at the end."""
    masks, before = sparsekit.masks_of(model), values(model)
    flavour = "keras" if isinstance(model, keras.Model) else "tf_keras"
    watcher = each_batch(flavour, lambda: assert_held(model, masks))
    history = sparsekit.retrain(model, data, callbacks=[*callbacks, watcher], **{"verbose": 0, **arguments})
    assert watcher.calls > 0
    assert_held(model, masks)
    assert_moved(model, masks, before)
    assert sparsekit.masks_of(model) == masks
    return history
