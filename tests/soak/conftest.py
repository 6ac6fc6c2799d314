"""How long the long tests are: `--long` takes half an hour and is for releases."""

from __future__ import annotations

from dataclasses import dataclass

import pytest


@dataclass(frozen=True)
class Amount:
    """Chooses how often something is tried.

    Attributes:
        is_long: Whether `--long` was said.
    """

    is_long: bool

    def __call__(self, short: int, long: int) -> int:
        """The number for this run."""
        return long if self.is_long else short


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="try everything far more often")


@pytest.fixture(scope="session")
def amount(pytestconfig: pytest.Config) -> Amount:
    """The option; a run from elsewhere does not know it and is short."""
    return Amount(bool(pytestconfig.getoption("--long", default=False)))
