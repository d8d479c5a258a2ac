"""The command line: `sparsekit prune|retrain|inspect|engine|demo`. Only reads arguments; the work is in commands.py."""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Sequence
from typing import Any

from . import __version__
from .console import import_tensorflow, make_console, plain_warnings
from .criteria import Criterion
from .errors import (
    ArgumentError,
    DataError,
    EngineError,
    FileError,
    MaskError,
    ModelTypeError,
    NonFiniteError,
    NothingToPruneError,
    OutputError,
    SparsekitError,
    ViolationError,
)
from .registry import classes

OK, UNEXPECTED, BAD_ARGUMENTS, BAD_INPUT, BAD_OUTPUT, BAD_DATA, BAD_MODEL, NO_ENGINE = range(8)
INTERRUPTED = 130

_EXIT_CODES = """\
exit codes:
  0  done
  1  something unexpected; run again with --debug to see all of it
  2  an argument is missing or has a value that cannot be used
  3  the input is not there, is no model file, is damaged, or holds weights only
  4  the output is there already (see --force) or cannot be written
  5  the data cannot be read or does not fit the model
  6  the model cannot be pruned or retrained: nothing to prune, NaN in a weight,
     masks that do not fit
  7  the sparse engine cannot be built
  130  interrupted
"""
_DATA = """\
DATA is one of
  digits.npz       arrays x and y (and sample_weight, if wanted), taken as they are
  images/          one folder of images per class, classes in alphabetical order;
                   the model decides size and channels, the loss the kind of
                   labels; pixels are scaled to 0..1 unless the model scales them
                   itself (see --pixels)
  module:function  a function of your own without arguments that returns what
                   fit takes
"""
# What retraining goes by, with what holds if nothing is said; `_MEASURING` matters to a mere validation too.
_TRAINING: dict[str, Any] = {
    "epochs": 1,
    "batch_size": 32,
    "loss": None,
    "optimizer": None,
    "learning_rate": None,
    "metrics": None,
    "enforce": "gradient",
    "masks": "static",
    "checkpoint_dir": None,
    "pixels": None,
    "image_size": None,
}
_MEASURING = ("batch_size", "loss", "metrics", "pixels", "image_size")
# How the command line spells what errors of the Python calls name.
_SPELLINGS = {
    "model=": "--model MODULE:NAME",
    "custom_objects": "--custom-objects MODULE:NAME",
    "safe=False": "--unsafe",
    "flavour=": "--flavour keras or --flavour tf_keras",
    "call sparsekit.prune(model": "`sparsekit prune` first",
    "sparsekit.strip(model)": "--sparsity above that",
}
_DESCRIPTION = (
    "Prune a saved Keras model, retrain only the weights that are left, and save a\n"
    "plain Keras file in which every pruned weight is exactly zero."
)


_CODES: tuple[tuple[tuple[type[BaseException], ...], int], ...] = (
    ((OutputError,), BAD_OUTPUT),
    ((FileError,), BAD_INPUT),
    ((DataError,), BAD_DATA),
    ((NothingToPruneError, NonFiniteError, MaskError, ViolationError, ModelTypeError), BAD_MODEL),
    ((EngineError,), NO_ENGINE),
    ((ArgumentError,), BAD_ARGUMENTS),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: the words after the program's name; by default those of the process.

    Returns:
        The exit code.
    """
    args = build_parser().parse_args(arguments)
    errors = make_console(stderr=True)
    kept = getattr(args, "checkpoint_dir", None)
    try:
        _settle(args)
        with plain_warnings(errors, args.debug):
            _run(args)
        return OK
    except KeyboardInterrupt:
        state = "no output was written."
        if kept is not None:
            state += f" What the run in {kept} had saved is there: the same command goes on from it."
        errors.print(f"interrupted; {state}", markup=False)
        return INTERRUPTED
    except Exception as error:
        if args.debug:
            traceback.print_exc()
        errors.print(f"sparsekit: {_sentence(error)}", markup=False)
        return next((code for kinds, code in _CODES if isinstance(error, kinds)), UNEXPECTED)


def _settle(args: argparse.Namespace) -> None:
    """Refuse options that would have no effect, and give the others their defaults."""
    given = vars(args)
    if args.command == "prune" and args.data is None:
        measured = args.validation is not None
        unused = [name for name in _TRAINING if given[name] is not None and not (measured and name in _MEASURING)]
        if unused:
            option = f"--{unused[0].replace('_', '-')}"
            also = ", or --validation DATA to measure only" if unused[0] in _MEASURING else ""
            raise ArgumentError(f"{option} has no effect without retraining; give --retrain DATA too{also}.")
    for name, value in _TRAINING.items():
        if name in given and given[name] is None:
            setattr(args, name, value)


def _run(args: argparse.Namespace) -> None:
    console = make_console()
    if args.command == "demo":
        import_tensorflow(args.debug)
        from .demo import run_demo

        run_demo(args, console)
        return
    from . import commands

    getattr(commands, f"run_{args.command}")(args, console)


def _sentence(error: Exception) -> str:
    if isinstance(error, SparsekitError):
        text = str(error)
        here = [option for word, option in _SPELLINGS.items() if word in text and option.split()[0] not in text]
        return f"{text} On the command line: {', '.join(here)}." if here else text
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    first = lines[0] if lines else "no message"
    return f"{type(error).__name__}: {first[:400]} (--debug shows all of it)"


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands; needs no TensorFlow, so that `--help` is quick."""
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--debug", action="store_true", help="show stack traces and what the libraries below have to say"
    )
    parser = argparse.ArgumentParser(
        prog="sparsekit",
        description=_DESCRIPTION,
        epilog=f"`sparsekit COMMAND --help` says more about each command.\n\n{_EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"sparsekit {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    def command(name: str, text: str, epilog: str, usage: str) -> argparse.ArgumentParser:
        return commands.add_parser(
            name,
            usage=f"sparsekit {name} {usage} [options]",
            help=text.replace("%", "%%"),
            description=text[0].upper() + text[1:] + ".",
            epilog=f"{epilog}\n{_EXIT_CODES}",
            parents=[common],
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    example = "sparsekit prune model.h5 pruned.h5 --sparsity 0.9 \\\n    --retrain digits.npz --epochs 3"
    prune = command(
        "prune",
        "prune a saved model, and retrain it if data is given",
        f"{_DATA}\nexample:\n  {example}\n",
        "IN.h5 OUT.h5 [--sparsity FRACTION] [--retrain DATA --epochs N]",
    )
    _files(prune)
    _pruning(prune)
    _training(prune, "--retrain", required=False)
    _outputs(prune)

    example = "sparsekit retrain pruned.h5 better.h5 \\\n    --data images/ --epochs 5 --validation 0.1"
    retrain = command(
        "retrain",
        "train what is left of a pruned model; its zeros stay zero",
        f"The masks are those in the file, or else the zeros of its weights.\n\n{_DATA}\nexample:\n  {example}\n",
        "IN.h5 OUT.h5 --data DATA [--epochs N]",
    )
    _files(retrain)
    _training(retrain, "--data", required=True)
    _outputs(retrain)

    inspect = command("inspect", "say what a model file holds, weight by weight", "", "FILE")
    inspect.add_argument("input", metavar="FILE", help="a model file: .h5, .hdf5 or .keras")
    _opening(inspect)
    inspect.add_argument("--report", metavar="FILE.csv", help="write one line per weight to this file")
    inspect.add_argument("--plots", metavar="DIR", help="draw where the zeros are into this folder")
    inspect.add_argument("--force", action="store_true", help="overwrite the file of --report")

    engine = command(
        "engine", "build, describe or delete the compiled sparse kernels", "", "(--build | --info | --clean)"
    )
    what = engine.add_mutually_exclusive_group(required=True)
    what.add_argument("--build", action="store_true", help="compile the kernels now, with the machine's own compiler")
    what.add_argument("--info", action="store_true", help="say what would be compiled, with what, and where it lies")
    what.add_argument("--clean", action="store_true", help="delete what was compiled")

    demo = command(
        "demo",
        "train a small network on real digits, prune it to 90 %, retrain it, show what happened",
        "Needs no file of yours and no network; takes about two minutes.\n",
        "[--out DIR] [--quick]",
    )
    demo.add_argument("--out", metavar="DIR", default="demo_output", help="where files go (default: %(default)s)")
    demo.add_argument("--quick", action="store_true", help="fewer digits and epochs: seconds instead of minutes")
    demo.add_argument("--sparsity", type=_fraction, default=0.9, help="share of zeros (default: %(default)s)")
    demo.add_argument("--flavour", choices=("keras", "tf_keras"), default="keras", help="Keras 3 (default) or tf_keras")
    _holding(demo)
    return parser


def _files(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("input", metavar="IN.h5", help="the model: .h5, .hdf5 or .keras; it is not changed")
    parser.add_argument(
        "output",
        metavar="OUT.h5",
        help="where to save; .keras and .sparse.h5 (compressed, for sparsekit alone) work too",
    )
    _opening(parser)


def _opening(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("opening the file")
    group.add_argument(
        "--flavour", choices=("keras", "tf_keras"), help="open with Keras 3 or tf_keras (default: decided by the file)"
    )
    group.add_argument(
        "--model", metavar="MODULE:NAME", help="for a file of weights only: a function of yours that builds the model"
    )
    group.add_argument("--unsafe", action="store_true", help="allow a file that brings Python code along; it is run")
    group.add_argument(
        "--custom-objects",
        metavar="MODULE:NAME",
        help="a dictionary (or a function that returns it) of your own layers",
    )


def _pruning(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what is pruned")
    group.add_argument(
        "--sparsity", type=_fraction, default=0.8, help="share of zeros afterwards, in [0, 1) (default: %(default)s)"
    )
    names = ", ".join(sorted(classes(Criterion)))
    group.add_argument("--criterion", default="magnitude", help=f"{names} (default: %(default)s)")
    group.add_argument(
        "--scope", default="layer", help="layer: the same share in each; global: one ranking (default: %(default)s)"
    )
    selector = "weights whose path matches, for example 'block1/*', or of a layer class, for example Conv2D"
    again = "; may be given again"
    group.add_argument("--include", action="append", metavar="GLOB", help=f"only {selector}{again}")
    group.add_argument("--exclude", action="append", metavar="GLOB", help=f"not {selector}{again}")
    group.add_argument(
        "--min-keep", type=_whole, default=1, metavar="N", help="keep at least N values in each weight (default: 1)"
    )


def _training(parser: argparse.ArgumentParser, flag: str, required: bool) -> None:
    group = parser.add_argument_group("retraining")
    group.add_argument(flag, dest="data", metavar="DATA", required=required, help="what to train on, see below")
    group.add_argument("--epochs", type=_positive, help=f"passes over the data (default: {_TRAINING['epochs']})")
    group.add_argument("--batch-size", type=_positive, metavar="N", help=f"(default: {_TRAINING['batch_size']})")
    group.add_argument(
        "--validation", metavar="DATA", help="data to measure with before and after; or a share of DATA, such as 0.1"
    )
    group.add_argument("--loss", metavar="NAME", help="for example categorical_crossentropy (default: from the file)")
    group.add_argument("--optimizer", metavar="NAME", help="for example adam (default: from the file)")
    group.add_argument("--learning-rate", type=_rate, metavar="RATE", help="(default: from the file)")
    group.add_argument(
        "--metrics",
        action="append",
        metavar="NAME",
        help="for example accuracy; may be given again (default: from the file)",
    )
    _holding(group)
    group.add_argument(
        "--checkpoint-dir",
        metavar="DIR",
        help="keep the state of the run here after each epoch; the same command after a kill goes on from there",
    )
    group.add_argument("--pixels", choices=("raw", "unit", "signed"), help="pixels as 0..255, 0..1 or -1..1")
    group.add_argument(
        "--image-size", type=_size, metavar="HxW", help="height and width, for a model that takes any size"
    )
    group.add_argument(
        "--seed", type=_whole, default=0, help="seed of random criteria, weights, order and split (default: 0)"
    )


def _holding(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--enforce",
        choices=("gradient", "constraint"),
        help=f"how zeros are held: masked gradients or a constraint on the weight (default: {_TRAINING['enforce']})",
    )
    group.add_argument(
        "--masks",
        choices=("static", "dynamic"),
        help=f"dynamic: a weight that becomes exactly zero stays so from then on (default: {_TRAINING['masks']})",
    )


def _outputs(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what is written")
    group.add_argument("--force", action="store_true", help="overwrite files that are there")
    group.add_argument("--no-optimizer", action="store_true", help="leave the optimizer's state out: a smaller file")
    group.add_argument("--report", metavar="FILE.csv", help="write one line per weight to this file")
    group.add_argument("--plots", metavar="DIR", help="draw where the zeros are into this folder")


def _fraction(text: str) -> float:
    value = _number(text)
    if not 0 <= value < 1:
        hint = f"; did you mean {value / 100:g}?" if 1 < value < 100 else ""
        raise argparse.ArgumentTypeError(f"{text} must be a fraction in [0, 1){hint}")
    return value


def _rate(text: str) -> float:
    value = _number(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} must be a number above 0")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        hint = ""
        if text.endswith("%") and text[:-1].replace(".", "", 1).isdecimal():
            hint = f"; did you mean {float(text[:-1]) / 100:g}?"
        raise argparse.ArgumentTypeError(f"'{text}' is no number{hint}") from None


def _whole(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"'{text}' is no whole number of at least 0")
    return int(text)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is no whole number of at least 1")
    return int(text)


def _size(text: str) -> tuple[int, int]:
    height, _, width = text.lower().partition("x")
    return _positive(height), _positive(width)


if __name__ == "__main__":
    sys.exit(main())
