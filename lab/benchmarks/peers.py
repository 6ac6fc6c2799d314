"""Ours beside other engines: the same prompts, the same weights, models by their GGUF files.

    python -m benchmarks.peers --models smollm2 MODEL.gguf --vllm-venv .venv-vllm
    python -m benchmarks.peers --quick --json build/peers.json
    python -m benchmarks.peers_answers --models smollm2 MODEL.gguf --data ../shared/data
    python -m benchmarks.render peers --table table

Greedy.  Each side is a process of its own and gets one prompt at a time, and the sides take turns
at every prompt (vLLM, which takes much memory, and LMCache over it in a turn of their own).
llama.cpp is fetched (the sources in llama-cpp-python's sdist), compiled for this machine and given
the same weights in several formats, `file` being the file's own; KVBoost is fetched from the
package index.  Both need a network once, and what the work folder has already is used again.  vLLM
is measured if an environment with it is named (`make test-vllm` makes one), LMCache if that has it.
Every answer is written down in the work folder at once, so a run that was stopped goes on; two
models take about two hours on two cores.

Each kind of job needs a state of the cache, and a round visits the kinds so that most sides are in
it already:

- `cold`      nothing is known
- `prefix`    the same chunks in the same order were asked before, with another question
- `shift`     (llama.cpp) a new order, equal runs of the last prompt shifted (`--cache-reuse`)
- `reorder`   the chunks are known, in another order
- `few-...`   (ours) the same three by the default policy, `BestFew()`; the others by `Reuse()`
- `full`      (ours) a full prefill, which nothing is kept of
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import operator
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from benchmarks.common import ROOT, commit, described, load, processor_of, read, result_file, write
from benchmarks.peers_prompts import CHUNK, LONGEST, PREFIX, QUERY, Material, material
from benchmarks.peers_report import Right, report_of, with_right
from benchmarks.peers_servers import Llama, LlamaSide, Vllm, VllmSide, descendants, prepared
from benchmarks.stock import checkpoint
from kvcache_rag.models.gguf import quantised_dtype
from kvcache_rag.models.kept import file_digest
from kvcache_rag.models.model_names import resolve
from kvcache_rag.models.pretrained import load_tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


OURS: Final = ("ours-auto", "ours-int8", "ours-int4", "ours-llama")
LLAMA: Final = ("llama-BF16", "llama-Q8_0", "llama-file")
VLLM: Final = ("vllm", "lmcache")
SIDES: Final = (*OURS, *LLAMA, "stock", "kvboost", *VLLM)
# Not measured unless it is asked for: weights in the order in which torch loads them.
MORE_SIDES: Final = ("ours-plain",)
# Those that take turns; all of them at once would need too much memory.
TURNS: Final = (tuple(side for side in (*SIDES, *MORE_SIDES) if side not in VLLM), VLLM)
NEW: Final = 32


@dataclass(frozen=True)
class Rounds:
    """How often a context is asked.

    Attributes:
        full: Rounds over all kinds.
        repeats: Of what is cheap, in each of them.
        once: Sides that have the first full round only.
    """

    full: int
    repeats: int
    once: tuple[str, ...] = ()


# Who takes longest to compute everything.
SLOW: Final = ("ours-llama", *LLAMA, "kvboost")
# By threads and tokens of context.
Plan = dict[tuple[int, int], Rounds]
PLAN: Final[Plan] = {
    (1, 1024): Rounds(2, 4, SLOW),
    (1, 4096): Rounds(2, 4, SLOW),
    (2, 1024): Rounds(2, 4, SLOW),
    (2, 4096): Rounds(2, 4, SLOW),
}
LARGER_PLAN: Final[Plan] = {
    (1, 1024): Rounds(2, 4, SLOW),
    (1, 4096): Rounds(1, 5),
    (2, 1024): Rounds(1, 5),
    (2, 4096): Rounds(1, 5),
}
QUICK: Final[Plan] = {(1, 1024): Rounds(1, 2)}
# Files above so many bytes have the plan for larger models.
LARGER: Final = 200_000_000


@dataclass(frozen=True)
class Job:
    """One prompt for one side.

    Attributes:
        model: Name of the model.
        side: Of `SIDES`.
        kind: See above.
        threads: Of the side.
        context: Tokens of the chunks.
        round: From 0.
        repeat: From 0, within the round.
        order: Of the chunks (see `peers_prompts.order_of`).
        question: Which one.
        new: Tokens to generate.
    """

    model: str
    side: str
    kind: str
    threads: int
    context: int
    round: int
    repeat: int
    order: int
    question: int
    new: int = NEW

    @property
    def name(self) -> str:
        """What a record of it is found by."""
        place = (self.model, self.threads, self.context, self.side, self.kind)
        return "/".join(map(str, (*place, self.round, self.repeat)))


def jobs(
    model: str, threads: int, context: int, rounds: Rounds, sides: Sequence[str]
) -> Iterator[Job]:
    """All jobs of a model over a context, in the order in which they are asked.

    A side's `cold` of one round is the exact answer to its `prefix` of the round before, and
    llama.cpp's `reorder` to its `shift`; `full` and stock's `reorder` are to `reorder` of their
    round.
    """
    for number in range(rounds.full):
        for kind, repeat, order, question in _round(number, rounds):
            start = (number + repeat) % max(len(sides), 1)
            for side in (*sides[start:], *sides[:start]):
                is_wanted = asks(side, kind) and (repeat == 0 or is_cheap(side, kind))
                if is_wanted and not (number and side in rounds.once):
                    at = (order, question)
                    if kind == "reorder" and side.startswith("llama"):
                        after = _after(number, rounds)
                        at = (1 + after, after)
                    yield Job(model, side, kind, threads, context, number, repeat, *at)


def _after(number: int, rounds: Rounds) -> int:
    """The next round's, and the first one's behind the last; alone, a round has no such."""
    return (number + 1) % rounds.full if rounds.full > 1 else 1


def _round(number: int, rounds: Rounds) -> Iterator[tuple[str, int, int, int]]:
    """Kind, repeat, order and question of all that is asked in a round."""
    yield from ((kind, 0, 0, number) for kind in ("few-cold", "cold"))
    for repeat in range(rounds.repeats):
        question = rounds.full + repeat if repeat else _after(number, rounds)
        yield from ((kind, repeat, 0, question) for kind in ("prefix", "few-prefix"))
    yield "shift", 0, 1 + number, number
    for repeat in range(rounds.repeats):
        order = rounds.full + number * rounds.repeats + repeat if repeat else 1 + number
        question = rounds.full + repeat if repeat else number
        yield from ((kind, repeat, order, question) for kind in ("reorder", "few-reorder"))
    yield "full", 0, 1 + number, number


def asks(side: str, kind: str) -> bool:
    """Whether a kind is asked of a side."""
    if kind == "shift":
        return side.startswith("llama")
    if kind in ("full", "few-cold"):
        # Ours in llama.cpp computes as llama.cpp does, and as long.
        return side.startswith("ours") and side != "ours-llama"
    return not kind.startswith("few-") or side.startswith("ours")


def is_cheap(side: str, kind: str) -> bool:
    """Whether a job of a side takes no prefill of the context, nor nearly one."""
    return (kind.endswith("prefix") and side != "kvboost") or (
        kind.endswith("reorder") and side.startswith("ours")
    )


def wanted(plan: Plan, threads: Sequence[int], contexts: Sequence[int], rounds: int | None) -> Plan:
    """The part of a plan that is asked for, with so many full rounds if that is said."""
    return {
        (number, context): replace(planned, full=rounds or planned.full)
        for (number, context), planned in plan.items()
        if number in threads and context in contexts
    }


@dataclass(frozen=True)
class Model:
    """A model of the run.

    Attributes:
        given: As the command line has it.
    """

    given: str

    @property
    def name(self) -> str:
        """What it is called in records."""
        return Path(self.given).stem

    @property
    def file(self) -> Path:
        """Its GGUF file."""
        return Path(resolve(self.given))

    @property
    def plan(self) -> Plan:
        """How often it is asked."""
        return LARGER_PLAN if self.file.stat().st_size > LARGER else PLAN

    @cached_property
    def tokenizer(self) -> Any:
        """Its tokenizer."""
        return load_tokenizer(self.given, {})

    @cached_property
    def asked(self) -> Material:
        """The prompts, as its tokenizer has them."""
        return material(self.tokenizer, LONGEST)

    def facts(self) -> dict[str, str]:
        """What its answers depend on."""
        return {"sha256": file_digest(self.file), "weights": file_type(self.file)}


def file_type(file: Path) -> str:
    """What a GGUF file says about the form of its weights, such as Q4_K_M."""
    from gguf import GGUFReader, LlamaFileType  # only to be told

    field_of = GGUFReader(file).fields.get("general.file_type")
    if field_of is None:
        return ""
    return LlamaFileType(int(field_of.contents())).name.removeprefix("MOSTLY_")


WORK: Final = ROOT / "build" / "peers"
WARM_UP: Final = 1024
SETTLE: Final = 0.1  # seconds, so that threads that wait for work have gone to sleep
_MIB: Final = 1024  # of the kB in /proc


class Side(Protocol):
    """A process that answers prompts."""

    def pids(self) -> list[int]:
        """The process, and all that it started."""

    def facts(self) -> dict[str, Any]:
        """What is to be known about it; with `error`, it cannot be asked."""

    def ask(self, job: dict[str, Any]) -> dict[str, Any]:
        """Answer one prompt; with `error`, it could not."""

    def close(self) -> None:
        """End the process."""


class WorkerSide:
    """A side that `peers_worker` runs."""

    def __init__(self, name: str, model: Model, threads: int, work: Path, system: str) -> None:
        """Start the process; the model is loaded when the facts are asked for."""
        self._folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=work))
        command = [sys.executable, "-m", "benchmarks.peers_worker", name, "--model", model.given]
        command += ["--threads", str(threads), "--system", system]
        command += ["--folder", str(self._folder / "chunks")]
        paths = [str(ROOT / "lab"), os.environ.get("PYTHONPATH", ""), str(work / "kvboost")]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "OMP_NUM_THREADS": str(threads),
        }
        with (work / f"{model.name}-{name}-{threads}.log").open("w", encoding="utf-8") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment,
            )

    def pids(self) -> list[int]:
        """The process, and all that it started."""
        return descendants(self._process.pid)

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
        facts: Of the run, with the versions of all peers that were asked so far, and all models.
        records: Of the answers.
        sides: Facts, by model and side.
        flash: llama.cpp's flash attention, by model and weights.
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
        known = before[0]["run"] if before else {}
        self.facts = facts | {part: {**known.get(part, {}), **facts[part]} for part in _PARTS}
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


# Of a run's facts: what not every run asks.
_PARTS: Final = ("peers", "models")


def _same(before: dict[str, Any], facts: dict[str, Any]) -> bool:
    """Whether figures of both may stand in one table."""
    blank: dict[str, Any] = {part: {} for part in _PARTS}
    if {**before, **blank} != {**facts, **blank}:
        return False
    pairs = [(before.get(part, {}), facts[part]) for part in _PARTS]
    return all(one[name] == other[name] for one, other in pairs for name in one.keys() & other)


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text(encoding="utf-8").splitlines():
        with suppress(ValueError):
            yield json.loads(line)


def memory(pids: Sequence[int]) -> dict[str, float]:
    """Resident sets in MiB: their peak, and what is no file's.

    Of several processes the sum, as files count once that all of them map.
    """
    found = [_status(pid) for pid in pids]
    shared = [one["RssFile"] for one in found]
    return {
        "peak_mib": sum(one["VmHWM"] for one in found) - sum(shared) + max(shared),
        "anon_mib": sum(one["RssAnon"] for one in found),
    }


def _status(pid: int) -> dict[str, float]:
    lines: list[str] = []
    with suppress(OSError):  # a helper may have ended meanwhile, or be about to
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    found = dict(line.split(":", 1) for line in lines)
    names = ("VmHWM", "RssFile", "RssAnon")
    return {name: int(found.get(name, "0").split()[0]) / _MIB for name in names}


def kvboost_of(work: Path) -> str:
    """Fetch KVBoost into a folder of its own, without what it depends on; its version."""
    folder = work / "kvboost"
    if not folder.is_dir():
        print("KVBoost: fetching it", flush=True)
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", "install"]
        subprocess.run([*pip, "--no-deps", "--target", str(folder), "kvboost"], check=True)
    found = importlib.metadata.distributions(path=[str(folder)])
    return ", ".join(f"{one.metadata['Name']} {one.version}" for one in found)


@dataclass
class Starter:
    """Starts sides.

    Attributes:
        work: Folder for what is made on the way.
        journal: Knows which attention of llama.cpp is sooner.
        llama: Its programs, or None if no side needs them.
        vllm: The environment with it, or None.
    """

    work: Path
    journal: Journal
    llama: Llama | None = None
    vllm: Vllm | None = None

    def ready(self, name: str, model: Model, threads: int, system: str) -> Side | None:
        """A side that has told its facts, None if it cannot run here."""
        side = None
        try:
            side = self.start(name, model, threads, system)
            facts = side.facts()
        except (RuntimeError, OSError) as error:
            facts = {"error": str(error)}
        self.journal.add({"sides": {f"{model.name} {name}": facts}})
        if "error" not in facts:
            return side
        print(f"{name} cannot run here: {facts['error']}", flush=True)
        if side is not None:
            side.close()
        return None

    def start(self, name: str, model: Model, threads: int, system: str) -> Side:
        """A side whose template has this instruction.

        Raises:
            RuntimeError: If it does not start.
        """
        log = self.work / f"{model.name}-{name}-{threads}.log"
        if name.startswith("llama-") and self.llama is not None:
            form = name.removeprefix("llama-")
            weights = self.llama.weights(form, model.file, self._folder(model))
            flash = self._flash(model, form, weights)
            return LlamaSide(self.llama, weights, threads, flash, log)
        if name in VLLM and self.vllm is not None:
            # As the sides over transformers, which take longer in bfloat16 on some CPUs.
            dtype = quantised_dtype()
            form = str(dtype).removeprefix("torch.")
            stored = checkpoint(model.given, self._folder(model) / form, dtype)
            return VllmSide(self.vllm, stored, threads, log, form, lmcache=name == "lmcache")
        return WorkerSide(name, model, threads, self.work, system)

    def _folder(self, model: Model) -> Path:
        """Where what is made of a model lies."""
        folder = self.work / model.facts()["sha256"][:16]
        folder.mkdir(exist_ok=True)
        return folder

    def _flash(self, model: Model, form: str, weights: Path) -> str:
        """Which attention of llama.cpp is sooner for these weights, measured on one thread.

        Sooner in most of three: all of a prompt, a question behind a known one, further tokens.
        """
        place = f"{model.name} {form}"
        if place not in self.journal.flash and self.llama is not None:
            seconds = {}
            job = {**model.asked.prompt(WARM_UP, 0, 0), "new": NEW, "before": []}
            for flash in ("on", "off"):
                log = self.work / f"{model.name}-flash-{form}-{flash}.log"
                with closing(LlamaSide(self.llama, weights, 1, flash, log)) as side:
                    told = [side.ask({**job, "kind": kind}) for kind in ("cold", "prefix")]
                    seconds[flash] = [*(one["ttft"] for one in told), told[-1]["step"]]
            sooner = sum(map(operator.lt, seconds["on"], seconds["off"]))
            choice = "on" if sooner > 1 else "off"
            self.journal.add({"flash": {place: {"choice": choice, **seconds}}})
        found: str = self.journal.flash[place]["choice"]
        return found


class Driver:
    """Asks the sides in turns.

    Attributes:
        starter: Of sides.
        journal: What was found.
    """

    def __init__(self, starter: Starter) -> None:
        self.starter, self.journal = starter, starter.journal

    def run(self, model: Model, jobs: Sequence[Job]) -> None:
        """Ask jobs of one model and one number of threads, in their order."""
        todo = [job for job in jobs if job.name not in self.journal.done]
        with ExitStack() as stack:
            sides: dict[str, Side] = {}
            for name in dict.fromkeys(job.side for job in todo):
                side = self.starter.ready(name, model, todo[0].threads, model.asked.system)
                if side is not None:
                    sides[name] = stack.enter_context(closing(side))
                    prompt = model.asked.prompt(WARM_UP, 0, QUICK[1, 1024].full)
                    warm_up = {"kind": "cold", "new": 8, "before": prompt["context"]}
                    answered(side, {**prompt, **warm_up})
            for left, job in zip(range(len(todo), 0, -1), todo, strict=True):
                if job.side in sides:
                    self._ask(sides[job.side], model.asked, job, left)

    def _ask(self, side: Side, asked: Material, job: Job, left: int) -> None:
        prompt = asked.prompt(job.context, job.order, job.question)
        before = asked.prompt(job.context, 0, job.question)["context"]
        time.sleep(SETTLE)
        for pid in side.pids():
            with suppress(OSError):  # else the peak is that of everything so far
                Path(f"/proc/{pid}/clear_refs").write_text("5", encoding="utf-8")
        began = time.perf_counter()
        found = answered(side, {**prompt, "kind": job.kind, "new": job.new, "before": before})
        wall = time.perf_counter() - began
        if "error" not in found:
            found.update(memory(side.pids()))
        record = {"name": job.name, **asdict(job), "wall": wall, "load": load(), **found}
        self.journal.add({"record": record})
        told = (
            found.get("error") or f"{found['ttft']:8.3f} s, {1e3 * found['step']:6.1f} ms a token"
        )
        print(f"{left:>4} {job.name:<50} {told}", flush=True)


def answered(side: Side, job: dict[str, Any]) -> dict[str, Any]:
    """What a side says; a part that a peer cannot do is a finding, too."""
    try:
        return side.ask(job)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add_arguments(parser, SIDES, (*SIDES, *MORE_SIDES))
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--rounds", type=int, help="full rounds of every context")
    parser.add_argument("--quick", action="store_true", help="one round, one context, one thread")
    parser.add_argument("--fresh", action="store_true", help="forget what the work folder has")
    parser.add_argument("--json", type=Path, default=result_file("peers"), metavar="FILE")
    return parser.parse_args(words)


def add_arguments(
    parser: argparse.ArgumentParser, sides: Sequence[str], every: Sequence[str]
) -> None:
    """What times and answers are both asked by."""
    models = "names of models, or GGUF files"
    parser.add_argument("--models", nargs="+", type=Model, default=[Model("smollm2")], help=models)
    parser.add_argument("--sides", nargs="+", choices=every, default=list(sides))
    parser.add_argument("--work", type=Path, default=WORK, metavar="FOLDER")
    parser.add_argument("--llama-bin", type=Path, metavar="FOLDER", help="llama-server is there")
    parser.add_argument("--vllm-venv", type=Path, metavar="FOLDER", help="vLLM is installed there")


def prepare(
    options: argparse.Namespace, file: str, facts: dict[str, Any], *, fresh: bool
) -> Starter:
    """Fetch and compile what the sides need, and open the journal of these facts.

    Args:
        options: See `add_arguments`; sides that nothing is there for are taken out.
        file: Name of the journal in the work folder.
        facts: What figures depend on, beside models and versions of peers.
        fresh: Whether the journal begins anew.
    """
    # So that servers end with this process, whoever ends it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    options.work = work = options.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    if options.vllm_venv is None:
        options.sides = [side for side in options.sides if side not in VLLM]
    versions, llama, vllm = {}, None, None
    if any(side.startswith("llama") for side in options.sides):
        llama = prepared(work, options.llama_bin)
        versions["llama.cpp"] = llama.version
    if "ours-llama" in options.sides and importlib.util.find_spec("llama_cpp") is not None:
        versions["llama-cpp-python"] = importlib.metadata.version("llama-cpp-python")
    if "kvboost" in options.sides:
        versions["kvboost"] = kvboost_of(work)
    if options.vllm_venv is not None:
        vllm = Vllm.from_environment(options.vllm_venv)
        versions["vllm"] = vllm.version
    models = {model.name: model.facts() for model in options.models}
    journal = Journal(work / file, {**facts, "peers": versions, "models": models}, fresh=fresh)
    return Starter(work, journal, llama, vllm)


def main(words: Sequence[str] | None = None) -> int:
    """Measure what is missing, and write the report after each number of threads."""
    parsed = parse(words)
    about = described("cpu", 1)
    facts = {
        "machine": f"{processor_of(about['machine'])}, {os.cpu_count()} cores",
        "cores": os.cpu_count() or 1,
        "versions": about["versions"],
        "commit": commit(),
        "prefix": PREFIX,
        "chunk": CHUNK,
        "query": QUERY,
    }
    try:
        starter = prepare(parsed, "records.jsonl", facts, fresh=parsed.fresh)
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    driver, journal = Driver(starter), starter.journal
    for model in parsed.models:
        plan = QUICK if parsed.quick else model.plan
        chosen = wanted(plan, parsed.threads, parsed.contexts, parsed.rounds)
        for threads in sorted({key[0] for key in chosen}):
            for turn in TURNS:
                asked = [side for side in parsed.sides if side in turn]
                todo = [
                    job
                    for (number, context), rounds in chosen.items()
                    if number == threads
                    for job in jobs(model.name, threads, context, rounds, asked)
                ]
                driver.run(model, todo)
            keep(parsed.json, journal, about["date"])
    return 0


def keep(file: Path, journal: Journal, date: str) -> None:
    """Write the report, with the right answers that are known."""
    records = journal.records
    spent = {
        "date": date,
        "minutes": round(sum(one["wall"] for one in records) / 60, 1),
        "load": statistics.median(one["load"] for one in records) if records else 0.0,
    }
    facts = {**journal.facts, **spent, "flash": journal.flash}
    write(file, with_right(report_of(facts, journal.sides, records), right_answers()))


def right_answers() -> Right:
    """What `peers_answers` found, by model, side and kind."""
    rows = read(result_file("peers_answers")).get("answers", ())
    return {(row["model"], row["side"], row["kind"]): row for row in rows}


if __name__ == "__main__":
    sys.exit(main())
