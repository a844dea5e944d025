"""Is this schedule allowed, and what is its peak? Naive on purpose: it shares no code with `simulate`.

It plays the schedule forwards and writes down the birth and last use of every version, where `simulate` walks
backwards.
"""

from __future__ import annotations

from remat.core.graph import Op, Transfer
from remat.core.problem import Problem
from remat.core.schedule import Schedule
from remat.errors import InvalidSchedule


def validate(problem: Problem, schedule: Schedule, *, keep_order: bool = True) -> int:
    """Raise `InvalidSchedule` unless `schedule` is valid and within budget; return its peak in bytes."""
    _check_order(problem, schedule, keep_order)
    peak = naive_peak_bytes(problem, schedule)
    if peak > problem.budget_bytes:
        raise InvalidSchedule(f"The schedule peaks at {peak} bytes; the budget is {problem.budget_bytes} bytes.")
    on_host = naive_host_bytes(problem, schedule) if problem.costs.copy_ns else 0
    if on_host > problem.host_budget_bytes:
        raise InvalidSchedule(
            f"Copies take {on_host} bytes of the host at once; they may take {problem.host_budget_bytes} bytes."
        )
    return peak


def naive_peak_bytes(problem: Problem, schedule: Schedule) -> int:
    """The peak by definition: every version is live from its birth to its last use, written down going forwards."""
    ops, steps, costs = problem.graph.ops, schedule.steps, problem.costs
    current: dict[int, list[int]] = {}  # value -> [bytes, birth, last use] of its newest version
    versions: list[list[int]] = []
    chances: list[tuple[int, list[int]]] = []  # steps that write into a version if it is not read later
    for step, number in enumerate(steps):
        for value in ops[number].inputs:
            current[value][2] = step
        chances.extend((step, current[value]) for value in ops[number].overwrites)
        for value in ops[number].outputs:
            current[value] = [costs.size_bytes[value], step, step]
            versions.append(current[value])
    for value in problem.graph.outputs:
        current[value][2] = len(steps) - 1
    born: dict[int, int] = {}
    dead: dict[int, int] = {}
    for size, birth, last_use in versions:
        born[birth] = born.get(birth, 0) + size
        dead[last_use] = dead.get(last_use, 0) + size
    shared = {step: size for step, (size, _, last_use) in chances if last_use == step}
    peak = live = problem.resident_bytes
    for step, number in enumerate(steps):
        live += born.get(step, 0)
        peak = max(peak, live + costs.workspace_bytes[number] - shared.get(step, 0))
        live -= dead.get(step, 0)
    return peak


def naive_time_ns(problem: Problem, schedule: Schedule) -> float:
    """The time by definition: the longest way through what has to wait for what.

    Ops wait for the op before them and for copies; copies for the op that begins them and for the copy before them.
    """
    ops, costs = problem.graph.ops, problem.costs
    copied = costs.copy_ns or (0.0,) * len(ops)
    ends: list[float] = []  # of each step's op
    arrivals: dict[int, float] = {}  # of each step's copy
    for step, number in enumerate(schedule.steps):
        op = ops[number]
        begun = (_begun_by(problem, schedule, step, value) for value in op.inputs)
        waits = [arrivals[found] for found in begun if found is not None]
        ends.append(max([0.0, *ends[-1:], *waits]) + costs.time_ns[number])
        if _begins(op):
            same = (arrivals[other] for other in arrivals if ops[schedule.steps[other]].transfer is op.transfer)
            arrivals[step] = max([ends[step], *same]) + copied[number]
    return max(ends, default=0.0)


def _begins(op: Op) -> bool:
    return op.transfer in (Transfer.OUT, Transfer.BACK)


def _begun_by(problem: Problem, schedule: Schedule, step: int, value: int) -> int | None:
    """The step that began the copy that `value` is at `step`; None where an op computed it."""
    for earlier in range(step - 1, -1, -1):
        op = _op(problem, schedule, earlier)
        if value in op.outputs:
            return earlier if _begins(op) else None
    return None


def naive_host_bytes(problem: Problem, schedule: Schedule) -> int:
    """What copies take on the host by definition: each from its beginning to the last step that needs it."""
    ops, steps = problem.graph.ops, schedule.steps
    made: dict[int, list[int]] = {}  # by which steps each value is made
    read: dict[int, list[int]] = {}
    ends: dict[int, int] = {}
    for step, number in enumerate(steps):
        if ops[number].transfer is Transfer.OUT:
            ends[step] = step
        for value in ops[number].inputs:
            start = _copy_needed(problem, schedule, made, read, step, value)
            if start is not None:
                ends[start] = step
        for value in ops[number].inputs:
            read.setdefault(value, []).append(step)
        for value in ops[number].outputs:
            made.setdefault(value, []).append(step)
    stays = [(problem.costs.size_bytes[ops[steps[start]].inputs[0]], start, end) for start, end in ends.items()]
    return max((sum(size for size, start, end in stays if start <= at <= end) for at in ends), default=0)


def _copy_needed(
    problem: Problem, schedule: Schedule, made: dict[int, list[int]], read: dict[int, list[int]], step: int, value: int
) -> int | None:
    """The step that began the copy out which `step` needs because it reads `value`, if it does.

    It needs the copy that it waits for or fetches, and where it is the first to read what came back, that one.
    """
    making = next(at for at in reversed(made[value]) if at < step)
    maker = _op(problem, schedule, making)
    if maker.transfer is None or maker.transfer is Transfer.OUT:
        return None if maker.transfer is None else making
    if maker.transfer is Transfer.BACK and any(making < at < step for at in read.get(value, ())):
        return None
    return _copy_needed(problem, schedule, made, read, making, maker.inputs[-1])


def _op(problem: Problem, schedule: Schedule, step: int) -> Op:
    return problem.graph.ops[schedule.steps[step]]


def _check_order(problem: Problem, schedule: Schedule, keep_order: bool) -> None:
    graph = problem.graph
    computed_ops: set[int] = set()
    computed: set[int] = set()
    newest = -1
    for step, number in enumerate(schedule.steps):
        if not 0 <= number < len(graph.ops):
            raise InvalidSchedule(f"Step {step} runs op {number}; the graph has ops 0 to {len(graph.ops) - 1}.")
        op = graph.ops[number]
        missing = [value for value in op.inputs if value not in computed]
        if missing:
            raise InvalidSchedule(f"Step {step} runs `{op.name}` before its input value {missing[0]} is computed.")
        if number in computed_ops and not op.recomputable:
            raise InvalidSchedule(f"Step {step} runs `{op.name}` again, which must run once.")
        if number not in computed_ops and keep_order and op.transfer is None:
            if number < newest:
                raise InvalidSchedule(f"Step {step} first runs `{op.name}` out of the graph's order.")
            newest = number
        computed_ops.add(number)
        computed.update(op.outputs)
    needed = [number for number, op in enumerate(graph.ops) if op.transfer is None]
    if not computed_ops.issuperset(needed):
        never = next(number for number in needed if number not in computed_ops)
        raise InvalidSchedule(f"Op {never} (`{graph.ops[never].name}`) never runs; every op must run at least once.")
