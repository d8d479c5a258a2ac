"""Let a model train on the kept values of its kernels alone, on the user's own object, for as long as a fit lasts.

While swapped, a layer's trainable variable is the vector of its kept values and its `call` uses the sparse ops; the
model's optimizer is a twin of the user's for these variables. The memory of kernels and of the user's slots is given
back meanwhile. Whenever a callback may look, everything is put back first and taken again afterwards.

Where steps change the masks, the vectors have no fixed length: what a step drops is taken out of the values and slots
within that step, and the index arrays, which are variables then, are made anew.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from sparsekit.engine import masking
from sparsekit.engine.functions import Structure, varying
from sparsekit.engine.sites import Site, sparse_calls
from sparsekit.engine.slots import Mover, Twin, empty, put
from sparsekit.errors import EngineError
from sparsekit.flavour import Flavour, native
from sparsekit.frozen import FrozenMask, FrozenMasks

# `hold(masks, optimizers, settle)`, see Swap.
Hold = Callable[[FrozenMasks, list[Any], Callable[[float], None] | None], contextlib.AbstractContextManager[None]]


@dataclass(eq=False)
class _Swapped:
    """A kernel and what stands in for it.

    `bits` is the mask for which constant index arrays were made; `live` masks the values where masks change.
    """

    site: Site
    mover: Mover
    structure: Any
    values: Any
    bits: np.ndarray
    live: FrozenMask | None

    def fits(self) -> bool:
        """Whether the index arrays serve the mask of the kernel, or can be made to."""
        return self.live is not None or bool(np.array_equal(self.bits, np.packbits(self.site.keep())))

    def renew(self) -> None:
        """Give index arrays that are variables the contents for the kernel's mask."""
        structure = self.site.operation.structure(tf.convert_to_tensor(self.site.mask.keep))
        for variable, array in zip(self.structure.arrays(), structure.arrays(), strict=True):
            variable.assign(array)

    def shrink(self, slots: list[Any]) -> None:
        """Take masked values out of values, slots and the kernel's mask."""
        assert self.live is not None
        masking.shrink(self.site.mask.keep, self.live.keep, [native(self.values), *slots])

    def shrink_and_renew(self, slots: list[Any], share: float) -> None:
        """Do both in the graph, where more than this share is masked."""
        assert self.live is not None
        arrays = [native(self.values), *slots]
        structure = self.structure.arrays() if isinstance(self.structure, Structure) else ()
        changed = masking.shrink(self.site.mask.keep, self.live.keep, arrays, structure, share)
        if not structure:
            tf.cond(changed, self.renew, lambda: None)


@dataclass(eq=False)
class Swap:
    """The swapped state of a model, to be entered and left any number of times.

    Args:
        flavour: the model's Keras.
        model: a compiled model.
        frozen: all of its masks.
        sites: the kernels to stand in for.
        hold: `hold(masks, optimizers, settle)`: a context in which steps are traced with these masks held; they call
            `settle(share)` once masks have changed.
        changing: whether steps change the masks.

    Raises:
        EngineError: if the ops or the optimizer cannot be used; the model is as before.
    """

    flavour: Flavour
    model: Any
    frozen: FrozenMasks
    sites: list[Site]
    hold: Hold
    changing: bool = False
    _state: str = field(default="out", init=False)

    def __post_init__(self) -> None:
        model, flavour = self.model, self.flavour
        self._optimizer = model.optimizer
        flavour.build_optimizer(self._optimizer, model.trainable_variables)
        self._flags = [layer for layer in flavour.layers(model) if self._goes_around(layer)]
        self._functions: dict[str, dict[str, Any]] = {}
        self._stack = contextlib.ExitStack()
        self._build()
        self._hold()

    def _build(self) -> None:
        """Make what stands in, for the masks as they are now."""
        flavour = self.flavour
        self._swapped = [self._stand_in(site) for site in self.sites]
        live = [swapped.live for swapped in self._swapped if swapped.live is not None]
        self._rest = self.frozen.without({site.path for site in self.sites}, live)
        moved = [(s.site.kernel, s.values, s.mover) for s in self._swapped]
        self._twin = Twin(flavour, self.model, self._optimizer, moved, self.changing)
        self._calls = sparse_calls(flavour, [(s.site, s.values, s.structure) for s in self._swapped])
        self._twin.drop_ours()
        for swapped in self._swapped:
            empty(swapped.values)
        self._functions.pop("in", None)

    def _stand_in(self, site: Site) -> _Swapped:
        keep = site.keep()
        mover = Mover(tuple(int(n) for n in site.kernel.shape), site.mask.keep)
        values = self.flavour.values_variable(site.kernel, mover.gather(native(site.kernel)), self.changing)
        structure, live = site.operation.structure(keep), None
        if self.changing:
            structure = structure.in_variables()
            alive = varying(tf.ones([np.count_nonzero(keep)], tf.bool))
            live = FrozenMask(site.path, values, alive, site.mask.pattern, site.mask.target, keep.size)
        return _Swapped(site, mover, structure, values, np.packbits(keep), live)

    def _goes_around(self, layer: Any) -> bool:
        cell = getattr(layer, "cell", None)
        return self.flavour.uses_cudnn_call(layer) and any(site.layer is cell for site in self.sites)

    @property
    def masks(self) -> FrozenMasks:
        """The masks that steps hold now: of kept values alone where those stand in."""
        return self._rest if self._state == "in" else self.frozen

    @property
    def is_in(self) -> bool:
        return self._state == "in"

    def enter(self) -> None:
        """Swap in: everything that the kernels and slots hold now is carried over."""
        if self._state != "out":
            return
        flavour = self.flavour
        if not all(swapped.fits() for swapped in self._swapped):
            self._build()
        for swapped in self._swapped:
            values = swapped.mover.gather(native(swapped.site.kernel))
            put(swapped.values, values)
            if swapped.live is not None:
                swapped.live.keep.assign(tf.ones(values.shape, tf.bool))
                swapped.renew()
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
                if swapped.live is not None:
                    swapped.shrink(self._twin.arrays(swapped.mover))
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

    def verify(self, batch: tuple[Any, ...], whole: bool = True) -> None:
        """Trace a training step to see that it works and takes the kernels through their layers only.

        Args:
            batch: specs of `(x, y, sample_weight)`.
            whole: whether to trace the model's `train_step`, or the forward and backward pass alone.

        Raises:
            EngineError: if it does not; the model is as before.
        """
        model = self.model
        self.enter()
        try:
            run = (lambda *data: model.train_step(data)) if whole else self._both_ways
            step = tf.function(run, autograph=whole and not self.flavour.is_keras3)
            with self.flavour.unmoved_randomness():
                traced = step.get_concrete_function(*(batch if whole else batch[:1]))
        except Exception as error:
            line = str(error).strip().partition("\n")[0][:200]
            raise EngineError(f"its training step cannot be traced ({type(error).__name__}: {line})") from error
        finally:
            self.leave()
        captured = {id(tensor) for tensor in traced.captured_inputs}
        for swapped in self._swapped:
            if id(native(swapped.site.kernel).handle) in captured:
                raise EngineError(f"its training step uses {swapped.site.path} outside of its layer")
        functions = traced.graph.as_graph_def().library.function
        if any(function.attr["_XlaMustCompile"].b for function in functions if "_XlaMustCompile" in function.attr):
            raise EngineError(
                "a part of its training step is compiled with XLA, which has no kernel for the engine's ops"
            )

    def _both_ways(self, x: Any) -> list[Any]:
        targets = [native(variable) for variable in self.model.trainable_variables]
        with tf.GradientTape() as tape:
            y = tf.nest.flatten(self.model(x, training=True))
            # Of parts only that the gradient can come through.
            loss = tf.add_n([tf.reduce_sum(part) for part in [*y, *self.model.losses] if part.dtype.is_floating])
        return [gradient for gradient in tape.gradient(loss, targets) if gradient is not None]

    def close(self) -> None:
        """Leave for good."""
        self.leave()
        self._stack.close()

    def _hold(self) -> None:
        """Hold the masks that are left for the optimizer that is in place."""
        self._stack.close()
        if self._state == "in":
            self._stack.enter_context(self.hold(self._rest, [self._twin.optimizer], self._settle))
        else:
            self._stack.enter_context(self.hold(self.frozen, [self._optimizer], None))

    def _settle(self, share: float) -> None:
        """In a step: where more than this share of a kernel's values is masked, go on with the others alone."""
        for swapped in self._swapped:
            if swapped.live is not None:
                swapped.shrink_and_renew(self._twin.arrays(swapped.mover), share)

    def _exchange_functions(self, old: str, new: str) -> None:
        """Each of the two states has compiled functions of its own, which are traced once."""
        model, names = self.model, self.flavour.step_functions
        self._functions[old] = {name: getattr(model, name, None) for name in names}
        for name in names:
            setattr(model, name, self._functions.get(new, {}).get(name))
        if new == "in" and model.train_function is None:
            model.make_train_function()

    @contextlib.contextmanager
    def looking(self) -> Iterator[None]:
        """The model as without the engine, for as long as this lasts."""
        was_in = self.is_in
        self.leave()
        try:
            yield
        finally:
            if was_in:
                self.enter()
