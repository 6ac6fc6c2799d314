"""How `kvcache-rag verify` says what it found."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from kvcache_rag.commands.listing import plural, table
from kvcache_rag.reader.scoring import wilson

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvcache_rag.verdict import AuxiliaryAgreement, PolicyScore, Verdict


def lines(verdict: Verdict, file: str) -> Iterator[str]:
    """The table, the notes, and one sentence."""
    told = verdict.identity
    yield (
        f"model {told.model}, {told.dtype}, chunks stored as {told.codec}; "
        f"{plural(verdict.questions, 'question')} of {verdict.source}, measured by "
        f"{verdict.measure}"
    )
    yield ""
    for check in verdict.checks:
        state = "equal" if check.passed else "DIFFERENT"
        yield f"{state:<10}{check.name} ({check.error:.2g}, rounding explains {check.tolerance:g})"
    yield ""
    heads = [
        verdict.measure,
        "kept of full",
        "same answer",
        "KL first",
        "KL answer",
        "top-1",
        "recomputed",
        "ttft",
        "of full",
        "policy",  # last, as it may be long
    ]
    rows = [_cells(row) for row in (verdict.full, *verdict.policies)]
    yield from table([heads, *rows], right=frozenset(range(len(heads) - 1)))
    if verdict.auxiliary is not None:
        yield ""
        yield _auxiliary_line(verdict.auxiliary)
    yield ""
    yield from verdict.notes
    yield _sentence(verdict)
    yield f'Wrote {file}; use it with Engine(..., gate="{file}").'


def _cells(row: PolicyScore) -> list[str]:
    kept, *ends = map(_percent, (row.kept, row.kept_low, row.kept_high))
    interval = kept if math.isnan(row.kept) else f"{kept} ({'-'.join(ends)})"
    name = row.policy + (f" by {row.auxiliary}" if row.auxiliary else "")
    return [
        _percent(row.score),
        interval,
        _percent(row.agreement),
        _number(row.first_divergence),
        _number(row.answer_divergence),
        _percent(row.top1),
        _percent(row.recomputed),
        f"{1000 * row.ttft:.1f} ms",
        f"{row.ttft_ratio:.2f}x",
        name,
    ]


def _needed(verdict: Verdict) -> int:
    """Questions that prove the threshold if none is lost."""
    open_ = (1 - verdict.threshold) * verdict.full.score
    return next((n for n in range(1, 100_000) if wilson(0, n)[1] <= open_), 100_000)


def _percent(share: float) -> str:
    return "-" if math.isnan(share) else f"{100 * share:.1f}"


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.2g}"


def _auxiliary_line(found: AuxiliaryAgreement) -> str:
    return (
        f"Attention of {found.name} to the chunks against the model's own: KL "
        f"{found.divergence:.2f} ({found.divergence_low:.2f}-{found.divergence_high:.2f}) nats; "
        f"of the top 20 % of tokens, Jaccard {found.jaccard:.2f} "
        f"({found.jaccard_low:.2f}-{found.jaccard_high:.2f}), {found.random_jaccard:.2f} by chance."
    )


def _sentence(verdict: Verdict) -> str:
    asked = f"{100 * verdict.threshold:g} %"
    rows: Sequence[PolicyScore] = verdict.policies
    chosen = [row for row in rows if row.policy == verdict.recommended]
    if chosen:
        return (
            f"Recommended: {chosen[0].policy}, which keeps {_percent(chosen[0].kept)} % of full "
            f"prefill's score (surely {_percent(chosen[0].kept_low)} %, {asked} asked) at "
            f"{chosen[0].ttft_ratio:.2f} times its time to the first token."
        )
    if not all(check.passed for check in verdict.checks):
        return (
            f"Recommended: {verdict.full.policy}, because cached chunks do not give the numbers "
            "that they should on this model."
        )
    if any(row.kept_low >= verdict.threshold for row in rows):
        return f"Recommended: {verdict.full.policy}, because no policy that passes is sooner."
    if math.isnan(verdict.full.kept):
        return (
            f"Recommended: {verdict.full.policy}, because it scores nothing itself on these "
            "questions, so there is nothing to compare with; check questions, answers and "
            "--max-new-tokens."
        )
    close = max(rows, key=lambda row: (row.kept >= verdict.threshold, row.kept_low))
    if close.kept >= verdict.threshold:
        return (
            f"Recommended: {verdict.full.policy}; {close.policy} kept {_percent(close.kept)} % of "
            f"its score, but {verdict.questions} questions prove only {_percent(close.kept_low)} % "
            f"where {asked} is asked: give more questions ({_needed(verdict)} if none is lost), or "
            "accept less with --keep."
        )
    return (
        f"Recommended: {verdict.full.policy}, because no policy keeps {asked} of its score; the "
        f"closest, {close.policy}, keeps {_percent(close.kept)} %."
    )
