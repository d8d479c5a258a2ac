"""Schedules start and end where they say, never fall, and choose masks at the end for the last time."""

from __future__ import annotations

import doctest
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsekit import schedules
from sparsekit.errors import ArgumentError
from sparsekit.registry import classes
from sparsekit.schedules import Cosine, Linear, Polynomial, Schedule

KINDS = classes(Schedule)
each_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
SETTINGS = st.fixed_dictionaries(
    {
        "sparsities": st.tuples(st.floats(0, 0.99), st.floats(0, 0.99)).map(sorted),
        "steps": st.tuples(st.integers(0, 300), st.integers(0, 300)).map(sorted),
        "frequency": st.integers(1, 400),
    }
)


def built(kind, settings):
    initial, final = settings["sparsities"]
    begin, end = settings["steps"]
    return kind(
        final_sparsity=final, end_step=end, begin_step=begin, initial_sparsity=initial, frequency=settings["frequency"]
    )


@each_kind
@given(settings=SETTINGS)
def test_contract(kind, settings):
    schedule = built(kind, settings)
    sparsity = [schedule.sparsity_at(step) for step in range(schedule.end_step + 3)]
    before, during = sparsity[: schedule.begin_step], sparsity[schedule.begin_step :]
    assert all(value == 0.0 for value in before)
    assert all(schedule.initial_sparsity <= value <= schedule.final_sparsity + 1e-12 for value in during)
    assert all(b >= a - 1e-12 for a, b in itertools.pairwise(during))
    assert sparsity[schedule.end_step :] == [schedule.final_sparsity] * 3
    if schedule.begin_step < schedule.end_step:
        assert sparsity[schedule.begin_step] == pytest.approx(schedule.initial_sparsity)


@each_kind
@given(settings=SETTINGS)
def test_masks_are_chosen_first_at_the_begin_and_last_at_the_end(kind, settings):
    schedule = built(kind, settings)
    updates = [step for step in range(schedule.end_step + 500) if schedule.is_update(step)]
    assert updates[0] == schedule.begin_step
    assert updates[-1] == schedule.end_step
    assert updates[:-1] == list(range(schedule.begin_step, schedule.end_step, schedule.frequency))


@each_kind
@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"final_sparsity": 1.0}, "needs 0 <= initial_sparsity <= final_sparsity < 1; got 0.0 and 1.0"),
        ({"final_sparsity": -0.1}, "needs 0 <= initial_sparsity <= final_sparsity < 1; got 0.0 and -0.1"),
        ({"final_sparsity": float("nan")}, "needs 0 <= initial_sparsity <= final_sparsity < 1; got 0.0 and nan"),
        ({"final_sparsity": "0.9"}, "final_sparsity='0.9' must be a number, for example 0.8"),
        ({"final_sparsity": True}, "final_sparsity=True must be a number"),
        ({"initial_sparsity": 0.9}, "got 0.9 and 0.8"),
        ({"begin_step": 9, "end_step": 8}, "needs 0 <= begin_step <= end_step; got 9 and 8"),
        ({"begin_step": -1}, "got -1 and 1000"),
        ({"end_step": 10.5}, "end_step=10.5 must be a whole number, for example 1000"),
        ({"frequency": 0}, "frequency=0 must be at least 1 update"),
        ({"frequency": None}, "frequency=None must be a whole number"),
    ],
)
def test_settings_that_make_no_sense_are_refused(kind, settings, sentence):
    with pytest.raises(ArgumentError, match=sentence):
        kind(**settings)


def test_formulas():
    settings = {"final_sparsity": 0.8, "initial_sparsity": 0.2, "begin_step": 100, "end_step": 200}
    # A quarter of the way.
    assert Linear(**settings).sparsity_at(125) == pytest.approx(0.2 + 0.6 * 0.25)
    assert Polynomial(**settings).sparsity_at(125) == pytest.approx(0.8 - 0.6 * 0.75**3)
    assert Cosine(**settings).sparsity_at(125) == pytest.approx(0.2 + 0.6 * (1 - 0.5**0.5) / 2)


def test_one_choice_if_it_begins_where_it_ends():
    schedule = Linear(final_sparsity=0.5, begin_step=7, end_step=7)
    assert [schedule.sparsity_at(step) for step in (6, 7, 8)] == [0.0, 0.5, 0.5]
    assert [step for step in range(20) if schedule.is_update(step)] == [7]


def test_the_examples_in_the_docstrings_run():
    result = doctest.testmod(schedules)
    assert result.failed == 0
    assert result.attempted >= len(KINDS)
    assert all(">>>" in (kind.__doc__ or "") for kind in KINDS.values())
