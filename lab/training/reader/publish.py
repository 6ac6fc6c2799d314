"""Write a trained reader as a model directory that transformers loads."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from transformers import GenerationConfig

from kvcache_rag.models.adapters import note_training
from kvcache_rag_lab.reader.language import INSTRUCTION
from training.reader.card import model_card
from training.reader.tokenizer import BOS, EOS, PAD, build_tokenizer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from training.reader.network import Network


PROMPT_TEMPLATE = {
    "system": INSTRUCTION,
    "chunk_start": "<doc>",
    "chunk_end": "",
    "question": "{question}",
}


def publish(network: Network, out: Path, facts: Mapping[str, Any]) -> None:
    """Write weights (bfloat16), configuration, tokenizer, templates and model card to `out`.

    The directory appears as a whole: it is written beside `out` and then renamed; an existing one
    is replaced.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    partial.chmod(0o755)
    state = network.to_transformers_state()
    weights = {name: value.to(torch.bfloat16).contiguous() for name, value in state.items()}
    save_file(weights, partial / "model.safetensors", metadata={"format": "pt"})
    (partial / "model.safetensors").chmod(0o644)
    config = network.config.to_transformers(dtype="bfloat16")
    note_training(config, blocks=True)
    config.save_pretrained(partial)
    tokens = {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS}
    GenerationConfig(**tokens, do_sample=False).save_pretrained(partial)
    build_tokenizer().save_pretrained(partial)
    template = partial / "chat_template.jinja"
    _write(partial / "prompt_template.json", PROMPT_TEMPLATE)
    _write(partial / "training.json", facts)
    _embed_chat_template(partial / "tokenizer_config.json", template)
    (partial / "README.md").write_text(model_card(facts))
    if out.exists():
        old = partial.with_name(partial.name + ".old")
        out.rename(old)
        partial.rename(out)
        shutil.rmtree(old)
    else:
        partial.rename(out)


def _embed_chat_template(tokenizer_config: Path, template: Path) -> None:
    """Keep the chat template in the tokenizer's configuration, where every version reads it."""
    if not template.exists():
        return
    values = json.loads(tokenizer_config.read_text())
    values["chat_template"] = template.read_text()
    _write(tokenizer_config, values)
    template.unlink()


def _write(path: Path, values: Mapping[str, object]) -> None:
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n")
