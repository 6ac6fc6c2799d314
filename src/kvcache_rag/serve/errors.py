"""Errors as OpenAI's clients read them: `{"error": {message, type, param, code}}`."""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from kvcache_rag.errors import ContextTooLongError, KVCacheRagError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fastapi import FastAPI, Request

    from kvcache_rag.serve.backend import Failed

LOG: Final = logging.getLogger("kvcache_rag.serve")
INVALID: Final = "invalid_request_error"
SERVER_ERROR: Final = "server_error"
TOO_LONG: Final = "context_length_exceeded"
"""OpenAI's code of a prompt that is too long, at which clients shorten a conversation."""
# Every ContextTooLongError says it; of an error from another process only its sentence comes.
_WINDOW: Final = "context window"

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


class ApiError(KVCacheRagError):
    """A request that is answered with an error.

    Attributes:
        status: Of HTTP, 4xx or 5xx.
        message: One sentence: what was wrong, what to do.
        kind: OpenAI's `type`, such as "invalid_request_error".
        param: The field that was wrong, or None.
        code: OpenAI's `code`, such as "model_not_found", or None.
        retry_after: Seconds after which the same request may succeed, or None.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        """See the attributes."""
        super().__init__(message)
        # What a message repeats of a request may be half a character, which nobody can send.
        self.message = _sendable(message)
        self.param = None if param is None else _sendable(param)
        self.status, self.kind = status, kind
        self.code, self.retry_after = code, retry_after

    def __reduce__(self) -> Any:
        # Exceptions are made anew of their message alone; this one crosses processes too.
        return (
            _unpickled,
            (self.status, self.message, self.kind, self.param, self.code),
            {"retry_after": self.retry_after},
        )

    @property
    def body(self) -> dict[str, Any]:
        """The error object."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}

    @property
    def headers(self) -> dict[str, str]:
        """Headers that belong to it."""
        headers = {}
        if self.retry_after is not None:
            headers["retry-after"] = str(max(1, round(self.retry_after)))
        if self.status == HTTPStatus.UNAUTHORIZED:
            headers["www-authenticate"] = "Bearer"
        return headers

    def response(self, headers: Mapping[str, str] | None = None) -> JSONResponse:
        """The answer to the request; `headers` come beside its own."""
        return JSONResponse(self.body, self.status, {**(headers or {}), **self.headers})


def _unpickled(
    status: int, message: str, kind: str, param: str | None, code: str | None
) -> ApiError:
    return ApiError(status, message, kind=kind, param=param, code=code)


def response(error: ApiError) -> JSONResponse:
    """The answer to a request that is refused."""
    return error.response()


def failed(event: Failed) -> ApiError:
    """What a backend says, as an error of the request."""
    is_long = event.status == HTTPStatus.BAD_REQUEST and _WINDOW in event.message
    return ApiError(
        event.status,
        event.message,
        kind=event.kind,
        code=TOO_LONG if is_long else None,
        retry_after=event.retry_after,
    )


def mistake(error: KVCacheRagError) -> ApiError:
    """A user's mistake that the library found."""
    if isinstance(error, ApiError):
        return error
    code = TOO_LONG if isinstance(error, ContextTooLongError) else None
    return ApiError(400, " ".join(str(error).split()), code=code)


def fault(error: BaseException, request_id: str) -> ApiError:
    """An error of ours: the log gets all of it, the client the name under which it is there."""
    LOG.error("request %s failed", request_id, exc_info=error)
    return ApiError(
        500,
        f"the server failed on this request; its log says why under {request_id}",
        kind=SERVER_ERROR,
        code="internal_error",
    )


def as_api_error(error: BaseException, request_id: str) -> ApiError:
    """Whatever was raised while a request was answered."""
    return mistake(error) if isinstance(error, KVCacheRagError) else fault(error, request_id)


def refusal(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """What is wrong with a body, as pydantic found it: one sentence about one error.

    What was sent is not repeated: it may be long, and it may be no text that can be sent back.
    """
    first = next((one for one in errors if _named(one) in _UNSUPPORTED), errors[0])
    if first["type"] == "json_invalid":
        return ApiError(400, "the body is not JSON; send a JSON object with its content type")
    path = _path(first)
    if not path:
        return ApiError(400, "the body must be a JSON object, sent with its content type")
    return ApiError(400, _sentence(first, path), param=path)


def _sentence(error: Mapping[str, Any], path: str) -> str:
    name, kind, text = _named(error), str(error["type"]), str(error["msg"])
    if kind == "extra_forbidden" and name not in _UNSUPPORTED:
        return f"there is no field {path}; leave it out"
    if kind == "missing":
        return f"{path} is missing"
    if name in _UNSUPPORTED:
        return _UNSUPPORTED[name]
    if path.startswith("messages[") and name in _IN_MESSAGES:
        return f"{path} {_IN_MESSAGES[name]}"
    return f"{path} cannot be used: {text[:1].lower()}{text[1:]}"


def install(app: FastAPI) -> None:
    """Answer every error of an app as OpenAI would, those of routing and parsing included."""

    async def own(request: Request, error: Exception) -> JSONResponse:
        return as_api_error(error, request_id(request.scope)).response()

    async def invalid(request: Request, error: Exception) -> JSONResponse:
        found = error.errors() if isinstance(error, RequestValidationError) else ()
        return refusal(found).response()

    async def http(request: Request, error: Exception) -> JSONResponse:
        if not isinstance(error, HTTPException):
            return fault(error, request_id(request.scope)).response()
        return _routing(request, error).response(error.headers)

    app.add_exception_handler(KVCacheRagError, own)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http)


def request_id(scope: Mapping[str, Any]) -> str:
    """The name of a request in log and headers; "unknown" outside of the server's shell."""
    return str(scope.get("kvcache_rag.request_id", "unknown"))


def _routing(request: Request, error: HTTPException) -> ApiError:
    asked = f"{request.method} {request.url.path}"
    if error.status_code == HTTPStatus.NOT_FOUND:
        return ApiError(404, f"there is no {asked} here", code="unknown_url")
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        allowed = (error.headers or {}).get("Allow", "another method")
        return ApiError(405, f"{asked} is not allowed; use {allowed}", code="method_not_allowed")
    code = "request_timeout" if error.status_code == HTTPStatus.REQUEST_TIMEOUT else None
    return ApiError(error.status_code, " ".join(str(error.detail).split()), code=code)


def _sendable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


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
