"""Rows and their KV stay in step, whatever fails; on real Chroma collections in memory."""

from __future__ import annotations

import dataclasses
import threading
import uuid
from concurrent.futures import CancelledError
from functools import partial
from inspect import signature
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import DEFAULT, Mock

import access
import chromadb
import pytest
from chunks import bits, flat
from small import make_model, make_tokenizer
from verdicts import REUSE, make_verdict
from zoo import build, byte_tokenizer

from kvcache_rag import (
    DiskStore,
    Engine,
    FullRecompute,
    InvalidInputError,
    MemoryStore,
    PromptTemplate,
    RemoteStore,
    Reuse,
    TieredStore,
)
from kvcache_rag.engine import like
from kvcache_rag.errors import FingerprintMismatchError
from kvcache_rag.generation import StoredChunk
from kvcache_rag.integration import (
    REFERENCE_KEYS,
    NewRow,
    Reference,
    References,
    RowPrefiller,
    Rows,
    open_engine,
    text_digest,
)
from kvcache_rag.settings import EngineSettings, LocalSettings, StoreSettings

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TEXTS = ["alpha is here", "beta is there", "gamma is nowhere"]


@pytest.fixture(scope="module")
def measured() -> Engine:
    template = PromptTemplate(system="Read.\n")
    return Engine(make_model(), make_tokenizer(), store=MemoryStore(), template=template)


@pytest.fixture
def engine(measured: Engine) -> Engine:
    store: Any = measured.store
    MemoryStore.__init__(store)
    return measured


@pytest.fixture
def rows() -> Rows:
    client = chromadb.EphemeralClient()
    return Rows(client.create_collection(f"c{uuid.uuid4().hex}", embedding_function=None))


@pytest.fixture
def prefiller(rows: Rows, engine: Engine) -> RowPrefiller:
    return RowPrefiller(rows, engine)


def new_rows(texts: list[str], prefix: str = "") -> list[NewRow]:
    return [
        NewRow(f"{prefix}{number}", text, {}, [float(number), 1.0])
        for number, text in enumerate(texts)
    ]


def held(engine: Engine, texts: list[str]) -> list[bool]:
    """Which chunks are left once everything that was released has gone."""
    engine.store.sweep()
    return [engine.store.contains(key) for key in engine.keys(texts)]


# ---------------------------------------------------------------------- references
def test_a_reference_survives_a_row(engine: Engine) -> None:
    (key,) = engine.add(TEXTS[:1])
    reference = Reference.of(key, TEXTS[0], engine)
    assert set(reference.to_metadata()) == set(REFERENCE_KEYS)
    assert Reference.from_metadata({"mine": 1, **reference.to_metadata()}) == reference
    assert reference.resolve(engine) == key
    assert reference.chunk(TEXTS[0], engine) == StoredChunk(key, TEXTS[0])


NO_REFERENCE: list[Any] = [
    *("", "../x", "a/b", "\0", "-1", "1e300", "f" * 63 + "g", "é" * 64, "a" * 100_000),
    *(-1, -(2**63), 2**63, 1e19, 1e300, -1e300, float("inf"), float("-inf"), float("nan")),
    *([], [1], ["a"], [1.5], [True], None),
]


@pytest.mark.parametrize("name", REFERENCE_KEYS)
def test_what_no_reference_can_say_is_none(engine: Engine, name: str) -> None:
    """A length beyond any failed each question that found the row, and kept it from being read."""
    metadata = Reference.of(engine.keys(TEXTS[:1])[0], TEXTS[0], engine).to_metadata()
    for value in NO_REFERENCE:
        assert Reference.from_metadata({**metadata, name: value}) is None, value
    del metadata[name]
    assert Reference.from_metadata(metadata) is None, "half a reference"


def test_a_changed_text_or_another_model_gets_the_text(engine: Engine) -> None:
    (key,) = engine.add(TEXTS[:1])
    reference = Reference.of(key, TEXTS[0], engine)
    changed = reference.chunk("alpha was here", engine)
    assert (changed.text, changed.outdated) == ("alpha was here", "other text")
    careful = PromptTemplate(system="Read carefully.\n")
    known = References()
    known.note(reference)
    for other in (
        Engine(make_model(), make_tokenizer(), template=careful),
        Engine(build("recurrent_gemma"), byte_tokenizer(), template=engine.template),  # has none
    ):
        assert reference.resolve(other) is None
        foreign = reference.chunk(TEXTS[0], other)
        assert (foreign.text, foreign.outdated) == (TEXTS[0], "other model")
    assert known.chunk(TEXTS[0], other) == TEXTS[0]


def test_the_wrapper_is_part_of_the_digest(engine: Engine) -> None:
    template = PromptTemplate(system="Read.\n", chunk_start="[")
    other = Engine(make_model(), make_tokenizer(), template=template)
    assert text_digest(TEXTS[0], engine) != text_digest(TEXTS[0], other)
    assert text_digest("\ud800", engine) != text_digest("\ud801", engine)


def test_references_are_found_by_text_and_forgotten_in_order(engine: Engine) -> None:
    known = References(limit=2)
    keys = engine.add(TEXTS)
    for key, text in zip(keys, TEXTS, strict=True):
        known.note(Reference.of(key, text, engine))
    found = [known.chunk(text, engine) for text in TEXTS]
    assert found == [TEXTS[0], *map(StoredChunk, keys[1:], TEXTS[1:])]


def test_a_reference_of_another_model_does_not_push_out_ours(engine: Engine) -> None:
    known = References()
    (key,) = engine.add(TEXTS[:1])
    reference = Reference.of(key, TEXTS[0], engine)
    known.note(reference)
    known.note(dataclasses.replace(reference, spec="0" * 64))
    assert known.chunk(TEXTS[0], engine) == StoredChunk(key, TEXTS[0])


# ---------------------------------------------------------------------- writing
def test_rows_get_references_and_blank_ones_none(prefiller: RowPrefiller, engine: Engine) -> None:
    texts = [*TEXTS, "  "]
    prefiller.write(new_rows(texts), texts)
    found = {row.id: row for row in prefiller.rows.get()}
    assert [found[id_].document for id_ in "0123"] == texts
    references = [Reference.from_metadata(found[id_].metadata) for id_ in "0123"]
    assert references[3] is None
    assert [one and one.key for one in references[:3]] == [k.digest for k in engine.keys(TEXTS)]
    assert engine.store.stats().puts == 3


def test_without_engine_rows_are_only_rows(rows: Rows) -> None:
    prefiller = RowPrefiller(rows, None)
    prefiller.write(new_rows(TEXTS), TEXTS)
    prefiller.drop(rows.get())
    assert [row.metadata for row in rows.get()] == [{}, {}, {}]
    with pytest.raises(InvalidInputError, match="engine="):
        prefiller.fill(lambda row: row.document)


def raising(error: BaseException) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


def failing_later(collection: Any) -> Any:
    """A collection that takes one row at a time, and whose second `upsert` fails."""
    failing = Mock(wraps=collection)
    failing.name, failing.id = collection.name, collection.id
    failing._client.get_max_batch_size.return_value = 1
    failing.upsert.side_effect = [DEFAULT, RuntimeError("disk full")]
    return failing


def test_a_failed_write_leaves_what_was_computed_for_the_next_try(
    prefiller: RowPrefiller, engine: Engine
) -> None:
    prefiller.write(new_rows(["old one", "old two"]), ["old one", "old two"])
    failing = RowPrefiller(Rows(failing_later(prefiller.rows.collection)), engine)
    with pytest.raises(RuntimeError, match="disk full"):
        failing.write(new_rows(TEXTS[:2]), TEXTS[:2])
    assert [row.document for row in prefiller.rows.get()] == [TEXTS[0], "old two"]
    assert held(engine, TEXTS[:2]) == [True, True]
    assert held(engine, ["old one", "old two"]) == [False, True]


@pytest.mark.parametrize("moment", ["before the row is written", "after it was looked for"])
def test_a_text_deleted_while_it_is_added_is_a_miss_at_most(
    prefiller: RowPrefiller, engine: Engine, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    prefiller.write(new_rows(TEXTS[:1]), TEXTS[:1])
    rows = prefiller.rows
    adder = RowPrefiller(Rows(rows.collection), engine)

    def delete() -> None:
        gone = rows.get(ids=["0"], metadata_only=True)
        rows.delete(["0"])
        prefiller.drop(gone)

    def add() -> None:
        adder.write(new_rows(TEXTS[:1], "new"), TEXTS[:1])

    if moment.startswith("before"):
        _once(monkeypatch, adder.rows, "put", delete)
        add()
    else:
        _once(monkeypatch, engine, "delete", add)
        delete()
    assert [row.id for row in rows.get()] == ["new0"]
    assert held(engine, TEXTS[:1]) == [False]
    assert adder.fill(lambda row: row.document or "") == 0, "its reference is right"
    assert held(engine, TEXTS[:1]) == [True]


def _once(
    monkeypatch: pytest.MonkeyPatch, target: object, name: str, first: Callable[[], None]
) -> None:
    real, done = getattr(target, name), threading.Event()

    def call(*arguments: Any, **options: Any) -> Any:
        if not done.is_set():
            done.set()
            first()
        return real(*arguments, **options)

    monkeypatch.setattr(target, name, call)


# ---------------------------------------------------------------------- embedded meanwhile
@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of prefilling for each text."""
    monkeypatch.setattr("kvcache_rag.prefill.BATCH_TOKENS", 32)


def embedded(texts: list[str]) -> list[list[float]]:
    """The vectors of `new_rows`, whose texts differ in their first letter."""
    return [[float(number), 1.0] for number in range(len(texts))]


def unembedded(texts: list[str]) -> list[NewRow]:
    return [dataclasses.replace(row, embedding=None) for row in new_rows(texts)]


@pytest.mark.usefixtures("small_batches")
def test_rows_embedded_meanwhile_are_those_embedded_before(
    prefiller: RowPrefiller, engine: Engine
) -> None:
    texts = [*TEXTS, " ", TEXTS[0]]

    def kept() -> Any:
        rows = prefiller.rows.collection.get(include=["embeddings", "documents", "metadatas"])
        layout = access.chunk_layout(engine)
        chunks = [engine.store.get(key, layout).chunk for key in engine.keys(TEXTS)]
        tensors = [bits(tensor) for chunk in chunks for tensor in flat(chunk)]
        vectors = rows["embeddings"].tolist()
        return vectors, rows["ids"], rows["documents"], rows["metadatas"], tensors

    prefiller.write(new_rows(texts), texts)
    before = kept()
    prefiller.delete(prefiller.rows.get())
    assert held(engine, TEXTS) == [False] * 3
    prefiller.write(unembedded(texts), texts, embed=embedded)
    assert kept() == before
    assert held(engine, TEXTS) == [True] * 3
    prefiller.write([], [], embed=lambda _: pytest.fail("there is nothing to embed"))


def test_embedding_and_prefilling_meet(
    prefiller: RowPrefiller, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    meeting, mine = threading.Barrier(2), threading.get_ident()
    _once(monkeypatch, access.prefiller(engine), "compute", lambda: meeting.wait(20))

    def embed(texts: list[str]) -> list[list[float]]:
        assert threading.get_ident() == mine, "a client may belong to the thread of its caller"
        meeting.wait(20)
        return embedded(texts)

    prefiller.write(unembedded(TEXTS), TEXTS, embed=embed)
    assert held(engine, TEXTS) == [True] * 3


@pytest.mark.usefixtures("small_batches")
@pytest.mark.parametrize("error", [OSError("no embedding today"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("batches", [1, 3])
def test_an_embedding_that_fails_stops_prefilling(
    prefiller: RowPrefiller,
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    batches: int,
) -> None:
    compute, prefilled = access.prefiller(engine).compute, RowPrefiller._prefilled
    stops: list[threading.Event] = []
    computed: list[int] = []
    reached = threading.Event()

    def prefilling(*arguments: Any, cancelled: threading.Event, **options: Any) -> Any:
        stops.append(cancelled)
        rows = prefilled(*arguments, cancelled=cancelled, **options)
        reached.set()
        return rows

    def computing(ids: Any) -> Any:
        computed.append(len(ids))
        if batches == 1:  # the first one ends when the embedding has failed
            reached.set()
            assert stops[0].wait(20)
        return compute(ids)

    def embed(_: list[str]) -> list[list[float]]:
        assert reached.wait(20)
        raise error

    monkeypatch.setattr(RowPrefiller, "_prefilled", prefilling)
    monkeypatch.setattr(access.prefiller(engine), "compute", computing)
    with pytest.raises(type(error)) as caught:
        prefiller.write(unembedded(TEXTS), TEXTS, embed=embed)
    assert caught.value is error
    assert len(computed) == batches
    assert prefiller.rows.get() == []
    assert engine.store.stats().puts == batches, "what was computed stays"


@pytest.mark.usefixtures("small_batches")
def test_an_interruption_stops_prefilling_behind_the_embedding(
    prefiller: RowPrefiller, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = Mock(wraps=access.prefiller(engine).compute, side_effect=[DEFAULT, KeyboardInterrupt])
    monkeypatch.setattr(access.prefiller(engine), "compute", compute)
    with pytest.raises(KeyboardInterrupt):
        prefiller.write(unembedded(TEXTS), TEXTS, embed=embedded)
    assert (compute.call_count, prefiller.rows.get()) == (2, [])


@pytest.mark.parametrize("count", [0, 2, 4])
def test_an_embedding_that_gives_other_vectors_is_told(prefiller: RowPrefiller, count: int) -> None:
    embed = partial(lambda count, _: embedded(["x"] * count), count)
    with pytest.raises(InvalidInputError, match=f"gave {count} vectors for 3 texts"):
        prefiller.write(unembedded(TEXTS), TEXTS, embed=embed)
    assert prefiller.rows.get() == []


@pytest.mark.parametrize("embed", [None, embedded])
def test_a_text_too_long_is_written_without_a_reference_and_named(
    prefiller: RowPrefiller, engine: Engine, embed: Any
) -> None:
    texts = [TEXTS[0], "x" * 5000, TEXTS[1]]
    with pytest.warns(UserWarning, match="row '1' written without .*: it has 50.. tokens") as seen:
        prefiller.write(unembedded(texts) if embed else new_rows(texts), texts, embed=embed)
    assert len(seen) == 1
    rows = sorted(prefiller.rows.get(), key=lambda row: row.id)
    assert [row.document for row in rows] == texts
    held_by = [Reference.from_metadata(row.metadata) for row in rows]
    assert [one is not None for one in held_by] == [True, False, True]
    assert held(engine, TEXTS[:2]) == [True, True]
    with pytest.warns(UserWarning, match="row '1' "):
        assert prefiller.fill(lambda row: row.document) == 0


@pytest.mark.parametrize("embed", [None, embedded])
def test_rows_stand_although_prefilling_fails(
    prefiller: RowPrefiller, engine: Engine, embed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefiller.write(new_rows(TEXTS), TEXTS)
    with monkeypatch.context() as patch:
        patch.setattr(engine, "add", raising(RuntimeError("out of\nmemory")))
        rows = unembedded(TEXTS[:2]) if embed else new_rows(TEXTS[:2])
        said = r"^2 rows \('0', '1'\) written .*: RuntimeError: out of memory$"
        with pytest.warns(UserWarning, match=said):
            prefiller.write(rows, TEXTS[:2], embed=embed)
        with pytest.raises(RuntimeError, match="out of"):  # nothing stands behind this
            prefiller.fill(lambda row: row.document)
    assert prefiller.fill(lambda row: row.document) == 2


def test_what_stops_prefilling_on_purpose_is_no_failure(
    prefiller: RowPrefiller, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "add", raising(CancelledError()))
    with pytest.raises(CancelledError):
        prefiller.write(new_rows(TEXTS), TEXTS)
    assert prefiller.rows.get() == []


def test_kv_that_cannot_be_dropped_keeps_no_row(
    prefiller: RowPrefiller, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefiller.write(new_rows(TEXTS), TEXTS)
    monkeypatch.setattr(engine, "delete", raising(OSError("read-only")))
    with pytest.warns(UserWarning, match=r"not deleted \(OSError: read-only\); .*store gc"):
        prefiller.delete(prefiller.rows.get(ids=["0"]))
    with pytest.warns(UserWarning, match="not deleted"):
        prefiller.write([dataclasses.replace(new_rows(["new"])[0], id="1")], ["new"])
    assert {row.id: row.document for row in prefiller.rows.get()} == {"1": "new", "2": TEXTS[2]}


def test_fill_leaves_rows_alone_that_were_replaced_meanwhile(
    prefiller: RowPrefiller, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefiller.rows.put(new_rows(TEXTS))
    other = RowPrefiller(Rows(prefiller.rows.collection), engine)
    _once(monkeypatch, engine, "add", lambda: other.write(new_rows(["changed"]), ["changed"]))
    assert prefiller.fill(lambda row: row.document) == 2
    (row,) = prefiller.rows.get(ids=["0"])
    reference = Reference.from_metadata(row.metadata)
    assert reference is not None
    assert reference.text == text_digest("changed", engine)
    assert held(engine, ["changed", *TEXTS[1:]]) == [True, True, True]


def test_rows_deleted_while_they_are_written_take_their_chunk_along(
    prefiller: RowPrefiller, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = prefiller.rows
    other = RowPrefiller(Rows(rows.collection), engine)
    prefiller.write(new_rows(TEXTS), TEXTS)
    _once(monkeypatch, engine, "add", lambda: other.delete(rows.get(ids=["0"])))
    assert prefiller.fill(lambda row: row.document) == 0
    assert sorted(row.id for row in rows.get()) == ["1", "2"]
    assert held(engine, TEXTS) == [False, True, True]


def test_a_collection_that_is_gone_is_known_first(
    prefiller: RowPrefiller, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def drop() -> None:
        chromadb.EphemeralClient().delete_collection(prefiller.rows.collection.name)

    _once(monkeypatch, engine, "add", drop)
    with pytest.raises(chromadb.errors.NotFoundError):
        prefiller.write(new_rows(TEXTS), TEXTS)
    puts = engine.store.stats().puts
    with pytest.raises(chromadb.errors.NotFoundError):
        prefiller.write(new_rows(TEXTS), TEXTS)
    assert engine.store.stats().puts == puts


def test_writers_of_one_collection_wait_for_each_other(rows: Rows) -> None:
    client = chromadb.EphemeralClient()
    other = Rows(client.create_collection(f"c{uuid.uuid4().hex}", embedding_function=None))
    entered = threading.Event()

    def enter() -> None:
        with Rows(rows.collection).writing():
            entered.set()

    thread = threading.Thread(target=enter)
    with rows.writing(), other.writing():
        thread.start()
        assert not entered.wait(0.1)
    thread.join(10)
    assert entered.is_set()


def test_the_first_error_is_told_when_the_database_is_gone(
    prefiller: RowPrefiller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefiller.rows, "put", raising(RuntimeError("first")))
    monkeypatch.setattr(prefiller.rows, "holding", raising(RuntimeError("second")))
    with pytest.raises(RuntimeError, match="first"):
        prefiller.write(new_rows(TEXTS), TEXTS)


# ---------------------------------------------------------------------- opening
def test_an_engine_from_settings(tmp_path: Path) -> None:
    engine = open_engine("tiny", kv_dir=tmp_path, kv_max_bytes=10**6, system_prompt="Read.\n")
    assert isinstance(engine.store, TieredStore)
    assert engine.template.system == "Read.\n"
    assert engine.template.chunk_start  # the rest is the model's own template
    engine.add(TEXTS)
    assert list(tmp_path.rglob("*.safetensors"))


def test_a_gate_is_about_the_instruction_that_is_set(tmp_path: Path) -> None:
    file = tmp_path / "verdict.json"
    named = {"system_prompt": "Read.\n"}
    make_verdict(open_engine("tiny", **named).identity, {REUSE: 0.831}).save(file)
    answer = open_engine("tiny", **named, gate=file).generate("Who?", TEXTS, max_new_tokens=2)
    assert answer.metrics.gate.startswith("fell back to FullRecompute()")
    with pytest.raises(FingerprintMismatchError):
        open_engine("tiny", gate=file)


def test_whatever_of_the_settings_is_an_option_of_the_engine_is_handed_on(tmp_path: Path) -> None:
    loaded = {"tokenizer", "dtype", "device", "revision", "model_kwargs", "tokenizer_kwargs"}
    loaded |= {"adapter", "backend", "weight_format"}
    own = {"model", "template", "system_prompt", *loaded}
    with pytest.raises(InvalidInputError, match="tokenizer="):
        open_engine(make_model())
    assert EngineSettings.model_fields.keys() - own <= signature(Engine).parameters.keys()
    store = StoreSettings(kv_dir=str(tmp_path)).open_store(MemoryStore())
    settings = EngineSettings(context_window=100, rotation="copied")
    engine = settings.open_engine(
        store, namespace="tenant", model=make_model(), tokenizer=make_tokenizer()
    )
    assert (engine.namespace, engine.context_window, engine.store) == ("tenant", 100, store)
    assert engine._options["rotation"] == "copied"


def test_settings_are_taken_from_what_says_them_by_name() -> None:
    source = SimpleNamespace(model="m", dtype=None, device="cpu", revision="r", kv_codec="int8")
    found = EngineSettings.from_source(source, device="cuda")
    assert found == EngineSettings(model="m", device="cuda", revision="r")


def test_a_store_is_opened_by_its_place(tmp_path: Path) -> None:
    memory = MemoryStore()
    assert isinstance(StoreSettings().open_store(), MemoryStore)
    assert StoreSettings().open_store(memory) is memory
    folder = StoreSettings(kv_dir=str(tmp_path), kv_codec="int8", kv_max_bytes=7, kv_ttl=8)
    disk = folder.open_store(namespace="n")
    assert isinstance(disk, DiskStore)
    assert (disk.codec.name, disk.max_bytes, disk.ttl) == ("int8-kc-vt", 7, 8)
    assert disk.namespace == "n"
    place = "memory://bucket/kv"
    assert isinstance(
        StoreSettings(kv_dir=place, kv_max_bytes=7).open_store(retries=1), RemoteStore
    )
    tiered = StoreSettings(kv_dir=str(tmp_path)).open_store(memory)
    assert isinstance(tiered, TieredStore)
    assert tiered.tiers[0] is memory
    with pytest.raises(InvalidInputError, match="leave kv_ttl out"):
        StoreSettings(kv_dir=place, kv_ttl=7).open_store()


@pytest.mark.parametrize(
    ("device", "codec", "kept"),
    [("cpu", "int8", "int8-kc-vt"), ("cuda", "int8", None), ("cpu", "int4", None)],
)
def test_the_form_of_chunks_in_memory(device: str, codec: str, kept: str | None) -> None:
    found = LocalSettings.from_source(None, kv_codec=codec, device=device).memory_codec()
    assert (found and found.name) == kept


def test_an_engine_like_another_keeps_every_option_that_is_not_changed() -> None:
    options: dict[str, Any] = {
        "store": MemoryStore(),
        "combinations": MemoryStore(0),
        "template": PromptTemplate(system="Read.\n"),
        "policy": FullRecompute(),
        "namespace": "tenant",
        "context_window": 100,
        "packed_attention": False,
        "auxiliary": None,
        "gate": None,
        "rotation": "copied",
        "prompt_memory": 1 << 20,
        "none_below": -1e6,
    }
    options |= {"model": make_model(), "tokenizer": make_tokenizer()}
    assert options.keys() == signature(Engine).parameters.keys()
    engine = Engine(**options)
    assert like(engine)._options == engine._options == options
    engine.policy = Reuse()
    changed = like(engine.in_namespace("other"), store=None)
    kept = {**options, "policy": engine.policy, "namespace": "other"}
    assert changed._options == {**kept, "store": None}
    assert changed.store is not engine.store
