"""The scheduler's side: what it sends to workers and answers to the engine."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.embeds.invariants import check_scheduler
from tests.embeds.scheduler_rig import BUSY, ROWS, SENT, STEP, Example, Rig, examples, play, request
from vllm_kvpool.embeds.availability import EmbedsRequest, Feature
from vllm_kvpool.embeds.params import MAX_TARGETS, NOWHERE, Delivery, read_delivery
from vllm_kvpool.embeds.protocol.messages import (
    Code,
    HeldBytes,
    ItemNews,
    MetricSamples,
)
from vllm_kvpool.embeds.scheduler import ItemLoad
from vllm_kvpool.metrics import named_values

# What holds a request back


@examples(
    """
an item of a started request comes before those of older requests until it is preempted
    # An item has one order at a time: two requests would wait for each other's memory.
    consumer; ask old shared; ask young a shared
    heard -> expect shared 0 | expect a 1 | joins shared 0
    ask young started=True; ask young started=True
    heard -> any order reorder a started 1 | reorder shared started 1
    ask young; heard -> any order reorder a 1 | reorder shared 0
the end of an item's oldest request is told with the next one's order
    # Else the item would hold back the requests between the two, as if the oldest still waited.
    consumer; ask x a; ask y b; ask z a; heard -> expect a 0 | expect b 1 | joins a 0
    end x; heard -> ... reorder a 2
    end z; heard -> no reorder
a request waits no longer for an item whose tokens are computed
    # A prefix was found, or the engine's cache had the item. The request repeats the second.
    consumer; ask r a b b; heard
    ask r computed=10 started=True; heard -> only forget a
    ask r computed=20 started=True; heard -> no forget
    ask r computed=30 started=True; heard -> only forget b
    end r; heard -> no forget
a request that has not started keeps an item that a prefix covers
    # The prefix may go before the request starts, and the producer may have dropped the item.
    consumer; ask r a b; ready a; ask r computed=10 -> waits; ready b; ask r -> goes
    heard -> no forget; load a -> load a
a request without parameters goes on at once
    consumer; ask r a b media=True sent=False -> goes; has a -> missing; waiting False
    heard -> nothing
a request with neither parameters nor media is given up
    # The engine would end if it were to encode what it does not have.
    consumer; ask r a sent=False -> waits; unavailable -> r; outstanding -> nothing
    offered b; ask s b sent=False -> waits; unavailable -> nothing
a request without parameters asks configured peers
    consumer has_peers=True; ask r a media=True sent=False -> waits
a request without parameters asks those who offered its item
    consumer; offered a; ask r a media=True sent=False -> waits; outstanding -> a
every item of the step is asked for at once, and once
    consumer; ask r a b c -> waits
    each 0-3: ask r -> waits
    heard -> expect a 0 | expect b 0 | expect c 0
an order is the age of its request
    consumer
    each x y z: ask $ $a $b
    heard -> expect xa 0 | expect xb 0 | expect ya 1 | expect yb 1 | expect za 2 | expect zb 2
who could encode an item only asks for it
    consumer is_producer=True has_peers=True; ask r a media=True sent=False; ask s b media=True
    heard -> expect a 0 patience=probe | expect b 1
who encodes itself does not wait for itself
    # A proxy may choose one engine for both halves of a request.
    consumer is_producer=True own_endpoint=tcp://me:1; ask r a peers=me
    heard -> expect a 0 patience=probe; ask s b peers=me,other
    heard -> expect b 1 peers=tcp://other:1
an expectation has the producer's name of the item and its address
    consumer; ask r a names=a:theirs peers=e; heard -> expect theirs 0 peers=tcp://e:1
    ready theirs; ask r -> goes; load a -> load a as theirs
"""
)
def test_what_holds_a_request_back(example: Example) -> None:
    example.play()


def test_news_of_requests_that_have_ended_is_no_item() -> None:
    """The worker has dropped the item since, and brings it again: the engine would end."""
    rig = Rig()
    first, second = request("first", "a"), request("second", "a")
    rig.ensure(first)
    rig.channel.ready("a")
    late = rig.channel.words.copy()
    rig.channel.words.clear()
    rig.scheduler.finished(first)
    assert not rig.ensure(second)
    rig.channel.words.extend(late)
    assert not rig.ensure(second)
    assert not rig.scheduler.has("a")
    rig.channel.ready("a")
    assert rig.ensure(second)


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


# Items that the engine has


@examples(
    """
an item that may lose its place in the step waits for the next
    # Without its media the engine could not encode it again.
    allocate room; ask media x media=True -> goes; ask none x -> waits; plan
    ask none -> goes; allocate room; plan x; ask none -> waits; outstanding -> x
a request with media for which the engine may evict endangers items of later requests
    # vLLM evicts before it allocates; without blocks, say, it then allocates nothing.
    ask first y media=True sent=False -> goes; ask none x -> waits
    ask media x media=True -> goes; plan x; ask none -> waits; outstanding -> x
a request without media for which the engine may evict endangers items of later requests
    ask first y -> waits; ready y; ask first -> goes; ask none x -> waits
    ask media x media=True -> goes; plan x; ask none -> waits; outstanding -> y | x
a request that the engine refuses in every step starves no other
    # The other may hold the room that the first waits for. Each has every second step.
    ask first y media=True sent=False -> goes; ask second x -> waits; plan
    ask first -> waits; ask second -> goes; plan
    ask first -> goes; ask second -> waits; plan
    ask first -> waits; ask second -> goes; plan
    # Alone the first waits for nobody.
    end second
    each 0-2: ask first -> goes
a request that waits for another item holds up no evictions
    ask first y media=True sent=False -> goes; ask second x pending -> waits; plan
    each 0-1: ask first -> goes; ask second -> waits; plan
an item that the engine reaches before it makes room is not asked for
    # The engine keeps the items that it has reached. The request repeats one.
    ask both x y x -> waits; heard -> expect y 1; ready y; ask both -> goes; heard -> nothing
an item that may lose its place to another of its request is asked for
    ask alone x -> goes; heard -> nothing
    ask both y x -> waits; heard -> expect y 2 | expect x 2 patience=probe
    ready y; ask both -> waits; ready x; ask both -> goes; unavailable -> nothing
    allocate y; has x -> yes; end both; waiting False
an item that may lose its place to another of its request, and that nobody has, fails it
    ask both y x -> waits; ready y; ask both -> waits; failed x; ask both -> waits
    unavailable -> both; allocate y; has x -> missing; end both; waiting False
""",
    "consumer; ask before x; ready x; ask before; load x; end before; heard",
)
def test_items_that_the_engine_has(example: Example) -> None:
    example.play()


def with_resident(item: str) -> Rig:
    """An engine that has an item, as an earlier request left it."""
    return play(f"consumer; ask before {item}; ready {item}; ask before; load {item}; end before")


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


# Ready


@examples(
    """
an item is there when every rank has it
    consumer ranks=3; ask r a
    each 2 0: ready a $; ask r -> waits; has a -> missing
    ready a 2; ask r -> waits; ready a 1; ask r -> goes; has a -> yes
ranks that are brought different bytes are told which to have
    consumer ranks=2; ask one a; ask other a
    each 0 1: heard $
    ready a 1 digest=y; ready a 0 digest=x; ask one -> waits
    # The engine would load what is not there.
    has a -> missing
    each 0 1: heard $ -> expect a 0 digest=x | joins a 0 digest=x
    # Rank 1 spoke before it was told, and rank 0 may be handing over another one.
    ready a 1 digest=y; ask one -> waits; ready a 1 digest=x; ask one -> waits
    ready a 0 digest=x; ask one -> goes; ask other -> goes; load a -> load a; unavailable -> nothing
an encoding that a rank has already is chosen
    consumer ranks=3; ask r a; heard; coming a x 0; ready a 2 digest=z; ask r
    heard -> expect a 0 digest=z
a report from before the choice of an encoding does not count
    # The rank would hand the item over, and then bring it again for the choice.
    consumer ranks=2; ask r a; coming a x 0; ready a 1 digest=y; ready a 0 digest=y; ask r -> waits
    ready a 1 digest=y; ask r -> waits; ready a 0 digest=y; ask r -> goes
an encoding that cannot be had any more gives way to the other
    consumer ranks=2; ask r a
    each 0 1: heard $
    ready a 0 digest=x; coming a y 1; ask r -> waits; failed a 1; ask r -> waits
    each 0 1: heard $ -> expect a 0 digest=x | expect a 0 digest=y
    each 0 1: ready a $ digest=y
    ask r -> goes
ranks that can never agree have nothing
    consumer ranks=2; ask media a media=True; ask one a; ask other a
    ready a 0 digest=x; ready a 1 digest=y; poll; failed a 1; poll; failed a 0
    ask media -> goes; has a -> missing; ask one -> waits; ask other -> waits
    unavailable -> one | other
encoders cannot have the ranks choose for ever
    consumer ranks=2; ask r a
    each 0-99: coming a x$ 0; coming a y$ 1; poll; failed a 1
    ask r -> waits; unavailable -> r
a rank that comes back is told which encoding to have
    consumer ranks=2; ask r a; ready a 0 digest=x; ready a 1 digest=y; ask r; heard 1
    restarts 1; ask r; heard 1 -> only expect a 0 digest=x
what a rank says after the failure changes nothing
    consumer ranks=2; ask one a media=True; ask other a media=True; failed a 0; ask one -> goes
    ready a; poll; has a -> missing
an item that is there stays until it is loaded
    # The worker lets go of it then, without a message.
    consumer; ask r a; heard; ready a
    each 0-9: ask r -> goes; has a -> yes; plan -> nothing
    load a -> load a; ask r -> goes; waiting False; heard -> nothing; plan -> nothing
an item is there until no request waits for it
    consumer; ask r a; heard; ready a; ask r; end r; has a -> missing; heard -> forget a
    waiting False
an encode is no load
    consumer; ask r a media=True sent=False -> goes; allocate a; plan -> nothing
an item is not asked for while the workers are taking it
    # One rank would promise what it is about to hand over.
    consumer ranks=2; ask first a; ready a; ask first -> goes; take a; plan -> load a
    # The engine has lost it already.
    plan a; heard; ask second a -> waits; took a 0; ask second -> waits; heard -> nothing
    took a 1; ask second -> waits; heard -> only expect a 1
"""
)
def test_when_an_item_is_ready(example: Example) -> None:
    example.play()


# Many requests, one item


@examples(
    """
one item serves many requests, and a cancelled request takes it from nobody
    consumer
    each 0-4: ask r$ logo -> waits
    heard; end r3 r0; heard -> no forget; ready logo
    each 1 2 4: ask r$ -> goes
    load logo -> load logo
    # It is in the engine's cache now.
    each 1 2 4: ask r$ -> goes
    plan -> nothing; end r1 r2 r4; heard -> no forget
the last request that is cancelled ends its item
    consumer ranks=2
    each 0-2: ask r$ logo
    each 0-2: outstanding 1 -> logo; end r$
    outstanding 0 -> nothing; outstanding 1 -> nothing; waiting False
two items never go by one name
    consumer; ask r a b names=a:theirs,b:theirs; heard -> expect theirs 0 | expect b 0
two requests for items of one name have them one after the other
    # The requests may name an item differently: one has the media, one a proxy's description.
    consumer; ask one a names=a:b -> waits; ask other b -> waits; outstanding -> b
    ready b; ask one -> goes; load a -> load a as b; end one
    ask other -> waits; outstanding -> b; ready b; ask other -> goes; load b -> load b; end other
    waiting False
two requests for items of one name have them one after the other, whichever is renamed
    consumer; ask one a -> waits; ask other b names=b:a -> waits; outstanding -> a
    ready a; ask one -> goes; load a -> load a; end one
    ask other -> waits; outstanding -> a; ready a; ask other -> goes; load b -> load b as a
    end other; waiting False
two requests that call an item differently wait for the same
    # The workers would never be told to forget it by the other name.
    consumer; ask first a names=a:theirs -> waits; ask second a -> waits; outstanding -> theirs
    end first second; outstanding -> nothing
a request that holds a name waits for no request that waits for it
    # The younger request's y waits for the older one's a.
    consumer; ask old a names=a:y -> waits; ask young b y names=b:x -> waits; outstanding -> y | x
"""
)
def test_requests_that_share_an_item_or_its_name(example: Example) -> None:
    example.play()


# Failure


@examples(
    """
an item whose media are here is encoded here after its failure
    consumer; ask r a b media=True; failed a; ask r -> waits; ready b; ask r -> goes
    has a -> missing; has b -> yes; unavailable -> nothing; ask r; outstanding -> b
a request whose media are elsewhere is given up once
    consumer; ask r a b; failed a; ask r -> waits; unavailable -> r; unavailable -> nothing
    end r; unavailable -> nothing; outstanding -> nothing
a request that ends before it is given up is not given up
    consumer; ask r a; failed a; ask r; end r; unavailable -> nothing
a failure is told to each request that waits, and a later request asks again
    consumer; ask m a media=True; ask w a; failed a; ask m -> goes; ask w -> waits; unavailable -> w
    ask later a -> waits; outstanding -> a
a failure on one rank frees the others
    consumer ranks=3; ask r a media=True; ready a 0; failed a 1; ask r -> goes
    each 0-2: outstanding $ -> nothing
"""
)
def test_failures(example: Example) -> None:
    example.play()


# Workers come and go


@examples(
    """
nothing is scheduled before the workers are there
    consumer; away; ask plain a media=True sent=False -> waits; waiting True; back
    ask plain -> goes
a worker that has been restarted is told everything, and the others nothing
    consumer ranks=2 is_producer=True; ask r a b consumers=c; ready a; weights v1; ready a of=1
    poll
    has a -> yes
    each 0 1: heard $
    restarts 1; poll; heard 0 -> nothing
    heard 1 -> weights 1 print v1 | requested a b | expect a 0 | expect b 0 | push a tcp://c:1
      | push b tcp://c:1
    # The restarted worker has lost the item.
    has a -> missing; ready a 1 of=1; ready b of=1; ask r -> goes
a worker that was away forgets items of no request, but for those that a step is loading
    consumer ranks=2; ask gone a b; ask kept b; ask l c -> waits; ready c; ask l -> goes
    allocate c; away; end gone; back; restarts 1; ask kept -> waits; heard 1 -> ... requested b c
workers that were away keep items that a step has yet to load
    # Through a second session, and through a change of the weights: the engine would end.
    consumer ranks=2; ask r a; ready a; ask r -> goes; take a; plan -> load a; heard 1
    each 0-1: restarts 1; poll; heard 1 -> ... requested a
    weights v1; took a 0; poll; weights v2; took a 1; poll; weights v3
    heard 1 -> ... weights 1 print v1 a | weights 2 print v2 a | weights 3 print v3
an item that a step has not loaded in time is not kept
    consumer; ask r a; ready a; ask r; take a; loading_ends; weights v1
    heard -> ... weights 1 print v1
requests go on without workers that are away for long
    consumer; away; ask m a media=True -> waits; ask w b -> waits; silent 1.03
    ask m -> goes; has a -> missing; ask w -> waits; unavailable -> w
workers that say that they end are not waited for
    consumer; ask m a media=True -> waits; away; silent inf; ask m -> goes
a worker that hangs holds up requests that need it, and forgets those that went on without it
    consumer; ask m a media=True; silent 0.9; ask m -> waits
    ask plain b media=True sent=False -> goes; silent 1.1; ask m -> goes
    back; outstanding -> nothing
lost workers are not told to forget items that a step has yet to load
    # They may come back before that step: the engine would end without the item.
    consumer; ask r a; ready a; ask r -> goes; take a; plan -> load a; plan a; heard; silent 1.1
    ask s a media=True -> goes; ask t a -> waits
    # Another item by the same name.
    ask u b names=b:a -> waits; unavailable -> t | u; heard -> nothing
    weights next; heard -> weights 1 print next a
    back; restarts; ask v a; heard -> ... requested a
lost workers' items defer no encode
    producer; holds 1001; ask p a -> waits; away; silent inf; ask q b -> goes
words about unknown items change nothing
    consumer; ask r a; heartbeat; ready unknown; failed unknown; offered a; ask r -> waits
    outstanding -> a
"""
)
def test_workers_come_and_go(example: Example) -> None:
    example.play()


# Weights and the engine's cache


@examples(
    """
new weights make ready items stale
    consumer ranks=2; ask r a; ready a 0; poll; heard; weights v1
    heard -> first weights 1 print v1; outstanding -> a
    # What was said before the change does not count.
    ready a of=0; ask r -> waits; failed a of=0; ask r -> waits; ready a of=1; ask r -> goes
    plan -> weights 1
a request that is told again is one that still waits, {weights: weights next|worker: restarts}
    # Each may name an encoder of its own.
    consumer
    each a b c: ask $ image peers=$
    heard -> ... expect image 0 peers=tcp://a:1 | joins image 0 peers=tcp://b:1
    end a; heard; {}; ask plain sent=False
    heard -> ... expect image 1 peers=tcp://b:1 | joins image 1 peers=tcp://c:1
a failure of old weights is tried again
    consumer; ask r a; failed a; poll; weights v1; ask r -> waits; unavailable -> nothing
    outstanding -> a
an evicted item is asked for again
    consumer; ask r a; ready a; ask r; load a; ask r -> goes; plan a; ask r -> waits
    outstanding -> a; ready a; ask r -> goes; load a -> load a
an item that is evicted and loaded in one step is there
    consumer; ask r a; ready a; ask r; load a; allocate a; plan a; ask r -> goes
every item is asked for again after a reset of the engine's cache
    consumer; ask r a; ready a; ask r; load a; reset_cache; ask r -> waits; outstanding -> a
an engine that asks for an item that it had has it no more
    consumer; ask r a; ready a; ask r; load a; has a -> missing; ask r -> waits; outstanding -> a
"""
)
def test_weights_and_evictions(example: Example) -> None:
    example.play()


# A producer


@examples(
    """
a producer has items sent where the request says, once
    producer
    each 0-2: ask r a b consumers=c,d -> goes
    heard -> push a tcp://c:1,tcp://d:1 | push b tcp://c:1,tcp://d:1
    ask s a consumers=c,d -> goes; heard -> push a tcp://c:1,tcp://d:1
encoding waits for consumers
    producer; holds 1000; ask r a sent=False -> goes; holds 1001; ask r -> waits; waiting True
    ask r -> waits; holds 10; ask r -> goes; waiting False
back pressure does not hold requests whose items are encoded
    producer; allocate a; holds 10000; ask r a sent=False -> goes; ask text sent=False -> goes
    ask far z sent=False at=1000 -> goes; ask s a b sent=False -> waits
a request reuses the engine's items only in its steps
    # Kept on, items that no consumer takes would hold back the encode that a request waits for.
    producer; allocate a; holds 1001; ask waits a b -> waits; ask goes a a -> goes
    plan of=other -> nothing; ask waits -> waits; ask goes -> goes
    plan of=goes -> reuse a; plan of=goes -> nothing
"""
)
def test_producers(example: Example) -> None:
    example.play()


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
    rig, view = Rig(ranks=2), request("r", "a", media=True)
    rig.ensure(view)
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


def test_codes_reach_the_log(caplog: pytest.LogCaptureFixture) -> None:
    rig, view = Rig(), request("r", "a")
    rig.ensure(view)
    rig.channel.failed("a", code=Code.TOO_LARGE)
    rig.ensure(view)
    assert "too_large: for a reason" in caplog.text
    assert "request r fails" in caplog.text


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
