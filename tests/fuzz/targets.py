"""What is fuzzed: functions of bytes, each with the law that it keeps for all of them.

A target is a module beside this one.  Its `check(data)` runs the code on one input, raises when the
law is broken, and says whether the input was accepted; its `seeds()` are inputs that are accepted,
made by the code of today.  Further inputs, kept because something was once wrong with them or
because they reach far, lie in `corpus/NAME/`.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

CORPUS: Final = Path(__file__).parent / "corpus"


@dataclass(frozen=True)
class Target:
    """One function of bytes.

    Attributes:
        name: Of its module, and of its folder of kept inputs.
        instrumented: Modules whose branches guide the search.
        tokens: Words of its language, which mutations insert.
        longest: Bytes of an input, at most.
    """

    name: str
    instrumented: tuple[str, ...]
    tokens: tuple[bytes, ...]
    longest: int

    def load(self) -> tuple[Callable[[bytes], bool], tuple[bytes, ...]]:
        """Its `check` and its seeds."""
        module = importlib.import_module(f"tests.fuzz.{self.name}")
        return module.check, tuple(cast("Sequence[bytes]", module.seeds()))

    def kept(self) -> dict[str, bytes]:
        """Kept inputs by the names of their files."""
        files = sorted((CORPUS / self.name).iterdir())
        return {path.name: path.read_bytes() for path in files}


_JSON: Final = (
    *(
        b"{",
        b"}",
        b"[",
        b"]",
        b'"',
        b":",
        b",",
        b"\\",
        b"\\u",
        b"\\ud800",
        b'\\"',
        b"null",
        b"true",
    ),
    *(b"false", b"0", b"-1", b"1e400", b"NaN", b"Infinity", b"[[[[[[[[", b"]]]]]]]]", b"{}", b"[]"),
    *(
        b"\xef\xbb\xbf",
        b"\xff\xfe",
        b"\xfe\xff",
        b"\x00",
        b"\xed\xa0\x80",
        b"\r\n",
        b'{"":',
        b'"":',
    ),
)

_HEADER: Final = (
    *(b"__metadata__", b"format", b"key", b"codec", b"start", b"pad", b"provenance", b"xxh3_128"),
    *(b"tokens", b"kv", b"dtype", b"shape", b"data_offsets", b"I32", b"BF16", b"native"),
    *(b"\xf8\x0f\x00\x00\x00\x00\x00\x00", b"\xff\xff\xff\xff\xff\xff\xff\xff"),
)

_KEYS: Final = (
    *(
        b"sha256:",
        b"SHA256:",
        b"#",
        b"\n",
        b"\r\n",
        b"\r",
        b"\t",
        b" ",
        b"@metrics",
        b"@",
        b"\xc2\x85",
    ),
    *(b"\xe2\x80\xa8", b"\xef\xbb\xbf", b"\x1c", b"\xc2\xa0", b"0123456789abcdef", b"acme"),
    *(b"web", b"0" * 64, b"A" * 64, b"a" * 63, b"-", b".", b"_", b"\xff", b"\x00"),
)

_CHAT: Final = tuple(
    f'"{word}"'.encode()
    for word in (
        *("model", "tiny", "messages", "role", "user", "system", "developer", "assistant"),
        *("content", "type", "text", "documents", "id", "title", "data", "stream", "max_tokens"),
        *("stream_options", "include_usage", "kvcache", "policy", "ratio", "cacheblend", "reuse"),
        *("temperature", "top_p", "top_k", "seed", "stop", "n", "tools", "tool_choice", "none"),
        *("response_format", "logprobs", "logit_bias", "metadata", "user", "refusal"),
        *("max_completion_tokens", "frequency_penalty", "functions", "function_call", "full"),
    )
)

TARGETS: Final = {
    target.name: target
    for target in (
        Target(
            "header",
            ("kvcache_rag.stores.file", "kvcache_rag.stores.runs", "kvcache_rag.stores.signing"),
            (*_HEADER, *_JSON),
            8192,
        ),
        Target("keys", ("kvcache_rag_server.keys",), _KEYS, 2048),
        Target("scanner", ("kvcache_rag_server.bodies", "tests.fuzz.scanner"), _JSON, 1024),
        Target("schema", ("kvcache_rag_server",), (*_CHAT, *_JSON), 2048),
    )
}
