"""Find the classes of a kind by name. A class joins by existing: subclass the kind and give it a `name`."""

from __future__ import annotations

from typing import TypeVar

from .errors import ArgumentError

T = TypeVar("T")


def classes(kind: type[T]) -> dict[str, type[T]]:
    """All named classes below `kind`, by name."""
    found: dict[str, type[T]] = {}
    for child in kind.__subclasses__():
        name = child.__dict__.get("name")
        if name is not None:
            found[name] = child
        found.update(classes(child))
    return found


def resolve(kind: type[T], given: str | T, argument: str) -> T:
    """Turn a name into an object of `kind` with its default settings; pass an object through.

    Raises:
        ArgumentError: for an unknown name or another type, naming what is known.
    """
    if isinstance(given, kind):
        return given
    known = classes(kind)
    if isinstance(given, str) and given in known:
        return known[given]()
    raise ArgumentError(
        f"{argument}={given!r} is not known; give one of {', '.join(sorted(known))} or a {kind.__name__} object."
    )
