"""How the two Kerases differ in optimizers, and in what a run of fit needs."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from .flavour_base import NAMES, Base, key_of


class Runs(Base):
    """The part of `Flavour` that concerns optimizers and training."""

    # --- optimizers ---

    def is_optimizer(self, obj: Any) -> bool:
        kinds: tuple[type, ...] = (self.keras.optimizers.Optimizer,)
        if not self.is_keras3:
            kinds += (self.keras.optimizers.legacy.Optimizer, self.keras.mixed_precision.LossScaleOptimizer)
        return isinstance(obj, kinds)

    def update_method(self) -> str:
        """Name of the optimizer method through which every update goes."""
        return "apply" if self.is_keras3 else "apply_gradients"

    def inner_optimizers(self, optimizer: Any) -> list[Any]:
        """The optimizer and all those it delegates to (loss scaling, one optimizer a group of weights)."""
        found = [optimizer]
        state = vars(optimizer)
        for child in (
            state.get("inner_optimizer"),
            state.get("_optimizer"),
            *state.get("_inner_optimizers", ()),
        ):
            if child is not None and child is not optimizer:
                found += self.inner_optimizers(child)
        return found

    def is_built_for(self, optimizer: Any, variables: list[Any]) -> bool:
        """Whether the optimizer can update these variables; one that is not built yet can update any."""
        inner = self.inner_optimizers(optimizer)
        known = set().union(*map(_index_table, inner))
        # One that Keras 3 read from an .h5 file is built, for no variables at all.
        built = known or any(getattr(each, "built", False) for each in inner)
        return not built or all(key_of(v) in known for v in variables)

    def slots(self, optimizer: Any) -> Iterator[tuple[str, Any, float]]:
        """The arrays that the optimizer keeps for each weight: moments, accumulators, averages.

        Yields:
            `(key of the weight, slot variable, value of a fresh slot)`. Slots of another shape than the weight
            (factored moments, counters) come along; the caller looks at the shape.
        """
        for inner in self.inner_optimizers(optimizer):
            state = vars(inner)
            if isinstance(state.get("_slots"), dict):
                for key, table in state["_slots"].items():
                    for name, slot in table.items():
                        yield key, slot, _fresh_value(inner, name)
                continue
            for name, column in state.items():
                if name in ("_trainable_variables", "_variables") or not isinstance(column, (list, tuple)):
                    continue
                for key, position in _index_table(inner).items():
                    if position < len(column) and hasattr(column[position], "assign"):
                        yield key, column[position], _fresh_value(inner, name)

    def updates_elementwise(self, optimizer: Any) -> bool:
        """Whether one position's update depends on its own gradient and slots only.

        Only Keras' own classes are known to be so; Muon, Lamb and Adafactor mix positions, and of a class that
        somebody else wrote nothing is known.
        """
        return all(
            type(inner).__module__.split(".")[0] in NAMES and type(inner).__name__ not in _MIXING
            for inner in self.inner_optimizers(optimizer)
        )

    def couples_gradients(self, optimizer: Any) -> bool:
        """Whether one position's gradient decides over others: through a norm to clip by, or an infinite one that
        makes loss scaling skip the step.
        """
        inner = self.inner_optimizers(optimizer)
        return any(type(o).__name__.startswith("LossScaleOptimizer") for o in inner) or any(
            getattr(o, name, None) is not None for o in inner for name in ("clipnorm", "global_clipnorm")
        )

    def refuses_constraint_on_rows(self, optimizer: Any) -> bool:
        """Whether the optimizer raises where a weight with a constraint gets the gradient of some rows only."""
        legacy = () if self.is_keras3 else (self.keras.optimizers.legacy.Optimizer,)
        return any(isinstance(inner, legacy) for inner in self.inner_optimizers(optimizer))

    def averages_weights(self, optimizer: Any) -> bool:
        return any(getattr(inner, "use_ema", False) for inner in self.inner_optimizers(optimizer))

    def rebuilt(self, optimizer: Any) -> Any:
        """A new optimizer with the same settings, learning rate and update count, and fresh slots."""
        fresh = type(optimizer).from_config(optimizer.get_config())
        fresh.iterations.assign(optimizer.iterations)
        return fresh

    def optimizer_variables(self, optimizer: Any) -> list[Any]:
        """An optimizer's variables in the order in which an .h5 file holds them."""
        variables = optimizer.variables
        if callable(variables):
            variables = variables()
        return [*variables]  # type: ignore[misc]

    # --- runs ---

    def build_optimizer(self, optimizer: Any, variables: list[Any]) -> None:
        """Have the optimizer make its slots now, so that they can be given saved values."""
        if hasattr(optimizer, "_create_all_weights"):
            optimizer._create_all_weights(variables)
        elif not getattr(optimizer, "built", False) and not getattr(optimizer, "_built", False):
            optimizer.build(variables)

    def build_metrics(self, model: Any, batch: tuple[Any, ...]) -> None:
        """Have a compiled model make the variables of its metrics before it has trained on a batch.

        Args:
            model: a compiled model.
            batch: `(x, y)` or `(x, y, sample_weight)` as it will get them.
        """
        if self.is_keras3:
            model._symbolic_build(data_batch=batch)
        else:
            # What "accuracy" means is read from the shape of the labels, which training gives at least two axes.
            predicted = model(batch[0], training=False)
            labels = tf.nest.map_structure(lambda y: y[:, None] if len(y.shape) == 1 else y, batch[1])
            model.compiled_loss.build(predicted)
            model.compiled_metrics.build(predicted, labels)

    @contextlib.contextmanager
    def restorable_randomness(self, model: Any, seed: int) -> Iterator[list[Any]]:
        """The states of all random generators of a model that are no weights, as variables.

        Dropout of tf_keras draws from an operation whose state cannot be read, so that it gets a generator with a
        state for as long as this lasts.

        Args:
            model: a model.
            seed: seed of the generators that have none of their own.
        """
        # Those of Keras 3 are among the model's variables.
        found = [] if self.is_keras3 else [getattr(layer, "_random_generator", None) for layer in self.layers(model)]
        generators = [one for one in found if one is not None]
        kept = [dict(vars(one)) for one in generators]
        try:
            for position, one in enumerate(generators):
                if one._rng_type == one.RNG_LEGACY_STATEFUL:
                    one._rng_type, one._built = one.RNG_STATEFUL, False
                    if one._seed is None:
                        one._seed = 1000 * seed + position
                one._maybe_init()
            yield [one._generator.state for one in generators if one._generator is not None]
        finally:
            for one, before in zip(generators, kept, strict=True):
                for name in ("_rng_type", "_built", "_seed", "_generator"):
                    setattr(one, name, before.get(name))

    def callback_list(self, callbacks: list[Any], model: Any, verbose: Any, epochs: int, steps: int | None) -> Any:
        """The list of callbacks that fit would make of these."""
        verbose = 1 if verbose == "auto" else int(verbose)
        return self.keras.callbacks.CallbackList(
            callbacks,
            add_history=True,
            add_progbar=verbose != 0,
            model=model,
            verbose=verbose,
            epochs=epochs,
            steps=steps,
        )

    # --- swapped layers ---

    @property
    def step_functions(self) -> tuple[str, ...]:
        """Names of the attributes in which a model keeps its compiled functions."""
        functions = ("train_function", "test_function", "predict_function")
        return functions if self.is_keras3 else (*functions, "train_tf_function")

    def values_variable(self, kernel: Any, values: tf.Tensor, varying: bool = False) -> Any:
        """A trainable vector that stands in for a kernel: with its name and path, which optimizers may ask for.

        Args:
            kernel: a variable of a layer.
            values: (kept,) float32.
            varying: whether it may be given vectors of other lengths.
        """
        shape = [None] if varying else None
        if not self.is_keras3:
            return tf.Variable(values, trainable=True, name=self.path(kernel), shape=shape)
        variable = self.keras.Variable(values, trainable=True, dtype="float32", name=kernel.name)
        if varying:
            # Keras itself knows no variables of unknown length; it goes on with the length of now.
            variable._value = tf.Variable(values, trainable=True, name=kernel.name, shape=shape)
        variable._path = kernel.path
        variable.regularizer = kernel.regularizer
        return variable

    def replace_variable(self, layer: Any, old: Any, new: Any) -> None:
        """Put another variable at the place of a trainable one that a layer owns, its regularisation included."""
        held = layer._trainable_variables if self.is_keras3 else layer._trainable_weights
        for position, variable in enumerate(held):
            if variable is old:
                held[position] = new
        if not self.is_keras3:
            losses = layer._callable_losses
            for position, loss in enumerate(losses):
                inner = _regularized(loss)
                if inner is not None and inner.args[0] is old:
                    losses[position] = functools.partial(loss.func, functools.partial(inner.func, new))

    def regularizer(self, layer: Any, variable: Any) -> Any:
        """What regularises a variable of a layer; `...` where that cannot be told."""
        if self.is_keras3:
            return variable.regularizer
        bound = [inner.args[0] for inner in map(_regularized, layer._callable_losses) if inner is not None]
        if not any(one is variable for one in bound):
            return None
        return getattr(layer, self.path(variable).rsplit("/", 1)[-1] + "_regularizer", ...)

    def sums_over_weights(self, regularizer: Any) -> bool:
        """Whether a penalty is a sum over single weights in which a zero counts nothing."""
        kinds = self.keras.regularizers
        return regularizer is None or type(regularizer) in (kinds.L1, kinds.L2, kinds.L1L2)

    def uses_cudnn_call(self, layer: Any) -> bool:
        """Whether a recurrent layer takes a path around its cell, which tf_keras does by an attribute of the layer."""
        return bool(getattr(layer, "_could_use_gpu_kernel", False))

    @contextlib.contextmanager
    def unmoved_randomness(self) -> Iterator[None]:
        """Trace a model without drawing seeds that its next functions would have drawn."""
        source = None
        if not self.is_keras3:
            backend = importlib.import_module("tf_keras.src.backend")
            source = getattr(backend._SEED_GENERATOR, "generator", None)
        before = source.getstate() if source is not None else None
        try:
            yield
        finally:
            if source is not None:
                source.setstate(before)

    def optimizer_targets(self, optimizer: Any, model: Any) -> list[Any] | None:
        """The variables for which an optimizer is built, in its own order; None if one of them is not the model's."""
        known = {key_of(variable): variable for variable in self.variables(model)}
        table = _index_table(optimizer)
        if self.is_keras3:
            targets = list(optimizer._trainable_variables)
            return targets if all(key_of(variable) in known for variable in targets) else None
        if not table:
            return list(model.trainable_variables)
        keys = sorted(table, key=lambda key: table[key])
        return [known[key] for key in keys] if all(key in known for key in keys) else None

    def twin(
        self, optimizer: Any, targets: list[Any], stand_ins: list[tuple[Any, Any]], varying: bool = False
    ) -> tuple[Any, list[tuple[Any, Any]]]:
        """An optimizer of the same settings for other variables, which shares learning rate and update count.

        Args:
            optimizer: a built optimizer.
            targets: the variables that the twin updates, in the order of the optimizer's own.
            stand_ins: `(variable of the optimizer, the one that takes its place in targets)`.
            varying: whether what takes the place of variables may change its length.

        Returns:
            `(the twin, [(variable of the optimizer, the twin's)])` of what the two do not share.
        """
        twin = type(optimizer).from_config(optimizer.get_config())
        state, original = vars(twin), vars(optimizer)
        for name in ("_exclude_from_weight_decay_names", "_exclude_from_weight_decay_pattern"):
            if name in original:
                state[name] = original[name]
        if "_exclude_from_weight_decay" in original:
            excluded = set(original["_exclude_from_weight_decay"])
            added = {optimizer._var_key(new) for old, new in stand_ins if optimizer._var_key(old) in excluded}
            state["_exclude_from_weight_decay"] = excluded | added
        with _varying([new for _, new in stand_ins]) if varying else contextlib.nullcontext():
            self.build_optimizer(twin, targets)
        if varying and hasattr(twin, "_backend_reset_gradient_accumulators"):
            state["_backend_reset_gradient_accumulators"] = lambda: _reset(twin._accumulated_gradients)
        shared: set[int] = set()
        for name, value in original.items():
            # Counters, rates and the like: all that belongs to no single weight.
            alone = hasattr(value, "assign") and not tuple(value.shape)
            if alone or name in ("_learning_rate", "_hyper"):
                shared |= {id(state.get(name)), id(value)}
                state[name] = value
        columns = [[v for v in self.optimizer_variables(one) if id(v) not in shared] for one in (optimizer, twin)]
        return twin, list(zip(*columns, strict=True))


@contextlib.contextmanager
def _varying(variables: list[Any]) -> Iterator[None]:
    """Have an optimizer make slots of unknown length for variables of unknown length.

    It asks for their shape and has to be told the one that they have now.
    """

    def unknown(make: Callable[..., Any], **arguments: Any) -> Any:
        value = arguments.pop("initial_value")
        value = tf.convert_to_tensor(value() if callable(value) else value)
        shape = [None] if value.shape.rank == 1 else value.shape
        return make(**{**arguments, "initial_value": value, "shape": shape})

    plain = [variable for variable in variables if isinstance(variable, tf.Variable)]
    shapes = [variable._shape for variable in plain]
    try:
        for variable in plain:
            variable._shape = tf.convert_to_tensor(variable).shape
        with tf.variable_creator_scope(unknown):
            yield
    finally:
        for variable, shape in zip(plain, shapes, strict=True):
            variable._shape = shape


def _reset(accumulators: list[Any]) -> None:
    for accumulator in accumulators:
        if accumulator is not None:
            accumulator.value.assign(tf.zeros_like(accumulator.value))


_MIXING = frozenset({"Muon", "Lamb", "Adafactor"})


def _index_table(optimizer: Any) -> dict[str, int]:
    state = vars(optimizer)
    return state.get("_trainable_variables_indices") or state.get("_index_dict") or {}


def _fresh_value(optimizer: Any, slot_name: str) -> float:
    """What a slot holds before the first update: Adagrad and Ftrl start above zero."""
    if slot_name.strip("_").startswith("accumulator"):
        for name in ("initial_accumulator_value", "_initial_accumulator_value"):
            if hasattr(optimizer, name):
                return float(getattr(optimizer, name))
    return 0.0


def _regularized(loss: Any) -> Any:
    """The inner part of a callable loss of tf_keras that is a regularizer bound to a variable, or None."""
    inner = loss.args[0] if isinstance(loss, functools.partial) and loss.args else None
    return inner if isinstance(inner, functools.partial) and inner.args else None
