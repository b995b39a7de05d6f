"""Loans: slabs in one rank's host memory that others on its host scatter from, by events (pure)."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.transfer.engine_bench import (
    CELL_BYTES,
    CORRUPT,
    DISK,
    DONE,
    FAILED,
    FAR,
    MISSING,
    Bench,
    load_job,
    slab_of,
    slots_of,
)
from vllm_kvpool.staging.slots import Slot
from vllm_kvpool.storage.breaker import FIRST_PAUSE_S
from vllm_kvpool.transfer.loans import HOLD_S, ReplicaSet
from vllm_kvpool.transfer.ops import (
    Ask,
    BorrowerGone,
    CellOutcome,
    DropSaves,
    LenderGone,
    Lent,
    Returned,
)

SECOND, THIRD = 1, 2
ASK_S, LOAN_S = 5.0, 8.0
SET = ReplicaSet(("",), ASK_S, LOAN_S, max_retained=2)


def replica_bench(replicas: ReplicaSet = SET, **more: int) -> Bench:
    return Bench(DISK, replicas=replicas, **more)


# As a lender


def lend(bench: Bench, first: int, cells: str, who: int = SECOND, generation: int = 0) -> list[str]:
    """A member asks for cells; their loans count from `first`."""
    loans = tuple(enumerate(map(slab_of, cells.split()), first))
    return bench.step(Ask(who, loans, generation))


def give_back(bench: Bench, *loans: int, who: int = SECOND) -> list[str]:
    return bench.step(Returned(who, loans))


def test_loan_of_an_absent_slab_fetches_and_checks_it_first() -> None:
    bench = replica_bench()
    assert lend(bench, 1, "a b") == ["0 get-0 a b"]
    assert bench.ends(0) == ["1 check a b"]
    assert bench.ends(1) == ["lends 1: 1 yes, 2 yes"]
    [message] = bench.sent
    assert isinstance(message, Lent)
    lent = [slot for _, slots in message.loans for slot in slots]
    assert bench.slots() == f"2 {len(set(lent))} 0"


@pytest.mark.parametrize("outcome", [MISSING, CORRUPT])
def test_loan_of_a_slab_that_no_tier_has_is_refused(outcome: CellOutcome) -> None:
    bench = replica_bench()
    lend(bench, 1, "a b")
    told = [*bench.ends(0, DONE, outcome), *bench.run()]
    assert {"lends 1: 1 yes", "lends 1: 2 no"} <= set(told)


def test_loan_of_a_slab_that_tiers_have_in_part_is_refused() -> None:
    """The cell that one tier gave has a slot when the fetch fails."""
    bench = Bench(DISK, FAR, replicas=SET)
    assert bench.step(Ask(SECOND, ((1, slab_of("a0 a1")),), 0)) == ["0 get-0 a0 a1"]
    assert bench.ends(0, DONE, MISSING) == ["1 check a0"]
    assert bench.ends(1) == ["2 get-1 a1"]
    assert bench.ends(2, MISSING) == ["lends 1: 1 no"]
    assert bench.engine.idle


def test_loan_from_the_host_tier_is_answered_at_once() -> None:
    bench = replica_bench(keep=2)
    bench.save(1, "a")
    bench.run()
    assert lend(bench, 1, "a") == ["lends 1: 1 yes"]
    give_back(bench, 1)
    assert bench.cells() == "a", "it stays"


def test_loan_holds_its_slots_until_it_is_returned() -> None:
    """Otherwise a borrower would scatter the bytes of another slab."""
    bench = replica_bench(keep=1, slots=2)
    bench.save(1, "a")
    bench.run()
    lend(bench, 1, "a")
    assert bench.save(2, "b") == [], "no slot but the one for loads"
    assert give_back(bench, 1)[0] == "3 gather b"


def test_loan_that_is_not_returned_ends_in_time() -> None:
    bench = replica_bench(keep=1, slots=2)
    bench.save(1, "a")
    bench.run()
    lend(bench, 1, "a")
    bench.after(LOAN_S * 0.99)
    assert not bench.engine.idle
    bench.after(LOAN_S * 0.01)
    assert bench.engine.idle
    assert give_back(bench, 1) == [], "late"


def test_loans_of_a_borrower_that_has_gone_end_at_once() -> None:
    bench = replica_bench(keep=2)
    bench.save(1, "a")
    bench.run()
    lend(bench, 1, "a", SECOND)
    lend(bench, 1, "a", THIRD)
    bench.step(BorrowerGone(SECOND))
    assert not bench.engine.idle, "the other one still reads"
    bench.step(BorrowerGone(THIRD))
    assert bench.is_clean


@pytest.mark.parametrize("end", [BorrowerGone(SECOND), Returned(SECOND, (1,))])
def test_loan_that_ends_during_its_fetch_leaves_nothing(end: BorrowerGone | Returned) -> None:
    bench = replica_bench()
    lend(bench, 1, "a")
    bench.step(end)
    bench.run()
    bench.after(HOLD_S)
    assert (bench.slots(), bench.cells()) == ("4 0 0", "")


@pytest.mark.parametrize("generation", [0, 2])
def test_loan_over_a_reset_is_refused(generation: int) -> None:
    bench = replica_bench(keep=2)
    bench.step(DropSaves(forget=True, generation=1))
    bench.save(1, "a")
    bench.run()
    assert lend(bench, 1, "a", generation=generation) == ["lends 1: 1 no"]
    assert lend(bench, 2, "a", generation=1) == ["lends 1: 2 yes"]


def test_loan_from_before_a_reset_holds_its_slots() -> None:
    """Its borrower, too, asked before the reset."""
    bench = replica_bench(keep=2)
    bench.save(1, "a")
    bench.run()
    lend(bench, 1, "a")
    bench.step(DropSaves(forget=True, generation=1))
    assert bench.slots() == "3 1 0"
    give_back(bench, 1)
    assert bench.slots() == "4 0 0"


def test_loan_of_a_slab_of_another_size_is_refused() -> None:
    bench = replica_bench(keep=2)
    bench.save(1, "a")
    bench.run()
    longer = slab_of("a")._replace(sizes=(CELL_BYTES + 1,), nbytes=CELL_BYTES + 1)
    assert bench.step(Ask(SECOND, ((1, longer),), 0)) == ["lends 1: 1 no"]


def test_loan_with_an_id_in_use_is_refused() -> None:
    bench = replica_bench(keep=2)
    bench.save(1, "a")
    bench.run()
    lend(bench, 1, "a")
    assert lend(bench, 1, "a") == ["lends 1: 1 no"]
    give_back(bench, 1)
    assert bench.is_clean


# As a borrower


def borrow(bench: Bench, job: int, cells: str) -> list[str]:
    """A load of cells that the second of the set fetches."""
    plan = load_job(job, cells)
    slabs = tuple(slab._replace(fetcher=SECOND) for slab in plan.slabs)
    return bench.step(plan._replace(slabs=slabs))


def answer(bench: Bench, *loans: int, slots: Sequence[int] = (1 << 40,)) -> list[str]:
    """The second member answers these asks: with slots of its own, or none."""
    lent = tuple(Slot(slot) for slot in slots)
    return bench.step(Lent(SECOND, tuple((loan_id, lent) for loan_id in loans)))


@pytest.mark.parametrize("keep", [0, 2])
def test_borrowed_slab_is_scattered_from_the_lenders_slots(keep: int) -> None:
    """The lender has checked it, and its host tier keeps it."""
    bench = replica_bench(keep=keep)
    assert borrow(bench, 1, "a b") == ["asks 1: a b"]
    assert answer(bench, 1, 2) == ["0 scatter a b"]
    assert slots_of(bench.running[0]) == [1 << 40] * 2
    assert bench.slots() == "4 0 0"
    assert bench.ends(0) == ["loaded 1 to 2 done", "returns 1: 1 2"]
    assert bench.cells() == ""
    assert bench.counted("kvpool_hit_cells", tier="replica") == 2
    labels = {"direction": "load", "store": "replica"}
    assert bench.counted("kvpool_cells", **labels, outcome="done") == 2
    assert bench.counted("kvpool_bytes", **labels) == 2 * CELL_BYTES


def test_scatter_that_ends_after_its_loan_is_a_lost_cell() -> None:
    """The lender may have given the slots to another slab meanwhile."""
    bench = replica_bench()
    borrow(bench, 1, "a b")
    answer(bench, 1)
    bench.clock.advance(LOAN_S / 2)
    answer(bench, 2)
    bench.ends(0)
    bench.clock.advance(LOAN_S / 2)
    assert bench.ends(1)[0] == "loaded 1 to 1 timed_out"
    assert bench.is_clean


def test_scatter_that_ends_within_its_loan_counts() -> None:
    bench = replica_bench()
    borrow(bench, 1, "a")
    answer(bench, 1)
    bench.clock.advance(LOAN_S * 0.99)
    assert bench.ends(0)[0] == "loaded 1 to 1 done"


@pytest.mark.parametrize("keep", [0, 2])
def test_slab_that_the_lender_lacks_is_fetched_from_the_tiers(keep: int) -> None:
    bench = replica_bench(keep=keep)
    borrow(bench, 1, "a")
    assert answer(bench, 1, slots=()) == ["0 get-0 a"]
    assert bench.run() == ["check a", "scatter a", "loaded 1 to 1 done"]
    assert bench.cells() == "", "the lender keeps it"


def test_answer_with_too_few_slots_counts_as_none() -> None:
    bench = replica_bench()
    borrow(bench, 1, "a0 a1")
    assert answer(bench, 1) == ["0 get-0 a0 a1"]


def test_lender_that_does_not_answer_is_left_alone_for_a_while() -> None:
    bench = replica_bench()
    borrow(bench, 1, "a")
    assert bench.after(ASK_S) == ["0 get-0 a"]
    bench.run()
    assert borrow(bench, 2, "b") == ["3 get-0 b"]
    assert answer(bench, 1) == ["returns 1: 1"], "too late"
    bench.run()
    bench.after(FIRST_PAUSE_S)
    assert borrow(bench, 3, "c") == ["asks 1: c"]


def test_asks_of_a_lender_that_has_gone_are_fetched_from_the_tiers() -> None:
    bench = replica_bench()
    borrow(bench, 1, "a")
    assert bench.step(LenderGone(SECOND)) == ["0 get-0 a"]
    bench.run()
    bench.after(1000.0)
    borrow(bench, 2, "b")
    assert len(bench.sent) == 1, "never again"


def test_loan_of_a_lender_that_has_gone_stays_valid() -> None:
    """Nobody hands out the slots of a dead process."""
    bench = replica_bench()
    borrow(bench, 1, "a")
    answer(bench, 1)
    bench.step(LenderGone(SECOND))
    assert bench.ends(0)[0] == "loaded 1 to 1 done"


def test_slab_that_nobody_has_is_missing() -> None:
    bench = replica_bench()
    borrow(bench, 1, "a")
    answer(bench, 1, slots=())
    assert bench.ends(0, MISSING) == ["loaded 1 to 0 missing"]


def test_lender_gives_what_no_tier_has() -> None:
    bench = Bench(replicas=SET, keep=2)
    borrow(bench, 1, "a")
    answer(bench, 1)
    assert bench.run() == ["loaded 1 to 1 done", "returns 1: 1"]


def test_two_loads_share_a_loan() -> None:
    bench = replica_bench()
    borrow(bench, 1, "a")
    assert borrow(bench, 2, "a") == []
    answer(bench, 1)
    assert bench.ends(0)[-1] == "returns 1: 1"
    assert [done.job_id for done in bench.loaded] == [1, 2]


def test_slab_that_this_rank_borrows_is_not_lent() -> None:
    """Otherwise two ranks could wait for each other."""
    bench = replica_bench()
    borrow(bench, 1, "a")
    assert lend(bench, 1, "a") == ["lends 1: 1 no"]


@pytest.mark.parametrize("end", ["reset", "cancel"])
def test_loan_that_no_load_wants_any_more_goes_back_at_once(end: str) -> None:
    bench = replica_bench()
    borrow(bench, 1, "a")
    if end == "reset":
        bench.step(DropSaves(forget=True, generation=1))
    else:
        bench.cancel(1)
    assert "returns 1: 1" in answer(bench, 1)
    assert bench.is_clean


def test_scatter_that_fails_gives_its_loan_back() -> None:
    bench = replica_bench()
    borrow(bench, 1, "a")
    answer(bench, 1)
    assert bench.ends(0, FAILED) == ["loaded 1 to 0 failed", "returns 1: 1"]


# Retained for a while


def test_fetched_slab_stays_for_members_that_ask_later() -> None:
    bench = replica_bench()
    bench.load(1, "a")
    bench.run()
    for who in (SECOND, THIRD):
        assert lend(bench, 1, "a", who) == [f"lends {who}: 1 yes"]
        give_back(bench, 1, who=who)
    bench.after(HOLD_S)
    assert (bench.slots(), bench.cells()) == ("4 0 0", "")


def test_lent_slab_stays_for_the_own_load() -> None:
    bench = replica_bench()
    lend(bench, 1, "a")
    bench.run()
    give_back(bench, 1)
    assert bench.load(1, "a") == ["2 scatter a"]


def test_slabs_fetched_last_are_retained_within_the_bound() -> None:
    """A load goes on; a late member has the others fetched again."""
    bench = replica_bench(slots=4)
    bench.load(1, "a b c d e f")
    assert bench.run()[-1] == "loaded 1 to 6 done"
    assert bench.cells() == "e f"


def test_slab_of_a_layer_group_of_this_rank_alone_is_not_retained() -> None:
    bench = replica_bench(replace(SET, layer_groups=("other",)))
    bench.load(1, "a")
    bench.run()
    assert bench.cells() == ""


def test_host_tier_keeps_slabs_instead() -> None:
    bench = replica_bench(keep=1)
    bench.load(1, "a b")
    bench.run()
    assert bench.cells() in ("a", "b")
    assert bench.engine.idle


def test_reset_drops_retained_slabs() -> None:
    bench = replica_bench()
    bench.load(1, "a")
    bench.run()
    bench.step(DropSaves(forget=True, generation=1))
    assert bench.slots() == "4 0 0"
