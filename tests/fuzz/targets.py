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
    """One function of bytes."""

    name: str  # of its module, and of its folder of kept inputs
    instrumented: tuple[str, ...]  # modules whose branches guide the search
    tokens: tuple[bytes, ...]  # words of its language, which mutations insert
    longest: int  # bytes of an input, at most

    def load(self) -> tuple[Callable[[bytes], bool], tuple[bytes, ...]]:
        """Its `check` and its seeds."""
        module = importlib.import_module(f"tests.fuzz.{self.name}")
        return module.check, tuple(cast("Sequence[bytes]", module.seeds()))

    def kept(self) -> dict[str, bytes]:
        """Kept inputs by the names of their files."""
        files = sorted((CORPUS / self.name).iterdir())
        return {path.name: path.read_bytes() for path in files}


_JSON: Final = (
    *rb'{ } [ ] " : , \ \u \ud800 \" null true false 0 -1 1e400 NaN Infinity'.split(),
    *rb'[[[[[[[[ ]]]]]]]] {} [] {"": "":'.split(),
    *(b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff", b"\x00", b"\xed\xa0\x80", b"\r\n"),
)

_HEADER: Final = (
    *b"__metadata__ format key codec start pad provenance xxh3_128".split(),
    *b"tokens kv dtype shape data_offsets I32 BF16 native".split(),
    *(b"\xf8\x0f\x00\x00\x00\x00\x00\x00", b"\xff\xff\xff\xff\xff\xff\xff\xff"),
)

_KEYS: Final = (
    *b"sha256: SHA256: # @metrics @ 0123456789abcdef acme web - . _".split(),
    *(b"\n", b"\r\n", b"\r", b"\t", b" ", b"\xc2\x85", b"\xe2\x80\xa8", b"\xef\xbb\xbf"),
    *(b"\x1c", b"\xc2\xa0", b"0" * 64, b"A" * 64, b"a" * 63, b"\xff", b"\x00"),
)

_CHAT: Final = tuple(
    b'"%b"' % word
    for word in (
        *b"model tiny messages role user system developer assistant content type text".split(),
        *b"documents id title data stream max_tokens stream_options include_usage".split(),
        *b"kvcache policy ratio cacheblend reuse full temperature top_p top_k seed stop n".split(),
        *b"tools tool_choice none response_format logprobs logit_bias metadata user".split(),
        *b"refusal max_completion_tokens frequency_penalty functions function_call".split(),
    )
)

_FILE: Final = tuple(f"kvcache_rag.stores.{name}" for name in ("file", "runs", "signing"))
TARGETS: Final = {
    target.name: target
    for target in (
        Target("header", _FILE, (*_HEADER, *_JSON), 8192),
        Target("keys", ("kvcache_rag_server.keys",), _KEYS, 2048),
        Target("scanner", ("kvcache_rag_server.bodies", "tests.fuzz.scanner"), _JSON, 1024),
        Target("schema", ("kvcache_rag_server",), (*_CHAT, *_JSON), 2048),
    )
}
