"""When cached chunks do not pay: the sums by hand, sizes against real caches, the page."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, Literal

import pytest
import torch
from small import make_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks import when_not, when_not_page
from benchmarks.when_not import chunks_of, tokenize
from benchmarks.when_not_page import Case, break_even, least_context, page
from benchmarks.when_not_sizes import CONFIGS, TOKENS, Weight, rounded_bytes, shape_of, weights
from kvcache_rag import DiskStore, Engine
from kvcache_rag.codecs import by_name
from kvcache_rag.models.cache import CACHE_NAME
from kvcache_rag.models.linears import pack_weights
from kvcache_rag.stores.disk.file import file_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

TINY = Weight(
    "a model",
    2_000_000_000,
    {"int8": 2.5e9, "int4": 1.5e9},
    {"native": 8000.0, "int8": 4100.0, "int4": 2200.0},
)


def test_the_break_even_by_hand() -> None:
    """Kept for 2.4 s; each use saves 2 s: after one 2.4 + 0.2 > 2.2, after two 2.8 < 4.4."""
    assert break_even(add=2.4, full=2.2, cached=0.2) == 2
    assert break_even(add=2.0, full=2.2, cached=0.2) == 1, "even is enough"
    assert break_even(add=0.1, full=2.2, cached=0.2) == 1, "the first use is one"
    assert break_even(add=7.0, full=0.3, cached=0.2) == 70
    assert math.isinf(break_even(add=1.0, full=0.2, cached=0.2))
    assert math.isinf(break_even(add=1.0, full=0.1, cached=0.2))


def case(tokens: int, full: float, cached: float) -> Case:
    return Case(tokens, 1, full, cached, full)


def test_a_context_is_long_enough_from_where_all_longer_ones_gain() -> None:
    long = [case(512, 0.9, 0.1), case(256, 0.4, 0.1)]
    assert least_context(long) == 256
    assert least_context([*long, case(128, 0.19, 0.1)]) == 256, "not twice as soon"
    assert least_context([*long, case(128, 0.06, 0.02)]) == 256, "not 50 ms sooner"
    lucky = case(64, 0.4, 0.1)
    assert least_context([*long, case(128, 0.1, 0.1), lucky]) == 256, "chance among slow ones"
    assert least_context([case(64, 0.1, 0.1)]) is None
    assert least_context([]) is None


@pytest.mark.parametrize("name", CONFIGS)
def test_bytes_are_those_of_real_caches(name: str, tmp_path: Path) -> None:
    """A small model of the same kind: what transformers keeps for it, and the file of a chunk."""
    kind, values = CONFIGS[name]
    small = {
        **values,
        "vocab_size": 99,
        "hidden_size": 16 * values["num_attention_heads"],
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "pad_token_id": 0,
    }
    config = AutoConfig.for_model(kind, **small)
    torch.manual_seed(1)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    shape = shape_of(config)
    tokens = 40
    with torch.inference_mode():
        cache = model(torch.arange(3, 3 + tokens)[None], use_cache=True)[CACHE_NAME]
    kept = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert shape.layout.nbytes(tokens) == kept

    store = DiskStore(tmp_path, durable=False)
    engine = Engine(model, make_tokenizer(), store=store, context_window=400)
    (key,) = engine.add(["x" * tokens])
    assert store.path(key).stat().st_size == file_bytes(shape.layout, by_name("native"), key.tokens)


def test_parameters_are_those_that_were_published() -> None:
    found = {weight.model: weight for weight in weights()}
    assert {name: weight.parameters for name, weight in found.items()} == {
        "SmolLM2-135M": 134_515_008,
        "Gemma-3-270M": 268_098_176,
        "Qwen2.5-0.5B": 494_032_768,
        "Qwen2.5-7B": 7_615_616_512,
        "Mistral-7B-v0.3": 7_248_023_552,
        "Llama-3.1-8B": 8_030_261_248,
    }
    llama = found["Llama-3.1-8B"]
    # 32 layers x keys and values x 8 heads of 128 x 2 bytes, and a header.
    assert 0 < llama.token_bytes["native"] - 32 * 2 * 8 * 128 * 2 < 8192 / TOKENS * 4
    assert llama.gguf_bytes() == 8_030_261_248 * 4.5 / 8
    assert llama.loaded_bytes == 16_060_522_496


def _buffers(model: Any) -> list[torch.Tensor]:
    return [buffer for name, buffer in model.named_buffers() if "inv_freq" not in name]


@pytest.mark.parametrize("form", ["int8", "int4"])
@pytest.mark.parametrize("tied", [True, False])
def test_rounded_models_hold_the_bytes_that_are_told(
    form: Literal["int8", "int4"], tied: bool
) -> None:
    kind, values = CONFIGS["Qwen2.5-0.5B"]
    small = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256}
    small |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = AutoConfig.for_model(kind, **{**values, **small, "tie_word_embeddings": tied})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    told = rounded_bytes(model, form)
    pack_weights(model, form)
    kept = {tensor.data_ptr(): tensor.nbytes for tensor in [*model.parameters(), *_buffers(model)]}
    assert sum(kept.values()) == told


def results(cases: Sequence[tuple[int, float, float, float]]) -> dict[str, Any]:
    return {
        "command": "python -m benchmarks.when_not",
        "facts": {
            "model": "smollm2",
            "revision": "0123456789abcdef",
            "dtype": "bfloat16",
            "rounds": 3,
            "commit": "abc",
            "machine": "a processor, 2 cores, 1 thread(s)",
            "versions": "torch 2",
        },
        "text": {"texts": 2, "bytes": 800, "tokens": 200},
        "cases": [
            {
                "chunks": 2,
                "chunk_tokens": tokens // 2,
                "context_tokens": tokens,
                "date": "2026-11-22",
                "load": [0.25, 0.5, 0.5],
                "full": [9.0, full, 0.0],
                "cached": [9.0, cached, 0.0],
                "add": [9.0, add, 0.0],
            }
            for tokens, full, cached, add in cases
        ],
    }


def quality() -> dict[str, Any]:
    def row(policy: str, value: float) -> dict[str, Any]:
        return {"policy": policy, "quality": {"value": value}}

    rows = [row("full prefill", 0.95), row("reordered", 0.065), row("LegoLink", 0.9501)]
    group = {"task": "reader_pronoun", "model": "before", "k": None, "rows": rows}
    others = [{**group, "model": "block"}, {**group, "k": 2}]
    return {"facts": {"n": 2000}, "cross": {"groups": [*others, group]}}


def test_the_page_says_what_was_measured() -> None:
    found = page(results([(2048, 6.5, 0.2, 5.0), (64, 0.11, 0.1, 0.1)]), quality(), [TINY])
    assert "| 2,048 | 2 | 6.50 s | 200 ms | 6.30 s | 32.5 x | 5.00 s | 1 |" in found
    assert "| 64 | 2 | 110 ms | 100 ms | 10 ms | 1.1 x | 100 ms | 10 |" in found
    assert found.index("| 64 |") < found.index("| 2,048 |")
    assert "| contexts are short | from 2,048 tokens on, the first token comes at least 50" in found
    assert "paid for after 1 use;" in found
    assert "| a pronoun that the chunk before explains | 95.0 | 6.5 | 95.0 |" in found
    assert "| an alias that the chunk before explains | not measured |" in found
    assert "smollm2 (0123456789ab), bfloat16; a processor, 2 cores, 1 thread(s), load 0.2" in found
    assert "4.00 bytes of text per token" in found
    assert "| a model | 8,000 | 4,100 | 2,200 | 2,000 x |" in found
    assert "| a model | 2.00 B | 1.1 GB | 4.0 GB | 2.5 GB | 1.5 GB |" in found
    assert "3.6 times the bytes; rounded again, on a CPU" in found
    assert "1.3 to 1.3 times" in found


def test_where_no_case_is_bad_none_is_claimed() -> None:
    found = page(results([(2048, 6.5, 0.2, 5.0), (64, 0.4, 0.1, 0.1)]), quality(), [TINY])
    assert "| contexts are short | none was too short on this processor: at 64 tokens" in found
    assert "keeping one takes up to 2.4 ms a token, by `Reuse()` paid for after 1 use;" in found


def test_a_page_without_results_says_so() -> None:
    found = page({}, {}, [TINY])
    assert "| contexts are short | not measured |" in found
    assert "| most chunks are never asked | not measured |" in found
    assert "Not measured.\n" in found
    assert "| a model | 8,000 | 4,100 | 2,200 | not measured |" in found
    slow = page(results([(64, 0.1, 0.1, 0.1)]), {}, [TINY])
    assert "none that was measured, up to 64 tokens, gains enough" in slow
    assert "after no number of uses" in slow
    assert "| never |" in slow


def test_the_committed_page_is_that_of_the_committed_results(tmp_path: Path) -> None:
    when_not_page.main(["--page", str(tmp_path / "page.md")])
    assert (tmp_path / "page.md").read_text("utf-8") == when_not_page.PAGE.read_text("utf-8")


def test_a_run_measures_every_side_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "results" / "when_not.json"
    words = ["--quick", "--model", "tiny", "--json", str(file)]
    measured: list[int] = []
    known: dict[int, dict[str, Any]] = {}
    measure = when_not.measure

    def counted(engine: Engine, texts: Sequence[str], rounds: int) -> dict[str, Any]:
        if len(measured) == 1:
            measured.append(0)
            raise KeyboardInterrupt  # in the middle of the second context
        measured.append(len(texts))
        if rounds == 1:  # that it is asked is looked at, not what it finds
            return known[len(texts)]
        known[len(texts)] = measure(engine, texts, rounds)
        return known[len(texts)]

    monkeypatch.setattr(when_not, "measure", counted)
    with pytest.raises(KeyboardInterrupt):
        when_not.main(words)
    assert len(json.loads(file.read_text())["cases"]) == 1
    assert when_not.main(words) == 0
    assert measured == [1, 0, 2, 2], "the first context is not measured again"
    report = json.loads(file.read_text())
    assert [row["chunks"] for row in report["cases"]] == [1, 2, 2]
    for row in report["cases"]:
        assert len(row["full"]) == len(row["cached"]) == len(row["add"]) == 2
        assert all(value > 0 for side in ("full", "cached", "add") for value in row[side])
        assert row["context_tokens"] >= row["chunks"] * row["chunk_tokens"]
    assert report["text"]["bytes"] > report["text"]["tokens"] > 1000
    assert when_not.main([*words, "--rounds", "1"]) == 0
    assert measured[4:] == [1, 2, 2], "other rounds are another run"
    assert "measured anew" in capsys.readouterr().out
    assert when_not.main([*words, "--rounds", "1", "--fresh"]) == 0
    assert measured[7:] == [1, 2, 2]
    page_file = tmp_path / "page.md"
    assert when_not_page.main(["--times", str(file), "--page", str(page_file)]) == 0
    assert "| context tokens |" in page_file.read_text()


def test_a_side_that_does_something_else_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine.from_pretrained("tiny", cost_aware=False)
    swapped = {"full": when_not.SIDES["cached"], "cached": when_not.SIDES["full"]}
    monkeypatch.setattr(when_not, "SIDES", swapped)
    with pytest.raises(RuntimeError, match="should have been"):
        when_not.measure(engine, ["Savo is a town."], 1)


def test_chunks_have_the_wanted_length_and_differ() -> None:
    tokenizer = Engine.from_pretrained("tiny").tokenizer
    texts = when_not.articles()
    found = chunks_of(tokenizer, texts, 4, 60)
    assert len(set(found)) == 4
    assert all(60 <= len(ids) <= 100 for ids in tokenize(tokenizer, found))
    with pytest.raises(ValueError, match="do not make 2 chunks of 100"):
        chunks_of(tokenizer, ["too short"], 2, 100)
