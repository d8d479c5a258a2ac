"""Let a model train on the kept values of its kernels alone, on the user's own object, for as long as a fit lasts.

While swapped, a layer's trainable variable is the vector of its kept values and its `call` uses the sparse ops; the
model's optimizer is a twin of the user's for these variables. The memory of kernels and of the user's slots is given
back meanwhile. Whenever a callback may look, everything is put back first and taken again afterwards.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from sparsekit.engine.sites import Site, sparse_calls
from sparsekit.engine.slots import Mover, Twin, empty, put
from sparsekit.engine.watching import HOOKS, looks
from sparsekit.errors import EngineError
from sparsekit.flavour import Flavour, native
from sparsekit.frozen import FrozenMasks


@dataclass(eq=False)
class _Swapped:
    site: Site
    mover: Mover
    structure: Any
    values: Any


@dataclass(eq=False)
class Swap:
    """The swapped state of a model, to be entered and left any number of times.

    Args:
        flavour: the model's Keras.
        model: a compiled model.
        frozen: all of its masks.
        sites: the kernels to stand in for.
        hold: `hold(masks, optimizers)`: a context in which steps are traced with these masks held.

    Raises:
        EngineError: if the ops or the optimizer cannot be used; the model is as before.
    """

    flavour: Flavour
    model: Any
    frozen: FrozenMasks
    sites: list[Site]
    hold: Callable[[FrozenMasks, list[Any]], contextlib.AbstractContextManager[None]]
    _state: str = field(default="out", init=False)

    def __post_init__(self) -> None:
        model, flavour = self.model, self.flavour
        self._optimizer = model.optimizer
        self._rest = self.frozen.without({site.path for site in self.sites})
        self._swapped = []
        for site in self.sites:
            mover = Mover(tuple(int(n) for n in site.kernel.shape), site.mask.keep)
            values = flavour.values_variable(site.kernel, mover.gather(native(site.kernel)))
            self._swapped.append(_Swapped(site, mover, site.operation.structure(site.keep()), values))
        flavour.build_optimizer(self._optimizer, model.trainable_variables)
        self._twin = Twin(flavour, model, self._optimizer, [(s.site.kernel, s.values, s.mover) for s in self._swapped])
        self._twin.drop_ours()
        self._calls = sparse_calls(flavour, [(s.site, s.values, s.structure) for s in self._swapped])
        self._flags = [layer for layer in flavour.layers(model) if self._goes_around(layer)]
        self._functions: dict[str, dict[str, Any]] = {}
        self._stack = contextlib.ExitStack()
        for swapped in self._swapped:
            empty(swapped.values)
        self._hold()

    def _goes_around(self, layer: Any) -> bool:
        cell = getattr(layer, "cell", None)
        return self.flavour.uses_cudnn_call(layer) and any(site.layer is cell for site in self.sites)

    @property
    def is_in(self) -> bool:
        return self._state == "in"

    def enter(self) -> None:
        """Swap in: everything that the kernels and slots hold now is carried over."""
        if self._state != "out":
            return
        flavour = self.flavour
        for swapped in self._swapped:
            put(swapped.values, swapped.mover.gather(native(swapped.site.kernel)))
        self._twin.take()
        self._state = "in"
        for swapped in self._swapped:
            empty(swapped.site.kernel)
            flavour.replace_variable(swapped.site.layer, swapped.site.kernel, swapped.values)
        self._twin.drop_theirs()
        for layer, call in self._calls:
            vars(layer)["call"] = call
        for layer in self._flags:
            vars(layer)["_could_use_gpu_kernel"] = False
        self.model.optimizer = self._twin.optimizer
        self._hold()
        self._exchange_functions("out", "in")

    def leave(self) -> None:
        """Swap out: kernels, slots and the model are as without the engine. Can be repeated if it was interrupted."""
        if self._state == "in":
            for swapped in self._swapped:
                put(swapped.site.kernel, swapped.mover.scatter(native(swapped.values)))
            self._twin.give_back()
            self._state = "leaving"
        if self._state == "leaving":
            for swapped in self._swapped:
                self.flavour.replace_variable(swapped.site.layer, swapped.values, swapped.site.kernel)
                empty(swapped.values)
            self._twin.drop_ours()
            for layer, _ in self._calls:
                vars(layer).pop("call", None)
            for layer in self._flags:
                vars(layer)["_could_use_gpu_kernel"] = True
            self.model.optimizer = self._optimizer
            self._state = "out"
            self._hold()
            self._exchange_functions("in", "out")

    def verify(self, batch: tuple[Any, ...]) -> None:
        """Trace a training step to see that it works and takes the kernels through their layers only.

        Args:
            batch: specs of `(x, y, sample_weight)`.

        Raises:
            EngineError: if it does not; the model is as before.
        """
        model = self.model
        self.enter()
        try:
            step = tf.function(lambda *data: model.train_step(data), autograph=not self.flavour.is_keras3)
            captured = {id(tensor) for tensor in step.get_concrete_function(*batch).captured_inputs}
        except Exception as error:
            line = str(error).strip().partition("\n")[0][:200]
            raise EngineError(f"its training step cannot be traced ({type(error).__name__}: {line})") from error
        finally:
            self.leave()
        for swapped in self._swapped:
            if id(native(swapped.site.kernel).handle) in captured:
                raise EngineError(f"its training step uses {swapped.site.path} outside of its layer")

    def close(self) -> None:
        """Leave for good."""
        self.leave()
        self._stack.close()

    def _hold(self) -> None:
        """Hold the masks that are left for the optimizer that is in place."""
        self._stack.close()
        if self._state == "in":
            self._stack.enter_context(self.hold(self._rest, [self._twin.optimizer]))
        else:
            self._stack.enter_context(self.hold(self.frozen, [self._optimizer]))

    def _exchange_functions(self, old: str, new: str) -> None:
        """Each of the two states has compiled functions of its own, which are traced once."""
        model, names = self.model, self.flavour.step_functions
        self._functions[old] = {name: getattr(model, name, None) for name in names}
        for name in names:
            setattr(model, name, self._functions.get(new, {}).get(name))
        if new == "in" and model.train_function is None:
            model.make_train_function()

    def callbacks(self, given: list[Any]) -> list[Any]:
        """The user's callbacks between two of ours, which see to it that they find the model as it should be."""
        base = self.flavour.keras.callbacks.Callback
        watched = [hook for hook in HOOKS if any(looks(base, callback, hook) for callback in given)]
        resume: list[bool] = []

        def before(*_: Any, **__: Any) -> None:
            resume.append(self.is_in)
            self.leave()

        def after(*_: Any, **__: Any) -> None:
            if resume and resume.pop():
                self.enter()

        def begin(*_: Any, **__: Any) -> None:
            resume.clear()
            self.enter()

        def end(*_: Any, **__: Any) -> None:
            self.leave()

        first = {**dict.fromkeys(watched, before), "on_train_end": end}
        last = {**dict.fromkeys(watched, after), "on_train_begin": begin}
        return [_callback(base, first), *given, _callback(base, last)]


def _callback(base: type, hooks: dict[str, Callable[..., None]]) -> Any:
    methods = {name: staticmethod(hook) for name, hook in hooks.items()}
    made = type("EngineCallback", (base,), {**methods, "async_safe": False})()
    made._supports_tf_logs = True
    return made
