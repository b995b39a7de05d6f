"""Layered loads: a span is told of when nothing of it is to come, and the load as a whole after.

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
    TIMEOUT_S,
    WIDE,
    Bench,
    keys_of,
    load_job,
)
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


def test_spans_are_told_of_in_the_order_in_which_they_come() -> None:
    here = bench()
    here.step(layered_job(1, "a0 b0 a1 b1 a2 b2"))
    told = here.run()
    assert lines(told) == ["span 0 of 1", "span 1 of 1", "span 2 of 1", "loaded 1 to 2 done"]
    assert here.is_clean


def test_a_load_of_whole_chunks_tells_of_no_span() -> None:
    here = bench()
    here.load(1, "a b")
    assert lines(here.run()) == ["loaded 1 to 2 done"]


def test_what_is_in_host_memory_is_told_of_first() -> None:
    here = bench(keep=16)
    here.load(1, "a0 b0")
    here.run()
    assert here.step(layered_job(2, "a0 b0 a1 b1")) == ["3 scatter a0 b0", "4 get-0 a1 b1"]
    assert here.ends(3) == ["span 0 of 2"]


def test_the_end_of_a_prompt_leaves_host_memory_before_its_beginning() -> None:
    """Whole chunks go, not layers: of a chunk without one of its layers nothing is of use."""
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
    # Whoever waits for a span is told of it, or of the end.
    assert len(set(told)) == len(told)
    assert here.is_clean


def test_where_nothing_can_be_asked_the_lowest_chunk_counts() -> None:
    """Of the first layer more is in host memory than of the next."""
    here = bench(keep=16)
    here.load(1, "a0 b0 c0 a1")
    here.run()
    here.health(0, up=False)
    told = here.step(layered_job(2, "a0 b0 c0 a1 b1 c1"))
    told += here.run()
    assert lines(told)[-1] == "loaded 2 to 1 unreachable"
    assert here.is_clean


def test_at_its_deadline_no_later_layer_is_there_so_no_chunk_is_whole() -> None:
    here = bench()
    here.step(layered_job(1, "a0 b0 a1 b1"))
    here.ends(0)
    told = here.after(TIMEOUT_S)
    while here.running and not any(line.startswith("loaded") for line in told):
        told += here.ends(next(iter(here.running)))
    assert "loaded 1 to 0 timed_out" in told
    here.run()
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
    chunks: int,
    layers: int,
    bad: dict[tuple[int, int], CellOutcome],
    order: Random,
    wide: bool,
) -> None:
    """What counts as loaded is before every bad cell, and a span that is told of is in the pages,
    as far as the load goes, when it is."""
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


def test_a_chunk_that_counts_is_there_in_every_layer_whatever_a_layer_lacks() -> None:
    """The second layer lacks a chunk; the third still gets what is before it."""
    here = bench(keep=16)
    here.load(1, "a0 b0 a1 a2")
    here.run()
    here.health(0, up=False)
    assert here.step(layered_job(2, "a0 b0 a1 b1 a2 b2")) == ["6 scatter a0 a1"]
    assert lines(here.run()) == [
        "span 0 of 2",
        "span 1 of 2",
        "span 2 of 2",
        "loaded 2 to 1 unreachable",
    ]


def test_nothing_is_begun_behind_a_chunk_that_cannot_be_had() -> None:
    here = bench()
    here.step(layered_job(1, "a0 b0 c0 a1 b1 c1 a2 b2 c2"))
    told = here.run(lambda lane, key: MISSING if key == "b0" else DONE)
    later = [key for line in told if line.startswith("get") for key in line.split()[1:]]
    assert set(later) & {"b1", "c1", "b2", "c2"} == set()
