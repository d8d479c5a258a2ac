"""Hostile content in files that are whole: an error of ours or a model that works; no code, no other file is read."""

from __future__ import annotations

import json
import os
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hostile import MODULE, SCHEDULE, SECRET, SIGN, hostile, names_of
from models import KERAS, both, mlp
from survival import NAMES, assert_one_sentence, in_a_process_of_its_own, survives, written

import sparsekit
from sparsekit.errors import FileError, SparsekitError, SparsekitWarning
from sparsekit.files import inspect_file
from sparsekit.files.compiling import compile_as_stored
from sparsekit.files.equivalence import sample_inputs
from sparsekit.files.fingerprint import of_settings
from sparsekit.files.settings import known_optimizer
from sparsekit.files.stored import StoredModel
from sparsekit.flavour import flavour_of


def judge(broken: Path, model: Any, _what: str) -> None:
    """What holds for a file that is looked into, and for the model that comes of it."""
    if model is not None:
        arrays = [np.asarray(array) for array in model.get_weights()]
        if getattr(model, "optimizer", None) is not None:
            arrays += [np.asarray(v) for v in flavour_of(model).optimizer_variables(model.optimizer)]
        assert not any(np.any(array == SECRET) for array in arrays if array.dtype.kind == "f"), "Another file was read."
        trains(model)
    try:
        info = inspect_file(broken)
    except SparsekitError as error:
        assert_one_sentence(error)
    else:
        assert info.raw_bytes == broken.stat().st_size
    assert SIGN not in os.environ, "Code was run."
    assert MODULE not in sys.modules, "A module was imported."


def trains(model: Any) -> None:
    """One step of fit works."""
    fed = sample_inputs(model, free=6, batch=4)
    x = next(iter(fed.values())) if len(fed) == 1 else fed
    model.run_eagerly = True
    model.predict(x, verbose=0)
    if getattr(model, "optimizer", None) is not None:
        try:
            model.fit(x, np.zeros((4, *model.outputs[0].shape[1:])), batch_size=4, verbose=0)
        except ValueError as error:
            # As a model compiled without a loss does; a file may say so.
            if not str(error).startswith("No loss"):
                raise


@pytest.mark.parametrize("name", NAMES)
def test_hostile_files(name, tmp_path):
    assert survives(written("keras", name, tmp_path), range(8), hostile, judge) > 0


def refused(path: Path, message: str) -> None:
    with pytest.raises(FileError, match=message) as caught:
        sparsekit.load(path)
    assert_one_sentence(caught.value)


def changed_json(path: Path, attribute: str, change: Callable[[dict[str, Any]], Any]) -> Path:
    """Change a config of a file, an .h5 by plain Keras or a .keras, in place."""
    if path.suffix == ".keras":
        with zipfile.ZipFile(path) as archive:
            members = {name: archive.read(name) for name in archive.namelist()}
        config = json.loads(members["config.json"])
        change(config["compile_config"] if attribute == "training_config" else config)
        members["config.json"] = json.dumps(config).encode()
        with zipfile.ZipFile(path, "w") as archive:
            for name, content in members.items():
                archive.writestr(name, content)
        return path
    with h5py.File(path, "r+") as file:
        config = json.loads(file.attrs[attribute])
        file.attrs[attribute] = json.dumps(change(config) or config)
    return path


# What both write for Adam; settings that one of them does not know are left out.
SETTINGS = {name: mlp(name).optimizer.get_config() for name in KERAS}
SETTINGS["tf_keras"].update(loss_scale_factor=None, gradient_accumulation_steps=None)
HOSTILE_SETTINGS: list[dict[str, Any]] = [
    *({"clipnorm": "x"}, {"beta_1": "0.9"}, {"beta_2": [0.9, None]}, {"epsilon": 1e300}, {"amsgrad": "yes"}),
    *({"learning_rate": float("nan")}, {"learning_rate": [1, "a"]}, {"gradient_accumulation_steps": 2**63}),
    *({"loss_scale_factor": {}}, {"name": 3}, {"learning_rate": {"class_name": "Adam", "config": {}}}),
    {"learning_rate": {**SCHEDULE, "config": {**SCHEDULE["config"], "decay_steps": "x"}}},
]


@both
@pytest.mark.parametrize("settings", HOSTILE_SETTINGS, ids=lambda settings: str(settings)[:40])
def test_settings_of_an_optimizer_that_make_no_sense(flavour, settings, tmp_path):
    model = mlp(flavour)
    config = {"class_name": "Adam", "config": {**SETTINGS[flavour], **settings}}
    training = {"optimizer_config": config, "loss": "mse"}
    stored = StoredModel("h5", "", {}, training, [], [], [], [])
    (note,) = compile_as_stored(model, stored, flavour_of(model), None)
    assert "The settings of the optimizer 'Adam' in the file make no sense" in note
    trains(model)


@both
def test_every_optimizer_gets_its_own_settings_back(flavour):
    model = mlp(flavour)
    optimizers = KERAS[flavour].optimizers
    kinds = {
        kind
        for kind in vars(optimizers).values()
        if isinstance(kind, type) and issubclass(kind, optimizers.Optimizer) and kind is not optimizers.Optimizer
    }
    assert len(kinds) > 8
    schedule = optimizers.schedules.ExponentialDecay(0.1, 10, 0.5)
    # Those that hold other optimizers have no settings of their own.
    for kind in {kind for kind in kinds if kind.__name__ not in ("LossScaleOptimizer", "MultiOptimizer")}:
        for wanted in (kind(), kind(schedule, weight_decay=0.1, clipnorm=1.0, use_ema=True, name="mine")):
            config = {
                "class_name": kind.__name__,
                "config": flavour_of(model).keras.optimizers.serialize(wanted)["config"],
            }
            found = known_optimizer(json.loads(json.dumps(config)), flavour_of(model), {})
            assert of_settings(found) == of_settings(wanted)


@pytest.mark.parametrize("settings", [{"clipvalue": "x"}, {"learning_rate": float("inf")}])
@both
def test_a_keras_file_whose_optimizer_makes_no_sense_is_refused(flavour, settings, tmp_path):
    path = written(flavour, "model.keras", tmp_path)
    changed_json(path, "training_config", lambda c: c["optimizer"]["config"].update(settings))
    refused(path, f"cannot build the model in .*Adam has {next(iter(settings))}=")


@both
@pytest.mark.parametrize(
    ("change", "note"),
    [
        ({"optimizer_config": "adam"}, "The optimizer 'None' is not known"),
        ({"loss": False}, "The loss False is not known"),
        ({"loss": {"class_name": "Huber", "config": {"delta": "x"}}}, "The loss .* is not known"),
        ({"metrics": ["None"]}, "The metric 'None' is not known"),
        ({"metrics": True}, "does not take the training settings in the file"),
        ({"loss_weights": "x"}, "does not take the training settings in the file"),
    ],
)
def test_training_settings_that_make_no_sense_are_left_out(flavour, change, note, tmp_path):
    path = changed_json(written(flavour, "plain.h5", tmp_path), "training_config", lambda c: c.update(change))
    with pytest.warns(SparsekitWarning, match=note):
        sparsekit.load(path)


@both
@pytest.mark.parametrize("kind", ["external", "soft", "virtual", "outside"])
def test_no_other_file_is_read(flavour, kind, tmp_path):
    secret, path = tmp_path / "secret.h5", written(flavour, "model.keras", tmp_path)
    with h5py.File(secret, "w") as file:
        file["kernel"] = np.full((6, 8), SECRET, "float32")
    weights = tmp_path / "taken.weights.h5"
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    weights.write_bytes(members["model.weights.h5"])
    with h5py.File(weights, "r+") as file:
        name = next(name for name in names_of(file) if "optimizer" not in name and file[name].shape == (6, 8))
        del file[name]
        if kind == "virtual":
            layout = h5py.VirtualLayout((6, 8), "f4")
            layout[...] = h5py.VirtualSource(str(secret), "kernel", (6, 8))
            file.create_virtual_dataset(name, layout)
        elif kind == "outside":
            file.create_dataset(name, (6, 8), "f4", external=[(str(secret), 0, 192)])
        else:
            file[name] = h5py.ExternalLink(str(secret), "kernel") if kind == "external" else h5py.SoftLink("/x")
    with zipfile.ZipFile(path, "w") as archive:
        for one, content in {**members, "model.weights.h5": weights.read_bytes()}.items():
            archive.writestr(one, content)
    model = mlp(flavour)
    before = [w.copy() for w in model.get_weights()]
    for call in (lambda: sparsekit.load(path), lambda: sparsekit.load(weights, model=model)):
        with pytest.raises(FileError, match=r"which is not (followed|opened)"):
            call()
    assert all(np.array_equal(a, b) for a, b in zip(model.get_weights(), before, strict=True))


@pytest.mark.parametrize(
    ("attribute", "value", "message"),
    [
        ("model_config", '{"class_name": ' + "[" * 500 + "]" * 500 + "}", "nested too deeply"),
        ("model_config", '{"class_name": ' + "[" * 50_000 + "]" * 50_000 + "}", "no valid JSON|nested too deeply"),
        ("model_config", "[1]", "is no dictionary"),
        ("model_config", '{"class_name": "TFOpLambda", "config": [1]}', "calls tf.None"),
        ("model_config", '{"class_name": "ClassMethod", "config": [1]}', "calls a member"),
        ("model_config", '{"class_name": "Dense", "config": {"units": 3}}', "which is no model"),
        ("layer_names", [b"/"], "."),
        ("layer_names", [b""], "."),
        ("layer_names", [b"\x1b[2J\n" + b"n" * 5000], r"it lists '\\x1b\[2J\\nnnn"),
    ],
)
def test_hostile_attributes_of_an_h5(attribute, value, message, tmp_path):
    path = written("keras", "plain.h5", tmp_path)
    with h5py.File(path, "r+") as file:
        owner = file["model_weights"] if attribute == "layer_names" else file
        del owner.attrs[attribute]
        # More than 64 KiB fit into no attribute.
        owner.attrs.create(attribute, value[:60_000])
    refused(path, message)


@pytest.mark.parametrize("version", ["9" * 5000, "²", "2\n", "x.y"])
def test_a_version_that_is_none_does_not_matter(version, tmp_path):
    path = written("tf_keras", "plain.h5", tmp_path)
    with h5py.File(path, "r+") as file:
        for owner in (file, file["model_weights"]):
            owner.attrs["keras_version"] = version
    assert len(sparsekit.load(path).layers) == 2


@pytest.mark.parametrize("name", ["plain.h5", "model.keras"])
def test_a_regularizer_that_is_none_is_refused(name, tmp_path):
    path = written("tf_keras", name, tmp_path)
    changed_json(path, "model_config", lambda c: c["config"]["layers"][1]["config"].update(kernel_regularizer="None"))
    with pytest.raises(FileError, match=r"Layer 'dense.*' in .* has a kernel_regularizer that is none"):
        sparsekit.load(path, flavour="tf_keras")


@both
@pytest.mark.parametrize(
    "change",
    [
        {"steps_per_execution": "x"},
        {"optimizer": {"a": {}}},
        {"optimizer": {"class_name": "Adam", "config": {"beta_2": None}}},
    ],
)
def test_a_keras_file_that_cannot_train_is_refused(flavour, change, tmp_path):
    path = written(flavour, "model.keras", tmp_path)
    changed_json(path, "training_config", lambda c: c.update(change))
    refused(path, "cannot build the model in .* (has|is) ")


def test_a_keras_file_of_no_model_is_refused(tmp_path):
    path = written("tf_keras", "model.keras", tmp_path)
    changed_json(path, "model_config", lambda c: c.update(config_=c.pop("config")))
    refused(path, "cannot build the model|which is no model")


@both
def test_a_schedule_brings_no_module_along(flavour, tmp_path):
    path = written(flavour, "plain.h5", tmp_path)
    hostile_schedule = {**SCHEDULE, "module": MODULE, "registered_name": None}
    changed_json(
        path, "training_config", lambda c: c["optimizer_config"]["config"].update(learning_rate=hostile_schedule)
    )
    model = sparsekit.load(path)
    assert MODULE not in sys.modules
    assert model.optimizer.get_config()["learning_rate"]["config"]["decay_rate"] == 0.5


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("flavour", ["keras", "tf_keras"])
@pytest.mark.parametrize("name", NAMES)
def test_thousands_of_hostile_files(flavour, name, tmp_path):
    """In a process of its own: a crash there is a failure here."""
    written(flavour, name, tmp_path)
    code = "import pathlib, test_files_hostile as f; f.survives(pathlib.Path("
    in_a_process_of_its_own(f"{code}{str(tmp_path)!r}) / {name!r}, range(100, 400), f.hostile, f.judge)", 3000)
