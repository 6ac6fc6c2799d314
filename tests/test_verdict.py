"""A verdict's file: the same bytes for the same verdict, and one sentence for anything else."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from verdicts import REUSE, make_verdict

from kvcache_rag import InvalidInputError
from kvcache_rag.verdict import AuxiliaryAgreement, Identity, NumericsCheck, Verdict

if TYPE_CHECKING:
    from pathlib import Path

IDENTITY = Identity("org/model", "c0ffee", "native", "bfloat16", "ab", "cd", "ef" * 32)


@pytest.fixture
def verdict() -> Verdict:
    return make_verdict(IDENTITY, {REUSE: 0.97, "LegoLink(tokens=16)": 0.99})


def test_it_comes_back_as_it_was(verdict: Verdict, tmp_path: Path) -> None:
    path = tmp_path / "verdict.json"
    verdict.save(path)
    again = Verdict.load(path)
    assert again.to_json() == verdict.to_json() == path.read_text(encoding="ascii")
    assert again.identity == IDENTITY
    assert again.policies[0].kept == 0.97
    assert [one.name for one in tmp_path.iterdir()] == ["verdict.json"], "nothing is left over"


def test_what_is_not_known_is_null_in_the_file(verdict: Verdict) -> None:
    endless = replace(verdict, checks=(NumericsCheck("x", math.inf, 1.0),))
    values = json.loads(endless.to_json())  # json itself would take NaN, so look for the word
    assert "NaN" not in endless.to_json()
    assert "Infinity" not in endless.to_json()
    assert values["policies"][0]["exact_match"] is None
    assert values["checks"][0]["error"] is None
    assert math.isnan(Verdict.from_json(endless.to_json()).policies[0].exact_match)


def test_what_files_of_earlier_lack_is_not_known(verdict: Verdict) -> None:
    assert "needed" not in verdict.to_json()
    assert math.isnan(Verdict.from_json(verdict.to_json()).full.needed)
    found = AuxiliaryAgreement("small", 1.0, 0.9, 1.1, 0.3, 0.2, 0.4, 0.11)
    full = replace(verdict.full, needed=73.0, same_answer=1.0)
    known = replace(verdict, full=full, auxiliary=found)
    again = Verdict.from_json(known.to_json())
    assert (again.full.needed, again.full.same_answer, again.auxiliary) == (73.0, 1.0, found)
    assert again.to_json() == known.to_json()


def test_a_failed_write_leaves_the_old_file(
    verdict: Verdict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "verdict.json"
    verdict.save(path)

    def fail(*_: object) -> None:
        raise OSError("no room")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="no room"):
        make_verdict(IDENTITY, {}).save(path)
    assert Verdict.load(path).policies
    assert [one.name for one in tmp_path.iterdir()] == ["verdict.json"]


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (("identity", "codec"), ..., "Identity.codec is missing"),
        (("policies", 0, "hook"), "import os", "PolicyScore.hook is missing or unknown"),
        (("policies", 0, "kept_low"), "0.99", "kept_low is not a float"),
        (("threshold",), True, "threshold is not a float"),
        (("policies",), {"0": {}}, "policies is not a list"),
        (("questions",), None, "questions is not a int"),
        (("packages",), ["torch"], "packages is not an object"),
    ],
)
def test_a_damaged_file_says_what_is_wrong(
    verdict: Verdict, place: tuple[Any, ...], value: Any, said: str
) -> None:
    values = json.loads(verdict.to_json())
    *path, name = place
    within = values
    for step in path:
        within = within[step]
    if value is ...:
        del within[name]
    else:
        within[name] = value
    with pytest.raises(InvalidInputError, match=f"is damaged .*{said}.*verify` again"):
        Verdict.from_json(json.dumps(values))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "is not JSON"),
        ("", "is not JSON"),
        (b"\xff\xfe\x00", "is not JSON"),
        ("[" * 200_000, "is not JSON"),
        ("[]", "is not a verdict"),
        ('{"version": 1}', "is not a verdict"),
        ('{"format": "kvcache-rag-verdict", "version": 2}', "version 2 and this package reads"),
        ('{"format": "kvcache-rag-verdict"}', "version None"),
        ('{"format": "kvcache-rag-verdict", "version": 1}', "is damaged"),
        (" " * ((4 << 20) + 1), "too large"),
    ],
)
def test_other_files_are_refused_in_one_sentence(
    tmp_path: Path, content: str | bytes, said: str
) -> None:
    path = tmp_path / "v.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InvalidInputError, match=said) as caught:
        Verdict.load(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_huge_number_in_the_file_does_not_pass(verdict: Verdict) -> None:
    text = verdict.to_json().replace('"kept_low": 0.95', '"kept_low": 1e999', 1)
    assert text != verdict.to_json()
    with pytest.raises(InvalidInputError, match="kept_low is not finite"):
        Verdict.from_json(text)


def test_few_questions_are_weak(verdict: Verdict) -> None:
    assert not verdict.is_weak
    assert make_verdict(IDENTITY, {}, questions=29).is_weak
