"""Settings of a fine-tuning run; nothing here imports torch."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

from kvcache_rag.errors import InvalidInputError, check_settings

if TYPE_CHECKING:
    from pathlib import Path

    from kvcache_rag.kv.mask import PositionScheme

Precision = Literal["fp32", "bf16"]
LoraModules = Literal["all-linear", "attention"]
LoraTokens = Literal["all", "question"]
Objective = Literal["answers", "distillation"]
SCHEMES: Final = ("reordered", "composite")
FULL_RATE: Final = 1e-5  # TurboRAG's
LORA_RATE: Final = 1e-4
PACKET_RATE: Final = 5e-3


@dataclass(frozen=True)
class JsonlData:
    """Document question answering from a file.

    One JSON object per line: `{"question", "answers": [...], "documents": [{"text", "relevant"},
    ...]}`; a document may be a bare text.  The first answer is learned; for rows with
    `answer_groups`, the first of each group.  Rows that share their documents become one context
    with several questions.

    Attributes:
        path: The file.
        questions: Most questions of one context that are trained together.
    """

    path: Path
    questions: int = 14

    def __post_init__(self) -> None:
        check_settings(JsonlData, vars(self))


@dataclass(frozen=True)
class FinetuneConfig:
    """Settings of a fine-tuning run.

    The defaults are those of TurboRAG (arXiv 2410.07590, section 3.3), which trains half on
    document questions under the block mask and half on other data.  Block-Attention (arXiv
    2409.15355) trains each example under both masks (`both_masks`).  For an experiment's control,
    equal steps under full attention, use `block_share=0`.

    Attributes:
        model: Hub id, folder, or "tiny".
        out: Folder of the finished model; must not exist.
        data: Document questions.
        plain: JSONL of `{"text"}` or `{"messages": [{"role", "content"}, ...]}` (the last one by
            the assistant), learned whole under full attention; None for the documents of `data`.
        positions: Where chunks are placed.
        block_share: Share of the document batches under the block mask; the rest are under full
            attention.
        both_masks: Train each document batch twice, under the block mask and under full attention;
            `block_share` then has no effect.
        plain_share: Share of plain batches; None for 0.5.
        steps: Optimiser steps.
        batch_tokens: Most tokens of a forward pass, including padding and copies of the prefix
            ("bf16" pads rows slightly more, to multiples of 64).
        accumulate: Forward passes per step; two, so that a step learns from chunks and plain text.
        rate: Highest learning rate of AdamW; None for 1e-5, 1e-4 with LoRA, 5e-3 for a packet.
        warm_up: Share of the steps in which the rate rises from 0; it then falls linearly to 0.
        weight_decay: Weight decay of AdamW.
        clip: Largest norm of the gradient.
        lora: Rank of the adapters, 0 to train all weights.
        keep_adapter: Write only the adapter, not a merged model.
        precision: "bf16" computes in bfloat16; weights stay in float32 except those that LoRA does
            not train.
        gradient_checkpointing: Compute activations twice instead of keeping them.
        attention: transformers' `attn_implementation`; None for its own choice.
        seed: Seed of data and adapters.
        holdout: Contexts and texts kept out of training, to measure before and after.
        save_every: Steps between checkpoints.
        device: None for CUDA if there is one.
        work: Checkpoints and log; None for `OUT.work`.
        lora_modules: What has adapters: all linear layers, or only the projections of attention.
        lora_tokens: Where adapters act: everywhere, or on questions and answers alone, as activated
            LoRA (arXiv 2504.12397).  Chunks are then the untouched model's own, so a store serves
            any number of such adapters and none; only questions about documents are learned.
        objective: What document questions teach: their answers, or by distillation what the model
            itself makes of these over the same documents under full attention, the distribution of
            each next token; then nothing is learned but to read chunks.  Plain texts are learned
            likewise, so that it keeps what it makes of them.
        instructions: What document questions have in front of their chunks, one context after the
            other, so that no single one is learned; empty for the template's own.
        packet: How many vectors before each chunk, and as many after it, are trained alone (KV
            Packet, arXiv 2604.13226): those of control tokens that no chat uses, with which the
            template then wraps chunks; 0 for none.
        checkpoint: Folder that gets only the adapter, rounded to bfloat16, with each checkpoint, to
            move to another machine; None for none.
        resume: Continue from `checkpoint` if it is further than `work`.
    """

    model: str
    out: Path
    data: JsonlData
    plain: Path | None = None
    positions: PositionScheme = "reordered"
    block_share: float = 1.0
    both_masks: bool = False
    plain_share: float | None = None
    steps: int = 300
    batch_tokens: int = 4096
    accumulate: int = 2
    rate: float | None = None
    warm_up: float = 0.03
    weight_decay: float = 0.0
    clip: float = 1.0
    lora: int = 0
    keep_adapter: bool = False
    precision: Precision = "fp32"
    gradient_checkpointing: bool = False
    attention: str | None = None
    seed: int = 0
    holdout: int = 64
    save_every: int = 100
    device: str | None = None
    work: Path | None = None
    lora_modules: LoraModules = "all-linear"
    packet: int = 0
    checkpoint: Path | None = None
    resume: bool = False
    lora_tokens: LoraTokens = "all"
    objective: Objective = "answers"
    instructions: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_settings(FinetuneConfig, vars(self))
        _check_choices(self)
        _check_numbers(self)
        _check_upper(self)
        if self.plain_batches == 1:
            raise InvalidInputError("plain_share must be below 1, so that chunks are learned about")
        if self.data.questions < 1:
            raise InvalidInputError("a context needs at least one question")
        _check_adapter(self)

    @property
    def work_folder(self) -> Path:
        """Where checkpoints and log are while the run lasts."""
        return self.work or self.out.with_name(self.out.name + ".work")

    def check_folders(self) -> None:
        """Raise `InvalidInputError` if the finished model or its work cannot be placed."""
        if self.out.exists():
            raise InvalidInputError(f"{self.out} exists; remove it or choose another output")
        out, place = self.out.resolve(), self.work_folder.resolve()
        if out == place or out in place.parents or place in out.parents:
            raise InvalidInputError(f"{out} and {place} must be two folders, none in the other")

    @property
    def highest_rate(self) -> float:
        """The learning rate after the warm-up."""
        return self.rate or (PACKET_RATE if self.packet else LORA_RATE if self.lora else FULL_RATE)

    @property
    def trains_adapter(self) -> bool:
        """Whether the model's own weights stay unchanged."""
        return bool(self.lora or self.packet)

    @property
    def plain_batches(self) -> float:
        """Share of plain batches."""
        if self.plain_share is None:
            return 0.0 if self.lora_tokens == "question" else 0.5
        return self.plain_share

    @property
    def teaches_blocks(self) -> bool:
        """Whether the model learns to answer from chunks that do not see each other."""
        return self.both_masks or self.block_share > 0

    def rate_at(self, step: int) -> float:
        """Learning rate of a step, counted from 0."""
        rising = max(1, round(self.warm_up * self.steps))
        if step < rising:
            return self.highest_rate * (step + 1) / rising
        return self.highest_rate * (self.steps - step) / max(1, self.steps - rising)

    def settings(self) -> dict[str, Any]:
        """What the weights depend on besides the data, as plain values."""
        elsewhere = ("out", "work", "save_every", "checkpoint", "resume")
        values: dict[str, Any] = json.loads(json.dumps(asdict(self), default=str))
        # Runs that began before there was a choice go on.
        for name in ("lora_modules", "lora_tokens", "instructions", "packet"):
            if getattr(self, name) == getattr(FinetuneConfig, name):
                del values[name]
        values["teacher"] = None  # those that began when there was another one, too
        return {key: value for key, value in values.items() if key not in elsewhere}

    def travelling_settings(self) -> dict[str, Any]:
        """`settings` without what may differ from machine to machine."""
        values = self.settings()
        values["data"].pop("path", None)
        here = ("model", "teacher", "plain", "precision", "gradient_checkpointing", "attention")
        return {key: value for key, value in values.items() if key not in (*here, "device")}


def _check_choices(config: FinetuneConfig) -> None:
    for name, allowed in (
        ("positions", SCHEMES),
        ("precision", get_args(Precision)),
        ("lora_modules", get_args(LoraModules)),
        ("lora_tokens", get_args(LoraTokens)),
        ("objective", get_args(Objective)),
    ):
        value = getattr(config, name)
        if value not in allowed:
            raise InvalidInputError(f"{name} must be one of {', '.join(allowed)}, not {value!r}")


def _check_numbers(config: FinetuneConfig) -> None:
    for name in ("steps", "batch_tokens", "accumulate", "holdout", "save_every"):
        if getattr(config, name) < 1:
            raise InvalidInputError(f"{name} must be at least 1, not {getattr(config, name)}")
    for name in ("block_share", "plain_share", "warm_up"):
        value = getattr(config, name)
        if value is not None and not 0 <= value <= 1:
            raise InvalidInputError(f"{name} is a share from 0 to 1, not {value}")
    for name in ("clip", "rate"):
        value = getattr(config, name)
        if value is not None and not value > 0:
            raise InvalidInputError(f"{name} must be above 0, not {value}")
    for name in ("lora", "packet", "weight_decay"):
        if not 0 <= getattr(config, name) < math.inf:
            raise InvalidInputError(f"{name} must not be negative, not {getattr(config, name)}")


def _check_adapter(config: FinetuneConfig) -> None:
    if config.keep_adapter and not config.trains_adapter:
        raise InvalidInputError("keep_adapter needs adapters; set lora to their rank, say 16")
    if config.lora_tokens == "question":
        _check_activated(config)
    if config.objective == "distillation" and not config.lora:
        raise InvalidInputError(
            'objective="distillation" learns from the model without its adapter; set lora to a '
            "rank, say 16"
        )
    if config.objective == "distillation" and not config.teaches_blocks:
        raise InvalidInputError(
            'objective="distillation" under full attention would learn what the model does '
            "already: its control is the model itself; leave block_share out"
        )
    if config.packet and config.lora:
        raise InvalidInputError("a packet is trained alone, the model being frozen; set lora to 0")
    if config.checkpoint is not None and not config.trains_adapter:
        raise InvalidInputError(
            "checkpoint holds an adapter alone; set lora to its rank, or leave checkpoint out"
        )
    if config.resume and config.checkpoint is None:
        raise InvalidInputError("resume goes on from a checkpoint; name its folder")


def _check_activated(config: FinetuneConfig) -> None:
    """Refuse what an adapter that acts on questions alone cannot be or learn."""
    for wrong, sentence in (
        (not config.lora, "is about adapters; set lora to their rank, say 16"),
        (not config.keep_adapter, "cannot be merged into the model; set keep_adapter"),
        (config.plain_batches, "acts behind documents alone; set plain_share to 0"),
        (
            config.gradient_checkpointing,
            "keeps the activations of questions alone; leave out gradient_checkpointing",
        ),
    ):
        if wrong:
            raise InvalidInputError(f'lora_tokens="question" {sentence}')


def _check_upper(config: FinetuneConfig) -> None:
    if config.rate == math.inf:
        raise InvalidInputError("rate must be finite, such as 1e-5")
    if not 0 <= config.seed < 2**63:
        raise InvalidInputError(f"seed must be from 0 to 2**63 - 1, not {config.seed}")
