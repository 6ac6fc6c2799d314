"""What cannot be used is refused, and what takes a while is told, before torch is imported."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pathlib import Path

WRONG = (
    ("ask q --top-k 0", "--top-k must be at least 1, not 0"),
    ("ask q --max-new-tokens many", "--max-new-tokens must be a whole number, not 'many'"),
    ("ask q --policy bestlst", "--policy cannot be used: there is no policy 'bestlst'; did you"),
    ("ask q --full --policy reuse", "not allowed with argument"),
    ("chat --top-k -1", "--top-k must be at least 1, not -1"),
    ("bench tinny", "there is no model 'tinny'; did you mean 'tiny'?"),
    ("bench tiny --rounds 0", "--rounds must be at least 1"),
    ("bench tiny --budgets 4", "--budgets must be at least 1kB, not 4; say 1GB"),
    (
        "bench tiny --corpus corpus.jsonl --queries none",
        "--queries must be a file, and there is none of the name none",
    ),
    ("bench tiny --corpus none", "there is no corpus none"),
    ("bench tiny --report no/such/x.json", "cannot be a file; name one in a folder there is"),
    ("build tiny none.jsonl --kv-dir kv", "there is no corpus none.jsonl"),
    ("build tiny corpus.jsonl", "say where the chunks go"),
    ("build smolm2 corpus.jsonl --kv-dir kv", "did you mean 'smollm2'?"),
    ("build tiny corpus.jsonl --kv-dir kv --workers 0", "--workers must be at least 1"),
    ("build tiny corpus.jsonl --kv-dir kv --kv-max-bytes 10XB", "a number of bytes such as 10GB"),
    ("demo tiny --min-ratio x", "--min-ratio must be a number, not 'x'"),
    ("demo smollm2 --questions 31", "--questions must be 1 to 30, not 31"),
    ("demo org/none", "it is not on this machine, and HF_HUB_OFFLINE keeps it from being"),
    ("eval --task hotpot", "there is no task 'hotpot'; did you mean hotpotqa?"),
    ("eval --metric rouge", "no task has the metric 'rouge'"),
    ("eval --policies cacheblnd", "did you mean cacheblend?"),
    ("eval --policies cacheclip", "name --auxiliary"),
    ("eval smolm2", "did you mean 'smollm2'?"),
    ("eval --k 2 0", "--k must be at least 1, not 0"),
    ("finetune tiny --out o --data none --steps 0", "--steps must be at least 1"),
    ("finetune tiny --out o --data none", "--data must be a file"),
    (f"finetune tinny --out o --data {__file__}", "did you mean 'tiny'?"),
    ("ingest kv --collection o2", "--collection 'o2' is no name that Chroma takes; say 3 to 512"),
    ("ingest kv --collection a..b", "--collection 'a..b' is no name that Chroma takes; say 3 to"),
    ("ingest kv --collection 1.2.3.4", "'1.2.3.4' is no name that Chroma takes; say 3 to 512"),
    ("ingest kv --collection docs.", "--collection 'docs.' is no name that Chroma takes"),
    ("models check gpt2", "of the Hugging Face hub is said with its owner, as OWNER/NAME"),
    ("models check ./none", "there is no model folder ./none"),
    ("models check tiny --dtype bfloat17", "there is no dtype 'bfloat17' to load in"),
    ("models check tiny --adapter bloc", "there is no adapter 'bloc'"),
    ("playground tiny --port 70000", "port cannot be used: must be less than or equal to 65535"),
    ("serve tiny --api-keys none", "the file of API keys none cannot be read"),
    ("serve tiny --backend vllm", "--backend vllm needs its servers"),
    ("serve tiny --device gpu", "'gpu' is no device; say cpu, cuda or cuda:1"),
    ("serve tiny --gate none", "the verdict none cannot be read"),
    ("serve tiny --policy cacheblnd", "did you mean cacheblend?"),
    ("serve tiny --prefetch cpuu", "'cpuu' is no device"),
    ("serve tiny --tokenizer ./none", "there is no tokenizer folder ./none"),
    ("serve smolm2", "did you mean 'smollm2'?"),
    ("store gc kv --collection docs", "say where the collections are: --chroma"),
    ("store gc kv --min-age -1", "--min-age must be at least 0, not -1"),
    ("store ls none", "there is no folder none"),
    ("verify tiny --data none.jsonl", "the questions none.jsonl cannot be read"),
    ("verify tiny --keep 2 --task reader", "--keep must be above 0 and at most 1, not 2"),
    ("verify tiny --task nothing", "there is no task 'nothing'"),
    ("verify tinny --task reader", "did you mean 'tiny'?"),
)

# All in one process, as each takes a fifth of a second to begin.
CODE = """
import contextlib, io, json, sys
from kvcache_rag import cli
found = []
for line in json.load(sys.stdin):
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        code = cli.main(line.split())
    found.append((code, said.getvalue(), [name for name in {heavy} if name in sys.modules]))
print(json.dumps(found))
"""
HEAVY = ("torch", "transformers", "chromadb", "llama_index.core")


NOWHERE = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9"}


def run(*words: str, folder: Path, given: str = "", **variables: str) -> Any:
    """Python with these words, as on a machine without a network unless variables say otherwise."""
    paths = {"PYTHONPATH": os.pathsep.join(sys.path), "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder)}
    environment = {**os.environ, **paths, **variables}
    command = [sys.executable, *words]
    pipes: dict[str, Any] = {"input": given, "capture_output": True, "text": True, "check": False}
    return subprocess.run(command, cwd=folder, env=environment, **pipes)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str, list[str]]]:
    """Exit status, standard error and what is imported by then, by command line."""
    folder = tmp_path_factory.mktemp("here")
    (folder / "kv").mkdir()
    (folder / "corpus.jsonl").write_text('{"text": "a"}\n')
    lines = [line for line, _ in WRONG]
    done = run("-c", CODE.format(heavy=HEAVY), folder=folder, given=json.dumps(lines))
    assert done.returncode == 0, done.stderr
    return dict(zip(lines, json.loads(done.stdout.splitlines()[-1]), strict=True))


@pytest.mark.parametrize(("line", "says"), WRONG)
def test_what_cannot_be_used_is_one_line_before_anything_is_loaded(
    line: str, says: str, told: dict[str, tuple[int, str, list[str]]]
) -> None:
    code, said, loaded = told[line]
    assert (code, loaded) == (2, []), said
    (only,) = said.splitlines()
    assert says in only


def imports(name: str, log: str) -> bool:
    """Whether a log of `-X importtime` has a module."""
    return re.search(rf"\| +{name}$", log, re.MULTILINE) is not None


def test_a_hub_that_cannot_be_reached_is_one_line_at_once(tmp_path: Path) -> None:
    words = ("-X", "importtime", "-m", "kvcache_rag", "demo", "org/none")
    done = run(*words, folder=tmp_path, **NOWHERE)
    assert done.returncode == 2
    assert done.stderr.endswith("not on this machine, and http://127.0.0.1:9 cannot be reached\n")
    assert not imports("torch", done.stderr)
    assert "loading" not in done.stderr


@pytest.mark.parametrize("line", ["models check tiny", "doctor --json"])
def test_what_takes_a_while_is_told_before_torch_is_imported(line: str, tmp_path: Path) -> None:
    done = run("-X", "importtime", "-m", "kvcache_rag", *line.split(), folder=tmp_path)
    assert done.returncode == 0
    before, _, after = done.stderr.partition(" ...\n")
    assert before.splitlines()[-1].startswith(("loading tiny", "looking at what is installed"))
    assert not imports("torch", before)
    assert not imports("transformers", before)
    assert imports("torch", after)


@pytest.mark.parametrize(("said", "is_left_alone"), [("", True), ("['--version']", False)])
def test_what_was_loaded_is_not_gone_through_while_leaving(
    said: str, is_left_alone: bool, tmp_path: Path
) -> None:
    """With a model that takes seconds.  Who calls it as a function keeps his own habits."""
    code = (
        "import atexit, gc\n"
        "atexit.register(lambda: print(gc.get_freeze_count() > 0))  # asked last\n"
        f"from kvcache_rag.cli import main; main({said})"
    )
    done = run("-c", code, "--version", folder=tmp_path)
    assert done.stdout.splitlines()[-1] == str(is_left_alone)
