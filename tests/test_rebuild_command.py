"""`kvcache-rag rebuild` on real stores and real Chroma collections."""

from __future__ import annotations

import json
import re
from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING, Any

import pytest
from small import make_model, make_tokenizer
from store_place import TEMPLATE, TEXTS, Place, age, write
from zoo import build, byte_tokenizer

from kvcache_rag import DiskStore, Engine, PromptTemplate, cli
from kvcache_rag.integration import NewRow, Reference, Rows
from kvcache_rag.integration import rows as forms
from kvcache_rag.stores.disk.folders import owner_mark

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def place(tmp_path: Path) -> Place:
    place = Place(tmp_path)
    write(place.docs, TEXTS)
    age(place, 1000)
    return place


@pytest.fixture
def other(place: Place, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What `rebuild` loads: the same model behind another prefix."""

    def load(*_: Any, **__: Any) -> Any:
        return make_model(), make_tokenizer(), PromptTemplate(system="Read well.\n")

    monkeypatch.setattr("kvcache_rag.models.pretrained.load", load)
    return ["rebuild", str(place.kv), "--model", "x", "--persist-dir", str(place.chroma)]


def references(place: Place) -> list[Reference | None]:
    return [Reference.from_metadata(row.metadata) for row in place.docs.rows.get()]


def test_rebuild_shows_then_fills_then_retires(
    place: Place, other: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    before, chunks = references(place), set(place.chunks())
    assert cli.main([*other, "--collection", "docs"]) == 0
    out = capsys.readouterr().out
    assert "3 chunks to prefill" in out
    assert f"3 refer to {place.engine.spec[:16]}" in out
    assert "3 rows would refer to the new spec" in out
    assert "3 chunks (" in out
    assert references(place) == before
    assert set(place.chunks()) == chunks

    assert cli.main([*other, "--collection", "docs", "--keep-old", "--yes"]) == 0
    assert "3 rows now refer to the new spec" in capsys.readouterr().out
    assert not set(references(place)) & set(before)
    assert len(place.chunks()) == 8
    assert all(not chunk.released for chunk in place.chunks().values()), "the old one serves"
    answer = place.engine.generate("alpha?", TEXTS, max_new_tokens=1)
    assert (answer.metrics.misses, answer.metrics.hits) == (0, {"disk": 3})

    assert cli.main([*other, "--collection", "docs", "--yes"]) == 0
    out = capsys.readouterr().out
    assert "0 chunks to prefill" in out
    assert "0 rows now refer" in out
    assert re.search(rf"{place.engine.spec[:16]} \S+: 3 chunks \(.*\) released", out)
    mark = owner_mark(place.docs.owner)
    old = {key.digest for key in place.engine.keys(TEXTS)}
    assert {digest for digest, chunk in place.chunks().items() if chunk.released} == old
    assert sum(mark in chunk.owners for chunk in place.chunks().values()) == 3


def test_rebuild_for_a_model_that_cannot_stitch_changes_nothing(
    place: Place,
    other: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def load(*_: Any, **__: Any) -> Any:
        return build("gpt2"), byte_tokenizer(), TEMPLATE

    monkeypatch.setattr("kvcache_rag.models.pretrained.load", load)
    before, chunks = references(place), set(place.chunks())
    assert cli.main([*other, "--collection", "docs", "--yes"]) == 2
    assert "stored chunks would be of no use" in capsys.readouterr().err
    assert (references(place), set(place.chunks())) == (before, chunks)


def test_rebuild_for_another_codec(
    place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def load(*_: Any, **__: Any) -> Any:
        return make_model(), make_tokenizer(), TEMPLATE

    monkeypatch.setattr("kvcache_rag.models.pretrained.load", load)
    words = ["rebuild", str(place.kv), "--model", "x", "--persist-dir", str(place.chroma)]
    assert cli.main([*words, "--collection", "docs", "--codec", "int8", "--yes"]) == 0
    capsys.readouterr()
    assert place.run("ls", "--json") == 0
    (namespace,) = json.loads(capsys.readouterr().out)["namespaces"]
    found = {spec["codec"]: spec for spec in namespace["specs"]}
    assert found["int8-kc-vt"]["owners"] == {"docs": 3}
    assert found["native"]["owners"] == {}
    assert found["native"]["released"] == 3


def test_rebuild_goes_on_where_it_was_stopped(
    place: Place, other: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Rows, "update", stopped)
        assert cli.main([*other, "--collection", "docs", "--yes"]) == 130
    computed = {digest: chunk.used for digest, chunk in place.chunks().items()}
    assert cli.main([*other, "--collection", "docs", "--yes"]) == 0
    assert {digest: chunk.used for digest, chunk in place.chunks().items()} == computed


def test_rebuild_retires_nothing_when_the_new_chunks_are_not_kept(
    place: Place,
    other: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(DiskStore, "put", lambda *_: False)
    assert cli.main([*other, "--collection", "docs", "--yes"]) == 2
    assert "3 chunks could not be kept" in capsys.readouterr().err
    assert all(not chunk.released for chunk in place.chunks().values())


class Point(EntryPoint):
    """A form of texts as another package brings it."""

    def load(self) -> Any:
        return lambda row: row.document.upper()


def test_rebuild_reads_texts_in_the_form_that_made_the_references(
    place: Place, other: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    points = [Point("upper", "nowhere:upper", forms.GROUP)]
    monkeypatch.setattr(forms, "entry_points", lambda group: points)
    upper = place.prefiller("upper")
    rows = [NewRow("0", TEXTS[0], {}, [0.0, 1.0])]
    upper.write(rows, [TEXTS[0].upper()])
    assert cli.main([*other, "--collection", "upper", "--yes"]) == 0
    template = PromptTemplate(system="Read well.\n")
    engine = Engine(make_model(), make_tokenizer(), store=place.store, template=template)
    assert engine.store.contains(engine.keys([TEXTS[0].upper()])[0])
    assert not engine.store.contains(engine.keys([TEXTS[0]])[0])


def test_rebuild_does_not_guess_the_form_of_texts(
    place: Place, other: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    plain = place.client.create_collection("plain", embedding_function=None)
    plain.add(ids=["0"], documents=["epsilon"], embeddings=[[0.0, 1.0]])
    assert cli.main([*other, "--collection", "plain"]) == 2
    assert "say --text document" in capsys.readouterr().err
    assert cli.main([*other, "--collection", "plain", "--text", "nothing"]) == 2
    assert "there is no form of texts 'nothing'" in capsys.readouterr().err
    assert cli.main([*other, "--collection", "plain", "--text", "document"]) == 0
