"""The sparse convolution against TensorFlow's dense one on the same kernel with its zeros written out."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsekit.engine import build
from sparsekit.engine.conv_functions import ConvStructure, sparse_conv1d, sparse_conv2d
from sparsekit.errors import ArgumentError, EngineError, MaskError

HAS_COMPILER = any(shutil.which(name) for name in ("c++", "g++", "clang++"))


@dataclasses.dataclass(frozen=True)
class Case:
    batch: int = 2
    size: tuple[int, int] = (9, 7)
    channels: int = 6
    filters: int = 8
    window: tuple[int, int] = (3, 3)
    strides: tuple[int, int] = (1, 1)
    padding: str = "same"
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1
    density: float = 0.3
    bias: bool = True
    relu: bool = False
    seed: int = 0


def usable() -> bool:
    """Whether the ops can run here; without a compiler the one line that says so is checked instead."""
    if not HAS_COMPILER:
        with pytest.raises(EngineError, match=r"cannot be built: .* install a C\+\+17 compiler or set CXX"):
            ConvStructure.from_mask(np.ones((1, 1, 1, 1), bool))
    return HAS_COMPILER


def dense_conv(x, kernel, case):
    outputs = [
        tf.nn.convolution(part, weights, case.strides, case.padding.upper(), dilations=case.dilation)
        for part, weights in zip(tf.split(x, case.groups, -1), tf.split(kernel, case.groups, -1), strict=True)
    ]
    return tf.concat(outputs, -1)


def check(case: Case) -> None:
    """Output and all gradients agree with the dense convolution in float64."""
    if not usable():
        return
    rng = np.random.default_rng(case.seed)
    keep = rng.random((*case.window, case.channels // case.groups, case.filters)) < case.density
    kernel = np.where(keep, rng.standard_normal(keep.shape), 0.0).astype(np.float32)
    x = tf.constant(rng.standard_normal((case.batch, *case.size, case.channels)), tf.float32)
    bias = tf.constant(rng.standard_normal(case.filters), tf.float32)
    structure = ConvStructure.from_mask(keep, case.strides, case.padding, case.dilation, case.groups)

    wide = [tf.cast(tensor, tf.float64) for tensor in (x, kernel, bias)]
    with tf.GradientTape() as tape:
        tape.watch(wide)
        expected = dense_conv(wide[0], wide[1], case) + (wide[2] if case.bias else 0.0)
        expected = tf.nn.relu(expected) if case.relu else expected
        dy = tf.constant(rng.standard_normal(expected.shape))
        loss = tf.reduce_sum(expected * dy)
    dx, dkernel, dbias = tape.gradient(loss, wide, unconnected_gradients="zero")

    narrow = [x, tf.constant(kernel[keep]), bias]
    with tf.GradientTape() as tape:
        tape.watch(narrow)
        y = sparse_conv2d(
            narrow[0], narrow[1], structure, narrow[2] if case.bias else None, "relu" if case.relu else None
        )
        loss = tf.reduce_sum(y * tf.cast(dy, tf.float32))
    gradients = tape.gradient(loss, narrow, unconnected_gradients="zero")

    for got, want in zip((y, *gradients), (expected, dx, dkernel.numpy()[keep], dbias), strict=True):
        want = np.asarray(want)
        assert got.shape == want.shape
        scale = np.abs(want).max(initial=0.0) + 1e-3
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-5 * scale)


@pytest.mark.parametrize(
    "case",
    [
        Case(),
        Case(relu=True),
        Case(bias=False, relu=True, density=0.05),
        Case(padding="valid", strides=(2, 2)),
        Case(strides=(2, 3), window=(2, 5), size=(11, 13)),
        Case(strides=(4, 4), window=(2, 2), padding="valid", size=(11, 14)),
        Case(dilation=(2, 3), size=(12, 10)),
        Case(groups=2, channels=8),
        Case(groups=6, filters=12),
        Case(batch=1, channels=1, filters=1, density=0.9),
        Case(batch=1, size=(33, 70), channels=3, filters=20),
        Case(batch=37, size=(5, 5), channels=17, filters=33),
        Case(batch=33, size=(8, 8), channels=64, filters=48, density=0.5),
        Case(batch=0),
        Case(size=(1, 1), window=(5, 3)),
        Case(size=(2, 3), window=(7, 7), density=0.5),
        Case(size=(7, 7), window=(7, 7), padding="valid"),
        Case(window=(1, 1), channels=40, filters=50, size=(13, 11), relu=True),
        Case(window=(1, 1), strides=(2, 2), padding="valid", size=(6, 9)),
        Case(window=(1, 1), groups=2),
        Case(window=(1, 1), channels=64, filters=64, batch=9, size=(16, 16), density=0.6),
        Case(window=(1, 9), size=(1, 50)),
    ],
    ids=str,
)
def test_matches_the_dense_convolution(case):
    check(case)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.data())
def test_matches_the_dense_convolution_anywhere(data):
    def pair(low, high):
        return data.draw(st.tuples(st.integers(low, high), st.integers(low, high)))

    groups = data.draw(st.sampled_from([1, 1, 2, 3]))
    window, padding = pair(1, 4), data.draw(st.sampled_from(["same", "valid"]))
    # TensorFlow's dense convolution takes no strides together with dilation.
    strides, dilation = data.draw(st.sampled_from([(pair(1, 4), (1, 1)), ((1, 1), pair(1, 3))]))
    least = [(k - 1) * d + 1 if padding == "valid" else 1 for k, d in zip(window, dilation, strict=True)]
    rows, cols = pair(0, 12)
    check(
        Case(
            batch=data.draw(st.integers(1, 20)),
            size=(least[0] + rows, least[1] + cols),
            channels=groups * data.draw(st.integers(1, 9)),
            filters=groups * data.draw(st.integers(1, 9)),
            window=window,
            strides=strides,
            padding=padding,
            dilation=dilation,
            groups=groups,
            density=data.draw(st.sampled_from([0.1, 0.4, 0.9])),
            bias=data.draw(st.booleans()),
            relu=data.draw(st.booleans()),
            seed=data.draw(st.integers(0, 99)),
        )
    )


@pytest.mark.parametrize("density", [0.0, 1.0])
def test_empty_and_full_masks(density):
    check(Case(density=density, relu=True))
    check(Case(density=density, window=(1, 1)))
    check(Case(density=density, strides=(3, 3), window=(2, 2)))


def test_one_filter_without_a_weight_gives_its_bias():
    if not usable():
        return
    keep = np.ones((3, 3, 2, 5), bool)
    keep[..., 3] = False
    structure = ConvStructure.from_mask(keep, padding="same")
    y = sparse_conv2d(tf.ones([1, 4, 4, 2]), tf.ones([keep.sum()]), structure, tf.constant([0.0, 0, 0, 7, 0]))
    assert np.all(y[..., 3] == 7.0)
    assert np.all(y[:, 1:3, 1:3, 0] == 3 * 3 * 2)


@pytest.mark.parametrize("padding", ["same", "valid", "causal"])
@pytest.mark.parametrize(("stride", "dilation"), [(1, 1), (2, 1), (1, 3)])
def test_one_dimension(padding, stride, dilation):
    if not usable():
        return
    rng = np.random.default_rng(3)
    keep = rng.random((4, 5, 7)) < 0.4
    kernel = np.where(keep, rng.standard_normal(keep.shape), 0.0)
    structure = ConvStructure.from_mask(keep, stride, padding, dilation)
    x = tf.constant(rng.standard_normal((3, 21, 5)), tf.float32)
    values = tf.constant(kernel[keep], tf.float32)
    before = 3 * dilation if padding == "causal" else 0
    with tf.GradientTape() as tape:
        dense_x, dense_kernel = tf.cast(x, tf.float64), tf.constant(kernel)
        tape.watch([dense_x, dense_kernel])
        padded = tf.pad(dense_x, [[0, 0], [before, 0], [0, 0]])
        kind = "SAME" if padding == "same" else "VALID"
        expected = tf.nn.convolution(padded, dense_kernel, [stride], kind, dilations=[dilation])
        loss = tf.reduce_sum(expected**2)
    dx, dkernel = tape.gradient(loss, [dense_x, dense_kernel])
    with tf.GradientTape() as tape:
        tape.watch([x, values])
        y = sparse_conv1d(x, values, structure)
        loss = tf.reduce_sum(y**2)
    got_x, got_values = tape.gradient(loss, [x, values])
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(got_x, dx, rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(got_values, dkernel.numpy()[keep], rtol=1e-4, atol=1e-3)


def test_strides_together_with_dilation():
    """TensorFlow's dense op refuses the pair; a dilated kernel is a larger kernel with zeros between."""
    if not usable():
        return
    rng = np.random.default_rng(4)
    keep = rng.random((3, 2, 4, 5)) < 0.6
    kernel = np.where(keep, rng.standard_normal(keep.shape), 0.0).astype(np.float32)
    spread = np.zeros((5, 4, 4, 5), np.float32)
    spread[::2, ::3] = kernel
    x = tf.constant(rng.standard_normal((2, 12, 11, 4)), tf.float32)
    values = tf.constant(kernel[keep])
    structure = ConvStructure.from_mask(keep, (3, 2), "valid", (2, 3))
    with tf.GradientTape() as tape:
        tape.watch([x, values])
        y = sparse_conv2d(x, values, structure)
        loss = tf.reduce_sum(y**2)
    gradients = tape.gradient(loss, [x, values])
    with tf.GradientTape() as tape:
        dense = tf.constant(spread)
        tape.watch([x, dense])
        expected = tf.nn.conv2d(x, dense, (3, 2), "VALID")
        loss = tf.reduce_sum(expected**2)
    dx, dkernel = tape.gradient(loss, [x, dense])
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(gradients[0], dx, rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(gradients[1], dkernel.numpy()[::2, ::3][keep], rtol=1e-4, atol=1e-3)


def test_gradients_agree_with_differences():
    if not usable():
        return
    rng = np.random.default_rng(5)
    keep = rng.random((3, 3, 2, 3)) < 0.5
    structure = ConvStructure.from_mask(keep, 2, "same")
    inputs = [rng.standard_normal(shape).astype(np.float32) for shape in ((1, 5, 4, 2), (keep.sum(),), (3,))]
    theoretical, numerical = tf.test.compute_gradient(
        lambda x, values, bias: sparse_conv2d(x, values, structure, bias), inputs, delta=0.25
    )
    for analytic, difference in zip(theoretical, numerical, strict=True):
        np.testing.assert_allclose(analytic, difference, atol=1e-4)


def test_same_bits_for_any_number_of_threads():
    if not usable():
        return
    script = """
        import hashlib, sys
        import numpy as np, tensorflow as tf
        from sparsekit.engine.conv_functions import ConvStructure, sparse_conv2d
        tf.config.threading.set_intra_op_parallelism_threads(int(sys.argv[1]))
        rng = np.random.default_rng(0)
        digest = hashlib.sha256()
        for window, stride in ((3, 1), (1, 1), (3, 2)):
            keep = rng.random((window, window, 24, 40)) < 0.3
            structure = ConvStructure.from_mask(keep, stride, "same")
            tensors = [tf.constant(rng.standard_normal(s), tf.float32) for s in ((40, 15, 17, 24), keep.sum(), 40)]
            with tf.GradientTape() as tape:
                tape.watch(tensors)
                y = sparse_conv2d(tensors[0], tensors[1], structure, tensors[2], "relu")
                loss = tf.reduce_sum(y**2)
            for tensor in (y, *tape.gradient(loss, tensors)):
                digest.update(tensor.numpy().tobytes())
        print("digest", digest.hexdigest())
    """
    build.library()
    digests = set()
    for threads in ("1", "2", "7"):
        run = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(script), threads], capture_output=True, text=True, timeout=300
        )
        assert run.returncode == 0, run.stderr[-2000:]
        digests.add(run.stdout.split("digest ")[1].strip())
    assert len(digests) == 1


def test_a_compiled_train_step_equals_masked_dense_training():
    if not usable():
        return
    rng = np.random.default_rng(6)
    keep = rng.random((3, 3, 4, 8)) < 0.2
    kernel = np.where(keep, 0.3 * rng.standard_normal(keep.shape), 0.0).astype(np.float32)
    structure = ConvStructure.from_mask(keep, padding="same")
    x = tf.constant(rng.standard_normal((8, 6, 6, 4)), tf.float32)
    target = tf.constant(rng.standard_normal((8, 6, 6, 8)), tf.float32)
    values, bias = tf.Variable(kernel[keep]), tf.Variable(tf.zeros([8]))
    dense, dense_bias = tf.Variable(kernel), tf.Variable(tf.zeros([8]))

    @tf.function
    def sparse_step(x):
        with tf.GradientTape() as tape:
            y = sparse_conv2d(x, values, structure, bias, "relu")
            assert y.shape[1:] == (6, 6, 8)
            loss = tf.reduce_mean((y - target) ** 2)
        for variable, gradient in zip((values, bias), tape.gradient(loss, [values, bias]), strict=True):
            variable.assign_sub(0.5 * gradient)
        return loss

    @tf.function
    def dense_step(x):
        with tf.GradientTape() as tape:
            y = tf.nn.relu(tf.nn.conv2d(x, dense, 1, "SAME") + dense_bias)
            loss = tf.reduce_mean((y - target) ** 2)
        gradient, bias_gradient = tape.gradient(loss, [dense, dense_bias])
        dense.assign_sub(tf.where(keep, 0.5 * gradient, 0.0))
        dense_bias.assign_sub(0.5 * bias_gradient)
        return loss

    losses = [(float(sparse_step(x)), float(dense_step(x))) for _ in range(20)]
    assert losses[-1][0] < losses[0][0]
    np.testing.assert_allclose(*np.transpose(losses), rtol=1e-5)
    np.testing.assert_allclose(values, dense.numpy()[keep], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(bias, dense_bias, rtol=1e-5, atol=1e-6)


def test_unknown_batch_and_image_sizes():
    if not usable():
        return
    structure = ConvStructure.from_mask(np.ones((3, 3, 2, 4), bool), padding="same")
    values = tf.ones([3 * 3 * 2 * 4])
    convolve = tf.function(
        lambda x: sparse_conv2d(x, values, structure), input_signature=[tf.TensorSpec([None, None, None, 2])]
    )
    assert convolve.get_concrete_function().output_shapes.as_list() == [None, None, None, 4]
    for shape in ((1, 5, 4, 2), (3, 2, 9, 2), (0, 3, 3, 2)):
        assert convolve(tf.ones(shape)).shape == (*shape[:3], 4)


def test_the_input_gradient_can_be_left_out():
    if not usable():
        return
    rng = np.random.default_rng(7)
    keep = rng.random((3, 3, 3, 4)) < 0.5
    structure = ConvStructure.from_mask(keep)
    x = tf.constant(rng.standard_normal((2, 6, 6, 3)), tf.float32)
    values = tf.constant(rng.standard_normal(keep.sum()), tf.float32)
    gradients = []
    for wanted in (True, False):
        with tf.GradientTape() as tape:
            tape.watch([x, values])
            loss = tf.reduce_sum(sparse_conv2d(x, values, structure, input_gradient=wanted) ** 2)
        gradients.append(tape.gradient(loss, [x, values]))
    assert gradients[0][0] is not None
    assert gradients[1][0] is None
    np.testing.assert_array_equal(gradients[0][1], gradients[1][1])


def test_nan_stays_visible_through_the_fused_relu():
    if not usable():
        return
    structure = ConvStructure.from_mask(np.ones((1, 1, 1, 1), bool))
    x = tf.constant([np.nan, -1.0, 2.0], shape=(1, 3, 1, 1))
    y = sparse_conv2d(x, tf.ones([1]), structure, activation="relu")
    np.testing.assert_array_equal(tf.reshape(y, [-1]), [np.nan, 0.0, 2.0])


def forward(**change):
    structure = ConvStructure.from_mask(np.ones((3, 3, 2, 4), bool), padding="valid")
    starts, taps, places = structure.forward
    arguments = {
        "x": tf.zeros([1, 5, 5, 2]),
        "values": tf.zeros([72]),
        "bias": tf.zeros([4]),
        "starts": starts,
        "taps": taps,
        "places": places,
        "filters": 4,
        "kernel": [3, 3],
        "strides": [1, 1],
        "dilations": [1, 1],
        "padding": "VALID",
    }
    return build.library().sparsekit_conv(**{**arguments, **change})


def backward(**change):
    structure = ConvStructure.from_mask(np.ones((3, 3, 2, 4), bool), padding="valid")
    starts, taps, places = structure.backward
    arguments = {
        "x": tf.zeros([1, 5, 5, 2]),
        "values": tf.zeros([72]),
        "y": tf.zeros([1, 3, 3, 4]),
        "dy": tf.zeros([1, 3, 3, 4]),
        "starts": starts,
        "taps": taps,
        "places": places,
        "kernel": [3, 3],
        "strides": [1, 1],
        "dilations": [1, 1],
        "padding": "VALID",
        "relu": True,
    }
    return build.library().sparsekit_conv_grad(**{**arguments, **change})


@pytest.mark.parametrize(
    ("op", "change", "sentence"),
    [
        (forward, {"x": tf.zeros([5, 5, 2])}, "x must be"),
        (forward, {"x": tf.zeros([1, 5, 5, 1])}, "outside of the kernel"),
        (forward, {"x": tf.zeros([1, 1, 5, 2])}, "covers 3 pixels but the padded input has only"),
        (forward, {"values": tf.zeros([71])}, "outside of the kernel or of the 71 values"),
        (forward, {"values": tf.zeros([72, 1])}, "values must be a vector"),
        (forward, {"bias": tf.zeros([3])}, "bias must hold 4 or 0 numbers"),
        (forward, {"starts": tf.constant([0, 18, 12, 40, 72])}, "must ascend"),
        (forward, {"starts": tf.constant([0, 18, 36, 54, 73])}, "must ascend"),
        (forward, {"starts": tf.constant([0, 18, 36, 72])}, "blocks of 4 lists"),
        (forward, {"taps": tf.fill([72], -1)}, "outside of the kernel"),
        (forward, {"places": tf.fill([72], 72)}, "outside of the kernel or of the 72 values"),
        (forward, {"taps": tf.zeros([71], tf.int32)}, "one length"),
        (forward, {"strides": [0, 1]}, "positive"),
        (forward, {"padding": "EXPLICIT", "pads": [3, 0, 0, 0]}, "pads must lie between"),
        (backward, {"dy": tf.zeros([1, 3, 4, 4])}, "the output gradient must be"),
        (backward, {"dy": tf.zeros([1, 3, 3, 3])}, "one shape"),
        (backward, {"y": tf.zeros([1, 3, 3, 1])}, "one shape"),
        (backward, {"taps": tf.fill([72], 36)}, "outside of the kernel"),
        (backward, {"places": tf.fill([72], -5)}, "outside of the kernel"),
        (backward, {"starts": tf.constant([0, 72])}, "lists"),
    ],
)
def test_bad_tensors_are_refused_and_never_crash(op, change, sentence):
    if not usable():
        return
    with pytest.raises((tf.errors.InvalidArgumentError, ValueError), match=sentence):
        op(**change)


def test_places_named_twice_do_not_crash():
    if not usable():
        return
    dvalues = backward(places=tf.zeros([72], tf.int32), relu=False, dy=tf.ones([1, 3, 3, 4])).dvalues
    assert np.all(dvalues[1:] == 0.0)


@pytest.mark.parametrize(
    ("arguments", "error", "sentence"),
    [
        ({"keep": np.ones((3, 3, 2, 4))}, MaskError, "float64 array"),
        ({"keep": np.ones((3, 2), bool)}, MaskError, r"shape \(3, 2\)"),
        ({"keep": np.ones((3, 3, 0, 4), bool)}, MaskError, "without empty axes"),
        ({"strides": 0}, ArgumentError, "strides is 0"),
        ({"strides": (1, 1, 1)}, ArgumentError, "strides is"),
        ({"dilation": (1, -1)}, ArgumentError, "dilation is"),
        ({"padding": "causal"}, ArgumentError, "padding is 'causal'"),
        ({"groups": 3}, ArgumentError, "a divisor of the 4 output channels"),
    ],
)
def test_structures_check_themselves(arguments, error, sentence):
    with pytest.raises(error, match=sentence):
        ConvStructure.from_mask(**{"keep": np.ones((3, 3, 2, 4), bool), **arguments})


def test_a_structure_in_variables_may_change_inside_a_function():
    if not usable():
        return
    rng = np.random.default_rng(0)
    masks = [rng.random((3, 3, 6, 5)) < density for density in (0.3, 0.5, 0.0)]
    kernel, x = rng.normal(size=(3, 3, 6, 5)).astype("float32"), rng.normal(size=(2, 7, 8, 6)).astype("float32")
    structure = ConvStructure.from_mask(masks[0], 2, "same").in_variables()

    @tf.function
    def step(keep):
        new = ConvStructure.from_mask(keep, 2, "same")
        for variable, array in zip(structure.arrays(), new.arrays(), strict=True):
            variable.assign(array)
        with tf.GradientTape() as tape:
            values = tf.boolean_mask(kernel, keep)
            tape.watch(values)
            y = sparse_conv2d(tf.constant(x), values, structure)
        return y, tape.gradient(y, values)

    for keep in masks:
        weights = tf.constant(kernel * keep)
        with tf.GradientTape() as tape:
            tape.watch(weights)
            expected = tf.nn.conv2d(x, weights, 2, "SAME")
        y, gradient = step(tf.constant(keep))
        np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(gradient, tape.gradient(expected, weights).numpy()[keep], rtol=1e-4, atol=1e-5)


def test_functions_check_their_arguments():
    if not usable():
        return
    flat = ConvStructure.from_mask(np.ones((3, 2, 4), bool))
    square = ConvStructure.from_mask(np.ones((3, 3, 2, 4), bool))
    with pytest.raises(ArgumentError, match="use sparse_conv1d"):
        sparse_conv2d(tf.zeros([1, 5, 5, 2]), tf.zeros([24]), flat)
    with pytest.raises(ArgumentError, match="use sparse_conv2d"):
        sparse_conv1d(tf.zeros([1, 5, 2]), tf.zeros([72]), square)
    with pytest.raises(ArgumentError, match="activation is 'tanh'"):
        sparse_conv2d(tf.zeros([1, 5, 5, 2]), tf.zeros([72]), square, activation="tanh")
    with pytest.raises(ArgumentError, match="x has 3 channels, but the kernel needs 2"):
        sparse_conv2d(tf.zeros([1, 5, 5, 3]), tf.zeros([72]), square)
