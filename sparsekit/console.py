"""What the command line shows: quiet libraries, progress, and a table of before and after."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import tempfile
import time
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from .errors import SparsekitWarning


def make_console(stderr: bool = False) -> Console:
    """A console that writes plain lines of full length where there is no terminal."""
    console = Console(stderr=stderr, highlight=False, soft_wrap=True)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 120
    return console


def import_tensorflow(debug: bool = False) -> None:
    """Import TensorFlow and Keras without their start-up messages; if that fails, show what they said.

    Args:
        debug: leave all messages on.
    """
    if debug:
        import tensorflow  # noqa: F401

        return
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    # TensorFlow's C++ side writes its first lines before it has read any log level, straight to the file descriptor.
    with _stderr_held_back():
        import tensorflow as tf

        from . import flavour  # noqa: F401
    tf.get_logger().setLevel(logging.ERROR)
    logging.getLogger("absl").setLevel(logging.ERROR)
    tf.autograph.set_verbosity(0)


@contextlib.contextmanager
def _stderr_held_back() -> Iterator[None]:
    try:
        descriptor = sys.stderr.fileno()
    except (OSError, ValueError, AttributeError):
        yield
        return
    sys.stderr.flush()
    saved = os.dup(descriptor)
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), descriptor)
        try:
            yield
        except BaseException:
            held.seek(0)
            os.write(saved, held.read())
            raise
        finally:
            os.dup2(saved, descriptor)
            os.close(saved)


@contextlib.contextmanager
def plain_warnings(console: Console, debug: bool = False) -> Iterator[None]:
    """Show sparsekit's own warnings as one line each and leave out those of the libraries below.

    Args:
        console: where to write them.
        debug: show all, with their place in the code.
    """

    def show(message: Any, category: type[Warning], *_: Any, **__: Any) -> None:
        if issubclass(category, SparsekitWarning):
            console.print(Text(f"note: {message}"), style="yellow")

    with warnings.catch_warnings():
        if not debug:
            warnings.simplefilter("ignore")
            warnings.simplefilter("always", SparsekitWarning)
            warnings.showwarning = show
        yield


@contextlib.contextmanager
def step(console: Console, what: str) -> Iterator[None]:
    """Say what is being done, with a spinner in a terminal, and how long it took."""
    start = time.perf_counter()
    if console.is_terminal:
        with console.status(what):
            yield
    else:
        yield
    console.print(f"{what}: {time.perf_counter() - start:.1f} s")


def fit_progress(keras: Any, console: Console, epochs: int, what: str) -> Any:
    """A callback that shows a bar over the batches in a terminal, and one line an epoch everywhere.

    Its `seconds` holds the duration of each epoch.

    Args:
        keras: the Keras module of the model to be trained.
        console: where to write.
        epochs: number of epochs that fit was asked for.
        what: first word of each line.
    """

    class FitProgress(keras.callbacks.Callback):
        def __init__(self) -> None:
            super().__init__()
            self.seconds: list[float] = []
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                console=console,
                transient=True,
                disable=not console.is_terminal,
            )
            self._batches: int | None = None
            self._start = 0.0

        def on_train_begin(self, logs: Any = None) -> None:
            self._bar.start()
            self._task = self._bar.add_task(what, total=None)

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            total = (self.params or {}).get("steps") or self._batches
            self._bar.reset(self._task, total=total, description=f"{what}, epoch {epoch + 1} of {epochs}")
            self._start = time.perf_counter()

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self._batches = batch + 1
            self._bar.update(self._task, completed=batch + 1)

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.seconds.append(time.perf_counter() - self._start)
            numbers = "  ".join(f"{name} {float(value):.4f}" for name, value in (logs or {}).items())
            console.print(f"{what}, epoch {epoch + 1} of {epochs}: {self.seconds[-1]:.1f} s  {numbers}")

        def on_train_end(self, logs: Any = None) -> None:
            self._bar.stop()

        def close(self) -> None:
            """Give the terminal back after an error inside fit."""
            self._bar.stop()

    return FitProgress()


def comparison(columns: Sequence[str], rows: Mapping[str, Sequence[str]]) -> Table:
    """A table with one row a quantity and one column a stage."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    table.add_column("")
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for name, cells in rows.items():
        table.add_row(name, *cells)
    return table


def gzip_size(path: str | Path) -> int:
    """Size of a file after gzip -6, in bytes."""
    packer = zlib.compressobj(6, zlib.DEFLATED, 31)
    total = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            total += len(packer.compress(block))
    return total + len(packer.flush())
