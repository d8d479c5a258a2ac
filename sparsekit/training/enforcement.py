"""How zeros are held while a model trains: the one place that does it, for both Kerases.

Every update of every Keras optimizer goes through one method, `apply` (Keras 3) or `apply_gradients` (tf_keras). While
a step is traced, that method of the user's own optimizer object is wrapped:

    mask the gradients -> [clip, update, average, constraints: Keras] -> zero the weights and slots again

(where the update ends with a write that can mask at once, that write does: writes.py).

Masking the gradient alone is not enough: moments collected before the prune push zeros away, and Muon mixes positions.
Zeroing the weight alone is not enough: a norm to clip by would count pruned positions, and the weight average that
`use_ema` writes over the model at the end of fit is taken before the weights are zeroed.

`mode="constraint"` has Keras zero the weights, through `variable.constraint`, and leaves the gradients alone where that
cannot be felt. Nothing of this outlives the run: the optimizer, the constraints and the compiled step are as before.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import tensorflow as tf

from ..engine import masking
from ..errors import MaskError
from ..flavour import Flavour, native, shadowed
from ..frozen import FrozenMask, FrozenMasks, keep_only
from .writes import MaskedWrites

MODES = ("gradient", "constraint")

# tf_keras traces with AutoGraph, which has nothing to do in this code; a user's own step inside is still converted.
_as_written = tf.autograph.experimental.do_not_convert


class Choose(Protocol):
    """Holds masked weights and changes the masks."""

    zeros_stay: bool  # whether all it changes is to mask each weight that is zero after an update
    settles_at_once: bool  # whether no masked value is left once `settle` was called

    def __call__(self, updates: Any, masks: Iterable[FrozenMask]) -> None:
        """Hold the weights of `masks`, then change masks; `updates` is the number of optimizer updates so far."""

    def over(self, frozen: FrozenMasks, settle: Callable[[float], None] | None = None) -> Choose:
        """The same for other masks; `settle` is called in the graph once some have changed."""
        ...


@dataclass(frozen=True, eq=False)
class Enforcement:
    """What is done around each optimizer update.

    Args:
        flavour: the model's Keras.
        frozen: the masks to hold.
        mode: `"gradient"` or `"constraint"`.
        choose: holds the weights instead, and changes the masks; called in the graph after each update.
        fused: hold weights and gradients with the engine's one-pass ops.
    """

    flavour: Flavour
    frozen: FrozenMasks
    mode: str = "gradient"
    choose: Choose | None = None
    fused: bool = False

    @_as_written
    def before(self, optimizer: Any, gradients: list[Any], variables: list[Any]) -> list[Any]:
        """Gradients with the masked positions set to zero."""
        if self.mode == "constraint" and self._is_separable(optimizer):
            return gradients
        masked = []
        for gradient, variable in zip(gradients, variables, strict=True):
            frozen = self.frozen.get(variable)
            masked.append(gradient if frozen is None else mask_gradient(gradient, frozen.keep, self.fused))
        return masked

    def writes(self) -> MaskedWrites:
        """A context in which the optimizer's own writes hold the masks where they can."""
        drop = self.choose is not None and self.choose.zeros_stay
        return MaskedWrites(self.frozen, self.fused and self.mode == "gradient", drop)

    @_as_written
    def after(self, optimizer: Any, writes: MaskedWrites) -> None:
        """Zero what is masked again, let dynamic masks change, and clean the slots of what is masked then."""
        rest = list(writes.others())
        if self.choose is not None:
            self.choose(optimizer.iterations, rest)
        elif self.mode == "gradient":
            hold(rest, self.fused)
        if self.averages_or_mixes(optimizer):
            self.clean_slots(optimizer)

    def clean_slots(self, optimizer: Any) -> None:
        """Give every masked position the slot values of a fresh optimizer."""
        _assign_kept(self._masked_slots(optimizer))

    def _is_separable(self, optimizer: Any) -> bool:
        """Whether a masked position's gradient cannot reach any other position."""
        return self.flavour.updates_elementwise(optimizer) and not self.flavour.couples_gradients(optimizer)

    def averages_or_mixes(self, optimizer: Any) -> bool:
        """Whether slots at masked positions have to be cleaned on each update, not only around the run.

        Under masked gradients an elementwise update leaves a clean slot clean, and what a masked slot holds reaches
        no weight. A weight average is written over the model, and a mixing update spreads what a slot holds.
        """
        return self.flavour.averages_weights(optimizer) or not self.flavour.updates_elementwise(optimizer)

    def _masked_slots(self, optimizer: Any) -> list[tuple[Any, FrozenMask, float]]:
        by_key = {frozen.key: frozen for frozen in self.frozen}
        return [
            (slot, by_key[key], fresh)
            for key, slot, fresh in self.flavour.slots(optimizer)
            if key in by_key and tuple(slot.shape) == tuple(by_key[key].variable.shape)
        ]


def mask_gradient(gradient: Any, keep: Any, fused: bool = False) -> Any:
    """A gradient with masked positions at zero, also where it is NaN or infinite there.

    Args:
        gradient: a tensor, tf.IndexedSlices (rows of an Embedding), or None.
        keep: bool variable of the weight's shape.
        fused: use the engine's op where it can.
    """
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        rows = tf.gather(keep, gradient.indices)
        return tf.IndexedSlices(keep_only(rows, gradient.values), gradient.indices, gradient.dense_shape)
    if fused and gradient.dtype == tf.float32:
        return masking.keep_only(keep, gradient)
    return keep_only(keep, gradient)


@_as_written
def hold(masks: Iterable[FrozenMask], fused: bool = False) -> None:
    """Set the masked positions of weights to zero, on every replica."""
    _assign_kept([(mask.variable, mask, 0.0) for mask in masks], fused)


def holding(frozen: FrozenMasks) -> Callable[[], None]:
    """A compiled function that sets the masked positions of weights to zero, to be called outside of any step."""
    if not frozen:
        return lambda: None
    strategy = getattr(native(next(iter(frozen)).variable), "distribute_strategy", None) or tf.distribute.get_strategy()
    compiled = tf.function(functools.partial(hold, frozen, masking.ready()), autograph=False)

    def run() -> None:
        with strategy.scope():
            compiled()

    return run


def on_all_replicas(update: Callable[[tf.distribute.Strategy], None]) -> None:
    """Run `update(strategy)` where variables of all replicas can be written, from inside a step or outside."""
    if tf.distribute.in_cross_replica_context():
        update(tf.distribute.get_strategy())
    else:
        tf.distribute.get_replica_context().merge_call(update)


def assign(strategy: tf.distribute.Strategy, variable: Any, update: Callable, *args: Any) -> None:
    """Run `update(component, *args)` for the component of a variable on each replica."""
    target = native(variable)
    strategy.extended.update(getattr(target, "_variable", target), update, args=args, group=False)


def _assign_kept(pairs: list[tuple[Any, FrozenMask, float]], fused: bool = False) -> None:
    """Set the masked positions of variables to a value, on every replica."""

    def update(strategy: tf.distribute.Strategy) -> None:
        for variable, frozen, value in pairs:
            assign(strategy, variable, functools.partial(_keep_or, value=value, fused=fused), frozen.keep)

    if pairs:
        on_all_replicas(update)


def _keep_or(variable: tf.Variable, keep: tf.Variable, value: float, fused: bool) -> None:
    if fused and value == 0.0 and variable.dtype == tf.float32:
        masking.hold(variable, keep)
    elif value == 0.0:
        variable.assign(keep_only(keep, variable))
    else:
        current = tf.convert_to_tensor(variable)
        variable.assign(tf.where(keep, current, tf.constant(value, current.dtype)))


@contextlib.contextmanager
def enforced(enforcement: Enforcement, model: Any, optimizers: list[Any]) -> Iterator[None]:
    """Hold the masks in every step that is traced or run inside this context."""
    with contextlib.ExitStack() as stack:
        for optimizer in optimizers:
            wrapped = _with_masks(optimizer, lambda: enforcement)
            stack.enter_context(shadowed(optimizer, enforcement.flavour.update_method(), wrapped))
        if enforcement.mode == "constraint":
            stack.enter_context(_constrained(enforcement))
        if enforcement.flavour.has_own_train_step(model):
            stack.enter_context(_wrapped_train_step(model, enforcement))
        yield


def wrap_updates(optimizer: Any, find: Callable[[], Enforcement]) -> None:
    """Wrap the optimizer's update method, for good. `find` gives the enforcement when a step is traced."""
    vars(optimizer)[find().flavour.update_method()] = _with_masks(optimizer, find)


def _with_masks(optimizer: Any, find: Callable[[], Enforcement]) -> Callable:
    """`apply(gradients, variables)` or `apply_gradients(pairs)` with the masks held around it."""
    current = getattr(optimizer, find().flavour.update_method())
    original = getattr(current, "unwrapped", current)
    takes_pairs = original.__name__ == "apply_gradients"

    @functools.wraps(original)
    def update(gradients: Any, *args: Any, **kwargs: Any) -> Any:
        enforcement = find()
        writes = enforcement.writes()
        if takes_pairs:
            pairs = list(gradients)
            variables = [variable for _, variable in pairs]
            masked = enforcement.before(optimizer, [gradient for gradient, _ in pairs], variables)
            with writes, _rows_unconstrained(enforcement, optimizer, masked, variables):
                result = original(list(zip(masked, variables, strict=True)), *args, **kwargs)
        else:
            variables = args[0] if args else kwargs.get("trainable_variables")
            known = list(variables) if variables is not None else list(optimizer._trainable_variables)
            masked = enforcement.before(optimizer, list(gradients), known)
            with writes:
                result = original(masked, *args, **kwargs)
        enforcement.after(optimizer, writes)
        return result

    update.unwrapped = original  # type: ignore[attr-defined]
    return update


@contextlib.contextmanager
def _constrained(enforcement: Enforcement) -> Iterator[None]:
    """Give each masked variable a constraint that zeroes it; a constraint it had runs inside."""
    from .constraint import MaskConstraint

    flavour = enforcement.flavour
    before = [(frozen.variable, flavour.get_constraint(frozen.variable)) for frozen in enforcement.frozen]
    try:
        for frozen, (variable, constraint) in zip(enforcement.frozen, before, strict=True):
            held = MaskConstraint(frozen.keep, inner=constraint)
            fused = enforcement.fused and native(variable).dtype == tf.float32
            flavour.set_constraint(variable, held.fuse() if fused else held)
        yield
    finally:
        for variable, constraint in before:
            flavour.set_constraint(variable, constraint)


@contextlib.contextmanager
def _rows_unconstrained(
    enforcement: Enforcement, optimizer: Any, gradients: list[Any], variables: list[Any]
) -> Iterator[None]:
    """Zero the weights whose constraint this optimizer would refuse to run (Embeddings, legacy optimizers)."""
    flavour, rows = enforcement.flavour, []
    if enforcement.mode == "constraint" and flavour.refuses_constraint_on_rows(optimizer):
        found = zip(gradients, map(enforcement.frozen.get, variables), strict=True)
        rows = [frozen for gradient, frozen in found if frozen and isinstance(gradient, tf.IndexedSlices)]
    constraints = [flavour.get_constraint(frozen.variable) for frozen in rows]
    for frozen, constraint in zip(rows, constraints, strict=True):
        flavour.set_constraint(frozen.variable, constraint.inner)
    try:
        yield
    finally:
        for frozen, constraint in zip(rows, constraints, strict=True):
            flavour.set_constraint(frozen.variable, constraint)
    hold(rows)


@contextlib.contextmanager
def _wrapped_train_step(model: Any, enforcement: Enforcement) -> Iterator[None]:
    """A user's own train_step may write to weights without an optimizer: do after it what is done after an update."""
    original = model.train_step

    @functools.wraps(original)
    def train_step(*args: Any, **kwargs: Any) -> Any:
        logs = original(*args, **kwargs)
        hold(enforcement.frozen, enforcement.fused)
        if enforcement.choose is not None:
            enforcement.choose(getattr(getattr(model, "optimizer", None), "iterations", 0), enforcement.frozen)
        return logs

    with shadowed(model, "train_step", train_step):
        yield


def optimizers_of(model: Any, flavour: Flavour) -> list[Any]:
    """The optimizer that the model was compiled with, and any other that it or a model in it holds (a GAN's two)."""
    found: dict[int, Any] = {}
    held = [value for part in flavour.layers(model) for value in vars(part).values()]
    for value in (getattr(model, "optimizer", None), *held):
        values = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else (value,)
        for candidate in values:
            if flavour.is_optimizer(candidate):
                found.setdefault(id(candidate), candidate)
    inner = {id(o) for outer in found.values() for o in flavour.inner_optimizers(outer)[1:]}
    return [optimizer for key, optimizer in found.items() if key not in inner]


def bind_constraints(flavour: Flavour, model: Any, frozen: FrozenMasks) -> None:
    """Hand the frozen masks to every MaskConstraint that a layer was constructed with."""
    for mask in frozen:
        constraint = flavour.get_constraint(mask.variable)
        if _is_ours(constraint) and constraint.keep is not mask.keep:
            constraint.freeze(mask.keep)
            # A step traced before runs without the mask.
            flavour.forget_train_function(model)


def check_constraints(flavour: Flavour, model: Any) -> None:
    """Raise MaskError if two weights share a MaskConstraint, which can hold one mask only."""
    owners: dict[int, Any] = {}
    for variable in model.trainable_variables:
        constraint = flavour.get_constraint(variable)
        other = owners.setdefault(id(constraint), variable)
        if _is_ours(constraint) and other is not variable:
            raise MaskError(
                f"'{flavour.path(other)}' and '{flavour.path(variable)}' share one MaskConstraint object; "
                "give each weight its own."
            )


def _is_ours(constraint: Any) -> bool:
    # By name, so that a model without one does not make both Kerases load.
    return type(constraint).__name__ == "MaskConstraint" and hasattr(constraint, "freeze")
