"""Run a target: by atheris where it has a wheel, by Hypothesis everywhere."""

from __future__ import annotations

import hashlib
import importlib.util
import random
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import hypothesis
from hypothesis import strategies as st

from tests.fuzz.mutation import mutated
from tests.fuzz.targets import TARGETS, Target

ENGINES: Final = ("atheris", "hypothesis")
_ROOT: Final = Path(__file__).parents[2]
_EXECUTED: Final = re.compile(r"stat::number_of_executed_units:\s*(\d+)")
_COVERED: Final = re.compile(r"cov: (\d+) ft: \d+ corp: (\d+)")
_BATCH: Final = 2000  # inputs of one run of Hypothesis, after which the clock is looked at


_ANY: Final = hypothesis.settings(
    deadline=None,
    database=None,
    phases=[hypothesis.Phase.generate],
    suppress_health_check=list(hypothesis.HealthCheck),
)


class BrokenLaw(AssertionError):
    """An input for which a target's law does not hold."""


@dataclass(frozen=True)
class Run:
    """What was tried, by what; None where nobody counts it."""

    target: str
    engine: str
    executions: int
    seconds: float
    covered: int | None = None  # branches
    corpus: int | None = None  # inputs that saw another branch each

    def __str__(self) -> str:
        rate = self.executions / max(self.seconds, 1e-9)
        seen = f", {self.covered} branches by {self.corpus} inputs" if self.covered else ""
        return (
            f"{self.target}: {self.executions} executions in {self.seconds:.0f} s "
            f"({rate:.0f}/s) by {self.engine}{seen}"
        )


def best_engine() -> str:
    """The engine of this platform."""
    return ENGINES[0] if importlib.util.find_spec("atheris") else ENGINES[1]


def fuzz(name: str, engine: str, *, executions: int = 0, seconds: int = 0, seed: int = 0) -> Run:
    """Try inputs until either limit; 0 is none, and one of both must be given.

    Raises:
        BrokenLaw: With the input, if there is one for which the law does not hold.
        ValueError: Without a limit.
    """
    if executions < 1 and seconds < 1:
        raise ValueError("give a number of executions or of seconds")
    run = _guided if engine == "atheris" else _by_hypothesis
    return run(TARGETS[name], executions, seconds, seed)


def _guided(target: Target, executions: int, seconds: int, seed: int) -> Run:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        corpus, found = place / "corpus", place / "found"
        corpus.mkdir()
        found.mkdir()
        _, seeds = target.load()
        for data in (*seeds, *target.kept().values()):
            (corpus / hashlib.sha1(data).hexdigest()).write_bytes(data)
        escaped = ("".join(f"\\x{byte:02x}" for byte in token) for token in target.tokens)
        (place / "words").write_text("".join(f'"{token}"\n' for token in escaped))
        flags = [
            f"-runs={executions or -1}",
            f"-max_total_time={seconds}",
            f"-max_len={target.longest}",
            f"-dict={place / 'words'}",
            f"-artifact_prefix={found}/",
            f"-seed={seed or 1}",
            "-len_control=0",  # seeds are not short, and are gone on from as they are
            "-timeout=20",
            "-rss_limit_mb=4096",
            "-print_final_stats=1",
            str(corpus),
        ]
        command = [sys.executable, "-m", "tests.fuzz.guided", target.name, *flags]
        started = time.monotonic()
        done = subprocess.run(
            command, cwd=_ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
        )
        output = done.stdout.decode("utf-8", "replace")
        for path in sorted(found.iterdir()):
            raise BrokenLaw(f"{target.name}: {path.read_bytes()!r}\n{output[-4000:]}")
        executed, covered = _EXECUTED.search(output), _COVERED.findall(output)
        if done.returncode or executed is None or not covered:
            ended = f"atheris ended with {done.returncode}"
            raise BrokenLaw(f"{target.name}: {ended}\n{output[-4000:]}")
        branches, inputs = map(int, covered[-1])
        took = time.monotonic() - started
        return Run(target.name, ENGINES[0], int(executed[1]), took, branches, inputs)


def _by_hypothesis(target: Target, executions: int, seconds: int, seed: int) -> Run:
    check, seeds = target.load()
    known = (*seeds, *target.kept().values())
    started, tried = time.monotonic(), 0

    def change(data: bytes, number: int) -> bytes:
        return mutated(data, target.tokens, random.Random(number), target.longest)

    words = st.sampled_from(target.tokens) | st.binary(max_size=8)
    inputs = st.one_of(
        st.builds(change, st.sampled_from(known), st.integers(0, 1 << 62)),
        st.lists(words, max_size=40).map(b"".join),
        st.binary(max_size=target.longest),
    )

    def ask(data: bytes) -> None:
        nonlocal tried
        tried += 1
        try:
            check(data)
        except Exception as error:
            raise BrokenLaw(f"{target.name}: {data!r}: {error!r}") from error

    while (not executions or tried < executions) and (
        not seconds or time.monotonic() - started < seconds
    ):
        most = min(_BATCH, executions - tried) if executions else _BATCH
        settings = hypothesis.settings(_ANY, max_examples=most)
        seed += 1
        hypothesis.seed(seed)(settings(hypothesis.given(inputs)(ask)))()
    return Run(target.name, ENGINES[1], tried, time.monotonic() - started)
