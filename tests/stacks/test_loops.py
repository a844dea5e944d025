"""Loops of one's own with Accelerate, PEFT and diffusers around or inside an optimized model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.stacks.nets import LENGTH, WORDS, Net, samples, small_gpt
from torch.nn import functional

import remat
from remat.pytorch.measure.measure_step import measure_once

pytestmark = [
    pytest.mark.slow,
    # What the other libraries say of each other and of torch.
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False:UserWarning"),
]
Step = Callable[[], Any]


def trained(step: Step, optimizer: Any, steps: int = 4) -> tuple[list[float], int]:
    """The losses of a few steps, and what the last of them needed before its update."""
    torch.manual_seed(1)
    losses, peak = [], 0
    for number in range(steps):
        if number < steps - 1:
            losses.append(float(step()))
        else:
            # With the optimizer, for its state to be counted.
            peak = measure_once(lambda _: losses.append(float(step())), optimizer).peak_bytes
        optimizer.step()
        optimizer.zero_grad()
    return losses, peak


def optimized(model: Any, budget: str) -> Any:
    return remat.optimize(model, budget, time_limit=1.0) if budget else model


@pytest.mark.parametrize("prepared_first", [False, True], ids=["optimized first", "prepared first"])
def test_accelerate_trains_the_same_within_the_budget(prepared_first: bool, budget: str, tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")

    def build(share: str) -> tuple[Any, tuple[Step, Any]]:
        torch.manual_seed(0)
        model: Any = Net()
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
        accelerator = accelerate.Accelerator(cpu=True)
        if prepared_first:
            model, optimizer = accelerator.prepare(model, optimizer)
            model = optimized(model, share)
        else:
            model, optimizer = accelerator.prepare(optimized(model, share), optimizer)
        batch = samples(256)

        def step() -> Any:
            loss = model(*batch)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            return loss.detach()

        return model, (step, optimizer)

    (plain, plain_step), (model, step) = build(""), build(budget)
    expected, (losses, peak) = trained(*plain_step), trained(*step)
    assert losses == expected[0] and peak <= remat.plan_of(model).budget_bytes
    accelerate.Accelerator(cpu=True).save_model(model, tmp_path)
    loaded = Net()
    accelerate.load_checkpoint_in_model(loaded, str(tmp_path))
    assert all(torch.equal(value, plain.state_dict()[name]) for name, value in loaded.state_dict().items())


def test_lora_of_peft_trains_the_same_within_the_budget(budget: str, tmp_path: Path) -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    words = torch.randint(WORDS, (8, LENGTH), generator=torch.Generator().manual_seed(0))

    def build(share: str) -> tuple[Any, Any, tuple[Step, Any]]:
        adapted = peft.get_peft_model(small_gpt(transformers), peft.LoraConfig(task_type="CAUSAL_LM", r=4))
        model = optimized(adapted, budget)
        optimizer = torch.optim.AdamW([item for item in adapted.parameters() if item.requires_grad], lr=1e-3)

        def step() -> Any:
            loss = model(input_ids=words, labels=words).loss
            loss.backward()
            return loss.detach()

        return adapted, model, (step, optimizer)

    (plain, _, plain_step), (adapted, model, step) = build(""), build(budget)
    expected, (losses, peak) = trained(*plain_step), trained(*step)
    assert losses == expected[0] and peak <= remat.plan_of(model).budget_bytes
    adapted.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(small_gpt(transformers), tmp_path)
    assert all(torch.equal(value, plain.state_dict()[name]) for name, value in loaded.state_dict().items())


def test_unet_of_diffusers_trains_the_same_within_the_budget(budget: str, tmp_path: Path) -> None:
    diffusers = pytest.importorskip("diffusers")
    generator = torch.Generator().manual_seed(0)
    noisy, noise = (torch.randn(4, 3, 16, 16, generator=generator) for _ in range(2))
    times = torch.randint(1000, (4,), generator=generator)

    def build(share: str) -> tuple[Any, Any, tuple[Step, Any]]:
        torch.manual_seed(0)
        blocks = dict(down_block_types=("DownBlock2D",) * 2, up_block_types=("UpBlock2D",) * 2, layers_per_block=1)
        unet = diffusers.UNet2DModel(sample_size=16, block_out_channels=(8, 16), norm_num_groups=4, **blocks)
        model = optimized(unet, share)
        optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-3)

        def step() -> Any:
            loss = functional.mse_loss(model(noisy, times).sample, noise)
            loss.backward()
            return loss.detach()

        return unet, model, (step, optimizer)

    (plain, _, plain_step), (unet, model, step) = build(""), build(budget)
    expected, (losses, peak) = trained(*plain_step), trained(*step)
    # The model is never shown the noise: only the loss outside of it says that it is there.
    assert losses == expected[0] and peak <= remat.plan_of(model).budget_bytes
    unet.save_pretrained(tmp_path)
    loaded = diffusers.UNet2DModel.from_pretrained(tmp_path)
    assert all(torch.equal(value, plain.state_dict()[name]) for name, value in loaded.state_dict().items())
