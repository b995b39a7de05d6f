"""The scheduler side of models with recurrent states.

A state is saved where the engine offers one. A load ends at the largest boundary whose state is
whole. A state is never stored under the name of another prefix.
"""

from tests.scheduler.scheduler_bench import PENDING, StateBench
from tests.scheduler.scripts import Example, examples, play
from vllm_kvpool.layout.topology import KVCacheGroup
from vllm_kvpool.scheduler.blocks import NO_PAGES, GroupTables, state_page
from vllm_kvpool.transfer.ops import JobPages


@examples(
    """
a hit ends at a boundary with a state
    state_engine; has 6 192; add a 200; match a -> 192
a hit ends at the largest boundary with a state
    state_engine; has 6 64 128; add a 200; match a -> 128
a hit ends at a boundary that attention reaches
    state_engine; has 3 64 128; add a 200; match a -> 64
attention without a state is no hit
    state_engine; has 6; add a 200; match a -> nothing
a state without attention is no hit
    state_engine; has 0 64; add a 200; match a -> nothing
a hit leaves a token to compute
    # The state after the whole prompt cannot give its last token's output.
    state_engine; has 6 128 192; add a 192; match a -> 128; add b 193; match b -> 192
own states past the pool's are kept
    state_engine; has 6 128; add a 200; match a 64 -> 64; match a 128 -> nothing
    match a 160 -> nothing
a load is the attention before it and one state of each group
    state_engine; has 6 128; add a 200; match a 32 -> 96; allocate a 32 96
    step -> load a 32-128 from 104 204
"""
)
def test_hits(example: Example) -> None:
    example.play().close()


def test_the_pages_of_a_larger_block_are_at_the_boundary() -> None:
    groups = (KVCacheGroup(16), KVCacheGroup(64, is_state=True), KVCacheGroup(64, shared=False))
    tables = GroupTables(groups)
    assert (tables.block_size, tables.resumes, tables.has_states) == (64, False, True)
    blocks = [list(range(1, 13)), [0, 7, 9], [0, 0, 0]]
    assert tables.of_load(blocks, 64, 128)[1:] == (state_page(7, 128), NO_PAGES)
    assert tables.of_load(blocks, 0, 192)[1:] == (state_page(9, 192), NO_PAGES)
    assert tables.of_save(blocks, 0, 64, 0, {}) == (
        JobPages((1, 2, 3, 4), 0, 0, 64),
        NO_PAGES,
        NO_PAGES,
    )
    assert not GroupTables(groups[1:2]).resumes
    assert not GroupTables(groups[1:2]).has_attention


@examples(
    """
a state is saved from the block that is offered
    state_engine; add a 200; admit a -> nothing; offer a 1:41:96 2:42:96
    step a=96 -> state a 96 from 41 42 | save a 0-3; pins 5; gather; pins 0; count saved_states
    confirm; count saved_states 1
offers of several boundaries are saves of their own
    state_engine; add a 200; admit a; offer a 1:41:128 2:42:64 1:43:64
    step a=128 -> only state a 64 from 43 42 | state a 128 from 41 -
the same boundary is saved once
    state_engine; add a 200; admit a; offer a 1:41:96 2:42:96
    step a=96 -> ... state a 96 from 41 42; preempt a; admit a -> nothing
    offer a 1:51:96 2:52:96; step a=96 -> no state
a state that was loaded is not saved again
    state_engine; has 6 128; add a 200; admit a -> 128; step; loaded a
    offer a 1:104:128 2:204:128; step a=64 -> nothing; offer a 1:106:192 2:206:192
    step a=8 -> state a 192 from 106 206
a boundary {off the grid: 16|between two of the grid: 40|past the prompt: 224} is not saved
    state_engine; add a 200; admit a; offer a 1:41:{} 2:42:{}; step a=200 -> no state
without room an offer is lost
    # States come before attention.
    state_engine max_pinned=3; add a 200; admit a; offer a 1:41:96 2:42:96
    step a=96 -> state a 96 from 41 42 | save a 0-1; offer a 1:43:160 2:44:160
    step a=64 -> no state; gather; offer a 1:45:192 2:46:192
    step a=32 -> ... state a 192 from 45 46
nothing is saved of requests that are not
    state_engine; add a 200 save=False; admit a; offer a 1:41:96 2:42:96; step a=96 -> nothing
    offer gone 1:4:32; step -> nothing
after a reset no state of before is saved or counted
    state_engine; add a 200; admit a; offer a 1:41:64 2:42:64; step a=64; reset
    offer a 1:43:128 2:44:128; step a=64 -> nothing; finish a -> 0 tokens
after the weights have changed no state of before is saved
    state_engine; add a 200; admit a; step a=64; weights 2 is_reset=False
    offer a 1:43:128 2:44:128; step a=64 -> nothing
a client is told the largest boundary that is whole
    # Which is what `expect_tokens` of a decoding engine should ask for.
    state_engine; add a 200; admit a; offer a 1:41:128 2:42:128; step a=128; step a=72
    finish a -> 128 tokens
a lookup waits for no more than a boundary
    # Of a prompt that ends on the grid the last boundary cannot be used.
    state_engine; has 6 160; add a 192 expect_tokens=192 expect_timeout_ms=60000; match a -> 160
"""
)
def test_saves(example: Example) -> None:
    example.play().close()


def test_a_lookup_does_not_wait_for_a_state_that_this_engine_could_not_use() -> None:
    """An engine with smaller blocks has a state after 160 tokens and may have none before it."""
    bench = play(
        "state_engine block=64; has 4 64 160; add a 200 expect_tokens=160 expect_timeout_ms=60000"
        "; poll a -> pending"
    )
    bench.lookups.wait(0.2)
    assert bench.scheduler.match("a", 0) == PENDING  # the other engine is still writing
    assert isinstance(bench, StateBench)
    bench.store_cells(0, 4)
    assert bench.match("a") == (64, True)
    bench.close()


# A load up to 192 tokens fails; 64 is a boundary, too


@examples(
    """
after a load that failed in {a rank: 1|two ranks: 2} an earlier boundary is loaded
    # What was lost is saved again.
    load_fails a 160 {}; admit a -> 64; step -> load a 0-64 from 102 202; loaded a
    offer a 1:41:192 2:42:192; step a=136; finish a -> 192 tokens; count hit_tokens 64
    count miss_tokens load_failed:128 short:8
what is lost meanwhile is not loaded
    drop_attention 0; load_fails a 0; admit a -> nothing; count miss_tokens load_failed:192 short:8
    offer a 1:41:192 2:42:192; step a=200 -> state a 192 from 41 42 | save a 0-6
after a second failed load the prompt is computed
    load_fails a 160; admit a -> 64; step; load_fails a 32; admit a -> nothing
    count miss_tokens load_failed:192 short:8
""",
    given="state_engine; has 6 64 192; add a 200; admit a -> 192; step",
)
def test_failed_loads(example: Example) -> None:
    example.play().close()


# Boundaries that the engine would not keep


@examples(
    """
a prefix without {any state: 4|a state at its end: 4 64} is told
    state_engine; has {}; add a 200; match a; wanted a -> 128; wanted nobody -> 0
a prefix with a state at its end is not told
    state_engine; has 4 128; add a 200; match a; wanted a -> 0
no prefix is told of nothing
    state_engine; add a 200; match a; wanted a -> 0
a prefix is told past an earlier state
    state_engine; has 5 32; add a 200; match a; wanted a -> 160
a prefix is told in whole blocks, and not of a request whose state would not be saved
    state_engine block=64; has 5; add a 200; match a; wanted a -> 128; add b 200 save=False
    match b; wanted b -> 0
a prefix that the engine itself has seen is not forgotten {1: 1|0: 0}
    # Requests with a common prefix come before its cells are in the pool.
    state_engine; has {}; add a 200; match a; wanted a 150 -> 128
the longer one of the pool's and the engine's prefix is told
    state_engine; has 4; add a 200; match a; wanted a 96 -> 128
the pool's prefix is told where the engine has seen none
    state_engine; has 1; add a 200; match a; wanted a -> 32
a prefix that the engine has seen and whose state the pool has is not told
    state_engine; has 4 128; add a 200; match a; wanted a 128 -> 0
with blocks smaller than chunks the last boundary of the grid is wanted
    state_engine block=16; add a 200; match a; wanted a -> 192
with blocks smaller than chunks a boundary is wanted that leaves a token to compute
    state_engine block=16; add a 192; match a; wanted a -> 160
with blocks smaller than chunks what is in common goes first
    state_engine block=16; has 3; add a 200; match a; wanted a -> 96
with blocks smaller than chunks the last boundary is wanted past a state of what is in common
    state_engine block=16; has 3 96; add a 200; match a; wanted a -> 192
with blocks smaller than chunks nothing is wanted where the last boundary has its state
    state_engine block=16; has 6 192; add a 200; match a; wanted a -> 0
of a prompt without a chunk nothing is wanted
    state_engine block=16; add a 20; match a; wanted a -> 0
"""
)
def test_wanted_boundaries(example: Example) -> None:
    example.play().close()


@examples(
    """
the next state of an answer is asked for while it is computed
    # The prompt's own states are the engine's choice.
    state_engine state_stride=64; add a 100; admit a; step a=64; kept a 0; step a=36; kept a 128
    each 0-26: decode a 1000; step a=1 -> no state
    decode a 1000; offer a 1:41:128 2:42:128; step a=1 -> ... state a 128 from 41 42; kept a 192
drafts do not move the next state past what is known
    # Of the last nine tokens eight are drafts.
    state_engine state_stride=32; add a 100; admit a; step a=100
    each 0-19: decode a $
    computed a 119; step a=9; kept a 128
states of a request that is not saved are not asked for
    state_engine state_stride=32; add a 100 save=False; admit a; step a=100; kept a 0
states of a request that is saved are asked for
    state_engine state_stride=32; add a 100; admit a; step a=100; kept a 128
state of a step with drafts is saved by the next step
    # vLLM copies it into its block once it has accepted drafts. Until then the block is held.
    state_engine state_stride=64; add a 100; admit a; step a=100; gather
    each 0-27: decode a $
    computed a 127; offer a 1:41:128 2:42:128 drafts=True; step a=4 -> no state; pinned 41 42
    computed a 129; offer a drafts=True; step a=4 -> ... state a 128 from 41 42; gather
state of a draft is not saved
    # No release offers one.
    state_engine state_stride=64; add a 100; admit a; step a=100
    each 0-26: decode a $
    computed a 126; offer a 1:41:128 2:42:128 drafts=True; step a=4; step -> no state
"""
)
def test_states_of_answers(example: Example) -> None:
    example.play().close()
