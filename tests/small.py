"""A tiny random model with its tokenizer, and a clock for the event loop."""

from __future__ import annotations

import asyncio
import time
from functools import lru_cache

import torch
from tokenizers import Tokenizer, decoders, models, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from kvcache_rag.models.adapters import note_training

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "<{{ message['role'] }}>{{ message['content'] }}</s>"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@lru_cache(maxsize=1)
def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character, and a beginning-of-sequence token by habit."""
    characters = "\n" + "".join(map(chr, range(32, 127)))
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2}
    vocabulary.update({one: index for index, one in enumerate(characters, start=3)})
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


class Ticker:
    """Ticks on the event loop and notes the longest time between two ticks."""

    worst = 0.0
    elapsed = 0.0

    async def __aenter__(self) -> Ticker:
        self._started = self._last = time.perf_counter()
        self._task = asyncio.create_task(self._tick())
        await asyncio.sleep(0)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        now = time.perf_counter()
        self.worst = max(self.worst, now - self._last)
        self.elapsed = now - self._started

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(0.001)
            now = time.perf_counter()
            self.worst, self._last = max(self.worst, now - self._last), now
