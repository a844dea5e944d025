"""transformers builds masks under tracing that it leaves out in eager; a planned step leaves them out too."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tests.support.models import build_transformers
from tests.support.steps import differences, record

import remat
from remat.integrations.loss_only import LossOnly
from remat.zoo import Example


def without_cache() -> Example:
    """Without keys and values of earlier tokens, transformers asks whether sequences are packed."""
    example = build_transformers("gpt2")
    example.model.config.use_cache = False
    return example


def targets_of(model: torch.nn.Module) -> set[str]:
    return {op.target for op in remat.plan_of(model).problem.graph.ops}


def test_no_mask_is_built_where_the_model_counts_its_positions() -> None:
    example = without_cache()
    eager = record(example.model, example, {})
    optimized = remat.optimize(example.model, "50x")
    assert differences(eager, record(optimized, example, {})) == []
    assert not {"aten.le.Tensor", "aten.bitwise_and.Tensor"} & targets_of(optimized)


def test_a_model_that_returns_only_its_loss_has_no_mask_either() -> None:
    example = without_cache()
    labelled = Example(LossOnly(example.model), (), {**example.kwargs, "labels": example.kwargs["input_ids"]})
    eager = record(labelled.model, labelled, {})
    optimized = remat.optimize(labelled.model, "50x")
    assert differences(eager, record(optimized, labelled, {})) == []
    assert not {"aten.le.Tensor", "aten.bitwise_and.Tensor"} & targets_of(optimized)


def test_packed_sequences_keep_their_mask() -> None:
    example = without_cache()
    batch, length = example.kwargs["input_ids"].shape
    positions = (torch.arange(length) % (length // 2)).expand(batch, length)
    packed = Example(example.model, (), {**example.kwargs, "position_ids": positions})
    eager = record(packed.model, packed, {})
    whole = record(example.model, example, {})
    assert differences(whole, eager) != []
    optimized = remat.optimize(packed.model, "50x")
    found = record(optimized, packed, {})
    assert torch.allclose(found["output 0"], eager["output 0"], rtol=1e-5)
    assert "aten.le.Tensor" in targets_of(optimized)
    # The same module without positions is another step, and is traced again.
    assert differences(whole, record(optimized, example, {})) == []


class Wrapped(torch.nn.Module):
    """A model inside the user's own module, with a loss of their own."""

    def __init__(self, model: torch.nn.Module, *, packed: bool = False) -> None:
        super().__init__()
        self.model, self.packed = model, packed

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        places = torch.arange(ids.shape[1])
        positions = {"position_ids": (places % 8).unsqueeze(0).expand_as(ids)} if self.packed else {}
        logits = self.model(input_ids=ids, **positions).logits
        return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def test_model_inside_a_module_of_the_user_has_no_mask_either() -> None:
    example = without_cache()
    inside = Example(Wrapped(example.model), (example.kwargs["input_ids"],))
    eager = record(inside.model, inside, {})
    optimized = remat.optimize(inside.model, "50x")
    assert differences(eager, record(optimized, inside, {})) == []
    assert not {"aten.le.Tensor", "aten.bitwise_and.Tensor"} & targets_of(optimized)


def test_model_inside_a_function_of_the_user_has_no_mask_either() -> None:
    example = without_cache()
    model, ids = Wrapped(example.model), example.kwargs["input_ids"]

    def step(ids: torch.Tensor) -> torch.Tensor:
        loss = model(ids)
        loss.backward()
        return loss.detach()

    optimized = remat.optimize(step, "100GiB")
    torch.manual_seed(0)
    planned = optimized(ids)
    torch.manual_seed(0)
    assert torch.equal(planned, step(ids))
    assert not {"aten.le.Tensor", "aten.bitwise_and.Tensor"} & targets_of(optimized)


def test_sequences_that_the_module_packs_itself_keep_their_mask() -> None:
    example = without_cache()
    inside = Example(Wrapped(example.model, packed=True), (example.kwargs["input_ids"],))
    eager = record(inside.model, inside, {})
    optimized = remat.optimize(inside.model, "50x")
    found = record(optimized, inside, {})
    assert torch.allclose(found["output 0"], eager["output 0"], rtol=1e-5)
    assert "aten.le.Tensor" in targets_of(optimized)
