"""Which callbacks may look at a model's weights, and when; what stands around them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

HOOKS = tuple(
    f"on_{what}_{when}" for what in ("epoch", "train_batch", "batch", "test", "test_batch") for when in ("begin", "end")
)

# Keras' own callbacks that read no weight, or only in the hooks named.
_NEVER: frozenset[str] = frozenset()
_LOOKS = {
    "History": _NEVER,
    "BaseLogger": _NEVER,
    "ProgbarLogger": _NEVER,
    "CSVLogger": _NEVER,
    "RemoteMonitor": _NEVER,
    "TerminateOnNaN": _NEVER,
    # It calls a function of the user's.
    "LearningRateScheduler": frozenset({"on_epoch_begin"}),
    "ReduceLROnPlateau": _NEVER,
    "TensorBoard": frozenset({"on_epoch_end"}),
    "EarlyStopping": frozenset({"on_epoch_end"}),
    "ModelCheckpoint": frozenset({"on_epoch_end"}),
    "BackupAndRestore": frozenset({"on_epoch_end"}),
}


def looks(base: type, callback: Any, hook: str) -> bool:
    """Whether a callback may read or write weights in a hook.

    Args:
        base: the Callback class of the model's Keras.
        callback: a user's callback.
        hook: name of the method.
    """
    if getattr(callback, "reads_no_weights", False):
        return False
    method = getattr(callback, hook, None)
    if method is None or getattr(method, "__func__", method) is getattr(base, hook, None):
        return False
    kind = type(callback)
    if kind.__module__.split(".")[0] not in ("keras", "tf_keras") or kind.__name__ not in _LOOKS:
        return True
    # Some save in the middle of an epoch, if told so.
    often = isinstance(getattr(callback, "save_freq", "epoch"), int) and hook == "on_train_batch_end"
    return often or hook in _LOOKS[kind.__name__]


def surrounded(
    base: type, given: list[Any], running: Callable[[], Any], ended: Callable[[int], bool] | None = None
) -> list[Any]:
    """Callbacks between two of ours, which see to it that those find the model as without the engine.

    Args:
        base: the Callback class of the model's Keras.
        given: the user's callbacks.
        running: the `Swap` that the run uses now, or None.
        ended: called with the number of each epoch that ended; may leave what runs, and says whether `running` has
            something new to enter.
    """
    watched = {hook for hook in HOOKS if any(looks(base, callback, hook) for callback in given)}
    resume: list[bool] = []

    def before(*_: Any, **__: Any) -> None:
        swap = running()
        resume.append(swap is not None and swap.is_in)
        if swap is not None:
            swap.leave()

    def after(*_: Any, **__: Any) -> None:
        if resume and resume.pop():
            running().enter()

    def epoch_end(epoch: int, *_: Any, **__: Any) -> None:
        if "on_epoch_end" not in watched:
            resume.append(running() is not None and running().is_in)
        if ended is not None and ended(epoch):
            resume[-1] = True
        after()

    def begin(*_: Any, **__: Any) -> None:
        resume.clear()
        if running() is not None:
            running().enter()

    def end(*_: Any, **__: Any) -> None:
        if running() is not None:
            running().leave()

    first = {**dict.fromkeys(watched, before), "on_train_end": end}
    last = {**dict.fromkeys(watched, after), "on_train_begin": begin}
    if "on_epoch_end" in watched or ended is not None:
        last["on_epoch_end"] = epoch_end
    return [_callback(base, first), *given, _callback(base, last)]


def _callback(base: type, hooks: dict[str, Callable[..., None]]) -> Any:
    made = _callback_class(base, tuple(hooks))()
    made.hooks = hooks
    made._supports_tf_logs = True
    return made


@functools.cache
def _callback_class(base: type, names: tuple[str, ...]) -> type:
    """Once for all runs: a class of a run's own would live on, and with it all that its hooks hold."""

    def method(name: str) -> Callable[..., None]:
        return lambda self, *args, **kwargs: self.hooks[name](*args, **kwargs)

    return type("EngineCallback", (base,), {**{name: method(name) for name in names}, "async_safe": False})
