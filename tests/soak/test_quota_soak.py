"""Quotas under contention: 400 kB, 5 MB and 500 MB, one to eight processes."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest

from tests.quotas import contend
from tests.reliability import record

if TYPE_CHECKING:
    from pathlib import Path

LOG = logging.getLogger(__name__)  # pytest -o log_cli=true -o log_cli_level=INFO

TOKENS = {400_000: 512, 5_000_000: 512, 500_000_000: 26_000}  # of the largest chunk


@pytest.mark.parametrize("writers", [1, 4, 8])
@pytest.mark.parametrize("quota", TOKENS)
def test_writers_stay_below_a_quota_at_every_moment(
    tmp_path: Path, quota: int, writers: int
) -> None:
    done = contend(tmp_path / "q", quota=quota, writers=writers, tokens=TOKENS[quota], seconds=2)
    LOG.info("quota %d, %d writers: %.3f of it, %s", quota, writers, done.most / quota, done)
    done.check(quota, writers, TOKENS[quota])
    tried = f"chunks put by {writers} processes into a folder with a quota of {quota / 1e6:g} MB"
    most = f"{done.most / quota:.2f}"
    seen = {"looks": done.looks, "most of the quota": most, "declined": done.declined}
    name = f"processes-quota-{quota}-{writers}"
    record(name, "processes", tried, done.puts, **seen, above_the_bound=0)
