"""The engine's one-pass ops for masks against NumPy."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import tensorflow as tf

from sparsekit.engine import build, masking

needs_ops = pytest.mark.skipif(build.compiler() is None, reason="no C++ compiler")
SHAPES = [(3,), (5, 7), (300, 130), (0, 4), (2, 3, 5)]


def weights(shape):
    generator = np.random.default_rng(3)
    keep = generator.random(shape) < 0.4
    values = generator.normal(size=shape).astype("float32")
    if values.size > 8:
        keep.flat[:4] = False
        values.flat[:4] = [np.nan, np.inf, -np.inf, -0.0]
    return keep, values


def test_ready_needs_no_build(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("SPARSEKIT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(build, "_loaded", None)
    assert not masking.ready()
    assert not list(tmp_path.iterdir())


@needs_ops
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_keep_only_is_a_select(shape) -> None:
    assert build.available(), build.reason()
    keep, values = weights(shape)
    expected = np.where(keep, values, np.float32(0))
    assert masking.keep_only(tf.constant(keep), tf.constant(values)).numpy().tobytes() == expected.tobytes()


@needs_ops
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_hold_writes_the_variable_and_no_value_read_before(shape) -> None:
    assert build.available(), build.reason()
    keep, values = weights(shape)
    weight, mask = tf.Variable(values), tf.Variable(keep)
    earlier = weight.read_value()
    masking.hold(weight, mask)
    assert weight.numpy().tobytes() == np.where(keep, values, np.float32(0)).tobytes()
    assert earlier.numpy().tobytes() == values.tobytes()
    assert np.array_equal(mask.numpy(), keep)


@needs_ops
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_drop_masks_what_is_zero_inside_a_graph(shape) -> None:
    assert build.available(), build.reason()
    keep, values = weights(shape)
    values = np.where(np.random.default_rng(1).random(shape) < 0.3, np.float32(-0.0), values)
    weight, mask = tf.Variable(values), tf.Variable(keep)

    @tf.function
    def step():
        masking.hold(weight, mask, drop=True)
        return tf.math.count_nonzero(mask), tf.identity(weight)

    count, held = step()
    expected = keep & (values != 0)
    assert int(count) == expected.sum()
    assert np.array_equal(mask.numpy(), expected)
    assert held.numpy().tobytes() == np.where(expected, values, np.float32(0)).tobytes()


@needs_ops
@pytest.mark.parametrize("subtract", [False, True])
@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_assign_kept_adds_and_masks_and_touches_no_value_read_before(shape, drop, subtract) -> None:
    assert build.available(), build.reason()
    keep, values = weights(shape)
    # Some of the sums are zero.
    generator = np.random.default_rng(2)
    delta = np.where(generator.random(shape) < 0.3, -values, generator.normal(size=shape)).astype("float32")
    weight, mask = tf.Variable(values), tf.Variable(keep)
    earlier = weight.read_value()
    masking.assign_kept(weight, mask, -delta if subtract else delta, subtract=subtract, drop=drop)
    with np.errstate(invalid="ignore"):
        total = values + delta
    expected = np.where(keep & (total != 0), total, np.float32(0)) if drop else np.where(keep, total, np.float32(0))
    assert weight.numpy().tobytes() == expected.tobytes()
    assert np.array_equal(mask.numpy(), keep & (total != 0) if drop else keep)
    assert earlier.numpy().tobytes() == values.tobytes()


@needs_ops
def test_shapes_that_do_not_fit_are_refused() -> None:
    assert build.available(), build.reason()
    with pytest.raises(tf.errors.InvalidArgumentError, match="keep has shape"):
        masking.keep_only(tf.constant([True]), tf.constant([1.0, 2.0]))
    with pytest.raises(tf.errors.InvalidArgumentError, match="bool variable of its shape"):
        masking.hold(tf.Variable([1.0, 2.0]), tf.Variable([True]))
    with pytest.raises(tf.errors.InvalidArgumentError, match="what is added"):
        masking.assign_kept(tf.Variable([1.0, 2.0]), tf.Variable([True, False]), tf.constant([1.0]), subtract=True)


def test_without_a_compiler_the_ops_are_not_ready(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("SPARSEKIT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(build, "_loaded", None)
    monkeypatch.setattr(shutil, "which", lambda name, *_: None)
    assert not masking.ready()
