"""Dispatch of prompts and requests to replicas: to which replica, and when."""

from collections import deque

from tests.router.scripts import Example, examples
from tests.support.router_steps import Steps
from vllm_kvpool.router.control.events import Outcome
from vllm_kvpool.router.control.overload import Overload
from vllm_kvpool.router.control.request_flow import LOOK_AHEAD, MAX_PASSED_S
from vllm_kvpool.router.control.settings import OverloadConfig, Settings
from vllm_kvpool.router.control.states import Role

ALL_IN = OverloadConfig(ttft_target_s=1e6, max_queue=100_000)
GIVEN = "ttft_target_s=1e6 max_queue=100000"


@examples(
    """
prompts are given out by priority, then arrival
    with prefill_requests=1
    fleet p / d; ask first; ask late priority=1; ask a; ask b; ask urgent priority=-1
    prefilled first p -> ... prefill urgent p; prefilled urgent p -> ... prefill a p
    prefilled a p -> ... prefill b p; prefilled b p -> ... prefill late p
replica is given no more than its budget
    with prefill_tokens=2500
    fleet p / d; ask r0 -> prefill r0 p; ask r1 -> prefill r1 p; ask r2 -> nothing
    ask r3 -> nothing; prefilled r0 p -> ... prefill r2 p
short prompt does not wait behind long ones
    with prefill_requests=1
    fleet p / d; ask computed; ask waits; ask short 20 -> decode short d
prompt that goes first is tried though the one behind it found no room
    with prefill_tokens=2000
    fleet p / d; ask first 1000; ask large 1500 -> nothing
    ask urgent 500 priority=-1 -> prefill urgent p
without prefill replicas decoders compute prompts
    fleet / d; ask r -> decode r d
without decoders prefill replicas do everything
    fleet p /; ask r -> decode r p
without a pool every replica does everything
    fleet p / d; measure p pool_is_up=False; measure d pool_is_up=False
    ask a -> decode a d; ask b -> decode b p
    measure d pool_is_up=True; ask c -> prefill c p
prompt that was computed before the pool went is not expected
    with decode_requests=1
    fleet p / d; ask first 20; ask r; prefilled r p saved=992; measure p pool_is_up=False
    measure d pool_is_up=False -> ... decode r p
pool that comes back is taken for empty
    fleet p / d; ask a 800 prefix=1,2,3 prefix_tokens=256; prefilled a p; began a
    measure p pool_is_up=False; measure d pool_is_up=False; measure p; measure d
    ask b 800 prefix=1,2,3 prefix_tokens=256 -> prefill b p
old news of the pool do not count
    with stale_after_s=10
    fleet p / d; measure p pool_is_up=False; measure d pool_is_up=False
    tick 10.1; ask a -> prefill a p
without hand-over every replica serves
    with hands_over=False
    fleet p / d; ask a 2000 -> decode a d; ask b 2000 -> decode b p
replica that was loaded again is not left alone for what it said before
    with busy_pause_s=100
    fleet p / d; ask r; prefilled r p busy; failed p; tick; loaded p; ask s -> prefill s p
""",
    given=GIVEN,
)
def test_prompt(example: Example) -> None:
    example.play()


def test_prefill_that_is_away_for_a_moment_sends_a_part_of_the_queue_to_decoders() -> None:
    steps = Steps(Settings(prefill_requests=1, decode_requests=1), overload=ALL_IN)
    steps.fleet(prefill="p")
    steps.serve("d", Role.DECODE, blocks=100_000)
    for number in range(200):
        steps.ask(f"r{number}")
    steps.failed("p")
    steps.prefilled("r0", "p", Outcome.FAILED)
    state = steps.controller.state
    assert len(state.migration) == 2 * LOOK_AHEAD
    assert len(state.queue) == 200 - 1 - 2 * LOOK_AHEAD
    steps.tick(1.0)
    assert [type(each).__name__ for each in steps.loaded("p")] == ["Prefill"]


@examples(
    f"""
decoder is given no more hand-overs at a time than it may have
    with max_pending_handoffs=2
    fleet / d; ask a 20 -> decode a d; ask b 20 -> decode b d; ask c 20 -> nothing
    began a -> decode c d
locked decoder gets nothing
    fleet / d e; measure d used=990; tick 0.1; locked d
    each a b c d: ask $ 20 -> decode $ e
    measure d used=0; tick 2; locked
    each e f g h: ask $ 20 -> decode $ d
small requests pass one that fits nowhere, but not for ever
    serve d decode blocks=100; serve e decode blocks=100
    each a b c: ask $ {16 * 29} 16 hands_over=False
    assert len(work('d').active) == 2; ask large {16 * 89} 16 hands_over=False
    ask small 80 16 -> decode small e; tick {MAX_PASSED_S + 0.1}; phase large handing
    # The emptier one is kept free for it; the other one goes on.
    ask next 80 16 -> decode next d; decoded small e -> nothing; decoded b e -> decode large e
few pass at a time
    serve d decode blocks=100; ask first {16 * 19} 16 hands_over=False
    each 0-{LOOK_AHEAD - 1}: ask large$ {16 * 89} 16 hands_over=False
    ask small 20 -> nothing
""",
    given=GIVEN,
)
def test_request_to_decode(example: Example) -> None:
    example.play()


def test_the_last_decoder_is_not_locked() -> None:
    steps = Steps(Settings(max_pending_handoffs=1), overload=ALL_IN)
    steps.controller.state.overload = Overload(lock_at=0.9)
    steps.fleet(decode="d e")
    steps.measure("d", used=940)
    steps.measure("e", used=950)
    steps.tick(1.0)
    assert steps.controller.state.overload.locked == {"e"}
    assert steps.ask("r", 20)[0].replica == "d"


def test_decoders_that_are_as_full_as_the_router_fills_them_are_not_locked() -> None:
    """Each answer that ends makes room for the next: no batch runs emptier than it has to."""
    steps = Steps(Settings(max_pending_handoffs=1000), overload=ALL_IN)
    steps.fleet(decode="d e f")
    given = deque(each for number in range(400) for each in steps.ask(f"r{number}", 200))
    full = [each.work.committed_blocks for each in steps.controller.state.fleet]
    assert min(full) > 900
    for each in given:
        steps.began(each.request_id)
    for _ in range(100):
        ended = given.popleft()
        more = steps.decoded(ended.request_id, ended.replica, output=100)
        assert len(more) == 1
        given += more
        steps.began(more[0].request_id)
        steps.tick(0.1)
        assert steps.controller.state.overload.locked == frozenset()
        assert [each.work.committed_blocks for each in steps.controller.state.fleet] == full


NEW = """
    fleet p / d; ask first; start prefill; state p prefill_stealing; state d decode
    state n-1 loading_prefill_assigned"""
"""`p` computes a prompt, and another engine is loading."""
GOES = "{when drained: drain n-1|when removed: remove n-1}"
WAYS = f"{GOES[:-1]}|when it fails: failed n-1|when flipped: set n-1 decode}}"


@examples(
    f"""
request that finds no room is bound to a loading replica up to its limit{NEW}
    each 0-5: ask r$ -> nothing
    assert [each.ask.request_id for each in work('n-1').bound] == ['r0', 'r1', 'r2', 'r3']
    phase r3 bound; phase r4 queued
loaded replica works off the requests that it was bound to{NEW}
    each 0-2: ask r$
    loaded n-1 -> prefill r0 n-1; state n-1 prefill_assigned
    prefilled r0 n-1 -> ... prefill r1 n-1; prefilled r1 n-1 -> ... prefill r2 n-1
    state n-1 prefill; state p prefill
loaded replica without bound requests takes from the queue at once
    with prefill_requests=8 prefill_tokens=1500{NEW}
    each 0-5: ask r$ 300
    loaded n-1; state n-1 prefill; phase r5 prefilling
old replica takes bound requests before younger ones of the queue{NEW}
    each a b c d e f: ask $
    prefilled first p -> ... prefill a p; prefilled a p -> ... prefill b p; count stolen 2
more urgent request of the queue goes before bound ones{NEW}
    each a b c d: ask $
    ask urgent priority=-1; prefilled first p -> ... prefill urgent p
small prompts do not pass a larger one that is bound
    with prefill_requests=16 prefill_tokens=3000{NEW}
    ask large 2500; phase large bound
    each 0-7: ask small$ 500
    assert work('p').prefill_tokens == 1000; prefilled first p -> ... prefill large p
old replica steals from a loaded one the requests that it has no room for{NEW}
    each a b c: ask $
    loaded n-1; phase b bound; prefilled first p -> ... prefill b p
bound request is refused at its deadline and can be cancelled{NEW}
    ask late deadline=30; ask gone; cancel gone -> nothing; tick 30 -> refuse late 503
    assert work('n-1').bound == []
bound request waits again {WAYS}{NEW}
    ask r; {{}}; phase r queued; state p prefill; prefilled first p -> ... prefill r p
request that is bound to a loaded replica waits again {GOES}{NEW}
    ask r; ask s; loaded n-1; state n-1 prefill_assigned; {{}}; state n-1 draining_prefill
    phase r prefilling; phase s queued; prefilled first p -> ... prefill s p
request that is bound to a loaded replica waits again when it mutates{NEW}
    ask r; ask s; loaded n-1; state n-1 prefill_assigned; set n-1 decode
    state n-1 prefill_to_decode
    phase r prefilling; phase s queued; prefilled first p -> ... prefill s p
request that is bound to a loaded replica waits again when it fails{NEW}
    ask r; ask s; loaded n-1; state n-1 prefill_assigned; failed n-1; state n-1 failed
    phase r prefilling; phase s queued; prefilled first p -> ... prefill s p
bound requests go to decoders when no replica is left to compute them{NEW}
    ask r; failed p -> ... decode r d
without take-over nothing is bound
    with live_takeover=False
    fleet p / d; ask first; start prefill; state n-1 loading_prefill; ask r; phase r queued
    loaded n-1 -> prefill r n-1
""",
    given=f"{GIVEN} prefill_requests=1",
)
def test_request_bound_to_a_replica_that_loads(example: Example) -> None:
    example.play()


@examples(
    """
flipped replica decodes itself what it has computed
    fleet p / d; ask first 20; ask r; ask s; prefilled r p; set p decode
    state p prefill_to_decode; phase r handing; prefilled s p -> ... decode r p; state p decode
flipped replica keeps its own requests, and others do not take their place before
    fleet p q / d; ask first 20; ask older; ask own; ask last; ask short 20
    place older p; place last p; prefilled older p; prefilled own q; set q decode
    place own q; phase older handing
""",
    given=f"{GIVEN} decode_requests=1",
)
def test_flip(example: Example) -> None:
    example.play()
