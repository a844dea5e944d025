"""Schedules with copies from the program of a single cut, with room set aside at other moments.

In: a problem with copies and its best cut. Out, round by round: a schedule without copies and the trips to take in it,
which may still be over the budget. The program of `copy_cuts` knows memory at its cut alone, so the schedule that is
built from its answer overflows elsewhere. Wherever it does, the next program has a row for that stage t:

    Σ bytes_v · S[v] + Σ bytes_v · A[v] + Σ bytes_i · R[i] ≤ room(t) + over(t)

over what is kept and read at t or later, away and on its way, and computed again by then for a read at t or later; a
byte in `over` has a high price. The room is narrowed where the schedule is still over the budget and widened where it
is under it. When a value that is not there is read first is guessed, so these rows prove nothing: they only choose.
From some round on, chance changes the times and the rooms a little, so that no two programs are the same.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from remat.core.copies import without_copies
from remat.core.problem import Problem
from remat.core.schedule import Schedule
from remat.core.search.limits import Limits
from remat.solvers.backends.linear_highs import minimise
from remat.solvers.exact.copy_cuts import AwayProgram, away_program
from remat.solvers.schedule.editable import EditableSchedule, FlatProblem
from remat.solvers.schedule.keep import drop_all_but
from remat.solvers.schedule.to_host import Trip, trips_without_waiting
from remat.solvers.search.around_trips import step_keys

NARROWED, WIDENED = 0.6, 0.3
"""By how much of what a stage is over or under the budget its room changes."""
STEADY_ROUNDS = 10
"""After which chance changes the times, and rooms begin to return to the best ones."""
NOISE, ROOM_NOISE, BACK_SHARE = (0.0, 0.01, 0.03, 0.1), (0.0, 0.01, 0.03), 0.5
"""By how much chance changes times and rooms, and how often it begins with the rooms of the best schedule."""
OVER_PRICE = 2.0
"""Of the plain step's time, for as many bytes over the room of a stage as the budget has."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """What to compute when, without copies, and what to have away when."""

    computing: Schedule
    trips: list[Trip]


class Reserves:
    """The rooms of the stages, round by round."""

    def __init__(self, problem: Problem, cut: int, seed: int = 0) -> None:
        self.problem, self.cut, self.plain = problem, cut, without_copies(problem)
        self.flat = away_program(problem, (cut,)).flat
        self.first, self.last = _needs(self.flat, cut)
        self.fixed = _fixed_bytes(self.flat, cut)
        self.rooms: dict[int, float] = {}
        self._used, self._best, self._best_ns = dict[int, float](), dict[int, float](), float("inf")
        self._terms: dict[int, dict[int, int]] = {}
        self._rng, self._rounds = random.Random(seed), 0
        self.idle = 0
        """Rounds since the best one."""

    def propose(self, limits: Limits, stop: Callable[[], bool]) -> Proposal | None:
        """The next schedule; None where the program has no answer."""
        rng, noise = self._rng, 0.0
        if self._rounds >= STEADY_ROUNDS:
            noise = rng.choice(NOISE)
            if rng.random() < BACK_SHARE:
                spread = rng.choice(ROOM_NOISE)
                self.rooms = {stage: room * rng.gauss(1.0, spread) for stage, room in self._best.items()}
        self._rounds += 1
        self.idle += 1
        self._used = dict(self.rooms)
        return self._solve(limits, noise, stop)

    def learn(self, time_ns: float) -> bool:
        """What came of the last schedule; says whether it is the best so far: rounds return to its rooms."""
        is_best = time_ns < self._best_ns
        if is_best:
            self._best, self._best_ns, self.idle = self._used, time_ns, 0
        return is_best

    def _solve(self, limits: Limits, noise: float, stop: Callable[[], bool]) -> Proposal | None:
        model = away_program(self.problem, (self.cut,))
        if not model.build():
            return None
        if noise:
            model.program.cost = [cost * self._rng.lognormvariate(0.0, noise) for cost in model.program.cost]
        for stage, room in self.rooms.items():
            self._add_row(model, stage, room)
        point = minimise(model.program, limits, relaxed=True, stop=stop).point
        if point is None:
            return None
        away = frozenset(value for value, column in model.away[0].items() if point[column] > 0.5)
        editable = EditableSchedule(self.plain)
        drop_all_but(editable, (model.kept(0, point) | away,), (self.cut,))
        computing = editable.schedule()
        trips = self._send_away(editable, computing, away)
        self._adapt(model, point, editable)
        return Proposal(computing, trips)

    def _send_away(self, editable: EditableSchedule, computing: Schedule, away: frozenset[int]) -> list[Trip]:
        keys = step_keys(computing, self.flat.count)
        trips = trips_without_waiting(self.problem, computing, away) if keys is not None else []
        for trip in trips:
            assert keys is not None
            editable.send_away(trip.stay.value, keys[trip.gone], keys[trip.back])
        return trips

    def _add_row(self, model: AwayProgram, stage: int, room: float) -> None:
        unit, most = max(self.problem.budget_bytes, 1), sum(self.flat.size)
        over = model.program.add_column(OVER_PRICE * model.scale * model.base, 0.0, most / unit, integer=False)
        terms = [(column, bytes_ / unit) for column, bytes_ in self._row(model, stage).items()]
        model.program.add_row([*terms, (over, -1.0)], upper=max(room, 0.0) / unit)

    def _row(self, model: AwayProgram, stage: int) -> dict[int, int]:
        """The columns whose values are in memory at a stage, and how many bytes those are."""
        if stage not in self._terms:
            is_late = stage >= self.cut
            pairs = [*self._held(model, stage), *self._on_the_way(model, stage)]
            self._terms[stage] = _summed(pairs + (self._again(model, stage) if is_late else []))
        return self._terms[stage]

    def _held(self, model: AwayProgram, stage: int) -> list[tuple[int, int]]:
        flat, last = self.flat, self.last
        held = model.held[0].items()
        if stage >= self.cut:
            return [(column, flat.size[value]) for value, column in held if last[value] >= stage]
        return [(column, flat.size[value]) for value, column in held if flat.producer[value] < stage]

    def _on_the_way(self, model: AwayProgram, stage: int) -> list[tuple[int, int]]:
        found, now = [], model.starts[stage]
        for value, column in model.away[0].items():
            times, birth = model.movable[value], self.flat.producer[value]
            if stage < self.cut:
                is_there = birth < stage and model.starts[birth + 1] + times.out_ns > now
            else:
                is_due = model.starts[min(self.first[value], self.flat.count)] - times.back_ns <= now
                is_there = is_due and self.last[value] >= stage
            if is_there:
                found.append((column, self.flat.size[value]))
        return found

    def _again(self, model: AwayProgram, stage: int) -> list[tuple[int, int]]:
        return [
            (column, self.flat.size[value])
            for number, column in model.again[0].items()
            for value in self.flat.outputs[number]
            if self.first[value] <= stage <= self.last[value]
        ]

    def _adapt(self, model: AwayProgram, point: tuple[float, ...], editable: EditableSchedule) -> None:
        """Give stages that are over the budget less room from now on, and the others more."""
        count, budget = self.flat.count, self.problem.budget_bytes
        load = np.full(count, -1, dtype=np.int64)
        np.maximum.at(load, np.minimum(editable.keys // count, count - 1), editable.load)
        for stage in {*self.rooms, *_worst(load > budget, load)}:
            over, room = int(load[stage]) - budget, self.rooms.get(stage)
            if room is not None and over <= 0:
                self.rooms[stage] = room - WIDENED * over
                continue
            taken = sum(bytes_ for column, bytes_ in self._row(model, stage).items() if point[column] > 0.5)
            if room is not None:
                self.rooms[stage] = min(room, taken) - NARROWED * over
            else:
                self.rooms[stage] = min(taken, budget - self.fixed[stage]) if stage >= self.cut else taken


def _worst(over: NDArray[np.bool_], load: NDArray[np.int64]) -> list[int]:
    """The worst stage of each stretch that is over the budget."""
    found: list[int] = []
    for stage in np.flatnonzero(over).tolist():
        if not found or not over[found[-1] : stage].all():
            found.append(stage)
        elif load[stage] > load[found[-1]]:
            found[-1] = stage
    return found


def _summed(pairs: list[tuple[int, int]]) -> dict[int, int]:
    found: dict[int, int] = {}
    for column, bytes_ in pairs:
        found[column] = found.get(column, 0) + bytes_
    return found


def _needs(flat: FlatProblem, cut: int) -> tuple[list[int], list[int]]:
    """For each value, the first and the last stage after the cut that reads it.

    An op that runs again does so when the first of its values is read, by a first run if there is one.
    """
    never = flat.count + 1
    first, last = [never] * len(flat.size), [-1] * len(flat.size)
    for value in flat.final:
        first[value] = last[value] = flat.count
    for number in range(flat.count - 1, cut, -1):
        for value in flat.inputs[number]:
            first[value], last[value] = number, max(last[value], number)
    direct = list(first)
    for number in range(cut - 1, -1, -1):
        wanted = (direct[value] if direct[value] < never else first[value] for value in flat.outputs[number])
        again = min(wanted, default=never)
        for value in flat.inputs[number] if again < never else ():
            first[value], last[value] = min(first[value], again), max(last[value], again)
    return first, last


def _fixed_bytes(flat: FlatProblem, cut: int) -> list[int]:
    """What is in memory at each op that the cut does not decide about."""
    change, last = [0] * (flat.count + 1), list(flat.producer)
    for number, values in enumerate(flat.inputs):
        for value in values:
            last[value] = number
    for value, birth in enumerate(flat.producer):
        if birth >= cut:
            end = flat.count - 1 if value in flat.final else last[value]
            change[birth] += flat.size[value]
            change[end + 1] -= flat.size[value]
    rows = zip(accumulate(change), flat.workspace, strict=False)
    return [flat.resident + live + workspace for live, workspace in rows]
