"""A namespace's manifest: read back unchanged, of fixed size, without secrets, or refused."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.buffers import make_buffer
from tests.support.memory_store import MemoryStore
from vllm_kvpool.identity.keys import key_digest, make_namespace, manifest_key, namespace_of
from vllm_kvpool.layout.description import described
from vllm_kvpool.layout.topology import LayerGroup, Topology
from vllm_kvpool.storage.base import ChunkRef
from vllm_kvpool.storage.contents.cell_format import HEADER_BYTES, write_header
from vllm_kvpool.storage.contents.manifest import (
    HIDDEN,
    MANIFEST_BYTES,
    Manifest,
    manifest_in,
    read_manifest,
    shown,
    write_manifest,
)

NAMESPACE = make_namespace("model", "0" * 12)
OTHER = make_namespace("model", "1" * 12)
VALUES = {"weights": "sample:00", "files": {"config.json": {"layers": 4, "names": ["a"]}}}
VALUE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=2000),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(), inner, max_size=5),
    max_leaves=20,
)


def manifest(**values: object) -> Manifest:
    return Manifest(NAMESPACE, NAMESPACE, "", values)


def test_its_key_is_of_its_namespace() -> None:
    assert namespace_of(manifest_key(NAMESPACE)) == NAMESPACE


def test_it_comes_back_as_it_was() -> None:
    content = write_manifest(manifest(**VALUES))
    assert len(content) == MANIFEST_BYTES
    assert read_manifest(content, NAMESPACE) == manifest(**VALUES)
    assert json.loads(content[HEADER_BYTES:])["namespace"] == NAMESPACE


@given(st.lists(VALUE, max_size=20), st.integers(1, 200))
def test_any_values_fit(values: list[object], times: int) -> None:
    content = write_manifest(manifest(**{f"v{i}": v for i, v in enumerate(values * times)}))
    assert len(content) == MANIFEST_BYTES
    assert read_manifest(content, NAMESPACE) is not None


def test_what_is_long_is_left_out_by_itself() -> None:
    values = {**VALUES, "files": {"config.json": {"layers": 4, "ignore": ["layer"] * 9000}}}
    read = read_manifest(write_manifest(manifest(**values)), NAMESPACE)
    assert read is not None
    assert read.values["weights"] == "sample:00"
    config = read.values["files"]["config.json"]
    assert config["layers"] == 4
    assert config["ignore"]["omitted_bytes"] > 70_000
    many = {f"value {i}": i for i in range(20_000)}
    assert read_manifest(write_manifest(manifest(**many)), NAMESPACE) is not None


@given(st.integers(0, MANIFEST_BYTES - 1), st.integers(1, 255))
def test_other_bytes_are_none(place: int, flip: int) -> None:
    content = bytearray(write_manifest(manifest(**VALUES)))
    assert read_manifest(content, OTHER) is None
    assert read_manifest(content[:place], NAMESPACE) is None
    content[place] ^= flip
    assert read_manifest(content, NAMESPACE) is None or place < HEADER_BYTES


def test_secrets_are_not_shown() -> None:
    values = {
        "aws_secret_access_key": "x1",
        "apiKey": "x2",
        "hf_token": "x3",
        "password": "x4",
        "cache_salt": "x5",
        "url": "see s3://user:x6@host/path?X-Signature=x7 and more",
        "deep": [{"authorization": {"bearer": "x8"}}],
    }
    text = json.dumps(shown(values))
    assert "x" not in text.replace("X-Signature", "")
    assert "s3://host/path?" + HIDDEN in text
    plain = {"image_token_id": 7, "key_bytes": 4, "num_key_value_heads": 2, "tokens": 3}
    assert shown(plain) == plain


def test_a_tool_reads_it_from_a_store() -> None:
    store = MemoryStore("", 1 << 20)
    buffer = make_buffer(MANIFEST_BYTES)
    buffer.view[:] = write_manifest(manifest(**VALUES))
    store.put([manifest_key(NAMESPACE)], [buffer], [ChunkRef("chunk")])
    assert manifest_in(store, NAMESPACE) == manifest(**VALUES)
    assert manifest_in(store, OTHER) is None
    store.remove_namespace(NAMESPACE)
    assert manifest_in(store, NAMESPACE) is None


def test_cells_of_very_many_groups_of_layers_are_left_out() -> None:
    cells = tuple({"name": f"group {number}", "layers": "x" * 100} for number in range(200))
    written = manifest(**VALUES)._replace(cells=cells)
    assert read_manifest(write_manifest(written), written.namespace) == written._replace(cells=())


def read_with(**fields: object) -> Manifest | None:
    """Read a manifest some of whose JSON others have written."""
    content = bytearray(write_manifest(manifest(**VALUES)))
    stored = {**json.loads(content[HEADER_BYTES:]), **fields}
    content[HEADER_BYTES:] = json.dumps(stored).encode().ljust(MANIFEST_BYTES - HEADER_BYTES)
    write_header(memoryview(content), key_digest(manifest_key(NAMESPACE)))
    return read_manifest(content, NAMESPACE)


@pytest.mark.parametrize(
    "fields", [{"values": []}, {"values": None}, {"first": 3}, {"weights_version": [1]}]
)
def test_a_manifest_of_another_form_is_none(fields: dict[str, object]) -> None:
    assert read_with(**fields) is None


@pytest.mark.parametrize(
    "group",
    [5, {}, {"span": 0}, {"stages": []}, {"stages": [[1, 4]]}, {"heads": 1 << 15}, {"dcp": 0}],
)
def test_cells_that_name_none_or_a_flood_are_left_out(group: object) -> None:
    """A reader makes a key for each of them."""
    [cells] = described([LayerGroup(Topology(64, 1, ((0, 64),), 1), 64)])
    whole = read_with(cells=[cells])
    assert whole is not None
    assert whole.cells == (cells,)
    changed = {**cells, **group} if isinstance(group, dict) and group else group
    read = read_with(cells=[changed])
    assert read is not None
    assert read.cells == ()


def test_cells_of_a_group_that_the_first_stages_lack_are_read() -> None:
    cells = described([LayerGroup(Topology(8, 1, ((0, 0), (0, 5)), 2), 64)])
    read = read_with(cells=cells)
    assert read is not None
    assert read.cells == tuple(cells)


@pytest.mark.parametrize("value", ["x", [1], None, 0, -1, 1 << 40, 2.5])
def test_chunk_tokens_that_no_engine_has_are_0(value: object) -> None:
    assert manifest(chunk_tokens=256).chunk_tokens == 256
    assert manifest(chunk_tokens=value).chunk_tokens == 0
