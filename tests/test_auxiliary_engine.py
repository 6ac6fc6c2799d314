"""CacheClip from end to end: the packaged reader answers, an auxiliary model chooses."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError
from typing import Any

import access
import pytest
import torch
from tokenizers_zoo import word_pieces
from torch import Tensor
from zoo import build, byte_tokenizer

from kvcache_rag import (
    CacheClip,
    Engine,
    InvalidInputError,
    MemoryStore,
    PromptTemplate,
)
from kvcache_rag.auxiliary import Auxiliary, ChunkAttention
from kvcache_rag.errors import CorruptChunkError
from kvcache_rag.generation import StoredChunk
from kvcache_rag.models.attention.last_layer import QueryAttention
from kvcache_rag.prefill import Prefiller
from kvcache_rag_lab.evaluation.auxiliary import _main_weights, attention_agreement
from kvcache_rag_lab.reader import examples

EXAMPLE = examples("two_hop")[0]
DOCUMENTS = list(EXAMPLE.documents)
QUESTIONS = [question.text for question in EXAMPLE.questions]
CLIP = CacheClip(ratio=0.5)


@pytest.fixture(scope="module", params=["its own model", "another tokenizer"])
def auxiliary(request: pytest.FixtureRequest) -> Auxiliary:
    if request.param == "its own model":
        return Auxiliary.from_pretrained("tiny")
    template = PromptTemplate(system="Documents:\n", chunk_start="[", chunk_end="]\n")
    return Auxiliary(Engine(build("llama"), word_pieces(), template=template))


@pytest.fixture(scope="module")
def engine(auxiliary: Auxiliary) -> Engine:
    return Engine.from_pretrained(
        "tiny", store=MemoryStore(), device="cpu", dtype=torch.float32, auxiliary=auxiliary
    )


def test_generate_stream_and_batch_agree(engine: Engine) -> None:
    options: dict[str, Any] = {"policy": CLIP, "max_new_tokens": 8}
    asked = [(question, DOCUMENTS[: 3 + index]) for index, question in enumerate(QUESTIONS)]
    for (question, documents), one in zip(
        asked, engine.generate_batch(asked, **options), strict=True
    ):
        alone = engine.generate(question, documents, **options)
        assert alone.metrics.recompute > 0
        assert alone.metrics.recomputed_tokens == one.metrics.recomputed_tokens > 0
        assert one.token_ids == alone.token_ids
        assert "".join(engine.stream(question, documents, **options)) == alone.text


def test_what_is_computed_again_is_what_the_auxiliary_looks_at(
    engine: Engine, auxiliary: Auxiliary
) -> None:
    limits: dict[str, Any] = {"ratio": 0.1, "window": 1, "threshold": 0}
    lengths = [len(chunk) for chunk in engine.tokenize(QUESTIONS[0], DOCUMENTS).chunks]
    alone = CacheClip(**limits)
    answer = engine.generate(QUESTIONS[0], DOCUMENTS, policy=alone, max_new_tokens=1)
    assert answer.metrics.recomputed_tokens == round(0.1 * sum(lengths[1:]))

    class Given:
        def __init__(self, sign: int) -> None:
            self.sign = sign

        def scores(self, question: str, chunks: Any) -> list[Tensor]:
            assert (question, list(chunks)) == (QUESTIONS[0], DOCUMENTS)
            return [self.sign * one for one in auxiliary.scores(question, chunks)]

    found, given, opposite = (
        engine.logits(QUESTIONS[0], DOCUMENTS, policy=policy)
        for policy in (alone, CacheClip(Given(1), **limits), CacheClip(Given(-1), **limits))
    )
    assert torch.equal(given, found)
    assert float((opposite - found).abs().max()) > 1e-3


def test_chunks_by_reference_are_scored_too(engine: Engine) -> None:
    expected = engine.generate(QUESTIONS[0], DOCUMENTS, policy=CLIP, max_new_tokens=8)
    keys = engine.add(DOCUMENTS)
    stored = [StoredChunk(key, text) for key, text in zip(keys, DOCUMENTS, strict=True)]
    for chunks in (stored, keys, [keys[0], *stored[1:3], *DOCUMENTS[3:]]):
        found = engine.generate(QUESTIONS[0], chunks, policy=CLIP, max_new_tokens=8)
        assert found.token_ids == expected.token_ids
        assert found.metrics.recomputed_tokens == expected.metrics.recomputed_tokens


@pytest.mark.timeout(60)
def test_an_engine_may_be_its_own_auxiliary() -> None:
    """Also where both have to compute the same chunks at the same time."""
    twin = Auxiliary.from_pretrained("tiny", dtype=torch.float32)
    options: dict[str, Any] = {"device": "cpu", "dtype": torch.float32}
    other = Engine.from_pretrained("tiny", auxiliary=twin, **options)
    expected = other.generate(QUESTIONS[0], DOCUMENTS, policy=CLIP, max_new_tokens=8)
    engine = Engine.from_pretrained("tiny", **options)
    own = CacheClip(Auxiliary(engine), ratio=0.5)
    for _ in range(2):
        found = engine.generate(QUESTIONS[0], DOCUMENTS, policy=own, max_new_tokens=8)
        assert found.token_ids == expected.token_ids
        assert found.metrics.recomputed_tokens == expected.metrics.recomputed_tokens
    assert found.metrics.misses == 0


@pytest.mark.parametrize("where", ["engine", "policy", "both"])
def test_whoever_scores_has_its_chunks_by_ingestion(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = PromptTemplate(system="Documents:\n")
    scorer = Auxiliary(Engine(build("llama"), word_pieces(), template=template))
    own = CacheClip(scorer, ratio=0.5)
    policy = {"policy": own, "both": own}.get(where)
    given = scorer if where in ("engine", "both") else None
    main = Engine.from_pretrained("tiny", device="cpu", auxiliary=given, policy=policy)
    sizes: list[int] = []
    compute = Prefiller.compute

    def computed(self: Prefiller, ids: Any) -> Any:
        if self.store is scorer.engine.store:
            sizes.append(len(ids))
        return compute(self, ids)

    monkeypatch.setattr(Prefiller, "compute", computed)
    main.add([*DOCUMENTS, DOCUMENTS[0]])
    assert sum(sizes) == len(DOCUMENTS), "each once, however often it is named"
    assert scorer.engine.store.stats().puts == len(DOCUMENTS) + 1, "and the prefix"
    main.add(DOCUMENTS)
    found = main.generate(QUESTIONS[0], DOCUMENTS, policy=policy or CLIP, max_new_tokens=1)
    assert sum(sizes) == len(DOCUMENTS)
    assert (found.metrics.misses, found.metrics.auxiliary_misses) == (0, 0)
    late = [*DOCUMENTS, "Teso lives in Grabra."]
    found = main.generate(QUESTIONS[0], late, policy=policy or CLIP, max_new_tokens=1)
    assert (found.metrics.misses, found.metrics.auxiliary_misses) == (1, 1)
    assert sum(sizes) == len(late)


def test_a_store_of_the_auxiliary_that_keeps_nothing_costs_misses_only() -> None:
    class Full(MemoryStore):
        def put(self, *_: Any) -> bool:
            self._counters.failed("no space left")
            return False

    class Damaged(MemoryStore):
        def get(self, *_: Any, **__: Any) -> Any:
            raise CorruptChunkError("not the bytes of the chunk")

    expected = None
    for store in (MemoryStore(), Full(), Damaged()):
        scorer = Auxiliary.from_pretrained("tiny", store=store, dtype=torch.float32)
        main = Engine.from_pretrained(
            "tiny", device="cpu", dtype=torch.float32, policy=CacheClip(scorer, ratio=0.5)
        )
        keys = main.add(DOCUMENTS)
        assert all(map(main.store.contains, keys))
        answer = main.generate(QUESTIONS[0], DOCUMENTS, max_new_tokens=4)
        lost = 0 if type(store) is MemoryStore else len(DOCUMENTS)
        assert (answer.metrics.misses, answer.metrics.auxiliary_misses) == (0, lost)
        expected = expected or answer.token_ids
        assert answer.token_ids == expected


def test_cancelling_stops_both_models() -> None:
    scorer = Auxiliary.from_pretrained("tiny")
    main = Engine.from_pretrained("tiny", device="cpu", policy=CacheClip(scorer))
    stop = threading.Event()
    stop.set()
    for _ in range(2):
        with pytest.raises(CancelledError):
            main.add(DOCUMENTS, cancelled=stop)
        assert not any(map(scorer.engine.store.contains, scorer.engine.keys(DOCUMENTS)))
        main._add(DOCUMENTS, show_progress=False, cancelled=None)  # of the main model alone


def test_a_model_agrees_with_itself_over_one_chunk(engine: Engine) -> None:
    twin = Auxiliary.from_pretrained("tiny", dtype=torch.float32)
    found = attention_agreement(engine, twin, QUESTIONS[0], DOCUMENTS[:1])
    assert found.kl == pytest.approx(0, abs=1e-5)
    assert found.jaccard == 1
    more = attention_agreement(engine, twin, QUESTIONS[0], DOCUMENTS)
    assert more.kl > 1e-4
    assert more.jaccard < 1
    assert more.tokens > 4 * found.tokens


def test_the_main_attention_is_that_of_a_full_prefill(engine: Engine) -> None:
    ids = engine.tokenize(QUESTIONS[0], DOCUMENTS)
    engine.model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            found = engine.model(input_ids=torch.tensor([ids.all]), output_attentions=True)
    finally:
        engine.model.set_attn_implementation("sdpa")
    view = QueryAttention(access.adapter(engine))
    assert view.first < view.layer
    weights = _main_weights(engine, ids.prefix, ids.chunks, ids.query)
    for number, one in zip((view.first, view.layer), weights, strict=True):
        layer = found.attentions[number][0]
        expected = layer[:, -len(ids.query) :].mean(0).mean(0)[len(ids.prefix) : len(ids.context)]
        assert torch.allclose(one, expected, atol=1e-6)


def test_divergences_worked_out_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    # Two tokens are read.  The last layer looks at them 3:1, the first one 1:3, the auxiliary 1:1:
    # of the last layer, KL to 1:1 is 3/4 ln 3/2 + 1/4 ln 1/2 = 0.130812, and to 1:3 it is
    # 3/4 ln 3 + 1/4 ln 1/3 = ln(3)/2 = 0.549306.
    bare = PromptTemplate(system="", chunk_start="", chunk_end="")
    engine = Engine(build("llama"), byte_tokenizer(), template=bare)
    layers = torch.tensor([0.1, 0.3]), torch.tensor([0.6, 0.2])
    monkeypatch.setattr("kvcache_rag_lab.evaluation.auxiliary._main_weights", lambda *_: layers)

    class Even(Auxiliary):
        def attention(self, question: str, chunks: Any) -> list[ChunkAttention]:
            return [ChunkAttention("ab", [(0, 1), (1, 2)], torch.tensor([0.2, 0.2]))]

    found = attention_agreement(engine, Even(engine), "?", ["ab"], share=0.5)
    assert found.tokens == 2
    assert found.kl == pytest.approx(0.130812, abs=1e-5)
    assert found.first_layer_kl == pytest.approx(0.549306, abs=1e-5)
    assert found.jaccard == 1, "of equal ones the first is taken"


@pytest.mark.parametrize(("chunks", "share"), [([], 0.2), (DOCUMENTS, 0), (DOCUMENTS, 1.5)])
def test_nothing_to_compare(engine: Engine, auxiliary: Auxiliary, chunks: Any, share: Any) -> None:
    with pytest.raises(InvalidInputError):
        attention_agreement(engine, auxiliary, QUESTIONS[0], chunks, share)
