"""What `benchmarks.growth` fits, grows and measures; no clock is judged."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from benchmarks import growth
from benchmarks.growth import Grown, Point, key_of

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("power", [0.0, 1.0, 2.0])
def test_the_exponent_of_a_power_is_that_power_and_decides_what_holds(power: float) -> None:
    points = [(size, 0.003 * size**power) for size in (10, 100, 1000)]
    assert growth.exponent(points) == pytest.approx(power)
    found = growth.fitted([Point(name, *one, 1) for name in ("hit", "store du") for one in points])
    holds = {row["curve"]: row["holds"] == "yes" for row in found}
    assert holds == {"hit": power < 1, "store du": power < 2}


def test_a_measured_store_holds_what_it_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Grown, "_opened", lambda _, size: [Point("opening", size, 1.0, 1)])
    grown = Grown(tmp_path)
    grown.grow(40)
    curves = {point.curve for point in grown.measure()}
    assert {"hit", "contains", "store du", "write to a full store"} <= curves
    assert len([*tmp_path.rglob("*.safetensors")]) == 40
    assert all(grown.store.contains(key_of(seed)) for seed in range(40))
    assert Grown(tmp_path).count == 40, "a later run goes on"
    grown.store.delete(key_of(3))
    assert Grown(tmp_path).count == 0, "a run that was killed while it measured begins anew"


def test_a_run_measures_only_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def measure(self: Grown) -> list[Point]:
        asked.append(self.count)
        return [Point("hit", self.count, 1e-4, 1)]

    monkeypatch.setattr(Grown, "measure", measure)
    growth.Run(tmp_path).store([5, 10])
    later = growth.Run(tmp_path)
    later.store([5, 10, 20])
    assert asked == [5, 10, 20]
    assert [point.size for point in later.points] == [5, 10, 20]
