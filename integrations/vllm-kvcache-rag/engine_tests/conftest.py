"""A small vLLM engine in this process, and what an answer has to be."""

from __future__ import annotations

import os
import time

# Before vLLM is imported: one process, so that a failure is seen where it is.
os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "KVCACHE_RAG_ENGINE_KEY": "0123456789abcdef0123456789abcdef",
}

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config
from vllm import LLM, SamplingParams

from kvcache_rag.kv.mask import block_mask
from vllm_kvcache_rag.transfer.grants import GrantKey
from vllm_kvcache_rag.transfer.params import TransferParams

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path
    from typing import TypeAlias

    # Ids of a prompt, what is asked of the connector, and the tenant.
    Asked: TypeAlias = tuple[list[int], TransferParams | None, str]

SMALL = {
    "vocab_size": 256, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024,
    "initializer_range": 0.2, "tie_word_embeddings": False,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 256,
}  # fmt: skip
CONFIGS = {"llama": LlamaConfig(**SMALL), "qwen2 yarn": Qwen2Config(**SMALL, rope_parameters=YARN)}
BLOCK = 32
KEY = GrantKey.from_file()


@dataclass(frozen=True)
class Case:
    """A prompt in its parts."""

    prefix: tuple[int, ...]
    chunks: tuple[tuple[int, ...], ...]
    query: tuple[int, ...]
    positions: Any = "reordered"

    @property
    def ids(self) -> list[int]:
        return [*self.prefix, *(i for chunk in self.chunks for i in chunk), *self.query]

    @property
    def params(self) -> TransferParams:
        return TransferParams(len(self.prefix), tuple(map(len, self.chunks)), self.positions)

    def in_order(self, *order: int) -> Case:
        return replace(self, chunks=tuple(self.chunks[place] for place in order))


def random_case(seed: int = 1, sizes: Sequence[int] = (11, 70, 33, 97, 9)) -> Case:
    made = torch.Generator().manual_seed(seed)
    parts = [tuple(torch.randint(5, 256, (n,), generator=made).tolist()) for n in sizes]
    return Case(parts[0], tuple(parts[1:-1]), parts[-1])


class SmallEngine:
    """vLLM, and the same weights in transformers.

    Attributes:
        store: Folder of the connector, which is left out without one.
        extra: Other settings of the connector.
    """

    def __init__(
        self, model: Path, store: Path | None, extra: dict[str, Any] | None = None, **options: Any
    ) -> None:
        self.model, self.store, self.extra, self.options = model, store, extra or {}, options
        self.reference = AutoModelForCausalLM.from_pretrained(model).eval()
        self.start()

    def start(self) -> None:
        options = {"max_model_len": 1024, "block_size": BLOCK, **self.options}
        if self.store is not None:
            options["kv_transfer_config"] = {
                "kv_connector": "KVCacheRAGConnector",
                "kv_connector_module_path": "vllm_kvcache_rag",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {"kv_dir": str(self.store), **self.extra},
            }
        self.llm = LLM(
            str(self.model), skip_tokenizer_init=True, dtype="float32", enforce_eager=True, seed=0,
            distributed_executor_backend="uni", **options,
        )  # fmt: skip

    def stop(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()

    def many(self, asked: Sequence[Asked], **sampling: Any) -> list[Any]:
        """Answers of requests in one batch."""
        given = {"temperature": 0, "max_tokens": 4, "logprobs": 5, "ignore_eos": True, **sampling}
        params = []
        for ids, wanted, tenant in asked:
            extra = None
            if wanted is not None:
                grant = wanted.grant or KEY.issue(tenant, wanted.digest(ids))
                extra = {"kv_transfer_params": replace(wanted, grant=grant).body()}
            params.append(SamplingParams(detokenize=False, extra_args=extra, **given))
        prompts: Any = [{"prompt_token_ids": ids} for ids, _, _ in asked]
        return list(self.llm.generate(prompts, params, use_tqdm=False))

    def ask(self, case: Case, tenant: str = "", **sampling: Any) -> Any:
        return self.many([(case.ids, case.params, tenant)], **sampling)[0]

    def plain(self, case: Case, **sampling: Any) -> Any:
        return self.many([(case.ids, None, "")], **sampling)[0]

    def law(self) -> str:
        wanted = TransferParams(0, (192,), mode="law")
        while True:
            reply = self.many([([7] * 192, wanted, "")], max_tokens=1)[0].kv_transfer_params
            if reply["kvcache_rag"]["law"] is not None:
                return str(reply["kvcache_rag"]["law"])

    def keep(self, case: Case, tenant: str = "") -> None:
        """Store the chunks of a case, each by a request of its own."""
        for chunk in case.chunks:
            wanted = TransferParams(len(case.prefix), (len(chunk),), mode="store")
            for _ in range(100):  # it is written behind the answer; once there, it is reused
                (answer,) = self.many([([*case.prefix, *chunk], wanted, tenant)], max_tokens=1)
                if reused(answer):
                    break
                time.sleep(0.05)
            else:
                raise AssertionError(answer.kv_transfer_params)

    def forget(self) -> None:
        assert self.llm.reset_prefix_cache()

    @torch.no_grad()
    def stitched(self, case: Case) -> torch.Tensor:
        """Log-probabilities of the first token, under the block mask."""
        spec = block_mask(case.prefix, case.chunks, case.query, case.positions)
        lowest = torch.finfo(torch.float32).min
        bias = torch.zeros(spec.allowed.shape).masked_fill(~spec.allowed, lowest)
        output = self.reference(
            input_ids=spec.ids[None], position_ids=spec.positions[None],
            attention_mask=bias[None, None],
        )  # fmt: skip
        return output.logits[0, -1].log_softmax(-1)

    @torch.no_grad()
    def full(self, case: Case) -> torch.Tensor:
        """Log-probabilities of the first token by full prefill."""
        return self.reference(input_ids=torch.tensor([case.ids])).logits[0, -1].log_softmax(-1)


def apart(answer: Any, expected: torch.Tensor) -> float:
    """Largest difference of an answer's first log-probabilities."""
    found = answer.outputs[0].logprobs[0]
    return max(abs(one.logprob - float(expected[token])) for token, one in found.items())


def reused(answer: Any) -> int:
    return int((answer.kv_transfer_params or {}).get("kvcache_rag", {}).get("reused", 0))


def tokens(answer: Any) -> list[int]:
    return list(answer.outputs[0].token_ids)


def saved(name: str, folder: Path, seed: int = 0) -> Path:
    """Random weights of a small model."""
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(CONFIGS[name]).save_pretrained(folder)
    return folder


# vLLM has one connector in a process, so one engine lives at a time.
@pytest.fixture(scope="module", params=CONFIGS)
def engine(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[SmallEngine]:
    folder = tmp_path_factory.mktemp("engine")
    made = SmallEngine(saved(request.param, folder / "model"), folder / "kv")
    assert made.law() == ""
    yield made
    made.stop()
