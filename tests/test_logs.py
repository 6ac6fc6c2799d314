"""What the engine and its stores log, and what they never do: texts, tokens, names of tenants."""

from __future__ import annotations

import ast
import logging
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from serve_works import loaded, reader
from verdicts import REUSE, make_verdict

import kvcache_rag
from kvcache_rag import (
    CacheBlend,
    Combination,
    DiskStore,
    Engine,
    FullRecompute,
    InvalidInputError,
    MemoryStore,
    PromptTemplate,
    RemoteStore,
    TieredStore,
)
from kvcache_rag.generation import gate
from kvcache_rag.stores import base

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvcache_rag.stores import ChunkStore

SOURCE = Path(kvcache_rag.__file__).parent
SECRET = "Quilvane"
TEXTS = [
    f"{SECRET} keeps the red lamp in the hall of {SECRET}.",
    f"Sorin keeps the old map in the cellar of {SECRET}.",
    f"Mira keeps the blue cup in the kitchen of {SECRET}.",
]
QUESTION = f"Where does {SECRET} keep the red lamp?"


class Kept(logging.Handler):
    """Keeps what an application's handler would be given."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.fixture
def records() -> Iterator[list[logging.LogRecord]]:
    handler, root, ours = Kept(), logging.getLogger(), logging.getLogger("kvcache_rag")
    before = ours.level
    ours.setLevel(logging.DEBUG)
    root.addHandler(handler)
    yield handler.records
    root.removeHandler(handler)
    ours.setLevel(before)


def said(records: list[logging.LogRecord], text: str) -> list[logging.LogRecord]:
    """Records of ours with a text in them."""
    return [
        one for one in records if one.name.startswith("kvcache_rag") and text in one.getMessage()
    ]


def break_file(store: DiskStore, engine: Engine, text: str) -> None:
    (key,) = engine.keys([text])
    raw = bytearray(store.path(key).read_bytes())
    raw[-1] ^= 1
    store.path(key).write_bytes(raw)


# ---------------------------------------------------------------------- what is never logged
def memory(folder: Path) -> ChunkStore:
    del folder
    return MemoryStore(120_000)  # less than all chunks, so that some are evicted


def disk(folder: Path) -> ChunkStore:
    return DiskStore(folder / "disk", durable=False, max_bytes=150_000)


def tiered(folder: Path) -> ChunkStore:
    slow = DiskStore(folder / "disk", durable=False)
    return TieredStore(MemoryStore(120_000), slow)


def remote(folder: Path) -> ChunkStore:
    (folder / "far").mkdir()
    return RemoteStore((folder / "far").as_uri())


def scene(store: ChunkStore, folder: Path) -> list[str]:
    """Everything that is logged, with a secret in every text; the answers."""
    model, tokenizer, _ = loaded()
    template = PromptTemplate(system=f"Help {SECRET}.\n")
    engine = Engine(model, tokenizer, store=store, template=template, namespace=SECRET)
    keys = engine.add(TEXTS)
    history = [
        {"role": "user", "content": f"I am {SECRET}."},
        {"role": "assistant", "content": f"Hello {SECRET}."},
    ]
    answers = [
        engine.generate(QUESTION, TEXTS, history=history, max_new_tokens=4, stop=[SECRET]),
        engine.generate(QUESTION, TEXTS[::-1], policy=CacheBlend(0.3), max_new_tokens=4),
        engine.generate(QUESTION, TEXTS, policy=FullRecompute(), max_new_tokens=4),
        engine.generate(QUESTION, TEXTS, policy=Combination(), max_new_tokens=4),
        *engine.generate_batch([(QUESTION, TEXTS), (QUESTION, TEXTS[:1])], max_new_tokens=4),
        engine.complete(f"{SECRET} was", max_new_tokens=4),
    ]
    with engine.stream(QUESTION, TEXTS, max_new_tokens=4) as stream:
        answers.append((list(stream), stream.answer)[1])
    with pytest.raises(InvalidInputError):
        engine.generate(QUESTION, TEXTS, policy=SECRET)
    for path in folder.rglob("*.safetensors"):
        path.chmod(0o600)
        path.write_bytes(path.read_bytes()[:-1])  # each is damaged now
    again = Engine(model, tokenizer, store=store, template=template, namespace=SECRET)
    answers.append(again.generate(QUESTION, TEXTS, max_new_tokens=4))
    engine.delete(keys)
    store.sweep()
    engine.delete_namespace()
    store.close()
    return [answer.text for answer in answers]


@pytest.mark.parametrize("make", [memory, disk, tiered, remote], ids=lambda one: one.__name__)
def test_no_record_has_a_text_a_token_or_a_tenant_in_it(
    records: list[logging.LogRecord], tmp_path: Path, make: Any
) -> None:
    answers = scene(make(tmp_path), tmp_path)
    ours = [one for one in records if one.name.startswith("kvcache_rag")]
    assert len(ours) > 12
    formatter = logging.Formatter("%(name)s %(message)s %(threadName)s")
    for record in ours:
        line = formatter.format(record)
        held = f"{line} {record.msg} {record.args}"
        assert SECRET not in held
        assert not re.search(r"\d+, \d+, \d+", line), "a list of token ids"
        assert not re.search("[0-9a-f]{64}", line), "a whole hash"
        assert not any(len(text) > 4 and text in held for text in answers)


def test_an_ingestion_says_what_it_computed(records: list[logging.LogRecord]) -> None:
    engine = reader()
    keys = engine.add(TEXTS[:1])
    engine.add(TEXTS)
    first, second = said(records, "computed ")
    tokens = keys[0].tokens
    nbytes = engine.nbytes(keys[0])
    assert f"computed 1 of 1 chunks: {tokens} tokens, {nbytes} bytes, 0." in first.getMessage()
    assert second.getMessage().startswith("computed 2 of 3 chunks: ")
    assert {first.levelno, second.levelno} == {logging.INFO}


def test_an_answer_is_one_record_and_its_misses_another(records: list[logging.LogRecord]) -> None:
    engine = reader()
    engine.add(TEXTS[:1])
    metrics = engine.generate(QUESTION, TEXTS, max_new_tokens=2).metrics
    (answered,) = said(records, "answered by Reuse(")
    assert answered.levelno == logging.INFO
    assert (
        f"{metrics.reused_tokens} tokens reused, {metrics.computed_tokens} computed, 2 generated, "
        f"first after {metrics.ttft:.3f} s of {metrics.total:.3f} s"
    ) in answered.getMessage()
    (missing,) = said(records, "chunks that were missing")
    tokens = [miss.tokens for miss in metrics.missed]
    assert missing.levelno == logging.DEBUG
    assert missing.getMessage().endswith(
        f": 1 ({tokens[0]} tokens, not prefilled), 2 ({tokens[1]} tokens, not prefilled)"
    )


def test_each_answer_of_a_batch_and_of_a_stream_is_logged(
    records: list[logging.LogRecord],
) -> None:
    engine = reader()
    engine.generate_batch([(QUESTION, TEXTS), (QUESTION, TEXTS[:1])], max_new_tokens=2)
    assert len(said(records, "answered by Reuse(")) == 2
    list(engine.stream(QUESTION, TEXTS, max_new_tokens=2))
    assert len(said(records, "answered by Reuse(")) == 3
    engine.complete("The red lamp", max_new_tokens=1)
    assert len(said(records, "answered by FullRecompute(")) == 1


def test_a_full_prefill_by_the_gate_is_a_warning_once(
    records: list[logging.LogRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "_told", set())
    engine = reader(gate=make_verdict(reader().identity, {REUSE: 0.5}))
    for _ in range(2):
        engine.generate(QUESTION, TEXTS, max_new_tokens=1)
    fallbacks = said(records, "fell back to FullRecompute(): ")
    assert [one.levelno for one in fallbacks] == [logging.WARNING, logging.DEBUG]


def test_a_damaged_file_is_a_warning(records: list[logging.LogRecord], tmp_path: Path) -> None:
    store = DiskStore(tmp_path, durable=False)
    engine = reader(store=store)
    (key,) = engine.add(TEXTS[:1])
    break_file(store, engine, TEXTS[0])
    engine.generate(QUESTION, TEXTS[:1], max_new_tokens=1)
    (warning,) = said(records, "was put aside")
    assert warning.levelno == logging.WARNING
    assert f"disk: the file of chunk {key.digest[:12]} was put aside: the " in warning.getMessage()


def test_what_cannot_be_written_warns_once_in_a_while(
    records: list[logging.LogRecord], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader(store=DiskStore(tmp_path, durable=False, max_bytes=100)).add(TEXTS)
    failed = said(records, "disk: a chunk could not be written: a file of ")
    assert [one.levelno for one in failed] == [logging.WARNING, *[logging.DEBUG] * 3]
    records.clear()
    monkeypatch.setattr(base, "_PAUSE", 0.0)
    reader(store=MemoryStore(10)).add(TEXTS)
    failed = said(records, "memory: a chunk could not be written: a chunk of ")
    assert [one.levelno for one in failed] == [logging.WARNING] * 4


def test_a_store_that_keeps_nothing_on_purpose_does_not_warn(
    records: list[logging.LogRecord],
) -> None:
    store = MemoryStore(0)
    reader(store=store).add(TEXTS[:1])
    assert store.stats().put_failures
    assert said(records, "could not be written") == []


def test_a_remote_that_fails_warns(records: list[logging.LogRecord], tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    store = RemoteStore((tmp_path / "far").as_uri(), retries=0, pause=0.0)
    engine = reader(store=store)
    (tmp_path / "far").rename(tmp_path / "gone")
    (tmp_path / "far").write_text("no folder")
    engine.add(TEXTS[:1])
    warnings = [one for one in said(records, "remote: ") if one.levelno == logging.WARNING]
    assert warnings
    assert all("failed" in one.getMessage() or "written" in one.getMessage() for one in warnings)


def test_evictions_and_deletions_are_counted(records: list[logging.LogRecord]) -> None:
    engine = reader(store=MemoryStore(120_000))
    engine.add(TEXTS)
    evictions = engine.store.stats().evictions
    assert evictions
    told = said(records, "chunks were evicted")
    assert sum(int(one.getMessage().split()[1]) for one in told) == evictions
    dropped = engine.delete_namespace()
    (deleted,) = said(records, f"memory: a namespace was deleted, with {dropped} chunks")
    assert deleted.levelno == logging.INFO


# ---------------------------------------------------------------------- how it is logged
def test_the_library_installs_no_handler(records: list[logging.LogRecord]) -> None:
    """Warnings reach stderr by Python's last resort where nothing is configured."""
    reader().generate(QUESTION, TEXTS, max_new_tokens=1)
    ours = [
        logging.getLogger(name)
        for name in logging.Logger.manager.loggerDict
        if name.split(".")[0] == "kvcache_rag"
    ]
    assert records
    assert len(ours) > 4
    assert [one.name for one in ours if one.handlers or not one.propagate] == []


def test_messages_are_formatted_only_where_they_are_wanted() -> None:
    """The text of a record is a constant, and its values are arguments."""
    levels = {"debug", "info", "warning", "error", "exception", "critical"}
    loggers = {"LOG", "_LOG", "_LOGGER"}
    eager = []
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            owner = getattr(node.func.value, "id", getattr(node.func.value, "attr", ""))
            if node.func.attr in levels and owner in loggers:
                first = node.args[0]
                if isinstance(first, ast.JoinedStr | ast.BinOp):
                    eager.append(f"{path.relative_to(SOURCE)}:{node.lineno}")
    assert eager == []
