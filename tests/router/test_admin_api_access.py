"""Access to the admin address: token, host and origin."""

import pytest

from vllm_kvpool.router.ops.admin_api import Access

ACCESS = Access("s3cret+/=", hosts=("Router.internal",))


@pytest.mark.parametrize(
    ("authorization", "status"),
    [
        ("Bearer s3cret+/=", None),
        ("bearer s3cret+/=", None),
        ("BEARER  s3cret+/= ", None),
        (None, 401),
        ("", 401),
        ("Bearer", 401),
        ("Bearer ", 401),
        ("Bearer s3cret+/", 401),
        ("Bearer s3cret+/==", 401),
        ("Bearer S3CRET+/=", 401),
        ("s3cret+/=", 401),
        ("Basic s3cret+/=", 401),
        ("Bearer s\udcffcret", 401),
        ("Bearer geheimnis-ü", 401),
    ],
)
def test_only_the_token_opens(authorization: str | None, status: int | None) -> None:
    denial = ACCESS.check_token(authorization)
    assert (denial.status if denial else None) == status


def test_a_denial_does_not_say_the_token() -> None:
    denial = ACCESS.check_token("Bearer wrong")
    assert denial is not None
    assert "s3cret" not in str(denial)


@pytest.mark.parametrize(
    "host",
    [
        *("127.0.0.1:8001", "10.1.2.3", "localhost", "localhost:8001", "LOCALHOST:1"),
        *("[::1]:8001", "[fe80::1]", "router.internal:8001", "ROUTER.INTERNAL"),
    ],
)
def test_addresses_localhost_and_names_that_were_given_are_ours(host: str) -> None:
    assert ACCESS.check_place(host, None) is None
    assert ACCESS.check_place(host, f"http://{host}") is None


@pytest.mark.parametrize(
    "host",
    [
        *(None, "", "evil.example", "evil.example:8001", "127.0.0.1.evil.example"),
        *("localhost.evil.example", "router.internal.evil.example", "127.0.0.1@evil.example"),
        *("[::1", "::1", "127.0.0.1:port", "a b", "router.internal:8001:9", "localhost/x"),
    ],
)
def test_other_names_are_refused_however_they_came_to_point_here(host: str | None) -> None:
    denial = ACCESS.check_place(host, None)
    assert denial.status == 403


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://127.0.0.1:8001", None),
        ("https://127.0.0.1:8001", None),
        ("https://router.internal", None),
        ("http://127.0.0.1:8002", 403),
        ("http://127.0.0.1", 403),
        ("http://evil.example", 403),
        ("http://router.internal.evil.example", 403),
        ("null", 403),
        ("", 403),
    ],
)
def test_requests_of_other_pages_are_refused(origin: str, status: int | None) -> None:
    denial = ACCESS.check_place("127.0.0.1:8001", origin)
    assert (denial.status if denial else None) == status


def test_an_empty_token_is_a_bug() -> None:
    with pytest.raises(AssertionError):
        Access("")
