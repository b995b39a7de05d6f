"""A consumer: rows granted again, discovery, the oldest request beyond the limit."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.embeds.consumer_scripts import Example, examples
from tests.embeds.invariants import check_consumer, describe
from tests.embeds.world import limits, shape_of
from vllm_kvpool.embeds.machines.consumer import Consumer
from vllm_kvpool.embeds.machines.discovery import FEWEST_RECENT, RECENT_ITEMS
from vllm_kvpool.embeds.machines.effects import Send
from vllm_kvpool.embeds.machines.items import QUARANTINE_S
from vllm_kvpool.embeds.protocol.messages import Expect, Grant, Offer, Want, Wrote

MOONCAKE_GIVES_UP_S = 30.0  # a transfer: the default of its MC_TRANSFER_TIMEOUT


@examples(
    """
rows that could not be written are granted again
    failed 0; tick 10 -> only grant a image 0-3
rows that arrive damaged are granted again
    wrote 0 -> drain image; drained 0 same=False -> only grant a image 0-3
rows of a producer that is lost are granted to the next
    lost a -> only grant b image 0-3
a revoked grant whose write has an unknown end is quarantined
    forget image; failed 0 quiesced=False; holds 0 quarantined=3
an item that can be granted no more is looked at no more
    grantable -> nothing
""",
    "consumer; peer a; peer b; expect image 0; offer a image 3 -> ... grant a image 0-3"
    "; offer b image 3; tick 0.1 -> no grant",
)
def test_rows_of_an_item_that_one_of_two_producers_is_to_write(example: Example) -> None:
    example.play()


@examples(
    """
an item whose last grant is declined waits for the next
    # The item backs off before its next grants, because one of its writes has just failed.
    consumer default_allocate_tokens=1; peer a; expect image 0
    offer a image 2 -> only grant a image 0-1 | grant a image 1-2
    tick 0.1; failed 0 -> no grant; declined 1 -> no grant
    is image waiting, 0 of 2 rows, 0 grants; tick 10 -> only grant a image 0-1 | grant a image 1-2
an item with as many grants as it may have is not looked at until one ends
    # Up to 64 items are; each turn would sort and ask them all.
    consumer default_allocate_tokens=1; peer a; expect image 0; offer a image 9
    grantable -> nothing; failed 0; grantable -> image
rows copied out after the sender is lost complete the item
    consumer; peer a; expect image 0; offer a image 3; wrote 0; lost a; is image suspended
    drained 0 -> ready image; forget image -> discard image; holds 0
offers of a stale item are answered once the step has taken it
    consumer; peer a; expect image 0; offer a image 3 digest=old; wrote 0; drained 0 -> ready image
    tick 1; new_weights image; tick 1.1; offer a image 3 digest=new -> nothing; taken image
    tick 2.1; offer a image 3 digest=new -> ... acknowledge a 3
a stale item that no step takes is ended
    consumer; peer a; expect image 0; offer a image 3 digest=old; wrote 0; drained 0 -> ready image
    tick 1; new_weights image; tick 28; items -> image; tick 31 -> discard image; items -> nothing
a scheduler that is back says which items are requested
    consumer; peer a; expect kept 1; offer a kept 3; expect gone 2; offer a gone 3
    offer a pushed 3; keep kept unheard; items -> kept | pushed
an item is gone when all peers that may have it say so
    # A named peer that is not there yet may have it, whatever others say.
    consumer; peer a at_a; peer other at_other; expect image 0 at_a at_b; tick 0.1
    lacks other image; lacks a image; is image bootstrapping
    tick 0.2; peer b at_b at_b2; lacks b image; is image not known
"""
)
def test_items_from_their_first_request_to_their_end(example: Example) -> None:
    example.play()


# The oldest request


@examples(
    """
it waits for memory that is about to be free
    tick 0.24 -> no allocate; wrote 0 second -> no allocate; holds 3
it does not wait for an item that takes long
    tick 0.26 -> only allocate first; holds 6
it does not wait for a younger request that may wait for it
    wrote 0 second; drained 0 second -> only allocate first
memory stays under its limit where items are taken at once
    wrote 0 second; drained 0 second; taken second; holds 3
beyond the limit one item is let in at a time
    expect third 0; offer a third 3; tick 0.26 -> only allocate first; tick 0.5 -> no allocate
    tick 0.52 -> only allocate third
""",
    "consumer room=3; peer a; expect second 1; offer a second 3 -> ... allocate second"
    "; expect first 0; offer a first 3 -> no allocate",
)
def test_the_oldest_request_beyond_the_limit_of_memory(example: Example) -> None:
    example.play()


@examples(
    """
it does not wait for its own items
    consumer room=3; peer a; expect one 0; expect two 0
    offer a one 3 -> only allocate one; offer a two 3 -> only allocate two
it does not wait for an item that no request waits for
    consumer room=6; peer a; offer a pushed 3 -> only allocate pushed; expect one 0
    offer a one 6 -> only allocate one
a received item whose oldest request has ended holds back no older request
    consumer room=3; peer a; expect shared 0; offer a shared 3; wrote 0 shared; drained 0 shared
    expect oldest 1; offer a oldest 3 -> no allocate; expect shared 2 -> only allocate oldest
a started request does not wait for received items of an older one, {waiting: False|started: True}
    # The engine takes those only when the started request frees its part of a cache.
    consumer room=3; peer a; expect oldest 0 started={}; offer a oldest 3; wrote 0 oldest
    drained 0 oldest; expect waits 1; offer a waits 3; expect started 2 started=True
    offer a started 3 -> only allocate started; tick 0.26 -> no allocate; holds 6
"""
)
def test_which_items_the_oldest_request_waits_for(example: Example) -> None:
    example.play()


def test_requests_that_have_gone_are_not_counted_for_ever() -> None:
    machine = Consumer(1 << 12, limits())
    for order in range(1_000):
        for _ in range(2):
            machine.expect(Expect("again", order), 0.0)
        machine.forget("again")
        check_consumer(machine)
    assert machine.admission._orders == []


def granted(machine: Consumer, now: float = 0.5) -> list[Grant]:
    """Return the grants of one turn of the consumer."""
    said = [each.body for each in machine.take_effects(now) if isinstance(each, Send)]
    check_consumer(machine)
    return [body for body in said if isinstance(body, Grant)]


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=40), st.integers(1, 8192))
def test_a_first_grant_is_as_long_as_recent_items(rows: list[int], most: int) -> None:
    machine = Consumer(1 << 20, limits(default_allocate_tokens=most))
    machine.peer_up("a", frozenset(), 0.0)
    for tid, each in enumerate(rows, 1):
        machine.offer("a", Offer(tid, f"{tid}", shape_of(each, row_bytes=1), "digest"), 0.0)
    machine.expect(Expect("image", 0), 0.0)
    bodies = [each.body for each in machine.take_effects(0.0) if isinstance(each, Send)]
    (first,) = [body.first for body in bodies if isinstance(body, Want)]
    assert first is not None
    recent = max(rows[-RECENT_ITEMS:]) if len(rows) >= FEWEST_RECENT else most
    assert first.rows == min(most, recent)


def test_a_grant_before_the_row_was_known_is_of_no_more_rows_than_it_said() -> None:
    """Rows are shorter than those of the item before: more of them would have room."""
    machine = Consumer(1 << 12, limits(default_allocate_tokens=4))
    machine.peer_up("a", frozenset(), 0.0)
    machine.offer("a", Offer(1, "before", shape_of(1, row_bytes=8), "digest"), 0.0)
    machine.take_effects(0.1)
    machine.expect(Expect("image", 0), 0.0)
    wants = [each.body for each in machine.take_effects(0.1) if isinstance(each, Send)]
    (first,) = [body.first for body in wants if isinstance(body, Want) and body.first]
    assert first.rows == 4
    machine.offer("a", Offer(2, "image", shape_of(6, row_bytes=2), "digest", first=first.gid), 0.0)
    (rest,) = granted(machine)
    assert (rest.row, rest.rows) == (4, 2)
    machine.wrote("a", Wrote(2, rest.gid, 4, 1, (7,)), 0.1)
    assert granted(machine) == [], "two are out"
    machine.drained(rest.gid, True, 0.2)
    (left,) = granted(machine)
    assert (left.row, left.rows) == (5, 1), "fewer rows than were granted have been written"


@pytest.mark.parametrize("patience", [(0.25, 0.0), (0.0, 0.25), (0.25, 30.0)])
def test_an_item_is_waited_for_as_long_as_its_most_patient_request(
    patience: tuple[float, float],
) -> None:
    """A request without a patience of its own waits for `bootstrap_timeout_s`."""
    machine = Consumer(1 << 12, limits(bootstrap_timeout_s=30.0))
    for order, patience_s in enumerate(patience):
        machine.expect(Expect("image", order, patience_s=patience_s), 0.0)
    machine.tick(29.0)
    assert "bootstrapping" in describe(machine, "image")
    machine.tick(31.0)
    assert "not known" in describe(machine, "image")


def test_a_quarantine_outlasts_a_transfer_of_mooncake() -> None:
    assert QUARANTINE_S > 2 * MOONCAKE_GIVES_UP_S
