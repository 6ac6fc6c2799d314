"""One vLLM server, over HTTP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from kvcache_rag.errors import InvalidInputError
from kvcache_rag_server.http import RefusedError, ServerClient

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping


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


class EngineClient(ServerClient):
    """Asks one server of vLLM."""

    started_by: ClassVar[str] = "vllm serve"

    async def describe(self) -> EngineDescription:
        """What it serves.

        Raises:
            LostError: If it cannot be reached.
            InvalidInputError: If it is no vLLM server.
        """
        try:
            models, version = await self.get("/v1/models"), await self.get("/version")
            (served, *_) = models["data"]
            return EngineDescription(
                str(served["id"]), int(served["max_model_len"]), str(version["version"])
            )
        except (KeyError, TypeError, ValueError, RefusedError) as error:
            if isinstance(error, RefusedError) and error.is_full:
                raise  # it is not ready yet
            raise InvalidInputError(f"what answers at {self.url} is no server of vLLM") from None

    async def complete(self, body: Mapping[str, Any]) -> Any:
        """The whole answer to a completion; see `post`."""
        return await self.post("/v1/completions", body)

    def stream(
        self, body: Mapping[str, Any], trace: Mapping[str, str]
    ) -> AsyncGenerator[Any, None]:
        """The parts of an answer to a completion, whose spans go on from `trace`; see `events`."""
        return self.events("/v1/completions", body, trace)
