"""What surrounds every request: its name, the limit of its body, and a last net for errors."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

from fastapi import HTTPException
from starlette.datastructures import Headers, MutableHeaders

from kvcache_rag.serve.errors import ApiError, fault, response

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send


class Shell:
    """ASGI middleware around all routes.

    Every answer says the request's name in `x-request-id`; the log knows failures by it.  A body
    is refused as soon as it is known to be too large.
    """

    def __init__(self, app: ASGIApp, body_bytes: int) -> None:
        """Let `app` answer requests whose body has at most `body_bytes`."""
        self._app, self._body_bytes = app, body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        name = f"req_{uuid.uuid4().hex}"
        scope["kvcache_rag.request_id"] = name
        sender = _Sender(send, name)
        try:
            self._check_length(Headers(scope=scope))
            await self._app(scope, _Body(receive, self._body_bytes).receive, sender.send)
        except ApiError as error:
            await response(error)(scope, receive, sender.send)
        except Exception as error:
            refusal = fault(error, name)
            if sender.has_begun:  # too late to say anything: the connection breaks off
                raise
            await response(refusal)(scope, receive, sender.send)

    def _check_length(self, headers: Headers) -> None:
        length = headers.get("content-length", "")
        if length.isascii() and length.isdigit() and int(length[:19]) > self._body_bytes:
            raise ApiError(413, too_large(self._body_bytes), code="request_too_large")


class _Sender:
    """Adds the request's name to its answer."""

    def __init__(self, send: Send, name: str) -> None:
        self._send, self._name = send, name
        self.has_begun = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.has_begun = True
            MutableHeaders(raw=message["headers"])["x-request-id"] = self._name
        await self._send(message)


class _Body:
    """Counts what is read of a body of unknown length."""

    def __init__(self, receive: Receive, allowed: int) -> None:
        self._receive, self._allowed, self._read = receive, allowed, 0

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            self._read += len(message.get("body", b""))
            if self._read > self._allowed:
                # FastAPI lets its own errors pass while it reads a body, and no others.
                raise HTTPException(413, too_large(self._allowed))
        return message


def too_large(allowed: int) -> str:
    """What is said about too large a body."""
    return f"the body has more than the {allowed} bytes that are allowed; send fewer documents"
