"""Every public object is copied and sent, or says in one sentence why it is not."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from public import HOMES, TOP, public
from sending import Row, check_elsewhere, check_here
from small import make_model, make_tokenizer
from verdicts import make_verdict

from kvcache_rag import DiskStore, Engine, MemoryStore, RemoteStore, Reuse, TieredStore
from kvcache_rag.auxiliary import Auxiliary
from kvcache_rag.generation import StoredChunk
from kvcache_rag.stores import StoredChunks
from kvcache_rag.stores.folder import Folder
from kvcache_rag.verdict import Gate

NAMES = sorted([*TOP, *HOMES])
TEXTS = ["The cat sat on the mat.", "A dog ran."]
# Types and functions: sent by their names.
BY_NAME = (
    *("ByteStore", "ChunkStore", "Codec", "ReusePolicy", "Scorer", "WeightFormat"),
    *("cancellable", "in_thread", "pack_weights", "policy_by_name", "unpack_weights"),
)
ERRORS = [name for name in NAMES if name.endswith("Error")]
POLICIES = (
    *("Ape", "BestFew", "BestLast", "BestRead", "CacheBlend", "CacheClip", "Combination"),
    *("FullRecompute", "LegoLink", "ProphetKV", "Reuse"),
)
CODECS = ("Int4", "Int8", "Native")
STREAM = "neither copied nor pickled"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    engine = Engine(
        make_model(), make_tokenizer(), store=DiskStore(tmp_path_factory.mktemp("kv") / "kv")
    )
    engine.add(TEXTS)
    return engine


@pytest.fixture(scope="module")
def rows(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Row]:
    folder = tmp_path_factory.mktemp("stores")
    key = engine.keys(TEXTS)[0]
    layout = engine._bound.capturing.layout
    kept = engine.store.get(key, layout).chunk
    verdict = make_verdict(engine.identity, {repr(Reuse()): 1.0})
    # What a store keeps where others find it is there again; what it keeps in memory is not.
    held = f"value.contains(pickle.loads({pickle.dumps(key)!r}))"

    def used(store: Any) -> Any:
        store.put(key, kept)
        return store

    def read(stream: Any) -> Any:
        list(stream)
        return stream

    return {
        **{name: Row(lambda name=name: public(name)) for name in BY_NAME},
        **{
            name: Row(lambda name=name: public(name)("what"), "type(value), str(value)")
            for name in ERRORS
        },
        "MissingExtraError": Row(
            lambda: public("MissingExtraError")("package", "extra"), "str(value)"
        ),
        **{name: Row(lambda name=name: public(name)()) for name in (*POLICIES, *CODECS)},
        "Answer": Row(lambda: engine.generate("Who?", TEXTS, max_new_tokens=2)),
        "AnswerStream": Row(
            lambda: read(engine.stream("Who?", TEXTS, max_new_tokens=2)),
            refused=STREAM,
            is_copied=False,
        ),
        "AsyncAnswerStream": Row(
            lambda: engine.astream("Who?", TEXTS), refused=STREAM, is_copied=False
        ),
        "Auxiliary": Row(
            lambda: Auxiliary(engine), "type(value)", refused="auxiliary model cannot be pickled"
        ),
        "ChunkKV": Row(
            lambda: kept,
            "[value.tokens.tolist(), value.layout, [t.tolist() for g in value.tensors for t in g]]",
        ),
        "ChunkKey": Row(lambda: key),
        "DiskStore": Row(lambda: used(DiskStore(folder / "disk")), held),
        "Engine": Row(
            lambda: engine, "value.spec, value.model, value.store", refused="holds a loaded model"
        ),
        "Entry": Row(lambda: public("Entry")("name", 1, 2.0, 3.0)),
        "Explained": Row(lambda: engine.explain("Who?", TEXTS)),
        "Gate": Row(lambda: Gate(verdict), "repr(value)"),
        "MemoryStore": Row(
            lambda: used(MemoryStore(1 << 20, tier="near")), "value.max_bytes, value.tier"
        ),
        "Message": Row(lambda: public("Message")("user", "what?")),
        "Metrics": Row(lambda: engine.generate("Who?", TEXTS, max_new_tokens=2).metrics),
        "PromptIds": Row(lambda: engine.tokenize("Who?", TEXTS)),
        "PromptTemplate": Row(lambda: engine.template),
        "RemoteStore": Row(lambda: used(RemoteStore(f"file://{folder}/remote")), held),
        "StoreStats": Row(engine.store.stats),
        "StoredChunk": Row(lambda: StoredChunk(key, TEXTS[0])),
        "StoredChunks": Row(
            lambda: StoredChunks(Folder(str(folder / "bytes"))), "type(value).__name__, value.codec"
        ),
        "TieredStore": Row(
            lambda: used(TieredStore(MemoryStore(), DiskStore(folder / "below"))), held
        ),
        "Verdict": Row(lambda: verdict, "repr(value)"),  # it may hold NaN
    }


def test_every_public_name_has_a_row(rows: dict[str, Row]) -> None:
    assert sorted(rows) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_it_is_copied_and_pickled_or_says_why_not(name: str, rows: dict[str, Row]) -> None:
    check_here(rows[name])


def test_in_another_process_it_is_the_same(rows: dict[str, Row]) -> None:
    check_elsewhere(rows)
