"""The self-check for machines with a GPU: its comparisons hold, and fail, without one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch

from benchmarks import gpu_check, ttft
from benchmarks.common import chunk_of
from benchmarks.gpu_check import Bench, answers, is_right, main, measure
from tests.chunks import LAYOUTS

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kvcache_rag.kv.chunk import ChunkKV
    from kvcache_rag.stores import ChunkStore

LAYOUT = LAYOUTS["fused-bfloat16"]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(LAYOUT, torch.device("cpu"), [chunk_of(LAYOUT, 20, n) for n in range(3)], tmp_path)


def test_every_side_equals_the_plain_path(bench: Bench) -> None:
    rows = measure(bench, 2)
    assert [row.side for row in rows] == ["disk native", "disk int8", "pageable", "resident"]
    assert all(row.equal and 0 < row.host <= row.everything for row in rows)


def test_a_difference_is_seen(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    load = Bench.load

    def wrong(self: Bench, store: ChunkStore, places: Sequence[ChunkKV]) -> Any:
        seconds = load(self, store, places)
        places[1].tensors[0][0][-1, -1, -1, -1, -1] += 1
        return seconds

    store = bench.sides()["disk int8"]
    assert bench.is_equal(store)
    monkeypatch.setattr(Bench, "load", wrong)
    assert not bench.is_equal(store)
    monkeypatch.undo()
    rows = measure(bench, 1)
    assert is_right(rows, {"a": gpu_check.CLOSE})
    assert not is_right(rows, {"a": 0.0, "b": 2 * gpu_check.CLOSE})


def test_a_model_answers_alike_from_every_store(tmp_path: Path) -> None:
    found = answers("cpu", tmp_path)
    assert 0 <= found.pop("resident, in place") < gpu_check.CLOSE
    assert found == dict.fromkeys(["disk native", "disk int8", "pageable", "resident"], 0.0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_step_without_a_gpu_is_not_passed(tmp_path: Path) -> None:
    assert main([]) == ttft.main(["--device", "cuda"]) == 2
    command = ["tools/gpu/run.sh", str(tmp_path), "kernel", "nonsense"]
    environment = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
    assert done.returncode == 1
    steps = (tmp_path / "steps.txt").read_text(encoding="utf-8")
    assert re.search(r"^kernel +not run: there is no CUDA device, \d+ s$", steps, re.MULTILINE)
    assert re.search(r"^nonsense +failed with status 64, \d+ s$", steps, re.MULTILINE)
    assert {one.name for one in tmp_path.iterdir()} == {"log", "steps.txt"}
