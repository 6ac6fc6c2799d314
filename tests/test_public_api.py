"""The public names are one guarded list, and importing the package is free."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest
from public import ELSEWHERE, HOMES, TOP, public

import kvcache_rag

NAMES = sorted([*TOP, *HOMES])
# Names of choices, which carry neither name nor docstring in Python.
CHOICES = {"WeightFormat"}
ERRORS = [name for name in NAMES if name.endswith("Error")]
HEAVY = ("torch", "transformers", "safetensors", "numpy", "chromadb", "llama_index")


def test_names_are_pinned_and_few() -> None:
    assert kvcache_rag.__all__ == sorted(TOP)
    assert len(TOP) <= 22


@pytest.mark.parametrize("home", ELSEWHERE)
def test_the_others_are_public_where_they_are(home: str) -> None:
    module = import_module(f"kvcache_rag.{home}")
    assert {*ELSEWHERE[home]} <= {*module.__all__}
    assert {*module.__all__} <= {*dir(module)}


@pytest.mark.parametrize("name", HOMES)
def test_a_name_that_moved_says_where_it_is(name: str) -> None:
    said = f"^{name} has moved: write `from {HOMES[name]} import {name}`$"
    with pytest.raises(ImportError, match=said):
        exec(f"from kvcache_rag import {name}")
    with pytest.raises(ImportError, match=said):
        getattr(kvcache_rag, name)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in CHOICES])
def test_every_name_is_there_and_documented(name: str) -> None:
    value = public(name)
    assert value.__name__ == name
    assert value.__doc__


@pytest.mark.parametrize("name", ERRORS)
def test_errors_have_one_root(name: str) -> None:
    assert issubclass(public(name), kvcache_rag.KVCacheRagError)


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        kvcache_rag.no_such_name  # noqa: B018  # looking is what fails


def test_import_loads_nothing_heavy() -> None:
    code = f"import sys, kvcache_rag; print([n for n in {HEAVY} if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


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
    assert "lazy_names" not in dir(module)
    for name in module.__all__:
        assert given[name] is getattr(module, name)


def test_names_are_looked_up_when_one_is_used_first() -> None:
    code = (
        "import sys, kvcache_rag; early = {'ast', 'kvcache_rag.errors'} & sys.modules.keys();"
        "kvcache_rag.InvalidInputError; print(early, 'kvcache_rag.errors' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set() True"
