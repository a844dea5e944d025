"""Keras on TensorFlow within a budget: the same gradients, less memory, and clear words for what stays as it is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import pytest

if find_spec("tensorflow") is None or find_spec("keras") is None:
    pytest.skip("tensorflow or keras is not installed", allow_module_level=True)

START = """
import json, sys, warnings
import keras, numpy as np
from keras import layers
import remat, remat.keras

def normed(x, blocks, width):
    for _ in range(blocks):
        y = layers.Dense(4 * width, activation="gelu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dense(width)(y)])
    return x
"""

SAME = """
keras.config.set_floatx("float64")
rng = np.random.default_rng(0)

def norm():
    x = keras.Input((32,))
    return keras.Model(x, normed(x, 4, 32)), rng.normal(size=(64, 32)), rng.normal(size=(64, 32))

def gated():
    a, b = keras.Input((16,)), keras.Input((16,))
    x = a
    for _ in range(4):
        x = layers.LayerNormalization()(layers.Dense(16, activation="silu")(x) * b)
    y = [rng.normal(size=(64, 16)), rng.normal(size=(64, 3))]
    return keras.Model([a, b], [x, layers.Dense(3)(x)]), [rng.normal(size=(64, 16)) for _ in "ab"], y

def masked():
    tokens = keras.Input((12,), dtype="int32")
    x = layers.Embedding(20, 16, mask_zero=True)(tokens)
    for _ in range(2):
        y = layers.LayerNormalization()(x)
        x = layers.Add()([x, layers.MultiHeadAttention(2, 8)(y, y)])
        x = normed(layers.Dropout(0.1, seed=1)(x), 1, 16)
    return keras.Model(tokens, layers.Dense(4)(x)), rng.integers(0, 20, (64, 12)), rng.normal(size=(64, 12, 4))

def batch_normed():
    x = keras.Input((16,))
    y = normed(layers.BatchNormalization()(normed(x, 2, 16)), 2, 16)
    return keras.Model(x, y), rng.normal(size=(64, 16)), rng.normal(size=(64, 16))

def unbuilt():
    model = keras.Sequential([layers.Dense(16, activation="gelu") for _ in range(8)])
    return model, rng.normal(size=(64, 16)), rng.normal(size=(64, 16))

def shared():
    dense, x = layers.Dense(16, activation="gelu"), keras.Input((16,))
    y = x
    for _ in range(4):
        y = layers.LayerNormalization()(dense(y)) + y
    return keras.Model(x, y), rng.normal(size=(64, 16)), rng.normal(size=(64, 16))

found = {}
for make, is_jit in ((norm, True), *((made, False) for made in (norm, gated, masked, batch_normed, unbuilt, shared))):
    runs = []
    for budget in (None, "0.85x"):
        keras.utils.set_random_seed(0)
        rng = np.random.default_rng(0)
        model, x, y = make()
        model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=is_jit)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            callbacks = [remat.keras.Remat(budget, time_limit_s=0.5)] if budget else []
            losses = model.fit(x, y, batch_size=24, shuffle=False, verbose=0, callbacks=callbacks).history["loss"]
        runs.append((losses[0], [v.numpy().astype("float64") for v in model.variables]))
    state = remat.keras.state_of(model)
    again = sum(state.plan.schedule.recomputed().values())
    far = max(float(np.max(np.abs(a - b), initial=0)) for a, b in zip(*(run[1] for run in runs), strict=True))
    said = [str(item.message) for item in caught if "kept, not made again" in str(item.message)]
    found[f"{make.__name__} {is_jit}"] = [
        abs(runs[0][0] - runs[1][0]), far, again, state.peak_bytes <= state.budget_bytes, said]
    state.detach()
    assert not {"train_step", "make_train_function", "_run_through_graph"} & {*vars(model)}
    model.train_on_batch(x, y)
print(json.dumps(found))
"""

GROWTH = """
def resident(name):
    return int(next(line for line in open("/proc/self/status") if line.startswith(name)).split()[1]) / 1024

keras.utils.set_random_seed(0)
inputs = keras.Input((64, 256))
model = keras.Model(inputs, normed(inputs, 6, 256))
model.compile("sgd", "mse")
x = np.random.default_rng(0).normal(size=(128, 64, 256)).astype("float32")
before = resident("VmRSS")
callbacks = [remat.keras.Remat(sys.argv[1])] if sys.argv[1:] else []
losses = model.fit(x, x, batch_size=64, epochs=2, shuffle=False, verbose=0, callbacks=callbacks).history["loss"]
print(json.dumps([losses, resident("VmHWM") - before]))
"""

LEFT = """
class Own(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(4)

    def call(self, x):
        return self.dense(x)

def adding():
    x = keras.Input((4,))
    return keras.Model(x, layers.Dense(4, activity_regularizer="l2")(x))

def small():
    x = keras.Input((4,))
    return keras.Model(x, normed(x, 3, 4))

x = np.ones((64, 4), "float32")
found = []
for model, options, budget in ((Own(), {}, "0.6x"), (adding(), {}, "0.6x"), (small(), {"run_eagerly": True}, "0.6x")):
    model.compile("sgd", "mse", **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        remat.keras.optimize(model, budget)
        model.fit(x, x, verbose=0)
        model.fit(x, x, verbose=0)
    found.append([str(item.message) for item in caught if "planned" in str(item.message)])
model = small()
model.compile("sgd", "mse")
for budget in ("50%", "10B"):
    try:
        model.fit(x, x, verbose=0, callbacks=[remat.keras.Remat(budget, time_limit_s=0.5)])
    except remat.RematError as error:
        found.append(str(error))
remat.keras.state_of(model).detach()
model.fit(x, x, verbose=0)
remat.keras.optimize(model, "48KiB", time_limit_s=0.5)
model.train_on_batch(x, x)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    model.train_on_batch(np.ones((512, 4), "float32"), np.ones((512, 4), "float32"))
found.append([str(item.message) for item in caught if "larger batch" in str(item.message)])
print(json.dumps(found))
"""


def run(script: str, *args: str) -> Any:
    env = {**os.environ, "KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3"}
    result = subprocess.run(
        [sys.executable, "-c", START + script, *args], capture_output=True, text=True, env=env, timeout=900
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.slow
def test_parameters_after_a_fit_are_the_same() -> None:
    for name, (loss_off, parameters_off, again, fits, said) in run(SAME).items():
        assert (loss_off < 1e-9, parameters_off < 1e-9, fits) == (True, True, True), name
        assert again > 0, name
        assert bool(said) == name.startswith(("masked", "batch_normed")), name


@pytest.mark.slow
def test_layer_norm_net_grows_by_a_third_less() -> None:
    plain_losses, plain = run(GROWTH)
    losses, lean = run(GROWTH, "0.4x")
    assert losses == pytest.approx(plain_losses, rel=1e-5)
    assert lean <= 0.7 * plain


@pytest.mark.slow
def test_what_cannot_be_planned_is_said_once() -> None:
    own, adding, eager, share, small, larger = run(LEFT)
    assert [len(item) for item in (own, adding, eager, larger)] == [1, 1, 1, 1]
    assert "called by code of its own" in own[0] and "adds a loss" in adding[0] and "run_eagerly" in eager[0]
    assert share.startswith("TensorFlow does not tell how much memory") and "raise the budget" in small
    assert "beyond its budget; training goes on" in larger[0]
