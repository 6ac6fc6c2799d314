"""OpenTelemetry spans of answers and ingestions: what they say, when they were, whose they are."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import contextmanager
from itertools import pairwise
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import forks
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import SpanKind, StatusCode
from serve_fakes import chat, client, settings, tiny_backend
from serve_works import answer_of, held, loaded, make_work, reader

from kvcache_rag import CacheBlend, Engine, InvalidInputError, PromptTemplate
from kvcache_rag.generation import telemetry
from kvcache_rag.models.pretrained import name_of, note_name
from kvcache_rag_server import traces
from kvcache_rag_server.app import build_app
from kvcache_rag_server.local import LocalBackend
from kvcache_rag_server.startup import open_engine

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from fastapi import FastAPI
    from opentelemetry.sdk.trace import ReadableSpan

SECRET = "Quilvane"
TEXTS = [f"{SECRET} keeps the red lamp in the hall.", "Sorin keeps the old map in the cellar."]
QUESTION = f"Where does {SECRET} keep the red lamp?"
CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
OTHER = "00-1af7651916cd43dd8448eb211c80319d-c7ad6b7169203332-01"


@contextmanager
def exporting(patch: pytest.MonkeyPatch, **options: Any) -> Iterator[InMemorySpanExporter]:
    """What a configured application would send."""
    spans, provider = InMemorySpanExporter(), TracerProvider(**options)
    provider.add_span_processor(SimpleSpanProcessor(spans))
    patch.setattr(trace, "get_tracer_provider", lambda: provider)
    yield spans
    provider.shutdown()


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    with exporting(monkeypatch) as spans:
        yield spans


def named(exporter: InMemorySpanExporter, name: str) -> list[ReadableSpan]:
    return [span for span in exporter.get_finished_spans() if span.name == name]


def of(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def parents(spans: list[ReadableSpan]) -> set[int | None]:
    return {span.parent and span.parent.span_id for span in spans}


def parts_of(exporter: InMemorySpanExporter, parent: ReadableSpan) -> list[ReadableSpan]:
    """A span's children in the order of their begins."""
    spans = [span for span in exporter.get_finished_spans() if parents([span]) == {id_of(parent)}]
    return sorted(spans, key=lambda span: span.start_time or 0)


def id_of(span: Any) -> int:
    found: int = span.get_span_context().span_id
    return found


def names(spans: list[ReadableSpan]) -> list[str]:
    return [span.name.removeprefix("kvcache_rag.") for span in spans]


# ---------------------------------------------------------------------- which model
@pytest.mark.parametrize(
    ("given", "known"),
    [
        ("tiny", "tiny"),
        ("org/name", "org/name"),
        ("{folder}/reader", "reader"),
        ("{folder}/reader/snapshots/0123456789abcdef", "reader@01234567"),
        ("{folder}/models--org--name/snapshots/0123456789abcdef", "org/name@01234567"),
    ],
)
def test_a_model_has_the_name_by_which_it_was_asked_for(
    tmp_path: Path, given: str, known: str
) -> None:
    model = SimpleNamespace(config=SimpleNamespace(_name_or_path="/somewhere/model"))
    assert name_of(model) == "model"
    note_name(model, given.format(folder=tmp_path))
    assert name_of(model) == known


def test_a_served_model_has_the_name_in_requests() -> None:
    assert name_of(open_engine(settings(served_name="assistant")).model) == "assistant"


# ---------------------------------------------------------------------- one answer
def test_an_answer_is_a_span_by_the_conventions(exporter: InMemorySpanExporter) -> None:
    engine = reader()
    engine.add(TEXTS[:1])
    with trace.get_tracer("app").start_as_current_span("app") as app:
        answer = engine.generate(QUESTION, TEXTS, max_new_tokens=8, temperature=0.5, top_k=3)
    metrics = answer.metrics
    (span,) = named(exporter, "chat tiny")
    assert (span.kind, span.status.status_code) == (SpanKind.INTERNAL, StatusCode.UNSET)
    assert parents([span]) == {id_of(app)}
    assert span.instrumentation_scope is not None
    assert span.instrumentation_scope.name == "kvcache_rag"
    said = of(span)
    assert {name: value for name, value in said.items() if name.startswith("gen_ai.")} == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "kvcache_rag",
        "gen_ai.request.model": "tiny",
        "gen_ai.request.max_tokens": 8,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_k": 3.0,
        "gen_ai.response.finish_reasons": (answer.finish_reason,),
        "gen_ai.usage.input_tokens": metrics.prompt_tokens,
        "gen_ai.usage.output_tokens": metrics.generated_tokens,
        "gen_ai.usage.cache_read.input_tokens": metrics.reused_tokens,
        "gen_ai.usage.cache_creation.input_tokens": metrics.missed[0].tokens,
    }
    expected = {
        "policy": metrics.policy,
        "rotation": "copied",
        "reused_tokens": metrics.reused_tokens,
        "computed_tokens": metrics.computed_tokens,
        "misses": 1,
        "miss_reasons": ("not prefilled",),
        "hits.memory": 1,
        "ttft": metrics.ttft,
        "batch": 1,
    }
    assert {name: said[f"kvcache_rag.{name}"] for name in expected} == expected
    assert "kvcache_rag.gate" not in said, "there is nothing to tell"


def test_its_parts_are_children_at_their_real_times(exporter: InMemorySpanExporter) -> None:
    engine = reader()
    engine.add(TEXTS)
    metrics = engine.generate(QUESTION, TEXTS, max_new_tokens=4, policy=CacheBlend(0.5)).metrics
    (span,) = named(exporter, "chat tiny")
    parts = parts_of(exporter, span)
    assert names(parts) == ["load", "stitch", "choose", "recompute", "prefill", "decode"]
    edges = [(part.start_time or 0, part.end_time or 0) for part in parts]
    begin, end = span.start_time or 0, span.end_time or 0
    assert begin <= edges[0][0]
    assert edges[-1][1] <= end
    for (_, stop), (start, _) in pairwise(edges):
        assert stop <= start + 1000, "one behind the other"
    for name, (start, stop) in zip(names(parts)[:5], edges, strict=False):
        assert (stop - start) / 1e9 == pytest.approx(getattr(metrics, name), abs=1e-5)
    assert (edges[4][1] - begin) / 1e9 == pytest.approx(metrics.ttft, abs=1e-5)
    assert (edges[5][1] - begin) / 1e9 == pytest.approx(metrics.total, abs=1e-5)


def failing(piece: str) -> None:
    raise RuntimeError(f"no room for {piece!r} of {SECRET}")


def test_nothing_of_a_text_is_in_a_span_and_an_error_is_its_type(
    exporter: InMemorySpanExporter,
) -> None:
    model, tokenizer, _ = loaded()
    template = PromptTemplate(system=f"Help {SECRET}.\n")
    engine = Engine(model, tokenizer, template=template, namespace=SECRET)
    engine.add(TEXTS)
    engine.generate(QUESTION, TEXTS, stop=[SECRET], max_new_tokens=4)
    engine.generate_batch([(QUESTION, TEXTS)], max_new_tokens=4)
    engine.complete(SECRET, max_new_tokens=2)
    with pytest.raises(RuntimeError, match=SECRET):
        engine.generate(QUESTION, TEXTS, max_new_tokens=4, emit=failing)
    spans = exporter.get_finished_spans()
    assert len(spans) > 10
    assert SECRET not in "".join(span.to_json() for span in spans)
    *_, failed = named(exporter, "chat tiny")
    assert (failed.status.status_code, failed.status.description) == (StatusCode.ERROR, None)
    assert (of(failed)["error.type"], failed.events) == ("RuntimeError", ())


# ---------------------------------------------------------------------- every way to ask
async def test_answers_belong_to_who_asked_for_them(exporter: InMemorySpanExporter) -> None:
    engine = reader()
    with trace.get_tracer("app").start_as_current_span("app") as app:
        stream = engine.stream(QUESTION, TEXTS, max_new_tokens=4)
        await engine.agenerate(QUESTION, TEXTS, max_new_tokens=2)
        await engine.acomplete("The red lamp", max_new_tokens=2)
        assert [piece async for piece in engine.astream(QUESTION, TEXTS, max_new_tokens=2)]
    list(stream)
    spans = [*named(exporter, "chat tiny"), *named(exporter, "text_completion tiny")]
    assert (len(spans), parents(spans)) == (4, {id_of(app)})
    (said,) = [one for one in map(of, spans) if one["gen_ai.request.max_tokens"] == 4]
    assert said["gen_ai.request.stream"] is True
    assert said["gen_ai.response.time_to_first_chunk"] == stream.metrics.ttft


def test_each_of_a_batch_has_a_span_and_parts_of_its_own(exporter: InMemorySpanExporter) -> None:
    engine = reader()
    engine.add(TEXTS)
    asked = [(QUESTION, TEXTS), (QUESTION, TEXTS[1:]), (QUESTION, TEXTS)]
    answers = engine.generate_batch(asked, max_new_tokens=3)
    spans = named(exporter, "chat tiny")
    for span, answer in zip(spans, answers, strict=True):
        assert of(span)["kvcache_rag.batch"] == 3
        assert of(span)["gen_ai.usage.input_tokens"] == answer.metrics.prompt_tokens
    parts = [parts_of(exporter, span) for span in spans]
    assert [names(one) for one in parts] == [
        ["load", "stitch", "prefill", "decode"],
        ["load", "stitch", "prefill", "decode"],
        ["prefill", "decode"],  # its context is a copy of the first one's
    ]
    assert len({one[-2].start_time for one in parts}) == 1, "one forward pass"


def test_what_is_refused_before_the_model_has_no_span(exporter: InMemorySpanExporter) -> None:
    with pytest.raises(InvalidInputError):
        reader().generate("", TEXTS)
    assert exporter.get_finished_spans() == ()


def test_an_ingestion_is_a_span(exporter: InMemorySpanExporter) -> None:
    engine = reader()
    first = engine.add(TEXTS[:1])
    keys = engine.add(TEXTS)
    said = [of(span) for span in named(exporter, "kvcache_rag.add")]
    counted = ("chunks", "tokens", "computed_chunks")
    assert [[one[f"kvcache_rag.{name}"] for name in counted] for one in said] == [
        [1, first[0].tokens, 1],
        [2, sum(key.tokens for key in keys), 1],
    ]
    assert {one["gen_ai.request.model"] for one in said} == {"tiny"}


# ---------------------------------------------------------------------- a server
@pytest.fixture
def server(exporter: InMemorySpanExporter) -> Iterator[FastAPI]:
    with tiny_backend() as backend:
        yield build_app(backend, settings())


def traced_by(exporter: InMemorySpanExporter, span: ReadableSpan, header: str) -> bool:
    """Whether a span came of the one that a header names; FastAPI may have spans between."""
    known = {one.context.span_id: one for one in exporter.get_finished_spans()}
    _, trace_id, ancestor, _ = header.split("-")
    while span.parent is not None and span.parent.span_id in known:
        span = known[span.parent.span_id]
    assert span.parent is not None
    found = (span.context.trace_id, span.parent.span_id)
    return found == (int(trace_id, 16), int(ancestor, 16))


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "stream"])
async def test_a_server_goes_on_with_the_trace_of_its_client(
    exporter: InMemorySpanExporter, server: FastAPI, *, streamed: bool
) -> None:
    body = chat(QUESTION, documents=TEXTS, stream=streamed)
    async with client(server) as http:
        reply = await http.post("/v1/chat/completions", json=body, headers={"traceparent": CALLER})
    assert reply.status_code == 200, reply.text
    (span,) = named(exporter, "chat tiny")
    (queue,) = named(exporter, "kvcache_rag.queue")
    assert traced_by(exporter, span, CALLER)
    assert traced_by(exporter, queue, CALLER)
    assert ("gen_ai.request.stream" in of(span)) == streamed
    assert (queue.start_time or 0) <= (queue.end_time or 0) <= (span.end_time or 0)


async def test_requests_of_a_batch_stay_in_traces_of_their_own(
    exporter: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = LocalBackend(reader(), max_batch=2)
    try:
        for _ in range(3):  # until it knows what single answers take
            await answer_of(backend, make_work())
        exporter.clear()
        valve, front = await held(backend, monkeypatch)
        carried = [{"traceparent": CALLER}, None, {"traceparent": OTHER}, {"traceparent": CALLER}]
        works = [make_work(number, trace=one or {}) for number, one in enumerate(carried, 1)]
        tasks = [asyncio.create_task(answer_of(backend, work)) for work in works]
        while (await backend.stats())["replicas"][0]["waiting"] < len(works):
            await asyncio.sleep(0.002)
        valve.open.set()
        await asyncio.gather(front, *tasks)
    finally:
        await backend.close()
    spans = named(exporter, "chat tiny")
    batches = Counter(of(span)["kvcache_rag.batch"] for span in spans)
    assert batches[2] >= 2
    traces = [span.parent and f"{span.context.trace_id:032x}" for span in spans]
    assert traces == [one and one["traceparent"].split("-")[1] for one in carried]


def test_a_span_of_the_server_comes_before_the_headers(exporter: InMemorySpanExporter) -> None:
    headers = {"traceparent": CALLER, "authorization": "secret"}
    with trace.get_tracer("asgi").start_as_current_span("POST") as post:
        carrier = traces.carried(headers)
    assert f"{id_of(post):016x}" in carrier["traceparent"]
    assert traces.carried(headers) == {"traceparent": CALLER}


# ---------------------------------------------------------------------- nobody traces
def test_what_is_not_sampled_is_answered_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    with exporting(monkeypatch, sampler=ALWAYS_OFF) as spans:
        engine = reader()
        assert engine.generate(QUESTION, TEXTS, max_new_tokens=2).metrics.generated_tokens == 2
        engine.add(TEXTS)
        assert spans.get_finished_spans() == ()


def test_without_a_tracer_nothing_is_made_for_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, provider = reader(), trace.ProxyTracerProvider()
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    monkeypatch.delattr(telemetry.Timeline, "parts")
    monkeypatch.delattr(trace, "get_tracer")
    engine.generate(QUESTION, TEXTS, max_new_tokens=2)
    engine.generate_batch([(QUESTION, TEXTS), (QUESTION, TEXTS)], max_new_tokens=2)
    engine.complete("The red lamp", max_new_tokens=1)


@pytest.mark.parametrize("is_there", [True, False], ids=["installed", "missing"])
def test_opentelemetry_is_never_imported_for_the_application(
    tmp_path: Path, *, is_there: bool
) -> None:
    script = f"""
import sys
if not {is_there}:
    sys.modules["opentelemetry"] = None  # as if it were not installed
from kvcache_rag import Engine
from kvcache_rag.generation import telemetry
from kvcache_rag_server import traces
engine = Engine.from_pretrained("tiny", device="cpu")
engine.add(["The red lamp is in the hall."])
engine.generate("Where is the lamp?", ["The red lamp is in the hall."], max_new_tokens=2)
assert traces.carried({{"traceparent": "{CALLER}"}}) == {{}}
print([name for name in sys.modules if name.startswith("opentelemetry.")])
"""
    status, printed, errors = forks.run(script, tmp_path)
    assert (status, printed.strip()) == (0, "[]"), errors
