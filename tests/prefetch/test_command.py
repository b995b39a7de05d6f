"""The process that brings cells near, over real stores."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

import tests.support.memory_store  # noqa: F401  (its scheme)
from tests.prefetch.cells import fill, is_held, keys_of, names_of, put
from tests.support.buffers import make_buffer
from tests.support.faults import Fault, FaultyStore
from tests.support.mooncake_master import MooncakeMaster
from tests.support.object_server import Answer, FaultyFront, Hang, ObjectServer
from tests.support.store_contract import new_namespace
from vllm_kvpool.cli.commands import prefetch as prefetch_module
from vllm_kvpool.cli.common.prompt import names_of as prompt_names
from vllm_kvpool.config import read_config
from vllm_kvpool.errors import ConfigError
from vllm_kvpool.identity.keys import manifest_key
from vllm_kvpool.layout.description import described
from vllm_kvpool.layout.topology import LayerGroup, Topology
from vllm_kvpool.prefetch import (
    GRACE_S,
    NEAR_SHARE,
    Brought,
    PromptCells,
    bring,
    chosen,
    near_share,
)
from vllm_kvpool.storage.backends import open_store
from vllm_kvpool.storage.base import Buffer, Store
from vllm_kvpool.storage.contents.manifest import MANIFEST_BYTES, Manifest, write_manifest
from vllm_kvpool.storage.s3 import object_name
from vllm_kvpool.storage.url import StoreSpec, parse_store_url

LIMIT_S = 60.0
SLACK_S = 5.0
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "test-id", "AWS_SECRET_ACCESS_KEY": "test-secret"}


def transfer_config(stores: list[str], **options: object) -> str:
    extra = {"store": stores, **options}
    role = {"kv_connector": "KVPoolConnector", "kv_role": "kv_both"}
    return json.dumps({**role, "kv_connector_extra_config": extra})


def started(stores: list[str], *arguments: str, **options: object) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "vllm_kvpool", "prefetch"),
            *("--kv-transfer-config", transfer_config(stores, **options), *arguments),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, **CREDENTIALS},
    )


def brought(
    stores: list[str],
    names: PromptCells,
    *,
    max_bytes: int = 1 << 40,
    max_seconds: float = LIMIT_S,
    once_open: Callable[[], None] = lambda: None,
) -> tuple[Brought, bool]:
    """Prefetch as a process with this configuration does.

    Return the outcome, and True if all calls have ended.
    """
    near, far = chosen(read_config({"store": stores}, env={}))
    with ExitStack() as closing:
        files, *others = [
            closing.enter_context(contextlib.closing(open_store(spec, segment=False)))
            for spec in (near, *far)
        ]
        once_open()
        share = near_share(near, max_bytes)
        return bring(files, others, names, share, max_seconds, lambda done: None)


def prefetched(stores: list[str], names: PromptCells, max_bytes: int = 1 << 40) -> Brought:
    done, has_ended = brought(stores, names, max_bytes=max_bytes)
    assert has_ended
    return done


def near_of(path: Path, size: str = "64MiB") -> str:
    return f"file://{path}/near?size={size}"


@contextmanager
def opened(url: str, *, segment: bool = False) -> Iterator[Store]:
    store = open_store(parse_store_url(url, environ=CREDENTIALS), segment=segment)
    yield store
    store.close()


def near_has(url: str, names: PromptCells) -> list[str]:
    with opened(url) as near:
        return [key for key, nbytes in keys_of(names).items() if is_held(near, key, nbytes)]


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="module")
def server() -> Iterator[ObjectServer]:
    with ObjectServer() as server:
        server.make_bucket("cells")
        yield server


def s3_at(endpoint: str) -> str:
    return f"s3://cells/pool?endpoint={endpoint}"


@pytest.fixture(scope="module")
def s3_url(server: ObjectServer) -> str:
    return s3_at(server.endpoint)


@pytest.mark.s3
def test_cells_come_from_object_storage_into_files(tmp_path: Path, s3_url: str) -> None:
    near, names = near_of(tmp_path), names_of(6, nbytes=100_000)
    keys = list(keys_of(names))
    damaged, lost = keys[3], keys[8]
    with opened(s3_url) as far:
        fill(far, names, damaged=[damaged])
        far.remove([lost])
    done = prefetched([near, s3_url], names)
    assert (done.brought, done.bad, done.missing) == (10, 1, 2)
    assert near_has(near, names) == [key for key in keys if key not in (damaged, lost)]
    # Where it was damaged it is left to those who compute it again.
    with opened(s3_url) as far:
        assert far.exists([damaged]) == [True]
    assert prefetched([near, s3_url], names).near == 10


@pytest.mark.mooncake
def test_cells_come_from_others_memory_into_files(tmp_path: Path) -> None:
    near, names = near_of(tmp_path), names_of(6, nbytes=100_000)
    with MooncakeMaster() as master:
        far_url = f"mooncake://127.0.0.1:{master.port}?segment=64MiB"
        with opened(far_url, segment=True) as far:
            fill(far, names, damaged=list(keys_of(names))[:1])
            done = prefetched(["host://1MiB", near, far_url], names)
    assert (done.brought, done.bad) == (11, 1)
    assert near_has(near, names) == list(keys_of(names))[1:]


def prompt_of(num_tokens: int) -> tuple[Manifest, PromptCells]:
    """Return a manifest, and the cells of a prompt in its namespace."""
    namespace = new_namespace("prompt")
    groups = [LayerGroup(Topology(num_heads=2, tp_size=1, stages=((0, 4),), layer_span=4), 64)]
    manifest = Manifest(namespace, namespace, "", {"chunk_tokens": 16}, described(groups))
    return manifest, prompt_names(manifest, range(num_tokens)).cells()


def content_of(manifest: Manifest) -> Buffer:
    content = make_buffer(MANIFEST_BYTES)
    content.view[:] = write_manifest(manifest)
    return content


@pytest.mark.s3
def test_a_prompt_is_brought_by_its_tokens(tmp_path: Path, s3_url: str) -> None:
    manifest, order = prompt_of(70)
    namespace = manifest.namespace
    stored = order._replace(chunks=order.chunks[:3])
    with opened(s3_url) as far:
        fill(far, stored)
        put(far, [(manifest_key(namespace), content_of(manifest))])
    near = near_of(tmp_path)
    path = tmp_path / "tokens.json"
    path.write_text(json.dumps(list(range(70))))
    prompt = ("--tokens", str(path), "--namespace", namespace)
    with started([near, s3_url], *prompt) as process:
        out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, err.decode()
    assert out.startswith(b"4 chunks, 8 cells: 6 brought"), out
    assert b", 2 not found" in out
    assert near_has(near, order) == list(keys_of(stored))
    with started([near, s3_url], *prompt, "--json") as process:
        again = msgspec.json.decode(process.communicate(timeout=LIMIT_S)[0], type=Brought)
    assert (again.brought, again.near) == (0, 6)
    for part, missing in ((prompt[:2], b"--namespace"), (prompt[2:], b"--tokens")):
        with started([near, s3_url], *part) as process:
            assert missing in process.communicate(timeout=LIMIT_S)[1]
        assert process.returncode == 2


HANGS, REFUSES = Hang(), Answer(403, "ExpiredToken")


def test_prompts_of_recurrent_states_alone_have_gaps() -> None:
    manifest, order = prompt_of(70)
    assert not order.has_gaps
    states = [{**each, "kind": "state", "state": True} for each in manifest.cells]
    both = manifest._replace(cells=(*manifest.cells, *states))
    assert not prompt_names(both, range(70)).cells().has_gaps
    assert prompt_names(both._replace(cells=tuple(states)), range(70)).cells().has_gaps


@pytest.mark.s3
@pytest.mark.parametrize("fault", [HANGS, REFUSES], ids=["hangs", "refuses"])
def test_command_ends_with_status_1_if_a_store_fails(
    fault: Hang | Answer, tmp_path: Path, server: ObjectServer
) -> None:
    manifest, order = prompt_of(70)
    path = tmp_path / "tokens.json"
    path.write_text(json.dumps(list(range(70))))
    with opened(s3_at(server.endpoint)) as far:
        fill(far, order)
        put(far, [(manifest_key(manifest.namespace), content_of(manifest))])
    prompt = ("--tokens", str(path), "--namespace", manifest.namespace, "--max-seconds", "0.5")
    cell = object_name("pool/v1", next(iter(keys_of(order))))
    with FaultyFront(server.port) as front:
        front.rule = lambda seen: fault if seen.path.endswith(cell) else None
        with started([near_of(tmp_path), s3_at(front.endpoint)], *prompt) as process:
            out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1, err.decode()
    assert b"8 cells" in out
    assert b"Traceback" not in err


@pytest.mark.s3
@pytest.mark.parametrize(("fault", "status"), [(Fault.FAILED, 1), (Fault.FULL, 0)])
def test_command_ends_with_status_1_if_files_fail_and_not_if_they_are_full(
    fault: Fault, status: int, tmp_path: Path, s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest, order = prompt_of(70)
    path = tmp_path / "tokens.json"
    path.write_text(json.dumps(list(range(70))))
    with opened(s3_url) as far:
        fill(far, order)
        put(far, [(manifest_key(manifest.namespace), content_of(manifest))])

    def open_faulty(spec: StoreSpec, *, segment: bool) -> FaultyStore:
        store = FaultyStore(open_store(spec, segment=segment))
        store.faults.inject(fault, "put")
        return store

    monkeypatch.setattr(prefetch_module, "open_store", open_faulty)
    given = ["--kv-transfer-config", transfer_config([near_of(tmp_path), s3_url])]
    given += ["--tokens", str(path), "--namespace", manifest.namespace, "--json"]
    result = CliRunner().invoke(prefetch_module.prefetch_command, given)
    assert result.exit_code == status, result.output
    done = msgspec.json.decode(result.stdout.splitlines()[-1], type=Brought)
    assert (done.unwritten, done.unkept) == ((8, 0) if status else (0, 8))


@pytest.mark.s3
def test_the_bytes_are_bounded_by_the_order_and_by_the_near_tier(
    tmp_path: Path, s3_url: str
) -> None:
    names = names_of(9, heads=1, nbytes=9 << 20)  # a batch each
    with opened(s3_url) as far:
        fill(far, names)
    small = near_of(tmp_path / "small", "80MiB")
    limit = (80 << 20) // NEAR_SHARE
    assert limit <= prefetched([small, s3_url], names).nbytes < limit + (9 << 20) + 1
    large = near_of(tmp_path / "large", "1GiB")
    assert prefetched([large, s3_url], names, max_bytes=10 << 20).brought == 2


@pytest.mark.s3
def test_it_ends_though_a_store_does_not_answer(tmp_path: Path, server: ObjectServer) -> None:
    with FaultyFront(server.port) as front:
        began = time.monotonic()
        done, has_ended = brought(
            [near_of(tmp_path), s3_at(front.endpoint)],
            names_of(2),
            max_seconds=0.5,
            once_open=lambda: front.reset(lambda seen: Hang()),
        )
        assert time.monotonic() - began < 0.5 + GRACE_S + SLACK_S
        assert front.seen
    assert (done, has_ended) == (Brought(), False)


HOST, MEMORY, MOONCAKE = "host://1MiB", "memory://x", "mooncake://127.0.0.1:9"
FILES, OTHER_FILES = "file:///tmp/x?size=1MiB", "file:///tmp/y?size=1MiB"
S3 = "s3://cells/pool?endpoint=http://127.0.0.1:9"
CHOSEN: list[tuple[list[str], list[str]]] = [  # tiers; the near one and the far ones
    ([FILES], []),
    ([S3], []),
    ([MOONCAKE, S3], []),
    ([HOST, MOONCAKE], []),
    ([MEMORY, S3], []),
    ([FILES, OTHER_FILES], []),
    ([MOONCAKE, FILES], []),  # what stands behind the files alone is further away
    ([FILES, S3], [FILES, S3]),
    ([FILES, MOONCAKE, S3], [FILES, MOONCAKE, S3]),
    ([HOST, FILES, MOONCAKE], [FILES, MOONCAKE]),
    ([MOONCAKE, FILES, S3], [FILES, S3]),
    ([FILES, OTHER_FILES, S3], [FILES, S3]),
]


@pytest.mark.parametrize(("stores", "expected"), CHOSEN)
def test_files_are_near_and_what_is_behind_them_over_a_network_is_far(
    stores: list[str], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    config = read_config({"store": stores}, env={})
    if not expected:
        with pytest.raises(ConfigError, match="nothing to prefetch"):
            chosen(config)
        return
    near, far = chosen(config)
    assert [spec.url for spec in (near, *far)] == expected


def test_where_nothing_can_be_brought_it_says_so(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    path.write_text("[1, 2, 3]")
    with started([MOONCAKE, FILES], "--namespace", "model", "--tokens", str(path)) as process:
        _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1
    assert b"nothing to prefetch" in err
    assert b"Traceback" not in err


@pytest.mark.parametrize("given", ["{", '{"kv_connector":"Other"}'])
def test_a_configuration_without_a_pool(given: str, tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    path.write_text("[1, 2, 3]")
    command = [sys.executable, "-m", "vllm_kvpool", "prefetch", "--kv-transfer-config", given]
    command += ["--namespace", "model", "--tokens", str(path)]
    done = subprocess.run(command, capture_output=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith(b"Error: --kv-transfer-config")


def test_a_store_that_is_away_is_named(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    path.write_text("[1, 2, 3]")
    arguments = ("--namespace", "model", "--tokens", str(path))
    with started([near_of(tmp_path), s3_at("http://127.0.0.1:9")], *arguments) as process:
        _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1
    assert err.startswith(b"Error: s3://cells"), err
    assert b"Traceback" not in err
