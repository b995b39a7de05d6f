"""Loans: cells of this host memory that replicas copy, by events (pure)."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.transfer.engine_bench import (
    CELL_BYTES,
    CORRUPT,
    DISK,
    DONE,
    FAILED,
    MISSING,
    TIMED_OUT,
    UNREACHABLE,
    Bench,
    load_job,
    slab_of,
)
from vllm_kvpool.transfer.loans import HOLD_S, ReplicaSet
from vllm_kvpool.transfer.ops import CellOutcome, DropSaves, Lend, LoanOver

ME, SECOND, THIRD = 0, 1, 2
LOAN_S = 20.0
SET = ReplicaSet(ME, {"": frozenset({ME, SECOND, THIRD})}, LOAN_S, max_retained=2)
PAIR = ReplicaSet(ME, {"": frozenset({ME, SECOND})}, LOAN_S, max_retained=2)


def lend(bench: Bench, loan: int, cells: str, who: int = SECOND, generation: int = 0) -> list[str]:
    return bench.step(Lend(loan, who, generation, tuple(map(slab_of, cells.split()))))


def over(bench: Bench, loan: int) -> list[str]:
    return bench.step(LoanOver(loan))


def replica_bench(replicas: ReplicaSet = PAIR, **more: int) -> Bench:
    return Bench(DISK, replicas=replicas, **more)


def test_what_is_not_here_is_fetched_and_lent_when_it_is_checked() -> None:
    bench = replica_bench()
    assert lend(bench, 1, "a b") == ["0 get-0 a b"]
    assert bench.ends(0) == ["1 check a b"]
    assert bench.ends(1) == ["lent 1: yes yes"]
    assert over(bench, 1) == ["loan 1 was held"]


@pytest.mark.parametrize("outcome", [MISSING, CORRUPT])
def test_what_no_tier_can_give_is_not_lent(outcome: CellOutcome) -> None:
    bench = replica_bench()
    lend(bench, 1, "a b")
    bench.ends(0, DONE, outcome)
    assert bench.run()[-1] == "lent 1: yes no"
    over(bench, 1)


def test_what_the_host_tier_has_is_lent_at_once() -> None:
    bench = replica_bench(keep=2)
    bench.save(1, "a")
    bench.run()
    assert lend(bench, 1, "a") == ["lent 1: yes"]
    over(bench, 1)
    assert bench.cells() == "a", "it stays"


def test_a_loan_holds_its_slots_until_it_is_over() -> None:
    """Or the copy would be of what came after."""
    bench = replica_bench(keep=1, slots=2)
    bench.save(1, "a")
    bench.run()
    lend(bench, 1, "a")
    assert bench.save(2, "b") == [], "no slot but the one for loads"
    assert over(bench, 1)[:2] == ["loan 1 was held", "3 gather b"]


def test_a_loan_that_lasts_too_long_is_not_confirmed() -> None:
    """A borrower that hangs holds no slot for ever, and what it copied late does not count."""
    bench = replica_bench()
    lend(bench, 1, "a")
    bench.run()
    bench.after(LOAN_S)
    assert bench.slots() == "4 0 0"
    assert over(bench, 1) == ["loan 1 was not held"]


def test_a_borrower_that_goes_while_the_cell_comes_leaves_nothing() -> None:
    bench = replica_bench()
    lend(bench, 1, "a")
    over(bench, 1)
    bench.run()
    bench.after(HOLD_S)
    assert (bench.slots(), bench.cells()) == ("4 0 0", "")


@pytest.mark.parametrize("generation", [0, 2])
def test_nothing_is_lent_over_a_reset(generation: int) -> None:
    bench = replica_bench(keep=2)
    bench.step(DropSaves(forget=True, generation=1))
    bench.save(1, "a")
    bench.run()
    assert lend(bench, 1, "a", generation=generation) == ["lent 1: no"]
    assert lend(bench, 2, "a", generation=1) == ["lent 2: yes"]
    over(bench, 1)
    over(bench, 2)


def test_a_loan_goes_on_over_a_reset() -> None:
    """Its borrower, too, asked before it."""
    bench = replica_bench(keep=2)
    bench.save(1, "a")
    bench.run()
    lend(bench, 1, "a")
    bench.step(DropSaves(forget=True, generation=1))
    assert over(bench, 1) == ["loan 1 was held"]
    assert bench.slots() == "4 0 0"


def test_a_cell_of_another_length_is_not_lent() -> None:
    bench = replica_bench(keep=2)
    bench.save(1, "a")
    bench.run()
    longer = slab_of("a")._replace(sizes=(CELL_BYTES + 1,), nbytes=CELL_BYTES + 1)
    assert bench.step(Lend(1, SECOND, 0, (longer,))) == ["lent 1: no"]
    over(bench, 1)


# Cells that a replica fetches


def borrow(bench: Bench, job: int, cells: str) -> list[str]:
    """A load of cells that the second of the set fetches."""
    plan = load_job(job, cells)
    slabs = tuple(slab._replace(fetcher=SECOND) for slab in plan.slabs)
    return bench.step(plan._replace(slabs=slabs))


@pytest.mark.parametrize("keep", [0, 2])
def test_what_a_replica_gives_needs_no_check_and_is_not_kept(keep: int) -> None:
    """It was checked there, and that host tier keeps it."""
    bench = replica_bench(keep=keep)
    assert borrow(bench, 1, "a b") == ["0 get-replica a b"]
    assert bench.ends(0) == ["1 scatter a b"]
    assert bench.run() == ["loaded 1 to 2 done"]
    assert bench.cells() == ""


@pytest.mark.parametrize("keep", [0, 2])
@pytest.mark.parametrize("outcome", [MISSING, FAILED, UNREACHABLE, TIMED_OUT])
def test_what_a_replica_cannot_give_is_asked_of_the_tiers(outcome: CellOutcome, keep: int) -> None:
    bench = replica_bench(keep=keep)
    borrow(bench, 1, "a")
    assert bench.ends(0, outcome) == ["1 get-0 a"]
    assert bench.run() == ["check a", "scatter a", "loaded 1 to 1 done"]
    assert bench.cells() == "", "nor is that kept"


def test_what_nobody_can_give_is_missing() -> None:
    bench = replica_bench()
    borrow(bench, 1, "a")
    bench.ends(0, UNREACHABLE)
    assert bench.ends(1, MISSING) == ["loaded 1 to 0 missing"]


def test_a_replica_gives_what_no_tier_has() -> None:
    bench = Bench(replicas=PAIR, keep=2)
    assert borrow(bench, 1, "a") == ["0 get-replica a"]
    assert bench.run() == ["scatter a", "loaded 1 to 1 done"]
    borrow(bench, 2, "b")
    assert bench.run(lambda lane, key: MISSING) == ["loaded 2 to 0 missing"]


def test_two_loads_share_what_comes_from_a_replica() -> None:
    bench = replica_bench()
    borrow(bench, 1, "a")
    assert borrow(bench, 2, "a") == []
    assert bench.run()[-2:] == ["loaded 1 to 1 done", "loaded 2 to 1 done"]


def test_who_is_asked_does_not_ask() -> None:
    """Or two would wait for each other."""
    bench = replica_bench()
    borrow(bench, 1, "a")
    assert lend(bench, 1, "a") == ["lent 1: no"]
    over(bench, 1)
    bench.run()


def test_what_comes_from_a_replica_after_a_reset_is_not_used() -> None:
    bench = replica_bench()
    borrow(bench, 1, "a")
    bench.step(DropSaves(forget=True, generation=1))
    assert bench.ends(0) == ["loaded 1 to 0 cancelled"]
    assert bench.slots() == "4 0 0"


# Kept until each has asked


def test_a_loaded_cell_stays_until_each_of_the_set_has_asked() -> None:
    bench = replica_bench(SET)
    bench.load(1, "a")
    bench.run()
    for loan, who in enumerate((SECOND, THIRD)):
        assert bench.cells() == "a"
        assert lend(bench, loan, "a", who) == [f"lent {loan}: yes"]
        over(bench, loan)
    assert bench.cells() == ""


def test_a_cell_that_was_lent_stays_for_the_own_load() -> None:
    bench = replica_bench()
    lend(bench, 1, "a")
    bench.run()
    over(bench, 1)
    assert bench.load(1, "a") == ["2 scatter a"]
    bench.run()
    assert bench.cells() == ""


def test_nothing_stays_for_ever_for_those_who_never_ask() -> None:
    bench = replica_bench()
    bench.load(1, "a")
    bench.run()
    bench.after(HOLD_S / 2)
    assert bench.cells() == "a"
    bench.after(HOLD_S / 2)
    assert (bench.slots(), bench.cells()) == ("4 0 0", "")


def test_who_has_not_asked_in_time_holds_up_nobody() -> None:
    """A rank whose pool has died; until it asks again."""
    bench = replica_bench(slots=4)
    bench.load(1, "a b c d")
    bench.run()
    bench.after(HOLD_S)
    assert bench.run()[-1] == "loaded 1 to 4 done", "once, and no more"
    bench.load(2, "e f g h")
    assert bench.run()[-1] == "loaded 2 to 4 done"
    lend(bench, 1, "a")
    bench.run()
    over(bench, 1)
    bench.load(3, "e")
    bench.run()
    assert bench.cells() == "a e", "a for us, e for the one that asks again"


def test_no_more_is_fetched_ahead_of_the_others_than_may_stay() -> None:
    """So that it is not dropped, and fetched again for them."""
    bench = replica_bench(slots=4)
    bench.load(1, "a b c d")
    assert "get-0 c" not in " ".join(bench.run())
    assert bench.cells() == "a b c d", "two here, two still to come"
    lend(bench, 1, "a")
    assert over(bench, 1)[0] == "loan 1 was held"
    assert "get-0" in {str(batch.lane) for batch in bench.running.values()}, "the next one"


def test_with_a_host_tier_it_is_that_which_keeps() -> None:
    bench = replica_bench(keep=1)
    bench.load(1, "a b")
    bench.run()
    assert bench.cells() in ("a", "b")


def test_a_reset_keeps_nothing_for_anybody() -> None:
    bench = replica_bench()
    bench.load(1, "a")
    bench.run()
    bench.step(DropSaves(forget=True, generation=1))
    assert bench.slots() == "4 0 0"


# Whatever happens in whatever order


@dataclass
class World:
    """What has been asked and answered."""

    bench: Bench
    open: set[int] = field(default_factory=set)
    told: dict[int, list[str]] = field(default_factory=dict)

    def take(self, lines: list[str]) -> None:
        for line in lines:
            if line.startswith(("lent", "loan ")):
                self.told.setdefault(int(line.split()[1].rstrip(":")), []).append(line)


MOVES = st.one_of(
    st.tuples(st.just("lend"), st.sampled_from("abcd"), st.sampled_from("abcd")),
    st.tuples(st.just("over"), st.integers(0, 9), st.just("")),
    st.tuples(st.just("load"), st.sampled_from("abcd"), st.sampled_from("abcd")),
    st.tuples(st.just("end"), st.integers(0, 3), st.sampled_from([DONE, MISSING, CORRUPT])),
    st.tuples(st.just("after"), st.sampled_from([0.1, HOLD_S, LOAN_S]), st.just("")),
    st.tuples(st.just("reset"), st.just(""), st.just("")),
)


@given(st.lists(MOVES, max_size=25), st.sampled_from([0, 2]))
def test_every_loan_is_answered_once_and_no_slot_is_lost(
    moves: list[tuple[str, object, object]], keep: int
) -> None:
    """The engine checks its invariants after every step, pins and slots among them."""
    bench = replica_bench(SET, keep=keep, slots=6)
    world, job, generation = World(bench), 0, 0
    for number, (what, first, second) in enumerate(moves):
        if what == "lend":
            world.open.add(number)
            cells = f"{first} {second}" if first != second else str(first)
            world.take(lend(bench, number, cells, 1 + number % 2, generation))
        elif what == "over" and world.open:
            assert isinstance(first, int)
            loan = sorted(world.open)[first % len(world.open)]
            world.open.discard(loan)
            world.take(over(bench, loan))
        elif what == "load":
            job += 1
            world.take(bench.load(job, f"{first}" if first == second else f"{first} {second}"))
        elif what == "end" and bench.running:
            assert isinstance(first, int)
            assert isinstance(second, CellOutcome)
            batches = sorted(bench.running)
            world.take(bench.ends(batches[first % len(batches)], second))
        elif what == "after":
            assert isinstance(first, float)
            world.take(bench.after(first))
        elif what == "reset":
            generation += 1
            world.take(bench.step(DropSaves(forget=True, generation=generation)))
    while bench.running:
        world.take(bench.ends(next(iter(bench.running))))
    for loan in sorted(world.open):
        world.take(over(bench, loan))
    bench.after(HOLD_S)
    while bench.running:
        bench.ends(next(iter(bench.running)))
    bench.after(HOLD_S)
    assert bench.engine.idle
    held = len(bench.cells().split())
    assert held <= keep
    assert bench.slots() == f"{6 - held} {held} 0"
    for lines in world.told.values():
        assert len([line for line in lines if line.startswith("lent")]) <= 1
        assert len([line for line in lines if line.startswith("loan")]) == 1
