"""One arm of `benchmarks.serving` on the project's own servers, with a tiny model."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from benchmarks import serving_servers
from benchmarks.serving_model import TINY, generated, save_model
from benchmarks.serving_passes import PASSES, RATES, measure_passes
from benchmarks.serving_results import AHEAD, SHARED
from benchmarks.serving_run import Point, Setting, measure_arm
from benchmarks.serving_servers import WAYS, Place, running

if TYPE_CHECKING:
    from pathlib import Path


def test_an_arm_is_answered_by_two_servers_over_one_cache(tmp_path: Path) -> None:
    documents = generated(4, 400)
    save_model(TINY, documents, tmp_path)
    setting = Setting(
        model=tmp_path,
        documents=documents,
        top_k=2,
        answer_tokens=16,
        cache_bytes=10**8,
        device="same",
        streamed=False,
    )
    run = measure_arm(setting, AHEAD, Point("uniform", 1.0, 12), capacity=50.0)
    found = run["summary"]
    assert (found["requests"], found["answered"], run["failures"]) == (12, 12, [])
    assert 0 < found["share"] < 1, "both instances answered"
    assert found["hits"] > 0
    assert 0 < run["peak_cache_bytes"] < 10**6
    assert run["processor_seconds"] > 0
    assert run["full_prefill_before"] > 0
    assert run["full_prefill_after"] > 0
    assert all(first < total for first, total in zip(run["ttfts"], run["latencies"], strict=True))


def test_later_passes_find_what_the_first_one_left(tmp_path: Path) -> None:
    documents = generated(4, 400)
    save_model(TINY, documents, tmp_path)
    setting = Setting(tmp_path, documents, 2, 4, 10**8, "same", streamed=False)
    runs = list(measure_passes(setting, [SHARED], 6, capacity=20.0))
    assert [run["pass"] for run in runs] == [1, 2, 3] + [0] * len(RATES)
    assert len(runs) == PASSES + len(RATES)
    first, *later = runs
    # every document is a miss once; the cache holds all of them
    assert first["hits"] < 1
    assert all(run["hits"] == 1 for run in later)
    assert {run["cache_bytes"] for run in later} == {first["cache_bytes"]}
    for run in runs:
        assert run["answered"] == 6
        assert sum(run["parts"].values()) == pytest.approx(run["latency"])
        assert all(seconds >= 0 for seconds in run["parts"].values())


def test_a_server_that_ends_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = [sys.executable, "-c", "raise SystemExit('no such model')"]
    monkeypatch.setattr(serving_servers, "command_of", lambda *place: words)
    place = Place(tmp_path / "absent", tmp_path, 1000)
    with (
        pytest.raises(RuntimeError, match="ended with code 1: no such model"),
        running(WAYS[AHEAD], place),
    ):
        pytest.fail("it was ready")
