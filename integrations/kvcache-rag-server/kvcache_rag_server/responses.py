"""What clients get: OpenAI's objects with an answer's cost, whole or as server-sent events."""

# pydantic reads the annotations when models are made, so they are not postponed.

import json
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, ClassVar, Final, Literal, Protocol

from pydantic import BaseModel, Field, JsonValue, model_serializer

from kvcache_rag.generation.tools import Reasoning, ToolCall, UnreadableCall
from kvcache_rag.metrics import Metrics, MissReason
from kvcache_rag_server.backend import BackendRequest, Finished, Piece, Started, TokenLogprob

FinishReason = Literal["stop", "length", "tool_calls"]

STREAM_HEADERS: Final = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # nginx would keep what it gets until its buffer is full
}

STREAM: Final = {
    "text/event-stream": {
        "schema": {"type": "string"},
        "example": 'data: {"object":"chat.completion.chunk", …}\n\ndata: [DONE]\n\n',
    }
}
"""Of routes that may stream, in their schema."""

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
    def of(cls, finished: Finished) -> "Usage":
        """What answers to one request cost; their prompt counts once."""
        metrics = finished.answer.metrics
        generated = sum(one.answer.metrics.generated_tokens for one in finished.all)
        return cls(
            prompt_tokens=metrics.prompt_tokens,
            completion_tokens=generated,
            total_tokens=metrics.prompt_tokens + generated,
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


class RecognisedDocuments(BaseModel):
    """Documents that an app wrote into a message."""

    form: str = Field(description="Whose form it is, such as open-webui.")
    documents: int
    ids: list[str] = Field(description="Of the documents, as the app calls them, if it does.")


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

    recognised: RecognisedDocuments | None = Field(
        description="Documents that were found in the messages; None for none."
    )

    @classmethod
    def of(cls, work: BackendRequest, started: Started, metrics: Metrics) -> "KVCacheReport":
        """What backend and engine say of a request."""
        numbers, packed = work.places, work.packed
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
            recognised=None
            if packed is None
            else RecognisedDocuments(
                form=packed.form,
                documents=len(packed.documents),
                ids=[one for one in packed.ids if one],
            ),
        )


class FunctionCall(BaseModel):
    """What is called, and with what."""

    name: str
    arguments: str = Field(description="An object in JSON.")


class MadeCall(BaseModel):
    """A call of a tool."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class AssistantMessage(BaseModel):
    """The answer."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | None = Field(None, description="What it thought, read apart.")
    tool_calls: list[MadeCall] | None = None

    @model_serializer(mode="wrap")
    def _without_absent(self, handler: Any) -> Any:
        told = handler(self)
        absent = ("reasoning_content", "tool_calls")
        return {name: one for name, one in told.items() if one is not None or name not in absent}


class LikelyToken(BaseModel):
    """A token that might stand at a place."""

    token: str
    logprob: float
    bytes: list[int] | None = Field(description="None where the token is a part of a character.")


class ToldToken(LikelyToken):
    """The token that stands at a place."""

    top_logprobs: list[LikelyToken]


class ChatLogprobs(BaseModel):
    """Log probabilities of an answer's tokens."""

    content: list[ToldToken]
    refusal: None = None


class TextLogprobs(BaseModel):
    """Log probabilities of a completion's tokens."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int] = Field(description="Characters of the tokens before.")


class ChatChoice(BaseModel):
    """One answer."""

    index: int = 0
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
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
    """One answer."""

    index: int = 0
    text: str
    logprobs: TextLogprobs | None = None
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


class AnswerForm(Protocol):
    """Writes the answer to one request.

    Attributes:
        done: What a stream ends with.
    """

    @property
    def done(self) -> bytes: ...

    def frame(self, data: Mapping[str, Any]) -> bytes:
        """One event of a stream."""

    def opening(self) -> list[dict[str, Any]]:
        """The events that a stream begins with."""

    def piece(self, piece: Piece) -> list[dict[str, Any]]:
        """The events of a piece."""

    def closing(self, started: Started, finished: Finished) -> list[dict[str, Any]]:
        """The events that a stream ends with."""

    def whole(self, started: Started, finished: Finished) -> dict[str, Any]:
        """The body of an answer that is not streamed."""


@dataclass(frozen=True)
class CompletionForm(ABC):
    """Writes the answers of one request in what OpenAI's objects have in common.

    Attributes:
        work: The request.
        model: As it is served.
        includes_usage: Whether a stream ends with its usage.
        created: Seconds since the epoch.
        so_far: Of each answer that is streamed, how many calls, or characters of tokens, it has.
    """

    body: ClassVar[type[BaseModel]]
    """Of an answer that is not streamed."""
    chunk_object: ClassVar[str]
    """Type of a chunk of a stream."""
    done: ClassVar[bytes] = DONE

    work: BackendRequest
    model: str
    includes_usage: bool = False
    created: int = field(default_factory=now)
    so_far: Counter[int] = field(default_factory=Counter, init=False)

    @abstractmethod
    def choice(self, index: int, finished: Finished) -> BaseModel:
        """One answer that is not streamed."""

    @abstractmethod
    def said(self, piece: Piece) -> list[dict[str, Any]]:
        """What the choices of chunks say of a piece; several where OpenAI has several."""

    @abstractmethod
    def logprobs(self, told: Sequence[TokenLogprob], index: int) -> BaseModel | None:
        """Log probabilities of further tokens of an answer; None where none are wanted."""

    def frame(self, data: Mapping[str, Any]) -> bytes:
        """One event of a stream."""
        return frame(data)

    def opening(self) -> list[dict[str, Any]]:
        """First events of a stream: none."""
        return []

    def whole(self, started: Started, finished: Finished) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        return plain(
            self.body(
                id=self.work.id,
                created=self.created,
                model=self.model,
                choices=[self.choice(at, one) for at, one in enumerate(finished.all)],
                usage=Usage.of(finished),
                kvcache=self.report(started, finished),
            )
        )

    def report(self, started: Started, finished: Finished) -> KVCacheReport:
        """What the first answer cost."""
        return KVCacheReport.of(self.work, started, finished.answer.metrics)

    def piece(self, piece: Piece) -> list[dict[str, Any]]:
        """The chunks of a piece; the log probabilities stand in the first."""
        chunks = [self.chunk(one, index=piece.index) for one in self.said(piece)]
        if chunks and piece.logprobs:
            chunks[0]["choices"][0]["logprobs"] = self.told(piece.logprobs, piece.index)
        return chunks

    def told(self, logprobs: Sequence[TokenLogprob], index: int) -> dict[str, Any] | None:
        """Log probabilities as a chunk has them."""
        told = self.logprobs(logprobs, index) if logprobs else None
        return None if told is None else plain(told)

    def closing(self, started: Started, finished: Finished) -> list[dict[str, Any]]:
        """The chunks with the reasons and the cost, and the usage if it is wanted."""
        chunks = []
        for index, one in enumerate(finished.all):
            chunks.append(self.chunk(self.ending(), reason_of(one), index))
            chunks[-1]["choices"][0]["logprobs"] = self.told(one.logprobs, index)
        chunks[-1]["kvcache"] = plain(self.report(started, finished))
        if self.includes_usage:
            chunks.append({**self.chunk({}), "choices": [], "usage": plain(Usage.of(finished))})
        return chunks

    @abstractmethod
    def ending(self) -> dict[str, Any]:
        """What the last chunk of an answer says beside its reason."""

    def chunk(
        self, said: dict[str, Any], reason: FinishReason | None = None, index: int = 0
    ) -> dict[str, Any]:
        """A chunk of one choice."""
        choice = {"index": index, **said, "logprobs": None, "finish_reason": reason}
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

    def choice(self, index: int, finished: Finished) -> ChatChoice:
        message = message_of(finished)
        logprobs = self.logprobs(finished.logprobs, index)
        reason = reason_of(finished)
        return ChatChoice(index=index, message=message, logprobs=logprobs, finish_reason=reason)

    def opening(self) -> list[dict[str, Any]]:
        """The chunks that say who speaks."""
        opening = {"delta": {"role": "assistant", "content": ""}}
        return [self.chunk(opening, index=index) for index in range(self.work.n)]

    def ending(self) -> dict[str, Any]:
        return {"delta": {}}

    def said(self, piece: Piece) -> list[dict[str, Any]]:
        part = piece.part
        if isinstance(part, Reasoning):
            return [{"delta": {"reasoning_content": part.text}}]
        if isinstance(part, ToolCall):
            number, call = self.so_far[piece.index], made_call(part)
            self.so_far[piece.index] += 1
            begun = {"id": call.id, "type": "function"}
            named = {"name": call.function.name, "arguments": ""}
            first = {"index": number, **begun, "function": named}
            rest = {"index": number, "function": {"arguments": call.function.arguments}}
            return [{"delta": {"tool_calls": [one]}} for one in (first, rest)]
        text = part.text if isinstance(part, UnreadableCall) else piece.text
        return [{"delta": {"content": text}}] if text else []

    def logprobs(self, told: Sequence[TokenLogprob], index: int) -> ChatLogprobs | None:
        if self.work.logprobs is None:
            return None
        return ChatLogprobs(
            content=[
                ToldToken(
                    **_token(one.text, one.logprob),
                    top_logprobs=[LikelyToken(**_token(*other)) for other in one.top],
                )
                for one in told
            ]
        )


class TextForm(CompletionForm):
    """Writes answers as OpenAI's text completions."""

    body = Completion
    chunk_object = "text_completion"

    def choice(self, index: int, finished: Finished) -> CompletionChoice:
        return CompletionChoice(
            index=index,
            text=finished.answer.text,
            logprobs=self.logprobs(finished.logprobs, index),
            finish_reason=reason_of(finished),
        )

    def ending(self) -> dict[str, Any]:
        return {"text": ""}

    def said(self, piece: Piece) -> list[dict[str, Any]]:
        return [{"text": piece.text}] if piece.text else []

    def logprobs(self, told: Sequence[TokenLogprob], index: int) -> TextLogprobs | None:
        if self.work.logprobs is None:
            return None
        begun = self.so_far[index]
        *places, self.so_far[index] = accumulate((len(one.text) for one in told), initial=begun)
        return TextLogprobs(
            tokens=[one.text for one in told],
            token_logprobs=[one.logprob for one in told],
            top_logprobs=[dict(one.top) for one in told],
            text_offset=places,
        )


def made_call(call: ToolCall) -> MadeCall:
    """A call as OpenAI writes it."""
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    return MadeCall(id=call.id, function=FunctionCall(name=call.name, arguments=arguments))


def message_of(finished: Finished) -> AssistantMessage:
    """An answer as a message; what should be a call and cannot be read stands as text."""
    if finished.parts is None:
        return AssistantMessage(content=finished.answer.text, reasoning_content=None)
    texts = [
        part.text if isinstance(part, UnreadableCall) else part
        for part in finished.parts
        if isinstance(part, str | UnreadableCall)
    ]
    thoughts = [part.text for part in finished.parts if isinstance(part, Reasoning)]
    calls = [made_call(part) for part in finished.parts if isinstance(part, ToolCall)]
    return AssistantMessage(
        content="".join(texts) or (None if calls else ""),
        reasoning_content="".join(thoughts) or None,
        tool_calls=calls or None,
    )


def _token(text: str, logprob: float) -> dict[str, Any]:
    is_part = "\ufffd" in text
    return {"token": text, "logprob": logprob, "bytes": None if is_part else list(text.encode())}


def reason_of(finished: Finished) -> FinishReason:
    """Why an answer ended."""
    if finished.answer.finish_reason != "stop":
        return "length"
    is_call = any(isinstance(part, ToolCall) for part in finished.parts or ())
    return "tool_calls" if is_call else "stop"


def frame(data: Mapping[str, Any]) -> bytes:
    """One event."""
    return f"data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()
