"""The kept inputs of every fuzzed target, a few new ones, and the fuzzing itself."""

from __future__ import annotations

import importlib.util

import pytest

from tests.fuzz import fuzzing
from tests.fuzz.targets import CORPUS, TARGETS

KEPT = [(name, file) for name in TARGETS for file in sorted(TARGETS[name].kept())]


@pytest.mark.parametrize(("name", "file"), KEPT)
def test_a_kept_input_keeps_the_law(name: str, file: str) -> None:
    check, _ = TARGETS[name].load()
    check(TARGETS[name].kept()[file])


@pytest.mark.parametrize("name", TARGETS)
def test_seeds_are_accepted_and_kept_inputs_are_small(name: str) -> None:
    check, seeds = TARGETS[name].load()
    assert all(check(seed) for seed in seeds)
    kept = TARGETS[name].kept()
    assert len(kept) >= 10
    assert not all(check(data) for data in kept.values())
    assert sum(map(len, kept.values())) < 32 << 10
    assert {path.name for path in CORPUS.iterdir()} == set(TARGETS)


@pytest.mark.parametrize("name", TARGETS)
def test_new_inputs_keep_the_law(name: str) -> None:
    run = fuzzing.fuzz(name, "hypothesis", executions=150, seed=7)
    assert (run.target, run.engine, run.executions) == (name, "hypothesis", 150)
    assert f"{name}: 150 executions" in str(run)


@pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="no wheel of atheris")
def test_atheris_counts_what_it_tried() -> None:
    run = fuzzing.fuzz("keys", "atheris", executions=3000)
    assert run.executions >= 3000
    assert run.covered is not None
    assert run.covered > 20, "nothing is instrumented"
