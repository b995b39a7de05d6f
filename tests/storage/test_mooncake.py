"""MooncakeStore against a real master: the contract, two processes, and a master that dies."""

import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.support.buffers import BufferArena, make_buffer, random_bytes
from tests.support.mooncake_master import MooncakeMaster
from tests.support.store_contract import StoreContract, get_one, key_of, new_namespace, put_one
from vllm_kvpool.config import KVPoolConfig
from vllm_kvpool.errors import StoreUnreachable
from vllm_kvpool.storage import mooncake
from vllm_kvpool.storage.base import ChunkRef, GetOutcome, PutOutcome, Retention, Store, map_buffer
from vllm_kvpool.storage.mooncake import (
    MooncakeOptions,
    MooncakeStore,
    cut_batches,
    gets_sleep,
    import_wheel,
)
from vllm_kvpool.storage.mooncake_engine import shared_engine
from vllm_kvpool.storage.url import parse_store_url

pytestmark = pytest.mark.mooncake

MIB = 1 << 20
CHILD_LIMIT_S = 60


def options_for(master: MooncakeMaster, segment_bytes: int = 128 * MIB) -> MooncakeOptions:
    return MooncakeOptions(
        master_host="127.0.0.1",
        master_port=master.port,
        protocol="tcp",
        device="",
        metadata="P2PHANDSHAKE",
        segment_bytes=segment_bytes,
        local_buffer_bytes=16 * MIB,
        local_hostname="",
    )


@pytest.fixture(scope="module")
def master() -> Iterator[MooncakeMaster]:
    with MooncakeMaster() as master:
        yield master


@pytest.fixture(scope="module")
def shared_store(master: MooncakeMaster) -> Iterator[Store]:
    store = MooncakeStore(options_for(master), segment=True)
    yield store
    store.close()


@pytest.fixture(scope="module")
def taking_store(shared_store: Store, master: MooncakeMaster) -> Iterator[Store]:
    store = MooncakeStore(options_for(master, segment_bytes=0), segment=True)
    yield store
    store.close()


@pytest.fixture
def store(shared_store: Store) -> Store:
    return shared_store


class TestMooncakeStore(StoreContract):
    pass


class TestClientThatGivesNoMemory(StoreContract):
    """A client without a segment, which writes objects in sessions."""

    @pytest.fixture
    def store(self, taking_store: Store) -> Store:
        return taking_store


@pytest.mark.parametrize(
    ("url", "sleeps"),
    [
        ("mooncake://h:1?segment=0", True),
        ("mooncake://h:1?segment=64MiB", True),
        ("mooncake://h:1?segment=0&protocol=rdma", False),
        ("mooncake://h:1?segment=0&metadata=http://m:8080/metadata", False),
    ],
)
def test_gets_sleep_over_plain_tcp(url: str, sleeps: bool) -> None:
    options = parse_store_url(url).options
    assert isinstance(options, MooncakeOptions)
    native = import_wheel().MooncakeDistributedStore()
    assert gets_sleep(native, options) is sleeps


def test_a_batch_is_cut_at_its_bounds_and_before_a_repeated_key() -> None:
    def cut(keys: str, sizes: list[int]) -> list[str]:
        return [keys[part] for part in cut_batches(keys, sizes, max_keys=3, max_bytes=100)]

    assert cut("", []) == []
    assert cut("abcdefg", [1] * 7) == ["abc", "def", "g"]
    assert cut("abcd", [60, 40, 1, 200]) == ["ab", "c", "d"]
    assert cut("aabab", [1] * 5) == ["a", "ab", "ab"]
    pins = [0, 0, 7, 7, 7, 8]
    parts = cut_batches("abcdef", [1] * 6, 2, 100, pins)
    assert ["abcdef"[part] for part in parts] == ["ab", "cd", "e", "f"]


CHILD = """
import sys
import time
from vllm_kvpool.storage.backends import open_store
from vllm_kvpool.storage.url import parse_store_url
from vllm_kvpool.storage.base import ChunkRef, PutOutcome
from tests.support.store_contract import key_of
from tests.support.buffers import BufferArena, random_bytes
store = open_store(parse_store_url(sys.argv[1]), segment=True)
arena = BufferArena(64 << 20)
store.register(arena.buffer)
keys = [key_of(sys.argv[2], number) for number in range(40)]
sources = [arena.holding(random_bytes(1 << 20, number)) for number in range(40)]
assert store.put(keys, sources, [ChunkRef("chunk")] * 40) == [PutOutcome.STORED] * 40
print("ready", flush=True)
sys.stdin.read()
store.close()  # without unregister, which close must make up for
"""


READER = """
import os
import signal
import sys
import time
from vllm_kvpool.config import set_where_unset
from vllm_kvpool.storage.backends import open_store
from vllm_kvpool.storage.url import environment_for, parse_store_url
from tests.support.store_contract import key_of
from tests.support.buffers import BufferArena
spec = parse_store_url(sys.argv[1])
set_where_unset(environment_for(spec))
store = open_store(spec, segment=False)
arena = BufferArena(16 << 20)
store.register(arena.buffer)
targets = [arena.take(1 << 20) for _ in range(8)]
names = [outcome.name for outcome in store.get([key_of(sys.argv[2], 0)], targets[:1])]
os.kill(int(sys.argv[3]), signal.SIGSTOP)
began = time.monotonic()
keys = [key_of(sys.argv[2], number) for number in range(8)]
names += [outcome.name for outcome in store.get(keys, targets)]
print(time.monotonic() - began, *names, flush=True)
os._exit(0)
"""


def places_of(master: MooncakeMaster, keys: list[str]) -> list[str]:
    """The sessions of the processes in whose memory these are."""
    client: Any = import_wheel().MooncakeDistributedStore()
    assert client.setup("127.0.0.1", "P2PHANDSHAKE", 0, 0, "tcp", "", master.address) == 0
    found = client.batch_get_replica_desc(keys)
    client.close()
    replicas = [found[key][0].get_memory_descriptor() for key in keys]
    return [each.buffer_descriptor.transport_endpoint for each in replicas]


def start_writer(master: MooncakeMaster, namespace: str) -> "subprocess.Popen[str]":
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, f"mooncake://{master.address}?segment=128MiB", namespace],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    return child


def test_what_another_process_put_arrives_and_is_gone_with_its_segment() -> None:
    with MooncakeMaster() as master:
        namespace = new_namespace()
        child = start_writer(master, namespace)
        store = MooncakeStore(options_for(master), segment=False)
        arena = BufferArena(64 * MIB)
        store.register(arena.buffer)
        keys = [key_of(namespace, number) for number in range(41)]
        assert store.exists(keys) == [True] * 40 + [False]
        targets = [arena.take(MIB) for _ in keys]
        assert store.get(keys, targets) == [GetOutcome.OK] * 40 + [GetOutcome.MISSING]
        for number, target in enumerate(targets[:40]):
            assert bytes(target.view) == random_bytes(MIB, number)
        child.communicate("", timeout=CHILD_LIMIT_S)
        assert child.returncode == 0
        assert store.exists(keys) == [False] * 41
        assert get_one(store, keys[0], targets[0]) is GetOutcome.MISSING
        # A scheduler's client gives no memory, so nobody has any now.
        assert put_one(store, keys[40], targets[40]) is PutOutcome.FULL
        store.unregister(arena.buffer)
        store.close()


def test_a_client_fills_its_own_segment_before_those_of_others() -> None:
    """So a put is a copy within the process, and bytes cross the network when others get them."""
    with MooncakeMaster() as master:
        namespace = new_namespace()
        child = start_writer(master, namespace)
        store = MooncakeStore(options_for(master, segment_bytes=64 * MIB), segment=True)
        own = shared_engine("tcp").session
        arena = BufferArena(64 * MIB)
        store.register(arena.buffer)
        keys = [key_of(namespace, number) for number in range(100, 180)]
        buffer = arena.holding(random_bytes(MIB, 1))
        for key in keys:
            assert put_one(store, key, buffer) is PutOutcome.STORED
        is_own = [place == own for place in places_of(master, keys)]
        num_own = is_own.index(False)
        assert not any(is_own[num_own:])
        assert 48 <= num_own <= 64
        # Its own and those of the other come back alike.
        targets = [arena.take(MIB) for _ in range(4)]
        some = [keys[0], key_of(namespace, 3), keys[-1], key_of(namespace, 999)]
        assert store.get(some, targets) == [GetOutcome.OK] * 3 + [GetOutcome.MISSING]
        assert bytes(targets[0].view) == bytes(targets[2].view) == random_bytes(MIB, 1)
        assert bytes(targets[1].view) == random_bytes(MIB, 3)
        child.communicate("", timeout=CHILD_LIMIT_S)
        store.unregister(arena.buffer)
        store.close()


def test_a_writer_that_is_killed_costs_its_cells_and_no_error() -> None:
    with MooncakeMaster() as master:
        namespace = new_namespace()
        with start_writer(master, namespace) as child:
            store = MooncakeStore(options_for(master), segment=False)
            child.kill()
        target = make_buffer(MIB)
        store.register(target)
        assert get_one(store, key_of(namespace, 0), target) is GetOutcome.FAILED
        assert put_one(store, key_of(namespace, 99), target) is PutOutcome.FAILED
        store.unregister(target)
        store.close()


@pytest.mark.slow
def test_get_from_stopped_owner_ends_before_the_call_is_given_up() -> None:
    """A process without a core looks so; a call that is given up keeps its thread and slots."""
    with MooncakeMaster() as master:
        namespace = new_namespace()
        url = f"mooncake://{master.address}?segment=0"
        with start_writer(master, namespace) as child:
            try:
                done = subprocess.run(
                    [sys.executable, "-c", READER, url, namespace, str(child.pid)],
                    capture_output=True,
                    text=True,
                    timeout=CHILD_LIMIT_S,
                    check=True,
                )
            finally:
                child.kill()
        seconds, first, *others = done.stdout.split()
        assert first == "OK"
        assert others == ["FAILED"] * 8
        assert float(seconds) < KVPoolConfig().call_timeout_s - 2


def test_a_pool_that_cannot_make_room_is_full() -> None:
    with MooncakeMaster() as master:
        store = MooncakeStore(options_for(master, segment_bytes=16 * MIB), segment=True)
        buffer = make_buffer(32 * MIB)
        store.register(buffer)
        assert put_one(store, key_of(new_namespace(), 0), buffer) is PutOutcome.FULL
        store.unregister(buffer)
        store.close()


def test_what_is_pinned_survives_a_flood() -> None:
    with MooncakeMaster(lease_ms=100) as master:
        store = MooncakeStore(options_for(master, 64 * MIB), segment=True)
        buffer = map_buffer(2 * MIB)
        store.register(buffer)
        kept = Retention(time.time_ns() + 600 * 10**9)
        refs = [ChunkRef("a", retention=kept), ChunkRef("b"), ChunkRef("c", retention=kept)]
        assert store.put(["a", "b", "c"], [buffer] * 3, refs) == [PutOutcome.STORED] * 3
        for i in range(100):
            deadline = time.monotonic() + CHILD_LIMIT_S
            while store.put([f"f{i}"], [buffer], [ChunkRef(f"f{i}")]) != [PutOutcome.STORED]:
                assert time.monotonic() < deadline
                time.sleep(0.01)
        assert store.exists(["a", "b", "c"]) == [True, False, True]
        store.close()


def test_a_master_that_dies_is_unreachable_and_one_that_comes_back_is_empty() -> None:
    with MooncakeMaster() as master:
        store = MooncakeStore(options_for(master), segment=True)
        buffer = make_buffer(4096)
        store.register(buffer)
        key = key_of(new_namespace(), 0)
        assert put_one(store, key, buffer) is PutOutcome.STORED
        master.kill()
        calls = (
            lambda: store.exists([key]),
            lambda: store.put([key], [buffer], [ChunkRef("g")]),
            lambda: store.get([key], [buffer]),
            lambda: store.remove([key]),
            lambda: store.remove_namespace(new_namespace()),
        )
        with ThreadPoolExecutor(len(calls)) as threads:  # each may try to connect for 5 s
            for call in [threads.submit(call) for call in calls]:
                error = call.exception(CHILD_LIMIT_S)
                assert isinstance(error, StoreUnreachable), error
                assert master.address in str(error)
        assert master.start()
        assert store.exists([key]) == [False]
        store.unregister(buffer)
        store.close()


def test_a_put_of_more_than_one_native_batch(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mooncake, "MAX_BATCH_KEYS", 3)
    monkeypatch.setattr(mooncake, "MAX_EXISTS_KEYS", 4)
    namespace = new_namespace()
    arena = BufferArena(MIB)
    store.register(arena.buffer)
    keys = [key_of(namespace, number) for number in range(10)]
    sources = [arena.holding(random_bytes(5000, number)) for number in range(10)]
    assert (
        store.put(keys, sources, [ChunkRef(str(n)) for n in range(10)]) == [PutOutcome.STORED] * 10
    )
    assert store.exists([*keys, "absent"]) == [True] * 10 + [False]
    targets = [arena.take(5000) for _ in keys]
    assert store.get(keys, targets) == [GetOutcome.OK] * 10
    assert [bytes(t.view) for t in targets] == [bytes(s.view) for s in sources]
    store.unregister(arena.buffer)
