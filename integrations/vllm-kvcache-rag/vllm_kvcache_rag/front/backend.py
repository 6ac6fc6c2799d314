"""A backend over vLLM servers: prompts are written here, computed there, and stored by both."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, defaultdict
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from cachetools import LRUCache

from kvcache_rag.errors import FingerprintMismatchError, InvalidInputError
from kvcache_rag.generation.gate import policy_key
from kvcache_rag.generation.stream import in_thread
from kvcache_rag.kv.chunk import digest, packed_ids
from kvcache_rag.metrics import Answer, Metrics
from kvcache_rag.policies import FullRecompute
from kvcache_rag.policies.default import default_policy
from kvcache_rag.policies.policy_registry import name_of
from kvcache_rag.verdict import Identity
from kvcache_rag_server.backend import (
    BAD_REQUEST,
    INVALID,
    NOT_READY,
    OVERLOADED,
    Failed,
    Finished,
    OwnPolicy,
    Piece,
    Prefilled,
    Started,
)
from kvcache_rag_server.calls import cited
from kvcache_rag_server.errors import (
    AGAIN,
    SHUT_DOWN,
    ApiError,
    failure,
    overloaded,
)
from kvcache_rag_server.http import LostError, RefusedError
from kvcache_rag_server.limits import ensure_fits, is_doubtful
from vllm_kvcache_rag.front.routing import Routing, home_of
from vllm_kvcache_rag.transfer.params import FIELD, TransferParams

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence

    from kvcache_rag.policies import ReusePolicy
    from kvcache_rag.verdict import Gate
    from kvcache_rag_server.backend import BackendRequest, Event
    from vllm_kvcache_rag.front.client import EngineClient
    from vllm_kvcache_rag.front.prompts import Prompts, WrittenPrompt
    from vllm_kvcache_rag.transfer.grants import GrantKey

_LOG = logging.getLogger("kvcache_rag_server")

# Chunks that wait to be stored; more are stored when they are asked for again.
_MOST_STORING: Final = 1024

# Chunks of which is remembered that they are stored, or about to be.
_REMEMBERED: Final = 1 << 17

# What is wrong with the request itself; other refusals are about the server, such as its model.
_OF_THE_REQUEST: Final = frozenset({400, 413, 422})

# Tokens of the prompt by which a server's rotation is measured.
_LAW_TOKENS: Final = 768

_LAW_TRIES: Final = 5

# Chunks that one request to store many has each server compute at a time.
_STORED_AT_ONCE: Final = 4

_START: Final = 10.0  # seconds after which to repeat what waits for a server of vLLM to start
# vLLM serves lower numbers first.
_LATER: Final = 1

LOST: Final = Failed(
    NOT_READY, OVERLOADED, "the server that was answering has ended; repeat the request", AGAIN
)
NO_ENGINE: Final = Failed(
    NOT_READY, OVERLOADED, "no server of vLLM answers; repeat the request later", _START
)


@dataclass
class _AnswerProgress:
    """How far an answer has come.

    Attributes:
        begun: When the request came.
        waited: Seconds until a server took it.
        first: When the first text came, or 0.
        text: All of it.
        finish: Why it ended.
        generated: Tokens of it.
        cached: Prompt tokens that the server did not compute; None where it does not say.
        gate: Why the gate let nothing be reused, or "".
    """

    begun: float
    waited: float = 0.0
    first: float = 0.0
    text: str = ""
    finish: str = "stop"
    generated: int = 0
    cached: int | None = None
    gate: str = ""


@dataclass(frozen=True)
class _Missing:
    """A chunk to be stored.

    Attributes:
        name: By which it is remembered.
        namespace: Its tenant.
        params: Of the request that stores it.
        ids: Of the prefix and the chunk.
    """

    name: str
    namespace: str
    params: TransferParams
    ids: tuple[int, ...]


@dataclass(frozen=True)
class _Stored:
    """What came of having a chunk stored.

    Attributes:
        why: It was not; "" if it is, or soon will be.
        was_there: Whether it was stored before.
    """

    why: str = ""
    was_there: bool = False


class VLLMBackend:
    """Answers requests with servers of vLLM that have the connector; a `Backend`.

    It is used in one event loop.
    """

    def __init__(
        self,
        engines: Sequence[EngineClient],
        prompts: Prompts,
        key: GrantKey,
        *,
        model: str,
        name: str = "",
        policy: ReusePolicy | None = None,
        gate: Gate | None = None,
        max_running: int = 64,
        max_waiting: int = 256,
    ) -> None:
        """Serve by `engines`; nothing is asked of them yet.

        Args:
            engines: Servers of one model, with one store.
            prompts: Writes its prompts.
            key: Says for which tenant a request is; the engines have it, too.
            model: Its name there.
            name: Under which clients ask for it; "" for `model`.
            policy: Of requests that name none; None for that of models that nobody trained.
            gate: Of a verdict on these very servers; None to trust every policy.
            max_running: Requests that each server answers at a time.
            max_waiting: Requests that wait for one; one more is refused.
        """
        self._engines = {engine.url: engine for engine in engines}
        self._prompts, self._key, self._model = prompts, key, model
        self._name = name or model
        self._policy = policy or default_policy(trained=False)
        self._gate = gate
        self._verdict = None if gate is None else gate.loaded()
        self._max_running, self._max_waiting = max_running, max_waiting
        self._routing = Routing(list(self._engines))
        self._free = asyncio.Condition()
        self._counts: Counter[str] = Counter()
        self._waiting = 0
        # Of each server that was asked, why it reuses nothing; "" where it does.
        self._laws: dict[str, str] = {}
        # Of each server that was asked, a digest of what its chunks depend on.
        self._specs: dict[str, str] = {}
        self._proving: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        # Whether a chunk was stored; False while it is to be.
        self._known: LRUCache[str, bool] = LRUCache(_REMEMBERED)
        self._storing: asyncio.Queue[_Missing] = asyncio.Queue(_MOST_STORING)
        self._storer: asyncio.Task[None] | None = None
        self._is_closed = False

    # ------------------------------------------------------------------------------------- answers
    async def answer(self, work: BackendRequest) -> AsyncGenerator[Event, None]:
        """Answer a request, event by event; see `Backend.answer`."""
        name = "cancelled"
        try:
            async for event in self._answered(work, _AnswerProgress(time.perf_counter())):
                if isinstance(event, Finished | Failed):
                    name = "answered" if isinstance(event, Finished) else "failed"
                yield event
        except Exception as error:
            name = "failed"
            yield failure(error, f"request {work.id}")
        finally:
            self._counts[name] += 1

    async def _answered(
        self, work: BackendRequest, course: _AnswerProgress
    ) -> AsyncGenerator[Event, None]:
        if self._is_closed:
            yield SHUT_DOWN
            return
        if self._waiting >= self._max_waiting:
            self._counts["refused"] += 1
            yield overloaded(self._waiting, AGAIN)
            return
        self._waiting += 1
        try:
            written = await in_thread(self._written, work)
        finally:
            self._waiting -= 1
        async for event in self._from_any(work, written, course):
            yield event

    def _written(self, work: BackendRequest) -> WrittenPrompt:
        work = replace(work, policy=work.policy or self._policy)
        if is_doubtful(self._prompts, work):
            ensure_fits(self._prompts, work)
        return self._prompts.write(work, work.chunks)

    async def _from_any(
        self, work: BackendRequest, written: WrittenPrompt, course: _AnswerProgress
    ) -> AsyncGenerator[Event, None]:
        """The answer of one server, or of the next where it is lost before its first token."""
        tried: set[str] = set()
        while True:
            async with self._place(work, written, tried) as url:
                if url is None:
                    yield NO_ENGINE
                    return
                try:
                    async for event in self._from(self._engines[url], work, written, course):
                        yield event
                    return
                except (LostError, RefusedError) as error:
                    _LOG.warning("request %s: %s: %s", work.id, url, error)
                    if isinstance(error, RefusedError) and error.status in _OF_THE_REQUEST:
                        yield Failed(BAD_REQUEST, INVALID, str(error))
                        return
                    if course.first:
                        yield LOST
                        return
                    self._laws.pop(url, None)
                    tried.add(url)

    @asynccontextmanager
    async def _place(
        self, work: BackendRequest, written: WrittenPrompt, tried: set[str]
    ) -> AsyncIterator[str | None]:
        """A server's URL once it has a place; None if all have been tried."""
        running = self._routing.running
        async with self._free:
            self._waiting += 1
            try:
                while True:
                    full = {u for u in self._engines if running[u] >= self._max_running}
                    url = self._routing.choose(written.chunks, work.namespace, tried | full)
                    if url is not None or not full - tried:
                        break
                    await self._free.wait()
            finally:
                self._waiting -= 1
            if url is not None:
                running[url] += 1
        try:
            yield url
        finally:
            if url is not None:
                running[url] -= 1
                async with self._free:
                    # Who is woken may have tried this one already.
                    self._free.notify_all()

    async def _from(
        self,
        engine: EngineClient,
        work: BackendRequest,
        written: WrittenPrompt,
        course: _AnswerProgress,
    ) -> AsyncGenerator[Event, None]:
        """The answer of one server."""
        if not written.policy.is_full and await self._law(engine):
            written = written.unstitched
        if not written.policy.is_full:
            course.gate = self._objection(engine, written.policy)
            if course.gate:
                work = replace(work, policy=FullRecompute())
                written = await in_thread(self._written, work)
        course.waited = time.perf_counter() - course.begun
        begun = Started(course.waited, replica=_place(engine.url))
        async for part in engine.stream(self._body(work, written), work.trace):
            self._note(part, course)
            text = "".join(choice.get("text", "") for choice in part.get("choices", ()))
            if not text:
                continue
            if not course.first:
                course.first = time.perf_counter()
                yield begun
            course.text += text
            if work.streaming:
                yield Piece(text)
        if not course.first:
            course.first = time.perf_counter()
            yield begun
        self._store_missing(work, written, course, engine.url)
        reason = "length" if course.finish == "length" else "stop"
        answer = Answer(course.text, self._metrics(written, course), finish_reason=reason)
        told = cited(work, answer)
        if work.streaming and told.text != answer.text:
            yield Piece(told.text[len(answer.text) :])
        yield Finished(told)

    def _note(self, part: Mapping[str, Any], course: _AnswerProgress) -> None:
        for choice in part.get("choices", ()):
            course.finish = choice.get("finish_reason") or course.finish
        usage = part.get("usage")
        if usage:
            course.generated = int(usage.get("completion_tokens") or 0)
            details = usage.get("prompt_tokens_details") or {}
            course.cached = details.get("cached_tokens", course.cached)

    def _body(self, work: BackendRequest, written: WrittenPrompt) -> dict[str, Any]:
        options = dict(work.options)
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": list(written.ids),
            "max_tokens": work.max_new_tokens,
            "temperature": options.pop("temperature", 0.0),
            "stream_options": {"include_usage": True},
            "cache_salt": self._key.salt(work.namespace),
        }
        stop = [*work.stop, *(self._prompts.template.markers if written.answered_from else ())]
        if stop:
            body["stop"] = stop
        for name in ("top_p", "top_k", "seed"):
            if name in options:
                body[name] = options.pop(name)
        options.pop("do_sample", None)
        if options:
            raise InvalidInputError(f"vLLM is not told {sorted(options)[0]}; leave it out")
        if written.params is not None:
            body |= self._transfer(work.namespace, written.params, written.ids)
        return body

    def _transfer(
        self, namespace: str, params: TransferParams, ids: Sequence[int]
    ) -> dict[str, Any]:
        grant = self._key.issue(namespace, params.digest(ids))
        return {"kv_transfer_params": replace(params, grant=grant).body()}

    def _metrics(self, written: WrittenPrompt, course: _AnswerProgress) -> Metrics:
        context = written.context - written.prefix
        loaded = min(course.cached or 0, written.context) - written.prefix
        # What vLLM found of a full prefill's beginning is no chunk that was reused.
        reused = 0 if written.policy.is_full else max(0, loaded)
        return Metrics(
            ttft=course.first - course.begun,
            total=time.perf_counter() - course.begun,
            prefix_tokens=written.prefix,
            reused_tokens=reused,
            prefilled_tokens=context - reused,
            fresh_tokens=written.fresh,
            query_tokens=len(written.ids) - written.context - written.fresh,
            generated_tokens=course.generated,
            hits={"vllm": len(written.chunks)} if reused == context and reused else {},
            misses=0 if reused == context else len(written.chunks),
            policy=repr(written.policy),
            gate=course.gate,
            rotation="copied" if reused else "",
            unused_chunks=written.unused,
            answered_from=written.answered_from,
        )

    # ------------------------------------------------------------------------------------- storing
    def _store_missing(
        self, work: BackendRequest, written: WrittenPrompt, course: _AnswerProgress, url: str
    ) -> None:
        """Have chunks stored that a server had to compute, once each, when it has time."""
        if written.params is None or (course.cached or 0) >= written.context:
            return
        missing = _all_of(work.namespace, written.ids[: written.prefix], written.chunks)
        if all(self._known.get(one.name) for one in missing):
            # They were there.  They have been evicted, or the server has begun anew and has not
            # measured its rotation.
            self._laws.pop(url, None)
            for one in missing:
                self._known.pop(one.name, None)
        for one in missing:
            if one.name not in self._known and not self._storing.full():
                self._known[one.name] = False
                self._storing.put_nowait(one)
        if self._storer is None or self._storer.done():
            self._storer = asyncio.create_task(self._store())

    async def _store(self) -> None:
        """Ask for one chunk after the other, behind all that wait for answers."""
        while not self._storing.empty():
            await self._stored(self._storing.get_nowait())

    async def _stored(self, one: _Missing) -> _Stored:
        """What came of having a chunk stored."""
        chunk = one.ids[one.params.prefix :]
        engine = self._engines[home_of(chunk, one.namespace, list(self._engines))]
        reply: Mapping[str, Any] = {}
        try:
            why = await self._law(engine)
            if why:
                return _Stored(why)
            reply = await self._transferred(engine, one.namespace, one.params, one.ids)
            why = str(reply.get("why") or "")
        except (LostError, RefusedError) as error:
            why = str(error)
        if why:  # it is asked for again when a question needs it
            _LOG.warning("a chunk of %d tokens was not stored: %s", len(chunk), why)
            self._known.pop(one.name, None)
            self._laws.pop(engine.url, None)
            return _Stored(why)
        self._known[one.name] = True
        was_there = bool(reply.get("reused"))
        self._counts["stored"] += not was_there
        return _Stored(was_there=was_there)

    async def prefill(self, work: BackendRequest) -> Prefilled:
        """Have chunks stored, behind all that wait for answers; see `Backend.prefill`.

        Raises:
            ApiError: If a chunk was not stored, or the server shuts down.
        """
        if self._is_closed:
            raise ApiError(SHUT_DOWN)
        written = await in_thread(self._prompts.context, work.chunks, work.namespace)
        wanted = {one.name: one for one in _all_of(work.namespace, written.ids, written.chunks)}
        room = asyncio.Semaphore(_STORED_AT_ONCE * len(self._engines))

        async def stored(one: _Missing) -> _Stored:
            async with room:
                return await self._stored(one)

        found = await asyncio.gather(*map(stored, wanted.values()))
        why = next((one.why for one in found if one.why), "")
        if why:
            message = f"not every document is stored: {why}; send them again later"
            raise ApiError(Failed(NOT_READY, OVERLOADED, message, AGAIN))
        return Prefilled(
            len(wanted),
            sum(len(one.ids) - one.params.prefix for one in wanted.values()),
            sum(not one.was_there for one in found),
        )

    async def _transferred(
        self, engine: EngineClient, namespace: str, params: TransferParams, ids: Sequence[int]
    ) -> Mapping[str, Any]:
        """What the connector says of a request that wants no answer."""
        body = {
            "model": self._model, "prompt": list(ids), "max_tokens": 1, "temperature": 0.0,
            "priority": _LATER, **self._transfer(namespace, params, ids),
        }  # fmt: skip
        reply = (await engine.complete(body)).get("kv_transfer_params") or {}
        return dict(reply.get(FIELD, {}))

    async def _law(self, engine: EngineClient) -> str:
        """Why a server reuses nothing; "" if it does.  It measures how it rotates keys, once."""
        async with self._proving[engine.url]:
            if engine.url not in self._laws:
                tokens = min(_LAW_TOKENS, self._prompts.context_window - 1)
                ids = (self._ordinary_token,) * tokens
                params = TransferParams(0, (tokens,), mode="law")
                law: str | None = None
                for _ in range(_LAW_TRIES):  # a request may end before its workers have told
                    reply = await self._transferred(engine, "", params, ids)
                    law = reply.get("law", "it has no connector, or one of another key")
                    if law is not None:
                        break
                self._specs[engine.url] = str(reply.get("engine") or "")
                if law != "":
                    law = law or "its workers did not tell how they rotate keys"
                    _LOG.error("%s computes everything: %s", engine.url, law)
                self._laws[engine.url] = law
            return self._laws[engine.url]

    async def identity(self) -> Identity:
        """What a verdict on these servers is about; see `Backend.identity`.

        Raises:
            ApiError: If none of them says it, or they say different things.
        """
        with suppress(LostError, RefusedError):
            for engine in self._engines.values():
                if await engine.is_healthy():
                    await self._law(engine)
        known = {self._identity(url) for url, spec in self._specs.items() if spec}
        if len(known) != 1:
            what = "say different things of themselves" if known else "do not say what they are"
            raise ApiError(Failed(NOT_READY, OVERLOADED, f"the servers of vLLM {what}"))
        return known.pop()

    def _identity(self, url: str) -> Identity:
        spec = self._specs[url]
        prefix = digest("kvcache-rag-prefix", packed_ids(self._prompts.context((), "").ids))
        return Identity(
            model=self._model,
            revision=spec,
            codec="native",
            dtype="as vLLM computes",
            prefix=prefix[:16],
            template=self._prompts.template_digest,
            spec=digest("kvcache-rag-vllm", spec.encode(), prefix.encode()),
        )

    def _objection(self, engine: EngineClient, policy: ReusePolicy) -> str:
        """Why the gate does not let a server reuse anything; "" if it does, or there is none.

        Raises:
            InvalidInputError: If the gate refuses.
        """
        if self._gate is None or self._verdict is None:
            return ""
        try:
            self._verdict.identity.ensure_same(self._identity(engine.url))
            reason = self._verdict.objection(policy_key(policy), self._gate.threshold)
        except FingerprintMismatchError as error:
            reason = str(error)
        if reason and self._gate.below == "error":
            raise InvalidInputError(f"{reason}; use the policy full or another one")
        return f"fell back to FullRecompute(): {reason}" if reason else ""

    @property
    def _ordinary_token(self) -> int:
        return self._prompts.brought_ids(" the")[-1]

    # ------------------------------------------------------------------------------ everything else
    async def count(self, work: BackendRequest) -> int:
        """Tokens of the request's prompt; see `Backend.count`."""
        work = replace(work, max_new_tokens=0)
        return len((await in_thread(self._written, work)).ids)

    async def explain(self, work: BackendRequest) -> Mapping[str, Any]:
        """Nobody here knows."""
        del work
        raise InvalidInputError(
            "servers of vLLM do not explain prompts; ask a server without --backend vllm"
        )

    async def ready(self) -> bool:
        """Whether a server would answer."""
        if self._is_closed:
            return False
        found = await asyncio.gather(*(one.is_healthy() for one in self._engines.values()))
        return any(found)

    async def stats(self) -> Mapping[str, Any]:
        """Counters of this process, and what each server is asked; see `Backend.stats`."""
        counts = self._counts
        names = ("answered", "failed", "cancelled", "refused")
        shared = {name: counts[name] for name in names}
        return {
            "replicas": [
                {
                    "replica": _place(url),
                    "waiting": self._waiting if first else 0,
                    "running": self._routing.running[url],
                    **(shared if first else dict.fromkeys(names, 0)),
                    "service_seconds": None,
                    "batches": {},
                    "prefetch": {"stored": counts["stored"]} if first else {},
                    "tiers": [],
                }
                for first, url in ((not place, url) for place, url in enumerate(self._engines))
            ]
        }

    async def models(self) -> Mapping[str, int | None]:
        return {self._name: self._prompts.context_window}

    async def own_policy(self) -> OwnPolicy:
        return OwnPolicy(name_of(self._policy))

    async def drain(self) -> None:
        self._is_closed = True

    async def close(self) -> None:
        self._is_closed = True
        if self._storer is not None:
            self._storer.cancel()
            with suppress(asyncio.CancelledError):
                await self._storer
        for engine in self._engines.values():
            await engine.close()


def _place(url: str) -> str:
    """A server in answers and metrics: host and port."""
    return url.partition("://")[2]


def _all_of(
    namespace: str, prefix: Sequence[int], chunks: Sequence[Sequence[int]]
) -> list[_Missing]:
    """What stores chunks behind a prefix."""
    return [
        _Missing(
            digest("stored", namespace.encode(), packed_ids(prefix), packed_ids(chunk)),
            namespace,
            TransferParams(len(prefix), (len(chunk),), mode="store"),
            (*prefix, *chunk),
        )
        for chunk in chunks
    ]
