"""What is too much is refused with a sentence, before it costs anything."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

from kvcache_rag.errors import InvalidInputError
from kvcache_rag_server.backend import BackendRequest
from kvcache_rag_server.errors import ApiError, headers
from kvcache_rag_server.keys import Caller
from kvcache_rag_server.limits import Places, RequestLimiter
from kvcache_rag_server.settings import RequestLimits, ServerSettings

if TYPE_CHECKING:
    from collections.abc import Mapping

ACME, GLOBEX = Caller("acme", "acme-web"), Caller("globex", "globex-web")


class Counting:
    """A backend that counts letters as tokens."""

    def __init__(self) -> None:
        self.counted = 0

    async def count(self, work: BackendRequest) -> int:
        self.counted += 1
        if not work.question:
            raise InvalidInputError("the question is empty; ask something")
        return len(work.question) + sum(map(len, work.chunks))

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"the limiter asked for {name}")


def limiter(**figures: Any) -> RequestLimiter:
    limits = RequestLimits(**{f"max_{name}": value for name, value in figures.items()})
    return RequestLimiter(limits, Counting())


def work(**values: Any) -> BackendRequest:
    return BackendRequest(**{"id": "w", "question": "q", **values})


async def refused(by: RequestLimiter, one: BackendRequest, caller: Caller = ACME) -> ApiError:
    with pytest.raises(ApiError) as raised:
        async with by.admitted(caller, one):
            raise AssertionError("it was let in")
    return raised.value


@pytest.mark.parametrize(
    ("figures", "values", "status", "said"),
    [
        ({"documents": 2}, {"chunks": ("a", "b", "c")}, 413, ["3 documents", "documents of 2"]),
        (
            {"document_bytes": 8},
            {"chunks": ("a", "abcdefghi")},
            413,
            ["9 bytes", "documents[1]"],
        ),
        (
            {"document_bytes": 8},
            {"chunks": ("ééééé",)},
            413,
            ["10 bytes", "document_bytes of 8"],
        ),
        ({"document_bytes": 8}, {"chunks": ("\ud800" * 3,)}, 413, ["9 bytes"]),
        ({"answer_tokens": 5}, {"max_new_tokens": 6}, 400, ["6 tokens", "answer_tokens of 5"]),
        ({"prompt_tokens": 5}, {"question": "q" * 6}, 400, ["6 tokens", "prompt_tokens of 5"]),
    ],
)
async def test_beyond_a_limit_it_is_named_with_its_value(
    figures: Mapping[str, Any], values: Mapping[str, Any], status: int, said: list[str]
) -> None:
    error = await refused(limiter(**figures), work(**values))
    assert error.failed.status == status
    assert [part for part in said if part not in error.failed.message] == []


@pytest.mark.parametrize(
    ("figures", "values"),
    [
        ({"documents": 2}, {"chunks": ("a", "b")}),
        ({"document_bytes": 8}, {"chunks": ("abcdefgh", "éééé")}),
        ({"answer_tokens": 5}, {"max_new_tokens": 5}),
        ({"prompt_tokens": 5}, {"question": "qqq", "chunks": ("ab",)}),
    ],
)
async def test_up_to_a_limit_it_is_let_in(
    figures: Mapping[str, Any], values: Mapping[str, Any]
) -> None:
    async with limiter(**figures).admitted(ACME, work(**values)):
        was_let_in = True
    assert was_let_in


async def test_tokens_are_not_counted_without_a_limit() -> None:
    backend = Counting()
    async with RequestLimiter(RequestLimits(), backend).admitted(ACME, work()):
        pass
    assert backend.counted == 0


# ---------------------------------------------------------------------- places
def full(places: Places, caller: Caller) -> ApiError:
    with pytest.raises(ApiError) as raised, places.place(caller):
        raise AssertionError("it was let in")
    return raised.value


def test_a_namespace_has_so_many_places_and_others_have_theirs() -> None:
    places = Places(RequestLimits(max_concurrency=2))
    with places.place(ACME):
        with places.place(ACME):
            error = full(places, ACME)
            assert (error.failed.status, error.failed.code) == (429, "rate_limit_exceeded")
            assert "2 requests of this namespace" in error.failed.message
            assert "limit concurrency" in error.failed.message
            assert headers(error.failed)["retry-after"] == "1"
            with places.place(GLOBEX):
                assert places.taken == 3
        with places.place(ACME):  # the place is free again
            pass
    assert places.taken == 0


def test_keys_of_one_namespace_share_its_places() -> None:
    places = Places(RequestLimits(max_concurrency=2))
    with places.place(Caller("acme", "acme-web")), places.place(Caller("acme", "acme-jobs")):
        error = full(places, Caller("acme", "acme-third"))
        assert error.failed.status == 429
        assert "2 requests of this namespace" in error.failed.message


def test_one_namespace_cannot_fill_the_server() -> None:
    limits = RequestLimits()
    assert limits.max_total_concurrency >= 4 * limits.max_concurrency
    assert limits.max_total_concurrency > ServerSettings(model="tiny").max_waiting


def test_a_server_has_so_many_places() -> None:
    places = Places(RequestLimits(max_concurrency=2, max_total_concurrency=3))
    with ExitStack() as held:
        for caller in (ACME, ACME, GLOBEX):
            held.enter_context(places.place(caller))
        error = full(places, GLOBEX)
        assert error.failed.status == 429
        assert "3 requests of this server" in error.failed.message
        assert "total_concurrency" in error.failed.message
    assert places.taken == 0


def test_places_are_given_back_whatever_happens() -> None:
    places = Places(RequestLimits(max_concurrency=1))
    with pytest.raises(ZeroDivisionError), places.place(ACME):
        raise ZeroDivisionError
    assert not places._taken  # no entry per namespace that ever called


async def test_a_prompt_that_cannot_be_written_is_the_users_mistake() -> None:
    by = limiter(prompt_tokens=1)
    with pytest.raises(InvalidInputError):
        async with by.admitted(ACME, work(question="")):
            pass


@pytest.mark.parametrize("name", list(RequestLimits.model_fields))
def test_a_limit_of_nothing_is_refused(name: str) -> None:
    with pytest.raises(InvalidInputError, match=name):
        RequestLimits(**{name: 0})
