"""Losses of jax on two devices: under `shard_map` with collectives, and with a batch that is sharded.

One process of its own with two made-up devices runs everything; tests look at what it found.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("jax")

SCRIPT = """
import json
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
from tests.support.jax_models import mlp
import remat, remat.jax

mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
single, weights, (x,) = mlp(layers=5, width=64, rows=512)
options = remat.jax.compiler_options()

def compiled(function, *args):
    return jax.jit(function, compiler_options=options).lower(*args).compile()

def temporaries(step):
    return step.memory_analysis().temp_size_in_bytes

def distance(left, right):
    pairs = zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
    return max(float(abs(a - b).max() / abs(b).max()) for a, b in pairs)

def mean(weights, x):
    return jax.lax.pmean(single(weights, x), "data")

def mapped(function, check):
    parts = dict(mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=check)
    return jax.shard_map(jax.grad(function), **parts)

ours = remat.jax.optimize(mean, "0.7x", time_limit_s=1.0)
plain, planned = (compiled(mapped(function, False), weights, x) for function in (mean, ours))
found = {
    "mapped": temporaries(planned) / temporaries(plain),
    "collectives": [step.as_text().count(" all-reduce(") for step in (plain, planned)],
    "mapped_distance": distance(planned(weights, x), plain(weights, x)),
    "mapped_overhead": remat.jax.plan_of(ours).overhead,
    "mapped_shape": remat.jax.plan_of(ours).fingerprint.shapes[-1],
}
try:
    jax.jit(mapped(ours, True))(weights, x)
except remat.CaptureError as error:
    found["refused"] = str(error)

weights = [jax.device_put(weight, NamedSharding(mesh, P())) for weight in weights]
x = jax.device_put(x, NamedSharding(mesh, P("data")))
plain = compiled(jax.value_and_grad(single), weights, x)
ours = remat.jax.optimize(single, "0.7x", time_limit_s=1.0)
plan = ours.plan_for(weights, x).plan
planned = compiled(jax.value_and_grad(ours), weights, x)
found |= {
    "sharded": temporaries(planned) / temporaries(plain),
    "sharded_distance": distance(planned(weights, x), plain(weights, x)),
    "sharded_plain": plan.plain_peak_bytes,
    "measured_plain": remat.jax.costs.compiled.memory_of(plain).peak_bytes,
    "plans": len(ours.prepared),
    "overhead": plan.overhead,
}

mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))

def place(array, *axes):
    return jax.device_put(array, NamedSharding(mesh, P(*axes)))

def gathered(weights, x):
    return single([jax.sharding.reshard(weight, P()) for weight in weights], x)

def scanned(weights, x):
    x, means = jax.lax.scan(lambda x, weight: (jnp.tanh(x @ weight), x.mean(1)), x, jnp.stack(weights))
    return (x**2).mean() + means.sum()

whole, split = ([place(weight, *axes) for weight in weights] for axes in ((), ("data",)))
rows = place(x, "data")
for name, function, given in (("whole", single, whole), ("split", gathered, split), ("scan", scanned, whole)):
    with jax.set_mesh(mesh):
        ours = remat.jax.optimize(function, "0.7x", time_limit_s=1.0)
        plain = compiled(jax.value_and_grad(function), given, rows)
        planned = compiled(jax.value_and_grad(ours), given, rows)
        left, right = planned(given, rows), plain(given, rows)
        found[f"explicit_{name}"] = {
            "share": temporaries(planned) / temporaries(plain),
            "distance": distance(left, right),
            "overhead": remat.jax.plan_of(ours).overhead,
            "placed_alike": jax.tree.map(jax.typeof, left) == jax.tree.map(jax.typeof, right),
            "shape": remat.jax.plan_of(ours).fingerprint.shapes[-1],
        }
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    result = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, env={**os.environ, **flags})
    assert result.returncode == 0, result.stderr
    return dict(json.loads(result.stdout.splitlines()[-1]))


def test_shard_map_is_planned_for_what_one_device_has(found: dict[str, Any]) -> None:
    assert found["mapped"] <= 0.7 and found["mapped_overhead"] > 0
    assert found["mapped_shape"] == "float32[256, 64]" and found["mapped_distance"] < 1e-5


def test_collectives_run_as_often_as_without_a_plan(found: dict[str, Any]) -> None:
    before, after = found["collectives"]
    assert before == after > 0


def test_shard_map_that_follows_axes_is_refused_in_one_sentence(found: dict[str, Any]) -> None:
    assert "needs check_vma=False" in found["refused"]


def test_sharded_batch_is_planned_for_each_device(found: dict[str, Any]) -> None:
    assert found["sharded"] <= 0.7 and found["overhead"] > 0 and found["plans"] == 1
    assert found["sharded_plain"] == found["measured_plain"] and found["sharded_distance"] < 1e-5


@pytest.mark.parametrize("name", ["whole", "split", "scan"])
def test_meshes_whose_shardings_are_types_are_planned_for_each_device(found: dict[str, Any], name: str) -> None:
    seen = found[f"explicit_{name}"]
    assert seen["share"] <= 0.7 and seen["overhead"] > 0 and seen["distance"] < 1e-5
    assert seen["placed_alike"] and seen["shape"] == "float32[512, 64] over ('data', None)"
