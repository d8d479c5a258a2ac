"""Retrain a pruned model in a loop of one's own, with masks that stay (static) or grow (dynamic), in either Keras.

python examples/own_loop.py            # Keras 3
python examples/own_loop.py tf_keras
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import numpy as np
import tensorflow as tf

import sparsekit


def data(size: int = 512) -> tf.data.Dataset:
    """Points labelled by which of three fixed random directions they lie along most."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(size, 20)).astype("float32")
    y = (x @ rng.normal(size=(20, 3))).argmax(axis=1)
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(64)


def trained(keras: Any, batches: tf.data.Dataset) -> Any:
    """A small dense model."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.layers.Input((20,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(3, "softmax")]
    )
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    model.fit(batches, epochs=5, shuffle=False, verbose=0)
    return model


def own_tape(keras: Any, model: Any, batches: tf.data.Dataset, masks: str, epochs: int = 3) -> None:
    """The usual GradientTape loop. One line of it is sparsekit's: `masked`."""
    optimizer = sparsekit.masked(keras.optimizers.Adam(1e-3), model, masks=masks)
    loss_of = keras.losses.SparseCategoricalCrossentropy()

    @tf.function
    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    for _ in range(epochs):
        for x, y in batches:
            step(x, y)


def compiled_step(model: Any, batches: tf.data.Dataset, masks: str, epochs: int = 3) -> None:
    """The same with the model's own loss, metrics and optimizer: `train_step` does all of it."""
    step = sparsekit.train_step(model, masks=masks)
    for _ in range(epochs):
        model.reset_metrics()
        for x, y in batches:
            step(x, y)


def main(flavour: str = "keras") -> None:
    keras = importlib.import_module(flavour)
    batches = data()
    for masks in ("static", "dynamic"):
        for name in ("own tape", "train_step"):
            model = sparsekit.prune(trained(keras, batches), 0.9)
            pruned = model.evaluate(batches, verbose=0)[1]
            if name == "own tape":
                own_tape(keras, model, batches, masks)
            else:
                compiled_step(model, batches, masks)
            accuracy = model.evaluate(batches, verbose=0)[1]
            found = sparsekit.report(model)
            print(
                f"{flavour:8} {masks:7} {name:10}  accuracy {pruned:.3f} -> {accuracy:.3f}  "
                f"sparsity {found.sparsity:.3f}  zeros lost {found.violations}"
            )


if __name__ == "__main__":
    main(*sys.argv[1:])
