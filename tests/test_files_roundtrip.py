"""What save writes, load brings back; and plain Keras opens it."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
import warnings
from pathlib import Path

import h5py
import numpy as np
import pytest
from models import KERAS, X, Y, assert_held, assert_moved, both, mlp, values, warmed

import sparsekit
from sparsekit.errors import FileError, SparsekitWarning
from sparsekit.files.checksums import FLAVOUR, NAME
from sparsekit.files.masks_group import GROUP
from sparsekit.flavour import flavour_of
from sparsekit.frozen import frozen_masks

formats = pytest.mark.parametrize("ending", [".h5", ".hdf5", ".keras", ".sparse.h5"])


def bits(array):
    return np.asarray(array).tobytes()


@both
@formats
def test_weights_masks_and_optimizer_come_back_bit_for_bit(flavour, ending, tmp_path):
    model = warmed(mlp(flavour))
    sparsekit.prune(model, 0.75)
    path = tmp_path / f"model{ending}"
    sparsekit.save(model, path)
    loaded = sparsekit.load(path)
    assert flavour_of(loaded).name == flavour
    assert [bits(w) for w in loaded.get_weights()] == [bits(w) for w in model.get_weights()]
    ours, theirs = sparsekit.masks_of(model), sparsekit.masks_of(loaded)
    assert [keep.tolist() for keep in theirs.values()] == [keep.tolist() for keep in ours.values()]
    assert [mask.target for mask in frozen_masks(loaded)] == [0.75, 0.75]
    slots = [np.asarray(v) for v in flavour_of(model).optimizer_variables(model.optimizer)]
    back = [np.asarray(v) for v in flavour_of(loaded).optimizer_variables(loaded.optimizer)]
    assert [bits(v) for v in back] == [bits(v) for v in slots]


@both
@formats
def test_training_goes_on_after_loading(flavour, ending, tmp_path):
    model = warmed(mlp(flavour))
    sparsekit.prune(model, 0.75)
    sparsekit.save(model, tmp_path / f"model{ending}")
    loaded = sparsekit.load(tmp_path / f"model{ending}")
    masks, before = sparsekit.masks_of(loaded), values(loaded)
    steps = int(loaded.optimizer.iterations)
    sparsekit.retrain(loaded, (X, Y), batch_size=16, verbose=0)
    assert int(loaded.optimizer.iterations) == steps + 4
    assert_held(loaded, masks)
    assert_moved(loaded, masks, before)


@both
@pytest.mark.parametrize("ending", [".h5", ".keras"])
def test_plain_keras_opens_the_file_and_trains_on(flavour, ending, tmp_path):
    model = warmed(mlp(flavour))
    sparsekit.prune(model, 0.75)
    path = os.fspath(tmp_path / f"model{ending}")
    sparsekit.save(model, path)
    plain = KERAS[flavour].models.load_model(path)
    assert len(plain.weights) == len(model.weights)
    assert [bits(w) for w in plain.get_weights()] == [bits(w) for w in model.get_weights()]
    assert np.isfinite(plain.fit(X, Y, verbose=0).history["loss"][0])


@both
def test_saving_an_h5_leaves_the_model_as_it_was(flavour, tmp_path):
    """Keras 3 drops the optimizer from the model's compile settings when it writes an .h5."""
    model = mlp(flavour, KERAS[flavour].optimizers.SGD(0.5))
    sparsekit.save(model, tmp_path / "one.h5")
    sparsekit.save(model, tmp_path / "two.keras")
    assert type(sparsekit.load(tmp_path / "two.keras").optimizer).__name__ == "SGD"


@both
def test_a_file_without_its_optimizer_is_smaller_and_still_trains(flavour, tmp_path):
    model = warmed(mlp(flavour))
    for ending in (".h5", ".keras", ".sparse.h5"):
        full, bare = tmp_path / f"full{ending}", tmp_path / f"bare{ending}"
        sparsekit.save(model, full)
        sparsekit.save(model, bare, include_optimizer=False)
        assert bare.stat().st_size < full.stat().st_size
        assert [bits(w) for w in sparsekit.load(bare).get_weights()] == [bits(w) for w in model.get_weights()]


@both
def test_masks_that_something_else_trained_over_are_applied_with_a_warning(flavour, tmp_path):
    model = mlp(flavour)
    sparsekit.prune(model, 0.5)
    sparsekit.save(model, tmp_path / "model.h5")
    with h5py.File(tmp_path / "model.h5", "r+") as file:
        kernels = []
        file["model_weights"].visititems(
            lambda name, item: kernels.append(item) if isinstance(item, h5py.Dataset) and item.ndim == 2 else None
        )
        kernels[0][...] = 1.0
        # As a file is that was written without checksums.
        del file[NAME], file.attrs[FLAVOUR]
    with pytest.warns(SparsekitWarning, match="24 weights .* not zero where its masks say so"):
        loaded = sparsekit.load(tmp_path / "model.h5")
    assert sparsekit.report(loaded).violations == 0


def test_masks_find_their_weights_in_the_other_keras(tmp_path):
    model = mlp("tf_keras")
    sparsekit.prune(model, 0.5)
    sparsekit.save(model, tmp_path / "model.h5")
    loaded = sparsekit.load(tmp_path / "model.h5", flavour="keras")
    ours, theirs = sparsekit.masks_of(model), sparsekit.masks_of(loaded)
    assert [keep.tolist() for keep in theirs.values()] == [keep.tolist() for keep in ours.values()]


def test_a_file_that_is_there_stays_unless_overwrite_is_asked_for(tmp_path):
    path = tmp_path / "model.h5"
    path.write_bytes(b"mine")
    with pytest.raises(FileError, match=r"exists already; give another name, or overwrite=True"):
        sparsekit.save(mlp("keras"), path, overwrite=False)
    assert path.read_bytes() == b"mine"
    sparsekit.save(mlp("keras"), path)
    assert h5py.is_hdf5(path)
    assert [p.name for p in tmp_path.iterdir()] == ["model.h5"]


@formats
def test_a_full_disk_leaves_the_old_file_and_no_rubbish(ending, tmp_path, monkeypatch):
    path = tmp_path / f"model{ending}"
    sparsekit.save(mlp("keras"), path)
    before = path.read_bytes()

    def full(_handle):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(FileError, match="disk is full"):
        sparsekit.save(mlp("keras"), path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


FULL = """
import resource, signal, sys
import numpy as np, sparsekit
from models import X, Y, mlp
from sparsekit.errors import FileError

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
model = sparsekit.prune(mlp("keras"), 0.5)
for size in (100, 3000, 9000):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
    for name in sys.argv[1:]:
        try:
            if name == "run":
                sparsekit.retrain(model, (X, Y), checkpoint_dir=name, verbose=0)
            else:
                sparsekit.save(model, name)
        except FileError as error:
            assert "cannot be written: File too large" in str(error), error
        else:
            assert size > 100, name
print("done")
"""


def test_the_hdf5_library_never_meets_a_full_disk(tmp_path):
    """It raises other errors, and crashes the process; a limit for the size of a file is as good as a full disk."""
    names = ["model.h5", "model.keras", "model.sparse.h5"]
    for name in names:
        sparsekit.save(mlp("tf_keras"), tmp_path / name)
    before = {name: (tmp_path / name).read_bytes() for name in names}
    path = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[1]), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", FULL, *names, "run"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr[-2000:]
    assert (tmp_path / "model.h5").read_bytes() == before["model.h5"]
    assert not [p for p in tmp_path.rglob(".*")]


@pytest.mark.parametrize("name", ["x" * 300 + ".h5", "x" * 240 + ".keras"])
def test_a_name_that_no_file_can_have_is_refused(name, tmp_path):
    with pytest.raises(FileError, match="cannot be the name of a file: File name too long; give a shorter one"):
        sparsekit.save(mlp("keras"), tmp_path / name)


def test_a_folder_that_is_not_there_and_an_unknown_ending_are_named(tmp_path):
    with pytest.raises(FileError, match="does not exist; create it"):
        sparsekit.save(mlp("keras"), tmp_path / "nowhere" / "model.h5")
    with pytest.raises(FileError, match=r"no known ending; give a name in \.h5"):
        sparsekit.save(mlp("keras"), tmp_path / "model.pb")
    with pytest.raises(FileError, match="is a folder"):
        sparsekit.save(mlp("keras"), tmp_path)


def test_the_file_has_the_rights_of_an_ordinary_new_file(tmp_path):
    (tmp_path / "plain").write_bytes(b"")
    sparsekit.save(mlp("keras"), tmp_path / "model.h5")
    assert stat.S_IMODE((tmp_path / "model.h5").stat().st_mode) == stat.S_IMODE((tmp_path / "plain").stat().st_mode)


@both
def test_a_model_without_masks_gets_no_group(flavour, tmp_path):
    sparsekit.save(mlp(flavour), tmp_path / "model.h5")
    with h5py.File(tmp_path / "model.h5", "r") as file:
        assert GROUP not in file
    assert not sparsekit.masks_of(sparsekit.load(tmp_path / "model.h5"))


@both
def test_custom_loss_and_metric_are_kept_when_given_and_named_when_not(flavour, tmp_path):
    k = KERAS[flavour]

    def my_loss(y, p):
        return k.losses.mean_squared_error(y, p)

    model = mlp(flavour, loss=my_loss, metrics=[my_loss])
    path = tmp_path / "model.h5"
    sparsekit.save(model, path)
    loaded = sparsekit.load(path, custom_objects={"my_loss": my_loss})
    assert np.isfinite(loaded.fit(X, Y, verbose=0).history["my_loss"][0])
    with pytest.warns(SparsekitWarning, match="loss 'my_loss' is not known, so that the model is not compiled"):
        bare = sparsekit.load(path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bare.compile("sgd", "mse")
    assert np.isfinite(bare.fit(X, Y, verbose=0).history["loss"][0])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@both
def test_saving_weights_that_came_back_says_so(flavour, tmp_path):
    keras_ = KERAS[flavour]
    model = keras_.Sequential([keras_.layers.Input((6,)), keras_.layers.Dense(5, name="dense")])
    model.compile("adam", "mse")
    sparsekit.prune(model, 0.5)
    sparsekit.save(model, tmp_path / "sparse.h5")
    model.fit(np.ones((8, 6), "float32"), np.ones((8, 5), "float32"), verbose=0)
    with pytest.warns(SparsekitWarning, match=r"^15 pruned weights are not zero \(dense/kernel\) and are saved"):
        sparsekit.save(model, tmp_path / "refilled.h5")
