"""Make the optimizers, losses and metrics that a file names, and let only settings through that make sense.

Nothing is imported for them: a class is one of this Keras', one that the user registered, or one that the user gave.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any

from ..flavour import Flavour

# The one that wraps another; its own settings begin anew.
_SCALED = "LossScaleOptimizer"
# Of float32.
_LARGEST = 3e38
# Settings of optimizers that are numbers, though their default is None.
_NUMBERS = (
    *("weight_decay", "clipnorm", "clipvalue", "global_clipnorm"),
    *("ema_overwrite_frequency", "loss_scale_factor", "gradient_accumulation_steps"),
)


def known_object(config: dict[str, Any], module: Any, flavour: Flavour, custom: dict[str, Any]) -> Any:
    """An object from its class name and those of its settings that this Keras knows.

    Args:
        config: dictionary with `"class_name"` and `"config"`.
        module: where the classes of this Keras are, for example `keras.losses`.
        flavour: the Keras.
        custom: name -> class or function of the user's own.

    Raises:
        LookupError: if no such class is known.
        ValueError: if a setting is of the wrong kind. The class may raise more.
    """
    name = str(config["class_name"]).split(">")[-1]
    if name == "function":
        return custom.get(config["config"]) or module.get(config["config"])
    kind = custom.get(name) or getattr(module, name, None) or _registered(config, flavour)
    if not inspect.isclass(kind):
        raise LookupError(name)
    settings = dict(config.get("config") or {})
    accepted = inspect.signature(kind.__init__).parameters
    if isinstance(settings.get("fn"), str) and "fn" in accepted:
        # A wrapped function: its further settings are those of the function.
        settings["fn"] = custom.get(settings["fn"]) or module.get(settings["fn"])
    else:
        settings = {key: value for key, value in settings.items() if key in accepted}
    # Keras 2 left the reduction open until the first batch, which then always meant this one.
    if settings.get("reduction") == "auto":
        settings["reduction"] = "sum_over_batch_size"
    _check_kinds(name, settings, accepted)
    return kind(**settings)


def known_optimizer(config: Any, flavour: Flavour, custom: dict[str, Any]) -> Any:
    """The optimizer with its settings in the words of this Keras.

    Raises:
        LookupError: if its class is not known.
        ValueError: if a setting makes no sense. The class may raise more.
    """
    kind, settings = optimizer_settings(config, flavour, custom)
    optimizer = kind(**settings)
    scaled = str(config["class_name"]).split(">")[-1] == _SCALED and _SCALED not in custom
    return flavour.loss_scaled(optimizer) if scaled else optimizer


def optimizer_settings(config: Any, flavour: Flavour, custom: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The class of an optimizer and the settings for it, in the words of this Keras; raises as above."""
    if not isinstance(config, dict) or not isinstance(config.get("config"), dict):
        raise LookupError("The optimizer has no settings.")
    name, settings = str(config.get("class_name")).split(">")[-1], dict(config["config"])
    optimizers = flavour.keras.optimizers
    if name == _SCALED and name not in custom:
        return optimizer_settings(settings.get("inner_optimizer") or settings.get("optimizer"), flavour, custom)
    kind = (
        custom.get(name)
        or next((getattr(optimizers, known) for known in dir(optimizers) if known.lower() == name.lower()), None)
        or _registered(config, flavour)
    )
    if not inspect.isclass(kind):
        raise LookupError(name)
    if "lr" in settings:
        settings["learning_rate"] = settings.pop("lr")
    rate = settings.get("learning_rate")
    if isinstance(rate, dict):
        try:
            rate = known_object(rate, optimizers.schedules, flavour, custom)
        except LookupError as error:
            raise ValueError(f"{name} has a learning rate that is not known") from error
    elif settings.get("decay"):
        # What Keras 2 called decay, as the schedule that does the same: rate / (1 + decay * updates).
        rate = optimizers.schedules.InverseTimeDecay(rate, 1, settings["decay"])
    if callable(rate):
        schedule: Any = rate
        first = schedule(0) if isinstance(rate, optimizers.schedules.LearningRateSchedule) else schedule()
        if not math.isfinite(float(first)):
            raise ValueError("The schedule of the learning rate gives no number.")
        settings["learning_rate"] = rate
    accepted = inspect.signature(kind.__init__).parameters
    settings = {key: value for key, value in settings.items() if key in accepted and value is not None}
    _check_kinds(name, settings, accepted)
    return kind, settings


def _registered(config: dict[str, Any], flavour: Flavour) -> Any:
    names = (config.get("registered_name"), config.get("class_name"))
    return next((found for name in names if isinstance(name, str) and (found := flavour.registered(name))), None)


def _check_kinds(owner: str, settings: dict[str, Any], accepted: Mapping[str, inspect.Parameter]) -> None:
    """Compare settings with the defaults of their parameters: Keras takes a text for a number until the first step."""
    for name, value in settings.items():
        default = accepted[name].default if name in accepted else inspect.Parameter.empty
        if name == "name":
            fits = value is None or isinstance(value, str)
        elif callable(value) or (value is None and not isinstance(default, (bool, int, float))):
            fits = True
        elif isinstance(default, bool):
            fits = isinstance(value, bool) or value in (0, 1)
        elif isinstance(default, (int, float)) or name in _NUMBERS:
            fits = isinstance(value, (int, float)) and abs(value) < (_LARGEST if isinstance(value, float) else 2**31)
        else:
            fits = not isinstance(default, str) or isinstance(value, str)
        if not fits:
            raise ValueError(f"{owner} has {name}={value!r:.100}.")
