"""Masks that change while the model trains: zeros stay, schedules are followed update by update."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from models import KERAS, X, Y, assert_held, both, each_batch, mlp, values, warmed

import sparsekit
from sparsekit.errors import ArgumentError, ScheduleWarning
from sparsekit.schedules import Linear, Polynomial


def kernels(model) -> dict[str, np.ndarray]:
    return {path: v for path, v in values(model).items() if path.endswith("kernel")}


@pytest.mark.parametrize("enforce", ["gradient", "constraint"])
@both
def test_a_survivor_that_becomes_zero_is_masked_from_then_on(flavour: str, enforce: str) -> None:
    """Ftrl with an L1 penalty sets weights to exactly zero: the set of zeros only grows, and the masks are that set."""
    k = KERAS[flavour]
    optimizer = k.optimizers.Ftrl(0.1, l1_regularization_strength=0.02)
    model = sparsekit.prune(mlp(flavour, optimizer), 0.25)
    seen = [{path: v == 0 for path, v in kernels(model).items()}]

    def grows() -> None:
        masks = sparsekit.masks_of(model)
        zero = {path: v == 0 for path, v in kernels(model).items()}
        assert all((zero[path] == ~masks[path]).all() for path in masks)
        assert all(zero[path][seen[-1][path]].all() for path in zero)
        seen.append(zero)

    sparsekit.retrain(
        model,
        (X, Y),
        batch_size=16,
        epochs=3,
        masks="dynamic",
        enforce=enforce,
        verbose=0,
        callbacks=[each_batch(flavour, grows)],
    )
    assert sum(z.sum() for z in seen[-1].values()) > sum(z.sum() for z in seen[0].values())
    static = sparsekit.masks_of(model)
    sparsekit.retrain(model, (X, Y), enforce=enforce, verbose=0)
    assert sparsekit.masks_of(model) == static


@both
def test_static_masks_let_a_survivor_pass_through_zero(flavour: str) -> None:
    k = KERAS[flavour]
    model = sparsekit.prune(mlp(flavour, k.optimizers.SGD(0.1)), 0.5)
    masks = sparsekit.masks_of(model)
    path = next(iter(masks))
    # Of a hidden unit that still has a way to the outputs.
    alive = list(masks.values())[1].all(axis=1)
    row, column = np.argwhere(masks[path] & alive)[0]
    for how, moves in (("static", True), ("dynamic", False)):
        weights = model.get_weights()
        weights[0][row, column] = 0.0
        model.set_weights(weights)
        # The first update moves it away from zero, unless it is masked before: after an update that leaves it there.
        sparsekit.retrain(model, (X[:0:-1] * 0, Y[:0:-1]), masks=how, batch_size=63, verbose=0)
        sparsekit.retrain(model, (X, Y), masks=how, batch_size=16, verbose=0)
        assert (values(model)[path][row, column] != 0) == moves
        assert_held(model, masks)


@pytest.mark.parametrize(
    ("way", "enforce"),
    [
        ({}, "gradient"),
        ({"jit_compile": True}, "constraint"),
        ({"steps_per_execution": 4, "jit_compile": False}, "gradient"),
    ],
)
@both
def test_schedule_update_by_update(flavour: str, way: dict, enforce: str) -> None:
    schedule = Polynomial(0.75, begin_step=2, end_step=8, frequency=3, initial_sparsity=0.25)
    model = warmed(mlp(flavour))
    start = int(model.optimizer.iterations)
    seen: dict[int, list[float]] = {}

    def record() -> None:
        zeros = [float((v == 0).mean()) for v in kernels(model).values()]
        seen[int(model.optimizer.iterations) - start] = zeros

    history = sparsekit.retrain(
        model,
        (X, Y),
        batch_size=16,
        epochs=3,
        schedule=schedule,
        enforce=enforce,
        verbose=0,
        callbacks=[each_batch(flavour, record)],
        **way,
    )
    for step, zeros in seen.items():
        # Between two choices the sparsity of the last one holds: 2, 5, 8.
        last = max((s for s in (2, 5, 8) if s <= step), default=None)
        target = 0.0 if last is None else schedule.sparsity_at(last)
        assert zeros == [round(target * 48) / 48, round(target * 16) / 16]
    assert history.history["sparsity"][-1] == 0.75
    assert sparsekit.report(model).violations == 0
    assert all(row.target in (0.75, None) for row in sparsekit.report(model).rows)


@both
def test_the_largest_survive_a_choice(flavour: str) -> None:
    model = mlp(flavour)
    before = kernels(model)
    sparsekit.retrain(model, (X, Y), schedule=Linear(0.5, end_step=0), epochs=1, verbose=0)
    for path, keep in sparsekit.masks_of(model).items():
        magnitude = np.abs(before[path])
        assert keep.sum() == keep.size / 2
        assert magnitude[keep].min() >= magnitude[~keep].max()


@pytest.mark.parametrize("warm", [False, True])
@both
def test_a_schedule_begins_with_the_run(flavour: str, warm: bool) -> None:
    """Also where the optimizer has made updates before."""
    model = warmed(mlp(flavour)) if warm else mlp(flavour)
    first: list[float] = []
    record = each_batch(flavour, lambda: first.append(float((next(iter(kernels(model).values())) == 0).mean())))
    sparsekit.retrain(
        model,
        (X, Y),
        batch_size=16,
        schedule=Linear(0.5, initial_sparsity=0.25, end_step=2, frequency=1),
        verbose=0,
        callbacks=[record],
    )
    assert first == [18 / 48, 0.5, 0.5, 0.5]


def test_a_schedule_counts_updates_not_batches() -> None:
    """With gradient accumulation four batches are one update."""
    k = KERAS["keras"]
    model = mlp("keras", k.optimizers.Adam(0.01, gradient_accumulation_steps=4))
    seen: list[float] = []
    record = each_batch("keras", lambda: seen.append(float((next(iter(kernels(model).values())) == 0).mean())))
    sparsekit.retrain(
        model,
        (X, Y),
        batch_size=8,
        schedule=Linear(0.5, begin_step=1, end_step=2, initial_sparsity=0.25, frequency=1),
        verbose=0,
        callbacks=[record],
    )
    assert seen == [0.0] * 3 + [0.25] * 4 + [0.5]


@both
def test_a_schedule_that_does_not_end_is_told(flavour: str) -> None:
    model = mlp(flavour)
    with pytest.warns(ScheduleWarning, match=r"ended after 4 updates, before the schedule's end_step; the sparsity is"):
        sparsekit.retrain(model, (X, Y), batch_size=16, schedule=Linear(0.5, end_step=100, frequency=2), verbose=0)
    assert 0 < sparsekit.report(model).sparsity < 0.5
    assert sparsekit.report(model).violations == 0


def test_a_schedule_and_dynamic_masks_exclude_each_other() -> None:
    model = mlp("keras")
    with pytest.raises(ArgumentError, match="Give either masks='dynamic' or a schedule, not both"):
        sparsekit.retrain(model, (X, Y), masks="dynamic", schedule=Linear(0.5, end_step=2))
    assert len(sparsekit.masks_of(model)) == 0


@both
def test_a_schedule_keeps_zeros_that_are_there(flavour: str) -> None:
    model = sparsekit.prune(warmed(mlp(flavour)), 0.5)
    masks = sparsekit.masks_of(model)
    sparsekit.retrain(model, (X, Y), schedule=Linear(0.75, end_step=2, frequency=1), batch_size=16, verbose=0)
    assert_held(model, masks)
    assert [float((~keep).mean()) for keep in sparsekit.masks_of(model).values()] == [0.75, 0.75]


@both
def test_what_the_last_update_drops_leaves_the_average_too(flavour: str) -> None:
    """The average is written over the weights at the end of fit, after the last choice."""
    k = KERAS[flavour]
    model = warmed(mlp(flavour, k.optimizers.Adam(0.01, use_ema=True)))
    # A pruned weight that comes back within the run is a warning, which fails this test.
    sparsekit.retrain(model, (X, Y), batch_size=16, schedule=Linear(0.5, end_step=4, frequency=1), verbose=0)
    assert sparsekit.report(model).sparsity == 0.5


@both
def test_infinite_gradients_do_not_move_a_schedule(flavour: str) -> None:
    k = KERAS[flavour]
    k.mixed_precision.set_global_policy("mixed_float16")
    try:
        model = mlp(flavour, k.optimizers.Adam(0.01))
        sparsekit.retrain(model, (X, Y), batch_size=16, schedule=Linear(0.5, end_step=4, frequency=2), verbose=0)
    finally:
        k.mixed_precision.set_global_policy("float32")
    assert sparsekit.report(model).sparsity == 0.5
    assert all(np.isfinite(v).all() for v in values(model).values())
    assert tf.reduce_all(tf.math.is_finite(model(X)))
