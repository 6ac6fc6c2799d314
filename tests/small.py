"""A tiny random model with its tokenizer, and a watch on the event loop."""

from __future__ import annotations

import asyncio
import copy
import threading
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import Tokenizer, decoders, models, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from kvcache_rag.models.adapters import note_training

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "<{{ message['role'] }}>{{ message['content'] }}</s>"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@lru_cache(maxsize=1)
def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character, and a beginning-of-sequence token by habit."""
    tokens = ("<pad>", "<s>", "</s>", "\n", *map(chr, range(32, 127)))
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="?"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )


@lru_cache(maxsize=1)
def make_model() -> LlamaForCausalLM:
    """Two layers of random weights."""
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=99,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=96,
        max_position_embeddings=4096,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    note_training(config, blocks=True)  # plain reuse by default, as of the packaged reader
    model: LlamaForCausalLM = LlamaForCausalLM(config).eval()
    return model


def make_untrained() -> LlamaForCausalLM:
    """The same, which nobody trained for cached chunks."""
    model = copy.deepcopy(make_model())
    note_training(model.config, blocks=False)
    return model


class Loop:
    """Lets go on what computes only while the event loop goes on, too: no clock decides."""

    def __init__(self) -> None:
        self.turns = 0  # of the event loop while something computed

    def watch(self, monkeypatch: pytest.MonkeyPatch, owner: object, *names: str) -> None:
        """Every call of these methods waits for a turn of the event loop that runs now."""
        loop = asyncio.get_running_loop()

        def watched(method: Callable[..., Any]) -> Callable[..., Any]:
            def wait(*args: Any, **options: Any) -> Any:
                turn = threading.Event()
                loop.call_soon_threadsafe(turn.set)
                assert turn.wait(10), "the event loop stands still"
                self.turns += 1
                return method(*args, **options)

            return wait

        for name in names:
            monkeypatch.setattr(owner, name, watched(getattr(owner, name)))
