"""The server over a GGUF file in llama.cpp: the answers of its engine, reused after a restart."""

from __future__ import annotations

import asyncio
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import contracts_backend
import llama_smollm2 as llama
import pytest
from contracts_backend import MAX_WAITING, BackendContract
from serve_fakes import client, data_of
from serve_works import Valve, answer_of, make_work

from kvcache_rag import DiskStore, Message, Reuse
from kvcache_rag.cli import main
from kvcache_rag.policies import policy_by_name
from kvcache_rag_server.app import build_app
from kvcache_rag_server.local import LocalBackend
from kvcache_rag_server.settings import ServerSettings
from kvcache_rag_server.startup import local_backend

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from fastapi import FastAPI

    from kvcache_rag import Engine
    from kvcache_rag_server.backend import Backend

llama.needed()


CHAT = "/v1/chat/completions"
SAID = [Message("user", "Who sells rye bread?"), Message("assistant", "The bakery.")]
MESSAGES = [
    *({"role": turn.role, "content": turn.content} for turn in SAID),
    {"role": "user", "content": llama.QUESTION},
]


@lru_cache(maxsize=2)
def small(what: str = "alone") -> Engine:
    """An engine that refuses and reuses as the one that the contract was written with.

    Measuring a model takes a second, so there are two: one that is served, one alone.
    """
    del what
    return llama.engine(context_window=2048, policy=Reuse())


class TestLlamaBackend(BackendContract):
    """The contract, over llama.cpp."""

    @pytest.fixture(autouse=True)
    def _of_llama(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(contracts_backend, "reader", small)

    @pytest.fixture
    def valve(self, backend: Backend, monkeypatch: pytest.MonkeyPatch) -> Iterator[Valve]:
        made = Valve(llama.loaded()[0].llama, monkeypatch, "decode")
        yield made
        made.fails = False
        made.open.set()

    def open(self) -> LocalBackend:
        return LocalBackend(small("served"), name="reader", max_waiting=MAX_WAITING)

    async def end(self, backend: Backend) -> None:
        await backend.close()

    async def test_what_is_reused_unless_a_request_says_it(self, backend: Backend) -> None:
        own = await backend.own_policy()
        assert own.name == "reuse"
        assert {*own.warnings} == {"reuse", "composite"}  # it was not trained for blocks


@pytest.fixture(scope="module")
def engine() -> Engine:
    """What answers are held against; its chunks are its own."""
    return llama.engine()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("served") / "kv"


@pytest.fixture(scope="module")
def backend(place: Path) -> Iterator[LocalBackend]:
    settings = ServerSettings(model=llama.NAME, kv_dir=str(place), kv_codec="int8", **llama.HOW)
    made = local_backend(settings)
    yield made
    asyncio.run(made.close())


@pytest.fixture
def app(backend: LocalBackend) -> FastAPI:
    return build_app(backend, ServerSettings(model=llama.NAME, **llama.HOW))


def body(**fields: Any) -> dict[str, Any]:
    fields = {"messages": MESSAGES, "documents": list(llama.TEXTS), "max_tokens": 16, **fields}
    return {"model": llama.NAME, **fields}


async def post(app: FastAPI, **fields: Any) -> Any:
    async with client(app) as http:
        reply = await http.post(CHAT, json=body(**fields))
    assert reply.status_code == 200, reply.text
    return data_of(reply.text) if fields.get("stream") else reply.json()


def text_of(events: list[Any]) -> str:
    chunks = (choice for event in events[:-1] for choice in event["choices"])
    return "".join(choice["delta"].get("content") or "" for choice in chunks)


@pytest.mark.parametrize("policy", ["reuse", "bestlast", "legolink:4", "combination", "full"])
async def test_the_server_says_what_its_engine_and_one_alone_say(
    policy: str, app: FastAPI, engine: Engine
) -> None:
    options = {"kvcache": {"policy": policy}}
    first, again = [await post(app, **options) for _ in range(2)]
    streamed = await post(app, stream=True, **options)
    expected = engine.generate(
        llama.QUESTION, llama.TEXTS, history=SAID, policy=policy_by_name(policy), max_new_tokens=16
    )
    texts = {one["choices"][0]["message"]["content"] for one in (first, again)}
    assert texts == {expected.text, text_of(streamed)}
    assert expected.text
    assert again["kvcache"]["misses"] == 0
    assert (again["kvcache"]["reused_tokens"] > 0) is (policy != "full")


async def test_a_server_that_starts_again_reuses_every_token(
    place: Path, backend: LocalBackend
) -> None:
    work = make_work(question=llama.QUESTION, chunks=llama.TEXTS, policy="reuse")
    expected = await answer_of(backend, work)
    engine = llama.engine(store=DiskStore(place, codec="int8"))
    second = LocalBackend(engine, name=llama.NAME)
    try:
        found = await answer_of(second, work)
    finally:
        await second.close()
    assert (found.text, found.metrics.misses) == (expected.text, 0)
    assert found.metrics.reused_tokens == sum(map(len, engine.tokenize("?", llama.TEXTS).chunks))


def test_what_llama_cpp_has_not_is_refused_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cases = {
        ("tiny",): "runs GGUF files, and 'tiny' is none",
        ("smollm2", "--weight-format", "int8"): "has weights as the file has them, not int8",
        ("smollm2", "--device", "cuda"): "built without a GPU, so there is no cuda",
        ("smollm2", "--prefetch", "cpu"): "in llama.cpp cannot be copied to prefetch beside itself",
        ("smollm2", "--base-url", "http://a"): "are for servers: say --backend vllm",
    }
    if llama.has_gpu():
        del cases["smollm2", "--device", "cuda"]
    for words, said in cases.items():
        assert main(["serve", *words, "--backend", "llama.cpp", "--port", "0"]) == 2
        printed = capsys.readouterr().err
        assert said in printed
        assert printed.count("\n") == 1


TOOL = {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}


async def test_what_changes_logits_holds_over_llama_cpp_too(app: FastAPI) -> None:
    told = await post(app, logprobs=True, top_logprobs=2, n=2)
    one, other = told["choices"]
    places = one["logprobs"]["content"]
    assert "".join(place["token"] for place in places).strip() == one["message"]["content"].strip()
    assert all(place["logprob"] == place["top_logprobs"][0]["logprob"] for place in places)
    assert one["message"] == other["message"]
    held = await post(app, response_format={"type": "json_object"})
    assert held["choices"][0]["message"]["content"].startswith("{")
    called = await post(app, tools=[TOOL], tool_choice="required", max_tokens=64)
    assert called["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "find"
    first = await post(app, max_tokens=1)
    (place,) = (await post(app, max_tokens=1, logprobs=True))["choices"][0]["logprobs"]["content"]
    token = llama.engine().tokenizer.encode(place["token"], add_special_tokens=False)[0]
    moved = await post(app, max_tokens=1, logit_bias={str(token): -100})
    assert moved["choices"][0]["message"] != first["choices"][0]["message"]


async def test_a_policy_that_llama_cpp_cannot_do_is_a_clear_4xx(app: FastAPI) -> None:
    async with client(app) as http:
        reply = await http.post(CHAT, json=body(kvcache={"policy": "cacheblend:0.3"}))
    assert reply.status_code == 400, reply.text
    assert "llama.cpp gives neither attention nor keys" in reply.json()["error"]["message"]


def test_build_fills_the_store_of_the_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = tmp_path / "c.jsonl"
    corpus.write_text('{"text": "The bakery of the village opens at six."}\n')
    words = ["build", "smollm2", str(corpus), "--kv-dir", str(tmp_path / "kv")]
    assert main([*words, "--backend", "llama.cpp", "--adapter", "none"]) == 0
    assert "1 chunk: 1 prefilled" in capsys.readouterr().out
    engine = llama.engine(store=DiskStore(tmp_path / "kv"))
    answer = engine.generate(
        "When?", ["The bakery of the village opens at six."], policy=Reuse(), max_new_tokens=1
    )
    assert (answer.metrics.misses, answer.metrics.hits) == (0, {"disk": 1})
