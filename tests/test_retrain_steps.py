"""How the step is run and what its gradients look like: the zeros hold, and the survivors move as they should."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from models import KERAS, X, Y, assert_held, both, each_batch, mlp, retrain_watched, values, warmed

import sparsekit
from sparsekit.errors import NonFiniteError
from sparsekit.flavour import get

enforces = pytest.mark.parametrize("enforce", ["gradient", "constraint"])


def gradients(model, x, y) -> dict[str, np.ndarray]:
    """Gradients of the mean squared error by path, of the weights that have one."""
    variables = {path: v for path, v in zip(values(model), model.weights, strict=True) if v.trainable}
    sources = [v.value if hasattr(v, "path") else v for v in variables.values()]
    sources = [source() if callable(source) else source for source in sources]
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
    found = zip(variables, tape.gradient(loss, sources), strict=True)
    return {path: tf.convert_to_tensor(g).numpy() for path, g in found if g is not None}


def masked(arrays: dict[str, np.ndarray], masks) -> dict[str, np.ndarray]:
    return {path: np.where(masks[path], a, 0) if path in masks else a for path, a in arrays.items()}


def assert_close(left: dict, right: dict, **tolerance) -> None:
    for path in right:
        np.testing.assert_allclose(left[path], right[path], err_msg=path, **{"rtol": 1e-5, "atol": 1e-6, **tolerance})


@pytest.fixture
def mixed_float16(flavour: str):
    KERAS[flavour].mixed_precision.set_global_policy("mixed_float16")
    yield
    KERAS[flavour].mixed_precision.set_global_policy("float32")


@enforces
@both
def test_ways_to_run_a_step_agree(flavour: str, enforce: str) -> None:
    ways = [
        {"jit_compile": False},
        {"jit_compile": True},
        {"run_eagerly": True},
        {"steps_per_execution": 4, "jit_compile": False},
    ]
    results, calls = [], []
    for way in ways:
        model = sparsekit.prune(warmed(mlp(flavour)), 0.5)
        masks = sparsekit.masks_of(model)
        watcher = each_batch(flavour, lambda model=model, masks=masks: assert_held(model, masks))
        sparsekit.retrain(
            model, (X, Y), batch_size=8, shuffle=False, enforce=enforce, verbose=0, callbacks=[watcher], **way
        )
        assert_held(model, masks)
        assert int(model.optimizer.iterations) == 8 + 8
        results.append(values(model))
        calls.append(watcher.calls)
    assert calls == [8, 8, 8, 2]
    for result in results[1:]:
        for (path, value), expected in zip(result.items(), results[0].values(), strict=True):
            np.testing.assert_allclose(value, expected, atol=1e-5, err_msg=path)


@pytest.mark.parametrize("clip", ["clipnorm", "global_clipnorm"])
@enforces
@both
def test_clipping_sees_the_masked_gradient(flavour: str, enforce: str, clip: str) -> None:
    k = KERAS[flavour]
    limit = 0.01
    model = sparsekit.prune(mlp(flavour, k.optimizers.SGD(0.5, **{clip: limit})), 0.75)
    masks, before = sparsekit.masks_of(model), values(model)
    g = masked(gradients(model, X, Y), masks)
    total = np.sqrt(sum(np.square(a).sum() for a in g.values()))
    clipped = {
        "clipnorm": lambda a: a * min(1.0, limit / np.linalg.norm(a)),
        "global_clipnorm": lambda a: a * min(1.0, limit / total),
    }[clip]
    assert total > limit
    sparsekit.retrain(model, (X, Y), batch_size=64, enforce=enforce, verbose=0)
    assert_close(values(model), {path: before[path] - 0.5 * clipped(a) for path, a in g.items()})


@pytest.mark.parametrize("frequency", [None, 3])
@enforces
@both
def test_weight_averages(flavour: str, enforce: str, frequency: int | None) -> None:
    """Averages from before the prune do not bring zeros back, and survivors still have theirs."""
    optimizer = KERAS[flavour].optimizers.SGD(0.05, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=frequency)
    model = sparsekit.prune(warmed(mlp(flavour, optimizer)), 0.5)
    retrain_watched(model, (X, Y), batch_size=8, epochs=2, enforce=enforce)
    keep = next(iter(sparsekit.masks_of(model).values()))
    slots = [v.numpy() for _, v, _ in get(flavour).slots(model.optimizer) if v.shape == keep.shape]
    assert slots
    assert all((slot[~keep] == 0).all() for slot in slots)
    assert any((slot[keep] != 0).all() for slot in slots)


def test_gradient_accumulation() -> None:
    """Four micro-batches are one update on all of them; every micro-step leaves the zeros alone."""
    optimizers = KERAS["keras"].optimizers
    results = []
    for optimizer, size in ((optimizers.Adam(0.01, gradient_accumulation_steps=4), 16), (optimizers.Adam(0.01), 64)):
        model = mlp("keras", optimizer)
        model.fit(X, Y, batch_size=size, epochs=2, shuffle=False, verbose=0)
        sparsekit.prune(model, 0.5)
        retrain_watched(model, (X, Y), batch_size=size, epochs=3, shuffle=False)
        results.append(values(model))
    for value, expected in zip(results[0].values(), results[1].values(), strict=True):
        np.testing.assert_allclose(value, expected, atol=1e-5)


@enforces
@both
def test_mixed_float16_moves_like_float32(flavour: str, enforce: str, mixed_float16) -> None:
    k = KERAS[flavour]
    moves = []
    for policy in ("mixed_float16", "float32"):
        k.mixed_precision.set_global_policy(policy)
        model = sparsekit.prune(mlp(flavour, k.optimizers.SGD(0.05)), 0.5)
        assert ("LossScale" in type(model.optimizer).__name__) == (policy == "mixed_float16")
        before = values(model)
        retrain_watched(model, (X, Y), batch_size=16, shuffle=False, epochs=2, enforce=enforce)
        moves.append(np.concatenate([(v - before[p]).ravel() for p, v in values(model).items()]))
    assert np.linalg.norm(moves[0] - moves[1]) < 0.1 * np.linalg.norm(moves[1])


@enforces
@both
def test_a_step_with_infinite_gradients_is_skipped(flavour: str, enforce: str, mixed_float16) -> None:
    k = KERAS[flavour]
    model = sparsekit.prune(warmed(mlp(flavour, k.optimizers.Adam(0.01))), 0.5)
    before = values(model)
    sparsekit.retrain(model, (X, Y * 1e6), batch_size=64, enforce=enforce, verbose=0)
    assert_close(values(model), before, rtol=0, atol=0)
    retrain_watched(model, (X, Y), batch_size=16, enforce=enforce)


def poisoned(flavour: str, optimizer, bad: np.ndarray, value: float):
    """A linear layer whose kernel gradient is `value` where `bad`."""
    k = KERAS[flavour]

    class Poisoned(k.layers.Layer):
        def build(self, shape):
            self.kernel = self.add_weight(name="kernel", shape=(6, 2), initializer="ones")

        def call(self, x):
            @tf.custom_gradient
            def poison(w):
                return tf.identity(w), lambda g: tf.where(bad, tf.constant(value, g.dtype), g)

            return tf.matmul(x, poison(tf.convert_to_tensor(self.kernel)))

    model = k.Sequential([k.layers.Input((6,)), Poisoned()])
    model.compile(optimizer, "mse")
    return model


@enforces
@both
def test_bad_gradients_at_masked_places_do_no_harm(flavour: str, enforce: str) -> None:
    keep = np.arange(12).reshape(6, 2) % 3 == 0
    for arguments in ({}, {"clipnorm": 0.1, "use_ema": True}):
        results = []
        for poison in (float("nan"), 0.0):
            model = poisoned(flavour, KERAS[flavour].optimizers.Adam(0.01, **arguments), ~keep, poison)
            sparsekit.freeze(model, {next(iter(values(model))): keep})
            retrain_watched(model, (X, Y), batch_size=16, shuffle=False, enforce=enforce)
            results.append(next(iter(values(model).values())))
        np.testing.assert_array_equal(results[0], results[1])


@enforces
@both
def test_bad_gradients_at_masked_places_skip_no_step(flavour: str, enforce: str, mixed_float16) -> None:
    keep = np.arange(12).reshape(6, 2) % 3 == 0
    model = poisoned(flavour, KERAS[flavour].optimizers.Adam(0.01), ~keep, float("inf"))
    sparsekit.freeze(model, {next(iter(values(model))): keep})
    retrain_watched(model, (X, Y), batch_size=16, enforce=enforce)
    assert int(model.optimizer.iterations) == 4


@enforces
@both
def test_bad_gradients_of_survivors_stay_visible(flavour: str, enforce: str) -> None:
    keep = np.arange(12).reshape(6, 2) % 3 == 0
    bad = np.zeros((6, 2), bool)
    bad[0, 0] = True
    model = poisoned(flavour, KERAS[flavour].optimizers.SGD(0.01), bad, float("nan"))
    path = next(iter(values(model)))
    sparsekit.freeze(model, {path: keep})
    with pytest.raises(NonFiniteError, match=r"^1 value is NaN or infinite after training"):
        sparsekit.retrain(model, (X, Y), batch_size=64, enforce=enforce, verbose=0)
    result = values(model)[path]
    assert np.isnan(result[0, 0])
    assert np.isfinite(np.delete(result.ravel(), 0)).all()


@pytest.mark.filterwarnings("ignore:Gradients do not exist:UserWarning")
@enforces
@both
def test_weights_without_a_gradient(flavour: str, enforce: str) -> None:
    k = KERAS[flavour]

    class Idle(k.layers.Layer):
        def build(self, shape):
            self.idle = self.add_weight(name="idle_kernel", shape=(6, 2), initializer="glorot_uniform")
            self.kernel = self.add_weight(name="kernel", shape=(6, 2), initializer="glorot_uniform")

        def call(self, x):
            return x @ tf.convert_to_tensor(self.kernel)

    model = k.Sequential([k.layers.Input((6,)), Idle()])
    model.compile(
        k.optimizers.AdamW(0.01, use_ema=True) if flavour == "keras" else k.optimizers.Adam(use_ema=True), "mse"
    )
    model.fit(X, Y, verbose=0)
    sparsekit.prune(model, 0.5)
    masks, before = sparsekit.masks_of(model), values(model)
    sparsekit.retrain(model, (X, Y), enforce=enforce, verbose=0)
    assert_held(model, masks)
    moved = {path.rsplit("/")[-1]: (values(model)[path] != before[path]).any() for path in before}
    assert moved["kernel"]
    assert not moved["idle_kernel"]


@pytest.mark.parametrize("clip", [{}, {"global_clipnorm": 0.01}])
@enforces
@both
def test_embedding(flavour: str, enforce: str, clip: dict) -> None:
    """Gradients of an Embedding are rows, here also of rows that the batch holds twice."""
    k = KERAS[flavour]
    k.utils.set_random_seed(1)
    model = k.Sequential(
        [k.layers.Input((3,), dtype="int32"), k.layers.Embedding(10, 4), k.layers.Flatten(), k.layers.Dense(2)]
    )
    model.compile(k.optimizers.SGD(0.5, **clip), "mse")
    sparsekit.prune(model, 0.5, include="*/embeddings")
    tokens = np.array([[0, 1, 2], [3, 0, 0]])
    masks, before = sparsekit.masks_of(model), values(model)
    sparsekit.retrain(model, (tokens, Y[:2]), batch_size=2, enforce=enforce, verbose=0, epochs=1)
    assert_held(model, masks)
    table = next(path for path in before if path.endswith("embeddings"))
    now, keep = values(model)[table], masks[table]
    assert (now[4:] == before[table][4:]).all()
    assert (now[:4] != before[table][:4])[keep[:4]].all()
    if not clip:
        for variable, value in zip(model.weights, before.values(), strict=True):
            variable.assign(value)
        g = masked(gradients(model, tokens, Y[:2]), masks)
        assert_close({table: now}, {table: before[table] - 0.5 * g[table]})


@pytest.mark.parametrize("enforce", ["gradient", "constraint"])
@pytest.mark.parametrize("name", ["SGD", "Adam"])
def test_embedding_with_a_legacy_optimizer(name: str, enforce: str) -> None:
    k = KERAS["tf_keras"]
    model = k.Sequential(
        [k.layers.Input((3,), dtype="int32"), k.layers.Embedding(10, 4), k.layers.Flatten(), k.layers.Dense(2)]
    )
    model.compile(getattr(k.optimizers.legacy, name)(0.1), "mse")
    sparsekit.prune(model, 0.5)
    tokens = np.random.default_rng(0).integers(0, 10, (64, 3))
    retrain_watched(model, (tokens, Y), batch_size=16, enforce=enforce)


@pytest.mark.parametrize(("enforce", "masks"), [("gradient", "static"), ("constraint", "dynamic")])
@both
def test_one_trace_a_run(flavour: str, enforce: str, masks: str) -> None:
    k = KERAS[flavour]
    traces = []

    class Counting(k.layers.Layer):
        def call(self, x, training=False):
            if training:
                traces.append(1)
            return x

    inputs = k.layers.Input((6,))
    model = k.Model(inputs, k.layers.Dense(2)(Counting()(k.layers.Dense(8)(inputs))))
    model.compile("adam", "mse")
    counts = []
    for retrains in (False, True):
        traces.clear()
        if retrains:
            sparsekit.prune(model, 0.5)
            sparsekit.retrain(model, (X, Y), batch_size=16, epochs=4, enforce=enforce, masks=masks, verbose=0)
        else:
            model.fit(X, Y, batch_size=16, epochs=4, verbose=0)
        counts.append(len(traces))
    assert counts[1] <= counts[0]


@both
def test_zero_initialised_biases_train(flavour: str) -> None:
    for enforce, masks in (("gradient", "dynamic"), ("constraint", "static")):
        model = sparsekit.prune(mlp(flavour), 0.5)
        biases = [path for path in values(model) if path.endswith("bias")]
        assert all((values(model)[path] == 0).all() for path in biases)
        sparsekit.retrain(model, (X, Y), enforce=enforce, masks=masks, verbose=0)
        # A hidden unit whose outgoing weights are all pruned has no gradient.
        assert all((values(model)[path] != 0).mean() > 0.5 for path in biases)
