"""A server's socket, opened before anything is imported or loaded in vain."""

from __future__ import annotations

import errno
import socket
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from kvcache_rag.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Iterator

_BACKLOG: Final = 2048


class _Listener(socket.socket):
    """A socket of which as many connections may wait to be accepted as we say.

    asyncio has one number for that and for how many it accepts at once.  Where there is no room for
    a further one it plans another try for each of them, two thousand in a second, so it shall
    accept one at once.
    """

    def listen(self, backlog: int = 0, /) -> None:
        """As `_BACKLOG` has it."""
        del backlog
        super().listen(_BACKLOG)


@contextmanager
def listening(host: str, port: int) -> Iterator[socket.socket]:
    """A socket that listens, taken before anything is loaded.

    Args:
        host: Name or address; of several addresses, the first, IPv4 before IPv6.
        port: 0 for any free one.

    Raises:
        InvalidInputError: If nobody can listen there.
    """
    try:
        addresses = socket.getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError as error:
        raise InvalidInputError(
            f"{host} is no address of this machine ({error.strerror}); listen on 127.0.0.1"
        ) from error
    # What is asked at localhost is mostly asked by IPv4.
    family, kind, protocol, _, address = min(addresses, key=lambda one: one[0] != socket.AF_INET)
    with _Listener(family, kind, protocol) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
            listener.listen()
        except OSError as error:
            raise _unusable(host, port, error) from error
        yield listener


def _unusable(host: str, port: int, error: OSError) -> InvalidInputError:
    if error.errno == errno.EADDRINUSE:
        return InvalidInputError(
            f"port {port} of {host} is in use by another program; choose another with --port, or 0 "
            "for any free one"
        )
    return InvalidInputError(
        f"port {port} of {host} cannot be listened on ({error.strerror}); choose another with "
        "--host and --port"
    )
