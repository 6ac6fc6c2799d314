"""A database that this process opened, in a child of it: Chroma waits there for ever."""

from __future__ import annotations

from typing import TYPE_CHECKING

import forks
import pytest

if TYPE_CHECKING:
    from pathlib import Path

CODE = """
import os, signal
from kvcache_rag.errors import InvalidInputError

{opens}

if child := os.fork():
    _, status = os.waitpid(child, 0)
    assert {count} == 1  # it goes on here
    os._exit(os.waitstatus_to_exitcode(status))
signal.alarm(30)  # ends a child that waits
for call in (lambda: {count}, lambda: {reads}, lambda: {deletes}):
    try:
        call()
    except InvalidInputError as error:
        assert "opened before the process was forked" in str(error), error
    else:
        os._exit(3)
os._exit(0)
"""

OPENS = {
    "llama_index": (
        """
from llama_index.core.schema import TextNode
from llama_index.kvcache_rag import KVCacheVectorStore
store = KVCacheVectorStore.from_params("forked", persist_dir="db")
store.add([TextNode(id_="a", text="A cat.", embedding=[1.0, 0.0])])
""",
        "store.client.count()",
        "store.get_nodes(['a'])",
        "store.delete_nodes(['a'])",
    ),
    "langchain": (
        """
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_kvcache_rag import KVCacheChroma
store = KVCacheChroma("forked", DeterministicFakeEmbedding(size=4), persist_directory="db")
store.add_texts(["A cat."], ids=["a"])
""",
        "len(store.get()['ids'])",
        "store.similarity_search('cat')",
        "store.delete(['a'])",
    ),
}


@pytest.mark.parametrize("framework", OPENS)
def test_a_child_is_told_instead_of_waiting(framework: str, tmp_path: Path) -> None:
    opens, count, reads, deletes = OPENS[framework]
    code = CODE.format(opens=opens, count=count, reads=reads, deletes=deletes)
    status, output, errors = forks.run(code, tmp_path)
    assert status == 0, f"{output}\n{errors}"
