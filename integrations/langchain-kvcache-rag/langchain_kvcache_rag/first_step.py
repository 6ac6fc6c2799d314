"""The first step of a chain, which alone gets the keywords of the chain's call."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from langchain_core.runnables import RunnableParallel

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Mapping

    from langchain_core.runnables import RunnableConfig


class FirstStep(RunnableParallel[Any]):
    """`{"context": retriever, ...}` before `KVCacheRAG`, which tells of keywords that get lost."""

    def __init__(self, steps: Mapping[str, Any]) -> None:
        super().__init__(steps)

    def invoke(
        self, input: Any, config: RunnableConfig | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        _tell(kwargs)
        return super().invoke(input, config)

    async def ainvoke(
        self, input: Any, config: RunnableConfig | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        _tell(kwargs)
        return await super().ainvoke(input, config)

    def transform(
        self, input: Iterator[Any], config: RunnableConfig | None = None, **kwargs: Any
    ) -> Iterator[dict[str, Any]]:
        _tell(kwargs)
        return super().transform(input, config)

    def atransform(
        self, input: AsyncIterator[Any], config: RunnableConfig | None = None, **kwargs: Any
    ) -> AsyncIterator[dict[str, Any]]:
        _tell(kwargs)
        return super().atransform(input, config)


def _tell(keywords: Mapping[str, Any]) -> None:
    if keywords:
        names = " and ".join(f"{name}=" for name in keywords)
        warnings.warn(
            "LangChain hands the keywords of a chain's call to its first step alone, so that "
            f'{names} get lost; give a policy as config={{"configurable": {{"policy": ...}}}}, and '
            "others to the model, as in llm.bind(max_tokens=...)",
            stacklevel=3,
        )
