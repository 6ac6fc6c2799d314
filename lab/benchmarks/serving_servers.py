"""The servers of one arm: `kvcache-rag serve` processes of one thread each, on loopback."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from benchmarks.serving_client import HOST
from benchmarks.serving_results import AHEAD, NO_CACHE, OWN, SHARED

if TYPE_CHECKING:
    from collections.abc import Iterator

INSTANCES: Final = 2
REUSE, FULL = "reuse", "full"
_START: Final = 120.0  # seconds that a server may take until it answers
_STOP: Final = 20.0
# The queue is the measurement: nothing is turned away.
_WAITING: Final = 100_000
_PREFETCH_AFTER: Final = 0.05


@dataclass(frozen=True)
class Arm:
    """One way to serve.

    Attributes:
        name: One of `ARMS`.
        policy: Of every request.
        caches: What is cached where: "none", "own" (a folder per instance), "shared" (one for all).
        prefetch: Whether chunks of waiting requests are computed or loaded ahead.
    """

    name: str
    policy: str
    caches: Literal["none", "own", "shared"]
    prefetch: bool


WAYS: Final = {
    NO_CACHE: Arm(NO_CACHE, FULL, "none", prefetch=False),
    OWN: Arm(OWN, REUSE, "own", prefetch=False),
    SHARED: Arm(SHARED, REUSE, "shared", prefetch=False),
    AHEAD: Arm(AHEAD, REUSE, "shared", prefetch=True),
}


@dataclass(frozen=True)
class Place:
    """Where an arm runs.

    Attributes:
        model: Folder of model and tokenizer.
        work: Empty folder for the caches and the servers' logs.
        cache_bytes: Of all caches of the arm together.
        device: Where chunks are prefetched: "same", or a device with a copy of the model.
        instances: Servers.
    """

    model: Path
    work: Path
    cache_bytes: int
    device: str = "same"
    instances: int = INSTANCES

    def cache(self, arm: Arm, instance: int) -> tuple[Path, int] | None:
        """The folder of an instance's cache, and the most bytes that it may hold."""
        if arm.caches == "none":
            return None
        if arm.caches == "shared":
            return self.work / "store-0", self.cache_bytes
        return self.work / f"store-{instance}", self.cache_bytes // self.instances

    def held(self) -> int:
        """Bytes of the cached chunks on disk now."""
        total = 0
        for file in self.work.glob("store-*/**/*.safetensors"):
            with suppress(FileNotFoundError):  # evicted since
                total += file.stat().st_size
        return total


@dataclass(frozen=True)
class Instances:
    """Servers that run.

    Attributes:
        ports: On loopback.
        pids: Their processes.
    """

    ports: tuple[int, ...]
    pids: tuple[int, ...]

    def processor_seconds(self) -> float:
        """What all of them have used so far, nan where the system has no `/proc`."""
        ticks = 0
        for pid in self.pids:
            file = Path("/proc") / str(pid) / "stat"
            if not file.is_file():
                return float("nan")
            # Behind the name, which may hold anything: user and system time are fields 14 and 15.
            fields = file.read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")


def command_of(arm: Arm, place: Place, instance: int, port: int) -> list[str]:
    """The command line of one instance."""
    words = ["-m", "kvcache_rag.cli", "serve", str(place.model), "--host", HOST]
    words += ["--port", str(port), "--max-waiting", str(_WAITING)]
    words += ["--max-concurrency", str(_WAITING), "--max-total-concurrency", str(_WAITING)]
    words += ["--memory-bytes", "1"]  # one tier, the folder, so that bytes are equal
    cache = place.cache(arm, instance)
    if cache is not None:
        words += ["--store", str(cache[0]), "--store-bytes", str(cache[1])]
    words += ["--prefetch", place.device if arm.prefetch else "off"]
    if arm.prefetch:
        words += ["--prefetch-after", str(_PREFETCH_AFTER)]
    return [sys.executable, *words]


@contextmanager
def running(arm: Arm, place: Place) -> Iterator[Instances]:
    """Start the instances of an arm, give them when all are ready, stop them at the end.

    Raises:
        RuntimeError: If one of them ends, or is not ready in time; with the end of its log.
    """
    with ExitStack() as stack:
        started = []
        for instance in range(place.instances):
            port = _free_port()
            log = place.work / f"instance-{instance}.log"
            command = command_of(arm, place, instance, port)
            started.append((stack.enter_context(_process(command, log)), port, log))
        for process, port, log in started:
            _await_ready(process, port, log)
        ports = tuple(port for _, port, _ in started)
        yield Instances(ports, tuple(process.pid for process, *_ in started))
        for process, *_ in started:  # all at once, then each is waited for
            process.send_signal(signal.SIGTERM)


@contextmanager
def _process(command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    threads = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    settings = {**dict.fromkeys(threads, "1"), "HF_HUB_OFFLINE": "1"}
    settings["TOKENIZERS_PARALLELISM"] = "false"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            stdout=out,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **settings},
        )
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(_STOP)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _free_port() -> int:
    with socket.socket() as one:
        one.bind((HOST, 0))
        port: int = one.getsockname()[1]
    return port


def _await_ready(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + _START
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"a server ended with code {process.returncode}: {_end_of(log)}")
        with suppress(OSError, http.client.HTTPException):
            connection = http.client.HTTPConnection(HOST, port, timeout=5)
            try:
                connection.request("GET", "/ready")
                if connection.getresponse().status == 200:
                    return
            finally:
                connection.close()
        time.sleep(0.1)
    raise RuntimeError(f"a server was not ready within {_START:.0f} s: {_end_of(log)}")


def _end_of(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return " | ".join(lines[-5:]) or "it printed nothing"
