"""Prune a trained Keras model, retrain only the weights that are left, keep every zero exactly zero."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .api import freeze, masked, masks_of, prune, report, retrain, strip, train_step
    from .files import load, save
    from .training.constraint import MaskConstraint

# TensorFlow takes seconds to import; a name is loaded when it is first used, so that `sparsekit --help` is quick.
_HOMES = {
    "prune": ".api",
    "retrain": ".api",
    "freeze": ".api",
    "strip": ".api",
    "masks_of": ".api",
    "report": ".api",
    "train_step": ".api",
    "masked": ".api",
    "load": ".files",
    "save": ".files",
    "MaskConstraint": ".training.constraint",
}

__all__ = [
    "MaskConstraint",
    "freeze",
    "load",
    "masked",
    "masks_of",
    "prune",
    "report",
    "retrain",
    "save",
    "strip",
    "train_step",
]
__version__ = "0.1.0"


def __getattr__(name: str):
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name], __name__), name)
    raise AttributeError(f"module 'sparsekit' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
