"""Ask a server over HTTP that answers in JSON, whole or as server-sent events."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Final

import httpx

from kvcache_rag.errors import InvalidInputError, RemoteServerError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Mapping

# Seconds within which a server has to be reached, and to answer what needs no model.
_REACHED: Final = 5.0

# Bytes of a server's own error of which its status tells enough.
_MOST: Final = 1 << 16

_TOO_MANY: Final = (429, 503)

# Type of an error that no repetition changes, within a stream whose status says nothing any more.
_INVALID: Final = "invalid_request_error"


class LostError(RemoteServerError):
    """A server cannot be reached, or was lost while it answered."""


class RefusedError(RemoteServerError):
    """A server refuses a request.

    Attributes:
        status: Of its answer.
        code: OpenAI's code of the error, or "".
        retry_after: Seconds after which it says that a repetition makes sense, or None.
    """

    def __init__(
        self, status: int, message: str, code: str = "", retry_after: float | None = None
    ) -> None:
        """Say what it said."""
        super().__init__(message)
        self.status, self.code, self.retry_after = status, code, retry_after

    @property
    def is_full(self) -> bool:
        """Whether another server, or this one later, might answer."""
        return self.status in _TOO_MANY or self.status >= 500


class ServerClient:
    """Asks one server, in one event loop.

    Attributes:
        url: Where it is.
        started_by: The command that starts such a server.
    """

    started_by: ClassVar[str] = "kvcache-rag serve"

    def __init__(
        self,
        url: str,
        transport: Any = None,
        *,
        key: str | None = None,
        through_proxies: bool = False,
    ) -> None:
        """Nothing is sent yet.

        Args:
            url: Such as `http://10.0.0.7:8000`.
            transport: Of httpx, for tests.
            key: Sent as a bearer token; None for none.
            through_proxies: Whether proxies and certificates of the environment count.

        Raises:
            InvalidInputError: If it is no URL, or the key cannot be sent.
        """
        try:
            parsed = httpx.URL(url.rstrip("/"))
        except (httpx.InvalidURL, TypeError, AttributeError):
            parsed = httpx.URL("")
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise InvalidInputError(f"{url!r} is no server's URL; give one as http://host:8000")
        if key is not None and not (key.isascii() and key.isprintable()):
            raise InvalidInputError("the API key holds what no header can; check it")
        self.url = str(parsed)
        self._http = httpx.AsyncClient(
            base_url=parsed,
            headers={} if key is None else {"Authorization": f"Bearer {key}"},
            timeout=httpx.Timeout(_REACHED, read=None),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
            transport=transport,
            trust_env=through_proxies,
        )

    async def get(self, path: str, seconds: float | None = _REACHED) -> Any:
        """What it says at `path`, within so many seconds.

        Raises:
            LostError: If it cannot be reached, or answers with something else.
            RefusedError: If it says so.
        """
        return await self._whole("GET", path, timeout=seconds)

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """The whole answer to a body.

        Raises:
            LostError: If there is none.
            RefusedError: If the server says so.
        """
        return await self._whole("POST", path, json=dict(body))

    async def events(
        self, path: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None
    ) -> AsyncGenerator[Any, None]:
        """The parts of an answer to a body, as they come; closing it ends the answer.

        Args:
            path: Where it is asked.
            body: The question.
            headers: Of this request alone.

        Raises:
            LostError: If the server is lost, or ends without having ended the answer.
            RefusedError: If it says that it does not answer.
        """
        sent = self._sent("POST", path, json={**body, "stream": True}, headers=headers)
        async with sent as response:
            async for line in response.aiter_lines():
                data = line.removeprefix("data:").strip()
                if not line.startswith("data:") or not data:
                    continue
                if data == "[DONE]":
                    return
                yield _part(data)
        raise LostError(f"{self.url}: its answer has no end")

    async def is_healthy(self) -> bool:
        """Whether it says that it can answer."""
        try:
            return bool((await self._http.get("/health", timeout=_REACHED)).is_success)
        except httpx.HTTPError:
            return False

    async def close(self) -> None:
        """Close its connections."""
        await self._http.aclose()

    async def _whole(self, method: str, path: str, **options: Any) -> Any:
        async with self._sent(method, path, **options) as response:
            content = await response.aread()
        try:
            return json.loads(content)
        except ValueError as error:
            raise LostError(f"{self.url}{path}: its answer is no JSON") from error

    @asynccontextmanager
    async def _sent(self, method: str, path: str, **options: Any) -> AsyncIterator[Any]:
        try:
            async with self._http.stream(method, path, **options) as response:
                if not response.is_success:
                    content = await response.aread()
                    wait = response.headers.get("retry-after", "")
                    raise RefusedError(
                        response.status_code,
                        *_told(content),
                        float(wait) if wait.isdecimal() else None,
                    )
                yield response
        except httpx.HTTPError as error:
            raise LostError(self._lost(path, error)) from error

    def _lost(self, path: str, error: Exception) -> str:
        """What is wrong, where no answer came."""
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            return (
                f"cannot reach the server at {self.url} ({error}); "
                f"is `{self.started_by}` running there?"
            )
        return f"the server at {self.url} was lost at {path}: {error!r}"


def _part(data: str) -> Any:
    try:
        part = json.loads(data)
    except ValueError as error:
        raise LostError("an answer holds what is no JSON") from error
    if "error" in part:
        message, code = _told(data.encode())
        kind = part["error"].get("type") if isinstance(part["error"], dict) else ""
        if kind == _INVALID:
            raise RefusedError(400, message, code)
        raise LostError(message)
    return part


def _told(content: bytes) -> tuple[str, str]:
    """Message and code of an error."""
    try:
        told = json.loads(content[:_MOST])
        told = told.get("error", told)
        return str(told.get("message", "")) or "it does not say why", str(told.get("code") or "")
    except (ValueError, AttributeError):
        return "it does not say why", ""
