"""The equations of one step, forward and backward, as one list.

In: jaxprs, added one after another. Out: a `StepProgram`: equations over numbered values in the order in which they are
first computed. Calls are inlined; equations that compute the same from the same stand there once, so that what a user
had checkpointed is as free as the rest; what nobody reads is left out.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NewType

import jax
import numpy as np

from remat.jax import _compat

Number = NewType("Number", int)
"""A value of a program: an argument of the step, a constant, or the result of an equation."""


@dataclass(frozen=True, slots=True)
class Constant:
    """A literal in the place of a value."""

    value: Any

    @property
    def key(self) -> tuple[Any, ...]:
        array = np.asarray(self.value)
        return ("literal", str(getattr(self.value, "dtype", type(self.value))), array.shape, array.tobytes())


Atom = Number | Constant


@dataclass(frozen=True, slots=True)
class Equation:
    """One primitive applied to values."""

    primitive: Any
    params: dict[str, Any]
    inputs: tuple[Atom, ...]
    outputs: tuple[Number, ...]
    module: str
    backward: bool
    context: Any
    """jax's settings where it was traced."""
    runs_once: bool
    """Whether a second run would have a second effect: callbacks, collectives and whatever has effects."""

    @property
    def reads(self) -> tuple[Number, ...]:
        return tuple(dict.fromkeys(atom for atom in self.inputs if not isinstance(atom, Constant)))


@dataclass(frozen=True, slots=True)
class StepProgram:
    """`arguments` and `constants` are there from the start; equations compute the rest."""

    equations: tuple[Equation, ...]
    avals: tuple[Any, ...]
    """The shape and type of every value."""
    arguments: tuple[Number, ...]
    constants: tuple[tuple[Number, Any], ...]
    cotangents: tuple[Number, ...]
    """What backward gets for the results of forward: there from the first equation of backward on."""
    results: tuple[Atom, ...]
    gradients: tuple[Atom, ...]

    def aval_of(self, atom: Atom) -> Any:
        return jax.typeof(atom.value) if isinstance(atom, Constant) else self.avals[atom]

    def bytes_of(self, number: int) -> int:
        return _compat.bytes_of(self.avals[number])


@dataclass(slots=True)
class ProgramBuilder:
    """Adds jaxprs to a program that is not finished."""

    avals: list[Any] = field(default_factory=list)
    equations: list[Equation] = field(default_factory=list)
    constants: list[tuple[Number, Any]] = field(default_factory=list)
    _known: dict[Any, tuple[Number, ...]] = field(default_factory=dict)
    _constant_numbers: dict[int, Number] = field(default_factory=dict)

    def new(self, aval: Any) -> Number:
        self.avals.append(aval)
        return Number(len(self.avals) - 1)

    def constant(self, value: Any, aval: Any) -> Number:
        """The number of a constant; the same array has one number."""
        if id(value) not in self._constant_numbers:
            number = self.new(aval)
            self._constant_numbers[id(value)] = number
            self.constants.append((number, value))
        return self._constant_numbers[id(value)]

    def add(self, jaxpr: Any, constants: Sequence[Any], inputs: Sequence[Atom], *, backward: bool) -> list[Atom]:
        """Append what `jaxpr` computes from `inputs`; returns what stands for its results."""
        return self._add(jaxpr, constants, inputs, backward, "")

    def _add(
        self, jaxpr: Any, constants: Sequence[Any], inputs: Sequence[Atom], backward: bool, scope: str
    ) -> list[Atom]:
        env: dict[Any, Atom] = dict(zip(jaxpr.invars, inputs, strict=True))
        for variable, value in zip(jaxpr.constvars, constants, strict=True):
            env[variable] = value if isinstance(value, Constant) else self.constant(value, variable.aval)

        def read(atom: Any) -> Atom:
            return Constant(atom.val) if _compat.is_literal(atom) else env[atom]

        for equation in jaxpr.eqns:
            found = [read(atom) for atom in equation.invars]
            here = f"{scope}/{_compat.scope_of(equation)}"
            inner = _compat.inner_function(equation.primitive.name, equation.params)
            if inner is not None:
                outputs = self._add(*inner, found, backward, here)
            else:
                outputs = list(self._append(equation, found, backward, here))
            env.update(zip(equation.outvars, outputs, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _append(self, equation: Any, inputs: list[Atom], backward: bool, scope: str) -> tuple[Number, ...]:
        once = runs_once(equation)
        key = None if once else _key(equation, inputs)
        if key is not None and key in self._known:
            return self._known[key]
        outputs = tuple(self.new(variable.aval) for variable in equation.outvars)
        module = module_of(scope)
        self.equations.append(
            Equation(equation.primitive, equation.params, tuple(inputs), outputs, module, backward, equation.ctx, once)
        )
        if key is not None:
            self._known[key] = outputs
        return outputs


def runs_once(equation: Any) -> bool:
    """Callbacks, collectives, effects, and randomness without a key; also within loops and branches."""
    name = equation.primitive.name
    if _compat.has_effects(equation.effects) or name in _compat.COLLECTIVES or name in _compat.CALLBACKS:
        return True
    if name == "rng_uniform":
        return True
    return any(runs_once(inner) for jaxpr in _inner_jaxprs(equation.params.values()) for inner in jaxpr.eqns)


def _inner_jaxprs(values: Any) -> list[Any]:
    found: list[Any] = []
    for value in values:
        if isinstance(value, (tuple, list)):
            found += _inner_jaxprs(value)
        elif hasattr(value, "eqns"):
            found.append(value if hasattr(value, "invars") else value.jaxpr)
    return found


def _key(equation: Any, inputs: Sequence[Atom]) -> Any:
    """Equal for equations that compute the same; None where a parameter cannot be compared."""
    read = tuple(atom.key if isinstance(atom, Constant) else atom for atom in inputs)
    key = (equation.primitive, tuple(sorted(equation.params.items(), key=lambda item: item[0])), read)
    try:
        hash(key)
    except TypeError:
        return None
    return key


_WRAPPER = re.compile(r"\b(?:jvp|transpose|vmap|jit|pjit|checkpoint|rematted_computation|remat|custom_vjp)\(")


def module_of(scope: str) -> str:
    """`transpose(jvp(layers.3))/mlp` as `layers.3.mlp`: the user's own names, each once."""
    plain = _WRAPPER.sub("", scope).replace(")", "")
    names: list[str] = []
    for name in plain.split("/"):
        if name and name not in ("checkpoint", "rematted_computation") and (not names or names[-1] != name):
            names.append(name)
    return ".".join(names)


def pruned(program: StepProgram) -> StepProgram:
    """Without equations whose results nobody reads, unless they have effects."""
    wanted: set[int] = {atom for atom in (*program.results, *program.gradients) if not isinstance(atom, Constant)}
    kept: list[Equation] = []
    for equation in reversed(program.equations):
        if equation.runs_once or not wanted.isdisjoint(equation.outputs):
            wanted.update(equation.reads)
            kept.append(equation)
    return StepProgram(
        tuple(reversed(kept)),
        program.avals,
        program.arguments,
        program.constants,
        program.cotangents,
        program.results,
        program.gradients,
    )


def program_of(closed: Any) -> StepProgram:
    """A jaxpr as it is, without a backward of its own."""
    builder = ProgramBuilder()
    arguments = [builder.new(variable.aval) for variable in closed.jaxpr.invars]
    results = builder.add(closed.jaxpr, closed.consts, arguments, backward=False)
    parts = (tuple(builder.equations), tuple(builder.avals), tuple(arguments), tuple(builder.constants))
    return pruned(StepProgram(*parts, cotangents=(), results=tuple(results), gradients=()))
