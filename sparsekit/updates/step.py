"""One compiled step that moves weights by a rule: a forward pass and a loss, no gradient, zeros untouched."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import tensorflow as tf

from ..errors import ArgumentError
from ..flavour import Flavour, flavour_of, native
from ..frozen import frozen_masks
from ..weights import Selector, prunable_weights, survey
from .objective import Batch, Objective
from .rules import Rule, as_rule
from .targets import Stream, Target, component, derived_seed, inside_replica, noise_op_usable

MASKS = ("static", "dynamic")


class Trial:
    """What a rule may do while one step is traced.

    Args:
        targets: the selected weights.
        step: int64 scalar, number of updates made before this one.
        seed: the user's seed.
        measure: runs a forward pass and returns `(loss, logs)`.
        lose: runs a forward pass and returns the loss alone.
        counters: variables that a pass on trial must not change.
        counts: whether `measure` counts in the logs; otherwise it is a pass on trial, too.
    """

    def __init__(
        self,
        targets: list[Target],
        step: tf.Tensor,
        seed: int,
        measure: Callable[[], tuple[tf.Tensor, dict[str, Any]]],
        lose: Callable[[], tf.Tensor],
        counters: list[Any],
        counts: bool = True,
    ) -> None:
        self.targets = targets
        self.step = step
        self.logs: dict[str, Any] = {}
        self._seed = seed
        self._measure = measure
        self._lose = lose
        self._counters = counters
        self._counts = counts

    def measure(self) -> tf.Tensor:
        """Forward pass at the weights as they are now: the loss, float32 scalar. It counts in the logs."""
        if not self._counts:
            return self.score()
        loss, self.logs = self._measure()
        return loss

    def score(self) -> tf.Tensor:
        """The same loss of a candidate: metrics, BatchNorm statistics and dropout seeds are put back after it."""
        before = [tf.identity(counter) for counter in self._counters]
        loss = self._lose()
        for counter, value in zip(self._counters, before, strict=True):
            component(native(counter)).assign(value)
        return loss

    def seed(self, index: Any) -> tf.Tensor:
        """A seed for `tf.random.stateless_*`, int64 of shape (2,): another one for each step and index."""
        return derived_seed(self._seed, self.step, index)

    def stream(self, draw: Any = 0) -> Stream:
        """Random numbers for `Target.add_noise`: others for each step and draw, the same whenever they are drawn."""
        return Stream.of(self._seed, self.step, draw)

    def over_replicas(self, losses: tf.Tensor) -> tf.Tensor:
        """Losses of the whole batch from those of each replica's share, so that every replica decides alike."""
        if tf.distribute.get_strategy().num_replicas_in_sync == 1:
            return losses
        # Keras scales each replica's loss by the number of replicas, so that the sum is the mean.
        return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, losses)


class UpdateStep:
    """One compiled step without gradients, for a loop of one's own: `step(x, y, sample_weight) -> logs`.

    Made by `update_step`. `step.count` is the number of updates so far; write it to go on where another run ended.
    """

    def __init__(
        self,
        model: Any,
        rule: Any,
        *,
        include: Selector | Iterable[Selector] | None = None,
        exclude: Selector | Iterable[Selector] | None = None,
        masks: str = "static",
        seed: int = 0,
        loss: Any = None,
        training: bool = False,
        fused: bool | None = None,
        counts: bool = True,
    ) -> None:
        if masks not in MASKS:
            raise ArgumentError(f"masks={masks!r} is not known; give one of {', '.join(MASKS)}.")
        if isinstance(seed, bool) or not isinstance(seed, int) or not -(2**63) <= seed < 2**63:
            raise ArgumentError(f"seed={seed!r} must be a whole number of 64 bits.")
        self.flavour: Flavour = flavour_of(model)
        self.model = model
        self.rule: Rule = as_rule(rule)
        self.objective = Objective(self.flavour, model, loss, training)
        self.targets = _targets(model, include, exclude, masks, fused if self.rule.adds_noise else False)
        if self.rule.compares_losses and not self.objective.has_loss:
            raise ArgumentError(
                f"{type(self.rule).__name__} compares losses and the model '{model.name}' has none; pass loss=, or "
                "compile the model with a loss (no optimizer is needed)."
            )
        strategy = getattr(native(self.targets[0].ref.variable), "distribute_strategy", None)
        self._strategy = strategy or tf.distribute.get_strategy()
        self._seed = seed
        self._counts = counts
        # The first pass shall already see zeros; after it, each update writes them.
        frozen_masks(model).apply()
        with self._strategy.scope():
            self._count = tf.Variable(
                0, dtype=tf.int64, trainable=False, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA
            )
        self._state = self.rule.prepare(self.targets, seed)
        self._measure = self._traced_once(self.objective.measure)
        self._lose = self._traced_once(self.objective.loss)
        self._compiled = None if self._eager else tf.function(self._everywhere, reduce_retracing=True, autograph=False)
        self._built = False

    @property
    def count(self) -> int:
        """Number of updates so far."""
        return int(self._count.numpy())

    @count.setter
    def count(self, value: int) -> None:
        self._count.assign(value)

    @property
    def _eager(self) -> bool:
        return bool(self.objective.compiled and self.model.run_eagerly)

    def _traced_once(self, function: Callable) -> Callable:
        """A forward pass that is traced once for all candidates; by XLA if that is how the model was compiled.

        The update stays outside of XLA: ops of the engine and host searches run there as anywhere. On several
        replicas the pass is traced in place, since a function knows the variables of one replica only.
        """
        if self._eager or self._strategy.num_replicas_in_sync > 1:
            return function
        jit = bool(self.objective.compiled and self.model.jit_compile)
        return tf.function(function, reduce_retracing=True, jit_compile=jit or None, autograph=False)

    def train_step(self, data: Any) -> dict[str, Any]:
        """One step on one replica's share of a batch, as Keras' `train_step`."""
        batch = _unpack(data)
        count = component(self._count)
        for target in self.targets:
            target.begin()
        trial = Trial(
            self.targets,
            count.read_value(),
            self._seed,
            lambda: self._measure(batch),
            lambda: self._lose(batch),
            self.objective.counters(),
            self._counts,
        )
        self.rule.apply(trial, self._state)
        count.assign_add(1)
        return trial.logs

    def _everywhere(self, data: Batch) -> Any:
        return self._strategy.run(self.train_step, args=(data,))

    def __call__(self, x: Any = None, y: Any = None, sample_weight: Any = None) -> dict[str, Any]:
        """Move the weights by one batch; without data a rule that compares no losses just moves them.

        Returns:
            The model's logs as scalar tensors: the loss and metrics since the last `model.reset_metrics()`.

        Raises:
            ArgumentError: if another thread is updating the same model.
        """
        batch = tuple(_tensors(part) for part in (x, y, sample_weight))
        if tf.inside_function() or inside_replica():
            return self.train_step(batch)
        with alone(self.model):
            if not self._built:
                with idle_optimizer(self.model):
                    self.objective.build(batch)
                self._built = True
            return self._everywhere(batch) if self._compiled is None else self._compiled(batch)


def update_step(
    model: Any,
    rule: Any,
    *,
    include: Selector | Iterable[Selector] | None = None,
    exclude: Selector | Iterable[Selector] | None = None,
    masks: str = "static",
    seed: int = 0,
    loss: Any = None,
    training: bool = False,
    fused: bool | None = None,
) -> UpdateStep:
    """One compiled step that moves weights by a rule without gradients, for a loop of one's own.

    Args:
        model: a built model; compiled with a loss, or see `loss`. No optimizer is needed, and one that is there is
            not touched.
        rule: an `updates.Rule`, the name of a built-in one, or a function `(weight, mask, step, seed) -> new value`.
        include: move only weights that match: a glob over paths, a layer class, or a function `WeightRef -> bool`.
            Biases come along if a glob names them (`"*/bias"`).
        exclude: the same forms; leave these weights alone.
        masks: `"static"`: positions that are masked stay zero. `"dynamic"`: so does every weight that is zero when a
            step begins.
        seed: same seed, same random numbers, on every run and replica.
        loss: loss for a model that is not compiled.
        training: run layers as in training. By default dropout is off and BatchNorm statistics and random seeds do
            not change, so that losses can be compared.
        fused: add noise with the engine's op: None where it is built or worth building, False never (TensorFlow's own
            ops give the same numbers, normal ones to rounding), True always.

    Returns:
        `step(x, y=None, sample_weight=None) -> logs`.

    Raises:
        ArgumentError: for an unknown rule or selector, or a rule that needs a loss where there is none.
        NothingToPruneError: if no weight is selected.
    """
    return UpdateStep(
        model,
        rule,
        include=include,
        exclude=exclude,
        masks=masks,
        seed=seed,
        loss=loss,
        training=training,
        fused=fused,
    )


def fit_with_update(
    model: Any,
    data: Any,
    rule: Any,
    *,
    epochs: int = 1,
    masks: str = "static",
    include: Selector | Iterable[Selector] | None = None,
    exclude: Selector | Iterable[Selector] | None = None,
    seed: int = 0,
    training: bool = False,
    fused: bool | None = None,
    **fit: Any,
) -> Any:
    """The model's own fit, with a rule in place of backpropagation.

    Args:
        model: a model compiled with a loss; its optimizer, if it has one, is not touched.
        data: what fit takes; a tuple is taken apart as `(x, y, sample_weight)`.
        rule: as in `update_step`, like `include`, `exclude`, `masks`, `seed`, `training` and `fused`.
        epochs: number of epochs.
        fit: any other argument of fit.

    Returns:
        The Keras History.

    Raises:
        ArgumentError: if the model is not compiled, and as in `update_step`.
    """
    if not flavour_of(model).is_compiled(model):
        raise ArgumentError(
            f"The model '{model.name}' is not compiled; call model.compile(loss=...) first (no optimizer is needed)."
        )
    step = update_step(
        model, rule, include=include, exclude=exclude, masks=masks, seed=seed, training=training, fused=fused
    )
    arguments = dict(zip(("x", "y", "sample_weight"), data, strict=False)) if isinstance(data, tuple) else {"x": data}
    with fitting(model, step):
        history = model.fit(**arguments, epochs=epochs, **fit)
    # A callback may have put back weights from before the prune.
    frozen_masks(model).apply()
    return history


@contextlib.contextmanager
def fitting(model: Any, step: UpdateStep) -> Iterator[None]:
    """Have `model.fit` run a step of ours; afterwards the model and its optimizer are as before."""
    attributes = vars(model)
    own = attributes.get("train_step")
    jit = model.jit_compile
    with alone(model), idle_optimizer(model):
        # The step runs its forward pass through XLA itself if the model asks for it.
        model.jit_compile = False
        step.flavour.forget_train_function(model)
        # Past Keras' __setattr__, which looks for things to track.
        attributes["train_step"] = step.train_step
        try:
            yield
        finally:
            if own is None:
                del attributes["train_step"]
            else:
                attributes["train_step"] = own
            model.jit_compile = jit
            step.flavour.forget_train_function(model)
            if jit:
                model.test_function = None


@contextlib.contextmanager
def idle_optimizer(model: Any) -> Iterator[None]:
    """Keep fit from building the optimizer's slots and from writing its weight average over the model."""
    optimizer = getattr(model, "optimizer", None)
    attributes = {} if optimizer is None else vars(optimizer)
    shadowed = {name: attributes[name] for name in _OPTIMIZER_HOOKS if name in attributes}
    attributes.update(dict.fromkeys(_OPTIMIZER_HOOKS, _nothing))
    try:
        yield
    finally:
        for name in _OPTIMIZER_HOOKS:
            del attributes[name]
        attributes.update(shadowed)


_OPTIMIZER_HOOKS = ("build", "finalize_variable_values")


def _nothing(*_: Any, **__: Any) -> None:
    """Stands in for a hook that must not run."""


_LOCKS: weakref.WeakKeyDictionary[Any, threading.RLock] = weakref.WeakKeyDictionary()  # type: ignore[type-arg]
_LOCKS_LOCK = threading.Lock()


@contextlib.contextmanager
def alone(model: Any) -> Iterator[None]:
    """Refuse a second thread: candidates are made in the weights themselves, so two searches would mix."""
    with _LOCKS_LOCK:
        lock = _LOCKS.setdefault(model, threading.RLock())
    if not lock.acquire(blocking=False):
        raise ArgumentError(
            f"The model '{model.name}' is being updated by another thread; wait for it, or give each thread a model."
        )
    try:
        yield
    finally:
        lock.release()


def _targets(
    model: Any,
    include: Selector | Iterable[Selector] | None,
    exclude: Selector | Iterable[Selector] | None,
    masks: str,
    fused: bool | None,
) -> list[Target]:
    chosen, _ = survey(model, include, exclude)
    frozen = frozen_masks(model)
    # Zero biases are a normal start, not a decision: only kernels have dynamic masks.
    kernels = {ref.key for ref in prunable_weights(model)} if masks == "dynamic" else set()
    if fused is None:
        fused = noise_op_usable(chosen)
    found = []
    for index, ref in enumerate(chosen):
        mask = frozen.get(ref.variable)
        keep = None if mask is None else mask.keep
        found.append(Target(ref, index, keep, masks == "dynamic" and (ref.key in kernels or mask is not None), fused))
    return found


def _unpack(data: Any) -> Batch:
    if isinstance(data, (tuple, list)):
        return (*data, None, None)[:3]  # type: ignore[return-value]
    return data, None, None


def _tensors(part: Any) -> Any:
    """Arrays become tensors, so that a new batch of the same shape does not trace the step again."""
    return None if part is None else tf.nest.map_structure(tf.convert_to_tensor, part)
