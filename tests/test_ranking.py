"""Finding the lowest scores: always what a stable sort of all of them would give."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from sparsekit import ranking
from sparsekit.errors import ArgumentError
from sparsekit.ranking import Scores, first, lowest, rank

CONTINUOUS = st.floats(-10, 10, width=32)
DISCRETE = st.sampled_from([0.0, -0.0, 1.0, 1.0, 2.0, -np.inf, float(np.finfo(np.float32).min)])
ARRAYS = st.one_of(
    hnp.arrays(np.float32, st.integers(0, 40), elements=CONTINUOUS),
    hnp.arrays(np.float32, st.integers(0, 40), elements=DISCRETE),
)
PARTS = st.lists(ARRAYS, min_size=1, max_size=5).filter(lambda arrays: sum(a.size for a in arrays))


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Many pieces and a sample that misses most scores, on arrays of a few dozen."""
    monkeypatch.setattr(ranking, "_PIECE", 4)
    monkeypatch.setattr(ranking, "_GROUP", 2)
    monkeypatch.setattr(ranking, "_SAMPLE", 12)


def reference(arrays, count):
    """Keep masks of a stable ascending sort of everything."""
    order = np.argsort(np.concatenate(arrays), kind="stable")
    keep = np.ones(order.size, bool)
    keep[order[:count]] = False
    return np.split(keep, np.cumsum([a.size for a in arrays])[:-1])


@given(PARTS, st.data())
def test_the_cuts_drop_what_a_stable_sort_drops_first(arrays, data):
    count = data.draw(st.integers(1, sum(a.size for a in arrays)))
    parts = [Scores.of(a) for a in arrays]
    for part, cut, expected in zip(parts, lowest(parts, count), reference(arrays, count), strict=True):
        assert np.array_equal(part.keep(cut), expected)
        assert cut.count == np.count_nonzero(~expected)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(
    "values",
    [
        lambda g, n: g.normal(size=n),
        lambda g, n: g.integers(-3, 4, n),
        lambda g, n: np.where(g.random(n) < 0.9, 0.0, g.normal(size=n)),
        lambda g, n: np.zeros(n),
        lambda g, n: np.arange(n) % 7,
        lambda g, n: np.sort(g.normal(size=n)),
        lambda g, n: np.where(np.arange(n) == n // 3, 1e30, 1e-30),
        lambda g, n: np.exp(15 * g.normal(size=n)),
    ],
    ids=["normal", "levels", "sparse", "zero", "periodic", "sorted", "outlier", "wide"],
)
def test_large_arrays_with_real_pieces_and_samples(monkeypatch, values, dtype):
    monkeypatch.undo()
    generator = np.random.default_rng(5)
    arrays = [np.abs(values(generator, n)).astype(dtype) for n in (700_000, 3, 1, 90_000)]
    total = sum(a.size for a in arrays)
    parts = [Scores.of(a) for a in arrays]
    for count in (1, total // 10, total // 2, total - 2, total):
        for part, cut, expected in zip(parts, lowest(parts, count), reference(arrays, count), strict=True):
            assert np.array_equal(part.keep(cut), expected)


def test_a_sample_that_misleads_does_no_harm():
    # Scores that a sample says nothing about: it sees the others only.
    array = np.arange(40, dtype=np.float32)

    def look(at):
        return array[at] if isinstance(at, slice) else np.full(len(at), 1e9, np.float32)

    part = Scores(40, lambda: look)
    assert np.array_equal(part.keep(lowest([part], 10)[0]), array >= 10)


def test_scores_of_different_precision_rank_together():
    arrays = [np.array([0.1, 0.3], np.float32), np.array([0.1, 0.2])]
    cuts = lowest([Scores.of(a) for a in arrays], 2)
    # float32(0.1) is above 0.1.
    assert [cut.count for cut in cuts] == [1, 1]
    assert [cut.count for cut in lowest([Scores.of(a) for a in arrays], 1)] == [0, 1]


def test_nan_is_refused():
    with pytest.raises(ArgumentError, match="without NaN"):
        lowest([Scores.of(np.full(9, np.nan, np.float32))], 3)


@given(PARTS, st.data())
def test_floors_hold_and_the_others_make_up_for_them(arrays, data):
    floors = [data.draw(st.integers(0, a.size + 1)) for a in arrays]
    limits = [max(0, a.size - floor) for a, floor in zip(arrays, floors, strict=True)]
    count = data.draw(st.integers(0, sum(limits)))
    parts = [Scores.of(a) for a in arrays]
    cuts, held = rank(parts, count, floors)
    assert sum(cut.count for cut in cuts) == count
    assert all(cut.count <= limit for cut, limit in zip(cuts, limits, strict=True))
    assert all(cuts[i].count == limits[i] for i in held)
    free = [i for i in range(len(arrays)) if i not in held]
    expected = reference([arrays[i] for i in free], count - sum(limits[i] for i in held)) if free else []
    for i, keep in zip(free, expected, strict=True):
        assert cuts[i].count == np.count_nonzero(~keep)


def test_floors_that_leave_no_room_say_so():
    parts = [Scores.of(np.arange(4.0)), Scores.of(np.arange(6.0))]
    with pytest.raises(ArgumentError, match=r"8 of 10 weights cannot be dropped .* min_keep \(4 in all\); lower the"):
        rank(parts, 8, [2, 2])


@given(ARRAYS)
def test_nothing_dropped_keeps_all(array):
    finite = np.nan_to_num(array, neginf=-1)
    part = Scores.of(finite)
    assert part.keep(first(part, 0)).all()
