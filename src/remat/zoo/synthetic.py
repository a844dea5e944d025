"""Op graphs of any size, made by rule: for tests and benchmarks of solvers, without a framework.

In: a size and, where chance plays a part, a seed. Out: a `Problem` with no limit on memory; the same arguments give the
same problem. `GENERATORS` names them all with one number each, about how many ops to make.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from remat.core.problem import Problem
from remat.zoo.recorder import Builder, Recorder

HALF = 2
"""Bytes of an element."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a transformer; elements have two bytes."""

    batch: int = 4
    length: int = 1024
    width: int = 1024
    heads: int = 16
    vocabulary: int = 50_257
    dropout: bool = True

    @property
    def tokens(self) -> int:
        return self.batch * self.length

    @property
    def stream_bytes(self) -> int:
        return HALF * self.tokens * self.width

    @property
    def scores_bytes(self) -> int:
        return HALF * self.batch * self.heads * self.length**2


def transformer(layers: int, sizes: Sizes | None = None) -> Problem:
    """A GPT with unfused attention; 114 layers have 10,000 ops."""
    sizes = sizes or Sizes()
    step = Recorder()
    mask = step.source("causal_mask", sizes.length**2)
    stream = step.embed("embedding", sizes.stream_bytes, HALF * sizes.vocabulary * sizes.width)
    for number in range(layers):
        step.module = f"layers.{number}"
        stream = _attention(step, stream, mask, sizes)
        stream = _perceptron(step, stream, sizes)
    step.module = "head"
    hidden = _layer_norm(step, stream, sizes)
    logits = _linear(step, "head", hidden, sizes, sizes.width, sizes.vocabulary, bias=False)
    probabilities = step.pointwise("log_softmax", logits, saves="output")
    return step.finish(f"transformer_{layers}", step.pointwise("nll_loss", probabilities, saves="nothing", size=4))


def _attention(step: Recorder, stream: int, mask: int, sizes: Sizes) -> int:
    hidden = _layer_norm(step, stream, sizes)
    heads = []
    for name in ("query", "key", "value"):
        projected = _linear(step, name, hidden, sizes, sizes.width, sizes.width)
        heads.append(step.pointwise(f"{name}_heads", projected, saves="nothing"))
    query, key, value = heads
    flops = 2 * sizes.tokens * sizes.length * sizes.width
    scores = step.product("scores", query, key, sizes.scores_bytes, flops)
    scaled = step.pointwise("scale", scores, saves="nothing")
    masked = step.pointwise("masked_fill", scaled, mask, saves="nothing")
    weights = step.pointwise("softmax", masked, saves="output")
    weights = _dropout(step, weights, sizes)
    context = step.product("context", weights, value, sizes.stream_bytes, flops)
    merged = step.pointwise("merge_heads", context, saves="nothing")
    projected = _linear(step, "projection", merged, sizes, sizes.width, sizes.width)
    return step.sum("residual", stream, _dropout(step, projected, sizes))


def _perceptron(step: Recorder, stream: int, sizes: Sizes) -> int:
    hidden = _layer_norm(step, stream, sizes)
    wide = _linear(step, "up", hidden, sizes, sizes.width, 4 * sizes.width)
    cubed = step.pointwise("cube", wide)
    inner = step.sum("inner", wide, step.pointwise("scale_cube", cubed, saves="nothing"))
    gate = step.pointwise("tanh", step.pointwise("scale_inner", inner, saves="nothing"), saves="output")
    active = step.product("gate", wide, step.pointwise("shift", gate, saves="nothing"), step.build.sizes[wide], 0)
    narrow = _linear(step, "down", active, sizes, 4 * sizes.width, sizes.width)
    return step.sum("residual", stream, _dropout(step, narrow, sizes))


def _layer_norm(step: Recorder, x: int, sizes: Sizes) -> int:
    normal = step.norm("layer_norm", x, 8 * sizes.tokens, HALF * sizes.width)
    return step.bias("shift", normal, HALF * sizes.width)


def _linear(step: Recorder, name: str, x: int, sizes: Sizes, width: int, wide: int, *, bias: bool = True) -> int:
    flops = 2 * sizes.tokens * width * wide
    output = step.linear(name, x, HALF * sizes.tokens * wide, HALF * width * wide, flops)
    return step.bias(f"{name}_bias", output, HALF * wide) if bias else output


def _dropout(step: Recorder, x: int, sizes: Sizes) -> int:
    return step.dropout("dropout", x) if sizes.dropout else x


def chain(length: int, seed: int = 0) -> Problem:
    """Layers one after the other with unequal costs and sizes, each a product and an activation."""
    rng = random.Random(seed)
    step = Recorder()
    x = step.embed("input", 1 << 20, 1 << 16)
    for number in range(length):
        step.module = f"layers.{number}"
        size = rng.randint(1, 16) << 18
        x = step.linear("linear", x, size, size >> 4, rng.randint(1, 40) * 10**9)
        x = step.pointwise("relu", x, saves="output")
    return step.finish(f"chain_{length}", step.pointwise("loss", x, size=4))


def recurrence(steps: int) -> Problem:
    """An LSTM over a sequence: each step reads the state of the one before, and has gates of its own to save."""
    step, size = Recorder(), 1 << 18
    state, memory = step.embed("state", size, 64), step.embed("memory", size, 64)
    for number in range(steps):
        step.module = f"steps.{number}"
        gates = step.linear("gates", state, 4 * size, 64, 10**9)
        forget, write, new, read = (step.pointwise(name, gates, saves="output", size=size) for name in "fwnr")
        kept = step.product("keep", forget, memory, size, size)
        memory = step.sum("memory", kept, step.product("write", write, new, size, size))
        state = step.product("state", read, step.pointwise("tanh", memory, saves="output"), size, size)
    return step.finish(f"recurrence_{steps}", step.pointwise("loss", state, size=4))


def unet_like(depth: int, convolutions: int = 2) -> Problem:
    """Down `depth` levels and up again, the way down kept for the way up: skips as long as the graph."""
    step = Recorder()
    x = step.embed("input", 64 << 20, 1 << 10)
    skips = []
    for level in range(depth):
        step.module = f"down.{level}"
        x = _convolutions(step, x, (64 << 20) >> level, level, convolutions)
        skips.append(x)
        x = step.pointwise("pool", x, size=step.build.sizes[x] >> 2)
    x = _convolutions(step, x, (64 << 20) >> depth, depth, convolutions)
    for level in reversed(range(depth)):
        step.module = f"up.{level}"
        x = step.pointwise("upsample", x, saves="nothing", size=(64 << 20) >> level)
        x = step.concat("concat", (skips[level], x))
        x = _convolutions(step, x, (64 << 20) >> level, level, convolutions)
    return step.finish(f"unet_{depth}", step.pointwise("loss", x, size=4))


def _convolutions(step: Recorder, x: int, size: int, level: int, count: int) -> int:
    for _ in range(count):
        channels = 64 << level
        x = step.linear("conv", x, size, 18 * channels**2, 9 * step.build.sizes[x] * channels)
        x = step.norm("batch_norm", x, 8 * channels, 4 * channels)
        x = step.pointwise("relu", x, saves="output")
    return x


def densenet_like(layers: int, growth_bytes: int = 4 << 20) -> Problem:
    """Every layer reads all layers before it: skips grow with the square of the depth."""
    step = Recorder()
    features = [step.embed("input", 4 * growth_bytes, 1 << 10)]
    for number in range(layers):
        step.module = f"layers.{number}"
        x = step.concat("concat", features) if number else features[0]
        x = step.pointwise("relu", step.norm("batch_norm", x, 1 << 8, 1 << 8), saves="output")
        wide = step.linear("squeeze", x, 4 * growth_bytes, 1 << 14, 128 * step.build.sizes[x])
        features.append(step.linear("conv", wide, growth_bytes, 1 << 16, 128 * 36 * growth_bytes))
    return step.finish(f"densenet_{layers}", step.pointwise("loss", step.concat("concat", features), size=4))


def tree(depth: int, seed: int = 0) -> Problem:
    """Leaves are combined two by two up to the root, each combination a product with weights."""
    rng = random.Random(seed)
    step = Recorder()
    row = [step.embed(f"leaf{number}", rng.randint(1, 8) << 20, 1 << 12) for number in range(1 << depth)]
    while len(row) > 1:
        row = [_combine(step, left, right, rng) for left, right in zip(row[::2], row[1::2], strict=True)]
    return step.finish(f"tree_{depth}", step.pointwise("loss", row[0], size=4))


def _combine(step: Recorder, left: int, right: int, rng: random.Random) -> int:
    both = step.concat("concat", (left, right))
    hidden = step.linear("combine", both, rng.randint(1, 8) << 20, 1 << 16, rng.randint(1, 40) * 10**9)
    return step.pointwise("tanh", hidden, saves="output")


def random_layered(count: int, seed: int = 0) -> Problem:
    """Layers of random width; a node reads the layer before and a few nodes further back. There is no backward.

    In the spirit of the random layered graphs of Moccasin (Bartan et al. 2023): several separate peaks, long skips.
    """
    rng = random.Random(seed)
    build = Builder()
    reads = _random_reads(_random_layers(count, rng), rng)
    for number, inputs in enumerate(reads):
        # Sizes have a long tail, as those of real graphs.
        size = min(10 * round(rng.lognormvariate(5.0, 0.8)), 8000)
        build.add(str(number), inputs, [size], rng.randint(1, 999))
    return build.problem([count - 1] if count else [], f"random_layered_{count}_{seed}")


def _random_layers(count: int, rng: random.Random) -> list[range]:
    """Numbers in layers; the first and the last have one."""
    layers = [range(min(1, count))]
    while layers[-1].stop < count - 1:
        start = layers[-1].stop
        layers.append(range(start, min(start + rng.randint(2, max(3, round(count**0.5))), count - 1)))
    return layers if count < 2 else [*layers, range(count - 1, count)]


def _random_reads(layers: list[range], rng: random.Random) -> list[list[int]]:
    """What each node reads; every node but the last is read by the layer after it, at least."""
    reads: list[list[int]] = [[] for _ in layers[0]]
    for position, layer in enumerate(layers[1:], start=1):
        near = layers[position - 1]
        rows = [rng.sample(near, min(len(near), rng.randint(1, 2))) for _ in layer]
        read = {value for row in rows for value in row}
        for value in near:
            if value not in read:
                rng.choice(rows).append(value)
        for row in rows[: len(rows) if position < len(layers) - 1 else 0]:
            row += [rng.choice(far) for far in layers[max(0, position - 4) : position - 1] if rng.random() < 0.35]
            row += [rng.randrange(near.start)] if position > 1 and rng.random() < 0.1 else []
        reads += rows
    return reads


GENERATORS: Mapping[str, Callable[[int], Problem]] = {
    "transformer": transformer,
    "random_layered": random_layered,
    "chain": chain,
    "recurrence": recurrence,
    "unet_like": unet_like,
    "densenet_like": densenet_like,
    "tree": tree,
}
"""By name, each with the one number that sets its size: layers, nodes, levels or depth."""
