"""The shutdown of the embedding connector, its idle steps and its metrics."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from vllm.config import VllmConfig
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request, RequestStatus

from vllm_kvpool.connector import KVPoolConnector
from vllm_kvpool.embeds.connector import KVPoolECConnector, KVPoolECMetadata
from vllm_kvpool.embeds.scheduler import StepMeta
from vllm_kvpool.metrics import MetricsRegistry, StatsFile
from vllm_kvpool.vllm_adapt import embeds as adapt


def test_counters_that_cannot_be_written_keep_no_connection_open(tmp_path: Path) -> None:
    """Open sockets would show up later, in an unrelated garbage collection."""
    ends: list[str] = []
    connector = object.__new__(KVPoolECConnector)
    connector._closed = False
    connector._pid = os.getpid()
    connector._stats_file = StatsFile(tmp_path / "no directory" / "stats", MetricsRegistry())
    connector._worker_part = None
    connector._scheduler_part = SimpleNamespace(  # type: ignore[assignment]
        close=lambda: ends.append("scheduler")
    )
    connector.shutdown()
    connector.shutdown()
    assert ends == ["scheduler"]


@pytest.mark.parametrize("kind", [KVPoolConnector, KVPoolECConnector])
def test_a_copy_of_an_engines_process_does_not_end_the_engines_pool(kind: Any) -> None:
    """A program with an in-process engine forks, and its child exits."""
    ends: list[str] = []
    connector = object.__new__(kind)
    connector._closed, connector._pid, connector._stats_file = False, os.getpid(), None
    connector._worker_part = SimpleNamespace(close=lambda: ends.append("worker"))
    connector._scheduler_part = SimpleNamespace(close=lambda: ends.append("scheduler"))
    pid = os.fork()
    if pid == 0:
        connector.shutdown()
        os._exit(len(ends))
    assert os.waitpid(pid, 0)[1] == 0
    connector.shutdown()
    assert sorted(ends) == ["scheduler", "worker"]


@pytest.mark.parametrize(
    ("status", "computed", "is_started"),
    [
        (RequestStatus.WAITING, 0, False),
        (RequestStatus.PREEMPTED, 0, False),
        (RequestStatus.RUNNING, 0, True),  # all of its loaded blocks were invalid
        (RequestStatus.RUNNING, 16, True),
        (RequestStatus.WAITING, 16, True),
        (RequestStatus.PREEMPTED, 16, True),
    ],
)
def test_request_has_started_if_it_holds_blocks(
    status: RequestStatus, computed: int, is_started: bool
) -> None:
    """It waits with blocks after a load of KV, or as a session with its next input."""
    request = Request("r", [1] * 32, SamplingParams(max_tokens=1), None)
    assert not adapt.is_started(request)
    request.status, request.num_computed_tokens = status, computed
    assert adapt.is_started(request) == is_started


@pytest.mark.parametrize("modules", [0, 1, 3])
def test_items_that_a_drafter_reads_ahead_hold_a_request(modules: int) -> None:
    """vLLM takes their embeddings in the same step; without media the engine would end."""
    config: Any = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_batched_tokens=512),
        num_prefill_lookahead_tokens=modules,
    )
    assert adapt.max_step_tokens(config) == 512 + modules
    assert isinstance(VllmConfig.num_prefill_lookahead_tokens, property)


def test_numbers_of_media_go_to_no_other_engine() -> None:
    """Every engine numbers its media from the start, so equal numbers name different items."""
    names = ["renderer0-mm-1-image-0", "named"]
    features = [
        MultiModalFeatureSpec(None, "image", name, PlaceholderRange(offset=at, length=8))
        for at, name in zip((0, 8), names, strict=True)
    ]
    request: Any = SimpleNamespace(mm_features=features)
    resolver: Any = SimpleNamespace(fields_for=lambda modality: ())
    assert [each[-1] for each in adapt.features_of(request, resolver)] == [False, True]
    answer = adapt.answer_of(request, resolver, "tcp://e:1", {})
    assert answer is not None
    assert list(answer) == ["named"]
    assert answer["named"]["item_indices"] == [1]

    kept: list[str] = []
    connector = object.__new__(KVPoolECConnector)
    connector._is_producer = True
    connector._connector_metadata = KVPoolECMetadata(StepMeta())
    connector._worker_part = SimpleNamespace(  # type: ignore[assignment]
        produced=lambda mm_hash, *_: kept.append(mm_hash)
    )
    for name in names:
        connector.save_caches(dict.fromkeys(names, torch.zeros(8, 2)), name)
    assert kept == ["named"]


@pytest.mark.parametrize(("engines", "rests"), [(1, True), (2, False)])
def test_engines_that_step_together_never_rest(engines: int, rests: bool) -> None:
    """An engine that waits for embeddings in an idle step holds up all data-parallel engines."""
    idle: list[bool] = []

    def plan(freed: object, scheduled: object, *, is_idle: bool, idle_wait_s: float) -> StepMeta:
        idle.append(is_idle)
        return StepMeta()

    connector = object.__new__(KVPoolECConnector)
    connector._vllm_config = SimpleNamespace(  # type: ignore[assignment]
        parallel_config=SimpleNamespace(data_parallel_size=engines)
    )
    connector._scheduler_part = SimpleNamespace(plan=plan)  # type: ignore[assignment]
    for tokens in (0, 1):
        output: Any = SimpleNamespace(
            total_num_scheduled_tokens=tokens, num_scheduled_tokens={}, free_encoder_mm_hashes=()
        )
        connector.build_connector_meta(output)
    assert idle == [rests, False]


def test_prometheus_has_the_rows_of_embeddings_alone() -> None:
    collectors = CollectorRegistry()

    def of(kind: Any) -> Any:
        return lambda **options: kind(**options, registry=collectors)

    types = {kind: of(kind) for kind in (Counter, Gauge, Histogram)}
    config: Any = SimpleNamespace(ec_transfer_config=None)
    prom = KVPoolECConnector.build_prom_metrics(config, types, ["engine"], {0: ["0"]})
    registry = MetricsRegistry()
    registry.add("kvpool_ec_events", 3, side="consumer", event="items")
    prom.observe(registry.take_changes())
    names = {metric.name for metric in collectors.collect()}
    assert names
    assert all(name.startswith("vllm:kvpool_ec_") for name in names)
    labels = {"engine": "0", "side": "consumer", "event": "items"}
    assert collectors.get_sample_value("vllm:kvpool_ec_events_total", labels) == 3
