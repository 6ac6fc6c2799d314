"""What a server is told when it starts; nothing of it comes from a request."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from kvcache_rag.errors import InvalidInputError, check_name, check_settings
from kvcache_rag.integration.engine import template_in
from kvcache_rag.policies import policy_by_name

if TYPE_CHECKING:
    from pathlib import Path

    from kvcache_rag.models.linears import WeightFormat
    from kvcache_rag.prompt.template import PromptTemplate

DEFAULT_HOST: Final = "127.0.0.1"

DEFAULT_PORT: Final = 8000

TRANSFORMERS: Final = "transformers"

VLLM: Final = "vllm"

# Of a model in this process; servers of vLLM are told by their own command lines.
_OF_TRANSFORMERS: Final = (
    *("store", "store_bytes", "signing_key", "adapter", "device"),
    "auxiliary",
)


@dataclass(frozen=True)
class RequestLimits:
    """How much one request, and one namespace, may ask for; beyond it the answer is a clear 4xx.

    Attributes:
        documents: Of one request.
        document_bytes: Of one document's text, as UTF-8.
        body_bytes: Of the body of one request.
        body_seconds: Within which the whole body has to be there.
        total_body_bytes: Of the bodies of all requests that are read, answered or wait; a fourth of
            it is kept for small ones.
        prompt_tokens: Of one prompt; None for what the model's context window holds.
        answer_tokens: Largest `max_tokens` of one request.
        concurrency: Requests of one namespace that are answered or wait at a time, whichever of
            its keys they come by.
        total_concurrency: Requests of all namespaces that are answered or wait at a time; several
            times `concurrency`, so that no namespace fills the server.
    """

    documents: int = 64
    document_bytes: int = 1 << 20
    body_bytes: int = 8 << 20
    body_seconds: int = 15
    total_body_bytes: int = 64 << 20
    prompt_tokens: int | None = None
    answer_tokens: int = 4096
    concurrency: int = 64
    total_concurrency: int = 512

    def __post_init__(self) -> None:
        check_settings(RequestLimits, vars(self))
        for name, value in vars(self).items():
            if value is not None and value < 1:
                raise InvalidInputError(f"the limit {name} must be at least 1, not {value}")
        if self.body_bytes > self.total_body_bytes - self.total_body_bytes // 4:
            raise InvalidInputError(
                f"a body of the limit body_bytes of {self.body_bytes} would never be read: of the "
                f"limit total_body_bytes of {self.total_body_bytes} a fourth is for small ones; "
                "raise that"
            )


@dataclass(frozen=True)
class ServerSettings:
    """What `kvcache-rag serve` was told.

    Attributes:
        model: Hub id, folder, GGUF file, "tiny" for the packaged reader, or "smollm2".
        store: Folder or URL of the chunks' keys and values; None to keep them in memory only.
        host: Address to listen on; loopback unless the server knows who calls.
        port: 0 for any free one.
        api_keys: File of keys with a namespace each; None to serve without keys.
        allow_anonymous: Whether to listen beyond loopback without keys.
        allowed_hosts: Further names under which the server may be asked ("*" for any).
        allowed_origins: Web pages of other servers that may ask it, such as
            "https://app.example.org".
        served_name: Name of the model in requests; "" for `model` itself.
        policy: Of requests that name none, as `policy_by_name` reads it; "" for what the model was
            trained for (see `Engine`).
        template: Folder with a `prompt_template.json`, instead of the model's own; None for that.
        system_prompt: Instruction before the chunks; None for the template's.
        revision: Commit, branch or tag of a model on the hub; None for its default.
        device: "cpu", "cuda", "cuda:1", ...; None for CUDA if there is one.
        dtype: "auto" for the checkpoint's own.
        codec: Form of the chunks in `store`: "native", "int8", "int4".
        signing_key: File of the store's key, on every machine that answers; None for that of the
            environment, or none.
        gate: File that `kvcache-rag verify` wrote; None to trust every policy.
        auxiliary: Small model that chooses tokens for the policy "cacheclip", by hub id or folder;
            None for none.
        store_bytes: Limit of the folder `store`; None for no limit.
        memory_bytes: Limit of the memory in front of it.
        context_window: Lower it to keep prompts short; None for the model's own.
        prefetch: Where chunks of waiting requests are computed: "off", "same" (the model that
            answers, between answers), or a device with a copy of the model ("cpu", "cuda:1").
        prefetch_after: Seconds that a request waits before its chunks are prefetched.
        max_batch: Requests that may be answered in one padded batch.
        max_waiting: Requests that may wait; one more is answered 503.
        heartbeat: Seconds of silence after which a stream sends a comment.
        grace: Seconds in which answers may end once the server is told to.
        limits: Of one request and one namespace.
        adapter: As for `EngineSettings`.
        weight_format: How its linear layers keep their weights on a CPU: "auto" (faster, the same
            numbers), "plain", "int8" or "int4".
        engine: What computes: "transformers" in this process, or "vllm" at `urls`.
        urls: Servers of vLLM with the connector of `vllm-kvcache-rag`, all of one model and store.
        engine_key: File of the key that they have, too; None for that of the environment.

    Raises:
        InvalidInputError: If two of them contradict each other.
    """

    model: str
    store: str | None = None
    host: str = DEFAULT_HOST
    port: int = DEFAULT_PORT
    api_keys: Path | None = None
    allow_anonymous: bool = False
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    served_name: str = ""
    policy: str = ""
    template: str | None = None
    system_prompt: str | None = None
    revision: str | None = None
    device: str | None = None
    dtype: str = "auto"
    codec: str = "native"
    gate: str | None = None
    auxiliary: str | None = None
    store_bytes: int | None = None
    memory_bytes: int = 1 << 30
    context_window: int | None = None
    prefetch: str = "off"
    prefetch_after: float = 0.05
    max_batch: int = 8
    max_waiting: int = 256
    heartbeat: float = 10.0
    grace: float = 10.0
    limits: RequestLimits = field(default_factory=RequestLimits)
    adapter: str | None = None
    signing_key: str | None = None
    weight_format: WeightFormat = "auto"
    engine: str = TRANSFORMERS
    urls: tuple[str, ...] = ()
    engine_key: str | None = None

    def __post_init__(self) -> None:
        check_settings(ServerSettings, vars(self))
        for name in ("model", "served_name"):
            check_name(name, getattr(self, name))
        for name in ("max_batch", "max_waiting", "memory_bytes", "heartbeat"):
            if getattr(self, name) <= 0:
                raise InvalidInputError(f"{name} must be positive, not {getattr(self, name)}")
        if not 0 <= self.port <= 65535:
            raise InvalidInputError(f"there is no port {self.port}; use one from 0 to 65535")
        self._check_engine()
        if self.prefetch_after < 0:
            raise InvalidInputError(f"prefetch_after must be ≥ 0, not {self.prefetch_after}")
        if not 0 <= self.grace < float("inf"):
            raise InvalidInputError(f"grace must be a number of seconds ≥ 0, not {self.grace}")
        if self.policy:
            policy_by_name(self.policy)
        if not (is_loopback(self.host) or self.api_keys or self.allow_anonymous):
            raise InvalidInputError(
                f"{self.host} can be reached from other machines and there are no API keys; give "
                "--api-keys FILE, listen on 127.0.0.1, or say --allow-anonymous"
            )

    def _check_engine(self) -> None:
        """Refuse options of an engine that does not compute, or of a store that is not there."""
        if self.signing_key and not self.store:
            raise InvalidInputError("--signing-key is the key of a store; name that by --store")
        if self.engine not in (TRANSFORMERS, VLLM):
            raise InvalidInputError(
                f"there is no engine {self.engine!r}; use {TRANSFORMERS} or {VLLM}"
            )
        if self.engine == TRANSFORMERS:
            if self.urls or self.engine_key:
                raise InvalidInputError("--url and --engine-key are for servers: say --engine vllm")
            return
        if not self.urls:
            raise InvalidInputError("--engine vllm needs its servers: --url http://host:8000")
        for name in _OF_TRANSFORMERS:
            if getattr(self, name) is not None:
                raise InvalidInputError(
                    f"--{name.replace('_', '-')} is for a model in this process; leave it out, and "
                    "tell it to the servers of vLLM"
                )
        if self.prefetch != "off":
            raise InvalidInputError("--prefetch is for a model in this process; leave it out")

    @property
    def name(self) -> str:
        """Name of the model in requests and answers."""
        return self.served_name or self.model

    def prompt_template(self) -> PromptTemplate | None:
        """The template that was named; None for the one that the model brings.

        Raises:
            InvalidInputError: If there is none in its folder, or it cannot be used.
        """
        return template_in(self.template) if self.template else None


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
