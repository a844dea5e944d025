"""The built-in models of the demo, tests and benchmarks.

In: a name of `REGISTRY`, a scale and sizes. Out: an `Example`, a model with a batch whose call returns the loss.
Each model is one file that states its sizes: "tiny" runs in a test, "demo" takes about a second a step on two cores.
Activations, not parameters, dominate the memory of most, so that recomputation has something to save; ResNets have the
width of published ones at "demo", and as much in parameters.
`PRESETS` name models of a published size, for estimates on fake tensors.
Nothing is downloaded; torch is imported when a model is built.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from remat.errors import MissingExtra, UnknownName
from remat.zoo.example import Example

__all__ = ["PRESETS", "REGISTRY", "SCALES", "SMALL_IMAGES", "Example", "build"]

SCALES = ("tiny", "demo")
PRESETS: Mapping[str, tuple[str, str]] = {
    "llama-1b": ("llama", "1b"),
    "llama-8b": ("llama", "8b"),
    "llama-70b": ("llama", "70b"),
}
"""Names that stand for a model at one scale of its own."""
SMALL_IMAGES: Mapping[str, float] = dict(batch=48, side=56, width=24, shrink=1)
"""Of a ResNet-18 that can be trained in half its memory: of one for photographs the first layer alone is that much."""


def build(name: str, *, scale: str = "tiny", device: str = "cpu", seed: int = 0, **sizes: float) -> Example:
    """The model `name` with random weights and a random batch; `sizes` override those of the scale."""
    if name not in (*REGISTRY, *PRESETS):
        raise UnknownName(f"No model is called {name!r}; the zoo has {', '.join((*REGISTRY, *PRESETS))}.")
    if name in PRESETS:
        name, scale = PRESETS[name]
    elif scale not in SCALES:
        raise UnknownName(f"No scale is called {scale!r}; choose one of {', '.join(SCALES)}.")
    torch = _import_torch()
    # Weights are drawn on the CPU so that a seed means the same model on every device.
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        example = REGISTRY[name](scale, sizes)
    if device == "cpu":
        return example
    return Example(
        model=example.model.to(device),
        args=tuple(value.to(device) for value in example.args),
        kwargs={key: value.to(device) for key, value in example.kwargs.items()},
    )


def _import_torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise MissingExtra("The zoo builds PyTorch models; install `remat[torch]`.") from error
    return torch


def _choose(name: str, defaults: Mapping[str, float], sizes: Mapping[str, float]) -> dict[str, Any]:
    unknown = [size for size in sizes if size not in defaults]
    if unknown:
        raise UnknownName(f"The model {name!r} has no size {unknown[0]!r}; it has {', '.join(defaults)}.")
    return {**defaults, **sizes}


def _gpt(scale: str, sizes: Mapping[str, float]) -> Example:
    from remat.zoo import gpt

    return gpt.example(**_choose("gpt", gpt.SIZES[scale], sizes))


def _bert(scale: str, sizes: Mapping[str, float]) -> Example:
    from remat.zoo import bert

    return bert.example(**_choose("bert", bert.SIZES[scale], sizes))


def _vit(scale: str, sizes: Mapping[str, float]) -> Example:
    from remat.zoo import vit

    return vit.example(**_choose("vit", vit.SIZES[scale], sizes))


def _resnet18(scale: str, sizes: Mapping[str, float]) -> Example:
    from remat.zoo import resnet

    return resnet.example_18(**_choose("resnet18", resnet.SIZES_18[scale], sizes))


def _resnet50(scale: str, sizes: Mapping[str, float]) -> Example:
    from remat.zoo import resnet

    return resnet.example_50(**_choose("resnet50", resnet.SIZES_50[scale], sizes))


def _unet(scale: str, sizes: Mapping[str, float]) -> Example:
    from remat.zoo import unet

    return unet.example(**_choose("unet", unet.SIZES[scale], sizes))


def _lstm(scale: str, sizes: Mapping[str, float]) -> Example:
    from remat.zoo import lstm

    return lstm.example(**_choose("lstm", lstm.SIZES[scale], sizes))


def _llama(scale: str, sizes: Mapping[str, float]) -> Example:
    from remat.zoo import llama

    return llama.example(**_choose("llama", llama.SIZES[scale], sizes))


def _mlp(scale: str, sizes: Mapping[str, float]) -> Example:
    from remat.zoo import mlp

    return mlp.example(**_choose("mlp", mlp.SIZES[scale], sizes))


REGISTRY: Mapping[str, Callable[[str, Mapping[str, float]], Example]] = {
    "gpt": _gpt,
    "bert": _bert,
    "vit": _vit,
    "resnet18": _resnet18,
    "resnet50": _resnet50,
    "unet": _unet,
    "lstm": _lstm,
    "mlp": _mlp,
    "llama": _llama,
}
