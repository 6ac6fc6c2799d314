"""`POST /v1/rag`: a question in, an answer out, with the documents that it was found in."""

# FastAPI reads the annotations of routes when they are made, so they are not postponed.
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel, ConfigDict, Field, JsonValue
from starlette.responses import Response

from kvcache_rag.generation.request import DEFAULT_NEW_TOKENS
from kvcache_rag.metrics import Answer
from kvcache_rag.prompt.template import Message
from kvcache_rag_server.backend import BackendRequest, RetrievedText, Started
from kvcache_rag_server.bodies import CheckedRoute
from kvcache_rag_server.errors import ApiError
from kvcache_rag_server.lifecycle import AppContext, Caller, respond
from kvcache_rag_server.requests import (
    LARGEST,
    Asking,
    Generating,
    SomeText,
    StopText,
    Text,
    work_of,
)
from kvcache_rag_server.responses import (
    ANSWERING,
    FinishReason,
    KVCacheReport,
    Usage,
    error_responses,
    now,
    plain,
)

_STRICT: Final = ConfigDict(extra="forbid", strict=True)
# What a question has in common with a chat, and is read the same way.
_SHARED: Final = (*Generating.model_fields, "stop")

STREAM: Final = {
    "text/event-stream": {
        "schema": {"type": "string"},
        "example": 'data: {"object":"rag.answer.chunk","sources":[…]}\n\n'
        'data: {"object":"rag.answer.chunk","text":"In"}\n\n…\n\ndata: [DONE]\n\n',
    }
}


class Turn(BaseModel):
    """An earlier turn of the conversation."""

    model_config = _STRICT

    role: Literal["user", "assistant"]
    content: Text


class RagRequest(Generating):
    """Body of `POST /v1/rag`."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"question": "Where is the red lamp?", "top_k": 4}]},
    )

    question: SomeText = Field(description="What is asked.")
    query: SomeText | None = Field(
        None,
        description="What to look for, where the question alone does not say it (a follow-up).",
    )
    top_k: int | None = Field(
        None, ge=1, le=LARGEST, description="Documents to retrieve; None for the server's number."
    )
    history: list[Turn] | None = Field(None, description="Earlier turns, oldest first.")
    model: Text | None = Field(None, description="Name of the served model; it may be left out.")
    stop: Annotated[list[StopText], Field(max_length=4)] | None = None

    def asking(self, served: str) -> Asking:
        """What of it every API has, for the model `served` unless another is named."""
        shared = {name: getattr(self, name) for name in _SHARED}
        return Asking.model_construct(model=self.model or served, **shared)


class RagSource(BaseModel):
    """A retrieved document."""

    id: str
    score: float | None = Field(description="How well it matches; higher is better.")
    text: str = Field(description="As it stands in the prompt.")
    metadata: dict[str, JsonValue]

    @classmethod
    def of(cls, source: RetrievedText) -> "RagSource":
        """What a retriever found."""
        return cls(
            id=source.id, score=source.score, text=source.text, metadata=dict(source.metadata)
        )


class RagAnswer(BaseModel):
    """Answer of `POST /v1/rag`."""

    id: str
    object: Literal["rag.answer"] = "rag.answer"
    created: int
    model: str
    answer: str
    finish_reason: FinishReason
    sources: list[RagSource] = Field(description="Best first.")
    usage: Usage
    kvcache: KVCacheReport


@dataclass(frozen=True)
class RagForm:
    """Writes answers with their sources.

    Attributes:
        id: Of the answer.
        model: As it is served.
        created: Seconds since the epoch.
    """

    id: str
    model: str
    created: int = field(default_factory=now)

    def whole(self, started: Started, answer: Answer) -> dict[str, Any]:
        return plain(
            RagAnswer(
                id=self.id,
                created=self.created,
                model=self.model,
                answer=answer.text,
                finish_reason=_reason(answer),
                sources=[RagSource.of(source) for source in started.sources],
                usage=Usage.of(answer.metrics),
                kvcache=KVCacheReport.of(started, answer.metrics),
            )
        )

    def opening(self) -> list[dict[str, Any]]:
        """Nothing: the sources come first."""
        return []

    def begun(self, started: Started) -> list[dict[str, Any]]:
        """The sources, before any text."""
        sources = [plain(RagSource.of(source)) for source in started.sources]
        return [self._chunk(sources=sources)]

    def piece(self, text: str) -> dict[str, Any]:
        return self._chunk(text=text)

    def closing(self, started: Started, answer: Answer) -> list[dict[str, Any]]:
        """The reason and the cost."""
        return [
            self._chunk(
                finish_reason=_reason(answer),
                usage=plain(Usage.of(answer.metrics)),
                kvcache=plain(KVCacheReport.of(started, answer.metrics)),
            )
        ]

    def _chunk(self, **values: Any) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "rag.answer.chunk",
            "created": self.created,
            "model": self.model,
            **values,
        }


def router(context: AppContext) -> APIRouter:
    """The route.

    Args:
        context: The server's.
    """
    routes = APIRouter(tags=["RAG"], route_class=CheckedRoute)

    @routes.post(
        "/v1/rag",
        response_model=RagAnswer,
        responses={200: {"content": STREAM}, **error_responses(*ANSWERING)},
        summary="Answer a question from the server's own documents",
        operation_id="rag",
    )
    async def rag(
        request: Request,
        body: RagRequest,
        caller: Annotated[Caller, Depends(context.authenticate)],
    ) -> Response:
        """Retrieves the documents nearest to the question and answers from them.

        With `"stream": true` the first event has the sources, then come pieces of text, and the
        last one has the usage and what the answer cost.
        """
        work = rag_work(context, caller, body)
        form = RagForm(work.id, context.settings.name)
        return await respond(context, request, caller, work, form, route="rag")

    return routes


def rag_work(context: AppContext, caller: Caller, body: RagRequest) -> BackendRequest:
    """What a question asks.

    Raises:
        ApiError: If the server has no documents, the question is blank, or another value cannot be
            used.
    """
    if context.retriever is None:
        raise ApiError(
            404,
            "this server has no documents of its own; start it with --chroma FOLDER and "
            "--collection NAME, or send documents to /v1/chat/completions",
            code="no_documents",
        )
    query = body.question if body.query is None else body.query
    for name, text in (("question", body.question), ("query", query)):
        if not text.strip():
            raise ApiError(400, f"the {name} is blank; ask something", param=name)
    return work_of(
        context,
        caller,
        body.asking(context.settings.name),
        kind="rag",
        tokens=body.max_tokens or min(DEFAULT_NEW_TOKENS, context.settings.limits.answer_tokens),
        question=body.question,
        history=tuple(Message(turn.role, turn.content) for turn in body.history or ()),
        query=query,
        top_k=body.top_k or context.settings.top_k,
    )


def _reason(answer: Answer) -> FinishReason:
    return "stop" if answer.finish_reason == "stop" else "length"
