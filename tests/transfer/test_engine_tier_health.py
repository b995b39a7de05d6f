"""Tiers watched by guards outside the engine: no batch goes to an absent tier; a returned tier is
used at once."""

from tests.transfer.scripts import Example, examples


@examples(
    """
what waits for a tier that has gone away goes elsewhere, past every pause of its own
    on memory disk slots=8 tiers=2x1; load 1 a b c d; tier_down 0 -> 2 get-1 c | 3 get-1 d
    load 2 e -> nothing
    each 3-7: after LONGEST_PAUSE_S; load $ f -> no get-0; run -> no get-0
    tier_up 0 -> nothing; load 9 g -> get-0 g; run; clean
saves skip a tier that has gone away
    on memory disk slots=8 tiers=2x1; save 1 a b c d; run_but put-0 put-1
    lanes put-0 put-0 put-1 put-1; tier_down 0; run -> no put-0; told ... saved 1: 4 done
    save 2 e; run -> no put-0; tier_up 0; save 3 f; run -> ... put-0 f; clean
a tier that went away between seal and put gets none
    on disk; save 1 a; ends 0; tier_down 0; ends 1 -> saved 1: 1 unreachable; clean
a tier whose writes are paused between seal and put gets none
    on disk; save 1 a; ends 0; tier_full 0; ends 1 -> saved 1: 1 unreachable; clean
what was under way does not bring a tier back
    on disk tiers=2x1; load 1 a b; tier_down 0; ends 0 done; run
    load 2 c -> loaded 2 to 0 unreachable
a tier that is there again is asked though its pause is not over
    on disk; load 1 a; hangs 0; load 2 a -> loaded 2 to 0 unreachable; tier_up 0
    load 3 a -> 1 get-0 a; ends 1 failed -> loaded 3 to 0 failed
    load 4 a -> loaded 4 to 0 unreachable; late 0; clean
news of a tier may come twice
    on disk
    each up up down down up up: tier_$ 0 -> nothing
    load 1 a -> 0 get-0 a
a call that hangs does not end the hold on its tier
    on disk tiers=2x1; load 1 a b; tier_down 0; hangs 0; hangs 1; after LONGEST_PAUSE_S
    load 2 a -> loaded 2 to 0 unreachable; late 0; late 1 cancelled; clean
a tier whose puts fail is read and written again after a pause
    on disk slots=8; save 0 a; run put any failed -> last saved 0: 1 failed
    save 1 b; run put any failed -> last saved 1: 1 failed
    save 2 c; run put any failed -> last saved 2: 1 failed
    count tier_up 1 tier=disk; count tier_writable 0 tier=disk
    save 3 d -> last saved 3: 1 unreachable; load 4 e -> get-0 e; run; after FIRST_PAUSE_S
    count tier_up 1 tier=disk; count tier_writable 1 tier=disk
    save 5 f; run -> last saved 5: 1 done; clean
puts that wait are given up when the writes of their tier are paused
    on disk slots=8 tiers=2x1; save 1 a b c d; run_but put-0; tier_full 0; load 2 e -> get-0 e
    run -> no put-0; told ... saved 1: 2 unreachable, 2 done; clean
"""
)
def test_tiers_that_others_watch(example: Example) -> None:
    example.play()
