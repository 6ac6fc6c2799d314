"""What every policy guarantees; a test file names its policies and inherits it."""

from __future__ import annotations

import dataclasses
import json
import pickle
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import torch
from torch import Tensor

import kvcache_rag
from kvcache_rag import InvalidInputError
from kvcache_rag.policies import ReusePolicy, policy_by_name
from kvcache_rag.policies.selection import candidates
from kvcache_rag.stitching.stitch import StitchedPrompt
from tests.golden_cases import GOLDEN

if TYPE_CHECKING:
    from collections.abc import Callable

PROMPTS = {
    "several": StitchedPrompt.from_sizes(5, [30, 1, 17, 40], 3),
    "one chunk": StitchedPrompt.from_sizes(5, [30], 3),
    "no prefix": StitchedPrompt.from_sizes(0, [9, 12], 3),
    "chunks of one token": StitchedPrompt.from_sizes(4, [1, 1], 1),
}


class FixedSignals:
    """The same noise however often it is asked for."""

    def __init__(self, prompt: StitchedPrompt) -> None:
        self._tokens = prompt.context_tokens
        self._noise = torch.rand(self._tokens, generator=torch.Generator().manual_seed(1))

    def deviation(self, layer: int) -> Tensor:
        return self._noise

    def relevance(self) -> Tensor:
        return self._noise

    def attention(self) -> Tensor:
        return self._noise


class PolicyContract:
    """What every `ReusePolicy` guarantees.

    Attributes:
        written: As a user writes some of them; golden ones have their frozen `repr`.
        names: Of the same kind on command lines, and what each is.
        wrong: Makes one that cannot be.
        at_ratio: The policy at a ratio, where it has one.
    """

    written: ClassVar[tuple[str, ...]]
    names: ClassVar[dict[str, str]] = {}
    wrong: ClassVar[tuple[str, ...]] = ()
    at_ratio: ClassVar[Callable[[float], ReusePolicy] | None] = None
    computes_everything: ClassVar[bool] = False

    @staticmethod
    def made(code: str) -> Any:
        return eval(code, {name: getattr(kvcache_rag, name) for name in kvcache_rag.__all__})

    @pytest.fixture
    def policies(self) -> list[ReusePolicy]:
        return [self.made(code) for code in self.written]

    @staticmethod
    def selected(policy: ReusePolicy, prompt: StitchedPrompt) -> Tensor:
        return policy.select(prompt, FixedSignals(prompt))

    def test_it_is_a_value(self, policies: list[ReusePolicy]) -> None:
        for policy, code in zip(policies, self.written, strict=True):
            same = self.made(code)
            assert same is not policy
            assert same == policy
            assert hash(same) == hash(policy)
            assert pickle.loads(pickle.dumps(policy)) == policy
            for field in dataclasses.fields(policy):  # type: ignore[arg-type]  # frozen ones
                with pytest.raises(dataclasses.FrozenInstanceError):
                    setattr(policy, field.name, None)
        assert len(set(policies)) == len(policies), "different ones are different"

    def test_its_repr_pastes_back_and_is_that_of_ever(self, policies: list[ReusePolicy]) -> None:
        text = (GOLDEN / "representations.json").read_text(encoding="utf-8")
        frozen = json.loads(text)["policies"]
        for policy, code in zip(policies, self.written, strict=True):
            assert self.made(repr(policy)) == policy
            if code in frozen:
                assert repr(policy) == frozen[code]["repr"]
        assert {*self.written} & {*frozen}, "one of them is golden"

    @pytest.mark.parametrize("name", PROMPTS)
    def test_it_selects_context_tokens_that_may_be(
        self, name: str, policies: list[ReusePolicy]
    ) -> None:
        prompt = PROMPTS[name]
        for policy in policies:
            found = self.selected(policy, prompt)
            assert found.dtype == torch.bool
            assert found.shape == (prompt.context_tokens,)
            assert torch.equal(self.selected(policy, prompt), found), "the same every time"
            if policy.is_full:
                assert self.computes_everything
            else:
                assert not (found & ~candidates(prompt)).any()
            if policy.is_reuse:
                assert not found.any()

    def test_the_ends_of_its_ratio_are_nothing_and_everything(self) -> None:
        if self.at_ratio is None:
            assert all(not hasattr(self.made(code), "ratio") for code in self.written)
            return
        make = type(self).at_ratio
        assert make is not None
        for prompt in PROMPTS.values():
            assert make(0).is_reuse
            assert make(1).is_full
            assert not self.selected(make(0), prompt).any()
            assert torch.equal(self.selected(make(1), prompt), candidates(prompt))
            counts = [int(self.selected(make(n / 10), prompt).sum()) for n in range(11)]
            assert counts == sorted(counts), "more at a larger ratio"

    def test_its_names_are_its_own(self) -> None:
        for text, code in self.names.items():
            assert policy_by_name(text) == self.made(code)
            assert policy_by_name(f" {text.upper()} ") == self.made(code)

    def test_what_cannot_be_is_refused_in_one_sentence(self) -> None:
        for code in self.wrong:
            with pytest.raises(InvalidInputError) as caught:
                self.made(code)
            said = str(caught.value)
            assert "\n" not in said
            assert ". " not in said
            fields = dataclasses.fields(self.made(self.written[0]))
            assert any(field.name in said for field in fields), "which setting it is"
