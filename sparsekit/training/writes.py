"""Have the optimizer's own write to a weight leave what is masked at zero.

Most optimizers end with `variable.assign_sub(delta)`. Traced as one op that subtracts and masks, it spares the pass
over the weight that would be needed after it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator
from typing import Any

import tensorflow as tf

from ..engine import masking
from ..flavour import native, shadowed
from ..frozen import FrozenMask

_READS = ("ReadVariableOp", "VariableShape", "ResourceGather", "ResourceGatherNd")


class MaskedWrites:
    """While it is entered, `assign_sub` and `assign_add` of masked weights mask them as well, in steps being traced.

    Args:
        masks: the masks; the writes to weights that are not float32 or lie on several replicas are left as they are.
        fused: False leaves all writes as they are.
        drop: what is zero after a write is masked from then on.
    """

    def __init__(self, masks: Iterable[FrozenMask], fused: bool, drop: bool = False) -> None:
        self._masks = list(masks)
        self._fused = fused and not tf.distribute.has_strategy()
        self._drop = drop
        self._written: dict[str, tf.Operation] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> MaskedWrites:
        for mask in self._masks if self._fused else ():
            variable = _unwrapped(mask.variable)
            if variable.dtype == tf.float32:
                for name in ("assign_sub", "assign_add"):
                    write = functools.partial(self._write, mask, variable, getattr(variable, name), name)
                    self._stack.enter_context(shadowed(variable, name, write))
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    def _write(
        self, mask: FrozenMask, variable: tf.Variable, original: Any, name: str, delta: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if tf.executing_eagerly():
            return original(delta, *args, **kwargs)
        written = masking.assign_kept(variable, mask.keep, delta, subtract=name == "assign_sub", drop=self._drop)
        self._written[mask.key] = written
        return written

    def others(self) -> Iterator[FrozenMask]:
        """The masks whose weight was written to in another way, or by something else since."""
        for mask in self._masks:
            written = self._written.get(mask.key)
            if written is None or written.graph is not tf.compat.v1.get_default_graph() or _changed_since(written):
                yield mask


def _unwrapped(variable: Any) -> Any:
    variable = native(variable)
    return getattr(variable, "_variable", variable)


def _changed_since(written: tf.Operation) -> bool:
    """Whether an op that may write to a variable was traced after `written`."""
    users = {op.name for op in written.inputs[0].consumers() if op.type not in _READS}
    last = [op.name for op in written.graph.get_operations() if op.name in users][-1]
    return last != written.name
