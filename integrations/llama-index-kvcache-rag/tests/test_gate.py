"""An engine with a gate answers LlamaIndex's synthesizer by full prefill, and says why."""

from __future__ import annotations

import json
import pickle
from typing import TYPE_CHECKING

import pytest
from llama_index.core.schema import NodeWithScore, TextNode
from verdicts import REUSE, make_verdict

from kvcache_rag import Engine, FullRecompute, InvalidInputError
from kvcache_rag.errors import FingerprintMismatchError
from kvcache_rag.verdict import Gate
from llama_index.kvcache_rag import KVCacheLLM, KVCacheSynthesizer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TEXTS = ["The cat sat.", "A dog ran away.", "It rained."]
NODES = [NodeWithScore(node=TextNode(text=text), score=1.0) for text in TEXTS]


def synthesizer_of(engine: Engine, *, streaming: bool = False) -> KVCacheSynthesizer:
    llm = KVCacheLLM(engine=engine, max_new_tokens=4)
    return KVCacheSynthesizer(llm=llm, streaming=streaming)


async def test_every_call_falls_back_with_the_reason(make_engine: Callable[..., Engine]) -> None:
    plain = make_engine()
    gated = make_engine(gate=make_verdict(plain.identity, {REUSE: 0.831}))
    full = plain.generate("Who sat?", TEXTS, policy=FullRecompute(), max_new_tokens=4)
    found = synthesizer_of(gated).synthesize("Who sat?", NODES)
    later = await synthesizer_of(gated).asynthesize("Who sat?", NODES)
    for response in (found, later):
        metrics = response.metadata["kv_cache"]
        assert metrics["gate"].startswith("fell back to FullRecompute(): Reuse(")
        assert metrics["policy"] == "FullRecompute()"
    assert str(found) == full.text


def test_a_strict_gate_refuses(make_engine: Callable[..., Engine]) -> None:
    verdict = make_verdict(make_engine().identity, {REUSE: 0.831})
    strict = synthesizer_of(make_engine(gate=Gate(verdict, below="error")))
    with pytest.raises(InvalidInputError, match=r"kept 83\.1 % .* below 95 %"):
        strict.synthesize("Who sat?", NODES)


def test_a_verdict_file_is_a_setting(tmp_path: Path) -> None:
    file = tmp_path / "verdict.json"
    make_verdict(Engine.from_pretrained("tiny").identity, {REUSE: 0.831}).save(file)
    llm = KVCacheLLM(model_name="tiny", gate=file, max_new_tokens=4)
    assert json.loads(json.dumps(llm.to_dict()))["gate"] == str(file)
    # A gate that is lost on the way to another process would let everything pass.
    for one in (llm, pickle.loads(pickle.dumps(llm))):
        metrics = KVCacheSynthesizer(llm=one).synthesize("Who sat?", NODES).metadata["kv_cache"]
        assert metrics["gate"].startswith("fell back to FullRecompute(): Reuse(")
    other = KVCacheLLM(model_name="tiny", gate=file, system_prompt="Read.")
    with pytest.raises(FingerprintMismatchError, match="verify"):
        other.complete("Hello")


def test_a_gate_that_could_not_hold_is_refused(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    with pytest.raises(InvalidInputError, match="with engine=, gate belong to the engine"):
        KVCacheLLM(engine=engine, gate="verdict.json")
    gate: object = Gate(make_verdict(engine.identity, {REUSE: 0.831}))
    with pytest.raises(ValueError, match="must be a path, not a Gate"):
        KVCacheLLM(model_name="tiny", gate=gate)
