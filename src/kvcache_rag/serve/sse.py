"""Server-sent events: the frames of a streamed answer."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from starlette.responses import Response

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping

    from starlette.types import Receive, Scope, Send

CONTENT_TYPE: Final = "text/event-stream; charset=utf-8"
DONE: Final = b"data: [DONE]\n\n"
HEARTBEAT: Final = b": waiting\n\n"
"""A comment: clients skip it, and whatever stands between sees that the connection lives."""


def frame(data: Mapping[str, Any]) -> bytes:
    """One event."""
    return f"data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()


class EventStream(Response):
    """Sends frames as they come, and closes their source whatever happens."""

    media_type = None

    def __init__(
        self, frames: AsyncGenerator[bytes, None], close: Callable[[], Awaitable[None]]
    ) -> None:
        """Send `frames`.

        Args:
            frames: Ends by itself when the client leaves.
            close: Called at the end, even if no frame was ever asked for.
        """
        # Without a body, so that no length is announced.
        self.status_code, self.background = 200, None
        self._frames, self._close = frames, close
        headers = {"content-type": CONTENT_TYPE, "cache-control": "no-cache"}
        # nginx would keep what it gets until its buffer is full.
        self.init_headers({**headers, "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send everything."""
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for one in self._frames:
                await send({"type": "http.response.body", "body": one, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await self._frames.aclose()
            await self._close()
