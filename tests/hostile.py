"""Valid files with hostile content: one seeded change after another of what an .h5, a .sparse.h5 or a .keras says."""

from __future__ import annotations

import base64
import copy
import io
import json
import marshal
import shutil
import sys
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from sparsekit.files.checksums import FLAVOUR, NAME, add_checksums
from sparsekit.files.sparse_file import MARK, Packer

# What code from a file would leave behind; no module of ours or of anybody's here imports `this`.
SIGN, MODULE = "HOSTILE_CODE_RAN", "this"
# A number that is in no good file: it stands in the file to which links and other outside parts lead.
SECRET = 54321.5
# Large enough to be seen, small enough for the tests.
_HUGE = 2**40

_CODE = base64.b64encode(marshal.dumps(compile(f"__import__('os').environ[{SIGN!r}] = '1'", "x", "exec"))).decode()
_LAMBDA = base64.b64encode(
    marshal.dumps((lambda x: __import__("os").environ.__setitem__("HOSTILE_CODE_RAN", "1")).__code__)
).decode()
PLANTED: tuple[Any, ...] = (
    {"class_name": "Lambda", "config": {"name": "l", "function": [_LAMBDA, None, None], "function_type": "lambda"}},
    {"class_name": "__lambda__", "config": {"value": _LAMBDA}},
    {"class_name": "__lambda__", "config": {"code": _LAMBDA, "defaults": None, "closure": None}},
    {
        "class_name": "Lambda",
        "module": "keras.layers",
        "config": {"name": "l", "function": {"class_name": "__lambda__", "config": {"code": _LAMBDA}}},
    },
    {"class_name": "Mine", "module": MODULE, "config": {}, "registered_name": None},
    {"class_name": "function", "module": MODULE, "config": "c", "registered_name": "c"},
    {"class_name": "function", "module": "builtins", "config": "exec", "registered_name": "function"},
    {"class_name": "function", "module": "os", "config": "abort", "registered_name": "abort"},
    {"class_name": "abort", "module": "os", "config": {}, "registered_name": None},
    {"class_name": "TFOpLambda", "config": {"name": "t", "function": "io.write_file"}},
    {"class_name": "eval", "module": "builtins", "config": {"source": _CODE}},
    {"class_name": "__typespec__", "spec_name": MODULE, "module": MODULE, "config": {}},
)
SCHEDULE: dict[str, Any] = {
    "class_name": "ExponentialDecay",
    "config": {"initial_learning_rate": 0.1, "decay_steps": 10, "decay_rate": 0.5},
}
_VALUES: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 3, 2**31, 2**63, 2**64, -(2**63), 10**30, 1e30, -1.5, 1e-320, float("nan")),
    *(float("inf"), "", "x", "nan", "a/b", "..", "/", "\x00", "\ud800", "é" * 9, "y" * 100_000, [], {}, [[]], [None]),
    *([1, "a", None], {"class_name": None}, {"class_name": "Adam"}, {"class_name": [], "config": []}, [{}], {"a": {}}),
    *("mse", "sgd", "adam", "exec", "keras", "float16", "99.1.0", "2.1.0", "1.2.2", "3.0.0", {"class_name": "Dense"}),
    *(SCHEDULE, {**SCHEDULE, "config": {**SCHEDULE["config"], "decay_steps": "x"}}, {**SCHEDULE, "module": MODULE}),
    *({"class_name": "Huber", "config": {"delta": "x"}}, {"class_name": "MeanSquaredError", "config": {"name": 3}}),
    *({"class_name": "Adam", "config": 3}, {"class_name": "Dense", "config": {"units": _HUGE}}, 10**6),
)


def change_json(rng: np.random.Generator, value: Any) -> tuple[Any, str]:
    """A copy with one place changed, and what was done."""
    value = copy.deepcopy(value)
    holder: Any = {"": value}
    places: list[tuple[Any, Any, str]] = []

    def walk(here: Any, trail: str) -> None:
        for key, inner in here.items() if isinstance(here, dict) else enumerate(here):
            places.append((here, key, f"{trail}/{key}"))
            if isinstance(inner, (dict, list)):
                walk(inner, f"{trail}/{key}")

    walk(holder, "")
    here, key, trail = places[int(rng.integers(0, len(places)))]
    kind = rng.choice(["value", "value", "value", "code", "remove", "rename", "wrap", "deep", "swap", "twice", "type"])
    if kind == "remove" and here is not holder:
        del here[key]
    elif kind == "rename" and isinstance(here, dict) and here is not holder:
        here[f"{key}_"] = here.pop(key)
    elif kind == "wrap":
        here[key] = [here[key]] if rng.random() < 0.5 else {"class_name": "Dense", "config": here[key]}
    elif kind == "deep":
        for _ in range(int(rng.choice([30, 200, 400, 900, 3000]))):
            here[key] = [here[key]] if rng.random() < 0.5 else {"config": here[key], "class_name": "Sequential"}
    elif kind == "swap":
        other, place, _ = places[int(rng.integers(0, len(places)))]
        here[key] = copy.deepcopy(other[place])
    elif kind == "twice" and isinstance(here, list):
        here.append(copy.deepcopy(here[key]))
    elif kind == "type":
        here[key] = str(here[key]) if not isinstance(here[key], str) else len(here[key])
    elif kind == "code":
        here[key] = copy.deepcopy(PLANTED[int(rng.integers(0, len(PLANTED)))])
    else:
        here[key] = copy.deepcopy(_VALUES[int(rng.integers(0, len(_VALUES)))])
    return holder[""], f"{kind} at {trail}"


def dumped(value: Any) -> str:
    """JSON, however deep."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(20_000)
    try:
        return json.dumps(value)
    finally:
        sys.setrecursionlimit(before)


def change_array(rng: np.random.Generator, array: np.ndarray) -> np.ndarray:
    """Other values, another dtype or another shape."""
    array, kind = np.asarray(array), rng.choice(["values", "values", "dtype", "shape"])
    if kind == "values":
        changed, numbers = array.copy(), [0, 1, -1, 255, 2**31, 2**62]
        if array.dtype.kind == "f":
            numbers = [np.nan, np.inf, -np.inf, 1e30, -1.0, 0.0, -0.0, 1e-40]
        elif array.dtype.kind in "ui":
            limits = np.iinfo(array.dtype)
            numbers = [limits.min, limits.max, limits.max // 2, 0, 1]
        number = np.asarray(numbers[int(rng.integers(0, len(numbers)))]).astype(array.dtype)
        if rng.random() < 0.5 or not array.size:
            changed[...] = number
        else:
            changed.reshape(-1)[int(rng.integers(0, array.size))] = number
        return changed
    if kind == "dtype":
        return array.astype(rng.choice(["f2", "f8", "i1", "u1", "i8", "u8", "?", ">f4", "c8", "S3"]))
    shapes = [(0,), (), (1,), (1, *array.shape), array.shape[::-1], (array.size,), (*array.shape, 0), (1,) * 30]
    return np.resize(array, shapes[int(rng.integers(0, len(shapes)))])


# --- HDF5 ---


def _weight_of(name: str) -> float:
    """What is read with the least suspicion is looked at most."""
    if "optimizer" in name or "iteration" in name or "training_config" in name:
        return 8
    return 6 if "sparsekit_masks" in name else 3 if name.endswith(("_names", "_config")) or "sparsekit" in name else 1


def _pick(rng: np.random.Generator, names: list[str]) -> str:
    weights = np.array([_weight_of(name) for name in names])
    return names[int(rng.choice(len(names), p=weights / weights.sum()))]


def change_h5(rng: np.random.Generator, file: h5py.File, secret: Path) -> str:
    """Change one thing in an open file."""
    members: list[str] = []
    file.visit(members.append)
    attributes = [f"{name}@{key}" for name in ("/", *members) for key in file[name].attrs]
    what = _pick(rng, members + attributes)
    owner, _, key = what.partition("@")
    if key:
        return f"{what}: {_change_attribute(rng, file[owner].attrs, key)}"
    return f"{what}: {_change_member(rng, file, what, secret)}"


def _change_attribute(rng: np.random.Generator, attributes: Any, key: str) -> str:
    value = attributes[key]
    text = value.decode() if isinstance(value, bytes) else value
    if isinstance(text, str) and text.startswith("{") and rng.random() < 0.85:
        changed, how = change_json(rng, json.loads(text))
        coded = dumped(changed).encode("utf-8", "replace")
        attributes[key] = coded if len(coded) < 60_000 else coded[:60_000]
        return how
    kind = str(rng.choice(["remove", "value", "list"]))
    if kind == "remove":
        del attributes[key]
    elif kind == "list" and isinstance(value, np.ndarray) and value.size and value.dtype.kind in "SO":
        names = [one if isinstance(one, bytes) else str(one).encode() for one in value.reshape(-1)]
        place = int(rng.integers(0, len(names)))
        hostile = (b"", b"..", b"/", b"a/b", b"\xff\xfe", names[0], b"z" * 5000, b"vars", names[place] + b"/x", b"..//")
        kind = str(rng.choice(["one", "twice", "less", "turn"]))
        if kind == "one":
            names[place] = hostile[int(rng.integers(0, len(hostile)))]
        elif kind == "twice":
            names.append(names[place])
        elif kind == "less":
            del names[place]
        else:
            names.reverse()
        attributes[key] = np.array(names, dtype="S") if names else np.zeros(0, "S1")
    else:
        hostile = (
            *(0, -1, 2**63 - 1, np.uint64(2**64 - 1), np.nan, True, b"", "", "3.99", "4.0.0", "1.0", "keras", "[1]"),
            *(np.zeros(0), np.zeros((2, 2)), h5py.Empty("f4"), h5py.Empty("S3"), b"\xff\xfe\x80", "x" * 9999, "null"),
            *("NaN", "{}", "[" * 20_000, '"a"', np.void(b"abc"), np.array([b"a", b"b"]), np.array(["a"], "O")),
            *(np.zeros(2, [("a", "f4")]), np.complex64(1), "9" * 5000, '{"class_name": "Sequential", "config": []}'),
        )
        place = int(rng.integers(0, len(hostile)))
        attributes[key] = hostile[place]
        kind = f"hostile value {place}"
    return kind


def _change_member(rng: np.random.Generator, file: h5py.File, name: str, secret: Path) -> str:
    old = file[name]
    # What the change before made need not be readable.
    array = old[()] if isinstance(old, h5py.Dataset) and old.dtype.kind in "fiub" and small(old) else None
    choices = ["remove", "rename", "soft", "external", "dangling", "cycle", "group", "foreign"]
    if array is not None:
        choices = [*choices, "huge", "empty", "outside", "virtual", "filter", "reference", *["array"] * 16]
        if array.dtype == np.uint8 and array.ndim == 1 and array.tobytes()[:1] == b"{":
            choices += ["json"] * 40
    kind = str(rng.choice(choices))
    if kind == "rename":
        file.move(name, f"{name}_")
        return kind
    shape = () if array is None else array.shape
    del file[name]
    if kind == "soft":
        others = [one for one in names_of(file) if one != name] or ["/"]
        file[name] = h5py.SoftLink(f"/{others[int(rng.integers(0, len(others)))]}")
    elif kind == "external":
        file[name] = h5py.ExternalLink(str(secret), str(shape))
    elif kind == "dangling":
        file[name] = h5py.SoftLink("/nowhere/at/all")
    elif kind == "cycle":
        file[name] = file["/"]
    elif kind == "group":
        file.create_group(name).attrs["weight_names"] = [b"a"]
    elif kind == "foreign":
        foreign: tuple[Any, ...] = (
            *(np.zeros(3, [("a", "f4"), ("b", "S2")]), np.void(b"opaque"), np.array([b"a", b"bc"]), 1.0, "text"),
            np.zeros(shape, h5py.enum_dtype({"A": 0, "B": 1})),
        )
        file[name] = foreign[int(rng.integers(0, len(foreign)))]
    elif kind == "huge":
        sizes: tuple[tuple[int, ...], ...] = ((_HUGE,), (_HUGE, *shape), tuple(_HUGE for _ in shape)[:1] or (_HUGE,))
        size = sizes[int(rng.integers(0, len(sizes)))]
        chunks = (1024, *(1 for _ in size[1:]))
        file.create_dataset(name, size, array.dtype if array is not None else "f4", chunks=chunks, compression="gzip")
    elif kind == "empty":
        file[name] = h5py.Empty("f4")
    elif kind == "outside":
        file.create_dataset(name, shape or (1,), "f4", external=[(str(secret), 0, h5py.h5f.UNLIMITED)])
    elif kind == "virtual":
        layout = h5py.VirtualLayout(shape or (1,), "f4")
        layout[...] = h5py.VirtualSource(str(secret), str(shape), shape or (1,))
        file.create_virtual_dataset(name, layout)
    elif kind == "filter" and array is not None:
        options = [{"compression": "gzip"}, {"compression": "lzf"}, {"fletcher32": True, "shuffle": True}]
        options.append({"compression": "gzip", "shuffle": True, "fletcher32": True})
        chosen: dict[str, Any] = options[int(rng.integers(0, len(options)))] if shape else {}
        file.create_dataset(name, data=array, **({"chunks": True, **chosen} if array.ndim and array.size else {}))
    elif kind == "reference":
        file.create_dataset(name, data=np.array([file.ref] * 2, dtype=h5py.ref_dtype))
    elif kind == "json" and array is not None:
        changed, how = change_json(rng, json.loads(array.tobytes()))
        file[name] = np.frombuffer(dumped(changed).encode("utf-8", "replace"), np.uint8)
        return how
    elif kind == "array" and array is not None:
        file[name] = change_array(rng, array)
    return kind


def small(dataset: h5py.Dataset) -> bool:
    return dataset.shape is not None and dataset.nbytes < 1 << 20


def names_of(file: h5py.File) -> list[str]:
    """Paths of all arrays."""
    found: list[str] = []
    file.visititems(lambda name, item: found.append(name) if isinstance(item, h5py.Dataset) else None)
    return found


def _sign(rng: np.random.Generator, file: h5py.File) -> str:
    """Mostly make the checksums those of the changed content, or take them out, so that what they cover is read."""
    if NAME not in file or rng.random() < 0.1:
        return "old checksums"
    tidy = [name for name in names_of(file) if small(file[name])]
    if rng.random() < 0.6 and len(tidy) == len(names_of(file)):
        kept = file[NAME][()]
        del file[NAME]
        try:
            add_checksums(file)
            return "new checksums"
        except (ValueError, TypeError, RecursionError, OSError, KeyError):
            file[NAME] = kept
    del file[NAME]
    file.attrs.pop(FLAVOUR, None)
    return "no checksums"


# --- the other formats ---


def _change_sparse(rng: np.random.Generator, file: h5py.File, secret: Path) -> str:
    """Change the head of a sparse file or one of its arrays, and give it the checksums of that."""
    coded, data = file["head"][()].tobytes(), file["data"][()].tobytes()
    head = json.loads(zlib.decompress(coded))
    if rng.random() < 0.5:
        owned = [index for _, index in head["optimizer"]] + list(head["masks"].values())
        chosen = owned if rng.random() < 0.7 and owned else range(len(head["arrays"]))
        index = int(rng.choice(chosen))
        packer = Packer()
        packer.table, packer.blocks, packer.size = head["arrays"], [data], len(data)
        array = packer.decoder(index).read()
        how = f"array {index}"
        if array.dtype == np.uint8 and array.tobytes()[:1] == b"{" and rng.random() < 0.7:
            changed, how = change_json(rng, json.loads(array.tobytes()))
            array = np.frombuffer(dumped(changed).encode("utf-8", "replace"), np.uint8)
        else:
            changed = change_array(rng, array)
            # What a sparse file cannot say stays as it is.
            array = changed if changed.dtype.kind in "fiub" else array
        head["arrays"][index] = head["arrays"][packer.add(array)]
        del head["arrays"][-1]
        data = b"".join(packer.blocks)
    else:
        part = str(rng.choice(["all", "arrays", "optimizer", "masks", "training_config", "model_config"]))
        if part in head:
            head[part], how = change_json(rng, head[part])
        elif part == "all":
            head, how = change_json(rng, head)
        else:
            changed, how = change_json(rng, json.loads(head["attributes"][part]))
            head["attributes"][part] = dumped(changed)
        how = f"{part}: {how}"
    coded = zlib.compress(dumped(head).encode("utf-8", "replace"))
    for name, block in (("head", coded), ("data", data)):
        del file[name]
        file[name] = np.frombuffer(block, np.uint8)
    if rng.random() < 0.95:
        file.attrs["crc"] = zlib.crc32(coded)
    return how if rng.random() < 0.85 else f"{how}, {change_h5(rng, file, secret)}"


def _change_zip(rng: np.random.Generator, members: dict[str, bytes], secret: Path) -> str:
    """Change one member of a .keras file."""
    name = str(rng.choice(sorted(members), p=_shares(sorted(members))))
    kind = rng.random()
    if kind < 0.03:
        del members[name]
    elif kind < 0.06:
        members[f"../{name}" if rng.random() < 0.5 else f"assets/../../{name}"] = members[name]
    elif kind < 0.09:
        members[name] = b"\0" * (1 << 24) if rng.random() < 0.5 else b""
    elif name.endswith(".json"):
        changed, how = change_json(rng, json.loads(members[name]))
        members[name] = dumped(changed).encode("utf-8", "replace")
        return f"{name}: {how}"
    elif name.endswith(".h5"):
        content = io.BytesIO(members[name])
        with h5py.File(content, "r+") as file:
            how = change_h5(rng, file, secret)
        members[name] = content.getvalue()
        return f"{name}: {how}"
    elif name.endswith(".npz"):
        with np.load(io.BytesIO(members[name])) as arrays:
            changed = {key: arrays[key] for key in arrays.files}
        key = str(rng.choice(sorted(changed)))
        if key == "index" and rng.random() < 0.7:
            value, how = change_json(rng, json.loads(changed[key].tobytes()))
            changed[key] = np.frombuffer(dumped(value).encode("utf-8", "replace"), np.uint8)
        elif rng.random() < 0.1:
            changed[key], how = np.array([_Pickled()], dtype=object), "pickle"
        else:
            changed[key], how = change_array(rng, changed[key]), "array"
        content = io.BytesIO()
        np.savez(content, allow_pickle=True, **changed)
        members[name] = content.getvalue()
        return f"{name}: {key} {how}"
    return f"{name}: {kind:.2f}"


class _Pickled:
    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return exec, (f"__import__('os').environ[{SIGN!r}] = '1'",)


def _shares(names: list[str]) -> np.ndarray:
    weights = np.array([4.0 if name.endswith((".h5", "config.json")) else 2.0 for name in names])
    return weights / weights.sum()


def hostile(path: Path, seed: int, broken: Path) -> str:
    """Write a changed copy of a file; gives what has changed.

    Args:
        path: a good file of any format.
        seed: of the change.
        broken: the copy. Beside it comes the file to which outside parts lead.
    """
    rng, secret = np.random.default_rng(seed), broken.with_name("secret.bin")
    if not secret.exists():
        with h5py.File(secret, "w", userblock_size=4096) as file:
            for shape in ((), (2,), (8,), (6, 8), (8, 2)):
                file[str(shape)] = np.full(shape, SECRET, np.float32)
        with open(secret, "r+b") as raw:
            raw.write(np.full(1024, SECRET, np.float32).tobytes())
    changes = int(rng.choice([1, 1, 1, 2, 3]))
    if path.suffix == ".keras":
        with zipfile.ZipFile(path) as archive:
            members = {name: archive.read(name) for name in archive.namelist()}
        done = []
        for _ in range(changes):
            try:
                done.append(_change_zip(rng, members, secret))
            except (ValueError, RecursionError, OSError):
                # The change before left a member that cannot be opened.
                break
        with zipfile.ZipFile(broken, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in members.items():
                archive.writestr(name, content)
        return "; ".join(done)
    shutil.copyfile(path, broken)
    with h5py.File(broken, "r+") as file:
        if MARK in file.attrs:
            return _change_sparse(rng, file, secret)
        done = []
        for _ in range(changes):
            done.append(change_h5(rng, file, secret))
        return f"{'; '.join(done)}; {_sign(rng, file)}"
