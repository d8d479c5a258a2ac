"""Training data named on the command line: an .npz, a folder of images, or a function of the user's own."""

from __future__ import annotations

import contextlib
import importlib
import io
import math
import sys
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .errors import DataError

PIXELS = {"raw": "0 to 255", "unit": "0 to 1", "signed": "-1 to 1"}
_FORMS = (
    "give an .npz with arrays x and y, a folder with one folder of images per class, or module:function "
    "(a function without arguments that returns what fit takes)"
)


@dataclass(frozen=True)
class Source:
    """Where data comes from, checked as far as that goes without loading it.

    Args:
        kind: `"npz"`, `"folder"` or `"function"`.
        name: path, or `module:function`.
    """

    kind: str
    name: str


@dataclass(frozen=True)
class Data:
    """Loaded data.

    Args:
        fit: what fit takes: `(x, y)`, `(x, y, sample_weight)`, a dataset, ...
        batched: whether it comes in batches, so that fit takes no batch_size.
        text: one line that says what it is.
    """

    fit: Any
    batched: bool
    text: str


@dataclass(frozen=True)
class Options:
    """How data is turned into what the model takes.

    Args:
        loss: the loss that the model is trained with, as an object, function or name; None if unknown.
        batch_size: images in a batch.
        pixels: `"raw"`, `"unit"` or `"signed"` (see `PIXELS`); None decides by the model.
        image_size: height and width, for a model that takes images of any size.
        seed: seed of the order of the images and of the split.
    """

    loss: Any = None
    batch_size: int = 32
    pixels: str | None = None
    image_size: tuple[int, int] | None = None
    seed: int = 0


def find(spec: str) -> Source:
    """Decide what a data argument names.

    Raises:
        DataError: if it names nothing that is there.
    """
    path = Path(spec)
    if path.is_dir():
        return Source("folder", spec)
    if path.suffix == ".npz":
        if not path.is_file():
            raise DataError(f"There is no data file '{spec}'; {_FORMS}.")
        return Source("npz", spec)
    module, colon, function = spec.partition(":")
    if colon and function.isidentifier() and all(part.isidentifier() for part in module.split(".")):
        return Source("function", spec)
    state = "is no form of data that can be read" if path.exists() else "is not there"
    raise DataError(f"'{spec}' {state}; {_FORMS}.")


def load(source: Source, model: Any, flavour: Any, options: Options) -> Data:
    """Load data and check that it fits the model.

    Raises:
        DataError: if it cannot be read or does not fit.
    """
    if source.kind == "folder":
        return _folder(source.name, model, flavour, options)[0]
    return _arrays_or_else(source, model, options)


def load_split(source: Source, fraction: float, model: Any, flavour: Any, options: Options) -> tuple[Data, Data]:
    """Load data and hold a part of it back for validation, chosen by the seed.

    Args:
        fraction: share that is held back, in (0, 1).

    Returns:
        `(data to train on, data to validate with)`.
    """
    if source.kind == "folder":
        train, held = _folder(source.name, model, flavour, options, fraction)
        return train, held
    data = _arrays_or_else(source, model, options)
    if data.batched:
        raise DataError(
            f"'{source.name}' returns {type(data.fit).__name__}, which cannot be split; give --validation DATA instead "
            "of a fraction."
        )
    count = len(data.fit[0])
    held_back = math.ceil(count * fraction)
    if held_back >= count:
        raise DataError(f"--validation {fraction} leaves nothing of {count} samples to train on; give a smaller one.")
    order = np.random.default_rng(options.seed).permutation(count)
    parts = []
    for chosen, what in ((order[held_back:], "to train on"), (order[:held_back], "to validate with")):
        arrays = tuple(array[chosen] for array in data.fit)
        parts.append(Data(arrays, False, f"{len(chosen):,} samples of {source.name} {what}"))
    return parts[0], parts[1]


def _arrays_or_else(source: Source, model: Any, options: Options) -> Data:
    value = _read_npz(source.name) if source.kind == "npz" else _call(source.name)
    if isinstance(value, list):
        value = tuple(value)
    if isinstance(value, tuple) and all(isinstance(part, np.ndarray) for part in value):
        arrays = check_arrays(value, model, options, source.name)
        return Data(arrays, False, f"{len(arrays[0]):,} samples of {source.name}")
    if isinstance(value, tuple) and 2 <= len(value) <= 3:
        return Data(value, False, source.name)
    _check_dataset(value, model, source.name)
    return Data(value, True, source.name)


def _read_npz(name: str) -> tuple[np.ndarray, ...]:
    # np.load takes whatever it does not know for a pickle and says so.
    if not zipfile.is_zipfile(name):
        raise DataError(f"'{name}' is no .npz, whatever its name says; write one with np.savez(path, x=x, y=y).")
    try:
        with np.load(name, allow_pickle=False) as file:
            if "x" not in file or "y" not in file:
                listed = ", ".join(file.files) or "nothing"
                raise DataError(
                    f"'{name}' holds {listed}; it needs arrays named x and y (and, if wanted, sample_weight): "
                    "np.savez(path, x=x, y=y)."
                )
            return tuple(file[key] for key in ("x", "y", "sample_weight") if key in file)
    except DataError:
        raise
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        hint = "arrays of objects are not read, since they can run code" if "pickle" in str(error) else str(error)
        raise DataError(f"'{name}' cannot be read as .npz: {hint}.") from error


def _call(name: str) -> Any:
    value = call_or_take(name)
    if value is None:
        raise DataError(f"{name}() returned None; it must return what fit takes, for example (x, y).")
    return value


def call_or_take(name: str) -> Any:
    """What `module:name` is; if it is a function, what it returns. Modules of the current folder come first.

    Raises:
        DataError: if there is no such thing, or if the user's code fails.
    """
    module_name, _, attribute = name.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not module_name.startswith(error.name):
            raise DataError(f"'{module_name}' needs the module '{error.name}', which is not installed.") from error
        raise DataError(
            f"There is no module '{module_name}' here or among the installed ones; run the command in the folder of "
            f"{module_name.split('.')[0]}.py."
        ) from error
    except Exception as error:
        raise DataError(f"'{module_name}' cannot be imported: {type(error).__name__}: {error}.") from error
    if not hasattr(module, attribute):
        here = [key for key in vars(module) if not key.startswith("_")]
        raise DataError(f"'{module_name}' holds no '{attribute}'; it holds {', '.join(here[:8]) or 'nothing'}.")
    value = getattr(module, attribute)
    if not callable(value):
        return value
    try:
        return value()
    except Exception as error:
        raise DataError(f"{name}() failed: {type(error).__name__}: {error}.") from error


def check_arrays(arrays: Sequence[np.ndarray], model: Any, options: Options, name: str) -> tuple[np.ndarray, ...]:
    """Check arrays against a model of one input and one output, and give them the types that it takes.

    Integer labels become one-hot rows where the loss wants those.

    Raises:
        DataError: if a shape or a label does not fit, naming both sides.
    """
    if not 2 <= len(arrays) <= 3:
        raise DataError(f"{name} gives {len(arrays)} arrays; give (x, y) or (x, y, sample_weight).")
    x, y = arrays[0], arrays[1]
    for what, array in zip(("x", "y", "sample_weight"), arrays, strict=False):
        if array.dtype.kind not in "biuf":
            raise DataError(f"{what} of {name} has dtype {array.dtype}; it must hold numbers.")
        if array.ndim and not len(array):
            raise DataError(f"{what} of {name} has shape {array.shape}, which is no sample at all; give at least one.")
        if array.ndim == 0 or x.ndim == 0 or len(array) != len(x):
            lengths = ", ".join(str(a.shape) for a in arrays)
            raise DataError(f"The arrays of {name} have shapes {lengths}; they must hold the same number of samples.")
    shape = input_shape(model)
    _check_shape("x", x.shape, shape, name)
    if options.pixels is not None:
        x = scaled(x.astype(np.float32), options.pixels)
    elif (x.dtype.kind in "biu" and _takes_floats(model)) or x.dtype == np.float64:
        x = x.astype(np.float32)
    return (x, _labels(y, model, options.loss, name), *arrays[2:])


def _labels(y: np.ndarray, model: Any, loss: Any, name: str) -> np.ndarray:
    outputs = output_shape(model)
    classes = outputs[-1] if len(outputs) > 1 else None
    mode = label_mode(loss)
    flat = y.reshape(len(y)) if y.ndim == 2 and y.shape[1] == 1 else y
    if mode == "int" and len(outputs) == 2 and classes is not None:
        if flat.ndim != 1:
            raise DataError(
                f"y of {name} has shape {y.shape}; the loss {loss_name(loss)} takes one integer a sample: give "
                "y.argmax(-1), or --loss categorical_crossentropy."
            )
        if flat.min() < 0 or flat.max() >= classes:
            raise DataError(
                f"y of {name} holds labels {flat.min():g} to {flat.max():g}; the model has {classes} outputs, so they "
                f"must be 0 to {classes - 1}."
            )
        return flat.astype(np.int64)
    if mode == "categorical" and flat.ndim == 1 and len(outputs) == 2 and classes is not None and classes > 1:
        if (flat.dtype.kind == "f" and (flat != np.floor(flat)).any()) or flat.min() < 0 or flat.max() >= classes:
            raise DataError(
                f"y of {name} has shape {y.shape} with values {flat.min():g} to {flat.max():g}; the model needs "
                f"(samples, {classes}), or class numbers 0 to {classes - 1}."
            )
        return np.eye(classes, dtype=np.float32)[flat.astype(np.int64)]
    if mode == "int":
        return y
    if y.ndim == 1 and outputs[1:] == (1,):
        return y.astype(np.float32)[:, None]
    _check_shape("y", y.shape, outputs, name)
    return y.astype(np.float32) if y.dtype.kind in "biu" or y.dtype == np.float64 else y


def _check_shape(what: str, shape: tuple[int | None, ...], wanted: tuple[int | None, ...], name: str) -> None:
    fits = len(shape) == len(wanted) and all(w is None or w == s for s, w in zip(shape[1:], wanted[1:], strict=True))
    if not fits:
        needs = "(" + ", ".join(["samples", *("any" if n is None else str(n) for n in wanted[1:])]) + ")"
        hint = ""
        if wanted[-1] == 1 and len(shape) == len(wanted) - 1:
            hint = f"; add the last axis: {what}[..., None]"
        elif math.prod(n or 0 for n in shape[1:]) == math.prod(n or 0 for n in wanted[1:]):
            hint = f"; reshape it: {what}.reshape(-1, {', '.join(map(str, wanted[1:]))})"
        raise DataError(f"{what} of {name} has shape {tuple(shape)}; the model takes {needs}{hint}.")


def _check_dataset(value: Any, model: Any, name: str) -> None:
    """Compare the shapes that a tf.data.Dataset announces; other iterables show theirs only in fit."""
    spec = getattr(value, "element_spec", None)
    if not isinstance(spec, tuple) or not hasattr(spec[0], "shape") or not isinstance(model.input_shape, tuple):
        return
    shape = spec[0].shape
    if shape.rank is not None and (
        shape.rank != len(model.input_shape) or not shape[1:].is_compatible_with(model.input_shape[1:])
    ):
        raise DataError(
            f"The batches of {name} have shape {tuple(shape)}; the model takes {model.input_shape}"
            + ("; batch the dataset first: dataset.batch(32)." if shape.rank == len(model.input_shape) - 1 else ".")
        )


def input_shape(model: Any) -> tuple[int | None, ...]:
    """Shape of the only input of a model, with None for the batch axis.

    Raises:
        DataError: if it has several, or never saw one.
    """
    return _one_shape(model, "input")


def output_shape(model: Any) -> tuple[int | None, ...]:
    return _one_shape(model, "output")


def _one_shape(model: Any, side: str) -> tuple[int | None, ...]:
    try:
        shape = getattr(model, f"{side}_shape")
    except (AttributeError, RuntimeError) as error:
        raise DataError(
            f"The model '{model.name}' does not say what its {side} is; give the data as module:function that returns "
            "a tf.data.Dataset."
        ) from error
    if isinstance(shape, list) and len(shape) == 1:
        shape = shape[0]
    if isinstance(shape, (list, dict)) or (shape and isinstance(shape[0], (list, tuple))):
        raise DataError(
            f"The model '{model.name}' has {len(shape)} {side}s; give the data as module:function that returns a "
            "tf.data.Dataset."
        )
    return tuple(shape)


def _takes_floats(model: Any) -> bool:
    inputs = getattr(model, "inputs", None) or []
    return all("float" in str(getattr(tensor, "dtype", "float32")) for tensor in inputs)


def loss_name(loss: Any) -> str:
    """Name of a loss given as a string, function or object, in snake case."""
    if isinstance(loss, str):
        name = loss
    else:
        name = getattr(loss, "name", None) or getattr(loss, "__name__", None) or type(loss).__name__
    return "".join("_" + c.lower() if c.isupper() else c for c in name).lstrip("_")


def label_mode(loss: Any) -> str | None:
    """What a loss compares the output with: `"int"` class numbers, `"categorical"` rows, `"binary"`, None unknown."""
    if loss is None or isinstance(loss, (list, tuple, dict)):
        return None
    name = loss_name(loss)
    if name.startswith("sparse"):
        return "int"
    if name.startswith("categorical"):
        return "categorical"
    return "binary" if name.startswith("binary") else "other"


def _folder(name: str, model: Any, flavour: Any, options: Options, fraction: float | None = None) -> tuple[Data, Data]:
    classes = sorted(path.name for path in Path(name).iterdir() if path.is_dir() and not path.name.startswith("."))
    if len(classes) < 2:
        raise DataError(f"'{name}' holds {len(classes)} folders; it needs one folder of images for each class.")
    shape, outputs = input_shape(model), output_shape(model)
    if len(shape) != 4 or shape[3] not in (1, 3, 4):
        raise DataError(f"The model takes {shape}, which are no images; give the data as .npz or module:function.")
    size = options.image_size or shape[1:3]
    if None in size:
        raise DataError("The model takes images of any size; say which with --image-size HEIGHTxWIDTH.")
    _check_shape("An image", (0, *size, shape[3]), shape, f"--image-size {size[0]}x{size[1]}")
    mode = label_mode(options.loss)
    if mode is None:
        raise DataError("The labels of a folder depend on the loss, which the file does not name; give --loss.")
    units = outputs[-1]
    if mode in ("binary", "other") and units == 1:
        mode, wanted = "binary", 2
    else:
        mode, wanted = ("int" if mode == "int" else "categorical"), units
    if len(classes) != wanted:
        raise DataError(
            f"'{name}' holds {len(classes)} classes ({', '.join(classes[:6])}{', …' if len(classes) > 6 else ''}) and "
            f"the model tells {wanted} apart; they must be as many."
        )
    pixels = options.pixels or ("raw" if _scales_itself(flavour, model) else "unit")
    sets = []
    for subset in (None,) if fraction is None else ("training", "validation"):
        try:
            # Keras prints what it finds; the caller's console says it once, in its own words. The order is shuffled for
            # both parts: Keras shuffles before it splits, and two orders would let the parts overlap.
            with contextlib.redirect_stdout(io.StringIO()):
                images = flavour.keras.utils.image_dataset_from_directory(
                    name, label_mode=mode, color_mode={1: "grayscale", 3: "rgb", 4: "rgba"}[shape[3]],
                    image_size=size, batch_size=options.batch_size, seed=options.seed,
                    validation_split=fraction, subset=subset,
                )  # fmt: skip
        except ValueError as error:
            raise DataError(f"'{name}' cannot be read as images: {str(error).splitlines()[0]}") from error
        _check_images(images.file_paths, shape[3])
        count = len(images.file_paths)
        ready = images.map(lambda x, y: (scaled(x, pixels), y), num_parallel_calls=-1).prefetch(2)
        what = {"training": " to train on", "validation": " to validate with"}.get(subset or "", "")
        text = f"{count:,} images{what} in {len(classes)} classes, {size[0]}x{size[1]}, pixels from {PIXELS[pixels]}"
        sets.append(Data(ready, True, text))
    return sets[0], sets[-1]


def _check_images(paths: Sequence[str], channels: int) -> None:
    """Decode each image once: one that cannot be read would end the run in the middle of an epoch, without its name."""
    import tensorflow as tf

    def read(path: Any) -> Any:
        image = tf.io.decode_image(tf.io.read_file(path), channels=channels, expand_animations=False)
        return tf.shape(image)

    good = 0
    try:
        for _ in tf.data.Dataset.from_tensor_slices(list(paths)).map(read, num_parallel_calls=-1, deterministic=True):
            good += 1
    except tf.errors.OpError as error:
        raise DataError(
            f"'{paths[good]}' cannot be read as an image with {channels} channels; mend the file or take it away."
        ) from error


def _scales_itself(flavour: Any, model: Any) -> bool:
    """Whether the model brings its own scaling of pixels as one of its first layers."""
    first = [type(layer).__name__ for layer in flavour.layers(model) if layer is not model][:4]
    return any(name in ("Rescaling", "Normalization") for name in first)


def scaled(x: Any, pixels: str) -> Any:
    """Pixels of 0 to 255 as the model wants them."""
    if pixels == "raw":
        return x
    return x / 255.0 if pixels == "unit" else x / 127.5 - 1.0
