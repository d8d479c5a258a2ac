"""Rules that compare losses: accept-if-better, evolution strategies, simultaneous perturbation, CMA-ES."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import numpy as np
import tensorflow as tf

from ..errors import ArgumentError
from ..weights import read
from .rules import Rule, between, decayed, one_of, positive
from .targets import Target


class Annealing(Rule):
    """Try a random step and keep it if the batch's loss falls; otherwise put back every bit of the weights.

    Two forward passes a batch. With a temperature, a step that raises the loss by d is kept with probability
    `exp(-d / temperature)`. Kirkpatrick, Gelatt, Vecchi (1983), "Optimization by Simulated Annealing".

    Args:
        scale: size of the random step: half width (uniform) or standard deviation (normal).
        temperature: 0 accepts improvements only.
        decay: factor in [0, 1] on the temperature after each step.
        distribution: `"uniform"`, `"normal"` or `"rademacher"`.
    """

    name = "annealing"

    def __init__(
        self, scale: float = 1e-2, temperature: float = 0.0, decay: float = 1.0, distribution: str = "uniform"
    ) -> None:
        self.scale = positive("scale", scale)
        self.temperature = positive("temperature", temperature, zero=True)
        self.decay = between("decay", decay, 0.0, 1.0)
        self.distribution = one_of("distribution", distribution)

    def apply(self, trial: Any, state: Any) -> None:
        before = trial.measure()
        old = [target.read() for target in trial.targets]
        for target in trial.targets:
            target.add_noise(self.distribution, self.scale, trial.stream())
        before, after = tf.unstack(trial.over_replicas(tf.stack([before, trial.score()])))
        accept = after < before
        if self.temperature > 0.0:
            temperature = decayed(self.temperature, self.decay, trial.step)
            drawn = tf.random.stateless_uniform((), trial.seed(len(trial.targets)), alg="philox")
            accept |= drawn < tf.exp((before - after) / temperature)
        accept &= tf.math.is_finite(after)
        for target, value in zip(trial.targets, old, strict=True):
            target.write(tf.where(accept, target.read(), value))


class EvolutionStrategy(Rule):
    """Move along the noise that lowered the loss: antithetic pairs, ranks instead of losses.

    `population + 1` forward passes a batch (the first, at the unchanged weights, gives the logs). Candidates are made
    one after the other in the weights themselves and again from their seeds for the update, so that memory does not
    grow with the population: one copy of the selected weights. Salimans, Ho, Chen, Sidor, Sutskever (2017), "Evolution
    Strategies as a Scalable Alternative to Reinforcement Learning".

    Args:
        population: number of candidates a batch, even.
        sigma: standard deviation of the noise on the weights.
        learning_rate: step along the estimated direction.
        decay: factor in [0, 1] on the learning rate after each step.
    """

    name = "evolution_strategy"

    def __init__(
        self, population: int = 32, sigma: float = 0.05, learning_rate: float = 0.05, decay: float = 1.0
    ) -> None:
        if isinstance(population, bool) or not isinstance(population, int) or population < 2 or population % 2:
            raise ArgumentError(f"population={population!r} must be an even number >= 2: candidates come in pairs.")
        self.population = population
        self.sigma = positive("sigma", sigma)
        self.learning_rate = positive("learning_rate", learning_rate)
        self.decay = between("decay", decay, 0.0, 1.0)

    def apply(self, trial: Any, state: Any) -> None:
        trial.measure()
        targets: list[Target] = trial.targets
        base = [target.read() for target in targets]

        def add(pair: tf.Tensor, scale: tf.Tensor) -> None:
            stream = trial.stream(pair)
            for target in targets:
                target.add_noise("normal", scale, stream)

        def restore() -> None:
            for target, value in zip(targets, base, strict=True):
                target.variable.assign(value)

        def judge(number: tf.Tensor, losses: tf.TensorArray) -> tuple[tf.Tensor, tf.TensorArray]:
            sign = tf.cast(1 - 2 * (number % 2), tf.float32)
            add(number // 2, sign * self.sigma)
            losses = losses.write(number, trial.score())
            restore()
            return number + 1, losses

        losses = tf.TensorArray(tf.float32, self.population, element_shape=())
        _, losses = tf.while_loop(
            lambda number, _: number < self.population, judge, (tf.constant(0), losses), parallel_iterations=1
        )
        shaped = centered_ranks(trial.over_replicas(losses.stack()))
        pull = shaped[0::2] - shaped[1::2]
        rate = decayed(self.learning_rate, self.decay, trial.step) / (self.population * self.sigma)

        def follow(pair: tf.Tensor) -> tuple[tf.Tensor]:
            add(pair, rate * pull[pair])
            return (pair + 1,)

        tf.while_loop(lambda pair: pair < self.population // 2, follow, (tf.constant(0),), parallel_iterations=1)


def centered_ranks(losses: tf.Tensor) -> tf.Tensor:
    """Losses (n,) to utilities in [-0.5, 0.5], the lowest loss highest; equal losses share their rank, NaN is worst."""
    losses = tf.where(tf.math.is_finite(losses), losses, tf.constant(np.inf, losses.dtype))
    below = tf.reduce_sum(tf.cast(losses[None, :] < losses[:, None], tf.float32), axis=1)
    above = tf.reduce_sum(tf.cast(losses[None, :] > losses[:, None], tf.float32), axis=1)
    return (above - below) / (2.0 * (tf.cast(tf.size(losses), tf.float32) - 1.0))


class SPSA(Rule):
    """Estimate the slope along one random direction from two forward passes, and step along it.

    The direction is made again from its seed each time (add, subtract twice, add back with the step), so that no copy
    of the weights or of the direction is kept; adding and taking away rounds, by about one unit in the last place.
    The logs are the mean over the two passes. Spall (1992), "Multivariate Stochastic Approximation Using a Simultaneous
    Perturbation Gradient Approximation"; in place, from seeds: Malladi et al. (2023), "Fine-Tuning Language Models with
    Just Forward Passes" (MeZO).

    Args:
        epsilon: size of the perturbation.
        learning_rate: step along the estimated gradient.
        decay: factor in [0, 1] on the learning rate after each step.
        distribution: of the direction: `"normal"` (MeZO) or `"rademacher"` (SPSA).
    """

    name = "spsa"

    def __init__(
        self,
        epsilon: float = 1e-3,
        learning_rate: float = 1e-4,
        decay: float = 1.0,
        distribution: str = "normal",
    ) -> None:
        self.epsilon = positive("epsilon", epsilon)
        self.learning_rate = positive("learning_rate", learning_rate)
        self.decay = between("decay", decay, 0.0, 1.0)
        # A uniform direction has no finite inverse moments, which the estimate needs.
        self.distribution = one_of("distribution", distribution, ("normal", "rademacher"))

    def apply(self, trial: Any, state: Any) -> None:
        stream = trial.stream()

        def add(scale: Any) -> None:
            for target in trial.targets:
                target.add_noise(self.distribution, scale, stream)

        add(self.epsilon)
        plus = trial.measure()
        add(-2.0 * self.epsilon)
        minus = trial.measure()
        plus, minus = tf.unstack(trial.over_replicas(tf.stack([plus, minus])))
        slope = (plus - minus) / (2.0 * self.epsilon)
        step = decayed(self.learning_rate, self.decay, trial.step) * slope
        # A loss that is not finite says nothing about the direction: only the perturbation is taken back.
        add(self.epsilon - tf.where(tf.math.is_finite(step), step, 0.0))


class CMAES(Rule):
    """Covariance matrix adaptation over a small set of weights, through the `cma` package.

    `population + 1` forward passes a batch. The search keeps a full covariance matrix, so it is for small selections:
    a bias vector, a last layer. Hansen, Ostermeier (2001), "Completely Derandomized Self-Adaptation in Evolution
    Strategies". Needs `pip install sparsekit[evolution]`.

    Args:
        sigma: first standard deviation of the search.
        population: number of candidates a batch; None takes the library's choice for the number of weights.
        max_weights: refuse a larger selection than this many kept weights.
    """

    name = "cma_es"

    def __init__(self, sigma: float = 0.1, population: int | None = None, max_weights: int = 2000) -> None:
        self.sigma = positive("sigma", sigma)
        if population is not None and (isinstance(population, bool) or population < 2):
            raise ArgumentError(f"population={population!r} must be a whole number >= 2 or None.")
        self.population = population
        self.max_weights = max_weights

    def prepare(self, targets: list[Target], seed: int) -> Any:
        if importlib.util.find_spec("cma") is None:
            raise ArgumentError("The cma package is not installed; run `pip install 'sparsekit[evolution]'`.")
        if any(isinstance(target.variable, tf.distribute.DistributedValues) for target in targets):
            raise ArgumentError(
                "CMA-ES runs one search on the host and cannot be spread over replicas; use evolution_strategy there."
            )
        kept = [np.flatnonzero(target.start_mask()) for target in targets]
        count = sum(positions.size for positions in kept)
        if not 2 <= count <= self.max_weights:
            raise ArgumentError(
                f"CMA-ES was given {count} kept weights and works for 2 to {self.max_weights}; select fewer with "
                "include=, for example include='*/bias' or the last layer, or use evolution_strategy."
            )
        start = np.concatenate(
            [read(t.ref.variable).reshape(-1)[positions] for t, positions in zip(targets, kept, strict=True)]
        )
        return _Search(start.astype(np.float64), self.sigma, self.population, seed, kept)

    def apply(self, trial: Any, state: _Search) -> None:
        trial.measure()
        targets: list[Target] = trial.targets

        def put(vector: tf.Tensor) -> None:
            parts = tf.split(vector, [positions.size for positions in state.kept])
            for target, positions, part in zip(targets, state.kept, parts, strict=True):
                if positions.size:
                    where = tf.constant(positions[:, None])
                    flat = tf.scatter_nd(where, tf.cast(part, target.dtype), (target.ref.size,))
                    target.write(tf.reshape(flat, target.shape))

        candidates = tf.ensure_shape(
            tf.numpy_function(state.ask, [trial.step], tf.float32), (state.population, state.size)
        )

        def judge(number: tf.Tensor, losses: tf.TensorArray) -> tuple[tf.Tensor, tf.TensorArray]:
            put(candidates[number])
            return number + 1, losses.write(number, trial.score())

        losses = tf.TensorArray(tf.float32, state.population, element_shape=())
        _, losses = tf.while_loop(
            lambda number, _: number < state.population,
            judge,
            (tf.constant(0), losses),
            parallel_iterations=1,
        )
        mean = tf.numpy_function(state.tell, [losses.stack()], tf.float32)
        put(tf.ensure_shape(mean, (state.size,)))


class _Search:
    """The library's search and which positions its vector stands for."""

    def __init__(self, start: np.ndarray, sigma: float, population: int | None, seed: int, kept: list) -> None:
        cma = importlib.import_module("cma")
        # The library would seed NumPy's global generator, which belongs to the user.
        generator = np.random.RandomState(seed % 2**32)
        options: dict[str, Any] = {"seed": np.nan, "randn": generator.randn, "verbose": -9, "verb_log": 0}
        if population is not None:
            options["popsize"] = population
        self._search = cma.CMAEvolutionStrategy(start, sigma, options)
        self._asked: list[np.ndarray] = []
        self.kept = kept
        self.size = start.size
        self.population = int(self._search.popsize)

    def ask(self, step: np.ndarray) -> np.ndarray:
        self._asked = self._search.ask()
        return np.asarray(self._asked, np.float32)

    def tell(self, losses: np.ndarray) -> np.ndarray:
        finite = np.nan_to_num(np.asarray(losses, np.float64), nan=1e30, posinf=1e30, neginf=-1e30)
        self._search.tell(self._asked, finite.tolist())
        return np.asarray(self._search.mean, np.float32)
