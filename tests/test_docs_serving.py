"""`docs/serving.md`: what it says to type works, and its tables are what the server has."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import forks
import pytest
from serve_fakes import scripted

from kvcache_rag_server.metrics import BackendCollector, ServerTelemetry
from kvcache_rag_server.settings import RequestLimits

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
BLOCK = re.compile(
    r"(?:<!-- (not run: [^>]+|server) -->\n)?```(bash|python|yaml)\n(.*?)```"
    r"(?:\n\n```text\n(.*?)```)?",
    re.S,
)
PATIENCE = 180.0


@contextmanager
def served(command: str, folder: Path, port: int, environment: dict[str, str]) -> Iterator[None]:
    """Run a command that serves until it is stopped; gives back control once it is ready."""
    process = subprocess.Popen(
        ["bash", "-c", f"exec {command} --port {port}"],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        if process.stdout is None or "serving tiny at" not in process.stdout.readline():
            raise RuntimeError(f"it does not serve: {command}")
        yield
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=PATIENCE)


@pytest.mark.timeout(900)
def test_every_command_and_snippet_works_in_its_order(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}
    with ExitStack() as stack:
        for mark, kind, code, output in BLOCK.findall(PAGE):
            if mark.startswith("not run"):
                continue
            if kind == "yaml":
                (tmp_path / "server.yaml").write_text(code, encoding="utf-8")
                continue
            here = code.replace("localhost:8000", f"127.0.0.1:{port}")
            if mark == "server":
                stack.close()  # the one before has the port
                stack.enter_context(served(here.strip(), tmp_path, port, environment))
                continue
            if kind == "python":
                status, printed, errors = forks.run(here, tmp_path)
            else:
                done = subprocess.run(
                    ["bash", "-ec", here],
                    cwd=tmp_path,
                    env=environment,
                    capture_output=True,
                    text=True,
                    timeout=PATIENCE,
                )
                status, printed, errors = done.returncode, done.stdout, done.stderr
            assert status == 0, f"{code}\n{printed}\n{errors}"
            assert '"error"' not in printed, f"{code}\n{printed}"
            if output:
                assert printed.strip() == output.strip(), code


def test_the_page_has_servers_and_blocks_of_both_kinds() -> None:
    found = BLOCK.findall(PAGE)
    assert sum(mark == "server" for mark, *_ in found) == 3
    assert sum(kind == "python" for _, kind, *_ in found) >= 4
    assert sum(mark.startswith("not run") for mark, *_ in found) <= 2
    assert PAGE.count("```") == 2 * (len(re.findall(r"^```\w*\n.*?^```$", PAGE, re.S | re.M)))


def rows(heading: str) -> list[list[str]]:
    """Cells of the first table behind a heading, without its head."""
    section = PAGE.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_the_table_of_limits_is_what_limits_are() -> None:
    said = {row[0].strip("`"): row[1] for row in rows("Limits")}
    limits = {f"--{name.replace('_', '-')}": value for name, value in RequestLimits()}
    assert said == {
        name: "the context window" if value is None else str(value)
        for name, value in limits.items()
    }


async def test_the_table_of_metrics_is_of_those_that_a_server_shows() -> None:
    said = {}
    for names, labels, _ in rows("Metrics"):
        for name in re.findall(r"`(\w+)`", names):
            said[name] = {label.strip() for label in labels.split(",") if label.strip()}
    _, backend = scripted()
    counting = ServerTelemetry(backend)
    found = {}
    collector: Any  # prometheus-client has no public way to a metric's name and labels
    for collector in list(counting.registry._collector_to_names):
        if isinstance(collector, BackendCollector):
            for family in collector.collect():
                kind = "_total" if family.type == "counter" else ""
                found[f"{family.name}{kind}"] = set(getattr(family, "_labelnames", ()))
        else:
            kind = "_total" if collector._type == "counter" else ""
            found[f"{collector._name}{kind}"] = set(collector._labelnames)
    shown = {name.removeprefix("kvcache_rag_"): labels for name, labels in found.items()}
    assert said == {name: shown[name] for name in said} != {}
