"""Chroma's `where` and the predicate together give what LlamaIndex's own filter function gives."""

from __future__ import annotations

from typing import Any

import chromadb
import pytest
from llama_index.core.schema import TextNode
from llama_index.core.vector_stores.types import (
    FilterCondition,
    FilterOperator,
    MetadataFilter,
    MetadataFilters,
    VectorStoreQuery,
)

from kvcache_rag import InvalidInputError
from llama_index.kvcache_rag import KVCacheVectorStore
from llama_index.kvcache_rag.filters import row_filter

Op = FilterOperator

ROWS: dict[str, dict[str, Any]] = {
    "a": {"year": 2020, "name": "Alpha One", "tags": ["x", "y"], "price": 1.5, "none": None},
    "b": {"year": 2021, "name": "beta", "tags": ["y"], "price": 2, "sizes": [1, 2.5]},
    "c": {"year": 2022.0, "name": "", "empty": [], "price": 3.0, "sizes": [3, 4]},
    "d": {"name": "Delta one"},
    "e": {"year": 2020, "nested": {"k": 1}, "mixed": [1, "a"], "flag": True},
}


@pytest.fixture(scope="module")
def store() -> KVCacheVectorStore:
    store = KVCacheVectorStore.from_params("filters", client=chromadb.EphemeralClient())
    store.add(
        [
            TextNode(id_=id_, text=f"text {id_}", metadata=metadata, embedding=[1.0, float(index)])
            for index, (id_, metadata) in enumerate(ROWS.items())
        ]
    )
    return store


def one(key: str, operator: Op, value: Any) -> MetadataFilters:
    return MetadataFilters(filters=[MetadataFilter(key=key, operator=operator, value=value)])


def group(condition: str, *parts: Any) -> MetadataFilters:
    inner = [p.filters[0] if len(p.filters) == 1 and p.condition == "and" else p for p in parts]
    return MetadataFilters(filters=inner, condition=FilterCondition(condition))


CASES: list[tuple[MetadataFilters, str]] = [
    (one("year", Op.EQ, 2020), "ae"),
    (one("year", Op.EQ, 2022), "c"),
    (one("year", Op.EQ, 2020.5), ""),
    (one("year", Op.EQ, 2020.0), "ae"),
    (one("price", Op.EQ, 1.5), "a"),
    (one("year", Op.NE, 2020), "bcd"),
    (one("year", Op.NE, 2020.5), "abcde"),
    (one("price", Op.IN, [1.5, 2.0]), "ab"),
    (one("year", Op.NIN, [2020.5]), "abcde"),
    (one("year", Op.GT, 2020), "bc"),
    (one("year", Op.GTE, 2020), "abce"),
    (one("year", Op.LT, 2021.5), "abe"),
    (one("year", Op.LTE, 2021), "abe"),
    (one("price", Op.GT, 1), "abc"),
    (one("price", Op.GT, 1.4), "abc"),
    (one("name", Op.GT, "a"), "b"),
    (one("name", Op.LTE, "Alpha One"), "ac"),
    (one("year", Op.GT, "text"), ""),
    (one("year", Op.IN, [2020, 2022]), "ace"),
    (one("name", Op.IN, ["beta"]), "b"),
    (one("year", Op.IN, []), ""),
    (one("year", Op.NIN, [2020]), "bcd"),
    (one("year", Op.NIN, []), "abcde"),
    (one("tags", Op.CONTAINS, "y"), "ab"),
    (one("sizes", Op.CONTAINS, 3), "c"),
    (one("sizes", Op.CONTAINS, 1), "b"),
    (one("tags", Op.ANY, ["x", "z"]), "a"),
    (one("tags", Op.ANY, ["x", "y"]), "ab"),
    (one("tags", Op.ALL, ["x", "y"]), "a"),
    (one("tags", Op.ALL, ["y"]), "ab"),
    (one("sizes", Op.ANY, [4, 9]), "c"),
    (one("sizes", Op.ALL, [3, 4]), "c"),
    (one("name", Op.TEXT_MATCH, "One"), "a"),
    (one("name", Op.TEXT_MATCH_INSENSITIVE, "ONE"), "ad"),
    (one("tags", Op.IS_EMPTY, None), "cde"),
    (one("name", Op.IS_EMPTY, None), "ce"),
    (one("none", Op.IS_EMPTY, None), "abcde"),
    (one("empty", Op.IS_EMPTY, None), "abcde"),
    (one("year", Op.EQ, None), "d"),
    (one("year", Op.NE, None), "abce"),
    (group("or", one("year", Op.EQ, 2021), one("name", Op.EQ, "Delta one")), "bd"),
    (group("or", one("year", Op.EQ, 2021), one("name", Op.TEXT_MATCH, "One")), "ab"),
    (group("and", one("year", Op.EQ, 2020), one("name", Op.TEXT_MATCH, "One")), "a"),
    (group("not", one("year", Op.EQ, 2020)), "bcd"),
    (group("not", one("year", Op.NE, 2020)), "ae"),
    (group("not", one("year", Op.GT, 2020)), "ade"),
    (group("not", one("year", Op.EQ, 2020), one("tags", Op.CONTAINS, "y")), "cd"),
    (group("not", one("tags", Op.ANY, ["x", "y"])), "cde"),
    (group("not", one("tags", Op.ALL, ["x", "y"])), "bcde"),
    (
        group(
            "and",
            one("price", Op.GTE, 1),
            group("or", one("year", Op.EQ, 2022), group("not", one("tags", Op.CONTAINS, "x"))),
        ),
        "bc",
    ),
    (group("not", group("or", one("year", Op.EQ, 2020), one("year", Op.EQ, 2021))), "cd"),
    (group("not", group("and", one("year", Op.EQ, 2020), one("tags", Op.CONTAINS, "x"))), "bcde"),
    (MetadataFilters(filters=[]), "abcde"),
]


@pytest.mark.parametrize(("filters", "expected"), CASES, ids=lambda value: str(value)[:70])
def test_get_nodes_and_query_select_the_same_rows(
    store: KVCacheVectorStore, filters: MetadataFilters, expected: str
) -> None:
    assert sorted(node.node_id for node in store.get_nodes(filters=filters)) == list(expected)
    query = VectorStoreQuery(query_embedding=[1.0, 0.0], similarity_top_k=9, filters=filters)
    found = store.query(query)
    assert sorted(found.ids or []) == list(expected)


@pytest.mark.parametrize("condition", list(FilterCondition))
def test_agrees_with_llama_index_on_every_operator(
    store: KVCacheVectorStore, condition: FilterCondition
) -> None:
    from llama_index.core.vector_stores.utils import build_metadata_filter_fn

    parts: list[MetadataFilter | MetadataFilters] = [
        MetadataFilter(key="year", operator=Op.GT, value=2020),
        MetadataFilter(key="name", operator=Op.NE, value="beta"),
        MetadataFilter(key="tags", operator=Op.IS_EMPTY, value=None),
    ]
    filters = MetadataFilters(filters=parts, condition=condition)
    theirs = build_metadata_filter_fn(ROWS.__getitem__, filters)
    ours = {node.node_id for node in store.get_nodes(filters=filters)}
    assert ours == {id_ for id_ in ROWS if theirs(id_)}


def test_chroma_takes_its_share() -> None:
    part = row_filter(group("and", one("year", Op.EQ, 2020), one("name", Op.TEXT_MATCH, "One")))
    assert part.where == {"year": {"$eq": 2020}}
    assert part.predicate is not None
    whole = row_filter(group("or", one("year", Op.EQ, 1), one("year", Op.EQ, 2)))
    assert whole.where == {"$or": [{"year": {"$eq": 1}}, {"year": {"$eq": 2}}]}
    assert whole.predicate is None


@pytest.mark.parametrize("operator", [Op.IN, Op.NIN, Op.ANY, Op.ALL])
def test_operators_on_lists_say_so(operator: Op) -> None:
    with pytest.raises(InvalidInputError, match="needs a list"):
        row_filter(one("year", operator, 2020))


def test_nodes_come_back_as_they_were(store: KVCacheVectorStore) -> None:
    found = {node.node_id: node for node in store.get_nodes()}
    for id_, metadata in ROWS.items():
        assert found[id_].metadata == metadata
        assert found[id_].get_content() == f"text {id_}"
