"""What guesses from the prompt gain SmolLM2, and whether they ever change more than a tie.

With guesses the model looks at several tokens in a pass, so bfloat16 sums come in another order and
an answer may differ from the one without.  It may do so only where two tokens were as good as
equal: at the first difference the one that was said without guesses leads the other by no more than
twice the rounding of that answer, and there the logits of both ways are no further apart.  The
rounding is the largest difference of the logits without guesses from those that float32 computes of
the same weights over the same cached chunks.
"""

from __future__ import annotations

import json
import statistics
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final
from unittest.mock import patch

import torch
from transformers import DynamicCache

from kvcache_rag import Engine, PromptTemplate, Reuse
from kvcache_rag.models import generate as generating
from kvcache_rag.models import pretrained
from kvcache_rag.models.cache import CACHE_NAME
from kvcache_rag.models.decode import decode

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from torch import Tensor

    from kvcache_rag.models.decode import Decoded
    from kvcache_rag.models.hf import TransformersModel

# Tokens that are judged as quoted stand in runs of the documents of at least so many.
RUN: Final = 8
LEAST, MOST = 48, 64  # tokens of an answer that counts
EQUAL, TIE, WRONG = "equal", "near tie", "WRONG"


@dataclass(frozen=True)
class Verdict:
    """An answer with guesses beside the one without.

    Attributes:
        said: "equal", "near tie" or "WRONG".
        token: Number of the first token that differs.
        gap: By how much it was behind without guesses.
        rounding: Of the answer without guesses, up to there.
        apart: The largest difference of the two ways' logits there.
    """

    said: str = EQUAL
    token: int | None = None
    gap: float | None = None
    rounding: float | None = None
    apart: float | None = None


@dataclass
class Watch:
    """What one answer was decoded from.

    Attributes:
        ids: The answer.
        fresh: `(1, tokens)` ids that the cache did not hold.
        held: Keys and values per layer that it held, of `(1, heads, tokens, width)`.
        logits: Per token of the answer `(vocabulary,)`, from the pass that decided it.
    """

    ids: tuple[int, ...] = ()
    fresh: Tensor = field(default_factory=lambda: torch.empty(1, 0, dtype=torch.int64))
    held: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    logits: dict[int, Tensor] = field(default_factory=dict)


@contextmanager
def watched() -> Iterator[Watch]:
    """Watch the answer that is decoded meanwhile."""
    watch = Watch()

    def decoded(model: TransformersModel, ids: Tensor, cache: Any, **options: Any) -> Decoded:
        held, last, forward = cache.get_seq_length(), ids.shape[1] - 1, model.forward

        def noted(fresh: Tensor, cache: Any, positions: Tensor, **rest: Any) -> Tensor:
            logits = forward(fresh, cache, positions, **rest)  # (1, keep, vocabulary)
            places = positions[-logits.shape[1] :].tolist()
            for place, row in zip(places, logits[0], strict=True):
                watch.logits[place - last] = row.float()  # behind a wrong guess, until it is right
            return logits

        with patch.object(model, "forward", noted):
            found = decode(model, ids, cache, **options)
        watch.ids = found.ids
        watch.fresh = ids[:, held:]
        for layer in cache.layers:  # only now has all of the context arrived
            both = layer.keys[:, :, :held], layer.values[:, :, :held]
            watch.held.append((both[0].float(), both[1].float()))
        return found

    with patch.object(generating, "decode", decoded):
        yield watch


@contextmanager
def counted() -> Iterator[list[int]]:
    """Note the passes of each answer that is decoded meanwhile."""
    found = list[int]()

    def decoded(*values: Any, **options: Any) -> Decoded:
        one = decode(*values, **options)
        found.append(one.passes)
        return one

    with patch.object(generating, "decode", decoded):
        yield found


def exact_logits(model: Any, watch: Watch) -> Tensor:
    """What a float32 model says at every token of the answer, `(tokens, vocabulary)`."""
    cache = DynamicCache()
    for index, (keys, values) in enumerate(watch.held):
        cache.update(keys, values, index)
    ids = torch.cat([watch.fresh, torch.tensor([watch.ids[:-1]])], 1)
    with torch.inference_mode():
        output = model(ids, **{CACHE_NAME: cache}, logits_to_keep=len(watch.ids))
    logits: Tensor = output.logits[0]
    return logits


def verdict(plain: Watch, guessed: Watch, exact: Tensor) -> Verdict:
    """Whether an answer with guesses differs by rounding alone.

    Args:
        plain: Without guesses.
        guessed: With them.
        exact: `exact_logits` of `plain`.
    """
    if plain.ids == guessed.ids:
        return Verdict()
    pairs = enumerate(zip(plain.ids, guessed.ids, strict=False))
    first = next((index for index, (one, other) in pairs if one != other), None)
    if first is None:  # the same tokens, and one of them went on
        return Verdict(WRONG)
    ours = torch.stack([plain.logits[index] for index in range(len(plain.ids))])
    rounding = float((ours - exact).abs().max())
    there = plain.logits[first]
    gap = float(there[plain.ids[first]] - there[guessed.ids[first]])
    apart = float((there - guessed.logits[first]).abs().max())
    is_tie = max(gap, apart) <= 2 * rounding
    return Verdict(TIE if is_tie else WRONG, first, gap, rounding, apart)


def quoted(answer: Sequence[int], prompt: Sequence[int]) -> float:
    """Which part of an answer's tokens stand in runs of at least `RUN` tokens of the prompt."""
    runs = {tuple(prompt[start : start + RUN]) for start in range(len(prompt) - RUN + 1)}
    covered = set[int]()
    for start in range(len(answer) - RUN + 1):
        if tuple(answer[start : start + RUN]) in runs:
            covered.update(range(start, start + RUN))
    return len(covered) / max(1, len(answer))


@dataclass(frozen=True)
class Kind:
    """Answers of one kind.

    Attributes:
        name: As the report has it.
        questions: Asked in turns, each of other documents.
        turns: How often an answer is timed, both ways.
        part: Of the answers that are wanted altogether.
        least: Least part of an answer that is quoted; where it is 0, nothing may be.
        unguessed: Whether every guess has to be wrong.
    """

    name: str
    questions: tuple[str, ...]
    turns: int = 1
    part: float = 1.0
    least: float = 0.0
    unguessed: bool = False

    def takes(self, tokens: int, share: float, passes: int) -> bool:
        """Whether an answer is of this kind."""
        if tokens < LEAST or (self.unguessed and passes < tokens):
            return False
        return share >= self.least if self.least else share == 0


POEM: Final = "Write a poem about the sea and do not use the documents."
KINDS: Final = (
    Kind("quoting", ("Repeat the first document word for word.",), least=0.5),
    Kind("not quoting", (POEM,), part=0.25),
    # Few differences from 1 are larger than what a machine does to one answer.
    Kind(
        "no guess right",
        ("Write a short story about a dragon.", "Explain how to bake bread.", POEM),
        turns=3,
        part=0.25,
        unguessed=True,
    ),
)


@dataclass(frozen=True)
class Measured:
    """One answer that counts.

    Attributes:
        tokens: Of it.
        passes: In which they were decoded, with guesses.
        share: Which part is quoted.
        ratio: Tokens per second with guesses over without, the median of its turns.
        verdict: Beside the answer without guesses.
    """

    tokens: int
    passes: int
    share: float
    ratio: float
    verdict: Verdict


class Guesses:
    """SmolLM2, asked with and without guesses."""

    def __init__(self) -> None:
        """Load it, and what says how far it rounds."""
        template = PromptTemplate(system="Use the documents.")
        self.engine = Engine.from_pretrained(
            "smollm2", adapter="none", device="cpu", policy=Reuse(), template=template
        )
        plain = pretrained.load(
            "smollm2", dtype="auto", device="cpu", options={}, weight_format="plain"
        )
        self.exact = plain[0].float()  # the same weights

    def measure(self, kind: Kind, question: str, texts: list[str], swap: bool) -> Measured | None:
        """An answer to a question of `kind`, None if it is of another one."""
        with counted() as passes:
            tried = self.engine.generate(question, texts, max_new_tokens=MOST).token_ids
        share = quoted(tried, self.engine.tokenize(question, texts).all)
        if not kind.takes(len(tried), share, passes[0]):
            return None
        ratios = []
        for turn in range(kind.turns):
            speeds = dict[int | None, float]()
            for lookup in (0, None) if (turn % 2 == 0) != swap else (None, 0):
                answer = self.engine.generate(
                    question, texts, max_new_tokens=MOST, prompt_lookup_num_tokens=lookup
                )
                seconds = answer.metrics.total - answer.metrics.ttft
                speeds[lookup] = (len(answer.token_ids) - 1) / max(seconds, 1e-9)
            ratios.append(speeds[None] / speeds[0])
        return Measured(
            len(tried), passes[0], share, statistics.median(ratios), self.judge(question, texts)
        )

    def judge(self, question: str, texts: list[str]) -> Verdict:
        """The answer with guesses beside the one without."""
        with watched() as plain:
            self.engine.generate(question, texts, max_new_tokens=MOST, prompt_lookup_num_tokens=0)
        with watched() as guessed:
            self.engine.generate(question, texts, max_new_tokens=MOST)
        return verdict(plain, guessed, exact_logits(self.exact, plain))


def measured(data: Path, wanted: int) -> list[dict[str, Any]]:
    """A row of the report per kind of answers.

    Args:
        data: Folder with `squad_corpus.jsonl`, whose texts are the documents, two a question.
        wanted: Quoting answers that count; of the others some part of it.
    """
    with (data / "squad_corpus.jsonl").open(encoding="utf-8") as lines:
        documents = [json.loads(line)["text"] for line in lines]
    guesses, rows = Guesses(), []
    for kind in KINDS:
        found, asked, most = list[Measured](), 0, max(1, round(kind.part * wanted))
        for start in range(0, len(documents) - 1, 2):
            if len(found) == most:
                break
            question = kind.questions[asked % len(kind.questions)]
            asked += 1
            one = guesses.measure(kind, question, documents[start : start + 2], asked % 2 == 0)
            found += [one] if one else []
        rows.append(row_of(kind.name, asked, found))
        print({name: value for name, value in rows[-1].items() if name != "each"}, flush=True)
    return rows


def row_of(kind: str, asked: int, found: Sequence[Measured]) -> dict[str, Any]:
    """What the answers of a kind come to; `each` is for who looks at the file."""
    said = [one.verdict.said for one in found]
    ties = [one.verdict for one in found if one.verdict.said == TIE]
    ratios = [one.ratio for one in found]
    return {
        "answers": kind,
        "asked": asked,
        "counted": len(found),
        "quoted part": statistics.mean(one.share for one in found) if found else None,
        "tokens/s over those without guesses": statistics.geometric_mean(ratios) if found else None,
        "slowest": min(ratios, default=None),
        "equal answers": said.count(EQUAL),
        "near ties": len(ties),
        "their widest gap over its rounding": max(
            (one.gap / one.rounding for one in ties if one.gap is not None and one.rounding),
            default=None,
        ),
        "wrong": said.count(WRONG),
        "each": [asdict(one) for one in found],
    }
