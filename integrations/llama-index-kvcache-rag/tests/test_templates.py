"""Question templates and conversations around a prompt whose beginning is fixed."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import pytest
from chat_helpers import FACTS, HISTORY, QUESTION, TURNS, make_index
from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.prompts import ChatPromptTemplate
from llama_index.core.prompts import PromptTemplate as LlamaPrompt
from llama_index_helpers import cost, nodes
from small import make_model, make_tokenizer

from kvcache_rag import Engine, InvalidInputError, MemoryStore, PromptTemplate
from llama_index.kvcache_rag import (
    HashEmbedding,
    KVCacheLLM,
    KVCacheQueryEngine,
    KVCacheSynthesizer,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from llama_index_helpers import Recorder


FACT = FACTS[0]
CHAT = ChatPromptTemplate(
    [
        ChatMessage(role=MessageRole.SYSTEM, content="Read."),
        ChatMessage(role=MessageRole.USER, content="{context_str}\n--\nAsk {style}: {query_str}!"),
    ]
)


@pytest.mark.parametrize(
    "template", [LlamaPrompt("Read.\n{context_str}\n--\nAsk {style}: {query_str}!\n "), CHAT]
)
@pytest.mark.parametrize("history", [[], HISTORY])
def test_template_behind_the_context_is_the_question(
    llm: KVCacheLLM, recorder: Recorder, engine: Engine, template: Any, history: list[ChatMessage]
) -> None:
    template = template.partial_format(style="x")
    synthesizer = KVCacheSynthesizer(llm, text_qa_template=template, chat_history=history)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        response = synthesizer.synthesize(QUESTION, nodes(FACT))
    asked = f"--\nAsk x: {QUESTION}!"
    (start,) = recorder.named("LLMCompletionStartEvent")
    assert start.prompt.endswith(asked)
    assert cost(response)["prefix_mismatch"] is False
    turns = TURNS if history else []
    assert str(response) == engine.generate(asked, [FACT], history=turns, max_new_tokens=6).text


def test_other_text_before_the_context_warns_once_and_counts(
    llm: KVCacheLLM, engine: Engine
) -> None:
    template = LlamaPrompt("Other words.\n{context_str}\nQuery: {query_str}")
    synthesizer = KVCacheSynthesizer(llm, text_qa_template=template)
    with pytest.warns(UserWarning, match="at the beginning of the question"):
        response = synthesizer.synthesize(QUESTION, nodes(FACT))
    asked = f"Other words.\n\nQuery: {QUESTION}"
    assert str(response) == engine.generate(asked, [FACT], max_new_tokens=6).text
    assert cost(response)["prefix_mismatch"] is True
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        synthesizer.synthesize(QUESTION, nodes(FACT))
    assert synthesizer.prefix_mismatches == 2


@pytest.mark.parametrize("is_chat", [False, True])
@pytest.mark.parametrize(
    "text",
    ["{query_str}\n{context_str}", "Only {query_str}", "{context_str}{context_str}{query_str}"],
)
def test_template_that_cannot_be_cut_is_prefilled_plainly(
    engine: Engine, text: str, is_chat: bool
) -> None:
    llm = KVCacheLLM(engine=engine, max_new_tokens=6, is_chat_model=is_chat, match_chunks=False)
    synthesizer = KVCacheSynthesizer(llm, text_qa_template=LlamaPrompt(text))
    response = synthesizer.synthesize(QUESTION, nodes(FACT))
    prompt = text.format(query_str=QUESTION, context_str=FACT)
    message = ChatMessage(role=MessageRole.USER, content=prompt)
    expected = llm.complete(llm.chat_prompt([message]) if is_chat else prompt)
    assert str(response) == expected.text
    assert cost(response)["reused_tokens"] == 0
    spoken = synthesizer.with_history(HISTORY)
    with pytest.raises(InvalidInputError, match="context_str once and query_str behind it"):
        spoken.synthesize(QUESTION, nodes(FACT))
    blank = text.format(query_str="  ", context_str=FACT)
    message = ChatMessage(role=MessageRole.USER, content=blank)
    expected = llm.complete(llm.chat_prompt([message]) if is_chat else blank)
    assert str(synthesizer.synthesize("  ", nodes(FACT))) == expected.text


def test_prompts_are_read_and_replaced(llm: KVCacheLLM, embedding: HashEmbedding) -> None:
    engine, name = (
        KVCacheQueryEngine.from_index(make_index(llm, embedding), llm),
        "text_qa_template",
    )
    own = engine.get_prompts()[f"response_synthesizer:{name}"]
    assert own.format(context_str="C", query_str="Q") == "Read.\nC\nQ"
    mine = LlamaPrompt("Read.\n{context_str}\nQuery: {query_str}")
    engine.update_prompts({f"response_synthesizer:{name}": mine})
    assert engine.get_prompts()[f"response_synthesizer:{name}"] == mine
    assert str(engine.query(QUESTION))


def test_braces_of_the_instruction_are_left_alone(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(template=PromptTemplate(system='Reply as {"a": 1}.\n'))
    synthesizer = KVCacheSynthesizer(KVCacheLLM(engine=engine, max_new_tokens=2))
    own = synthesizer.get_prompts()["text_qa_template"]
    assert own.format(context_str="C", query_str="Q") == 'Reply as {"a": 1}.\nC\nQ'
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        synthesizer.update_prompts({"text_qa_template": own})
        response = synthesizer.synthesize(QUESTION, nodes(FACT))
    assert cost(response)["prefix_mismatch"] is False


# ---------------------------------------------------------------------- conversations
NODES = nodes(FACT)
HELLO, GOOD_DAY = HISTORY
STRICT = (
    "{% for m in messages %}{% set at = loop.index0 - (messages[0]['role'] == 'system') %}"
    "{% if at >= 0 and (m['role'] == 'user') != (at % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "<{{ m['role'] }}>{{ m['content'] }}{% endfor %}<assistant>"
)


def system(text: str) -> ChatMessage:
    return ChatMessage(role=MessageRole.SYSTEM, content=text)


def test_twin_within_a_conversation(llm: KVCacheLLM, engine: Engine, recorder: Recorder) -> None:
    alone = KVCacheSynthesizer(llm)
    twin = alone.with_history([HELLO, GOOD_DAY], streaming=True)
    streamed: Any = twin.synthesize(QUESTION, NODES)
    expected = engine.generate(QUESTION, [FACT], history=TURNS, max_new_tokens=6)
    assert "".join(streamed.response_gen) == expected.text
    (call,) = recorder.named("LLMCompletionStartEvent")
    assert call.prompt.endswith(f"{FACT}\n\nuser: Hello.\nassistant: Good day.\n{QUESTION}")
    plain = engine.generate(QUESTION, [FACT], max_new_tokens=6)
    assert str(alone.synthesize(QUESTION, NODES)) == plain.text != expected.text


def test_twins_warn_once_together(llm: KVCacheLLM) -> None:
    template = LlamaPrompt("Other.\n{context_str}\nQuery: {query_str}!")
    alone = KVCacheSynthesizer(llm, text_qa_template=template)
    with (
        pytest.warns(UserWarning, match=r"set it by KVCacheLLM\(system_prompt="),
        pytest.warns(UserWarning, match="text_qa_template has other text"),
    ):
        alone.with_history([system("Sing.")]).synthesize(QUESTION, NODES)
    twin = alone.with_history([system("Dance."), HELLO, GOOD_DAY])
    assert cost(twin.synthesize(QUESTION, NODES))["prefix_mismatch"] is True
    assert alone.prefix_mismatches == twin.prefix_mismatches == 2, "both at once count once"


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
            [{**one, "content": f"{one['content']}\n\n{one['content']}"} for one in TURNS],
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
    assert str(response) == expected.text
    assert cost(response)["query_tokens"] == expected.metrics.query_tokens
    assert cost(response)["prefix_mismatch"] is (asked.startswith(("Sing", "a")))


@pytest.mark.filterwarnings("ignore:a system message differs")
def test_behind_an_answer_a_blank_question_leaves_the_instruction(
    llm: KVCacheLLM, engine: Engine
) -> None:
    made = KVCacheSynthesizer(llm, chat_history=[system("Sing."), HELLO, GOOD_DAY])
    expected = engine.generate("Sing.", [FACT], history=TURNS, max_new_tokens=6)
    response = made.synthesize("  ", NODES)
    assert str(response) == expected.text
    assert cost(response)["query_tokens"] == expected.metrics.query_tokens
    with pytest.raises(InvalidInputError, match="question"):
        KVCacheSynthesizer(llm, chat_history=HISTORY).synthesize("  ", NODES)


def test_chat_template_whose_roles_must_alternate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make_tokenizer(), "chat_template", STRICT)
    engine = Engine(
        make_model(), make_tokenizer(), store=MemoryStore(), template=PromptTemplate(system="Read.")
    )
    llm = KVCacheLLM(engine=engine, max_new_tokens=4)
    messages = [HELLO, HELLO, GOOD_DAY, HELLO]
    assert str(KVCacheSynthesizer(llm, chat_history=messages).synthesize(QUESTION, NODES))
