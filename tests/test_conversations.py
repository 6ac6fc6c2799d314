"""One conversation, four front ends: what the model reads of it is the same, or said to differ.

Each case is asked through LangChain, LlamaIndex, the server and the front end before vLLM, by full
prefill, and what the model read is compared with `tests/golden/conversations.json`, as text: one
token is one byte.  `CASES` says of each where the front ends differ, and which of them is right.
"""

from __future__ import annotations

import asyncio
import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from llama_index.core.base.llms.types import ChatMessage, MessageRole, TextBlock, ToolCallBlock
from llama_index.core.retrievers import BaseRetriever
from llama_index.core.schema import NodeWithScore, TextNode
from scripted import NATIVE, RESPONSE, scripted
from serve_fakes import Scripted, client, settings

from kvcache_rag import Engine, FullRecompute, KVCacheRagError, MemoryStore, PromptTemplate
from kvcache_rag_server.app import build_app
from kvcache_rag_server.local import LocalBackend
from langchain_kvcache_rag import ChatKVCache, document_block
from llama_index.kvcache_rag import KVCacheChatEngine, KVCacheLLM
from vllm_kvcache_rag.front.prompts import Prompts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

GOLDEN: Final = Path(__file__).parent / "golden" / "conversations.json"
OWN: Final = "Read.\n"
WINDOW: Final = 4096

TWO_ROLES: Final = NATIVE.replace(
    "{% for message in messages %}",
    "{% for message in messages %}{% if message.role not in ('user', 'assistant') %}"
    "{{ raise_exception('no ' + message.role) }}{% endif %}",
    1,
)
"""A chat template that refuses system messages."""


@dataclass(frozen=True)
class Case:
    """Messages, and what is asked over them.

    Attributes:
        messages: Each (role, text); of a call (role, text, name, arguments), of a tool (role, text,
            name, documents in the text...).
        documents: Beside the last message.
        verdict: Where the front ends differ, which is right; "" where none does.
        template: Of chats.
    """

    messages: tuple[tuple[Any, ...], ...]
    documents: tuple[str, ...] = ()
    verdict: str = ""
    template: str = NATIVE


A, B = "The ship Mora was built in Kiel.", "Captain Vug has sailed it for years."
NO_QUESTION: Final = "both: a chat model goes on from anything, the server's API wants a question"
NO_TOOLS: Final = "both: vLLM is told of no tools"
IN_RESULTS: Final = "both: the server takes documents in a field of their own, and vLLM no tools"
NOTHING_ASKED: Final = "LangChain and the server: nothing is asked"
A_PART: Final = "LangChain and the server: calls and results are a part of what was said"
# Turns of the cases.
OWN_WORDS, BRIEF, KIND = ("system", OWN), ("system", "Be brief."), ("system", "Be kind.")
WHO, WHERE, SPACED, SILENT = (("user", text) for text in ("Who?", "Where?", "  Where?\n", " "))
VUG, TESK, ASK, KIEL, NOTHING, THOUGHT = (
    ("assistant", text)
    for text in ("Vug.", "Or Tesk.", "Ask.", "In Kiel.", "", "<think>It is Vug.</think>Vug.")
)
ADDED = (("user", "Add."), ("assistant", "", "add", {"a": 1}), ("tool", "2", "add"))
FOUND = (WHERE, ("assistant", "", "find", {"a": 1}), ("tool", f"Found:\n{A}\n\n{B}", "find", A, B))

CASES: Final[dict[str, Case]] = {
    "a question": Case((WHERE,)),
    "spaces around": Case((SPACED,)),
    "no question": Case((SILENT,)),
    "the own instruction": Case((OWN_WORDS, WHERE)),
    "a foreign instruction": Case((BRIEF, WHERE)),
    "two instructions": Case((BRIEF, KIND, WHERE)),
    "an instruction in between": Case((WHO, VUG, BRIEF, WHERE)),
    "an instruction alone": Case((BRIEF,), verdict=NO_QUESTION),
    "an instruction last": Case((WHERE, BRIEF), verdict=NO_QUESTION),
    "turns": Case((WHO, VUG, WHERE)),
    "two questions": Case((WHO, WHERE)),
    "two answers": Case((WHO, VUG, TESK, WHERE)),
    "an answer first": Case((ASK, WHERE)),
    "an answer last": Case((WHERE, KIEL), verdict=NO_QUESTION),
    "an empty turn": Case((WHO, NOTHING, SILENT, WHERE)),
    "thoughts": Case((WHO, THOUGHT, WHERE)),
    "a call": Case((*ADDED, ("user", "And?")), verdict=NO_TOOLS),
    "a result last": Case(ADDED, verdict=NO_TOOLS),
    "a tool finds": Case(FOUND, verdict=IN_RESULTS),
    "a tool finds, a foreign instruction": Case((BRIEF, *FOUND), verdict=IN_RESULTS),
    "a tool found, a question": Case((BRIEF, *FOUND, KIEL, WHO), verdict=IN_RESULTS),
    "two roles, an instruction": Case((BRIEF, WHERE), template=TWO_ROLES),
    "two roles, turns": Case((BRIEF, WHO, VUG, WHERE), template=TWO_ROLES),
    "documents": Case((WHERE,), (A, B)),
    "documents, spaces around": Case((SPACED,), (f" {A} ", B)),
    "documents, no question": Case((SILENT,), (A, B)),
    "documents, one twice": Case((WHERE,), (A, B, A)),
    "documents, one empty": Case((WHERE,), (A, " ", B)),
    "documents, all empty": Case((WHERE,), (" ",)),
    "documents, turns": Case((WHO, VUG, WHERE), (A, B)),
    "documents, the own instruction": Case((OWN_WORDS, WHERE), (A, B)),
    "documents, a foreign instruction": Case((BRIEF, WHERE), (A, B)),
    "documents, two instructions": Case((BRIEF, KIND, WHERE), (A, B)),
    "documents, an instruction twice": Case((BRIEF, BRIEF, WHERE), (A, B)),
    "documents, an instruction and turns": Case((BRIEF, WHO, VUG, WHERE), (A, B)),
    "documents, an instruction in between": Case((WHO, VUG, BRIEF, WHERE), (A, B)),
    "documents, two questions": Case((WHO, WHERE), (A, B)),
    "documents, two answers": Case((WHO, VUG, TESK, WHERE), (A, B)),
    "documents, an answer first": Case((ASK, WHERE), (A, B)),
    "documents, an answer last": Case((WHERE, KIEL), (A, B), NOTHING_ASKED),
    "documents, an empty turn": Case((WHO, NOTHING, SILENT, WHERE), (A, B)),
    "documents, a call": Case((*ADDED, ("user", "And?")), (A, B), A_PART),
    "documents, two roles, an instruction": Case(
        (BRIEF, WHO, VUG, WHERE), (A, B), template=TWO_ROLES
    ),
}


def engine_of(case: Case) -> tuple[Engine, list[str]]:
    """An engine that says nothing, and what it was asked."""
    seen: list[str] = []

    def script(prompt: str) -> str:
        seen.append(prompt)
        return "x"

    engine = Engine(
        *scripted(script, case.template, RESPONSE),
        store=MemoryStore(),
        template=PromptTemplate(system=OWN),
        policy=FullRecompute(),
        context_window=WINDOW,
    )
    return engine, seen


# ---------------------------------------------------------------------- the front ends
def by_langchain(case: Case) -> str:
    kinds = {"system": SystemMessage, "user": HumanMessage}
    messages: list[Any] = []
    for role, text, *rest in case.messages:
        if role == "assistant" and rest:
            call = {"name": rest[0], "args": rest[1], "id": "call00001"}
            messages.append(AIMessage(text, tool_calls=[call]))
        elif role == "assistant":
            messages.append(AIMessage(text))
        elif role == "tool":
            found = [Document(one) for one in rest[1:]]
            messages.append(
                ToolMessage(text, name=rest[0], tool_call_id="call00001", artifact=found)
            )
        else:
            messages.append(kinds[role](text))
    if case.documents:
        blocks: list[Any] = [document_block(Document(text)) for text in case.documents]
        last = messages[-1]
        messages[-1] = type(last)([*blocks, {"type": "text", "text": last.content}])
    engine, seen = engine_of(case)
    ChatKVCache(engine=engine, max_tokens=4).invoke(messages)
    return seen[-1]


class Found(BaseRetriever):
    """Finds what it was given."""

    def __init__(self, texts: Sequence[str]) -> None:
        super().__init__()
        self._texts = texts

    def _retrieve(self, query_bundle: Any) -> list[NodeWithScore]:
        return [
            NodeWithScore(node=TextNode(text=text), score=1 - at / 10)
            for at, text in enumerate(self._texts)
        ]


def by_llama_index(case: Case) -> str:
    messages = []
    for role, text, *rest in case.messages:
        blocks: list[Any] = [TextBlock(text=text)] if text else []
        more: dict[str, Any] = {}
        if role == "assistant" and rest:
            blocks.append(
                ToolCallBlock(tool_call_id="call00001", tool_name=rest[0], tool_kwargs=rest[1])
            )
        if role == "tool":
            more = {"additional_kwargs": {"tool_call_id": "call00001", "name": rest[0]}}
        messages.append(ChatMessage(role=MessageRole(role), blocks=blocks, **more))
    engine, seen = engine_of(case)
    llm = KVCacheLLM(engine=engine, max_new_tokens=4)
    for role, _, *rest in case.messages:
        if role == "tool":
            Found(rest[1:]).retrieve("?")  # as the tool did
    if not case.documents:
        llm.chat(messages)
        return seen[-1]
    chat = KVCacheChatEngine.from_defaults(Found(case.documents), llm=llm, skip_condense=True)
    chat.chat(case.messages[-1][1], chat_history=messages[:-1])
    return seen[-1]


def body_of(case: Case) -> dict[str, Any]:
    messages: list[dict[str, Any]] = []
    for role, text, *rest in case.messages:
        message: dict[str, Any] = {"role": role, "content": text}
        if role == "assistant" and rest:
            function = {"name": rest[0], "arguments": json.dumps(rest[1])}
            call = {"id": "call00001", "type": "function", "function": function}
            message["tool_calls"] = [call]
        if role == "tool":
            message |= {"tool_call_id": "call00001"}
        messages.append(message)
    body: dict[str, Any] = {"model": "tiny", "messages": messages, "max_tokens": 4}
    return {**body, "documents": list(case.documents)} if case.documents else body


class RefusedError(Exception):
    """What a server answered instead."""


async def posted(backend: Any, case: Case) -> None:
    app = build_app(backend, settings())
    async with client(app) as http:
        reply = await http.post("/v1/chat/completions", json=body_of(case))
        if reply.status_code != 200:
            raise RefusedError(reply.json()["error"]["message"])


def by_server(case: Case) -> str:
    engine, seen = engine_of(case)

    async def ask() -> None:
        backend = LocalBackend(engine, name="tiny")
        try:
            await posted(backend, case)
        finally:
            await backend.close()

    asyncio.run(ask())
    return seen[-1]


def before_vllm(case: Case) -> str:
    engine, _ = engine_of(case)
    backend = Scripted()
    asyncio.run(posted(backend, case))
    (work,) = backend.works
    prompts = Prompts(engine.tokenizer, engine.template, WINDOW)
    return str(engine.tokenizer.decode(prompts.write(work, work.chunks).ids))


FRONT_ENDS: Final[dict[str, Callable[[Case], str]]] = {
    "langchain": by_langchain,
    "llama-index": by_llama_index,
    "server": by_server,
    "vllm": before_vllm,
}


def read_of(front_end: str, case: Case) -> str:
    """What the model reads, or in one sentence why it reads nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return FRONT_ENDS[front_end](case)
        except (KVCacheRagError, RefusedError) as error:
            return f"refused: {error}"


# ---------------------------------------------------------------------- laws
@pytest.mark.parametrize("front_end", FRONT_ENDS)
@pytest.mark.parametrize("name", CASES)
def test_a_conversation_is_read_as_it_always_was(name: str, front_end: str) -> None:
    known = json.loads(GOLDEN.read_text(encoding="utf-8"))
    assert read_of(front_end, CASES[name]) == known[name][front_end]


def test_where_front_ends_differ_somebody_said_who_is_right() -> None:
    known = json.loads(GOLDEN.read_text(encoding="utf-8"))
    assert known.keys() == CASES.keys()
    for name, case in CASES.items():
        read = {
            "refused" if text.startswith("refused: ") else text for text in known[name].values()
        }
        assert bool(case.verdict) == (len(read) > 1), name
