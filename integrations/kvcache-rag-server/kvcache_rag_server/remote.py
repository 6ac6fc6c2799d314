"""A remote engine: questions go to a `kvcache-rag serve` over HTTP.

`RemoteEngine` has what applications use of an `Engine`, and loads neither torch nor a tokenizer:
the server writes prompts and keeps chunks.
"""

from __future__ import annotations

import asyncio
import math
import os
import threading
import time
import weakref
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYetError
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar

from kvcache_rag.errors import (
    ContextTooLongError,
    FingerprintMismatchError,
    InvalidInputError,
    RemoteServerError,
)
from kvcache_rag.forks import Reopened, new_lock
from kvcache_rag.generation.stream import AnswerStream
from kvcache_rag.integration.chat import ConversationForm, ConversationForms
from kvcache_rag.metrics import Answer, Metrics
from kvcache_rag.policies import ReusePolicy
from kvcache_rag.policies.policy_registry import name_of
from kvcache_rag.progress import progress_bar
from kvcache_rag.prompt.scores import ranking
from kvcache_rag.prompt.template import Message, PromptTemplate
from kvcache_rag.verdict import Identity
from kvcache_rag_server.http import LostError, RefusedError, ServerClient

__all__ = ["RemoteEngine"]

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence

    from kvcache_rag.generation.stream import Emit
    from kvcache_rag.generation.tools import ToolChoice

OWNER: Final = "kvcache-rag"
"""The owner of models that `GET /v1/models` of such a server names."""

# Of one request to prefill.
_DOCUMENTS: Final = 16
_CHARACTERS: Final = 1 << 20

# Questions of one batch that are asked at a time; the server joins them.
_AT_ONCE: Final = 16

# Seconds between two looks whether an answer is still wanted.
_LOOK: Final = 0.05

# Seconds that a server without room is given, unless it says how long.
_PAUSE: Final = 1.0

_TOO_LONG: Final = "context_length_exceeded"

_TOO_LARGE: Final = 413

# Arguments of `Engine.generate` by their names in a request.
_SENT: Final = {
    "max_new_tokens": "max_tokens", "temperature": "temperature", "top_p": "top_p",
    "top_k": "top_k", "seed": "seed", "stop": "stop",
}  # fmt: skip

_STARTING: Final = new_lock()

_Got = TypeVar("_Got")


class ConversationText(str):
    """Turns as readable text; the server writes their prompt.

    Attributes:
        turns: The turns, oldest first.
    """

    turns: tuple[dict[str, Any], ...]

    def __new__(cls, turns: Iterable[Mapping[str, Any]]) -> ConversationText:
        """Keep the turns with their text."""
        kept = tuple(dict(turn) for turn in turns)
        written = super().__new__(cls, "\n\n".join(f"{t['role']}: {t['content']}" for t in kept))
        written.turns = kept
        return written


class RemoteForms(ConversationForms):
    """The forms of a remote model; how it is told about tools is not known here."""

    def __init__(self, url: str) -> None:
        """For the server at `url`."""
        self._url = url

    def _is_current(self, engine: Any) -> bool:
        return True

    @property
    def has_chat_template(self) -> bool:
        """True: the server writes prompts of messages in its own way."""
        return True

    @property
    def grammars(self) -> NoReturn:
        """Not available here."""
        raise _elsewhere(self._url)

    def form(
        self,
        turns: Sequence[Mapping[str, Any]],
        choice: ToolChoice,
        values: Mapping[str, Any] | None = None,
        *,
        is_held: bool = False,
    ) -> ConversationForm:
        """How a conversation is asked; see `ConversationForms.form`.

        Raises:
            InvalidInputError: If tools may be called, or the chat template gets values.
        """
        from kvcache_rag.generation.tools import json_turns

        if choice.may_call or is_held:
            what = "tools are called and schemas held" if choice.may_call else "schemas are held"
            raise InvalidInputError(
                f"{what} by a model of this process; leave base_url={self._url!r} out for them"
            )
        if values:
            raise InvalidInputError(
                f"chat_template_kwargs are not told to the server at {self._url}; leave them out"
            )
        has_calls = any(turn["role"] == "tool" or turn.get("tool_calls") for turn in turns)
        written = json_turns(turns, "") if has_calls else [dict(turn) for turn in turns]
        return ConversationForm(
            tuple(written), {}, "", None, thinks=False, choice=choice, is_native=False
        )


def _elsewhere(url: str) -> InvalidInputError:
    return InvalidInputError(
        f"this needs model and tokenizer, which the server at {url} has; leave base_url out, or do "
        "without schemas, tools and counted tokens"
    )


class RemoteEngine(Reopened):
    """What applications use of an `Engine`, answered by a server.

    The server is only asked when needed.  Thread-safe.

    Attributes:
        url: URL of the server.
        namespace: "": the server takes the tenant from the key.
        policy: None: questions that name none get the server's own.
        is_remote: True: chunks are elsewhere, under keys not known here.
    """

    is_remote: Final = True
    namespace: Final = ""
    why_useless: Final = ""
    policy: Final = None

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        model: str = "",
        system_prompt: str | None = None,
        window: int | None = None,
        retries: int = 2,
        transport: Any = None,
    ) -> None:
        """Ask the server at `base_url`, such as `http://rag.example.org:8000`, with or without /v1.

        Args:
            base_url: URL of a `kvcache-rag serve`, with any backend.
            api_key: The caller's key; None for a server without keys.
            model: Name of the served model; "" for the only one.
            system_prompt: Instruction before the chunks.  Only the server's own can be there; any
                other goes before the question.
            window: Tokens of prompt and answer, to keep prompts short; None for the model's own.
            retries: How often to repeat a question if the server is full or unreachable.
            transport: httpx transport, for tests.

        Raises:
            InvalidInputError: If it is not a URL.
        """
        url = base_url.rstrip("/").removesuffix("/v1") if isinstance(base_url, str) else base_url
        self._client = ServerClient(url, transport, key=api_key or None, through_proxies=True)
        self.url = self._client.url
        self._name, self._window, self._retries = model, window, retries
        self._system = system_prompt or ""
        self.template = PromptTemplate(system=self._system) if self._system else PromptTemplate()
        ConversationForms.known[self] = RemoteForms(self.url)
        # Who drops it need not close it; at the end of the process connections end by themselves.
        self._end = weakref.finalize(self, _closed, self._client)
        self._end.atexit = False

    def close(self) -> None:
        """Close its connections."""
        closing = self._end()
        if closing is not None:
            closing.result()

    # ------------------------------------------------------------------ the server
    @cached_property
    def _served(self) -> tuple[str, int]:
        """Name and context window of the model."""
        found = self._asked(self._client.get("/v1/models"))
        models = found.get("data") if isinstance(found, dict) else None
        known = {one["id"]: one for one in models or () if one.get("owned_by") == OWNER}
        if not known:
            raise RemoteServerError(
                f"what answers at {self.url} is no server of kvcache-rag and would not read "
                "documents; check base_url"
            )
        name = self._name or next(iter(known))
        if name not in known:
            raise InvalidInputError(
                f"the server at {self.url} serves {', '.join(map(repr, known))}, not {name!r}; "
                "name that, or none"
            )
        window = known[name].get("max_model_len") or self._window
        if not window:
            raise RemoteServerError(
                f"the server at {self.url} does not say how long prompts may be now; ask again, or "
                "give context_window="
            )
        return name, min(window, self._window or window)

    @property
    def name(self) -> str:
        """The server's name for the model."""
        return self._served[0]

    @property
    def context_window(self) -> int:
        """Longest prompt and answer, in tokens."""
        return self._served[1]

    @property
    def identity(self) -> Identity:
        """What a verdict must match to apply to the server's answers."""
        return Identity(**self._asked(self._client.get("/v1/identity", seconds=None)))

    @property
    def prefix_text(self) -> str:
        """The instruction before the chunks, as far as known here."""
        return self.template.system

    @property
    def model(self) -> NoReturn:
        """Not available here."""
        raise _elsewhere(self.url)

    @property
    def tokenizer(self) -> NoReturn:
        """Not available here."""
        raise _elsewhere(self.url)

    # ------------------------------------------------------------------ answers
    def generate(self, question: str, chunks: Sequence[Any] = (), **options: Any) -> Answer:
        """Answer a question over chunks, like `Engine.generate`, with options that a server takes.

        `overflow="refine"` leaves out what does not fit, like "drop_lowest".

        Raises:
            InvalidInputError: If an argument cannot be used, or not here.
            ContextTooLongError: If the prompt does not fit and `overflow` is "error".
            RemoteServerError: If the server is unreachable, full or failed.
        """
        cancelled, emit = options.pop("cancelled", None), options.pop("emit", None)
        return self._fitted(question, chunks, options, lambda asked: asked.run(emit, cancelled))

    def stream(self, question: str, chunks: Sequence[Any] = (), **options: Any) -> AnswerStream:
        """Like `generate`, as an iterator of pieces of text; it begins when the answer does."""
        return self._fitted(question, chunks, options, _Asked.open)

    def complete(self, prompt: str, **options: Any) -> Answer:
        """Continue a text as it is, or answer a `ConversationText`."""
        cancelled, emit = options.pop("cancelled", None), options.pop("emit", None)
        return self._text(prompt, options).run(emit, cancelled)

    def stream_complete(self, prompt: str, **options: Any) -> AnswerStream:
        """`complete`, as an iterator of pieces of text."""
        return self._text(prompt, options).open()

    def generate_batch(self, questions: Sequence[Any], **options: Any) -> list[Answer]:
        """Answer several questions; the server answers them together if it can."""

        def one(asked: tuple[Any, ...]) -> Answer:
            question, chunks, *more = asked
            own = dict(zip(("history", "scores", "asked"), more, strict=False))
            return self.generate(question, chunks, **{**options, **own})

        with ThreadPoolExecutor(_AT_ONCE, "kvcache-rag-remote") as pool:
            return list(pool.map(one, questions))

    def render_chat(self, messages: Iterable[Mapping[str, Any]], **chat: Any) -> ConversationText:
        """Messages for `complete`; the server writes them with the model's chat template."""
        if any(chat.values()):
            raise InvalidInputError(
                f"{' and '.join(chat)} are not told to the server at {self.url}; leave them out"
            )
        return ConversationText(messages)

    def compose(self, write: Callable[[Callable[[str], str]], str]) -> str:
        """The result of `write`; control tokens are not known here."""
        return write(lambda text: text)

    # ------------------------------------------------------------------ chunks
    def add(
        self,
        texts: Sequence[str],
        *,
        show_progress: bool = False,
        cancelled: threading.Event | None = None,
    ) -> list[None]:
        """Have the server compute and store missing chunks.

        Args:
            texts: Chunks.
            show_progress: Whether to show a bar.
            cancelled: Once set, stops before the next request.

        Returns:
            No keys: only the server knows where chunks are.

        Raises:
            concurrent.futures.CancelledError: If it was stopped; what was computed stays stored.
            ContextTooLongError: If a chunk does not fit the context window or the server's limits;
                those before it are stored.
            RemoteServerError: If the server is unreachable, full or failed.
        """
        done = 0
        with progress_bar(len(texts), "prefilling", "chunk", show=show_progress) as bar:
            for part in _parts(texts):
                if cancelled is not None and cancelled.is_set():
                    raise CancelledError
                self._asked(self._prefill(part, done))
                bar.update(len(part))
                done += len(part)
        return [None] * len(texts)

    async def _prefill(self, part: list[str], at: int) -> None:
        """Have texts computed, of which the first is number `at`; half of them where it is told so.

        A server does not say how many documents and bytes it takes before it is asked.
        """
        post = partial(self._client.post, "/v1/prefill", {"documents": part})
        try:
            await self._patiently(post)
        except RefusedError as error:
            if error.status != _TOO_LARGE:
                raise
            if len(part) == 1:
                raise ContextTooLongError(
                    f"chunk {at} is more than the server at {self.url} takes, which says: {error}"
                ) from None
            half = len(part) // 2
            await self._prefill(part[:half], at)
            await self._prefill(part[half:], at + half)

    def keys(self, texts: Sequence[str]) -> list[None]:
        """One None per text; raises what `add` does for texts that cannot be chunks."""
        return self.add(texts)

    def read(
        self,
        question: str,
        chunks: Sequence[Any],
        *,
        cancelled: threading.Event | None = None,
    ) -> NoReturn:
        """Not available: how likely a question is after each chunk is not sent over HTTP.

        Raises:
            InvalidInputError: Always.
        """
        raise InvalidInputError(
            "questions are read behind documents by a model of this process; leave "
            f"base_url={self.url!r} out for that"
        )

    def reference(self, digest: str, spec: str, tokens: int) -> NoReturn:
        """Not available: noted keys are of no use here.

        Raises:
            FingerprintMismatchError: Always.
        """
        raise FingerprintMismatchError(f"the chunks are at {self.url}, under keys of its own")

    def delete(self, keys: Iterable[Any]) -> None:
        """Do nothing: the server keeps chunks as its limits allow."""

    # ------------------------------------------------------------------ requests
    def _fitted(
        self,
        question: str,
        chunks: Sequence[Any],
        options: dict[str, Any],
        ask: Callable[[_Asked], _Got],
    ) -> _Got:
        """Ask over all chunks, and over fewer and fewer, as far as that is allowed."""
        overflow = options.pop("overflow", "error")
        scores = options.pop("scores", None)
        options.pop("asked", None)  # the server knows which of its messages that is
        mismatch = options.pop("prefix_mismatch", False)
        texts = [_text_of(chunk) for chunk in chunks]
        ranks = ranking(scores, len(texts))
        documents: list[Any] = texts
        if scores is not None:
            documents = [{"text": text, "score": ranks[at]} for at, text in enumerate(texts)]
        # Of equal ones the first is better.
        by_score = sorted(range(len(texts)), key=lambda at: (ranks[at], -at))
        dropped = 0
        while True:
            left = sorted(by_score[dropped:])
            asked = _Asked(
                self,
                "/v1/chat/completions",
                self._question(question, [documents[at] for at in left], dict(options)),
                replaced={"dropped_chunks": dropped, "prefix_mismatch": mismatch},
                places=tuple(left),
            )
            try:
                return ask(asked)
            except ContextTooLongError:
                if overflow == "error" or not left:
                    raise
            dropped += 1

    def _question(
        self, question: str, documents: Sequence[Any], options: dict[str, Any]
    ) -> dict[str, Any]:
        turns = [_turn(one) for one in options.pop("history", ())]
        system = [{"role": "system", "content": self._system}] if self._system else []
        policy = options.pop("policy", None)
        if isinstance(policy, ReusePolicy):
            policy = name_of(policy)
        return {
            "model": self.name,
            "messages": [*system, *turns, {"role": "user", "content": question}],
            "documents": list(documents),
            **({"kvcache": {"policy": policy}} if policy else {}),
            **self._told(options),
        }

    def _text(self, prompt: str, options: dict[str, Any]) -> _Asked:
        body = {"model": self.name, **self._told(dict(options))}
        if isinstance(prompt, ConversationText):
            turns = [_turn(one) for one in prompt.turns]
            return _Asked(self, "/v1/chat/completions", {**body, "messages": turns})
        return _Asked(self, "/v1/completions", {**body, "prompt": prompt})

    def _told(self, options: dict[str, Any]) -> dict[str, Any]:
        """Options as the server reads them.

        Raises:
            InvalidInputError: If it is not told one of them.
        """
        is_sampled = options.pop("do_sample", None)
        body = {
            sent: options.pop(name) for name, sent in _SENT.items() if options.get(name) is not None
        }
        if is_sampled is False:
            for name in ("temperature", "top_p", "top_k", "seed"):
                body.pop(name, None)
        elif is_sampled:
            body.setdefault("temperature", 1.0)
        if options.pop("skip_special_tokens", True) is not True:
            options["skip_special_tokens"] = False
        if "max_time" in options:
            body["max_time"] = options.pop("max_time")  # kept by who waits, see `_Asked`
        left = sorted(name for name, value in options.items() if value is not None)
        if left:
            raise InvalidInputError(
                f"{' and '.join(left)} {'are' if len(left) > 1 else 'is'} not told to the server "
                f"at {self.url}; leave it out, or answer without base_url"
            )
        return body

    # ------------------------------------------------------------------ waiting
    def _asked(self, call: Coroutine[Any, Any, Any]) -> Any:
        """What a call gives, its errors as a caller knows them."""
        try:
            return _wait(asyncio.run_coroutine_threadsafe(call, _loop()), lambda: False)
        except RefusedError as error:
            raise self._error(error) from None

    async def _patiently(self, call: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """A call, repeated where a server is not there or has no room."""
        for _ in range(self._retries):
            pause = _PAUSE
            try:
                return await call()
            except (LostError, RefusedError) as error:
                if isinstance(error, RefusedError):
                    if not error.is_full:
                        raise
                    pause = _PAUSE if error.retry_after is None else error.retry_after
            await asyncio.sleep(pause)
        return await call()

    def _error(self, error: RefusedError) -> Exception:
        """How a caller knows what a server says."""
        if error.code == _TOO_LONG:
            return ContextTooLongError(str(error))
        if error.is_full:
            return RemoteServerError(f"the server at {self.url} says: {error}")
        return InvalidInputError(f"the server at {self.url} says: {error}")


class _CutError(RemoteServerError):
    """A server was lost within an answer of which something was handed on."""


@dataclass
class _Asked:
    """One request for an answer, and how far that has come.

    Attributes:
        engine: Whose server is asked.
        path: Of the server.
        body: Its fields; `max_time` is for who waits.
        replaced: What the metrics say that the server does not know.
        places: Of the documents in the body, their numbers as they were given.
        emit: Takes each piece of the answer's text.
        text: So far.
        finish: Why it ended.
        metrics: What it cost, once the server has told.
        opened: Done as soon as the server has begun, or will not.
    """

    engine: RemoteEngine
    path: str
    body: dict[str, Any]
    replaced: Mapping[str, Any] = field(default_factory=dict)
    places: tuple[int, ...] = ()
    emit: Emit | None = None
    text: str = ""
    finish: str = "length"
    metrics: Metrics = field(default_factory=Metrics)
    opened: Future[None] = field(default_factory=Future)

    def run(self, emit: Emit | None, cancelled: threading.Event | None) -> Answer:
        """The whole answer, or what came of it until it was cut."""
        self.emit = emit
        return self._run(cancelled, is_read_in_parts=emit is not None)

    def open(self) -> AnswerStream:
        """The answer piece by piece, once it has begun."""

        def run(emit: Emit, cancelled: threading.Event) -> Answer:
            self.emit = emit
            return self._run(cancelled, is_read_in_parts=True)

        stream = AnswerStream(run)
        self.opened.result()
        return stream

    def _run(self, cancelled: threading.Event | None, *, is_read_in_parts: bool) -> Answer:
        body, engine = dict(self.body), self.engine
        until = time.monotonic() + body.pop("max_time", math.inf)
        # What may be cut is read as it comes; what need not be, a server can answer in a batch.
        receive = self._parts if is_read_in_parts or until < math.inf else self._whole

        def is_over() -> bool:
            return time.monotonic() > until or (cancelled is not None and cancelled.is_set())

        patient = engine._patiently(lambda: receive(body))
        try:
            _wait(asyncio.run_coroutine_threadsafe(patient, _loop()), is_over)
        except BaseException as error:
            told = engine._error(error) if isinstance(error, RefusedError) else error
            if not self.opened.done():
                self.opened.set_exception(told)
            raise told from None
        if not self.opened.done():
            self.opened.set_result(None)
        found, places = self.metrics, self.places
        cost = replace(
            found,
            **self.replaced,
            answered_from=tuple(map(places.__getitem__, found.answered_from)),
            missed=tuple(replace(one, chunk=places[one.chunk]) for one in found.missed),
            relevance=tuple(replace(one, chunk=places[one.chunk]) for one in found.relevance),
        )
        return Answer(self.text, cost, finish_reason=self.finish)

    async def _whole(self, body: Mapping[str, Any]) -> None:
        self._take(await self.engine._client.post(self.path, body))

    async def _parts(self, body: Mapping[str, Any]) -> None:
        try:
            async with aclosing(self.engine._client.events(self.path, body)) as parts:
                async for part in parts:
                    self._take(part)
        except RemoteServerError as error:
            # What was handed on cannot be taken back.
            if self.text and not isinstance(error, RefusedError):
                raise _CutError(f"the answer has no end: {error}") from None
            raise

    def _take(self, part: Mapping[str, Any]) -> None:
        """Read an answer, or a part of one."""
        if not self.opened.done():
            self.opened.set_result(None)
        for choice in part.get("choices", ()):
            said = choice.get("delta") or choice.get("message") or {}
            piece = choice.get("text") or said.get("content") or ""
            self.text += piece
            if piece and self.emit is not None:
                self.emit(piece)
            self.finish = choice.get("finish_reason") or self.finish
        cost = part.get("kvcache")
        if cost is not None:
            self.metrics = Metrics.from_dict(cost)


def _wait(future: Future[Any], is_over: Callable[[], bool]) -> Any:
    """What a call gives; None once it is over before its time, which ends it."""
    try:
        while True:
            with suppress(NotYetError):
                return future.result(_LOOK)
            if future.done():
                return future.result()
            if is_over():
                return None
    finally:
        future.cancel()


def _parts(texts: Sequence[str]) -> Iterator[list[str]]:
    """Texts in their order, so many at a time as one request may bring."""
    part: list[str] = []
    for text in texts:
        if part and (len(part) == _DOCUMENTS or sum(map(len, part)) + len(text) > _CHARACTERS):
            yield part
            part = []
        part.append(text)
    if part:
        yield part


def _text_of(chunk: Any) -> str:
    text = chunk if isinstance(chunk, str) else getattr(chunk, "text", None)
    if text is None:
        raise InvalidInputError("a server is given texts, not keys of chunks; hand the text over")
    return str(text)


def _turn(turn: Message | Mapping[str, Any]) -> dict[str, str]:
    if isinstance(turn, Message):
        return {"role": turn.role, "content": turn.content}
    return {"role": str(turn["role"]), "content": str(turn.get("content") or "")}


def _closed(client: ServerClient) -> Future[None]:
    return asyncio.run_coroutine_threadsafe(client.close(), _loop())


def _loop() -> asyncio.AbstractEventLoop:
    """The event loop of all that is asked of servers, in a thread of this process."""
    with _STARTING:
        return _loop_of(os.getpid())


@cache
def _loop_of(process: int) -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="kvcache-rag-remote", daemon=True).start()
    return loop
