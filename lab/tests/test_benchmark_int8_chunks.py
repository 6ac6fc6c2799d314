"""The pure parts of the benchmark of chunks in 8 bits, and its sides on a tiny model."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import pytest
from laws import TEXTS
from test_deferred_int8 import asked, disk, needs_kernel

from benchmarks import int8_chunks as bench
from kvcache_rag import DiskStore

if TYPE_CHECKING:
    from pathlib import Path


def test_bytes_come_at_their_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 1_000_000)
    slept: list[float] = []
    monkeypatch.setattr(time, "perf_counter", lambda: 5.0 + sum(slept))
    monkeypatch.setattr(time, "sleep", slept.append)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with bench.slowly():
            for offset in (0, 500_000):
                assert os.preadv(descriptor, [bytearray(500_000)], offset) == 500_000
    finally:
        os.close(descriptor)
    assert slept == pytest.approx([0.005, 0.005])


@needs_kernel
def test_sides_take_turns_over_the_same_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "CHUNKS", len(TEXTS))
    monkeypatch.setattr(bench, "RATE", 1e12)
    engines = {
        bench.NATIVE: asked("llama", DiskStore(tmp_path / "native"), "copied"),
        bench.COPIED: asked("llama", disk(tmp_path / "int8"), "copied"),
        bench.PLACE: asked("llama", disk(tmp_path / "int8"), "auto"),
    }
    for side in (bench.NATIVE, bench.PLACE):
        engines[side].add(TEXTS)
    for place in ("page cache", "cold", "100 MB/s"):
        rows = bench.measured(engines, TEXTS, tmp_path, place, 2)
        assert [row["side"] for row in rows] == [*bench.SIDES]
        assert rows[0]["of native's"] == {"value": 1.0, "low": 1.0, "high": 1.0}
        assert all(row["ms to the first"] > 0 for row in rows)
    engines[bench.NATIVE] = engines[bench.PLACE]
    with pytest.raises(SystemExit, match="native answered otherwise"):
        bench.measured(engines, TEXTS, tmp_path, "page cache", 1)
