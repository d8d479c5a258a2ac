"""From weights to masks: score, rank within the scope, select. NumPy only, nothing is changed."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from .criteria import Criterion, Evidence
from .distributions import Distribution, ranked_zeros
from .errors import ArgumentError, LayerCollapseWarning, NonFiniteError
from .masks import Mask, MaskSet
from .patterns import Pattern, zeros_for

SCOPES = ("layer", "global")
_CHUNK = 1 << 18


def choose_masks(
    weights: Mapping[str, Callable[[], np.ndarray]],
    sparsity: float,
    *,
    criterion: Criterion,
    pattern: Pattern,
    scope: str,
    distribution: Distribution,
    earlier: Mapping[str, np.ndarray],
    min_keep: int,
    seed: int,
) -> MaskSet:
    """Choose which positions of some weights are kept.

    Args:
        weights: path -> function that gives the weight's current values; called several times, one weight at a time.
        sparsity: fraction of all these positions to drop, in [0, 1), counting those dropped earlier.
        criterion: gives the scores.
        pattern: structure of the zeros.
        scope: `"layer"` ranks within each weight, `"global"` over all of them.
        distribution: spreads the sparsity over the weights if the scope is `"layer"`.
        earlier: masks that hold already; what they drop stays dropped.
        min_keep: number of positions that each weight keeps at least.
        seed: for criteria that draw random numbers.

    Raises:
        NonFiniteError: if a weight holds NaN or infinity.
        ArgumentError: if more is dropped already than `sparsity` asks for, or if `min_keep` leaves no room.
    """
    shapes, lowest = _inspect(weights)
    sizes = [int(np.prod(shape, dtype=np.int64)) for shape in shapes]
    dropped = [int(np.count_nonzero(~earlier[path])) if path in earlier else 0 for path in weights]
    wanted = zeros_for(sum(sizes), sparsity)
    if sum(dropped) > max(wanted, sum(distribution.zeros(shapes, sparsity))):
        raise ArgumentError(
            f"sparsity={sparsity} is below what is pruned already ({sum(dropped) / sum(sizes):.4f}); pruned weights "
            "do not come back: give a higher sparsity, or sparsekit.strip(model) to forget the masks."
        )
    for path, shape in zip(weights, shapes, strict=True):
        try:
            pattern.check(shape)
        except ArgumentError as error:
            raise ArgumentError(f"'{path}': {error}") from error

    parts = [
        _scores(path, weight, criterion, earlier.get(path), seed, has_zeros)
        for (path, weight), has_zeros in zip(weights.items(), lowest, strict=True)
    ]
    floors = [min(min_keep, size - gone) for size, gone in zip(sizes, dropped, strict=True)]
    if scope == "global":
        counts, held = ranked_zeros(parts, sizes, wanted, floors)
    else:
        counts, held = _floored(distribution.zeros(shapes, sparsity), sizes, floors)
    if held:
        names = ", ".join(list(weights)[i] for i in held)
        warnings.warn(
            f"Ranking alone would have left fewer than min_keep={min_keep} weights in {names}; they keep that many.",
            LayerCollapseWarning,
            stacklevel=3,
        )
    masks = []
    for (path, part), size, count, gone in zip(
        zip(weights, parts, strict=True), sizes, counts, dropped, strict=True
    ):
        if count <= gone:
            keep = earlier[path] if gone else np.ones(part().shape, dtype=np.bool_)
        else:
            keep = pattern.select(part(), (size - count) / size)
        masks.append(Mask(path, keep, pattern.name))
    return MaskSet(masks)


def _floored(
    zeros: Sequence[int], sizes: Sequence[int], floors: Sequence[int]
) -> tuple[list[int], list[int]]:
    limits = [size - floor for size, floor in zip(sizes, floors, strict=True)]
    held = [i for i, (count, limit) in enumerate(zip(zeros, limits, strict=True)) if count > limit]
    return [min(count, limit) for count, limit in zip(zeros, limits, strict=True)], held


def _inspect(weights: Mapping[str, Callable[[], np.ndarray]]) -> tuple[list[tuple[int, ...]], list[bool]]:
    """Shape of each weight, and whether it holds exact zeros.

    Raises:
        NonFiniteError: naming the first weight with NaN or infinity.
    """
    shapes, has_zeros = [], []
    for path, weight in weights.items():
        values = weight()
        flat = values.reshape(-1)
        bad, zero = 0, False
        for start in range(0, flat.size, _CHUNK):
            piece = flat[start : start + _CHUNK]
            finite = np.isfinite(piece)
            bad += piece.size - int(np.count_nonzero(finite))
            zero = zero or np.count_nonzero(piece) < piece.size
        if bad:
            raise NonFiniteError(
                f"'{path}' holds {bad} NaN or infinite values and cannot be ranked; train it again or leave it out "
                f"with exclude='{path}'."
            )
        shapes.append(values.shape)
        has_zeros.append(zero)
    return shapes, has_zeros


def _scores(
    path: str,
    weight: Callable[[], np.ndarray],
    criterion: Criterion,
    earlier: np.ndarray | None,
    seed: int,
    has_zeros: bool,
) -> Callable[[], np.ndarray]:
    """Scores of one weight, with what is dropped or zero already below all others."""

    def scores() -> np.ndarray:
        values = weight()
        result = criterion.score(values, Evidence(path, seed))
        if result.shape != values.shape or not np.issubdtype(result.dtype, np.floating):
            raise ArgumentError(
                f"The criterion '{criterion.name}' gave scores of shape {result.shape} and dtype {result.dtype} for "
                f"'{path}'; they must be floating and of the weight's shape {values.shape}."
            )
        if has_zeros:
            # What is zero already is counted first, whatever the criterion says of it.
            result = np.where(values == 0, result.dtype.type(np.finfo(result.dtype).min), result)
        if earlier is not None and not earlier.all():
            result = np.where(earlier, result, result.dtype.type(-np.inf))
        return result

    return scores
