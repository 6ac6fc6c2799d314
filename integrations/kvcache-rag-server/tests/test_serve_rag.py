"""`/v1/rag`: what was ingested is found, in the text that was prefilled, by who may see it."""

from __future__ import annotations

import asyncio
import json
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import chromadb
import pytest
from chroma_server import chroma_server
from serve_documents import QUESTION, TEXTS, database, engine, write_rows
from serve_fakes import Scripted, answer, client, data_of, settings, tiny_backend

from kvcache_rag import CacheBlend, InvalidInputError, LegoLink, PromptTemplate
from kvcache_rag.integration import hash_vector
from kvcache_rag.integration.rows import row_text
from kvcache_rag_server import retrieval
from kvcache_rag_server import retrieval as embedding
from kvcache_rag_server.app import build_app
from kvcache_rag_server.auth import new_key
from kvcache_rag_server.backend import BackendRequest, Finished, Piece, RetrievedText, Started
from kvcache_rag_server.errors import ApiError
from kvcache_rag_server.retrieval import ChromaRetriever, open_retriever, shown

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path

    import httpx
    from fastapi import FastAPI

    from kvcache_rag_server.backend import Event
    from kvcache_rag_server.settings import ServerSettings

JSON = {"content-type": "application/json"}
FULL = {"kvcache": {"policy": "full"}}


def over(folder: Path, **values: Any) -> ServerSettings:
    return settings(**{"chroma": str(folder / "chroma"), "embedding": "hash", **values})


def opened(folder: Path, **values: Any) -> ChromaRetriever:
    found = open_retriever(over(folder, **values))
    assert found is not None
    return found


# ---------------------------------------------------------------------- retrieving
def test_the_nearest_rows_come_best_first_with_their_scores(tmp_path: Path) -> None:
    write_rows(tmp_path, "docs")
    found = opened(tmp_path).retrieve(QUESTION, 2, "")
    assert found[0].text == TEXTS[0]
    assert len(found) == 2
    assert found[0].id == "docs-0"
    scores = [one.score for one in found]
    distance = sum(
        (a - b) ** 2 for a, b in zip(hash_vector(QUESTION), hash_vector(TEXTS[0]), strict=True)
    )
    assert scores[0] == pytest.approx(math.exp(-distance), rel=1e-4)
    assert scores == sorted(scores, key=lambda one: -(one or 0))


def test_what_is_internal_is_not_shown(tmp_path: Path) -> None:
    write_rows(tmp_path, "docs", by=engine(tmp_path), author="Ann", _node_type="x")
    (first, *_) = opened(tmp_path).retrieve(QUESTION, 1, "")
    assert first.metadata == {"page": 0, "author": "Ann"}
    assert shown({"_a": 1, "kv_key": "k", "doc_id": "d", "ref_doc_id": "r", "kv": 2}) == {"kv": 2}
    assert shown({"weights": 1.5, "rest": math.inf}) == {"weights": 1.5, "rest": None}


def test_llama_index_rows_read_as_they_were_prefilled(tmp_path: Path) -> None:
    """A title that stands in the node's LLM text is part of its chunk; `file_path` is not."""
    pytest.importorskip("llama_index.kvcache_rag")
    from llama_index.core.schema import TextNode

    from llama_index.kvcache_rag import KVCacheVectorStore

    by = engine(tmp_path)
    store = KVCacheVectorStore.from_params("docs", persist_dir=str(tmp_path / "chroma"), engine=by)
    node = TextNode(
        text=TEXTS[0],
        id_="n",
        metadata={"title": "Orrin", "file_path": "orrin.txt"},
        excluded_llm_metadata_keys=["file_path"],
        embedding=hash_vector(TEXTS[0]),
    )
    store.add([node])
    (found,) = opened(tmp_path).retrieve(QUESTION, 3, "")
    assert found.text == f"title: Orrin\n\n{TEXTS[0]}"
    assert by.store.contains(by.keys([found.text])[0])
    assert found.metadata == {
        "title": "Orrin",
        "file_path": "orrin.txt",
        "document_id": "None",
    }
    # By name, every row reads in that form.
    (plain,) = opened(tmp_path, text_form="document").retrieve(QUESTION, 3, "")
    assert plain.text == TEXTS[0]
    assert not by.store.contains(by.keys([plain.text])[0])


def test_a_reference_tells_the_form_where_the_row_does_not(tmp_path: Path) -> None:
    """Rows of others that LlamaIndex's store prefilled stand in prompts with their metadata."""
    pytest.importorskip("llama_index.kvcache_rag")
    from llama_index.kvcache_rag import KVCacheVectorStore

    write_rows(tmp_path, "docs", TEXTS[:1])
    (before,) = opened(tmp_path).retrieve(QUESTION, 1, "")
    assert before.text == TEXTS[0]
    by = engine(tmp_path)
    store = KVCacheVectorStore.from_params("docs", persist_dir=str(tmp_path / "chroma"), engine=by)
    store.prefill_missing()
    (after,) = opened(tmp_path).retrieve(QUESTION, 1, "")
    assert after.text == f"page: 0\n\n{TEXTS[0]}"
    assert by.store.contains(by.keys([after.text])[0])


def test_a_form_that_is_not_installed_is_named() -> None:
    with pytest.raises(InvalidInputError, match=r"no form of texts 'haystack'.*document"):
        row_text("haystack", PromptTemplate())


def test_collections_made_or_made_anew_after_the_start_are_found(tmp_path: Path) -> None:
    client_ = database(tmp_path)
    by = opened(tmp_path)
    with pytest.raises(ApiError, match="no documents in the collection 'docs'") as raised:
        by.retrieve(QUESTION, 1, "")
    assert raised.value.failed.status == 404
    write_rows(tmp_path, "docs")
    assert by.retrieve(QUESTION, 1, "")
    client_.delete_collection("docs")
    write_rows(tmp_path, "docs", ("Another text.",))
    assert [one.text for one in by.retrieve(QUESTION, 3, "")] == ["Another text."]
    with pytest.raises(ApiError, match="nothing to look for"):
        by.retrieve(" ", 1, "")


def test_a_database_that_fails_is_503_and_says_nothing_of_it(tmp_path: Path) -> None:
    write_rows(tmp_path, "docs")

    class Broken:
        def get_collection(self, *_: Any, **__: Any) -> Any:
            raise RuntimeError("/mnt/secret is full")

    with pytest.raises(ApiError) as raised:
        replace(opened(tmp_path), client=Broken()).retrieve(QUESTION, 1, "")
    assert raised.value.failed.status == 503
    assert raised.value.failed.retry_after
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize("part", ["embed", "text_of"])
def test_an_embedding_or_a_text_that_fails_is_503_as_well(tmp_path: Path, part: str) -> None:
    write_rows(tmp_path, "docs")

    def fails(_: Any) -> Any:
        raise RuntimeError("/mnt/secret is gone")

    parts: dict[str, Any] = {part: fails}
    with pytest.raises(ApiError) as raised:
        replace(opened(tmp_path), **parts).retrieve(QUESTION, 1, "")
    assert raised.value.failed.status == 503
    assert "secret" not in str(raised.value)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scores_of_an_inner_product_are_numbers(tmp_path: Path) -> None:
    """Its distances are one minus the product, which has no least value."""
    rows = database(tmp_path).create_collection(
        "docs", embedding_function=None, metadata={"hnsw:space": "ip"}
    )
    vectors: Any = [[100.0 * value for value in hash_vector(text)] for text in TEXTS]
    rows.add(ids=list("abc"), documents=list(TEXTS), embeddings=vectors)

    def embed(text: str) -> list[float]:
        return [100.0 * value for value in hash_vector(text)]

    found = replace(opened(tmp_path), embed=embed).retrieve(QUESTION, 3, "")
    assert found[0].text == TEXTS[0]
    scores = [one.score for one in found]
    assert all(score is not None and math.isfinite(score) for score in scores)
    assert scores == sorted(scores, key=lambda one: -(one or 0))
    assert retrieval.score(math.nan) is None


def test_a_database_may_be_reached_over_http(tmp_path: Path) -> None:
    with chroma_server(tmp_path / "served") as (host, port):
        collection = chromadb.HttpClient(host, port).create_collection(
            "docs", embedding_function=None
        )
        vectors: Any = [hash_vector(text) for text in TEXTS]
        collection.add(ids=list("abc"), documents=list(TEXTS), embeddings=vectors)
        by = opened(tmp_path, chroma=f"http://{host}:{port}")
        (found,) = by.retrieve(QUESTION, 1, "")
    assert (found.id, found.text, dict(found.metadata)) == ("a", TEXTS[0], {})


# ---------------------------------------------------------------------- opening
def test_without_a_database_there_is_no_retriever() -> None:
    assert open_retriever(settings()) is None


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"chroma": "nowhere"}, "no Chroma database in nowhere"),
        ({"chroma": "http://127.0.0.1:1"}, "no Chroma server at 127.0.0.1:1"),
        ({"embedding": "./nowhere"}, "cannot load the embedding"),
        ({"collection": "docs-{namespace}"}, "needs a namespace"),
        ({"text_form": "none"}, "no form of texts"),
    ],
)
def test_what_cannot_be_opened_is_said_at_the_start(
    tmp_path: Path, values: dict[str, Any], said: str
) -> None:
    write_rows(tmp_path, "docs")
    with pytest.raises(InvalidInputError, match=said):
        opened(tmp_path, **values)


def test_vectors_of_another_length_are_refused_at_the_start(tmp_path: Path) -> None:
    collection = database(tmp_path).create_collection("docs", embedding_function=None)
    collection.add(ids=["a"], documents=["text"], embeddings=[[1.0, 0.0]])
    with pytest.raises(InvalidInputError, match="cannot be searched by the embedding hash"):
        opened(tmp_path)


def test_a_collection_that_is_not_there_is_a_warning_at_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_rows(tmp_path, "docs")
    opened(tmp_path, collection="dosc")
    assert [record.message for record in caplog.records] == [
        "there is no collection 'dosc' in the database: questions are answered with 404 until "
        "documents are ingested into it"
    ]
    new_key(tmp_path / "keys", "acme")
    opened(tmp_path, collection="of-{namespace}", api_keys=tmp_path / "keys")
    opened(tmp_path)
    assert len(caplog.records) == 1, "a tenant may have none yet"


def test_the_embedding_is_the_one_that_ingest_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rows(tmp_path, "docs")
    asked: list[str] = []

    def by_name(name: str) -> Any:
        asked.append(name)
        return hash_vector

    monkeypatch.setattr(retrieval, "embedding_by_name", by_name)
    opened(tmp_path, embedding="")
    note = tmp_path / "chroma.docs.kvcache-rag.json"
    note.write_text(json.dumps({"embed": "hash", "model": "tiny"}))
    opened(tmp_path, embedding="")
    opened(tmp_path, embedding="hash")
    assert asked == ["minilm", "hash", "hash"]
    with pytest.raises(InvalidInputError, match=r"embedded by hash; say --embed hash"):
        opened(tmp_path, embedding="minilm")
    note.write_text("[]")
    opened(tmp_path, embedding="")
    assert asked[-1] == "minilm"


def test_questions_are_embedded_as_llama_index_embeds_them(tmp_path: Path) -> None:
    module = pytest.importorskip("llama_index.kvcache_rag.commands.corpus")
    for name in ("minilm", "hash"):
        ours, theirs = embedding.embedding_by_name(name), module.embedding(name)
        assert ours(QUESTION) == pytest.approx(theirs.get_query_embedding(QUESTION), abs=1e-6)
        # Documents are embedded without any prompt, and so is what is compared with them.
        assert ours(TEXTS[0]) == pytest.approx(theirs.get_text_embedding(TEXTS[0]), abs=1e-6)


def test_models_with_a_prompt_for_questions_get_the_one_of_llama_index() -> None:
    utils = pytest.importorskip("llama_index.embeddings.huggingface.utils")
    for name in (*utils.BGE_MODELS, "intfloat/e5-small", "minilm", "./folder"):
        expected = utils.get_query_instruct_for_model_name(name)
        assert embedding._question_prompt(name) == expected


# ---------------------------------------------------------------------- tenants
@pytest.fixture
def keys(tmp_path: Path) -> dict[str, str]:
    path = tmp_path / "keys"
    return {name: new_key(path, name) for name in ("acme", "globex", "initech")}


def test_with_keys_one_collection_for_all_has_to_be_said(
    tmp_path: Path, keys: dict[str, str]
) -> None:
    write_rows(tmp_path, "docs")
    file = tmp_path / "keys"
    with pytest.raises(InvalidInputError, match=r"--collection docs-\{namespace\}.*--shared-coll"):
        opened(tmp_path, api_keys=file)
    shared = opened(tmp_path, api_keys=file, shared_collection=True)
    assert shared.retrieve(QUESTION, 1, "acme") == shared.retrieve(QUESTION, 1, "globex")


def test_tenants_read_their_own_collection_only(tmp_path: Path, keys: dict[str, str]) -> None:
    write_rows(tmp_path, "docs-acme", TEXTS[:1])
    by = opened(tmp_path, api_keys=tmp_path / "keys", collection="docs-{namespace}")
    assert [one.text for one in by.retrieve(QUESTION, 3, "acme")] == [TEXTS[0]]
    with pytest.raises(ApiError, match="'docs-globex'"):
        by.retrieve(QUESTION, 3, "globex")


def test_a_tenant_gets_answers_from_its_own_documents_and_caches(
    tmp_path: Path, keys: dict[str, str]
) -> None:
    write_rows(tmp_path, "docs-acme", TEXTS[:1])
    write_rows(tmp_path, "docs-globex", TEXTS[:1])
    given = over(tmp_path, api_keys=tmp_path / "keys", collection="docs-{namespace}")
    retriever = open_retriever(given)
    seen = {}

    async def ask(app: FastAPI) -> int:
        async with client(app) as http:
            for turn in ("acme", "acme again", "globex", "globex again"):
                reply = await http.post(
                    "/v1/rag",
                    json={"question": QUESTION},
                    headers={"authorization": f"Bearer {keys[turn.split()[0]]}"},
                )
                assert reply.status_code == 200, reply.text
                details = reply.json()["usage"]["prompt_tokens_details"]
                seen[turn] = details["cached_tokens"] > 0
            without = await http.post(
                "/v1/rag",
                json={"question": QUESTION},
                headers={"authorization": f"Bearer {keys['initech']}"},
            )
            assert without.status_code == 404
            assert "docs-initech" in without.json()["error"]["message"]
            return (await http.post("/v1/rag", json={"question": QUESTION})).status_code

    with tiny_backend(tmp_path / "kv", retriever=retriever) as backend:
        assert asyncio.run(ask(build_app(backend, given, retriever=retriever))) == 401
    # The same text, computed for one tenant, is not there for another.
    assert seen == {"acme": False, "acme again": True, "globex": False, "globex again": True}


# ---------------------------------------------------------------------- answering
def test_what_was_ingested_is_reused_with_the_first_question(tmp_path: Path) -> None:
    by = engine(tmp_path)
    write_rows(tmp_path, "docs", by=by, author="Ann")
    given = over(tmp_path, top_k=2)
    retriever = open_retriever(given)
    assert retriever is not None

    async def ask(app: FastAPI) -> list[httpx.Response]:
        body = {"question": QUESTION, "max_tokens": 16}
        further = ({}, {"top_k": 3, "model": "tiny"}, {"stream": True}, FULL)
        async with client(app) as http:
            return [await http.post("/v1/rag", json={**body, **more}) for more in further]

    with tiny_backend(tmp_path / "kv", retriever=retriever) as backend:
        app = build_app(backend, given, retriever=retriever)
        reply, more, streamed, full = asyncio.run(ask(app))
    assert reply.status_code == 200, reply.text
    found = reply.json()
    sources = retriever.retrieve(QUESTION, 2, "")
    assert found["sources"] == [
        {"id": one.id, "score": one.score, "text": one.text, "metadata": dict(one.metadata)}
        for one in sources
    ]
    assert found["sources"][0]["metadata"] == {"author": "Ann", "page": 0}
    assert (found["object"], found["model"]) == ("rag.answer", "tiny")
    expected = by.generate(QUESTION, [one.text for one in sources], max_new_tokens=16)
    assert (found["answer"], found["finish_reason"]) == (expected.text, expected.finish_reason)
    assert found["kvcache"]["misses"] == 0
    assert found["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert len(more.json()["sources"]) == 3
    events = data_of(streamed.text)
    assert [set(one) - {"id", "object", "created", "model"} for one in events[:-1]] == [
        {"sources"},
        *[{"text"}] * (len(events) - 3),
        {"finish_reason", "usage", "kvcache"},
    ]
    assert events[0]["sources"] == found["sources"]
    assert "".join(one["text"] for one in events[1:-2]) == found["answer"]
    assert events[-2]["usage"] == found["usage"]
    assert events[-1] == "[DONE]"
    assert full.json()["kvcache"]["policy"] == "FullRecompute()"


class Finding:
    """A retriever that a server only needs to have."""

    def retrieve(self, query: str, top_k: int, namespace: str) -> list[RetrievedText]:
        raise AssertionError("the backend retrieves")


async def cites(work: BackendRequest) -> AsyncGenerator[Event, None]:
    yield Started(0.0, (RetrievedText("s", "text", None, {"a": [1, 2]}),))
    if work.streaming:
        yield Piece("yes")
    yield Finished(answer())


async def test_what_is_asked_reaches_the_backend() -> None:
    backend = Scripted(cites)
    app = build_app(backend, settings(top_k=7, policy="legolink:2"), retriever=Finding())
    history = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hello."}]
    async with client(app) as http:
        first = await http.post("/v1/rag", json={"question": "And why?"})
        second = await http.post(
            "/v1/rag",
            json={
                "question": "And why?",
                "query": "Why is the sea salty?",
                "top_k": 2,
                "history": history,
                "kvcache": {"policy": "cacheblend", "ratio": 0.5},
                "max_tokens": 9,
                "temperature": 0.5,
                "seed": 3,
                "stop": ["\n"],
            },
        )
    assert first.json()["sources"] == [
        {"id": "s", "score": None, "text": "text", "metadata": {"a": [1, 2]}}
    ]
    assert second.status_code == 200
    one, other = backend.works
    assert (one.question, one.query, one.top_k) == ("And why?", "And why?", 7)
    assert (one.policy, one.namespace, one.chunks) == (LegoLink(2), "", ())
    assert (other.query, other.top_k, other.policy) == (
        "Why is the sea salty?",
        2,
        CacheBlend(0.5),
    )
    assert [(turn.role, turn.content) for turn in other.history] == [
        ("user", "Hi."),
        ("assistant", "Hello."),
    ]
    assert (other.max_new_tokens, other.stop) == (9, ("\n",))
    assert (other.options["temperature"], other.options["seed"]) == (0.5, 3)


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({}, 400, "question is missing"),
        ({"question": " "}, 400, "the question is blank"),
        ({"question": "q", "query": " "}, 400, "the query is blank"),
        ({"question": "half of a character: \ud83d"}, 400, "question"),
        ({"question": "q", "query": "\ud83d"}, 400, "query"),
        ({"question": "q", "history": [{"role": "user", "content": "\ud83d"}]}, 400, "history[0]"),
        ({"question": "q", "stop": ["\ud83d"]}, 400, "stop[0]"),
        ({"question": "q", "model": "\ud83d"}, 400, "model"),
        ({"question": "q", "\ud83d": 1}, 400, "the body"),
        ({"question": "q", "top_k": 0}, 400, "top_k"),
        ({"question": "q", "top_k": 65}, 400, "documents of 64"),
        ({"question": "q", "namespace": "globex"}, 400, "no field namespace"),
        ({"question": "q", "model": "gpt-5"}, 404, "gpt-5"),
        ({"question": "q", "kvcache": {"policy": "magic"}}, 400, "no policy 'magic'"),
        ({"question": "q", "history": [{"role": "system", "content": "x"}]}, 400, "history[0]"),
        ({"question": "q", "max_tokens": 5000}, 400, "answer_tokens of 4096"),
    ],
)
async def test_what_cannot_be_asked_is_said(body: dict[str, Any], status: int, said: str) -> None:
    app = build_app(Scripted(cites), settings(), retriever=Finding())
    async with client(app) as http:
        reply = await http.post("/v1/rag", content=json.dumps(body), headers=JSON)
    assert reply.status_code == status
    assert said in reply.json()["error"]["message"]


async def test_without_a_database_it_is_404_and_says_how_to_name_one() -> None:
    app = build_app(Scripted(cites), settings())
    async with client(app) as http:
        reply = await http.post("/v1/rag", json={"question": "q"})
    assert reply.status_code == 404
    assert "--chroma" in reply.json()["error"]["message"]
