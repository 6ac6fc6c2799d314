"""Laws of the digest of weights' files, and of what the connector is told."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from kvcache_rag.errors import InvalidInputError, UnsupportedModelError
from vllm_kvcache_rag import checkpoint
from vllm_kvcache_rag.checkpoint import checkpoint_digest
from vllm_kvcache_rag.settings import check_engine

if TYPE_CHECKING:
    from pathlib import Path


def folder(path: Path, *, weights: bytes = b"w" * 1000, config: bytes = b"{}") -> Path:
    path.mkdir(exist_ok=True)
    (path / "model.safetensors").write_bytes(weights)
    (path / "config.json").write_bytes(config)
    (path / "README.md").write_text(path.name)
    return path


def test_the_digest_is_of_config_and_weights(tmp_path: Path) -> None:
    first = checkpoint_digest(str(folder(tmp_path / "a")))
    assert checkpoint_digest(str(folder(tmp_path / "b"))) == first, "nothing else counts"
    others = [
        folder(tmp_path / "c", weights=b"w" * 999 + b"x"),
        folder(tmp_path / "d", weights=b"w" * 1001),
        folder(tmp_path / "e", config=b"{ }"),
    ]
    digests = {checkpoint_digest(str(other)) for other in others}
    assert len(digests | {first}) == 4
    file = tmp_path / "a" / "model.safetensors"
    assert checkpoint_digest(str(file)) == checkpoint_digest(str(file))


def test_long_files_are_sampled_to_their_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "_BYTES", 8)
    long = bytearray(range(256)) * 40
    made = folder(tmp_path / "a", weights=bytes(long))
    first = checkpoint_digest(str(made))
    for place in (0, len(long) - 1):
        changed = long.copy()
        changed[place] ^= 1
        folder(made, weights=bytes(changed))
        assert checkpoint_digest(str(made)) != first


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InvalidInputError, match="there are no weights in"):
        checkpoint_digest(str(tmp_path))


def engine(**changes: Any) -> tuple[Any, Any]:
    plain = {"mla": False, "pp": 1, "dcp": 1, "cache": "auto", "groups": 1}
    given = {**plain, **changes}
    config = SimpleNamespace(
        model_config=SimpleNamespace(use_mla=given["mla"], model="m"),
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=given["pp"], decode_context_parallel_size=given["dcp"]
        ),
        cache_config=SimpleNamespace(cache_dtype=given["cache"]),
    )
    return config, SimpleNamespace(kv_cache_groups=[object()] * given["groups"])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mla": True}, "latent attention"),
        ({"pp": 2}, "pipeline parallelism"),
        ({"dcp": 2}, "context parallelism"),
        ({"cache": "fp8"}, "a cache of fp8"),
        ({"groups": 2}, "2 groups of layers with caches of their own"),
    ],
)
def test_engines_that_cannot_be_stitched_are_refused_by_name(
    changes: dict[str, Any], words: str
) -> None:
    check_engine(*engine())
    with pytest.raises(UnsupportedModelError, match=f"for m: it has {words}"):
        check_engine(*engine(**changes))
