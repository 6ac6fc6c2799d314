"""Refuse excessive requests before they cost anything; checks in the order a request meets them.

A place of the caller's namespace (`Places`), before the body is read; a body that is too large, or
small in bytes and large in work (`bodies.py`); too many or too long documents
(`RequestLimiter`); and a prompt that cannot fit (`ensure_fits`), without tokenising all of it.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from kvcache_rag.errors import ContextTooLongError
from kvcache_rag_server.backend import INVALID, Failed
from kvcache_rag_server.errors import AGAIN, TOO_LONG, ApiError

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator

    from kvcache_rag_server.backend import Backend, BackendRequest, PromptWriter
    from kvcache_rag_server.keys import Caller
    from kvcache_rag_server.settings import RequestLimits

# Characters of a token, of which texts that fit have fewer on the average, almost always: only
# longer ones are looked at, which costs nothing where a request may be answered.
PER_TOKEN = 8

# What is read in pieces may have some tokens more than as a whole, but not so many times as many.
SURELY = 2

LONGEST: Final = 64
"""Characters of a text for each token of the context window; what is longer is refused unread."""


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
            ("concurrency", self._taken[namespace], limits.max_concurrency, "this namespace"),
            ("total_concurrency", self.taken, limits.max_total_concurrency, "this server"),
        ):
            if taken >= allowed:
                message = (
                    f"{allowed} requests of {whose} are being answered, the limit {name}; "
                    "repeat the request when one of them is complete"
                )
                code = "rate_limit_exceeded"
                raise ApiError(Failed(429, "rate_limit_error", message, AGAIN, code=code))
        self._taken[namespace] += 1
        try:
            yield
        finally:
            self._taken[namespace] -= 1
            if not self._taken[namespace]:
                del self._taken[namespace]


class RequestLimiter:
    """Admits requests whose content stays within `RequestLimits`; the guard counts them (`Places`).

    Attributes:
        limits: The figures.
    """

    def __init__(self, limits: RequestLimits, backend: Backend) -> None:
        """Hold requests to `limits`; `backend` counts the tokens of prompts."""
        self.limits = limits
        self._backend = backend

    async def admit(self, work: BackendRequest) -> None:
        """Let a request in, or refuse it.

        Raises:
            ApiError: 413 for too many documents or bytes, 400 for too many tokens; each names the
                limit and its value.
            KVCacheRagError: If the request cannot be written as a prompt.
        """
        self.check(work)
        allowed = self.limits.max_prompt_tokens
        if allowed is not None:
            tokens = await _whole(self._backend.count(work))
            if tokens > allowed:
                raise _too_many("prompt_tokens", tokens, allowed, "tokens of the prompt", None)

    def check(self, work: BackendRequest) -> None:
        """Refuse too many or too long documents, and too long an answer.

        Raises:
            ApiError: 413 or 400.
        """
        limits = self.limits
        if len(work.chunks) > limits.max_documents:
            raise _too_large("documents", len(work.chunks), limits.max_documents, "documents")
        for index, text in enumerate(work.chunks):
            # A text of n letters has n to 4n bytes: most need not be encoded to be judged.
            if len(text) * 4 <= limits.max_document_bytes:
                continue
            size = len(text.encode("utf-8", "surrogatepass"))
            allowed, of = limits.max_document_bytes, f"bytes in documents[{index}]"
            if size > allowed:
                raise _too_large("document_bytes", size, allowed, of)
        asked, allowed = work.max_new_tokens, limits.max_answer_tokens
        if asked > allowed:
            raise _too_many("answer_tokens", asked, allowed, "tokens of the answer", "max_tokens")


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
    message = f"{asked} {of} are more than the limit {name} of {allowed}; send fewer"
    return ApiError(Failed(413, INVALID, message, param="documents", code="request_too_large"))


def _too_many(name: str, asked: int, allowed: int, of: str, param: str | None) -> ApiError:
    message = f"{asked} {of} are more than the limit {name} of {allowed}; ask for fewer"
    code = TOO_LONG if name == "prompt_tokens" else "limit_exceeded"
    return ApiError(Failed(400, INVALID, message, param=param, code=code))


def is_doubtful(prompts: PromptWriter, work: BackendRequest) -> bool:
    """Whether a request is so long that it should be looked at before it waits."""
    return sum(map(len, _texts(work))) > PER_TOKEN * prompts.context_window


def ensure_fits(prompts: PromptWriter, work: BackendRequest) -> None:
    """Read a request piece by piece until it is certain that it does not fit.

    No more is tokenised than a few context windows, however long the request is; one that is so
    long that only white space or the like could fit is not read at all.

    Raises:
        ContextTooLongError: If it does not fit.  One that is hardly too long is left to its answer.
        InvalidInputError: If a text is not valid Unicode.
    """
    window, tokens = prompts.context_window, 0
    characters = sum(map(len, _texts(work)))
    if characters > LONGEST * window:
        raise ContextTooLongError(
            f"the request has {characters} characters, more than {LONGEST} characters per token of "
            f"the model's context window of {window}; send fewer or smaller documents"
        )
    ids_of = prompts.tokenize_text if work.is_plain else prompts.brought_ids
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
    yield from work.system
    for turn in work.turns[: len(work.history)]:
        yield turn["content"]
        if "tool_calls" in turn:
            yield json.dumps(turn["tool_calls"], ensure_ascii=False)
    yield from work.chunks
    if work.tools is not None and work.tools.may_call:
        yield json.dumps(work.tools.callable_tools, ensure_ascii=False)
    if work.schema is not None:
        yield json.dumps(work.schema, ensure_ascii=False)
