"""Chat templates that print today's date: pinned, and said so."""

from __future__ import annotations

import datetime

import pytest
from test_prompt import CHATML, SYSTEM, text, tokenizer_with

from kvcache_rag import PromptTemplate
from kvcache_rag.prompt.renderer import PromptRenderer

LLAMA3 = (
    "{{- bos_token }}"
    "{%- if strftime_now is defined %}{%- set date = strftime_now('%d %b %Y') %}"
    "{%- else %}{%- set date = '26 Jul 2024' %}{%- endif %}"
    "{{- '<|system|>Today Date: ' + date + '\n\n' }}"
    "{%- for m in messages %}{{- '<|' + m['role'] + '|>' + m['content']|trim + '<|end|>' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"
)
# Prints the date only when there is a system message, or only when there is none.
WITH_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ strftime_now('%d %b %Y') }}{% endif %}"
    "{{ '<' + m['role'] + '>' + m['content'] }}{% endfor %}"
)
WITHOUT_SYSTEM = (
    "{% if messages[0].role != 'system' %}{{ strftime_now('%d %b %Y') }}{% endif %}"
    "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] }}{% endfor %}"
)


class _Day(datetime.datetime):
    """A day on which the tests do not run."""

    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> _Day:
        return cls(2031, 5, 17, tzinfo=tz)


def ids_of_today(template: PromptTemplate, chat_template: str) -> tuple[int, ...]:
    found = PromptRenderer(template, tokenizer_with(chat_template))
    return found.prefix_ids + found.query_ids("Who?")


def test_a_printed_date_is_pinned_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    template = PromptTemplate(system=SYSTEM)
    with pytest.warns(UserWarning, match=r"pinned to 2024-07-26 .*template_date") as caught:
        today = ids_of_today(template, LLAMA3)
    assert len(caught) == 1
    assert "26 Jul 2024" in text(today)
    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", _Day)
    tokenizer = tokenizer_with(LLAMA3)
    turns = [{"role": "user", "content": "x"}]
    assert "17 May 2031" in tokenizer.apply_chat_template(turns, tokenize=False)
    with pytest.warns(UserWarning, match="pinned"):
        assert ids_of_today(template, LLAMA3) == today


def test_a_chosen_date_is_used_without_a_warning() -> None:
    template = PromptTemplate(system=SYSTEM, template_date=datetime.date(2026, 3, 9))
    assert "09 Mar 2026" in text(ids_of_today(template, LLAMA3))
    assert "2026" not in text(ids_of_today(template, CHATML))


def test_a_date_printed_only_beside_a_system_message_is_pinned_too() -> None:
    with pytest.warns(UserWarning, match="pinned"):
        assert "26 Jul 2024" in text(ids_of_today(PromptTemplate(system=SYSTEM), WITH_SYSTEM))


def test_a_date_that_our_prompts_never_print_is_not_warned_about() -> None:
    ids_of_today(PromptTemplate(system=SYSTEM), WITHOUT_SYSTEM)  # warnings are errors
