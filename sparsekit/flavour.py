"""The bridge between Keras 3 (on TensorFlow) and tf_keras: the only file that imports either of them.

The model decides: `flavour_of(model)` answers which Keras is its own, and everything that differs between the two
is a method of `Flavour`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import inspect
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar

import tensorflow as tf

from .errors import ModelTypeError

NAMES = ("keras", "tf_keras")


@dataclass(frozen=True)
class Flavour:
    """One of the two Kerases.

    Args:
        name: `"keras"` (Keras 3) or `"tf_keras"` (Keras 2).
        keras: the imported top-level module.
    """

    name: str
    keras: ModuleType

    # What `compile` takes beside optimizer, loss and metrics.
    COMPILE_ONLY: ClassVar[tuple[str, ...]] = (
        "loss_weights",
        "weighted_metrics",
        "run_eagerly",
        "steps_per_execution",
        "jit_compile",
    )

    @property
    def is_keras3(self) -> bool:
        return self.name == "keras"

    # --- models and layers ---

    def layers(self, model: Any) -> list[Any]:
        """The model itself and all layers below it at any depth, each once, parents first."""
        return [chain[-1] for chain in self.chains(model)]

    def chains(self, model: Any) -> list[tuple[Any, ...]]:
        """For each of `layers`, those that hold it, from the model down to the layer itself."""
        # Keras 3 would give the layers inside a layer in reverse order.
        seen: set[int] = set()
        found: list[tuple[Any, ...]] = []

        def walk(above: tuple[Any, ...], layer: Any) -> None:
            if id(layer) in seen:
                return
            seen.add(id(layer))
            found.append((*above, layer))
            for child in layer._flatten_layers(include_self=False, recursive=False):
                walk((*above, layer), child)

        walk((), model)
        return found

    def variables(self, model: Any) -> list[Any]:
        """All variables of a model, as far as it is built."""
        if self.is_keras3:
            return list(model.variables)
        # tf_keras raises where a Sequential has none yet.
        return list(model.weights) if model.built else []

    def own_variables(self, layer: Any) -> list[Any]:
        """The variables that a layer created itself, not those of its sub-layers."""
        if self.is_keras3:
            return [*layer._trainable_variables, *layer._non_trainable_variables]
        return [*layer._trainable_weights, *layer._non_trainable_weights]

    def is_layer(self, obj: Any) -> bool:
        return isinstance(obj, self.keras.layers.Layer)

    def has_own_train_step(self, model: Any) -> bool:
        """Whether the user wrote a `train_step` (in a subclass or on the object)."""
        return "train_step" in vars(model) or (
            type(model).train_step is not self.keras.Model.train_step
            and type(model).train_step is not self.keras.Sequential.train_step
        )

    def has_own_code(self, model: Any) -> bool:
        """Whether code that is not Keras' own takes part in a training step beside the layers' calls."""
        if self.has_own_train_step(model) or not type(model).__module__.startswith(NAMES):
            return True
        settings = getattr(model, "_compile_config", None)
        config = dict(settings.config) if settings is not None else {}
        parts = [config.get(name) for name in ("loss", "metrics", "weighted_metrics")]
        return not all(_is_keras_own(part) for part in tf.nest.flatten(parts))

    def is_compiled(self, model: Any) -> bool:
        return bool(model.compiled if self.is_keras3 else model._is_compiled)

    def uses_xla(self, model: Any) -> bool:
        """Whether the model's steps are compiled with XLA."""
        return bool(getattr(model, "jit_compile", None) or getattr(model, "_jit_compile", None))

    def compile_arguments(self, model: Any) -> dict[str, Any]:
        """The arguments that the model was compiled with, with the optimizer object that it uses now."""
        config = getattr(model, "_compile_config", None)
        arguments = dict(config.config) if config is not None else {}
        arguments["optimizer"] = model.optimizer
        return arguments

    def forget_train_function(self, model: Any) -> None:
        """Drop the compiled train function, so that the next fit traces a new one."""
        model.train_function = None
        if not self.is_keras3:
            model.train_tf_function = None

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

    def values_variable(self, kernel: Any, values: tf.Tensor) -> Any:
        """A trainable vector that stands in for a kernel: with its name and path, which optimizers may ask for.

        Args:
            kernel: a variable of a layer.
            values: (kept,) float32.
        """
        if not self.is_keras3:
            return tf.Variable(values, trainable=True, name=self.path(kernel))
        variable = self.keras.Variable(values, trainable=True, dtype="float32", name=kernel.name)
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
        self, optimizer: Any, targets: list[Any], stand_ins: list[tuple[Any, Any]]
    ) -> tuple[Any, list[tuple[Any, Any]]]:
        """An optimizer of the same settings for other variables, which shares learning rate and update count.

        Args:
            optimizer: a built optimizer.
            targets: the variables that the twin updates, in the order of the optimizer's own.
            stand_ins: `(variable of the optimizer, the one that takes its place in targets)`.

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
        self.build_optimizer(twin, targets)
        shared: set[int] = set()
        for name, value in original.items():
            # Counters, rates and the like: all that belongs to no single weight.
            alone = hasattr(value, "assign") and not tuple(value.shape)
            if alone or name in ("_learning_rate", "_hyper"):
                shared |= {id(state.get(name)), id(value)}
                state[name] = value
        columns = [[v for v in self.optimizer_variables(one) if id(v) not in shared] for one in (optimizer, twin)]
        return twin, list(zip(*columns, strict=True))

    # --- files ---

    @property
    def label(self) -> str:
        """Name and version for messages."""
        return f"{'Keras' if self.is_keras3 else 'tf_keras'} {self.keras.__version__}"

    def model_from_config(
        self, config: dict[str, Any], custom_objects: dict[str, Any], budget: int, safe: bool = True
    ) -> Any:
        """Build a model from the config of an .h5 file.

        Args:
            config: the config; Keras changes it.
            custom_objects: classes and functions that it names.
            budget: how many weights it may ask for.
            safe: whether Keras refuses code in it.

        Raises:
            MemoryError: once its layers ask for more than `budget` weights.
        """
        with contextlib.ExitStack() as stack:
            stack.enter_context(_weight_budget(self.keras.layers.Layer, budget))
            if self.is_keras3:
                options = importlib.import_module("keras.src.legacy.saving.saving_options")
                stack.enter_context(options.keras_option_scope(use_legacy_config=True))
                scopes = importlib.import_module("keras.src.saving.serialization_lib")
                stack.enter_context(scopes.SafeModeScope(safe))
                legacy = importlib.import_module("keras.src.legacy.saving.saving_utils")
            else:
                legacy = importlib.import_module("tf_keras.src.saving.legacy.model_config")
                sharing = importlib.import_module("tf_keras.src.saving.legacy.serialization")
                stack.enter_context(sharing.SharedObjectLoadingScope())
            stack.enter_context(self.keras.utils.custom_object_scope(custom_objects))
            return legacy.model_from_config(config, custom_objects=custom_objects)

    def registered(self, name: str) -> bool:
        """Whether the user registered a class or function of this name with `register_keras_serializable`."""
        known = getattr(self.keras, "saving", self.keras.utils).get_custom_objects()
        return name in known

    def input_names(self, model: Any) -> list[str]:
        """Names of a model's input layers, in the order of `model.inputs`."""
        return [
            (tensor._keras_history.operation if self.is_keras3 else tensor._keras_history.layer).name
            for tensor in model.inputs
        ]

    def takes_dict(self, model: Any) -> bool:
        """Whether a functional model was made with a dictionary of inputs."""
        return isinstance(getattr(model, "_inputs_struct" if self.is_keras3 else "_nested_inputs", None), dict)

    def output_shapes(self, model: Any) -> Iterator[tuple[int | None, ...]]:
        """Shape of every tensor inside a functional model, nested models included; None = free."""
        for layer in self.layers(model):
            for nodes in getattr(layer, "_nodes_by_depth", {}).values():
                for node in nodes:
                    outputs = node.output_tensors if self.is_keras3 else tf.nest.flatten(node.outputs)
                    yield from (tuple(tensor.shape) for tensor in outputs)

    def write_h5(self, model: Any, file: Any, include_optimizer: bool) -> None:
        """Write a model into an open, empty h5py.File, as this Keras' own `save` does."""
        if self.is_keras3:
            legacy = importlib.import_module("keras.src.legacy.saving.legacy_h5_format")
            kept = model._compile_config.config if model.compiled else {}
            settings = dict(kept)
            try:
                legacy.save_model_to_hdf5(model, file, include_optimizer=include_optimizer)
            finally:
                # Keras takes the optimizer out of the live compile settings here, and a .keras file that the model
                # writes later would come back with another optimizer.
                kept.update(settings)
        else:
            legacy = importlib.import_module("tf_keras.src.saving.legacy.hdf5_format")
            sharing = importlib.import_module("tf_keras.src.saving.legacy.serialization")
            with sharing.SharedObjectSavingScope():
                legacy.save_model_to_hdf5(model, file, include_optimizer=include_optimizer)

    def save_keras(self, model: Any, path: Any, include_optimizer: bool) -> None:
        """Write a model as a .keras file; without its optimizer it is written as one that was never compiled."""
        with contextlib.nullcontext() if include_optimizer else self._without_optimizer(model):
            model.save(path)

    def load_weights(self, model: Any, path: Any) -> None:
        """Read a .weights.h5 into a model; its optimizer stays as it is."""
        with self._without_optimizer(model):
            model.load_weights(path)

    @contextlib.contextmanager
    def _without_optimizer(self, model: Any) -> Iterator[None]:
        compiled = "compiled" if self.is_keras3 else "_is_compiled"
        kept = {name: vars(model)[name] for name in ("optimizer", compiled) if name in vars(model)}
        try:
            if "optimizer" in kept:
                model.optimizer = None
            setattr(model, compiled, False)
            yield
        finally:
            for name, value in kept.items():
                setattr(model, name, value)

    def optimizer_variables(self, optimizer: Any) -> list[Any]:
        """An optimizer's variables in the order in which an .h5 file holds them."""
        variables = optimizer.variables
        if callable(variables):
            variables = variables()
        return [*variables]  # type: ignore[misc]

    def loss_scaled(self, optimizer: Any) -> Any:
        """The optimizer wrapped for float16 training."""
        if self.is_keras3:
            return self.keras.optimizers.LossScaleOptimizer(optimizer)
        return self.keras.mixed_precision.LossScaleOptimizer(optimizer)

    def load_keras(self, path: Any, custom_objects: dict[str, Any] | None, safe: bool, budget: int) -> Any:
        """Open a .keras file with this Keras' own loader.

        Raises:
            MemoryError: once its layers ask for more than `budget` weights.
        """
        with _weight_budget(self.keras.layers.Layer, budget):
            return self.keras.models.load_model(path, custom_objects=custom_objects, safe_mode=safe)

    def saved_weights(self, layer: Any) -> list[Any]:
        """A layer's variables in the order in which an .h5 file holds them."""
        return [*layer.trainable_weights, *layer.non_trainable_weights]

    def top_level_weights(self, model: Any) -> list[Any]:
        """The variables that the model itself owns, in the order in which an .h5 file holds them."""
        own = self.own_variables(model)
        known = {id(v) for v in model.weights}
        return [v for v in own if id(v) in known]

    def finalize(self, model: Any) -> None:
        """Let layers that derive something from their weights (Normalization) do it again."""
        for layer in self.layers(model):
            if hasattr(layer, "finalize_state") and layer is not model:
                layer.finalize_state()

    # --- variables ---

    def path(self, variable: Any) -> str:
        """Name of a variable; not always unique in tf_keras."""
        if self.is_keras3 and hasattr(variable, "path"):
            return variable.path
        return variable.name.split(":")[0]

    def get_constraint(self, variable: Any) -> Any:
        return variable.constraint

    def set_constraint(self, variable: Any, constraint: Any) -> None:
        """Set the constraint that the optimizer runs after each update, on a built variable too."""
        if self.is_keras3:
            variable.constraint = constraint
            return
        # An AutoCastVariable wraps the variable; a MirroredVariable holds one on each device.
        inner = getattr(variable, "_variable", variable)
        for component in getattr(inner, "values", (inner,)):
            component._constraint = constraint

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


def _is_keras_own(part: Any) -> bool:
    if part is None or isinstance(part, (str, int, float)):
        return True
    if isinstance(part, dict):
        return "class_name" in part and str(part.get("module", "")).split(".")[0] in NAMES
    home = getattr(part, "__module__", None) if callable(part) and hasattr(part, "__name__") else type(part).__module__
    wrapped = getattr(part, "fn", None) or getattr(part, "_fn", None)
    return str(home).split(".")[0] in NAMES and (wrapped is None or _is_keras_own(wrapped))


def _regularized(loss: Any) -> Any:
    """The inner part of a callable loss of tf_keras that is a regularizer bound to a variable, or None."""
    inner = loss.args[0] if isinstance(loss, functools.partial) and loss.args else None
    return inner if isinstance(inner, functools.partial) and inner.args else None


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


_BUDGET_LOCK = threading.RLock()


@contextlib.contextmanager
def _weight_budget(layer_class: type, budget: int) -> Iterator[None]:
    """Stop a config from allocating more weights than its file can hold: a huge `units` is quickly written.

    Weights begin as zeros for as long as this lasts, since a file has their values.
    """
    original = layer_class.add_weight  # type: ignore[attr-defined]
    signature = inspect.signature(original)
    left = budget

    @functools.wraps(original)
    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal left
        bound = signature.bind(*args, **kwargs)
        shape = bound.arguments.get("shape")
        size = 1
        for n in () if shape is None else tuple(shape):
            size *= int(n)
        left -= size
        if left < 0:
            raise MemoryError(f"The config asks for more than {budget} weights.")
        initializer = bound.arguments.get("initializer")
        if type(initializer).__module__.split(".")[0] in NAMES and hasattr(initializer, "seed"):
            # Values come from the file; drawing random ones first would take longer than reading it.
            bound.arguments["initializer"] = "zeros"
        return original(*bound.args, **bound.kwargs)

    with _BUDGET_LOCK:
        layer_class.add_weight = counted  # type: ignore[attr-defined]
        try:
            yield
        finally:
            layer_class.add_weight = original  # type: ignore[attr-defined]


@contextlib.contextmanager
def shadowed(obj: Any, name: str, value: Any) -> Iterator[None]:
    """Give one Keras object another method for a while.

    Written to the object's own dictionary, past Keras' __setattr__: it is neither tracked nor put into a file.
    """
    attributes = vars(obj)
    before = attributes.get(name)
    attributes[name] = value
    try:
        yield
    finally:
        if before is None:
            attributes.pop(name, None)
        else:
            attributes[name] = before


def native(variable: Any) -> Any:
    """The tf.Variable behind a variable of either Keras."""
    value = getattr(variable, "_value", None)
    return value if isinstance(value, tf.Variable) else variable


def key_of(variable: Any) -> str:
    """Identity of a variable, the same for a Keras variable, its tf.Variable and each replica's component."""
    variable = native(variable)
    container = getattr(variable, "_distributed_container", None)
    if container is not None:
        variable = container() or variable
    return variable._unique_id


@functools.cache
def get(name: str) -> Flavour:
    """Import one of the two Kerases.

    Args:
        name: `"keras"` or `"tf_keras"`.

    Raises:
        ModelTypeError: if it is not installed, or if Keras 3 runs on another backend than TensorFlow.
    """
    if name not in NAMES:
        raise ModelTypeError(f"flavour={name!r} is not known; give 'keras' (Keras 3) or 'tf_keras'.")
    if importlib.util.find_spec(name) is None:
        raise ModelTypeError(f"{name} is not installed; run `pip install {name.replace('_', '-')}`.")
    module = importlib.import_module(name)
    if name == "keras":
        _check_backend(module)
    return Flavour(name, module)


def _check_backend(keras: ModuleType) -> None:
    if not keras.__version__.startswith("3."):
        raise ModelTypeError(f"keras {keras.__version__} is not Keras 3; run `pip install 'keras>=3'`.")
    backend = keras.backend.backend()
    if backend != "tensorflow":
        raise ModelTypeError(
            f"Keras runs on the {backend} backend here; sparsekit needs TensorFlow: set "
            "KERAS_BACKEND=tensorflow before keras is imported."
        )


def _loaded() -> Iterator[Flavour]:
    """The Kerases that this process has imported: a model's own is always among them."""
    for name in NAMES:
        module = sys.modules.get(name)
        if module is not None and hasattr(module, "Model"):
            yield get(name)


def flavour_of(model: Any) -> Flavour:
    """Which Keras a model belongs to.

    Raises:
        ModelTypeError: if the object is not a Keras model on TensorFlow, naming its class and what to pass.
    """
    for flavour in _loaded():
        if isinstance(model, flavour.keras.Model):
            return flavour
        if flavour.is_layer(model):
            raise ModelTypeError(f"{_type_name(model)} is a layer; pass the whole model that holds it.")
    hint = "pass the model object itself, a keras.Model or tf_keras.Model"
    if isinstance(model, (list, tuple)):
        hint = "pass the model that holds these layers, not a list of them"
    elif isinstance(model, (str, bytes)) or hasattr(model, "__fspath__"):
        hint = "open the file first: sparsekit.load(path)"
    elif type(model).__module__.split(".")[0] == "torch" or any(
        base.__module__.startswith("torch.") for base in type(model).__mro__
    ):
        hint = "sparsekit works on Keras models on TensorFlow, not on PyTorch modules"
    raise ModelTypeError(f"{_type_name(model)} is not a Keras model; {hint}.")


def flavour_of_optimizer(optimizer: Any) -> Flavour:
    """Which Keras an optimizer belongs to.

    Raises:
        ModelTypeError: if it is no optimizer of either.
    """
    for flavour in _loaded():
        if flavour.is_optimizer(optimizer):
            return flavour
    raise ModelTypeError(
        f"{_type_name(optimizer)} is not a Keras optimizer; pass an object such as keras.optimizers.Adam()."
    )


def _type_name(obj: Any) -> str:
    kind = type(obj)
    return f"{kind.__module__}.{kind.__qualname__}"
