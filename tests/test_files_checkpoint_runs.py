"""A checkpoint folder takes up its own run, says so, and refuses every other one."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from models import KERAS, both

import sparsekit
from sparsekit.errors import FileError
from sparsekit.files.checkpoint import STATE
from sparsekit.schedules import Linear

X = np.random.default_rng(0).normal(size=(40, 6)).astype("float32")
Y = np.random.default_rng(1).integers(0, 3, 40)
OTHER = X.copy()
OTHER[17, 3] += 1


class StoppedError(Exception):
    """What ends a run in these tests."""


def model_of(flavour="keras", *, seed=1, sparsity=0.5, **optimizer):
    k = KERAS[flavour]
    k.utils.set_random_seed(seed)
    model = k.Sequential([k.layers.Input((6,)), k.layers.Dense(8, activation="relu"), k.layers.Dense(3)])
    settings = {"learning_rate": 0.01, **optimizer}
    model.compile(k.optimizers.Adam(**settings), k.losses.SparseCategoricalCrossentropy(from_logits=True))
    return sparsekit.prune(model, sparsity) if sparsity else model


def train(model, folder, **arguments):
    return sparsekit.retrain(
        model, **{"data": (X, Y), "epochs": 2, "batch_size": 8, "verbose": 0, "checkpoint_dir": folder} | arguments
    )


def copies(model):
    return [weight.copy() for weight in model.get_weights()]


def same(model, weights):
    return all(np.array_equal(a, b) for a, b in zip(model.get_weights(), weights, strict=True))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A finished run of two epochs."""
    place = tmp_path_factory.mktemp("run")
    assert train(model_of(), place).resumed_from is None
    return place


OTHERS = {
    "sparsity": ({"sparsity": 0.75}, {}, "is of another run, which differs in the weights and the masks; give another"),
    "weights": ({"seed": 2}, {}, "is of another run, which differs in the weights and the masks; give another"),
    "x": ({}, {"data": (OTHER, Y)}, "is of another run, which differs in the array x; give another"),
    "y": ({}, {"data": (X, Y[::-1])}, "is of another run, which differs in the array y; give another"),
    "sample weight": (
        {},
        {"sample_weight": np.ones(40)},
        "is of another run, which differs in the array sample_weight; give another",
    ),
    "rate": (
        {"learning_rate": 0.1},
        {},
        "is of another run, which differs in the optimizer's learning_rate; give another",
    ),
    "optimizer": (
        {},
        {"optimizer": "sgd"},
        "differs in the optimizer; give another folder, or delete this one to begin anew",
    ),
    "loss": ({}, {"loss": "mse"}, r"belongs to a call with loss=\{'class': 'Sparse.*, this one has 'mse'"),
    "class weight": ({}, {"class_weight": {0: 2.0, 1: 1.0, 2: 1.0}}, "with class_weight=None, this one has"),
    "seed": ({}, {"seed": 3}, "belongs to a call with seed=0, this one has 3"),
    "enforce": ({}, {"enforce": "constraint"}, "with enforce='gradient', this one has 'constraint'"),
    "masks": ({}, {"masks": "dynamic"}, "with masks='static', this one has 'dynamic'"),
    "schedule": ({}, {"schedule": Linear(0.6, end_step=4)}, "with masks='static', this one has 'dynamic'"),
    "epochs": ({}, {"epochs": 1}, "has 2 epochs behind it or begun, more than epochs=1; give at least that many"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_another_run_is_refused_and_nothing_changes(case, folder):
    of_model, of_call, sentence = OTHERS[case]
    model = model_of(**of_model)
    before, state, drawn = copies(model), (folder / STATE).read_bytes(), np.random.get_state()[1].tolist()
    with pytest.raises(FileError, match=sentence):
        train(model, folder, **{"epochs": 3, **of_call})
    assert same(model, before)
    assert (folder / STATE).read_bytes() == state
    assert np.random.get_state()[1].tolist() == drawn


def test_another_schedule_is_refused(tmp_path):
    train(model_of(sparsity=0), tmp_path, schedule=Linear(0.6, end_step=4))
    with pytest.raises(FileError, match=r"with schedule='Linear\(final_sparsity=0.6.*this one has 'Linear\(final_spar"):
        train(model_of(sparsity=0), tmp_path, schedule=Linear(0.5, end_step=4))
    assert train(model_of(sparsity=0), tmp_path, schedule=Linear(0.6, end_step=4), epochs=3).resumed_from == (2, 0)


@both
def test_a_second_call_with_more_epochs_goes_on_and_says_so(flavour, tmp_path, capsys, caplog):
    k = KERAS[flavour]
    # What the caller has in the end is an average, and the learning rate has moved: neither is as saved or as begun.
    model = model_of(flavour, use_ema=True)
    callbacks = [k.callbacks.LearningRateScheduler(lambda epoch: 0.01 / (epoch + 1))]
    train(model, tmp_path, callbacks=callbacks)
    averaged = copies(model)
    assert train(model, tmp_path, callbacks=callbacks).resumed_from == (2, 0)
    assert same(model, averaged)
    capsys.readouterr()
    with caplog.at_level(logging.INFO, logger="sparsekit"):
        history = train(model, tmp_path, epochs=3, callbacks=callbacks, verbose=2)
    said = f"resumed from epoch 2 (batch 0) of the run in '{tmp_path}'"
    assert said in caplog.text
    assert said in capsys.readouterr().out
    assert (history.resumed_from, history.epoch) == ((2, 0), [0, 1, 2])


@pytest.mark.parametrize("engine", ["dense", "sparse"])
def test_a_model_that_was_interrupted_goes_on(engine, tmp_path):
    keras = KERAS["keras"]

    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 3:
                raise StoppedError

    model = model_of()
    arguments = {"checkpoint_every": 2, "engine": engine}
    with pytest.raises(StoppedError):
        train(model, tmp_path, callbacks=[Stop()], **arguments)
    # The last batch was not saved.
    assert train(model, tmp_path, callbacks=[keras.callbacks.Callback()], **arguments).resumed_from == (0, 2)
    with pytest.raises(FileError, match="the weights and the masks"):
        train(sparsekit.prune(model, 0.9), tmp_path, callbacks=[keras.callbacks.Callback()], **arguments)
