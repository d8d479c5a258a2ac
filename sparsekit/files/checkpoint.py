"""Train with checkpoints: a run that was killed goes on from where it stood and ends with the same bits.

What goes on bit for bit (on CPU, with `tf.config.experimental.enable_op_determinism()`):

- arrays, shuffled or not: the order of an epoch is drawn from the seed and the number of the epoch;
- a tf.data.Dataset that gives the same elements in the same order each time it is read (shuffled with
  `reshuffle_each_iteration=False`, or not at all): the batches that are done are skipped.

A PyDataset or Sequence goes on at the ends of epochs. A generator cannot be read again and is refused.

A run of other weights, masks, arrays or settings is refused: it would end as what the folder holds, not as itself.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from ..errors import ArgumentError, FileError
from ..flavour import Flavour, flavour_of
from .fingerprint import describe, of_arrays, of_masks, of_saved_weights, of_settings, of_weights
from .run_state import (
    FolderLock,
    RunState,
    best_weights,
    check_same,
    load,
    metric_variables,
    put,
    remembered,
    take,
    variables_of,
    write,
)

STATE = "state.zip"
_PARTS = ("x", "y", "sample_weight")

_logger = logging.getLogger("sparsekit")
# Models whose run was interrupted in this process, with its state: their weights are of no place that was saved.
_interrupted: weakref.WeakKeyDictionary[Any, Path] = weakref.WeakKeyDictionary()


class Checkpoints:
    """A folder in which one run keeps its state: at the end of each epoch, and every so many batches if asked.

    Args:
        folder: made if it is not there.
        every_steps: also save after every so many batches of an epoch.
        seed: seed of the order of array data.

    Raises:
        ArgumentError: for an `every_steps` below 1.
    """

    def __init__(self, folder: str | os.PathLike[str], *, every_steps: int | None = None, seed: int = 0) -> None:
        if every_steps is not None and (isinstance(every_steps, bool) or int(every_steps) != every_steps):
            raise ArgumentError(f"every_steps={every_steps!r} must be a whole number of batches.")
        if every_steps is not None and every_steps < 1:
            raise ArgumentError(f"every_steps={every_steps!r} must be at least 1.")
        self.folder = Path(folder)
        self.every_steps = every_steps
        self.seed = seed

    def fit(
        self,
        model: Any,
        *,
        extra: Mapping[str, Any] | None = None,
        settings: Mapping[str, Any] | None = None,
        around: Callable[[list[Any]], list[Any]] = list,
        looking: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
        **arguments: Any,
    ) -> Any:
        """What `model.fit(**arguments)` does, from where the last run in this folder stopped.

        Args:
            model: a compiled and built model, in the state in which the first run began.
            extra: further variables that steps depend on, in an order that is the same in each run.
            settings: further settings that decide the result, as plain values; `"masks"` says whether they change.
            around: callbacks of the user -> those that fit gets.
            looking: a context in which the variables hold what they should, where they do not while training.
            arguments: those of fit.

        Returns:
            The Keras History of all epochs, those of earlier runs included; its `resumed_from` is `(epochs done,
            batches of the next one done)` where an earlier run was taken up, else None.

        Raises:
            FileError: if another run uses the folder, if its state belongs to another run (other weights, masks, arrays
                or settings, more epochs done than asked for) or is damaged, or if it cannot be written (a full disk);
                the last good checkpoint stays.
            ArgumentError: for data that cannot be taken up again.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise FileError(f"The folder '{self.folder}' cannot be made: {error.strerror}.") from error
        with FolderLock(self.folder):
            for leftover in self.folder.glob(f".*.{STATE}"):
                leftover.unlink(missing_ok=True)
            return _Run(self, model, dict(extra or {}), dict(settings or {}), around, looking, arguments).go()


class _Run:
    """One call of fit."""

    def __init__(
        self,
        checkpoints: Checkpoints,
        model: Any,
        extra: dict[str, Any],
        settings: dict[str, Any],
        around: Callable[[list[Any]], list[Any]],
        looking: Callable[[], contextlib.AbstractContextManager[None]],
        arguments: dict[str, Any],
    ) -> None:
        self.path = checkpoints.folder / STATE
        self.every_steps = checkpoints.every_steps
        self.seed = checkpoints.seed
        self.model = model
        self.flavour: Flavour = flavour_of(model)
        self.extra = extra
        self.around, self.looking = around, looking
        self.epochs = int(arguments.pop("epochs", 1))
        self.first_epoch = int(arguments.pop("initial_epoch", 0))
        self.verbose = arguments.get("verbose", "auto")
        self.callbacks = list(arguments.pop("callbacks", None) or ())
        self.data = _data_of(arguments, checkpoints, self.flavour)
        self.arguments = arguments
        compiled = self.flavour.compile_arguments(model)
        self.plan = self.data.plan | settings | {"seed": self.seed}
        for name, value in (
            ("loss", compiled.get("loss")),
            ("loss_weights", compiled.get("loss_weights")),
            ("class_weight", arguments.get("class_weight")),
        ):
            self.plan[name] = describe(value)
        self.resumed_from: tuple[int, int] | None = None
        self.skipped = self.saved_at = 0

    def go(self) -> Any:
        self.flavour.forget_train_function(self.model)
        try:
            with self.flavour.restorable_randomness(self.model, self.seed) as self.random_states:
                history = self._go()
                self._remember_end()
                return history
        finally:
            self.flavour.forget_train_function(self.model)

    def _go(self) -> Any:
        model, flavour = self.model, self.flavour
        flavour.build_optimizer(model.optimizer, model.trainable_variables)
        state = load(self.path)
        begun = self._marks()
        if state is None:
            state = RunState(epoch=self.first_epoch, plan=self.plan, begun=begun)
        else:
            # Saved with the metrics in it; those are put back once the epoch has begun.
            check_same(self._variables(), state.arrays, self.path)
            self._check_plan(state)
            self._check_marks(state, begun)
            self._check_epochs(state)
            put(self._variables(), state.arrays, self.path)
            state.put_random()
            self.resumed_from = state.epoch, state.batches
            self._say_where(state)
        _interrupted[model] = self.path.resolve()
        self.state = state
        keeper = _keeper(flavour, self)
        callbacks = flavour.callback_list(
            [*self.around(self.callbacks), keeper], model, self.verbose, self.epochs, self.data.batches
        )
        self.data.epoch = state.epoch
        if state.epoch >= self.epochs or state.finished:
            # What fit does after the last epoch: the averages of the weights take their place.
            model.optimizer.finalize_variable_values(model.trainable_variables)
            callbacks.on_train_begin()
            callbacks.on_train_end()
            return self._with_history()
        if state.batches:
            self._finish_epoch(callbacks)
        else:
            self._fit(callbacks, self.data.dataset(0), state.epoch, self.epochs)
        return self._with_history()

    def _finish_epoch(self, callbacks: Any) -> None:
        """Train on what is left of a half epoch, then go on as usual, as one run in the eyes of the callbacks.

        Keras has no way to begin within an epoch, so that this takes two calls of its fit.
        """
        model, epoch = self.model, self.state.epoch
        last = epoch + 1 == self.epochs
        with contextlib.ExitStack() as stack:
            if not last:
                stack.enter_context(_silenced(callbacks, "on_train_end"))
                # It writes the averages over the weights, which belongs to the end of training.
                stack.enter_context(_silenced(model.optimizer, "finalize_variable_values"))
            self._fit(callbacks, self.data.dataset(self.state.batches), epoch, epoch + 1)
        if last:
            return
        if model.stop_training:
            model.optimizer.finalize_variable_values(model.trainable_variables)
            callbacks.on_train_end()
            return
        with _silenced(callbacks, "on_train_begin"):
            self._fit(callbacks, self.data.dataset(0), epoch + 1, self.epochs)

    def _fit(self, callbacks: Any, dataset: Any, first: int, last: int) -> None:
        self.model.fit(dataset, initial_epoch=first, epochs=last, callbacks=callbacks, **self.arguments)

    def _variables(self) -> dict[str, Any]:
        return variables_of(self.model, self.flavour, self.random_states, self.extra)

    def _marks(self) -> dict[str, Any]:
        """What tells this run from another."""
        with self.looking():
            marks = self.data.marks | {"weights": of_weights(self.model)}
            if self.plan.get("masks", "static") == "static":
                marks["masks"] = of_masks(self.model)
            return marks | {"optimizer": of_settings(self.model.optimizer)}

    def _check_plan(self, state: RunState) -> None:
        changed = [key for key in self.plan if state.plan.get(key) != self.plan[key]]
        if changed:
            raise FileError(
                f"The checkpoint in '{self.path.parent}' belongs to a call with {changed[0]}="
                f"{state.plan.get(changed[0])!r}, this one has {self.plan[changed[0]]!r}; make the same call, or "
                "give another folder."
            )

    def _check_marks(self, state: RunState, now: dict[str, Any]) -> None:
        # A model that was interrupted here is as it was left within a batch.
        free = ("weights", "optimizer") if _interrupted.get(self.model) == self.path.resolve() else ()
        fine = {name: [mark] for name, mark in state.begun.items()}
        fine["weights"] += [of_saved_weights(state.arrays), state.left.get("ended")]
        fine["optimizer"] += [state.left.get("optimizer")]
        other = [name for name in {**now, **fine} if name not in free and now.get(name) not in fine.get(name, [None])]
        if other:
            named = [_named(name, now.get(name), state.begun.get(name)) for name in other]
            raise FileError(
                f"The checkpoint in '{self.path.parent}' is of another run, which differs in {' and '.join(named)}; "
                "give another folder, or delete this one to begin anew."
            )

    def _check_epochs(self, state: RunState) -> None:
        if (state.epoch, state.batches) > (self.epochs, 0):
            raise FileError(
                f"The run in '{self.path.parent}' has {state.epoch + bool(state.batches)} epochs behind it or begun, "
                f"more than epochs={self.epochs}; give at least that many, or another folder, or delete this one to "
                "begin anew."
            )

    def _say_where(self, state: RunState) -> None:
        place = f"resumed from epoch {state.epoch} (batch {state.batches}) of the run in '{self.path.parent}'"
        if state.epoch >= self.epochs or state.finished:
            place = f"the run in '{self.path.parent}' was finished after epoch {state.epoch}; there is nothing to train"
        _logger.info("checkpoints: %s", place)
        if self.verbose != 0:
            print(f"sparsekit: {place}")

    def _remember_end(self) -> None:
        """Note the weights that the caller gets, where they are not the saved ones: averages, or the best epoch's."""
        with self.looking():
            ended = of_weights(self.model)
        if ended not in (of_saved_weights(self.state.arrays), self.state.left.get("ended")):
            self.state.left["ended"] = ended
            write(self.path, self.state)
        _interrupted.pop(self.model, None)

    def _with_history(self) -> Any:
        """The History, with all epochs in it."""
        history = self.model.history
        history.history = {name: list(values) for name, values in self.state.history.items()}
        done = max((len(values) for values in history.history.values()), default=0)
        history.epoch = list(range(self.first_epoch, self.first_epoch + done))
        history.resumed_from = self.resumed_from
        return history

    def save(self, epoch: int, batches: int) -> None:
        state = self.state
        with self.looking():
            variables = self._variables()
            if batches:
                variables |= metric_variables(self.model)
            state.epoch, state.batches = epoch, batches
            state.arrays = take(variables) | best_weights(self.callbacks)
            state.left = {"optimizer": of_settings(self.model.optimizer)}
        state.callbacks = [remembered(callback) for callback in self.callbacks]
        write(self.path, state)

    # --- called by the callback ---

    def train_begins(self) -> None:
        for place, (callback, known) in enumerate(zip(self.callbacks, self.state.callbacks, strict=False)):
            callback.__dict__.update(known)
            weights = [value for name, value in self.state.arrays.items() if name.startswith(f"callback:{place}:")]
            if weights:
                callback.best_weights = weights
        self.skipped = self.state.batches

    def epoch_begins(self, epoch: int) -> None:
        self.data.epoch = epoch
        if self.skipped:
            self.flavour.build_metrics(self.model, next(iter(self.data.dataset(0))))
            variables = metric_variables(self.model)
            put({n: v for n, v in variables.items() if n in self.state.arrays}, self.state.arrays, self.path)

    def batch_ends(self, epoch: int, last_batch: int) -> None:
        every = self.every_steps
        done = self.skipped + last_batch + 1
        if self.data.batches is not None and done >= self.data.batches:
            return
        if every is not None and done // every > self.saved_at // every:
            self.save(epoch, done)
            self.saved_at = done

    def epoch_ends(self, epoch: int, logs: dict[str, Any]) -> None:
        self.data.epoch = epoch + 1
        self.skipped = self.saved_at = 0
        for name, value in logs.items():
            self.state.history.setdefault(name, []).append(float(value))
        self.state.finished = bool(self.model.stop_training)
        self.save(epoch + 1, 0)


def _keeper(flavour: Flavour, run: _Run) -> Any:
    """The callback that saves; it stands last, so that it sees what the others did."""

    class Keeper(flavour.keras.callbacks.Callback):
        epoch = 0

        def on_train_begin(self, logs: dict | None = None) -> None:
            run.train_begins()
            run.saved_at = run.state.batches

        def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
            self.epoch = epoch
            run.epoch_begins(epoch)

        def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
            run.batch_ends(self.epoch, batch)

        def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
            run.epoch_ends(epoch, dict(logs or {}))

    return Keeper()


def _named(name: str, now: Any, begun: Any) -> str:
    """What differs, in words."""
    if name == "optimizer":
        changed = [key for key in {**now, **begun} if now.get(key) != begun.get(key)]
        return "the optimizer" if "class" in changed else f"the optimizer's {' and '.join(changed)}"
    return f"the array {name}" if name in _PARTS else f"the {name}"


@contextlib.contextmanager
def _silenced(owner: Any, method: str) -> Iterator[None]:
    """Turn one method of an object into nothing for a while."""
    setattr(owner, method, lambda *_, **__: None)
    try:
        yield
    finally:
        delattr(owner, method)


class _Data:
    """What fit reads, from any batch of any epoch on.

    Args:
        dataset: number of batches to leave out -> what fit takes.
        batches: number of batches of an epoch, None if unknown.
        plan: what must be the same in the next run.
        marks: the same as digests.
    """

    def __init__(
        self,
        dataset: Callable[[int], Any],
        batches: int | None,
        plan: dict[str, Any],
        marks: dict[str, Any] | None = None,
    ) -> None:
        self.dataset = dataset
        self.batches = batches
        self.plan = plan
        self.marks = dict(marks or {})
        self.epoch = 0


def _data_of(arguments: dict[str, Any], checkpoints: Checkpoints, flavour: Flavour) -> _Data:
    """Take the data out of the arguments of fit, in a form that can be taken up again."""
    x, y, weight = (arguments.pop(name, None) for name in _PARTS)
    if arguments.get("steps_per_epoch") is not None:
        raise ArgumentError("steps_per_epoch cannot be used with checkpoints; an epoch is one pass over the data.")
    if isinstance(x, tf.data.Dataset):
        # Keras cannot shuffle it, and says so if it is asked to.
        arguments["shuffle"] = False
        size = int(x.cardinality())
        return _Data(lambda skip: x.skip(skip) if skip else x, size if size >= 0 else None, {"data": "dataset"})
    if _is_array(x):
        return _arrays(x, y, weight, arguments, checkpoints, flavour)
    if hasattr(x, "__getitem__") and hasattr(x, "__len__"):
        if checkpoints.every_steps is not None:
            raise ArgumentError(
                f"{type(x).__name__} can be taken up at the ends of epochs only; leave every_steps out, or give arrays "
                "or a tf.data.Dataset."
            )
        return _Data(lambda skip: x, len(x), {"data": "sequence", "batches": len(x)})
    raise ArgumentError(
        f"{type(x).__name__} cannot be read again from where a run stopped; give arrays, a tf.data.Dataset, or a "
        "PyDataset."
    )


def _is_array(x: Any) -> bool:
    leaves = tf.nest.flatten(x)
    return bool(leaves) and all(
        tf.is_tensor(leaf) or isinstance(leaf, (np.ndarray, float, int)) or hasattr(leaf, "to_numpy") for leaf in leaves
    )


def _arrays(
    x: Any, y: Any, weight: Any, arguments: dict[str, Any], checkpoints: Checkpoints, flavour: Flavour
) -> _Data:
    """Arrays as a dataset whose order in an epoch depends on the seed and the epoch alone."""
    floatx = flavour.keras.backend.floatx()

    def plain(leaf: Any) -> np.ndarray:
        array = np.asarray(leaf)
        return array.astype(floatx) if array.dtype.kind == "f" and array.dtype != floatx else array

    parts = tuple(part for part in (x, y, weight) if part is not None)
    if weight is not None and y is None:
        raise ArgumentError("sample_weight needs y; give data=(x, y, sample_weight).")
    # A list of numbers is one array, a list of arrays is several inputs.
    parts = tuple(
        plain(part) if isinstance(part, list) and part and np.isscalar(part[0]) else tf.nest.map_structure(plain, part)
        for part in parts
    )
    count = len(tf.nest.flatten(parts)[0])
    share = arguments.pop("validation_split", 0.0) or 0.0
    if share:
        cut = math.floor(count * (1 - share))
        arguments["validation_data"] = tf.nest.map_structure(lambda array: array[cut:], parts)
        parts = tf.nest.map_structure(lambda array: array[:cut], parts)
        count = cut
    size = int(arguments.pop("batch_size", None) or 32)
    arguments.setdefault("validation_batch_size", size)
    shuffled = bool(arguments.pop("shuffle", True))
    # What reaches fit is a dataset in its final order.
    arguments["shuffle"] = False
    batches = math.ceil(count / size)
    spec = tf.nest.map_structure(lambda array: tf.TensorSpec((None, *array.shape[1:]), array.dtype), parts)

    def dataset(skip: int) -> Any:
        def epoch() -> Iterator[Any]:
            order = np.arange(count)
            if shuffled:
                order = np.random.default_rng([checkpoints.seed, data.epoch]).permutation(count)
            for batch in range(skip, batches):
                rows = order[batch * size : (batch + 1) * size]
                yield tf.nest.map_structure(lambda array, rows=rows: array[rows], parts)

        read = tf.data.Dataset.from_generator(epoch, output_signature=spec)
        return read.apply(tf.data.experimental.assert_cardinality(batches - skip)).prefetch(2)

    plan = {"data": "arrays", "samples": count, "batch_size": size, "shuffle": shuffled, "seed": checkpoints.seed}
    marks = {name: of_arrays(tf.nest.flatten(part)) for name, part in zip(_PARTS, parts, strict=False)}
    data = _Data(dataset, batches, plan, marks)
    return data
