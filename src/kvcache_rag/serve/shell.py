"""What surrounds every request: its name, the limit of its body, and a last net for errors."""

from __future__ import annotations

import asyncio
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
    is refused as soon as it is known to be too large, or has not come in time.
    """

    def __init__(self, app: ASGIApp, body_bytes: int, body_seconds: float) -> None:
        """Let `app` answer requests whose body has at most `body_bytes`.

        Args:
            app: Answers.
            body_bytes: Of one body.
            body_seconds: Within which the whole body has to be there.
        """
        self._app, self._body_bytes, self._body_seconds = app, body_bytes, body_seconds

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
            body = _Body(receive, self._body_bytes, self._body_seconds)
            await self._app(scope, body.receive, sender.send)
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
    """Counts what is read of a body of unknown length, and the time that it takes."""

    def __init__(self, receive: Receive, allowed: int, seconds: float) -> None:
        self._receive, self._allowed, self._read = receive, allowed, 0
        self._seconds = seconds
        self._until: float | None = asyncio.get_running_loop().time() + seconds

    async def receive(self) -> Message:
        message = await self._next()
        if message["type"] == "http.request":
            self._read += len(message.get("body", b""))
            if self._read > self._allowed:
                # FastAPI lets its own errors pass while it reads a body, and no others.
                raise HTTPException(413, too_large(self._allowed))
        if not message.get("more_body", False):
            self._until = None
        return message

    async def _next(self) -> Message:
        """The next message; once the body is there, however long that takes."""
        if self._until is None:
            return await self._receive()
        left = self._until - asyncio.get_running_loop().time()
        try:
            return await asyncio.wait_for(self._receive(), left)
        except asyncio.TimeoutError as error:
            # What is still sent is not waited for: the connection ends with the answer.
            raise HTTPException(
                408, too_slow(self._seconds), headers={"connection": "close"}
            ) from error


def too_large(allowed: int) -> str:
    """What is said about too large a body."""
    return f"the body has more than the {allowed} bytes that are allowed; send fewer documents"


def too_slow(seconds: float) -> str:
    """What is said about a body that does not come."""
    return (
        f"the body was not there within {seconds:g} seconds, the limit body_seconds; send it whole"
    )
