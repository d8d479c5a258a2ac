"""Files that cannot be opened: one sentence that says why, and what to do."""

from __future__ import annotations

import json
import os
import zipfile

import h5py
import keras
import numpy as np
import pytest
import tf_keras
from legacy_models import CONVERTED, L, filled, write
from models import KERAS, both, mlp

import sparsekit
from sparsekit.errors import ArgumentError, FileError, SparsekitWarning
from sparsekit.files import inspect_file


def rewritten(path, change):
    """Change the config in an .h5."""
    with h5py.File(path, "r+") as file:
        config = json.loads(file.attrs["model_config"])
        change(config)
        file.attrs["model_config"] = json.dumps(config)
    return path


def saved(tmp_path, flavour="keras", name="model.h5"):
    """A file that its Keras wrote; a sparse one is ours."""
    model = mlp(flavour)
    (sparsekit.save if name.endswith(".sparse.h5") else type(model).save)(model, tmp_path / name)
    return tmp_path / name


def refused(path, match, **arguments):
    """Neither load nor inspect shows a stack trace of h5py, and inspect gives the same reason."""
    with pytest.raises(FileError, match=match) as caught:
        sparsekit.load(path, **arguments)
    assert len(str(caught.value).strip().splitlines()) == 1
    return str(caught.value)


def test_no_such_file(tmp_path):
    refused(tmp_path / "none.h5", "There is no file")
    with pytest.raises(FileError, match="There is no file"):
        inspect_file(tmp_path / "none.h5")


def test_an_unknown_flavour_is_named(tmp_path):
    with pytest.raises(ArgumentError, match=r"give 'keras' .* or 'tf_keras'"):
        sparsekit.load(saved(tmp_path), flavour="torch")


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "is empty"),
        (b"hello, I am no model at all", "neither an HDF5 nor a .keras file"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
        (b"PK\x03\x04 and no more", "damaged .keras file"),
        (b"\x89HDF\r\n\x1a\n and no more", "damaged HDF5 file"),
    ],
)
def test_files_that_are_something_else(content, match, tmp_path):
    path = tmp_path / "model.h5"
    path.write_bytes(content)
    refused(path, match)
    assert inspect_file(path).problem is not None


def test_a_folder(tmp_path):
    refused(tmp_path, "is a folder .*SavedModel")


@pytest.mark.parametrize("ending", [".h5", ".sparse.h5", ".keras"])
def test_a_cut_off_file(ending, tmp_path):
    path = saved(tmp_path, name=f"model{ending}")
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    refused(path, "damaged")
    assert "damaged" in (inspect_file(path).problem or "")


@both
def test_weights_only_open_with_a_model_or_a_builder(flavour, tmp_path):
    model = mlp(flavour)
    path = tmp_path / "weights.h5"
    with h5py.File(path, "w") as file, h5py.File(saved(tmp_path, flavour), "r") as whole:
        for name, value in whole["model_weights"].attrs.items():
            file.attrs[name] = value
        for name in whole["model_weights"]:
            whole.copy(f"model_weights/{name}", file)
    message = refused(path, "holds weights only")
    assert "model=build" in message
    for given in (mlp(flavour), lambda: mlp(flavour)):
        loaded = sparsekit.load(path, model=given)
        assert [w.tobytes() for w in loaded.get_weights()] == [w.tobytes() for w in model.get_weights()]
    k = KERAS[flavour]
    other = k.Sequential([k.layers.Input((6,)), k.layers.Dense(9), k.layers.Dense(2)])
    before = [w.copy() for w in other.get_weights()]
    with pytest.raises(FileError, match=r"shape \(6, 8\), but '.*/kernel' of the model has \(6, 9\)"):
        sparsekit.load(path, model=other)
    assert all(np.array_equal(a, b) for a, b in zip(other.get_weights(), before, strict=True))


def test_weights_of_keras_3_open_with_a_model(tmp_path):
    model = mlp("keras")
    model.save_weights(tmp_path / "model.weights.h5")
    refused(tmp_path / "model.weights.h5", "holds weights only")
    other = keras.models.clone_model(model)
    loaded = sparsekit.load(tmp_path / "model.weights.h5", model=other)
    assert [w.tobytes() for w in loaded.get_weights()] == [w.tobytes() for w in model.get_weights()]


@both
@pytest.mark.parametrize("ending", [".h5", ".keras"])
def test_unknown_layers_are_named_with_the_argument_to_give(flavour, ending, tmp_path):
    k = KERAS[flavour]

    class Twice(k.layers.Layer):
        def call(self, x):
            return 2 * x

    model = k.Sequential([k.layers.Input((4,)), k.layers.Dense(3), Twice()])
    path = tmp_path / f"model{ending}"
    sparsekit.save(model, path)
    refused(path, r"layer 'Twice' of your own.*custom_objects=\{'Twice': Twice\}")
    loaded = sparsekit.load(path, custom_objects={"Twice": Twice})
    assert isinstance(loaded, k.Model)
    x = np.ones((2, 4), "float32")
    np.testing.assert_array_equal(np.asarray(loaded(x)), np.asarray(model(x)))


def test_an_activation_without_code_is_named(tmp_path):
    path = write(filled(CONVERTED["Dense"]), tmp_path / "old.h5")
    rewritten(path, lambda c: c["config"]["layers"][1]["config"].update(activation="<lambda>"))
    refused(path, r"activation '<lambda>' of your own.*custom_objects=\{'<lambda>': ")


def test_code_in_a_file_runs_only_if_asked(tmp_path):
    path = write(tf_keras.Sequential([L.Dense(2, input_shape=(3,)), L.Lambda(lambda x: x * 2)]), tmp_path / "old.h5")
    message = refused(path, "Python code .Lambda layer 'lambda")
    assert "safe=False" in message
    assert "Lambda" in (inspect_file(path).problem or "")
    assert np.asarray(sparsekit.load(path, safe=False)(np.ones((1, 3), "float32"))).shape == (1, 2)


@pytest.mark.parametrize(
    "entry",
    [
        {"class_name": "__lambda__", "config": {"value": "4wAAAA=="}},
        {"class_name": "Lambda", "config": {"name": "x", "function": ["4wAAAA==", None, None]}},
        {"class_name": "TFOpLambda", "config": {"name": "x", "function": "io.write_file"}},
        {"class_name": "TFOpLambda", "config": {"name": "x", "function": "py_function"}},
        {"class_name": "TFOpLambda", "config": {"name": "x", "function": "raw_ops.WriteFile"}},
        {"class_name": "ClassMethod", "config": {"name": "x", "cls_symbol": "io.gfile.GFile", "method_name": "write"}},
        {"class_name": "system", "module": "os", "config": {"command": "touch ran"}},
        {"class_name": "get_file", "module": "keras.utils", "config": {"origin": "file:///etc/passwd"}},
        {"class_name": "function", "module": "os", "config": "system", "registered_name": "system"},
    ],
)
def test_hostile_configs_are_refused_before_anything_is_built(entry, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = saved(tmp_path)
    rewritten(path, lambda c: c["config"]["layers"].append(entry))
    refused(path, "safe=False|of your own")
    assert sorted(os.listdir(tmp_path)) == ["model.h5"]


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c["config"]["layers"][1]["config"].update(units=10**11),
        lambda c: c["config"]["layers"][1]["config"].update(units=-3),
        lambda c: c["config"]["layers"][1]["config"].update(units=[[]]),
        lambda c: c["config"]["layers"][1].update(config=None),
        lambda c: c["config"].update(layers=None),
        lambda c: c["config"].update(layers=[1, "two", None]),
        lambda c: c.update(config=3),
        lambda c: c.update(class_name=None),
        lambda c: c.clear(),
    ],
)
@both
def test_nonsense_in_a_config_is_no_crash(change, flavour, tmp_path):
    path = rewritten(saved(tmp_path, flavour), change)
    with pytest.raises(FileError):
        sparsekit.load(path)
    assert inspect_file(path).raw_bytes == path.stat().st_size


def test_a_deeply_nested_config_is_no_crash(tmp_path):
    path = saved(tmp_path)
    with h5py.File(path, "r+") as file:
        file.attrs["model_config"] = '{"class_name": "Sequential", "config": ' + "[" * 20_000 + "]" * 20_000 + "}"
    refused(path, "damaged")


def test_arrays_outside_of_the_file_or_larger_than_it_are_refused(tmp_path):
    secret = tmp_path / "secret"
    secret.write_bytes(b"\0" * 192)
    for make, match in (
        (lambda g: g.create_dataset("kernel", (6, 8), "f4", external=[(os.fspath(secret), 0, 192)]), "in another file"),
        (lambda g: g.create_dataset("kernel", (10**9, 8), "f4", chunks=(10**6, 8)), "more bytes than there are"),
        (lambda g: g.__setitem__("kernel", h5py.ExternalLink(os.fspath(secret), "/")), "links .* not followed"),
        (lambda g: g.__setitem__("kernel", h5py.SoftLink("/nowhere")), "links .* not followed"),
        (lambda g: g.create_dataset("kernel", data=np.array(["a"], dtype=h5py.string_dtype())), "is no number"),
    ):
        path = saved(tmp_path)
        with h5py.File(path, "r+") as file:
            kernels = []
            file["model_weights"].visititems(
                lambda name, item, found=kernels: found.append(item) if name.endswith("kernel") else None
            )
            group = kernels[0].parent
            del group["kernel"]
            make(group)
        refused(path, match)


def test_a_future_version_is_named(tmp_path):
    path = saved(tmp_path)
    with h5py.File(path, "r+") as file:
        file.attrs["keras_version"] = "7.1.0"
    refused(path, "written by Keras 7.1.0")


def test_a_bomb_of_a_zip_is_refused(tmp_path):
    path = saved(tmp_path, name="model.keras")
    with zipfile.ZipFile(tmp_path / "bomb.keras", "w", zipfile.ZIP_DEFLATED) as archive:
        with zipfile.ZipFile(path) as good:
            archive.writestr("metadata.json", good.read("metadata.json"))
            archive.writestr("config.json", good.read("config.json"))
        archive.writestr("model.weights.h5", b"\0" * 50_000_000)
    refused(tmp_path / "bomb.keras", "damaged")


def test_inspect_tells_what_a_file_holds(tmp_path):
    model = mlp("keras", metrics=["mae"])
    sparsekit.prune(model, 0.75)
    for ending in (".h5", ".sparse.h5", ".keras"):
        sparsekit.save(model, tmp_path / f"model{ending}")
        found = inspect_file(tmp_path / f"model{ending}")
        assert (found.format, found.keras_version) == (ending[1:], keras.__version__)
        assert found.problem is None
        assert [kind for _, kind in found.layers] == ["InputLayer", "Dense", "Dense"]
        assert found.parameters == 6 * 8 + 8 + 8 * 2 + 2
        assert found.sparsity == 0.75
        assert (found.optimizer, found.masked) == ("Adam", 2)
        assert found.loss in ("mse", "mean_squared_error")
        assert 0 < (found.sparse_bytes or 0) < (found.gzip_bytes or 0) + 4096


def test_inspect_lists_the_repairs(tmp_path):
    found = inspect_file(write(filled(CONVERTED["LSTM"]), tmp_path / "old.h5"))
    assert {("time_major", "lstm"), ("time_major", "lstm_1")} <= {(one.name, one.layer) for one in found.repairs}
    assert found.problem is None


@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning")
@both
@pytest.mark.parametrize("name", ["own.h5", "own.sparse.h5"])
def test_a_model_class_of_ones_own_is_opened_with_model_and_every_sentence_says_so(flavour, name, tmp_path):
    k = KERAS[flavour]

    class Own(k.Model):
        def __init__(self, **arguments):
            super().__init__(**arguments)
            self.dense = k.layers.Dense(3)

        def call(self, inputs):
            return self.dense(inputs)

    def build():
        model = Own()
        model(np.ones((1, 4), "float32"))
        return model

    model = sparsekit.prune(build(), 0.5)
    with pytest.warns(SparsekitWarning, match=rf"'Own' is a model class of your own.*'{name}' .*load\(path, model=bui"):
        sparsekit.save(model, tmp_path / name)
    for custom_objects, sentence in (
        (None, r"pass it: .*custom_objects=\{'Own': Own\}\), or a function .*load\(path, model=build\)\.$"),
        ({"Own": Own}, r"has 0 layers with weights; give the model .*load\(path, model=build\)\.$"),
    ):
        with pytest.raises(FileError, match=sentence):
            sparsekit.load(tmp_path / name, custom_objects=custom_objects)
    loaded = sparsekit.load(tmp_path / name, model=build)
    assert sparsekit.masks_of(loaded).sparsity == 0.5
    # Keras rebuilds it from a .keras file, so that there is nothing to say.
    sparsekit.save(model, tmp_path / "own.keras")
    graph = k.Model(inputs := k.layers.Input((4,)), k.layers.Dense(3)(inputs))
    sparsekit.save(graph, tmp_path / "graph.h5")
