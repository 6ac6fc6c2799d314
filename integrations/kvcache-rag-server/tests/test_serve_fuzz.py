"""Whatever the schema allows, and much that it does not: no 5xx, no traceback, as declared."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import hypothesis
import pytest
import schemathesis
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS, load_all_checks
from schemathesis.core.errors import InvalidSchema
from serve_fakes import settings, tiny_backend

from kvcache_rag_server.app import build_app
from kvcache_rag_server.auth import new_key
from kvcache_rag_server.settings import RequestLimits

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

OPERATIONS = {
    "POST /v1/chat/completions",
    "POST /v1/completions",
    "POST /v1/responses",
    "POST /v1/prefill",
    "POST /v1/explain",
    "GET /v1/models",
    "GET /v1/models/{model}",
    "GET /v1/identity",
    "GET /health",
    "GET /ready",
    "GET /metrics",
}
EXAMPLES = 25
SMALL = RequestLimits(
    max_documents=4, max_document_bytes=2000, max_answer_tokens=4, max_prompt_tokens=400
)
HOST = "testserver"  # what Schemathesis calls every application


@pytest.fixture(scope="module")
def app() -> Iterator[Any]:
    with tiny_backend() as backend:
        yield build_app(backend, settings(limits=SMALL, allowed_hosts=(HOST,)))


def checks() -> list[Any]:
    load_all_checks()
    names = (
        "not_a_server_error",
        "status_code_conformance",
        "content_type_conformance",
        "response_headers_conformance",
        "response_schema_conformance",
        "negative_data_rejection",
    )
    return [*CHECKS.get_by_names(list(names)), no_traceback]


def no_traceback(ctx: Any, response: Any, case: Any) -> None:
    """Nothing of the server's inside is in an answer."""
    for inside in ("Traceback", 'File "', "kvcache_rag/", "site-packages", ".py"):
        assert inside not in response.text, response.text
    if response.status_code >= 400:
        assert set(response.json()) == {"error"}, response.text


@hypothesis.strategies.composite
def drawn(draw: Any, cases: Any) -> Any:
    """A case; schemathesis itself cannot draw from some of the schemas that it makes of ours."""
    try:
        return draw(cases)
    except InvalidSchema:
        hypothesis.reject()


def ask_all(app: Any, label: str, mode: GenerationMode, count: int, **sent: str) -> set[int]:
    """Ask one operation so often; gives the statuses of the answers."""
    schema = schemathesis.openapi.from_asgi("/openapi.json", app)
    method, path = label.split(" ")
    operation = schema[path][method]
    statuses = set()

    @hypothesis.seed(7)
    @hypothesis.settings(
        max_examples=count,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(case=drawn(operation.as_strategy(generation_mode=mode)))
    def ask(case: Any) -> None:
        reply = case.call_and_validate(checks=checks(), headers=sent or None)
        statuses.add(reply.status_code)

    ask()
    return statuses


def test_every_route_is_in_the_schema(app: Any) -> None:
    paths = app.openapi()["paths"]
    found = {f"{method.upper()} {path}" for path in paths for method in paths[path]}
    assert found == OPERATIONS


@pytest.mark.parametrize("label", sorted(OPERATIONS))
def test_what_the_schema_allows_is_answered_or_refused_as_declared(app: Any, label: str) -> None:
    statuses = ask_all(app, label, GenerationMode.POSITIVE, EXAMPLES)
    assert statuses


@pytest.mark.parametrize("label", sorted(one for one in OPERATIONS if one.startswith("POST")))
def test_what_the_schema_forbids_is_refused(app: Any, label: str) -> None:
    statuses = ask_all(app, label, GenerationMode.NEGATIVE, EXAMPLES)
    assert statuses
    assert statuses <= {400, 401, 403, 404, 405, 413, 415}


def test_with_keys_strangers_get_401_and_callers_no_more_than_before(
    tmp_path: Path, app: Any
) -> None:
    key = new_key(tmp_path / "keys", "acme")
    with tiny_backend() as backend:
        given = settings(limits=SMALL, allowed_hosts=(HOST,), api_keys=tmp_path / "keys")
        guarded = build_app(backend, given)
        for label in sorted(OPERATIONS - {"GET /health", "GET /ready"}):
            assert ask_all(guarded, label, GenerationMode.POSITIVE, 3) == {401}
        sent = {"authorization": f"Bearer {key}"}
        found = ask_all(guarded, "POST /v1/prefill", GenerationMode.POSITIVE, 5, **sent)
        assert found <= {200, 400, 404, 413}
        assert ask_all(guarded, "GET /metrics", GenerationMode.POSITIVE, 1, **sent) == {403}
