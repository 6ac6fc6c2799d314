"""Both sides of the benchmark of continuous batching, on the packaged reader."""

from __future__ import annotations

import torch

from benchmarks import continuous as bench
from kvcache_rag import Engine
from kvcache_rag.models.pretrained import load

TEXTS = (
    "Bralo keeps the red lamp in the hall. ",
    "Sorin keeps the old map in the cellar. ",
    "Mira keeps the blue cup in the kitchen. ",
)
LENGTHS = (3, 6)


def test_both_sides_answer_alike_over_the_same_stored_chunks() -> None:
    engine = Engine.from_pretrained("tiny", device="cpu", dtype=torch.float32)
    options = {"dtype": torch.float32, "device": "cpu", "options": {}, "weight_format": "plain"}
    model, *_ = load("tiny", **options)
    engine.add(TEXTS)
    text = "Where does Bralo keep the red lamp?"
    questions = [bench.Question(text, TEXTS), bench.Question(text, TEXTS[::-1])]
    width = len(engine.tokenize(text, TEXTS).all)
    padded = bench.Padded(engine, questions, width)
    continuous = bench.Continuous(engine, model.eval(), questions, 16)
    try:
        mine, theirs = padded.run(LENGTHS), continuous.run(LENGTHS)
    finally:
        continuous.close()
    assert mine.ids == theirs.ids
    assert tuple(map(len, mine.ids)) == LENGTHS
    for one in (mine, theirs):
        assert one.started < min(one.firsts) <= one.ended
        assert one.rate > 0


def test_rows_end_behind_their_own_number_of_tokens() -> None:
    ends = bench.Lengths(10, (1, 3))
    for length, expected in ((10, [False, False]), (11, [True, False]), (13, [True, True])):
        assert ends(torch.zeros(2, length), None).tolist() == expected
