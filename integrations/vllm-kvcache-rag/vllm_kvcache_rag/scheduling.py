"""The scheduler's side: who may reuse what, and what to load and store.

A request passes these states:

    looking ── all pieces are held ──> reuse ── a load failed ──> plain
       └────── one is missing ───────> plain; measured, where it is to be stored
    measured: computed by vLLM like a plain request, then read from its pages
"""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal

from kvcache_rag.errors import InvalidInputError
from kvcache_rag.kv.chunk import digest
from vllm_kvcache_rag.keys import Piece, Salts, pieces_of
from vllm_kvcache_rag.transfer.params import FIELD, TransferParams

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from kvcache_rag.stores import ChunkStore
    from vllm_kvcache_rag.transfer.grants import GrantKey

logger = logging.getLogger("vllm.kvcache_rag")

# Seconds that a request waits at once for a look into the store; a slower one is asked again.
_AT_ONCE: Final = 0.005

_LOOKERS: Final = 4

UNPROVEN: Final = "how this engine rotates its keys was not measured yet"


@dataclass(frozen=True)
class Job:
    """What a worker loads, stores or measures for one request.

    Attributes:
        request: Its id.
        blocks: Of its pages, in order.
        first: Tokens before it are there already.
        pieces: Of the prompt.
    """

    request: str
    blocks: tuple[int, ...]
    first: int
    pieces: tuple[Piece, ...]


@dataclass
class Step:
    """What workers do in one step of the engine."""

    loads: list[Job] = field(default_factory=list)
    saves: list[Job] = field(default_factory=list)
    laws: list[Job] = field(default_factory=list)


@dataclass(eq=False)
class _Asked:
    """A request that brought boundaries.

    Attributes:
        request: vLLM's.
        params: What it brought.
        pieces: Of its prompt.
        namespace: Its tenant.
        salt: What its client sent as one.
        state: Where it stands.
        lookup: Looks for all pieces.
        missed: Those that it did not find so far.
        since: When it began, in seconds of `time.monotonic`.
        why: Why nothing is reused.
        reused: Tokens that were loaded or found in pages.
    """

    request: Any
    params: TransferParams
    pieces: tuple[Piece, ...]
    namespace: str
    salt: str | None
    state: Literal["looking", "reuse", "plain", "measured"]
    lookup: Future[None] | None = None
    missed: list[Piece] = field(default_factory=list)
    since: float = field(default_factory=time.monotonic)
    why: str = ""
    reused: int = 0


class RequestScheduler:
    """Decides for each request of the engine.

    Attributes:
        law: Why nothing is reused: `UNPROVEN`, or what the measurement said; "" once it held.
    """

    def __init__(
        self, store: ChunkStore, specs: Sequence[str], key: GrantKey, timeout: float
    ) -> None:
        """Look into a store.

        Args:
            store: Where chunks lie.
            specs: Of the chunks that can be used, one for each rank.
            key: Says who may ask.
            timeout: Seconds behind which a store that has not answered counts as empty.
        """
        self._store, self._specs, self._key = store, tuple(specs), key
        self._timeout = timeout
        self._salts = Salts()
        self._asked: dict[str, _Asked] = {}
        self._prefills: dict[str, Any] = {}  # vLLM's counts of each request's prefill
        self._loads: dict[str, Job] = {}
        self._lookers = ThreadPoolExecutor(_LOOKERS, thread_name_prefix="kvcache-rag-lookup")
        self.law = UNPROVEN

    # ---------------------------------------------------------------- before a request is scheduled
    def take(self, request: Any) -> None:
        """A new request: give it its salt, and look for its pieces."""
        salt = request.cache_salt
        # vLLM fills it in as it schedules the request, and drops its own reference later.
        self._prefills[request.request_id] = request.prefill_stats
        _salted(request, self._salts.plain(salt))
        try:
            asked = self._understood(request, salt)
        except InvalidInputError as error:
            # No text of the request is in these messages.
            logger.warning("kvcache-rag: %s is computed whole: %s", request.request_id, error)
            return
        if asked is None:
            return
        self._asked[request.request_id] = asked
        _salted(request, self._salts.plain(salt, asked.namespace))
        if asked.state == "looking":
            _salted(request, self._salts.lone())
            asked.lookup = self._lookers.submit(self._miss, asked)
            wait([asked.lookup], _AT_ONCE)
            self._look(asked)

    def _understood(self, request: Any, salt: str | None) -> _Asked | None:
        ids = request.prompt_token_ids
        params = TransferParams.from_params(request.kv_transfer_params, len(ids or ()))
        if params is None:
            return None
        why = _refusal(request)
        if why:
            raise InvalidInputError(why)
        namespace = self._key.namespace(params.grant, params.digest(ids))
        pieces = pieces_of(params, ids, namespace, self._specs)
        asked = _Asked(request, params, pieces, namespace, salt, "plain")
        if params.mode == "law":
            asked.state = "measured"
        elif self.law:
            asked.why = self.law
        else:
            asked.state = "looking"
        return asked

    def _miss(self, asked: _Asked) -> None:
        for piece in asked.pieces:
            if not all(map(self._store.contains, piece.keys)):
                asked.missed.append(piece)

    def _look(self, asked: _Asked) -> None:
        """Give a request its salt once it is known whether all of it is held."""
        why = self._why_not(asked)
        if why is None:
            return
        if why:
            asked.state = "measured" if asked.params.mode == "store" else "plain"
            asked.why = why
            salt = self._salts.plain(asked.salt, asked.namespace)
        else:
            asked.state = "reuse"
            salt = self._salts.stitched(
                asked.salt, asked.namespace, asked.params.positions, asked.pieces
            )
        _salted(asked.request, salt)

    def _why_not(self, asked: _Asked) -> str | None:
        """Why a request reuses nothing; "" if it does, None while it is not known."""
        if asked.missed:  # others are looked for, and counted, meanwhile
            return "not all of it is stored"
        if asked.lookup is None or not asked.lookup.done():
            late = time.monotonic() - asked.since > self._timeout
            return f"the store has not answered in {self._timeout:g} s" if late else None
        error = asked.lookup.exception()
        return "" if error is None else f"the store failed: {error}"

    def matched(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """Tokens to be loaded behind the first `computed`; None to be asked again."""
        asked = self._asked.get(request.request_id)
        if asked is not None and asked.state == "looking":
            self._look(asked)
            # vLLM looked for blocks of another salt: it looks again before it asks again.
            return None, False
        if asked is None or asked.state != "reuse":
            return 0, False
        found = max(0, asked.params.context - computed)
        asked.reused = min(computed, asked.params.context) + found
        return found, found > 0

    def place(self, request: Any, blocks: Sequence[int], tokens: int) -> None:
        """Pages for a request's `tokens` to be loaded were allocated."""
        asked = self._asked.get(request.request_id)
        if asked is None or tokens <= 0:
            return
        first = asked.params.context - tokens
        self._loads[request.request_id] = Job(
            request.request_id, tuple(blocks), first, asked.pieces
        )

    # ------------------------------------------------------------------------------- in each step
    def step(self, scheduled: dict[str, int], manager: Any) -> Step:
        """What workers do beside the next forward pass.

        Args:
            scheduled: Tokens that it computes of each request.
            manager: vLLM's of the cache.
        """
        found = Step(loads=list(self._loads.values()))
        self._loads.clear()
        for name, tokens in scheduled.items():
            asked = self._asked.get(name)
            if asked is None or asked.state != "measured":
                continue
            if asked.request.num_computed_tokens + tokens >= asked.params.context:
                blocks = tuple(manager.get_block_ids(name)[0])
                jobs = found.laws if asked.params.mode == "law" else found.saves
                jobs.append(Job(name, blocks, 0, asked.pieces))
                asked.state, asked.why = "plain", ""
        return found

    def fail(self, names: Collection[str]) -> None:
        """What could not be loaded is computed, and found by those who ask for just that."""
        for name in names:
            asked = self._asked.get(name)
            if asked is not None:
                asked.state, asked.reused = "plain", 0
                asked.why = "what is stored could not be loaded"
                _salted(asked.request, self._salts.plain(asked.salt, asked.namespace))

    def end(self, request: Any) -> dict[str, Any] | None:
        """What the reply says about a request that has ended."""
        asked = self._asked.pop(request.request_id, None)
        self._loads.pop(request.request_id, None)
        self._log(request, asked)
        if asked is None:
            return None
        if asked.lookup is not None:
            asked.lookup.cancel()
        reply: dict[str, Any] = {"reused": asked.reused}
        if asked.why:
            reply["why"] = asked.why
        if asked.params.mode == "law":
            # None while workers have not told: a request may end before.
            reply["law"] = None if self.law == UNPROVEN else self.law
            reply["engine"] = digest("kvcache-rag-engine", *map(str.encode, self._specs))
        return {FIELD: reply}

    def _log(self, request: Any, asked: _Asked | None) -> None:
        """One line of counts: no text, token or tenant."""
        prefill = self._prefills.pop(request.request_id, None)
        if prefill is None:
            return
        reused, missed, pieces, why = 0, 0, 0, ""
        if asked is not None:
            reused, missed, pieces = asked.reused, len(asked.missed), len(asked.pieces)
            why = f" ({asked.why})" if asked.why else ""
        logger.info(
            "kvcache-rag: %s: %d prompt tokens, %d from chunks, %d from vLLM's prefix cache, "
            "%d computed; %d of %d pieces missed%s",
            request.request_id, request.num_prompt_tokens, reused,
            max(0, prefill.num_cached_tokens - reused), prefill.num_computed_tokens,
            missed, pieces, why,
        )  # fmt: skip

    def close(self) -> None:
        """Stop looking."""
        self._lookers.shutdown(wait=False, cancel_futures=True)


def _salted(request: Any, salt: str) -> None:
    """Let vLLM's prefix cache know a request by another salt, before it looks for its blocks."""
    request.cache_salt = salt
    request.block_hashes.clear()
    request.update_block_hashes()


def _refusal(request: Any) -> str:
    """Why nothing can be reused for a request of this kind; "" if it can."""
    if request.lora_request is not None:
        return "it is for a LoRA adapter, whose chunks are not stored"
    if request.has_encoder_inputs or request.prompt_embeds is not None:
        return "it has inputs that are no text"
    if request.prompt_token_ids is None or request.resumable:
        return "its prompt is not whole"
    if request.skip_reading_prefix_cache:
        return "it asks for log-probabilities of its prompt, so vLLM computes all of it"
    return ""
