"""A directory that this process may not write, as any tier: what is there is read, nothing saved.

Without the right to mount, a system call that is changed says the same.
"""

import contextlib
import errno
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.support.buffers import make_buffer, random_bytes
from tests.support.fakes import FakePins, FakeRequest
from tests.support.store_contract import get_one, key_of, put_one
from tests.worker.test_worker_part import (
    HEADS,
    HOST,
    MODEL,
    NUM_CELLS,
    Tiers,
    one_rank,
    random_kv,
    stages,
)
from vllm_kvpool.config import KVRole, RequestOptions, read_config
from vllm_kvpool.errors import ConfigError, StoreError
from vllm_kvpool.identity.chunk_hash import RequestIdentity
from vllm_kvpool.layout.engine_shape import ModelShape
from vllm_kvpool.layout.topology import KVCacheGroup, LayerGroup, Topology
from vllm_kvpool.scheduler.scheduler_part import SchedulerPart
from vllm_kvpool.storage.backends import open_store
from vllm_kvpool.storage.base import GetOutcome, PutOutcome
from vllm_kvpool.storage.file import store as file_store
from vllm_kvpool.storage.file.space import FORMAT_DIR
from vllm_kvpool.storage.file.store import ReadOnlyFileStore
from vllm_kvpool.storage.url import parse_store_url

View = FakeRequest[RequestOptions, RequestIdentity]
Seal = Callable[[Path], None]
LIMIT_S = 10


def mounted(stack: contextlib.ExitStack, path: Path) -> None:
    for command in (("--bind", path, path), ("-o", "remount,bind,ro", path)):
        done = subprocess.run(["mount", *command], capture_output=True, timeout=LIMIT_S)
        if done.returncode:
            pytest.skip(f"nothing can be mounted here: {done.stderr.decode()}")
        if command[0] == "--bind":
            stack.callback(subprocess.run, ["umount", "--lazy", path], timeout=LIMIT_S)


def injected(stack: contextlib.ExitStack, path: Path, number: int = errno.EROFS) -> None:
    patch = stack.enter_context(pytest.MonkeyPatch.context())

    def refuse(usual: Callable[..., object]) -> Callable[..., object]:
        def call(target: str, *args: int, **options: object) -> object:
            flags = args[0] if args and usual is os_open else os.O_WRONLY
            if str(target).startswith(f"{path}/") and flags & (os.O_WRONLY | os.O_RDWR):
                raise OSError(number, os.strerror(number), target)
            return usual(target, *args, **options)

        return call

    os_open = os.open
    for name in ("open", "mkdir", "rename", "unlink", "rmdir"):
        patch.setattr(os, name, refuse(getattr(os, name)))


def refused(stack: contextlib.ExitStack, path: Path) -> None:
    injected(stack, path, errno.EACCES)


@pytest.fixture(params=[mounted, injected, refused], ids=lambda way: way.__name__)
def seal(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Seal]:
    """Make a directory read-only until the end of the test."""
    monkeypatch.setattr(file_store, "_warned", set())
    with contextlib.ExitStack() as stack:
        yield lambda path: request.param(stack, path)


@pytest.fixture
def tiers(tmp_path: Path) -> Tiers:
    return Tiers(f"read-only {tmp_path.name}", tmp_path / "cells")


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    lines = [each.getMessage() for each in caplog.records]
    return [line for line in lines if "cells are read, none are saved" in line]


@pytest.mark.parametrize("required", ["", "&required=1"])
@pytest.mark.parametrize("place", ["only", "first", "second"])
def test_a_read_only_tier_gives_and_takes_nothing(
    tiers: Tiers, seal: Seal, place: str, required: str, caplog: pytest.LogCaptureFixture
) -> None:
    old, new = random_kv(HEADS), random_kv(HEADS)
    writer = one_rank([tiers.file])
    writer.save(old, prompt=1)
    writer.close()
    seal(tiers.path)
    before = sorted(tiers.path.rglob("*"))
    sealed = tiers.file + required
    stores = {
        "only": [sealed],
        "first": [sealed, f"file://{tiers.path}-2?size=1GiB"],
        "second": [tiers.memory, sealed],
    }[place]
    engine = one_rank(stores)
    assert torch.equal(engine.load(prompt=1), old)
    engine.save(new, prompt=2)
    counted = engine.close()
    assert sorted(tiers.path.rglob("*")) == before
    (line,) = told(caplog)
    assert str(tiers.path) in line
    assert counted["kvpool_tier_writable{tier=file}"] == 0
    assert counted["kvpool_tier_up{tier=file}"] == 1
    failures = {name for name in counted if name.startswith("kvpool_failures")}
    # A scheduler plans no saves where no store takes any. This rank is handed one.
    assert failures == ({"kvpool_failures{kind=save_unreachable}"} if place == "only" else set())
    others = {"only": None, "first": "file2", "second": "memory"}[place]
    puts = {name: each for name, each in counted.items() if "direction=save" in name}
    if others is None:
        assert not puts
    else:
        assert {name.split("store=")[1].split(",")[0].rstrip("}") for name in puts} == {others}
        reader = one_rank([stores[1] if place == "first" else stores[0]])
        assert torch.equal(reader.load(prompt=2), new)
        reader.close()


@pytest.mark.parametrize(
    ("others", "answer"),
    [([], None), (["memory"], {"kvpool": {"tokens": 0}}), ([HOST], {"kvpool": {"tokens": 0}})],
)
def test_an_engine_of_read_only_tiers_alone_promises_nothing(
    tiers: Tiers, seal: Seal, others: list[str], answer: object
) -> None:
    one_rank([tiers.file]).close()
    seal(tiers.path)
    stores = [tiers.memory if each == "memory" else each for each in others] + [tiers.file]
    shape = ModelShape(
        MODEL, (LayerGroup(Topology(HEADS, 1, stages(1), 2), 64),), (KVCacheGroup(16),), 100, 1
    )
    part = SchedulerPart(read_config({"store": stores}, env={}), KVRole.BOTH, shape, FakePins())
    view: View = FakeRequest("a", list(range(16)), RequestOptions(), RequestIdentity())
    part.scheduler.add(view)
    assert part.scheduler.finish("a", ([],)) == answer
    part.close()


def test_write_back_goes_past_a_read_only_tier(tiers: Tiers, seal: Seal) -> None:
    kv = random_kv(HEADS)
    one_rank([tiers.file]).close()
    seal(tiers.path)
    second = f"file://{tiers.path}-2?size=1GiB"
    engine = one_rank([HOST, tiers.file, second], write_policy="back")
    engine.save(kv)
    assert engine.close()["kvpool_evicted_cells{tier=host,fate=stored}"] == NUM_CELLS
    reader = one_rank([second])
    assert torch.equal(reader.load(), kv)
    reader.close()


def test_what_it_finds_further_away_is_not_copied_into_it(tiers: Tiers, seal: Seal) -> None:
    kv, second = random_kv(HEADS), f"file://{tiers.path}-2?size=1GiB"
    one_rank([tiers.file]).close()
    writer = one_rank([second])
    writer.save(kv)
    writer.close()
    seal(tiers.path)
    engine = one_rank([tiers.file, second])
    assert torch.equal(engine.load(), kv)
    assert not [name for name in engine.close() if "direction=save" in name]


def test_a_read_only_directory_is_listed(tmp_path: Path) -> None:
    """SQLite cannot make the files beside an index there, which nobody else has open either."""
    root, namespace = tmp_path / "cells", "read@fmt:0123456789ab"
    url = parse_store_url(f"file://{root}?size=8MiB")
    written = open_store(url, segment=False)
    assert put_one(written, key_of(namespace, 0), make_buffer(4096)) is PutOutcome.STORED
    written.close()
    with contextlib.ExitStack() as stack:
        mounted(stack, root)
        store = ReadOnlyFileStore(str(root))
        (usage,) = store.usage()
        assert (usage.namespace, usage.num_chunks) == (namespace, 1)


def test_the_stores_contract(tmp_path: Path, seal: Seal) -> None:
    root, namespace = tmp_path / "cells", "read@fmt:0123456789ab"
    url = parse_store_url(f"file://{root}?size=8MiB")
    sizes = (1, 4096, 5000, 100_000)
    keys = [key_of(namespace, number) for number in range(len(sizes))]
    written = open_store(url, segment=False)
    buffers = [make_buffer(nbytes) for nbytes in sizes]
    for number, (key, buffer) in enumerate(zip(keys, buffers, strict=True)):
        buffer.view[:] = random_bytes(buffer.nbytes, number)
        assert put_one(written, key, buffer) is PutOutcome.STORED
    written.close()
    seal(root)
    store = open_store(url, segment=False)
    assert not store.capabilities.writable
    assert store.exists([*keys, key_of(namespace, 99)]) == [True] * len(keys) + [False]
    for key, buffer in zip(keys, buffers, strict=True):
        target = make_buffer(buffer.nbytes)
        assert get_one(store, key, target) is GetOutcome.OK
        assert target.view == buffer.view
        assert get_one(store, key, make_buffer(buffer.nbytes + 1)) is not GetOutcome.OK
    assert get_one(store, key_of(namespace, 99), buffers[0]) is GetOutcome.MISSING
    assert put_one(store, key_of(namespace, 5), buffers[0]) is PutOutcome.FAILED
    assert store.remove(keys[:1]) == 0
    assert store.exists(keys[:1]) == [True]
    with pytest.raises(StoreError):
        store.remove_namespace(namespace)
    store.close()


def test_a_damaged_file_is_found_out(tmp_path: Path, seal: Seal) -> None:
    root, key = tmp_path / "cells", key_of("read@fmt:0123456789ab", 1)
    url = parse_store_url(f"file://{root}?size=8MiB")
    written, buffer = open_store(url, segment=False), make_buffer(5000)
    put_one(written, key, buffer)
    written.close()
    (path,) = (each for each in (root / FORMAT_DIR / "objects").rglob("*") if each.is_file())
    data = bytearray(path.read_bytes())
    data[-10] ^= 1
    path.write_bytes(data)
    link = path.with_name("f" * 38)
    seal(root)
    store = open_store(url, segment=False)
    assert get_one(store, key, buffer) is GetOutcome.WRONG_SIZE
    assert not link.exists()
    store.close()


def test_a_directory_that_is_not_there_is_still_refused(tmp_path: Path, seal: Seal) -> None:
    seal(tmp_path)
    with pytest.raises(ConfigError, match="cannot be used"):
        open_store(parse_store_url(f"file://{tmp_path}/none?size=8MiB"), segment=False)
