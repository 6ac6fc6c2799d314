"""Models as users have them: GGUF files, a package's model by its name, PEFT folders."""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import os
import shutil
import stat
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from zoo import build, byte_tokenizer

from kvcache_rag import Engine, InvalidInputError, Reuse
from kvcache_rag.errors import MissingExtraError
from kvcache_rag.integration import open_engine
from kvcache_rag.models import gguf as files
from kvcache_rag.models import kept
from kvcache_rag.models.kept import cache_folder, file_digest, keep
from kvcache_rag.models.model_names import PACKAGED, PackagedModel
from kvcache_rag.models.pretrained import load, own_dtype
from kvcache_rag.models.weights import unwrapped, weights_digest
from kvcache_rag.settings import EngineSettings

pytest.importorskip("gguf", reason="pip install 'kvcache-rag[gguf]'")

from gguf_files import write_gguf

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of its own for every test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return cache_folder()


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "model.gguf")


def ask(engine: Engine) -> str:
    return engine.generate("who?", ["abc", "de"], max_new_tokens=4).text


# ---------------------------------------------------------------------- loading
@pytest.mark.parametrize(
    "opened",
    [
        lambda path: Engine.from_pretrained(path, device="cpu"),
        lambda path: Engine.from_pretrained(str(path), device="cpu"),
        lambda path: Engine.from_pretrained(path.parent, gguf_file=path.name, device="cpu"),
        lambda path: open_engine(str(path), device_map="cpu"),
        lambda path: open_engine(str(path.parent), model_kwargs={"gguf_file": path.name}),
        lambda path: EngineSettings(model=str(path)).open_engine(),
    ],
    ids=["path", "str", "gguf_file", "open_engine", "model_kwargs", "settings"],
)
def test_every_way_to_name_a_gguf_file_opens_the_same_model(written: Path, opened: Any) -> None:
    engine = opened(written)
    assert engine.model.dtype == files.quantised_dtype()
    assert engine.keys(["abc"]) == Engine.from_pretrained(written).keys(["abc"])
    assert ask(engine) == ask(Engine.from_pretrained(written))


def test_what_is_kept_is_what_transformers_makes_of_the_file(written: Path) -> None:
    import transformers

    unpacked = {}
    if hasattr(transformers, "GgufConfig"):  # before it, weights were never kept packed
        unpacked["quantization_config"] = transformers.GgufConfig(dequantize=True)
    plain = transformers.AutoModelForCausalLM.from_pretrained(
        str(written.parent), gguf_file=written.name, dtype=torch.float32, **unpacked
    )
    found = Engine.from_pretrained(written, dtype="float32").model
    expected = plain.state_dict()
    assert expected.keys() == found.state_dict().keys()
    assert all(torch.equal(value, expected[name]) for name, value in found.state_dict().items())
    assert not hasattr(found.config, "quantization_config"), "its weights are not quantised now"


def of_model(cache: Path) -> Path:
    """The folder that holds weights; the tokenizer has one of its own."""
    (found,) = (path.parent for path in cache.glob("*/model.safetensors"))
    return found


def test_the_second_load_reads_what_the_first_one_kept(
    written: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(files, "multiplies_bfloat16", lambda: True)
    with caplog.at_level(logging.WARNING):
        first = Engine.from_pretrained(written)
    assert "82,880 weights are dequantised to bfloat16: 0.2 MB in memory" in caplog.text
    caplog.clear()

    def never(*_: object) -> None:
        raise AssertionError("dequantised again")

    monkeypatch.setattr(files, "_dequantised", never)
    with caplog.at_level(logging.WARNING):
        second = Engine.from_pretrained(written)
    assert not caplog.text
    assert second.spec == first.spec
    kept = of_model(cache)
    assert {stat.S_IMODE(path.stat().st_mode) for path in (cache, kept)} == {0o700}


@pytest.mark.parametrize(
    ("is_fast", "dtype"), [(True, torch.bfloat16), (False, torch.float32)], ids=["fast", "slow"]
)
def test_quantised_weights_become_what_the_machine_multiplies(
    written: Path, is_fast: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(files, "multiplies_bfloat16", lambda: is_fast)
    assert Engine.from_pretrained(written, device="cpu").model.dtype == dtype
    assert files.GgufHeader.read(written).dtype == dtype


def test_who_comes_second_waits_for_the_first(
    written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, made = files._dequantised, []

    def counted(*given: Any) -> Any:
        made.append(given)
        return real(*given)

    monkeypatch.setattr(files, "_dequantised", counted)
    kept = files._kept(written, torch.float32)
    write = partial(files._write, written, files.GgufHeader.read(written), torch.float32, kept)
    with ThreadPoolExecutor(3) as pool:  # as processes would, without the lock of `load`
        assert all(pool.map(lambda _: keep(kept, write), range(3)))
    assert len(made) == 1
    assert kept.is_dir()


def test_models_that_are_loaded_by_several_threads_are_the_same(written: Path) -> None:
    """transformers' own loading is not safe: without our lock 3 of 48 had other weights."""

    def digest(_: int) -> str:
        model, _, _ = load(written, dtype="auto", device="cpu", options={})
        return weights_digest(model)

    with ThreadPoolExecutor(6) as pool:
        assert len(set(pool.map(digest, range(24)))) == 1


WEIGHTS = "model.safetensors"
SPOILT: dict[str, Callable[[Path], object]] = {
    "cut weights": lambda kept: os.truncate(kept / WEIGHTS, 5000),
    "other weights": lambda kept: (kept / WEIGHTS).write_bytes(
        bytes(byte ^ (place > 5000) for place, byte in enumerate((kept / WEIGHTS).read_bytes()))
    ),
    "no weights": lambda kept: (kept / WEIGHTS).unlink(),
    "config": lambda kept: (kept / "config.json").write_text("["),
    "another config": lambda kept: (kept / "config.json").write_text(
        (kept / "config.json").read_text().replace("1e-05", "1e-01")
    ),
    "no config": lambda kept: (kept / "config.json").unlink(),
    "a further file": lambda kept: (kept / "adapter_config.json").write_text("{}"),
    "no manifest": lambda kept: (kept / "kvcache-rag.json").unlink(),
    "no list": lambda kept: (kept / "kvcache-rag.json").write_text("[1]"),
    "all": shutil.rmtree,
}


@pytest.mark.parametrize("spoilt", SPOILT)
def test_a_damaged_or_changed_kept_checkpoint_is_made_anew(
    written: Path, cache: Path, spoilt: str
) -> None:
    first = Engine.from_pretrained(written)
    expected = ask(first)
    kept = of_model(cache)
    names = sorted(path.name for path in kept.iterdir())
    SPOILT[spoilt](kept)
    again = Engine.from_pretrained(written)
    assert (again.spec, ask(again)) == (first.spec, expected)
    assert sorted(path.name for path in kept.iterdir()) == names
    before = (kept / WEIGHTS).stat().st_mtime_ns
    Engine.from_pretrained(written)
    assert (kept / WEIGHTS).stat().st_mtime_ns == before, "once is enough"


def test_a_mistake_of_the_caller_leaves_what_is_kept(
    written: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Engine.from_pretrained(written)
    before = (of_model(cache) / WEIGHTS).stat().st_mtime_ns
    with caplog.at_level(logging.WARNING), pytest.raises(InvalidInputError, match="no_such"):
        Engine.from_pretrained(written, model_kwargs={"attn_implementation": "no_such"})
    assert (of_model(cache) / WEIGHTS).stat().st_mtime_ns == before
    assert "damaged" not in caplog.text


def test_a_damaged_kept_tokenizer_is_made_anew_once(written: Path, cache: Path) -> None:
    first = Engine.from_pretrained(written)
    (kept,) = cache.glob("*-tokenizer")
    (kept / "tokenizer.json").write_text("{")
    assert ask(Engine.from_pretrained(written)) == ask(first)
    before = (kept / "tokenizer.json").stat().st_mtime_ns
    Engine.from_pretrained(written)
    assert (kept / "tokenizer.json").stat().st_mtime_ns == before


def test_a_tokenizer_that_lies_beside_a_file_is_not_another_ones(
    written: Path, tmp_path: Path
) -> None:
    own = Engine.from_pretrained(written).tokenizer
    other = tmp_path / "other"
    other.mkdir()
    shutil.copy(written, other / written.name)
    own.add_special_tokens({"additional_special_tokens": ["<|beside|>"]})
    own.save_pretrained(other)
    assert "<|beside|>" in Engine.from_pretrained(other / written.name).tokenizer.get_vocab()
    assert "<|beside|>" not in Engine.from_pretrained(written).tokenizer.get_vocab()


def test_a_file_that_changes_while_it_is_read_is_not_kept_as_the_old_one(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path, real = write_gguf(tmp_path / "model.gguf"), files._dequantised
    first = files._kept(path, torch.float32)

    def replaced(*given: Any) -> Any:
        write_gguf(path, seed=1)
        return real(*given)

    monkeypatch.setattr(files, "_dequantised", replaced)
    with caplog.at_level(logging.WARNING):
        Engine.from_pretrained(path, dtype=torch.float32)
    assert "was changed meanwhile" in caplog.text
    assert not first.exists()
    assert not [*cache.glob("*/model.safetensors")]


@pytest.mark.parametrize("lacking", ["blk.1.ffn_down", "token_embd"])
def test_a_file_without_some_weights_is_refused(tmp_path: Path, cache: Path, lacking: str) -> None:
    path = write_gguf(tmp_path / "part.gguf", lacking=[lacking])
    with pytest.raises(InvalidInputError, match="lacks 1 weights of its model, such as model"):
        Engine.from_pretrained(path)
    assert not [*cache.glob("*/model.safetensors")]


def test_what_killed_processes_left_is_removed(written: Path, cache: Path) -> None:
    kept = files._kept(written, torch.float32)
    cache.mkdir(parents=True)
    own, others, old = (cache / name for name in (f".{kept.name}-abc", ".other-abc", ".old-abc"))
    for folder in (own, others, old):
        folder.mkdir()
        (folder / WEIGHTS).write_bytes(b"half")
    os.utime(old, (0, 0))
    Engine.from_pretrained(written, dtype=torch.float32)
    assert [path.exists() for path in (kept, own, others, old)] == [True, False, True, False]


def test_what_was_not_used_for_longest_goes_first(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [write_gguf(tmp_path / f"{seed}.gguf", seed=seed) for seed in range(3)]
    folders = [files._kept(path, torch.float32) for path in paths]
    for path, folder in zip(paths[:2], folders[:2], strict=True):
        load(path, dtype=torch.float32, device="cpu", options={}, tokenizer=object())
        os.utime(folder, (0, 0))
    load(paths[0], dtype=torch.float32, device="cpu", options={}, tokenizer=object())  # used again
    whole = sum(path.stat().st_size for path in folders[0].iterdir())
    monkeypatch.setattr(kept, "ALL_BYTES", 2 * whole + 1000)
    load(paths[2], dtype=torch.float32, device="cpu", options={}, tokenizer=object())
    assert [folder.exists() for folder in folders] == [True, False, True]


def test_what_is_kept_stays_where_others_remove_old_ones_at_once(
    written: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def gone(_: Path) -> None:
        raise FileNotFoundError

    monkeypatch.setattr(kept, "_drop_oldest", gone)
    with caplog.at_level(logging.WARNING):
        Engine.from_pretrained(written)
    assert caplog.text.count("are dequantised") == 1
    assert "cannot be kept" not in caplog.text


def test_a_cache_that_may_not_be_looked_into_fails_nothing(
    written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = Engine.from_pretrained(written).spec

    def refused(*_: object, **__: object) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(kept, "_changed", refused)
    monkeypatch.setattr(kept, "FileLock", refused)
    assert Engine.from_pretrained(written).spec == spec


def test_a_cache_that_cannot_be_written_fails_nothing(
    written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = Engine.from_pretrained(written).spec
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert Engine.from_pretrained(written).spec == spec


@pytest.mark.parametrize("scarce", ["KEPT_BYTES", "disk"])
def test_a_large_one_is_not_kept(
    written: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, scarce: str
) -> None:
    if scarce == "disk":
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=100_000))
    else:
        monkeypatch.setattr(kept, scarce, 1000)
    assert ask(Engine.from_pretrained(written))
    assert not [*cache.glob("*/model.safetensors")]


def test_a_changed_file_is_another_model(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf")
    first = Engine.from_pretrained(path).spec
    before = path.stat()
    write_gguf(path, seed=1)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size
    assert Engine.from_pretrained(path).spec != first


def test_unquantised_weights_keep_their_dtype(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "plain.gguf", quantised=False)
    assert Engine.from_pretrained(path).model.dtype == torch.float32
    assert own_dtype(str(path)) == torch.float32
    assert Engine.from_pretrained(path, dtype=torch.bfloat16).model.dtype == torch.bfloat16


def test_a_given_tokenizer_serves_where_the_model_has_none(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", tokenizer=False)
    with pytest.raises(InvalidInputError, match="cannot load the model"):
        Engine.from_pretrained(path)
    other = write_gguf(tmp_path / "other.gguf")
    by_name = Engine.from_pretrained(path, tokenizer=str(other))
    assert ask(by_name) == ask(Engine.from_pretrained(path, tokenizer=by_name.tokenizer))
    folder = tmp_path / "plain"
    build("qwen2").save_pretrained(folder)
    byte_tokenizer().save_pretrained(tmp_path / "tokenizer")
    assert ask(open_engine(str(folder), str(tmp_path / "tokenizer")))


def test_a_file_of_a_hub_repository_is_taken_from_its_cache(written: Path, tmp_path: Path) -> None:
    repository = tmp_path / "hub" / "models--someone--small-GGUF"
    snapshot = repository / "snapshots" / ("a" * 40)
    for folder in (repository / "refs", snapshot):
        folder.mkdir(parents=True)
    (repository / "refs" / "main").write_text("a" * 40)
    shutil.copy(written, snapshot / "small.gguf")
    options = {"cache_dir": str(tmp_path / "hub"), "local_files_only": True}
    engine = Engine.from_pretrained(
        "someone/small-GGUF", gguf_file="small.gguf", model_kwargs=options
    )
    assert engine.spec == Engine.from_pretrained(written).spec


# ---------------------------------------------------------------------- mistakes
def header(*parts: bytes, tensors: int = 0, metadata: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, metadata) + b"".join(parts)


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


HOSTILE: dict[str, bytes] = {
    "many axes": header(
        text(b"t"), struct.pack("<I", 400_000), struct.pack("<Q", 2**63) * 400_000, tensors=1
    ),
    "axes without end": header(text(b"t"), b"\xff" * 64, tensors=1),
    "nested arrays": header(
        text(b"a"), struct.pack("<I", 9), struct.pack("<IQ", 9, 1) * 100_000, metadata=1
    ),
    "no alignment": header(text(b"general.alignment"), struct.pack("<II", 4, 0), metadata=1),
    "an alignment that is a text": header(
        text(b"general.alignment"), struct.pack("<I", 8), text(b"x"), metadata=1
    ),
    "an alignment that is a list": header(
        text(b"general.alignment"), struct.pack("<IIQ", 9, 4, 0), metadata=1
    ),
    "a text without end": header(struct.pack("<Q", 2**62), metadata=1),
    "a text of four gigabytes": header(struct.pack("<Q", 2**32), metadata=1),
    "a list without end": header(text(b"a"), struct.pack("<IIQ", 9, 4, 2**62), metadata=1),
    "a list of texts without end": header(
        text(b"a"), struct.pack("<IIQ", 9, 8, 2**62), b"\0" * 3_000_000, metadata=1
    ),
    "fields without end": header(b"\0" * 3_000_000, metadata=2**62),
    "tensors without end": header(b"\0" * 3_000_000, tensors=2**62),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_header_is_refused_in_a_time_that_its_length_bounds(
    tmp_path: Path, name: str
) -> None:
    path = tmp_path / "hostile.gguf"
    path.write_bytes(HOSTILE[name])
    with pytest.raises(InvalidInputError, match=r"hostile\.gguf (was cut|is no whole GGUF)"):
        Engine.from_pretrained(path)


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(texts=st.lists(st.binary(max_size=30), max_size=20), piece=st.integers(8, 64))
def test_law_what_stands_behind_a_list_of_texts_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, texts: list[bytes], piece: int
) -> None:
    monkeypatch.setattr(files, "_PIECE", piece)
    path = tmp_path / "texts.gguf"
    before = text(b"a") + struct.pack("<IIQ", 9, 8, len(texts)) + b"".join(map(text, texts))
    behind = text(b"general.architecture") + struct.pack("<I", 8) + text(b"llama")
    path.write_bytes(header(before, behind, bytes(32), metadata=2))  # aligned
    files._header.cache_clear()  # files of one length within one tick of the clock
    found = files.GgufHeader.read(path)
    first = len(header())
    ends = first + len(before), first + len(before) + len(behind)
    assert dict(found.metadata) == {"a": (first, ends[0]), "general.architecture": ends}
    assert found.architecture == "llama"


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_law_a_header_with_changed_bytes_is_read_or_refused(
    written: Path, tmp_path: Path, data: st.DataObject
) -> None:
    whole = bytearray(written.read_bytes()[:6000])
    for _ in range(data.draw(st.integers(1, 6))):
        whole[data.draw(st.integers(4, 4000))] = data.draw(st.integers(0, 255))
    path = tmp_path / "changed.gguf"
    path.write_bytes(whole + written.read_bytes()[6000:])
    with contextlib.suppress(InvalidInputError):
        files.GgufHeader.read(path)


@pytest.mark.parametrize("left", [3, 40, 2000, -1000, -1])
def test_a_cut_file_is_told_in_one_sentence(written: Path, tmp_path: Path, left: int) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(written.read_bytes()[:left])
    with pytest.raises(InvalidInputError, match=r"cut\.gguf (was cut|is no whole GGUF).*download"):
        Engine.from_pretrained(path)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("text.gguf", {}, "no whole GGUF file"),
        ("none.gguf", {}, "there is no GGUF file"),
        (".", {"gguf_file": "x.gguf"}, r"there is no GGUF file x\.gguf in"),
    ],
)
def test_a_file_that_is_none_or_is_not_there(
    tmp_path: Path, name: str, options: dict[str, Any], words: str
) -> None:
    (tmp_path / "text.gguf").write_text("no model" * 100)
    with pytest.raises(InvalidInputError, match=words):
        Engine.from_pretrained(tmp_path / name, **options)


def test_without_the_package_the_extra_is_named(
    written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "gguf.constants", None)
    with pytest.raises(
        MissingExtraError, match=r"gguf is not .*: pip install 'kvcache-rag\[gguf\]'"
    ):
        Engine.from_pretrained(written)


# ---------------------------------------------------------------------- a package's model
def packaged(path: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """Let `smollm2` be the file of an installed package of ours."""
    values = {"package": "random-model", "version": "1.0", "file": path.name, **changes}
    values.setdefault("sha256", file_digest(path))
    info = path.parent / "random_model-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: random-model\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(str(path.parent))
    monkeypatch.setitem(PACKAGED, "smollm2", PackagedModel(**values))


def test_the_model_of_a_package_loads_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(tmp_path / "model.gguf")
    packaged(path, monkeypatch)
    assert Engine.from_pretrained("smollm2").spec == Engine.from_pretrained(path).spec
    assert open_engine("smollm2").spec == Engine.from_pretrained(path).spec


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"version": "2.0"}, r"--no-deps random-model==\d\.0 --force"),
        ({"sha256": "0" * 64}, r"--no-deps random-model==\d\.0 --force"),
        ({"file": "none.gguf"}, r"--no-deps random-model==\d\.0 --force"),
        (
            {"package": "not-there"},
            "^the model 'smollm2' comes with a package that is not installed: "
            r"pip install --no-deps not-there==1\.0$",
        ),
    ],
    ids=["version", "digest", "file", "missing"],
)
def test_what_no_package_has_is_refused_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: dict[str, str], words: str
) -> None:
    packaged(write_gguf(tmp_path / "model.gguf"), monkeypatch, **changed)
    with pytest.raises(InvalidInputError, match=words):
        Engine.from_pretrained("smollm2")


def test_the_version_is_the_one_that_the_project_installs() -> None:
    root = Path(__file__).resolve().parent.parent
    pinned = (root / "constraints.txt").read_text(encoding="utf-8")
    model = PACKAGED["smollm2"]
    assert f"\n{model.package}=={model.version} " in pinned
    assert model.install in (root / "pyproject.toml").read_text(encoding="utf-8")


# ---------------------------------------------------------------------- the real one
def test_smollm2_answers_and_follows_its_weights() -> None:
    try:
        importlib.metadata.version(PACKAGED["smollm2"].package)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(PACKAGED["smollm2"].install)
    bare: dict[str, Any] = {"adapter": "none", "device": "cpu", "policy": Reuse()}
    engine = Engine.from_pretrained("smollm2", weight_format="plain", **bare)
    started = time.perf_counter()
    assert Engine.from_pretrained("smollm2", **bare).spec == engine.spec
    assert time.perf_counter() - started < 30, "it was not kept"
    texts = ["Paris is the capital of France.", "Rome is the capital of Italy."]
    question = "What is the capital of France?"
    assert "Paris" in engine.generate(question, texts, max_new_tokens=8).text
    assert engine.generate(question, texts, max_new_tokens=1).metrics.reused_tokens >= 20
    model: Any = unwrapped(engine.model)
    with torch.no_grad():
        model.model.layers[3].self_attn.q_proj.weight.mul_(1.01)
    assert engine.generate(question, texts, max_new_tokens=1).metrics.reused_tokens == 0
