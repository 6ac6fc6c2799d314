"""The study of real text: what it asks, what it keeps, what counts in its means, what it shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks import gradual, quality_document, real_text, real_text_page
from benchmarks.quality_document import GRADUAL, PARTS, READER, REAL_TEXT, lowered, put
from benchmarks.real_text import APE, FAMILIES, MAIN, SETS, moved, stages, task_of
from benchmarks.real_text_page import page
from benchmarks.real_text_records import Scores
from benchmarks.real_text_scores import FULL, figures, summary
from kvcache_rag import Engine, InvalidInputError
from kvcache_rag.scoring.ask import CLOSED_BOOK
from kvcache_rag.scoring.question import Question

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).parent.parent
NAMES = ("Ada", "Bo", "Cy", "Di", "Eve", "Flo")
THINGS = ("keys", "map", "boat", "lamp", "drum", "coat")
MACHINE = {"date": "2026-11-22", "machine": "here", "versions": "torch 2", "commit": "abc"}
SITTING = {"began": "now", **MACHINE, "threads": 2, "batch": 8, "load": [0.5, 1.0]}
IDENTITY = {"file": "x.gguf", "sha256": "12", "weights": "ab", "dtype": "bfloat16"}


def row(number: int, name: str) -> dict[str, Any]:
    """A row of our own, with the shape of the data sets."""
    documents = [
        {"id": f"d{place}", "text": f"{who} keeps the {thing}.", "relevant": place == number % 3}
        for place, (who, thing) in enumerate(zip(NAMES, THINGS, strict=True))
    ][:3]
    return {
        "id": f"{name}-{number}",
        "question": f"Who keeps the {THINGS[number % 3]}, number {number}?",
        "answers": [NAMES[number % 3]],
        "documents": documents,
    }


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for name in SETS:
        lines = [json.dumps(row(number, name)) + "\n" for number in range(8)]
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    return folder


@pytest.fixture
def run(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The program, over the packaged reader."""
    monkeypatch.setattr(real_text, "MODEL", "tiny")
    monkeypatch.setattr(real_text, "TUNING_ROWS", 2)

    def asked(*more: str, work: str = "work", n: int = 3) -> dict[str, Any]:
        given = ["--data", str(data), "--work", str(tmp_path / work), "--n", str(n), "--room", "1"]
        given += ["--records", str(tmp_path / "records.json"), "--threads", "1", "--batch", "2"]
        given += [
            "--dtype",
            "float32",
        ]  # or a reference that is computed once more differs by rounding
        assert real_text.main([*given, "--figures", str(tmp_path / "figures.json"), *more]) == 0
        found: dict[str, Any] = json.loads((tmp_path / "figures.json").read_text(encoding="utf-8"))
        return found

    return asked


def kept(folder: Path) -> dict[str, Any]:
    """The records, but for when they were made."""
    found = Scores.read(folder / "records.json", {})
    return {"rows": found.rows, "found": found.found}


def compare(found: Any, other: Any) -> None:
    """The same; a first token that was computed once more may differ in its last digits."""
    if isinstance(found, dict):
        assert set(found) == set(other)
        for name, value in found.items():
            compare(value, other[name])
    elif isinstance(found, list):
        for pair in zip(found, other, strict=True):
            compare(*pair)
    else:
        is_number = isinstance(found, float)
        assert found == (pytest.approx(other, rel=1e-3, abs=1e-5) if is_number else other)


def test_a_run_goes_on_from_its_work_folder_and_from_its_records(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    some = ("--sets", "squad", "rgb_en")
    whole = run(*some)
    expected = kept(tmp_path)
    text = (tmp_path / "records.json").read_text(encoding="utf-8")
    assert not any(word in text for word in ("keeps", *NAMES, "squad-1")), "scores alone"
    assert set(expected["found"]["rgb_en"]) == {*MAIN, CLOSED_BOOK}
    assert {*APE} < set(expected["found"]["squad_tuning"])
    assert whole["quality"]["tuning"]["chosen"] in expected["found"]["squad"]

    asked: list[int] = []
    answered = Engine.generate_batch

    def counted(engine: Engine, questions: Sequence[Any], **options: Any) -> Any:
        asked.append(len(questions))
        return answered(engine, questions, **options)

    monkeypatch.setattr(Engine, "generate_batch", counted)
    again = run(*some, work="lost")  # the records alone are left
    assert not asked
    assert again["quality"]["summary"] == whole["quality"]["summary"]
    (tmp_path / "records.json").unlink()
    run(*some)  # the work folder alone is left
    assert not asked
    assert kept(tmp_path) == expected

    (tmp_path / "records.json").unlink()
    run(*some, "--stages", "base", work="half")
    assert "legolink:16" not in kept(tmp_path)["found"]["squad"]
    run(*some, work="other")
    compare(kept(tmp_path), expected)  # half from records, half asked


def test_a_longer_run_asks_only_what_is_new(run: Any, tmp_path: Path) -> None:
    base = ("--sets", "nq", "--stages", "base")
    run(*base, n=2)
    first = kept(tmp_path)["found"]["nq"]["reordered"]
    assert run(*base, n=5)["quality"]["sets"]["nq"]["n"] == 5
    assert kept(tmp_path)["found"]["nq"]["reordered"][:2] == first
    assert run(*base, n=2)["quality"]["sets"]["nq"]["n"] == 2
    assert len(kept(tmp_path)["found"]["nq"]["reordered"]) == 5, "what is known stays"


def test_times_are_medians_of_single_questions(run: Any) -> None:
    found = run("--sets", "squad", "--part", "ttft", "--timed", "2")["ttft"]
    assert set(found["ms"]["squad"]) == {*MAIN, CLOSED_BOOK}
    assert all(len(values) == 2 and min(values) > 0 for values in found["ms"]["squad"].values())
    assert found["identity"]["weights"]
    assert found["sittings"][0]["threads"] == 1


def test_records_of_another_model_are_refused(tmp_path: Path) -> None:
    scores = Scores(IDENTITY, [SITTING])
    scores.write(tmp_path / "records.json")
    with pytest.raises(InvalidInputError, match="answers with weights ab, not other; name another"):
        Scores.read(tmp_path / "records.json", {**IDENTITY, "weights": "other"})


def test_gemma_needs_its_variable(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(real_text.GEMMA, raising=False)
    given = ["--data", str(data), "--work", str(tmp_path), "--part", "gemma"]
    assert real_text.main([*given, "--figures", str(tmp_path / "figures.json")]) == 1
    assert "KVCACHE_RAG_GEMMA is not set" in capsys.readouterr().err
    assert not (tmp_path / "figures.json").exists()


def test_what_is_most_wanted_is_asked_first() -> None:
    found = stages(SETS, "ape:1.0,0.7")
    assert found[0].labels == ("full", "reordered", CLOSED_BOOK)
    assert [stage.sets for stage in found[:3]] == [tuple(SETS)] * 3
    assert found[-1].labels == ("ape:1.0,0.7",)
    assert found[-1].sets == ("squad", "hotpotqa")
    assert [stage.name for stage in stages(["rgb_en"], None)] == ["base", *MAIN[2:]]


@pytest.mark.parametrize(
    ("place", "texts", "gold"),
    [("first", "bdace", 0), ("middle", "abdce", 1), ("last", "acebd", 3)],
)
def test_the_gold_document_is_moved_and_the_others_stay_in_order(
    place: str, texts: str, gold: int
) -> None:
    found = moved(Question("q", "Who?", tuple("abcde"), ("x",), relevant=(1, 3)), place)
    assert "".join(found.chunks) == texts
    assert found.relevant == (gold, gold + 1)


def test_rows_to_tune_on_are_others(data: Path) -> None:
    asked = task_of("squad", data, 5).questions(5)
    tuned = task_of("squad_tuning", data, 5).questions(20)
    assert [one.id for one in tuned] == ["squad-5", "squad-6", "squad-7"]
    assert not {one.id for one in asked} & {one.id for one in tuned}
    short = task_of("squad_tuning", data, 8).questions(2)
    assert [one.id for one in short] == ["squad-0", "squad-1"]


def answered(**sets: dict[str, list[float]]) -> Scores:
    """Scores of some sets, by label."""
    scores = Scores(IDENTITY, [SITTING])
    for name, labels in sets.items():
        scores.rows[name] = [str(number) for number in range(len(labels[FULL]))]
        scores.found[name] = {
            label: [
                {"containment": value, **({} if label == FULL else {"kl": 0.25})}
                for value in values
            ]
            for label, values in labels.items()
        }
    return scores


def read(scores: Scores, names: Sequence[str]) -> dict[str, Any]:
    """Figures as the program writes them."""
    sizes = {name: len(rows) for name, rows in scores.rows.items()}
    found = figures(scores, sizes, scores.rows)
    families = {name: FAMILIES[name] for name in names}
    means = summary(scores, found, families, (*MAIN, CLOSED_BOOK), scores.rows)
    about = {"identity": IDENTITY, "sittings": [SITTING]}
    tuning = {"rows": [201, 220], "tried": list(APE), "chosen": None}
    return {"quality": {"n": 200, **about, **found, "summary": means, "tuning": tuning}}


RIGHT, WRONG = [1.0] * 40, [0.0] * 40
HALF = [1.0, 0.0] * 20


def test_a_set_that_is_not_read_is_shown_and_counts_in_no_mean() -> None:
    scores = answered(
        squad={FULL: RIGHT, "reordered": HALF, CLOSED_BOOK: WRONG},
        nq={FULL: HALF, "reordered": WRONG, CLOSED_BOOK: HALF},
    )
    found = read(scores, ("squad", "nq", "musique"))["quality"]
    assert found["sets"]["squad"]["reads"] is True
    assert found["sets"]["nq"]["reads"] is False
    means = found["summary"]
    assert (means["counted"], means["shown_only"]) == (["squad"], ["nq"])
    assert means["missing"] == ["musique"]
    assert means["rows"]["reordered"]["score"]["value"] == 0.5
    assert means["rows"]["reordered"]["minus_full"]["difference"] == -0.5
    assert "legolink:16" not in means["rows"]
    text = page({"quality": found})
    assert "Shown only, because full prefill does not surely beat closed book: nq." in text
    assert "Not measured: musique." in text
    (line,) = (one for one in text.splitlines() if one.startswith("| nq |"))
    assert "0.0<br>-50.0 (" in line, "what it loses is shown all the same"
    assert "| `LegoLink(16)` | not measured |" in text


def test_every_set_counts_alike_and_only_what_answered_all_of_them_has_a_mean() -> None:
    scores = answered(
        squad={FULL: RIGHT, "reordered": HALF, "legolink:16": HALF, CLOSED_BOOK: WRONG},
        nq={FULL: RIGHT[:20], "reordered": RIGHT[:20], CLOSED_BOOK: WRONG[:20]},
    )
    means = read(scores, ("squad", "nq"))["quality"]["summary"]
    assert means["rows"]["reordered"]["score"]["value"] == 0.75
    assert means["rows"]["reordered"]["score"]["n"] == 60
    assert means["rows"]["reordered"]["kl"] == 0.25
    assert means["rows"][FULL]["minus_full"] is None
    assert "legolink:16" not in means["rows"]


def test_sets_of_the_same_questions_count_as_one() -> None:
    labels = {FULL: RIGHT, "reordered": HALF, CLOSED_BOOK: WRONG}
    noise = {FULL: RIGHT, "reordered": WRONG, CLOSED_BOOK: WRONG}
    scores = answered(squad=labels, rgb_en=labels, rgb_en_noise20=noise, rgb_en_noise40=noise)
    names = ("squad", "rgb_en", "rgb_en_noise20", "rgb_en_noise40")
    found = read(scores, names)["quality"]
    means = found["summary"]
    assert means["families"] == {"squad": 40, "rgb_en": 120}
    score = means["rows"]["reordered"]["score"]
    assert score["value"] == pytest.approx((1 / 2 + 1 / 6) / 2)
    assert "2 public question sets (rows: squad 40, rgb_en 120)" in page({"quality": found})
    # 40 questions asked three times are not 120, and their interval is wider.
    noise["reordered"] = HALF
    scores = answered(squad=labels, rgb_en=labels, rgb_en_noise20=noise, rgb_en_noise40=noise)
    families = {name: FAMILIES[name] for name in names}
    apart = {name: [f"{name}-{row}" for row in scores.rows[name]] for name in names}
    widths = []
    for clusters in (scores.rows, apart):
        rows = summary(scores, found, families, ("reordered",), clusters)["rows"]
        widths.append(rows["reordered"]["score"]["high"] - rows["reordered"]["score"]["low"])
    assert widths[0] > 1.2 * widths[1]


def test_without_figures_the_page_says_so() -> None:
    text = page({})
    assert text.count("Not measured.") == 9
    assert "{" not in text
    assert "nan" not in text


def test_the_page_names_model_commit_threads_load_and_machine() -> None:
    found = read(answered(squad={FULL: RIGHT, CLOSED_BOOK: WRONG}), ("squad",))
    values = [float(one) for one in range(100, 116)]
    found["ttft"] = {
        "identity": IDENTITY,
        "sittings": [SITTING],
        "ms": {"squad": dict.fromkeys((*MAIN, CLOSED_BOOK), values)},
    }
    text = page(found, found)
    for words in ("x.gguf, SHA-256 `12`", "commit abc", "2 thread(s)", "load 0.5 to 1.0", "2026-"):
        assert words in text
    assert "16 questions asked one at a time" in text
    first = text.partition("## Every set")[0]
    assert "| full prefill | 100.0 (" in first
    assert "| 108 (" in first, "rounded to the even of 107.5"
    assert "## With an adapter" in text


def test_parts_of_the_page_leave_each_other_alone(tmp_path: Path) -> None:
    file = tmp_path / "quality.md"
    put(file, READER, "# One\n\n## Two\n")
    put(file, REAL_TEXT, "# Three\n")
    put(file, REAL_TEXT, "# Four\n")
    found = quality_document.parts(file)
    assert found == {REAL_TEXT: "## Four\n", GRADUAL: "", READER: "## One\n\n### Two\n"}
    assert file.read_text(encoding="utf-8").startswith("# Quality\n\n<!-- real text")
    assert lowered("no\n# yes\n") == "no\n## yes\n"


def test_the_page_is_what_its_program_writes() -> None:
    file = ROOT / "docs" / "quality.md"
    results = real_text_page.RESULTS
    whole = real_text_page.read(results / "real_text.json") or {}
    adapter = real_text_page.read(results / "real_text_adapter.json")
    assert quality_document.parts(file)[REAL_TEXT] == lowered(page(whole, adapter))
    assert quality_document.parts(file)[READER].startswith("## The packaged reader\n")
    assert all(f"<!-- {name} -->" in file.read_text(encoding="utf-8") for name in PARTS)


def test_the_part_about_gradual_filtering_is_that_of_the_results() -> None:
    results = [real_text_page.read(real_text_page.RESULTS / name) for name in gradual.RESULTS]
    found = [one for one in results if one is not None]
    assert len(found) == len(results)
    assert quality_document.parts(ROOT / "docs/quality.md")[GRADUAL] == lowered(gradual.page(found))
