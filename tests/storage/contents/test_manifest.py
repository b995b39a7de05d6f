"""What is kept of a namespace: the same back, bounded, without secrets, and never by mistake."""

import json

from hypothesis import given
from hypothesis import strategies as st

from tests.support.buffers import make_buffer
from tests.support.memory_store import MemoryStore
from vllm_kvpool.identity.keys import make_namespace, manifest_key, namespace_of
from vllm_kvpool.storage.base import ChunkRef
from vllm_kvpool.storage.contents.cell_format import HEADER_BYTES
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
