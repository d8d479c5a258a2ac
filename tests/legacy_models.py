"""Small tf_keras models, one for each kind of layer that carries weights and some that do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras

L = tf_keras.layers
IMAGE, SERIES = (8, 8, 4), (6, 5)


def chain(*layers: Any) -> Callable[[], Any]:
    return lambda: tf_keras.Sequential([layer() for layer in layers])


def merged() -> Any:
    x = L.Input((5,))
    a, b = L.Dense(4)(x), L.Dense(4)(x)
    joined = [
        kind()([a, b]) for kind in (L.Add, L.Subtract, L.Multiply, L.Average, L.Maximum, L.Minimum, L.Concatenate)
    ]
    return tf_keras.Model(x, [*joined, L.Dot(-1)([a, b])])


def several_inputs() -> Any:
    x, z = L.Input((5,), name="x"), L.Input((3,), name="z")
    hidden = L.Concatenate()([L.Dense(4)(x), L.Dense(4)(z)])
    return tf_keras.Model([x, z], [L.Dense(2)(hidden), L.Dense(1)(hidden)])


def dictionaries() -> Any:
    x, z = L.Input((5,), name="x"), L.Input((3,), name="z")
    hidden = L.Concatenate()([L.Dense(4)(x), L.Dense(4)(z)])
    return tf_keras.Model({"x": x, "z": z}, L.Dense(2)(hidden))


def shared() -> Any:
    x, z, layer = L.Input((5,)), L.Input((5,)), L.Dense(4)
    return tf_keras.Model([x, z], L.Concatenate()([layer(x), layer(z)]))


def nested_sequential() -> Any:
    inner = tf_keras.Sequential(
        [L.Conv2D(4, 3, padding="same", input_shape=IMAGE), L.BatchNormalization(), L.Conv2D(4, 3, padding="same")]
    )
    x = L.Input(IMAGE)
    return tf_keras.Model(x, L.Dense(3)(L.Flatten()(inner(x))))


def nested_functional() -> Any:
    x = L.Input(IMAGE)
    inner = tf_keras.Model(x, L.BatchNormalization()(L.Conv2D(4, 3)(x)))
    return tf_keras.Sequential([L.InputLayer(IMAGE), inner, L.Flatten(), L.Dense(2)])


def attention() -> Any:
    x = L.Input(SERIES)
    y, scores = L.MultiHeadAttention(2, 3, value_dim=4)(x, x, return_attention_scores=True)
    return tf_keras.Model(x, [L.Attention(use_scale=True)([y, x]), L.AdditiveAttention()([y, x]), scores])


def lstm_states() -> Any:
    x = L.Input(SERIES)
    y, h, c = L.LSTM(4, return_state=True, return_sequences=True)(x)
    return tf_keras.Model(x, L.LSTM(4)(y, initial_state=[h, c]))


def gru_states() -> Any:
    x = L.Input(SERIES)
    y, h = L.GRU(4, return_state=True, return_sequences=True)(x)
    return tf_keras.Model(x, L.GRU(4)(y, initial_state=h))


def functions() -> Any:
    x = L.Input((5,))
    return tf_keras.Model(x, tf.nn.relu(L.Dense(5)(x)) * 2.0 + x)


def wrapped_model() -> Any:
    x = L.Input((5,))
    inner = tf_keras.Model(x, L.Dense(3)(x))
    return tf_keras.Sequential([L.TimeDistributed(inner, input_shape=SERIES), L.Dense(2)])


def crossed() -> Any:
    x, z = L.Input((1,), dtype="int64"), L.Input((1,), dtype="int64")
    return tf_keras.Model([x, z], L.Embedding(7, 3)(L.HashedCrossing(7)((x, z))))


def words() -> Any:
    x = L.Input((1,), dtype="string")
    rows = L.TextVectorization(vocabulary=["a", "b"], output_sequence_length=4)(x)
    return tf_keras.Model(x, [L.Embedding(6, 3)(rows), L.StringLookup(vocabulary=["a", "c"])(x)])


# Those that must become a Keras 3 model.
CONVERTED: dict[str, Callable[[], Any]] = {
    "Dense": chain(lambda: L.Dense(4, input_shape=(5,)), lambda: L.Dense(3)),
    "Conv1D": chain(lambda: L.Conv1D(4, 3, input_shape=SERIES)),
    "Conv2D": chain(lambda: L.Conv2D(4, 3, groups=2, input_shape=IMAGE)),
    "Conv3D": chain(lambda: L.Conv3D(4, 3, input_shape=(5, 5, 5, 2))),
    "Conv1DTranspose": chain(lambda: L.Conv1DTranspose(4, 3, input_shape=SERIES)),
    "Conv2DTranspose": chain(lambda: L.Conv2DTranspose(4, 3, strides=2, input_shape=IMAGE)),
    "Conv3DTranspose": chain(lambda: L.Conv3DTranspose(4, 3, input_shape=(4, 4, 4, 2))),
    "DepthwiseConv1D": chain(lambda: L.DepthwiseConv1D(3, input_shape=SERIES)),
    "DepthwiseConv2D": chain(lambda: L.DepthwiseConv2D(3, depth_multiplier=2, input_shape=IMAGE)),
    "SeparableConv1D": chain(lambda: L.SeparableConv1D(4, 3, input_shape=SERIES)),
    "SeparableConv2D": chain(lambda: L.SeparableConv2D(4, 3, input_shape=IMAGE)),
    "BatchNormalization": chain(lambda: L.BatchNormalization(input_shape=IMAGE)),
    "LayerNormalization": chain(lambda: L.LayerNormalization(input_shape=SERIES)),
    "GroupNormalization": chain(lambda: L.GroupNormalization(2, input_shape=IMAGE)),
    "UnitNormalization": chain(lambda: L.UnitNormalization(input_shape=SERIES)),
    "Normalization": chain(lambda: L.Normalization(mean=[1.0, 2, 3], variance=[1.0, 2, 3], input_shape=(3,))),
    "LSTM": chain(lambda: L.LSTM(4, return_sequences=True, input_shape=SERIES), lambda: L.LSTM(3)),
    "GRU": chain(lambda: L.GRU(4, input_shape=SERIES)),
    "GRU without reset_after": chain(lambda: L.GRU(4, reset_after=False, input_shape=SERIES)),
    "SimpleRNN": chain(lambda: L.SimpleRNN(4, input_shape=SERIES)),
    "RNN of cells": chain(lambda: L.RNN([L.GRUCell(4), L.LSTMCell(3)], input_shape=SERIES)),
    "Bidirectional LSTM": chain(lambda: L.Bidirectional(L.LSTM(4, return_sequences=True), input_shape=SERIES)),
    "Bidirectional GRU": chain(lambda: L.Bidirectional(L.GRU(4), merge_mode="sum", input_shape=SERIES)),
    "TimeDistributed Dense": chain(lambda: L.TimeDistributed(L.Dense(4), input_shape=SERIES)),
    "TimeDistributed Conv2D": chain(lambda: L.TimeDistributed(L.Conv2D(4, 3), input_shape=(3, *IMAGE))),
    "Embedding": chain(lambda: L.Embedding(11, 5, input_length=6), lambda: L.LSTM(4)),
    "masked Embedding": chain(lambda: L.Embedding(11, 5, mask_zero=True, input_length=6), lambda: L.GRU(4)),
    "EinsumDense": chain(lambda: L.EinsumDense("abc,cd->abd", (None, 4), bias_axes="d", input_shape=SERIES)),
    "PReLU": chain(lambda: L.PReLU(shared_axes=[1, 2], input_shape=IMAGE)),
    "ConvLSTM1D": chain(lambda: L.ConvLSTM1D(3, 3, recurrent_activation="sigmoid", input_shape=(4, 6, 2))),
    "ConvLSTM2D": chain(lambda: L.ConvLSTM2D(3, 3, recurrent_activation="sigmoid", input_shape=(4, 6, 6, 2))),
    "ConvLSTM3D": chain(lambda: L.ConvLSTM3D(3, 3, recurrent_activation="sigmoid", input_shape=(2, 4, 4, 4, 2))),
    "RNN of a cell": chain(lambda: L.RNN(L.SimpleRNNCell(4), input_shape=SERIES)),
    "stateful LSTM": chain(lambda: L.LSTM(4, stateful=True, batch_input_shape=(3, *SERIES))),
    "TimeDistributed model": wrapped_model,
    "activations": chain(
        lambda: L.Dense(5, input_shape=(5,)),
        lambda: L.LeakyReLU(0.2),
        lambda: L.ELU(0.5),
        lambda: L.ThresholdedReLU(0.1),
        lambda: L.ReLU(max_value=6.0),
        lambda: L.Softmax(),
    ),
    "shapes": chain(
        lambda: L.MaxPool2D(2, input_shape=IMAGE),
        lambda: L.GlobalAveragePooling2D(keepdims=True),
        lambda: L.UpSampling2D(4),
        lambda: L.ZeroPadding2D(1),
        lambda: L.Cropping2D(1),
        lambda: L.Flatten(),
        lambda: L.RepeatVector(3),
        lambda: L.Permute((2, 1)),
        lambda: L.Reshape((-1,)),
        lambda: L.Dense(2),
    ),
    "noise": chain(
        lambda: L.SpatialDropout1D(0.3, input_shape=SERIES),
        lambda: L.Dropout(0.5),
        lambda: L.GaussianNoise(0.1),
        lambda: L.AlphaDropout(0.1),
        lambda: L.Masking(0.0),
        lambda: L.Dense(2),
    ),
    "pictures": chain(
        lambda: L.Rescaling(1 / 255.0, input_shape=(12, 12, 3)),
        lambda: L.RandomFlip(),
        lambda: L.RandomRotation(0.1),
        lambda: L.CenterCrop(8, 8),
        lambda: L.Resizing(10, 10),
        lambda: L.Conv2D(2, 3),
    ),
    "rows": chain(
        lambda: L.ZeroPadding1D(3, input_shape=SERIES),
        lambda: L.MaxPool1D(2),
        lambda: L.UpSampling1D(2),
        lambda: L.Cropping1D(1),
        lambda: L.AveragePooling1D(2),
        lambda: L.Conv1D(3, 2),
        lambda: L.GlobalMaxPool1D(),
    ),
    "means of rows": chain(lambda: L.Conv1D(3, 2, input_shape=SERIES), lambda: L.GlobalAveragePooling1D()),
    "means of pictures": chain(
        lambda: L.AveragePooling2D(2, input_shape=IMAGE), lambda: L.Conv2D(3, 2), lambda: L.GlobalMaxPool2D()
    ),
    "volumes": chain(
        lambda: L.ZeroPadding3D(2, input_shape=(4, 4, 4, 2)),
        lambda: L.MaxPool3D(2),
        lambda: L.UpSampling3D(2),
        lambda: L.Cropping3D(1),
        lambda: L.AveragePooling3D(2),
        lambda: L.SpatialDropout3D(0.1),
        lambda: L.Conv3D(3, 2),
        lambda: L.GlobalAveragePooling3D(),
    ),
    "largest of volumes": chain(lambda: L.Conv3D(3, 2, input_shape=(4, 4, 4, 2)), lambda: L.GlobalMaxPool3D()),
    "more noise": chain(
        lambda: L.RandomBrightness(0.1, input_shape=(12, 12, 3)),
        lambda: L.RandomContrast(0.1),
        lambda: L.RandomTranslation(0.1, 0.1),
        lambda: L.RandomZoom(0.1),
        lambda: L.SpatialDropout2D(0.1),
        lambda: L.GaussianDropout(0.1),
        lambda: L.ActivityRegularization(0.1),
        lambda: L.Identity(),
        lambda: L.Activation("softplus"),
        lambda: L.Conv2D(2, 3),
    ),
    "bins": chain(lambda: L.Discretization([0.0, 1.0], input_shape=(5,)), lambda: L.Embedding(3, 2)),
    "hashes": chain(lambda: L.Hashing(5, input_shape=(4,), dtype="int64"), lambda: L.Embedding(5, 3)),
    "codes": chain(lambda: L.CategoryEncoding(4, input_shape=(3,)), lambda: L.Dense(3)),
    "numbers": chain(lambda: L.IntegerLookup(vocabulary=[1, 2], input_shape=(4,)), lambda: L.Embedding(5, 3)),
    "words": words,
    "crossed": crossed,
    "regularised": chain(
        lambda: L.Dense(4, kernel_regularizer="l2", kernel_constraint="non_neg", input_shape=(5,)),
        lambda: L.Dense(3, kernel_initializer="orthogonal", activation=tf_keras.activations.swish),
    ),
    "mixed_float16": chain(
        lambda: L.Dense(4, dtype="mixed_float16", input_shape=(5,)), lambda: L.Dense(3, dtype="float32")
    ),
    "float64": chain(lambda: L.Dense(4, dtype="float64", input_shape=(5,))),
    "merged": merged,
    "several inputs": several_inputs,
    "dictionaries": dictionaries,
    "shared": shared,
    "nested Sequential": nested_sequential,
    "nested Functional": nested_functional,
    "attention": attention,
    "LSTM states": lstm_states,
    "GRU states": gru_states,
}

# Those that Keras 3 lacks or computes differently: they stay tf_keras models.
KEPT: dict[str, Callable[[], Any]] = {
    "LocallyConnected1D": chain(lambda: L.LocallyConnected1D(4, 3, input_shape=SERIES)),
    "LocallyConnected2D": chain(lambda: L.LocallyConnected2D(4, 3, input_shape=IMAGE)),
    "hard_sigmoid of ConvLSTM2D": chain(lambda: L.ConvLSTM2D(3, 3, input_shape=(4, 6, 6, 2))),
    "random sizes": chain(
        lambda: L.RandomHeight(0.1, input_shape=IMAGE),
        lambda: L.RandomWidth(0.1),
        lambda: L.GlobalAveragePooling2D(),
        lambda: L.Dense(2),
    ),
    "RandomCrop": chain(lambda: L.RandomCrop(10, 10, input_shape=(12, 12, 3)), lambda: L.Conv2D(2, 3)),
    "TensorFlow's functions": functions,
    "hard_sigmoid": chain(lambda: L.LSTM(4, recurrent_activation="hard_sigmoid", input_shape=SERIES)),
}


# Classes among tf_keras' layers that no file of the ones above can have.
NO_FILE = {
    "Layer": "a base class",
    "Wrapper": "a base class",
    "AbstractRNNCell": "a base class",
    "DenseFeatures": "needs TensorFlow 1's feature columns",
    "SpectralNormalization": "cannot be built where tf.keras is Keras 3",
    "Lambda": "is Python code, which is refused",
}


def filled(build: Callable[[], Any], seed: int = 0) -> Any:
    """A model with random weights that do not hide in zeros: biases and statistics differ from their first values."""
    tf_keras.backend.clear_session()
    model, rng = build(), np.random.default_rng(seed)
    model.set_weights(
        [
            np.abs(rng.normal(size=w.shape) * 0.3 + 0.1).astype(w.dtype) if w.dtype.kind == "f" else w
            for w in model.get_weights()
        ]
    )
    return model


def write(model: Any, path: Any) -> Any:
    """Write a legacy .h5 as tf_keras does."""
    model.save(path, save_format="h5")
    return path
