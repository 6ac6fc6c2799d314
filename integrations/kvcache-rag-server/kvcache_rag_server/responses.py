"""What clients get: OpenAI's objects with an answer's cost, whole or as server-sent events."""

# pydantic reads the annotations when models are made, so they are not postponed.

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Literal

from pydantic import BaseModel, Field, JsonValue

from kvcache_rag.metrics import Answer, Metrics, MissReason
from kvcache_rag_server.backend import BackendRequest, Started

FinishReason = Literal["stop", "length"]

STREAM_HEADERS: Final = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # nginx would keep what it gets until its buffer is full
}

OWNER: Final = "kvcache-rag"
"""Of the models; clients know by it what server they ask."""

DONE: Final = b"data: [DONE]\n\n"

HEARTBEAT: Final = b": waiting\n\n"
"""A comment: clients skip it, and whatever stands between sees that the connection lives."""


class ErrorDetail(BaseModel):
    """What was wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """Every error, as OpenAI's clients read it."""

    error: ErrorDetail


class PromptTokensDetails(BaseModel):
    """Of the prompt's tokens."""

    cached_tokens: int


class Usage(BaseModel):
    """Tokens of an answer."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails

    @classmethod
    def from_metrics(cls, metrics: Metrics) -> "Usage":
        """What an answer's metrics say."""
        return cls(
            prompt_tokens=metrics.prompt_tokens,
            completion_tokens=metrics.generated_tokens,
            total_tokens=metrics.prompt_tokens + metrics.generated_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=cached_tokens(metrics)),
        )


def cached_tokens(metrics: Metrics) -> int:
    """Tokens of the prompt whose keys and values were there before the request.

    These are the chunk tokens that came from the store (those that a policy computed again
    included: `recomputed_tokens` counts them), where there are any the prefix behind which they
    were computed, and those that one of the last prompts left (`continued_tokens`).
    """
    prefix = metrics.prefix_tokens * metrics.rounds if metrics.reused_tokens else 0
    return prefix + metrics.reused_tokens + metrics.continued_tokens


class MissedDocument(BaseModel):
    """A document that was not cached, and why."""

    chunk: int = Field(description="Its number, from 0.")
    tokens: int
    reason: MissReason


class ReadDocument(BaseModel):
    """A document behind which the question was read."""

    chunk: int = Field(description="Its number, from 0.")
    nats: float = Field(description="How much likelier it makes the question than none does.")


class KVCacheReport(BaseModel):
    """What an answer cost; times in seconds, everything else counts (see `Metrics`)."""

    policy: str = Field(description="As it was used, with its numbers.")
    gate: str = Field(description="Why a full prefill answered instead of the policy, or empty.")
    queue_wait: float = Field(description="Before the model began.")
    prefetched: bool = Field(description="Whether chunks were made ready while it waited.")
    batch: int = Field(description="Requests that were answered together, itself included.")
    replica: str
    ttft: float = Field(description="From the model's start to the first token.")
    load: float
    stitch: float
    choose: float = Field(description="Choosing tokens, where a policy does.")
    recompute: float = Field(description="Computing the chosen tokens again.")
    prefill: float
    total: float
    prefix_tokens: int
    reused_tokens: int = Field(description="Chunk tokens that came from the store.")
    recomputed_tokens: int = Field(description="Context tokens that the policy computed again.")
    fresh_tokens: int = Field(description="Chunk tokens that were computed with the question.")
    continued_tokens: int = Field(
        description="Further tokens that were not computed, as one of the last prompts of the "
        "tenant began alike."
    )
    prefilled_tokens: int = Field(description="Chunk tokens that were computed.")
    query_tokens: int
    generated_tokens: int
    hits: dict[str, int] = Field(description="Chunks found, by tier.")
    misses: int
    missed: list[MissedDocument] = Field(description="What was not cached, and why.")
    auxiliary_misses: int = Field(description="Chunks that the auxiliary model had not cached.")
    dropped_chunks: int = Field(description="Documents that would not have fitted.")
    unused_chunks: int = Field(
        description="Documents left out because the policy answers from better ones."
    )
    answered_from: list[int] = Field(
        description="Numbers, from 0, of the documents that the answer was computed from, in the "
        "prompt's order."
    )
    reading: float = Field(description="Reading the question behind documents, to choose.")
    read_chunks: int = Field(description="Documents behind which it was read, each alone.")
    read_tokens: int = Field(description="Tokens computed for that.")
    relevance: list[ReadDocument]
    says_none: bool = Field(description="Whether no document says what is asked (--none-below).")
    rounds: int
    prefix_mismatch: bool = Field(
        description="Whether the system message is not the instruction before the chunks; it then "
        "stands before the question."
    )
    rotation: str
    not_deferred: str

    @classmethod
    def from_metrics(
        cls, started: Started, metrics: Metrics, numbers: Sequence[int]
    ) -> "KVCacheReport":
        """What backend and engine say; `numbers` are those of the chunks as documents."""
        costs = {
            name: value for name, value in metrics.to_dict().items() if name in cls.model_fields
        }
        costs["answered_from"] = [numbers[at] for at in metrics.answered_from]
        costs["relevance"] = [
            ReadDocument(chunk=numbers[one.chunk], nats=one.nats) for one in metrics.relevance
        ]
        costs["missed"] = [
            MissedDocument(chunk=numbers[one.chunk], tokens=one.tokens, reason=one.reason)
            for one in metrics.missed
        ]
        return cls(
            **costs,
            queue_wait=started.queue_wait,
            prefetched=started.prefetched,
            batch=started.batch,
            replica=started.replica,
        )


class AssistantMessage(BaseModel):
    """The answer."""

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(BaseModel):
    """The only choice."""

    index: Literal[0] = 0
    message: AssistantMessage
    logprobs: None = None
    finish_reason: FinishReason


class ChatCompletion(BaseModel):
    """Answer of `POST /v1/chat/completions`."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    kvcache: KVCacheReport


class CompletionChoice(BaseModel):
    """The only choice."""

    index: Literal[0] = 0
    text: str
    logprobs: None = None
    finish_reason: FinishReason


class Completion(BaseModel):
    """Answer of `POST /v1/completions`."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    kvcache: KVCacheReport


class Model(BaseModel):
    """A model that is served."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = OWNER
    max_model_len: int | None = Field(description="Tokens of prompt and answer together.")


class ServedIdentity(BaseModel):
    """Answer of `GET /v1/identity`; everything in it changes answers."""

    model: str
    revision: str = Field(description="Commit, or a digest of weights and engine.")
    codec: str
    dtype: str
    prefix: str = Field(description="Digest of what stands before the documents.")
    template: str = Field(description="Digest of how documents and questions are written.")
    spec: str = Field(description="Digest of everything that stored documents depend on.")


class PrefillReply(BaseModel):
    """Answer of `POST /v1/prefill`."""

    object: Literal["prefill"] = "prefill"
    model: str
    chunks: int = Field(description="Different documents.")
    tokens: int = Field(description="Of these chunks.")
    computed: int = Field(description="Chunks that were not stored before.")


class ModelList(BaseModel):
    """Answer of `GET /v1/models`."""

    object: Literal["list"] = "list"
    data: list[Model]


class Status(BaseModel):
    """Answer of `GET /health` and `GET /ready`."""

    status: Literal["ok", "ready"]


def error_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Declarations of the errors that a route answers with."""
    return {status: {"model": ErrorBody, "description": _MEANING[status]} for status in statuses}


_MEANING = {
    400: "The request cannot be used; the message says what to change.",
    401: "There is no API key, or it is not known.",
    403: "This host, origin or key may not.",
    404: "There is no such model.",
    405: "Another method is meant.",
    408: "The body did not come in time.",
    413: "More documents or bytes than the server takes.",
    429: "Too many requests of this namespace at a time.",
    500: "The server failed; its log says why.",
    503: "Too many requests wait, or the server is not ready; repeat it later.",
}

ANSWERING = (400, 401, 403, 404, 408, 413, 429, 500, 503)
"""Errors of the routes that answer questions."""


def now() -> int:
    """Seconds since the epoch, as OpenAI's objects say when they were made."""
    return int(time.time())


def plain(value: BaseModel) -> dict[str, JsonValue]:
    """A body as plain values."""
    return value.model_dump(mode="json")


@dataclass(frozen=True)
class CompletionForm(ABC):
    """Writes the answers of one request in what OpenAI's objects have in common.

    Attributes:
        work: The request.
        model: As it is served.
        includes_usage: Whether a stream ends with its usage.
        created: Seconds since the epoch.
    """

    body: ClassVar[type[BaseModel]]
    """Of an answer that is not streamed."""
    chunk_object: ClassVar[str]
    """Type of a chunk of a stream."""

    work: BackendRequest
    model: str
    includes_usage: bool = False
    created: int = field(default_factory=now)

    @abstractmethod
    def choice(self, answer: Answer) -> BaseModel:
        """The only choice of an answer that is not streamed."""

    @abstractmethod
    def choice_fields(self, text: str) -> dict[str, Any]:
        """What a chunk's choice says of a piece of text; "" at the end."""

    def opening(self) -> list[dict[str, Any]]:
        """First events of a stream: none."""
        return []

    def whole(self, started: Started, answer: Answer) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        return plain(
            self.body(
                id=self.work.id,
                created=self.created,
                model=self.model,
                choices=[self.choice(answer)],
                usage=Usage.from_metrics(answer.metrics),
                kvcache=KVCacheReport.from_metrics(started, answer.metrics, self.work.places),
            )
        )

    def piece(self, text: str) -> dict[str, Any]:
        """A chunk of text."""
        return self.chunk(self.choice_fields(text))

    def closing(self, started: Started, answer: Answer) -> list[dict[str, Any]]:
        """The chunk with the reason and the cost, and the usage if it is wanted."""
        last = self.chunk(self.choice_fields(""), reason_of(answer))
        last["kvcache"] = plain(
            KVCacheReport.from_metrics(started, answer.metrics, self.work.places)
        )
        if not self.includes_usage:
            return [last]
        usage = plain(Usage.from_metrics(answer.metrics))
        return [last, {**self.chunk({}), "choices": [], "usage": usage}]

    def chunk(self, said: dict[str, Any], reason: FinishReason | None = None) -> dict[str, Any]:
        """A chunk of one choice."""
        choice = {"index": 0, **said, "logprobs": None, "finish_reason": reason}
        chunk: dict[str, Any] = {
            "id": self.work.id,
            "object": self.chunk_object,
            "created": self.created,
            "model": self.model,
            "choices": [choice],
        }
        return {**chunk, "usage": None} if self.includes_usage else chunk


class ChatForm(CompletionForm):
    """Writes answers as OpenAI's chat objects."""

    body = ChatCompletion
    chunk_object = "chat.completion.chunk"

    def choice(self, answer: Answer) -> ChatChoice:
        message = AssistantMessage(content=answer.text)
        return ChatChoice(message=message, finish_reason=reason_of(answer))

    def opening(self) -> list[dict[str, Any]]:
        """The chunk that says who speaks."""
        return [self.chunk({"delta": {"role": "assistant", "content": ""}})]

    def choice_fields(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text} if text else {}}


class TextForm(CompletionForm):
    """Writes answers as OpenAI's text completions."""

    body = Completion
    chunk_object = "text_completion"

    def choice(self, answer: Answer) -> CompletionChoice:
        return CompletionChoice(text=answer.text, finish_reason=reason_of(answer))

    def choice_fields(self, text: str) -> dict[str, Any]:
        return {"text": text}


def reason_of(answer: Answer) -> FinishReason:
    """Why an answer ended."""
    return "stop" if answer.finish_reason == "stop" else "length"


def frame(data: Mapping[str, Any]) -> bytes:
    """One event."""
    return f"data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()
