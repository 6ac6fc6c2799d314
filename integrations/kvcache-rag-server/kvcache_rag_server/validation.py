"""What is wrong with a body: one sentence about one of pydantic's errors.

What was sent is not repeated: it may be long, and it may be no text that can be sent back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, get_args

from fastapi.exceptions import RequestValidationError

from kvcache_rag.errors import close_to
from kvcache_rag_server.backend import BAD_REQUEST, INVALID, Failed
from kvcache_rag_server.errors import response
from kvcache_rag_server.requests import UNSUPPORTED

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from fastapi import FastAPI, Request
    from fastapi.responses import JSONResponse

_IN_MESSAGES: Final = {
    "role": "must be system, developer, user, assistant or tool",
    "type": 'must be "text": this server reads no images, audio or files',
}


def install(app: FastAPI) -> None:
    """Answer what pydantic found in a body as OpenAI would."""

    async def told(request: Request, error: Exception) -> JSONResponse:
        errors = error.errors() if isinstance(error, RequestValidationError) else ()
        return response(_invalid(errors, request.scope.get("route")))

    app.add_exception_handler(RequestValidationError, told)


def _invalid(errors: Sequence[Mapping[str, Any]], route: Any) -> Failed:
    """What is told of a body's errors; `route` is FastAPI's, which has the form of the body."""
    first = next((error for error in errors if _named(error) in UNSUPPORTED), errors[0])
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
    return [name for name in getattr(form, "model_fields", ()) if name not in UNSUPPORTED]


def _form_of(annotation: Any) -> Any:
    """The model in an annotation, which may be optional; None for none."""
    kinds = (annotation, *get_args(annotation))
    return next((kind for kind in kinds if hasattr(kind, "model_fields")), None)


def _sentence(error: Mapping[str, Any], path: str, known: Collection[str]) -> str:
    name, kind, text = _named(error), str(error["type"]), str(error["msg"])
    if kind == "extra_forbidden" and name not in UNSUPPORTED:
        close = close_to(str(_place(error)[-1]), known)
        hint = f"did you mean {close}?" if close else "leave it out"
        return f"there is no field {path}; {hint}"
    if kind == "missing":
        return f"{path} is missing"
    if name in UNSUPPORTED:
        return UNSUPPORTED[name]
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
