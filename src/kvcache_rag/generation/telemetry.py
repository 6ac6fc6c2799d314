"""What an operator sees of an engine: log records, and OpenTelemetry spans if there is a tracer.

Spans follow the conventions for generative AI (`gen_ai.*`); what those have no name for is
`kvcache_rag.*`.  No record and no span has a text of a document, a question or an answer in it, nor
token ids, nor the name of a tenant; errors are told by their types, as messages may quote.
"""

from __future__ import annotations

import logging
import sys
import time
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import version
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from kvcache_rag.models.pretrained import name_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from opentelemetry.trace import Span, Tracer

    from kvcache_rag.generation.context import Context
    from kvcache_rag.generation.request import Request
    from kvcache_rag.generation.runner import Runner
    from kvcache_rag.metrics import Answer, Metrics
    from kvcache_rag.models.generate import Generated
    from kvcache_rag.models.language import LanguageModel
    from kvcache_rag.prefill import ContextChunk
    from kvcache_rag.stores import ChunkStore

LOG: Final = logging.getLogger(__name__)

API: Final = "opentelemetry.trace"
"""While this is not in `sys.modules` nobody configured a tracer, and nothing here imports it."""

PROVIDER: Final = "kvcache_rag"
"""Of `gen_ai.provider.name`, whose well-known values are services."""

# Of the caller's, which were given to transformers' `generate()`.
_SAMPLING: Final = ("temperature", "top_p", "top_k")

CARRIED: Final[ContextVar[Sequence[Any]]] = ContextVar("kvcache_rag_carried", default=())
"""Of requests that are answered together, in order, the contexts that their spans go on from."""


def opened(model: LanguageModel, store: ChunkStore, rotation: str) -> None:
    """Log what an engine was made of, and how keys of its model are moved."""
    if LOG.isEnabledFor(logging.INFO):
        groups = () if model.layout is None else model.layout.groups
        rotations = {f"{len(one.layout.layers)} layers {one.key_rotation}" for one in groups}
        LOG.info(
            "opened %s (%s, %s on %s) over the tier %s: rotation=%r, %s",
            *(name_of(model.model), model.config.model_type, model.dtype, model.device, store.tier),
            *(rotation, model.abilities.cannot_stitch or ", ".join(sorted(rotations))),
        )


def tracer() -> Tracer | None:
    """Makes spans; None where nobody configured any."""
    from opentelemetry import trace

    if isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        return None
    return trace.get_tracer("kvcache_rag", _version())


@cache
def _version() -> str:
    return version("kvcache-rag")  # reads a file


def traced() -> Tracer | None:
    """The same, without importing anything for who configured none."""
    return tracer() if API in sys.modules else None


# ---------------------------------------------------------------------- answers
@dataclass(frozen=True)
class Timeline:
    """What became of one prompt and when, by `time.perf_counter()`.

    Attributes:
        begun: When its context began to be brought.
        steps: Seconds of what was done for that, one behind the other.
        forward: When generating began.
        first_at: When the first token was there.
        ended_at: When the last one was.
    """

    begun: float
    steps: Mapping[str, float]
    forward: float
    first_at: float
    ended_at: float

    @property
    def parts(self) -> list[tuple[str, float, float]]:
        """Name, begin and end of all that took any time."""
        found, at = [], self.begun
        for name, seconds in self.steps.items():
            found.append((name, at, at + seconds))
            at += seconds
        found.append(("prefill", self.forward, self.first_at))
        found.append(("decode", self.first_at, self.ended_at))
        return [part for part in found if part[2] > part[1]]


@dataclass
class AnswerWatch:
    """Is told by the runner what it does.

    Attributes:
        timelines: Of each prompt that was answered: of the rounds of one request, or of a batch.
        streams: Whether text was handed on as it came.
    """

    timelines: list[Timeline] = field(default_factory=list)
    streams: bool = False

    def took(
        self, context: Context, forward: float, generated: Generated, *, streams: bool
    ) -> None:
        """Note when the prompts of one forward pass and their answers were what."""
        self.streams |= streams
        times = forward, generated.first_at, generated.ended_at
        self.timelines += [Timeline(row.loaded.begun, row.steps, *times) for row in context.rows]


@contextmanager
def watched(runner: Runner, requests: Sequence[Request]) -> Iterator[list[Answer]]:
    """Log what is answered within, and trace it: a span for each request, open from its call on.

    Args:
        runner: Whose lock is held.
        requests: One, or several that are answered together.

    Returns:
        A list, which is given the answers.
    """
    answers: list[Answer] = []
    made = traced()
    if made is None and not LOG.isEnabledFor(logging.INFO):
        yield answers
        return
    spans = None if made is None else _Spans(made, runner.model, requests)
    runner.watch = watch = AnswerWatch()
    try:
        with nullcontext() if spans is None else spans.current():
            yield answers
        if spans is not None:
            spans.end(answers, watch)
    finally:
        runner.watch = None
    for answer in answers:
        _log(answer.metrics)


def _log(metrics: Metrics) -> None:
    LOG.info(
        "answered by %s: %d tokens reused, %d computed, %d generated, first after %.3f s of %.3f s",
        *(metrics.policy, metrics.reused_tokens, metrics.computed_tokens, metrics.generated_tokens),
        *(metrics.ttft, metrics.total),
    )
    if metrics.missed and LOG.isEnabledFor(logging.DEBUG):
        missed = (f"{one.chunk} ({one.tokens} tokens, {one.reason})" for one in metrics.missed)
        LOG.debug("chunks that were missing: %s", ", ".join(missed))


class _Spans:
    """The spans of requests that are answered together."""

    def __init__(self, tracer: Tracer, model: LanguageModel, requests: Sequence[Request]) -> None:
        """Open one for each, as of its call."""
        self._tracer, self._clock = tracer, Clock()
        self._size, self._started = len(requests), [one.started for one in requests]
        name, carried = name_of(model.model), CARRIED.get()
        self._spans: list[Span] = []
        for number, request in enumerate(requests):
            operation = "text_completion" if request.is_plain else "chat"
            span = tracer.start_span(
                f"{operation} {name}",
                carried[number] if number < len(carried) else None,
                attributes={"gen_ai.operation.name": operation, **_asked(name, request)},
                start_time=self._clock.at(request.started),
            )
            self._spans.append(span)

    @contextmanager
    def current(self) -> Iterator[None]:
        """The span of a single request is the current one; of an error all tell the type."""
        from opentelemetry import trace

        single = self._spans[0] if self._size == 1 else trace.get_current_span()
        try:
            with trace.use_span(single, record_exception=False, set_status_on_exception=False):
                yield
        except BaseException as error:
            for span in self._spans:
                _fail(span, error)
            raise

    def end(self, answers: Sequence[Answer], watch: AnswerWatch) -> None:
        """Tell what each answer was and cost, and what was done for it when."""
        timelines = iter(watch.timelines)
        for span, started, answer in zip(self._spans, self._started, answers, strict=True):
            # Of a single request, one a round; nothing is done for an answer that no chunk says.
            most = 0 if answer.metrics.says_none else 1 if self._size > 1 else None
            mine = [*islice(timelines, most)]
            if span.is_recording():
                span.set_attributes(_answered(answer, watch, self._size))
                self._tell(span, [("reading", started, started + answer.metrics.reading)])
                for timeline in mine:
                    self._tell(span, timeline.parts)
            span.end()

    def _tell(self, span: Span, parts: Sequence[tuple[str, float, float]]) -> None:
        from opentelemetry.trace import set_span_in_context

        within = set_span_in_context(span)
        for name, begin, end in parts:
            if begin == end:
                continue
            part = self._tracer.start_span(
                f"kvcache_rag.{name}", within, start_time=self._clock.at(begin)
            )
            part.end(self._clock.at(end))


class Clock:
    """`time.perf_counter()` as nanoseconds since the epoch, of which spans are."""

    def __init__(self) -> None:
        self._begin = time.time_ns() - round(time.perf_counter() * 1e9)

    def at(self, moment: float) -> int:
        """A moment of `time.perf_counter()`."""
        return self._begin + round(moment * 1e9)


def _fail(span: Span, error: BaseException) -> None:
    from opentelemetry.trace import StatusCode

    span.set_attribute("error.type", type(error).__qualname__)
    span.set_status(StatusCode.ERROR)
    span.end()


def _asked(model: str, request: Request) -> dict[str, Any]:
    sampling = {
        f"gen_ai.request.{name}": float(request.options[name])
        for name in _SAMPLING
        if isinstance(request.options.get(name), int | float)  # others are transformers' to refuse
    }
    return {
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": model,
        "gen_ai.request.max_tokens": request.max_new_tokens,
        **sampling,
    }


def _answered(answer: Answer, watch: AnswerWatch, size: int) -> dict[str, Any]:
    metrics = answer.metrics
    streamed = {
        "gen_ai.request.stream": True,
        "gen_ai.response.time_to_first_chunk": metrics.ttft,
    }
    told = {
        f"kvcache_rag.{name}": value
        for name, value in metrics.to_dict().items()
        if isinstance(value, str | int | float) and value != ""
    }
    hits = {f"kvcache_rag.hits.{tier}": chunks for tier, chunks in metrics.hits.items()}
    return {
        "gen_ai.usage.input_tokens": metrics.prompt_tokens,
        "gen_ai.usage.output_tokens": metrics.generated_tokens,
        "gen_ai.usage.cache_read.input_tokens": metrics.reused_tokens + metrics.continued_tokens,
        "gen_ai.usage.cache_creation.input_tokens": sum(miss.tokens for miss in metrics.missed),
        "gen_ai.response.finish_reasons": [answer.finish_reason],
        **(streamed if watch.streams else {}),
        **told,
        **hits,
        "kvcache_rag.miss_reasons": list(dict.fromkeys(miss.reason for miss in metrics.missed)),
        "kvcache_rag.batch": size,
    }


# ---------------------------------------------------------------------- ingestion
@contextmanager
def added(
    model: LanguageModel, chunks: Sequence[ContextChunk], started: float
) -> Iterator[list[int]]:
    """A span since `started` around computing what of `chunks` is missing.

    Returns:
        A list, which is given how many were computed.
    """
    computed: list[int] = []
    made = traced()
    if made is None:
        yield computed
        return
    from opentelemetry.trace import use_span

    clock = Clock()
    told: dict[str, Any] = {
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": name_of(model.model),
        "kvcache_rag.chunks": len(chunks),
        "kvcache_rag.tokens": sum(map(len, chunks)),
    }
    span = made.start_span("kvcache_rag.add", attributes=told, start_time=clock.at(started))
    try:
        with use_span(span, record_exception=False, set_status_on_exception=False):
            yield computed
    except BaseException as error:
        _fail(span, error)
        raise
    span.set_attribute("kvcache_rag.computed_chunks", sum(computed))
    span.end()
