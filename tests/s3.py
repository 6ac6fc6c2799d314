"""A real S3 API on loopback: moto's server, with one bucket and credentials that it does not check.

The same server can be told to be slow, to answer with garbage, or to refuse.
"""

from __future__ import annotations

import socket
import threading
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.request import Request, urlopen

from botocore.session import get_session
from moto.s3.models import s3_backends
from moto.server import ThreadedMotoServer

if TYPE_CHECKING:
    from collections.abc import Iterator

BUCKET = "chunks"
SECRET = "not-a-real-secret"


def options(endpoint: str) -> dict[str, Any]:
    """Arguments of s3fs for a server on loopback."""
    return {
        "key": "testing",
        "secret": SECRET,
        "endpoint_url": endpoint,
        "client_kwargs": {"region_name": "us-east-1"},
    }


class Server:
    """The server and its bucket."""

    def __init__(self) -> None:
        self.filesystem: Any = None  # s3fs's, kept by whoever opens it first
        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        self._server.start()
        self.endpoint = "http://{}:{}".format(*self._server.get_host_and_port())
        client = get_session().create_client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id="testing",
            aws_secret_access_key=SECRET,
            region_name="us-east-1",
        )
        client.create_bucket(Bucket=BUCKET)
        client.close()

    def stop(self) -> None:
        """Stop answering: connections are refused from now on."""
        self._server.stop()

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """Check credentials, on all servers of this process; those of these tests are wrong."""
        self._free_calls(b"0")
        try:
            yield
        finally:
            self._free_calls(b"inf")

    def _free_calls(self, count: bytes) -> None:
        url, headers = f"{self.endpoint}/moto-api/reset-auth", {"Content-Type": "text/plain"}
        with urlopen(Request(url, data=count, headers=headers, method="POST")):
            pass

    @property
    def objects(self) -> dict[str, Any]:
        """moto's objects by name, whatever an API says."""
        backend = next(iter(s3_backends.values()))["aws"]
        return dict(backend.buckets[BUCKET].keys.items())

    def age(self, prefix: str, seconds: float) -> None:
        """Let the objects have been written that much earlier."""
        for name, thing in self.objects.items():
            if name.startswith(prefix):
                thing.last_modified -= timedelta(seconds=seconds)


PAGE = b"<html><body>Please log in</body></html>"
REPLY = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % len(PAGE) + PAGE


@contextmanager
def impostor(reply: bytes = b"") -> Iterator[str]:
    """An endpoint that gives every request the same reply, or accepts it and never says a word."""
    listener = socket.create_server(("127.0.0.1", 0))
    accepted: list[socket.socket] = []

    def accept() -> None:
        while True:
            try:
                one = listener.accept()[0]
            except OSError:
                return
            if reply:
                with one:
                    one.recv(1 << 20)
                    one.sendall(reply)
            else:
                accepted.append(one)

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(10)
        for one in accepted:
            one.close()
