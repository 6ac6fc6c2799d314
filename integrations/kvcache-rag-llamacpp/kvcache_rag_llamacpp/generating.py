"""transformers' own `generate()` over llama.cpp: sampling, beams and all else it has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel

from kvcache_rag.models.cache import CACHE_NAME

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers.modeling_outputs import CausalLMOutputWithPast

    from kvcache_rag_llamacpp.causal import LlamaCppForCausalLM


class _Config(PretrainedConfig):
    model_type = "llama.cpp"


class Generating(PreTrainedModel, GenerationMixin):
    """A model without parameters, for one call of `generate()`."""

    config_class = _Config

    def __init__(self, model: LlamaCppForCausalLM) -> None:
        """Over a loaded file, with its generation config."""
        config: Any = _Config()
        config.vocab_size = model.config.vocab_size
        config.max_position_embeddings = model.config.max_position_embeddings
        super().__init__(config)
        self._own = model
        self.generation_config = model.generation_config
        self.training = False

    @property
    def device(self) -> torch.device:
        """Of ids and logits."""
        return self._own.device

    @property
    def dtype(self) -> torch.dtype:
        """Of logits."""
        return self._own.dtype

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,  # padding is the cache's affair
        position_ids: Tensor | None = None,  # so is where a token stands
        logits_to_keep: int = 0,
        **others: Any,
    ) -> CausalLMOutputWithPast:
        """As transformers calls its models; see `LlamaCppForCausalLM.__call__`."""
        return self._own(input_ids, others[CACHE_NAME], logits_to_keep)
