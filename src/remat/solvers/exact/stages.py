"""A step as stages: what may run again in each, and what may be held from one to the next.

Stage t is everything from the end of op t-1's first run to the end of op t's; the stage after the last op may compute
outputs again. In: a flat problem. Out: its stages, and the way from what is held at each to a schedule and back.

An *ordered* stage is split into passes over the ops in graph order, each of which runs an op at most once. An unordered
one says nothing about order: it stands for every way to run its ops, and is lowered to a single pass.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from remat.core.graph import OpId
from remat.core.schedule import Schedule
from remat.solvers.schedule.editable import FlatProblem
from remat.solvers.schedule.keep import missing_ops


@dataclass(frozen=True, slots=True)
class Stage:
    limit: int
    """Ops before this one have run."""
    first: int | None
    """The op whose first run ends the stage; None in the stage after the last op, and in passes before the last."""
    again: tuple[int, ...]
    """Ops that may run again, in graph order."""
    wanted: tuple[int, ...]
    """Values computed before the stage, with bytes, that it or a later one may read."""
    ordered: bool = False


def make_stages(
    flat: FlatProblem, *, ordered: Collection[int] = (), passes: int = 1, most: float = float("inf")
) -> tuple[Stage, ...] | None:
    """The stages of a step, those of `ordered` in `passes` passes; None where they offer more than `most` choices."""
    if _least_choices(flat) > most:
        return None
    result: list[Stage] = []
    choices = 0
    for limit, read in enumerate(_read_from(flat)):
        again, wanted = _wanted(flat, limit, read)
        in_order = limit in ordered
        extra = passes - 1 if in_order else 0
        result += [Stage(limit, None, again, wanted, in_order)] * extra
        if limit < flat.count or again:
            result.append(Stage(limit, limit if limit < flat.count else None, again, wanted, in_order))
        choices += len(again) + len(wanted)
        # A row for each op over all values: eight terms take about as long as a column and its rows elsewhere.
        choices += passes * len(again) * len(wanted) // 8 if in_order else 0
        if choices > most:
            return None
    return tuple(result)


def to_schedule(flat: FlatProblem, stages: Sequence[Stage], held: Sequence[Collection[int]]) -> Schedule | None:
    """The schedule that holds `held[s]` when stage s starts and runs nothing again without need.

    None where that would run an op again that must run once. Values without bytes are always there.
    """
    steps: list[OpId] = []
    for index, stage in enumerate(stages):
        goal = set(held[index + 1] if index + 1 < len(stages) else flat.final)
        if stage.first is not None:
            goal = (goal | set(flat.inputs[stage.first])) - set(flat.outputs[stage.first])
        present = [value in held[index] or not size for value, size in enumerate(flat.size)]
        runs = missing_ops(flat, goal, present)
        if not all(flat.recomputable[number] for number in runs):
            return None
        steps += map(OpId, runs)
        if stage.first is not None:
            steps.append(OpId(stage.first))
    return Schedule(tuple(steps))


def stage_of_steps(schedule: Schedule) -> list[int]:
    """The stage in which each step runs: a recomputation belongs to the one that the next first run ends."""
    newest, result = -1, []
    for number in schedule.steps:
        result.append(number if number > newest else newest + 1)
        newest = max(newest, number)
    return result


def split_steps(stages: Sequence[Stage], schedule: Schedule) -> list[range] | None:
    """The steps of each stage; None where an ordered stage has too few passes for them."""
    limits = stage_of_steps(schedule)
    result: list[range] = []
    end = 0
    for index, stage in enumerate(stages):
        begin = end
        closes = index + 1 == len(stages) or stages[index + 1].limit != stage.limit
        while end < len(limits) and limits[end] == stage.limit:
            falls = end > begin and schedule.steps[end] <= schedule.steps[end - 1]
            if stage.ordered and falls:
                break
            end += 1
        if closes and end < len(limits) and limits[end] == stage.limit:
            return None
        # The first run ends the stage, so it belongs to the last pass.
        if not closes and end > begin and schedule.steps[end - 1] == stage.limit:
            end -= 1
        result.append(range(begin, end))
    return result


def _least_choices(flat: FlatProblem) -> int:
    """No stages offer fewer choices: each value with bytes that is read later is one in every stage until then."""
    last = [-1] * len(flat.size)
    for number, inputs in enumerate(flat.inputs):
        for value in inputs:
            last[value] = number
    for value in flat.final:
        last[value] = flat.count
    lives = zip(flat.size, flat.producer, last, strict=True)
    return sum(max(end - producer, 0) for size, producer, end in lives if size)


def _read_from(flat: FlatProblem) -> list[set[int]]:
    """For each stage, the values read by first runs from there on, or at the end."""
    result = [set(flat.final)]
    for inputs in reversed(flat.inputs):
        result.append(result[-1] | set(inputs))
    return result[::-1]


def _wanted(flat: FlatProblem, limit: int, read: set[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Ops before `limit` that may be worth running again from there on, and the values that may be read."""
    stack = [value for value in read if flat.producer[value] < limit]
    wanted, again = set(stack), set[int]()
    while stack:
        number = flat.producer[stack.pop()]
        if flat.recomputable[number] and number not in again:
            again.add(number)
            more = [value for value in flat.inputs[number] if value not in wanted]
            wanted.update(more)
            stack += more
    return tuple(sorted(again)), tuple(sorted(value for value in wanted if flat.size[value]))
