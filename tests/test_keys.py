"""Keys: one grammar, read back as they were written, whatever a model is called."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_kvpool.identity.keys import (
    KEY_DIGEST_BYTES,
    MAX_MODEL_NAME_CHARS,
    ContextRank,
    HeadShard,
    KeyMaker,
    LayerSpan,
    Namespace,
    ParsedKey,
    RankShard,
    chunk_id_of,
    chunk_id_of_key,
    key_digest,
    layer_group_of,
    make_namespace,
    name_of_model,
    namespace_of,
    with_weights,
)

DIGEST = "0123456789abcdef"
HASH = bytes(range(20))
HOSTILE_NAMES = (
    *("", "/", ".", "..", "../../etc/passwd", "a/b", "a@b", "@", ":", "%", "%2F", "~", "\n", "\0"),
    *("a\nb", " ", "a b", "model@fmt:0123456789ab", "模型/ж", "é", "e\u0301", "a\u202eb", "A", "a"),
    *(
        "x" * MAX_MODEL_NAME_CHARS,
        "x" * (MAX_MODEL_NAME_CHARS + 1),
        "x" * 10_000,
        "x" * 9_999 + "y",
    ),
    *("/" * 10_000, "é" * 10_000),
)
SAFE_KEY = re.compile(r"[A-Za-z0-9._~%+@:-]+")

small = st.integers(0, 2**20)
contexts = st.builds(ContextRank, small, small)
shards = st.one_of(st.builds(HeadShard, small), st.builds(RankShard, small, small))
spans = st.builds(
    lambda start, size, layer_group: LayerSpan(start, start + size, layer_group),
    small,
    st.integers(1, 1000),
    st.text(max_size=12),
)
namespaces = st.builds(
    make_namespace, st.text(max_size=200), st.text("0123456789abcdef", min_size=12, max_size=32)
)


@given(namespaces, contexts, shards, spans, st.binary(min_size=1, max_size=32))
def test_a_key_reads_back_as_it_was_written(
    namespace: Namespace,
    context: ContextRank,
    shard: HeadShard | RankShard,
    span: LayerSpan,
    chunk_hash: bytes,
) -> None:
    key = KeyMaker(namespace, context).key(shard, span, chunk_hash)
    assert ParsedKey.parse(key) == ParsedKey(namespace, context, shard, span, chunk_hash)
    assert namespace_of(key) == namespace
    assert SAFE_KEY.fullmatch(key)


def test_the_grammar_is_the_one_of_the_docstring() -> None:
    maker = KeyMaker(make_namespace("org/model", DIGEST), ContextRank(3, 4))
    start = "org%2Fmodel@fmt:0123456789ab@dcp3of4"
    assert (
        maker.key(HeadShard(7), LayerSpan(0, 8), b"\xab\xcd") == f"{start}@head:7@layers:0-8@abcd"
    )
    assert (
        maker.key(RankShard(1, 4), LayerSpan(8, 9, "sliding"), b"\x01")
        == f"{start}@rank:1of4@layers:8-9@kind:sliding@01"
    )


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("model", "model"),
        ("org/model", "model"),
        ("/models/model/", "model"),
        ("/models/snapshots/model", "model"),
        # What HF_HUB_OFFLINE=1 makes of `org/model`.
        ("/cache/hub/models--org--model/snapshots/0123abcd", "model"),
        ("/cache/hub/models--model/snapshots/0123abcd", "model"),
        (".", "."),
    ],
)
def test_a_model_has_one_name_however_engines_are_given_it(model: str, name: str) -> None:
    assert name_of_model(model) == name


@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_a_hostile_name_cannot_leave_its_field(name: str) -> None:
    namespace = make_namespace(name, DIGEST)
    model, _, rest = namespace.partition("@")
    assert rest == "fmt:0123456789ab"
    assert 0 < len(model) <= MAX_MODEL_NAME_CHARS
    key = KeyMaker(namespace, ContextRank()).key(HeadShard(0), LayerSpan(0, 1), HASH)
    assert SAFE_KEY.fullmatch(key)
    assert ParsedKey.parse(key).namespace == namespace_of(key) == namespace


def test_no_two_hostile_names_meet() -> None:
    assert len({make_namespace(name, DIGEST) for name in HOSTILE_NAMES}) == len(HOSTILE_NAMES)


def test_a_short_name_cannot_pose_as_a_long_one() -> None:
    shortened = make_namespace("x" * 10_000, DIGEST).partition("@")[0]
    assert make_namespace(shortened, DIGEST) != make_namespace("x" * 10_000, DIGEST)


@given(st.text(max_size=150), st.text(max_size=150))
def test_different_names_have_different_namespaces(one: str, other: str) -> None:
    assert (make_namespace(one, DIGEST) == make_namespace(other, DIGEST)) == (one == other)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("@dcp0of1", ""),
        ("@dcp0of1", "@dcp-1of1"),
        ("@dcp0of1", "@dcp0"),
        ("@head:7", "@head:"),
        ("@head:7", "@head:\u0663"),  # a digit, but not ours
        ("@head:7", "@head:7@rank:0of1"),
        ("@layers:0-8", "@layers:8-8"),
        ("@layers:0-8", "@layers:9-8"),
        ("@layers:0-8", "@layers:0-8@kind:"),
        ("@abcd", "@abc"),
        ("@abcd", "@ABCD"),
        ("@abcd", "@"),
        ("@abcd", "@abcd\n"),
        ("@abcd", "@abcd@"),
        ("fmt:0123456789ab", "fmt:0123456789a"),
        ("model", "mo/del"),
        ("model", ""),
        ("model", "x" * (MAX_MODEL_NAME_CHARS + 1)),
    ],
)
def test_what_is_no_key_is_refused(old: str, new: str) -> None:
    key = "model@fmt:0123456789ab@dcp0of1@head:7@layers:0-8@abcd"
    ParsedKey.parse(key)
    with pytest.raises(ValueError, match="not a cell key"):
        ParsedKey.parse(key.replace(old, new, 1))


@pytest.mark.parametrize(
    "key", ["", "@", "model@fmt:0123456789ab", "model@fmt:0123456789abc@x", "a/b@fmt:0123456789ab@"]
)
def test_a_foreign_string_has_no_namespace(key: str) -> None:
    assert namespace_of(key) is None


def test_a_namespace_is_no_prefix_of_another() -> None:
    short, long = make_namespace("model", DIGEST), make_namespace("model-2", DIGEST)
    key = KeyMaker(long, ContextRank()).key(HeadShard(0), LayerSpan(0, 1), HASH)
    assert not key.startswith(f"{short}@")
    assert namespace_of(key) == long


def test_every_key_has_its_own_digest() -> None:
    maker = KeyMaker(make_namespace("m", DIGEST), ContextRank())
    keys = [maker.key(HeadShard(h), LayerSpan(0, 1), HASH) for h in range(100)]
    digests = {key_digest(key) for key in keys}
    assert len(digests) == len(keys)
    assert {len(digest) for digest in digests} == {KEY_DIGEST_BYTES}


# Epochs and groups

weights_versions = st.text(max_size=60)


@given(namespaces, weights_versions, contexts, shards, spans, st.binary(min_size=1, max_size=32))
def test_keys_of_an_epoch_are_keys_of_the_same_cells(
    namespace: Namespace,
    weights_version: str,
    context: ContextRank,
    shard: HeadShard | RankShard,
    span: LayerSpan,
    chunk_hash: bytes,
) -> None:
    other = with_weights(namespace, weights_version)
    assert (other == namespace) == (weights_version == "")
    assert len(other) == len(namespace)
    assert other.partition("@")[0] == namespace.partition("@")[0]
    maker = KeyMaker(namespace, context).with_weights(weights_version)
    assert maker.namespace == other
    key = maker.key(shard, span, chunk_hash)
    assert ParsedKey.parse(key) == ParsedKey(other, context, shard, span, chunk_hash)
    assert namespace_of(key) == other
    assert SAFE_KEY.fullmatch(key)
    group = chunk_id_of(other, chunk_hash.hex(), span.layer_group)
    assert chunk_id_of_key(key) == group
    assert layer_group_of(group) == span.layer_group


@given(st.tuples(namespaces, weights_versions), st.tuples(namespaces, weights_versions))
def test_different_epochs_have_different_namespaces(
    one: tuple[Namespace, str], other: tuple[Namespace, str]
) -> None:
    assert (with_weights(*one) == with_weights(*other)) == (one == other)


def test_no_two_epochs_of_one_model_meet() -> None:
    """Also not those of models that begin with each other's weights."""
    spaces = [make_namespace("model", f"{i:012x}") for i in range(30)]
    names = ["", "a", "A", "a ", "a\n", "\na", "ab", *(f"drawn:{i:032x}" for i in range(300))]
    made = {with_weights(space, name) for space in spaces for name in names}
    assert len(made) == len(spaces) * len(names)


def test_an_epoch_of_an_epoch_is_another() -> None:
    space = make_namespace("model", DIGEST)
    once = with_weights(space, "a")
    assert len({space, once, with_weights(once, "a"), with_weights(space, "aa")}) == 4


def test_a_group_is_all_cells_of_a_chunk_and_kind_and_no_other() -> None:
    space = make_namespace("model", DIGEST)
    groups = set()
    for weights_version in ("", "a", "b"):
        for chunk_hash in (HASH, b"\x01", b"\x02"):
            maker = KeyMaker(space, ContextRank()).with_weights(weights_version)
            for layer_group in ("", "full-4x256", "window"):
                cells = [
                    maker.key(shard, span, chunk_hash)
                    for shard in (HeadShard(0), HeadShard(1), RankShard(0, 2))
                    for span in (LayerSpan(0, 1, layer_group), LayerSpan(1, 2, layer_group))
                ]
                [group] = {chunk_id_of_key(key) for key in cells}
                assert layer_group_of(group) == layer_group
                groups.add(group)
    assert len(groups) == 27


@pytest.mark.parametrize("key", ["", "@", "foreign", "model@fmt:0123456789ab", "a/b@fmt:01@x"])
def test_a_foreign_string_is_a_group_by_itself(key: str) -> None:
    assert chunk_id_of_key(key) == key
