"""Pictures of a pruned model: where the zeros are, one picture a kind of weight, and how sparse each weight is."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np

from sparsekit.errors import ArgumentError, FileError
from sparsekit.frozen import frozen_masks
from sparsekit.weights import WeightRef, prunable_weights

from .report import PRUNED, SKIPPED, Report, build_report

PANELS = 6
CELLS = 512


def write_plots(model: Any, folder: str | Path) -> list[Path]:
    """Write `sparsity.png` and one `zeros_<kind>.png` for each kind of weight (Conv2D kernel, Dense kernel, ...).

    Args:
        model: a built Keras model; without masks, every weight that can be pruned is drawn.
        folder: where to write; made if it does not exist.

    Returns:
        The files written.

    Raises:
        ArgumentError: if matplotlib is not installed.
        FileError: if the folder cannot be written.
    """
    _figure_class()
    folder = Path(folder)
    pictures = {"sparsity.png": draw_sparsity(build_report(model))}
    for kind, refs in kinds(model).items():
        pictures[f"zeros_{re.sub('[^a-z0-9]+', '_', kind.lower())}.png"] = draw_zeros(kind, refs)
    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, figure in pictures.items():
            figure.savefig(folder / name, dpi=110)
            written.append(folder / name)
    except OSError as error:
        raise FileError(f"'{folder}' cannot be written ({error.strerror}); give a folder that can.") from error
    return written


def kinds(model: Any) -> dict[str, list[WeightRef]]:
    """The masked weights (or all prunable ones, if there are no masks) by kind, such as `"Conv2D kernel"`."""
    refs = prunable_weights(model)
    frozen = frozen_masks(model)
    chosen = [ref for ref in refs if frozen.get(ref.variable) is not None] or refs
    groups: dict[str, list[WeightRef]] = {}
    for ref in chosen:
        layer = "" if ref.layer is None else f"{type(ref.layer).__name__} "
        groups.setdefault(layer + ref.role, []).append(ref)
    return groups


def kept_share(weight: np.ndarray, out_axis: int) -> np.ndarray:
    """A weight as a picture: rows = inputs, columns = outputs, each cell the share of it that is not zero.

    A weight of more than `CELLS` rows or columns is averaged over blocks, so that no zero is left out of the picture.

    Args:
        weight: array of rank 1 or more.
        out_axis: the axis that becomes the columns; the others are laid out below each other.

    Returns:
        float array in [0, 1] of at most `CELLS` x `CELLS`.
    """
    kept = np.moveaxis(weight != 0, out_axis, -1)
    kept = kept.reshape(-1, kept.shape[-1]).astype(np.float64)
    for axis in (0, 1):
        starts = np.arange(0, kept.shape[axis], _block(kept.shape[axis]))
        widths = np.expand_dims(np.diff(starts, append=kept.shape[axis]), 1 - axis)
        kept = np.add.reduceat(kept, starts, axis=axis) / widths
    return kept


def _block(size: int) -> int:
    """How many rows or columns share a cell, the same for all cells: shades then mean the same everywhere."""
    return max(1, math.ceil(size / CELLS))


def axis_names(ref: WeightRef) -> tuple[str, str]:
    """What the columns and the rows of a weight's picture are; rows that run over several axes give their lengths."""
    others = [size for axis, size in enumerate(ref.shape) if axis != ref.out_axis]
    rows = f"({'×'.join(map(str, others))} = {math.prod(others)} rows)"
    if ref.in_axis == ref.out_axis:
        return "channel", f"position in the kernel\n{rows}"
    if len(others) == 1:
        return "output", "input"
    if "Conv" in type(ref.layer).__name__:
        return "output channel", f"kernel position × input channel\n{rows}"
    return f"axis {ref.out_axis} of the weight", f"its other axes\n{rows}"


def draw_zeros(kind: str, refs: list[WeightRef]) -> Any:
    """One panel a weight (the largest `PANELS` of them): dark = kept, white = zero."""
    largest = sorted(refs, key=lambda ref: -ref.size)[:PANELS]
    shown = [ref for ref in refs if ref in largest]
    columns = min(len(shown), 3)
    rows = math.ceil(len(shown) / columns)
    shares = [kept_share(ref.numpy(), ref.out_axis) for ref in shown]
    brightest = max(float(share.max()) for share in shares) or 1.0
    from matplotlib.ticker import MaxNLocator

    figure = _figure_class()(figsize=(4.2 * columns + 0.8, 4.6 * rows + 0.6), layout="constrained")
    for index, (ref, share) in enumerate(zip(shown, shares, strict=True)):
        axes = figure.add_subplot(rows, columns, index + 1)
        weight = ref.numpy()
        # Whole numbers in the middle of a cell, counted from 0, however many cells the picture has.
        height, width = weight.size // weight.shape[ref.out_axis], weight.shape[ref.out_axis]
        extent = (-0.5, width - 0.5, height - 0.5, -0.5)
        shading = axes.imshow(
            share, cmap="Blues", vmin=0, vmax=brightest, extent=extent, aspect="auto", interpolation="nearest"
        )
        zeros = 1 - np.count_nonzero(weight) / weight.size
        block = f", {_block(height)}×{_block(width)} weights a cell" if max(height, width) > CELLS else ""
        size = "×".join(map(str, ref.shape))
        axes.set_title(f"{_short(ref.path)}\n{size}, {100 * zeros:.1f} % zeros{block}", fontsize=10)
        # A weight of few columns is narrow, as far as that leaves its cells to be seen.
        axes.set_box_aspect(min(max(height / width, 0.4), 2.5))
        axes.xaxis.set_major_locator(MaxNLocator(nbins=4, integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        columns_are, rows_are = axis_names(ref)
        axes.set_xlabel(columns_are)
        axes.set_ylabel(rows_are)
        if index == len(shown) - 1:
            figure.colorbar(shading, ax=figure.axes, label="share of a cell's weights that is kept", shrink=0.7)
    more = f" (the {len(shown)} largest of {len(refs)})" if len(shown) < len(refs) else ""
    figure.suptitle(f"Where the zeros are: {kind}{more}", fontsize=12)
    return figure


def draw_sparsity(report: Report) -> Any:
    """One bar a weight: its share of zeros, and a line where its target is."""
    rows = [row for row in report.rows if row.status != SKIPPED]
    figure = _figure_class()(figsize=(8, 1.6 + 0.34 * max(len(rows), 1)), layout="constrained")
    axes = figure.add_subplot()
    places = np.arange(len(rows))
    colours = ["#2a6fb0" if row.status == PRUNED else "#b8c4d0" for row in rows]
    axes.barh(places, [100 * row.achieved for row in rows], color=colours, height=0.66)
    for place, row in zip(places, rows, strict=True):
        if row.target is not None:
            axes.plot([100 * row.target] * 2, [place - 0.42, place + 0.42], color="black", linewidth=1.5)
        axes.text(101, place, f"{row.size - row.zeros:,} of {row.size:,}", va="center", fontsize=8)
    axes.text(101, -0.85, "weights kept", va="center", fontsize=8, style="italic")
    axes.set_yticks(places, [_short(row.path) for row in rows], fontsize=8)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(0, 100)
    axes.set_xlabel("zeros, % (black line: target)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(f"{report.model}: sparsity of each weight", loc="left", fontsize=11)
    return figure


def _short(path: str) -> str:
    return path if len(path) <= 38 else "…" + path[-37:]


def _figure_class() -> Any:
    """matplotlib's Figure without pyplot: no window, no backend, no global state."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ArgumentError("Pictures need matplotlib; run `pip install 'sparsekit[demo]'`.") from error
    return Figure
