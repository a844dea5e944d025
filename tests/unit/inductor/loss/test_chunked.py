"""The chunked loss against `F.cross_entropy(F.linear(...))`: in eager, under autocast, compiled, and in float64."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from remat.inductor.loss.chunked import choose_chunks, chunk_bytes, chunked_linear_cross_entropy
from remat.inductor.loss.ops import _add_product

# Relative to the largest entry; sums of at most a few hundred float32 products, each rounded to 6e-8 of its size.
FLOAT32 = 2e-6


def inputs(rows: int, vocabulary: int, width: int, *, bias: bool = True, dtype: torch.dtype = torch.float32) -> list:
    generator = torch.Generator().manual_seed(rows * 1000 + vocabulary)
    shapes = [(rows, width), (vocabulary, width), *([(vocabulary,)] if bias else [])]
    leaves = [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]
    return leaves if bias else [*leaves, None]


def labels_for(rows: int, vocabulary: int, ignored: int = 0, ignore_index: int = -100) -> Tensor:
    labels = torch.randint(vocabulary, (rows,), generator=torch.Generator().manual_seed(rows))
    labels[:ignored] = ignore_index
    return labels


def grads(loss: Tensor, leaves: list) -> list[Tensor]:
    return list(torch.autograd.grad(loss, [leaf for leaf in leaves if leaf is not None], retain_graph=True))


def error(found: Tensor, true: Tensor) -> float:
    return float((found.double() - true.double()).norm() / true.double().norm())


def assert_same(loss: Tensor, plain: Tensor, leaves: list) -> None:
    torch.testing.assert_close(loss, plain, rtol=FLOAT32, atol=1e-6)
    # Any gradient may arrive.
    for found, true in zip(grads(loss * 0.7, leaves), grads(plain * 0.7, leaves), strict=True):
        assert found.dtype == true.dtype and found.shape == true.shape
        torch.testing.assert_close(found, true, rtol=0, atol=FLOAT32 * float(true.abs().max()) + 1e-9)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 23),
    vocabulary=st.integers(2, 41),
    width=st.integers(1, 9),
    chunks=st.integers(1, 6),
    bias=st.booleans(),
    ignored=st.integers(0, 5),
    ignore_index=st.sampled_from([-100, 0, 1]),
    reduction=st.sampled_from(["mean", "sum"]),
    smoothing=st.sampled_from([0.0, 0.1, 0.5]),
    multiple=st.sampled_from([1, 8, 64]),
)
def test_agrees_with_cross_entropy_of_linear(
    rows, vocabulary, width, chunks, bias, ignored, ignore_index, reduction, smoothing, multiple
) -> None:
    leaves = inputs(rows, vocabulary, width, bias=bias)
    labels = labels_for(rows, vocabulary, min(ignored, rows - 1), ignore_index)
    if bool((labels == ignore_index).all()):
        labels[-1] = (ignore_index + 1) % vocabulary if ignore_index >= 0 else 0
    options = dict(ignore_index=ignore_index, reduction=reduction, label_smoothing=smoothing)
    plain = F.cross_entropy(F.linear(*leaves), labels, **options)
    loss = chunked_linear_cross_entropy(*leaves, labels, chunks=chunks, vocabulary_multiple=multiple, **options)
    assert_same(loss, plain, leaves)


def test_takes_hidden_states_and_labels_of_any_shape() -> None:
    _, weight, bias = inputs(1, 13, 8)
    hidden, labels = torch.randn(2, 3, 8, requires_grad=True), labels_for(6, 13).view(2, 3)
    plain = F.cross_entropy(F.linear(hidden, weight, bias).flatten(0, 1), labels.flatten())
    loss = chunked_linear_cross_entropy(hidden, weight, bias, labels, chunks=2)
    assert_same(loss, plain, [hidden, weight, bias])


@pytest.mark.parametrize("divisor", [3, 0.5, torch.tensor(7)])
def test_divides_by_a_count_of_items(divisor: Tensor | float) -> None:
    leaves, labels = inputs(11, 13, 8), labels_for(11, 13, ignored=2)
    plain = F.cross_entropy(F.linear(*leaves), labels, reduction="sum") / divisor
    loss = chunked_linear_cross_entropy(*leaves, labels, divisor, chunks=3, reduction="sum")
    assert_same(loss, plain, leaves)


def test_mean_over_no_label_is_nan_and_has_no_gradient() -> None:
    leaves, labels = inputs(6, 13, 8), torch.full((6,), -100)
    loss = chunked_linear_cross_entropy(*leaves, labels, chunks=2)
    assert loss.isnan() and F.cross_entropy(F.linear(*leaves), labels).isnan()
    assert all(not grad.any() for grad in grads(loss, leaves))


def test_refuses_labels_out_of_range() -> None:
    leaves = inputs(4, 13, 8)
    with pytest.raises(IndexError):
        chunked_linear_cross_entropy(*leaves, torch.tensor([0, 1, 13, 2]), chunks=2)


@pytest.mark.parametrize("needed", [(True, False), (False, True), (False, False)])
def test_computes_only_the_gradients_that_are_needed(needed: tuple[bool, bool]) -> None:
    hidden, weight, _ = inputs(9, 13, 8, bias=False)
    hidden.requires_grad_(needed[0])
    weight.requires_grad_(needed[1])
    labels = labels_for(9, 13)
    plain = F.cross_entropy(F.linear(hidden, weight), labels)
    loss = chunked_linear_cross_entropy(hidden, weight, None, labels, chunks=2)
    assert loss.requires_grad == any(needed)
    leaves = [leaf for leaf in (hidden, weight) if leaf.requires_grad]
    torch.testing.assert_close(loss, plain)
    if leaves:
        assert_same(loss, plain, leaves)


def test_weight_may_be_tied_to_an_embedding() -> None:
    weight, tokens = torch.randn(13, 8, requires_grad=True), labels_for(9, 13)
    hidden = torch.tanh(F.embedding(tokens, weight))
    plain = F.cross_entropy(F.linear(hidden, weight), tokens)
    loss = chunked_linear_cross_entropy(hidden, weight, None, tokens, chunks=2)
    assert_same(loss, plain, [weight])


def test_agrees_with_finite_differences() -> None:
    leaves, labels = inputs(5, 7, 3, dtype=torch.float64), labels_for(5, 7, ignored=1)

    def loss(*leaves: Tensor) -> Tensor:
        return chunked_linear_cross_entropy(*leaves, labels, chunks=2, label_smoothing=0.1, vocabulary_multiple=4)

    assert torch.autograd.gradcheck(loss, leaves)


@pytest.mark.parametrize("parameters", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("vocabulary", "scale"), [pytest.param(1000, 0.1, marks=pytest.mark.long), (301, 0.4)])
def test_bfloat16_is_as_close_to_float64_as_the_plain_computation(parameters, vocabulary, scale) -> None:
    """Each gradient's error, on average over numbers of rows: the plain one's depends on how 1 / rows is rounded."""
    errors = torch.tensor([errors_in_bfloat16(rows, vocabulary, scale, parameters) for rows in range(300, 420, 10)])
    found, plain = errors.mean(0).unbind()
    assert (found < plain).all()
    assert (errors[:, 0] < 1.3 * errors[:, 1]).all()


def errors_in_bfloat16(rows: int, vocabulary: int, scale: float, parameters: torch.dtype) -> list[list[float]]:
    leaves = [(leaf.detach() * scale).to(parameters).requires_grad_() for leaf in inputs(rows, vocabulary, 64)]
    labels = labels_for(rows, vocabulary, ignored=7)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    true = grads(F.cross_entropy(F.linear(*exact), labels), exact)
    with torch.autocast("cpu", torch.bfloat16, enabled=parameters == torch.float32):
        plain = F.cross_entropy(F.linear(*leaves).float(), labels)
        loss = chunked_linear_cross_entropy(*leaves, labels, chunks=4, loss_dtype=torch.float32)
    assert float(loss.detach()) == pytest.approx(float(plain.detach()), rel=1e-5)
    return [
        [error(grad, exactly) for grad, exactly in zip(grads(way, leaves), true, strict=True)] for way in (loss, plain)
    ]


def test_follows_autocast() -> None:
    leaves, labels = inputs(24, 13, 8), labels_for(24, 13)
    with torch.autocast("cpu", torch.bfloat16):
        plain = F.cross_entropy(F.linear(*leaves), labels)
        loss = chunked_linear_cross_entropy(*leaves, labels, chunks=2)
    assert loss.dtype == plain.dtype == torch.float32
    assert float(loss.detach()) == pytest.approx(float(plain.detach()), rel=1e-6)


@pytest.mark.parametrize("shape", [(50, 40, 30), (40, 50, 30), (3, 9000, 70), (9000, 70, 3)])
@pytest.mark.parametrize("fresh", [True, False])
def test_sum_of_half_precision_products_is_not_rounded_in_between(shape: tuple[int, int, int], fresh: bool) -> None:
    rows, inner, columns = shape
    left, right = torch.randn(rows, inner).bfloat16(), torch.randn(inner, columns).bfloat16()
    total = torch.randn(rows, columns)
    expected = (0 if fresh else total.double()) + left.double() @ right.double()
    _add_product(total, left, right, fresh=fresh)
    assert error(total, expected) < 1e-6


@pytest.mark.gpu
@pytest.mark.parametrize("fresh", [True, False])
def test_sum_of_half_precision_products_on_a_gpu(fresh: bool) -> None:
    left, right = torch.randn(512, 400, device="cuda").bfloat16(), torch.randn(400, 256, device="cuda").bfloat16()
    total = torch.randn(512, 256, device="cuda")
    expected = (0 if fresh else total.double()) + left.double() @ right.double()
    _add_product(total, left, right, fresh=fresh)
    assert error(total, expected) < 1e-6


@pytest.mark.gpu
@pytest.mark.parametrize("vocabulary", [50257, 1024])
def test_agrees_on_a_gpu_compiled(vocabulary: int) -> None:
    leaves = [(leaf.detach() * 0.3).cuda().requires_grad_() for leaf in inputs(1000, vocabulary, 256, bias=False)[:2]]
    labels = labels_for(1000, vocabulary, ignored=9).cuda()

    def run(chunked: bool) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            if chunked:
                return chunked_linear_cross_entropy(*leaves, None, labels, chunks=3)
            return F.cross_entropy(F.linear(*leaves), labels)

    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    true = grads(F.cross_entropy(F.linear(*exact), labels), exact)
    plain, loss = run(False), torch.compile(run)(True)
    assert float(loss.detach()) == pytest.approx(float(plain.detach()), rel=1e-4)
    for found, ordinary, exactly in zip(grads(loss, leaves), grads(plain, leaves), true, strict=True):
        assert error(found, exactly) <= 1.3 * error(ordinary, exactly)


def test_without_a_limit_chunks_have_a_good_number_of_rows() -> None:
    assert choose_chunks(16384, 50257, torch.bfloat16) == 8
    assert choose_chunks(100, 50257, torch.bfloat16) == 1


@pytest.mark.parametrize("rows", [16384, 16368, 1000, 7])
@pytest.mark.parametrize("limit_bytes", [100 << 20, 3 << 20, 1])
def test_chunks_hold_the_limit_where_a_row_does(rows: int, limit_bytes: int) -> None:
    chunks = choose_chunks(rows, 50257, torch.bfloat16, limit_bytes=limit_bytes)
    row_bytes = 50257 * 2
    assert chunk_bytes(rows, 50257, torch.bfloat16, chunks) <= max(limit_bytes, row_bytes)
    fewer = max(1, int(chunks / 1.25) - 1)
    assert chunks == 1 or chunk_bytes(rows, 50257, torch.bfloat16, fewer) > limit_bytes


def test_sums_of_gradients_are_made_when_the_first_logits_have_become_theirs() -> None:
    """Compiled code takes memory where the graph says."""

    def loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        return chunked_linear_cross_entropy(hidden, weight, None, labels, chunks=2)

    inputs = torch.randn(8, 4, requires_grad=True), torch.randn(16, 4, requires_grad=True), torch.randint(16, (8,))
    names = [str(node.target) for node in make_fx(loss)(*inputs).graph.nodes]
    first_sum = next(place for place, name in enumerate(names) if name == "aten.empty.memory_format")
    first_use = names.index("remat.add_linear_grads.default")
    logits = [place for place, name in enumerate(names) if name == "aten.mm.default"]
    assert logits[0] < names.index("aten.exp.default") < first_sum < first_use < logits[1]
