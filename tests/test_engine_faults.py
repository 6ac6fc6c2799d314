"""Whatever happens to the files of a store, a question has the answer that it has without them."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

import pytest

from kvcache_rag import DiskStore, Engine, MemoryStore, PromptTemplate, TieredStore
from tests.small import make_model, make_tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TEXTS = [f"Chunk number {number} says {number * 7}." for number in range(3)]
FAULTS: dict[str, Callable[[Path, list[Path]], object]] = {
    "cut": lambda root, files: [os.truncate(path, 4100) for path in files],
    "emptied": lambda root, files: [path.write_bytes(b"") for path in files],
    "zeroed": lambda root, files: [path.write_bytes(bytes(path.stat().st_size)) for path in files],
    "one flipped": lambda root, files: flip(files[0]),
    "rotated names": lambda root, files: rotate(files),
    "folders": lambda root, files: [(path.unlink(), path.mkdir()) for path in files],
    "links": lambda root, files: [(path.unlink(), path.symlink_to(root)) for path in files],
    "pipes": lambda root, files: [(path.unlink(), os.mkfifo(path)) for path in files],
    "gone": lambda root, files: shutil.rmtree(root),
    "root is a file": lambda root, files: (shutil.rmtree(root), root.write_bytes(b"")),
}


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)


def rotate(files: list[Path]) -> None:
    contents = [path.read_bytes() for path in files]
    for path, content in zip(files, contents[1:] + contents[:1], strict=True):
        path.write_bytes(content)


def engine_over(store: DiskStore | TieredStore | MemoryStore) -> Engine:
    template = PromptTemplate(system="Read.", chunk_start="", chunk_end="")
    return Engine(make_model(), make_tokenizer(), store=store, template=template)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("tiers", [1, 2])
def test_a_question_never_fails(tmp_path: Path, fault: str, tiers: int) -> None:
    expected = engine_over(MemoryStore()).generate("Which?", TEXTS, max_new_tokens=5)
    root = tmp_path / "kv"
    engine_over(DiskStore(root, durable=False)).add(TEXTS)
    files = sorted(root.rglob("*.safetensors"))
    assert len(files) >= len(TEXTS)
    disk = DiskStore(root, durable=False)
    engine = engine_over(disk if tiers == 1 else TieredStore(MemoryStore(), disk))
    FAULTS[fault](root, files)
    first = engine.generate("Which?", TEXTS, max_new_tokens=5)
    assert first.token_ids == expected.token_ids
    assert first.metrics.misses > 0
    again = engine.generate("Which?", TEXTS, max_new_tokens=5)
    assert again.token_ids == expected.token_ids
    if fault != "root is a file" or tiers == 2:
        assert again.metrics.misses == 0, "what was missing is stored anew"
    stats = disk.stats()
    assert stats.misses + stats.corrupt > 0
