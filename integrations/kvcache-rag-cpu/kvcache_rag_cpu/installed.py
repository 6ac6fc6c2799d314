"""The entry point for `kvcache-rag`: a `kvcache_rag.models.processors.Kernels`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvcache_rag_cpu.compiled import KERNELS, compiled, why_missing

if TYPE_CHECKING:
    import ctypes
    from collections.abc import Mapping


class InstalledKernels:
    """The kernels of this package."""

    def pack(self, model: Any, weight_format: str) -> Any:
        """See `Kernels.pack`."""
        from kvcache_rag_cpu.linears import pack

        return pack(model, weight_format)

    def unpack(self, model: Any) -> Any:
        """See `Kernels.unpack`."""
        from kvcache_rag_cpu.linears import unpack

        return unpack(model)

    def attention(self) -> ctypes.CDLL | None:
        """See `Kernels.attention`."""
        return compiled(KERNELS["attention"])

    def missing(self) -> Mapping[str, str]:
        """See `Kernels.missing`."""
        return {name: why_missing(name) for name in KERNELS}


INSTALLED = InstalledKernels()
