"""Make a model from what a file holds: build it from its config, then give every weight its values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import FileError
from ..flavour import NAMES, Flavour, key_of, native
from ..weights import all_weights
from .layouts import convolution, of_today
from .repairs import plain_name
from .stored import StoredArray, StoredModel

# Weights that are in no file (seeds of random layers) come on top of those that are.
SLACK = 100_000


def build(
    stored: StoredModel,
    config: dict[str, Any],
    flavour: Flavour,
    custom_objects: dict[str, Any] | None,
    path: Path,
    safe: bool = True,
) -> Any:
    """Build the model and fill in its weights.

    Args:
        stored: what the file holds.
        config: the model's config, repaired for this flavour.
        flavour: the Keras to build it in.
        custom_objects: classes and functions that the config names.
        path: the file, for messages.
        safe: whether Keras refuses code in the config.

    Raises:
        FileError: if this Keras cannot build it, or if the weights in the file do not fit.
    """
    try:
        model = flavour.model_from_config(config, custom_objects or {}, 2 * stored.size + SLACK, safe)
    except MemoryError as error:
        raise FileError(
            f"The layers in the config of '{path}' need far more weights than the file holds; the file is damaged."
        ) from error
    except RecursionError as error:
        raise FileError(f"The config in '{path}' is nested too deeply; the file is damaged.") from error
    except Exception as error:
        raise FileError(why_not_built(error, flavour, path)) from error
    check_rules(model, flavour, path)
    put_weights(model, stored, flavour, path)
    return model


def check_rules(model: Any, flavour: Flavour, path: Path) -> None:
    """Refuse regularizers and constraints that are none: Keras takes any text for one until the first step.

    Raises:
        FileError: naming the layer.
    """
    for layer in flavour.layers(model):
        # A layer of the user's own may call whatever it likes by such a name.
        for name, rule in vars(layer).items() if type(layer).__module__.split(".")[0] in NAMES else ():
            if name.startswith("_") or not name.endswith(("_regularizer", "_constraint")) or rule is None:
                continue
            if not callable(rule) or flavour.is_layer(rule):
                raise FileError(f"Layer '{layer.name}' in '{path}' has a {name} that is none; the file is damaged.")


def why_not_built(error: Exception, flavour: Flavour, path: Path) -> str:
    """One sentence for a config that a Keras refused."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    if not first or isinstance(error, (LookupError, AttributeError)):
        first = f"{type(error).__name__} {first}"
    return f"{flavour.label} cannot build the model in '{path}': {first.rstrip('.')[:300]}."


def put_weights(model: Any, stored: StoredModel, flavour: Flavour, path: Path) -> None:
    """Give every weight of a model the values that the file has for it.

    Raises:
        FileError: if a weight has no array, or one of another shape; nothing has changed then.
    """
    plan: list[tuple[Any, StoredArray]] = []
    layers = [(layer, flavour.saved_weights(layer)) for layer in model.layers]
    layers = [(layer, variables) for layer, variables in layers if variables]
    groups = [(name, arrays) for name, arrays in stored.layers if arrays]
    if len(groups) != len(layers):
        raise FileError(
            f"'{path}' holds weights of {len(groups)} layers, but the model '{model.name}' has {len(layers)} layers "
            "with weights; give the model that the file was saved from: sparsekit.load(path, model=build)."
        )
    owners = {ref.key: ref.layer for ref in all_weights(model)}
    by_name = {plain_name(name): arrays for name, arrays in groups}
    named = len(by_name) == len(groups) and set(by_name) == {plain_name(layer.name) for layer, _ in layers}
    for (layer, variables), (name, arrays) in zip(layers, groups, strict=True):
        if named:
            name, arrays = layer.name, by_name[plain_name(layer.name)]
        if [tuple(variable.shape) for variable in variables] != [array.shape for array in arrays]:
            cells = [flavour.path(v).endswith("/recurrent_kernel") and owners[key_of(v)] for v in variables]
            arrays = of_today(arrays, [type(cell).__name__ for cell in cells if cell])
        plan += _pair(variables, arrays, flavour, f"layer '{name}'", path)
    own = flavour.top_level_weights(model)
    if own or stored.top_level:
        plan += _pair(own, stored.top_level, flavour, "the model itself", path)
    plan = [(v, convolution(array, owners.get(key_of(v)), stored.backend)) for v, array in plan]
    for variable, array in plan:
        if tuple(variable.shape) != array.shape:
            raise FileError(
                f"'{path}' holds '{array.name}' with shape {array.shape}, but '{flavour.path(variable)}' of the model "
                f"has {tuple(variable.shape)}; give the model that the file was saved from."
            )
    values = [(variable, array.read()) for variable, array in plan]
    for variable, value in values:
        native(variable).assign(value)
    flavour.finalize(model)


def _pair(
    variables: list[Any], arrays: list[StoredArray], flavour: Flavour, where: str, path: Path
) -> list[tuple[Any, StoredArray]]:
    """Which array belongs to which variable of one layer: by name where the names tell, else by place.

    The place alone is not enough: the order inside a nested model follows which of its layers are trainable, and two
    layers of equal shape would swap their weights without a word.
    """
    if len(variables) != len(arrays):
        raise FileError(
            f"'{path}' holds {len(arrays)} weights for {where}, but it has {len(variables)}; "
            "give the model that the file was saved from."
        )
    paired = _by_name([flavour.path(v) for v in variables], [a.name for a in arrays])
    return [(variable, arrays[position]) for variable, position in zip(variables, paired, strict=True)]


def _by_name(wanted: list[str], found: list[str]) -> list[int]:
    """For each wanted name the position of the found one; the given order if names do not decide."""
    ours = [name.split("/") for name in wanted]
    theirs = [name.split(":")[0].split("/") for name in found]
    for depth in range(max(map(len, ours + theirs), default=1), 0, -1):
        tails = [tuple(parts[-depth:]) for parts in ours]
        positions = {tuple(parts[-depth:]): position for position, parts in enumerate(theirs)}
        if len(set(tails)) == len(tails) and len(positions) == len(theirs) and set(tails) == set(positions):
            return [positions[tail] for tail in tails]
    return list(range(len(found)))
