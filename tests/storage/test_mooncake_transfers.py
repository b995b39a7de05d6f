"""Puts in sessions and reads of an engine, with a client and an engine that fail as told."""

import pytest

from tests.support.fakes import FakeClock
from tests.support.mooncake_client import (
    FAILED,
    NOT_FOUND,
    RPC_FAILED,
    FakeMooncakeClient,
    FakeReadEngine,
    FakeReplica,
)
from vllm_kvpool.storage import mooncake_transfers
from vllm_kvpool.storage.mooncake_engine import WRITTEN
from vllm_kvpool.storage.mooncake_transfers import READ_FAILED, EngineReads, PutSessions

CONFIG = object()
EXISTS, FULL = -705, -200


@pytest.fixture
def client() -> FakeMooncakeClient:
    return FakeMooncakeClient()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def sessions(client: FakeMooncakeClient, clock: FakeClock) -> PutSessions:
    return PutSessions(client, clock)


def put(sessions: PutSessions, keys: str) -> list[int]:
    """Put objects whose keys are single letters."""
    count = len(keys)
    return sessions.put(list(keys), list(range(count)), [100] * count, CONFIG)


def test_what_exists_or_has_no_room_is_not_sent(
    client: FakeMooncakeClient, sessions: PutSessions
) -> None:
    client.start_codes = {"b": EXISTS, "d": FULL}
    assert put(sessions, "abcd") == [0, EXISTS, 0, FULL]
    assert client.calls[1:] == [("transfer", ["a", "c"]), ("end", ["a", "c"])]
    assert not client.sessions


@pytest.mark.parametrize("codes", [{"a": RPC_FAILED, "b": RPC_FAILED}, {"a": EXISTS, "b": FULL}])
def test_without_a_session_there_is_no_other_call(
    client: FakeMooncakeClient, sessions: PutSessions, codes: dict[str, int]
) -> None:
    client.start_codes = codes
    assert put(sessions, "ab") == list(codes.values())
    assert client.calls == [("start", ["a", "b"])]


def test_an_object_that_did_not_arrive_is_revoked_and_its_neighbours_are_stored(
    client: FakeMooncakeClient, sessions: PutSessions
) -> None:
    client.broken = {"b"}
    assert put(sessions, "abc") == [0, FAILED, 0]
    assert set(client.objects) == {"a", "c"}
    assert not client.sessions
    client.broken.clear()
    assert put(sessions, "b") == [0]
    assert client.calls[-1] == ("end", ["b"])


def test_a_session_that_cannot_be_ended_is_revoked(
    client: FakeMooncakeClient, sessions: PutSessions
) -> None:
    client.ends = False
    assert put(sessions, "ab") == [RPC_FAILED, RPC_FAILED]
    assert not client.sessions


def test_a_key_whose_session_the_client_keeps_is_put_without_one(
    client: FakeMooncakeClient, sessions: PutSessions
) -> None:
    client.ends = client.revokes = False
    assert put(sessions, "a") == [RPC_FAILED]
    client.ends = client.revokes = True
    assert put(sessions, "ab") == [0, 0]
    assert client.calls[-1] == ("put", ["a", "b"])
    assert put(sessions, "b") == [0]
    assert client.calls[-1] == ("end", ["b"])


def test_a_key_that_another_call_has_a_session_of_is_put_without_one(
    client: FakeMooncakeClient, sessions: PutSessions
) -> None:
    inner: list[list[int]] = []

    def put_the_same() -> None:
        client.during_transfer = lambda: None
        inner.append(put(sessions, "bc"))

    client.during_transfer = put_the_same
    assert put(sessions, "ab") == [0, 0]
    assert inner == [[0, 0]]
    assert ("put", ["b", "c"]) in client.calls
    assert not client.sessions


def test_after_a_stall_the_rest_of_a_call_fails_at_once(
    client: FakeMooncakeClient,
    sessions: PutSessions,
    clock: FakeClock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mooncake_transfers, "TRANSFER_KEYS", 2)
    client.broken = {"b"}
    assert put(sessions, "abcde") == [0, FAILED, 0, 0, 0]  # at once: not the peer of the others

    def stall() -> None:
        clock.advance(10)

    client.during_transfer = stall
    client.calls.clear()
    assert put(sessions, "abcde") == [0] + [FAILED] * 4
    assert [name for name, _ in client.calls] == ["start", "transfer", "end", "revoke"]
    assert not client.sessions
    client.broken.clear()
    assert put(sessions, "abcde") == [0] * 5  # slow, but it arrives


# Reads


@pytest.fixture
def engine() -> FakeReadEngine:
    return FakeReadEngine()


@pytest.fixture
def reads(client: FakeMooncakeClient, engine: FakeReadEngine, clock: FakeClock) -> EngineReads:
    def sleep(seconds: float) -> None:
        clock.advance(seconds)
        engine.pause(seconds)

    client.replicas = {chr(97 + n): [FakeReplica(buffer_address=n)] for n in range(26)}
    return EngineReads(client, lambda: engine, clock, sleep)


def get(reads: EngineReads, keys: str) -> list[int]:
    """Get objects of 100 bytes, whose keys are single letters; `a` lies at address 0."""
    return reads.get(list(keys), [1000 + n for n in range(len(keys))], [100] * len(keys))


def test_reads_are_polled_with_pauses_and_few_are_in_flight(
    reads: EngineReads, engine: FakeReadEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mooncake_transfers, "FIRST_READS", 2)
    monkeypatch.setattr(mooncake_transfers, "MAX_READS", 3)
    assert get(reads, "abcdefg") == [100] * 7
    assert engine.begun == list(range(7))
    assert engine.most_flying == 3
    assert engine.num_asked == 14


def test_what_is_on_a_disk_or_missing_is_asked_of_the_client(
    client: FakeMooncakeClient, reads: EngineReads, engine: FakeReadEngine
) -> None:
    client.replicas["b"] = [FakeReplica(is_in_memory=False)]
    client.replicas["c"].insert(0, FakeReplica(is_in_memory=False))
    del client.replicas["d"]
    assert get(reads, "abcd") == [100, 100, 100, NOT_FOUND]
    assert engine.begun == [0, 2]
    assert client.calls[-1] == ("get", ["b", "d"])


def test_what_is_in_the_own_segment_is_copied_by_the_client(
    client: FakeMooncakeClient, engine: FakeReadEngine
) -> None:
    client.replicas = {key: [FakeReplica(buffer_address=n)] for n, key in enumerate("abc")}
    client.replicas["b"][0].transport_endpoint = "own:2"
    reads = EngineReads(client, lambda: engine, sleep=engine.pause, own_session="own:2")
    assert get(reads, "abc") == [100] * 3
    assert engine.begun == [0, 2]
    assert client.calls[-1] == ("get", ["b"])


def test_an_object_of_another_size_is_not_read(
    client: FakeMooncakeClient, reads: EngineReads, engine: FakeReadEngine
) -> None:
    client.replicas["a"][0].size = 99
    client.replicas["b"][0].size = 101
    assert get(reads, "abc") == [99, 101, 100]
    assert engine.begun == [2]


def test_a_read_that_fails_costs_its_object(reads: EngineReads, engine: FakeReadEngine) -> None:
    engine.refused, engine.broken = {1}, {3}
    assert get(reads, "abcde") == [100, READ_FAILED, 100, READ_FAILED, 100]


@pytest.mark.parametrize(
    ("replicas", "code"),
    [
        ([FakeReplica(buffer_address=77)], READ_FAILED),
        ([FakeReplica(is_in_memory=False)], 100),
        (None, NOT_FOUND),
    ],
    ids=["elsewhere in memory", "on disk", "evicted"],
)
def test_object_that_leaves_its_place_meanwhile_fails_or_is_asked_of_the_client(
    client: FakeMooncakeClient,
    engine: FakeReadEngine,
    reads: EngineReads,
    replicas: list[FakeReplica] | None,
    code: int,
) -> None:
    def move(seconds: float) -> None:
        engine.pause(seconds)
        client.replicas.pop("b", None)
        client.replicas |= {"b": replicas} if replicas else {}

    assert get(EngineReads(client, lambda: engine, sleep=move), "abc") == [100, code, 100]


def test_after_a_stall_no_read_begins(
    reads: EngineReads, engine: FakeReadEngine, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mooncake_transfers, "FIRST_READS", 2)
    monkeypatch.setattr(mooncake_transfers, "MAX_READS", 2)
    monkeypatch.setattr(mooncake_transfers, "MAX_PAUSE_S", 10.0)
    monkeypatch.setattr(mooncake_transfers, "MIN_PAUSE_S", 10.0)
    engine.broken = {1}
    assert get(reads, "abcde") == [100, READ_FAILED, 100, READ_FAILED, READ_FAILED]
    assert engine.begun == [0, 1, 2]


@pytest.mark.parametrize("num_answered", [0, 1], ids=["alone", "beside one that answers"])
def test_reads_from_silent_peer_end_after_one_round_of_its_transfers(
    client: FakeMooncakeClient,
    reads: EngineReads,
    engine: FakeReadEngine,
    monkeypatch: pytest.MonkeyPatch,
    num_answered: int,
) -> None:
    """Mooncake moves four reads of a peer at a time, and fails each after 5 s without a byte."""
    monkeypatch.setattr(mooncake_transfers, "MAX_PAUSE_S", 10.0)
    monkeypatch.setattr(mooncake_transfers, "MIN_PAUSE_S", 10.0)
    for [replica] in list(client.replicas.values())[num_answered:]:
        replica.transport_endpoint = "peer:2"
    engine.broken = set(range(num_answered, 16))
    silent = 16 - num_answered
    assert get(reads, "abcdefghijklmnop") == [100] * num_answered + [READ_FAILED] * silent
    assert engine.begun == list(range(num_answered + 4))


def test_an_error_comes_out_when_no_read_is_in_flight(
    reads: EngineReads, engine: FakeReadEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, check = engine.batch_transfer_async_read, engine.transfer_check_status
    written: list[int] = []

    def fail_the_second(
        session: str, targets: list[int], sources: list[int], sizes: list[int]
    ) -> int:
        if engine.begun:
            raise OSError("no memory")
        return begin(session, targets, sources, sizes)

    def note(number: int) -> int:
        status = check(number)
        written.extend([number] * (status == WRITTEN))
        return status

    monkeypatch.setattr(engine, "batch_transfer_async_read", fail_the_second)
    monkeypatch.setattr(engine, "transfer_check_status", note)
    with pytest.raises(OSError, match="no memory"):
        get(reads, "ab")
    assert len(written) == 1
