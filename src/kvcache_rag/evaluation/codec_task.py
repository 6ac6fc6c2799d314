"""What quantised chunks do to answers: every codec against `Native`, on the same questions.

A random model cannot tell codecs apart, so the reader's questions are asked (`reader_task`).  All
chunks, the prefix too, are written to files and read back by an engine that did not compute them.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcache_rag.codecs import Codec, Native
from kvcache_rag.engine import Engine
from kvcache_rag.evaluation.reader_task import MAX_NEW_TOKENS, examples
from kvcache_rag.progress import progress_bar
from kvcache_rag.reader import KINDS, ReaderExample
from kvcache_rag.reader.language import REFUSAL
from kvcache_rag.reader.scoring import Share
from kvcache_rag.stores import DiskStore

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from torch import Tensor

    from kvcache_rag.policies import ReusePolicy


@dataclass(frozen=True)
class CodecResult:
    """Result of one kind of question with one codec.

    Attributes:
        kind: Kind of question.
        codec: Name of the codec.
        policy: Name of the policy.
        right: Answers that equal the expected text.
        refused: Answers that say the documents do not contain it.
        changed: Answers that are not those with `Native`.
        divergence: Mean Kullback-Leibler divergence, in nats, of the distribution of the first
            token of the answer from that with `Native`.
        largest: The largest of these.
        loaded_share: Smallest share of chunk tokens that came from files; 1 or the rest is void.
    """

    kind: str
    codec: str
    policy: str
    right: Share
    refused: Share
    changed: Share
    divergence: float
    largest: float
    loaded_share: float


@dataclass(frozen=True)
class _Outcome:
    expected: str
    text: str
    first: Tensor
    loaded: float


def evaluate_codecs(
    engine: Engine,
    codecs: Sequence[Codec],
    policy: ReusePolicy,
    folder: Path,
    *,
    questions: int,
    seed: int = 0,
    documents: int = 6,
    facts: int = 4,
    kinds: Sequence[str] = KINDS,
    show_progress: bool = False,
    note: Callable[[CodecResult], None] | None = None,
) -> list[CodecResult]:
    """Ask the same questions over chunks in every codec; `Native` comes first, named or not.

    Args:
        engine: The model.
        codecs: What to compare.
        policy: How chunks are reused.
        folder: An empty folder for the files, which holds one question's chunks at a time.
        questions: At least so many per kind.
        seed: Another seed gives other names, facts and questions.
        documents: Per question.
        facts: Per document.
        kinds: Kinds of questions, from `kvcache_rag.reader.KINDS`.
        show_progress: Whether to show a bar.
        note: Called with each result as it is known.
    """
    # By name: an old and a new object of one codec are one column.
    named = {codec.name: codec for codec in (Native(), *codecs)}
    pairs = {name: _pair(engine, codec, folder / name) for name, codec in named.items()}
    results = []
    for kind in kinds:
        asked = examples(kind, questions, seed, documents, facts)
        outcomes: dict[str, list[_Outcome]] = {name: [] for name in named}
        with progress_bar(len(asked), kind, "context", show=show_progress) as bar:
            for example in asked:
                for name, (writer, reader) in pairs.items():
                    outcomes[name] += _ask(writer, reader, policy, example)
                bar.update(1)
        for name, found in outcomes.items():
            result = _result(kind, name, repr(policy), found, outcomes[Native.name])
            results.append(result)
            if note is not None:
                note(result)
    return results


def _pair(engine: Engine, codec: Codec, folder: Path) -> tuple[Engine, Engine]:
    """An engine that writes files and one that reads them: what the first computed it remembers."""

    def open_one() -> Engine:
        return Engine(
            engine.model,
            engine.tokenizer,
            store=DiskStore(folder, durable=False, codec=codec),
            template=engine.template,
            context_window=engine.context_window,
            cost_aware=False,
        )

    writer = open_one()
    writer.add(["."])  # writes the prefix, too
    return writer, open_one()


def _ask(
    writer: Engine, reader: Engine, policy: ReusePolicy, example: ReaderExample
) -> list[_Outcome]:
    keys = writer.add(example.documents)
    batch = [(question.text, example.documents) for question in example.questions]
    answers = reader.generate_batch(batch, policy=policy, max_new_tokens=MAX_NEW_TOKENS)
    outcomes = []
    for question, answer in zip(example.questions, answers, strict=True):
        logits = reader.logits(question.text, example.documents, policy=policy)[-1]
        metrics = answer.metrics
        tokens = metrics.reused_tokens + metrics.prefilled_tokens
        outcomes.append(
            _Outcome(
                question.answer,
                answer.text.strip(),
                logits.double().log_softmax(-1),
                metrics.reused_tokens / max(1, tokens),
            )
        )
    for key in set(keys):
        writer.store.delete(key)
    return outcomes


def _result(
    kind: str, codec: str, policy: str, found: Sequence[_Outcome], native: Sequence[_Outcome]
) -> CodecResult:
    count = len(found)
    divergences = [
        float((theirs.first.exp() * (theirs.first - mine.first)).sum())
        for mine, theirs in zip(found, native, strict=True)
    ]
    changed = sum(mine.text != theirs.text for mine, theirs in zip(found, native, strict=True))
    return CodecResult(
        kind=kind,
        codec=codec,
        policy=policy,
        right=Share(sum(one.text == one.expected for one in found), count),
        refused=Share(sum(one.text == REFUSAL for one in found), count),
        changed=Share(changed, count),
        divergence=statistics.fmean(divergences or [0.0]),
        largest=max(divergences, default=0.0),
        loaded_share=min((one.loaded for one in found), default=1.0),
    )
