"""The stock model while it learns: loading, LoRA, forward passes with gradients, writing."""

from __future__ import annotations

import json
import shutil
import tempfile
import warnings
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from kvcache_rag.errors import InvalidInputError, MissingExtraError
from kvcache_rag.models.adapters import is_adapter, note_training, write_training
from kvcache_rag.models.hf import TransformersModel
from kvcache_rag.models.model_names import PACKAGED, resolve
from kvcache_rag.models.pretrained import load, own_dtype
from kvcache_rag.prompt.template import FILE_NAME, PromptTemplate, text_fields
from kvcache_rag_lab.finetune.adapters import lora_modules, packet_tokens, with_packet
from kvcache_rag_lab.finetune.attention import use_tiled_attention
from kvcache_rag_lab.finetune.forward import (
    DividedForward,
    Forward,
    MaskedForward,
    StitchedForward,
)
from kvcache_rag_lab.finetune.packing import IGNORED, Batch
from kvcache_rag_lab.finetune.teacher import Lesson, Teacher

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from kvcache_rag_lab.finetune.config import FinetuneConfig
    from kvcache_rag_lab.finetune.sources import Encoded

PIECE: Final = 256  # tokens whose loss is computed together


@dataclass(eq=False)
class Learner:
    """A model under training.

    Attributes:
        adapter: Knows the layers' windows; its `model` is the stock transformers model, into which
            LoRA puts its layers.
        tokenizer: Its tokenizer.
        template: How prompts are written.
        brought: Whether the model came with that template.
        config: Settings.
        saved_dtype: Dtype of the finished weights: the checkpoint's own.
        peft: The PEFT model around it, None when all weights are trained.
    """

    adapter: TransformersModel
    tokenizer: Any
    template: PromptTemplate
    brought: bool
    config: FinetuneConfig
    saved_dtype: torch.dtype
    peft: Any = None

    @classmethod
    def load(cls, config: FinetuneConfig) -> Learner:
        """Load a model and make ready what is trained.

        Args:
            config: Names the model, and says what is trained.

        Raises:
            InvalidInputError: If it cannot be loaded, or its weights are quantised.
            UnsupportedModelError: If its keys cannot be moved, so that chunks could not be reused.
            MissingExtraError: If LoRA is asked for and peft is not installed.
        """
        if config.trains_adapter:
            _need_peft()
        if is_adapter(Path(resolve(config.model))):
            raise InvalidInputError(
                f"{config.model} is an adapter; merge it into its base model and name the result"
            )
        low = config.trains_adapter and config.precision == "bf16"
        options = {"attn_implementation": config.attention} if config.attention else {}
        model, tokenizer, brought = load(
            config.model,
            dtype=torch.bfloat16 if low else torch.float32,
            device=config.device,
            options=options,
        )
        if getattr(model.config, "quantization_config", None) is not None:
            raise InvalidInputError(
                f"{config.model} has quantised weights, which cannot be trained; name the model "
                "that they were made from"
            )
        adapter = TransformersModel(model, packed_attention=False)
        adapter.measured.ensure_movable()
        if config.attention is None:
            use_tiled_attention(model)
        learner = cls(
            adapter,
            tokenizer,
            brought or PromptTemplate(),
            brought is not None,
            config,
            own_dtype(config.model),
        )
        learner._prepare()
        learner.forward.ensure_possible()
        return learner

    def _prepare(self) -> None:
        model, config = self.adapter.model, self.config
        if config.trains_adapter:
            import peft

            settings = self._adapter_settings()
            torch.manual_seed(config.seed)
            with warnings.catch_warnings():
                # peft asks transformers by a name that transformers is about to drop.
                warnings.simplefilter("ignore", FutureWarning)
                self.peft = peft.get_peft_model(model, settings)
            for parameter in self.trained.values():  # vectors of tokens have the dtype of the rest
                parameter.data = parameter.data.float()
        else:
            model.requires_grad_(requires_grad=True)
        if config.gradient_checkpointing:
            self.adapter.ensure_attends_only(
                "and what it keeps gets lost where activations are computed twice; leave out "
                "gradient_checkpointing"
            )
            # The second is the first's name in older versions of transformers.
            enable = getattr(model, "activation_checkpointing_enable", None)
            (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})

    def _adapter_settings(self) -> Any:
        """PEFT's settings of what is trained; a packet changes the template, too."""
        import peft

        config = self.config
        if config.lora:
            return peft.LoraConfig(
                r=config.lora,
                lora_alpha=2 * config.lora,
                target_modules=lora_modules(self.adapter.model, config.lora_modules),
                task_type="CAUSAL_LM",
            )
        tokens = packet_tokens(self.tokenizer, self.template, config.packet)
        self.template, self.brought = with_packet(self.template, [*tokens]), True
        return peft.TrainableTokensConfig(token_indices=[*tokens.values()], task_type="CAUSAL_LM")

    @property
    def trained(self) -> dict[str, torch.nn.Parameter]:
        """What the optimiser changes."""
        named = self.adapter.model.named_parameters()
        return {name: value for name, value in named if value.requires_grad}

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype of activations."""
        return torch.bfloat16 if self.config.precision == "bf16" else torch.float32

    @cached_property
    def forward(self) -> Forward:
        """How it is computed."""
        adapter, positions = self.adapter, self.config.positions
        if self.config.lora_tokens == "question":
            untouched = self.peft.disable_adapter
            return DividedForward(adapter, positions, self.compute_dtype, untouched)
        if adapter.recurrent is not None:
            return StitchedForward(adapter, adapter.recurrent, positions)
        return MaskedForward(adapter, positions, self.compute_dtype)

    def batch(self, samples: Sequence[Encoded]) -> Batch:
        """Samples as one batch under the positions of this run."""
        return self.forward.batch(samples)

    def logits(self, batch: Batch) -> Tensor:
        """The forward of a batch, with gradients if they are on.

        Returns:
            `(rows, kept, vocabulary)` float32.
        """
        return self.rounded_logits(batch).float()

    def rounded_logits(self, batch: Batch) -> Tensor:
        """The same in the dtype of the computation."""
        with self.rounding():
            return self.forward.logits(batch)

    def lesson(self, samples: Sequence[Encoded]) -> Lesson:
        """What the model without its adapter answers under full attention."""
        with self.rounding(), self.measuring():
            return Teacher(self.adapter, self.peft.disable_adapter).lesson(samples)

    def untouched_logits(self, batch: Batch) -> Tensor:
        """What the model without its adapter makes of a batch, `(learned, vocabulary)`."""
        with self.measuring(), self.peft.disable_adapter():
            logits = self.rounded_logits(batch)
        return logits[batch.labels.to(logits.device) != IGNORED]

    def rounding(self) -> AbstractContextManager[Any]:
        """What activations are computed in."""
        low = self.compute_dtype != torch.float32
        return torch.autocast(self.adapter.device.type, self.compute_dtype, enabled=low)

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Evaluation mode without gradients; training mode behind it, if it was on."""
        model = self.adapter.model
        training = model.training
        model.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            model.train(training)

    def finish(self) -> None:
        """Merge LoRA unless it is kept, and round the weights as they will be saved."""
        if self.peft is not None:
            if self.config.keep_adapter:
                return
            self.adapter.model = self.peft.merge_and_unload()
            self.peft = None
        for parameter in self.adapter.model.parameters():  # not the rotary frequencies
            parameter.data = parameter.data.to(self.saved_dtype).to(parameter.dtype)

    def save(self, out: Path, report: dict[str, Any], extra: Sequence[Path]) -> None:
        """Write what `from_pretrained` loads, beside `out` first, so that it appears as a whole.

        Args:
            out: Folder; must not exist.
            report: Goes to `report.json`.
            extra: Files to copy there.
        """
        out.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
        try:
            partial.chmod(0o755)
            self._write_model(partial)
            _write(partial / "report.json", report)
            for path in extra:
                shutil.copyfile(path, partial / path.name)
            partial.rename(out)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise

    def _write_model(self, folder: Path) -> None:
        if self.peft is not None:
            self.describe_adapter(folder)
            self.peft.save_pretrained(folder)
        else:
            model = self.adapter.model
            for parameter in model.parameters():
                parameter.data = parameter.data.to(self.saved_dtype)
            model.config.dtype = self.saved_dtype
            note_training(model.config, blocks=self.config.teaches_blocks)
            model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        if self.brought:
            _write(folder / FILE_NAME, text_fields(self.template))

    def describe_adapter(self, folder: Path) -> None:
        """Write what an adapter's folder holds beside its weights."""
        described = self.peft.peft_config["default"]
        # Another process has to find the base model again.
        described.base_model_name_or_path = _findable(self.config.model)
        described.save_pretrained(folder)
        on_question = self.config.lora_tokens == "question"
        write_training(folder, blocks=self.config.teaches_blocks, on_question=on_question)
        if self.brought:
            _write(folder / FILE_NAME, text_fields(self.template))

    def adapter_weights(self) -> dict[str, Tensor]:
        """The adapter by PEFT's names, on the CPU in bfloat16."""
        from peft import get_peft_model_state_dict

        named = get_peft_model_state_dict(self.peft)
        return {name: value.detach().to("cpu", torch.bfloat16) for name, value in named.items()}

    def load_adapter_weights(self, weights: dict[str, Tensor]) -> None:
        """Take an adapter's weights over.

        Raises:
            InvalidInputError: If they are another adapter's.
        """
        from peft import set_peft_model_state_dict

        own = self.adapter_weights()
        if {name: value.shape for name, value in own.items()} != {
            name: value.shape for name, value in weights.items()
        }:
            raise InvalidInputError(
                "the weights of the checkpoint are not those of this adapter; go on with the "
                "model and the settings that wrote it"
            )
        set_peft_model_state_dict(self.peft, {k: v.float() for k, v in weights.items()})


def answer_loss(logits: Tensor, batch: Batch) -> Tensor:
    """Mean cross-entropy over everything learned, a scalar, float32 in every precision.

    In pieces that are computed again for their gradients: each float32 copy of the whole takes 1.7
    GB at 150,000 words and 2,800 tokens.
    """
    labels = batch.labels.to(logits.device).flatten()
    return _mean_of(_summed_loss, labels, logits.flatten(0, 1), labels)


def distillation_loss(logits: Tensor, teacher: Tensor, batch: Batch) -> Tensor:
    """Mean divergence from the teacher's distributions (KL, the teacher's first), likewise.

    Args:
        logits: `(rows, kept, vocabulary)`.
        teacher: `(learned, vocabulary)`, see `Lesson`.
        batch: Of its samples.
    """
    labels = batch.labels.to(logits.device)
    learned = labels != IGNORED
    return _mean_of(_summed_divergence, labels[learned], logits[learned], teacher)


def _mean_of(sum_of: Callable[..., Tensor], labels: Tensor, *tensors: Tensor) -> Tensor:
    pieces = zip(*(torch.split(tensor, PIECE) for tensor in tensors), strict=True)
    losses = [checkpoint(sum_of, *piece, use_reentrant=False) for piece in pieces]
    return torch.stack(losses).sum() / (labels != IGNORED).sum()


def divergences(logits: Tensor, teacher: Tensor) -> Tensor:
    """KL of each token, the teacher's distribution first, in nats: `(...)` of `(..., words)`."""
    own, wanted = (tensor.float().log_softmax(-1) for tensor in (logits, teacher))
    return (wanted.exp() * (wanted - own)).sum(-1)


def _summed_divergence(logits: Tensor, teacher: Tensor) -> Tensor:
    return divergences(logits, teacher).sum()


def _summed_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits.float(), labels, ignore_index=IGNORED, reduction="sum")


def _need_peft() -> None:
    try:
        import peft  # noqa: F401  # only whether it is there
    except ImportError as error:
        raise MissingExtraError("peft", "finetune") from error


def _findable(name: str) -> str:
    path = Path(resolve(name))
    return str(path.absolute()) if path.exists() and name not in PACKAGED else name


def _write(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
