"""`kvcache-rag bench`: what it writes is consistent, what it cannot do is one sentence."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from pictures import LEAST, smallest_letters
from small import make_model, make_tokenizer

from kvcache_rag import DiskStore, Engine, PromptTemplate, cli
from kvcache_rag_lab.commands.bench import _pays, read_queries
from kvcache_rag_lab.evaluation.cost.speed import SpeedBench
from kvcache_rag_server.commands.corpora import cut

TEMPLATE = PromptTemplate(system="Read.\n", chunk_start="[", chunk_end="]")
TEXTS = [
    "The ferry crosses the strait twice a day.",
    "A baker kneads dough before dawn.",
    "Owls hunt at night and sleep in the barn.",
]
QUESTIONS = ["When do owls hunt?", "How often does the ferry cross?", "Where do owls sleep?"]
QUICK = ("--contexts", "96", "40", "--chunk-size", "40", "--max-new-tokens", "3", "--rounds", "2")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The small model wherever one is loaded; threads stay as they are."""

    def load(name: Any, *_: Any, **__: Any) -> Any:
        return make_model(), make_tokenizer(), TEMPLATE

    monkeypatch.setattr("kvcache_rag.models.pretrained.load", load)


@pytest.fixture
def own(tmp_path: Path) -> tuple[str, str]:
    corpus, queries = tmp_path / "corpus.jsonl", tmp_path / "queries.jsonl"
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in [*TEXTS, TEXTS[0]]))
    queries.write_text("\n\n".join(json.dumps({"question": one}) for one in QUESTIONS))
    return str(corpus), str(queries)


def measured(tmp_path: Path, *words: str) -> dict[str, Any]:
    file = tmp_path / "bench.json"
    assert cli.main(["bench", "tiny", *words, "--report", str(file)]) == 0
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def test_what_is_written_is_of_one_piece(
    tmp_path: Path, own: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    plot = tmp_path / "bench.svg"
    words = ("--corpus", own[0], "--queries", own[1], "--top-k", "1", "--budgets", "1GB", "20kB")
    found = measured(tmp_path, *QUICK, *words, "--plot", str(plot))
    assert (found["format"], found["complete"]) == (1, True)
    assert found["model"]["name"] == "tiny"
    assert found["model"]["parameters"] == sum(one.numel() for one in make_model().parameters())
    assert found["machine"]["threads"] == torch.get_num_threads()
    assert found["settings"] == {"chunk": 40, "tokens": 3, "rounds": 2, "codec": "native"}
    check_speed(found["speed"])
    check_corpus(found["corpus"])
    check_page(found)
    assert smallest_letters(plot) >= LEAST
    first, second = capsys.readouterr().out.strip().splitlines()[-2:]
    assert first.startswith("With chunks from files, by Reuse(")
    assert second.startswith("On this machine stitching ")
    assert str(tmp_path) not in (tmp_path / "bench.json").read_text()


def fields(value: Any) -> set[str]:
    """Names of all fields, but for sides, codecs and budgets."""
    named = {"full", "memory", "files", "native", "int8", "int4", "1", "2e-05"}
    if isinstance(value, list):
        return set().union(*map(fields, value))
    if not isinstance(value, dict):
        return set()
    return {name for name in value if name not in named}.union(*map(fields, value.values()))


def check_page(found: dict[str, Any]) -> None:
    """The documentation names every field."""
    page = (Path(__file__).parents[2] / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    prose = re.sub(r"```.*?```", "", page, flags=re.DOTALL)
    told = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`]+)`", prose))))
    assert fields(found) <= told


def check_speed(speed: dict[str, Any]) -> None:
    ingestion = speed["ingestion"]
    # 40; 40, 40 and 16: the first is the same.
    assert 90 <= ingestion["tokens"] <= 96
    assert ingestion["tokens_per_second"] == pytest.approx(
        ingestion["tokens"] / ingestion["seconds"]
    )
    assert [one["context"] for one in speed["contexts"]] == [40, 96]
    for one in speed["contexts"]:
        assert one["context"] - 3 <= one["chunk_tokens"] <= one["context"]
        assert one["prompt_tokens"] > one["chunk_tokens"] + one["query_tokens"]
        assert list(one["sides"]) == ["full", "memory", "files"]
        for side in one["sides"].values():
            check_side(side)
        full = one["sides"]["full"]["first_token"]["seconds"]
        for side, ratio in one["sooner"].items():
            ours = one["sides"][side]["first_token"]["seconds"]
            ratios = [a / b for a, b in zip(full, ours, strict=True)]
            assert ratio["value"] == pytest.approx(statistics.median(ratios))
        flops = one["flops"]
        assert 0 < flops["per_generated_token"] < flops["question"] < flops["full"]
        share = (flops["question"] + flops["rotation"]) / flops["full"]
        assert flops["reduction"] == pytest.approx(1 - share)
    for side, start in speed["pays_from"].items():
        gains = [one["sooner"][side]["value"] > 1 for one in speed["contexts"]]
        assert start == {(True, True): 40, (False, True): 96}.get(tuple(gains))


def check_side(side: dict[str, Any]) -> None:
    for times in (side["first_token"], side["decoding"]):
        assert len(times["seconds"]) == 2
        assert 0 < min(times["seconds"]) <= times["p50"] <= times["p95"] <= max(times["seconds"])
    assert side["decoding"]["tokens_per_second"] == pytest.approx(1 / side["decoding"]["p50"])
    assert side["peak_bytes"] is None or side["peak_bytes"] >= 0


def check_corpus(corpus: dict[str, Any]) -> None:
    assert corpus["chunks"] == 3
    assert corpus["tokens"] == sum(len(text) + len("[]") for text in TEXTS)
    assert corpus["bytes"]["int4"] < corpus["bytes"]["int8"] < corpus["bytes"]["native"]
    use = corpus["recurrence"]
    # Owls, the ferry, owls again.
    assert (use["questions"], use["retrieved"], use["distinct"]) == (3, 3, 2)
    assert use["recurring"] == pytest.approx(1 / 3)
    assert use["hit_ratios"]["native"] == {"1": pytest.approx(1 / 3), "2e-05": 0.0}


def test_the_packaged_reader_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    words = ("--contexts", "128", "--chunk-size", "50", "--max-new-tokens", "2", "--rounds", "1")
    found = measured(tmp_path, *words)
    assert (found["complete"], found["model"]["dtype"]) == (True, "bfloat16")
    short, asked = found["speed"]["contexts"]
    assert (short["context"], short["chunks"], short["generated"]) == (64, 2, 1)
    assert (asked["context"], asked["chunks"], asked["generated"]) == (128, 3, 2)
    assert short["sides"]["full"]["decoding"] is None
    for one in (short, asked):
        assert one["context"] - 12 <= one["chunk_tokens"] <= one["context"]


def test_a_store_of_ones_own_keeps_what_it_had(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    engine = Engine(make_model(), make_tokenizer(), store=DiskStore(folder), template=TEMPLATE)
    (key,) = engine.add(["kept"])
    before = {path for path in folder.rglob("*.safetensors") if path.is_file()}
    assert before
    measured(tmp_path, *QUICK, "--kv-dir", str(folder), "--kv-codec", "int8")
    assert {path for path in folder.rglob("*.safetensors") if path.is_file()} == before
    assert DiskStore(folder).contains(key)


def test_an_interrupt_keeps_the_rounds_that_were_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real, calls = SpeedBench._sample, []

    def interrupted(self: SpeedBench, side: str, times: Any) -> Any:
        calls.append(side)
        if len(calls) == 3 * (2 + 1) + 3 + 4:  # in the second round of the second context
            raise KeyboardInterrupt
        return real(self, side, times)

    monkeypatch.setattr(SpeedBench, "_sample", interrupted)
    file = tmp_path / "bench.json"
    assert cli.main(["bench", "tiny", *QUICK, "--report", str(file)]) == cli.INTERRUPTED
    found = json.loads(file.read_text())
    assert not found["complete"]
    rounds = {one["context"]: one["rounds"] for one in found["speed"]["contexts"]}
    assert rounds == {40: 2, 96: 1}
    *_, farewell = capsys.readouterr().err.splitlines()
    assert farewell == f"kvcache-rag: stopped; {file} has what was measured until then"


def test_folders_are_cut_as_build_cuts_them_and_the_policy_that_is_named_is_timed(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    text = " ".join(TEXTS)
    (folder / "a.txt").write_text(text)
    words = ("--corpus", str(folder), "--chunk-size", "50", "--chunk-overlap", "10")
    found = measured(tmp_path, *QUICK, *words, "--policy", "bestlast")
    assert found["corpus"]["chunks"] == len(list(cut(text, make_tokenizer(), 50, 10)))
    assert found["corpus"]["recurrence"] is None
    assert found["speed"]["policy"] == "BestLast(share=0.2, positions='reordered')"


def test_queries_may_be_plain_lines(tmp_path: Path) -> None:
    plain = tmp_path / "queries.txt"
    plain.write_text("\n first? \n\n{second}\n")
    assert read_queries(plain) == ["first?", "{second}"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--contexts 5000", "a context of 5000 tokens, with "),
        ("--contexts 5000", "does not fit the model's window of 4096; give --contexts of at"),
        ("--contexts 8", "--contexts must be at least 16"),
        ("--chunk-size 8", "--chunk-size must be at least 16"),
        ("--max-new-tokens 1", "--max-new-tokens must be at least 2"),
        ("--threads 0", "--threads must be at least 1"),
        ("--top-k 0", "--top-k must be at least 1"),
        ("--budgets 1XB", "--budgets must be a number of bytes such as 10GB, not '1XB'"),
        ("--chunk-overlap 256", "--chunk-overlap must be less than --chunk-size"),
        ("--queries queries.jsonl", "name --corpus, too"),
        ("--corpus empty.jsonl", "there is no text in empty.jsonl"),
        ("--corpus broken.jsonl", "broken.jsonl, line 1 cannot be read: it is not JSON"),
        ("--corpus .", "there is no file with text (.docx, .htm, .html, .md, .pdf, .txt) in ."),
        ("--corpus corpus.jsonl --queries empty.jsonl", "empty.jsonl has no questions; write one"),
        (
            "--corpus corpus.jsonl --queries corpus.jsonl",
            'corpus.jsonl, line 1: this is not {"question": "..."}; correct it',
        ),
        ("--policy magic", "magic"),
        ("--plot bench.txt", "bench.txt must end in one of .png, .svg, .pdf"),
    ],
)
def test_what_cannot_be_done_is_one_sentence(
    words: str,
    message: str,
    own: tuple[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "broken.jsonl").write_text("{\n")
    assert cli.main(["bench", "tiny", *words.split()]) == cli.REFUSED
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_a_model_whose_chunks_cannot_be_stitched_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Engine, "refusal", property(lambda self: "keys of this model are learned"))
    assert cli.main(["bench", "tiny", *QUICK]) == cli.REFUSED
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("learned, so there is no stitching of its chunks to measure")


@pytest.mark.parametrize(
    ("starts", "sentence"),
    [
        ((64, 1024), "pays from 64 tokens of context on with chunks from memory, from 1,024 "),
        ((64, 64), "pays from 64 tokens of context on with chunks from memory and files (64 is"),
        ((64, None), "memory, and not with those from files (64 is the shortest that was measured"),
        ((None, None), "does not pay up to 2,048 tokens of context."),
    ],
)
def test_from_where_on_it_pays_is_one_sentence(starts: Any, sentence: str) -> None:
    contexts = [{"context": context} for context in (64, 1024, 2048)]
    assert sentence in _pays(dict(zip(("memory", "files"), starts, strict=True)), contexts)
