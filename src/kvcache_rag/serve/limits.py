"""Refuse what is too much before it costs anything, in the order in which a request meets it.

A place of the caller's namespace (`Places`), before the body is read; a body that is small in bytes
and large in work (`CheckedRoute`); too many or too long documents (`RequestLimiter`); and a prompt
that cannot fit (`ensure_fits`), without tokenising all of it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any, Final

from fastapi import HTTPException, Request
from fastapi.routing import APIRoute

from kvcache_rag.errors import ContextTooLongError
from kvcache_rag.serve.errors import TOO_LONG, ApiError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Iterator

    from starlette.responses import Response

    from kvcache_rag.engine import Engine
    from kvcache_rag.serve.backend import Backend, BackendRequest
    from kvcache_rag.serve.lifecycle import Caller
    from kvcache_rag.serve.settings import RequestLimits

RETRY_AFTER = 1.0  # seconds: a place is free as soon as any answer of the caller is complete

MOST_VALUES: Final = 20_000
"""Values in one body: texts, numbers, lists, objects and the names in them."""

DEEPEST: Final = 32
"""Lists and objects around a value."""

# Characters of a token, of which texts that fit have fewer on the average, almost always: only
# longer ones are looked at, which costs nothing where a request may be answered.
PER_TOKEN = 8

# What is read in pieces may have some tokens more than as a whole, but not so many times as many.
SURELY = 2


class Places:
    """How many requests are answered or wait at a time, their bodies being read included.

    One event loop uses it.
    """

    def __init__(self, limits: RequestLimits) -> None:
        """Start with all places free."""
        self._limits = limits
        self._taken: Counter[str] = Counter()

    @property
    def taken(self) -> int:
        """Requests that hold a place now."""
        return self._taken.total()

    @contextmanager
    def place(self, caller: Caller) -> Iterator[None]:
        """Hold one of the places of the caller's namespace, whichever of its keys is used.

        Raises:
            ApiError: 429 that names the limit.
        """
        namespace, limits = caller.namespace, self._limits
        for name, taken, allowed, whose in (
            ("concurrency", self._taken[namespace], limits.concurrency, "this namespace"),
            ("total_concurrency", self.taken, limits.total_concurrency, "this server"),
        ):
            if taken >= allowed:
                raise ApiError(
                    429,
                    f"{allowed} requests of {whose} are being answered, the limit {name}; "
                    "repeat the request when one of them is complete",
                    kind="rate_limit_error",
                    code="rate_limit_exceeded",
                    retry_after=RETRY_AFTER,
                )
        self._taken[namespace] += 1
        try:
            yield
        finally:
            self._taken[namespace] -= 1
            if not self._taken[namespace]:
                del self._taken[namespace]


class CheckedRequest(Request):
    """A request whose JSON is neither too deep nor made of too many values.

    Every error of a body is collected before the first one is told, so a million empty messages
    would keep the server busy for seconds; and whatever walks a deeply nested value may run out of
    stack.
    """

    async def json(self) -> Any:
        """The body as JSON.

        Raises:
            HTTPException: 400 if it is too deep or too much; FastAPI lets no other error pass.
            ValueError: If it is no JSON.
        """
        try:
            value = await super().json()
        except RecursionError as error:
            raise _refused(_too_deep()) from error
        check_json(value)
        return value


class CheckedRoute(APIRoute):
    """A route that reads its body as a `CheckedRequest`: `APIRouter(route_class=CheckedRoute)`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's handler behind the check."""
        handle = super().get_route_handler()

        async def checked(request: Request) -> Response:
            return await handle(CheckedRequest(request.scope, request.receive))

        return checked


def check_json(value: Any) -> None:
    """Refuse JSON that is too deep, or made of too many values.

    Raises:
        HTTPException: 400.
    """
    layer, depth, count = [value], 0, 1
    while layer:
        if depth > DEEPEST:
            raise _refused(_too_deep())
        below: list[Any] = []
        for item in layer:
            if isinstance(item, (dict, list)):
                count += len(item) * (2 if isinstance(item, dict) else 1)
                below.extend(item.values() if isinstance(item, dict) else item)
            if count > MOST_VALUES:
                raise _refused(
                    f"the body is made of more than the {MOST_VALUES} values that are allowed; "
                    "send fewer messages or documents"
                )
        layer, depth = below, depth + 1


def _too_deep() -> str:
    return f"the body is nested deeper than the {DEEPEST} levels that are allowed; send it flatter"


def _refused(message: str) -> HTTPException:
    return HTTPException(400, message)


class RequestLimiter:
    """Admits requests whose content stays within `RequestLimits`; the guard counts them (`Places`).

    Attributes:
        limits: The figures.
    """

    def __init__(self, limits: RequestLimits, backend: Backend) -> None:
        """Hold requests to `limits`; `backend` counts the tokens of prompts."""
        self.limits = limits
        self._backend = backend

    @asynccontextmanager
    async def admitted(self, caller: Caller, work: BackendRequest) -> AsyncIterator[None]:
        """Let a request in.

        Raises:
            ApiError: 413 for too many documents or bytes, 400 for too many tokens; each names the
                limit and its value.
            KVCacheRagError: If the request cannot be written as a prompt.
        """
        del caller
        self.check(work)
        await self.check_prompt(work)
        yield

    def check(self, work: BackendRequest) -> None:
        """Refuse too many or too long documents, and too long an answer.

        Raises:
            ApiError: 413 or 400.
        """
        limits = self.limits
        if len(work.chunks) > limits.documents:
            raise _too_large("documents", len(work.chunks), limits.documents, "documents")
        if work.query and work.top_k > limits.documents:
            raise _too_many("documents", work.top_k, limits.documents, "documents", "top_k")
        for index, text in enumerate(work.chunks):
            # A text of n letters has n to 4n bytes: most need not be encoded to be judged.
            if len(text) * 4 <= limits.document_bytes:
                continue
            size = len(text.encode("utf-8", "surrogatepass"))
            if size > limits.document_bytes:
                raise _too_large(
                    "document_bytes", size, limits.document_bytes, f"bytes in documents[{index}]"
                )
        if work.max_new_tokens > limits.answer_tokens:
            raise _too_many(
                "answer_tokens",
                work.max_new_tokens,
                limits.answer_tokens,
                "tokens of the answer",
                "max_tokens",
            )

    async def check_prompt(self, work: BackendRequest) -> None:
        """Refuse too long a prompt; what `/v1/rag` retrieves is not counted, it is the server's.

        Raises:
            ApiError: 400.
            KVCacheRagError: If the request cannot be written as a prompt.
        """
        allowed = self.limits.prompt_tokens
        if allowed is None:
            return
        tokens = await _whole(self._backend.count(work))
        if tokens > allowed:
            raise _too_many("prompt_tokens", tokens, allowed, "tokens of the prompt", None)


async def _whole(counting: Coroutine[Any, Any, int]) -> int:
    """What is counted; who leaves before waits for it, since its thread cannot be stopped.

    So the request keeps its place, and nobody fills the threads by asking and leaving.
    """
    task = asyncio.ensure_future(counting)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.gather(task, return_exceptions=True)
        raise


def _too_large(name: str, asked: int, allowed: int, of: str) -> ApiError:
    return ApiError(
        413,
        f"{asked} {of} are more than the limit {name} of {allowed}; send fewer",
        param="documents",
        code="request_too_large",
    )


def _too_many(name: str, asked: int, allowed: int, of: str, param: str | None) -> ApiError:
    return ApiError(
        400,
        f"{asked} {of} are more than the limit {name} of {allowed}; ask for fewer",
        param=param,
        code=TOO_LONG if name == "prompt_tokens" else "limit_exceeded",
    )


def is_doubtful(engine: Engine, work: BackendRequest) -> bool:
    """Whether a request is so long that it should be looked at before it waits."""
    return sum(map(len, _texts(work))) > PER_TOKEN * engine.context_window


def ensure_fits(engine: Engine, work: BackendRequest) -> None:
    """Read a request piece by piece until it is certain that it does not fit.

    No more is tokenised than a few context windows, however long the request is.

    Raises:
        ContextTooLongError: If it does not fit.  One that is hardly too long is left to its answer.
        InvalidInputError: If a text is not valid Unicode.
    """
    window, tokens = engine.context_window, 0
    ids_of = engine.tokenize_text if work.is_plain else engine.brought_ids
    for text in _texts(work):
        for start in range(0, len(text), window):
            tokens += len(ids_of(text[start : start + window]))
            if tokens > SURELY * window:
                raise ContextTooLongError(
                    f"the request has more than {SURELY * window} tokens and the model's context "
                    f"window is {window}; shorten it, or send fewer or smaller documents"
                )


def _texts(work: BackendRequest) -> Iterator[str]:
    yield work.question
    yield work.system
    yield from (turn.content for turn in work.history)
    yield from work.chunks
