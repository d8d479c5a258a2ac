"""Which callbacks may look at a model's weights, and when."""

from __future__ import annotations

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
    "LearningRateScheduler": _NEVER,
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
    method = getattr(callback, hook, None)
    if method is None or getattr(method, "__func__", method) is getattr(base, hook, None):
        return False
    kind = type(callback)
    if kind.__module__.split(".")[0] not in ("keras", "tf_keras") or kind.__name__ not in _LOOKS:
        return True
    # Some save in the middle of an epoch, if told so.
    often = isinstance(getattr(callback, "save_freq", "epoch"), int) and hook == "on_train_batch_end"
    return often or hook in _LOOKS[kind.__name__]
