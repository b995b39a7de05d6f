"""Whole worker parts over one store: ranks of one TP and PP size write, ranks of another read.

Only the engine is missing: topology, planner, keys, lanes, copiers and store are the package's own.
"""

import base64
import itertools
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from tests.support.copiers import warm_copier
from tests.support.memory_store import MemoryStore
from tests.support.threads import NewThreads
from tests.support.waiting import wait_until
from tests.support.worker_steps import load_all, prompt_hashes
from vllm_kvpool.config import KVPoolConfig, read_config
from vllm_kvpool.errors import ConfigError, StoreUnreachable
from vllm_kvpool.identity.keys import ContextRank, KeyMaker, chunk_id_of, make_namespace
from vllm_kvpool.layout.engine_shape import ModelShape, RankPlace
from vllm_kvpool.layout.page_formats import from_token_content
from vllm_kvpool.layout.topology import KVCacheGroup, LayerGroup, Topology, cells_of_rank
from vllm_kvpool.scheduler.messages import StepPlan
from vllm_kvpool.scheduler.prefix_search import CellNames
from vllm_kvpool.staging import devices
from vllm_kvpool.staging.arena import slot_bytes
from vllm_kvpool.staging.devices import AcceleratorDevice, Device, PageLock
from vllm_kvpool.storage import open_tiers
from vllm_kvpool.storage.backends import open_store
from vllm_kvpool.storage.base import NO_RETENTION, PutOutcome, Retention, Store
from vllm_kvpool.storage.contents.manifest import Manifest, write_manifest
from vllm_kvpool.storage.file import space
from vllm_kvpool.storage.file.store import FileStore
from vllm_kvpool.storage.guarded import CallTimeouts
from vllm_kvpool.storage.mooncake import MooncakeOptions
from vllm_kvpool.storage.url import StoreSpec, parse_store_url
from vllm_kvpool.transfer import ops
from vllm_kvpool.transfer.ops import JobId, JobPages, LaneName, LoadPlan, OpKind, SavePlan
from vllm_kvpool.transfer.planner import Planner
from vllm_kvpool.worker import lane_limits, worker_part
from vllm_kvpool.worker.worker_part import WorkerPart

# Legend: L layers, B blocks, H heads, N tokens per block, C content, T tokens.
LAYERS, CONTENT, CHUNK, TOKENS = 8, 16, 32, 96
LIMIT_S = 30.0
SMALL_BYTES = 4 << 20
SLOW_S = 0.1
SHUTDOWN_S = 1.0
CLOSING_S = 4.0  # for joins of hung threads, on a busy machine
EXPIRES_NS = 3 * 10**9  # longer than a busy machine takes for a save and a load
MOST_PROMPTS = 40  # more than the small directory has room for
NAMES = itertools.count()
MODEL = make_namespace("model", "0" * 12)
GPU = AcceleratorDevice(torch.device("cuda", 0))


class Rank:
    """A rank of an engine: its worker part and its pages."""

    def __init__(
        self,
        store: str | list[str],
        topology: Topology,
        tp_rank: int,
        pp_rank: int,
        block: int,
        **options: str,
    ) -> None:
        start, stop = topology.stages[pp_rank]
        first, heads = topology.first_head(tp_rank), topology.heads_per_rank
        self.part = (slice(start, stop), slice(first, first + heads))
        self.block = block
        shape = (stop - start, 1 + TOKENS // block, heads, block, CONTENT)
        every = torch.full(shape, -1, dtype=torch.int16)
        self.pages_lbhnc = every[:, 1:]  # no request has the first block
        model = ModelShape(
            namespace=MODEL,
            layer_groups=(LayerGroup(topology, CONTENT * 2),),
            groups=(KVCacheGroup(block),),
            num_blocks=1 + TOKENS // block,
            num_ranks=topology.tp_size * len(topology.stages),
        )
        extra = {"store": store, "chunk_tokens": CHUNK, "staging_bytes": "1MiB", **options}
        self.pool = WorkerPart(
            read_config(extra, env={}),
            model,
            RankPlace(tp_rank, pp_rank, pp_rank * topology.tp_size + tp_rank),
            [from_token_content(layer) for layer in every],
            warm_copier,
            finish_in_step=True,
        )
        self.pages = (JobPages(tuple(range(1, 1 + TOKENS // block)), 0, 0, TOKENS),)
        self.jobs = itertools.count(1)

    def save(
        self,
        kv_lhtc: torch.Tensor,
        prompt: int = 0,
        retention: Retention = NO_RETENTION,
        tenant: str = "",
    ) -> None:
        """Save a prompt. Return when its pages are free, as at the end of a step."""
        blocks = kv_lhtc[self.part].unflatten(2, (-1, self.block)).transpose(1, 2)
        self.pages_lbhnc.copy_(blocks)
        job, hashes = JobId(next(self.jobs)), hashes_of(prompt)
        plan = SavePlan(job, "r", 0, hashes, self.pages, retention=retention, tenant=tenant)
        self.pool.worker.start_saves(StepPlan(saves=(plan,)))

    def load(self, prompt: int = 0, *, misses: bool = False) -> torch.Tensor:
        """Load a prompt and return its tokens, `[L, H, T, C]`. With `misses`, the load must miss
        tokens; these are -1."""
        self.pages_lbhnc.fill_(-1)
        job = JobId(next(self.jobs))
        load = LoadPlan(job, "r", 0, hashes_of(prompt), self.pages, 0, TOKENS)
        assert bool(load_all([self.pool], load)) is misses
        return self.pages_lbhnc.transpose(1, 2).flatten(2, 3)

    def close(self) -> dict[str, float]:
        """Close the rank after its puts, and return its metrics."""
        self.pool.close()
        return self.pool.registry.snapshot()


def hashes_of(prompt: int) -> tuple[bytes, ...]:
    return prompt_hashes(range(prompt * TOKENS, (prompt + 1) * TOKENS), CHUNK)


def stages(pp_size: int) -> tuple[tuple[int, int], ...]:
    cut = LAYERS // pp_size
    return tuple((i * cut, (i + 1) * cut) for i in range(pp_size))


def ranks(
    store: str | list[str], num_heads: int, shape: tuple[int, int, int], *, per_head: bool = True
) -> Iterator[Rank]:
    tp_size, pp_size, block = shape
    topology = Topology(num_heads, tp_size, stages(pp_size), 2, per_head)
    for tp_rank, pp_rank in itertools.product(range(tp_size), range(pp_size)):
        yield Rank(store, topology, tp_rank, pp_rank, block)


def random_kv(num_heads: int) -> torch.Tensor:
    return torch.randint(0, 2**15, (LAYERS, num_heads, TOKENS, CONTENT), dtype=torch.int16)


@pytest.mark.parametrize("num_heads", [1, 2, 8])
@pytest.mark.parametrize(
    ("writer", "reader"),
    [
        # (TP, PP, block)
        ((1, 1, 16), (2, 2, 32)),
        ((2, 4, 32), (1, 1, 48)),
        ((4, 2, 16), (8, 1, 96)),
        ((8, 1, 96), (4, 4, 16)),
        ((16, 1, 32), (2, 1, 16)),
        ((1, 4, 48), (16, 2, 32)),
    ],
)
def test_any_parallelism_reads_any_other(
    num_heads: int, writer: tuple[int, int, int], reader: tuple[int, int, int]
) -> None:
    store = f"memory://sides{next(NAMES)}"
    shared = MemoryStore(store.removeprefix("memory://"), 1 << 30)  # keeps the writers' cells
    kv = random_kv(num_heads)
    for rank in ranks(store, num_heads, writer):
        rank.save(kv)
        rank.close()
    # All cells are there, and replicas have stored none twice.
    assert len(shared._table.list_keys()) == num_heads * (LAYERS // 2) * (TOKENS // CHUNK)
    for rank in ranks(store, num_heads, reader):
        assert torch.equal(rank.load(), kv[rank.part])
        rank.close()
    shared.close()


@pytest.mark.parametrize(("tp_size", "num_heads"), [(1, 2), (2, 8), (4, 2)])
def test_cells_per_rank_at_equal_parallelism(tp_size: int, num_heads: int) -> None:
    store = f"memory://sides{next(NAMES)}"
    shared = MemoryStore(store.removeprefix("memory://"), 1 << 30)
    kv = random_kv(num_heads)
    for rank in ranks(store, num_heads, (tp_size, 2, 16), per_head=False):
        rank.save(kv)
        rank.close()
    distinct = min(tp_size, num_heads)
    assert len(shared._table.list_keys()) == distinct * (LAYERS // 2) * (TOKENS // CHUNK)
    for rank in ranks(store, num_heads, (tp_size, 1, 32), per_head=False):
        assert torch.equal(rank.load(), kv[rank.part])
        rank.close()
    shared.close()


# Kept and expiring cells


@pytest.mark.parametrize("policy", ["through", "back"])
@pytest.mark.parametrize("host", [[], ["host://1MiB"]])
def test_a_pinned_prompt_survives_others_wherever_it_was_saved(
    tmp_path: Path, host: list[str], policy: str
) -> None:
    directory = f"file://{tmp_path}/cells?size=1MiB"
    rank = one_rank([*host, directory], write_policy=policy)
    kv = random_kv(HEADS)
    rank.save(kv)  # not pinned
    rank.save(kv, retention=Retention(time.time_ns() + 3600 * 10**9))
    for prompt in range(1, MOST_PROMPTS):
        rank.save(random_kv(HEADS), prompt)
    assert torch.equal(rank.load(), kv)
    rank.close()
    other = one_rank([directory])
    assert torch.equal(other.load(), kv)
    other.load(2, misses=True)
    other.close()


@pytest.mark.parametrize(
    ("store", "options", "named"),
    [
        ("host://900TiB", {}, "host://"),
        ("memory://x", {"staging_bytes": "900TiB"}, "staging_bytes"),
        ("mooncake://127.0.0.1:1?segment=900TiB", {}, "segment= of mooncake://127.0.0.1:1"),
        ("mooncake://127.0.0.1:1?segment=0&local_buffer=900TiB", {}, "local_buffer= of mooncake"),
    ],
)
def test_memory_that_this_host_does_not_have_is_refused_by_its_option(
    store: str, options: dict[str, str], named: str
) -> None:
    """A public report shows this case: the engine started, then was killed without a log line. No
    store is opened."""
    of_mooncake = {each.name for each in fields(MooncakeOptions) if each.name.endswith("_bytes")}
    of_engine = {each.name for each in fields(KVPoolConfig) if each.name.endswith("_bytes")}
    assert of_mooncake | of_engine == {"segment_bytes", "local_buffer_bytes", "staging_bytes"}
    with pytest.raises(ConfigError, match=rf"the process would be killed. Lower {named}"):
        one_rank(store, **options)


@pytest.mark.parametrize("policy", ["through", "back"])
def test_a_tenant_that_floods_leaves_anothers_prompts_in_host_memory_and_files(
    tmp_path: Path, policy: str
) -> None:
    stores = ["host://1MiB?shares=tenant", f"file://{tmp_path}/cells?size=2MiB&shares=tenant"]
    rank = one_rank(stores, write_policy=policy)
    kv = random_kv(HEADS)
    rank.save(kv, tenant="quiet")
    for prompt in range(1, MOST_PROMPTS):
        rank.save(random_kv(HEADS), prompt, tenant="flood")
    assert torch.equal(rank.load(), kv)
    counted = rank.close()
    assert counted["kvpool_hit_cells{tier=host}"] == NUM_CELLS
    host_bytes = [counted[f"kvpool_tenant_host_bytes{{tenant={t}}}"] for t in ("quiet", "flood")]
    assert 0 < host_bytes[0] < host_bytes[1]
    other = one_rank(stores)
    assert torch.equal(other.load(), kv)
    other.load(2, misses=True)
    other.close()


def test_a_prompt_is_forgotten_everywhere_after_its_time_to_live(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(space, "LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(space, "HITS_EVERY_S", 0.01)
    rank = one_rank([HOST, f"file://{tmp_path}/cells?size=1GiB"])
    kv = random_kv(HEADS)
    expires_ns = time.time_ns() + EXPIRES_NS
    rank.save(kv, retention=Retention(expires_ns=expires_ns))
    assert torch.equal(rank.load(), kv)
    deadline = time.monotonic() + LIMIT_S
    objects = tmp_path / "cells" / space.FORMAT_DIR / "objects"
    while time.time_ns() < expires_ns or any(path.is_file() for path in objects.rglob("*")):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert torch.all(rank.load(misses=True) == -1)
    rank.close()


# Encrypted cells


def key_file(path: Path, *keys: int) -> str:
    lines = [base64.b64encode(bytes([key]) * 32).decode() for key in keys]
    path.write_text("\n".join(lines))
    path.chmod(0o600)
    return str(path)


@pytest.mark.parametrize("policy", ["through", "back"])
@pytest.mark.parametrize("host", [[], ["host://16MiB"]])
def test_encrypted_cells_are_read_with_their_key_alone(
    tiers: "Tiers", tmp_path: Path, host: list[str], policy: str
) -> None:
    stores = [*host, tiers.file]
    ours, rotated, theirs = (
        key_file(tmp_path / name, *keys)
        for name, keys in (("ours", (1,)), ("rotated", (2, 1)), ("theirs", (3,)))
    )
    kv = random_kv(HEADS)
    rank = one_rank(stores, encryption_key_file=ours, write_policy=policy)
    rank.save(kv)
    if host:
        assert torch.equal(rank.load(), kv)  # from host memory, which is not encrypted
    rank.close()
    row = kv[0, 0, 0].numpy().tobytes()
    files = [path for path in tiers.path.rglob("*") if path.is_file()]
    assert files
    assert not any(row in path.read_bytes() for path in files)

    rank = one_rank(stores, encryption_key_file=rotated)
    assert torch.equal(rank.load(), kv)
    assert not any(name.startswith("kvpool_failures") for name in rank.close())

    rank = one_rank(stores, encryption_key_file=theirs)
    assert torch.all(rank.load(misses=True) == -1)
    counted = rank.close()
    assert counted["kvpool_failures{kind=cell_unknown_key}"] > 0
    assert tiers.num_in_files() == NUM_CELLS  # they stay, for others


def test_an_encrypted_cell_that_was_changed_is_removed(tiers: "Tiers", tmp_path: Path) -> None:
    ours = key_file(tmp_path / "ours", 1)
    rank = one_rank([tiers.file], encryption_key_file=ours)
    rank.save(random_kv(HEADS))
    rank.close()
    for path in tiers.path.rglob("*"):
        if path.is_file() and path.stat().st_size > LAYERS and "index" not in path.name:
            with path.open("r+b") as file:
                file.seek(200)
                file.write(b"changed")
    rank = one_rank([tiers.file], encryption_key_file=ours)
    assert torch.all(rank.load(misses=True) == -1)
    counted = rank.close()
    assert counted["kvpool_failures{kind=cell_authentication}"] > 0
    assert tiers.num_in_files() < NUM_CELLS


def test_a_manifest_on_its_way_is_waited_for_as_saves_are(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The wait lets the stores close, instead of leaving their memory to the process's end."""
    put, is_putting = MemoryStore.put, threading.Event()

    def slow(self: MemoryStore, keys: list[str], *rest: Any) -> list[PutOutcome]:
        is_putting.set()
        assert not threading.Event().wait(SLOW_S)
        return put(self, keys, *rest)

    monkeypatch.setattr(MemoryStore, "put", slow)
    monkeypatch.setattr(worker_part, "LEAST_JOIN_S", 0.0)
    rank = one_rank([f"memory://sides-{next(NAMES)}"])
    rank.pool.keep_manifest(MODEL, write_manifest(Manifest(MODEL, MODEL, "", {})))
    assert is_putting.wait(LIMIT_S)
    rank.close()
    assert "has not returned" not in caplog.text


# Several tiers

HEADS = 4
NUM_CELLS = HEADS * (LAYERS // 2) * (TOKENS // CHUNK)  # of a prompt
HOST = "host://16MiB"


@dataclass
class Tiers:
    """A memory store and a directory of files, with content that tests can inspect."""

    name: str
    path: Path

    def __post_init__(self) -> None:
        self.shared = MemoryStore(self.name, 1 << 30)

    @property
    def memory(self) -> str:
        return f"memory://{self.name}"

    @property
    def file(self) -> str:
        return f"file://{self.path}?size=1GiB"

    def num_in_memory(self) -> int:
        return len(self.shared._table.list_keys())

    def num_in_files(self, prompt: int = 0, path: Path | None = None) -> int:
        topology = Topology(HEADS, 1, stages(1), 2)
        names = CellNames(MODEL, [LayerGroup(topology, CONTENT * 2)])
        keys = [key for chunk in hashes_of(prompt) for key in names.of_chunk(chunk)]
        store = FileStore(str(path or self.path), 1 << 30)
        try:
            return sum(store.exists(keys))
        finally:
            store.close()


@pytest.fixture
def tiers(tmp_path: Path) -> Tiers:
    return Tiers(f"sides{next(NAMES)}", tmp_path / "cells")


def one_rank(store: list[str], **options: Any) -> Rank:
    return Rank(store, Topology(HEADS, 1, stages(1), 2), 0, 0, 16, **options)


def check_others_read(store: str, kv: torch.Tensor, prompt: int = 0) -> None:
    """Assert that ranks of another TP and PP size find the prompt in this store alone, without host
    memory."""
    for rank in ranks(store, HEADS, (2, 2, 32)):
        assert torch.equal(rank.load(prompt), kv[rank.part])
        rank.close()


def num_gets(counted: dict[str, float]) -> float:
    """Return the number of cells that were asked of any store."""
    return sum(v for k, v in counted.items() if k.startswith("kvpool_cells{direction=load"))


@pytest.mark.parametrize("policy", ["through", "back"])
@pytest.mark.parametrize("num_stores", [0, 1, 2])
def test_what_is_in_host_memory_is_loaded_without_a_store(
    tiers: Tiers, num_stores: int, policy: str
) -> None:
    kv = random_kv(HEADS)
    stores = [tiers.memory, tiers.file][:num_stores]
    rank = one_rank([HOST, *stores], write_policy=policy)
    rank.save(kv)
    assert torch.equal(rank.load(), kv)
    report = rank.pool.worker.take_report()
    assert report is not None
    assert set(report.host[0].added) == {chunk_id_of(MODEL, chunk.hex()) for chunk in hashes_of(0)}
    counted = rank.close()
    assert num_gets(counted) == 0
    assert counted["kvpool_hit_cells{tier=host}"] == NUM_CELLS
    for store in stores[-1:] if policy == "back" else stores:  # files outlive the process
        check_others_read(store, kv)


@pytest.mark.parametrize("policy", ["through", "back"])
def test_replicas_keep_in_host_memory_what_another_of_them_stores(
    tiers: Tiers, policy: str
) -> None:
    """Replicas take turns in storing chunks, but each replica loads all of them."""
    kv = random_kv(1)
    topology = Topology(1, 2, stages(1), 2)
    both = [
        Rank([HOST, tiers.memory], topology, rank, 0, 16, write_policy=policy) for rank in range(2)
    ]
    for rank in both:
        rank.save(kv)
    for rank in both:
        assert torch.equal(rank.load(), kv)
        assert num_gets(rank.close()) == 0
    assert tiers.num_in_memory() == LAYERS // 2 * (TOKENS // CHUNK)


@pytest.mark.parametrize("num_files", [0, 1, 2])
def test_write_back_stores_nothing_before_the_end(
    tiers: Tiers, tmp_path: Path, num_files: int
) -> None:
    """At the end cells go to every tier that outlives the process, or to all tiers if none does."""
    kv = random_kv(HEADS)
    files = [tiers.file, f"file://{tmp_path / 'second'}?size=1GiB"][:num_files]
    rank = one_rank([HOST, tiers.memory, *files], write_policy="back")
    rank.save(kv)
    assert torch.equal(rank.load(), kv)
    assert tiers.num_in_memory() == 0
    counted = rank.close()
    assert counted["kvpool_evicted_cells{tier=host,fate=stored}"] == NUM_CELLS
    assert tiers.num_in_memory() == (0 if files else NUM_CELLS)
    for store in files or [tiers.memory]:
        check_others_read(store, kv)


def test_write_back_ends_in_time_though_one_store_hangs(
    tiers: Tiers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other store has every cell by then, although it is the farther store."""
    kv, slow = random_kv(HEADS), tmp_path / "slow"
    put, go_on = FileStore.put, threading.Event()

    def hang(store: FileStore, *rest: Any) -> list[PutOutcome]:
        if store.root == str(slow):
            assert go_on.wait(LIMIT_S)
        return put(store, *rest)

    monkeypatch.setattr(FileStore, "put", hang)
    stores = [HOST, f"file://{slow}?size=1GiB", tiers.file]
    rank = one_rank(stores, write_policy="back", shutdown_timeout_s=SHUTDOWN_S)
    rank.save(kv)
    began = time.monotonic()
    rank.close()
    assert time.monotonic() - began < SHUTDOWN_S + CLOSING_S
    check_others_read(tiers.file, kv)
    go_on.set()


@pytest.mark.parametrize("policy", ["through", "back"])
def test_what_has_left_host_memory_is_read_from_a_store(tiers: Tiers, policy: str) -> None:
    """There are more prompts than the host tier has room for."""
    prompts = 8
    kvs = [random_kv(HEADS) for _ in range(prompts)]
    assert prompts * NUM_CELLS * 4096 > 1 << 20
    rank = one_rank(["host://1MiB", tiers.memory], write_policy=policy)
    for prompt, kv in enumerate(kvs):
        rank.save(kv, prompt)
    for prompt, kv in enumerate(kvs):
        assert torch.equal(rank.load(prompt), kv)
    counted = rank.close()
    assert 0 < num_gets(counted) <= prompts * NUM_CELLS
    assert tiers.num_in_memory() == prompts * NUM_CELLS
    check_others_read(tiers.memory, kvs[0])
    check_others_read(tiers.memory, kvs[-1], prompts - 1)


def test_what_is_found_further_away_is_copied_nearer(tiers: Tiers) -> None:
    kv = random_kv(HEADS)
    writer = one_rank([tiers.file])
    writer.save(kv)
    writer.close()
    reader = one_rank([HOST, tiers.memory, tiers.file])
    assert torch.equal(reader.load(), kv)
    assert torch.equal(reader.load(), kv)
    counted = reader.close()
    assert counted["kvpool_hit_cells{tier=file}"] == NUM_CELLS
    assert counted["kvpool_hit_cells{tier=host}"] == NUM_CELLS
    assert tiers.num_in_memory() == NUM_CELLS
    check_others_read(tiers.memory, kv)


# An absent tier


def without(scheme: str, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Make stores of this scheme unreachable until the returned event is set."""
    back = threading.Event()

    def open_or_not(spec: StoreSpec, *, segment: bool) -> Store:
        if spec.scheme == scheme and not back.is_set():
            raise StoreUnreachable(f"{spec.url} is not there")
        return open_store(spec, segment=segment)

    monkeypatch.setattr(open_tiers, "open_store", open_or_not)
    return back


@pytest.mark.parametrize("host", [[], [HOST]], ids=["no host tier", "host tier"])
@pytest.mark.parametrize("lost", ["memory", "file"])
def test_a_tier_that_is_not_there_at_the_start_is_left_alone(
    tiers: Tiers,
    host: list[str],
    lost: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    kv = random_kv(HEADS)
    without(lost, monkeypatch)
    rank = one_rank([*host, tiers.memory, tiers.file])
    assert f"{lost}://" in caplog.text
    rank.save(kv)
    assert torch.equal(rank.load(), kv)
    counted = rank.close()
    left = "file" if lost == "memory" else "memory"
    assert counted[f"kvpool_cells{{direction=save,store={left},outcome=done}}"] == NUM_CELLS
    assert counted[f"kvpool_tier_up{{tier={lost}}}"] == 0
    assert not [name for name in counted if f"store={lost}" in name]
    check_others_read(tiers.file if left == "file" else tiers.memory, kv)
    assert (tiers.num_in_memory(), tiers.num_in_files()) == (
        (0, NUM_CELLS) if lost == "memory" else (NUM_CELLS, 0)
    )


@pytest.mark.parametrize("lost", ["memory", "file"])
def test_a_tier_that_comes_later_is_found_and_used(
    tiers: Tiers, lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kv = random_kv(HEADS)
    back = without(lost, monkeypatch)
    rank = one_rank([tiers.memory if lost == "memory" else tiers.file])
    back.set()
    wait_until(lambda: rank.pool.registry.snapshot().get(f"kvpool_tier_up{{tier={lost}}}"), LIMIT_S)
    rank.save(kv)
    assert torch.equal(rank.load(), kv)
    rank.close()
    assert tiers.num_in_memory() + tiers.num_in_files() == NUM_CELLS


def test_a_required_tier_that_is_not_there_stops_the_start(
    tiers: Tiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    without("file", monkeypatch)
    with pytest.raises(ConfigError, match="the store is required"):
        one_rank([HOST, tiers.memory, tiers.file + "&required=1"])


class Locks:
    """A memory locker that accepts up to `most` bytes."""

    def __init__(self, most: int) -> None:
        self._left = most

    def lock(self, address: int, nbytes: int) -> str:
        self._left -= nbytes
        return "out of memory" if self._left < 0 else ""

    def unlock(self, address: int) -> None:
        """Do nothing: no memory is really locked."""


@pytest.mark.parametrize("is_refused", [False, True])
def test_how_much_of_the_memory_is_page_locked_is_a_metric(
    tiers: Tiers, monkeypatch: pytest.MonkeyPatch, is_refused: bool
) -> None:
    page_lock = PageLock(Locks(0 if is_refused else 1 << 40))
    monkeypatch.setattr(worker_part, "page_lock_for", lambda pages: page_lock)
    rank = one_rank([HOST, tiers.memory])
    arena = rank.pool._arena
    assert arena is not None
    [thread] = arena._threads
    thread.join(30)
    share = rank.pool.registry.snapshot()["kvpool_page_locked_share"]
    assert share == (0.0 if is_refused else 1.0)
    rank.close()


@pytest.mark.parametrize(
    ("device", "cores", "ranks", "threads"),
    [
        (GPU, 64, 1, 4),
        (GPU, 64, 8, 2),
        (GPU, 8, 8, 1),
        (GPU, 2, 1, 1),
        (devices.HOST_DEVICE, 64, 1, 1),
    ],
)
def test_checksums_have_as_many_threads_as_the_machine_can_spare(
    monkeypatch: pytest.MonkeyPatch, device: Device, cores: int, ranks: int, threads: int
) -> None:
    """On a CPU engine, the model itself needs the cores."""
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(cores)))
    assert lane_limits.spare_threads(device, ranks) == threads
    lanes = lane_limits.lanes_of(open_tiers.OpenTiers((), (), (), ()), 8 << 20, 1, threads)
    for kind in (OpKind.SEAL, OpKind.CHECK):
        count, limits = lanes[LaneName(kind, ops.HOST)]
        assert count == threads
        assert limits.batches == threads + 1
        assert limits.budget_bytes >= limits.batches * limits.batch_bytes


# A trace


def test_a_trace_has_every_batch_of_its_rank(tiers: Tiers, tmp_path: Path) -> None:
    kv = random_kv(HEADS)
    topology = Topology(HEADS, 2, stages(1), 2)
    trace_file = str(tmp_path / "trace")
    rank = Rank([HOST, tiers.memory], topology, 1, 0, 16, trace_file=trace_file)
    rank.save(kv)
    assert torch.equal(rank.load(), kv[rank.part])
    counted = rank.close()
    [path] = tmp_path.glob("trace*")
    assert path.name == "trace.1.json"
    events = msgspec.json.decode(path.read_bytes())
    assert events[0]["args"] == {"name": "kvpool rank 1"}
    batches = [event for event in events if event["ph"] == "X"]
    cells = Counter[str]()
    for batch in batches:
        cells[batch["name"]] += batch["args"]["cells"]
    assert cells == dict.fromkeys(("gather", "seal", "put", "scatter"), NUM_CELLS // 2)
    assert {batch["args"]["tier"] for batch in batches} == {"host", "memory"}
    marks = [event["name"] for event in events if event["ph"] == "i"]
    assert sorted(marks) == ["load done", "save done"]
    assert counted.get("kvpool_trace_dropped", 0) == 0


def test_without_a_trace_file_nothing_is_written(tiers: Tiers, tmp_path: Path) -> None:
    rank = one_rank([HOST, tiers.memory])
    rank.save(random_kv(HEADS))
    rank.close()
    assert list(tmp_path.iterdir()) == []


def test_a_tier_has_as_many_lanes_as_its_url_says(tiers: Tiers) -> None:
    threads = NewThreads()
    rank = one_rank([f"{tiers.memory}?get_lanes=3&put_lanes=2", tiers.file])
    names = Counter(t.name.rpartition("-")[0] for t in threads.alive())
    kv = random_kv(HEADS)
    rank.save(kv)
    assert torch.equal(rank.load(), kv)
    rank.close()
    counts = {name: names[f"kvpool-{name}"] for name in ("get-0", "put-0", "get-1", "put-1")}
    assert counts == {"get-0": 3, "put-0": 2, "get-1": 2, "put-1": 1}


def test_a_put_of_files_takes_two_batches_at_a_time(tiers: Tiers) -> None:
    specs = [parse_store_url(url) for url in (tiers.memory, tiers.file)]
    opened = open_tiers.open_tiers(specs, CallTimeouts(call_s=5.0, answer_s=5.0), segment=False)
    lanes = lane_limits.lanes_of(opened, 8 << 20, 1)
    for lane, factor in zip(
        itertools.product((OpKind.PUT, OpKind.GET), (0, 1)), (1, 2, 1, 1), strict=True
    ):
        _, limit = lanes[LaneName(*lane)]
        assert limit.batch_bytes == factor * lane_limits.BATCH_BYTES <= limit.budget_bytes
        assert limit.batch_ops == factor * lane_limits.BATCH_CELLS
    opened.close()


@pytest.mark.parametrize(
    ("device", "num_slots", "cells", "nbytes"),
    [
        (devices.HOST_DEVICE, 1 << 20, 64, 8 << 20),  # as long as a store call and a copy
        (GPU, 1 << 20, 64, 16 << 20),
        (GPU, 100, 12, 16 << 20),  # eight slabs fit into the arena
        (GPU, 7, 1, 16 << 20),
    ],
)
def test_slabs_are_of_a_call_and_an_eighth_of_the_arena_at_most(
    device: Device, num_slots: int, cells: int, nbytes: int
) -> None:
    topology = Topology(num_heads=1, tp_size=1, stages=((0, 1),), layer_span=1)
    keys = KeyMaker(make_namespace("model", "0" * 12), ContextRank())
    planner = Planner(cells_of_rank([LayerGroup(topology, 64)], 0, 0), keys, 32, 5.0)
    slot = slot_bytes(planner.max_cell_bytes())
    for by_span in (False, True):
        made = lane_limits.with_slab_limits(planner, device, num_slots * slot, by_span=by_span)
        assert (made.slab_cells, made.slab_bytes, made.by_span) == (cells, nbytes, by_span)


@pytest.mark.parametrize(
    ("device", "staging_bytes", "most_bytes"),
    [
        (devices.HOST_DEVICE, 1 << 30, 8 << 20),
        (GPU, 1 << 30, 64 << 20),
        (GPU, 256 << 20, 32 << 20),
        (GPU, 16 << 20, 8 << 20),
    ],
    ids=["host", "accelerator", "usual staging", "little staging"],
)
def test_a_copy_between_devices_takes_more_at_a_time(
    device: Device, staging_bytes: int, most_bytes: int
) -> None:
    opened = open_tiers.OpenTiers((), (), (), ())
    assert lane_limits.copy_batch_bytes(device, staging_bytes) == most_bytes
    lanes = lane_limits.lanes_of(opened, most_bytes, 2)
    for kind in (OpKind.GATHER, OpKind.SCATTER):
        threads, limits = lanes[LaneName(kind, ops.HOST)]
        assert threads == 2
        assert limits.batch_bytes == most_bytes == limits.batch_ops * (128 << 10)
        # The headers of each batch's cells count, too.
        assert limits.budget_bytes >= limits.batches * (most_bytes + limits.batch_ops * 64)
    for kind in (OpKind.SEAL, OpKind.CHECK):
        assert lanes[LaneName(kind, ops.HOST)][1].batch_bytes == 8 << 20


def test_a_rank_without_drafters_layers_knows_that_the_scheduler_counts_on_them() -> None:
    rank = one_rank(f"memory://{next(NAMES)}")
    rank.pool.use_namespace(make_namespace("other", "0" * 12), "ab" * 6)
    assert rank.pool.worker.lacks_drafts
    rank.close()
