"""Take the memory of variables away for a while; carry an optimizer's arrays to other variables and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from sparsekit.engine.functions import Structure, gather_values, scatter_values
from sparsekit.errors import EngineError
from sparsekit.flavour import Flavour, key_of, native


@dataclass(frozen=True, eq=False)
class Mover:
    """Moves between a kernel and the vector of its kept values.

    Args:
        shape: shape of the kernel.
        keep: bool tf.Variable of that shape, True = keep.
    """

    shape: tuple[int, ...]
    keep: Any

    def structure(self) -> Structure:
        return Structure.from_mask(tf.convert_to_tensor(self.keep))

    def gather(self, kernel: Any) -> tf.Tensor:
        return gather_values(kernel, self.structure())

    def scatter(self, values: Any, rest: float = 0.0) -> tf.Tensor:
        """The kernel with the values at the kept positions and `rest` elsewhere."""
        full = scatter_values(values, self.structure())
        return full if rest == 0.0 else tf.where(self.keep, full, tf.constant(rest, full.dtype))


def put(variable: Any, value: Any) -> None:
    """Give a variable a value whatever the shape of what it holds now."""
    variable = native(variable)
    tf.raw_ops.AssignVariableOp(resource=variable.handle, value=tf.cast(value, variable.dtype), validate_shape=False)


def empty(variable: Any) -> None:
    """Give a variable's memory back; its shape stays what it was, but it cannot be read until `put`."""
    put(variable, tf.zeros([0]))


@dataclass(frozen=True, eq=False)
class _Pair:
    ours: Any
    theirs: Any
    mover: Mover | None
    fresh: float


class Twin:
    """An optimizer for the swapped variables that goes on from a user's optimizer, and back.

    Learning rate and update count are shared. Slots are moved: only one of the two holds them.

    Args:
        flavour: the model's Keras.
        model: the model, with its dense variables.
        optimizer: its optimizer, built.
        swapped: kernel, its values and what moves between the two.
        varying: whether values may change their number.

    Raises:
        EngineError: if the optimizer cannot be made anew from its settings, or has arrays that fit no variable.
    """

    def __init__(
        self,
        flavour: Flavour,
        model: Any,
        optimizer: Any,
        swapped: list[tuple[Any, Any, Mover]],
        varying: bool = False,
    ) -> None:
        known = flavour.optimizer_targets(optimizer, model)
        if known is None:
            raise EngineError("the optimizer updates variables that are not the model's")
        values = {key_of(kernel): value for kernel, value, _ in swapped}
        targets = [values.get(key_of(variable), variable) for variable in known]
        try:
            self.optimizer, pairs = flavour.twin(optimizer, targets, [(k, v) for k, v, _ in swapped], varying)
        except (TypeError, ValueError, AttributeError, NotImplementedError) as error:
            raise EngineError(
                f"{type(optimizer).__name__} cannot be made anew from its settings ({type(error).__name__}: {error})"
            ) from error
        movers = {key_of(kernel): mover for kernel, _, mover in swapped}
        owners = {id(native(slot)): (key, fresh) for key, slot, fresh in flavour.slots(optimizer)}
        self._pairs = [self._pair(theirs, ours, owners, movers) for theirs, ours in pairs]

    @staticmethod
    def _pair(theirs: Any, ours: Any, owners: dict[int, tuple[str, float]], movers: dict[str, Mover]) -> _Pair:
        key, fresh = owners.get(id(native(theirs)), ("", 0.0))
        mover = movers.get(key)
        if mover is not None and tuple(theirs.shape) == mover.shape:
            return _Pair(ours, theirs, mover, fresh)
        if not native(ours).shape.is_compatible_with(theirs.shape):
            raise EngineError(f"the optimizer's array {theirs.name} of shape {tuple(theirs.shape)} fits no kernel")
        return _Pair(ours, theirs, None, 0.0)

    def arrays(self, mover: Mover) -> list[Any]:
        """The slots of the values that a mover moves."""
        return [native(pair.ours) for pair in self._pairs if pair.mover is mover]

    def take(self) -> None:
        """Take the slots over; the user's optimizer keeps its own until `drop_theirs`."""
        for pair in self._pairs:
            theirs = native(pair.theirs)
            put(pair.ours, theirs if pair.mover is None else pair.mover.gather(theirs))

    def give_back(self) -> None:
        """Put the slots back into the user's optimizer."""
        for pair in self._pairs:
            ours = native(pair.ours)
            put(pair.theirs, ours if pair.mover is None else pair.mover.scatter(ours, pair.fresh))

    def drop_theirs(self) -> None:
        """Free the memory of what was taken over."""
        for pair in self._pairs:
            if len(pair.ours.shape):
                empty(pair.theirs)

    def drop_ours(self) -> None:
        for pair in self._pairs:
            if len(pair.ours.shape):
                empty(pair.ours)
