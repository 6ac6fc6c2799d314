"""`kvcache-rag models check` prints what was measured and answers by its exit code."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import transformers
from tokenizers import Tokenizer, models
from zoo import HYBRIDS, build, byte_tokenizer

from kvcache_rag import cli

if TYPE_CHECKING:
    from pathlib import Path

SIZES: dict[str, Any] = {"vocab_size": 64, "num_hidden_layers": 3}
LLAMA = transformers.LlamaConfig(
    **SIZES,
    hidden_size=32,
    intermediate_size=32,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=2048,
)
LEARNED_POSITIONS = transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2)
RECURRENT = transformers.RecurrentGemmaConfig(**SIZES, block_types=["recurrent", "attention"])


def save(config: Any, folder: Path) -> str:
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    return str(folder)


def test_a_model_with_rotary_keys_is_supported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["models", "check", save(LLAMA, tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "LlamaForCausalLM" in out
    assert "float32" in out
    assert "2048 tokens" in out
    assert "layers 0-2; keys 2x8 rotation half[0:8] by set 0; values 2x8 rotation none" in out
    assert f"{3 * 2 * 2 * 8 * 4} bytes per token" in out
    assert out.endswith("supported: chunks can be stitched\n")


@pytest.mark.skipif("qwen3_5" not in HYBRIDS, reason="this transformers keeps no states as 5.23")
def test_a_model_with_states_is_supported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for part in (build("qwen3_5"), byte_tokenizer()):
        part.save_pretrained(tmp_path)
    assert cli.main(["models", "check", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "4, 3 with a state, 1 with keys and values" in out
    assert "256 bytes per token and 26880 bytes per chunk" in out
    assert "transition 4x16x16 float32 (a matrix from the left)" in out
    assert "verdict         supported" in out


@pytest.mark.parametrize("config", [LEARNED_POSITIONS, RECURRENT], ids=lambda c: c.model_type)
def test_a_model_whose_keys_cannot_move_says_why(
    config: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["models", "check", save(config, tmp_path)]) == 1
    verdict = capsys.readouterr().out.splitlines()[-1]
    assert "not movable:" in verdict
    assert "layer 0" in verdict
    assert verdict.endswith("; full prefill works")
