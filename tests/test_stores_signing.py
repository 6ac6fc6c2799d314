"""With a signing key a store serves what that key signed; everything else is a miss."""

from __future__ import annotations

import json
import os
import pickle
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
import torch
import xxhash
from safetensors import safe_open
from zoo import build, byte_tokenizer

from kvcache_rag import Engine
from kvcache_rag.codecs import Int4, Int8, Native
from kvcache_rag.errors import (
    ChunkNotFoundError,
    CorruptChunkError,
    InvalidInputError,
    MissingExtraError,
    UntrustedChunkError,
)
from kvcache_rag.stores import ChunkStore, DiskStore, MemoryStore, RemoteStore, TieredStore
from kvcache_rag.stores.signing import ENVIRONMENT, Mac, SigningKey
from tests.chunks import LAYOUT, LAYOUTS, empty_chunk, key_of, make_chunk, same
from tests.damage import header_size, rewritten
from tests.laws import QUESTION, TEMPLATE, TEXTS
from tests.test_stores import TestDiskStore as DiskContract

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kvcache_rag.kv.chunk import ChunkKV

SECRET, OTHER = b"s" * 32, b"o" * 32
CHUNK = make_chunk(tokens=4)
KEY = key_of(CHUNK)


@pytest.fixture
def store(tmp_path: Path) -> DiskStore:
    return DiskStore(tmp_path / "kv", durable=False, signing_key=SECRET)


def written(folder: Path, signing_key: bytes | None, chunk: ChunkKV = CHUNK) -> bytes:
    """Put a chunk into a folder, by another key or none; its file."""
    store = DiskStore(folder, durable=False, signing_key=signing_key)
    assert store.put(key_of(chunk), chunk)
    return store.path(key_of(chunk)).read_bytes()


def provenance(raw: bytes) -> str:
    return str(json.loads(raw[8 : header_size(raw)])["__metadata__"]["provenance"])


def forged(raw: bytes, change: Callable[[bytearray], None]) -> bytes:
    """The file with a changed payload, and the checksum of that: what anybody can write."""
    size = header_size(raw)
    payload = bytearray(raw[size:])
    change(payload)
    before, now = (xxhash.xxh3_128_hexdigest(part).encode() for part in (raw[size:], payload))
    assert raw[:size].count(before) == 1
    return raw[:size].replace(before, now) + payload


def flipped(place: int) -> Callable[[bytearray], None]:
    def change(payload: bytearray) -> None:
        payload[place] ^= 1

    return change


def planted(store: DiskStore, raw: bytes) -> Path:
    """Put a file in place of a chunk."""
    path = store.path(KEY)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(raw)
    return path


def is_not_used(store: DiskStore, raw: bytes) -> None:
    """The file is a miss that is counted, and what is computed instead takes its place."""
    path = planted(store, raw)
    with pytest.raises(UntrustedChunkError):
        store.get(KEY, LAYOUT)
    stats = store.stats()
    assert (stats.untrusted, stats.misses, stats.corrupt) == (1, 0, 0)
    store.touch(KEY)
    store.sweep()
    assert path.read_bytes() == raw
    assert store.put(KEY, CHUNK)
    assert same(store.get(KEY, LAYOUT).chunk, CHUNK)
    assert not list(store.root.glob("*/quarantine/*"))
    assert not list(store.root.rglob(".tmp*"))


# ---------------------------------------------------------------------- what is written and read
class TestSignedDiskStore(DiskContract):
    """A store with a key is a store."""

    def open(self, path: Path, *, max_bytes: int | None = None) -> DiskStore:
        return DiskStore(path, max_bytes=max_bytes, durable=False, signing_key=SECRET)


@pytest.mark.parametrize("codec", [Native(), Int8(), Int4()], ids=repr)
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_signed_file_is_one_of_this_format(tmp_path: Path, name: str, codec: Any) -> None:
    layout = LAYOUTS[name]
    chunk = empty_chunk(5, layout)
    key = key_of(chunk)
    signed = DiskStore(tmp_path / "kv", codec=codec, signing_key=SECRET)
    assert signed.put(key, chunk)
    plain = DiskStore(tmp_path / "plain", codec=codec)
    assert plain.put(key, chunk)
    raw, bare = signed.path(key).read_bytes(), plain.path(key).read_bytes()
    assert raw[header_size(raw) :] == bare[header_size(bare) :], "the same payload"
    assert header_size(raw) == header_size(bare)
    with safe_open(signed.path(key), "pt") as file, safe_open(plain.path(key), "pt") as other:
        assert set(file.keys()) == set(other.keys())
        assert all(torch.equal(file.get_tensor(n), other.get_tensor(n)) for n in file.keys())  # noqa: SIM118
    # Readers without a key, such as those of before there were keys, read it.
    store = DiskStore(tmp_path / "kv", codec=codec)
    assert same(store.get(key, layout).chunk, signed.get(key, layout).chunk)


def test_without_a_key_a_file_has_no_mac(tmp_path: Path) -> None:
    assert Mac.in_provenance(provenance(written(tmp_path, None))) is None
    mac = Mac.in_provenance(provenance(written(tmp_path / "signed", SECRET)))
    assert mac is not None
    assert mac.key == SigningKey(SECRET).id


def test_no_two_files_have_one_nonce(tmp_path: Path) -> None:
    raws = [written(tmp_path / str(number), SECRET) for number in range(32)]
    assert len({provenance(raw).split("-")[-2] for raw in raws}) == 32


# ---------------------------------------------------------------------- what somebody else wrote
def test_the_checksum_alone_accepts_a_forgery(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    store.put(KEY, CHUNK)
    raw = store.path(KEY).read_bytes()
    store.path(KEY).write_bytes(forged(raw, flipped(-1)))
    assert not same(store.get(KEY, LAYOUT).chunk, CHUNK), "docs/stores.md says so"


def twice(header: dict[str, Any]) -> None:
    """Write the mac once more."""
    metadata = header["__metadata__"]
    mac = metadata["provenance"].rpartition(" ")[2]
    metadata["provenance"] = f"{mac} {mac}"
    metadata["pad"] = metadata["pad"][:-200]


FORGERIES: dict[str, Callable[[bytes, bytes, bytes], bytes]] = {
    "first byte": lambda ours, bare, theirs: forged(ours, flipped(0)),
    "a byte": lambda ours, bare, theirs: forged(ours, flipped(100)),
    "last byte": lambda ours, bare, theirs: forged(ours, flipped(-1)),
    "no mac": lambda ours, bare, theirs: bare,
    "of another key": lambda ours, bare, theirs: theirs,
    "of another key that names this one": lambda ours, bare, theirs: theirs.replace(
        SigningKey(OTHER).id.encode(), SigningKey(SECRET).id.encode()
    ),
    "a mac that is written twice": lambda ours, bare, theirs: rewritten(ours, twice),
    "a mac in escaped letters": lambda ours, bare, theirs: ours.replace(
        b" gmac-", b" \\u0067mac-"
    ).replace(b'"pad":"     ', b'"pad":"'),
}


@pytest.mark.parametrize("kind", FORGERIES)
def test_what_somebody_else_wrote_is_not_used(store: DiskStore, tmp_path: Path, kind: str) -> None:
    ours, *others = (written(tmp_path / str(key), key) for key in (SECRET, None, OTHER))
    forgery = FORGERIES[kind](ours, *others)
    assert len(forgery) == len(ours)
    assert forgery != ours
    is_not_used(store, forgery)


@pytest.mark.parametrize("signing_key", [None, OTHER])
def test_what_this_key_did_not_sign_is_not_there(
    store: DiskStore, tmp_path: Path, signing_key: bytes | None
) -> None:
    planted(store, written(tmp_path / "other", signing_key))
    assert not store.contains(KEY)
    assert store.locate(KEY) is None
    # It is what it is for those who have its key.
    found = DiskStore(store.root, signing_key=signing_key).get(KEY, LAYOUT).chunk
    assert same(found, CHUNK)


def test_every_byte_is_under_the_mac(store: DiskStore) -> None:
    store.put(KEY, CHUNK)
    path = store.path(KEY)
    raw = path.read_bytes()
    size = header_size(raw)
    used = len(raw[:size].rstrip(b' "}'))
    places = [*range(used), used + 100, size - 3, size - 1, *range(size, len(raw))]
    served = 0
    for place in places:
        changed = bytearray(raw)
        changed[place] ^= 1 << place % 8
        path.write_bytes(changed if place < size else forged(raw, flipped(place - size)))
        with suppress(ChunkNotFoundError):
            store.get(KEY, LAYOUT)
            served += 1
    assert served == 0, f"{served} of {len(places)} changed files were served"


def test_a_signed_file_cannot_be_moved_to_another_name(store: DiskStore) -> None:
    other = make_chunk(1, tokens=4)
    store.put(KEY, CHUNK)
    for key in (key_of(other), key_of(CHUNK, namespace="tenant")):
        store.path(key).parent.mkdir(parents=True, exist_ok=True)
        store.path(key).write_bytes(store.path(KEY).read_bytes())
        with pytest.raises(ChunkNotFoundError):
            store.get(key, LAYOUT)
        assert not store.contains(key)


def test_what_a_medium_damaged_is_put_aside_as_ever(store: DiskStore) -> None:
    store.put(KEY, CHUNK)
    raw = bytearray(store.path(KEY).read_bytes())
    raw[-1] ^= 1
    store.path(KEY).write_bytes(raw)
    with pytest.raises(CorruptChunkError):
        store.get(KEY, LAYOUT)
    assert store.stats().corrupt == 1
    assert store.stats().untrusted == 0
    assert not store.path(KEY).exists()
    assert store.put(KEY, CHUNK)


def test_what_was_swapped_while_it_was_written_is_not_signed(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.write
    size = len(written(store.root / "other", SECRET))

    def swapped(descriptor: int, data: Any) -> int:
        changed = bytearray(data)
        if len(changed) < size - 4096:
            changed[-1] ^= 1
        return real(descriptor, changed)

    monkeypatch.setattr(os, "write", swapped)
    store.put(KEY, CHUNK)
    with pytest.raises(ChunkNotFoundError):
        store.get(KEY, LAYOUT)


def test_deletions_that_were_asked_for_reach_every_file(store: DiskStore, tmp_path: Path) -> None:
    raw = written(tmp_path / "other", None)
    planted(store, raw)
    assert store.delete(KEY)
    planted(store, raw)
    assert store.delete_namespace("") == 1


# ---------------------------------------------------------------------- other stores
def test_a_remote_does_not_use_what_is_not_signed(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/kv"
    RemoteStore(url).put(KEY, CHUNK)
    (path,) = tmp_path.rglob("*.safetensors")
    signing = RemoteStore(url, signing_key=SECRET)
    assert not signing.contains(KEY)
    for raw in (path.read_bytes(), forged(path.read_bytes(), flipped(-1))):
        path.write_bytes(raw)
        with pytest.raises(UntrustedChunkError):
            signing.get(KEY, LAYOUT)
        assert path.read_bytes() == raw
    assert signing.stats().untrusted == 2
    assert signing.put(KEY, CHUNK)
    assert same(signing.get(KEY, LAYOUT).chunk, CHUNK)
    path.write_bytes(forged(path.read_bytes(), flipped(-1)))
    with pytest.raises(UntrustedChunkError):
        signing.get(KEY, LAYOUT)


def test_tiers_serve_a_signed_copy_behind_an_untrusted_one(tmp_path: Path) -> None:
    disk = DiskStore(tmp_path / "disk", signing_key=SECRET)
    remote = RemoteStore(f"file://{tmp_path}/remote", signing_key=SECRET)
    remote.put(KEY, CHUNK)
    raw = written(tmp_path / "disk", None)
    store = TieredStore(MemoryStore(), disk, remote)
    assert same(store.get(KEY, LAYOUT).chunk, CHUNK)
    assert store.stats().untrusted == 1
    assert disk.path(KEY).read_bytes() != raw
    assert same(disk.get(KEY, LAYOUT).chunk, CHUNK)
    assert store.get(KEY, LAYOUT).tier == "memory"


def test_tiers_say_that_the_only_copy_is_untrusted(tmp_path: Path) -> None:
    written(tmp_path / "disk", None)
    store: ChunkStore = TieredStore(MemoryStore(), DiskStore(tmp_path / "disk", signing_key=SECRET))
    with pytest.raises(UntrustedChunkError):
        store.get(KEY, LAYOUT)


# ---------------------------------------------------------------------- keys
def secret_file(path: Path, content: bytes = SECRET, mode: int = 0o600) -> Path:
    path.write_bytes(content)
    path.chmod(mode)
    return path


def test_a_key_is_bytes_a_file_or_a_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = SigningKey(SECRET)
    file = secret_file(tmp_path / "key", SECRET + b"\n")
    monkeypatch.setenv(ENVIRONMENT, SECRET.decode())
    for source in (SECRET, key, file, str(file), None):
        found = SigningKey.of(source)
        assert found is not None
        assert found.id == key.id
    opened = DiskStore(tmp_path / "kv").signing_key
    assert opened is not None
    assert opened.id == key.id
    monkeypatch.delenv(ENVIRONMENT)
    assert SigningKey.of(None) is None
    assert SigningKey(OTHER).id != key.id


NO_KEYS: dict[str, Callable[[Path], Any]] = {
    "a file that a group may read": lambda folder: secret_file(folder / "key", mode=0o640),
    "a file that others may read": lambda folder: secret_file(folder / "key", mode=0o604),
    "a file that a group may write": lambda folder: secret_file(folder / "key", mode=0o620),
    "a short file": lambda folder: secret_file(folder / "key", SECRET[:31]),
    "an empty file": lambda folder: secret_file(folder / "key", b""),
    "a file of nothing": lambda folder: secret_file(folder / "key", b"\0" * 40),
    "a file of lines": lambda folder: secret_file(folder / "key", b"two lines\n" * 5),
    "a long file": lambda folder: secret_file(folder / "key", b"x" * 5000),
    "a link": lambda folder: folder / "link",
    "a folder": lambda folder: folder / "folder",
    "a pipe": lambda folder: folder / "pipe",
    "nothing there": lambda folder: folder / "missing",
    "short": lambda _: b"short",
    "a number": lambda _: 12,
    "bytes that may change": lambda _: bytearray(64),
}


@pytest.mark.parametrize("kind", NO_KEYS)
def test_what_is_no_secret_is_refused(tmp_path: Path, kind: str) -> None:
    (tmp_path / "link").symlink_to(secret_file(tmp_path / "right"))
    (tmp_path / "folder").mkdir(0o700)
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(InvalidInputError):
        DiskStore(tmp_path / "kv", signing_key=NO_KEYS[kind](tmp_path))


def test_a_key_is_in_nothing_that_is_shown_or_sent(tmp_path: Path) -> None:
    secret = "unguessable-" + "q" * 40
    key = SigningKey(secret.encode())
    stores = (
        DiskStore(tmp_path, signing_key=key),
        RemoteStore(f"file://{tmp_path}", signing_key=key),
    )
    for shown in (repr(key), str(key), *map(repr, stores)):
        assert secret not in shown
        assert key.id in shown
    with pytest.raises(InvalidInputError):
        pickle.dumps(key)
    # A key in place of a path is not told either.
    with pytest.raises(InvalidInputError) as error:
        SigningKey.of(secret)
    assert secret not in str(error.value)
    raw = written(tmp_path / "kv", secret.encode())
    assert secret.encode() not in raw


# ---------------------------------------------------------------------- answers
def engine_over(store: ChunkStore, rotation: Any = "copied") -> Engine:
    return Engine(
        build("llama"),
        byte_tokenizer(),
        template=TEMPLATE,
        store=store,
        rotation=rotation,
        prompt_memory=0,  # each question asks the store
    )


@pytest.mark.parametrize("rotation", ["copied", "deferred"])
@pytest.mark.parametrize("codec", [Native(), Int8()], ids=repr)
def test_what_somebody_else_wrote_never_yields_a_token(
    tmp_path: Path, codec: Any, rotation: str
) -> None:
    store = DiskStore(tmp_path / "kv", durable=False, codec=codec, signing_key=SECRET)
    engine = engine_over(store, rotation)
    keys = engine.add(TEXTS)
    expected = engine.generate(QUESTION, TEXTS, max_new_tokens=6)
    path = store.path(keys[-1])
    forgery = forged(path.read_bytes(), lambda payload: payload.__setitem__(-600, 0x7F))
    path.write_bytes(forgery)
    for _ in range(2):
        before = store.stats().untrusted
        stream = engine.stream(QUESTION, TEXTS, max_new_tokens=6)
        assert "".join(stream) == expected.text
        assert (stream.metrics.misses, stream.metrics.hits["disk"]) == (1, len(TEXTS) - 1)
        assert store.stats().untrusted > before
    assert path.read_bytes() == forgery
    assert store.stats().corrupt == 0


def test_without_cryptography_a_key_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers", None)
    with pytest.raises(MissingExtraError, match=r"kvcache-rag\[auth\]"):
        SigningKey(SECRET)
