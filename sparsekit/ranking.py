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

_PIECE = 1 << 16
_GROUP = 16
_SAMPLE = 1 << 17


def on_pieces(work: Callable[[slice], T], size: int) -> list[T]:
    """Results of `work(flat positions)` for pieces of `size` positions, in order; many pieces run in threads."""
    pieces = [slice(start, min(start + _PIECE, size)) for start in range(0, size, _PIECE)]
    if len(pieces) <= _GROUP:
        return [work(at) for at in pieces]
    # A thread takes several pieces at once: handing out work costs as much as working on a piece.
    groups = [pieces[start : start + _GROUP] for start in range(0, len(pieces), _GROUP)]
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        done = pool.map(lambda group: [work(at) for at in group], groups)
        return [result for results in done for result in results]


@dataclass(frozen=True, eq=False)
class Split:
    """Scores of one weight, split at two values.

    Args:
        under: how many are the lower value or less.
        keep: flat bool array, True = above the lower value.
        where: flat positions of those strictly between the two values, ascending.
        inside: the scores at these positions.
    """

    under: int
    keep: np.ndarray
    where: np.ndarray
    inside: np.ndarray


@dataclass(frozen=True, eq=False)
class Cut:
    """Where the ranking of one weight ends.

    Args:
        count: how many scores are dropped.
        threshold: all below it are dropped, and of those that equal it
        ties: so many, the first ones.
        split: a split of the scores with the threshold strictly inside, if there is one.
    """

    count: int
    threshold: Any
    ties: int
    split: Split | None = None


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

    def split(self, low: Any, high: Any) -> Split:
        look = self.open()
        keep = np.empty(self.size, dtype=np.bool_)

        def work(at: slice) -> tuple[int, np.ndarray, np.ndarray]:
            scores = look(at)
            above = np.greater(scores, low, out=keep[at])
            inside = scores < high
            inside &= above
            where = np.flatnonzero(inside)
            return int(np.count_nonzero(above)), where + at.start, scores[where]

        found = on_pieces(work, self.size) or [(0, np.empty(0, np.int64), np.empty(0))]
        above, where, inside = zip(*found, strict=True)
        return Split(self.size - sum(above), keep, np.concatenate(where), np.concatenate(inside))

    def count(self, value: Any) -> tuple[int, int]:
        """How many scores are below `value`, and how many equal it."""
        look = self.open()

        def work(at: slice) -> tuple[int, int]:
            scores = look(at)
            return int(np.count_nonzero(scores < value)), int(np.count_nonzero(scores == value))

        found = on_pieces(work, self.size)
        return sum(less for less, _ in found), sum(equal for _, equal in found)

    def keep(self, cut: Cut) -> np.ndarray:
        """Flat bool array, True = keep, with exactly `cut.count` times False."""
        if cut.split is not None:
            keep, where, inside = cut.split.keep, cut.split.where, cut.split.inside
            keep[where[inside < cut.threshold]] = False
            keep[where[inside == cut.threshold][: cut.ties]] = False
            return keep
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
        place = count - sum(split.under for split in splits) - 1
        inside = np.concatenate([split.inside for split in splits])
        if 0 <= place < inside.size:
            inside.partition(place)
            value = inside[place]
            counts = [
                (
                    split.under + int(np.count_nonzero(split.inside < value)),
                    int(np.count_nonzero(split.inside == value)),
                )
                for split in splits
            ]
            return _cuts(value, count, counts, splits)
        del splits
        for value in (low, high):
            counts = [part.count(value) for part in parts]
            less = sum(below for below, _ in counts)
            if less < count <= less + sum(equal for _, equal in counts):
                return _cuts(value, count, counts, [None] * len(parts))
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


def _cuts(threshold: Any, count: int, counts: Sequence[tuple[int, int]], splits: Sequence[Split | None]) -> list[Cut]:
    """Share out the scores that equal the threshold, to the earliest weights first."""
    ties = count - sum(less for less, _ in counts)
    cuts = []
    for (less, equal), split in zip(counts, splits, strict=True):
        mine = min(ties, equal)
        ties -= mine
        cuts.append(Cut(less + mine, threshold, mine, split))
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
    free, held = list(range(len(parts))), []
    while True:
        found = lowest([parts[i] for i in free], count) if count else [first(parts[i], 0) for i in free]
        over = [i for i, cut in zip(free, found, strict=True) if cut.count > limits[i]]
        if not over:
            break
        # What these weights may not give has to come from the others: rank the rest again.
        del found
        for i in over:
            count -= limits[i]
            free.remove(i)
            held.append(i)
    cuts = dict(zip(free, found, strict=True)) | {i: first(parts[i], limits[i]) for i in held}
    return [cuts[i] for i in range(len(parts))], sorted(held)


def first(part: Scores, count: int) -> Cut:
    """The cut that drops the `count` lowest scores of one weight."""
    return lowest([part], count)[0] if count else Cut(0, -np.inf, 0)
