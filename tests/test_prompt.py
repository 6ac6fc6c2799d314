"""Templates: one order for everybody, the prefix fixed, the beginning of the sequence once."""

from __future__ import annotations

import copy
import json
import random
import string
import time
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import access
import pytest
from laws import TEXTS, make_engine
from transformers import AutoTokenizer
from zoo import byte_tokenizer

from kvcache_rag import InvalidInputError, Message, PromptTemplate
from kvcache_rag.models.model_names import TINY, resolve
from kvcache_rag.prompt import renderer as prompt_renderer
from kvcache_rag.prompt.renderer import _SENTINEL, PromptRenderer
from kvcache_rag.prompt.tokens import TextEncoder

if TYPE_CHECKING:
    from pathlib import Path

    from kvcache_rag import Engine

BOS = 1
SYSTEM = "Use the documents.\n"
LLAMA3 = (
    "{{- bos_token }}"
    "{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content']|trim %}"
    "{%- set messages = messages[1:] %}{%- else %}{%- set system = '' %}{%- endif %}"
    "{{- '<|system|>Knowledge: 2023\n\n' + system + '<|end|>' }}"
    "{%- for m in messages %}{{- '<|' + m['role'] + '|>' + m['content']|trim + '<|end|>' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"
)
CHATML = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and not enable_thinking %}{{- '<think></think>' }}"
    "{%- endif %}{%- endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate') }}{% endif %}"
    "{% set role = 'model' if m['role'] == 'assistant' else m['role'] %}"
    "{{ '<start>' + role + '\n' + m['content'] | trim + '<end>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{'<start>model\n'}}{% endif %}"
)
# The system message is written into the last user turn, behind the history.
MISTRAL = (
    "{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content'] %}"
    "{%- set turns = messages[1:] %}{%- else %}{%- set turns = messages %}{%- endif %}"
    "{{- bos_token }}{%- for m in turns %}{%- if m['role'] == 'user' %}"
    "{%- if loop.last and system is defined %}{{- '[INST]' + system + '\n' + m['content'] }}"
    "{%- else %}{{- '[INST]' + m['content'] }}{%- endif %}{{- '[/INST]' }}"
    "{%- else %}{{- m['content'] + eos_token }}{%- endif %}{%- endfor %}"
)
NEWEST_FIRST = "{% for m in messages | reverse %}{{ m['role'] + m['content'] }}{% endfor %}"
NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{% for m in messages %}{{ '<' + m.role + '>' + m.content }}{% endfor %}"
)
SYSTEM_OR_ANSWER = (
    "{% for m in messages %}{% if m.role == 'assistant' and loop.index0 == 1 and "
    "messages[0].role == 'system' %}{{ raise_exception('Roles must alternate') }}{% endif %}"
    "{{ '<' + m.role + '>' + m.content }}{% endfor %}"
)
TEMPLATES: dict[str, str | None] = {
    "llama3": LLAMA3,
    "chatml": CHATML,
    "gemma": GEMMA,
    "mistral": MISTRAL,
    "none": None,
}
TURNS = [Message("user", "And before?"), Message("assistant", "Nothing.")]


def tokenizer_with(chat_template: str | None) -> Any:
    tokenizer = copy.deepcopy(byte_tokenizer())
    tokenizer.chat_template = chat_template
    return tokenizer


def renderer(chat_template: str | None, **parts: Any) -> PromptRenderer:
    template = PromptTemplate(**{"system": SYSTEM, **parts})
    return PromptRenderer(template, tokenizer_with(chat_template))


def text(ids: tuple[int, ...]) -> str:
    decoded: Any = byte_tokenizer().decode(list(ids))
    assert isinstance(decoded, str)
    return decoded


@pytest.mark.parametrize("name", list(TEMPLATES))
def test_chunks_stand_between_the_instruction_and_everything_of_the_request(name: str) -> None:
    found = renderer(TEMPLATES[name])
    query = found.query_ids("Who was it?", TURNS)
    assert text(found.prefix_ids).removeprefix("<bos>") == found.prefix_text.removeprefix("<bos>")
    assert SYSTEM in found.prefix_text
    assert _SENTINEL not in found.prefix_text + text(query)
    assert "before" not in found.prefix_text
    spoken = text(query)
    places = [spoken.index(part) for part in ("And before?", "Nothing.", "Who was it?")]
    assert places == sorted(places)


@pytest.mark.parametrize("name", list(TEMPLATES))
def test_the_prefix_is_the_same_with_and_without_history(name: str) -> None:
    found = renderer(TEMPLATES[name])
    assert found._split([], "Who?")[0] == found.prefix_text
    turns = [{"role": one.role, "content": one.content} for one in TURNS]
    assert found._split(turns, "x")[0] == found.prefix_text
    assert found._split(turns * 3, "x")[0] == found.prefix_text
    as_mappings = found.query_ids("Who?", turns)
    assert as_mappings == found.query_ids("Who?", TURNS)


@pytest.mark.parametrize("name", ["llama3", "gemma", "mistral"])
def test_a_template_that_writes_the_beginning_of_the_sequence_has_it_once(name: str) -> None:
    found = renderer(TEMPLATES[name])
    whole = found.prefix_ids + found.chunk_ids("text") + found.query_ids("Who?", TURNS)
    assert whole[0] == BOS
    assert whole.count(BOS) == 1
    rendered = found.render_chat([{"role": "user", "content": "Hi"}])
    assert found.text_ids(rendered).count(BOS) == 1


def with_habit() -> Any:
    """A tokenizer that begins every text with `<bos>`, as Llama's does."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = tokenizer_with(None)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", BOS)]
    )
    return tokenizer


def test_without_a_template_the_habit_of_the_tokenizer_decides() -> None:
    found = PromptRenderer(PromptTemplate(system=SYSTEM), with_habit())
    assert found.prefix_ids[0] == BOS
    assert BOS not in found.prefix_ids[1:] + found.chunk_ids("text") + found.query_ids("Who?")
    assert found.text_ids("text").count(BOS) == 1
    assert found.text_ids("<bos>text").count(BOS) == 1
    empty = PromptRenderer(PromptTemplate(system=""), with_habit())
    assert empty.prefix_ids == (BOS,)
    without_habit = PromptRenderer(PromptTemplate(system=SYSTEM), tokenizer_with(None))
    assert BOS not in without_habit.prefix_ids + without_habit.text_ids("text")


def test_chatml_needs_no_beginning_even_if_the_tokenizer_has_the_habit() -> None:
    tokenizer = with_habit()
    tokenizer.chat_template = CHATML
    found = PromptRenderer(PromptTemplate(system=SYSTEM), tokenizer)
    assert BOS not in found.prefix_ids
    assert found.prefix_text == f"<|im_start|>system\n{SYSTEM}"


def test_without_a_system_role_the_chunks_stand_in_the_first_user_message() -> None:
    found = renderer(GEMMA)
    assert found.prefix_text == f"<bos><start>user\n{SYSTEM}"
    assert text(found.query_ids("Who?")) == "\nWho?<end>\n<start>model\n"
    with_history = text(found.query_ids("Who?", TURNS))
    assert with_history.startswith("\nAnd before?<end>\n<start>model\nNothing.<end>\n<start>user")


def test_a_system_message_that_moves_to_the_last_turn_is_not_used() -> None:
    found = renderer(MISTRAL)
    assert found.prefix_text == f"<bos>[INST]{SYSTEM}"
    assert text(found.query_ids("Who?", TURNS)).startswith("\nAnd before?[/INST]Nothing.<eos>")


@pytest.mark.parametrize(
    ("chat_template", "said"),
    [
        (NEWEST_FIRST, "something else before the first message"),
        ("{% for m in messages %}", "chat template"),
        (SYSTEM_OR_ANSWER, "Roles must alternate"),
    ],
    ids=["newest first", "no template", "it raises"],
)
def test_a_chat_template_of_no_use_is_said_in_one_sentence(chat_template: str, said: str) -> None:
    with pytest.raises(InvalidInputError, match=said) as caught:
        renderer(chat_template).query_ids("Who?", TURNS[1:])
    assert "\n" not in str(caught.value)


def test_a_history_that_begins_with_the_assistant_keeps_its_roles() -> None:
    found = renderer(NO_SYSTEM).tokenize("q", [], [Message("assistant", "I am Bob")])
    whole = text(found.all)
    assert whole.startswith(renderer(NO_SYSTEM).prefix_text)
    assert "<assistant>I am Bob" in whole


def test_values_for_the_chat_template_reach_it() -> None:
    given = {"enable_thinking": False}
    plain = text(renderer(CHATML).query_ids("Who?"))
    assert plain.endswith("<|im_start|>assistant\n")
    thoughtless = renderer(CHATML, chat_template_kwargs=given)
    assert text(thoughtless.query_ids("Who?")) == plain + "<think></think>"
    assert thoughtless.render_chat([{"role": "user", "content": "x"}]).endswith("<think></think>")


@pytest.mark.parametrize("name", list(TEMPLATES))
@pytest.mark.parametrize("odd", [_SENTINEL, "{question}", "{answer} {0} {{ x }} {% if %}", "\x00"])
def test_odd_texts_stay_as_they_are(name: str, odd: str) -> None:
    found = renderer(TEMPLATES[name], chunk_start="<d>", chunk_end="</d>")
    assert text(found.chunk_ids(odd)) == f"<d>{odd}</d>"
    assert odd in text(found.query_ids(found.template.ask(f"Is it {odd}?")))
    turn = Message("user", f"So {odd}")
    assert odd in text(found.query_ids("Who?", [turn, Message("assistant", "Yes.")]))
    again = found.template.ask_again(f"Is it {odd}?", f"Not {odd}")
    assert f"Is it {odd}?" in again
    assert f"Not {odd}" in again


@pytest.mark.parametrize(
    ("start", "end", "markers"),
    [
        ("Document: ", "\n\n", ("\nDocument:",)),
        ("<|doc_start|>", "<|doc_end|>\n", ("<|doc_start|>", "<|doc_end|>")),
        ("<d>", "<d>", ("<d>",)),
        ("", "\n", ()),
        ("[", "]", ()),  # an answer may well have one
        ("a < b and b > a ", "", ()),
    ],
)
def test_markers_of_documents_are_tags_and_labels(
    start: str, end: str, markers: tuple[str, ...]
) -> None:
    assert PromptTemplate(chunk_start=start, chunk_end=end).markers == markers


def test_a_chat_is_plain_lines_without_a_template() -> None:
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert renderer(None).render_chat(turns) == "System: Be brief.\nUser: Hi\nAssistant:"
    assert "<|im_start|>system\nBe brief.<|im_end|>" in renderer(CHATML).render_chat(turns)


@pytest.mark.parametrize(
    "turn",
    [
        {"role": "system", "content": "Be brief."},
        {"role": "poet", "content": "x"},
        {"role": "user"},
        {"role": "user", "content": ["a", "b"]},
    ],
)
def test_history_holds_only_what_user_and_assistant_said(turn: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError, match=r"history\[1\] must have the role"):
        renderer(CHATML).query_ids("Who?", [TURNS[0], turn])


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"question": "?"}, r"PromptTemplate\.question must contain \{"),
        ({"refine": "{question}"}, r"PromptTemplate\.refine must contain \{"),
        ({"special_tokens": "maybe"}, 'must be "text" or "allow"'),
    ],
)
def test_a_template_of_no_use_is_refused(parts: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInputError, match=said):
        PromptTemplate(**parts)


def test_a_template_is_read_from_the_models_folder(tmp_path: Path) -> None:
    assert PromptTemplate.load(tmp_path) is None
    path = tmp_path / "prompt_template.json"
    path.write_text(json.dumps({"system": "S", "question": "Q: {question}"}), encoding="utf-8")
    found = PromptTemplate.load(tmp_path)
    assert found == PromptTemplate(system="S", question="Q: {question}")
    assert found is not None
    assert found.ask("x {question}") == "Q: x {question}"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"{", "is not JSON"),
        (b"\xff\xfe{}", "is not JSON"),
        (b"[1]", "may only hold"),
        (b'{"sistem": "x"}', "may only hold the text fields chunk_end, chunk_start"),
        (b'{"template_date": "2024-01-01"}', "may only hold"),
        (b'{"system": 5}', "may only hold the text fields"),
        (b'{"chunk_start": null}', "may only hold the text fields"),
        (b'{"question": "no place"}', "must contain {question}"),
    ],
)
def test_a_template_file_of_no_use_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "prompt_template.json").write_bytes(content)
    with pytest.raises(InvalidInputError, match=said):
        PromptTemplate.load(tmp_path)


def test_what_one_tenant_had_read_another_has_read_anew() -> None:
    engine = make_engine("llama")
    other = engine.in_namespace("other")

    def read(tenant: Engine) -> int:
        encode = access.renderer(tenant).encoder.encode
        with patch.object(TextEncoder, "encode", side_effect=encode) as asked:
            tenant.keys(TEXTS)
            tenant.tokenize("Who?", TEXTS)
            tenant.generate("Who?", TEXTS, max_new_tokens=1)
        return sum(text in call.args[0] for call in asked.mock_calls for text in TEXTS)

    tenants = (engine, other, engine, other, engine.in_namespace("other"))
    assert [read(tenant) for tenant in tenants] == [len(TEXTS), len(TEXTS), 0, 0, 0]
    engine.delete_namespace()
    assert read(engine) == len(TEXTS)


def test_what_one_tenant_reads_makes_another_forget_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = renderer(None)
    monkeypatch.setattr(prompt_renderer, "_REMEMBERED", 2 * len(one.chunk_ids(TEXTS[0])))
    one.forget()
    known = one.chunk_ids(TEXTS[0])
    for number in range(100):
        one.in_namespace("other").chunk_ids(f"text {number}")
    one.in_namespace("other").forget()
    with patch.object(TextEncoder, "encode", side_effect=AssertionError):
        assert one.chunk_ids(TEXTS[0]) == known
    for number in range(100):
        one.in_namespace(str(number)).chunk_ids("text")
    assert len(access.remembered_ids(one)) == 64, "and who makes up namespaces fills no memory"


def test_the_time_of_reading_a_text_tells_nothing_of_other_tenants() -> None:
    one = PromptRenderer(PromptTemplate(), AutoTokenizer.from_pretrained(resolve(TINY)))
    other = one.in_namespace("other")
    some = random.Random(0)

    def word() -> str:
        return "".join(some.choices(string.ascii_lowercase, k=some.randint(6, 14)))

    heard, new = ([" ".join(word() for _ in range(200)) for _ in range(25)] for _ in range(2))
    for text in heard:
        one.chunk_ids(text)
    seconds: list[list[float]] = [[], []]
    for pair in zip(heard, new, strict=True):
        for times, text in zip(seconds, pair, strict=True):
            began = time.perf_counter()
            other.chunk_ids(text)
            times.append(time.perf_counter() - began)
    sooner = [a < b for a in seconds[0] for b in seconds[1]]
    assert 0.15 < sum(sooner) / len(sooner) < 0.85, "0.5 tells nothing, 1 everything"


def test_a_text_longer_than_what_is_remembered_is_tokenised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prompt_renderer, "_REMEMBERED", 5)
    renderer = access.renderer(make_engine("llama"))
    assert renderer.chunk_ids(TEXTS[0]) == renderer.chunk_ids(TEXTS[0])
    assert len(renderer.chunk_ids(TEXTS[0])) > 5
