"""Guesses from the prompt in bfloat16: answers differ by a tie within rounding, or are wrong."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from laws import TEMPLATE, TEXTS
from zoo import build, byte_tokenizer

from benchmarks import decoding, guesses
from benchmarks.guesses import EQUAL, KINDS, TIE, WRONG, Verdict, Watch, verdict
from benchmarks.ttft_targets import GUESSES, other_targets
from kvcache_rag import Engine, MemoryStore

if TYPE_CHECKING:
    from pathlib import Path

LENGTH = 48
QUESTIONS = [f"What of {word}?" for word in ("lakes", "bridges", "snow", "ships", "salt", "iron")]


def test_tokens_count_as_quoted_in_runs_of_eight() -> None:
    prompt = [*range(100)]
    assert guesses.quoted([*range(20, 36)], prompt) == 1.0
    assert guesses.quoted([*range(20, 27)], prompt) == 0.0
    assert guesses.quoted([*range(20, 28), *range(200, 208)], prompt) == 0.5
    assert guesses.quoted([], prompt) == 0.0


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_answers_in_bfloat16_are_equal_up_to_a_tie_within_their_rounding(family: str) -> None:
    model = build(family).bfloat16()
    engine = Engine(model, byte_tokenizer(), template=TEMPLATE, store=MemoryStore())
    exact = build(family).bfloat16().float()
    fewer = 0
    for question in QUESTIONS:
        options: dict[str, Any] = {"max_new_tokens": LENGTH, "min_new_tokens": LENGTH}
        with guesses.counted() as passes:
            engine.generate(question, TEXTS, **options)
        with guesses.watched() as plain:
            engine.generate(question, TEXTS, prompt_lookup_num_tokens=0, **options)
        with guesses.watched() as guessed:
            answer = engine.generate(question, TEXTS, **options)
        assert guessed.ids == answer.token_ids
        fewer += passes[0] < LENGTH
        reference = guesses.exact_logits(exact, plain)
        found = verdict(plain, guessed, reference)
        assert found.said in (EQUAL, TIE), found
        assert found.said == TIE or plain.ids == guessed.ids
        ours = torch.stack([plain.logits[place] for place in range(LENGTH)])
        assert 0 < float((ours - reference).abs().max()) < 0.5 * float(ours.std())
        said = [int(plain.logits[place].argmax()) for place in range(LENGTH)]
        assert said == [*plain.ids]
    assert fewer, "nothing was guessed right"


def _watch(ids: list[int], logits: list[list[float]]) -> Watch:
    return Watch(tuple(ids), logits=dict(enumerate(map(torch.tensor, logits))))


def test_a_difference_beyond_the_rounding_is_wrong() -> None:
    plain = _watch([0, 1, 2], [[5.0, 1.0, 0.0], [0.0, 2.0, 1.75], [0.0, 1.0, 3.0]])
    guessed = _watch([0, 2, 0], [[5.0, 1.0, 0.0], [0.0, 1.75, 2.0], [9.0, 1.0, 3.0]])
    ours = torch.stack([*plain.logits.values()])
    assert verdict(plain, plain, ours) == Verdict(EQUAL)
    assert verdict(plain, guessed, ours + 0.125) == Verdict(TIE, 1, 0.25, 0.125, 0.25)
    assert verdict(plain, guessed, ours + 0.1).said == WRONG
    guessed.logits[1] = torch.tensor([7.0, 1.75, 2.0])  # a tie, by logits that nothing explains
    assert verdict(plain, guessed, ours + 0.125).said == WRONG
    assert verdict(plain, Watch((0, 1)), ours).said == WRONG  # it ended for no reason


def test_answers_count_by_length_quotes_and_guesses() -> None:
    quoting, others, unguessed = KINDS
    assert quoting.takes(48, 0.5, 12)
    assert not quoting.takes(47, 1.0, 12)
    assert not quoting.takes(64, 0.4, 12)
    assert others.takes(64, 0.0, 50)
    assert not others.takes(64, 0.125, 64)
    assert unguessed.takes(64, 0.0, 64)
    assert not unguessed.takes(64, 0.0, 63)


def test_the_report_counts_and_a_wrong_answer_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tie = Verdict(TIE, 3, gap=0.25, rounding=0.5, apart=0.25)
    found = [
        guesses.Measured(64, 16, 0.75, 4.0, Verdict()),
        guesses.Measured(64, 32, 0.25, 1.0, tie),
    ]
    row = guesses.row_of("quoting", 5, found)
    counts = {name: row[name] for name in ("asked", "counted", "equal answers", "near ties")}
    assert counts == {"asked": 5, "counted": 2, "equal answers": 1, "near ties": 1}
    assert row["tokens/s over those without guesses"] == pytest.approx(2.0)
    assert (row["slowest"], row["quoted part"], row["wrong"]) == (1.0, 0.5, 0)
    assert row["their widest gap over its rounding"] == 0.5
    assert row["each"][1]["verdict"]["said"] == TIE
    assert guesses.row_of("quoting", 5, [])["slowest"] is None

    wrong = guesses.row_of("quoting", 5, [guesses.Measured(64, 64, 1.0, 1.0, Verdict(WRONG))])
    rows = [row]
    monkeypatch.setattr(guesses, "measured", lambda data, wanted: rows)
    written = tmp_path / "decoding.json"
    arguments = ["--parts", "guesses", "--data", str(tmp_path), "--json", str(written)]
    assert decoding.main(arguments) == 0
    rows.append(wrong)
    assert decoding.main(arguments) == 1
    assert "1 answers with guesses differ" in capsys.readouterr().err
    report = json.loads(written.read_text("utf-8"))
    assert len(report[GUESSES]) == 2
    verdicts = {one.claim: one.verdict for one in other_targets({"decoding": report})}
    assert verdicts["Answers that guesses change by more than a tie"] == "does not hold"
    assert verdicts["Tokens/s of 1 answers that quote, over without guesses"] == "does not hold"
    assert verdicts["The same where no guess is right"] == "not measured"
