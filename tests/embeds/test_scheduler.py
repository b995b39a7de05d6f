"""What the engine's scheduler is told of requests' items, whatever the workers say, and when."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.embeds.fake_links import FakeLinks
from vllm_kvpool.embeds.params import MAX_TARGETS, NOWHERE, Delivery, read_delivery
from vllm_kvpool.embeds.protocol import (
    Code,
    Epoch,
    Expect,
    Forget,
    Heartbeat,
    Held,
    ItemNews,
    Numbers,
    Push,
    Taken,
)
from vllm_kvpool.embeds.scheduler import (
    ALONE_S,
    ASK_ONLY_S,
    EmbedsScheduler,
    Feature,
    Load,
    RequestView,
    StepMeta,
)

STEP = 100  # tokens
ROWS = 10
SENT = Delivery(is_sent=True)
BUSY: dict[str, Any] = {"is_idle": False, "idle_wait_s": 0.0}


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Desk:
    """A scheduler's side with workers that say what a test says."""

    def __init__(self, ranks: int = 1, **options: Any) -> None:
        self.links = FakeLinks(ranks)
        self.clock = Clock()
        usual = {"is_producer": False, "is_consumer": True, "has_peers": False}
        self.side = EmbedsScheduler(
            self.links,
            fingerprint=lambda epoch: f"print {epoch}",
            retain_bytes=1000,
            max_step_tokens=STEP,
            clock=self.clock,
            **{**usual, **options},
        )

    def ensure(self, request: RequestView, computed: int = 0) -> bool:
        return self.side.ensure(request, computed)

    def load(self, mm_hash: str) -> tuple[Load, ...]:
        """As the engine does for an item that is there."""
        assert self.side.has(mm_hash)
        self.side.allocated(mm_hash)
        loads = self.side.plan((), **BUSY).loads
        for load in loads:
            self.links.say(Taken(load.name))
        return loads


def request(
    name: str, *items: str, delivery: Delivery = SENT, media: bool = False, start: int = 0
) -> RequestView:
    """A request for items of ROWS rows, one behind the other."""
    features = tuple(
        Feature(item, start + n * ROWS, start + (n + 1) * ROWS, ROWS, media)
        for n, item in enumerate(items)
    )
    return RequestView(name, features, delivery)


# What holds a request back


def test_a_request_without_parameters_goes_on_at_once() -> None:
    desk = Desk()
    view = request("plain", "a", "b", delivery=NOWHERE, media=True)
    assert desk.ensure(view)
    assert not desk.side.has("a")
    assert not desk.side.is_waiting
    assert desk.links.heard == [[]]


def test_a_request_with_neither_parameters_nor_media_is_given_up() -> None:
    """The engine would end if it were to encode what it does not have."""
    desk = Desk()
    assert not desk.ensure(request("empty", "a", delivery=NOWHERE))
    assert desk.side.take_unavailable() == {"empty"}
    assert desk.links.expected() == []
    desk.links.say(ItemNews("b", rows=ROWS, offered=True))
    assert not desk.ensure(request("offered", "b", delivery=NOWHERE))
    assert desk.side.take_unavailable() == set()


def test_a_request_without_parameters_asks_configured_peers_and_those_who_offered() -> None:
    view = request("plain", "a", delivery=NOWHERE, media=True)
    assert not Desk(has_peers=True).ensure(view)
    desk = Desk()
    desk.links.say(ItemNews("a", rows=ROWS, offered=True))
    assert not desk.ensure(view)
    assert desk.links.expected() == ["a"]


@pytest.mark.parametrize(
    ("start", "computed", "waits"),
    [
        (0, 0, True),
        (STEP, 0, True),  # the step may end in front of it or in it
        (STEP + 1, 0, False),
        (5 * STEP, 0, False),
        (5 * STEP, 4 * STEP - 1, False),
        (5 * STEP, 4 * STEP, True),
        (5 * STEP, 5 * STEP + ROWS - 1, True),
        (5 * STEP, 5 * STEP + ROWS, False),  # it has been computed
    ],
)
def test_only_items_within_the_next_step_hold_a_request(
    start: int, computed: int, waits: bool
) -> None:
    desk = Desk()
    view = request("long", "a", start=start)
    assert desk.ensure(view, computed) != waits
    assert desk.links.expected() == (["a"] if waits else [])


def test_every_item_of_the_step_is_asked_for_at_once() -> None:
    desk = Desk()
    assert not desk.ensure(request("r", "a", "b", "c"))
    assert desk.links.expected() == ["a", "b", "c"]


def test_waiting_says_nothing_twice() -> None:
    desk = Desk()
    view = request("r", "a")
    for _ in range(5):
        assert not desk.ensure(view)
    assert len(desk.links.take(Expect)) == 1


def test_orders_are_those_of_the_requests() -> None:
    desk = Desk()
    for name in ("first", "second", "third"):
        desk.ensure(request(name, f"{name} a", f"{name} b"))
    orders = [body.order for body in desk.links.take(Expect)]
    assert orders == [0, 0, 1, 1, 2, 2]


def with_resident(item: str) -> Desk:
    """An engine that has an item, as an earlier request left it."""
    desk = Desk()
    view = request("before", item)
    assert not desk.ensure(view)
    desk.links.ready(item)
    assert desk.ensure(view)
    desk.load(item)
    desk.side.finished(view)
    desk.links.take(Expect)
    return desk


def test_an_item_that_may_lose_its_place_in_the_step_waits_for_the_next() -> None:
    """Without its media the engine could not encode it again."""
    desk = with_resident("x")
    desk.side.allocated("room for another")
    assert desk.ensure(request("media", "x", media=True))
    assert not desk.ensure(request("none", "x"))
    desk.side.plan((), **BUSY)
    assert desk.ensure(request("none", "x"))
    desk.side.allocated("room for another")
    desk.side.plan(("x",), **BUSY)
    assert not desk.ensure(request("none", "x"))
    assert desk.links.expected() == ["x"]


@pytest.mark.parametrize("is_had", [True, False])
def test_an_item_that_may_lose_its_place_to_another_of_its_request_is_asked_for(
    is_had: bool,
) -> None:
    desk = with_resident("x")
    assert desk.ensure(request("alone", "x"))
    assert desk.links.take(Expect) == []
    view = request("both", "y", "x")
    assert not desk.ensure(view)
    told = {body.mm_hash: body.patience_s for body in desk.links.take(Expect)}  # type: ignore[attr-defined]
    assert told == {"y": 0.0, "x": ASK_ONLY_S}
    desk.links.ready("y")
    assert not desk.ensure(view)
    if is_had:
        desk.links.ready("x")
    else:
        desk.links.failed("x")  # then it is as good as it was
    assert desk.ensure(view)
    desk.side.allocated("y")
    assert desk.side.has("x") == is_had
    desk.side.finished(view)
    assert not desk.side._by_name


def test_who_could_encode_itself_only_asks() -> None:
    desk = Desk(is_producer=True, has_peers=True)
    desk.ensure(request("r", "a", delivery=NOWHERE, media=True))
    desk.ensure(request("s", "b", media=True))
    asks, waits = desk.links.take(Expect)
    assert (asks.patience_s, waits.patience_s) == (ASK_ONLY_S, 0.0)


@pytest.mark.parametrize("others", [(), ("tcp://other:1",)])
def test_who_encodes_itself_does_not_wait_for_itself(others: tuple[str, ...]) -> None:
    """A proxy may choose one engine for both halves of a request."""
    desk = Desk(is_producer=True, own_endpoint="tcp://me:1")
    desk.ensure(request("r", "a", delivery=Delivery(is_sent=True, peers=("tcp://me:1", *others))))
    (told,) = desk.links.take(Expect)
    assert isinstance(told, Expect)
    assert (told.peers, told.patience_s) == (others, 0.0 if others else ASK_ONLY_S)


def test_expectations_carry_what_the_request_says() -> None:
    desk = Desk()
    delivery = Delivery(is_sent=True, peers=("tcp://e:1",), names={"a": "theirs"})
    desk.ensure(request("r", "a", delivery=delivery))
    assert desk.links.take(Expect) == [Expect("theirs", 0, ("tcp://e:1",), ROWS, 0.0)]
    desk.links.ready("theirs")
    assert desk.ensure(request("r", "a", delivery=delivery))
    assert desk.load("a") == (Load("a", "theirs"),)


# Ready


def test_an_item_is_there_when_every_rank_has_it() -> None:
    desk = Desk(ranks=3)
    view = request("r", "a")
    desk.ensure(view)
    for ranks in ((2,), (0, 2), ()):
        for rank in ranks:
            desk.links.ready("a", rank)
        assert not desk.ensure(view)
        assert not desk.side.has("a")
    desk.links.ready("a", 1)
    assert desk.ensure(view)
    assert desk.side.has("a")


def chosen(desk: Desk, rank: int) -> list[str]:
    """The encodings that a rank was told to have since the last look."""
    told = desk.links.take(Expect, rank)
    return [each.digest for each in told if isinstance(each, Expect) and each.digest]


def test_ranks_that_are_brought_different_bytes_are_told_which_to_have() -> None:
    desk = Desk(ranks=2)
    one, other = (request(name, "a") for name in ("one", "other"))
    desk.ensure(one)
    desk.ensure(other)
    desk.links.ready("a", 1, digest="y")
    desk.links.ready("a", 0, digest="x")
    assert not desk.ensure(one)
    assert not desk.side.has("a"), "the engine would load what is not there"
    assert [chosen(desk, rank) for rank in range(2)] == [["x", "x"]] * 2
    desk.links.ready("a", 1, digest="y")  # said before it was told
    assert not desk.ensure(one)
    desk.links.ready("a", 1, digest="x")
    assert desk.ensure(one)
    assert desk.ensure(other)
    assert desk.load("a") == (Load("a", "a"),)
    assert desk.side.take_unavailable() == set()


def test_what_a_rank_has_already_is_not_sent_again() -> None:
    desk = Desk(ranks=3)
    desk.ensure(request("r", "a"))
    desk.links.coming("a", 0, digest="x")
    desk.links.ready("a", 2, digest="z")
    desk.ensure(request("r", "a"))
    assert chosen(desk, 0) == ["z"]


def test_an_encoding_that_cannot_be_had_any_more_gives_way_to_the_other() -> None:
    desk = Desk(ranks=2)
    view = request("r", "a")
    desk.ensure(view)
    desk.links.ready("a", 0, digest="x")
    desk.links.coming("a", 1, digest="y")
    desk.links.failed("a", 1)
    assert not desk.ensure(view)
    assert [chosen(desk, rank) for rank in range(2)] == [["x", "y"]] * 2
    desk.links.ready("a", 0, digest="y")
    desk.links.ready("a", 1, digest="y")
    assert desk.ensure(view)


@pytest.mark.parametrize("media", [True, False])
def test_ranks_that_can_never_agree_have_nothing(media: bool) -> None:
    desk = Desk(ranks=2)
    one, other = (request(name, "a", media=media) for name in ("one", "other"))
    desk.ensure(one)
    desk.ensure(other)
    desk.links.ready("a", 0, digest="x")
    desk.links.ready("a", 1, digest="y")
    desk.links.failed("a", 1)
    desk.links.failed("a", 0)
    assert desk.ensure(one) == media
    assert not desk.side.has("a")
    assert desk.ensure(other) == media
    assert desk.side.take_unavailable() == (set() if media else {"one", "other"})


def test_encoders_cannot_have_the_ranks_choose_for_ever() -> None:
    desk = Desk(ranks=2)
    view = request("r", "a")
    desk.ensure(view)
    for number in range(100):
        desk.links.coming("a", 0, digest=f"x{number}")
        desk.links.coming("a", 1, digest=f"y{number}")
        desk.links.failed("a", 1)
    assert not desk.ensure(view)
    assert desk.side.take_unavailable() == {"r"}


def test_a_rank_that_comes_back_is_told_which_encoding_to_have() -> None:
    desk = Desk(ranks=2)
    view = request("r", "a")
    desk.ensure(view)
    desk.links.ready("a", 0, digest="x")
    desk.links.ready("a", 1, digest="y")
    desk.ensure(view)
    chosen(desk, 1)
    desk.links.say(None, 1)
    desk.ensure(view)
    assert chosen(desk, 1) == ["x"]


def test_what_a_rank_says_after_the_failure_changes_nothing() -> None:
    desk = Desk(ranks=2)
    one, other = request("one", "a", media=True), request("other", "a", media=True)
    desk.ensure(one)
    desk.ensure(other)
    desk.links.failed("a", 0)
    assert desk.ensure(one)
    desk.links.ready("a")
    desk.side._hear()
    assert not desk.side.has("a")


def test_an_item_that_is_there_stays() -> None:
    desk = Desk()
    view = request("r", "a")
    desk.ensure(view)
    desk.links.ready("a")
    for _ in range(10):
        assert desk.ensure(view)
        assert desk.side.has("a")
        assert desk.side.plan((), **BUSY) == StepMeta()
    assert desk.links.take(Forget) == []
    assert desk.load("a") == (Load("a", "a"),)
    assert desk.ensure(view)
    assert not desk.side.is_waiting
    assert desk.links.take(Forget) == [], "the worker lets go of it when it is loaded"
    assert desk.side.plan((), **BUSY) == StepMeta()


def test_an_item_is_there_until_nobody_waits_for_it() -> None:
    desk = Desk()
    view = request("r", "a")
    desk.ensure(view)
    desk.links.ready("a")
    desk.ensure(view)
    desk.side.finished(view)
    assert not desk.side.has("a")
    assert desk.links.take(Forget) == [Forget("a")]
    assert not desk.side.is_waiting


def test_an_encode_is_not_a_load() -> None:
    desk = Desk()
    assert desk.ensure(request("r", "a", delivery=NOWHERE, media=True))
    desk.side.allocated("a")
    assert desk.side.plan((), **BUSY) == StepMeta()


# Many requests, one item


def test_one_item_serves_many_requests_and_one_that_is_cancelled_takes_it_from_nobody() -> None:
    desk = Desk()
    views = [request(f"r{n}", "logo") for n in range(8)]
    assert not any(desk.ensure(view) for view in views)
    for number in (3, 0):
        desk.side.finished(views[number])
    assert desk.links.take(Forget) == []
    desk.links.ready("logo")
    left = [view for n, view in enumerate(views) if n not in (0, 3)]
    assert all(desk.ensure(view) for view in left)
    assert desk.load("logo") == (Load("logo", "logo"),)
    assert all(desk.ensure(view) for view in left), "it is in the engine's cache now"
    assert desk.side.plan((), **BUSY).loads == ()
    for view in left:
        desk.side.finished(view)
    assert desk.links.take(Forget) == []


def test_the_last_that_is_cancelled_ends_it() -> None:
    desk = Desk(ranks=2)
    views = [request(f"r{n}", "logo") for n in range(3)]
    for view in views:
        desk.ensure(view)
    for view in views:
        assert desk.links.expected(1) == ["logo"]
        desk.side.finished(view)
    assert desk.links.expected(0) == desk.links.expected(1) == []
    assert not desk.side._wanted
    assert not desk.side._by_name


# Failure


def test_where_the_media_are_here_they_are_encoded_here() -> None:
    desk = Desk()
    view = request("r", "a", "b", media=True)
    desk.ensure(view)
    desk.links.failed("a")
    assert not desk.ensure(view), "b is still to come"
    desk.links.ready("b")
    assert desk.ensure(view)
    assert not desk.side.has("a")
    assert desk.side.has("b")
    assert desk.side.take_unavailable() == set()
    desk.ensure(view)
    assert desk.links.expected() == ["b"], "it is not asked for again"


def test_where_they_are_not_the_request_is_given_up_once() -> None:
    desk = Desk()
    view = request("r", "a", "b")
    desk.ensure(view)
    desk.links.failed("a")
    assert not desk.ensure(view)
    assert desk.side.take_unavailable() == {"r"}
    assert desk.side.take_unavailable() == set()
    desk.side.finished(view)
    assert desk.side.take_unavailable() == set()
    assert desk.links.expected() == []


def test_a_request_that_ends_before_it_is_given_up_is_not_given_up() -> None:
    desk = Desk()
    view = request("r", "a")
    desk.ensure(view)
    desk.links.failed("a")
    desk.ensure(view)
    desk.side.finished(view)
    assert desk.side.take_unavailable() == set()


def test_a_failure_is_told_to_each_request_that_waits() -> None:
    desk = Desk()
    media, without = request("m", "a", media=True), request("w", "a")
    desk.ensure(media)
    desk.ensure(without)
    desk.links.failed("a")
    assert desk.ensure(media)
    assert not desk.ensure(without)
    assert desk.side.take_unavailable() == {"w"}
    later = request("later", "a")
    assert not desk.ensure(later)
    assert desk.links.expected() == ["a"], "it may be had now"


def test_a_failure_on_one_rank_frees_the_others() -> None:
    desk = Desk(ranks=3)
    view = request("r", "a", media=True)
    desk.ensure(view)
    desk.links.ready("a", 0)
    desk.links.failed("a", 1)
    assert desk.ensure(view)
    for rank in range(3):
        assert desk.links.expected(rank) == []


# Workers come and go


def test_nothing_is_scheduled_before_the_workers_are_there() -> None:
    desk = Desk()
    desk.links.are_up = False
    plain = request("plain", "a", delivery=NOWHERE, media=True)
    assert not desk.ensure(plain)
    assert desk.side.is_waiting
    desk.links.are_up = True
    assert desk.ensure(plain)


def test_a_worker_that_has_been_restarted_is_told_everything() -> None:
    desk = Desk(ranks=2, is_producer=True)
    view = request("r", "a", "b", delivery=Delivery(consumers=("tcp://c:1",), is_sent=True))
    desk.ensure(view)
    desk.links.ready("a")
    desk.side.weights_changed("v1")
    desk.links.ready("a", epoch=1)
    desk.side._hear()
    assert desk.side.has("a")
    before = [list(heard) for heard in desk.links.heard]
    desk.links.say(None, 1)
    desk.side._hear()
    assert desk.links.heard[0] == before[0]
    again = desk.links.heard[1][len(before[1]) :]
    assert again[0] == Epoch(1, "print v1")
    assert [body.mm_hash for body in again if isinstance(body, Expect)] == ["a", "b"]
    assert [body.mm_hash for body in again if isinstance(body, Push)] == ["a", "b"]
    assert not desk.side.has("a"), "it has lost it"
    desk.links.ready("a", 1, epoch=1)
    desk.links.ready("b", epoch=1)
    assert desk.ensure(view)


def test_a_worker_that_was_away_is_told_what_to_forget_once_it_is_back() -> None:
    desk = Desk(ranks=2)
    gone, kept = request("gone", "a", "b"), request("kept", "b")
    assert not desk.ensure(gone)
    assert not desk.ensure(kept)
    desk.links.are_up = False
    desk.side.finished(gone)
    desk.links.are_up = True
    desk.links.say(None, 1)
    assert not desk.ensure(kept)
    assert desk.links.expected(1) == ["b"]
    assert [body.mm_hash for body in desk.links.take(Forget, 1)] == ["a"]  # type: ignore[attr-defined]
    desk.links.say(None, 1)
    desk.ensure(kept)
    assert not desk.links.take(Forget, 1), "it is told once"


def test_without_workers_for_long_requests_go_on_without_them() -> None:
    desk = Desk()
    desk.links.are_up = False
    media, without = request("m", "a", media=True), request("w", "b")
    assert not desk.ensure(media)
    assert not desk.ensure(without)
    desk.clock.now += ALONE_S + 1
    assert desk.ensure(media)
    assert not desk.side.has("a")
    assert not desk.ensure(without)
    assert desk.side.take_unavailable() == {"w"}


def test_workers_that_say_that_they_end_are_not_waited_for() -> None:
    desk = Desk()
    view = request("m", "a", media=True)
    assert not desk.ensure(view)
    desk.links.are_up, desk.links.lost_since = False, float("-inf")
    assert desk.ensure(view)


def test_the_time_that_workers_were_silent_counts() -> None:
    desk = Desk()
    view = request("m", "a", media=True)
    assert not desk.ensure(view)
    desk.clock.now += 0.9 * ALONE_S
    desk.links.are_up, desk.links.lost_since = False, desk.clock.now - 0.5 * ALONE_S
    assert not desk.ensure(view)
    desk.clock.now += 0.6 * ALONE_S
    assert desk.ensure(view)


def test_what_lost_workers_hold_defers_no_encode() -> None:
    desk = Desk(is_producer=True, is_consumer=False)
    desk.links.say(Held(1001))
    view = request("p", "a")
    assert not desk.ensure(view)
    desk.links.are_up, desk.links.lost_since = False, float("-inf")
    assert desk.ensure(request("q", "b"))


def test_how_long_workers_were_away_before_does_not_matter() -> None:
    desk = Desk()
    view = request("m", "a", media=True)
    desk.links.are_up = False
    assert not desk.ensure(view)
    desk.links.are_up = True
    assert not desk.ensure(view)
    desk.clock.now += 100 * ALONE_S
    desk.links.are_up = False
    assert not desk.ensure(view), "they have just gone"
    desk.clock.now += ALONE_S + 1
    assert desk.ensure(view)


def test_words_that_mean_nothing_here_change_nothing() -> None:
    desk = Desk()
    view = request("r", "a")
    desk.ensure(view)
    desk.links.say(Heartbeat())
    desk.links.ready("unknown")
    desk.links.failed("unknown")
    desk.links.say(ItemNews("a", rows=4, offered=True))
    assert not desk.ensure(view)
    assert desk.links.expected() == ["a"]


# Weights and the engine's cache


def test_new_weights_make_what_is_there_stale() -> None:
    desk = Desk(ranks=2)
    view = request("r", "a")
    desk.ensure(view)
    desk.links.ready("a", 0)
    desk.side._hear()
    desk.side.weights_changed("v1")
    assert desk.links.take(Epoch) == [Epoch(1, "print v1")]
    assert desk.links.expected() == ["a"]
    desk.links.ready("a", epoch=0)
    assert not desk.ensure(view), "what was said before the change does not count"
    desk.links.failed("a", epoch=0)
    assert not desk.ensure(view)
    desk.links.ready("a", epoch=1)
    assert desk.ensure(view)
    assert desk.side.plan((), **BUSY).epoch == 1


@pytest.mark.parametrize("again", ["weights", "worker"])
def test_what_is_said_again_is_of_the_requests_that_still_wait(again: str) -> None:
    """Each may name an encoder of its own."""
    desk = Desk()
    for name in "abc":
        where = Delivery(is_sent=True, peers=(f"tcp://{name}:1",))
        desk.ensure(request(name, "image", delivery=where))
    said = desk.links.take(Expect)
    desk.side.finished(request("a", "image"))
    if again == "weights":
        desk.side.weights_changed("next")
    else:
        desk.links.say(None)
        desk.ensure(request("plain", delivery=NOWHERE))
    assert desk.links.take(Expect) == said[1:]


def test_a_failure_of_old_weights_is_tried_again() -> None:
    desk = Desk()
    view = request("r", "a")
    desk.ensure(view)
    desk.links.failed("a")
    desk.side._hear()
    desk.side.weights_changed("v1")
    assert not desk.ensure(view)
    assert desk.side.take_unavailable() == set()
    assert desk.links.expected() == ["a"]


def loaded() -> tuple[Desk, RequestView]:
    desk = Desk()
    view = request("r", "a")
    desk.ensure(view)
    desk.links.ready("a")
    desk.ensure(view)
    desk.load("a")
    assert desk.ensure(view)
    desk.links.take(Expect)
    return desk, view


def test_what_was_evicted_is_asked_for_again() -> None:
    desk, view = loaded()
    desk.side.plan(("a",), **BUSY)
    assert not desk.ensure(view)
    assert desk.links.expected() == ["a"]
    desk.links.ready("a")
    assert desk.ensure(view)
    assert desk.load("a") == (Load("a", "a"),)


def test_what_is_evicted_and_loaded_in_one_step_is_there() -> None:
    desk, view = loaded()
    desk.side.allocated("a")
    desk.side.plan(("a",), **BUSY)
    assert desk.ensure(view)


def test_after_a_reset_of_the_engines_cache_everything_is_asked_for_again() -> None:
    desk, view = loaded()
    desk.side.encoder_cache_was_reset()
    assert not desk.ensure(view)
    assert desk.links.expected() == ["a"]


def test_an_engine_that_asks_for_what_it_had_has_it_no_more() -> None:
    desk, view = loaded()
    assert not desk.side.has("a")
    assert not desk.ensure(view)
    assert desk.links.expected() == ["a"]


# A producer


def test_a_producer_has_items_sent_where_the_request_says_once() -> None:
    desk = Desk(is_producer=True, is_consumer=False)
    to = Delivery(consumers=("tcp://c:1", "tcp://c:2"))
    view = request("r", "a", "b", delivery=to)
    for _ in range(3):
        assert desk.ensure(view)
    assert desk.links.take(Push) == [Push("a", to.consumers), Push("b", to.consumers)]
    other = request("s", "a", delivery=to)
    assert desk.ensure(other)
    assert desk.links.take(Push) == [Push("a", to.consumers)]


def test_encoding_waits_for_consumers() -> None:
    desk = Desk(is_producer=True, is_consumer=False)
    view = request("r", "a", delivery=NOWHERE)
    desk.links.say(Held(1000))
    assert desk.ensure(view)
    desk.links.say(Held(1001))
    assert not desk.ensure(view)
    assert desk.side.is_waiting
    assert not desk.ensure(view)
    desk.links.say(Held(10))
    assert desk.ensure(view)
    assert not desk.side.is_waiting


def test_back_pressure_does_not_hold_what_is_encoded() -> None:
    desk = Desk(is_producer=True, is_consumer=False)
    desk.side.allocated("a")
    desk.links.say(Held(10_000))
    assert desk.ensure(request("r", "a", delivery=NOWHERE))
    assert desk.ensure(request("text", delivery=NOWHERE))
    assert desk.ensure(request("far", "z", delivery=NOWHERE, start=10 * STEP))
    assert not desk.ensure(request("s", "a", "b", delivery=NOWHERE))


# The rest


def test_what_a_step_needs_has_been_said_when_it_is_planned() -> None:
    desk = Desk()
    desk.ensure(request("r", "a", "b"))
    assert desk.links.unsaid == 2
    desk.side.plan((), **BUSY)
    assert desk.links.unsaid == 0


def test_only_an_idle_step_with_something_to_wait_for_waits() -> None:
    desk = Desk()
    idle: dict[str, Any] = {"is_idle": True, "idle_wait_s": 0.5}
    desk.side.plan((), **idle)
    assert desk.links.waits == []
    desk.ensure(request("r", "a"))
    desk.side.plan((), **BUSY)
    assert set(desk.links.waits) == {0.0}
    desk.links.ready("a")
    desk.side.plan((), **idle)
    assert desk.links.waits[-1] == 0.5
    assert desk.side.has("a"), "what came while it waited counts"


def test_numbers_of_workers_and_its_own_are_handed_on_once() -> None:
    desk = Desk(ranks=2)
    view = request("r", "a", media=True)
    desk.ensure(view)
    desk.links.failed("a", 0)
    desk.links.say(Numbers({'kvpool_ec_events{event="x"}': 2.0}))
    desk.ensure(view)
    numbers = desk.side.take_numbers()
    assert sum(numbers.values()) >= 4 + 2  # of two workers; a failure and a local encode
    assert desk.side.take_numbers() == {}


def test_it_ends_its_connections() -> None:
    desk = Desk()
    desk.side.close()
    assert desk.links.is_closed


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 2), st.integers(0, 2)), max_size=60))
def test_whatever_happens_nothing_is_left_behind(events: list[tuple[int, int, int]]) -> None:
    """An engine that does as vLLM's does: what `has` says is loaded, and then is there."""
    desk = Desk(ranks=2)
    views = {n: request(f"r{n}", f"i{n % 2}", "i2", media=n != 2) for n in range(3)}
    live: set[int] = set()
    cache: set[str] = set()
    given_up: list[str] = []
    for kind, number, rank in events:
        item = f"i{number}"
        if kind <= 2:
            live.add(number)
            if desk.ensure(views[number]):
                for feature in views[number].features:
                    if feature.mm_hash in cache:
                        continue
                    there = desk.side.has(feature.mm_hash)
                    assert there or feature.has_media, "the engine cannot encode it"
                    desk.side.allocated(feature.mm_hash)
                    cache.add(feature.mm_hash)
                    loads = desk.side.plan((), **BUSY).loads
                    assert loads == ((Load(feature.mm_hash, feature.mm_hash),) if there else ())
                    if there:
                        desk.links.taken(feature.mm_hash)
        elif kind <= 4:
            desk.links.ready(item, rank % 2)
        elif kind == 5:
            desk.links.failed(item, rank % 2)
        elif kind == 6:
            desk.links.say(None, rank % 2)
        elif kind == 7:
            evicted = {item} & cache
            cache -= evicted
            desk.side.plan(evicted, **BUSY)
        elif number in live:
            desk.side.finished(views[number])
            live.discard(number)
        for name in desk.side.take_unavailable():
            given_up.append(name)
            assert int(name[1:]) in live
            assert name == "r2", "its media are here"
    for number in live:
        desk.side.finished(views[number])
    assert not desk.side._wanted
    assert not desk.side._by_name
    assert not desk.side.is_waiting
    assert desk.links.expected(0) == []
    assert not desk.side._local
    assert not desk.side._orders


# What requests say


IDS = ("h0", "h1")
E, F = "tcp://e:1", "tcp://f:1"
SHAPES: dict[str, tuple[Any, Delivery]] = {
    "nothing": (None, NOWHERE),
    "empty": ({}, NOWHERE),
    "in-tree, to the encoder": (
        {
            "consumer_zmq": "tcp://c:1",
            "ec_items": [
                {"mm_hash": "h0", "transfer_id": "t0"},
                {"mm_hash": "h1", "transfer_id": "t1"},
            ],
        },
        Delivery(
            consumers=("tcp://c:1",),
            is_sent=True,
            peers_by_item={"h0": (), "h1": ()},
            transfer_ids={"h0": "t0", "h1": "t1"},
        ),
    ),
    "several ranks": (
        {"consumer_zmq": ["tcp://c:1", "tcp://c:2"]},
        Delivery(consumers=("tcp://c:1", "tcp://c:2"), is_sent=True),
    ),
    "several in one string": (
        {"consumer_zmq": "tcp://c:1, tcp://c:2,"},
        Delivery(consumers=("tcp://c:1", "tcp://c:2"), is_sent=True),
    ),
    "by hash, in another order": (
        {"ec_items": [{"mm_hash": "h1", "peer": F}, {"mm_hash": "h0", "peer": E}]},
        Delivery(is_sent=True, peers_by_item={"h0": (E,), "h1": (F,)}),
    ),
    "by position, under the encoder's names": (
        {"ec_items": [{"mm_hash": "x0", "peer": E}, {"mm_hash": "x1", "peer": F}]},
        Delivery(
            is_sent=True,
            names={"h0": "x0", "h1": "x1"},
            peers_by_item={"h0": (E,), "h1": (F,)},
        ),
    ),
    "by position, without names": (
        {"ec_items": [{"peer": E}, {"peer": F}]},
        Delivery(is_sent=True, peers_by_item={"h0": (E,), "h1": (F,)}),
    ),
    "what an encoder has answered": (
        {"h0": {"peer": E, "transfer_id": "t"}, "h1": {"peer": F}},
        Delivery(
            is_sent=True, peers_by_item={"h0": (E,), "h1": (F,)}, transfer_ids={"h0": "t"}
        ),
    ),
    "one encoder for all": (
        {"peer": E},
        Delivery(is_sent=True, peers=(E,)),
    ),
    "some encoders for all": (
        {"peers": [E, F]},
        Delivery(is_sent=True, peers=(E, F)),
    ),
    "another connector's": ({"block_ids": [1, 2]}, Delivery(is_sent=True)),
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_parameters_are_understood(name: str) -> None:
    params, delivery = SHAPES[name]
    assert read_delivery(params, IDS) == delivery


def test_where_an_item_is_comes_before_where_all_are() -> None:
    delivery = read_delivery({"peer": E, "h0": {"peer": F}}, IDS)
    assert delivery.peers_of("h0") == (F, E)
    assert delivery.peers_of("h1") == (E,)
    assert delivery.name_of("h0") == "h0"


def test_a_name_that_is_another_items_of_the_request_is_not_taken() -> None:
    """Cut short by a prefix: position 0 of the list is not position 0 of the request."""
    delivery = read_delivery({"ec_items": [{"mm_hash": "h1", "peer": E}]}, IDS)
    assert delivery.names is None
    assert delivery.peers_of("h1") == (E,)


junk = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary()),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                ["ec_items", "mm_hash", "peer", "peers", "transfer_id", "consumer_zmq", "h0"]
            )
            | st.text(max_size=4)
            | st.integers(),
            inner,
            max_size=5,
        )
    ),
    max_leaves=12,
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(junk, st.lists(st.sampled_from(["h0", "h1", "h2"]), max_size=3, unique=True))
def test_garbage_never_raises_and_gives_what_can_be_used(params: Any, ids: list[str]) -> None:
    delivery = read_delivery(params, ids)
    endpoints = [*delivery.consumers, *delivery.peers]
    for each in ids:
        endpoints += delivery.peers_of(each)
        assert isinstance(delivery.name_of(each), str)
    assert all(isinstance(each, str) for each in endpoints)
    assert all(isinstance(each, str) for each in delivery.transfer_ids.values())


def test_targets_are_bounded() -> None:
    many = [f"tcp://c:{n}" for n in range(10_000)]
    assert len(read_delivery({"consumer_zmq": many}, ()).consumers) == MAX_TARGETS
    assert len(read_delivery({"consumer_zmq": ",".join(many)}, ()).consumers) == MAX_TARGETS


def test_codes_reach_the_log(caplog: pytest.LogCaptureFixture) -> None:
    desk = Desk()
    view = request("r", "a")
    desk.ensure(view)
    desk.links.failed("a", code=Code.TOO_LARGE)
    desk.ensure(view)
    assert "too_large: for a reason" in caplog.text
    assert "request r fails" in caplog.text


def test_an_item_is_not_asked_for_while_the_workers_are_taking_it() -> None:
    desk = Desk(ranks=2)
    first, second = request("first", "a"), request("second", "a")
    desk.ensure(first)
    desk.links.ready("a")
    assert desk.ensure(first)
    assert desk.side.has("a")
    desk.side.allocated("a")
    desk.side.plan((), **BUSY)
    desk.side.plan(("a",), **BUSY)  # the engine has lost it already
    desk.links.take(Expect)
    assert not desk.ensure(second)
    desk.links.say(Taken("a"), 0)
    assert not desk.ensure(second)
    assert desk.links.take(Expect) == [], "one rank would promise what it is about to hand over"
    desk.links.say(Taken("a"), 1)
    assert not desk.ensure(second)
    assert len(desk.links.take(Expect)) == 1


def test_two_items_never_go_by_one_name() -> None:
    desk = Desk()
    names = {"a": "theirs", "b": "theirs"}
    view = request("r", "a", "b", delivery=Delivery(is_sent=True, names=names))
    desk.ensure(view)
    assert [body.mm_hash for body in desk.links.take(Expect)] == ["theirs", "b"]


@pytest.mark.parametrize("names", [({"a": "b"}, None), (None, {"b": "a"})])
def test_two_requests_for_items_of_one_name_have_them_one_after_the_other(
    names: tuple[dict[str, str] | None, dict[str, str] | None],
) -> None:
    """As where one has the media and the other only what a proxy says of them."""
    desk = Desk()
    views = [
        request(item, item, delivery=Delivery(is_sent=True, names=theirs))
        for item, theirs in zip("ab", names, strict=True)
    ]
    (name,) = {"a", "b"} & {view.delivery.name_of(view.request_id) for view in views}
    for item, view in zip("ab", views, strict=True):
        for each in views[views.index(view) :]:
            assert not desk.ensure(each)
        assert desk.links.expected() == [name]
        desk.links.ready(name)
        assert desk.ensure(view)
        assert desk.load(item) == (Load(item, name),)
        desk.links.taken(name)
        desk.side.finished(view)
    assert not desk.side._by_name


def test_two_requests_that_call_an_item_differently_wait_for_the_same() -> None:
    """The workers would never be told to forget it by the other name."""
    desk = Desk()
    first = request("first", "a", delivery=Delivery(is_sent=True, names={"a": "theirs"}))
    second = request("second", "a")
    assert not desk.ensure(first)
    assert not desk.ensure(second)
    assert desk.links.expected() == ["theirs"]
    for view in (first, second):
        desk.side.finished(view)
    assert desk.links.expected() == []


def test_who_holds_a_name_waits_for_nobody_who_waits_for_it() -> None:
    desk = Desk()
    old = Delivery(is_sent=True, names={"a": "y"})
    young = Delivery(is_sent=True, names={"b": "x"})
    assert not desk.ensure(request("old", "a", delivery=old))
    assert not desk.ensure(request("young", "b", "y", delivery=young))
    assert desk.links.expected() == ["y", "x"], "the younger one's y waits for the older one's a"
    assert not desk.ensure(request("old", "a", "x", delivery=old))
    (*_, alias) = desk.links.expected()
    desk.links.failed(alias)
    assert not desk.ensure(request("old", "a", "x", delivery=old))
    assert desk.side.take_unavailable() == {"old"}
