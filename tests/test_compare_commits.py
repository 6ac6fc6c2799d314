"""`tools/compare_commits.py`: statistics of made figures, and two pairs of HEAD against itself."""

from __future__ import annotations

import json
import math
import random
from contextlib import nullcontext
from typing import TYPE_CHECKING

import pytest

from tools import compare_commits
from tools.compare_commits import Ratio, exit_code, ratio_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


def ratio(value: float, low: float, high: float) -> Ratio:
    return Ratio("made", value, low, high, 30, 0.1)


QUIET = [ratio(1.0, 0.985, 1.015), ratio(1.001, 0.99, 1.019)]


# ------------------------------------------------------------------------------------ statistics
def test_the_ratio_is_the_median_of_the_log_ratios() -> None:
    found = ratio_of("made", [1.0, 2.0, 1.0], [2.0, 4.0, 50.0])
    assert found.value == pytest.approx(2)
    assert (found.pairs, found.seconds) == (3, 1.0)
    # Both ways around it says the same, as a median of ratios of an even number would not.
    first, second = [1.0, 1.0], [1.0, 4.0]
    there, back = ratio_of("made", first, second), ratio_of("made", second, first)
    assert there.value == pytest.approx(2)
    assert back.value == pytest.approx(1 / there.value)


def test_the_interval_holds_the_truth_and_shrinks_with_pairs() -> None:
    generator = random.Random(1)
    noise = [math.exp(generator.gauss(0, 0.03)) for _ in range(120)]
    ones = [1.0] * len(noise)
    few, many = ratio_of("made", ones[:12], noise[:12]), ratio_of("made", ones, noise)
    assert few.low < 1 < few.high
    assert many.low < 1 < many.high
    assert many.high - many.low < 0.6 * (few.high - few.low)
    assert few == ratio_of("made", ones[:12], noise[:12])  # no chance in it


@pytest.mark.parametrize(
    ("ratios", "code"),
    [
        ([ratio(1.0, 0.98, 1.02), ratio(0.9, 0.8, 0.95)], 0),
        ([ratio(1.04, 1.03, 1.05)] + [ratio(1.0, 0.99, 1.01)] * 3, 0),
        ([ratio(1.02, 0.99, 1.051), ratio(0.9, 0.8, 0.95)], 1),  # one is slower
        ([ratio(1.021, 1.0, 1.04)] * 2, 1),  # each is allowed, all together are not
    ],
)
def test_a_slower_commit_is_told(ratios: Sequence[Ratio], code: int) -> None:
    assert exit_code(QUIET, ratios) == code
    for low, high in ((0.97, 1.03), (0.99, 1.021), (0.979, 1.0), (1.021, 1.03)):
        noisy = [*QUIET, ratio((low + high) / 2, low, high)]  # a commit must equal itself
        assert exit_code(noisy, ratios) == 2, (low, high)


# --------------------------------------------------------------------------------------- the run
def test_a_noisy_machine_ends_the_run_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    compared: list[int] = []

    def made(_trees: object, _scenarios: object, pairs: int, _clock: str) -> list[Ratio]:
        compared.append(pairs)
        return [ratio(1.0, 0.9, 1.1)]

    monkeypatch.setattr(compare_commits, "compare", made)
    monkeypatch.setattr(compare_commits, "trees_of", lambda _: nullcontext([tmp_path, tmp_path]))
    written = tmp_path / "figures.json"
    assert compare_commits.main(["HEAD", "HEAD", "--json", str(written)]) == 2
    assert compared == [compare_commits.PAIRS]
    shown = capsys.readouterr().out
    assert "too noisy: an interval is not within 2 %" in shown
    assert "verdict:" not in shown
    report = json.loads(written.read_text())
    assert (report["code"], report["ratios"], report["equal"][0]["high"]) == (2, [], 1.1)
    assert compare_commits.main(["HEAD", "HEAD", "--anyway"]) == 2
    assert "verdict: too noisy, does not count" in capsys.readouterr().out
    assert len(compared) == 3
