"""Small networks for jax, with and without a library: (loss, parameters, batch) each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Case = tuple[Callable[..., Any], Any, tuple[Any, ...]]


def weights(seed: int) -> Callable[..., Any]:
    rng = np.random.default_rng(seed)
    return lambda *shape: jnp.asarray(rng.normal(size=shape, scale=1 / np.sqrt(shape[0])), jnp.float32)


def words(batch: int, length: int, most: int, seed: int = 1) -> Any:
    return jnp.asarray(np.random.default_rng(seed).integers(1, most, (batch, length)))


def cross_entropy(logits: Any, target: Any) -> Any:
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), target[..., None], -1).mean()


def _applied(model: Any) -> Callable[..., Any]:
    return lambda parameters, x, target: cross_entropy(model.apply(parameters, x), target)


def norm(x: Any, scale: Any) -> Any:
    mean = x.mean(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(((x - mean) ** 2).mean(-1, keepdims=True) + 1e-5) * scale


def block(layer: Any, x: Any, heads: int = 4) -> Any:
    batch, length, width = x.shape
    with jax.named_scope("attention"):
        parts = jnp.split(norm(x, layer["first"]) @ layer["qkv"], 3, -1)
        q, k, v = (part.reshape(batch, length, heads, width // heads).transpose(0, 2, 1, 3) for part in parts)
        scores = q @ k.transpose(0, 1, 3, 2) / (width // heads) ** 0.5
        scores = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e9), -1)
        x = x + (scores @ v).transpose(0, 2, 1, 3).reshape(batch, length, width) @ layer["out"]
    with jax.named_scope("mlp"):
        return x + jax.nn.gelu(norm(x, layer["second"]) @ layer["up"]) @ layer["down"]


def _gpt_parameters(layers: int, width: int, length: int, vocabulary: int) -> dict[str, Any]:
    new = weights(0)
    blocks = [
        {
            "qkv": new(width, 3 * width),
            "out": new(width, width),
            "up": new(width, 4 * width),
            "down": new(4 * width, width),
            "first": jnp.ones(width),
            "second": jnp.ones(width),
        }
        for _ in range(layers)
    ]
    return {
        "words": new(vocabulary, width),
        "places": new(length, width),
        "layers": blocks,
        "head": new(width, vocabulary),
    }


def gpt(
    layers: int = 2, width: int = 64, length: int = 128, batch: int = 4, vocabulary: int = 256, checkpoint: bool = False
) -> Case:
    """Blocks one after the other; `checkpoint` puts `jax.checkpoint` around each."""
    run = jax.checkpoint(block) if checkpoint else block

    def loss(parameters: Any, tokens: Any) -> Any:
        x = parameters["words"][tokens] + parameters["places"]
        for number, layer in enumerate(parameters["layers"]):
            with jax.named_scope(f"layers.{number}"):
                x = run(layer, x)
        return cross_entropy((x @ parameters["head"])[:, :-1], tokens[:, 1:])

    return loss, _gpt_parameters(layers, width, length, vocabulary), (words(batch, length, vocabulary),)


def scanned_gpt(
    layers: int = 4, width: int = 64, length: int = 128, batch: int = 4, vocabulary: int = 256, checkpoint: bool = False
) -> Case:
    """The same blocks as one scan over stacked parameters."""

    def one(x: Any, layer: Any) -> tuple[Any, None]:
        return block(layer, x), None

    body = jax.checkpoint(one) if checkpoint else one

    def loss(parameters: Any, tokens: Any) -> Any:
        x = parameters["words"][tokens] + parameters["places"]
        x, _ = jax.lax.scan(body, x, parameters["layers"])
        return cross_entropy((x @ parameters["head"])[:, :-1], tokens[:, 1:])

    parameters = _gpt_parameters(layers, width, length, vocabulary)
    parameters["layers"] = jax.tree.map(lambda *rows: jnp.stack(rows), *parameters["layers"])
    return loss, parameters, (words(batch, length, vocabulary),)


def bert() -> Case:
    """Flax."""
    import flax.linen as nn

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x: Any, mask: Any) -> Any:
            y = nn.LayerNorm()(x)
            x = x + nn.MultiHeadDotProductAttention(4)(y, y, mask=mask)
            y = nn.gelu(nn.Dense(512)(nn.LayerNorm()(x)))
            return x + nn.Dense(128)(y)

    class Bert(nn.Module):
        @nn.compact
        def __call__(self, tokens: Any) -> Any:
            x = nn.Embed(500, 128)(tokens) + nn.Embed(128, 128)(jnp.arange(tokens.shape[1]))
            mask = nn.make_attention_mask(tokens > 0, tokens > 0)
            for number in range(4):
                x = Block(name=f"block{number}")(x, mask)
            return nn.Dense(500)(nn.LayerNorm()(x))

    model, tokens = Bert(), words(8, 64, 500)
    parameters = model.init(jax.random.key(0), tokens)
    return lambda parameters, tokens: cross_entropy(model.apply(parameters, tokens), tokens), parameters, (tokens,)


def vit() -> Case:
    """Flax, with patches cut by a convolution."""
    import flax.linen as nn

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            y = nn.LayerNorm()(x)
            x = x + nn.MultiHeadDotProductAttention(4)(y, y)
            return x + nn.Dense(96)(nn.gelu(nn.Dense(384)(nn.LayerNorm()(x))))

    class Vit(nn.Module):
        @nn.compact
        def __call__(self, images: Any) -> Any:
            x = nn.Conv(96, (4, 4), strides=(4, 4))(images)
            x = x.reshape(x.shape[0], -1, 96)
            for number in range(4):
                x = Block(name=f"block{number}")(x)
            return nn.Dense(10)(x.mean(1))

    model = Vit()
    images = jnp.asarray(np.random.default_rng(0).normal(size=(8, 32, 32, 3)), jnp.float32)
    parameters = model.init(jax.random.key(0), images)
    labels = jnp.arange(8) % 10
    return (
        lambda parameters, *batch: cross_entropy(model.apply(parameters, batch[0]), batch[1]),
        parameters,
        (images, labels),
    )


def lstm() -> Case:
    """Haiku: two layers, each a scan over time."""
    import haiku as hk

    def net(x: Any) -> Any:
        for _ in range(2):
            cell = hk.LSTM(64)
            x, _ = hk.dynamic_unroll(cell, x, cell.initial_state(x.shape[1]))
        return hk.Linear(20)(x)

    model = hk.without_apply_rng(hk.transform(net))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(64, 16, 32)), jnp.float32)
    target = words(64, 16, 20)
    parameters = model.init(jax.random.key(0), x)
    return (
        lambda parameters, *batch: cross_entropy(model.apply(parameters, batch[0]), batch[1]),
        parameters,
        (x, target),
    )


def resnet() -> Case:
    """ResNet-18 for small images."""
    rng = np.random.default_rng(0)

    def new(*shape: int) -> Any:
        return jnp.asarray(rng.normal(size=shape, scale=np.sqrt(2 / np.prod(shape[:-1]))), jnp.float32)

    def conv(x: Any, kernel: Any, stride: int = 1) -> Any:
        return jax.lax.conv_general_dilated(
            x, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    def batch_norm(x: Any, scale: Any) -> Any:
        mean = x.mean((0, 1, 2))
        return (x - mean) * jax.lax.rsqrt(((x - mean) ** 2).mean((0, 1, 2)) + 1e-5) * scale

    blocks, width = [], 16
    for stage in range(4):
        for number in range(2):
            wide = 16 * 2**stage
            part = {"a": new(3, 3, width, wide), "b": new(3, 3, wide, wide)}
            part |= {"norm_a": jnp.ones(wide), "norm_b": jnp.ones(wide)}
            if stage and not number:
                part["short"] = new(1, 1, width, wide)
            blocks.append(part)
            width = wide
    parameters = {"stem": new(3, 3, 3, 16), "norm": jnp.ones(16), "blocks": blocks, "head": new(width, 10)}

    def loss(parameters: Any, images: Any, labels: Any) -> Any:
        x = jax.nn.relu(batch_norm(conv(images, parameters["stem"]), parameters["norm"]))
        for number, part in enumerate(parameters["blocks"]):
            with jax.named_scope(f"block{number}"):
                stride = 2 if "short" in part else 1
                y = jax.nn.relu(batch_norm(conv(x, part["a"], stride), part["norm_a"]))
                y = batch_norm(conv(y, part["b"]), part["norm_b"])
                x = jax.nn.relu(y + (conv(x, part["short"], 2) if "short" in part else x))
        return cross_entropy(x.mean((1, 2)) @ parameters["head"], labels)

    images = jnp.asarray(rng.normal(size=(8, 32, 32, 3)), jnp.float32)
    return loss, parameters, (images, jnp.arange(8) % 10)


def mlp(layers: int = 6, width: int = 64, rows: int = 256) -> Case:
    """Products and tanh: quick to compile."""
    new = weights(0)
    parameters = [new(width, width) for _ in range(layers)]

    def loss(parameters: Any, x: Any) -> Any:
        for number, layer in enumerate(parameters):
            with jax.named_scope(f"layers.{number}"):
                x = jnp.tanh(x @ layer)
        return (x**2).mean()

    return loss, parameters, (weights(1)(rows, width),)


def scanned_mlp(layers: int = 8, width: int = 64, rows: int = 256) -> Case:
    """One scan over stacked weights: quick to compile."""
    parameters = jnp.stack(mlp(layers, width, rows)[1])

    def loss(parameters: Any, x: Any) -> Any:
        def layer(x: Any, weight: Any) -> tuple[Any, None]:
            return jnp.tanh(jnp.sin(x @ weight) @ weight.T) + x, None

        return (jax.lax.scan(layer, x, parameters)[0] ** 2).mean()

    return loss, parameters, (weights(1)(rows, width),)
