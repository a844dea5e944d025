"""Networks of equal blocks for jax, written out or scanned, in any precision, with and without `jax.checkpoint`.

Models that nothing was tuned for: an MLP-mixer, a gated convolutional network, an encoder with a decoder, a GRU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from tests.support.jax_models import block as gpt_block
from tests.support.jax_models import cross_entropy, norm, weights, words

Block = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Blocks:
    """A loss in two ways, and its arguments."""

    plain: Callable[..., Any]
    checkpointed: Callable[..., Any]
    arguments: tuple[Any, ...]


def _stacked(layers: Sequence[Any], scanned: bool) -> Any:
    return jax.tree.map(lambda *rows: jnp.stack(rows), *layers) if scanned else list(layers)


def _through(block: Block, layers: Any, x: Any, scanned: bool, *rest: Any) -> Any:
    if scanned:
        return jax.lax.scan(lambda x, layer: (block(layer, x, *rest), None), x, layers)[0]
    for layer in layers:
        x = block(layer, x, *rest)
    return x


def _both(loss: Callable[[Callable[[Block], Block]], Any], dtype: Any, *arguments: Any) -> Blocks:
    def cast(leaf: Any) -> Any:
        return leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

    return Blocks(loss(lambda block: block), loss(jax.checkpoint), jax.tree.map(cast, arguments))


def _classifier(block: Block, layers: Sequence[Any], x: Any, scanned: bool, dtype: Any) -> Blocks:
    """Blocks over (batch, places, width), and a mean of the places at the end."""

    def loss(wrap: Callable[[Block], Block]) -> Any:
        run = wrap(block)

        def of(parameters: Any, x: Any, target: Any) -> Any:
            x = _through(run, parameters["layers"], x, scanned)
            return cross_entropy(x.mean(1) @ parameters["head"], target)

        return of

    parameters = {"layers": _stacked(layers, scanned), "head": weights(9)(x.shape[-1], 10)}
    return _both(loss, dtype, parameters, x, jnp.arange(len(x)) % 10)


def gpt(scanned: bool, dtype: Any = jnp.float32, layers: int = 4, width: int = 64) -> Blocks:
    new = weights(0)
    shapes = {"qkv": (width, 3 * width), "out": (width, width), "up": (width, 4 * width), "down": (4 * width, width)}
    scales = {"first": jnp.ones(width), "second": jnp.ones(width)}
    rows = [{name: new(*shape) for name, shape in shapes.items()} | scales for _ in range(layers)]

    def loss(wrap: Callable[[Block], Block]) -> Any:
        run = wrap(gpt_block)

        def of(parameters: Any, tokens: Any) -> Any:
            x = _through(run, parameters["layers"], parameters["words"][tokens], scanned)
            return cross_entropy((x @ parameters["words"].T)[:, :-1], tokens[:, 1:])

        return of

    return _both(loss, dtype, {"words": new(512, width), "layers": _stacked(rows, scanned)}, words(2, 128, 512))


def mixer(scanned: bool, dtype: Any = jnp.float32, layers: int = 6, width: int = 96, places: int = 64) -> Blocks:
    def block(layer: Any, x: Any) -> Any:
        y = norm(x, layer["first"]).swapaxes(1, 2)
        x = x + (jax.nn.gelu(y @ layer["a"]) @ layer["b"]).swapaxes(1, 2)
        return x + jax.nn.gelu(norm(x, layer["second"]) @ layer["c"]) @ layer["d"]

    new = weights(1)
    shapes = {"a": (places, 128), "b": (128, places), "c": (width, 384), "d": (384, width)}
    scales = {"first": jnp.ones(width), "second": jnp.ones(width)}
    rows = [{name: new(*shape) for name, shape in shapes.items()} | scales for _ in range(layers)]
    return _classifier(block, rows, new(16, places, width), scanned, dtype)


def gated_convolutions(
    scanned: bool, dtype: Any = jnp.float32, layers: int = 6, width: int = 24, side: int = 16
) -> Blocks:
    def conv(x: Any, kernel: Any) -> Any:
        return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def block(layer: Any, x: Any) -> Any:
        image = x.reshape(-1, side, side, width)
        gated = conv(image, layer["a"]) * jax.nn.sigmoid(conv(image, layer["gate"]))
        return x + conv(jax.nn.silu(norm(gated, layer["scale"])), layer["out"]).reshape(x.shape)

    new = weights(2)
    shapes = {"a": (3, 3, width, width), "gate": (3, 3, width, width), "out": (1, 1, width, width)}
    rows = [
        {name: new(*s) / s[0] ** 2 for name, s in shapes.items()} | {"scale": jnp.ones(width)} for _ in range(layers)
    ]
    return _classifier(block, rows, new(8, side * side, width), scanned, dtype)


def _attended(layer: Any, queries: Any, memory: Any, heads: int = 4) -> Any:
    def parts(x: Any, name: str) -> Any:
        return (x @ layer[name]).reshape(*x.shape[:2], heads, -1).swapaxes(1, 2)

    scores = parts(queries, "q") @ parts(memory, "k").swapaxes(2, 3) / 4
    scores = scores + layer["bias"][:, : queries.shape[1], : memory.shape[1]]
    mixed = jax.nn.softmax(scores, -1) @ parts(memory, "v")
    return mixed.swapaxes(1, 2).reshape(queries.shape) @ layer["o"]


def _rms(x: Any, scale: Any) -> Any:
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale


def _encoder(layer: Any, x: Any) -> Any:
    y = _rms(x, layer["first"])
    x = x + _attended(layer["own"], y, y)
    y = _rms(x, layer["last"])
    return x + (jax.nn.gelu(y @ layer["up"]) * (y @ layer["gate"])) @ layer["down"]


def _decoder(layer: Any, x: Any, memory: Any) -> Any:
    return _encoder(layer, x + _attended(layer["other"], _rms(x, layer["middle"]), memory))


def encoder_decoder(scanned: bool, dtype: Any = jnp.float32, layers: int = 3, width: int = 64) -> Blocks:
    new = weights(3)

    def attention() -> dict[str, Any]:
        return {name: new(width, width) for name in "qkvo"} | {"bias": new(4, 48, 48)}

    def row() -> dict[str, Any]:
        shapes = {"up": (width, 2 * width), "gate": (width, 2 * width), "down": (2 * width, width)}
        scales = {name: jnp.ones(width) for name in ("first", "middle", "last")}
        return {name: new(*shape) for name, shape in shapes.items()} | scales | {"own": attention()}

    def loss(wrap: Callable[[Block], Block]) -> Any:
        first, second = wrap(_encoder), wrap(_decoder)

        def of(parameters: Any, source: Any, target: Any) -> Any:
            memory = _through(first, parameters["encoder"], parameters["words"][source], scanned)
            x = _through(second, parameters["decoder"], parameters["words"][target], scanned, memory)
            return cross_entropy((x @ parameters["words"].T)[:, :-1], target[:, 1:])

        return of

    decoder = [row() | {"other": attention()} for _ in range(layers)]
    parts = {"encoder": [row() for _ in range(layers)], "decoder": decoder}
    parameters = {name: _stacked(rows, scanned) for name, rows in parts.items()} | {"words": new(200, width)}
    return _both(loss, dtype, parameters, words(4, 48, 200), words(4, 32, 200, 2))


def gru(scanned: bool, dtype: Any = jnp.float32, width: int = 96, length: int = 64) -> Blocks:
    """Over time; written out, a few steps of it."""
    length = length if scanned else 12

    def cell(layer: Any, state: Any, x: Any) -> Any:
        a, b = jnp.split(x @ layer["in"], 3, -1), jnp.split(state @ layer["own"], 3, -1)
        reset, update = jax.nn.sigmoid(a[0] + b[0]), jax.nn.sigmoid(a[1] + b[1])
        return (1 - update) * jnp.tanh(a[2] + reset * b[2]) + update * state

    def loss(wrap: Callable[[Block], Block]) -> Any:
        run = wrap(cell)

        def of(parameters: Any, rows: Any, target: Any) -> Any:
            def step(state: Any, x: Any) -> tuple[Any, Any]:
                return (made := run(parameters, state, x)), made

            start = jnp.zeros(rows.shape[1:], rows.dtype)
            if scanned:
                states = jax.lax.scan(step, start, rows)[1]
            else:
                found = [start := step(start, row)[1] for row in rows]
                states = jnp.stack(found)
            return cross_entropy(states @ parameters["head"], target)

        return of

    new = weights(4)
    parameters = {"in": new(width, 3 * width), "own": new(width, 3 * width), "head": new(width, 10)}
    return _both(loss, dtype, parameters, new(length, 16, width), words(length, 16, 10))


MODELS: dict[str, Callable[..., Blocks]] = {
    "gpt": gpt,
    "mixer": mixer,
    "gated convolutions": gated_convolutions,
    "encoder-decoder": encoder_decoder,
    "gru": gru,
}
