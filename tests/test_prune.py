"""`prune` on models: exact, in place, repeatable, and without a trace where it fails."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import warnings
import weakref

import numpy as np
import pytest
import tensorflow as tf
from models import KERAS, both, mlp, values

import sparsekit
from sparsekit.criteria import Criterion
from sparsekit.distributions import Distribution
from sparsekit.errors import (
    ArgumentError,
    LayerCollapseWarning,
    MaskError,
    ModelTypeError,
    NonFiniteError,
    NothingToPruneError,
    SparsekitError,
)
from sparsekit.frozen import frozen_masks
from sparsekit.registry import classes
from sparsekit.weights import prunable_weights

scopes = pytest.mark.parametrize("scope", ["layer", "global"])


def weights_set(model, arrays):
    """Give the prunable weights these values."""
    for ref, array in zip(prunable_weights(model), arrays, strict=True):
        ref.variable.assign(array)
    return model


def bits(model):
    """Every byte of every variable, and of every mask."""
    kept = {path: keep.tobytes() for path, keep in sparsekit.masks_of(model).items()}
    return {path: value.tobytes() for path, value in values(model).items()}, kept


def count(model):
    return len(model.variables if hasattr(model, "variables") else model.weights)


@both
@scopes
def test_counts_are_exact_and_what_is_kept_does_not_change(flavour, scope):
    model = mlp(flavour)
    before = values(model)
    assert sparsekit.prune(model, 0.7, scope=scope) is model
    masks, now = sparsekit.masks_of(model), values(model)
    sizes = [6 * 8, 8 * 2]
    if scope == "layer":
        assert [masks.mask(path).zeros for path in masks] == [round(0.7 * n) for n in sizes]
    else:
        assert masks.zeros == round(0.7 * sum(sizes))
    for path, value in now.items():
        if path in masks:
            assert (value[~masks[path]].view(np.uint32) == 0).all()
            assert np.array_equal(value[masks[path]], before[path][masks[path]])
        else:
            assert np.array_equal(value, before[path])


@both
@pytest.mark.parametrize("criterion", [name for name, kind in classes(Criterion).items() if not kind.needs])
@pytest.mark.parametrize("distribution", list(classes(Distribution)))
def test_every_criterion_and_distribution_by_name(flavour, criterion, distribution):
    model = sparsekit.prune(mlp(flavour), 0.5, criterion=criterion, distribution=distribution)
    assert sparsekit.masks_of(model).zeros == 32
    assert sparsekit.report(model).violations == 0


@both
@scopes
def test_the_same_weights_with_other_signs_get_the_same_masks(flavour, scope):
    one = mlp(flavour)
    other = weights_set(mlp(flavour), [-ref.numpy() for ref in prunable_weights(one)])
    sparsekit.prune(one, 0.6, scope=scope)
    sparsekit.prune(other, 0.6, scope=scope)
    assert list(sparsekit.masks_of(one).values())
    for a, b in zip(sparsekit.masks_of(one).values(), sparsekit.masks_of(other).values(), strict=True):
        assert np.array_equal(a, b)


@both
@scopes
@pytest.mark.parametrize("criterion", ["magnitude", "random"])
def test_the_same_call_again_changes_no_bit(flavour, scope, criterion):
    model = sparsekit.prune(mlp(flavour), 0.6, scope=scope, criterion=criterion)
    before = bits(model)
    sparsekit.prune(model, 0.6, scope=scope, criterion=criterion)
    assert bits(model) == before


@both
@scopes
def test_a_higher_target_keeps_the_earlier_zeros(flavour, scope):
    model = sparsekit.prune(mlp(flavour), 0.5, criterion="random")
    one = sparsekit.masks_of(model)
    sparsekit.prune(model, 0.8, scope=scope)
    two = sparsekit.masks_of(model)
    assert all(not (two[path] & ~one[path]).any() for path in one)
    assert two.zeros == (round(0.8 * 48) + round(0.8 * 16) if scope == "layer" else round(0.8 * 64))


@both
def test_a_lower_target_is_refused_until_the_masks_are_forgotten(flavour):
    model = sparsekit.prune(mlp(flavour), 0.75)
    with pytest.raises(ArgumentError, match=r"sparsity=0\.5 is below what is pruned already \(0\.7500\); .*strip"):
        sparsekit.prune(model, 0.5)
    assert len(sparsekit.masks_of(sparsekit.strip(model))) == 0
    sparsekit.prune(model, 0.5)
    assert sparsekit.masks_of(model).zeros == 32


@both
def test_zero_is_a_no_op_to_the_bit(flavour):
    model = mlp(flavour)
    odd = np.array([-0.0, np.nan, np.inf, -np.inf, 1e-45, 0.0, 3.0, -1.0] * 6, np.float32).reshape(6, 8)
    prunable_weights(model)[0].variable.assign(odd)
    before = values(model)
    sparsekit.prune(model, 0.0)
    assert {p: v.tobytes() for p, v in values(model).items()} == {p: v.tobytes() for p, v in before.items()}
    assert sparsekit.masks_of(model).zeros == 0


@both
def test_zero_keeps_masks_that_are_there(flavour):
    model = sparsekit.prune(mlp(flavour), 0.5)
    before = bits(model)
    sparsekit.prune(model, 0.0)
    assert bits(model) == before


@both
@scopes
@pytest.mark.parametrize(
    "kernel", [np.full((6, 8), 0.3), np.where(np.arange(48).reshape(6, 8) % 3, 1.0, -1.0), np.eye(6, 8)], ids=str
)
def test_kernels_of_few_values_lose_as_many_as_asked_and_the_first_ones_first(flavour, scope, kernel):
    model = mlp(flavour)
    weights_set(model, [kernel, np.full((8, 2), 9.0)])
    first = prunable_weights(model)[0].path
    sparsekit.prune(model, 0.25, scope=scope, include=first)
    expected = np.ones(48, bool)
    expected[np.argsort(np.abs(kernel).reshape(-1), kind="stable")[:12]] = False
    assert np.array_equal(sparsekit.masks_of(model)[first].reshape(-1), expected)


@both
def test_weights_of_one_element(flavour):
    k = KERAS[flavour]
    model = k.Sequential([k.layers.Input((1,)), k.layers.Dense(1)])
    for sparsity in (0.1, 0.5):
        sparsekit.prune(model, sparsity)
        assert sparsekit.masks_of(model).zeros == 0
    with pytest.warns(LayerCollapseWarning, match="fewer than min_keep=1"):
        sparsekit.prune(model, 0.9)
    assert sparsekit.masks_of(model).zeros == 0
    sparsekit.prune(model, 0.9, min_keep=0)
    assert sparsekit.masks_of(model).zeros == 1


@both
def test_a_global_ranking_leaves_every_weight_min_keep_and_says_which_it_saved(flavour):
    model = mlp(flavour)
    weights_set(model, [np.full((6, 8), 0.01), np.full((8, 2), 1.0)])
    first, second = prunable_weights(model)
    with pytest.warns(
        LayerCollapseWarning, match=f"fewer than min_keep=5 weights in {first.path}; they keep that many"
    ):
        sparsekit.prune(model, 0.8, scope="global", min_keep=5)
    masks = sparsekit.masks_of(model)
    assert masks[first.path].sum() == 5
    assert masks.zeros == round(0.8 * 64)
    assert masks[second.path].sum() == 64 - round(0.8 * 64) - 5


@both
def test_biases_are_pruned_where_they_are_named(flavour):
    model = mlp(flavour)
    names = [path for path in values(model) if path.endswith("bias")]
    weights_set(model, [ref.numpy() for ref in prunable_weights(model)])
    sparsekit.prune(model, 0.5, include=["*kernel", "*bias"], min_keep=0)
    masks = sparsekit.masks_of(model)
    assert len(masks) == 4
    assert [masks.mask(path).zeros for path in names] == [4, 1]


@both
def test_half_precision(flavour):
    k = KERAS[flavour]
    for dtype in ("float16", "bfloat16", "mixed_float16"):
        model = k.Sequential([k.layers.Input((8,)), k.layers.Dense(8, dtype=dtype), k.layers.Dense(2)])
        sparsekit.prune(model, 0.5, scope="global")
        assert sparsekit.masks_of(model).zeros == 40
        assert sparsekit.report(model).violations == 0


@both
def test_masks_live_beside_the_model(flavour):
    model = mlp(flavour)
    before, attributes = count(model), set(vars(model))
    sparsekit.prune(model, 0.5)
    assert count(model) == before
    assert set(vars(model)) == attributes
    frozen = list(frozen_masks(model))
    assert len(frozen) == 2
    for mask in frozen:
        assert isinstance(mask.keep, tf.Variable)
        assert mask.keep.dtype == tf.bool
        assert not mask.keep.trainable
        assert "sparsity_mask" in mask.keep.name


@both
def test_masks_go_away_with_the_model(flavour):
    model = sparsekit.prune(mlp(flavour, optimizer=False), 0.5)
    masks, gone = frozen_masks(model), weakref.ref(model)
    assert len(masks) == 2
    del model, masks
    gc.collect()
    assert gone() is None


@both
def test_pruning_again_writes_into_the_same_variables(flavour):
    model = sparsekit.prune(mlp(flavour), 0.5)
    before = [mask.keep for mask in frozen_masks(model)]
    sparsekit.prune(model, 0.8)
    assert all(a is b.keep for a, b in zip(before, frozen_masks(model), strict=True))


# --- failures ---

FAILURES = {
    "sparsity 1": (
        {"sparsity": 1.0},
        ArgumentError,
        "sparsity=1.0 would leave no weight at all; give a fraction below 1",
    ),
    "sparsity 90": ({"sparsity": 90}, ArgumentError, "sparsity=90 must be a fraction in .*; did you mean 0.9"),
    "sparsity 1.5": ({"sparsity": 1.5}, ArgumentError, r"sparsity=1.5 must be a fraction in \[0, 1\]"),
    "sparsity below 0": ({"sparsity": -0.1}, ArgumentError, r"sparsity=-0.1 must be a fraction in \[0, 1\]"),
    "sparsity nan": (
        {"sparsity": float("nan")},
        ArgumentError,
        r"sparsity=nan must be a number in \[0, 1\], for example",
    ),
    "sparsity inf": ({"sparsity": float("inf")}, ArgumentError, r"sparsity=inf must be a fraction in \[0, 1\]"),
    "sparsity bool": ({"sparsity": True}, ArgumentError, r"sparsity=True must be a number in \[0, 1\]"),
    "sparsity str": ({"sparsity": "0.9"}, ArgumentError, r"sparsity='0.9' must be a number in \[0, 1\]"),
    "sparsity None": ({"sparsity": None}, ArgumentError, r"sparsity=None must be a number in \[0, 1\]"),
    "sparsity list": ({"sparsity": [0.9]}, ArgumentError, r"sparsity=\[0.9\] must be a number in \[0, 1\]"),
    "sparsity array": ({"sparsity": np.ones(2)}, ArgumentError, r"sparsity=array.* must be a number in \[0, 1\]"),
    "scope": ({"scope": "globl"}, ArgumentError, "scope='globl' is not known; give one of layer, global"),
    "criterion": ({"criterion": "l1"}, ArgumentError, "criterion='l1' is not known; give one of .*magnitude"),
    "pattern": ({"pattern": None}, ArgumentError, "pattern=None is not known; give one of .*unstructured"),
    "distribution": ({"distribution": "even"}, ArgumentError, "distribution='even' is not known; .*uniform"),
    "min_keep": ({"min_keep": -1}, ArgumentError, "min_keep=-1 must be a whole number of at least 0"),
    "min_keep float": ({"min_keep": 1.0}, ArgumentError, "min_keep=1.0 must be a whole number"),
    "min_keep bool": ({"min_keep": True}, ArgumentError, "min_keep=True must be a whole number"),
    "seed": ({"seed": "a"}, ArgumentError, "seed='a' must be a whole number of at least 0"),
    "include": ({"include": "nothing"}, ArgumentError, "include='nothing' matches no weight"),
    "exclude": ({"exclude": "nothing"}, ArgumentError, "exclude='nothing' matches no weight"),
    "all excluded": ({"exclude": "*"}, NothingToPruneError, "no weight to prune"),
    "no room": (
        {"sparsity": 0.9, "scope": "global", "min_keep": 16},
        ArgumentError,
        # 16 of the first weight, and the 12 that are left of the second.
        r"58 of 64 weights cannot be dropped .* min_keep \(28 in all\); lower the sparsity or min_keep",
    ),
    "lower target": ({"sparsity": 0.1}, ArgumentError, "is below what is pruned already"),
}


@both
@pytest.mark.parametrize("name", FAILURES)
def test_a_failed_call_leaves_every_bit(flavour, name):
    arguments, error, sentence = FAILURES[name]
    model = sparsekit.prune(mlp(flavour), 0.25)
    # Something trained a pruned weight: not even that is put right by a call that fails.
    ref = prunable_weights(model)[0]
    ref.variable.assign(np.full(ref.shape, 0.5))
    before = bits(model)
    with pytest.raises(error, match=sentence) as caught:
        sparsekit.prune(model, **{"sparsity": 0.5, **arguments})
    assert bits(model) == before
    assert isinstance(caught.value, (SparsekitError, ValueError))
    assert "\n" not in str(caught.value)


@both
@scopes
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("criterion", ["magnitude", "random"])
def test_values_that_are_not_finite_are_named_and_nothing_changes(flavour, scope, bad, criterion):
    model = mlp(flavour)
    second = prunable_weights(model)[1]
    kernel = np.array(second.numpy())
    kernel[3, 1] = kernel[0, 0] = bad
    second.variable.assign(kernel)
    before = bits(model)
    with pytest.raises(
        NonFiniteError, match=f"'{second.path}' holds 2 NaN or infinite values .*exclude='{second.path}'"
    ):
        sparsekit.prune(model, 0.5, scope=scope, criterion=criterion)
    assert bits(model) == before
    # The way out that the sentence names.
    sparsekit.prune(model, 0.5, scope=scope, criterion=criterion, exclude=second.path)
    assert sparsekit.masks_of(model).zeros == 24


@both
def test_a_warning_that_is_an_error_leaves_every_bit(flavour):
    model = weights_set(mlp(flavour), [np.full((6, 8), 0.01), np.full((8, 2), 1.0)])
    before = bits(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(LayerCollapseWarning):
            sparsekit.prune(model, 0.8, scope="global")
    assert bits(model) == before


@both
def test_a_criterion_that_fails_leaves_every_bit(flavour):
    class Broken(Criterion):
        """Raises on the second weight."""

        def score(self, weight, evidence):
            if weight.shape == (8, 2):
                raise RuntimeError("broken")
            return np.abs(weight)

    model = mlp(flavour)
    before = bits(model)
    with pytest.raises(RuntimeError, match="broken"):
        sparsekit.prune(model, 0.5, criterion=Broken())
    assert bits(model) == before


@both
@pytest.mark.parametrize(
    ("masks", "sentence"),
    [
        ({"nowhere/kernel": np.ones((6, 8), bool)}, "has no weight 'nowhere/kernel'; its paths are, for example"),
        ({"first": np.ones((8, 6), bool)}, r"has shape \(8, 6\); the weight has \(6, 8\)"),
        ({"first": np.ones((6, 8))}, "has dtype float64; it must be bool"),
    ],
)
def test_masks_that_do_not_fit_leave_every_bit(flavour, masks, sentence):
    model = sparsekit.prune(mlp(flavour), 0.25)
    first, second = (ref.path for ref in prunable_weights(model))
    before = bits(model)
    given = {second: np.zeros((8, 2), bool), **{first if path == "first" else path: m for path, m in masks.items()}}
    with pytest.raises(MaskError, match=sentence):
        sparsekit.freeze(model, given)
    assert bits(model) == before


def test_what_is_no_model_is_refused():
    for given in (None, "model.h5", [1], np.ones(3)):
        for call in (sparsekit.prune, sparsekit.freeze, sparsekit.strip, sparsekit.masks_of):
            with pytest.raises(ModelTypeError, match="is not a Keras model"):
                call(given)


# --- freeze, strip, masks_of ---


@both
def test_masks_go_from_one_model_to_another(flavour):
    one, other = sparsekit.prune(mlp(flavour), 0.6), mlp(flavour)
    paths = dict(zip(sparsekit.masks_of(one), (ref.path for ref in prunable_weights(other)), strict=True))
    given = {paths[path]: keep for path, keep in sparsekit.masks_of(one).items()}
    assert sparsekit.freeze(other, given) == sparsekit.masks_of(other)
    assert all(np.array_equal(a, b) for a, b in zip(other.get_weights(), one.get_weights(), strict=True))


@both
def test_masks_are_read_from_zeros(flavour):
    model = mlp(flavour)
    sparsekit.prune(model, 0.6)
    before = sparsekit.masks_of(model)
    sparsekit.strip(model)
    assert len(sparsekit.masks_of(model)) == 0
    assert sparsekit.freeze(model) == before


@both
def test_zeros_that_nobody_pruned_stay_free(flavour):
    k = KERAS[flavour]
    model = k.Sequential(
        [k.layers.Input((3,), dtype="int32"), k.layers.Embedding(5, 4), k.layers.Dense(4), k.layers.Dense(2)]
    )
    table, first, second = prunable_weights(model)
    rows = np.ones((5, 4))
    rows[0] = 0
    table.variable.assign(rows)
    first.variable.assign(np.zeros((4, 4)))
    with pytest.raises(ArgumentError, match=r"hold no pruned zeros to read masks from; call sparsekit\.prune"):
        sparsekit.freeze(model)
    second.variable.assign(np.eye(4, 2))
    assert list(sparsekit.freeze(model)) == [second.path]


@both
def test_strip_leaves_the_values_and_takes_the_masks(flavour):
    model = sparsekit.prune(mlp(flavour), 0.6)
    before = values(model)
    assert sparsekit.strip(model) is model
    assert len(sparsekit.masks_of(model)) == 0
    assert all(np.array_equal(value, before[path]) for path, value in values(model).items())
    # Training may fill the zeros now.
    model.fit(np.ones((8, 6)), np.ones((8, 2)), verbose=0)
    assert any((value != before[path]).any() for path, value in values(model).items() if path.endswith("kernel"))


# --- processes and devices ---


def run(code, **env):
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", **env},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


RANDOM = """
import hashlib, keras, sparsekit
layers = [keras.layers.Input((30,)), keras.layers.Dense(40, name="first"), keras.layers.Dense(5, name="last")]
model = keras.Sequential(layers, name="random")
sparsekit.prune(model, 0.7, criterion="random", seed=11, scope="global")
digest = hashlib.sha256(b"".join(keep.tobytes() for keep in sparsekit.masks_of(model).values())).hexdigest()
print(digest)
"""


def test_random_masks_are_the_same_in_every_process():
    here = {}
    exec(RANDOM, here)
    assert run(RANDOM, PYTHONHASHSEED="12") == here["digest"]


@both
def test_pruning_under_a_distribution_strategy(flavour):
    code = f"""
import numpy as np, tensorflow as tf
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2)
import {flavour} as k, sparsekit
from sparsekit.frozen import frozen_masks
from sparsekit.flavour import native
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
with strategy.scope():
    model = k.Sequential([k.layers.Input((6,)), k.layers.Dense(8), k.layers.Dense(2)])
    sparsekit.prune(model, 0.5, scope="global")
    sparsekit.prune(model, 0.75, scope="global")
for mask in frozen_masks(model):
    weights = native(mask.variable).values
    assert len(weights) == len(mask.keep.values) == 2
    for weight, keep in zip(weights, mask.keep.values):
        assert np.count_nonzero(weight.numpy()[~keep.numpy()]) == 0
        assert np.array_equal(weight.numpy(), weights[0].numpy())
        assert np.array_equal(keep.numpy(), mask.keep.values[0].numpy())
assert sparsekit.masks_of(model).zeros == 48, sparsekit.masks_of(model)
assert sparsekit.report(model).violations == 0
print("held")
"""
    assert run(code) == "held"
