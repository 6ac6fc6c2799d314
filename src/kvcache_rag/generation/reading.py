"""How likely a question is after each chunk, read alone: the model's own judgement of chunks.

The likelihood of a question behind a document ranks documents without any training (UPR, Sachan et
al. 2022, arXiv 2204.07496; arXiv 2310.13243).  One chunk behind the prefix is exact out of its
cache, so reading it costs the question's tokens alone.
"""

from __future__ import annotations

import math
import time
from concurrent.futures import CancelledError
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Final, TypeAlias

import torch

from kvcache_rag.errors import ContextTooLongError
from kvcache_rag.generation.context import Prompt
from kvcache_rag.generation.question import ReadingReport
from kvcache_rag.generation.request import Request
from kvcache_rag.models.language import StoppedError
from kvcache_rag.policies import FullRecompute, Reuse
from kvcache_rag.policies.checks import why_not

if TYPE_CHECKING:
    import threading
    from collections.abc import Sequence

    from torch import Tensor

    from kvcache_rag.generation.runner import Runner
    from kvcache_rag.metrics import Miss
    from kvcache_rag.policies.relevance import Numbers
    from kvcache_rag.prefill import ContextChunk
    from kvcache_rag.prompt.renderer import AskedIds, PromptRenderer

SHARE: Final = 0.25
"""Tokens that are read before an answer, as a part of those of a full prefill of all chunks."""
_LOGITS: Final = 128 << 20  # bytes of a pass in float32
_CONTEXTS: Final = 256 << 20  # bytes of keys and values of a pass


@dataclass(frozen=True)
class Reading:
    """What reading each chunk alone says about a question.

    Attributes:
        likelihoods: Logarithm of the question's probability after each chunk, in nats.
        without: The same after no chunk.
        question_tokens: Tokens of the question.
        read_tokens: Tokens that were computed, without those of chunks that were not cached.
    """

    likelihoods: tuple[float, ...]
    without: float
    question_tokens: int
    read_tokens: int

    @property
    def relevance(self) -> tuple[float, ...]:
        """How much likelier each chunk makes the question, in nats; negative if less likely."""
        return tuple(one - self.without for one in self.likelihoods)


@dataclass(frozen=True)
class ReadingTask:
    """A question, and the chunks that it is read behind.

    Attributes:
        asked: The question.
        chunks: Of its caller, in his order.
    """

    asked: AskedIds
    chunks: tuple[ContextChunk, ...]


@dataclass(frozen=True)
class _ContextLikelihoods:
    """What was read of contexts.

    Attributes:
        likelihoods: Of the question behind each, in nats.
        missed: Chunks that had to be computed first, and why.
        tokens: That were computed, but for these chunks.
    """

    likelihoods: tuple[float, ...] = ()
    missed: tuple[Miss, ...] = ()
    tokens: int = 0


class ChunkReader:
    """Reads questions behind chunks.  Not thread-safe: whoever uses it holds the model."""

    def __init__(self, runner: Runner) -> None:
        """Read as a runner answers, in memory of its own: no prompt in a buffer is forgotten."""
        self._runner = runner.apart()

    def read(self, wanted: ReadingTask, cancelled: threading.Event | None = None) -> Reading:
        """Read a question behind each chunk and behind none.

        Args:
            wanted: What is read.
            cancelled: Stops it once set.

        Raises:
            StoppedError: If it was cancelled.
            OtherLengthsError: If a chunk is longer than its reference says, and does not fit.
        """
        contexts = [(), *((chunk,) for chunk in wanted.chunks)]
        said = self._said(contexts, wanted.asked, cancelled)
        without, *likelihoods = said.likelihoods
        return Reading(tuple(likelihoods), without, wanted.asked.count, said.tokens)

    def likelihoods(
        self, contexts: Sequence[Sequence[ContextChunk]], asked: AskedIds
    ) -> tuple[float, ...]:
        """Logarithms of the question's probability behind each context, in nats.

        Args:
            contexts: Chunks of each, in prompt order; none for the prefix alone.
            asked: The question.

        Raises:
            OtherLengthsError: As for `read`.
        """
        return self._said(contexts, asked, None).likelihoods

    def further(
        self, request: Request, wanted: ReadingTask | None, cancelled: threading.Event | None
    ) -> ReadingReport:
        """What was read for a request, and what it wants to know besides, as far as that is cheap.

        For a policy no more is read than `SHARE` of the tokens of a full prefill of all chunks,
        what it wants most first; nothing, if no two chunks could be compared.  Who wants to know
        whether any chunk says it (`none_below`) has all of them read.

        Args:
            request: Planned by what was read so far.
            wanted: Its question and chunks; None if nobody says what is asked.
            cancelled: Stops it once set.

        Raises:
            StoppedError: If it was cancelled.
            OtherLengthsError: As for `read`.
        """
        begun, before = time.perf_counter(), request.read
        contexts: dict[Numbers, Sequence[ContextChunk]] = {}
        said = _ContextLikelihoods()
        if wanted is not None:
            contexts = self._affordable(request, wanted)
            said = self._said([*contexts.values()], wanted.asked, cancelled)
        known = {**before.likelihoods, **dict.fromkeys(request.wants)}
        missed = {one.chunk: one for one in (*before.missed, *said.missed)}
        return ReadingReport(
            {**known, **dict(zip(contexts, said.likelihoods, strict=True))},
            before.chunks + sum(1 for numbers in contexts if len(numbers) == 1),
            before.tokens + said.tokens,
            before.seconds + time.perf_counter() - begun,
            tuple(missed.values()),
        )

    def _affordable(
        self, request: Request, wanted: ReadingTask
    ) -> dict[Numbers, Sequence[ContextChunk]]:
        """What of a request's wishes is read."""
        chunks, asked = wanted.chunks, wanted.asked
        whole = self._prefix + sum(map(len, chunks)) + len(request.query)
        room = math.inf if request.none_below is not None else SHARE * whole - request.read.tokens
        contexts: dict[Numbers, Sequence[ContextChunk]] = {}
        costs: dict[_Identity, int] = {}
        for numbers in request.wants:
            context = [chunks[number] for number in numbers]
            identity, cost = _identity(context), self._cost(context, asked)
            is_new = identity not in costs
            if why_not(Reuse(), self._runner.model.abilities, len(context)):
                continue  # several, of a model whose keys cannot be moved
            if self._fits(context, asked) and (not is_new or sum(costs.values()) + cost <= room):
                contexts[numbers] = context
                costs[identity] = cost
        compared = [numbers for numbers in contexts if len(numbers) == 1]
        known = [numbers for numbers in request.read.likelihoods if len(numbers) == 1]
        is_of_use = request.none_below is not None or len(compared) + len(known) > 1
        return contexts if is_of_use else {}

    def _fits(self, context: Sequence[ContextChunk], asked: AskedIds) -> bool:
        return fits(context, asked, self._runner.renderer, self._runner.window)

    def _cost(self, context: Sequence[ContextChunk], asked: AskedIds) -> int:
        """Tokens that are computed; of a model that keeps no chunks, all."""
        if self._runner.loader is not None:
            return len(asked.ids)
        return self._prefix + sum(map(len, context)) + len(asked.ids)

    @property
    def _prefix(self) -> int:
        return len(self._runner.renderer.prefix_ids)

    def _said(
        self,
        contexts: Sequence[Sequence[ContextChunk]],
        asked: AskedIds,
        cancelled: threading.Event | None,
    ) -> _ContextLikelihoods:
        """Read equal contexts once, and in an order of their own.

        So what is found does not depend on the order in which they are given.
        """
        known = {_identity(chunks): tuple(chunks) for chunks in contexts}
        order = sorted(known)
        missed = self._brought([chunk for chunks in known.values() for chunk in chunks], cancelled)
        request = self._request(asked)
        prompts = iter(Prompt(known[one], asked.ids, request) for one in order)
        found: list[float] = []
        together = self._together(list(known.values()), asked)
        while rows := [*islice(prompts, together)]:
            found += self._read(rows, asked, cancelled)
        by_context = dict(zip(order, found, strict=True))
        tokens = sum(self._cost(known[one], asked) for one in order)
        return _ContextLikelihoods(
            tuple(by_context[_identity(one)] for one in contexts), missed, tokens
        )

    def _brought(
        self, chunks: Sequence[ContextChunk], cancelled: threading.Event | None
    ) -> tuple[Miss, ...]:
        """Compute and store what is missing, in batches; what that was, and why."""
        loader = self._runner.loader
        if loader is None:
            return ()
        tiers = loader.tiers(chunks)
        absent = [chunk for chunk, tier in zip(chunks, tiers, strict=True) if not tier]
        missing = list(map(loader.known, absent))
        missed = loader.missed_of(missing)
        try:
            loader.prefiller.fill(missing, cancelled=cancelled)
        except CancelledError as error:
            raise StoppedError from error
        return missed

    def _request(self, asked: AskedIds) -> Request:
        """What prompts have beside their chunks and query."""
        return Request(
            question="",
            query=asked.ids,
            history=(),
            rounds=((),),
            fresh=(0,),
            dropped_chunks=0,
            # One chunk is computed where none can be kept.
            policy=FullRecompute() if self._runner.loader is None else Reuse(),
            max_new_tokens=1,
            stop=(),
            options={},
            started=time.perf_counter(),
        )

    def _together(self, contexts: Sequence[Sequence[ContextChunk]], asked: AskedIds) -> int:
        """How many rows a pass has."""
        model = self._runner.model
        if not model.abilities.batch or model.layout is None:
            return 1
        vocabulary = int(model.config.get_text_config().vocab_size)
        logits = (asked.count + 1) * vocabulary * torch.float32.itemsize
        chunks = max((sum(map(len, each)) for each in contexts), default=0)
        keys = model.layout.chunk_layout.nbytes(self._prefix + chunks + len(asked.ids))
        return max(1, min(_LOGITS // logits, _CONTEXTS // max(1, keys)))

    def _read(
        self, prompts: Sequence[Prompt], asked: AskedIds, cancelled: threading.Event | None
    ) -> list[float]:
        if cancelled is not None and cancelled.is_set():
            raise StoppedError
        if len(prompts) > 1 and self._runner.why_apart(prompts):
            half = len(prompts) // 2
            return [
                *self._read(prompts[:half], asked, cancelled),
                *self._read(prompts[half:], asked, cancelled),
            ]
        logits = self._runner.logits(prompts, keep=asked.count + 1, cancelled=cancelled)
        own = torch.tensor(asked.ids[len(asked.ids) - asked.count :])  # (question tokens,)
        # (question tokens + 1, vocabulary) a row, of which the last one says what comes then
        return [float(_log_likelihood(row[:-1], own)) for row in logits]


def fits(
    context: Sequence[ContextChunk], asked: AskedIds, renderer: PromptRenderer, window: int
) -> bool:
    """Whether a question can be read behind some chunks.

    Args:
        context: The chunks.
        asked: The question.
        renderer: Knows the prefix.
        window: Context window in tokens.
    """
    # As before an answer, there is room for a token behind.
    return len(renderer.prefix_ids) + sum(map(len, context)) + len(asked.ids) < window


def too_long(context: Sequence[ContextChunk], asked: AskedIds) -> ContextTooLongError:
    """Why a question cannot be read behind a chunk, or behind none."""
    question = f"the question has {len(asked.ids)} tokens and"
    if not context:
        return ContextTooLongError(
            f"{question} is too long for the model's context window; ask something shorter"
        )
    return ContextTooLongError(
        f"{question} chunk {context[0].place} {len(context[0])}, too many for the model's context "
        "window; split the chunk into smaller ones"
    )


_Identity: TypeAlias = tuple[tuple[str, tuple[int, ...]], ...]


def _identity(chunks: Sequence[ContextChunk]) -> _Identity:
    """What a context is: of a model that keeps none, chunks have no digest of their own."""
    return tuple(
        (chunk.key.digest, () if chunk.key.digest.strip("0") else chunk.ids) for chunk in chunks
    )


def _log_likelihood(logits: Tensor, ids: Tensor) -> Tensor:
    """Of ids, each by the logits before it; a scalar."""
    said = logits.log_softmax(-1).gather(1, ids[:, None])  # (ids, 1)
    return said.double().sum()
