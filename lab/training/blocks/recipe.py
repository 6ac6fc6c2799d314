"""The runs: an adapter under the block mask, its control, and the comparison of what to train."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal

import torch

from kvcache_rag.models.processors import multiplies_bfloat16
from kvcache_rag.prompt.template import PromptTemplate
from kvcache_rag_lab.finetune import FinetuneConfig, JsonlData

if TYPE_CHECKING:
    from pathlib import Path

    from kvcache_rag_lab.finetune.config import LoraTokens, Objective, Precision

Mask = Literal["block", "full"]
Train = Literal["attention", "all-linear", "packet"]

STEPS: Final = 720
COMPARED_STEPS: Final = 60
RANK: Final = 16
PACKET: Final = 4  # vectors before and as many behind a chunk
PLAIN: Final = 0.1  # share of texts, which stay as likely as they were
HOLDOUT: Final = 16  # contexts and texts to measure with
RATE: Final = 5e-4  # of LoRA

INSTRUCTIONS: Final = (
    PromptTemplate().system,
    "Answer the question from the documents, in as few words as possible.\n\n",
    "You are a helpful assistant. Use the documents to answer the user.\n\n",
    "Context information is below. Answer the query from it and not from prior knowledge.\n\n",
    "Read these documents. Answer in whole sentences, and say from where you know it.\n\n",
)
"""In front of the chunks, as apps have them."""


def precision(device: str | None) -> Precision:
    """bfloat16 where the processor multiplies it."""
    on_gpu = torch.device(device).type == "cuda" if device else torch.cuda.is_available()
    has = torch.cuda.is_bf16_supported() if on_gpu else multiplies_bfloat16()
    return "bf16" if has else "fp32"


def recipe(
    model: str,
    out: Path,
    *,
    mask: Mask = "block",
    train: Train = "attention",
    tokens: LoraTokens = "all",
    objective: Objective = "distillation",
    steps: int = STEPS,
    seed: int = 0,
    device: str | None = None,
    name: str = "",
    **further: Any,
) -> FinetuneConfig:
    """The run whose adapter is used, or its control: equal steps on equal samples.

    Args:
        model: As the engine takes it.
        out: Folder that holds `data` and takes the adapter.
        mask: "full" for the control.
        train: LoRA on attention's projections or on all linear layers, or vectors around chunks.
        tokens: Where LoRA acts: on questions and answers alone, or on documents, too.
        objective: What is learned, "answers" for a packet.
        steps: Of the optimiser, of one context with its questions each, some 2,000 tokens.
        seed: Of data order and adapters.
        device: None for CUDA if there is one.
        name: Of the adapter's folder in `out`; "" for one that says mask, kind and seed.
        further: Settings of `FinetuneConfig`, such as `checkpoint`.
    """
    is_packet = train == "packet"
    on_question = tokens == "question" and not is_packet
    return FinetuneConfig(
        model=model,
        out=out / (name or f"{mask}-{train}{'-question' * on_question}-{seed}"),
        data=JsonlData(out / "data" / "learned.jsonl", questions=24),
        plain=out / "data" / "plain.jsonl",
        block_share=1.0 if mask == "block" else 0.0,
        plain_share=0.0 if on_question else PLAIN,
        steps=steps,
        batch_tokens=3072,
        accumulate=1,
        objective="answers" if is_packet else objective,
        instructions=() if is_packet else INSTRUCTIONS,
        rate=None if is_packet else RATE,
        lora=0 if is_packet else RANK,
        lora_modules="attention" if train == "attention" else "all-linear",
        lora_tokens="question" if on_question else "all",
        packet=PACKET if is_packet else 0,
        keep_adapter=True,
        precision=precision(device),
        seed=seed,
        holdout=HOLDOUT,
        save_every=10,
        device=device,
        **further,
    )
