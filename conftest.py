"""Every test, here and in `integrations`, runs offline, on the CPU and with fixed seeds."""

from __future__ import annotations

import os

# Before anything imports numpy, transformers, tokenizers or chromadb; processes begun here get it.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["ANONYMIZED_TELEMETRY"] = "False"
# Workers run side by side: one thread each is faster than all threads for each, which spin.
os.environ["OMP_NUM_THREADS"] = "1"

import gc
import ipaddress
import random
import socket
from pathlib import Path
from typing import Any

import pytest
import torch

# A module of inherited tests shows the values of its asserts too.
pytest.register_assert_rewrite("tests.contracts")

torch.set_num_threads(1)

# These look at the whole repository, or count what is done in `src`; an sdist has one dist alone,
# and its tests run on the wheel.
_WHOLE = (
    *(
        "compare_commits",
        "conversations",
        "distribution",
        "docs",
        "docs_commands",
        "examples",
        "golden",
        "maps",
    ),
    *(
        "cli_soon",
        "packages",
        "project_files",
        "site_browser",
        "smollm2_package",
        "smollm2_shipped",
    ),
)
_IS_SDIST = not (Path(__file__).parent / "integrations").is_dir()
collect_ignore = [f"tests/test_{name}.py" for name in _WHOLE] if _IS_SDIST else []


def _is_local(address: Any) -> bool:
    """Whether a socket address is a Unix socket or a loopback address."""
    if not isinstance(address, tuple):
        return True
    host = address[0]
    if host in ("localhost", ""):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what `make test` leaves out."""
    try:
        from quick import is_of_others, slow_names
    except ImportError:  # an sdist runs all that it has
        return
    slow = slow_names()
    for item in items:
        function = item.nodeid.partition("[")[0]
        parameters = item.callspec.id if hasattr(item, "callspec") else ""
        if {function, function.partition("::")[0]} & slow or is_of_others(parameters):
            item.add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    """Libraries and tests stay to the end: no collection looks through them again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def little_to_collect() -> None:
    """Nor through what earlier files left: benchmarks collect before each of their rounds."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def no_network() -> Any:
    """Make every connection off this machine fail with a clear error."""

    def guard(name: str) -> Any:
        real = getattr(socket.socket, name)

        def connect(self: socket.socket, address: Any) -> Any:
            if not _is_local(address):
                raise RuntimeError(f"a test tried to reach the network: {address}")
            return real(self, address)

        return connect

    with pytest.MonkeyPatch.context() as patch:
        for name in ("connect", "connect_ex"):
            patch.setattr(socket.socket, name, guard(name))
        yield


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Start every test from the same random state."""
    random.seed(0)
    torch.manual_seed(0)
