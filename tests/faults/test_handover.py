"""Hand-over of a prompt between two engines: decode loads chunks while prefill computes later ones.

Both engines take their steps in this thread; the model checks every byte that decode reads.
"""

import random
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial

import pytest

from tests.faults.audit import check_nothing_leaked, check_tokens, serve
from tests.faults.model import WINDOWS, FakeModel
from tests.faults.rig import CHUNK, Rig, RigSpec
from tests.faults.runners import RUNNERS
from tests.faults.test_notices import named
from tests.faults.workshop import WITH_STATES, WITH_WINDOWS, Workshop
from tests.support.faults import Fault
from tests.support.waiting import wait_until
from vllm_kvpool.handover.producer import NoticePlace, NoticeServer
from vllm_kvpool.identity.chunk_hash import ChunkChain, RequestIdentity
from vllm_kvpool.metrics import MetricsRegistry
from vllm_kvpool.network.allowed_peers import AllowedPeers

CHANCE = random.Random(7)
WHOLE_CHUNKS = 8
PROMPT = CHANCE.choices(range(3, 1000), k=WHOLE_CHUNKS * CHUNK + 11)
BYSTANDER = CHANCE.choices(range(3, 1000), k=70)
PLACE = NoticePlace("tcp://127.0.0.1:*", "127.0.0.1", is_required=True)
LIMIT_S = 60.0
EVERYTHING = 1 << 30
PLAIN = FakeModel()
MODELS = pytest.mark.parametrize(
    "model", [PLAIN, pytest.param(WINDOWS, marks=WITH_WINDOWS)], ids=["plain", "windows"]
)
PREFILL_STEP = 48  # tokens
SOON_S = 10.0  # on a busy machine; requests here would wait for 60 s


class Pair:
    """A prefill engine and a decode engine over one store. Prefill takes a step after each step of
    decode."""

    def __init__(
        self,
        workshop: Workshop,
        model: FakeModel = PLAIN,
        tp: int = 1,
        runner: str = "first",
        **options: object,
    ) -> None:
        store = workshop.memory()
        spec = RigSpec(model=model, runner=runner)
        self.prefill = workshop.rig(
            replace(spec, max_batched_tokens=PREFILL_STEP, options=options), store, "prefill"
        )
        self.decode = workshop.rig(
            replace(spec, tp=tp, max_batched_tokens=512, options=options), store, "decode"
        )
        self.decode.companions.append(self.prefill)
        self.another_decode = partial(workshop.rig, self.decode.spec, store, "another")

    @property
    def notices(self) -> list[str]:
        """Endpoints at which prefill publishes its stored chunks."""
        return [each.part._notices.endpoint for each in self.prefill.ranks]  # type: ignore[union-attr]

    def hand_over(
        self, prompt: list[int], *, timeout_ms: int = 20_000, hears: bool = False
    ) -> tuple[str, str]:
        """Add the prompt to both engines at once. `hears`: decode knows prefill's endpoints."""
        prefilling = self.prefill.add(prompt, 1, hand_over=True)
        return prefilling, self.expect(self.decode, prompt, timeout_ms=timeout_ms, hears=hears)

    def expect(
        self, decode: Rig, prompt: list[int], *, timeout_ms: int = 20_000, hears: bool = False
    ) -> str:
        """Add the prompt to a decode engine."""
        told = {"notices": self.notices} if hears else {}
        return decode.add(prompt, expect_tokens=EVERYTHING, expect_timeout_ms=timeout_ms, **told)

    def decode_steps(self, count: int) -> None:
        for _ in range(count):
            self.decode.step()

    def served(self, decoding: str) -> float:
        """Run decode, assert that the answer is right, and return the number of loaded tokens."""
        self.decode.run(LIMIT_S)
        self.decode.expect([decoding])
        self.check()
        return self.decode.count("kvpool_hit_tokens")

    def check(self) -> None:
        for rig in (self.prefill, self.decode):
            rig.settle()
            check_nothing_leaked(rig)
        assert self.decode.count("kvpool_promised_blocks") == 0


def loads_of(rig: Rig) -> list[int]:
    """Return a list that records, at each later load's start, how many chunks were known to be
    stored."""
    landed: list[int] = []

    def look(output: object) -> None:
        loads = output.kv_connector_metadata.plan.loads  # type: ignore[attr-defined]
        landed.extend(
            load.stop_chunk if load.landed_stop is None else load.landed_stop for load in loads
        )

    rig.on_scheduled.append(look)
    return landed


@MODELS
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("tail", [0, 1, 11, CHUNK - 1])
def test_decode_loads_while_prefill_computes(
    workshop: Workshop, model: FakeModel, tp: int, tail: int
) -> None:
    """Decode computes one token of the prompt, whatever its length."""
    prompt = PROMPT[: WHOLE_CHUNKS * CHUNK] + PROMPT[:tail]
    pair = Pair(workshop, model, tp)
    landed = loads_of(pair.decode)
    _, decoding = pair.hand_over(prompt)
    assert pair.served(decoding) == len(prompt) - 1
    assert landed[0] < WHOLE_CHUNKS, "decode began after the last chunk"
    assert pair.decode.count("kvpool_expected_prompts", "outcome=found") == 1
    check_tokens(pair.decode)


@pytest.mark.parametrize("runner", RUNNERS)
def test_hand_over_works_under_every_runner(workshop: Workshop, runner: str) -> None:
    pair = Pair(workshop, tp=2, runner=runner)
    _, decoding = pair.hand_over(PROMPT)
    assert pair.served(decoding) == len(PROMPT) - 1


STATES = FakeModel(layers=3, states=(0, 1))


@WITH_STATES
def test_model_with_states_waits_for_the_last_boundary(workshop: Workshop) -> None:
    """Decode loads up to the last stored state, and computes the tokens after it."""
    pair = Pair(workshop, STATES)
    _, decoding = pair.hand_over(PROMPT)
    assert pair.served(decoding) == WHOLE_CHUNKS * CHUNK


def test_answer_of_prefill_names_the_whole_prompt(workshop: Workshop) -> None:
    """After prefill, a proxy passes its answer to decode. Decode then expects the prompt's end,
    too."""
    pair = Pair(workshop)
    prefilling = pair.prefill.add(PROMPT, 1, hand_over=True)
    pair.prefill.run(LIMIT_S)
    pair.prefill.settle()
    params = pair.prefill.answers[prefilling].params
    assert params is not None
    assert params["kvpool"]["tokens"] == len(PROMPT)
    decoding = pair.decode.add(PROMPT, **params["kvpool"])
    assert pair.served(decoding) == len(PROMPT) - 1


def test_prompt_end_is_saved_only_for_a_hand_over(workshop: Workshop) -> None:
    pair = Pair(workshop)
    serve(pair.prefill, PROMPT)
    pair.prefill.settle()
    assert pair.prefill.count("kvpool_saved_tokens") == WHOLE_CHUNKS * CHUNK
    decoding = pair.decode.add(PROMPT, expect_tokens=EVERYTHING, expect_timeout_ms=50)
    assert pair.served(decoding) == WHOLE_CHUNKS * CHUNK


def test_prompt_end_of_another_prompt_is_not_taken(workshop: Workshop) -> None:
    """Prompts that differ in their last tokens, or are longer, hit whole chunks only."""
    pair = Pair(workshop)
    pair.prefill.add(PROMPT, 1, hand_over=True)
    pair.prefill.run(LIMIT_S)
    pair.prefill.settle()
    for other in ([*PROMPT[:-1], 2], [*PROMPT, 5], PROMPT[:-1]):
        before = pair.decode.count("kvpool_hit_tokens")
        decoding = pair.decode.add(other, 1, expect_tokens=EVERYTHING, expect_timeout_ms=50)
        pair.decode.run(LIMIT_S)
        pair.decode.expect([decoding])
        assert pair.decode.count("kvpool_hit_tokens") - before == WHOLE_CHUNKS * CHUNK
        assert pair.decode.reset()
    pair.check()


@MODELS
@pytest.mark.parametrize("steps", [0, 1, 3, 5])
def test_prefill_that_ends_early_leaves_the_rest_to_decode(
    workshop: Workshop, model: FakeModel, steps: int
) -> None:
    """Prefill is aborted before, between or after chunks. No notice comes, so decode waits for its
    timeout."""
    pair = Pair(workshop, model)
    prefilling, decoding = pair.hand_over(PROMPT, timeout_ms=400)
    pair.decode_steps(steps)
    pair.prefill.abort(prefilling)
    pair.decode.run(LIMIT_S)
    pair.decode.expect([decoding])
    assert pair.decode.count("kvpool_expected_prompts", "outcome=missing") == 1
    assert pair.decode.count("kvpool_hit_tokens") < len(PROMPT) - 1
    pair.check()


@MODELS
@pytest.mark.parametrize("steps", [1, 3, 5])
def test_decode_that_hears_prefill_end_goes_on_at_once(
    workshop: Workshop, model: FakeModel, steps: int
) -> None:
    """Prefill is aborted after it has hashed the prompt. Before that it cannot name the prompt."""
    pair = Pair(workshop, model)
    prefilling, decoding = pair.hand_over(PROMPT, timeout_ms=60_000, hears=True)
    pair.decode_steps(steps)
    pair.prefill.abort(prefilling)
    assert pair.decode.run(LIMIT_S) < SOON_S
    pair.decode.expect([decoding])
    pair.check()


@pytest.mark.parametrize("steps", [0, 1, 3, 5])
def test_decode_whose_prefill_has_gone_goes_on_at_once(workshop: Workshop, steps: int) -> None:
    """Prefill has closed its connections, or never had any."""
    pair = Pair(workshop)
    pair.decode.companions.clear()
    _, decoding = pair.hand_over(PROMPT, timeout_ms=60_000, hears=True)
    for _ in range(steps):
        pair.decode.step()
        pair.prefill.step()
    pair.prefill.shutdown()
    assert pair.decode.run(LIMIT_S) < SOON_S
    pair.decode.expect([decoding])
    pair.decode.settle()
    check_nothing_leaked(pair.decode)


@pytest.mark.parametrize("chunk", [0, 3, WHOLE_CHUNKS])
def test_decode_hears_of_a_put_that_fails(workshop: Workshop, chunk: int) -> None:
    pair = Pair(workshop)
    _, hashes = named(PROMPT)
    workshop.faults.inject(Fault.FULL, "put", hashes[chunk].hex())
    _, decoding = pair.hand_over(PROMPT, timeout_ms=60_000, hears=True)
    assert pair.decode.run(LIMIT_S) < SOON_S
    pair.decode.expect([decoding])
    assert pair.decode.count("kvpool_hit_tokens") == chunk * CHUNK
    workshop.faults.heal()
    pair.check()


def test_notices_are_followed_to_the_last_token(workshop: Workshop) -> None:
    pair = Pair(workshop, tp=2)
    _, decoding = pair.hand_over(PROMPT, hears=True)
    assert pair.served(decoding) == len(PROMPT) - 1
    assert pair.decode.count("kvpool_notices", "side=decode,event=received") > 0


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize(
    ("told", "least"),
    [
        ([], WHOLE_CHUNKS + 1),
        ([(WHOLE_CHUNKS + 1, None)], WHOLE_CHUNKS + 1),
        ([(5, None), (2, None), (5, None)], WHOLE_CHUNKS + 1),
        ([(WHOLE_CHUNKS + 1, WHOLE_CHUNKS + 1)], 0),
        ([(2, 3)], 0),
        ([(0, 0)], 0),
    ],
    ids=["lost", "all stored", "doubled and late", "all stored, ended", "ended early", "none"],
)
def test_false_notices_cost_decode_time_alone(
    workshop: Workshop, told: list[tuple[int, int | None]], least: int, steps: int
) -> None:
    """An endpoint that does not know what prefill stores tells of it. Decode loads `least` chunks
    or more, and computes the rest."""
    pair = Pair(workshop)
    chain = ChunkChain(CHUNK, RequestIdentity())
    chain.extend(PROMPT)
    topic = chain.topic(PROMPT)
    assert topic is not None
    with closing(NoticeServer(PLACE, AllowedPeers(), MetricsRegistry())) as liar:
        pair.prefill.add(PROMPT, 1, hand_over=True)
        expected = {"expect_tokens": EVERYTHING, "expect_timeout_ms": 20_000}
        decoding = pair.decode.add(PROMPT, **expected, notices=[liar.endpoint])
        pair.decode_steps(steps)
        for stored, ended in told:
            liar.tell(topic, stored, ended)
        assert pair.served(decoding) >= min(least * CHUNK, len(PROMPT) - 1)


def test_decode_that_is_aborted_while_it_waits_leaves_nothing(workshop: Workshop) -> None:
    for steps in range(5):
        pair = Pair(workshop)
        _, decoding = pair.hand_over(PROMPT)
        for _ in range(steps):
            pair.decode.step()
        pair.decode.abort(decoding)
        pair.decode.run(LIMIT_S)
        pair.check()


@pytest.mark.parametrize("connector", [False, True])
@pytest.mark.parametrize("which", ["prefill", "decode"])
def test_reset_while_decode_waits_loses_time_alone(
    workshop: Workshop, which: str, connector: bool
) -> None:
    pair = Pair(workshop)
    _, decoding = pair.hand_over(PROMPT, timeout_ms=400)
    pair.decode_steps(3)
    getattr(pair, which).reset(connector=connector)
    pair.served(decoding)


@pytest.mark.parametrize("which", ["prefill", "decode"])
def test_weights_that_change_while_decode_waits_end_its_load(
    workshop: Workshop, which: str
) -> None:
    pair = Pair(workshop)
    _, decoding = pair.hand_over(PROMPT, timeout_ms=400)
    pair.decode_steps(3)
    getattr(pair, which).pool.weights_changed("other")
    pair.served(decoding)  # the model's weights are the same, whatever their version


def test_two_requests_may_wait_for_one_prompt(workshop: Workshop) -> None:
    pair = Pair(workshop)
    _, first = pair.hand_over(PROMPT)
    second = pair.decode.add(PROMPT, expect_tokens=EVERYTHING, expect_timeout_ms=20_000)
    pair.decode.run(LIMIT_S)
    pair.decode.expect([first, second])
    pair.check()


def test_two_engines_that_wait_for_one_prompt_both_load_it(workshop: Workshop) -> None:
    pair = Pair(workshop)
    other = pair.another_decode()
    _, first = pair.hand_over(PROMPT, hears=True)
    second = pair.expect(other, PROMPT, hears=True)
    pair.decode.companions.append(other)
    assert pair.served(first) == len(PROMPT) - 1
    other.run(LIMIT_S)
    other.expect([second])
    other.settle()
    check_nothing_leaked(other)
    assert other.count("kvpool_hit_tokens") == len(PROMPT) - 1


@pytest.mark.parametrize("steps", [0, 1, 3, 5, 9])
def test_decode_that_is_restarted_while_it_waits_loads_the_prompt_anew(
    workshop: Workshop, steps: int
) -> None:
    pair = Pair(workshop)
    pair.hand_over(PROMPT, hears=True)
    pair.decode_steps(steps)
    pair.decode.shutdown()
    pair.decode = pair.another_decode()
    pair.decode.companions.append(pair.prefill)
    decoding = pair.expect(pair.decode, PROMPT, hears=True)
    assert pair.served(decoding) == len(PROMPT) - 1


@pytest.mark.parametrize("hears", [False, True])
def test_preemption_while_a_prompt_is_handed_over_loses_time_alone(
    workshop: Workshop, hears: bool
) -> None:
    for steps in range(8):
        pair = Pair(workshop)
        _, decoding = pair.hand_over(PROMPT, timeout_ms=400, hears=hears)
        bystander = pair.decode.add(BYSTANDER, 8)
        pair.decode_steps(steps)
        pair.decode.drain()
        with suppress(RuntimeError):  # its load, or a save, holds blocks
            pair.decode.reset(running=True)
        pair.served(decoding)
        pair.decode.expect([bystander])


def test_requests_beside_a_waiting_one_go_on(workshop: Workshop) -> None:
    pair = Pair(workshop)
    waiting = pair.decode.add(PROMPT, expect_tokens=EVERYTHING, expect_timeout_ms=20_000)
    pair.decode.step()
    bystander = pair.decode.add(BYSTANDER)
    pair.decode.run(LIMIT_S, until=lambda: bool(pair.decode.answers[bystander].ended))
    assert not pair.decode.answers[waiting].ended
    pair.prefill.add(PROMPT, 1, hand_over=True)
    pair.decode.run(LIMIT_S)
    pair.decode.expect([waiting, bystander])
    pair.check()


@pytest.mark.parametrize("asks_early", [False, True])
def test_news_takes_effect_in_the_next_step_of_a_busy_engine(
    workshop: Workshop, asks_early: bool
) -> None:
    """The first step after the answer, or the last chunk, starts the load or fetches the chunk. The
    load ends before the second step, which reports it at the latest. The third step computes the
    last token."""
    pair = Pair(workshop)
    decode, prefill = pair.decode, pair.prefill
    decode.companions.clear()
    bystander = decode.add(BYSTANDER, 200)
    decode.run(LIMIT_S, until=lambda: bool(decode.answers[bystander].tokens))
    prefill.add(PROMPT, 1, hand_over=True)
    if asks_early:
        decoding = pair.expect(decode, PROMPT)
        prefill.run(LIMIT_S, until=lambda: prefill.num_steps == 3)
        decode.run(LIMIT_S, until=lambda: decode.pool.load_of(decoding) is not None)
    prefill.run(LIMIT_S)
    prefill.settle()
    if not asks_early:
        decoding = pair.expect(decode, PROMPT)
    results = decode.pool._service._results
    wait_until(lambda: bool(results) and results[-1].is_final)
    decode.step()
    for _ in range(2):
        wait_until(lambda: all(each.idle for each in decode.executors))
        decode.step()
    assert decode.answers[decoding].tokens
    assert not decode.answers[bystander].ended
    decode.abort(bystander)
    assert pair.served(decoding) == len(PROMPT) - 1


def test_prompt_in_the_engine_itself_is_not_waited_for(workshop: Workshop) -> None:
    pair = Pair(workshop)
    prompt = PROMPT[: WHOLE_CHUNKS * CHUNK + 1]
    serve(pair.decode, prompt)
    began = pair.decode.num_steps
    decoding = pair.decode.add(prompt, expect_tokens=WHOLE_CHUNKS * CHUNK, expect_timeout_ms=30_000)
    assert pair.decode.run(LIMIT_S) < 20.0
    pair.decode.expect([decoding])
    assert pair.decode.num_steps > began
    pair.check()


def test_promises_take_a_part_of_the_blocks_at_most(workshop: Workshop) -> None:
    """The first prompt is promised blocks at any length; further prompts wait until their chunks
    are stored. Meanwhile a request without a promise gets blocks."""
    pair = Pair(workshop)
    prompts = [PROMPT[i:] + PROMPT[:i] for i in range(3)]
    ids = [
        pair.decode.add(each, expect_tokens=EVERYTHING, expect_timeout_ms=20_000)
        for each in prompts
    ]
    for each in prompts:
        pair.prefill.add(each, 1, hand_over=True)
    most = 0.0
    bystander = pair.decode.add(BYSTANDER)

    def watched() -> bool:
        nonlocal most
        most = max(most, pair.decode.count("kvpool_promised_blocks"))
        return all(pair.decode.answers[each].ended for each in [*ids, bystander])

    pair.decode.run(LIMIT_S, until=watched)
    one = -(-len(PROMPT) // 16)
    assert one <= most <= max(one, pair.decode.spec.num_blocks // 4)
    pair.decode.expect([*ids, bystander])
    pair.check()


@pytest.mark.parametrize("host", [False, True])
def test_hand_over_through_host_memory(workshop: Workshop, host: bool) -> None:
    store = workshop.memory()
    tiers = ["host://4MiB", store] if host else store
    prefill = workshop.rig(RigSpec(max_batched_tokens=PREFILL_STEP), tiers, "prefill")
    decode = workshop.rig(RigSpec(max_batched_tokens=512), tiers, "decode")
    decode.companions.append(prefill)
    for _ in range(2):  # the second time from decode's host memory
        prefill.add(PROMPT, 1, hand_over=True)
        decoding = decode.add(PROMPT, expect_tokens=EVERYTHING, expect_timeout_ms=20_000)
        decode.run(LIMIT_S)
        decode.expect([decoding])
        decode.settle()
        assert decode.reset()
    assert decode.count("kvpool_hit_tokens") == 2 * (len(PROMPT) - 1)
    check_nothing_leaked(decode)
    check_nothing_leaked(prefill)
