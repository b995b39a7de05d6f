"""Access to the admin address: token, host and origin."""

import pytest

from vllm_kvpool.router.dataplane.origins import Origins
from vllm_kvpool.router.ops.admin_api import token_error

TOKEN = "s3cret+/="
ORIGINS = Origins(("Router.internal",), option="hosts of [admin]")


@pytest.mark.parametrize(
    ("authorization", "is_right"),
    [
        ("Bearer s3cret+/=", True),
        ("bearer s3cret+/=", True),
        ("BEARER  s3cret+/= ", True),
        (None, False),
        ("", False),
        ("Bearer", False),
        ("Bearer ", False),
        ("Bearer s3cret+/", False),
        ("Bearer s3cret+/==", False),
        ("Bearer S3CRET+/=", False),
        ("s3cret+/=", False),
        ("Basic s3cret+/=", False),
        ("Bearer s\udcffcret", False),
        ("Bearer geheimnis-ü", False),
    ],
)
def test_only_the_token_opens(authorization: str | None, is_right: bool) -> None:
    assert (token_error(authorization, TOKEN) is None) is is_right


def test_a_denial_does_not_say_the_token() -> None:
    why = token_error("Bearer wrong", TOKEN)
    assert why is not None
    assert "s3cret" not in why


@pytest.mark.parametrize(
    "host",
    [
        *("127.0.0.1:8001", "10.1.2.3", "localhost", "localhost:8001", "LOCALHOST:1"),
        *("[::1]:8001", "[fe80::1]", "router.internal:8001", "ROUTER.INTERNAL"),
    ],
)
def test_addresses_localhost_and_names_that_were_given_are_ours(host: str) -> None:
    assert ORIGINS.refusal(host, None) is None
    assert ORIGINS.refusal(host, f"http://{host}") is None


@pytest.mark.parametrize(
    "host",
    [
        *(None, "", "evil.example", "evil.example:8001", "127.0.0.1.evil.example"),
        *("localhost.evil.example", "router.internal.evil.example", "127.0.0.1@evil.example"),
        *("[::1", "::1", "127.0.0.1:port", "a b", "router.internal:8001:9", "localhost/x"),
    ],
)
def test_other_names_are_refused_however_they_came_to_point_here(host: str | None) -> None:
    assert ORIGINS.refusal(host, None) is not None


@pytest.mark.parametrize(
    ("origin", "is_ours"),
    [
        ("http://127.0.0.1:8001", True),
        ("https://127.0.0.1:8001", True),
        ("https://router.internal", True),
        ("http://127.0.0.1:8002", False),
        ("http://127.0.0.1", False),
        ("http://evil.example", False),
        ("http://router.internal.evil.example", False),
        ("null", False),
        ("", False),
    ],
)
def test_requests_of_other_pages_are_refused(origin: str, is_ours: bool) -> None:
    assert (ORIGINS.refusal("127.0.0.1:8001", origin) is None) is is_ours
