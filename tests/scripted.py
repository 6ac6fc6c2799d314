"""A tiny random model whose logits are fixed, so that it says what a script wants."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Final

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from zoo import make_byte_tokenizer

from kvcache_rag import Engine, PromptTemplate
from kvcache_rag.models.adapters import note_training

Script = Callable[[str], str]
"""Gives the answer to a prompt, of which it sees what is computed last: all behind the chunks."""

THINKING: Final = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>"
    "{% if enable_thinking is defined and enable_thinking %}<think>\n{% endif %}{% endif %}"
)
"""A chat template that opens the thoughts of an answer if it is told to."""

NATIVE: Final = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{% if loop.first and tools %}\nTools:{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}"
    "{% endif %}"
    "{% for call in message.tool_calls or [] %}"
    '<tool_call>{"name": {{ call.function.name | tojson }}, '
    '"arguments": {{ call.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}</s>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""A chat template that writes tools, behind the first message, and their calls."""

RESPONSE: Final[dict[str, Any]] = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<assistant>",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"\s*</s>", "content": "text"},
    },
}
"""How calls and thoughts are read."""


class ScriptedModel(LlamaForCausalLM):
    """Whatever it is asked, the tokens of a script come out, and then the end of the sequence."""

    script: Script
    tokenizer: Any

    def forward(
        self,
        input_ids: Any = None,
        position_ids: Any = None,
        logits_to_keep: int = 0,
        **arguments: Any,
    ) -> Any:
        """A forward pass as ever, whose last logits are the script's."""
        arguments |= {"position_ids": position_ids, "logits_to_keep": logits_to_keep}
        output = super().forward(input_ids=input_ids, **arguments)
        count = input_ids.shape[1]
        if count > 1 and logits_to_keep != count:  # else they are guesses
            # A prompt, or a chunk, after which nothing is generated.
            self._answers = [self._ids(row.tolist()) for row in input_ids]
            self._ends = position_ids[:, -1].tolist()
        for row, ids in enumerate(self._answers):
            logits, places = output.logits[row], position_ids[row % len(position_ids)]
            for column in range(-len(logits) if count == len(logits) else -1, 0):
                place = int(places[column]) - self._ends[row % len(self._ends)]
                logits[column] = -100.0
                logits[column, ids[min(max(place, 0), len(ids) - 1)]] = 100.0
        return output

    def _ids(self, prompt: list[int]) -> list[int]:
        answer = self.script(self.tokenizer.decode(prompt))
        ids: list[int] = self.tokenizer(answer, add_special_tokens=False)["input_ids"]
        return [*ids, self.tokenizer.eos_token_id]


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte."""
    return make_byte_tokenizer("<s>", "</s>")


def scripted(
    script: Script, chat_template: str | None, response_template: dict[str, Any] | None = None
) -> tuple[ScriptedModel, PreTrainedTokenizerFast]:
    """A model and its tokenizer.

    Args:
        script: Says what is answered.
        chat_template: Of the tokenizer.
        response_template: Of the tokenizer, or None.
    """
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = chat_template
    tokenizer.response_template = response_template
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=32,
        max_position_embeddings=16384,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    note_training(config, blocks=True)  # plain reuse by default, as of the packaged reader
    model = ScriptedModel(config).eval()
    model.script, model.tokenizer = script, tokenizer
    return model, tokenizer


def scripted_engine(
    *answers: str, native: bool = True, template: str = NATIVE
) -> tuple[Engine, list[str]]:
    """An engine that gives these answers, one after the other, and a list of what it was asked.

    Args:
        answers: One for each question.
        native: Whether its tokenizer says how calls of tools are read.
        template: For chats.
    """
    left, seen = list(answers), list[str]()

    def script(prompt: str) -> str:
        if not prompt.endswith(("<assistant>", "<think>\n")):
            return ""  # a chunk
        seen.append(prompt)
        return left.pop(0)

    model, tokenizer = scripted(script, template, RESPONSE if native else None)
    read = PromptTemplate(system="Read.\n")
    # The script reads prompts as they are computed.
    return Engine(model, tokenizer, template=read, prompt_memory=0), seen


def native_call(*calls: tuple[str, dict[str, Any]]) -> str:
    """Calls of tools, as `NATIVE` writes them."""
    written = [json.dumps({"name": name, "arguments": given}) for name, given in calls]
    return "".join(f"<tool_call>{one}</tool_call>" for one in written)


def json_call(*calls: tuple[str, dict[str, Any]]) -> str:
    """Calls of tools, as a grammar holds models that have no form of their own."""
    written = [{"name": name, "arguments": arguments} for name, arguments in calls]
    return json.dumps({"tool_calls": written})


def said(text: str, call: Callable[..., str]) -> str:
    """An answer that calls nothing, in the form of `call`, one of the two above."""
    return text if call is native_call else json.dumps({"answer": text})
