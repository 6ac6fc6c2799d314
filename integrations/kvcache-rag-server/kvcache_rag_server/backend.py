"""Requests between the HTTP layer and a model, and what a backend answers.

All are plain values, which cross threads.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from kvcache_rag.prompt.conversation import said
from kvcache_rag.prompt.template import Message

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping, Sequence

    from kvcache_rag.generation.tools import AnswerPart, ToolChoice
    from kvcache_rag.metrics import Answer
    from kvcache_rag.policies import ReusePolicy
    from kvcache_rag.prompt.conversation import Turn
    from kvcache_rag.prompt.template import PromptTemplate
    from kvcache_rag.verdict import Identity
    from kvcache_rag_server.packed import Packed


BAD_REQUEST, NOT_READY, SERVER_FAULT = 400, 503, 500

INVALID, OVERLOADED, SERVER_ERROR = "invalid_request_error", "overloaded", "server_error"
PERMISSION = "permission_error"


@dataclass(frozen=True)
class BackendRequest:
    """One request, as queues and backends see it.

    Attributes:
        id: Its id in logs and answers.
        question: Text of the last user message, or the prompt of a completion; "" behind a tool's
            result.
        chunks: Texts, best first unless there are scores.
        history: Earlier turns, oldest first; those of tools and calls as chat templates read them.
        system: System messages of the request over documents.
        namespace: Tenant, from the API key; never from the request's body.
        policy: Policy; None for the engine's own.
        max_new_tokens: Most tokens of the answer.
        stop: Strings before which the answer ends.
        options: Further arguments of `Engine.generate` (temperature, top_p, seed and the like), and
            `presence_penalty`, `frequency_penalty`, `logit_bias` as OpenAI has them.
        is_plain: Whether the question is a text to continue, without template or chunks.
        is_chat: Whether it is an ordinary conversation without documents.
        streaming: Whether the answer is wanted piece by piece.
        trace: The trace that its spans continue (`traces.carried`).
        scores: Scores of the chunks, higher is better; None if the best is first.
        places: Per chunk, the number of its document in the request.
        tools: Tools that the answer may call.
        schema: JSON schema that the answer is held to; None for none.
        logprobs: How many of the likeliest tokens are reported at each place of the answer, beside
            the chosen one; None for no report.
        n: Number of answers.
        packed: What was recognised in the messages, if the chunks come from there.
    """

    id: str
    question: str
    chunks: tuple[str, ...] = ()
    history: tuple[Message | Turn, ...] = ()
    system: tuple[str, ...] = ()
    namespace: str = ""
    policy: ReusePolicy | None = None
    max_new_tokens: int = 128
    stop: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    is_plain: bool = False
    is_chat: bool = False
    streaming: bool = False
    trace: Mapping[str, str] = field(default_factory=dict)
    scores: tuple[float, ...] | None = None
    places: tuple[int, ...] = ()
    tools: ToolChoice | None = None
    schema: Mapping[str, Any] | None = None
    logprobs: int | None = None
    n: int = 1
    packed: Packed | None = None

    @property
    def turns(self) -> list[Turn]:
        """History and question as chat templates read them."""
        turns = [
            said(one.role, one.content) if isinstance(one, Message) else one for one in self.history
        ]
        return [*turns, said("user", self.question)] if self.question else turns

    @property
    def asked(self) -> str:
        """What the user said last."""
        spoken = (turn["content"] for turn in reversed(self.turns) if turn["role"] == "user")
        return next(spoken, "")

    @property
    def has_calls(self) -> bool:
        """Whether tools can be called, or were."""
        return self.tools is not None or any(isinstance(one, dict) for one in self.history)

    @property
    def is_simple(self) -> bool:
        """Whether one answer is wanted, which is its text."""
        return not self.has_calls and self.schema is None and self.logprobs is None and self.n == 1


@dataclass(frozen=True)
class Started:
    """An answer begins; until then nothing of it was sent, and it could begin elsewhere.

    It comes with the first text, so that an error in a request can be sent instead.

    Attributes:
        queue_wait: Seconds that it waited for the model.
        sources: What was retrieved for it, best first.
        prefetched: Whether what it needs was computed or loaded while it waited.
        batch: How many requests are answered together, including itself.
        replica: Name of the process that answers; "" if there is only one.
    """

    queue_wait: float
    prefetched: bool = False
    batch: int = 1
    replica: str = ""


@dataclass(frozen=True)
class TokenLogprob:
    """One token of an answer.

    Attributes:
        text: Of it alone.
        logprob: Natural logarithm of its probability, before penalties, grammars and temperature.
        top: The likeliest tokens at its place, likeliest first.
    """

    text: str
    logprob: float
    top: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class Piece:
    """Further text of an answer.

    Attributes:
        text: "" where `part` is no text.
        part: A call of a tool, or a piece of what the model thought.
        index: Which of the answers, from 0.
        logprobs: Of the tokens that came since the last piece.
    """

    text: str = ""
    part: AnswerPart | None = None
    index: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class Finished:
    """The whole answer, with what it cost.

    Attributes:
        answer: The first one.
        parts: What it is made of; None where that is its text.
        logprobs: Of its tokens, as far as they are wanted; where it came in pieces, of those that
            came since the last one.
        others: Further answers to the same request.
    """

    answer: Answer
    parts: tuple[AnswerPart, ...] | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    others: tuple[Finished, ...] = ()

    @property
    def all(self) -> tuple[Finished, ...]:
        """All answers, the first one among them."""
        return (self, *self.others)


@dataclass(frozen=True)
class Prefilled:
    """Result of prefilling documents.

    Attributes:
        chunks: Number of different chunks.
        tokens: Their tokens.
        computed: How many were not stored before.
    """

    chunks: int
    tokens: int
    computed: int


@dataclass(frozen=True)
class OwnPolicy:
    """The policy of requests that name none.

    Attributes:
        name: As `policy_by_name` reads it; "" if not known now.
        warnings: For other policies, by name, what they may cost the model.
    """

    name: str = ""
    warnings: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Failed:
    """There is no answer.

    Attributes:
        status: HTTP status, 4xx or 5xx.
        kind: Error type that OpenAI's clients know.
        message: One sentence for the client, without traceback or paths.
        retry_after: Seconds after which to repeat; None if that is of no use.
        param: The field that was wrong, or None.
        code: OpenAI's `code`, such as "model_not_found", or None.
    """

    status: int
    kind: str
    message: str
    retry_after: float | None = None
    param: str | None = None
    code: str | None = None


Event: TypeAlias = Started | Piece | Finished | Failed
"""What a backend yields for a request: `Started`, `Piece`s, `Finished`; or `Failed` at the end."""


class Backend(Protocol):
    """Answers requests; the HTTP layer knows nothing else of models."""

    def answer(self, work: BackendRequest) -> AsyncGenerator[Event, None]:
        """Answer a request, event by event.

        Pieces come if the request streams.  Closing the iterator (`aclose`), or cancelling the task
        that reads it, withdraws the request: a waiting one leaves the queue, a running one stops at
        the next token.  Only that cancellation is raised.
        """
        ...

    async def count(self, work: BackendRequest) -> int:
        """Tokens of the request's prompt, as its answer will count them.

        Raises:
            KVCacheRagError: If the request cannot be written as a prompt.
        """
        ...

    async def explain(self, work: BackendRequest) -> Mapping[str, Any]:
        """The prompt's spans and which of their tokens are reused or recomputed, as plain values.

        Raises:
            KVCacheRagError: If the request cannot be written as a prompt.
        """
        ...

    async def prefill(self, work: BackendRequest) -> Prefilled:
        """Compute and store missing chunks of a request; nothing is answered.

        Cancelling stops it; what was computed stays stored.

        Raises:
            KVCacheRagError: If a chunk cannot be computed, or the server shuts down.
        """
        ...

    async def ready(self) -> bool:
        """Whether a request would be answered now; starts whatever has to be started."""
        ...

    async def stats(self) -> Mapping[str, Any]:
        """Counters since the start, plain JSON values.

        Returns:
            `{"replicas": [...]}`, each with `replica`, `waiting`, `running`, `answered`, `failed`,
            `cancelled`, `refused`, `service_seconds` (of a recent answer, or None), `batches` (how
            many, by size), `prefetch` (counts by name), `tiers`: a list with `tier`, `bytes` (held
            now; None where that is not known), `hits`, `bytes_read`, `bytes_written`, `seconds`,
            `misses`, `puts`, `evictions`, `corrupt`, `untrusted`, `put_failures`, `declined`,
            `failures`.
        """
        ...

    async def models(self) -> Mapping[str, int | None]:
        """Context windows, in tokens, by the models' names in requests.

        None for a window that is not known now.
        """
        ...

    async def identity(self) -> Identity:
        """What a verdict must match to apply to its answers.

        Raises:
            KVCacheRagError: If it is not known now.
        """
        ...

    async def own_policy(self) -> OwnPolicy:
        """How requests that name no policy are answered."""
        ...

    async def drain(self) -> None:
        """Take no more requests: waiting and later ones get `Failed`, running ones go on."""
        ...

    async def close(self) -> None:
        """Stop: waiting requests get `Failed`, running ones end, no thread is left."""
        ...


class PromptWriter(Protocol):
    """Writes and measures prompts: an `Engine`, or an object with just a model's tokenizer.

    Attributes:
        template: How they are written.
        context_window: Longest prompt and answer, in tokens.
    """

    @property
    def template(self) -> PromptTemplate: ...
    @property
    def context_window(self) -> int: ...
    def render_chat(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Messages as one prompt, with the tokenizer's chat template."""

    def tokenize_text(self, prompt: str) -> tuple[int, ...]:
        """Ids of a whole prompt."""

    def brought_ids(self, text: str) -> tuple[int, ...]:
        """Ids of a text from users or documents."""
