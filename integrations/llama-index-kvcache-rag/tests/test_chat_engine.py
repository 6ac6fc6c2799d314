"""KVCacheChatEngine: the history stands behind the chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from chat_helpers import FACTS, HISTORY, NEXT, QUESTION, TURNS, WAYS, ask, make_index, said, texts
from llama_index.core import Document, VectorStoreIndex
from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.bridge.pydantic import Field
from llama_index.core.llms import MockLLM
from llama_index.core.memory import ChatMemoryBuffer, Memory
from llama_index.core.postprocessor import MetadataReplacementPostProcessor, SimilarityPostprocessor
from llama_index.core.vector_stores import MetadataFilter, MetadataFilters
from llama_index_helpers import cost
from small import make_model, make_tokenizer

from kvcache_rag import Engine, InvalidInputError
from kvcache_rag.errors import ContextTooLongError
from llama_index.kvcache_rag import HashEmbedding, KVCacheLLM, KVCacheQueryEngine
from llama_index.kvcache_rag.chat_engine import KVCacheChatEngine

if TYPE_CHECKING:
    from collections.abc import Callable

    from llama_index_helpers import Recorder

    Count = Callable[[], int]


@pytest.fixture
def index(llm: KVCacheLLM, embedding: HashEmbedding) -> VectorStoreIndex:
    return make_index(llm, embedding)


@pytest.fixture
def chat(index: VectorStoreIndex, llm: KVCacheLLM) -> KVCacheChatEngine:
    return KVCacheChatEngine.from_index(index, llm, skip_condense=True)


@pytest.fixture
def prompts(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Ids of every prompt that is answered from now on."""
    generate, seen = make_model().generate, list[list[int]]()

    def note(*args: Any, **options: Any) -> Any:
        ids = args[0] if args else options.get("inputs", options.get("input_ids"))
        seen.append(ids[0].tolist())
        return generate(*args, **options)

    monkeypatch.setattr(make_model(), "generate", note)
    return seen


# ---------------------------------------------------------------------- order and reuse
def test_history_stands_behind_the_chunks_in_the_very_ids(
    chat: KVCacheChatEngine, engine: Engine, prompts: list[list[int]]
) -> None:
    response = chat.chat(QUESTION, HISTORY)
    ids = engine.tokenize(QUESTION, texts(response), TURNS)
    assert prompts == [list(ids.all)]
    spoken = make_tokenizer().decode(ids.query)
    assert 0 <= spoken.find("Good day.") < spoken.find(QUESTION)
    assert len(texts(response)) == 2


@pytest.mark.parametrize("way", WAYS)
async def test_every_turn_answers_as_the_engine_does_and_reuses_all_chunks(
    chat: KVCacheChatEngine, engine: Engine, way: str, prefilled: Count
) -> None:
    prefilled()
    history, answers = list(TURNS), []
    for number, message in enumerate((QUESTION, NEXT)):
        answer, response = await ask(chat, way, message, None if number else HISTORY)
        found = cost(response)
        assert found["reused_tokens"] == sum(map(len, engine.tokenize("?", texts(response)).chunks))
        assert found["prefilled_tokens"] == found["misses"] == prefilled() == 0
        assert (found["references"], found["prefix_mismatch"]) == (2, False)
        expected = engine.generate(message, texts(response), history=history, max_new_tokens=6)
        assert answer == response.response == expected.text
        assert response.sources[0].raw_input == {"message": message}
        history += [{"role": "user", "content": message}, {"role": "assistant", "content": answer}]
        answers.append(answer)
    assert said(chat.chat_history) == [(one["role"], one["content"]) for one in history]
    assert answers[0] != engine.generate(QUESTION, texts(response), max_new_tokens=6).text


@pytest.mark.parametrize("kind", [KVCacheChatEngine, KVCacheQueryEngine])
def test_arguments_of_the_retriever_and_of_generation_are_options(
    index: VectorStoreIndex, llm: KVCacheLLM, kind: Any
) -> None:
    options: dict[str, Any] = {"policy": "full", "generate_kwargs": {"max_new_tokens": 3}}
    filters = MetadataFilters(filters=[MetadataFilter(key="nobody", value="has this")])
    for found, more in ((1, {"similarity_top_k": 1}), (0, {"filters": filters})):
        made = kind.from_index(index, llm, **options, **more)
        response = (made.chat if kind is KVCacheChatEngine else made.query)(QUESTION)
        assert len(response.source_nodes) == found
        if found:
            assert cost(response)["policy"] == "FullRecompute()"
            assert cost(response)["generated_tokens"] == len(str(response)) == 3


# ---------------------------------------------------------------------- condensing
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("skip", [False, True])
async def test_retrieval_uses_the_condensed_question(
    index: VectorStoreIndex, llm: KVCacheLLM, recorder: Recorder, way: str, skip: bool
) -> None:
    made = KVCacheChatEngine.from_index(
        index, llm, condense_prompt="{chat_history}|{question}|", skip_condense=skip
    )
    _, response = await ask(made, way, NEXT, HISTORY)
    prompt = f"user: Hello.\nassistant: Good day.|{NEXT}|"
    condensed = NEXT if skip else llm.complete(prompt).text
    sent = [event.prompt for event in recorder.named("LLMCompletionStartEvent")]
    assert sent.count(prompt) == (0 if skip else 2)
    assert [event.str_or_query_bundle for event in recorder.named("RetrievalStartEvent")] == [
        condensed
    ]
    assert response.sources[0].raw_input == {"message": condensed}
    assert said(made.chat_history)[2] == ("user", NEXT)


async def test_nothing_condensed_is_no_question(
    chat: KVCacheChatEngine, llm: KVCacheLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat._skip_condense = False
    monkeypatch.setitem(llm.generate_kwargs, "stop", [chr(code) for code in range(32, 127)])
    assert llm.complete("anything").text == ""
    for way in ("chat", "achat"):
        _, response = await ask(chat, way, QUESTION, HISTORY)
        assert response.sources[0].raw_input == {"message": QUESTION}


# ---------------------------------------------------------------------- memory
class Written(ChatMemoryBuffer):
    """Notes every write."""

    turns: list[list[str]] = Field(default_factory=list)

    def put_messages(self, messages: list[ChatMessage]) -> None:
        self.turns.append([one.content or "" for one in messages])
        super().put_messages(messages)


@pytest.mark.parametrize("way", WAYS)
async def test_each_turn_is_written_once(
    index: VectorStoreIndex, llm: KVCacheLLM, way: str
) -> None:
    written = Written(token_limit=2000, tokenizer_fn=list)
    chat = KVCacheChatEngine.from_index(index, llm, memory=written, skip_condense=True)
    given = list(HISTORY)
    answer, _ = await ask(chat, way, QUESTION, given)
    assert written.turns == [[QUESTION, answer]]
    assert len(chat.chat_history) == 4
    assert given == HISTORY  # not the list that memory appends to
    again, _ = await ask(chat, way, NEXT)
    assert written.turns == [[QUESTION, answer], [NEXT, again]]
    chat.reset()
    assert chat.chat_history == []


@pytest.mark.parametrize("way", WAYS)
async def test_llama_index_memory(
    index: VectorStoreIndex, llm: KVCacheLLM, engine: Engine, way: str
) -> None:
    memory = Memory.from_defaults(token_limit=500, tokenizer_fn=list)
    made = KVCacheChatEngine.from_index(index, llm, memory=memory, skip_condense=True)
    answer, _ = await ask(made, way, QUESTION, HISTORY)
    second, response = await ask(made, way, NEXT)
    kept = said(await memory.aget_all())
    assert [content for _, content in kept[2:]] == [QUESTION, answer, NEXT, second]
    history = [{"role": role, "content": content} for role, content in kept[:4]]
    expected = engine.generate(NEXT, texts(response), history=history, max_new_tokens=6)
    assert second == expected.text
    await memory.sql_store._async_engine.dispose()  # type: ignore[attr-defined]  # no public way


def test_memory_counts_in_the_models_tokens_and_leaves_room(
    make_engine: Callable[..., Engine], embedding: HashEmbedding
) -> None:
    llm = KVCacheLLM(engine=make_engine(context_window=420), max_new_tokens=10)
    history = [
        ChatMessage(role=role, content=f"{at:02}{'x' * 58}")
        for at in range(8)
        for role in (MessageRole.USER, MessageRole.ASSISTANT)
    ]
    made = KVCacheChatEngine.from_index(
        make_index(llm, embedding), llm, chat_history=history, skip_condense=True
    )
    found = cost(made.chat("q?"))
    # one token is one character: (420 - 6 - 10) / 2 = 202 of them are three messages and no turn
    # begins with an answer, so one turn is left
    assert 120 < found["query_tokens"] < 202
    assert (found["rounds"], found["dropped_chunks"]) == (1, 0)
    assert len(made.chat_history) == 18


def test_what_does_not_fit_says_so(
    chat: KVCacheChatEngine, index: VectorStoreIndex, engine: Engine
) -> None:
    with pytest.raises(ContextTooLongError, match="shorten the question"):
        chat.chat("x" * 5000)
    long = ChatMessage(role=MessageRole.USER, content="x" * 5000)
    with pytest.raises(ContextTooLongError, match="tokens over the model's context window"):
        chat.chat(QUESTION, [long])
    assert said(chat.chat_history) == said([long])
    with pytest.raises(ContextTooLongError, match="lower max_new_tokens"):
        KVCacheChatEngine.from_index(index, KVCacheLLM(engine=engine, max_new_tokens=5000))


# ---------------------------------------------------------------------- system prompt
@pytest.mark.parametrize("way", WAYS)
async def test_other_system_prompt_begins_the_question(
    index: VectorStoreIndex, llm: KVCacheLLM, engine: Engine, way: str
) -> None:
    sailor = "Speak like a sailor."
    made = KVCacheChatEngine.from_index(index, llm, system_prompt=sailor, skip_condense=True)
    with pytest.warns(UserWarning, match="behind the chunks"):
        first, response = await ask(made, way, QUESTION)
    _, second = await ask(made, way, NEXT)  # a second warning would be an error
    asked = f"{sailor}\n\n{QUESTION}"
    assert first == engine.generate(asked, texts(response), max_new_tokens=6).text
    for one in (response, second):
        assert (cost(one)["prefix_mismatch"], cost(one)["prefilled_tokens"]) == (True, 0)
    assert said(made.chat_history)[0] == ("user", QUESTION)


def test_own_system_prompt_is_where_it_belongs(
    index: VectorStoreIndex, llm: KVCacheLLM, chat: KVCacheChatEngine
) -> None:
    made = KVCacheChatEngine.from_index(index, llm, system_prompt=" Read. ", skip_condense=True)
    system = ChatMessage(role=MessageRole.SYSTEM, content="Read.")
    response = made.chat(QUESTION, [system, *HISTORY])
    assert cost(response)["prefix_mismatch"] is False
    assert str(response) == str(chat.chat(QUESTION, HISTORY))


# ---------------------------------------------------------------------- nodes
def test_node_postprocessors(chat: KVCacheChatEngine) -> None:
    chat._node_postprocessors = [MetadataReplacementPostProcessor(target_metadata_key="window")]
    response = chat.chat(QUESTION)
    assert texts(response)[0] == f"{FACTS[0]} And more."
    assert (cost(response)["misses"], cost(chat.chat(QUESTION))["misses"]) == (2, 0)


@pytest.mark.parametrize("way", WAYS)
async def test_nothing_found(index: VectorStoreIndex, llm: KVCacheLLM, way: str) -> None:
    cut: Any = [SimilarityPostprocessor(similarity_cutoff=2.0)]
    made = KVCacheChatEngine.from_index(
        index, llm, node_postprocessors=cut, empty_response="I do not know."
    )
    answer, response = await ask(made, way, QUESTION)
    assert answer == response.response == "I do not know."
    assert response.source_nodes == []
    found = cost(response)
    assert (found["prompt"], found["prompt_tokens"], found["rounds"]) == ("plain", 0, 0)
    assert said(made.chat_history) == [("user", QUESTION), ("assistant", "I do not know.")]


# ---------------------------------------------------------------------- construction
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context_prompt": "{context_str}"}, "context_prompt"),
        ({"context_refine_prompt": "x"}, "context_refine_prompt"),
        ({"llm": MockLLM()}, "KVCacheLLM, not a MockLLM"),
        ({"chat_history": HISTORY, "memory": ChatMemoryBuffer(token_limit=9)}, "not both"),
        ({"output_cls": Document}, "output_cls"),
    ],
)
def test_what_it_cannot_do(
    index: VectorStoreIndex, llm: KVCacheLLM, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidInputError, match=message):
        KVCacheChatEngine.from_index(index, **{"llm": llm, **options})
