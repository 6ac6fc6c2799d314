"""One arm of `benchmarks.serving` at one rate, on cold servers, and the machine's speed."""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks.serving_client import Load, Outcome, ask, run_load
from benchmarks.serving_load import Asked, draw_requests, question_of
from benchmarks.serving_results import NO_CACHE, SHARED, columns, summary
from benchmarks.serving_servers import FULL, INSTANCES, REUSE, WAYS, Place, running

if TYPE_CHECKING:
    from collections.abc import Sequence

_SAMPLE: Final = 5.0  # seconds between two looks at the caches' bytes
_ALIKE: Final = 3  # full prefills by which the machine is measured, before and after


@dataclass(frozen=True)
class Setting:
    """What all arms have in common.

    Attributes:
        model: Folder of model and tokenizer.
        documents: Texts.
        top_k: Documents of each request.
        answer_tokens: Of each answer.
        cache_bytes: Of all caches of an arm together.
        device: Where chunks are prefetched.
        streamed: Whether answers come piece by piece.
        instances: Servers of each arm.
    """

    model: Path
    documents: Sequence[str]
    top_k: int
    answer_tokens: int
    cache_bytes: int
    device: str
    streamed: bool
    instances: int = INSTANCES

    def place(self, work: str) -> Place:
        """An empty folder, as the place of an arm."""
        return Place(self.model, Path(work), self.cache_bytes, self.device, self.instances)

    def load(self, asked: Sequence[Asked], policy: str) -> Load:
        """Requests as the client sends them."""
        name = str(self.model)
        return Load(asked, self.documents, self.answer_tokens, policy, name, self.streamed)


@dataclass(frozen=True)
class Point:
    """A rate of a stream.

    Attributes:
        stream: Name of a stream.
        factor: Arrivals, as a part of the baseline's capacity.
        requests: How many.
    """

    stream: str
    factor: float
    requests: int


def measure_arm(setting: Setting, name: str, point: Point, capacity: float) -> dict[str, Any]:
    """Start the arm's servers on empty caches, send the stream, and say what came back."""
    asked = draw_requests(
        point.stream,
        point.requests,
        point.factor * capacity,
        len(setting.documents),
        setting.top_k,
    )
    arm = WAYS[name]
    with tempfile.TemporaryDirectory() as work:
        place = setting.place(work)
        with running(arm, place) as instances:
            before = alike(setting, instances.ports)
            busy, wall = time.process_time(), time.perf_counter()
            served = instances.processor_seconds()
            load = setting.load(asked, arm.policy)
            outcomes, peak = asyncio.run(_watched(instances.ports, load, place))
            share = (time.process_time() - busy) / (time.perf_counter() - wall)
            served = instances.processor_seconds() - served
            after = alike(setting, instances.ports)
    return {
        "stream": point.stream,
        "factor": point.factor,
        "arm": name,
        "rate": point.factor * capacity,
        "full_prefill_before": before,
        "full_prefill_after": after,
        "client_share": share,
        "processor_seconds": round(served / len(asked), 4),
        "peak_cache_bytes": peak,
        **columns(outcomes, summary(asked, outcomes)),
    }


async def _watched(ports: Sequence[int], load: Load, place: Place) -> tuple[list[Outcome], int]:
    """The outcomes, and the most bytes that the caches held."""
    peak = 0

    async def watch() -> None:
        nonlocal peak
        while True:
            peak = max(peak, place.held())
            await asyncio.sleep(_SAMPLE)

    watcher = asyncio.create_task(watch())
    try:
        outcomes = await run_load(ports, load)
    finally:
        watcher.cancel()
        with suppress(asyncio.CancelledError):
            await watcher
    return outcomes, max(peak, place.held())


def alike(setting: Setting, ports: Sequence[int]) -> float:
    """Seconds of a full prefill with its answer, all instances at once: the machine's speed now."""
    asked = Asked(0.0, tuple(range(setting.top_k)), question_of(0))
    body = setting.load([asked], FULL).body(asked)

    async def rounds() -> list[float]:
        seconds: list[float] = []
        for number in range(1 + _ALIKE):
            started = time.perf_counter()
            found = await asyncio.gather(*(ask(port, body, started) for port in ports))
            for one in found:
                if not one.answered:
                    raise RuntimeError(f"a server does not answer: {one.message}")
            if number:  # the first one warms up
                seconds += [one.total for one in found]
        return seconds

    return statistics.median(asyncio.run(rounds()))


def measure_capacity(setting: Setting, requests: int) -> dict[str, float]:
    """Answers per second of the baseline when all requests are there at once."""
    asked = draw_requests("zipf", requests, 1.0, len(setting.documents), setting.top_k, seed=1)
    at_once = [replace(one, at=0.0) for one in asked]
    with tempfile.TemporaryDirectory() as work:
        place = setting.place(work)
        with running(WAYS[NO_CACHE], place) as instances:
            seconds = alike(setting, instances.ports)
            outcomes = asyncio.run(run_load(instances.ports, setting.load(at_once, FULL)))
    found = summary(at_once, outcomes)
    if found.answered < requests:
        raise RuntimeError(f"the baseline answered {found.answered} of {requests} requests")
    return {"requests": requests, "per_second": found.throughput, "full_prefill": seconds}


def measure_shares(setting: Setting, rounds: int) -> list[dict[str, Any]]:
    """Time to the first token and behind it, one request at a time, by documents per request.

    With the cache every document was asked for before.
    """
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as work:
        place = replace(setting.place(work), cache_bytes=4 * setting.cache_bytes)
        with running(WAYS[SHARED], place) as instances:
            port = instances.ports[0]
            alike(setting, instances.ports)
            for top in sorted({1, 2, setting.top_k}):
                for policy in (FULL, REUSE):
                    found = [_alone(setting, port, top, policy, turn) for turn in range(rounds)]
                    kept = found[1:]  # the first one fills the cache
                    prompt, first, total = (
                        statistics.median(getattr(one, name) for one in kept)
                        for name in ("prompt_tokens", "first", "total")
                    )
                    rows.append(
                        {
                            "documents": top,
                            "arm": NO_CACHE if policy == FULL else "all cached",
                            "prompt_tokens": prompt,
                            "first": first,
                            "rest": total - first,
                            "first_share": first / total,
                            "rounds": len(kept),
                        }
                    )
    return rows


def _alone(setting: Setting, port: int, top: int, policy: str, turn: int) -> Outcome:
    asked = Asked(0.0, tuple(range(top)), question_of(turn))
    body = setting.load([asked], policy).body(asked)
    outcome = asyncio.run(ask(port, body, time.perf_counter()))
    if not outcome.answered:
        raise RuntimeError(f"a server does not answer: {outcome.message}")
    return outcome
