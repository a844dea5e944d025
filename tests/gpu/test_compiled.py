"""Compiled training on a CUDA device: the budget holds by the allocator's own peak, and masks are drawn again alike."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from benchmarks.frontier.workloads import LossInside
from torch import Tensor, nn

import remat

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fresh_device")]

ROUNDING = 2e-2
"""Of a gradient's norm: how far bf16 sums are apart that another cut fuses differently; another mask is far off."""


def gpt2() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """Dropout on everywhere, also inside attention."""
    config = transformers.GPT2Config(
        n_layer=6,
        n_embd=512,
        n_head=8,
        vocab_size=8192,
        n_positions=512,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    return LossInside(transformers.GPT2LMHeadModel(config)), _tokens(8192, 16, 512)


def llama() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    config = transformers.LlamaConfig(
        num_hidden_layers=6,
        hidden_size=512,
        intermediate_size=2048,
        num_attention_heads=8,
        num_key_value_heads=2,
        vocab_size=8192,
        max_position_embeddings=512,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    return LossInside(transformers.LlamaForCausalLM(config)), _tokens(8192, 16, 512)


def resnet() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    config = transformers.ResNetConfig(num_labels=64, depths=[2, 2, 2, 2])
    model = LossInside(transformers.ResNetForImageClassification(config))
    return model, (torch.randn(32, 3, 128, 128, device="cuda"), torch.randint(64, (32,), device="cuda"))


MODELS = {"gpt2": gpt2, "llama": llama, "resnet": resnet}
BUDGETS = {"resnet": ("0.75x",)}
FULL_PRECISION = ("resnet",)
"""In bf16 its gradients are two thirds noise, in eager too: batch norms of an untrained net magnify rounding."""


def _tokens(vocabulary: int, batch: int, length: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(vocabulary, (batch, length), device="cuda")
    return tokens, tokens


def train(step: Any, model: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, list[Tensor]]:
    torch.manual_seed(7)
    # Whoever wants full precision turns off all that is less.
    with torch.autocast("cuda", torch.bfloat16, enabled=torch.backends.cudnn.allow_tf32):
        loss = step(*args)
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad(set_to_none=True)
    return loss.detach(), gradients


def measured(step: Any, model: nn.Module, args: tuple[Tensor, ...]) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    train(step, model, args)
    return torch.cuda.max_memory_allocated()


def apart(found: list[Tensor], wanted: list[Tensor]) -> float:
    """The largest difference of a gradient as a share of its norm."""
    return max(float((a - b).norm() / b.norm().clamp_min(1e-6)) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("name", MODELS)
def test_budget_prediction_and_gradients(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", name not in FULL_PRECISION)
    torch.manual_seed(0)
    model, args = MODELS[name]()
    model.cuda().train()
    loss, kept = train(remat.optimize(model, "100x", compiler="inductor", progress=False), model, args)
    for budget in BUDGETS.get(name, ("0.7x", "0.5x")):
        torch._dynamo.reset()
        step = remat.optimize(model, budget, compiler="inductor", progress=False)
        found, gradients = train(step, model, args)
        plan = remat.plan_of(step)
        assert plan.compiled is not None
        assert apart([found], [loss]) < ROUNDING
        assert apart(gradients, kept) < ROUNDING, f"{name} at {budget}"
        del gradients
        peak = measured(step, model, args)
        assert peak <= plan.budget_bytes, f"{name} at {budget}"
        assert abs(peak - plan.predicted_peak) <= 0.02 * peak, f"{name} at {budget}: {plan.predicted_peak} of {peak}"
