"""A schedule as two functions: forward, which saves, and backward, which makes the rest again.

In: a `FusedGraph` and a schedule. Out: a `Replay`. Both are cut into segments of a few steps; XLA would otherwise
merge or reorder what the schedule runs twice. How a segment is held in its place is the business of `hold.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from remat.core.schedule import Schedule
from remat.jax import _compat
from remat.jax.graph.contract import FusedGraph
from remat.jax.graph.program import Atom, Constant

Hold = Callable[[Callable[..., list[Any]], list[Any], Any, frozenset[str]], tuple[list[Any], Any]]
"""Runs a function, of the named primitives, on values, after what made the token; returns results and a new token."""


@dataclass(frozen=True, slots=True)
class Segment:
    steps: tuple[int, ...]
    reads: tuple[int, ...]
    """Values of the program from outside."""
    makes: tuple[int, ...]
    """Values that later segments, or the caller, read in the version made here."""


@dataclass(frozen=True, slots=True)
class Replay:
    contracted: FusedGraph
    ahead: tuple[Segment, ...]
    back: tuple[Segment, ...]
    saved: tuple[int, ...]
    """What backward reads and forward made."""
    held_ahead: bool
    """Whether forward runs something twice itself, or is all there is."""

    def forward(self, arguments: Sequence[Any], hold: Hold | None, token: Any) -> tuple[list[Any], list[Any]]:
        """Results, and what backward needs besides the arguments."""
        env = self._start(arguments)
        self._run(self.ahead, env, hold if self.held_ahead else None, token)
        return [_value(env, atom) for atom in self.contracted.program.results], [env[number] for number in self.saved]

    def backward(
        self, arguments: Sequence[Any], saved: Sequence[Any], cotangents: Sequence[Any], hold: Hold | None, token: Any
    ) -> list[Any]:
        """Gradients of the arguments that were asked for; carried arguments are not looked at."""
        env = self._start(arguments)
        for number in self.contracted.carried:
            del env[number]
        env.update(zip(self.saved, saved, strict=True))
        env.update(zip(self.contracted.program.cotangents, cotangents, strict=True))
        self._run(self.back, env, hold, token)
        return [_value(env, atom) for atom in self.contracted.program.gradients]

    def _start(self, arguments: Sequence[Any]) -> dict[int, Any]:
        program = self.contracted.program
        return dict(zip(program.arguments, arguments, strict=True)) | dict(program.constants)

    def _run(self, segments: Sequence[Segment], env: dict[int, Any], hold: Hold | None, token: Any) -> None:
        for segment in segments:
            values = [env[number] for number in segment.reads]

            def run(*given: Any, segment: Segment = segment) -> list[Any]:
                return run_segment(self.contracted, segment, given)

            if hold is None:
                made = run(*values)
            else:
                made, token = hold(run, values, token, self._primitives(segment))
            env.update(zip(segment.makes, made, strict=True))

    def _primitives(self, segment: Segment) -> frozenset[str]:
        return frozenset(self.contracted.graph.ops[step].target for step in segment.steps)


def run_segment(contracted: FusedGraph, segment: Segment, values: Sequence[Any]) -> list[Any]:
    """What a segment makes from what it reads."""
    env: dict[int, Any] = dict(zip(segment.reads, values, strict=True))
    for step in segment.steps:
        run_op(contracted, step, env)
    return [env[number] for number in segment.makes]


def run_op(contracted: FusedGraph, step: int, env: dict[int, Any]) -> None:
    """Run the equations of one op; only its own results are put into `env`."""
    work, equations = contracted.work[step], contracted.program.equations
    local = {number: env[number] for number in work.reads}
    for number in work.equations:
        equation = equations[number]
        values = [_value(local, atom) for atom in equation.inputs]
        made = _compat.bind(equation.primitive, equation.params, equation.context, values)
        local.update(zip(equation.outputs, made, strict=True))
    env.update((number, local[number]) for number in work.makes)


def _value(env: dict[int, Any], atom: Atom) -> Any:
    return atom.value if isinstance(atom, Constant) else env[atom]


def cut_segments(contracted: FusedGraph, schedule: Schedule, numbers: Sequence[int]) -> Replay:
    """`schedule` in segments, whose number is given for each step; the boundary has one of its own."""
    parts = [
        [step for step, _ in group if contracted.work[step].equations or step == contracted.boundary]
        for _, group in groupby(zip(schedule.steps, numbers, strict=True), key=lambda item: item[1])
    ]
    middle = parts.index([contracted.boundary])
    program, work = contracted.program, contracted.work
    back = _segments(contracted, parts[middle + 1 :], _numbers(program.gradients))
    early = [step for part in parts[:middle] for step in part]
    made_early = {number for step in early for number in work[step].makes} | set(contracted.carried)
    wanted = _wanted_from_outside(back) | _numbers(program.gradients) - _made(back)
    saved = tuple(sorted(made_early & wanted))
    ahead = _segments(contracted, parts[:middle], frozenset(saved) | _numbers(program.results))
    return Replay(contracted, ahead, back, saved, held_ahead=len(set(early)) < len(early) or not back)


def _numbers(atoms: Sequence[Atom]) -> frozenset[int]:
    return frozenset(atom for atom in atoms if not isinstance(atom, Constant))


def _wanted_from_outside(segments: Sequence[Segment]) -> set[int]:
    made: set[int] = set()
    wanted: set[int] = set()
    for segment in segments:
        wanted.update(number for number in segment.reads if number not in made)
        made.update(segment.makes)
    return wanted


def _made(segments: Sequence[Segment]) -> frozenset[int]:
    return frozenset(number for segment in segments for number in segment.makes)


def _segments(contracted: FusedGraph, parts: Sequence[Sequence[int]], ends: frozenset[int]) -> tuple[Segment, ...]:
    """From the last to the first, so that each knows what is read after it."""
    wanted, found = set(ends), []
    for part in reversed(parts):
        reads: set[int] = set()
        made: set[int] = set()
        for step in part:
            reads.update(number for number in contracted.work[step].reads if number not in made)
            made.update(contracted.work[step].makes)
        makes = tuple(sorted(made & wanted))
        wanted = (wanted - made) | reads
        found.append(Segment(tuple(part), tuple(sorted(reads)), makes))
    return tuple(reversed(found))
