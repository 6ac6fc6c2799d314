"""The chat model, one synchronous call at a time."""

from __future__ import annotations

import copy
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from chat_model_helpers import LONG, Recorder, Steps, details, joined, over
from langchain_core.caches import InMemoryCache
from langchain_core.messages import HumanMessage, SystemMessage, trim_messages
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import ConfigurableField, RunnableGenerator

from kvcache_rag import Engine, FullRecompute, InvalidInputError, Metrics
from kvcache_rag.generation import StoredChunk
from kvcache_rag.integration import Reference
from langchain_kvcache_rag import responses, settings
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
    model, seen = llm.engine.model, list[list[int]]()
    generate = model.generate

    def note(ids: Any, **options: Any) -> Any:
        seen.append(ids[0].tolist())
        return generate(ids, **options)

    monkeypatch.setattr(model, "generate", note)
    ask = (lambda messages: list(llm.stream(messages))) if streams else llm.invoke
    ask([HumanMessage("a b")])
    ask([SystemMessage("a</s>b"), HumanMessage("a</s><s>b")])
    ask(over("what?", "one"))
    ask([SystemMessage("x</s>"), *over("what</s>?", "one</s>")])
    chat, forged, over_one, over_forged = (ids.count(2) for ids in seen)
    assert (forged, over_forged) == (chat + 1, over_one)  # one for the system message
    assert llm.get_token_ids("a</s>") == [*llm.get_token_ids("a</"), *llm.get_token_ids("s>")]


def test_empty_documents_leave_the_instruction(llm: ChatKVCache) -> None:
    message = llm.invoke(over("what?", ""))
    assert message.text == llm.engine.generate("what?", [], max_new_tokens=6).text
    assert message.response_metadata["kv_cache"]["prefix_tokens"] > 0


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
    assert metadata["model_provider"] == "kvcache-rag"
    assert metadata["finish_reason"] == "length"
    (times,) = metadata["kv_cache"]["answers"]
    assert times["ttft"] > times["prefill"] > 0
    assert Metrics.from_dict(metadata["kv_cache"]).ttft == times["ttft"]


def test_a_stream_adds_up_to_the_answer(llm: ChatKVCache) -> None:
    llm.invoke(over("what?", "one"))
    whole = llm.invoke(over("what?", "one"))
    chunks = list(llm.stream(over("what?", "one")))
    assert len(chunks) > 3
    streamed = joined(chunks)
    assert streamed.content == whole.content
    assert streamed.usage_metadata == whole.usage_metadata
    assert streamed.response_metadata.keys() == whole.response_metadata.keys()
    assert [bool(one.usage_metadata) for one in chunks] == [False] * (len(chunks) - 1) + [True]
    assert [bool(one.response_metadata) for one in chunks[:-1]] == [False] * (len(chunks) - 1)
    assert chunks[-1].chunk_position == "last"


def test_each_piece_is_reported_once(llm: ChatKVCache) -> None:
    recorder = Recorder()
    chunks = list(llm.stream(over("what?", "one"), config={"callbacks": [recorder]}))
    assert recorder.tokens == [chunk.content for chunk in chunks]
    assert len(recorder.starts) == len(recorder.ends) == 1
    silent = Recorder()
    llm.invoke(over("what?", "one"), config={"callbacks": [silent]})
    assert silent.tokens == []


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
    assert llm.invoke("Hello", stop=[text[2]]).text == text[: text.index(text[2])]
    assert joined(llm.stream("Hello")).content == stopped.text
    assert llm.bind(stop=[text[2]]).invoke("Hello").text == text[: text.index(text[2])]


def test_arguments_of_a_call_win(llm: ChatKVCache) -> None:
    def tokens(**options: Any) -> int:
        usage = llm.invoke(over("what?", "one"), **options).usage_metadata
        assert usage is not None
        return usage["output_tokens"]

    assert tokens() == 6
    assert tokens(max_tokens=2) == 2
    assert tokens(max_new_tokens=3) == 3
    assert tokens(max_tokens=300, min_new_tokens=300, timeout=0.05) < 300
    metadata = llm.bind(policy=FullRecompute()).invoke(over("what?", "one")).response_metadata
    assert metadata["kv_cache"]["policy"] == "FullRecompute()"
    # They say nothing to a question without documents.
    assert llm.invoke("Hello", policy=FullRecompute(), overflow="error").text


def test_settings_reach_generation(engine: Engine) -> None:
    plain = ChatKVCache(engine=engine, max_tokens=20)
    greedy = plain.invoke("Hello").text
    assert (
        ChatKVCache(engine=engine, max_tokens=20, temperature=0, top_p=0.5).invoke("Hello").text
        == greedy
    )
    sampled = ChatKVCache(engine=engine, max_tokens=20, temperature=1.5)
    assert len({sampled.invoke("Hello").text for _ in range(3)}) == 3
    one = ChatKVCache(engine=engine, max_tokens=20, temperature=1.5, top_k=1)
    assert one.invoke("Hello").text == greedy
    other = ChatKVCache(engine=engine, max_tokens=20, generate_kwargs={"repetition_penalty": 9.0})
    assert other.invoke("Hello").text != greedy


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
        ({"max_token": 5}, "max_token is no argument of ChatKVCache; did you mean max_tokens"),
        ({"model_name": "other"}, "model and model_name differ"),
        ({"temperature": -1.0}, "temperature cannot be used"),
        ({"policy": "Reuse()"}, r"there is no policy 'reuse\(\)'; did you mean reuse"),
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


def test_threads_load_a_model_once(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[Any] = []
    real = settings.open_engine

    def slow(*arguments: Any, **options: Any) -> Any:
        loaded.append(arguments)
        time.sleep(0.05)
        return real(*arguments, **options)

    monkeypatch.setattr(settings, "open_engine", slow)
    llm = ChatKVCache(model="tiny", max_tokens=2)
    assert loaded == []
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(llm.invoke, ["Hello"] * 4))
    assert loaded == [("tiny",)]
    assert len({answer.text for answer in answers}) == 1


def test_a_system_prompt_begins_a_chat_too(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = ChatKVCache(model="tiny", max_tokens=4, system_prompt="Rhyme.")
    seen: list[Any] = []
    render = llm.engine.render_chat
    monkeypatch.setattr(
        llm.engine, "render_chat", lambda turns: seen.append(turns) or render(turns)
    )
    llm.invoke("Hello")
    llm.invoke([("system", "Count."), ("human", "Hello")])
    assert [turns[0]["content"] for turns in seen] == ["Rhyme.", "Count."]


def test_configurable_fields_share_the_engine(llm: ChatKVCache) -> None:
    chosen = llm.configurable_fields(max_tokens=ConfigurableField(id="length"))
    message = chosen.with_config(configurable={"length": 2}).invoke(over("what?", "one"))
    assert message.usage_metadata is not None
    assert message.usage_metadata["output_tokens"] == 2
    assert len(list(chosen.with_config(configurable={"length": 3}).stream("Hello"))) > 2


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


def test_pasted_context_is_counted_in_tokens(llm: ChatKVCache) -> None:
    def of_tokens(count: int) -> str:
        return next(t for n in range(1, 9999) if len(llm.engine.brought_ids(t := "x" * n)) == count)

    llm.invoke(of_tokens(PASTED_TOKENS))  # warnings are errors
    with pytest.warns(UserWarning, match="KVCacheRAG"):
        llm.invoke(of_tokens(PASTED_TOKENS + 1))


def test_what_the_model_said_is_not_pasted(llm: ChatKVCache) -> None:
    llm.invoke([("human", "what?"), ("ai", PASTED), ("human", "why?")])


def test_a_long_question_is_none_that_documents_were_pasted_into(llm: ChatKVCache) -> None:
    document = "The cat sat on the mat for days."
    chunked = llm.invoke(over("what?", document))
    plain = llm.invoke(PASTED)  # no warning: what is handed over elsewhere does not stand in it
    with pytest.warns(UserWarning, match="nothing of it can be reused"):
        pasted = llm.invoke(f"{PASTED}\n\n{document}\n\nWho sat?")
    kinds = [one.response_metadata["kv_cache"]["prompt"] for one in (chunked, plain, pasted)]
    assert kinds == ["reused", "plain", "pasted"]


def test_another_instruction_warns_once_and_is_said(
    llm: ChatKVCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    real = llm.engine.generate

    def spy(question: str, *arguments: Any, **options: Any) -> Any:
        asked.append(question)
        return real(question, *arguments, **options)

    monkeypatch.setattr(llm.engine, "generate", spy)
    messages = [SystemMessage("Be brief."), *over("what?", "one")]
    with pytest.warns(UserWarning, match="system_prompt="):
        first = llm.invoke(messages)
    assert llm.invoke(messages).text == first.text
    assert asked == ["Be brief.\n\nwhat?"] * 2
    assert first.response_metadata["kv_cache"]["prefix_mismatch"]
    same = llm.invoke([SystemMessage("Read."), *over("what?", "one")])
    assert not same.response_metadata["kv_cache"]["prefix_mismatch"]


def test_langchains_cache_of_answers_holds(llm: ChatKVCache) -> None:
    steps: list[Any] = []

    def count(ids: Any, scores: Any) -> Any:  # a `Steps` is another one with every step
        steps.append(ids)
        return scores

    cached = llm.model_copy(update={"cache": InMemoryCache()})
    question = over("what?", "one")
    options = {"logits_processor": [count]}
    first = cached.invoke(question, **options)
    assert cached.invoke(question, **options).text == first.text
    assert len(steps) == 6
    shorter = cached.model_copy(update={"max_tokens": 2})
    assert shorter.invoke(question, **options).text != first.text
    assert len(steps) == 8


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
    messages = [HumanMessage("a" * 50), HumanMessage("b" * 5)]
    kept = trim_messages(messages, max_tokens=30, token_counter=llm)
    assert kept == messages[1:]


def test_what_is_no_tool_is_refused(llm: ChatKVCache) -> None:
    with pytest.raises(InvalidInputError, match="a tool cannot be described"):
        llm.bind_tools([7])  # type: ignore[list-item]
    with pytest.raises(InvalidInputError, match="'web_search'} is no function, and tools that a"):
        llm.bind_tools([{"type": "web_search"}])
    with pytest.raises(InvalidInputError, match="is no function"):
        llm.invoke("?", tools=[{"type": "function"}])
