"""A store's folder is listed, checked and tidied without a model, whatever lies in it."""

from __future__ import annotations

import json
import os
import shutil
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file

from kvcache_rag.commands.store import Summary
from kvcache_rag.errors import CorruptChunkError
from kvcache_rag.stores import DiskStore
from kvcache_rag.stores.file import Header, file_header
from kvcache_rag.stores.listing import StoredFile, manifest_of, namespaces
from kvcache_rag.stores.object_names import MANIFEST
from tests.contracts import key_of, make_chunk

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture
def store(tmp_path: Path) -> DiskStore:
    return DiskStore(tmp_path / "kv", durable=False)


def put(store: DiskStore, seed: int = 0, namespace: str = "") -> Path:
    chunk = make_chunk(seed)
    key = key_of(chunk, namespace=namespace)
    assert store.put(key, chunk)
    return store.path(key)


def chunks(store: DiskStore) -> list[StoredFile]:
    return [
        chunk
        for namespace in namespaces(store.root)
        for spec in namespace.specs()
        for chunk in spec.chunks()
    ]


# ---------------------------------------------------------------------- inventory
def test_namespaces_and_specs_are_apart(store: DiskStore) -> None:
    for namespace in ("", "tenant"):
        put(store, 1, namespace)
    other = make_chunk(2)
    store.put(key_of(other, spec="ab" * 32), other)
    assert sorted(len(list(one.specs())) for one in namespaces(store.root)) == [1, 2]
    assert len(chunks(store)) == 3


def test_what_is_counted(store: DiskStore) -> None:
    paths = [put(store, seed) for seed in range(4)]
    paths[0].with_suffix(f".owner-{'0' * 16}").touch()
    (paths[0].parent / ".tmp-torso").write_bytes(b"12345")
    (paths[0].parent.parent / ".tmp-manifest").write_bytes(b"123")
    (spec,) = next(namespaces(store.root)).specs()
    found = Summary.from_spec(spec)
    assert (found.chunks, found.nbytes) == (4, sum(path.stat().st_size for path in paths))
    assert (found.unfinished, found.unfinished_bytes) == (3, 8), "and what 0.1.0 left"


def test_no_link_is_followed_and_foreign_names_are_left_alone(
    store: DiskStore, tmp_path: Path
) -> None:
    path = put(store)
    outside = DiskStore(tmp_path / "outside", durable=False)
    foreign = put(outside, 1)
    spec = path.parent.parent
    (spec / "zz").mkdir()
    (spec / "notes.txt").write_text("mine")
    (path.parent / "notes.txt").write_text("mine")
    os.symlink(foreign.parent, spec / ("00" if path.parent.name != "00" else "01"))
    os.symlink(foreign.parent.parent, spec.parent / ("1" * 16))
    os.symlink(outside.root, store.root / ("2" * 32))
    quarantine = spec.parent / "quarantine"
    os.symlink(foreign.parent, quarantine)
    assert [found.path for found in chunks(store)] == [str(path)]
    assert list(next(namespaces(store.root)).quarantined()) == []
    os.symlink(store.root, tmp_path / "link")
    assert len(list(namespaces(tmp_path / "link"))) == 1, "a store behind a link is one"


def test_what_vanishes_meanwhile_was_not_there(store: DiskStore) -> None:
    for seed in range(30):
        put(store, seed)
    found = 0
    for namespace in namespaces(store.root):
        for spec in namespace.specs():
            for _ in spec.chunks():
                found += 1
                shutil.rmtree(store.root, ignore_errors=True)
            assert list(spec.chunks()) == []
        assert list(namespace.specs()) == []
    assert 0 < found < 30
    assert list(namespaces(store.root)) == []


# ---------------------------------------------------------------------- manifests
SPEC = {
    "model": {"id": "org/name", "revision": "abcdef012345", "type": "llama", "quantization": None},
    "compute_dtype": "torch.bfloat16",
    "stored_dtype": "torch.bfloat16",
    "groups": [{"layers": [0, 1], "key_shape": [2, 8], "value_shape": [2, 8], "window": None}],
    "inv_freq": ["00"],
    "format": 1,
    "codec": "native",
    "prefix": [1, 2, 3],
}


def manifest(store: DiskStore) -> dict[str, Any]:
    (spec,) = next(namespaces(store.root)).specs()
    return spec.manifest


def test_a_manifest_says_which_model_it_is_and_nothing_of_texts(store: DiskStore) -> None:
    store.describe(key_of(make_chunk()).spec, "", manifest_of(SPEC, "ignored"))
    assert list(store.root.iterdir()) == [], "nothing is written before there is a chunk"
    place = put(store).parent.parent / MANIFEST
    found = manifest(store)
    assert (found["model"], found["revision"], found["codec"]) == (
        "org/name",
        "abcdef012345",
        "native",
    )
    assert found["groups"] == [{"layers": 2, "key_shape": [2, 8], "value_shape": [2, 8]}]
    assert found["prefix_tokens"] == 3
    assert "prefix" not in found
    assert abs(found["created"] - time.time()) < 60
    assert place.stat().st_mode & 0o777 == 0o600


def test_of_a_model_folder_only_the_end_of_its_path_is_kept() -> None:
    model = {"type": "llama", "quantization": None, "weights": "0123", "config": "4567"}
    found = manifest_of({**SPEC, "model": model}, "some/where/models/mine")
    assert (found["model"], found["revision"]) == ("models/mine", "0123")


def test_a_manifest_is_written_once_and_again_when_it_is_gone(store: DiskStore) -> None:
    place = put(store).parent.parent / MANIFEST
    assert not place.exists(), "nothing is known of it"
    spec = key_of(make_chunk()).spec
    for name in ("first", "second"):
        store.describe(spec, "", {"model": name})
        put(store)
        assert manifest(store)["model"] == "first"
    place.unlink()
    put(store)
    assert manifest(store)["model"] == "second"


def test_a_manifest_that_cannot_be_written_is_no_error(store: DiskStore) -> None:
    store.describe(key_of(make_chunk()).spec, "", {"model": object()})
    put(store)
    assert manifest(store) == {}


@pytest.mark.parametrize("text", ["", "{", "[1]", '"text"', "[" * 100_000, '{"a": "' + "x" * 99999])
def test_a_damaged_manifest_is_none(store: DiskStore, text: str) -> None:
    (put(store).parent.parent / MANIFEST).write_text(text)
    assert manifest(store) == {}


# ---------------------------------------------------------------------- headers, without a model
TOKENS = {"dtype": "I32", "shape": [0], "data_offsets": [0, 0]}
METADATA = {
    "format": "kvcache-rag/1",
    "codec": "native",
    "start": "0",
    "xxh3_128": "0" * 32,
    "provenance": "test",
    "pad": "",
}


def facts(path: Path, header: object, **metadata: str) -> Header:
    """What is read of a file of this header and nothing else."""
    if isinstance(header, dict):
        header = {**header, "__metadata__": {**METADATA, "key": path.stem, **metadata}}
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % 4096)
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    return file_header(str(path), path.stem)


@pytest.mark.parametrize(
    "header",
    [
        [],
        {},
        {"tokens": TOKENS},
        {"tokens": TOKENS, "kv": 1},
        {"tokens": TOKENS, "kv": {**TOKENS, "shape": [0, 1 << 62]}},
        {"tokens": TOKENS, "kv": {**TOKENS, "shape": [-1]}},
        {"tokens": TOKENS, "kv": {**TOKENS, "shape": [True]}},
        {"tokens": TOKENS, "kv": {**TOKENS, "shape": [0.0]}},
        {"tokens": TOKENS, "kv": {**TOKENS, "shape": [0] * 9}},
        {"tokens": TOKENS, "kv": {**TOKENS, "dtype": "F4"}},
        {"tokens": TOKENS, "kv": {**TOKENS, "dtype": []}},
        {"tokens": TOKENS, "kv": {**TOKENS, "data_offsets": [1, 1]}},
        {"tokens": TOKENS, "kv": {**TOKENS, "more": 1}},
        {"tokens": {**TOKENS, "dtype": "F32"}, "kv": TOKENS},
        {"tokens": {**TOKENS, "shape": [0, 0]}, "kv": TOKENS},
    ],
)
def test_impossible_headers_are_refused(store: DiskStore, header: object) -> None:
    path = put(store)
    with pytest.raises(CorruptChunkError):
        facts(path, header)
    assert facts(path, {"tokens": TOKENS, "kv": TOKENS}).tokens == 0, "the rest of it is right"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("format", "kvcache-rag/2"),
        ("codec", "Native"),
        ("start", "-1"),
        ("start", "01"),
        ("xxh3_128", "0"),
        ("provenance", ""),
        ("pad", "x"),
        ("more", "x"),
    ],
)
def test_impossible_metadata_is_refused(store: DiskStore, name: str, value: str) -> None:
    with pytest.raises(CorruptChunkError):
        facts(put(store), {"tokens": TOKENS, "kv": TOKENS}, **{name: value})


@pytest.mark.parametrize(
    "make",
    [
        lambda path: save_file({"x": torch.zeros(3)}, path),
        lambda path: path.symlink_to("/dev/zero"),
        os.mkfifo,
        os.mkdir,
    ],
    ids=["another-safetensors-file", "link", "pipe", "folder"],
)
def test_what_is_no_file_of_a_chunk_is_refused(
    store: DiskStore, make: Callable[[Path], None]
) -> None:
    path = put(store)
    path.unlink()
    with pytest.raises(FileNotFoundError):
        file_header(str(path), path.stem)
    make(path)
    with pytest.raises(CorruptChunkError):
        file_header(str(path), path.stem)


def test_what_an_interrupted_deletion_left_is_listed(store: DiskStore) -> None:
    path = put(store)
    size, spec = path.stat().st_size, path.parent.parent
    os.rename(spec, spec.parent / ".deleted-0123")
    (namespace,) = namespaces(store.root)
    assert list(namespace.specs()) == []
    (deleted,) = namespace.deleted()
    assert deleted.path.endswith(".deleted-0123")
    assert deleted.nbytes == size
