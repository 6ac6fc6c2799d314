"""Laws of what is handed to an engine: boundaries fit the prompt, grants are for one request."""

from __future__ import annotations

import copy
import json
import pickle
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvcache_rag.errors import InvalidInputError
from vllm_kvcache_rag.transfer.grants import ENVIRONMENT, SECONDS, GrantKey
from vllm_kvcache_rag.transfer.params import FIELD, MOST_CHUNKS, TransferParams

if TYPE_CHECKING:
    from pathlib import Path

SECRET = b"0123456789abcdef0123456789abcdef"
PARAMS = TransferParams(3, (2, 4))
IDS = list(range(12))


@settings(suppress_health_check=[HealthCheck.too_slow])  # on a machine that is busy
@given(
    st.integers(0, 50),
    st.lists(st.integers(1, 40), min_size=1, max_size=6),
    st.sampled_from(["reordered", "composite"]),
)
def test_what_is_sent_is_what_is_read(prefix: int, chunks: list[int], positions: Any) -> None:
    params = TransferParams(prefix, tuple(chunks), positions, grant="g")
    body = json.loads(json.dumps(params.body()))
    assert TransferParams.from_params(body, params.context + 1) == params
    with pytest.raises(InvalidInputError, match="a question follows"):
        TransferParams.from_params(body, params.context)
    assert TransferParams.from_params({}, 5) is None
    assert TransferParams.from_params(None, 5) is None
    assert TransferParams.from_params({"do_remote_prefill": True}, 5) is None


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([], "is an object"),
        ({"prefix": 3, "chunks": [2], "salt": 1}, "no field 'salt'"),
        *[({"prefix": no, "chunks": [2]}, "prefix is a whole number") for no in (-1, True, 1.5)],
        ({"prefix": 3}, "chunks lists"),
        *[
            ({"prefix": 3, "chunks": no}, "chunks lists")
            for no in ([], [0], ["2"], [1] * (MOST_CHUNKS + 1))
        ],
        ({"prefix": 3, "chunks": [2], "positions": "kept"}, "positions is one of reordered, comp"),
        ({"prefix": 3, "chunks": [2], "mode": ["reuse"]}, "mode is one of reuse, store, law"),
        ({"prefix": 3, "chunks": [2, 2], "mode": "store"}, 'mode "store" takes one chunk, not 2'),
        ({"prefix": 3, "chunks": [97]}, "prefix and chunks have 100 tokens, the prompt 100"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(given: Any, words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        TransferParams.from_params({FIELD: given}, 100)


def test_the_digest_is_of_all_that_is_asked() -> None:
    requests = [
        (PARAMS, IDS),
        (TransferParams(2, (3, 4)), IDS),
        (TransferParams(3, (4, 2)), IDS),
        (TransferParams(3, (2, 4), "composite"), IDS),
        (TransferParams(3, (2, 4), mode="store"), IDS),
        (PARAMS, IDS[::-1]),
        (PARAMS, [*IDS, 0]),
    ]
    assert len({params.digest(ids) for params, ids in requests}) == len(requests)
    assert TransferParams(3, (2, 4), grant="g").digest(IDS) == PARAMS.digest(IDS)


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_a_grant_says_the_tenant_of_its_request_alone(namespace: str) -> None:
    key, request = GrantKey(SECRET), PARAMS.digest(IDS)
    grant = key.issue(namespace, request)
    assert grant.isascii()
    assert key.namespace(grant, request) == namespace
    for other, of in ((key, PARAMS.digest(IDS[1:])), (GrantKey(SECRET[::-1]), request)):
        with pytest.raises(InvalidInputError, match="not of this engine's key, or not for it"):
            other.namespace(grant, of)


@given(st.integers(0, 200), st.integers(1, 127))
def test_no_letter_of_a_grant_can_be_changed(place: int, change: int) -> None:
    key, request = GrantKey(SECRET), PARAMS.digest(IDS)
    grant = key.issue("tenant", request)
    at = place % len(grant)
    other = grant[:at] + chr((ord(grant[at]) + change) % 128) + grant[at + 1 :]
    with pytest.raises(InvalidInputError, match="grant"):
        key.namespace(other, request)


@pytest.mark.parametrize("grant", ["", ".", "a", "a.b", "é.é", "." * 5000, "AAAA.AAAA", "%%%.%%%"])
def test_what_is_no_grant_is_none(grant: str) -> None:
    with pytest.raises(InvalidInputError, match="grant"):
        GrantKey(SECRET).namespace(grant, PARAMS.digest(IDS))


def test_a_grant_expires() -> None:
    now = [1000.0]
    key, request = GrantKey(SECRET, clock=lambda: now[0]), PARAMS.digest(IDS)
    grant = key.issue("tenant", request)
    now[0] += SECONDS - 1
    assert key.namespace(grant, request) == "tenant"
    now[0] += 2
    with pytest.raises(InvalidInputError, match="has expired"):
        key.namespace(grant, request)


def test_a_tenants_salt_is_its_own() -> None:
    key = GrantKey(SECRET)
    salts = {key.salt(""), key.salt("a"), key.salt("b"), GrantKey(SECRET[::-1]).salt("a")}
    assert len(salts) == 4
    assert key.salt("a") in salts


def test_where_the_key_is_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    with pytest.raises(InvalidInputError, match=f"name its file, or set {ENVIRONMENT}"):
        GrantKey.from_file()
    file = tmp_path / "key"
    file.write_bytes(SECRET + b"\n")
    file.chmod(0o600)
    request = PARAMS.digest(IDS)
    grant = GrantKey.from_file(file).issue("tenant", request)
    monkeypatch.setenv(ENVIRONMENT, SECRET.decode())
    assert GrantKey.from_file().namespace(grant, request) == "tenant"
    file.chmod(0o644)
    with pytest.raises(
        InvalidInputError, match="others may read or write the file of the engine's"
    ):
        GrantKey.from_file(file)
    with pytest.raises(InvalidInputError, match="at least 32 bytes, not 5"):
        GrantKey(b"short")


def test_the_key_is_in_nothing_that_is_shown_or_sent() -> None:
    key = GrantKey(SECRET)
    assert SECRET.decode() not in repr(key) + str(key)
    for copier in (pickle.dumps, copy.copy):
        with pytest.raises(InvalidInputError, match="is not pickled"):
            copier(key)
