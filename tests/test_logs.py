"""What the engine and its stores log, and what they never do: texts, tokens, names of tenants."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import TYPE_CHECKING

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
    from collections.abc import Callable

    from kvcache_rag.stores import ChunkStore

SOURCE = Path(kvcache_rag.__file__).parent
SECRET = "Quilvane"
TEXTS = [
    f"{SECRET} keeps the red lamp in the hall of {SECRET}.",
    f"Sorin keeps the old map in the cellar of {SECRET}.",
    f"Mira keeps the blue cup in the kitchen of {SECRET}.",
]
QUESTION = f"Where does {SECRET} keep the red lamp?"


@pytest.fixture(autouse=True)
def everything(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "kvcache_rag")


def said(caplog: pytest.LogCaptureFixture, text: str = "") -> list[logging.LogRecord]:
    """Records of ours with a text in them."""
    ours = [one for one in caplog.records if one.name.startswith("kvcache_rag")]
    return [one for one in ours if text in one.getMessage()]


def levels(found: list[logging.LogRecord]) -> list[int]:
    return [one.levelno for one in found]


# ---------------------------------------------------------------------- what is never logged
def remote(folder: Path) -> RemoteStore:
    (folder / "far").mkdir()
    return RemoteStore((folder / "far").as_uri(), retries=0, pause=0.0)


# Less than all chunks fit into the memory, so that some are evicted.
STORES: dict[str, Callable[[Path], ChunkStore]] = {
    "memory": lambda _: MemoryStore(120_000),
    "disk": lambda folder: DiskStore(folder, durable=False, max_bytes=150_000),
    "tiered": lambda folder: TieredStore(MemoryStore(120_000), DiskStore(folder, durable=False)),
    "remote": remote,
}


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


@pytest.mark.parametrize("store", STORES)
def test_no_record_has_a_text_a_token_or_a_tenant_in_it(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, store: str
) -> None:
    answers = scene(STORES[store](tmp_path), tmp_path)
    assert len(said(caplog)) > 12
    formatter = logging.Formatter("%(name)s %(message)s %(threadName)s")
    for record in said(caplog):
        line = formatter.format(record)
        held = f"{line} {record.msg} {record.args}"
        assert SECRET not in held
        assert not re.search(r"\d+, \d+, \d+", line), "a list of token ids"
        assert not re.search("[0-9a-f]{64}", line), "a whole hash"
        assert not any(len(text) > 4 and text in held for text in answers)


# ---------------------------------------------------------------------- what is told
def test_an_ingestion_says_what_it_computed(caplog: pytest.LogCaptureFixture) -> None:
    engine = reader()
    (key,) = engine.add(TEXTS[:1])
    engine.add(TEXTS)
    first, second = said(caplog, "computed ")
    size = f"{key.tokens} tokens, {engine.nbytes(key)} bytes, 0."
    assert f"computed 1 of 1 chunks: {size}" in first.getMessage()
    assert second.getMessage().startswith("computed 2 of 3 chunks: ")
    assert levels([first, second]) == [logging.INFO] * 2


def test_an_answer_is_one_record_and_its_misses_another(caplog: pytest.LogCaptureFixture) -> None:
    engine = reader()
    engine.add(TEXTS[:1])
    metrics = engine.generate(QUESTION, TEXTS, max_new_tokens=2).metrics
    (answered,) = said(caplog, "answered by Reuse(")
    (missing,) = said(caplog, "chunks that were missing")
    assert levels([answered, missing]) == [logging.INFO, logging.DEBUG]
    assert (
        f"{metrics.reused_tokens} tokens reused, {metrics.computed_tokens} computed, 2 generated, "
        f"first after {metrics.ttft:.3f} s of {metrics.total:.3f} s"
    ) in answered.getMessage()
    first, second = (miss.tokens for miss in metrics.missed)
    told = f": 1 ({first} tokens, not prefilled), 2 ({second} tokens, not prefilled)"
    assert missing.getMessage().endswith(told)


def test_each_answer_of_a_batch_and_of_a_stream_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    engine = reader()
    engine.generate_batch([(QUESTION, TEXTS), (QUESTION, TEXTS[:1])], max_new_tokens=2)
    assert len(said(caplog, "answered by Reuse(")) == 2
    list(engine.stream(QUESTION, TEXTS, max_new_tokens=2))
    assert len(said(caplog, "answered by Reuse(")) == 3
    engine.complete("The red lamp", max_new_tokens=1)
    assert len(said(caplog, "answered by FullRecompute(")) == 1


def test_a_full_prefill_by_the_gate_is_a_warning_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "_told", set())
    engine = reader(gate=make_verdict(reader().identity, {REUSE: 0.5}))
    for _ in range(2):
        engine.generate(QUESTION, TEXTS, max_new_tokens=1)
    fallbacks = said(caplog, "fell back to FullRecompute(): ")
    assert levels(fallbacks) == [logging.WARNING, logging.DEBUG]


def test_a_damaged_file_is_a_warning(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    store = DiskStore(tmp_path, durable=False)
    engine = reader(store=store)
    (key,) = engine.add(TEXTS[:1])
    raw = store.path(key).read_bytes()
    store.path(key).write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    engine.generate(QUESTION, TEXTS[:1], max_new_tokens=1)
    (warning,) = said(caplog, f"disk: the file of chunk {key.digest[:12]} was put aside: the ")
    assert warning.levelno == logging.WARNING


def test_what_cannot_be_written_warns_once_in_a_while(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing = MemoryStore(0)  # which keeps nothing on purpose
    reader(store=nothing).add(TEXTS[:1])
    assert nothing.stats().put_failures
    assert said(caplog, "could not be written") == []
    reader(store=DiskStore(tmp_path, durable=False, max_bytes=100)).add(TEXTS)
    failed = said(caplog, "disk: a chunk could not be written: a file of ")
    assert levels(failed) == [logging.WARNING, *[logging.DEBUG] * 3]
    monkeypatch.setattr(base, "_PAUSE", 0.0)
    reader(store=MemoryStore(10)).add(TEXTS)
    failed = said(caplog, "memory: a chunk could not be written: a chunk of ")
    assert levels(failed) == [logging.WARNING] * 4


def test_a_remote_that_fails_warns(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    engine = reader(store=remote(tmp_path))
    (tmp_path / "far").rename(tmp_path / "gone")
    (tmp_path / "far").write_text("no folder")
    engine.add(TEXTS[:1])
    warnings = [one for one in said(caplog, "remote: ") if one.levelno == logging.WARNING]
    assert warnings
    assert all("failed" in one.getMessage() or "written" in one.getMessage() for one in warnings)


def test_evictions_and_deletions_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    engine = reader(store=MemoryStore(120_000))
    engine.add(TEXTS)
    evictions = engine.store.stats().evictions
    assert evictions
    told = said(caplog, "chunks were evicted")
    assert sum(int(one.getMessage().split()[1]) for one in told) == evictions
    dropped = engine.delete_namespace()
    (deleted,) = said(caplog, f"memory: a namespace was deleted, with {dropped} chunks")
    assert deleted.levelno == logging.INFO


# ---------------------------------------------------------------------- how it is logged
def test_the_library_installs_no_handler() -> None:
    """Warnings reach stderr by Python's last resort where nothing is configured."""
    reader().generate(QUESTION, TEXTS, max_new_tokens=1)
    known = logging.Logger.manager.loggerDict
    ours = [logging.getLogger(name) for name in known if name.split(".")[0] == "kvcache_rag"]
    assert len(ours) > 4
    assert [one.name for one in ours if one.handlers or not one.propagate] == []


def test_messages_are_formatted_only_where_they_are_wanted() -> None:
    """The text of a record is a constant, and its values are arguments."""
    call = r"\b_?LOG(?:GER)?\.(?:debug|info|warning|error|exception|critical)\(\s*"
    eager = re.compile(call + r"""(?:[rb]?f["']|["'][^"'\n]*["']\s*(?:%|\+|\.format))""")
    found = {path.name: eager.findall(path.read_text("utf-8")) for path in SOURCE.rglob("*.py")}
    assert {name: calls for name, calls in found.items() if calls} == {}
