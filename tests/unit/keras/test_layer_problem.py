"""Calls of layers as a problem: what is counted, and schedules that tapes can follow."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from remat.core.memory_rules import CPU
from remat.core.schedule import Schedule, plain_schedule
from remat.core.simulate import simulate
from remat.core.validate import validate
from remat.errors import InfeasibleBudget
from remat.keras.layers.call import CallFacts
from remat.keras.layers.problem import LayerProblem, layer_problem
from remat.within import fit_within

INPUT = 100


def call(
    number: int, reads: tuple[int, ...], keeps: frozenset[int], *, size: int = 10, state: bool = False
) -> CallFacts:
    return CallFacts(
        name=f"layer_{number}",
        makes=(number,),
        reads=reads,
        sizes=(size,),
        kept_bytes=5,
        kept_keys=keeps,
        weight_bytes=1,
        forward_workspace=0,
        backward_workspace=0,
        has_state=state,
        has_gradient=True,
    )


def chain(length: int, *, keeps_input: bool = True) -> LayerProblem:
    facts = [
        call(number, (number - 1,) if number else (INPUT,), frozenset({number - 1} if number and keeps_input else ()))
        for number in range(length)
    ]
    return layer_problem(facts, (length - 1,), [1.0] * length)


def follows_tapes(layers: LayerProblem, schedule: Schedule) -> bool:
    """Whether what each backward reads is what the latest run of its call was given."""
    seen: dict[int, dict[int, int]] = {}
    version: dict[int, int] = {}
    for place, step in enumerate(schedule.steps):
        call_number = layers.backward_of.get(step)
        if call_number is None:
            version[step] = place
            seen[step] = dict(version)
        elif any(seen[call_number].get(other) != version[other] for other in layers.kept[step]):
            return False
    return True


def test_plain_step_holds_what_backward_reads() -> None:
    layers = chain(3)
    # At the loss: what three runs hold (5 and the input of each but the first), the output and its gradient.
    assert simulate(layers.problem, plain_schedule(layers.problem.graph)).peak_bytes == 3 * 5 + 2 * 10 + 10 + 10 + 11


def test_call_is_made_again_with_its_input() -> None:
    facts = [call(0, (INPUT,), frozenset()), call(1, (0,), frozenset({0})), call(2, (0, 1), frozenset({0}))]
    layers = layer_problem(facts, (2,), [1.0] * 3)
    backward = list(layers.backward_of)
    wished = Schedule((0, 1, 2, 3, 0, *backward))
    validate(layers.problem.with_budget(10**6), wished, keep_order=False)
    assert not follows_tapes(layers, wished)
    repaired = layers.repaired(wished)
    assert follows_tapes(layers, repaired) and len(repaired.steps) == len(wished.steps) + 2


@settings(max_examples=40)
@given(st.data())
def test_solved_schedules_fit_and_follow_tapes(data: st.DataObject) -> None:
    count = data.draw(st.integers(3, 9))
    facts = []
    for number in range(count):
        before = data.draw(st.sets(st.integers(0, number - 1), max_size=2)) if number else set()
        reads = tuple(sorted({*before, number - 1} if number else {INPUT}))
        keeps = frozenset(data.draw(st.sets(st.sampled_from([*reads, number]))))
        state = data.draw(st.integers(0, 4)) == 0
        facts.append(call(number, reads, keeps, size=data.draw(st.integers(1, 50)), state=state))
    layers = layer_problem(facts, (count - 1,), [1.0 + number for number in range(count)])
    peak = simulate(layers.problem, plain_schedule(layers.problem.graph)).peak_bytes
    share = data.draw(st.floats(0.5, 1.0))
    problem = layers.problem.with_budget(int(share * peak))
    try:
        found = fit_within(problem, "pressure", rules=CPU, tidy=layers.repaired, time_limit_s=0.5).solution
    except InfeasibleBudget as error:
        assert error.min_budget > problem.budget_bytes
        return
    assert found.schedule is not None
    assert validate(problem, found.schedule, keep_order=False) <= problem.budget_bytes
    assert follows_tapes(layers, found.schedule)
    assert not {step for step in found.schedule.recomputed() if step < count and facts[step].has_state}
