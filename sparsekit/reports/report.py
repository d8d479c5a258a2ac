"""What a model holds, weight by weight: how sparse each one is, whether its zeros stayed, why one was left alone."""

from __future__ import annotations

import csv
import io
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sparsekit.errors import FileError, NothingToPruneError
from sparsekit.frozen import frozen_masks
from sparsekit.weights import WeightRef, all_weights, is_kernel, not_finite, survey

PRUNED, NO_MASK, SKIPPED = "pruned", "no mask", "skipped"
NOT_TRAINABLE, NOT_FLOATING = "not trainable", "not floating point"


@dataclass(frozen=True)
class WeightReport:
    """One row: one variable of the model.

    Args:
        path: the weight's path, for example `"dense/kernel"`.
        shape: its shape.
        size: number of positions.
        target: sparsity asked for, in [0, 1]; None if there was no target.
        achieved: fraction of positions that are exactly zero now, in [0, 1].
        zeros: number of positions that are exactly zero now.
        violations: number of positions that the mask holds at zero and that are not zero.
        status: `"pruned"` (has a mask), `"no mask"` (could have one) or `"skipped"`.
        reason: why it has no mask; empty for a pruned weight.
        not_finite: number of positions of a trainable weight that are NaN or infinite.
    """

    path: str
    shape: tuple[int, ...]
    size: int
    target: float | None
    achieved: float
    zeros: int
    violations: int
    status: str
    reason: str
    not_finite: int = 0


@dataclass(frozen=True, repr=False)
class Report:
    """All rows of one model; `str(report)` is a readable table.

    Args:
        model: name of the model.
        rows: one `WeightReport` a variable, in the order of the layers.
    """

    model: str
    rows: tuple[WeightReport, ...]

    def __iter__(self) -> Iterator[WeightReport]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def status(self) -> str:
        """`"not finite"` if a trainable weight is NaN or infinite, `"violated"` if a masked position is not zero,
        `"no masks"`, or `"ok"`."""
        if self.not_finite:
            return "not finite"
        if not self._with(PRUNED):
            return "no masks"
        return "violated" if self.violations else "ok"

    @property
    def counted(self) -> tuple[WeightReport, ...]:
        """The rows behind the totals: the masked weights, or, if no weight has a mask, all that could have one."""
        return self._with(PRUNED) or self._with(NO_MASK)

    @property
    def size(self) -> int:
        return sum(row.size for row in self.counted)

    @property
    def zeros(self) -> int:
        return sum(row.zeros for row in self.counted)

    @property
    def sparsity(self) -> float:
        """Fraction of exact zeros in the masked weights, in [0, 1]; without masks, in those that could have one."""
        return self.zeros / self.size if self.size else 0.0

    @property
    def overall_sparsity(self) -> float:
        """Fraction of exact zeros in all weights that have a mask or could have one, in [0, 1]."""
        rows = [row for row in self.rows if row.status != SKIPPED]
        size = sum(row.size for row in rows)
        return sum(row.zeros for row in rows) / size if size else 0.0

    @property
    def frozen_kernels(self) -> tuple[WeightReport, ...]:
        """The kernels that prune leaves alone for no other reason than that they are not trainable."""
        return tuple(
            row
            for row in self.rows
            if row.reason == NOT_TRAINABLE and len(row.shape) > 1 and is_kernel(row.path.rsplit("/", 1)[-1])
        )

    @property
    def kernel_sparsity(self) -> float:
        """As `overall_sparsity`, with the kernels that are not trainable counted in."""
        rows = [*(row for row in self.rows if row.status != SKIPPED), *self.frozen_kernels]
        size = sum(row.size for row in rows)
        return sum(row.zeros for row in rows) / size if size else 0.0

    @property
    def violations(self) -> int:
        """Number of positions in the whole model that a mask holds at zero and that are not zero."""
        return sum(row.violations for row in self.rows)

    @property
    def not_finite(self) -> int:
        """Number of positions of trainable weights that are NaN or infinite."""
        return sum(row.not_finite for row in self.rows)

    @property
    def parameters(self) -> int:
        """Number of positions in all variables of the model."""
        return sum(row.size for row in self.rows)

    @property
    def nonzero(self) -> int:
        """Number of positions in all variables of the model that are not zero."""
        return self.parameters - sum(row.zeros for row in self.rows)

    def _with(self, status: str) -> tuple[WeightReport, ...]:
        return tuple(row for row in self.rows if row.status == status)

    def to_dict(self) -> dict[str, Any]:
        """Totals and rows as plain Python values, ready for JSON."""
        names = ("model", "status", "sparsity", "zeros", "size", "violations", "not_finite", "parameters", "nonzero")
        rows = [asdict(row) | {"shape": list(row.shape)} for row in self.rows]
        return {name: getattr(self, name) for name in names} | {"rows": rows}

    def to_csv(self, path: str | os.PathLike[str] | None = None) -> str:
        """One line a weight, after a line of column names.

        Args:
            path: also write the text to this file, atomically.

        Returns:
            The text.
        """
        buffer = io.StringIO()
        writer = csv.writer(buffer, lineterminator="\n")
        names = [field.name for field in fields(WeightReport)]
        writer.writerow(names)
        for row in self.rows:
            values = asdict(row) | {
                "shape": "x".join(map(str, row.shape)),
                "target": "" if row.target is None else row.target,
            }
            writer.writerow([values[name] for name in names])
        if path is not None:
            write_text(path, buffer.getvalue())
        return buffer.getvalue()

    def table(self, width: int = 160) -> Table:
        """The weights that can be pruned, and the totals, for a caller's own rich console.

        Args:
            width: characters in a line; a path too long for what the numbers leave is broken at a slash.
        """
        masked = self._with(PRUNED)
        cells = [
            (
                row.path,
                "x".join(map(str, row.shape)),
                f"{row.size:,}",
                "" if row.target is None else percent(row.target),
                percent(row.achieved),
                f"{row.violations:,}" if row.status == PRUNED else "",
                "not finite" if row.not_finite else row.status,
            )
            for row in (*masked, *self._with(NO_MASK))
        ]
        total = f"{self.violations:,}" if masked else ""
        what = "all pruned" if masked else "all prunable"
        last = (what, "", f"{self.size:,}", "", percent(self.sparsity), total, self.status)
        names = ("weight", "shape", "size", "target", "sparsity", "violations", "status")
        taken = sum(max(map(len, column)) + 2 for column in list(zip(names, last, *cells, strict=True))[1:])
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
        for name in names:
            numeric = name not in ("weight", "status")
            table.add_column(name, justify="right" if numeric else "left", no_wrap=numeric, overflow="fold")
        for path, *rest in cells:
            table.add_row(Text(_broken(path, width - taken)), *rest)
        table.add_section()
        table.add_row(*last)
        return table

    def notes(self) -> list[str]:
        """One line for each reason why weights have no mask, after one on kernels that are not trainable."""
        frozen = self.frozen_kernels
        first = []
        if frozen:
            size = sum(row.size for row in frozen)
            total = size + sum(row.size for row in self.rows if row.status != SKIPPED)
            first = [
                f"note: {size:,} of {total:,} kernel values are in layers with trainable=False, which prune leaves "
                f"alone ({percent(self.kernel_sparsity)} zeros in all kernels); set layer.trainable = True before the "
                "prune to take them along"
            ]
        return first + [
            f"{status}: {reason}: {len(rows)} {'variable' if len(rows) == 1 else 'variables'} "
            f"({sum(row.size for row in rows):,} values)"
            for status in (NO_MASK, SKIPPED)
            for reason, rows in _by_reason(self._with(status)).items()
            if reason
        ]

    def _headline(self) -> str:
        if self.not_finite:
            return f"{self.not_finite:,} values are NaN or infinite"
        if not self._with(PRUNED):
            return "no masks"
        masked = len(self._with(PRUNED))
        text = f"{masked} masked {'weight' if masked == 1 else 'weights'}, {percent(self.sparsity)} zeros"
        return f"{text}, {self.violations:,} VIOLATIONS" if self.violations else f"{text}, no violations"

    def __str__(self) -> str:
        # A terminal sets the width; a file or a pipe takes all it needs.
        width = max(80, shutil.get_terminal_size(fallback=(160, 24)).columns)
        return "\n".join((f"{self.model}: {self._headline()}", "", plain(self.table(width), width), "", *self.notes()))

    __repr__ = __str__


def build_report(model: Any) -> Report:
    """Look at every variable of a model.

    Args:
        model: a Keras model of either flavour, dense or pruned, built or not.

    Raises:
        ModelTypeError: if it is no Keras model.
    """
    try:
        refs = all_weights(model)
    except NothingToPruneError:
        return Report(model.name, ())
    frozen, broken = frozen_masks(model), not_finite(model)
    reasons = {skipped.ref.path: skipped.reason for skipped in survey(model, allow_empty=True)[1]}
    rows = []
    for ref in refs:
        mask, zeros = frozen.get(ref.variable), _zeros(ref)
        if mask is not None:
            status, reason = PRUNED, ""
        elif ref.path in reasons:
            status, reason = SKIPPED, reasons[ref.path]
        else:
            status, reason = NO_MASK, frozen.notes.get(ref.path, "left out of the prune" if len(frozen) else "")
        rows.append(
            WeightReport(
                path=ref.path,
                shape=ref.shape,
                size=ref.size,
                target=None if mask is None else mask.target,
                achieved=zeros / ref.size if ref.size else 0.0,
                zeros=zeros,
                violations=0 if mask is None else mask.violations(),
                status=status,
                reason=reason,
                not_finite=broken.get(ref.path, 0),
            )
        )
    return Report(model.name, tuple(rows))


def _zeros(ref: WeightRef) -> int:
    """Number of exact zeros; a variable that holds no numbers has none."""
    if not (tf.as_dtype(ref.variable.dtype).is_floating or tf.as_dtype(ref.variable.dtype).is_integer):
        return 0
    return ref.size - int(np.count_nonzero(ref.numpy()))


def percent(fraction: float) -> str:
    """A fraction as a percentage that never rounds to a full 0 or 100."""
    text = f"{100 * fraction:.2f}"
    if text == "100.00" and fraction < 1:
        text = "99.99+"
    if text == "0.00" and fraction > 0:
        text = "<0.01"
    return f"{text} %"


def plain(table: Table, width: int) -> str:
    """Text of a rich table without colour codes."""
    buffer = io.StringIO()
    Console(file=buffer, width=width, color_system=None, force_terminal=False).print(table)
    return "\n".join(line.rstrip() for line in buffer.getvalue().rstrip().splitlines())


def _broken(path: str, width: int) -> str:
    """A path on as few lines of this width as its slashes allow."""
    lines = [""]
    for part in path.replace("/", "/\0").split("\0"):
        if lines[-1] and len(lines[-1] + part) > width:
            lines.append("  ")
        lines[-1] += part
    return "\n".join(lines)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a whole file or none of it.

    Raises:
        FileError: if the place cannot be written.
    """
    target = Path(path)
    temporary = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, target)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise FileError(f"'{target}' cannot be written ({error.strerror}); give a path that can.") from error


def _by_reason(rows: Iterable[WeightReport]) -> dict[str, list[WeightReport]]:
    groups: dict[str, list[WeightReport]] = {}
    for row in rows:
        groups.setdefault(row.reason, []).append(row)
    return groups
