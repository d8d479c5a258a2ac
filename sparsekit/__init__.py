"""Prune a trained Keras model, retrain only the weights that are left, keep every zero exactly zero."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import criteria, schedules, updates
    from .api import accelerate, freeze, masked, masks_of, prune, report, retrain, strip, train_step
    from .files import load, save
    from .training import callbacks
    from .training.constraint import MaskConstraint
    from .updates.reconstruction import reconstruct
    from .updates.step import update_step

# TensorFlow takes seconds to import; a name is loaded when it is first used, so that `sparsekit --help` is quick.
_HOMES = {
    "accelerate": ".api",
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
    "reconstruct": ".updates.reconstruction",
    "update_step": ".updates.step",
}

# Names that are modules.
_MODULES = {
    "callbacks": ".training.callbacks",
    "criteria": ".criteria",
    "schedules": ".schedules",
    "updates": ".updates",
}

__all__ = [
    "MaskConstraint",
    "accelerate",
    "callbacks",
    "criteria",
    "freeze",
    "load",
    "masked",
    "masks_of",
    "prune",
    "reconstruct",
    "report",
    "retrain",
    "save",
    "schedules",
    "strip",
    "train_step",
    "update_step",
    "updates",
]
__version__ = "0.1.0"


def __getattr__(name: str):
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name], __name__), name)
    if name in _MODULES:
        return importlib.import_module(_MODULES[name], __name__)
    raise AttributeError(f"module 'sparsekit' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
