"""What clients send: checked bodies with OpenAI's fields and ours, and the request each makes.

Fields that cannot be honoured are declared with the one value that changes nothing, so that the
schema says what `UNSUPPORTED` then explains; a field that is not declared is refused by name.
"""

# FastAPI and pydantic read the annotations when routes and models are made, so none is postponed.
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Final, Literal

from pydantic import (
    AfterValidator,
    ConfigDict,
    Discriminator,
    Field,
    JsonValue,
    Tag,
)

from kvcache_rag.errors import InvalidInputError
from kvcache_rag.generation.tools import ToolChoice
from kvcache_rag.integration.rows import document_text, fields_text
from kvcache_rag.policies import ReusePolicy, policy_by_name
from kvcache_rag.policies.policy_registry import names_with_ratio
from kvcache_rag.prompt.conversation import Turn, joined, opened, said
from kvcache_rag.prompt.template import Message
from kvcache_rag_server.backend import INVALID, BackendRequest, Failed
from kvcache_rag_server.errors import ApiError
from kvcache_rag_server.fields import RequestModel, SomeText, Text, whole, wrong
from kvcache_rag_server.keys import Caller
from kvcache_rag_server.lifecycle import AppContext
from kvcache_rag_server.packed import Packed, within
from kvcache_rag_server.tool_fields import (
    RESERVED,
    Choice,
    NamedTool,
    ResponseFormat,
    SentCall,
    Tool,
    choice_of,
)


def _written(fields: dict[str, Any]) -> dict[str, Any]:
    whole(fields_text(fields))
    return fields


Score = Annotated[
    float | None,
    Field(
        allow_inf_nan=False,
        description="How well it matches the question, higher is better; all documents of a "
        "request have one, or none has and they stand best first.",
    ),
]


class TextDocument(RequestModel):
    """A text with a name.

    Attributes:
        id: Named by the caller; it does not stand in the prompt.
        title: Carried along; it does not stand in the prompt either, as in the integrations, so
            that one text is one chunk wherever it comes from.
        text: The chunk.
        score: How well it matches the question.
    """

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"id": "b", "title": "Harbours", "text": "Rotterdam …"}]},
    )

    id: str | None = Field(None, description="The caller's name of it; not part of the prompt.")
    title: str | None = Field(None, description="Carried along; not part of the prompt.")
    text: Text = Field(description="The chunk.")
    score: Score = None


class DataDocument(RequestModel):
    """A document as Cohere's API writes it.

    Attributes:
        id: Named by the caller; it does not stand in the prompt.
        data: The chunk, or fields that are written as one (see `fields_text`).
        score: How well it matches the question.
    """

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"id": "c", "data": {"title": "Harbours", "snippet": "Rotterdam …"}}]
        },
    )

    id: str | None = Field(None, description="The caller's name of it; not part of the prompt.")
    data: Annotated[
        Annotated[Text, Tag("(string)")]
        | Annotated[dict[str, JsonValue], AfterValidator(_written), Tag("(mapping)")],
        Discriminator(lambda given: "(string)" if isinstance(given, str) else "(mapping)"),
    ] = Field(
        description="The chunk; of a mapping, one line `name: value` per field, sorted by name."
    )
    score: Score = None


def _form(given: Any) -> str:
    if isinstance(given, str):
        return "(string)"
    data = given.get("data") if isinstance(given, Mapping) else getattr(given, "data", None)
    return "(text)" if data is None else "(data)"


Document = Annotated[
    Annotated[Text, Tag("(string)")]
    | Annotated[TextDocument, Tag("(text)")]
    | Annotated[DataDocument, Tag("(data)")],
    Discriminator(_form),
]
"""A chunk: a string, `{text}`, `{id, title, text}` or `{id, data}`, objects with their `score`."""


def chunks_of(documents: Sequence[str | TextDocument | DataDocument]) -> dict[str, int]:
    """Chunks of documents in their order; equal ones once, empty ones left out.

    Args:
        documents: As they came.

    Returns:
        Of each chunk, which document it is; of equal ones the first.
    """
    found: dict[str, int] = {}
    for at, text in enumerate(map(text_of, documents)):
        if text.strip():
            found.setdefault(text, at)
    return found


def scores_of(
    documents: Sequence[str | TextDocument | DataDocument], chunks: Iterable[str]
) -> tuple[float, ...] | None:
    """Scores of chunks, if their documents have any; of equal ones the highest.

    Raises:
        ApiError: If some have a score and others have none.
    """
    scores = [None if isinstance(one, str) else one.score for one in documents]
    known = [score for score in scores if score is not None]
    if not known:
        return None
    if len(known) < len(scores):
        message = (
            f"{len(known)} of {len(scores)} documents have a score; give every document one, or "
            "none and send the best first"
        )
        raise wrong(message, "documents")
    best: dict[str, float] = {}
    for text, score in zip(map(text_of, documents), known, strict=True):
        best[text] = max(score, best.get(text, score))
    return tuple(best[text] for text in chunks)


def text_of(document: str | TextDocument | DataDocument) -> str:
    """The text that stands in the prompt for a document."""
    if isinstance(document, str):
        return document_text(document)
    if isinstance(document, TextDocument):
        return document_text(document.text, document.title)
    data = document.data
    return document_text(data) if isinstance(data, str) else fields_text(data)


# Policies whose dial is a ratio.
_WITH_RATIO: Final = names_with_ratio()

# A turn that is text alone.
_PLAIN: Final = {"role", "content"}

LARGEST: Final = 2**31 - 1

_SEEDS: Final = 2**63

# Below it, sampling only ever finds the likeliest token, and logits divided by it overflow.
_COLDEST: Final = 1e-4

DEFAULT_TOKENS: Final = 16
"""Of a completion that says nothing else, as at OpenAI."""

MOST_ANSWERS: Final = 8

MOST_STOPS: Final = 16
"""Editors send more than OpenAI's four."""

TokenId = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
Bias = Annotated[float, Field(ge=-100, le=100)]

StopText = Annotated[SomeText, Field(max_length=256)]
"""A stop string; what it costs to look for one grows with its length."""


def _text_or_list(given: Any) -> str:
    return "(string)" if isinstance(given, str) else "(list)"


class TextPart(RequestModel):
    """A part of a message."""

    type: Literal["text"]
    text: Text
    cache_control: dict[str, JsonValue] | None = Field(None, description="Ignored.")


Content = Annotated[
    Annotated[Text, Tag("(string)")] | Annotated[list[TextPart], Tag("(list)")],
    Discriminator(_text_or_list),
]


class ChatMessage(RequestModel):
    """One message of a conversation, as OpenAI's clients write it (and give it back)."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = None
    refusal: None = None
    annotations: Annotated[list[JsonValue], Field(max_length=0)] | None = None
    audio: None = None
    function_call: None = None
    reasoning_content: Text | None = Field(None, description="Ignored.")
    reasoning: Text | None = Field(None, description="Ignored.")
    reasoning_details: list[JsonValue] | None = Field(None, description="Ignored.")
    parsed: JsonValue | None = Field(None, description="Ignored; clients add it.")
    tool_calls: list[SentCall] | None = Field(None, description="An assistant's.")
    tool_call_id: SomeText | None = Field(None, description="Of the call that a tool answers.")

    @property
    def text(self) -> str:
        """Its text; parts stand on lines of their own."""
        if isinstance(self.content, list):
            return "\n".join(part.text for part in self.content if part.text)
        return self.content or ""

    def turn(self, where: str) -> Turn:
        """The message as chat templates read it.

        Raises:
            ApiError: If it has what its role has not, or has not what it has to have.
        """
        for name, roles in (("tool_calls", "assistant"), ("tool_call_id", "tool")):
            if getattr(self, name) and self.role != roles:
                message = f"{name} belong to messages of the role {roles}, not {self.role}"
                raise wrong(message, f"{where}.{name}")
        if self.role == "tool" and self.tool_call_id is None:
            message = "a tool's message must have the tool_call_id of the call that it answers"
            raise wrong(message, where)
        turn = said("system" if self.role == "developer" else self.role, self.text)
        if self.tool_calls:
            calls = enumerate(self.tool_calls)
            turn["tool_calls"] = [one.turn(f"{where}.tool_calls[{at}]") for at, one in calls]
        if self.tool_call_id:
            turn["tool_call_id"] = self.tool_call_id
            if self.name:
                turn["name"] = self.name
        return turn


class StreamOptions(RequestModel):
    """What a stream says beside the answer."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = Field(None, description="Ignored.")


class KVCacheOptions(RequestModel):
    """What to reuse for this request."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"policy": "cacheblend", "ratio": 0.2}]},
    )

    policy: Text | None = Field(
        None,
        max_length=200,
        description="A policy by name, such as reuse, legolink, cacheblend, full; None for the "
        "server's. Numbers may stand behind a colon: cacheblend:0.2.",
    )
    ratio: float | None = Field(
        None, ge=0, le=1, description="Part of the chunk tokens that is computed again."
    )
    documents: Literal["as text"] | None = Field(
        None, description="Leaves documents that an app wrote into messages where they stand."
    )

    def chosen(self, default: str = "") -> ReusePolicy | None:
        """The policy; None for the engine's own.

        Args:
            default: Name of the server's policy.

        Raises:
            ApiError: If there is no such policy, or it has no ratio.
        """
        named = (self.policy if self.policy is not None else default).strip()
        if self.ratio is not None:
            named = self._with_ratio(named)
        try:
            return policy_by_name(named) if named else None
        except InvalidInputError as error:
            raise wrong(str(error), "kvcache.policy") from error

    def _with_ratio(self, named: str) -> str:
        rest = ""
        if self.policy is None:  # the server's own ratio gives way; further numbers stay
            named, _, numbers = named.partition(":")
            rest = "".join(numbers.partition(",")[1:])
        if named.lower() not in _WITH_RATIO:
            lack = f"{named!r} has none" if named else "none is named"
            message = (
                f"a ratio belongs to the policy {' or '.join(_WITH_RATIO)}, and {lack}; name one, "
                "or leave kvcache.ratio out"
            )
            raise wrong(message, "kvcache.ratio")
        return f"{named}:{self.ratio!r}{rest}"


class CompletionFields(RequestModel):
    """What chat and completions have in common."""

    kvcache: KVCacheOptions | None = None
    stream: bool | None = None
    max_tokens: int | None = Field(None, ge=1, le=LARGEST)
    temperature: float | None = Field(
        None, ge=0, le=2, description="0 or nothing for the likeliest tokens."
    )
    top_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-_SEEDS, le=_SEEDS - 1)
    model: Text = Field(description="Name of the served model, as GET /v1/models gives it.")
    documents: list[Document] | None = Field(
        None,
        description="Each is a chunk before the conversation: reused if it is cached, else "
        "computed and stored. An empty list says that nothing was found.",
    )
    stream_options: StreamOptions | None = None
    top_k: int | None = Field(None, ge=1, le=LARGEST)
    min_p: float | None = Field(
        None, ge=0, le=1, description="Least share of the likeliest token's probability."
    )
    repetition_penalty: float | None = Field(
        None, ge=0.1, le=10, description="Above 1 avoids what prompt and answer have."
    )
    stop: (
        Annotated[
            Annotated[StopText, Tag("(string)")]
            | Annotated[list[StopText], Field(max_length=MOST_STOPS), Tag("(list)")],
            Discriminator(_text_or_list),
        ]
        | None
    ) = None
    user: str | None = Field(None, description="Ignored.")
    n: int | None = Field(None, ge=1, le=MOST_ANSWERS, description="Answers.")
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: dict[TokenId, Bias] | None = Field(
        None, max_length=1024, description="Added to logits, by token ids."
    )

    @property
    def stops(self) -> tuple[str, ...]:
        """Strings before which the answer ends."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of `Engine.generate`: greedy, unless a temperature says otherwise.

        A `top_p` or `top_k` without one samples at temperature 1, OpenAI's default.
        """
        temperature = self.temperature
        narrowed = self.top_k is not None or (self.top_p is not None and self.top_p < 1)
        if temperature is None:
            temperature = 1.0 if narrowed else 0.0
        penalties: dict[str, Any] = {
            "frequency_penalty": self.frequency_penalty,
            "presence_penalty": self.presence_penalty,
            "logit_bias": {int(token): bias for token, bias in (self.logit_bias or {}).items()},
            "repetition_penalty": None if self.repetition_penalty == 1 else self.repetition_penalty,
        }
        penalties = {name: one for name, one in penalties.items() if one}
        if temperature < _COLDEST:
            return penalties
        overrides = {
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p or None,
            "seed": self.seed,
        }
        # The model's own generation config may narrow; OpenAI's clients expect what they say.
        options: dict[str, Any] = {"temperature": temperature, "top_p": 1.0, "top_k": 0}
        return {
            **options,
            **penalties,
            **{name: one for name, one in overrides.items() if one is not None},
        }

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return bool(self.stream_options and self.stream_options.include_usage)


class ChatRequest(CompletionFields):
    """Body of `POST /v1/chat/completions`."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "model": "tiny",
                    "messages": [{"role": "user", "content": "Where is the red lamp?"}],
                    "documents": [
                        "The red lamp stands in the hall.",
                        {"id": "b", "title": "Lamps", "text": "The blue lamp is broken."},
                    ],
                    "kvcache": {"policy": "cacheblend", "ratio": 0.2},
                    "max_tokens": 32,
                }
            ]
        },
    )

    messages: list[ChatMessage] = Field(
        min_length=1, description="The last one is the user's, or a tool's."
    )
    max_completion_tokens: int | None = Field(
        None, ge=1, le=LARGEST, description="Newer name of max_tokens; wins if both are given."
    )
    logprobs: bool | None = None
    top_logprobs: int | None = Field(
        None, ge=0, le=20, description="Likeliest tokens at each place; with logprobs."
    )
    tools: list[Tool] | None = Field(None, max_length=128)
    tool_choice: Choice | None = None
    functions: Annotated[list[JsonValue], Field(max_length=0)] | None = None
    function_call: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    modalities: list[Literal["text"]] | None = None
    audio: None = None
    prediction: None = None
    store: bool | None = Field(None, description="Ignored: nothing is kept of an answer.")
    metadata: dict[str, JsonValue] | None = Field(None, description="Ignored.")
    service_tier: str | None = Field(None, description="Ignored.")
    prompt_cache_key: str | None = Field(None, description="Ignored: chunks are their own keys.")
    prompt_cache_retention: str | None = Field(None, description="Ignored.")
    reasoning_effort: str | None = Field(None, description="Ignored.")
    verbosity: str | None = Field(None, description="Ignored.")
    safety_identifier: str | None = Field(None, description="Ignored.")

    @property
    def choice(self) -> ToolChoice | None:
        """Tools that the answer may call.

        Raises:
            ApiError: If they do not go together, or with a form of the answer.
        """
        chosen = self.tool_choice
        name = chosen.function.name if isinstance(chosen, NamedTool) else chosen
        if isinstance(chosen, NamedTool) and name in RESERVED:
            raise wrong(f"a tool that is chosen cannot be named {name!r}; rename it", "tool_choice")
        functions = [one.function for one in self.tools or ()]
        choice = choice_of(functions, name, self.parallel_tool_calls)
        if choice is not None and choice.may_call and self.held_to is not None:
            message = (
                "an answer cannot be held to a response_format and call tools at once; leave one "
                "of them out"
            )
            raise wrong(message, "response_format")
        return choice

    @property
    def held_to(self) -> dict[str, Any] | None:
        """The schema that the answer fits."""
        return None if self.response_format is None else self.response_format.held_to

    @property
    def told_logprobs(self) -> int | None:
        """How many tokens are told at each place beside the chosen one; None for no place.

        Raises:
            ApiError: If a number is said without `logprobs`.
        """
        if self.top_logprobs and not self.logprobs:
            raise wrong("top_logprobs goes with logprobs set to true", "top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(CompletionFields):
    """Body of `POST /v1/completions`."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"model": "tiny", "prompt": "The red lamp", "max_tokens": 8}]
        },
    )

    prompt: Annotated[
        Annotated[SomeText, Tag("(string)")]
        | Annotated[
            list[SomeText],
            Field(min_length=1, max_length=1),
            Tag("(list)"),
        ],
        Discriminator(_text_or_list),
    ] = Field(description="A text to continue; with documents, the question. One per request.")
    best_of: int | None = Field(None, ge=1, le=1)
    echo: Literal[False] | None = None
    logprobs: int | None = Field(
        None, ge=0, le=5, description="Likeliest tokens at each place of the answer."
    )
    suffix: None = None

    @property
    def text(self) -> str:
        return self.prompt if isinstance(self.prompt, str) else self.prompt[0]


UNSUPPORTED: Final = {
    "background": "answers are given at once; leave background out",
    "conversation": "nothing is kept of a conversation; send all of it as input",
    "previous_response_id": "nothing is kept of an answer; send the whole conversation as input",
    "audio": "this server answers in text only; leave audio out",
    "best_of": "one answer is given per request; leave best_of out or set it to 1",
    "echo": "the prompt is not repeated; leave echo out",
    "function_call": "functions are not supported; leave function_call out",
    "functions": "functions are not supported; leave functions out",
    "modalities": 'this server answers in text only; leave modalities out or say ["text"]',
    "prediction": "predicted outputs are not supported; leave prediction out",
    "suffix": "a suffix is not supported; leave it out",
}
"""What is told of fields that a request may carry only with the value that changes nothing."""


def new_id(kind: str) -> str:
    """A name for a request and its answer, such as "chatcmpl-…"."""
    return f"{kind}-{uuid.uuid4().hex}"


def check_model(context: AppContext, asked: str) -> None:
    """Refuse a model that is not served.

    Raises:
        ApiError: 404, as OpenAI says it.
    """
    served = context.settings.name
    if asked != served:
        message = f"the model {asked[:100]!r} does not exist here; this server serves {served!r}"
        raise ApiError(Failed(404, INVALID, message, param="model", code="model_not_found"))


# ---------------------------------------------------------------------- what they ask
def chat_work(
    context: AppContext, caller: Caller, body: ChatRequest, id: str = ""
) -> BackendRequest:
    """What a chat asks; `id` is its name, if it has one already.

    Raises:
        ApiError: If the last message is not the user's, or another value cannot be used.
    """
    last = len(body.messages) - 1
    is_tools = body.messages[last].role == "tool"
    if not is_tools and (
        body.messages[last].role != "user" or not body.messages[last].text.strip()
    ):
        message = (
            "the last message must be the user's and have text, or a tool's; put the question there"
        )
        raise wrong(message, f"messages[{last}]")
    turns = [one.turn(f"messages[{at}]") for at, one in enumerate(body.messages)]
    check_calls(turns)
    system: tuple[str, ...] = ()
    turns, documents, packed = _recognised(context, caller, body, turns)
    if documents is None:
        turns = opened(joined(turns), context.settings.system_prompt)
    else:
        told = (turn["content"] for turn in turns if turn["role"] == "system")
        system = tuple(text for text in told if text.strip())
        turns = joined(turn for turn in turns if turn["role"] != "system")
    question = "" if is_tools else turns.pop()["content"]
    return _work(
        context,
        caller,
        body,
        id=id or new_id("chatcmpl"),
        question=question,
        history=tuple(
            Message(turn["role"], turn["content"]) if turn.keys() == _PLAIN else turn
            for turn in turns
        ),
        system=system,
        max_new_tokens=body.max_completion_tokens
        or body.max_tokens
        or min(context.settings.answer_tokens, context.settings.max_answer_tokens),
        documents=documents,
        packed=packed,
        is_chat=documents is None,
        tools=body.choice,
        schema=body.held_to,
        logprobs=body.told_logprobs,
    )


def check_calls(turns: Sequence[Turn]) -> None:
    """Refuse results of tools that nobody called.

    Raises:
        ApiError: If there are.
    """
    called: set[str] = set()
    for at, turn in enumerate(turns):
        called.update(call["id"] for call in turn.get("tool_calls", ()))
        if turn["role"] == "tool" and turn["tool_call_id"] not in called:
            missing = turn["tool_call_id"]
            message = f"no message before it has a call with the tool_call_id {missing!r:.80}"
            raise wrong(message, f"messages[{at}].tool_call_id")


def completion_work(context: AppContext, caller: Caller, body: CompletionRequest) -> BackendRequest:
    """What a completion asks.

    Raises:
        ApiError: If a question over documents has no text, or another value cannot be used.
    """
    (asked,), documents, packed = _recognised(context, caller, body, [said("user", body.text)])
    is_plain = documents is None
    if not is_plain and not body.text.strip():
        raise wrong("the prompt is empty; ask something", "prompt")
    return _work(
        context,
        caller,
        body,
        id=new_id("cmpl"),
        question=asked["content"],
        documents=documents,
        packed=packed,
        max_new_tokens=body.max_tokens or min(DEFAULT_TOKENS, context.settings.max_answer_tokens),
        is_plain=is_plain,
        logprobs=body.logprobs,
    )


def _recognised(
    context: AppContext, caller: Caller, body: CompletionFields, turns: list[Turn]
) -> tuple[list[Turn], Sequence[Document] | None, Packed | None]:
    """Turns, documents, and what was recognised where those stood in the turns."""
    is_text = body.kvcache is not None and body.kvcache.documents is not None
    if body.documents is not None or context.recogniser is None or is_text:
        return turns, body.documents, None
    found = context.recogniser.cut(turns, caller.namespace, context.settings)
    if found is None:
        return turns, None, None
    cut, packed = found
    return cut, packed.documents, packed


def _work(
    context: AppContext,
    caller: Caller,
    body: CompletionFields,
    documents: Sequence[Document] | None,
    **asked: Any,
) -> BackendRequest:
    """The request of a caller: what chat and completions have in common, and what was `asked`.

    Raises:
        ApiError: If the model is not served, or values do not go together.
    """
    check_model(context, body.model)
    if body.stream_options is not None and not body.stream:
        message = "stream_options is for streams only; leave it out or set stream to true"
        raise wrong(message, "stream_options")
    reuse = body.kvcache or KVCacheOptions(policy=None, ratio=None, documents=None)
    chunks = chunks_of(documents or ())
    if context.recogniser is not None and within(context.settings, chunks):
        context.recogniser.note(caller.namespace, chunks)
    return BackendRequest(
        chunks=tuple(chunks),
        places=tuple(chunks.values()),
        scores=scores_of(documents or (), chunks),
        namespace=caller.namespace,
        policy=reuse.chosen(context.settings.policy),
        stop=body.stops,
        options=body.options,
        streaming=bool(body.stream),
        n=body.n or 1,
        **asked,
    )
