"""The weights that a rule moves, as the compiled step sees them: read, write under the mask, add noise in place."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from ..engine import build, functions
from ..flavour import native
from ..frozen import keep_only
from ..weights import WeightRef, read

_PHILOX = 1  # the counter-based generator that TensorFlow has for every device
_WORTH_BUILDING = 100_000  # weights
DISTRIBUTIONS = ("uniform", "normal", "rademacher")


class Target:
    """One weight inside a step. Every write leaves the masked positions at exactly zero.

    Args:
        ref: the weight.
        index: its number among the selected weights; part of its random seeds.
        keep: bool tf.Variable of the weight's shape, or None for a weight without a mask.
        dynamic: mask what is zero at the beginning of a step, too, from then on.
        fused: add noise with the engine's op where it can.
    """

    def __init__(
        self, ref: WeightRef, index: int, keep: tf.Variable | None, dynamic: bool, fused: bool = False
    ) -> None:
        self.ref = ref
        self.index = index
        self._keep = keep
        self._dynamic = dynamic
        self._fused = fused and self.dtype == tf.float32 and "GPU" not in self.variable.device
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

    def add_noise(self, distribution: str, scale: Any, stream: Stream) -> None:
        """Add `scale` times random numbers to the positions that may move; the same stream gives the same numbers."""
        if self._fused and distribution in functions.DISTRIBUTIONS:
            functions.noise_update(
                self.variable,
                seed=stream.seed,
                step=stream.step,
                index=self.index,
                amplitude=scale,
                keep=self._kept,
                distribution=distribution,
            )
        else:
            drawn = noise(distribution, self.shape, stream, self.index)
            self.write(self.read() + tf.cast(tf.cast(scale, tf.float32) * drawn, self.dtype))


@dataclass(frozen=True)
class Stream:
    """One draw of random numbers for all weights: each number depends on this, the weight's index and its position.

    Args:
        seed: int64 tensor of shape (2,), of which the lower 32 bits count.
        step: int64 scalar.
    """

    seed: tf.Tensor
    step: tf.Tensor

    @classmethod
    def of(cls, seed: int, step: tf.Tensor, draw: Any = 0) -> Stream:
        """The stream of a user's seed, a step and the number of the draw in this step."""
        spread = tf.cast(draw, tf.int64) * 0x9E3779B9 + (seed >> 32)
        return cls(tf.stack([tf.constant(seed & 0xFFFFFFFF, tf.int64), spread]), step)


def noise(distribution: str, shape: tuple[int, ...], stream: Stream, index: int) -> tf.Tensor:
    """Random numbers of mean zero and size one, float32: the same on each device, run and replica.

    Args:
        distribution: `"uniform"` in (-1, 1) with 16 bits, `"normal"` with standard deviation 1, or `"rademacher"`, +1
            or -1.
        shape: shape of the result.
        stream: which numbers.
        index: number of the weight.
    """
    key, counter = functions.noise_key_counter(stream.seed, stream.step, index)
    if distribution == "normal":
        return tf.raw_ops.StatelessRandomNormalV2(shape=shape, key=key, counter=counter, alg=_PHILOX)
    # Two numbers from each word: the generator is most of the cost, and noise needs no more than 16 bits.
    size = math.prod(shape)
    words = tf.raw_ops.StatelessRandomUniformFullIntV2(
        shape=[-(-size // 2)], key=key, counter=counter, alg=_PHILOX, dtype=tf.int32
    )
    halves = tf.reshape(tf.reshape(tf.bitcast(words, tf.int16), [-1])[:size], shape)
    drawn = (2.0 * tf.cast(halves, tf.float32) + 1.0) * 2.0**-16
    return drawn if distribution == "uniform" else tf.where(drawn < 0.0, -1.0, 1.0)


def noise_op_usable(refs: list[WeightRef]) -> bool:
    """Whether the engine's noise op is there, or worth building, for these weights.

    It gives the numbers of TensorFlow's own ops (normal ones to rounding) several times faster; a small model is not
    worth the wait for a compiler.
    """
    return build.cached() or (sum(ref.size for ref in refs) >= _WORTH_BUILDING and build.available())


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
    if not isinstance(variable, tf.distribute.DistributedValues) or not inside_replica():
        return variable
    context = tf.distribute.get_replica_context()
    replica = int(tf.get_static_value(context.replica_id_in_sync_group))  # type: ignore[arg-type]
    return context.strategy.experimental_local_results(variable)[replica]


def inside_replica() -> bool:
    """Whether a replica's part of a step is being traced; without any strategy TensorFlow would say so, too."""
    return tf.distribute.has_strategy() and not tf.distribute.in_cross_replica_context()
