"""What is built and where it goes: small values that can be sent to a worker."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvcache_rag.errors import InvalidInputError

if TYPE_CHECKING:
    from kvcache_rag.engine import Engine
    from kvcache_rag.stores import ChunkStore
    from kvcache_rag.template import PromptTemplate

# Of one call of a remote.  A builder rather waits than computes for nothing.
REMOTE_TIMEOUT, REMOTE_RETRIES = 60.0, 4


@dataclass(frozen=True)
class BuildSettings:
    """What decides the keys of chunks, and where they go.

    Attributes:
        model: Hub id, folder, or "tiny".
        store: A folder that all workers see, or a URL such as `s3://bucket/folder`.
        codec: Form of the chunks: "native", "int8" or "int4".
        namespace: Tenant.
        template: How prompts are written; None for the one the model brings, else the default.
        system_prompt: Instruction, instead of the template's own; None for that.
        dtype: "auto" for the checkpoint's own.
        revision: Commit, branch or tag of a model on the hub; None for its default.
        device: Where workers put the model; None for CUDA if there is one.
    """

    model: str
    store: str
    codec: str = "native"
    namespace: str = ""
    template: PromptTemplate | None = None
    system_prompt: str | None = None
    dtype: str = "auto"
    revision: str | None = None
    device: str | None = None

    @property
    def is_remote(self) -> bool:
        """Whether the store is a URL."""
        return "://" in self.store

    @property
    def place(self) -> str:
        """The store for people: without credentials."""
        from kvcache_rag.stores import RemoteStore

        return RemoteStore(self.store).url if self.is_remote else self.store

    def prompt_template(self, brought: PromptTemplate | None) -> PromptTemplate:
        """How prompts are written by a model that brings `brought`."""
        from kvcache_rag.template import PromptTemplate

        template = self.template or brought or PromptTemplate()
        if self.system_prompt is None:
            return template
        return replace(template, system=self.system_prompt)

    def open_store(self) -> ChunkStore:
        """The store.

        Raises:
            InvalidInputError: If it cannot be a store, or there is no such codec.
            MissingExtraError: If the driver of the URL is not installed.
        """
        from kvcache_rag.codecs import by_name
        from kvcache_rag.stores import DiskStore, RemoteStore

        codec = by_name(self.codec)
        if not self.is_remote:
            return DiskStore(self.store, namespace=self.namespace, codec=codec)
        return RemoteStore(
            self.store, codec=codec, timeout=REMOTE_TIMEOUT, retries=REMOTE_RETRIES, pause=0.0
        )

    def open_engine(self) -> Engine:
        """Load the model.

        Raises:
            InvalidInputError: If it cannot be loaded.
            UnsupportedModelError: If it keeps no keys and values per token.
        """
        from kvcache_rag.engine import Engine
        from kvcache_rag.loading import load
        from kvcache_rag.stores import MemoryStore

        store = self.open_store()
        options = {"revision": self.revision} if self.revision else {}
        model, tokenizer, brought = load(
            self.model, dtype=self.dtype, device=self.device, options=options
        )
        template = self.prompt_template(brought)
        engine = Engine(
            model,
            tokenizer,
            store=store,
            combinations=MemoryStore(0),
            template=template,
            namespace=self.namespace,
        )
        _ = engine.spec  # raises where nothing can be kept
        return engine

    def check(self) -> None:
        """Find out before any model is loaded what can be known by then.

        Raises:
            InvalidInputError: If the store cannot be written.
            MissingExtraError: If the driver of the store is not installed.
        """
        from kvcache_rag.chunk import ChunkKey

        store = self.open_store()
        if self.is_remote:
            store.contains(ChunkKey("0" * 64, "0" * 64, self.namespace, 1, 0))
            found = store.stats()
            if found.failures:
                raise InvalidInputError(f"the store cannot be reached: {found.last_failure}")
            return
        try:
            with tempfile.TemporaryFile(dir=os.path.abspath(self.store)):
                pass
        except OSError as error:
            raise InvalidInputError(
                f"the store {self.store} cannot be written ({error.strerror}); name a folder that "
                "can"
            ) from error
