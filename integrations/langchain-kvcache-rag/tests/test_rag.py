"""`KVCacheRAG`: an ordinary Runnable whose documents are chunks."""

from __future__ import annotations

import asyncio
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest
from chat_model_helpers import Recorder
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable, RunnableLambda, RunnablePassthrough

from kvcache_rag import InvalidInputError
from kvcache_rag.errors import ContextTooLongError
from langchain_kvcache_rag import ChatKVCache, KVCacheRAG, create_kvcache_rag_chain, document_block

if TYPE_CHECKING:
    from kvcache_rag import Engine

TEXTS = ["The cat sat on the mat.", "A dog ran away from home.", "It rained for three long days."]
DOCUMENTS = [Document(text, id=f"d{index}") for index, text in enumerate(TEXTS)]
ASKED: Any = {"question": "Who sat?", "context": DOCUMENTS}
SPOKEN = [HumanMessage("Is it wet?"), AIMessage("No.")]
TURNS = [{"role": "user", "content": "Is it wet?"}, {"role": "assistant", "content": "No."}]


class Fixed(BaseRetriever):
    """Finds the same documents for everything."""

    def _get_relevant_documents(self, query: str, **_: Any) -> list[Document]:
        return DOCUMENTS


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


def test_it_composes_as_the_readme_says(chain: Runnable[str, str], engine: Engine) -> None:
    assert chain.invoke("Who sat?") == expected(engine)
    pieces = list(chain.stream("Who sat?"))
    assert "".join(pieces) == expected(engine)
    assert len(pieces) > 2, "token by token, not in one piece"


def test_an_input_that_comes_in_pieces_is_put_together(rag: KVCacheRAG, engine: Engine) -> None:
    pieces: list[Any] = [
        *({"question": "Who "}, {"context": DOCUMENTS[:1]}),
        *(
            {"question": "sat?"},
            {"context": DOCUMENTS[1:]},
            {"input": "A question stands before it."},
        ),
    ]
    assert "".join(str(one.content) for one in rag.transform(iter(pieces))) == expected(engine)


def test_history_stands_behind_the_chunks(rag: KVCacheRAG, engine: Engine) -> None:
    history = [("human", "Is it wet?"), AIMessage("No."), {"role": "user", "content": "And now?"}]
    message = rag.invoke({**ASKED, "chat_history": history})
    # Two user messages in a row are one turn.
    assert message.content == expected(engine, "And now?\n\nWho sat?", history=TURNS)
    again = rag.invoke({**ASKED, "chat_history": [HumanMessage("Hm?"), AIMessage("Yes.")]})
    assert again.response_metadata["kv_cache"]["prefilled_tokens"] == 0


def test_without_documents_the_instruction_still_holds(rag: KVCacheRAG, engine: Engine) -> None:
    nothing: Any = {"question": "Who sat?", "context": []}
    message = rag.invoke(nothing)
    assert message.content == engine.generate("Who sat?", max_new_tokens=6).text
    prefix = len(engine.tokenize("?").prefix)
    assert message.response_metadata["kv_cache"]["prefix_tokens"] == prefix
    assert rag.batch([nothing, ASKED])[0].content == message.content


def test_keywords_reach_the_model(rag: KVCacheRAG, llm: ChatKVCache, engine: Engine) -> None:
    long = expected(engine)
    assert rag.invoke(ASKED, max_tokens=2).content == long[:2]
    stop = long[3]
    for stopping in (rag.bind(stop=[stop]), KVCacheRAG(llm=llm.bind(stop=[stop]))):
        assert stopping.invoke(ASKED).content == long.split(stop)[0]


# ---------------------------------------------------------------------- batches


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
    first, *failures, last = rag.batch(asked, return_exceptions=True)
    assert (first.content, last.content) == (expected(engine), expected(engine, "Who ran?"))
    errors = [InvalidInputError, ContextTooLongError, InvalidInputError]
    assert [type(one) for one in failures] == errors
    with pytest.raises(InvalidInputError, match="question"):
        rag.batch(asked)


# ---------------------------------------------------------------------- events
async def test_events_tell_the_whole_story(chain: Runnable[str, str], engine: Engine) -> None:
    events = [event async for event in chain.astream_events("Who sat?", version="v2")]
    for kind in ("on_retriever_end", "on_chat_model_start", "on_chat_model_end"):
        assert [event["event"] for event in events].count(kind) == 1, kind
    named = [event for event in events if event["name"] == "KVCacheRAG"]
    kinds = {event["event"] for event in named}
    assert {"on_chain_start", "on_chain_stream", "on_chain_end"} <= kinds
    pieces = [e["data"]["chunk"].content for e in events if e["event"] == "on_chat_model_stream"]
    assert "".join(pieces) == expected(engine)
    (model,) = [event for event in events if event["event"] == "on_chat_model_start"]
    assert named[0]["run_id"] in model["parent_ids"]


def test_a_config_reaches_every_part(rag: KVCacheRAG) -> None:
    recorder = Recorder()
    config: Any = {"callbacks": [recorder], "tags": ["mine"], "metadata": {"tenant": "a"}}
    rag.invoke(ASKED, config)
    list(rag.stream(ASKED, config))
    rag.batch([ASKED, ASKED], config)
    assert len(recorder.starts) == 4
    for start in recorder.starts:
        assert "mine" in start["tags"]
        assert start["metadata"]["tenant"] == "a"


# ---------------------------------------------------------------------- giving up


@pytest.mark.parametrize("read", [1, 3])
def test_a_closed_retrieval_chain_frees_the_model_at_once(
    llm: ChatKVCache, engine: Engine, forwards: list[tuple[int, ...]], read: int
) -> None:
    endless = llm.bind(max_tokens=2000, min_new_tokens=2000)
    answers = 0
    with closing(create_kvcache_rag_chain(Fixed(), endless).stream({"input": "Who?"})) as pieces:
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
    endless = KVCacheRAG(llm=llm.bind(max_tokens=2000, min_new_tokens=2000))
    asking: Any = endless.ainvoke(ASKED) if way == "ainvoke" else endless.abatch([ASKED, ASKED])
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
        ({**ASKED, "chat_history": "Human: hello"}, '"chat_history" must be a list of messages'),
        ({**ASKED, "chat_history": {"human": "hello"}}, '"chat_history" must be a list'),
        ({**ASKED, "chat_history": [("nobody", "hello")]}, '"chat_history" must be a list'),
    ],
)
async def test_bad_input_is_told_in_one_sentence(rag: KVCacheRAG, given: Any, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message) as caught:
        rag.invoke(given)
    assert "\n" not in str(caught.value)
    with pytest.raises(InvalidInputError, match=message):
        list(rag.stream(given))
    with pytest.raises(InvalidInputError, match=message):
        _ = [piece async for piece in rag.astream(given)]


# ---------------------------------------------------------------------- the whole chain
def stock_chain(retriever: BaseRetriever, answers: Runnable[Any, Any]) -> Runnable[Any, Any]:
    """What `create_retrieval_chain` of langchain-classic 1.0 makes of its two arguments."""
    found = RunnableLambda(lambda given: given["input"]) | retriever
    return RunnablePassthrough.assign(
        context=found.with_config(run_name="retrieve_documents")
    ).assign(answer=answers)


def test_it_stands_in_the_stock_retrieval_chain(rag: KVCacheRAG, engine: Engine) -> None:
    chain = stock_chain(Fixed(), rag)
    pieces = [piece["answer"] for piece in chain.stream({"input": "Who sat?"}) if "answer" in piece]
    assert "".join(piece.content for piece in pieces) == expected(engine)
    spoken = {"input": "Who sat?", "chat_history": SPOKEN}
    assert chain.invoke(spoken)["answer"].content == expected(engine, history=TURNS)


def test_the_retrieval_chain_gives_the_stock_keys(llm: ChatKVCache, engine: Engine) -> None:
    answered = create_kvcache_rag_chain(Fixed(), llm).invoke({"input": "Who sat?", "mine": 1})
    assert answered.pop("kv_cache")["answered_from"] == [*range(len(DOCUMENTS))]
    stock = {"input": "Who sat?", "context": DOCUMENTS, "answer": expected(engine)}
    assert answered == {**stock, "mine": 1}


def test_the_retrieval_chain_streams_its_answer(llm: ChatKVCache, engine: Engine) -> None:
    pieces = list(create_kvcache_rag_chain(Fixed(), llm).stream({"input": "Who sat?"}))
    answers = [piece["answer"] for piece in pieces if "answer" in piece]
    assert "".join(answers) == expected(engine)
    assert len(answers) > 2
    assert [piece["context"] for piece in pieces if "context" in piece] == [DOCUMENTS]
    assert ["kv_cache" in piece for piece in pieces].index(True) == len(pieces) - 1


def test_a_retriever_of_its_own_sees_the_whole_input(llm: ChatKVCache, engine: Engine) -> None:
    seen: list[Any] = []
    find = RunnableLambda(lambda given: seen.append(given) or DOCUMENTS)
    given = {"input": "Who sat?", "chat_history": SPOKEN}
    answered = create_kvcache_rag_chain(find, llm).invoke(given)
    assert seen == [given]
    assert answered["answer"] == expected(engine, history=TURNS)


@pytest.mark.parametrize("given", [{}, {"input": None}, {"question": "Who?"}])
def test_the_retrieval_chain_says_what_it_needs(llm: ChatKVCache, given: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError, match="input"):
        create_kvcache_rag_chain(Fixed(), llm).invoke(given)


def test_a_system_message_in_the_history_is_not_lost(rag: KVCacheRAG, engine: Engine) -> None:
    asked: Any = {**ASKED, "chat_history": [SystemMessage("Answer in French.")]}
    with pytest.warns(UserWarning, match="system_prompt"):
        message = rag.invoke(asked)
    assert message.content == expected(engine, "Answer in French.\n\nWho sat?")
    assert message.response_metadata["kv_cache"]["prefix_mismatch"]
    assert rag.invoke(asked).content == message.content  # a second warning would be an error


def test_arguments_that_mean_nothing_are_said(llm: ChatKVCache, engine: Engine) -> None:
    with pytest.raises(InvalidInputError, match="prompt is no argument of KVCacheRAG"):
        KVCacheRAG(llm=llm, prompt="Be brief.")
    wrong: Any = engine
    with pytest.raises(InvalidInputError, match="a chat model such as ChatKVCache, not a Engine"):
        KVCacheRAG(wrong)
    assert KVCacheRAG(llm=llm, name="step").name == "step"


# ---------------------------------------------------------------------- scores
def scored(*scores: float | None) -> list[Document]:
    return [
        Document(text, metadata={} if score is None else {"relevance_score": score})
        for text, score in zip(TEXTS, scores, strict=True)
    ]


def fresh(message: Any) -> int:
    """Tokens that were computed with the question: those of the best document."""
    return int(message.response_metadata["kv_cache"]["fresh_tokens"])


async def test_a_batch_has_scores_of_each_question(rag: KVCacheRAG, engine: Engine) -> None:
    given = (scored(0.1, 0.2, 0.9), scored(None, None, None), scored(0.1, 0.9, 0.2))
    every: list[Any] = [{"question": "Who sat?", "context": one} for one in given]
    sizes = [len(chunk) for chunk in engine.tokenize("?", TEXTS).chunks]
    for batch in (rag.batch(every, policy="bestlast"), await rag.abatch(every, policy="bestlast")):
        assert [fresh(one) for one in batch] == [sizes[2], sizes[0], sizes[1]]
        assert [one.content for one in batch] == [
            rag.invoke(one, policy="bestlast").content for one in every
        ]


@pytest.mark.filterwarnings("ignore:chat template or tokenizer")  # the reader writes JSON
def test_scores_of_documents_count_beside_tools_too(llm: ChatKVCache) -> None:
    tool = {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}

    def asked(*scores: float | None) -> int:
        blocks: list[Any] = [*map(document_block, scored(*scores)), "Who sat?"]
        options: Any = {"policy": "bestlast", "max_new_tokens": 2}
        return fresh(llm.bind_tools([tool]).invoke([HumanMessage(blocks)], **options))

    # The last is the longest.
    assert asked(None, None, None) == asked(0.9, 0.2, 0.1) < asked(0.1, 0.2, 0.9)


def test_documents_of_the_last_question_are_the_best(rag: KVCacheRAG, engine: Engine) -> None:
    first, *found = DOCUMENTS
    history = [HumanMessage([document_block(first), "Who sat?"]), AIMessage("The cat.")]
    given: Any = {"question": "Who ran?", "context": found, "chat_history": history}
    size = len(engine.tokenize("?", TEXTS).chunks[1])
    assert fresh(rag.invoke(given, policy="bestlast")) == size
