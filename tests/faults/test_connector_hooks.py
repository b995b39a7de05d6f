"""Every hook of the connector is forwarded: without one of them something differs.

A play drives an engine by vLLM's scheduler and one of vLLM's model runners, and returns its
observations. Each hook is removed once. vLLM's base class then answers, as in a connector that does
not forward the hook. The play must then return something else, or fail.
"""

import inspect
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import get_kv_connector_cache_layout
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorLogging,
    KVConnectorProm,
)

from tests.faults.model import WINDOWS, FakeModel
from tests.faults.rank import pool_in
from tests.faults.rig import CHUNK, Rig, RigSpec
from tests.faults.workshop import Workshop
from tests.support.faults import Fault
from vllm_kvpool.connector import KVPoolConnector
from vllm_kvpool.vllm_adapt import kv_events

CHUNKS = 3
WHOLE = CHUNKS * CHUNK
PROMPT = [3 + 7 * i % 900 for i in range(WHOLE + 9)]
OTHER = [3 + 11 * i % 900 for i in range(WHOLE)]
ANSWER_TOKENS = 3
LIMIT_S = 60.0
CUT_S, CUT_TIMES = 1.5, 10  # for an engine without a hook, which may never end
SLOW_S = 0.05
HELD_S = 0.3  # duration of a load while vLLM frees the pages

Play = Callable[["Stage"], object]


class Stage:
    """The engines and stores of a play. A hanging engine fails the test after `limit_s`."""

    def __init__(self, workshop: Workshop, limit_s: float) -> None:
        self.workshop = workshop
        self.limit_s = limit_s

    def rig(self, store: str | list[str], spec: RigSpec | None = None, name: str = "rig") -> Rig:
        return self.workshop.rig(spec or RigSpec(), store, name)

    def serve(self, rig: Rig, prompt: list[int] = PROMPT, **asked: Any) -> tuple[str, float]:
        """Answer a prompt, and return how it has ended and its hit tokens."""
        before = rig.count("kvpool_hit_tokens")
        request_id = rig.add(prompt, ANSWER_TOKENS, **asked)
        rig.run(self.limit_s)
        rig.expect([request_id])
        rig.settle()
        return rig.answers[request_id].ended, rig.count("kvpool_hit_tokens") - before

    def stored(self) -> str:
        """Return a store that holds PROMPT and OTHER."""
        url = self.workshop.memory()
        writer = self.rig(url, name="writer")
        for prompt in (PROMPT, OTHER):
            self.serve(writer, prompt)
        return url


def sharing(stage: Stage) -> object:
    """The first engine saves, the second loads. The second of its requests hits its own cache."""
    url = stage.workshop.memory()
    writer, reader = stage.rig(url, name="writer"), stage.rig(url, name="reader")
    seen = [stage.serve(rig) for rig in (writer, reader, reader)]
    return seen, writer.count("kvpool_saved_tokens"), reader.count("kvpool_saved_tokens")


def sharing_by_the_older_runner(stage: Stage) -> object:
    url = stage.stored()
    return stage.serve(stage.rig(url, RigSpec(runner="0.27.1"), "reader"))


def drafting(stage: Stage) -> object:
    """The drafter of this runner computes after the results are reported. Its layers are stored,
    too."""
    url = stage.workshop.memory()
    rig = stage.rig(url, RigSpec(runner="first, drafts"))
    rig.ranks[0].part.worker.has_drafts = True
    rig.add(PROMPT, 1)
    rig.run(stage.limit_s)
    return stage.workshop.faults.calls["put"] > 0 or rig.count("kvpool_saved_tokens")


def layers(stage: Stage) -> object:
    """The store is slow, and a request runs while its layers arrive."""
    url = stage.stored()
    stage.workshop.slow_s = SLOW_S
    stage.workshop.faults.inject(Fault.SLOW, "get", store="reader.0")
    return stage.serve(stage.rig(url, RigSpec(options={"layerwise": True}), "reader"))


def failing_load(stage: Stage) -> object:
    url = stage.stored()
    stage.workshop.faults.inject(Fault.MISSING, "get", store="reader.0")
    return stage.serve(stage.rig(url, name="reader"))


def failing_load_of_groups(stage: Stage) -> object:
    """With several KV cache groups, vLLM gets failed loads by request, not by block."""
    url = stage.workshop.memory()
    spec = RigSpec(model=WINDOWS)
    stage.serve(stage.rig(url, spec, "writer"))
    stage.workshop.faults.inject(Fault.MISSING, "get", store="reader.0")
    return stage.serve(stage.rig(url, spec, "reader"))


def preemption(stage: Stage) -> object:
    """Return whether vLLM is told that waiting frees blocks, while saves hold them."""
    rig = stage.rig(stage.workshop.memory())
    told: list[bool] = []
    rig.on_scheduled.append(
        lambda output: told.append(rig.scheduler.connector.has_pending_block_frees())
    )
    stage.serve(rig)
    return any(told)


def last_step(stage: Stage) -> object:
    """A put is under way when no request is left: vLLM goes on until its outcome is known."""
    rig = stage.rig(stage.workshop.memory())
    stage.workshop.faults.inject(Fault.BLOCKED, "put", store="rig.0")
    rig.add(PROMPT, ANSWER_TOKENS)
    rig.run(stage.limit_s, until=lambda: bool(rig.answers["r0"].ended))
    rig.step()  # passes the request's end to the worker
    is_busy = rig.busy
    stage.workshop.faults.release()
    rig.settle()
    return is_busy


def reset(stage: Stage) -> object:
    url = stage.stored()
    rig = stage.rig(url, name="reader")
    rig.reset(connector=True)
    return stage.serve(rig)


def events(stage: Stage) -> object:
    kv_events.MEDIA["memory"] = kv_events.Medium("CPU")
    rig = stage.rig(stage.workshop.memory(), RigSpec(events=True))
    heard: list[str | None] = []
    rig.scheduler.kv_event_publisher.publish = lambda batch: heard.extend(
        each.medium for each in batch.events
    )
    stage.serve(rig)
    return "CPU" in heard


def statistics(stage: Stage) -> object:
    """Record hits by medium and the connector's own numbers, as vLLM logs and exports them."""
    rig = stage.rig(["host://1MiB", stage.workshop.memory()])
    config = rig.scheduler.vllm_config
    logs, prom = (
        KVConnectorLogging(config.kv_transfer_config),
        _Prom(config, ["engine"], {0: ["0"]}),
    )
    told: list[Any] = []
    update = rig.scheduler.make_stats

    def make_stats(*args: Any, **named: Any) -> Any:
        stats = update(*args, **named)
        if stats is not None:
            told.append(stats)
        return stats

    rig.scheduler.make_stats = make_stats  # type: ignore[method-assign]
    for _ in range(2):
        stage.serve(rig)
        rig.reset()
    sources: dict[str, int] = {}
    for stats in told:
        hits = getattr(stats.connector_prefix_cache_stats, "hits_by_source", None) or {}
        for source, tokens in hits.items():
            sources[str(source)] = sources.get(str(source), 0) + tokens
        if stats.kv_connector_stats:
            logs.observe(stats.kv_connector_stats)
            prom.observe(stats.kv_connector_stats)
    lines: list[str] = []
    logs.log(lambda text, *more: lines.append(text % more))
    return sources, "hit_tokens" in "".join(lines), _Prom.hit_tokens()


class _Prom(KVConnectorProm):
    """vLLM's Prometheus metrics with their own collectors."""

    collectors = CollectorRegistry()

    def __init__(self, *args: Any) -> None:
        registry = _Prom.collectors = CollectorRegistry()
        for kind in ("_counter_cls", "_gauge_cls", "_histogram_cls"):
            real = getattr(KVConnectorProm, kind)
            setattr(self, kind, lambda *a, real=real, **k: real(*a, **k, registry=registry))
        super().__init__(*args)

    @classmethod
    def hit_tokens(cls) -> float | None:
        return cls.collectors.get_sample_value("vllm:kvpool_hit_tokens_total", {"engine": "0"})


def shutdown(stage: Stage) -> object:
    rig = stage.rig(stage.workshop.memory())
    stage.serve(rig)
    rig.shutdown()
    return len(stage.workshop.pool_threads())


def start(stage: Stage) -> object:
    """Return the answers to vLLM's questions before it allocates the caches."""
    rig = stage.rig(stage.workshop.memory())
    config = rig.scheduler.vllm_config
    kind = KVConnectorFactory.get_connector_class(config.kv_transfer_config)
    return (
        rig.scheduler.requires_kv_delivery,
        get_kv_connector_cache_layout(config),
        kind.requires_piecewise_for_cudagraph({"layerwise": True}),
    )


def zeroing(stage: Stage) -> object:
    """Record how many blocks vLLM fills with zeros before a load into them."""
    url = stage.workshop.memory()
    spec = RigSpec(model=FakeModel(layers=3, states=(0, 1)))
    stage.serve(stage.rig(url, spec, "writer"), PROMPT)
    rig = stage.rig(url, spec, "reader")
    zeroed: list[int] = []
    rig.on_scheduled.append(
        lambda output: zeroed.append(len(getattr(output, "new_block_ids_to_zero", None) or ()))
    )
    return stage.serve(rig), zeroed


def ended(stage: Stage) -> object:
    """Return the answer's `kv_transfer_params`, by both forms of the hook."""
    rig = stage.rig(stage.workshop.memory())
    plain = pool_in(rig.scheduler.connector)
    of_groups = plain.request_finished_all_groups
    forms: list[object] = []

    def finish(request: Any, block_ids: Any) -> Any:
        plain.request_finished_all_groups = of_groups  # type: ignore[method-assign]
        forms.append(plain.request_finished(request, block_ids[0]))
        return forms[-1]

    plain.request_finished_all_groups = finish  # type: ignore[method-assign]
    request_id = rig.add(PROMPT, 1)
    rig.run(stage.limit_s)
    return forms, rig.answers[request_id].params


def sleeping(stage: Stage) -> object:
    """Return whether a load has ended by the time at which vLLM frees the pages."""
    url = stage.stored()
    stage.workshop.faults.inject(Fault.BLOCKED, "get", store="reader.0")
    rig = stage.rig(url, name="reader")
    rig.add(PROMPT, ANSWER_TOKENS)
    rig.run(stage.limit_s, until=stage.workshop.faults.entered.is_set)
    released = threading.Event()
    timer = threading.Timer(HELD_S, lambda: (released.set(), stage.workshop.faults.release()))
    timer.start()
    pool_in(rig.ranks[0].connector).unregister_kv_caches()
    has_waited = released.is_set()
    timer.join()
    rig.run(stage.limit_s)
    return has_waited


HOOKS: dict[str, Play] = {
    "requires_kv_delivery": start,
    "get_required_kvcache_layout": start,
    "requires_piecewise_for_cudagraph": start,
    "register_kv_caches": sharing,
    "bind_connector_metadata": sharing,
    "start_load_kv": sharing,
    "wait_for_layer_load": layers,
    "wait_for_save": drafting,
    "get_finished": sharing_by_the_older_runner,
    "get_transfer_results": failing_load_of_groups,
    "get_block_ids_with_load_errors": failing_load,
    "build_connector_worker_meta": sharing,
    "bind_gpu_block_pool": sharing,
    "on_new_request": sharing,
    "get_num_new_matched_tokens": sharing,
    "get_loaded_kv_cache_group_ids": zeroing,
    "update_state_after_alloc": sharing,
    "build_connector_meta": sharing,
    "update_connector_output": sharing,
    "request_finished": ended,
    "request_finished_all_groups": sharing,
    "has_pending_block_frees": preemption,
    "has_pending_push_work": last_step,
    "reset_cache": reset,
    "take_events": events,
    "get_external_cache_hit_sources": statistics,
    "get_kv_connector_stats": statistics,
    "build_kv_connector_stats": statistics,
    "build_prom_metrics": statistics,
    "shutdown": shutdown,
}
NEWER: dict[str, Play] = {"unregister_kv_caches": sleeping}
"""Hooks that this release of vLLM may not have; it then does not call them."""
NOTHING_TO_DO = {"save_kv_layer"}
"""Hooks that vLLM demands and the connector leaves empty."""


def base_of(name: str) -> Any:
    """Return the hook of vLLM's base classes."""
    kinds = [each for each in (KVConnectorBase_V1, SupportsHMA) if name in vars(each)]
    return vars(kinds[0])[name] if kinds else lambda connector: None


def timed(play: Play, workshop: Workshop) -> tuple[object, float]:
    """Run a play of the whole connector; return what it says, and a limit for the next run."""
    began = time.monotonic()
    expected = play(Stage(workshop, LIMIT_S))
    workshop.faults.heal()
    return expected, CUT_S + CUT_TIMES * (time.monotonic() - began)


@pytest.mark.parametrize("name", HOOKS | NEWER)
def test_hook_that_is_not_forwarded_is_noticed(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    play = (HOOKS | NEWER)[name]
    expected, limit_s = timed(play, workshop)
    monkeypatch.setattr(KVPoolConnector, name, base_of(name))
    monkeypatch.setattr("tests.faults.rig.SETTLE_S", limit_s)
    try:
        seen = play(Stage(workshop, limit_s))
    except Exception:  # an engine without a hook may fail in any way
        return
    assert seen != expected


PLAYS = {play.__name__: play for play in (*HOOKS.values(), *NEWER.values())}


@pytest.mark.parametrize("play", PLAYS.values(), ids=PLAYS)
def test_play_with_all_hooks_says_the_same_again(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, play: Play
) -> None:
    """Otherwise the play would notice every hook's absence."""
    expected, limit_s = timed(play, workshop)
    monkeypatch.setattr("tests.faults.rig.SETTLE_S", limit_s)
    assert play(Stage(workshop, limit_s)) == expected


def test_every_hook_has_a_play() -> None:
    ours = {name for name in vars(KVPoolConnector) if not name.startswith("_")}
    assert ours == HOOKS.keys() | NEWER.keys() | NOTHING_TO_DO
    for name in NOTHING_TO_DO:
        body = inspect.getsource(getattr(KVPoolConnector, name)).rstrip()
        assert body.endswith('"""'), f"{name} does something: give it a play"
