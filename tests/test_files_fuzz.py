"""Random damage to files: an error of ours or the right model, never a crash, a hang, or a huge allocation."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from models import both, mlp, warmed

import sparsekit
from sparsekit.errors import FileError, SparsekitError
from sparsekit.flavour import flavour_of

# The last one is written by plain Keras: no checksums, so that a changed value of a weight goes unseen.
NAMES = ("model.h5", "model.sparse.h5", "model.keras", "plain.h5")
# More than a small model needs; far less than what a damaged size field asks for.
MEMORY = 1 << 30


def damaged(content: bytes, seed: int) -> bytes:
    """Cut the file, or change some bytes; half of the changes are near the start, where the structure is."""
    rng = np.random.default_rng(seed)
    if rng.random() < 0.2:
        return content[: int(rng.integers(0, len(content)))]
    changed = bytearray(content)
    for _ in range(int(rng.integers(1, 9))):
        place = int(rng.integers(0, len(content) if rng.random() < 0.5 else min(4096, len(content))))
        changed[place] = int(rng.choice([0, 1, 127, 128, 255, changed[place] ^ (1 << int(rng.integers(0, 8)))]))
    return bytes(changed)


def survives(path: Path, seeds: range) -> int:
    """Load a file damaged in each of these ways; gives how many of them were noticed."""
    content, noticed, wanted = path.read_bytes(), 0, held(sparsekit.load(path))
    broken = path.with_name(f"broken{''.join(path.suffixes)}")
    for seed in seeds:
        broken.write_bytes(damaged(content, seed))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model = sparsekit.load(broken)
        except SparsekitError:
            noticed += 1
        except Exception as error:
            raise AssertionError(f"Seed {seed} of {path.name}: {type(error).__name__}: {error}") from error
        else:
            assert path.name == "plain.h5" or held(model) == wanted, f"Seed {seed} of {path.name} gives another model."
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
        assert grown < MEMORY, f"Seed {seed} of {path.name} took {grown:,} bytes."
    return noticed


def held(model: Any) -> tuple[Any, ...]:
    """All that a file says of a model."""
    optimizer = [np.asarray(v).tobytes() for v in flavour_of(model).optimizer_variables(model.optimizer)]
    masks = [keep.tobytes() for keep in sparsekit.masks_of(model).values()]
    return model.to_json(), [w.tobytes() for w in model.get_weights()], optimizer, masks


def written(flavour: str, name: str, folder: Path) -> Path:
    model = warmed(mlp(flavour))
    sparsekit.prune(model, 0.5)
    (model.save if name == "plain.h5" else lambda path: sparsekit.save(model, path))(folder / name)
    return folder / name


@pytest.mark.parametrize("name", NAMES)
def test_damaged_files(name, tmp_path):
    assert survives(written("keras", name, tmp_path), range(12)) > 0


@both
def test_each_changed_bit_of_a_plain_file_of_ours_is_noticed(flavour, tmp_path):
    path = written(flavour, "model.h5", tmp_path)
    content = path.read_bytes()
    with h5py.File(path, "r") as file:
        kernels: list[int] = []
        file["model_weights"].visititems(
            lambda _, item: kernels.append(item.id.get_offset()) if isinstance(item, h5py.Dataset) else None
        )
    for place in (*(offset + 6 for offset in kernels), content.index(b"tanh"), content.rindex(b'"learning_rate"')):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        with pytest.raises(FileError, match=r"has changed since sparsekit wrote the file; .* open it with plain Keras"):
            sparsekit.load(path)


def test_what_is_added_to_a_plain_file_of_ours_is_fine(tmp_path):
    path = written("keras", "model.h5", tmp_path)
    wanted = held(sparsekit.load(path))
    with h5py.File(path, "r+") as file:
        file.attrs["class_names"] = ["cat", "dog"]
        file["model_weights"].create_dataset("mine", data=np.ones(3))
    assert held(sparsekit.load(path)) == wanted


def test_what_is_taken_out_of_a_plain_file_of_ours_is_missed(tmp_path):
    path = written("keras", "model.h5", tmp_path)
    with h5py.File(path, "r+") as file:
        del file["sparsekit_masks"]
    with pytest.raises(FileError, match="'sparsekit_masks' has changed since"):
        sparsekit.load(path)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("flavour", ["keras", "tf_keras"])
@pytest.mark.parametrize("name", NAMES)
def test_thousands_of_damaged_files(flavour, name, tmp_path):
    """In a process of its own: a crash there is a failure here."""
    written(flavour, name, tmp_path)
    for start in range(100, 1100, 250):
        code = f"import pathlib, test_files_fuzz as f; f.survives(pathlib.Path({str(tmp_path)!r}) / {name!r}, "
        done = subprocess.run(
            [sys.executable, "-c", f"{code}range({start}, {start + 250}))"],
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])},
            capture_output=True,
            check=False,
            timeout=1800,
        )
        assert done.returncode == 0, done.stderr.decode()[-2000:]
