"""Layout problems for tests, and their lowest height found the slow way."""

from __future__ import annotations

from itertools import pairwise, permutations

from hypothesis import strategies as st

from remat.layout import Buffer, LayoutProblem


def buffers(*rows: tuple[int, int, int]) -> tuple[Buffer, ...]:
    """Buffers from (lower, upper, size), called 0, 1, 2 and so on."""
    return tuple(Buffer(str(number), *row) for number, row in enumerate(rows))


def lowest_height(problem: LayoutProblem) -> int:
    """The height of the lowest placement: some order of stacking, each as low as those before it allow, gives it."""
    return min((_stacked_height(order) for order in permutations(problem.buffers)), default=0)


def _stacked_height(order: tuple[Buffer, ...]) -> int:
    placed: list[tuple[Buffer, int]] = []
    for buffer in order:
        floor = max((at + other.size for other, at in placed if other.meets(buffer)), default=0)
        placed.append((buffer, -(-floor // buffer.alignment) * buffer.alignment))
    return max((at + buffer.size for buffer, at in placed), default=0)


def can_be_placed(problem: LayoutProblem, height: int) -> bool:
    """Is there a placement below `height`? Every offset is tried for every buffer, in order of time."""
    order = sorted(problem.buffers, key=lambda buffer: (buffer.lower, -buffer.size))
    placed: list[tuple[Buffer, int]] = []

    def place_rest() -> bool:
        if len(placed) == len(order):
            return True
        buffer = order[len(placed)]
        met = [(at, at + other.size) for other, at in placed if other.meets(buffer)]
        for at in range(0, height - buffer.size + 1, buffer.alignment):
            if all(end <= at or at + buffer.size <= begin for begin, end in met):
                placed.append((buffer, at))
                if place_rest():
                    return True
                placed.pop()
        return False

    return place_rest()


@st.composite
def full_problems(draw: st.DrawFn) -> LayoutProblem:
    """Problems whose memory is full at all times, some of which cannot be placed without waste."""
    total, rows = draw(st.integers(4, 6)), []
    alive = [(0, size) for size in draw(_sizes(total))]
    last = draw(st.integers(3, 7))
    for time in range(1, last):
        dying = draw(st.sets(st.integers(0, len(alive) - 1), min_size=1))
        rows += [(alive[at][0], time, alive[at][1]) for at in sorted(dying)]
        freed = sum(alive[at][1] for at in dying)
        alive = [each for at, each in enumerate(alive) if at not in dying]
        alive += [(time, size) for size in draw(_sizes(freed))]
    rows += [(begin, last, size) for begin, size in alive]
    return LayoutProblem(buffers(*rows))


@st.composite
def _sizes(draw: st.DrawFn, total: int) -> list[int]:
    """Positive sizes that add up to `total`."""
    cuts = sorted(draw(st.sets(st.integers(1, total - 1)))) if total > 1 else []
    return [end - begin for begin, end in pairwise([0, *cuts, total])]


@st.composite
def small_problems(draw: st.DrawFn, alignments: tuple[int, ...] = (1,), most: int = 6) -> LayoutProblem:
    rows = draw(
        st.lists(
            st.tuples(st.integers(0, 6), st.integers(1, 5), st.integers(1, 9), st.sampled_from(alignments)),
            max_size=most,
        )
    )
    return LayoutProblem(
        tuple(
            Buffer(str(number), lower, lower + life, size, alignment)
            for number, (lower, life, size, alignment) in enumerate(rows)
        )
    )
