"""Make an engine, and the stores under it, from the settings of an application.

The settings are plain values: torch is loaded by whoever opens something.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields, replace
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from kvcache_rag.errors import (
    InvalidInputError,
    MissingExtraError,
    check_name,
    check_settings,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvcache_rag.codecs import Codec
    from kvcache_rag.engine import Engine
    from kvcache_rag.generation.context import RotationMode
    from kvcache_rag.models.linears import WeightFormat
    from kvcache_rag.policies.base import Scorer
    from kvcache_rag.prompt.template import PromptTemplate
    from kvcache_rag.stores import ChunkStore, MemoryStore
    from kvcache_rag.stores.signing import KeySource
    from kvcache_rag.verdict import Gate, Verdict


@dataclass(frozen=True)
class EngineSettings:
    """What an engine is made of, but for its stores; a field that `Engine` has too is handed on.

    Attributes:
        model: Hub id, folder, GGUF file, "tiny" or "smollm2"; or a loaded transformers or PEFT
            model.
        tokenizer: A loaded one or a name; None for the model's own.
        adapter: PEFT adapter to put into the model, a folder, an installed name or "none"; None for
            none, and for "smollm2" for "block" where that is installed.
        weight_format: How its linear layers keep their weights on a CPU: "auto" (faster, the same
            numbers), "plain", "int8" or "int4"; a loaded model stays as it is with "auto".
        dtype: "auto" for the checkpoint's own.
        device: "cpu", "cuda", ...; None for CUDA if there is one.
        revision: Commit, branch or tag of a model on the hub; None for its default.
        model_kwargs: Further arguments of the model's `from_pretrained`.
        tokenizer_kwargs: Further arguments of the tokenizer's `from_pretrained`.
        template: How prompts are written; None for the one the model brings, else the default.
        system_prompt: Instruction before the chunks, instead of the template's; None for that.
        namespace: As for `Engine`, like all that follow; None for its default.
        auxiliary: A scorer as for `Engine`, or the name of a small model, as `model`: it works on
            the CPU, its chunks lie in the engine's store.
    """

    model: Any
    tokenizer: Any = None
    adapter: str | os.PathLike[str] | None = None
    weight_format: WeightFormat = "auto"
    dtype: Any = "auto"
    device: str | None = None
    revision: str | None = None
    model_kwargs: Mapping[str, Any] = field(default_factory=dict)
    tokenizer_kwargs: Mapping[str, Any] = field(default_factory=dict)
    template: PromptTemplate | None = None
    system_prompt: str | None = None
    namespace: str | None = None
    context_window: int | None = None
    cost_aware: bool | None = None
    auxiliary: Scorer | str | os.PathLike[str] | None = None
    gate: Gate | Verdict | str | os.PathLike[str] | None = None
    rotation: RotationMode | None = None

    def __post_init__(self) -> None:
        check_settings(EngineSettings, vars(self))
        if self.namespace is not None:
            check_name("namespace", self.namespace)

    @classmethod
    def of(cls, source: object, **values: Any) -> EngineSettings:
        """What `source`, such as parsed arguments, holds under the names of these fields.

        Args:
            source: An attribute that is None or missing says nothing.
            values: Said in its place.
        """
        own = {known.name: getattr(source, known.name, None) for known in fields(cls)}
        settings = {name: value for name, value in own.items() if value is not None}
        return cls(**{**settings, **values})

    def prompt_template(self, brought: PromptTemplate | None) -> PromptTemplate:
        """How prompts are written for a model that brings `brought`."""
        from kvcache_rag.prompt.template import PromptTemplate

        template = self.template or brought or PromptTemplate()
        if self.system_prompt is None:
            return template
        # It stands before the chunks, so it is part of what they are computed behind.
        return replace(template, system=self.system_prompt)

    def open(
        self, store: ChunkStore | None = None, combinations: ChunkStore | None = None
    ) -> Engine:
        """Load the model and make its engine.

        Args:
            store: As for `Engine`.
            combinations: As for `Engine`.

        Raises:
            InvalidInputError: If model or tokenizer cannot be loaded, or a loaded model comes
                without its tokenizer.
            FingerprintMismatchError: If the gate is about another model, instruction or template.
        """
        from kvcache_rag.engine import Engine

        auxiliary = self._scorer(store)
        model, tokenizer, brought = self._load()
        names = signature(Engine).parameters.keys() - {"model", "tokenizer", "template"}
        options = {
            name: value for name, value in vars(self).items() if name in names and value is not None
        }
        return Engine(
            model,
            tokenizer,
            template=self.prompt_template(brought),
            store=store,
            combinations=combinations,
            **{**options, "auxiliary": auxiliary},
        )

    def _scorer(self, store: ChunkStore | None) -> Scorer | None:
        """The scorer that was given, or the model that was named."""
        if not isinstance(self.auxiliary, (str, os.PathLike)):
            return self.auxiliary
        from kvcache_rag.auxiliary import Auxiliary

        return Auxiliary.from_pretrained(
            self.auxiliary, store=store, namespace=self.namespace or ""
        )

    def _load(self) -> tuple[Any, Any, PromptTemplate | None]:
        from kvcache_rag.models.adapters import NO_ADAPTER, adapter_template, with_adapter
        from kvcache_rag.models.linears import pack_weights
        from kvcache_rag.models.pretrained import chosen_adapter, load

        tokenizer = self._load_tokenizer()
        if self._is_loaded:
            if tokenizer is None:
                raise InvalidInputError("a loaded model needs its tokenizer= too")
            if self.adapter is None or self.adapter == NO_ADAPTER:
                if self.weight_format != "auto":
                    pack_weights(self.model, self.weight_format)
                return self.model, tokenizer, None
            if self.weight_format not in ("auto", "plain"):
                raise InvalidInputError(
                    "adapter= of a loaded model can be switched, which needs weights as they are; "
                    "leave weight_format out, or name the model and its adapter"
                )
            name = str(getattr(self.model, "name_or_path", "") or type(self.model).__name__)
            model = with_adapter(self.model, self.adapter, name)
            return model, tokenizer, adapter_template(self.adapter)
        revision = {"revision": self.revision} if self.revision else {}
        return load(
            self.model,
            dtype=self.dtype,
            device=self.device,
            options={**self.model_kwargs, **revision},
            tokenizer=tokenizer,
            adapter=chosen_adapter(self.model, self.adapter),
            weight_format=self.weight_format,
        )

    def _load_tokenizer(self) -> Any:
        """The tokenizer that was named or given; None for the model's own."""
        from kvcache_rag.models.pretrained import load_tokenizer

        tokenizer = self.tokenizer
        if tokenizer is None and self.tokenizer_kwargs and not self._is_loaded:
            tokenizer = os.fspath(self.model)
        if not isinstance(tokenizer, str):
            return tokenizer
        return load_tokenizer(tokenizer, dict(self.tokenizer_kwargs))

    @property
    def _is_loaded(self) -> bool:
        return not isinstance(self.model, (str, os.PathLike))


def open_store(
    place: str | os.PathLike[str] | None,
    *,
    codec: str = "native",
    max_bytes: int | None = None,
    ttl: float | None = None,
    memory: MemoryStore | None = None,
    **options: Any,
) -> ChunkStore:
    """Where chunks are kept.

    Args:
        place: A folder, or a URL such as `s3://bucket/folder`; None for memory alone.
        codec: Form of the chunks there: "native", "int8" or "int4".
        max_bytes: Limit of a folder; who serves a URL limits it there.
        ttl: Seconds from the writing of a chunk in a folder to its end; None for no end.
        memory: What stands before it; None for nothing.
        options: Further arguments of `DiskStore`, or for a URL of `RemoteStore`.

    Raises:
        InvalidInputError: If it cannot be a store, there is no such codec, or a URL comes with a
            `ttl`.
        MissingExtraError: If the driver of the URL is not installed.
    """
    from kvcache_rag.stores import DiskStore, MemoryStore, RemoteStore, TieredStore

    check_settings(open_store, {"codec": codec, "max_bytes": max_bytes})
    if place is None:
        return MemoryStore() if memory is None else memory
    store: ChunkStore
    if is_url(place):
        if ttl is not None:
            raise InvalidInputError(
                f"chunks at {os.fspath(place)} end where they are served; leave its ttl out"
            )
        store = RemoteStore(os.fspath(place), codec=codec, **options)
    else:
        store = DiskStore(place, max_bytes=max_bytes, ttl=ttl, codec=codec, **options)
    return store if memory is None else TieredStore(memory, store)


def memory_codec(codec: str, device: str | None) -> Codec | None:
    """The form of chunks in the memory before a store: on a CPU its own, if attention reads that.

    Args:
        codec: Of the store, by name.
        device: Of the model; None for CUDA if there is one.
    """
    import torch

    from kvcache_rag.codecs import by_name

    found = by_name(codec)
    place = device or ("cuda" if torch.cuda.is_available() else "cpu")
    return found if found.is_attended and place == "cpu" else None


def is_url(place: str | os.PathLike[str]) -> bool:
    """Whether a store is named by a URL; else it is a folder."""
    return "://" in os.fspath(place)


def template_in(place: str) -> PromptTemplate:
    """The template of a `prompt_template.json`, by its path or its folder.

    Raises:
        InvalidInputError: If there is none, or it cannot be used.
    """
    from kvcache_rag.prompt.template import FILE_NAME, PromptTemplate

    path = Path(place)
    folder = path.parent if path.name == FILE_NAME else path
    template = PromptTemplate.load(folder)
    if template is None:
        raise InvalidInputError(f"there is no {FILE_NAME} in {folder}; check --template")
    return template


def open_engine(
    model: Any,
    tokenizer: Any = None,
    *,
    kv_dir: str | os.PathLike[str] | None = None,
    kv_max_bytes: int | None = None,
    kv_codec: str | None = None,
    kv_ttl: float | None = None,
    system_prompt: str | None = None,
    template: PromptTemplate | None = None,
    device_map: str | Mapping[str, Any] | None = None,
    model_kwargs: Mapping[str, Any] | None = None,
    tokenizer_kwargs: Mapping[str, Any] | None = None,
    context_window: int | None = None,
    gate: str | os.PathLike[str] | None = None,
    rotation: RotationMode | None = None,
    signing_key: KeySource = None,
    adapter: str | os.PathLike[str] | None = None,
    weight_format: WeightFormat = "auto",
    auxiliary: Scorer | str | os.PathLike[str] | None = None,
) -> Engine:
    """Load what the settings describe.

    Args:
        model: Hub id, folder, GGUF file, "tiny" or "smollm2"; or a loaded transformers or PEFT
            model.
        tokenizer: A loaded one or a name; None for the model's own.
        kv_dir: Folder of the chunks' KV; None to keep it in memory only.
        kv_max_bytes: Limit of that folder.
        kv_codec: Form of the chunks there: "native", "int8" or "int4"; None for "native".
        kv_ttl: Seconds for which a chunk is kept, there and in memory; None for no end.
        system_prompt: Instruction before the chunks, instead of the template's.
        template: How prompts are written; None for the one the model brings, else the default.
        device_map: "cpu", "cuda", "auto", or a transformers device map over one device.
        model_kwargs: Further arguments of the model's `from_pretrained`, such as `dtype`.
        tokenizer_kwargs: Further arguments of the tokenizer's `from_pretrained`.
        context_window: Lower it to keep prompts short; None for the model's own.
        gate: File that `kvcache-rag verify` wrote (see `Engine`).
        rotation: Whether chunks are copied, or attended to where they lie; None for "auto".
        signing_key: Of the folder: a key, its bytes or its file; None for that of the environment
            (`KVCACHE_RAG_SIGNING_KEY`), or none.
        adapter: As for `EngineSettings`.
        weight_format: As for `EngineSettings`.
        auxiliary: As for `EngineSettings`.

    Raises:
        InvalidInputError: If a model or tokenizer cannot be loaded, a loaded model comes without
            its tokenizer, or the key cannot be used.
        FingerprintMismatchError: If the gate is about another model, instruction or template.
    """
    from kvcache_rag.stores import MemoryStore

    given = {"kv_max_bytes": kv_max_bytes, "kv_codec": kv_codec, "kv_ttl": kv_ttl}
    check_settings(open_engine, {**given, "system_prompt": system_prompt})
    further = dict(model_kwargs or {})
    dtype = further.pop("dtype", None) or "auto"
    device = device_map if isinstance(device_map, str) and device_map != "auto" else None
    if not isinstance(device_map, (str, type(None))):
        further["device_map"] = device_map
    settings = EngineSettings(
        model,
        tokenizer,
        dtype=dtype,
        device=device,
        model_kwargs=further,
        tokenizer_kwargs=tokenizer_kwargs or {},
        template=template,
        system_prompt=system_prompt or None,
        context_window=context_window,
        gate=gate,
        rotation=rotation,
        adapter=adapter,
        weight_format=weight_format,
        auxiliary=auxiliary,
    )
    codec = kv_codec or "native"
    store = open_store(
        kv_dir,
        codec=codec,
        max_bytes=kv_max_bytes,
        ttl=kv_ttl,
        memory=MemoryStore(ttl=kv_ttl, codec=memory_codec(codec, device)),
        signing_key=signing_key,
    )
    return settings.open(store)


def remote_engine(base_url: str, **options: Any) -> Engine:
    """What answers at a server, as integrations use an engine.

    It has the methods of `Engine` that they call, with the same arguments; the others are for who
    loads a model.

    Args:
        base_url: Of a `kvcache-rag serve`.
        options: Of `RemoteEngine`.

    Raises:
        InvalidInputError: If it is no URL.
        MissingExtraError: If kvcache-rag-server is not installed.
    """
    try:
        from kvcache_rag_server.remote import RemoteEngine
    except ImportError as error:
        raise MissingExtraError("kvcache-rag-server", "server") from error
    return cast("Engine", RemoteEngine(base_url, **options))
