"""What a client reads of whatever went wrong, in every layer of the server.

A `Failed` is all of it: status, type, code, field, one sentence, and when to try again.  Queues
hand it on as an event, an `ApiError` raises it, and `response` writes it as OpenAI's
clients read it: `{"error": {message, type, param, code}}`.  `failure` gives that of an exception.
"""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final, get_args

import fastapi
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import Request

from kvcache_rag.errors import (
    ContextTooLongError,
    InvalidInputError,
    KVCacheRagError,
    UnsupportedModelError,
    close_to,
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
    from collections.abc import Collection, Mapping, Sequence

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
    if isinstance(error, RequestValidationError):
        return _invalid(error.errors(), scope.get("route"))
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


def _invalid(errors: Sequence[Mapping[str, Any]], route: Any) -> Failed:
    """What is wrong with a body, as pydantic found it: one sentence about one error.

    What was sent is not repeated: it may be long, and it may be no text that can be sent back.

    Args:
        errors: Of pydantic.
        route: FastAPI's, which has the form of the body.
    """
    first = next((error for error in errors if _named(error) in _UNSUPPORTED), errors[0])
    if first["type"] == "json_invalid":
        message = "the body is not JSON; send a JSON object with its content type"
        return Failed(BAD_REQUEST, INVALID, message)
    path = _path(first)
    if not path:
        message = "the body must be a JSON object, sent with its content type"
        return Failed(BAD_REQUEST, INVALID, message)
    known = _fields_beside(first, route) if first["type"] == "extra_forbidden" else ()
    return Failed(BAD_REQUEST, INVALID, _sentence(first, path, known), param=path)


def _fields_beside(error: Mapping[str, Any], route: Any) -> Collection[str]:
    """Names that a field may have where one has another; () where forms differ."""
    form = _form_of(route.body_field.field_info.annotation)
    for part in _place(error)[:-1]:
        if part not in getattr(form, "model_fields", ()):
            return ()
        form = _form_of(form.model_fields[part].annotation)
    return [name for name in getattr(form, "model_fields", ()) if name not in _UNSUPPORTED]


def _form_of(annotation: Any) -> Any:
    """The model in an annotation, which may be optional; None for none."""
    kinds = (annotation, *get_args(annotation))
    return next((kind for kind in kinds if hasattr(kind, "model_fields")), None)


# ------------------------------------------------------------------------- bodies that are wrong
# Fields of OpenAI's API that a request may carry only with the value that changes nothing.
_UNSUPPORTED: Final = {
    "audio": "this server answers in text only; leave audio out",
    "best_of": "one answer is given per request; leave best_of out or set it to 1",
    "echo": "the prompt is not repeated; leave echo out",
    "frequency_penalty": "frequency_penalty is not supported; leave it out or set it to 0",
    "function_call": "functions are not supported; leave function_call out",
    "functions": "functions are not supported; leave functions out",
    "logit_bias": "logit_bias is not supported; leave it out",
    "logprobs": "logprobs are not supported; leave logprobs out",
    "modalities": 'this server answers in text only; leave modalities out or say ["text"]',
    "n": "one answer is given per request; leave n out or set it to 1",
    "prediction": "predicted outputs are not supported; leave prediction out",
    "presence_penalty": "presence_penalty is not supported; leave it out or set it to 0",
    "response_format": 'answers are plain text; leave response_format out or say {"type": "text"}',
    "suffix": "a suffix is not supported; leave it out",
    "tool_choice": "tools are not supported; leave tool_choice out",
    "tool_calls": "calls of tools are not supported; leave tool_calls out",
    "tools": "tools are not supported; leave tools out",
    "top_logprobs": "logprobs are not supported; leave top_logprobs out",
}

_IN_MESSAGES: Final = {
    "role": "must be system, developer, user or assistant; results of tools are not supported",
    "type": 'must be "text": this server reads no images, audio or files',
}


def _sentence(error: Mapping[str, Any], path: str, known: Collection[str]) -> str:
    name, kind, text = _named(error), str(error["type"]), str(error["msg"])
    if kind == "extra_forbidden" and name not in _UNSUPPORTED:
        close = close_to(str(_place(error)[-1]), known)
        hint = f"did you mean {close}?" if close else "leave it out"
        return f"there is no field {path}; {hint}"
    if kind == "missing":
        return f"{path} is missing"
    if name in _UNSUPPORTED:
        return _UNSUPPORTED[name]
    if path.startswith("messages[") and name in _IN_MESSAGES:
        return f"{path} {_IN_MESSAGES[name]}"
    return f"{path} cannot be used: {text[:1].lower()}{text[1:]}"


def _place(error: Mapping[str, Any]) -> list[Any]:
    """Where the error is; without "body", and without the tags of alternatives."""
    return [
        part for part in error["loc"][1:] if not (isinstance(part, str) and part.startswith("("))
    ]


def _named(error: Mapping[str, Any]) -> str:
    """The field that is wrong: of the body, or of one of its messages."""
    names = [part for part in _place(error) if isinstance(part, str)]
    if not names:
        return ""
    return names[-1] if names[0] == "messages" else names[0]


def _path(error: Mapping[str, Any]) -> str:
    path = ""
    for part in _place(error):
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else str(part)
    return path


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
    """Answer every error of an app as OpenAI would, those of routing and parsing included."""

    async def told(request: Request, error: Exception) -> JSONResponse:
        return response(http_failure(error, request.scope), getattr(error, "headers", None))

    for kind in (KVCacheRagError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, told)


def _sendable(text: str) -> str:
    # What a message repeats of a request may be half a character, which nobody can send.
    return text.encode("utf-8", "backslashreplace").decode()
