"""Laws of schedules that move values to the host and back, for every graph and schedule."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.properties.test_core import problems

from remat.core import OpId, Problem, Schedule, ValueId, load_problem, plain_schedule, save_problem, simulate, validate
from remat.core.copies import Movable, computing_steps, copies_of, movable_of, only_used, with_copies, without_copies
from remat.core.engines import follow_copies
from remat.core.validate import naive_host_bytes, naive_peak_bytes, naive_time_ns

times = st.floats(0, 50) | st.integers(0, 50).map(float)


@st.composite
def movings(draw: st.DrawFn) -> Problem:
    """Problems some of whose values may leave the device."""
    problem = draw(problems())
    inside = [value for value in range(problem.graph.value_count) if value not in problem.graph.outputs]
    values = draw(st.lists(st.sampled_from(inside), unique=True)) if inside else []
    beside = draw(st.booleans())
    return with_copies(problem, [Movable(ValueId(value), draw(times), draw(times), beside) for value in values])


@st.composite
def moved(draw: st.DrawFn) -> tuple[Problem, Schedule]:
    """A problem and a valid schedule that moves values, and computes them again, anywhere and several times."""
    problem = draw(movings())
    ops, steps, made = problem.graph.ops, list[OpId](), set[int]()
    for first in plain_schedule(problem.graph).steps:
        for _ in range(draw(st.integers(0, 3))):
            moves = [n for n, op in enumerate(ops) if op.transfer is not None and made.issuperset(op.inputs)]
            again = [n for n in range(first) if ops[n].recomputable]
            if moves or again:
                steps.append(OpId(draw(st.sampled_from([*moves, *again]))))
                made.update(ops[steps[-1]].outputs)
        steps.append(first)
        made.update(ops[first].outputs)
    return problem, Schedule(tuple(steps))


@given(moved())
def test_time_and_memory_agree_with_their_naive_definitions(case: tuple[Problem, Schedule]) -> None:
    problem, schedule = case
    timeline, engines = simulate(problem, schedule), follow_copies(problem, schedule)
    assert validate(problem, schedule) == naive_peak_bytes(problem, schedule) == timeline.peak_bytes
    assert timeline.time_ns == pytest.approx(naive_time_ns(problem, schedule))
    assert engines.host_peak_bytes == naive_host_bytes(problem, schedule)


@given(moved())
def test_copies_run_in_order_on_their_engine_and_what_ops_wait_is_told(case: tuple[Problem, Schedule]) -> None:
    problem, schedule = case
    engines = follow_copies(problem, schedule)
    for kind in {problem.graph.ops[schedule.steps[run.step]].transfer for run in engines.copies}:
        runs = [run for run in engines.copies if problem.graph.ops[schedule.steps[run.step]].transfer is kind]
        assert all(one.end_ns <= other.start_ns for one, other in zip(runs, runs[1:], strict=False))
    spent = sum(problem.costs.time_ns[number] for number in schedule.steps)
    assert engines.time_ns == pytest.approx(spent + engines.waited_ns)


@given(moved())
def test_what_a_schedule_leaves_out_can_be_forgotten(case: tuple[Problem, Schedule]) -> None:
    problem, schedule = case
    smaller, same = only_used(problem, schedule)
    assert simulate(smaller, same).time_ns == pytest.approx(simulate(problem, schedule).time_ns)
    assert simulate(smaller, same).live_bytes == simulate(problem, schedule).live_bytes
    used = set(schedule.steps)
    assert set(copies_of(smaller.graph)) == {v for v, ops in copies_of(problem.graph).items() if ops.out in used}


@given(moved())
def test_without_copies_a_schedule_is_one_of_the_plain_problem(case: tuple[Problem, Schedule]) -> None:
    problem, schedule = case
    plain = without_copies(problem)
    validate(plain, computing_steps(problem.graph, schedule))
    assert plain.base_time_ns == problem.base_time_ns
    assert plain_schedule(plain.graph) == plain_schedule(problem.graph)


@given(movings())
def test_problems_with_copies_come_back_from_a_file_as_they_were(problem: Problem) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "problem.json"
        save_problem(problem, path)
        assert load_problem(path) == problem
    assert with_copies(without_copies(problem), movable_of(problem)) == problem
