"""Masks frozen for a model: non-trainable TensorFlow variables in a table beside the model.

They are never attributes of the model, since Keras would track and save them. The table is keyed weakly, so a model's
masks go away with it. A second prune writes into the same variables, so that a step compiled before stays right.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from .errors import MaskError, ViolationError
from .flavour import key_of, native
from .masks import Mask, MaskSet
from .weights import WeightRef, all_weights, read


@dataclass(eq=False)
class FrozenMask:
    """The mask of one weight as TensorFlow variables.

    Args:
        path: the weight's path.
        variable: the weight.
        keep: bool tf.Variable of the weight's shape, True = keep; one byte a position.
        pattern: name of the structure of the zeros.
        target: sparsity that was asked for, or None if the mask was given or read from zeros.
        size: number of positions of the weight, where the variable holds only kept ones; None if it holds all.
    """

    path: str
    variable: Any
    keep: tf.Variable
    pattern: str = "unstructured"
    target: float | None = None
    size: int | None = None

    @property
    def key(self) -> str:
        return key_of(self.variable)

    def mask(self) -> Mask:
        return Mask(self.path, np.array(read(self.keep)), self.pattern)

    def violations(self) -> int:
        """Number of positions that are masked and not exactly zero."""
        weight, keep = read(self.variable), read(self.keep)
        return int(np.count_nonzero((weight != 0) & ~keep))


class FrozenMasks:
    """All frozen masks of one model, by weight path.

    `notes` says of weights without a mask why they have none: path -> reason.
    """

    def __init__(self) -> None:
        self.notes: dict[str, str] = {}
        self._by_path: dict[str, FrozenMask] = {}
        self._by_key: dict[str, FrozenMask] = {}
        self._opened: dict[str, FrozenMask] = {}

    def __iter__(self) -> Iterator[FrozenMask]:
        return iter(self._by_path.values())

    def __len__(self) -> int:
        return len(self._by_path)

    def get(self, variable: Any) -> FrozenMask | None:
        """The mask of a variable (of either Keras, or its tf.Variable), or None."""
        return self._by_key.get(key_of(variable))

    def without(self, paths: Collection[str], others: Iterable[FrozenMask] = ()) -> FrozenMasks:
        """The same masks but these, with others in their place."""
        rest = FrozenMasks()
        for frozen in (*(mask for mask in self if mask.path not in paths), *others):
            rest._by_path[frozen.path] = rest._by_key[frozen.key] = frozen
        return rest

    def put(self, ref: WeightRef, mask: Mask, target: float | None) -> None:
        """Freeze a mask for a weight, in the variable that already holds one if there is one."""
        frozen = self._by_key.get(ref.key) or self._opened.pop(ref.key, None)
        if frozen is None:
            frozen = FrozenMask(ref.path, ref.variable, _mask_variable(ref.variable, mask.keep))
        else:
            frozen.keep.assign(mask.keep)
        frozen.pattern, frozen.target = mask.pattern, target
        self._by_path[ref.path] = self._by_key[frozen.key] = frozen

    def open(self) -> None:
        """Forget all masks. Their variables stay, opened: steps compiled before read them, also after a new prune."""
        for frozen in self:
            frozen.keep.assign(np.ones(frozen.keep.shape, dtype=np.bool_))
        self._opened.update(self._by_key)
        for table in (self._by_path, self._by_key, self.notes):
            table.clear()

    def to_masks(self) -> MaskSet:
        return MaskSet(frozen.mask() for frozen in self)

    def apply(self, in_place: Callable[[tf.Variable, tf.Variable], None] | None = None) -> None:
        """Set every masked position to zero; the kept ones do not change.

        Args:
            in_place: `in_place(weight, keep)` does so for float32 without a second copy of the weight.
        """
        for frozen in self:
            variable = native(frozen.variable)
            replicated = getattr(variable, "distribute_strategy", None) is not None
            if in_place is not None and variable.dtype == tf.float32 and not replicated:
                in_place(variable, frozen.keep)
            else:
                variable.assign(keep_only(frozen.keep, variable))

    def violations(self) -> dict[str, int]:
        """Weights with positions that are masked and not zero: path -> how many."""
        counts = {frozen.path: frozen.violations() for frozen in self}
        return {path: count for path, count in counts.items() if count}

    def check(self, when: str) -> None:
        """Raise ViolationError if a masked position is not zero."""
        broken = self.violations()
        if broken:
            listed = ", ".join(f"{path} ({count})" for path, count in list(broken.items())[:5])
            raise ViolationError(
                f"{sum(broken.values())} pruned weights are not zero {when}: {listed}; "
                "something writes to the weights outside of the training step."
            )


def keep_only(keep: Any, value: Any) -> tf.Tensor:
    """`value` where kept, +0.0 elsewhere. A select, not a product: NaN * 0 is NaN and -1 * 0 is -0."""
    value = tf.convert_to_tensor(value)
    return tf.where(tf.convert_to_tensor(keep), value, tf.zeros([], value.dtype))


def _mask_variable(weight: Any, keep: np.ndarray) -> tf.Variable:
    """A bool variable where the weight lives: under its distribution strategy, with one copy a replica."""
    strategy = getattr(native(weight), "distribute_strategy", None) or tf.distribute.get_strategy()
    with tf.init_scope(), strategy.scope():
        return tf.Variable(
            keep,
            trainable=False,
            dtype=tf.bool,
            name="sparsity_mask",
            aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
        )


_TABLE: weakref.WeakKeyDictionary[Any, FrozenMasks] = weakref.WeakKeyDictionary()


def frozen_masks(model: Any) -> FrozenMasks:
    """The frozen masks of a model; empty if it has none."""
    found = _TABLE.get(model)
    return found if found is not None else FrozenMasks()


def attach(
    model: Any,
    masks: MaskSet,
    targets: Mapping[str, float] | None = None,
    in_place: Callable[[tf.Variable, tf.Variable], None] | None = None,
) -> FrozenMasks:
    """Freeze masks for a model and zero what they mask (see FrozenMasks.apply). Masks of other weights stay.

    Raises:
        MaskError: for an unknown path or a shape that does not fit; nothing has changed then.
    """
    refs = {ref.path: ref for ref in all_weights(model)}
    for path in masks:
        keep = masks[path]
        if path not in refs:
            raise MaskError(
                f"The model '{model.name}' has no weight '{path}'; its paths are, for example, "
                f"{', '.join(list(refs)[:3])}."
            )
        if keep.shape != refs[path].shape:
            raise MaskError(f"The mask of '{path}' has shape {keep.shape}; the weight has {refs[path].shape}.")
        if not tf.as_dtype(refs[path].variable.dtype).is_floating:
            raise MaskError(f"'{path}' is not floating point; only floating weights can be masked.")
    frozen = _TABLE.setdefault(model, FrozenMasks())
    for path in masks:
        frozen.put(refs[path], masks.mask(path), (targets or {}).get(path))
    frozen.apply(in_place)
    return frozen


def detach(model: Any) -> None:
    """Forget a model's masks."""
    frozen_masks(model).open()
