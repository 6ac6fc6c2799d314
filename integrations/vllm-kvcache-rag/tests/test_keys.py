"""Laws of addresses and salts: what is not the same is never found as the same."""

from __future__ import annotations

import hashlib
import hmac
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from kvcache_rag.kv.chunk import chunk_key, digest
from vllm_kvcache_rag.keys import Salts, pieces_of, specs
from vllm_kvcache_rag.transfer.params import TransferParams

ENGINE = {"engine": "vllm", "version": "0.32", "weights": "ab"}
SPECS = specs(ENGINE, "native", 2)
IDS = list(range(100, 120))
PARAMS = TransferParams(3, (4, 5))


def test_pieces_are_the_prefix_and_the_chunks_behind_it() -> None:
    pieces = _, first, second = pieces_of(PARAMS, IDS, "tenant", SPECS)
    assert [(p.start, p.old, p.stop) for p in pieces] == [(0, 0, 3), (3, 3, 7), (7, 3, 12)]
    assert second.ids == tuple(IDS[7:12])
    expected = chunk_key(IDS[7:12], prefix_ids=IDS[:3], spec=SPECS[1], namespace="tenant")
    assert second.keys[1] == expected
    # The same chunk has one address wherever it stands.
    other = TransferParams(3, (5, 4))
    moved = pieces_of(other, [*IDS[:3], *IDS[7:12], *IDS[3:7]], "tenant", SPECS)
    assert (moved[1].keys, moved[2].keys) == (second.keys, first.keys)
    stays = pieces_of(TransferParams(3, (4, 5), "composite"), IDS, "tenant", SPECS)
    assert [piece.old for piece in stays] == [0, 3, 7]
    assert [piece.keys for piece in stays] == [piece.keys for piece in pieces]
    assert [p.start for p in pieces_of(TransferParams(0, (4, 5)), IDS, "", SPECS)] == [0, 4]


def test_ranks_engines_and_codecs_have_addresses_of_their_own() -> None:
    every = {
        *SPECS,
        *specs(ENGINE, "native", 1),
        *specs(ENGINE, "int8", 2),
        *specs({**ENGINE, "weights": "cd"}, "native", 2),
        *specs({**ENGINE, "quantization": "awq"}, "native", 2),
    }
    assert len(every) == 2 + 1 + 2 + 2 + 2


def asked(**changes: Any) -> dict[str, Any]:
    plain = {"client": None, "namespace": "a", "positions": "reordered", "params": PARAMS}
    return {**plain, "ids": IDS, **changes}


def stitched(salts: Salts, of: dict[str, Any]) -> str:
    pieces = pieces_of(of["params"], of["ids"], of["namespace"], SPECS)
    return salts.stitched(of["client"], of["namespace"], of["positions"], pieces)


def test_a_salt_is_of_all_that_the_blocks_depend_on() -> None:
    salts = Salts()
    changes: list[dict[str, Any]] = [
        *({}, {"client": ""}, {"client": "a"}, {"namespace": "b"}, {"namespace": ""}),
        *({"positions": "composite"}, {"ids": IDS[::-1]}),
        *({"params": TransferParams(3, (5, 4))}, {"params": TransferParams(4, (3, 5))}),
    ]
    found = [stitched(salts, asked(**one)) for one in changes]
    found += [salts.plain(None), salts.plain(""), salts.plain("a"), salts.lone(), salts.lone()]
    found += [salts.plain(None, tenant) for tenant in ("", "a", "b")]
    assert len({*found}) == len(found)
    assert stitched(salts, asked()) == found[0]
    assert salts.plain("a") == salts.plain("a")
    assert stitched(Salts(), asked()) != found[0], "of another process"


@given(st.text(max_size=80))
@example("\ud800")
@example("\0")
def test_no_salt_of_a_client_is_ours(client: str) -> None:
    """Whatever it sends, our own format included, is hashed again with the secret."""
    salts = Salts(b"k" * 32)
    own = stitched(salts, asked())
    for sent in (client, own, f"{own}{client}", salts.plain(None)):
        assert own not in (salts.plain(sent), stitched(salts, asked(client=sent)))
        assert salts.plain(sent) != salts.plain(None)


def test_a_salt_is_a_mac() -> None:
    message = digest("kvcache-rag-blocks", b"plain", b"", b"", b"salt", b"x")
    expected = hmac.digest(b"k" * 32, message.encode(), hashlib.sha256).hex()
    assert Salts(b"k" * 32).plain("x") == expected
