"""Hits by source: host memory where every rank has the chunk, the stores behind it for the rest."""

import pytest
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from vllm_kvpool.transfer.ops import JobId, LoadPlan
from vllm_kvpool.vllm_adapt.stats import HitSources

HOST, DISK = CacheHitSource.HOST, CacheHitSource.DISK
OTHER = CacheHitSource.EXTERNAL_UNSPECIFIED
CHUNK = 64


def load(start: int, stop: int) -> LoadPlan:
    first, last = start // CHUNK, -(-stop // CHUNK)
    hashes = tuple(bytes([chunk]) for chunk in range(first, last))
    return LoadPlan(JobId(1), "r", first, hashes, (), start, stop)


@pytest.mark.parametrize(
    ("kinds", "in_host", "start", "stop", "expected"),
    [
        (["file"], [], 0, 256, {DISK: 256}),
        (["mooncake"], [], 0, 256, {OTHER: 256}),
        (["s3"], [], 0, 256, {OTHER: 256}),
        (["file", "file"], [], 0, 256, {DISK: 256}),
        (["file", "s3"], [], 0, 256, {OTHER: 256}),
        (["file"], [0, 1], 0, 256, {HOST: 128, DISK: 128}),
        (["file"], [0, 1, 2, 3], 0, 255, {HOST: 255}),
        (["file"], [1], 96, 255, {HOST: 32, DISK: 127}),
        ([], [0, 1, 2, 3], 0, 256, {HOST: 256}),
    ],
)
def test_tokens_are_divided_by_chunk(
    kinds: list[str], in_host: list[int], start: int, stop: int, expected: dict[CacheHitSource, int]
) -> None:
    sources = HitSources(kinds)
    there = {bytes([chunk]) for chunk in in_host}
    assert sources.of(load(start, stop), stop - start, CHUNK, there.__contains__) == expected


def test_a_load_that_is_not_known_is_from_the_stores() -> None:
    assert HitSources(["file"]).of(None, 100, CHUNK, lambda _: True) == {DISK: 100}
