"""A scheduler's side whose workers a test plays, and examples of it in words.

    an item is asked for until it has come
        consumer; ask r a -> waits; heard -> expect a 0; ready a; ask r -> goes; load a; end r

`consumer` or `producer` makes the rig, with its options (`ranks=2`). Items have ten rows and stand
one behind the other. `ask r a b media=True` asks whether request r may go on, which needs the items
a and b; a later `ask r` repeats the question. `sent=False` is a request without parameters,
`peers=` and `consumers=` are its addresses and `names=a:x` its other names of items. `at=200` puts
its first item behind so many tokens, `computed=10` says how many are computed.

Workers speak by `ready`, `coming`, `failed`, `offered`, `took`, `holds` and `restarts`, each
perhaps followed by ranks. `heard` says what rank 0 was told since the last look, and `heard 1` what
rank 1 was told. `outstanding` says the items that a rank is still to bring. Every step checks the
invariants.
"""

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import pytest

from tests.embeds.fake_worker_channel import FakeWorkerChannel
from tests.embeds.invariants import check_scheduler
from tests.support import scripts
from tests.support.fakes import FakeClock
from tests.support.scripts import Example
from vllm_kvpool.embeds.availability import EmbedsRequest, Feature
from vllm_kvpool.embeds.params import NOWHERE, Delivery
from vllm_kvpool.embeds.protocol.messages import (
    LOADING_S,
    STARTED,
    Expect,
    Forget,
    Heartbeat,
    HeldBytes,
    ItemNews,
    Message,
    Push,
    Reorder,
    Requested,
    Taken,
    WeightsChanged,
)
from vllm_kvpool.embeds.scheduler import (
    FIRST_WEIGHTS,
    PROBE_S,
    WORKERS_LOST_S,
    EmbedsScheduler,
    EngineRole,
    StepMeta,
)

__all__ = ["BUSY", "Example", "Rig", "examples", "play", "request"]

STEP = 100  # tokens
ROWS = 10
SENT = Delivery(is_sent=True)
BUSY: dict[str, Any] = {"is_idle": False, "idle_wait_s": 0.0}
PRODUCER = {"is_producer": True, "is_consumer": False}


class Rig:
    """A scheduler's side with workers that say what a test says."""

    def __init__(self, ranks: int = 1, **options: Any) -> None:
        self.channel = FakeWorkerChannel(ranks)
        self.clock = FakeClock()
        usual = {"is_producer": False, "is_consumer": True, "has_peers": False}
        engine = EngineRole(retain_bytes=1000, max_step_tokens=STEP, **{**usual, **options})
        self.scheduler = EmbedsScheduler(
            self.channel, engine, lambda version: f"print {version}", self.clock
        )
        self.views: dict[str, EmbedsRequest] = {}
        self.looked = [0] * ranks  # messages that each rank had received at the last look
        self.unsaid: set[tuple[int, int]] = set()  # rank and position of what nobody has said

    def ensure(self, request: EmbedsRequest, computed: int = 0) -> bool:
        return self.scheduler.ensure(request, computed)

    def heard(self, rank: int) -> list[Message]:
        """Return what a rank was told since the last look."""
        heard, start = self.channel.heard[rank], self.looked[rank]
        self.looked[rank] = len(heard)
        return [heard[i] for i in range(start, len(heard)) if (rank, i) not in self.unsaid]

    def drop(self, name: str) -> None:
        """Note that the workers have an item no more, without a message to them."""
        self.channel.taken(name)
        self.unsaid |= {(rank, len(heard) - 1) for rank, heard in enumerate(self.channel.heard)}


def request(
    name: str, *items: str, delivery: Delivery = SENT, media: bool = False, start: int = 0
) -> EmbedsRequest:
    """A request for items of ROWS rows, one behind the other."""
    features = tuple(
        Feature(item, start + n * ROWS, start + (n + 1) * ROWS, ROWS, media)
        for n, item in enumerate(items)
    )
    return EmbedsRequest(name, features, delivery)


def examples(text: str, given: str = "") -> pytest.MarkDecorator:
    """Return a mark that gives each example of the text to the test. `given`: steps before."""
    return scripts.examples(text, _engine, VERBS, given)


def play(steps: str) -> Rig:
    """Take some steps, and return the rig."""
    rig: Rig = Example("", (steps,), _engine, VERBS).play()
    return rig


def _checked(verb: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(verb)
    def checked(rig: Rig, *words: str, **options: Any) -> Any:
        said = verb(rig, *words, **options)
        check_scheduler(rig.scheduler)
        return said

    return checked


def _engine(verb: str, **options: Any) -> Rig:
    """`consumer`, or `producer` for an engine that only encodes."""
    assert verb in ("consumer", "producer")
    return Rig(**(PRODUCER if verb == "producer" else {}), **options)


def in_words(body: Message) -> str:
    match body:
        case Expect(name, order):
            assert body.rows == ROWS
            verb = "joins" if body.joins else "expect"
            early = "started " if order < 0 else ""
            more = [
                f"{name}={value}"
                for name, value in (
                    ("digest", body.digest),
                    ("peers", ",".join(body.peers)),
                    ("patience", "probe" if body.patience_s == PROBE_S else body.patience_s or ""),
                )
                if value
            ]
            return " ".join((verb, name, f"{early}{order - STARTED * bool(early)}", *more))
        case Forget(name):
            return f"forget {name}"
        case Reorder(name, order):
            early = "started " if order < 0 else ""
            return f"reorder {name} {early}{order - STARTED * bool(early)}"
        case Push(name, endpoints):
            return f"push {name} {','.join(endpoints)}"
        case Requested(names):
            return f"requested {' '.join(names)}".rstrip()
        case WeightsChanged(version, fingerprint, loading):
            assert fingerprint.startswith("print ")
            return " ".join((f"weights {version} {fingerprint}", *loading))
    raise AssertionError(body)


def _pairs(text: str) -> dict[str, str]:
    return dict(each.split(":") for each in text.split(","))


def _endpoints(text: str) -> tuple[str, ...]:
    return tuple(f"tcp://{each}:1" for each in text.split(",") if each)


def _ask(
    rig: Rig,
    name: str,
    *items: str,
    media: bool = False,
    sent: bool = True,
    names: str = "",
    peers: str = "",
    consumers: str = "",
    at: int = 0,
    computed: int = 0,
    started: bool = False,
) -> list[str]:
    if name not in rig.views or items:
        delivery = Delivery(
            is_sent=sent,
            names=_pairs(names) if names else None,
            peers=_endpoints(peers),
            consumers=_endpoints(consumers),
        )
        assert delivery != Delivery() or not sent
        rig.views[name] = request(
            name, *items, delivery=delivery if sent else NOWHERE, media=media, start=at
        )
    goes = rig.scheduler.ensure(rig.views[name], computed, is_started=started)
    return ["goes" if goes else "waits"]


def _ranks(ranks: tuple[str, ...]) -> list[int]:
    return list(map(int, ranks))


def _took(rig: Rig, name: str, *ranks: str) -> None:
    rig.channel.say(Taken(name), *_ranks(ranks))


def _has(rig: Rig, item: str) -> list[str]:
    return ["yes" if rig.scheduler.has(item) else "missing"]


def _allocate(rig: Rig, *items: str) -> None:
    for item in items:
        rig.scheduler.allocated(item)


def _take(rig: Rig, *items: str) -> None:
    """Allocate items that are ready, as the engine does."""
    for item in items:
        assert rig.scheduler.has(item)
        rig.scheduler.allocated(item)


def _load(rig: Rig, item: str) -> list[str]:
    """Load a ready item in a step of its own; every rank takes it."""
    _take(rig, item)
    told = rig.scheduler.plan((), **BUSY).loads
    for load in told:
        rig.channel.say(Taken(load.name))
        rig.drop(load.name)
    return _loads(StepMeta(loads=told))


def _loads(meta: StepMeta) -> list[str]:
    told = [f"load {item}{f' as {name}' * (name != item)}" for item, name in meta.loads]
    told += [f"reuse {item}" for item in meta.reused]
    if meta.weights != FIRST_WEIGHTS:
        told.append(f"weights {meta.weights.version}")
    return told


def _plan(rig: Rig, *evicted: str, of: str = "") -> list[str]:
    """Plan a step of the requests `of`, before which the engine has evicted some items."""
    scheduled = {name: 1 for name in of.split(",") if name}
    return _loads(rig.scheduler.plan(evicted, scheduled, **BUSY))


def _idle_step(rig: Rig, *waited: str) -> None:
    """Plan a step without work; assert the seconds that it waited for workers."""
    rig.channel.waits.clear()
    rig.scheduler.plan((), is_idle=True, idle_wait_s=0.5)
    assert sorted({*rig.channel.waits} - {0.0}) == list(map(float, waited))


def _heard(rig: Rig, rank: str = "0") -> list[str]:
    return [in_words(body) for body in rig.heard(int(rank))]


def _outstanding(rig: Rig, rank: str = "0") -> list[str]:
    return rig.channel.expected(int(rank))


def _end(rig: Rig, *names: str) -> None:
    for name in names:
        rig.scheduler.finished(rig.views.pop(name))


def _unavailable(rig: Rig) -> list[str]:
    return sorted(rig.scheduler.take_unavailable())


def _silent(rig: Rig, share: str) -> None:
    """Hear nothing of workers for this share of the time after which they count as lost."""
    rig.channel.silent_s = float(share) * WORKERS_LOST_S


def _away(rig: Rig) -> None:
    rig.channel.are_up = False


def _back(rig: Rig) -> None:
    rig.channel.are_up, rig.channel.silent_s = True, 0.0


def _waiting(rig: Rig, is_waiting: str) -> None:
    assert str(rig.scheduler.is_waiting) == is_waiting


def _loading_ends(rig: Rig) -> None:
    """Let the time pass in which a step must take its loads."""
    rig.clock.advance(LOADING_S)


_VERBS: Mapping[str, Callable[..., Any]] = {
    # The engine
    "allocate": _allocate,
    "ask": _ask,
    "end": _end,
    "has": _has,
    "idle_step": _idle_step,
    "load": _load,
    "loading_ends": _loading_ends,
    "plan": _plan,
    "reset_cache": lambda rig: rig.scheduler.encoder_cache_was_reset(),
    "take": _take,
    "unavailable": _unavailable,
    "weights": lambda rig, version: rig.scheduler.weights_changed(version),
    # Workers
    "away": _away,
    "back": _back,
    "coming": lambda rig, item, digest, *ranks: rig.channel.coming(
        item, *_ranks(ranks), digest=digest
    ),
    "failed": lambda rig, item, *ranks, of=0: rig.channel.failed(
        item, *_ranks(ranks), weights_version=of
    ),
    "heard": _heard,
    "heartbeat": lambda rig: rig.channel.say(Heartbeat()),
    "holds": lambda rig, nbytes: rig.channel.say(HeldBytes(int(nbytes))),
    "offered": lambda rig, item: rig.channel.say(ItemNews(item, offered=True)),
    "outstanding": _outstanding,
    "poll": lambda rig: rig.scheduler._poll_workers(),
    "ready": lambda rig, item, *ranks, digest="d", of=0: rig.channel.ready(
        item, *_ranks(ranks), digest=digest, weights_version=of
    ),
    "restarts": lambda rig, *ranks: rig.channel.say(None, *_ranks(ranks)),
    "silent": _silent,
    "took": _took,
    "waiting": _waiting,
}
VERBS = {name: _checked(verb) for name, verb in _VERBS.items()}
