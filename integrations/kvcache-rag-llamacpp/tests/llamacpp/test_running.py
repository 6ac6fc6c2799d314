"""An engine of llama.cpp that runs: stopped, asked by many at once, for long, and by several."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import access
import psutil
import pytest
import torch
from laws import QUESTION, TEMPLATE, TEXTS, Recorder, error
from llamacpp.asking import POLICIES, After, ids_of, opened, parts, rounding
from llamacpp.ggufs import LENGTH

from kvcache_rag import (
    BestLast,
    Engine,
    FullRecompute,
    InvalidInputError,
    KVCacheRagError,
    MemoryStore,
    PromptTemplate,
    Reuse,
)
from kvcache_rag_llamacpp.binding import is_compiled_for_amx, uses_amx
from kvcache_rag_llamacpp.thread import OwnThread

if TYPE_CHECKING:
    from llamacpp.conftest import Decoder, Files

LONG = ["".join(TEXTS) * 10, "".join(TEXTS[::-1]) * 10]


@pytest.fixture(scope="module", params=["llama", "cohere2"])
def engine(request: pytest.FixtureRequest, files: Files) -> Engine:
    made: Engine = opened(files(request.param))
    made.add(TEXTS)
    return made


# ---------------------------------------------------------------------- stopped
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"policy": Reuse(), "num_beams": 3},
        {"policy": BestLast(), "temperature": 0.8},
    ],
    ids=str,
)
def test_a_pass_ends_when_an_event_is_set(engine: Engine, options: dict[str, Any]) -> None:
    """Law: while a long prompt is computed, not behind it; the next question is right."""
    options = {"policy": FullRecompute(), "max_new_tokens": 30, "min_new_tokens": 30, **options}
    question = "".join(TEXTS) * 6
    whole = After(10**9)
    expected = engine.generate(question, LONG, cancelled=whole, **options)
    assert whole.seen > 100, "an event is looked at between the parts of a pass"
    bits = engine.logits(QUESTION, TEXTS, policy=Reuse())
    for looks in (0, 3, whole.seen // 40):
        event = After(looks)
        answer = engine.generate(question, LONG, cancelled=event, **options)
        assert event.seen < looks + 20, "the pass went on"
        assert answer.finish_reason == "length"
        assert len(answer.token_ids) <= 1
        assert torch.equal(engine.logits(QUESTION, TEXTS, policy=Reuse()), bits)
    if "temperature" not in options:
        again = engine.generate(question, LONG, cancelled=threading.Event(), **options)
        assert again.token_ids == expected.token_ids


def test_a_callback_overwrites_nothing_of_the_answer(engine: Engine) -> None:
    """Chunks are computed in its memory, whoever asks for them."""
    expected = engine.generate(QUESTION, TEXTS, policy=Reuse(), max_new_tokens=4).token_ids
    for call in (
        lambda: engine.add(["What is added meanwhile."]),
        lambda: engine.in_namespace("other").generate(QUESTION, TEXTS[:1], max_new_tokens=1),
    ):
        with pytest.raises(InvalidInputError, match="is answering, and its callbacks"):
            engine.generate(QUESTION, TEXTS, emit=lambda _, call=call: call(), max_new_tokens=4)
        again = engine.generate(QUESTION, TEXTS, policy=Reuse(), max_new_tokens=4)
        assert again.token_ids == expected


def test_chunks_are_computed_until_nobody_wants_them(engine: Engine) -> None:
    texts = [f"{number}: {''.join(TEXTS)}" for number in range(4)]
    tenant = engine.in_namespace("stopped")
    for looks in (0, 1, 5, 20):
        answer = tenant.generate(QUESTION, texts, policy=Reuse(), cancelled=After(looks))
        assert (answer.text, answer.finish_reason) == ("", "length")
    found = tenant.generate(QUESTION, texts, policy=Reuse(), max_new_tokens=4)
    expected = engine.generate(QUESTION, texts, policy=Reuse(), max_new_tokens=4)
    assert found.token_ids == expected.token_ids


# ---------------------------------------------------------------------- by many
def test_whoever_asks_at_once_gets_his_own_answer(engine: Engine) -> None:
    """Law: eight threads, other questions, chunks and policies; chunks are missing at first."""
    asked = [
        (f"{number} is what?", [f"{number}{text}" for text in TEXTS[: 1 + number % 3]])
        for number in range(24)
    ]

    def ask(number: int, engine: Engine) -> tuple[int, ...]:
        policy = POLICIES[number % len(POLICIES)]
        if number % 4 == 3:
            stream = engine.stream(*asked[number], policy=policy, max_new_tokens=6)
            "".join(stream)
            return stream.answer.token_ids
        return engine.generate(*asked[number], policy=policy, max_new_tokens=6).token_ids

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda number: ask(number, engine), range(24)))
    alone = Engine(engine.model, engine.tokenizer, template=TEMPLATE, store=MemoryStore())
    assert found == [ask(number, alone) for number in range(24)]
    assert len({*found}) > 12


# ---------------------------------------------------------------------- several engines
def test_engines_of_one_model_have_their_own_prefixes(files: Files, own: Decoder) -> None:
    first = opened(files("llama"))
    template = PromptTemplate(system="Look at these, one by one: ", chunk_start="<d>")
    second = Engine(first.model, first.tokenizer, template=template)
    third = Engine(first.model, first.tokenizer, template=PromptTemplate(system=""))
    for texts in ([text] for text in (*TEXTS, "a", "bc")):
        for engine in (first, second, third):
            expected = own(files("llama")).stitched(*parts(ids_of(engine, [*texts, *TEXTS])))
            found = engine.logits(QUESTION, [*texts, *TEXTS], policy=Reuse())
            assert error(found, expected) < rounding("llama")


def test_a_longer_prefix_of_before_takes_no_cells(files: Files, own: Decoder) -> None:
    first = opened(files("llama"), template=PromptTemplate(system="a" * 220))
    first.add(["b"])
    second = Engine(first.model, first.tokenizer, template=PromptTemplate(system="c"))
    del first
    text = "d" * 200
    expected = own(files("llama")).stitched(*parts(ids_of(second, [text, "e"])))
    found = second.logits(QUESTION, [text, "e"], policy=Reuse())
    assert error(found, expected) < rounding("llama")


def test_an_engine_that_is_made_meanwhile_disturbs_no_answer(files: Files) -> None:
    engine = opened(files("llama"))
    options: dict[str, Any] = {"max_new_tokens": 120, "min_new_tokens": 120, "policy": Reuse()}
    expected = engine.generate(QUESTION, TEXTS, **options).token_ids
    with ThreadPoolExecutor(3) as pool:
        made = [
            pool.submit(Engine, engine.model, engine.tokenizer, template=TEMPLATE) for _ in range(6)
        ]
        found = [engine.generate(QUESTION, TEXTS, **options).token_ids for _ in range(6)]
        others = [one.result() for one in made]
    assert found == [expected] * 6
    assert {other.spec for other in others} == {engine.spec}
    assert others[0].generate(QUESTION, TEXTS, **options).token_ids == expected


def test_a_cache_of_before_is_refused(engine: Engine) -> None:
    model, ids = access.adapter(engine), torch.tensor([[5, 6, 7]])
    cache = model.new_cache(torch.ones_like(ids), room=4)
    model.forward(ids[:, :2], cache, torch.arange(2))
    engine.generate(QUESTION, TEXTS, policy=Reuse(), max_new_tokens=1)
    with pytest.raises(KVCacheRagError, match="belongs to an earlier answer"):
        model.forward(ids[:, 2:], cache, torch.arange(2, 3))


def test_what_nobody_holds_is_freed(files: Files) -> None:
    engine = opened(files("llama"), context_window=LENGTH)
    engine.generate(QUESTION, LONG, policy=Reuse(), max_new_tokens=1)
    llama = weakref.ref(access.adapter(engine).llama)
    finalizers = [llama()._free_model, llama()._free_context]
    del engine
    gc.collect()
    assert llama() is None
    assert not any(one.alive for one in finalizers)


def test_threads_are_those_that_torch_has(files: Files) -> None:
    engine = opened(files("llama"))
    llama = access.adapter(engine).llama
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        engine.generate(QUESTION, TEXTS, policy=Reuse(), max_new_tokens=1)
        assert llama.lib.llama_n_threads(llama.context) == 2
    finally:
        torch.set_num_threads(before)
    engine.generate(QUESTION, TEXTS, policy=Reuse(), max_new_tokens=1)
    assert llama.lib.llama_n_threads(llama.context) == before
    fixed = opened(files("llama"), model_kwargs={"n_threads": 3})
    assert fixed.model.llama.threads() == 3


@pytest.mark.parametrize(
    ("comment", "is_fit"),
    [
        (b"\0GCC: (Debian 12.2.0-14+deb12u1) 12.2.0\0", False),
        (b"\0GCC: (GNU) 14.2.1 20250110\0", True),
        (b"\0GCC: (Debian 12.2.0-14) 12.2.0\0Debian clang version 19.1.7 (3)\0", True),
        (b"\0libomp.so.5\0libc.so.6\0", True),  # clang's, without the comment
        (b"\0libgomp.so.1\0", False),
    ],
)
def test_amx_is_used_where_the_compiler_is_known_to_do_it_right(
    comment: bytes, is_fit: bool
) -> None:
    assert is_compiled_for_amx(b"\x7fELF" + comment) is is_fit


def test_a_file_is_mapped_unless_its_weights_are_copied(files: Files) -> None:
    """Mapped beside a copy it would take as much memory again."""
    path = files("llama@7")
    llama = opened(path).model.llama
    mapped = {area.path for area in psutil.Process().memory_maps()}
    assert (str(path) in mapped) is not uses_amx(llama.lib)


def test_what_is_computed_in_a_thread_of_its_own_has_ended_when_the_call_has() -> None:
    """Also by Ctrl-C, or the next question would find the context in use."""
    begun, ended, threads = [], [], set()

    def slow() -> int:
        begun.append(1)
        threads.add(threading.get_ident())
        time.sleep(0.01)
        ended.append(1)
        return 7

    called = OwnThread()
    for wait in range(40):  # while it is begun, waits, and is at its end
        timer = threading.Timer(wait * 0.0005, signal.raise_signal, [signal.SIGINT])
        with suppress(KeyboardInterrupt):
            timer.start()
            called(slow)
            timer.join()
            time.sleep(0.01)
        assert len(begun) == len(ended)
        timer.join()
    assert called(slow) == 7
    assert threading.get_ident() not in threads
    with pytest.raises(ZeroDivisionError):
        called(lambda: 1 // 0)
    if (child := os.fork()) == 0:  # which has no threads
        os._exit(called(slow))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    (thread,) = [one for one in threading.enumerate() if one is called._thread]
    del called
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


# ---------------------------------------------------------------------- prompts that begin alike
OTHER = "Who was it, and when?"


def asked(engine: Engine, question: str, texts: list[str] = TEXTS, **options: Any) -> Any:
    options = {"policy": Reuse(), "max_new_tokens": 4, **options}
    return engine.generate(question, texts, **options).metrics


def first_logits(engine: Engine, question: str, **options: Any) -> torch.Tensor:
    seen = Recorder()
    asked(engine, question, logits_processor=[seen], **options)
    return seen.steps[0].float()


@pytest.mark.parametrize("policy", [FullRecompute(), Reuse(), BestLast(0.5)], ids=repr)
def test_law_what_begins_alike_goes_on_alike(engine: Engine, policy: Any) -> None:
    engine.forget_buffer()
    reference = first_logits(engine, OTHER, policy=policy)
    engine.forget_buffer()
    asked(engine, QUESTION, policy=policy)
    assert error(first_logits(engine, OTHER, policy=policy), reference) < rounding("llama")
    again = asked(engine, OTHER, policy=policy)
    whole = again.prompt_tokens - (0 if policy.is_full else again.prefix_tokens)
    assert again.continued_tokens == whole - again.reused_tokens - 1
    # Logits are of all tokens, also where an answer's would be of the last alone.
    after = engine.logits(OTHER, TEXTS, policy=policy)
    engine.forget_buffer()
    assert error(after, engine.logits(OTHER, TEXTS, policy=policy)) < rounding("llama")


def test_it_would_notice_other_cells(engine: Engine) -> None:
    engine.forget_buffer()
    reference = first_logits(engine, OTHER)
    asked(engine, QUESTION, TEXTS[::-1])
    kept = engine._bound.runner.context_builder._kept
    texts_there = kept._beginning
    asked(engine, QUESTION)
    right = kept._beginning
    asked(engine, QUESTION, TEXTS[::-1])
    assert kept._beginning == texts_there
    kept._beginning = right  # as if chunks in another order were the same
    assert error(first_logits(engine, OTHER), reference) > rounding("llama")


def test_what_is_left_is_not_gone_on_from_where_it_is_something_else(engine: Engine) -> None:
    def continued(between: Any = None, texts: list[str] = TEXTS, **options: Any) -> int:
        asked(engine, QUESTION)
        if between is not None:
            between()
        tokens: int = asked(engine, QUESTION, texts, **options).continued_tokens
        return tokens

    assert continued() > 0
    assert continued(texts=TEXTS[::-1]) == 0
    assert continued(policy=FullRecompute()) == 0
    assert continued(num_beams=2) == 0
    assert continued(lambda: engine.add(["Something new."])) == 0  # computed in the same cells
    assert continued(lambda: engine.logits(OTHER, TEXTS, policy=Reuse())) == 0
    assert continued(lambda: asked(engine.in_namespace("other"), QUESTION)) == 0
    assert continued(lambda: engine.generate_batch([(OTHER, TEXTS)] * 2, policy=Reuse())) == 0
    assert continued(engine.forget_buffer) == 0


def test_none_goes_on_where_there_shall_be_no_memory(files: Files) -> None:
    engine = opened(files("llama"), prompt_memory=0)
    asked(engine, QUESTION)
    assert asked(engine, QUESTION).continued_tokens == 0
