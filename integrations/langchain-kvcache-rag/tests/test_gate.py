"""An engine with a gate answers a LangChain chat model by full prefill, and says why."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import pytest
from langchain_core.documents import Document
from verdicts import REUSE, make_verdict

from kvcache_rag import Engine, FullRecompute, InvalidInputError
from kvcache_rag.verdict import Gate
from langchain_kvcache_rag import ChatKVCache, KVCacheRAG

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

DOCUMENTS = [Document(text) for text in ("The cat sat.", "A dog ran away.", "It rained.")]
ASKED: Any = {"question": "Who sat?", "context": DOCUMENTS}


def rag_of(engine: Engine) -> KVCacheRAG:
    return KVCacheRAG(llm=ChatKVCache(engine=engine, max_tokens=4))


async def test_every_call_falls_back_with_the_reason(make_engine: Callable[..., Engine]) -> None:
    plain = make_engine()
    gated = make_engine(gate=make_verdict(plain.identity, {REUSE: 0.831}))
    texts = [one.page_content for one in DOCUMENTS]
    full = plain.generate("Who sat?", texts, policy=FullRecompute(), max_new_tokens=4)
    rag = rag_of(gated)
    messages = [
        rag.invoke(ASKED),
        await rag.ainvoke(ASKED),
        *rag.batch([ASKED, ASKED]),
        list(rag.stream(ASKED))[-1],
    ]
    for message in messages:
        metrics = message.response_metadata["kv_cache"]
        assert metrics["gate"].startswith("fell back to FullRecompute(): Reuse(")
        assert metrics["policy"] == "FullRecompute()"
    assert messages[0].content == full.text
    assert (
        ChatKVCache(engine=gated, max_tokens=4)
        .invoke("Hello")
        .response_metadata["kv_cache"]["gate"]
        == ""
    )


def test_a_strict_gate_refuses(make_engine: Callable[..., Engine]) -> None:
    verdict = make_verdict(make_engine().identity, {REUSE: 0.831})
    rag = rag_of(make_engine(gate=Gate(verdict, below="error")))
    with pytest.raises(InvalidInputError, match=r"kept 83\.1 % .* below 95 %"):
        rag.invoke(ASKED)


def test_a_verdict_file_is_a_setting(tmp_path: Path) -> None:
    file = tmp_path / "verdict.json"
    make_verdict(Engine.from_pretrained("tiny").identity, {REUSE: 0.831}).save(file)
    llm = ChatKVCache(model="tiny", gate=file, max_tokens=4)
    # A gate that is lost on the way to another process would let everything pass.
    for one in (llm, pickle.loads(pickle.dumps(llm))):
        metrics = KVCacheRAG(llm=one).invoke(ASKED).response_metadata["kv_cache"]
        assert metrics["gate"].startswith("fell back to FullRecompute(): Reuse(")
    free = ChatKVCache(model="tiny", max_tokens=4)
    assert free._identifying_params != llm._identifying_params  # cached answers are told apart


def test_a_gate_that_could_not_hold_is_refused(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    with pytest.raises(InvalidInputError, match="with engine=, gate belong to the engine"):
        ChatKVCache(engine=engine, gate="verdict.json")
    gate = Gate(make_verdict(engine.identity, {REUSE: 0.831}))
    with pytest.raises(InvalidInputError, match=r"gate cannot be used: must be a path, not a Gate"):
        ChatKVCache(model="tiny", gate=gate)
