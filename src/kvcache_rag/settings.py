"""Every option of an engine and its store, declared once: name, type, limits, and effect.

Front ends embed `EngineOptions` and `StoreOptions`, the server's and the builder's settings extend
`LocalSettings`, and command lines are made of them (`commands.options`).  All values are plain;
torch is loaded only when something is opened.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    InstanceOf,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from kvcache_rag.errors import (
    InvalidInputError,
    byte_count,
    check_name,
    expanded,
    first_problem,
    refuse_unknown,
)
from kvcache_rag.models.backends import TRANSFORMERS, check_backend
from kvcache_rag.prompt.known_templates import TEMPLATES
from kvcache_rag.prompt.template import FILE_NAME, PromptTemplate

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pydantic.fields import FieldInfo
    from typing_extensions import Self

    from kvcache_rag.codecs import Codec
    from kvcache_rag.engine import Engine
    from kvcache_rag.policies.base import ReusePolicy, Scorer
    from kvcache_rag.stores import ChunkStore, MemoryStore


# ---------------------------------------------------------------------- types of options
def _path(value: Any) -> str:
    if not isinstance(value, (str, os.PathLike)):
        raise ValueError(f"must be a path, not a {type(value).__name__}")  # pydantic says of what
    return expanded(value)


def _adapter(value: Any) -> str:
    # `Path("block")` is a folder, the text "block" the name of an installed adapter.
    return os.path.abspath(_path(value)) if isinstance(value, os.PathLike) else _path(value)


def said_backend(name: str, *others: str) -> str:
    """Validate a name for `backend`: a back end's, or one of `others`."""
    try:
        return check_backend(name, *others)
    except InvalidInputError as error:
        raise ValueError(str(error)) from error


def _dtype(value: Any) -> Any:
    return str(value).removeprefix("torch.") if type(value).__module__ == "torch" else value


def _template(value: Any) -> Any:
    return template_in(value) if isinstance(value, (str, os.PathLike)) else value


def template_in(place: str | os.PathLike[str]) -> PromptTemplate:
    """The template of a `prompt_template.json`, by its path or folder, or a named one.

    Args:
        place: A path, or a name in `TEMPLATES`; a `Path` is never a name.

    Raises:
        InvalidInputError: If there is none, or it cannot be used.
    """
    if isinstance(place, str) and place in TEMPLATES:
        return TEMPLATES[place]
    path = Path(expanded(place))
    folder = path.parent if path.name == FILE_NAME else path
    template = PromptTemplate.load(folder)
    if template is None:
        raise InvalidInputError(
            f"there is no {FILE_NAME} in {folder}; check template, a folder or one of the names "
            f"{', '.join(TEMPLATES)}"
        )
    return template


def _size(value: Any) -> Any:
    return byte_count(value) if isinstance(value, str) else value


DTYPES: Final = ("auto", "bfloat16", "float16", "float32", "float64")
"""Dtypes in which a command loads a model; Python takes any torch dtype."""

_PATH: Final = BeforeValidator(_path)
_SIZE: Final = BeforeValidator(_size)

PathText = Annotated[str, _PATH]
"""A path or a name, given as text or path; `~` is the home folder."""

FilePath = Annotated[Path, _PATH]
"""A path."""


Bytes = Annotated[int, _SIZE]
"""A number of bytes, as an integer or a text such as 10GB."""

ByteLimit = Annotated[int, Field(gt=0), _SIZE]
"""A number of `Bytes` above 0."""


def is_path(field: FieldInfo) -> bool:
    """Whether an option is a `PathText` or a `FilePath`, or may be one."""
    kinds = get_args(field.annotation)
    return _PATH in field.metadata or any(kind in (PathText, FilePath) for kind in kinds)


def is_size(field: FieldInfo) -> bool:
    """Whether an option is a number of `Bytes`, or may be one."""
    kinds = (getattr(kind, "__metadata__", ()) for kind in get_args(field.annotation))
    return any(_SIZE in metadata for metadata in (field.metadata, *kinds))


OPTIONS: Final = ConfigDict(
    arbitrary_types_allowed=True, protected_namespaces=(), use_attribute_docstrings=True
)


# ---------------------------------------------------------------------- options
class StoreOptions(BaseModel):
    """Where chunks are kept."""

    model_config = OPTIONS

    kv_dir: PathText | None = None
    """Folder of the chunks' keys and values, or a URL (s3://bucket/folder); without it they are
    kept in memory only."""
    kv_max_bytes: ByteLimit | None = None
    """Limit of that folder, such as 10GB: the least recently used chunks go first; who serves a URL
    limits it there."""
    kv_codec: Literal["native", "int8", "int4"] | None = None
    """Form of the chunks there: native (if nothing is said), or in half or a quarter of the bytes
    int8 or int4; on a CPU int8 is also the form in memory."""
    kv_ttl: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Seconds for which a chunk is kept, used or not, there and in memory; without it there is no
    end."""
    signing_key: PathText | None = None
    """File of the key that signs the files of chunks, on every machine that uses them; without it
    the key of KVCACHE_RAG_SIGNING_KEY, if that is set."""


class EngineOptions(BaseModel):
    """Options that every way to open a local engine takes."""

    model_config = OPTIONS

    backend: Annotated[str, AfterValidator(said_backend)] = TRANSFORMERS
    """What runs the model: transformers, or a back end that a package brings, such as llama.cpp,
    which takes GGUF files as they are (4 bits stay 4 bits)."""
    adapter: Annotated[str, BeforeValidator(_adapter)] | None = None
    """PEFT adapter to put into the model: a folder, an installed name such as block, or none; if
    nothing is said none, and for smollm2 block where that is installed."""
    weight_format: Literal["auto", "plain", "prepacked", "int8", "int4"] = "auto"
    """How its linear layers keep their weights on a CPU: auto (faster, the same numbers; a loaded
    model stays as it is), plain, or rounded to int8 or int4."""
    model_kwargs: dict[str, Any] = Field(default_factory=dict, repr=False)
    """Further arguments of the model's `from_pretrained`, such as `dtype` and `revision`."""
    tokenizer_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the tokenizer's `from_pretrained`."""
    context_window: int | None = Field(default=None, gt=0)
    """Longest prompt plus answer in tokens, to keep prompts short; without it the model's own.
    More than the original length of a model with longrope gives it the frequencies of long prompts
    at every length (docs/models.md)."""
    system_prompt: str | None = None
    """Instruction before the chunks, instead of the template's; part of every chunk's keys and
    values."""
    template: Annotated[InstanceOf[PromptTemplate], BeforeValidator(_template)] | None = Field(
        default=None, exclude=True
    )
    """How prompts are written: block-attention (docs/models.md), or the folder of a
    prompt_template.json; without it the one the model brings, else the default."""
    gate: PathText | None = None
    """File that `kvcache-rag verify` wrote: a policy that is not good enough on this model is
    replaced by full prefill, with the reason in the metrics."""
    auxiliary: PathText | None = None
    """Small model that chooses tokens for the policy cacheclip, named as a model is; it works on
    the CPU beside the model, its chunks lie in the same store."""
    prompt_memory: Bytes | None = Field(default=None, ge=0)
    """Memory for keys and values of the last prompts, such as 2GB: a prompt that begins like one of
    them starts behind what they have in common (0: none does); without it that of the last one."""
    none_below: float | None = Field(default=None, allow_inf_nan=False)
    """Nats: where no document makes the question likelier by so much, the answer is that none of
    them says it, and nothing is generated; without it every question is answered
    (docs/policies.md)."""
    rotation: Literal["auto", "copied", "deferred"] | None = None
    """deferred attends to chunks where they lie in memory, without a copy per answer (on a GPU: in
    `MemoryStore(device=...)`), or `Metrics.not_deferred` says why not; copied never does; auto (if
    nothing is said) does with int8 chunks on a CPU that reads them where they lie."""


def said_options(values: Mapping[str, Any]) -> dict[str, Any]:
    """The given options that are neither empty nor the default."""
    fields = EngineOptions.model_fields
    return {
        name: value
        for name, value in values.items()
        if (value or (name == "none_below" and value is not None))
        and not (name in fields and value == fields[name].default)
    }


class DeviceOption(BaseModel):
    """Where the model computes, for callers that take no device map."""

    model_config = OPTIONS

    device: str | None = None
    """cpu, cuda, cuda:1, ...; without it CUDA if there is one."""


# ---------------------------------------------------------------------- settings
class Settings(BaseModel):
    """Values that are checked once and then do not change.

    Raises:
        InvalidInputError: If a name is unknown or a value cannot be used.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )

    def __init__(self, **values: Any) -> None:
        name = type(self).__name__
        refuse_unknown(values, type(self).model_fields, f"setting of {name}")
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise first_problem(error.errors()) from error

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_truth(cls, value: Any, info: ValidationInfo) -> Any:
        # pydantic would read it as 1 or 0.
        if (
            isinstance(value, bool)
            and cls.model_fields[str(info.field_name)].annotation is not bool
        ):
            raise ValueError(f"must not be {value}")
        return value

    @model_validator(mode="after")
    def _check_texts(self) -> Self:
        for name, value in self:
            if isinstance(value, str):
                check_name(name, value)
        return self

    @classmethod
    def from_source(
        cls, source: object, file: str | os.PathLike[str] | None = None, **values: Any
    ) -> Self:
        """Settings from the attributes of `source`, such as parsed arguments.

        Args:
            source: An attribute that is None or missing is not set.
            file: YAML, TOML or JSON for what `source` does not set, or None.
            values: Override both.

        Raises:
            InvalidInputError: If the file cannot be read, or a setting cannot be used.
        """
        own = {name: getattr(source, name, None) for name in cls.model_fields}
        said = {name: one for name, one in own.items() if one is not None}
        return cls(**{**(cls._read(file) if file else {}), **said, **values})

    @classmethod
    def _read(cls, file: str | os.PathLike[str]) -> dict[str, Any]:
        """The settings that a file names."""
        from pydantic_settings import (
            BaseSettings,
            JsonConfigSettingsSource,
            TomlConfigSettingsSource,
            YamlConfigSettingsSource,
        )

        kinds: dict[str, Any] = {
            ".json": JsonConfigSettingsSource,
            ".toml": TomlConfigSettingsSource,
            ".yaml": YamlConfigSettingsSource,
            ".yml": YamlConfigSettingsSource,
        }
        path = Path(expanded(file))
        if path.suffix not in kinds or not path.is_file():
            raise InvalidInputError(
                f"there is no settings file {path}; name a .yaml, .toml or .json"
            )
        try:
            values = dict(kinds[path.suffix](BaseSettings, path).init_kwargs)
        except Exception as error:  # whatever the reader of a form raises
            reason = " ".join(str(error).split())
            raise InvalidInputError(
                f"{path} cannot be read as names and values of settings: {reason}"
            ) from error
        refuse_unknown(values, cls.model_fields, f"setting of {path}")
        return values


class StoreSettings(StoreOptions, Settings):
    """Settings of a store."""

    @property
    def is_remote(self) -> bool:
        """Whether chunks are kept at a URL."""
        return self.kv_dir is not None and is_url(self.kv_dir)

    def open_store(self, memory: MemoryStore | None = None, **options: Any) -> ChunkStore:
        """Open the store.

        Args:
            memory: Memory tier in front of it, or None.
            options: Further arguments of `DiskStore`, or of `RemoteStore` for a URL.

        Raises:
            InvalidInputError: If it cannot be a store, or a URL has a `kv_ttl`.
            MissingExtraError: If the driver of the URL is not installed.
        """
        from kvcache_rag.stores import DiskStore, MemoryStore, RemoteStore, TieredStore

        if self.kv_dir is None:
            return MemoryStore(ttl=self.kv_ttl) if memory is None else memory
        options = {"codec": self.kv_codec or "native", "signing_key": self.signing_key, **options}
        store: ChunkStore
        if self.is_remote:
            if self.kv_ttl is not None:
                raise InvalidInputError(
                    f"chunks at {self.kv_dir} end where they are served; leave kv_ttl out"
                )
            store = RemoteStore(self.kv_dir, **options)
        else:
            store = DiskStore(self.kv_dir, max_bytes=self.kv_max_bytes, ttl=self.kv_ttl, **options)
        return store if memory is None else TieredStore(memory, store)


class EngineSettings(EngineOptions, DeviceOption, Settings):
    """Settings of an engine, without its store."""

    model: PathText = ""
    """Model id of the Hugging Face hub, folder, GGUF file, tiny (the small reader that comes with
    kvcache-rag) or smollm2."""
    tokenizer: PathText | None = None
    """Name or folder of a tokenizer; without it the model's own."""
    dtype: Annotated[str, BeforeValidator(_dtype)] = "auto"
    """Such as bfloat16; auto for the checkpoint's own."""
    revision: str | None = None
    """Commit, branch or tag of a model on the hub; without it its default."""

    def check(self) -> None:
        """Refuse, before torch is loaded, what would be refused later.

        Raises:
            InvalidInputError: If a model, file or adapter is missing, or a device or dtype does not
                exist.
        """
        from kvcache_rag.models.adapters import NO_ADAPTER, adapter_folder
        from kvcache_rag.models.model_names import check_there
        from kvcache_rag.verdict import Verdict

        options = {**self.model_kwargs, **({"revision": self.revision} if self.revision else {})}
        check_there(self.model, options=options)
        if self.tokenizer is not None:
            check_there(self.tokenizer, "tokenizer", self.tokenizer_kwargs)
        if self.auxiliary is not None:
            check_there(self.auxiliary)
        if self.adapter is not None and self.adapter != NO_ADAPTER:
            adapter_folder(self.adapter)
        if self.gate is not None:
            Verdict.load(self.gate)
        if self.device is not None:
            check_device(self.device)
        if self.dtype not in DTYPES:
            names = ", ".join(DTYPES)
            raise InvalidInputError(f"there is no dtype {self.dtype!r} to load in; say {names}")

    def prompt_template(self, brought: PromptTemplate | None) -> PromptTemplate:
        """How prompts are written for a model that comes with the template `brought`."""
        template = self.template or brought or PromptTemplate()
        if self.system_prompt is None:
            return template
        # It stands before the chunks, so it is part of what they are computed behind.
        return replace(template, system=self.system_prompt)

    def open_engine(
        self,
        store: ChunkStore | None = None,
        combinations: ChunkStore | None = None,
        *,
        namespace: str = "",
        model: Any = None,
        tokenizer: Any = None,
        auxiliary: Scorer | None = None,
        policy: ReusePolicy | None = None,
    ) -> Engine:
        """Load the model and make its engine.

        Args:
            store: See `Engine`.
            combinations: See `Engine`.
            namespace: See `Engine`.
            model: A loaded transformers or PEFT model to use instead of the named one.
            tokenizer: A loaded tokenizer, likewise.
            auxiliary: A scorer, likewise.
            policy: The policy that calls will use.  One that computes heads of chunks again becomes
                the engine's, which then cuts chunks for it if there are recurrent layers.

        Raises:
            InvalidInputError: If model or tokenizer cannot be loaded, or a loaded model comes
                without its tokenizer.
            FingerprintMismatchError: If the gate is about another model, instruction or template.
        """
        from kvcache_rag.auxiliary import Auxiliary
        from kvcache_rag.engine import Engine

        if auxiliary is None and self.auxiliary is not None:
            auxiliary = Auxiliary.from_pretrained(self.auxiliary, store=store, namespace=namespace)
        model, tokenizer, brought = self._load(model, tokenizer)
        return Engine(
            model,
            tokenizer,
            store=store,
            combinations=combinations,
            template=self.prompt_template(brought),
            policy=policy if policy is not None and policy.head else None,
            namespace=namespace,
            context_window=self.context_window,
            auxiliary=auxiliary,
            gate=self.gate,
            rotation=self.rotation or "auto",
            prompt_memory=self.prompt_memory,
            none_below=self.none_below,
        )

    def _load(self, model: Any, tokenizer: Any) -> tuple[Any, Any, PromptTemplate | None]:
        from kvcache_rag.models.model_names import chosen_adapter
        from kvcache_rag.models.pretrained import fitted, load

        tokenizer = self._load_tokenizer(tokenizer, is_loaded=model is not None)
        if model is not None:
            if tokenizer is None:
                raise InvalidInputError("a loaded model needs its tokenizer= too")
            fit, template = fitted(model, self.adapter, self.weight_format, self.backend)
            return fit, tokenizer, template
        revision = {"revision": self.revision} if self.revision else {}
        return load(
            self.model,
            dtype=self.dtype,
            device=self.device,
            options={**self.model_kwargs, **revision},
            tokenizer=tokenizer,
            adapter=chosen_adapter(self.model, self.adapter),
            weight_format=self.weight_format,
            backend=self.backend,
        )

    def _load_tokenizer(self, given: Any, *, is_loaded: bool) -> Any:
        """The tokenizer that was given or named; None for the model's own."""
        from kvcache_rag.models.pretrained import load_tokenizer

        if given is not None:
            return given
        name = self.tokenizer
        if name is None and self.tokenizer_kwargs and not is_loaded:
            name = self.model
        return None if name is None else load_tokenizer(name, dict(self.tokenizer_kwargs))


class LocalSettings(EngineSettings, StoreSettings):
    """Settings of a local engine and its store."""

    def open(self, **loaded: Any) -> Engine:
        """Load the model over its store, with a memory tier in front.

        Args:
            loaded: See `open_engine`: `model`, `tokenizer`, `auxiliary`, `policy`.

        Raises:
            InvalidInputError: As for `open_engine` and `open_store`.
            FingerprintMismatchError: If the gate is about another model, instruction or template.
            MissingExtraError: If a driver of the store is not installed.
        """
        from kvcache_rag.stores import MemoryStore

        memory = MemoryStore(ttl=self.kv_ttl, codec=self.memory_codec())
        return self.open_engine(self.open_store(memory), **loaded)

    def memory_codec(self) -> Codec | None:
        """The codec of chunks in memory: on a CPU the store's, else None.

        Chunks of back ends other than transformers are always on the CPU.  The codec must be one
        that attention reads directly; otherwise None keeps chunks as the model made them.
        """
        import torch

        from kvcache_rag.codecs import by_name

        found = by_name(self.kv_codec or "native")
        place = self.device or ("cuda" if torch.cuda.is_available() else "cpu")
        if self.backend != TRANSFORMERS:
            place = "cpu"
        return found if found.is_attended and place == "cpu" else None


# What torch may know as one: further libraries bring some.
_DEVICE: Final = re.compile(r"(cpu|cuda|mps|(?!cpu|cuda|mps|gpu)[a-z_]+)(:[0-9]+)?")


def check_device(name: str) -> None:
    """Refuse, before torch is loaded, what does not look like a device.

    Raises:
        InvalidInputError: If it does not.
    """
    if not _DEVICE.fullmatch(name):
        raise InvalidInputError(f"{name!r} is no device; say cpu, cuda or cuda:1")


def is_url(place: str) -> bool:
    """Whether a store is named by a URL; otherwise it is a folder."""
    return "://" in place
