"""Open-loop requests to servers on loopback, and when their answers came.

One process, one thread, plain sockets: a client library would cost more processor time than the
rest of the client together, on a machine whose cores the servers need.  How much the client took is
measured and reported.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from benchmarks.serving_load import Asked

HOST: Final = "127.0.0.1"
PATH: Final = "/v1/chat/completions"
_DONE: Final = b"[DONE]"
# What an event of a stream must hold to be looked at once the first text has come.
_USAGE: Final = re.compile(rb'"usage":\s*{')


@dataclass(frozen=True)
class Outcome:
    """What became of a request.  Times are seconds since it arrived, in the queue or not.

    Attributes:
        number: Its place in the stream.
        instance: Which one answered.
        status: HTTP status; 0 where the connection broke.
        sent: When it was handed to its instance.
        first: When the first text of the answer came; nan without an answer.
        total: When the answer was complete; nan without one.
        waited: Seconds in the instance's queue, as it says; nan where it does not.
        prompt_tokens: Of the prompt, as the server counts them.
        cached_tokens: Of these, reused; chunks that were made while it waited are.
        answer_tokens: Of the answer.
        hits: Chunks that were cached.
        misses: Chunks that were not.
        declined: Chunks that were cached and computed all the same, because that was sooner.
        prefetched: Whether chunks were computed or loaded while it waited.
        batch: Requests answered together with it, itself included.
        model: Seconds of the engine behind the queue, loading included, as it says; of a batch,
            those of the batch.
        loading: Seconds of these that chunks were loaded.
        message: What the server said, where it failed.
    """

    number: int
    instance: int
    status: int
    sent: float
    first: float = float("nan")
    total: float = float("nan")
    waited: float = float("nan")
    prompt_tokens: int = 0
    cached_tokens: int = 0
    answer_tokens: int = 0
    hits: int = 0
    misses: int = 0
    declined: int = 0
    prefetched: bool = False
    batch: int = 1
    model: float = float("nan")
    loading: float = float("nan")
    message: str = ""

    @property
    def answered(self) -> bool:
        """Whether there is a whole answer."""
        return self.status == 200 and self.total == self.total


class Dispatcher:
    """Gives a request to the instance with the fewest requests; of equals, to the next in turn."""

    def __init__(self, instances: int) -> None:
        """No instance has any."""
        self.held = [0] * instances
        self._last = instances - 1

    def take(self) -> int:
        """The instance for the next request, which has one more from now on."""
        turn = [(self._last + 1 + step) % len(self.held) for step in range(len(self.held))]
        self._last = min(turn, key=lambda one: self.held[one])
        self.held[self._last] += 1
        return self._last

    def give_back(self, instance: int) -> None:
        """One of its requests is done."""
        self.held[instance] -= 1


@dataclass(frozen=True)
class Load:
    """Requests and how they are asked.

    Attributes:
        asked: In the order of their arrival.
        documents: Texts that they refer to.
        answer_tokens: Of every answer.
        policy: What is reused, as `policy_by_name` reads it.
        model: Its name at the servers.
        streamed: Whether answers come piece by piece; such requests share no batch.
    """

    asked: Sequence[Asked]
    documents: Sequence[str]
    answer_tokens: int
    policy: str
    model: str
    streamed: bool = False

    def body(self, asked: Asked) -> bytes:
        """The request as an OpenAI client would send it."""
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [{"role": "user", "content": asked.question}],
            "documents": [self.documents[index] for index in asked.documents],
            "max_tokens": self.answer_tokens,
            "kvcache": {"policy": self.policy},
        }
        if self.streamed:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return json.dumps(body).encode()


async def run_load(ports: Sequence[int], load: Load) -> list[Outcome]:
    """Send every request when it arrives, whatever became of those before; wait for all answers."""
    dispatcher = Dispatcher(len(ports))
    bodies = [load.body(asked) for asked in load.asked]
    started = time.perf_counter()

    async def one(number: int, asked: Asked) -> Outcome:
        due = started + asked.at
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        instance = dispatcher.take()
        try:
            outcome = await ask(ports[instance], bodies[number], due)
        finally:
            dispatcher.give_back(instance)
        return replace(outcome, number=number, instance=instance)

    return list(await asyncio.gather(*(one(*pair) for pair in enumerate(load.asked))))


async def ask(port: int, body: bytes, due: float) -> Outcome:
    """One request to one server.

    Args:
        port: On loopback.
        body: JSON.
        due: Moment of `time.perf_counter` from which its times are counted.
    """
    outcome = Outcome(-1, -1, 0, time.perf_counter() - due)
    try:
        reader, writer = await asyncio.open_connection(HOST, port)
    except OSError as error:
        return replace(outcome, message=str(error))
    try:
        head = (
            f"POST {PATH} HTTP/1.1\r\nHost: {HOST}:{port}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        writer.write(head.encode() + body)
        await writer.drain()
        return await _read(reader, outcome, due)
    except (OSError, asyncio.IncompleteReadError, ValueError) as error:
        return replace(outcome, status=0, message=f"{type(error).__name__}: {error}")
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


async def _read(reader: asyncio.StreamReader, outcome: Outcome, due: float) -> Outcome:
    status, headers = await _head(reader)
    outcome = replace(outcome, status=status)
    is_chunked = headers.get("transfer-encoding") == "chunked"
    parts = _parts(reader) if is_chunked else _rest(reader)
    if status != 200 or not headers.get("content-type", "").startswith("text/event-stream"):
        whole = b"".join([part async for part in parts])
        if status != 200:
            return replace(outcome, message=whole.decode(errors="replace")[:300])
        now = time.perf_counter() - due
        answer = json.loads(whole)
        # The server says how long it went on behind the first token; all else came before.
        behind = answer["kvcache"]["total"] - answer["kvcache"]["ttft"]
        return replace(_costs(outcome, answer), first=now - behind, total=now)
    async for data in _events(parts):
        now = time.perf_counter() - due
        if data == _DONE:
            return replace(outcome, total=now)
        if outcome.first != outcome.first or _USAGE.search(data):
            outcome = _noted(outcome, json.loads(data), now)
    raise ValueError("the stream ended before its end")


def _noted(outcome: Outcome, event: Mapping[str, Any], now: float) -> Outcome:
    """The outcome with what one event of the stream adds."""
    if "error" in event:
        raise ValueError(f"the server failed: {event['error'].get('message', event['error'])}")
    has_text = any(choice.get("delta", {}).get("content") for choice in event.get("choices") or ())
    if has_text and outcome.first != outcome.first:
        outcome = replace(outcome, first=now)
    return _costs(outcome, event)


def _costs(outcome: Outcome, answer: Mapping[str, Any]) -> Outcome:
    """The outcome with what an answer, or the last event of a stream, says about its cost."""
    usage, cost = answer.get("usage"), answer.get("kvcache")
    if usage:
        outcome = replace(
            outcome,
            prompt_tokens=usage["prompt_tokens"],
            answer_tokens=usage["completion_tokens"],
            cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
        )
    if cost:
        outcome = replace(
            outcome,
            waited=cost["queue_wait"],
            model=cost["total"],
            loading=cost["load"],
            hits=sum(cost["hits"].values()),
            misses=cost["misses"],
            declined=sum(cost["declined"].values()),
            prefetched=cost["prefetched"],
            batch=cost["batch"],
        )
    return outcome


async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    pairs = (line.partition(":") for line in lines[1:] if line)
    headers = {name.strip().lower(): value.strip().lower() for name, _, value in pairs}
    return int(lines[0].split(" ", 2)[1]), headers


async def _parts(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """A body in chunked transfer encoding."""
    while size := int((await reader.readline()).split(b";")[0], 16):
        part = await reader.readexactly(size + 2)
        yield part[:-2]


async def _rest(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """A body that ends with the connection."""
    while part := await reader.read(1 << 16):
        yield part


async def _events(parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The data of server-sent events, each of one line; comments are left out."""
    held = b""
    async for part in parts:
        *lines, held = (held + part).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[len(b"data:") :].strip()
