"""The entry point of the back end `llama.cpp` for `kvcache-rag`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvcache_rag.errors import InvalidInputError
from kvcache_rag_llamacpp.loading import check_format, file_of, load_llama

if TYPE_CHECKING:
    from kvcache_rag_llamacpp.model import LlamaCppModel


class LlamaCppBackend:
    """A `kvcache_rag.models.backends.Backend` over llama-cpp-python."""

    load = staticmethod(load_llama)

    def check(self, name: str) -> None:
        """See `Backend.check`."""
        file_of(name, {})

    def check_loaded(self, weight_format: str, *, has_adapter: bool) -> None:
        """See `Backend.check_loaded`."""
        check_format(weight_format)
        if has_adapter:
            raise InvalidInputError(
                "llama.cpp takes an adapter while it loads a model, and a loaded one was "
                "given; name its file, and the adapter"
            )

    def language_model(self, model: Any, *, window: int | None) -> LlamaCppModel:
        """See `Backend.language_model`."""
        from kvcache_rag_llamacpp.model import LlamaCppModel

        return LlamaCppModel(model, window=window)


BACKEND = LlamaCppBackend()
