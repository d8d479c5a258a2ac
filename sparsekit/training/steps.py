"""Train with the masks held: a whole fit, or one compiled step for a loop of one's own."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
import weakref
from typing import Any

import tensorflow as tf

from ..engine import masking
from ..engine.gate import EnginePlan
from ..errors import ArgumentError, NonFiniteError, ScheduleWarning, SparsekitWarning
from ..files.checkpoint import Checkpoints
from ..flavour import Flavour, flavour_of
from ..frozen import FrozenMasks, frozen_masks
from ..schedules import Schedule
from ..weights import not_finite
from .dynamic import Dynamic, Gradual, Settle, ZerosStay
from .enforcement import MODES, Enforcement, enforced, optimizers_of, wrap_updates

MASKS = ("static", "dynamic")


def check_words(enforce: str, masks: str) -> None:
    """Raise ArgumentError for a word that is not known."""
    if enforce not in MODES:
        raise ArgumentError(f"enforce={enforce!r} is not known; give one of {', '.join(MODES)}.")
    if masks not in MASKS:
        raise ArgumentError(f"masks={masks!r} is not known; give one of {', '.join(MASKS)}.")


def check_masks(model: Any) -> None:
    """Raise ArgumentError if a model has no masks."""
    if not len(frozen_masks(model)):
        raise ArgumentError(
            f"The model '{model.name}' has no masks; call sparsekit.prune(model, sparsity=...), or "
            "sparsekit.freeze(model) if its weights are pruned already."
        )


def check_finite(model: Any, when: str, way_out: str) -> None:
    """Raise NonFiniteError if a trainable weight holds NaN or infinity."""
    broken = not_finite(model)
    if broken:
        others = f" and {len(broken) - 1} more" if len(broken) > 1 else ""
        count = sum(broken.values())
        raise NonFiniteError(
            f"{count} {'value is' if count == 1 else 'values are'} NaN or infinite {when} "
            f"('{next(iter(broken))}'{others}); {way_out}."
        )


def enforcement_for(
    model: Any,
    enforce: str = "gradient",
    masks: str = "static",
    schedule: Schedule | None = None,
    fuse: bool = True,
) -> Enforcement:
    """What holds a model's frozen masks."""
    flavour, frozen = flavour_of(model), frozen_masks(model)
    # XLA, which a user's own step may ask for inside, has no kernel for the engine's ops, and nothing is built for
    # their sake.
    fused = fuse and not flavour.uses_xla(model) and not flavour.has_own_train_step(model) and masking.ready()
    choose: Dynamic | None = None
    if schedule is not None:
        with _strategy_of(model):
            choose = Gradual(frozen, schedule, _updates_of(getattr(model, "optimizer", None)), fused)
    elif masks == "dynamic":
        choose = ZerosStay(frozen, fused)
    return Enforcement(flavour, frozen, enforce, choose, fused)


def fit(
    model: Any,
    enforcement: Enforcement,
    checkpoints: Checkpoints | None = None,
    engine: str = "dense",
    **arguments: Any,
) -> Any:
    """Run the model's own fit with the masks held; the model is as before afterwards, apart from its weights.

    Args:
        model: a compiled model.
        enforcement: what holds the masks.
        checkpoints: where the run keeps its state, if it does.
        engine: `"auto"`, `"dense"` or `"sparse"`.
        arguments: passed to `model.fit`.

    Returns:
        The Keras History; its `engine` says how the run was computed.

    Raises:
        EngineError: if `"sparse"` was asked for and is not possible.
        ViolationError: if a masked weight is not zero in the end.
    """
    flavour, frozen = enforcement.flavour, enforcement.frozen
    optimizers = optimizers_of(model, flavour)
    averaged = checkpoints is not None and any(map(flavour.averages_weights, optimizers))
    obstacle = "averages of weights are not taken up from checkpoints in the sparse form" if averaged else None
    plan = EnginePlan(flavour, model, frozen, optimizers, engine, arguments, obstacle)
    _clean(model, enforcement, optimizers)
    if enforcement.choose is not None:
        # First, so that those of the user find the value in their logs.
        arguments["callbacks"] = [_sparsity_log(flavour, plan), *(arguments.get("callbacks") or ())]
    flavour.forget_train_function(model)

    def hold(
        masks: FrozenMasks, held: list[Any], settle: Settle | None = None
    ) -> contextlib.AbstractContextManager[None]:
        choose = enforcement.choose.over(masks, settle) if enforcement.choose is not None else None
        if choose is not None and choose.settles_at_once:
            # Of kept values none is masked from one step to the next.
            masks = masks.without({mask.path for mask in masks if mask.size is not None})
        return enforced(dataclasses.replace(enforcement, frozen=masks, choose=choose), model, held)

    try:
        with plan.running(hold, arguments, changing=enforcement.choose is not None):
            if checkpoints is None:
                callbacks = plan.callbacks(list(arguments.pop("callbacks", None) or ()))
                history = model.fit(callbacks=callbacks, **arguments)
            else:
                masks = {f"mask {mask.path}": mask.keep for mask in frozen}
                settings = _settings(enforcement)
                history = checkpoints.fit(
                    model, extra=masks, settings=settings, around=plan.callbacks, looking=plan.looking, **arguments
                )
        history.engine = plan.report
        _warn_of_restored(frozen)
    finally:
        flavour.forget_train_function(model)
        # A callback may have put back weights from before the prune; fit may have ended in an exception.
        _clean(model, enforcement, optimizers)
    frozen.check("after training")
    if isinstance(enforcement.choose, Gradual):
        _warn_of_unreached(enforcement.choose, frozen, _updates_of(optimizers[0] if optimizers else None))
    return history


def _settings(enforcement: Enforcement) -> dict[str, Any]:
    """What a run must not change when it is taken up again."""
    choose = enforcement.choose
    schedule = repr(choose.schedule) if isinstance(choose, Gradual) else None
    return {"enforce": enforcement.mode, "masks": "static" if choose is None else "dynamic", "schedule": schedule}


def _strategy_of(model: Any) -> contextlib.AbstractContextManager:
    """The scope of the model's distribution strategy, for a caller who stands outside of it."""
    strategy = model.distribute_strategy
    return contextlib.nullcontext() if strategy is tf.distribute.get_strategy() else strategy.scope()


def _clean(model: Any, enforcement: Enforcement, optimizers: list[Any]) -> None:
    """Zero the masked weights and give their slots the values of fresh ones."""
    with _strategy_of(model):
        enforcement.frozen.apply()
        for optimizer in optimizers:
            enforcement.clean_slots(optimizer)


def _warn_of_restored(frozen: FrozenMasks) -> None:
    broken = frozen.violations()
    if broken:
        warnings.warn(
            f"{sum(broken.values())} pruned weights were not zero when fit returned ({', '.join(list(broken)[:3])}): "
            "a callback wrote to the weights, for example EarlyStopping(restore_best_weights=True) with weights from "
            "before the prune; they are zero again.",
            SparsekitWarning,
            stacklevel=4,
        )


def _updates_of(optimizer: Any) -> int:
    """How many updates an optimizer has made."""
    return 0 if optimizer is None else int(tf.convert_to_tensor(optimizer.iterations))


def _warn_of_unreached(gradual: Gradual, frozen: FrozenMasks, done: int) -> None:
    if done < int(gradual._steps[-1]):
        warnings.warn(
            f"The run ended after {done} updates, before the schedule's end_step; the sparsity is "
            f"{frozen.to_masks().sparsity:.4f} instead of {gradual.schedule.final_sparsity}. Train longer or lower "
            "end_step.",
            ScheduleWarning,
            stacklevel=4,
        )


def _sparsity_log(flavour: Flavour, plan: EnginePlan) -> Any:
    """A callback of the model's Keras that logs the sparsity of changing masks at each epoch's end."""

    class SparsityLog(flavour.keras.callbacks.Callback):
        reads_no_weights = True

        def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
            if logs is not None:
                logs["sparsity"] = plan.sparsity()

    return SparsityLog()


class TrainStep:
    """One compiled training step that holds the masks, for a loop of one's own: `step(x, y, sample_weight)`.

    It runs the model's `train_step` (the user's own if there is one) in one `tf.function`, traced anew after a
    `compile` or where masks were frozen for further weights. Made by `sparsekit.train_step`.
    """

    def __init__(self, model: Any, enforcement: Enforcement) -> None:
        self._model = model
        self._enforcement = enforcement
        self._build()

    def _build(self) -> None:
        model, enforcement = self._model, self._enforcement
        self._optimizer, self._masks = model.optimizer, list(enforcement.frozen)
        optimizers = optimizers_of(model, enforcement.flavour)
        _clean(model, enforcement, optimizers)

        @tf.autograph.experimental.do_not_convert
        def run(data: tuple) -> Any:
            # The wrappers are there while the step is traced and nowhere else.
            with enforced(enforcement, model, optimizers):
                return model.distribute_strategy.run(model.train_step, args=(data,))

        if model.run_eagerly:
            self._run = run
        else:
            xla = enforcement.flavour.uses_xla(model)
            self._run = tf.function(run, reduce_retracing=True, jit_compile=xla or None)

    def __call__(self, x: Any, y: Any = None, sample_weight: Any = None) -> dict[str, Any]:
        """Train on one batch.

        Returns:
            The model's logs as scalar tensors: the loss and metrics since the last `model.reset_metrics()`.
        """
        if self._model.optimizer is not self._optimizer or list(self._enforcement.frozen) != self._masks:
            self._build()
        return self._run(tuple(_tensors(part) for part in (x, y, sample_weight)))


def _tensors(part: Any) -> Any:
    """Arrays become tensors, so that a new batch of the same shape does not trace the step again."""
    return None if part is None else tf.nest.map_structure(tf.convert_to_tensor, part)


def masked_optimizer(optimizer: Any, model: Any, masks: str) -> Any:
    """Wrap the optimizer's updates for as long as it lives, with whatever masks the model has when a step is traced."""
    # Whether the user's own function is compiled with XLA is not known here.
    enforcement = enforcement_for(model, masks=masks, fuse=False)
    _clean(model, enforcement, [optimizer])
    owner = weakref.ref(model)

    def find() -> Enforcement:
        current = owner()
        if current is None or not len(frozen_masks(current)):
            return Enforcement(enforcement.flavour, FrozenMasks())
        return enforcement_for(current, masks=masks, fuse=False)

    wrap_updates(optimizer, find)
    return optimizer
