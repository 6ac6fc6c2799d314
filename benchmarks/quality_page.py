"""docs/quality.md, written from the records of `quality.py`; no figure in it is typed by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from benchmarks.quality_scores import FULL, Scores
from benchmarks.quality_sweep import sweeps

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvcache_rag.evaluation.report import Group, PolicyRow
    from kvcache_rag.scoring.ask import Record, Records
    from kvcache_rag.scoring.statistics import Comparison, Interval

PARTS: Final = ("main", "noise", "needles", "cross")
AT_RATIO: Final = ("LegoLink", "CacheBlend", "CacheClip")
HEADLINE: Final = 0.948  # CacheClip's share of full attention's score on NIAH, at 20 %
MARGIN: Final = 2.0  # points
_HEAD: Final = """# The packaged reader

What reusing chunks costs in answers, what each remedy buys back, and what fine-tuning does. Written
by one command, from the packaged reader alone:

    python -m benchmarks.quality

The reader is tiny and reads controlled English, so these figures rank remedies on *this* model and
these kinds of questions; `kvcache-rag verify` says how far each policy is from full prefill on
yours. {n} questions of each kind, the same ones for every policy and model, names never seen in
training. In brackets: 95 % intervals; differences are paired and resampled by context. {date},
{machine}, torch {torch}, transformers {transformers}.

- **before**: the packaged reader. **block**: {steps} steps of `kvcache-rag finetune` under the
  block mask. **control**: as many steps on the same data under full attention.
- **LegoLink** recomputes the first {lego} tokens of each chunk but the first; **CacheBlend** and
  **CacheClip** choose 20 % of the chunk tokens (CacheClip's windows, 5 of 8, leave 3 to 5 % of
  these; "best windows" takes whole windows up to 20 %; its auxiliary model is the reader itself,
  for want of a smaller one, and "taught" one that was fine-tuned for choosing; measured when 5 of
  8 were enough and the 20 % were of all chunks, where today more than 5 are asked for and the ratio
  is of the chunks behind the first: [experiments.md](experiments.md)); **APE** has T = S = 0.9,
  which was not tuned for this model.
- What the reader was trained on before: block-mask batches of single facts, chains and several
  values; full attention only on the kinds that need two chunks.

![Quality against time to first token](quality.svg)

"""
_EVERY: Final = """
## Every kind of question

Exact match in % (needles: share of the needles found), and the difference in points from full
prefill of the same model. Kinds whose full prefill is below 60 % are shown, not scored.

"""
_TUNING: Final = """## Fine-tuning

Held-out samples before and after (TurboRAG, arXiv 2410.07590, table 4: no regression without
chunks).

"""
_REGRESSION: Final = """**Single hop: block-mask fine-tuned and stitched, against the better full
prefill of before and control** (TurboRAG's claim; asked for: lower bound above -{margin:g}
points).

| kind | better full prefill | difference in points | holds |
|---|---|---|---|
"""
_LOST: Final = """**Facts that need the chunk before: what stitching loses, before and after
fine-tuning**, in points from full prefill of before, and from the better one of before and control
(asked for: halved). With fewer documents there are fewer to take for the right one.

| kind | lost before | lost after | halved |
|---|---|---|---|
"""
_KEPT: Final = """**Kept of full prefill's score at 20 % recomputed, before fine-tuning**
(CacheClip's headline: {headline:.1f} %).

| kind | reordered | {names} | best keeps {headline:.1f} % |
|---|---|{rule}---|
"""
_COST: Final = """Tokens computed again as a share of the documents' tokens, and time to the first
token, on `pronoun` with the packaged reader. Its 0.9M parameters make every fixed cost large: for
the cost at 4,096 tokens of a real shape see `benchmarks/results/recompute.json`.

| policy | computed again | TTFT ms, median |
|---|---|---|
"""
_LOSSES: Final = """| run | measured on | loss before | after | exact before | after |
|---|---|---|---|---|---|
"""
_KINDS: Final = {
    "reader_single": "one fact, among other facts",
    "reader_noise_20": "five documents, four state the answer",
    "reader_noise_40": "five documents, three state the answer",
    "reader_noise_60": "five documents, two state the answer",
    "reader_noise_80": "five documents, one states the answer",
    "reader_same_relation": "every document states the asked relation, each of another entity",
    "reader_multi_value": "all values of a relation, from several documents",
    "reader_two_hop_direct": "two facts of two documents, answered without the bridge",
    "reader_unit": "a unit stated once, in the chunk before: one look when the question is asked",
    "reader_pronoun": "a pronoun; who is meant stands at the end of the chunk before",
    "reader_alias": "an alias; whose it is stands at the end of the chunk before",
    "niah_reader_single": "a needle whose relation nothing else states",
    "niah_reader_multikey_2": "a needle; every sentence states its relation",
}


def page(
    groups: Mapping[str, Sequence[Group]],
    records: Mapping[str, Records],
    reports: Mapping[str, Any],
    facts: Mapping[str, Any],
    *,
    single: Sequence[str],
    cross: Sequence[str],
    needles: Sequence[str],
    lego: int,
) -> str:
    """The whole page.

    Args:
        groups: Per part of the study.
        records: Per part of the study.
        reports: Of the two fine-tuning runs.
        facts: Machine, versions and settings.
        single: Names of the single-hop tasks.
        cross: Names of the tasks that need attention across chunks.
        needles: Names of the needle tasks.
        lego: Tokens that LegoLink recomputes per chunk.
    """
    asked = Scores([row for name in PARTS for row in records[name].rows])
    shown = [group for name in PARTS for group in groups[name]]
    parts = [
        _HEAD.format(**facts, lego=lego),
        "## What holds and what does not\n\n",
        *_no_regression(asked, single),
        *_halved(asked, cross, records["k"].rows),
        *_headline(shown, (*needles, *cross)),
        _EVERY,
        *(_kind(name, shown) for name in dict.fromkeys(group.task for group in shown)),
        "## More ways to choose\n\nOn the packaged reader; full prefill again for the pairing.\n\n",
        *(_kind(name, groups["more"]) for name in cross),
        "## Cost\n\n",
        _cost(shown),
        *sweeps(groups["k"], shown),
        _TUNING,
        _finetuning(reports),
    ]
    return "".join(parts)


def _points(found: Comparison) -> str:
    return f"{100 * found.difference:+.1f} ({100 * found.low:+.1f} to {100 * found.high:+.1f})"


def _percent(found: Interval | None) -> str:
    if found is None:
        return ""
    return f"{100 * found.value:.1f} ({100 * found.low:.1f} to {100 * found.high:.1f})"


def _name(task: str) -> str:
    return task.removeprefix("reader_")


def _no_regression(asked: Scores, single: Sequence[str]) -> list[str]:
    lines = [_REGRESSION.format(margin=MARGIN)]
    for task in single:
        best = asked.best_full(task)
        found = asked.compare([task], ("block", "reordered"), (best, FULL))
        holds = "yes" if 100 * found.low > -MARGIN else "no"
        right = 100 * asked.mean([task], best, FULL)
        lines.append(f"| {_name(task)} | {best}, {right:.1f} % | {_points(found)} | {holds} |\n")
    best = asked.best_full(*single)
    found = asked.compare(single, ("block", "reordered"), (best, FULL))
    holds = "yes" if 100 * found.low > -MARGIN else "no"
    right = 100 * asked.mean(single, best, FULL)
    lines.append(f"| all, n = {found.n} | {best}, {right:.1f} % | {_points(found)} | {holds} |\n")
    return [*lines, "\n"]


def _halved(asked: Scores, cross: Sequence[str], swept: Sequence[Record]) -> list[str]:
    lines = [_LOST]
    for task in cross:
        lines.append(_lost(asked, task, f"{_name(task)}, 6 documents", asked.best_full(task)))
        for k in sorted({row.place.k or 0 for row in swept} - {0, 1}, reverse=True):
            some = Scores([row for row in swept if row.place.k == k])
            name = f"{_name(task)}, k = {k}"
            lines.append(_lost(some, task, name, some.best_full(task)))
    return [*lines, "\n"]


def _lost(asked: Scores, task: str, name: str, best: str) -> str:
    before = asked.compare([task], ("before", "reordered"), ("before", FULL))
    after = asked.compare([task], ("block", "reordered"), (best, FULL))
    halved = "yes" if -after.difference <= -before.difference / 2 else "no"
    return f"| {name} | {_points(before)} | {_points(after)} | {halved} |\n"


def _headline(shown: Sequence[Group], tasks: Sequence[str]) -> list[str]:
    lines = [
        _KEPT.format(
            headline=100 * HEADLINE, names=" | ".join(AT_RATIO), rule="---|" * len(AT_RATIO)
        )
    ]
    for task in tasks:
        rows = _rows(shown, task, "before")
        kept = {name: rows[name].kept for name in ("reordered", *AT_RATIO)}
        best = max((one.value for one in list(kept.values())[1:] if one), default=0.0)
        cells = [_percent(one) for one in kept.values()]
        verdict = "yes" if best >= HEADLINE else "no"
        lines.append(f"| {_name(task)} | {' | '.join(cells)} | {verdict} |\n")
    return lines


def _rows(shown: Sequence[Group], task: str, model: str) -> dict[str, PolicyRow]:
    group = next(one for one in shown if (one.task, one.model) == (task, model))
    return {row.policy: row for row in group.rows}


def _kind(task: str, shown: Sequence[Group]) -> str:
    found = [group for group in shown if group.task == task]
    scored = "" if found[0].scored else " Not scored: full prefill is below 60 %."
    lines = [
        f"### {_name(task)}\n\n{_KINDS[task].capitalize()}; n = {found[0].n}.{scored}\n\n",
        f"| policy | {' | '.join(group.model for group in found)} |\n|---|{'---|' * len(found)}\n",
    ]
    for place, row in enumerate(found[0].rows):
        cells = [_cell(group, group.rows[place]) for group in found]
        name = row.policy.replace("|", "\\|")
        lines.append(f"| {name} | {' | '.join(cells)} |\n")
    return "".join([*lines, "\n"])


def _cell(group: Group, row: PolicyRow) -> str:
    text = f"{100 * row.quality.value:.1f}"
    if row.difference is None:
        return _percent(row.quality)
    mark = ""
    if row.difference.ranked and group.scored:
        mark = " better" if row.difference.difference > 0 else " worse"
    return f"{text}<br>{_points(row.difference)}{mark}"


def _cost(shown: Sequence[Group]) -> str:
    group = next(one for one in shown if one.model == "before" and one.task == "reader_pronoun")
    lines = [_COST]
    for row in group.rows:
        time = "" if row.ttft is None else f"{1000 * row.ttft.value:.1f}"
        lines.append(f"| {row.policy} | {100 * row.recomputed_share:.1f} % | {time} |\n")
    return "".join(lines)


def _finetuning(reports: Mapping[str, Any]) -> str:
    lines = [_LOSSES]
    for label, report in reports.items():
        for measure in report["measures"].values():
            losses = " | ".join(f"{loss:.3f}" for loss in measure["loss"])
            exact = " | ".join(
                "" if share is None else f"{100 * share:.1f} %" for share in measure["exact_match"]
            )
            lines.append(f"| {label} | {measure['what']} | {losses} | {exact} |\n")
    for label, report in reports.items():
        lines += [f"\n- {label}: {line}" for line in report["verdict"]]
    return "".join([*lines, "\n"])
