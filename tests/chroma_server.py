"""A Chroma server of its own process, for tests of collections that are reached over HTTP."""

from __future__ import annotations

import contextlib
import gc
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import httpx

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@contextlib.contextmanager
def chroma_server(folder: Path) -> Iterator[tuple[str, int]]:
    """A server on a free port, stopped in the end."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    # The script `chroma` need not lie beside this Python.
    command = [sys.executable, "-c", "from chromadb.cli.cli import app; app()", "run"]
    command += ["--path", str(folder), "--host", "127.0.0.1", "--port", str(port)]
    nowhere = subprocess.DEVNULL
    process = subprocess.Popen(command, stdout=nowhere, stderr=nowhere)
    try:
        for _ in range(300):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            time.sleep(0.1)
        yield "127.0.0.1", port
    finally:
        _close_sessions()
        process.terminate()
        process.wait(timeout=20)


def _close_sessions() -> None:
    # Chroma's clients never close their sessions, and a later test would be blamed for the sockets.
    for one in gc.get_objects():
        if type(one) is httpx.Client:  # `isinstance` would ask, and so wake, lazy objects
            one.close()
