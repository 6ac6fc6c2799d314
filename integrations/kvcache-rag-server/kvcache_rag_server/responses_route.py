"""OpenAI's `POST /v1/responses` for texts, tools and streams; no conversation is kept here."""

# FastAPI and pydantic read the annotations when routes and models are made, so none is postponed.
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Depends, Request
from pydantic import AfterValidator, Discriminator, Field, JsonValue, Tag, model_validator
from pydantic_core import PydanticCustomError

from kvcache_rag.generation.tools import AnswerPart, Reasoning, ToolCall
from kvcache_rag_server.backend import BackendRequest, Finished, Piece, Started
from kvcache_rag_server.bodies import CheckedRoute
from kvcache_rag_server.fields import RequestModel, SomeText, Text, wrong
from kvcache_rag_server.keys import Caller
from kvcache_rag_server.lifecycle import AnswerResponse, AppContext
from kvcache_rag_server.requests import (
    LARGEST,
    ChatRequest,
    Document,
    KVCacheOptions,
    chat_work,
    new_id,
)
from kvcache_rag_server.responses import (
    ANSWERING,
    STREAM,
    KVCacheReport,
    Usage,
    error_responses,
    frame,
    now,
    plain,
)
from kvcache_rag_server.tool_fields import (
    BY_TYPE,
    FunctionTool,
    JsonSchema,
    NamedFunction,
    ObjectFormat,
    TextFormat,
    text_or,
)

_IGNORED: Final = "Ignored."


# ---------------------------------------------------------------------- what is sent
class InputText(RequestModel):
    """A text of a message, or of an earlier answer."""

    type: Literal["input_text", "output_text", "text"]
    text: Text
    annotations: list[JsonValue] | None = Field(None, description=_IGNORED)
    logprobs: list[JsonValue] | None = Field(None, description=_IGNORED)
    parsed: JsonValue | None = Field(None, description=_IGNORED)


Texts = Annotated[
    Annotated[Text, Tag("(string)")] | Annotated[list[InputText], Tag("(list)")], text_or("(list)")
]


class InputItem(RequestModel):
    """What the items of an input have in common, as answers give them."""

    id: str | None = Field(None, description=_IGNORED)
    status: str | None = Field(None, description=_IGNORED)


class InputMessage(InputItem):
    """A message; those of earlier answers may be given back as they came."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Texts
    phase: str | None = Field(None, description=_IGNORED)


class InputCall(InputItem):
    """A call in an earlier answer."""

    type: Literal["function_call"]
    call_id: SomeText
    name: SomeText
    arguments: Text
    parsed_arguments: JsonValue | None = Field(None, description=_IGNORED)


class InputResult(InputItem):
    """What a function gave."""

    type: Literal["function_call_output"]
    call_id: SomeText
    output: Texts


class InputThought(InputItem):
    """What was thought before an earlier answer; it is not told again."""

    type: Literal["reasoning"]
    summary: list[JsonValue] | None = Field(None, description=_IGNORED)
    content: list[JsonValue] | None = Field(None, description=_IGNORED)
    encrypted_content: str | None = Field(None, description=_IGNORED)


def _refuse(kind: str) -> str:
    raise PydanticCustomError(
        "kept",
        "it names something of an earlier answer, and nothing is kept of any; send store: false "
        "and the whole conversation",
    )


class ItemReference(RequestModel):
    """A thing of an earlier answer by its id, which nobody knows here."""

    type: Annotated[Literal["item_reference"], AfterValidator(_refuse)]
    id: str | None = None


_KINDS: Final = ("function_call", "function_call_output", "reasoning", "item_reference")


def _kind(given: Any) -> str:
    kind = given.get("type") if isinstance(given, Mapping) else getattr(given, "type", None)
    return f"({kind})" if kind in _KINDS else "(message)"


Item = Annotated[
    Annotated[InputMessage, Tag("(message)")]
    | Annotated[InputCall, Tag("(function_call)")]
    | Annotated[InputResult, Tag("(function_call_output)")]
    | Annotated[InputThought, Tag("(reasoning)")]
    | Annotated[ItemReference, Tag("(item_reference)")],
    Discriminator(_kind),
]


class FlatTool(FunctionTool):
    """A function that the answer may call."""

    type: Literal["function"]

    @model_validator(mode="before")
    @classmethod
    def _functions_only(cls, given: Any) -> Any:
        if isinstance(given, Mapping) and given.get("type", "function") != "function":
            raise PydanticCustomError("kind", "there are tools of the type function only")
        return given


class FlatNamed(NamedFunction):
    """The one function that has to be called."""

    type: Literal["function"]


class FlatSchema(JsonSchema):
    """JSON that fits a schema."""

    type: Literal["json_schema"]


class TextOptions(RequestModel):
    """The form of the answer's text."""

    format: (
        Annotated[
            Annotated[TextFormat, Tag("(text)")]
            | Annotated[ObjectFormat, Tag("(json_object)")]
            | Annotated[FlatSchema, Tag("(json_schema)")],
            BY_TYPE,
        ]
        | None
    ) = None
    verbosity: str | None = Field(None, description=_IGNORED)

    @property
    def as_chat(self) -> dict[str, Any] | None:
        """As a chat has it."""
        if self.format is None:
            return None
        told = self.format.model_dump(by_alias=True)
        if not isinstance(self.format, FlatSchema):
            return told
        return {"type": told.pop("type"), "json_schema": told}


class ResponsesRequest(RequestModel):
    """Body of `POST /v1/responses`."""

    model: Text = Field(description="Name of the served model, as GET /v1/models gives it.")
    input: Annotated[
        Annotated[SomeText, Tag("(string)")]
        | Annotated[list[Item], Field(min_length=1), Tag("(list)")],
        text_or("(list)"),
    ]
    instructions: Text | None = None
    documents: list[Document] | None = Field(None, description="As of a chat.")
    kvcache: KVCacheOptions | None = None
    max_output_tokens: int | None = Field(None, ge=1, le=LARGEST)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    stream: bool | None = None
    tools: list[FlatTool] | None = Field(None, max_length=128)
    tool_choice: (
        Annotated[
            Annotated[Literal["none", "auto", "required"], Tag("(string)")]
            | Annotated[FlatNamed, Tag("(mapping)")],
            text_or("(mapping)"),
        ]
        | None
    ) = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    store: bool | None = Field(None, description="Ignored: nothing is kept of an answer.")
    metadata: dict[Text, Text] | None = Field(None, description="Given back.")
    user: str | None = Field(None, description=_IGNORED)
    include: list[str] | None = Field(None, description=_IGNORED)
    reasoning: dict[str, JsonValue] | None = Field(None, description=_IGNORED)
    stream_options: dict[str, JsonValue] | None = Field(None, description=_IGNORED)
    service_tier: str | None = Field(None, description=_IGNORED)
    truncation: Literal["disabled", "auto"] | None = Field(None, description=_IGNORED)
    max_tool_calls: int | None = Field(None, description="Ignored: tools are called by the client.")
    prompt_cache_key: str | None = Field(None, description=_IGNORED)
    prompt_cache_retention: str | None = Field(None, description=_IGNORED)
    safety_identifier: str | None = Field(None, description=_IGNORED)
    background: Literal[False] | None = None
    previous_response_id: None = None
    conversation: None = None

    @property
    def as_chat(self) -> ChatRequest:
        """The same as a chat."""
        messages = _joined(self._messages())
        if not messages:
            raise wrong("the input has no message; put the question there", "input")
        same = ("model", "documents", "kvcache", "temperature", "top_p", "stream")
        chosen = self.tool_choice
        named = {"type": "function", "function": {"name": getattr(chosen, "name", "")}}
        tools = [one.model_dump() for one in self.tools or ()]
        return ChatRequest.model_validate(
            {
                **{name: getattr(self, name) for name in same},
                "messages": messages,
                "max_tokens": self.max_output_tokens,
                "tools": [{"type": tool.pop("type"), "function": tool} for tool in tools],
                "tool_choice": named if isinstance(chosen, FlatNamed) else chosen,
                "parallel_tool_calls": self.parallel_tool_calls,
                "response_format": None if self.text is None else self.text.as_chat,
            }
        )

    def _messages(self) -> Iterator[dict[str, Any]]:
        if self.instructions:
            yield {"role": "system", "content": self.instructions}
        if isinstance(self.input, str):
            yield {"role": "user", "content": self.input}
            return
        for one in self.input:
            if isinstance(one, InputMessage):
                yield {"role": one.role, "content": _content(one.content)}
            elif isinstance(one, InputCall):
                function = {"name": one.name, "arguments": one.arguments}
                call = {"id": one.call_id, "type": "function", "function": function}
                yield {"role": "assistant", "tool_calls": [call]}
            elif isinstance(one, InputResult):
                result = {"tool_call_id": one.call_id, "content": _content(one.output)}
                yield {"role": "tool", **result}


def _joined(messages: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages in which what an answer said and called is one, as it was given."""
    joined: list[dict[str, Any]] = []
    for one in messages:
        last = joined[-1] if joined else {}
        if one["role"] == last.get("role") == "assistant" and "tool_calls" in one:
            last.setdefault("tool_calls", []).extend(one["tool_calls"])
        else:
            joined.append(one)
    return joined


def _content(texts: str | Sequence[InputText]) -> Any:
    if isinstance(texts, str):
        return texts
    return [{"type": "text", "text": one.text} for one in texts]


# ---------------------------------------------------------------------- what is answered
@dataclass
class ResponsesForm:
    """Writes one answer as OpenAI's response objects and their events.

    Attributes:
        work: The request.
        sent: Its body.
        model: As it is served.
        created: Seconds since the epoch.
    """

    work: BackendRequest
    sent: ResponsesRequest
    model: str
    created: int = field(default_factory=now)
    done: bytes = b""
    _items: list[dict[str, Any]] = field(default_factory=list)
    _number: int = 0

    def frame(self, data: Mapping[str, Any]) -> bytes:
        """One event."""
        named = f"event: {data['type']}\n".encode() if "type" in data else b""
        return named + frame(data)

    # ------------------------------------------------------------------ whole
    def whole(self, started: Started, finished: Finished) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        parts = (finished.answer.text,) if finished.parts is None else finished.parts
        for part in parts:
            [*self._taken(part)]
        [*self._closed(self._status(finished))]
        return self._ended(started, finished)

    def _ended(self, started: Started, finished: Finished) -> dict[str, Any]:
        is_whole = finished.answer.finish_reason == "stop"
        usage = Usage.of(finished)
        report = KVCacheReport.of(self.work, started, finished.answer.metrics)
        cut = None if is_whole else {"reason": "max_output_tokens"}
        return {
            **self._about("completed" if is_whole else "incomplete"),
            "incomplete_details": cut,
            "output": self._items,
            "usage": {
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": plain(usage.prompt_tokens_details),
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage.total_tokens,
            },
            "kvcache": plain(report),
        }

    def _about(self, status: str) -> dict[str, Any]:
        sent = self.sent
        form = None if sent.text is None else sent.text.format
        told = {"type": "text"} if form is None else form.model_dump(mode="json", by_alias=True)
        chosen = sent.tool_choice
        choice = chosen.model_dump() if isinstance(chosen, FlatNamed) else chosen or "auto"
        return {
            "id": self.work.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": sent.instructions,
            "max_output_tokens": sent.max_output_tokens,
            "metadata": sent.metadata or {},
            "model": self.model,
            "output": [],
            "parallel_tool_calls": sent.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": sent.temperature,
            "text": {"format": told},
            "tool_choice": choice,
            "tools": [one.model_dump(mode="json") for one in sent.tools or ()],
            "top_p": sent.top_p,
            "truncation": "disabled",
            "usage": None,
        }

    # ------------------------------------------------------------------ streamed
    def opening(self) -> list[dict[str, Any]]:
        """The events that an answer begins with."""
        kinds = ("response.created", "response.in_progress")
        return [self._event(kind, response=self._about("in_progress")) for kind in kinds]

    def piece(self, piece: Piece) -> list[dict[str, Any]]:
        """The events of a piece."""
        return [*self._taken(piece.text if piece.part is None else piece.part)]

    def closing(self, started: Started, finished: Finished) -> list[dict[str, Any]]:
        """The events that it ends with."""
        events = [*self._closed(self._status(finished))]
        ended = self._ended(started, finished)
        return [*events, self._event(f"response.{ended['status']}", response=ended)]

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **fields}

    def _taken(self, part: AnswerPart) -> Iterator[dict[str, Any]]:
        """Take a part up, and the events that say so."""
        if isinstance(part, ToolCall):
            yield from self._closed()
            yield from self._called(part)
            return
        kind, text = _MESSAGE, part if isinstance(part, str) else part.text
        if isinstance(part, Reasoning):
            kind = _THOUGHT
        if not text:
            return
        last = self._items[-1] if self._items else None
        if last is None or last["type"] != kind.item or last["status"] != "in_progress":
            yield from self._closed()
            begun = {"id": new_id(kind.id), "type": kind.item, **kind.begun}
            self._items.append({**begun, "status": "in_progress", "content": []})
            yield self._item_event("response.output_item.added")
            self._items[-1]["content"].append(kind.part(""))
            yield self._item_event("response.content_part.added", part=kind.part(""))
        self._items[-1]["content"][0]["text"] += text
        yield self._item_event(f"response.{kind.text}.delta", delta=text, **kind.more)

    def _status(self, finished: Finished) -> str:
        return "completed" if finished.answer.finish_reason == "stop" else "incomplete"

    def _closed(self, status: str = "completed") -> Iterator[dict[str, Any]]:
        """End the item that is open, if one is."""
        if not self._items or self._items[-1]["status"] != "in_progress":
            return
        item = self._items[-1]
        kind = _MESSAGE if item["type"] == _MESSAGE.item else _THOUGHT
        text = item["content"][0]["text"]
        yield self._item_event(f"response.{kind.text}.done", text=text, **kind.more)
        yield self._item_event("response.content_part.done", part=kind.part(text))
        item["status"] = status
        yield self._item_event("response.output_item.done")

    def _called(self, call: ToolCall) -> Iterator[dict[str, Any]]:
        arguments = json.dumps(call.arguments, ensure_ascii=False)
        item = {
            "id": new_id("fc"),
            "type": "function_call",
            "call_id": call.id,
            "name": call.name,
            "arguments": "",
            "status": "in_progress",
        }
        self._items.append(item)
        yield self._item_event("response.output_item.added")
        named = "response.function_call_arguments"
        yield self._item_event(f"{named}.delta", delta=arguments)
        yield self._item_event(f"{named}.done", arguments=arguments, name=call.name)
        item.update(arguments=arguments, status="completed")
        yield self._item_event("response.output_item.done")

    def _item_event(self, kind: str, **fields: Any) -> dict[str, Any]:
        """An event about the last item."""
        place, item = len(self._items) - 1, self._items[-1]
        if kind.startswith("response.output_item"):
            copied = {**item, **({"content": [*item["content"]]} if "content" in item else {})}
            return self._event(kind, output_index=place, item=copied)
        within = {} if item["type"] == "function_call" else {"content_index": 0}
        return self._event(kind, item_id=item["id"], output_index=place, **within, **fields)


@dataclass(frozen=True)
class _TextItem:
    """How one kind of text is told."""

    item: str
    id: str
    text: str
    part_type: str
    begun: Mapping[str, Any]
    part_more: Mapping[str, Any] = field(default_factory=dict)
    more: Mapping[str, Any] = field(default_factory=dict)

    def part(self, text: str) -> dict[str, Any]:
        return {"type": self.part_type, "text": text, **self.part_more}


_MESSAGE: Final = _TextItem(
    "message",
    "msg",
    "output_text",
    "output_text",
    {"role": "assistant"},
    {"annotations": [], "logprobs": []},
    {"logprobs": []},
)
_THOUGHT: Final = _TextItem("reasoning", "rs", "reasoning_text", "reasoning_text", {"summary": []})


def router(context: AppContext) -> APIRouter:
    """The route.

    Args:
        context: The server's.
    """
    routes = APIRouter(tags=["OpenAI"], route_class=CheckedRoute)

    @routes.post(
        "/v1/responses",
        response_model=dict[str, Any],
        responses={200: {"content": STREAM}, **error_responses(*ANSWERING)},
        summary="Answer a conversation, as OpenAI's newer API has it",
        operation_id="respond",
    )
    async def respond(
        request: Request,
        body: ResponsesRequest,
        caller: Annotated[Caller, Depends(context.authenticate)],
    ) -> AnswerResponse:
        """The last item of the input is the user's message, or what a function gave.

        Nothing is kept: whoever goes on with a conversation sends all of it.
        """
        work = chat_work(context, caller, body.as_chat, id=new_id("resp"))
        form = ResponsesForm(work, body, context.settings.name)
        return AnswerResponse(context, request, caller, work, form, route="responses")

    return routes
