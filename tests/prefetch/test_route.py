"""From where to where cells can be brought, and what engines are started with."""

import pytest

from vllm_kvpool.prefetch.route import Route, pool_options, route_of, scheme_of

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


@pytest.mark.parametrize(
    ("url", "scheme"),
    [("file:///x?size=1GiB", "file"), ("S3://b/p", "s3"), ("", ""), ("host://8GiB", "host")],
)
def test_schemes(url: str, scheme: str) -> None:
    assert scheme_of(url) == scheme


OURS = '{"kv_connector":"KVPoolConnector","kv_role":"kv_both"'


@pytest.mark.parametrize(
    ("given", "options"),
    [
        (OURS + "}", {}),
        (OURS + ',"kv_connector_extra_config":{"store":"s3://x"}}', {"store": "s3://x"}),
        ('{"kv_connector":"NixlConnector"}', None),
        ("{}", None),
        (
            '{"kv_connector":"MultiConnector","kv_connector_extra_config":{"connectors":['
            '{"kv_connector":"NixlConnector"},' + OURS + ',"kv_connector_extra_config":'
            '{"chunk_tokens":64}}]}}',
            {"chunk_tokens": 64},
        ),
    ],
)
def test_the_pools_options_among_connectors(given: str, options: object) -> None:
    assert pool_options(given) == options


@pytest.mark.parametrize(
    "given",
    ["", "[]", "{", '{"kv_connector":3}', '{"kv_connector_extra_config":{"connectors":7}}'],
)
def test_what_is_no_configuration(given: str) -> None:
    with pytest.raises(ValueError, match="no configuration of a connector"):
        pool_options(given)
