"""What went wrong once in the chat model and in `KVCacheRAG`, and must not again."""

from __future__ import annotations

import asyncio
import copy
import enum
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from chat_model_helpers import LONG, Steps, details, over
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, trim_messages
from langchain_core.runnables import ConfigurableField
from small import make_model, make_tokenizer

from kvcache_rag import Engine, FullRecompute, InvalidInputError, MemoryStore
from langchain_kvcache_rag import settings, structured
from langchain_kvcache_rag.chat_model import ChatKVCache
from langchain_kvcache_rag.rag import KVCacheRAG

if TYPE_CHECKING:
    from collections.abc import Callable

TWO_ROLES = (
    "{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}"
    "<{{ message['role'] }}>{{ message['content'] }}</s>"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
BOOLEAN = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}


def test_an_interrupt_stops_a_batch(
    llm: ChatKVCache, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupting(Steps):
        def __call__(self, input_ids: Any, scores: Any) -> Any:
            if self.count == 3:
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            return super().__call__(input_ids, scores)

    steps, together = Interrupting(), engine.generate_batch

    def slow(questions: Any, **options: Any) -> Any:
        return together(questions, **options, logits_processor=[steps])

    monkeypatch.setattr(engine, "generate_batch", slow)
    # A shell's background job starts with interrupts ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            llm.batch([over("what?", "one"), over("who?", "one")], **LONG)
    finally:
        signal.signal(signal.SIGINT, before)
    assert steps.count == 3


async def test_a_row_that_no_message_can_be_made_of_spoils_only_itself(llm: ChatKVCache) -> None:
    inputs: list[Any] = [over("what?", "one"), [5], over("who?", "two")]
    for answers in (
        llm.batch(inputs, return_exceptions=True),
        await llm.abatch(inputs, return_exceptions=True),
    ):
        assert isinstance(answers[1], NotImplementedError)
        assert [answers[0].text, answers[2].text] == [
            llm.invoke(inputs[0]).text,
            llm.invoke(inputs[2]).text,
        ]


def test_a_config_cannot_change_a_given_engine(llm: ChatKVCache) -> None:
    other: Any = llm.configurable_fields(system_prompt=ConfigurableField(id="system"))
    assert other.invoke("Hello").text == llm.invoke("Hello").text
    changed = other.with_config(configurable={"system": "Be brief."})
    for question in ("Hello", over("what?", "one")):
        with pytest.raises(InvalidInputError, match="system_prompt belong to the engine"):
            changed.invoke(question)


@pytest.fixture
def opened(make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The context window of each engine that is opened."""
    windows: list[Any] = []

    def open_engine(*_: Any, context_window: int | None, **__: Any) -> Engine:
        windows.append(context_window)
        time.sleep(0.05)
        return make_engine(context_window=context_window)

    monkeypatch.setattr(settings, "open_engine", open_engine)
    return windows


def test_what_a_config_loads_is_loaded_once(opened: list[Any]) -> None:
    llm: Any = ChatKVCache(model="m", max_tokens=6).configurable_fields(
        context_window=ConfigurableField(id="window")
    )
    for window in (500, None, 600, 500, None, 600):
        engine_of = llm.with_config(configurable={"window": window} if window else {})
        engine_of.invoke("Hello")
    assert opened == [500, None, 600]


def test_copies_with_other_settings_get_engines_of_their_own(opened: list[Any]) -> None:
    llm = ChatKVCache(model="m", max_tokens=6)
    copies = [llm.model_copy(update={"context_window": window}) for window in (500, 600, 700)]
    threads = [threading.Thread(target=lambda one=one: one.engine) for one in copies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [one.engine.context_window for one in copies] == [500, 600, 700]
    assert sorted(opened) == [500, 600, 700]


async def test_loading_for_a_config_does_not_block_the_loop(
    opened: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, slow = threading.Event(), settings.open_engine

    def open_slowly(*arguments: Any, **options: Any) -> Engine:
        begin.wait(20)
        return slow(*arguments, **options)

    monkeypatch.setattr(settings, "open_engine", open_slowly)
    llm = ChatKVCache(model="m", max_tokens=6)
    first = asyncio.create_task(llm.ainvoke("Hello"))
    other = llm.model_copy(update={"context_window": 500})
    await asyncio.sleep(0.1)
    second = asyncio.create_task(other.ainvoke("Hello"))
    await asyncio.sleep(0.1)
    begin.set()  # a loop that waited for the first model would not come here
    assert (await first).text == (await second).text
    assert sorted(opened, key=str) == [500, None]


def test_tokens_of_documents_are_counted(llm: ChatKVCache) -> None:
    asked = over("what?", "x" * 500)
    assert llm.get_num_tokens_from_messages(asked) > 500
    history = [*over("what?", "x" * 500), AIMessage("a"), HumanMessage("and?")]
    assert trim_messages(history, max_tokens=100, token_counter=llm) == history[1:]
    counting = llm.model_copy(update={"custom_get_token_ids": lambda text: [0] * len(text)})
    assert counting.get_num_tokens_from_messages(asked) == len("Human: what?") + 500


@pytest.mark.parametrize(
    "messages",
    [
        [SystemMessage("Be brief."), HumanMessage("hi")],
        [HumanMessage("a"), AIMessage("b"), SystemMessage("Be brief."), HumanMessage("c")],
        [SystemMessage("Be brief.")],
    ],
)
def test_a_template_without_a_system_role_is_given_none(messages: list[Any]) -> None:
    tokenizer = copy.deepcopy(make_tokenizer())
    tokenizer.chat_template = TWO_ROLES
    engine = Engine(make_model(), tokenizer, store=MemoryStore())
    llm = ChatKVCache(engine=engine, max_tokens=6)
    told = [HumanMessage(one.text) if one.type == "system" else one for one in messages]
    assert llm.invoke(messages).text == llm.invoke(told).text
    with pytest.raises(InvalidInputError, match="roles must alternate"):
        llm.invoke([AIMessage("hello"), HumanMessage("hi")])


def test_what_is_not_kept_is_not_counted_as_written_to_the_cache(llm: ChatKVCache) -> None:
    asked = over("what?", "one")
    assert details(llm.invoke(asked, policy=FullRecompute()))["cache_creation"] == 0
    assert details(llm.invoke(asked))["cache_creation"] > 0


def test_a_choice_of_no_tool_is_refused_in_a_sentence(llm: ChatKVCache) -> None:
    def look_up(name: str) -> str:
        """Look a name up."""
        return name

    with pytest.raises(InvalidInputError, match="tool_choice must be"):
        llm.bind_tools([look_up], tool_choice="look")


def test_arguments_that_mean_nothing_are_said(llm: ChatKVCache, engine: Engine) -> None:
    with pytest.raises(InvalidInputError, match="prompt is no argument of KVCacheRAG"):
        KVCacheRAG(llm=llm, prompt="Be brief.")
    wrong: Any = engine
    with pytest.raises(InvalidInputError, match="a chat model such as ChatKVCache, not a Engine"):
        KVCacheRAG(wrong)
    assert KVCacheRAG(llm=llm, name="step").name == "step"


@pytest.mark.parametrize("history", ["Human: hello", {"human": "hello"}, [("nobody", "hello")]])
def test_a_history_that_is_no_list_of_messages_is_said(llm: ChatKVCache, history: Any) -> None:
    given: Any = {"question": "who?", "context": [Document("one")], "chat_history": history}
    with pytest.raises(InvalidInputError, match='"chat_history" must be a list') as caught:
        KVCacheRAG(llm=llm).invoke(given)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "written",
    [
        BOOLEAN,
        {"name": "f", "parameters": BOOLEAN},
        {"name": "f", "description": "d", "input_schema": BOOLEAN},
        {"type": "function", "function": {"name": "f", "parameters": BOOLEAN}},
        {"type": "json_schema", "json_schema": {"name": "f", "strict": True, "schema": BOOLEAN}},
    ],
)
def test_every_way_to_write_a_schema_is_read(written: Any) -> None:
    assert structured.json_schema(written) == BOOLEAN


class Colour(enum.Enum):
    RED = "red"


@pytest.mark.parametrize("schema", [None, "boolean", [BOOLEAN], int, Colour, {}, {"name": "f"}])
def test_what_says_nothing_is_no_schema(schema: Any) -> None:
    with pytest.raises(InvalidInputError, match="a schema is a pydantic class") as caught:
        structured.json_schema(schema)
    assert "\n" not in str(caught.value)
