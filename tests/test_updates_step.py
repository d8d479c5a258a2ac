"""The step around the rules: no gradient in its graph, the user's model as it was, in every style of use."""

from __future__ import annotations

import threading
from typing import Any

import models
import numpy as np
import pytest
import tensorflow as tf
from models import KERAS, X, Y, both, values

import sparsekit
from sparsekit.errors import ArgumentError, SparsekitWarning
from sparsekit.frozen import attach, frozen_masks
from sparsekit.masks import MaskSet
from sparsekit.training.callbacks import WeightUpdate
from sparsekit.updates import SPSA, Annealing, Rule, Shrink, UniformNoise, fit_with_update, update_step
from sparsekit.updates.step import alone
from sparsekit.weights import prunable_weights

OPTIMIZER = {"keras": {"optimizer": None}, "tf_keras": {}}


def pruned(model: Any) -> Any:
    rng = np.random.default_rng(0)
    attach(model, MaskSet.from_arrays({r.path: rng.random(r.shape) < 0.5 for r in prunable_weights(model)}))
    return model


def without_optimizer(flavour: str, **arguments: Any) -> Any:
    """The small MLP compiled with a loss only (tf_keras always makes an optimizer)."""
    model = models.mlp(flavour, False)
    model.compile(**OPTIMIZER[flavour], **{"loss": "mse", "jit_compile": False, **arguments})
    return pruned(model)


def all_nodes(function: Any) -> list[Any]:
    """Every node of a traced function, with those of the functions that it calls."""
    graph = function.graph.as_graph_def()
    return [*graph.node, *(node for inner in graph.library.function for node in inner.node_def)]


@both
@pytest.mark.parametrize("rule", ["uniform_noise", "spsa"])
def test_the_graph_holds_forward_passes_and_no_gradient(flavour, rule):
    step = update_step(without_optimizer(flavour), rule)
    step(X, Y)
    nodes = all_nodes(step._compiled.get_concrete_function((tf.constant(X), tf.constant(Y), None)))
    assert not [node.name for node in nodes if "grad" in (node.op + node.name).lower()]
    # The function that holds the two products of the forward pass is in the graph once, however often it is called.
    assert sum(node.op == "MatMul" for node in nodes) == 2


@both
def test_no_tape_is_recorded(flavour, monkeypatch):
    model = without_optimizer(flavour)

    def refuse(*_, **__):
        raise AssertionError("a tape was recorded")

    monkeypatch.setattr(tf, "GradientTape", refuse)
    history = fit_with_update(model, (X, Y), UniformNoise(0.01), epochs=1, verbose=0)
    assert np.isfinite(history.history["loss"]).all()


@both
def test_loss_and_metrics_are_those_of_evaluate(flavour):
    """A rule that does nothing must log what the model's own evaluate says, regularisers included."""
    k = KERAS[flavour]

    class Still(Rule):
        compares_losses = False

        def apply(self, trial, state):
            trial.measure()

    layers = [k.layers.Dense(8, "relu", kernel_regularizer="l2"), k.layers.Dense(2)]
    model = k.Sequential([k.layers.Input((6,)), *layers])
    model.compile(loss="mse", metrics=["mae"], jit_compile=False)
    weights = np.linspace(0, 2, len(X)).astype("float32")
    expected = model.evaluate(X, Y, sample_weight=weights, batch_size=16, return_dict=True, verbose=0)
    history = fit_with_update(model, (X, Y, weights), Still(), batch_size=16, verbose=0, shuffle=False)
    for name, value in expected.items():
        assert history.history[name][0] == pytest.approx(value, rel=1e-5), name


@both
def test_fit_is_as_before_afterwards(flavour):
    model = pruned(models.mlp(flavour))
    fit_with_update(model, (X, Y), UniformNoise(0.01), epochs=1, verbose=0)
    assert "train_step" not in vars(model)
    assert not {"build", "finalize_variable_values"} & set(vars(model.optimizer))
    before = values(model)
    model.fit(X, Y, epochs=1, verbose=0)
    iterations = int(model.optimizer.iterations)
    assert iterations == 2, "fit ran two batches, the update none of the optimizer's"
    assert all((values(model)[path] != before[path]).any() for path in before)


@both
def test_the_users_own_train_step_comes_back(flavour):
    k = KERAS[flavour]

    class Own(k.Sequential):
        def train_step(self, data):
            raise AssertionError("the user's train_step is not for updates without gradients")

    model = Own([k.layers.Input((6,)), k.layers.Dense(2)])
    model.compile(loss="mse", jit_compile=False)
    before = values(model)
    fit_with_update(model, (X, Y), UniformNoise(0.01), verbose=0)
    assert any((values(model)[path] != before[path]).any() for path in before)
    with pytest.raises(AssertionError, match="not for updates"):
        model.fit(X, Y, verbose=0)


@both
def test_an_average_of_the_optimizer_does_not_overwrite_the_update(flavour):
    k = KERAS[flavour]
    model = pruned(models.mlp(flavour, k.optimizers.SGD(0.1, use_ema=True)))
    model.fit(X, Y, epochs=1, verbose=0)
    step = update_step(model, Shrink(0.5))
    before = values(model)
    fit_with_update(model, (X, Y), Shrink(0.5), batch_size=len(X), verbose=0)
    for path, value in values(model).items():
        np.testing.assert_array_equal(value, before[path] / 2 if path.endswith("kernel") else before[path])
    assert step.count == 0


@both
def test_xla_takes_the_forward_pass(flavour):
    model = without_optimizer(flavour, jit_compile=True)
    masks, before = frozen_masks(model).to_masks(), values(model)
    history = fit_with_update(
        model, (X, Y), "evolution_strategy", epochs=1, batch_size=32, validation_data=(X, Y), verbose=0
    )
    assert model.jit_compile is True
    assert np.isfinite(history.history["val_loss"]).all()
    models.assert_held(model, masks)
    models.assert_moved(model, masks, before)


@both
def test_mixed_precision_and_eager(flavour):
    k = KERAS[flavour]
    for policy, eager in (("mixed_float16", False), ("float32", True)):
        layers = [k.layers.Dense(8, "relu", dtype=policy), k.layers.Dense(2, dtype="float32")]
        model = k.Sequential([k.layers.Input((6,)), *layers])
        model.compile(loss="mse", run_eagerly=eager, **({} if eager else {"jit_compile": False}))
        masks, before = frozen_masks(pruned(model)).to_masks(), values(model)
        for rule in (UniformNoise(0.05), SPSA(0.01, 0.01)):
            history = fit_with_update(model, (X, Y), rule, verbose=0)
            assert np.isfinite(history.history["loss"]).all()
        models.assert_held(model, masks)
        models.assert_moved(model, masks, before)


@both
def test_nested_and_subclassed_models(flavour):
    k = KERAS[flavour]

    class Whole(k.Model):
        def __init__(self):
            super().__init__()
            inner = k.layers.Input((6,))
            self.body = k.Model(inner, k.layers.Dense(8, "relu")(inner))
            self.head = k.layers.Dense(2)

        def call(self, inputs):
            return self.head(self.body(inputs))

    model = Whole()
    model(X)
    model.compile(loss="mse", jit_compile=False)
    masks, before = frozen_masks(pruned(model)).to_masks(), values(model)
    assert len(masks) == 2
    batches = tf.data.Dataset.from_tensor_slices((X, Y)).batch(16)
    fit_with_update(model, batches, UniformNoise(0.05), shuffle=False, verbose=0)
    models.assert_held(model, masks)
    models.assert_moved(model, masks, before)


@both
def test_dynamic_masks_keep_what_lands_on_zero(flavour):
    model = without_optimizer(flavour)
    masks = frozen_masks(model).to_masks()
    fit_with_update(model, (X, Y), Shrink(0.1, threshold=0.2), masks="dynamic", batch_size=len(X), verbose=0)
    landed = {path: values(model)[path] == 0 for path in masks}
    assert all(landed[path].sum() > (~masks[path]).sum() for path in masks)
    fit_with_update(model, (X, Y), UniformNoise(0.1), masks="dynamic", verbose=0)
    for path in masks:
        assert (values(model)[path][landed[path]] == 0).all()
        np.testing.assert_array_equal(frozen_masks(model).to_masks()[path], ~landed[path])
    update_step(model, UniformNoise(0.1), include="*/bias", masks="dynamic")(X, Y)
    assert all((values(model)[path] != 0).all() for path in values(model) if path.endswith("bias"))


@both
def test_the_public_names_do_the_same(flavour):
    results = []
    for run in (
        lambda m: sparsekit.retrain(m, (X, Y), update=UniformNoise(0.1), batch_size=32, seed=9, verbose=0),
        lambda m: fit_with_update(m, (X, Y), UniformNoise(0.1), batch_size=32, seed=9, verbose=0),
        lambda m: sparsekit.update_step(m, UniformNoise(0.1), seed=9)(X, Y),
        lambda m: m.fit(X, Y, callbacks=[sparsekit.callbacks.WeightUpdate("uniform_noise", every=64)], verbose=0),
    ):
        model = sparsekit.prune(models.mlp(flavour, KERAS[flavour].optimizers.SGD(0.0), jit_compile=False), 0.5)
        masks = sparsekit.masks_of(model)
        history = run(model)
        models.assert_held(model, masks)
        results.append((list(values(model).values()), history))
    for one, two in zip(results[0][0], results[1][0], strict=True):
        np.testing.assert_array_equal(one, two)
    assert results[0][1].history == results[1][1].history


def test_static_masks_let_a_survivor_leave_zero():
    model = without_optimizer("keras")
    masks = frozen_masks(model).to_masks()
    update_step(model, Shrink(0.1, threshold=10.0))(X, Y)
    assert all((values(model)[path] == 0).all() for path in masks)
    update_step(model, UniformNoise(0.1))(X, Y)
    models.assert_held(model, masks)
    assert all((values(model)[path] != 0)[masks[path]].all() for path in masks)


@both
def test_a_loop_of_ones_own_logs_like_train_on_batch(flavour):
    model = without_optimizer(flavour, metrics=["mae"])
    expected = model.evaluate(X, Y, batch_size=len(X), return_dict=True, verbose=0)
    model.reset_metrics()
    logs = update_step(model, UniformNoise(0.01))(X, Y)
    assert {name: float(value) for name, value in logs.items()} == pytest.approx(expected, rel=1e-5)


@both
def test_a_model_that_is_not_compiled_may_bring_a_loss(flavour):
    model = pruned(models.mlp(flavour, False))
    masks, before = frozen_masks(model).to_masks(), values(model)
    logs = update_step(model, Annealing(temperature=1e6), loss="mse")(X, Y)
    expected = np.mean((model_output(model, before) - Y) ** 2)
    assert float(logs["loss"]) == pytest.approx(expected, rel=1e-5)
    models.assert_moved(model, masks, before)
    assert update_step(model, UniformNoise())(X) == {}


def model_output(model: Any, weights: dict[str, np.ndarray]) -> np.ndarray:
    first, second, third, fourth = weights.values()
    return np.tanh(X @ first + second) @ third + fourth


def test_the_count_can_be_set_to_go_on():
    def run(parts: list[int]) -> np.ndarray:
        model = models.mlp("keras", False)
        done = 0
        for part in parts:
            step = update_step(model, UniformNoise(0.1, decay=0.9), seed=4)
            step.count = done
            for _ in range(part):
                step()
            done += part
        return model.layers[0].kernel.numpy()

    np.testing.assert_array_equal(run([4]), run([1, 3]))


def test_a_second_thread_is_refused():
    model = without_optimizer("keras")
    step = update_step(model, UniformNoise())
    caught = []

    def other() -> None:
        try:
            step(X, Y)
        except ArgumentError as error:
            caught.append(str(error))

    with alone(model):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert len(caught) == 1
    assert "is being updated by another thread" in caught[0]
    step(X, Y)


@both
def test_the_callback_works_beside_an_optimizer(flavour):
    model = pruned(models.mlp(flavour, KERAS[flavour].optimizers.SGD(0.0), metrics=["mae"]))
    plain = model.evaluate(X, Y, batch_size=16, return_dict=True, verbose=0)
    masks, before = frozen_masks(model).to_masks(), values(model)
    callback = WeightUpdate(UniformNoise(1e-3), every=2, seed=3)
    history = model.fit(X, Y, batch_size=16, epochs=2, callbacks=[callback], verbose=0)
    assert callback.updates == 4
    assert int(model.optimizer.iterations) == 8
    models.assert_held(model, masks)
    models.assert_moved(model, masks, before)
    assert history.history["mae"][0] == pytest.approx(plain["mae"], rel=0.05)


@pytest.mark.parametrize("settings", [{}, {"steps_per_execution": 2}, {"jit_compile": True}], ids=str)
@both
def test_gradient_steps_and_noise_together_hold_zeros_in_an_ordinary_fit(flavour, settings):
    """Adam, warmed before the prune, pushes masked weights in each batch; every callback after ours sees zeros."""
    optimizer = KERAS[flavour].optimizers.Adam(0.01, use_ema=True)
    model = pruned(models.warmed(models.mlp(flavour, optimizer, **settings)))
    masks, before = frozen_masks(model).to_masks(), values(model)
    callback = WeightUpdate(UniformNoise(1e-3), every=4)
    watcher = models.each_batch(flavour, lambda: models.assert_held(model, masks))
    model.fit(X, Y, batch_size=16, epochs=2, callbacks=[callback, watcher], verbose=0)
    assert callback.updates == 2
    assert watcher.calls == 8 // settings.get("steps_per_execution", 1)
    models.assert_held(model, masks)
    models.assert_moved(model, masks, before)


@both
def test_the_callback_adds_its_noise_to_the_gradient_step(flavour):
    results = []
    for callbacks in ([WeightUpdate(UniformNoise(0.1), seed=3)], []):
        model = pruned(models.mlp(flavour, KERAS[flavour].optimizers.Adam(0.01), jit_compile=False))
        sparsekit.retrain(model, (X, Y), batch_size=64, callbacks=callbacks, engine="dense", verbose=0)
        if not callbacks:
            update_step(model, UniformNoise(0.1), seed=3)()
        results.append(list(values(model).values()))
    for together, in_turn in zip(*results, strict=True):
        np.testing.assert_array_equal(together, in_turn)


def test_the_callback_measures_on_its_own_data_outside_of_the_logs():
    model = pruned(models.mlp("keras", KERAS["keras"].optimizers.SGD(0.0), jit_compile=False))
    plain = model.evaluate(X, Y, batch_size=16, verbose=0)
    callback = WeightUpdate(Annealing(1e-4, temperature=1e6), data=(X, Y + 100))
    history = model.fit(X, Y, batch_size=16, callbacks=[callback], verbose=0)
    assert callback.updates == 4
    assert history.history["loss"][0] == pytest.approx(plain, rel=0.05)


@both
def test_the_callback_says_when_it_comes_late(flavour):
    model = pruned(models.mlp(flavour, steps_per_execution=4))
    callback = WeightUpdate(UniformNoise(1e-3))
    with pytest.warns(SparsekitWarning, match="several batches at once"):
        model.fit(X, Y, batch_size=16, epochs=2, callbacks=[callback], verbose=0)
    assert callback.updates == 8
    callback = WeightUpdate(UniformNoise(1e-3), every=4)
    model.fit(X, Y, batch_size=16, epochs=2, callbacks=[callback], verbose=0)
    assert callback.updates == 2


@both
def test_fit_with_several_steps_an_execution_updates_after_each_batch(flavour):
    model = without_optimizer(flavour, steps_per_execution=4)
    before = values(model)
    fit_with_update(model, (X, Y), Shrink(0.5), batch_size=16, verbose=0)
    for path, value in values(model).items():
        np.testing.assert_array_equal(value, before[path] / 2**4 if path.endswith("kernel") else before[path])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: update_step(m, "shrink", masks="fixed"), r"masks='fixed' is not known; give one of static, dynamic"),
        (lambda m: update_step(m, "shrink", seed=1.5), r"seed=1.5 must be a whole number"),
        (lambda m: update_step(m, "spsa"), r"SPSA compares losses and the model .* has none; pass loss="),
        (lambda m: fit_with_update(m, (X, Y), "shrink"), r"is not compiled; call model.compile\(loss=...\) first"),
        (lambda m: update_step(m, "shrink", include="nothing/*"), r"include='nothing/\*' matches no weight"),
        (lambda m: WeightUpdate("shrink", every=0), r"every=0 must be a whole number of batches >= 1"),
        (lambda m: WeightUpdate("spsa"), r"pass data=\(x, y\) to measure on"),
    ],
)
def test_what_cannot_run_is_refused(call, message):
    model = models.mlp("keras", False)
    with pytest.raises(ArgumentError, match=message):
        call(model)


def test_a_second_loss_is_refused():
    with pytest.raises(ArgumentError, match="is compiled with its own loss; leave loss= away"):
        update_step(without_optimizer("keras"), "spsa", loss="mae")
