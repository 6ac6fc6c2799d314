"""What the laws of the llama.cpp backend share: engines, prompts, and what rounding allows."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from laws import QUESTION, TEMPLATE, TEXTS
from torch import Tensor
from zoo import byte_tokenizer

from kvcache_rag import Engine, MemoryStore, PromptTemplate, ReusePolicy

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
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
