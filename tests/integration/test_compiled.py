"""Training under a budget with the code that Inductor makes, on the CPU with its C++ backend."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor.codegen.wrapper import AllocateLine
from torch.utils.checkpoint import checkpoint

import remat
from remat.core.validate import validate
from remat.errors import InfeasibleBudget, RematError
from remat.inductor import decide
from remat.inductor._compat.compiling import compile_half
from remat.pytorch.run.optimize import session_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("quick_kernels"),
    pytest.mark.filterwarnings("ignore:What your code needs between the compiled forward and its backward"),
]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.dropout(self.down(F.relu(self.up(x))), 0.1, self.training)


class Model(nn.Module):
    def __init__(self, depth: int = 4, width: int = 32) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def make(model: Callable[[], nn.Module] = Model) -> nn.Module:
    torch.manual_seed(0)
    return model()


def batch() -> torch.Tensor:
    return torch.randn(256, 32, generator=torch.Generator().manual_seed(1))


def train(step: Any, model: nn.Module, *args: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The loss and the gradients of one step from a fixed seed."""
    torch.manual_seed(7)
    loss = step(*args)
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    return loss.detach(), gradients


def assert_same(found: Any, wanted: Any) -> None:
    """Equal up to rounding: two cuts may fuse a sum differently. Another dropout mask is far off."""
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-7)


def measured(step: Any, model: nn.Module, *args: Any) -> int:
    def run() -> None:
        step(*args).backward()
        model.zero_grad()

    return remat.measure(run).peak_bytes


def optimized(model: nn.Module, budget: Any, **options: Any) -> nn.Module:
    return remat.optimize(model, budget, compiler="inductor", time_limit=2, progress=False, **options)


def test_gradients_masks_and_peak_at_several_budgets() -> None:
    """Dropout inside what runs again draws the same mask, and gradients are those of keeping all."""
    model, x = make(), batch()
    kept = train(optimized(model, "100x"), model, x)
    peaks = []
    for budget in ("0.8x", "0.7x"):
        step = optimized(model, budget)
        loss, gradients = train(step, model, x)
        assert_same((loss, gradients), kept)
        plan = remat.plan_of(step)
        assert plan.compiled is not None and not plan.compiled.is_default
        peak = measured(step, model, x)
        assert peak <= plan.budget_bytes
        assert abs(peak - plan.predicted_peak) <= 0.02 * peak
        peaks.append(peak)
    assert peaks[1] < peaks[0]


def test_enough_memory_leaves_torchs_own_cut(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    # What kernels as small as these were seen to take varies with whatever else the machine does.
    monkeypatch.setattr(decide, "WORTH_IT", 0.5)
    model, x = make(lambda: Model(depth=2)), batch()
    step = optimized(model, "100x")
    with caplog.at_level(logging.INFO, "remat"):
        train(step, model, x)
    told = [record.getMessage() for record in caplog.records if "may need" in record.getMessage()]
    assert len(told) == 1, "who asks is told of every compilation"
    plan = remat.plan_of(step)
    assert plan.compiled.is_default
    assert measured(step, model, x) == plan.predicted_peak


def test_too_little_memory_is_said() -> None:
    model, x = make(lambda: Model(depth=2)), batch()
    step = optimized(model, "0.1x")
    with pytest.raises(InfeasibleBudget, match="that the compiled step needs at least") as refused:
        step(x)
    remat.set_budget(step, refused.value.min_budget)
    train(step, model, x)
    assert measured(step, model, x) <= refused.value.min_budget


def test_output_that_is_returned_twice_has_its_gradient() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> Any:
            features = self.layer(x.relu())
            changed = (features * 2).add_(1.0)
            return features, changed.view(-1), changed.detach()

    model, x = make(Twice), torch.randn(4, 8)
    step = remat.optimize(model, "100x", compiler="inductor", progress=False)
    for call in (model, step):
        model.zero_grad()
        first, second, _ = call(x)
        (first.square().mean() + 0.5 * second.mean()).backward()
        if call is model:
            expected = model.layer.weight.grad.clone()
    torch.testing.assert_close(model.layer.weight.grad, expected)


def test_backward_that_keeps_its_graph_can_run_again() -> None:
    model, x = make(lambda: Model(depth=2)).eval(), batch()
    loss = model(x)
    loss.backward(retain_graph=True)
    loss.backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    step = optimized(model, "0.85x")
    loss = step(x)
    with pytest.warns(UserWarning, match="it gets copies of that"):
        loss.backward(retain_graph=True)
    loss.backward()
    for found, wanted in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(found.grad, wanted, rtol=1e-3, atol=1e-5)


def test_empty_batch_runs_in_eager() -> None:
    model, x = make(lambda: Model(depth=2)), batch()
    _, expected = train(model, model, x[:0])
    with pytest.warns(UserWarning, match="empty batch is not compiled"):
        _, found = train(optimized(model, "1x"), model, x[:0])
    assert all(map(torch.equal, found, expected))


def test_several_steps_of_an_optimizer_and_accumulated_gradients() -> None:
    model, x = make(lambda: Model(depth=3)), batch()
    twin = copy.deepcopy(model)
    step = optimized(model, "0.85x")
    losses: dict[str, list[float]] = {"plain": [], "ours": []}
    for name, run, owner in (("plain", optimized(twin, "100x"), twin), ("ours", step, model)):
        optimizer = torch.optim.AdamW(owner.parameters())
        for number in range(4):
            torch.manual_seed(number)
            loss = run(x)
            loss.backward()
            losses[name].append(loss.item())
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
    assert losses["ours"] == pytest.approx(losses["plain"], rel=1e-5)


class WithLogits(Model):
    """As models of transformers: a loss, and what it was computed from."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for block in self.blocks:
            x = block(x)
        return x.square().mean(), x


def test_a_loss_with_logits_is_planned_at_its_first_step(caplog: pytest.LogCaptureFixture) -> None:
    model, x = make(WithLogits), batch()

    def loss_of(step: Any) -> Callable[..., torch.Tensor]:
        return lambda *args: step(*args)[0]

    kept = train(loss_of(optimized(model, "100x")), model, x)
    step = optimized(model, "0.8x")
    with caplog.at_level(logging.INFO, "remat"):
        assert_same(train(loss_of(step), model, x), kept)
        plan = remat.plan_of(step)

        def run() -> None:
            outputs = step(x)  # the logits stay until backward is over
            outputs[0].backward()
            model.zero_grad()

        peak = remat.measure(run).peak_bytes
    assert peak <= plan.budget_bytes and abs(peak - plan.predicted_peak) <= 0.02 * peak
    compiled = [record for record in caplog.records if "may need" in record.getMessage()]
    assert len(compiled) == 1 and not plan.compiled.is_default, [record.getMessage() for record in compiled]


class Broken(Model):
    """Two graphs, each called once."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[1](self.blocks[0](x))
        torch._dynamo.graph_break()
        return self.blocks[3](self.blocks[2](x)).square().mean()


class Looped(Model):
    """Breaking inside a loop makes Dynamo capture single blocks, and call one graph for several."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number == 1:
                torch._dynamo.graph_break()
        return x.square().mean()


@pytest.mark.parametrize(("kind", "calls"), [(Broken, (0, 1)), (Looped, (0, 1, 1, 1))])
def test_several_graphs_are_planned_together(kind: type[Model], calls: tuple[int, ...]) -> None:
    model, x = make(kind), batch()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        roomy = optimized(model, "100x")
        kept = [train(roomy, model, x) for _ in range(2)][-1]
        step = optimized(model, "0.85x")
        for _ in range(2):
            loss, gradients = train(step, model, x)
        assert_same((loss, gradients), kept)
        plan = remat.plan_of(step)
        assert session_of(step).planned == calls
        assert measured(step, model, x) <= plan.budget_bytes
        if kind is Looped:
            assert remat.plan_of(roomy).overhead == 0 < plan.overhead, "more is kept where there is room"


class Language(nn.Module):
    def __init__(self, vocabulary: int = 2048, width: int = 16) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(torch.tanh(self.embedding(tokens))), labels)


def test_a_loss_that_is_too_large_is_cut_in_chunks(monkeypatch, caplog: pytest.LogCaptureFixture) -> None:
    halves: list[Any] = []

    def counted(*args: Any, **options: Any) -> Any:
        halves.append(compile_half(*args, **options))
        return halves[-1]

    monkeypatch.setattr("remat.inductor.compile.compile_half", counted)
    model = make(Language)
    tokens, labels = (torch.randint(0, 2048, (4096,), generator=torch.Generator().manual_seed(s)) for s in (0, 1))
    reference = F.cross_entropy(model.head(torch.tanh(model.embedding(tokens))), labels)
    wanted = torch.autograd.grad(reference, list(model.parameters()))
    step = optimized(model, "0.3x")
    with caplog.at_level(logging.INFO, "remat"):
        loss, gradients = train(step, model, tokens, labels)
    compiled = [record for record in caplog.records if "may need" in record.getMessage()]
    assert len(halves) == 2 * len(compiled), "the loss as a whole is traced, but not compiled"
    plan = remat.plan_of(step)
    assert plan.compiled.loss_chunks and plan.compiled.loss_chunks[0] > 1
    assert measured(step, model, tokens, labels) <= plan.budget_bytes
    torch.testing.assert_close(loss, reference.detach(), rtol=1e-5, atol=1e-6)
    for found, exact in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-6)


def test_search_times_candidates_leaves_no_trace_and_is_remembered(tmp_path) -> None:
    class Normed(Model):
        def __init__(self) -> None:
            super().__init__(depth=2)
            self.norm = nn.BatchNorm1d(32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(self.norm(x))

    model, x = make(Normed), batch()
    torch.manual_seed(3)
    step = optimized(model, "0.8x", search=60)
    state = torch.get_rng_state()
    loss = step(x)
    assert model.norm.num_batches_tracked == 1, "trials must not count as steps"
    assert all(parameter.grad is None for parameter in model.parameters())
    loss.backward()
    kept = list((tmp_path / "compiled").glob("*.json"))
    assert len(kept) == 1
    again = optimized(make(Normed), "0.8x", search=60)
    torch.set_rng_state(state)
    assert_same(again(x), loss)
    assert list((tmp_path / "compiled").glob("*.json")) == kept


@pytest.mark.long
def test_search_tries_the_loss_in_chunks_where_all_fits(monkeypatch) -> None:
    # As on a GPU, where a little is left free: a winner is remembered for what a step may need, not for that.
    monkeypatch.setattr("remat.inductor.session.first_goal", lambda graph, allowed: int(0.97 * allowed))
    tokens, labels = (torch.randint(0, 2048, (4096,), generator=torch.Generator().manual_seed(s)) for s in (0, 1))
    tried: list[tuple[int, ...]] = []

    def time_ns(call: Any, inputs: Any, device: Any) -> float:
        tried.append(tuple(item.chunks for item in session_of(step).graphs[0].form.chunked))
        return 1.0 if tried[-1] else 2.0

    monkeypatch.setattr("remat.inductor.search.time_ns", time_ns)
    plans = []
    for _ in range(2):
        model = make(Language)
        step = optimized(model, "100x", search=600)
        train(step, model, tokens, labels)
        plans.append(remat.plan_of(step))
    assert tried[0] == () and tried[-1] == (2,), "chunks are tried last, and not again once they have won"
    assert [plan.compiled.loss_chunks for plan in plans] == [(2,), (2,)]
    assert plans[0].compiled.saved == plans[1].compiled.saved


@pytest.mark.parametrize(("seconds", "gain", "wins"), [(1e-6, 0.1, 0), (600, 0.0004, 0), (600, 0.1, -1)])
def test_search_heeds_its_time_and_takes_what_is_clearly_faster(monkeypatch, seconds, gain, wins) -> None:
    built: list[Any] = []

    def time_ns(call: Any, inputs: Any, device: Any) -> float:
        built.append(call)
        return 1 - gain * len(built)

    monkeypatch.setattr("remat.inductor.search.time_ns", time_ns)
    model = make(lambda: Model(depth=4))
    step = optimized(model, "0.7x", search=seconds)
    train(step, model, batch())
    assert len(built) == 1 if seconds < 1 else len(built) > 1
    assert session_of(step).graphs[0].state.built.call is built[wins]


def test_buffers_are_held_where_small_or_far_from_the_peak_and_torch_is_left_as_it_was(monkeypatch) -> None:
    before = AllocateLine.should_reuse_buffer
    results, allocations = [], []
    for held in ({}, {"cpu": 0}, {"cpu": 2**20}):
        monkeypatch.setattr("remat.inductor.compile.HELD_BYTES", held)
        model = make(lambda: Model(depth=4))
        step = optimized(model, "0.6x")
        results.append(train(step, model, batch()))
        built = session_of(step).graphs[0].state.built
        allocations.append(sum(half.source.count("= empty_strided") for half in (built.forward, built.backward)))
    for result in results[1:]:
        assert_same(results[0], result)
    assert allocations[2] <= allocations[1] < allocations[0]
    assert AllocateLine.should_reuse_buffer is before


def test_the_same_plan_is_found_in_inductors_cache() -> None:
    hits = []
    for _ in range(2):
        torch._dynamo.reset()
        before = counters["inductor"]["fxgraph_cache_hit"]
        model = make(lambda: Model(depth=2))
        train(optimized(model, "0.9x"), model, batch())
        hits.append(counters["inductor"]["fxgraph_cache_hit"] - before)
    assert hits[1] >= 2, "forward and backward"


def test_as_a_backend_of_torch_compile() -> None:
    model, x = make(lambda: Model(depth=2)), batch()
    kept = train(optimized(model, "100x"), model, x)
    options = {"budget": "0.7x", "compiler": "inductor", "time_limit": 2}
    step = torch.compile(model, backend="remat", options=options, dynamic=False)
    loss, gradients = train(step, model, x)
    assert_same((loss, gradients), kept)


def test_graphs_that_torch_compile_leaves_open_are_planned() -> None:
    model, x = make(lambda: Model(depth=2)).eval(), batch()
    options = {"budget": "0.8x", "compiler": "inductor", "time_limit": 2}
    step = torch.compile(model, backend="remat", options=options, dynamic=True)
    for rows in (x, x[:100]):
        assert_same(train(step, model, rows), train(model, model, rows))


def test_another_shape_is_planned_too_and_the_first_stays() -> None:
    model, x = make(lambda: Model(depth=2)), batch()
    step = optimized(model, "0.9x")
    first = train(step, model, x)
    train(step, model, x[:128])
    session = session_of(step)
    built = [graph.state.built for graph in session.graphs]
    again = train(step, model, x)
    train(step, model, x[:128])
    assert all(graph.state.is_planned for graph in session.graphs)
    assert [graph.state.built for graph in session.graphs] == built, "nothing is compiled a second time"
    assert_same(first, again)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return 2 * x.sin()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 2 * grad * x.cos()


class Unusual(Model):
    """A region that the user checkpoints, and an autograd function of the user's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.blocks[0], x, use_reentrant=False)
        x = checkpoint(self.blocks[1], x, use_reentrant=False)
        return Doubled.apply(self.blocks[3](self.blocks[2](x))).square().mean()


@pytest.mark.parametrize("already", [False, True])
def test_unusual_models(already: bool) -> None:
    """User-made checkpoint regions, autograd functions, a model that was compiled before."""
    model, x = make(Unusual), batch()
    kept = train(optimized(model, "100x"), model, x)
    step = optimized(torch.compile(model) if already else model, "0.9x")
    loss, gradients = train(step, model, x)
    assert_same((loss, gradients), kept)
    assert measured(step, model, x) <= remat.plan_of(step).budget_bytes


def test_what_cannot_be_planned_runs_as_torch_compile_would(monkeypatch) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("no such graph\nand more lines")

    monkeypatch.setattr("remat.inductor.partition.read_joint", fail)
    model, x = make(lambda: Model(depth=1)), batch()
    step = optimized(model, "0.5x")
    with pytest.warns(UserWarning, match=r"RuntimeError: no such graph\); it runs as torch.compile runs it"):
        loss, _ = train(step, model, x)
    assert bool(loss > 0)


def test_what_inductor_cannot_compile_runs_in_eager(monkeypatch) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr("remat.inductor.compile.compile_fx", fail)
    model, x = make(lambda: Model(depth=1)), batch()
    step = optimized(model, "0.5x")
    with pytest.warns(UserWarning, match="runs in eager"):
        loss, gradients = train(step, model, x)
    wanted, exact = train(model, model, x)
    assert torch.equal(loss, wanted)
    assert all(torch.equal(found, other) for found, other in zip(gradients, exact, strict=True))


def test_an_older_torch_compiles_unplanned(monkeypatch) -> None:
    monkeypatch.setattr("remat.inductor.backend.is_supported", lambda: False)
    model, x = make(lambda: Model(depth=1)), batch()
    step = optimized(model, "0.5x")
    with pytest.warns(UserWarning, match=r"needs torch 2\.11 or later"):
        loss, _ = train(step, model, x)
    assert bool(loss > 0)


def test_a_compiled_plan_is_compared_explained_and_drawn_as_any_other(tmp_path) -> None:
    model, x = make(lambda: Model(depth=2)), batch()
    step = optimized(model, "0.9x")
    step(x)
    plan = remat.plan_of(step)
    assert plan.schedule is not None and plan.compiled is not None
    own, plain = plan.compare("none").rows
    assert own.peak_bytes == validate(plan.problem, plan.schedule)
    assert own.peak_bytes <= plain.peak_bytes, "both with what is there when the step begins"
    assert plan.predicted_peak == plan.compiled.peak_bytes <= plan.budget_bytes
    assert plan.explain().kept_bytes > 0
    assert plan.to_html(tmp_path / "plan.html").stat().st_size > 0


def test_parts_of_the_model_are_explained_by_the_names_they_have_in_eager() -> None:
    model, x = make(lambda: Model(depth=2)), batch()
    step = optimized(model, "0.9x")
    step(x)
    plan, eager = remat.plan_of(step), remat.plan(model, x, budget="0.9x")
    for part in ("blocks.0", "blocks.1.up"):
        assert {row.module for row in plan.explain(part).rows} <= {row.module for row in eager.explain(part).rows}
    assert {"blocks.0", "blocks.1"} <= {row.module for row in plan.explain().rows}


def test_unknown_compiler() -> None:
    with pytest.raises(RematError, match="no compiler 'nvfuser'"):
        remat.optimize(make(), "0.5x", compiler="nvfuser")


def test_torchs_own_cut_is_taken_where_the_solver_has_none(monkeypatch) -> None:
    def nothing(*args: Any, **options: Any) -> Any:
        raise InfeasibleBudget("Nothing fits; give more.", min_budget=1)

    monkeypatch.setattr("remat.inductor.decide.choose", nothing)
    model, x = make(lambda: Model(depth=2)), batch()
    step = optimized(model, "100x")
    train(step, model, x)
    assert remat.plan_of(step).compiled.is_default


def test_custom_op_whose_backward_reads_data_is_compiled_as_one_op_each_way() -> None:
    """As experts of transformers multiply where weights are in float32; torch.compile cannot follow that backward."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, **heads))
    tokens = torch.randint(128, (4, 64), generator=torch.Generator().manual_seed(1))

    def shares(called: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
        return train(lambda: called(input_ids=tokens, labels=tokens).loss, model)

    wanted = shares(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        step = optimized(model, "0.85x")
        found = shares(step)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    plan = remat.plan_of(step)

    def run() -> None:
        made = step(input_ids=tokens, labels=tokens)
        made.loss.backward()
        model.zero_grad()

    peak = remat.measure(run).peak_bytes
    assert peak <= plan.budget_bytes and abs(peak - plan.predicted_peak) <= 0.02 * peak


def test_graph_with_a_tensor_of_its_own_is_planned() -> None:
    """Written down in forward, as encoders and decoders of transformers do."""

    class Scaled(Model):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x * torch.tensor([0.5, 2.0] * 16))

    model = make(Scaled)
    step = remat.optimize(model, "0.7x", compiler="inductor", progress=False)
    train(step, model, batch())
    assert remat.plan_of(step).predicted_peak <= remat.plan_of(step).budget_bytes
    assert session_of(step).left_out == 0


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # what is raised inside Dynamo would end its tracing
def test_recurrent_layer_runs_as_it_is_and_what_is_around_is_planned() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.recurrent, self.last = nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(self.last(self.recurrent(x)[0])).square().mean()

    torch.manual_seed(0)
    plain, x = Recurrent(), torch.randn(4, 6, 8)
    model = copy.deepcopy(plain)
    step = remat.optimize(model, "1x", compiler="inductor", progress=False)
    for _ in range(2):
        plain(x).backward()
        step(x).backward()
    for parameter, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad, rtol=1e-5, atol=1e-7)
    assert remat.plan_of(step).predicted_peak > 0


@pytest.mark.filterwarnings("default")
def test_a_share_is_one_of_the_whole_step_where_a_graph_of_it_runs_twice() -> None:
    """What lies between two blocks of a kind is captured once; layers that run as they are belong to plain, too."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.recurrent, self.up, self.down = nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 32), nn.Linear(32, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(F.gelu(self.up(x + self.recurrent(x)[0])))

    class Stacked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.Sequential(Block(), Block(), Block())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.blocks(x).square().mean()

    model, x = make(Stacked), torch.randn(4, 16, 8)
    wanted = measured(model, model, x)
    step = optimized(model, "1x")
    for _ in range(3):
        train(step, model, x)
    session = session_of(step)
    assert len(set(session.planned)) < len(session.planned), "one graph runs more than once"
    assert remat.plan_of(step).plain_peak_bytes == wanted
