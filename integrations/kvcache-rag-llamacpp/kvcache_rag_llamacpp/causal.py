"""A GGUF file in llama.cpp, called as transformers' causal language models are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch
from torch import Tensor
from transformers import GenerationConfig, PretrainedConfig
from transformers.modeling_outputs import CausalLMOutputWithPast

from kvcache_rag.errors import InvalidInputError
from kvcache_rag.models.cache import CACHE_NAME
from kvcache_rag_llamacpp.sequence_cache import SequenceCache

if TYPE_CHECKING:
    from collections.abc import Mapping

    from typing_extensions import Self

    from kvcache_rag_llamacpp.backend import LlamaCppBackend
    from kvcache_rag_llamacpp.binding import LlamaCpp


class LlamaCppForCausalLM:
    """llama.cpp runs the passes; `generate` is transformers' own.

    Attributes:
        llama: The model that llama.cpp has loaded.
        rope_factors: The file's factors of rotary frequencies by name, float32 `(dim / 2,)`.
        file_digest: SHA-256 of the file.
        adapter_digest: Digest of its adapter; "" for none.
        is_adapter_for_questions: Whether that acts on question and answer alone.
        config: Its known settings, under transformers' names.
        generation_config: Likewise.
    """

    device = torch.device("cpu")  # of ids and logits
    dtype = torch.float32  # of logits
    training = False

    def __init__(
        self,
        llama: LlamaCpp,
        *,
        rope_factors: Mapping[str, Tensor],
        file_digest: str,
    ) -> None:
        """Over a loaded file."""
        ends = [*llama.ends] or None
        config: Any = PretrainedConfig()
        config.name_or_path = str(llama.path)
        config.vocab_size = llama.vocabulary
        config.hidden_size = llama.lib.llama_model_n_embd(llama.model)
        config.max_position_embeddings = llama.trained_length
        config.eos_token_id = ends
        config.model_type = llama.architecture
        self.config, self.llama = config, llama
        self.generation_config = GenerationConfig(eos_token_id=ends)
        self.rope_factors, self.file_digest = dict(rope_factors), file_digest
        self.adapter_digest = ""
        self.is_adapter_for_questions = False

    @property
    def kvcache_backend(self) -> LlamaCppBackend:
        """What it was loaded by."""
        from kvcache_rag_llamacpp.backend import BACKEND  # which loads models of this kind

        return BACKEND

    @property
    def name_or_path(self) -> str:
        """Of its file."""
        return str(self.llama.path)

    def num_parameters(self) -> int:
        """How many the file has."""
        return int(self.llama.parameters)

    def __copy__(self) -> Self:
        """Attributes of its own over the same file."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        return other

    def __reduce__(self) -> NoReturn:
        """Refuse: what llama.cpp has loaded is not sent."""
        raise InvalidInputError(
            "a model that llama.cpp has loaded cannot be copied or pickled; load its file where it "
            "is needed"
        )

    def generate(self, ids: Tensor, **arguments: Any) -> Tensor:
        """As `generate()` of transformers, over a cache of the engine's."""
        # It loads much, and a greedy answer does without.
        from kvcache_rag_llamacpp.generating import Generating

        run: Any = Generating(self)
        return cast("Tensor", run.generate(ids, **arguments))

    def __call__(
        self,
        input_ids: Tensor,
        cache: SequenceCache | None = None,
        logits_to_keep: int = 0,
    ) -> CausalLMOutputWithPast:
        """One pass behind what a cache holds, of which the newest is the only one that is.

        Args:
            input_ids: `(rows, n)` int64.
            cache: From `LlamaCppModel.new_cache` or `begin`; None is refused.
            logits_to_keep: Logits of how many of the last tokens, 0 for all.

        Returns:
            Logits `(rows, logits_to_keep or n, vocabulary)` float32, 0 where a row holds a column
            already.
        """
        if not isinstance(cache, SequenceCache):
            raise InvalidInputError(
                "a model of llama.cpp computes in the engine's own cells; ask the engine "
                "(Engine.generate, .complete or .logits)"
            )
        cache.ensure_current()
        rows, n = input_ids.shape
        keep = logits_to_keep or n
        tokens: list[int] = []
        positions: list[int] = []
        sequences: list[int] = []
        wanted: list[bool] = []
        places: list[tuple[int, int]] = []  # of the logits that are wanted
        for row in range(rows):
            skipped = max(0, cache.held[row] - cache.columns)
            fresh = n - skipped
            first = cache.columns + skipped - cache.padding[row]
            tokens += input_ids[row, skipped:].tolist()
            positions += range(first, first + fresh)
            sequences += [cache.sequences[row]] * fresh
            wanted += [column >= n - keep for column in range(skipped, n)]
            places += [(row, column) for column in range(max(0, skipped - (n - keep)), keep)]
        found = torch.from_numpy(self.llama.decode(tokens, positions, sequences, wanted))
        cache.advance(n)
        if len(places) == rows * keep:
            logits = found.view(rows, keep, -1)
        else:
            logits = torch.zeros(rows, keep, found.shape[1])
            for (row, column), line in zip(places, found, strict=True):
                logits[row, column] = line
        kept: dict[str, Any] = {CACHE_NAME: cache}
        return CausalLMOutputWithPast(logits=logits, **kept)
