"""A scheduler's messages at a consumer that completes the item, or hands it over, meanwhile."""

import pytest

from tests.embeds.fake_worker_channel import WorkerMessage
from tests.embeds.scheduler_rig import BUSY, ROWS, Rig, request
from tests.embeds.world import limits, shape_of
from vllm_kvpool.embeds.machines.consumer import Consumer
from vllm_kvpool.embeds.machines.effects import DrainRows, NotifyScheduler, Send
from vllm_kvpool.embeds.protocol.messages import (
    Expect,
    Forget,
    Grant,
    ItemNews,
    Offer,
    Reorder,
    Wrote,
)


def deliver(rig: Rig, machine: Consumer) -> None:
    """Give a consumer the scheduler's messages."""
    for body in rig.channel.heard[0]:
        match body:
            case Expect():
                machine.expect(body, 0.0)
            case Reorder(mm_hash, order):
                machine.reorder(mm_hash, order)
            case Forget(mm_hash):
                machine.forget(mm_hash)
            case _:
                raise AssertionError(body)
    rig.channel.heard[0].clear()


def receive_all(machine: Consumer, mm_hash: str) -> None:
    """Offer an item to a consumer and write its rows."""
    machine.offer("p", Offer(1, mm_hash, shape_of(ROWS), "digest"), 0.0)
    while not machine.items[mm_hash].is_complete:
        for effect in machine.take_effects(0.0):
            match effect:
                case Send(_, Grant() as grant):
                    rows = min(grant.rows, ROWS - grant.row)
                    machine.wrote("p", Wrote(1, grant.gid, grant.row, rows, (0,)), 0.0)
                case DrainRows(gid):
                    machine.drained(gid, True, 0.0)
                case NotifyScheduler(news):
                    raise AssertionError(news)
                case _:
                    pass


def news_of(machine: Consumer) -> list[ItemNews]:
    """Return a consumer's news for the scheduler since the last look."""
    return [
        effect.news
        for effect in machine.take_effects(0.0)
        if isinstance(effect, NotifyScheduler) and isinstance(effect.news, ItemNews)
    ]


@pytest.mark.parametrize("shared", [True, False])
def test_end_of_the_oldest_request_makes_the_worker_report_nothing(shared: bool) -> None:
    """The item is dropped and asked for anew in one frame; a report would be of the dropped one."""
    machine = Consumer(1 << 20, limits())
    machine.peer_up("p", frozenset(), 0.0)
    rig = Rig()
    views = [request(name, "x", "y") for name in ("0", "2")]
    rig.ensure(views[0])
    if shared:
        rig.ensure(views[1])
    deliver(rig, machine)
    receive_all(machine, "x")
    assert [news.digest for news in news_of(machine)] == ["digest"]
    for view in views[: 1 + shared]:
        rig.scheduler.finished(view)
    rig.ensure(request("5", "x"))
    deliver(rig, machine)
    assert news_of(machine) == []
    assert not machine.items["x"].is_complete


@pytest.mark.parametrize("joins", [True, False])
def test_item_that_the_engine_takes_meanwhile_is_not_brought_again(joins: bool) -> None:
    """No request would take it, and its memory and order would stay for ever."""
    machine = Consumer(1 << 20, limits())
    machine.peer_up("p", frozenset(), 0.0)
    rig = Rig()
    first, second = request("0", "x"), request("2", "x")
    rig.ensure(first)
    if not joins:
        rig.ensure(second)
    deliver(rig, machine)
    receive_all(machine, "x")
    for news in news_of(machine):
        rig.channel.words.append(WorkerMessage(0, news))
    if joins:
        rig.ensure(second)
    else:
        rig.scheduler.finished(first)
        assert rig.ensure(second)
    assert rig.scheduler.has("x")
    rig.scheduler.allocated("x")
    assert rig.scheduler.plan((), **BUSY).loads
    machine.taken("x", 1.0)  # the step's metadata are faster than the messages
    deliver(rig, machine)
    assert machine.items == {}
