"""LangChain's own suites for chat models, over a folder with the tiny random model.

It samples: a random model that is greedy repeats itself, so the JSON texts that the suite asks for
would never end.  What the suite asks of tools is asked of a model whose logits are a script's, in
the form that a model knows and in JSON.
"""

from __future__ import annotations

import copy
import json
import re
from typing import TYPE_CHECKING, Any

import pytest
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests
from scripted import NATIVE, RESPONSE, scripted
from small import CHAT_TEMPLATE, make_model, make_tokenizer

from kvcache_rag import Engine
from langchain_kvcache_rag.blocks import document_block
from langchain_kvcache_rag.chat_model import ChatKVCache

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.filterwarnings(
    # LangChain's streaming protocol says so of itself.
    "ignore::langchain_core._api.beta_decorator.LangChainBetaWarning",
    # The tiny tokenizer makes many tokens of an ordinary question.
    "ignore:a message of [0-9]+ tokens came without document blocks",
)


@pytest.fixture(scope="module")
def saved_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_model().save_pretrained(folder)
    tokenizer = copy.deepcopy(make_tokenizer())
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


class TestChatKVCacheUnit(ChatModelUnitTests):
    @property
    def chat_model_class(self) -> type[ChatKVCache]:
        return ChatKVCache

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "tiny"}


class TestChatKVCacheIntegration(ChatModelIntegrationTests):
    folder: Path

    @pytest.fixture(autouse=True)
    def use(self, saved_model: Path) -> None:
        self.folder = saved_model

    @property
    def chat_model_class(self) -> type[ChatKVCache]:
        return ChatKVCache

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": str(self.folder), "temperature": 1.0, "max_tokens": 1000}

    @property
    def has_tool_calling(self) -> bool:
        return False

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def supports_model_override(self) -> bool:
        return False

    @property
    def supported_usage_metadata_details(self) -> dict[Any, list[Any]]:
        kinds = ["cache_read_input", "cache_creation_input"]
        return {"invoke": kinds, "stream": kinds}

    def invoke_with_cache_creation_input(self, *, stream: bool = False) -> AIMessage:
        message = _ask(ChatKVCache(**self.chat_model_params), stream)
        assert _details(message)["cache_creation"] > 0
        assert _details(message)["cache_read"] == 0
        return message

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> AIMessage:
        llm = ChatKVCache(**self.chat_model_params)
        created = _details(_ask(llm, stream))["cache_creation"]
        message = _ask(llm, stream)
        continued = message.response_metadata["kv_cache"]["continued_tokens"]
        assert _details(message)["cache_read"] == created + continued
        assert created > 0
        assert _details(message)["cache_creation"] == 0
        return message


_ARGUMENTS: dict[str, dict[str, Any]] = {
    "magic_function": {"input": 3},
    "magic_function_no_args": {},
    "greeting_generator": {"answer_style": "Pirate"},
    "my_adder_tool": {"a": 1, "b": 2},
    "get_weather": {"location": "San Francisco, CA"},
    "unicode_customer": {"customer_name": "你好啊集团", "description": "A group."},
}


def _calls(prompt: str) -> str:
    """What a model that does as it is told says to the suite's questions."""
    names = re.findall(r'"name": "(\w+)"', prompt)
    names = [name for name in names if name in _ARGUMENTS]
    is_json = "Write JSON only." in prompt
    *_, last = re.findall(r"<(\w+)>((?:(?!</s>).)*)</s>", prompt, re.DOTALL) or [("", "")]
    is_over = last[0] == "tool" or last[1].startswith("Result of")
    if not names or is_over:
        return json.dumps({"answer": "It is so."}) if is_json else "It is so."
    arguments = dict(_ARGUMENTS[names[0]])
    if "こんにちは" in prompt:
        arguments["customer_name"] = "こんにちは株式会社"
    call = {"name": names[0], "arguments": arguments}
    written = json.dumps({"tool_calls": [call]} if is_json else call, ensure_ascii=False)
    return written if is_json else f"<tool_call>{written}</tool_call>"


class TestChatKVCacheTools(ChatModelIntegrationTests):
    """Tools in the model's own form; what has to be called is called in JSON."""

    response_template: dict[str, Any] | None = RESPONSE

    @property
    def chat_model_class(self) -> type[ChatKVCache]:
        return ChatKVCache

    @property
    def chat_model_params(self) -> dict[str, Any]:
        # The script reads prompts as they are computed.
        engine = Engine(*scripted(_calls, NATIVE, self.response_template), prompt_memory=0)
        return {"engine": engine, "max_tokens": 400}

    @property
    def has_structured_output(self) -> bool:
        return False  # see above: the script knows tools only


# What does not speak of tools was asked of the class above; nor is it an override of ours.
for _name in dir(ChatModelIntegrationTests):
    if _name.startswith("test_") and "tool" not in _name:
        setattr(TestChatKVCacheTools, _name, None)


@pytest.mark.filterwarnings("ignore:chat template or tokenizer")
class TestChatKVCacheJsonTools(TestChatKVCacheTools):
    """Tools in JSON alone."""

    response_template = None


def _ask(llm: ChatKVCache, stream: bool) -> AIMessage:
    text = "The ship Mora was built in Kiel. The captain of Mora is Dr. Vug."
    blocks = [document_block(Document(text)), {"type": "text", "text": "Who is the captain?"}]
    messages = [HumanMessage(blocks)]
    if not stream:
        return llm.invoke(messages)
    full: AIMessageChunk | None = None
    for chunk in llm.stream(messages):
        full = chunk if full is None else full + chunk
    assert full is not None
    return full


def _details(message: AIMessage) -> Any:
    assert message.usage_metadata is not None
    return message.usage_metadata["input_token_details"]
