"""Chains are copied and sent: every public object, opened and used before."""

from __future__ import annotations

import copy
import pickle
from typing import TYPE_CHECKING, Any

import pytest

from kvcache_rag import InvalidInputError
from langchain_kvcache_rag import (
    ChatKVCache,
    HashEmbeddings,
    KVCacheChroma,
    KVCacheRAG,
)

if TYPE_CHECKING:
    from kvcache_rag import Engine


def test_a_copy_shares_the_engine_and_no_settings() -> None:
    llm = ChatKVCache(model="tiny", generate_kwargs={"num_beams": 1}, stop=["a"])
    chain = KVCacheRAG(llm=llm)
    other: Any = copy.deepcopy(chain)
    assert other.llm.engine is llm.engine
    other.llm.generate_kwargs["num_beams"] = 2
    other.llm.stop.append("b")
    assert (llm.generate_kwargs, llm.stop) == ({"num_beams": 1}, ["a"])


@pytest.mark.parametrize("what", ["chat model", "store"])
def test_what_holds_a_given_engine_says_so(what: str, engine: Engine, tmp_path: Any) -> None:
    given: Any = KVCacheRAG(llm=ChatKVCache(engine=engine))
    if what == "store":
        given = KVCacheChroma(
            "docs", HashEmbeddings(), persist_directory=str(tmp_path), engine=engine
        ).as_retriever()
    assert copy.deepcopy(given) is not None
    with pytest.raises(InvalidInputError, match=r"engine.*cannot be pickled"):
        pickle.dumps(given)
