"""The scripts leave an environment alone that has sparsekit from another folder."""

from __future__ import annotations

import os
import re
import subprocess
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def environment(tmp_path) -> Path:
    """A virtual environment, without pip, into which another folder's sparsekit is installed."""
    folder = tmp_path / "env"
    venv.create(folder, with_pip=False, symlinks=True)
    (tmp_path / "other" / "sparsekit").mkdir(parents=True)
    (tmp_path / "other" / "sparsekit" / "__init__.py").write_text("")
    (packages(folder) / "other.pth").write_text(str(tmp_path / "other"))
    return folder


def packages(environment: Path) -> Path:
    (found,) = environment.glob("lib/python3*/site-packages")
    return found


def use(environment: Path) -> subprocess.CompletedProcess[str]:
    script = (
        f"root={ROOT}; source {ROOT}/scripts/environment.sh; use_environment demo; cd /; "
        """$python -c 'import importlib.util as u; print(u.find_spec("sparsekit").origin)'"""
    )
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        capture_output=True,
        text=True,
        env=clean | {"VIRTUAL_ENV": str(environment)},
    )


def test_another_folders_install_stays_and_this_folder_runs(environment):
    text = (ROOT / "pyproject.toml").read_text()
    for name in [*re.findall(r'^    "([a-zA-Z0-9-]+)>=', text, re.MULTILINE), "mlxtend", "matplotlib"]:
        info = packages(environment) / f"{name.replace('-', '_')}-99.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 99\n")
    before = sorted(packages(environment).iterdir())
    done = use(environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"installed there from {environment.parent / 'other'}, which stays" in done.stdout
    assert done.stdout.splitlines()[-1] == str(ROOT / "sparsekit" / "__init__.py")
    assert sorted(packages(environment).iterdir()) == before


def test_what_that_environment_lacks_is_named(environment):
    done = use(environment)
    assert done.returncode == 1
    assert "lacks tensorflow tf-keras" in done.stderr
    assert "mlxtend matplotlib" in done.stderr
