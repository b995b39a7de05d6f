"""Rows that were granted once, all of an item at a time, and are not there: who gets them next."""

from tests.embeds.world import limits, shape_of
from vllm_kvpool.embeds.consumer import Consumer
from vllm_kvpool.embeds.effects import Drain, Send
from vllm_kvpool.embeds.protocol import Expect, Grant, Offer, WriteFailed, Wrote

LATER_S = 10.0


def granted(machine: Consumer) -> list[tuple[str, Grant]]:
    """What a turn grants, to whom."""
    said = [each for each in machine.take_effects() if isinstance(each, Send)]
    machine.check()
    return [(each.peer, each.body) for each in said if isinstance(each.body, Grant)]


def with_all_rows_granted() -> tuple[Consumer, Grant]:
    """An item of two producers, the first of which is to write all of it."""
    machine = Consumer(1 << 12, limits())
    for peer in "ab":
        machine.peer_up(peer, frozenset(), 0.0)
    machine.expect(Expect("image", 0), 0.0)
    for peer in "ab":
        machine.offer(peer, Offer(1, "image", shape_of(3), "digest"), 0.0)
    ((peer, grant),) = granted(machine)
    assert (peer, grant.row, grant.rows) == ("a", 0, 3)
    machine.tick(0.1)
    assert granted(machine) == []
    return machine, grant


def test_rows_that_could_not_be_written_are_granted_again() -> None:
    machine, grant = with_all_rows_granted()
    machine.write_failed("a", WriteFailed(1, grant.gid, True), 0.2)
    machine.tick(LATER_S)
    ((peer, again),) = granted(machine)
    assert (peer, again.row, again.rows) == ("a", 0, 3)


def test_rows_that_arrive_damaged_are_granted_again() -> None:
    machine, grant = with_all_rows_granted()
    machine.wrote("a", Wrote(1, grant.gid, 0, 3, (7,)), 0.2)
    assert any(isinstance(each, Drain) for each in machine.take_effects())
    machine.drained(grant.gid, False, 0.3)
    ((peer, again),) = granted(machine)
    assert (peer, again.row, again.rows) == ("a", 0, 3)


def test_rows_of_a_producer_that_is_lost_are_granted_to_the_next() -> None:
    machine, _ = with_all_rows_granted()
    machine.peer_lost("a", 0.2)
    ((peer, again),) = granted(machine)
    assert (peer, again.row, again.rows) == ("b", 0, 3)


def test_what_can_be_granted_no_more_is_looked_at_no_more() -> None:
    machine, _ = with_all_rows_granted()
    assert list(machine._active) == ["image"]
    assert not machine._short
