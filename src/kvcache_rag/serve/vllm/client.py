"""One server of vLLM, by HTTP."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kvcache_rag.errors import InvalidInputError, MissingExtraError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

try:
    import httpx
except ImportError as error:
    raise MissingExtraError("httpx", "vllm") from error

# Seconds within which a server has to be reached, and to answer what needs no model.
_REACHED: Final = 5.0

# Bytes of a server's own error of which its status tells enough.
_MOST: Final = 1 << 16

_TOO_MANY: Final = (429, 503)


class EngineLostError(Exception):
    """A server cannot be reached, or was lost while it answered."""


class EngineRefusedError(Exception):
    """A server refuses a request.

    Attributes:
        status: Of its answer.
    """

    def __init__(self, status: int, message: str) -> None:
        """Say what it said."""
        super().__init__(message)
        self.status = status

    @property
    def is_full(self) -> bool:
        """Whether another server, or this one later, might answer."""
        return self.status in _TOO_MANY or self.status >= 500


@dataclass(frozen=True)
class EngineDescription:
    """What a server says of itself.

    Attributes:
        model: Name under which it serves.
        window: Longest prompt and answer, in tokens.
        version: Of vLLM.
    """

    model: str
    window: int
    version: str


class EngineClient:
    """Asks one server.

    Attributes:
        url: Where it is.
    """

    def __init__(self, url: str, transport: Any = None) -> None:
        """Nothing is sent yet.

        Args:
            url: Such as `http://10.0.0.7:8000`.
            transport: Of httpx, for tests.

        Raises:
            InvalidInputError: If it is no URL.
        """
        try:
            parsed = httpx.URL(url.rstrip("/"))
        except (httpx.InvalidURL, TypeError):
            parsed = httpx.URL("")
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise InvalidInputError(f"{url!r} is no server's URL; give one as http://host:8000")
        self.url = str(parsed)
        timeout = httpx.Timeout(_REACHED, read=None)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        self._http = httpx.AsyncClient(
            base_url=parsed, timeout=timeout, limits=limits, transport=transport, trust_env=False
        )

    async def describe(self) -> EngineDescription:
        """What it serves.

        Raises:
            EngineLostError: If it cannot be reached.
            InvalidInputError: If it is no vLLM server.
        """
        models, version = await self._get("/v1/models"), await self._get("/version")
        try:
            (served, *_) = models["data"]
            return EngineDescription(
                str(served["id"]), int(served["max_model_len"]), str(version["version"])
            )
        except (KeyError, TypeError, ValueError):
            raise InvalidInputError(f"what answers at {self.url} is no server of vLLM") from None

    async def _get(self, path: str) -> Any:
        try:
            response = await self._http.get(path, timeout=_REACHED)
            return response.raise_for_status().json()
        except (httpx.HTTPError, ValueError) as error:
            raise EngineLostError(f"{self.url}{path}: {error!r}") from error

    async def is_healthy(self) -> bool:
        """Whether it says that it can answer."""
        try:
            return (await self._http.get("/health", timeout=_REACHED)).is_success
        except httpx.HTTPError:
            return False

    async def complete(self, body: Mapping[str, Any]) -> Any:
        """The whole answer to a completion.

        Raises:
            EngineLostError: If there is none.
            EngineRefusedError: If the server says so.
        """
        async with self._sent(body) as response:
            content = await response.aread()
        try:
            return json.loads(content)
        except ValueError as error:
            raise EngineLostError(f"{self.url}: its answer is no JSON") from error

    async def stream(self, body: Mapping[str, Any]) -> AsyncIterator[Any]:
        """The parts of an answer to a completion, as they come; closing it ends the answer.

        Raises:
            EngineLostError: If the server is lost, or ends without having ended the answer.
            EngineRefusedError: If it says that it does not answer.
        """
        async with self._sent({**body, "stream": True}) as response:
            async for line in response.aiter_lines():
                data = line.removeprefix("data:").strip()
                if not line.startswith("data:") or not data:
                    continue
                if data == "[DONE]":
                    return
                yield _part(data)
        raise EngineLostError(f"{self.url}: its answer has no end")

    @asynccontextmanager
    async def _sent(self, body: Mapping[str, Any]) -> AsyncIterator[Any]:
        try:
            async with self._http.stream("POST", "/v1/completions", json=dict(body)) as response:
                if not response.is_success:
                    content = await response.aread()
                    raise EngineRefusedError(response.status_code, _message(content))
                yield response
        except httpx.HTTPError as error:
            raise EngineLostError(f"{self.url}: {error!r}") from error

    async def close(self) -> None:
        """Close its connections."""
        await self._http.aclose()


def _part(data: str) -> Any:
    try:
        part = json.loads(data)
    except ValueError as error:
        raise EngineLostError("an answer holds what is no JSON") from error
    if "error" in part:
        told = part["error"]
        raise EngineLostError(
            str(told.get("message", told)) if isinstance(told, dict) else str(told)
        )
    return part


def _message(content: bytes) -> str:
    try:
        told = json.loads(content[:_MOST])
        told = told.get("error", told)
        return str(told.get("message", "")) or "it does not say why"
    except (ValueError, AttributeError):
        return "it does not say why"
