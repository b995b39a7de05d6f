"""Loads of another connector: no KV is saved that such a load may have left unfilled."""

import logging

import pytest

from tests.scheduler.scripts import Example, examples, in_words, play


@examples(
    """
request whose load is within a step is never saved
    engine; starts a; step a=32 -> no save; step a=32 -> no save; step a=96 -> no save
    step a=1 -> no save; finish a; step -> no save; pending False
request whose load within a step fails is never saved
    engine; starts a; step a=32 -> no save; load_failed a 32; step a=32 -> no save
    step a=96 -> no save; step a=1 -> no save; finish a; step -> no save; pending False
request that begins in the own cache in the step of a load is not saved, {save=True|save=False}
    # Whether or not the request that loads is one that is saved.
    engine; add a 192 load=False {}; starts a; starts b 32 loaded=32
    step a=32 b=32 -> no save; step b=128 -> no save; finish b; step -> no save
request that begins in the own cache a step after a load is not saved, {save=True|save=False}
    engine; add a 192 load=False {}; starts a; step a=32 -> no save; starts b 32 loaded=32
    step b=32 -> no save; step b=128 -> no save; finish b; step -> no save
request that begins in the own cache long after a load is not saved, {save=True|save=False}
    engine; add a 192 load=False {}; starts a; step a=32 -> no save; load_failed a 32; finish a
    step; starts b 32 loaded=32; step b=32 -> no save; step b=128 -> no save; finish b
    step -> no save
request that waits beside a load within a step is not saved
    # The blocks that it has found may be those of the load.
    engine; starts a; starts b 64 loaded=96; step a=32; comes b; step b=96 -> no save; finish b
    step -> no save
request that shares no blocks is saved beside a load within a step
    engine; starts a; starts b loaded=0; step a=32 b=192 -> only save b 0-6; starts c loaded=0
    step c=192 -> only save c 0-6
preempted request whose load was within a step is saved if computed anew
    engine; starts a; step a=32; computed a 0; step preempted=a; starts a loaded=0
    step a=192 -> only save a 0-6
preempted request whose load was within a step is not saved where the own cache has its blocks
    engine; starts a; step a=32; computed a 0; step preempted=a; starts a 128 loaded=128
    step a=64 -> no save
request that has waited for its load is saved at once
    # vLLM has lowered its count before, if the load failed; nobody has seen its blocks.
    engine; starts a; step; computed a 96; comes a; step a=64 -> only save a 0-5
    starts b 32 loaded=32; step b=32 -> only save b 0-2
request that ends while it waits for its load is not saved
    # vLLM counts its tokens as computed from the start.
    engine; starts a; step; finish a; step -> no save; pending False
request that loads within a step after it has waited in vain is not saved
    # vLLM matches a request anew of whose load nothing came.
    engine; starts a; step; computed a 0; starts a; step a=64 -> no save
load of blocks whose names are not trusted is not saved
    # Another connector may know blocks by vLLM's hashes, as offloading does, and these by less
    # than the pool.
    engine; starts a; starts b blocks=False; starts c loaded=0 blocks=False
    step c=192 -> only save c 0-6; comes a; comes b; step a=64 b=64 -> only save a 0-6
without loads of another connector hits of the own cache are saved
    engine; starts a loaded=0; step a=192 -> only save a 0-6; starts b 128
    step b=32 -> only save b 0-5
request that the pool has loaded for is saved
    engine; stored 3; add a 192; match a 32 -> 64; allocate a 32 64; step; loaded a; comes a
    step a=96 -> only save a 3-6
"""
)
def test_another_connector(example: Example) -> None:
    example.play().close()


def test_reset_of_the_own_cache_after_a_load_within_a_step_lets_its_hits_be_saved(
    caplog: pytest.LogCaptureFixture,
) -> None:
    loads = "starts a; step a=32; finish a; starts b; step b=32; finish b"
    with caplog.at_level(logging.WARNING):
        bench = play(f"engine; {loads}; own_cache_reset; starts c 32 loaded=32; step c=160")
    assert caplog.text.count("until reset_prefix_cache") == 1
    assert in_words(bench, bench.plan) == ["save c 0-6"]
    bench.close()
