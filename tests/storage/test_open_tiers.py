"""Names of tiers."""

from vllm_kvpool.storage.open_tiers import tier_names


def test_tiers_of_one_kind_are_told_apart_by_a_number() -> None:
    assert tier_names(["memory", "file", "file", "s3", "file"]) == (
        *("memory", "file", "file2", "s3", "file3"),
    )
    assert tier_names([]) == ()
