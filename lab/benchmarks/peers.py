"""Ours beside llama.cpp, KVBoost and stock transformers: the same prompts, the same weights.

    python -m benchmarks.peers                     # less than an hour on a quiet machine
    python -m benchmarks.peers --quick --json build/peers.json
    python -m benchmarks.peers_page                # writes docs/peers.md

SmolLM2-135M-Instruct, greedy.  Each side is a process of its own and gets one prompt at a time, and
the sides take turns at every prompt.  llama.cpp is fetched (the sources in llama-cpp-python's
sdist), compiled for this machine and given the same weights in several formats; KVBoost is fetched
from the package index.  Both need a network once, and what the work folder has already is used
again.  Every answer is written down there at once, so a run that was stopped goes on.
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
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from benchmarks import peers_plan as plans
from benchmarks.machine import commit, described, load, processor_of
from benchmarks.peers_figures import report_of
from benchmarks.peers_llama import Llama, LlamaSide, prepared
from benchmarks.peers_prompts import CHUNK, LONGEST, PREFIX, QUERY, Material, material
from benchmarks.when_not import write
from kvcache_rag.models.pretrained import load_tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from benchmarks.peers_plan import Job

ROOT: Final = Path(__file__).parents[2]
WORK: Final = ROOT / "build" / "peers"
RESULTS: Final = Path(__file__).parent / "results" / "peers.json"
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
    """A side that `peers_worker` runs."""

    def __init__(self, name: str, threads: int, work: Path, system: str) -> None:
        """Start the process; the model is loaded when the facts are asked for."""
        self._folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=work))
        command = [sys.executable, "-m", "benchmarks.peers_worker", name, "--threads", str(threads)]
        command += ["--folder", str(self._folder / "chunks"), "--system", system]
        paths = [str(ROOT), os.environ.get("PYTHONPATH", ""), str(work / "kvboost")]
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
        prompt = self.asked.prompt(WARM_UP, 0, plans.QUICK[1, 1024].full)
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
    every = (*plans.SIDES, *plans.MORE_SIDES)
    parser.add_argument("--sides", nargs="+", choices=every, default=plans.SIDES)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 2048, 4096])
    parser.add_argument("--rounds", type=int, help="full rounds of every context")
    parser.add_argument("--quick", action="store_true", help="one round, one context, one thread")
    parser.add_argument("--fresh", action="store_true", help="forget what the work folder has")
    parser.add_argument("--work", type=Path, default=WORK, metavar="FOLDER")
    parser.add_argument("--llama-bin", type=Path, metavar="FOLDER", help="llama-server is there")
    parser.add_argument("--json", type=Path, default=RESULTS, metavar="FILE")
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
    plan = plans.QUICK if parsed.quick else plans.PLAN
    chosen = plans.wanted(plan, parsed.threads, parsed.contexts, parsed.rounds)
    for threads in sorted({key[0] for key in chosen}):
        jobs = [
            job
            for (number, context), rounds in chosen.items()
            if number == threads
            for job in plans.jobs(threads, context, rounds, parsed.sides)
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
