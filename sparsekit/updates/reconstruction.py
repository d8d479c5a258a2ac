"""Restore the outputs of pruned layers from a few unlabelled samples, without training."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from ..errors import ArgumentError
from ..flavour import Flavour, flavour_of, key_of, native
from ..frozen import FrozenMask, frozen_masks
from ..weights import Selector, all_weights, read, survey
from .capture import Tap, Values, input_batches
from .least_squares import obs_rows, solve_with_held_out
from .linear import LinearLayer, linear_layer
from .mask_swaps import swap_masks
from .step import alone

METHODS = ("least_squares", "obs", "dsnot")
_WIDEST = 8192  # inputs of a kernel: the normal equations take the square of that
_STEPS = (1.0, 0.5, 0.25)  # parts of a change that are tried until one lowers the error after the activation
_REMEMBERED_BYTES = 256 * 2**20
_DENSE: weakref.WeakKeyDictionary[Any, dict[str, np.ndarray]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class LayerResult:
    """What became of one layer.

    Args:
        path: path of its kernel, or of a BatchNormalization's moving mean.
        status: "changed", "kept" (no change lowered the error) or "skipped".
        error_before: squared distance of its output from the dense model's over the calibration data, relative to the
            dense output's size, before; None if it was not measured.
        error_after: the same afterwards; never larger than before.
        reason: why it was kept or skipped.
    """

    path: str
    status: str
    error_before: float | None = None
    error_after: float | None = None
    reason: str = ""


@dataclass(frozen=True)
class Reconstruction:
    """What `reconstruct` did, a row for each layer in the order in which they run."""

    rows: tuple[LayerResult, ...]

    @property
    def changed(self) -> tuple[str, ...]:
        """Paths of the layers that were changed."""
        return tuple(row.path for row in self.rows if row.status == "changed")

    def __str__(self) -> str:
        width = max([len(row.path) for row in self.rows] + [4])
        lines = [f"{'path':<{width}}  status   error before     after"]
        for row in self.rows:
            errors = "" if row.error_before is None else f"{row.error_before:12.3e} {row.error_after:9.3e}"
            lines.append(f"{row.path:<{width}}  {row.status:<8} {errors or ' ' * 22}  {row.reason}".rstrip())
        return "\n".join(lines)


def remember_dense(model: Any) -> None:
    """Keep a copy of a model's weights as what `reconstruct` restores, until `forget_dense` or the model's end.

    A model of more than 256 MiB is not copied: pruning must not take that memory from somebody who never asked.

    An earlier copy stays if the model differs from it by zeros only: pruned in steps, it still has the same dense
    model to come back to.
    """
    refs = [ref for ref in all_weights(model) if tf.as_dtype(ref.variable.dtype).is_floating]
    if sum(ref.size * tf.as_dtype(ref.variable.dtype).size for ref in refs) > _REMEMBERED_BYTES:
        forget_dense(model)
        return
    earlier = _DENSE.get(model, {})
    if not all(ref.path in earlier and _differs_by_zeros(ref.numpy(), earlier[ref.path]) for ref in refs):
        _DENSE[model] = {ref.path: np.array(ref.numpy()) for ref in refs}


def _differs_by_zeros(now: np.ndarray, before: np.ndarray) -> bool:
    return now.shape == before.shape and bool(np.all((now == before) | (now == 0)))


def forget_dense(model: Any) -> None:
    """Let go of the copy: after training the old outputs are no longer what the model should give."""
    _DENSE.pop(model, None)


def reconstruct(
    model: Any,
    data: Any,
    *,
    reference: Any = None,
    include: Selector | Iterable[Selector] | None = None,
    exclude: Selector | Iterable[Selector] | None = None,
    method: str = "least_squares",
    samples: int = 512,
    batch_size: int = 64,
    bias: bool = True,
    batch_norm: bool = True,
    seed: int = 0,
    max_cycles: int = 50,
) -> Reconstruction:
    """Change the kept weights of a pruned model so that each layer's output is again what the dense model's was.

    Layer by layer in running order, by least squares on the kept positions, from the inputs that the layer gets in the
    pruned model to the outputs that it gave in the dense one. No labels, no gradients, no training; zeros stay zero.
    Half of the samples decides how far the other half may be trusted (ridge). Where a change would raise a layer's
    output error it is shortened or left out. The second-order ancestor of this is Hassibi, Stork (1992), "Second Order
    Derivatives for Network Pruning: Optimal Brain Surgeon"; layer-wise from calibration data: He, Zhang, Sun (2017),
    "Channel Pruning for Accelerating Very Deep Neural Networks", and Frantar, Alistarh (2022), "Optimal Brain
    Compression". Biases are corrected in the same solution. The moving statistics
    of BatchNormalization are estimated again (Li, Wu, Su, Wang (2020), "EagleEye: Fast Sub-net Evaluation for Efficient
    Neural Network Pruning"), here as those under which the output is nearest to the dense one.

    Args:
        model: a pruned model with Dense, Conv1D, Conv2D or EinsumDense layers; others are left as they are.
        data: unlabelled samples as fit takes them: arrays, `(x, y)` (y is not used), a tf.data.Dataset, a generator.
        reference: the dense model, its `get_weights()`, or a mapping of weight paths to arrays. None takes the weights
            that the model had before `prune`, which are remembered for models of up to 256 MiB.
        include: change only kernels that match: path globs, layer classes, or functions of a `WeightRef`.
        exclude: the same forms; leave these alone.
        method: `"least_squares"`: the best kept weights for these samples, `"obs"`: the row by row update of SparseGPT,
            which starts from the dense weights and looks at the layer's own inputs only, `"dsnot"`: no new values but
            other masks. DSnoT swaps dropped for kept positions (Zhang et al. (2024), "Dynamic Sparse No Training"),
            as many in each output unit as before, and kept weights get their dense values. Swaps stay for the units
            whose squared error they lower. It is for frozen masks without a structure, and biases stay as they are.
        samples: number of samples to take from `data`.
        batch_size: samples at a time; memory grows with it.
        bias: correct trainable biases, too.
        batch_norm: re-estimate the moving statistics of BatchNormalization.
        seed: of the choice of places where an image has more of them than are needed.
        max_cycles: at most so many swaps for each output unit, with `"dsnot"`.

    Returns:
        A `Reconstruction`: a row for each layer with its output error before and after.

    Raises:
        ArgumentError: if the dense weights are not known, the data or reference do not fit, or no mask can be swapped.
    """
    for name, number in (("samples", samples), ("batch_size", batch_size), ("max_cycles", max_cycles)):
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise ArgumentError(f"{name}={number!r} must be a whole number >= 1.")
    if method not in METHODS:
        raise ArgumentError(f"method={method!r} is not known; give one of {', '.join(METHODS)}.")
    flavour = flavour_of(model)
    if reference is None:
        reference = _DENSE.get(model)
        if reference is None:
            raise ArgumentError(
                f"The dense weights of '{model.name}' are not known (it was not pruned here, was trained since, or is "
                "very large); pass reference= the dense model or its get_weights() from before the prune."
            )
    dense = Values.of(model, reference)
    batches = input_batches(data, samples, batch_size)
    selected = survey(model, include, exclude)[0]
    if method == "dsnot" and not any(_swappable(frozen_masks(model).get(ref.variable)) for ref in selected):
        raise ArgumentError(
            f"method='dsnot' swaps positions in frozen masks without a structure, and no selected weight of "
            f"'{model.name}' has one; prune with pattern='unstructured', freeze the zeros with sparsekit.freeze, or "
            "use method='least_squares'."
        )
    with alone(model):
        frozen_masks(model).apply()
        work = _Work(flavour, model, dense, batches, method, bias, batch_norm, seed, max_cycles)
        return work.run({ref.key for ref in selected})


def _swappable(mask: FrozenMask | None) -> bool:
    return mask is not None and mask.pattern == "unstructured"


class _Work:
    """One run of `reconstruct`."""

    def __init__(
        self,
        flavour: Flavour,
        model: Any,
        dense: Values,
        batches: list[Any],
        method: str,
        bias: bool,
        batch_norm: bool,
        seed: int,
        max_cycles: int,
    ) -> None:
        self._flavour = flavour
        self._model = model
        self._dense = dense
        self._batches = batches
        self._method = method
        self._bias = bias
        self._batch_norm = batch_norm
        self._seed = seed
        self._max_cycles = max_cycles

    def run(self, selected: set[str]) -> Reconstruction:
        skipped, parts = [], []
        for ref in all_weights(self._model):
            if ref.key not in selected:
                continue
            view = linear_layer(self._flavour, ref)
            reason = view if isinstance(view, str) else self._obstacle(view)
            if isinstance(view, LinearLayer) and reason is None:
                parts.append(self._part(view))
            else:
                skipped.append(LayerResult(ref.path, "skipped", reason=reason or ""))
        if self._batch_norm:
            parts += self._normalizations()
        parts, lost = self._in_running_order(parts)
        before = self._errors(parts)
        for part in parts:
            self._improve(part)
        after = self._checked(parts, before)
        rows = []
        for part in parts:
            status = "changed" if part.changed else "kept"
            reason = "" if part.changed else "no change lowers the error"
            rows.append(LayerResult(part.path, status, before[part.path], after[part.path], reason))
        return Reconstruction((*rows, *skipped, *lost))

    def _part(self, view: LinearLayer) -> _Kernel | _MaskSwaps:
        mask, dense = frozen_masks(self._model).get(view.ref.variable), self._dense.array(view.ref.variable)
        if self._method != "dsnot":
            return _Kernel(view, self._support(view), self._bias, self._method)
        assert mask is not None, "an obstacle otherwise"
        assert dense is not None, "an obstacle otherwise"
        return _MaskSwaps(view, mask, dense, self._max_cycles)

    def _obstacle(self, view: LinearLayer) -> str | None:
        support = self._support(view)
        if self._method == "dsnot":
            mask = frozen_masks(self._model).get(view.ref.variable)
            if not _swappable(mask):
                return "no frozen mask" if mask is None else f"swaps would break its {mask.pattern} pattern"
            if self._dense.array(view.ref.variable) is None:
                return "its dense values are not in the reference"
        if support.all():
            return "not pruned"
        if not support.any():
            return "no weight is kept"
        if support.shape[0] >= _WIDEST:
            return f"{support.shape[0]} inputs; {self._method} takes up to {_WIDEST}"
        return None

    def _support(self, view: LinearLayer) -> np.ndarray:
        mask = frozen_masks(self._model).get(view.ref.variable)
        return view.matrix(view.ref.numpy() != 0 if mask is None else read(mask.keep))

    def _normalizations(self) -> list[_Normalization]:
        kind = self._flavour.keras.layers.BatchNormalization
        layers = [layer for layer in self._flavour.layers(self._model) if isinstance(layer, kind)]
        paths = {ref.key: ref.path for ref in all_weights(self._model)}
        return [_Normalization(layer, paths[key_of(layer.moving_mean)]) for layer in layers if layer.trainable]

    def _in_running_order(self, parts: list[Any]) -> tuple[list[Any], list[LayerResult]]:
        """Parts by the first call of their layers, and those that cannot be listened to."""
        calls = Tap(self._flavour, self._model, [part.layer for part in parts]).run(self._batches[0])
        order = list(calls)
        found, lost = [], []
        for part in parts:
            seen = calls.get(id(part.layer))
            if not seen:
                reason = "not called" if seen is None else "runs inside a loop of another layer"
                lost.append(LayerResult(part.path, "skipped", reason=reason))
            elif not part.understands(*seen[0]):
                lost.append(LayerResult(part.path, "skipped", reason="computes something of its own"))
            else:
                found.append(part)
        return sorted(found, key=lambda part: order.index(id(part.layer))), lost

    def _pairs(self, parts: list[Any]) -> Any:
        """For each batch: the calls of the layers in the dense model and in the model as it is."""
        tap = Tap(self._flavour, self._model, [part.layer for part in parts])
        for batch in self._batches:
            with self._dense.inside():
                target = tap.run(batch)
            yield target, tap.run(batch)

    def _errors(self, parts: list[Any]) -> dict[str, float]:
        """Relative squared error of each layer's output in the model as it is."""
        wrong, size = dict.fromkeys([p.path for p in parts], 0.0), dict.fromkeys([p.path for p in parts], 0.0)
        for target, current in self._pairs(parts):
            for part in parts:
                for (_, wanted), (_, given) in zip(target[id(part.layer)], current[id(part.layer)], strict=True):
                    wrong[part.path] += _squared(given, wanted)
                    size[part.path] += _squared(wanted)
        return {path: wrong[path] / max(size[path], 1e-30) for path in wrong}

    def _improve(self, part: Any) -> None:
        """Give one layer the values that bring its output nearest to the dense model's, if they do so."""
        generator = np.random.default_rng(self._seed)
        sums = part.sums()
        calls: list[tuple[tf.Tensor, tf.Tensor]] = []
        for number, (target, current) in enumerate(self._pairs([part])):
            pairs = zip(target[id(part.layer)], current[id(part.layer)], strict=True)
            for (dense_inputs, wanted), (inputs, _) in pairs:
                sums.add(number % 2, inputs, dense_inputs, self._dense, generator, len(self._batches))
                calls.append((inputs, wanted))
        change = sums.solve()
        if change is None:
            return
        start = part.values()
        best, lowest = None, part.error(calls)
        for length in part.steps:
            part.put(start, change, length)
            error = part.error(calls)
            if error < lowest:
                best, lowest = length, error
                break
        if best is None:
            part.restore(start)
        else:
            part.changed = True
            part.start = start

    def _checked(self, parts: list[Any], before: dict[str, float]) -> dict[str, float]:
        """Errors in the end; changes that made a later layer worse than it was are taken back, latest first."""
        while True:
            after = self._errors(parts)
            worse = next((i for i, part in enumerate(parts) if after[part.path] > before[part.path]), None)
            if worse is None:
                return after
            undone = next((part for part in reversed(parts[: worse + 1]) if part.changed), None)
            assert undone is not None, "the model is as it was"
            undone.restore(undone.start)
            undone.changed = False


class _Part:
    """A layer whose values can be changed and measured."""

    path: str
    layer: Any
    steps: tuple[float, ...] = _STEPS

    def __init__(self) -> None:
        self.changed = False
        self.start: Any = None

    def error(self, calls: list[tuple[tf.Tensor, tf.Tensor]]) -> float:
        """Squared error of the layer's output for inputs and wanted outputs."""
        return sum(_squared(self.layer(inputs), wanted) for inputs, wanted in calls)


class _Kernel(_Part):
    """A kernel with its bias."""

    def __init__(self, view: LinearLayer, support: np.ndarray, bias: bool, method: str) -> None:
        super().__init__()
        self.path, self.layer = view.path, view.layer
        self.view = view
        self.support = support
        self.method = method
        trainable = {key_of(variable) for variable in view.layer.trainable_variables}
        self.has_bias = bias and view.bias is not None and key_of(view.bias) in trainable

    def understands(self, inputs: tf.Tensor, outputs: tf.Tensor) -> bool:
        return self.view.computes(inputs, outputs)

    def sums(self) -> _NormalEquations:
        return _NormalEquations(self, self.has_bias)

    def values(self) -> tuple[np.ndarray, np.ndarray | None]:
        bias = np.array(self.view.read_bias()) if self.has_bias else None
        return np.array(self.view.matrix(self.view.ref.numpy())), bias

    def put(self, start: Any, change: np.ndarray, length: float) -> None:
        matrix, bias = start
        inputs = matrix.shape[0]
        moved = np.where(self.support, matrix + length * change[:inputs], 0.0)
        self.view.write(moved, None if bias is None else bias + length * change[inputs])

    def restore(self, start: Any) -> None:
        self.view.write(*start)


class _MaskSwaps(_Part):
    """A kernel whose mask moves, and with it what is left of its dense values."""

    steps = (1.0,)

    def __init__(self, view: LinearLayer, mask: FrozenMask, dense: np.ndarray, max_cycles: int) -> None:
        super().__init__()
        self.path, self.layer = view.path, view.layer
        self.view = view
        self.mask = mask
        self.dense = view.matrix(dense)
        self.max_cycles = max_cycles

    @property
    def support(self) -> np.ndarray:
        return self.view.matrix(read(self.mask.keep))

    def understands(self, inputs: tf.Tensor, outputs: tf.Tensor) -> bool:
        return self.view.computes(inputs, outputs)

    def sums(self) -> _NormalEquations:
        return _NormalEquations(self, ones=True)

    def values(self) -> tuple[np.ndarray, np.ndarray]:
        return np.array(self.view.matrix(self.view.ref.numpy())), np.array(self.support)

    def put(self, start: Any, change: tuple[np.ndarray, np.ndarray], length: float) -> None:
        self.restore(change)

    def restore(self, start: Any) -> None:
        matrix, keep = start
        self.view.write(matrix, None)
        self.mask.keep.assign(self.view.kernel(keep))

    def swaps(self, gram: np.ndarray, residual: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
        """New weights and mask from X'X and X'E, where the last input is always one."""
        count, matrix, keep = gram[-1, -1], *self.values()
        mean, square = gram[-1, :-1] / count, np.diagonal(gram)[:-1] / count
        moved = swap_masks(self.dense, keep, mean, square, self.max_cycles)
        change = np.where(moved, self.dense, 0.0) - matrix
        # The mean alone can come back at the price of a larger variance.
        better = np.sum(change * (gram[:-1, :-1] @ change - 2.0 * residual[:-1]), axis=0) < 0.0
        if not better.any():
            return None
        return np.where(better, np.where(moved, self.dense, 0.0), matrix), np.where(better, moved, keep)


class _NormalEquations:
    """X'X and X'E of a layer, in two halves: X its inputs now, E what its linear output lacks.

    `ones` adds an input that is always one: for the bias, and for the means of the others.
    """

    def __init__(self, kernel: _Kernel | _MaskSwaps, ones: bool) -> None:
        self._kernel = kernel
        self._ones = ones
        inputs, outputs = kernel.support.shape
        self._width = inputs + ones
        self._grams = tuple(np.zeros((self._width, self._width), np.float32) for _ in range(2))
        self._residuals = tuple(np.zeros((self._width, outputs), np.float32) for _ in range(2))
        self._enough = max(20_000, 10 * inputs)
        self._dense: np.ndarray | None = None

    def add(
        self,
        half: int,
        inputs: tf.Tensor,
        dense_inputs: tf.Tensor,
        dense: Values,
        generator: np.random.Generator,
        batches: int,
    ) -> None:
        view = self._kernel.view
        self._dense = dense.array(view.ref.variable)
        rows, dense_rows = view.rows(inputs), view.rows(dense_inputs)
        count, limit = int(rows.shape[0]), max(1, self._enough // batches)
        if count > limit:
            chosen = np.sort(generator.choice(count, limit, replace=False))
            rows, dense_rows = tf.gather(rows, chosen), tf.gather(dense_rows, chosen)
        wanted = self._linear(dense_rows, dense)
        lacking = wanted - self._linear(rows, None)
        if self._ones:
            rows = tf.concat([rows, tf.ones((rows.shape[0], 1))], axis=1)
        self._grams[half][...] += tf.matmul(rows, rows, transpose_a=True).numpy()
        self._residuals[half][...] += tf.matmul(rows, lacking, transpose_a=True).numpy()

    def solve(self) -> Any:
        kernel = self._kernel
        if isinstance(kernel, _MaskSwaps):
            return kernel.swaps(self._grams[0] + self._grams[1], self._residuals[0] + self._residuals[1])
        if kernel.method == "obs":
            return self._obs(kernel)
        support = kernel.support
        if self._ones:
            support = np.concatenate([support, np.ones((1, support.shape[1]), np.bool_)])
        if not self._residuals[1].any():
            return None
        return solve_with_held_out(self._grams, self._residuals, support)  # type: ignore[arg-type]

    def _obs(self, kernel: _Kernel) -> np.ndarray | None:
        if self._dense is None:
            return None
        gram, residual = self._grams[0] + self._grams[1], self._residuals[0] + self._residuals[1]
        inputs = kernel.support.shape[0]
        new = obs_rows(gram[:inputs, :inputs], kernel.view.matrix(self._dense), kernel.support)
        change = new - kernel.view.matrix(kernel.view.ref.numpy())
        if not self._ones:
            return change
        # The last row belongs to an input that is always one: what is lacking on average then goes to the bias.
        missing = (residual[inputs] - gram[inputs, :inputs] @ change) / gram[inputs, inputs]
        return np.concatenate([change, missing[None]])

    def _linear(self, rows: tf.Tensor, values: Values | None) -> tf.Tensor:
        """Output before the activation, with the dense values or the layer's own."""
        view = self._kernel.view
        kernel = None if values is None else values.array(view.ref.variable)
        result = rows @ tf.constant(view.matrix(view.ref.numpy() if kernel is None else kernel).astype(np.float32))
        if view.bias is None:
            return result
        bias = None if values is None else values.array(view.bias)
        return result + (view.read_bias() if bias is None else bias.reshape(-1)).astype(np.float32)


class _Normalization(_Part):
    """The moving statistics of a BatchNormalization."""

    def __init__(self, layer: Any, path: str) -> None:
        super().__init__()
        self.path, self.layer = path, layer

    def understands(self, inputs: tf.Tensor, outputs: tf.Tensor) -> bool:
        return inputs.shape == outputs.shape

    def sums(self) -> _Moments:
        return _Moments(self)

    def values(self) -> tuple[np.ndarray, np.ndarray]:
        return np.array(read(self.layer.moving_mean)), np.array(read(self.layer.moving_variance))

    def put(self, start: Any, change: tuple[np.ndarray, np.ndarray], length: float) -> None:
        mean, variance = start
        self.restore((mean + length * (change[0] - mean), variance + length * (change[1] - variance)))

    def restore(self, start: Any) -> None:
        native(self.layer.moving_mean).assign(start[0])
        native(self.layer.moving_variance).assign(start[1])


class _Moments:
    """Means, variances and covariance of each channel of a BatchNormalization's input, in the dense model and now."""

    def __init__(self, part: _Normalization) -> None:
        self._part = part
        self._count = 0
        self._sums = np.zeros((4, int(part.layer.moving_mean.shape[0])))

    def add(self, half: int, inputs: tf.Tensor, dense_inputs: tf.Tensor, *_: Any) -> None:
        axis = self._part.layer.axis
        axis = (axis[0] if isinstance(axis, (list, tuple)) else axis) % inputs.shape.rank
        now, dense = (self._channels(tensor, axis) for tensor in (inputs, dense_inputs))
        self._sums += np.stack([now.sum(0), dense.sum(0), np.square(now).sum(0), (now * dense).sum(0)])
        self._count += now.shape[0]

    def solve(self) -> tuple[np.ndarray, np.ndarray]:
        """Statistics under which the output is nearest to the dense output; the model's own where nothing changed."""
        mean, variance = self._part.values()
        now_mean, dense_mean, now_square, product = self._sums / max(self._count, 1)
        spread = now_square - now_mean**2
        together = product - now_mean * dense_mean
        # A dead or reversed channel has no scale that helps; only its mean is moved then.
        fits = (spread > 1e-12) & (together > 0.0)
        slope = np.where(fits, together / np.where(fits, spread, 1.0), 1.0)
        epsilon = self._part.layer.epsilon
        moved_variance = np.maximum((variance + epsilon) / slope**2 - epsilon, 0.0)
        moved_mean = now_mean - (dense_mean - mean) / slope
        return moved_mean.astype(np.float32), moved_variance.astype(np.float32)

    def _channels(self, tensor: tf.Tensor, axis: int) -> np.ndarray:
        values = tf.cast(tensor, tf.float32).numpy().astype(np.float64)
        return np.moveaxis(values, axis, -1).reshape(-1, self._sums.shape[1])


def _squared(tensor: tf.Tensor, other: tf.Tensor | None = None) -> float:
    tensor = tf.cast(tensor, tf.float32)
    if other is not None:
        tensor = tensor - tf.cast(other, tf.float32)
    return float(tf.reduce_sum(tf.square(tensor)))
