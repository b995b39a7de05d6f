"""The thread that keeps manifests in stores; `close` waits for all that was asked before."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.storage import guard_bench
from tests.storage.guard_bench import LONG_S, SHORT_S, Stage
from tests.support.buffers import make_buffer
from tests.support.faults import Fault
from vllm_kvpool.errors import StoreUnreachable
from vllm_kvpool.identity.keys import Namespace, make_namespace, manifest_key
from vllm_kvpool.layout.description import described
from vllm_kvpool.layout.topology import LayerGroup, Topology
from vllm_kvpool.storage.base import ChunkRef, GetOutcome
from vllm_kvpool.storage.contents.manifest import (
    MANIFEST_BYTES,
    Manifest,
    read_manifest,
    write_manifest,
)
from vllm_kvpool.storage.contents.manifest_writer import ManifestWriter

FIRST = make_namespace("model", "0" * 12)
SECOND = make_namespace("model", "1" * 12)
THIRD = make_namespace("model", "2" * 12)


@pytest.fixture
def stage() -> Iterator[Stage]:
    with guard_bench.stage() as stage:
        yield stage


def manifest(namespace: Namespace = FIRST, **values: int) -> Manifest:
    return Manifest(namespace, FIRST, "", values)


def kept(stage: Stage, namespace: Namespace) -> Manifest | None:
    buffer = make_buffer(MANIFEST_BYTES)
    [outcome] = stage.inner.get([manifest_key(namespace)], [buffer])
    return read_manifest(buffer.view, namespace) if outcome is GetOutcome.OK else None


def writer(stage: Stage) -> ManifestWriter:
    return ManifestWriter([stage.guard], make_buffer(MANIFEST_BYTES))


def write(stage: Stage, *manifests: Manifest) -> None:
    thread = writer(stage)
    for each in manifests:
        thread.write(each.namespace, write_manifest(each))
    assert thread.close(LONG_S)


def test_every_namespace_has_its_own(stage: Stage) -> None:
    stage.start()
    write(stage, manifest(layers=4), manifest(SECOND, layers=5))
    assert kept(stage, FIRST) == manifest(layers=4)
    assert kept(stage, SECOND) == manifest(SECOND, layers=5)


def test_the_first_writer_wins(stage: Stage) -> None:
    stage.start()
    write(stage, manifest(layers=4))
    write(stage, manifest(layers=5))
    assert kept(stage, FIRST) == manifest(layers=4)


def test_an_engine_that_cuts_cells_otherwise_is_warned(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    stage.start()
    for span in (2, 2, 4):
        assert "layer_span" not in caplog.text
        cells = described([LayerGroup(Topology(2, 1, ((0, 8),), span), 64)])
        write(stage, manifest(layers=4)._replace(cells=cells))
    assert "layer_span is 4 here and 2 in the engine that has written the manifest" in caplog.text


@pytest.mark.parametrize("nbytes", [MANIFEST_BYTES, 100])
def test_a_damaged_one_is_replaced(stage: Stage, nbytes: int) -> None:
    stage.start()
    stage.inner.put([manifest_key(FIRST)], [make_buffer(nbytes)], [ChunkRef("chunk")])
    write(stage, manifest(layers=4))
    assert kept(stage, FIRST) == manifest(layers=4)


def test_a_store_that_is_away_gets_it_when_it_is_back(stage: Stage) -> None:
    stage.troubles = [StoreUnreachable("away")]
    stage.start()
    thread = writer(stage)
    thread.write(FIRST, write_manifest(manifest(layers=4)))
    assert stage.next_news() is False
    stage.pass_time(LONG_S)
    assert stage.next_news() is True
    assert thread.close(LONG_S)
    assert kept(stage, FIRST) == manifest(layers=4)


def test_one_that_the_store_has_evicted_is_written_again(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    stage.start()
    write(stage, manifest(SECOND, layers=5))
    thread = ManifestWriter([stage.guard], make_buffer(MANIFEST_BYTES), check_every_s=SHORT_S)
    with caplog.at_level("INFO"):
        thread.write(FIRST, write_manifest(manifest(layers=4)))
        stage.wait_until(lambda: "is new" in caplog.text)
        caplog.clear()
        stage.inner.remove([manifest_key(FIRST)])
        stage.wait_until(lambda: kept(stage, FIRST) == manifest(layers=4))
        assert thread.close(LONG_S)
        assert "is new" not in caplog.text


def test_a_store_that_is_read_only_is_read_and_not_written(stage: Stage) -> None:
    stage.inner.put([manifest_key(FIRST)], [make_buffer(MANIFEST_BYTES)], [ChunkRef("chunk")])
    stage.inner.capabilities = replace(stage.inner.capabilities, writable=False)
    stage.start()
    asked: list[str] = []
    stage.store.faults.on_call = lambda store, method, keys: asked.append(method)
    stage.store.inject(Fault.SLOW, key=manifest_key(FIRST))
    write(stage, manifest(layers=4))
    assert (stage.heard, stage.heard_writable) == ([True], [False])
    assert asked == ["get"]


@pytest.mark.parametrize("fault", [Fault.ERROR, Fault.FULL, Fault.FAILED])
def test_a_store_that_takes_none_is_left_alone(stage: Stage, fault: Fault) -> None:
    stage.start()
    stage.store.inject(fault, "put", manifest_key(FIRST), times=1)
    write(stage, manifest(layers=4))
    assert kept(stage, FIRST) is None
    write(stage, manifest(layers=4))  # the next start
    assert kept(stage, FIRST) == manifest(layers=4)


def test_a_new_namespace_is_compared_with_the_nearest(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    stage.start()
    write(stage, manifest(layers=4, heads=2))
    assert "differs" not in caplog.text
    other_model = make_namespace("other", "0" * 12)
    write(stage, Manifest(other_model, other_model, "", {"layers": 4}))
    write(stage, manifest(THIRD, layers=5, heads=3))
    caplog.clear()
    with caplog.at_level("INFO"):
        write(stage, manifest(SECOND, layers=4, heads=3))
        [message] = [record.message for record in caplog.records if "differs" in record.message]
        assert f"The nearest, {THIRD}, differs in layers (4 here, 5 there)" in message
        caplog.clear()
        write(stage, manifest(SECOND, layers=4, heads=3))  # known by now
        assert "differs" not in caplog.text
