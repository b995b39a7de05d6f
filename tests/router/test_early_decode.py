"""A decoder is asked while a prompt is computed: who, how many, what becomes of both calls."""

from tests.router.scripts import Example, examples
from vllm_kvpool.router.control.handovers import APART_AFTER, FIRST_PAUSE_S
from vllm_kvpool.router.control.rates import COLD_SAMPLES
from vllm_kvpool.router.control.request_flow import MAX_PASSED_S

GIVEN = "ttft_target_s=1000"


def early(name: str, decoder: str = "d") -> str:
    return f"ask {name} -> prefill {name} p told, decode {name} {decoder} all"


def late(name: str) -> str:
    return f"ask {name} -> prefill {name} p told"


@examples(
    f"""
decoder is asked with the prompt and told where notices come from
    told p / d; {early("r")}; assert decodes[0].notices == ('tcp://p:5555',)
    phase r decoding; assert work('d').committed_blocks > 0
    assert work('p').prefill_tokens == 1000; prefilled r p saved=992 -> nothing
    assert work('p').prefill_tokens == work('d').num_awaiting == 0; began r -> nothing
    decoded r d -> nothing; phase r ended; count served 1
    paths handed_over=1
prefill replica of a release without notices is handed over from as before
    told p / d; measure p; ask r -> prefill r p; prefilled r p saved=992 -> decode r d 992
    assert decodes[0].notices == ()
decoder of a release without notices is handed over to as before
    # It would save nothing of a request with options that it does not know.
    told p / d; measure d; {late("r")}; prefilled r p saved=992 -> decode r d 992
    assert decodes[0].notices is None
prefill replica whose endpoints are not known is waited for
    # Of several engines behind one address any may get the request.
    told p / d; assert steps.measure('p', notices=[]) == []; {late("r")}
    prefilled r p saved=992 -> decode r d 992
decoder without room is asked once the prompt is computed
    with decode_requests=1
    told p / d; ask first 20; {late("r")}; phase r prefilling
    prefilled r p saved=992 -> nothing; decoded first d -> decode r d 992
prompts that are computed have a decoder before those that are not
    # The large one does not fit; the small one would, and would take what is freed.
    told p / d; ask first 8000 hands_over=False; ask large 10000 -> prefill large p told
    prefilled large p saved=9984; phase large handing; {late("small")}
    decoded first d -> decode large d 9984
blocks for which others wait are not held for a prompt
    told p / d; ask first 8000 hands_over=False; ask large 4000 -> prefill large p told
    prefilled large p saved=3840 -> decode large d 3840
half of the requests that a decoder starts may wait for prompts
    with max_pending_handoffs=4 prefill_requests=8
    told p / d; {early("a")}; {early("b")}; {late("c")}; {late("d")}
    ask short 20 -> decode short d; prefilled a p saved=992 -> nothing; {early("e")}
    assert work('d').num_awaiting == 2
decoders full of requests that wait serve all in the end
    with max_pending_handoffs=2 prefill_requests=4
    told p q / d e
    each a b c d: ask $p; ask $q
    phase ap decoding; phase aq decoding
    each b c d: phase $p prefilling; phase $q prefilling
    each a b c d: prefilled $p p saved=992; began $p; prefilled $q q saved=992; began $q
    each a b c d: phase $p decoding; decoded $p d; phase $q decoding; decoded $q e
    count served 8
""",
    given=GIVEN,
)
def test_early_decode(example: Example) -> None:
    example.play()


TIMES = f"0-{COLD_SAMPLES + 2}"
UNTIL_BEGAN = """ask r$; wait 0.3; prefilled r$ p saved=992; wait 0.05
        ; began r$; decoded r$ d output=1"""


@examples(
    f"""
time of a hand-over is that from the end of its prefill {{told|fleet}}
    {{}} p / d
    each {TIMES}: {UNTIL_BEGAN}
    assert rates.measured()['handoff_overhead_s'] == approx(0.02375)
    assert rates.measured()['transfer_tokens_per_s'] == approx(20_000)
    assert rates.measured()['prefill_tokens_per_s'] == approx(1000 / 0.3)
first token before the prompt's answer teaches nothing
    # The decoder may have computed it, too.
    told p / d
    each {TIMES}: ask r$; wait 0.3; began r$; prefilled r$ p saved=992; decoded r$ d output=1
    assert {{'handoff_overhead_s', 'transfer_tokens_per_s'}} <= rates.unmeasured
    assert 'prefill_tokens_per_s' not in rates.unmeasured
usage of an early request counts the tokens that the prefill replica computed, not those cached
    told p / d
    each {TIMES}: ask r$; wait 0.1
        ; prefilled r$ p saved=992 prompt_tokens=1000 cached_tokens=500; cancel r$
        ; decoded r$ d cancelled
    assert rates.prefill_tokens_per_s == approx(5000, rel=0.1)
requests that wait for prompts do not make a decoder look behind
    told p / d; ask r; measure d notices=d waiting=1; assert state.table.models_behind() == []
    # The one that waits is not the short one.
    ask short 20; measure d notices=d waiting=1; assert state.table.models_behind() == []
    measure d notices=d waiting=2; assert state.table.models_behind() != []
short prompt beside one that waits is alone in its engine
    told p / d; ask r; ask short 200; assert work('d').alone is work('d').active['short']
    # The other one does nothing there yet.
    ask s; assert work('d').alone is work('d').active['short']; began short
    prefilled r p saved=992; assert work('d').alone is work('d').active['r']
""",
    given=GIVEN,
)
def test_measures_of_early_decode(example: Example) -> None:
    example.play()


@examples(
    f"""
decoder whose prompt is {{busy|rejected}} is asked again to wait no more
    told p / d; ask r; prefilled r p {{}} -> abort r d
    decoded r d lost output=0 -> decode r d; assert decodes[-1].notices == ()
    began r -> nothing; decoded r d -> nothing; count served 1
decoder whose prompt has {{failed|unreached|lost}} is asked again to wait no more
    told p / d; ask r; prefilled r p {{}} -> probe p, abort r d
    decoded r d lost output=0 -> decode r d; assert decodes[-1].notices == ()
    began r -> nothing; decoded r d -> nothing; count served 1
decoder with a token is left alone when the prompt has {{busy|rejected|failed|unreached|lost}}
    told p / d; ask r; began r; prefilled r p {{}} -> no abort; decoded r d -> nothing
    count served 1
decoder that brings a token as it is asked again goes on elsewhere
    # The order crosses the token.
    told p / d; ask r; prefilled r p failed; began r; decoded r d lost -> decode r d
    decoded r d -> nothing; count served 1
prompt that fails after its request costs nothing but the replica's good name
    told p / d; ask r; began r; decoded r d; prefilled r p cancelled -> nothing
    assert work('p').prefill_tokens == 0; assert not steps.replica('p').health.is_doubted
failures of both calls count towards the same limit
    # A prompt that kills who computes it is not tried at every engine.
    with max_lost=2
    told p / d; ask r; prefilled r p lost; decoded r d lost output=0; phase r decoding
    decoded r d lost output=0 -> ... refuse r 502
next decoder waits for the prompt while it is computed, and for its tokens afterwards
    told p / d e; {early("r")}; decoded r d lost output=0 -> ... decode r e all
    assert decodes[-1].notices == ('tcp://p:5555',); prefilled r p saved=992
    told / f; decoded r e unreached output=0 -> ... decode r f 992
    assert decodes[-1].notices == ()
prompt that is computed while its next decoder is sought is handed over
    # p computes it, and does not wait for itself.
    told p / d; ask r deadline=1; wait 2; failed d; decoded r d lost output=0; phase r handing
    measure p notices=p; prefilled r p saved=992 -> decode r p 992
prompt that fails while its next decoder is sought is computed there
    # p is left alone for a while.
    told p / d; ask r; failed d; decoded r d lost output=0; phase r handing
    prefilled r p busy -> no decode; tick 2 -> ... decode r p
client that goes leaves neither call behind
    told p / d; ask r; cancel r -> nothing; decoded r d cancelled output=0
    prefilled r p cancelled; assert not work('p'); assert not work('d')
    assert work('d').committed_blocks == 0
""",
    given=GIVEN,
)
def test_failure_of_early_decode(example: Example) -> None:
    example.play()


@examples(
    f"""
replica that dies loses its own call alone
    told p / d; ask r; failed p -> abort r p; failed d -> abort r d
replica that dies after its answer is waited for no more
    # What it was still saving is lost.
    with decode_requests=2
    told p / d; ask r; ask begun; ask s
    each r begun s: prefilled $ p saved=992
    began begun; phase s handing; failed p -> abort r d
    decoded r d lost output=0 -> decode r d; decoded begun d -> decode s d; count resumed 1
prefill replica that is drained ends its call first
    told p / d e; {early("r")}; drain p; tick; state p draining_prefill
    prefilled r p saved=992; began r; decoded r d; tick; state p standby
decoder that is drained ends its call first
    told p / d e; {early("r")}; drain d; tick; state d draining_decode
    prefilled r p saved=992; began r; decoded r d; tick; state d standby
decoder that is drained too long hands its wait to another
    with drain_timeout_s=10
    told p / d e; {early("r")}; drain d; tick 10 -> abort r d
    decoded r d lost output=0 -> decode r e all
prefill replica that becomes a decoder computes its prompts first
    told p / d; ask r; set p decode; state p prefill_to_decode; prefilled r p saved=992
    state p decode; began r; decoded r d -> nothing
endpoints of an engine that has ended are forgotten
    told p / d; failed p; tick 2; loaded p; ask r -> prefill r p
pair that is apart is tried by a prompt that is computed first
    # A decoder that finds nothing waits no longer than it did.
    told p / d; measure d expected notices=d; {early("first")}; prefilled first p saved=992
    began first; decoded first d; measure d expected p 0 {APART_AFTER} notices=d
    assert state.collapse().value == 'no_shared_store'; tick {FIRST_PAUSE_S}; {late("try")}
    prefilled try p saved=992 -> decode try d 992; began try; decoded try d
    measure d expected p 1 {APART_AFTER} notices=d; {early("again")}
decoder that does not find the prompts of a replica waits for none
    told p / d e; measure d expected notices=d; measure e expected notices=e
    measure e expected p 0 {APART_AFTER} notices=e
    each 0-3: {early("r$")}
prompt does not wait long for a decoder that would find it
    with decode_requests=1
    told p / d e; measure d expected notices=d; measure e expected notices=e
    measure e expected p 0 {APART_AFTER} notices=e; {early("r")}; {late("s")}
    prefilled s p saved=992 -> nothing; tick {MAX_PASSED_S + 0.1} -> decode s e
""",
    given=GIVEN,
)
def test_replica_of_early_decode_that_comes_or_goes(example: Example) -> None:
    example.play()
