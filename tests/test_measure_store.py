"""The script that measures stores and their medium leaves nothing, and says what to choose."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks import measure_store as measuring
from benchmarks.measure_store import CellChoice, SizeResult, StoreResult, choices, main, tables
from tests.support.memory_store import MemoryStore
from vllm_kvpool.errors import StoreError
from vllm_kvpool.identity.keys import make_namespace
from vllm_kvpool.layout.description import described
from vllm_kvpool.layout.topology import LayerGroup, Topology
from vllm_kvpool.storage.contents.manifest import Manifest
from vllm_kvpool.storage.file.store import FileStore, ReadOnlyFileStore
from vllm_kvpool.storage.url import parse_store_url

SIZES = (4096, 16384)
NAMESPACE = make_namespace("model", "a" * 12)


def manifest(*groups: LayerGroup) -> Manifest:
    return Manifest(NAMESPACE, NAMESPACE, "", {"chunk_tokens": 256}, described(groups))


def attention(heads: int, layers: int, span: int, *, per_head: bool = True) -> LayerGroup:
    return LayerGroup(Topology(heads, 1, ((0, layers),), span, per_head), 256)


def test_a_directory_is_measured_beside_its_disk_and_left_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "SIZES", SIZES)
    directory = tmp_path / "pool"
    FileStore(str(directory), 64 << 20).close()
    url = f"file://{directory}?size=64MiB"
    options = ("--store", url, "--bytes", "128KiB")
    done = CliRunner().invoke(main, [*options, "--json"])
    assert done.exit_code == 0, done.output
    [result] = json.loads(done.stdout)
    assert result["store"] == url
    assert [each["cell_bytes"] for each in result["sizes"]] == list(SIZES)
    for each in result["sizes"]:
        assert min(each.values()) > 0
    assert "one file" in result["plain"]
    assert ReadOnlyFileStore(str(directory)).usage() == []
    assert sorted(path.suffix for path in directory.iterdir() if "measured" in path.name) == []
    assert "plain write" in CliRunner().invoke(main, options).stdout


def test_a_store_without_a_medium_of_its_own_stands_alone() -> None:
    store = MemoryStore("", 4 << 20)
    result = measuring.measure_store(parse_store_url("memory://"), store, 128 << 10, SIZES)
    assert result.plain == ""
    assert "plain" not in tables(result, [])[0].as_text()
    assert store.usage() == []


def test_a_store_that_does_not_take_the_cells_is_named() -> None:
    with pytest.raises(StoreError, match="did not take all"):
        measuring.measure_store(
            parse_store_url("memory://"), MemoryStore("", 8192), 128 << 10, (1 << 16,)
        )


def test_the_smallest_cells_that_are_nearly_as_fast_are_good() -> None:
    rates = [(1 << 14, 50.0), (1 << 16, 95.0), (1 << 18, 100.0), (1 << 20, 99.0)]
    sizes = [SizeResult(nbytes, 1.0, rate, 1.0, 1.0, 1.0) for nbytes, rate in rates]
    assert StoreResult("x", "", sizes).good_cell_bytes == 1 << 16


def test_chunks_are_chosen_for_the_engine_s_span_and_for_all_layers() -> None:
    # 256 bytes a token, head and layer.
    assert choices(manifest(attention(8, 32, 8)), 1 << 18) == [
        CellChoice("", 128, 8, 1 << 18),
        CellChoice("", 64, 32, 1 << 19),
    ]
    [rank] = choices(manifest(attention(8, 4, 4, per_head=False)), 1 << 20)
    assert rank == CellChoice("", 128, 4, 1 << 20)
    [small] = choices(manifest(attention(1, 1, 1)), 1 << 20)
    assert small == CellChoice("", 1024, 1, 1 << 18)
    # As many bytes for 16 tokens at once.
    pooled = LayerGroup(Topology(1, 1, ((0, 4),), 4), 16 * 256, tokens_per_row=16)
    assert choices(manifest(pooled), 1 << 18) == [CellChoice("", 256, 4, 1 << 18)]


def test_recurrent_states_leave_no_choice() -> None:
    state = LayerGroup(Topology(2, 1, ((0, 4),), 2), 256, is_state=True)
    assert choices(manifest(state), 1 << 20) == []
    assert choices(manifest(), 1 << 20) == []
