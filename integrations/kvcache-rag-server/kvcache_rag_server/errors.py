"""Errors as clients see them, from every layer of the server.

A `Failed` has all of it: status, type, code, field, one sentence, and when to try again.  Queues
pass it on as an event, an `ApiError` raises it, and `response` writes it for OpenAI's clients:
`{"error": {message, type, param, code}}`.  `failure` makes one from an exception.
"""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

import fastapi
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import Request

from kvcache_rag.errors import (
    ContextTooLongError,
    InvalidInputError,
    KVCacheRagError,
    UnsupportedModelError,
)
from kvcache_rag_server.backend import (
    BAD_REQUEST,
    INVALID,
    NOT_READY,
    OVERLOADED,
    SERVER_ERROR,
    SERVER_FAULT,
    Failed,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fastapi import FastAPI

LOG: Final = logging.getLogger("kvcache_rag_server")
TOO_LONG: Final = "context_length_exceeded"
"""OpenAI's code of a prompt that is too long, at which clients shorten a conversation."""

USERS: Final = (InvalidInputError, ContextTooLongError, UnsupportedModelError)
"""Errors that a client can do something about; all others are faults of the server."""


class ApiError(KVCacheRagError, fastapi.HTTPException):
    """A request that is answered with an error.

    It is an `HTTPException` because FastAPI lets no other class pass where it reads a body.

    Attributes:
        failed: What its client reads.
    """

    def __init__(self, failed: Failed, headers: dict[str, str] | None = None) -> None:
        """Refuse a request; `headers` come with the error's own."""
        super().__init__(failed.status, failed.message, headers)
        self.failed = failed

    def __str__(self) -> str:
        return self.failed.message


# ------------------------------------------------------------------------- refusals of queues
AGAIN: Final = 1.0
"""Seconds after which to repeat what would have been answered but for an accident."""

FAULT: Final = Failed(
    SERVER_FAULT,
    SERVER_ERROR,
    "the server failed to answer this request; its log says why",
)
SHUT_DOWN: Final = Failed(
    NOT_READY,
    SERVER_ERROR,
    "the server shuts down; repeat the request later",
    AGAIN,
    code="shutting_down",
)
CLIENT_LEFT: Final = Failed(499, INVALID, "the client went away before its answer was complete")
"""Nobody reads it; metrics count its status (nginx's number)."""


def overloaded(waiting: int, retry_after: float) -> Failed:
    """There is no room left.

    Args:
        waiting: Requests that wait.
        retry_after: Seconds in which they will have been answered.
    """
    message = f"{waiting} requests wait already; repeat this one later"
    return Failed(NOT_READY, OVERLOADED, message, retry_after)


# ------------------------------------------------------------------------- from an exception
def failure(
    error: BaseException, what: str, *, asked: str = "", otherwise: Failed = FAULT
) -> Failed:
    """What a client is told of an error.

    Args:
        error: What was raised.
        what: What failed, for the log.
        asked: Method and path, where the error may be one of routing.
        otherwise: What is told of any other error: nobody's fault but ours, so the log gets all of
            it and the client nothing.
    """
    if isinstance(error, ApiError):
        return error.failed
    if isinstance(error, USERS):
        code = TOO_LONG if isinstance(error, ContextTooLongError) else None
        return Failed(BAD_REQUEST, INVALID, " ".join(str(error).split()), code=code)
    if isinstance(error, HTTPException):
        return _routing(error, asked)
    LOG.error("%s failed", what, exc_info=error)
    return otherwise


def http_failure(error: BaseException, scope: Mapping[str, Any]) -> Failed:
    """The same for an HTTP request, whose client is told the name by which the log knows it."""
    name = str(scope.get("kvcache_rag.request_id", "unknown"))
    request = Request(dict(scope))
    return failure(
        error,
        f"request {name}",
        asked=f"{request.method} {request.url.path}",
        otherwise=Failed(
            SERVER_FAULT,
            SERVER_ERROR,
            f"the server failed on this request; its log says why under {name}",
            code="internal_error",
        ),
    )


def _routing(error: HTTPException, asked: str) -> Failed:
    if error.status_code == HTTPStatus.NOT_FOUND:
        return Failed(404, INVALID, f"there is no {asked} here", code="unknown_url")
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        allowed = (error.headers or {}).get("Allow", "another method")
        message = f"{asked} is not allowed; use {allowed}"
        return Failed(405, INVALID, message, code="method_not_allowed")
    return Failed(error.status_code, INVALID, " ".join(str(error.detail).split()))


# ------------------------------------------------------------------------- to a client
def body(failed: Failed) -> dict[str, Any]:
    """The error object."""
    param = None if failed.param is None else _sendable(failed.param)
    message = _sendable(failed.message)
    return {"error": {"message": message, "type": failed.kind, "param": param, "code": failed.code}}


def headers(failed: Failed) -> dict[str, str]:
    """Headers that belong to it."""
    own = {}
    if failed.retry_after is not None:
        own["retry-after"] = str(max(1, round(failed.retry_after)))
    if failed.status == HTTPStatus.UNAUTHORIZED:
        own["www-authenticate"] = "Bearer"
    return own


def response(failed: Failed, beside: Mapping[str, str] | None = None) -> JSONResponse:
    """The answer to a request that failed; the headers `beside` come with its own."""
    return JSONResponse(body(failed), failed.status, {**(beside or {}), **headers(failed)})


def install(app: FastAPI) -> None:
    """Answer every error of an app as OpenAI would, those of routing included."""

    async def told(request: Request, error: Exception) -> JSONResponse:
        return response(http_failure(error, request.scope), getattr(error, "headers", None))

    for kind in (KVCacheRagError, HTTPException):
        app.add_exception_handler(kind, told)


def _sendable(text: str) -> str:
    # What a message repeats of a request may be half a character, which nobody can send.
    return text.encode("utf-8", "backslashreplace").decode()
