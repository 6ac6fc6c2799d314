"""Say whether one commit is slower than another, on this machine.

    python tools/compare_commits.py main HEAD        # eight minutes or so
    python tools/compare_commits.py HEAD WORKTREE    # what is not committed yet; `.` says the same

Each side is a process of its own over a worktree of its own, with one thread on one core.  The two
take turns: only one works at a time, and a pair's second is the next pair's first (ABBA).  Per
scenario the median of the pairs' log ratios, new over old, is held against 5 %, with its bootstrap
interval; the geometric mean of all scenarios against 2 %.

OLD is first compared with itself.  Where an interval is not within 2 % the machine is too noisy for
an answer: exit code 2.  Exit code 1 says that NEW is slower.

Beside other work `--clock cpu` counts the processes' own seconds instead of the wall's: what is
waited for, such as a disk or a lock, is not seen then.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from kvcache_rag.kv import ChunkKey, ChunkKV

ROOT: Final = Path(__file__).resolve().parent.parent
WORKTREE: Final = ("WORKTREE", ".")
INTEGRATIONS: Final = (
    *("kvcache-rag-cpu", "kvcache-rag-documents"),
    *("langchain-kvcache-rag", "llama-index-kvcache-rag"),
)
_COMPILE: Final = "import hatch_build, pathlib; hatch_build.compiled(pathlib.Path())"
PAIRS: Final = 30
LAUNCHES: Final = 4  # even
NOISE: Final = 1.02  # how far A against A may be apart, either way
SLOWER: Final = 1.05  # the upper bound of one scenario
MEAN_SLOWER: Final = 1.02  # the geometric mean of all

# A sample is the median of a few parts, each of as many calls as take so long on the old side.
PARTS: Final = 3
PART_SECONDS: Final = 0.06

CLOCKS: Final = {"wall": time.perf_counter, "cpu": time.process_time}

CHUNK: Final = 256
CONTEXT: Final = 8  # chunks of a question
VOCABULARY: Final = 4096
SCENARIOS: Final = (
    "disk",
    "memory",
    "deferred",
    "legolink",
    "decode",
    "add",
    "batch",
    "store",
)


# ------------------------------------------------------------------------------------ statistics
@dataclass(frozen=True)
class Ratio:
    """Seconds of the second side over those of the first.

    Attributes:
        scenario: Of what.
        value: Exponential of the median of the pairs' log ratios.
        low: Lower bound of its 95 % interval.
        high: Upper bound.
        pairs: How many.
        seconds: Median of a call of the first side.
    """

    scenario: str
    value: float
    low: float
    high: float
    pairs: int
    seconds: float

    @property
    def is_quiet(self) -> bool:
        """Whether two equal sides are as equal as they have to be."""
        return self.low >= 1 / NOISE and self.high <= NOISE

    @property
    def is_slower(self) -> bool:
        """Whether the second side may be slower than allowed."""
        return self.high > SLOWER


def ratio_of(scenario: str, first: Sequence[float], second: Sequence[float]) -> Ratio:
    """The ratio of paired samples, in seconds."""
    # Here, because the worker, which has another commit's package, runs this file as well.
    from kvcache_rag_lab.scoring.statistics import median_interval

    logs = [math.log(two / one) for one, two in zip(first, second, strict=True)]
    found = median_interval(logs)
    value, low, high = (math.exp(one) for one in (found.value, found.low, found.high))
    return Ratio(scenario, value, low, high, len(logs), statistics.median(first))


def geometric_mean(ratios: Sequence[Ratio]) -> float:
    """Of all scenarios, each counting the same."""
    return math.exp(statistics.fmean(math.log(one.value) for one in ratios))


def order(pair: int) -> tuple[int, int]:
    """Which side of a pair runs first, and which second: 0 1, 1 0, 0 1, ..."""
    return (0, 1) if pair % 2 == 0 else (1, 0)


def blocks(pairs: int) -> list[range]:
    """Pairs by number, those of the same two processes together.

    A process keeps the luck of its memory for life, and the one that was started second is not
    quite like the first; so there are several, and either side is the first in half of them.
    """
    count = LAUNCHES if pairs >= 2 * LAUNCHES else 1
    bounds = [number * pairs // count for number in range(count + 1)]
    return [range(start, stop) for start, stop in pairwise(bounds)]


def is_too_noisy(ratios: Sequence[Ratio]) -> bool:
    """Whether a commit differs from itself so much that nothing can be said of another."""
    return not all(one.is_quiet for one in ratios)


def exit_code(equal: Sequence[Ratio], ratios: Sequence[Ratio]) -> int:
    """0 where the new side is not slower, 1 where it is, 2 where the run does not count."""
    if is_too_noisy(equal):
        return 2
    slower = any(one.is_slower for one in ratios) or geometric_mean(ratios) > MEAN_SLOWER
    return 1 if slower else 0


def table(ratios: Sequence[Ratio], verdict: Callable[[Ratio], str]) -> str:
    """A line per scenario."""
    lines = [f"{'scenario':<10}{'call':>11}{'ratio':>9}{'95 % interval':>18}{'pairs':>7}  verdict"]
    for one in ratios:
        interval = f"{one.low:.3f} to {one.high:.3f}"
        lines.append(
            f"{one.scenario:<10}{1e3 * one.seconds:>8.3f} ms{one.value:>9.3f}{interval:>18}"
            f"{one.pairs:>7}  {verdict(one)}"
        )
    lines.append(f"{'all':<21}{geometric_mean(ratios):>9.3f}  geometric mean")
    return "\n".join(lines)


# ------------------------------------------------------------------------------------- the sides
class Side:
    """One process over one tree, which works when it is told to."""

    def __init__(self, tree: Path, core: int | None, clock: str) -> None:
        """Start it; `core` is the only one it uses, None for any; `clock` is one of `CLOCKS`."""
        self._package, self._clock = tree / "src" / "kvcache_rag", clock
        paths = [tree / "src", *(tree / "integrations" / name for name in INTEGRATIONS)]
        threads = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
        environment = {
            **os.environ,
            **dict.fromkeys(threads, "1"),
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "PYTHONHASHSEED": "0",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        command = [sys.executable, str(Path(__file__).resolve()), "--worker"]
        if core is not None:
            command.append(str(core))
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=tree,
        )

    def prepare(self, scenarios: Sequence[str]) -> None:
        """Build the model and what the scenarios need.

        Raises:
            RuntimeError: If the process ended, or has another package than its tree's.
        """
        found = Path(self._ask({})["package"])
        if found.resolve().parent != self._package.resolve():
            raise RuntimeError(f"a side imported {found} in place of {self._package}")
        self._ask({"scenarios": list(scenarios)})

    def run(self, scenario: str, calls: int, parts: int = PARTS) -> float:
        """Seconds of a call: the median of so many parts of so many calls."""
        command = {"scenario": scenario, "calls": calls, "parts": parts, "clock": self._clock}
        answer = self._ask(command)
        return float(answer["seconds"])

    def _ask(self, command: Mapping[str, Any]) -> dict[str, Any]:
        entry, answer = self._process.stdin, self._process.stdout
        if entry is None or answer is None:
            raise RuntimeError("a side has no pipes")
        try:
            entry.write(json.dumps(command) + "\n")
            entry.flush()
            line = answer.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise RuntimeError("a side ended; what it said stands above")
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        """Let it end."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@contextmanager
def two_sides(trees: Sequence[Path], scenarios: Sequence[str], clock: str) -> Iterator[list[Side]]:
    """A prepared process per tree; both have the same core, of which only one has need."""
    core = max(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    with ExitStack() as stack:
        sides = []
        for tree in trees:
            sides.append(Side(tree, core, clock))
            stack.callback(sides[-1].close)
            sides[-1].prepare(scenarios)
        yield sides


def compare(
    trees: Sequence[Path], scenarios: Sequence[str], pairs: int, clock: str = "wall"
) -> list[Ratio]:
    """Ratios of the second tree's seconds over the first's."""
    found: dict[str, list[list[float]]] = {name: [[], []] for name in scenarios}
    calls: dict[str, int] = {}
    for number, block in enumerate(blocks(pairs)):
        first = order(number)[0]
        with two_sides([trees[first], trees[1 - first]], scenarios, clock) as started:
            sides = [started[first], started[1 - first]]
            for scenario in scenarios:
                for side in sides:  # the first call pays for what is kept
                    side.run(scenario, 1, 1)
                once = [side.run(scenario, 1, 1) for side in sides]
                calls.setdefault(scenario, max(1, math.ceil(PART_SECONDS / once[0])))
            for pair in block:
                for scenario in scenarios:
                    for at in order(pair):
                        found[scenario][at].append(sides[at].run(scenario, calls[scenario]))
    return [ratio_of(name, *samples) for name, samples in found.items()]


# ------------------------------------------------------------------------------------- the trees
@contextmanager
def trees_of(revisions: Sequence[str]) -> Iterator[list[Path]]:
    """A folder with each revision's files; a revision that is named twice has one.

    The working tree is copied, so that it may be worked on meanwhile.
    """
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        made: dict[str, Path] = {}
        for revision in revisions:
            if revision in made:
                continue
            made[revision] = tree = Path(scratch) / f"tree-{len(made)}"
            if revision in WORKTREE:
                for part in ("src", "integrations"):
                    ignored = shutil.ignore_patterns("__pycache__", "*.so")
                    shutil.copytree(ROOT / part, tree / part, ignore=ignored)
            else:
                stack.callback(_git, "worktree", "remove", "--force", str(tree))
                _git("worktree", "add", "--quiet", "--detach", str(tree), revision)
        for tree in made.values():
            # Each with its own kernels: the installed ones are those of another tree.
            place = tree / "integrations" / "kvcache-rag-cpu"
            place = place if place.is_dir() else tree  # as it was before there was such a dist
            subprocess.run([sys.executable, "-c", _COMPILE], cwd=place, check=True)
        yield [made[revision] for revision in revisions]


def commit_of(revision: str) -> str:
    """What a revision names.

    Raises:
        ValueError: If there is no such commit.
    """
    if revision in WORKTREE:
        return WORKTREE[0]
    try:
        return _git("rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}")
    except subprocess.CalledProcessError:
        raise ValueError(f"{revision} is no commit of this repository") from None


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


# ------------------------------------------------------------------------------------ the worker
class Scenarios:
    """What is timed, on a small model with random weights.

    Only public names of the package are used: it may be that of any commit.
    """

    def __init__(self, folder: Path) -> None:
        """Build the model; chunks on disk go to `folder`."""
        import torch

        from kvcache_rag import DiskStore, Engine, MemoryStore, PromptTemplate

        torch.manual_seed(0)
        self._model = _model()
        self._template = PromptTemplate(system="w1 w2 w3 ", chunk_start="", chunk_end="")
        self._memory = MemoryStore(1 << 30)
        self._disk = DiskStore(folder / "chunks", durable=False)
        self._added = DiskStore(folder / "added", durable=False)
        self._engine: type[Engine] = Engine
        self._folder = folder
        self._next = 10**6
        self._texts = [_words(CHUNK, seed) for seed in range(CONTEXT)]

    def made(self, name: str) -> Callable[[], Any]:
        """A scenario's call, after what it needs is there."""
        makers: dict[str, Callable[[], Callable[[], Any]]] = {
            "disk": lambda: self._question(self._disk),
            "memory": lambda: self._question(self._memory),
            "deferred": lambda: self._question(self._memory, rotation="deferred"),
            "legolink": self._recomputing,
            "decode": lambda: self._question(self._memory, tokens=33),
            "add": self._adding,
            "batch": self._batch,
            "store": self._getting,
        }
        return makers[name]()

    def _made(self, store: Any, rotation: str = "copied") -> Any:
        options: dict[str, Any] = {"rotation": rotation}
        return self._engine(
            self._model, _tokenizer(), store=store, template=self._template, **options
        )

    def _question(
        self, store: Any, *, rotation: str = "copied", tokens: int = 1, policy: Any = None
    ) -> Callable[[], Any]:
        engine = self._made(store, rotation)
        engine.add(self._texts)
        options = {"max_new_tokens": tokens, "policy": policy}

        def call() -> Any:
            answer = engine.generate("w5 w6 w7 w8 w9 w10 w11 w12", self._texts, **options)
            used = answer.metrics.rotation
            if len(answer.token_ids) != tokens or used != rotation:
                raise RuntimeError(f"{len(answer.token_ids)} tokens, {used}, not as asked for")

        return call

    def _recomputing(self) -> Callable[[], Any]:
        from kvcache_rag import LegoLink

        return self._question(self._memory, policy=LegoLink())

    def _batch(self) -> Callable[[], Any]:
        engine = self._made(self._memory)
        engine.add(self._texts)
        asked = [(f"w5 w6 w{7 + row} w8 w9", self._texts[row : row + 4]) for row in range(4)]
        return lambda: engine.generate_batch(asked, max_new_tokens=1)

    def _adding(self) -> Callable[[], Any]:
        """Prefill and store; each call has chunks of its own, and their files go by and by."""
        engine = self._made(self._added)
        held: list[Any] = []

        def call() -> Any:
            texts = [_words(64, self._next + number) for number in range(4)]
            self._next += len(texts)
            held.extend(engine.add(texts))
            while len(held) > 64:
                self._added.delete(held.pop(0))

        return call

    def _getting(self) -> Callable[[], Any]:
        """The store alone, without a model."""
        from kvcache_rag import MemoryStore

        layouts = []

        class Noting(MemoryStore):
            """Notes the layout of the chunks, which is no public name."""

            def put(self, key: ChunkKey, chunk: ChunkKV, *more: Any, **named: Any) -> bool:
                layouts.append(chunk.layout)
                return super().put(key, chunk, *more, **named)

        self._made(Noting()).add(self._texts[:1])
        keys = self._made(self._disk).add(self._texts)

        def call() -> Any:
            for key in keys:
                self._disk.get(key, layouts[0])

        return call


def _model() -> Any:
    """Some 30 MB in bfloat16, so that our own part of the time counts."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config

    config = Qwen2Config(
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=VOCABULARY + 3,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    model: Any = AutoModelForCausalLM.from_config(
        config, dtype=torch.bfloat16, attn_implementation="sdpa"
    )
    model.generation_config.eos_token_id = None  # it generates as many as asked for
    return model.eval()


def _tokenizer() -> Any:
    """One token per word."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<bos>": 1, "<eos>": 2, **{f"w{i}": i + 3 for i in range(VOCABULARY)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")


def _words(count: int, seed: int) -> str:
    return " ".join(f"w{(seed * 7919 + 31 * i + i * i) % VOCABULARY}" for i in range(count))


def _timed(call: Callable[[], Any], calls: int, parts: int, clock: Callable[[], float]) -> float:
    """Seconds of a call, the median of the parts."""
    found = []
    gc.collect()
    for _ in range(parts):
        began = clock()
        for _ in range(calls):
            call()
        found.append((clock() - began) / calls)
    return statistics.median(found)


def work(core: int | None) -> int:
    """Answer commands, one a line, until there are no more."""
    if core is not None and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {core})  # before any thread is started
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else prints does not answer for us
    import torch

    import kvcache_rag

    torch.set_num_threads(1)
    ready: dict[str, Callable[[], Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for line in sys.stdin:
            command = json.loads(line)
            answer: dict[str, Any] = {"package": kvcache_rag.__file__}
            if "scenarios" in command:
                scenarios = Scenarios(Path(folder))
                ready = {name: scenarios.made(name) for name in command["scenarios"]}
                gc.collect()
                gc.freeze()  # what is there to stay is not looked through before every sample
            elif command:
                call = ready[command["scenario"]]
                clock = CLOCKS[command["clock"]]
                answer = {"seconds": _timed(call, command["calls"], command["parts"], clock)}
            replies.write(json.dumps(answer) + "\n")
            replies.flush()
    return 0


# -------------------------------------------------------------------------------------- the tool
def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("old", help="a git revision, or WORKTREE for what is not committed")
    parser.add_argument("new")
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument("--scenarios", nargs="+", choices=SCENARIOS, default=list(SCENARIOS))
    parser.add_argument("--clock", choices=sorted(CLOCKS), default="wall")
    parser.add_argument("--anyway", action="store_true", help="go on where it is too noisy")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parsed = parser.parse_args(arguments)
    if parsed.pairs < 1:
        parser.error("--pairs must be at least 1")
    parsed.scenarios = list(dict.fromkeys(parsed.scenarios))
    return parsed


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, print; the exit code is that of `exit_code`."""
    parsed = parse(arguments)
    began = time.perf_counter()
    try:
        commits = [commit_of(one) for one in (parsed.old, parsed.new)]
    except ValueError as error:
        print(f"compare_commits: {error}", file=sys.stderr)
        return 2
    ratios: list[Ratio] = []
    with trees_of(commits) as (old, new):
        print(f"{parsed.old} against itself", flush=True)
        equal = compare([old, old], parsed.scenarios, parsed.pairs, parsed.clock)
        print(table(equal, lambda one: "quiet" if one.is_quiet else "too noisy"), flush=True)
        noisy = is_too_noisy(equal)
        if noisy:
            print("too noisy: an interval is not within 2 %, so this run does not count")
        if parsed.anyway or not noisy:
            print(f"\n{parsed.new} over {parsed.old}", flush=True)
            ratios = compare([old, new], parsed.scenarios, parsed.pairs, parsed.clock)
            print(table(ratios, lambda one: "slower" if one.is_slower else "holds"))
    code = exit_code(equal, ratios) if ratios else 2
    if ratios:
        words = {0: "not slower", 1: "slower", 2: "too noisy, does not count"}
        print(f"verdict: {words[code]}")
    print(f"{time.perf_counter() - began:.0f} s")
    if parsed.json:
        report = {"commits": commits, "pairs": parsed.pairs, "clock": parsed.clock, "code": code}
        sides = {"equal": [asdict(one) for one in equal], "ratios": [asdict(one) for one in ratios]}
        parsed.json.parent.mkdir(parents=True, exist_ok=True)
        parsed.json.write_text(json.dumps({**report, **sides}, indent=1) + "\n", "utf-8")
    return code


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        sys.exit(work(int(sys.argv[2]) if len(sys.argv) > 2 else None))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the worktrees are removed then, too
    sys.exit(main())
