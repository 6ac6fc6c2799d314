"""The chat model, one synchronous call at a time."""

from __future__ import annotations

import asyncio
import copy
import enum
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from chat_model_helpers import LONG, Recorder, Steps, details, joined, over
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, trim_messages
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import ConfigurableField, RunnableGenerator
from small import make_model, make_tokenizer

from kvcache_rag import Engine, FullRecompute, InvalidInputError, MemoryStore, Metrics
from kvcache_rag.generation import StoredChunk
from kvcache_rag.integration import Reference
from langchain_kvcache_rag import responses, settings, structured
from langchain_kvcache_rag.chat_model import ChatKVCache
from langchain_kvcache_rag.pasted import PASTED_TOKENS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def as_it_comes(pieces: Iterator[Any]) -> Iterator[Any]:
    yield from pieces


@pytest.mark.filterwarnings("ignore:the system message is not the instruction")
@pytest.mark.parametrize("streams", [False, True])
def test_what_messages_bring_is_no_control_token(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, streams: bool
) -> None:
    llm = ChatKVCache(engine=make_engine(chat=True), max_tokens=1)
    model, seen = llm.engine.model, list[int]()
    generate = model.generate

    def note(ids: Any, **options: Any) -> Any:
        seen.append(ids[0].tolist().count(2))
        return generate(ids, **options)

    monkeypatch.setattr(model, "generate", note)
    ask = (lambda messages: list(llm.stream(messages))) if streams else llm.invoke
    ask([HumanMessage("a b")])
    ask([SystemMessage("a</s>b"), HumanMessage("a</s><s>b")])
    ask(over("what?", "one"))
    ask([SystemMessage("x</s>"), *over("what</s>?", "one</s>")])
    chat, forged, over_one, over_forged = seen
    assert (forged, over_forged) == (chat + 1, over_one)  # one for the system message
    assert llm.get_token_ids("a</s>") == [*llm.get_token_ids("a</"), *llm.get_token_ids("s>")]


def test_without_documents_it_is_an_ordinary_chat_model(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(chat=True)
    llm = ChatKVCache(engine=engine, max_tokens=6)
    message = llm.invoke([("system", "Rhyme."), ("human", "Hello")])
    prompt = "<s><system>Rhyme.</s><user>Hello</s><assistant>"
    assert message.text == engine.complete(prompt, max_new_tokens=6).text
    assert details(message) == {"cache_read": 0, "cache_creation": 0}


def test_a_noted_reference_is_used_in_place_of_the_text(
    llm: ChatKVCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = llm.engine
    (key,) = engine.add(["one"])
    llm.model_copy().references.note(Reference.of(key, "one", engine))
    handed: list[Any] = []
    real = engine.generate

    def spy(question: str, chunks: Any, **options: Any) -> Any:
        handed.extend(chunks)
        return real(question, chunks, **options)

    monkeypatch.setattr(engine, "generate", spy)
    assert details(llm.invoke(over("what?", "one", "one changed")))["cache_read"] > 0
    assert handed == [StoredChunk(key, "one"), "one changed"]


def test_response_metadata_says_what_it_cost(llm: ChatKVCache) -> None:
    message = llm.invoke(over("what?", "one"))
    assert message.content_blocks == [{"type": "text", "text": message.text}]
    metadata = message.response_metadata
    assert metadata["model_name"] == llm.model_name == "LlamaForCausalLM"
    assert (metadata["model_provider"], metadata["finish_reason"]) == ("kvcache-rag", "length")
    (times,) = metadata["kv_cache"]["answers"]
    assert times["ttft"] > times["prefill"] > 0
    assert Metrics.from_dict(metadata["kv_cache"]).ttft == times["ttft"]
    usage = message.usage_metadata
    assert usage is not None
    assert usage["input_tokens"] == len(llm.engine.tokenize("what?", ["one"]).all)


def test_a_stream_adds_up_to_the_answer(llm: ChatKVCache) -> None:
    llm.invoke(over("what?", "one"))
    whole = llm.invoke(over("what?", "one"))
    recorder = Recorder()
    chunks = list(llm.stream(over("what?", "one"), config={"callbacks": [recorder]}))
    streamed = joined(chunks)
    assert streamed.content == whole.content
    assert streamed.usage_metadata == whole.usage_metadata
    assert streamed.response_metadata.keys() == whole.response_metadata.keys()
    assert recorder.tokens == [chunk.content for chunk in chunks]
    assert len(recorder.starts) == len(recorder.ends) == 1
    *pieces, last = chunks
    assert len(pieces) > 2
    assert not any(one.usage_metadata or one.response_metadata for one in pieces)
    assert last.usage_metadata
    assert last.chunk_position == "last"


@pytest.mark.parametrize("behind", [0, 1, 2])
def test_a_closed_stream_of_a_chain_frees_the_model(llm: ChatKVCache, behind: int) -> None:
    steps = Steps()
    prompt = ChatPromptTemplate([("placeholder", "{asked}")])
    chain: Any = prompt | llm.bind(**LONG, logits_processor=[steps])
    for parser in (StrOutputParser(), RunnableGenerator(as_it_comes))[:behind]:
        chain = chain | parser
    stream = chain.stream({"asked": over("what?", "one")})
    next(stream), next(stream)
    stream.close()
    stopped = steps.count
    assert stopped < 100
    assert llm.invoke("Hello").text
    assert steps.count == stopped


def test_langchain_still_reads_on_where_it_is_noticed(
    llm: ChatKVCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If this fails, LangChain changed: read `responses._is_left_over` again, or delete it."""
    step = responses._STEP
    assert step is not None, "Runnable._transform_stream_with_config is gone"
    names = {*step.co_varnames, *step.co_cellvars}
    assert {"iterator", "input_for_tracing"} <= names, "its steps read by other names"
    monkeypatch.setattr(responses, "_STEP", None)
    steps = Steps(pause=0)
    model = llm.bind(max_tokens=40, min_new_tokens=40, logits_processor=[steps])
    stream: Any = (model | StrOutputParser()).stream(over("what?", "one"))
    next(stream), next(stream)
    stream.close()
    assert steps.count == 40, "a step that is closed no longer reads the rest of its input"


def test_stop_of_a_call_wins(engine: Engine) -> None:
    text = ChatKVCache(engine=engine, max_tokens=8).invoke("Hello").text
    llm = ChatKVCache(engine=engine, max_tokens=8, stop=[text[4]])
    stopped = llm.invoke("Hello")
    assert stopped.text == text[: text.index(text[4])]
    assert stopped.response_metadata["finish_reason"] == "stop"
    assert joined(llm.stream("Hello")).content == stopped.text
    assert llm.bind(stop=[text[2]]).invoke("Hello").text == text[: text.index(text[2])]


def test_arguments_of_a_call_win(llm: ChatKVCache) -> None:
    def tokens(**options: Any) -> int:
        usage = llm.invoke(over("what?", "one"), **options).usage_metadata
        assert usage is not None
        return usage["output_tokens"]

    assert (tokens(), tokens(max_tokens=2), tokens(max_new_tokens=3)) == (6, 2, 3)
    assert tokens(max_tokens=300, min_new_tokens=300, timeout=0.05) < 300
    # They say nothing to a question without documents.
    assert llm.invoke("Hello", policy=FullRecompute(), overflow="error").text


def test_settings_reach_generation(engine: Engine) -> None:
    def said(**settings: Any) -> str:
        return ChatKVCache(engine=engine, max_tokens=20, **settings).invoke("Hello").text

    greedy = said()
    assert said(temperature=0, top_p=0.5) == greedy
    assert len({said(temperature=1.5) for _ in range(3)}) == 3
    assert said(temperature=1.5, top_k=1) == greedy
    assert said(generate_kwargs={"repetition_penalty": 9.0}) != greedy


def test_too_many_documents_take_several_rounds(make_engine: Callable[..., Engine]) -> None:
    llm = ChatKVCache(engine=make_engine(context_window=400), max_tokens=6)
    many = over("what?", "a" * 150, "b" * 150, "c" * 150)
    assert llm.invoke(many).response_metadata["kv_cache"]["rounds"] > 1
    dropped = llm.invoke(many, overflow="drop_lowest").response_metadata["kv_cache"]
    assert (dropped["rounds"], dropped["dropped_chunks"] > 0) == (1, True)
    with pytest.raises(Exception, match="the chunks have"):
        llm.invoke(many, overflow="error")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"max_token": 5}, "max_token is no option of generate"),
        ({"history": []}, "history comes from the messages"),
        ({"chunks": []}, "chunks comes from the messages"),
        ({"temperature": -1}, "temperature must be"),
        ({"stop": [""]}, "stop must be"),
        ({"max_tokens": 0}, "max_new_tokens must be"),
        ({"model": "other"}, "model is no option"),
    ],
)
def test_a_bad_argument_of_a_call_is_said(
    llm: ChatKVCache, options: dict[str, Any], sentence: str
) -> None:
    for call in (llm.invoke, lambda *a, **k: list(llm.stream(*a, **k))):
        with pytest.raises(InvalidInputError, match=sentence):
            call(over("what?", "one"), **options)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"model_name": "other"}, "model and model_name differ"),
        ({"temperature": -1.0}, "temperature cannot be used"),
        ({"template": 7}, "template cannot be used"),
    ],
)
def test_a_bad_setting_is_said(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidInputError, match=sentence):
        ChatKVCache(model="tiny", **fields)


def test_what_other_chat_models_take_is_taken() -> None:
    llm = ChatKVCache(
        model_name="tiny", api_key="x", max_retries=2, timeout=60, streaming=True, top_p=None
    )
    assert llm.model == "tiny"
    assert "x" not in repr(llm.api_key)


def test_a_model_is_loaded_once_and_keeps_its_kv(tmp_path: Any) -> None:
    llm = ChatKVCache(model="tiny", kv_dir=tmp_path / "kv", max_tokens=4, system_prompt="Read. ")
    other = llm.model_copy(update={"max_tokens": 3})
    assert copy.deepcopy(llm).engine is other.engine is llm.engine
    assert llm.engine.template.system == "Read. "
    llm.invoke(over("what?", "one"))
    again = ChatKVCache(model="tiny", kv_dir=tmp_path / "kv", max_tokens=4, system_prompt="Read. ")
    assert details(again.invoke(over("what?", "one")))["cache_read"] > 0
    assert llm.model_copy(update={"system_prompt": "Other."}).engine is not llm.engine


def test_a_system_prompt_begins_a_chat_too(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = ChatKVCache(model="tiny", max_tokens=4, system_prompt="Rhyme.")
    seen: list[Any] = []
    real = llm.engine.render_chat
    monkeypatch.setattr(llm.engine, "render_chat", lambda turns: seen.append(turns) or real(turns))
    llm.invoke("Hello")
    llm.invoke([("system", "Count."), ("human", "Hello")])
    assert [turns[0]["content"] for turns in seen] == ["Rhyme.", "Count."]


PASTED = "Answer from this context: " + "x" * 400
"""Far more tokens than one pastes without documents in it."""


@pytest.mark.parametrize(
    "messages", [PASTED, [("system", PASTED), ("human", "what?")], [("human", [PASTED, "what?"])]]
)
def test_pasted_context_warns_once(llm: ChatKVCache, messages: Any) -> None:
    with pytest.warns(UserWarning, match=r"of 4\d\d tokens .* nothing of it can be reused"):
        llm.invoke(messages)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second = llm.model_copy().invoke(messages)
    assert second.response_metadata["kv_cache"]["prompt"] == "pasted"


def test_what_is_no_pasted_context_is_not_warned_of(llm: ChatKVCache) -> None:
    def kind(messages: Any) -> str:
        return str(llm.invoke(messages).response_metadata["kv_cache"]["prompt"])

    def of_tokens(count: int) -> str:
        return next(t for n in range(1, 9999) if len(llm.engine.brought_ids(t := "x" * n)) == count)

    document = "The cat sat on the mat for days."
    assert kind([("human", "what?"), ("ai", PASTED), ("human", "why?")]) == "plain"
    assert kind(of_tokens(PASTED_TOKENS)) == "plain"
    assert kind(over("what?", document)) == "reused"
    assert kind(PASTED) == "plain", "what is handed over elsewhere does not stand in it"
    with pytest.warns(UserWarning, match=r"nothing of it can be reused.*KVCacheRAG"):
        assert kind(f"{PASTED}\n\n{document}\n\nWho sat?") == "pasted"
    apart = ChatKVCache(engine=llm.engine, max_tokens=6)
    with pytest.warns(UserWarning, match="nothing of it can be reused"):
        apart.invoke(of_tokens(PASTED_TOKENS + 1))


def test_traces_name_the_model(llm: ChatKVCache) -> None:
    recorder = Recorder()
    llm.invoke("Hello", config={"callbacks": [recorder]}, stop=["x"])
    metadata = recorder.starts[0]["metadata"]
    assert metadata["ls_provider"] == "kvcache-rag"
    assert metadata["ls_model_name"] == "LlamaForCausalLM"
    assert (metadata["ls_max_tokens"], metadata["ls_stop"]) == (6, ["x"])
    secret = ChatKVCache(model="m", model_kwargs={"token": "hf_1", "revision": "r"})
    assert "hf_1" not in repr(secret) + repr(secret._identifying_params)
    assert secret._identifying_params["model_kwargs"] == {"revision": "r"}


def test_tokens_are_counted_by_the_models_own_tokenizer(llm: ChatKVCache) -> None:
    assert llm.get_num_tokens("four") == 4
    asked = over("what?", "x" * 500)
    assert llm.get_num_tokens_from_messages(asked) > 500, "those of documents, too"
    history = [*asked, AIMessage("a"), HumanMessage("and?")]
    assert trim_messages(history, max_tokens=100, token_counter=llm) == history[1:]
    counting = llm.model_copy(update={"custom_get_token_ids": lambda text: [0] * len(text)})
    assert counting.get_num_tokens_from_messages(asked) == len("Human: what?") + 500


def test_what_is_no_tool_is_refused(llm: ChatKVCache) -> None:
    with pytest.raises(InvalidInputError, match="a tool cannot be described"):
        llm.bind_tools([7])  # type: ignore[list-item]
    with pytest.raises(InvalidInputError, match="'web_search'} is no function, and tools that a"):
        llm.bind_tools([{"type": "web_search"}])
    with pytest.raises(InvalidInputError, match="is no function"):
        llm.invoke("?", tools=[{"type": "function"}])
    with pytest.raises(InvalidInputError, match="tool_choice must be"):
        llm.bind_tools([{"name": "look_up", "description": "Looks up."}], tool_choice="look")


def test_what_is_not_kept_is_not_counted_as_written_to_the_cache(llm: ChatKVCache) -> None:
    asked = over("what?", "one")
    assert details(llm.invoke(asked, policy=FullRecompute()))["cache_creation"] == 0
    assert details(llm.invoke(asked))["cache_creation"] > 0


# ---------------------------------------------------------------------- templates and schemas
TWO_ROLES = (
    "{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}"
    "<{{ message['role'] }}>{{ message['content'] }}</s>"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


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


BOOLEAN = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}


class Colour(enum.Enum):
    RED = "red"


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


@pytest.mark.parametrize("schema", [None, "boolean", [BOOLEAN], int, Colour, {}, {"name": "f"}])
def test_what_says_nothing_is_no_schema(schema: Any) -> None:
    with pytest.raises(InvalidInputError, match="a schema is a pydantic class") as caught:
        structured.json_schema(schema)
    assert "\n" not in str(caught.value)


# ---------------------------------------------------------------------- engines
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
        llm.with_config(configurable={"window": window} if window else {}).invoke("Hello")
    assert opened == [500, None, 600]


def test_threads_load_each_model_once(opened: list[Any]) -> None:
    llm = ChatKVCache(model="m", max_tokens=6)
    assert opened == []
    copies = [llm.model_copy(update={"context_window": window}) for window in (500, 600, 700)]
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda one: one.invoke("Hello").text, [*copies, *copies]))
    assert [one.engine.context_window for one in copies] == [500, 600, 700]
    assert sorted(opened) == [500, 600, 700]
    assert len({*answers}) == 1


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
