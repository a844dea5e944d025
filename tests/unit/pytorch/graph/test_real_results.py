"""Strides and storages of real kernels, and whether they can write into what they read."""

from __future__ import annotations

import random

import pytest

torch = pytest.importorskip("torch")
from torch._subclasses.fake_tensor import FakeTensorMode

from remat.pytorch._compat.fakes import fake_results_through
from remat.pytorch.graph.real_results import corrected, is_asked, overwrites_exactly, view_strides

aten = torch.ops.aten


def _faked(call, *tensors):
    mode = FakeTensorMode()
    with fake_results_through(corrected), mode:
        return call(*(mode.from_tensor(tensor) for tensor in tensors))


@pytest.mark.parametrize(
    "call",
    [
        lambda x: aten.native_batch_norm(x, None, None, None, None, True, 0.1, 1e-5)[0],
        lambda x: aten._softmax_backward_data(x, x.contiguous(), 1, torch.float32),
        lambda x: aten.elu(x),
        lambda x: aten.cumsum(x, 1),
    ],
)
def test_fake_results_have_the_strides_of_real_ones(call) -> None:
    for shape in ((4, 5, 6), (64, 300, 17)):
        x = torch.randn(shape).transpose(1, 2)
        assert _faked(call, x).stride() == call(x).stride()


def test_storage_that_is_larger_than_its_scalar_is_known() -> None:
    x = torch.randn(40, 30)
    found, real = _faked(aten.mse_loss, x, x), aten.mse_loss(x, x)
    assert found.shape == real.shape == ()
    assert found.untyped_storage().nbytes() == real.untyped_storage().nbytes()


def test_views_get_the_strides_that_torch_gives_them() -> None:
    choose = random.Random(0)
    for _ in range(2000):
        sizes = [choose.choice((1, 1, 2, 3, 4, 6)) for _ in range(choose.randint(1, 4))]
        tensor = torch.empty(sizes).permute(choose.sample(range(len(sizes)), len(sizes)))
        wanted, left = [], tensor.numel()
        while left > 1:
            wanted.append(choose.choice([size for size in range(1, left + 1) if left % size == 0]))
            left //= wanted[-1]
        wanted.insert(choose.randint(0, len(wanted)), 1)
        try:
            expected = tensor.view(wanted).stride()
        except RuntimeError:
            expected = ()
        assert view_strides(tensor.shape, tensor.stride(), wanted) == expected


def test_kernel_that_ignores_the_strides_of_its_result_may_not_overwrite() -> None:
    def into(args, kwargs, out):
        return aten._log_softmax_backward_data.out(*args, out=out)

    args = [torch.randn(8, 12, 10).transpose(1, 2), torch.randn(8, 10, 12), -1, torch.float32]
    assert not overwrites_exactly(aten._log_softmax_backward_data.default, args, {}, 0, into)
    assert overwrites_exactly(aten._log_softmax_backward_data.default, args, {}, 1, into)


def test_generators_stand_where_they_stood() -> None:
    shares = torch.rand(7, 9).t()
    state = torch.get_rng_state()
    _faked(lambda x: aten.bernoulli(x), shares)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("op", [torch.ops.aten._assert_async.msg, torch.ops.aten._functional_assert_async.msg])
def test_nothing_is_asserted_of_made_up_numbers(op) -> None:
    assert not is_asked(op, [torch.ones(())])
    assert is_asked(torch.ops.aten.relu.default, [torch.ones(2)])
