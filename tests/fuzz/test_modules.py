"""Random modules train under three budgets as they do in eager: the same bits, within the budget by two meters."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")

from tests.fuzz.compare import Comparison, Settings, compare
from tests.fuzz.modules import make_case
from tests.fuzz.pool import Request, run_cases, warm_up

EVERY_TIME = 24
LONG, CHUNK = 2000, 50
COMPILED = (51,)
ON_CUDA = 20


@pytest.fixture(scope="module", autouse=True)
def ready() -> Iterator[None]:
    """Everything is imported, and one thread works: these tensors are too small for more."""
    threads, enabled = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    warm_up(Request())
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(enabled)


@pytest.fixture(autouse=True)
def out_of_sight() -> Iterator[None]:
    """What a case leaves behind is not looked through for optimizers by the next one."""
    yield
    gc.collect()
    gc.freeze()


def check(found: Comparison) -> None:
    assert not found.verdict.is_failure, f"{found.verdict.value}: {found.case.describe()}\n{found.details}"


@pytest.mark.parametrize("seed", range(EVERY_TIME))
def test_random_module_trains_as_in_eager_within_three_budgets(seed: int) -> None:
    check(compare(make_case(seed)))


@pytest.mark.long
@pytest.mark.parametrize("first", range(1000, 1000 + LONG, CHUNK))
def test_thousands_of_random_modules_train_as_in_eager(first: int) -> None:
    failed = [
        f"seed {result['seed']}, {result['verdict']}: {result['case']} | {result['details']}"
        for result in run_cases(range(first, first + CHUNK), jobs=1, request=Request())
        if result["verdict"] not in ("ok", "refused", "warned unplanned", "warned, over budget", "discarded")
    ]
    assert not failed, "\n".join(failed)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("seed", COMPILED)
def test_compiled_random_module_trains_nearly_as_in_eager(seed: int) -> None:
    check(compare(make_case(seed), Settings(compiler="inductor", budgets=("1x", "0.8x"))))


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(ON_CUDA))
def test_random_module_trains_as_in_eager_on_cuda(seed: int) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        check(compare(make_case(seed, on_cuda=True), Settings(device="cuda")))
    finally:
        torch.use_deterministic_algorithms(False)
