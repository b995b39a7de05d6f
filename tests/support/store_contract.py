"""The contract of a store (`storage/base.py`) as a pytest class, which every store passes.

A subclass provides the fixture `store`. Each test uses keys of a namespace of its own, so tests may
share a store, and buffers of one registered arena.
"""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.buffers import BufferArena, random_bytes
from vllm_kvpool.identity.keys import Namespace, make_namespace, manifest_key
from vllm_kvpool.storage.base import (
    Buffer,
    ChunkRef,
    GetOutcome,
    Listing,
    PutOutcome,
    Store,
)
from vllm_kvpool.storage.file.store import DirectoryReader

ARENA_BYTES = 48 << 20
SIZES = (1, 7, 511, 4095, 4096, 4097, 65_537, 1 << 20, (3 << 20) + 5)
NUM_THREADS = 6
KEYS_PER_THREAD = 12

STORED, EXISTED = PutOutcome.STORED, PutOutcome.EXISTED
OK, MISSING, WRONG_SIZE = GetOutcome.OK, GetOutcome.MISSING, GetOutcome.WRONG_SIZE


def new_namespace(model_name: str = "contract/model") -> Namespace:
    """Return a new namespace."""
    return make_namespace(model_name, os.urandom(6).hex())


def key_of(namespace: str, number: int) -> str:
    """Return a well-formed cell key."""
    return f"{namespace}@dcp0of1@head:{number}@layers:0-4@{number:032x}"


def put_one(store: Store, key: str, buffer: Buffer) -> PutOutcome:
    [outcome] = store.put([key], [buffer], [ChunkRef("")])
    return outcome


def get_one(store: Store, key: str, buffer: Buffer) -> GetOutcome:
    [outcome] = store.get([key], [buffer])
    return outcome


class StoreContract:
    """Subclass it as `TestMyStore(StoreContract)` with a fixture `store`."""

    @pytest.fixture
    def arena(self, store: Store) -> Iterator[BufferArena]:
        arena = BufferArena(ARENA_BYTES)
        store.register(arena.buffer)
        yield arena
        store.unregister(arena.buffer)

    @pytest.fixture
    def namespace(self) -> Namespace:
        return new_namespace()

    def test_capabilities_are_bounded(self, store: Store) -> None:
        capabilities = store.capabilities
        assert capabilities.name
        assert capabilities.parallel_gets > 0
        assert capabilities.parallel_puts > 0

    def test_returns_the_bytes_that_were_put(
        self, store: Store, arena: BufferArena, namespace: str
    ) -> None:
        objects = [random_bytes(nbytes, seed) for seed, nbytes in enumerate(SIZES)]
        keys = [key_of(namespace, number) for number in range(len(SIZES))]
        sources = [arena.holding(data) for data in objects]
        assert store.put(keys, sources, [ChunkRef("group")] * len(keys)) == [STORED] * len(keys)
        assert [bytes(source.view) for source in sources] == objects, "put changed its buffers"
        targets = [arena.take(nbytes) for nbytes in SIZES]
        assert store.get(keys, targets) == [OK] * len(keys)
        assert [bytes(target.view) for target in targets] == objects

    def test_neighbours_of_a_buffer_stay_untouched(
        self, store: Store, arena: BufferArena, namespace: str
    ) -> None:
        key = key_of(namespace, 0)
        put_one(store, key, arena.holding(b"x" * 5000))
        before, target, after = (arena.holding(b"\xee" * 5000) for _ in range(3))
        assert get_one(store, key, target) is OK
        assert bytes(target.view) == b"x" * 5000
        assert bytes(before.view) == bytes(after.view) == b"\xee" * 5000

    def test_an_absent_key_is_missing(
        self, store: Store, arena: BufferArena, namespace: str
    ) -> None:
        assert get_one(store, key_of(namespace, 0), arena.take(4096)) is MISSING
        assert store.exists([key_of(namespace, 0)]) == [False]

    @pytest.mark.parametrize("buffer_bytes", [4095, 4097, 2048, 8192])
    def test_another_size_is_an_outcome_of_its_own(
        self, store: Store, arena: BufferArena, namespace: str, buffer_bytes: int
    ) -> None:
        key = key_of(namespace, 0)
        put_one(store, key, arena.holding(random_bytes(4096, 1)))
        guard = arena.holding(b"\xee" * 64)
        assert get_one(store, key, arena.take(buffer_bytes)) is WRONG_SIZE
        assert bytes(guard.view) == b"\xee" * 64
        exact = arena.take(4096)
        assert get_one(store, key, exact) is OK
        assert bytes(exact.view) == random_bytes(4096, 1)

    @pytest.mark.parametrize("second_bytes", [4096, 8192])
    def test_the_first_writer_wins(
        self, store: Store, arena: BufferArena, namespace: str, second_bytes: int
    ) -> None:
        key = key_of(namespace, 0)
        assert put_one(store, key, arena.holding(b"a" * 4096)) is STORED
        assert put_one(store, key, arena.holding(b"b" * second_bytes)) in (STORED, EXISTED)
        target = arena.take(4096)
        assert get_one(store, key, target) is OK
        assert bytes(target.view) == b"a" * 4096

    def test_a_key_twice_in_one_put_keeps_its_first_bytes(
        self, store: Store, arena: BufferArena, namespace: str
    ) -> None:
        keys = [key_of(namespace, number) for number in (0, 1, 0)]
        sources = [arena.holding(letter * 4096) for letter in (b"a", b"b", b"c")]
        first, other, second = store.put(keys, sources, [ChunkRef("g")] * 3)
        assert (first, other) == (STORED, STORED)
        assert second in (STORED, EXISTED)
        target = arena.take(4096)
        assert get_one(store, keys[0], target) is OK
        assert bytes(target.view) == b"a" * 4096

    def test_a_key_twice_in_one_get_fills_both_buffers(
        self, store: Store, arena: BufferArena, namespace: str
    ) -> None:
        data = random_bytes(4096, 3)
        key = key_of(namespace, 0)
        put_one(store, key, arena.holding(data))
        targets = [arena.holding(bytes(4096)) for _ in range(3)] + [arena.take(100)]
        keys = [key, key, key_of(namespace, 1), key]
        assert store.get(keys, targets) == [OK, OK, MISSING, WRONG_SIZE]
        assert [bytes(target.view) for target in targets[:2]] == [data, data]

    def test_empty_batches(self, store: Store) -> None:
        assert store.exists([]) == []
        assert store.put([], [], []) == []
        assert store.get([], []) == []
        assert store.remove([]) == 0

    def test_results_come_in_the_order_of_the_keys(
        self, store: Store, arena: BufferArena, namespace: str
    ) -> None:
        keys = [key_of(namespace, number) for number in range(40)]
        stored = keys[::3]
        objects = {key: random_bytes(1000 + n, n) for n, key in enumerate(stored)}
        store.put(
            stored, [arena.holding(objects[k]) for k in stored], [ChunkRef("g")] * len(stored)
        )
        asked = keys[::-1]
        assert store.exists(asked) == [key in objects for key in asked]
        targets = [arena.take(len(objects.get(key, b"abc"))) for key in asked]
        assert store.get(asked, targets) == [OK if k in objects else MISSING for k in asked]
        for key, target in zip(asked, targets, strict=True):
            assert key not in objects or bytes(target.view) == objects[key]

    def test_exists_follows_put_and_remove(
        self, store: Store, arena: BufferArena, namespace: str
    ) -> None:
        kept, removed, absent = keys = [key_of(namespace, number) for number in range(3)]
        source = arena.holding(b"z" * 4096)
        store.put([kept, removed], [source, source], [ChunkRef("g")] * 2)
        assert store.exists(keys) == [True, True, False]
        assert store.remove([removed, absent]) == 1
        assert store.exists(keys) == [True, False, False]
        assert get_one(store, removed, arena.take(4096)) is MISSING
        assert put_one(store, removed, arena.holding(b"y" * 100)) is STORED
        target = arena.take(100)
        assert get_one(store, removed, target) is OK
        assert bytes(target.view) == b"y" * 100

    def test_remove_right_after_a_read(
        self, store: Store, arena: BufferArena, namespace: str
    ) -> None:
        key = key_of(namespace, 0)
        put_one(store, key, arena.holding(b"z" * 4096))
        assert get_one(store, key, arena.take(4096)) is OK
        assert store.remove([key]) == 1
        assert store.exists([key]) == [False]

    def test_remove_namespace_leaves_the_others(
        self, store: Store, arena: BufferArena, namespace: str
    ) -> None:
        digest = namespace.rpartition(":")[2]
        own = make_namespace("a.b+c", digest)
        others = [
            make_namespace(model_name, digest)
            for model_name in ("aXb+c", "a.bbc", "a.b", "a.b+cc", "xa.b+c", "a.b+c@fmt", "a.b\\+c")
        ]
        others.append(make_namespace("a.b+c", digest[::-1] if digest != digest[::-1] else "0" * 12))
        source = arena.holding(b"n" * 4096)
        own_keys = [key_of(own, number) for number in range(5)]
        other_keys = [key_of(other, 0) for other in others]
        other_keys += [f"{own}", f"x{own_keys[0]}", f"x\n{own_keys[0]}"]
        keys = own_keys + other_keys
        store.put(keys, [source] * len(keys), [ChunkRef("g")] * len(keys))
        assert store.exists(keys) == [True] * len(keys)
        assert store.remove_namespace(own) == len(own_keys)
        assert store.exists(own_keys) == [False] * len(own_keys)
        assert store.exists(other_keys) == [True] * len(other_keys)
        assert store.remove_namespace(own) == 0
        assert put_one(store, own_keys[0], source) is STORED

    def test_namespaces_are_listed_with_what_they_hold(
        self, store: Store, arena: BufferArena
    ) -> None:
        if not isinstance(store, Listing):
            return
        first, second = new_namespace("a.b+c_d/e"), new_namespace()
        source = arena.holding(b"n" * 5000)
        keys = [key_of(first, number) for number in range(3)]
        store.put(keys, [source] * 3, [ChunkRef("g")] * 3)
        assert first in store.namespaces()
        assert second not in store.namespaces()
        [usage] = [each for each in store.usage() if each.namespace == first]
        assert (usage.num_cells, usage.num_chunks in (0, 3)) == (3, True)
        assert 3 * 5000 <= usage.nbytes <= 6 * 8192
        store.remove_namespace(first)
        assert first not in store.namespaces()

    def test_a_manifest_is_no_cell(self, store: Store, arena: BufferArena) -> None:
        if not isinstance(store, Listing):
            return
        own, empty = new_namespace(), new_namespace()
        source = arena.holding(b"n" * 5000)
        key, manifests = key_of(own, 1), [manifest_key(own), manifest_key(empty)]
        store.put([key, *manifests], [source] * 3, [ChunkRef("", tenant="owner")] * 3)
        assert store.get([manifest_key(own)], [arena.take(5000)]) == [OK]
        assert {own, empty} <= set(store.namespaces())
        found = {each.namespace: each for each in store.usage()}
        assert (found[own].num_cells, found[own].num_chunks in (0, 1)) == (1, True)
        assert (found[empty].num_cells, found[empty].num_chunks) == (0, 0)
        assert found[own].num_hits in (None, 0)
        assert found[own].nbytes == 2 * found[empty].nbytes
        self.check_details(store, own, empty, key)
        assert store.remove_namespace(own) == 2
        assert store.exists([*manifests, key]) == [False, True, False]

    def check_details(self, store: Store, own: Namespace, empty: Namespace, key: str) -> None:
        """Check that a directory names the cell alone, and neither namespace's manifest."""
        if isinstance(store, DirectoryReader):
            chunks = [each for each in store.chunks() if each.namespace in (own, empty)]
            assert [each.key for each in chunks] == [key]
            for namespace, keys in ((own, [key]), (empty, [])):
                assert list(store.keys_written_before(namespace, 1 << 62)) == keys
                assert list(store.keys_of_owner(namespace, "owner")) in ([], keys)

    def test_strange_keys_neither_escape_nor_meet(
        self, store: Store, arena: BufferArena, namespace: str
    ) -> None:
        tails = [
            "",
            "/",
            "//",
            "..",
            "../../../x",
            "a\nb",
            "a\n",
            "\u00fc\u4e2d\U0001f600",
            " ",
            "%2F",
        ]
        tails += [
            "*",
            ".",
            "A",
            "a",
            "-",
            "?x=1",
            "k" * 10_000,
            "k" * 9_999 + "j",
            "\t",
            "'\";$(x)",
        ]
        keys = [f"{namespace}@{tail}" for tail in tails]
        keys += [f"{tail}{namespace}" for tail in tails[1:]]  # outside every namespace
        objects = [random_bytes(100 + number, number) for number in range(len(keys))]
        sources = [arena.holding(data) for data in objects]
        assert store.put(keys, sources, [ChunkRef("g")] * len(keys)) == [STORED] * len(keys)
        targets = [arena.take(len(data)) for data in objects]
        assert store.get(keys, targets) == [OK] * len(keys)
        assert [bytes(target.view) for target in targets] == objects
        assert store.remove(keys) == len(keys)
        assert store.exists(keys) == [False] * len(keys)

    def test_threads_may_put_and_get_at_once(
        self, store: Store, arena: BufferArena, namespace: str
    ) -> None:
        # Each thread first puts keys that all threads put, then its own keys. The bytes identify
        # the key. A thread must read its own keys. A shared key may be missing until its writer is
        # done.
        nbytes = 40_000
        shared = [key_of(namespace, number) for number in range(KEYS_PER_THREAD)]
        content = {key: random_bytes(nbytes, n) for n, key in enumerate(shared)}
        jobs = []
        for thread in range(NUM_THREADS):
            own = [key_of(namespace, 1000 * (thread + 1) + n) for n in range(KEYS_PER_THREAD)]
            content |= {key: random_bytes(nbytes, 1000 + n) for n, key in enumerate(own)}
            keys = shared + own
            sources = [arena.holding(content[key]) for key in keys]
            jobs.append((keys, sources, [arena.take(nbytes) for _ in keys]))

        def work(job: tuple[list[str], list[Buffer], list[Buffer]]) -> list[GetOutcome]:
            keys, sources, targets = job
            outcomes = store.put(keys, sources, [ChunkRef("g")] * len(keys))
            assert set(outcomes) <= {STORED, EXISTED}
            return store.get(keys, targets)

        with ThreadPoolExecutor(NUM_THREADS) as threads:
            results = list(threads.map(work, jobs))
        for (keys, _, targets), outcomes in zip(jobs, results, strict=True):
            assert set(outcomes[:KEYS_PER_THREAD]) <= {OK, MISSING}
            assert outcomes[KEYS_PER_THREAD:] == [OK] * KEYS_PER_THREAD
            for key, target, outcome in zip(keys, targets, outcomes, strict=True):
                assert outcome is MISSING or bytes(target.view) == content[key]
        targets = jobs[0][2][:KEYS_PER_THREAD]
        assert store.get(shared, targets) == [OK] * KEYS_PER_THREAD
        assert [bytes(target.view) for target in targets] == [content[key] for key in shared]
