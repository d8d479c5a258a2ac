"""`MaskConstraint` in a layer's constructor, and what becomes of it in files."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
from models import KERAS, X, Y, assert_held, both, each_batch, mlp, retrain_watched, values, warmed

import sparsekit
from sparsekit import MaskConstraint
from sparsekit.errors import MaskError

KEEP = np.arange(48).reshape(6, 8) % 3 == 0


def constrained(flavour: str, first=None, bias=None):
    k = KERAS[flavour]
    k.utils.set_random_seed(1)
    model = k.Sequential(
        [
            k.layers.Input((6,)),
            k.layers.Dense(8, "tanh", kernel_constraint=first, bias_constraint=bias, bias_initializer="ones"),
            k.layers.Dense(2, kernel_constraint=MaskConstraint()),
        ]
    )
    model.compile(k.optimizers.Adam(0.01), "mse")
    return model


@both
def test_holds_a_given_mask_in_plain_fit(flavour: str) -> None:
    keep_bias = np.arange(8) % 2 == 0
    model = constrained(flavour, MaskConstraint(KEEP), MaskConstraint(keep_bias))

    def check() -> None:
        kernel, bias = model.layers[0].get_weights()
        assert (kernel[~KEEP] == 0).all()
        assert (kernel[KEEP] != 0).all()
        assert (bias[~keep_bias] == 0).all()

    watcher = each_batch(flavour, check)
    model.fit(X, Y, batch_size=16, verbose=0, callbacks=[watcher])
    assert watcher.calls == 4


@both
def test_takes_the_mask_of_prune(flavour: str) -> None:
    """Plain fit holds the zeros then; strip lets go of them."""
    model = constrained(flavour, MaskConstraint())
    model.fit(X, Y, verbose=0)
    assert all((v != 0).all() for v in model.layers[0].get_weights())
    sparsekit.prune(model, 0.5)
    masks = sparsekit.masks_of(model)
    model.fit(X, Y, epochs=2, verbose=0)
    assert_held(model, masks)
    sparsekit.prune(model, 0.75)
    model.fit(X, Y, verbose=0)
    assert_held(model, sparsekit.masks_of(model))
    for enforce in ("gradient", "constraint"):
        retrain_watched(model, (X, Y), enforce=enforce)
    sparsekit.strip(model)
    model.fit(X, Y, epochs=2, verbose=0)
    assert (model.layers[0].get_weights()[0] != 0).all()


@pytest.mark.parametrize("ending", ["h5", "keras"])
@both
def test_survives_a_file(flavour: str, ending: str, tmp_path) -> None:
    k = KERAS[flavour]
    model = constrained(flavour, MaskConstraint(inner=k.constraints.MaxNorm(0.5)))
    sparsekit.prune(model, 0.5)
    masks = list(sparsekit.masks_of(model).values())
    model.save(tmp_path / f"m.{ending}")
    loaded = k.models.load_model(tmp_path / f"m.{ending}", compile=False)
    loaded.compile(k.optimizers.SGD(0.5), "mse")
    loaded.fit(X, Y, verbose=0)
    for layer, keep in zip(loaded.layers, masks, strict=True):
        kernel = layer.get_weights()[0]
        assert (kernel[~keep] == 0).all()
        assert (kernel[keep] != 0).all()
    assert np.linalg.norm(loaded.layers[0].get_weights()[0], axis=0).max() <= 0.5 + 1e-6
    assert type(loaded.layers[0].kernel_constraint.inner).__name__ == "MaxNorm"
    sparsekit.freeze(loaded)
    retrain_watched(loaded, (X, Y))


def test_config_is_json_and_small() -> None:
    keep = np.random.default_rng(0).random((1000, 1000)) < 0.1
    config = json.loads(json.dumps(MaskConstraint(keep).get_config()))
    assert len(config["keep"]) < keep.size / 8
    np.testing.assert_array_equal(MaskConstraint.from_config(config).keep, keep)
    assert MaskConstraint.from_config(MaskConstraint().get_config()).keep is None


@both
def test_a_large_mask_fits_an_h5_file(flavour: str, tmp_path) -> None:
    """An HDF5 attribute of fixed length ends at 64 KiB; the config of a mask of a million weights does not."""
    k = KERAS[flavour]
    keep = np.random.default_rng(0).random((1024, 1024)) < 0.5
    model = k.Sequential([k.layers.Input((1024,)), k.layers.Dense(1024, kernel_constraint=MaskConstraint(keep))])
    model.save(tmp_path / "m.h5")
    loaded = k.models.load_model(tmp_path / "m.h5", compile=False)
    np.testing.assert_array_equal(loaded.layers[-1].kernel_constraint.keep, keep)


@both
def test_one_object_for_two_weights_is_refused(flavour: str) -> None:
    k = KERAS[flavour]
    shared = MaskConstraint()
    model = k.Sequential(
        [
            k.layers.Input((6,)),
            k.layers.Dense(6, kernel_constraint=shared),
            k.layers.Dense(6, kernel_constraint=shared),
        ]
    )
    before = values(model)
    for attempt in (
        lambda: sparsekit.prune(model, 0.5),
        lambda: sparsekit.freeze(model, {next(iter(before)): np.eye(6) > 0}),
    ):
        with pytest.raises(MaskError, match=r"kernel' share one MaskConstraint object; give each weight its own"):
            attempt()
    assert all((values(model)[path] == v).all() for path, v in before.items())


def test_wrong_arguments() -> None:
    with pytest.raises(MaskError, match=r"A mask must be bool \(True = keep\); got dtype float64"):
        MaskConstraint(np.ones(3))
    with pytest.raises(MaskError, match=r"inner='max_norm' is no constraint; give an object such as"):
        MaskConstraint(inner="max_norm")


@both
def test_a_constraint_of_the_user_runs_too(flavour: str) -> None:
    k = KERAS[flavour]
    model = constrained(flavour, k.constraints.NonNeg())
    sparsekit.prune(model, 0.25)
    kernel = next(iter(sparsekit.masks_of(model)))
    sparsekit.retrain(model, (X, Y), epochs=2, enforce="constraint", verbose=0)
    assert (values(model)[kernel] >= 0).all()
    assert_held(model, sparsekit.masks_of(model))
    assert type(model.trainable_variables[0].constraint).__name__ == "NonNeg"


@pytest.mark.parametrize("enforce", ["gradient", "constraint"])
@both
def test_a_norm_does_not_count_pruned_weights(flavour: str, enforce: str) -> None:
    """As if they did not exist: MaxNorm sees the masked weight."""
    k = KERAS[flavour]
    model = constrained(flavour, k.constraints.MaxNorm(0.3))
    model.compile(k.optimizers.SGD(0.5), "mse")
    sparsekit.prune(model, 0.5)
    masks = list(sparsekit.masks_of(model).values())
    unbound = mlp(flavour, k.optimizers.SGD(0.5))
    unbound.set_weights(list(values(model).values()))
    kernels = [path for path in values(unbound) if path.endswith("kernel")]
    sparsekit.freeze(unbound, dict(zip(kernels, masks, strict=True)))
    for each in (model, unbound):
        sparsekit.retrain(each, (X, Y), batch_size=64, enforce=enforce, verbose=0)
    free_step = next(iter(values(unbound).values()))
    norms = np.linalg.norm(free_step, axis=0, keepdims=True)
    expected = free_step * np.clip(norms, 0, 0.3) / (1e-7 + norms)
    np.testing.assert_allclose(next(iter(values(model).values())), expected, rtol=1e-5)
    assert norms.max() > 0.3


@pytest.mark.parametrize("enforce", ["gradient", "constraint"])
@both
def test_biases_on_request(flavour: str, enforce: str) -> None:
    model = warmed(mlp(flavour))
    sparsekit.prune(model, 0.5, include=["*kernel", "*bias"])
    masks = sparsekit.masks_of(model)
    assert [keep.shape for keep in masks.values()] == [(6, 8), (8,), (8, 2), (2,)]
    retrain_watched(model, (X, Y), epochs=2, enforce=enforce)


def test_constraint_of_a_weight_is_put_back() -> None:
    for flavour in KERAS:
        k = KERAS[flavour]
        model = constrained(flavour, k.constraints.MaxNorm(2.0))
        before = [v.constraint for v in model.trainable_variables]
        sparsekit.prune(model, 0.5)
        sparsekit.retrain(model, (X, Y), enforce="constraint", verbose=0)
        assert all(v.constraint is c for v, c in zip(model.trainable_variables, before, strict=True))


def test_a_pruned_file_opens_where_sparsekit_is_not(tmp_path) -> None:
    for flavour in KERAS:
        model = sparsekit.prune(warmed(mlp(flavour)), 0.5)
        sparsekit.retrain(model, (X, Y), enforce="constraint", verbose=0)
        model.save(tmp_path / f"{flavour}.keras")
    code = (
        "import sys; sys.modules['sparsekit'] = None\n"
        "import keras, tf_keras, numpy as np\n"
        "for k in (keras, tf_keras):\n"
        "    model = k.models.load_model(sys.argv[1] + '/' + k.__name__ + '.keras')\n"
        "    print(sum((w == 0).sum() for w in model.get_weights() if w.ndim == 2))\n"
        "    model.fit(np.ones((8, 6)), np.ones((8, 2)), verbose=0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == ["32", "32"], done.stderr
    assert done.returncode == 0, done.stderr
