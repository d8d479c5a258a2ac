"""Random damage to files: an error of ours or the right model, never a crash, a hang, or a huge allocation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from models import both
from survival import NAMES, held, in_a_process_of_its_own, survives, written

import sparsekit
from sparsekit.errors import FileError


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


def damage(path: Path, seed: int, broken: Path) -> None:
    broken.write_bytes(damaged(path.read_bytes(), seed))


def survives_bytes(path: Path, seeds: range) -> int:
    """Load a file damaged in each of these ways; gives how many of them were noticed."""
    wanted = held(sparsekit.load(path))

    def judge(_broken: Path, model: Any, _what: Any) -> None:
        assert model is None or path.name == "plain.h5" or held(model) == wanted, "It gives another model."

    return survives(path, seeds, damage, judge)


@pytest.mark.parametrize("name", NAMES)
def test_damaged_files(name, tmp_path):
    assert survives_bytes(written("keras", name, tmp_path), range(12)) > 0


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
        code = f"import pathlib, test_files_fuzz as f; f.survives_bytes(pathlib.Path({str(tmp_path)!r}) / {name!r}, "
        in_a_process_of_its_own(f"{code}range({start}, {start + 250}))", 1800)
