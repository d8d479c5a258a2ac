"""Rules that change weights after a batch without a gradient, one small class each."""

from __future__ import annotations

import math
import numbers
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import tensorflow as tf

from ..errors import ArgumentError
from ..registry import classes
from .targets import DISTRIBUTIONS, Target


class Rule(ABC):
    """What is done with a batch: at least one forward pass, then new values for the selected weights.

    Subclass `WeightRule` for a rule that looks at one weight at a time, and `Rule` itself for one that compares losses.
    """

    name: ClassVar[str]
    compares_losses: ClassVar[bool] = True
    adds_noise: ClassVar[bool] = True

    def prepare(self, targets: list[Target], seed: int) -> Any:
        """State that lives as long as one run, handed to `apply`; called once, outside of the graph."""
        return None

    @abstractmethod
    def apply(self, trial: Any, state: Any) -> None:
        """Trace one step. See `Trial` for what can be done: measure the loss, move the weights."""


class WeightRule(Rule):
    """A rule that gives each weight a new value from its old one, after one forward pass."""

    compares_losses: ClassVar[bool] = False
    adds_noise: ClassVar[bool] = False

    def apply(self, trial: Any, state: Any) -> None:
        trial.measure()
        for target in trial.targets:
            target.write(self.update(target.read(), target.mask(), trial.step, trial.seed(target.index)))

    @abstractmethod
    def update(self, weight: tf.Tensor, mask: tf.Tensor, step: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        """The new value of a weight; masked positions become zero whatever it says there.

        Args:
            weight: the current value.
            mask: bool, shape of the weight, True = keep.
            step: int64 scalar, number of updates made before this one.
            seed: int64 of shape (2,), another one for each weight and step; made for `tf.random.stateless_*`.
        """


Function = Callable[[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor], Any]


class FunctionRule(WeightRule):
    """A plain function as a rule.

    Args:
        function: `(weight, mask, step, seed) -> new value`, as in `WeightRule.update`; traced once.
        returns: `"value"` if the function returns the new value, `"delta"` if it returns what is to be added.
    """

    def __init__(self, function: Function, returns: str = "value") -> None:
        if not callable(function):
            raise ArgumentError(f"function={function!r} cannot be called; give (weight, mask, step, seed) -> value.")
        if returns not in ("value", "delta"):
            raise ArgumentError(f"returns={returns!r} is not known; give 'value' or 'delta'.")
        self.function = function
        self.returns = returns

    def update(self, weight: tf.Tensor, mask: tf.Tensor, step: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        result = self.function(weight, mask, step, seed)
        if result is None:
            raise ArgumentError(
                f"The update function {_called(self.function)} returned None for a weight of shape {weight.shape}; "
                f"it must return the {'new value' if self.returns == 'value' else 'change'} as a tensor."
            )
        result = tf.cast(result, weight.dtype)
        if not result.shape.is_compatible_with(weight.shape) or result.shape.rank is None:
            raise ArgumentError(
                f"The update function {_called(self.function)} returned shape {result.shape} for a weight of shape "
                f"{weight.shape}; it must return a tensor of the weight's shape."
            )
        return result if self.returns == "value" else weight + result


class Noise(Rule):
    """Base of the rules that add random numbers: `weight + scale * decay**step * random`."""

    compares_losses: ClassVar[bool] = False
    distribution: ClassVar[str]

    def __init__(self, scale: float | Callable[[tf.Tensor], Any] = 1e-3, decay: float = 1.0) -> None:
        self.scale = scale if callable(scale) else positive("scale", scale, zero=True)
        self.decay = between("decay", decay, 0.0, 1.0)

    def apply(self, trial: Any, state: Any) -> None:
        trial.measure()
        base = self.scale(tf.cast(trial.step, tf.float32)) if callable(self.scale) else self.scale
        scale, stream = decayed(base, self.decay, trial.step), trial.stream()
        for target in trial.targets:
            target.add_noise(self.distribution, scale, stream)


class UniformNoise(Noise):
    """Add a uniform random number from (-scale, scale) to each weight.

    Args:
        scale: half width of the interval, or a function of the step (float32 scalar) that gives it.
        decay: factor in [0, 1] on the scale after each step.
    """

    name = "uniform_noise"
    distribution = "uniform"


class NormalNoise(Noise):
    """Add a normal random number to each weight.

    Args:
        scale: standard deviation, or a function of the step (float32 scalar) that gives it.
        decay: factor in [0, 1] on the scale after each step.
    """

    name = "normal_noise"
    distribution = "normal"


class SignFlip(WeightRule):
    """Turn the sign of each weight with a small probability.

    Args:
        probability: chance of a flip for each weight and step, in [0, 1].
        decay: factor in [0, 1] on the probability after each step.
    """

    name = "sign_flip"

    def __init__(self, probability: float = 1e-3, decay: float = 1.0) -> None:
        self.probability = between("probability", probability, 0.0, 1.0)
        self.decay = between("decay", decay, 0.0, 1.0)

    def update(self, weight: tf.Tensor, mask: tf.Tensor, step: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        drawn = tf.random.stateless_uniform(weight.shape, seed, dtype=tf.float32, alg="philox")
        return tf.where(drawn < decayed(self.probability, self.decay, step), -weight, weight)


class Shrink(WeightRule):
    """Pull each weight towards zero: `weight * (1 - rate)`, and 0 where that falls below a threshold.

    Args:
        rate: fraction in [0, 1] taken off at each step.
        threshold: magnitude below which a weight becomes exactly zero; with `masks="dynamic"` it then stays zero.
    """

    name = "shrink"

    def __init__(self, rate: float = 1e-3, threshold: float = 0.0) -> None:
        self.rate = between("rate", rate, 0.0, 1.0)
        self.threshold = positive("threshold", threshold, zero=True)

    def update(self, weight: tf.Tensor, mask: tf.Tensor, step: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        shrunk = weight * tf.cast(1.0 - self.rate, weight.dtype)
        small = tf.abs(shrunk) < tf.cast(self.threshold, weight.dtype)
        return tf.where(small, tf.zeros_like(shrunk), shrunk)


def as_rule(given: Any) -> Rule:
    """A rule from a `Rule` object, the name of a built-in one, or a plain function.

    Raises:
        ArgumentError: for anything else, naming what is known.
    """
    if isinstance(given, Rule):
        return given
    known: dict[str, Any] = classes(Rule)
    if isinstance(given, str) and given in known:
        return known[given]()
    if callable(given) and not isinstance(given, type):
        return FunctionRule(given)
    raise ArgumentError(
        f"update={given!r} is not known; give one of {', '.join(sorted(known))}, an updates.Rule object or a function "
        "(weight, mask, step, seed) -> new value."
    )


def decayed(base: Any, decay: float, step: tf.Tensor) -> tf.Tensor:
    """`base * decay**step`, float32."""
    base = tf.cast(base, tf.float32)
    return base if decay == 1.0 else base * tf.pow(tf.constant(decay, tf.float32), tf.cast(step, tf.float32))


def between(argument: str, value: Any, low: float, high: float) -> float:
    if not _is_number(value) or not low <= value <= high:
        raise ArgumentError(f"{argument}={value!r} must be a number in [{low:g}, {high:g}].")
    return float(value)


def positive(argument: str, value: Any, zero: bool = False) -> float:
    if not _is_number(value) or not math.isfinite(value) or value < 0 or (value == 0 and not zero):
        raise ArgumentError(f"{argument}={value!r} must be a finite number {'>=' if zero else '>'} 0.")
    return float(value)


def one_of(argument: str, value: Any, known: tuple[str, ...] = DISTRIBUTIONS) -> str:
    if value not in known:
        raise ArgumentError(f"{argument}={value!r} is not known; give one of {', '.join(known)}.")
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _called(function: Any) -> str:
    return repr(getattr(function, "__name__", type(function).__name__))
