"""`kvcache-rag store` on real stores and real Chroma collections."""

from __future__ import annotations

import json
import os
import re
import stat
import sys
from pathlib import Path
from typing import Any

import chromadb
import pytest
from chroma_server import chroma_server
from small import make_model, make_tokenizer
from store_place import TEMPLATE, TEXTS, Place, age, forget, write

from kvcache_rag import DiskStore, Engine, TieredStore, cli
from kvcache_rag.commands.collections import open_client
from kvcache_rag.integration import RowPrefiller
from kvcache_rag.stores import RemoteStore
from kvcache_rag.stores.listing import namespaces
from tests.contracts import key_of, make_chunk


@pytest.fixture
def place(tmp_path: Path) -> Place:
    place = Place(tmp_path)
    write(place.docs, TEXTS)
    age(place, 1000)
    return place


def listed(place: Place, capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    """What a command says as JSON."""
    assert place.run(*words, "--json") == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys: pytest.CaptureFixture[str]) -> str:
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    return captured.err


# ---------------------------------------------------------------------- ls and du
def test_ls_says_which_model(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    (namespace,) = listed(place, capsys, "ls")["namespaces"]
    (spec,) = namespace["specs"]
    assert namespace["is_default"]
    assert spec["spec"] == place.engine.spec[:16]
    assert (spec["codec"], spec["chunks"]) == ("native", 4), "three chunks and their prefix"
    assert spec["nbytes"] == sum(chunk.nbytes for chunk in place.chunks().values())
    assert spec["revision"], "the store wrote a manifest beside the first chunk"
    assert place.run("ls") == 0
    assert "(default)" in capsys.readouterr().out


def test_ls_of_a_store_without_manifests_reads_the_codec_from_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chunk = make_chunk()
    DiskStore(tmp_path).put(key_of(chunk), chunk)
    assert cli.main(["store", "ls", str(tmp_path)]) == 0
    assert re.search(r"unknown model +native +1 ", capsys.readouterr().out)


def test_ls_of_chunks_is_a_line_for_each(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    assert place.run("ls", "--chunks", "--json") == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    tokens = {key.digest: key.tokens for key in place.engine.keys(TEXTS)}
    found = {line["digest"]: line["tokens"] for line in lines}
    assert len(found) == 4
    assert found.items() >= tokens.items()
    assert place.run("ls", "--chunks") == 0
    assert len(capsys.readouterr().out.splitlines()) == 4


def test_a_namespace_can_be_chosen(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    chunk = make_chunk()
    place.store.put(key_of(chunk, namespace="tenant"), chunk)
    for name, specs in (("tenant", 1), ("", 1), ("nobody", 0)):
        found = listed(place, capsys, "ls", "--namespace", name)["namespaces"]
        assert sum(len(one["specs"]) for one in found) == specs


def test_du_adds_up(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    chunks = place.chunks()
    first = next(iter(chunks.values()))
    os.truncate(first.path, 7)
    assert place.run("check", "--delete") == 1
    with open(os.path.join(os.path.dirname(first.path), ".tmp-torso"), "wb") as file:
        file.write(b"12345")
    capsys.readouterr()
    found = listed(place, capsys, "du")
    parts = {part["part"].split("  ")[-1]: part["bytes"] for part in found["parts"]}
    assert (parts["quarantined files"], parts["unfinished files"]) == (7, 5)
    assert found["bytes"] == sum(part["bytes"] for part in found["parts"])
    assert found["bytes"] == sum(c.nbytes for c in chunks.values()) - first.nbytes + 12
    assert place.run("du") == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("total")


def test_check_names_damaged_files_and_puts_them_aside_if_asked(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    digest = place.engine.keys(TEXTS)[0].digest
    path = place.chunks()[digest].path
    raw = bytearray(Path(path).read_bytes())
    raw[-1] ^= 1
    Path(path).write_bytes(raw)
    assert place.run("check") == 1
    out = capsys.readouterr().out
    assert f"{path}: the checksum is wrong" in out
    assert out.endswith("1 damaged, computed anew when they are needed\n")
    assert os.path.exists(path)
    assert place.run("check", "--delete") == 1
    assert not os.path.exists(path)
    assert place.run("check") == 0
    (quarantined,) = next(namespaces(place.kv)).quarantined()
    assert quarantined.path.endswith(digest)
    assert place.engine.generate("alpha?", TEXTS, max_new_tokens=1).metrics.misses == 1


# ---------------------------------------------------------------------- gc
def test_gc_drops_what_no_row_refers_to(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    gone, *kept = (key.digest for key in place.engine.keys(TEXTS))
    forget(place.docs, "0")
    before = place.chunks()
    assert place.run("gc", "--collection", "docs") == 0
    out = capsys.readouterr().out
    assert "2 chunks in use" in out
    assert "2 chunks (" in out, "that of the row, and the prefix, which is computed again"
    assert "would be dropped" in out
    assert out.endswith("say --yes to do it\n")
    assert place.chunks().keys() == before.keys(), "nothing was changed"
    assert place.run("gc", "--collection", "docs", "--yes") == 0
    assert ") dropped" in capsys.readouterr().out
    assert place.chunks().keys() == set(kept)
    assert place.engine.generate("alpha?", TEXTS, max_new_tokens=1).metrics.misses == 1
    assert gone in place.chunks()


def test_gc_keeps_what_any_named_collection_refers_to(place: Place) -> None:
    other = place.prefiller("other")
    write(other, TEXTS[:1])
    age(place, 1000)
    forget(place.docs, "0")
    digests = {key.digest for key in place.engine.keys(TEXTS)}
    words = ["gc", "--collection", "docs", "--collection", "other", "--yes"]
    assert place.run(*words) == 0
    assert place.chunks().keys() == digests


def test_gc_leaves_alone_what_rows_may_be_on_their_way_to(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    chunk = make_chunk()
    tenant = key_of(chunk, namespace="tenant")
    place.store.put(tenant, chunk)
    age(place, 1000)
    place.engine.add(["delta is coming"])
    assert place.run("gc", "--collection", "docs", "--yes") == 0
    assert "used too recently" in capsys.readouterr().out
    assert place.engine.keys(["delta is coming"])[0].digest in place.chunks()
    assert place.store.contains(tenant), "another namespace is another's"


def test_gc_reaches_the_remote_tier(tmp_path: Path) -> None:
    place, url = Place(tmp_path), (tmp_path / "remote").as_uri()
    store = TieredStore(place.store, RemoteStore(url))
    place.engine.store = store
    engine = Engine(make_model(), make_tokenizer(), store=store, template=TEMPLATE)
    prefiller = RowPrefiller(place.docs.rows, engine)
    write(prefiller, TEXTS)

    def remote() -> set[str]:
        found = list(namespaces(tmp_path / "remote"))
        return {c.digest for one in found for spec in one.specs() for c in spec.chunks()}

    gone, *kept = (key.digest for key in engine.keys(TEXTS))
    forget(prefiller, "0")
    words = ["gc", "--collection", "docs", "--remote", url, "--min-age", "0"]
    assert place.run(*words) == 0
    assert gone in remote()
    assert place.run(*words, "--yes") == 0
    assert gone not in remote()
    assert remote() >= set(kept)


def test_gc_says_that_the_remote_failed(
    place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("not a folder")
    forget(place.docs, "0")
    url = (tmp_path / "file").as_uri()
    words = ["gc", "--collection", "docs", "--remote", url, "--min-age", "0", "--yes"]
    assert place.run(*words) == 2
    assert "the remote tier failed (" in capsys.readouterr().err


def test_a_collection_can_be_on_a_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "kv").mkdir()
    with chroma_server(tmp_path / "served") as (host, port):
        client = chromadb.HttpClient(host, port)
        client.create_collection("docs", embedding_function=None)
        words = ["store", "gc", str(tmp_path / "kv"), "--chroma", f"http://{host}:{port}"]
        assert cli.main([*words, "--collection", "docs"]) == 0
        assert "0 chunks in use" in capsys.readouterr().out
    assert cli.main([*words, "--collection", "docs"]) == 2
    assert f"there is no Chroma server at http://{host}:{port}" in refused(capsys)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["gc"], "say whose chunks stay"),
        (["gc", "--collection", "docs"], "say where the collections are"),
        (["gc", "--collection", "x", "--min-age", "-1"], "--min-age must be at least 0"),
        (["gc", "--collection", "x", "--min-age", "nan"], "--min-age must be at least 0"),
        (["gc", "--collection", "x", "--chroma", "."], "there is no Chroma database"),
        (["gc", "--collection", "x", "--chroma", "ftp://h"], "is no server's; say it as http://l"),
    ],
)
def test_a_users_mistake_is_one_sentence(
    tmp_path: Path, words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    action, *rest = words
    assert cli.main(["store", action, str(tmp_path), *rest]) == 2
    assert says in refused(capsys)


@pytest.mark.parametrize("action", ["ls", "du", "check", "gc", "fix-permissions"])
def test_a_folder_that_is_no_store_or_not_there_is_left_alone(
    tmp_path: Path, action: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    tmp_path.chmod(0o755)
    assert cli.main(["store", action, str(tmp_path)]) == 2
    assert "is no folder of a store, nothing in it is a DiskStore's; name the" in refused(capsys)
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755
    assert cli.main(["store", action, str(tmp_path / "nowhere")]) == 2
    assert "there is no folder" in refused(capsys)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    (tmp_path / "empty").mkdir()
    assert cli.main(["store", "check", str(tmp_path / "empty")]) == 0, "of a store that is new"


def test_an_unknown_collection_is_not_made(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    assert place.run("gc", "--collection", "doc") == 2
    assert "there is no collection 'doc', only docs" in refused(capsys)
    assert [one.name for one in place.client.list_collections()] == ["docs"]


def test_without_chromadb_the_line_to_install_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "chromadb", None)
    words = ["--collection", "docs", "--chroma", "http://localhost:8000"]
    assert cli.main(["store", "gc", str(tmp_path), *words]) == 2
    assert "pip install 'kvcache-rag[chroma]'" in refused(capsys)


@pytest.mark.parametrize(
    ("place", "server"),
    [
        ("http://[::1]:8123", ("[::1]", 8123, False)),
        ("https://[::1]", ("[::1]", 443, True)),
        ("http://chroma.example.org/", ("chroma.example.org", 8000, False)),
    ],
)
def test_servers_are_named_by_their_urls(
    monkeypatch: pytest.MonkeyPatch, place: str, server: tuple[str, int, bool]
) -> None:
    asked = []
    monkeypatch.setattr(
        chromadb, "HttpClient", lambda host, port, ssl: asked.append((host, port, ssl))
    )
    open_client(place)
    assert asked == [server]


EVIL = "\x1b]0;title\x07\x1b[2J\r\nnamespace fake\u202e\u2066\ud800\x9b31m"


def test_what_a_listing_shows_of_files_and_rows_moves_no_terminal(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    for values in (
        {"model": EVIL, "revision": EVIL, "codec": EVIL},
        {"model": [EVIL], "revision": {EVIL: 1}, "codec": [EVIL], "created": EVIL},
        {"model": 7, "revision": 1.5, "codec": 8},
    ):
        for manifest in place.kv.rglob("spec.json"):
            manifest.write_text(json.dumps(values))
        for action in (["ls"], ["ls", "--chunks"], ["ls", "--json"], ["du"], ["check"]):
            assert cli.main(["store", *action, str(place.kv)]) == 0
            shown = capsys.readouterr().out
            assert shown.replace("\n", "").isprintable(), action
            assert not any(line.startswith("namespace fake") for line in shown.splitlines())
        assert place.run("gc", "--collection", "docs") == 0
        assert capsys.readouterr().out.replace("\n", "").isprintable()
