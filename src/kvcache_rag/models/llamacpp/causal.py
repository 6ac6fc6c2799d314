"""A GGUF file in llama.cpp as a causal language model of transformers: it generates as they do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from kvcache_rag.errors import InvalidInputError
from kvcache_rag.models.llamacpp.cells import CellsCache

if TYPE_CHECKING:
    from collections.abc import Mapping

    from typing_extensions import Self

    from kvcache_rag.models.llamacpp.binding import LlamaCpp


class LlamaCppConfig(PretrainedConfig):
    """What transformers' `generate()` wants to know of a GGUF file."""

    model_type = "llama.cpp"


class LlamaCppForCausalLM(PreTrainedModel, GenerationMixin):
    """Has no parameters of its own: passes are llama.cpp's.

    Attributes:
        llama: What llama.cpp has loaded.
        rope_factors: The file's factors of rotary frequencies by name, float32 `(dim / 2,)`.
        file_digest: SHA-256 of the file.
        adapter_digest: What names the adapter that was put into it; "" for none.
    """

    config_class = LlamaCppConfig

    def __init__(
        self,
        llama: LlamaCpp,
        *,
        rope_factors: Mapping[str, Tensor],
        file_digest: str,
    ) -> None:
        """Over a loaded file."""
        ends = list(llama.ends)
        config: Any = LlamaCppConfig()
        config.name_or_path = str(llama.path)
        config.vocab_size = llama.vocabulary
        config.max_position_embeddings = llama.trained_length
        config.eos_token_id = ends or None
        config.model_type = llama.architecture
        super().__init__(config)
        self.llama, self.rope_factors = llama, dict(rope_factors)
        self.file_digest, self.adapter_digest = file_digest, ""
        self.generation_config = GenerationConfig(eos_token_id=ends or None)
        self.training = False

    @property
    def device(self) -> torch.device:
        """Where ids and logits are."""
        return torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        """Of logits."""
        return torch.float32

    def __copy__(self) -> Self:
        """Attributes of its own over the same file (`generate()` runs on such a view)."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        return other

    def __reduce__(self) -> NoReturn:
        """Refuse: what llama.cpp has loaded is not sent."""
        raise InvalidInputError(
            "a model that llama.cpp has loaded cannot be copied or pickled; load its file where it "
            "is needed"
        )

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,  # padding is the cache's affair
        position_ids: Tensor | None = None,
        past_key_values: CellsCache | None = None,
        logits_to_keep: int = 0,
        use_cache: bool | None = None,  # it is always used
        cache: CellsCache | None = None,
        **_: Any,
    ) -> CausalLMOutputWithPast:
        """As transformers' models; a cache is needed, of which the newest is the only one that is.

        Args:
            input_ids: `(rows, n)` int64.
            attention_mask: Not read.
            position_ids: `(rows, n)` int64; None for those behind what the cache holds.
            past_key_values: From `LlamaCppModel.new_cache` or `begin`.
            logits_to_keep: Logits of how many of the last tokens, 0 for all.
            use_cache: Not read.
            cache: What newer transformers call the cache.
            _: Whatever else transformers hands to its models.

        Returns:
            Logits `(rows, logits_to_keep or n, vocabulary)` float32, 0 where a row holds a column
            already.
        """
        held = cache if past_key_values is None else past_key_values
        if not isinstance(held, CellsCache):
            raise InvalidInputError(
                "a model of llama.cpp computes in the engine's own cells; ask the engine "
                "(Engine.generate, .complete or .logits)"
            )
        held.ensure_current()
        rows, n = input_ids.shape
        keep = logits_to_keep or n
        tokens: list[int] = []
        positions: list[int] = []
        sequences: list[int] = []
        wanted: list[bool] = []
        places: list[tuple[int, int]] = []  # of the logits that are wanted
        for row in range(rows):
            skipped = max(0, held.held[row] - held.columns)
            fresh = n - skipped
            first = held.columns + skipped - held.padding[row]
            tokens += input_ids[row, skipped:].tolist()
            positions += range(first, first + fresh)
            sequences += [held.sequences[row]] * fresh
            wanted += [column >= n - keep for column in range(skipped, n)]
            places += [(row, column) for column in range(max(skipped, n - keep) - (n - keep), keep)]
        found = torch.from_numpy(self.llama.decode(tokens, positions, sequences, wanted))
        held.took(n)
        if len(places) == rows * keep:
            logits = found.view(rows, keep, -1)
        else:
            logits = torch.zeros(rows, keep, found.shape[1])
            for (row, column), line in zip(places, found, strict=True):
                logits[row, column] = line
        answer = CausalLMOutputWithPast(logits=logits, past_key_values=held)
        if cache is not None:
            answer["cache"] = held
        return answer
