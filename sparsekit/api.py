"""The public functions: check what was given, call the part that does it, report. No maths."""

from __future__ import annotations

import math
import numbers
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from .criteria import Criterion
from .distributions import Distribution
from .engine import masking
from .engine.accelerate import Accelerated
from .engine.gate import check_engine
from .engine.timings import onednn
from .errors import ArgumentError, ModelTypeError, SparsekitWarning
from .files.checkpoint import Checkpoints
from .flavour import Flavour, flavour_of, flavour_of_optimizer
from .frozen import attach, detach, frozen_masks
from .masks import Mask, MaskSet
from .onednn import warning_of_crash
from .patterns import Pattern
from .registry import resolve
from .reports.report import Report, build_report
from .schedules import Schedule
from .selection import SCOPES, choose_masks
from .training.enforcement import bind_constraints, check_constraints
from .training.steps import TrainStep, check_finite, check_masks, check_words, enforcement_for, fit, masked_optimizer
from .updates.reconstruction import forget_dense, remember_dense
from .updates.step import fit_with_update
from .weights import Selector, read, survey


def prune(
    model: Any,
    sparsity: float = 0.8,
    *,
    criterion: str | Criterion = "magnitude",
    pattern: str | Pattern = "unstructured",
    scope: str = "layer",
    distribution: str | Distribution = "uniform",
    include: Selector | Iterable[Selector] | None = None,
    exclude: Selector | Iterable[Selector] | None = None,
    min_keep: int = 1,
    seed: int = 0,
) -> Any:
    """Set the least important weights of a model to zero and freeze the masks, in place.

    Targets are absolute: what is pruned already counts and stays zero, so the same call twice changes nothing.

    Args:
        model: a built Keras 3 or tf_keras model.
        sparsity: fraction of the chosen weights that is zero afterwards, in [0, 1); 0 changes nothing.
        criterion: what makes a weight worth keeping: `"magnitude"`, `"random"` or a `Criterion`.
        pattern: structure of the zeros: `"unstructured"` or a `Pattern`.
        scope: `"layer"` ranks within each weight, `"global"` over all chosen weights at once.
        distribution: how the sparsity is spread if the scope is `"layer"`: `"uniform"`, `"erk"` (large weights become
            sparser) or a `Distribution`.
        include: prune only these: globs over weight paths, layer classes or their names, functions of a WeightRef.
            Biases are pruned only where a glob names them, for example `["*/kernel", "*/bias"]`.
        exclude: leave these alone; the same forms.
        min_keep: number of positions that each weight keeps at least.
        seed: seed of criteria that draw random numbers.

    Returns:
        The same model.

    Raises:
        ModelTypeError: if `model` is no Keras model on TensorFlow.
        ArgumentError: for a value that cannot be used or a target that cannot be reached.
        NothingToPruneError: if no weight is left to prune.
        NonFiniteError: if a weight holds NaN or infinity.
        After an error the model is as it was.

    Warns:
        LayerCollapseWarning: naming the weights that `min_keep` saved.
    """
    flavour = flavour_of(model)
    sparsity = _fraction("sparsity", sparsity)
    if sparsity == 1.0:
        raise ArgumentError("sparsity=1.0 would leave no weight at all; give a fraction below 1, for example 0.9.")
    if scope not in SCOPES:
        raise ArgumentError(f"scope={scope!r} is not known; give one of {', '.join(SCOPES)}.")
    _whole("min_keep", min_keep, 0)
    _whole("seed", seed, 0)
    chosen, _ = survey(model, include, exclude)
    held = {mask.path: mask for mask in frozen_masks(model)}
    earlier = {ref.path: read(held[ref.path].keep) for ref in chosen if ref.path in held}
    options = {
        "criterion": resolve(Criterion, criterion, "criterion"),
        "pattern": resolve(Pattern, pattern, "pattern"),
        "distribution": resolve(Distribution, distribution, "distribution"),
    }
    if sparsity == 0.0:
        masks = MaskSet(Mask(r.path, np.ones(r.shape, np.bool_)) for r in chosen if r.path not in earlier)
    else:
        weights = {ref.path: ref.numpy for ref in chosen}
        masks = choose_masks(weights, sparsity, scope=scope, earlier=earlier, min_keep=min_keep, seed=seed, **options)
    check_constraints(flavour, model)
    remember_dense(model)
    in_place = masking.hold if masking.ready() else None
    bind_constraints(flavour, model, attach(model, masks, dict.fromkeys(masks, sparsity), in_place))
    return model


def freeze(model: Any, masks: MaskSet | Mapping[str, np.ndarray] | None = None) -> MaskSet:
    """Attach masks to a model: given ones, or those that the zeros of an already pruned model show.

    Read from zeros, a weight that is zero everywhere (zero-initialised) and an Embedding whose only zeros are whole
    rows (padding) are left free: those zeros were not pruned. `report` gives the reason.

    Args:
        model: a built Keras model.
        masks: weight path -> bool array of the weight's shape, True = keep. What they drop is set to zero.

    Returns:
        The masks that the model has now.

    Raises:
        MaskError: for an unknown path, shape or dtype; nothing has changed then.
        ArgumentError: if no masks are given and the model has no zeros to read them from.
    """
    flavour = flavour_of(model)
    notes: dict[str, str] = {}
    if masks is None:
        masks, notes = _masks_from_zeros(model)
    elif not isinstance(masks, MaskSet):
        masks = MaskSet.from_arrays({path: np.asarray(keep) for path, keep in masks.items()})
    check_constraints(flavour, model)
    frozen = attach(model, masks)
    frozen.notes.update(notes)
    bind_constraints(flavour, model, frozen)
    return frozen.to_masks()


def _masks_from_zeros(model: Any) -> tuple[MaskSet, dict[str, str]]:
    masks, notes = [], {}
    for ref in survey(model)[0]:
        keep = ref.numpy() != 0
        if keep.all():
            continue
        if not keep.any():
            notes[ref.path] = "zero everywhere: not pruned but never trained"
        elif ref.role == "embeddings" and (keep.any(axis=-1) == keep.all(axis=-1)).all():
            notes[ref.path] = "only whole rows are zero: padding, not pruned"
        else:
            masks.append(Mask(ref.path, keep))
    if not masks:
        raise ArgumentError(
            f"The weights of '{model.name}' hold no pruned zeros to read masks from; "
            "call sparsekit.prune(model, sparsity=...) or give the masks."
        )
    return MaskSet(masks), notes


def strip(model: Any) -> Any:
    """Forget a model's masks; its zeros stay zero until something trains them.

    Returns:
        The same model.
    """
    flavour_of(model)
    detach(model)
    return model


def masks_of(model: Any) -> MaskSet:
    """The masks of a model: weight path -> read-only bool array, True = keep; empty if it has none."""
    flavour_of(model)
    return frozen_masks(model).to_masks()


def report(model: Any) -> Report:
    """Per weight: shape, target, achieved sparsity, zeros that came back, and why a weight was left alone."""
    flavour_of(model)
    return build_report(model)


def retrain(
    model: Any,
    data: Any,
    *,
    epochs: int = 1,
    masks: str = "static",
    enforce: str = "gradient",
    schedule: Schedule | None = None,
    update: Any = None,
    engine: str = "auto",
    optimizer: Any = None,
    loss: Any = None,
    metrics: Any = None,
    validation_data: Any = None,
    callbacks: Sequence[Any] = (),
    checkpoint_dir: str | os.PathLike[str] | None = None,
    checkpoint_every: int | None = None,
    seed: int = 0,
    **fit_arguments: Any,
) -> Any:
    """Train the weights that are left; every pruned weight is exactly zero after each step.

    The model's own `fit` and `train_step` run, with the masks held inside the one compiled step.

    Args:
        model: a pruned model (see `prune`, `freeze`).
        data: what fit takes: arrays, `(x, y)`, `(x, y, sample_weight)`, a tf.data.Dataset, a PyDataset or Sequence, or
            a generator. A tuple is taken apart; put several inputs in a list or dict.
        epochs: number of epochs.
        masks: `"static"`: the masks never change. `"dynamic"`: a weight that is exactly zero after an update is masked
            from then on.
        enforce: `"gradient"` masks gradients and zeroes weights after each update; `"constraint"` zeroes them through
            `variable.constraint`. The promise is the same.
        schedule: raise the sparsity along a schedule while training; a model without masks may be given then.
        update: move the weights by this rule instead of by gradients: a rule of `sparsekit.updates` or a function
            `(weight, mask, step, seed) -> new value`; forward pass and loss only, and no masks are needed. `include`,
            `exclude` and the other settings of `update_step` may be given with it.
        engine: `"sparse"` trains on the kept values alone, with sparse kernels for CPU: as fast as the zeros allow,
            the same numbers to rounding. `"auto"` does so for the weights where that was measured to be faster on this
            machine, and where the run is long enough to gain; where masks become sparser it chooses anew at the ends of
            epochs. `"dense"` never. `history.engine` says what was done. Meanwhile look at the model from callbacks
            only: data generators, losses and other threads would find vectors of kept values in place of kernels.
        optimizer: compile with this one; otherwise the model is trained as it was compiled.
        loss: compile with this loss.
        metrics: compile with these metrics.
        validation_data: as in fit.
        callbacks: as in fit.
        checkpoint_dir: keep the state of the run in this folder at each epoch's end; the same call after a kill goes on
            from there. On CPU with `tf.config.experimental.enable_op_determinism()` it ends with the same bits.
        checkpoint_every: also save after every so many batches.
        seed: seed of update rules, and of the order of array data in a run with checkpoints.
        fit_arguments: any other argument of fit (`batch_size`, `class_weight`, `verbose`, ...) or of compile
            (`steps_per_execution`, `jit_compile`, `loss_weights`, ...).

    Returns:
        The Keras History, with an `EngineReport` as its `engine`; with a `checkpoint_dir` its `resumed_from` is
        `(epochs, batches)` that were done before, or None.

    Raises:
        EngineError: if `engine="sparse"` cannot be.
        ArgumentError: if the model has no masks or is not compiled, or for arguments that do not go together.
        FileError: if the checkpoints cannot be used, or are those of another run (other weights, masks, arrays or
            settings, or more epochs done).
        ViolationError: if a pruned weight is not zero in the end.
        NonFiniteError: if a trainable weight is NaN or infinite, before training starts or in the end; the model then
            keeps what fit left.
    """
    flavour = flavour_of(model)
    _whole("epochs", epochs, 1)
    _whole("seed", seed, 0)
    inputs = _inputs(data, fit_arguments)
    if optimizer is not None and not isinstance(optimizer, (str, dict)):
        _check_same_keras(optimizer, flavour)
    compile_arguments = {"optimizer": optimizer, "loss": loss, "metrics": metrics}
    for name in flavour.COMPILE_ONLY:
        if name in fit_arguments:
            compile_arguments[name] = fit_arguments.pop(name)
    given = {name: value for name, value in compile_arguments.items() if value is not None}
    check_words(enforce, masks)
    check_engine(engine)
    if checkpoint_every is not None and checkpoint_dir is None:
        raise ArgumentError("checkpoint_every needs a checkpoint_dir to save in.")
    _check_compiled(flavour, model, given)
    check_finite(model, "before training", "start from a model whose weights are all numbers")
    forget_dense(model)
    fit_arguments |= {"epochs": epochs, "validation_data": validation_data, "callbacks": list(callbacks or ())}
    if update is not None:
        if schedule is not None or checkpoint_dir is not None:
            raise ArgumentError("update= goes with neither a schedule nor a checkpoint_dir; leave that out.")
        _compile(flavour, model, given)
        batch = tuple(inputs.get(name) for name in ("x", "y", "sample_weight"))
        history = fit_with_update(model, batch, update, masks=masks, seed=seed, **fit_arguments)
        check_finite(model, "after training", "take smaller steps, or look for NaN and infinity in the data")
        return history
    if schedule is not None:
        _ready_for(schedule, model, masks)
    check_masks(model)
    _compile(flavour, model, given)
    checkpoints = None
    if checkpoint_dir is not None:
        checkpoints = Checkpoints(checkpoint_dir, every_steps=checkpoint_every, seed=seed)
    _warn_of_crash(flavour, model)
    enforcement = enforcement_for(model, enforce, masks, schedule)
    history = fit(model, enforcement, checkpoints, engine, **inputs, **fit_arguments)
    check_finite(model, "after training", "lower the learning rate, or look for NaN and infinity in the data")
    return history


def _warn_of_crash(flavour: Flavour, model: Any) -> None:
    text = warning_of_crash(flavour.layers(model)) if onednn() else None
    if text is not None:
        warnings.warn(text, SparsekitWarning, stacklevel=3)


def _ready_for(schedule: Schedule, model: Any, masks: str) -> None:
    if not isinstance(schedule, Schedule):
        raise ArgumentError(f"schedule={schedule!r} is no Schedule; give for example Polynomial(0.9, end_step=1000).")
    if masks == "dynamic":
        raise ArgumentError("Give either masks='dynamic' or a schedule, not both: a schedule chooses the masks.")
    if not len(frozen_masks(model)):
        prune(model, 0.0)
    for mask in frozen_masks(model):
        mask.target = schedule.final_sparsity


def _check_compiled(flavour: Flavour, model: Any, given: dict[str, Any]) -> None:
    if not flavour.is_compiled(model) and "loss" not in given:
        raise ArgumentError(
            f"The model '{model.name}' is not compiled and came with no training settings; pass loss= (and "
            "optimizer=), for example loss='sparse_categorical_crossentropy', or call model.compile first."
        )


def _compile(flavour: Flavour, model: Any, given: dict[str, Any]) -> None:
    """Compile the model where arguments say so, and see to it that its optimizer knows its weights."""
    if not flavour.is_compiled(model):
        model.compile(**{"optimizer": "adam", **given})
        return
    changed, current = dict(given), model.optimizer
    kept = current is None or "optimizer" in given
    if not kept and not flavour.is_built_for(current, model.trainable_variables):
        # A Keras 3 optimizer that came out of an .h5 knows other variables and would refuse these.
        changed["optimizer"] = flavour.rebuilt(current)
    if changed:
        model.compile(**{**flavour.compile_arguments(model), **changed})


def _inputs(data: Any, fit_arguments: dict[str, Any]) -> dict[str, Any]:
    """The x, y and sample_weight of fit."""
    if isinstance(data, tuple) and not 1 <= len(data) <= 3:
        raise ArgumentError(
            f"data is a tuple of {len(data)}; give (x, y) or (x, y, sample_weight), and several inputs as a list."
        )
    parts = data if isinstance(data, tuple) else (data,)
    inputs: dict[str, Any] = dict(zip(("x", "y", "sample_weight"), parts, strict=False))
    for name in ("x", "y", "sample_weight"):
        given = fit_arguments.pop(name, None)
        if given is not None and inputs.get(name) is not None:
            raise ArgumentError(f"{name} is in data and given as {name}= too; give it once.")
        if given is not None:
            inputs[name] = given
    return inputs


def accelerate(model: Any, *, engine: str = "auto") -> Accelerated:
    """A faster forward pass of a pruned model for inference: its zeros are left out where that is measured to pay.

    Args:
        model: a built model with zeros in its weights; it is left alone.
        engine: `"auto"` times both forms of each weight on the first batch; `"sparse"` leaves out all zeros that it
            can.

    Returns:
        A callable for batches with a `predict(x, batch_size)`, for the weights of now: make a new one after further
        training. Its `report` says which weights were taken.

    Raises:
        EngineError: if `engine="sparse"` cannot be.
    """
    flavour_of(model)
    if engine not in ("auto", "sparse"):
        raise ArgumentError(f"engine={engine!r} is not known; give 'auto' or 'sparse'.")
    return Accelerated(model, engine)


def train_step(model: Any, *, masks: str = "static", enforce: str = "gradient") -> TrainStep:
    """One compiled training step for a loop of one's own, with the masks held inside.

    Args:
        model: a pruned and compiled model.
        masks: as in `retrain`.
        enforce: as in `retrain`.

    Returns:
        `step(x, y=None, sample_weight=None) -> logs`.

    Raises:
        ArgumentError: if the model has no masks or is not compiled.
    """
    flavour = flavour_of(model)
    check_words(enforce, masks)
    check_masks(model)
    _check_compiled(flavour, model, {})
    _compile(flavour, model, {})
    _warn_of_crash(flavour, model)
    return TrainStep(model, enforcement_for(model, enforce, masks))


def masked(optimizer: Any, model: Any, *, masks: str = "static") -> Any:
    """The same protection for a loop with one's own tape: each update of this optimizer holds the model's masks.

    The optimizer stays the object and class that it is; call its `apply_gradients` or `apply` as ever, also inside a
    tf.function. A later prune of the same weights is followed by functions traced before; masks on further weights by
    those traced after it. Functions of yours that were traced with the bare optimizer have to be made anew; a model
    that trains this one inside of itself (a GAN), to be compiled again.

    Args:
        optimizer: an optimizer of the model's Keras.
        model: a pruned model.
        masks: as in `retrain`.

    Returns:
        The same optimizer.

    Raises:
        ModelTypeError: if the optimizer belongs to the other Keras than the model.
        ArgumentError: if the model has no masks.
    """
    flavour = flavour_of(model)
    _check_same_keras(optimizer, flavour)
    check_words("gradient", masks)
    check_masks(model)
    # A fit before has traced the bare optimizer.
    flavour.forget_train_function(model)
    return masked_optimizer(optimizer, model, masks)


def _check_same_keras(optimizer: Any, flavour: Flavour) -> None:
    other = flavour_of_optimizer(optimizer)
    if other.name != flavour.name:
        raise ModelTypeError(
            f"The optimizer is of {other.name} and the model of {flavour.name}; "
            f"pass {flavour.name}.optimizers.{type(optimizer).__name__}()."
        )


def _fraction(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or math.isnan(value):
        raise ArgumentError(f"{name}={value!r} must be a number in [0, 1], for example 0.9.")
    fraction = float(value)
    if not 0.0 <= fraction <= 1.0:
        hint = f"; did you mean {fraction / 100:g}?" if 1.0 < fraction <= 100.0 else "."
        raise ArgumentError(f"{name}={value!r} must be a fraction in [0, 1]{hint}")
    return fraction


def _whole(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < least:
        raise ArgumentError(f"{name}={value!r} must be a whole number of at least {least}.")
