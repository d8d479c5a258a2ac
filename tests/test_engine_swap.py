"""A run on the sparse engine leaves what a run on the dense one leaves: numbers, optimizer, model and files."""

from __future__ import annotations

import itertools
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from models import KERAS, assert_held, both, values
from test_optimizers import OPTIMIZERS, make_optimizer

import sparsekit
from sparsekit.engine.slots import Twin
from sparsekit.errors import EngineError
from sparsekit.flavour import flavour_of

RNG = np.random.default_rng(5)
X = RNG.normal(size=(40, 6)).astype("float32")
Y = RNG.normal(size=(40, 2)).astype("float32")
FIT: dict[str, Any] = {"batch_size": 8, "shuffle": False, "verbose": 0}

# Their update of one weight depends on others in a way that a vector of kept values does not have.
REFUSED = {"Muon", "Adafactor"}
NAMES = [(flavour, name) for flavour, name in OPTIMIZERS if name not in REFUSED]


def mlp(flavour: str, optimizer: Any, **layer: Any) -> Any:
    k = KERAS[flavour]
    k.utils.set_random_seed(1)
    layers = [k.layers.Input((6,)), k.layers.Dense(8, "relu", name="first", **layer), k.layers.Dense(2, name="last")]
    model = k.Sequential(layers, name="net")
    model.compile(optimizer, "mse")
    return model


def optimizer_state(model: Any) -> list[np.ndarray]:
    return [np.asarray(v.numpy()) for v in flavour_of(model).optimizer_variables(model.optimizer)]


def warm(model: Any) -> None:
    """Give the optimizer the state of a run that went before, the same on each call."""
    flavour, rng = flavour_of(model), np.random.default_rng(2)
    flavour.build_optimizer(model.optimizer, model.trainable_variables)
    for _, slot, _ in flavour.slots(model.optimizer):
        if slot.shape:
            slot.assign(np.abs(rng.normal(size=tuple(slot.shape))).astype("float32") * 0.1 + slot.numpy())


def while_swapped(k: Any, model: Any, look: Any) -> None:
    """Have `look()` called at each epoch's beginning by something that is no callback: nothing is put back for it."""

    class Look(k.metrics.Mean):
        def reset_state(self):
            super().reset_state()
            look()

        def update_state(self, y_true, y_pred, sample_weight=None):
            return super().update_state(y_pred)

    model.compile(model.optimizer, "mse", metrics=[Look(name="look")])


def run_both(make: Any, x: Any = X, y: Any = Y, **arguments: Any) -> tuple[Any, Any]:
    """The same model retrained on the dense and on the sparse engine, with what holds for any model checked."""
    models = []
    for engine in ("dense", "sparse"):
        model = make()
        optimizer, before = model.optimizer, dict(vars(model.layers[-1]))
        history = sparsekit.retrain(model, (x, y), engine=engine, **{**FIT, **arguments})
        assert history.engine.engine == engine
        assert model.optimizer is optimizer
        assert vars(model.layers[-1]).keys() == before.keys()
        models.append((model, history))
    (dense, dense_history), (sparse, sparse_history) = models
    masks = sparsekit.masks_of(sparse)
    assert masks == sparsekit.masks_of(dense)
    assert_held(sparse, masks)
    one, other = values(dense), values(sparse)
    for left, right in zip(one.values(), other.values(), strict=True):
        np.testing.assert_allclose(right, left, rtol=1e-5, atol=2e-6)
    for left, right in zip(optimizer_state(dense), optimizer_state(sparse), strict=True):
        np.testing.assert_allclose(right, left, rtol=1e-5, atol=2e-6)
    for name, column in dense_history.history.items():
        np.testing.assert_allclose(sparse_history.history[name], column, rtol=1e-5)
    return dense, sparse


@pytest.mark.parametrize(("flavour", "name"), NAMES, ids=lambda value: str(value))
def test_every_optimizer_goes_on_to_the_same_numbers(flavour: str, name: str) -> None:
    averaged = not name.startswith("legacy.")

    def make() -> Any:
        model = mlp(flavour, make_optimizer(flavour, name, averaged))
        warm(model)
        return sparsekit.prune(model, 0.5)

    dense, sparse = run_both(make, epochs=4)
    # And the optimizer is one that a plain fit goes on with.
    for model in (dense, sparse):
        model.fit(X, Y, **FIT)
    for left, right in zip(values(dense).values(), values(sparse).values(), strict=True):
        np.testing.assert_allclose(right, left, rtol=1e-4, atol=1e-5)


def images(k: Any) -> tuple[Any, tuple[int, ...]]:
    layers = [
        k.layers.Input((9, 8, 3)),
        k.layers.Conv2D(8, 3, padding="same", activation="relu", name="a"),
        k.layers.BatchNormalization(name="n"),
        k.layers.Conv2D(6, 3, strides=2, use_bias=False, groups=2, name="b"),
        k.layers.Reshape((-1, 6)),
        k.layers.Conv1D(5, 3, padding="causal", dilation_rate=2, activation="tanh", name="c"),
        k.layers.Dropout(0.0),
        k.layers.GlobalAveragePooling1D(),
        k.layers.Dense(2, name="d"),
    ]
    return k.Sequential(layers, name="images"), (9, 8, 3)


def sequences(k: Any) -> tuple[Any, tuple[int, ...]]:
    inputs = k.layers.Input((7, 5))
    x = k.layers.Bidirectional(k.layers.LSTM(4, return_sequences=True, name="a"), name="both")(inputs)
    x = k.layers.GRU(6, return_sequences=True, name="b")(x)
    x = k.layers.TimeDistributed(k.layers.Dense(4, "relu", name="c"), name="each")(x)
    x = k.layers.MultiHeadAttention(2, 3, name="attention")(x, x)
    x = k.layers.EinsumDense("abc,cde->abde", output_shape=(None, 4, 2), bias_axes="d", name="e")(x)
    x = k.layers.EinsumDense("abde,def->abf", output_shape=(None, 4), bias_axes="f", activation="relu", name="f")(x)
    return k.Model(inputs, k.layers.Dense(2, name="g")(k.layers.LSTM(5, name="h")(x)), name="sequences"), (7, 5)


def shared(k: Any) -> tuple[Any, tuple[int, ...]]:
    """One layer called at two places, inside a model inside a model."""
    inputs = k.layers.Input((6,))
    twice = k.layers.Dense(6, "tanh", name="twice")
    inner = k.Sequential([k.layers.Input((6,)), k.layers.Dense(5, name="within")], name="inner")
    return k.Model(inputs, k.layers.Dense(2, name="last")(inner(twice(twice(inputs)))), name="outer"), (6,)


def subclassed(k: Any) -> tuple[Any, tuple[int, ...]]:
    class Net(k.Model):
        def __init__(self):
            super().__init__(name="subclassed")
            self.first = k.layers.Dense(8, "relu", name="first")
            self.last = k.layers.Dense(2, name="last")

        def call(self, x, training=None):
            return self.last(self.first(x))

    model = Net()
    model(np.zeros((1, 6), "float32"))
    return model, (6,)


@both
@pytest.mark.parametrize(("build", "kernels"), [(images, 4), (sequences, 16), (shared, 3), (subclassed, 2)])
def test_every_kind_of_layer(flavour: str, build: Any, kernels: int) -> None:
    k = KERAS[flavour]

    def make() -> Any:
        k.utils.set_random_seed(1)
        model, _ = build(k)
        model.compile(k.optimizers.Adam(0.01), "mse")
        return sparsekit.prune(model, 0.6)

    shape = build(k)[1]
    x = np.random.default_rng(1).normal(size=(16, *shape)).astype("float32")
    # Validation runs on the engine as well.
    _, sparse = run_both(make, x, Y[:16], epochs=4, validation_data=(x, Y[:16]))
    assert len(sparse.history.engine.swapped) == kernels


@both
@pytest.mark.parametrize("kind", ["L1", "L2", "L1L2"])
def test_penalties_on_weights(flavour: str, kind: str) -> None:
    k = KERAS[flavour]
    penalty = lambda: getattr(k.regularizers, kind)(0.1)  # noqa: E731
    run_both(lambda: sparsekit.prune(mlp(flavour, k.optimizers.SGD(0.1), kernel_regularizer=penalty()), 0.5), epochs=2)


def test_decay_leaves_out_what_the_user_left_out() -> None:
    def make() -> Any:
        optimizer = keras.optimizers.AdamW(0.01, weight_decay=0.5)
        model = mlp("keras", optimizer)
        optimizer.exclude_from_weight_decay(var_list=[model.layers[0].kernel])
        return sparsekit.prune(model, 0.5)

    run_both(make, epochs=2)


@both
def test_clipping_accumulation_and_several_steps_a_call(flavour: str) -> None:
    k = KERAS[flavour]
    more = {"gradient_accumulation_steps": 2} if flavour == "keras" else {}

    def make() -> Any:
        optimizer = k.optimizers.Adam(0.05, global_clipnorm=0.1, use_ema=True, ema_overwrite_frequency=3, **more)
        return sparsekit.prune(mlp(flavour, optimizer), 0.5)

    run_both(make, epochs=4, steps_per_execution=2)


@both
def test_learning_rates_that_change(flavour: str) -> None:
    k = KERAS[flavour]

    def make() -> Any:
        rate = k.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
        return sparsekit.prune(mlp(flavour, k.optimizers.SGD(rate)), 0.5)

    run_both(make, epochs=2)

    scheduled = k.callbacks.LearningRateScheduler(lambda epoch: 0.1 / (epoch + 1))
    _, sparse = run_both(
        lambda: sparsekit.prune(mlp(flavour, k.optimizers.SGD(0.1)), 0.5), epochs=3, callbacks=[scheduled]
    )
    assert float(sparse.optimizer.learning_rate) == np.float32(0.1 / 3)


@both
def test_memory_is_given_back_while_swapped(flavour: str) -> None:
    k = KERAS[flavour]
    k.utils.set_random_seed(1)
    model = k.Sequential([k.layers.Input((6,)), k.layers.Dense(400, "relu"), k.layers.Dense(400), k.layers.Dense(2)])
    model.compile(k.optimizers.Adam(0.01), "mse")
    sparsekit.prune(model, 0.9)
    flavour_ = flavour_of(model)
    flavour_.build_optimizer(model.optimizer, model.trainable_variables)
    own, dense = model.optimizer, [*model.trainable_variables]

    def elements(variables: list[Any]) -> int:
        return sum(int(np.size(tf.raw_ops.ReadVariableOp(resource=v.handle, dtype=v.dtype))) for v in variables)

    def held() -> int:
        # Both the user's variables and those that stand in for them.
        found = [*dense, *model.trainable_variables]
        for optimizer in {id(o): o for o in (own, model.optimizer)}.values():
            found += [v for v in flavour_.optimizer_variables(optimizer) if tf.as_dtype(v.dtype).is_floating]
        variables = {id(v): v for v in (getattr(one, "_value", one) for one in found)}
        return elements(list(variables.values()))

    before, seen = held(), []
    while_swapped(k, model, lambda: seen.append((held(), [tuple(v.shape) for v in model.trainable_variables])))
    x = RNG.normal(size=(16, 6)).astype("float32")
    sparsekit.retrain(model, (x, Y[:16]), engine="sparse", epochs=2, **FIT)
    assert held() == before
    assert [len(shape) for shape in seen[-1][1]] == [1] * 6
    assert seen[-1][0] <= 0.2 * before


@both
@pytest.mark.parametrize(
    "hook", ["on_train_begin", "on_epoch_begin", "on_epoch_end", "on_train_batch_end", "on_test_end", "on_train_end"]
)
def test_callbacks_find_and_leave_the_right_weights(flavour: str, hook: str) -> None:
    k = KERAS[flavour]

    def run(engine: str) -> tuple[Any, list[Any]]:
        model = sparsekit.prune(mlp(flavour, k.optimizers.Adam(0.05)), 0.5)
        masks, seen, own = sparsekit.masks_of(model), [], model.optimizer
        warm(model)

        class Look(k.callbacks.Callback):
            pass

        def look(self: Any, *_: Any, **__: Any) -> None:
            assert self.model.optimizer is own
            assert [tuple(v.shape) for v in model.trainable_variables] == [(6, 8), (8,), (8, 2), (2,)]
            assert_held(model, masks)
            seen.append([*model.get_weights(), *optimizer_state(model)])
            # What a callback writes is what training goes on with.
            model.layers[1].bias.assign_add([1.0, 0.0])
            model.layers[0].kernel.assign(model.layers[0].kernel * 0.9)

        setattr(Look, hook, look)
        data = {"epochs": 2, "validation_data": (X, Y), "callbacks": [Look()]}
        sparsekit.retrain(model, (X, Y), engine=engine, **FIT, **data)
        return model, seen

    (dense, seen), (sparse, seen_sparse) = run("dense"), run("sparse")
    assert len(seen) == len(seen_sparse) > 0
    for one, other in zip([*seen, dense.get_weights()], [*seen_sparse, sparse.get_weights()], strict=True):
        for left, right in zip(one, other, strict=True):
            np.testing.assert_allclose(right, left, rtol=1e-5, atol=1e-6)


@both
def test_callbacks_may_use_the_model_in_every_way(flavour: str, tmp_path: Any) -> None:
    """Called, predicting, evaluating, saved, and by a function that was traced before the run: after each batch."""
    k = KERAS[flavour]
    model = sparsekit.prune(mlp(flavour, k.optimizers.Adam(0.05)), 0.5)
    masks, seen = sparsekit.masks_of(model), []

    @tf.function
    def traced(x):
        return model(x)

    def by_hand() -> np.ndarray:
        first, bias, last, end = (np.asarray(v.numpy()) for v in model.trainable_variables)
        return np.maximum(X @ first + bias, 0.0) @ last + end

    traced(tf.constant(X))
    model.predict(X, verbose=0)

    def look(batch: int, logs: Any) -> None:
        expected = by_hand()
        path = str(tmp_path / f"{len(seen)}.keras")
        model.save(path)
        outputs = [traced(tf.constant(X)), model(X), model.predict(X, verbose=0), k.models.load_model(path)(X)]
        for output in outputs:
            np.testing.assert_allclose(output, expected, rtol=1e-4, atol=1e-5)
        loss = model.evaluate(X, Y, verbose=0)
        np.testing.assert_allclose(loss, np.mean((expected - Y) ** 2), rtol=1e-5)
        assert [w.shape for w in model.get_weights()] == [(6, 8), (8,), (8, 2), (2,)]
        assert_held(model, masks)
        seen.append(expected)

    callbacks = [k.callbacks.LambdaCallback(on_train_batch_end=look)]
    sparsekit.retrain(model, (X, Y), engine="sparse", callbacks=callbacks, **FIT)
    assert len(seen) == 5
    # They did learn in between.
    assert all(np.abs(one - other).max() > 1e-3 for one, other in itertools.pairwise(seen))


@both
def test_who_is_no_callback_finds_an_error_and_no_wrong_numbers(flavour: str) -> None:
    """A function traced before, called in the middle of training: it would need kernels that are not there."""
    model = sparsekit.prune(mlp(flavour, KERAS[flavour].optimizers.Adam(0.05)), 0.5)
    traced = tf.function(lambda x: model(x))
    expected, errors = traced(tf.constant(X)), []

    def look() -> None:
        if model.trainable_variables[0].shape.rank == 1:
            with pytest.raises(tf.errors.InvalidArgumentError):
                traced(tf.constant(X))
            # While the model itself, called anew, is right.
            errors.append(np.abs(np.asarray(model(X)) - np.asarray(expected)).max())

    while_swapped(KERAS[flavour], model, look)
    sparsekit.retrain(model, (X, Y), engine="sparse", **FIT)
    assert errors
    assert errors[0] < 1e-5


@both
@pytest.mark.parametrize("save_freq", ["epoch", 3])
def test_checkpoints_hold_a_plain_model(flavour: str, save_freq: Any, tmp_path: Any) -> None:
    k = KERAS[flavour]
    model = sparsekit.prune(mlp(flavour, k.optimizers.Adam(0.05)), 0.5)
    masks = sparsekit.masks_of(model)
    keeper = k.callbacks.ModelCheckpoint(str(tmp_path / "model-{epoch}.keras"), save_freq=save_freq)
    sparsekit.retrain(model, (X, Y), engine="sparse", epochs=2, callbacks=[keeper], **FIT)
    files = sorted(tmp_path.iterdir())
    assert len(files) == 2
    opened = [k.models.load_model(str(file)) for file in files]
    for saved in opened:
        assert [v.shape for v in saved.trainable_variables] == [v.shape for v in model.trainable_variables]
        for path in masks:
            kernel = next(w for w in saved.get_weights() if w.shape == masks[path].shape)
            assert np.count_nonzero(kernel[~masks[path]]) == 0
            assert np.count_nonzero(kernel[masks[path]]) > 0
    if save_freq == "epoch":
        np.testing.assert_array_equal(opened[-1].get_weights()[0], model.get_weights()[0])
        opened[-1].fit(X, Y, **FIT)


@both
def test_early_stopping_restores_the_best_weights(flavour: str) -> None:
    k = KERAS[flavour]
    seen: list[Any] = []
    model = sparsekit.prune(mlp(flavour, k.optimizers.SGD(0.05)), 0.5)
    rate = k.callbacks.LearningRateScheduler(lambda epoch: 0.05 if epoch == 0 else 2.0)
    keep = k.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(model.get_weights()))
    stop = k.callbacks.EarlyStopping("loss", patience=1, restore_best_weights=True)
    sparsekit.retrain(model, (X, Y), engine="sparse", epochs=6, callbacks=[rate, keep, stop], **FIT)
    assert len(seen) < 6
    best = int(np.argmin(model.history.history["loss"]))
    for kept, restored in zip(seen[best], model.get_weights(), strict=True):
        np.testing.assert_array_equal(kept, restored)


@both
@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_after_an_exception_the_model_holds_what_it_learned(flavour: str, error: type) -> None:
    k = KERAS[flavour]

    def run(engine: str) -> Any:
        model = sparsekit.prune(mlp(flavour, k.optimizers.Adam(0.05)), 0.5)
        own, epochs = model.optimizer, []
        counts = k.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: epochs.append(epoch))

        def stop() -> None:
            if len(epochs) == 2:
                epochs.clear()
                raise error("stop")

        while_swapped(k, model, stop)
        with pytest.raises(error, match="stop"):
            sparsekit.retrain(model, (X, Y), engine=engine, epochs=4, callbacks=[counts], **FIT)
        assert model.optimizer is own
        assert_held(model, sparsekit.masks_of(model))
        return model

    dense, sparse = run("dense"), run("sparse")
    for left, right in zip(
        [*dense.get_weights(), *optimizer_state(dense)], [*sparse.get_weights(), *optimizer_state(sparse)], strict=True
    ):
        np.testing.assert_allclose(right, left, rtol=1e-5, atol=1e-6)
    sparse.fit(X, Y, **FIT)
    assert all("call" not in vars(layer) for layer in sparse.layers)


@both
@pytest.mark.parametrize("where", ["take", "drop_theirs", "give_back", "drop_ours"])
def test_an_interrupt_between_the_two_states_loses_nothing(flavour: str, where: str, monkeypatch: Any) -> None:
    model = sparsekit.prune(mlp(flavour, KERAS[flavour].optimizers.Adam(0.05)), 0.5)
    warm(model)
    before, own, calls = [*values(model).values(), *optimizer_state(model)], model.optimizer, []
    original = getattr(Twin, where)

    def interrupted(self: Any) -> None:
        calls.append(where)
        # The first call to drop_ours is made while the twin is made.
        if len(calls) == 1 + (where == "drop_ours"):
            raise KeyboardInterrupt
        original(self)

    monkeypatch.setattr(Twin, where, interrupted)
    # A step of no length: what is there afterwards is what was there before.
    model.optimizer.learning_rate.assign(0.0)
    before[-len(optimizer_state(model)) :] = optimizer_state(model)
    with pytest.raises(KeyboardInterrupt):
        sparsekit.retrain(model, (X, Y), engine="sparse", **FIT)
    assert model.optimizer is own
    assert all("call" not in vars(layer) for layer in model.layers)
    after = [*values(model).values(), *optimizer_state(model)]
    for left, right in zip(before[:4], after[:4], strict=True):
        np.testing.assert_array_equal(left, right)
    assert [left.shape for left in before] == [right.shape for right in after]
    model.fit(X, Y, **FIT)


@both
def test_enforced_through_constraints(flavour: str) -> None:
    run_both(lambda: sparsekit.prune(mlp(flavour, KERAS[flavour].optimizers.Adam(0.05)), 0.5), enforce="constraint")


@both
def test_functions_traced_before_stay_right(flavour: str) -> None:
    k = KERAS[flavour]
    model = sparsekit.prune(mlp(flavour, k.optimizers.Adam(0.05)), 0.5)
    model.predict(X, verbose=0)
    model.evaluate(X, Y, verbose=0)
    for _ in range(3):
        sparsekit.retrain(model, (X, Y), engine="sparse", **FIT)
        np.testing.assert_allclose(model.predict(X, verbose=0), np.asarray(model(X)), rtol=1e-5)
        expected = float(np.mean((np.asarray(model(X)) - Y) ** 2))
        np.testing.assert_allclose(model.evaluate(X, Y, verbose=0), expected, rtol=1e-5)


def own_step(k: Any, reads_kernel: bool) -> Any:
    class Own(k.Sequential):
        def train_step(self, data):
            x, y = data[0], data[1]
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
                if reads_kernel:
                    loss += tf.reduce_sum(tf.convert_to_tensor(self.layers[0].kernel) ** 2)
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            return {"loss": loss}

    k.utils.set_random_seed(1)
    model = Own([k.layers.Input((6,)), k.layers.Dense(8, "relu", name="a"), k.layers.Dense(2, name="b")], name="own")
    model.compile(k.optimizers.Adam(0.05), "mse")
    return sparsekit.prune(model, 0.5)


@both
def test_a_step_of_the_users_own(flavour: str) -> None:
    run_both(lambda: own_step(KERAS[flavour], False), epochs=2)


@both
def test_a_step_that_reads_kernels_stays_dense(flavour: str) -> None:
    model = own_step(KERAS[flavour], True)
    before = values(model)
    with pytest.raises(EngineError, match="a/kernel outside of its layer"):
        sparsekit.retrain(model, (X, Y), engine="sparse", **FIT)
    for left, right in zip(before.values(), values(model).values(), strict=True):
        np.testing.assert_array_equal(left, right)
    model.fit(X, Y, **FIT)


@both
def test_a_step_compiled_with_xla_inside_stays_dense(flavour: str) -> None:
    k = KERAS[flavour]

    class Own(k.Sequential):
        def train_step(self, data):
            return self.compiled_step(data[0], data[1])

        @tf.function(jit_compile=True)
        def compiled_step(self, x, y):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            return {"loss": loss}

    model = Own([k.layers.Input((6,)), k.layers.Dense(2, name="a")])
    model.compile(k.optimizers.SGD(0.05), "mse")
    sparsekit.prune(model, 0.5)
    with pytest.raises(EngineError, match="compiled with XLA"):
        sparsekit.retrain(model, (X, Y), engine="sparse", **FIT)


@both
def test_a_model_of_a_strategy_stays_dense(flavour: str) -> None:
    with tf.distribute.OneDeviceStrategy("/cpu:0").scope():
        model = mlp(flavour, KERAS[flavour].optimizers.SGD(0.05))
    sparsekit.prune(model, 0.5)
    with pytest.raises(EngineError, match="under a distribution strategy"):
        sparsekit.retrain(model, (X, Y), engine="sparse", **FIT)


def refused(case: str) -> tuple[Any, dict[str, Any]]:
    optimizer = keras.optimizers.Muon(0.01) if case == "muon" else keras.optimizers.Adam(0.01)
    if case == "scaled":
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    layer = {"kernel_constraint": keras.constraints.MaxNorm(1.0)} if case == "constraint" else {}
    model = sparsekit.prune(mlp("keras", optimizer, **layer), 0.5, include=["*first*"])
    arguments = {"eager": {"run_eagerly": True}, "xla": {"jit_compile": True}, "dynamic": {"masks": "dynamic"}}
    return model, arguments.get(case, {})


@pytest.mark.parametrize(
    ("case", "sentence"),
    [
        ("muon", "Muon is not known to update each weight on its own"),
        ("scaled", "LossScaleOptimizer wraps another optimizer"),
        ("constraint", "first/kernel: it has a constraint"),
        ("eager", "runs eagerly"),
        ("xla", "XLA has no kernel"),
    ],
)
def test_what_the_engine_refuses(case: str, sentence: str) -> None:
    model, arguments = refused(case)
    with pytest.raises(EngineError, match=sentence):
        sparsekit.retrain(model, (X, Y), engine="sparse", **FIT, **arguments)
    history = sparsekit.retrain(model, (X, Y), engine="auto", **FIT, **arguments)
    assert history.engine.engine == "dense"
    assert sentence in history.engine.reason


@both
def test_a_prune_within_the_run(flavour: str) -> None:
    k = KERAS[flavour]

    def run(engine: str) -> Any:
        model = sparsekit.prune(mlp(flavour, k.optimizers.Adam(0.02)), 0.3)
        more = k.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: sparsekit.prune(model, 0.3 + 0.2 * epoch))
        sparsekit.retrain(model, (X, Y), engine=engine, epochs=3, callbacks=[more], **FIT)
        return model

    dense, sparse = run("dense"), run("sparse")
    assert sparsekit.masks_of(dense) == sparsekit.masks_of(sparse)
    assert sparsekit.masks_of(sparse).sparsity == pytest.approx(0.7, abs=0.02)
    for left, right in zip(dense.get_weights(), sparse.get_weights(), strict=True):
        np.testing.assert_allclose(right, left, rtol=1e-5, atol=1e-6)


@both
def test_a_killed_run_goes_on_from_its_checkpoints(flavour: str, tmp_path: Any) -> None:
    k = KERAS[flavour]

    def run(engine: str, folder: str, killed: bool = False) -> Any:
        model = sparsekit.prune(mlp(flavour, k.optimizers.Adam(0.02)), 0.5)

        def rate(epoch: int) -> float:
            if killed and epoch == 2:
                raise KeyboardInterrupt
            return 0.02

        arguments = {"callbacks": [k.callbacks.LearningRateScheduler(rate)], "batch_size": 8, "verbose": 0}
        arguments |= {"checkpoint_dir": tmp_path / folder, "checkpoint_every": 3}
        sparsekit.retrain(model, (X, Y), engine=engine, epochs=4, **arguments)
        return model

    whole = run("dense", "whole")
    with pytest.raises(KeyboardInterrupt):
        run("sparse", "parts", killed=True)
    for resumed in (run("sparse", "parts"), run("sparse", "unbroken")):
        assert sparsekit.masks_of(resumed) == sparsekit.masks_of(whole)
        for left, right in zip(
            [*whole.get_weights(), *optimizer_state(whole)],
            [*resumed.get_weights(), *optimizer_state(resumed)],
            strict=True,
        ):
            np.testing.assert_allclose(right, left, rtol=1e-5, atol=1e-6)
