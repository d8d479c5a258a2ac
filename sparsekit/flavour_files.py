"""How the two Kerases differ in what they write to files and read from them."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import threading
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from .flavour_base import NAMES, Base


class Files(Base):
    """The part of `Flavour` that concerns files."""

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
            return self._checked(legacy.model_from_config(config, custom_objects=custom_objects))

    def registered(self, name: str) -> Any:
        """The class or function that the user registered by this name with `register_keras_serializable`, or None."""
        return getattr(self.keras, "saving", self.keras.utils).get_custom_objects().get(name)

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
            return self._checked(self.keras.models.load_model(path, custom_objects=custom_objects, safe_mode=safe))

    def _checked(self, built: Any) -> Any:
        """Keras builds any object that a config names."""
        if not isinstance(built, self.keras.Model):
            raise TypeError(f"The config is of a {type(built).__name__}, which is no model")
        if not isinstance(built.name, str):
            raise TypeError(f"The name of the model is {built.name!r:.100}")
        return built

    def saved_weights(self, layer: Any) -> list[Any]:
        """A layer's variables in the order in which an .h5 file holds them."""
        return [*layer.trainable_weights, *layer.non_trainable_weights]

    def top_level_weights(self, model: Any) -> list[Any]:
        """The variables that the model itself owns, in the order in which an .h5 file holds them."""
        own = self.own_variables(model)
        known = {id(v) for v in model.weights}
        return [v for v in own if id(v) in known]

    def forget_states(self, model: Any) -> None:
        """Let stateful recurrent layers begin anew."""
        for layer in self.layers(model):
            forget = getattr(layer, "reset_state" if self.is_keras3 else "reset_states", None)
            if forget is not None and getattr(layer, "stateful", False):
                forget()

    def finalize(self, model: Any) -> None:
        """Let layers that derive something from their weights (Normalization) do it again."""
        for layer in self.layers(model):
            if hasattr(layer, "finalize_state") and layer is not model:
                layer.finalize_state()


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
