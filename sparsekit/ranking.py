"""Which of many scores are the lowest, found without sorting, joining or storing them. NumPy only.

Scores are made again whenever they are needed, in pieces that stay in a core's cache and on all cores at once (NumPy
lets go of the interpreter lock), so that ranking a hundred million weights takes little memory beside them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from .errors import ArgumentError

T = TypeVar("T")

_PIECE = 1 << 17
_SAMPLE = 1 << 17


def on_pieces(work: Callable[[slice], T], size: int) -> list[T]:
    """Results of `work(flat positions)` for pieces of `size` positions, in order; many pieces run in threads."""
    pieces = [slice(start, min(start + _PIECE, size)) for start in range(0, size, _PIECE)]
    if len(pieces) < 4:
        return [work(at) for at in pieces]
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return list(pool.map(work, pieces))


@dataclass(frozen=True)
class Cut:
    """Where the ranking of one weight ends: `count` scores are dropped, all below `threshold` and the first `ties`
    of those that equal it."""

    threshold: Any
    ties: int
    count: int


@dataclass(frozen=True, eq=False)
class Scores:
    """The scores of one weight, flat; the lowest are dropped first.

    Args:
        size: number of positions.
        open: called once for each pass; gives a function from flat positions (a slice or an index array) to their
            scores, 1-D and without NaN.
    """

    size: int
    open: Callable[[], Callable[[Any], np.ndarray]]

    @classmethod
    def of(cls, array: np.ndarray) -> Scores:
        flat = array.reshape(-1)
        return cls(flat.size, lambda: flat.__getitem__)

    def sample(self, stride: int) -> np.ndarray:
        """One score of every `stride`, each at a random place in its stretch: no regular structure can hide."""
        count = -(-self.size // stride)
        edges = np.arange(count + 1) * self.size // max(count, 1)
        return self.open()(np.random.default_rng(0).integers(edges[:-1], edges[1:]))

    def split(self, low: Any, high: Any) -> tuple[int, np.ndarray]:
        """How many scores are `low` or less, and those strictly between `low` and `high`."""
        look = self.open()

        def work(at: slice) -> tuple[int, np.ndarray]:
            scores = look(at)
            inside = scores > low
            above = int(np.count_nonzero(inside))
            inside &= scores < high
            return scores.size - above, scores[inside]

        found = on_pieces(work, self.size)
        return sum(under for under, _ in found), np.concatenate([inside for _, inside in found] or [np.empty(0)])

    def count(self, value: Any) -> tuple[int, int]:
        """How many scores are below `value`, and how many equal it."""
        look = self.open()

        def work(at: slice) -> tuple[int, int]:
            scores = look(at)
            return int(np.count_nonzero(scores < value)), int(np.count_nonzero(scores == value))

        found = on_pieces(work, self.size)
        return sum(less for less, _ in found), sum(equal for _, equal in found)

    def keep(self, cut: Cut) -> np.ndarray:
        """Flat read-only bool array, True = keep, with exactly `cut.count` times False."""
        keep = np.empty(self.size, dtype=np.bool_)
        look = self.open()

        def work(at: slice) -> int:
            scores = look(at)
            np.greater(scores, cut.threshold, out=keep[at])
            return int(np.count_nonzero(scores == cut.threshold))

        start, ties = 0, cut.ties
        for equal in on_pieces(work, self.size):
            at = slice(start, start + _PIECE)
            if equal > ties:
                keep[at][np.flatnonzero(look(at) == cut.threshold)[ties:]] = True
            start, ties = at.stop, max(0, ties - equal)
        # Constant, so that a Mask need not copy it.
        keep.flags.writeable = False
        return keep


def lowest(parts: Sequence[Scores], count: int) -> list[Cut]:
    """The cut in each part that drops the `count` lowest of all scores; of equal ones the earliest go first.

    Args:
        parts: scores of some weights.
        count: how many to drop, from 1 to their total number.
    """
    # A sample brackets the threshold. One pass counts what lies below and takes out what lies strictly inside, some
    # two percent, and the threshold is found in that. It can also be an end of the bracket itself, of which there
    # may be any number: of a kernel of -1 and 1 all scores are one.
    for low, high in (_bracket(parts, count), (-np.inf, np.inf)):
        splits = [part.split(low, high) for part in parts]
        place = count - sum(under for under, _ in splits) - 1
        inside = np.concatenate([found for _, found in splits])
        if 0 <= place < inside.size:
            inside.partition(place)
            value = inside[place]
            return _cuts(
                value,
                count,
                [
                    (under + int(np.count_nonzero(found < value)), int(np.count_nonzero(found == value)))
                    for under, found in splits
                ],
            )
        for value in (low, high):
            counts = [part.count(value) for part in parts]
            less = sum(below for below, _ in counts)
            if less < count <= less + sum(equal for _, equal in counts):
                return _cuts(value, count, counts)
    raise ArgumentError("These scores cannot be ranked; a criterion has to give numbers without NaN.")


def _bracket(parts: Sequence[Scores], count: int) -> tuple[Any, Any]:
    """Two values between which the `count`-th lowest score lies, by all likelihood."""
    total = sum(part.size for part in parts)
    stride = max(1, total // _SAMPLE)
    samples = [part.sample(stride) for part in parts]
    sample = np.concatenate(samples)
    order = np.argsort(sample)
    each = np.repeat([part.size / max(1, s.size) for part, s in zip(parts, samples, strict=True)], [*map(len, samples)])
    ranks = np.cumsum(each[order])
    margin = 4.0 * total / np.sqrt(sample.size) + stride
    low, high = np.searchsorted(ranks, [count - margin, count + margin])
    return (
        sample[order[low]] if low > 0 else -np.inf,
        sample[order[high]] if high < sample.size else np.inf,
    )


def _cuts(threshold: Any, count: int, counts: Sequence[tuple[int, int]]) -> list[Cut]:
    """Share out the scores that equal the threshold, to the earliest weights first."""
    ties = count - sum(less for less, _ in counts)
    cuts = []
    for less, equal in counts:
        mine = min(ties, equal)
        ties -= mine
        cuts.append(Cut(threshold, mine, less + mine))
    return cuts


def rank(parts: Sequence[Scores], count: int, floors: Sequence[int]) -> tuple[list[Cut], list[int]]:
    """Drop the `count` lowest of all scores, but leave each weight at least its floor.

    Args:
        parts: scores of some weights.
        count: how many to drop over all weights.
        floors: how many positions each weight keeps at least.

    Returns:
        `(cut of each weight, indices of the weights that the ranking alone would have taken below their floor)`.

    Raises:
        ArgumentError: if the floors leave no room for that many.
    """
    limits = [part.size - min(floor, part.size) for part, floor in zip(parts, floors, strict=True)]
    total = sum(part.size for part in parts)
    if count > sum(limits):
        raise ArgumentError(
            f"{count} of {total} weights cannot be dropped while each weight keeps its min_keep "
            f"({total - sum(limits)} in all); lower the sparsity or min_keep."
        )
    cuts = [first(part, 0) for part in parts]
    free, held = list(range(len(parts))), []
    while True:
        found = lowest([parts[i] for i in free], count) if count else [first(parts[i], 0) for i in free]
        for i, cut in zip(free, found, strict=True):
            cuts[i] = cut
        over = [i for i in free if cuts[i].count > limits[i]]
        if not over:
            return cuts, sorted(held)
        # What these weights may not give has to come from the others: rank the rest again.
        for i in over:
            cuts[i] = first(parts[i], limits[i])
            count -= limits[i]
            free.remove(i)
            held.append(i)


def first(part: Scores, count: int) -> Cut:
    """The cut that drops the `count` lowest scores of one weight."""
    return lowest([part], count)[0] if count else Cut(-np.inf, 0, 0)
