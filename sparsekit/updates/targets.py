"""The weights that a rule moves, as the compiled step sees them: read, write under the mask, add noise in place."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from ..flavour import native
from ..frozen import keep_only
from ..weights import WeightRef, read

DISTRIBUTIONS = ("uniform", "normal", "rademacher")


class Target:
    """One weight inside a step. Every write leaves the masked positions at exactly zero.

    Args:
        ref: the weight.
        index: its number among the selected weights; part of its random seeds.
        keep: bool tf.Variable of the weight's shape, or None for a weight without a mask.
        dynamic: mask what is zero at the beginning of a step, too, from then on.
    """

    def __init__(self, ref: WeightRef, index: int, keep: tf.Variable | None, dynamic: bool) -> None:
        self.ref = ref
        self.index = index
        self._keep = keep
        self._dynamic = dynamic
        self._kept: tf.Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.ref.shape

    @property
    def dtype(self) -> tf.DType:
        return self.variable.dtype

    @property
    def variable(self) -> Any:
        """The tf.Variable to read and write here: a replica's own one inside a replica."""
        variable = native(self.ref.variable)
        return component(getattr(variable, "_variable", variable))

    def begin(self) -> None:
        """Fix the mask of the step that is being traced."""
        self._kept = None if self._keep is None else component(self._keep).read_value()
        if self._dynamic:
            nonzero = tf.not_equal(self.read(), 0)
            self._kept = nonzero if self._kept is None else self._kept & nonzero
            if self._keep is not None:
                component(self._keep).assign(self._kept)

    @property
    def kept(self) -> tf.Tensor | None:
        """Bool tensor of the positions that may move, None if all may."""
        return self._kept

    def mask(self) -> tf.Tensor:
        """Bool tensor of the positions that may move."""
        return tf.ones(self.shape, tf.bool) if self._kept is None else self._kept

    def start_mask(self) -> np.ndarray:
        """Bool array of the positions that may move now, outside of any step."""
        keep = np.ones(self.shape, np.bool_) if self._keep is None else read(self._keep)
        return keep & (self.ref.numpy() != 0) if self._dynamic else keep

    def read(self) -> tf.Tensor:
        return self.variable.read_value()

    def write(self, value: Any) -> None:
        """Assign a value of the weight's shape, with +0.0 at masked positions."""
        value = tf.cast(value, self.dtype)
        self.variable.assign(value if self._kept is None else keep_only(self._kept, value))

    def add_noise(self, distribution: str, scale: Any, seed: tf.Tensor) -> None:
        """Add `scale` times random numbers to the positions that may move; the same seed gives the same numbers."""
        self.write(self.read() + noise(distribution, self.shape, self.dtype, scale, seed))


def noise(distribution: str, shape: tuple[int, ...], dtype: tf.DType, scale: Any, seed: tf.Tensor) -> tf.Tensor:
    """Random numbers of mean zero from a seed alone: the same on each device, run and replica.

    Args:
        distribution: `"uniform"` in [-scale, scale), `"normal"` with standard deviation `scale`, or `"rademacher"`,
            +scale or -scale.
        shape: shape of the result.
        dtype: floating.
        scale: scalar.
        seed: integer tensor of shape (2,).
    """
    # Half precision has too few values for a fair draw near zero.
    if distribution == "normal":
        drawn = tf.random.stateless_normal(shape, seed, dtype=tf.float32, alg="philox")
    else:
        drawn = tf.random.stateless_uniform(shape, seed, -1.0, 1.0, dtype=tf.float32, alg="philox")
        if distribution == "rademacher":
            drawn = tf.where(drawn < 0.0, -1.0, 1.0)
    return tf.cast(drawn * tf.cast(scale, tf.float32), dtype)


def derived_seed(seed: int, *parts: Any) -> tf.Tensor:
    """The seed of one draw, int64 of shape (2,): a hash of the user's seed and all parts but the last, and the last.

    Args:
        seed: the user's seed.
        parts: integer scalars: step, number of the draw, index of the weight.
    """
    key = tf.constant([seed, 0], tf.int64)
    for part in parts:
        key = tf.random.experimental.stateless_fold_in(key, tf.cast(part, tf.int64), alg="philox")
    return key


def component(variable: Any) -> Any:
    """A variable's own copy on the replica whose step is being traced; outside of a replica the variable itself.

    Keras 3 declares no way to aggregate its variables, so that TensorFlow refuses to assign them inside a replica.
    Every replica writes the same bits here, so there is nothing to aggregate.
    """
    if not isinstance(variable, tf.distribute.DistributedValues) or tf.distribute.in_cross_replica_context():
        return variable
    context = tf.distribute.get_replica_context()
    replica = int(tf.get_static_value(context.replica_id_in_sync_group))  # type: ignore[arg-type]
    return context.strategy.experimental_local_results(variable)[replica]
