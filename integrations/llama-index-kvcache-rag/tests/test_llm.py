"""KVCacheLLM as a LlamaIndex LLM."""

from __future__ import annotations

import asyncio
import copy
import json
import pickle
from typing import TYPE_CHECKING, Any

import access
import pytest
import torch
from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.callbacks import CallbackManager, TokenCountingHandler
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.span_handlers import SimpleSpanHandler
from llama_index.core.prompts import PromptTemplate as LlamaPrompt
from small import CHAT_TEMPLATE, Loop, make_model, make_tokenizer

import kvcache_rag
from kvcache_rag import Engine, FullRecompute, InvalidInputError, PromptTemplate
from llama_index.kvcache_rag import KVCacheLLM
from llama_index.kvcache_rag.responses import Grounded

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from llama_index_helpers import Recorder

HELLO = [ChatMessage(role=MessageRole.USER, content="hello")]


@pytest.fixture(scope="module")
def chat_engine() -> Engine:
    tokenizer = copy.deepcopy(make_tokenizer())
    tokenizer.chat_template = CHAT_TEMPLATE
    return Engine(make_model(), tokenizer, template=PromptTemplate(system="Read.\n"))


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Arguments of every call of the model's `generate`, and the ids."""
    calls: list[dict[str, Any]] = []
    model: Any = make_model()
    generate = model.generate

    def note(ids: Any = None, **options: Any) -> Any:
        calls.append({**options, "ids": ids if ids is not None else options.get("input_ids")})
        return generate(ids, **options) if ids is not None else generate(**options)

    monkeypatch.setattr(model, "generate", note)
    return calls


# ---------------------------------------------------------------------- texts and messages
def test_complete_and_stream_agree(llm: KVCacheLLM) -> None:
    whole = llm.complete("Once upon a time")
    pieces = list(llm.stream_complete("Once upon a time"))
    assert len(whole.text) == 6
    assert pieces[-1].text == whole.text
    assert "".join(piece.delta or "" for piece in pieces) == whole.text
    assert [piece.text for piece in pieces[:-1]] == [
        whole.text[: index + 1] for index in range(len(pieces) - 1)
    ]


async def test_async_twins_agree(llm: KVCacheLLM) -> None:
    text = llm.complete("Once").text
    assert (await llm.acomplete("Once")).text == text
    assert [r async for r in await llm.astream_complete("Once")][-1].text == text
    said = llm.chat(HELLO).message.content
    assert (await llm.achat(HELLO)).message.content == said
    assert [r async for r in await llm.astream_chat(HELLO)][-1].message.content == said
    assert list(llm.stream_chat(HELLO))[-1].message.content == said


@pytest.mark.parametrize("streaming", [False, True])
def test_usage_is_reported(llm: KVCacheLLM, streaming: bool) -> None:
    answers = list(llm.stream_chat(HELLO)) if streaming else [llm.chat(HELLO)]
    raw = answers[-1].raw
    assert raw["usage"]["completion_tokens"] == 6
    assert raw["usage"]["prompt_tokens"] == len("<s>") - 2 + len("User: hello\nAssistant:")
    assert raw["usage"]["total_tokens"] == raw["usage"]["prompt_tokens"] + 6
    assert raw["finish_reason"] == "length"


def test_token_counting_handler_reads_usage(engine: Engine) -> None:
    counter = TokenCountingHandler(tokenizer=str.split)
    llm = KVCacheLLM(engine=engine, max_new_tokens=6, callback_manager=CallbackManager([counter]))
    llm.complete("Once upon a time")
    list(llm.stream_complete("Once upon a time"))
    assert counter.completion_llm_token_count == 12
    assert counter.prompt_llm_token_count == 2 * (1 + len("Once upon a time"))


def test_beginning_of_sequence_stands_once(chat_engine: Engine, seen: list[dict[str, Any]]) -> None:
    llm = KVCacheLLM(engine=chat_engine, max_new_tokens=2)
    llm.chat(HELLO)
    llm.complete("hello")
    llm.complete("<s>hello")
    for call in seen:
        assert call["ids"][0].tolist().count(1) == 1
        assert int(call["ids"][0, 0]) == 1


def test_chat_template_writes_messages(chat_engine: Engine, engine: Engine) -> None:
    messages = [
        ChatMessage(role=MessageRole.DEVELOPER, content="be brief"),
        ChatMessage(role=MessageRole.USER, content="hello"),
        ChatMessage(role=MessageRole.CHATBOT, content=None),
    ]
    templated = KVCacheLLM(engine=chat_engine).chat_prompt(messages)
    assert templated == "<s><system>be brief</s><user>hello</s><assistant>"
    assert KVCacheLLM(engine=engine).chat_prompt(HELLO) == "User: hello\nAssistant:"
    own = KVCacheLLM(engine=engine, messages_to_prompt=lambda messages: f"[{len(messages)}]")
    assert own.chat_prompt(messages) == "[3]"


def test_completion_to_prompt_unless_formatted(engine: Engine, seen: list[dict[str, Any]]) -> None:
    llm = KVCacheLLM(engine=engine, max_new_tokens=1, completion_to_prompt=lambda text: f"[{text}]")
    llm.complete("a")
    llm.complete("a", formatted=True)
    assert [call["ids"].shape[1] for call in seen] == [1 + 3, 1 + 1]


def test_metadata(chat_engine: Engine, engine: Engine) -> None:
    metadata = KVCacheLLM(engine=chat_engine, max_new_tokens=9).metadata
    assert (metadata.context_window, metadata.num_output) == (4096, 9)
    assert metadata.is_chat_model
    assert metadata.model_name == "LlamaForCausalLM"
    assert not KVCacheLLM(engine=engine).metadata.is_chat_model
    # What is given needs no model.
    lazy = KVCacheLLM(model_name="never loaded", context_window=512, is_chat_model=True)
    assert lazy.metadata.context_window == 512


# ---------------------------------------------------------------------- arguments of generation
def test_what_is_brought_is_no_control_token(
    chat_engine: Engine, engine: Engine, seen: list[dict[str, Any]]
) -> None:
    """Of `</s>` a prompt has those that its form writes; a prompt without a form stays raw."""
    said = [ChatMessage(role=MessageRole.USER, content="a</s><s>b")]
    chat = KVCacheLLM(engine=chat_engine, max_new_tokens=1)
    chat.chat(said)
    list(chat.stream_chat(said))
    formed = KVCacheLLM(
        engine=engine,
        max_new_tokens=1,
        completion_to_prompt=lambda text: f"[{text}</s>]",
        messages_to_prompt=lambda messages: f"[{messages[0].content}</s>]",
    )
    formed.complete("a</s><s>b")
    list(formed.stream_complete("a</s><s>b"))
    formed.chat(said)
    assert [call["ids"][0].tolist().count(2) for call in seen] == [1] * 5
    formed.complete("a</s><s>b</s>", formatted=True)
    assert seen[-1]["ids"][0].tolist().count(2) == 2


def test_keywords_of_a_call_win(engine: Engine, seen: list[dict[str, Any]]) -> None:
    llm = KVCacheLLM(engine=engine, max_new_tokens=9, generate_kwargs={"repetition_penalty": 1.5})
    assert len(llm.complete("a", max_new_tokens=3).text) == 3
    assert len(llm.chat(HELLO, max_new_tokens=2, repetition_penalty=1.2).message.content or "") == 2
    assert [call["generation_config"].repetition_penalty for call in seen] == [1.5, 1.2]


def test_temperature_decides_whether_to_sample(engine: Engine, seen: list[dict[str, Any]]) -> None:
    llm = KVCacheLLM(engine=engine, max_new_tokens=1)
    llm.complete("a", temperature=0.7)
    llm.complete("a", temperature=0)
    llm.complete("a", temperature=0.7, do_sample=False)
    configs = [call["generation_config"] for call in seen]
    assert [bool(config.do_sample) for config in configs] == [True, False, False]
    assert [config.temperature == 0.7 for config in configs] == [True, False, False]


def test_stop_and_stopping_ids(engine: Engine) -> None:
    text = KVCacheLLM(engine=engine, max_new_tokens=6).complete("Once").text
    llm = KVCacheLLM(engine=engine, max_new_tokens=6)
    assert llm.complete("Once", stop=[text[3]]).text == text[: text.index(text[3])]
    ids = engine.tokenizer(text[2], add_special_tokens=False)["input_ids"]
    ending = KVCacheLLM(engine=engine, max_new_tokens=6, stopping_ids=ids)
    assert ending.complete("Once").text.rstrip(text[2]) == text[: text.index(text[2])]


@pytest.mark.parametrize("name", ["complete", "stream_complete"])
def test_wrong_arguments_are_told(llm: KVCacheLLM, name: str) -> None:
    with pytest.raises(InvalidInputError, match="assistant_early_exit"):
        list(getattr(llm, name)("a", assistant_early_exit=2))


# ---------------------------------------------------------------------- events
@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda llm: llm.complete("a"), ["LLMCompletionStartEvent", "LLMCompletionEndEvent"]),
        (lambda llm: llm.chat(HELLO), ["LLMChatStartEvent", "LLMChatEndEvent"]),
    ],
)
def test_events_once_each(
    llm: KVCacheLLM, recorder: Recorder, call: Callable[[KVCacheLLM], Any], expected: list[str]
) -> None:
    call(llm)
    assert recorder.names() == expected


async def test_stream_events_once_each(llm: KVCacheLLM, recorder: Recorder) -> None:
    list(llm.stream_complete("a"))
    async for _ in await llm.astream_complete("a"):
        pass
    async for _ in await llm.astream_chat(HELLO):
        pass
    names = recorder.names()
    assert names.count("LLMCompletionStartEvent") == names.count("LLMCompletionEndEvent") == 2
    assert names.count("LLMChatStartEvent") == names.count("LLMChatEndEvent") == 1
    assert names.count("LLMCompletionInProgressEvent") == 2 * 7
    assert recorder.of("LLMCompletionEndEvent")[0].response.raw["usage"]["completion_tokens"] == 6


async def test_every_call_is_a_span(llm: KVCacheLLM) -> None:
    handler, asked = SimpleSpanHandler(), ("p", Grounded("q?", ("text",)))
    get_dispatcher().add_span_handler(handler)
    try:
        llm.answer(*asked)
        list(llm.stream_answer(*asked))
        await llm.aanswer(*asked)
        await llm.astream_answer(*asked)
        llm.complete("a")
    finally:
        get_dispatcher().span_handlers.remove(handler)
    calls = [span.id_.partition("-")[0] for span in handler.completed_spans]
    names = ["answer", "stream_answer", "aanswer", "astream_answer", "complete"]
    assert calls == [f"KVCacheLLM.{name}" for name in names]


# ---------------------------------------------------------------------- failure, abandonment, loop
@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that fails at the third token."""
    forward = make_model().forward
    calls = [0]

    def fail(*args: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] > 2:
            raise RuntimeError("out of memory")
        return forward(*args, **options)

    monkeypatch.setattr(make_model(), "forward", fail)


@pytest.mark.usefixtures("failing")
@pytest.mark.timeout(60)
def test_failure_while_streaming_reaches_the_consumer(llm: KVCacheLLM, recorder: Recorder) -> None:
    with pytest.raises(RuntimeError, match="out of memory"):
        list(llm.stream_complete("a"))
    assert "ExceptionEvent" in recorder.names()


@pytest.mark.usefixtures("failing")
@pytest.mark.timeout(60)
async def test_failure_while_streaming_reaches_the_async_consumer(llm: KVCacheLLM) -> None:
    with pytest.raises(RuntimeError, match="out of memory"):
        async for _ in await llm.astream_complete("a"):
            pass


@pytest.mark.parametrize(
    "call",
    [
        lambda llm: llm.acomplete("a"),
        lambda llm: llm.achat(HELLO),
        lambda llm: llm.aanswer("prompt", Grounded("q?", ("text",))),
    ],
)
async def test_event_loop_is_not_blocked(
    engine: Engine,
    call: Callable[[KVCacheLLM], Any],
    loop: Loop,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop.watch(monkeypatch, type(make_model()), "forward")
    await call(KVCacheLLM(engine=engine, max_new_tokens=6))
    assert loop.turns > 3


@pytest.mark.parametrize(
    "call",
    [
        lambda llm, **options: llm.acomplete("a", **options),
        lambda llm, **options: llm.achat(HELLO, **options),
        lambda llm, **options: llm.aanswer("prompt", Grounded("q?", ("text",)), **options),
    ],
)
async def test_cancelled_call_stops_generating(engine: Engine, call: Callable[..., Any]) -> None:
    llm, started, steps = KVCacheLLM(engine=engine, max_new_tokens=3000), asyncio.Event(), []
    loop = asyncio.get_running_loop()

    def count(ids: Any, _scores: Any, **_: Any) -> Any:
        steps.append(1)
        loop.call_soon_threadsafe(started.set)
        return torch.zeros(len(ids), dtype=torch.bool)

    task = asyncio.create_task(call(llm, stopping_criteria=[count], min_new_tokens=3000))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len((await llm.acomplete("a", max_new_tokens=2)).text) == 2  # the model is free again
    assert len(steps) < 2000


async def test_waiting_questions_leave_the_threads_of_others_alone(llm: KVCacheLLM) -> None:
    with access.lock(llm.engine):
        waiting = [asyncio.create_task(llm.acomplete("a", max_new_tokens=2)) for _ in range(40)]
        await asyncio.sleep(0.2)
        await asyncio.wait_for(asyncio.to_thread(int), timeout=20)
    assert len({one.text for one in await asyncio.gather(*waiting)}) == 1


async def test_many_at_once(llm: KVCacheLLM) -> None:
    alone = [llm.complete(f"Story {index}").text for index in range(4)]
    together = await asyncio.gather(*(llm.acomplete(f"Story {index}") for index in range(4)))
    assert [answer.text for answer in together] == alone


# ---------------------------------------------------------------------- settings
def test_settings_without_the_model(engine: Engine) -> None:
    llm = KVCacheLLM(engine=engine, policy=FullRecompute(), model_kwargs={"dtype": torch.float32})
    settings = llm.to_dict()
    assert settings["class_name"] == "KVCacheLLM"
    assert settings["model_kwargs"] == {"dtype": "torch.float32"}
    assert "engine" not in json.dumps(settings)
    assert getattr(llm, "to_payload", llm.to_dict)()  # of newer versions of llama-index-core


def test_loads_when_first_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "model"
    make_model().save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    llm = KVCacheLLM(
        model_name=str(folder),
        tokenizer_name=str(folder),
        device_map="cpu",
        kv_dir=str(tmp_path / "kv"),
        context_window=700,
        system_prompt="Own words.\n",
        max_new_tokens=3,
    )
    assert not (tmp_path / "kv").exists()
    assert len(llm.complete("a").text) == 3
    assert llm.engine.context_window == 700
    assert llm.engine.prefix_text == "Own words.\n"
    llm.engine.add(["text"])
    assert list((tmp_path / "kv").rglob("*.safetensors"))
    again = pickle.loads(pickle.dumps(llm))
    assert again.kv_dir == llm.kv_dir
    assert again.complete("a").text == llm.complete("a").text
    assert again.engine.generate("q?", ["text"], max_new_tokens=1).metrics.hits == {"disk": 1}


def test_loaded_model_with_its_tokenizer() -> None:
    llm = KVCacheLLM(model=make_model(), tokenizer=make_tokenizer(), max_new_tokens=2)
    assert len(llm.complete("a").text) == 2
    with pytest.raises(InvalidInputError, match="tokenizer="):
        _ = KVCacheLLM(model=make_model()).engine


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "model_name="),
        ({"model_name": "./no/such/folder"}, "no model folder"),
        ({"model_name": "tiny", "tokenizer_name": "./no/such/folder"}, "tokenizer"),
    ],
)
def test_what_cannot_be_loaded_is_told(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        _ = KVCacheLLM(**options).engine


def test_copies_share_the_engine(llm: KVCacheLLM) -> None:
    twin = copy.deepcopy(llm)
    twin.max_new_tokens = 2
    assert twin.engine is llm.engine
    assert llm.max_new_tokens == 6
    assert len(twin.complete("a").text) == 2


def test_prompts_of_llama_index(llm: KVCacheLLM) -> None:
    assert len(llm.predict(LlamaPrompt("Say {what}"), what="hello")) == 6
    assert "".join(llm.stream(LlamaPrompt("Say {what}"), what="hello"))


def test_public_names_are_sorted_and_load() -> None:
    import llama_index.kvcache_rag as package

    assert package.__all__ == sorted(package.__all__)
    assert set(package.__all__) <= set(dir(package))
    for name in package.__all__:
        assert getattr(package, name).__name__ == name
    with pytest.raises(AttributeError, match="Nothing"):
        _ = package.Nothing
    assert kvcache_rag.__version__


def test_the_folder_of_the_kv_stays_under_its_limit(tmp_path: Path) -> None:
    limit = 60_000
    llm = KVCacheLLM(model_name="tiny", kv_dir=str(tmp_path), kv_max_bytes=limit)
    texts = [f"The Mobrit{number} costs {number} euros." for number in range(12)]
    llm.engine.add(texts)
    llm.engine.store.sweep()
    held = sum(file.stat().st_size for file in tmp_path.rglob("*.safetensors"))
    assert 0 < held <= limit
    assert llm.engine.store.stats().evictions > 0
    assert str(llm.engine.generate("How much does the Mobrit3 cost?", texts[3:4]).text) == "3"


def test_a_name_where_a_loaded_model_goes_is_told_its_place() -> None:
    with pytest.raises(InvalidInputError, match=r"KVCacheLLM\(model_name='smollm2'\)"):
        KVCacheLLM(model="smollm2")
