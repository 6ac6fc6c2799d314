"""What `benchmarks.serving` asks, counts, compares and writes; nothing here starts a server."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from benchmarks import serving
from benchmarks.common import read
from benchmarks.serving import Point, against, columns, nbytes_of, paired, summary
from benchmarks.serving_servers import (
    AHEAD,
    INSTANCES,
    NO_CACHE,
    OWN,
    SHARED,
    TINY_SHAPE,
    WAYS,
    Asked,
    Dispatcher,
    Load,
    Outcome,
    Place,
    ask,
    command_of,
    draw_requests,
    generated,
    run_load,
    save_model,
)
from kvcache_rag import DiskStore, Engine
from kvcache_rag.policies import FullRecompute

if TYPE_CHECKING:
    from pathlib import Path

COST = {"queue_wait": 0.5, "ttft": 0.2, "total": 0.3, "hits": {"disk": 1}, "misses": 1}
COST |= {"prefetched": True, "batch": 2, "load": 0.05}
USAGE: dict[str, Any] = {"prompt_tokens": 30, "completion_tokens": 16}
USAGE["prompt_tokens_details"] = {"cached_tokens": 9}


# ----------------------------------------------------------------------------------- the requests
def test_all_rates_ask_for_the_same_documents_at_scaled_moments() -> None:
    slow = draw_requests("zipf", 40, 1.0, 50, 3)
    fast = draw_requests("zipf", 60, 4.0, 50, 3)
    assert [one.documents for one in slow] == [one.documents for one in fast[:40]]
    assert [one.at / 4 for one in slow] == pytest.approx([one.at for one in fast[:40]])
    assert len({one.question for one in fast}) == 60
    assert all(len(set(one.documents)) == 3 for one in fast)


def test_arrivals_are_poisson_and_popularity_is_as_named() -> None:
    zipf = draw_requests("zipf", 4000, 5.0, 20, 1)
    gaps = [later.at - one.at for one, later in itertools.pairwise(zipf)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(0.2, rel=0.05)
    assert sum((gap - mean) ** 2 for gap in gaps) / len(gaps) == pytest.approx(mean**2, rel=0.1)
    counts = [n for _, n in Counter(one.documents[0] for one in zipf).most_common()]
    weights = sum(1 / rank for rank in range(1, 21))
    assert counts[0] / 4000 == pytest.approx(1 / weights, rel=0.1)
    assert counts[1] / 4000 == pytest.approx(1 / 2 / weights, rel=0.15)
    even = Counter(one.documents[0] for one in draw_requests("uniform", 4000, 5.0, 20, 1))
    assert max(even.values()) < 1.4 * min(even.values())
    with pytest.raises(ValueError, match="too few"):
        draw_requests("zipf", 1, 1.0, 2, 3)


def test_the_least_busy_instance_gets_the_request_and_equals_take_turns() -> None:
    dispatcher = Dispatcher(2)
    assert [dispatcher.take() for _ in range(4)] == [0, 1, 0, 1]
    dispatcher.give_back(0)
    dispatcher.give_back(0)
    assert [dispatcher.take() for _ in range(3)] == [0, 0, 1]
    assert dispatcher.held == [2, 3]


# ------------------------------------------------------------------------------------- the client
async def _served(handler: Any, use: Any) -> Any:
    """Run `use(port)` beside a server that answers every connection by `handler`."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
        await handler(writer, await reader.readexactly(length))
        writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    async with server:
        return await use(server.sockets[0].getsockname()[1])


def _whole(status: str, body: dict[str, Any]) -> bytes:
    text = json.dumps(body).encode()
    head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(text)}"
    return head.encode() + b"\r\n\r\n" + text


def _asked(answer: bytes, body: bytes = b"{}") -> Outcome:
    async def handler(writer: asyncio.StreamWriter, _: bytes) -> None:
        writer.write(answer)
        await writer.drain()

    async def use(port: int) -> Outcome:
        return await ask(port, body, asyncio.get_running_loop().time())

    outcome: Outcome = asyncio.run(_served(handler, use))
    return outcome


def test_a_whole_answer_says_when_its_first_token_came() -> None:
    found = _asked(_whole("200 OK", {"usage": USAGE, "kvcache": COST}))
    assert found.answered
    assert found.total - found.first == pytest.approx(0.1), "0.3 s to the end, 0.2 s to the first"
    assert (found.prompt_tokens, found.cached_tokens, found.answer_tokens) == (30, 9, 16)
    assert (found.waited, found.hits, found.misses) == (0.5, 1, 1)
    assert (found.prefetched, found.batch) == (True, 2)


@pytest.mark.parametrize(
    ("answer", "status"),
    [(_whole("503 No", {"error": {"message": "12 requests wait"}}), 503), (b"", 0)],
)
def test_what_is_no_answer_is_none(answer: bytes, status: int) -> None:
    found = _asked(answer)
    assert (found.answered, found.status) == (False, status)
    assert found.message


def test_requests_are_sent_when_they_arrive_whatever_became_of_those_before() -> None:
    """No answer is given before all requests are there: a closed loop would wait for ever."""
    load = Load([Asked(0.01 * n, (n,), f"q{n}") for n in range(6)], list("abcdef"), 16, "full", "m")
    bodies: list[dict[str, Any]] = []
    everybody = asyncio.Event()

    async def handler(writer: asyncio.StreamWriter, body: bytes) -> None:
        bodies.append(json.loads(body))
        if len(bodies) == 6:
            everybody.set()
        await asyncio.wait_for(everybody.wait(), 30)
        writer.write(_whole("200 OK", {"usage": USAGE, "kvcache": COST}))
        await writer.drain()

    async def use(port: int) -> list[Outcome]:
        return await run_load([port, port], load)

    found: list[Outcome] = asyncio.run(_served(handler, use))
    assert [one.number for one in found] == list(range(6))
    assert Counter(one.instance for one in found) == {0: 3, 1: 3}
    assert all(one.answered for one in found)
    # Latency runs from the arrival: the first request waited for the last one's arrival.
    assert found[0].total >= 0.05
    one = min(bodies, key=lambda body: body["messages"][0]["content"])
    assert one["documents"] == ["a"]
    assert one["kvcache"] == {"policy": "full"}
    assert one["max_tokens"] == 16


# ------------------------------------------------------------------------------------ the results
def _outcome(number: int, total: float, **changed: Any) -> Outcome:
    found = Outcome(number, number % 2, 200, 0.0, total / 2, total, 0.1, 100, 50, 16, 3, 1)
    return replace(found, **changed)


def test_a_summary_by_hand() -> None:
    asked = [Asked(float(at), (0, 1, 2, 3), "q") for at in (1, 2, 3, 5)]
    outcomes = [_outcome(0, 1.0), _outcome(1, 3.0), _outcome(2, 2.0), _outcome(3, 1.0, status=503)]
    found = summary(asked, outcomes)
    assert (found.requests, found.answered) == (4, 3)
    # First arrival at 1; the last answers are complete at 2 + 3 = 3 + 2 = 5.
    assert found.seconds == pytest.approx(4)
    assert found.throughput == pytest.approx(3 / 4)
    assert found.offered == pytest.approx(3 / 4)
    assert (found.latency, found.median, found.ttft) == pytest.approx((2, 2, 1))
    assert (found.reused, found.hits, found.share) == pytest.approx((0.5, 0.75, 2 / 3))
    assert columns(outcomes, found)["latencies"] == [1.0, 3.0, 2.0, None]
    with pytest.raises(ValueError, match="no request was answered: gone"):
        summary(asked[:1], [replace(outcomes[3], message="gone")])


def _run(arm: str, latency: float) -> dict[str, Any]:
    latencies = [latency * (1 + 0.1 * math.sin(number)) for number in range(400)]
    asked = [Asked(0.1 * number, (0, 1), "q") for number in range(400)]
    outcomes = [_outcome(number, one) for number, one in enumerate(latencies)]
    found = columns(outcomes, summary(asked, outcomes))
    return {"stream": "zipf", "factor": 1.2, "arm": arm, "rate": 12.0, **found}


def _report() -> dict[str, Any]:
    seconds = {NO_CACHE: 20.0, OWN: 2.0, SHARED: 1.0, AHEAD: 0.9}
    runs = [_run(arm, latency) for arm, latency in seconds.items()]
    return {"setup": {"block": 50, "seed": 0, "instances": 2}, "runs": runs}


def test_arms_are_compared_request_by_request() -> None:
    rows = {(row["arm"], row["than"]): row for row in paired(_report())}
    saved = rows[SHARED, OWN]["seconds saved"]
    assert saved["value"] == pytest.approx(1.0, rel=0.02)
    assert saved["low"] > 0
    ahead = rows[AHEAD, NO_CACHE]
    assert ahead["latency, of the other's"]["value"] == pytest.approx(0.045, rel=1e-3)
    # 400 answers over 39.9 s and the last request's latency, about 20 s and 0.9 s.
    expected = (39.9 + 20.3) / (39.9 + 0.9)
    assert ahead["throughput, of the other's"] == pytest.approx(expected, rel=0.05)
    # Seconds do not end at 1 as scores do, so a few blocks give no interval.
    few = [{**run, "latencies": run["latencies"][:250]} for run in _report()["runs"]]
    assert all(isinstance(row["seconds saved"], float) for row in paired({"runs": few}))


def test_blocks_of_neighbours_give_the_wider_interval() -> None:
    """A queue that is long for 50 requests is one event, not 50."""
    runs = {arm: _run(arm, 1.0) for arm in (OWN, AHEAD)}
    runs[OWN]["latencies"] = [2.0 if number // 50 % 2 else 0.5 for number in range(400)]
    found = against(runs, AHEAD, OWN)
    assert found.saved.high - found.saved.low > 0.3, "drawn one by one it would be a fifth of it"
    runs[OWN]["latencies"][7] = None
    assert against(runs, AHEAD, OWN).saved.n == 399, "only pairs are compared"


# ------------------------------------------------------------------------------------ the command
def test_the_caches_of_every_arm_have_the_same_bytes_together(tmp_path: Path) -> None:
    place = Place(tmp_path / "model", tmp_path, 1000)
    for arm in (OWN, SHARED, AHEAD):
        commands = [command_of(WAYS[arm], place, n, 8000 + n) for n in range(INSTANCES)]
        limits = {
            words[words.index("--kv-dir") + 1]: int(words[words.index("--kv-max-bytes") + 1])
            for words in commands
        }
        assert sum(limits.values()) == 1000, arm
        assert len(limits) == (INSTANCES if arm == OWN else 1)
        assert all(words[words.index("--memory-bytes") + 1] == "1" for words in commands)
        assert (commands[0][commands[0].index("--prefetch") + 1] != "off") == (arm == AHEAD)
    assert "--kv-dir" not in command_of(WAYS[NO_CACHE], place, 0, 8000)


def test_runs_of_another_set_up_are_not_mixed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[str] = []
    capacity = {"requests": 8, "per_second": 4.0, "full_prefill": 0.4}
    spent = {"full_prefill_before": 0.4, "full_prefill_after": 0.41, "client_share": 0.01}
    held = {"processor_seconds": 0.5, "peak_cache_bytes": 10**6}

    def measure_arm(setting: Any, name: str, point: Point, capacity: float) -> dict[str, Any]:
        measured.append(name)
        place = {"stream": point.stream, "factor": point.factor}
        return {**_run(name, float(len(measured))), **spent, **held, **place}

    monkeypatch.setattr(serving, "measure_arm", measure_arm)
    monkeypatch.setattr(serving, "measure_shares", lambda setting, rounds: [])
    monkeypatch.setattr(serving, "measure_capacity", lambda setting, requests: capacity)
    out = tmp_path / "serving.json"
    words = ["--quick", "--json", str(out)]
    for arm in (NO_CACHE, AHEAD):
        assert serving.main([*words, "--arms", arm]) == 0
    assert [one["arm"] for one in read(out)["runs"]] == [NO_CACHE, AHEAD]
    assert serving.main([*words, "--keep"]) == 0
    assert measured == [NO_CACHE, AHEAD, OWN, SHARED]
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text(json.dumps({"title": "A", "text": "one two three " * 200}) + "\n")
    assert serving.main([*words, "--keep", "--corpus", str(corpus)]) == 2
    assert "is about another set-up" in capsys.readouterr().err


# ----------------------------------------------------------------------- the model, the documents
def test_answers_are_as_long_as_asked_and_files_as_large_as_computed(tmp_path: Path) -> None:
    texts = generated(6, 400)
    tokenizer = save_model(TINY_SHAPE, texts, tmp_path / "model")
    store = DiskStore(tmp_path / "kv", durable=False)
    engine = Engine.from_pretrained(tmp_path / "model", store=store, device="cpu")
    assert engine.model.dtype == torch.bfloat16
    for policy in (None, FullRecompute()):
        answer = engine.generate("what?", texts[:2], policy=policy, max_new_tokens=16)
        assert answer.metrics.generated_tokens == 16
        assert answer.finish_reason == "length"
    (key,) = engine.add(texts[2:3])
    template = engine.template
    written = template.wrap(texts[2])
    assert len(tokenizer(written)["input_ids"]) == key.tokens
    assert store.path(key).stat().st_size == pytest.approx(
        nbytes_of(TINY_SHAPE, key.tokens), rel=0.02
    )
