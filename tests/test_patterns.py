"""Each pattern keeps the best scores that its structure allows, and exactly as many as asked."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from sparsekit.errors import ArgumentError
from sparsekit.patterns import Pattern, Unstructured, zeros_for
from sparsekit.registry import classes

SCORES = st.sampled_from([(8, 4), (12, 8), (3, 3, 4, 8), (16,), (1, 1), (1,)]).flatmap(
    lambda shape: hnp.arrays(np.float32, shape, elements=st.floats(-4, 4, width=32) | st.sampled_from([0.0, 1.0]))
)
DENSITIES = st.floats(0, 1)
each_pattern = pytest.mark.parametrize("pattern", [kind() for kind in classes(Pattern).values()], ids=lambda p: p.name)


def select(pattern, scores, density):
    """A selection, or None where the pattern refuses the shape."""
    try:
        pattern.check(scores.shape)
    except ArgumentError:
        return None
    return pattern.select(scores, density)


@each_pattern
@given(scores=SCORES, density=DENSITIES)
def test_contract(pattern, scores, density):
    before = scores.copy()
    keep = select(pattern, scores, density)
    assert np.array_equal(scores, before)
    if keep is None:
        return
    assert keep.shape == scores.shape
    assert keep.dtype == np.bool_
    assert np.array_equal(keep, pattern.select(scores, density))
    # Structure depends on the order of the scores alone.
    assert np.array_equal(keep, pattern.select(scores * np.float32(2), density))


@given(scores=SCORES, density=DENSITIES)
def test_unstructured_is_a_stable_sort(scores, density):
    keep = Unstructured().select(scores, density)
    zeros = round(round((1 - density) * scores.size, 6))
    order = np.argsort(scores.reshape(-1), kind="stable")
    assert np.array_equal(np.flatnonzero(~keep.reshape(-1)), np.sort(order[:zeros]))
    if 0 < zeros < scores.size:
        assert scores[keep].min() >= scores[~keep].max()


@given(scores=SCORES, densities=st.tuples(DENSITIES, DENSITIES))
def test_what_a_higher_density_drops_a_lower_one_drops_too(scores, densities):
    low, high = sorted(densities)
    less, more = (Unstructured().select(scores, density) for density in (low, high))
    assert not (less & ~more).any()


@pytest.mark.parametrize(
    "kernel", [np.full((4, 5), 3.0), np.sign(np.arange(20.0).reshape(4, 5) - 7.5), np.eye(4, 5)], ids=str
)
@pytest.mark.parametrize("zeros", range(21))
def test_kernels_of_few_values_lose_exactly_as_many_as_asked(kernel, zeros):
    keep = Unstructured().select(np.abs(kernel), 1 - zeros / 20)
    assert np.count_nonzero(~keep) == zeros


@pytest.mark.parametrize("density", [-0.1, 1.1, np.nan])
@each_pattern
def test_a_density_outside_of_0_and_1_is_refused(pattern, density):
    with pytest.raises(ArgumentError, match=r"density=.* must lie in \[0, 1\]"):
        pattern.select(np.ones((8, 8)), density)


@given(size=st.integers(0, 10**9), sparsity=st.floats(0, 1))
def test_the_number_of_zeros_is_within_a_half_of_the_target(size, sparsity):
    zeros = zeros_for(size, sparsity)
    assert 0 <= zeros <= size
    assert abs(zeros - sparsity * size) <= 0.5 + 1e-6
    if size:
        assert zeros_for(size, zeros / size) == zeros
        assert zeros_for(size, 1 - (size - zeros) / size) == zeros


@pytest.mark.parametrize(("size", "kept"), [(10, 0.3), (1000, 0.1), (15, 0.7), (5, 0.1), (45, 0.9)])
def test_sparsity_and_density_mean_the_same_count(size, kept):
    assert zeros_for(size, 1 - kept) == zeros_for(size, round(1 - kept, 10))
