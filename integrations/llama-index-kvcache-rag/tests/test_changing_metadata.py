"""A field of metadata that changes is named once, and nothing else is."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from llama_index.core import get_response_synthesizer
from llama_index.core.schema import NodeRelationship, NodeWithScore, RelatedNodeInfo, TextNode

from llama_index.kvcache_rag import KVCacheLLM, KVCacheSynthesizer

TEXT = "The tower is tall."


def node(text: str = TEXT, id_: str = "n", document: str = "", **metadata: Any) -> NodeWithScore:
    made = TextNode(id_=id_, text=text, metadata=metadata)
    if document:
        made.relationships[NodeRelationship.SOURCE] = RelatedNodeInfo(node_id=document)
    return NodeWithScore(node=made)


def told(llm: KVCacheLLM, *rounds: list[NodeWithScore]) -> list[str]:
    """Warnings of one question per round."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for nodes in rounds:
            KVCacheSynthesizer(llm).synthesize("How tall?", nodes)
    return [str(one.message) for one in found if "changes while the text" in str(one.message)]


def test_a_changing_field_is_named_once_with_its_remedy(llm: KVCacheLLM) -> None:
    (message,) = told(llm, *([node(page=3, date=day)] for day in range(4)))
    assert "field 'date'" in message
    assert "node.excluded_llm_metadata_keys.append('date')" in message
    assert told(llm, [node(page=4, date=5)]) == [message.replace("'date'", "'page'")]


def test_a_field_that_comes_and_goes_is_named(llm: KVCacheLLM) -> None:
    (message,) = told(llm, [node(page=3)], [node(page=3, score=0.7)])
    assert "'score'" in message


def test_a_node_that_is_excluded_or_stays_is_not(llm: KVCacheLLM) -> None:
    hidden = [node(page=3, date=day) for day in range(4)]
    for one in hidden:
        one.node.excluded_llm_metadata_keys.append("date")
    assert told(llm, *([one] for one in hidden)) == []
    assert told(llm, *[[node(page=3)]] * 3) == []


def test_another_text_may_have_other_metadata(llm: KVCacheLLM) -> None:
    assert told(llm, *([node(f"Tower {at} is tall.", page=at)] for at in range(4))) == []


def test_nodes_made_anew_with_their_document_are_noticed(llm: KVCacheLLM) -> None:
    days = ([node(id_=f"n{day}", document="d", date=day)] for day in range(4))
    (message,) = told(llm, *days)
    assert "'date'" in message


@pytest.mark.parametrize("document", ["d", ""])
def test_two_rows_may_share_a_text(llm: KVCacheLLM, document: str) -> None:
    pages = [node(id_=f"n{page}", document=document, page=page) for page in range(2)]
    assert told(llm, pages, pages[:1], pages[1:], pages) == []


def test_nodes_of_stock_synthesizers_are_watched_where_their_texts_are_found(
    llm: KVCacheLLM,
) -> None:
    def stock(asked: KVCacheLLM) -> list[str]:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            for day in range(4):
                get_response_synthesizer(asked).synthesize("How tall?", [node(page=3, date=day)])
        return [str(one.message) for one in found if "changes while" in str(one.message)]

    assert stock(KVCacheLLM(engine=llm.engine, match_chunks=False)) == []
    (message,) = stock(KVCacheLLM(engine=llm.engine))
    assert "'date'" in message
