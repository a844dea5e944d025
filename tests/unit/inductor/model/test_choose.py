"""What is chosen for compiled code, on traced models and on graphs made up at random."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.joints import joints, rates_of, uncut_of
from torch import nn

from remat.core.graph import OpId
from remat.core.problem import Problem
from remat.core.schedule import Schedule
from remat.core.simulate import simulate
from remat.core.validate import validate
from remat.errors import InfeasibleBudget
from remat.inductor.model.candidates import candidates
from remat.inductor.model.choose import _Search, choose, leanest
from remat.inductor.model.choose import given as known_choice
from remat.inductor.model.compose import compose
from remat.inductor.model.contract import contract
from remat.inductor.model.joint import Half, Joint, JointNode, Kind, read_joint
from remat.inductor.model.policies import block_inputs, matmuls
from remat.inductor.model.predict import predict
from remat.inductor.model.split import split
from remat.inductor.partition import Cut, apply, mark


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.1, self.training)


class Model(nn.Module):
    def __init__(self, depth: int = 3, width: int = 16) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


@pytest.fixture(scope="module")
def uncut():
    return uncut_of(Model(), torch.randn(64, 16))


def check_runs(joint: Joint, saved: frozenset[int]) -> None:
    """Both programs find what they read, and run nothing a second time that may not."""
    halves = split(joint, saved)
    inputs = {number for number, node in enumerate(joint.nodes) if node.kind is Kind.INPUT}
    there = set(inputs)
    for number in halves.forward:
        assert set(joint.nodes[number].reads) <= there, joint.nodes[number].name
        there.add(number)
    assert saved <= there
    there = inputs | saved
    for number in halves.backward:
        assert set(joint.nodes[number].reads) <= there, joint.nodes[number].name
        assert number not in there
        there.add(number)
    assert joint.gradients <= there


def everything(joint: Joint) -> frozenset[int]:
    return frozenset(
        number for number, node in enumerate(joint.nodes) if node.phase is Half.FORWARD and node.kind is not Kind.INPUT
    )


@given(joints(), st.randoms())
@settings(max_examples=150, deadline=None)
def test_any_choice_runs(joint: Joint, random) -> None:
    saved = frozenset(number for number in everything(joint) if random.random() < 0.5)
    check_runs(joint, saved)
    prediction = predict(joint, saved, rates_of(joint))
    assert prediction.saved_bytes == sum(joint.nodes[number].size_bytes for number in saved)
    assert prediction.peak_bytes >= prediction.saved_bytes


@given(joints())
@settings(max_examples=60, deadline=None)
def test_saving_everything_runs_nothing_again(joint: Joint) -> None:
    again = [number for number in split(joint, everything(joint)).backward if joint.nodes[number].phase is Half.FORWARD]
    assert again == []


@given(joints(), st.floats(0.3, 1.1))
@settings(max_examples=30, deadline=None)
def test_a_choice_is_within_its_budget_or_there_is_none(joint: Joint, share: float) -> None:
    rates = rates_of(joint)
    budget = int(share * predict(joint, everything(joint), rates).peak_bytes)
    try:
        choice = choose(joint, rates, budget, time_limit_s=2)
    except InfeasibleBudget as error:
        assert error.min_budget > budget
        return
    check_runs(joint, choice.saved)
    assert choice.prediction.peak_bytes <= budget
    if choice.unrolled is not None:
        joint = choice.unrolled.joint
        check_runs(joint, choice.saved)
    again = {number for number in split(joint, choice.saved).backward if joint.nodes[number].phase is not Half.BACKWARD}
    assert all(joint.nodes[number].recomputable for number in again)


@given(joints(), joints())
@settings(max_examples=60, deadline=None)
def test_two_graphs_share_one_budget(first: Joint, second: Joint) -> None:
    whole = compose([first, second], [rates_of(first), rates_of(second)])
    saved = everything(whole.joint)
    assert whole.part(0, saved) == everything(first) and whole.part(1, saved) == everything(second)
    check_runs(whole.joint, saved)
    # The second runs while what the first saved is in memory.
    held = predict(first, everything(first), rates_of(first)).saved_bytes
    alone = predict(second, everything(second), rates_of(second)).peak_bytes
    assert predict(whole.joint, saved, whole.rates).peak_bytes >= held + alone - first.nodes[-1].size_bytes


def test_reads_a_traced_model(uncut) -> None:
    joint = uncut.joint
    alone = [node for node in joint.nodes if node.kind is Kind.ALONE]
    assert sum(node.phase is Half.FORWARD for node in alone) == 6
    assert sum("mm" in node.target for node in alone) == 3 * 6
    masks = [node for node in joint.nodes if node.is_random and "inductor_random" in node.target]
    assert len(masks) == 3
    seeds = [node for node in joint.nodes if "inductor_seeds" in node.target]
    assert [node.recomputable for node in seeds] == [False]


@pytest.mark.long
def test_less_memory_costs_more_time_and_is_held(uncut) -> None:
    joint, rates = uncut.joint, rates_of(uncut.joint)
    most = known_choice(joint, rates, matmuls(joint)).prediction.peak_bytes
    least = leanest(joint, rates).prediction.peak_bytes
    assert least < 0.8 * most
    choices = [choose(joint, rates, int(least + share * (most - least)), time_limit_s=0.7) for share in (0.0, 0.3, 0.6)]
    times = [choice.solution.time_ns for choice in choices]
    assert times == sorted(times, reverse=True)
    for choice in choices:
        check_runs(joint, choice.saved)


def test_the_contracted_graph_knows_only_what_can_be_in_memory(uncut) -> None:
    joint = uncut.joint
    contracted = contract(joint, rates_of(joint))
    kept = {joint.nodes[number].name for number in contracted.node_of}
    assert {node.name for node in joint.nodes if node.kind is Kind.ALONE} <= kept
    assert not any(name.startswith(("erf", "inductor_random")) for name in kept)
    assert len(contracted.graph.ops) < len(joint.nodes) / 2


def test_torch_cuts_where_the_marks_say(uncut) -> None:
    joint, rates = uncut.joint, rates_of(uncut.joint)
    least = leanest(joint, rates, may_copy=False).prediction.peak_bytes
    saved = choose(joint, rates, int(1.2 * least), time_limit_s=2, may_copy=False).saved
    mark(joint, uncut.nodes, saved)
    needed = {number for number in saved if number in _read_in_backward(joint, saved)}
    assert uncut.saved_by_torch() == needed


class Shortcuts(nn.Module):
    """Every layer reads the two before it, so that making one again needs the others."""

    def __init__(self, depth: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv1d(4, 4, 3, padding=1) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = x
        for layer in self.layers:
            before, x = x, F.relu(layer(x) + before)
        return x.square().mean()


def test_what_runs_again_twice_is_in_the_graph_twice() -> None:
    uncut = uncut_of(Shortcuts(), torch.randn(2, 4, 64))
    joint, rates = uncut.joint, rates_of(uncut.joint)
    choice = leanest(joint, rates)
    assert choice.unrolled is not None and choice.unrolled.copies
    assert choice.prediction.peak_bytes < leanest(joint, rates, may_copy=False).prediction.peak_bytes
    names = {joint.nodes[number].name for number in choice.saved}
    apply(uncut, Cut(choice.saved, choice.unrolled))
    uncut.module.graph.lint()
    found = read_joint(uncut.module, 1)
    saved = frozenset(number for number, node in enumerate(found.nodes) if node.name in names)
    check_runs(found, saved)
    assert predict(found, saved, rates_of(found)).peak_bytes == choice.prediction.peak_bytes


def _read_in_backward(joint: Joint, saved: frozenset[int]) -> set[int]:
    return {read for number in split(joint, saved).backward for read in joint.nodes[number].reads}


def test_candidates_fit_and_differ(uncut) -> None:
    joint, rates = uncut.joint, rates_of(uncut.joint)
    budget = known_choice(joint, rates, matmuls(joint)).prediction.peak_bytes

    def solve(joint, rates):
        return choose(joint, rates, budget, time_limit_s=1)

    found = dict(candidates(joint, rates, budget, solve, uncut.saved_by_torch()))
    assert next(iter(found)) == "solver"
    # The solver, as fast as the machine lets it be, may come to one of them by itself.
    policies = {known_choice(joint, rates, policy(joint) | joint.kept).saved for policy in (matmuls, block_inputs)}
    assert policies <= {choice.saved for choice in found.values()}
    assert all(choice.prediction.peak_bytes <= budget for choice in found.values())
    assert len({choice.saved for choice in found.values()}) == len(found)
    assert len(block_inputs(joint)) < len(matmuls(joint))


def test_what_a_schedule_makes_again_in_forward_is_not_saved() -> None:
    """Compiled forwards run nothing twice: what was dropped before the loss is made again in backward."""
    nodes = [_made("input", Kind.INPUT, Half.FORWARD, (), 0), _made("small", Kind.ALONE, Half.FORWARD, (0,), 100)]
    nodes += [_made("large", Kind.ALONE, Half.FORWARD, (1,), 1000), _made("used", Kind.ALONE, Half.FORWARD, (2,), 10)]
    nodes += [_made("loss", Kind.SUM, Half.FORWARD, (3,), 4), _made("tangents", Kind.INPUT, Half.BACKWARD, (), 0)]
    nodes += [_made("grad", Kind.ALONE, Half.BACKWARD, (2, 5), 10)]
    numbered = tuple(replace(node, owner=number) for number, node in enumerate(nodes))
    joint = Joint(numbered, frozenset([4]), frozenset([6]))
    contracted = contract(joint, rates_of(joint))
    place = {op.name: OpId(number) for number, op in enumerate(contracted.graph.ops)}
    steps = tuple(place[name] for name in ("small", "large", "used", "large", "loss", "grad"))
    backward = contracted.cut(Schedule(steps))
    assert [contracted.graph.ops[step].name for step in backward.steps] == ["large", "grad"]
    assert backward.saved == {1, 4}


def test_a_normalised_value_is_made_again_from_what_it_was_made_of() -> None:
    """It is hardly smaller than that: writing it in forward and reading it in backward saves nothing."""
    nodes = [_made("input", Kind.INPUT, Half.FORWARD, (), 0), _made("left", Kind.ALONE, Half.FORWARD, (0,), 1000)]
    nodes += [_made("right", Kind.ALONE, Half.FORWARD, (0,), 1000), _made("scale", Kind.SUM, Half.FORWARD, (1,), 10)]
    nodes += [_made("normal", Kind.FUSED, Half.FORWARD, (1, 3), 1000)]
    nodes += [_made("stream", Kind.FUSED, Half.FORWARD, (1, 2), 1000)]
    nodes += [_made("loss", Kind.SUM, Half.FORWARD, (4, 5), 4), _made("tangents", Kind.INPUT, Half.BACKWARD, (), 0)]
    nodes += [_made("grad", Kind.SUM, Half.BACKWARD, (4, 5, 7), 10)]
    numbered = tuple(replace(node, owner=number) for number, node in enumerate(nodes))
    joint = Joint(numbered, frozenset([6]), frozenset([8]))
    values = {joint.nodes[number].name for number in contract(joint, rates_of(joint)).node_of}
    assert "normal" not in values
    assert "stream" in values, "a sum of two is half of what it is made of"


def test_where_compiled_code_needs_more_the_solver_is_told_so() -> None:
    """What is too low at one op is corrected there: the rest of the step keeps its memory."""
    joint = uncut_of(Model(depth=4), torch.randn(64, 16)).joint
    rates = rates_of(joint)
    least = leanest(joint, rates).prediction.peak_bytes
    most = known_choice(joint, rates, frozenset(contract(joint, rates).node_of)).prediction.peak_bytes
    search = _Search(joint, rates, (least + most) // 2, "auto", 1.0, may_copy=True)
    found = search._solve()
    assert found is not None
    moments = tuple(moment._replace(live_bytes=2 * most) for moment in found.prediction.moments if moment.in_backward)
    assert search._learn(replace(found, prediction=replace(found.prediction, moments=moments)))
    given_more = search._problem().costs.workspace_bytes
    assert sum(given_more) > sum(search.contracted.costs.workspace_bytes)
    assert not search._learn(replace(found, prediction=replace(found.prediction, moments=moments))), "nothing is new"


@given(joints(), st.floats(0, 1))
@settings(max_examples=25, deadline=None)
def test_what_is_proven_of_all_that_fits_holds_for_what_is_done_by_hand(joint: Joint, share: float) -> None:
    rates = rates_of(joint)
    least = leanest(joint, rates).prediction.peak_bytes
    most = known_choice(joint, rates, everything(joint)).prediction.peak_bytes
    search = _Search(joint, rates, least + int(share * (most - least)), "auto", 0.2, may_copy=True)
    search.attempt()
    for saved in (everything(joint), matmuls(joint) | joint.kept, block_inputs(joint) | joint.kept):
        by_hand = known_choice(joint, rates, saved)
        proven = search.proven(by_hand)
        assert proven.solution.bound_ns >= by_hand.solution.bound_ns
        assert proven.solution.gap <= by_hand.solution.gap
        for problem, bound in search._bounds:
            assert by_hand.solution.schedule is not None
            if simulate(problem, by_hand.solution.schedule).peak_bytes <= problem.budget_bytes:
                assert bound <= by_hand.solution.time_ns * (1 + 1e-9), "no schedule that fits is faster"
                assert proven.solution.bound_ns == pytest.approx(max(bound, by_hand.solution.bound_ns))


def _made(name: str, kind: Kind, phase: Half, reads: tuple[int, ...], size: int) -> JointNode:
    return JointNode(name, f"test.{name}", kind, phase, reads, 0, size, max(size // 4, 1), True)


@given(joints(), st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_a_choice_made_by_hand_has_a_schedule(joint: Joint, random) -> None:
    contracted = contract(joint, rates_of(joint))
    early = {value for op in contracted.graph.ops[: contracted.boundary] for value in op.outputs}
    fixed = {value for op in contracted.graph.ops if not op.recomputable for value in op.outputs}
    nodes = sorted(contracted.node_of[value] for value in early - fixed)
    kept = {contracted.node_of[value] for value in early & fixed}
    saved = frozenset(number for number in nodes if random.random() < 0.5) | kept
    schedule = contracted.schedule(saved)
    validate(Problem(contracted.graph, contracted.costs, 2**40), schedule)
    ends = {contracted.node_of[value] for value in contracted.graph.outputs}
    assert contracted.cut(schedule).saved <= saved | ends


def test_keeping_attention_keeps_all_that_its_backward_reads() -> None:
    """Sums of rows come out of attention beside its result, and only backward reads them."""
    nodes = [_made("input", Kind.INPUT, Half.FORWARD, (), 0), _made("attend", Kind.ALONE, Half.FORWARD, (0,), 0)]
    nodes += [replace(_made("result", Kind.ALONE, Half.FORWARD, (1,), 1000), is_part=True, module="layers.0")]
    nodes += [replace(_made("sums", Kind.ALONE, Half.FREE, (1,), 10), is_part=True, module="layers.0")]
    nodes += [_made("loss", Kind.SUM, Half.FORWARD, (2,), 4), _made("tangents", Kind.INPUT, Half.BACKWARD, (), 0)]
    nodes += [_made("grad", Kind.ALONE, Half.BACKWARD, (2, 3, 5), 10)]
    numbered = tuple(replace(node, owner=number) for number, node in enumerate(nodes))
    joint = Joint(numbered, frozenset([4]), frozenset([6]))
    saved = matmuls(joint)
    assert {2, 3} <= saved
    assert 1 not in split(joint, saved).backward, "nothing of it runs again"


@given(joints())
@settings(max_examples=50, deadline=None)
def test_nothing_done_by_hand_is_leaner_than_the_leanest(joint: Joint) -> None:
    rates = rates_of(joint)
    by_hand = known_choice(joint, rates, block_inputs(joint) | joint.kept)
    assert leanest(joint, rates).prediction.peak_bytes <= by_hand.prediction.peak_bytes


def test_a_sum_that_grows_in_place_is_saved_once() -> None:
    fixed = {"recomputable": False}
    nodes = [_made("input", Kind.INPUT, Half.FORWARD, (), 0)]
    nodes += [replace(_made("first", Kind.ALONE, Half.FORWARD, (0,), 1000), **fixed)]
    nodes += [replace(_made("second", Kind.ALONE, Half.FORWARD, (1,), 1000), in_place=True, **fixed)]
    nodes += [_made("loss", Kind.SUM, Half.FORWARD, (0,), 4), _made("tangents", Kind.INPUT, Half.BACKWARD, (), 0)]
    nodes += [_made("grad", Kind.ALONE, Half.BACKWARD, (2, 4), 10)]
    numbered = tuple(replace(node, owner=number) for number, node in enumerate(nodes))
    joint = Joint(numbered, frozenset([3]), frozenset([5]))
    assert block_inputs(joint) & {1, 2} == {2}


@given(joints())
@settings(max_examples=50, deadline=None)
def test_what_backward_never_reads_is_not_saved(joint: Joint) -> None:
    everything = frozenset(
        number for number, node in enumerate(joint.nodes) if node.phase is Half.FORWARD and node.kind is not Kind.INPUT
    )
    choice = known_choice(joint, rates_of(joint), everything)
    late = [node for node in joint.nodes if node.phase is Half.BACKWARD]
    assert choice.saved == everything & {read for node in late for read in node.reads}
    assert choice.prediction.peak_bytes <= predict(joint, everything, rates_of(joint)).peak_bytes
