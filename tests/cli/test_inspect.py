"""`kvpool inspect --details`: ages, hits and the largest prefixes, from a store's chunks."""

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.support.buffers import make_buffer
from tests.support.engine_metrics import Engine, served
from tests.support.memory_store import MemoryStore
from vllm_kvpool.cli import main
from vllm_kvpool.cli.common.stores import NamedStore
from vllm_kvpool.cli.inspect import MOST_PREFIXES, as_text, contents, described_chunks
from vllm_kvpool.identity.keys import (
    ContextRank,
    HeadShard,
    KeyMaker,
    LayerSpan,
    chunk_id_of_key,
    make_namespace,
    manifest_key,
)
from vllm_kvpool.layout.description import described
from vllm_kvpool.layout.topology import LayerGroup, Topology
from vllm_kvpool.scheduler.prefix_search import CellNames
from vllm_kvpool.storage.base import ChunkRef, ChunkUsage
from vllm_kvpool.storage.contents.manifest import Manifest, write_manifest
from vllm_kvpool.storage.file.store import FileStore, ReadOnlyFileStore

NAMESPACE = make_namespace("model", "a" * 12)
KEYS = KeyMaker(NAMESPACE, ContextRank())
NOW_NS = 10**18
HOUR_NS = 3600 * 10**9


def usage(
    number: int,
    parent: int | None,
    kind: str = "",
    hours: int = 1,
    hits: int = 0,
    position: int = 0,
) -> ChunkUsage:
    key = KEYS.key(HeadShard(0), LayerSpan(0, 2, kind), number.to_bytes(16))
    written_ns = NOW_NS - hours * HOUR_NS
    return ChunkUsage(NAMESPACE, number, parent, position, 2, 1000, hits, 0, written_ns, key)


def test_kinds_have_their_ages_and_hits() -> None:
    chunks = [usage(1, None, "full", 2, hits=6), usage(2, 1, "full", 4), usage(3, None, "window")]
    found = described_chunks(chunks, {}, NOW_NS)
    full, window = found["kinds"]
    assert (full["kind"], full["chunks"], full["cells"], full["bytes"]) == ("full", 2, 4, 2000)
    assert (full["hits"], full["used"]) == (6, 0.5)
    assert (full["newest_s"], full["oldest_s"]) == (7200, 14_400)
    assert (window["used"], window["median_s"]) == (0, 3600)


def test_a_prefix_ends_where_prompts_part() -> None:
    """1 - 2 - 3 and 1 - 2 - 4 - 5: they part after two chunks. 6 stands alone."""
    chunks = [
        usage(1, None, hits=4),
        usage(6, None),
        usage(2, 1, position=1),
        usage(3, 2, hits=1, position=2),
        usage(4, 2, position=2),
        usage(5, 4, position=3),
    ]
    shared, alone = described_chunks(chunks, {NAMESPACE: 256}, NOW_NS)["prefixes"]
    assert (shared["tokens"], shared["prompts"], shared["bytes"]) == (512, 2, 5000)
    assert shared["hits"] == 5
    assert shared["chunk"] == (2).to_bytes(16).hex()
    assert (alone["tokens"], alone["prompts"], alone["bytes"]) == (256, 1, 1000)


def test_the_largest_are_named_and_a_chunk_whose_parent_is_gone_begins_one() -> None:
    chunks = [usage(i, 1000 + i) for i in range(2 * MOST_PREFIXES)] + [usage(99, 3)]
    found = described_chunks(chunks, {}, NOW_NS)["prefixes"]
    assert len(found) == MOST_PREFIXES
    assert (found[0]["chunk"], found[0]["tokens"]) == ((99).to_bytes(16).hex(), None)


def test_a_chunk_whose_parent_is_not_stored_has_the_tokens_before_it() -> None:
    """States are stored after few chunks of a prompt; a purge may leave a prompt's end."""
    [found] = described_chunks([usage(1, None, position=2)], {NAMESPACE: 256}, NOW_NS)["prefixes"]
    assert found["tokens"] == 768


def test_a_store_of_recurrent_states_has_no_number_of_tokens(tmp_path: Path) -> None:
    """Five chunks of attention, of which three have states: 1280 tokens, and not 4 x 256."""
    topology = Topology(num_heads=2, tp_size=1, stages=((0, 4),), layer_span=2)
    of_states = replace(topology, layer_group="state")
    groups = [LayerGroup(topology, 64), LayerGroup(of_states, 64, is_state=True)]
    values = {"chunk_tokens": 256, "kinds": [{"kind": ""}, {"kind": "state"}]}
    content = write_manifest(Manifest(NAMESPACE, NAMESPACE, "", values, described(groups)))
    manifest = make_buffer(len(content))
    manifest.view[:] = content
    key, names = manifest_key(NAMESPACE), CellNames(NAMESPACE, groups)
    keys = [each for n in range(5) for each in names.of_chunk(n.to_bytes(20), 0)]
    keys += [each for n in range(3) for each in names.of_chunk(n.to_bytes(20), 1)]
    store = FileStore(str(tmp_path), 100 << 20)
    store.put([key], [manifest], [ChunkRef(key)])
    refs = [ChunkRef(chunk_id_of_key(each)) for each in keys]
    store.put(keys, [make_buffer(100)] * len(keys), refs)
    store.close()
    [found] = contents([NamedStore("", ReadOnlyFileStore(str(tmp_path)))])
    [shown] = found["namespaces"]
    assert (shown["chunks"], shown["tokens"]) == (8, None)


def test_a_store_in_detail(tmp_path: Path) -> None:
    store = FileStore(str(tmp_path), 100 << 20)
    before = ""
    for number in range(3):
        keys = [
            KEYS.key(HeadShard(head), LayerSpan(0, 2), number.to_bytes(16)) for head in range(2)
        ]
        ref = ChunkRef(chunk_id_of_key(keys[0]), before, number)
        store.put(keys, [make_buffer(5000)] * 2, [ref] * 2)
        before = ref.id
    store.put([manifest_key(NAMESPACE)], [make_buffer(64)], [ChunkRef("manifest")])
    store.pin([KEYS.key(HeadShard(0), LayerSpan(0, 2), bytes(16))], time.time_ns() + HOUR_NS)
    for number, times in enumerate((3, 1, 0)):
        read = [KEYS.key(HeadShard(h), LayerSpan(0, 2), number.to_bytes(16)) for h in range(2)]
        for _ in range(times):
            store.get(read, [make_buffer(5000)] * 2)
    chunks = list(store.chunks())
    assert [each.num_cells for each in chunks if "manifest" not in each.key] == [2, 2, 2]
    store.close()
    for path in tmp_path.rglob("*"):
        if path.is_file() and path.stat().st_size >= 4096 and NAMESPACE in str(path):
            os.utime(path, (0, 0))
    url = f"file://{tmp_path}?size=100MiB"
    result = CliRunner().invoke(main, ["inspect", "--details", "--json", "--store", url])
    assert result.exit_code == 0, result.output
    [found] = json.loads(result.stdout)
    [kind] = found["kinds"]
    assert (kind["chunks"], kind["cells"], kind["hits"]) == (3, 6, 8)
    assert kind["used"] == pytest.approx(2 / 3)
    assert [each["hits"] for each in found["namespaces"]] == [8]
    [prefix] = found["prefixes"]
    assert (prefix["chunk"], prefix["prompts"]) == ((2).to_bytes(16).hex(), 1)
    assert prefix["hits"] == 8
    text = as_text([found])
    for word in ("by kind of layer", "67 %", "largest prefixes", prefix["chunk"][:16]):
        assert word in text
    other = CliRunner().invoke(main, ["inspect", "--details", "--json", "--store", "memory://x"])
    assert "does not say what it holds in detail" in other.output


def an_engine() -> Engine:
    engine = Engine()
    engine.series("kvpool_info", namespace=NAMESPACE, chunk_tokens="256").set(1)
    engine.series("kvpool_hit_cells", tier="host").inc(7)
    engine.series("kvpool_hit_cells", tier="mooncake").inc(5)
    engine.series("kvpool_hit_cells", rank="1", tier="mooncake").inc(1)
    engine.series("kvpool_evicted_cells", tier="host", fate="dropped").inc(2)
    engine.series("kvpool_tier_up", tier="s3").set(1)
    for state, nbytes in (("clean", 1 << 20), ("dirty", 1 << 19), ("pinned", 0)):
        engine.series("kvpool_host_bytes", state=state).set(nbytes)
    return engine


def test_aliases_are_cells_and_no_chunks_or_tokens(tmp_path: Path) -> None:
    store = FileStore(str(tmp_path), 100 << 20)
    group = LayerGroup(Topology(num_heads=2, tp_size=1, stages=((0, 4),), layer_span=2), 64)
    values = {"chunk_tokens": 256, "kinds": [{"kind": ""}]}
    content = write_manifest(Manifest(NAMESPACE, NAMESPACE, "", values, described([group])))
    manifest = make_buffer(len(content))
    manifest.view[:] = content
    key = manifest_key(NAMESPACE)
    store.put([key], [manifest], [ChunkRef(key)])
    cells = CellNames(NAMESPACE, [group]).of_chunk(bytes(20))
    store.put(cells, [make_buffer(100)] * 4, [ChunkRef(chunk_id_of_key(each)) for each in cells])
    for number in range(3):
        alias = f"{NAMESPACE}@kind:alias@{number:040x}"
        ref = ChunkRef(chunk_id_of_key(alias), chunk_id_of_key(cells[0]), 1)
        store.put([alias], [make_buffer(100)], [ref])
    store.close()
    [found] = contents([NamedStore("", ReadOnlyFileStore(str(tmp_path)))])
    [shown] = found["namespaces"]
    assert (shown["chunks"], shown["tokens"], shown["cells"]) == (1, 256, 7)


def test_tiers_without_a_record_have_the_hits_of_running_engines() -> None:
    with served(an_engine()) as url:
        options = ("inspect", "--engine", url, "--store", "host://1GiB")
        result = CliRunner().invoke(main, [*options, "--json"])
        assert result.exit_code == 0, result.output
        [found] = json.loads(result.stdout)
        text = CliRunner().invoke(main, options).stdout
    tiers = {each["tier"]: each for each in found["tiers"]}
    assert {name: each["hits"] for name, each in tiers.items()} == {
        **{"host": 7, "mooncake": 6, "s3": 0}
    }
    assert (tiers["host"]["bytes"], tiers["host"]["evicted"]) == (3 << 19, 2)
    assert (tiers["s3"]["bytes"], tiers["s3"]["namespace"]) == (None, NAMESPACE)
    assert found["engine"] == url
    for words in ("1.5 MiB", "by kind of layer", "since its start", url):
        assert words in text


def test_an_engine_beside_stores_and_one_without_a_pool(tmp_path: Path) -> None:
    store = f"file://{tmp_path}"
    with served(an_engine()) as url, served(Engine()) as other:
        result = CliRunner().invoke(
            main, ["inspect", "--json", "--store", store, "--engine", url, "--engine", other]
        )
    files, one, none = json.loads(result.stdout)
    assert (files["store"], one["engine"], none["tiers"]) == (store, url, None)
    assert "KVPoolConnector" in none["why"]


def test_a_store_that_does_not_count_hits_says_where_they_are() -> None:
    store = MemoryStore("", 1 << 20)
    key = KEYS.key(HeadShard(0), LayerSpan(0, 2), bytes(16))
    store.put([key], [make_buffer(1000)], [ChunkRef(chunk_id_of_key(key))])
    [found] = contents([NamedStore("memory://", store)])
    assert found["namespaces"][0]["hits"] is None
    assert "--engine" in found["no_hits"]
    assert found["no_hits"] in as_text([found])
