"""How long the long tests are: `--long` takes half an hour and is for releases."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Serve: TypeAlias = "Callable[..., tuple[int, str]]"


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


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Begins a server of the packaged reader in a process of its own; gives its pid and URL."""
    with ExitStack() as stack:

        def begin(*words: str, **variables: str) -> tuple[int, str]:
            command = [sys.executable, "-m", "kvcache_rag.cli", "serve", "tiny", "--port", "0"]
            environment = {**os.environ, **variables}
            process = stack.enter_context(
                subprocess.Popen(
                    [*command, *words], stdout=subprocess.PIPE, text=True, env=environment
                )
            )
            stack.callback(process.kill)
            assert process.stdout is not None
            match = re.search(r" at (http://[^ ]+)/v1,", process.stdout.readline())
            assert match
            return process.pid, match[1]

        yield begin
