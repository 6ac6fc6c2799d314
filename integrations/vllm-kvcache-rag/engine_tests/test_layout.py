"""Pages that are not as they are thought to be: tried at the start, taken or refused there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from transformers import AutoModelForCausalLM, MistralConfig
from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl

from conftest import SMALL, SmallEngine, apart, random_case, reused, saved
from kvcache_rag.errors import UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TOLERANCE = 1e-3


@pytest.fixture(autouse=True)
def no_connector_behind() -> Iterator[None]:
    """An engine that did not start leaves its connector in the process."""
    yield
    ensure_kv_transfer_shutdown()


def test_pages_of_several_blocks_of_the_kernel_are_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As FlashInfer's with pages of 128 tokens: the kernel sees two pages for one."""
    sizes = staticmethod(lambda kv_cache_spec=None: [32])
    monkeypatch.setattr(CPUAttentionBackend, "get_supported_kernel_block_sizes", sizes)
    made = SmallEngine(saved("llama", tmp_path / "model"), tmp_path / "kv", block_size=64)
    assert made.law() == ""
    case = random_case(110)
    made.keep(case)
    for asked in (case, case.in_order(2, 0, 1)):
        answer = made.ask(asked)
        assert apart(answer, made.stitched(asked)) < TOLERANCE
        assert reused(answer) == case.params.context
    made.stop()


def test_a_backend_that_keeps_something_else_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    update = CPUAttentionBackendImpl.do_kv_cache_update

    def swapped(self: Any, layer: Any, key: Any, value: Any, *given: Any) -> None:
        update(self, layer, key, key, *given)

    monkeypatch.setattr(CPUAttentionBackendImpl, "do_kv_cache_update", swapped)
    words = (
        r"pages of CPUAttentionBackendImpl \(its pages: torch.float32 \(\d+, 2, 32, 64\), strides "
        r".*\): it does not keep K and V as they are written; serve without the connector"
    )
    with pytest.raises(UnsupportedModelError, match=words):
        SmallEngine(saved("llama", tmp_path / "model"), tmp_path / "kv")


def test_windows_in_all_layers_are_refused_at_the_start(tmp_path: Path) -> None:
    """vLLM gives pages back while a chunk is computed: a prefix was read from pages of others."""
    config = MistralConfig(**SMALL, sliding_window=256, head_dim=32)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    with pytest.raises(UnsupportedModelError, match=r"not keep all tokens .SlidingWindowSpec"):
        SmallEngine(tmp_path / "model", tmp_path / "kv")
