"""Which variables of a model can be pruned, how they are called, and why the others are left alone."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from .errors import ArgumentError, NothingToPruneError
from .flavour import Flavour, flavour_of, key_of, native

# Names of trainable variables of rank 2 and more that are not kernels: biases of attention heads or of GRUs with
# reset_after, scales and shifts of normalisation over several axes, slopes of PReLU.
_NOT_KERNELS = ("bias", "beta", "gamma", "alpha", "scale", "moving_mean", "moving_variance")

Selector = str | type | Callable[["WeightRef"], bool]


@dataclass(frozen=True, eq=False)
class WeightRef:
    """One variable of a model, the same for both Kerases.

    Args:
        path: unique name inside the model, for example `"dense/kernel"`.
        variable: the variable as the model holds it.
        layer: the layer that created it (None for a variable that no layer owns).
        owners: the layers that hold that layer, outermost first, and itself; without the model.
        role: last part of its name: kernel, recurrent_kernel, depthwise_kernel, embeddings, ...
        in_axis: axis that runs over inputs.
        out_axis: axis that runs over outputs.
    """

    path: str
    variable: Any = field(repr=False)
    layer: Any = field(repr=False)
    owners: tuple[Any, ...] = field(repr=False)
    role: str
    in_axis: int
    out_axis: int

    @property
    def key(self) -> str:
        return key_of(self.variable)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(int(n) for n in self.variable.shape)

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    def numpy(self) -> np.ndarray:
        """The current values, read-only and without a copy where TensorFlow allows it."""
        return read(self.variable)


@dataclass(frozen=True, eq=False)
class Skipped:
    """A variable that is not pruned, with the reason."""

    ref: WeightRef
    reason: str


def read(variable: Any) -> np.ndarray:
    """Values of a variable as a read-only array that shares memory with it where possible."""
    value = native(variable)
    value = getattr(value, "_variable", value)
    if isinstance(value, tf.distribute.DistributedValues):
        value = value._primary  # type: ignore[attr-defined]
    array = np.asarray(memoryview(value.read_value())) if value.dtype != tf.bfloat16 else value.numpy()
    array = array.view()
    array.flags.writeable = False
    return array


def not_finite(model: Any) -> dict[str, int]:
    """Trainable weights that hold NaN or infinity: path -> how many."""
    counts = {}
    for variable in model.trainable_variables:
        if tf.as_dtype(variable.dtype).is_floating:
            values = read(variable)
            counts[key_of(variable)] = values.size - int(np.count_nonzero(np.isfinite(values)))
    return (
        {ref.path: counts[ref.key] for ref in all_weights(model) if counts.get(ref.key)} if any(counts.values()) else {}
    )


def all_weights(model: Any) -> list[WeightRef]:
    """Every variable of the model once, in the order of its layers, with a unique path.

    Raises:
        ModelTypeError: if `model` is no Keras model.
        NothingToPruneError: if the model has no variables because it was never built.
    """
    flavour = flavour_of(model)
    chains = flavour.chains(model)
    found: dict[str, tuple[Any, tuple[Any, ...]]] = {}
    for chain in chains:
        for variable in flavour.own_variables(chain[-1]):
            found.setdefault(key_of(variable), (variable, chain))
    for variable in flavour.variables(model):
        found.setdefault(key_of(variable), (variable, ()))
    # A model that is only there to be trained, such as a GAN around two built ones, is never called itself.
    if not model.built and (not found or any(not chain[-1].built for chain in chains[1:])):
        raise NothingToPruneError(
            f"The model '{model.name}' has not all of its weights yet; call it once on a batch of data to build it."
        )
    refs, taken = [], set()
    for variable, chain in found.values():
        # The model's own name is in front or not depending on how it was built; a saved file has it otherwise.
        path = _unique(flavour.path(variable).removeprefix(f"{model.name}/"), taken)
        role = path_role(flavour, variable)
        layer = chain[-1] if chain else None
        in_axis, out_axis = _axes(layer, role, len(variable.shape))
        refs.append(WeightRef(path, variable, layer, chain[1:] or chain, role, in_axis, out_axis))
    return refs


def _unique(path: str, taken: set[str]) -> str:
    """Two sub-models may use the same layer names; a number after the path tells their weights apart."""
    name, number = path, 0
    while name in taken:
        number += 1
        name = f"{path}_{number}"
    taken.add(name)
    return name


def path_role(flavour: Flavour, variable: Any) -> str:
    return flavour.path(variable).rsplit("/", 1)[-1]


def _axes(layer: Any, role: str, rank: int) -> tuple[int, int]:
    """Input and output axis of a kernel."""
    if rank < 2:
        return 0, 0
    # Keras' own classes, also below a class that a user derived from one.
    kinds = {kind.__name__ for kind in type(layer).__mro__}
    if any(kind.startswith("Conv") and kind.endswith("Transpose") for kind in kinds):
        return rank - 1, rank - 2
    if "EinsumDense" in kinds:
        # "abc,cde->abde": the kernel's letters that the input has and the output has not are summed over.
        inputs, rest = layer.equation.replace("...", "").split(",")
        kernel, outputs = rest.split("->")
        summed = [i for i, letter in enumerate(kernel) if letter in inputs and letter not in outputs]
        free = [i for i, letter in enumerate(kernel) if letter not in inputs]
        return (summed or [0])[-1], (free or [rank - 1])[-1]
    if "depthwise" in role or any("Depthwise" in kind for kind in kinds):
        return rank - 2, rank - 2
    return rank - 2, rank - 1


def survey(
    model: Any,
    include: Selector | Iterable[Selector] | None = None,
    exclude: Selector | Iterable[Selector] | None = None,
    allow_empty: bool = False,
) -> tuple[list[WeightRef], list[Skipped]]:
    """Split a model's variables into those that can be pruned and the rest.

    By default a weight is pruned if it is trainable, floating, of rank 2 or more and no bias, scale or statistic.

    Args:
        model: a built Keras model.
        include: take only weights that one of these matches: a glob over the path (`"block1/*"`), the class of a
            layer that holds the weight or its name (`"Conv2D"`, `"LSTM"`), or a function `WeightRef -> bool`. A glob
            that ends in the name of a bias (`"*/bias"`) takes biases along, which are left out otherwise.
        exclude: the same forms; leave these weights out.
        allow_empty: return an empty list instead of an error if nothing is left.

    Returns:
        `(weights to prune, skipped ones with a reason)`.

    Raises:
        ArgumentError: if a selector matches no weight, so that a typing mistake is not silent.
        NothingToPruneError: if nothing is left.
    """
    refs = all_weights(model)
    trainable = {key_of(variable) for variable in model.trainable_variables}
    includes, excludes = _selectors(include, "include"), _selectors(exclude, "exclude")
    if include is not None and not includes:
        raise ArgumentError("include is empty, so that nothing would be pruned; give None for all weights.")
    for name, selectors in (("include", includes), ("exclude", excludes)):
        for selector in selectors:
            if not any(_matches(selector, ref) for ref in refs):
                raise ArgumentError(
                    f"{name}={selector!r} matches no weight of '{model.name}'; its paths are, for example, "
                    f"{', '.join(ref.path for ref in refs[:3])}."
                )
    chosen, skipped = [], []
    for ref in refs:
        reason = _reason(ref, trainable, includes, excludes)
        if reason is None:
            chosen.append(ref)
        else:
            skipped.append(Skipped(ref, reason))
    if not chosen and not allow_empty:
        meant = [s for s in skipped if includes and _any_match(includes, s.ref)] or skipped
        reasons = "; ".join(f"{s.ref.path}: {s.reason}" for s in meant[:4]) or "it has no variables"
        raise NothingToPruneError(f"The model '{model.name}' has no weight to prune ({reasons}).")
    return chosen, skipped


def prunable_weights(model: Any) -> list[WeightRef]:
    """The weights that `prune` takes by default."""
    return survey(model)[0]


def is_kernel(role: str) -> bool:
    """Whether a variable of this name is more than a bias, scale or statistic."""
    return not any(role == name or role.endswith("_" + name) for name in _NOT_KERNELS)


def _reason(
    ref: WeightRef, trainable: set[str], includes: Sequence[Selector], excludes: Sequence[Selector]
) -> str | None:
    """Why a weight is left alone; None if it is pruned."""
    named = any(isinstance(s, str) and _names_role(s, ref) for s in includes)
    if not tf.as_dtype(ref.variable.dtype).is_floating:
        return "not floating point"
    if ref.key not in trainable:
        return "not trainable"
    if ref.size == 0:
        return "empty"
    if not named and not is_kernel(ref.role):
        return "bias, scale or statistic"
    if not named and len(ref.shape) < 2:
        return "vector"
    if includes and not _any_match(includes, ref):
        return "not included"
    if _any_match(excludes, ref):
        return "excluded"
    return None


def _selectors(given: Selector | Iterable[Selector] | None, argument: str) -> list[Selector]:
    if given is None:
        return []
    selectors: list[Any] = [given]
    if isinstance(given, Iterable) and not isinstance(given, (str, type)):
        selectors = list(given)
    for selector in selectors:
        if not (isinstance(selector, (str, type)) or callable(selector)):
            raise ArgumentError(
                f"{argument} holds {selector!r}; give globs over weight paths, layer classes or functions."
            )
    return selectors


def _any_match(selectors: Sequence[Selector], ref: WeightRef) -> bool:
    return any(_matches(selector, ref) for selector in selectors)


def _matches(selector: Selector, ref: WeightRef) -> bool:
    if isinstance(selector, str):
        return fnmatch.fnmatchcase(ref.path, selector) or any(type(o).__name__ == selector for o in ref.owners)
    if isinstance(selector, type):
        return any(isinstance(owner, selector) for owner in ref.owners)
    return bool(selector(ref))


def _names_role(glob: str, ref: WeightRef) -> bool:
    """Whether a glob asks for this kind of variable by its own name (`"*/bias"`), not by a mere star."""
    last = glob.rsplit("/", 1)[-1].strip("*")
    return bool(last) and last in ref.role and fnmatch.fnmatchcase(ref.path, glob)
