"""An agent that searches a folder of texts, by LangChain's `create_agent`.

    python examples/agent/agent.py ["question" ...] [--model smollm2] [--free]

Every step asks the model again with all that was found before: those chunks are reused.  SmolLM2 is
too small to call tools, so each question is searched for before it answers; a model that calls
tools by itself gets `--free`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

from langchain.agents import create_agent
from langchain.agents.middleware import wrap_model_call
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.tools import tool
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_text_splitters import RecursiveCharacterTextSplitter
from pydantic import Field

from kvcache_rag import KVCacheRagError
from kvcache_rag_documents import read_folder, suffixes
from langchain_kvcache_rag import ChatKVCache, HashEmbeddings, document_block

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from langchain_core.messages import BaseMessage

DOCS: Final = Path(__file__).resolve().parents[2] / "docs"
QUESTIONS: Final = ("How do agents reuse what their tools found?", "And what is a chunk there?")


def search_tool(folder: Path) -> Any:
    """A tool that finds passages of the files of a folder."""
    files = read_folder(str(folder))
    for one in files.left_out:
        if one.name.endswith(suffixes()):
            print(f"{one.name} is left out: {one.reason}", file=sys.stderr)
    splitter = RecursiveCharacterTextSplitter(chunk_size=900, chunk_overlap=0)
    store = InMemoryVectorStore(HashEmbeddings())  # finds words, and needs no model
    store.add_documents(
        splitter.create_documents([*files.texts.values()], [{"file": name} for name in files.texts])
    )

    @tool(response_format="content_and_artifact")
    def search(query: Annotated[str, Field(max_length=80)]) -> tuple[str, list[Any]]:
        """Finds passages of the documentation. Takes the words to look for."""
        found = store.similarity_search(query, k=2)
        # Documents as an artifact are chunks where their whole text stands in the message.
        return "\n\n".join(document.page_content for document in found), found

    return search


@wrap_model_call
def search_first(request: Any, handler: Callable[[Any], Any]) -> Any:
    """Searches for a question in place of the model, which then answers from all that was found."""
    messages = request.messages
    if isinstance(messages[-1], HumanMessage):
        call = {"name": "search", "args": {"query": messages[-1].text}, "id": str(len(messages))}
        return AIMessage("", tool_calls=[call])
    found = [one for message in messages for one in getattr(message, "artifact", None) or []]
    blocks = [document_block(one) for one in {one.page_content: one for one in found}.values()]
    (*_, question) = [one.text for one in messages if isinstance(one, HumanMessage)]
    asked = HumanMessage([*blocks, {"type": "text", "text": question}])
    return handler(request.override(messages=[asked], tools=[]))


def show(step: int, message: AIMessage) -> None:
    """Print a step of the model: what it did, and what was reused."""
    calls = [f"{call['name']}({call['args']})" for call in message.tool_calls]
    print(f"step {step}: {', '.join(calls) or message.text}")
    if cost := message.response_metadata.get("kv_cache"):
        tokens = f"{cost['reused_tokens']} tokens reused, {cost['computed_tokens']} computed"
        print(f"  {tokens}; first token after {cost['answers'][0]['ttft']:.2f} s", flush=True)


def converse(llm: Any, search: Any, questions: Sequence[str], *, free: bool) -> list[BaseMessage]:
    """Ask one question after the other in one conversation; returns all messages."""
    agent: Any = create_agent(llm, [search], middleware=[] if free else [search_first])
    messages: list[BaseMessage] = []
    step = 0
    for question in questions:
        print(f"\n{question}")
        asked = {"messages": [*messages, HumanMessage(question)]}
        for state in agent.stream(asked, stream_mode="values"):  # each step when it is done
            for message in state["messages"][len(messages) :]:
                if isinstance(message, AIMessage):
                    step += 1
                    show(step, message)
            messages = state["messages"]
    return messages


def main() -> None:
    """Ask the questions of the command line, or two about the documentation."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("questions", nargs="*", default=QUESTIONS)
    parser.add_argument("--folder", type=Path, default=DOCS, help="of texts")
    parser.add_argument("--model", default="smollm2", help="hub id, folder, GGUF file or smollm2")
    parser.add_argument("--free", action="store_true", help="the model decides when to search")
    arguments = parser.parse_args()
    if not all(question.strip() for question in arguments.questions):
        parser.error("a question is empty; ask something")
    llm = ChatKVCache(model=arguments.model, max_tokens=96)
    converse(llm, search_tool(arguments.folder), arguments.questions, free=arguments.free)


if __name__ == "__main__":
    try:
        main()
    except KVCacheRagError as error:
        sys.exit(f"agent: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
