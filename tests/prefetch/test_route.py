"""From where to where cells can be brought."""

import pytest

from vllm_kvpool.prefetch.route import Route, route_of

ROUTES: list[tuple[list[str], Route | None]] = [
    ([], None),
    (["file"], None),
    (["s3"], None),
    (["mooncake", "s3"], None),
    (["host", "mooncake"], None),
    (["memory", "s3"], None),
    (["file", "file"], None),
    (["file", "memory"], None),
    (["mooncake", "file"], None),  # what stands behind the files alone is further away
    (["file", "s3"], Route(0, (1,))),
    (["file", "mooncake", "s3"], Route(0, (1, 2))),
    (["host", "file", "mooncake"], Route(1, (2,))),
    (["mooncake", "file", "s3"], Route(1, (2,))),
    (["file", "file", "s3"], Route(0, (2,))),
]


@pytest.mark.parametrize(("schemes", "route"), ROUTES)
def test_routes(schemes: list[str], route: Route | None) -> None:
    assert route_of(schemes) == route
