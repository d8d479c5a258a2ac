"""Weights on a given support that restore a layer's output: least squares, or OBS row by row. NumPy only."""

from __future__ import annotations

import numpy as np

RIDGES = (1e-3, 1e-2, 1e-1, 1.0)


def solve_on_support(
    gram: np.ndarray,
    residual: np.ndarray,
    support: np.ndarray,
    ridge: float,
    iterations: int = 40,
    tolerance: float = 1e-3,
) -> np.ndarray:
    """The change D of a matrix, on its support, that minimises `|X D - E|^2 + ridge * mean(diag(X'X)) * |D|^2`.

    Every column is its own problem with its own support; conjugate gradients run on all of them together.

    Args:
        gram: X'X, (in, in).
        residual: X'E, (in, out): what the outputs lack.
        support: bool (in, out), True where D may differ from zero.
        ridge: weight of the pull towards no change, relative to the mean of the diagonal.
        iterations: at most so many.
        tolerance: stop when no column's residual is larger than this fraction of its first one.

    Returns:
        D, (in, out), exactly zero off the support.
    """
    diagonal = np.diagonal(gram)
    damping = ridge * max(float(diagonal.mean()), np.finfo(np.float32).tiny)
    scale = 1.0 / (diagonal + damping)[:, None]
    solution = np.zeros_like(residual)
    rest = np.where(support, residual, 0.0)
    first = np.linalg.norm(rest, axis=0)
    direction = scale * rest
    energy = np.sum(rest * direction, axis=0)
    for _ in range(iterations):
        if not np.any(np.linalg.norm(rest, axis=0) > tolerance * first):
            break
        image = np.where(support, gram @ direction + damping * direction, 0.0)
        curvature = np.sum(direction * image, axis=0)
        length = np.divide(energy, curvature, out=np.zeros_like(energy), where=curvature > 0)
        solution += length * direction
        rest -= length * image
        conditioned = scale * rest
        following = np.sum(rest * conditioned, axis=0)
        direction = conditioned + np.divide(following, energy, out=np.zeros_like(energy), where=energy > 0) * direction
        energy = following
    return solution


def error_change(gram: np.ndarray, residual: np.ndarray, change: np.ndarray) -> float:
    """`|X D - E|^2 - |E|^2` for a change D."""
    return float(np.sum(change * (gram @ change)) - 2.0 * np.sum(change * residual))


def solve_with_held_out(
    grams: tuple[np.ndarray, np.ndarray], residuals: tuple[np.ndarray, np.ndarray], support: np.ndarray
) -> np.ndarray | None:
    """The change from all samples, with the ridge under which the first half predicts the second best.

    Args:
        grams: X'X of both halves.
        residuals: X'E of both halves.
        support: as in `solve_on_support`.

    Returns:
        D, or None if no ridge makes an improvement that holds on the second half.
    """
    best, found = 0.0, None
    for ridge in RIDGES:
        gain = error_change(grams[1], residuals[1], solve_on_support(grams[0], residuals[0], support, ridge))
        if gain < best:
            best, found = gain, ridge
    if found is None:
        return None
    return solve_on_support(grams[0] + grams[1], residuals[0] + residuals[1], support, found)


def obs_rows(gram: np.ndarray, dense: np.ndarray, support: np.ndarray, ridge: float = 1e-2) -> np.ndarray:
    """Remove the weights off the support one row after the other; each time the rows below make up for it.

    One Cholesky factor of the inverse Hessian serves all columns, whatever their supports. Rows above stay as they
    are, so the result is near the least squares solution, and equal to it where all removed rows come first.
    Frantar, Alistarh (2023), "SparseGPT: Massive Language Models Can Be Accurately Pruned in One-Shot", after Hassibi,
    Stork (1992), "Second Order Derivatives for Network Pruning: Optimal Brain Surgeon".

    Args:
        gram: X'X, (in, in).
        dense: the weights before the prune, (in, out).
        support: bool (in, out), True where a weight stays.
        ridge: damping, relative to the mean of the diagonal.

    Returns:
        The new weights, (in, out), exactly zero off the support.
    """
    hessian = gram.astype(np.float64)
    damping = ridge * max(float(np.diagonal(hessian).mean()), np.finfo(np.float32).tiny)
    hessian[np.diag_indices_from(hessian)] += damping
    factor = np.linalg.cholesky(np.linalg.inv(hessian)).T
    weights = dense.astype(np.float64)
    for row in range(len(weights)):
        removed = np.where(support[row], 0.0, weights[row]) / factor[row, row]
        weights[row:] -= np.outer(factor[row, row:], removed)
    return np.where(support, weights, 0.0)
