"""Every hook of the embedding connector is forwarded: without one of them something differs.

A play drives engines by vLLM's scheduler and its model runners' mixin, and returns observations.
Each hook is removed once; vLLM's base class then answers. The play must return something else, or
fail.
"""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry

from tests.embeds.engines import PATIENCE_S, wait_for
from tests.embeds.vision_engine import VisionEngine, encoded
from tests.support.threads import NewThreads
from vllm_kvpool.embeds.connector import KVPoolECConnector

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of vLLM and torch, while they are imported
    from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase
    from vllm.distributed.ec_transfer.ec_connector.metrics import (
        ECConnectorLogging,
        ECConnectorProm,
    )

SHORT_S = 0.1
CUT_S = 1.5  # for an engine without a hook, which may never end


class Stage:
    """A factory of engines; an engine that hangs fails the play after `limit_s`."""

    def __init__(
        self, directory: Path, monkeypatch: pytest.MonkeyPatch, limit_s: float = PATIENCE_S
    ) -> None:
        self.directory, self.monkeypatch, self.limit_s = directory, monkeypatch, limit_s

    def engine(self, role: str, **options: Any) -> VisionEngine:
        return VisionEngine(self.directory, role, self.monkeypatch, **options)


Play = Callable[[Stage], object]


def delivery(stage: Stage) -> object:
    """The consumer has no media: it uses what the producer has encoded in its last step."""
    with stage.engine("ec_producer") as producer, stage.engine("ec_consumer") as consumer:
        consumer.add("use", "image", has_media=False, peer=producer.endpoint)
        consumer.step()
        producer.add("make", "image")
        producer.run(limit_s=stage.limit_s)
        consumer.run(limit_s=stage.limit_s)
        used = consumer.seen["use"]
        return used.reason, torch.equal(used.used["image"], encoded("image")), consumer.encoded


def reuse(stage: Stage) -> object:
    """A request of the producer finds the item in the engine's cache, its consumer gets it, too."""
    options = {"waiting_timeout_s": SHORT_S}
    with (
        stage.engine("ec_producer", **options) as producer,
        stage.engine("ec_consumer") as consumer,
    ):
        producer.add("first", "image")
        producer.run(limit_s=stage.limit_s)
        machine = producer.side._producer
        assert machine is not None
        wait_for(lambda: bool(machine.counts["never_taken"]))
        producer.add("again", "image")
        producer.run(limit_s=stage.limit_s)
        consumer.add("use", "image", has_media=False, peer=producer.endpoint)
        consumer.run(limit_s=stage.limit_s)
        return consumer.seen["use"].reason, producer.encoded


def loss(stage: Stage) -> object:
    """No engine offers an item that the consumer cannot encode."""
    with stage.engine("ec_consumer", bootstrap_timeout_s=SHORT_S) as consumer:
        consumer.add("use", "image", has_media=False)
        consumer.run(limit_s=stage.limit_s)
        return consumer.seen["use"].reason


def answer(stage: Stage) -> object:
    with stage.engine("ec_producer") as producer:
        producer.add("make", "image")
        producer.run(limit_s=stage.limit_s)
        return list(producer.seen["make"].params or ())


class _Prom(ECConnectorProm):
    """vLLM's Prometheus metrics with their own collectors."""

    def __init__(self, *args: Any) -> None:
        self.registry = CollectorRegistry()
        for kind in ("_counter_cls", "_gauge_cls", "_histogram_cls"):
            real = getattr(ECConnectorProm, kind)
            setattr(self, kind, lambda *a, real=real, **k: real(*a, **k, registry=self.registry))
        super().__init__(*args)


def statistics(stage: Stage) -> object:
    """Record the numbers of a delivery as vLLM logs and exports them."""
    with stage.engine("ec_producer") as producer, stage.engine("ec_consumer") as consumer:
        logs = ECConnectorLogging(consumer.config.ec_transfer_config)
        prom = _Prom(consumer.config, ["engine"], {0: ["0"]})
        consumer.add("use", "image", has_media=False, peer=producer.endpoint)
        producer.add("make", "image")
        consumer.run(producer, limit_s=stage.limit_s)

        def are_told() -> bool:
            consumer.step()
            return any(stats.ec_connector_stats for stats in consumer.stats)

        wait_for(are_told, patience_s=stage.limit_s)
        for stats in consumer.stats:
            if stats.ec_connector_stats:
                logs.observe(stats.ec_connector_stats)
                prom.observe(stats.ec_connector_stats)
        lines: list[str] = []
        logs.log(lambda text, *more: lines.append(text % more))
        return bool(lines), {family.name for family in prom.registry.collect()}


def shutdown(stage: Stage) -> object:
    threads = NewThreads()
    with stage.engine("ec_producer") as engine:
        engine.step()
    return len(threads.alive("kvpool"))


HOOKS: dict[str, Play] = {
    "start_worker_services": delivery,
    "start_save_caches": reuse,
    "save_caches": delivery,
    "start_load_caches": delivery,
    "has_cache_item": delivery,
    "ensure_cache_available": delivery,
    "update_state_after_alloc": delivery,
    "build_connector_meta": delivery,
    "take_unavailable_requests": loss,
    "request_finished": answer,
    "get_ec_connector_stats": statistics,
    "build_ec_connector_stats": statistics,
    "build_prom_metrics": statistics,
    "shutdown": shutdown,
}


@pytest.mark.parametrize("name", HOOKS)
def test_hook_that_is_not_forwarded_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    play = HOOKS[name]
    expected = play(Stage(tmp_path, monkeypatch))
    monkeypatch.setattr(KVPoolECConnector, name, vars(ECConnectorBase)[name])
    try:
        seen = play(Stage(tmp_path, monkeypatch, CUT_S))
    except Exception:  # an engine without a hook may fail in any way
        return
    assert seen != expected


def test_every_hook_has_a_play() -> None:
    ours = {name for name in vars(KVPoolECConnector) if not name.startswith("_")}
    assert ours - HOOKS.keys() == {"worker_card"}, "the scheduler part asks for it, not vLLM"
