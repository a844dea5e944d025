"""A kernel in a file of its own: Triton reads its source."""

import triton
import triton.language as tl


@triton.jit
def double(source, target, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = places < count
    tl.store(target + places, 2 * tl.load(source + places, mask=inside), mask=inside)
