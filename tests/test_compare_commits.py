"""`tools/compare_commits.py`: statistics of made figures, and two pairs of HEAD against itself."""

from __future__ import annotations

import json
import math
import random
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tools import compare_commits
from tools.compare_commits import (
    Ratio,
    exit_code,
    geometric_mean,
    is_too_noisy,
    order,
    ratio_of,
    table,
    trees_of,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).parent.parent


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


def test_pairs_of_one_ratio_leave_nothing_open_whatever_the_machine_does() -> None:
    drifting = [1.0 + 0.1 * number for number in range(30)]
    found = ratio_of("made", drifting, [1.04 * one for one in drifting])
    assert (found.value, found.low, found.high) == pytest.approx((1.04, 1.04, 1.04))
    assert not found.is_slower
    assert not found.is_quiet


def test_the_interval_holds_the_truth_and_shrinks_with_pairs() -> None:
    generator = random.Random(1)
    noise = [math.exp(generator.gauss(0, 0.03)) for _ in range(120)]
    ones = [1.0] * len(noise)
    few, many = ratio_of("made", ones[:12], noise[:12]), ratio_of("made", ones, noise)
    assert few.low < 1 < few.high
    assert many.low < 1 < many.high
    assert many.high - many.low < 0.6 * (few.high - few.low)
    assert few == ratio_of("made", ones[:12], noise[:12])  # no chance in it


def test_a_single_slow_pair_moves_nothing() -> None:
    ones = [1.0] * 30
    found = ratio_of("made", ones, [*ones[:-1], 9.0])
    assert (found.value, found.low, found.high) == (1, 1, 1)


def test_pairs_run_in_order_abba() -> None:
    sides = ["AB"[side] for pair in range(4) for side in order(pair)]
    assert "".join(sides) == "ABBAABBA"


def test_pairs_are_of_several_processes() -> None:
    found = compare_commits.blocks(30)
    assert [len(block) for block in found] == [7, 8, 7, 8]
    assert [pair for block in found for pair in block] == list(range(30))
    assert compare_commits.blocks(2) == [range(2)]


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
    assert exit_code([*QUIET, ratio(1.0, 0.97, 1.03)], ratios) == 2  # whatever it said


@pytest.mark.parametrize(
    ("low", "high", "noisy"),
    [(0.985, 1.019, False), (0.99, 1.021, True), (0.979, 1.0, True), (1.021, 1.03, True)],
)
def test_a_commit_must_equal_itself(low: float, high: float, noisy: bool) -> None:
    assert is_too_noisy([*QUIET, ratio((low + high) / 2, low, high)]) == noisy


def test_the_table_has_a_line_for_each_and_one_for_all() -> None:
    shown = table([ratio(1.1, 1.05, 1.2), ratio(1 / 1.1, 0.8, 1.0)], lambda one: "so")
    header, *rows, total = shown.splitlines()
    assert header.split()[-1] == "verdict"
    assert rows[0].split() == ["made", "100.000", "ms", "1.100", "1.050", "to", "1.200", "30", "so"]
    assert total.split() == ["all", "1.000", "geometric", "mean"]
    assert geometric_mean([ratio(2, 1, 3), ratio(0.5, 0, 1)]) == pytest.approx(1)


# --------------------------------------------------------------------------------------- the run
def test_a_noisy_machine_ends_the_run_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    compared: list[int] = []

    def made(
        trees: Sequence[Path], scenarios: Sequence[str], pairs: int, clock: str
    ) -> list[Ratio]:
        compared.append(pairs)
        return [ratio(1.0, 0.9, 1.1)]

    monkeypatch.setattr(compare_commits, "compare", made)
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


def test_an_unknown_revision_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert compare_commits.main(["no-such-branch", "HEAD"]) == 2
    assert "no-such-branch is no commit" in capsys.readouterr().err


def test_trees_are_those_of_their_revisions_and_go_again() -> None:
    with trees_of(["WORKTREE", "HEAD", "WORKTREE"]) as (working, head, again):
        assert working == again
        assert (working / "src" / "kvcache_rag" / "__init__.py").is_file()
        command = ["git", "-C", str(head), "rev-parse", "HEAD"]
        found = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        assert found.strip() == compare_commits.commit_of("HEAD")
    assert not working.exists()
    assert str(head) not in compare_commits._git("worktree", "list")


def test_a_pair_of_head_against_itself() -> None:
    with trees_of(["HEAD"]) as (head,):
        (found,) = compare_commits.compare([head, head], ["store"], 1)
    assert (found.scenario, found.pairs) == ("store", 1)
    assert 0.2 < found.value < 5


def test_a_side_that_has_another_package_is_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(RuntimeError, match="a side imported"),
        compare_commits.two_sides([tmp_path], ["store"], "wall"),
    ):
        pass
