"""From weights to masks: score, rank within the scope, select. NumPy only, nothing is changed."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from .criteria import Criterion, Evidence
from .distributions import Distribution
from .errors import ArgumentError, LayerCollapseWarning, NonFiniteError
from .masks import Mask, MaskSet
from .patterns import Pattern, Unstructured, zeros_for
from .ranking import Scores, first, on_pieces, rank

SCOPES = ("layer", "global")


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
    scored = [
        _Scored(path, values, criterion, Evidence(path, seed), earlier.get(path)) for path, values in weights.items()
    ]
    shapes = [one.shape for one in scored]
    sizes = [one.size for one in scored]
    for one in scored:
        try:
            pattern.check(one.shape)
        except ArgumentError as error:
            raise ArgumentError(f"'{one.path}': {error}") from error
    wanted = zeros_for(sum(sizes), sparsity)
    shares = distribution.zeros(shapes, sparsity)
    gone = sum(one.gone for one in scored)
    if gone > max(wanted, sum(shares)):
        raise ArgumentError(
            f"sparsity={sparsity} is below what is pruned already ({gone / sum(sizes):.4f}); pruned weights "
            "do not come back: give a higher sparsity, or sparsekit.strip(model) to forget the masks."
        )
    for one in scored:
        one.examine()

    parts = [Scores(one.size, one.open) for one in scored]
    floors = [min(min_keep, one.size - one.gone) for one in scored]
    if scope == "global":
        cuts, held = rank(parts, wanted, floors)
    else:
        limits = [size - floor for size, floor in zip(sizes, floors, strict=True)]
        held = [i for i, (share, limit) in enumerate(zip(shares, limits, strict=True)) if share > limit]
        counts = [max(one.gone, min(n, limit)) for one, n, limit in zip(scored, shares, limits, strict=True)]
        cuts = [first(part, count) for part, count in zip(parts, counts, strict=True)]
    masks = []
    for one, part, cut in zip(scored, parts, cuts, strict=True):
        if isinstance(pattern, Unstructured):
            keep = part.keep(cut)
            # Constant, so that a Mask need not copy it.
            keep.flags.writeable = False
            keep = keep.reshape(one.shape)
        else:
            keep = pattern.select(one.whole(), (one.size - cut.count) / one.size)
        masks.append(Mask(one.path, keep, pattern.name))
    if held:
        warnings.warn(
            f"Ranking alone would have left fewer than min_keep={min_keep} weights in "
            f"{', '.join(scored[i].path for i in held)}; they keep that many.",
            LayerCollapseWarning,
            stacklevel=3,
        )
    return MaskSet(masks)


@dataclass(eq=False)
class _Scored:
    """One weight and its scores, made anew on each pass."""

    path: str
    values: Callable[[], np.ndarray]
    criterion: Criterion
    evidence: Evidence
    earlier: np.ndarray | None

    def __post_init__(self) -> None:
        self.shape = self.values().shape
        self.size = int(np.prod(self.shape, dtype=np.int64))
        self.gone = 0 if self.earlier is None else self.size - int(np.count_nonzero(self.earlier))
        # Whether a piece holds zeros, by its first position.
        self.zeros: dict[int, bool] = {}

    def open(self) -> Callable[[Any], np.ndarray]:
        """A function from flat positions to scores, with what is zero or dropped already below all others."""
        weight, score = self._look()
        if not any(self.zeros.values()) and not self.gone:
            return score
        dropped = None if self.earlier is None else ~self.earlier.reshape(-1)

        def marked(at: Any) -> np.ndarray:
            scores = score(at)
            if not isinstance(at, slice) or self.zeros.get(at.start, True):
                # What is zero already is counted first, whatever the criterion says of it.
                scores = np.where(weight(at) == 0, np.finfo(scores.dtype).min, scores)
            if dropped is not None:
                scores = np.where(dropped[at], -np.inf, scores).astype(scores.dtype, copy=False)
            return scores

        return marked

    def whole(self) -> np.ndarray:
        """All scores at once, in the weight's shape."""
        return self.open()(slice(None)).reshape(self.shape)

    def examine(self) -> None:
        """Note where the weight holds zeros, and see to it that values and scores are finite."""
        weight, score = self._look()
        if self.criterion.zeros_lowest and all(on_pieces(lambda at: bool(np.isfinite(score(at).max())), self.size)):
            return

        def work(at: slice) -> tuple[int, bool, int, int]:
            values = weight(at)
            return at.start, bool((values == 0).any()), _not_finite(values), _not_finite(score(at))

        found = on_pieces(work, self.size)
        self.zeros = {start: zeros for start, zeros, _, _ in found}
        bad = sum(values for _, _, values, _ in found)
        if bad:
            raise NonFiniteError(
                f"'{self.path}' holds {bad} NaN or infinite values and cannot be ranked; train it again or leave it "
                f"out with exclude='{self.path}'."
            )
        bad = sum(scores for _, _, _, scores in found)
        if bad:
            raise NonFiniteError(
                f"The criterion '{self.criterion.name}' gave {bad} NaN or infinite scores for '{self.path}'; use "
                f"another criterion or leave the weight out with exclude='{self.path}'."
            )

    def _look(self) -> tuple[Callable[[Any], np.ndarray], Callable[[Any], np.ndarray]]:
        """Two functions from flat positions: to values, and to what the criterion says of them."""
        values = self.values()
        flat = values.reshape(-1)
        if self.criterion.elementwise:
            return lambda at: _wide(flat[at]), lambda at: self._score(_wide(flat[at]))
        scores = self._score(_wide(values)).reshape(-1)
        return lambda at: flat[at], lambda at: scores[at]

    def _score(self, values: np.ndarray) -> np.ndarray:
        scores = self.criterion.score(values, self.evidence)
        if scores.shape != values.shape or not np.issubdtype(scores.dtype, np.floating):
            raise ArgumentError(
                f"The criterion '{self.criterion.name}' gave scores of shape {scores.shape} and dtype {scores.dtype} "
                f"for '{self.path}'; they must be floating and of the shape {values.shape} that it was given."
            )
        return scores


def _wide(values: np.ndarray) -> np.ndarray:
    """NumPy is slow with half floats and knows bfloat16 only by hearsay."""
    return values if values.dtype.itemsize >= 4 else values.astype(np.float32)


def _not_finite(values: np.ndarray) -> int:
    finite = np.isfinite(values)
    return 0 if finite.all() else values.size - int(np.count_nonzero(finite))
