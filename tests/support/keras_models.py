"""Small Keras models with a batch: a transformer and a ResNet with batch norm."""

from __future__ import annotations

from typing import Any

import numpy as np


def transformer(blocks: int = 3, width: int = 32, length: int = 32, rows: int = 16) -> tuple[Any, Any, Any]:
    import keras
    from keras import layers

    keras.utils.set_random_seed(0)
    tokens = keras.Input((length,), dtype="int32")
    x = layers.Embedding(100, width)(tokens)
    for _ in range(blocks):
        y = layers.LayerNormalization()(x)
        x = layers.Add()([x, layers.MultiHeadAttention(4, width // 4)(y, y)])
        y = layers.Dense(4 * width, activation="gelu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dense(width)(y)])
    model = keras.Model(tokens, layers.Dense(100)(layers.LayerNormalization()(x)))
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    words = np.random.default_rng(0).integers(0, 100, (2 * rows, length))
    return model, words, words


def resnet(blocks: int = 4, width: int = 8, side: int = 16, rows: int = 8) -> tuple[Any, Any, Any]:
    import keras
    from keras import layers

    keras.utils.set_random_seed(0)
    images = keras.Input((side, side, 3))
    x = layers.Conv2D(width, 3, padding="same")(images)
    for _ in range(blocks):
        y = layers.ReLU()(layers.BatchNormalization()(layers.Conv2D(width, 3, padding="same")(x)))
        y = layers.BatchNormalization()(layers.Conv2D(width, 3, padding="same")(y))
        x = layers.ReLU()(layers.Add()([x, y]))
    model = keras.Model(images, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)))
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    rng = np.random.default_rng(0)
    return model, rng.normal(size=(2 * rows, side, side, 3)).astype("float32"), rng.integers(0, 10, 2 * rows)
