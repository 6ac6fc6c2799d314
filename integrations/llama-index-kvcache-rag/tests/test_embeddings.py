"""HashEmbedding: deterministic, of length one, literal matches near."""

from __future__ import annotations

import math
import pickle

import pytest

from llama_index.kvcache_rag import HashEmbedding


def cosine(left: list[float], right: list[float]) -> float:
    return sum(a * b for a, b in zip(left, right, strict=True))


async def test_same_text_same_vector_everywhere() -> None:
    embedding = HashEmbedding(dimensions=16)
    vector = embedding.get_text_embedding("The cat sat.")
    assert pickle.loads(pickle.dumps(embedding)).get_text_embedding("The cat sat.") == vector
    assert await embedding.aget_text_embedding("The cat sat.") == vector
    assert await embedding.aget_query_embedding("The cat sat.") == vector
    # Written down, so that another process or version would be noticed.
    assert [round(value, 4) for value in vector[:4]] == [-0.5222, 0.1741, 0.0, -0.6963]
    assert embedding.to_dict()["class_name"] == "HashEmbedding"


@pytest.mark.parametrize(
    "text", ["word", "", "?!", "\ud800", "ein Satz mit Umlauten äöü", "日本語"]
)
def test_vectors_have_length_one(text: str) -> None:
    vector = HashEmbedding().get_query_embedding(text)
    assert len(vector) == 384
    assert math.isclose(cosine(vector, vector), 1.0, rel_tol=1e-9)


def test_shared_words_are_near() -> None:
    embed = HashEmbedding().get_text_embedding
    question = embed("Where does Marlow keep the lantern?")
    near = cosine(question, embed("Marlow keeps the lantern in the tower."))
    far = cosine(question, embed("Prices rose by nine percent in autumn."))
    assert near > far + 0.2
