"""What files may do to whoever opens them: an error of ours or a model that works, never anything else."""

from __future__ import annotations

import hashlib
import os
import resource
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from models import mlp, warmed

import sparsekit
from sparsekit.errors import SparsekitError
from sparsekit.flavour import flavour_of

# The last one is written by plain Keras: no checksums, so that a changed value of a weight goes unseen.
NAMES = ("model.h5", "model.sparse.h5", "model.keras", "plain.h5")
# More than a small model needs; far less than what a damaged size field asks for.
MEMORY = 1 << 30


def written(flavour: str, name: str, folder: Path) -> Path:
    """A file of each format, of a trained and pruned model."""
    model = warmed(mlp(flavour))
    sparsekit.prune(model, 0.5)
    (model.save if name == "plain.h5" else lambda path: sparsekit.save(model, path))(folder / name)
    return folder / name


def held(model: Any) -> tuple[Any, ...]:
    """All that a file says of a model."""
    optimizer = [np.asarray(v).tobytes() for v in flavour_of(model).optimizer_variables(model.optimizer)]
    masks = [keep.tobytes() for keep in sparsekit.masks_of(model).values()]
    return model.to_json(), [w.tobytes() for w in model.get_weights()], optimizer, masks


def survives(
    path: Path, seeds: range, damage: Callable[[Path, int, Path], Any], judge: Callable[[Path, Any, Any], None]
) -> int:
    """Damage a file in each of these ways and load it.

    Args:
        path: a good file.
        seeds: one way each.
        damage: writes the damaged file; what it returns goes to `judge`.
        judge: looks at the damaged file, the model that came of it (or None), and what `damage` returned.

    Returns:
        How many were refused.
    """
    refused, broken = 0, path.with_name(f"broken{''.join(path.suffixes)}")
    for seed in seeds:
        what = damage(path, seed, broken)
        before, content, model = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, _digest(broken), None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    model = sparsekit.load(broken)
                except SparsekitError as error:
                    refused += 1
                    assert_one_sentence(error)
                judge(broken, model, what)
        except Exception as error:
            raise AssertionError(f"Seed {seed} of {path.name} ({what}): {type(error).__name__}: {error}") from error
        assert _digest(broken) == content, f"Seed {seed} of {path.name} ({what}): the file has changed."
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
        assert grown < MEMORY, f"Seed {seed} of {path.name} ({what}) took {grown:,} bytes."
    return refused


def assert_one_sentence(error: Exception) -> None:
    text = str(error)
    assert text.endswith((".", ")")) or len(text) > 300, text
    assert "\n" not in text, text
    assert len(text) < 2000, text


def in_a_process_of_its_own(code: str, seconds: int) -> None:
    """Run tests' code where a crash ends another process than this one."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])},
        capture_output=True,
        check=False,
        timeout=seconds,
    )
    assert done.returncode == 0, done.stderr.decode()[-2000:]


def _digest(path: Path) -> bytes:
    return hashlib.blake2b(path.read_bytes()).digest()
