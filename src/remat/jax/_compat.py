"""What is asked of jax beyond its documented functions, in one place; tried on jax 0.10 and 0.11.

In: values, equations and arrays of jax. Out: what they are. `jax.extend.core` is public; the shape of an equation's
parameters is not promised, so whoever reads one goes through here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.extend import core as extended

INNER = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "checkpoint": "jaxpr",
    "remat2": "jaxpr",
}
"""Primitives that only call another function, and the parameter in which that is."""
BODIES = {"scan": ("jaxpr",), "while": ("cond_jaxpr", "body_jaxpr"), "cond": ("branches",)}
"""Primitives that run other functions, once or often, and the parameters in which those are."""
COLLECTIVES = (
    *("psum", "pmax", "pmin", "ppermute", "pbroadcast", "all_gather", "all_to_all", "reduce_scatter", "psum2"),
    *("psum_invariant", "all_gather_invariant", "ragged_all_to_all", "pgather", "axis_index"),
)
CALLBACKS = ("pure_callback", "io_callback", "debug_callback", "debug_print", "outside_call")


def is_literal(atom: Any) -> bool:
    return isinstance(atom, extended.Literal)


def inner_function(primitive: str, params: Mapping[str, Any]) -> tuple[Any, Sequence[Any]] | None:
    """The jaxpr that an equation only calls and its constants; None where the equation computes something itself."""
    found = params.get(INNER.get(primitive, ""))
    if found is None or not _is_plain_call(params):
        return None
    return (found.jaxpr, found.consts) if isinstance(found, extended.ClosedJaxpr) else (found, ())


def _is_plain_call(params: Mapping[str, Any]) -> bool:
    """Whether nothing is lost where the call is replaced by what it calls: shardings and layouts would be."""
    wishes = [*params.get("in_shardings", ()), *params.get("out_shardings", ())]
    layouts = [*params.get("in_layouts", ()), *params.get("out_layouts", ())]
    return all(type(wish).__name__ == "UnspecifiedValue" for wish in wishes) and not any(
        layout is not None for layout in layouts
    )


def inner_jaxpr(params: Mapping[str, Any]) -> Any:
    """The jaxpr of a call, without its constants."""
    found = params.get("jaxpr", params.get("call_jaxpr"))
    return found.jaxpr if isinstance(found, extended.ClosedJaxpr) else found


def inner_parts(primitive: str, params: Mapping[str, Any]) -> list[Any]:
    """The closed jaxprs that a loop or a branch runs."""
    found = (params[name] for name in BODIES[primitive])
    return [jaxpr for item in found for jaxpr in (item if isinstance(item, tuple) else (item,))]


def scan_parts(params: Mapping[str, Any]) -> tuple[int, int]:
    """How many of a scan's inputs are the same in every iteration, and how many are carried from one to the next."""
    if "ft_in" in params:
        # From jax 0.11 on.
        constants, carried, _ = map(len, params["ft_in"].unpack())
        return constants, carried
    return params["num_consts"], params["num_carry"]


def scope_of(equation: Any) -> str:
    """The names of `jax.named_scope` around an equation, with what transformations wrote around them."""
    return str(equation.source_info.name_stack)


def has_effects(effects: Any) -> bool:
    return bool(effects)


def forbidden_effects(jaxpr: Any) -> list[str]:
    """Effects that cannot stand in a function with a derivative of its own; collectives can, and run once."""
    allowed = ("debug", "namedaxis")
    return sorted(
        str(effect) for effect in jaxpr.effects if not any(word in type(effect).__name__.lower() for word in allowed)
    )


def manual_mesh() -> Any:
    """The mesh of the `shard_map` around what is traced now; None outside of one."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh if not mesh.empty and mesh.manual_axes else None


def concrete_mesh(mesh: Any) -> Any:
    """As many devices in the same arrangement, to compile for."""
    kinds = (jax.sharding.AxisType.Auto,) * len(mesh.axis_names)
    return jax.make_mesh(mesh.axis_sizes, mesh.axis_names, axis_types=kinds)


def varies(leaf: Any) -> bool:
    """Whether `shard_map` follows over which axes of its mesh a value varies."""
    aval = jax.typeof(leaf)
    # The attribute has moved between versions.
    return bool(getattr(aval, "vma", None) or getattr(getattr(aval, "manual_axis_type", None), "varying", None))


def placed_aval(leaf: Any) -> Any:
    """With its sharding, where it lies on several devices."""
    aval, sharding = shape_of(leaf), sharding_of(leaf)
    if sharding is None:
        return aval
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=bool(aval.weak_type), sharding=sharding)


def sharding_of(leaf: Any) -> Any:
    """Of an array or a shape that lies on several devices; None for any other, and for what is being traced."""
    found = None if isinstance(leaf, jax.core.Tracer) else getattr(leaf, "sharding", None)
    return found if found is not None and len(found.device_set) > 1 else None


def split_by_compiler(leaf: Any) -> bool:
    """Whether an array lies on several devices, and no type tells what each holds of what is computed from it."""
    return sharding_of(leaf) is not None and explicit_sharding(jax.typeof(leaf)) is None


def local_bytes(leaf: Any) -> int:
    """What one device holds of an array."""
    aval, sharding = shape_of(leaf), sharding_of(leaf)
    if sharding is None:
        return bytes_of(aval)
    return bytes_of(jax.ShapeDtypeStruct(sharding.shard_shape(aval.shape), aval.dtype))


def bind(primitive: Any, params: Mapping[str, Any], context: Any, values: Sequence[Any]) -> list[Any]:
    """Run one equation on `values`, under the settings under which it was traced."""
    found = primitive.get_bind_params(dict(params))
    # Until jax 0.9, functions to call stood beside the parameters.
    functions, rest = found if isinstance(found, tuple) else ((), found)
    with context.manager:
        made = primitive.bind(*functions, *values, **rest)
    return list(made) if primitive.multiple_results else [made]


def closed(jaxpr: Any) -> Any:
    """A jaxpr without constants as one that can be run."""
    return jaxpr if isinstance(jaxpr, extended.ClosedJaxpr) else extended.ClosedJaxpr(jaxpr, ())


def is_wrapped(jaxpr: Any) -> bool:
    """Whether a jaxpr is another one with constants; from jax 0.11 on each has its own."""
    return isinstance(jaxpr, extended.ClosedJaxpr) and jaxpr.jaxpr is not jaxpr


def as_function(closed: Any) -> Any:
    """A closed jaxpr as a function of flat values with a list of results."""
    return extended.jaxpr_as_fun(closed)


def bytes_of(aval: Any) -> int:
    """What one device holds of an array of this type; a random key is as large as its data."""
    if aval.dtype == jax.dtypes.float0:
        return 0
    found = explicit_sharding(aval)
    size = aval.size if found is None else math.prod(found.shard_shape(aval.shape))
    return int(size) * int(aval.dtype.itemsize)


def shape_of(leaf: Any) -> Any:
    """Without shardings, but for those of an explicit mesh, which are part of the type."""
    aval = jax.typeof(leaf)
    weak = bool(getattr(aval, "weak_type", False))
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=weak, sharding=explicit_sharding(aval))


def explicit_sharding(aval: Any) -> Any:
    """The sharding that belongs to a type; None where the mesh around it leaves shardings to XLA, or there is none."""
    found = getattr(aval, "sharding", None)
    mesh: Any = getattr(found, "mesh", None)
    return found if mesh is not None and mesh.explicit_axes else None


def is_split(aval: Any) -> bool:
    """Whether no device of an explicit mesh has all of it."""
    found = explicit_sharding(aval)
    return found is not None and any(axis is not None for axis in found.spec)


def concretely_placed(aval: Any) -> Any:
    """A type with its explicit sharding over devices that exist, to compile for."""
    found = explicit_sharding(aval)
    if found is None or not isinstance(found.mesh, jax.sharding.AbstractMesh):
        return aval
    kinds = found.mesh.axis_types
    mesh = jax.make_mesh(found.mesh.axis_sizes, found.mesh.axis_names, axis_types=kinds)
    sharding = jax.sharding.NamedSharding(mesh, found.spec)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=bool(aval.weak_type), sharding=sharding)


def stacked(aval: Any, length: int) -> Any:
    """The type of so many rows."""
    found = explicit_sharding(aval)
    if found is not None:
        found = jax.sharding.NamedSharding(found.mesh, jax.sharding.PartitionSpec(None, *found.spec))
    return jax.ShapeDtypeStruct((length, *aval.shape), aval.dtype, sharding=found)


def is_differentiable(aval: Any) -> bool:
    return bool(jax.dtypes.issubdtype(aval.dtype, jax.numpy.inexact))


def described(aval: Any) -> str:
    """As `float32[16, 1024]`, with an explicit sharding after it."""
    found = explicit_sharding(aval)
    return f"{aval.dtype.name}{list(aval.shape)}{'' if found is None else f' over {tuple(found.spec)}'}"


def zeros(aval: Any) -> Any:
    """An array of zeros; of keys, one whose data are zeros."""
    if jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key):
        data = jax.eval_shape(jax.random.key_data, aval)
        return jax.random.wrap_key_data(jax.numpy.zeros(data.shape, data.dtype), impl=jax.random.key_impl(aval))
    found = explicit_sharding(aval)
    if found is not None:
        return jax.lax.full(aval.shape, 0, aval.dtype, sharding=found)
    return jax.numpy.zeros(aval.shape, aval.dtype)


def instantiated(cotangent: Any) -> Any:
    """A cotangent as an array, also where jax knows it to be zero."""
    known = zero_aval(cotangent)
    return cotangent if known is None else zeros(known)


def zero_aval(cotangent: Any) -> Any:
    """The shape of a cotangent that jax knows to be zero; None for any other."""
    return cotangent.aval if type(cotangent).__name__ == "SymbolicZero" else None
