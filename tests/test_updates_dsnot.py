"""Mask swaps: as many zeros as before, dense values at the kept positions, and errors that never rise."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from models import KERAS, both, values

import sparsekit
from sparsekit.errors import ArgumentError
from sparsekit.frozen import attach, frozen_masks
from sparsekit.masks import Mask, MaskSet
from sparsekit.updates import reconstruct
from sparsekit.updates.mask_swaps import swap_masks

_RNG = np.random.default_rng(5)
# Inputs that vary little around means of their own: what a prune takes from the means, swaps can bring back.
ROWS = (_RNG.uniform(0.5, 2, 24) + 0.1 * _RNG.normal(size=(120, 24))).astype("float32")
IMAGES = (_RNG.uniform(0.5, 2, (1, 1, 1, 5)) + 0.1 * _RNG.normal(size=(40, 6, 6, 5))).astype("float32")


def dense_model(flavour: str) -> Any:
    k = KERAS[flavour]
    k.utils.set_random_seed(2)
    return k.Sequential([k.layers.Input((24,)), k.layers.Dense(12, "relu"), k.layers.Dense(7)])


def conv_model(flavour: str) -> Any:
    k = KERAS[flavour]
    k.utils.set_random_seed(2)
    layers = [k.layers.Conv2D(8, 3, activation="relu"), k.layers.Flatten(), k.layers.Dense(4)]
    return k.Sequential([k.layers.Input((6, 6, 5)), *layers])


cases = pytest.mark.parametrize(("make", "data"), [(dense_model, ROWS), (conv_model, IMAGES)])


def swaps_in_loops(
    dense: np.ndarray, keep: np.ndarray, mean: np.ndarray, square: np.ndarray, max_cycles: int
) -> np.ndarray:
    keep = keep.copy()
    variance = square - mean**2
    for unit in range(dense.shape[1]):
        part = dense[:, unit] * mean
        for _ in range(max_cycles):
            error = sum(part[i] for i in range(len(part)) if not keep[i, unit])
            if abs(error) <= 1e-3 * sum(abs(part)):
                break
            grow = [i for i in range(len(part)) if not keep[i, unit] and part[i] * error > 0]
            drop = [i for i in range(len(part)) if keep[i, unit] and part[i] * error < 0]
            if not grow or not drop:
                break
            grown = max(grow, key=lambda i: abs(part[i]) / variance[i])
            dropped = min(drop, key=lambda i: abs(dense[i, unit]) * np.sqrt(square[i]))
            if abs(error - part[grown] + part[dropped]) >= abs(error):
                break
            keep[grown, unit], keep[dropped, unit] = True, False
    return keep


@pytest.mark.parametrize("max_cycles", [1, 3, 50])
def test_swaps_are_those_of_plain_loops(max_cycles):
    rng = np.random.default_rng(max_cycles)
    dense, keep = rng.normal(size=(14, 9)), rng.random((14, 9)) < 0.5
    mean = rng.normal(size=14)
    square = mean**2 + rng.uniform(0.1, 2, 14)
    found = swap_masks(dense, keep, mean, square, max_cycles)
    np.testing.assert_array_equal(found, swaps_in_loops(dense, keep, mean, square, max_cycles))
    assert (found != keep).any()
    np.testing.assert_array_equal(found.sum(axis=0), keep.sum(axis=0))
    lacking = [np.abs(np.where(mask, 0, dense * mean[:, None]).sum(axis=0)) for mask in (found, keep)]
    assert (lacking[0] <= lacking[1]).all()
    assert lacking[0].sum() < lacking[1].sum()
    assert (found != keep).sum(axis=0).max() <= 2 * max_cycles


def test_one_swap_by_hand():
    # Dropped: 2 * 1 and -1 * 1, so the output lacks 1. Growing 2 and dropping -0.5 leaves 1 - 2 - 0.5 = -1.5: no swap.
    dense, mean, square = np.array([[2.0], [-1.0], [-0.5], [3.0]]), np.ones(4), np.full(4, 2.0)
    keep = np.array([[False], [False], [True], [True]])
    np.testing.assert_array_equal(swap_masks(dense, keep, mean, square), keep)
    # With 0.9 in place of 2 and 0.05 in place of -1 it lacks 0.95, and 0.95 - 0.9 - 0.5 = -0.45 is less.
    dense[:2, 0] = 0.9, 0.05
    np.testing.assert_array_equal(swap_masks(dense, keep, mean, square, 1)[:, 0], [True, False, False, True])


def test_inputs_that_are_always_zero_or_constant_make_no_harm():
    dense = np.array([[0.5], [1.0], [-0.4], [1.0]])
    keep = np.array([[False], [False], [True], [True]])
    mean = np.array([1.0, 0.0, 1.0, 0.0])
    # The constant input of 0.5 and -0.4: 0.5 - 0.5 - 0.4 = -0.4 is the smaller error.
    np.testing.assert_array_equal(swap_masks(dense, keep, mean, mean**2, 1)[:, 0], [True, False, False, True])
    np.testing.assert_array_equal(swap_masks(dense, keep, 0 * mean, 0 * mean), keep)


@both
@cases
def test_counts_stay_values_are_dense_and_errors_fall(flavour, make, data):
    model = make(flavour)
    dense = values(model)
    sparsekit.prune(model, 0.6)
    variables = {frozen.path: frozen.keep for frozen in frozen_masks(model)}
    before = sparsekit.masks_of(model)
    result = reconstruct(model, (data, None), method="dsnot", batch_norm=False)
    masks, now = sparsekit.masks_of(model), values(model)
    assert result.rows[0].error_after < 0.5 * result.rows[0].error_before
    assert all(row.error_after <= row.error_before for row in result.rows)
    assert result.rows[0].path in result.changed
    for path, value in now.items():
        if path not in masks:
            np.testing.assert_array_equal(value, dense[path])
            continue
        assert (
            frozen_masks(model).get(next(f.variable for f in frozen_masks(model) if f.path == path)).keep
            is (variables[path])
        )
        units = tuple(range(value.ndim - 1))
        np.testing.assert_array_equal(masks[path].sum(axis=units), before[path].sum(axis=units))
        np.testing.assert_array_equal(value, np.where(masks[path], dense[path], 0))
        assert np.count_nonzero(value) == np.count_nonzero(before[path])
        assert (masks[path] != before[path]).any() == (path in result.changed)
    assert all(frozen.keep is variables[frozen.path] for frozen in frozen_masks(model))
    assert not frozen_masks(model).violations()


@both
@cases
def test_the_whole_model_comes_nearer_to_the_dense_one(flavour, make, data):
    model = make(flavour)
    wanted = np.asarray(model(data))
    sparsekit.prune(model, 0.6)
    start = np.sum((np.asarray(model(data)) - wanted) ** 2)
    result = reconstruct(model, data, method="dsnot")
    end = np.sum((np.asarray(model(data)) - wanted) ** 2)
    assert end < 0.5 * start
    assert result.rows[-1].error_after == pytest.approx(end / np.sum(wanted**2), rel=1e-3)


@both
def test_twice_the_same_and_training_keeps_the_new_zeros(flavour):
    models = [dense_model(flavour) for _ in range(2)]
    for model in models:
        sparsekit.prune(model, 0.6)
        reconstruct(model, ROWS, method="dsnot")
    one, two = (sparsekit.masks_of(model) for model in models)
    for mask, same in zip(one.values(), two.values(), strict=True):
        np.testing.assert_array_equal(mask, same)
    models[0].compile("adam", "mse")
    sparsekit.retrain(models[0], (ROWS, ROWS[:, :7]), epochs=1, verbose=0)
    for path in one:
        assert (values(models[0])[path][~one[path]] == 0).all()


def test_units_whose_squared_error_would_rise_keep_their_masks():
    """All dropped weights are smaller than all kept ones: each swap helps the mean and adds more to the variance."""
    model = dense_model("keras")
    dense = values(model)
    sparsekit.prune(model, 0.6, scope="layer")
    before, masks = values(model), sparsekit.masks_of(model)
    data = np.concatenate([1.1 * np.eye(24), -np.eye(24)]).astype("float32")
    result = reconstruct(model, data, method="dsnot")
    path = result.rows[0].path
    swapped = swap_masks(dense[path], masks[path], data.mean(axis=0), np.square(data).mean(axis=0))
    assert (swapped != masks[path]).any()
    assert result.rows[0].status == "kept"
    np.testing.assert_array_equal(values(model)[path], before[path])
    np.testing.assert_array_equal(sparsekit.masks_of(model)[path], masks[path])


@both
def test_each_unit_is_judged_for_itself(flavour):
    """The first unit sees inputs with means, the second one inputs that hardly have any: only the first one swaps."""
    k = KERAS[flavour]
    data = np.hstack([ROWS[:24, :12], np.concatenate([1.1 * np.eye(12), -np.eye(12)])]).astype("float32")
    weights = np.zeros((24, 2), "float32")
    weights[:12, 0] = weights[12:, 1] = np.random.default_rng(1).normal(size=12)
    keep = np.abs(weights) > np.median(np.abs(weights[:12, 0]))
    model = k.Sequential([k.layers.Input((24,)), k.layers.Dense(2, use_bias=False)])
    model.set_weights([weights])
    (path,) = values(model)
    attach(model, MaskSet([Mask(path, keep)]))
    swapped = swap_masks(weights, keep, data.mean(axis=0), np.square(data).mean(axis=0))
    assert (swapped != keep).any(axis=0).all()
    assert reconstruct(model, data, method="dsnot", reference=[weights]).changed == (path,)
    after = sparsekit.masks_of(model)[path]
    np.testing.assert_array_equal((after != keep).any(axis=0), [True, False])
    np.testing.assert_array_equal(values(model)[path], np.where(after, weights, 0))


def test_a_swap_that_makes_the_layer_worse_is_put_back(monkeypatch):
    model = dense_model("keras")
    sparsekit.prune(model, 0.6)
    before, masks = values(model), sparsekit.masks_of(model)

    def wrong_swaps(self, gram, residual):
        _, keep = self.values()
        moved = np.roll(keep, 1, axis=0)
        return np.where(moved, -5 * self.dense, 0.0), moved

    monkeypatch.setattr("sparsekit.updates.reconstruction._MaskSwaps.swaps", wrong_swaps)
    result = reconstruct(model, ROWS, method="dsnot")
    assert not result.changed
    for path in masks:
        np.testing.assert_array_equal(values(model)[path], before[path])
        np.testing.assert_array_equal(sparsekit.masks_of(model)[path], masks[path])


def test_masks_with_a_structure_are_skipped_or_refused():
    model = dense_model("keras")
    dense = model.get_weights()
    first, second = (path for path in values(model) if path.endswith("kernel"))
    keep = np.tile([[True], [True], [False], [False]], (6, 12))
    attach(model, MaskSet([Mask(first, keep, "2:4")]))
    before = values(model)
    message = r"method='dsnot' swaps positions in frozen masks without a structure, and no selected weight of '.*' has"
    with pytest.raises(ArgumentError, match=message):
        reconstruct(model, ROWS, method="dsnot", reference=dense)
    for path, value in values(model).items():
        np.testing.assert_array_equal(value, before[path])
    sparsekit.prune(model, 0.5, include=second)
    rows = {row.path: row for row in reconstruct(model, ROWS, method="dsnot", reference=dense).rows}
    assert rows[first].status == "skipped"
    assert rows[first].reason == "swaps would break its 2:4 pattern"
    partly = reconstruct(model, ROWS, method="dsnot", reference={first: dense[0]}).rows
    assert "its dense values are not in the reference" in {row.reason for row in partly}
    with pytest.raises(ArgumentError, match=r"max_cycles=0 must be a whole number >= 1"):
        reconstruct(model, ROWS, method="dsnot", max_cycles=0)
