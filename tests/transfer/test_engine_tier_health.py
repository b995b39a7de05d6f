"""Tiers that somebody else watches: gone away, nobody tries them; there again, at once."""

from tests.transfer.engine_bench import (
    CANCELLED,
    DISK,
    DONE,
    FAILED,
    MEMORY,
    Bench,
    two_batches,
    words,
)
from vllm_kvpool.storage.breaker import FAILURES_TO_OPEN, FIRST_PAUSE_S, LONGEST_PAUSE_S
from vllm_kvpool.transfer.ops import CellOutcome, OpKind, TierHealth


def test_what_waits_for_a_tier_that_has_gone_away_goes_elsewhere() -> None:
    bench = two_batches(MEMORY, DISK, slots=8)
    bench.load(1, "a b c d")
    assert words(bench.health(0, up=False)) == ["get-1 c", "get-1 d"]
    assert words(bench.load(2, "e")) == []
    assert bench.running[2].lane.tier == 1
    for job in range(3, 8):  # past every pause of its own
        bench.after(LONGEST_PAUSE_S)
        told = bench.load(job, "f") + bench.run()
        assert not any("get-0" in line for line in told)
    assert words(bench.health(0, up=True)) == []
    assert words(bench.load(9, "g")) == ["get-0 g"]
    bench.run()
    assert bench.is_clean


def test_saves_skip_a_tier_that_has_gone_away() -> None:
    bench = two_batches(MEMORY, DISK, slots=8)
    bench.save(1, "a b c d")
    bench.run_but("put-0", "put-1")
    assert sum(batch.lane.tier == 0 for batch in bench.running.values()) == 2
    bench.health(0, up=False)
    told = bench.run()
    assert not any("put-0" in line for line in told)
    assert "saved 1: 4 done" in told
    bench.save(2, "e")
    assert not any("put-0" in line for line in bench.run())
    bench.health(0, up=True)
    bench.save(3, "f")
    assert "put-0 f" in bench.run()
    assert bench.is_clean


def test_a_tier_that_went_away_between_seal_and_put_gets_none() -> None:
    bench = Bench(DISK)
    bench.save(1, "a")
    bench.ends(0)
    bench.health(0, up=False)
    assert bench.ends(1) == ["saved 1: 1 unreachable"]
    assert bench.is_clean


def test_a_tier_whose_writes_are_paused_between_seal_and_put_gets_none() -> None:
    bench = Bench(DISK)
    bench.save(1, "a")
    bench.ends(0)
    bench.step(TierHealth(0, is_up=True, is_writable=False))
    assert bench.ends(1) == ["saved 1: 1 unreachable"]
    assert bench.is_clean


def test_what_was_under_way_does_not_bring_a_tier_back() -> None:
    bench = two_batches(DISK)
    bench.load(1, "a b")
    bench.health(0, up=False)
    bench.ends(0, DONE)
    bench.run()
    assert bench.load(2, "c") == ["loaded 2 to 0 unreachable"]


def test_a_tier_that_is_there_again_is_asked_though_its_pause_is_not_over() -> None:
    bench = Bench(DISK)
    bench.load(1, "a")
    bench.hangs(0)
    assert bench.load(2, "a") == ["loaded 2 to 0 unreachable"]
    bench.health(0, up=True)
    assert bench.load(3, "a") == ["1 get-0 a"]
    assert bench.ends(1, FAILED) == ["loaded 3 to 0 failed"]
    assert bench.load(4, "a") == ["loaded 4 to 0 unreachable"]  # one failure is enough
    bench.late(0)
    assert bench.is_clean


def test_news_of_a_tier_may_come_twice() -> None:
    bench = Bench(DISK)
    for up in (True, True, False, False, True, True):
        assert bench.health(0, up=up) == []
    assert bench.load(1, "a") == ["0 get-0 a"]


def test_a_call_that_hangs_does_not_end_the_hold_on_its_tier() -> None:
    bench = two_batches(DISK)
    bench.load(1, "a b")
    bench.health(0, up=False)
    bench.hangs(0)
    bench.hangs(1)
    bench.after(LONGEST_PAUSE_S)
    assert bench.load(2, "a") == ["loaded 2 to 0 unreachable"]
    bench.late(0)
    bench.late(1, CANCELLED)
    assert bench.is_clean


def test_a_tier_whose_puts_fail_is_read_and_written_again_after_a_pause() -> None:
    bench = Bench(DISK, slots=8)

    def put(job: int, key: str, outcome: CellOutcome) -> list[str]:
        told = bench.save(job, key)
        return told + bench.run(lambda lane, key: outcome if lane.kind is OpKind.PUT else DONE)

    for job in range(FAILURES_TO_OPEN):
        assert put(job, "abc"[job], FAILED)[-1] == f"saved {job}: 1 failed"
    is_up, is_writable = "kvpool_tier_up", "kvpool_tier_writable"
    assert [bench.counted(name, tier="disk") for name in (is_up, is_writable)] == [1, 0]
    assert put(3, "d", DONE)[-1] == "saved 3: 1 unreachable"
    assert words(bench.load(4, "e")) == ["get-0 e"]
    bench.run()
    bench.after(FIRST_PAUSE_S)
    assert [bench.counted(name, tier="disk") for name in (is_up, is_writable)] == [1, 1]
    assert put(5, "f", DONE)[-1] == "saved 5: 1 done"
    assert bench.is_clean


def test_puts_that_wait_are_given_up_when_the_writes_of_their_tier_are_paused() -> None:
    bench = two_batches(DISK, slots=8)
    bench.save(1, "a b c d")
    bench.run_but("put-0")
    bench.step(TierHealth(0, is_up=True, is_writable=False))
    assert words(bench.load(2, "e")) == ["get-0 e"]
    told = bench.run()
    assert not any("put-0" in line for line in told)
    assert "saved 1: 2 unreachable, 2 done" in told or "saved 1: 2 done, 2 unreachable" in told
    assert bench.is_clean
