"""The scheduler's side: what it sends to workers and answers to the engine."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.embeds.fake_worker_channel import FakeWorkerChannel
from tests.embeds.invariants import check_scheduler
from tests.support.fakes import FakeClock
from vllm_kvpool.embeds.availability import EmbedsRequest, Feature
from vllm_kvpool.embeds.params import MAX_TARGETS, NOWHERE, Delivery, read_delivery
from vllm_kvpool.embeds.protocol.messages import (
    LOADING_S,
    STARTED,
    Code,
    Expect,
    Forget,
    Heartbeat,
    HeldBytes,
    ItemNews,
    MetricSamples,
    Push,
    Reorder,
    Requested,
    Taken,
    WeightsChanged,
)
from vllm_kvpool.embeds.scheduler import (
    PROBE_S,
    WORKERS_LOST_S,
    EmbedsScheduler,
    EngineRole,
    ItemLoad,
    StepMeta,
)
from vllm_kvpool.metrics import named_values

STEP = 100  # tokens
ROWS = 10
SENT = Delivery(is_sent=True)
BUSY: dict[str, Any] = {"is_idle": False, "idle_wait_s": 0.0}


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

    def ensure(self, request: EmbedsRequest, computed: int = 0) -> bool:
        return self.scheduler.ensure(request, computed)

    def load(self, mm_hash: str) -> tuple[ItemLoad, ...]:
        """Load a ready item as the engine does, and return the step's loads."""
        assert self.scheduler.has(mm_hash)
        self.scheduler.allocated(mm_hash)
        loads = self.scheduler.plan((), **BUSY).loads
        for load in loads:
            self.channel.say(Taken(load.name))
        return loads


def request(
    name: str, *items: str, delivery: Delivery = SENT, media: bool = False, start: int = 0
) -> EmbedsRequest:
    """A request for items of ROWS rows, one behind the other."""
    features = tuple(
        Feature(item, start + n * ROWS, start + (n + 1) * ROWS, ROWS, media)
        for n, item in enumerate(items)
    )
    return EmbedsRequest(name, features, delivery)


def asking(view: EmbedsRequest, **options: Any) -> tuple[Rig, EmbedsRequest]:
    """A rig whose scheduler has asked for the items of a request."""
    rig = Rig(**options)
    rig.ensure(view)
    return rig, view


# What holds a request back


def test_started_request_comes_before_older_ones_until_it_is_preempted() -> None:
    """Its items have one order at a time: two would wait for each other's memory."""
    rig = Rig()
    rig.ensure(request("old", "shared"))
    view = request("young", "a", "shared")
    for is_started in (False, True, True, False):
        rig.scheduler.ensure(view, 0, is_started=is_started)
    told = [(each.mm_hash, each.order) for each in rig.channel.take(Expect)]
    assert told == [("shared", 0), ("a", 1), ("shared", 0)]
    reordered = rig.channel.take(Reorder)
    assert set(reordered[:2]) == {Reorder("a", 1 + STARTED), Reorder("shared", 1 + STARTED)}
    assert set(reordered[2:]) == {Reorder("a", 1), Reorder("shared", 0)}


def test_item_with_news_of_requests_that_have_ended_is_not_loaded() -> None:
    """The worker has dropped the item since, and brings it again: the engine would end."""
    rig = Rig()
    first = request("first", "a")
    rig.ensure(first)
    rig.channel.ready("a")
    late = rig.channel.words.copy()
    rig.channel.words.clear()
    rig.scheduler.finished(first)
    second = request("second", "a")
    assert not rig.ensure(second)
    rig.channel.words.extend(late)
    assert not rig.ensure(second)
    assert not rig.scheduler.has("a")
    rig.channel.ready("a")
    assert rig.ensure(second)


def test_end_of_an_items_oldest_request_is_told_with_the_next_ones_order() -> None:
    """Else the item would hold back the requests between the two, as if the oldest still waited."""
    rig = Rig()
    views = [request(name, item) for name, item in (("0", "a"), ("1", "b"), ("2", "a"))]
    for view in views:
        rig.ensure(view)
    rig.scheduler.finished(views[0])
    told = [(each.mm_hash, each.order) for each in rig.channel.take(Expect)]
    assert told == [("a", 0), ("b", 1), ("a", 0)]
    assert rig.channel.take(Reorder) == [Reorder("a", 2)]
    rig.scheduler.finished(views[2])
    assert not rig.channel.take(Reorder)


def test_request_waits_no_longer_for_an_item_whose_tokens_are_computed() -> None:
    """A prefix was found, or the engine's cache had the item. The request repeats the second."""
    rig = Rig()
    view = request("r", "a", "b", "b")
    rig.ensure(view)
    rig.scheduler.ensure(view, ROWS, is_started=True)
    assert rig.channel.take(Forget) == [Forget("a")]
    rig.scheduler.ensure(view, 2 * ROWS, is_started=True)
    assert not rig.channel.take(Forget)
    rig.scheduler.ensure(view, 3 * ROWS, is_started=True)
    assert rig.channel.take(Forget) == [Forget("b")]
    rig.scheduler.finished(view)
    assert not rig.channel.take(Forget)


def test_request_that_has_not_started_keeps_an_item_that_a_prefix_covers() -> None:
    """The prefix may go before the request starts, and the producer may have dropped the item."""
    rig = Rig()
    view = request("r", "a", "b")
    rig.ensure(view)
    rig.channel.ready("a")
    assert not rig.ensure(view, computed=ROWS)
    rig.channel.ready("b")
    assert rig.ensure(view)
    assert not rig.channel.take(Forget)
    assert rig.load("a") == (ItemLoad("a", "a"),)


def test_a_request_without_parameters_goes_on_at_once() -> None:
    rig = Rig()
    view = request("plain", "a", "b", delivery=NOWHERE, media=True)
    assert rig.ensure(view)
    assert not rig.scheduler.has("a")
    assert not rig.scheduler.is_waiting
    assert rig.channel.heard == [[]]


def test_a_request_with_neither_parameters_nor_media_is_given_up() -> None:
    """The engine would end if it were to encode what it does not have."""
    rig = Rig()
    assert not rig.ensure(request("empty", "a", delivery=NOWHERE))
    assert rig.scheduler.take_unavailable() == {"empty"}
    assert rig.channel.expected() == []
    rig.channel.say(ItemNews("b", offered=True))
    assert not rig.ensure(request("offered", "b", delivery=NOWHERE))
    assert rig.scheduler.take_unavailable() == set()


def test_a_request_without_parameters_asks_configured_peers_and_those_who_offered() -> None:
    view = request("plain", "a", delivery=NOWHERE, media=True)
    assert not Rig(has_peers=True).ensure(view)
    rig = Rig()
    rig.channel.say(ItemNews("a", offered=True))
    assert not rig.ensure(view)
    assert rig.channel.expected() == ["a"]


def test_request_with_an_answer_about_other_items_does_not_wait_for_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An encoder started with another --model gives every image another name."""
    answer = read_delivery({"x": {"peer": "tcp://e:1"}}, ("a",))
    view = request("r", "a", delivery=answer, media=True)
    rig = Rig()
    assert rig.ensure(view)
    assert rig.channel.expected() == []
    assert "same --model" in caplog.text
    assert not rig.ensure(request("without media", "a", delivery=answer))
    assert rig.scheduler.take_unavailable() == {"without media"}
    assert not Rig(has_peers=True).ensure(view)
    rig.channel.say(ItemNews("b", offered=True))
    other = read_delivery({"x": {"peer": "tcp://e:1"}}, ("b",))
    assert not rig.ensure(request("offered", "b", delivery=other, media=True))
    assert rig.channel.expected() == ["b"]


def test_an_item_that_a_partial_answer_leaves_out_is_asked_for() -> None:
    """The answer may be of one encoder among several."""
    answer = read_delivery({"a": {"peer": "tcp://e:1"}}, ("a", "b"))
    rig = Rig()
    assert not rig.ensure(request("r", "a", "b", delivery=answer, media=True))
    assert rig.channel.expected() == ["a", "b"]


def test_a_number_is_no_name_to_ask_others_for() -> None:
    """Another engine gives it to another item. A producer's name that comes with it is one."""

    def numbered(delivery: Delivery, *, media: bool = True) -> EmbedsRequest:
        view = request("numbered", "a", delivery=delivery, media=media)
        return view._replace(features=(view.features[0]._replace(is_named=False),))

    rig = Rig(has_peers=True)
    rig.channel.say(ItemNews("a", offered=True))
    assert rig.ensure(numbered(SENT))
    assert rig.channel.expected() == []
    assert not Rig().ensure(numbered(Delivery(is_sent=True, names={"a": "named"})))
    assert not rig.ensure(numbered(SENT, media=False)._replace(request_id="empty"))
    assert rig.scheduler.take_unavailable() == {"empty"}
    producer = Rig(is_producer=True, is_consumer=False)
    assert producer.ensure(numbered(Delivery(is_sent=True, consumers=("tcp://c:1",))))
    assert producer.channel.heard == [[]]


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
    rig = Rig()
    view = request("long", "a", start=start)
    assert rig.ensure(view, computed) != waits
    assert rig.channel.expected() == (["a"] if waits else [])


def test_every_item_of_the_step_is_asked_for_at_once() -> None:
    rig = Rig()
    assert not rig.ensure(request("r", "a", "b", "c"))
    assert rig.channel.expected() == ["a", "b", "c"]


def test_waiting_says_nothing_twice() -> None:
    rig = Rig()
    view = request("r", "a")
    for _ in range(5):
        assert not rig.ensure(view)
    assert len(rig.channel.take(Expect)) == 1


def test_orders_are_those_of_the_requests() -> None:
    rig = Rig()
    for name in ("first", "second", "third"):
        rig.ensure(request(name, f"{name} a", f"{name} b"))
    orders = [body.order for body in rig.channel.take(Expect)]
    assert orders == [0, 0, 1, 1, 2, 2]


def with_resident(item: str) -> Rig:
    """An engine that has an item, as an earlier request left it."""
    rig = Rig()
    view = request("before", item)
    assert not rig.ensure(view)
    rig.channel.ready(item)
    assert rig.ensure(view)
    rig.load(item)
    rig.scheduler.finished(view)
    rig.channel.take(Expect)
    return rig


def test_an_item_that_may_lose_its_place_in_the_step_waits_for_the_next() -> None:
    """Without its media the engine could not encode it again."""
    rig = with_resident("x")
    rig.scheduler.allocated("room for another")
    assert rig.ensure(request("media", "x", media=True))
    assert not rig.ensure(request("none", "x"))
    rig.scheduler.plan((), **BUSY)
    assert rig.ensure(request("none", "x"))
    rig.scheduler.allocated("room for another")
    rig.scheduler.plan(("x",), **BUSY)
    assert not rig.ensure(request("none", "x"))
    assert rig.channel.expected() == ["x"]


@pytest.mark.parametrize("has_media", [True, False])
def test_request_for_which_the_engine_may_evict_endangers_items_of_later_requests(
    has_media: bool,
) -> None:
    """vLLM evicts before it allocates; without blocks, say, it then allocates nothing."""
    rig = with_resident("x")
    first = request("first", "y", media=has_media, delivery=NOWHERE if has_media else SENT)
    if not has_media:
        assert not rig.ensure(first)
        rig.channel.ready("y")
    assert rig.ensure(first)
    assert not rig.ensure(request("none", "x")), "the engine would end without the item"
    assert rig.ensure(request("media", "x", media=True))
    rig.scheduler.plan(("x",), **BUSY)
    assert not rig.ensure(request("none", "x"))
    assert rig.channel.expected()[-1] == "x"


def test_request_that_the_engine_refuses_in_every_step_starves_no_other() -> None:
    """The other may hold the room that the first waits for. Each has every second step."""
    rig = with_resident("x")
    first = request("first", "y", media=True, delivery=NOWHERE)
    second = request("second", "x")
    steps = []
    for _ in range(4):
        steps.append((rig.ensure(first), rig.ensure(second)))
        rig.scheduler.plan((), **BUSY)
    assert steps == [(True, False), (False, True)] * 2
    rig.scheduler.finished(second)
    assert all(rig.ensure(first) for _ in range(3)), "it waits for nobody"


def test_request_that_waits_for_another_item_holds_up_no_evictions() -> None:
    rig = with_resident("x")
    second = request("second", "x", "pending")
    for _ in range(3):
        assert rig.ensure(request("first", "y", media=True, delivery=NOWHERE))
        assert not rig.ensure(second)
        rig.scheduler.plan((), **BUSY)


def test_item_that_the_engine_reaches_before_it_makes_room_is_not_asked_for() -> None:
    """The engine keeps the items that it has reached. The request repeats one."""
    rig = with_resident("x")
    view = request("both", "x", "y", "x")
    assert not rig.ensure(view)
    assert rig.channel.expected()[-1] == "y"
    rig.channel.ready("y")
    assert rig.ensure(view)
    assert [each.mm_hash for each in rig.channel.take(Expect)] == ["y"]


@pytest.mark.parametrize("delivery", [SENT, NOWHERE], ids=["failed", "nowhere"])
def test_request_whose_own_item_may_evict_one_that_nobody_sends_fails(delivery: Delivery) -> None:
    """The engine would end if it evicted the item."""
    rig = with_resident("x")
    features = (
        Feature("y", 0, ROWS, ROWS, True, is_named=False),
        Feature("x", ROWS, 2 * ROWS, ROWS, False),
    )
    view = EmbedsRequest("both", features, delivery)
    if delivery is SENT:
        assert not rig.ensure(view)
        rig.channel.failed("x")
    assert not rig.ensure(view)
    assert rig.scheduler.take_unavailable() == {"both"}
    assert rig.ensure(view._replace(request_id="other", features=features[::-1]))


@pytest.mark.parametrize("is_had", [True, False])
def test_an_item_that_may_lose_its_place_to_another_of_its_request_is_asked_for(
    is_had: bool,
) -> None:
    rig = with_resident("x")
    assert rig.ensure(request("alone", "x"))
    assert rig.channel.take(Expect) == []
    view = request("both", "y", "x")
    assert not rig.ensure(view)
    told = {body.mm_hash: body.patience_s for body in rig.channel.take(Expect)}  # type: ignore[attr-defined]
    assert told == {"y": 0.0, "x": PROBE_S}
    rig.channel.ready("y")
    assert not rig.ensure(view)
    if is_had:
        rig.channel.ready("x")
    else:
        rig.channel.failed("x")
    assert rig.ensure(view) == is_had
    assert rig.scheduler.take_unavailable() == (set() if is_had else {"both"})
    rig.scheduler.allocated("y")
    assert rig.scheduler.has("x") == is_had
    rig.scheduler.finished(view)
    check_scheduler(rig.scheduler)
    assert not rig.scheduler.is_waiting


def test_who_could_encode_itself_only_asks() -> None:
    rig = Rig(is_producer=True, has_peers=True)
    rig.ensure(request("r", "a", delivery=NOWHERE, media=True))
    rig.ensure(request("s", "b", media=True))
    asks, waits = rig.channel.take(Expect)
    assert (asks.patience_s, waits.patience_s) == (PROBE_S, 0.0)


@pytest.mark.parametrize("others", [(), ("tcp://other:1",)])
def test_who_encodes_itself_does_not_wait_for_itself(others: tuple[str, ...]) -> None:
    """A proxy may choose one engine for both halves of a request."""
    rig = Rig(is_producer=True, own_endpoint="tcp://me:1")
    rig.ensure(request("r", "a", delivery=Delivery(is_sent=True, peers=("tcp://me:1", *others))))
    (told,) = rig.channel.take(Expect)
    assert isinstance(told, Expect)
    assert (told.peers, told.patience_s) == (others, 0.0 if others else PROBE_S)


def test_expectations_carry_what_the_request_says() -> None:
    rig = Rig()
    delivery = Delivery(is_sent=True, peers=("tcp://e:1",), names={"a": "theirs"})
    rig.ensure(request("r", "a", delivery=delivery))
    assert rig.channel.take(Expect) == [Expect("theirs", 0, ("tcp://e:1",), ROWS, 0.0, wait_id=1)]
    rig.channel.ready("theirs")
    assert rig.ensure(request("r", "a", delivery=delivery))
    assert rig.load("a") == (ItemLoad("a", "theirs"),)


# Ready


def test_an_item_is_there_when_every_rank_has_it() -> None:
    rig, view = asking(request("r", "a"), ranks=3)
    for ranks in ((2,), (0, 2), ()):
        for rank in ranks:
            rig.channel.ready("a", rank)
        assert not rig.ensure(view)
        assert not rig.scheduler.has("a")
    rig.channel.ready("a", 1)
    assert rig.ensure(view)
    assert rig.scheduler.has("a")


def chosen(rig: Rig, rank: int) -> list[str]:
    """The encodings that a rank was told to have since the last look."""
    told = rig.channel.take(Expect, rank)
    return [each.digest for each in told if isinstance(each, Expect) and each.digest]


def test_ranks_that_are_brought_different_bytes_are_told_which_to_have() -> None:
    rig = Rig(ranks=2)
    one, other = (request(name, "a") for name in ("one", "other"))
    rig.ensure(one)
    rig.ensure(other)
    rig.channel.ready("a", 1, digest="y")
    rig.channel.ready("a", 0, digest="x")
    assert not rig.ensure(one)
    assert not rig.scheduler.has("a"), "the engine would load what is not there"
    assert [chosen(rig, rank) for rank in range(2)] == [["x", "x"]] * 2
    rig.channel.ready("a", 1, digest="y")  # said before it was told
    assert not rig.ensure(one)
    rig.channel.ready("a", 1, digest="x")
    assert not rig.ensure(one), "rank 0 may be handing over another one"
    rig.channel.ready("a", 0, digest="x")
    assert rig.ensure(one)
    assert rig.ensure(other)
    assert rig.load("a") == (ItemLoad("a", "a"),)
    assert rig.scheduler.take_unavailable() == set()


def test_what_a_rank_has_already_is_not_sent_again() -> None:
    rig = Rig(ranks=3)
    rig.ensure(request("r", "a"))
    rig.channel.coming("a", 0, digest="x")
    rig.channel.ready("a", 2, digest="z")
    rig.ensure(request("r", "a"))
    assert chosen(rig, 0) == ["z"]


def test_report_from_before_the_choice_of_an_encoding_does_not_count() -> None:
    """The rank would hand the item over, and then bring it again for the choice."""
    rig, view = asking(request("r", "a"), ranks=2)
    rig.channel.coming("a", 0, digest="x")
    rig.channel.ready("a", 1, digest="y")
    rig.channel.ready("a", 0, digest="y")
    assert not rig.ensure(view)
    rig.channel.ready("a", 1, digest="y")
    assert not rig.ensure(view)
    rig.channel.ready("a", 0, digest="y")
    assert rig.ensure(view)


def test_an_encoding_that_cannot_be_had_any_more_gives_way_to_the_other() -> None:
    rig, view = asking(request("r", "a"), ranks=2)
    rig.channel.ready("a", 0, digest="x")
    rig.channel.coming("a", 1, digest="y")
    assert not rig.ensure(view)
    rig.channel.failed("a", 1)
    assert not rig.ensure(view)
    assert [chosen(rig, rank) for rank in range(2)] == [["x", "y"]] * 2
    rig.channel.ready("a", 0, digest="y")
    rig.channel.ready("a", 1, digest="y")
    assert rig.ensure(view)


@pytest.mark.parametrize("media", [True, False])
def test_ranks_that_can_never_agree_have_nothing(media: bool) -> None:
    rig = Rig(ranks=2)
    one, other = (request(name, "a", media=media) for name in ("one", "other"))
    rig.ensure(one)
    rig.ensure(other)
    rig.channel.ready("a", 0, digest="x")
    rig.channel.ready("a", 1, digest="y")
    for rank in (1, 0):
        rig.scheduler._poll_workers()
        rig.channel.failed("a", rank)
    assert rig.ensure(one) == media
    assert not rig.scheduler.has("a")
    assert rig.ensure(other) == media
    assert rig.scheduler.take_unavailable() == (set() if media else {"one", "other"})


def test_encoders_cannot_have_the_ranks_choose_for_ever() -> None:
    rig, view = asking(request("r", "a"), ranks=2)
    for number in range(100):
        rig.channel.coming("a", 0, digest=f"x{number}")
        rig.channel.coming("a", 1, digest=f"y{number}")
        rig.scheduler._poll_workers()
        rig.channel.failed("a", 1)
    assert not rig.ensure(view)
    assert rig.scheduler.take_unavailable() == {"r"}


def test_a_rank_that_comes_back_is_told_which_encoding_to_have() -> None:
    rig, view = asking(request("r", "a"), ranks=2)
    rig.channel.ready("a", 0, digest="x")
    rig.channel.ready("a", 1, digest="y")
    rig.ensure(view)
    chosen(rig, 1)
    rig.channel.say(None, 1)
    rig.ensure(view)
    assert chosen(rig, 1) == ["x"]


def test_what_a_rank_says_after_the_failure_changes_nothing() -> None:
    rig = Rig(ranks=2)
    one, other = request("one", "a", media=True), request("other", "a", media=True)
    rig.ensure(one)
    rig.ensure(other)
    rig.channel.failed("a", 0)
    assert rig.ensure(one)
    rig.channel.ready("a")
    rig.scheduler._poll_workers()
    assert not rig.scheduler.has("a")


def test_an_item_that_is_there_stays() -> None:
    rig, view = asking(request("r", "a"))
    rig.channel.ready("a")
    for _ in range(10):
        assert rig.ensure(view)
        assert rig.scheduler.has("a")
        assert rig.scheduler.plan((), **BUSY) == StepMeta()
    assert rig.channel.take(Forget) == []
    assert rig.load("a") == (ItemLoad("a", "a"),)
    assert rig.ensure(view)
    assert not rig.scheduler.is_waiting
    assert rig.channel.take(Forget) == [], "the worker lets go of it when it is loaded"
    assert rig.scheduler.plan((), **BUSY) == StepMeta()


def test_an_item_is_there_until_nobody_waits_for_it() -> None:
    rig, view = asking(request("r", "a"))
    rig.channel.ready("a")
    rig.ensure(view)
    rig.scheduler.finished(view)
    assert not rig.scheduler.has("a")
    assert rig.channel.take(Forget) == [Forget("a")]
    assert not rig.scheduler.is_waiting


def test_an_encode_is_not_a_load() -> None:
    rig = Rig()
    assert rig.ensure(request("r", "a", delivery=NOWHERE, media=True))
    rig.scheduler.allocated("a")
    assert rig.scheduler.plan((), **BUSY) == StepMeta()


# Many requests, one item


def test_one_item_serves_many_requests_and_one_that_is_cancelled_takes_it_from_nobody() -> None:
    rig = Rig()
    views = [request(f"r{n}", "logo") for n in range(8)]
    assert not any(rig.ensure(view) for view in views)
    for number in (3, 0):
        rig.scheduler.finished(views[number])
    assert rig.channel.take(Forget) == []
    rig.channel.ready("logo")
    left = [view for n, view in enumerate(views) if n not in (0, 3)]
    assert all(rig.ensure(view) for view in left)
    assert rig.load("logo") == (ItemLoad("logo", "logo"),)
    assert all(rig.ensure(view) for view in left), "it is in the engine's cache now"
    assert rig.scheduler.plan((), **BUSY).loads == ()
    for view in left:
        rig.scheduler.finished(view)
    assert rig.channel.take(Forget) == []


def test_the_last_that_is_cancelled_ends_it() -> None:
    rig = Rig(ranks=2)
    views = [request(f"r{n}", "logo") for n in range(3)]
    for view in views:
        rig.ensure(view)
    for view in views:
        assert rig.channel.expected(1) == ["logo"]
        rig.scheduler.finished(view)
    assert rig.channel.expected(0) == rig.channel.expected(1) == []
    check_scheduler(rig.scheduler)
    assert not rig.scheduler.is_waiting


# Failure


def test_where_the_media_are_here_they_are_encoded_here() -> None:
    rig, view = asking(request("r", "a", "b", media=True))
    rig.channel.failed("a")
    assert not rig.ensure(view), "b is still to come"
    rig.channel.ready("b")
    assert rig.ensure(view)
    assert not rig.scheduler.has("a")
    assert rig.scheduler.has("b")
    assert rig.scheduler.take_unavailable() == set()
    rig.ensure(view)
    assert rig.channel.expected() == ["b"], "it is not asked for again"


def test_where_they_are_not_the_request_is_given_up_once() -> None:
    rig, view = asking(request("r", "a", "b"))
    rig.channel.failed("a")
    assert not rig.ensure(view)
    assert rig.scheduler.take_unavailable() == {"r"}
    assert rig.scheduler.take_unavailable() == set()
    rig.scheduler.finished(view)
    assert rig.scheduler.take_unavailable() == set()
    assert rig.channel.expected() == []


def test_a_request_that_ends_before_it_is_given_up_is_not_given_up() -> None:
    rig, view = asking(request("r", "a"))
    rig.channel.failed("a")
    rig.ensure(view)
    rig.scheduler.finished(view)
    assert rig.scheduler.take_unavailable() == set()


def test_a_failure_is_told_to_each_request_that_waits() -> None:
    rig = Rig()
    media, without = request("m", "a", media=True), request("w", "a")
    rig.ensure(media)
    rig.ensure(without)
    rig.channel.failed("a")
    assert rig.ensure(media)
    assert not rig.ensure(without)
    assert rig.scheduler.take_unavailable() == {"w"}
    later = request("later", "a")
    assert not rig.ensure(later)
    assert rig.channel.expected() == ["a"], "it may be had now"


def test_a_failure_on_one_rank_frees_the_others() -> None:
    rig, view = asking(request("r", "a", media=True), ranks=3)
    rig.channel.ready("a", 0)
    rig.channel.failed("a", 1)
    assert rig.ensure(view)
    for rank in range(3):
        assert rig.channel.expected(rank) == []


# Workers come and go


def test_nothing_is_scheduled_before_the_workers_are_there() -> None:
    rig = Rig()
    rig.channel.are_up = False
    plain = request("plain", "a", delivery=NOWHERE, media=True)
    assert not rig.ensure(plain)
    assert rig.scheduler.is_waiting
    rig.channel.are_up = True
    assert rig.ensure(plain)


def test_a_worker_that_has_been_restarted_is_told_everything() -> None:
    rig, view = asking(
        request("r", "a", "b", delivery=Delivery(consumers=("tcp://c:1",), is_sent=True)),
        ranks=2,
        is_producer=True,
    )
    rig.channel.ready("a")
    rig.scheduler.weights_changed("v1")
    rig.channel.ready("a", weights_version=1)
    rig.scheduler._poll_workers()
    assert rig.scheduler.has("a")
    before = [list(heard) for heard in rig.channel.heard]
    rig.channel.say(None, 1)
    rig.scheduler._poll_workers()
    assert rig.channel.heard[0] == before[0]
    again = rig.channel.heard[1][len(before[1]) :]
    assert again[0] == WeightsChanged(1, "print v1")
    assert [body.mm_hash for body in again if isinstance(body, Expect)] == ["a", "b"]
    assert [body.mm_hash for body in again if isinstance(body, Push)] == ["a", "b"]
    assert not rig.scheduler.has("a"), "it has lost it"
    rig.channel.ready("a", 1, weights_version=1)
    rig.channel.ready("b", weights_version=1)
    assert rig.ensure(view)


def test_a_worker_that_was_away_forgets_what_no_request_waits_for() -> None:
    """But for what a step is loading from it."""
    rig = Rig(ranks=2)
    gone, kept, loading = request("gone", "a", "b"), request("kept", "b"), request("l", "c")
    for view in (gone, kept, loading):
        assert not rig.ensure(view)
    rig.channel.ready("c")
    assert rig.ensure(loading)
    rig.scheduler.allocated("c")
    rig.channel.are_up = False
    rig.scheduler.finished(gone)
    rig.channel.are_up = True
    rig.channel.say(None, 1)
    assert not rig.ensure(kept)
    assert rig.channel.take(Requested, 1) == Requested.all(("b", "c"))


def test_workers_that_were_away_keep_what_a_step_has_yet_to_load() -> None:
    """Through a second session, and through a change of the weights: the engine would end."""
    rig = Rig(ranks=2)
    view = request("r", "a")
    rig.ensure(view)
    rig.channel.ready("a")
    assert rig.ensure(view)
    assert rig.scheduler.has("a")
    rig.scheduler.allocated("a")
    rig.scheduler.plan((), **BUSY)
    for _ in range(2):
        rig.channel.say(None, 1)
        rig.scheduler._poll_workers()
        assert rig.channel.take(Requested, 1) == [Requested(("a",))]
    rig.scheduler.weights_changed("v1")
    rig.channel.say(Taken("a"), 0)
    rig.scheduler._poll_workers()
    rig.scheduler.weights_changed("v2")
    rig.channel.say(Taken("a"), 1)
    rig.scheduler._poll_workers()
    rig.scheduler.weights_changed("v3")
    told = [(each.version, each.loading) for each in rig.channel.take(WeightsChanged, 1)]
    assert told == [(1, ("a",)), (2, ("a",)), (3, ())]


def test_what_a_step_has_not_loaded_in_time_is_not_kept() -> None:
    rig = Rig()
    view = request("r", "a")
    rig.ensure(view)
    rig.channel.ready("a")
    rig.ensure(view)
    assert rig.scheduler.has("a")
    rig.scheduler.allocated("a")
    rig.clock.advance(LOADING_S)
    rig.scheduler.weights_changed("v1")
    assert rig.channel.take(WeightsChanged) == [WeightsChanged(1, "print v1")]


def test_without_workers_for_long_requests_go_on_without_them() -> None:
    rig = Rig()
    rig.channel.are_up = False
    media, without = request("m", "a", media=True), request("w", "b")
    assert not rig.ensure(media)
    assert not rig.ensure(without)
    rig.channel.silent_s = WORKERS_LOST_S + 1
    assert rig.ensure(media)
    assert not rig.scheduler.has("a")
    assert not rig.ensure(without)
    assert rig.scheduler.take_unavailable() == {"w"}


def test_workers_that_say_that_they_end_are_not_waited_for() -> None:
    rig = Rig()
    view = request("m", "a", media=True)
    assert not rig.ensure(view)
    rig.channel.are_up, rig.channel.silent_s = False, float("inf")
    assert rig.ensure(view)


def test_a_worker_that_hangs_holds_up_what_needs_it_and_forgets_what_went_on_without_it() -> None:
    rig = Rig()
    view = request("m", "a", media=True)
    rig.channel.silent_s = 0.9 * WORKERS_LOST_S
    assert not rig.ensure(view)
    assert rig.ensure(request("plain", "b", delivery=NOWHERE, media=True))
    rig.channel.silent_s = 1.1 * WORKERS_LOST_S
    assert rig.ensure(view)
    rig.channel.silent_s = 0.0
    assert rig.channel.expected() == []


def test_lost_workers_are_not_told_to_forget_what_a_step_has_yet_to_load() -> None:
    """They may come back before that step: the engine would end without the item."""
    rig = Rig()
    rig.ensure(request("r", "a"))
    rig.channel.ready("a")
    assert rig.ensure(request("r", "a"))
    assert rig.scheduler.has("a")
    rig.scheduler.allocated("a")
    assert rig.scheduler.plan((), **BUSY).loads == (ItemLoad("a", "a"),)
    rig.scheduler.plan(("a",), **BUSY)
    rig.channel.heard = [[]]
    rig.channel.silent_s = 1.1 * WORKERS_LOST_S
    assert rig.ensure(request("s", "a", media=True))
    assert not rig.ensure(request("t", "a"))
    other = Delivery(is_sent=True, names={"b": "a"})
    assert not rig.ensure(request("u", "b", delivery=other)), "another item by the same name"
    assert rig.scheduler.take_unavailable() == {"t", "u"}
    assert rig.channel.heard == [[]]
    rig.scheduler.weights_changed("next")
    assert rig.channel.heard == [[WeightsChanged(1, "print next", ("a",))]]
    rig.channel.silent_s = 0.0
    rig.channel.say(None)
    rig.ensure(request("v", "a"))
    assert rig.channel.take(Requested) == Requested.all(("a",))
    check_scheduler(rig.scheduler)


def test_what_lost_workers_hold_defers_no_encode() -> None:
    rig = Rig(is_producer=True, is_consumer=False)
    rig.channel.say(HeldBytes(1001))
    view = request("p", "a")
    assert not rig.ensure(view)
    rig.channel.are_up, rig.channel.silent_s = False, float("inf")
    assert rig.ensure(request("q", "b"))


def test_words_that_mean_nothing_here_change_nothing() -> None:
    rig, view = asking(request("r", "a"))
    rig.channel.say(Heartbeat())
    rig.channel.ready("unknown")
    rig.channel.failed("unknown")
    rig.channel.say(ItemNews("a", offered=True))
    assert not rig.ensure(view)
    assert rig.channel.expected() == ["a"]


# Weights and the engine's cache


def test_new_weights_make_what_is_there_stale() -> None:
    rig, view = asking(request("r", "a"), ranks=2)
    rig.channel.ready("a", 0)
    rig.scheduler._poll_workers()
    rig.scheduler.weights_changed("v1")
    assert rig.channel.take(WeightsChanged) == [WeightsChanged(1, "print v1")]
    assert rig.channel.expected() == ["a"]
    rig.channel.ready("a", weights_version=0)
    assert not rig.ensure(view), "what was said before the change does not count"
    rig.channel.failed("a", weights_version=0)
    assert not rig.ensure(view)
    rig.channel.ready("a", weights_version=1)
    assert rig.ensure(view)
    assert rig.scheduler.plan((), **BUSY).weights.version == 1


@pytest.mark.parametrize("again", ["weights", "worker"])
def test_what_is_said_again_is_of_the_requests_that_still_wait(again: str) -> None:
    """Each may name an encoder of its own."""
    rig = Rig()
    for name in "abc":
        where = Delivery(is_sent=True, peers=(f"tcp://{name}:1",))
        rig.ensure(request(name, "image", delivery=where))
    said = rig.channel.take(Expect)
    rig.scheduler.finished(request("a", "image"))
    rig.channel.take(Expect)
    if again == "weights":
        rig.scheduler.weights_changed("next")
    else:
        rig.channel.say(None)
        rig.ensure(request("plain", delivery=NOWHERE))
    assert rig.channel.take(Expect) == [
        msgspec.structs.replace(each, order=1, joins=number > 0)
        for number, each in enumerate(said[1:])
    ]


def test_a_failure_of_old_weights_is_tried_again() -> None:
    rig, view = asking(request("r", "a"))
    rig.channel.failed("a")
    rig.scheduler._poll_workers()
    rig.scheduler.weights_changed("v1")
    assert not rig.ensure(view)
    assert rig.scheduler.take_unavailable() == set()
    assert rig.channel.expected() == ["a"]


def loaded() -> tuple[Rig, EmbedsRequest]:
    rig, view = asking(request("r", "a"))
    rig.channel.ready("a")
    rig.ensure(view)
    rig.load("a")
    assert rig.ensure(view)
    rig.channel.take(Expect)
    return rig, view


def test_what_was_evicted_is_asked_for_again() -> None:
    rig, view = loaded()
    rig.scheduler.plan(("a",), **BUSY)
    assert not rig.ensure(view)
    assert rig.channel.expected() == ["a"]
    rig.channel.ready("a")
    assert rig.ensure(view)
    assert rig.load("a") == (ItemLoad("a", "a"),)


def test_what_is_evicted_and_loaded_in_one_step_is_there() -> None:
    rig, view = loaded()
    rig.scheduler.allocated("a")
    rig.scheduler.plan(("a",), **BUSY)
    assert rig.ensure(view)


def test_after_a_reset_of_the_engines_cache_everything_is_asked_for_again() -> None:
    rig, view = loaded()
    rig.scheduler.encoder_cache_was_reset()
    assert not rig.ensure(view)
    assert rig.channel.expected() == ["a"]


def test_an_engine_that_asks_for_what_it_had_has_it_no_more() -> None:
    rig, view = loaded()
    assert not rig.scheduler.has("a")
    assert not rig.ensure(view)
    assert rig.channel.expected() == ["a"]


# A producer


def test_a_producer_has_items_sent_where_the_request_says_once() -> None:
    rig = Rig(is_producer=True, is_consumer=False)
    to = Delivery(consumers=("tcp://c:1", "tcp://c:2"))
    view = request("r", "a", "b", delivery=to)
    for _ in range(3):
        assert rig.ensure(view)
    assert rig.channel.take(Push) == [Push("a", to.consumers), Push("b", to.consumers)]
    other = request("s", "a", delivery=to)
    assert rig.ensure(other)
    assert rig.channel.take(Push) == [Push("a", to.consumers)]


def test_encoding_waits_for_consumers() -> None:
    rig = Rig(is_producer=True, is_consumer=False)
    view = request("r", "a", delivery=NOWHERE)
    rig.channel.say(HeldBytes(1000))
    assert rig.ensure(view)
    rig.channel.say(HeldBytes(1001))
    assert not rig.ensure(view)
    assert rig.scheduler.is_waiting
    assert not rig.ensure(view)
    rig.channel.say(HeldBytes(10))
    assert rig.ensure(view)
    assert not rig.scheduler.is_waiting


def test_back_pressure_does_not_hold_what_is_encoded() -> None:
    rig = Rig(is_producer=True, is_consumer=False)
    rig.scheduler.allocated("a")
    rig.channel.say(HeldBytes(10_000))
    assert rig.ensure(request("r", "a", delivery=NOWHERE))
    assert rig.ensure(request("text", delivery=NOWHERE))
    assert rig.ensure(request("far", "z", delivery=NOWHERE, start=10 * STEP))
    assert not rig.ensure(request("s", "a", "b", delivery=NOWHERE))


def test_request_reuses_the_engines_items_only_in_its_steps() -> None:
    """Kept on, items that no consumer takes would hold back the encode that a request waits for."""
    rig = Rig(is_producer=True, is_consumer=False)
    rig.scheduler.allocated("a")
    views = [request("waits", "a", "b"), request("goes", "a", "a")]
    rig.channel.say(HeldBytes(1001))
    assert [rig.ensure(view) for view in views] == [False, True]
    assert rig.scheduler.plan((), {"other": 1}, **BUSY).reused == ()
    assert [rig.ensure(view) for view in views] == [False, True]
    assert rig.scheduler.plan((), {"goes": 1}, **BUSY).reused == ("a",)
    assert rig.scheduler.plan((), {"goes": 1}, **BUSY).reused == ()


# The rest


def test_what_a_step_needs_has_been_said_when_it_is_planned() -> None:
    rig = Rig()
    rig.ensure(request("r", "a", "b"))
    assert rig.channel.unsaid == 2
    rig.scheduler.plan((), **BUSY)
    assert rig.channel.unsaid == 0


def test_only_an_idle_step_with_something_to_wait_for_waits() -> None:
    rig = Rig()
    idle: dict[str, Any] = {"is_idle": True, "idle_wait_s": 0.5}
    rig.scheduler.plan((), **idle)
    assert rig.channel.waits == []
    rig.ensure(request("r", "a"))
    rig.scheduler.plan((), **BUSY)
    assert set(rig.channel.waits) == {0.0}
    rig.channel.ready("a")
    rig.scheduler.plan((), **idle)
    assert rig.channel.waits[-1] == 0.5
    assert rig.scheduler.has("a"), "what came while it waited counts"


def test_numbers_of_workers_and_its_own_are_handed_on_once() -> None:
    rig, view = asking(request("r", "a", media=True), ranks=2)
    rig.channel.failed("a", 0)
    rig.channel.say(MetricSamples({"kvpool_ec_events": {("consumer", "items"): 2.0}}))
    rig.ensure(view)
    numbers = dict(named_values(rig.scheduler.take_samples()))
    assert sum(numbers.values()) >= 4 + 2  # of two workers; a failure and a local encode
    assert rig.scheduler.take_samples() == {}


def test_it_ends_its_connections() -> None:
    rig = Rig()
    rig.scheduler.close()
    assert rig.channel.is_closed


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 2), st.integers(0, 2)), max_size=60))
def test_whatever_happens_nothing_is_left_behind(events: list[tuple[int, int, int]]) -> None:
    """An engine that does as vLLM's does: what `has` says is loaded, and then is there."""
    rig = Rig(ranks=2)
    views = {n: request(f"r{n}", f"i{n % 2}", "i2", media=n != 2) for n in range(3)}
    live: set[int] = set()
    cache: set[str] = set()
    given_up: list[str] = []
    for kind, number, rank in events:
        item = f"i{number}"
        if kind <= 2:
            live.add(number)
            if rig.ensure(views[number]):
                for feature in views[number].features:
                    if feature.mm_hash in cache:
                        continue
                    there = rig.scheduler.has(feature.mm_hash)
                    assert there or feature.has_media, "the engine cannot encode it"
                    rig.scheduler.allocated(feature.mm_hash)
                    cache.add(feature.mm_hash)
                    loads = rig.scheduler.plan((), **BUSY).loads
                    assert loads == ((ItemLoad(feature.mm_hash, feature.mm_hash),) if there else ())
                    if there:
                        rig.channel.taken(feature.mm_hash)
        elif kind <= 4:
            rig.channel.ready(item, rank % 2)
        elif kind == 5:
            rig.channel.failed(item, rank % 2)
        elif kind == 6:
            rig.channel.say(None, rank % 2)
        elif kind == 7:
            evicted = {item} & cache
            cache -= evicted
            rig.scheduler.plan(evicted, **BUSY)
        elif number in live:
            rig.scheduler.finished(views[number])
            live.discard(number)
        check_scheduler(rig.scheduler)
        for name in rig.scheduler.take_unavailable():
            given_up.append(name)
            assert int(name[1:]) in live
            assert name == "r2", "its media are here"
    for number in live:
        rig.scheduler.finished(views[number])
    check_scheduler(rig.scheduler)
    assert not rig.scheduler.is_waiting
    assert rig.channel.expected(0) == []
    assert not rig.scheduler._requests


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
    "an answer about one item": (
        {"h0": {"peer": E}},
        Delivery(is_sent=True, peers_by_item={"h0": (E,)}),
    ),
    "an answer about one item, beside an encoder for all": (
        {"h0": {"peer": E}, "peer": F},
        Delivery(is_sent=True, peers=(F,), peers_by_item={"h0": (E,)}),
    ),
    "answers about other items": (
        {"x0": {"item_indices": [0], "metadata": {}}, "x1": {"peer": F}},
        Delivery(is_sent=True, is_of_others=True),
    ),
    "answers about other items, beside an encoder for all": (
        {"x0": {"peer": E}, "peer": F},
        Delivery(is_sent=True, peers=(F,)),
    ),
    "a mapping that is no answer": (
        {"do_remote": True, "trace": {"id": 1}, "ec_items": {"h0": {"peer": E}}},
        Delivery(is_sent=True),
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
    rig, view = asking(request("r", "a"))
    rig.channel.failed("a", code=Code.TOO_LARGE)
    rig.ensure(view)
    assert "too_large: for a reason" in caplog.text
    assert "request r fails" in caplog.text


def test_an_item_is_not_asked_for_while_the_workers_are_taking_it() -> None:
    rig = Rig(ranks=2)
    first, second = request("first", "a"), request("second", "a")
    rig.ensure(first)
    rig.channel.ready("a")
    assert rig.ensure(first)
    assert rig.scheduler.has("a")
    rig.scheduler.allocated("a")
    rig.scheduler.plan((), **BUSY)
    rig.scheduler.plan(("a",), **BUSY)  # the engine has lost it already
    rig.channel.take(Expect)
    assert not rig.ensure(second)
    rig.channel.say(Taken("a"), 0)
    assert not rig.ensure(second)
    assert rig.channel.take(Expect) == [], "one rank would promise what it is about to hand over"
    rig.channel.say(Taken("a"), 1)
    assert not rig.ensure(second)
    assert len(rig.channel.take(Expect)) == 1


def test_two_items_never_go_by_one_name() -> None:
    rig = Rig()
    names = {"a": "theirs", "b": "theirs"}
    view = request("r", "a", "b", delivery=Delivery(is_sent=True, names=names))
    rig.ensure(view)
    assert [body.mm_hash for body in rig.channel.take(Expect)] == ["theirs", "b"]


@pytest.mark.parametrize("names", [({"a": "b"}, None), (None, {"b": "a"})])
def test_two_requests_for_items_of_one_name_have_them_one_after_the_other(
    names: tuple[dict[str, str] | None, dict[str, str] | None],
) -> None:
    """The requests may name an item differently: one has the media, one a proxy's description."""
    rig = Rig()
    views = [
        request(item, item, delivery=Delivery(is_sent=True, names=theirs))
        for item, theirs in zip("ab", names, strict=True)
    ]
    (name,) = {"a", "b"} & {view.delivery.name_of(view.request_id) for view in views}
    for item, view in zip("ab", views, strict=True):
        for each in views[views.index(view) :]:
            assert not rig.ensure(each)
        assert rig.channel.expected() == [name]
        rig.channel.ready(name)
        assert rig.ensure(view)
        assert rig.load(item) == (ItemLoad(item, name),)
        rig.channel.taken(name)
        rig.scheduler.finished(view)
    check_scheduler(rig.scheduler)
    assert not rig.scheduler.is_waiting


def test_two_requests_that_call_an_item_differently_wait_for_the_same() -> None:
    """The workers would never be told to forget it by the other name."""
    rig = Rig()
    first = request("first", "a", delivery=Delivery(is_sent=True, names={"a": "theirs"}))
    second = request("second", "a")
    assert not rig.ensure(first)
    assert not rig.ensure(second)
    assert rig.channel.expected() == ["theirs"]
    for view in (first, second):
        rig.scheduler.finished(view)
    assert rig.channel.expected() == []


def test_who_holds_a_name_waits_for_nobody_who_waits_for_it() -> None:
    rig = Rig()
    old = Delivery(is_sent=True, names={"a": "y"})
    young = Delivery(is_sent=True, names={"b": "x"})
    assert not rig.ensure(request("old", "a", delivery=old))
    assert not rig.ensure(request("young", "b", "y", delivery=young))
    assert rig.channel.expected() == ["y", "x"], "the younger one's y waits for the older one's a"
    assert not rig.ensure(request("old", "a", "x", delivery=old))
    (*_, alias) = rig.channel.expected()
    rig.channel.failed(alias)
    assert not rig.ensure(request("old", "a", "x", delivery=old))
    assert rig.scheduler.take_unavailable() == {"old"}


def test_encoding_that_waits_for_consumers_is_logged_once_with_its_limit(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A request that waits has a line that says for what, however often it is asked for."""
    rig = Rig(is_producer=True, is_consumer=False)
    rig.channel.say(HeldBytes(1001))
    for _ in range(3):
        assert not rig.ensure(request("r", "a"))
        rig.channel.say(HeldBytes(1000))
        assert rig.ensure(request("r", "a"))
        rig.channel.say(HeldBytes(1001))
        rig.scheduler.plan((), **BUSY)
    lines = [each.getMessage() for each in caplog.records if "encoding waits" in each.message]
    assert len(lines) == 1
    assert "1001 bytes" in lines[0]
    assert "retain_bytes is 1000" in lines[0]
