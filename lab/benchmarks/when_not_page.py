"""docs/when-not.md, written from lab/benchmarks/results/; no figure in it is typed by hand.

python -m benchmarks.when_not_page
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from benchmarks.when_not_sizes import TOKENS, Weight, weights

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

RESULTS: Final = Path(__file__).parent / "results"
PAGE: Final = Path(__file__).parents[2] / "docs" / "when-not.md"
NOT_MEASURED: Final = "not measured"
# What a context has to gain before anybody notices.
LEAST_GAIN: Final = 0.05  # seconds
LEAST_RATIO: Final = 2.0
_HEAD: Final = """# When not to use this

Stitched chunk caches trade disk and an offline prefill for a sooner first token. Here is where that
is a bad trade. Written by `python -m benchmarks.when_not_page`: times by `python -m \
benchmarks.when_not`,
answers by `python -m benchmarks.quality`, sizes from configs; no figure is typed by hand.

"""
_TIMES: Final = """## Short contexts, and chunks that are asked once

{facts} Both sides and the prefilling took turns in one run; medians of {rounds} rounds.
Full prefill and cached chunks (by `Reuse()`) go through the same engine to the first token; the
cached ones are files in the page cache, every check on. `BestLast()`, the default of a model that
was not trained for cached chunks, takes longer ([quality](quality.md)). A context is the
instruction and the chunks. "Kept" is prefilling all its chunks and writing them, once. "Uses" is
how often each chunk has to be asked until that was worth it: kept / (full prefill - cached),
rounded up.

| context tokens | chunks | full prefill | `Reuse()` | sooner by | ratio | kept | uses |
|---|---|---|---|---|---|---|---|
"""
_CROSS: Final = """## Facts that need the chunk before

A chunk is prefilled alone, so what only the chunk before explains is not in it. Exact match of the
packaged reader in percent, {n} questions a kind ([quality](quality.md) has more policies, and what
fine-tuning changes):

| a fact with | full prefill | `Reuse()` | `LegoLink` |
|---|---|---|---|
"""
_REMOTE: Final = """## Remote LLMs

A model behind an API has no KV cache that anybody else could read or fill, so nothing here applies
to it; its own prompt cache, if it has one, reuses equal beginnings only.

"""
_GGUF: Final = """## GGUF that must stay 4-bit in memory

A GGUF file is dequantised when it is loaded, to 16 or 32 bits, for which there has to be room. On
a CPU `weight_format=` rounds linear layers to 8 or 4 bits again, with scales of its own
([models](models.md#weights-on-a-cpu)); embeddings stay as they are, and a tied output layer
becomes a copy in 8 bits. Bytes of weights are parameters x 4.5 bits in a file all of Q4_K (real
files mix in larger types), and x 16 bits in memory:

| model | parameters | in a Q4_K file | in memory here | `"int8"` | `"int4"` |
|---|---|---|---|---|---|
"""
_BYTES: Final = """## Bytes: keys and values against the text

{text} Bytes of a stored chunk per token, its header included (chunks of {tokens} tokens; 16-bit
models):

| model | native | int8 | int4 | native, times the text |
|---|---|---|---|---|
"""
_KINDS: Final = {
    "a pronoun that the chunk before explains": "reader_pronoun",
    "an alias that the chunk before explains": "reader_alias",
}


@dataclass(frozen=True)
class Case:
    """Medians of one context.

    Attributes:
        tokens: Of the context.
        chunks: Of which it is made.
        full: Seconds of full prefill to the first token.
        cached: Seconds of cached chunks.
        add: Seconds of prefilling all chunks and writing them.
    """

    tokens: int
    chunks: int
    full: float
    cached: float
    add: float

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Case:
        """From a row of the results."""
        return cls(
            row["context_tokens"],
            row["chunks"],
            *(median(row[side]) for side in ("full", "cached", "add")),
        )

    @property
    def gain(self) -> float:
        """Seconds by which the first token comes sooner."""
        return self.full - self.cached

    @property
    def ratio(self) -> float:
        """Times as soon."""
        return self.full / self.cached

    @property
    def uses(self) -> float:
        """How often its chunks have to be asked until keeping them was worth it."""
        return break_even(self.add, self.full, self.cached)


def break_even(add: float, full: float, cached: float) -> float:
    """Fewest uses n of a chunk with add + n x cached <= n x full; infinite if it never is."""
    if full <= cached:
        return math.inf
    return max(1, math.ceil(round(add / (full - cached), 9)))  # 0.3 - 0.2 is a little less than 0.1


def least_context(cases: Sequence[Case]) -> int | None:
    """The shortest context that was measured from which on all are sooner enough to notice."""
    found = None
    for case in sorted(cases, key=lambda case: -case.tokens):
        if case.gain < LEAST_GAIN or case.ratio < LEAST_RATIO:
            break
        found = case.tokens
    return found


def page(times: Mapping[str, Any], quality: Mapping[str, Any], models: Sequence[Weight]) -> str:
    """The whole page; what was not measured says so.

    Args:
        times: What `when_not` wrote, or {}.
        quality: What `quality` wrote, or {}.
        models: What they weigh.
    """
    cases = [Case.of(row) for row in times.get("cases", ())]
    cases.sort(key=lambda case: case.tokens)
    parts = (
        _HEAD,
        _summary(cases, quality, models, _per_token(times)),
        _times(cases, times),
        _cross(quality),
        _REMOTE,
        _GGUF + "".join(map(_gguf_row, models)) + "\n",
        _bytes(models, times),
    )
    return "".join(parts).rstrip("\n") + "\n"


def _summary(
    cases: Sequence[Case],
    quality: Mapping[str, Any],
    models: Sequence[Weight],
    per_token: float | None,
) -> str:
    lost = _scores(quality, "reader_pronoun")
    cross = NOT_MEASURED if lost is None else f"{lost[1]} instead of {lost[0]} % right"
    grown = [model.loaded_bytes / model.gguf_bytes() for model in models]
    rounded = [model.rounded_bytes["int4"] / model.gguf_bytes() for model in models]
    times = [model.token_bytes["native"] / per_token for model in models] if per_token else []
    text = NOT_MEASURED
    if times:
        text = f"16-bit ones take {min(times):,.0f} to {max(times):,.0f} times the text"
    rows = (
        ("contexts are short", _short(cases)),
        ("most chunks are never asked", _never_asked(cases)),
        ("a fact needs the chunk before (a pronoun, an alias)", f"by `Reuse()`: {cross}"),
        ("the LLM is remote", "its KV cache cannot be reached"),
        (
            "a GGUF model must stay 4-bit in memory",
            f"it is dequantised: {max(grown):.1f} times the bytes; rounded again, on a CPU "
            f'(`weight_format="int4"`), {min(rounded):.1f} to {max(rounded):.1f} times',
        ),
        ("there is little room for keys and values", text),
    )
    table = "".join(f"| {when} | {why} |\n" for when, why in rows)
    return f"| not where | because |\n|---|---|\n{table}\n"


def _short(cases: Sequence[Case]) -> str:
    """From where on a context is long enough; where all were, that none was too short."""
    if not cases:
        return NOT_MEASURED
    least = least_context(cases)
    if least is None:
        return f"none that was measured, up to {cases[-1].tokens:,} tokens, gains enough"
    sooner = f"{1000 * LEAST_GAIN:.0f} ms and {LEAST_RATIO:g} times sooner"
    gain = f"the first token comes at least {sooner} by `Reuse()`"
    if least == cases[0].tokens:
        return (
            f"none was too short on this processor: at {least:,} tokens, the fewest that were "
            f"measured, {gain}; one that prefills faster needs more (`kvcache-rag bench`)"
        )
    return f"from {least:,} tokens on, {gain}"


def _never_asked(cases: Sequence[Case]) -> str:
    """What keeping a chunk costs, and after how many uses that is paid for."""
    if not cases:
        return NOT_MEASURED
    least = least_context(cases) or 0
    uses = sorted({case.uses for case in cases if case.tokens >= least})
    first, last = ("no number of" if math.isinf(v) else f"{v:g}" for v in (uses[0], uses[-1]))
    said = first if first == last else f"{first} to {last}"
    cost = max(1000 * case.add / case.tokens for case in cases)
    return (
        f"keeping one takes up to {cost:.1f} ms a token, by `Reuse()` paid for after {said} "
        f"{'use' if said == '1' else 'uses'}; let the first question prefill what it needs"
    )


def _times(cases: Sequence[Case], times: Mapping[str, Any]) -> str:
    if not cases:
        return (
            f"## Short contexts, and chunks that are asked once\n\n{NOT_MEASURED.capitalize()}.\n\n"
        )
    facts = times["facts"]
    loads = [row["load"][0] for row in times["cases"]]
    said = (
        f"`{times['command']}`: {facts['model']} ({facts['revision'][:12]}), {facts['dtype']}; "
        f"{facts['machine']}, load {min(loads):.1f} to {max(loads):.1f}; {facts['versions']}; "
        f"commit {facts['commit']}; {max(row['date'] for row in times['cases'])}."
    )
    rows = "".join(
        f"| {case.tokens:,} | {case.chunks} | {_seconds(case.full)} | {_seconds(case.cached)} | "
        f"{_seconds(case.gain)} | {case.ratio:.1f} x | {_seconds(case.add)} | "
        f"{'never' if math.isinf(case.uses) else f'{case.uses:g}'} |\n"
        for case in cases
    )
    return _TIMES.format(facts=said, rounds=facts["rounds"]) + rows + "\n"


def _cross(quality: Mapping[str, Any]) -> str:
    rows = []
    for said, task in _KINDS.items():
        found = _scores(quality, task)
        cells = found or (NOT_MEASURED,) * 3
        rows.append(f"| {said} | {' | '.join(cells)} |\n")
    n = quality.get("facts", {}).get("n", "no")
    return _CROSS.format(n=f"{n:,}" if isinstance(n, int) else n) + "".join(rows) + "\n"


def _scores(quality: Mapping[str, Any], task: str) -> tuple[str, ...] | None:
    """Percent right before fine-tuning by full prefill, reordered and LegoLink; None: not asked."""
    groups = quality.get("cross", {}).get("groups", ())
    for group in groups:
        if (group["task"], group["model"], group["k"]) == (task, "before", None):
            found = {row["policy"]: row["quality"]["value"] for row in group["rows"]}
            wanted = ("full prefill", "reordered", "LegoLink")
            return tuple(f"{100 * found[name]:.1f}" for name in wanted)
    return None


def _gguf_row(model: Weight) -> str:
    return (
        f"| {model.model} | {_billions(model.parameters)} | {_size(model.gguf_bytes())} | "
        f"{_size(model.loaded_bytes)} | {_size(model.rounded_bytes['int8'])} | "
        f"{_size(model.rounded_bytes['int4'])} |\n"
    )


def _bytes(models: Sequence[Weight], times: Mapping[str, Any]) -> str:
    per_token, text = _per_token(times), times.get("text")
    if per_token is None or text is None:
        said = f"Bytes of text per token: {NOT_MEASURED}."
    else:
        said = (
            f"{text['texts']} articles of the demonstration have {per_token:.2f} bytes of text per "
            f"token of {times['facts']['model']}'s tokenizer ({text['tokens']:,} tokens); other "
            "tokenizers differ, so for other models the last column is a rough figure."
        )
    rows = []
    for model in models:
        cells = [f"{model.token_bytes[codec]:,.0f}" for codec in ("native", "int8", "int4")]
        ratio = f"{model.token_bytes['native'] / per_token:,.0f} x" if per_token else NOT_MEASURED
        rows.append(f"| {model.model} | {' | '.join(cells)} | {ratio} |\n")
    return _BYTES.format(text=said, tokens=TOKENS) + "".join(rows)


def _per_token(times: Mapping[str, Any]) -> float | None:
    text = times.get("text")
    return None if text is None else text["bytes"] / text["tokens"]


def _seconds(value: float) -> str:
    return f"{1000 * value:,.0f} ms" if abs(value) < 1 else f"{value:.2f} s"


def _billions(count: int) -> str:
    return f"{count / 1e9:.2f} B" if count >= 1e9 else f"{count / 1e6:.0f} M"


def _size(nbytes: float) -> str:
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.0f} MB"


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def main(words: Sequence[str] | None = None) -> int:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--times", type=Path, default=RESULTS / "when_not.json")
    parser.add_argument("--quality", type=Path, default=RESULTS / "quality.json")
    parser.add_argument("--page", type=Path, default=PAGE)
    arguments = parser.parse_args(words)
    text = page(_read(arguments.times), _read(arguments.quality), weights())
    arguments.page.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
