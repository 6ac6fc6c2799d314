"""In which form a model calls tools, and questions behind what a tool said."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from scripted import NATIVE, RESPONSE, byte_tokenizer, scripted
from small import CHAT_TEMPLATE, make_model, make_tokenizer
from transformers import Qwen2Config, Qwen2ForCausalLM

from kvcache_rag import Engine, FullRecompute, InvalidInputError, PromptTemplate, Reuse
from kvcache_rag.integration import ConversationForms, ToolCall, ToolChoice, read_whole
from kvcache_rag.prompt.renderer import PROBE_CALL, PROBE_TOOL

# As the family writes it, in short.
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% if loop.first and tools %}\n# Tools\n{% for tool in tools %}{{ tool | tojson }}\n"
    "{% endfor %}{% endif %}"
    "{% for call in message.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHOICE = ToolChoice.of([PROBE_TOOL], None, None)
TURNS = [{"role": "user", "content": "Look."}]


def qwen(chat_template: str) -> ConversationForms:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = chat_template
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=32,
        max_position_embeddings=4096,
        eos_token_id=2,
    )
    return ConversationForms.of(Engine(Qwen2ForCausalLM(config).eval(), tokenizer))


def test_what_transformers_knows_of_a_family_counts_where_its_chat_template_is_read() -> None:
    form = qwen(CHATML).form(TURNS, CHOICE)
    assert form.tool_form == "native", "transformers' server has another table: models/responses.py"
    reader = form.reader(lambda: "<|im_start|>assistant\n")
    assert reader is not None
    call = '<tool_call>\n{"name": "kvcache_rag_probe", "arguments": {"f": "x"}}\n</tool_call>'
    (found,) = read_whole(reader, f"{call}<|im_end|>")
    assert isinstance(found, ToolCall)
    assert found.arguments == {"f": "x"}
    other = CHATML.replace("tool_call>", "call>")
    assert qwen(other).form(TURNS, CHOICE).tool_form == "json"


@pytest.mark.parametrize(
    ("chat_template", "response", "form"),
    [
        (NATIVE, RESPONSE, "native"),
        (NATIVE, None, "json"),
        ("{% if tools %}Tools are used.{% endif %}" + NATIVE, RESPONSE, "json"),
        (CHAT_TEMPLATE, RESPONSE, "json"),
        (None, None, "json"),
    ],
)
def test_calls_are_native_where_both_templates_know_them(
    chat_template: str | None, response: dict[str, Any] | None, form: str
) -> None:
    forms = ConversationForms.of(Engine(*scripted(lambda _: "", chat_template, response)))
    found = forms.form(TURNS, CHOICE)
    assert (found.tool_form, found.is_fallback) == (form, form == "json")
    wanted = ToolChoice.of([PROBE_TOOL], "any", None)
    assert forms.form(TURNS, wanted).tool_form == "json"
    assert forms.form(TURNS, ToolChoice.of([PROBE_TOOL], "none", None)).tool_form == ""


def test_an_answer_behind_a_tools_message_is_that_of_a_plain_prefill() -> None:
    """Law: one chunk in its natural place is a plain prefill, whatever stands behind it."""
    tokenizer = copy.deepcopy(make_tokenizer())
    tokenizer.chat_template = CHAT_TEMPLATE
    engine = Engine(make_model(), tokenizer, template=PromptTemplate(system="Read.\n"))
    history = [*TURNS, *PROBE_CALL]
    chunk = ["The ship Mora was built in Kiel."]
    engine.add(chunk)
    full, cached = (
        engine.generate("", chunk, history=history, policy=policy, max_new_tokens=12)
        for policy in (FullRecompute(), Reuse())
    )
    assert full.token_ids == cached.token_ids
    assert cached.metrics.reused_tokens > 0
    assert cached.metrics.prefilled_tokens == full.metrics.reused_tokens == 0


@pytest.mark.parametrize("history", [(), TURNS])
def test_nothing_asked_is_refused_unless_a_tool_spoke_last(history: Any) -> None:
    engine = Engine(make_model(), make_tokenizer())
    with pytest.raises(InvalidInputError, match="the question is empty"):
        engine.generate("", ["a fact"], history=history)


def test_tools_leave_out_what_does_not_fit_and_ask_once() -> None:
    engine = Engine(*scripted(lambda _: "So.", NATIVE, RESPONSE), context_window=2048)
    texts = [letter * 600 for letter in "abcd"]
    answer = engine.generate(
        "",
        texts,
        history=[*TURNS, *PROBE_CALL],
        tools=[PROBE_TOOL],
        scores=range(4),
        overflow="refine",
        max_new_tokens=8,
    )
    assert (answer.metrics.rounds, answer.text) == (1, "So.")
    assert answer.metrics.dropped_chunks > 0


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"tools": [{"name": "x"}]}, r"tools\[0\] must be the description of a function"),
        ({"chat_template_kwargs": ["x"]}, "chat_template_kwargs must be a dict"),
        ({"chat_template_kwargs": {"tools": []}}, "leave out tools"),
    ],
)
def test_what_no_chat_template_reads_is_refused(options: Any, sentence: str) -> None:
    engine = Engine(make_model(), make_tokenizer())
    with pytest.raises(InvalidInputError, match=sentence):
        engine.generate("What?", ["a fact"], **options)
    with pytest.raises(InvalidInputError, match=sentence):
        engine.render_chat(TURNS, **options)
