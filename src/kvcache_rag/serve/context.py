"""What every router of the server works with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from contextlib import AbstractAsyncContextManager

    from kvcache_rag.serve.settings import ServerSettings
    from kvcache_rag.serve.work import Backend, Event, Retriever, Work


@dataclass(frozen=True)
class Caller:
    """Who calls, as the server's authentication says; never what a body says.

    Attributes:
        namespace: Tenant whose chunks are seen; "" without keys.
        key_id: Name of the API key, for limits, logs and metrics; never the key itself.
    """

    namespace: str = ""
    key_id: str = "anonymous"


class Limiter(Protocol):
    """Refuses what is too much (`serve/limits.py`)."""

    def admitted(self, caller: Caller, work: Work) -> AbstractAsyncContextManager[None]:
        """Let a request in; entering checks documents, bytes and tokens.

        Raises:
            ApiError: 4xx that says which limit, and how much was asked for.
        """


class Telemetry(Protocol):
    """Counts what happens (`serve/telemetry.py`)."""

    def observe(self, route: str, caller: Caller, work: Work, event: Event) -> None:
        """An event on its way to the client.

        Args:
            route: "chat", "completions", "rag".
            caller: Who asked.
            work: What.
            event: `Started`, `Piece`, `Finished` or `Failed`.
        """

    def left(self, route: str, caller: Caller, work: Work) -> None:
        """The client went away before its answer was complete."""

    async def render(self, accept: str) -> tuple[bytes, str]:
        """Everything counted, as Prometheus reads it, and its content type.

        Args:
            accept: The `Accept` header.
        """


@dataclass(frozen=True)
class AppContext:
    """What every router of the server works with: `router(context) -> APIRouter`.

    Attributes:
        backend: Answers.
        settings: What the server was told.
        authenticate: FastAPI dependency: `caller: Annotated[Caller,
            Depends(context.authenticate)]`; raises `ApiError` 401.
        limits: Refuses what is too much.
        telemetry: Counts what happens.
        retriever: Finds documents; None without a configured Chroma.
    """

    backend: Backend
    settings: ServerSettings
    authenticate: Callable[..., Awaitable[Caller]]
    limits: Limiter
    telemetry: Telemetry
    retriever: Retriever | None = None
