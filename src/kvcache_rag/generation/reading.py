"""How likely a question is behind each chunk, read alone: what the model itself says of chunks.

The likelihood of a question behind a document ranks documents without any training (UPR, Sachan et
al. 2022, arXiv 2204.07496; arXiv 2310.13243).  One chunk behind the prefix is exact out of its
cache, so reading it costs the question's tokens alone.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Final

import torch

from kvcache_rag.generation.context import Prompt
from kvcache_rag.generation.request import Read, Request
from kvcache_rag.policies import FullRecompute, Reuse

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from kvcache_rag.generation.runner import Runner
    from kvcache_rag.policies.relevance import Numbers
    from kvcache_rag.prefill import ContextChunk
    from kvcache_rag.prompt.renderer import AskedIds

SHARE: Final = 0.25
"""Tokens that are read before an answer, as a part of those of a full prefill of all chunks."""
_LOGITS: Final = 128 << 20  # bytes of a pass in float32
_CONTEXTS: Final = 256 << 20  # bytes of keys and values of a pass


@dataclass(frozen=True)
class Reading:
    """What reading each chunk by itself says of a question.

    Attributes:
        likelihoods: Of the question behind each chunk: the logarithm of its probability, in nats.
        without: Of the question behind no chunk.
        question_tokens: Tokens of the question.
        read_tokens: Tokens that were computed for it, but for chunks that were not cached.
    """

    likelihoods: tuple[float, ...]
    without: float
    question_tokens: int
    read_tokens: int

    @property
    def relevance(self) -> tuple[float, ...]:
        """How much likelier each chunk makes the question, in nats; below 0 it makes it less so."""
        return tuple(one - self.without for one in self.likelihoods)


@dataclass(frozen=True)
class ToRead:
    """A question, and the chunks that it is read behind.

    Attributes:
        asked: The question.
        chunks: Of its caller, in his order.
    """

    asked: AskedIds
    chunks: tuple[ContextChunk, ...]


class ChunkReader:
    """Reads questions behind chunks.  Not thread-safe: whoever uses it holds the model."""

    def __init__(self, runner: Runner) -> None:
        """Read as a runner answers, in memory of its own, so that no prompt is forgotten for it."""
        self._runner = runner.apart()

    def read(self, wanted: ToRead, cancelled: threading.Event | None = None) -> Reading:
        """Read a question behind each chunk and behind none.

        Args:
            wanted: What is read.
            cancelled: Stops it once set.

        Raises:
            StoppedError: If it was cancelled.
        """
        contexts = [(), *((chunk,) for chunk in wanted.chunks)]
        without, *likelihoods = self.likelihoods(contexts, wanted.asked, cancelled)
        rows = len({*map(_identity, contexts)})
        return Reading(
            tuple(likelihoods), without, wanted.asked.count, rows * len(wanted.asked.ids)
        )

    def further(
        self, request: Request, wanted: ToRead | None, cancelled: threading.Event | None
    ) -> Read:
        """What was read for a request, and what it wants to know besides, as far as that is cheap.

        All that is read has at most `SHARE` of the tokens of a full prefill of all chunks; what
        its policy wants most is read first.

        Args:
            request: Planned by what was read so far.
            wanted: Its question and chunks; None if nobody says what is asked.
            cancelled: Stops it once set.

        Raises:
            StoppedError: If it was cancelled.
        """
        begun, before = time.perf_counter(), request.read
        contexts: dict[Numbers, Sequence[ContextChunk]] = {}
        cost = 0
        if wanted is not None:
            chunks, cost = wanted.chunks, len(wanted.asked.ids)
            whole = self._prefix + sum(map(len, chunks)) + len(request.query)
            room = int(SHARE * whole) - before.tokens
            for numbers in request.wants:
                context = [chunks[number] for number in numbers]
                fits = self._prefix + sum(map(len, context)) + cost <= self._runner.window
                if fits and (len(contexts) + 1) * cost <= room:
                    contexts[numbers] = context
        said = (
            self.likelihoods([*contexts.values()], wanted.asked, cancelled)
            if wanted is not None and contexts
            else []
        )
        known = {**before.likelihoods, **dict.fromkeys(request.wants)}
        return Read(
            {**known, **dict(zip(contexts, said, strict=True))},
            before.chunks + sum(1 for numbers in contexts if len(numbers) == 1),
            before.tokens + len(contexts) * cost,
            before.seconds + time.perf_counter() - begun,
        )

    @property
    def _prefix(self) -> int:
        return len(self._runner.renderer.prefix_ids)

    def likelihoods(
        self,
        contexts: Sequence[Sequence[ContextChunk]],
        asked: AskedIds,
        cancelled: threading.Event | None = None,
    ) -> list[float]:
        """Logarithms of the question's probability behind each context, in nats.

        Equal contexts are read once, and in an order of their own, so that what is found does not
        depend on the order in which they are given.

        Args:
            contexts: Chunks of each, in prompt order; none for the prefix alone.
            asked: The question.
            cancelled: Stops it once set.

        Raises:
            StoppedError: If it was cancelled.
        """
        known = {_identity(chunks): tuple(chunks) for chunks in contexts}
        order = sorted(known)
        request = self._request(asked)
        prompts = iter(Prompt(known[one], asked.ids, request) for one in order)
        found: list[float] = []
        together = self._together(contexts, asked)
        while rows := [*islice(prompts, together)]:
            found += self._read(rows, asked, cancelled)
        by_context = dict(zip(order, found, strict=True))
        return [by_context[_identity(chunks)] for chunks in contexts]

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
        longest = max(sum(map(len, chunks)) for chunks in contexts) + len(asked.ids)
        keys = model.layout.chunk_layout.nbytes(longest)
        return max(1, min(_LOGITS // logits, _CONTEXTS // max(1, keys)))

    def _read(
        self, prompts: Sequence[Prompt], asked: AskedIds, cancelled: threading.Event | None
    ) -> Iterator[float]:
        logits = self._runner.logits(prompts, keep=asked.count + 1, cancelled=cancelled)
        own = torch.tensor(asked.ids[len(asked.ids) - asked.count :])  # (question tokens,)
        for row in logits:  # (question tokens + 1, vocabulary); the last one says what comes then
            yield float(_log_likelihood(row[:-1], own))


def _identity(chunks: Sequence[ContextChunk]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """What a context is: of a model that keeps none, chunks have no digest of their own."""
    return tuple((chunk.key.digest, chunk.ids) for chunk in chunks)


def _log_likelihood(logits: Tensor, ids: Tensor) -> Tensor:
    """Of ids, each by the logits before it; a scalar."""
    said = logits.log_softmax(-1).gather(1, ids[:, None])  # (ids, 1)
    return said.double().sum()
