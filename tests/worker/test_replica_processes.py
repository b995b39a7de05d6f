"""Replicas in separate processes, some of which are killed or hang at bad moments."""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from tests.support.waiting import wait_until
from tests.worker.replicas import CHUNKS, LIMIT_S, NUM_CELLS, ReplicaRank, ranks_in_threads
from vllm_kvpool.staging.copy_cpu import CpuCopier
from vllm_kvpool.storage.file.store import FileStore
from vllm_kvpool.transfer.loans import Loans
from vllm_kvpool.transfer.ops import Lent
from vllm_kvpool.transfer.replicas import Card, ReplicaExchange

SIZE = 3
SHARE = NUM_CELLS // SIZE
PATIENCE_S = 2.0
LOAD_TIMEOUT_S = 2 * PATIENCE_S
SHARED_MEMORY = Path("/dev/shm")
SOCKETS = Path("/proc/net/unix")

assert CHUNKS % SIZE == 0


# In the child


def hang(*args: object, **more: object) -> Any:
    """Sleep until the process ends."""
    while True:
        time.sleep(LIMIT_S)


def hang_at(moment: str) -> None:
    """Make this process hang, or be slow, at a moment of a loan."""
    if moment == "fetching":
        FileStore.get = hang  # type: ignore[method-assign]
    elif moment == "asked":
        Loans.lend = hang  # type: ignore[method-assign]
    elif moment == "lent":
        send = ReplicaExchange.send

        def send_and_hang(self: ReplicaExchange, message: Any) -> None:
            send(self, message)
            if isinstance(message, Lent):
                hang()

        ReplicaExchange.send = send_and_hang  # type: ignore[method-assign]
    elif moment == "scatter slowly":
        scatter = CpuCopier.scatter

        def wait_and_scatter(self: CpuCopier, moves: Any) -> None:
            time.sleep(PATIENCE_S / 4)
            scatter(self, moves)

        CpuCopier.scatter = wait_and_scatter  # type: ignore[method-assign]
    elif moment == "scattering":
        CpuCopier.scatter = hang  # type: ignore[method-assign]


def serve(pipe: Connection, rank: int, store: str, options: dict[str, object]) -> None:
    """Run one rank, and carry out the commands that arrive through the pipe."""

    def gather(card: bytes) -> list[bytes]:
        pipe.send(card)
        return list(pipe.recv())

    one = ReplicaRank(rank, SIZE, store, gather, **options)
    pipe.send("ready")
    while True:
        what, *about = pipe.recv()
        if what == "hang at":
            hang_at(*about)
            pipe.send("will hang")
        elif what == "start load":
            one.start_load(*about)
        elif what == "has loaded":
            pipe.send(one.has_loaded(*about))
        elif what == "count":
            outcomes = ("done", "missing", "timed_out", "unreachable")
            pipe.send((one.gets, {x: n for x in outcomes if (n := one.borrowed(x))}))
        elif what == "free slots":
            pipe.send(one.count("kvpool_slots", state="free"))
        elif what == "close":
            one.close()
            pipe.send("closed")
            return


# In the parent


class Child:
    """A process that runs `serve`, and the parent's end of its pipe."""

    def __init__(self, rank: int, store: str, options: dict[str, object]) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.worker.test_replica_processes"])
        self.pipe, pipe = context.Pipe()
        self.process = context.Process(target=serve, args=(pipe, rank, store, options), daemon=True)
        self.process.start()

    def tell(self, what: str, *about: object) -> None:
        self.pipe.send((what, *about))

    def hears(self) -> Any:
        assert self.pipe.poll(LIMIT_S), "the rank does not answer"
        return self.pipe.recv()

    def ask(self, what: str, *about: object) -> Any:
        self.tell(what, *about)
        return self.hears()

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)
        if number == signal.SIGKILL:
            self.process.join(LIMIT_S)

    def end(self) -> None:
        if self.process.is_alive():
            self.process.kill()
        self.process.join(LIMIT_S)
        self.process.close()


Start = Callable[..., list[Child]]


# Prefixes of files that other tests may make at the same time.
OF_OTHER_TESTS = ("kvpool-ec-", "kvpool-test-", "kvpool-fuzz-")


def files_of_ours() -> set[str]:
    names = {path.name for path in SHARED_MEMORY.iterdir()}
    return {name for name in names if "kvpool" in name and not name.startswith(OF_OTHER_TESTS)}


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start ranks over a store with prompt 1. After the test, assert that the ranks have left no
    file or socket."""
    store = f"file://{tmp_path / 'pool'}?size=64MiB"
    [writer] = ranks_in_threads(1, store)
    writer.save(1)
    writer.close()
    files = files_of_ours()
    children: list[Child] = []
    sockets: list[str] = []

    def started(**options: object) -> list[Child]:
        options = {"load_timeout_s": LOAD_TIMEOUT_S, "call_timeout_s": LOAD_TIMEOUT_S, **options}
        children.extend(Child(rank, store, options) for rank in range(SIZE))
        cards = [child.hears() for child in children]
        sockets.extend(Card.unpack(card).address.replace("\0", "@") for card in cards)
        assert all(name in SOCKETS.read_text() for name in sockets)
        for child in children:
            child.pipe.send(cards)
        assert [child.hears() for child in children] == ["ready"] * SIZE
        return children

    yield started
    for child in children:
        child.end()
    assert files_of_ours() <= files
    assert not any(name in SOCKETS.read_text() for name in sockets)


def test_a_load_asks_the_store_once_for_each_cell(start: Start) -> None:
    ranks = start()
    for rank in ranks:
        rank.tell("start load", 1)
    assert [rank.ask("has loaded", 1) for rank in ranks] == [True] * SIZE
    assert [rank.ask("count") for rank in ranks] == [(SHARE, {"done": 2 * SHARE})] * SIZE


@pytest.mark.parametrize("moment", ["before", "fetching"])
def test_a_lender_that_is_killed_costs_its_part(start: Start, moment: str) -> None:
    """The other replicas fetch that part themselves at once, each cell once per replica."""
    lender, *others = start()
    assert lender.ask("hang at", moment) == "will hang"
    if moment == "before":
        lender.signal(signal.SIGKILL)
    for rank in others:
        rank.tell("start load", 1)
    if moment != "before":
        time.sleep(PATIENCE_S / 4)  # in any state of the loan
        lender.signal(signal.SIGKILL)
    assert [rank.ask("has loaded", 1) for rank in others] == [True] * 2
    for gets, outcomes in [rank.ask("count") for rank in others]:
        assert (gets, outcomes["done"]) == (2 * SHARE, SHARE)
        assert outcomes.get("unreachable", 0) in ((SHARE,) if moment == "fetching" else (0, SHARE))


def test_a_lender_that_is_killed_after_it_has_lent_costs_nothing(start: Start) -> None:
    """No rank reuses the dead lender's slots, so they keep the lent bytes."""
    lender, *others = start()
    assert lender.ask("hang at", "lent") == "will hang"
    for rank in others:
        assert rank.ask("hang at", "scatter slowly") == "will hang"
        rank.tell("start load", 1)
    time.sleep(PATIENCE_S / 8)
    lender.signal(signal.SIGKILL)
    assert [rank.ask("has loaded", 1) for rank in others] == [True] * 2


@pytest.mark.parametrize("moment", ["stopped", "asked"])
def test_a_lender_that_hangs_is_waited_for_a_while(start: Start, moment: str) -> None:
    """The wait is shorter than a load's timeout, so that there is time for the tiers."""
    lender, *others = start()
    assert lender.ask("hang at", moment) == "will hang"
    if moment == "stopped":
        lender.signal(signal.SIGSTOP)
    began = time.monotonic()
    for rank in others:
        rank.tell("start load", 1)
    assert [rank.ask("has loaded", 1) for rank in others] == [True] * 2
    assert time.monotonic() - began >= PATIENCE_S * 0.9
    for gets, outcomes in [rank.ask("count") for rank in others]:
        assert gets == 2 * SHARE
        assert outcomes["done"] == SHARE
        assert outcomes.get("timed_out", 0) + outcomes.get("unreachable", 0) == SHARE


def test_a_borrower_that_is_killed_holds_nothing(start: Start) -> None:
    """The end of its connection frees the loan long before the loan's timeout."""
    lender, other, victim = start(load_timeout_s=4 * LIMIT_S, call_timeout_s=4 * LIMIT_S)
    free = lender.ask("free slots")
    assert victim.ask("hang at", "scattering") == "will hang"
    for rank in (lender, other, victim):
        rank.tell("start load", 1)
    assert [rank.ask("has loaded", 1) for rank in (lender, other)] == [True] * 2
    victim.signal(signal.SIGKILL)
    wait_until(
        lambda: not (lender.ask("free slots") < free), LIMIT_S, what="a slot is lost", pause_s=0.05
    )
    assert other.ask("close") == lender.ask("close") == "closed"


def test_a_borrower_that_hangs_holds_nothing_for_ever(start: Start) -> None:
    lender, other, victim = start()
    free = lender.ask("free slots")
    assert victim.ask("hang at", "scattering") == "will hang"
    for rank in (lender, other, victim):
        rank.tell("start load", 1)
    assert [rank.ask("has loaded", 1) for rank in (lender, other)] == [True] * 2
    wait_until(
        lambda: not (lender.ask("free slots") < free), LIMIT_S, what="a slot is lost", pause_s=0.05
    )
