"""The sparse file: bit for bit, small, and sure of itself."""

from __future__ import annotations

import zlib

import h5py
import keras
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from models import both, mlp

import sparsekit
from sparsekit.errors import FileError
from sparsekit.files.sparse_file import Packer, gaps, positions, write_sparse
from sparsekit.flavour import get
from sparsekit.weights import all_weights


@given(st.lists(st.integers(0, 3000), unique=True))
def test_gaps_give_the_positions_back(kept):
    kept = np.array(sorted(kept), dtype=np.int64)
    assert positions(gaps(kept)).tolist() == kept.tolist()


@pytest.mark.parametrize("gap", [0, 1, 254, 255, 256, 509, 510, 511, 100_000])
def test_gaps_around_the_escape(gap):
    kept = np.array([gap, 2 * gap + 1, 2 * gap + 2])
    assert positions(gaps(kept)).tolist() == kept.tolist()


def unpack(packer, number):
    return packer.decoder(number).read()


@given(
    arrays.arrays(
        st.sampled_from(["<f4", "<f2", "<f8", "<i8", "|u1", "|b1"]), arrays.array_shapes(min_dims=0, min_side=0)
    )
)
def test_any_array_comes_back_bit_for_bit(array):
    packer = Packer()
    back = unpack(packer, packer.add(array))
    assert (back.shape, back.dtype, back.tobytes()) == (array.shape, array.dtype, array.tobytes())


def test_signs_of_zero_and_nan_survive():
    array = np.array([0.0, -0.0, np.nan, -np.nan, np.inf, 1e-45, 0, 0, 0, 0], dtype=np.float32)
    packer = Packer()
    assert unpack(packer, packer.add(array)).tobytes() == array.tobytes()


def pruned(sparsity, units=400):
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.layers.Input((units,)), keras.layers.Dense(units), keras.layers.Dense(units), keras.layers.Dense(10)]
    )
    rng = np.random.default_rng(0)
    # Trained weights look like this; the bits of fresh uniform ones would compress.
    model.set_weights([rng.normal(scale=0.05, size=w.shape) for w in model.get_weights()])
    return sparsekit.prune(model, sparsity)


@pytest.mark.parametrize("sparsity", [0.5, 0.8, 0.9, 0.95, 0.99])
def test_size_is_within_the_entropy_bound_and_below_gzip(sparsity, tmp_path):
    model = pruned(sparsity)
    sparsekit.save(model, tmp_path / "model.h5")
    sizes = write_sparse(model, get("keras"), tmp_path / "model.sparse.h5", True)
    n = 400 * 400 * 2 + 400 * 10
    entropy = -sparsity * np.log2(sparsity) - (1 - sparsity) * np.log2(1 - sparsity)
    biases = 2 * 400 + 10
    bound = (round(n * (1 - sparsity)) * 32 + n * entropy + biases * 32) / 8
    assert sizes.bound == pytest.approx(bound, rel=0.02)
    whole = (tmp_path / "model.sparse.h5").stat().st_size
    assert whole <= 1.15 * bound + 4096
    assert whole < len(zlib.compress((tmp_path / "model.h5").read_bytes(), 9))
    loaded = sparsekit.load(tmp_path / "model.sparse.h5")
    assert [w.tobytes() for w in loaded.get_weights()] == [w.tobytes() for w in model.get_weights()]


def test_a_mask_that_its_zeros_do_not_tell_is_kept(tmp_path):
    model = mlp("keras")
    kernel = model.layers[0].kernel
    kernel.assign(np.where(np.arange(48).reshape(6, 8) % 7 == 0, 0, 1))
    sparsekit.freeze(model, {all_weights(model)[0].path: np.arange(48).reshape(6, 8) % 2 == 0})
    sparsekit.save(model, tmp_path / "model.sparse.h5")
    (keep,) = sparsekit.masks_of(sparsekit.load(tmp_path / "model.sparse.h5")).values()
    assert keep.tolist() == (np.arange(48).reshape(6, 8) % 2 == 0).tolist()


@both
def test_each_changed_byte_of_the_data_is_noticed_or_harmless(flavour, tmp_path):
    model = mlp(flavour)
    sparsekit.prune(model, 0.5)
    path = tmp_path / "model.sparse.h5"
    sparsekit.save(model, path)
    with h5py.File(path, "r") as file:
        start, size = file["data"].id.get_offset(), file["data"].id.get_storage_size()
    content, noticed = path.read_bytes(), 0
    for place in range(start, start + size, size // 12):
        path.write_bytes(content[:place] + bytes([content[place] ^ 16]) + content[place + 1 :])
        try:
            loaded = sparsekit.load(path)
        except FileError:
            noticed += 1
        else:
            # The state of an optimizer that made no step is in the file, but nobody reads it.
            assert [w.tobytes() for w in loaded.get_weights()] == [w.tobytes() for w in model.get_weights()]
    assert noticed > 8


def test_a_later_version_is_named(tmp_path):
    sparsekit.save(mlp("keras"), tmp_path / "model.sparse.h5")
    with h5py.File(tmp_path / "model.sparse.h5", "r+") as file:
        file.attrs["sparsekit_sparse"] = 99
    with pytest.raises(FileError, match="later sparsekit"):
        sparsekit.load(tmp_path / "model.sparse.h5")
