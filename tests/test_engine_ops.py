"""The engine's ops: values, gradients, edges, refusals, and the same bits on any number of threads."""

from __future__ import annotations

import functools
import importlib
import os
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsekit.engine import build
from sparsekit.engine import functions as engine
from sparsekit.errors import ArgumentError, EngineError, MaskError


def with_engine(test):
    """Run the test where a compiler exists; elsewhere test that the engine says what is missing."""
    if build.compiler() is not None:
        return test

    @functools.wraps(test)
    def says_why(*args, **kwargs):
        with pytest.raises(EngineError, match="the engine cannot be built"):
            build.library()

    return says_why


def layer(inputs, outputs, density, batch, seed=0):
    """A masked kernel, its structure, its values, an input and an output gradient."""
    rng = np.random.default_rng(seed)
    keep = rng.random((inputs, outputs)) < density
    kernel = (rng.normal(size=keep.shape) * keep).astype(np.float32)
    x = rng.normal(size=(batch, inputs)).astype(np.float32)
    dy = rng.normal(size=(batch, outputs)).astype(np.float32)
    bias = rng.normal(size=outputs).astype(np.float32)
    return keep, kernel, x, dy, bias


def in_double(keep, kernel, x, dy, bias, relu):
    """Output and gradients of x, values and bias, in float64."""
    kernel, x, dy = kernel.astype(np.float64), x.astype(np.float64), dy.astype(np.float64)
    y = x @ kernel + (0 if bias is None else bias.astype(np.float64))
    if relu:
        dy = np.where(y > 0, dy, 0)
        y = np.maximum(y, 0)
    return y, dy @ kernel.T, (x.T @ dy)[keep], dy.sum(0)


def by_engine(keep, kernel, x, dy, bias, relu):
    structure = engine.Structure.from_mask(keep)
    x, values = tf.constant(x), tf.constant(kernel[keep])
    bias = tf.zeros(keep.shape[1]) if bias is None else tf.constant(bias)
    with tf.GradientTape() as tape:
        tape.watch([x, values, bias])
        y = engine.sparse_dense(x, values, structure, bias, "relu" if relu else None)
    return [part.numpy() for part in (y, *tape.gradient(y, [x, values, bias], tf.constant(dy)))]


def assert_close(results, expected, terms):
    for result, wanted in zip(results, expected, strict=True):
        assert result.shape == wanted.shape
        # A float32 sum of n terms of size 1 is off by some n * 2^-24 at most.
        np.testing.assert_allclose(result, wanted, rtol=1e-5, atol=4e-7 * (terms + 4))


@with_engine
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("density", [0.0, 0.1, 1.0])
@pytest.mark.parametrize(
    ("inputs", "outputs", "batch"),
    [(1, 1, 1), (1, 40, 3), (40, 1, 17), (7, 9, 5), (64, 48, 64), (33, 65, 130), (200, 100, 16), (20, 30, 300)],
)
def test_dense_layer_equals_float64(inputs, outputs, batch, density, relu):
    keep, kernel, x, dy, bias = layer(inputs, outputs, density, batch)
    results = by_engine(keep, kernel, x, dy, bias, relu)
    assert_close(results, in_double(keep, kernel, x, dy, bias, relu), max(inputs, outputs, batch))


@with_engine
@settings(max_examples=60, deadline=None)
@given(
    inputs=st.integers(1, 70),
    outputs=st.integers(1, 70),
    batch=st.integers(1, 290),
    density=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
    empty_row=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_dense_layer_of_any_shape(inputs, outputs, batch, density, empty_row, seed):
    keep, kernel, x, dy, _ = layer(inputs, outputs, density, batch, seed)
    if empty_row:
        keep[seed % inputs] = False
        keep[:, seed % outputs] = False
        kernel = kernel * keep
    results = by_engine(keep, kernel, x, dy, None, False)
    assert_close(results, in_double(keep, kernel, x, dy, None, False), max(inputs, outputs, batch))


@with_engine
@pytest.mark.parametrize("shape", [(0, 3, 4), (5, 0, 4), (5, 3, 0)])
def test_axes_of_length_zero(shape):
    batch, inputs, outputs = shape
    keep, kernel, x, dy, bias = layer(inputs, outputs, 0.5, batch)
    assert_close(by_engine(keep, kernel, x, dy, bias, True), in_double(keep, kernel, x, dy, bias, True), 4)


@with_engine
def test_gradients_agree_with_numerical_differences():
    keep, kernel, x, dy, bias = layer(6, 5, 0.5, 4)
    structure = engine.Structure.from_mask(keep)

    def loss(x, values, bias):
        y = engine.sparse_dense(x, values, structure, bias)
        return tf.reduce_sum(tf.cast(y, tf.float64) ** 2 * tf.constant(dy, tf.float64))

    arguments = [tf.constant(x), tf.constant(kernel[keep]), tf.constant(bias)]
    with tf.GradientTape() as tape:
        tape.watch(arguments)
        value = loss(*arguments)
    for which, gradient in enumerate(tape.gradient(value, arguments)):
        flat = arguments[which].numpy().reshape(-1)
        for at in range(flat.size):
            # The loss is quadratic in each number, so that a central difference has no error but rounding.
            step = np.zeros_like(flat)
            step[at] = 0.25
            sides = []
            for sign in (1, -1):
                moved = list(arguments)
                moved[which] = tf.constant((flat + sign * step).reshape(arguments[which].shape))
                sides.append(float(loss(*moved)))
            slope = (sides[0] - sides[1]) / 0.5
            np.testing.assert_allclose(gradient.numpy().reshape(-1)[at], slope, rtol=1e-3, atol=1e-3)


@with_engine
def test_relu_lets_no_gradient_through_at_zero_and_keeps_nan():
    structure = engine.Structure.from_mask(np.ones((1, 1), bool))
    x = tf.constant([[0.0], [-1.0], [2.0], [np.nan]])
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = engine.sparse_dense(x, [1.0], structure, activation="relu")
    assert np.array_equal(y.numpy(), [[0.0], [0.0], [2.0], [np.nan]], equal_nan=True)
    assert np.array_equal(tape.gradient(y, x).numpy(), tf.raw_ops.ReluGrad(gradients=tf.ones_like(y), features=x))


@with_engine
@pytest.mark.parametrize("leading", [(), (2,), (2, 3), (2, 1, 3)])
def test_leading_axes_count_as_batch(leading):
    keep, kernel, *_ = layer(6, 5, 0.5, 1)
    x = np.random.default_rng(1).normal(size=(*leading, 6)).astype(np.float32)
    y = engine.sparse_dense(x, kernel[keep], engine.Structure.from_mask(keep))
    assert y.shape == (*leading, 5)
    np.testing.assert_allclose(y, x @ kernel, atol=1e-5)


@with_engine
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_other_float_types_are_summed_in_float32(dtype):
    keep, kernel, x, _, bias = layer(40, 30, 0.3, 8)
    x, values = tf.cast(x, dtype), tf.Variable(kernel[keep])
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = engine.sparse_dense(x, tf.cast(values, dtype), engine.Structure.from_mask(keep), tf.cast(bias, dtype))
    assert y.dtype == x.dtype
    dx, dvalues = tape.gradient(y, [x, values])
    assert (dx.dtype, dvalues.dtype) == (x.dtype, tf.float32)
    np.testing.assert_allclose(tf.cast(y, tf.float32), tf.cast(x, tf.float32) @ kernel + bias, atol=0.1)


@with_engine
def test_inside_a_function_with_unknown_batch():
    keep, kernel, x, dy, bias = layer(12, 9, 0.4, 10)
    structure, values = engine.Structure.from_mask(keep), tf.Variable(kernel[keep])

    @tf.function(input_signature=[tf.TensorSpec([None, 12]), tf.TensorSpec([None, 9])])
    def both(x, dy):
        with tf.GradientTape() as tape:
            y = engine.sparse_dense(x, values, structure, bias)
            assert y.shape.as_list() == [None, 9]
        return y, tape.gradient(y, values, dy)

    y, dvalues = both(x, dy)
    assert_close(
        [y.numpy(), dvalues.numpy()], np.array(in_double(keep, kernel, x, dy, bias, False), object)[[0, 2]], 12
    )
    operations = {op.type: op for op in both.get_concrete_function().graph.get_operations()}
    assert not operations["SparsekitDenseGrad"].get_attr("input_gradient"), "nobody asked for the gradient of x"


@with_engine
@pytest.mark.parametrize("flavour", ["keras", "tf_keras"])
def test_a_keras_layer_trains_as_the_masked_dense_one_does(flavour):
    keras = importlib.import_module(flavour)
    keep, kernel, x, _, _ = layer(12, 4, 0.4, 64)
    structure = engine.Structure.from_mask(keep)

    class Sparse(keras.layers.Layer):
        def build(self, shape):
            self.kept = self.add_weight(name="kept", shape=(int(keep.sum()),), initializer="zeros")

        def call(self, x):
            return engine.sparse_dense(x, tf.convert_to_tensor(self.kept), structure)

        def compute_output_shape(self, shape):
            return (*shape[:-1], 4)

    target = x @ kernel
    sparse = keras.Sequential([keras.Input((12,)), Sparse()])
    sparse.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse", jit_compile=False)
    sparse.fit(x, target, batch_size=16, epochs=3, shuffle=False, verbose=0)

    trained = np.zeros_like(kernel)
    for _ in range(3):
        for part in np.split(np.arange(64), 4):
            error = x[part] @ trained - target[part]
            trained -= 0.1 * np.where(keep, x[part].T @ error * 2 / error.size, 0)
    np.testing.assert_allclose(sparse.get_weights()[0], trained[keep], rtol=1e-4, atol=1e-6)


@with_engine
def test_a_second_derivative_is_refused():
    x, structure = tf.constant([[2.0]]), engine.Structure.from_mask(np.ones((1, 1), bool))
    with tf.GradientTape() as outer:
        outer.watch(x)
        with tf.GradientTape() as inner:
            inner.watch(x)
            y = engine.sparse_dense(x, [3.0], structure) ** 2
        slope = inner.gradient(y, x)
    with pytest.raises(ArgumentError, match="no second derivatives"):
        outer.gradient(slope, x)


# Structure ---------------------------------------------------------------------------------------------------------


def arrays_of(keep):
    """The five index arrays by NumPy's own means."""
    rows, columns = np.nonzero(keep)
    order = np.lexsort((rows, columns))
    ends = [np.concatenate([[0], np.cumsum(keep.sum(axis))]) for axis in (1, 0)]
    return ends[0], columns, ends[1], rows[order], order


@with_engine
@settings(max_examples=40, deadline=None)
@given(st.integers(0, 40), st.integers(0, 40), st.sampled_from([0.0, 0.2, 1.0]), st.integers(0, 99))
def test_structure_holds_the_mask_in_both_orders(inputs, outputs, density, seed):
    keep = np.random.default_rng(seed).random((inputs, outputs)) < density
    for array, expected in zip(engine.Structure.from_mask(keep).arrays(), arrays_of(keep), strict=True):
        assert np.array_equal(array, expected)


@with_engine
def test_structure_of_a_large_mask_is_split_over_threads():
    keep = np.random.default_rng(0).random((700, 900)) < 0.05
    for array, expected in zip(engine.Structure.from_mask(keep).arrays(), arrays_of(keep), strict=True):
        assert np.array_equal(array, expected)


@with_engine
def test_kernel_to_values_and_back():
    rng = np.random.default_rng(0)
    keep = rng.random((3, 3, 8, 16)) < 0.3
    kernel = rng.normal(size=keep.shape).astype(np.float32)
    structure = engine.Structure.from_mask(tf.constant(keep))
    assert (structure.shape, structure.inputs, structure.outputs) == ((3, 3, 8, 16), 72, 16)
    values, dense = tf.Variable(kernel[keep]), tf.Variable(kernel)
    with tf.GradientTape(persistent=True) as tape:
        gathered = engine.gather_values(dense, structure)
        scattered = engine.scatter_values(values, structure)
    assert np.array_equal(gathered, kernel[keep])
    assert np.array_equal(scattered, np.where(keep, kernel, 0))
    assert np.array_equal(tape.gradient(gathered, dense, values.value()), np.where(keep, kernel, 0))
    assert np.array_equal(tape.gradient(scattered, values, dense.value()), kernel[keep])


@with_engine
def test_structure_in_variables_may_change_inside_a_function():
    rng = np.random.default_rng(0)
    masks = [rng.random((30, 20)) < density for density in (0.3, 0.4)]
    kernel, x = rng.normal(size=(30, 20)).astype(np.float32), rng.normal(size=(8, 30)).astype(np.float32)
    structure = engine.Structure.from_mask(masks[0]).in_variables()

    @tf.function
    def step(keep):
        for slot, array in zip(structure.arrays(), engine.Structure.from_mask(keep).arrays(), strict=True):
            slot.assign(array)
        return engine.sparse_dense(x, engine.gather_values(kernel, structure), structure)

    for keep in masks:
        np.testing.assert_allclose(step(tf.constant(keep)), x @ (kernel * keep), atol=1e-5)


# Refusals ----------------------------------------------------------------------------------------------------------


def broken(which, change):
    """The inputs of the forward op with one of the index arrays damaged."""
    keep, kernel, x, _, _ = layer(6, 5, 0.5, 4)
    arrays = [np.array(array) for array in engine.Structure.from_mask(keep).arrays()]
    arrays[which] = change(arrays[which])
    return x, kernel[keep], arrays


def set_first(number):
    return lambda array: np.concatenate([[number], array[1:]]).astype(np.int32)


@with_engine
@pytest.mark.parametrize(
    ("which", "change", "says"),
    [
        (2, set_first(1), "column_pointers must rise from 0"),
        (2, lambda array: array[::-1].copy(), "column_pointers must rise from 0"),
        (2, lambda array: array[:-1], "column_pointers must rise from 0"),
        (2, lambda array: array[:0], "column_pointers must be a vector"),
        (3, set_first(6), "rows must lie below 6"),
        (3, set_first(-1), "rows must lie below 6"),
        (3, lambda array: array[1:], "rows must be a vector"),
        (4, set_first(1000), "permutation below"),
        (4, lambda array: array[1:], "permutation must be a vector"),
        (0, lambda array: array[1:], "row_pointers must be a vector of 7"),
    ],
)
def test_the_forward_op_refuses_bad_indices(which, change, says):
    x, values, arrays = broken(which, change)
    with pytest.raises(tf.errors.InvalidArgumentError, match=says):
        build.library().sparsekit_dense(x, values, *arrays, [])


@with_engine
@pytest.mark.parametrize(
    ("which", "change", "says"),
    [
        (0, set_first(1), "row_pointers must rise from 0"),
        (0, lambda array: array[:-1], "row_pointers must"),
        (1, set_first(5), "columns must lie below 5"),
        (1, set_first(-1), "columns must lie below 5"),
        (1, lambda array: array[1:], "columns must be a vector"),
    ],
)
def test_the_backward_op_refuses_bad_indices(which, change, says):
    x, values, arrays = broken(which, change)
    with pytest.raises(tf.errors.InvalidArgumentError, match=says):
        build.library().sparsekit_dense_grad(np.ones((4, 5), np.float32), x, values, *arrays[:2], [])
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"(row_pointers|values|columns) must"):
        build.library().sparsekit_scatter(values, *arrays[:2], outputs=5)


@with_engine
def test_ops_refuse_shapes_that_do_not_fit():
    keep, kernel, x, dy, _ = layer(6, 5, 0.5, 4)
    structure, library = engine.Structure.from_mask(keep), build.library()
    arrays, values = structure.arrays(), kernel[keep]
    refusals = [
        (lambda: library.sparsekit_dense(x, values[1:], *arrays, []), "number of kept weights"),
        (lambda: library.sparsekit_dense(x, values, *arrays, [np.ones(4, np.float32)]), "bias must be a vector of 5"),
        (lambda: library.sparsekit_dense_grad(dy[1:], x, values, *arrays[:2], []), "with the batch of x"),
        (lambda: library.sparsekit_dense_grad(dy, x, values, *arrays[:2], [dy[:, 1:]]), "y must have the shape"),
        (lambda: library.sparsekit_gather(kernel[1:], *arrays[:2]), "row_pointers must be a vector of 6"),
        (lambda: library.sparsekit_gather(kernel[:, :2], *arrays[:2]), "columns must lie below 2"),
        (lambda: library.sparsekit_drop_smallest(values, keep, 3), "the weight"),
        (lambda: library.sparsekit_conv_structure([keep], strides=[1, 1], dilations=[1, 1], groups=1), "keep must be"),
    ]
    for call, says in refusals:
        with pytest.raises(tf.errors.InvalidArgumentError, match=says):
            call()


@with_engine
def test_functions_say_in_a_sentence_what_is_wrong():
    structure = engine.Structure.from_mask(np.ones((6, 5), bool))
    refusals = [
        (lambda: engine.sparse_dense(np.ones((2, 6), np.float32), np.ones(30), structure, activation="tanh"), "fused"),
        (lambda: engine.sparse_dense(np.ones((2, 7), np.float32), np.ones(30), structure), "kernel's 6 inputs"),
    ]
    for call, says in refusals:
        with pytest.raises(ArgumentError, match=says):
            call()
    for keep, says in [(np.ones((6, 5)), "give a bool array"), (np.ones(6, bool), "2 or more known axes")]:
        with pytest.raises(MaskError, match=says):
            engine.Structure.from_mask(keep)


# Threads -----------------------------------------------------------------------------------------------------------

BITS = """
import hashlib, sys
import numpy as np, tensorflow as tf
tf.config.threading.set_intra_op_parallelism_threads(int(sys.argv[1]))
from sparsekit.engine import functions as engine
rng = np.random.default_rng(0)
digest = hashlib.sha256()
for inputs, outputs, batch in ((300, 500, 150), (700, 200, 64), (257, 129, 600)):
    keep = rng.random((inputs, outputs)) < 0.2
    structure = engine.Structure.from_mask(keep)
    values = tf.constant(rng.normal(size=int(keep.sum())).astype("float32"))
    bias = tf.constant(rng.normal(size=outputs).astype("float32"))
    x = tf.constant(rng.normal(size=(batch, inputs)).astype("float32"))
    with tf.GradientTape() as tape:
        tape.watch([x, values, bias])
        y = engine.sparse_dense(x, values, structure, bias, "relu")
    for part in (y, *tape.gradient(y, [x, values, bias], tf.sin(y))):
        digest.update(part.numpy().tobytes())
for distribution in ("uniform", "normal"):
    weight = tf.Variable(rng.normal(size=(300, 501)).astype("float32"))
    engine.noise_update(weight, seed=(1, 2), step=3, index=4, amplitude=0.1, distribution=distribution)
    digest.update(weight.numpy().tobytes())
print(digest.hexdigest())
"""


@with_engine
def test_the_same_bits_on_any_number_of_threads():
    build.library()  # built once, here, not by each process
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", BITS, threads], stdout=subprocess.PIPE, text=True, env=os.environ.copy()
        )
        for threads in ("1", "2", "5")
    ]
    outputs = {process.communicate(timeout=300)[0] for process in processes}
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert len(outputs) == 1


# Noise -------------------------------------------------------------------------------------------------------------


def philox(seed, step, index, groups):
    """Words of the first groups of a stream by Philox 4x32-10, (groups, 4) uint32."""
    low = np.uint64(0xFFFFFFFF)
    counter = [np.arange(groups, dtype=np.uint64), np.zeros(groups, np.uint64)]
    counter += [np.full(groups, word, np.uint64) for word in (index, step)]
    keys = [np.uint64(word & 0xFFFFFFFF) for word in seed]
    for _ in range(10):
        first, second = np.uint64(0xD2511F53) * counter[0], np.uint64(0xCD9E8D57) * counter[2]
        shift = np.uint64(32)
        counter = [
            (second >> shift) ^ counter[1] ^ keys[0],
            second & low,
            (first >> shift) ^ counter[3] ^ keys[1],
            first & low,
        ]
        keys = [(key + np.uint64(raised)) & low for key, raised in zip(keys, (0x9E3779B9, 0xBB67AE85), strict=True)]
    return np.stack(counter, 1).astype(np.uint32)


def unit(words):
    """Numbers in [0, 1) from the lower 23 bits."""
    return (words & np.uint32(0x7FFFFF) | np.uint32(0x3F800000)).view(np.float32) - np.float32(1)


def normal(words):
    """Box-Muller on pairs of words, each float32 operation rounded by itself, in the op's own order."""
    one = np.float32
    first, second = unit(words.reshape(-1, 2)).T
    first = np.maximum(first, one(1e-7))
    bits = np.ascontiguousarray(first).view(np.int32)
    exponent = (bits - np.int32(0x3F3504F3)) >> 23
    mantissa = (bits - (exponent << 23)).view(np.float32)
    s = (mantissa - one(1)) / (mantissa + one(1))
    z, series = s * s, one(1 / 9)
    for factor in (1 / 7, 1 / 5, 1 / 3, 1):
        series = series * z + one(factor)
    logarithm = exponent.astype(np.float32) * one(0.693147180559945) + (s + s) * series
    radius = np.sqrt(logarithm * one(-2))
    quarters = second * one(4)
    quarter = (quarters + one(0.5)).astype(np.int32)
    angle = (quarters - quarter.astype(np.float32)) * one(1.57079632679490)
    z, sine, cosine = angle * angle, one(1 / 362880), one(1 / 40320)
    for factor in (-1 / 5040, 1 / 120, -1 / 6):
        sine = sine * z + one(factor)
    sine = sine * z * angle + angle
    for factor in (-1 / 720, 1 / 24, -1 / 2, 1):
        cosine = cosine * z + one(factor)
    odd = quarter % 2 == 1
    sine, cosine = np.where(odd, cosine, sine), np.where(odd, sine, cosine)
    sine = np.where(quarter & 2, -sine, sine)
    cosine = np.where((quarter + 1) & 2, -cosine, cosine)
    return np.stack([sine * radius, cosine * radius], 1).reshape(-1)


def uniform(words):
    """Each 16-bit half of a word, as a signed number, to the middle of its interval in (-1, 1)."""
    halves = words.reshape(-1).astype("<u4").view("<i2")
    return ((2 * halves.astype(np.int64) + 1) / 65536).astype(np.float32)


SEED, STEP, INDEX = (-5, 7_000_000_000), 12345, 3


@with_engine
@pytest.mark.parametrize("size", [0, 1, 5, 255, 256, 257, 40003])
@pytest.mark.parametrize("distribution", ["uniform", "normal"])
@pytest.mark.parametrize("masked", [False, True])
def test_noise_is_what_its_reference_draws(size, distribution, masked):
    rng = np.random.default_rng(size)
    weight, keep = rng.normal(size=size).astype(np.float32), rng.random(size) < 0.5
    words = philox(SEED, STEP, INDEX, -(-size // 4))
    drawn = uniform(words) if distribution == "uniform" else normal(words)
    expected = weight + np.float32(0.1) * drawn[:size]
    if masked:
        expected = np.where(keep, expected, 0)
    arguments = {"seed": SEED, "step": STEP, "index": INDEX, "amplitude": 0.1, "distribution": distribution}
    arguments["keep"] = keep if masked else None
    variable = tf.Variable(weight)
    engine.noise_update(variable, **arguments)
    assert np.array_equal(variable.numpy(), expected)
    assert not np.signbit(variable.numpy()[variable.numpy() == 0]).any()
    assert np.array_equal(engine.noised(weight, **arguments), expected)


@with_engine
def test_noise_has_the_numbers_of_tensorflows_stateless_ops():
    key, counter = engine.noise_key_counter(SEED, STEP, INDEX)
    size, zeros = 10_001, np.zeros(10_001, np.float32)
    arguments = {"seed": SEED, "step": STEP, "index": INDEX, "amplitude": 1.0}
    words = tf.raw_ops.StatelessRandomUniformFullIntV2(
        shape=[size // 2 + 1], key=key, counter=counter, alg=1, dtype=tf.uint32
    )
    assert np.array_equal(engine.noised(zeros, **arguments), uniform(words.numpy())[:size])
    drawn = tf.raw_ops.StatelessRandomNormalV2(shape=[size], key=key, counter=counter, alg=1)
    np.testing.assert_allclose(engine.noised(zeros, distribution="normal", **arguments), drawn, atol=4e-6)


@with_engine
def test_noise_differs_by_seed_step_and_weight_and_looks_random():
    base = {"seed": (1, 2), "step": 3, "index": 4, "amplitude": 1.0}
    zeros = np.zeros(50_000, np.float32)
    draws = [
        engine.noised(zeros, **base | change).numpy()
        for change in ({}, {"seed": (1, 3)}, {"seed": (2, 2)}, {"step": 4}, {"index": 5})
    ]
    assert np.abs(np.corrcoef(draws) - np.eye(5)).max() < 0.03
    assert abs(draws[0].mean()) < 0.01
    assert abs(draws[0].std() - 1 / np.sqrt(3)) < 0.01, "uniform in (-1, 1) has variance 1/3"
    assert (draws[0].min() > -1, draws[0].max() < 1) == (True, True)
    # Pearson's statistic over 256 bins has 255 degrees of freedom. Nor is a number echoed by one that shares its word,
    # its group of words or its registers.
    counts = np.histogram(draws[0], 256, (-1, 1))[0]
    expected = zeros.size / 256
    assert abs(np.sum((counts - expected) ** 2 / expected) - 255) < 5 * np.sqrt(2 * 255)
    for lag in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        assert abs(np.mean(draws[0][lag:] * draws[0][:-lag])) < 5 / 3 / np.sqrt(zeros.size), lag
    bell = engine.noised(zeros, distribution="normal", **base).numpy()
    assert abs(bell.std() - 1) < 0.02
    assert 0.94 < (np.abs(bell) < 1.96).mean() < 0.96


@with_engine
def test_a_value_that_was_read_before_the_noise_stays():
    variable = tf.Variable(np.ones((40, 50), np.float32))
    before = variable.value()
    engine.noise_update(variable, seed=(1, 2), step=0, index=0, amplitude=0.5)
    assert np.array_equal(before, np.ones((40, 50)))
    assert not np.array_equal(variable, before)


@with_engine
def test_noise_inside_a_function_comes_in_program_order():
    variable, step = tf.Variable(tf.zeros((30, 4))), tf.Variable(0, dtype=tf.int64)
    keep = tf.Variable(np.arange(120).reshape(30, 4) % 3 == 0)

    @tf.function
    def twice():
        engine.noise_update(variable, seed=(1, 2), step=step, index=0, amplitude=0.5, keep=keep)
        between = tf.identity(variable)
        step.assign_add(1)
        engine.noise_update(variable, seed=(1, 2), step=step, index=0, amplitude=0.5, keep=keep)
        return between

    between = twice()
    arguments = {"seed": (1, 2), "index": 0, "amplitude": 0.5, "keep": keep}
    expected = engine.noised(tf.zeros((30, 4)), step=0, **arguments)
    assert np.array_equal(between, expected)
    assert np.array_equal(variable, engine.noised(expected, step=1, **arguments))
    assert (variable.numpy()[~keep.numpy()] == 0).all()


@with_engine
def test_noise_refuses_what_it_cannot_move():
    arguments = {"seed": (1, 2), "step": 0, "index": 0, "amplitude": 0.5}
    for variable in (tf.Variable(1), tf.ones(3), tf.Variable(1.0, dtype=tf.float64)):
        with pytest.raises(ArgumentError, match="give a float32"):
            engine.noise_update(variable, **arguments)
    with pytest.raises(ArgumentError, match="distribution is 'cauchy'"):
        engine.noised(tf.ones(3), distribution="cauchy", **arguments)
    with pytest.raises(tf.errors.InvalidArgumentError, match="keep has shape"):
        engine.noised(tf.ones(3), keep=[True], **arguments)
    with pytest.raises(tf.errors.InvalidArgumentError, match="seed must hold two numbers"):
        engine.noised(tf.ones(3), **arguments | {"seed": (1, 2, 3)})
