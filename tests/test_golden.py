"""What must not change by accident, against the files of `tests/golden`.

`tools/freeze.py` writes those files, from code that is known to be right.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import shutil
import struct
import sys
from typing import TYPE_CHECKING, Any

import chromadb
import pytest
import torch
from safetensors.torch import load_file

from kvcache_rag import DiskStore, Engine, InvalidInputError, MemoryStore, PromptTemplate
from kvcache_rag.engine import like
from kvcache_rag.integration import Reference
from kvcache_rag.policies import policy_by_name
from kvcache_rag.verdict import Gate, Verdict
from kvcache_rag_lab.evaluation.datasets import read_own_questions
from kvcache_rag_lab.finetune.loop import RunFolder
from kvcache_rag_lab.scoring.ask import RecordFile
from kvcache_rag_server.keys import ApiKeys
from tests import golden_cases as cases
from tests import golden_surfaces as surfaces

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kvcache_rag.kv import ChunkKey
    from kvcache_rag.stores import Hit

GOLDEN = cases.GOLDEN
STORES: dict[str, Any] = json.loads((GOLDEN / "store.json").read_text(encoding="utf-8"))
MADE = {name: rest for name, *rest in cases.made_chunks()}
HELP = surfaces.to_pages((GOLDEN / "help.txt").read_text(encoding="utf-8"))
# Two ways to compute the same keys and values on two machines.
ROUNDING = {"bfloat16": 0.05, "float32": 1e-3}


def golden(name: str) -> Any:
    return json.loads((GOLDEN / name).read_text(encoding="utf-8"))


# Which part of `tools/freeze.py` writes a file.
PARTS = {
    **dict.fromkeys(("configuration", "interface", "projects", "representations"), "interface"),
    **dict.fromkeys(("openapi", "openapi_keys", "metrics"), "server"),
}


def accepted(name: str) -> str:
    """How a change of what users rely on is accepted, for who finds a test failed."""
    folder, _, file = name.rpartition("/")
    part = folder or PARTS.get(file.removesuffix(".json"), file.partition(".")[0])
    return (
        "Users rely on it. If it is meant: keep what was there working as docs/versions.md says, "
        f"run `python tools/freeze.py {part}`, and commit what differs with a line in CHANGELOG.md."
    )


def copied(name: str, tmp_path: Path) -> Path:
    """A copy that may be written to; git keeps no modes, so they are those of a fresh folder."""
    target = tmp_path / name
    shutil.copytree(GOLDEN / name, target, copy_function=shutil.copyfile)
    return target


# ---------------------------------------------------------------------- stored chunks
def read_header(path: Path) -> tuple[dict[str, Any], bytes, int]:
    """Header without what may vary, payload, and where that begins.

    The order of the metadata is safetensors' own, another one each time; `provenance` names the
    version of this package, and `pad` fills up what is left.
    """
    content = path.read_bytes()
    offset = 8 + struct.unpack("<Q", content[:8])[0]
    header: dict[str, Any] = json.loads(content[8:offset])
    for name in ("pad", "provenance"):
        header["__metadata__"].pop(name)
    # Tensors come in the order of the file, which json keeps.
    return (
        {**header, "order": [name for name in header if name[0] != "_"]},
        content[offset:],
        offset,
    )


@pytest.mark.parametrize("name", MADE)
def test_a_chunk_of_every_codec_and_dtype_is_read_and_written_as_ever(
    name: str, tmp_path: Path
) -> None:
    codec, key, chunk = MADE[name]
    frozen = golden("made.json")[name]
    assert key.digest == frozen["key"]
    old = DiskStore(copied(f"made/{name}", tmp_path), codec=codec)
    assert cases.tensors_digest(old.get(key, chunk.layout).chunk) == frozen["tensors"]
    new = DiskStore(tmp_path / "new", codec=codec)
    assert new.put(key, chunk)
    assert cases.tree(new.root) == cases.tree(old.root)
    assert read_header(new.path(key)) == read_header(old.path(key))


@pytest.fixture(scope="module", params=cases.VARIANTS)
def opened(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Engine, Path]:
    """Name of a variant, an engine over a copy of the golden folder, and that copy."""
    place = copied("store", tmp_path_factory.mktemp("opened"))
    return request.param, cases.open_engine(place, request.param), place


def test_a_folder_is_found_and_read_as_ever(opened: tuple[str, Engine, Path]) -> None:
    name, engine, place = opened
    frozen, before = STORES[name], cases.tree(place)
    assert engine.spec == frozen["spec"], (
        "the spec has changed: transformers, torch and the processor's rotary frequencies are part "
        "of it, beside this package"
    )
    keys = engine.keys(cases.TEXTS)
    assert [key.digest for key in keys] == frozen["keys"]
    assert [key.tokens for key in keys] == frozen["tokens"]
    assert {key.start for key in keys} == {frozen["start"]}
    store: Any = engine.store
    folder = place / frozen["folder"]
    assert store.path(keys[0]).parent.parent == folder
    layout = cases.layout_of(json.loads((folder / "spec.json").read_text(encoding="utf-8")))
    hits: list[Hit] = [store.get(key, layout) for key in keys]
    assert [cases.tensors_digest(hit.chunk) for hit in hits] == frozen["tensors"]
    answer = engine.generate(cases.QUESTION, cases.TEXTS, max_new_tokens=8)
    assert answer.text == frozen["answer"]
    assert (answer.metrics.hits, answer.metrics.misses) == ({"disk": len(keys)}, 0)
    assert (store.stats().puts, store.stats().corrupt) == (0, 0)
    assert cases.tree(place) == before


def test_a_new_folder_is_as_the_old_one(opened: tuple[str, Engine, Path], tmp_path: Path) -> None:
    """The same names; the same headers but for the checksum; values equal but for rounding."""
    name, engine, place = opened
    codec, dtype = cases.VARIANTS[name]
    like(engine, store=DiskStore(tmp_path, codec=engine.store.codec)).add(cases.TEXTS)
    folder = STORES[name]["folder"]
    paths = [tmp_path / folder / one for one in cases.tree(tmp_path / folder)]
    names = [path.relative_to(tmp_path) for path in paths]
    assert {one.suffix for one in names} == {".json", ".safetensors"}
    assert [one for one in names if not (place / one).is_file()] == []
    for path, one in zip(paths, names, strict=True):
        if path.suffix == ".json":
            found, known = (json.loads(p.read_text(encoding="utf-8")) for p in (path, place / one))
            assert found.pop("created") > known.pop("created")
            assert found == known
        elif path.suffix == ".safetensors":
            (mine, _, at), (theirs, _, there) = read_header(path), read_header(place / one)
            for header in (mine, theirs):
                assert len(header["__metadata__"].pop("xxh3_128")) == 32
            assert (mine, at) == (theirs, there)
            if codec == "native":
                found, known = load_file(path), load_file(place / one)
                near = {"rtol": ROUNDING[dtype], "atol": ROUNDING[dtype]}
                assert torch.equal(found["tokens"], known["tokens"])
                torch.testing.assert_close(found["kv"], known["kv"], **near)


def test_a_tenant_is_found_and_what_0_1_noted_of_owners_means_nothing(tmp_path: Path) -> None:
    place = copied("store", tmp_path)
    tenant = cases.open_engine(place).in_namespace(cases.TENANT)
    (key,) = tenant.keys(cases.TEXTS[:1])
    store: Any = tenant.store
    (released,) = store.path(key).parent.glob(f"{key.digest}.released-*")
    tenant.add(cases.TEXTS[:1])
    assert store.stats().puts == 0
    DiskStore(store.root, temp_age=0).sweep()
    assert not released.exists()
    assert store.contains(key)


# ---------------------------------------------------------------------- Chroma
def found_by_llama(place: str, engine: Engine) -> tuple[Any, dict[str, str]]:
    """The collection, and the texts that a question finds, by id."""
    from llama_index.core.vector_stores.types import VectorStoreQuery

    from llama_index.kvcache_rag import HashEmbedding, KVCacheVectorStore

    store = KVCacheVectorStore.from_params(cases.COLLECTIONS[0], persist_dir=place, engine=engine)
    vector = HashEmbedding(dimensions=cases.DIMENSIONS).get_query_embedding(cases.TEXTS[1])
    found = store.query(VectorStoreQuery(query_embedding=vector, similarity_top_k=5))
    assert found.ids[0] == "node-1"
    assert math.isclose(found.similarities[0], 1.0, abs_tol=1e-5)
    return store, {node.node_id: node.get_content() for node in found.nodes}


def found_by_langchain(place: str, engine: Engine) -> tuple[Any, dict[str, str]]:
    """The same."""
    from langchain_kvcache_rag import HashEmbeddings, KVCacheChroma

    embed = HashEmbeddings(cases.DIMENSIONS)
    store = KVCacheChroma(cases.COLLECTIONS[1], embed, persist_directory=place, engine=engine)
    found = store.similarity_search(cases.TEXTS[1], k=5)
    assert [document.metadata for document in found] == [{"page": 1}, {"page": 0}]
    return store, {document.id: document.page_content for document in found}


@pytest.mark.parametrize(
    ("name", "found_by"), [("llama", found_by_llama), ("langchain", found_by_langchain)]
)
def test_a_collection_finds_its_chunks_without_prefilling(
    tmp_path: Path, name: str, found_by: Callable[[str, Engine], tuple[Any, dict[str, str]]]
) -> None:
    engine = cases.open_engine(copied("store", tmp_path))
    place = str(copied("chroma", tmp_path))
    rows = golden("chroma.json")[name]["rows"]
    store, texts = found_by(place, engine)
    assert texts == {one: row["document"] for one, row in rows.items()}
    held = chromadb.PersistentClient(place).get_collection(name).get(include=["metadatas"])
    metadata = dict(zip(held["ids"], held["metadatas"] or [], strict=True))
    assert metadata == {one: row["metadata"] for one, row in rows.items()}
    for values in metadata.values():
        assert_resolves(values, engine)
    assert store.prefill_missing() == 0
    assert engine.store.stats().puts == 0


def assert_resolves(metadata: Any, engine: Engine) -> None:
    """A row's reference names a file of the store."""
    reference = Reference.from_metadata(metadata)
    assert reference is not None
    assert reference.to_metadata() == {k: v for k, v in metadata.items() if k.startswith("kv_")}
    key: ChunkKey | None = reference.resolve(engine)
    assert key is not None
    store: Any = engine.store
    assert store.contains(key)
    answer = engine.generate(cases.QUESTION, [key], max_new_tokens=1)
    assert (answer.metrics.hits, answer.metrics.misses) == ({"disk": 1}, 0)


def test_rows_refer_to_the_texts_that_a_framework_asks_with(tmp_path: Path) -> None:
    engine = cases.open_engine(copied("store", tmp_path))
    frozen, (first, second) = golden("chroma.json"), engine.keys(cases.TEXTS)
    of = {
        one: row["metadata"]["kv_key"]
        for name in frozen
        for one, row in frozen[name]["rows"].items()
    }
    assert (of["document-0"], of["document-1"]) == (first.digest, second.digest)
    (written,) = engine.keys([f"source: golden.txt\n\n{cases.TEXTS[0]}"])
    assert (of["node-0"], of["node-1"]) == (written.digest, second.digest)


# ---------------------------------------------------------------------- verdicts
@pytest.mark.parametrize("name", ["verdict.json", "verdict_nulls.json"])
def test_a_verdict_is_read_and_written_as_ever(name: str, tmp_path: Path) -> None:
    verdict = Verdict.load(GOLDEN / name)
    assert repr(verdict) == golden("verdicts.json")[name]
    verdict.save(tmp_path / name)
    assert (tmp_path / name).read_bytes() == (GOLDEN / name).read_bytes()


@pytest.mark.parametrize("policy", ["reuse", "legolink:4", "cacheblend:0.5"])
def test_a_gate_accepts_a_verdict(policy: str) -> None:
    read, found = cases.open_engine(GOLDEN / "store"), policy_by_name(policy)

    def gated(**options: Any) -> Engine:
        gate = Gate(GOLDEN / "verdict.json", below="error", **options)
        return like(read, store=MemoryStore(), gate=gate)

    answer = gated(threshold=0.6).generate(
        cases.QUESTION, cases.TEXTS, policy=found, max_new_tokens=4
    )
    assert (answer.metrics.gate, answer.metrics.policy) == ("", repr(found))
    with pytest.raises(InvalidInputError, match=r"kept 100\.0 %.*prove only 63\.6 %"):
        gated().generate(cases.QUESTION, cases.TEXTS, policy=found)


# ---------------------------------------------------------------------- settings
def test_a_prompt_template_is_read_as_ever(tmp_path: Path) -> None:
    assert PromptTemplate.load(GOLDEN / "settings") == cases.TEMPLATE


def test_api_keys_are_read_as_ever(tmp_path: Path) -> None:
    shutil.copyfile(GOLDEN / "settings" / "api_keys.txt", tmp_path / "keys")
    (tmp_path / "keys").chmod(0o600)
    known = ApiKeys.load(tmp_path / "keys")
    assert len(known.known) == len(cases.API_KEYS)
    assert {key: known.caller(key) for key in cases.API_KEYS} == cases.API_KEYS
    assert known.caller("a-key-that-nobody-knows") is None


@pytest.mark.parametrize("name", cases.FINETUNES)
def test_a_fine_tuning_run_is_taken_up(name: str, tmp_path: Path) -> None:
    frozen, config = GOLDEN / "settings" / f"finetune-{name}.json", cases.FINETUNES[name]
    assert config.settings() == json.loads(frozen.read_text(encoding="utf-8"))
    shutil.copyfile(frozen, tmp_path / "settings.json")
    (tmp_path / "checkpoint.pt").touch()  # only its being there is looked at
    with RunFolder(tmp_path).open(config.settings()) as is_going_on:
        assert is_going_on
    with RunFolder(tmp_path / "new").open(config.settings()) as is_going_on:
        assert not is_going_on
    assert (tmp_path / "new" / "settings.json").read_bytes() == frozen.read_bytes()


def test_records_of_an_evaluation_are_read_and_written_as_ever(tmp_path: Path) -> None:
    frozen = (GOLDEN / "settings" / "records.jsonl").read_bytes()
    (tmp_path / "old").write_bytes(frozen)
    old, new = RecordFile(tmp_path / "old"), RecordFile(tmp_path / "new")
    for name, value in cases.NOTES.items():
        old.note(name, value)  # another value would be refused
        new.note(name, value)
    found = [old.get(record.place, record.digest) for record in cases.RECORDS]
    assert tuple(found) == cases.RECORDS
    new.append(cases.RECORDS)
    assert (tmp_path / "old").read_bytes() == (tmp_path / "new").read_bytes() == frozen


def test_questions_of_ones_own_are_read_as_ever() -> None:
    assert tuple(read_own_questions(GOLDEN / "settings" / "questions.jsonl")) == cases.QUESTIONS


def test_what_ingest_noted_is_read_and_written_as_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from llama_index.kvcache_rag.commands.settings import FullPrefill, Settings

    frozen = (GOLDEN / "settings" / "ingest.json").read_text()
    monkeypatch.chdir(tmp_path)
    found = Settings.from_text(frozen, "chroma", "docs")
    assert found == Settings(full=FullPrefill(*cases.FULL), **cases.INGEST)  # type: ignore[arg-type]  # of JSON
    assert found.to_text() == frozen


def test_settings_of_frameworks_are_taken_up() -> None:
    from langchain_kvcache_rag import ChatKVCache
    from llama_index.kvcache_rag import HashEmbedding, KVCacheLLM

    frozen = golden("settings/llama_index.json")
    for name, kind in (("embedding", HashEmbedding), ("llm", KVCacheLLM)):
        again: Any = kind.from_dict(frozen[name])
        assert json.loads(cases.to_json(again.to_dict())) == frozen[name]
    frozen = golden("settings/langchain.json")["settings"]
    chat = ChatKVCache(**{name: one for name, one in frozen.items() if one is not None})
    assert chat.model_dump(mode="json") == frozen


# ---------------------------------------------------------------------- surfaces
SURFACES: dict[str, Callable[[], Any]] = {
    "configuration.json": surfaces.configuration,
    "interface.json": surfaces.interface,
    "metrics.json": lambda: asyncio.run(cases.metric_families()),
    "openapi.json": lambda: cases.openapi(None),
    "openapi_keys.json": lambda: cases.openapi(GOLDEN / "settings" / "api_keys.txt"),
    "projects.json": surfaces.projects,
    "representations.json": surfaces.representations,
    "settings/langchain.json": cases.langchain_values,
    "settings/llama_index.json": lambda: {
        name: one.to_dict() for name, one in cases.llama_index_objects().items()
    },
}


@pytest.mark.parametrize("name", SURFACES)
def test_a_surface_is_as_ever(name: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)  # of what makes the schema
    now = json.loads(cases.to_json(SURFACES[name]()))
    found = list(surfaces.differences(golden(name), now))
    assert not found, "\n".join((f"{name} has changed:", *found[:40], accepted(name)))


def test_help_is_as_ever() -> None:
    found = surfaces.to_pages(surfaces.from_pages(surfaces.help_pages()))
    assert list(found) == list(HELP), accepted("help.txt")
    for name, page in HELP.items():
        if sys.version_info[:2] == (3, 11):
            assert found[name] == page, f"{name}: {accepted('help.txt')}"
        else:  # argparse lays out pages in another way
            assert surfaces.options_of(found[name]) == surfaces.options_of(page), name


def test_every_entry_point_leads_somewhere() -> None:
    found = list(surfaces.entry_point_targets())
    assert len(found) == 18
    for group, name, value in found:
        if group == "kvcache_rag.commands":
            assert isinstance(value.HELP, str), name
            assert callable(value.add_arguments), name
            assert callable(value.run), name
        elif group == "kvcache_rag.kernels":
            assert set(value.missing()) == {"attention", "linear layers", "rounded weights"}
        else:
            assert callable(value), name
