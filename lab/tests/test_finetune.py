"""A whole run: what is learned, what is written, going on after an interruption, and refusals."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from reader_file import reader_data
from safetensors.torch import load_file
from zoo import build, byte_tokenizer

from kvcache_rag import Engine, InvalidInputError, Reuse
from kvcache_rag.cli import main
from kvcache_rag.errors import MissingExtraError, UnsupportedModelError
from kvcache_rag.prompt.template import FILE_NAME
from kvcache_rag_lab.finetune import FinetuneConfig, JsonlData, Report, finetune
from kvcache_rag_lab.finetune.loop import Trainer
from kvcache_rag_lab.finetune.sources import open_data

NAMES = ("Ada", "Bob", "Cid", "Dot", "Eve", "Fay", "Gus", "Hal", "Ivy", "Jon", "Kim", "Lea")
READER = reader_data()


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def rows(count: int = 12) -> list[dict[str, Any]]:
    """Questions that only their documents answer."""
    found = []
    for index in range(count):
        name, other = NAMES[index % 12], NAMES[(index + 5) % 12]
        documents = [
            {"id": "a", "text": f"{name} has {index}.", "relevant": True},
            {"id": "b", "text": f"{other} has {index + 30}.", "relevant": False},
        ]
        asked = {"question": f"What has {name}?", "answers": [str(index)]}
        found.append({**asked, "documents": documents})
    return found


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the zoo on disk, with a template of its own."""
    folder = tmp_path_factory.mktemp("small")
    model = build("qwen2")
    model.config.attention_dropout = 0.1  # so that random states matter
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    template = {"system": "Read.\n", "chunk_start": "<d>", "chunk_end": "</d>"}
    (folder / FILE_NAME).write_text(json.dumps(template))
    return folder


def settings(model: Path | str, out: Path, **changes: Any) -> FinetuneConfig:
    values: dict[str, Any] = {"model": str(model), "out": out, "data": READER, "device": "cpu"}
    values |= {"steps": 4, "batch_tokens": 700, "holdout": 3, "rate": 1e-3}
    return FinetuneConfig(**{**values, **changes})


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def equal(first: Path, second: Path) -> bool:
    left, right = weights(first), weights(second)
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


@pytest.fixture(scope="module")
def finished(small: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Report]:
    """A short uninterrupted run."""
    out = tmp_path_factory.mktemp("finished") / "model"
    return out, finetune(settings(small, out, both_masks=True))


def test_a_finished_folder_loads_and_has_keys_of_its_own(
    small: Path, finished: tuple[Path, Report]
) -> None:
    out, report = finished
    base = Engine.from_pretrained(small, device="cpu")
    tuned = Engine.from_pretrained(out, device="cpu")
    assert tuned.spec != base.spec
    assert tuned.template == base.template, "the template was not copied"
    assert tuned.tokenize("x?", ["a b"]) == base.tokenize("x?", ["a b"])
    difference = tuned.logits("x?", ["a", "b"]) - base.logits("x?", ["a", "b"])
    assert difference.abs().max() > 1e-3
    assert json.loads((out / "report.json").read_text()) == report.to_json()
    lines = (out / "training_log.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4]
    assert not out.with_name("model.work").exists()


def test_the_report_measures_what_was_loaded_and_what_was_saved(
    finished: tuple[Path, Report], tmp_path: Path
) -> None:
    out, report = finished
    assert set(report.before) == {"plain", "free", "full", "block"}
    assert report.before["block"].loss != report.before["full"].loss
    again = finetune(settings(out, tmp_path / "again", steps=1, rate=1e-30))
    for name, measure in again.before.items():
        assert measure.losses == pytest.approx(report.after[name].losses, rel=1e-5)
        assert measure.losses == again.after[name].losses, "a rate of 0 changed the model"


def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(
    small: Path, finished: tuple[Path, Report], tmp_path: Path
) -> None:
    whole, report = finished
    config = settings(small, tmp_path / "model", both_masks=True)
    real = Trainer._step
    done = []

    def step(self: Trainer) -> dict[str, Any]:
        if len(done) == 3:
            raise InterruptedError  # as a crash: what was not saved is lost
        done.append(self.step)
        return real(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_step", step)
        with pytest.raises(InterruptedError):
            finetune(dataclasses.replace(config, save_every=2))
    torch.manual_seed(99)  # another process has other random states
    work = config.work_folder
    resumed = finetune(config)
    assert equal(config.out, whole)
    assert resumed.before == report.before
    assert resumed.after == report.after
    assert resumed.tokens == report.tokens
    lines = (config.out / "training_log.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4]
    assert not work.exists()


def test_ctrl_c_finishes_the_step_saves_and_goes_on(
    small: Path, finished: tuple[Path, Report], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "model"
    words = ["finetune", str(small), "--out", str(out), "--data", str(READER.path), "--quiet"]
    words += ["--steps", "4", "--batch-tokens", "700", "--holdout", "3"]
    words += ["--rate", "1e-3", "--device", "cpu", "--both-masks"]
    real = Trainer._step

    def step(self: Trainer) -> dict[str, Any]:
        if self.step == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return real(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_step", step)
        assert main(words) == 130
    seen = capsys.readouterr()
    assert f"kept in {out}.work, the same command goes on from there" in seen.err
    assert len(Path(f"{out}.work", "training_log.jsonl").read_text().splitlines()) == 2
    assert main(words) == 0
    assert equal(out, finished[0])
    assert f"Engine.from_pretrained({str(out)!r})" in capsys.readouterr().out


def test_a_run_in_another_thread_needs_no_signals(small: Path, tmp_path: Path) -> None:
    reports: list[Report] = []
    config = settings(small, tmp_path / "model", steps=1)
    thread = threading.Thread(target=lambda: reports.append(finetune(config)))
    thread.start()
    thread.join()
    assert reports[0].steps == 1


def test_it_learns_from_a_file(small: Path, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "qa.jsonl", rows())
    plain = [{"text": "the cat sat"}, {"text": "on the mat"}, {"text": "and saw a rat"}]
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    config = settings(
        small,
        tmp_path / "model",
        data=JsonlData(data),
        plain=write_rows(tmp_path / "plain.jsonl", [*plain, {"messages": turns}]),
        steps=12,
        rate=3e-3,
    )
    report = finetune(config)
    assert report.change("block").high < 0
    assert report.data == "qa.jsonl; plain data: plain.jsonl"
    assert len(report.before["plain"].losses) == 1, "a fifth of four texts, one at least"


def test_the_control_never_sees_the_block_mask(small: Path, tmp_path: Path) -> None:
    finetune(settings(small, tmp_path / "model", block_share=0.0))
    lines = (tmp_path / "model" / "training_log.jsonl").read_text().splitlines()
    assert {kind for line in lines for kind in json.loads(line)["by_kind"]} == {"full", "plain"}


def test_lora_is_merged_or_kept_and_both_have_keys_of_their_own(
    small: Path, tmp_path: Path
) -> None:
    merged, kept = tmp_path / "merged", tmp_path / "kept"
    finetune(settings(small, merged, steps=2, lora=4, rate=1e-2))
    finetune(settings(small, kept, steps=2, lora=4, rate=1e-2, keep_adapter=True))
    assert (kept / "adapter_model.safetensors").is_file()
    assert not (kept / "model.safetensors").exists()
    base = Engine.from_pretrained(small, device="cpu")
    first = Engine.from_pretrained(merged, device="cpu")
    second = Engine.from_pretrained(kept, device="cpu")
    assert len({base.spec, first.spec, second.spec}) == 3
    asked = ("x?", ["ab", "cd"])
    found = [engine.logits(*asked, policy=Reuse()) for engine in (base, first, second)]
    assert (found[0] - found[1]).abs().max() > 1e-3
    assert torch.allclose(found[1], found[2], atol=1e-3)
    with pytest.raises(InvalidInputError, match="is an adapter; merge it"):
        finetune(settings(kept, tmp_path / "again"))


def test_the_packaged_reader_keeps_its_dtype_and_template(tmp_path: Path) -> None:
    config = settings("tiny", tmp_path / "model", steps=1, precision="bf16", positions="composite")
    report = finetune(config)
    assert {value.dtype for value in weights(tmp_path / "model").values()} == {torch.bfloat16}
    assert report.before["free"].exact_match == 0.0, "the reader refuses without documents"
    assert report.before["block"].exact_match > 0.7
    engine = Engine.from_pretrained(tmp_path / "model", device="cpu")
    (example,) = open_data(READER, None, seed=5, holdout=1).held_qa
    asked = example.questions[0]
    answer = engine.generate(asked.question, example.documents, policy=Reuse("composite"))
    assert answer.text == asked.answer


def test_gradient_checkpointing_changes_nothing(small: Path, tmp_path: Path) -> None:
    finetune(settings(small, tmp_path / "a", steps=2))
    finetune(settings(small, tmp_path / "b", steps=2, gradient_checkpointing=True))
    left, right = weights(tmp_path / "a"), weights(tmp_path / "b")
    assert all(torch.allclose(left[name], right[name], atol=1e-6) for name in left)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("small --out out --data missing", "--data must be a file"),
        ("missing --out out --data small/data", "there is no model folder"),
        ("small --out out --data small/data --block-share 2", "--block-share must be at least 0"),
        ("small --out small --data small/data", "exists; remove it"),
    ],
)
def test_refusals_of_the_command(
    given: str, said: str, small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {"small": small, "small/data": READER.path}
    places |= {name: tmp_path / name for name in ("out", "missing")}
    words = [str(places.get(word, word)) for word in given.split()]
    assert main(["finetune", *words, "--quiet"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[1]", "is not a JSON object"),
        ('{"answers": ["a"], "documents": ["d"]}', "needs a question"),
        ('{"question": "\\ud800", "answers": ["a"], "documents": ["d"]}', "needs a question"),
        ('{"question": "q", "answers": [], "documents": ["d"]}', "needs answers"),
        ('{"question": "q", "answers": "a", "documents": ["d"]}', "needs answers"),
        ('{"question": "q", "answers": ["a"]}', "needs documents"),
        ('{"question": "q", "answers": ["a"], "documents": [{}]}', "has a document with"),
    ],
)
def test_a_bad_line_of_data_is_named(tmp_path: Path, line: str, said: str) -> None:
    path = tmp_path / "qa.jsonl"
    path.write_text(json.dumps(rows(1)[0]) + "\n" + line + "\n")
    with pytest.raises(InvalidInputError, match=f"line 2 {said}"):
        open_data(JsonlData(path), None, seed=0, holdout=1)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({}, "needs a text, or messages"),
        ({"text": " "}, "needs a text, or messages"),
        ({"messages": [{"role": "user"}]}, "needs a text, or messages"),
        ({"messages": [{"role": "user", "content": "a"}]}, "must be the assistant's"),
    ],
)
def test_a_bad_line_of_plain_data_is_named(tmp_path: Path, row: dict[str, Any], said: str) -> None:
    path = write_rows(tmp_path / "plain.jsonl", [{"text": "fine"}, row])
    with pytest.raises(InvalidInputError, match=f"line 2.*{said}"):
        open_data(READER, path, seed=0, holdout=1)


def test_rows_of_equal_documents_become_one_context(tmp_path: Path) -> None:
    one, other = rows(2)
    same = {**one, "question": "Again?", "answer_groups": [["x", "y"], ["z"]]}
    path = write_rows(tmp_path / "qa.jsonl", [one, other, same])
    data = open_data(JsonlData(path), None, seed=0, holdout=1)
    contexts = sorted([*data.held_qa, data.qa.draw(0)], key=lambda sample: len(sample.questions))
    assert [len(sample.questions) for sample in contexts] == [1, 2]
    assert [asked.answer for asked in contexts[1].questions] == ["0", "x, z"]
    assert contexts[1].questions[0].relevant == (0,)


def test_a_context_is_never_on_both_sides_of_the_split(tmp_path: Path) -> None:
    many = [{**row, "question": f"{index}?"} for row in rows(3) for index in range(5)]
    data = open_data(
        JsonlData(write_rows(tmp_path / "qa.jsonl", many), questions=2), None, seed=0, holdout=1
    )
    learned = [data.qa.draw(number) for number in range(6)]
    assert {len(sample.questions) for sample in (*learned, *data.held_qa)} == {1, 2}
    assert len(set(learned)) == 6
    held = {sample.documents for sample in data.held_qa}
    assert held.isdisjoint(sample.documents for sample in learned)


def test_a_folder_of_another_run_is_left_alone(small: Path, tmp_path: Path) -> None:
    config = settings(small, tmp_path / "model")
    config.work_folder.mkdir()
    (config.work_folder / "settings.json").write_text(json.dumps({**config.settings(), "seed": 1}))
    (config.work_folder / "checkpoint.pt").write_bytes(b"of that run")
    with pytest.raises(InvalidInputError, match="unfinished run with another seed, data digest"):
        finetune(config)


def test_without_peft_the_extra_is_named(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'kvcache-rag\[finetune\]'"):
        finetune(settings(small, tmp_path / "model", lora=4))


@pytest.mark.parametrize(
    ("name", "said"),
    [("recurrent_gemma", "state"), ("bloom", "ALiBi.*without fine-tuning"), ("gpt2", "learned")],
)
def test_a_model_whose_chunks_cannot_be_moved_is_refused(
    tmp_path: Path, name: str, said: str
) -> None:
    folder = tmp_path / name
    build(name).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    with pytest.raises(UnsupportedModelError, match=said):
        finetune(settings(folder, tmp_path / "model"))


def test_a_run_that_cannot_learn_says_so(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InvalidInputError, match="raise batch_tokens"):
        finetune(settings(small, tmp_path / "model", batch_tokens=20))
    monkeypatch.setattr(
        "kvcache_rag_lab.finetune.run.answer_loss", lambda logits, _: logits.sum() * float("nan")
    )
    with pytest.raises(InvalidInputError, match="step 1 is not a number"):
        finetune(settings(small, tmp_path / "other"))
