"""Imports run one way, and one file only knows the two Kerases."""

from __future__ import annotations

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "sparsekit"

# From the ground up; a module imports from its own row and the rows before it.
ROWS = (
    {"errors"},
    {"masks", "registry"},
    {"criteria", "distributions", "patterns", "ranking", "schedules", "selection"},
    {"evidence", "flavour", "flavour_base", "flavour_files", "flavour_runs", "frozen", "onednn", "weights"},
    {"engine", "files", "reports", "training", "updates"},
    {"api"},
    {"__main__", "cli", "commands", "console", "data", "demo"},
)
NUMPY_ONLY = ROWS[0] | ROWS[1] | ROWS[2]
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in FILES}


def imports_of(path: Path) -> set[str]:
    """Full names of all modules that a file imports, at its top or inside functions, without those for types only."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    typing_only = {
        node
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and "TYPE_CHECKING" in ast.unparse(branch.test)
        for node in ast.walk(branch)
    }
    package = module_name(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    found = set()
    for node in ast.walk(tree):
        if node in typing_only:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            # `from . import data` imports a module, `from .data import load` a name in one.
            members = {f"{source}.{alias.name}" for alias in node.names}
            found |= (members & set(MODULES)) or {source}
    return found


def own_imports(path: Path) -> set[str]:
    return {name for name in imports_of(path) if name.startswith("sparsekit.")}


def row_of(name: str) -> int:
    part = name.split(".")[1]
    for number, row in enumerate(ROWS):
        if part in row:
            return number
    raise AssertionError(f"{name} is in no row; say in ROWS of {Path(__file__).name} where it stands")


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_imports_run_one_way(path: Path):
    own = module_name(path)
    above = {name for name in own_imports(path) if row_of(name) > row_of(own)}
    assert not above, f"{own} imports {above}, which stand above it"


def test_no_cycle_of_imports():
    graph = {module_name(path): own_imports(path) - {module_name(path)} for path in FILES}
    assert len(list(TopologicalSorter(graph).static_order())) >= len(FILES)


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_only_flavour_imports_a_keras(path: Path):
    roots = {name.split(".")[0] for name in imports_of(path)}
    if module_name(path) != "sparsekit.flavour":
        assert not roots & {"keras", "tf_keras"}


@pytest.mark.parametrize("part", sorted(NUMPY_ONLY))
def test_the_ground_needs_numpy_only(part: str):
    path = MODULES.get(f"sparsekit.{part}")
    if path is not None:
        roots = {name.split(".")[0] for name in imports_of(path)}
        assert roots <= set(sys.stdlib_module_names) | {"numpy", "sparsekit"}


@pytest.mark.parametrize("command", [[], ["prune"], ["retrain"], ["inspect"], ["engine"], ["demo"]])
def test_help_needs_no_tensorflow(command: list[str]):
    code = (
        "import sys\n"
        "from sparsekit.cli import main\n"
        "try:\n"
        f"    main({command} + ['--help'])\n"
        "finally:\n"
        "    assert not {'tensorflow', 'keras', 'tf_keras', 'h5py'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PACKAGE.parent)
    assert done.returncode == 0, done.stderr
    assert "exit codes:" in done.stdout


def test_public_names_are_there():
    import sparsekit

    for name in sparsekit.__all__:
        assert getattr(sparsekit, name).__doc__
    with pytest.raises(AttributeError, match="no attribute 'purne'"):
        _ = sparsekit.purne
