"""Two tenants over one store: a tenant never reads what the other has stored.

The engine's `namespace` and a request's `cache_salt` tell tenants apart.
tests/vllm_adapt/identity/test_factors.py tests the engine's part of a namespace.
"""

import itertools
import time
import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.buffers import make_buffer
from tests.support.fakes import FakePins, FakeRequest
from tests.support.memory_store import MemoryStore
from vllm_kvpool.config import KVRole, RequestOptions, read_config
from vllm_kvpool.identity.chunk_hash import ChunkChain, RequestIdentity, tenant_of
from vllm_kvpool.identity.keys import (
    ContextRank,
    KeyMaker,
    LayerSpan,
    Namespace,
    ParsedKey,
    RankShard,
    key_digest,
    make_namespace,
    namespace_of,
)
from vllm_kvpool.layout.engine_shape import ModelShape
from vllm_kvpool.layout.topology import KVCacheGroup, LayerGroup, Topology
from vllm_kvpool.scheduler.prefix_search import CellNames
from vllm_kvpool.scheduler.scheduler_part import SchedulerPart
from vllm_kvpool.storage.base import ChunkRef, GetOutcome, PutOutcome
from vllm_kvpool.storage.contents.cell_format import CellFault, verify, write_header
from vllm_kvpool.storage.file.format import MAX_KEY_BYTES
from vllm_kvpool.storage.file.space import object_name
from vllm_kvpool.storage.file.store import FileStore
from vllm_kvpool.storage.s3 import object_name as s3_object_name

CHUNK, CHUNKS, LIMIT_S = 32, 3, 30.0
TOKENS = list(range(CHUNK * CHUNKS))
CELL = 4096
TOPOLOGY = Topology(2, 1, ((0, 4),), 2, True)
DIGEST = "0123456789ab"
NUMBERS = itertools.count()
NAME = "tenants"

SALTS = (
    *("", "a", "b", "a\0", "\0a", "ab", "a b", " a", "a@fmt:0123456789ab", "@head:0@layers:0-2@"),
    *(unicodedata.normalize(form, "café") for form in ("NFC", "NFD")),
    *("ﬁ", "fi", "\u00c5", "\u212b", "x" * 10_000, "x" * 9_999, "\ud800", "\udfff"),
    *("../x", "a\nb"),
)
NAMES = (
    *SALTS[1:],
    *(".", "..", "/", "//", "a/b", "a%2Fb", "%", "%25", "~", "a~b", "a+b", "a b", "tenant@fmt:"),
    *("con", "a" * 300, "/etc/passwd", "..@fmt:0123456789ab", "\uff41", "\u202ea", "a\r\n", "-"),
)


def hashes(salt: str, tokens: Sequence[int] = TOKENS) -> list[bytes]:
    chain = ChunkChain(CHUNK, RequestIdentity(cache_salt=salt))
    chain.extend(tokens)
    return chain.hashes


def keys_of(namespace: Namespace, salt: str) -> list[str]:
    names = CellNames(namespace, [LayerGroup(TOPOLOGY, 64)])
    return [key for link in hashes(salt) for key in names.of_chunk(link)]


class Tenant:
    """An engine's scheduler side over a store that others use too."""

    def __init__(self, url: str, namespace: Namespace) -> None:
        shape = ModelShape(namespace, (LayerGroup(TOPOLOGY, 64),), (KVCacheGroup(16),), 64, 1)
        extra = {"store": url, "chunk_tokens": CHUNK}
        self.part = SchedulerPart(read_config(extra, env={}), KVRole.BOTH, shape, FakePins())

    def hits(self, salt: str) -> int:
        """Return the tokens that the pool offers to a request of all of TOKENS and one more."""
        name = f"r{next(NUMBERS)}"
        identity = RequestIdentity(cache_salt=salt)
        request = FakeRequest(name, [*TOKENS, 7], RequestOptions(), identity)
        scheduler = self.part.scheduler
        scheduler.add(request)
        deadline = time.monotonic() + LIMIT_S
        while (found := scheduler.match(name, 0)[0]) is None:
            assert time.monotonic() < deadline
        scheduler.finish(name, ())
        return found


def fill(store: MemoryStore, namespace: Namespace, salt: str) -> None:
    keys = keys_of(namespace, salt)
    outcomes = store.put(keys, [make_buffer(CELL)] * len(keys), [ChunkRef("g")] * len(keys))
    assert set(outcomes) == {PutOutcome.STORED}


@pytest.fixture
def shared() -> Iterator[MemoryStore]:
    store = MemoryStore(NAME, 1 << 26)
    store.remove_namespace(make_namespace("m", DIGEST))
    yield store
    store.close()


@pytest.fixture
def url() -> str:
    return f"memory://{NAME}?size=64MiB"


def test_a_tenant_finds_its_own_and_no_other_namespaces_cells(
    shared: MemoryStore, url: str
) -> None:
    mine, theirs = make_namespace("m", "0" * 12), make_namespace("m", "1" * 12)
    fill(shared, theirs, "")
    fill(shared, theirs, "salt")
    tenant, other = Tenant(url, mine), Tenant(url, theirs)
    assert [tenant.hits(salt) for salt in ("", "salt", "1" * 12, f"{theirs}@")] == [0] * 4
    assert [other.hits(salt) for salt in ("", "salt")] == [CHUNK * CHUNKS] * 2
    tenant.part.close()
    other.part.close()


def test_a_salt_finds_its_own_and_no_other_salts_cells(shared: MemoryStore, url: str) -> None:
    """The engine has one namespace. Requests without a salt are a tenant of their own."""
    namespace = make_namespace("m", DIGEST)
    tenant = Tenant(url, namespace)
    stored: list[str] = []
    for salt in SALTS:
        assert tenant.hits(salt) == 0, (salt, stored)
        fill(shared, namespace, salt)
        stored.append(salt)
        assert tenant.hits(salt) == CHUNK * CHUNKS, salt
    tenant.part.close()


def test_a_key_that_another_tenant_computes_is_refused_by_the_cell_itself() -> None:
    """A store that mixes keys up returns a sound cell of another tenant.

    The cell's header tells.
    """
    store = MemoryStore("", 1 << 20)
    mine, theirs = (keys_of(make_namespace("m", d * 12), "")[0] for d in "01")
    cell = make_buffer(CELL)
    write_header(cell.view, key_digest(theirs))
    store.put([mine], [cell], [ChunkRef("g")])  # as if it had swapped two objects
    assert store.get([mine], [cell]) == [GetOutcome.OK]
    assert verify(cell.view, key_digest(mine), checksum=True) is CellFault.KEY
    assert verify(cell.view, key_digest(mine), checksum=False) is CellFault.KEY
    store.close()


def test_removing_ones_namespace_leaves_that_of_others(
    tmp_path: Path,
) -> None:
    store = FileStore(str(tmp_path / "pool"), 1 << 24)
    namespaces = [make_namespace(name, DIGEST) for name in ("m", "m2", "m@fmt:0123456789ab", "..")]
    buffer = make_buffer(CELL)
    keys = [keys_of(namespace, "")[0] for namespace in namespaces]
    store.put(keys, [buffer] * 4, [ChunkRef("g")] * 4)
    for hostile in ("..", ".", "", "../..", "m", "*", "/", "m@fmt:0123456789ab/../x", "foreign/.."):
        assert store.remove_namespace(hostile) == 0
    assert store.remove_namespace(namespaces[0]) == 1
    assert store.exists(keys) == [False, True, True, True]
    store.close()


def test_no_two_names_or_salts_meet_in_any_part_of_a_key() -> None:
    names = set(NAMES)
    namespaces = {make_namespace(name, DIGEST) for name in names}
    assert len(namespaces) == len(names)
    all_keys = [key for n in sorted(namespaces) for s in SALTS[:6] for key in keys_of(n, s)]
    assert len(set(all_keys)) == len(all_keys)
    assert len({object_name(key) for key in all_keys}) == len(all_keys)
    assert len({s3_object_name("root", key) for key in all_keys}) == len(all_keys)
    assert len({hashes(salt)[0] for salt in SALTS}) == len(set(SALTS))
    assert len({tenant_of(salt) for salt in SALTS}) == len(set(SALTS))


LIKE_A_KEY = (
    r"[a-z%.]{1,3}@fmt:[0-9a-f]{12}@dcp[0-9]{1,3}of[0-9]@(head:[0-9]{1,30}|rank:0of1)"
    r"@layers:[0-9]{1,4}-[0-9]{1,4}(@kind:[a-z%]{1,4})?@([0-9a-f]{2}){1,3}\n?"
)
texts = st.text(st.characters(), max_size=40) | st.sampled_from(NAMES)  # surrogates too


@given(texts, texts, st.text("0123456789abcdef", min_size=12, max_size=32))
def test_any_name_makes_one_path_component_of_bounded_length(
    one: str, other: str, digest: str
) -> None:
    namespace = make_namespace(one, digest)
    assert (namespace == make_namespace(other, digest)) == (one == other)
    key = KeyMaker(namespace, ContextRank(15, 16)).key(
        RankShard(1023, 1024), LayerSpan(998, 999, "x" * 40), bytes(20)
    )
    assert ParsedKey.parse(key).namespace == namespace_of(key) == namespace
    assert len(key.encode("ascii")) <= MAX_KEY_BYTES
    for name in (object_name(key), s3_object_name("r", key).removeprefix("r/")):
        shards = name.split("/")
        assert all(0 < len(shard) <= 255 and shard not in (".", "..") for shard in shards)
        assert not {"\0", "\n"} & set(name)


@given(st.text(st.characters(), max_size=300), st.text(st.characters(), max_size=300))
def test_any_string_as_a_key_stays_in_the_store(one: str, other: str) -> None:
    """Only the pool makes keys, but any other string stays inside the directory, too."""
    names = [object_name(one), object_name(other)]
    assert (names[0] == names[1]) == (one == other)
    for name in names:
        shards = name.split("/")
        assert len(shards) == 3
        assert all(shard not in ("", ".", "..") for shard in shards)
        assert len(shards[0]) <= 255


@given(st.text(st.characters(), max_size=300) | st.from_regex(LIKE_A_KEY, fullmatch=True))
def test_any_string_parses_or_is_no_key(text: str) -> None:
    try:
        parsed = ParsedKey.parse(text)
    except ValueError:
        return
    shard, span = parsed.shard, parsed.span
    made = KeyMaker(parsed.namespace, parsed.context).key(shard, span, parsed.chunk_hash)
    assert ParsedKey.parse(made) == parsed


@given(st.text(st.characters(), max_size=60), st.text(st.characters(), max_size=60))
def test_any_two_salts_differ_from_the_first_chunk_on(one: str, other: str) -> None:
    assert (hashes(one)[0] == hashes(other)[0]) == (one == other)


def test_a_cell_of_garbage_is_never_taken() -> None:
    """None of 20,000 random cells passes, not even by chance."""
    rng = np.random.default_rng(1)
    digest = key_digest(keys_of(make_namespace("m", DIGEST), "")[0])
    for data in rng.integers(0, 256, (20_000, 96), dtype=np.uint8):
        assert verify(memoryview(data), digest, checksum=False) is not None
