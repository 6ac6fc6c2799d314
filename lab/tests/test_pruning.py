"""Laws of pruned chunks: what stays is what was, where it was, and nothing else is attended to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import access
import pytest
import torch
from laws import (
    QUESTION,
    TEMPLATE,
    TEXTS,
    TOLERANCE,
    error,
    kept_of,
    make_engine,
    masked_logits,
    plain_logits,
    pruned_logits,
    sequence_logits,
)
from zoo import BY_PLACE, FAMILIES, OWN_ATTENTION, REFUSED, build, byte_tokenizer

from kvcache_rag import (
    Ape,
    CacheBlend,
    Combination,
    DiskStore,
    Engine,
    FullRecompute,
    LegoLink,
    MemoryStore,
    Reuse,
    StoredChunk,
    TieredStore,
    cli,
)
from kvcache_rag.codecs import Int4, Int8
from kvcache_rag.errors import (
    FingerprintMismatchError,
    InvalidInputError,
    UnsupportedModelError,
)
from kvcache_rag.integration.engine import EngineSettings, open_engine
from kvcache_rag.kv.chunk import all_ids
from kvcache_rag.kv.mask import chunk_columns, pruned_mask
from kvcache_rag.models.attention import few_queries
from kvcache_rag.presses import PRESSES, ExpectedAttention, Knorm, Press, SnapKV, press_by_name
from kvcache_rag.stitching.stitch import first_positions
from kvcache_rag_server.corpus.worker import BuildSettings
from kvcache_rag_server.settings import ServerSettings

if TYPE_CHECKING:
    from pathlib import Path

needs_kernel = pytest.mark.skipif(
    few_queries.library() is None, reason="no compiled kernel, or no CPU with AVX-512 for bfloat16"
)
SCHEMES = ["reordered", "composite"]
PRUNING = [Knorm(0.5), ExpectedAttention(0.5), SnapKV(0.5)]
# MLA keeps another form of the keys than its queries meet, and some attend in a way of their own.
UNSEEN = {
    ("deepseek_v3", ExpectedAttention): "another form of the keys",
    ("deepseek_v2", ExpectedAttention): "another form of the keys",
    **{
        (name, kind): "sees no queries"
        for name in OWN_ATTENTION
        for kind in (ExpectedAttention, SnapKV)
    },
}
PRUNABLE = [name for name in FAMILIES if name not in BY_PLACE]


@pytest.fixture(scope="module", params=PRUNABLE)
def engine(request: pytest.FixtureRequest) -> Engine:
    return make_engine(request.param, press=Knorm(0.5))


# ---------------------------------------------------------------------- what a prompt sees
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_pruned_prompt_is_one_forward_that_hides_what_was_pruned(
    engine: Engine, scheme: Any
) -> None:
    found = engine.logits(QUESTION, TEXTS, policy=Reuse(positions=scheme))
    assert error(found, pruned_logits(engine, TEXTS, scheme)) < TOLERANCE
    again = engine.logits(QUESTION, TEXTS, policy=Reuse(positions=scheme))
    assert torch.equal(found, again), "a stored chunk was changed by using it"


def test_the_law_would_notice_tokens_that_are_not_hidden(engine: Engine) -> None:
    found = engine.logits(QUESTION, TEXTS)
    assert error(found, masked_logits(engine, TEXTS, "reordered")) > 10 * TOLERANCE


@pytest.mark.parametrize("name", ["qwen2", "cohere", "deepseek_v3"])
def test_the_law_would_notice_keys_that_are_not_moved_by_what_was_pruned(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def packed(parts: Any, scheme: Any, *, adjacent: bool, pruned: int) -> list[int]:
        return first_positions(parts, scheme, adjacent=adjacent, pruned=0)

    # The query would stand nearer to all chunks than it does in the whole prompt.
    monkeypatch.setattr("kvcache_rag.stitching.loader.ContextLoader.pays_ahead", lambda *_: False)
    monkeypatch.setattr("kvcache_rag.stitching.stitch.first_positions", packed)
    pruned = make_engine(name, press=Knorm(0.5))
    found = pruned.logits(QUESTION, TEXTS)
    assert error(found, pruned_logits(pruned, TEXTS, "reordered")) > 10 * TOLERANCE


@pytest.mark.parametrize("press", PRUNING[1:], ids=lambda press: press.name)
@pytest.mark.parametrize("name", PRUNABLE)
def test_presses_that_watch_queries_keep_the_law(name: str, press: Press) -> None:
    if (name, type(press)) in UNSEEN:
        with pytest.raises(UnsupportedModelError, match=UNSEEN[name, type(press)]):
            make_engine(name, press=press)
        return
    watched = make_engine(name, press=press)
    found = watched.logits(QUESTION, TEXTS)
    assert error(found, pruned_logits(watched, TEXTS, "reordered")) < TOLERANCE


@pytest.mark.parametrize("press", PRUNING, ids=lambda press: press.name)
@pytest.mark.parametrize("name", ["qwen2", "gemma3", "cohere2", "gpt_oss", "phi3"])
def test_what_stays_is_bit_for_bit_what_was(name: str, press: Press) -> None:
    pruned, whole = make_engine(name, press=press), make_engine(name)
    prefiller = access.prefiller(pruned)
    for key, plain, kept in zip(
        pruned.add(TEXTS), whole.add(TEXTS), kept_of(pruned, TEXTS), strict=True
    ):
        found = pruned.store.get(key, prefiller.layout).chunk
        expected = whole.store.get(plain, access.chunk_layout(whole)).chunk
        assert len(kept) == len(found) == round(0.5 * key.tokens)
        assert key.tokens == plain.tokens
        for group in range(len(found.tensors)):
            assert torch.equal(found.keys(group), expected.keys(group)[..., kept, :])
            assert torch.equal(found.values(group), expected.values(group)[..., kept, :])


@pytest.mark.parametrize("kind", list(PRESSES))
def test_to_keep_all_is_no_press(kind: str) -> None:
    all_kept, whole = make_engine("qwen2", press=f"{kind}:1"), make_engine("qwen2")
    assert all_kept.keys(TEXTS) == whole.keys(TEXTS)
    assert torch.equal(all_kept.logits(QUESTION, TEXTS), whole.logits(QUESTION, TEXTS))


@pytest.mark.parametrize("kind", list(PRESSES))
def test_to_keep_nearly_all_is_bit_for_bit_no_press(kind: str) -> None:
    # A share that rounds to every token goes the way of pruned chunks.
    nearly, whole = make_engine("qwen2", press=f"{kind}:0.9999"), make_engine("qwen2")
    assert nearly.keys(TEXTS) != whole.keys(TEXTS)
    assert torch.equal(nearly.logits(QUESTION, TEXTS), whole.logits(QUESTION, TEXTS))


# ---------------------------------------------------------------------- every way there
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", ["qwen2", "mistral window", "gpt_neox", "cohere", "granite"])
def test_deferred_rotation_is_the_copied_one(name: str, scheme: Any) -> None:
    deferred = make_engine(name, press=Knorm(0.5), rotation="deferred")
    policy = Reuse(positions=scheme)
    found = deferred.logits(QUESTION, TEXTS, policy=policy)
    assert deferred.generate(QUESTION, TEXTS, max_new_tokens=1).metrics.rotation == "deferred"
    assert error(found, pruned_logits(deferred, TEXTS, scheme)) < TOLERANCE


@pytest.mark.parametrize("rotation", ["copied", "deferred"])
@pytest.mark.parametrize("name", ["qwen2", "gemma3"])
def test_a_batch_is_its_singles_and_a_stream_its_answer(name: str, rotation: Any) -> None:
    pruned = make_engine(name, press=Knorm(0.4), rotation=rotation)
    questions = [(QUESTION, TEXTS), ("What is it that they saw there?", TEXTS[:1]), ("x", [])]
    singles = [pruned.generate(q, c, max_new_tokens=6) for q, c in questions]
    batch = pruned.generate_batch(questions, max_new_tokens=6)
    assert [one.token_ids for one in batch] == [one.token_ids for one in singles]
    stream = pruned.stream(QUESTION, TEXTS, max_new_tokens=6)
    assert "".join(stream) == singles[0].text


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("codec", [Int8(), Int4()], ids=lambda codec: codec.name)
def test_a_codec_of_raw_keys_restores_what_stays_where_it_was(
    tmp_path: Path, codec: Any, scheme: Any
) -> None:
    store = DiskStore(tmp_path, durable=False, codec=codec)
    options: dict[str, Any] = {"template": TEMPLATE, "store": store}
    coarse = Engine(build("qwen2"), byte_tokenizer(), press=Knorm(0.5), **options)
    whole = Engine(build("qwen2"), byte_tokenizer(), **options)
    policy = Reuse(positions=scheme)
    found = coarse.logits(QUESTION, TEXTS, policy=policy)
    loss = error(whole.logits(QUESTION, TEXTS, policy=policy), masked_logits(whole, TEXTS, scheme))
    # As coarse as whole chunks are; keys a place away would be off by whole deviations.
    assert error(found, pruned_logits(coarse, TEXTS, scheme)) < max(3 * loss, 0.05)


@needs_kernel
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", ["llama", "mistral window", "smollm3"])
def test_chunks_in_8_bits_are_read_in_place_as_if_copied(
    tmp_path: Path, name: str, scheme: Any
) -> None:
    model = build(name, dtype=torch.bfloat16, width=32)

    def made(rotation: Any) -> Engine:
        store = DiskStore(tmp_path, codec=Int8(), durable=False)
        options: dict[str, Any] = {"template": TEMPLATE, "store": store, "press": Knorm(0.5)}
        return Engine(model, byte_tokenizer(), rotation=rotation, **options)

    made("copied").add(TEXTS)
    in_place, copied, policy = made("deferred"), made("copied"), Reuse(positions=scheme)
    twice = [TEXTS[2], TEXTS[0], TEXTS[2], TEXTS[1]]
    for chunks in (TEXTS, TEXTS[:1], twice):
        found = in_place.logits(QUESTION, chunks, policy=policy)
        assert torch.equal(found, copied.logits(QUESTION, chunks, policy=policy))
    metrics = in_place.generate(QUESTION, TEXTS, policy=policy, max_new_tokens=1).metrics
    assert (metrics.rotation, metrics.not_deferred) == ("deferred", "")


def test_ape_keeps_its_query_behind_the_highest_position() -> None:
    # Two chunks of one length: the query stands as far behind both as behind one alone.
    texts, ape = [TEXTS[1], TEXTS[1][::-1]], Ape(1.0, 1.0)
    pruned = make_engine("qwen2", press=Knorm(0.5))
    ids, kept = pruned.tokenize(QUESTION, texts), kept_of(pruned, texts)
    sequence = pruned_mask(ids.prefix, ids.chunks, ids.query, kept, "composite")
    stop = len(ids.prefix) + len(ids.chunks[0])
    sequence.positions[-len(ids.query) :] = torch.arange(stop, stop + len(ids.query))
    found = pruned.logits(QUESTION, texts, policy=ape)
    assert error(found, sequence_logits(pruned, sequence)) < TOLERANCE
    assert error(found, pruned_logits(pruned, texts, "composite")) > 10 * TOLERANCE


def test_chunks_computed_together_are_pruned_as_one() -> None:
    pruned = make_engine("qwen2", press=Knorm(0.5))
    (key,) = pruned.add_combination([TEXTS])
    layout = access.prefiller(pruned).layout
    chunk = pruned.combinations.get(key, layout).chunk
    assert len(chunk) == round(0.5 * key.tokens)
    answer = pruned.generate(QUESTION, TEXTS, policy=Combination(), max_new_tokens=4)
    assert answer.metrics.pruned_tokens == key.tokens - len(chunk)


def test_loading_from_disk_and_beside_the_forward_pass_gives_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made(store: Any) -> Engine:
        return Engine(
            build("qwen2"), byte_tokenizer(), template=TEMPLATE, store=store, press=SnapKV(0.5)
        )

    disk = DiskStore(tmp_path, durable=False)
    first = made(disk)
    first.add(TEXTS)
    expected = first.logits(QUESTION, TEXTS)
    assert torch.equal(made(disk).logits(QUESTION, TEXTS), expected)
    tiered = made(TieredStore(MemoryStore(), DiskStore(tmp_path, durable=False)))
    assert torch.equal(tiered.logits(QUESTION, TEXTS), expected)
    assert torch.equal(tiered.logits(QUESTION, TEXTS), expected)
    monkeypatch.setattr("kvcache_rag.stitching.loader.ContextLoader.pays_ahead", lambda *_: True)
    monkeypatch.setattr("kvcache_rag.stitching.loader._is_free", lambda: True)
    ahead = made(DiskStore(tmp_path, durable=False))
    assert error(ahead.logits(QUESTION, TEXTS), expected) < 1e-5


# ---------------------------------------------------------------------- what a chunk is
def test_whole_and_pruned_chunks_never_mix() -> None:
    store = MemoryStore()
    ways: list[Press | None] = [None, *PRUNING, Knorm(0.25), SnapKV(0.5, window=8)]
    engines = [
        Engine(build("qwen2"), byte_tokenizer(), template=TEMPLATE, store=store, press=press)
        for press in ways
    ]
    keys = [one.add(TEXTS[:1])[0] for one in engines]
    assert len({key.digest for key in keys}) == len({key.spec for key in keys}) == len(ways)
    with pytest.raises(FingerprintMismatchError, match="press"):
        engines[0].generate(QUESTION, [keys[1]])


def test_a_full_prefill_reads_every_token_of_a_pruned_chunk() -> None:
    pruned = make_engine("qwen2", press=Knorm(0.25))
    keys = pruned.add(TEXTS)
    found = pruned.logits(QUESTION, keys, policy=FullRecompute())
    assert error(found, plain_logits(pruned, TEXTS)) < TOLERANCE
    metrics = pruned.generate(QUESTION, keys, policy=FullRecompute(), max_new_tokens=1).metrics
    assert metrics.pruned_tokens == 0


def test_a_key_is_as_good_as_its_text() -> None:
    pruned = make_engine("qwen2", press=Knorm(0.5))
    keys = pruned.add(TEXTS)
    by_key, by_text = pruned.logits(QUESTION, keys), pruned.logits(QUESTION, TEXTS)
    assert torch.equal(by_key, by_text)
    for key in keys:
        pruned.store.delete(key)
    stored = [StoredChunk(key, text) for key, text in zip(keys, TEXTS, strict=True)]
    assert error(pruned.logits(QUESTION, stored), by_text) < TOLERANCE


def test_a_missing_chunk_is_pruned_as_one_that_was_added() -> None:
    added, asked = (make_engine("qwen2", press=SnapKV(0.5)) for _ in range(2))
    added.add(TEXTS)
    assert error(added.logits(QUESTION, TEXTS), asked.logits(QUESTION, TEXTS)) < 1e-4
    assert kept_of(added, TEXTS) == kept_of(asked, TEXTS)


def test_what_is_pruned_otherwise_than_its_press_says_is_a_miss() -> None:
    pruned = make_engine("qwen2", press=Knorm(0.5))
    (key,) = pruned.add(TEXTS[:1])
    expected = pruned.logits(QUESTION, TEXTS[:1])
    chunk = pruned.store.get(key, access.prefiller(pruned).layout).chunk
    chunk.tokens.copy_(all_ids(chunk.tokens))
    answer = pruned.generate(QUESTION, TEXTS[:1], max_new_tokens=1)
    assert [miss.reason for miss in answer.metrics.missed] == ["damaged"]
    assert error(pruned.logits(QUESTION, TEXTS[:1]), expected) < TOLERANCE


def test_metrics_tell_the_prompt_from_its_cache() -> None:
    pruned = make_engine("qwen2", press=Knorm(0.25))
    keys = pruned.keys(TEXTS)
    for hits in ({}, {"memory": 3}):
        metrics = pruned.generate(QUESTION, TEXTS, max_new_tokens=1).metrics
        assert metrics.hits == hits
        chunks = metrics.reused_tokens + metrics.prefilled_tokens
        assert chunks == sum(key.tokens for key in keys)
        held = sum(round(0.25 * key.tokens) for key in keys)
        assert metrics.pruned_tokens == chunks - held
        assert metrics.prompt_tokens == len(pruned.tokenize(QUESTION, TEXTS).all)
    whole = make_engine("qwen2")
    whole.add(TEXTS)
    for mine, plain in zip(keys, whole.keys(TEXTS), strict=True):
        held = round(0.25 * mine.tokens)
        assert pruned.nbytes(mine) * mine.tokens == whole.nbytes(plain) * held


# ---------------------------------------------------------------------- what cannot be
@pytest.mark.parametrize("policy", [LegoLink(4), CacheBlend(0.2)], ids=repr)
def test_policies_that_compute_tokens_again_are_refused_by_name(policy: Any) -> None:
    pruned = make_engine("qwen2", press=Knorm(0.5))
    with pytest.raises(InvalidInputError, match="pruned chunks have not all of them"):
        make_engine("qwen2", press=Knorm(0.5), policy=policy)
    for ask in (pruned.generate, pruned.logits, pruned.explain):
        with pytest.raises(InvalidInputError, match="pruned chunks have not all of them"):
            ask(QUESTION, TEXTS, policy=policy)


@pytest.mark.parametrize("name", ["gpt2", "mamba", *BY_PLACE])
def test_models_whose_chunks_cannot_be_pruned_are_refused(name: str) -> None:
    assert name in REFUSED or name in BY_PLACE
    why = r"(?<!: )\w+: attention counts .*" if name in BY_PLACE else ""
    with pytest.raises(UnsupportedModelError, match=f"{why}leave press out"):
        make_engine(name, press=Knorm(0.5))


@pytest.mark.parametrize("keep", [0, -0.5, 1.5, float("nan"), True, "half"])
@pytest.mark.parametrize("kind", list(PRESSES.values()))
def test_a_share_that_is_none_is_refused(kind: type[Press], keep: Any) -> None:
    with pytest.raises(InvalidInputError, match="above 0 and at most 1"):
        kind(keep)


@pytest.mark.parametrize("name", ["", "knorm", "knorm:", "knorm:half", "knorm:0", "norm:0.5"])
def test_a_name_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(InvalidInputError):
        press_by_name(name)
    with pytest.raises(InvalidInputError):
        make_engine("qwen2", press=name)


def test_names_are_those_of_the_presses() -> None:
    assert [press_by_name(f"{press.name}:0.5") for press in PRUNING] == PRUNING
    assert make_engine("qwen2", press="snapkv:0.5").press == SnapKV(0.5)
    with pytest.raises(InvalidInputError, match="press must be"):
        make_engine("qwen2", press=0.5)


@pytest.mark.parametrize("policy", [Reuse(), Reuse(positions="composite")], ids=repr)
def test_explain_shows_what_was_pruned_and_where_everything_stands(policy: Reuse) -> None:
    pruned = make_engine("qwen2", press=Knorm(0.25))
    before = pruned.explain(QUESTION, TEXTS, policy=policy)
    assert {token.state for token in before.tokens} == {"reused", "prefilled", "computed"}
    kept = kept_of(pruned, TEXTS)
    found = pruned.explain(QUESTION, TEXTS, policy=policy)
    ids = pruned.tokenize(QUESTION, TEXTS)
    assert [token.id for token in found.tokens] == list(ids.all)
    first = len(ids.prefix)
    for chunk, places in zip(ids.chunks, kept, strict=True):
        states = [token.state for token in found.tokens[first : first + len(chunk)]]
        expected = ["reused" if place in places else "pruned" for place in range(len(chunk))]
        assert states == expected
        first += len(chunk)
    sequence = pruned_mask(ids.prefix, ids.chunks, ids.query, kept, policy.positions)
    chunk_at = chunk_columns(len(ids.prefix), [len(chunk) for chunk in ids.chunks])
    columns = [
        *range(len(ids.prefix)),
        *chunk_at,
        *range(len(sequence.ids) - len(ids.query), len(sequence.ids)),
    ]
    stand = [int(sequence.positions[column]) for column in columns]
    assert [token.position for token in found.tokens] == stand
    metrics = pruned.generate(QUESTION, TEXTS, policy=policy, max_new_tokens=1).metrics
    assert (found.pruned_tokens, found.reused_tokens) == (
        metrics.pruned_tokens,
        metrics.reused_tokens,
    )
    full = pruned.explain(QUESTION, TEXTS, policy=FullRecompute())
    assert {token.state for token in full.tokens} == {"computed"}


# ---------------------------------------------------------------------- where it is said
def test_applications_and_commands_say_it_by_name(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"model": build("qwen2"), "tokenizer": byte_tokenizer()}
    assert EngineSettings(**settings, press="knorm:0.5").open().press == Knorm(0.5)
    assert open_engine(**settings, press=SnapKV(0.25)).press == SnapKV(0.25)
    assert ServerSettings("tiny", press="knorm:0.5").press == "knorm:0.5"
    assert BuildSettings("tiny", str(tmp_path), press="knorm:0.5").press == "knorm:0.5"
    for made in (ServerSettings, BuildSettings):
        with pytest.raises(InvalidInputError, match="there is no press"):
            made("tiny", str(tmp_path), press="pca:0.5")


def test_servers_of_vllm_are_not_told_to_prune() -> None:
    with pytest.raises(InvalidInputError, match="--press is for a model in this process"):
        ServerSettings("m", engine="vllm", urls=("http://127.0.0.1:1",), press="knorm:0.5")


def test_a_store_shows_what_pruned_its_chunks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def added(press: Press | None) -> int:
        store = DiskStore(tmp_path, durable=False)
        made = Engine(build("qwen2"), byte_tokenizer(), store=store, press=press)
        made.add(TEXTS)
        return sum(file.stat().st_size for file in tmp_path.rglob("*.kv"))

    added(Knorm(0.25))
    added(None)
    assert cli.main(["store", "ls", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "native Knorm(keep=0.25)" in printed
    assert cli.main(["store", "verify", str(tmp_path)]) == 0
    assert cli.main(["store", "du", str(tmp_path)]) == 0
    assert "Knorm(keep=0.25)" in capsys.readouterr().out
