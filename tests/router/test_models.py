"""Several models behind one router: requests go to replicas that serve theirs."""

from tests.router.scripts import Example, examples


@examples(
    """
request goes to a replica that lists its model
    fleet / d1 d2 d3; models d1 a; models d2 a adapter; models d3 b
    ask a1 20 model=a -> decode a1 d1; ask a2 20 model=a -> decode a2 d2
    each 0-8: ask b$ 20 model=b -> decode b$ d3
    each 0-8: ask x$ 20 model=adapter -> decode x$ d2
request without a model goes to any replica
    fleet / d1 d2 d3; models d1 a; models d2 a adapter; models d3 b
    ask a 20 -> decode a d1; ask b 20 -> decode b d2; ask c 20 -> decode c d3
both stages serve the model
    fleet p1 p2 / d1 d2
    each 1 2: models p$ m$; models d$ m$
    each 1 2: ask r$ model=m$ -> prefill r$ p$; prefilled r$ p$ -> decode r$ d$
    each 1 2: ask s$ model=m$ -> prefill s$ p$; prefilled s$ p$ -> decode s$ d$
model that no engine lists is for an engine to refuse
    fleet / d1 d2; models d1 a; models d2 b; ask r 20 model=unknown -> decode r d1
prompt whose model no prefill replica serves is computed by its decoder
    fleet p1 / d1 d2; models p1 a; models d1 a; models d2 b; ask r model=b -> decode r d2
    paths no_prefill_replica=1
prompts of one model do not wait for those of another
    with prefill_requests=1 decode_requests=1
    fleet p1 p2 / d1 d2; models p1 a; models p2 b; models d1 a; models d2 b
    ask a1 model=a; ask a2 model=a; phase a2 queued; ask b1 model=b -> prefill b1 p2
    prefilled a1 p1; prefilled a2 p1; phase a2 handing; prefilled b1 p2 -> decode b1 d2
request waits for its model while others are idle
    with decode_requests=1
    fleet / d1 d2; models d1 a; models d2 b; ask a1 20 model=a; ask a2 20 model=a -> nothing
    decoded a1 d1 -> decode a2 d1
adapters come and go
    fleet / d1 d2; models d1 a; models d2 a new; ask r 20 model=new -> decode r d2
    models d2 a; models d1 a new; ask s 20 model=new -> decode s d1
replica with the prompt of an adapter that it serves no more is passed over
    fleet / d1 d2; models d1 a new; models d2 a new
    ask r 20 model=new prefix=1,2,3 prefix_tokens=4 -> decode r d1; decoded r d1; models d1 a
    ask s 20 model=new prefix=1,2,3 prefix_tokens=4 -> decode s d2
model on prefill replicas alone is refused at once with the reason
    fleet p1 / d1; models p1 a b; models d1 a; ask b 1000 model=b -> refuse b 503
    assert whys == ['no decode replica serves: b has 1 prefill and no decode replicas']
    ask a 1000 model=a -> prefill a p1
decoder is not locked for being fuller than those of other models
    fleet / d1 d2 d3 d4; models d1 a; models d2 b; models d3 b; models d4 b
    measure d1 used=700; tick; tick; tick; locked; ask r 20 model=a -> decode r d1
request is admitted by what waits for replicas that serve its model
    with ttft_target_s=5
    fleet p1 p2 / d1 d2; models p1 a; models p2 b; models d1 a; models d2 b
    each 0-19: ask x$ 10000 model=a -> prefill x$ p1; wait 1
        ; prefilled x$ p1 prompt_tokens=10000; cancel x$; ask y$ 10000 model=b -> prefill y$ p2
        ; wait 1; prefilled y$ p2 prompt_tokens=10000; cancel y$
    # One replica serves it: 5 s are 5 prompts. Nothing waits for the other's replicas.
    each 0-6: ask a$ 10000 model=a
    assert steps.count('shed') > 0; ask b 10000 model=b -> no refuse
request that waits for an adapter counts where its replicas serve others too
    with ttft_target_s=5
    fleet p1 p2 / d1 d2; models p1 a adapter; models p2 a; models d1 a adapter; models d2 a
    each 0-19: ask x$ 10000 model=adapter -> prefill x$ p1; wait 1
        ; prefilled x$ p1 prompt_tokens=10000; cancel x$; ask y$ 10000 model=a
        ; wait 1; prefilled y$ p1 prompt_tokens=10000; cancel y$
    each 0-6: ask r$ 10000 model=adapter
    assert steps.count('shed') > 0; assert state.fleet.share_of('a', 'adapter') == 1.0
    assert state.fleet.share_of('adapter', 'a') == 0.5
    assert pressure('a').queued_tokens == pressure('adapter').queued_tokens > 0
    # It has two replicas.
    ask a 10000 model=a -> no refuse
starts of one model say nothing of another
    with decode_requests=1
    fleet / d1 d2; models d1 a; models d2 b; ask a1 20 model=a; ask a2 20 model=a
    assert pressure('a').is_waiting_for_decoder; assert not pressure('b').is_waiting_for_decoder
    each 0-39: ask b$ 20 model=b; wait 0.01; began b$; decoded b$ d2
    assert pressure('a').starts_per_s == inf
""",
    given="ttft_target_s=1000",
)
def test_request_of_a_model(example: Example) -> None:
    example.play()
