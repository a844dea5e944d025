"""Dry runs of what Inductor really compiles for the CPU, against the measured peak."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch._inductor.compile_fx import compile_fx, compile_fx_inner

from remat import zoo
from remat.inductor.dry_run.compiled import Compiled, recording
from remat.inductor.dry_run.run import dry_run
from remat.inductor.dry_run.timeline import KernelTimeline
from remat.inductor.dry_run.workspaces import Workspaces
from remat.pytorch.measure.measure_step import measure_once

CPU = torch.device("cpu")
COMPILED_MODELS = tuple(name for name in zoo.REGISTRY if name != "lstm")
"""Dynamo does not trace recurrent layers."""


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Dropout(0.2))
        self.second = nn.Conv2d(16, 8, 3, padding=1)

    def forward(self, images: Any) -> Any:
        return self.second(self.layers(images)).square().mean()


class Head(nn.Module):
    """Returns more than a scalar: the gradient that comes in is large."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 256), nn.Linear(256, 128)

    def forward(self, features: Any) -> Any:
        return self.second(torch.relu(self.first(features)))


def compiled_with(found: list[Compiled], model: nn.Module) -> Any:
    def backend(graph: Any, inputs: Any) -> Any:
        return compile_fx(graph, inputs, inner_compile=recording(compile_fx_inner, found))

    return torch.compile(model, backend=backend, fullgraph=True)


@contextmanager
def plain_settings() -> Iterator[None]:
    ignored = {logging.Logger.warning_once} if hasattr(logging.Logger, "warning_once") else set()
    torch._dynamo.reset()
    with ExitStack() as stack:
        # A hit would hand over the compiled graphs without asking for them to be compiled.
        stack.enter_context(functorch_config.patch(enable_autograd_cache=False))
        # Kernels of scalars compile faster, and memory does not depend on it.
        stack.enter_context(inductor_config.patch({"cpp.simdlen": 1}))
        stack.enter_context(torch._dynamo.config.patch(ignore_logging_functions=ignored))
        yield
    torch._dynamo.reset()


def dry_and_measured(
    model: nn.Module, args: Any, step: Callable[..., Any], device: torch.device = CPU, **options: Any
) -> tuple[KernelTimeline, int, list[Compiled]]:
    """The dry run, and the peak of a second step, once everything is compiled."""
    found: list[Compiled] = []
    with plain_settings():
        fast = compiled_with(found, model)
        step(fast, *args)
        model.zero_grad(set_to_none=True)
        measured = measure_once(step, fast, *args)
    model.zero_grad(set_to_none=True)
    forward, backward = found
    workspaces = Workspaces(device)
    timeline = dry_run(
        forward, backward, device=device, resident_bytes=measured.timeline[0], workspace_of=workspaces, **options
    )
    return timeline, measured.peak_bytes, found


def train(model: Any, *args: Any, **kwargs: Any) -> None:
    model(*args, **kwargs).backward()


def train_outside(model: Any, *args: Any) -> None:
    model(*args).mul(2).sum().backward()


def test_a_convolution_with_its_workspace_is_told_to_the_byte() -> None:
    timeline, measured, _ = dry_and_measured(ConvNet(), (torch.randn(4, 3, 24, 24),), train)
    assert timeline.peak_bytes == measured
    assert any(call.workspace_bytes for call in timeline.calls)
    assert timeline.resident_bytes + sum(buffer.size_bytes for buffer in timeline.alive) <= timeline.peak_bytes


def test_a_large_gradient_that_comes_in_dies_where_the_code_drops_it() -> None:
    timeline, measured, (forward, backward) = dry_and_measured(Head(), (torch.randn(512, 64),), train_outside, kept=())
    # The caller's own sum of one number and autograd's gradient for it are not in the graph.
    assert measured - timeline.peak_bytes == 8
    assert not forward.is_backward and backward.is_backward


@pytest.mark.slow
def test_a_language_model_is_told_to_the_byte() -> None:
    example = zoo.build("gpt", depth=1)
    timeline, measured, _ = dry_and_measured(example.model, example.args, train)
    assert timeline.peak_bytes == measured


@pytest.mark.slow
def test_a_graph_from_the_cache_is_followed_alike() -> None:
    model, images = ConvNet(), torch.randn(4, 3, 24, 24)
    first, _, compiled = dry_and_measured(model, (images,), train)
    again, _, cached = dry_and_measured(model, (images,), train)
    assert [graph.source for graph in cached] == [graph.source for graph in compiled]
    assert again == first


@pytest.mark.long
@pytest.mark.parametrize("name", COMPILED_MODELS)
def test_every_model_of_the_zoo_is_told_to_the_byte(name: str) -> None:
    example = zoo.build(name)
    timeline, measured, _ = dry_and_measured(example.model, example.args, partial(train, **example.kwargs))
    assert timeline.peak_bytes == measured


@pytest.mark.long
def test_gpt2_of_transformers_is_told_to_the_byte() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=2, n_embd=64, n_head=4, vocab_size=128, n_positions=64, bos_token_id=0, eos_token_id=0, use_cache=False
    )

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = transformers.GPT2LMHeadModel(config)

        def forward(self, tokens: Any) -> Any:
            return self.inner(input_ids=tokens, labels=tokens).loss

    timeline, measured, _ = dry_and_measured(WithLoss().train(), (torch.randint(128, (4, 64)),), train)
    assert timeline.peak_bytes == measured


@pytest.mark.gpu
@pytest.mark.parametrize("name", COMPILED_MODELS)
def test_every_model_of_the_zoo_is_told_within_two_percent_on_a_gpu(name: str) -> None:
    example = zoo.build(name, scale="demo", device="cuda")
    step = partial(train, **example.kwargs)
    timeline, measured, _ = dry_and_measured(example.model, example.args, step, torch.device("cuda"))
    assert abs(timeline.peak_bytes - measured) <= max(0.02 * measured, timeline.slack_bytes)
