"""`kvcache-rag serve --replicas` in a process of its own, as a user starts it."""

from __future__ import annotations

import os
import queue
import re
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import httpx
import psutil

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

START = 240.0
"""Seconds that a start may take on a machine that is busy with other things."""


def wait_until(true: Callable[[], Any], seconds: float = 60.0, pause: float = 0.05) -> Any:
    """What `true` gives once that is true; fails when it is not in time."""
    until = time.monotonic() + seconds
    while not (found := true()):
        assert time.monotonic() < until, f"not within {seconds} s"
        time.sleep(pause)
    return found


class RayServer:
    """A server and all processes that it started.

    Attributes:
        url: Where it is.
        started: Seconds from the command to the line that announces it.
        lines: What it wrote, its errors included.
    """

    def __init__(self, *arguments: str, environment: dict[str, str] | None = None) -> None:
        """Run `kvcache-rag serve` with `arguments` and wait until it is ready."""
        begun = time.monotonic()
        command = [sys.executable, "-m", "kvcache_rag.cli", "serve", *arguments, "--port", "0"]
        self.lines: list[str] = []
        self._new: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # a terminal's process group, for Ctrl-C
            env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.url = ""
        while not self.url:
            line = self._new.get(timeout=max(0.0, begun + START - time.monotonic()))
            assert line is not None, "".join(self.lines)
            announced = re.search(r"serving .* at (http://\S+?)/v1", line)
            self.url = announced.group(1) if announced else ""
        self.started = time.monotonic() - begun

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as output:
            for line in output:
                self.lines.append(line)
                self._new.put(line)
        self._new.put(None)

    def processes(self) -> list[psutil.Process]:
        """All that it started and that live."""
        with_children = psutil.Process(self.process.pid).children(recursive=True)
        return [one for one in with_children if one.is_running()]

    def replicas(self) -> list[int]:
        """Process ids of the replicas that answer, as the metrics name them."""
        text = httpx.get(f"{self.url}/metrics", timeout=30.0).text
        found = re.findall(r'kvcache_rag_waiting_requests\{replica="[^"]*:(\d+)"\}', text)
        return sorted(map(int, found))

    def end(self, number: int, *, to_all: bool = False) -> int:
        """Send a signal, wait for the end, and give the exit status.

        With `to_all` all its processes get it, as from Ctrl-C in a terminal.
        """
        if to_all:
            os.killpg(self.process.pid, number)
        else:
            self.process.send_signal(number)
        status = self.process.wait(timeout=60.0)
        self._reader.join(timeout=10.0)
        return status

    def kill(self) -> None:
        """End everything, however it is."""
        children = self.processes() if self.process.poll() is None else []
        for one in [psutil.Process(self.process.pid)] if children else []:
            one.kill()
        for child in children:
            if child.is_running():
                child.kill()
        self.process.wait(timeout=60.0)
        self._reader.join(timeout=10.0)


def save_model(folder: Path) -> None:
    """Write the random model of `tests.small`, whose answers are as long as they may be."""
    from tests.small import CHAT_TEMPLATE, make_model, make_tokenizer

    model, tokenizer = make_model(), make_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    tokenizer.chat_template = None
