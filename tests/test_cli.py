"""The command line on saved files: what it writes, what it refuses, and with which exit code."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path

import h5py
import keras
import numpy as np
import pytest
from models import KERAS, both

import sparsekit
from sparsekit import cli, commands, data
from sparsekit.data import Options
from sparsekit.errors import DataError
from sparsekit.flavour import get
from sparsekit.onednn import strided_pointwise

ROOT = Path(__file__).resolve().parent.parent
CLASSES = 3


def network(flavour: str = "keras", loss: str | None = "sparse_categorical_crossentropy", units: int = CLASSES):
    k = KERAS[flavour]
    k.utils.set_random_seed(0)
    model = k.Sequential(
        [
            k.layers.Input((8, 8, 1)),
            k.layers.Conv2D(4, 3, activation="relu", name="conv"),
            k.layers.Flatten(name="flat"),
            k.layers.Dense(units, activation="softmax", name="dense"),
        ]
    )
    if loss is not None:
        model.compile("adam", loss, metrics=["accuracy"])
    return model


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> Path:
    """A folder with a model (288 + 36 weights that can be pruned) and data for it."""
    monkeypatch.chdir(tmp_path)
    sparsekit.save(network(), "model.h5")
    rng = np.random.default_rng(0)
    np.savez("digits.npz", x=rng.random((40, 8, 8, 1), dtype=np.float32), y=rng.integers(0, CLASSES, 40))
    np.savez("wrong.npz", x=rng.random((40, 9, 9, 1), dtype=np.float32), y=rng.integers(0, CLASSES, 40))
    return tmp_path


SIZE = 3 * 3 * 1 * 4 + 6 * 6 * 4 * CLASSES


def zeros_of(model) -> int:
    return sum(int(np.sum(layer.kernel.numpy() == 0)) for layer in model.layers if hasattr(layer, "kernel"))


def write_weights_only(path: str) -> None:
    """What `save_weights` of Keras 2 writes."""
    with h5py.File(path, "w") as file:
        file.attrs["layer_names"] = [b"dense"]
        group = file.create_group("dense")
        group.attrs["weight_names"] = [b"dense/kernel:0"]
        group["dense/kernel:0"] = np.ones((2, 3), np.float32)


def run(line: str) -> int:
    return cli.main(line.split())


# --- what it does ---


@both
def test_prune_writes_a_plain_file_and_leaves_the_input_alone(flavour, capsys):
    sparsekit.save(network(flavour), "in.h5")
    before = hashlib.sha256(Path("in.h5").read_bytes()).digest()
    assert run(f"prune in.h5 out.h5 --sparsity 0.75 --flavour {flavour}") == cli.OK
    assert hashlib.sha256(Path("in.h5").read_bytes()).digest() == before

    model = KERAS[flavour].models.load_model("out.h5")
    assert zeros_of(model) == 0.75 * SIZE
    x, y = np.load("digits.npz")["x"], np.load("digits.npz")["y"]
    assert np.isfinite(model.fit(x, y, verbose=0).history["loss"]).all()
    out = capsys.readouterr().out
    assert "file after gzip, bytes" in out
    assert f"{model.count_params():,}" in out


@both
@pytest.mark.parametrize("options", ["", "--enforce constraint", "--masks dynamic"])
def test_prune_and_retrain(flavour, options, capsys):
    sparsekit.save(network(flavour), "in.h5")
    line = f"prune in.h5 out.h5 --sparsity 0.75 --flavour {flavour} --retrain digits.npz --epochs 2 --batch-size 8"
    assert run(f"{line} --validation 0.25 {options}") == cli.OK
    model = sparsekit.load("out.h5", flavour=flavour)
    report = sparsekit.report(model)
    assert (report.sparsity, report.violations) == (0.75, 0)
    kept = sparsekit.masks_of(model)
    moved = network(flavour).layers[-1].kernel.numpy() != model.layers[-1].kernel.numpy()
    dense_path = next(path for path in kept if "dense" in path)
    assert moved[kept[dense_path]].any()
    out = capsys.readouterr().out
    assert "30 samples of digits.npz to train on" in out
    assert "10 samples of digits.npz to validate with" in out
    assert "retrain, epoch 2 of 2" in out
    assert "validation accuracy" in out


def test_sparse_file_is_written_and_opened(capsys):
    assert run("prune model.h5 out.sparse.h5 --sparsity 0.75") == cli.OK
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("as .sparse.h5, bytes"))
    assert f"{Path('out.sparse.h5').stat().st_size:,}" in line
    assert run("inspect out.sparse.h5") == cli.OK
    assert zeros_of(sparsekit.load("out.sparse.h5")) == 0.75 * SIZE


def test_options_reach_prune(capsys):
    assert run("prune model.h5 out.h5 --sparsity 0.5 --include *conv/* --criterion random --seed 3") == cli.OK
    model = sparsekit.load("out.h5")
    expected = sparsekit.prune(network(), 0.5, include="*conv/*", criterion="random", seed=3)
    # The path of the kernel is part of a random choice, and the two models have different names.
    ((path, mask),) = sparsekit.masks_of(model).items()
    assert path.endswith("conv/kernel")
    assert mask.sum() == 18
    assert zeros_of(model) == zeros_of(expected) == 18


def test_report_and_pictures_are_written():
    assert run("prune model.h5 out.h5 --report weights.csv --plots pictures") == cli.OK
    assert Path("weights.csv").read_text().startswith("path,shape,size,target")
    assert {path.name for path in Path("pictures").iterdir()} == {
        "sparsity.png",
        "zeros_conv2d_kernel.png",
        "zeros_dense_kernel.png",
    }


@both
def test_retrain_reads_masks_from_zeros_of_a_foreign_file(flavour):
    model = network(flavour)
    kernel = model.layers[-1].kernel
    kernel.assign(np.where(np.arange(kernel.shape[0])[:, None] % 2, kernel.numpy(), 0.0))
    model.save("foreign.h5")
    assert run(f"retrain foreign.h5 out.h5 --data digits.npz --flavour {flavour}") == cli.OK
    after = KERAS[flavour].models.load_model("out.h5").layers[-1].kernel.numpy()
    assert not after[::2].any()
    assert (after[1::2] != kernel.numpy()[1::2]).any()


def test_training_settings_can_be_given():
    sparsekit.save(network(loss=None), "bare.h5")
    line = "prune bare.h5 out.h5 --retrain digits.npz --loss sparse_categorical_crossentropy --optimizer sgd"
    assert run(f"{line} --learning-rate 0.25 --metrics accuracy") == cli.OK
    optimizer = sparsekit.load("out.h5").optimizer
    assert (type(optimizer).__name__, float(optimizer.learning_rate)) == ("SGD", 0.25)


def test_data_from_a_function_of_the_current_folder(here, capsys):
    (here / "my_data_a.py").write_text(
        "import numpy as np, tensorflow as tf\n"
        "x, y = np.ones((12, 8, 8, 1), 'float32'), np.arange(12) % 3\n"
        "def arrays(): return x, y\n"
        "def batches(): return tf.data.Dataset.from_tensor_slices((x, y)).batch(4)\n"
        "def single(): return tf.data.Dataset.from_tensor_slices((x, y))\n"
        "def broken(): raise KeyError('no such table')\n"
    )
    assert run("prune model.h5 a.h5 --retrain my_data_a:arrays") == cli.OK
    assert run("prune model.h5 b.h5 --retrain my_data_a:batches --validation my_data_a:arrays") == cli.OK
    for name, message in (
        ("single", "batch the dataset first"),
        ("broken", "KeyError: 'no such table'"),
        ("absent", "it holds"),
    ):
        capsys.readouterr()
        assert run(f"prune model.h5 c.h5 --retrain my_data_a:{name}") == cli.BAD_DATA
        assert message in capsys.readouterr().err


def test_a_run_with_checkpoints_goes_on_with_the_same_command(here, capsys):
    line = "prune model.h5 out.h5 --sparsity 0.75 --retrain digits.npz --checkpoint-dir state --epochs"
    assert run(f"{line} 1") == cli.OK
    Path("out.h5").unlink()
    capsys.readouterr()
    assert run(f"{line} 2") == cli.OK
    out = capsys.readouterr().out
    assert "epoch 2 of 2" in out
    assert "epoch 1 of 2" not in out
    assert "resumed from epoch 1 (batch 0) of the run in state" in out
    assert run(f"{line} 1 --force") == cli.BAD_INPUT
    assert "has 2 epochs behind it or begun, more than epochs=1" in " ".join(capsys.readouterr().err.split())
    assert run(f"{line.replace('0.75', '0.5')} 2 --force") == cli.BAD_INPUT
    assert "is of another run, which differs in the weights and the masks" in " ".join(capsys.readouterr().err.split())
    assert zeros_of(keras.models.load_model("out.h5")) == 0.75 * SIZE


def test_force_overwrites(capsys):
    assert run("prune model.h5 out.h5 --sparsity 0.5") == cli.OK
    assert run("prune model.h5 out.h5 --sparsity 0.75 --force") == cli.OK
    assert zeros_of(keras.models.load_model("out.h5")) == 0.75 * SIZE


def test_inspect_says_what_is_in_the_file(capsys):
    assert run("prune model.h5 out.h5 --sparsity 0.75") == cli.OK
    capsys.readouterr()
    assert run("inspect out.h5 --report weights.csv --plots pictures") == cli.OK
    out = capsys.readouterr().out
    assert "masks     for 2 weights" in out
    assert "Adam, loss sparse_categorical_crossentropy" in out
    assert "opens as  a Keras 3 model" in out
    assert "75.00 %" in out
    assert Path("weights.csv").is_file()


def column(out: str, name: str) -> list[str]:
    """The cells of one row of the table of before and after."""
    (line,) = (line for line in out.splitlines() if line.startswith(name))
    return line.removeprefix(name).split()


def test_before_is_the_input_also_where_it_is_overwritten(capsys):
    size = Path("model.h5").stat().st_size
    assert run("prune model.h5 model.h5 --force --no-optimizer") == cli.OK
    out = capsys.readouterr().out
    assert column(out, "file, bytes") == [f"{size:,}", f"{Path('model.h5').stat().st_size:,}"]


@pytest.mark.parametrize(
    ("writer", "line", "shown"),
    [
        ("keras", "out.h5", r"  Keras 3\S+ opens it, without sparsekit\n"),
        ("tf_keras", "out.h5", r"  Keras 3\S+ opens it, .*Keras 2, .*, does not: run with --flavour tf_keras"),
        ("tf_keras", "out.h5 --flavour tf_keras", r"  tf_keras 2\S+ opens it, without sparsekit\n"),
        ("keras", "out.sparse.h5", r"sparsekit.load opens it, as a model of Keras 3\S+; plain Keras does not"),
    ],
)
def test_the_output_says_which_keras_opens_it(writer, line, shown, capsys):
    network(writer).save("in.h5")
    assert run(f"prune in.h5 {line}") == cli.OK
    assert re.search(shown, capsys.readouterr().out)


def test_layers_that_are_not_trainable_are_named(capsys):
    model = network()
    model.layers[-1].trainable = False
    sparsekit.save(model, "half.h5")
    assert run("prune half.h5 out.h5 --sparsity 0.75") == cli.OK
    out = capsys.readouterr().out
    assert f"{SIZE - 36} of {SIZE} kernel values are in layers with trainable=False" in out
    assert "set layer.trainable = True" in out
    assert column(out, "zeros in prunable weights") == ["0.00", "%", "75.00", "%"]
    assert column(out, "the same with layers not trainable") == ["0.00", "%", f"{100 * 27 / SIZE:.2f}", "%"]


def test_seeds_are_no_values(capsys):
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dropout(0.5), keras.layers.Dense(3)])
    sparsekit.save(model, "drop.h5")
    assert run("prune drop.h5 out.h5 --sparsity 0.75") == cli.OK
    assert column(capsys.readouterr().out, "all values") == [str(4 * 3 + 3)] * 2


def test_inspect_prints_paths_that_include_takes(capsys):
    """Keras 2 gives a weight another name than its layer has where a name came twice in one process."""
    network().save("named.h5")
    with h5py.File("named.h5", "r+") as file:
        group = file["model_weights/conv"]
        names = [name.decode() if isinstance(name, bytes) else name for name in group.attrs["weight_names"]]
        arrays = [group[name][()] for name in names]
        renamed = [f"conv_1_1/{name.rsplit('/', 1)[-1]}" for name in names]
        for name, array in zip(renamed, arrays, strict=True):
            group[name] = array
        group.attrs["weight_names"] = [name.encode() for name in renamed]
    assert run("inspect named.h5") == cli.OK
    out = capsys.readouterr().out
    assert "conv_1_1" not in out
    path = next(line.split()[0] for line in out.splitlines() if line.split()[:2][-1:] == ["3x3x1x4"])
    assert run(f"prune named.h5 out.h5 --include {path}") == cli.OK


def test_inspect_shows_a_file_that_cannot_be_opened(capsys):
    write_weights_only("only.h5")
    assert run("inspect only.h5") == cli.BAD_INPUT
    shown = capsys.readouterr()
    assert "dense/kernel:0" in shown.out
    assert "weights only" in shown.err


def test_engine_info_and_clean(monkeypatch, here, capsys):
    monkeypatch.setenv("SPARSEKIT_CACHE_DIR", str(here / "cache"))
    assert run("engine --info") == cli.OK
    assert str(here / "cache") in capsys.readouterr().out
    assert run("engine --clean") == cli.OK
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert run("engine --build") == cli.NO_ENGINE
    assert "no-such-compiler is not a program" in capsys.readouterr().err


# --- what it refuses ---

REFUSED = {
    "there is no such file": ("prune absent.h5 out.h5", cli.BAD_INPUT, "There is no file 'absent.h5'"),
    "input is a folder": ("prune . out.h5", cli.BAD_INPUT, "is a folder"),
    "not HDF5": ("prune text.h5 out.h5", cli.BAD_INPUT, "neither an HDF5"),
    "damaged": ("prune half.h5 out.h5", cli.BAD_INPUT, "damaged"),
    "weights only": ("prune weights.h5 out.h5", cli.BAD_INPUT, "weights only"),
    "target exists": ("prune model.h5 digits.npz.h5", cli.BAD_OUTPUT, "exists already"),
    "no folder for the target": ("prune model.h5 no/out.h5", cli.BAD_OUTPUT, "no folder 'no'"),
    "target is a folder": ("prune model.h5 folder.h5", cli.BAD_OUTPUT, "is a folder"),
    "unknown ending": ("prune model.h5 out.txt", cli.BAD_OUTPUT, "no known ending"),
    "report exists": ("prune model.h5 out.h5 --report text.h5", cli.BAD_OUTPUT, "exists already"),
    "pictures into a file": ("prune model.h5 out.h5 --plots text.h5", cli.BAD_OUTPUT, "is a file"),
    "no such data": ("prune model.h5 out.h5 --retrain absent.npz", cli.BAD_DATA, "no data file 'absent.npz'"),
    "data of another kind": ("prune model.h5 out.h5 --retrain text.h5", cli.BAD_DATA, "no form of data"),
    "images of another size": (
        "prune model.h5 out.h5 --retrain wrong.npz",
        cli.BAD_DATA,
        "x of wrong.npz has shape (40, 9, 9, 1); the model takes (samples, 8, 8, 1)",
    ),
    "no such module": ("prune model.h5 out.h5 --retrain absent_module:f", cli.BAD_DATA, "no module 'absent_module'"),
    "unknown criterion": ("prune model.h5 out.h5 --criterion size", cli.BAD_ARGUMENTS, "criterion='size'"),
    "unknown loss": (
        "prune model.h5 out.h5 --retrain digits.npz --loss nothing_like_it",
        cli.BAD_ARGUMENTS,
        "nothing_like_it",
    ),
    "glob without match": ("prune model.h5 out.h5 --include lstm*", cli.BAD_ARGUMENTS, "matches no weight"),
    "nothing left": ("prune model.h5 out.h5 --exclude Conv2D --exclude Dense", cli.BAD_MODEL, "no weight to prune"),
    "NaN": ("prune nan.h5 out.h5", cli.BAD_MODEL, "dense/kernel"),
    "unknown training": ("prune bare.h5 out.h5 --retrain digits.npz", cli.BAD_ARGUMENTS, "give --loss"),
    "no pruned weight": ("retrain model.h5 out.h5 --data digits.npz", cli.BAD_ARGUMENTS, "no pruned zeros"),
    "share too large": ("prune model.h5 out.h5 --retrain digits.npz --validation 1.5", cli.BAD_ARGUMENTS, "between"),
    "training without data": ("prune model.h5 out.h5 --epochs 3", cli.BAD_ARGUMENTS, "--epochs has no effect"),
    "loss without data": ("prune model.h5 out.h5 --loss mse", cli.BAD_ARGUMENTS, "or --validation DATA"),
    "text as npz": ("prune model.h5 out.h5 --retrain text.npz", cli.BAD_DATA, "is no .npz"),
    "own layer": ("prune own.h5 out.h5", cli.BAD_INPUT, "On the command line: --custom-objects MODULE:NAME."),
    "weights only, the way out": (
        "prune weights.h5 out.h5",
        cli.BAD_INPUT,
        "On the command line: --model MODULE:NAME.",
    ),
    "folder of another kind": ("prune model.h5 /proc/out.h5", cli.BAD_OUTPUT, "'/proc' cannot be written to"),
    "share without data": ("prune model.h5 out.h5 --validation 0.5", cli.BAD_ARGUMENTS, "--retrain DATA"),
}


class OwnDense(keras.layers.Dense):
    """A layer that is not registered."""


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case, here, capsys):
    line, code, message = REFUSED[case]
    Path("text.h5").write_text("this is no model")
    Path("text.npz").write_text("these are no arrays")
    sparsekit.save(keras.Sequential([keras.layers.Input((3,)), OwnDense(2)]), "own.h5")
    Path("half.h5").write_bytes(Path("model.h5").read_bytes()[:5000])
    Path("digits.npz.h5").write_text("")
    Path("folder.h5").mkdir()
    write_weights_only("weights.h5")
    sparsekit.save(network(loss=None), "bare.h5")
    broken = network()
    broken.layers[-1].kernel.assign(np.full(broken.layers[-1].kernel.shape, np.nan))
    broken.save("nan.h5")
    before = {path: path.read_bytes() for path in here.rglob("*") if path.is_file()}
    capsys.readouterr()

    assert run(line) == code
    error = capsys.readouterr().err.strip()
    assert message in error
    assert error.startswith("sparsekit: ")
    assert len(error.splitlines()) == 1
    after = {path: path.read_bytes() for path in here.rglob("*") if path.is_file()}
    assert after == before


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("prune model.h5", "OUT.h5"),
        ("prune model.h5 out.h5 --sparsity 90", "did you mean 0.9?"),
        ("prune model.h5 out.h5 --sparsity 90%", "did you mean 0.9?"),
        ("prune model.h5 out.h5 --spars 0.5", "unrecognized arguments: --spars"),
        ("prune model.h5 out.h5 --sparsity 1.0", "fraction in [0, 1)"),
        ("prune model.h5 out.h5 --sparsity nan", "fraction in [0, 1)"),
        ("prune model.h5 out.h5 --epochs 0", "at least 1"),
        ("prune model.h5 out.h5 --learning-rate -1", "above 0"),
        ("retrain model.h5 out.h5", "--data"),
        ("engine", "--build"),
        ("explode", "invalid choice"),
    ],
)
def test_bad_arguments(line, message, capsys):
    with pytest.raises(SystemExit) as stop:
        run(line)
    assert stop.value.code == cli.BAD_ARGUMENTS
    assert message in capsys.readouterr().err


def test_unwritable_folder(monkeypatch, capsys):
    def refuse(**_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(commands.tempfile, "TemporaryFile", refuse)
    assert run("prune model.h5 out.h5") == cli.BAD_OUTPUT
    assert "cannot be written to" in capsys.readouterr().err


def test_unexpected_errors_are_one_sentence_and_debug_shows_all(monkeypatch, capsys):
    def fail(*_):
        raise RuntimeError("the first line\nand another")

    monkeypatch.setattr(commands, "run_prune", fail)
    assert run("prune model.h5 out.h5") == cli.UNEXPECTED
    assert capsys.readouterr().err == "sparsekit: RuntimeError: the first line (--debug shows all of it)\n"
    assert run("prune model.h5 out.h5 --debug") == cli.UNEXPECTED
    assert "Traceback" in capsys.readouterr().err


def test_interrupted(monkeypatch, capsys):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "run_prune", interrupt)
    monkeypatch.setattr(commands, "run_retrain", interrupt)
    assert run("prune model.h5 out.h5") == cli.INTERRUPTED
    assert capsys.readouterr().err == "interrupted; no output was written.\n"
    assert run("retrain model.h5 out.h5 --data d.npz --checkpoint-dir kept") == cli.INTERRUPTED
    assert "kept had saved is there" in capsys.readouterr().err


def test_advice_is_in_the_words_of_the_command_line(capsys):
    assert run("retrain model.h5 out.h5 --data digits.npz") == cli.BAD_ARGUMENTS
    assert "On the command line: `sparsekit prune` first." in capsys.readouterr().err
    assert run("prune model.h5 out.h5 --sparsity 0.75") == cli.OK
    assert run("prune out.h5 less.h5 --sparsity 0.5") == cli.BAD_ARGUMENTS
    assert "On the command line: --sparsity above that." in capsys.readouterr().err


def test_script_is_the_prune_command():
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "prune_h5.py", "absent.h5", "out.h5"], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (cli.BAD_INPUT, "")
    assert done.stderr == "sparsekit: There is no file 'absent.h5'.\n"


# --- data ---


@pytest.mark.parametrize(
    ("loss", "y", "result"),
    [
        ("sparse_categorical_crossentropy", [2, 0], [2, 0]),
        ("sparse_categorical_crossentropy", [[2], [0]], [2, 0]),
        ("categorical_crossentropy", [2, 0], [[0, 0, 1], [1, 0, 0]]),
        ("categorical_crossentropy", [[0, 0, 1], [1, 0, 0]], [[0, 0, 1], [1, 0, 0]]),
    ],
)
def test_labels_become_what_the_loss_takes(loss, y, result):
    x = np.zeros((2, 8, 8, 1), np.uint8)
    got_x, got_y = data.check_arrays((x, np.array(y)), network(loss=loss), Options(loss=loss), "a.npz")
    assert got_x.dtype == np.float32
    assert got_y.tolist() == result


@pytest.mark.parametrize(
    ("x_shape", "y", "loss", "message"),
    [
        ((2, 8, 8), [0, 1], "sparse_categorical_crossentropy", r"add the last axis: x\[..., None\]"),
        ((2, 64), [0, 1], "sparse_categorical_crossentropy", r"x.reshape\(-1, 8, 8, 1\)"),
        ((2, 8, 8, 1), [0, 3], "sparse_categorical_crossentropy", "must be 0 to 2"),
        ((0, 8, 8, 1), [], "sparse_categorical_crossentropy", "no sample at all"),
        ((2, 8, 8, 1), [0, 1, 2], "sparse_categorical_crossentropy", "same number of samples"),
        ((2, 8, 8, 1), [[0, 1, 0], [1, 0, 0]], "sparse_categorical_crossentropy", "one integer a sample"),
        ((2, 8, 8, 1), [0, 7], "categorical_crossentropy", "class numbers 0 to 2"),
        ((2, 8, 8, 1), [[0.5, 0.5]] * 2, "categorical_crossentropy", "the model takes"),
        ((2, 8, 8, 1), ["cat", "dog"], "categorical_crossentropy", "must hold numbers"),
    ],
)
def test_arrays_that_do_not_fit(x_shape, y, loss, message):
    arrays = (np.zeros(x_shape, np.float32), np.array(y))
    with pytest.raises(DataError, match=message):
        data.check_arrays(arrays, network(loss=loss), Options(loss=loss), "a.npz")


def test_npz_without_names_or_with_objects(here):
    np.savez("names.npz", images=np.zeros(3))
    np.savez("objects.npz", x=np.array([{}], dtype=object), y=np.zeros(1))
    for name, message in (("names.npz", "holds images; it needs arrays named x and y"), ("objects.npz", "run code")):
        with pytest.raises(DataError, match=message):
            data.load(data.find(name), network(), get("keras"), Options(loss="sparse_categorical_crossentropy"))


def write_images(folder: Path, flavour: str, classes: tuple[str, ...], count: int) -> None:
    for number, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for index in range(count):
            # The grey value tells class and image apart.
            image = np.full((8, 8, 1), 80 * number + 2 * index, np.uint8)
            KERAS[flavour].utils.save_img(folder / name / f"{index}.png", image, scale=False)


@both
@pytest.mark.parametrize(
    ("loss", "units", "classes"),
    [
        ("sparse_categorical_crossentropy", 3, ("a", "b", "c")),
        ("categorical_crossentropy", 3, ("a", "b", "c")),
        ("binary_crossentropy", 1, ("no", "yes")),
    ],
)
def test_folder_of_images(flavour, loss, units, classes, here):
    write_images(here / "images", flavour, classes, 5)
    model = network(flavour, loss, units)
    options = Options(loss=loss, batch_size=4)
    loaded = data.load(data.find("images"), model, get(flavour), options)
    batches = [(x.numpy(), y.numpy()) for x, y in loaded.fit]
    x, y = (np.concatenate(parts) for parts in zip(*batches, strict=True))
    assert x.shape == (5 * len(classes), 8, 8, 1)
    greys = np.round(x[:, 0, 0, 0] * 255).astype(int)
    numbers = greys // 80
    if loss.startswith("sparse"):
        assert y.tolist() == numbers.tolist()
    elif loss.startswith("categorical"):
        assert y.tolist() == np.eye(3)[numbers].tolist()
    else:
        assert y.tolist() == numbers[:, None].tolist()
    assert sorted(greys) == sorted(80 * c + 2 * i for c in range(len(classes)) for i in range(5))

    train, held = data.load_split(data.find("images"), 0.4, model, get(flavour), options)
    parts = [{int(g) for x, _ in part.fit for g in np.round(x.numpy()[:, 0, 0, 0] * 255)} for part in (train, held)]
    assert not parts[0] & parts[1]
    assert parts[0] | parts[1] == set(greys.tolist())


def test_folder_through_the_command_line(here, capsys):
    write_images(here / "images", "keras", ("a", "b", "c"), 4)
    assert run("prune model.h5 out.h5 --retrain images --validation 0.25 --batch-size 4 --pixels signed") == cli.OK
    out = capsys.readouterr().out
    assert "9 images to train on in 3 classes, 8x8, pixels from -1 to 1" in out
    assert run("prune model.h5 out.h5 --force --retrain images --image-size 9x9") == cli.BAD_DATA
    (here / "images" / "b" / "2.png").write_bytes((here / "images" / "b" / "1.png").read_bytes()[:40])
    capsys.readouterr()
    assert run("prune model.h5 out.h5 --force --retrain images") == cli.BAD_DATA
    assert f"'{Path('images/b/2.png')}' cannot be read as an image" in capsys.readouterr().err
    (here / "images" / "d").mkdir()
    assert run("prune model.h5 out.h5 --force --retrain images") == cli.BAD_DATA
    assert "holds 4 classes (a, b, c, d) and the model tells 3 apart" in capsys.readouterr().err


def test_split_is_exact_and_without_overlap():
    train, held = data.load_split(
        data.find("digits.npz"), 0.3, network(), get("keras"), Options(loss="sparse_categorical_crossentropy")
    )
    rows = [{row.tobytes() for row in part.fit[0]} for part in (train, held)]
    assert (len(rows[0]), len(rows[1])) == (28, 12)
    assert not rows[0] & rows[1]
    labels = dict(zip((r.tobytes() for r in np.load("digits.npz")["x"]), np.load("digits.npz")["y"], strict=True))
    assert all(labels[x.tobytes()] == y for part in (train, held) for x, y in zip(*part.fit, strict=True))


# --- the crash of TensorFlow's own ---


def test_strided_pointwise_convolutions_are_found_at_any_depth():
    def layer(name, kernel, strides):
        return {"class_name": "Conv2D", "config": {"name": name, "kernel_size": kernel, "strides": strides}}

    config = {
        "config": {
            "layers": [
                layer("plain", [3, 3], [2, 2]),
                layer("pointwise", [1, 1], [1, 1]),
                {"class_name": "Functional", "config": {"layers": [layer("shortcut", [1, 1], [2, 2])]}},
            ]
        }
    }
    assert list(strided_pointwise(config)) == ["shortcut"]


def test_onednn_is_switched_off_for_a_file_that_needs_it(here):
    def setting(path: str, environment: dict[str, str]) -> str:
        code = (
            "import os\nfrom pathlib import Path\nfrom sparsekit.onednn import avoid_crash\n"
            f"note = avoid_crash(Path({path!r}))\nprint(os.environ.get('TF_ENABLE_ONEDNN_OPTS'), bool(note))"
        )
        return subprocess.check_output(
            [sys.executable, "-c", code], text=True, env={"PYTHONPATH": str(ROOT), **environment}
        ).strip()

    config = {"layers": [{"config": {"name": "s", "kernel_size": [1, 1], "strides": [2, 2]}}]}
    with h5py.File("shortcut.h5", "w") as file:
        file.attrs["model_config"] = json.dumps(config)
    assert setting("shortcut.h5", {}) == "0 True"
    assert setting("shortcut.h5", {"TF_ENABLE_ONEDNN_OPTS": "1"}) == "1 False"
    assert setting("model.h5", {}) == "None False"
    assert setting("digits.npz", {}) == "None False"
