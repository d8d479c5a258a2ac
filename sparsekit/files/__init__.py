"""Open and write model files."""

from .loading import load
from .saving import save

__all__ = ["load", "save"]
