"""`docs/serving.md`: what it says to type works, and its tables are what the server has."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import forks
import httpx
import pytest
from serve_fakes import chat, scripted

from kvcache_rag.errors import byte_count
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
def served(
    command: str, folder: Path, port: int, environment: dict[str, str]
) -> Iterator[subprocess.Popen[str]]:
    """Run a command that serves until it is stopped; gives back control once it is ready."""
    words = ["bash", "-c", f"exec {command} --port {port}"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen(words, cwd=folder, env=environment, **pipes)
    try:
        assert process.stdout is not None
        assert "serving tiny at" in process.stdout.readline(), f"it does not serve: {command}"
        yield process
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=PATIENCE)


def free_ports(count: int) -> list[int]:
    """Ports that nobody has at this moment."""
    with ExitStack() as stack:
        local = ("127.0.0.1", 0)
        probes = [stack.enter_context(socket.create_server(local)) for _ in range(count)]
        return [probe.getsockname()[1] for probe in probes]


@contextmanager
def proxied(folder: Path, ports: list[int]) -> Iterator[str]:
    """The page's nginx before the servers at the last two of three ports; gives its address."""
    nginx = shutil.which("nginx", path=f"{os.environ['PATH']}{os.pathsep}/usr/sbin")
    if nginx is None:
        pytest.skip("there is no nginx; apt-get install nginx-light")
    (site,) = re.findall(r"```nginx\n(.*?)```", PAGE, re.S)
    for named, port in zip((8000, 8001, 8002), ports, strict=True):
        assert f"127.0.0.1:{named};" in site
        site = site.replace(f"127.0.0.1:{named};", f"127.0.0.1:{port};")
    kept = "".join(
        f"{what}_temp_path {folder}/{what};\n"
        for what in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    (folder / "nginx.conf").write_text(
        f"daemon off;\nmaster_process off;\npid {folder}/nginx.pid;\nerror_log stderr warn;\n"
        f"events {{}}\nhttp {{\naccess_log off;\n{kept}{site}}}\n",
        encoding="utf-8",
    )
    command = [nginx, "-p", str(folder), "-e", "stderr", "-c", str(folder / "nginx.conf")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            begun = time.monotonic()
            while True:
                try:
                    socket.create_connection(("127.0.0.1", ports[0]), timeout=1).close()
                    break
                except OSError:
                    assert process.poll() is None, process.stderr and process.stderr.read()
                    assert time.monotonic() - begun < PATIENCE
                    time.sleep(0.05)
            yield f"http://127.0.0.1:{ports[0]}"
        finally:
            process.terminate()
            process.communicate(timeout=PATIENCE)


def asked(url: str, number: int) -> tuple[str, int]:
    """The text of an answer about a document of its own, and the chunks that were missing."""
    body = chat(documents=[f"Number {number} is called N{number}."], max_tokens=4)
    reply = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=PATIENCE)
    assert reply.status_code == 200, reply.text
    answer = reply.json()
    return answer["choices"][0]["message"]["content"], answer["kvcache"]["misses"]


def lines_of(url: str) -> Iterator[str]:
    """A long answer, line by line as it comes."""
    body = chat("Tell a long story.", stream=True, max_tokens=2000, temperature=2, seed=1)
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=PATIENCE) as reply:
        yield from filter(None, reply.iter_lines())


@pytest.mark.timeout(600)
def test_two_servers_behind_the_proxy_share_chunks_and_one_may_be_killed(tmp_path: Path) -> None:
    ports = free_ports(3)
    urls = [f"http://127.0.0.1:{port}" for port in ports[1:]]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    serve = f"{sys.executable} -m kvcache_rag.cli serve tiny --kv-dir {tmp_path}/kv"
    with ExitStack() as stack:
        servers = [
            stack.enter_context(served(serve, tmp_path, port, environment)) for port in ports[1:]
        ]
        proxy = stack.enter_context(proxied(tmp_path, ports))
        computed = [asked(urls[0], number) for number in range(3)]
        assert [misses for _, misses in computed] == [1] * 3
        shared = [(text, 0) for text, _ in computed]
        assert [asked(urls[1], number) for number in range(3)] == shared
        # Two at a time, so that the proxy gives each server some.
        with ThreadPoolExecutor(2) as pool:
            assert list(pool.map(asked, [proxy] * 6, [0, 1, 2] * 2)) == shared * 2
        counted = [
            int(float(re.findall(r"^kvcache_rag_answers_total\{.*?\} (\S+)", text, re.M)[0]))
            for text in (httpx.get(f"{url}/metrics").text for url in urls)
        ]
        assert all(count > 3 for count in counted), "both answered"
        servers[1].kill()
        assert [asked(proxy, number) for number in (0, 1, 2, 0)] == [*shared, shared[0]]
        stream = lines_of(proxy)
        assert next(stream).startswith("data: ")
        servers[0].kill()  # what comes is not held back: the end of it never comes
        with pytest.raises(httpx.RemoteProtocolError):
            list(stream)


@pytest.mark.timeout(900)
def test_every_command_and_snippet_works_in_its_order(tmp_path: Path) -> None:
    (port,) = free_ports(1)
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
                pipes: dict[str, Any] = {"capture_output": True, "text": True, "timeout": PATIENCE}
                words = ["bash", "-ec", here]
                done = subprocess.run(words, cwd=tmp_path, env=environment, check=False, **pipes)
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
    assert said.keys() == limits.keys()
    for name, value in limits.items():
        if value is None:
            assert said[name] == "the context window"
        else:
            assert byte_count(said[name]) == value


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
