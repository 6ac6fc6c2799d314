"""What a server's settings become: the engine whose keys are those of a build."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from serve_fakes import scripted

from kvcache_rag import PromptTemplate
from kvcache_rag.errors import InvalidInputError
from kvcache_rag.prompt.template import FILE_NAME
from kvcache_rag_server import startup
from kvcache_rag_server.corpus.worker import BuildSettings
from kvcache_rag_server.settings import ServerSettings

if TYPE_CHECKING:
    from pathlib import Path

TEMPLATE = PromptTemplate(system="Read.\n", chunk_start="[", chunk_end="]")


@pytest.mark.parametrize("system_prompt", [None, "Be brief. "])
def test_a_named_template_gives_the_keys_of_a_build_with_it(
    tmp_path: Path, system_prompt: str | None
) -> None:
    values = {name: getattr(TEMPLATE, name) for name in ("system", "chunk_start", "chunk_end")}
    (tmp_path / FILE_NAME).write_text(json.dumps(values))
    options: dict[str, Any] = {"device": "cpu", "system_prompt": system_prompt}
    served = startup.open_engine(ServerSettings(model="tiny", template=str(tmp_path), **options))
    assert served.template.chunk_start == "["
    build = BuildSettings(model="tiny", kv_dir=str(tmp_path / "kv"), template=TEMPLATE, **options)
    assert served.keys(["a text"]) == build.open_engine().keys(["a text"])


def test_the_revision_reaches_the_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def load(name: str, *, options: dict[str, Any], **rest: Any) -> Any:
        asked.append(options)
        raise InvalidInputError("enough")

    monkeypatch.setattr("kvcache_rag.models.pretrained.load", load)
    for revision in ("abc", None):
        with pytest.raises(InvalidInputError, match="enough"):
            startup.open_engine(ServerSettings(model="tiny", revision=revision))
    assert asked == [{"revision": "abc"}, {}]


def test_a_connection_is_kept_longer_than_clients_keep_it() -> None:
    """Else it is closed in the moment in which a client (httpx: after 5 s) uses it again."""
    app, _ = scripted()
    assert min(startup._PATIENCE, startup.server_of(app).config.timeout_keep_alive) > 10
