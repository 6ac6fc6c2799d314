"""An option is declared once, and whichever way it is said, a wrong value is the same sentence."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvcache_rag import DiskStore, Engine, PromptTemplate
from kvcache_rag.cli import main
from kvcache_rag.errors import InvalidInputError
from kvcache_rag.integration import open_engine
from kvcache_rag.settings import (
    DeviceOption,
    EngineOptions,
    EngineSettings,
    LocalSettings,
    StoreOptions,
    StoreSettings,
)
from kvcache_rag_server.corpus.worker import BuildSettings
from kvcache_rag_server.settings import RequestLimits, ServerSettings
from langchain_kvcache_rag import ChatKVCache, KVCacheChroma
from llama_index.kvcache_rag import KVCacheLLM, KVCacheVectorStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pydantic import BaseModel

DECLARING = (StoreOptions, EngineOptions, DeviceOption, EngineSettings, RequestLimits)
EMBEDDING = (LocalSettings, StoreSettings, BuildSettings, ServerSettings, ChatKVCache, KVCacheLLM)
# Whose own words say more: what stands beside `engine=` and `base_url=`; servers of vLLM.
OWN = {(ChatKVCache, "model"), (ServerSettings, "backend")}
# Lists of what a run compares; the folder that `doctor` looks at.
OTHERS = {("eval", "kv_codec"), ("doctor", "kv_dir")}


def declared() -> dict[str, str]:
    """Each option with its words."""
    found: dict[str, str] = {}
    for owner in DECLARING:
        for name, field in owner.model_fields.items():
            assert field.description, f"{owner.__name__}.{name} does not say what it does"
            assert found.setdefault(name, field.description) is field.description
    return found


@pytest.mark.parametrize("owner", EMBEDDING)
def test_who_embeds_options_declares_none_of_them_again(owner: type[BaseModel]) -> None:
    options = declared()
    shared = options.keys() & owner.model_fields.keys()
    assert len(shared) >= 5
    for name in shared:
        if (owner, name) not in OWN:
            assert owner.model_fields[name].description is options[name], name
    for kind in owner.__mro__:
        if kind not in DECLARING and not kind.__module__.startswith("llama_index.core"):
            again = vars(kind).get("__annotations__", {}).keys() & options.keys()
            assert not {name for name in again if (kind, name) not in OWN} - {"model"}, kind


def parsers() -> Iterator[tuple[str, argparse.ArgumentParser]]:
    for point in entry_points(group="kvcache_rag.commands"):
        parser = argparse.ArgumentParser()
        point.load().add_arguments(parser)
        yield point.name, parser
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for inner in dict.fromkeys(action.choices.values()):
                    yield point.name, inner


def test_a_flag_of_an_option_says_what_the_option_says() -> None:
    seen: set[str] = set()
    for command, parser in parsers():
        of_server, options = words(ServerSettings), declared()
        options = {**options, **of_server} if command == "serve" else {**of_server, **options}
        for action in parser._actions:
            serves = action.dest in options and command in ("serve", "playground")
            if (not serves and action.dest not in declared()) or (command, action.dest) in OTHERS:
                continue
            seen.add(action.dest)
            assert (action.help or "").startswith(options[action.dest]), (command, action.dest)
            if action.option_strings and not isinstance(action, argparse.BooleanOptionalAction):
                assert action.option_strings == [f"--{action.dest.replace('_', '-')}"]
    assert seen >= {*StoreOptions.model_fields, *RequestLimits.model_fields}
    assert seen >= {"adapter", "backend", "device"}


def words(owner: type[BaseModel]) -> dict[str, str]:
    return {name: field.description or "" for name, field in owner.model_fields.items()}


WRONG: tuple[tuple[str, Any], ...] = (
    ("kv_max_bytes", "ten"),
    ("kv_max_bytes", -1),
    ("kv_ttl", 0),
    ("kv_ttl", "nan"),
    ("kv_codec", "int2"),
    ("context_window", 0),
    ("backend", "llamacpp"),
    ("weight_format", "Q4"),
    ("rotation", "moved"),
)


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_a_wrong_value_is_one_sentence_whichever_way_it_is_said(
    name: str, value: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ways: tuple[Callable[..., Any], ...] = (
        LocalSettings,
        lambda **said: BuildSettings(kv_dir="kv", **said),
        ServerSettings,
        lambda **said: open_engine("tiny", **said),
        lambda **said: ChatKVCache(model="tiny", **said),
        lambda **said: KVCacheLLM(model_name="tiny", **said),
    )
    said = []
    for way in ways:
        with pytest.raises(InvalidInputError) as caught:
            way(**{name: value})
        said.append(str(caught.value))
    file = tmp_path / "server.yaml"
    file.write_text(f"model: tiny\n{name}: {value}\n")
    flag = (f"--{name.replace('_', '-')}", str(value))
    (tmp_path / "c.jsonl").write_text('{"text": "a"}\n')
    build = ["build", "tiny", str(tmp_path / "c.jsonl"), "--kv-dir", str(tmp_path / "kv")]
    for line in (["serve", "--config", str(file)], ["serve", "tiny", *flag], [*build, *flag]):
        assert main(line) == 2
        said.append(capsys.readouterr().err.strip().removeprefix("kvcache-rag: error: "))
    assert said[0].startswith(f"{name} cannot be used: ")
    assert all(one.startswith(f"{name} cannot be used: ") for one in said)
    if not isinstance(value, int):  # a text on a command line
        assert len(set(said)) == (2 if name == "backend" else 1), said  # a server has one more
    assert "\n" not in "".join(said)


@pytest.mark.parametrize(
    ("said", "count"),
    [
        ("10GB", 10**10),
        ("1.5 GiB", 3 << 29),
        ("500mb", 5 * 10**8),
        ("8MiB", 8 << 20),
        ("4k", 4000),
        ("4096", 4096),
        ("7 bytes", 7),
        ("0.1kB", 100),
    ],
)
def test_bytes_are_said_as_people_say_them(said: str, count: int, tmp_path: Path) -> None:
    assert StoreSettings(kv_max_bytes=said).kv_max_bytes == count
    assert ServerSettings(memory_bytes=said, max_document_bytes=said).memory_bytes == count
    file = tmp_path / "server.yaml"
    file.write_text(f"kv_max_bytes: {said}\n")
    assert ServerSettings.from_source(None, file).kv_max_bytes == count


@pytest.mark.parametrize("said", ["ten", "10XB", "GB", "-1GB", "1iB", "1e9", "0", "0.1"])
def test_what_is_no_number_of_bytes_is_refused(said: str) -> None:
    with pytest.raises(InvalidInputError, match=r"^kv_max_bytes cannot be used: must be "):
        StoreSettings(kv_max_bytes=said)


@pytest.mark.parametrize("name", ["port", "max_batch", "context_window", "kv_ttl", "grace"])
def test_a_truth_is_no_number(name: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=f"^{name} cannot be used: must not be True$"):
        ServerSettings(model="tiny", **{name: True})
    file = tmp_path / "server.yaml"
    file.write_text(f"model: tiny\n{name}: true\n")
    with pytest.raises(InvalidInputError, match=f"^{name} cannot be used: must not be True$"):
        ServerSettings.from_source(None, file)


def test_an_unknown_setting_is_one_sentence() -> None:
    with pytest.raises(InvalidInputError, match=r"kv_dri is no setting of .*did you mean kv_dir"):
        LocalSettings(kv_dri="kv")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("s.yaml", "kv_dri: kv\n", "kv_dri is no setting of {}; did you mean kv_dir?"),
        ("s.toml", 'kv_dri = "kv"\n', "kv_dri is no setting of {}; did you mean kv_dir?"),
        ("s.json", '{"kv_dri": "kv"}', "kv_dri is no setting of {}; did you mean kv_dir?"),
        ("b.yaml", "a: [\n", "{} cannot be read as names and values of settings"),
        ("l.yaml", "- a\n", "{} cannot be read as names and values of settings"),
        ("b.json", "{", "{} cannot be read as names and values of settings"),
        ("text.ini", "", "name a .yaml, .toml or .json"),
        ("none/none.yaml", None, "name a .yaml, .toml or .json"),
    ],
)
def test_a_file_of_no_use_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: str | None, message: str
) -> None:
    file = tmp_path / name
    if text is not None:
        file.write_text(text)
    assert main(["serve", "tiny", "--config", str(file)]) == 2
    said = capsys.readouterr().err
    assert message.format(file) in said
    assert said.count("\n") == 1


def test_options_win_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text("model: tiny\nkv_dir: kv\nport: 9\nmax_documents: 3\nallow_anonymous: true\n")
    said = argparse.Namespace(port="0", allow_anonymous=False)
    found = ServerSettings.from_source(said, file)
    assert (found.model, found.kv_dir, found.max_documents) == ("tiny", "kv", 3)
    assert (found.port, found.allow_anonymous, found.max_batch) == (0, False, 8)


def test_help_of_all_commands_loads_no_settings() -> None:
    code = (
        "import sys; from kvcache_rag.cli import main; main(['--help']);"
        "sys.exit(str({'pydantic', 'pydantic_settings', 'torch'} & sys.modules.keys() or ''))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == ""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The home folder; the working folder is another one, which is empty."""
    home, here = tmp_path / "home", tmp_path / "here"
    home.mkdir()
    here.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(here)
    return home


@pytest.mark.parametrize(
    "way",
    [
        *(LocalSettings, ServerSettings, BuildSettings),
        lambda **said: ChatKVCache(model="tiny", **said),
        lambda **said: KVCacheLLM(model_name="tiny", **said),
    ],
    ids=["local", "server", "build", "langchain", "llama-index"],
)
def test_a_setting_may_begin_with_the_home_folder(home: Path, way: Callable[..., Any]) -> None:
    for name in ("kv_dir", "signing_key", "gate", "auxiliary", "adapter"):
        if name not in ("gate", "auxiliary") or way is not BuildSettings:
            for said in ("~/x", Path("~/x")):
                place: dict[str, Any] = {"kv_dir": "kv", name: said}
                assert getattr(way(**place), name) == f"{home}/x", name


def test_whatever_opens_a_path_knows_the_home_folder(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (home / "texts").mkdir()
    (home / "texts" / "a.txt").write_text("The cat sat on the mat.")
    (home / "c.jsonl").write_text('{"text": "a"}\n')
    (home / "server.yaml").write_text("kv_dir: ~/kv\napi_keys: ~/keys\n")
    (home / "prompt_template.json").write_text('{"system": "Read this.\\n"}')
    (home / "key").write_text("k" * 40)
    (home / "key").chmod(0o600)

    assert LocalSettings(template="~").template == PromptTemplate(system="Read this.\n")
    served = ServerSettings.from_source(None, "~/server.yaml")
    assert (served.kv_dir, served.api_keys) == (f"{home}/kv", home / "keys")
    front = ServerSettings(backend="vllm", base_url=("http://a",), backend_key="~/k")
    assert front.backend_key == f"{home}/k"
    assert DiskStore("~/kv", signing_key=Path("~/key")).root == home / "kv"
    llm = KVCacheLLM(model_name="tiny")
    llm.keep_in("~/kv")
    assert llm.kv_dir == f"{home}/kv"
    assert KVCacheVectorStore.from_params("docs", persist_dir="~/lc", llm=llm).client.count() == 0
    KVCacheChroma("docs", persist_directory="~/lc")
    for name, kind in (("~/none", "model folder"), ("~nobody-here/m.gguf", "GGUF file")):
        with pytest.raises(InvalidInputError, match=f"there is no {kind} {name}; check the path"):
            Engine.from_pretrained(name)

    here_too = ("--embed=hash", "--chroma=~/chroma", "--kv-dir=~/kv")
    assert main(["ingest", "~/texts", "--model=tiny", *here_too]) == 0
    assert main(["build", "tiny", "~/c.jsonl", "--kv-dir=~/kv", "--report=~/built.json"]) == 0
    assert main(["store", "ls", "~/kv"]) == 0
    assert main(["doctor", "--kv-dir=~/kv"]) == 0
    assert main(["serve", "--api-keys=~/keys", "--new-key=a"]) == 0
    capsys.readouterr()
    assert main(["bench", "tiny", "--corpus=~/none"]) == 2
    assert str(home) in capsys.readouterr().err
    assert {*os.listdir(home)} >= {"lc", "chroma", "kv", "built.json", "keys"}
    assert os.listdir(Path.cwd()) == []
