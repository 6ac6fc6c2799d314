"""Two replicas under Ray Serve, started as a user starts them: one start for all tests here."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import re
import signal
import stat
import threading
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import psutil
import pytest

from kvcache_rag import Engine
from tests.ray_server import RayServer, save_model, wait_until

if importlib.util.find_spec("ray") is None:  # importing it would be too early for a later test
    pytest.skip("the extra ray is not installed", allow_module_level=True)

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.timeout(300), pytest.mark.xdist_group("ray")]
DOCUMENTS = [f"Number {index} is called N{index}." for index in range(40)]
LOST = "the replica that was answering has ended; repeat the request"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found: Path = tmp_path_factory.mktemp("ray")
    save_model(found / "model")
    return found


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RayServer]:
    store = str(folder / "kv")
    found = RayServer(str(folder / "model"), "--served-name", "m", "--replicas", "2",
                      "--store", store, "--max-concurrency", "200", "--grace", "1")  # fmt: skip
    try:
        yield found
    finally:
        found.kill()


@pytest.fixture(scope="module")
def alone(folder: Path) -> Engine:
    return Engine.from_pretrained(folder / "model", device="cpu")


def body(number: int, *, tokens: int = 12, stream: bool = False, **more: Any) -> dict[str, Any]:
    return {
        "model": "m",
        "messages": [{"role": "user", "content": f"What is {number}?"}],
        "documents": [DOCUMENTS[number % 40], DOCUMENTS[(number + 1) % 40]],
        "max_tokens": tokens,
        "stream": stream,
        **more,
    }


def expected(alone: Engine, number: int, tokens: int = 12) -> str:
    chunks = [DOCUMENTS[number % 40], DOCUMENTS[(number + 1) % 40]]
    return alone.generate(f"What is {number}?", chunks, max_new_tokens=tokens).text


async def ask(client: httpx.AsyncClient, number: int, **options: Any) -> httpx.Response:
    return await client.post("/v1/chat/completions", json=body(number, **options))


def client_of(server: RayServer) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=server.url, timeout=120.0)


def text_of(response: httpx.Response) -> str:
    found: str = response.json()["choices"][0]["message"]["content"]
    return found


def frames_of(text: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data:")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def streamed(frames: list[dict[str, Any]]) -> str:
    choices = [choice for frame in frames for choice in frame.get("choices", ())]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


async def test_both_replicas_answer_as_one_engine_does_and_share_what_they_computed(
    server: RayServer, alone: Engine
) -> None:
    async with client_of(server) as client:
        ready = await client.get("/ready")
        assert ready.status_code == 200
        first = await asyncio.gather(*(ask(client, number) for number in range(16)))
        again = await asyncio.gather(*(ask(client, number) for number in range(16)))
        frames = frames_of((await ask(client, 3, stream=True)).text)
    for answers in (first, again):
        assert [answer.status_code for answer in answers] == [200] * 16
        for number, answer in enumerate(answers):
            assert text_of(answer) == expected(alone, number)
    assert streamed(frames) == expected(alone, 3)
    names = Counter(answer.json()["kvcache"]["replica"] for answer in (*first, *again))
    assert len(names) == 2, names
    # Whoever computed a chunk, everybody finds it.
    assert sum(answer.json()["kvcache"]["misses"] for answer in again) == 0
    usage, cost = again[5].json()["usage"], again[5].json()["kvcache"]
    cached = cost["prefix_tokens"] + cost["reused_tokens"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == cached > cost["prefix_tokens"]


async def test_what_one_replica_computed_together_all_find(server: RayServer) -> None:
    async with client_of(server) as client:
        asked = [await ask(client, 21, kvcache={"policy": "combination"}) for _ in range(12)]
    cost = [answer.json()["kvcache"] for answer in asked]
    assert [one["misses"] for one in cost] == [1, *[0] * 11]
    assert len({one["replica"] for one in cost}) == 2


async def test_mistakes_and_tokens_are_told_through_a_replica(server: RayServer) -> None:
    async with client_of(server) as client:
        wrong = await ask(client, 1, kvcache={"policy": "nonsense"})
        long = await ask(client, 1, tokens=100_000)
    for response in (wrong, long):
        assert response.status_code == 400, response.text
        assert "Traceback" not in response.text
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}


async def test_a_client_that_goes_away_stops_its_replica(server: RayServer) -> None:
    def running() -> int:
        text = httpx.get(f"{server.url}/metrics", timeout=30.0).text
        lines = [one for one in text.splitlines() if one.startswith("kvcache_rag_running_requests")]
        assert len(lines) == 2
        return sum(int(float(one.split()[-1])) for one in lines)

    async with client_of(server) as client:
        long = body(5, tokens=3000, stream=True)
        async with client.stream("POST", "/v1/chat/completions", json=long) as stream:
            lines = stream.aiter_lines()  # kept: dropping it is going away
            while '"content":"' not in await anext(lines):
                continue
            await asyncio.to_thread(wait_until, running)
        # Left to itself, it would generate for as long as thousands of tokens take.
        await asyncio.to_thread(wait_until, lambda: not running(), 3.0)


def test_nothing_of_ray_can_be_called_without_its_token(server: RayServer) -> None:
    import grpc

    token = ""
    seen: dict[str, list[tuple[str, int]]] = {}
    for process in server.processes():
        path = process.environ().get("RAY_AUTH_TOKEN_PATH")
        if path:
            token = Path(path).read_text("ascii")
            assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
            assert stat.S_IMODE(os.stat(Path(path).parent).st_mode) == 0o700
        listening = [
            (one.laddr.ip, one.laddr.port)
            for one in process.net_connections()
            if one.status == psutil.CONN_LISTEN
        ]
        seen[f"{process.name()} {process.pid}"] = listening
    assert len(token) >= 32
    places = [place for listening in seen.values() for place in listening]
    beyond = {ip for ip, _ in places} - {"127.0.0.1", "::ffff:127.0.0.1", "::1"}
    # Serve binds the port between deployments of each replica to all addresses, always.
    assert beyond <= {"::"}, seen
    assert sum(ip == "::" for ip, _ in places) <= 2, seen
    methods = [
        "/ray.rpc.InternalKVGcsService/InternalKVKeys",
        "/ray.rpc.NodeManagerService/GetSystemConfig",
        "/ray.rpc.CoreWorkerService/GetCoreWorkerStats",
        "/ray.serve.ASGIService/HandleRequest",
    ]
    known = Counter[str]()
    for _, port in places:
        for method in methods:
            with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
                call = channel.unary_unary(method)
                codes = [
                    _code(call, metadata)
                    for metadata in ((), (("authorization", "Bearer " + "0" * 64),))
                ]
                right = _code(call, (("authorization", f"Bearer {token}"),))
            if right not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNIMPLEMENTED):
                known[method] += 1
                assert codes == [grpc.StatusCode.UNAUTHENTICATED] * 2, (method, port, codes, seen)
    assert known[methods[0]] == 1, known
    assert known[methods[3]] == 2, known
    assert all(known[method] for method in methods), known


def test_no_port_of_rays_answers_http_without_its_token(server: RayServer) -> None:
    asked, answered = 0, {}
    for process in server.processes():
        for one in process.net_connections():
            if one.status != psutil.CONN_LISTEN:
                continue
            asked += 1
            for path in ("/metrics", "/"):
                url = f"http://127.0.0.1:{one.laddr.port}{path}"
                try:
                    answered[f"{process.name()} {url}"] = httpx.get(url, timeout=10.0).status_code
                except httpx.RemoteProtocolError:  # gRPC, which the test before this one asks
                    continue
    assert asked >= 8
    assert set(answered.values()) == {401}, answered


def _code(call: Any, metadata: Any) -> Any:
    import grpc

    try:
        call(b"", metadata=metadata, timeout=5.0)
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def test_a_killed_replica_costs_clean_errors_only_and_comes_back(
    server: RayServer, alone: Engine
) -> None:
    before = server.replicas()
    assert len(before) == 2

    async def stream(client: httpx.AsyncClient, number: int, begun: asyncio.Event) -> Any:
        long = body(number, tokens=600, stream=True)
        lines = []
        async with client.stream("POST", "/v1/chat/completions", json=long) as response:
            if response.status_code != 200:
                return response.status_code, await response.aread()
            async for line in response.aiter_lines():
                if '"content":"' in line:
                    begun.set()
                lines.append(line)
        return 200, frames_of("\n".join(lines))

    async with client_of(server) as client:
        begun = [asyncio.Event() for _ in range(6)]
        streams = [asyncio.create_task(stream(client, n, one)) for n, one in enumerate(begun)]
        # One at a time runs in each replica; as soon as both do, others wait behind them.
        first = [asyncio.create_task(one.wait()) for one in begun]
        while sum(one.is_set() for one in begun) < 2:
            await asyncio.wait(
                [task for task in first if not task.done()], return_when="FIRST_COMPLETED"
            )
        whole = [asyncio.create_task(ask(client, number)) for number in range(8)]
        os.kill(before[0], signal.SIGKILL)
        answers = await asyncio.gather(*whole)
        ended = await asyncio.gather(*streams)
        for task in first:
            task.cancel()
        # None of the short ones had begun with a text, so none is lost.
        assert [answer.status_code for answer in answers] == [200] * 8
        assert [text_of(answer) for answer in answers] == [expected(alone, n) for n in range(8)]
        failed = 0
        for number, (status, frames) in enumerate(ended):
            assert status == 200
            if "error" in frames[-1]:
                failed += 1
                assert frames[-1]["error"]["message"] == LOST
                again = await stream(client, number, asyncio.Event())
                assert streamed(again[1]) == expected(alone, number, 600)
            else:
                assert streamed(frames) == expected(alone, number, 600)
        assert failed == 1, "a replica streams one answer at a time"
        assert (await client.get("/ready")).status_code == 200, "one of two is enough"

    def is_whole() -> bool:
        after = server.replicas()
        return len(after) == 2 and before[0] not in after

    await asyncio.to_thread(wait_until, is_whole, 120.0, 0.5)


def counted(metrics: str, name: str) -> int:
    """Requests of all replicas that run, or wait."""
    counts = re.findall(rf"kvcache_rag_{name}_requests\{{[^}}]*\}} (\S+)", metrics)
    return sum(int(float(one)) for one in counts)


class Asked(threading.Thread):
    """Long requests, two of which run; the others wait in the replicas.

    Attributes:
        texts: What each of them was sent, with its status.
    """

    def __init__(self, server: RayServer, count: int = 6) -> None:
        super().__init__(daemon=True)
        self._server, self._count = server, count
        self._are_spread = threading.Event()
        self.texts: list[tuple[int, str]] = []
        self.start()
        assert self._are_spread.wait(120.0), "not two of them run"

    def run(self) -> None:
        async def ask_all() -> None:
            async with client_of(self._server) as client:
                while True:
                    asked = [asyncio.create_task(one(client, at)) for at in range(self._count)]
                    if await self._is_spread(client):
                        break
                    # All went to one replica: the other one is too new to be known.
                    for task in asked:
                        task.cancel()
                    await asyncio.gather(*asked, return_exceptions=True)
                    self.texts.clear()
                self._are_spread.set()
                await asyncio.gather(*asked)

        async def one(client: httpx.AsyncClient, number: int) -> None:
            reply = await ask(client, number, tokens=3000, stream=True)
            self.texts.append((reply.status_code, reply.text))

        asyncio.run(ask_all())

    async def _is_spread(self, client: httpx.AsyncClient) -> bool:
        for _ in range(50):
            text = (await client.get("/metrics")).text
            if (counted(text, "running"), counted(text, "waiting")) == (2, self._count - 2):
                return True
            await asyncio.sleep(0.1)
        return False

    def ensure_told(self) -> None:
        """Who waited got a 503, who was being answered an event; nobody was cut off."""
        self.join(60)
        *refused, first, second = sorted(self.texts, reverse=True)
        assert [status for status, _ in refused] == [503] * (self._count - 2)
        for _, text in refused:
            assert json.loads(text)["error"]["code"] == "shutting_down"
        for status, text in (first, second):
            assert (status, text.endswith("data: [DONE]\n\n")) == (200, True)
            assert frames_of(text)[-1]["error"]["code"] == "shutting_down"


def test_a_second_signal_ends_it_and_all_its_processes_at_once(folder: Path) -> None:
    store = str(folder / "kv")
    found = RayServer(str(folder / "model"), "--served-name", "m", "--replicas", "2",
                      "--store", store, "--grace", "200")  # fmt: skip
    try:
        asked, children = Asked(found), found.processes()
        found.process.send_signal(signal.SIGTERM)
        wait_until(lambda: len(asked.texts) == 4)
        assert found.end(signal.SIGTERM) == 0, "".join(found.lines)
        asked.ensure_told()
        wait_until(lambda: not any(one.is_running() for one in children), 30.0)
        assert "Traceback" not in "".join(found.lines)
    finally:
        found.kill()


def test_ctrl_c_ends_it_and_all_its_processes(server: RayServer) -> None:
    children = server.processes()
    asked = Asked(server)
    assert len(children) > 5
    folders = {one.environ().get("RAY_AUTH_TOKEN_PATH", "") for one in children} - {""}
    assert server.end(signal.SIGINT, to_all=True) == 0, "".join(server.lines)
    asked.ensure_told()
    wait_until(lambda: not any(one.is_running() for one in children), 20.0)
    assert folders
    assert not any(Path(folder).parent.exists() for folder in folders)
    told = "".join(server.lines)
    assert "Traceback" not in told, told
