"""Open, write and look into model files."""

from .inspection import FileInfo, inspect_file
from .loading import load
from .saving import save

__all__ = ["FileInfo", "inspect_file", "load", "save"]
