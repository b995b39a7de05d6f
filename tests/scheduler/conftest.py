"""Benches that are closed when their test has ended."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.scheduler.scheduler_bench import Bench

Make = Callable[..., Bench]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Bench] = []

    def make(**options: Any) -> Bench:
        made.append(Bench(**options))
        return made[-1]

    yield make
    for bench in made:
        bench.close()


@pytest.fixture
def bench(make: Make) -> Bench:
    return make()
