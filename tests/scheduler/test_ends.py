"""Loads that end inside a chunk, and saves of ends: what the scheduler side plans for each."""

from tests.scheduler.scripts import Example, examples, play
from vllm_kvpool.scheduler.save_planner import ALIASED_END_TTL_S


@examples(
    """
load ends in whole blocks inside the chunk of another prompt that shares {90|95|80} tokens
    engine alias_step=8; other {} 128; add a 120; admit a -> 80; step -> load a 0-80 of another
load ends in whole blocks of 8 tokens inside the chunk
    engine alias_step=8 block=8; other 90 128; add a 120; admit a -> 88
    step -> load a 0-88 of another
load ends with a chunk where no block fits inside the next one
    engine alias_step=8; other 71 128; add a 120; admit a -> 64; step -> load a 0-64
load ends with a chunk where blocks are as large
    engine alias_step=8 block=32; other 90 128; add a 120; admit a -> 64; step -> load a 0-64
load begins where the engine's own cache ends inside the chunk
    engine alias_step=8; other 90 128; add a 120; match a 80 -> nothing; match a 64 -> 16
    grow a 64; allocate a 64 16; step -> load a 64-80 of another
end is loaded from its short cells
    engine alias_step=8; other 84 84 with_end=True; add a 84; admit a -> 83
    step -> load a 0-83 end 20 of another
own chunk is saved where the rows of another were loaded
    engine alias_step=8; other 90 128; add a 96; admit a; step; loaded a
    step a=16 -> save a 2-3
failed load inside a chunk is asked for once more without it
    engine alias_step=8; other 90 128; add a 120; admit a -> 80; step; load_stops a 64
    match a 64 -> nothing; allocate a 64 0; step a=28 -> nothing; step a=28 -> ... save a 2-3
preempted request looks anew
    engine alias_step=8; other 90 128; add a 120; admit a -> 80; step; loaded a; step a=8
    preempt a; lose_other 2; admit a -> 64; step -> load a 0-64
saved chunks get aliases that another prompt follows
    engine alias_step=8; add a 96; admit a; step a=96; put; confirm; add b 75; admit b -> 74
"""
)
def test_loads(example: Example) -> None:
    example.play().close()


@examples(
    """
prompt's end of 20 tokens is saved once
    engine alias_step=8; add a 84; admit a; step a=84 -> ... save a 2-3 end 20
    step a=1 -> nothing
prompt's end of as many tokens as between aliases is saved
    engine alias_step=8; add a 72; admit a; step a=72 -> ... save a 2-3 end 8
prompt's end that is the whole prompt is saved
    engine alias_step=8; add a 20; admit a; step a=20 -> save a 0-1 end 20; step a=1 -> nothing
prompt's end to which no alias can lead is not saved {71|64}
    engine alias_step=8; add a {}; admit a; step a={} -> save a 0-2; step a=1 -> nothing
end is not saved where an alias leads to its tokens
    engine alias_step=8; other 84 128; add a 84; admit a -> 83; step; loaded a; step a=1 -> nothing
end is not saved where an alias leads to its whole blocks
    engine alias_step=8; other 80 128; add a 84; admit a -> 80; step; loaded a; step a=4 -> nothing
end is saved where an alias leads to fewer tokens {79|70}
    engine alias_step=8; other {} 128; add a 84; admit a -> 64; step; loaded a
    step a=20 -> save a 2-3 end 20
prompt that is handed over gets an end where another prompt's alias leads to its tokens
    # The next engine asks for the end by its own hash, and follows no alias.
    engine alias_step=8; other 84 128; add a 84 hand_over=True; admit a; step; loaded a
    step a=1 -> ... save a 2-3 end 20
prompt that is handed over gets no end where that very end is stored
    engine alias_step=8; other 84 84 with_end=True; add a 84 hand_over=True; admit a; step
    loaded a; step a=1 -> no save
answer's end is saved with the request's last save
    # The last token sampled has no KV.
    engine alias_step=8 save_decode=True; add a 84; admit a; step a=84 -> save a 0-2
    each 0-3: decode a $; step a=1 -> nothing
    decode a 4; finish a; step -> save a 2-3 end 24
answer's end behind a whole chunk is saved with the request's last save
    engine alias_step=8 save_decode=True; add a 84; admit a; step a=84 -> save a 0-2
    each 0-28: decode a $; step a=1 -> no save a 2-3 end
    decode a 29; finish a; step -> save a 3-4 end 17
answer's end that {ends with a chunk: 0-11|is too short for an alias: 0-18} is not saved
    engine alias_step=8 save_decode=True; add a 84; admit a; step a=84 -> save a 0-2
    each {}: decode a $; step a=1
    decode a 99; finish a; step -> nothing
without aliases no end is saved
    engine has_ends=True; add a 84; admit a; step a=84 -> save a 0-2
"""
)
def test_saves(example: Example) -> None:
    example.play().close()


def test_end_is_kept_for_a_bounded_time() -> None:
    bench = play("engine alias_step=8; add a 84; admit a; step a=84")
    (end,) = (each for each in bench.plan.saves if each.end_tokens)
    until = bench.scheduler._wall_ns() + ALIASED_END_TTL_S * 1e9
    assert until - 60e9 < end.retention.expires_ns <= until
    bench.close()
