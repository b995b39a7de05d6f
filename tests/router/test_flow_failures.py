"""Requests that are cancelled, or whose engine or prompt fails."""

from tests.router.scripts import Example, examples


@examples(
    """
request is cancelled while it is computed
    fleet p / d; ask r; cancel r -> nothing; phase r ended; cancel r -> nothing
    prefilled r p cancelled -> nothing; assert not work('p'); count cancelled 1
request is cancelled while it waits for a decoder
    with decode_requests=1
    fleet p / d; ask other 100; ask r; prefilled r p; phase r handing; cancel r -> nothing
    phase r ended; cancel r -> nothing; assert not work('p'); count cancelled 1
request is cancelled before its first token
    fleet p / d; ask r; prefilled r p; cancel r -> nothing; phase r ended; cancel r -> nothing
    began r -> nothing; decoded r d cancelled -> nothing; assert not work('p'); count cancelled 1
request is cancelled while its answer flows
    fleet p / d; ask r; prefilled r p; began r; cancel r -> nothing; phase r ended
    cancel r -> nothing; began r -> nothing; decoded r d cancelled -> nothing
    assert not work('p'); count cancelled 1
answer that is there after its client has gone changes nothing
    fleet p / d; ask r; cancel r; prefilled r p -> nothing; phase r ended
"""
)
def test_cancelled_request(example: Example) -> None:
    example.play()


@examples(
    """
prompt that fails is computed elsewhere
    fleet a b / d; ask r -> prefill r a; prefilled r a failed -> probe a, prefill r b
prompt that is rejected is decoded for the engine's own words
    fleet p / d; ask r; prefilled r p rejected -> decode r d
    decoded r d rejected -> nothing; count rejected 1
replica that refuses work is left alone for a moment
    fleet p / d; ask r; prefilled r p busy -> nothing; phase r queued
    tick 0.9 -> nothing; tick 0.1 -> prefill r p
replica that has lost a call is given no work until it has answered
    fleet / d e; ask r 20 -> decode r d; decoded r d lost output=0 -> ... decode r e
    ask s 20 -> decode s e; ask t 20 -> decode t e
answer goes on elsewhere
    fleet p / d e; ask r; prefilled r p saved=992 -> decode r d 992; began r
    decoded r d failed -> probe d, decode r e 992; count resumed 1
answer that no engine can go on with ends
    fleet / d e; ask r 20 -> decode r d; began r; decoded r d hopeless -> probe d
    phase r ended; count hopeless 1
request that fails everywhere is given up
    with max_attempts=3 max_lost=3
    fleet / a b c d; ask r 20 -> decode r a; decoded r a failed -> ... decode r b
    decoded r b failed -> ... decode r c; decoded r c failed -> ... refuse r 502
    phase r ended; count given_up 1
    assert whys == ['3 attempts have failed (flow.max_lost=3), the last one at c']
request that every engine is too busy for is given up
    with max_attempts=3 max_lost=3
    fleet / a b c d; ask r 20 -> decode r a; decoded r a busy -> ... decode r b
    decoded r b busy -> ... decode r c; decoded r c busy -> ... refuse r 503
    phase r ended; count given_up 1
    assert whys == ['3 attempts have failed (flow.max_attempts=3), the last one at c']
prompt that fails everywhere is given up
    with max_attempts=1
    fleet p / d; ask r; prefilled r p failed -> ... refuse r 502
call that ends with its replica is not asked about again
    fleet / d e; ask r 20 -> decode r d; failed d -> abort r d; phase r decoding
    decoded r d cancelled -> decode r e
prompt that was done when its replica failed is handed over
    fleet p / d; ask r; failed p; prefilled r p saved=992 -> decode r d 992
call that a drain sends away has not failed
    with drain_timeout_s=10 max_attempts=1
    fleet / d e; ask r 20 -> decode r d; began r; drain d; tick 9.9 -> nothing
    tick 0.1 -> abort r d; tick 10 -> nothing; decoded r d cancelled -> decode r e
answer that went on elsewhere counts whole
    fleet / d e
    each 0-29: ask r$ 20 -> decode r$ d; began r$; decoded r$ d failed output=500 -> ... decode r$ e
        ; began r$; decoded r$ e output=500; wait 1
    assert rates.output_tokens_per_request == approx(1000)
only a first attempt tells how long a start takes
    fleet / d e; assert rates.local_prefill_s_per_token == approx(0.0001)
    each 0-29: ask r$ 100 -> decode r$ d; wait 0.01; began r$
        ; decoded r$ d failed -> ... decode r$ e; wait 1000; began r$; decoded r$ e
    assert rates.local_prefill_s_per_token == approx(0.01 / 100)
request that may end engines, as its call has {failed|lost|cancelled}, reaches one other at most
    fleet / a b c d; ask r 20 -> decode r a; decoded r a {} -> ... decode r b
    decoded r b {} -> ... refuse r 502
"""
)
def test_failure(example: Example) -> None:
    example.play()
