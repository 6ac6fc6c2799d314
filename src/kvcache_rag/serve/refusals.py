"""What a queue tells those whom it does not answer."""

from __future__ import annotations

from kvcache_rag.serve.work import NOT_READY, OVERLOADED, SERVER_ERROR, SERVER_FAULT, Failed

AGAIN = 1.0
"""Seconds after which to repeat what would have been answered but for an accident."""


def overloaded(waiting: int, retry_after: float) -> Failed:
    """There is no room left.

    Args:
        waiting: Requests that wait.
        retry_after: Seconds in which they will have been answered.
    """
    message = f"{waiting} requests wait already; repeat this one later"
    return Failed(NOT_READY, OVERLOADED, message, retry_after=retry_after)


def shut_down() -> Failed:
    """Nothing is answered any more."""
    message = "the server shuts down; repeat the request later"
    return Failed(NOT_READY, SERVER_ERROR, message, AGAIN)


def broken() -> Failed:
    """The thread that answers has ended by a fault of our own."""
    message = "the server failed to answer this request; its log says why"
    return Failed(SERVER_FAULT, SERVER_ERROR, message)


def overdue() -> Failed:
    """Nothing was retrieved in time."""
    message = "retrieving documents takes too long; repeat the request later, or send them along"
    return Failed(NOT_READY, SERVER_ERROR, message, AGAIN)
