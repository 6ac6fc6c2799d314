"""Files of the llama.cpp backend's tests; where it is not installed, nothing of it is tested."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, TypeAlias

import pytest
from llamacpp import ggufs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from llamacpp.own import Own

    Files: TypeAlias = "Callable[[str], Path]"
    Decoder: TypeAlias = "Callable[..., Own]"


class _NotInstalled(pytest.Module):
    """A module whose tests need llama-cpp-python."""

    def collect(self) -> list[pytest.Item]:
        pytest.skip("pip install 'kvcache-rag[llama-cpp]'", allow_module_level=True)


def pytest_pycollect_makemodule(
    module_path: Path, parent: pytest.Collector
) -> pytest.Module | None:
    if find_spec("llama_cpp") is not None:
        return None
    return _NotInstalled.from_parent(parent, path=module_path)


@pytest.fixture(scope="session", autouse=True)
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What is kept of dequantised files goes, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """A random file by the name of its family, or with a seed of its own by `name@seed`."""
    folder = tmp_path_factory.mktemp("files")

    def file(name: str) -> Path:
        path = folder / f"{name.replace(' ', '-')}.gguf"
        if not path.exists():
            family, _, seed = name.partition("@")
            ggufs.write(path, family, seed=int(seed or 0))
        return path

    return file


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2 as its package has it, Q4_1."""
    return ggufs.smollm2()


@pytest.fixture(scope="session")
def float_smollm2(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The same weights in float32, half a gigabyte."""
    path = ggufs.dequantised(smollm2, tmp_path_factory.mktemp("smollm2") / "float.gguf")
    yield path
    path.unlink()


@pytest.fixture(scope="module")
def own() -> Iterator[Decoder]:
    """Opens llama.cpp by itself, once for each way to open it."""
    from llamacpp.own import Own

    opened: dict[object, Own] = {}

    def open_own(path: Path, **how: object) -> Own:
        if path.stem == "phi3":  # its frequencies are by the cells
            how = {"cells": ggufs.ORIGINAL, **how}
        known = (path, *sorted(how.items()))
        if known not in opened:
            opened[known] = Own(path, **how)  # type: ignore[arg-type]
        return opened[known]

    yield open_own
    for one in opened.values():
        one.close()
