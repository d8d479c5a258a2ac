"""What can go wrong, each as one class that is also the built-in error a caller would expect."""

_LONGEST = 1500


class SparsekitError(Exception):
    """Base of every error that sparsekit raises on purpose."""


class ArgumentError(SparsekitError, ValueError):
    """An argument has a value that cannot be used."""


class ModelTypeError(SparsekitError, TypeError):
    """The object given is not a model (or optimizer) that sparsekit can work on."""


class MaskError(SparsekitError, ValueError):
    """A mask does not fit: wrong shape, dtype, or unknown path."""


class NothingToPruneError(SparsekitError, ValueError):
    """A model or a selection holds no weight that can be pruned."""


class NonFiniteError(SparsekitError, ValueError):
    """A weight holds NaN or infinity, so that it cannot be ranked."""


class ViolationError(SparsekitError, ValueError):
    """A weight that a mask holds at zero is not zero."""


class FileError(SparsekitError, ValueError):
    """A file cannot be read or written. What the file says of itself is quoted in one line and not at any length."""

    def __init__(self, message: str = "") -> None:
        if len(message) > _LONGEST:
            message = f"{message[: _LONGEST // 2]} ... {message[-_LONGEST // 2 :]}"
        super().__init__("".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in message))


class OutputError(FileError):
    """A file cannot be written where the command line was told to."""


class DataError(SparsekitError, ValueError):
    """Training data cannot be read or does not fit the model."""


class EngineError(SparsekitError, ValueError):
    """The sparse engine was asked for by force and cannot run."""


class SparsekitWarning(UserWarning):
    """Base of every warning that sparsekit gives."""


class LayerCollapseWarning(SparsekitWarning):
    """A ranking would have emptied a weight (nearly) and was stopped at `min_keep`."""


class ScheduleWarning(SparsekitWarning):
    """A run ended before its schedule did, so the target was not reached."""
