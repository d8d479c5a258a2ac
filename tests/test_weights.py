"""Which variables are found, how they are called, which axes they have, and why the others are left alone."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf
from models import KERAS, both

from sparsekit.errors import ArgumentError, ModelTypeError, NothingToPruneError
from sparsekit.weights import all_weights, prunable_weights, read, survey


def model_of(k, shape, *layers, **input_arguments):
    """A Functional model of layers in a row."""
    inputs = x = k.Input(shape, **input_arguments)
    for layer in layers:
        x = layer(x)
    return k.Model(inputs, x)


# What a layer has: role -> (shape, in_axis, out_axis) of what is pruned, and the roles of what is not.
# Inputs are (time, 6) unless the name says otherwise.
DENSE = {"kernel": ((6, 5), 0, 1)}
RECURRENT = {"kernel": ((6, 12), 0, 1), "recurrent_kernel": ((3, 12), 0, 1)}
LAYERS = {
    "Dense": ((6,), lambda L: L.Dense(5), DENSE, {"bias"}),
    "Dense without bias": ((6,), lambda L: L.Dense(5, use_bias=False), DENSE, set()),
    "TimeDistributed": ((4, 6), lambda L: L.TimeDistributed(L.Dense(5)), DENSE, {"bias"}),
    "LSTM": ((4, 6), lambda L: L.LSTM(3), RECURRENT, {"bias"}),
    "GRU": (
        (4, 6),
        lambda L: L.GRU(3),
        {"kernel": ((6, 9), 0, 1), "recurrent_kernel": ((3, 9), 0, 1)},
        {"bias"},  # of shape (2, 9): a bias by name, not by rank
    ),
    "SimpleRNN": (
        (4, 6),
        lambda L: L.SimpleRNN(3),
        {"kernel": ((6, 3), 0, 1), "recurrent_kernel": ((3, 3), 0, 1)},
        {"bias"},
    ),
    "ConvLSTM2D": (
        (4, 8, 8, 2),
        lambda L: L.ConvLSTM2D(3, 2),
        {"kernel": ((2, 2, 2, 12), 2, 3), "recurrent_kernel": ((2, 2, 3, 12), 2, 3)},
        {"bias"},
    ),
    "EinsumDense": (
        (4, 6),
        lambda L: L.EinsumDense("abc,cd->abd", output_shape=(None, 7), bias_axes="d"),
        {"kernel": ((6, 7), 0, 1)},
        {"bias"},
    ),
    "EinsumDense with the output first": (
        (4, 6),
        lambda L: L.EinsumDense("...c,dc->...d", output_shape=7),
        {"kernel": ((7, 6), 1, 0)},
        set(),
    ),
    "EinsumDense with a kernel for each step": (
        (4, 6),
        lambda L: L.EinsumDense("btc,tcd->btd", output_shape=(4, 7)),
        {"kernel": ((4, 6, 7), 1, 2)},
        set(),
    ),
    "Conv1D": ((9, 6), lambda L: L.Conv1D(5, 3), {"kernel": ((3, 6, 5), 1, 2)}, {"bias"}),
    "Conv2D": ((9, 9, 6), lambda L: L.Conv2D(5, 3), {"kernel": ((3, 3, 6, 5), 2, 3)}, {"bias"}),
    "Conv2D in groups": ((9, 9, 6), lambda L: L.Conv2D(4, 3, groups=2), {"kernel": ((3, 3, 3, 4), 2, 3)}, {"bias"}),
    "Conv3D": ((5, 5, 5, 2), lambda L: L.Conv3D(4, 3), {"kernel": ((3, 3, 3, 2, 4), 3, 4)}, {"bias"}),
    "Conv1DTranspose": ((9, 6), lambda L: L.Conv1DTranspose(5, 3), {"kernel": ((3, 5, 6), 2, 1)}, {"bias"}),
    "Conv2DTranspose": ((9, 9, 6), lambda L: L.Conv2DTranspose(5, 2), {"kernel": ((2, 2, 5, 6), 3, 2)}, {"bias"}),
    "SeparableConv1D": (
        (9, 6),
        lambda L: L.SeparableConv1D(5, 3),
        {"depthwise_kernel": ((3, 6, 1), 1, 1), "pointwise_kernel": ((1, 6, 5), 1, 2)},
        {"bias"},
    ),
    "SeparableConv2D": (
        (9, 9, 6),
        lambda L: L.SeparableConv2D(5, 3),
        {"depthwise_kernel": ((3, 3, 6, 1), 2, 2), "pointwise_kernel": ((1, 1, 6, 5), 2, 3)},
        {"bias"},
    ),
    "PReLU": ((9, 6), lambda L: L.PReLU(), {}, {"alpha"}),
    "BatchNormalization": (
        (6,),
        lambda L: L.BatchNormalization(),
        {},
        {"gamma", "beta", "moving_mean", "moving_variance"},
    ),
    "LayerNormalization": ((9, 6), lambda L: L.LayerNormalization(axis=[1, 2]), {}, {"gamma", "beta"}),
    "GroupNormalization": ((9, 6), lambda L: L.GroupNormalization(groups=2), {}, {"gamma", "beta"}),
}


@both
@pytest.mark.parametrize("name", LAYERS)
def test_what_a_layer_has(flavour, name):
    k = KERAS[flavour]
    shape, build, expected, left = LAYERS[name]
    model = model_of(k, shape, build(k.layers))
    chosen, skipped = survey(model, allow_empty=True)
    assert {ref.role: (ref.shape, ref.in_axis, ref.out_axis) for ref in chosen} == expected
    assert {one.ref.role for one in skipped if one.reason != "not floating point"} == left
    assert all(one.reason in ("bias, scale or statistic", "not trainable", "not floating point") for one in skipped)
    assert len(chosen) + len(skipped) == len(model.variables if flavour == "keras" else model.weights)


@both
def test_a_depthwise_kernel_is_found_and_has_one_channel_axis(flavour):
    # Its variable is called kernel in one Keras and depthwise_kernel in the other.
    k = KERAS[flavour]
    (ref,) = prunable_weights(model_of(k, (9, 9, 6), k.layers.DepthwiseConv2D(3, depth_multiplier=2)))
    assert (ref.shape, ref.in_axis, ref.out_axis) == ((3, 3, 6, 2), 2, 2)


@both
def test_an_embedding_is_found(flavour):
    k = KERAS[flavour]
    (ref,) = prunable_weights(model_of(k, (4,), k.layers.Embedding(10, 3), dtype="int32"))
    assert (ref.role, ref.shape, ref.in_axis, ref.out_axis) == ("embeddings", (10, 3), 0, 1)


@both
def test_both_directions_of_a_bidirectional(flavour):
    k = KERAS[flavour]
    refs = prunable_weights(model_of(k, (4, 6), k.layers.Bidirectional(k.layers.LSTM(3))))
    assert [ref.role for ref in refs] == ["kernel", "recurrent_kernel"] * 2
    assert ["forward" in ref.path for ref in refs] == [True, True, False, False]


@both
def test_stacked_cells(flavour):
    k = KERAS[flavour]
    cells = k.layers.StackedRNNCells([k.layers.LSTMCell(3), k.layers.GRUCell(2)])
    refs = prunable_weights(model_of(k, (4, 6), k.layers.RNN(cells)))
    assert [ref.shape for ref in refs] == [(6, 12), (3, 12), (3, 6), (2, 6)]


@both
def test_attention_heads(flavour):
    k = KERAS[flavour]
    inputs = k.Input((4, 6))
    model = k.Model(inputs, k.layers.MultiHeadAttention(2, 5)(inputs, inputs))
    found = {ref.path.split("/")[-2]: (ref.shape, ref.in_axis, ref.out_axis) for ref in prunable_weights(model)}
    heads = ((6, 2, 5), 0, 2)
    assert found == {"query": heads, "key": heads, "value": heads, "attention_output": ((2, 5, 6), 1, 2)}
    # Biases of heads have rank 2.
    assert (2, 5) in [one.ref.shape for one in survey(model)[1] if one.ref.role == "bias"]


@both
def test_a_class_derived_from_a_transposed_convolution_has_its_axes(flavour):
    class Up(KERAS[flavour].layers.Conv2DTranspose):
        pass

    (ref,) = prunable_weights(model_of(KERAS[flavour], (9, 9, 6), Up(5, 2)))
    assert (ref.in_axis, ref.out_axis) == (3, 2)


@both
def test_a_class_that_only_sounds_like_one_has_not(flavour):
    class TransposedAttention(KERAS[flavour].layers.Dense):
        pass

    (ref,) = prunable_weights(model_of(KERAS[flavour], (6,), TransposedAttention(5)))
    assert (ref.in_axis, ref.out_axis) == (0, 1)


@both
def test_equal_layer_names_in_two_sub_models_give_two_paths(flavour):
    k = KERAS[flavour]

    def block(name):
        return k.Sequential([k.layers.Input((6,)), k.layers.Dense(6, name="dense")], name=name)

    deeper = model_of(k, (6,), block("inner"), k.layers.Dense(6, name="dense"))
    model = model_of(k, (6,), block("a"), block("b"), deeper, k.layers.Dense(6, name="dense"))
    refs = all_weights(model)
    assert len({ref.path for ref in refs}) == len(refs) == 10
    assert [id(ref.variable) for ref in refs] == [
        id(variable) for layer in flat(model) for variable in (layer.kernel, layer.bias)
    ]


def flat(layer):
    children = [child for child in layer.layers if not type(child).__name__.startswith("Input")]
    return [leaf for child in children for leaf in (flat(child) if hasattr(child, "layers") else [child])]


@both
def test_paths_are_the_same_for_the_same_model_built_again(flavour):
    k = KERAS[flavour]

    def build():
        k.backend.clear_session()
        inner = model_of(k, (4, 6), k.layers.LSTM(3, return_sequences=True), k.layers.Dense(6))
        return [ref.path for ref in all_weights(model_of(k, (4, 6), inner, k.layers.Dense(2)))]

    assert build() == build()


@both
def test_shared_layers_and_tied_variables_come_once(flavour):
    k = KERAS[flavour]
    shared = k.layers.Dense(6)

    class Tied(k.layers.Layer):
        """Uses another layer's kernel, transposed."""

        def __init__(self, other):
            super().__init__()
            self.weight = other.kernel

        def call(self, inputs):
            return inputs @ tf.transpose(tf.convert_to_tensor(self.weight))

    inputs = k.Input((6,))
    x = shared(shared(inputs))
    model = k.Model(inputs, Tied(shared)(x))
    assert [ref.shape for ref in prunable_weights(model)] == [(6, 6)]


def custom_model(k):
    """A subclassed model with a weight of its own, a custom layer, and layers in a list and a dict."""

    class Scaled(k.layers.Layer):
        def build(self, shape):
            self.table = self.add_weight(shape=(shape[-1], 4), name="table")
            self.cube = self.add_weight(shape=(2, 4, 4), name="cube")
            self.factor = self.add_weight(shape=(4,), name="factor")
            self.seen = self.add_weight(shape=(3, 3), name="seen", dtype="int32", trainable=False, initializer="zeros")

        def call(self, inputs):
            return tf.linalg.matmul(inputs, tf.convert_to_tensor(self.table)) * tf.convert_to_tensor(self.factor)

    class Custom(k.Model):
        def __init__(self):
            super().__init__(name="custom")
            self.scaled = Scaled(name="scaled")
            self.blocks = [k.layers.Dense(4, name="first"), {"second": k.layers.Dense(3, name="second")}]
            self.own = self.add_weight(shape=(3, 3), name="own")

        def call(self, inputs):
            x = self.blocks[0](self.scaled(inputs))
            return tf.linalg.matmul(self.blocks[1]["second"](x), tf.convert_to_tensor(self.own))

    return Custom()


@both
def test_a_subclassed_model(flavour):
    model = custom_model(KERAS[flavour])
    model(np.zeros((1, 6), np.float32))
    chosen, skipped = survey(model)
    assert {ref.path for ref in chosen} == {"first/kernel", "second/kernel", "scaled/table", "scaled/cube", "own"}
    reasons = {one.ref.role: one.reason for one in skipped}
    assert reasons == {"seen": "not floating point", "factor": "vector", "bias": "bias, scale or statistic"}


@both
def test_a_model_that_was_never_called_says_so(flavour):
    k = KERAS[flavour]
    for model in (custom_model(k), k.Sequential([k.layers.Dense(3)])):
        with pytest.raises(NothingToPruneError, match=f"'{model.name}' has not all of its weights yet; call it once"):
            all_weights(model)


@both
def test_a_trainer_around_built_models_need_not_be_called(flavour):
    k = KERAS[flavour]

    class Gan(k.Model):
        def __init__(self):
            super().__init__()
            self.generator = model_of(k, (6,), k.layers.Dense(5))
            self.critic = model_of(k, (5,), k.layers.Dense(1))

    assert [ref.shape for ref in prunable_weights(Gan())] == [(6, 5), (5, 1)]


@both
def test_a_model_without_weights_has_nothing_to_prune(flavour):
    k = KERAS[flavour]
    model = model_of(k, (6,), k.layers.ReLU())
    assert all_weights(model) == []
    with pytest.raises(NothingToPruneError, match=r"has no weight to prune \(it has no variables\)"):
        survey(model)
    assert survey(model, allow_empty=True) == ([], [])


@both
def test_frozen_layers_are_left_alone(flavour):
    k = KERAS[flavour]
    first = k.layers.Dense(5, name="first")
    model = model_of(k, (6,), first, k.layers.Dense(4, name="second"))
    first.trainable = False
    chosen, skipped = survey(model)
    assert [ref.path.split("/")[-2] for ref in chosen] == ["second"]
    assert [one.reason for one in skipped if "first" in one.ref.path] == ["not trainable"] * 2
    model.trainable = False
    with pytest.raises(NothingToPruneError, match=r"no weight to prune \(.*first/kernel: not trainable"):
        survey(model)


@both
def test_state_of_dropout_and_of_statistics_is_no_weight(flavour):
    k = KERAS[flavour]
    normal = k.layers.Normalization()
    normal.adapt(np.arange(12.0).reshape(2, 6))
    model = model_of(k, (6,), normal, k.layers.Dense(5), k.layers.Dropout(0.5), k.layers.GaussianNoise(0.1))
    chosen, skipped = survey(model)
    assert [ref.role for ref in chosen] == ["kernel"]
    assert {one.reason for one in skipped} <= {"not floating point", "not trainable", "bias, scale or statistic"}


@both
def test_weights_stay_the_same_while_a_model_trains(flavour):
    k = KERAS[flavour]
    model = model_of(k, (6,), k.layers.Dense(5), k.layers.BatchNormalization(), k.layers.Dropout(0.5))
    before = [ref.path for ref in all_weights(model)]
    model.compile("adam", "mse", metrics=["mae"])
    model.fit(np.zeros((4, 6)), np.zeros((4, 5)), verbose=0)
    assert [ref.path for ref in all_weights(model)] == before


@both
def test_half_precision_policies_prune_the_variables_that_train(flavour):
    k = KERAS[flavour]
    model = model_of(k, (6,), k.layers.Dense(5, dtype="mixed_float16"), k.layers.Dense(4, dtype="bfloat16"))
    first, second = prunable_weights(model)
    assert first.numpy().dtype == np.float32
    assert second.numpy().dtype == tf.bfloat16.as_numpy_dtype


@both
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_values_are_read_only_and_true(flavour, dtype):
    k = KERAS[flavour]
    model = model_of(k, (6,), k.layers.Dense(5, dtype=dtype))
    (ref,) = prunable_weights(model)
    values = ref.numpy()
    assert np.array_equal(values, np.asarray(model.get_weights()[0]))
    assert values.shape == ref.shape == (6, 5)
    with pytest.raises(ValueError, match="read-only"):
        values[0, 0] = 1


def test_reading_does_not_copy():
    variable = tf.Variable(np.ones(1000, np.float32))
    assert np.shares_memory(read(variable), read(variable))


# --- selectors ---


@functools.cache
def selectable(k):
    inner = k.Sequential([k.layers.Input((4, 3)), k.layers.LSTM(3, name="lstm")], name="inner")
    return model_of(
        k,
        (4, 6),
        k.layers.Conv1D(3, 1, name="conv"),
        inner,
        k.layers.Dense(5, name="first"),
        k.layers.Dense(2, name="last"),
    )


def roles(refs):
    """(layer, role), whatever comes before it in the path."""
    names = ("conv", "lstm", "first", "last")
    return [(next(name for name in names if name in ref.path.replace("lstm_cell", "")), ref.role) for ref in refs]


LSTM = [("lstm", "kernel"), ("lstm", "recurrent_kernel")]
CONV, FIRST, LAST = [("conv", "kernel")], [("first", "kernel")], [("last", "kernel")]


@both
@pytest.mark.parametrize(
    ("include", "expected"),
    [
        (None, CONV + LSTM + FIRST + LAST),
        ("*first*", FIRST),
        (["*first/kernel", "*last/*"], FIRST + LAST),
        ("*recurrent_kernel", LSTM[1:]),
        ("Dense", FIRST + LAST),
        (["Conv1D", "*last/*"], CONV + LAST),
        ("LSTM", LSTM),
        ("LSTMCell", LSTM),
        ("Sequential", LSTM),
        (lambda k: k.layers.Dense, FIRST + LAST),
        (lambda k: k.layers.LSTM, LSTM),
        (lambda k: k.layers.Layer, CONV + LSTM + FIRST + LAST),
        (lambda k: lambda ref: ref.size == 15, FIRST),
        (lambda k: [k.layers.LSTM, "Conv1D", lambda ref: ref.out_axis == 2], CONV + LSTM),
        (("*first/kernel", "*first/bias"), [*FIRST, ("first", "bias")]),
        ("*/bias", [("conv", "bias"), ("lstm", "bias"), ("first", "bias"), ("last", "bias")]),
    ],
)
def test_include(flavour, include, expected):
    k = KERAS[flavour]
    if callable(include):
        include = include(k)
    assert roles(survey(selectable(k), include)[0]) == expected


@both
@pytest.mark.parametrize(
    ("exclude", "expected"),
    [
        ([], CONV + LSTM + FIRST + LAST),
        ("*last/*", CONV + LSTM + FIRST),
        ("LSTM", CONV + FIRST + LAST),
        (lambda k: k.layers.Dense, CONV + LSTM),
        (lambda k: [k.layers.Conv1D, lambda ref: ref.role == "recurrent_kernel"], LSTM[:1] + FIRST + LAST),
    ],
)
def test_exclude(flavour, exclude, expected):
    k = KERAS[flavour]
    if callable(exclude):
        exclude = exclude(k)
    chosen, skipped = survey(selectable(k), None, exclude)
    assert roles(chosen) == expected
    assert {one.reason for one in skipped} <= {"excluded", "bias, scale or statistic", "not floating point"}


@both
def test_exclude_wins_over_include(flavour):
    model = selectable(KERAS[flavour])
    chosen, skipped = survey(model, include="Dense", exclude="*last*")
    assert roles(chosen) == FIRST
    reasons = {roles([one.ref])[0]: one.reason for one in skipped if one.ref.layer is not None}
    assert reasons[("last", "kernel")] == "excluded"
    assert reasons[("conv", "kernel")] == "not included"
    with pytest.raises(NothingToPruneError, match="no weight to prune"):
        survey(model, include="Dense", exclude="Dense")


@both
def test_a_selector_that_matches_nothing_is_a_mistake(flavour):
    k = KERAS[flavour]
    model = selectable(k)
    for argument in ("include", "exclude"):
        for selector in ("*lastt*", "Conv3D", k.layers.Conv3D, lambda ref: False):
            with pytest.raises(
                ArgumentError, match=f"^{argument}=.* matches no weight of '{model.name}'; its paths are"
            ):
                survey(model, **{argument: ["*first*", selector]})
        for selector in (3, None, 0.5):
            with pytest.raises(ArgumentError, match=f"^{argument} holds {selector}; give globs over weight paths"):
                survey(model, **{argument: [selector]})
    with pytest.raises(ArgumentError, match="include is empty"):
        survey(model, include=[])
    with pytest.raises(ArgumentError, match=r"^include holds 3; give globs"):
        survey(model, include=3)


@both
def test_statistics_cannot_be_included(flavour):
    k = KERAS[flavour]
    model = model_of(k, (6,), k.layers.Dense(5), k.layers.BatchNormalization())
    with pytest.raises(NothingToPruneError, match="not trainable"):
        survey(model, include="*/moving_variance")


@pytest.mark.parametrize("given", [None, [], "model.h5", SimpleNamespace(), np.ones(3)])
def test_what_is_no_model_is_refused(given):
    with pytest.raises(ModelTypeError, match=r"is not a Keras model; "):
        all_weights(given)


@both
def test_a_layer_is_not_a_model(flavour):
    with pytest.raises(ModelTypeError, match=r"layers\.\S*Dense is a layer; pass the whole model"):
        all_weights(KERAS[flavour].layers.Dense(3))
