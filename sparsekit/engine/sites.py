"""The kernels of a model that the engine can stand in for, and the calls of their layers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from sparsekit.engine.layers import LayerForm, Operation, Product, dense_product, form_of, sparse_product
from sparsekit.flavour import Flavour, key_of
from sparsekit.frozen import FrozenMask
from sparsekit.weights import all_weights, read

# Optimizers whose update looks at more than one position, but in a way in which a zero counts nothing: norms.
_NORMS_ONLY = ("Lamb",)


@dataclass(frozen=True, eq=False)
class Site:
    """One kernel that the engine can stand in for.

    Args:
        path: the weight's path.
        role: name of the kernel in its layer.
        layer: the layer that owns it.
        mask: its frozen mask.
        form: the kind of the layer.
        operation: what the layer uses the kernel for.
        input_gradient: False if a step needs no gradient of the layer's input.
    """

    path: str
    role: str
    layer: Any
    mask: FrozenMask
    form: LayerForm
    operation: Operation
    input_gradient: bool = True

    @property
    def kernel(self) -> Any:
        return self.mask.variable

    def keep(self) -> np.ndarray:
        return read(self.mask.keep)

    @property
    def density(self) -> float:
        keep = self.keep()
        return float(np.count_nonzero(keep)) / keep.size


def find_sites(
    flavour: Flavour, model: Any, masks: Iterable[FrozenMask], training: bool = True
) -> tuple[list[Site], dict[str, str]]:
    """The masked kernels that the engine can stand in for, and why the others cannot: path -> reason.

    Args:
        flavour: the model's Keras.
        model: a built model.
        masks: masks of its weights.
        training: whether the kernels are to train.
    """
    refs = {ref.key: ref for ref in all_weights(model)}
    owners: dict[str, int] = {}
    for layer in flavour.layers(model):
        for variable in flavour.own_variables(layer):
            owners[key_of(variable)] = owners.get(key_of(variable), 0) + 1
    trainable = {key_of(variable) for variable in model.trainable_variables}
    sites, reasons = [], {}
    for mask in masks:
        ref = refs.get(mask.key)
        layer = ref.layer if ref is not None else None
        form = form_of(flavour, layer) if layer is not None else None
        reason = None
        if ref is None or form is None or ref.role not in form.roles:
            reason = f"the engine has no form of {type(layer).__name__}"
        elif training and owners.get(mask.key) != 1:
            reason = "several layers share it"
        elif training and mask.key not in trainable:
            reason = "it is not trainable"
        else:
            reason = _why_not(flavour, layer, mask.variable, training) or form.why_not(layer, training)
        if reason is not None or ref is None or form is None:
            reasons[mask.path] = reason or "it is not in the model"
            continue
        sites.append(Site(mask.path, ref.role, layer, mask, form, form.operation(layer, ref.role)))
    return sites, reasons


def _why_not(flavour: Flavour, layer: Any, kernel: Any, training: bool) -> str | None:
    if tf.as_dtype(kernel.dtype) != tf.float32 or layer.compute_dtype != "float32":
        return "it does not compute in float32"
    if getattr(layer, "lora_enabled", False) or getattr(layer, "quantization_mode", None):
        return "it is adapted or quantised"
    if "call" in vars(layer):
        return "its call was replaced"
    if not training:
        return None
    constraint = flavour.get_constraint(kernel)
    if constraint is not None and (type(constraint).__name__ != "MaskConstraint" or constraint.inner is not None):
        return "it has a constraint"
    if not flavour.sums_over_weights(flavour.regularizer(layer, kernel)):
        return "its regularizer is no sum over weights"
    return None


def optimizer_obstacle(flavour: Flavour, model: Any, optimizers: list[Any]) -> str | None:
    """Why the updates of this model cannot run on kept values; None if they can."""
    if len(optimizers) != 1 or optimizers[0] is not model.optimizer:
        return "the model does not train with one optimizer"
    optimizer = optimizers[0]
    inner = flavour.inner_optimizers(optimizer)
    if len(inner) > 1:
        return f"{type(optimizer).__name__} wraps another optimizer"
    if not flavour.updates_elementwise(optimizer) and type(optimizer).__name__ not in _NORMS_ONLY:
        return f"{type(optimizer).__name__} is not known to update each weight on its own"
    return None


def sparse_calls(flavour: Flavour, parts: list[tuple[Site, Any, Any]]) -> list[tuple[Any, Callable[..., Any]]]:
    """For each layer its call with `(site, values, structure)` in place of these kernels."""
    products = {
        (id(site.layer), site.role): sparse_product(site.operation, values, structure, site.input_gradient)
        for site, values, structure in parts
    }
    return layer_calls(flavour, [site for site, _, _ in parts], products)


def layer_calls(
    flavour: Flavour, sites: list[Site], products: dict[tuple[int, str], Product]
) -> list[tuple[Any, Callable[..., Any]]]:
    """For each layer its call with given products; kernels without one stay as they are."""
    layers = {id(site.layer): site for site in sites}
    calls = []
    for site in layers.values():
        layer, form = site.layer, site.form
        chosen: dict[str, Product] = {}
        for role in form.roles:
            own = products.get((id(layer), role))
            chosen[role] = own or dense_product(form.operation(layer, role), getattr(layer, role))
        calls.append((layer, form.call(flavour, layer, chosen)))
    return calls


@contextlib.contextmanager
def swapped_calls(flavour: Flavour, model: Any, calls: list[tuple[Any, Callable[..., Any]]]) -> Iterator[None]:
    """Have layers use other calls while a function is traced."""
    around = [layer for layer in flavour.layers(model) if flavour.uses_cudnn_call(layer)]
    try:
        for layer, call in calls:
            vars(layer)["call"] = call
        for layer in around:
            vars(layer)["_could_use_gpu_kernel"] = False
        yield
    finally:
        for layer, _ in calls:
            vars(layer).pop("call", None)
        for layer in around:
            vars(layer)["_could_use_gpu_kernel"] = True
