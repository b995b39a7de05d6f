"""The way of a request: admission, prefill, hand-over, decode, and its waits."""

from typing import Any

import pytest

from tests.router.scripts import Example, examples
from tests.support.router_steps import Steps
from vllm_kvpool.router.control.events import DecodeEnded, Outcome
from vllm_kvpool.router.control.rates import COLD_SAMPLES
from vllm_kvpool.router.control.requests import PromptPath, RequestId
from vllm_kvpool.router.control.settings import OverloadConfig, Settings


@examples(
    """
prompt is computed, handed over and decoded
    fleet p / d; ask r -> prefill r p; prefilled r p saved=992 -> decode r d 992
    began r -> nothing; decoded r d -> nothing; phase r ended; count arrived 1; count served 1
short prompt is decoded at once
    fleet p / d; ask r 100 -> decode r d
prompt that the pool has is decoded at once
    fleet p / d; ask a 800 prefix=1,2,3 prefix_tokens=256 -> prefill a p; prefilled a p; began a
    ask b 800 prefix=1,2,3 prefix_tokens=256 -> decode b d
request that cannot be handed over is decoded at once
    fleet p / d; ask r hands_over=False -> decode r d
first token counts once
    fleet / d e; ask r 20 -> decode r d; wait 2; began r; began r
    decoded r d failed -> probe d, decode r e; wait 2; began r
    assert list(state.counts.waits) == [2.0]; assert work('e').num_starting == 0
"""
)
def test_way_of_a_request(example: Example) -> None:
    example.play()


def test_end_that_brings_the_first_token_counts_as_both() -> None:
    """The controller's state afterwards is the same as after two events at the same moment."""
    known: list[object] = []
    for is_one in (True, False):
        steps = Steps()
        steps.fleet(decode="d e")
        for number in range(4):
            name = f"r{number}"
            [call] = steps.ask(name, 20, prefix=(7,), prefix_tokens=16)
            steps.now += 2.0
            if not is_one:
                steps.began(name)
            ids = {"request_id": RequestId(name), "replica": call.replica}
            end = DecodeEnded(**ids, outcome=Outcome.OK, output_tokens=3, began=is_one)
            assert steps.step(end) == []
        steps.tick()
        state = steps.controller.state
        held = [(each.replica_id, each.cache.num_held) for each in state.fleet]
        known.append((state.rates.current(state.now), state.counts.events, held))
        known.append((list(state.counts.waits), len(state.pool.prefixes)))
    assert known[:2] == known[2:]


@examples(
    """
request in the queue is refused at its deadline
    with prefill_requests=1
    fleet p / d; ask first; ask r deadline=30; ask patient; phase r queued
    tick 29.9 -> nothing; tick 0.1 -> refuse r 503; count late 1
    prefilled first p -> prefill patient p, decode first d
request that waits for a decoder is refused at its deadline
    with decode_requests=1
    fleet p / d; ask first 20; ask r deadline=30; prefilled r p; phase r handing
    tick 29.9 -> nothing; tick 0.1 -> refuse r 503
request of a burst that waits at twice the target is refused, and what is computed goes on
    with prefill_requests=1 ttft_target_s=5
    fleet p / d; ask first; ask waits; tick 9.9 -> nothing; tick 0.1 -> refuse waits 503
    count late 1; prefilled first p -> decode first d
request that is refused late reads that front.max_wait_s has passed
    with prefill_requests=1 ttft_target_s=5
    fleet p / d; ask first; ask waits deadline=8; tick 8 -> refuse waits 503
    assert whys[0].startswith(
        'it has waited 8.0 s for a replica, longer than front.max_wait_s')
request that is refused late reads that twice its target has passed
    with prefill_requests=1 ttft_target_s=5
    fleet p / d; ask first; ask waits deadline=60; tick 10 -> refuse waits 503
    assert whys[0].startswith(
        'it has waited 10.0 s for a replica, longer than twice overload.ttft_target_s (10')
request that waits for an engine to come back is not refused for it
    with decode_requests=1 ttft_target_s=5
    fleet / d; ask first 20; ask r 20 deadline=100; failed d; tick 60 -> no refuse
    phase r handing; tick 40 -> refuse r 503
request that an engine has failed may wait for others longer
    with decode_requests=1 ttft_target_s=5
    fleet / d e; ask a 20 -> decode a d; ask b 20; failed d; decoded a d failed; phase a handing
    tick 30 -> no refuse; phase a handing
short prompts do not make a prefill replica look slow, as a step takes its time
    fleet p / d
    each 0-39: ask r$ 300 -> prefill r$ p; wait 0.06
        ; prefilled r$ p prompt_tokens=300 cached_tokens=290; cancel r$
    assert rates.prefill_tokens_per_s > 2000
sequences of a request fill a decoder as requests do
    with decode_requests=4
    fleet / d e; ask many 16 16 num_sequences=4 -> decode many d
    each 0-3: ask r$ 16 16 -> decode r$ e
    ask last 16 16 -> nothing; decoded many d; assert work('d').num_sequences == 1
every sequence of a request takes blocks
    fleet / d e; ask one 160 160 -> decode one d; ask four 160 160 num_sequences=4 -> decode four e
    assert [work('d').committed_blocks, work('e').committed_blocks] == [20, 50]
prompt that is computed may still find a decoder after its deadline
    with decode_requests=1 ttft_target_s=5
    fleet p / d; ask first 20; ask r deadline=30; wait 40; prefilled r p -> nothing
    tick 4.9 -> nothing; decoded first d -> decode r d
prompt that is being computed has no deadline
    with ttft_target_s=5
    fleet p / d; ask r deadline=30; tick 100 -> nothing; prefilled r p -> decode r d
    tick 100 -> nothing
answer that has stopped is given up in the end
    with resume_within_s=60 retry_pause_s=1000 ttft_target_s=5
    fleet / d; ask r 20 deadline=1; began r; failed d; decoded r d cancelled; phase r handing
    tick 59.9 -> nothing; tick 0.1 -> refuse r 503
""",
    given="ttft_target_s=1000",
)
def test_wait_of_a_request(example: Example) -> None:
    example.play()


@examples(
    """
request that would wait too long is refused at once
    fleet p / d
    each 0-2: ask m$; wait 0.1; prefilled m$ p
    ask large 9000; ask r 9000 -> refuse r 429; phase r ended; count shed 1
    assert steps.history[-1].retry_after_s >= 1
prompt that the pool has is no reason to refuse, neither itself nor those after it
    fleet p / d
    each 0-2: ask m$; wait 0.1; prefilled m$ p
    assert state.pool.add((1, 2, 3)) is None
    ask late 9000 deadline=1.0 -> refuse late 503
    ask soon 9000 deadline=1.0 prefix=1,2,3 prefix_tokens=2967 -> no refuse
    each 0-4: ask known$ 9000 prefix=1,2,3 prefix_tokens=2967 -> no refuse
    ask large 9000 -> no refuse; ask larger 9000 -> refuse larger 429
    ask known 9000 prefix=1,2,3 prefix_tokens=2967 -> no refuse; ask short 50 -> no refuse
nothing is refused by rates that are only assumed
    with max_pending_handoffs=2
    fleet p / d
    each 0-39: ask r$ 9000 deadline=60 -> no refuse; ask s$ 50 -> no refuse
without a replica everything is refused
    ask r -> refuse r 503
full queue refuses
    with prefill_requests=1 ttft_target_s=1000 max_queue=6
    fleet p / d
    each 0-5: ask r$ -> no refuse
    ask r6 -> refuse r6 429
pool that is down has nothing, whatever is known
    fleet p / d; measure p pool_is_up=False; measure d pool_is_up=False
    assert state.pool.add((1, 2, 3)) is None; ask r 2000 prefix=1,2,3 prefix_tokens=600
    assert [state.pool.unknown_tokens(x.ask) for x in state.requests.values()] == [2000]
prompt that the pool has asks for no prefill replica
    fleet p / d; ask a 2000 prefix=1,2,3 prefix_tokens=256
    assert state.rates.asked_tokens._total == 2000; prefilled a p; began a
    ask b 2000 prefix=1,2,3 prefix_tokens=256
    assert state.rates.asked_tokens._total == 2000 + 2000 - 768
    ask c 100; assert state.rates.asked_tokens._total == 2000 + 2000 - 768
""",
    given="ttft_target_s=1",
)
def test_request_is_let_in_or_refused(example: Example) -> None:
    example.play()


def test_time_in_which_the_pool_is_read_is_not_learned_as_computing() -> None:
    """Small remainders of long prompts looked dear, and were handed over."""
    steps = Steps()
    steps.fleet(decode="d")

    def serve(name: str, tokens: int, first: int, seconds: float) -> None:
        prefix = tuple(range(first, first + tokens // 256))
        steps.ask(name, tokens, prefix=prefix, prefix_tokens=256)
        steps.now += seconds
        steps.began(name)
        steps.decoded(name, "d")

    for number in range(COLD_SAMPLES + 3):
        serve(f"new-{number}", 2048, 1000 * number, seconds=0.2)
    learned = steps.controller.state.rates.snapshot(steps.now).local_prefill_s_per_token
    assert learned == pytest.approx(0.2 / 2048, rel=0.01)
    for number in range(5):  # the pool has most of it, which takes time too
        serve(f"known-{number}", 2048 + 256, 0, seconds=0.1)
    assert steps.controller.state.rates.snapshot(steps.now).local_prefill_s_per_token == learned


def test_prompt_that_the_pool_has_is_no_work_for_those_that_come_later() -> None:
    steps = Steps(Settings(prefill_requests=1), overload=OverloadConfig(ttft_target_s=1000.0))
    steps.fleet(prefill="p", decode="d")
    prefix = tuple(range(1, 29))
    steps.ask("known", 8000, prefix=prefix, prefix_tokens=256)
    steps.prefilled("known", "p")
    steps.began("known")
    steps.ask("busy", 5000)
    for number in range(4):
        long = {"prefix": (*prefix, 100 + number), "prefix_tokens": 256}
        assert steps.ask(f"r{number}", 12_000, **long) == []
        assert steps.phase(f"r{number}").value == "queued"
    pressure, rest = steps.controller.admission.pressure(""), 4 * (12_000 - 28 * 256)
    assert pressure.queued_tokens == 5000 + rest
    assert steps.controller.state.backlog_tokens() == rest
    assert pressure.reserved_tokens >= 4 * 12_000


@pytest.mark.parametrize(
    ("hands_over", "prefill", "ask", "path"),
    [
        (True, "p", {}, "handed_over"),
        (True, "p", {"tokens": 50}, "faster_locally"),
        (True, "p", {"prefix": (1, 2, 3), "prefix_tokens": 320}, "in_pool"),
        (True, "p", {"hands_over": False}, "not_splittable"),
        (True, "", {}, "no_prefill_replica"),
        (False, "p", {}, "switched_off"),
    ],
)
def test_path_of_a_prompt_is_counted_once_with_the_reason(
    hands_over: bool, prefill: str, ask: dict[str, Any], path: str
) -> None:
    steps = Steps(Settings(hands_over=hands_over))
    steps.fleet(prefill=prefill, decode="d")
    steps.controller.state.pool.add((1, 2, 3))
    [call] = steps.ask("r", **ask)
    if path == "handed_over":
        [call] = steps.prefilled("r", "p")
    steps.decoded("r", call.replica, Outcome.FAILED)  # another attempt is not counted again
    assert steps.controller.state.counts.prompts == {PromptPath(path): 1}


@examples(
    """
decode says how long the request has waited, without its computing
    with prefill_requests=1
    fleet p / d; ask first; ask r; wait 2; prefilled first p; wait 0.5
    prefilled r p prompt_tokens=1000 cached_tokens=320
    assert decodes[-1].waited_s == approx(2.0)
    ask local 50; assert decodes[-1].waited_s == 0.0
tokens in the bytes of a prompt are learned where an engine says them
    fleet / d
    each 0-19: ask r$ prompt_bytes=3000; began r$; wait 0.1; decoded r$ d prompt_tokens=1000
    tick; assert rates.tokens_per_byte == approx(1 / 3)
"""
)
def test_measures_of_a_request(example: Example) -> None:
    example.play()
