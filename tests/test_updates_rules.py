"""Update rules: what they move, what they never touch, and where their random numbers come from."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from models import KERAS, both, values

from sparsekit.errors import ArgumentError
from sparsekit.frozen import attach, frozen_masks
from sparsekit.masks import MaskSet
from sparsekit.registry import classes
from sparsekit.updates import (
    FunctionRule,
    NormalNoise,
    Rule,
    Shrink,
    SignFlip,
    UniformNoise,
    fit_with_update,
    update_step,
)
from sparsekit.updates.targets import Stream, noise
from sparsekit.weights import prunable_weights

_RNG = np.random.default_rng(5)
X = _RNG.normal(size=(64, 6)).astype("float32")
Y = _RNG.integers(0, 3, 64)

# Rules that change most weights on each step, whatever the loss does.
SETTINGS: dict[str, dict[str, Any]] = {
    "sign_flip": {"probability": 0.5},
    "shrink": {"rate": 0.1},
    "annealing": {"temperature": 1e6},
    "spsa": {"learning_rate": 0.1},
    "evolution_strategy": {"population": 4},
}
every_rule = pytest.mark.parametrize("name", sorted(classes(Rule)))


def rule_named(name: str) -> Rule:
    return classes(Rule)[name](**SETTINGS.get(name, {}))


def full_model(flavour: str) -> Any:
    """A model with everything that a rule must leave alone, half pruned, trained for two batches."""
    k = KERAS[flavour]
    k.utils.set_random_seed(2)
    layers = [k.layers.Dense(8, "relu", name="first"), k.layers.BatchNormalization(), k.layers.Dropout(0.3)]
    layers += [k.layers.Dense(6, "tanh", trainable=False), k.layers.Dense(3, name="last")]
    model = k.Sequential([k.layers.Input((6,)), *layers], name="whole")
    loss = k.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(k.optimizers.Adam(0.01), loss, metrics=["accuracy"], jit_compile=False)
    model.fit(X, Y, epochs=1, batch_size=32, verbose=0)
    rng = np.random.default_rng(0)
    attach(model, MaskSet.from_arrays({ref.path: rng.random(ref.shape) < 0.5 for ref in prunable_weights(model)}))
    return model


def optimizer_state(model: Any) -> list[np.ndarray]:
    variables = model.optimizer.variables
    return [v.numpy().copy() for v in (variables() if callable(variables) else variables)]


@both
@every_rule
def test_a_rule_moves_survivors_and_nothing_else(flavour, name):
    model = full_model(flavour)
    masks, before = frozen_masks(model).to_masks(), values(model)
    optimizer = optimizer_state(model)
    history = fit_with_update(
        model, (X, Y), rule_named(name), epochs=2, batch_size=32, verbose=0, validation_data=(X, Y)
    )
    after = values(model)
    for path in before:
        if path in masks:
            assert (after[path][~masks[path]] == 0).all()
            assert not np.signbit(after[path][~masks[path]]).any()
            assert (after[path] != before[path])[masks[path]].mean() > 0.25
        else:
            np.testing.assert_array_equal(after[path], before[path], err_msg=path)
    for old, new in zip(optimizer, optimizer_state(model), strict=True):
        np.testing.assert_array_equal(old, new)
    assert set(history.history) == {"loss", "accuracy", "val_loss", "val_accuracy"}
    assert all(len(column) == 2 and np.isfinite(column).all() for column in history.history.values())


@every_rule
@pytest.mark.parametrize("fused", [None, False])
def test_dense_weights_put_back_in_mid_run_are_zeroed_by_the_next_update(name, fused):
    """A callback may load a checkpoint from before the prune; even a minus zero in it does not stay."""
    model = full_model("keras")
    masks = frozen_masks(model).to_masks()
    step = update_step(model, rule_named(name), fused=fused)
    step(X, Y)
    for ref in prunable_weights(model):
        dense = np.where(masks[ref.path], ref.numpy(), -1.0)
        dense[~masks[ref.path]] *= np.arange((~masks[ref.path]).sum()) % 3
        ref.variable.assign(dense)
    step(X, Y)
    for path in masks:
        dropped = values(model)[path][~masks[path]]
        assert (dropped == 0).all()
        assert not np.signbit(dropped).any()


@every_rule
def test_the_same_seed_gives_the_same_bits(name):
    model = full_model("keras")
    start = model.get_weights()

    def run(seed: int) -> np.ndarray:
        model.set_weights(start)
        step = update_step(model, rule_named(name), seed=seed, include="*last/*")
        for _ in range(2):
            step(X, Y)
        return values(model)["last/kernel"]

    first = run(7)
    np.testing.assert_array_equal(first, run(7))
    assert name == "shrink" or (first != run(8)).any()


@pytest.mark.parametrize("distribution", ["uniform", "normal", "rademacher"])
def test_noise_differs_between_steps_weights_and_draws_and_has_its_moments(distribution):
    def draw(step: int, index: int, number: int, seed: int = 3) -> np.ndarray:
        stream = Stream.of(seed, tf.constant(step, tf.int64), number)
        return noise(distribution, (50, 400), stream, index).numpy()

    base = draw(0, 0, 0)
    np.testing.assert_array_equal(base, draw(0, 0, 0))
    others = [draw(1, 0, 0), draw(0, 1, 0), draw(0, 0, 1), draw(0, 0, 0, seed=4), draw(0, 0, 0, seed=3 + 2**40)]
    for other in others:
        # Independent draws of 20000 numbers: a correlation beyond 5 standard errors is none by chance.
        assert abs(np.corrcoef(base.ravel(), other.ravel())[0, 1]) < 5 / np.sqrt(base.size)
    variance = {"uniform": 1 / 3, "normal": 1.0, "rademacher": 1.0}[distribution]
    assert abs(base.mean()) < 5 * np.sqrt(variance / base.size)
    assert base.var() == pytest.approx(variance, rel=0.05)


@pytest.mark.parametrize("distribution", ["uniform_noise", "normal_noise"])
def test_noise_has_its_scale_and_decays(distribution):
    k = KERAS["keras"]
    model = k.Sequential([k.layers.Input((100,)), k.layers.Dense(100)])
    step = update_step(model, classes(Rule)[distribution](scale=0.1, decay=0.5))
    spread = {"uniform_noise": 0.1 / np.sqrt(3), "normal_noise": 0.1}[distribution]
    for number in range(3):
        before = values(model)
        step(None)
        moved = next(iter((values(model)[path] - before[path]) for path in before if path.endswith("kernel")))
        assert moved.std() == pytest.approx(spread * 0.5**number, rel=0.05)
    assert step.count == 3


def test_a_scale_may_follow_a_schedule():
    k = KERAS["keras"]
    model = k.Sequential([k.layers.Input((4,)), k.layers.Dense(4)])
    step = update_step(model, UniformNoise(scale=lambda at: 1.0 - 0.5**at))
    before = values(model)
    step()
    assert all((values(model)[path] == before[path]).all() for path in before)
    step()
    assert any((values(model)[path] != before[path]).any() for path in before)


def test_the_noise_op_gives_the_numbers_of_tensorflows_ops():
    """With a compiler this compares two implementations; without one it holds that the rule runs all the same."""
    k = KERAS["keras"]
    results = []
    for fused in (None, False):
        k.utils.set_random_seed(0)
        model = k.Sequential([k.layers.Input((300,)), k.layers.Dense(401)])
        rng = np.random.default_rng(0)
        attach(model, MaskSet.from_arrays({r.path: rng.random(r.shape) < 0.2 for r in prunable_weights(model)}))
        step = update_step(model, UniformNoise(0.1), fused=fused, seed=2**35 + 1)
        for _ in range(3):
            step()
        results.append(model.layers[0].kernel.numpy())
    np.testing.assert_array_equal(*results)


@both
def test_a_function_is_a_rule(flavour):
    model = full_model(flavour)
    masks, before = frozen_masks(model).to_masks(), values(model)
    seen = []

    def halve(weight, mask, step, seed):
        seen.append((weight.shape, mask.dtype, step.dtype, seed.shape))
        return weight / 2

    step = update_step(model, halve)
    for _ in range(3):
        step(X, Y)
    assert len(seen) == len(masks), "traced once for each weight"
    assert all(kinds[1:] == (tf.bool, tf.int64, (2,)) for kinds in seen)
    for path in masks:
        np.testing.assert_array_equal(values(model)[path], before[path] / 8)


def test_a_function_may_return_the_change():
    model = full_model("keras")
    masks, before = frozen_masks(model).to_masks(), values(model)
    update_step(model, FunctionRule(lambda w, mask, step, seed: tf.ones_like(w), returns="delta"))(X, Y)
    for path in masks:
        np.testing.assert_array_equal(values(model)[path], np.where(masks[path], before[path] + 1, 0))


def test_a_function_gets_another_seed_for_each_step_and_weight():
    k = KERAS["keras"]
    model = k.Sequential([k.layers.Input((4,)), k.layers.Dense(4), k.layers.Dense(4)])
    step = update_step(model, lambda w, mask, at, seed: tf.random.stateless_uniform(w.shape, seed))
    drawn = []
    for _ in range(2):
        step()
        drawn += [layer.kernel.numpy() for layer in model.layers]
    for number, one in enumerate(drawn):
        assert all((one != other).any() for other in drawn[:number])


def test_nan_and_infinity_do_not_reach_a_zero():
    model = full_model("keras")
    masks = frozen_masks(model).to_masks()
    update_step(model, lambda w, mask, step, seed: w * np.nan)(X, Y)
    for path in masks:
        assert (values(model)[path][~masks[path]] == 0).all()
        assert np.isnan(values(model)[path][masks[path]]).all()


@both
def test_biases_move_only_when_asked(flavour):
    model = full_model(flavour)
    before = values(model)
    update_step(model, UniformNoise(0.1), include=["*/bias", "*first/kernel"])(X, Y)
    moved = {path for path, value in values(model).items() if (value != before[path]).any()}
    assert {"/".join(path.split("/")[-2:]) for path in moved} == {"first/kernel", "first/bias", "last/bias"}


@both
def test_weights_are_chosen_by_class_and_predicate(flavour):
    model = full_model(flavour)
    before = values(model)
    update_step(model, Shrink(0.5), include=KERAS[flavour].layers.Dense, exclude=lambda ref: ref.shape[1] == 8)(X, Y)
    moved = {path.split("/")[-2] for path, value in values(model).items() if (value != before[path]).any()}
    assert moved == {"last"}


def test_sign_flip_turns_the_fraction_it_says():
    k = KERAS["keras"]
    model = k.Sequential([k.layers.Input((200,)), k.layers.Dense(200)])
    before = model.layers[0].kernel.numpy()
    update_step(model, SignFlip(0.25))()
    after = model.layers[0].kernel.numpy()
    np.testing.assert_array_equal(np.abs(after), np.abs(before))
    flipped = (after != before).mean()
    assert abs(flipped - 0.25) < 5 * np.sqrt(0.25 * 0.75 / before.size)


def test_shrink_lands_on_zero_below_its_threshold():
    k = KERAS["keras"]
    model = k.Sequential([k.layers.Input((2,)), k.layers.Dense(2, use_bias=False)])
    model.layers[0].kernel.assign([[1.0, -0.3], [0.2, -2.0]])
    update_step(model, Shrink(rate=0.5, threshold=0.2))()
    np.testing.assert_array_equal(model.layers[0].kernel.numpy(), [[0.5, 0.0], [0.0, -1.0]])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_other_float_types_move_in_their_own_type(dtype):
    k = KERAS["keras"]
    model = k.Sequential([k.layers.Input((30,)), k.layers.Dense(30, dtype=dtype)])
    before = tf.cast(model.layers[0].kernel.value, tf.float64).numpy()
    update_step(model, NormalNoise(0.5))()
    kernel = model.layers[0].kernel
    assert kernel.dtype == dtype
    assert (tf.cast(kernel.value, tf.float64).numpy() - before).std() == pytest.approx(0.5, rel=0.15)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: UniformNoise(scale=-1), r"scale=-1 must be a finite number >= 0"),
        (lambda: NormalNoise(decay=1.5), r"decay=1.5 must be a number in \[0, 1\]"),
        (lambda: SignFlip(probability=2), r"probability=2 must be a number in \[0, 1\]"),
        (lambda: Shrink(rate=True), r"rate=True must be a number in \[0, 1\]"),
        (lambda: FunctionRule(3), r"function=3 cannot be called"),
        (lambda: FunctionRule(abs, returns="both"), r"returns='both' is not known; give 'value' or 'delta'"),
    ],
)
def test_bad_settings_are_refused(make, message):
    with pytest.raises(ArgumentError, match=message):
        make()


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("uniform", r"update='uniform' is not known; give one of annealing, .*uniform_noise"),
        (UniformNoise, r"is not known; give one of"),
        (lambda w, m, s, seed: None, r"'<lambda>' returned None"),
        (lambda w, m, s, seed: tf.zeros(1), r"returned shape \(1,\) for a weight of shape"),
    ],
)
def test_what_is_no_rule_is_refused(rule, message):
    model = full_model("keras")
    with pytest.raises(ArgumentError, match=message):
        update_step(model, rule)(X, Y)
