"""Random damage to files: an error of ours or a model, never a crash, a hang, a huge allocation, or code that runs."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from models import mlp

import sparsekit
from sparsekit.errors import SparsekitError

ENDINGS = (".h5", ".sparse.h5", ".keras")
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
    content, noticed = path.read_bytes(), 0
    broken = path.with_name(f"broken{''.join(path.suffixes)}")
    for seed in seeds:
        broken.write_bytes(damaged(content, seed))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model = sparsekit.load(broken)
            assert len(model.get_weights()) > 0
        except SparsekitError:
            noticed += 1
        except Exception as error:
            raise AssertionError(f"Seed {seed} of {path.name}: {type(error).__name__}: {error}") from error
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
        assert grown < MEMORY, f"Seed {seed} of {path.name} took {grown:,} bytes."
    return noticed


def written(flavour: str, ending: str, folder: Path) -> Path:
    model = mlp(flavour)
    sparsekit.prune(model, 0.5)
    sparsekit.save(model, folder / f"model{ending}")
    return folder / f"model{ending}"


@pytest.mark.parametrize("ending", ENDINGS)
def test_damaged_files(ending, tmp_path):
    assert survives(written("keras", ending, tmp_path), range(12)) > 0


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("flavour", ["keras", "tf_keras"])
@pytest.mark.parametrize("ending", ENDINGS)
def test_thousands_of_damaged_files(flavour, ending, tmp_path):
    """In a process of its own: a crash there is a failure here."""
    written(flavour, ending, tmp_path)
    for start in range(100, 1100, 250):
        code = f"import pathlib, test_files_fuzz as f; f.survives(pathlib.Path({str(tmp_path)!r}) / 'model{ending}', "
        done = subprocess.run(
            [sys.executable, "-c", f"{code}range({start}, {start + 250}))"],
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])},
            capture_output=True,
            check=False,
            timeout=1800,
        )
        assert done.returncode == 0, done.stderr.decode()[-2000:]
