"""Input and settings that once went wrong; each of these failed before it was mended."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import access
import pytest
import torch
from laws import QUESTION, TEMPLATE
from transformers import GenerationConfig
from zoo import build, byte_tokenizer

from kvcache_rag import Engine, InvalidInputError, MemoryStore, Message, PromptTemplate
from kvcache_rag.errors import ContextTooLongError, FingerprintMismatchError
from kvcache_rag.generation import StoredChunk

TEXTS = ["The cat sat on the mat.", "A dog ran away from home."]


def make_engine(**options: Any) -> Engine:
    return Engine(build("qwen2"), byte_tokenizer(), **{"template": TEMPLATE, **options})


def test_a_reference_behind_another_prefix_of_the_same_length_never_fails_or_deletes() -> None:
    store = MemoryStore()
    theirs = make_engine(store=store, template=dataclasses.replace(TEMPLATE, system="Read that.\n"))
    mine = make_engine(store=store)
    (key,) = theirs.add(TEXTS[:1])
    expected = mine.generate(QUESTION, TEXTS[:1], max_new_tokens=4)
    answer = mine.generate(QUESTION, [StoredChunk(key, TEXTS[0])], max_new_tokens=4)
    assert answer.token_ids == expected.token_ids
    assert store.contains(key), "another prefix's chunk was deleted"


def test_a_key_behind_another_prefix_of_the_same_length_is_a_mismatch() -> None:
    store = MemoryStore()
    theirs = make_engine(store=store, template=dataclasses.replace(TEMPLATE, system="Read that.\n"))
    (key,) = theirs.add(TEXTS[:1])
    with pytest.raises(FingerprintMismatchError):
        make_engine(store=store).generate(QUESTION, [key], max_new_tokens=1)


def test_no_chunks_and_no_prefix() -> None:
    engine = make_engine(template=PromptTemplate(system=""))
    assert engine.generate("x", [], max_new_tokens=2).metrics.generated_tokens == 2
    assert len(engine.generate_batch([("x", []), ("y", TEXTS)], max_new_tokens=2)) == 2


def test_a_first_call_in_inference_mode_does_not_break_later_ones() -> None:
    engine = make_engine()
    with torch.inference_mode():
        first = engine.generate(QUESTION, TEXTS, max_new_tokens=2)
    assert engine.generate(QUESTION, TEXTS, max_new_tokens=2).text == first.text


def test_a_stream_opened_inside_inference_mode_works_after_a_call() -> None:
    engine = make_engine()
    with torch.inference_mode():
        first = engine.generate(QUESTION, TEXTS, max_new_tokens=2)
        assert "".join(engine.stream(QUESTION, TEXTS, max_new_tokens=2)) == first.text


def test_a_cache_implementation_in_the_models_generation_config_is_overruled() -> None:
    engine = make_engine()
    engine.model.generation_config.cache_implementation = "static"
    assert engine.generate(QUESTION, TEXTS, max_new_tokens=2).metrics.generated_tokens == 2


def test_beams_from_a_generation_config_work() -> None:
    engine = make_engine()
    config = GenerationConfig(num_beams=2, eos_token_id=2, pad_token_id=0)
    ids = engine.tokenize(QUESTION, TEXTS[:1]).all
    plain = engine.model.generate(torch.tensor([ids]), num_beams=2, max_new_tokens=6)
    answer = engine.generate(QUESTION, TEXTS[:1], max_new_tokens=6, generation_config=config)
    assert list(answer.token_ids) == plain[0, len(ids) :].tolist()
    with pytest.raises(InvalidInputError, match="cannot stream"):
        engine.stream(QUESTION, TEXTS[:1], generation_config=config)


def test_a_batch_row_that_ended_at_a_stop_string_holds_no_padding() -> None:
    engine = make_engine()
    questions = [("Who?", ["hello world"]), ("What now?", ["hi there"])]
    singles = [engine.generate(q, c, max_new_tokens=12) for q, c in questions]
    stop = [engine.tokenizer.decode([singles[1].token_ids[2]])]
    singles = [engine.generate(q, c, max_new_tokens=12, stop=stop) for q, c in questions]
    batch = engine.generate_batch(questions, max_new_tokens=12, stop=stop)
    assert [one.token_ids for one in batch] == [one.token_ids for one in singles]
    assert [one.metrics.generated_tokens for one in batch] == [
        one.metrics.generated_tokens for one in singles
    ]


def test_refine_whose_later_rounds_have_no_room_says_so() -> None:
    engine = make_engine(context_window=120)
    with pytest.raises(ContextTooLongError) as caught:
        engine.generate(
            "What is it they saw?", ["a" * 20] * 3, max_new_tokens=20, overflow="refine"
        )
    assert "room for -" not in str(caught.value)


def test_refine_never_exceeds_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    window = 200
    engine = make_engine(
        context_window=window,
        template=dataclasses.replace(TEMPLATE, refine="{question} {answer}"),
    )
    longest = []
    real = access.runner(engine).answers

    def watched(prompts: Any, *rest: Any) -> Any:
        (prompt,), (answer,) = prompts, real(prompts, *rest)
        used = (
            len(access.renderer(engine).prefix_ids)
            + sum(map(len, prompt.chunks))
            + len(prompt.query)
        )
        longest.append(used + prompt.request.max_new_tokens)
        return [dataclasses.replace(answer, text="\ufffd" * 20)]  # 20 tokens that decode to 60

    monkeypatch.setattr(access.runner(engine), "answers", watched)
    engine.generate("Who?", ["a" * 30] * 9, max_new_tokens=20, overflow="refine")
    assert max(longest) <= window


def test_an_empty_stop_string_does_not_swallow_the_answer() -> None:
    engine = make_engine()
    try:
        answer = engine.generate(QUESTION, TEXTS, max_new_tokens=4, stop=[""])
    except InvalidInputError:
        return
    assert answer.text != ""


@pytest.mark.parametrize(
    "options",
    [
        {"history": "text"},
        {"history": [("user", "x")]},
        {"policy": 5},
        {"max_tokens": 5},
        {"stop": 5},
        {"stop": [None]},
    ],
    ids=str,
)
def test_wrong_types_are_said_in_one_sentence(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError):
        make_engine().generate(QUESTION, TEXTS, max_new_tokens=1, **options)


@pytest.mark.parametrize("options", [{"history": None}, {"stopping_criteria": None}], ids=str)
def test_none_means_the_default(options: dict[str, Any]) -> None:
    make_engine().generate(QUESTION, TEXTS, max_new_tokens=1, **options)


def test_chunks_none_is_no_chunks() -> None:
    engine = make_engine()
    none = engine.generate(QUESTION, None, max_new_tokens=1)  # type: ignore[arg-type]  # wrong on purpose
    assert none.token_ids == engine.generate(QUESTION, [], max_new_tokens=1).token_ids


def test_text_that_is_no_unicode_is_named() -> None:
    with pytest.raises(InvalidInputError, match="chunk 1"):
        make_engine().add(["fine", "torn \ud800 pair"])


def test_the_answer_is_not_written_into_the_question() -> None:
    text = PromptTemplate().ask_again("What does {answer} mean in a template?", "42")
    assert "What does {answer} mean" in text


def test_history_that_begins_with_the_assistant_keeps_its_roles() -> None:
    import copy

    tokenizer = copy.deepcopy(byte_tokenizer())
    tokenizer.chat_template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "{% for m in messages %}{{ '<' + m.role + '>' + m.content }}{% endfor %}"
    )
    engine = Engine(build("qwen2"), tokenizer, template=TEMPLATE)
    whole = engine.tokenizer.decode(
        engine.tokenize("q", [], [Message("assistant", "I am Bob")]).all
    )
    assert "<assistant>I am Bob" in whole
    assert whole.startswith(engine.prefix_text)


def test_a_template_that_refuses_a_history_says_so_in_one_sentence() -> None:
    import copy

    tokenizer = copy.deepcopy(byte_tokenizer())
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'assistant' and loop.index0 == 1 and "
        "messages[0].role == 'system' %}{{ raise_exception('Roles must alternate') }}{% endif %}"
        "{{ '<' + m.role + '>' + m.content }}{% endfor %}"
    )
    engine = Engine(build("qwen2"), tokenizer, template=TEMPLATE)
    with pytest.raises(InvalidInputError, match="Roles must alternate"):
        engine.tokenize("q", [], [Message("assistant", "I am Bob")])


def test_a_chat_template_that_cannot_be_rendered_is_one_sentence() -> None:
    import copy

    tokenizer = copy.deepcopy(byte_tokenizer())
    tokenizer.chat_template = "{% for m in messages %}"
    with pytest.raises(InvalidInputError, match="chat template"):
        Engine(build("qwen2"), tokenizer, template=TEMPLATE)


@pytest.mark.parametrize("values", ['{"system": 5}', '{"question": 5}', '{"chunk_start": null}'])
def test_a_template_file_with_other_things_than_texts_is_refused(
    values: str, tmp_path: Path
) -> None:
    (tmp_path / "prompt_template.json").write_text(values)
    with pytest.raises(InvalidInputError):
        PromptTemplate.load(tmp_path)


@pytest.mark.parametrize("what", ["weights", "device", "dtype", "option"])
def test_loading_failures_are_one_sentence(what: str, tmp_path: Path) -> None:
    build("qwen2").save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    options: dict[str, Any] = {}
    if what == "weights":
        (tmp_path / "model.safetensors").write_bytes(b"garbage garbage garbage")
    elif what == "device":
        options["device"] = "nonsense"
    elif what == "dtype":
        options["dtype"] = "flaot32"
    else:
        options["model_kwargs"] = {"foo": 1}
    with pytest.raises(InvalidInputError):
        Engine.from_pretrained(str(tmp_path), **options)


def test_weights_changed_in_this_process_never_meet_the_caches_of_the_hub_model() -> None:
    one, other = build("qwen2"), build("qwen2", seed=3)  # such as merge_and_unload() of a LoRA
    for model in (one, other):
        model.config._commit_hash, model.config._name_or_path = "abc", "some/model"
    specs = {Engine(model, byte_tokenizer(), template=TEMPLATE).spec for model in (one, other)}
    assert len(specs) == 2


def test_weights_kept_in_buffers_are_part_of_the_identity() -> None:
    """GPTQ and AWQ layers keep their quantised weights as buffers."""
    one, other = build("qwen2"), build("qwen2")
    for value, model in enumerate((one, other)):
        model.model.layers[0].register_buffer("qweight", torch.full((4,), value, dtype=torch.int32))
    specs = {Engine(model, byte_tokenizer(), template=TEMPLATE).spec for model in (one, other)}
    assert len(specs) == 2


def test_ttft_counts_from_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    encode = access.renderer(engine).chunk_ids

    def slow(text: str) -> Any:
        time.sleep(0.2)
        return encode(text)

    monkeypatch.setattr(access.renderer(engine), "chunk_ids", slow)
    assert engine.generate(QUESTION, TEXTS, max_new_tokens=1).metrics.ttft > 0.4


def test_a_stream_cancelled_while_it_waits_runs_nothing() -> None:
    engine = make_engine()
    engine.generate(QUESTION, TEXTS, max_new_tokens=1)
    passes: list[int] = []
    engine.model.register_forward_hook(lambda *_: passes.append(1))
    with access.lock(engine):
        stream = engine.stream(QUESTION, TEXTS, max_new_tokens=50)
        time.sleep(0.05)
        stream._cancelled.set()
    stream.close()
    assert passes == []


def test_questions_are_answered_while_a_corpus_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    engine.generate(QUESTION, TEXTS, max_new_tokens=1)

    def add() -> None:
        with suppress(ZeroDivisionError):
            engine.add([f"{n} " * 500 for n in range(60)])

    adding = threading.Thread(target=add)
    adding.start()
    deadline = time.monotonic() + 20
    while engine.store.stats().puts < 6 and time.monotonic() < deadline:
        time.sleep(0.005)
    engine.generate(QUESTION, TEXTS, max_new_tokens=1)
    still_adding = adding.is_alive()
    monkeypatch.setattr(engine.store, "put", lambda *_: 1 / 0)  # the rest is not looked at
    adding.join()
    assert still_adding, "the question waited for the whole corpus"


def test_a_program_that_ends_in_the_middle_of_a_stream_ends_cleanly() -> None:
    code = (
        "import sys; sys.path[:0] = [sys.argv[1]]\n"
        "from zoo import build, byte_tokenizer\n"
        "from kvcache_rag import Engine\n"
        "model = build('qwen2'); model.generation_config.eos_token_id = None\n"
        "stream = Engine(model, byte_tokenizer()).stream('q', ['text'], max_new_tokens=1500)\n"
        "next(stream)\n"
    )
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, str(Path(__file__).parent)],
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stderr[-300:]
