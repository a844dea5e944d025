"""Layout problems made by rule, for tests and benchmarks: the same seed gives the same problem.

`random_lives` draws lives and sizes independently. `dissected` cuts a full rectangle of memory and time into pieces, so
that a placement without any waste exists but has to be found. `training` makes the nested lives of a network's step:
activations that wait for their backward op, short-lived values beside them, and gradients that stay to the end.
"""

from __future__ import annotations

import random

from remat.layout.problem import Buffer, LayoutProblem


def random_lives(
    count: int, *, seed: int = 0, horizon: int = 100_000, longest: int = 2_000, largest: int = 1 << 20
) -> LayoutProblem:
    """Buffers that begin at any time and live up to `longest`; sizes are spread evenly over their magnitudes."""
    draw = random.Random(seed)
    buffers = []
    for number in range(count):
        lower = draw.randrange(horizon)
        upper = min(lower + draw.randint(1, longest), horizon + 1)
        size = max(1, int(largest ** draw.uniform(0.3, 1.0)))
        buffers.append(Buffer(str(number), lower, upper, size))
    return LayoutProblem(tuple(buffers))


def dissected(count: int, *, seed: int = 0, side: int = 1024, slack: int = 0) -> LayoutProblem:
    """`count` pieces of a rectangle of `side` by `side`, cut at random; the capacity is `side` and `slack` more."""
    draw = random.Random(seed)
    pieces = [(0, side, 0, side)]
    while len(pieces) < count:
        # Of a few pieces the largest is cut, so that pieces are uneven but none keeps most of the area.
        number = max(draw.sample(range(len(pieces)), min(4, len(pieces))), key=lambda i: _area(pieces[i]))
        left, right, low, high = pieces.pop(number)
        if draw.random() < 0.5 and right - left > 1:
            cut = draw.randrange(left + 1, right)
            pieces += [(left, cut, low, high), (cut, right, low, high)]
        elif high - low > 1:
            cut = draw.randrange(low + 1, high)
            pieces += [(left, right, low, cut), (left, right, cut, high)]
        else:
            pieces.append((left, right, low, high))
    draw.shuffle(pieces)
    buffers = [Buffer(str(i), left, right, high - low) for i, (left, right, low, high) in enumerate(pieces)]
    return LayoutProblem(tuple(buffers), side + slack)


def training(layers: int, *, seed: int = 0, values: int = 8) -> LayoutProblem:
    """A step of `layers` layers: each keeps some of its `values` for backward, and leaves a gradient to the end."""
    draw = random.Random(seed)
    end = 2 * layers * values + 1
    widths = [draw.choice((256, 512, 768, 1024)) * 1024 for _ in range(4)]
    buffers: list[Buffer] = []

    def add(lower: int, upper: int, size: int) -> None:
        buffers.append(Buffer(str(len(buffers)), lower, upper, size))

    for layer in range(layers):
        for value in range(values):
            time = layer * values + value
            mirror = end - 1 - time
            size = draw.choice(widths) * draw.choice((1, 1, 2, 4))
            is_kept = draw.random() < 0.6
            add(time, mirror + 1 if is_kept else time + draw.randint(2, 4), size)
            add(mirror, min(mirror + draw.randint(2, 4), end), size)
        add(end - 1 - layer * values, end, draw.choice(widths))
    return LayoutProblem(tuple(buffers))


def _area(piece: tuple[int, int, int, int]) -> int:
    left, right, low, high = piece
    return (right - left) * (high - low)
