"""Masks and sets of masks: exact counts, read-only, and bit for bit the same after a trip through a file."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from sparsekit.errors import MaskError
from sparsekit.masks import Mask, MaskSet, unpack

KEEPS = hnp.arrays(np.bool_, hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=7))
PATHS = st.text(min_size=1, max_size=12).filter(lambda name: "\0" not in name and name.encode("utf-8", "ignore"))


@given(KEEPS)
def test_counts_are_exact(keep):
    mask = Mask("w", keep)
    assert mask.zeros == sum(not kept for kept in keep.reshape(-1))
    assert mask.shape == keep.shape
    if keep.size:
        assert mask.sparsity == mask.zeros / keep.size
    assert mask.density == 1 - mask.sparsity


@given(hnp.arrays(np.float32, (3, 4), elements=st.sampled_from([0.0, -0.0, 1.0, -2.0, 1e-45, np.nan, np.inf])))
def test_only_exact_zeros_are_read_as_dropped(weight):
    keep = Mask.from_zeros("w", weight).keep
    assert np.array_equal(~keep, np.array([[float(value) == 0.0 for value in row] for row in weight]))


@given(KEEPS, st.data())
def test_union_keeps_what_either_keeps(keep, data):
    other = data.draw(hnp.arrays(np.bool_, keep.shape))
    union = Mask("w", keep).union(Mask("w", other))
    assert np.array_equal(union.keep, np.logical_or(keep, other))


@pytest.mark.parametrize("other", [Mask("v", np.ones(3, bool)), Mask("w", np.ones(4, bool))])
def test_masks_of_different_weights_do_not_join(other):
    with pytest.raises(MaskError, match="both must belong to the same weight"):
        Mask("w", np.ones(3, bool)).union(other)


def test_a_mask_cannot_be_changed_from_outside():
    keep = np.ones((2, 3), bool)
    view = keep[:]
    view.flags.writeable = False
    broadcast = np.broadcast_to(keep[0], (2, 3))
    masks = [Mask("w", keep), Mask("w", view), Mask("w", broadcast), Mask("w", keep.reshape(2, 3))]
    keep[:] = False
    for mask in masks:
        assert mask.zeros == 0
        with pytest.raises(ValueError, match="read-only"):
            mask.keep[0, 0] = False


def test_a_constant_array_is_not_copied():
    keep = np.ones(6, bool)
    keep.flags.writeable = False
    assert np.shares_memory(Mask("w", keep.reshape(2, 3)).keep, keep)


@pytest.mark.parametrize("keep", [np.ones(3), np.ones(3, np.uint8), [0, 1], np.array(["a"])])
def test_a_mask_is_boolean(keep):
    with pytest.raises(MaskError, match=r"'w' has dtype .*; it must be bool \(True = keep\), for example"):
        Mask("w", keep)


@pytest.mark.parametrize("path", ["", None, 3])
def test_a_mask_has_a_path(path):
    with pytest.raises(MaskError, match="needs the path of its weight"):
        Mask(path, np.ones(3, bool))


def test_a_set_has_one_mask_for_each_weight():
    with pytest.raises(MaskError, match="Two masks are given for 'w'"):
        MaskSet([Mask("w", np.ones(3, bool)), Mask("w", np.ones(3, bool))])
    with pytest.raises(MaskError, match="holds Mask objects; got ndarray"):
        MaskSet([np.ones(3, bool)])


def test_an_unknown_path_names_the_known_ones():
    masks = MaskSet([Mask("dense/kernel", np.ones(3, bool))])
    with pytest.raises(KeyError, match="No mask for 'dense'; known paths: dense/kernel"):
        masks["dense"]
    with pytest.raises(KeyError, match="known paths: none"):
        MaskSet()["dense"]


@given(st.dictionaries(PATHS, KEEPS, max_size=4))
def test_a_set_is_a_mapping_with_totals(arrays):
    masks = MaskSet.from_arrays(arrays)
    assert list(masks) == list(arrays)
    assert all(np.array_equal(masks[path], keep) for path, keep in arrays.items())
    assert masks.size == sum(keep.size for keep in arrays.values())
    assert masks.zeros == sum(int((~keep).sum()) for keep in arrays.values())
    assert masks.sparsity + masks.density == 1
    assert f"{len(arrays)} weights" in repr(masks)


@given(KEEPS, st.data())
def test_sets_are_equal_if_their_positions_are(keep, data):
    masks = MaskSet([Mask("v", np.ones(2, bool)), Mask("w", keep)])
    assert masks == MaskSet([Mask("w", keep.copy()), Mask("v", np.ones(2, bool))])
    assert masks != MaskSet([Mask("w", keep)])
    assert masks != {"w": keep}
    if keep.size:
        other = keep.copy()
        other.flat[data.draw(st.integers(0, keep.size - 1))] ^= True
        assert masks != MaskSet([Mask("v", np.ones(2, bool)), Mask("w", other)])


@given(arrays=st.dictionaries(PATHS, KEEPS, max_size=4), pattern=st.sampled_from(["unstructured", "2:4"]))
def test_a_file_gives_back_every_bit(tmp_path_factory, arrays, pattern):
    file = tmp_path_factory.mktemp("masks") / "masks.npz"
    masks = MaskSet(Mask(path, keep, pattern) for path, keep in arrays.items())
    masks.save(file)
    again = MaskSet.load(file)
    assert list(again) == list(masks)
    assert again == masks
    assert all(again[path].shape == masks[path].shape for path in masks)
    assert all(again.mask(path).pattern == pattern for path in again)


def test_a_file_takes_a_bit_a_position(tmp_path):
    keep = np.random.default_rng(0).random(80_000) < 0.5
    MaskSet([Mask("w", keep)]).save(tmp_path / "masks.npz")
    assert (tmp_path / "masks.npz").stat().st_size < 80_000 / 8 + 2_000


def test_a_failed_save_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    file = tmp_path / "masks.npz"
    MaskSet([Mask("w", np.ones(3, bool))]).save(file)
    before = file.read_bytes()

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("sparsekit.masks.os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        MaskSet([Mask("w", np.zeros(3, bool))]).save(file)
    assert file.read_bytes() == before
    assert list(tmp_path.iterdir()) == [file]


@given(st.data())
def test_a_damaged_file_is_said_to_be_so(tmp_path_factory, data):
    file = tmp_path_factory.mktemp("masks") / "masks.npz"
    masks = MaskSet([Mask("w", np.arange(64) % 3 == 0)])
    masks.save(file)
    content = bytearray(file.read_bytes())
    if data.draw(st.booleans()):
        content = content[: data.draw(st.integers(0, len(content) - 1))]
    else:
        content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    file.write_bytes(content)
    try:
        again = MaskSet.load(file)
    except MaskError as error:
        assert "is not a mask file" in str(error)  # noqa: PT017
    else:
        # A bit of a date or a flag that nobody reads.
        assert again == masks


def test_another_file_is_said_to_be_no_mask_file(tmp_path):
    np.save(tmp_path / "one.npy", np.ones(3))
    np.savez(tmp_path / "other.npz", weights=np.ones(3))
    (tmp_path / "text.npz").write_text("masks")
    for name in ("one.npy", "other.npz", "text.npz"):
        with pytest.raises(MaskError, match=f"{name}' is not a mask file written by MaskSet.save: "):
            MaskSet.load(tmp_path / name)


def test_no_file_is_no_mask_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        MaskSet.load(tmp_path / "masks.npz")


@pytest.mark.parametrize(
    ("bits", "shape"),
    [
        (np.zeros(2, np.uint8), (8,)),
        (np.zeros(0, np.uint8), (1,)),
        (np.zeros(1, np.int32), (8,)),
        (np.zeros((1, 1), np.uint8), (8,)),
        (np.zeros(1, np.uint8), (-2, -3)),
        (np.zeros(1, np.uint8), (2**40, 2**40)),
    ],
)
def test_bits_fit_the_shape(bits, shape):
    with pytest.raises(MaskError, match="do not fit the shape"):
        unpack(bits, shape)
