"""What vLLM calls (its V1 KV connector), passed on to scheduler and workers."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvcache_rag.errors import UnsupportedModelError
from vllm_kvcache_rag.pages import PageWorker
from vllm_kvcache_rag.rotation import frequencies
from vllm_kvcache_rag.scheduling import RequestScheduler, Step
from vllm_kvcache_rag.settings import (
    ConnectorSettings,
    check_engine,
    engine_specs,
    missing_vllm,
)

try:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorBase_V1,
        KVConnectorMetadata,
        KVConnectorRole,
        KVConnectorTransferResults,
        KVConnectorWorkerMetadata,
    )
    from vllm.v1.request import Request
except ModuleNotFoundError as error:
    if error.name != "vllm":
        raise
    raise missing_vllm() from None

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("vllm.kvcache_rag")


@dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]  # vLLM is not there for mypy
    """What the scheduler sends the workers in each step."""

    step: Step = field(default_factory=Step)


@dataclass
class LawMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """What a worker has measured: why nothing may be reused; "" if its law holds."""

    law: str

    def aggregate(self, other: KVConnectorWorkerMetadata) -> LawMetadata:
        """Combine all ranks: what one refuses is refused."""
        return self if self.law else other


class KVCacheRAGConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """Fills vLLM's paged cache with stitched chunks.

    The scheduler and each worker have their own object.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """Check the engine, and open the store.

        Raises:
            UnsupportedModelError: If its pages cannot be stitched, or vLLM is another than this
                was made for.
            InvalidInputError: If the settings cannot be used.
        """
        super().__init__(vllm_config, role, kv_cache_config)
        check_engine(vllm_config, kv_cache_config)
        _check_vllm()
        settings = ConnectorSettings(**self._kv_transfer_config.kv_connector_extra_config)
        store, model = settings.open(), vllm_config.model_config
        self._requests: RequestScheduler | None = None
        self._pages: PageWorker | None = None
        self._law: LawMetadata | None = None
        if role == KVConnectorRole.SCHEDULER:
            specs = engine_specs(vllm_config)
            for spec in specs:
                store.describe(spec, "", {"engine": "vllm", "model": str(model.model)})
            self._requests = RequestScheduler(
                store, specs, settings.grant_key(), settings.load_timeout
            )
        else:
            from vllm.distributed import get_tensor_model_parallel_rank

            width = model.get_head_size()
            inv_freq = frequencies(model.hf_text_config, width)
            rank = get_tensor_model_parallel_rank()
            self._pages = PageWorker(store, rank, str(model.model), inv_freq, settings.load_timeout)

    # ---------------------------------------------------------------------------------- scheduler
    def on_new_request(self, request: Request) -> None:
        """Salt a request, and look for its pieces."""
        self._scheduler.take(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """How many tokens of the context will be loaded."""
        return self._scheduler.matched(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: Any, num_external_tokens: int
    ) -> None:
        """Note the pages for what is loaded."""
        self._scheduler.place(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        """What workers do in this step."""
        scheduled = scheduler_output.num_scheduled_tokens
        return StepMetadata(self._scheduler.step(scheduled, self._kv_cache_manager))

    def update_connector_output(self, connector_output: Any) -> None:
        """Take what workers have done."""
        self._scheduler.fail(connector_output.failed_recving or ())
        found = connector_output.kv_connector_worker_meta
        if isinstance(found, LawMetadata):
            self._scheduler.law = found.law
            if found.law:
                logger.error("kvcache-rag: nothing is reused: %s", found.law)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Say in the reply what was reused."""
        del block_ids
        return False, self._scheduler.end(request)

    # ------------------------------------------------------------------------------------- worker
    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take the layers whose pages were allocated, and try them.

        Raises:
            UnsupportedModelError: If they are not found as they are written.
        """
        layers = self._vllm_config.compilation_config.static_forward_context
        block = self._kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        pages = self._kv_cache_config.num_blocks
        self._worker.attach([layers[name] for name in kv_caches], block, pages)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin to load during the forward passes."""
        del forward_context, kwargs
        for job in self._step.loads:
            self._worker.start(job)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: a request is scheduled once all of it is loaded."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Do nothing: chunks are read once all of their layers are there."""

    def wait_for_save(self) -> None:
        """Copy from the pages what this step has completed."""
        for job in self._step.saves:
            self._worker.save(job)
        for job in self._step.laws:
            self._law = LawMetadata(self._worker.prove(job))

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Requests whose loads have ended; a failure is never reported without its request."""
        del finished_req_ids
        loaded = self._worker.loaded()
        return KVConnectorTransferResults(
            finished_recving=set(loaded.done), failed_recving=set(loaded.failed)
        )

    def build_connector_worker_meta(self) -> LawMetadata | None:
        """What was measured in this step."""
        found, self._law = self._law, None
        return found

    def shutdown(self) -> None:
        """Stop the threads and their writing."""
        for side in (self._requests, self._pages):
            if side is not None:
                side.close()

    # ------------------------------------------------------------------------------------ the sides
    @property
    def _scheduler(self) -> RequestScheduler:
        if self._requests is None:
            raise TypeError("this connector is a worker's")
        return self._requests

    @property
    def _worker(self) -> PageWorker:
        if self._pages is None:
            raise TypeError("this connector is the scheduler's")
        return self._pages

    @property
    def _step(self) -> Step:
        step: Step = self._get_connector_metadata().step
        return step


def _check_vllm() -> None:
    """Refuse a vLLM whose requests are not as this was made for: its fields are private."""
    needed = {"update_block_hashes", "has_encoder_inputs", "num_tokens", "prefill_stats"}
    names = {*Request.__init__.__code__.co_names, *dir(Request)}
    missing = sorted((needed | {"block_hashes", "cache_salt", "skip_reading_prefix_cache"}) - names)
    if missing:
        raise UnsupportedModelError(
            f"this vLLM's requests have no {missing[0]}: vllm-kvcache-rag was made for 0.32"
        )
