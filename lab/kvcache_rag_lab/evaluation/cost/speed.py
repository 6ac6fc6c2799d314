"""First tokens, decoding and peak memory of one model: full prefill versus cached chunks.

All sides are answers of one engine, with its kernels, to the same prompts, so what tells them apart
is where keys and values come from:

- full        a prefill of the whole prompt, which reuses nothing
- memory      chunks from this process's memory (pinned where the model is on a GPU)
- files       chunks from files that were written a moment ago: the system has them in memory, too
- device      (GPU) chunks from the model's own memory

The sides take turns in every round, and ratios are formed within rounds: a machine that is slower
for a while is so for all.  One round before these is not timed; it measures peak memory.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from kvcache_rag.engine import like, unwarned
from kvcache_rag.errors import InvalidInputError, KVCacheRagError, UnsupportedModelError
from kvcache_rag.policies import FullRecompute
from kvcache_rag.progress import progress_bar
from kvcache_rag_lab.evaluation.cost.flops import DecoderShape
from kvcache_rag_lab.evaluation.cost.memory import peak_of_call
from kvcache_rag_lab.scoring.ask import rotated
from kvcache_rag_lab.scoring.statistics import LEAST_DIFFERING, Interval, median_interval

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from kvcache_rag.engine import Engine
    from kvcache_rag.policies import ReusePolicy
    from kvcache_rag.stores import ChunkStore

FULL, MEMORY, FILES, DEVICE = "full", "memory", "files", "device"

CONTEXTS: Final = (1024, 2048, 4096)

# Cheap beside the others; they tell from where on stitching pays.
SHORT: Final = (64, 128, 256, 512)

QUESTION_TOKENS: Final = 20  # without what the template writes around it

_WORDS: Final = 2000  # of the vocabulary, that texts are made of

_PROBED: Final = 8  # tokens that are decoded for an estimate


@dataclass(frozen=True)
class SpeedPlan:
    """What is measured.

    Attributes:
        contexts: Tokens of the chunks of a prompt, ascending.
        chunk: Tokens of a chunk; the last one of a context may be shorter.
        tokens: That are generated at each of `contexts`.
        rounds: In which all sides take their turn.
    """

    contexts: tuple[int, ...]
    chunk: int
    tokens: int
    rounds: int

    @classmethod
    def from_engine(
        cls, engine: Engine, contexts: Sequence[int], *, chunk: int, tokens: int, rounds: int
    ) -> SpeedPlan:
        """The contexts that were asked for; of none, those of `CONTEXTS` that fit the model.

        Raises:
            InvalidInputError: If a context does not fit the model's window.
        """
        ids, window = engine.tokenize(question_of(engine)), engine.context_window
        around = len(ids.prefix) + len(ids.query) + tokens
        room = window - around
        chosen = tuple(sorted(set(contexts))) or tuple(one for one in CONTEXTS if one <= room)
        if not chosen and room >= SHORT[0]:
            chosen = (room,)
        if not chosen or max(chosen) > room:
            raise InvalidInputError(
                f"a context of {max(chosen, default=SHORT[0])} tokens, with {around} of "
                f"instruction, question and answer, does not fit the model's window of {window}; "
                f"give --contexts of at most {max(0, room)}, or fewer --max-new-tokens"
            )
        return cls(chosen, chunk, tokens, rounds)

    @property
    def short(self) -> tuple[int, ...]:
        """Contexts shorter than all that were asked for, of which only the first token is timed."""
        return tuple(length for length in SHORT if length < min(self.contexts))

    def lengths(self, context: int) -> list[int]:
        """Tokens of the chunks of a context."""
        whole, rest = divmod(context, self.chunk)
        return [self.chunk] * whole + ([rest] if rest else [])


@dataclass(frozen=True)
class AnswerTimes:
    """One answer.

    Attributes:
        ttft: Seconds from the call to the first token.
        step: Seconds per token behind it; 0 where there was none.
    """

    ttft: float
    step: float


@dataclass
class ContextTimes:
    """What was measured at one context so far.

    Attributes:
        context: Tokens of its chunks, as they were asked for.
        chunks: How many.
        chunk_tokens: Theirs, as the model reads them.
        prefix_tokens: Of the instruction before them.
        query_tokens: Of the question and what the template writes around it.
        generated: Tokens of an answer.
        rounds: Times by side, of complete rounds.
        peaks: Bytes at the peak of an answer above those held before it, by side; none where the
            system does not say.
    """

    context: int
    chunks: int
    chunk_tokens: int
    prefix_tokens: int
    query_tokens: int
    generated: int
    rounds: list[Mapping[str, AnswerTimes]] = field(default_factory=list)
    peaks: dict[str, int] = field(default_factory=dict)

    @property
    def sides(self) -> tuple[str, ...]:
        """Those that were measured."""
        return tuple(self.rounds[0]) if self.rounds else ()

    def first_tokens(self, side: str) -> list[float]:
        """Seconds to the first token, round by round."""
        return [times[side].ttft for times in self.rounds]

    def steps(self, side: str) -> list[float]:
        """Seconds per token behind the first, round by round."""
        return [times[side].step for times in self.rounds]

    def sooner(self, side: str) -> Interval:
        """How many times sooner than by full prefill the first token comes.

        The median of the rounds' own ratios; infinite bounds where there are too few of them.
        """
        pairs = zip(self.first_tokens(FULL), self.first_tokens(side), strict=True)
        found = median_interval([full / ours for full, ours in pairs])
        if found.n >= LEAST_DIFFERING:
            return found
        return Interval(found.value, 0.0, float("inf"), found.n)

    def pays(self, side: str) -> bool:
        """Whether the first token surely comes sooner; of few rounds, whether their median does."""
        found = self.sooner(side)
        return found.low > 1 or (found.n < LEAST_DIFFERING and found.value > 1)


def pays_from(measured: Sequence[ContextTimes], side: str) -> int | None:
    """The shortest context that was measured at which it pays, as at all longer ones."""
    least = None
    for times in sorted(measured, key=lambda times: -times.context):
        if not times.pays(side):
            break
        least = times.context
    return least


class SpeedBench:
    """One model, chunks of random words in every kind of store, and all sides over them.

    Attributes:
        plan: What is measured.
        measured: What was, so far, context by context.
        policy: Of all sides but full prefill.
        ingested: Tokens of chunks and the seconds that prefilling and writing them to files took.
    """

    def __init__(
        self,
        engine: Engine,
        stores: Mapping[str, ChunkStore],
        plan: SpeedPlan,
        policy: ReusePolicy | None = None,
    ) -> None:
        """Make texts, and an engine per store.

        Args:
            engine: Of the model; its own store is not used.
            stores: By side.
            plan: What to measure.
            policy: Of answers over cached chunks; None for the engine's.

        Raises:
            UnsupportedModelError: If chunks of this model cannot be stitched.
        """
        if engine.refusal:
            raise UnsupportedModelError(
                f"{engine.refusal}, so there is no stitching of its chunks to measure"
            )
        self.plan = plan
        self.policy = policy or engine.policy
        self.measured: list[ContextTimes] = []
        self.ingested: tuple[int, float] | None = None
        self._engines = {
            # Every prompt is timed as if it were the first.
            side: unwarned(like(engine, store=store, prompt_memory=0))
            for side, store in stores.items()
        }
        self._sides = (FULL, *stores)
        self._engine = self._engines[MEMORY]
        self._words = vocabulary(engine.tokenizer)
        self.question = question_of(engine)
        self._texts: dict[tuple[int, int], str] = {}

    @cached_property
    def shape(self) -> DecoderShape | None:
        """What operations follow from; None where the model's config does not say it."""
        try:
            return DecoderShape.from_config(self._engine._adapter.config)
        except UnsupportedModelError:
            return None

    def texts(self, context: int) -> list[str]:
        """The chunks of a context; a longer context begins with those of a shorter one."""
        return [
            self._text(number, length) for number, length in enumerate(self.plan.lengths(context))
        ]

    def _text(self, number: int, length: int) -> str:
        key = number, length
        if key not in self._texts:
            self._texts[key] = text_of(
                self._words, length, lambda text: self._engine.keys([text])[0].tokens, number
            )
        return self._texts[key]

    # ------------------------------------------------------------------------- before the rounds
    def estimate(self) -> float:
        """Seconds that all of it will take, by one short full prefill on a warm machine."""
        plan = self.plan
        probe = (*plan.short, *plan.contexts)[max(0, len(plan.short) - 1)]
        for _ in range(2):  # once for what is loaded and compiled on the first call
            seen = self._answer(FULL, self.texts(probe), _PROBED)
        contexts = [(context, 1) for context in plan.short]
        contexts += [(context, plan.tokens) for context in plan.contexts]
        seconds = self._work(plan.chunk) / self._work(probe) * seen.ttft
        total = max(plan.contexts) / plan.chunk * seconds  # for the files
        for context, tokens in contexts:
            full = self._work(context) / self._work(probe) * seen.ttft
            decoded = len(self._sides) * (tokens - 1) * seen.step
            stitched = (len(self._sides) - 1) * 3 * seen.step
            total += (plan.rounds + 1) * (full + stitched) + plan.rounds * decoded
        return total

    def _work(self, context: int) -> float:
        """What a full prefill costs, in any unit."""
        return float(context if self.shape is None else self.shape.forward(context, context))

    def ingest(self) -> None:
        """Prefill all chunks into files, timed, and put them into the other stores.

        Raises:
            InvalidInputError: If a store does not keep them.
        """
        contexts = (*self.plan.short, *self.plan.contexts)
        texts = list(dict.fromkeys(text for context in contexts for text in self.texts(context)))
        started = time.perf_counter()
        files = self._engines[FILES]
        keys = files.add(texts)
        self.ingested = sum(key.tokens for key in keys), time.perf_counter() - started
        layout = files._adapter.measured.chunk_layout
        for engine in self._engines.values():
            if engine.spec == files.spec and engine is not files:
                for key in keys:
                    if files.store.contains(key):
                        engine.store.put(key, files.store.get(key, layout).chunk)
            for key in engine.add(texts):  # what is left
                if not engine.store.contains(key):
                    raise InvalidInputError(
                        f"chunks cannot be kept ({engine.store.stats().last_failure}); name "
                        "another --kv-dir"
                    )

    # ------------------------------------------------------------------------- the rounds
    def measure(self, *, show_progress: bool = False) -> Iterator[ContextTimes]:
        """Measure context by context; each is yielded when all of its rounds are over."""
        plan = self.plan
        contexts = (*plan.short, *plan.contexts)
        answers = len(contexts) * len(self._sides) * (plan.rounds + 1)
        with (
            collected_before_answers(),
            progress_bar(answers, "measure", " answers", show=show_progress) as bar,
        ):
            for context in contexts:
                yield self._measured(context, bar)

    def _measured(self, context: int, bar: Any) -> ContextTimes:
        plan = self.plan
        times = self._times(context, 1 if context in plan.short else plan.tokens)
        self.measured.append(times)
        self._measure_peaks(times)
        bar.update(len(self._sides))
        for number in range(plan.rounds):
            found = {}
            for side in rotated(self._sides, number):
                found[side] = self._sample(side, times)
                bar.update()
            times.rounds.append({side: found[side] for side in self._sides})
        return times

    def _times(self, context: int, generated: int) -> ContextTimes:
        texts = self.texts(context)
        ids = self._engine.tokenize(self.question, texts)
        return ContextTimes(
            context=context,
            chunks=len(texts),
            chunk_tokens=sum(map(len, ids.chunks)),
            prefix_tokens=len(ids.prefix),
            query_tokens=len(ids.query),
            generated=generated,
        )

    def _measure_peaks(self, times: ContextTimes) -> None:
        for side in self._sides:
            for engine in self._engines.values():
                engine.forget_buffer()
            try:
                call = partial(self._sample, side, times)
                times.peaks[side] = peak_of_call(call, self._engine.model.device)
            except OSError:  # a sandbox whose kernel does not count
                self._sample(side, times)

    def _sample(self, side: str, times: ContextTimes) -> AnswerTimes:
        return self._answer(side, self.texts(times.context), times.generated)

    def _answer(self, side: str, texts: Sequence[str], tokens: int) -> AnswerTimes:
        """Ask once.

        Raises:
            KVCacheRagError: If the side did not do what it is timed for.
        """
        gc.collect()
        device = self._engine.model.device
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # what was queued before is not part of the answer
        answer = self._engines.get(side, self._engine).generate(
            self.question,
            texts,
            policy=FullRecompute() if side == FULL else self.policy,
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            prompt_lookup_num_tokens=0,  # random words are nothing to guess from
        )
        cost = answer.metrics
        if cost.prefilled_tokens and side != FULL:
            raise KVCacheRagError(
                f"chunks were prefilled that should have come from {side} "
                f"({cost.missed[0].reason}); leave the store alone while it is measured"
            )
        steps = cost.generated_tokens - 1
        return AnswerTimes(cost.ttft, (cost.total - cost.ttft) / steps if steps > 0 else 0.0)

    # ------------------------------------------------------------------------- what was found
    def report(self) -> dict[str, Any]:
        """All that was measured, as plain JSON values."""
        ingested = None
        if self.ingested is not None:
            tokens, seconds = self.ingested
            ingested = {"tokens": tokens, "seconds": seconds, "tokens_per_second": tokens / seconds}
        complete = [times for times in self.measured if times.rounds]
        return {
            "policy": repr(self.policy),
            "ingestion": ingested,
            "contexts": [self._context_report(times) for times in complete],
            "pays_from": {side: pays_from(complete, side) for side in self._engines},
        }

    def _context_report(self, times: ContextTimes) -> dict[str, Any]:
        prompt = times.prefix_tokens + times.chunk_tokens + times.query_tokens
        return {
            "context": times.context,
            "chunks": times.chunks,
            "chunk_tokens": times.chunk_tokens,
            "query_tokens": times.query_tokens,
            "prompt_tokens": prompt,
            "generated": times.generated,
            "rounds": len(times.rounds),
            "sides": {side: self._side_report(times, side) for side in times.sides},
            "sooner": {
                side: interval_report(times.sooner(side)) for side in times.sides if side != FULL
            },
            "flops": self._flops_report(times),
        }

    def _side_report(self, times: ContextTimes, side: str) -> dict[str, Any]:
        decoding = None
        if times.generated > 1:
            steps = times.steps(side)
            decoding = {"tokens_per_second": 1 / statistics.median(steps), **times_report(steps)}
        return {
            "first_token": times_report(times.first_tokens(side)),
            "decoding": decoding,
            "peak_bytes": times.peaks.get(side),
        }

    def _flops_report(self, times: ContextTimes) -> dict[str, Any] | None:
        if self.shape is None:
            return None
        prompt = times.prefix_tokens + times.chunk_tokens + times.query_tokens
        found = self.shape.prompt(times.chunk_tokens, times.query_tokens, times.prefix_tokens)
        return {
            "per_generated_token": self.shape.forward(1, prompt + 1),
            "full": found.full,
            "question": found.cached,
            "rotation": found.rotation,
            "reduction": found.reduction_with_rotation,
        }


@contextmanager
def collected_before_answers() -> Iterator[None]:
    """Have garbage, collected before every answer, looked for in what is new, not in modules."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def times_report(seconds: Sequence[float]) -> dict[str, Any]:
    """Seconds of every round, their median and the 95th percentile (linear between rounds)."""
    p50, p95 = np.quantile(seconds, (0.5, 0.95)).tolist()
    return {"p50": p50, "p95": p95, "seconds": list(seconds)}


def interval_report(interval: Interval) -> dict[str, Any]:
    """Bounds of too few rounds are null."""
    is_known = interval.n >= LEAST_DIFFERING
    return {
        "value": interval.value,
        "low": interval.low if is_known else None,
        "high": interval.high if is_known else None,
        "rounds": interval.n,
    }


# ---------------------------------------------------------------------- texts of a vocabulary
def question_of(engine: Engine) -> str:
    """About `QUESTION_TOKENS` tokens."""
    words = vocabulary(engine.tokenizer)
    return text_of(words, QUESTION_TOKENS, lambda text: len(engine.brought_ids(text)), seed=-1)


def vocabulary(tokenizer: Any, count: int = _WORDS) -> list[str]:
    """Words that are tokens, or parts of words; the same for the same tokenizer.

    Raises:
        InvalidInputError: If it has none.
    """
    special = set(tokenizer.all_special_ids)
    ids = [number for number in range(len(tokenizer)) if number not in special]
    random.Random(0).shuffle(ids)
    words: dict[str, None] = {}
    for number in ids:
        word = tokenizer.decode([number]).strip()
        if word.isalnum():
            words[word] = None
        if len(words) == count:
            break
    if not words:
        raise InvalidInputError("the tokenizer has no token of letters to make texts of")
    return list(words)


def text_of(words: Sequence[str], tokens: int, count: Callable[[str], int], seed: int) -> str:
    """Random words of about `tokens` tokens, and no more of them than that, if a word is not.

    Args:
        words: To choose from.
        tokens: As many as are wanted.
        count: Tokens of a text.
        seed: Of the choice.
    """
    generator = random.Random(seed)
    chosen = generator.choices(words, k=tokens)  # a word has one token or more
    size = len(chosen)
    for _ in range(8):  # nearer and nearer, as words differ in length
        found = count(" ".join(chosen[:size]))
        size = max(1, min(len(chosen), size * tokens // max(1, found)))
    while size < len(chosen) and count(" ".join(chosen[: size + 1])) <= tokens:
        size += 1
    while size > 1 and count(" ".join(chosen[:size])) > tokens:
        size -= 1
    return " ".join(chosen[:size])
