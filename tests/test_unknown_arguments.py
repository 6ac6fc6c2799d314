"""A keyword that nothing reads is refused by the one that was probably meant, before any work."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from public import public

from kvcache_rag import CacheBlend, Engine, InvalidInputError, MemoryStore, PromptTemplate
from kvcache_rag.policies import ReusePolicy

if TYPE_CHECKING:
    from collections.abc import Callable

MISSPELLED = {
    "Ape": "temprature",
    "Auxiliary": "engin",
    "BestFew": "coutn",
    "BestLast": "shar",
    "BestRead": "cuont",
    "CacheBlend": "ratoi",
    "CacheClip": "auxilary",
    "DiskStore": "max_byte",
    "Engine": "polcy",
    "Gate": "treshold",
    "LegoLink": "token",
    "MemoryStore": "max_byte",
    "Message": "contnt",
    "PromptTemplate": "sytem",
    "ProphetKV": "ratoi",
    "RemoteStore": "codc",
    "Reuse": "position",
    "StoredChunks": "codc",
}


@pytest.mark.parametrize("name", MISSPELLED)
def test_of_a_constructor(name: str) -> None:
    given = MISSPELLED[name]
    sentence = f"^{given} is no argument of {name}; did you mean [a-z_]+\\?$"
    with pytest.raises(InvalidInputError, match=sentence):
        public(name)(**{given: 1})


@pytest.mark.parametrize("name", ["Combination", "FullRecompute", "TieredStore"])
def test_of_one_that_has_none_like_it(name: str) -> None:
    with pytest.raises(InvalidInputError, match=f"^ratio is no argument of {name}; leave it out$"):
        public(name)(ratio=0.2)


def test_of_a_model_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is loaded for it."""
    monkeypatch.setattr("kvcache_rag.engine.load", None)
    made: list[tuple[Callable[..., Any], str, str]] = [
        (Engine.from_pretrained, "polcy", "policy"),
        (Engine.from_pretrained, "context_windw", "context_window"),
        (public("Auxiliary").from_pretrained, "adpter", "adapter"),
    ]
    for make, given, meant in made:
        sentence = f"^{given} is no argument of Engine.from_pretrained; did you mean {meant}\\?$"
        with pytest.raises(InvalidInputError, match=sentence):
            make("tiny", **{given: 1})
    with pytest.raises(InvalidInputError, match="there is no policy 'fast'"):
        Engine.from_pretrained("tiny", policy="fast")


def test_what_is_known_is_taken() -> None:
    assert replace(CacheBlend(ratio=0.2), ratio=0.3) == CacheBlend(0.3)
    assert PromptTemplate(system="a") == PromptTemplate("a")
    store = MemoryStore(max_bytes=5)
    assert pickle.loads(pickle.dumps(store)).max_bytes == 5


def test_a_policy_of_somebody_else_is_held_to_its_own_arguments() -> None:
    class Own(ReusePolicy):
        name = "own"

        def __init__(self, *, share: float = 0.5) -> None:
            self.share = share

        def select(self, prompt: Any, signals: Any) -> Any:
            raise NotImplementedError

    class Open(Own):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)

    assert Own(share=0.1).share == Open(share=0.1).share == 0.1
    with pytest.raises(InvalidInputError, match=r"^shre is no argument of Own; did you mean share"):
        Own(shre=0.1)  # type: ignore[call-arg]  # wrong on purpose
    with pytest.raises(TypeError, match="shre"):
        Open(shre=0.1)
