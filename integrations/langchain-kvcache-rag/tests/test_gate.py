"""An engine with a gate answers a LangChain chat model by full prefill, and says why."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from langchain_core.documents import Document
from verdicts import REUSE, make_verdict

from kvcache_rag import Engine, FullRecompute, Gate, InvalidInputError
from langchain_kvcache_rag import ChatKVCache, KVCacheRAG

if TYPE_CHECKING:
    from collections.abc import Callable

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
