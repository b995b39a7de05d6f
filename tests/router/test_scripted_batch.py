"""What a scripted engine computes in a step, without a clock."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.scripted_batch import POLL_S, Batch, ChunkChain, Phase, ScriptedPool, Sequence
from tests.support.scripted_spec import ScriptedSpec
from vllm_kvpool.config import RequestOptions

SPEC = ScriptedSpec(
    step_base_s=0.01,
    decode_sequence_s=0.001,
    prefill_tokens_per_s=1000,
    max_num_batched_tokens=64,
    block_size=4,
    kv_blocks=64,
    max_model_len=256,
    max_num_seqs=8,
    chunk_tokens=16,
    load_latency_s=0.5,
    load_tokens_per_s=100,
)
MOST_STEPS = 20_000


def sequence(
    num_tokens: int, *, first: int = 1, now: float = 0.0, options: RequestOptions | None = None
) -> Sequence:
    return Sequence(
        tokens=[first, *range(2, num_tokens + 1)],
        options=options or RequestOptions(),
        chain=ChunkChain("m", "", SPEC.chunk_tokens),
        arrival_s=now,
    )


def steps(batch: Batch, pool: ScriptedPool | None = None) -> Iterator[tuple[float, list[Sequence]]]:
    """(seconds, who gets a token) of each step, until nothing can be done; puts take no time."""
    for _ in range(MOST_STEPS):
        step = batch.step(0.0)
        batch.check()
        if step is None:
            return
        for each in step.sampled:
            each.tokens.append(7)
        if pool is not None:
            pool.put(step.computed_chunks)
        yield round(step.seconds, 6), step.sampled
    raise AssertionError("endless")


def test_a_prompt_is_computed_in_parts_and_gives_its_first_token_with_the_last() -> None:
    batch = Batch(SPEC, None)
    one = sequence(150)
    batch.add(one)
    run = steps(batch)
    assert next(run) == (0.01 + 0.064, [])
    assert next(run) == (0.01 + 0.064, [])
    assert next(run) == (0.01 + 0.022, [one])
    assert next(run) == (0.01 + 0.001, [one])


def test_steps_grow_with_those_that_run() -> None:
    batch = Batch(SPEC, None)
    for first in range(1, 4):
        batch.add(sequence(8, first=first))
    run = steps(batch)
    next(run)
    assert next(run)[0] == pytest.approx(0.01 + 3 * 0.001)


def test_running_ones_come_before_prompts_in_the_budget() -> None:
    batch = Batch(SPEC, None)
    first, second = sequence(8), sequence(100, first=2)
    batch.add(first)
    run = steps(batch)
    next(run)
    batch.add(second)
    assert next(run) == (round(0.01 + 0.001 + 0.063, 6), [first])


def test_no_more_run_than_may() -> None:
    batch = Batch(replace(SPEC, max_num_seqs=2), None)
    all_three = [sequence(4, first=first) for first in range(1, 4)]
    for each in all_three:
        batch.add(each)
    run = steps(batch)
    assert next(run)[1] == all_three[:2]
    assert batch.num_waiting == 1
    batch.remove(all_three[0])
    assert next(run)[1] == all_three[1:]


def test_requests_wait_for_blocks() -> None:
    batch = Batch(replace(SPEC, max_num_batched_tokens=512), None)
    big, small = sequence(200), sequence(80, first=2)
    batch.add(big)
    batch.add(small)
    run = steps(batch)
    assert next(run)[1] == [big]
    assert (batch.num_waiting, batch.usage) == (1, 50 / 64)
    batch.remove(big)
    assert next(run)[1] == [small]


def test_the_newest_is_preempted_and_computed_again() -> None:
    batch = Batch(replace(SPEC, max_num_batched_tokens=512), None)
    old, new = sequence(128), sequence(124, first=2)
    batch.add(old)
    batch.add(new)
    run = steps(batch)
    assert next(run)[1] == [old, new]
    assert next(run)[1] == [old]  # it has the last of 64 blocks now, and the other wants one
    assert (new.phase, new.num_computed, batch.counts.preemptions) == (Phase.WAITING, 0, 1)
    assert len(new.tokens) == 124 + 1
    batch.remove(old)
    assert next(run)[1] == [new]


def test_what_was_computed_once_is_not_computed_again() -> None:
    batch = Batch(SPEC, None)
    first, second = sequence(40), sequence(40)
    batch.add(first)
    run = steps(batch)
    next(run)
    batch.remove(first)
    batch.add(second)
    assert next(run) == (round(0.01 + 0.008, 6), [second])
    assert second.num_cached == 32
    assert batch.counts.local_hit_tokens == 32


def test_without_a_prefix_cache_it_is() -> None:
    batch = Batch(replace(SPEC, prefix_caching=False), None)
    first, second = sequence(40), sequence(40)
    batch.add(first)
    run = steps(batch)
    next(run)
    batch.remove(first)
    batch.add(second)
    next(run)
    assert second.num_cached == 0


def filled(num_tokens: int) -> ScriptedPool:
    """A pool that has the first tokens of `sequence`."""
    pool = ScriptedPool()
    batch = Batch(SPEC, pool)
    one = sequence(num_tokens)
    batch.add(one)
    run = steps(batch, pool)
    while one.num_computed < num_tokens:
        next(run)
    assert batch.saved_tokens(one) == num_tokens // 16 * 16
    return pool


def test_what_the_pool_has_is_loaded_beside_the_steps() -> None:
    batch = Batch(SPEC, filled(40))
    one, other = sequence(60), sequence(8, first=2)
    batch.add(one)
    batch.add(other)
    step = batch.step(1.0)
    assert step is not None
    assert step.sampled == [other]
    assert (one.phase, one.num_cached, batch.wake_s(1.0)) == (
        *(Phase.LOADING, 32, 1.0 + 0.5 + 0.32),
    )
    batch.remove(other)
    assert batch.step(1.8) is None
    step = batch.step(1.82)
    assert step is not None
    assert (step.sampled, round(step.seconds, 6)) == ([one], 0.01 + 0.028)
    assert step.computed_chunks == one.chain.hashes(one.tokens, 48)[2:]
    assert batch.counts.pool_hit_tokens == 32


def test_a_load_begins_when_all_that_follows_it_has_blocks() -> None:
    batch = Batch(replace(SPEC, kv_blocks=25, max_model_len=100), filled(48))
    one, other = sequence(60), sequence(60)
    for each in (one, other):
        batch.add(each)
    assert batch.step(0.0) is None
    assert (one.phase, other.phase) == (Phase.LOADING, Phase.WAITING)
    step = batch.step(2.0)
    assert step is not None
    assert step.sampled == [one]


def test_a_chunk_is_named_after_all_tokens_before_its_end() -> None:
    tokens = list(range(1, 33))
    one, other, salted = (ChunkChain("m", salt, 16) for salt in ("", "", "salt"))
    hashes = one.hashes(tokens, 31)
    assert (len(hashes), one.hashes(tokens, 32)[:1]) == (1, hashes)
    changed = other.hashes([9, *tokens[1:]], 32)
    assert not set(changed) & set(one.hashes(tokens, 32))
    assert not set(salted.hashes(tokens, 32)) & set(one.hashes(tokens, 32))


def test_the_last_token_is_computed_even_if_the_pool_has_it() -> None:
    batch = Batch(SPEC, filled(32))
    one = sequence(32)
    batch.add(one)
    batch.step(0.0)
    step = batch.step(9.0)
    assert step is not None
    assert (step.sampled, step.num_tokens, one.num_cached) == ([one], 1, 31)


@pytest.mark.parametrize(
    ("options", "cached", "saved"),
    [
        (RequestOptions(), 32, 48),
        (RequestOptions(load=False), 0, 48),
        (RequestOptions(save=False), 32, 32),
    ],
)
def test_a_request_may_be_kept_from_the_pool(
    options: RequestOptions, cached: int, saved: int
) -> None:
    pool = filled(40)
    batch = Batch(SPEC, pool)
    one = sequence(50, options=options)
    batch.add(one)
    for now in (0.0, 9.0):
        step = batch.step(now)
        pool.put(step.computed_chunks if step else [])
    assert one.num_computed >= 50
    assert one.num_cached == cached
    assert pool.count(one.chain.hashes(one.tokens, 48)) * 16 == saved


def test_generated_tokens_are_saved_if_the_engine_does() -> None:
    for save_decode, saved in ((False, 16), (True, 32)):
        pool = ScriptedPool()
        batch = Batch(replace(SPEC, save_decode=save_decode), pool)
        one = sequence(20)
        batch.add(one)
        run = steps(batch, pool)
        for _ in range(14):
            next(run)
        assert pool.count(one.chain.hashes(one.tokens, 32)) * 16 == saved


EXPECTING = RequestOptions(expect_tokens=39, expect_timeout_ms=2000)


def test_a_request_waits_for_what_it_expects_and_others_pass_it() -> None:
    pool = ScriptedPool()
    batch = Batch(SPEC, pool)
    one, other = sequence(60, now=1.0, options=EXPECTING), sequence(8, first=2)
    batch.add(one)
    batch.add(other)
    step = batch.step(1.0)
    assert step is not None
    assert step.sampled == [other]
    batch.remove(other)
    assert batch.step(1.5) is None
    assert batch.wake_s(1.5) == pytest.approx(1.505)
    pool.put(one.chain.hashes(one.tokens, 16))
    assert batch.step(1.6) is None
    pool.put(one.chain.hashes(one.tokens, 32))
    assert batch.step(1.7) is None
    assert one.phase is Phase.LOADING


@pytest.mark.parametrize("what", ["it has come", "its time is over", "the pool is down"])
def test_what_happens_between_a_step_and_the_wait_for_the_next_is_not_missed(what: str) -> None:
    """Other processes fill the pool: the engine would have waited for ever."""
    pool = ScriptedPool()
    batch = Batch(SPEC, pool)
    one = sequence(60, now=1.0, options=EXPECTING)
    batch.add(one)
    now = 2.9
    assert batch.step(now) is None
    match what:
        case "it has come":
            pool.put(one.chain.hashes(one.tokens, 32))
        case "its time is over":
            now = 3.1
        case "the pool is down":
            pool.up = False
    assert batch.wake_s(now) == pytest.approx(now + POLL_S)


def test_those_that_wait_stay_in_their_order() -> None:
    batch = Batch(SPEC, ScriptedPool())
    running = sequence(200)
    batch.add(running)
    for _ in range(4):
        batch.step(0.0)
    one, big = sequence(60, options=EXPECTING), sequence(250, first=2)
    for each in (one, big):
        batch.add(each)
    batch.free_blocks = 0  # whatever has taken them
    batch.step(0.0)
    assert list(batch.waiting) == [one, big]


@pytest.mark.parametrize("down", [False, True])
def test_it_does_not_wait_longer_than_it_may_nor_for_a_pool_that_is_down(down: bool) -> None:
    pool = ScriptedPool()
    batch = Batch(SPEC, pool)
    one = sequence(60, now=1.0, options=EXPECTING)
    batch.add(one)
    assert batch.step(1.5) is None
    pool.up = not down
    step = batch.step(1.6 if down else 3.0)
    assert step is not None
    assert step.sampled == [one]


def test_a_pool_that_is_down_has_nothing_and_takes_nothing() -> None:
    pool = filled(40)
    chain = ChunkChain("m", "", 16)
    hashes = chain.hashes(sequence(40).tokens, 40)
    assert pool.count(hashes) == 2
    pool.up = False
    assert (pool.count(hashes), pool.put([b"x"])) == (0, 0)
    pool.up = True
    assert (pool.count(hashes), pool.count([b"x"])) == (2, 0)


def test_what_was_loaded_runs_when_the_last_that_ran_gives_way_to_it() -> None:
    batch = Batch(replace(SPEC, kv_blocks=8, max_model_len=32), filled(16))
    growing = sequence(11, first=2)
    batch.add(growing)
    for now in (0.0, 0.1):
        step = batch.step(now)
        assert step is not None
        assert step.sampled == [growing]
        growing.tokens.append(7)
        if now == 0.0:
            loaded = sequence(17)
            batch.add(loaded)
    assert (loaded.phase, batch.free_blocks) == (Phase.LOADING, 0)
    step = batch.step(10.0)  # it has been loaded, and the other one wants a block
    assert step is not None
    assert (step.sampled, growing.phase) == ([loaded], Phase.WAITING)


requests = st.lists(
    st.tuples(
        st.integers(1, 60),  # prompt
        st.integers(1, 40),  # to generate
        st.integers(1, 3),  # which prefix
        st.integers(0, 30),  # comes with this step
        st.booleans(),  # is given up
        st.sampled_from([0, 16, 32]),  # expects
    ),
    min_size=1,
    max_size=12,
)


@given(requests, st.integers(25, 64), st.integers(1, 4), st.booleans())
def test_everyone_gets_all_tokens_whatever_happens(
    asked: list[tuple[int, int, int, int, bool, int]], blocks: int, most: int, has_pool: bool
) -> None:
    spec = replace(SPEC, kv_blocks=blocks, max_num_seqs=most, max_model_len=100)
    pool = ScriptedPool() if has_pool else None
    batch = Batch(spec, pool)
    coming = sorted(enumerate(asked), key=lambda each: each[1][3])
    due: dict[Sequence, int] = {}
    given_up: set[Sequence] = set()
    now = 0.0
    for number in range(MOST_STEPS):
        while coming and coming[0][1][3] <= number:
            _, (prompt, tokens, first, _, stays, expects) = coming.pop(0)
            options = RequestOptions(expect_tokens=expects, expect_timeout_ms=300)
            one = sequence(prompt, first=first, now=now, options=options)
            due[one] = prompt + tokens
            given_up |= set() if stays else {one}
            batch.add(one)
        step = batch.step(now)
        batch.check()
        if step is None:
            wake = batch.wake_s(now)
            if wake is None and not coming:
                break
            now = max(now + 0.001, wake or 0.0)
            continue
        now += step.seconds
        for each in step.sampled:
            each.tokens.append(7)
            if len(each.tokens) == due[each] or (each in given_up and len(each.tokens) % 5 == 0):
                batch.remove(each)
                batch.remove(each)
        if pool is not None:
            pool.put(step.computed_chunks)
    assert batch.is_empty
    assert batch.free_blocks == blocks
    for each, length in due.items():
        assert each.phase is Phase.GONE
        assert each in given_up or len(each.tokens) == length
