"""What the laws share: texts, engines of every family, and the plain paths as references."""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import access
import pytest
import torch
from alibi import told_positions
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from zoo import build, byte_tokenizer

from kvcache_rag import Engine, MemoryStore, Message, PromptTemplate
from kvcache_rag.errors import UnsupportedModelError
from kvcache_rag.kv.mask import MaskedSequence, block_mask
from kvcache_rag.models.cache import CACHE_NAME, growing_cache
from kvcache_rag.policies import ReusePolicy
from kvcache_rag.policies.relevance import Retrieved
from kvcache_rag.policies.selection import nothing

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvcache_rag.kv.mask import PositionScheme
    from kvcache_rag.policies.base import Scorer, Signal, Signals
    from kvcache_rag.stitching.stitch import StitchedPrompt

TOLERANCE = 1e-3
TEMPLATE = PromptTemplate(system="Read this.\n", chunk_start="<d>", chunk_end="</d>")
QUESTION = "Who?"
LONG_QUESTION = "What is it that they saw there?"
TURNS = (Message("user", "Is it wet?"), Message("assistant", "No."))
# No token at all, not even one that begins every text; and longer than a window of the zoo's, but
# no chunk ends behind place 256, from where on Falcon's biases are rounded to bfloat16.
SYSTEMS = {"no prefix": "", "a short one": TEMPLATE.system, "a long one": "Read it with care. " * 3}


class Recorder:
    """A logits processor that keeps what it sees: one `(rows, vocabulary)` per step."""

    def __init__(self) -> None:
        self.steps: list[Tensor] = []

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        self.steps.append(scores.clone())
        return scores


@dataclass(frozen=True)
class Picked(ReusePolicy):
    """Selects what a function of the prompt and of what is measured on it gives."""

    name: ClassVar[str] = "picked"
    pick: Callable[[StitchedPrompt, Signals], Any]
    positions: PositionScheme = "reordered"
    reads: tuple[Signal, ...] = ()
    auxiliary: Scorer | None = None

    def select(self, prompt: StitchedPrompt, signals: Signals) -> Tensor:
        found: Tensor = self.pick(prompt, signals)
        return found


def looking(look: Callable[[Signals], object], *more: Any, **options: Any) -> Picked:
    """A policy that looks at what is measured, and selects nothing."""

    def pick(prompt: StitchedPrompt, signals: Signals) -> Tensor:
        look(signals)
        return nothing(prompt)

    return Picked(pick, *more, **options)


def _texts() -> list[str]:
    letters = random.Random(7)
    return ["".join(letters.choices("abcdefgh ", k=size)) + "z" for size in (30, 57, 63)]


TEXTS = _texts()


def error(found: Tensor, reference: Tensor) -> float:
    """Largest difference in standard deviations of the reference."""
    return float((found.to(reference.device) - reference).abs().max() / reference.std())


def make_engine(name: str, **options: Any) -> Engine:
    return Engine(build(name), byte_tokenizer(), template=TEMPLATE, store=MemoryStore(), **options)


def behind_system(name: str, system: str, **options: Any) -> Engine:
    """An engine whose prompts begin with one of `SYSTEMS`."""
    tokenizer = copy.deepcopy(byte_tokenizer())
    if not SYSTEMS[system]:
        tokenizer.bos_token = None
    template = PromptTemplate(system=SYSTEMS[system], chunk_start="<d>", chunk_end="</d>")
    engine = Engine(build(name), tokenizer, template=template, store=MemoryStore(), **options)
    assert bool(access.renderer(engine).prefix_ids) == bool(SYSTEMS[system])
    return engine


def plain_logits(engine: Engine, texts: list[str]) -> Tensor:
    """Logits of the query from one ordinary forward pass of the very same ids."""
    ids = engine.tokenize(QUESTION, texts)
    with torch.no_grad():
        logits: Tensor = engine.model(torch.tensor([ids.all])).logits[0]
    return logits[-len(ids.query) :].float()


def masked_logits(engine: Engine, texts: list[str], scheme: Any) -> Tensor:
    """Logits of the query from one forward pass under the block mask."""
    ids = engine.tokenize(QUESTION, texts)
    return sequence_logits(engine, block_mask(ids.prefix, ids.chunks, ids.query, scheme))


def sequence_logits(engine: Engine, sequence: MaskedSequence, cache: Any = None) -> Tensor:
    """Logits of the query from one forward pass over a sequence with its own mask.

    An empty cache is filled by it.
    """
    adapter = access.adapter(engine)
    if by_place(engine):
        with told_positions(engine.model, sequence.positions, sequence.allowed), torch.no_grad():
            ids = sequence.ids[None]
            ones = torch.ones_like(ids)
            found: Tensor = engine.model(
                ids, attention_mask=ones, **{CACHE_NAME: cache}, use_cache=cache is not None
            ).logits
        return found[0, -sequence.query_tokens :].float()
    mask = adapter.mask_argument(sequence.allowed, sequence.indices)
    logits = adapter.forward(sequence.ids[None], cache, sequence.positions, mask=mask)
    return logits[0, -sequence.query_tokens :].float()


def by_place(engine: Engine) -> bool:
    """Whether nothing can stand at another position than its place (ALiBi)."""
    return access.adapter(engine).measured.by_place


def refused(engine: Engine, policy: ReusePolicy) -> bool:
    """Whether positions other than places are wanted where none can be; then it says so."""
    is_alone = len(policy.plan(Retrieved("", tuple(TEXTS))).brought) < 2
    if policy.positions == "reordered" or not by_place(engine) or is_alone:
        return False
    with pytest.raises(UnsupportedModelError, match=r"counts a token's place .*use Reuse\(\)"):
        engine.logits(QUESTION, TEXTS, policy=policy)
    with pytest.raises(UnsupportedModelError, match=r"counts a token's place .*use Reuse\(\)"):
        engine.generate_batch([(QUESTION, TEXTS)], policy=policy, max_new_tokens=1)
    return True


def over_stored(
    engine: Engine, model: Any, texts: Sequence[str], chosen: Tensor, scheme: Any, **arguments: Any
) -> Any:
    """What a model gives over the very chunks of a store that keeps keys at position 0.

    One ordinary forward pass: the keys are turned by the model's own rotation.  Chosen tokens are
    left out of them, and are computed in that pass before the query, each seeing what stands at
    places up to its own.

    Args:
        engine: Of a model that rotates in halves, with all layers alike.
        model: With its weights.
        texts: Of the chunks.
        chosen: `(context_tokens,)` bool.
        scheme: Where the others stand.
        arguments: Of the model.
    """
    ids, prefiller = engine.tokenize(QUESTION, texts), access.prefiller(engine)
    assert prefiller.position == "raw"
    stored = [engine.store.get(key, prefiller.layout).chunk for key in engine.add(texts)]
    held = [prefiller.prefix(), *stored]
    keys = torch.cat([chunk.keys(0) for chunk in held], 2)  # (layers, heads, context, width)
    values = torch.cat([chunk.values(0) for chunk in held], 2)
    sequence = block_mask(ids.prefix, ids.chunks, ids.query, scheme)
    positions = sequence.positions[sequence.allowed[-1]][None, : len(chosen)]
    keys = apply_rotary_pos_emb(keys, keys, *model.model.rotary_emb(values, positions))[1]
    cache = growing_cache(access.adapter(engine).measured.kinds)
    for layer, pair in enumerate(zip(keys, values, strict=True)):
        cache.update(*(part[None, :, ~chosen] for part in pair), layer)
    rows = torch.tensor([*chosen.nonzero()[:, 0], *range(len(chosen), len(ids.all))])
    places = torch.cat([(~chosen).nonzero()[:, 0], rows])
    mask = access.adapter(engine).mask_argument(places[None] <= rows[:, None], rows, places)
    given = torch.tensor(ids.all)[rows][None]
    named = {CACHE_NAME: cache, "position_ids": rows[None], "attention_mask": mask}
    with torch.no_grad():
        return model(given, **named, **arguments)
