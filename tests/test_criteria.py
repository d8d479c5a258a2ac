"""Each criterion scores every position, finitely and the same each time; names find classes."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from sparsekit.criteria import Criterion, Evidence, Magnitude, Random
from sparsekit.distributions import Distribution
from sparsekit.errors import ArgumentError
from sparsekit.patterns import Pattern, Unstructured
from sparsekit.registry import classes, resolve
from sparsekit.schedules import Schedule

WEIGHTS = st.sampled_from([np.float32, np.float64]).flatmap(
    lambda dtype: hnp.arrays(
        dtype, hnp.array_shapes(max_dims=4, max_side=5), elements={"allow_nan": False, "allow_infinity": False}
    )
)
# Those that need nothing but the weight.
ALONE = [kind() for kind in classes(Criterion).values() if not kind.needs]


@pytest.mark.parametrize("criterion", ALONE, ids=lambda c: c.name)
@given(weight=WEIGHTS, seed=st.integers(0, 2**40))
def test_contract(criterion, weight, seed):
    before = weight.copy()
    weight.flags.writeable = False
    evidence = Evidence("dense/kernel", seed)
    scores = criterion.score(weight, evidence)
    assert scores.shape == weight.shape
    assert np.issubdtype(scores.dtype, np.floating)
    assert np.isfinite(scores).all()
    assert np.array_equal(weight, before)
    assert np.array_equal(scores, criterion.score(weight, evidence))
    if criterion.elementwise:
        part = criterion.score(weight.reshape(-1)[1::2], evidence)
        assert np.array_equal(part, scores.reshape(-1)[1::2])


@given(WEIGHTS)
def test_magnitude_does_not_know_signs(weight):
    scores = Magnitude().score(weight, Evidence("w"))
    assert np.array_equal(scores, Magnitude().score(-weight, Evidence("w")))
    assert np.array_equal(scores, np.where(weight < 0, -weight, weight))


def test_random_depends_on_seed_and_path_alone():
    weight = np.ones((50, 40), np.float32)

    def draw(path, seed):
        return Random().score(weight, Evidence(path, seed))

    assert np.array_equal(draw("a", 1), Random().score(weight * 7, Evidence("a", 1)))
    assert (draw("a", 1) != draw("a", 2)).mean() > 0.99
    assert (draw("a", 1) != draw("b", 1)).mean() > 0.99
    assert draw("a", 1).mean() == pytest.approx(0.5, abs=0.05)


def test_random_is_the_same_in_every_process():
    code = (
        "import numpy as np; from sparsekit.criteria import Random, Evidence;"
        "print(Random().score(np.ones(3, np.float32), Evidence('dense/kernel', 5)).tolist())"
    )
    runs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    here = Random().score(np.ones(3, np.float32), Evidence("dense/kernel", 5)).tolist()
    assert runs == {f"{here}\n"}


@pytest.mark.parametrize("kind", [Criterion, Pattern, Distribution, Schedule])
def test_every_name_gives_its_class(kind):
    known = classes(kind)
    assert known
    for name, child in known.items():
        assert child.name == name
        assert name == name.lower()
        assert (child.__doc__ or "").strip()
        assert type(resolve(kind, name, "argument")) is child


@pytest.mark.parametrize("criterion", [kind() for kind in classes(Criterion).values() if kind.zeros_lowest])
@given(weight=st.lists(st.floats(width=32), min_size=1, max_size=20))
def test_zeros_are_lowest_where_a_criterion_says_so(criterion, weight):
    values = np.array([*weight, 0.0], np.float32)
    with np.errstate(all="ignore"):
        scores = criterion.score(values, Evidence("w", 0))
    assert np.array_equal(np.isfinite(scores), np.isfinite(values))
    finite = scores[np.isfinite(values)]
    assert (finite >= scores[-1]).all()
    assert (finite[values[np.isfinite(values)] != 0] > scores[-1]).all()


def test_an_object_passes_through():
    pattern = Unstructured()
    assert resolve(Pattern, pattern, "pattern") is pattern


@pytest.mark.parametrize("given_", ["magnitud", "", None, 3, Magnitude, ["magnitude"]])
def test_an_unknown_name_lists_the_known_ones(given_):
    with pytest.raises(
        ArgumentError, match=r"^criterion=.* is not known; give one of .*magnitude.* or a Criterion object"
    ):
        resolve(Criterion, given_, "criterion")


def test_a_new_class_is_found_by_existing():
    class Negative(Criterion):
        """Keep the smallest."""

        name = "negative-for-this-test"

        def score(self, weight, evidence):
            return -np.abs(weight)

    try:
        assert classes(Criterion)["negative-for-this-test"] is Negative
        assert isinstance(resolve(Criterion, "negative-for-this-test", "criterion"), Negative)
    finally:
        # Other tests walk the registry too.
        del Negative.name
    assert "negative-for-this-test" not in classes(Criterion)
