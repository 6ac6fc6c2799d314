"""`kvcache-rag store sign` adopts a folder; commands that open a store take its key."""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING

import pytest

from kvcache_rag import cli
from kvcache_rag.codecs import Int4, Native
from kvcache_rag.errors import InvalidInputError, UntrustedChunkError
from kvcache_rag.integration import open_engine
from kvcache_rag.stores import DiskStore, RemoteStore, SigningKey, TieredStore
from kvcache_rag.stores.disk import adoption, folders
from kvcache_rag.stores.signing import ENVIRONMENT
from kvcache_rag_server.corpus.worker import BuildSettings
from kvcache_rag_server.settings import ServerSettings
from kvcache_rag_server.startup import open_combinations, open_store
from tests.chunks import LAYOUT, LAYOUTS, key_of, make_chunk, same
from tests.damage import header_size

if TYPE_CHECKING:
    from pathlib import Path

SECRET, OTHER = b"s" * 32, b"o" * 32
CHUNKS = [make_chunk(seed, tokens=4) for seed in range(4)]
KEYS = [key_of(chunk) for chunk in CHUNKS]


@pytest.fixture
def key_file(tmp_path: Path) -> str:
    return secret_file(tmp_path / "key", SECRET)


def secret_file(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    path.chmod(0o600)
    return str(path)


@pytest.fixture
def plain(tmp_path: Path) -> DiskStore:
    """A store that was filled before there was a key."""
    store = DiskStore(tmp_path / "kv", durable=False)
    for key, chunk in zip(KEYS, CHUNKS, strict=True):
        store.put(key, chunk)
    return store


def signing(store: DiskStore, secret: bytes = SECRET) -> DiskStore:
    return DiskStore(store.root, durable=False, signing_key=secret)


def files(store: DiskStore) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(store.root.rglob("*.safetensors"))}


def sign(store: DiskStore, *words: str) -> int:
    return cli.main(["store", "sign", str(store.root), *words])


def test_a_folder_is_adopted(
    plain: DiskStore, key_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    past = time.time() - 5000
    for key in KEYS:
        os.utime(plain.path(key), (past + 7, past))
    assert sign(plain, "--signing-key", key_file) == 0
    assert "4 signed" in capsys.readouterr().out
    store = signing(plain)
    for key, chunk in zip(KEYS, CHUNKS, strict=True):
        status = plain.path(key).stat()
        assert (status.st_atime, status.st_mtime) == pytest.approx((past + 7, past))
        assert status.st_mode & 0o777 == 0o600
        assert same(store.get(key, LAYOUT).chunk, chunk)
        assert same(plain.get(key, LAYOUT).chunk, chunk), "and is what it was without a key"
    before = files(plain)
    assert sign(plain, "--signing-key", key_file) == 0, "again: nothing is left to do"
    assert "4 signed before" in capsys.readouterr().out
    assert files(plain) == before
    assert not list(plain.root.rglob(".tmp*"))


@pytest.mark.parametrize("codec", [Native(), Int4()], ids=repr)
@pytest.mark.parametrize("name", LAYOUTS)
def test_an_adopted_file_is_as_if_it_was_written_so(
    tmp_path: Path, name: str, codec: object
) -> None:
    chunk = make_chunk(tokens=5, layout=LAYOUTS["fused-bfloat16"])
    if isinstance(codec, Native):
        chunk = make_chunk(tokens=5, layout=LAYOUTS[name])
    else:
        for tensor in chunk.tensors[0]:
            tensor.zero_()
    key = key_of(chunk)
    store = DiskStore(tmp_path / "kv", codec=codec)  # type: ignore[arg-type]
    store.put(key, chunk)
    before = store.path(key).read_bytes()
    (namespace,) = folders.namespaces(store.root)
    (file,) = next(namespace.specs()).chunks()
    assert adoption.sign(file, namespace, SigningKey(SECRET))
    assert not adoption.sign(file, namespace, SigningKey(SECRET))
    signed = DiskStore(tmp_path / "kv", codec=codec, signing_key=SECRET)  # type: ignore[arg-type]
    after = store.path(key).read_bytes()
    assert after[header_size(after) :] == before[header_size(before) :]
    assert header_size(after) % 4096 == 0
    assert same(signed.get(key, chunk.layout).chunk, store.get(key, chunk.layout).chunk)


def test_it_goes_on_where_it_was_stopped(
    plain: DiskStore,
    key_file: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    real, left = os.replace, [2]

    def stopped(*paths: str) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        real(*paths)

    monkeypatch.setattr(os, "replace", stopped)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        raise SystemExit(sign(plain, "--signing-key", key_file))
    monkeypatch.undo()
    for key, chunk in zip(KEYS, CHUNKS, strict=True):
        assert same(plain.get(key, LAYOUT).chunk, chunk), "each file is as it was, or signed"
    capsys.readouterr()
    assert sign(plain, "--signing-key", key_file) == 0
    assert "2 signed, 2 signed before" in capsys.readouterr().out


def test_what_is_damaged_or_of_another_key_is_not_signed(
    plain: DiskStore, key_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = bytearray(plain.path(KEYS[0]).read_bytes())
    damaged[-1] ^= 1
    plain.path(KEYS[0]).write_bytes(damaged)
    plain.delete(KEYS[1])
    signing(plain, OTHER).put(KEYS[1], CHUNKS[1])
    before = files(plain)
    assert sign(plain, "--signing-key", key_file) == 1
    captured = capsys.readouterr().out
    assert "2 signed, 1 damaged, 1 of another key" in captured
    after = files(plain)
    for key in KEYS[:2]:
        name = plain.path(key).name
        assert name in captured
        assert after[name] == before[name]


def test_a_key_is_changed_for_another(
    plain: DiskStore, key_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new = secret_file(tmp_path / "new", OTHER)
    assert sign(plain, "--signing-key", key_file) == 0
    # Somebody changed one meanwhile, and its checksum; it says to be of the old key.
    path = plain.path(KEYS[0])
    raw = path.read_bytes()
    forgery = raw.replace(b"kvcache-rag 0", b"kvcache-rog 0")
    path.write_bytes(forgery)
    assert sign(plain, "--signing-key", new) == 1
    assert "4 of another key" in capsys.readouterr().out
    assert sign(plain, "--signing-key", new, "--old-key", key_file) == 1
    assert "3 signed, 1 of another key" in capsys.readouterr().out
    assert path.read_bytes() == forgery
    store = signing(plain, OTHER)
    for key, chunk in zip(KEYS[1:], CHUNKS[1:], strict=True):
        assert same(store.get(key, LAYOUT).chunk, chunk)
    with pytest.raises(UntrustedChunkError):
        store.get(KEYS[0], LAYOUT)


def test_a_namespace_that_is_deleted_meanwhile_does_not_come_back(
    plain: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    (namespace,) = folders.namespaces(plain.root)
    file = next(iter(next(namespace.specs()).chunks()))
    real = folders.set_times

    def deleted(*arguments: object) -> None:
        monkeypatch.undo()
        real(*arguments)  # type: ignore[arg-type]
        plain.delete_namespace("")

    monkeypatch.setattr(folders, "set_times", deleted)
    with pytest.raises(OSError):  # noqa: PT011 - what is gone says so in several ways
        adoption.sign(file, namespace, SigningKey(SECRET))
    assert files(plain) == {}
    assert not list(plain.root.rglob(".tmp*"))


def test_a_chunk_that_goes_meanwhile_does_not_come_back(
    plain: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    (namespace,) = folders.namespaces(plain.root)
    file = next(iter(next(namespace.specs()).chunks()))
    real = folders.set_times

    def dropped(*arguments: object) -> None:
        real(*arguments)  # type: ignore[arg-type]
        os.unlink(file.path)

    monkeypatch.setattr(folders, "set_times", dropped)
    with pytest.raises(FileNotFoundError):
        adoption.sign(file, namespace, SigningKey(SECRET))
    assert not os.path.exists(file.path)


def test_verify_names_what_a_key_did_not_sign(
    plain: DiskStore, key_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    place = str(plain.root)
    assert cli.main(["store", "verify", place]) == 0
    before = files(plain)
    assert cli.main(["store", "verify", place, "--signing-key", key_file, "--delete"]) == 1
    out = capsys.readouterr().out
    assert "4 not signed by the key" in out
    assert out.count("it is not signed\n") == 4
    assert files(plain) == before, "what is not ours stays where it is"
    sign(plain, "--signing-key", key_file)
    capsys.readouterr()
    assert cli.main(["store", "verify", place, "--signing-key", key_file]) == 0
    assert "all whole" in capsys.readouterr().out


def test_sign_needs_a_key(
    plain: DiskStore,
    key_file: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert sign(plain) == 2
    assert "--signing-key" in capsys.readouterr().err
    assert sign(plain, "--signing-key", SECRET.decode()) == 2
    assert SECRET.decode() not in capsys.readouterr().err
    monkeypatch.setenv(ENVIRONMENT, SECRET.decode())
    assert sign(plain) == 0
    assert sign(plain, "--signing-key", key_file) == 0


# ---------------------------------------------------------------------- whoever opens a store
def test_a_server_signs_chunks_and_combinations(tmp_path: Path, key_file: str) -> None:
    settings = ServerSettings(model="tiny", kv_dir=str(tmp_path / "kv"), signing_key=key_file)
    for store in (open_store(settings), open_combinations(settings)):
        assert isinstance(store, TieredStore)
        disk = store.tiers[1]
        assert isinstance(disk, DiskStore)
        assert disk.signing_key is not None
        assert disk.signing_key.id == SigningKey(SECRET).id
    assert SECRET.decode() not in repr(settings)
    with pytest.raises(InvalidInputError, match="--kv-dir"):
        ServerSettings(model="tiny", signing_key=key_file)


def test_builders_sign(tmp_path: Path, key_file: str) -> None:
    for place in (str(tmp_path / "kv"), f"file://{tmp_path}/remote"):
        store = BuildSettings(model="tiny", kv_dir=place, signing_key=key_file).open_store()
        assert isinstance(store, (DiskStore, RemoteStore))
        assert store.signing_key is not None
        assert store.signing_key.id == SigningKey(SECRET).id


def test_a_build_signs_what_it_stores(tmp_path: Path, key_file: str) -> None:
    corpus = tmp_path / "texts.jsonl"
    corpus.write_text(json.dumps({"text": "The harbour opens at nine."}) + "\n")
    words = ["build", "tiny", str(corpus), "--kv-dir", str(tmp_path / "kv")]
    assert cli.main([*words, "--signing-key", key_file]) == 0
    verify = ["store", "verify", str(tmp_path / "kv"), "--signing-key"]
    assert cli.main([*verify, key_file]) == 0
    assert cli.main([*verify, secret_file(tmp_path / "other", OTHER)]) == 1


def test_an_engine_answers_from_what_its_key_signed(tmp_path: Path, key_file: str) -> None:
    folder, text = tmp_path / "kv", "The harbour opens at nine."
    engine = open_engine("tiny", kv_dir=folder, signing_key=key_file)
    engine.add([text])
    question = "When does the harbour open?"
    answer = engine.generate(question, chunks=[text], max_new_tokens=4)
    again = open_engine("tiny", kv_dir=folder, signing_key=key_file)
    warm = again.generate(question, chunks=[text], max_new_tokens=4)
    assert (warm.text, warm.metrics.misses) == (answer.text, 0)
    before = {path: path.read_bytes() for path in folder.rglob("*.safetensors")}
    other = open_engine("tiny", kv_dir=folder, signing_key=secret_file(tmp_path / "other", OTHER))
    cold = other.generate(question, chunks=[text], max_new_tokens=4)
    assert (cold.text, cold.metrics.misses) == (answer.text, 1)
    assert other.store.stats().untrusted > 0
    assert {path: path.read_bytes() for path in folder.rglob("*.safetensors")} == before
