"""CacheClip's pair: what is compared, by hand, and that attention is what it is called."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from laws import QUESTION, TEMPLATE, TEXTS, make_engine
from tokenizers_zoo import word_pieces
from torch import Tensor
from zoo import build, byte_tokenizer

from benchmarks import answers_eval
from benchmarks import clip_pair as bench
from benchmarks.answers_candidates import RandomTokens, candidate
from kvcache_rag import Auxiliary, Engine, InvalidInputError
from kvcache_rag.auxiliary import ChunkAttention
from kvcache_rag.policies import named
from kvcache_rag.stitching.stitch import StitchedPrompt
from kvcache_rag_lab.evaluation.auxiliary import _main_weights, carried
from kvcache_rag_lab.scoring.question import Question

if TYPE_CHECKING:
    from pathlib import Path


def weights(*values: float) -> tuple[Tensor, Tensor]:
    """Weights that rank as they weigh."""
    one = torch.tensor(values, dtype=torch.double)
    return one, one


def test_divergence_and_overlap_worked_out_by_hand() -> None:
    # Ten tokens, of which two are a fifth; of the last eight, a fifth is two as well.
    last = weights(9, 9, 2, 2, *[1] * 6)
    other = weights(9, 1, 9, 1, 2, 2, *[1] * 4)
    behind = torch.arange(10) > 1
    parts = {"last": last, "all": weights(*[1] * 10), "other": other}
    found = bench.Choices(parts, behind).compared()
    assert set(found["last"]) == {"all", "other"}
    assert set(found["all"]) == {"last", "other"}
    # Both add up to 28; by token: 9 ln 9/1, 2 ln 2/9, 2 ln 2/1, and twice 1 ln 1/2.
    expected = (9 * math.log(9) + 2 * math.log(2 / 9)) / 28
    assert found["last"]["other"]["kl"] == pytest.approx(expected, abs=1e-4)
    assert found["last"]["other"]["jaccard"] == pytest.approx(1 / 3, abs=1e-4), "0 1, and 0 2"
    assert found["last"]["other"]["behind"] == pytest.approx(1 / 3, abs=1e-4), "2 3, and 2 4"
    assert found["last"]["all"]["jaccard"] == 1, "of equal ones the first"
    assert found["all"]["last"]["kl"] != found["last"]["all"]["kl"], "from whom it is told"


def test_a_token_of_the_auxiliary_is_carried_over_by_characters() -> None:
    template = replace(TEMPLATE, chunk_start="", chunk_end="")
    engine = Engine(build("llama"), byte_tokenizer(), template=template)

    class Wide(Auxiliary):
        def attention(self, question: str, chunks: Any) -> list[ChunkAttention]:
            # "ab" is one token of its own, "c" another; the engine's are bytes.
            return [ChunkAttention("ab c", [(0, 2), (3, 4)], torch.tensor([0.6, 0.3]))]

    found = carried(engine, Wide(engine), QUESTION, ["ab c"])
    assert found.is_read.tolist() == [True, True, False, True]
    assert found.weights.tolist() == pytest.approx([0.3, 0.3, 0.3])
    assert found.ranks.tolist() == pytest.approx([0.6, 0.6, 0.3])


def test_attention_is_that_of_full_prefill_and_of_stitched_chunks() -> None:
    engine = make_engine("qwen2")
    ids = engine.tokenize(QUESTION, TEXTS)
    looking = bench.Looking()
    engine.logits(QUESTION, TEXTS, policy=looking)
    seen = {name: one[len(ids.prefix) :] for name, one in looking.seen.items()}
    assert set(seen) == {"first", "last", "all", "last stitched", "all stitched"}
    first, last = _main_weights(engine, ids.prefix, ids.chunks, ids.query)
    assert torch.allclose(seen["first"], first, atol=1e-5)
    assert torch.allclose(seen["last"], last, atol=1e-5)
    stitched = torch.cat([one.weights for one in Auxiliary(engine).attention(QUESTION, TEXTS)])
    assert torch.allclose(seen["last stitched"], stitched, atol=1e-5)
    assert not torch.allclose(seen["last stitched"], last, atol=1e-5)
    layers = all_layers(engine, ids)
    assert torch.allclose(seen["all"], layers, atol=1e-4)
    assert not torch.allclose(seen["all stitched"], layers, atol=1e-4)


def all_layers(engine: Engine, ids: Any) -> Tensor:
    """Attention of the query by the model's own eager code, summed over layers and tokens."""
    before = engine.model.config._attn_implementation
    engine.model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            found = engine.model(input_ids=torch.tensor([ids.all]), output_attentions=True)
    finally:
        engine.model.set_attn_implementation(before)
    total = torch.stack([one[0, :, -len(ids.query) :].sum((0, 1)) for one in found.attentions])
    return total.sum(0)[len(ids.prefix) : len(ids.context)]


def test_a_row_is_compared_with_an_auxiliary_of_another_tokenizer() -> None:
    engine = make_engine("qwen2")
    question = Question("q", QUESTION, tuple(TEXTS), ("yes",))
    other = Auxiliary(Engine(build("llama"), word_pieces(), template=TEMPLATE))
    found = bench.choices(engine, other, question, 3)
    assert {len(ranks) for _, ranks in found.found.values()} == {len(found.is_behind)}
    letters = sum(not letter.isspace() for text in TEXTS[1:] for letter in text)
    assert int(found.is_behind.sum()) == letters
    again = bench.choices(engine, other, question, 3)
    assert torch.equal(found.found["random"][0], again.found["random"][0])
    itself = bench.choices(engine, Auxiliary(engine), question, 3).compared()["last"]
    assert itself["auxiliary"] == itself["last stitched"], "of one tokenizer nothing is lost"
    assert itself["auxiliary"]["jaccard"] > itself["random"]["jaccard"]


def rows(first: float, auxiliary: float, overlap: float) -> list[dict[str, Any]]:
    """Rows of one set, in which the auxiliary is nearer, or not."""
    both = {
        "first": {"kl": first, "jaccard": 0.2, "behind": 0.2},
        "auxiliary": {"kl": auxiliary, "jaccard": 0.2 + overlap, "behind": 0.2},
    }
    return [
        {"set": "squad", "cluster": str(n), "tokens": n, "found": {"last": both, "all": both}}
        for n in range(10)
    ]


def test_the_claim_is_what_the_interval_says() -> None:
    found = bench.summary(rows(first=2.0, auxiliary=1.5, overlap=-0.1))["last"]
    assert found["auxiliary"]["kl"] == [1.5, 1.5, 1.5]
    assert found["nearer than first"]["kl"] == {"claim": "holds", "by": [0.5, 0.5, 0.5]}
    assert found["nearer than first"]["jaccard"]["claim"] == "does not hold"
    assert found["nearer than first"]["behind"]["claim"] == "open"
    worse = bench.summary(rows(first=1.0, auxiliary=1.5, overlap=0.1))
    assert worse["last"]["nearer than first"]["kl"]["claim"] == "does not hold"
    assert worse["last"]["nearer than first"]["jaccard"]["claim"] == "holds"
    assert (worse["rows"], worse["tokens"]) == (10, 4)


def test_a_run_goes_on_and_keeps_no_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = [{"id": f"d{n}", "text": text, "relevant": n == 0} for n, text in enumerate(TEXTS)]
    for name in bench.SETS:
        asked = [
            {"id": f"{name}-{n}", "question": f"Who {n}?", "answers": ["z"], "documents": texts}
            for n in range(8)
        ]
        lines = "".join(json.dumps(one) + "\n" for one in asked)
        (tmp_path / f"{name}.jsonl").write_text(lines, encoding="utf-8")

    def alike(_: object, embedded: Any) -> Any:
        return torch.ones(len(embedded), 2).numpy()

    monkeypatch.setattr("benchmarks.answers.Retriever._embedded", alike)
    given = ["--model", "tiny", "--auxiliary", "tiny", "--data", str(tmp_path)]
    given += ["--work", str(tmp_path / "work"), "--results", str(tmp_path / "pair.json")]
    assert bench.main([*given, "--rows", "1"]) == 0
    capsys.readouterr()
    assert bench.main([*given, "--rows", "2"]) == 0
    new = [line for line in capsys.readouterr().out.splitlines() if "rows" not in line]
    assert len(new) == len(bench.SETS), "one row of each set"
    text = (tmp_path / "pair.json").read_text(encoding="utf-8")
    assert not any(words in text for words in (*TEXTS, "Who", "squad-"))
    found = {name: one["rows"] for name, one in json.loads(text)["sets"].items()}
    assert found == {"squad": 2, "hotpotqa": 2, "2wiki": 2, "all sets": 6}


def test_random_tokens_are_as_many_as_cacheclip_chooses() -> None:
    prompt = StitchedPrompt.of(5, [40, 30, 70], 4)
    signals: Any = None  # it asks for none
    chosen = candidate("random:0.2").select(prompt, signals)
    assert int(chosen.sum()) == round(0.2 * 100)
    assert not chosen[:45].any(), "prefix and first chunk are exact"
    assert torch.equal(chosen, RandomTokens(0.2).select(prompt, signals))
    assert int((chosen[1:] != chosen[:-1]).sum()) > 20, "scattered"


def test_eval_knows_random_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(named, "_FORMS", dict(named._FORMS))
    monkeypatch.setattr(named, "_WITH_RATIO", list(named._WITH_RATIO))
    with pytest.raises(InvalidInputError):
        named.policy_by_name("random:0.2")
    words = ["--task", "niah_reader_single", "--n", "1", "--timed", "0", "--out", str(tmp_path)]
    assert answers_eval.main([*words, "--policies", "full", "random:0.2"]) == 0
    kept = [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    (one,) = (record for record in kept if record.get("policy") == "random:0.2")
    assert 0.1 < one["recomputed_tokens"] / one["chunk_tokens"] < 0.2
