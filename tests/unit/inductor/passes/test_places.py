"""What a kernel of its own reads is computed where it stands."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor.scheduler import Scheduler
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from remat.inductor._compat.compiling import compile_fx, compile_half
from remat.inductor._compat.kernels import COMPUTED_HERE, computing_where_told, order_for_attention
from remat.inductor.dry_run.compiled import Compiled, recording
from remat.inductor.passes.places import keep_places


def between(x: Tensor, other: Tensor, weight: Tensor) -> Tensor:
    """The gradient of a normalization waits for what is made again of another tensor."""
    gradient = x * 2 + 1
    again = other @ weight
    return gradient @ again


def at_once(x: Tensor, other: Tensor, weight: Tensor) -> Tensor:
    again = other @ weight
    gradient = x * 2 + 1
    return gradient @ again


def marked(step: Any) -> list[str]:
    module = make_fx(step, tracing_mode="fake")(*(torch.randn(8, 8) for _ in range(3)))
    keep_places(module)
    return [str(node.target) for node in module.graph.nodes if node.meta.get(COMPUTED_HERE)]


def test_what_waits_for_another_kernel_is_computed_where_it_stands() -> None:
    assert marked(between) == ["aten.add.Tensor"], "the end of the chain alone"
    assert marked(at_once) == []


def test_views_are_looked_through() -> None:
    def step(x: Tensor, other: Tensor, weight: Tensor) -> Tensor:
        gradient = (x * 2).t()
        again = other @ weight
        return gradient @ again

    assert marked(step) == ["aten.mul.Tensor"]


@pytest.mark.parametrize(
    ("is_told", "order"),
    [(False, ["product", "chain", "product"]), (True, ["chain", "product", "product"])],
    ids=["by itself", "told"],
)
def test_inductor_writes_it_out_there(is_told: bool, order: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The order in the code is that of the graph; Inductor's own would begin with the product."""
    inputs = [torch.randn(8, 8) for _ in range(3)]
    seen: list[str] = []
    before = Scheduler.codegen

    def codegen(scheduler: Scheduler) -> None:
        seen.extend("product" if node.is_extern() else "chain" for node in scheduler.nodes)
        before(scheduler)

    def compile_told(half: GraphModule, given: Any, **options: Any) -> Any:
        if is_told:
            keep_places(half)
        return compile_half(half, given, **options)

    monkeypatch.setattr(Scheduler, "codegen", codegen)
    patches = {"fx_graph_cache": False, "reorder_for_peak_memory": False}
    with computing_where_told(), torch.no_grad():
        call = compile_fx(
            make_fx(between, tracing_mode="fake")(*inputs), inputs, inner_compile=compile_told, config_patches=patches
        )
        torch.testing.assert_close(call(*inputs), between(*inputs))
    assert seen == order


def turned(x: Tensor, weight: Tensor) -> Tensor:
    """Queries that are read heads first, as rotary embeddings compute them."""
    rows = x @ weight
    queries = rows.view(2, 8, 4, 8).transpose(1, 2) * 2
    keys = (rows @ weight).view(2, 8, 4, 8).transpose(1, 2) * 3
    return torch.nn.functional.scaled_dot_product_attention(queries, keys, keys).transpose(1, 2).reshape(2, 8, 32)


def test_what_attention_reads_is_laid_out_as_it_has_it() -> None:
    """Inductor lays out anew only what is not in memory yet; what we put there has to be right."""
    inputs = [torch.randn(2, 8, 32), torch.randn(32, 32)]
    module = make_fx(turned, tracing_mode="fake")(*inputs)
    keep_places(module)
    told = [node for node in module.graph.nodes if node.meta.get(COMPUTED_HERE)]
    assert [order_for_attention(node) for node in told] == [(3, 1, 2, 0)]
    assert order_for_attention(told[0].all_input_nodes[0]) is None, "attention does not read it"

    def compile_told(half: GraphModule, given: Any, **options: Any) -> Any:
        keep_places(half)
        return compile_half(half, given, **options)

    with computing_where_told(), torch.no_grad():
        call = compile_fx(module, inputs, inner_compile=compile_told, config_patches={"fx_graph_cache": False})
        torch.testing.assert_close(call(*inputs), turned(*inputs))


def test_what_attention_adds_is_left_to_inductor() -> None:
    """It aligns the rows of a bias as it is read; were its layout settled before, it would be copied."""

    def biased(x: Tensor, bias: Tensor) -> Tensor:
        return torch.ops.aten._scaled_dot_product_efficient_attention(x * 2, x, x, bias.transpose(1, 2) * 2, True)[0]

    inputs = torch.randn(2, 4, 8, 8, device="meta"), torch.randn(2, 8, 4, 8, device="meta")
    graph = make_fx(biased)(*inputs).graph
    query, bias = (node for node in graph.nodes if node.target is torch.ops.aten.mul.Tensor)
    (attention,) = bias.users
    assert attention.args[0] is query and attention.args[3] is bias
    assert order_for_attention(query) == (3, 2, 1, 0)
    assert order_for_attention(bias) is None


def of_awkward_rows(x: Tensor, other: Tensor, weight: Tensor) -> Tensor:
    """As gradients of logits, between which and whoever reads them something else is computed."""
    gradient = (x * 2 + 1).view(64, 1031)
    again = other @ other
    return (gradient @ weight) @ again


def test_rows_of_awkward_sizes_are_as_far_apart_as_inductor_has_them() -> None:
    inputs = [torch.randn(2, 32, 1031), torch.randn(8, 8), torch.randn(1031, 8)]
    codes: list[Compiled] = []

    def compile_told(half: GraphModule, given: Any, **options: Any) -> Any:
        keep_places(half)
        assert any(node.meta.get(COMPUTED_HERE) for node in half.graph.nodes)
        return recording(compile_half, codes)(half, given, **options)

    patches = {"fx_graph_cache": False, "disable_padding_cpu": False}
    with computing_where_told(), torch.no_grad():
        module = make_fx(of_awkward_rows, tracing_mode="fake")(*inputs)
        call = compile_fx(module, inputs, inner_compile=compile_told, config_patches=patches)
        torch.testing.assert_close(call(*inputs), of_awkward_rows(*inputs), rtol=1e-4, atol=1e-3)
    assert " 1056, 1)" in codes[0].source, "to whole lines of memory"
