"""Keras models through `model.fit` within a budget: the same losses, on each backend in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import pytest

import remat

if find_spec("keras") is None:
    pytest.skip("keras is not installed", allow_module_level=True)

SCRIPT = """
import json, sys
import keras
from tests.support import keras_models
import remat, remat.keras

def losses(made, rows, callbacks=()):
    model, x, y = made
    found = model.fit(x, y, batch_size=rows, epochs=2, shuffle=False, verbose=0, callbacks=list(callbacks))
    return found.history["loss"]

def temporaries(model, x, y, rows):
    import jax
    state = [[v.value for v in part] for part in (
        model.trainable_variables, model.non_trainable_variables, model.optimizer.variables, model.metrics_variables)]
    # A function of its own: jax remembers what it made of one that it knows.
    step = jax.jit(lambda *args: model.train_step(*args)).lower(tuple(state), (x[:rows], y[:rows])).compile()
    return step.memory_analysis().temp_size_in_bytes

found = {}
for name, budget in [sys.argv[2:]]:
    rows = {"transformer": 16, "resnet": 16}[name]
    make = lambda: getattr(keras_models, name)(rows=rows)
    plain, (model, x, y) = losses(make(), rows), make()
    planned = losses((model, x, y), rows, [remat.keras.Remat(budget, time_limit_s=1.0)])
    state = remat.keras.state_of(model)
    found[name] = {"plain": plain, "planned": planned, "budget": state.budget_bytes, "peak": state.peak_bytes}
    found[name]["evaluated"] = float(model.evaluate(x, y, batch_size=rows, verbose=0))
    if sys.argv[1] == "jax":
        found[name] |= {"plain_peak": state.plan.plain_peak_bytes, "overhead": state.plan.overhead}
        lean = temporaries(model, x, y, rows)
        state.detach()
        found[name]["share"] = lean / temporaries(model, x, y, rows)
    else:
        found[name] |= {"plain_peak": state.plain_peak_bytes, "overhead": None}
        state.detach()
    assert not vars(model).keys() & {"compute_loss_and_updates", "train_step", "_run_through_graph"}

found["errors"] = []
model = keras.Sequential([keras.layers.Dense(1)])
for call in (
    lambda: remat.keras.optimize(model, "0.6x"),
    lambda: remat.keras.optimize(3, "0.6x"),
    lambda: remat.keras.optimize(model, "some"),
    lambda: remat.keras.state_of(model),
):
    try:
        call()
    except remat.RematError as error:
        found["errors"].append(str(error))
print(json.dumps(found))
"""


def run(backend: str, *rest: str) -> dict[str, Any]:
    env = {**os.environ, "KERAS_BACKEND": backend}
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, backend, *rest], capture_output=True, text=True, env=env, timeout=900
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return dict(json.loads(result.stdout.splitlines()[-1]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "name", "budget"),
    [
        pytest.param("jax", "transformer", "0.6x", marks=pytest.mark.long),
        pytest.param("jax", "resnet", "0.6x", marks=pytest.mark.long),
        ("torch", "transformer", "0.6x"),
        ("torch", "resnet", "0.5x"),
    ],
)
def test_fit_keeps_its_budget_and_its_losses(backend: str, name: str, budget: str) -> None:
    pytest.importorskip(backend)
    found = run(backend, name, budget)
    row = found[name]
    assert row["planned"] == pytest.approx(row["plain"], rel=1e-5)
    assert row["peak"] <= row["budget"] < row["plain_peak"]
    if backend == "jax":
        assert row["overhead"] > 0 and row["share"] < 0.95
    else:
        assert row["peak"] <= float(budget[:-1]) * row["plain_peak"]
    assert [error[:24] for error in found["errors"]] == [
        "The model has no loss ye",
        "remat.keras.optimize tak",
        "Cannot read the budget '",
        "state_of takes a model t",
    ]


LETTING_GO = """
import weakref
import keras, numpy as np, torch
from keras import layers
from remat.keras.letting_go import letting_go

seen, alive = [], []

class Watched(layers.Layer):
    def call(self, x):
        made = x + 1
        alive.append(sum(item() is not None for item in seen))
        seen.append(weakref.ref(made))
        return made

    def compute_mask(self, inputs, mask=None):
        return mask

keras.utils.set_random_seed(0)
inner = keras.Sequential([layers.Dense(4), Watched(), Watched(), layers.Dense(4)])
words = keras.Input((6,), dtype="int32")
x = layers.Embedding(9, 4, mask_zero=True)(words)
first = Watched()(Watched()(x))
y = layers.Add()([first, inner(Watched()(first))])
model = keras.Model(words, [layers.LSTM(4)(y), keras.ops.mean(first, axis=1)])
data = np.arange(24).reshape(4, 6) % 9

def outputs():
    alive.clear(), seen.clear()
    with torch.no_grad():
        return [keras.ops.convert_to_numpy(item) for item in model(data, training=True)]

plain, held = outputs(), list(alive)
with letting_go(model):
    lean, free = outputs(), list(alive)
assert all(np.array_equal(a, b) for a, b in zip(plain, lean)), "masks and order are those of Keras"
assert (held, free) == ([0, 1, 2, 3, 4], [0, 1, 1, 2, 3])
assert outputs()[0].shape == (4, 4) and alive == held, "afterwards as before"
print("fine")
"""


def test_what_layers_made_is_let_go_after_its_last_reader() -> None:
    pytest.importorskip("torch")
    env = {**os.environ, "KERAS_BACKEND": "torch"}
    result = subprocess.run([sys.executable, "-c", LETTING_GO], capture_output=True, text=True, env=env, timeout=300)
    assert result.stdout.strip().endswith("fine"), result.stderr[-3000:]


def test_other_backends_are_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import keras, remat, remat.keras\n"
        "model = keras.Sequential([keras.layers.Dense(1)]); model.compile('sgd', 'mse')\n"
        "keras.backend.backend = lambda: 'openvino'\n"
        "try: remat.keras.optimize(model, '1GiB')\n"
        "except remat.RematError as error: print(error)"
    )
    pytest.importorskip("jax")
    env = {**os.environ, "KERAS_BACKEND": "jax"}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert "Keras runs on openvino here, which Remat does not plan" in result.stdout


def test_missing_extra_is_named_and_nothing_is_imported() -> None:
    code = (
        "import sys, remat; assert 'keras' not in sys.modules and 'jax' not in sys.modules\n"
        "sys.modules['keras'] = None\n"
        "try: remat.keras.optimize\n"
        "except remat.MissingExtra as error: print(error)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "remat.keras.optimize needs Keras 3; install `remat[keras]`."
    assert isinstance(remat.MissingExtra("x"), remat.RematError)
