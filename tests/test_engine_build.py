"""The library of the engine: compiled once, cached by what it depends on, and one clear line where it cannot be had."""

from __future__ import annotations

import shutil
import struct
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from sparsekit.engine import build
from sparsekit.errors import EngineError

# A library that compiles in a blink stands for the engine's own.
TINY = 'extern "C" int sparsekit_tiny() { return 1; }\n'


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """A fresh cache and a folder with one tiny source instead of the engine's."""
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "tiny.cc").write_text(TINY)
    monkeypatch.setenv("SPARSEKIT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(build, "_SOURCE_FOLDER", folder)
    monkeypatch.setattr(build, "_loaded", None)
    monkeypatch.setattr(build, "_failures", {})
    return folder


@pytest.fixture
def counted(tmp_path, monkeypatch):
    """A compiler that writes a line for each file that it compiles; where there is none, one that always fails."""
    calls = tmp_path / "calls"
    calls.touch()
    real = build.compiler()
    script = tmp_path / "counted-compiler"
    action = f'exec {real[0]} "$@"' if real else 'echo "error: no compiler behind this script"; exit 1'
    script.write_text(f'#!/bin/sh\ncase " $* " in *" -c "*) echo compile >> {calls};; esac\n{action}\n')
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    return lambda: len(calls.read_text().splitlines())


def has_compiler() -> bool:
    return any(shutil.which(name) for name in ("c++", "g++", "clang++"))


def leftovers() -> list[str]:
    return sorted(path.name for path in build.cache_dir().glob("*tmp*"))


def test_the_first_use_compiles_and_the_next_does_not(sources, counted):
    assert not build.cached()
    assert counted() == 0, "asking whether it is cached must not build"
    assert build.available() == has_compiler()
    assert build.cached() == has_compiler()
    assert counted() == 1
    build.available()
    assert counted() == 1
    assert leftovers() == []


def test_a_changed_source_is_another_library(sources):
    before = build.info().path
    (sources / "tiny.cc").write_text(TINY + "// changed\n")
    changed = build.info().path
    (sources / "more.h").write_text("")
    with_header = build.info().path
    if has_compiler():
        assert len({before, changed, with_header}) == 3
    else:
        assert before is changed is with_header is None


@pytest.mark.parametrize("what", ["tensorflow", "compiler", "cpu"])
def test_the_library_depends_on_what_it_was_built_with(sources, monkeypatch, counted, what):
    before = build.info().path
    assert build.info().path == before
    if what == "tensorflow":
        monkeypatch.setattr(build.tf, "__version__", "0.0.1")
    else:
        tuning, version, macros = build._probe(build.compiler())
        changed = (tuning, "another", macros) if what == "compiler" else (tuning, version, "another")
        monkeypatch.setattr(build, "_probe", lambda command: changed)
    assert build.info().path != before


@pytest.mark.parametrize("way", ["CXX", "PATH"])
def test_without_a_compiler_one_line_says_so(sources, monkeypatch, way):
    monkeypatch.setenv(way, "/no/such/place")
    assert not build.available()
    assert not build.cached()
    line = build.reason()
    assert line.startswith("the engine cannot be built: ")
    assert "install a C++17 compiler or set CXX" in line
    assert "\n" not in line
    with pytest.raises(EngineError, match="install a C"):
        build.build()
    assert build.info().compiler is None
    assert build.info().reason == line


def test_a_failed_build_is_one_line_and_is_not_repeated(sources, counted):
    (sources / "tiny.cc").write_text("this is not C++;\n")
    assert not build.available()
    line = build.reason()
    assert line.startswith("the engine's build failed (")
    assert "sparsekit engine --build" in line
    assert "\n" not in line
    log = build.info().path.with_suffix(".log")
    assert str(log) in line
    assert "error" in log.read_text()
    assert not build.available()
    assert counted() == 1, "a build that failed must not be paid for twice"
    assert leftovers() == []
    with pytest.raises(EngineError, match="the engine's build failed"):
        build.build()
    assert counted() == 2, "asked by name, the build is tried again"


def test_a_compiler_that_cannot_be_started_is_one_line(sources, tmp_path, monkeypatch):
    broken = tmp_path / "broken"
    broken.write_text("neither a script nor a program")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    assert not build.available()
    assert "cannot be started" in build.reason()


def test_a_cache_that_cannot_be_written_is_one_line(sources, tmp_path, monkeypatch, counted):
    (tmp_path / "file").touch()
    monkeypatch.setenv("SPARSEKIT_CACHE_DIR", str(tmp_path / "file" / "cache"))
    assert not build.available()
    line = build.reason()
    assert "cannot be written" in line
    assert "SPARSEKIT_CACHE_DIR" in line
    assert "\n" not in line
    assert counted() == 0


def test_a_damaged_library_is_one_line_and_clean_repairs(sources, counted):
    path = build.info().path
    path.parent.mkdir(parents=True)
    path.write_bytes(b"not a library")
    assert build.cached()
    assert not build.available()
    assert "cannot be loaded" in build.reason()
    assert build.clean() == 1
    assert not build.cached()
    assert build.available() == has_compiler()


@pytest.mark.parametrize("size", [40, 64, 2000])
def test_a_library_without_its_end_is_built_anew(sources, counted, size):
    path = build.info().path
    path.parent.mkdir(parents=True)
    # The header of a library of 4096 bytes, whose table of 10 sections ends it.
    header = struct.pack("<5sB34xQ10x2H2x", b"\x7fELF\x02", 1, 4096 - 640, 64, 10)
    path.write_bytes(header.ljust(4096, b"\0"))
    assert build.cached()
    path.write_bytes(path.read_bytes()[:size])
    assert not build.cached()
    assert build.available() == has_compiler()
    assert build.cached() == has_compiler()


def test_info_and_clean(sources, counted):
    info = build.info()
    assert info.cache_dir == build.cache_dir()
    assert info.sources == ("tiny.cc",)
    assert (info.cached, info.bytes) == (False, 0)
    built = build.available()
    assert build.info().cached == built
    assert build.info().bytes > 0, "a library, or the log of a failed build"
    assert build.clean() == int(built)
    assert build.info().bytes == 0


def test_the_cache_is_the_users_own(monkeypatch):
    monkeypatch.delenv("SPARSEKIT_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    monkeypatch.setattr(sys, "platform", "linux")
    assert build.cache_dir() == Path("/somewhere/sparsekit")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert build.cache_dir() == Path.home() / "Library" / "Caches" / "sparsekit"


def test_two_processes_at_once_build_once(sources, counted, tmp_path):
    script = (
        "import pathlib, sys, time\n"
        "from sparsekit.engine import build\n"
        f"build._SOURCE_FOLDER = pathlib.Path({str(sources)!r})\n"
        f"open({str(tmp_path)!r} + '/ready-' + sys.argv[1], 'w').close()\n"
        f"while len(list(pathlib.Path({str(tmp_path)!r}).glob('ready-*'))) < 2: time.sleep(0.01)\n"
        "print(build.available(), build.reason())\n"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", script, name], stdout=subprocess.PIPE, text=True) for name in "ab"
    ]
    outputs = [process.communicate(timeout=300)[0].split("\n")[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    if has_compiler():
        assert outputs == ["True None"] * 2
        assert counted() == 1
    else:
        assert all(line.startswith("False the engine's build failed") for line in outputs)
    assert leftovers() == []


def test_verbose_prints_the_commands(sources, counted, capsys):
    with nullcontext() if has_compiler() else pytest.raises(EngineError):
        build.build(verbose=True)
    assert "tiny.cc" in capsys.readouterr().out
