"""Masks over the life of a model: rounds, compiles, copies, strip, and what is refused."""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from models import KERAS, X, Y, assert_held, both, mlp, retrain_watched, values, warmed

import sparsekit
from sparsekit.errors import ArgumentError, MaskError, ModelTypeError
from sparsekit.frozen import frozen_masks


@both
def test_rounds(flavour: str) -> None:
    """Prune and retrain again and again, each time with the optimizer given in another way."""
    k = KERAS[flavour]
    model = warmed(mlp(flavour))
    zeros = []
    for sparsity, way in (
        (0.125, "as compiled"),
        (0.25, "new"),
        (0.375, "reused"),
        (0.375, "string"),
        (0.5, "compile"),
    ):
        sparsekit.prune(model, sparsity)
        given = {"new": k.optimizers.Adam(0.01), "reused": model.optimizer, "string": "adam"}.get(way)
        if way == "compile":
            model.compile(k.optimizers.SGD(0.1, momentum=0.9), "mse")
        retrain_watched(model, (X, Y), batch_size=16, optimizer=given)
        zeros.append({path: v == 0 for path, v in values(model).items() if path.endswith("kernel")})
    assert [sum(z.sum() for z in each.values()) for each in zeros] == [8, 16, 24, 24, 32]
    for earlier, later in itertools.pairwise(zeros):
        assert all(later[path][earlier[path]].all() for path in earlier)


@both
def test_strip_then_fit_trains_everything(flavour: str) -> None:
    model = sparsekit.prune(warmed(mlp(flavour)), 0.5)
    retrain_watched(model, (X, Y))
    assert sparsekit.strip(model) is model
    assert len(sparsekit.masks_of(model)) == 0
    assert sparsekit.report(model).violations == 0
    model.fit(X, Y, epochs=2, batch_size=16, verbose=0)
    assert all((v != 0).all() for path, v in values(model).items() if path.endswith("kernel"))
    with pytest.raises(ArgumentError, match=r"has no masks; call sparsekit\.prune"):
        sparsekit.retrain(model, (X, Y))


@both
def test_plain_fit_between_is_reported_and_repaired(flavour: str) -> None:
    model = sparsekit.prune(warmed(mlp(flavour)), 0.5)
    masks = sparsekit.masks_of(model)
    model.fit(X, Y, verbose=0)
    assert sparsekit.report(model).violations == 32
    retrain_watched(model, (X, Y))
    assert sparsekit.masks_of(model) == masks


@both
def test_nothing_stays_on_model_and_optimizer(flavour: str) -> None:
    model = sparsekit.prune(warmed(mlp(flavour)), 0.5)
    model.fit(X, Y, verbose=0)
    names = set(vars(model)), set(vars(model.optimizer))
    variables = len(model.weights)
    for enforce in ("gradient", "constraint"):
        sparsekit.retrain(model, (X, Y), enforce=enforce, verbose=0)
        assert (set(vars(model)), set(vars(model.optimizer))) == names
        assert len(model.weights) == variables
        assert all(v.constraint is None for v in model.trainable_variables)
    assert not [r for r in gc.get_referrers(frozen_masks(model)) if r is vars(model)]


@both
def test_masks_live_and_die_with_the_model(flavour: str) -> None:
    model = sparsekit.prune(mlp(flavour), 0.5)
    masks = sparsekit.masks_of(model)
    gc.collect()
    assert sparsekit.masks_of(model) == masks
    sparsekit.retrain(model, (X, Y), verbose=0)
    sparsekit.train_step(model)(X, Y)
    watch, frozen = weakref.ref(model), weakref.ref(frozen_masks(model))
    del model
    KERAS[flavour].backend.clear_session()
    gc.collect()
    assert watch() is None
    assert frozen() is None


@pytest.mark.parametrize("way", ["clone_model", "deepcopy", "pickle"])
@both
def test_copies_have_no_masks_and_can_be_frozen(flavour: str, way: str) -> None:
    k = KERAS[flavour]
    model = sparsekit.prune(warmed(mlp(flavour)), 0.5)
    sparsekit.retrain(model, (X, Y), verbose=0, enforce="constraint")
    if way == "clone_model":
        twin = k.models.clone_model(model)
        twin.set_weights(model.get_weights())
        twin.compile("adam", "mse")
    elif way == "deepcopy":
        twin = copy.deepcopy(model)
    else:
        twin = pickle.loads(pickle.dumps(model))
    assert len(sparsekit.masks_of(twin)) == 0
    with pytest.raises(ArgumentError, match=r"sparsekit.freeze\(model\) if its weights are pruned already"):
        sparsekit.retrain(twin, (X, Y))
    masks = sparsekit.freeze(twin)
    assert [m.tolist() for m in masks.values()] == [m.tolist() for m in sparsekit.masks_of(model).values()]
    before = values(model)
    retrain_watched(twin, (X, Y))
    assert all((values(model)[path] == v).all() for path, v in before.items())


@both
def test_a_model_from_a_file_goes_on(flavour: str, tmp_path) -> None:
    """A Keras 3 optimizer out of an .h5 knows other variables; its settings and count are kept."""
    k = KERAS[flavour]
    model = mlp(flavour, k.optimizers.Adam(0.02), loss=k.losses.MeanSquaredError())
    sparsekit.prune(warmed(model), 0.5).save(tmp_path / "m.h5")
    for arguments in ({}, {"metrics": ["mae"]}, {"enforce": "constraint", "steps_per_execution": 2}):
        loaded = k.models.load_model(tmp_path / "m.h5")
        sparsekit.freeze(loaded)
        retrain_watched(loaded, (X, Y), batch_size=16, **arguments)
        assert float(loaded.optimizer.learning_rate) == pytest.approx(0.02)
        assert int(loaded.optimizer.iterations) == 8 + 4


@both
def test_not_compiled(flavour: str) -> None:
    model = sparsekit.prune(mlp(flavour, optimizer=False), 0.5)
    sentence = r"is not compiled and came with no training settings; pass loss= \(and optimizer=\)"
    with pytest.raises(ArgumentError, match=sentence):
        sparsekit.retrain(model, (X, Y))
    with pytest.raises(ArgumentError, match=sentence):
        sparsekit.train_step(model)
    retrain_watched(model, (X, Y), loss="mse")


@both
def test_refused_before_anything_changes(flavour: str) -> None:
    other = tf_keras if flavour == "keras" else keras
    model = mlp(flavour)
    optimizer, before = model.optimizer, values(model)
    cases = [
        ({"enforce": "hope"}, r"enforce='hope' is not known; give one of gradient, constraint"),
        ({"masks": "magic"}, r"masks='magic' is not known; give one of static, dynamic"),
        ({"epochs": 0}, r"epochs=0 must be a whole number of at least 1"),
        ({"schedule": 0.9}, r"schedule=0.9 is no Schedule"),
        ({}, r"has no masks; call sparsekit.prune\(model, sparsity=...\)"),
        ({"optimizer": other.optimizers.Adam()}, rf"is of {other.__name__} and the model of {flavour}"),
        ({"optimizer": 3}, r"int is not a Keras optimizer"),
    ]
    for arguments, sentence in cases:
        with pytest.raises((ArgumentError, ModelTypeError), match=sentence):
            sparsekit.retrain(model, (X, Y), **{"optimizer": "sgd", **arguments} if arguments else {})
    assert model.optimizer is optimizer
    assert len(sparsekit.masks_of(model)) == 0
    assert all((values(model)[path] == v).all() for path, v in before.items())
    with pytest.raises(ModelTypeError, match=rf"is of {other.__name__} and the model of {flavour}; pass {flavour}."):
        sparsekit.masked(other.optimizers.SGD(), sparsekit.prune(model, 0.5))


class Torchlike:
    """What a PyTorch module looks like from outside."""


Torchlike.__module__ = "torch.nn.modules.linear"


@pytest.mark.parametrize(
    ("thing", "sentence"),
    [
        (Torchlike(), r"torch.nn.modules.linear.Torchlike is not a Keras model; .* not on PyTorch modules"),
        ([keras.layers.Dense(2)], r"builtins.list is not a Keras model; pass the model that holds these layers"),
        ("model.h5", r"builtins.str is not a Keras model; open the file first: sparsekit.load\(path\)"),
        (keras.layers.Dense(2), r"Dense is a layer; pass the whole model"),
        (None, r"NoneType is not a Keras model; pass the model object itself"),
        (tf.zeros([2]), r"is not a Keras model"),
    ],
)
@pytest.mark.parametrize(
    "call",
    [
        lambda m: sparsekit.prune(m, 0.5),
        lambda m: sparsekit.retrain(m, (X, Y)),
        sparsekit.freeze,
        sparsekit.strip,
        sparsekit.masks_of,
        sparsekit.report,
        sparsekit.train_step,
        lambda m: sparsekit.masked(keras.optimizers.Adam(), m),
    ],
)
def test_not_a_model(call, thing, sentence: str) -> None:
    with pytest.raises(TypeError, match=sentence):
        call(thing)


@both
def test_freeze_refuses_what_does_not_fit(flavour: str) -> None:
    model = mlp(flavour)
    before = values(model)
    good = next(path for path in before if path.endswith("kernel"))
    keep = np.zeros((6, 8), bool)
    keep[0] = True
    for masks, sentence in [
        ({good: keep, "no/such": keep}, r"has no weight 'no/such'; its paths are, for example"),
        ({good: keep.T}, r"has shape \(8, 6\); the weight has \(6, 8\)"),
        ({good: keep.astype("float32")}, r"has dtype float32; it must be bool"),
    ]:
        with pytest.raises(MaskError, match=sentence):
            sparsekit.freeze(model, masks)
    assert len(sparsekit.masks_of(model)) == 0
    assert all((values(model)[path] == v).all() for path, v in before.items())
    sparsekit.freeze(model, {good: keep})
    retrain_watched(model, (X, Y))
    assert_held(model, sparsekit.masks_of(model))


@both
def test_step_and_memory_stay_flat(flavour: str) -> None:
    """No variable, tensor or trace is left behind by a round."""
    model = sparsekit.prune(mlp(flavour), 0.5)
    counts = []
    for _ in range(3):
        sparsekit.retrain(model, (X, Y), verbose=0)
        gc.collect()
        counts.append(sum(isinstance(obj, tf.Variable) for obj in gc.get_objects()))
    assert counts[1] == counts[2]
