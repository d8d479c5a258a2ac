"""How the two Kerases differ in models, layers and variables, and what identifies a variable."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar

import tensorflow as tf

NAMES = ("keras", "tf_keras")


@dataclass(frozen=True)
class Base:
    """The part of `Flavour` that concerns models, layers and variables.

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

    def has_own_layers(self, model: Any) -> bool:
        """Whether code that is not Keras' own takes part in a model's forward pass or in its penalties."""
        for layer in self.layers(model):
            # What tf_keras makes of a regularizer is one partial around another, of a function of its own.
            for loss in [] if self.is_keras3 else layer._callable_losses:
                inner = next(iter(getattr(loss, "args", ())), None)
                if not isinstance(inner, functools.partial) or not _is_keras_own(inner.func):
                    return True
            if not type(layer).__module__.startswith(NAMES) or type(layer) is self.keras.layers.Lambda:
                return True
        return False

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


def _is_keras_own(part: Any) -> bool:
    if part is None or isinstance(part, (str, int, float)):
        return True
    if isinstance(part, dict):
        return "class_name" in part and str(part.get("module", "")).split(".")[0] in NAMES
    home = getattr(part, "__module__", None) if callable(part) and hasattr(part, "__name__") else type(part).__module__
    wrapped = getattr(part, "fn", None) or getattr(part, "_fn", None)
    return str(home).split(".")[0] in NAMES and (wrapped is None or _is_keras_own(wrapped))


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
