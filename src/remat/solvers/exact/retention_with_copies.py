"""The constraint program of `cp_sat` where values may spend a while on the host.

To the runs and versions of `retention` come clocks. Between two runs of the plain step there are two *gaps*: gap 2t is
before what runs again in stage t, gap 2t+1 before the first run of op t. At a gap, ops wait for copies out whose values
are dropped there (`issue` is when that is over), copies back begin, and ops wait for those that are read next (`go` is
when that is over). Copies are intervals on one engine for each direction. A value leaves at most once, from its first
version, and comes back as often as an op may run again; what came back is one more version of it. What a reader that
runs again picks has arrived before its whole stage. Counted on the host is all that ever leaves.

In: a problem with copies and a time to beat. Out: the best schedule of this model.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Any

from remat.core.copies import Movable, copies_of, movable_of, without_copies
from remat.core.graph import OpId, ValueId
from remat.core.problem import Problem
from remat.core.schedule import Schedule
from remat.solvers.exact.retention import Reader, Retention
from remat.solvers.schedule.editable import flatten


@dataclass(frozen=True, slots=True)
class Away:
    """A trip out, in the columns of the model: `gone[g]` says that the value is dropped at that gap."""

    there: Any
    begin: Any
    end: Any
    gone: dict[int, Any]


@dataclass(frozen=True, slots=True)
class Return:
    """A copy back: `at[g]` says that it begins at that gap; it is read until the step `last`."""

    there: Any
    begin: Any
    arrival: Any
    at: dict[int, Any]
    key: Any
    last: Any


def places(problem: Problem, computations: int) -> int:
    """How many choices of a stage or a gap this model has."""
    flat = flatten(without_copies(problem))
    moved = sum(2 * (flat.count - flat.producer[item.value]) for item in movable_of(problem))
    return moved * computations + (computations - 1) * flat.count * (flat.count + 1) // 2


class RetentionWithCopies(Retention):
    """See the module's docstring."""

    def __init__(self, problem: Problem, computations: int, passes: int, limit_ns: float | None) -> None:
        self.problem = problem
        self.movable: dict[int, Movable] = {int(item.value): item for item in movable_of(problem)}
        self.returns_per_value = computations - 1
        self.limit_ns = limit_ns
        self.away: dict[int, Away] = {}
        self.returns: dict[int, list[Return]] = {}
        super().__init__(without_copies(problem), computations, passes)

    def add_trips(self) -> None:
        model, gaps = self.model, 2 * self.flat.count + 1
        self.latest = self._latest()
        self.issue = [model.new_int_var(0, self.latest, "") for _ in range(gaps)]
        self.go = [model.new_int_var(0, self.latest, "") for _ in range(gaps)]
        self.in_stage: dict[tuple[int, int], dict[int, Any]] = {}
        for number, runs in enumerate(self.runs):
            for run in range(1, len(runs)):
                self.in_stage[number, run] = self._stages(number, run)
        for value in self.movable:
            if self.size[value]:
                self._add_trip(value)
        self._add_engines()
        self._add_clocks()
        sizes, host = self.problem.costs.size_bytes, self.problem.host_budget_bytes
        if sum(sizes[value] for value in self.away) > host:
            model.add(sum(sizes[value] * trip.there for value, trip in self.away.items()) <= host)

    def extra_time(self) -> Any:
        return self.go[-1] + self._again_in(self.flat.count)

    def picks_of_trips(self, value: int, reader: Reader) -> list[Any]:
        return [self._pick(back, reader) for back in self.returns.get(value, ())]

    def _pick(self, back: Return, reader: Reader) -> Any:
        pick = self.model.new_bool_var("")
        self.model.add_implication(pick, back.there)
        self.model.add(back.key <= reader.when).only_enforce_if(pick)
        self.model.add(back.last >= reader.when).only_enforce_if(pick)
        if reader.number is not None and reader.run == 0:
            self.model.add(back.arrival <= self.go[2 * reader.number + 1]).only_enforce_if(pick)
        elif reader.number is not None:
            for stage, here in self.in_stage[reader.number, reader.run].items():
                self.model.add(back.arrival <= self.go[2 * stage]).only_enforce_if(pick, here)
        return pick

    def _latest(self) -> int:
        if self.limit_ns is not None:
            # Rounding may make every step longer by one.
            return ceil(self.limit_ns * self.scale) + self.horizon
        copies = sum(item.out_ns + item.back_ns * self.returns_per_value for item in self.movable.values())
        most = sum(self.flat.time) * (1 + self.returns_per_value) + copies
        return ceil(most * self.scale) + self.horizon

    def _stages(self, number: int, run: int) -> dict[int, Any]:
        """For each stage in which it may be, whether the run is there."""
        model, moment, passes = self.model, self.moment[number][run], self.passes
        found = {stage: model.new_bool_var("") for stage in range(number + 1, self.flat.count + 1)}
        for stage, here in found.items():
            model.add(moment >= stage * passes).only_enforce_if(here)
            model.add(moment < (stage + 1) * passes).only_enforce_if(here)
        model.add(sum(found.values()) == self.runs[number][run])
        return found

    def _add_trip(self, value: int) -> None:
        model, item, birth = self.model, self.movable[value], self.flat.producer[value]
        there, begin, end = model.new_bool_var(""), self._time(), self._time()
        gone = self._gaps(range(2 * (birth + 1), 2 * self.flat.count + 1), there)
        model.add(end >= begin + self._copy_time(item, item.out_ns))
        for gap, here in gone.items():
            model.add(self.issue[gap] >= end).only_enforce_if(here)
            model.add(self.last[value, 0] >= self._gap_key(gap) - 1).only_enforce_if(here)
        self.away[value] = Away(there, begin, end, gone)
        self.returns[value] = [self._return(value) for _ in range(self.returns_per_value)]

    def _return(self, value: int) -> Return:
        model, item, trip = self.model, self.movable[value], self.away[value]
        there, begin, arrival = model.new_bool_var(""), self._time(), self._time()
        model.add_implication(there, trip.there)
        model.add(arrival >= begin + self._copy_time(item, item.back_ns))
        at = self._gaps(trip.gone, there)
        dropped = sum(gap * here for gap, here in trip.gone.items())
        model.add(sum(gap * here for gap, here in at.items()) >= dropped).only_enforce_if(there)
        for gap, here in at.items():
            model.add(begin >= self.issue[gap]).only_enforce_if(here)
        end = self.horizon * self.flat.count
        key, last, length = (model.new_int_var(0, end + 1, "") for _ in range(3))
        model.add(key == sum(self._gap_key(gap) * here for gap, here in at.items()))
        model.add(last >= key)
        self.intervals.append(model.new_optional_interval_var(key, length, last + 1, there, ""))
        self.demands.append(self.size[value])
        return Return(there, begin, arrival, at, key, last)

    def _time(self) -> Any:
        return self.model.new_int_var(0, self.latest, "")

    def _copy_time(self, item: Movable, time_ns: float) -> int:
        return max(1, ceil(time_ns * self.scale)) if item.is_beside else 0

    def _gaps(self, gaps: Any, there: Any) -> dict[int, Any]:
        found = {gap: self.model.new_bool_var("") for gap in gaps}
        self.model.add(sum(found.values()) == there)
        return found

    def _gap_key(self, gap: int) -> int:
        """The first step after the gap."""
        stage, is_late = divmod(gap, 2)
        return (stage * self.passes + (self.passes - 1) * is_late) * self.flat.count + stage * is_late

    def _add_engines(self) -> None:
        model, outs, backs = self.model, [], []
        for value, trip in self.away.items():
            item = self.movable[value]
            if not item.is_beside:
                continue
            outs.append(self._interval(trip.begin, self._copy_time(item, item.out_ns), trip.there))
            time = self._copy_time(item, item.back_ns)
            backs += [self._interval(back.begin, time, back.there) for back in self.returns[value]]
        model.add_no_overlap(outs)
        model.add_no_overlap(backs)

    def _interval(self, begin: Any, size: int, there: Any) -> Any:
        return self.model.new_optional_fixed_size_interval_var(begin, size, there, "")

    def _add_clocks(self) -> None:
        model, count = self.model, self.flat.count
        for gap, (issue, go) in enumerate(zip(self.issue, self.go, strict=True)):
            model.add(go >= issue + self._waited_back(gap))
        for stage in range(count):
            model.add(self.issue[2 * stage + 1] >= self.go[2 * stage] + self._again_in(stage))
            run = self.go[2 * stage + 1] + self.whole(self.flat.time[stage])
            for value in self.flat.outputs[stage]:
                if value in self.away and self.movable[value].is_beside:
                    model.add(self.away[value].begin >= run).only_enforce_if(self.away[value].there)
            model.add(self.issue[2 * stage + 2] >= run + self._waited_out(stage))

    def _again_in(self, stage: int) -> Any:
        """How long ops run again in a stage."""
        found = ((number, stages.get(stage)) for (number, _), stages in self.in_stage.items())
        return sum(self.whole(self.flat.time[number]) * here for number, here in found if here is not None)

    def _waited_back(self, gap: int) -> Any:
        return sum(
            self.whole(self.movable[value].back_ns) * back.at[gap]
            for value, backs in self.returns.items()
            for back in backs
            if gap in back.at and not self.movable[value].is_beside
        )

    def _waited_out(self, stage: int) -> Any:
        waited = [v for v in self.flat.outputs[stage] if v in self.away and not self.movable[v].is_beside]
        return sum(self.whole(self.movable[value].out_ns) * self.away[value].there for value in waited)

    def read_schedule(self, solver: Any) -> Schedule:
        runs: list[list[OpId]] = [[] for _ in range(self.flat.count + 1)]
        for moment, number in self.read_runs(solver):
            runs[moment // self.passes].append(OpId(number))
        at_gap = self._copies_at_gaps(solver)
        outs = self._outs_after(solver)
        steps: list[OpId] = []
        for stage, numbers in enumerate(runs):
            is_last = stage == self.flat.count
            again, first = (numbers, []) if is_last else (numbers[:-1], numbers[-1:])
            steps += [*at_gap[2 * stage], *again]
            steps += [] if is_last else [*at_gap[2 * stage + 1], *first, *outs[stage]]
        return Schedule(tuple(steps))

    def _copies_at_gaps(self, solver: Any) -> list[list[OpId]]:
        """What is dropped at each gap, then what begins to come back, in the order of the engine."""
        ops = copies_of(self.problem.graph)
        found: list[list[OpId]] = [[] for _ in self.go]
        for value, trip in self.away.items():
            if self._is_used(solver, value):
                found[_chosen(solver, trip.gone)].append(ops[ValueId(value)].gone)
        backs = sorted(
            (solver.value(back.begin), _chosen(solver, back.at), value)
            for value, returns in self.returns.items()
            for back in returns
            if solver.value(back.there)
        )
        newest = 0
        for _, gap, value in backs:
            # One that waits for the engine may as well begin with those before it, and takes memory for less long.
            is_beside = self.movable[value].is_beside
            newest = max(newest, gap) if is_beside else newest
            found[newest if is_beside else gap].append(ops[ValueId(value)].back)
        return found

    def _outs_after(self, solver: Any) -> list[list[OpId]]:
        """After which first runs copies out begin: as soon as they can, in the order of the engine."""
        ops = copies_of(self.problem.graph)
        found: list[list[OpId]] = [[] for _ in range(self.flat.count)]
        used = [value for value in self.away if self._is_used(solver, value)]
        newest = 0
        for value in sorted(used, key=lambda value: (solver.value(self.away[value].begin), value)):
            birth, is_beside = self.flat.producer[value], self.movable[value].is_beside
            newest = max(newest, birth) if is_beside else newest
            found[newest if is_beside else birth].append(ops[ValueId(value)].out)
        return found

    def _is_used(self, solver: Any, value: int) -> bool:
        """Does it come back? One that does not is as well dropped."""
        return any(solver.value(back.there) for back in self.returns[value])


def _chosen(solver: Any, gaps: dict[int, Any]) -> int:
    return next(gap for gap, here in gaps.items() if solver.value(here))
