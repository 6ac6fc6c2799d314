"""What OpenAI's answers have in common, whole and in chunks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from kvcache_rag.serve.replies import FinishReason, KVCacheReport, Usage, now, plain

if TYPE_CHECKING:
    from kvcache_rag.metrics import Answer
    from kvcache_rag.serve.work import Started


@dataclass(frozen=True)
class CompletionForm(ABC):
    """Writes the answers of one request; a `Form` of `exchange`.

    Attributes:
        id: Of the answer.
        model: As it is served.
        includes_usage: Whether a stream ends with its usage.
        created: Seconds since the epoch.
    """

    chunk_object: ClassVar[str]
    """Type of a chunk of a stream."""

    id: str
    model: str
    includes_usage: bool = False
    created: int = field(default_factory=now)

    @abstractmethod
    def whole(self, started: Started, answer: Answer) -> dict[str, Any]:
        """The body of an answer that is not streamed."""

    @abstractmethod
    def said(self, text: str) -> dict[str, Any]:
        """What a chunk's choice says of a piece of text; "" at the end."""

    def opening(self) -> list[dict[str, Any]]:
        """First events of a stream: none."""
        return []

    def begun(self, started: Started) -> list[dict[str, Any]]:
        """Events once the model begins: none."""
        return []

    def piece(self, text: str) -> dict[str, Any]:
        """A chunk of text."""
        return self.chunk(self.said(text))

    def closing(self, started: Started, answer: Answer) -> list[dict[str, Any]]:
        """The chunk with the reason and the cost, and the usage if it is wanted."""
        last = self.chunk(self.said(""), reason_of(answer))
        last["kvcache"] = plain(KVCacheReport.of(started, answer.metrics))
        if not self.includes_usage:
            return [last]
        usage = plain(Usage.of(answer.metrics))
        return [last, {**self.chunk({}), "choices": [], "usage": usage}]

    def chunk(self, said: dict[str, Any], reason: FinishReason | None = None) -> dict[str, Any]:
        """A chunk of one choice."""
        choice = {"index": 0, **said, "logprobs": None, "finish_reason": reason}
        chunk: dict[str, Any] = {
            "id": self.id,
            "object": self.chunk_object,
            "created": self.created,
            "model": self.model,
            "choices": [choice],
        }
        return {**chunk, "usage": None} if self.includes_usage else chunk


def reason_of(answer: Answer) -> FinishReason:
    """Why an answer ended."""
    return "stop" if answer.finish_reason == "stop" else "length"
