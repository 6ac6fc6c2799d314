"""Models with random weights in the shapes of real ones, and texts to ask them about.

Random weights cost what trained ones cost; nothing here speaks of answers.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast, Qwen2Config

CHUNK: Final = 512
PREFIX: Final = 32
QUERY: Final = 20
WORDS: Final = 4096
SHAPES: Final[dict[str, dict[str, Any]]] = {
    "tiny": {
        "hidden_size": 128,
        "intermediate_size": 352,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 8192,
    },
    "qwen2.5-0.5b": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
    },
    "qwen2.5-1.5b": {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
    },
    "qwen2-7b": {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "tie_word_embeddings": False,
    },
    "llama-3.1-8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "tie_word_embeddings": False,
    },
    "qwen2.5-3b": {
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
    },
    "qwen2.5-14b": {
        "hidden_size": 5120,
        "intermediate_size": 13824,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "vocab_size": 152064,
        "tie_word_embeddings": False,
    },
    "qwen2.5-32b": {
        "hidden_size": 5120,
        "intermediate_size": 27648,
        "num_hidden_layers": 64,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "vocab_size": 152064,
        "tie_word_embeddings": False,
    },
    "qwen2.5-72b": {
        "hidden_size": 8192,
        "intermediate_size": 29568,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 152064,
        "tie_word_embeddings": False,
    },
    "llama-3.1-70b": {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "tie_word_embeddings": False,
    },
}
_LLAMA_ROPE: Final = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def config_of(shape: str) -> Any:
    """The transformers config of a shape."""
    is_llama = shape.startswith("llama")
    rope = _LLAMA_ROPE if is_llama else {"rope_type": "default", "rope_theta": 1e6}
    kind = LlamaConfig if is_llama else Qwen2Config
    return kind(
        **{"tie_word_embeddings": True, **SHAPES[shape]},
        max_position_embeddings=131072 if is_llama else 32768,
        rope_parameters=rope,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )


def build_model(shape: str, dtype: torch.dtype, device: str = "cpu") -> Any:
    """A model of the shape with random weights, made on the device that it stays on."""
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(
            config_of(shape), dtype=dtype, attn_implementation="sdpa"
        ).eval()


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per word `w0`, `w1`, ..., so that a text of n words is a chunk of n tokens."""
    words = {"<pad>": 0, "<bos>": 1, "<eos>": 2, **{f"w{i}": i + 3 for i in range(WORDS)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")


def words(count: int, seed: int) -> str:
    """A text of `count` words."""
    generator = torch.Generator().manual_seed(seed)
    picks = torch.randint(0, WORDS, (count,), generator=generator).tolist()
    return " ".join(f"w{pick}" for pick in picks)
