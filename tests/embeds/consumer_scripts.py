"""Examples of a consumer, written as scripts.

    an item is granted, written and ready
        consumer; peer a; expect image 0; offer a image 3 -> allocate image | grant a image 0-3
        wrote 0; drained 0 -> ready image

`consumer` makes the machine with its limits; `room=3` is memory for three rows, of four bytes each.
`expect image 0` is a request of order 0, `started=True` of one that holds blocks. Offers are
numbered from 1. A grant goes by its first row: `wrote 0`, `failed 0`, `declined 0` and `drained 0`,
each perhaps of another item (`wrote 0 second`). `tick 10` sets the clock. Every step is a turn: it
checks the invariants and says what the consumer does.
"""

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from tests.embeds.invariants import check_consumer, describe
from tests.embeds.world import limits, shape_of
from tests.support import scripts
from tests.support.scripts import Example
from vllm_kvpool.embeds.machines.consumer import Consumer
from vllm_kvpool.embeds.machines.effects import (
    Allocate,
    Discard,
    DrainRows,
    Effect,
    Ready,
    Send,
)
from vllm_kvpool.embeds.protocol.messages import (
    STARTED,
    Expect,
    Grant,
    Offer,
    OfferAck,
    RevokeAck,
    WantAck,
    WriteFailed,
    WriteProgress,
    Wrote,
)

__all__ = ["Example", "examples"]


class Bench:
    """A consumer, its clock and the newest grant of each row."""

    def __init__(self, *, room: int | None = None, **bounds: Any) -> None:
        if room is not None:
            bounds["max_landing_bytes"] = shape_of(room).nbytes
        self.machine = Consumer(1 << 12, limits(**bounds))
        self.now = 0.0
        self.num_offers = 0
        self.grants: dict[tuple[str, int], tuple[str, Grant]] = {}

    def turn(self) -> list[str]:
        """Take the consumer's effects and return them in words."""
        said = [self._in_words(each) for each in self.machine.take_effects(self.now)]
        check_consumer(self.machine)
        return [each for each in said if each]

    def _in_words(self, effect: Effect) -> str:
        match effect:
            case Send(peer, Grant() as grant) if grant.tid:
                name = self.machine.grants.window[grant.gid].mm_hash
                self.grants[name, grant.row] = peer, grant
                return f"grant {peer} {name} {grant.row}-{grant.row + grant.rows}"
            case Send(peer, OfferAck(tid)):
                return f"acknowledge {peer} {tid}"
            case Allocate(name):
                return f"allocate {name}"
            case DrainRows(_, name):
                return f"drain {name}"
            case Ready(name):
                return f"ready {name}"
            case Discard(name):
                return f"discard {name}"
        return ""


def _step(act: Callable[..., None]) -> Callable[..., list[str]]:
    def step(bench: Bench, *words: str, **options: Any) -> list[str]:
        act(bench, *words, **options)
        return bench.turn()

    return step


def _begin(verb: str, **options: Any) -> Bench:
    assert verb == "consumer"
    return Bench(**options)


def _peer(bench: Bench, name: str, *endpoints: str) -> None:
    bench.machine.peer_up(name, frozenset(endpoints), bench.now)


def _expect(
    bench: Bench, item: str, order: str, *peers: str, started: bool = False, patience: float = 0.0
) -> None:
    number = int(order) + STARTED * started
    bench.machine.expect(Expect(item, number, peers, patience_s=patience), bench.now)


def _offer(bench: Bench, peer: str, item: str, rows: str, *, digest: str = "digest") -> None:
    bench.num_offers += 1
    offer = Offer(bench.num_offers, item, shape_of(int(rows)), digest)
    bench.machine.offer(peer, offer, bench.now)


def _wrote(bench: Bench, row: str, item: str = "image") -> None:
    peer, grant = bench.grants[item, int(row)]
    wrote = Wrote(grant.tid, grant.gid, grant.row, grant.rows, (7,))
    bench.machine.wrote(peer, wrote, bench.now)


def _drained(bench: Bench, row: str, item: str = "image", *, same: bool = True) -> None:
    bench.machine.drained(bench.grants[item, int(row)][1].gid, same, bench.now)


def _failed(bench: Bench, row: str, item: str = "image", *, quiesced: bool = True) -> None:
    peer, grant = bench.grants[item, int(row)]
    bench.machine.write_failed(peer, WriteFailed(grant.tid, grant.gid, quiesced), bench.now)


def _declined(bench: Bench, row: str, item: str = "image") -> None:
    peer, grant = bench.grants[item, int(row)]
    answer = RevokeAck(grant.tid, grant.gid, WriteProgress.NOT_STARTED)
    bench.machine.revoke_ack(peer, answer, bench.now)


def _lacks(bench: Bench, peer: str, item: str) -> None:
    """The peer says that it does not have the item."""
    bench.machine.want_ack(peer, WantAck(item, gone=True), bench.now)


def _tick(bench: Bench, now: str) -> None:
    bench.now = float(now)
    bench.machine.tick(bench.now)


def _is(bench: Bench, item: str, *words: str) -> None:
    """Assert how the item's description begins."""
    assert describe(bench.machine, item).startswith(f"{item}: {' '.join(words)}")


def _holds(bench: Bench, rows: str, *, quarantined: int = 0) -> None:
    """Assert the rows that memory is held for, and the rows of the window in quarantine."""
    gauges = bench.machine.gauges()
    assert gauges["landing_bytes"] == shape_of(int(rows)).nbytes
    assert gauges["quarantined_bytes"] == quarantined * 4


def _grantable(bench: Bench) -> list[str]:
    """Return the items that a turn looks at for further grants."""
    return [each.mm_hash for each in bench.machine.admission.grantable()]


def _items(bench: Bench) -> list[str]:
    return sorted(bench.machine.items)


VERBS: Mapping[str, Callable[..., Any]] = {
    "declined": _step(_declined),
    "drained": _step(_drained),
    "expect": _step(_expect),
    "failed": _step(_failed),
    "forget": _step(lambda bench, item: bench.machine.forget(item)),
    "grantable": _grantable,
    "holds": _holds,
    "is": _is,
    "items": _items,
    "keep": _step(lambda bench, *items: bench.machine.keep_requested(items)),
    "lacks": _step(_lacks),
    "lost": _step(lambda bench, peer: bench.machine.peer_lost(peer, bench.now)),
    "new_weights": _step(lambda bench, *loading: bench.machine.weights_changed(bench.now, loading)),
    "offer": _step(_offer),
    "peer": _step(_peer),
    "taken": _step(lambda bench, item: bench.machine.taken(item, bench.now)),
    "tick": _step(_tick),
    "wrote": _step(_wrote),
}


def examples(text: str, given: str = "") -> pytest.MarkDecorator:
    """Return a mark that gives each example of the text to the test. `given`: steps before."""
    return scripts.examples(text, _begin, VERBS, given)
