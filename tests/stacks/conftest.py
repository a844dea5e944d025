"""The budget under which other libraries train here: `pytest tests/stacks --stack-budget 0.6x`."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def budget(pytestconfig: pytest.Config) -> str:
    return str(pytestconfig.getoption("--stack-budget"))
