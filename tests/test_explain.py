"""`Engine.explain` says what `generate` does, token by token, and does no more than that."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import access
import pytest
import tokenizers_zoo
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from laws import QUESTION, TEMPLATE, TEXTS, make_engine
from small import make_model, make_tokenizer
from verdicts import REUSE, make_verdict
from zoo import build, byte_tokenizer

from kvcache_rag import (
    Ape,
    CacheBlend,
    CacheClip,
    Combination,
    Engine,
    FullRecompute,
    InvalidInputError,
    LegoLink,
    Reuse,
)
from kvcache_rag.generation import buffered
from kvcache_rag.stitching.stitch import placed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from kvcache_rag.generation.explain import Explained
    from kvcache_rag.metrics import Metrics
    from kvcache_rag.policies import ReusePolicy

COUNTS = ("prefix", "reused", "recomputed", "prefilled", "query")
HISTORY = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]


class Scorer:
    """Likes the letter z."""

    def scores(self, question: str, chunks: Sequence[str]) -> list[Tensor]:
        return [torch.tensor([float(letter in "az") for letter in text]) for text in chunks]


POLICIES: dict[str, ReusePolicy] = {
    "reuse": Reuse(),
    "composite": Reuse(positions="composite"),
    "full": FullRecompute(),
    "legolink": LegoLink(5),
    "cacheblend": CacheBlend(0.3),
    "cacheclip": CacheClip(Scorer(), ratio=0.3),
    "ape": Ape(),
    "combination": Combination(),
}


@pytest.fixture(params=POLICIES)
def policy(request: pytest.FixtureRequest) -> ReusePolicy:
    return POLICIES[request.param]


def counts(found: Explained | Metrics) -> dict[str, Any]:
    told = {name: getattr(found, f"{name}_tokens") for name in COUNTS}
    return {**told, "policy": found.policy, "gate": found.gate}


def states(found: Explained, state: str) -> list[int]:
    return [place for place, token in enumerate(found.tokens) if token.state == state]


# ---------------------------------------------------------------------- the law
@pytest.mark.parametrize(
    ("held", "rotation"),
    [(0, "copied"), (2, "copied"), (3, "copied"), (2, "deferred")],
    ids=["cold", "partly", "warm", "deferred"],
)
def test_law_the_counts_are_those_of_the_answer(
    policy: ReusePolicy, held: int, rotation: Any
) -> None:
    asked, answering = (make_engine("llama", rotation=rotation) for _ in range(2))
    for engine in (asked, answering):
        engine.add(TEXTS[:held])
        if held == len(TEXTS):
            engine.add_combination([TEXTS])
    options: dict[str, Any] = {"policy": policy, "history": HISTORY}
    found = asked.explain(QUESTION, TEXTS, **options)
    answer = answering.generate(QUESTION, TEXTS, **options, max_new_tokens=2)
    assert counts(found) == counts(answer.metrics)
    assert len(states(found, "recomputed")) == answer.metrics.recomputed_tokens
    hits = [span.tier for span in found.spans if span.tier]
    joint = 1 if policy.joint and hits else len(hits)
    assert joint == sum(answer.metrics.hits.values())
    again = asked.generate(QUESTION, TEXTS, **options, max_new_tokens=2)
    assert again.token_ids == answer.token_ids, "explaining left something behind"


def test_law_the_recomputed_tokens_are_those_that_generate_computes(
    policy: ReusePolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine("qwen2 window")
    engine.add(TEXTS)
    chosen: list[int] = []
    real = buffered.recompute

    def recompute(row: Any, selected: Tensor) -> None:
        chosen.extend(selected.nonzero()[:, 0].tolist())
        real(row, selected)

    found = engine.explain(QUESTION, TEXTS, policy=policy)
    monkeypatch.setattr(buffered, "recompute", recompute)
    engine.generate(QUESTION, TEXTS, policy=policy, max_new_tokens=1)
    assert states(found, "recomputed") == chosen
    assert bool(chosen) != (policy.is_reuse or policy.is_full)


@pytest.mark.parametrize("name", ["reuse", "full", "combination", "composite", "ape"])
def test_nothing_is_computed_where_no_token_is_chosen(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine("llama")
    monkeypatch.setattr(engine.model, "forward", None)
    found = engine.explain(QUESTION, TEXTS, policy=POLICIES[name])
    assert found.prefilled_tokens == sum(map(len, engine.tokenize(QUESTION, TEXTS).chunks))
    assert not any(engine.store.contains(key) for key in engine.keys(TEXTS))


def test_what_a_choice_needs_is_stored_as_generate_would() -> None:
    engine = make_engine("llama")
    first = engine.explain(QUESTION, TEXTS, policy=CacheBlend(0.3))
    assert all(engine.store.contains(key) for key in engine.keys(TEXTS))
    assert first.reused_tokens == 0
    second = engine.explain(QUESTION, TEXTS, policy=CacheBlend(0.3))
    assert second.prefilled_tokens == 0
    assert states(second, "recomputed") == states(first, "recomputed")


# ---------------------------------------------------------------------- tokens and their texts
TOKENIZERS = {
    "bytes": byte_tokenizer,
    "byte level": tokenizers_zoo.byte_level,
    "metaspace": tokenizers_zoo.metaspace,
    "word pieces": tokenizers_zoo.word_pieces,
    "characters": tokenizers_zoo.characters,
    "no offsets": lambda: tokenizers_zoo.WithoutOffsets(tokenizers_zoo.byte_level()),
}
SPOKEN = [
    "Straße, naïve café: 12 °C.\n\n\tindented   spaces",
    "東京 は 日本 の 首都 です。 👩‍🚀 <script>alert('Привет')</script>",
]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_texts_of_the_tokens_join_to_the_prompt(name: str) -> None:
    tokenizer = TOKENIZERS[name]()
    model = make_model() if name != "bytes" else build("llama")
    engine = Engine(model, tokenizer, template=TEMPLATE)
    ids = engine.tokenize("Où, 東?", SPOKEN, HISTORY)
    found = engine.explain("Où, 東?", SPOKEN, policy=FullRecompute(), history=HISTORY)
    assert [token.id for token in found.tokens] == list(ids.all)
    query = access.runner(engine).renderer.query_text("Où, 東?", HISTORY)
    assert found.text == engine.prefix_text + "".join(map(TEMPLATE.wrap, SPOKEN)) + query
    for span, text in zip(found.spans[1:-1], SPOKEN, strict=True):
        written = "".join(token.text for token in found.tokens[span.start : span.stop])
        assert written == TEMPLATE.wrap(text)


WORDS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40)


@settings(max_examples=60, deadline=None)
@given(question=WORDS.filter(str.strip), text=WORDS.filter(str.strip))
@pytest.mark.parametrize("name", ["byte level", "reader"])
def test_whatever_is_written_is_shown(name: str, question: str, text: str) -> None:
    engine = engine_of(name)
    template = engine.template
    found = engine.explain(question, [text], policy=FullRecompute())
    query = access.runner(engine).renderer.query_text(template.ask(question))
    assert found.text == engine.prefix_text + template.wrap(text) + query


@lru_cache
def engine_of(name: str) -> Engine:
    if name == "reader":
        return Engine.from_pretrained("tiny")
    return Engine(make_model(), tokenizers_zoo.byte_level(), template=TEMPLATE)


def test_bytes_of_a_character_are_told_with_its_last_byte() -> None:
    engine = Engine(build("llama"), byte_tokenizer(), template=TEMPLATE)
    found = engine.explain("Who?", ["a東b"], policy=FullRecompute())
    (chunk,) = (span for span in found.spans if span.kind == "chunk")
    pieces = [token.text for token in found.tokens[chunk.start : chunk.stop]]
    assert pieces == [*"<d>", "a", "", "", "東", "b", *"</d>"]


def test_a_token_put_there_by_habit_has_no_text() -> None:
    engine = Engine(make_model(), make_tokenizer(), template=TEMPLATE)
    found = engine.explain("Who?", ["abc"], policy=Reuse())
    assert (found.tokens[0].id, found.tokens[0].text) == (1, "")
    assert found.tokens[1].text == TEMPLATE.system[0]


def test_spans_are_prefix_chunks_and_query() -> None:
    engine = make_engine("llama")
    ids = engine.tokenize(QUESTION, TEXTS)
    engine.add(TEXTS[1:2])
    found = engine.explain(QUESTION, TEXTS, policy=Reuse())
    assert [span.kind for span in found.spans] == ["prefix", "chunk", "chunk", "chunk", "query"]
    sizes = [len(ids.prefix), *map(len, ids.chunks), len(ids.query)]
    assert [span.stop - span.start for span in found.spans] == sizes
    assert [span.tier for span in found.spans] == ["", "", "memory", "", ""]
    assert {token.state for token in found.tokens[found.spans[-1].start :]} == {"computed"}


def test_positions_are_where_keys_stand(policy: ReusePolicy) -> None:
    engine = make_engine("llama")
    layout = access.chunk_layout(engine)
    prefix = engine._bound.capturing.prefix()
    assert prefix is not None
    parts = [prefix, *(engine.store.get(key, layout).chunk for key in engine.add(TEXTS))]
    found = engine.explain(QUESTION, TEXTS, policy=policy)
    again = states(found, "recomputed") + states(found, "computed")
    segments = placed(parts, policy.positions, adjacent=policy.adjacent_query)
    for span, segment in zip(found.spans[:-1], segments, strict=True):
        for step, at in enumerate(range(span.start, span.stop)):
            place = segment.position + step
            assert found.tokens[at].position == (at if at in again else place)
    query = found.spans[-1]
    places = [token.position for token in found.tokens[query.start :]]
    assert places == [*range(query.start, query.stop)]


# ---------------------------------------------------------------------- gate, lock, mistakes
def test_the_policy_that_the_gate_lets_answer() -> None:
    verdict = make_verdict(make_engine("llama").identity, {REUSE: 0.5})
    engine = make_engine("llama", gate=verdict)
    found = engine.explain(QUESTION, TEXTS)
    assert found.policy == repr(FullRecompute())
    assert "below 95 %" in found.gate
    assert counts(found) == counts(engine.generate(QUESTION, TEXTS, max_new_tokens=1).metrics)
    assert {token.state for token in found.tokens} == {"computed"}


def test_the_engines_own_policy_and_scorer_are_the_default() -> None:
    engine = make_engine("llama", policy=CacheClip(ratio=0.3), auxiliary=Scorer())
    assert engine.explain(QUESTION, TEXTS).recomputed_tokens > 0
    with pytest.raises(InvalidInputError, match="auxiliary"):
        make_engine("llama").explain(QUESTION, TEXTS, policy=CacheClip())
