"""Time to first token and decoding speed: stock transformers, TurboRAG's way, and ours, in one run.

    python -m benchmarks.ttft
    python -m benchmarks.ttft --device cuda --preset paper # a 7B shape, up to 16k tokens

Random weights in a real model's shape: they cost what trained ones cost, and nothing here speaks of
answers.  The sides take turns in every round, each through `generate()`; medians are printed with
their range, and ratios are formed within one run only.

- naive           stock transformers (sdpa): a prefill of instruction, chunks and question
- prefix-cached   the same over a copy of the instruction's cache
- turborag        TurboRAG's published way (see `benchmarks.stock`)
- disk            cached chunks from files that were dropped from the page cache
- page cache      cached chunks from files in the page cache, all checks on
- ram             cached chunks from this process's memory (pinned, for a GPU), copied and turned
- resident        (GPU) the same from the device's memory
- deferred        chunks in the model's memory, neither copied nor turned: attention turns the query
- floor           the query alone, over a stitched cache that lay in place before the clock started
- stock           (decoding only) stock transformers over a stock cache of the whole context

Peak memory is that of each side in a process of its own (`--peak`), above what the process held
after its imports: one answer of a few tokens.  On a CPU it is the peak of resident memory (a tiny
model generates first, since much is imported when it is first needed); on a GPU it is the most that
torch held at a time.  The peak begins anew when the model is there: making random weights needs
more than loading real ones.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from benchmarks.common import described, write
from benchmarks.shapes import (
    CHUNK,
    PREFIX,
    QUERY,
    SHAPES,
    build_model,
)
from benchmarks.sides import (
    COLD,
    DEFERRED,
    FLOOR,
    NAIVE,
    PAGES,
    PREFIXED,
    RAM,
    RESIDENT,
    STOCK,
    TURBORAG,
    Bench,
    Case,
    release,
)
from benchmarks.stock import Sample, median_parts, timed_generate
from kvcache_rag_lab.evaluation.cost.memory import reset_peak, resident
from kvcache_rag_lab.scoring.statistics import LEAST_DIFFERING, Interval, median_interval

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from benchmarks.stock import Sample


SIDES: Final = (NAIVE, TURBORAG, PAGES, RAM, DEFERRED)
GENERATED: Final = 4


@dataclass(frozen=True)
class Peak:
    """Peak memory of one side, and what it has to hold, in bytes.

    Attributes:
        side: Which side.
        context: Tokens of the chunks.
        peak: Above imports.
        weights: Parameters and buffers of the model.
        stitched: Keys and values of instruction, chunks, query and answer.
        chunks: Keys and values of the chunks.
    """

    side: str
    context: int
    peak: int
    weights: int
    stitched: int
    chunks: int

    @property
    def held(self) -> int:
        """What its peak is measured against: the weights and one copy of the context.

        From RAM, copying, the chunks lie in the store besides; deferred, they are the context.
        """
        if self.side == DEFERRED:
            return self.weights + self.chunks
        if self.side == RAM:
            return self.weights + self.chunks + self.stitched
        return self.weights + self.stitched


def measure_one(side: str, shape: str, dtype: str, device: str, folder: Path, context: int) -> Peak:
    """Answer once in this process, whose imports are done."""
    is_cuda = device == "cuda"
    timed_generate(build_model("tiny", getattr(torch, dtype), device), torch.tensor([[3, 4]]), 2)
    gc.collect()
    before = 0 if is_cuda else resident("VmRSS")
    model = build_model(shape, getattr(torch, dtype), device)
    gc.collect()
    if is_cuda:
        torch.cuda.reset_peak_memory_stats()
    else:
        reset_peak()
    case = Case(context, QUERY)
    bench = Bench(model, folder)
    bench.side(side, case)(1 + GENERATED)
    peak = torch.cuda.max_memory_allocated() if is_cuda else resident("VmHWM") - before
    tensors = [*model.parameters(), *model.buffers()]
    layout = bench.layout
    tokens = context + len(bench.prefix_ids) + QUERY + GENERATED
    return Peak(
        side,
        context,
        peak,
        weights=sum(tensor.nbytes for tensor in tensors),
        stitched=layout.nbytes(tokens),
        chunks=layout.nbytes(context),
    )


def measure_all(parsed: argparse.Namespace, folder: Path, context: int) -> list[Peak]:
    """Each side in a fresh process, over the chunks that lie in `folder` already."""
    found = []
    print(f"\npeak memory above imports at {context} tokens, MB")
    for side in SIDES:
        words = ["--peak", side, "--shape", parsed.shape, "--dtype", parsed.dtype]
        words += ["--device", parsed.device, "--threads", str(parsed.threads)]
        words += ["--contexts", str(context), "--folder", str(folder)]
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.ttft", *words],
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        )
        one = Peak(**json.loads(done.stdout.splitlines()[-1]))
        print(
            f"  {side:<15}{one.peak / 1e6:>9.0f}   weights {one.weights / 1e6:.0f}, "
            f"stitched {one.stitched / 1e6:.0f}, chunks {one.chunks / 1e6:.0f}",
            flush=True,
        )
        found.append(one)
    return found


# Not `disk`: how fast a cold file comes is the machine's.
OURS: Final = (PAGES, RAM, RESIDENT, DEFERRED)
OF_DECODING: Final = "decoding, "  # how the names of its ratios begin


@dataclass(frozen=True)
class Row:
    """One side of one case.

    Attributes:
        context: Tokens of the chunks of a row of the batch.
        query: Tokens of its query.
        batch: Rows.
        side: Which side.
        measure: "ttft" in seconds, or "decode" in tokens per second of all rows together.
        median: Of all rounds but the first.
        lowest: Smallest.
        highest: Largest.
        rounds: How many were counted.
        parts: Median seconds of the parts of a ttft.
        samples: What every round measured, in their order.
    """

    context: int
    query: int
    batch: int
    side: str
    measure: str
    median: float
    lowest: float
    highest: float
    rounds: int
    parts: Mapping[str, float] = field(default_factory=dict)
    samples: Sequence[float] = ()

    @property
    def case(self) -> tuple[int, int, int]:
        """Context, query and batch."""
        return self.context, self.query, self.batch


def ttft_row(case: Case, side: str, samples: Sequence[Sample]) -> Row:
    """Seconds to the first token."""
    found = [sample.ttft for sample in samples]
    return _row(case, side, "ttft", found, median_parts(list(samples)))


def decode_row(case: Case, side: str, samples: Sequence[Sample]) -> Row:
    """Tokens per second behind the first."""
    return _row(case, side, "decode", [case.batch / sample.step for sample in samples], {})


def _row(
    case: Case, side: str, measure: str, found: Sequence[float], parts: Mapping[str, float]
) -> Row:
    return Row(
        case.context,
        case.query,
        case.batch,
        side,
        measure,
        statistics.median(found),
        min(found),
        max(found),
        len(found),
        parts,
        tuple(found),
    )


def rows_of(report: Mapping[str, Any]) -> list[Row]:
    """The rows of a report that was read from JSON."""
    return [Row(**row) for row in report["rows"]]


def row_of(
    rows: Iterable[Row], case: tuple[int, int, int], side: str, measure: str = "ttft"
) -> Row | None:
    """The row of one side, None if it was not measured."""
    for row in rows:
        if (row.case, row.side, row.measure) == (case, side, measure):
            return row
    return None


@dataclass(frozen=True)
class Ratio:
    """One side over another, in one case of one run.

    Attributes:
        value: As `ratio_of` has it.
        low: Lower bound of the 95 % interval of the paired rounds' median; `value` without pairs.
        high: Upper bound.
        rounds: In how many rounds both sides were measured.
        counted: Whether it is of bytes, which need no rounds.
    """

    value: float
    low: float
    high: float
    rounds: int
    counted: bool = False

    @property
    def has_interval(self) -> bool:
        """Whether the bounds mean something: enough paired rounds, or nothing is left to chance."""
        # Of fewer, all lie on one side of the true median in 2 x 0.5^n of the cases.
        return self.counted or self.rounds >= LEAST_DIFFERING

    @property
    def interval(self) -> Interval:
        """The same as plain statistics."""
        return Interval(self.value, self.low, self.high, self.rounds)


def ratios(report: Mapping[str, Any]) -> dict[str, Ratio]:
    """What a change of the code shall not make worse: smaller is better in all of them.

    Returns:
        By name, each within one case of one run: times to the first token over the floor's and,
        from the page cache, over TurboRAG's and a full prefill's; stock's tokens per second over
        ours; peak memory over what it is held against (see `Peak.held`).
    """
    rows = rows_of(report)
    found: dict[str, Ratio | None] = {}
    for case in dict.fromkeys(row.case for row in rows):
        place = "{} + {} tokens, batch {}".format(*case)
        for side in OURS:
            for against in (FLOOR, TURBORAG, NAIVE) if side == PAGES else (FLOOR,):
                found[f"{side} over {against}, {place}"] = bounded_ratio(rows, case, side, against)
            decoded = bounded_ratio(rows, case, STOCK, side, "decode")
            found[f"{OF_DECODING}{STOCK} over {side}, {place}"] = decoded
    for one in report["memory"]:
        peak = Peak(**one)
        if peak.side in OURS:
            name = f"peak memory, {peak.side}, {peak.context} tokens"
            over = peak.peak / peak.held
            found[name] = Ratio(over, over, over, 0, counted=True)
    return {name: ratio for name, ratio in found.items() if ratio is not None}


def ratio_of(
    rows: Sequence[Row], case: tuple[int, int, int], side: str, against: str, measure: str = "ttft"
) -> float | None:
    """One side over another, None if one of them was not measured.

    The median of the rounds' own ratios where both sides have enough of them in common: a machine
    that is slower for a while is so for both.  Else the ratio of their medians.
    """
    ours, other = (row_of(rows, case, one, measure) for one in (side, against))
    if ours is None or other is None or not other.median:
        return None
    pairs = _paired(ours, other)
    return statistics.median(pairs) if pairs else ours.median / other.median


def bounded_ratio(
    rows: Sequence[Row], case: tuple[int, int, int], side: str, against: str, measure: str = "ttft"
) -> Ratio | None:
    """`ratio_of` with the interval of the paired rounds."""
    value = ratio_of(rows, case, side, against, measure)
    ours, other = (row_of(rows, case, one, measure) for one in (side, against))
    if value is None or ours is None or other is None:
        return None
    pairs = _paired(ours, other)
    if not pairs:
        return Ratio(value, value, value, 0)
    found = median_interval(pairs)
    return Ratio(value, found.low, found.high, len(pairs))


def _paired(ours: Row, other: Row) -> list[float]:
    """The ratio of each round; none where too few are of both.

    All begin with the first round that counts, so who has fewer was asked in the other's first.
    """
    common = min(len(ours.samples), len(other.samples))
    if common < LEAST_DIFFERING and len(ours.samples) != len(other.samples):
        return []
    return [one / two for one, two in zip(ours.samples, other.samples, strict=False)]


ROUNDS: Final = 6
# Of a long context alone, which the claims are about, for the sides that are held against each
# other there: on a shared machine a round may take half as long again as the next one.
MANY: Final = 21
CLOSE: Final = (PAGES, RAM, RESIDENT, DEFERRED, FLOOR)
DECODED: Final = 8  # tokens behind the first
DECODE_ROUNDS: Final = 6
FEW: Final = 3  # rounds of decoding that no claim and no short check is about
NAIVE_ROUNDS: Final = 2
DECODING: Final = (STOCK, TURBORAG, RAM, RESIDENT, DEFERRED)
LONG: Final = 1024  # tokens behind which a cached instruction saves next to nothing
# Whole cases of the command line's presets.
PRESETS: Final[dict[str, list[Case]]] = {
    "cpu": [
        Case(1024, 20),
        Case(1024, 128),
        Case(2048, 20),
        Case(4096, 20),
        *(Case(1024, 20, batch) for batch in (4, 8)),
    ],
    "short": [Case(1024, 20), Case(2048, 20)],
    "paper": [
        *(Case(context, 20) for context in (1024, 2048, 4096, 8192, 16384)),
        *(Case(8192, 128, batch) for batch in (1, 2, 4, 6, 8)),
    ],
}


def skipped(case: Case) -> set[str]:
    """Sides that say nothing new about a case: alone they take most of its time."""
    found = {PREFIXED} if case.query > QUERY or case.context > LONG else set()
    return found | ({PREFIXED, TURBORAG, COLD} if case.batch > 1 else set())


def measure(
    timed: dict[str, Callable[[int], Sample]], case: Case, rounds: int, slow_rounds: int
) -> list[Row]:
    """Let the sides take turns to the first token.

    The first round is not counted; those that prefill everything are left out of it, and have the
    next `slow_rounds` (one in a batch, behind a long question and behind the cached instruction: it
    takes as long as many rounds of the others).  More rounds than usual are those of the sides that
    are nearly equal.
    """
    once = min(slow_rounds, 1)
    slow = {NAIVE: once if case.batch > 1 or case.query > QUERY else slow_rounds, PREFIXED: once}
    samples: dict[str, list[Sample]] = {name: [] for name in timed if name != STOCK}
    for number in range(rounds + 1):
        for name, found in samples.items():
            usual = rounds if name in CLOSE else min(rounds, ROUNDS)
            if number > slow.get(name, usual) or (name in slow and not number):
                continue
            gc.collect()
            sample = timed[name](1)
            if number:
                found.append(sample)
    return [ttft_row(case, name, found) for name, found in samples.items() if found]


def measure_decode(timed: dict[str, Callable[[int], Sample]], case: Case, rounds: int) -> list[Row]:
    """Let the sides take turns at generating; the first round of each is not counted.

    TurboRAG's way, against which no ratio of decoding is held, has few.
    """
    names = [name for name in DECODING if name in timed]
    samples: dict[str, list[Sample]] = {name: [] for name in names}
    for number in range(rounds + 1):
        for name in names:
            if name == TURBORAG and number > FEW:
                continue
            gc.collect()
            sample = timed[name](1 + DECODED)
            if number:
                samples[name].append(sample)
    return [decode_row(case, name, found) for name, found in samples.items()]


def run_cases(
    bench: Bench,
    cases: Sequence[Case],
    wanted: int | None,
    slow_rounds: int,
    decode_rounds: int | None = None,
) -> list[Row]:
    """All rows, printed as they come."""
    rows: list[Row] = []
    for case in cases:
        absent = skipped(case) if slow_rounds else {*skipped(case), NAIVE, PREFIXED}
        timed = bench.sides(case, absent)
        is_long = case.context > 2 * LONG and case.batch == 1
        rounds = wanted or (MANY if is_long else ROUNDS)
        found = measure(timed, case, rounds, slow_rounds)
        if case.query == QUERY or case.batch > 1:
            few = min(rounds, DECODE_ROUNDS if case.batch == 1 else FEW)
            found += measure_decode(timed, case, decode_rounds or few)
        show(found)
        rows += found
        del timed
        bench.forget()
        release()
    return rows


def show(rows: Sequence[Row]) -> None:
    """Print the rows of one case."""
    print("\n{} + {} tokens, batch {}".format(*rows[0].case))
    for row in rows:
        line = (
            f"{row.side:<15}{row.median:>9.4f} ({row.lowest:.4f}-{row.highest:.4f}, {row.rounds})"
        )
        if row.measure == "decode":
            print(f"  {line} tokens/s", flush=True)
            continue
        parts = ", ".join(f"{name} {1e3 * value:.1f} ms" for name, value in row.parts.items())
        floor = ratio_of(rows, row.case, row.side, FLOOR)
        naive = ratio_of(rows, row.case, NAIVE, row.side)
        over = f"  {floor:.3f} x floor" if floor else ""
        sooner = f"  {naive:.1f} x sooner than naive" if naive else ""
        print(f"  {line} s{over}{sooner}  {parts}", flush=True)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--preset", choices=sorted(PRESETS), default="cpu")
    parser.add_argument("--shape", choices=sorted(SHAPES), help="0.5B on a CPU, 7B on a GPU")
    parser.add_argument("--contexts", type=int, nargs="+", help="instead of the preset's cases")
    parser.add_argument("--queries", type=int, nargs="+", default=[QUERY])
    parser.add_argument("--batches", type=int, nargs="+", default=[1])
    parser.add_argument("--rounds", type=int, help=f"{ROUNDS}; of a long context alone, {MANY}")
    parser.add_argument("--naive-rounds", type=int, default=NAIVE_ROUNDS, help="0 leaves them out")
    parser.add_argument("--decode-rounds", type=int, help=f"{DECODE_ROUNDS}; fewer in batches")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--peak", choices=SIDES, help="of one side alone, in this process")
    parser.add_argument("--no-memory", action="store_true", help="leave peak memory out")
    parser.add_argument("--folder", type=Path, help="for the chunks' files; None for a fresh one")
    parser.add_argument("--json", type=Path, help="write the report there")
    parsed = parser.parse_args(arguments)
    parsed.shape = parsed.shape or ("qwen2-7b" if parsed.device == "cuda" else "qwen2.5-0.5b")
    if any(context < CHUNK or context % CHUNK for context in parsed.contexts or []):
        parser.error(f"--contexts must be multiples of {CHUNK}, the tokens of a chunk")
    rounds = [one for one in (parsed.rounds, parsed.decode_rounds) if one is not None]
    if min([*parsed.queries, *parsed.batches, *rounds, parsed.threads]) < 1:
        parser.error("--queries, --batches, rounds and --threads must be at least 1")
    return parsed


def cases_of(parsed: argparse.Namespace) -> list[Case]:
    """The preset's cases, or those of the command line."""
    if not parsed.contexts:
        return PRESETS[parsed.preset]
    return [
        Case(context, query, batch)
        for batch in parsed.batches
        for context in parsed.contexts
        for query in parsed.queries
    ]


def command_of(arguments: Sequence[str]) -> str:
    """The command line without the paths of the machine it ran on."""
    kept, paths = ["python -m benchmarks.ttft"], {"--json", "--folder"}
    for before, word in zip(["", *arguments], arguments, strict=False):
        if word not in paths and before not in paths:
            kept.append(word)
    return " ".join(kept)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write JSON; 2 without the GPU that was asked for."""
    parsed, started = parse(arguments), time.perf_counter()
    if parsed.device == "cuda" and not torch.cuda.is_available():
        print("there is no CUDA device here; run this on a machine with one", file=sys.stderr)
        return 2
    torch.set_num_threads(parsed.threads)
    if parsed.peak:
        peak = measure_one(
            parsed.peak,
            parsed.shape,
            parsed.dtype,
            parsed.device,
            parsed.folder,
            parsed.contexts[0],
        )
        print(json.dumps(asdict(peak)))
        return 0
    about = described(parsed.device, parsed.threads)
    print(
        f"{parsed.shape}, {parsed.dtype}, random weights; {about['machine']}; {about['versions']}"
    )
    print(f"instruction {PREFIX}, chunks of {CHUNK} tokens; medians (lowest-highest, rounds)")
    cases = cases_of(parsed)
    model = build_model(parsed.shape, getattr(torch, parsed.dtype), parsed.device)
    with tempfile.TemporaryDirectory() as fresh:
        folder = parsed.folder or Path(fresh)
        bench = Bench(model, folder)
        gc.collect()
        gc.freeze()  # before every sample garbage is collected: among what is new, not all modules
        rows = run_cases(bench, cases, parsed.rounds, parsed.naive_rounds, parsed.decode_rounds)
        agreement = bench.agreement(min(cases, key=lambda case: case.context))
        print(f"\nlogits apart from ours, rms in standard deviations: {agreement}")
        del bench, model
        release()
        largest = max(case.context for case in cases if case.batch == 1 or parsed.contexts)
        memory = [] if parsed.no_memory else measure_all(parsed, folder, largest)
    report: dict[str, Any] = {
        "about": {
            "benchmark": "ttft",
            **about,
            "command": command_of(sys.argv[1:] if arguments is None else arguments),
            "shape": parsed.shape,
            "dtype": parsed.dtype,
            "chunk": CHUNK,
            "prefix": PREFIX,
            "decoded": DECODED,
            "seconds": round(time.perf_counter() - started),
        },
        "agreement": agreement,
        "memory": [asdict(one) for one in memory],
        "rows": [asdict(row) for row in rows],
    }
    if parsed.json:
        write(parsed.json, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
