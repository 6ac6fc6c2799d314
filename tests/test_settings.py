"""Settings of the wrong type, numbers that are none and names that are no text: one sentence."""

from __future__ import annotations

import inspect
import math
from dataclasses import is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from small import make_model, make_tokenizer

from kvcache_rag import (
    Ape,
    CacheBlend,
    CacheClip,
    Combination,
    DiskStore,
    Engine,
    FullRecompute,
    LegoLink,
    MemoryStore,
    PromptTemplate,
    RemoteStore,
    Reuse,
    TieredStore,
)
from kvcache_rag.cli import main
from kvcache_rag.errors import InvalidInputError, KVCacheRagError
from kvcache_rag.kv.chunk import ChunkKey, chunk_key, spec_digest
from kvcache_rag.verdict import Gate
from kvcache_rag_lab.finetune import FinetuneConfig
from kvcache_rag_lab.finetune.config import JsonlData
from kvcache_rag_server.prefetch import Prefetcher
from tests.contracts import LAYOUT, key_of, make_chunk

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvcache_rag.stores import ChunkStore

LONE = "ten\ud800ant"
NAN = math.nan


@pytest.fixture(scope="module")
def loaded() -> dict[str, Any]:
    return {"model": make_model(), "tokenizer": make_tokenizer()}


@pytest.fixture(scope="module")
def engine(loaded: dict[str, Any]) -> Engine:
    return Engine(**loaded)


def owners(
    folder: Path, loaded: dict[str, Any], engine: Engine | None
) -> dict[str, Callable[..., Any]]:
    """What takes settings, with all that is not one given."""
    return {
        "DiskStore": partial(DiskStore, folder / "kv"),
        "MemoryStore": MemoryStore,
        "RemoteStore": partial(RemoteStore, f"memory://{folder}"),
        "TieredStore": partial(TieredStore, MemoryStore()),
        "Engine": partial(Engine, **loaded),
        "Prefetcher": partial(Prefetcher, engine),  # type: ignore[arg-type]  # only named then
        "Gate": partial(Gate, "verdict.json"),
        "PromptTemplate": PromptTemplate,
        "Reuse": Reuse,
        "FullRecompute": FullRecompute,
        "Combination": Combination,
        "LegoLink": LegoLink,
        "CacheBlend": CacheBlend,
        "CacheClip": CacheClip,
        "Ape": Ape,
        "FinetuneConfig": partial(
            FinetuneConfig, model="tiny", out=folder / "out", data=JsonlData(Path("train.jsonl"))
        ),
        "JsonlData": partial(JsonlData, Path("train.jsonl")),
    }


WRONG: dict[str, tuple[Any, ...]] = {
    "int": ("7", "x", 1.5, NAN, math.inf, True, b"7", [], {}, object(), int),
    "float": ("0.5", "x", NAN, True, b"1", [], {}, object(), 1j),
    "bool": ("yes", "", 2, NAN, [], {}, object()),
    "str": (7, 0.5, NAN, True, b"x", ["x"], {}, object()),
}


def refusal(owner: Callable[..., Any], setting: str, value: object) -> str:
    """What is said of it as a user's mistake; "" if that is something else, or nothing."""
    try:
        owner(**{setting: value})
    except KVCacheRagError as error:
        return str(error)
    except Exception:
        return ""
    return ""


def settings(owner: Callable[..., Any]) -> Iterator[tuple[str, set[str]]]:
    """Names of the settings of plain types, with these types."""
    for name, parameter in inspect.signature(owner).parameters.items():
        kinds = {kind.strip("'\" ") for kind in str(parameter.annotation).split("|")}
        if kinds & WRONG.keys() and kinds <= {*WRONG, "None"}:
            yield name, kinds


def wrong_values(kinds: set[str]) -> Iterator[Any]:
    if "None" not in kinds:
        yield None
    for kind in kinds & WRONG.keys():
        for value in WRONG[kind]:
            types = {"int": (int,), "float": (float, int), "bool": (bool,), "str": (str,)}
            fits = {type_ for other in kinds & WRONG.keys() for type_ in types[other]}
            is_nan = isinstance(value, float) and not math.isfinite(value)
            if type(value) not in fits or is_nan:
                yield value


@pytest.mark.parametrize("name", sorted(owners(Path("kv"), {"model": 0, "tokenizer": 0}, None)))
def test_a_setting_of_the_wrong_type_is_refused_in_one_sentence(
    name: str, tmp_path: Path, loaded: dict[str, Any], engine: Engine
) -> None:
    owner = owners(tmp_path, loaded, engine)[name]
    accepted = []
    for setting, kinds in settings(owner):
        for value in wrong_values(kinds):
            text = refusal(owner, setting, value)
            if setting not in text or not text.isprintable() or len(text) > 400:
                accepted.append(f"{setting}={value!r}: {text}")
    assert accepted == []


def test_the_table_knows_every_setting_and_what_is_right_stays_right(
    tmp_path: Path, loaded: dict[str, Any], engine: Engine
) -> None:
    table = owners(tmp_path, loaded, engine)
    assert sum(1 for owner in table.values() for _ in settings(owner)) > 50
    for owner in table.values():
        made = owner()
        assert made is not None
        if is_dataclass(made) and not isinstance(made, type):
            assert replace(made) == made


@pytest.mark.parametrize("quota", ["x", 1.5, NAN, True, {"a": "x"}, {"a": NAN}, {7: 1}, {LONE: 1}])
def test_a_quota_is_a_number_or_numbers_by_namespace(tmp_path: Path, quota: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"quota|namespace"):
        DiskStore(tmp_path, quota=quota)


def test_numbers_of_other_libraries_are_numbers(tmp_path: Path) -> None:
    import numpy

    store = DiskStore(tmp_path, max_bytes=numpy.int64(1 << 20), ttl=numpy.float32(9.5))  # type: ignore[arg-type]
    chunk = make_chunk()
    assert store.put(key_of(chunk), chunk)
    assert CacheBlend(numpy.float64(0.25)).ratio == 0.25


# ---------------------------------------------------------------------- names
SPEC = spec_digest({"test": 1})


def calls_of(store: ChunkStore, key: ChunkKey, name: str) -> list[Callable[[], Any]]:
    return [
        lambda: store.get(key, LAYOUT),
        lambda: store.put(key, make_chunk(tokens=4)),
        lambda: store.contains(key),
        lambda: store.delete(key),
        lambda: store.delete_namespace(name),
    ]


@pytest.mark.parametrize("name", [LONE, "\udcff", 7, None, b"x", ["a"]])
def test_a_namespace_that_is_no_text_is_refused(
    tmp_path: Path, loaded: dict[str, Any], engine: Engine, name: Any
) -> None:
    key = ChunkKey("0" * 64, SPEC, name, 4, 0)
    calls: list[Callable[[], Any]] = [
        lambda: Engine(**loaded, namespace=name),
        lambda: engine.in_namespace(name),
        lambda: chunk_key([1, 2], prefix_ids=[], spec=SPEC, namespace=name),
    ]
    if name is not None:
        calls += [lambda: DiskStore(tmp_path, namespace=name)]
    for store in (
        DiskStore(tmp_path / "kv", durable=False),
        MemoryStore(),
        RemoteStore(f"memory://{tmp_path}", retries=0),
        TieredStore(MemoryStore(), DiskStore(tmp_path / "tiers", durable=False)),
    ):
        calls += calls_of(store, key, name)
    for call in calls:
        with pytest.raises(InvalidInputError) as caught:
            call()
        assert "namespace" in str(caught.value)
        assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    "words",
    [
        ["store", "ls", "{kv}", "--namespace", "\udcff"],
        ["store", "gc", "{kv}", "--owner", "\udcff"],
        ["store", "gc", "{kv}", "--collection", "\udcff", "--chroma", "{kv}"],
        ["store", "fix-permissions", "{kv}", "--namespace", LONE],
        ["models", "check", LONE],
        ["plan", "{kv}", "--model", LONE],
        ["serve", LONE],
        ["serve", "tiny", "--served-name", LONE],
    ],
)
def test_a_name_that_is_no_text_is_one_line_of_a_command(
    tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "kv").mkdir()
    (tmp_path / "kv" / "text.md").write_text("text")
    status = main([word.format(kv=tmp_path / "kv") for word in words])
    captured = capsys.readouterr()
    assert status == 2
    assert "Error" not in captured.err
    assert captured.err.splitlines()[-1].isprintable()


@pytest.mark.parametrize("name", [LONE, 7, None, torch.zeros(1)])
def test_a_model_name_that_is_no_text_is_refused(name: Any) -> None:
    with pytest.raises(KVCacheRagError, match="model"):
        Engine.from_pretrained(name)
