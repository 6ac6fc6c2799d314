"""GGUF files and adapters, as LangChain's users name them."""

from __future__ import annotations

from pathlib import Path

import pytest
from peft import LoraConfig, get_peft_model

from kvcache_rag import Engine, InvalidInputError
from langchain_kvcache_rag import ChatKVCache

pytest.importorskip("gguf", reason="pip install 'kvcache-rag[gguf]'")

from gguf_files import write_gguf


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_the_chat_model_takes_a_gguf_file_and_an_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = write_gguf(tmp_path / "model.gguf")
    plain = Engine.from_pretrained(path, weight_format="plain")  # as PEFT needs it
    spec = plain.spec
    assert ChatKVCache(model=str(path)).engine.spec == spec
    named = ChatKVCache(model=str(tmp_path), model_kwargs={"gguf_file": path.name})
    assert named.engine.spec == spec
    settings = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    get_peft_model(plain.model, settings).save_pretrained(str(tmp_path / "adapter"))
    adapted = ChatKVCache(model=str(path), adapter=tmp_path / "adapter", max_tokens=2)
    assert adapted.engine.spec != spec
    assert adapted.invoke("who?").content
    with pytest.raises(InvalidInputError, match="adapter belong"):
        ChatKVCache(engine=plain, adapter=tmp_path / "adapter")


def test_the_name_of_an_adapter_stays_one_and_a_path_is_a_folder() -> None:
    assert ChatKVCache(model="smollm2", adapter="block").adapter == "block"
    assert ChatKVCache(model="smollm2", adapter="./block").adapter == "./block"
    by_path = ChatKVCache(model="smollm2", adapter=Path("block"))
    assert by_path.adapter == str(Path.cwd() / "block")
