"""Compile a loaded model the way its file says, so that the next fit goes on where the last one stopped."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import h5py
import numpy as np

from ..flavour import Flavour, key_of, native
from .settings import known_object, known_optimizer, optimizer_settings
from .stored import StoredArray, StoredModel

_OLD_SLOTS = ("m", "v", "vhat", "rms", "mg", "momentum", "accumulator", "accum_grad", "accum_var", "linear", "Variable")
_MOST_UPDATES = 2**48
# Optimizers whose arrays of any Keras mean the same: how many for each weight at most.
_SAME_SLOTS = {"Adam": 3, "AdamW": 3, "Adamax": 2, "SGD": 1, "Adagrad": 1, "RMSprop": 1}
# Left to compile itself, which picks the right metric from the shape of the outputs.
_BY_SHAPE = ("accuracy", "acc", "crossentropy", "ce")


def spell_out(file: h5py.File, flavour: Flavour) -> None:
    """Write short names of losses and metrics ("mse") in full, which is all that Keras 3 finds in an .h5."""
    if "training_config" not in file.attrs:
        return
    written = file.attrs["training_config"]
    training = json.loads(written.decode() if isinstance(written, bytes) else written)

    def full(name: Any, module: Any) -> Any:
        if not isinstance(name, str) or name in _BY_SHAPE:
            return name
        try:
            found = module.get(name)
        except ValueError:
            # A function of the user's own.
            return name
        return getattr(found, "__name__", name)

    for key, module in (("loss", "losses"), ("metrics", "metrics"), ("weighted_metrics", "metrics")):
        training[key] = _each(training.get(key), lambda one, m=module: full(one, getattr(flavour.keras, m)))
    file.attrs["training_config"] = json.dumps(training).encode()


def compile_as_stored(
    model: Any, stored: StoredModel, flavour: Flavour, custom_objects: dict[str, Any] | None
) -> list[str]:
    """Compile the model with the optimizer, loss and metrics of its file; leave it as it is if the file has none.

    Returns:
        What could not be kept, one sentence each.
    """
    training = stored.training_config
    if not training:
        return []
    custom = custom_objects or {}
    notes: list[str] = []
    # Any class of Keras' or the user's own refuses settings in its own way, hence the broad excepts.
    with flavour.keras.utils.custom_object_scope(custom):
        try:
            optimizer = known_optimizer(training.get("optimizer_config"), flavour, custom)
        except Exception as error:
            notes.append(_no_optimizer(training.get("optimizer_config"), error))
            optimizer = flavour.keras.optimizers.Adam()
        try:
            loss = _each(training.get("loss"), lambda one: _loss(one, flavour, custom))
        except Exception:
            notes.append(
                f"The loss {training.get('loss')!r:.200} is not known, so that the model is not compiled; "
                "pass it in custom_objects, or compile the model yourself."
            )
            return notes
        try:
            _check_weights(training.get("loss_weights"))
            model.compile(
                optimizer=optimizer,
                loss=loss,
                metrics=_metrics(training.get("metrics"), flavour, custom, notes),
                weighted_metrics=_metrics(training.get("weighted_metrics"), flavour, custom, notes),
                loss_weights=training.get("loss_weights"),
            )
        except Exception as error:
            notes.append(
                f"{flavour.label} does not take the training settings in the file ({type(error).__name__}), so that "
                "the model is not compiled; compile it yourself."
            )
            return notes
    if stored.optimizer and not _restore_optimizer(model, stored, flavour):
        notes.append(
            f"The moments of the optimizer '{type(model.optimizer).__name__}' were written in another order by another "
            "Keras and start anew; its settings are kept."
        )
    return notes


def check_training(stored: StoredModel, flavour: Flavour, custom_objects: dict[str, Any] | None) -> None:
    """Refuse settings that a Keras would take and then fail on at the first step, before it opens a file by itself.

    Raises:
        ValueError: naming the setting. A schedule of the learning rate may raise more.
    """
    training, custom = stored.training_config or {}, custom_objects or {}
    for name in ("loss", "metrics", "weighted_metrics"):
        _each(training.get(name), lambda one: one)
    _check_weights(training.get("loss_weights"))
    steps, optimizer = training.get("steps_per_execution"), training.get("optimizer_config")
    if not isinstance(steps, (int, type(None))) and steps != "auto":
        raise ValueError(f"The number of steps of one execution is {steps!r:.100}")
    if isinstance(optimizer, dict):
        # An object without a class stays a dictionary, and a number that is null is no default.
        inside = optimizer.get("config")
        for name in ("learning_rate", "beta_1", "beta_2", "epsilon", "momentum", "rho"):
            if isinstance(inside, dict) and inside.get(name, 0) is None:
                raise ValueError(f"The optimizer has {name}=None")
        if not isinstance(inside, dict) or not isinstance(optimizer.get("class_name"), str):
            raise ValueError("The optimizer has no settings")
    with flavour.keras.utils.custom_object_scope(custom):
        try:
            optimizer_settings(training.get("optimizer_config"), flavour, custom)
        except LookupError:
            # Keras says what is missing.
            return


def _check_weights(weights: Any) -> None:
    """Weights of losses are numbers, one, a list or a dict by output."""
    inside = weights.values() if isinstance(weights, dict) else weights if isinstance(weights, list) else [weights]
    if any(not isinstance(one, (int, float, type(None))) for one in inside):
        raise ValueError(f"The weights of the losses are {weights!r:.100}.")


def _no_optimizer(config: Any, error: Exception) -> str:
    name = str(config.get("class_name"))[:100] if isinstance(config, dict) else None
    if isinstance(error, LookupError):
        return (
            f"The optimizer '{name}' is not known, so that Adam takes its place; "
            f"pass custom_objects={{'{name}': ...}} to keep it."
        )
    return (
        f"The settings of the optimizer '{name}' in the file make no sense ({_first_line(error)}), so that Adam with "
        "its defaults takes its place; compile the model with the optimizer that it needs."
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")[:150]


def _each(config: Any, resolve: Callable[[Any], Any]) -> Any:
    """Apply to every single object of a nested setting: one, a list, or a dict by output."""
    if config is None or isinstance(config, str) or (isinstance(config, dict) and "class_name" in config):
        return None if config is None else resolve(config)
    if isinstance(config, dict):
        return {key: _each(value, resolve) for key, value in config.items()}
    if isinstance(config, (list, tuple)):
        return [_each(value, resolve) for value in config]
    raise TypeError(f"{config!r} names no Keras object.")


def _loss(config: Any, flavour: Flavour, custom: dict[str, Any]) -> Any:
    if isinstance(config, dict):
        return known_object(config, flavour.keras.losses, flavour, custom)
    return custom[config] if config in custom else _function(flavour.keras.losses, config)


def _function(module: Any, name: str) -> Any:
    """A function or class by its name; tf_keras gives some names back as they are."""
    found = module.get(name)
    if not callable(found):
        raise LookupError(name)
    return found


def _metrics(config: Any, flavour: Flavour, custom: dict[str, Any], notes: list[str]) -> Any:
    """The metrics that are known; the others are dropped with a note, since training does not need them."""

    def resolve(one: Any) -> Any:
        try:
            if isinstance(one, dict):
                return known_object(one, flavour.keras.metrics, flavour, custom)
            if one in _BY_SHAPE:
                return one
            return custom[one] if one in custom else _function(flavour.keras.metrics, one)
        except Exception:
            notes.append(
                f"The metric {one!r:.200} is not known and was left out; pass it in custom_objects to keep it."
            )
            return None

    return _without_none(_each(config, resolve))


def _without_none(nested: Any) -> Any:
    if isinstance(nested, dict):
        return {key: _without_none(value) for key, value in nested.items() if value is not None}
    if isinstance(nested, list):
        return [_without_none(value) for value in nested if value is not None]
    return nested


def _restore_optimizer(model: Any, stored: StoredModel, flavour: Flavour) -> bool:
    """Give the optimizer its state back, as far as the arrays can be told apart where another Keras wrote them.

    Returns:
        Whether nothing was lost.
    """
    optimizer = model.optimizer
    optimizer.build(model.trainable_variables)
    variables = flavour.optimizer_variables(optimizer)
    arrays = stored.optimizer
    old = any(_by_slot(array.name) for array in arrays)
    fits = len(variables) == len(arrays) and all(
        tuple(v.shape) == a.shape for v, a in zip(variables, arrays, strict=True)
    )
    if fits and not old and _updates(arrays) is not None:
        for variable, array in zip(variables, arrays, strict=True):
            _assign(variable, array)
        return True
    moments = [array for array in arrays if array.shape != ()]
    pairs = _matched(model, moments, old, flavour)
    for slot, array in pairs or ():
        _assign(slot, array)
    kept = pairs is not None or not moments
    updates = _updates(arrays)
    if updates is not None and (kept or _follows_schedule(optimizer)):
        # Without its moments Adam would take its first steps for late ones, several times as large.
        optimizer.iterations.assign(updates)
    return kept


def _assign(variable: Any, array: StoredArray) -> None:
    variable = native(variable)
    variable.assign(array.read().astype(variable.dtype.as_numpy_dtype))


def _follows_schedule(optimizer: Any) -> bool:
    return isinstance(optimizer.get_config().get("learning_rate"), dict)


def _by_slot(name: str) -> bool:
    """Whether an optimizer of before TensorFlow 2.11 wrote this: all first moments, then all second ones.

    Today's write both moments of one weight side by side; weights of one shape would get each other's.
    """
    last = re.sub(r"(_\d+)*$", "", name.split(":")[0].rsplit("/", 1)[-1])
    return name.startswith("training/") or last in _OLD_SLOTS


def _matched(
    model: Any, moments: list[StoredArray], by_slot: bool, flavour: Flavour
) -> list[tuple[Any, StoredArray]] | None:
    """The slot of the model's optimizer for each array that another Keras wrote, or None if they do not match."""
    slots: dict[str, list[Any]] = {}
    for key, slot, _ in flavour.slots(model.optimizer):
        slots.setdefault(key, []).append(slot)
    owners = [slots.get(key_of(variable), []) for variable in model.trainable_variables]
    depth, width = max(map(len, owners), default=0), len(owners)
    if depth > _SAME_SLOTS.get(type(model.optimizer).__name__, 0):
        return None
    # Keras 2 kept a placeholder of one number for each maximum of second moments that it did not track, and an SGD
    # without momentum had moments all the same.
    rest = moments[depth * width :]
    if len(moments) < depth * width or (depth and any(array.shape != (1,) for array in rest)):
        return None
    pairs = [
        (slot, moments[place * width + position if by_slot else position * depth + place])
        for position, mine in enumerate(owners)
        for place, slot in enumerate(mine)
    ]
    return pairs if all(tuple(slot.shape) == array.shape for slot, array in pairs) else None


def _updates(arrays: list[StoredArray]) -> int | None:
    """The number of updates among an optimizer's arrays: the one scalar of whole numbers (floats in early Keras 2)."""
    for array in arrays:
        if array.shape == ():
            value = array.read()
            counts = np.issubdtype(value.dtype, np.integer) or "iterations" in array.name
            # A damaged count may be anything.
            if counts and 0 <= value < _MOST_UPDATES and float(value).is_integer():
                return int(value)
    return None
