"""Compile the engine's C++ sources once with the machine's own compiler, cache the library per user, load it."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import shlex
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import tensorflow as tf

from sparsekit.errors import EngineError

_SOURCE_FOLDER = Path(__file__).resolve().parent
_COMPILERS = ("c++", "g++", "clang++")
# Eigen sits in TensorFlow's headers; its AVX-512 FP16 part does not compile with GCC 12, and none of it is used.
# The kernels name their multiply-adds through contraction; -std=c++17 alone would switch it off in GCC.
_FLAGS = (
    "-O3",
    "-fPIC",
    "-w",
    "-DNDEBUG",
    "-DEIGEN_DONT_VECTORIZE",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
)
_TIMEOUT_S = 900

_lock = threading.RLock()
_loaded: Any = None
_failures: dict[str, str] = {}


@dataclass(frozen=True)
class EngineInfo:
    """What the engine would use, or uses, on this machine.

    Args:
        cache_dir: folder that holds the compiled libraries.
        compiler: command of the compiler, None if there is none.
        compiler_version: first line the compiler prints about itself.
        tensorflow: version of the installed TensorFlow.
        sources: names of the C++ files that go into the library.
        path: the library's file for this machine, None without a compiler.
        cached: whether that file exists.
        bytes: size of all files in the cache.
        reason: one line that says why the engine cannot be used, None if nothing known is in the way.
    """

    cache_dir: Path
    compiler: str | None
    compiler_version: str | None
    tensorflow: str
    sources: tuple[str, ...]
    path: Path | None
    cached: bool
    bytes: int
    reason: str | None


def cache_dir() -> Path:
    """Folder of the compiled libraries: `SPARSEKIT_CACHE_DIR`, else the platform's per-user cache folder."""
    override = os.environ.get("SPARSEKIT_CACHE_DIR")
    if override:
        return Path(override)
    if not os.path.isabs(os.path.expanduser("~")):
        raise EngineError("the engine has no cache folder: no home folder is known; set SPARSEKIT_CACHE_DIR")
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "sparsekit"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local")) / "sparsekit"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sparsekit"


def compiler() -> tuple[str, ...] | None:
    """Command of the C++ compiler: `CXX` if it is set, else the first of c++, g++, clang++ on the path."""
    asked = os.environ.get("CXX")
    candidates = [shlex.split(asked)] if asked else [[name] for name in _COMPILERS]
    for command in candidates:
        if command and shutil.which(command[0]):
            return tuple(command)
    return None


def sources() -> tuple[Path, ...]:
    """The C++ files of the engine, in the order in which they are hashed and linked."""
    return tuple(sorted(_SOURCE_FOLDER.glob("*.cc")))


def cached() -> bool:
    """Whether the library for this machine, compiler, TensorFlow and source exists; builds nothing."""
    if _loaded is not None:
        return True
    try:
        return _exists(_library_path())
    except EngineError:
        return False


def available() -> bool:
    """Whether the engine's ops can be used; builds the library on first use, never raises (see `reason`)."""
    try:
        library()
    except EngineError:
        return False
    return True


def reason() -> str | None:
    """One line that says why the engine cannot be used, or None; builds nothing."""
    if _loaded is not None:
        return None
    try:
        return _obstacle()
    except EngineError as error:
        return str(error)


def library() -> Any:
    """Module that holds the engine's ops, built on first use.

    Raises:
        EngineError: no compiler, a failed build, or a cache that cannot be written; the text is one line.
    """
    global _loaded
    with _lock:
        if _loaded is None:
            path = _library_path()
            if path is None or not _exists(path):
                obstacle = _obstacle()
                if obstacle is not None:
                    raise EngineError(obstacle)
                path = build()
            try:
                _loaded = tf.load_op_library(str(path))
            except (tf.errors.OpError, OSError, RuntimeError) as error:
                line = (
                    f"the engine's library {path} cannot be loaded ({_first_line(str(error))}); "
                    "run `sparsekit engine --clean`, then `sparsekit engine --build`"
                )
                _failures[str(path)] = line
                raise EngineError(line) from error
        return _loaded


def build(verbose: bool = False) -> Path:
    """Compile the library into the cache, unless it is there already, and return its path.

    A failed build is remembered beside the libraries, so that no later process pays for it again; calling `build`
    tries again.

    Args:
        verbose: print the commands and the compiler's own output.

    Raises:
        EngineError: no compiler, a failed build, or a cache that cannot be written; the text is one line.
    """
    command = compiler()
    path = _library_path()
    if command is None or path is None:
        raise EngineError(_no_compiler())
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _file_lock(path.with_suffix(".lock")):
            if _exists(path):
                return path
            problem = _compile(command, path, verbose)
    except OSError as error:
        line = (
            f"the engine cannot be built: {path.parent} cannot be written ({error.strerror or error}); "
            "set SPARSEKIT_CACHE_DIR to a folder that can"
        )
        _failures[str(path)] = line
        raise EngineError(line) from error
    if problem is not None:
        raise EngineError(problem)
    _failures.pop(str(path), None)
    return path


def info() -> EngineInfo:
    """What `sparsekit engine --info` prints; builds nothing."""
    command, path, folder = compiler(), _library_path(), cache_dir()
    files = [file for file in folder.glob("engine-*") if file.is_file()] if folder.is_dir() else []
    return EngineInfo(
        cache_dir=folder,
        compiler=shlex.join(command) if command else None,
        compiler_version=_probe(command)[1] if command else None,
        tensorflow=tf.__version__,
        sources=tuple(source.name for source in sources()),
        path=path,
        cached=_exists(path),
        bytes=sum(file.stat().st_size for file in files),
        reason=reason(),
    )


def clean() -> int:
    """Delete every library and log from the cache and return how many libraries went; a loaded one stays in use."""
    folder = cache_dir()
    libraries = 0
    if folder.is_dir():
        for file in folder.glob("engine-*"):
            if file.is_dir():
                shutil.rmtree(file, ignore_errors=True)
            else:
                libraries += file.suffix == ".so"
                file.unlink(missing_ok=True)
    _failures.clear()
    return libraries


def _exists(path: Path | None) -> bool:
    # Unlike Path.is_file, this is False in a folder that may not be entered.
    return path is not None and os.path.isfile(path) and not _is_cut_off(path)


def _is_cut_off(path: Path) -> bool:
    """Whether a library lacks its end, as on a full disk: to load it would end the process, not raise an error."""
    try:
        with open(path, "rb") as file:
            head, size = file.read(64), os.fstat(file.fileno()).st_size
    except OSError:
        return False
    if head[:5] != b"\x7fELF\x02":
        return False
    if len(head) < 64:
        return True
    # The table of sections comes last.
    order = "<" if head[5] == 1 else ">"
    (table,) = struct.unpack_from(order + "Q", head, 40)
    entry, entries = struct.unpack_from(order + "HH", head, 58)
    return table + entry * entries > size


def _obstacle() -> str | None:
    path = _library_path()
    if path is None:
        return _no_compiler()
    if str(path) in _failures:
        return _failures[str(path)]
    if _exists(path):
        return None
    log = path.with_suffix(".log")
    if _exists(log):
        return _failed(log)
    return None


def _no_compiler() -> str:
    asked = os.environ.get("CXX")
    missing = f"CXX={asked} is not a program" if asked else f"none of {', '.join(_COMPILERS)} is on the path"
    return f"the engine cannot be built: {missing}; install a C++17 compiler or set CXX"


def _failed(log: Path) -> str:
    first = next(
        (line for line in log.read_text(errors="replace").splitlines() if "error" in line.lower()),
        "no error line",
    )
    return (
        f"the engine's build failed ({_first_line(first)}); the whole log is {log}; "
        "run `sparsekit engine --build` to try again"
    )


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0][:300]


def _library_path() -> Path | None:
    command = compiler()
    if command is None:
        return None
    digest = hashlib.sha256()
    for source in (*sources(), *sorted(_SOURCE_FOLDER.glob("*.h"))):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    tuning, version, machine = _probe(command)
    parts = (tf.__version__, tf.version.GIT_VERSION, *_tensorflow_flags(), *_FLAGS, *tuning, version, machine)
    digest.update("\0".join(parts).encode())
    return cache_dir() / f"engine-{digest.hexdigest()[:24]}.so"


@lru_cache(maxsize=1)
def _tensorflow_flags() -> tuple[str, ...]:
    return (*tf.sysconfig.get_compile_flags(), *tf.sysconfig.get_link_flags())


def _tunings(machine: str) -> tuple[tuple[str, ...], ...]:
    """Flags to try, the best first, that ask for all this CPU can do; a compiler that knows neither builds portably."""
    architecture, cpu = ("-march=native",), ("-mcpu=native",)
    # On ARM -march=native leaves the scheduling of older compilers generic; on x86 -mcpu=native is about nothing else.
    return (cpu, architecture, ()) if machine.lower() in ("aarch64", "arm64") else (architecture, cpu, ())


@lru_cache(maxsize=8)
def _probe(command: tuple[str, ...]) -> tuple[tuple[str, ...], str, str]:
    """Tuning flags the compiler takes, its version line, a digest of the macros it then defines for this CPU."""
    _, version = _output_of([*command, "--version"])
    for tuning in _tunings(platform.machine()):
        understood, macros = _output_of([*command, *tuning, "-dM", "-E", "-x", "c++", os.devnull])
        if understood:
            return tuning, _first_line(version), hashlib.sha256(macros.encode()).hexdigest()
    return (), _first_line(version), "unknown"


def _output_of(command: list[str]) -> tuple[bool, str]:
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=60)
    except (OSError, subprocess.SubprocessError):
        return False, ""
    return done.returncode == 0, done.stdout


def _compile(command: tuple[str, ...], path: Path, verbose: bool) -> str | None:
    """Compile and link in a folder beside `path`, then rename: a killed build leaves no half-written library."""
    log = path.with_suffix(".log")
    log.unlink(missing_ok=True)
    tuning, _, _ = _probe(command)
    folder = Path(tempfile.mkdtemp(prefix="engine-tmp-", dir=path.parent))
    try:
        # One compiler a file, all at once: TensorFlow's headers, not our code, are what takes the time.
        objects = [folder / f"{source.stem}.o" for source in sources()]
        steps = [
            [*command, *tf.sysconfig.get_compile_flags(), *_FLAGS, *tuning, "-c", str(source), "-o", str(out)]
            for source, out in zip(sources(), objects, strict=True)
        ]
        target = folder / path.name
        link = [*command, "-shared", *map(str, objects), *tf.sysconfig.get_link_flags(), "-o", str(target)]
        output = ""
        for group in (steps, [link]):
            output, failed = _run_together(group, verbose)
            if failed:
                _write_log(log, output)
                return _failed(log)
        with open(target, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(target, path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return None


def _run_together(steps: list[list[str]], verbose: bool) -> tuple[str, bool]:
    if verbose:
        print("\n".join(shlex.join(step) for step in steps), flush=True)
    try:
        running = [
            subprocess.Popen(step, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
            for step in steps
        ]
    except OSError as error:
        return f"error: {steps[0][0]} cannot be started ({error.strerror or error})\n", True
    output, failed = [], False
    try:
        for step, process in zip(steps, running, strict=True):
            text, _ = process.communicate(timeout=_TIMEOUT_S)
            if process.returncode != 0:
                failed = True
                text += f"\n{step[0]} ended with an error: exit status {process.returncode}\n"
            output.append(text)
    except subprocess.TimeoutExpired:
        output.append(f"error: the compiler did not end within {_TIMEOUT_S} seconds\n")
        failed = True
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()
                process.wait()
    text = "".join(output)
    if verbose and text:
        print(text, flush=True)
    return text, failed


def _write_log(log: Path, text: str) -> None:
    partial = log.with_suffix(".partial")
    partial.write_text(text)
    os.replace(partial, log)


@contextlib.contextmanager
def _file_lock(path: Path) -> Iterator[None]:
    """Hold an advisory lock; the second of two processes waits and then finds the first one's library."""
    import fcntl  # not on Windows, where TensorFlow has no custom ops either

    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)
