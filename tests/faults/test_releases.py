"""Older releases of vLLM: the pool works without a missing feature, and logs the lack."""

import logging

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.core.sched.scheduler import Scheduler

from tests.faults.rig import CHUNK, RigSpec
from tests.faults.scene import SLACK_S, tokens
from tests.faults.workshop import Workshop
from vllm_kvpool.connector import KVPoolConnector
from vllm_kvpool.vllm_adapt import compat

ASKS = hasattr(KVConnectorBase_V1, "has_pending_push_work")


def test_events_without_a_locality_are_not_published_and_the_log_says_so(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a locality, host memory and Mooncake would be the same medium."""
    monkeypatch.setattr(compat, "tells_locality", lambda: False)
    log = logging.getLogger("vllm_kvpool.connector")
    log.addHandler(caplog.handler)  # the pool's log goes to vLLM's handlers alone
    try:
        with caplog.at_level(logging.WARNING, log.name):
            rig = workshop.rig(RigSpec(events=True), workshop.memory())
    finally:
        log.removeHandler(caplog.handler)
    assert "the pool publishes no KV events" in caplog.text
    rig.add(tokens(1, 2 * CHUNK), 1)
    rig.run(SLACK_S)
    assert list(rig.scheduler.connector.take_events()) == []


@pytest.mark.parametrize("is_pending", [False, True])
def test_an_idle_engine_makes_steps_while_the_pool_has_work(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, is_pending: bool
) -> None:
    """vLLM 0.23 does not ask connectors for pending work."""
    rig = workshop.rig(RigSpec(), workshop.memory())
    rig.add(tokens(2, 4 * CHUNK), 1)
    rig.run(SLACK_S)
    rig.settle()
    monkeypatch.setattr(KVPoolConnector, "has_pending_push_work", lambda _: is_pending)
    assert not rig.scheduler.has_unfinished_requests()
    assert rig.scheduler.has_requests() is is_pending


def test_vllms_own_rule_is_extended_once_where_it_needs_to_be() -> None:
    compat.step_while_pending()
    once = Scheduler.has_finished_requests
    compat.step_while_pending()
    assert Scheduler.has_finished_requests is once
    assert hasattr(once, "__wrapped__") is not ASKS
