"""Names of tiers, and pauses before another try."""

from vllm_kvpool.transfer.context import RETRY_FIRST_S, RETRY_JITTER, retry_pause_s, tier_names


def test_tiers_of_one_kind_are_told_apart_by_a_number() -> None:
    assert tier_names(["memory", "file", "file", "s3", "file"]) == (
        *("memory", "file", "file2", "s3", "file3"),
    )
    assert tier_names([]) == ()


def test_the_pause_before_a_retry_doubles_less_a_part_by_chance() -> None:
    assert retry_pause_s(1, 0.0) == RETRY_FIRST_S
    assert retry_pause_s(3, 0.0) == 4 * RETRY_FIRST_S
    assert retry_pause_s(1, 1.0) == RETRY_FIRST_S * (1 - RETRY_JITTER)
