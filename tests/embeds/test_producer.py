"""Peers that wait for items which are not encoded yet, whose write is next, and where it goes."""

import pytest

from tests.embeds.invariants import check_producer
from tests.embeds.world import shape_of
from vllm_kvpool.embeds.machines.effects import Send, Write
from vllm_kvpool.embeds.machines.encoded_items import PendingTargets
from vllm_kvpool.embeds.machines.producer import Producer, ProducerLimits
from vllm_kvpool.embeds.protocol.messages import (
    Code,
    Complete,
    Grant,
    OfferAck,
    Revoke,
    RevokeAck,
    SharedWindow,
    Want,
    WriteProgress,
    Wrote,
)
from vllm_kvpool.embeds.protocol.rows import Extent


def filled(most: int = 8) -> PendingTargets:
    wants = PendingTargets(most)
    wants.add("cat", "a", 5.0)
    wants.add("dog", "a", 7.0)
    wants.add("cat", "b", 9.0)
    return wants


def test_all_who_wait_for_an_item_are_named_once() -> None:
    wants = filled()
    assert wants.items == {"cat", "dog"}
    assert wants.take("cat") == ["a", "b"]
    assert wants.take("cat") == wants.take("cow") == []
    assert (wants.items, len(wants)) == ({"dog"}, 1)


def test_a_wish_that_is_made_again_counts_once_and_waits_longer() -> None:
    wants = filled()
    wants.add("cat", "a", 20.0)
    wants.drop_late(10.0)
    assert len(wants) == 1
    assert wants.take("cat") == ["a"]


def test_a_peer_that_is_lost_waits_for_nothing() -> None:
    wants = filled()
    wants.drop("a")
    assert (wants.take("cat"), wants.take("dog"), len(wants)) == (["b"], [], 0)


def test_a_wish_is_good_until_its_end() -> None:
    wants = filled()
    wants.drop_late(7.0)
    assert (wants.take("cat"), wants.take("dog")) == (["b"], ["a"])


def test_beyond_the_bound_the_oldest_wish_is_forgotten() -> None:
    wants = filled(most=3)
    wants.add("cow", "a", 1.0)
    assert (wants.items, len(wants)) == ({"cat", "dog", "cow"}, 3)
    assert wants.take("cat") == ["b"]


def test_consumers_are_written_to_in_turn_and_of_each_its_items() -> None:
    """With one writer, peer `a` grants rows of two items before peer `b` grants any."""
    machine = Producer(ProducerLimits(writers=1, small_bytes=0))
    for peer in "ab":
        window = SharedWindow("host", peer, 64)
        machine.peer_up(peer, window, frozenset((peer,)), (peer,), 0.0)
    for name in ("cat", "dog"):
        machine.prepared(machine.produced(name, shape_of(4), 0.0), "digest", 0.0)
    for peer, name, gids in (("a", "cat", (1, 2)), ("a", "dog", (3,)), ("b", "cat", (1, 2))):
        machine.want(peer, Want(name, 9.0), 0.0)
        tid = max(machine.transfers)
        for gid in gids:
            machine.grant(peer, Grant(tid, gid, gid % 2, 1, (Extent(4 * gid, 4),)), 0.0)
    order = []
    while writes := [each for each in machine.take_effects(0.0) if isinstance(each, Write)]:
        ((tid, gid),) = [(each.tid, each.gid) for each in writes]
        order.append((machine.transfers[tid].peer, gid))
        machine.written(Wrote(tid, gid, gid % 2, 1, (0,)), 0.0)
        check_producer(machine)
    assert order == [("a", 1), ("b", 1), ("a", 3), ("b", 2), ("a", 2)]


def test_item_that_a_request_reuses_is_kept_as_long_as_a_new_one() -> None:
    machine = Producer(ProducerLimits(waiting_timeout_s=60.0))
    for name in ("cat", "dog"):
        machine.prepared(machine.produced(name, shape_of(4), 0.0), "digest", 0.0)
    machine.reused("cat", 50.0)
    machine.reused("a stranger", 50.0)
    machine.tick(61.0)
    assert (machine.keeps("cat"), machine.keeps("dog")) == (True, False)
    machine.tick(111.0)
    assert not machine.keeps("cat")
    check_producer(machine)


@pytest.mark.parametrize("later", [None, SharedWindow("host", "a", 4)], ids=["none", "smaller"])
def test_a_window_stays_as_it_was_when_its_rows_were_granted(later: SharedWindow | None) -> None:
    """Else a stranger's two hellos fail a turn, and the loop ends after a few of those."""
    machine, window = Producer(ProducerLimits()), SharedWindow("host", "a", 64)
    machine.prepared(machine.produced("cat", shape_of(4), 0.0), "digest", 0.0)
    machine.peer_up("a", window, frozenset(), (), 0.0)
    machine.want("a", Want("cat", 9.0, Grant(0, 1, 0, 1, (Extent(8, 4),))), 0.0)
    machine.peer_up("a", later, frozenset(), (), 0.0)
    writes = [each for each in machine.take_effects(0.0) if isinstance(each, Write)]
    assert [each.window for each in writes] == [window]
    check_producer(machine)


def test_nothing_is_heard_of_who_is_no_consumer_any_more() -> None:
    """The consumer was lost and has reconnected as a producer only."""
    machine = Producer(ProducerLimits())
    machine.prepared(machine.produced("cat", shape_of(4), 0.0), "digest", 0.0)
    machine.peer_up("a", SharedWindow("host", "a", 64), frozenset(), (), 0.0)
    machine.want("a", Want("cat", 9.0), 0.0)
    machine.peer_lost("a", 1.0)
    (transfer,) = machine.transfers.values()
    machine.complete("a", Complete(transfer.tid), 2.0)
    assert not transfer.is_ended
    check_producer(machine)


def test_a_want_of_a_peer_that_is_no_consumer_is_kept_by_nobody() -> None:
    """The loss of such a peer would end neither its wants nor its transfers."""
    machine = Producer(ProducerLimits())
    machine.prepared(machine.produced("cat", shape_of(4), 0.0), "digest", 0.0)
    for name in ("cat", "dog"):
        machine.want("stranger", Want(name, 9.0), 0.0)
    assert not machine.transfers
    assert not machine.missing()
    check_producer(machine)


def test_a_grant_that_came_with_a_want_is_over_only_when_its_write_is() -> None:
    """Its transfer may have ended meanwhile: the consumer refuses the offer and revokes the grant
    in one turn, and reuses the memory once it hears that nothing was begun."""
    machine = Producer(ProducerLimits())
    machine.peer_up("a", SharedWindow("host", "a", 64), frozenset("a"), ("a",), 0.0)
    machine.prepared(machine.produced("cat", shape_of(4), 0.0), "digest", 0.0)
    machine.want("a", Want("cat", 9.0, Grant(0, 7, 0, 4, (Extent(0, 16),))), 0.0)
    (tid,) = machine.transfers
    assert any(isinstance(each, Write) for each in machine.take_effects(0.0))
    machine.offer_ack("a", OfferAck(tid, Code.CONFLICT), 0.0)
    machine.revoke("a", Revoke(0, 7), 0.0)
    assert not machine.take_effects(0.0), "the write is under way"
    machine.written(Wrote(tid, 7, 0, 4, (0,)), 0.0)
    machine.take_effects(0.0)
    machine.revoke("a", Revoke(0, 7), 1.0)
    assert machine.take_effects(1.0) == [Send("a", RevokeAck(0, 7, WriteProgress.NOT_STARTED))]
    check_producer(machine)
