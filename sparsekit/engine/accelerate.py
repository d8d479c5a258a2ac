"""Predict with the kept values of a pruned model alone, where that was measured to be faster."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from sparsekit.engine import build
from sparsekit.engine.gate import EngineReport, SwappedWeight, probe, seconds
from sparsekit.engine.sites import Site, find_sites, sparse_calls, swapped_calls
from sparsekit.errors import EngineError
from sparsekit.flavour import flavour_of, native
from sparsekit.frozen import FrozenMask
from sparsekit.weights import prunable_weights, read

_WINS = 0.9


class Accelerated:
    """A model's forward pass as one compiled function, for the weights that the model has when this is made.

    Made by `sparsekit.accelerate`. The model itself is as before. Once it has trained on, make a new one: of its new
    weights this one would see only those that it does not hold itself, such as biases.
    """

    def __init__(self, model: Any, engine: str) -> None:
        self._model, self._engine = model, engine
        self._flavour = flavour_of(model)
        self.report = EngineReport("dense", reason="not called yet")
        masks = []
        for ref in prunable_weights(model):
            keep = read(ref.variable) != 0
            if not keep.all():
                masks.append(FrozenMask(ref.path, ref.variable, tf.Variable(keep, trainable=False)))
        self._sites, self._reasons = find_sites(self._flavour, model, masks, training=False)
        self._problem: str | None = None
        if self._sites and not build.available():
            self._problem = build.reason() or "the engine cannot be built"
        elif not self._sites:
            listed = "; ".join(f"{path}: {reason}" for path, reason in list(self._reasons.items())[:3])
            self._problem = listed or "the model has no zeros"
        if engine == "sparse" and self._problem is not None:
            raise EngineError(f"engine='sparse' is not possible: {self._problem}; use engine='auto'.")
        values = [native(site.kernel).numpy()[site.keep()] for site in self._sites]
        self._values = dict(zip((site.path for site in self._sites), values, strict=True))
        self._run: Callable[..., Any] | None = None

    def __call__(self, x: Any) -> Any:
        """The model's outputs for one batch, in inference mode.

        Args:
            x: what the model is called with; arrays or tensors with a batch axis.
        """
        x = tf.nest.map_structure(tf.convert_to_tensor, x)
        if self._run is None:
            self._run = self._made_for(x)
        return self._run(x)

    def predict(self, x: Any, batch_size: int = 32, verbose: Any = 0) -> Any:
        """Outputs for many samples as NumPy arrays.

        Args:
            x: arrays with one sample a row.
            batch_size: samples a call.
            verbose: for calls written for `model.predict`; no progress is shown.
        """
        del verbose
        count = len(tf.nest.flatten(x)[0])
        parts = [
            self(tf.nest.map_structure(lambda array, start=start: array[start : start + batch_size], x))
            for start in range(0, count, batch_size)
        ]
        return tf.nest.map_structure(lambda *outputs: np.concatenate([np.asarray(o) for o in outputs]), *parts)

    def _made_for(self, x: Any) -> Callable[..., Any]:
        """Choose the kernels on the first batch and compile."""
        spec = tf.nest.map_structure(lambda tensor: tf.TensorSpec(tensor.shape, tensor.dtype), x)
        chosen, swapped = self._choose(spec) if self._problem is None else ([], [])
        parts = []
        for site in chosen:
            values = tf.constant(self._values[site.path])
            parts.append((site, values, site.operation.structure(site.keep())))
        calls = sparse_calls(self._flavour, parts)
        model, flavour = self._model, self._flavour

        def forward(x: Any) -> Any:
            # Also when another shape of batch is traced later.
            with swapped_calls(flavour, model, calls):
                return model(x, training=False)

        told = "; ".join(f"{path} stays dense: {reason}" for path, reason in self._reasons.items()) or None
        self.report = EngineReport("sparse" if chosen else "dense", tuple(swapped), None, self._problem or told)
        # What was not chosen need not be kept.
        self._values.clear()
        return tf.function(forward, autograph=False, reduce_retracing=True)

    def _choose(self, spec: Any) -> tuple[list[Site], list[SwappedWeight]]:
        try:
            uses, reasons = probe(self._flavour, self._model, self._sites, spec, training=False)
        except EngineError as error:
            if self._engine == "sparse":
                raise
            self._problem = str(error)
            return [], []
        self._reasons |= reasons
        chosen, swapped = [], []
        for site in self._sites:
            if site.path not in uses:
                continue
            if self._engine == "sparse":
                chosen.append(site)
                swapped.append(SwappedWeight(site.path, 1.0 - site.density))
                continue
            dense, sparse = seconds(site, uses[site.path])
            if sparse <= _WINS * dense:
                chosen.append(site)
                swapped.append(SwappedWeight(site.path, 1.0 - site.density, dense, sparse))
            else:
                self._reasons[site.path] = f"sparse takes {sparse * 1e3:.2f} ms and dense {dense * 1e3:.2f} ms"
        return chosen, swapped
