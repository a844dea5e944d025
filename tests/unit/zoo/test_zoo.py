"""Every zoo model: it trains, it is the same for the same seed, and its memory is mostly activations."""

from __future__ import annotations

import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from remat import zoo
from remat.errors import UnknownName

NAMES = tuple(zoo.REGISTRY)
WITH_DROPOUT = ("gpt", "bert", "vit", "lstm", "mlp")
LOGITS_SHAPE = {
    "gpt": (16, 64, 64),
    "bert": (16, 64, 64),
    "vit": (16, 10),
    "resnet18": (32, 10),
    "resnet50": (8, 10),
    "unet": (8, 4, 48, 48),
    "lstm": (32, 32, 64),
    "mlp": (2048, 10),
    "llama": (16, 64, 64),
}


def loss_of(example: zoo.Example) -> torch.Tensor:
    return example.model(*example.args, **example.kwargs)


@pytest.mark.parametrize("name", NAMES)
def test_loss_is_a_finite_scalar_with_a_gradient_for_every_parameter(name: str) -> None:
    example = zoo.build(name)
    loss = loss_of(example)
    loss.backward()
    assert loss.shape == ()
    assert torch.isfinite(loss)
    assert all(parameter.grad is not None for parameter in example.model.parameters())


@pytest.mark.parametrize("name", NAMES)
def test_logits_come_out_when_no_targets_are_given(name: str) -> None:
    example = zoo.build(name)
    inputs = example.args if example.kwargs else example.args[:-1]
    assert tuple(example.model(*inputs).shape) == LOGITS_SHAPE[name]


@pytest.mark.parametrize("name", NAMES)
def test_same_seed_gives_the_same_model_and_batch(name: str) -> None:
    first, second = zoo.build(name, seed=3), zoo.build(name, seed=3)
    pairs = zip(first.model.parameters(), second.model.parameters(), strict=True)
    assert all(torch.equal(left, right) for left, right in pairs)
    assert all(torch.equal(left, right) for left, right in zip(first.args, second.args, strict=True))


def test_another_seed_gives_another_batch() -> None:
    assert not torch.equal(zoo.build("mlp", seed=0).args[0], zoo.build("mlp", seed=1).args[0])


def test_building_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    zoo.build("mlp")
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("name", WITH_DROPOUT)
def test_dropout_makes_two_forward_passes_differ_until_eval(name: str) -> None:
    example = zoo.build(name)
    assert not torch.equal(loss_of(example), loss_of(example))
    example.model.eval()
    assert torch.equal(loss_of(example), loss_of(example))


@pytest.mark.parametrize("name", NAMES)
def test_tiny_saves_at_least_three_times_as_many_activation_bytes_as_parameters_and_gradients(name: str) -> None:
    example = zoo.build(name)
    parameter_bytes = sum(parameter.nbytes for parameter in example.model.parameters())
    assert saved_bytes(example) > 3 * 2 * parameter_bytes


def saved_bytes(example: zoo.Example) -> int:
    """Bytes of distinct storages, parameters apart, that the forward pass keeps for the backward pass."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in example.model.parameters()}
    sizes: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = loss_of(example)
    del loss
    return sum(size for address, size in sizes.items() if address not in parameters)


def test_sizes_override_those_of_the_scale() -> None:
    example = zoo.build("gpt", depth=2, length=16)
    assert len(example.model.layers) == 2
    assert example.args[0].shape == (16, 16)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: zoo.build("alexnet"), "No model is called 'alexnet'; the zoo has gpt, bert"),
        (lambda: zoo.build("gpt", scale="huge"), "No scale is called 'huge'; choose one of tiny, demo"),
        (lambda: zoo.build("mlp", colour=3), "The model 'mlp' has no size 'colour'; it has batch, width"),
    ],
)
def test_unknown_names_are_refused_with_the_known_ones(call, message: str) -> None:
    with pytest.raises(UnknownName, match=message):
        call()


def test_importing_the_zoo_does_not_import_torch() -> None:
    code = "import sys, remat.zoo; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_stem_for_photographs_quarters_the_image() -> None:
    model = zoo.build("resnet50", side=64, shrink=4).model
    assert model.stem(torch.zeros(1, 3, 64, 64)).shape[-2:] == (16, 16)


def test_stem_that_does_not_exist_is_refused() -> None:
    with pytest.raises(UnknownName, match="choose 1 or 4"):
        zoo.build("resnet18", shrink=3)
