"""Choosing masks for several weights at once: exact, nested, and the same whatever the order or sign of the values."""

from __future__ import annotations

import warnings

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from sparsekit.criteria import Criterion, Magnitude, Random
from sparsekit.distributions import ErdosRenyiKernel, Uniform
from sparsekit.errors import ArgumentError, LayerCollapseWarning, NonFiniteError
from sparsekit.patterns import Pattern, Unstructured
from sparsekit.selection import choose_masks

VALUES = st.one_of(
    st.floats(-5, 5, width=32), st.sampled_from([0.0, -0.0, 1.0, -1.0, float(np.finfo(np.float32).max), 1e-45])
)
KERNELS = st.lists(
    hnp.arrays(np.float32, hnp.array_shapes(min_dims=1, max_dims=3, max_side=5), elements=VALUES),
    min_size=1,
    max_size=4,
)
SPARSITIES = st.floats(0.001, 0.999)
SCOPES = st.sampled_from(["layer", "global"])
CRITERIA = st.sampled_from([Magnitude(), Random()])
DISTRIBUTIONS = st.sampled_from([Uniform(), ErdosRenyiKernel()])


def choose(kernels, sparsity, *, quiet=True, **options):
    weights = {f"w{i}": (lambda kernel=kernel: kernel) for i, kernel in enumerate(kernels)}
    settings = {
        "criterion": Magnitude(),
        "pattern": Unstructured(),
        "scope": "layer",
        "distribution": Uniform(),
        "earlier": {},
        "min_keep": 0,
        "seed": 0,
    }
    with warnings.catch_warnings():
        if quiet:
            warnings.simplefilter("ignore", LayerCollapseWarning)
        return choose_masks(weights, sparsity, **{**settings, **options})


def zeros_of(masks):
    return [masks.mask(path).zeros for path in masks]


@given(KERNELS, SPARSITIES, CRITERIA, DISTRIBUTIONS)
def test_layer_counts_are_those_of_the_distribution(kernels, sparsity, criterion, distribution):
    masks = choose(kernels, sparsity, criterion=criterion, distribution=distribution)
    assert zeros_of(masks) == distribution.zeros([kernel.shape for kernel in kernels], sparsity)
    assert [masks[path].shape for path in masks] == [kernel.shape for kernel in kernels]


@given(KERNELS, SPARSITIES, CRITERIA)
def test_the_global_count_is_exact(kernels, sparsity, criterion):
    total = sum(kernel.size for kernel in kernels)
    masks = choose(kernels, sparsity, criterion=criterion, scope="global")
    assert masks.zeros == round(round(sparsity * total, 6))


@given(KERNELS, SPARSITIES)
def test_global_magnitude_is_one_stable_sort(kernels, sparsity):
    masks = choose(kernels, sparsity, scope="global")
    joined = np.abs(np.concatenate([kernel.reshape(-1) for kernel in kernels]))
    keep = np.ones(joined.size, bool)
    keep[np.argsort(joined, kind="stable")[: masks.zeros]] = False
    assert np.array_equal(np.concatenate([masks[path].reshape(-1) for path in masks]), keep)


@given(KERNELS, SPARSITIES)
def test_layer_magnitude_keeps_the_largest_of_each(kernels, sparsity):
    masks = choose(kernels, sparsity)
    for path, kernel in zip(masks, kernels, strict=True):
        keep = masks[path]
        if keep.any() and not keep.all():
            assert np.abs(kernel[keep]).min() >= np.abs(kernel[~keep]).max()


@given(KERNELS, SPARSITIES, SCOPES)
def test_signs_do_not_matter(kernels, sparsity, scope):
    negated = [-kernel for kernel in kernels]
    assert choose(kernels, sparsity, scope=scope) == choose(negated, sparsity, scope=scope)


@given(
    KERNELS, st.tuples(SPARSITIES, SPARSITIES).map(sorted), SCOPES, SCOPES, CRITERIA, CRITERIA, DISTRIBUTIONS,
    st.integers(0, 3),
)  # fmt: skip
def test_a_second_choice_drops_all_that_the_first_did(
    kernels, sparsities, scope, then, criterion, other, distribution, min_keep
):
    lower, higher = sparsities
    options = {"distribution": distribution, "min_keep": min_keep}
    try:
        one = choose(kernels, lower, scope=scope, criterion=criterion, **options)
        # The weights trained on: what is dropped is zero, the rest moved.
        moved = [np.where(one[path], kernel[::-1], 0) for path, kernel in zip(one, kernels, strict=True)]
        two = choose(moved, higher, scope=then, criterion=other, earlier=one, seed=1, **options)
    except ArgumentError as error:
        assert "min_keep" in str(error) or "is below what is pruned already" in str(error)  # noqa: PT017
        return
    assert all(not (two[path] & ~one[path]).any() for path in one)


@given(KERNELS, SPARSITIES, SCOPES, CRITERIA, DISTRIBUTIONS)
def test_the_same_target_again_changes_nothing(kernels, sparsity, scope, criterion, distribution):
    options = {"scope": scope, "criterion": criterion, "distribution": distribution}
    one = choose(kernels, sparsity, **options)
    moved = [np.where(one[path], kernel[::-1], 0) for path, kernel in zip(one, kernels, strict=True)]
    assert choose(moved, sparsity, earlier=one, **options) == one


@given(KERNELS, SPARSITIES, SCOPES, CRITERIA)
def test_zeros_that_are_there_already_are_dropped_first(kernels, sparsity, scope, criterion):
    masks = choose(kernels, sparsity, scope=scope, criterion=criterion)
    for path, kernel in zip(masks, kernels, strict=True):
        # If one that is not zero went, every zero of that weight went before it.
        if (kernel[~masks[path]] != 0).any():
            assert (kernel[masks[path]] != 0).all()


@given(KERNELS, SPARSITIES, SCOPES, st.integers(0, 4))
def test_min_keep_holds(kernels, sparsity, scope, min_keep):
    try:
        masks = choose(kernels, sparsity, scope=scope, min_keep=min_keep)
    except ArgumentError as error:
        assert "lower the sparsity or min_keep" in str(error)  # noqa: PT017
        return
    assert all(masks[path].sum() >= min(min_keep, masks[path].size) for path in masks)


@pytest.mark.parametrize("scope", ["layer", "global"])
def test_a_weight_that_min_keep_saved_is_named(scope):
    kernels = [np.full((4, 4), 9.0), np.full((2, 2), 0.1)]
    options = {"scope": scope, "min_keep": 3}
    sparsity = 0.5 if scope == "global" else 0.6
    with pytest.warns(LayerCollapseWarning, match=r"fewer than min_keep=3 weights in w1; they keep that many"):
        masks = choose(kernels, sparsity, quiet=False, **options)
    assert masks["w1"].sum() == 3
    if scope == "global":
        assert masks.zeros == 10


def test_no_warning_without_need():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        choose([np.arange(16.0).reshape(4, 4), np.arange(4.0) * 5], 0.5, quiet=False, scope="global", min_keep=1)


def test_a_lower_target_than_what_is_dropped_says_so():
    kernel = np.arange(1.0, 11.0)
    one = choose([kernel], 0.5)
    with pytest.raises(ArgumentError, match=r"sparsity=0\.4 is below what is pruned already \(0\.5000\); .*strip"):
        choose([kernel], 0.4, earlier=one)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("scope", ["layer", "global"])
@pytest.mark.parametrize("criterion", [Magnitude(), Random()], ids=lambda c: c.name)
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, ml_dtypes.bfloat16])
def test_values_that_are_not_finite_are_counted_and_named(bad, scope, criterion, dtype):
    kernels = [np.ones((3, 3), dtype), np.ones((300, 900), dtype)]
    kernels[1][0, 5] = kernels[1][299, 7] = bad
    with pytest.raises(NonFiniteError, match=r"'w1' holds 2 NaN or infinite values .* exclude='w1'"):
        choose(kernels, 0.5, scope=scope, criterion=criterion)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, ml_dtypes.bfloat16])
@pytest.mark.parametrize("scope", ["layer", "global"])
def test_every_precision(dtype, scope):
    # Both ends of each precision: what is finite as it stands may not be after a careless conversion.
    top = float(ml_dtypes.finfo(dtype).max)
    kernel = np.array([top, -top, 1.0, -0.5, 0.25, 0.0, -0.0, 2.0]).astype(dtype)
    masks = choose([kernel], 0.5, scope=scope)
    assert masks["w0"].tolist() == [True, True, True, False, False, False, False, True]


def test_one_element():
    kernel = np.array([[3.0]], np.float32)
    # round(0.5) is 0: half of one weight is none.
    assert [choose([kernel], sparsity).zeros for sparsity in (0.1, 0.5, 0.51, 0.99)] == [0, 0, 1, 1]
    assert choose([kernel], 0.99, min_keep=1).zeros == 0


def test_pieces_of_a_large_weight_fit_together():
    kernel = np.random.default_rng(0).integers(-40, 41, (1000, 1001)).astype(np.float32)
    for scope in ("layer", "global"):
        masks = choose([kernel, kernel[:3]], 0.37, scope=scope)
        order = np.argsort(np.abs(kernel).reshape(-1), kind="stable")
        keep = np.ones(kernel.size, bool)
        keep[order[: masks.mask("w0").zeros]] = False
        assert np.array_equal(masks["w0"].reshape(-1), keep)


def criterion_of(function, elementwise_=False):
    class Given(Criterion):
        """What the test says."""

        elementwise = elementwise_

        def score(self, weight, evidence):
            return function(weight)

    # As an attribute of the object it stays out of the registry.
    criterion = Given()
    vars(criterion)["name"] = "given"
    return criterion


@pytest.mark.parametrize("elementwise", [False, True])
@pytest.mark.parametrize(
    ("function", "error", "sentence"),
    [
        (lambda w: w.sum(axis=0), ArgumentError, r"'given' gave scores of shape .* for 'w0'; they must be floating"),
        (lambda w: w > 0, ArgumentError, r"dtype bool for 'w0'; they must be floating"),
        (lambda w: w * np.nan, NonFiniteError, r"'given' gave 12 NaN or infinite scores for 'w0'; use another"),
        (lambda w: w - np.inf, NonFiniteError, r"'given' gave 12 NaN or infinite scores for 'w0'"),
    ],
)
def test_scores_that_cannot_be_ranked_name_the_criterion(elementwise, function, error, sentence):
    with pytest.raises(error, match=sentence):
        choose([np.ones((3, 4))], 0.5, criterion=criterion_of(function, elementwise))


@pytest.mark.parametrize("elementwise", [False, True])
def test_a_criterion_may_return_the_weight_itself(elementwise):
    kernel = np.array([3.0, -1.0, 0.0, 2.0], np.float32)
    kernel.flags.writeable = False
    masks = choose([kernel], 0.5, criterion=criterion_of(lambda w: w, elementwise))
    # The zero goes first, then the lowest score.
    assert masks["w0"].tolist() == [True, False, False, True]


def test_other_patterns_get_whole_weights_and_their_density():
    seen = []

    class Rows(Pattern):
        """Whole rows."""

        def check(self, shape):
            if len(shape) != 2:
                raise ArgumentError("rows need a matrix.")

        def select(self, scores, density):
            seen.append((scores.shape, density))
            order = np.argsort(scores.sum(axis=1), kind="stable")
            keep = np.ones(scores.shape, bool)
            keep[order[: round((1 - density) * len(scores))]] = False
            return keep

    rows = Rows()
    vars(rows)["name"] = "rows"
    masks = choose([np.arange(12.0).reshape(4, 3)], 0.5, pattern=rows)
    assert seen == [((4, 3), 0.5)]
    assert masks["w0"].any(axis=1).tolist() == [False, False, True, True]
    assert masks.mask("w0").pattern == "rows"
    with pytest.raises(ArgumentError, match="'w0': rows need a matrix"):
        choose([np.ones(3)], 0.5, pattern=rows)
