"""The report counts what is there, for any model."""

from __future__ import annotations

import csv
import io
import json

import numpy as np
import pytest
from models import KERAS, both

import sparsekit
from sparsekit.errors import FileError, ModelTypeError
from sparsekit.reports.plots import draw_sparsity, draw_zeros, kept_share, kinds, write_plots
from sparsekit.reports.report import Report, WeightReport, percent


def network(flavour: str):
    layers = KERAS[flavour].layers
    return KERAS[flavour].Sequential(
        [
            layers.Input((8, 8, 1)),
            layers.Conv2D(4, 3, name="conv"),
            layers.BatchNormalization(name="norm"),
            layers.Flatten(),
            layers.Dense(10, name="dense"),
        ]
    )


def rows_by_end(report: Report) -> dict[str, WeightReport]:
    return {"/".join(row.path.split("/")[-2:]): row for row in report.rows}


@both
def test_pruned_model(flavour):
    model = sparsekit.prune(network(flavour), 0.75, exclude="Dense")
    report = sparsekit.report(model)
    rows = rows_by_end(report)

    conv, dense = rows["conv/kernel"], rows["dense/kernel"]
    assert (conv.shape, conv.size, conv.zeros, conv.target) == ((3, 3, 1, 4), 36, 27, 0.75)
    assert (conv.achieved, conv.violations, conv.status, conv.reason) == (0.75, 0, "pruned", "")
    assert (dense.status, dense.target, dense.zeros) == ("no mask", None, 0)
    assert dense.reason
    assert (rows["norm/gamma"].status, rows["norm/gamma"].reason) == ("skipped", "bias, scale or statistic")
    assert rows["norm/moving_mean"].reason == "not trainable"
    assert report.status == "ok"
    assert report.sparsity == 27 / 36
    assert report.overall_sparsity == 27 / (36 + 6 * 6 * 4 * 10)
    assert report.parameters == sum(int(np.prod(w.shape)) for w in model.weights)
    assert report.nonzero == sum(int(np.count_nonzero(w.numpy())) for w in model.weights)
    assert [row.path for row in report] == [row.path for row in report.rows]
    assert len(report) == len(model.weights)


@both
def test_violations_are_counted(flavour):
    model = sparsekit.prune(network(flavour), 0.5)
    keep = next(iter(sparsekit.masks_of(model).values()))
    kernel = model.layers[0].kernel
    kernel.assign(np.where(keep, kernel.numpy(), 7.0))
    report = sparsekit.report(model)
    assert report.violations == 18
    assert rows_by_end(report)["conv/kernel"].violations == 18
    assert report.status == "violated"
    assert "18 VIOLATIONS" in str(report)


@both
def test_dense_model_reports_zero_and_no_masks(flavour):
    report = sparsekit.report(network(flavour))
    assert (report.status, report.sparsity, report.violations) == ("no masks", 0.0, 0)
    assert "no masks" in str(report)
    assert {row.status for row in report.rows} == {"no mask", "skipped"}


@both
def test_models_without_weights_to_prune_are_no_error(flavour):
    k = KERAS[flavour]
    unbuilt = k.Sequential([k.layers.Dense(3)])
    empty = k.Sequential([k.layers.Input((3,)), k.layers.ReLU()])
    scales = k.Sequential([k.layers.Input((3,)), k.layers.BatchNormalization()])
    for model, rows in ((unbuilt, 0), (empty, 0), (scales, 4)):
        report = sparsekit.report(model)
        assert (report.status, report.sparsity, len(report)) == ("no masks", 0.0, rows)
        assert "no masks" in str(report)


@both
def test_zeros_that_were_not_pruned_have_a_reason(flavour):
    k = KERAS[flavour]
    model = k.Sequential(
        [k.layers.Input((4,)), k.layers.Embedding(5, 3, name="words"), k.layers.Flatten(name="flat"),
         k.layers.Dense(2, name="out"), k.layers.Dense(2, name="new", kernel_initializer="zeros")]
    )  # fmt: skip
    words, out = model.get_layer("words").embeddings, model.get_layer("out").kernel
    words.assign(np.where(np.arange(5)[:, None] == 0, 0.0, words.numpy()))
    out.assign(np.where(np.arange(24).reshape(12, 2) % 4 == 0, 0.0, out.numpy()))
    sparsekit.freeze(model)
    rows = rows_by_end(sparsekit.report(model))
    assert (rows["out/kernel"].status, rows["out/kernel"].zeros, rows["out/kernel"].target) == ("pruned", 6, None)
    assert (rows["words/embeddings"].status, rows["words/embeddings"].zeros) == ("no mask", 3)
    assert "padding" in rows["words/embeddings"].reason
    assert "never trained" in rows["new/kernel"].reason
    assert "no mask: zero everywhere" in str(sparsekit.report(model))


def test_no_model_is_a_type_error():
    with pytest.raises(ModelTypeError, match=r"sparsekit\.load"):
        sparsekit.report("model.h5")


def test_dict_and_csv_hold_the_same(tmp_path):
    report = sparsekit.report(sparsekit.prune(network("keras"), 0.75))
    as_dict = json.loads(json.dumps(report.to_dict()))
    text = report.to_csv(tmp_path / "report.csv")
    assert (tmp_path / "report.csv").read_text() == text
    lines = list(csv.DictReader(io.StringIO(text)))
    assert [line["path"] for line in lines] == [row["path"] for row in as_dict["rows"]]
    first = lines[0]
    assert (first["shape"], first["target"], first["zeros"], first["status"]) == ("3x3x1x4", "0.75", "27", "pruned")
    assert lines[1]["target"] == ""
    assert as_dict["violations"] == 0
    assert as_dict["sparsity"] == report.sparsity
    assert list(tmp_path.iterdir()) == [tmp_path / "report.csv"]


def test_csv_to_a_place_that_is_not_there(tmp_path):
    report = sparsekit.report(network("keras"))
    with pytest.raises(FileError, match="cannot be written"):
        report.to_csv(tmp_path / "no" / "report.csv")


@pytest.mark.parametrize("width", [80, 120])
def test_table_fits_the_terminal_and_loses_nothing(width, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    path = "encoder/block_17/separable_convolution/depthwise_kernel"
    row = WeightReport(path, (3, 3, 1024, 1), 9216, 0.9, 0.9, 8294, 0, "pruned", "")
    text = str(Report("a_long_model_name", (row,)))
    table = text[: text.index("all pruned")]
    assert max(map(len, text.splitlines())) <= width
    # A path that does not fit is broken at its slashes: pieces in the first column, in order.
    first_column = "".join(
        line[: line.find("  ", 2) if "3x3x" in line else None].strip() for line in table.splitlines()[4:]
    )
    assert first_column == path


def test_percent_never_rounds_to_all_or_nothing():
    assert percent(0.0) == "0.00 %"
    assert percent(1.0) == "100.00 %"
    assert percent(1e-7) == "<0.01 %"
    assert percent(1 - 1e-7) == "99.99+ %"
    assert percent(0.9) == "90.00 %"


def test_every_zero_is_in_the_picture():
    weight = np.ones((3, 3, 5, 7), np.float32)
    weight[0, 1, 2, 3] = 0.0
    share = kept_share(weight, out_axis=3)
    assert share.shape == (45, 7)
    assert np.argwhere(share == 0).tolist() == [[0 * 15 + 1 * 5 + 2, 3]]


def test_a_large_weight_is_averaged_over_blocks():
    weight = np.zeros((1000, 300), np.float32)
    weight[:, :150] = 1.0
    share = kept_share(weight, out_axis=1)
    # Two rows a cell, and the columns as they are.
    assert share.shape == (500, 300)
    assert np.array_equal(share, np.broadcast_to(np.arange(300) < 150, share.shape))
    weight[1::2] = 0.0
    assert np.array_equal(kept_share(weight, out_axis=1), share / 2)
    # What is left over makes a cell of its own.
    assert kept_share(weight[:999], out_axis=1)[-1, 0] == 1.0


@both
def test_one_picture_a_kind_of_weight(flavour, tmp_path):
    model = sparsekit.prune(network(flavour), 0.5)
    assert list(kinds(model)) == ["Conv2D kernel", "Dense kernel"]
    written = write_plots(model, tmp_path / "new" / "plots")
    assert [path.name for path in written] == ["sparsity.png", "zeros_conv2d_kernel.png", "zeros_dense_kernel.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)


def test_axes_count_cells_and_say_what_they_are():
    layers = KERAS["keras"].layers
    model = KERAS["keras"].Sequential(
        [
            layers.Input((8, 8, 10)),
            layers.DepthwiseConv2D(3, name="depth"),
            layers.Conv2D(3, 1, name="conv"),
            layers.Flatten(),
            layers.Dense(2, name="dense"),
        ]
    )
    sparsekit.prune(model, 0.5)
    expected = {
        "DepthwiseConv2D": ("channel", "position in the kernel\n(3×3×1 = 9 rows)", 9 / 10),
        "Conv2D": ("output channel", "kernel position × input channel\n(1×1×10 = 10 rows)", 2.5),
        "Dense": ("output", "input", 2.5),
    }
    for kind, refs in kinds(model).items():
        axes = draw_zeros(kind, refs).axes[0]
        columns, rows, aspect = expected[kind.split()[0]]
        assert (axes.get_xlabel(), axes.get_ylabel()) == (columns, rows)
        # Tall and narrow where there are few columns, within limits.
        assert axes.get_box_aspect() == aspect
        assert axes.images[0].get_extent()[:2] == [-0.5, refs[0].shape[refs[0].out_axis] - 0.5]
        assert all(float(tick).is_integer() for axis in (axes.xaxis, axes.yaxis) for tick in axis.get_majorticklocs())


@both
def test_kernels_of_layers_that_are_not_trainable(flavour):
    model = network(flavour)
    model.layers[0].trainable = False
    report = sparsekit.report(sparsekit.prune(model, 0.75))
    assert [row.path.split("/")[-2] for row in report.frozen_kernels] == ["conv"]
    assert report.kernel_sparsity == 0.75 * 1440 / (1440 + 36)
    assert "note: 36 of 1,476 kernel values are in layers with trainable=False" in str(report)
    model.layers[0].trainable = True
    assert "trainable=False" not in str(sparsekit.report(model))


def test_bars_are_as_long_as_the_sparsity():
    axes = draw_sparsity(sparsekit.report(sparsekit.prune(network("keras"), 0.75, exclude="Dense"))).axes[0]
    assert [bar.get_width() for bar in axes.patches] == [75.0, 0.0]
    assert [list(line.get_xdata()) for line in axes.lines] == [[75.0, 75.0]]


def test_pictures_into_a_file_are_refused(tmp_path):
    (tmp_path / "taken").write_text("")
    with pytest.raises(FileError, match="give a folder that can"):
        write_plots(network("keras"), tmp_path / "taken")
