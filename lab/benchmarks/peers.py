"""Ours beside llama.cpp, KVBoost and stock transformers: the same prompts, the same weights.

    python -m benchmarks.peers                     # less than an hour on a quiet machine
    python -m benchmarks.peers --quick --json build/peers.json
    python -m benchmarks.render peers --table crossovers

SmolLM2-135M-Instruct, greedy.  Each side is a process of its own and gets one prompt at a time, and
the sides take turns at every prompt.  llama.cpp is fetched (the sources in llama-cpp-python's
sdist), compiled for this machine and given the same weights in several formats; KVBoost is fetched
from the package index.  Both need a network once, and what the work folder has already is used
again.  Every answer is written down there at once, so a run that was stopped goes on.

Each kind of job needs a state of the cache, and a round visits the kinds so that most sides are in
it already:

- `cold`      nothing is known
- `prefix`    the same chunks in the same order were asked before, with another question
- `long`      the same, with a long answer
- `shift`     (llama.cpp) a new order, equal runs of the last prompt shifted (`--cache-reuse`)
- `reorder`   the chunks are known, in another order
- `full`      (ours) a full prefill, which nothing is kept of
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass, replace
from itertools import groupby, takewhile
from operator import eq, itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from benchmarks.common import ROOT, commit, described, load, processor_of, result_file, write
from benchmarks.peers_sides import (
    CHUNK,
    LONGEST,
    PREFIX,
    QUERY,
    Llama,
    LlamaSide,
    Material,
    material,
    prepared,
)
from kvcache_rag.models.pretrained import load_tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence


OURS: Final = ("ours-auto", "ours-int8", "ours-int4")
LLAMA: Final = ("llama-BF16", "llama-F16", "llama-Q8_0", "llama-Q4_1")
SIDES: Final = (*OURS, *LLAMA, "stock", "kvboost")
# Not measured unless it is asked for: weights in the order in which torch loads them.
MORE_SIDES: Final = ("ours-plain",)
NEW: Final = 32
LONG: Final = 256


@dataclass(frozen=True)
class Rounds:
    """How often a context is asked.

    Attributes:
        full: Rounds over all kinds.
        repeats: Of what is cheap, in each of them.
        long: Of the long answers, in all of them together.
        without: Sides that are left out, for want of time.
        once: Sides that have the first full round only.
    """

    full: int
    repeats: int
    long: int
    without: tuple[str, ...] = ()
    once: tuple[str, ...] = ()


# By threads and tokens of context.
PLAN: Final = {
    (1, 1024): Rounds(3, 3, 1),
    (1, 2048): Rounds(2, 4, 1),
    (1, 4096): Rounds(2, 4, 1, without=("llama-F16",), once=("llama-Q4_1", "kvboost")),
    (2, 1024): Rounds(2, 4, 0),
    (2, 2048): Rounds(1, 6, 0, without=("llama-F16", "kvboost")),
    (2, 4096): Rounds(1, 6, 0, without=("llama-F16", "kvboost")),
}
QUICK: Final = {(1, 1024): Rounds(1, 2, 1)}


@dataclass(frozen=True)
class Job:
    """One prompt for one side.

    Attributes:
        side: Of `SIDES`.
        kind: See above.
        threads: Of the side.
        context: Tokens of the chunks.
        round: From 0.
        repeat: From 0, within the round.
        order: Of the chunks (see `peers_sides.order_of`).
        question: Which one.
        new: Tokens to generate.
    """

    side: str
    kind: str
    threads: int
    context: int
    round: int
    repeat: int
    order: int
    question: int
    new: int

    @property
    def name(self) -> str:
        """What a record of it is found by."""
        parts = (self.threads, self.context, self.side, self.kind, self.round, self.repeat)
        return "/".join(map(str, parts))


def jobs(threads: int, context: int, rounds: Rounds, sides: Sequence[str]) -> Iterator[Job]:
    """All jobs of a context, in the order in which they are asked.

    A side's `cold` of one round is the exact answer to its `prefix` of the round before, and
    llama.cpp's `reorder` to its `shift`; `full` and stock's `reorder` are to `reorder` of their
    round.
    """
    sides = [side for side in sides if side not in rounds.without]

    def turn(kind: str, number: int, repeat: int, order: int, question: int) -> Iterator[Job]:
        start = (number + repeat) % max(len(sides), 1)
        new = LONG if kind == "long" else NEW
        for side in (*sides[start:], *sides[:start]):
            if number and side in rounds.once:
                continue
            if asks(side, kind) and (repeat == 0 or is_cheap(side, kind)):
                at = (order, question)
                if kind == "reorder" and side.startswith("llama"):
                    at = (1 + after, after)
                yield Job(side, kind, threads, context, number, repeat, *at, new)

    for number in range(rounds.full):
        # The next round's, and the first one's behind the last; alone, a round has no such.
        after = (number + 1) % rounds.full if rounds.full > 1 else 1
        yield from turn("cold", number, 0, 0, number)
        for repeat in range(rounds.repeats):
            question = after if repeat == 0 else rounds.full + repeat
            yield from turn("prefix", number, repeat, 0, question)
        if number < rounds.long:
            yield from turn("long", number, 0, 0, 2 * rounds.full + rounds.repeats)
        yield from turn("shift", number, 0, 1 + number, number)
        for repeat in range(rounds.repeats):
            order = 1 + number if repeat == 0 else rounds.full + number * rounds.repeats + repeat
            question = number if repeat == 0 else rounds.full + repeat
            yield from turn("reorder", number, repeat, order, question)
        yield from turn("full", number, 0, 1 + number, number)


def asks(side: str, kind: str) -> bool:
    """Whether a kind is asked of a side."""
    if kind == "shift":
        return side.startswith("llama")
    return kind != "full" or side.startswith("ours")


def is_cheap(side: str, kind: str) -> bool:
    """Whether a job of a side takes no prefill of the context."""
    return (kind == "prefix" and side != "kvboost") or (
        kind == "reorder" and side.startswith("ours")
    )


def wanted(
    plan: dict[tuple[int, int], Rounds],
    threads: Sequence[int],
    contexts: Sequence[int],
    rounds: int | None,
) -> dict[tuple[int, int], Rounds]:
    """The part of a plan that is asked for, with so many full rounds if that is said."""
    found: dict[tuple[int, int], Rounds] = {}
    for (number, context), planned in plan.items():
        if number in threads and context in contexts:
            full = rounds or planned.full
            found[number, context] = replace(planned, full=full, long=min(planned.long, full))
    return found


def prompt_key(record: Mapping[str, Any]) -> tuple[int, int, int]:
    """What two records of equal prompts have in common."""
    return record["context"], record["order"], record["question"]


LENGTHS: Final = (16, 64, 256)
"""Generated tokens for which end-to-end times are told."""
# Ours, and the peers whose weights take about as many bits.
PAIRS: Final = (
    ("ours-auto", "llama-BF16"),
    ("ours-auto", "llama-F16"),
    ("ours-int8", "llama-Q8_0"),
    ("ours-int4", "llama-Q4_1"),
    ("ours-auto", "stock"),
    ("ours-auto", "kvboost"),
)
# A case, what ours is asked there, and what a peer is.
CASES: Final = (
    ("new order", "reorder", ("reorder", "shift")),
    ("same prefix", "prefix", ("prefix",)),
    ("nothing known", "full", ("cold",)),
)
_SAMPLE_DIGITS: Final = 4


@dataclass(frozen=True)
class Agreement:
    """How equal answers are to those of a full prefill of the same weights.

    Attributes:
        prompts: Compared.
        first_equal: Share whose first token is the same.
        all_equal: Share whose tokens are all the same.
        equal_tokens: From the first one on until the first other one, on average.
        tokens: Compared per prompt.
    """

    prompts: int
    first_equal: float
    all_equal: float
    equal_tokens: float
    tokens: int


@dataclass(frozen=True)
class Row:
    """One side in one case.

    Attributes:
        side: Of `SIDES`.
        kind: Of job.
        threads: Of the side.
        context: Tokens of the chunks.
        samples: How often it was asked.
        first_p50: Seconds to the first token.
        first_p95: The same; with few samples nearly the longest.
        step_p50: Seconds per further token, over all kinds of this side, threads and context.
        step_p95: The same.
        new: Tokens that were generated each time.
        total_p50: Seconds until the last of them.
        ends: End-to-end seconds per number of generated tokens, from `first_p50` and `step_p50`.
        reused: Tokens of the prompt that were not computed for it, the median.
        peak_mib: The largest resident set while it was asked.
        anon_mib: Of that, what is no file's, after it.
        firsts: All samples.
        agreement: With a full prefill of the same weights, None if none was compared.
    """

    side: str
    kind: str
    threads: int
    context: int
    samples: int
    first_p50: float
    first_p95: float
    step_p50: float
    step_p95: float
    new: int
    total_p50: float
    ends: Mapping[str, float]
    reused: float
    peak_mib: float
    anon_mib: float
    firsts: tuple[float, ...]
    agreement: Agreement | None


@dataclass(frozen=True)
class Crossover:
    """Ours against a peer in one case.

    Attributes:
        case: Of `CASES`.
        ours: Side.
        peer: Side.
        kind: The peer's kind of job.
        threads: Of both.
        context: Tokens of the chunks.
        first_ratio: The peer's seconds to the first token, over ours.
        step_ratio: The peer's seconds per further token, over ours.
        peer_from: From how many generated tokens on the peer is done sooner; None for never.
        ours_from: The same of ours.
    """

    case: str
    ours: str
    peer: str
    kind: str
    threads: int
    context: int
    first_ratio: float
    step_ratio: float
    peer_from: int | None
    ours_from: int | None


def crossover(first: float, step: float, other_first: float, other_step: float) -> int | None:
    """From how many generated tokens on the other one ends sooner, for good; None for never.

    Args:
        first: Seconds to the first token.
        step: Seconds per further token.
        other_first: The other one's.
        other_step: The other one's.
    """
    if other_step > step or (other_step == step and other_first >= first):
        return None  # it may be ahead at first, but not from some number on
    if other_first < first:
        return 1
    if other_step == step:
        return None
    behind = other_first - first
    further = int(behind / (step - other_step)) + 1
    while further > 1 and other_first + (further - 1) * other_step < first + (further - 1) * step:
        further -= 1  # rounding may have gone one too far
    while other_first + further * other_step >= first + further * step:
        further += 1
    return 1 + further


def end_to_end(first: float, step: float, tokens: int) -> float:
    """Seconds until so many tokens are there."""
    return first + (tokens - 1) * step


def percentile95(values: Sequence[float]) -> float:
    """The 95th percentile, interpolated."""
    if len(values) < 2:
        return values[0]
    return statistics.quantiles(values, n=20, method="inclusive")[-1]


def weights_of(side: str) -> str:
    """Sides with the same weights, computed the same way, are exact for each other."""
    return "stock" if side == "kvboost" else side


def exact_key(record: Mapping[str, Any]) -> tuple[Any, ...]:
    """Whose answers a record's can be compared with: those to the same prompt."""
    return (weights_of(record["side"]), record["threads"], *prompt_key(record))


def exact_answers(
    records: Iterable[Mapping[str, Any]],
) -> dict[tuple[Any, ...], Sequence[int]]:
    """Tokens after a prefill in which nothing is approximate, by weights, threads and prompt."""
    found: dict[tuple[Any, ...], Sequence[int]] = {}
    for one in records:
        side, kind = one["side"], one["kind"]
        exact = {"ours": ("full",), "kvboost": ()}.get(side.split("-")[0], ("cold", "reorder"))
        if "error" not in one and kind in exact:
            found[exact_key(one)] = one["tokens"]
    return found


def agreement(
    answers: Iterable[tuple[Sequence[int], Sequence[int] | None]],
) -> Agreement | None:
    """Over pairs of an answer and the exact one, None where none is there."""
    pairs = [(tokens, exact) for tokens, exact in answers if exact is not None]
    if not pairs:
        return None
    same = [sum(1 for _ in takewhile(bool, map(eq, *pair))) for pair in pairs]
    lengths = [min(map(len, pair)) for pair in pairs]
    return Agreement(
        prompts=len(pairs),
        first_equal=sum(count > 0 for count in same) / len(pairs),
        all_equal=sum(map(eq, same, lengths)) / len(pairs),
        equal_tokens=statistics.mean(same),
        tokens=max(lengths),
    )


def rows_of(records: Sequence[Mapping[str, Any]]) -> list[Row]:
    """A row per side, kind, threads and context; what failed is in none."""
    place = itemgetter("threads", "context", "side")
    steps: dict[tuple[Any, ...], list[float]] = defaultdict(list)
    good = [one for one in records if "error" not in one]
    for one in good:
        if len(one["tokens"]) > 1:
            steps[place(one)].append(one["step"])
    exact = exact_answers(good)
    found = []
    by = itemgetter("threads", "context", "kind", "side")
    for (threads, context, kind, side), some in groupby(sorted(good, key=by), by):
        group = list(some)
        firsts = [one["ttft"] for one in group]
        own = steps[threads, context, side] or [0.0]
        first, step = statistics.median(firsts), statistics.median(own)
        # An exact answer is not compared with itself.
        compared = [
            (one["tokens"], exact.get(exact_key(one))) for one in group if not _is_exact(side, kind)
        ]
        found.append(
            Row(
                side=side,
                kind=kind,
                threads=threads,
                context=context,
                samples=len(group),
                first_p50=first,
                first_p95=percentile95(firsts),
                step_p50=step,
                step_p95=percentile95(own),
                new=max(len(one["tokens"]) for one in group),
                total_p50=statistics.median(one["total"] for one in group),
                ends={str(tokens): end_to_end(first, step, tokens) for tokens in LENGTHS},
                reused=statistics.median(one["reused"] for one in group),
                peak_mib=max(one["peak_mib"] for one in group),
                anon_mib=max(one["anon_mib"] for one in group),
                firsts=tuple(round(value, _SAMPLE_DIGITS) for value in firsts),
                agreement=agreement(compared),
            )
        )
    return found


def _is_exact(side: str, kind: str) -> bool:
    if side.startswith("ours"):
        return kind == "full"
    return side != "kvboost" and kind in ("cold", "reorder")


def crossovers(rows: Iterable[Row]) -> list[Crossover]:
    """Every pair in every case that both were measured in."""
    known = {(row.threads, row.context, row.side, row.kind): row for row in rows}
    found = []
    for threads, context in sorted({key[:2] for key in known}):
        for case, kind, kinds in CASES:
            for ours, peer in PAIRS:
                own = known.get((threads, context, ours, kind))
                for theirs in kinds:
                    other = known.get((threads, context, peer, theirs))
                    if own is not None and other is not None:
                        found.append(_compared(case, own, other))
    return found


def _compared(case: str, own: Row, other: Row) -> Crossover:
    lines = (own.first_p50, own.step_p50), (other.first_p50, other.step_p50)
    return Crossover(
        case=case,
        ours=own.side,
        peer=other.side,
        kind=other.kind,
        threads=own.threads,
        context=own.context,
        first_ratio=other.first_p50 / own.first_p50,
        step_ratio=other.step_p50 / own.step_p50 if own.step_p50 else 0.0,
        peer_from=crossover(*lines[0], *lines[1]),
        ours_from=crossover(*lines[1], *lines[0]),
    )


def failures(records: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """What a side said when it could not do a kind of job, by side and kind."""
    return {f"{one['side']} {one['kind']}": one["error"] for one in records if "error" in one}


def report_of(
    facts: Mapping[str, Any],
    sides: Mapping[str, Any],
    records: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """All of it, as JSON has it."""
    rows = rows_of(records)
    peers, flash = facts["peers"], facts["flash"]
    rest = {name: value for name, value in facts.items() if name not in ("peers", "flash")}
    return {
        "about": {"benchmark": "peers", **rest},
        "peers": peers,
        "flash": flash,
        "sides": sides,
        "failures": failures(records),
        "crossovers": [asdict(one) for one in crossovers(rows)],
        "rows": [asdict(row) for row in rows],
    }


WORK: Final = ROOT / "build" / "peers"
WARM_UP: Final = 1024
SETTLE: Final = 0.1  # seconds, so that threads that wait for work have gone to sleep
_MIB: Final = 1024  # of the kB in /proc


class Side(Protocol):
    """A process that answers prompts."""

    pid: int

    def facts(self) -> dict[str, Any]:
        """What is to be known about it; with `error`, it cannot be asked."""

    def ask(self, job: dict[str, Any]) -> dict[str, Any]:
        """Answer one prompt; with `error`, it could not."""

    def close(self) -> None:
        """End the process."""


class WorkerSide:
    """A side that `peers_sides` runs."""

    def __init__(self, name: str, threads: int, work: Path, system: str) -> None:
        """Start the process; the model is loaded when the facts are asked for."""
        self._folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=work))
        command = [sys.executable, "-m", "benchmarks.peers_sides", name, "--threads", str(threads)]
        command += ["--folder", str(self._folder / "chunks"), "--system", system]
        paths = [str(ROOT / "lab"), os.environ.get("PYTHONPATH", ""), str(work / "kvboost")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        with (work / f"{name}-{threads}.log").open("w", encoding="utf-8") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment,
            )
        self.pid = self._process.pid

    def facts(self) -> dict[str, Any]:
        """Wait for the first line."""
        said = self._line()
        facts: dict[str, Any] = said.get("facts", said)
        return facts

    def ask(self, job: dict[str, Any]) -> dict[str, Any]:
        """One line there, one back."""
        if self._process.stdin is None:
            return {"error": "no input"}
        try:
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return {"error": "the process ended"}
        return self._line()

    def _line(self) -> dict[str, Any]:
        line = self._process.stdout.readline() if self._process.stdout else ""
        found: dict[str, Any] = json.loads(line) if line else {"error": "the process ended"}
        return found

    def close(self) -> None:
        """End the process and forget its chunks."""
        with suppress(BrokenPipeError):
            self._process.communicate(timeout=10)
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


class Journal:
    """What was found so far, a line each; a line that was cut is measured anew.

    Attributes:
        facts: Of the run, with the versions of all peers that were asked so far.
        records: Of the answers.
        sides: Facts, by side.
        flash: llama.cpp's flash attention, by weights.
    """

    def __init__(self, path: Path, facts: dict[str, Any], *, fresh: bool = False) -> None:
        """Read what an earlier run left, if all that a figure depends on is the same."""
        self._path = path
        self.records: list[dict[str, Any]] = []
        self.sides: dict[str, Any] = {}
        self.flash: dict[str, Any] = {}
        before = [] if fresh or not path.is_file() else [*_lines(path)]
        if before and not _same(before[0].get("run", {}), facts):
            print(f"{path.name} is of another machine, version or commit: measured anew")
            path.replace(path.with_suffix(".old"))
            before = []
        known = before[0]["run"]["peers"] if before else {}
        self.facts = {**facts, "peers": {**known, **facts["peers"]}}
        for line in before[1:]:
            self._take(line)
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = [{"run": self.facts}, *before[1:]]
        path.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")

    def add(self, line: dict[str, Any]) -> None:
        """Write one down."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        self._take(line)

    def _take(self, line: dict[str, Any]) -> None:
        self.sides.update(line.get("sides", {}))
        self.flash.update(line.get("flash", {}))
        if "record" in line:
            self.records.append(line["record"])

    @property
    def done(self) -> set[str]:
        """Names of the jobs that have an answer."""
        return {record["name"] for record in self.records}


def _same(before: dict[str, Any], facts: dict[str, Any]) -> bool:
    """Whether figures of both may stand in one table; not every run asks every peer."""
    peers = [one.get("peers", {}) for one in (before, facts)]
    alike = all(peers[0][name] == peers[1][name] for name in peers[0].keys() & peers[1].keys())
    return alike and {**before, "peers": {}} == {**facts, "peers": {}}


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text(encoding="utf-8").splitlines():
        with suppress(ValueError):
            yield json.loads(line)


def memory(pid: int) -> dict[str, float]:
    """Resident set of a process in MiB: its peak, and what is no file's."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    found = dict(line.split(":", 1) for line in status if line.startswith(("VmHWM", "RssAnon")))
    mib = {name: int(value.split()[0]) / _MIB for name, value in found.items()}
    return {"peak_mib": mib["VmHWM"], "anon_mib": mib["RssAnon"]}


def kvboost_of(work: Path) -> str:
    """Fetch KVBoost into a folder of its own, without what it depends on; its version."""
    folder = work / "kvboost"
    if not folder.is_dir():
        print("KVBoost: fetching it", flush=True)
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", "install"]
        subprocess.run([*pip, "--no-deps", "--target", str(folder), "kvboost"], check=True)
    found = importlib.metadata.distributions(path=[str(folder)])
    return ", ".join(f"{one.metadata['Name']} {one.version}" for one in found)


def choose_flash(journal: Journal, llama: Llama, weights: str, asked: Material, work: Path) -> None:
    """Measure which attention of llama.cpp is sooner for these weights, on one thread."""
    if weights in journal.flash:
        return
    seconds = {}
    job = {**asked.prompt(WARM_UP, 0, 0), "kind": "cold", "new": 32, "before": []}
    for flash in ("on", "off"):
        with closing(LlamaSide(llama, weights, 1, flash, work)) as side:
            seconds[flash] = min(side.ask(job)["total"] for _ in range(2))
    journal.add({"flash": {weights: {"choice": min(seconds, key=lambda k: seconds[k]), **seconds}}})


class Driver:
    """Asks the sides in turns.

    Attributes:
        journal: What was found.
        work: Folder for what is made on the way.
        asked: Prompts.
        llama: Programs and weights, or None if no side needs them.
    """

    def __init__(self, journal: Journal, work: Path, asked: Material, llama: Llama | None) -> None:
        self.journal, self.work, self.asked, self.llama = journal, work, asked, llama

    def run(self, jobs: Sequence[Job]) -> None:
        """Ask jobs of one number of threads, in their order."""
        todo = [job for job in jobs if job.name not in self.journal.done]
        names = list(dict.fromkeys(job.side for job in todo))
        with ExitStack() as stack:
            sides: dict[str, Side] = {}
            for name in names:
                side = self._started(name, todo[0].threads)
                if side is not None:
                    sides[name] = stack.enter_context(closing(side))
            for left, job in zip(range(len(todo), 0, -1), todo, strict=True):
                if job.side in sides:
                    self._ask(sides[job.side], job, left)

    def _started(self, name: str, threads: int) -> Side | None:
        """A side that is ready and warm, None if it cannot run here."""
        side: Side
        if name.startswith("llama-") and self.llama is not None:
            weights = name.removeprefix("llama-")
            choose_flash(self.journal, self.llama, weights, self.asked, self.work)
            flash = self.journal.flash[weights]["choice"]
            side = LlamaSide(self.llama, weights, threads, flash, self.work)
        else:
            side = WorkerSide(name, threads, self.work, self.asked.system)
        facts = side.facts()
        self.journal.add({"sides": {name: facts}})
        if "error" in facts:
            print(f"{name} cannot run here: {facts['error']}", flush=True)
            side.close()
            return None
        prompt = self.asked.prompt(WARM_UP, 0, QUICK[1, 1024].full)
        side.ask({**prompt, "kind": "cold", "new": 8, "before": prompt["context"]})
        return side

    def _ask(self, side: Side, job: Job, left: int) -> None:
        prompt = self.asked.prompt(job.context, job.order, job.question)
        before = self.asked.prompt(job.context, 0, job.question)["context"]
        time.sleep(SETTLE)
        with suppress(OSError):  # else the peak is that of everything so far
            Path(f"/proc/{side.pid}/clear_refs").write_text("5", encoding="utf-8")
        began = time.perf_counter()
        found = side.ask({**prompt, "kind": job.kind, "new": job.new, "before": before})
        wall = time.perf_counter() - began
        if "error" not in found:
            found.update(memory(side.pid))
        record = {"name": job.name, **asdict(job), "wall": wall, "load": load(), **found}
        self.journal.add({"record": record})
        told = (
            found.get("error") or f"{found['ttft']:8.3f} s, {1e3 * found['step']:6.1f} ms a token"
        )
        print(f"{left:>4} {job.name:<40} {told}", flush=True)


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    every = (*SIDES, *MORE_SIDES)
    parser.add_argument("--sides", nargs="+", choices=every, default=SIDES)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 2048, 4096])
    parser.add_argument("--rounds", type=int, help="full rounds of every context")
    parser.add_argument("--quick", action="store_true", help="one round, one context, one thread")
    parser.add_argument("--fresh", action="store_true", help="forget what the work folder has")
    parser.add_argument("--work", type=Path, default=WORK, metavar="FOLDER")
    parser.add_argument("--llama-bin", type=Path, metavar="FOLDER", help="llama-server is there")
    parser.add_argument("--json", type=Path, default=result_file("peers"), metavar="FILE")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    """Measure what is missing, and write the report after each context."""
    parsed = parse(words)
    # So that servers end with this process, whoever ends it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    work: Path = parsed.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    versions = {}
    llama = None
    if any(name.startswith("llama") for name in parsed.sides):
        llama = prepared(work, parsed.llama_bin)
        versions["llama.cpp"] = llama.version
    if "kvboost" in parsed.sides:
        versions["kvboost"] = kvboost_of(work)
    about = described("cpu", 1)
    facts = {
        "machine": f"{processor_of(about['machine'])}, {os.cpu_count()} cores",
        "cores": os.cpu_count() or 1,
        "versions": about["versions"],
        "peers": versions,
        "commit": commit(),
        "prefix": PREFIX,
        "chunk": CHUNK,
        "query": QUERY,
    }
    journal = Journal(work / "records.jsonl", facts, fresh=parsed.fresh)
    asked = material(load_tokenizer("smollm2", {}), LONGEST)
    driver = Driver(journal, work, asked, llama)
    plan = QUICK if parsed.quick else PLAN
    chosen = wanted(plan, parsed.threads, parsed.contexts, parsed.rounds)
    for threads in sorted({key[0] for key in chosen}):
        jobs = [
            job
            for (number, context), rounds in chosen.items()
            if number == threads
            for job in jobs(threads, context, rounds, parsed.sides)
        ]
        driver.run(jobs)
        records = journal.records
        spent = {
            "date": about["date"],
            "minutes": round(sum(one["wall"] for one in records) / 60, 1),
            "load": statistics.median(one["load"] for one in records) if records else 0.0,
        }
        write(
            parsed.json,
            report_of({**journal.facts, **spent, "flash": journal.flash}, journal.sides, records),
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
