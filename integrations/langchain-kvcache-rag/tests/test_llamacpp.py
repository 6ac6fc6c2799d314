"""LangChain over a GGUF file in llama.cpp."""

from __future__ import annotations

import llama_smollm2 as llama
from contracts_frameworks import LlamaCppContract
from langchain_framework import LangChain

from kvcache_rag.integration import answer_state
from kvcache_rag.policies import policy_by_name
from langchain_kvcache_rag import ChatKVCache

llama.needed()


class TestLlamaCpp(LlamaCppContract):
    framework = LangChain()

    def test_the_backend_is_part_of_what_answers_are_kept_by(self, llm: ChatKVCache) -> None:
        string = llm._get_llm_string()
        assert string == llm._get_llm_string()
        other = ChatKVCache(model=llama.NAME, engine=llm.engine)
        assert string != other._get_llm_string()  # its own engine
        same, another = (
            answer_state(llama.engine(store=llm.engine.store, policy=policy))
            for policy in (self.policy, policy_by_name("reuse"))
        )
        assert answer_state(llm.engine) == same != another
        assert llm._identifying_params["backend"] == llama.BACKEND
        assert "backend" not in ChatKVCache(model="tiny")._identifying_params
