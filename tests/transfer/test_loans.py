"""Loans: slabs in one rank's host memory, from which other ranks of its host scatter. Events only,
no threads."""

import pytest

from tests.transfer.engine_bench import CELL_BYTES, in_words, slab_of, slots_of
from tests.transfer.scripts import Example, examples, play
from vllm_kvpool.transfer.ops import Ask, Lent

# As a lender


@examples(
    """
loan of a slab that no tier has is refused
    on disk replicas=True; lend 1 a b; ends 0 done missing -> lends 1: 2 no | check a
    run -> lends 1: 1 yes
loan of a slab that a tier has damaged is refused
    on disk replicas=True; lend 1 a b; ends 0 done corrupt -> lends 1: 2 no | check a | remove-0 b
    run -> lends 1: 1 yes
loan of a slab that tiers have in part is refused
    # The cell that one tier gave has a slot when the fetch fails.
    on disk far replicas=True; lend 1 a0 a1 -> 0 get-0 a0 a1; ends 0 done missing -> 1 check a0
    ends 1 -> 2 get-1 a1; ends 2 missing -> lends 1: 1 no; idle
loan from the host tier is answered at once
    on disk keep=2 replicas=True; save 1 a; run; lend 1 a -> lends 1: 1 yes; give_back 1; host a
loan holds its slots until it is returned
    # Otherwise a borrower would scatter the bytes of another slab.
    on disk keep=1 slots=2 replicas=True; save 1 a; run; lend 1 a; save 2 b -> nothing
    give_back 1 -> first 3 gather b
loan that is not returned ends in time
    on disk keep=1 slots=2 replicas=True; save 1 a; run; lend 1 a; after LOAN_S*0.99; busy
    after LOAN_S*0.01; idle; give_back 1 -> nothing
loans of a borrower that has gone end at once
    on disk keep=2 replicas=True; save 1 a; run; lend 1 a; lend 1 a who=2; borrower_gone
    busy; borrower_gone 2; clean
loan that ends during its fetch leaves nothing {returned: give_back 1|gone: borrower_gone}
    on disk replicas=True; lend 1 a; {}; run; after HOLD_S; slots 4 0 0; host
loan over a reset is refused {0|2}
    on disk keep=2 replicas=True; reset generation=1; save 1 a; run
    lend 1 a generation={} -> lends 1: 1 no; lend 2 a generation=1 -> lends 1: 2 yes
loan from before a reset holds its slots
    # Its borrower, too, asked before the reset.
    on disk keep=2 replicas=True; save 1 a; run; lend 1 a; reset generation=1; slots 3 1 0
    give_back 1; slots 4 0 0
loan with an id in use is refused
    on disk keep=2 replicas=True; save 1 a; run; lend 1 a; lend 1 a -> lends 1: 1 no; give_back 1
    clean
"""
)
def test_as_a_lender(example: Example) -> None:
    example.play()


def test_loan_of_an_absent_slab_fetches_and_checks_it_first() -> None:
    bench = play("on disk replicas=True; lend 1 a b -> 0 get-0 a b; ends 0 -> 1 check a b; ends 1")
    [message] = bench.sent
    assert isinstance(message, Lent)
    assert in_words(message) == "lends 1: 1 yes, 2 yes"
    lent = [slot for _, slots in message.loans for slot in slots]
    assert bench.slots() == f"2 {len(set(lent))} 0"


def test_loan_of_a_slab_of_another_size_is_refused() -> None:
    bench = play("on disk keep=2 replicas=True; save 1 a; run")
    longer = slab_of("a")._replace(sizes=(CELL_BYTES + 1,), nbytes=CELL_BYTES + 1)
    assert bench.step(Ask(1, ((1, longer),), 0)) == ["lends 1: 1 no"]


# As a borrower


@examples(
    """
scatter that ends after its loan is a lost cell
    # The lender may have given the slots to another slab meanwhile.
    on disk replicas=True; borrow 1 a b; answer 1; wait LOAN_S/2; answer 2; ends 0; wait LOAN_S/2
    ends 1 -> first loaded 1 to 1 timed_out; clean
scatter that ends within its loan counts
    on disk replicas=True; borrow 1 a; answer 1; wait LOAN_S*0.99
    ends 0 -> first loaded 1 to 1 done
slab that the lender lacks is fetched from the tiers, with {0|2} cells in the host tier
    # The lender keeps it.
    on disk replicas=True keep={}; borrow 1 a; lacks 1 -> 0 get-0 a
    run -> check a | scatter a | loaded 1 to 1 done; host
answer with too few slots counts as none
    on disk replicas=True; borrow 1 a0 a1; answer 1 -> 0 get-0 a0 a1
lender that does not answer is left alone for a while
    on disk replicas=True; borrow 1 a; after ASK_S -> 0 get-0 a; run; borrow 2 b -> 3 get-0 b
    answer 1 -> returns 1: 1; run; after FIRST_PAUSE_S; borrow 3 c -> asks 1: c
asks of a lender that has gone are fetched from the tiers, and it is never asked again
    on disk replicas=True; borrow 1 a; lender_gone -> 0 get-0 a; run; after 1000
    borrow 2 b -> get-0 b
loan of a lender that has gone stays valid
    # Nobody hands out the slots of a dead process.
    on disk replicas=True; borrow 1 a; answer 1; lender_gone; ends 0 -> first loaded 1 to 1 done
slab that nobody has is missing
    on disk replicas=True; borrow 1 a; lacks 1; ends 0 missing -> loaded 1 to 0 missing
lender gives what no tier has
    on replicas=SET keep=2; borrow 1 a; answer 1; run -> loaded 1 to 1 done | returns 1: 1
two loads share a loan
    on disk replicas=True; borrow 1 a; borrow 2 a -> nothing; answer 1
    ends 0 -> loaded 1 to 1 done | loaded 2 to 1 done | returns 1: 1
slab that this rank borrows is not lent
    # Otherwise two ranks could wait for each other.
    on disk replicas=True; borrow 1 a; lend 1 a -> lends 1: 1 no
loan that no load wants any more goes back {cancel: cancel 1|reset: reset generation=1}
    on disk replicas=True; borrow 1 a; {}; answer 1 -> ... returns 1: 1; clean
scatter that fails gives its loan back
    on disk replicas=True; borrow 1 a; answer 1
    ends 0 failed -> loaded 1 to 0 failed | returns 1: 1
"""
)
def test_as_a_borrower(example: Example) -> None:
    example.play()


@pytest.mark.parametrize("keep", [0, 2])
def test_borrowed_slab_is_scattered_from_the_lenders_slots(keep: int) -> None:
    """The lender has checked the slab, and its host tier keeps it."""
    bench = play(f"on disk keep={keep} replicas=True; borrow 1 a b -> asks 1: a b; answer 1 2")
    assert slots_of(bench.running[0]) == [1 << 40] * 2
    assert bench.slots() == "4 0 0"
    assert bench.ends(0) == ["loaded 1 to 2 done", "returns 1: 1 2"]
    assert bench.cells() == ""
    assert bench.counted("kvpool_hit_cells", tier="replica") == 2
    labels = {"direction": "load", "store": "replica"}
    assert bench.counted("kvpool_cells", **labels, outcome="done") == 2
    assert bench.counted("kvpool_bytes", **labels) == 2 * CELL_BYTES


# Retained for a while


@examples(
    """
fetched slab stays for members that ask later
    on disk replicas=True; load 1 a; run; lend 1 a -> lends 1: 1 yes; give_back 1
    lend 1 a who=2 -> lends 2: 1 yes; give_back 1 who=2; after HOLD_S; slots 4 0 0; host
lent slab stays for the own load
    on disk replicas=True; lend 1 a; run; give_back 1; load 1 a -> 2 scatter a
slabs fetched last are retained within the bound
    # A load goes on; a late member has the others fetched again.
    on disk slots=4 replicas=True; load 1 a b c d e f; run -> last loaded 1 to 6 done; host e f
slab of a layer group of this rank alone is not retained
    on disk replicas=other; load 1 a; run; host
host tier keeps slabs instead
    on disk replicas=True keep=1; load 1 a b; run; host a; idle
reset drops retained slabs
    on disk replicas=True; load 1 a; run; reset generation=1; slots 4 0 0
"""
)
def test_retained_for_a_while(example: Example) -> None:
    example.play()
