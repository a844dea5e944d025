"""Laws that hold for every graph, schedule and file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.contract.graphs import Builder, overwriting
from tests.unit.core.plans import small_plan

from remat.core import (
    Fingerprint,
    OpId,
    Plan,
    Problem,
    Schedule,
    Solution,
    Status,
    load_problem,
    naive_peak_bytes,
    plain_schedule,
    save_problem,
    simulate,
    validate,
)
from remat.core.results.replay import replay
from remat.errors import FileFormatError

sizes = st.integers(0, 50)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Random graphs; ops may have no output or several, some values are empty, some ops run once."""
    build, values = Builder(), list[int]()
    for number in range(draw(st.integers(0, 9))):
        inputs = draw(st.lists(st.sampled_from(values), max_size=3)) if values else []
        values += build.add(
            f"op{number}",
            inputs,
            draw(st.lists(sizes, max_size=3)),
            draw(st.floats(0, 100) | st.integers(0, 100)),
            workspace=draw(sizes),
            backward=draw(st.booleans()),
            recomputable=draw(st.booleans()),
        )
    outputs = draw(st.lists(st.sampled_from(values), unique=True, max_size=3)) if values else []
    problem = build.problem(outputs, resident=draw(sizes))
    return overwriting(problem, draw(st.integers(0, 99))) if draw(st.booleans()) else problem


@st.composite
def scheduled(draw: st.DrawFn) -> tuple[Problem, Schedule]:
    """A problem and a valid schedule with recomputations anywhere."""
    problem = draw(problems())
    steps: list[OpId] = []
    for op in plain_schedule(problem.graph).steps:
        again = [number for number in range(op) if problem.graph.ops[number].recomputable]
        if again:
            steps += [OpId(number) for number in draw(st.lists(st.sampled_from(again), max_size=3))]
        steps.append(op)
    return problem, Schedule(tuple(steps))


@given(scheduled())
def test_simulation_agrees_with_the_naive_definition(case: tuple[Problem, Schedule]) -> None:
    problem, schedule = case
    timeline = simulate(problem, schedule)
    assert validate(problem, schedule) == naive_peak_bytes(problem, schedule) == timeline.peak_bytes
    assert timeline.peak_bytes == max(timeline.live_bytes, default=problem.resident_bytes)


@given(scheduled())
def test_no_version_outlives_its_next_computation(case: tuple[Problem, Schedule]) -> None:
    problem, schedule = case
    timeline = simulate(problem, schedule)
    for step, number in enumerate(schedule.steps):
        later = [other for other in range(step + 1, len(schedule.steps)) if schedule.steps[other] == number]
        assert all(step <= last < (later[0] if later else len(schedule.steps)) for last in timeline.last_uses[step])


def plan_of(problem: Problem, schedule: Schedule, breakdown: tuple[tuple[str, int], ...] = ()) -> Plan:
    timeline = simulate(problem, schedule)
    solution = Solution(Status.FEASIBLE, schedule, timeline.time_ns, timeline.peak_bytes, 0.0, 0, "test")
    return Plan(problem, solution, Fingerprint((), "", "cpu", ()), 0, breakdown_bytes=breakdown)


@given(case=scheduled(), parameters=sizes, strange=sizes)
def test_replayed_step_has_the_memory_of_the_simulation(
    case: tuple[Problem, Schedule], parameters: int, strange: int
) -> None:
    problem, schedule = case
    timeline = simulate(problem, schedule)
    step = replay(plan_of(problem, schedule, (("parameters", parameters), ("no class", strange))), schedule)
    assert step.during_bytes == timeline.live_bytes
    assert step.peak_bytes == timeline.peak_bytes
    assert (step.peak_op, len(step.ops)) == (timeline.peak_step, len(schedule.steps))
    by_class = zip(*step.bytes_by_class().values(), strict=True)
    assert tuple(map(sum, by_class)) == step.during_bytes
    assert sum(step.breakdown().values()) == step.peak_bytes


@given(scheduled())
def test_replayed_step_frees_what_it_allocates(case: tuple[Problem, Schedule]) -> None:
    problem, schedule = case
    step = replay(plan_of(problem, schedule), schedule)
    live = step.start_bytes
    for op in step.ops:
        live += op.allocated_bytes
        assert live == op.live_bytes + op.workspace_bytes
        live -= op.freed_bytes
    assert live == problem.resident_bytes + sum(problem.costs.size_bytes[value] for value in problem.graph.outputs)


@given(problem=problems(), budget=st.integers(0, 1000))
def test_problem_file_round_trips(tmp_path_factory: pytest.TempPathFactory, problem: Problem, budget: int) -> None:
    path = tmp_path_factory.mktemp("problem") / "p.json"
    save_problem(problem.with_budget(budget), path)
    assert load_problem(path) == problem.with_budget(budget)


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    small_plan().save(path)
    return path


@settings(max_examples=200)
@given(data=st.data())
def test_corrupt_plan_file_is_a_file_format_error_or_the_same_plan(plan_file: Path, data: st.DataObject) -> None:
    original = plan_file.read_bytes()
    start = data.draw(st.integers(0, len(original) - 1))
    stop = data.draw(st.integers(start, min(len(original), start + 40)))
    damaged = plan_file.with_name("damaged.json")
    damaged.write_bytes(original[:start] + data.draw(st.binary(max_size=8)) + original[stop:])
    loads_or_refuses(damaged)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=200)
@given(data=st.data())
def test_foreign_value_in_a_plan_file_is_a_file_format_error(plan_file: Path, data: st.DataObject) -> None:
    document = json.loads(plan_file.read_text())
    section = data.draw(st.sampled_from([document, document["problem"], document["solution"], document["fingerprint"]]))
    section[data.draw(st.sampled_from(sorted(section)))] = data.draw(json_values)
    damaged = plan_file.with_name("damaged.json")
    damaged.write_text(json.dumps(document))
    loads_or_refuses(damaged)


def loads_or_refuses(path: Path) -> None:
    """A name or another free field may change and still be a plan; anything else is one clear refusal."""
    try:
        plan = Plan.load(path)
    except FileFormatError as error:
        assert str(error)
    else:
        peak = plan.predicted_peak - plan.allocator_slack_bytes
        assert plan.schedule is None or validate(plan.problem, plan.schedule) == peak
