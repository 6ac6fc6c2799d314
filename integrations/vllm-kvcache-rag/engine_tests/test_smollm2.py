"""SmolLM2 in vLLM: the answers of an engine of our own over the same chunks, in the same order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from conftest import SmallEngine, reused
from kvcache_rag import Engine, MemoryStore, Reuse
from kvcache_rag.models.pretrained import load
from vllm_kvcache_rag.transfer.params import TransferParams

if TYPE_CHECKING:
    from collections.abc import Iterator

TEXTS = [
    "The Golden Gate Bridge opened to traffic on 27 May 1937. It is painted orange.",
    "Lake Baikal lies in southern Siberia. With 1,642 metres it is the deepest lake in the world.",
    "Kilimanjaro is a dormant volcano in Tanzania and the highest mountain in Africa.",
    "The Orkney Islands lie north of Scotland. People have lived there for 8,500 years.",
]
QUESTIONS = ["When did the Golden Gate Bridge open?", "How deep is Lake Baikal?"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: Any) -> Iterator[tuple[SmallEngine, Engine]]:
    folder = tmp_path_factory.mktemp("smollm2")
    options: dict[str, Any] = {"dtype": torch.float32, "device": "cpu", "options": {}}
    model, tokenizer, template = load("smollm2", **options)
    config = type(model.config).from_dict(model.config.to_dict())
    config.quantization_config = None
    plain = type(model)(config)
    plain.load_state_dict(model.state_dict())
    plain.save_pretrained(folder / "model")
    ours = Engine(model.eval(), tokenizer, template=template, store=MemoryStore())
    theirs = SmallEngine(folder / "model", folder / "kv", max_model_len=2048)
    assert theirs.law() == ""
    yield theirs, ours
    theirs.stop()


@pytest.mark.parametrize("positions", ["reordered", "composite"])
@pytest.mark.parametrize("question", QUESTIONS)
def test_an_answer_is_that_of_our_own_engine(
    pair: tuple[SmallEngine, Engine], question: str, positions: Any
) -> None:
    theirs, ours = pair
    for texts in (TEXTS, TEXTS[::-1]):
        ids = ours.tokenize(question, texts)
        params = TransferParams(len(ids.prefix), tuple(map(len, ids.chunks)), positions)
        for chunk in ids.chunks:
            wanted = TransferParams(len(ids.prefix), (len(chunk),), mode="store")
            while True:
                asked = ([*ids.prefix, *chunk], wanted, "")
                if reused(theirs.many([asked], max_tokens=1)[0]):
                    break
        answer = theirs.many([(list(ids.all), params, "")], max_tokens=24, ignore_eos=False)[0]
        assert reused(answer) == params.context
        logits = ours.logits(question, texts, policy=Reuse(positions))
        expected = logits[-1].float().log_softmax(-1)
        found = answer.outputs[0].logprobs[0]
        assert max(abs(one.logprob - float(expected[t])) for t, one in found.items()) < 1e-3
        own = ours.generate(question, texts, policy=Reuse(positions), max_new_tokens=24)
        for place, step in enumerate(answer.outputs[0].logprobs):
            best = sorted((one.logprob for one in step.values()), reverse=True)
            if best[0] - best[1] < 1e-2:
                break  # a tie: what follows may differ
            assert answer.outputs[0].token_ids[place] == own.token_ids[place]
