"""Read the JSON that a file brings along: the one place that says what is let in."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from ..errors import FileError

# A model inside a model takes four levels. Deeper ones than this would end in a RecursionError, here or inside Keras.
_DEEPEST = 200


def parsed(text: str | bytes, what: str, path: Path) -> Any:
    """The value of a JSON text.

    Args:
        text: as the file has it.
        what: what it is, for messages.
        path: the file, for messages.

    Raises:
        FileError: if it is no JSON, or nested too deeply.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FileError(f"The {what} in '{path}' is no valid JSON; the file is damaged.") from error
    level = [value]
    for _ in range(_DEEPEST):
        level = [inner for one in level for inner in _inside(one)]
        if not level:
            return value
    raise FileError(f"The {what} in '{path}' is nested too deeply; the file is damaged.")


def parsed_dict(text: str | bytes, what: str, path: Path) -> dict[str, Any]:
    """The same, of a text that has to be a dictionary."""
    value = parsed(text, what, path)
    if not isinstance(value, dict):
        raise FileError(f"The {what} in '{path}' is no dictionary; the file is damaged.")
    return value


def version(text: Any) -> str:
    """The version of a Keras; `""` for anything that is none."""
    return text if isinstance(text, str) and re.fullmatch(r"\d{1,4}(\.\w[\w.+-]{0,40})?", text, re.ASCII) else ""


def _inside(value: Any) -> Any:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
