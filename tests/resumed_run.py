"""A training run with checkpoints, as a program that can be killed: FLAVOUR MASKS FOLDER OUT KILL.

KILL is the number of batches after which SIGKILL comes, or w and the number of the checkpoint that is being written.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import numpy as np
import tensorflow as tf

import sparsekit
from sparsekit.flavour import get
from sparsekit.schedules import Polynomial

X = np.random.default_rng(0).normal(size=(100, 8)).astype("float32")
Y = np.random.default_rng(1).integers(0, 3, 100)


def model_of(flavour: str) -> Any:
    """A pruned model with everything that a run has to remember: momenta, averages, dropout, batch statistics."""
    k = get(flavour).keras
    k.utils.set_random_seed(1)
    layers = k.layers
    model = k.Sequential(
        [
            layers.Input((8,)),
            layers.Dense(16, activation="relu"),
            layers.BatchNormalization(),
            layers.Dropout(0.3),
            layers.Dense(3),
        ]
    )
    loss = k.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(k.optimizers.Adam(0.01, use_ema=True, ema_momentum=0.9), loss, metrics=["accuracy"])
    return sparsekit.prune(model, 0.5)


def data_of(kind: str) -> dict[str, Any]:
    if kind == "arrays":
        return {"data": (X, Y), "batch_size": 16, "validation_split": 0.1}
    return {"data": tf.data.Dataset.from_tensor_slices((X, Y)).batch(16)}


def train(flavour: str, kind: str, folder: str, callbacks: list[Any], **settings: Any) -> tuple[Any, Any]:
    model = model_of(flavour)
    arguments = {"epochs": 3, "verbose": 0, "callbacks": callbacks, **data_of(kind), **settings}
    history = sparsekit.retrain(model, checkpoint_dir=folder, checkpoint_every=3, **arguments)
    return model, history


def stopper(flavour: str, after: int, stop: Any) -> Any:
    """A callback that calls `stop` after so many batches."""

    class Stopper(get(flavour).keras.callbacks.Callback):
        seen = 0

        def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
            self.seen += 1
            if self.seen == after:
                stop()

    return Stopper()


def end() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    tf.config.experimental.enable_op_determinism()
    flavour, masks, folder, out, kill = sys.argv[1:]
    settings = (
        {"schedule": Polynomial(0.9, initial_sparsity=0.5, end_step=15, frequency=2)} if masks == "dynamic" else {}
    )
    after = -1 if kill.startswith("w") else int(kill)
    if kill.startswith("w"):
        flush, left = os.fsync, [2 * int(kill[1:])]

        def killed(handle: int) -> None:
            # Twice for each: for the file and for its folder.
            left[0] -= 1
            if left[0] == 1:
                end()
            flush(handle)

        os.fsync = killed
    model, history = train(flavour, "arrays", folder, [stopper(flavour, after, end)], **settings)
    np.savez(out, *model.get_weights(), loss=history.history["loss"], accuracy=history.history["accuracy"])
