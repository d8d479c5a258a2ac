"""Decide which kernels of a model train on their kept values alone: those where that was measured to be faster."""

from __future__ import annotations

import contextlib
import logging
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import record

from sparsekit.engine import build, timings
from sparsekit.engine.batches import batch_spec, most_elements, steps_of
from sparsekit.engine.layers import Product, dense_product
from sparsekit.engine.sites import Site, find_sites, layer_calls, optimizer_obstacle, sparse_calls, swapped_calls
from sparsekit.engine.swap import Hold, Swap
from sparsekit.engine.timings import Use
from sparsekit.engine.watching import surrounded
from sparsekit.errors import ArgumentError, EngineError
from sparsekit.flavour import Flavour, native
from sparsekit.frozen import FrozenMasks
from sparsekit.weights import read

ENGINES = ("auto", "dense", "sparse")

# Swap where the sparse form takes at most this share of the dense form's time.
_WINS = 0.9
# Denser kernels than this never won in any measurement.
_MOST_DENSE = 0.6
# What is spent before the first step has to come back this many times over.
_WORTH = 2.0
_BUILD_S, _TRACE_S, _TIMING_S, _GAIN_S = 40.0, 1.0, 1.0, 4.0
# Slower than any CPU that TensorFlow runs on in earnest, so that it never underestimates what a run takes.
_SLOW_MULTIPLICATIONS_PER_S = 5e9
# Time of the sparse form before it is measured, as a multiple of density times the dense time.
_SPARSE_FACTOR = 3.5

# While masks change, the choice is made anew once the kept weights are at most this share of those at the last one.
_SPARSER = 0.8

_logger = logging.getLogger("sparsekit")
_said: set[str] = set()


@dataclass(frozen=True)
class SwappedWeight:
    """A weight that trained on its kept values.

    Args:
        path: the weight's path.
        sparsity: fraction of it that was zero when it was swapped.
        dense_s: seconds a step for its product and gradients in the dense form; None if not measured, which
            `engine="sparse"` does only in a run that is long enough.
        sparse_s: the same in the sparse form.
    """

    path: str
    sparsity: float
    dense_s: float | None = None
    sparse_s: float | None = None


@dataclass(frozen=True)
class EngineReport:
    """How a run was computed.

    Args:
        engine: `"sparse"` if at least one weight trained on its kept values, else `"dense"`.
        swapped: those weights.
        gain: time of the whole model's forward and backward pass in the dense form, divided by that with these
            weights swapped, as measured before the run; None if not measured.
        reason: one line that says why the run, or a part of the weights, was dense; None if there is nothing to say.
        advice: one line that says what would make this run faster; None if there is nothing to say.
        from_epoch: with masks that change, how many epochs were done before these weights were swapped.
    """

    engine: str
    swapped: tuple[SwappedWeight, ...] = ()
    gain: float | None = None
    reason: str | None = None
    advice: str | None = None
    from_epoch: int = 0


def check_engine(engine: str) -> None:
    """Raise ArgumentError for a word that is not known."""
    if engine not in ENGINES:
        raise ArgumentError(f"engine={engine!r} is not known; give one of {', '.join(ENGINES)}.")


class EnginePlan:
    """How a run will be computed.

    Args:
        flavour: the model's Keras.
        model: a compiled model with masks.
        frozen: the masks.
        optimizers: those that train the model.
        engine: `"auto"`, `"dense"` or `"sparse"`.
        arguments: what fit will get.
        obstacle: why the run must be dense, if the caller knows of a reason.

    Raises:
        EngineError: if `"sparse"` was asked for and is not possible.
    """

    def __init__(
        self,
        flavour: Flavour,
        model: Any,
        frozen: FrozenMasks,
        optimizers: list[Any],
        engine: str,
        arguments: Mapping[str, Any],
        obstacle: str | None = None,
    ) -> None:
        self._flavour, self._model, self._frozen, self._optimizers = flavour, model, frozen, optimizers
        self._forced = engine == "sparse"
        self._auto = engine == "auto" and obstacle is None
        self._running: Swap | None = None
        self._dense = contextlib.ExitStack()
        self._density = 1.0 - self.sparsity()
        self._sites, self.report = decide(flavour, model, frozen, optimizers, engine, arguments, obstacle)

    @contextlib.contextmanager
    def running(self, hold: Hold, arguments: Mapping[str, Any], changing: bool = False) -> Iterator[None]:
        """A context for the call of fit; the model is as before afterwards, with the trained values in its kernels.

        Args:
            hold: as in Swap.
            arguments: what fit gets.
            changing: whether the masks change during the run.
        """
        self._hold, self._arguments, self._changing = hold, arguments, changing
        try:
            self._start()
            yield
        finally:
            self._stop()

    def _start(self) -> None:
        self._running = self._swap(self._hold, self._arguments, self._changing) if self._sites else None
        if self._running is None:
            self._dense.enter_context(self._hold(self._frozen, self._optimizers, None))
        say(self.report)

    def _stop(self) -> None:
        if self._running is not None:
            self._running.close()
        self._dense.close()

    def callbacks(self, given: list[Any]) -> list[Any]:
        """What fit needs as callbacks in `running`, so that those given find the model as it should be."""
        switches = self._auto and self._changing
        if self._running is None and not switches:
            return given
        base = self._flavour.keras.callbacks.Callback
        return surrounded(base, given, lambda: self._running, self._choose_again if switches else None)

    def _choose_again(self, epoch: int) -> bool:
        """Once the masks are sparser, swap what is faster now for the epochs that are left; whether that was done."""
        left = {**self._arguments, "initial_epoch": epoch + 1}
        density = 1.0 - self.sparsity()
        if steps_of(left) == 0 or self._model.stop_training or density > _SPARSER * self._density:
            return False
        self._density = density
        if self._running is not None:
            self._running.leave()
        sites, report = decide(self._flavour, self._model, self._frozen, self._optimizers, "auto", left)
        if not {site.path for site in sites} > {site.path for site in self._sites}:
            return False
        self._stop()
        self._sites, self.report = sites, replace(report, from_epoch=epoch + 1)
        self._start()
        return self._running is not None

    def sparsity(self) -> float:
        """Fraction of all masked weights that are zero now."""
        masks = self._frozen if self._running is None else self._running.masks
        size = sum(mask.size or math.prod(mask.keep.shape) for mask in masks)
        kept = sum(int(np.count_nonzero(read(mask.keep))) for mask in masks)
        return (size - kept) / size if size else 0.0

    def looking(self) -> contextlib.AbstractContextManager[None]:
        """Within `running`, a context in which the model is as without the engine."""
        return contextlib.nullcontext() if self._running is None else self._running.looking()

    def _swap(self, hold: Hold, arguments: Mapping[str, Any], changing: bool) -> Swap | None:
        flavour, model = self._flavour, self._model
        swap = None
        try:
            swap = Swap(flavour, model, self._frozen, self._sites, hold, changing)
            whole = flavour.has_own_code(model)
            if whole or flavour.has_own_layers(model):
                batch = batch_spec(model, arguments)
                if batch is not None:
                    swap.verify(batch, whole)
                elif whole:
                    raise EngineError("the model has code of its own, which cannot be tried out on a batch beforehand")
        except BaseException as error:
            if swap is not None:
                swap.close()
            if not isinstance(error, EngineError):
                raise
            if self._forced:
                raise EngineError(f"engine='sparse' is not possible: {error}; use engine='auto'.") from error
            self.report = _dense(str(error))
            return None
        return swap


def decide(
    flavour: Flavour,
    model: Any,
    frozen: FrozenMasks,
    optimizers: list[Any],
    engine: str,
    arguments: Mapping[str, Any],
    obstacle: str | None = None,
) -> tuple[list[Site], EngineReport]:
    """Choose the kernels to stand in for.

    Args:
        flavour: the model's Keras.
        model: a compiled model with masks.
        frozen: the masks.
        optimizers: those that train the model.
        engine: `"auto"`, `"dense"` or `"sparse"`.
        arguments: what fit will get.
        obstacle: why the run must be dense, if the caller knows of a reason.

    Returns:
        `(kernels, how the run is computed)`.

    Raises:
        EngineError: if `"sparse"` was asked for and is not possible.
    """
    if engine == "dense":
        return [], EngineReport("dense", reason="engine='dense' was asked for")
    obstacle = obstacle or _obstacle(flavour, model, optimizers)
    sites, reasons = find_sites(flavour, model, frozen) if obstacle is None else ([], {})
    if obstacle is None and not sites:
        obstacle = "; ".join(f"{path}: {reason}" for path, reason in list(reasons.items())[:3]) or "it has no masks"
    if engine == "sparse":
        if obstacle is not None:
            raise EngineError(f"engine='sparse' is not possible: {obstacle}; use engine='auto'.")
        return _forced(flavour, model, sites, reasons, arguments)
    if obstacle is not None:
        return [], _dense(obstacle)
    return _measured(flavour, model, sites, reasons, arguments)


def _obstacle(flavour: Flavour, model: Any, optimizers: list[Any]) -> str | None:
    if model.run_eagerly:
        return "the model runs eagerly"
    if flavour.uses_xla(model):
        return "XLA has no kernel for the engine's ops"
    # Even one of one replica has variables of its own kind.
    if model.distribute_strategy is not tf.distribute.get_strategy() or tf.distribute.has_strategy():
        return "it trains under a distribution strategy"
    if tf.config.list_logical_devices("GPU"):
        return "it trains on a GPU, and the engine is for CPUs"
    return optimizer_obstacle(flavour, model, optimizers)


def _dense(reason: str) -> EngineReport:
    return EngineReport("dense", reason=reason, advice=_advice())


def _advice() -> str | None:
    if timings.onednn() or "TF_ENABLE_ONEDNN_OPTS" in os.environ:
        return None
    return "set TF_ENABLE_ONEDNN_OPTS=1 before TensorFlow is imported: its dense products may be faster then"


def say(report: EngineReport) -> None:
    """Tell each thing once a process, to those who listen to the logger `sparsekit`."""
    for line in (report.reason, report.advice):
        if line is not None and line not in _said:
            _said.add(line)
            _logger.info("%s engine: %s", report.engine, line)


def _forced(
    flavour: Flavour, model: Any, sites: list[Site], reasons: dict[str, str], arguments: Mapping[str, Any]
) -> tuple[list[Site], EngineReport]:
    build.library()
    batch = batch_spec(model, arguments)
    if batch is not None:
        try:
            uses, found = probe(flavour, model, sites, batch[0])
        except EngineError as error:
            raise EngineError(f"engine='sparse' is not possible: {error}; use engine='auto'.") from error
        reasons |= found
        sites = _probed(sites, uses)
    if not sites:
        told = "; ".join(f"{path}: {reason}" for path, reason in reasons.items())
        raise EngineError(f"engine='sparse' is not possible: {told}; use engine='auto'.")
    times, gain = {}, None
    if batch is not None:
        steps = steps_of(arguments) or 0
        used = {site.path: uses[site.path] for site in sites}
        if _pays(steps, used, _TIMING_S * len(_fresh(sites, used))):
            times = {site.path: seconds(site, used[site.path]) for site in sites}
            saved = steps * sum(dense - sparse for dense, sparse in times.values())
            gain = whole_gain(flavour, model, sites, batch[0]) if saved > _WORTH * _GAIN_S else None
    swapped = tuple(SwappedWeight(site.path, 1.0 - site.density, *times.get(site.path, ())) for site in sites)
    return sites, EngineReport("sparse", swapped, gain, _line(reasons))


def _pays(steps: int, uses: Mapping[str, list[Use]], spent: float) -> bool:
    """Whether a run is long enough to spend so many seconds before its first step."""
    expected = steps * sum(use.multiplications for one in uses.values() for use in one)
    return expected / _SLOW_MULTIPLICATIONS_PER_S >= _WORTH * spent


def _fresh(sites: list[Site], uses: Mapping[str, list[Use]]) -> set[Use]:
    """What has not been timed yet."""
    return {use for site in sites for use in uses[site.path] if not timings.known(use, site.keep())}


def seconds(site: Site, uses: list[Use]) -> tuple[float, float]:
    """Seconds a step of the dense and of the sparse form."""
    times = [(use.times, *timings.both_seconds(use, site.keep())) for use in uses]
    return sum(n * dense for n, dense, _ in times), sum(n * sparse for n, _, sparse in times)


def _probed(sites: list[Site], uses: Mapping[str, list[Use]]) -> list[Site]:
    """The kernels with a known use, those of first layers marked."""
    found = [site for site in sites if site.path in uses]
    return [replace(site, input_gradient=any(use.input_gradient for use in uses[site.path])) for site in found]


def _line(reasons: Mapping[str, str]) -> str | None:
    return "; ".join(f"{path} stays dense: {reason}" for path, reason in reasons.items()) or None


def _measured(
    flavour: Flavour, model: Any, sites: list[Site], reasons: dict[str, str], arguments: Mapping[str, Any]
) -> tuple[list[Site], EngineReport]:
    steps = steps_of(arguments)
    if steps is None:
        return [], _dense("nobody knows how many steps the data has; give steps_per_epoch")
    sites = [site for site in sites if site.density <= _MOST_DENSE]
    if not sites:
        return [], _dense(f"no weight is sparse enough ({1 - _MOST_DENSE:.0%} zeros or more)")
    too_short = f"{steps} steps of this size are too few to be worth the measuring"
    # A bound that looks at no data, since whoever trains a small model should not have to wait for it.
    elements = most_elements(model, arguments)
    if elements is not None:
        most = 3 * elements * sum(math.prod(site.kernel.shape) for site in sites)
        if steps * most / _SLOW_MULTIPLICATIONS_PER_S < _WORTH * _TRACE_S:
            return [], _dense(too_short)
    batch = batch_spec(model, arguments)
    if batch is None:
        return [], _dense("the shape of the batches cannot be seen beforehand; give a tf.data.Dataset or arrays")
    built = build.cached()
    if not built and (problem := build.reason()) is not None:
        return [], _dense(problem)

    try:
        uses, found = probe(flavour, model, sites, batch[0])
    except EngineError as error:
        return [], _dense(str(error))
    reasons |= found
    sites = _probed(sites, uses)
    if not sites:
        return [], _dense(_line(reasons) or "no weight can be computed from its kept values")
    everything = {site.path: uses[site.path] for site in sites}
    if not _pays(steps, everything, _TRACE_S):
        return [], _dense(too_short)
    if not built:
        saved = steps * sum(_expected_saving(site, everything[site.path]) for site in sites)
        if saved < _WORTH * _BUILD_S:
            return [], _dense(
                f"the run is too short to pay for building the engine (it would save about {saved:.0f} s); "
                "run `sparsekit engine --build` once"
            )
        if not build.available():
            return [], _dense(build.reason() or "the engine cannot be built")
    if not _pays(steps, everything, _TRACE_S + _TIMING_S * len(_fresh(sites, everything))):
        return [], _dense(too_short)

    chosen, swapped, saved = [], [], 0.0
    for site in sites:
        dense, sparse = seconds(site, everything[site.path])
        if sparse <= _WINS * dense:
            chosen.append(site)
            swapped.append(SwappedWeight(site.path, 1.0 - site.density, dense, sparse))
            saved += steps * (dense - sparse)
        else:
            reasons[site.path] = f"sparse takes {sparse * 1e3:.2f} ms and dense {dense * 1e3:.2f} ms"
    if not chosen:
        return [], _dense(_line(reasons) or "no weight is faster in the sparse form")
    if saved < _WORTH * _TRACE_S:
        return [], _dense(f"{steps} steps would save {saved:.1f} s, less than the swap takes")
    gain = whole_gain(flavour, model, chosen, batch[0]) if saved > _WORTH * _GAIN_S else None
    return chosen, EngineReport("sparse", tuple(swapped), gain, _line(reasons), _advice())


def _expected_saving(site: Site, uses: list[Use]) -> float:
    """Seconds a step that the sparse form should save, before it can be measured."""
    share = min(1.0, _SPARSE_FACTOR * site.density)
    return sum(use.times * timings.dense_seconds(use) * (1.0 - share) for use in uses)


def probe(
    flavour: Flavour, model: Any, sites: list[Site], x: Any, training: bool = True
) -> tuple[dict[str, list[Use]], dict[str, str]]:
    """Trace a model once to see what it does with each kernel; nothing is computed.

    Args:
        flavour: the model's Keras.
        model: a built model.
        sites: kernels to look at.
        x: spec of its inputs.
        training: whether a training step is meant, or the forward pass alone.

    Returns:
        `(path -> uses in a step, path -> why a kernel cannot be stood in for)`.

    Raises:
        EngineError: if the model cannot be traced for such inputs.
    """
    uses: dict[str, list[Use]] = {}
    reasons: dict[str, str] = {}
    loops = max((int(spec.shape[1] or 1) for spec in tf.nest.flatten(x) if len(spec.shape) > 2), default=1)

    # A step that a user wrote may ask for gradients of the model's inputs.
    own_step = flavour.has_own_train_step(model)

    def recorder(site: Site) -> Product:
        operation = site.operation

        def product(x: Any, bias: Any = None, activation: str | None = None) -> Any:
            if isinstance(x, tf.SparseTensor):
                reasons[site.path] = "its input is no plain tensor"
                return dense_product(operation, tf.zeros(operation.shape))(tf.sparse.to_dense(x), bias, activation)
            if not isinstance(x, tf.RaggedTensor):
                x = tf.convert_to_tensor(x)
            if not isinstance(x, tf.Tensor) or x.shape.rank is None:
                reasons[site.path] = "its input is no plain tensor"
            else:
                reason = operation.why_not(tuple(x.shape))
                if reason is None and None in tuple(x.shape)[1:]:
                    reason = "the shape of its input is not known"
                if reason is not None:
                    reasons[site.path] = reason
                else:
                    looped = tf.compat.v1.get_default_graph() is not outer[0]
                    # Within a loop or a function of its own, the tape does not show what it will ask for.
                    gradient = looped or own_step or record.should_record_backprop([x])
                    shape = (int(x.shape[0] or batch), *(int(n) for n in tuple(x.shape)[1:]))
                    relu, times = activation == "relu", loops if looped else 1
                    use = Use(operation, shape, relu, training and gradient, times, backward=training)
                    uses.setdefault(site.path, []).append(use)
            return dense_product(operation, tf.zeros(operation.shape))(x, bias, activation)

        return product

    batch = max((int(spec.shape[0] or 1) for spec in tf.nest.flatten(x) if len(spec.shape)), default=1)
    outer: list[Any] = []
    products = {(id(site.layer), site.role): recorder(site) for site in sites}
    calls = layer_calls(flavour, sites, products)

    def forward(x: Any) -> Any:
        outer[:] = [tf.compat.v1.get_default_graph()]
        with tf.GradientTape() as tape:
            tape.watch([native(variable) for variable in model.trainable_variables])
            return model(x, training=training)

    with swapped_calls(flavour, model, calls), flavour.unmoved_randomness():
        try:
            captured = tf.function(forward, autograph=False).get_concrete_function(x).captured_inputs
        except Exception as error:
            line = str(error).strip().partition("\n")[0][:200]
            raise EngineError(f"the model cannot be tried out beforehand ({type(error).__name__}: {line})") from error
    handles = {id(tensor) for tensor in captured}
    for site in sites:
        if id(native(site.kernel).handle) in handles:
            reasons[site.path] = "the model reads it outside of its layer"
        elif site.path not in uses:
            reasons.setdefault(site.path, "the model does not call its layer")
    return {path: found for path, found in uses.items() if path not in reasons}, reasons


def whole_gain(flavour: Flavour, model: Any, sites: list[Site], x: Any) -> float | None:
    """How much faster the whole model's forward and backward pass is with these kernels swapped.

    None where there are inputs that no array of ones can stand for.

    Args:
        flavour: the model's Keras.
        model: a built model.
        sites: kernels to swap.
        x: spec of its inputs.
    """
    leaves = tf.nest.flatten(x)
    if not all(isinstance(leaf, tf.TensorSpec) and leaf.shape.is_fully_defined() for leaf in leaves):
        return None
    inputs = tf.nest.map_structure(lambda spec: tf.ones(spec.shape, spec.dtype), x)
    parts = []
    for site in sites:
        kernel, keep = native(site.kernel), site.keep()
        values = tf.Variable(tf.boolean_mask(kernel, keep))
        parts.append((site, values, site.operation.structure(keep)))
    kernels = {id(site.kernel) for site in sites}
    others = [variable for variable in model.trainable_variables if id(variable) not in kernels]

    def runner(targets: list[Any]) -> Any:
        def run(x: Any) -> Any:
            with tf.GradientTape() as tape:
                # Not in training mode, which would move statistics and counters.
                y = [tf.reduce_sum(tf.cast(part, tf.float32)) for part in tf.nest.flatten(model(x, training=False))]
                loss = tf.add_n(y)
            found = tape.gradient(loss, targets, unconnected_gradients=tf.UnconnectedGradients.ZERO)
            return [tf.convert_to_tensor(gradient) for gradient in found]

        function = tf.function(run, autograph=False)
        function.get_concrete_function(x)
        return lambda: function(inputs)

    with flavour.unmoved_randomness():
        dense = runner([native(variable) for variable in model.trainable_variables])
        with swapped_calls(flavour, model, sparse_calls(flavour, parts)):
            sparse = runner([*map(native, others), *(values for _, values, _ in parts)])
    dense_s, sparse_s = timings.median_seconds([dense, sparse])
    return dense_s / sparse_s
