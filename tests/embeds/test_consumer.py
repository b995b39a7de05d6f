"""A consumer: rows granted again, discovery, the oldest request beyond the limit."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.embeds.invariants import check_consumer, describe
from tests.embeds.world import limits, shape_of
from vllm_kvpool.embeds.machines.admission import OLDEST_WAITS_S
from vllm_kvpool.embeds.machines.consumer import Consumer
from vllm_kvpool.embeds.machines.discovery import FEWEST_RECENT, RECENT_ITEMS
from vllm_kvpool.embeds.machines.effects import Allocate, Discard, DrainRows, Ready, Send
from vllm_kvpool.embeds.machines.items import QUARANTINE_S
from vllm_kvpool.embeds.machines.states import TransferState
from vllm_kvpool.embeds.protocol.messages import (
    LOADING_S,
    STARTED,
    Expect,
    Grant,
    Offer,
    OfferAck,
    RevokeAck,
    Want,
    WantAck,
    WriteFailed,
    WriteProgress,
    Wrote,
)

LATER_S = 10.0
MOONCAKE_GIVES_UP_S = 30.0  # a transfer: the default of its MC_TRANSFER_TIMEOUT


def granted(machine: Consumer, now: float = 0.5) -> list[tuple[str, Grant]]:
    """Return the (peer, grant) pairs of one turn of the consumer."""
    said = [each for each in machine.take_effects(now) if isinstance(each, Send)]
    check_consumer(machine)
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
    assert granted(machine, 0.1) == []
    return machine, grant


def test_rows_that_could_not_be_written_are_granted_again() -> None:
    machine, grant = with_all_rows_granted()
    machine.write_failed("a", WriteFailed(1, grant.gid, True), 0.2)
    machine.tick(LATER_S)
    ((peer, again),) = granted(machine)
    assert (peer, again.row, again.rows) == ("a", 0, 3)


def test_an_item_whose_last_grant_is_declined_waits_for_the_next() -> None:
    """The item backs off before its next grants, because one of its writes has just failed."""
    machine = Consumer(1 << 12, limits(default_allocate_tokens=1))
    machine.peer_up("a", frozenset(), 0.0)
    machine.expect(Expect("image", 0), 0.0)
    machine.offer("a", Offer(1, "image", shape_of(2), "digest"), 0.0)
    (_, first), (_, second) = granted(machine)
    machine.write_failed("a", WriteFailed(1, first.gid, True), 0.1)
    machine.revoke_ack("a", RevokeAck(1, second.gid, WriteProgress.NOT_STARTED), 0.1)
    assert granted(machine, 0.1) == []
    assert describe(machine, "image").startswith("image: waiting, 0 of 2 rows, 0 grants")
    machine.tick(LATER_S)
    assert [each.row for _, each in granted(machine)] == [0, 1]


def with_a_stale_item() -> Consumer:
    """An item whose weights have changed at 1.0, and that a step is about to take."""
    machine = Consumer(1 << 12, limits())
    machine.peer_up("a", frozenset(), 0.0)
    machine.expect(Expect("image", 0, wait_id=1), 0.0)
    machine.offer("a", Offer(1, "image", shape_of(3), "old"), 0.0)
    ((_, grant),) = granted(machine)
    machine.wrote("a", Wrote(1, grant.gid, 0, 3, (7,)), 0.5)
    machine.drained(grant.gid, True, 0.5)
    machine.weights_changed(1.0, ("image",))
    machine.take_effects(1.0)
    return machine


def test_offers_of_a_stale_item_are_answered_once_the_step_has_taken_it() -> None:
    machine = with_a_stale_item()
    offer = Offer(2, "image", shape_of(3), "new")
    machine.offer("a", offer, 1.1)
    assert machine.take_effects(1.1) == []
    machine.taken("image", 1.2)
    machine.offer("a", offer, 2.1)
    sent = [each.body for each in machine.take_effects(2.1) if isinstance(each, Send)]
    assert OfferAck(2) in sent
    assert machine.items["image"].digest == "new"


def test_a_stale_item_that_no_step_takes_is_ended() -> None:
    machine = with_a_stale_item()
    machine.tick(1.0 + 0.9 * LOADING_S)
    assert "image" in machine.items
    machine.tick(1.0 + LOADING_S)
    assert not machine.items
    assert Discard("image") in machine.take_effects(1.0 + LOADING_S)


def test_rows_that_arrive_damaged_are_granted_again() -> None:
    machine, grant = with_all_rows_granted()
    machine.wrote("a", Wrote(1, grant.gid, 0, 3, (7,)), 0.2)
    assert any(isinstance(each, DrainRows) for each in machine.take_effects(0.1))
    machine.drained(grant.gid, False, 0.3)
    ((peer, again),) = granted(machine)
    assert (peer, again.row, again.rows) == ("a", 0, 3)


def test_rows_of_a_producer_that_is_lost_are_granted_to_the_next() -> None:
    machine, _ = with_all_rows_granted()
    machine.peer_lost("a", 0.2)
    ((peer, again),) = granted(machine)
    assert (peer, again.row, again.rows) == ("b", 0, 3)


def test_rows_copied_out_after_the_sender_is_lost_complete_the_item() -> None:
    machine = Consumer(1 << 12, limits())
    machine.peer_up("a", frozenset(), 0.0)
    machine.expect(Expect("image", 0), 0.0)
    machine.offer("a", Offer(1, "image", shape_of(3), "digest"), 0.0)
    ((_, grant),) = granted(machine)
    machine.wrote("a", Wrote(1, grant.gid, 0, 3, (7,)), 0.2)
    machine.peer_lost("a", 0.3)
    assert machine.items["image"].state is TransferState.SUSPENDED
    machine.drained(grant.gid, True, 0.4)
    assert any(isinstance(each, Ready) for each in machine.take_effects(0.4))
    check_consumer(machine)
    item = machine.items["image"]
    machine.forget("image")
    assert item.state is TransferState.CANCELLED
    assert machine.gauges()["landing_bytes"] == 0


def test_revoked_grant_whose_write_has_an_unknown_end_is_quarantined() -> None:
    machine, grant = with_all_rows_granted()
    machine.forget("image")
    machine.write_failed("a", WriteFailed(1, grant.gid, False), 0.2)
    assert machine.gauges()["quarantined_bytes"] == shape_of(3).nbytes
    check_consumer(machine)


def test_what_can_be_granted_no_more_is_looked_at_no_more() -> None:
    machine, _ = with_all_rows_granted()
    assert machine.admission.num_active == 1
    assert not machine.admission.grantable()


# The oldest request


def with_room_for_one_of_two() -> tuple[Consumer, Grant]:
    """An item of the second request is on its way; one of the first waits for its memory."""
    machine = Consumer(1 << 12, limits(max_landing_bytes=shape_of(3).nbytes))
    machine.peer_up("a", frozenset(), 0.0)
    machine.expect(Expect("second", 1), 0.0)
    machine.offer("a", Offer(1, "second", shape_of(3), "digest"), 0.0)
    ((_, grant),) = granted(machine)
    machine.expect(Expect("first", 0), 0.0)
    machine.offer("a", Offer(2, "first", shape_of(3), "digest"), 0.0)
    assert let_in(machine) == []
    return machine, grant


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


def let_in(machine: Consumer, now: float = 0.1) -> list[str]:
    """The items that a turn lets in."""
    effects = machine.take_effects(now)
    check_consumer(machine)
    return [each.mm_hash for each in effects if isinstance(each, Allocate)]


def fill(machine: Consumer, grant: Grant) -> None:
    """The rows of a grant, the last ones of their item, arrive."""
    machine.wrote("a", Wrote(1, grant.gid, 0, 3, (7,)), 0.1)
    machine.take_effects(0.1)
    machine.drained(grant.gid, True, 0.1)


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
    ((_, rest),) = granted(machine)
    assert (rest.row, rest.rows) == (4, 2)
    machine.wrote("a", Wrote(2, rest.gid, 4, 1, (7,)), 0.1)
    assert granted(machine) == [], "two are out"
    machine.drained(rest.gid, True, 0.2)
    ((_, left),) = granted(machine)
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


def test_a_scheduler_that_is_back_says_which_items_are_requested() -> None:
    machine = Consumer(1 << 12, limits())
    machine.peer_up("a", frozenset(), 0.0)
    for number, name in enumerate(("kept", "gone", "pushed"), 1):
        if name != "pushed":
            machine.expect(Expect(name, number), 0.0)
        machine.offer("a", Offer(number, name, shape_of(3), "digest"), 0.0)
    machine.keep_requested(("kept", "never heard of"))
    assert set(machine.items) == {"kept", "pushed"}
    check_consumer(machine)


def test_an_item_is_gone_when_all_who_may_have_it_say_so() -> None:
    """A named one that is not there yet may have it, whatever others say."""
    machine = Consumer(1 << 12, limits())
    machine.peer_up("a", frozenset(("tcp://a:1",)), 0.0)
    machine.peer_up("other", frozenset(("tcp://other:1",)), 0.0)
    machine.expect(Expect("image", 0, ("tcp://a:1", "tcp://b:1")), 0.0)
    for peer in ("other", "a"):
        machine.want_ack(peer, WantAck("image", gone=True), 0.1)
    assert "bootstrapping" in describe(machine, "image")
    machine.peer_up("b", frozenset(("tcp://b:1", "tcp://b:2")), 0.2)
    machine.want_ack("b", WantAck("image", gone=True), 0.3)
    assert "not known" in describe(machine, "image")
    check_consumer(machine)


def test_the_oldest_request_waits_for_memory_that_is_about_to_be_free() -> None:
    machine, grant = with_room_for_one_of_two()
    machine.tick(OLDEST_WAITS_S * 0.9)
    assert let_in(machine, OLDEST_WAITS_S * 0.9) == []
    machine.wrote("a", Wrote(1, grant.gid, 0, 3, (7,)), 0.1)
    machine.take_effects(0.1)
    assert machine.gauges()["landing_bytes"] == shape_of(3).nbytes


def test_the_oldest_request_does_not_wait_for_an_item_that_takes_long() -> None:
    machine, _ = with_room_for_one_of_two()
    machine.tick(OLDEST_WAITS_S * 1.1)
    assert let_in(machine, OLDEST_WAITS_S * 1.1) == ["first"]
    assert machine.gauges()["landing_bytes"] == 2 * shape_of(3).nbytes


def test_the_oldest_request_does_not_wait_for_a_younger_one_that_may_wait_for_it() -> None:
    machine, grant = with_room_for_one_of_two()
    fill(machine, grant)
    assert let_in(machine) == ["first"]


def test_requests_that_have_gone_are_not_counted_for_ever() -> None:
    machine, _ = with_room_for_one_of_two()
    for order in range(2, 1_000):
        machine.expect(Expect("again", order), 0.0)
        machine.expect(Expect("again", order), 0.0)
        machine.forget("again")
        check_consumer(machine)
    assert machine.admission._orders == [0, 1]


def test_memory_stays_under_its_limit_where_items_are_taken_at_once() -> None:
    machine, grant = with_room_for_one_of_two()
    fill(machine, grant)
    machine.taken("second", 0.1)
    assert let_in(machine) == ["first"]
    assert machine.gauges()["landing_bytes"] == shape_of(3).nbytes


def test_the_oldest_request_does_not_wait_for_its_own_items() -> None:
    machine = Consumer(1 << 12, limits(max_landing_bytes=shape_of(3).nbytes))
    machine.peer_up("a", frozenset(), 0.0)
    for number, name in enumerate(("one", "two"), 1):
        machine.expect(Expect(name, 0), 0.0)
        machine.offer("a", Offer(number, name, shape_of(3), "digest"), 0.0)
    assert let_in(machine) == ["one", "two"]


def test_the_oldest_request_does_not_wait_for_what_nobody_asks_for() -> None:
    machine = Consumer(1 << 12, limits(max_landing_bytes=2 * shape_of(3).nbytes))
    machine.peer_up("a", frozenset(), 0.0)
    machine.offer("a", Offer(1, "pushed", shape_of(3), "digest"), 0.0)
    machine.expect(Expect("one", 0), 0.0)
    machine.offer("a", Offer(2, "one", shape_of(6), "digest"), 0.0)
    assert let_in(machine) == ["pushed", "one"]


def test_received_item_whose_oldest_request_has_ended_holds_back_no_older_request() -> None:
    machine = Consumer(1 << 12, limits(max_landing_bytes=shape_of(3).nbytes))
    machine.peer_up("a", frozenset(), 0.0)
    machine.expect(Expect("shared", 0), 0.0)
    machine.offer("a", Offer(1, "shared", shape_of(3), "digest"), 0.0)
    ((_, grant),) = granted(machine, 0.0)
    fill(machine, grant)
    machine.expect(Expect("now the oldest's", 1), 0.0)
    machine.offer("a", Offer(2, "now the oldest's", shape_of(3), "digest"), 0.0)
    assert let_in(machine, LATER_S) == []
    machine.expect(Expect("shared", 2), LATER_S)
    assert let_in(machine, LATER_S) == ["now the oldest's"]


@pytest.mark.parametrize("oldest", [0, STARTED], ids=["waiting", "started"])
def test_started_request_does_not_wait_for_received_items_of_an_older_one(oldest: int) -> None:
    """The engine takes those only when the started request frees its part of a cache."""
    machine = Consumer(1 << 12, limits(max_landing_bytes=shape_of(3).nbytes))
    machine.peer_up("a", frozenset(), 0.0)
    machine.expect(Expect("of the oldest", oldest), 0.0)
    machine.offer("a", Offer(1, "of the oldest", shape_of(3), "digest"), 0.0)
    ((_, grant),) = granted(machine, 0.0)
    fill(machine, grant)
    later = LATER_S
    for number, (name, order) in enumerate((("waits", 1), ("started", 2 + STARTED)), 2):
        machine.expect(Expect(name, order), later)
        machine.offer("a", Offer(number, name, shape_of(3), "digest"), later)
    assert let_in(machine, later + OLDEST_WAITS_S * 1.1) == ["started"]
    assert machine.gauges()["landing_bytes"] == 2 * shape_of(3).nbytes


def test_beyond_the_limit_one_is_let_in_at_a_time() -> None:
    machine, _ = with_room_for_one_of_two()
    machine.expect(Expect("third", 0), 0.0)
    machine.offer("a", Offer(3, "third", shape_of(3), "digest"), 0.0)
    machine.tick(OLDEST_WAITS_S * 1.1)
    assert let_in(machine, OLDEST_WAITS_S * 1.1) == ["first"]
    machine.tick(OLDEST_WAITS_S * 2.0)
    assert let_in(machine, OLDEST_WAITS_S * 2.0) == []
    machine.tick(OLDEST_WAITS_S * 2.2)
    assert let_in(machine, OLDEST_WAITS_S * 2.2) == ["third"]


def test_an_item_with_as_many_grants_as_it_may_have_is_not_looked_at_until_one_ends() -> None:
    """Up to 64 items are; each turn would sort and ask them all."""
    machine = Consumer(1 << 20, limits(default_allocate_tokens=1))
    machine.peer_up("a", frozenset(), 0.0)
    machine.expect(Expect("image", 0), 0.0)
    machine.offer("a", Offer(1, "image", shape_of(9), "digest"), 0.0)
    machine.take_effects(0.0)
    assert machine.admission.grantable() == []
    gid = min(machine.items["image"].grants)
    machine.write_failed("a", WriteFailed(1, gid, True), 1.0)
    assert [each.mm_hash for each in machine.admission.grantable()] == ["image"]
    check_consumer(machine)


def test_a_quarantine_outlasts_a_transfer_of_mooncake() -> None:
    assert QUARANTINE_S > 2 * MOONCAKE_GIVES_UP_S
