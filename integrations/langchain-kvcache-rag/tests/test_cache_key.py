"""A cache of answers never gives one model the words of another."""

from __future__ import annotations

import copy
import subprocess
import sys
from functools import reduce
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

import pytest
import torch
from chat_model_helpers import over
from langchain_core.caches import InMemoryCache
from langchain_core.documents import Document
from langchain_core.load import dumps
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from pydantic import SecretStr
from small import CHAT_TEMPLATE, make_model, make_tokenizer
from tokenizers import normalizers
from transformers import GenerationConfig
from verdicts import make_verdict

from kvcache_rag import (
    CacheBlend,
    CacheClip,
    DiskStore,
    Engine,
    FullRecompute,
    MemoryStore,
    PromptTemplate,
    Reuse,
)
from kvcache_rag.auxiliary import Auxiliary
from kvcache_rag.policies import ReusePolicy
from kvcache_rag.verdict import Gate
from langchain_kvcache_rag import ChatKVCache, document_block, settings
from langchain_kvcache_rag.settings import NO_ANSWER

if TYPE_CHECKING:
    from collections.abc import Callable

FIELDS = ChatKVCache.model_fields
NAMED = sorted(FIELDS.keys() - NO_ANSWER.keys())


def key(llm: Any, **call: Any) -> str:
    found: str = llm._get_llm_string(**call)
    return found


# ---------------------------------------------------------------------- settings
OF_TYPES: dict[Any, tuple[Any, Any]] = {
    str: ("one", "two"),
    int: (3, 4),
    float: (0.25, 0.5),
    bool: (True, False),
    dict: ({"a": 1}, {"a": "1"}),
    list: (["a"], ["b"]),
    SecretStr: (SecretStr("a"), SecretStr("b")),
    PromptTemplate: (PromptTemplate(), PromptTemplate(chunk_end="\n")),
    ReusePolicy: (FullRecompute(), CacheBlend(0.2)),
}


OF_NAMES = {"backend": ("transformers", "llama.cpp")}
"""Texts of which not every one will do."""


def two_values(kind: Any) -> tuple[Any, Any]:
    """Two values of the type of a field."""
    if get_origin(kind) is Literal:
        return get_args(kind)[:2]
    if hasattr(kind, "__metadata__"):
        return two_values(get_args(kind)[0])
    if kind in OF_TYPES:
        return OF_TYPES[kind]
    options = [one for one in get_args(kind) if one is not type(None)]
    if get_origin(kind) in (dict, list):
        return OF_TYPES[get_origin(kind)]
    if not options:
        raise AssertionError(f"say two values of {kind} in OF_TYPES")
    return two_values(options[0])


@pytest.fixture
def opened(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """The engine that every model has, whatever its settings."""
    monkeypatch.setattr(settings, "open_engine", lambda *_, **__: engine)
    monkeypatch.setattr(settings, "remote_engine", lambda *_, **__: engine)
    return engine


@pytest.mark.parametrize("name", NAMED)
def test_models_and_copies_that_differ_in_one_setting_have_two_keys(
    name: str, opened: Engine
) -> None:
    plain = ChatKVCache(model="tiny")
    values = OF_NAMES.get(name) or two_values(FIELDS[name].rebuild_annotation())
    made = [[ChatKVCache(**{"model": "tiny", name: one}) for one in values] for _ in range(2)]
    keys, again = ([key(one) for one in models] for models in made)
    is_default = FIELDS[name].default in values
    assert len({*keys, key(plain)}) == 3 - is_default
    assert keys == again
    for value in values:
        if value != getattr(plain, name):
            assert key(plain.model_copy(update={name: value})) != key(plain)


def test_what_changes_no_answer_changes_no_key(opened: Engine, tmp_path: Any) -> None:
    assert NO_ANSWER.keys() < FIELDS.keys()
    plain = ChatKVCache(model="tiny")
    moved = ChatKVCache(
        model="tiny", kv_dir=str(tmp_path), kv_ttl=3, max_retries=1, tags=["a"], streaming=True
    )
    assert key(moved) == key(plain)
    hub = [{"token": token, "revision": "r"} for token in ("hf_1", "hf_2")]
    first, second = (key(ChatKVCache(model="tiny", model_kwargs=one)) for one in hub)
    assert first == second
    # Settings that came later leave the keys of before as they were.
    assert not {"auxiliary", "backend", "weight_format"} & {*plain._identifying_params}


# ---------------------------------------------------------------------- the call
class Processor:
    """Has a setting that its `repr` does not say."""

    def __init__(self, bias: float) -> None:
        self.bias = bias

    def __call__(self, ids: Any, scores: Any) -> Any:
        return scores + self.bias


CALLS: list[Callable[[], dict[str, Any]]] = [
    dict,
    lambda: {"stop": ["a"]},
    lambda: {"stop": ["b"]},
    lambda: {"max_tokens": 3},
    lambda: {"max_tokens": 3.0},
    lambda: {"max_tokens": "3"},
    lambda: {"tools": [{"type": "function", "function": {"name": "a"}}]},
    lambda: {"tools": [{"type": "function", "function": {"name": "b"}}]},
    lambda: {"response_format": {"type": "json_object"}},
    lambda: {"json_schema": {"type": "object"}},
    lambda: {"policy": Reuse()},
    lambda: {"policy": CacheBlend(0.2)},
    lambda: {"policy": CacheBlend(0.3)},
    lambda: {"scores": torch.arange(5000.0)},
    lambda: {"scores": torch.arange(5000.0).roll(2500)},
    lambda: {"scores": torch.arange(5000.0).numpy()},
    lambda: {"generation_config": GenerationConfig(num_beams=2)},
    lambda: {"generation_config": GenerationConfig(num_beams=3)},
    lambda: {"logits_processor": [Processor(1)]},
    lambda: {"logits_processor": [Processor(2)]},
    lambda: {"logits_processor": [lambda ids, scores: scores]},
    lambda: {"logits_processor": [lambda ids, scores: -scores]},
    lambda: {"generator": torch.Generator()},
]


def test_calls_that_differ_have_different_keys(llm: ChatKVCache) -> None:
    # Each is gone before the next is made, so that addresses come again.
    keys = [key(llm, **call()) for call in CALLS]
    assert len({*keys}) == len(CALLS)
    processor = Processor(1)
    first = key(llm, logits_processor=[processor])
    assert key(llm, logits_processor=[processor]) == first
    processor.bias = 2
    assert key(llm, logits_processor=[processor]) != first


# ---------------------------------------------------------------------- the engine
def engine_of(model: Any = None, tokenizer: Any = None, **options: Any) -> Engine:
    options.setdefault("store", MemoryStore())
    return Engine(model or make_model(), tokenizer or make_tokenizer(), **options)


def chat_tokenizer() -> Any:
    tokenizer = copy.deepcopy(make_tokenizer())
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def other_weights() -> Any:
    model = copy.deepcopy(make_model())
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    return model


def gated() -> Engine:
    verdict = make_verdict(engine_of().identity, {repr(Reuse()): 1.0})
    return engine_of(gate=Gate(verdict, threshold=0.9))


ENGINES: dict[str, Callable[[], Engine]] = {
    "plain": engine_of,
    "weights": lambda: engine_of(other_weights()),
    "tokenizer": lambda: engine_of(tokenizer=chat_tokenizer()),
    "codec": lambda: engine_of(store=MemoryStore(codec="int8")),
    "combinations": lambda: engine_of(combinations=MemoryStore(codec="int8")),
    "template": lambda: engine_of(template=PromptTemplate(question="Q: {question}")),
    "policy": lambda: engine_of(policy=FullRecompute()),
    "namespace": lambda: engine_of(namespace="a"),
    "context_window": lambda: engine_of(context_window=300),
    "packed_attention": lambda: engine_of(packed_attention=False),
    "auxiliary": lambda: engine_of(auxiliary=Auxiliary(engine_of())),
    "other auxiliary": lambda: engine_of(auxiliary=Auxiliary(engine_of(other_weights()))),
    "auxiliary of a policy": lambda: engine_of(policy=CacheClip(Auxiliary(engine_of()))),
    "gate": gated,
    "rotation": lambda: engine_of(rotation="copied"),
    "none_below": lambda: engine_of(none_below=0),
}


def test_engines_that_differ_in_one_option_have_different_keys(tmp_path: Any) -> None:
    keys = {name: key(ChatKVCache(engine=make())) for name, make in ENGINES.items()}
    assert len({*keys.values()}) == len(ENGINES)
    assert key(ChatKVCache(engine=engine_of())) == keys["plain"], "the place of chunks is nothing"
    assert key(ChatKVCache(engine=engine_of(store=DiskStore(tmp_path)))) == keys["plain"]
    assert key(ChatKVCache(engine=engine_of(prompt_memory=0))) == keys["plain"], "nor what is kept"
    known = {"model", "tokenizer", "store", "gate", "prompt_memory"}
    assert {*engine_of()._options} - known <= ENGINES.keys()


def in_place(engine: Engine) -> None:
    with torch.no_grad():
        engine.model.lm_head.weight.mul_(2)


def told(engine: Engine) -> None:
    engine.model.lm_head.weight.data.mul_(2)
    engine.weights_changed()


def set_to(path: str, value: Any) -> Callable[[Engine], None]:
    """Sets an attribute of an engine, or of something that it has."""
    *parents, name = path.split(".")
    return lambda engine: setattr(reduce(getattr, parents, engine), name, value)


CHANGES: dict[str, Callable[[Engine], Any]] = {
    "in place": in_place,
    "told": told,
    "generation": set_to("model.generation_config.repetition_penalty", 3.0),
    "tokens": lambda engine: engine.tokenizer.add_tokens(["cat"]),
    "chat template": set_to("tokenizer.chat_template", CHAT_TEMPLATE),
    "normalizer": set_to("tokenizer.backend_tokenizer.normalizer", normalizers.Lowercase()),
    "policy": set_to("policy", FullRecompute()),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_is_changed_in_place_changes_the_key(change: Callable[[Engine], Any]) -> None:
    engine = engine_of(copy.deepcopy(make_model()), copy.deepcopy(make_tokenizer()))
    llm = ChatKVCache(engine=engine, max_tokens=4)
    before = key(llm)
    llm.invoke(over("what?", "one"))
    engine.tokenizer(["a", "bc"], truncation=True, max_length=1, padding=True)
    assert key(llm) == before, "what an app switches of its tokenizer changes nothing"
    change(engine)
    assert key(llm) != before
    assert key(llm) == key(llm)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")
def test_the_second_model_does_not_answer_with_the_words_of_the_first() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj", "lm_head"], init_lora_weights=False)
    torch.manual_seed(0)
    model = peft.get_peft_model(copy.deepcopy(make_model()), config, "one")
    model.add_adapter("two", config)
    llm = ChatKVCache(engine=engine_of(model), max_tokens=12, cache=InMemoryCache())
    fresh = llm.model_copy(update={"cache": False})
    texts = []
    for name in ("one", "two", "one"):
        model.set_adapter(name)
        texts.append(llm.invoke("Hello").text)
        assert texts[-1] == fresh.invoke("Hello").text
    assert texts[0] == texts[2] != texts[1]


async def test_a_key_loads_the_model_beside_the_event_loop(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, loop: Any
) -> None:
    monkeypatch.setattr(settings, "open_engine", lambda *_, **__: engine)
    loop.watch(monkeypatch, settings, "open_engine")
    llm = ChatKVCache(model="tiny", max_tokens=2, cache=InMemoryCache())
    first = await llm.ainvoke("Hello")
    assert loop.turns == 1
    assert (await llm.ainvoke("Hello")).text == first.text == llm.invoke("Hello").text


def test_a_key_is_the_same_in_another_process() -> None:
    code = (
        "from langchain_kvcache_rag import ChatKVCache; from kvcache_rag import CacheBlend;"
        "llm = ChatKVCache(model='tiny', stop=['a'], policy=CacheBlend(0.2));"
        "print(llm._get_llm_string(tools=[{'a': {1, 2}}]))"
    )
    llm = ChatKVCache(model="tiny", stop=["a"], policy=CacheBlend(0.2))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == key(llm, tools=[{"a": {1, 2}}]) + "\n"


# ---------------------------------------------------------------------- the prompt
def test_prompts_over_other_chunks_share_no_key() -> None:
    def scored(score: Any) -> Document:
        return Document("one", metadata={"relevance_score": score})

    def found(*documents: Document) -> list[Any]:
        call = AIMessage("", tool_calls=[{"name": "find", "args": {}, "id": "1"}])
        result = ToolMessage("found", tool_call_id="1", artifact=[*documents])
        return [HumanMessage("?"), call, result]

    # Which documents answer hangs on their scores.
    prompts = [
        *(over("?", "one"), over("?", "two"), over("?", "one", "two"), over("?", "two", "one")),
        *([HumanMessage([document_block(scored(one)), "?"])] for one in (0.5, 0.75)),
        *(found(), found(Document("one")), found(Document("two"))),
        *(found(scored(one)) for one in (0.5, 0.75, torch.tensor(0.5).numpy())),
    ]
    assert len({dumps(one) for one in prompts}) == len(prompts)


def test_an_answer_from_other_documents_is_no_cached_one(engine: Engine) -> None:
    """Which documents are answered from follows their scores, their texts and their order."""
    llm = ChatKVCache(engine=engine, max_tokens=4, policy="bestfew:1", cache=InMemoryCache())

    def asked(texts: str, *scores: float) -> list[Any]:
        metadata = [{"relevance_score": one} for one in scores] or [{} for _ in texts]
        found = [Document(one, metadata=two) for one, two in zip(texts, metadata, strict=True)]
        return [HumanMessage([*map(document_block, found), "?"])]

    def place(message: AIMessage) -> int:
        (found,) = message.response_metadata["kv_cache"]["answered_from"]
        return int(found)

    prompts = [asked("ab"), asked("ba"), asked("abc"), asked("ab", 2, 1), asked("ab", 1, 2)]
    fresh = llm.model_copy(update={"cache": False})
    for _ in range(2):
        answers = [llm.invoke(prompt) for prompt in prompts]
        assert [place(one) for one in answers] == [0, 0, 0, 0, 1]
        assert [one.text for one in answers] == [fresh.invoke(prompt).text for prompt in prompts]
    for scores, best in (([1, 2], 1), ([2, 1], 0), ([1, 2], 1)):
        assert place(llm.invoke(asked("ab"), scores=scores)) == best
