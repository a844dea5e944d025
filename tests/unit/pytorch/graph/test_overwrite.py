"""Ops that overwrite give the same bits, and overwrite only what nobody else can see."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F
from tests.support.graphs import captured_from, real_inputs, run_lowered
from tests.support.nets import batch, stack
from tests.support.steps import same_bits
from tests.unit.pytorch.random_module import WIDTH, RandomModule
from torch import nn
from torch.fx import Graph

import remat
from remat.core.eager import without_overwrites
from remat.core.schedule import plain_schedule
from remat.core.simulate import NO_VALUE, overwritten_inputs, simulate
from remat.pytorch.graph.capture import Captured
from remat.pytorch.graph.overwrite import overwritable, overwriting_call
from remat.pytorch.run.lower import lower

aten = torch.ops.aten
ROWS = 64
SHAPE = (33, 67)


def tensor(seed: int, dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(SHAPE, generator=generator).to(device, dtype)


CALLS = {
    "add": (aten.add.Tensor, 2, ()),
    "add scaled": (aten.add.Tensor, 2, {"alpha": 0.3}),
    "mul": (aten.mul.Tensor, 2, ()),
    "sub": (aten.sub.Tensor, 2, ()),
    "relu": (aten.relu.default, 1, ()),
    "gelu": (aten.gelu.default, 1, ()),
    "silu": (aten.silu.default, 1, ()),
    "tanh": (aten.tanh.default, 1, ()),
    "pow": (aten.pow.Tensor_Scalar, 1, (3,)),
    "gelu backward": (aten.gelu_backward.default, 2, ()),
    "silu backward": (aten.silu_backward.default, 2, ()),
    "tanh backward": (aten.tanh_backward.default, 2, ()),
    "relu backward": (aten.threshold_backward.default, 2, (0,)),
    "relu6 backward": (aten.hardtanh_backward.default, 2, (0.0, 6.0)),
    "leaky relu backward": (aten.leaky_relu_backward.default, 2, (0.1, False)),
    "softmax": (aten._softmax.default, 1, (-1, False)),
    "softmax over rows": (aten._softmax.default, 1, (0, False)),
    "log softmax": (aten._log_softmax.default, 1, (-1, False)),
    "log softmax over rows": (aten._log_softmax.default, 1, (0, False)),
    "softmax backward": (aten._softmax_backward_data.default, 2, (-1, None)),
    "log softmax backward": (aten._log_softmax_backward_data.default, 2, (-1, None)),
    "log softmax backward over rows": (aten._log_softmax_backward_data.default, 2, (0, None)),
}


def check_same_bits(name: str, dtype: torch.dtype, device: str) -> None:
    target, count, options = CALLS[name]
    literals = tuple(dtype if option is None else option for option in options) if isinstance(options, tuple) else ()
    kwargs = options if isinstance(options, dict) else {}
    expected = target(*(tensor(seed, dtype, device) for seed in range(count)), *literals, **kwargs)
    nodes = _node(target, count, literals, kwargs, expected)
    places = overwritable(nodes[-1])
    assert places, name
    for place in (nodes.index(item) for item in places):
        arguments = [tensor(seed, dtype, device) for seed in range(count)]
        call, args, rest = overwriting_call(target, (*arguments, *literals), kwargs, arguments[place])
        found = call(*args, **rest)
        assert found.data_ptr() == arguments[place].data_ptr()
        assert same_bits(expected, found)


def _node(target, count, literals, kwargs, result):
    graph = Graph()
    inputs = [graph.placeholder(f"x{number}") for number in range(count)]
    for item in inputs:
        item.meta["val"] = torch.empty_like(result)
    node = graph.call_function(target, (*inputs, *literals), kwargs)
    node.meta["val"] = result
    return [*inputs, node]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", CALLS)
def test_overwriting_gives_the_same_bits(name: str, dtype: torch.dtype) -> None:
    check_same_bits(name, dtype, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CALLS)
def test_overwriting_gives_the_same_bits_on_a_gpu(name: str, dtype: torch.dtype) -> None:
    check_same_bits(name, dtype, "cuda")


@pytest.mark.parametrize(("target", "literals"), [(aten.clone.default, ()), (aten.mul.Scalar, (0.7,))])
def test_forms_that_allocate_or_round_otherwise_are_not_used(target, literals: tuple[float, ...]) -> None:
    nodes = _node(target, 1, literals, {}, tensor(0, torch.float32))
    assert overwritable(nodes[-1]) == []


class Net(nn.Module):
    def __init__(self, body) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.body = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self.linear(x), self.linear.weight).square().mean()


def overwriting_targets(captured: Captured) -> list[str]:
    """The ops of forward that overwrite in the plain schedule."""
    taken = overwritten_inputs(captured.graph, plain_schedule(captured.graph))
    ops = captured.graph.ops[: captured.boundary]
    return [op.target for op, value in zip(ops, taken, strict=False) if value != NO_VALUE]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (lambda y, weight: torch.tanh(y), ["aten.tanh.default"]),
        (lambda y, weight: F.gelu(y), []),
        (lambda y, weight: torch.tanh(y) + y.sum(), []),
        (lambda y, weight: torch.tanh(y).t() + torch.tanh(weight.detach())[:, :1], ["aten.tanh.default"]),
        (lambda y, weight: torch.tanh(weight) + y[:WIDTH], []),
    ],
    ids=["dying", "saved for backward", "read later", "parameter's copy has another size", "parameter"],
)
def test_overwrites_only_what_nothing_reads_later(body, expected: list[str]) -> None:
    captured = captured_from(Net(body), torch.randn(ROWS, WIDTH))
    assert [name for name in overwriting_targets(captured) if "tanh" in name or "gelu" in name] == expected


def test_sum_with_its_own_transpose_is_not_overwritten() -> None:
    captured = captured_from(Net(lambda y, weight: y + y.t()), torch.randn(WIDTH, WIDTH))
    assert not any(op.overwrites for op in captured.graph.ops[: captured.boundary] if "add.Tensor" in op.target)


@pytest.mark.parametrize("seed", range(12))
def test_overwriting_step_gives_the_bits_of_one_that_does_not_and_leaves_outputs_and_incoming_gradients(
    seed: int,
) -> None:
    captured = captured_from(RandomModule(seed), torch.randn(512, WIDTH))
    incoming = set(captured.graph.ops[captured.boundary].outputs)
    for op in captured.graph.ops:
        assert not set(op.overwrites) & (set(captured.graph.outputs) | incoming)
    schedule = plain_schedule(captured.graph)
    inputs = real_inputs(captured)
    before = [item.clone() if isinstance(item, torch.Tensor) else item for item in inputs]
    plain = run_lowered(captured, lower(captured, schedule, overwrite=False), inputs)
    found = run_lowered(captured, lower(captured, schedule), inputs)
    assert all(map(same_bits, plain.outputs, found.outputs))
    assert all(map(same_bits, plain.gradients, found.gradients))
    assert all(map(same_bits, before, inputs))


@pytest.mark.filterwarnings("ignore:A backward keeps its graph")
def test_backward_that_is_followed_by_another_leaves_what_was_saved() -> None:
    model, x = stack(), batch()
    optimized = remat.optimize(model, "1x", time_limit=1)
    for _ in range(2):
        gradients = []
        for step in (model, optimized):
            model.zero_grad(set_to_none=True)
            torch.manual_seed(3)
            loss = step(x)
            loss.backward(retain_graph=True)
            loss.backward()
            gradients.append([parameter.grad for parameter in model.parameters()])
        assert all(map(same_bits, *gradients))


def test_plan_that_counts_no_overwriting_runs_without() -> None:
    model, x = stack(dropout=0.0), batch()
    plan = remat.plan(model, x, budget="1x", solver="none")
    assert plan.schedule is not None
    peaks = []
    for problem in (plan.problem, without_overwrites(plan.problem)):
        peak = simulate(problem, plan.schedule).peak_bytes
        given = replace(plan, problem=problem, solution=replace(plan.solution, peak_bytes=peak))
        peaks.append((remat.measure(remat.apply(model, given), x).peak_bytes, given.predicted_peak))
    assert all(measured == predicted for measured, predicted in peaks)
    assert peaks[0] < peaks[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(4, 6, 5), (1,), (1000,)])
def test_dropout_of_bytes_gives_eager_bits(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.randn(shape).to(dtype)
    for input in (x, x.transpose(0, -1)):
        torch.manual_seed(5)
        expected = F.dropout(input, 0.3)
        after = torch.get_rng_state()
        torch.manual_seed(5)
        mask = torch.ops.remat.dropout_mask(input.shape, torch.empty_like(input).stride(), 0.3, device="cpu")
        found = torch.ops.remat.dropout(input, mask, 0.3)
        assert same_bits(expected, found)
        assert expected.stride() == found.stride()
        assert torch.equal(after, torch.get_rng_state())


def check_loss_backward(rows: int, classes: int, dtype: torch.dtype, weighted: bool, device: str = "cpu") -> None:
    logits = torch.randn(rows, classes, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    target = torch.arange(rows, device=device) % classes
    target[::7] = -100
    weight = torch.rand(classes, device=device).to(dtype) if weighted else None
    probabilities = aten._log_softmax(logits, 1, False)
    _, total = aten.nll_loss_forward(probabilities, target, weight, 1, -100)
    grad = torch.tensor(0.7, dtype=dtype, device=device)
    loss = (target, weight, 1, -100, total)
    of_loss = aten.nll_loss_backward(grad, probabilities, *loss)
    expected = aten._log_softmax_backward_data(of_loss, probabilities, 1, dtype)
    assert same_bits(expected, torch.ops.remat.cross_entropy_backward(grad, probabilities, *loss))
    torch.ops.remat.cross_entropy_backward.out(grad, probabilities, *loss, out=probabilities)
    assert same_bits(expected, probabilities)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "classes"), [(1, 3), (64, 17), (1000, 129), (4096, 50)])
def test_loss_backward_in_pieces_gives_eager_bits(rows: int, classes: int, dtype, weighted: bool) -> None:
    check_loss_backward(rows, classes, dtype, weighted)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "classes"), [(1000, 129), (4096, 50257), (4096, 1000)])
def test_loss_backward_in_pieces_gives_eager_bits_on_a_gpu(rows: int, classes: int, dtype) -> None:
    check_loss_backward(rows, classes, dtype, weighted=False, device="cuda")


def test_split_convolution_gives_eager_gradients() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.ConvTranspose2d(8, 4, 2, stride=2), nn.Conv2d(4, 4, 3, groups=4)
    )

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.body(x).square().mean()

    step, images = Loss(), torch.randn(4, 3, 12, 12)
    captured = captured_from(step, images)
    targets = [op.target for op in captured.graph.ops]
    assert targets.count("aten.convolution_backward.default") == 5
    assert remat.verify(step, remat.optimize(step, "1x", time_limit=1), images).ok
