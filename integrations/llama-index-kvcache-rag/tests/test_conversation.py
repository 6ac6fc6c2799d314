"""KVCacheSynthesizer within a conversation."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import pytest
from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.prompts import PromptTemplate as LlamaPrompt
from llama_index.core.schema import NodeWithScore, TextNode
from small import make_model, make_tokenizer

from kvcache_rag import Engine, InvalidInputError, MemoryStore, PromptTemplate
from llama_index.kvcache_rag import KVCacheLLM, KVCacheSynthesizer

if TYPE_CHECKING:
    from llama_index_helpers import Recorder

FACT = "The lighthouse keeper is called Marlow."
QUESTION = "Who keeps the lighthouse?"
NODES = [NodeWithScore(node=TextNode(text=FACT), score=1.0)]
HELLO = ChatMessage(role=MessageRole.USER, content="Hello.")
GOOD_DAY = ChatMessage(role=MessageRole.ASSISTANT, content="Good day.")
TURNS: list[Any] = [
    {"role": "user", "content": "Hello."},
    {"role": "assistant", "content": "Good day."},
]
STRICT = (
    "{% for m in messages %}{% set at = loop.index0 - (messages[0]['role'] == 'system') %}"
    "{% if at >= 0 and (m['role'] == 'user') != (at % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "<{{ m['role'] }}>{{ m['content'] }}{% endfor %}<assistant>"
)


def system(text: str) -> ChatMessage:
    return ChatMessage(role=MessageRole.SYSTEM, content=text)


def test_history_of_a_synthesizer(llm: KVCacheLLM, engine: Engine, recorder: Recorder) -> None:
    expected = engine.generate(QUESTION, [FACT], history=TURNS, max_new_tokens=6)
    given = KVCacheSynthesizer(llm, chat_history=[HELLO, GOOD_DAY])
    response = given.synthesize(QUESTION, NODES)
    assert str(response) == expected.text
    metrics = (response.metadata or {})["kv_cache"]
    assert metrics["query_tokens"] == expected.metrics.query_tokens
    (call,) = recorder.of("LLMCompletionStartEvent")
    assert call.prompt.endswith(f"{FACT}\n\nuser: Hello.\nassistant: Good day.\n{QUESTION}")


def test_twin_within_a_conversation(llm: KVCacheLLM, engine: Engine) -> None:
    alone = KVCacheSynthesizer(llm)
    twin = alone.with_history([HELLO, GOOD_DAY], streaming=True)
    streamed: Any = twin.synthesize(QUESTION, NODES)
    expected = engine.generate(QUESTION, [FACT], history=TURNS, max_new_tokens=6)
    assert "".join(streamed.response_gen) == expected.text
    plain = engine.generate(QUESTION, [FACT], max_new_tokens=6)
    assert str(alone.synthesize(QUESTION, NODES)) == plain.text != expected.text


def test_twins_warn_once_together(llm: KVCacheLLM) -> None:
    alone = KVCacheSynthesizer(llm)
    with pytest.warns(UserWarning, match=r"set it by KVCacheLLM\(system_prompt="):
        alone.with_history([system("Sing.")]).synthesize(QUESTION, NODES)
    twin = alone.with_history([system("Dance."), HELLO, GOOD_DAY])
    response = twin.synthesize(QUESTION, NODES)
    assert (response.metadata or {})["kv_cache"]["prefix_mismatch"] is True
    assert alone.prefix_mismatches == twin.prefix_mismatches == 2


@pytest.mark.filterwarnings("ignore:a system message differs")
@pytest.mark.parametrize(
    ("messages", "asked", "history"),
    [
        ([HELLO], f"Hello.\n\n{QUESTION}", []),
        ([HELLO, GOOD_DAY, HELLO], f"Hello.\n\n{QUESTION}", TURNS),
        ([system("Sing."), HELLO, GOOD_DAY], f"Sing.\n\n{QUESTION}", TURNS),
        ([system("a"), HELLO, GOOD_DAY, system("b"), system("a")], f"a\n\nb\n\n{QUESTION}", TURNS),
        ([system("Read."), HELLO, GOOD_DAY], QUESTION, TURNS),
        ([system("Sing."), HELLO], f"Sing.\n\nHello.\n\n{QUESTION}", []),
        (
            [
                HELLO,
                ChatMessage(role=MessageRole.ASSISTANT, content=""),
                ChatMessage(role=MessageRole.TOOL, content="42"),
                ChatMessage(role=MessageRole.FUNCTION, content="43"),
                ChatMessage(role=MessageRole.MODEL, content="Good day."),
            ],
            QUESTION,
            TURNS,
        ),
        (
            [HELLO, HELLO, GOOD_DAY, GOOD_DAY],
            QUESTION,
            [
                {"role": "user", "content": "Hello.\n\nHello."},
                {"role": "assistant", "content": "Good day.\n\nGood day."},
            ],
        ),
        (
            [ChatMessage(role=MessageRole.DEVELOPER, content="Sing."), GOOD_DAY],
            f"Sing.\n\n{QUESTION}",
            TURNS[1:],
        ),
    ],
)
def test_what_becomes_of_messages(
    llm: KVCacheLLM, engine: Engine, messages: list[ChatMessage], asked: str, history: list[Any]
) -> None:
    made = KVCacheSynthesizer(llm, chat_history=messages, generate_kwargs={"max_new_tokens": 12})
    response = made.synthesize(QUESTION, NODES)
    expected = engine.generate(asked, [FACT], history=history, max_new_tokens=12)
    metrics = (response.metadata or {})["kv_cache"]
    assert str(response) == expected.text
    assert metrics["query_tokens"] == expected.metrics.query_tokens
    assert metrics["prefix_mismatch"] is (asked.startswith(("Sing", "a")))


def test_chat_template_whose_roles_must_alternate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make_tokenizer(), "chat_template", STRICT)
    engine = Engine(
        make_model(), make_tokenizer(), store=MemoryStore(), template=PromptTemplate(system="Read.")
    )
    llm = KVCacheLLM(engine=engine, max_new_tokens=4)
    messages = [HELLO, HELLO, GOOD_DAY, HELLO]
    assert str(KVCacheSynthesizer(llm, chat_history=messages).synthesize(QUESTION, NODES))


def test_template_behind_the_context_comes_last(llm: KVCacheLLM, engine: Engine) -> None:
    template = LlamaPrompt("Read.\n{context_str}\nQuery: {query_str}!")
    made = KVCacheSynthesizer(llm, text_qa_template=template, chat_history=[HELLO, GOOD_DAY])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        response = made.synthesize(QUESTION, NODES)
    asked = f"Query: {QUESTION}!"
    expected = engine.generate(asked, [FACT], history=TURNS, max_new_tokens=6)
    assert str(response) == expected.text


def test_both_mismatches_count_once(llm: KVCacheLLM) -> None:
    template = LlamaPrompt("Other.\n{context_str}\nQuery: {query_str}!")
    made = KVCacheSynthesizer(llm, text_qa_template=template, chat_history=[system("Sing.")])
    with (
        pytest.warns(UserWarning, match="a system message differs"),
        pytest.warns(UserWarning, match="text_qa_template has other text"),
    ):
        made.synthesize(QUESTION, NODES)
    made.synthesize(QUESTION, NODES)
    assert made.prefix_mismatches == 2


def test_template_without_a_place_for_chunks_has_none_for_a_history(llm: KVCacheLLM) -> None:
    template = LlamaPrompt("{query_str}\n{context_str}")
    made = KVCacheSynthesizer(llm, text_qa_template=template, chat_history=[HELLO, GOOD_DAY])
    with pytest.raises(InvalidInputError, match="context_str once and query_str behind it"):
        made.synthesize(QUESTION, NODES)
