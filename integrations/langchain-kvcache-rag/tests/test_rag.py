"""`KVCacheRAG`: an ordinary Runnable whose documents are chunks."""

from __future__ import annotations

import asyncio
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable, RunnableLambda, RunnablePassthrough
from pydantic import Field

from kvcache_rag import FullRecompute, InvalidInputError
from kvcache_rag.errors import ContextTooLongError
from langchain_kvcache_rag import ChatKVCache, KVCacheRAG, create_kvcache_rag_chain

if TYPE_CHECKING:
    from langchain_core.callbacks import CallbackManagerForRetrieverRun

    from kvcache_rag import Engine

TEXTS = ["The cat sat on the mat.", "A dog ran away from home.", "It rained for three days."]
DOCUMENTS = [Document(text, id=f"d{index}") for index, text in enumerate(TEXTS)]
ASKED: Any = {"question": "Who sat?", "context": DOCUMENTS}


class Fixed(BaseRetriever):
    """Finds the same documents for everything, and remembers what it was asked."""

    documents: list[Document] = DOCUMENTS
    asked: list[str] = Field(default_factory=list)

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun
    ) -> list[Document]:
        self.asked.append(query)
        return self.documents


@pytest.fixture
def rag(llm: ChatKVCache) -> KVCacheRAG:
    return KVCacheRAG(llm=llm)


@pytest.fixture
def chain(rag: KVCacheRAG) -> Runnable[str, str]:
    start: Any = {"context": Fixed(), "question": RunnablePassthrough()}
    return start | rag | StrOutputParser()


@pytest.fixture
def forwards(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of the ids of every forward pass of the model."""
    shapes: list[tuple[int, ...]] = []
    real = engine.model.forward

    def forward(*arguments: Any, **options: Any) -> Any:
        ids = options.get("input_ids", arguments[0] if arguments else None)
        shapes.append(tuple(ids.shape))
        return real(*arguments, **options)

    monkeypatch.setattr(engine.model, "forward", forward)
    return shapes


def expected(engine: Engine, question: str = "Who sat?", **options: Any) -> str:
    return engine.generate(question, TEXTS, max_new_tokens=6, **options).text


# ---------------------------------------------------------------------- one question
def test_it_answers_as_the_engine_does_and_says_what_was_reused(
    rag: KVCacheRAG, engine: Engine
) -> None:
    engine.add(TEXTS)
    message = rag.invoke(ASKED)
    assert isinstance(message, AIMessage)
    assert message.content == expected(engine)
    cost = message.response_metadata["kv_cache"]
    chunks = sum(map(len, engine.tokenize("?", TEXTS).chunks))
    assert (cost["reused_tokens"], cost["prefilled_tokens"], cost["misses"]) == (chunks, 0, 0)
    assert cost["answers"][0]["ttft"] > 0
    usage = message.usage_metadata
    assert usage is not None
    assert usage["input_token_details"]["cache_read"] == chunks
    assert usage["input_tokens"] == len(engine.tokenize("Who sat?", TEXTS).all)


def test_it_composes_as_the_readme_says(chain: Runnable[str, str], engine: Engine) -> None:
    assert chain.invoke("Who sat?") == expected(engine)
    pieces = list(chain.stream("Who sat?"))
    assert "".join(pieces) == expected(engine)
    assert len(pieces) > 2, "token by token, not in one piece"


def test_an_input_that_comes_in_pieces_is_put_together(rag: KVCacheRAG, engine: Engine) -> None:
    pieces: list[Any] = [
        {"question": "Who "},
        {"context": DOCUMENTS[:1]},
        {"question": "sat?"},
        {"context": DOCUMENTS[1:]},
    ]
    assert "".join(str(one.content) for one in rag.transform(iter(pieces))) == expected(engine)


def test_history_stands_behind_the_chunks(rag: KVCacheRAG, engine: Engine) -> None:
    history = [("human", "Is it wet?"), AIMessage("No."), {"role": "user", "content": "And now?"}]
    said = [
        {"role": "user", "content": "Is it wet?"},
        {"role": "assistant", "content": "No."},
    ]
    message = rag.invoke({**ASKED, "chat_history": history})
    # Two user messages in a row are one turn.
    assert message.content == expected(engine, "And now?\n\nWho sat?", history=said)
    again = rag.invoke({**ASKED, "chat_history": [HumanMessage("Hm?"), AIMessage("Yes.")]})
    assert again.response_metadata["kv_cache"]["prefilled_tokens"] == 0


def test_without_documents_the_instruction_still_holds(rag: KVCacheRAG, engine: Engine) -> None:
    message = rag.invoke({"question": "Who sat?", "context": []})
    assert message.content == engine.generate("Who sat?", max_new_tokens=6).text
    cost = message.response_metadata["kv_cache"]
    assert cost["prefix_tokens"] == len(engine.tokenize("?").prefix)
    assert rag.batch([{"question": "Who sat?", "context": []}, ASKED])[0].content == message.content


def test_keywords_reach_the_model(rag: KVCacheRAG, llm: ChatKVCache, engine: Engine) -> None:
    long = expected(engine)
    assert rag.invoke(ASKED, max_tokens=2).usage_metadata["output_tokens"] == 2
    stop = long[3]
    for stopping in (rag.bind(stop=[stop]), KVCacheRAG(llm=llm.bind(stop=[stop]))):
        assert stopping.invoke(ASKED).content == long.split(stop)[0]
    full = rag.bind(policy=FullRecompute()).invoke(ASKED)
    assert full.response_metadata["kv_cache"]["reused_tokens"] == 0


# ---------------------------------------------------------------------- batches
def test_a_batch_is_one_padded_generate(
    rag: KVCacheRAG, engine: Engine, forwards: list[tuple[int, ...]]
) -> None:
    asked: list[Any] = [
        {"question": question, "context": DOCUMENTS[:count]}
        for question, count in (("Who?", 1), ("Who sat on it?", 3), ("What?", 2))
    ]
    engine.add(TEXTS)
    singles = [rag.invoke(one).content for one in asked]
    forwards.clear()
    assert [one.content for one in rag.batch(asked)] == singles
    assert {shape[0] for shape in forwards} == {3}
    assert len(forwards) <= 6


async def test_a_batch_of_a_whole_chain_is_one_generate_too(
    chain: Runnable[str, str], engine: Engine, forwards: list[tuple[int, ...]]
) -> None:
    engine.add(TEXTS)
    forwards.clear()
    questions = ["Who sat?", "Who ran?"]
    wanted = [expected(engine, question) for question in questions]
    for answers in (chain.batch(questions), await chain.abatch(questions)):
        assert answers == wanted
    assert {shape[0] for shape in forwards} == {1, 2}


def test_one_bad_question_spoils_only_itself(rag: KVCacheRAG, engine: Engine) -> None:
    asked: list[Any] = [
        ASKED,
        {"question": " ", "context": DOCUMENTS},
        {"question": "x" * 5000, "context": DOCUMENTS},
        "What?",
        {"question": "Who ran?", "context": DOCUMENTS},
    ]
    answers = rag.batch(asked, return_exceptions=True)
    assert answers[0].content == expected(engine)
    assert isinstance(answers[1], InvalidInputError)
    assert isinstance(answers[2], ContextTooLongError)
    assert isinstance(answers[3], InvalidInputError)
    assert answers[4].content == expected(engine, "Who ran?")
    with pytest.raises(InvalidInputError, match="question"):
        rag.batch(asked)


# ---------------------------------------------------------------------- events
async def test_events_tell_the_whole_story(chain: Runnable[str, str], engine: Engine) -> None:
    events = [event async for event in chain.astream_events("Who sat?", version="v2")]
    kinds = [event["event"] for event in events]
    for kind in ("on_retriever_end", "on_chat_model_start", "on_chat_model_end"):
        assert kinds.count(kind) == 1, kind
    named = [event for event in events if event["name"] == "KVCacheRAG"]
    assert {"on_chain_start", "on_chain_stream", "on_chain_end"} <= {
        event["event"] for event in named
    }
    pieces = [e["data"]["chunk"].content for e in events if e["event"] == "on_chat_model_stream"]
    assert "".join(pieces) == expected(engine)
    (end,) = [event for event in events if event["event"] == "on_chat_model_end"]
    assert end["data"]["output"].response_metadata["kv_cache"]["prefix_tokens"] > 0
    (model,) = [event for event in events if event["event"] == "on_chat_model_start"]
    assert named[0]["run_id"] in model["parent_ids"]


def test_a_config_reaches_every_part(rag: KVCacheRAG) -> None:
    seen: list[Any] = []

    class Handler(BaseCallbackHandler):
        def on_chat_model_start(self, serialized: Any, messages: Any, **kwargs: Any) -> None:
            seen.append((kwargs["tags"], kwargs["metadata"]["tenant"]))

    config: Any = {"callbacks": [Handler()], "tags": ["mine"], "metadata": {"tenant": "a"}}
    rag.invoke(ASKED, config)
    list(rag.stream(ASKED, config))
    rag.batch([ASKED, ASKED], config)
    assert len(seen) == 4
    assert all("mine" in tags and tenant == "a" for tags, tenant in seen)


# ---------------------------------------------------------------------- giving up
def _endless(llm: ChatKVCache) -> Runnable[str, str]:
    start: Any = {"context": Fixed(), "question": RunnablePassthrough()}
    return (
        start | KVCacheRAG(llm=llm.bind(max_tokens=2000, min_new_tokens=2000)) | StrOutputParser()
    )


@pytest.mark.parametrize("read", [1, 3])
def test_a_closed_retrieval_chain_frees_the_model_at_once(
    llm: ChatKVCache, engine: Engine, forwards: list[tuple[int, ...]], read: int
) -> None:
    engine.add(TEXTS)
    endless = llm.bind(max_tokens=2000, min_new_tokens=2000)
    chain = create_kvcache_rag_chain(Fixed(), endless)
    answers = 0
    with closing(chain.stream({"input": "Who sat?"})) as pieces:
        for piece in pieces:
            answers += "answer" in piece
            if answers == read:
                break
    computed = len(forwards)
    assert computed < 500
    assert expected(engine)
    assert len(forwards) <= computed + 7


@pytest.mark.parametrize("way", ["ainvoke", "abatch"])
async def test_a_cancelled_call_stops_at_the_next_token(
    llm: ChatKVCache, engine: Engine, forwards: list[tuple[int, ...]], way: str
) -> None:
    engine.add(TEXTS)
    chain = _endless(llm)
    asking: Any = chain.ainvoke("Who?") if way == "ainvoke" else chain.abatch(["Who?", "What?"])
    task = asyncio.create_task(asking)
    while not forwards:
        await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert expected(engine)
    assert len(forwards) < 1000


# ---------------------------------------------------------------------- bad input
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("Who?", "not a str"),
        ({"context": DOCUMENTS}, '"question"'),
        ({"question": "", "context": DOCUMENTS}, '"question"'),
        ({"question": 3, "context": DOCUMENTS}, '"question"'),
        ({"question": "Who?"}, '"context"'),
        ({"question": "Who?", "context": "pasted text"}, "not joined to a text"),
        ({"question": "Who?", "context": ["text"]}, "list of Documents"),
        ({**ASKED, "chat_history": [object()]}, '"chat_history"'),
    ],
)
async def test_bad_input_is_told_in_one_sentence(rag: KVCacheRAG, given: Any, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        rag.invoke(given)
    with pytest.raises(InvalidInputError, match=message):
        await rag.ainvoke(given)
    with pytest.raises(InvalidInputError, match=message):
        list(rag.stream(given))
    with pytest.raises(InvalidInputError, match=message):
        _ = [piece async for piece in rag.astream(given)]


def test_it_says_what_it_takes_and_gives(rag: KVCacheRAG) -> None:
    schema = rag.get_input_jsonschema()["$defs"]["RagInput"]
    assert set(schema["properties"]) == {"question", "context", "chat_history"}
    assert schema["required"] == ["question", "context"]
    assert "KVCacheRAG" in str(rag.get_graph().nodes)


# ---------------------------------------------------------------------- the whole chain
def stock_chain(retriever: BaseRetriever, answers: Runnable[Any, Any]) -> Runnable[Any, Any]:
    """What `create_retrieval_chain` of langchain-classic 1.0 makes of its two arguments."""
    found = RunnableLambda(lambda given: given["input"]) | retriever
    return RunnablePassthrough.assign(
        context=found.with_config(run_name="retrieve_documents")
    ).assign(answer=answers)


def test_it_stands_in_the_stock_retrieval_chain(rag: KVCacheRAG, engine: Engine) -> None:
    chain = stock_chain(Fixed(), rag)
    message = chain.invoke({"input": "Who sat?"})["answer"]
    assert message.content == expected(engine)
    pieces = [piece["answer"] for piece in chain.stream({"input": "Who sat?"}) if "answer" in piece]
    assert "".join(piece.content for piece in pieces) == expected(engine)
    spoken = {"input": "Who sat?", "chat_history": [HumanMessage("Wet?"), AIMessage("No.")]}
    said = [{"role": "user", "content": "Wet?"}, {"role": "assistant", "content": "No."}]
    assert chain.invoke(spoken)["answer"].content == expected(engine, history=said)


def test_a_question_stands_before_an_input(rag: KVCacheRAG, engine: Engine) -> None:
    assert rag.invoke({**ASKED, "input": "What else?"}).content == expected(engine)


def test_the_retrieval_chain_gives_the_stock_keys(llm: ChatKVCache, engine: Engine) -> None:
    chain = create_kvcache_rag_chain(Fixed(), llm)
    answered = chain.invoke({"input": "Who sat?", "mine": 1})
    assert answered.pop("kv_cache")["answered_from"] == [*range(len(DOCUMENTS))]
    assert answered == {
        "input": "Who sat?",
        "mine": 1,
        "context": DOCUMENTS,
        "answer": expected(engine),
    }


def test_the_retrieval_chain_streams_its_answer(llm: ChatKVCache, engine: Engine) -> None:
    chain = create_kvcache_rag_chain(Fixed(), llm)
    pieces = list(chain.stream({"input": "Who sat?"}))
    answers = [piece["answer"] for piece in pieces if "answer" in piece]
    assert "".join(answers) == expected(engine)
    assert len(answers) > 2
    assert [piece["context"] for piece in pieces if "context" in piece] == [DOCUMENTS]
    (cost,) = [piece["kv_cache"] for piece in pieces if "kv_cache" in piece]
    assert cost["answered_from"] == [*range(len(DOCUMENTS))]
    assert "kv_cache" in pieces[-1]


def test_a_retriever_of_its_own_sees_the_whole_input(llm: ChatKVCache, engine: Engine) -> None:
    seen: list[Any] = []

    def find(given: dict[str, Any]) -> list[Document]:
        seen.append(given)
        return DOCUMENTS

    history = [HumanMessage("Is it wet?"), AIMessage("No.")]
    given = {"input": "Who sat?", "chat_history": history}
    answered = create_kvcache_rag_chain(RunnableLambda(find), llm).invoke(given)
    assert seen == [given]
    said = [{"role": "user", "content": "Is it wet?"}, {"role": "assistant", "content": "No."}]
    assert answered["answer"] == expected(engine, history=said)


@pytest.mark.parametrize("given", [{}, {"input": None}, {"question": "Who?"}])
def test_the_retrieval_chain_says_what_it_needs(llm: ChatKVCache, given: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError, match="input"):
        create_kvcache_rag_chain(Fixed(), llm).invoke(given)


def test_a_system_message_in_the_history_is_not_lost(rag: KVCacheRAG, engine: Engine) -> None:
    with pytest.warns(UserWarning, match="system_prompt"):
        message = rag.invoke({**ASKED, "chat_history": [SystemMessage("Answer in French.")]})
    assert message.content == expected(engine, "Answer in French.\n\nWho sat?")
    assert message.response_metadata["kv_cache"]["prefix_mismatch"]
