"""KVCacheLLM as a LlamaIndex LLM."""

from __future__ import annotations

import ast
import asyncio
import copy
import inspect
import json
import pickle
import textwrap
from typing import TYPE_CHECKING, Any

import access
import pytest
import torch
from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.callbacks import CallbackManager, TokenCountingHandler
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.span_handlers import SimpleSpanHandler
from llama_index_helpers import failing_at_the_third_token, settled
from small import CHAT_TEMPLATE, Loop, make_model, make_tokenizer

import kvcache_rag
from kvcache_rag import Engine, FullRecompute, InvalidInputError, PromptTemplate
from kvcache_rag.integration.question import Source
from llama_index.kvcache_rag import KVCacheLLM
from llama_index.kvcache_rag.responses import Prompt
from llama_index.kvcache_rag.settings import LLMSettings

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from llama_index_helpers import Recorder

HELLO = [ChatMessage(role=MessageRole.USER, content="hello")]
ASKED = ("prompt", Prompt.over("q?", [Source("text")], ["text"], prefix_mismatch=False))


@pytest.fixture(scope="module")
def chat_engine() -> Engine:
    tokenizer = copy.deepcopy(make_tokenizer())
    tokenizer.chat_template = CHAT_TEMPLATE
    return Engine(make_model(), tokenizer, template=PromptTemplate(system="Read.\n"))


@pytest.fixture
def saved(tmp_path: Path) -> str:
    make_model().save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


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
async def test_every_way_of_asking_says_the_same(llm: KVCacheLLM) -> None:
    text = llm.complete("Once upon a time").text
    assert len(text) == 6
    pieces = list(llm.stream_complete("Once upon a time"))
    assert "".join(piece.delta or "" for piece in pieces) == text
    assert [piece.text for piece in pieces] == [*(text[: at + 1] for at in range(6)), text]
    assert (await llm.acomplete("Once upon a time")).text == text
    later = await llm.astream_complete("Once upon a time")
    assert [piece.text async for piece in later] == [piece.text for piece in pieces]
    said = llm.chat(HELLO).message.content
    assert list(llm.stream_chat(HELLO))[-1].message.content == said
    assert (await llm.achat(HELLO)).message.content == said
    assert [r async for r in await llm.astream_chat(HELLO)][-1].message.content == said


@pytest.mark.parametrize("streaming", [False, True])
def test_usage_is_reported(engine: Engine, streaming: bool) -> None:
    counter = TokenCountingHandler(tokenizer=str.split)
    llm = KVCacheLLM(engine=engine, max_new_tokens=6, callback_manager=CallbackManager([counter]))
    raw = (list(llm.stream_chat(HELLO)) if streaming else [llm.chat(HELLO)])[-1].raw
    prompt = 1 + len("User: hello\nAssistant:")
    usage = {name: raw["usage"][f"{name}_tokens"] for name in ("prompt", "completion", "total")}
    assert usage == {"prompt": prompt, "completion": 6, "total": prompt + 6}
    assert raw["finish_reason"] == "length"
    # That of LlamaIndex reads it.
    assert (counter.prompt_llm_token_count, counter.completion_llm_token_count) == (prompt, 6)


def test_chat_template_writes_messages(chat_engine: Engine, engine: Engine) -> None:
    messages = [
        ChatMessage(role=MessageRole.DEVELOPER, content="be brief"),
        ChatMessage(role=MessageRole.USER, content="hello"),
        ChatMessage(role=MessageRole.CHATBOT, content=None),
    ]
    templated, plain = KVCacheLLM(engine=chat_engine, max_new_tokens=9), KVCacheLLM(engine=engine)
    prompt = "<s><system>be brief</s><user>hello</s><assistant>"
    assert templated.chat_prompt(messages) == prompt
    assert plain.chat_prompt(HELLO) == "User: hello\nAssistant:"
    own = KVCacheLLM(engine=engine, messages_to_prompt=lambda messages: f"[{len(messages)}]")
    assert own.chat_prompt(messages) == "[3]"
    told = templated.metadata
    assert (told.context_window, told.num_output, told.is_chat_model) == (4096, 9, True)
    assert not plain.metadata.is_chat_model
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
    for options in (
        {"temperature": 0.7},
        {"temperature": 0},
        {"temperature": 0.7, "do_sample": False},
    ):
        llm.complete("a", **options)
    configs = [call["generation_config"] for call in seen]
    assert [bool(config.do_sample) for config in configs] == [True, False, False]
    assert [config.temperature == 0.7 for config in configs] == [True, False, False]


def test_stop_and_stopping_ids(engine: Engine) -> None:
    llm = KVCacheLLM(engine=engine, max_new_tokens=6)
    text = llm.complete("Once").text
    assert llm.complete("Once", stop=[text[3]]).text == text[: text.index(text[3])]
    ids = engine.tokenizer(text[2], add_special_tokens=False)["input_ids"]
    ending = KVCacheLLM(engine=engine, max_new_tokens=6, stopping_ids=ids)
    assert ending.complete("Once").text.rstrip(text[2]) == text[: text.index(text[2])]


@pytest.mark.parametrize("name", ["complete", "stream_complete"])
def test_wrong_arguments_are_told(llm: KVCacheLLM, name: str) -> None:
    with pytest.raises(InvalidInputError, match="assistant_early_exit"):
        list(getattr(llm, name)("a", assistant_early_exit=2))


# ---------------------------------------------------------------------- events
async def test_events_once_each(llm: KVCacheLLM, recorder: Recorder) -> None:
    def names() -> list[str]:
        found = [name for name in recorder.names() if "InProgress" not in name]
        recorder.events.clear()
        return found

    complete = ["LLMCompletionStartEvent", "LLMCompletionEndEvent"]
    chat = ["LLMChatStartEvent", "LLMChatEndEvent"]
    llm.complete("a")
    assert names() == complete
    llm.chat(HELLO)
    assert names() == chat
    list(llm.stream_complete("a"))
    assert len(recorder.named("LLMCompletionInProgressEvent")) == 7
    (end,) = recorder.named("LLMCompletionEndEvent")
    assert end.response.raw["usage"]["completion_tokens"] == 6
    assert names() == complete
    assert [one async for one in await llm.astream_complete("a")]
    assert names() == complete
    assert [one async for one in await llm.astream_chat(HELLO)]
    assert names() == chat


async def test_every_call_is_a_span(llm: KVCacheLLM) -> None:
    handler = SimpleSpanHandler()
    get_dispatcher().add_span_handler(handler)
    try:
        llm.answer(*ASKED)
        list(llm.stream_answer(*ASKED))
        await llm.aanswer(*ASKED)
        await llm.astream_answer(*ASKED)
        llm.complete("a")
    finally:
        get_dispatcher().span_handlers.remove(handler)
    calls = [span.id_.partition("-")[0] for span in handler.completed_spans]
    names = ["answer", "stream_answer", "aanswer", "astream_answer", "complete"]
    assert calls == [f"KVCacheLLM.{name}" for name in names]


@pytest.mark.timeout(60)
async def test_failure_while_streaming_reaches_the_consumer(
    llm: KVCacheLLM, recorder: Recorder
) -> None:
    with failing_at_the_third_token(), pytest.raises(RuntimeError, match="out of memory"):
        list(llm.stream_complete("a"))
    assert "ExceptionEvent" in recorder.names()
    with failing_at_the_third_token(), pytest.raises(RuntimeError, match="out of memory"):
        _ = [one async for one in await llm.astream_complete("a")]


# ---------------------------------------------------------------------- the event loop
CALLS: dict[str, Callable[..., Any]] = {
    "acomplete": lambda llm, **options: llm.acomplete("a", **options),
    "achat": lambda llm, **options: llm.achat(HELLO, **options),
    "aanswer": lambda llm, **options: llm.aanswer(*ASKED, **options),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
async def test_event_loop_is_not_blocked(
    llm: KVCacheLLM, call: Callable[..., Any], loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop.watch(monkeypatch, type(make_model()), "forward")
    await call(llm)
    assert loop.turns > 3


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
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
    alone = [llm.complete(f"Story {at}", max_new_tokens=2).text for at in range(40)]
    with access.lock(llm.engine):
        waiting = [llm.acomplete(f"Story {at}", max_new_tokens=2) for at in range(40)]
        tasks = [asyncio.create_task(one) for one in waiting]
        await asyncio.sleep(0.2)
        await asyncio.wait_for(asyncio.to_thread(int), timeout=20)
    assert [one.text for one in await asyncio.gather(*tasks)] == alone


# ---------------------------------------------------------------------- readers who leave
LONG = 3000
STREAMS = [("stream_complete", ("a",)), ("stream_chat", (HELLO,)), ("stream_answer", ASKED)]


@pytest.fixture
def talkative(engine: Engine, recorder: Recorder) -> KVCacheLLM:
    """Answers for so long that only stopping it ends a test in time.

    Its events are kept, and with them the tracebacks, which hold streams longer than nobody does.
    """
    options = {"min_new_tokens": LONG}
    return KVCacheLLM(engine=engine, max_new_tokens=LONG, generate_kwargs=options)


@pytest.mark.parametrize("by", ["break", "async aclose", "async break"])
@pytest.mark.parametrize(("name", "asked"), STREAMS)
async def test_leaving_a_stream_stops_it(
    talkative: KVCacheLLM, forwards: list[int], name: str, asked: Any, by: str
) -> None:
    if by == "break":
        for _ in getattr(talkative, name)(*asked):
            break
        at_once = len(forwards)
        assert settled(forwards) == at_once
    else:
        stream = await getattr(talkative, f"a{name}")(*asked)
        await anext(stream)
        if by == "async aclose":
            await stream.aclose()
        del stream
    assert await asyncio.to_thread(settled, forwards) < LONG / 2
    assert len(talkative.complete("a", max_new_tokens=2, min_new_tokens=2).text) == 2


@pytest.mark.parametrize(("name", "asked"), STREAMS)
async def test_cancelling_before_the_first_piece_stops_it(
    talkative: KVCacheLLM, forwards: list[int], name: str, asked: Any
) -> None:
    opened = asyncio.Event()

    async def read() -> None:
        stream = await getattr(talkative, f"a{name}")(*asked)
        opened.set()
        await anext(stream)

    task = asyncio.create_task(read())
    await opened.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(settled, forwards) < LONG / 2


@pytest.mark.parametrize(("name", "asked"), STREAMS)
def test_event_loop_that_ends_stops_its_streams(
    talkative: KVCacheLLM, forwards: list[int], name: str, asked: Any
) -> None:
    held, complaints = list[Any](), list[Any]()

    async def begin() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, complaint: complaints.append(complaint))
        held.append(await getattr(talkative, f"a{name}")(*asked))
        await anext(held[0])

    asyncio.run(begin())
    assert settled(forwards) < LONG / 2
    assert complaints == []


# ---------------------------------------------------------------------- settings
def test_settings_without_the_model(engine: Engine) -> None:
    llm = KVCacheLLM(engine=engine, policy=FullRecompute(), model_kwargs={"dtype": torch.float32})
    settings = llm.to_dict()
    assert settings["class_name"] == "KVCacheLLM"
    assert settings["model_kwargs"] == {"dtype": "torch.float32"}
    assert "engine" not in json.dumps(settings)
    assert getattr(llm, "to_payload", llm.to_dict)()  # of newer versions of llama-index-core


def test_loads_when_first_used(saved: str, tmp_path: Path) -> None:
    llm = KVCacheLLM(
        model_name=saved,
        tokenizer_name=saved,
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
    assert again.complete("a").text == llm.complete("a").text
    assert again.engine.generate("q?", ["text"], max_new_tokens=1).metrics.hits == {"disk": 1}


class Tiny(KVCacheLLM):
    """An LLM of a user, whose `__init__` takes nothing."""

    def __init__(self) -> None:
        super().__init__(model_name="tiny", max_new_tokens=3, policy="reuse")


def test_an_llm_with_an_init_of_its_own_is_pickled() -> None:
    llm = Tiny()
    llm.max_new_tokens = 5
    again = pickle.loads(pickle.dumps(llm))
    assert type(again) is Tiny
    assert (again.model_name, again.max_new_tokens) == ("tiny", 5)
    assert again._policy == llm._policy is not None


def test_type_checkers_read_the_arguments_that_there_are() -> None:
    """What they are told stands beside the code that runs."""
    stubs = [
        node.args
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(KVCacheLLM))))
        if isinstance(node, ast.FunctionDef) and node.name == "__init__"
    ]
    (real,) = ast.parse(textwrap.dedent(inspect.getsource(LLMSettings.__init__))).body
    assert isinstance(real, ast.FunctionDef)
    assert [ast.unparse(one) for one in stubs] == [ast.unparse(real.args)]


def test_a_loaded_model_is_packed_where_that_is_asked_for() -> None:
    plain = Engine.from_pretrained("tiny")
    spec = plain.spec
    common = {"model": plain.model, "tokenizer": plain.tokenizer, "template": plain.template}
    assert KVCacheLLM(**common).engine.spec == spec
    assert KVCacheLLM(**common, weight_format="int8").engine.spec != spec


# peft asks transformers by a name that transformers is about to drop.
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_a_tokenizer_of_a_gguf_file_and_a_model_with_an_adapter_are_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gguf", reason="pip install 'kvcache-rag[gguf]'")
    from gguf_files import write_gguf
    from peft import LoraConfig, get_peft_model

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = write_gguf(tmp_path / "model.gguf")
    by_tokenizer = KVCacheLLM(model_name=str(path), tokenizer_name=str(path))
    assert by_tokenizer.engine.spec == Engine.from_pretrained(path).spec
    inner = Engine.from_pretrained(path, weight_format="plain").model  # as PEFT needs it
    adapted = get_peft_model(
        inner, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    )
    given = KVCacheLLM(model=adapted, tokenizer=by_tokenizer.engine.tokenizer)
    assert given.complete("who?", max_new_tokens=2).raw["usage"]["completion_tokens"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model_name": "./no/such/folder"}, "no model folder"),
        ({"model_name": "tiny", "tokenizer_name": "./no/such/folder"}, "tokenizer"),
        ({"model": make_model()}, "tokenizer="),
        ({"model": "smollm2"}, r"KVCacheLLM\(model_name='smollm2'\)"),
    ],
)
def test_what_cannot_be_loaded_is_told(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        _ = KVCacheLLM(**options).engine


def test_public_names_are_sorted_and_load() -> None:
    import llama_index.kvcache_rag as package

    assert package.__all__ == sorted(package.__all__)
    assert set(package.__all__) <= set(dir(package))
    for name in package.__all__:
        assert getattr(package, name).__name__ == name
    with pytest.raises(AttributeError, match="Nothing"):
        _ = package.Nothing
    assert kvcache_rag.__version__
