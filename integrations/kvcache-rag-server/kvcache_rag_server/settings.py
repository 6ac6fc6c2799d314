"""A server's settings, fixed when it starts; no request changes them."""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING, Annotated, Final

from pydantic import AfterValidator, Field, model_validator

from kvcache_rag.errors import InvalidInputError
from kvcache_rag.models.backends import TRANSFORMERS
from kvcache_rag.policies import policy_by_name
from kvcache_rag.settings import (
    ByteLimit,
    Bytes,
    FilePath,
    LocalSettings,
    PathText,
    Settings,
    check_device,
    said_backend,
)

if TYPE_CHECKING:
    from typing_extensions import Self

VLLM: Final = "vllm"

# Of `LocalSettings`, what is read before servers of vLLM, too.
_OF_VLLM: Final = {
    *("backend", "model", "revision", "template", "system_prompt", "context_window", "gate"),
}


def _backend(name: str) -> str:
    return said_backend(name, VLLM)


class RequestLimits(Settings):
    """Limits for one request and one namespace; beyond them the answer is a clear 4xx."""

    max_documents: int = Field(default=64, ge=1)
    """Documents of one request."""
    max_document_bytes: Bytes = Field(default=1 << 20, ge=1)
    """Bytes of one document's text, as UTF-8."""
    max_body_bytes: Bytes = Field(default=8 << 20, ge=1)
    """Bytes of the body of one request."""
    max_body_seconds: int = Field(default=15, ge=1)
    """Seconds within which the whole body has to be there."""
    max_total_body_bytes: Bytes = Field(default=64 << 20, ge=1)
    """Bytes of the bodies of all requests that are read, answered or wait; a fourth of it is kept
    for small ones."""
    max_prompt_tokens: int | None = Field(default=None, ge=1)
    """Tokens of one prompt; without it what the model's context window holds."""
    max_answer_tokens: int = Field(default=4096, ge=1)
    """Largest `max_tokens` of one request."""
    max_concurrency: int = Field(default=64, ge=1)
    """Requests of one namespace that are answered or wait at a time, whichever of its keys they
    come by."""
    max_total_concurrency: int = Field(default=512, ge=1)
    """Requests of all namespaces that are answered or wait at a time; several times that of one, so
    that none fills the server."""

    @model_validator(mode="after")
    def _check_bodies(self) -> Self:
        total = self.max_total_body_bytes
        if self.max_body_bytes > total - total // 4:
            raise InvalidInputError(
                f"a body of max_body_bytes of {self.max_body_bytes} would never be read: of "
                f"max_total_body_bytes of {total} a fourth is for small ones; raise that"
            )
        return self


class ServerSettings(LocalSettings, RequestLimits):
    """Settings of `kvcache-rag serve`, from its command line and its file.

    Raises:
        InvalidInputError: If two settings contradict each other.
    """

    served_name: str = ""
    """Name of the model in requests; without it that of the model itself."""
    policy: str = ""
    """What is reused for requests that name no policy, such as cacheblend:0.2; without it reuse on
    a model that was trained for cached chunks, bestfew for others, bestlast:0.5 for wide ones."""
    memory_bytes: ByteLimit = 1 << 30
    """Limit of the memory before the folder, such as 4GB."""
    backend: Annotated[str, AfterValidator(_backend)] = TRANSFORMERS
    """What runs the model: in this process transformers, or a back end that a package brings, such
    as llama.cpp, which takes GGUF files as they are (4 bits stay 4 bits); or vllm, at its
    servers."""
    base_url: tuple[str, ...] = ()
    """Of a server of vLLM with the connector of vllm-kvcache-rag; repeatable, all of one model and
    store."""
    backend_key: PathText | None = None
    """File of the key that those servers have, too; without it that of the environment."""
    host: str = "127.0.0.1"
    """Address to listen on; loopback unless the server knows who calls."""
    port: int = Field(default=8000, ge=0, le=65535)
    """Port to listen on, 0 for any free one."""
    api_keys: FilePath | None = None
    """File of keys with a namespace each; without it there are no keys."""
    allow_anonymous: bool = False
    """Listen beyond loopback without keys."""
    allowed_hosts: tuple[str, ...] = ()
    """Further name under which the server may be asked ("*" for any); repeatable."""
    allowed_origins: tuple[str, ...] = ()
    """Web pages of another server that may ask it, such as https://app.example.org; repeatable."""
    answer_tokens: int = Field(default=128, ge=1)
    """Longest answer to a chat that does not say how long it may be, in tokens."""
    documents_as_text: bool = False
    """Leave documents that apps write into messages where they stand, instead of answering as if
    they had come in the field documents."""
    prefetch: str = "off"
    """Where chunks of waiting requests are computed: off, same (the model that answers, between
    answers), or a device with a copy of the model (cpu, cuda:1)."""
    prefetch_after: float = Field(default=0.05, ge=0)
    """Seconds that a request waits before its chunks are prefetched."""
    max_batch: int = Field(default=8, gt=0)
    """Requests that may be answered in one padded batch."""
    max_waiting: int = Field(default=256, gt=0)
    """Requests that may wait; one more is answered 503."""
    heartbeat: float = Field(default=10.0, gt=0)
    """Seconds of silence after which a stream sends a comment."""
    grace: float = Field(default=10.0, ge=0)
    """Seconds in which answers may end once the server is told to."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        self._check_backend()
        if self.policy:
            policy_by_name(self.policy)
        if self.prefetch not in ("off", "same"):
            check_device(self.prefetch)
        if not (is_loopback(self.host) or self.api_keys or self.allow_anonymous):
            raise InvalidInputError(
                f"{self.host} can be reached from other machines and there are no API keys; give "
                "--api-keys FILE, listen on 127.0.0.1, or say --allow-anonymous"
            )
        return self

    def _check_backend(self) -> None:
        """Refuse options of a backend that does not compute, or of a store that is not there."""
        if self.signing_key and not self.kv_dir:
            raise InvalidInputError("--signing-key is the key of a store; name that by --kv-dir")
        if self.backend != VLLM:
            if self.base_url or self.backend_key:
                raise InvalidInputError(
                    "--base-url and --backend-key are for servers: say --backend vllm"
                )
            return
        if not self.base_url:
            raise InvalidInputError("--backend vllm needs its servers: --base-url http://host:8000")
        own = (self.model_fields_set & LocalSettings.model_fields.keys()) - _OF_VLLM
        if self.prefetch != "off":
            own.add("prefetch")
        if own:
            raise InvalidInputError(
                f"--{min(own).replace('_', '-')} is for a model in this process; leave it out, and "
                "tell it to the servers of vLLM"
            )

    def check(self) -> None:
        from kvcache_rag_server.keys import ApiKeys

        super().check()
        if self.api_keys is not None and not self.api_keys.is_file():
            ApiKeys.load(self.api_keys)  # which says so

    @property
    def name(self) -> str:
        """Name of the model in requests and answers."""
        return self.served_name or self.model


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
