"""Mooncake's `ascend` protocol: wheels without groups as a stand-in, and the engine over TCP.

`tests/emulated_npu/test_mooncake.py` runs a published wheel. The stand-in is of wheels before
0.3.12. It refuses what the real transport refuses: threads without a device, memory that the
runtime does not know or that is not aligned, and transfers of memory that nobody registered.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

from tests.cache_tensors import tensors_of
from tests.support.buffers import BufferArena, random_bytes
from tests.support.mooncake_master import MooncakeMaster
from tests.support.npu import FakeNpu, FakeNpuEngine, FakeNpuWheel
from tests.support.store_contract import key_of, new_namespace
from vllm_kvpool.connector import KVPoolConnector
from vllm_kvpool.errors import ConfigError, StoreError
from vllm_kvpool.storage import mooncake, mooncake_engine
from vllm_kvpool.storage.backends import capabilities_of
from vllm_kvpool.storage.base import Buffer, ChunkRef, GetOutcome, PutOutcome
from vllm_kvpool.storage.mooncake import MooncakeOptions, MooncakeStore, bare_host
from vllm_kvpool.storage.mooncake_engine import SharedEngine
from vllm_kvpool.storage.url import FABRIC_ENV, parse_store_url, uses_device

from .conftest import SHAPE

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

URL = "mooncake://10.0.0.1:50088?protocol=ascend&segment=1GiB"
OWN_HOST = "10.0.0.7"
GIB = 1 << 30
BLOCK = 32


@pytest.fixture
def wheel(npu: FakeNpu, monkeypatch: pytest.MonkeyPatch) -> FakeNpuWheel:
    """Its engine is the one that vLLM-Ascend has made in this process."""
    fake = FakeNpuWheel(npu)
    monkeypatch.setattr(mooncake, "import_wheel", lambda: fake)
    monkeypatch.setattr(mooncake, "probe_master", lambda options: OWN_HOST)
    monkeypatch.setattr(mooncake_engine, "_engines", {})
    mooncake_engine.use_engine_of("ascend", fake.engine.open)
    return fake


def options_of(url: str, env: dict[str, str] | None = None) -> MooncakeOptions:
    options = parse_store_url(url, environ=env or {}).options
    assert isinstance(options, MooncakeOptions)
    return options


def test_a_worker_over_the_old_wheel_registers_its_arena_once(
    on_npu: Callable[[bool], None], vllm_config: Any, wheel: FakeNpuWheel
) -> None:
    on_npu(True)
    connector = KVPoolConnector(vllm_config(URL), KVConnectorRole.WORKER, caches := cache_config())
    names = caches.kv_cache_groups[0].layer_names
    shape = (caches.num_blocks, BLOCK, SHAPE.kv_heads, SHAPE.head_dim)
    connector.register_kv_caches({name: (torch.zeros(shape), torch.zeros(shape)) for name in names})
    assert len(wheel.engine.regions) == 1
    assert wheel.setups[0] == {
        "name": f"{OWN_HOST}:{FakeNpuEngine.RPC_PORT}",
        "segment": GIB,
        "buffer": 16 << 20,
        "protocol": "ascend",
        "engine": wheel.engine,
    }
    connector.shutdown()
    assert not wheel.engine.regions


def cache_config() -> KVCacheConfig:
    names = [f"model.layers.{i}.self_attn.attn" for i in range(SHAPE.layers)]
    spec = FullAttentionSpec(
        block_size=BLOCK,
        num_kv_heads=SHAPE.kv_heads,
        head_size=SHAPE.head_dim,
        dtype=torch.float32,
    )
    return KVCacheConfig(
        num_blocks=4,
        kv_cache_tensors=tensors_of(names),
        kv_cache_groups=[KVCacheGroupSpec(names, spec)],
    )


def test_cells_go_to_the_old_wheel_and_back_through_registered_memory(
    npu: FakeNpu, wheel: FakeNpuWheel
) -> None:
    store = MooncakeStore(options_of(URL), segment=True)
    arena = arena_of(npu, 1 << 20)
    store.register(arena.buffer)
    keys = [key_of(new_namespace(), number) for number in range(4)]
    sources = [arena.holding(random_bytes(5000, number)) for number in range(4)]
    assert store.put(keys, sources, [ChunkRef("g")] * 4) == [PutOutcome.STORED] * 4
    targets = [arena.take(5000) for _ in keys]
    assert store.get(keys, targets) == [GetOutcome.OK] * 4
    assert [bytes(t.view) for t in targets] == [bytes(s.view) for s in sources]
    store.close()
    assert not wheel.engine.regions


@pytest.mark.usefixtures("wheel")
def test_cells_of_a_chunk_leave_one_by_one_where_the_wheel_has_no_groups() -> None:
    assert capabilities_of(parse_store_url(URL)).loses_cells
    assert MooncakeStore(options_of(URL), segment=False).capabilities.loses_cells


def test_two_tiers_and_another_connector_share_the_engine(
    npu: FakeNpu, wheel: FakeNpuWheel
) -> None:
    """Memory is registered once, and is let go with the last; the other's is left alone."""
    others = npu.pinned(1 << 20)
    theirs = -(-others.data_ptr() // (64 << 10)) * (64 << 10)
    assert wheel.engine.register_memory(theirs, 64 << 10) == 0
    stores = [MooncakeStore(options_of(URL), segment=True) for _ in range(2)]
    arena = arena_of(npu, 1 << 20)
    for store in stores:
        store.register(arena.buffer)
    assert len(wheel.engine.regions) == 2
    stores[0].unregister(arena.buffer)
    assert arena.buffer.address in wheel.engine.regions
    stores[1].close()  # without unregister, which close makes up for
    stores[0].close()
    assert list(wheel.engine.regions) == [theirs]
    assert wheel.engine.num_opened == 1


def arena_of(npu: FakeNpu, nbytes: int) -> BufferArena:
    """An aligned arena in the runtime's memory."""
    memory = npu.pinned(nbytes + (128 << 10))
    start = -memory.data_ptr() % (64 << 10)
    arena = BufferArena(1)
    view = memoryview(memory.numpy())[start : start + nbytes]  # type: ignore[arg-type]
    arena.buffer = Buffer(memory.data_ptr() + start, view)
    return arena


def test_a_client_for_lookups_takes_nothing_of_the_card(wheel: FakeNpuWheel) -> None:
    MooncakeStore(options_of(URL), segment=False).close()
    assert (wheel.setups[0]["segment"], wheel.setups[0]["buffer"]) == (0, 0)


def test_fabric_memory_has_no_engine_and_registers_nothing(
    npu: FakeNpu, wheel: FakeNpuWheel
) -> None:
    store = MooncakeStore(options_of(URL, {FABRIC_ENV: "1"}), segment=True)
    arena = arena_of(npu, 1 << 20)
    store.register(arena.buffer)
    keys = [key_of(new_namespace(), 0)]
    assert store.put(keys, [arena.take(4096)], [ChunkRef("g")]) == [PutOutcome.STORED]
    store.unregister(arena.buffer)
    store.close()
    expected = {"name": OWN_HOST, "segment": GIB, "buffer": 0, "engine": None}
    assert expected.items() <= wheel.setups[0].items()
    assert (wheel.engine.num_opened, wheel.engine.regions) == (0, {})


@pytest.mark.parametrize(
    ("url", "env", "words"),
    [
        ("mooncake://h:1?protocol=ascend&segment=512MiB", {}, "multiple of 1GiB"),
        ("mooncake://h:1?protocol=ascend&segment=1536MiB", {FABRIC_ENV: "1"}, "multiple of 1GiB"),
        (URL, {FABRIC_ENV: "0"}, "unset it"),
    ],
)
def test_what_cannot_work_is_refused(url: str, env: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_store_url(url, environ=env)


def test_urls_of_ascend() -> None:
    spec = parse_store_url(URL, environ={})
    assert uses_device(spec)
    assert options_of(URL).fabric is False
    assert options_of(URL, {FABRIC_ENV: "1"}).fabric is True
    assert options_of("mooncake://h:1?protocol=ascend&segment=0").segment_bytes == 0
    # The variable says nothing of other protocols.
    assert options_of("mooncake://h:1?segment=16MiB", {FABRIC_ENV: "1"}).fabric is False
    assert not uses_device(parse_store_url("mooncake://h:1"))
    assert not uses_device(parse_store_url("file:///x"))


@pytest.mark.parametrize(
    ("address", "host"),
    [("h", "h"), ("h:1", "h"), ("10.0.0.1", "10.0.0.1"), ("10.0.0.1:99", "10.0.0.1"),
     ("fd00::1", "[fd00::1]"), ("[fd00::1]", "[fd00::1]"), ("[fd00::1]:99", "[fd00::1]")],
)  # fmt: skip
def test_the_host_of_an_address(address: str, host: str) -> None:
    assert bare_host(address) == host


# The same code with the real wheel, over TCP


@pytest.fixture
def over_tcp(monkeypatch: pytest.MonkeyPatch) -> Iterator[MooncakeMaster]:
    monkeypatch.setattr(mooncake, "DEVICE_PROTOCOLS", ("tcp",))
    monkeypatch.setattr(mooncake_engine, "_engines", {})
    with MooncakeMaster() as master:
        yield master


@pytest.mark.mooncake
def test_the_real_wheel_on_a_shared_engine(over_tcp: MooncakeMaster) -> None:
    options = options_of(f"mooncake://{over_tcp.address}?segment=64MiB")
    worker = MooncakeStore(options, segment=True)
    scheduler = MooncakeStore(options, segment=False)
    arena = BufferArena(1 << 20)
    worker.register(arena.buffer)
    namespace = new_namespace()
    keys = [key_of(namespace, number) for number in range(4)]
    sources = [arena.holding(random_bytes(5000, number)) for number in range(4)]
    assert worker.put(keys, sources, [ChunkRef("g")] * 4) == [PutOutcome.STORED] * 4
    assert scheduler.exists([*keys, "absent"]) == [True] * 4 + [False]
    targets = [arena.take(5000) for _ in keys]
    assert worker.get(keys, targets) == [GetOutcome.OK] * 4
    assert [bytes(t.view) for t in targets] == [bytes(s.view) for s in sources]
    engine = mooncake_engine.shared_engine("tcp")
    assert isinstance(engine, SharedEngine)
    overlapping = arena.take(8192)
    with pytest.raises(StoreError, match="overlaps"):
        engine.register(overlapping.address, overlapping.nbytes)
    worker.unregister(arena.buffer)
    engine.register(overlapping.address, overlapping.nbytes)  # nothing was left registered
    engine.unregister(overlapping.address)
    scheduler.close()
    worker.close()
