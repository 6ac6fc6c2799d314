"""Laws of the digest of weights' files."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvcache_rag.errors import InvalidInputError
from vllm_kvcache_rag import checkpoint
from vllm_kvcache_rag.checkpoint import checkpoint_digest

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
    checkpoint_digest(str(tmp_path / "a" / "model.safetensors"))  # a file alone


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
