"""ProphetKV: the tokens that the question attends to most are computed again.

The reference of the choice is one ordinary forward pass of the model's own eager code under the
block mask, which gives its weights; that of the answer is the law of recomputing these tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

import access
import pytest
import torch
from alibi import told_positions
from laws import (
    LONG_QUESTION,
    QUESTION,
    TEMPLATE,
    TEXTS,
    TOLERANCE,
    TURNS,
    Recorder,
    behind_system,
    by_place,
    error,
    looking,
    make_engine,
    over_stored,
    refused,
    sequence_logits,
)
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.models.gptj import modeling_gptj
from zoo import FAMILIES, OWN_ATTENTION, build, byte_tokenizer

from kvcache_rag import (
    CacheBlend,
    DiskStore,
    Engine,
    MemoryStore,
    Message,
    ProphetKV,
    Reuse,
)
from kvcache_rag.codecs import Int8
from kvcache_rag.errors import UnsupportedModelError
from kvcache_rag.kv.mask import PositionScheme, block_mask, recompute_mask
from kvcache_rag.models.attention import scaled
from kvcache_rag.models.attention.observed import observed_attention
from kvcache_rag.policies.selection import candidates, share, top
from kvcache_rag.stitching.stitch import StitchedPrompt

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kvcache_rag.policies.base import Signals

SCHEMES: tuple[PositionScheme, ...] = ("reordered", "composite")
RATIO = 0.3
# A window, sinks, MLA, one KV head for all, code of its own, ALiBi.
SOME = ["llama", "mistral window", "gpt_oss", "deepseek_v3", "falcon", "gptj", "bloom"]


@pytest.fixture(scope="module", params=list(FAMILIES))
def named(request: pytest.FixtureRequest) -> tuple[str, Engine]:
    return request.param, make_engine(request.param)


def shape_of(
    engine: Engine, texts: list[str], question: str = QUESTION, history: Sequence[Message] = ()
) -> StitchedPrompt:
    ids = engine.tokenize(question, texts, history)
    return StitchedPrompt.from_sizes(len(ids.prefix), list(map(len, ids.chunks)), len(ids.query))


def attention_of(
    engine: Engine, texts: list[str], scheme: PositionScheme, question: str = QUESTION
) -> Tensor:
    """What the engine says that the question attends to, `(context_tokens,)`."""
    seen: list[Tensor] = []
    policy = looking(lambda signals: seen.append(signals.attention()), scheme)
    engine.logits(question, texts, policy=policy)
    return seen[-1]


@cache
def eager_model(name: str) -> Any:
    """The same weights, attending by the family's own eager code."""
    model = build(name)
    if model._can_set_attn_implementation():
        model.set_attn_implementation("eager")
    if name == "falcon alibi":
        # Its eager code adds the bias to a mask that has it already.
        for block in model.transformer.h:
            block.self_attention.register_forward_pre_hook(_without_bias, with_kwargs=True)
    return model


def _without_bias(_: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    return args, {**kwargs, "alibi": torch.zeros_like(kwargs["alibi"])}


def eager_attention(
    name: str,
    engine: Engine,
    texts: list[str],
    scheme: PositionScheme,
    question: str = QUESTION,
    history: Sequence[Message] = (),
) -> Tensor:
    """Weights of the query's rows, summed over layers and heads, `(query, context_tokens)`."""
    ids = engine.tokenize(question, texts, history)
    sequence = block_mask(ids.prefix, ids.chunks, ids.query, scheme)
    model, arguments = eager_model(name), {"output_attentions": True, "use_cache": False}
    with torch.no_grad():
        if by_place(engine):
            ones = torch.ones_like(sequence.ids[None])
            with told_positions(model, sequence.positions, sequence.allowed):
                output = model(sequence.ids[None], attention_mask=ones, **arguments)
        else:
            mask = access.adapter(engine).mask_argument(sequence.allowed, sequence.indices)
            positions = sequence.positions[None]
            output = model(
                sequence.ids[None], attention_mask=mask, position_ids=positions, **arguments
            )
    tokens, query = len(sequence.ids), sequence.query_tokens
    layers = [layer.float() for layer in output.attentions]
    assert len(layers) == len(access.adapter(engine).measured.kinds)
    assert all(layer.shape[0] == 1 and layer.shape[-2:] == (tokens, tokens) for layer in layers)
    summed = torch.stack([layer[0].sum(0) for layer in layers]).sum(0)[-query:]
    # The columns that the query sees: one per place of the prompt.
    seen = sequence.allowed[-1].nonzero()[:, 0]
    return summed[:, seen[:-query]]


def assert_most_attended(
    chosen: Tensor, eager: Tensor, prompt: StitchedPrompt, ratio: float = RATIO
) -> None:
    """The choice is that of eager attention, but for what it finds equally important."""
    count, allowed = share(ratio, prompt), candidates(prompt)
    assert int(chosen.sum()) == count
    least = float(eager[allowed].topk(count).values[-1])
    differing = chosen ^ top(eager, count, allowed)
    assert bool(((eager[differing] - least).abs() < 1e-3 * float(eager.max())).all())


@pytest.mark.parametrize("scheme", SCHEMES)
def test_law_the_attention_is_that_of_eager_code(named: tuple[str, Engine], scheme: Any) -> None:
    name, engine = named
    if refused(engine, ProphetKV(RATIO, scheme)):
        return
    expected = eager_attention(name, engine, TEXTS, scheme)
    found = attention_of(engine, TEXTS, scheme)
    assert (found.dtype, found.device.type) == (torch.float32, "cpu")
    assert found.shape == (shape_of(engine, TEXTS).context_tokens,)
    scale = float(expected.sum(0).max())
    torch.testing.assert_close(found, expected.sum(0), rtol=1e-3, atol=1e-4 * scale)
    # The law can fail: every token of the question counts, and so does which question it is.
    assert float((found - expected[-1] * len(expected)).abs().max()) > 1e-2 * scale
    other = attention_of(engine, TEXTS, scheme, "Why?")
    assert other.shape == found.shape
    assert float((found - other).abs().max()) > 1e-2 * scale


@dataclass(frozen=True)
class Recorded(ProphetKV):
    """Keeps what it chose."""

    picked: list[Tensor] = field(default_factory=list, compare=False, repr=False)

    def select(self, prompt: StitchedPrompt, signals: Signals) -> Tensor:
        self.picked.append(super().select(prompt, signals))
        return self.picked[-1]


def test_chunks_are_shared_in_a_batch_where_no_question_was_heard() -> None:
    engine = make_engine("llama")
    engine.add(TEXTS)
    asked = [(QUESTION, TEXTS), (LONG_QUESTION, TEXTS)]
    for one, choices in ((CacheBlend(0.1), 1), (ProphetKV(0.1), 2)):
        rows = engine.generate_batch(asked, policy=one, max_new_tokens=1)
        assert sum(row.metrics.choose > 0 for row in rows) == choices


@pytest.mark.parametrize(
    ("system", "scheme"),
    [
        ("no prefix", "reordered"),
        ("no prefix", "composite"),
        ("a short one", "composite"),
        ("a long one", "reordered"),
        ("a long one", "composite"),
    ],
)
@pytest.mark.parametrize("name", SOME)
def test_law_behind_any_prefix_the_choice_is_that_of_question_and_turns(
    name: str, system: str, scheme: Any
) -> None:
    """As eager attention has it, single, streamed and in a batch; so are the logits."""
    engine, policy = behind_system(name, system), Recorded(0.1, scheme)  # fewer than a window has
    if refused(engine, policy):
        return
    asked = [(QUESTION, TEXTS, TURNS), (LONG_QUESTION, TEXTS, ()), ("x", TEXTS[1:], TURNS[:1])]
    engine.add(TEXTS)  # so that a batch could share what was chosen over the same chunks
    options: dict[str, Any] = {"policy": policy, "max_new_tokens": 1}
    together = Recorder()
    engine.generate_batch(asked, **options, logits_processor=[together])
    for row, (question, texts, turns) in enumerate(asked):
        alone, piecewise = Recorder(), Recorder()
        options |= {"history": turns}
        engine.generate(question, texts, **options, logits_processor=[alone])
        list(engine.stream(question, texts, **options, logits_processor=[piecewise]))
        prompt, chosen = shape_of(engine, texts, question, turns), policy.picked[row]
        eager = eager_attention(name, engine, texts, scheme, question, turns).sum(0)
        assert_most_attended(chosen, eager, prompt, policy.ratio)
        assert all(torch.equal(chosen, again) for again in policy.picked[-2:])
        ids = engine.tokenize(question, texts, turns)
        sequence = recompute_mask(ids.prefix, ids.chunks, ids.query, chosen, scheme)
        expected = sequence_logits(engine, sequence)[-1]
        for seen, place in ((alone, 0), (piecewise, 0), (together, row)):
            assert error(seen.steps[0][place], expected) < TOLERANCE
    # The law can fail: what was said before changes what is chosen.
    prompt, other = shape_of(engine, TEXTS), eager_attention(name, engine, TEXTS, scheme).sum(0)
    with pytest.raises(AssertionError):
        assert_most_attended(policy.picked[0], other, prompt, policy.ratio)


@pytest.mark.parametrize("name", ["mistral window", "gemma2"])
def test_tokens_outside_of_every_window_get_what_full_layers_give(name: str) -> None:
    engine = make_engine(name)
    found = attention_of(engine, TEXTS, "reordered", LONG_QUESTION * 2)
    assert bool((found[: len(found) // 4] == 0).all()) == (name == "mistral window")
    assert float(found[-1]) > 0


def test_a_query_of_a_single_token_and_a_single_chunk() -> None:
    engine = make_engine("llama")
    assert attention_of(engine, TEXTS[:1], "reordered").shape[0]
    one = engine.logits(QUESTION, TEXTS[:1], policy=ProphetKV(0.5))
    assert torch.equal(one, engine.logits(QUESTION, TEXTS[:1])), "the first chunk is exact already"
    assert engine.generate("x", [], policy=ProphetKV(), max_new_tokens=2).token_ids


def test_long_questions_are_looked_at_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("gemma2", "falcon"):
        engine = make_engine(name)
        whole = attention_of(engine, TEXTS, "reordered", LONG_QUESTION)
        with monkeypatch.context() as patched:
            patched.setattr(scaled, "MAX_SCORES", 4 * 3 * shape_of(engine, TEXTS).tokens)
            pieces = attention_of(engine, TEXTS, "reordered", LONG_QUESTION)
        torch.testing.assert_close(pieces, whole)


@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "falcon"])
def test_in_bfloat16_it_is_nearly_the_same(name: str) -> None:
    exact = attention_of(make_engine(name), TEXTS, "reordered")
    model = build(name, dtype=torch.bfloat16)
    engine = Engine(model, byte_tokenizer(), template=TEMPLATE, store=MemoryStore())
    found = attention_of(engine, TEXTS, "reordered")
    assert found.dtype == torch.float32
    assert float((found - exact).abs().mean() / exact.mean()) < 0.2
    assert engine.generate(QUESTION, TEXTS, policy=ProphetKV(), max_new_tokens=2).token_ids


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", ["llama", "qwen2", "mistral window"])
def test_law_of_chunks_in_8_bits_the_choice_is_that_over_what_is_stored(
    name: str, scheme: Any, tmp_path: Path
) -> None:
    def opened() -> Engine:
        store = DiskStore(tmp_path, codec=Int8())
        return Engine(build(name), byte_tokenizer(), template=TEMPLATE, store=store)

    opened().add(TEXTS)  # by another engine, as who computes the prefix has it exact
    engine, policy = opened(), Recorded(RATIO, scheme)
    found, prompt = engine.logits(QUESTION, TEXTS, policy=policy), shape_of(engine, TEXTS)

    def stored(selected: Tensor, **arguments: Any) -> Any:
        return over_stored(engine, eager_model(name), TEXTS, selected, scheme, **arguments)

    none = torch.zeros(prompt.context_tokens, dtype=torch.bool)
    layers = stored(none, output_attentions=True).attentions  # each (1, heads, query, tokens)
    eager = torch.stack([layer[0].sum((0, 1)) for layer in layers]).sum(0)
    attended = attention_of(engine, TEXTS, scheme)
    scale = float(eager.max())
    torch.testing.assert_close(attended, eager[: len(none)], rtol=1e-3, atol=1e-4 * scale)
    assert_most_attended(policy.picked[0], eager[: len(none)], prompt)
    expected = stored(policy.picked[0]).logits[0, -len(found) :]
    assert error(found, expected) < TOLERANCE
    # The law can fail: what is stored is not what was computed.
    exact = attention_of(make_engine(name), TEXTS, scheme)
    assert float((attended - exact).abs().max()) > 1e-3 * scale
    assert error(stored(none).logits[0, -len(found) :], expected) > 10 * TOLERANCE


def test_an_answer_that_is_read_behind_the_question_has_no_say() -> None:
    engine, policy = make_engine("llama"), Recorded(0.2)
    engine.logits(QUESTION, TEXTS, policy=policy)
    engine.logits(QUESTION, TEXTS, policy=policy, answer_ids=engine.tokenize("x y z", []).query)
    assert torch.equal(*policy.picked)


# ---------------------------------------------------------------------- what is kept of them
class Memory(TorchDispatchMode):
    """What is allocated within, by operations of torch.

    Attributes:
        largest: Most elements of one tensor.
        peak: Most bytes that were alive at once since the last layer was counted.
        peaks: The same up to each layer that was counted.
        remaining: Bytes that were alive at the end.
    """

    def __init__(self) -> None:
        super().__init__()
        self.largest = self.peak = self.remaining = 0
        self.peaks: list[int] = []
        self._held: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        given = {one.untyped_storage()._cdata for one in _tensors((args, kwargs))}
        for made in _tensors(output):
            memory = made.untyped_storage()
            if memory._cdata not in given:  # neither a view nor written in place
                self.largest = max(self.largest, memory.nbytes() // made.itemsize)
                # While it is referred to, its address is given to nothing else.
                self._held[memory._cdata] = StorageWeakRef(memory), memory.nbytes()
        self.peak = max(self.peak, self.left())
        return output

    def left(self) -> int:
        """Bytes that are alive now."""
        self._held = {at: held for at, held in self._held.items() if not held[0].expired()}
        return sum(nbytes for _, nbytes in self._held.values())

    def layer_ends(self) -> None:
        self.peaks.append(self.peak)
        self.peak = 0


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def measured(name: str) -> tuple[Memory, int, int]:
    """A look of a long question at a longer context; its rows times columns, and the heads.

    No other tensor of a pass has as many elements per token as the question has tokens.
    """
    engine, memory = make_engine(name), Memory()
    asked, texts = "What is it? " * 16, [text * 4 for text in TEXTS]
    layer_ends = scaled.AttentionMass.layer_ends

    def noted(mass: scaled.AttentionMass) -> None:
        memory.layer_ends()
        layer_ends(mass)

    def look(signals: Signals) -> None:
        with pytest.MonkeyPatch.context() as patched, memory:
            patched.setattr(scaled.AttentionMass, "layer_ends", noted)
            found = signals.attention()
        memory.remaining = memory.left()
        assert found.any()

    attention_of(engine, texts, "reordered", asked)  # what is measured once is known
    engine.logits(asked, texts, policy=looking(look))
    prompt = shape_of(engine, texts, asked)
    pairs = (prompt.tokens - prompt.context_tokens) * prompt.tokens
    return memory, pairs, engine.model.config.num_attention_heads


@pytest.mark.parametrize("name", ["llama", "mistral window", "falcon", "gptj"])
def test_of_a_layers_attention_its_sum_over_the_question_is_kept(name: str) -> None:
    """Whatever computes it: neither scores nor weights are kept, nor their sums over heads."""
    memory, pairs, heads = measured(name)
    layers, per_pair = memory.peaks, pairs * 4  # bytes of a float32 for each
    assert len(layers) == 4
    assert layers[0] > heads * per_pair, "one layer's is seen"
    # The first one ends without what the code of a model holds of the layer before.
    assert layers[-1] - layers[1] < per_pair
    assert memory.remaining < per_pair // 16, "one number per column is left"


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "falcon"])
def test_scores_are_taken_in_pieces(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where our function attends, or works out torch's weights: not even one layer's at once."""
    whole, pairs, heads = measured(name)
    assert whole.largest == heads * pairs, "few enough for one piece"
    monkeypatch.setattr(scaled, "MAX_SCORES", heads * pairs // 8)
    pieces, _, _ = measured(name)
    assert pieces.largest <= pairs, "a mask, which is for all heads"


@pytest.mark.skipif("gptj" not in OWN_ATTENTION, reason="gptj attends as the others")
def test_attention_that_cannot_be_seen_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def hidden(_: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Any:
        scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5 + mask
        weights = torch.exp(scores - torch.logsumexp(scores, -1, keepdim=True))
        return weights @ value, weights

    engine = make_engine("gptj")
    expected = engine.logits(QUESTION, TEXTS)
    monkeypatch.setattr(modeling_gptj.GPTJAttention, "_attn", hidden)
    with pytest.raises(UnsupportedModelError, match=r"^gptj: .*; use CacheBlend\(\) .*\)$") as told:
        engine.generate(QUESTION, TEXTS, policy=ProphetKV())
    assert ". " not in str(told.value)
    assert error(engine.logits(QUESTION, TEXTS, policy=Reuse()), expected) < TOLERANCE


@pytest.mark.parametrize("name", ["qwen2", "falcon"])
def test_the_models_own_attention_comes_back_after_an_error(name: str) -> None:
    engine = make_engine(name)
    before, own = engine.logits(QUESTION, TEXTS), access.attention(engine.model.config)

    def fails() -> None:
        with observed_attention(access.adapter(engine), 8):
            raise RuntimeError("midway")

    with pytest.raises(RuntimeError, match="midway"):
        fails()
    assert access.attention(engine.model.config) == own
    assert scaled.IN_FORCE.get() is None
    assert torch.equal(engine.logits(QUESTION, TEXTS), before)
