"""What users of torch.compile have on a CUDA device: modes, attention of their own, kernels of their own, recurrent
layers, and lengths that change."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F
from torch import Tensor, nn

import remat

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fresh_device")]


class Around(nn.Module):
    """Something of the user's between layers whose activations can be made again."""

    def __init__(self, inner: nn.Module, width: int = 256, depth: int = 4) -> None:
        super().__init__()
        self.inner = nn.ModuleList(copy.deepcopy(inner) for _ in range(depth))
        self.up = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(depth))
        self.down = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for inner, up, down in zip(self.inner, self.up, self.down, strict=True):
            x = x + inner(x)
            x = x + down(F.gelu(up(x)))
        return x.square().mean()


class Attention(nn.Module):
    """FlexAttention with a bias and a mask of its own."""

    def __init__(self, width: int = 256, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.qkv = heads, nn.Linear(width, 3 * width)

    def forward(self, x: Tensor) -> Tensor:
        from torch.nn.attention.flex_attention import flex_attention

        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)

        def slope(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return torch.where(i >= j, score - 0.01 * (i - j), -float("inf"))

        return flex_attention(q, k, v, score_mod=slope).transpose(1, 2).reshape(batch, length, width)


def scaled_kernel() -> Any:
    """A Triton kernel of the user's as an op with a backward of its own."""
    triton = pytest.importorskip("triton")
    from tests.gpu.triton_kernel import double

    @torch.library.triton_op("remat_tests::doubled", mutates_args={})
    def doubled(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        torch.library.wrap_triton(double)[(triton.cdiv(x.numel(), 1024),)](x, out, x.numel(), BLOCK=1024)
        return out

    doubled.register_autograd(lambda ctx, grad: 2 * grad)
    return doubled


class Doubled(nn.Module):
    op: Any = None

    def forward(self, x: Tensor) -> Tensor:
        return type(self).op(x.tanh())


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(256, 256, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]


def train(step: Any, model: nn.Module, x: Tensor) -> list[Tensor]:
    loss = step(x)
    loss.backward()
    found = [loss.detach().clone(), *(parameter.grad for parameter in model.parameters())]
    model.zero_grad()
    return found


def check(inner: nn.Module, budget: str = "0.75x", **options: Any) -> nn.Module:
    """Gradients as in plain eager, and two further steps within the budget."""
    torch.manual_seed(0)
    model, x = Around(inner).cuda(), torch.randn(16, 512, 256, device="cuda")
    wanted = train(model, model, x)
    step = remat.optimize(model, budget, compiler="inductor", time_limit=5, progress=False, **options)
    train(step, model, x)
    found = train(step, model, x)
    for one, other in zip(found, wanted, strict=True):
        assert (one - other).norm() <= 2e-2 * other.norm()
    del found, wanted, one, other
    plan = remat.plan_of(step)
    torch.cuda.reset_peak_memory_stats()
    train(step, model, x)
    assert torch.cuda.max_memory_allocated() <= plan.budget_bytes
    return step


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_flex_attention_is_planned() -> None:
    check(Attention())


def test_a_kernel_of_the_users_is_planned() -> None:
    Doubled.op = scaled_kernel()
    check(Doubled())


@pytest.mark.filterwarnings("ignore")
def test_a_recurrent_layer_runs_and_what_is_around_is_within_the_budget() -> None:
    # cuDNN's layers hold nearly all of this step themselves, and no plan makes that less.
    check(Recurrent(), "1x")


@pytest.mark.filterwarnings("ignore:mode=.* asks for CUDA graphs")
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("mode", ["max-autotune", "reduce-overhead"])
def test_modes_of_torch_compile_hold_the_budget(mode: str) -> None:
    check(nn.Linear(256, 256), mode=mode)


def test_lengths_that_change_share_code_within_the_budget() -> None:
    torch.manual_seed(0)
    model = Around(nn.LayerNorm(256)).cuda()
    step = remat.optimize(
        model, "0.75x", compiler="inductor", time_limit=5, progress=False, dynamic={"length": (64, 1024)}
    )
    peaks = []
    for length in (640, 1024, 100, 777):
        x = torch.randn(8, length, 256, device="cuda")
        wanted = train(model, model, x)
        train(step, model, x)
        for one, other in zip(train(step, model, x), wanted, strict=True):
            assert (one - other).norm() <= 2e-2 * other.norm()
        del wanted, one, other
        torch.cuda.reset_peak_memory_stats()
        train(step, model, x)
        peaks.append(torch.cuda.max_memory_allocated())
        del x
    assert max(peaks) <= remat.plan_of(step).budget_bytes


@pytest.mark.filterwarnings(r"ignore:\s*Online softmax is disabled")
def test_experts_with_weights_in_float32_are_planned_as_one_graph() -> None:
    """torch.compile leaves it in pieces: the backward of transformers' product by groups reads data."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, **heads)).cuda()
    tokens = torch.randint(512, (8, 256), device="cuda")

    def loss_of(called: Any) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            loss: Tensor = called(input_ids=tokens, labels=tokens).loss
        return loss

    wanted = float(loss_of(model).detach())
    step = remat.optimize(model, "0.8x", compiler="inductor", progress=False)
    for _ in range(3):
        loss = loss_of(step)
        loss.backward()
        model.zero_grad()
    assert abs(float(loss.detach()) - wanted) < 0.01 * wanted
    torch.cuda.reset_peak_memory_stats()
    loss_of(step).backward()
    plan = remat.plan_of(step)
    assert len(plan.fingerprint.graph_hashes) == 1
    assert torch.cuda.max_memory_allocated() <= plan.budget_bytes
