"""A trained model with recurrent layers answers from stored chunks as by full prefill."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hybrid_reader import DOCUMENTS, FOLDER, IS_READ, asked

from kvcache_rag import BestLast, DiskStore, Engine, FullRecompute, LegoLink, Reuse
from kvcache_rag.integration import open_engine
from kvcache_rag.policies.default import UNTRAINED

if TYPE_CHECKING:
    from pathlib import Path

    from kvcache_rag.policies import ReusePolicy

pytestmark = pytest.mark.skipif(not IS_READ, reason="this transformers keeps no states as 5.23")


@pytest.mark.parametrize("policy", [BestLast(), Reuse(), LegoLink()], ids=repr)
def test_it_answers_in_any_order_after_a_restart(policy: ReusePolicy, tmp_path: Path) -> None:
    def opened() -> Engine:
        store = DiskStore(tmp_path, durable=False)
        return Engine.from_pretrained(FOLDER, store=store, policy=policy)

    opened().add(DOCUMENTS)
    engine = opened()
    for documents, entity, value in asked():
        full = engine.generate(entity, documents, policy=FullRecompute(), max_new_tokens=1)
        answer = engine.generate(entity, documents, max_new_tokens=1)
        assert answer.text.strip() == full.text.strip() == value
        fresh = policy == BestLast()  # the best one is computed with the question
        assert answer.metrics.hits == {"disk": len(documents) - fresh}


def test_without_its_documents_it_does_not_know() -> None:
    engine = Engine.from_pretrained(FOLDER)
    right = [
        engine.generate(entity, max_new_tokens=1).text.strip() == value
        for _, entity, value in asked()
    ]
    assert sum(right) < len(right) / 4


def test_settings_cut_chunks_for_the_policy_that_will_be_asked_for(tmp_path: Path) -> None:
    def opened(policy: ReusePolicy | None) -> Engine:
        return open_engine(FOLDER, kv_dir=str(tmp_path), policy=policy)

    engine = opened(LegoLink(4))
    assert engine.policy == LegoLink(4)
    documents, entity, value = asked()[0]
    for _ in range(2):
        answer = engine.generate(entity, documents, policy=LegoLink(4), max_new_tokens=1)
        assert answer.text.strip() == value
    assert answer.metrics.misses == 0
    assert opened(Reuse()).policy == opened(None).policy == UNTRAINED
