"""Layered loads: a span is reported once it is complete, and the whole load afterwards.

Cells are named as on the bench: `"a2"` is chunk a, layer 2.
"""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.transfer.engine_bench import (
    CORRUPT,
    DISK,
    DONE,
    FAILED,
    MISSING,
    WIDE,
    Bench,
    keys_of,
    load_job,
)
from tests.transfer.scripts import Example, examples
from vllm_kvpool.transfer.graph import LaneLimits
from vllm_kvpool.transfer.ops import CellOutcome, LaneName, LoadJob, OpKind

BY_TWO = LaneLimits(batches=1, batch_ops=2, batch_bytes=1 << 30, budget_bytes=1 << 30)


def layered_job(job: int, cells: str, first_chunk: int = 0) -> LoadJob:
    plain = load_job(job, cells, first_chunk, apart=True)
    return plain._replace(plan=replace(plain.plan, layered=True))


def bench(limits: LaneLimits = BY_TWO, keep: int = 0) -> Bench:
    return Bench(DISK, slots=32, keep=keep, limits=limits, apart=True)


def lines(told: list[str]) -> list[str]:
    return [line for line in told if line.startswith(("loaded", "span"))]


@examples(
    """
spans are told of in the order in which they come
    on disk slots=32 limits=1x2 apart=True; layered 1 a0 b0 a1 b1 a2 b2
    run -> only span 0 of 1 | span 1 of 1 | span 2 of 1 | loaded 1 to 2 done; clean
a load of whole chunks tells of no span
    on disk slots=32 limits=1x2 apart=True; load 1 a b
    run -> only loaded 1 to 2 done; told no span
what is in host memory is told of first
    on disk keep=16 slots=32 limits=1x2 apart=True; load 1 a0 b0; run
    layered 2 a0 b0 a1 b1 -> 3 scatter a0 b0 | 4 get-0 a1 b1; ends 3 -> span 0 of 2
where nothing can be asked the lowest chunk counts
    # Of the first layer more is in host memory than of the next.
    on disk slots=32 keep=16 limits=1x2 apart=True; load 1 a0 b0 c0 a1; run; tier_down 0
    layered 2 a0 b0 c0 a1 b1 c1; run -> last loaded 2 to 1 unreachable; clean
at its deadline no later layer is there so no chunk is whole
    on disk slots=32 limits=1x2 apart=True; layered 1 a0 b0 a1 b1; ends 0
    after TIMEOUT_S -> last loaded 1 to 0 timed_out; run; clean
a chunk that counts is there in every layer whatever a layer lacks
    # The second layer lacks a chunk; the third still gets what is before it.
    on disk slots=32 keep=16 limits=1x2 apart=True; load 1 a0 b0 a1 a2; run; tier_down 0
    layered 2 a0 b0 a1 b1 a2 b2 -> 6 scatter a0 a1
    run -> only span 0 of 2 | span 1 of 2 | span 2 of 2 | loaded 2 to 1 unreachable
nothing is begun behind a chunk that cannot be had
    on disk slots=32 limits=1x2 apart=True; layered 1 a0 b0 c0 a1 b1 c1 a2 b2 c2
    run any b0 missing -> only get-0 a1 a2
"""
)
def test_layered_loads(example: Example) -> None:
    example.play()


def test_the_end_of_a_prompt_leaves_host_memory_before_its_beginning() -> None:
    """Whole chunks leave, because a chunk without one of its layers is useless."""
    here = bench(keep=6)
    here.step(layered_job(1, "a0 b0 c0 a1 b1 c1"))
    here.run()
    left = []
    for number, other in enumerate("vwxyz", 2):
        before = set(here.cells().split())
        here.load(number, f"{other}9")
        here.run()
        left += sorted(before - set(here.cells().split()))
    assert [cell[0] for cell in left] == ["c", "c", "b", "b", "a"]


@pytest.mark.parametrize("outcome", [MISSING, CORRUPT, FAILED])
@pytest.mark.parametrize("bad", ["a0", "b0", "c0", "a2", "b2", "c2"])
def test_a_cell_that_cannot_be_had_ends_its_chunk_and_those_after_it(
    outcome: CellOutcome, bad: str
) -> None:
    here = bench()
    here.step(layered_job(1, "a0 b0 c0 a1 b1 c1 a2 b2 c2"))

    def ends(lane: LaneName, key: str) -> CellOutcome:
        return outcome if lane.kind is OpKind.GET and key == bad else DONE

    told = lines(here.run(ends))
    assert told[-1] == f"loaded 1 to {'abc'.index(bad[0])} {outcome.value}"
    # Each wait for a span gets the span's report, or the load's end.
    assert len(set(told)) == len(told)
    assert here.is_clean


@given(
    chunks=st.integers(1, 5),
    layers=st.integers(1, 4),
    bad=st.dictionaries(
        st.tuples(st.integers(0, 4), st.integers(0, 3)),
        st.sampled_from([MISSING, CORRUPT, FAILED]),
        max_size=3,
    ),
    order=st.randoms(use_true_random=False),
    wide=st.booleans(),
)
def test_any_order_and_any_bad_cells(
    chunks: int, layers: int, bad: dict[tuple[int, int], CellOutcome], order: Random, wide: bool
) -> None:
    """No bad cell counts as loaded. When a span is reported, its loaded chunks are in the pages."""
    here = bench(WIDE if wide else BY_TWO)
    names = [f"{'abcde'[c]}{layer}" for layer in range(layers) for c in range(chunks)]
    outcomes = {f"{'abcde'[c]}{layer}": how for (c, layer), how in bad.items()}
    told = here.step(layered_job(1, " ".join(names)))
    scattered: set[str] = set()
    spans: dict[int, set[str]] = {}
    while here.running:
        number = order.choice(sorted(here.running))
        batch = here.running[number]
        keys = keys_of(batch)
        is_get = batch.lane.kind is OpKind.GET
        if batch.lane.kind is OpKind.SCATTER:
            scattered.update(keys)
        told = here.ends(number, *[outcomes.get(k, DONE) if is_get else DONE for k in keys])
        for line in told:
            if line.startswith("span"):
                spans[int(line.split()[1])] = set(scattered)
        ends = [line for line in told if line.startswith("loaded")]
        if ends:
            break
    [end] = ends
    stop = int(end.split()[3])
    wanted = [c for c, layer in bad if c < chunks and layer < layers]
    assert stop == min(wanted, default=chunks)
    for span, there in spans.items():
        assert {f"{'abcde'[c]}{span}" for c in range(stop)} <= there
    assert {f"{'abcde'[c]}{layer}" for c in range(stop) for layer in range(layers)} <= scattered
    here.run()
    assert here.is_clean
