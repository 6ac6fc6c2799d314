"""What the laws of the llama.cpp backend share: engines, prompts, and what rounding allows."""

from __future__ import annotations

import copy
import random
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

import torch
from laws import QUESTION, TEMPLATE, TEXTS
from torch import Tensor
from zoo import byte_tokenizer

from kvcache_rag import (
    BestFew,
    BestLast,
    CacheClip,
    Engine,
    FullRecompute,
    LegoLink,
    MemoryStore,
    PromptTemplate,
    Reuse,
)
from kvcache_rag.policies import ReusePolicy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from kvcache_rag.prompt.renderer import PromptIds
    from kvcache_rag.stitching.stitch import StitchedPrompt


def rounding(family: str) -> float:
    """How far float32 logits of the same layout may be apart, in their standard deviations.

    Measured over all that is compared here: 3.5e-5 (of YaRN, 1.5e-5 elsewhere), and 8e-4 of gemma3
    and mpt, where llama.cpp reads GELU from a table of 16-bit values, so that the last bit of a sum
    may give another value.
    """
    return 5e-3 if family in ("gemma3", "mpt") else 1e-4


def opened(path: Path, **options: Any) -> Engine:
    """An engine of llama.cpp over one of the random files."""
    given: dict[str, Any] = {
        "tokenizer": byte_tokenizer(),
        "template": TEMPLATE,
        "dtype": "float32",
        "device": "cpu",
        "store": MemoryStore(),
        "backend": "llama.cpp",
    }
    return Engine.from_pretrained(path, **{**given, **options})


def without_prefix(**template: str) -> dict[str, Any]:
    """Options of an engine whose prompts begin with the first chunk."""
    tokenizer = copy.deepcopy(byte_tokenizer())
    tokenizer.bos_token = None
    return {"tokenizer": tokenizer, "template": PromptTemplate(system="", **template)}


def ids_of(engine: Engine, texts: Sequence[str] = TEXTS, question: str = QUESTION) -> PromptIds:
    return engine.tokenize(question, texts)


def parts(ids: PromptIds) -> tuple[list[int], list[list[int]], list[int]]:
    """Prefix, chunks and query as lists."""
    return [*ids.prefix], [[*chunk] for chunk in ids.chunks], [*ids.query]


@dataclass(frozen=True)
class Picked(ReusePolicy):
    """Computes again what a function of the prompt says."""

    name: ClassVar[str] = "picked"
    pick: Callable[[StitchedPrompt], Tensor]

    def select(self, prompt: StitchedPrompt, signals: Any) -> Tensor:
        return self.pick(prompt)


def random_third(prompt: StitchedPrompt) -> Tensor:
    """About 30 %, from prefix and first chunk too."""
    generator = torch.Generator().manual_seed(prompt.context_tokens)
    return torch.rand(prompt.context_tokens, generator=generator) < 0.3


def heads(tokens: int) -> Callable[[StitchedPrompt], Tensor]:
    """The first tokens of every chunk but the first."""

    def pick(prompt: StitchedPrompt) -> Tensor:
        chosen = torch.zeros(prompt.context_tokens, dtype=torch.bool)
        for span in prompt.chunks[1:]:
            chosen[span.start : min(span.stop, span.start + tokens)] = True
        return chosen

    return pick


class FixedScorer:
    """Scores characters by noise, always the same."""

    def scores(self, question: str, chunks: Sequence[str]) -> list[Tensor]:
        return [
            torch.rand(len(text), generator=torch.Generator().manual_seed(len(text)))
            for text in chunks
        ]


POLICIES: Final[list[ReusePolicy]] = [
    Reuse(),
    BestLast(),
    BestFew(2),
    LegoLink(4),
    CacheClip(FixedScorer(), ratio=0.4),
    FullRecompute(),
]


class After(threading.Event):
    """An event that is set when it was looked at so many times."""

    def __init__(self, looks: int) -> None:
        super().__init__()
        self.looks, self.seen = looks, 0

    def is_set(self) -> bool:
        self.seen += 1
        return self.seen > self.looks


def questions(count: int) -> Iterator[tuple[str, list[str], dict[str, Any]]]:
    """Questions of all lengths, over new chunks and old ones, in every way."""
    drawn = random.Random(5)
    old = [*TEXTS]
    for number in range(count):
        chunks = [drawn.choice(old) for _ in range(drawn.randint(0, 3))]
        if number % 3 == 0:
            letters = drawn.choices("abcdefgh ", k=drawn.randint(1, 150))
            chunks.append(f"{number}{''.join(letters)}")
            old = [*old[-20:], chunks[-1]]
        question = "".join(drawn.choices("abcdefgh", k=drawn.randint(1, 60)))
        options: dict[str, Any] = {"policy": POLICIES[number % len(POLICIES)]}
        if number % 7 == 0:
            options |= {"num_beams": 2}
        if number % 11 == 0:
            options |= {"cancelled": After(number % 200)}
        yield question, chunks, {**options, "max_new_tokens": drawn.randint(1, 12)}
