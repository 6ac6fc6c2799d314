"""The smaller benchmarks: what is fitted, compared, counted and kept; no clock is judged."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from laws import QUESTION, TEXTS, make_engine
from small import make_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks import codecs, decoding, growth, ingestion, sizes, when_not
from benchmarks.common import read, result_file
from benchmarks.growth import Grown, Point, key_of
from benchmarks.sizes import CONFIGS, KVShape, kv_shape, rounded_bytes
from benchmarks.when_not import chunks_of, tokenize
from kvcache_rag import DiskStore, Engine, MemoryStore
from kvcache_rag.codecs import by_name
from kvcache_rag.models import generate as generating
from kvcache_rag.models.attention import few_queries
from kvcache_rag.models.cache import CACHE_NAME
from kvcache_rag.models.linears import pack_weights
from kvcache_rag.stores.file import file_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path
    from typing import Literal


# ------------------------------------------------------------------------------------ growth
@pytest.mark.parametrize("power", [0.0, 1.0, 2.0])
def test_the_exponent_of_a_power_is_that_power(power: float) -> None:
    points = [(size, 0.003 * size**power) for size in (10, 100, 1000)]
    assert growth.exponent(points) == pytest.approx(power)


def test_a_curve_that_grows_faster_than_it_may_does_not_hold() -> None:
    points = [Point("hit", size, size * 1e-6, 1) for size in (10, 1000)]
    points += [Point("store du", size, size * 1e-6, 1) for size in (10, 1000)]
    found = {row["curve"]: row["holds"] for row in growth.fitted(points)}
    assert found == {"hit": "no", "store du": "yes"}


def test_a_measured_store_holds_what_it_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Grown, "_opened", lambda _, size: [Point("opening", size, 1.0, 1)])
    grown = Grown(tmp_path)
    grown.grow(40)
    curves = {point.curve for point in grown.measure()}
    assert {"hit", "contains", "store du", "write to a full store"} <= curves
    assert len([*tmp_path.rglob("*.safetensors")]) == 40
    assert all(grown.store.contains(key_of(seed)) for seed in range(40))
    assert Grown(tmp_path).count == 40, "a later run goes on"
    grown.store.delete(key_of(3))
    assert Grown(tmp_path).count == 0, "a run that was killed while it measured begins anew"


def test_a_run_measures_only_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def measure(self: Grown) -> list[Point]:
        asked.append(self.count)
        return [Point("hit", self.count, 1e-4, 1)]

    monkeypatch.setattr(Grown, "measure", measure)
    growth.Run(tmp_path).store([5, 10])
    later = growth.Run(tmp_path)
    later.store([5, 10, 20])
    assert asked == [5, 10, 20]
    assert [point.size for point in later.points] == [5, 10, 20]


# --------------------------------------------------------------------------------- ingestion
def test_ingestion_compares_the_same_tokens(tmp_path: Path) -> None:
    file, threads = tmp_path / "rows.json", torch.get_num_threads()
    given = ["--model", "tiny", "--lengths", "48", "--threads", "1", "--total", "96"]
    assert ingestion.main([*given, "--rounds", "1", "--json", str(file)]) == 0
    assert torch.get_num_threads() == threads
    report = read(file)
    assert [row["side"] for row in report["rows"]] == ["bare", "memory", "disk, durable"]
    assert report["rows"][0]["ratio"] == 1


def test_texts_are_chunks_of_the_length_that_is_asked_for() -> None:
    engine = Engine.from_pretrained("tiny", store=MemoryStore())
    texts = ingestion.texts_of(engine, 3, 40)
    assert [key.tokens for key in engine.keys(texts)] == [40, 40, 40]
    assert len({*texts}) == 3


# ---------------------------------------------------------------------------------- decoding
def test_before_is_generate_and_torch_and_the_others_are_not() -> None:
    kept = (generating.decodes, few_queries.library)
    with decoding.as_side(decoding.BEFORE):
        assert few_queries.library() is None
        assert not generating.decodes(None, 1, None, {})  # type: ignore[arg-type]  # says no to all
    with decoding.as_side("auto"):
        assert (generating.decodes, few_queries.library) == kept


def test_sides_take_turns_over_the_same_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "TOKENS", 4)
    engine = make_engine("llama")
    rows = decoding.timed({"before": engine, "auto": engine}, TEXTS, 3)
    assert [row["side"] for row in rows] == ["before", "auto"]
    assert rows[0]["times before's"] == {"value": 1.0, "low": 1.0, "high": 1.0}
    assert all(row["tokens/s"] > 0 for row in rows)
    assert engine.generate(QUESTION, TEXTS, max_new_tokens=2).token_ids


# ------------------------------------------------------------------------------------ codecs
def test_codecs_are_timed_and_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codecs, "CHUNKS", 1)
    monkeypatch.setattr(codecs, "ASKED", 2)
    file = tmp_path / "codecs.json"
    given = ["--model", "tiny", "--context", "64", "--rounds", "1", "--json", str(file)]
    assert codecs.main(given) == 0
    report = read(file)
    small = {row["codec"]: row["times_smaller"] for row in report["rows"]}
    assert small["native"] == 1 < small["int8"] < small["int4"]
    asked = [(row["place"], row["side"]) for row in report["first tokens"]]
    assert asked == [
        (p, s) for p in ("page cache", "cold") for s in ("native", "int8 copied", "int8")
    ]


# ------------------------------------------------------------------------------------- sizes
@pytest.mark.parametrize("name", CONFIGS)
def test_bytes_are_those_of_real_caches(name: str, tmp_path: Path) -> None:
    """A small model of the same kind: what transformers keeps for it, and the file of a chunk."""
    kind, _, _, _, _, heads, kv_heads, width, tied = CONFIGS[name]
    small = dict(
        zip(sizes._FIELDS, (99, 16 * heads, 32, 2, heads, kv_heads, width, tied), strict=True)
    )
    config = AutoConfig.for_model(kind, **small, pad_token_id=0)
    torch.manual_seed(1)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    shape = KVShape(2, kv_heads, width)
    tokens = 40
    with torch.inference_mode():
        cache = model(torch.arange(3, 3 + tokens)[None], use_cache=True)[CACHE_NAME]
    kept = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert shape.layout.nbytes(tokens) == kept

    store = DiskStore(tmp_path, durable=False)
    engine = Engine(model, make_tokenizer(), store=store, context_window=400)
    (key,) = engine.add(["x" * tokens])
    assert store.path(key).stat().st_size == file_bytes(shape.layout, by_name("native"), key.tokens)


def test_computed_sizes_are_those_that_were_published_and_committed(tmp_path: Path) -> None:
    file = tmp_path / "sizes.json"
    assert sizes.main(["--json", str(file)]) == 0
    report = read(file)
    assert report == read(result_file("sizes"))
    assert {row["model"]: row["parameters"] for row in report["weights"]} == {
        "SmolLM2-135M": 134_515_008,
        "Gemma-3-270M": 268_098_176,
        "Qwen2.5-0.5B": 494_032_768,
        "Qwen2.5-7B": 7_615_616_512,
        "Mistral-7B-v0.3": 7_248_023_552,
        "Llama-3.1-8B": 8_030_261_248,
    }
    # 32 layers x keys and values x 8 heads of 128 x 2 bytes.
    assert kv_shape("Llama-3.1-8B").layout.nbytes(1) == 32 * 2 * 8 * 128 * 2
    native = {row["model"]: row for row in report["chunks"]}["Qwen2.5-0.5B"]
    assert native["native"] / native["int8"] >= 1.93
    assert native["native"] / native["int4"] >= 3.5


def test_operations_and_copies_of_a_prompt_by_hand() -> None:
    found = sizes.prompt("qwen2-7b", 8192)
    assert round(found["saved %"], 2) == 98.46  # TurboRAG's figure
    assert found["full prefill TFLOPs"] == pytest.approx(136.37, abs=0.01)
    assert found["KV MB"] == pytest.approx(8192 * 28 * 2 * 4 * 128 * 2 / 1e6)
    # 16 lanes at 16 GT/s, 128 bits of 130: 31.5 GB/s.
    assert sizes.pcie_rate(4) == pytest.approx(31.508e9, rel=1e-4)
    assert found["PCIe 4.0 x16 ms"] == pytest.approx(469.76e6 / 31.508e6, rel=1e-3)
    assert sizes.prompt("qwen2-7b", 256, 8)["KV MB"] == 8 * sizes.prompt("qwen2-7b", 256)["KV MB"]


def _buffers(model: Any) -> list[torch.Tensor]:
    return [buffer for name, buffer in model.named_buffers() if "inv_freq" not in name]


@pytest.mark.parametrize("form", ["int8", "int4"])
@pytest.mark.parametrize("tied", [True, False])
def test_rounded_models_hold_the_bytes_that_are_told(
    form: Literal["int8", "int4"], tied: bool
) -> None:
    small = dict(zip(sizes._FIELDS, (512, 128, 256, 2, 2, 1, 64, tied), strict=True))
    config = AutoConfig.for_model("qwen2", **small)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    told = rounded_bytes(model, form)
    pack_weights(model, form)
    kept = {tensor.data_ptr(): tensor.nbytes for tensor in [*model.parameters(), *_buffers(model)]}
    assert sum(kept.values()) == told


# ---------------------------------------------------------------------------------- when not
def test_a_run_measures_every_side_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "results" / "when_not.json"
    words = ["--quick", "--model", "tiny", "--json", str(file)]
    measured: list[int] = []
    measure = when_not.measure

    def counted(engine: Engine, texts: Sequence[str], rounds: int) -> dict[str, Any]:
        if len(measured) == 1:
            measured.append(0)
            raise KeyboardInterrupt  # in the middle of the second context
        measured.append(len(texts))
        return measure(engine, texts, rounds)

    monkeypatch.setattr(when_not, "measure", counted)
    few = when_not.articles()[:2]
    monkeypatch.setattr(when_not, "articles", lambda: few)
    with pytest.raises(KeyboardInterrupt):
        when_not.main(words)
    assert len(read(file)["cases"]) == 1
    assert when_not.main(words) == 0
    assert measured == [1, 0, 2, 2], "the first context is not measured again"
    report = read(file)
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


def test_a_side_that_does_something_else_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine.from_pretrained("tiny")
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
