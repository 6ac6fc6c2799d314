"""A model whose chunks cannot be stitched: what it cannot do is told once, and a full prefill done.

One chunk is reused where it was prefilled, which is all that `BestFew` asks of a model.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from serve_fakes import MODEL, chat, client, settings
from zoo import REFUSED, build, byte_tokenizer

from kvcache_rag import (
    Answer,
    BestFew,
    BestLast,
    Engine,
    FullRecompute,
    MemoryStore,
    PromptTemplate,
    Reuse,
)
from kvcache_rag.errors import UnsupportedModelError
from kvcache_rag.integration import RowPrefiller
from kvcache_rag.models.adapters import note_training
from kvcache_rag.policies.relevance import Retrieved
from kvcache_rag_server.app import build_app
from kvcache_rag_server.local import LocalBackend

TEXTS = ["The cat sat on the mat.", "A dog ran away from home."]
MORE = ["No word of it.", *TEXTS, "Nor here."]
QUESTION = "Who sat?"
IMMOVABLE = [name for name in ("gpt2", "opt", "hunyuan") if name in REFUSED]
KEEPING_NOTHING = [name for name in REFUSED if name not in IMMOVABLE]
SAID = "it answers by full prefill, as with policy=FullRecompute"


def make_engine(name: str, *, trained: bool = False, **options: Any) -> Engine:
    model = build(name)
    note_training(model.config, blocks=trained)
    template = PromptTemplate(system="Read.\n")
    return Engine(model, byte_tokenizer(), template=template, **options)


def best_of(texts: list[str]) -> list[str]:
    """What the default answers from."""
    return [texts[index] for index in BestFew().plan(Retrieved(QUESTION, tuple(texts))).order]


async def answers_alike(
    engine: Engine, texts: list[str], full: Answer, first: list[str]
) -> list[Answer]:
    """Not a word, as warnings are errors here: in whichever way it is asked, it is the same answer.

    Args:
        full: By a full prefill.
        first: What a batch asks beside it, answered by a full prefill too.
    """
    assert "".join(engine.stream(QUESTION, texts, max_new_tokens=4)) == full.text
    assert (await engine.agenerate(QUESTION, texts, max_new_tokens=4)).text == full.text
    batch = engine.generate_batch([(QUESTION, texts), (QUESTION, first)], max_new_tokens=4)
    alone = engine.generate(QUESTION, first, policy=FullRecompute(), max_new_tokens=4)
    if engine.model.config.model_type != "rwkv":  # whose batches are not what their rows are alone
        assert [one.token_ids for one in batch] == [full.token_ids, alone.token_ids]
    tenant = engine.in_namespace("other").generate(QUESTION, texts, max_new_tokens=4)
    assert tenant.token_ids == full.token_ids
    return [*batch, tenant]


@pytest.mark.parametrize("name", IMMOVABLE)
async def test_the_best_few_need_not_move(name: str) -> None:
    """Law: they are answered from as by a full prefill of them, the first out of the store."""
    engine, few = make_engine(name), best_of(MORE)
    assert REFUSED[name][2] in engine.refusal
    assert (engine.policy, engine.why_useless) == (BestFew(), "")
    assert few[0] == TEXTS[0]
    full = engine.generate(QUESTION, few, policy=FullRecompute(), max_new_tokens=4)
    keys = engine.add(MORE)
    answer = engine.generate(QUESTION, MORE, max_new_tokens=4)
    assert answer.token_ids == full.token_ids
    assert answer.metrics.reused_tokens == keys[1].tokens
    assert answer.metrics.prefilled_tokens == answer.metrics.misses == 0
    assert engine.needed(MORE, engine.policy, question=QUESTION) == keys[1:2]
    *others, tenant = await answers_alike(engine, MORE, full, few[:1])
    assert {one.metrics.policy for one in (answer, *others, tenant)} == {repr(BestFew())}
    assert tenant.metrics.misses == 1
    explained = engine.explain(QUESTION, MORE)
    assert {token.state for token in explained.tokens[: explained.spans[2].start]} == {"reused"}
    # What moves chunks is refused as before, and says what works.
    with pytest.raises(UnsupportedModelError, match=r"FullRecompute\(\)"):
        engine.generate(QUESTION, MORE, policy=BestLast(0.2), max_new_tokens=1)


@pytest.mark.parametrize(
    ("name", "trained"),
    [*((name, True) for name in REFUSED), *((name, False) for name in KEEPING_NOTHING)],
)
async def test_it_answers_by_full_prefill_and_says_so_once(name: str, trained: bool) -> None:
    """By that of all chunks in place of plain reuse, else of the best few."""
    engine = make_engine(name, trained=trained)
    texts, read = (TEXTS, TEXTS) if trained else (MORE, best_of(MORE))
    assert REFUSED[name][2] in engine.refusal
    assert engine.why_useless == engine.refusal
    full = engine.generate(QUESTION, read, policy=FullRecompute(), max_new_tokens=4)
    with pytest.warns(UserWarning, match=SAID) as said:
        answer = engine.generate(QUESTION, texts, max_new_tokens=4)
    assert len(said) == 1
    assert REFUSED[name][2] in str(said[0].message)
    assert answer.token_ids == full.token_ids
    assert answer.metrics.policy == repr(FullRecompute())
    assert answer.metrics.unused_chunks == len(texts) - len(read)
    assert [texts[index] for index in answer.metrics.answered_from] == read
    assert answer.metrics.reused_tokens == engine.store.stats().puts == 0
    await answers_alike(engine, texts, full, read[:1])
    assert {token.state for token in engine.explain(QUESTION, texts).tokens} == {"computed"}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("policy", [Reuse(), BestLast()], ids=repr)
def test_who_insists_is_told_what_works(name: str, policy: Any) -> None:
    for engine, options in (
        (make_engine(name), {"policy": policy}),
        (make_engine(name, policy=policy), {}),
    ):
        with pytest.raises(UnsupportedModelError, match=r"FullRecompute\(\)") as caught:
            engine.generate(QUESTION, MORE, max_new_tokens=2, **options)
        assert REFUSED[name][2] in str(caught.value)


@pytest.mark.parametrize("name", IMMOVABLE)
def test_a_single_chunk_need_not_move(name: str) -> None:
    engine = make_engine(name, trained=True)
    engine.generate(QUESTION, TEXTS[:1], max_new_tokens=4)
    one = engine.generate(QUESTION, TEXTS[:1], max_new_tokens=4)
    full = engine.generate(QUESTION, TEXTS[:1], policy=FullRecompute(), max_new_tokens=4)
    assert one.metrics.reused_tokens > 0
    assert engine.needed(TEXTS[:1], engine.policy) == engine.keys(TEXTS[:1])
    assert engine.needed(TEXTS, engine.policy) == []
    assert one.token_ids == full.token_ids


def prefilled(engine: Engine) -> list[str | None]:
    """Keys of what is stored as rows of these texts are written."""
    prefilling = RowPrefiller(rows=None, engine=engine)  # type: ignore[arg-type]  # no rows yet
    return [one and one.key for one in prefilling.prefill(["a", "b"], TEXTS)]


@pytest.mark.parametrize("name", IMMOVABLE)
def test_chunks_that_stay_where_they_are_are_prefilled_at_ingestion(name: str) -> None:
    engine = make_engine(name, store=MemoryStore())
    keys = engine.keys(TEXTS)
    assert prefilled(engine) == [key.digest for key in keys]
    assert all(map(engine.store.contains, keys))
    metrics = engine.generate(QUESTION, TEXTS, max_new_tokens=1).metrics
    assert (metrics.misses, metrics.hits) == (0, {"memory": 1})


NOBODY: list[tuple[str, dict[str, Any]]] = [
    ("recurrent_gemma", {}),
    ("rwkv", {}),
    ("gpt2", {"trained": True}),
    ("gpt2", {"policy": BestLast()}),
    ("gpt2", {"policy": FullRecompute()}),
]


@pytest.mark.parametrize(("name", "options"), NOBODY, ids=str)
def test_nothing_is_stored_that_nobody_could_use(name: str, options: dict[str, Any]) -> None:
    engine = make_engine(name, store=MemoryStore(), **options)
    with pytest.warns(UserWarning, match=SAID) as said:
        assert prefilled(engine) == [None, None]
    assert len(said) == 1
    assert prefilled(engine) == [None, None]
    assert engine.store.stats().puts == 0


def test_what_is_stored_all_the_same_is_warned_of() -> None:
    with pytest.warns(UserWarning, match=SAID):
        make_engine("gpt2", trained=True).add(TEXTS)
    with pytest.raises(UnsupportedModelError, match=REFUSED["recurrent_gemma"][2]):
        make_engine("recurrent_gemma").add(TEXTS)


def test_other_models_have_nothing_to_say() -> None:
    engine = make_engine("qwen2")
    assert engine.refusal == engine.why_useless == ""
    assert make_engine("qwen2", policy=FullRecompute()).why_useless == ""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.add(TEXTS)
        assert engine.generate(QUESTION, TEXTS, max_new_tokens=2).metrics.reused_tokens > 0


async def posted(engine: Engine, *more: dict[str, Any]) -> list[Any]:
    """What a server replies to one question with each of these beside it."""
    backend = LocalBackend(engine, name=MODEL)
    body = chat(QUESTION, documents=TEXTS, max_tokens=4)
    async with client(build_app(backend, settings())) as http:
        replies = [await http.post("/v1/chat/completions", json={**body, **one}) for one in more]
    await backend.close()
    return replies


async def test_a_server_reuses_what_need_not_move() -> None:
    said = [reply.json()["kvcache"] for reply in await posted(make_engine("gpt2"), {}, {})]
    assert [one["policy"] for one in said] == [repr(BestFew())] * 2
    assert said[1]["reused_tokens"] > 0


@pytest.mark.parametrize(("name", "trained"), [("gpt2", True), ("recurrent_gemma", False)])
async def test_a_server_answers_too(name: str, trained: bool) -> None:
    insisting = {"kvcache": {"policy": "reuse"}}
    with pytest.warns(UserWarning, match=SAID) as said:
        *replies, refused = await posted(make_engine(name, trained=trained), {}, {}, insisting)
    assert sum(SAID in str(one.message) for one in said) == 1
    for reply in replies:
        assert reply.status_code == 200, reply.text
        assert reply.json()["kvcache"]["policy"] == "FullRecompute()"
    assert refused.status_code == 400
    assert "FullRecompute()" in refused.json()["error"]["message"]
