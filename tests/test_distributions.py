"""Shares of an overall sparsity: within each weight's size, and together the whole."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsekit.distributions import Distribution, ErdosRenyiKernel, Uniform
from sparsekit.patterns import zeros_for
from sparsekit.registry import classes

SHAPES = st.lists(st.lists(st.integers(1, 64), min_size=1, max_size=4).map(tuple), min_size=1, max_size=6)
each_distribution = pytest.mark.parametrize(
    "distribution", [kind() for kind in classes(Distribution).values()], ids=lambda d: d.name
)


@each_distribution
@given(shapes=SHAPES, sparsity=st.floats(0, 1))
def test_contract(distribution, shapes, sparsity):
    sizes = [math.prod(shape) for shape in shapes]
    zeros = distribution.zeros(shapes, sparsity)
    assert len(zeros) == len(shapes)
    assert all(isinstance(count, int) and 0 <= count <= size for count, size in zip(zeros, sizes, strict=True))
    # Each weight rounds for itself.
    assert abs(sum(zeros) - zeros_for(sum(sizes), sparsity)) <= len(sizes) / 2 + 1
    assert zeros == distribution.zeros(shapes, sparsity)


@each_distribution
@given(shapes=SHAPES, sparsities=st.tuples(st.floats(0, 1), st.floats(0, 1)))
def test_a_higher_sparsity_gives_no_weight_fewer_zeros(distribution, shapes, sparsities):
    lower, higher = (distribution.zeros(shapes, sparsity) for sparsity in sorted(sparsities))
    assert all(a <= b for a, b in zip(lower, higher, strict=True))


@each_distribution
@given(shapes=SHAPES)
def test_the_ends(distribution, shapes):
    assert distribution.zeros(shapes, 0.0) == [0] * len(shapes)
    assert distribution.zeros(shapes, 1.0) == [math.prod(shape) for shape in shapes]


@given(shapes=SHAPES, sparsity=st.floats(0, 1))
def test_uniform_gives_each_weight_the_same_share(shapes, sparsity):
    for count, shape in zip(Uniform().zeros(shapes, sparsity), shapes, strict=True):
        assert abs(count - sparsity * math.prod(shape)) <= 0.5 + 1e-6


@given(shapes=SHAPES, sparsity=st.floats(0.01, 0.99))
def test_erk_densities_go_with_dimensions_over_size(shapes, sparsity):
    sizes = [math.prod(shape) for shape in shapes]
    kept = [size - zeros for size, zeros in zip(sizes, ErdosRenyiKernel().zeros(shapes, sparsity), strict=True)]
    # Of weights that are not dense, kept / sum(shape) is one number; a dense one would have asked for as much.
    ratios = [
        ((count - 0.5) / sum(shape), (count + 0.5) / sum(shape)) for count, shape in zip(kept, shapes, strict=True)
    ]
    sparse = [ratio for ratio, count, size in zip(ratios, kept, sizes, strict=True) if count < size]
    for low, _ in ratios:
        assert all(low <= high + 1e-6 for _, high in sparse)


def test_erk_by_hand():
    # Raw densities (10 + 10) / 100 = 0.2 and (2 + 2) / 4 = 1; 52 of 104 are kept, so the factor that solves
    # 20 f + 4 f = 52 is 2.17 and would keep 8.7 of 4: the small one stays dense, the large one keeps 52 - 4 = 48.
    assert ErdosRenyiKernel().zeros([(10, 10), (2, 2)], 0.5) == [100 - 48, 0]
    # 10 of 104: 20 f + 4 f = 10, f = 0.4167, kept 8.33 and 1.67.
    assert ErdosRenyiKernel().zeros([(10, 10), (2, 2)], 94 / 104) == [92, 2]
