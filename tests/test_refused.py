"""A model whose chunks cannot be stitched: it answers by full prefill, and says so once."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from serve_fakes import MODEL, chat, client, settings
from zoo import REFUSED, build, byte_tokenizer

from kvcache_rag import CacheBlend, Engine, FullRecompute, MemoryStore, PromptTemplate, Reuse
from kvcache_rag.errors import UnsupportedModelError
from kvcache_rag.integration import RowPrefiller
from kvcache_rag_server.app import build_app
from kvcache_rag_server.local import LocalBackend

TEXTS = ["The cat sat on the mat.", "A dog ran away from home."]
QUESTION = "Who sat?"
IMMOVABLE = ["gpt2", "opt", "hunyuan"]
SAID = "it answers by full prefill, as with policy=FullRecompute"


def make_engine(name: str, **options: Any) -> Engine:
    template = PromptTemplate(system="Read.\n")
    return Engine(build(name), byte_tokenizer(), template=template, **options)


@pytest.mark.parametrize("name", REFUSED)
async def test_it_answers_by_full_prefill_and_says_so_once(name: str) -> None:
    engine = make_engine(name)
    assert REFUSED[name][2] in engine.refusal
    full = engine.generate(QUESTION, TEXTS, policy=FullRecompute(), max_new_tokens=4)
    with pytest.warns(UserWarning, match=SAID) as said:
        answer = engine.generate(QUESTION, TEXTS, max_new_tokens=4)
    assert len(said) == 1
    assert REFUSED[name][2] in str(said[0].message)
    assert answer.token_ids == full.token_ids
    assert answer.metrics.policy == repr(FullRecompute())
    assert answer.metrics.reused_tokens == engine.store.stats().puts == 0
    # From now on not a word: warnings are errors here.
    stream = engine.stream(QUESTION, TEXTS, max_new_tokens=4)
    assert "".join(stream) == full.text
    assert (await engine.agenerate(QUESTION, TEXTS, max_new_tokens=4)).text == full.text
    batch = engine.generate_batch([(QUESTION, TEXTS), (QUESTION, TEXTS[:1])], max_new_tokens=4)
    alone = engine.generate(QUESTION, TEXTS[:1], policy=FullRecompute(), max_new_tokens=4)
    if name != "rwkv":  # whose batches in transformers are not what their rows are alone
        assert [one.token_ids for one in batch] == [full.token_ids, alone.token_ids]
    tenant = engine.in_namespace("other").generate(QUESTION, TEXTS, max_new_tokens=4)
    assert tenant.token_ids == full.token_ids
    explained = engine.explain(QUESTION, TEXTS)
    assert {token.state for token in explained.tokens} == {"computed"}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("policy", [Reuse(), CacheBlend(0.5)], ids=repr)
def test_who_insists_is_told_what_works(name: str, policy: Any) -> None:
    for engine, options in (
        (make_engine(name), {"policy": policy}),
        (make_engine(name, policy=policy), {}),
    ):
        with pytest.raises(UnsupportedModelError, match=r"FullRecompute\(\)") as caught:
            engine.generate(QUESTION, TEXTS, max_new_tokens=2, **options)
        assert REFUSED[name][2] in str(caught.value)


@pytest.mark.parametrize("name", IMMOVABLE)
def test_a_single_chunk_need_not_move(name: str) -> None:
    engine = make_engine(name)
    engine.generate(QUESTION, TEXTS[:1], max_new_tokens=4)
    one = engine.generate(QUESTION, TEXTS[:1], max_new_tokens=4)
    full = engine.generate(QUESTION, TEXTS[:1], policy=FullRecompute(), max_new_tokens=4)
    assert one.metrics.reused_tokens > 0
    assert engine.needed(TEXTS[:1], engine.policy) == engine.keys(TEXTS[:1])
    assert engine.needed(TEXTS, engine.policy) == []
    assert one.token_ids == full.token_ids


@pytest.mark.parametrize("name", ["gpt2", "recurrent_gemma"])
def test_nothing_is_stored_that_nobody_could_use(name: str) -> None:
    engine = make_engine(name, store=MemoryStore())
    prefilling = RowPrefiller(rows=None, engine=engine)  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match=SAID) as said:
        assert prefilling.prefill(["a", "b"], TEXTS) == [None, None]
    assert len(said) == 1
    assert prefilling.prefill(["a", "b"], TEXTS) == [None, None]
    assert engine.store.stats().puts == 0


def test_what_is_stored_all_the_same_is_warned_of() -> None:
    with pytest.warns(UserWarning, match=SAID):
        make_engine("gpt2").add(TEXTS)
    with pytest.raises(UnsupportedModelError, match=REFUSED["recurrent_gemma"][2]):
        make_engine("recurrent_gemma").add(TEXTS)


def test_other_models_have_nothing_to_say() -> None:
    engine = make_engine("qwen2")
    assert engine.refusal == ""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.add(TEXTS)
        assert engine.generate(QUESTION, TEXTS, max_new_tokens=2).metrics.reused_tokens > 0


@pytest.mark.parametrize("name", ["gpt2", "recurrent_gemma"])
async def test_a_server_answers_too(name: str) -> None:
    backend = LocalBackend(make_engine(name), name=MODEL)
    body = chat(QUESTION, documents=TEXTS, max_tokens=4)
    async with client(build_app(backend, settings())) as http:
        with pytest.warns(UserWarning, match=SAID) as said:
            replies = [await http.post("/v1/chat/completions", json=body)]
        replies.append(await http.post("/v1/chat/completions", json=body))
        insisting = {**body, "kvcache": {"policy": "reuse"}}
        refused = await http.post("/v1/chat/completions", json=insisting)
    await backend.close()
    assert len(said) == 1
    for reply in replies:
        assert reply.status_code == 200, reply.text
        assert reply.json()["kvcache"]["policy"] == "FullRecompute()"
    assert refused.status_code == 400
    assert "FullRecompute()" in refused.json()["error"]["message"]
