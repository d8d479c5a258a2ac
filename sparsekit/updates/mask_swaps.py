"""Other masks with as many kept weights, under which the mean of each output comes back. NumPy only."""

from __future__ import annotations

import numpy as np

_TOLERANCE = 1e-3  # a mean error that is this small beside the sum of its terms is taken as none


def swap_masks(
    dense: np.ndarray, keep: np.ndarray, mean: np.ndarray, square: np.ndarray, max_cycles: int = 50
) -> np.ndarray:
    """Swap dropped for kept weights, output unit by output unit, while that shrinks the unit's expected error.

    The expected error of a unit is the sum of `dense * mean` over its dropped positions. Each cycle grows the dropped
    weight with the sign of the error and the largest `|dense * mean| / variance`, and drops, of the kept weights with
    the other sign, the one with the lowest `|dense| * sqrt(square)` (Wanda). A unit is done when its error is almost
    zero, a swap would not shrink it, or there is nothing to swap.
    Zhang, Zhao, Lin, Sun, Yao, Han, Tanner, Liu, Ji (2024), "Dynamic Sparse No Training: Training-Free Fine-tuning for
    Sparse LLMs". There the threshold is a fixed number, and a swap may also make the error larger.

    Args:
        dense: the weights before the prune, (in, out).
        keep: bool (in, out), True where a weight is kept.
        mean: mean of each input over the calibration data, (in,).
        square: mean square of each input, (in,).
        max_cycles: at most so many swaps for each unit.

    Returns:
        The new mask, bool (in, out), with as many kept positions in each column as before.
    """
    keep = keep.copy()
    # An input that never changes would have an infinite score; rounding can even make its variance negative.
    variance = np.maximum(square - mean**2, 1e-6 * square)
    contribution = dense * mean[:, None]
    growth = np.abs(contribution) / np.where(variance > 0.0, variance, 1.0)[:, None]
    importance = np.abs(dense) * np.sqrt(square)[:, None]
    error = np.where(keep, 0.0, contribution).sum(axis=0)
    tolerated = _TOLERANCE * np.abs(contribution).sum(axis=0)
    units = np.flatnonzero(np.abs(error) > tolerated)
    for _ in range(max_cycles):
        if not len(units):
            break
        kept, along = keep[:, units], contribution[:, units] * np.sign(error[units])
        grown = np.where(~kept & (along > 0.0), growth[:, units], -np.inf)
        dropped = np.where(kept & (along < 0.0), importance[:, units], np.inf)
        grow, drop = grown.argmax(axis=0), dropped.argmin(axis=0)
        after = error[units] - contribution[grow, units] + contribution[drop, units]
        possible = np.isfinite(grown.max(axis=0)) & np.isfinite(dropped.min(axis=0))
        swapped = possible & (np.abs(after) < np.abs(error[units]))
        units, grow, drop = units[swapped], grow[swapped], drop[swapped]
        keep[grow, units], keep[drop, units] = True, False
        error[units] = after[swapped]
        units = units[np.abs(error[units]) > tolerated[units]]
    return keep
