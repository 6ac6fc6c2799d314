"""Verdicts for tests: of any engine, with the shares of full prefill's score that are wanted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcache_rag.policies import FullRecompute, Reuse
from kvcache_rag.verdict import NumericsCheck, PolicyScore, Verdict

if TYPE_CHECKING:
    from kvcache_rag.verdict import Identity

REUSE = repr(Reuse())


def make_verdict(
    identity: Identity,
    kept: dict[str, float],
    *,
    questions: int = 200,
    error: float = 0.0,
    auxiliary: str = "",
) -> Verdict:
    """A verdict in which each policy kept its share, 2 points less for sure."""
    rows = [
        PolicyScore(
            policy=name,
            auxiliary=auxiliary,
            score=0.9 * share,
            kept=share,
            kept_low=share - 0.02,
            kept_high=share + 0.02,
            ttft=0.1,
            ttft_ratio=0.4,
        )
        for name, share in kept.items()
    ]
    return Verdict(
        identity=identity,
        created="2026-11-21",
        source="questions.jsonl",
        source_digest="ab" * 32,
        questions=questions,
        measure="f1",
        threshold=0.95,
        full=PolicyScore(repr(FullRecompute()), score=0.9, kept=1.0, kept_low=1.0, kept_high=1.0),
        policies=tuple(rows),
        recommended=repr(FullRecompute()),
        checks=(NumericsCheck("one cached chunk and a plain prefill", error, 1e-3),),
        packages={"torch": "2.13"},
        notes=("A note.",),
    )
