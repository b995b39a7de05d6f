"""S3Store against a real server: the contract, and what a network and a service do to it."""

import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import pytest

from tests.support.buffers import make_buffer, random_bytes
from tests.support.object_server import (
    Answer,
    Cut,
    Fault,
    FaultyFront,
    Hang,
    Lose,
    ObjectServer,
    Rule,
    Seen,
    Shrink,
    Stall,
    Strip,
    in_turn,
)
from tests.support.store_contract import StoreContract, get_one, key_of, new_namespace, put_one
from vllm_kvpool.errors import ConfigError, StoreError, StoreUnreachable
from vllm_kvpool.identity.keys import make_namespace
from vllm_kvpool.storage import s3
from vllm_kvpool.storage.base import Buffer, ChunkRef, GetOutcome, PutOutcome, Store
from vllm_kvpool.storage.s3 import (
    CALL_TIMEOUT_S,
    GIVE_UP_AFTER,
    MAX_RETRIES,
    MAX_TRANSFERS,
    READ_TIMEOUT_S,
    S3Store,
    folder_of,
    make_client,
    object_name,
)
from vllm_kvpool.storage.url import S3Options

pytestmark = pytest.mark.s3

STORED, EXISTED = PutOutcome.STORED, PutOutcome.EXISTED
OK, MISSING = GetOutcome.OK, GetOutcome.MISSING
WRONG_SIZE = GetOutcome.WRONG_SIZE
BUCKET = "cells"


def options_for(endpoint: str, bucket: str = BUCKET, *, anonymous: bool = False) -> S3Options:
    return S3Options(
        bucket=bucket,
        prefix="team/kv",
        region="us-east-1",
        endpoint=endpoint,
        path_style=True,
        anonymous=anonymous,
    )


@pytest.fixture(autouse=True, scope="module")
def surroundings() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "test-id")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "test-secret")
        patch.setattr(s3, "BACKOFF_S", 0.002)  # so that tests do not wait
        yield


@pytest.fixture(scope="module")
def server() -> Iterator[ObjectServer]:
    with ObjectServer() as server:
        server.make_bucket(BUCKET)
        yield server


@pytest.fixture(scope="module")
def shared_store(server: ObjectServer) -> Iterator[Store]:
    store = S3Store(options_for(server.endpoint))
    yield store
    store.close()


@pytest.fixture
def store(shared_store: Store) -> Store:
    return shared_store


class TestS3Store(StoreContract):
    pass


@pytest.fixture
def front(server: ObjectServer) -> Iterator[FaultyFront]:
    with FaultyFront(server.port) as front:
        yield front


@pytest.fixture
def behind(front: FaultyFront) -> Iterator[Store]:
    """A store whose requests pass through the front; what it did to open is forgotten."""
    store = S3Store(options_for(front.endpoint), uniform=lambda: 0.0)
    front.reset()
    yield store
    store.close()


def holding(data: bytes) -> Buffer:
    buffer = make_buffer(len(data))
    buffer.view[:] = data
    return buffer


class Cell(NamedTuple):
    key: str
    source: Buffer


def a_cell(nbytes: int = 1000) -> Cell:
    """Return a key that no test has used, and bytes to put under it."""
    return Cell(key_of(new_namespace(), 0), holding(random_bytes(nbytes, 1)))


def assert_read(store: Store, cell: Cell) -> None:
    """Assert that the store gives the bytes of a cell."""
    target = make_buffer(cell.source.nbytes)
    assert get_one(store, cell.key, target) is OK
    assert target.view == cell.source.view


def took_less_than(limit_s: float, call: Callable[[], object]) -> object:
    start = time.monotonic()
    try:
        return call()
    finally:
        assert time.monotonic() - start < limit_s


def test_a_body_cut_in_the_middle_goes_on_from_the_byte_reached(
    behind: Store, front: FaultyFront
) -> None:
    cell = a_cell()
    put_one(behind, *cell)
    cuts = iter([Cut(400), Cut(250)])
    front.reset(lambda seen: next(cuts, None))
    assert_read(behind, cell)
    assert [seen.range for seen in front.seen] == [(0, 1000), (400, 1000), (650, 1000)]


def test_a_body_that_stalls_is_asked_for_again_from_the_byte_reached(
    front: FaultyFront, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3, "READ_TIMEOUT_S", 0.5)
    store = S3Store(options_for(front.endpoint))
    cell = a_cell()
    put_one(store, *cell)
    front.reset(lambda seen: Stall(400) if seen.range[0] == 0 else None)
    assert_read(store, cell)
    assert front.seen[-1].range == (400, 1000)
    store.close()


def test_a_body_that_is_always_cut_is_never_ok(behind: Store, front: FaultyFront) -> None:
    keys = [key_of(new_namespace(), number) for number in range(2)]
    source = holding(random_bytes(1000, 1))
    behind.put(keys, [source, source], [ChunkRef("g")] * 2)
    bad = object_name("team/kv/v1", keys[0])
    front.reset(lambda seen: Cut(0) if bad in seen.path else None)
    targets = [make_buffer(1000), make_buffer(1000)]
    outcomes = took_less_than(CALL_TIMEOUT_S + 1, lambda: behind.get(keys, targets))
    assert outcomes == [GetOutcome.FAILED, OK]
    assert front.count("GET") == 1 + 1 + MAX_RETRIES


def test_a_short_body_that_claims_to_be_whole_is_never_ok(
    behind: Store, front: FaultyFront
) -> None:
    cell = a_cell()
    put_one(behind, *cell)
    front.reset(lambda seen: Shrink(999))
    assert get_one(behind, *cell) is GetOutcome.FAILED


def test_an_object_replaced_while_it_is_read_is_never_mixed(
    behind: Store, front: FaultyFront, server: ObjectServer
) -> None:
    nbytes = 1000
    key, old, new = key_of(new_namespace(), 0), b"o" * nbytes, b"n" * nbytes
    put_one(behind, key, holding(old))

    def replace(seen: Seen) -> Fault | None:
        if seen.range[0]:
            server.request("PUT", f"/{BUCKET}/{object_name('team/kv/v1', key)}", new)
            return None
        return Cut(400)

    front.reset(replace)
    target = make_buffer(nbytes)
    with pytest.raises(StoreUnreachable, match="connection lost"):  # no other version goes on
        get_one(behind, key, target)
    front.reset()
    assert get_one(behind, key, target) is OK
    assert bytes(target.view) == new


def test_a_missing_bucket_is_no_missing_object(behind: Store, front: FaultyFront) -> None:
    key = key_of(new_namespace(), 0)
    front.reset(lambda seen: Answer(404, "NoSuchKey"))
    assert get_one(behind, key, make_buffer(1000)) is MISSING
    front.reset(lambda seen: Answer(404, "NoSuchBucket"))
    with pytest.raises(StoreError, match="404 NoSuchBucket"):
        get_one(behind, key, make_buffer(1000))


def test_an_empty_object_has_another_size(behind: Store, server: ObjectServer) -> None:
    key = key_of(new_namespace(), 0)
    server.request("PUT", f"/{BUCKET}/{object_name('team/kv/v1', key)}")
    assert get_one(behind, key, make_buffer(10)) is WRONG_SIZE


def test_a_storm_of_503_passes(behind: Store, front: FaultyFront) -> None:
    cell, storm = a_cell(), [Answer(503, "SlowDown")] * 3
    front.reset(in_turn("PUT", *storm))
    assert put_one(behind, *cell) is STORED
    front.reset(in_turn("GET", *storm))
    assert_read(behind, cell)
    front.reset(in_turn("HEAD", *storm))
    assert behind.exists([cell.key]) == [True]
    assert front.count("HEAD") == 4


def test_503_forever_is_unreachable_within_bounds(behind: Store, front: FaultyFront) -> None:
    keys = [key_of(new_namespace(), number) for number in range(100)]
    buffers = [make_buffer(1000)] * len(keys)
    front.reset(lambda seen: Answer(503, "SlowDown"))
    for call in (
        lambda: behind.exists(keys),
        lambda: behind.get(keys, buffers),
        lambda: behind.put(keys, buffers, [ChunkRef("")] * len(keys)),
        lambda: behind.remove(keys),
        lambda: behind.remove_namespace(new_namespace()),
    ):
        with pytest.raises(StoreUnreachable, match="503"):
            took_less_than(CALL_TIMEOUT_S + 1, call)
    # When the first was given up no more were begun; one more request lists names.
    assert front.count("GET") <= (MAX_TRANSFERS + 1) * (1 + MAX_RETRIES)


def test_a_server_that_goes_away_in_the_middle_of_a_call_is_given_up(
    behind: Store, front: FaultyFront
) -> None:
    keys = [key_of(new_namespace(), number) for number in range(10 * MAX_TRANSFERS)]
    front.reset(lambda seen: None if len(front.seen) < 10 else Answer(503))
    outcomes = behind.get(keys, [make_buffer(1000)] * len(keys))
    assert set(outcomes) == {MISSING, GetOutcome.FAILED}
    begun = MAX_TRANSFERS + 10 + GIVE_UP_AFTER
    assert front.count("GET") <= begun * (1 + MAX_RETRIES)


def test_a_server_that_answers_nothing_is_unreachable_within_bounds(
    behind: Store, front: FaultyFront, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3, "CALL_TIMEOUT_S", 0.3)
    key, buffer = key_of(new_namespace(), 0), make_buffer(1000)
    front.reset(lambda seen: Hang())
    for call in (
        lambda: behind.exists([key]),
        lambda: get_one(behind, key, buffer),
        lambda: put_one(behind, key, buffer),
    ):
        with pytest.raises(StoreUnreachable, match="no end within"):
            took_less_than(3, call)


def test_what_was_done_in_time_counts(
    behind: Store, front: FaultyFront, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [key_of(new_namespace(), number) for number in range(3)]
    source = holding(random_bytes(1000, 1))
    behind.put(keys, [source] * 3, [ChunkRef("g")] * 3)
    monkeypatch.setattr(s3, "CALL_TIMEOUT_S", 3.0)  # in which a busy machine answers the others
    hung = object_name("team/kv/v1", keys[1])
    front.reset(lambda seen: Hang() if hung in seen.path else None)
    targets = [make_buffer(1000) for _ in keys]
    assert behind.get(keys, targets) == [OK, GetOutcome.FAILED, OK]
    monkeypatch.setattr(s3, "CALL_TIMEOUT_S", 0.3)
    with pytest.raises(StoreUnreachable):
        behind.exists(keys)


def test_a_put_whose_answer_is_lost_is_found_to_be_stored(
    behind: Store, front: FaultyFront
) -> None:
    cell = a_cell()
    front.reset(in_turn("PUT", Lose(), *[Answer(503)] * MAX_RETRIES))
    assert put_one(behind, *cell) is EXISTED
    assert (front.count("PUT"), front.count("HEAD")) == (1 + MAX_RETRIES, 1)
    assert_read(behind, cell)


def test_a_put_that_never_arrived_is_put_again(behind: Store, front: FaultyFront) -> None:
    front.reset(in_turn("PUT", *[Answer(503)] * (1 + MAX_RETRIES)))
    assert put_one(behind, *a_cell()) is STORED
    assert (front.count("PUT"), front.count("HEAD")) == (2 + MAX_RETRIES, 1)


def test_a_bucket_over_its_quota_is_full(behind: Store, front: FaultyFront) -> None:
    keys = [key_of(new_namespace(), number) for number in range(2)]
    source = holding(b"x" * 1000)
    front.reset(in_turn("PUT", Answer(403, "QuotaExceeded"), Answer(400, "EntityTooLarge")))
    assert sorted(o.value for o in behind.put(keys, [source] * 2, [ChunkRef("g")] * 2)) == [
        "failed",
        "full",
    ]


def test_denied_is_an_error_and_never_absent(behind: Store, front: FaultyFront) -> None:
    keys = [key_of(new_namespace(), number) for number in range(3)]
    put_one(behind, keys[0], holding(b"x" * 1000))
    front.reset(lambda seen: Answer(403, "InvalidAccessKeyId"))
    with pytest.raises(StoreError, match="403") as denied:
        behind.exists(keys)
    assert not isinstance(denied.value, StoreUnreachable)
    with pytest.raises(StoreError, match="403 InvalidAccessKeyId") as denied:
        behind.get(keys, [make_buffer(1000)] * 3)
    shown = "".join(traceback.format_exception(denied.value))
    assert "SHOWN" not in shown
    assert "test-" not in shown
    hidden = object_name("team/kv/v1", keys[0])
    front.reset(lambda seen: Answer(403) if hidden in seen.path else None)
    assert behind.get(keys, [make_buffer(1000)] * 3) == [GetOutcome.FAILED, MISSING, MISSING]
    with pytest.raises(StoreError, match="403"):
        behind.exists(keys)


def test_a_put_is_one_conditional_request(behind: Store, front: FaultyFront) -> None:
    put_one(behind, key_of(new_namespace(), 0), holding(b"a" * 1000))
    [seen] = front.seen
    assert (seen.method, seen.headers["if-none-match"]) == ("PUT", "*")


@pytest.mark.parametrize("fault", [Strip("if-none-match"), Answer(501, "NotImplemented")])
def test_a_service_without_conditional_puts_is_asked_before_each(
    front: FaultyFront, caplog: pytest.LogCaptureFixture, fault: Fault
) -> None:
    rule: Rule = lambda seen: fault if "if-none-match" in seen.headers else None  # noqa: E731
    front.reset(rule)
    store = S3Store(options_for(front.endpoint))
    assert "has no conditional puts" in caplog.text
    front.reset(rule)
    cell = a_cell()
    assert put_one(store, *cell) is STORED
    assert [seen.method for seen in front.seen] == ["HEAD", "PUT"]
    assert put_one(store, cell.key, holding(b"b" * 1000)) is EXISTED
    assert_read(store, cell)
    store.close()


def test_a_large_object_is_one_conditional_put_and_one_get(
    behind: Store, front: FaultyFront
) -> None:
    cell = a_cell(40 << 20)
    assert put_one(behind, *cell) is STORED
    assert put_one(behind, cell.key, holding(b"b")) is EXISTED
    assert_read(behind, cell)
    assert [seen.method for seen in front.seen] == ["PUT", "PUT", "GET"]


def test_at_most_so_many_requests_of_a_call_are_under_way(
    behind: Store, front: FaultyFront, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3, "CALL_TIMEOUT_S", READ_TIMEOUT_S / 2)  # asked once
    keys = [key_of(new_namespace(), number) for number in range(2 * MAX_TRANSFERS)]
    front.reset(lambda seen: Hang())
    with pytest.raises(StoreUnreachable):
        behind.get(keys, [make_buffer(1000)] * len(keys))
    assert 0 < front.count("GET") <= MAX_TRANSFERS


def test_more_than_a_thousand_objects_are_removed(
    behind: Store, front: FaultyFront, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3, "MAX_DELETE_KEYS", 10)
    namespace = new_namespace()
    keys = [key_of(namespace, number) for number in range(25)]
    source = holding(b"x")
    behind.put(keys, [source] * 25, [ChunkRef("g")] * 25)
    front.reset()
    assert behind.remove_namespace(namespace) == 25
    assert front.count("POST") == 3
    assert behind.exists(keys) == [False] * 25
    behind.put(keys, [source] * 25, [ChunkRef("g")] * 25)
    front.reset()
    assert behind.remove([*keys, *keys, "absent"]) == 25
    assert front.count("POST") == 3


def test_a_server_that_was_killed_is_unreachable_and_works_again_when_back() -> None:
    with ObjectServer() as server:
        server.make_bucket(BUCKET)
        store = S3Store(options_for(server.endpoint))
        keys = [key_of(new_namespace(), number) for number in range(100)]
        buffers = [holding(b"x" * 1000)] * len(keys)
        assert set(store.put(keys, buffers, [ChunkRef("")] * len(keys))) == {STORED}
        server.kill()
        for call in (
            lambda: store.exists(keys),
            lambda: store.get(keys, buffers),
            lambda: store.put(keys, buffers, [ChunkRef("")] * len(keys)),
            lambda: store.remove(keys),
            lambda: store.remove_namespace(new_namespace()),
            lambda: S3Store(options_for(server.endpoint)),
        ):
            with pytest.raises(StoreUnreachable, match="refused"):
                took_less_than(CALL_TIMEOUT_S, call)
        assert server.start()
        server.make_bucket(BUCKET)
        assert store.exists(keys[:2]) == [False, False]
        assert put_one(store, keys[0], buffers[0]) is STORED
        assert get_one(store, keys[0], buffers[1]) is OK
        store.close()


def test_a_missing_bucket_is_refused_at_open(server: ObjectServer) -> None:
    with pytest.raises(ConfigError, match=r"no-such at http.*404 NoSuchBucket; check the name"):
        S3Store(options_for(server.endpoint, "no-such"))


def test_wrong_credentials_are_refused_at_open(server: ObjectServer) -> None:
    server.request("POST", "/moto-api/reset-auth", b"0")  # from now on the server checks them
    try:
        with pytest.raises(ConfigError, match="403 InvalidAccessKeyId; check") as refused:
            S3Store(options_for(server.endpoint))
    finally:
        server.request("POST", "/moto-api/reset-auth", b"inf")
    assert "test-" not in "".join(traceback.format_exception(refused.value))


def test_an_unsigned_request_carries_no_signature(front: FaultyFront) -> None:
    S3Store(options_for(front.endpoint)).close()
    assert all("authorization" in seen.headers for seen in front.seen)
    front.reset()
    S3Store(options_for(front.endpoint, anonymous=True)).close()
    assert front.seen
    assert not any("authorization" in seen.headers for seen in front.seen)


def test_a_bucket_in_the_endpoint_as_well_is_refused_at_open(server: ObjectServer) -> None:
    """Objects of such a store work, with the bucket's name before theirs, but no list does."""
    with pytest.raises(ConfigError, match="check the name of the bucket, region= and endpoint="):
        S3Store(options_for(f"{server.endpoint}/{BUCKET}"))


def test_an_endpoint_with_a_path_is_asked_there(front: FaultyFront) -> None:
    front.reset(lambda seen: Answer(404))
    with pytest.raises(ConfigError):
        S3Store(options_for(f"{front.endpoint}/storage/s3"))
    assert {seen.path.partition(f"/{BUCKET}")[0] for seen in front.seen} == {"/storage/s3"}


@pytest.mark.parametrize("answer", [Answer(403, "AccessDenied"), Answer(501, "NotImplemented")])
def test_lists_that_are_refused_are_said(
    front: FaultyFront, caplog: pytest.LogCaptureFixture, answer: Answer
) -> None:
    front.reset(lambda seen: answer if "list-type" in seen.path else None)
    store = S3Store(options_for(front.endpoint))
    assert "and `kvpool inspect` fail, as lists are refused: GET http" in caplog.text
    assert store.exists(["absent"]) == [False]
    store.close()


def test_rights_to_read_only_are_said(front: FaultyFront, caplog: pytest.LogCaptureFixture) -> None:
    front.reset(lambda seen: Answer(403, "AccessDenied") if seen.method == "PUT" else None)
    store = S3Store(options_for(front.endpoint))
    assert "cells are not saved, as puts are refused: PUT http" in caplog.text
    assert store.exists(["absent"]) == [False]
    store.close()


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (Answer(301, "PermanentRedirect"), "region"),
        (
            Answer(400, "AuthorizationHeaderMalformed"),
            "400 AuthorizationHeaderMalformed; .* region=",
        ),
        (Answer(404), "404; check the name"),  # a web server that is no object store
    ],
)
def test_wrong_region_or_server_is_refused_at_open(
    front: FaultyFront, answer: Answer, words: str
) -> None:
    front.reset(lambda seen: answer)
    with pytest.raises(ConfigError, match=words):
        S3Store(options_for(front.endpoint))


def test_the_bucket_is_in_the_path_or_in_the_host() -> None:
    options = options_for("http://127.0.0.1:9")
    for path_style, endpoint in [
        (True, "http://127.0.0.1:9"),
        (False, f"http://{BUCKET}.127.0.0.1:9"),
    ]:
        config = make_client(replace(options, path_style=path_style), {}).config
        assert config == {
            "bucket": BUCKET,
            "region": "us-east-1",
            "endpoint_url_s3": endpoint,
            "virtual_hosted_style_request": str(not path_style).lower(),
        }


def test_the_endpoint_of_the_url_goes_before_the_environments(
    front: FaultyFront, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    S3Store(options_for(front.endpoint)).close()
    assert front.seen


def test_an_answer_that_makes_no_sense_is_the_keys_own_failure(
    behind: Store, front: FaultyFront
) -> None:
    keys = [key_of(new_namespace(), number) for number in range(3)]
    source = holding(b"x" * 1000)
    for odd in (Answer(404), Answer(412), Answer(304), Answer(200), Answer(418, "Teapot")):
        front.reset(in_turn("GET", odd))
        outcomes = behind.get(keys[:1], [make_buffer(1000)])
        assert outcomes in ([GetOutcome.FAILED], [MISSING])
    front.reset(in_turn("PUT", Answer(404)))
    assert put_one(behind, keys[0], source) is PutOutcome.FAILED
    front.reset(in_turn("HEAD", Answer(409)))
    with pytest.raises(StoreError, match="409"):
        behind.exists(keys[:1])


def test_names_stay_below_their_prefix_and_never_meet() -> None:
    own = make_namespace("a.b+c", "0" * 12)
    assert object_name("p/v1", f"{own}@x").startswith("p/v1/a.b_2Bc_40fmt_3A000000000000/")
    assert object_name("p/v1", "../../x").startswith("p/v1/other/")
    names = {folder_of(name) for name in ("a.b+c", "a.b_2Bc", "a.b%2Bc", "a.b c", "a/b", "a_2Fb")}
    assert len(names) == 6
    assert not any("/" in name for name in names)


class PanicException(BaseException):
    """A panic as raised by pyo3: no subclass of `Exception`, and its type is in no module."""


@pytest.mark.parametrize("call", ["open", "exists", "put", "get"])
def test_panic_of_the_client_is_a_store_that_is_unreachable(
    server: ObjectServer, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Rust's runtime panics if it gets no threads; threads of an engine would end with it."""
    key, buffer = key_of(new_namespace(), 0), make_buffer(100)
    opened = S3Store(options_for(server.endpoint))

    def panic(*args: object, **options: object) -> None:
        raise PanicException("OS can't spawn worker thread")

    calls: dict[str, Callable[[], object]] = {
        "open": lambda: S3Store(options_for(server.endpoint)),
        "exists": lambda: opened.exists([key]),
        "put": lambda: opened.put([key], [buffer], [ChunkRef("")]),
        "get": lambda: opened.get([key], [buffer]),
    }
    with monkeypatch.context() as patch:
        for name in ("get_async", "head_async", "put_async"):
            patch.setattr(s3.obstore, name, panic)
        with pytest.raises(StoreUnreachable, match="the client has failed: OS can't spawn"):
            calls[call]()
    opened.close()
