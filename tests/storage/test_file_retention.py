"""Pins, times to live and shares in a directory: what stays when it is full, and what leaves."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.buffers import make_buffer
from tests.support.fakes import FakeClock
from tests.support.store_hooks import wait_complete
from vllm_kvpool.identity.keys import chunk_id_of_key
from vllm_kvpool.storage.base import ChunkRef, PutOutcome, Retention
from vllm_kvpool.storage.eviction import POLICIES, Shares
from vllm_kvpool.storage.file.space import FORMAT_DIR
from vllm_kvpool.storage.file.store import FileStore

FILE = 8192
CELL = FILE - 500
ROOM = 20  # cells
NAMESPACE = "m@fmt:0123456789ab"
HOUR_NS = 3600 * 10**9


class Directory:
    """A store of `ROOM` cells, and prompts of one cell a chunk."""

    def __init__(self, root: Path, shares: Shares = Shares.NONE) -> None:
        self.clock = FakeClock(1e9)
        self.root = root
        self.open(shares)

    def open(self, shares: Shares = Shares.NONE) -> None:
        self.store = FileStore(
            *(str(self.root), ROOM * FILE, "threads", POLICIES["lru"], self.clock.ns),
            shares=shares,
        )

    def keys(self, prompt: int, chunks: int, namespace: str = NAMESPACE) -> list[str]:
        return [
            f"{namespace}@dcp0of1@head:0@layers:0-4@{prompt:08x}{chunk:08x}"
            for chunk in range(chunks)
        ]

    def save(
        self,
        prompt: int,
        chunks: int,
        *,
        pin_s: float = 0,
        ttl_s: float = 0,
        tenant: str = "",
        namespace: str = NAMESPACE,
    ) -> list[PutOutcome]:
        self.clock.advance(1.0)
        wish = Retention(
            self.clock.ns() + int(pin_s * 1e9) if pin_s else 0,
            self.clock.ns() + int(ttl_s * 1e9) if ttl_s else 0,
        )
        keys = self.keys(prompt, chunks, namespace)
        ids = [chunk_id_of_key(key) for key in keys]
        refs = [
            ChunkRef(ids[i], ids[i - 1] if i else "", i, retention=wish, tenant=tenant)
            for i in range(chunks)
        ]
        return self.store.put(keys, [make_buffer(CELL)] * chunks, refs)

    def held(self, prompt: int, chunks: int, namespace: str = NAMESPACE) -> int:
        return sum(self.store.exists(self.keys(prompt, chunks, namespace)))

    def usage(self) -> dict[str, int]:
        """Files of each owner; what the index counts is what its rows say."""
        found = {each.owner: each.nbytes // FILE for each in self.store.owners()}
        with self.store._space.index._reading() as db:
            counted = dict(db.execute("SELECT name, bytes FROM owner WHERE bytes <> 0"))
        assert counted == {owner: count * FILE for owner, count in found.items()}
        return found

    def expire(self) -> None:
        self.store._space._expire()


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Directory]:
    made = Directory(tmp_path / "pool")
    yield made
    made.store.close()


def flood(directory: Directory, first: int = 100, prompts: int = 40) -> None:
    for prompt in range(first, first + prompts):
        assert directory.save(prompt, 2) == [PutOutcome.STORED] * 2


def test_a_pinned_prompt_survives_a_flood_until_its_pin_ends(directory: Directory) -> None:
    directory.save(1, 4, pin_s=3600)
    directory.save(2, 4)
    flood(directory)
    assert directory.held(1, 4) == 4
    assert directory.held(2, 4) == 0
    directory.clock.advance(3600.0)
    flood(directory, 200)
    assert directory.held(1, 4) == 0


def test_stored_prompts_are_pinned_and_unpinned(directory: Directory) -> None:
    directory.save(1, 4)
    until = directory.clock.ns() + HOUR_NS
    assert directory.store.pin([*directory.keys(1, 6)], until) == 4
    directory.store.close()
    directory.open()  # pins are in the index
    flood(directory)
    assert directory.held(1, 4) == 4
    assert directory.store.pin(directory.keys(1, 4), 0) == 4
    assert directory.store.pin(directory.keys(1, 4), 0) == 0
    flood(directory, 200)
    assert directory.held(1, 4) == 0


def test_at_most_half_of_the_size_is_pinned_and_a_prompts_beginning_first(
    directory: Directory,
) -> None:
    directory.save(1, 4, pin_s=3600)
    directory.save(2, 8)
    until = directory.clock.ns() + HOUR_NS
    assert directory.store.pin(directory.keys(2, 8), until) == 6
    flood(directory)
    assert directory.held(1, 4) == 4
    assert directory.held(2, 8) == 6


def test_a_pin_in_the_past_is_none(directory: Directory) -> None:
    directory.save(1, 4)
    assert directory.store.pin(directory.keys(1, 4), directory.clock.ns() - 1) == 0


def test_a_pin_is_only_made_longer(directory: Directory) -> None:
    directory.save(1, 2, pin_s=7200)
    directory.store.pin(directory.keys(1, 2), directory.clock.ns() + HOUR_NS)
    directory.clock.advance(5000.0)
    flood(directory)
    assert directory.held(1, 2) == 2


def test_a_prompt_is_removed_after_its_time_to_live(directory: Directory) -> None:
    directory.save(1, 4, ttl_s=60)
    directory.save(2, 4)
    directory.expire()
    assert directory.held(1, 4) == 4
    directory.clock.advance(60.0)
    directory.expire()
    assert (directory.held(1, 4), directory.held(2, 4)) == (0, 4)
    assert directory.store._space.index.used_bytes() == 4 * FILE
    directory.save(1, 4)  # without one
    directory.clock.advance(3600.0)
    directory.expire()
    assert directory.held(1, 4) == 4


def test_more_chunks_than_one_transaction_expires_leave_at_once(directory: Directory) -> None:
    for prompt in range(18):
        directory.save(prompt, 1, ttl_s=60)
    directory.clock.advance(100.0)
    directory.expire()
    assert sum(directory.held(prompt, 1) for prompt in range(18)) == 0


def test_what_another_prompt_continues_stays_as_long_as_that_one(directory: Directory) -> None:
    directory.save(1, 2, ttl_s=60)
    [first, second, third] = directory.keys(1, 3)
    ref = ChunkRef(chunk_id_of_key(third), chunk_id_of_key(second), 2)
    directory.store.put([third], [make_buffer(CELL)], [ref])
    directory.clock.advance(100.0)
    directory.expire()
    assert directory.store.exists([first, second, third]) == [True] * 3
    directory.store.remove([third])
    directory.expire()
    assert directory.store.exists([first, second]) == [False] * 2


def test_a_pin_outlasts_a_time_to_live(directory: Directory) -> None:
    directory.save(1, 2, ttl_s=60)
    directory.store.pin(directory.keys(1, 2), directory.clock.ns() + HOUR_NS)
    directory.clock.advance(100.0)
    directory.expire()
    assert directory.held(1, 2) == 2
    directory.clock.advance(3600.0)
    directory.expire()
    assert directory.held(1, 2) == 0


# Shares


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[Directory]:
    made = Directory(tmp_path / "pool", Shares.TENANT)
    yield made
    made.store.close()


def test_a_tenant_that_floods_pushes_out_no_other_tenants_prompt(shared: Directory) -> None:
    for prompt in range(3):
        shared.save(prompt, 2, tenant="small")
    for prompt in range(100, 160):
        assert shared.save(prompt, 2, tenant="flood") == [PutOutcome.STORED] * 2
    assert [shared.held(prompt, 2) for prompt in range(3)] == [2, 2, 2]
    assert shared.usage() == {"small": 6, "flood": 14}


def test_a_tenant_that_uses_most_makes_room_for_others_until_all_have_the_same(
    shared: Directory,
) -> None:
    for prompt in range(10):
        shared.save(prompt, 2, tenant="big")
    for prompt in range(100, 150):
        shared.save(prompt, 1, tenant=("a", "b", "")[prompt % 3])
    assert shared.usage() == {"big": 5, "a": 5, "b": 5, "-": 5}


def test_without_shares_the_least_recently_used_leaves(directory: Directory) -> None:
    directory.save(1, 2, tenant="small")
    for prompt in range(100, 140):
        directory.save(prompt, 2, tenant="flood")
    assert directory.held(1, 2) == 0
    assert directory.usage() == {}


def test_namespaces_share_the_room(tmp_path: Path) -> None:
    other = "other@fmt:0123456789ab"
    shared = Directory(tmp_path / "pool", Shares.NAMESPACE)
    shared.save(1, 4, namespace=other)
    for prompt in range(100, 140):
        shared.save(prompt, 2, tenant="x")
    assert shared.held(1, 4, other) == 4
    assert shared.usage() == {other: 4, NAMESPACE: 16}
    shared.store.remove_namespace(other)
    assert shared.usage() == {NAMESPACE: 16}
    shared.store.close()


def test_a_manifest_takes_room_of_its_namespace_and_is_none_of_its_chunks(tmp_path: Path) -> None:
    shared = Directory(tmp_path / "pool", Shares.NAMESPACE)
    shared.save(1, 4)
    manifest = f"{NAMESPACE}@manifest"
    shared.store.put([manifest], [make_buffer(CELL)], [ChunkRef(manifest)])
    assert shared.store.owners() == [(NAMESPACE, 4, 5 * FILE)]
    assert set(shared.store.keys_of_owner(NAMESPACE, NAMESPACE)) == set(shared.keys(1, 4))
    shared.store.close()


def test_what_was_stored_before_there_were_shares_makes_room(directory: Directory) -> None:
    for prompt in range(10):
        directory.save(prompt, 2)
    directory.store.close()
    directory.open(Shares.TENANT)
    for prompt in range(100, 140):
        assert directory.save(prompt, 1, tenant="a") == [PutOutcome.STORED]
    assert directory.usage() == {"a": 10}  # the rest is nobody's, and as much
    assert sum(directory.held(prompt, 2) for prompt in range(10)) == 10


def test_a_common_beginning_counts_for_its_first_writer_and_stays_for_others(
    shared: Directory,
) -> None:
    shared.save(1, 2, tenant="a")
    [*_, second, third] = shared.keys(1, 3)
    ref = ChunkRef(chunk_id_of_key(third), chunk_id_of_key(second), 2, tenant="b")
    shared.store.put([third], [make_buffer(CELL)], [ref])
    for prompt in range(100, 140):
        shared.save(prompt, 2, tenant="a")
    assert shared.usage()["b"] == 1
    assert shared.held(1, 3) == 3


def test_cells_of_one_put_count_for_their_own_tenants(shared: Directory) -> None:
    keys = shared.keys(1, 6)
    refs = [ChunkRef(chunk_id_of_key(key), tenant="ab"[i // 3]) for i, key in enumerate(keys)]
    shared.store.put(keys, [make_buffer(CELL)] * 6, refs)
    assert shared.usage() == {"a": 3, "b": 3}
    assert set(shared.store.keys_of_owner(NAMESPACE, "b")) == set(keys[3:])
    assert shared.store.remove(keys[3:]) == 3
    assert shared.usage() == {"a": 3}


def test_after_a_lost_index_the_room_is_shared_by_who_is_known(tmp_path: Path) -> None:
    shared = Directory(tmp_path / "pool", Shares.TENANT)
    for prompt in range(4):
        shared.save(prompt, 2, tenant="a")
    shared.store.close()
    for path in (tmp_path / "pool" / FORMAT_DIR).glob("index*"):
        path.unlink()
    shared.open(Shares.TENANT)
    assert wait_complete(shared.store, 60.0)
    assert shared.usage() == {"-": 8}
    shared.store.close()
