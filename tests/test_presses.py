"""What a press keeps is what its paper's formula says, worked out slowly from plain passes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
from laws import TEXTS, kept_of
from torch import Tensor
from zoo import build, byte_tokenizer

from kvcache_rag import Engine, MemoryStore, PromptTemplate
from kvcache_rag.errors import InvalidInputError
from kvcache_rag.kv.chunk import all_ids, kept_ids, kept_places, kept_tokens, with_pruned
from kvcache_rag.models.cache import CACHE_NAME
from kvcache_rag.presses import ExpectedAttention, Knorm, LayerStates, SnapKV

if TYPE_CHECKING:
    from kvcache_rag.presses import Press

SYSTEMS = ["Read this.\n", ""]  # a prefix longer than the sinks, and none


class Plain:
    """One plain pass over prefix and a chunk, all that its layers attend with."""

    def __init__(self, name: str, engine: Engine, text: str) -> None:
        model = build(name)
        model.set_attn_implementation("eager")
        ids = engine.tokenize("Who?", [text])
        self.start, self.tokens = len(ids.prefix), len(ids.chunks[0])
        states: list[Tensor] = []
        hooks = [
            layer.self_attn.register_forward_pre_hook(
                lambda _, __, named: states.append(named["hidden_states"]), with_kwargs=True
            )
            for layer in model.model.layers
        ]
        whole = torch.tensor([[*ids.prefix, *ids.chunks[0]]])
        with torch.no_grad():
            output = model(whole, output_attentions=True, use_cache=True)
        for hook in hooks:
            hook.remove()
        self.model, self.states = model, [state[0] for state in states]  # (seen, hidden) each
        # (heads, seen, seen) each
        self.attention = [one[0] for one in output.attentions]
        self.cache = output[CACHE_NAME].layers

    def queries(self, layer: int) -> Tensor:
        """Not rotated, `(heads, seen, width)`."""
        attention = self.model.model.layers[layer].self_attn
        with torch.no_grad():
            found: Tensor = attention.q_proj(self.states[layer])
        found = found.unflatten(-1, (-1, attention.head_dim))
        if hasattr(attention, "q_norm"):
            with torch.no_grad():
                found = attention.q_norm(found)
        return found.transpose(0, 1)


def knorm(plain: Plain, press: Any) -> list[float]:
    scores = [0.0] * plain.tokens
    for cache in plain.cache:
        for head in cache.keys[0, :, plain.start :]:
            norms = [math.sqrt(sum(float(x) ** 2 for x in key)) for key in head]
            mean = sum(norms) / len(norms)
            scores = [score - norm / mean for score, norm in zip(scores, norms, strict=True)]
    return scores


def snapkv(plain: Plain, press: Any) -> list[float]:
    window = max(1, min(press.window, round(press.keep * plain.tokens) // 2))
    rest, half = plain.tokens - window, press.kernel // 2
    scores = [0.0] * rest
    for attention in plain.attention:
        for head in attention:
            seen = head[-window:, plain.start : -window].mean(0).tolist()
            for token in range(rest):
                near = seen[max(0, token - half) : token + half + 1]
                scores[token] += sum(near) / press.kernel
    return [*scores, *[math.inf] * window]


def expected_attention(plain: Plain, press: Any) -> list[float]:
    sinks, stop = press.sinks, plain.start + plain.tokens
    first = max(0, sinks - plain.start)
    scores = [math.inf] * first + [0.0] * (plain.tokens - first)
    for layer, cache in enumerate(plain.cache):
        queries, keys, values = plain.queries(layer).double(), cache.keys[0], cache.values[0]
        width, repeats = queries.shape[-1], len(queries) // len(keys)
        places = torch.arange(stop, stop + press.future)
        cos, sin = plain.model.model.rotary_emb(queries.float(), places[None])
        cos, sin, half = cos[0].double(), sin[0].double(), width // 2
        turn = torch.zeros(width, width, dtype=torch.double)  # the mean of the rotations' matrices
        for i in range(half):
            turn[i, i] = turn[i + half, i + half] = cos[:, i].mean()
            turn[i, i + half], turn[i + half, i] = -sin[:, i].mean(), sin[:, i].mean()
        for head in range(len(keys)):
            norms = values[head, plain.start + first :].double().norm(dim=-1)
            shares = torch.zeros(plain.tokens - first, dtype=torch.double)
            for query in queries[head * repeats : (head + 1) * repeats]:
                own = query[plain.start + first :]
                mean = turn @ own.mean(0)
                covariance = turn @ torch.cov(own.T, correction=0) @ turn.T
                seen = keys[head, min(sinks, plain.start) + first :].double()
                expected = torch.stack(
                    [key @ mean / width**0.5 + key @ covariance @ key / width / 2 for key in seen]
                )
                shares += expected.softmax(0)[-len(shares) :] / repeats
            found = (shares * norms / norms.mean()).tolist()
            scores[first:] = [a + b for a, b in zip(scores[first:], found, strict=True)]
    return scores


FORMULAS = [
    (Knorm(0.5), knorm),
    (Knorm(0.1), knorm),
    (SnapKV(0.5), snapkv),
    (SnapKV(0.3, window=4, kernel=3), snapkv),
    (ExpectedAttention(0.5), expected_attention),
    (ExpectedAttention(0.2, future=7, sinks=2), expected_attention),
]


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize(("press", "formula"), FORMULAS, ids=[repr(press) for press, _ in FORMULAS])
@pytest.mark.parametrize("name", ["llama", "qwen3", "llama yarn"])
def test_what_is_kept_is_what_the_formula_scores_highest(
    name: str, press: Press, formula: Any, system: str
) -> None:
    template = PromptTemplate(system=system, chunk_start="<d>", chunk_end="</d>")
    engine = Engine(
        build(name), byte_tokenizer(), template=template, store=MemoryStore(), press=press
    )
    for text, found in zip(TEXTS, kept_of(engine, TEXTS), strict=True):
        scores = formula(Plain(name, engine, text), press)
        ranked = sorted(range(len(scores)), key=lambda place: -scores[place])
        assert found == sorted(ranked[: len(found)])


def test_batches_and_singles_keep_the_same_tokens() -> None:
    for press in (Knorm(0.5), SnapKV(0.5), ExpectedAttention(0.5)):
        batch, single = (
            Engine(build("qwen2"), byte_tokenizer(), store=MemoryStore(), press=press)
            for _ in range(2)
        )
        for text in TEXTS:
            single.add([text])
        assert kept_of(batch, TEXTS) == kept_of(single, TEXTS)


def test_marks_are_read_back() -> None:
    ids, places = torch.tensor([5, 0, 7, 9, 0], dtype=torch.int32), torch.tensor([1, 3])
    tokens = with_pruned(ids, places)
    assert tokens.tolist() == [~5, 0, ~7, 9, ~0]
    assert (all_ids(tokens).tolist(), kept_ids(tokens).tolist()) == (ids.tolist(), [0, 9])
    assert kept_places(tokens).tolist() == places.tolist()
    assert tokens.dtype == all_ids(tokens).dtype == torch.int32


@pytest.mark.parametrize(
    ("tokens", "keep", "kept"),
    [(10, 1.0, 10), (10, 0.5, 5), (10, 0.01, 1), (1, 0.1, 1), (0, 1.0, 0), (3, 0.99, 3)],
)
def test_a_share_keeps_one_token_at_least(tokens: int, keep: float, kept: int) -> None:
    assert kept_tokens(tokens, keep) == kept


def test_of_equal_scores_the_first_are_kept() -> None:
    assert Knorm(0.5).kept(torch.tensor([1.0, 2.0, 1.0, 1.0])).tolist() == [0, 1]


@pytest.mark.parametrize("press", [Knorm(0.5), SnapKV(0.5), ExpectedAttention(0.5)])
def test_a_chunk_of_one_token_is_kept(press: Press) -> None:
    keys, queries = torch.randn(2, 1, 8), torch.randn(4, 1, 8)
    layer = LayerStates(keys, keys, 1, queries)
    assert press.kept(press.scores(layer).sum(0)).tolist() == [0]


@pytest.mark.parametrize(
    "settings", [{"window": 0}, {"kernel": 4}, {"kernel": 0}, {"window": -1}], ids=repr
)
def test_settings_of_snapkv_that_are_none_are_refused(settings: dict[str, int]) -> None:
    with pytest.raises(InvalidInputError, match="window is a number"):
        SnapKV(0.5, **settings)


@pytest.mark.parametrize("settings", [{"future": 0}, {"sinks": -1}], ids=repr)
def test_settings_of_expected_attention_that_are_none_are_refused(settings: dict[str, int]) -> None:
    with pytest.raises(InvalidInputError, match="future is a number"):
        ExpectedAttention(0.5, **settings)
