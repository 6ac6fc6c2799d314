"""Laws of the scheduler's side, over requests that look like vLLM's."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvcache_rag import MemoryStore
from kvcache_rag.kv.chunk import ChunkKey, ChunkKV, ChunkLayout, GroupLayout
from vllm_kvcache_rag.keys import pieces_of, specs
from vllm_kvcache_rag.scheduling import UNPROVEN, RequestScheduler
from vllm_kvcache_rag.transfer.grants import GrantKey
from vllm_kvcache_rag.transfer.params import TransferParams

KEY = GrantKey(b"0123456789abcdef0123456789abcdef")
SPECS = specs({"engine": "test"}, "native", 2)
LAYOUT = ChunkLayout((GroupLayout((0,), (1, 2), (1, 2)),), torch.float32)
IDS = list(range(20))
PARAMS = TransferParams(3, (4, 5))


@dataclass(eq=False)
class FakeRequest:
    """The fields of vLLM's that are used."""

    request_id: str
    prompt_token_ids: list[int] | None
    kv_transfer_params: dict[str, Any] | None = None
    cache_salt: str | None = None
    block_hashes: list[str] = field(default_factory=list)
    num_computed_tokens: int = 0
    lora_request: Any = None
    has_encoder_inputs: bool = False
    prompt_embeds: Any = None
    resumable: bool = False
    skip_reading_prefix_cache: bool = False
    prefill_stats: Any = field(
        default_factory=lambda: SimpleNamespace(num_computed_tokens=0, num_cached_tokens=0)
    )

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids or ())

    def update_block_hashes(self) -> None:
        self.block_hashes.append(f"block under {self.cache_salt}")


MANAGER = SimpleNamespace(get_block_ids=lambda name: ([5, 6, 7],))  # of the paged cache


class SlowStore(MemoryStore):
    """Answers when it is told to, or fails."""

    def __init__(self) -> None:
        super().__init__()
        self.answers = threading.Event()
        self.error: Exception | None = None

    def contains(self, key: ChunkKey) -> bool:
        assert self.answers.wait(10)
        if self.error is not None:
            raise self.error
        return super().contains(key)


def request(
    name: str = "r",
    *,
    params: TransferParams = PARAMS,
    ids: list[int] = IDS,
    namespace: str = "tenant",
    **changes: Any,
) -> FakeRequest:
    granted = KEY.issue(namespace, params.digest(ids))
    body = TransferParams(params.prefix, params.chunks, params.positions, params.mode, granted)
    return FakeRequest(name, list(ids), body.body(), **changes)


def scheduler(store: MemoryStore | None = None, timeout: float = 30) -> RequestScheduler:
    made = RequestScheduler(store or MemoryStore(), SPECS, KEY, timeout)
    made.law = ""
    return made


def fill(store: MemoryStore, params: TransferParams = PARAMS, namespace: str = "tenant") -> None:
    """Store what a request needs, of both ranks."""
    for piece in pieces_of(params, IDS, namespace, SPECS):
        for key in piece.keys:
            tokens = torch.tensor(piece.ids, dtype=torch.int32)
            store.put(key, ChunkKV(LAYOUT, tokens, key.start, LAYOUT.empty(len(tokens))))


@pytest.fixture
def filled() -> MemoryStore:
    store = MemoryStore()
    fill(store)
    return store


def test_what_is_held_is_loaded_behind_what_is_there(filled: MemoryStore) -> None:
    side, one = scheduler(filled), request()
    side.take(one)
    assert side.matched(one, 0) == (12, True)
    assert side.matched(one, 8) == (4, True)
    assert side.matched(one, 16) == (0, False)
    side.matched(one, 8)
    side.place(one, [5, 6, 7], 4)
    (job,) = side.step({}, MANAGER).loads
    assert (job.request, job.blocks, job.first) == ("r", (5, 6, 7), 8)
    assert [piece.stop for piece in job.pieces] == [3, 7, 12]
    assert not side.step({}, MANAGER).loads, "once"
    assert side.end(one) == {"kvcache_rag": {"reused": 12}}


def test_one_rank_that_lacks_a_piece_is_a_miss(filled: MemoryStore) -> None:
    filled.delete(pieces_of(PARAMS, IDS, "tenant", SPECS)[2].keys[1])
    side, one = scheduler(filled), request()
    side.take(one)
    assert side.matched(one, 0) == (0, False)
    assert side.end(one) == {"kvcache_rag": {"reused": 0, "why": "not all of it is stored"}}


def test_stitched_plain_and_tenants_never_share_a_salt(filled: MemoryStore) -> None:
    side = scheduler(filled)
    fill(filled, namespace="other")
    requests = [
        request("stitched"),
        request("tenant", namespace="other"),
        request("missing", namespace="third"),
        request("missing, too", namespace="third"),
        request("missing elsewhere", namespace="fourth"),
        FakeRequest("plain", list(IDS)),
        FakeRequest("salted", list(IDS), cache_salt="s"),
    ]
    for one in requests:
        side.take(one)
    salts = [one.cache_salt for one in requests]
    assert salts[2] == salts[3], "computed whole, both, for one tenant"
    assert len({*salts}) == len(salts) - 1
    for one in requests:
        assert one.block_hashes == [f"block under {one.cache_salt}"]
    # A client that sends a salt of ours gets another one.
    copied = FakeRequest("copied", list(IDS), cache_salt=salts[0])
    side.take(copied)
    assert copied.cache_salt not in salts


@pytest.mark.parametrize(
    "change",
    [
        "lora_request",
        "has_encoder_inputs",
        "prompt_embeds",
        "resumable",
        "skip_reading_prefix_cache",
    ],
)
def test_requests_of_other_kinds_are_computed_whole(filled: MemoryStore, change: str) -> None:
    side, one = scheduler(filled), request(**{change: True})
    plain = FakeRequest("plain", list(IDS))
    side.take(one)
    side.take(plain)
    assert side.matched(one, 0) == (0, False)
    assert one.cache_salt == plain.cache_salt
    assert side.end(one) is None


@pytest.mark.parametrize("mode", ["reuse", "store", "law"])
def test_without_a_grant_nothing_is_reused_or_stored(filled: MemoryStore, mode: Any) -> None:
    side = scheduler(filled)
    params = TransferParams(3, (4,), mode=mode)
    other = params.digest(IDS[::-1])
    for grant in ("", "x", KEY.issue("tenant", other), GrantKey(b"z" * 32).issue("tenant", other)):
        body = TransferParams(3, (4,), mode=mode, grant=grant).body()
        one = FakeRequest("r", list(IDS), body)
        side.take(one)
        assert side.matched(one, 0) == (0, False)
        step = side.step({"r": 20}, MANAGER)
        assert not [*step.loads, *step.saves, *step.laws]
        assert side.end(one) is None


def test_until_the_law_holds_nothing_is_reused_or_stored(filled: MemoryStore) -> None:
    side = scheduler(filled)
    side.law = UNPROVEN
    for mode in ("reuse", "store"):
        one = request(params=TransferParams(3, (4,), mode=mode))  # type: ignore[arg-type]
        side.take(one)
        assert side.matched(one, 0) == (0, False)
        assert not side.step({"r": 20}, MANAGER).saves
        assert side.end(one) == {"kvcache_rag": {"reused": 0, "why": UNPROVEN}}
    law = request(params=TransferParams(0, (20,), mode="law"))
    side.take(law)
    (job,) = side.step({"r": 20}, MANAGER).laws
    assert job.request == "r"
    reply = side.end(law)["kvcache_rag"]
    engine = reply.pop("engine")  # what its chunks depend on, for verdicts
    assert (reply, len(engine)) == ({"reused": 0, "law": None}, 64)
    side.take(law)
    side.law = "keys of layer 3 are 1.2 off"
    said = {"reused": 0, "law": "keys of layer 3 are 1.2 off", "engine": engine}
    assert side.end(law) == {"kvcache_rag": said}


def test_a_chunk_is_stored_once_all_of_it_is_computed() -> None:
    side = scheduler()
    one = request(params=TransferParams(3, (9,), mode="store"))
    side.take(one)
    missing = request("missing")
    side.take(missing)
    assert one.cache_salt == missing.cache_salt, "it is a prefill like any of the tenant"
    assert side.matched(one, 0) == (0, False)
    for computed, tokens, jobs in ((0, 8, 0), (8, 3, 0), (11, 1, 1), (12, 8, 0)):
        one.num_computed_tokens = computed
        assert len(side.step({"r": tokens}, MANAGER).saves) == jobs


def test_a_chunk_that_is_stored_already_is_not_computed_again() -> None:
    store = MemoryStore()
    fill(store, TransferParams(3, (17,)))
    side, one = scheduler(store), request(params=TransferParams(3, (17,), mode="store"))
    side.take(one)
    assert side.matched(one, 0) == (20, True)
    assert not side.step({"r": 1}, MANAGER).saves


def test_what_failed_to_load_is_computed_as_a_plain_request_is(filled: MemoryStore) -> None:
    side, one = scheduler(filled), request(cache_salt="own")
    plain = request("plain", params=TransferParams(3, (9,), mode="store"), cache_salt="own")
    side.take(one)
    side.take(plain)
    assert one.cache_salt != plain.cache_salt
    side.matched(one, 0)
    side.fail({"r", "unknown"})
    assert one.cache_salt == plain.cache_salt
    assert one.block_hashes == plain.block_hashes
    assert side.matched(one, 0) == (0, False)
    reply = side.end(one)
    assert reply == {"kvcache_rag": {"reused": 0, "why": "what is stored could not be loaded"}}


def test_a_slow_store_holds_nobody_up() -> None:
    store = SlowStore()
    store.answers.set()
    fill(store)
    store.answers.clear()
    side, one = scheduler(store), request()
    side.take(one)
    lone = one.cache_salt
    assert side.matched(one, 0) == (None, False)
    assert one.cache_salt == lone, "nobody finds its blocks, and it finds none"
    store.answers.set()
    for _ in range(1000):
        if one.cache_salt != lone:
            break
        # The salt changes with the answer; vLLM then looks again before it asks again.
        assert side.matched(one, 0) == (None, False)
        threading.Event().wait(0.01)
    assert side.matched(one, 0) == (12, True)


def test_a_store_that_fails_is_a_miss() -> None:
    store = SlowStore()
    store.error = OSError("the share is gone")
    store.answers.set()
    side, one = scheduler(store), request()
    side.take(one)
    while side.matched(one, 0)[0] is None:
        threading.Event().wait(0.01)
    assert side.matched(one, 0) == (0, False)
    said = {"reused": 0, "why": "the store failed: the share is gone"}
    assert side.end(one) == {"kvcache_rag": said}


def test_an_ended_request_is_forgotten(filled: MemoryStore) -> None:
    side, one = scheduler(filled), request()
    side.take(one)
    side.matched(one, 0)
    side.place(one, [1], 12)
    side.end(one)
    assert not side.step({"r": 20}, MANAGER).loads
    assert side.matched(one, 0) == (0, False)
    assert side.end(one) is None


def test_a_store_that_does_not_answer_is_a_miss() -> None:
    store = SlowStore()
    side, one = scheduler(store, timeout=0.2), request(cache_salt="own")
    began = time.monotonic()
    side.take(one)
    while side.matched(one, 0)[0] is None:
        threading.Event().wait(0.01)
    assert 0.2 < time.monotonic() - began < 5
    assert side.matched(one, 0) == (0, False)
    # It is found by those who ask for the same where it is missing.
    store.answers.set()
    missing = request("missing", cache_salt="own")
    side.take(missing)
    assert settled(side, missing) == (0, False)
    assert one.cache_salt == missing.cache_salt
    said = {"reused": 0, "why": "the store has not answered in 0.2 s"}
    assert side.end(one) == {"kvcache_rag": said}


def settled(side: RequestScheduler, one: FakeRequest) -> tuple[int | None, bool]:
    """What is reused, once the store has answered."""
    while (found := side.matched(one, 0))[0] is None:
        threading.Event().wait(0.01)
    return found


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.levelno == logging.INFO]


def scheduled(one: FakeRequest, local: int, external: int) -> None:
    """vLLM's count, as it takes a request from the queue."""
    one.prefill_stats.num_cached_tokens = local + external
    one.prefill_stats.num_computed_tokens = one.num_prompt_tokens - local - external


def test_a_request_that_ended_is_one_line_of_the_log(
    filled: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "vllm.kvcache_rag")
    side = scheduler(filled)
    found, again, plain, refused = (
        request("found"),
        request("again"),
        FakeRequest("plain", list(IDS)),
        request("refused", lora_request=object()),
    )
    for one in (found, again, plain, refused):
        side.take(one)
    assert settled(side, found) == (12, True)
    scheduled(found, 0, 12)
    assert settled(side, again)[0] is not None
    assert side.matched(again, 8) == (4, True)
    scheduled(again, 8, 4)
    scheduled(plain, 16, 0)
    scheduled(refused, 0, 0)
    for one in (found, again, plain, refused):
        side.end(one)
    assert told(caplog) == [
        "kvcache-rag: found: 20 prompt tokens, 12 from chunks, 0 from vLLM's prefix cache, "
        "8 computed; 0 of 3 pieces missed",
        "kvcache-rag: again: 20 prompt tokens, 12 from chunks, 0 from vLLM's prefix cache, "
        "8 computed; 0 of 3 pieces missed",
        "kvcache-rag: plain: 20 prompt tokens, 0 from chunks, 16 from vLLM's prefix cache, "
        "4 computed; 0 of 0 pieces missed",
        "kvcache-rag: refused: 20 prompt tokens, 0 from chunks, 0 from vLLM's prefix cache, "
        "20 computed; 0 of 0 pieces missed",
    ]
    side.end(found)
    assert len(told(caplog)) == 4, "once"


def test_the_log_counts_what_missed_and_says_why(
    filled: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "vllm.kvcache_rag")
    first, _, third = pieces_of(PARAMS, IDS, "tenant", SPECS)
    filled.delete(first.keys[0])
    filled.delete(third.keys[0])
    filled.delete(third.keys[1])
    side = scheduler(filled)
    missing, failed, gone = request("missing"), request("failed"), request("gone", namespace="x")
    side.take(missing)
    assert settled(side, missing) == (0, False)
    scheduled(missing, 0, 0)
    fill(filled)
    side.take(failed)
    assert settled(side, failed) == (12, True)
    side.fail({"failed"})
    scheduled(failed, 16, 0)
    side.take(gone)  # and it is aborted before vLLM schedules it
    assert settled(side, gone) == (0, False)
    for one in (missing, failed, gone):
        side.end(one)
    assert [line.partition(": ")[2] for line in told(caplog)] == [
        "missing: 20 prompt tokens, 0 from chunks, 0 from vLLM's prefix cache, 20 computed; "
        "2 of 3 pieces missed (not all of it is stored)",
        "failed: 20 prompt tokens, 0 from chunks, 16 from vLLM's prefix cache, 4 computed; "
        "0 of 3 pieces missed (what is stored could not be loaded)",
        "gone: 20 prompt tokens, 0 from chunks, 0 from vLLM's prefix cache, 0 computed; "
        "3 of 3 pieces missed (not all of it is stored)",
    ]


def test_no_text_token_or_tenant_is_in_the_log(
    filled: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "vllm.kvcache_rag")
    side, store = scheduler(filled), SlowStore()
    store.answers.set()
    store.error = OSError("the share is gone")
    for made in (side, scheduler(store)):
        one = request("r", namespace="tenant-of-a-name", cache_salt="a-salt")
        made.take(one)
        settled(made, one)
        made.end(one)
    grant = one.kv_transfer_params["kvcache_rag"]["grant"]
    assert len(told(caplog)) == 2
    for secret in ("tenant-of-a-name", "a-salt", grant, one.cache_salt, "0, 1, 2"):
        assert str(secret) not in caplog.text


def test_a_miss_is_known_before_all_was_looked_for() -> None:
    """A cold store that is slow holds a request up for its first piece alone."""

    class Counting(MemoryStore):
        looks = 0

        def contains(self, key: ChunkKey) -> bool:
            self.looks += 1
            if self.looks > 1:
                assert answers.wait(10)
            return super().contains(key)

    answers, store = threading.Event(), Counting()
    side, one = scheduler(store), request()
    side.take(one)
    assert settled(side, one) == (0, False)
    assert store.looks <= 2
    answers.set()
    assert side.end(one) == {"kvcache_rag": {"reused": 0, "why": "not all of it is stored"}}
