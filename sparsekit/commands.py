"""The commands of the command line, each the same calls that a user's own script would make."""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
from rich.console import Console

from . import console as show
from . import data as feeding
from . import onednn
from .errors import ArgumentError, FileError, OutputError, SparsekitError


@dataclass(frozen=True)
class Snapshot:
    """A model at one point of the trip.

    Args:
        report: its weights.
        bytes: size of the file that holds it, as it was at this point, as it is and after gzip; None if it was not
            saved. Kept here since the file may be overwritten later on.
        scores: loss and metrics on the validation data; empty without such data.
        packed: bytes that the model takes as .sparse.h5; None if it was not saved at this point.
    """

    report: Any
    bytes: tuple[int, int] | None
    scores: dict[str, float]
    packed: int | None


def snapshot(
    model: Any, file: Path | None, validation: feeding.Data | None, include_optimizer: bool = True
) -> Snapshot:
    """Look at a model, and measure it if there is data to do so."""
    from .api import report

    size = None if file is None else (file.stat().st_size, show.gzip_size(file))
    packed = None if file is None else sizes_of(model, ".sparse.h5", include_optimizer)[0]
    return Snapshot(report(model), size, {} if validation is None else evaluate(model, validation), packed)


def sizes_of(model: Any, ending: str, include_optimizer: bool) -> tuple[int, int]:
    """Bytes that a model's file takes, as it is and after gzip."""
    from .files import save

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"model{ending}"
        save(model, file, include_optimizer=include_optimizer)
        return file.stat().st_size, show.gzip_size(file)


def evaluate(model: Any, data: feeding.Data) -> dict[str, float]:
    """Loss and metrics of a compiled model on data."""
    if isinstance(data.fit, tuple):
        names = ("x", "y", "sample_weight")
        found = model.evaluate(**dict(zip(names, data.fit, strict=False)), verbose=0, return_dict=True)
    else:
        found = model.evaluate(data.fit, verbose=0, return_dict=True)
    return {name: float(value) for name, value in found.items()}


def comparison_rows(stages: list[Snapshot]) -> dict[str, list[str]]:
    """The rows of the table of before and after."""
    from .reports.report import NOT_FLOATING, percent

    # Seeds and counters are integers and no weights.
    weights = [[row for row in stage.report.rows if row.reason != NOT_FLOATING] for stage in stages]
    rows = {"zeros in prunable weights": [percent(stage.report.overall_sparsity) for stage in stages]}
    if any(stage.report.frozen_kernels for stage in stages):
        rows["the same with layers not trainable"] = [percent(stage.report.kernel_sparsity) for stage in stages]
    rows |= {
        "non-zero values": [f"{sum(row.size - row.zeros for row in one):,}" for one in weights],
        "all values": [f"{sum(row.size for row in one):,}" for one in weights],
        "violations (zeros that came back)": [
            "" if stage.report.status == "no masks" else f"{stage.report.violations:,}" for stage in stages
        ],
    }
    for name in stages[-1].scores:
        rows[f"validation {name}"] = [f"{stage.scores[name]:.4f}" for stage in stages]
    for position, name in enumerate(("file, bytes", "file after gzip, bytes")):
        rows[name] = ["" if stage.bytes is None else f"{stage.bytes[position]:,}" for stage in stages]
    rows["as .sparse.h5, bytes"] = ["" if stage.packed is None else f"{stage.packed:,}" for stage in stages]
    return rows


def run_prune(args: argparse.Namespace, console: Console) -> None:
    """Prune a saved model, retrain it if there is data, save it."""
    from_data = _check_places(args)
    _avoid_crash(args, console)
    show.import_tensorflow(args.debug)
    from .api import prune, report

    model, flavour = _open(args, console)
    train, validation = _load_data(args, model, flavour, from_data, console)
    stages = {"before": snapshot(model, Path(args.input), validation)}
    with show.step(console, f"prune to {100 * args.sparsity:g} % zeros"):
        prune(
            model,
            args.sparsity,
            criterion=args.criterion,
            scope=args.scope,
            include=args.include,
            exclude=args.exclude,
            min_keep=args.min_keep,
            seed=args.seed,
        )
    if train is not None:
        stages["pruned"] = snapshot(model, None, validation)
        _train(args, model, flavour, train, validation, console)
    last = "pruned" if train is None else "retrained"
    _finish(args, model, console)
    stages[last] = snapshot(model, Path(args.output), validation, not args.no_optimizer)
    console.print()
    print(report(model))
    console.print()
    console.print(show.comparison(list(stages), comparison_rows(list(stages.values()))))


def run_retrain(args: argparse.Namespace, console: Console) -> None:
    """Retrain a saved model under its masks and save it."""
    from_data = _check_places(args)
    _avoid_crash(args, console)
    show.import_tensorflow(args.debug)
    from .api import freeze, masks_of, report

    model, flavour = _open(args, console)
    if not masks_of(model):
        freeze(model)
        console.print("masks: read from the zeros of the weights")
    train, validation = _load_data(args, model, flavour, from_data, console)
    assert train is not None
    before = snapshot(model, Path(args.input), validation)
    _train(args, model, flavour, train, validation, console)
    _finish(args, model, console)
    after = snapshot(model, Path(args.output), validation, not args.no_optimizer)
    console.print()
    print(report(model))
    console.print()
    console.print(show.comparison(["before", "retrained"], comparison_rows([before, after])))


def run_inspect(args: argparse.Namespace, console: Console) -> None:
    """Print what a file holds."""
    _check_extras(args)
    _check_input(args)
    show.import_tensorflow(args.debug)
    from .api import report
    from .files import inspect_file

    custom = _custom_objects(args)
    info = inspect_file(args.input, custom_objects=custom)
    for line in _file_lines(info):
        console.print(line, markup=False)
    # The names in a file are not always the paths that --include goes by; those are known once the model is built.
    try:
        if info.problem is not None and args.model is None and not args.unsafe:
            raise FileError(info.problem)
        model, flavour = _open(args, console)
    except SparsekitError:
        if info.weights:
            console.print("\nThe weights as the file calls them:")
            console.print(_file_table(info))
        raise
    console.print(f"  opens as  a {'Keras 3' if flavour.is_keras3 else 'tf_keras'} model", markup=False)
    console.print()
    print(report(model))
    if args.report is not None or args.plots is not None:
        console.print()
        _write_extras(args, model, console)


def _file_lines(info: Any) -> Iterator[str]:
    writer = f", written by Keras {info.keras_version}" if info.keras_version else ""
    yield f"{info.path}: {info.format}{writer}"
    packed = "" if info.gzip_bytes is None else f", {info.gzip_bytes:,} after gzip"
    yield f"  size      {info.raw_bytes:,} bytes{packed}"
    if info.layers:
        kinds = Counter(kind for _, kind in info.layers).most_common()
        yield f"  layers    {len(info.layers)}: {', '.join(f'{count} {kind}' for kind, count in kinds)}"
    yield f"  training  {f'{info.optimizer}, loss {info.loss}' if info.loss else 'the file does not say how'}"
    if info.repairs:
        layers: dict[str, list[str]] = {}
        for repair in info.repairs:
            layers.setdefault(repair.name, []).append(repair.layer)
        listed = "; ".join(f"{name} ({', '.join(where[:4])})" for name, where in layers.items())
        yield f"  repairs   made in memory when it is opened: {listed}"
    yield f"  masks     {f'for {info.masked} weights' if info.masked else 'none in the file'}"


def _file_table(info: Any) -> Any:
    """The weights that can be pruned, with their zeros."""
    from .reports.report import percent

    prunable = [weight for weight in info.weights if weight.prunable]
    rows = {
        weight.name: ("x".join(map(str, weight.shape)), f"{weight.size:,}", percent(weight.sparsity))
        for weight in prunable
    }
    size = sum(weight.size for weight in prunable)
    rows["all prunable"] = ("", f"{size:,}", percent(info.sparsity))
    others = len(info.weights) - len(prunable)
    rows[f"{others} others (biases, scales, statistics)"] = ("", f"{info.parameters - size:,}", "")
    return show.comparison(["shape", "size", "zeros"], rows)


def run_engine(args: argparse.Namespace, console: Console) -> None:
    """Build, describe or delete the compiled kernels."""
    show.import_tensorflow(args.debug)
    from .engine import build

    if args.clean:
        console.print(f"{build.clean()} compiled libraries deleted from {build.cache_dir()}", markup=False)
        return
    if args.build:
        with show.step(console, "build the sparse kernels"):
            path = build.build(verbose=args.debug)
        console.print(str(path), markup=False)
        return
    info = build.info()
    rows = {
        "compiler": info.compiler or "none found",
        "": info.compiler_version or "",
        "TensorFlow": info.tensorflow,
        "sources": ", ".join(info.sources),
        "library": str(info.path) if info.path else "",
        "built": "yes" if info.cached else "no",
        "cache": f"{info.cache_dir} ({info.bytes:,} bytes)",
        "ready": "yes" if info.reason is None else info.reason,
    }
    for name, value in rows.items():
        console.print(f"{name:<12}{value}", markup=False)


def _check_places(args: argparse.Namespace) -> feeding.Source | None:
    """Refuse what cannot work before minutes of work are spent on it, and find the data."""
    output = Path(args.output)
    if not output.name.lower().endswith((".h5", ".hdf5", ".keras")):
        raise OutputError(f"'{output}' has no known ending; give a name in .h5, .hdf5 or .keras.")
    _check_target(output, args.force)
    _check_extras(args)
    _check_input(args)
    if args.data is None:
        if args.validation is not None and _share(args.validation) is not None:
            raise ArgumentError("--validation is a share of the data for retraining; give --retrain DATA too.")
        return None
    return feeding.find(args.data)


def _check_extras(args: argparse.Namespace) -> None:
    if args.report is not None:
        _check_target(Path(args.report), args.force)
    if args.plots is not None:
        folder = Path(args.plots)
        if folder.exists() and not folder.is_dir():
            raise OutputError(f"'{folder}' is a file; give a folder for the pictures.")


def _check_target(target: Path, force: bool) -> None:
    if target.is_dir():
        raise OutputError(f"'{target}' is a folder; give the name of a file.")
    if target.exists() and not force:
        raise OutputError(f"'{target}' exists already; give another name, or --force to overwrite it.")
    if not target.parent.is_dir():
        raise OutputError(f"There is no folder '{target.parent}' for '{target.name}'; create it first.")
    try:
        # What os.access says of a folder does not hold for root, nor in /proc.
        tempfile.TemporaryFile(dir=target.parent).close()
    except OSError as error:
        raise OutputError(
            f"The folder '{target.parent}' cannot be written to ({error.strerror}); give another one."
        ) from error


def _check_input(args: argparse.Namespace) -> None:
    path = Path(args.input)
    if not path.exists():
        raise FileError(f"There is no file '{path}'.")
    if path.is_dir():
        raise FileError(f"'{path}' is a folder; give a model file: .h5, .hdf5 or .keras.")


def _avoid_crash(args: argparse.Namespace, console: Console) -> None:
    note = onednn.avoid_crash(Path(args.input)) if args.data is not None else None
    if note is not None:
        console.print(f"note: {note}", markup=False)


def _open(args: argparse.Namespace, console: Console) -> tuple[Any, Any]:
    from .files import load
    from .flavour import flavour_of

    _check_input(args)
    custom = _custom_objects(args)
    with show.step(console, f"open {args.input}"):
        model = load(
            args.input,
            custom_objects=custom,
            flavour=args.flavour,
            safe=not args.unsafe,
            model=None if args.model is None else feeding.call_or_take(args.model),
        )
    return model, flavour_of(model)


def _custom_objects(args: argparse.Namespace) -> dict[str, Any] | None:
    if args.custom_objects is None:
        return None
    custom = feeding.call_or_take(args.custom_objects)
    if not isinstance(custom, dict):
        raise ArgumentError(
            f"--custom-objects {args.custom_objects} is a {type(custom).__name__}; it must be a dictionary of "
            "name -> class or function."
        )
    return custom


def _load_data(
    args: argparse.Namespace, model: Any, flavour: Any, source: feeding.Source | None, console: Console
) -> tuple[feeding.Data | None, feeding.Data | None]:
    """Settle how the model is trained, then load what it is trained on and measured with."""
    if source is None and args.validation is None:
        return None, None
    _compile(args, model, flavour)
    flavour.keras.utils.set_random_seed(args.seed)
    options = feeding.Options(
        loss=flavour.compile_arguments(model).get("loss"),
        batch_size=args.batch_size,
        pixels=args.pixels,
        image_size=args.image_size,
        seed=args.seed,
    )
    share = None if args.validation is None else _share(args.validation)
    with show.step(console, "read the data"):
        if source is not None and share is not None:
            train, validation = feeding.load_split(source, share, model, flavour, options)
        else:
            train = None if source is None else feeding.load(source, model, flavour, options)
            validation = None
            if args.validation is not None:
                validation = feeding.load(feeding.find(args.validation), model, flavour, options)
    for what, found in (("train on", train), ("measure with", validation)):
        if found is not None:
            console.print(f"  {what}: {found.text}", markup=False)
    return train, validation


def _share(text: str) -> float | None:
    """The fraction that a text is, or None if it is a name."""
    try:
        value = float(text)
    except ValueError:
        return None
    if not 0 < value < 1:
        raise ArgumentError(f"--validation {text} must be a share between 0 and 1, or name data.")
    return value


def _compile(args: argparse.Namespace, model: Any, flavour: Any) -> None:
    """Compile as the arguments say; what they leave open stays as the file had it."""
    compiled = flavour.is_compiled(model)
    given = {
        name: value
        for name, value in (("loss", args.loss), ("optimizer", args.optimizer), ("metrics", args.metrics))
        if value is not None
    }
    if not compiled and "loss" not in given:
        raise ArgumentError(
            f"'{args.input}' does not say how the model was trained; give --loss (and --optimizer, --metrics), "
            "for example --loss sparse_categorical_crossentropy."
        )
    if given:
        before = flavour.compile_arguments(model) if compiled else {"optimizer": "adam"}
        try:
            # compile itself takes any name and fails in the first step.
            flavour.keras.losses.get(args.loss)
            flavour.keras.optimizers.get(args.optimizer or "adam")
            model.compile(**{**before, **given})
        except (ValueError, TypeError) as error:
            raise ArgumentError(f"{given} cannot be used: {str(error).splitlines()[0]}") from error
    if args.learning_rate is not None:
        try:
            model.optimizer.learning_rate = args.learning_rate
        except (TypeError, ValueError) as error:
            raise ArgumentError(
                "The optimizer of the file follows a learning rate schedule; give --optimizer with --learning-rate."
            ) from error


def _train(
    args: argparse.Namespace,
    model: Any,
    flavour: Any,
    train: feeding.Data,
    validation: feeding.Data | None,
    console: Console,
) -> None:
    from .api import retrain

    progress = show.fit_progress(flavour.keras, console, args.epochs, "retrain")
    options: dict[str, Any] = {} if train.batched else {"batch_size": args.batch_size}
    try:
        history = retrain(
            model,
            train.fit,
            epochs=args.epochs,
            masks=args.masks,
            enforce=args.enforce,
            validation_data=None if validation is None else validation.fit,
            callbacks=[progress],
            checkpoint_dir=args.checkpoint_dir,
            seed=args.seed,
            verbose=0,
            **options,
        )
    finally:
        progress.close()
    if args.checkpoint_dir is not None and history.resumed_from is not None:
        epoch, batch = history.resumed_from
        text = f"resumed from epoch {epoch} (batch {batch}) of the run in {args.checkpoint_dir}"
        if epoch >= args.epochs:
            text = f"the run in {args.checkpoint_dir} was finished; there was nothing to train"
        console.print(f"  {text}", markup=False)


def _finish(args: argparse.Namespace, model: Any, console: Console) -> None:
    from .files import save
    from .flavour import flavour_of

    try:
        with show.step(console, f"save {args.output}"):
            save(model, args.output, overwrite=args.force, include_optimizer=not args.no_optimizer)
    except FileError as error:
        raise OutputError(str(error)) from error
    console.print(f"  {opened_by(args, flavour_of(model))}", markup=False)
    _write_extras(args, model, console)


def opened_by(args: argparse.Namespace, flavour: Any) -> str:
    """One line on what opens the output, and how to stay with Keras 2 where the input comes from there."""
    if args.output.lower().endswith(".sparse.h5"):
        return f"sparsekit.load opens it, as a model of {flavour.label}; plain Keras does not"
    line = f"{flavour.label} opens it, without sparsekit"
    if flavour.name != "tf_keras" and _of_keras_2(Path(args.input)):
        line += "; Keras 2, which wrote the input, does not: run with --flavour tf_keras for that"
    return line


def _of_keras_2(path: Path) -> bool:
    if not h5py.is_hdf5(path):
        return False
    with h5py.File(path, "r") as file:
        version = file.attrs.get("keras_version", "")
    return (version.decode() if isinstance(version, bytes) else str(version)).startswith("2.")


def _write_extras(args: argparse.Namespace, model: Any, console: Console) -> None:
    from .api import report
    from .reports.plots import write_plots

    try:
        if args.report is not None:
            report(model).to_csv(args.report)
            console.print(f"wrote {args.report}", markup=False)
        if args.plots is not None:
            for path in write_plots(model, args.plots):
                console.print(f"wrote {path}", markup=False)
    except FileError as error:
        raise OutputError(str(error)) from error
