"""Whatever a callback writes, reads or restores during `retrain`, it sees the exact zeros."""

from __future__ import annotations

import json
import zipfile

import h5py
import numpy as np
import pytest
from models import KERAS, X, Y, assert_held, both, mlp, retrain_watched, values, warmed

import sparsekit
from sparsekit.errors import SparsekitWarning

ENDINGS = ("h5", "keras", "weights.h5")


def zeros_in(kernels: list[np.ndarray]) -> list[int]:
    return [int(np.count_nonzero(k == 0)) for k in kernels]


def kernels(model) -> list[np.ndarray]:
    return [value for path, value in values(model).items() if path.endswith("kernel")]


@pytest.mark.parametrize("enforce", ["gradient", "constraint"])
@both
def test_every_checkpoint_is_sparse(flavour: str, enforce: str, tmp_path) -> None:
    """First or last in the list, each epoch or each second batch, every kind of file."""
    k = KERAS[flavour]
    model = sparsekit.prune(warmed(mlp(flavour)), 0.75)
    expected = zeros_in(kernels(model))
    assert expected == [36, 12]

    def checkpoint(name: str, ending: str, **arguments):
        path = tmp_path / (name + "-{epoch}." + ending)
        return k.callbacks.ModelCheckpoint(str(path), save_weights_only=ending == "weights.h5", **arguments)

    first = [checkpoint("first", e) for e in ENDINGS]
    last = [checkpoint("last", e, save_freq=2) for e in ENDINGS]
    sparsekit.retrain(model, (X, Y), epochs=2, batch_size=16, verbose=0, enforce=enforce, callbacks=[*first, *last])
    files = sorted(tmp_path.iterdir())
    assert len(files) == 12
    for file in files:
        fresh = mlp(flavour, optimizer=False)
        if file.name.endswith("weights.h5"):
            fresh.load_weights(file)
        else:
            fresh = k.models.load_model(file, compile=False)
        assert zeros_in(kernels(fresh)) == expected, file.name


@both
def test_a_saved_model_knows_nothing_of_sparsekit(flavour: str, tmp_path) -> None:
    model = sparsekit.prune(warmed(mlp(flavour)), 0.5)
    variables = len(values(model))
    sparsekit.retrain(model, (X, Y), verbose=0, enforce="constraint")
    model.save(tmp_path / "m.h5")
    model.save(tmp_path / "m.keras")
    with h5py.File(tmp_path / "m.h5") as file:
        config = file.attrs["model_config"] + file.attrs["training_config"]
        assert "sparsekit" not in config
        assert "Constraint" not in config
    with zipfile.ZipFile(tmp_path / "m.keras") as file:
        config = json.dumps(json.loads(file.read("config.json")))
        assert "sparsekit" not in config
        assert "Constraint" not in config
    for name in ("m.h5", "m.keras"):
        loaded = KERAS[flavour].models.load_model(tmp_path / name, compile=False)
        assert len(values(loaded)) == variables
        np.testing.assert_allclose(loaded.predict(X, verbose=0), model.predict(X, verbose=0), atol=1e-6)


@both
def test_early_stopping_that_restores_dense_weights(flavour: str) -> None:
    """The best epoch was before the prune: the callback is warned of and undone."""
    k = KERAS[flavour]
    model = warmed(mlp(flavour), 1)
    dense = model.get_weights()
    sparsekit.prune(model, 0.5)

    class RestoreDense(k.callbacks.EarlyStopping):
        def on_train_begin(self, logs=None):
            super().on_train_begin(logs)
            self.best, self.best_weights, self.best_epoch = -1.0, dense, 0

    stopper = RestoreDense(monitor="loss", mode="min", restore_best_weights=True, patience=1)
    masks = sparsekit.masks_of(model)
    with pytest.warns(SparsekitWarning, match=r"32 pruned weights were not zero when fit returned .* zero again"):
        sparsekit.retrain(model, (X, Y), epochs=3, verbose=0, callbacks=[stopper])
    assert_held(model, masks)
    assert any((new == old).mean() == 0.5 for new, old in zip(model.get_weights(), dense, strict=True))


@both
def test_early_stopping_within_the_run_is_silent(flavour: str) -> None:
    k = KERAS[flavour]
    model = sparsekit.prune(warmed(mlp(flavour)), 0.5)
    stopper = k.callbacks.EarlyStopping(monitor="loss", mode="max", restore_best_weights=True, patience=1)
    history = retrain_watched(model, (X, Y), (stopper,), epochs=5)
    assert len(history.history["loss"]) < 5


@both
def test_backup_and_restore_resumes_sparse(flavour: str, tmp_path) -> None:
    k = KERAS[flavour]

    class Boom(k.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                raise RuntimeError("power cut")

    model = sparsekit.prune(warmed(mlp(flavour)), 0.5)
    masks = sparsekit.masks_of(model)
    backup = k.callbacks.BackupAndRestore(str(tmp_path / "backup"))
    with pytest.raises(RuntimeError, match="power cut"):
        sparsekit.retrain(model, (X, Y), epochs=4, verbose=0, callbacks=[backup, Boom()])
    at_crash = values(model)
    again = mlp(flavour)
    sparsekit.freeze(again, dict(zip(sparsekit_paths(again), masks.values(), strict=True)))
    backup = k.callbacks.BackupAndRestore(str(tmp_path / "backup"))
    seen: list[dict] = []
    watch = k.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: seen.append(values(again)))
    history = sparsekit.retrain(again, (X, Y), epochs=4, verbose=0, callbacks=[backup, watch])
    assert history.epoch == [2, 3]
    for resumed, crashed in zip(seen[0].values(), at_crash.values(), strict=True):
        np.testing.assert_array_equal(resumed, crashed)
    assert_held(again, sparsekit.masks_of(again))


def sparsekit_paths(model) -> list[str]:
    return [path for path in values(model) if path.endswith("kernel")]


def test_swap_ema_weights(tmp_path) -> None:
    """Keras 3 evaluates and saves the averages instead of the weights: they are sparse too."""
    k = KERAS["keras"]
    model = warmed(mlp("keras", k.optimizers.Adam(0.01, use_ema=True, ema_momentum=0.9)))
    sparsekit.prune(model, 0.75)
    swap = k.callbacks.SwapEMAWeights(swap_on_epoch=True)
    checkpoint = k.callbacks.ModelCheckpoint(str(tmp_path / "{epoch}.keras"))
    retrain_watched(model, (X, Y), (swap, checkpoint), epochs=2, batch_size=16)
    for file in tmp_path.iterdir():
        assert zeros_in(kernels(k.models.load_model(file))) == [36, 12]


@both
def test_learning_rate_scheduler_reaches_the_optimizer(flavour: str) -> None:
    k = KERAS[flavour]
    model = sparsekit.prune(warmed(mlp(flavour, k.optimizers.SGD(0.1))), 0.5)
    still = k.callbacks.LearningRateScheduler(lambda epoch: 0.1 if epoch == 0 else 0.0)
    seen: list[dict] = []
    snap = k.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(values(model)))
    retrain_watched(model, (X, Y), (still, snap), epochs=3)
    for path, value in seen[0].items():
        np.testing.assert_array_equal(value, seen[2][path])


@both
def test_load_weights_of_a_checkpoint(flavour: str, tmp_path) -> None:
    """The masks stay with the model, also when dense weights are loaded into it."""
    model = warmed(mlp(flavour))
    model.save_weights(tmp_path / "dense.weights.h5")
    sparsekit.prune(model, 0.5)
    retrain_watched(model, (X, Y))
    model.load_weights(tmp_path / "dense.weights.h5")
    assert sparsekit.report(model).violations == 32
    retrain_watched(model, (X, Y))


@pytest.mark.parametrize(("enforce", "kind"), [("gradient", RuntimeError), ("constraint", KeyboardInterrupt)])
@both
def test_interrupted_fit_leaves_masks_held_and_nothing_patched(flavour: str, enforce: str, kind: type) -> None:
    k = KERAS[flavour]

    class Own(k.Model):
        def train_step(self, data):
            return super().train_step(data)

    inputs = k.layers.Input((6,))
    model = Own(inputs, k.layers.Dense(2)(k.layers.Dense(8)(inputs)))
    model.compile(k.optimizers.Adam(0.01, use_ema=True), "mse")
    sparsekit.prune(warmed(model), 0.5)
    attributes = {name: dict(vars(obj)) for name, obj in (("model", model), ("optimizer", model.optimizer))}

    class Stop(k.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 1:
                model.layers[1].kernel.assign(np.ones((6, 8)))
                raise kind("stop")

    masks = sparsekit.masks_of(model)
    with pytest.raises(kind, match="stop"):
        sparsekit.retrain(model, (X, Y), batch_size=16, verbose=0, enforce=enforce, callbacks=[Stop()])
    assert_held(model, masks)
    for name, obj in (("model", model), ("optimizer", model.optimizer)):
        assert set(vars(obj)) == set(attributes[name])
        for method in ("train_step", "apply", "apply_gradients"):
            assert method not in vars(obj)
    assert all(variable.constraint is None for variable in model.trainable_variables)


@both
def test_sparsity_is_logged_where_masks_change(flavour: str, tmp_path) -> None:
    k = KERAS[flavour]
    model = sparsekit.prune(warmed(mlp(flavour)), 0.5)
    logger = k.callbacks.CSVLogger(str(tmp_path / "log.csv"))
    history = retrain_watched(model, (X, Y), (logger,), masks="dynamic", epochs=2)
    assert history.history["sparsity"] == [0.5, 0.5]
    assert "sparsity" in (tmp_path / "log.csv").read_text().splitlines()[0].split(",")


@both
def test_no_callbacks(flavour: str) -> None:
    model = sparsekit.prune(mlp(flavour), 0.5)
    sparsekit.retrain(model, (X, Y), callbacks=None, verbose=0)
    assert_held(model, sparsekit.masks_of(model))
