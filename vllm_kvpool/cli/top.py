"""`kvpool top`: what the pool does in engines right now, from their `/metrics`."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from vllm_kvpool.cli.common.engine_metrics import Growth, Samples, Series, scrape
from vllm_kvpool.cli.common.tables import TextTable, size_text, texts, time_text
from vllm_kvpool.errors import ConfigError


class StoreRate(msgspec.Struct, frozen=True):
    """Traffic to or from one kind of store."""

    direction: str
    store: str
    bytes_per_s: float
    cells_per_s: float
    failed_per_s: float


class LaneState(msgspec.Struct, frozen=True):
    """State of one lane to one tier: its queue, and the time that batches waited and took."""

    lane: str
    tier: str
    queued_cells: int
    batches_per_s: float
    wait_s: float | None
    batch_s: float | None


class EngineState(msgspec.Struct, frozen=True):
    """An engine over one interval. Rates are per second, durations means; None if nothing was."""

    engine: str
    error: str = ""
    hit_ratio: float | None = None
    hit_tokens_per_s: float = 0.0
    saved_tokens_per_s: float = 0.0
    lookup_s: float | None = None
    load_s: float | None = None
    save_s: float | None = None
    missed: dict[str, float] = {}
    """Tokens a second by reason, without `not_needed`."""
    unsaved: dict[str, float] = {}
    """Tokens a second that were to be saved and were not, by reason."""
    failures: dict[str, float] = {}
    """Since the interval's start, by kind."""
    tiers_down: list[str] = []
    stores: list[StoreRate] = []
    lanes: list[LaneState] = []


def engine_state(engine: str, before: Samples, now: Samples, seconds: float) -> EngineState:
    """Return an engine's state between two scrapes (pure)."""
    growth = Growth(before, now, seconds)
    missed = growth.by("miss_tokens_total", "reason")
    missed.pop("not_needed", None)
    hits = growth.total("hit_tokens_total")
    needed = hits + sum(missed.values())
    lookups = growth.total("lookups_total")
    return EngineState(
        engine,
        hit_ratio=hits / needed if needed else None,
        hit_tokens_per_s=hits / seconds,
        saved_tokens_per_s=growth.rate("saved_tokens_total")
        + growth.rate("host_saved_tokens_total"),
        lookup_s=growth.total("lookup_seconds_total") / lookups if lookups else None,
        load_s=growth.mean("load_seconds"),
        save_s=growth.mean("save_seconds"),
        missed={reason: tokens / seconds for reason, tokens in missed.items()},
        unsaved={
            reason: tokens / seconds
            for reason, tokens in growth.by("unsaved_tokens_total", "reason").items()
        },
        failures=growth.by("failures_total", "kind"),
        tiers_down=sorted(
            dict(series.labels)["tier"]
            for series, value in now.items()
            if series.name == "tier_up" and not value
        ),
        stores=_store_rates(growth),
        lanes=_lane_states(growth),
    )


def _labels_of(samples: Samples, names: Sequence[str], labels: Sequence[str]) -> list[list[str]]:
    found = {
        tuple(dict(series.labels)[label] for label in labels)
        for series in samples
        if series.name in names
    }
    return [list(each) for each in sorted(found)]


def _store_rates(growth: Growth) -> list[StoreRate]:
    rates = []
    for direction, store in _labels_of(growth.now, ["cells_total"], ["direction", "store"]):
        which = {"direction": direction, "store": store}
        cells = growth.rate("cells_total", **which)
        done = sum(growth.rate("cells_total", **which, outcome=each) for each in _WELL)
        nbytes = growth.rate("bytes_total", **which)
        rates.append(StoreRate(direction, store, nbytes, cells, max(0.0, cells - done)))
    return rates


_WELL = ("done", "existed", "missing")


def _lane_states(growth: Growth) -> list[LaneState]:
    states = []
    names = ["op_seconds_count", "queue_cells"]
    for lane, tier in _labels_of(growth.now, names, ["lane", "tier"]):
        which = {"lane": lane, "tier": tier}
        queued = growth.now.get(Series("queue_cells", tuple(sorted(which.items()))), 0)
        states.append(
            LaneState(
                lane,
                tier,
                int(queued),
                growth.rate("op_seconds_count", **which),
                growth.mean("op_wait_seconds", **which),
                growth.mean("op_seconds", **which),
            )
        )
    return states


def tables(states: Sequence[EngineState]) -> list[TextTable]:
    """Return the tables of engines: a row each, and their stores and lanes."""
    engines = [
        [
            each.engine,
            "-" if each.hit_ratio is None else f"{100 * each.hit_ratio:.1f} %",
            f"{each.hit_tokens_per_s:.0f}",
            f"{each.saved_tokens_per_s:.0f}",
            *map(time_text, (each.lookup_s, each.load_s, each.save_s)),
            each.error or "; ".join(_troubles(each)) or "-",
        ]
        for each in states
    ]
    shown = [TextTable("", _ENGINE_COLUMNS, texts(engines), _OPTIONAL_COLUMNS, prose="notes")]
    stores = [
        [
            each.engine,
            rate.direction,
            rate.store,
            f"{size_text(rate.bytes_per_s)}/s",
            f"{rate.cells_per_s:.0f}",
            f"{rate.failed_per_s:.0f}",
        ]
        for each in states
        for rate in each.stores
    ]
    lanes = [
        [
            each.engine,
            lane.lane,
            lane.tier or "-",
            lane.queued_cells,
            f"{lane.batches_per_s:.0f}",
            *map(time_text, (lane.wait_s, lane.batch_s)),
        ]
        for each in states
        for lane in each.lanes
    ]
    if stores:
        shown.append(TextTable("stores", _STORE_COLUMNS, texts(stores), optional=("cells/s",)))
    if lanes:
        shown.append(TextTable("lanes", _LANE_COLUMNS, texts(lanes), optional=("batches/s",)))
    return shown


_ENGINE_COLUMNS = ("engine", "hits", "hit tok/s", "saved tok/s", "lookup", "load", "save", "notes")
_OPTIONAL_COLUMNS = ("save", "load", "lookup", "saved tok/s", "hit tok/s")
_STORE_COLUMNS = ("engine", "direction", "store", "bytes", "cells/s", "failed/s")
_LANE_COLUMNS = ("engine", "lane", "tier", "queued", "batches/s", "wait", "batch")


def _troubles(state: EngineState) -> list[str]:
    return [
        *(f"tier {tier} is away" for tier in state.tiers_down),
        *(f"{count:.0f} {kind}" for kind, count in state.failures.items()),
        *(f"missed {rate:.0f} tok/s {reason}" for reason, rate in state.missed.items()),
        *(f"unsaved {rate:.0f} tok/s {reason}" for reason, rate in state.unsaved.items()),
    ]


def watch(
    urls: Sequence[str],
    every_s: float,
    read: Callable[[str], Samples] = scrape,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[list[EngineState]]:
    """Yield the states of engines at these URLs, again and again, `every_s` apart.

    Engines are read one after the other. One that cannot be read has the reason as `error`.
    """
    before = _read_all(urls, read, clock)
    while True:
        sleep(every_s)
        now = _read_all(urls, read, clock)
        yield [_state_of(url, before[url], now[url]) for url in urls]
        before = now


class _Reading(NamedTuple):
    time_s: float
    samples: Samples
    error: str = ""


def _read_all(
    urls: Sequence[str], read: Callable[[str], Samples], clock: Callable[[], float]
) -> dict[str, _Reading]:
    readings = {}
    for url in urls:
        try:
            readings[url] = _Reading(clock(), read(url))
        except ConfigError as error:
            why = str(error).removeprefix(f"{url}: ")
            readings[url] = _Reading(clock(), {}, why)
    return readings


def _state_of(url: str, before: _Reading, now: _Reading) -> EngineState:
    if now.error:
        return EngineState(url, error=now.error)
    if not now.samples:
        return EngineState(url, error="no metrics of the pool: has it KVPoolConnector?")
    first = now.samples if before.error else before.samples  # of one that has come: no growth yet
    return engine_state(url, first, now.samples, now.time_s - before.time_s)
