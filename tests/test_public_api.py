"""The public names are one guarded list, and importing the package is free."""

from __future__ import annotations

import subprocess
import sys
import warnings
from importlib import import_module
from typing import TYPE_CHECKING

import pytest
from public import HOMES, TOP, public

import kvcache_rag
import kvcache_rag_documents

if TYPE_CHECKING:
    from collections.abc import Iterator

NAMES = sorted([*TOP, *HOMES])
# Names of choices, which carry neither name nor docstring in Python.
CHOICES = {"WeightFormat"}
EARLY = {"ast", "chromadb", "kvcache_rag.errors", "llama_index", "numpy", "safetensors", "torch"}


def test_names_are_pinned_and_few() -> None:
    assert kvcache_rag.__all__ == sorted(TOP)
    assert len(TOP) <= 22


@pytest.mark.parametrize("name", HOMES)
def test_a_name_that_moved_says_where_it_is(name: str) -> None:
    said = f"^{name} has moved: write `from {HOMES[name]} import {name}`$"
    with pytest.raises(ImportError, match=said):
        exec(f"from kvcache_rag import {name}")
    with pytest.raises(ImportError, match=said):
        getattr(kvcache_rag, name)


@pytest.fixture
def unasked() -> Iterator[None]:
    """Names that other packages have now, as if nobody had asked for one yet, or ever did."""
    given = vars(import_module("kvcache_rag.integration"))

    def forget() -> None:
        for name in kvcache_rag_documents.__all__:
            given.pop(name, None)

    forget()
    yield
    forget()


@pytest.mark.parametrize(
    ("home", "name"),
    [("kvcache_rag_documents", name) for name in kvcache_rag_documents.__all__],
)
@pytest.mark.usefixtures("unasked")
def test_a_name_that_another_package_has_now_is_still_given(home: str, name: str) -> None:
    package = import_module("kvcache_rag.integration")
    with pytest.warns(DeprecationWarning, match=f"write `from {home} import {name}`$"):
        assert getattr(package, name) is getattr(import_module(home), name)


@pytest.mark.usefixtures("unasked")
def test_an_import_of_a_name_that_another_package_has_now_warns_once() -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        exec(compile("from kvcache_rag.integration import read_folder", "app.py", "exec"), {})
    assert [(one.category, one.filename) for one in told] == [(DeprecationWarning, "app.py")]


@pytest.mark.usefixtures("unasked")
def test_a_name_of_a_package_that_is_not_there_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "kvcache_rag_documents", None)
    with pytest.raises(ImportError, match="read_folder is in kvcache-rag-documents now: install"):
        import_module("kvcache_rag.integration").read_folder  # noqa: B018  # looking fails


@pytest.mark.parametrize("name", NAMES)
def test_every_name_is_listed_where_it_is_and_documented(name: str) -> None:
    value, module = public(name), import_module(HOMES.get(name, "kvcache_rag"))
    assert name in module.__all__
    assert name in dir(module)
    if name not in CHOICES:
        assert value.__name__ == name
        assert value.__doc__
    if name.endswith("Error"):
        assert issubclass(value, kvcache_rag.KVCacheRagError)


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        kvcache_rag.no_such_name  # noqa: B018  # looking is what fails


@pytest.mark.parametrize(
    "package",
    [
        *("kvcache_rag", "kvcache_rag_lab.finetune", "kvcache_rag.integration"),
        *("kvcache_rag.generation", "kvcache_rag.kv", "kvcache_rag.models", "kvcache_rag.prompt"),
    ],
)
def test_a_package_reads_its_names_from_its_own_imports(package: str) -> None:
    module = import_module(package)
    given: dict[str, object] = {}
    exec(f"from {package} import *", given)
    assert given.keys() - {"__builtins__"} == set(module.__all__)
    assert module.__all__ == sorted(module.__all__)
    assert set(module.__all__) <= set(dir(module))
    for name in module.__all__:
        assert given[name] is getattr(module, name)


def test_import_loads_nothing_and_names_are_looked_up_when_one_is_used_first() -> None:
    code = (
        f"import sys, kvcache_rag; early = {EARLY} & sys.modules.keys();"
        "kvcache_rag.InvalidInputError; print(early, 'kvcache_rag.errors' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set() True"
