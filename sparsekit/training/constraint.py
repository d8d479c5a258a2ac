"""A Keras constraint that holds masked positions at zero, in either Keras."""

from __future__ import annotations

import base64
import zlib
from typing import Any

import numpy as np
import tensorflow as tf

from ..engine import masking
from ..errors import MaskError
from ..flavour import get
from ..frozen import keep_only
from ..masks import unpack

_KERAS, _TF_KERAS = get("keras").keras, get("tf_keras").keras


@_KERAS.saving.register_keras_serializable(package="sparsekit")
@_TF_KERAS.utils.register_keras_serializable(package="sparsekit")
class MaskConstraint(_KERAS.constraints.Constraint, _TF_KERAS.constraints.Constraint):
    """Hold the masked positions of a weight at exactly zero after each optimizer update.

    As `kernel_constraint` or `bias_constraint` in a layer's constructor it keeps everything until the weight is
    pruned: `prune` and `freeze` hand it the mask. The mask is part of its config, so it survives saving and loading.

    Args:
        keep: bool array of the weight's shape, True = keep; None keeps everything until a mask is frozen.
        inner: another constraint of the same Keras, run on the masked weight.

    Raises:
        MaskError: if `keep` is not boolean or `inner` is no constraint.
    """

    def __init__(self, keep: np.ndarray | tf.Variable | None = None, inner: Any = None) -> None:
        if keep is not None and tf.as_dtype(keep.dtype) != tf.bool:
            raise MaskError(f"A mask must be bool (True = keep); got dtype {keep.dtype}.")
        if not (inner is None or callable(inner)):
            raise MaskError(f"inner={inner!r} is no constraint; give an object such as keras.constraints.MaxNorm(2).")
        self.keep: Any = keep
        self.inner = inner
        self._keep_only = keep_only

    def fuse(self) -> MaskConstraint:
        """Use the engine's one-pass op, for float32 weights on the CPU."""
        self._keep_only = masking.keep_only
        return self

    def freeze(self, keep: tf.Variable) -> None:
        """Take over a frozen mask; later changes of it are followed."""
        self.keep = keep

    def __call__(self, w: Any) -> Any:
        if self.keep is not None:
            # Before the inner one, which may look at all positions (a norm), and after it.
            w = self._keep_only(self.keep, w)
        if self.inner is not None:
            w = self.inner(w)
        return w if self.keep is None or self.inner is None else self._keep_only(self.keep, w)

    def get_config(self) -> dict[str, Any]:
        inner = None
        if self.inner is not None:
            keras = _KERAS if isinstance(self.inner, _KERAS.constraints.Constraint) else _TF_KERAS
            inner = {"keras": keras.__name__, "config": keras.constraints.serialize(self.inner)}
        if self.keep is None:
            return {"shape": None, "keep": None, "inner": inner}
        keep = np.asarray(self.keep.numpy() if isinstance(self.keep, tf.Variable) else self.keep)
        packed = zlib.compress(np.packbits(keep.reshape(-1)).tobytes())
        return {"shape": list(keep.shape), "keep": base64.b64encode(packed).decode("ascii"), "inner": inner}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> MaskConstraint:
        inner = config["inner"]
        if inner is not None:
            inner = get(inner["keras"]).keras.constraints.deserialize(inner["config"])
        if config["keep"] is None:
            return cls(inner=inner)
        shape = tuple(int(n) for n in config["shape"])
        # The size is known from the shape, so a damaged config cannot unpack to more than that.
        stream = zlib.decompressobj()
        packed = stream.decompress(base64.b64decode(config["keep"]), int(np.prod(shape)) // 8 + 1)
        return cls(unpack(np.frombuffer(packed, np.uint8), shape), inner)


# tf_keras reads an .h5 file by the plain class name, whatever package it wrote.
_TF_KERAS.utils.get_custom_objects()["MaskConstraint"] = MaskConstraint
