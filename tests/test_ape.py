"""APE: chunks that overlap in position, weighed against the rest (law 10 and the formula).

The reference is one ordinary forward pass under the block mask, with explicit positions and the two
sets of columns attended to apart and merged as the paper writes it, in float64.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import access
import pytest
import torch
from laws import (
    QUESTION,
    TEXTS,
    TOLERANCE,
    Recorder,
    error,
    make_engine,
    sequence_logits,
)
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask
from zoo import BY_PLACE, FAMILIES, OWN_ATTENTION, build

from kvcache_rag import Ape, Engine, Reuse
from kvcache_rag.errors import UnsupportedModelError
from kvcache_rag.kv.mask import MaskedSequence, block_mask

if TYPE_CHECKING:
    from kvcache_rag.policies import ReusePolicy
    from kvcache_rag.prompt.renderer import PromptIds

OWN_CODE = [*OWN_ATTENTION, *BY_PLACE]
WEIGHED = [name for name in FAMILIES if name not in OWN_CODE]
REFERENCE = "two_sets_of_columns"


@dataclass
class Columns:
    """What the reference needs to know of a sequence."""

    is_chunk: Tensor  # (n,) bool
    first: int  # row of the query
    policy: Ape


_columns: list[Columns] = []


def _reference_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    columns = _columns[-1]
    repeats = query.shape[1] // key.shape[1]
    key, value = (one.double().repeat_interleave(repeats, 1) for one in (key, value))
    scores = query.double() @ key.transpose(-1, -2) * (scaling or query.shape[-1] ** -0.5)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    is_seen = attention_mask > -1e30

    def attend(which: Tensor, temperature: float, sink: Tensor | None) -> tuple[Tensor, Tensor]:
        """Output of attention to some columns and the log-sum-exp of their scores."""
        kept = (scores / temperature).masked_fill(~(is_seen & which), -torch.inf)
        level = torch.logsumexp(kept, -1, keepdim=True)
        if sink is not None:
            level = torch.logaddexp(level, sink.double()[None, :, None, None])
        shares = torch.exp(kept - level.masked_fill(torch.isneginf(level), 0))
        return shares @ value, level

    everything = torch.ones_like(columns.is_chunk)
    plain, _level = attend(everything, 1.0, s_aux)
    temperature, scale = columns.policy.temperature, columns.policy.scale
    out_c, level_c = attend(columns.is_chunk, temperature, None)
    out_o, level_o = attend(~columns.is_chunk, 1.0, s_aux)
    shares = torch.softmax(torch.cat([scale * temperature * level_c, level_o], -1), -1)
    merged = shares[..., :1] * out_c + shares[..., 1:] * out_o
    is_query = torch.arange(scores.shape[2])[:, None] >= columns.first
    output = torch.where(is_query, merged, plain).to(query.dtype)
    return output.transpose(1, 2).contiguous(), None


@cache
def reference_model(name: str) -> Any:
    """The same weights with the reference's attention, in float64 where the family can."""
    AttentionInterface.register(REFERENCE, _reference_attention)
    AttentionMaskInterface.register(REFERENCE, sdpa_mask)
    # The kernel for groups of experts knows no float64.
    has_experts = "experts" in FAMILIES[name][2]
    model = build(name, dtype=torch.float32 if has_experts else torch.float64)
    model.set_attn_implementation(REFERENCE)
    assert access.attention(model.config) == REFERENCE
    return model


def overlapping(ids: PromptIds, answer: tuple[int, ...] = ()) -> MaskedSequence:
    """The block mask of a prompt whose query stands right behind the longest chunk."""
    sequence = block_mask(ids.prefix, ids.chunks, [*ids.query, *answer], "composite")
    first = len(ids.prefix) + max(map(len, ids.chunks), default=0)
    positions = sequence.positions.clone()
    positions[-sequence.query_tokens :] = torch.arange(first, first + sequence.query_tokens)
    return replace(sequence, positions=positions)


def chunk_columns(ids: PromptIds, sequence: MaskedSequence) -> Tensor:
    """Which columns of the sequence are chunks: neither prefix, nor copies of it, nor query."""
    kinds = [False] * len(ids.prefix)
    for number, chunk in enumerate(ids.chunks):
        kinds += [False] * (len(ids.prefix) if number else 0) + [True] * len(chunk)
    kinds += [False] * sequence.query_tokens
    assert len(kinds) == len(sequence.ids)
    return torch.tensor(kinds)


def reference_logits(
    engine: Engine,
    name: str,
    policy: Ape,
    ids: PromptIds,
    answer: tuple[int, ...] = (),
) -> Tensor:
    """Logits of query and answer from one forward pass."""
    sequence = overlapping(ids, answer)
    mask = access.adapter(engine).mask_argument(sequence.allowed, sequence.indices)
    first = len(sequence.ids) - sequence.query_tokens
    _columns.append(Columns(chunk_columns(ids, sequence), first, policy))
    with torch.no_grad():
        output = reference_model(name)(
            input_ids=sequence.ids[None],
            attention_mask=mask,
            position_ids=sequence.positions[None],
            use_cache=False,
        )
    _columns.pop()
    logits: Tensor = output.logits[0, first:].float()
    return logits


@cache
def engine_of(name: str) -> Engine:
    return make_engine(name)


@pytest.mark.parametrize("name", WEIGHED)
def test_law_10_ape_1_1_is_composite_with_the_query_next_to_the_chunks(name: str) -> None:
    engine = engine_of(name)
    sequence = overlapping(engine.tokenize(QUESTION, TEXTS))
    plain = sequence_logits(engine, sequence)
    found = engine.logits(QUESTION, TEXTS, policy=Ape(1, 1))
    assert error(found, plain) < TOLERANCE
    far = engine.logits(QUESTION, TEXTS, policy=Reuse(positions="composite"))
    assert error(far, plain) > 10 * TOLERANCE, "the query's place must matter"


@pytest.mark.parametrize("name", OWN_CODE)
def test_law_10_models_with_attention_of_their_own_are_refused_by_name(name: str) -> None:
    engine = engine_of(name)
    said = r"counts a token's place .*use Reuse\(\)," if name in BY_PLACE else r"its .*use Reuse\("
    with pytest.raises(UnsupportedModelError, match=rf"^{name.split()[0]}: .*{said}"):
        engine.generate(QUESTION, TEXTS, policy=Ape(1, 1))
    before = engine.generate(QUESTION, TEXTS, max_new_tokens=4)
    assert before.metrics.generated_tokens
    assert engine.generate(QUESTION, [], policy=Ape(), max_new_tokens=2).token_ids


@pytest.mark.parametrize(
    ("name", "policy"),
    [*((name, Ape(0.7, 0.8)) for name in WEIGHED), ("llama", Ape(0.9, 1.3))],
)
def test_temperature_and_scale_are_the_papers_formula(name: str, policy: Ape) -> None:
    engine = engine_of(name)
    ids = engine.tokenize(QUESTION, TEXTS)
    reference = reference_logits(engine, name, policy, ids)
    assert error(engine.logits(QUESTION, TEXTS, policy=policy), reference) < TOLERANCE
    plain = reference_logits(engine, name, Ape(1, 1), ids)
    assert error(plain, reference) > 10 * TOLERANCE, "temperature and scale must matter"


@pytest.mark.parametrize("name", ["qwen2", "mistral window", "gemma2", "gpt_oss", "gemma3n"])
def test_generated_tokens_belong_to_the_rest(name: str) -> None:
    engine, policy = engine_of(name), Ape(0.6, 1.2)
    ids = engine.tokenize(QUESTION, TEXTS)
    answer = engine.generate(QUESTION, TEXTS, policy=policy, max_new_tokens=8)
    expected: tuple[int, ...] = ()
    for _ in answer.token_ids:
        logits = reference_logits(engine, name, policy, ids, expected)
        expected += (int(logits[-1].argmax()),)
    assert answer.token_ids == expected
    assert len(expected) > 2


def test_beams_weigh_the_columns_of_their_own_rows() -> None:
    engine, policy = engine_of("qwen2"), Ape(0.5, 1.4)
    questions = [(QUESTION, TEXTS), ("What is it that they saw there?", TEXTS[:1])]
    settings: dict[str, Any] = {"policy": policy, "num_beams": 3, "max_new_tokens": 6}
    together = Recorder()
    batch = engine.generate_batch(questions, **settings, logits_processor=[together])
    singles = []
    for row, (question, chunks) in enumerate(questions):
        alone = Recorder()
        single = engine.generate(question, chunks, **settings, logits_processor=[alone])
        assert batch[row].token_ids == single.token_ids
        beams = slice(3 * row, 3 * row + 3)
        assert error(together.steps[0][beams], alone.steps[0]) < TOLERANCE
        singles.append(single)
    # A beam's score is the sum of its log-probabilities, which the reference knows.
    ids = engine.tokenize(QUESTION, TEXTS)

    def likelihood(tokens: tuple[int, ...]) -> float:
        logits = reference_logits(engine, "qwen2", policy, ids, tokens[:-1])
        steps = torch.log_softmax(logits[-len(tokens) :], -1)
        return float(steps[range(len(tokens)), list(tokens)].mean())

    greedy = engine.generate(QUESTION, TEXTS, policy=policy, max_new_tokens=6)
    assert likelihood(singles[0].token_ids) >= likelihood(greedy.token_ids) - 1e-6


def test_missing_chunks_are_prefilled_with_plain_attention() -> None:
    fresh = make_engine("qwen2")
    answer = fresh.generate(QUESTION, TEXTS, policy=Ape(0.5, 0.5), max_new_tokens=1)
    assert answer.metrics.misses == len(TEXTS)
    assert answer.metrics.recomputed_tokens == 0
    assert torch.equal(fresh.logits(QUESTION, TEXTS), engine_of("qwen2").logits(QUESTION, TEXTS))
    again = fresh.generate(QUESTION, TEXTS, policy=Ape(0.5, 0.5), max_new_tokens=1)
    assert again.metrics.misses == 0
    assert again.token_ids == answer.token_ids


@pytest.mark.parametrize("name", ["qwen2", "gpt_oss"])
def test_the_models_own_attention_comes_back(name: str) -> None:
    engine = engine_of(name)
    own = access.attention(engine.model.config)
    before = engine.logits(QUESTION, TEXTS)

    def fails(ids: Tensor, scores: Tensor) -> Tensor:
        # "eager" is in no register, so the config says another name meanwhile.
        assert (access.attention(engine.model.config) == own) == (own == "sdpa")
        raise RuntimeError("midway")

    with pytest.raises(RuntimeError, match="midway"):
        engine.generate(QUESTION, TEXTS, policy=Ape(), logits_processor=[fails])
    assert access.attention(engine.model.config) == own
    cancelled = threading.Event()
    cancelled.set()
    engine.generate(QUESTION, TEXTS, policy=Ape(), cancelled=cancelled, max_new_tokens=50)
    with engine.stream(QUESTION, TEXTS, policy=Ape(), max_new_tokens=200) as stream:
        next(iter(stream))
    assert engine.generate(QUESTION, TEXTS, max_new_tokens=2).token_ids
    assert access.attention(engine.model.config) == own
    assert torch.equal(engine.logits(QUESTION, TEXTS), before)


def test_engines_in_several_threads_do_not_mix_their_weights() -> None:
    policies = [Ape(0.5, 1.4), Ape(1, 1), Ape(1.3, 0.6), Reuse(positions="composite")]

    def ask(policy: ReusePolicy) -> tuple[int, ...]:
        answer = engine_of("qwen2").generate(QUESTION, TEXTS, policy=policy, max_new_tokens=8)
        return answer.token_ids

    alone = [ask(policy) for policy in policies]
    with ThreadPoolExecutor(len(policies)) as threads:
        assert list(threads.map(ask, policies * 3)) == alone * 3


def test_one_chunk_at_1_1_is_a_plain_prefill_and_a_window_may_hide_all_chunks() -> None:
    engine = engine_of("mistral window")
    one = engine.logits(QUESTION, TEXTS[:1], policy=Ape(1, 1))
    assert error(one, engine.logits(QUESTION, TEXTS[:1])) < TOLERANCE
    long = "What is the name of the person that was seen there by all of the others on that day?"
    found = engine.logits(long, TEXTS, policy=Ape(0.5, 0.5))
    reference = reference_logits(
        engine, "mistral window", Ape(0.5, 0.5), engine.tokenize(long, TEXTS)
    )
    assert error(found, reference) < TOLERANCE
