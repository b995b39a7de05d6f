"""How the engine that a process shares is made, with a wheel that notes it."""

import os
from types import SimpleNamespace

import pytest

from vllm_kvpool.errors import StoreUnreachable
from vllm_kvpool.storage import mooncake_engine
from vllm_kvpool.storage.mooncake_engine import SharedEngine

FORCE_TCP = "MC_FORCE_TCP"


@pytest.mark.parametrize(
    ("protocol", "users", "wanted", "code"),
    [
        ("tcp", None, "1", 0),
        ("tcp", None, "1", -1),
        ("tcp", "0", "0", 0),  # Mooncake takes any value for yes
        ("rdma", None, None, 0),
    ],
)
def test_tcp_is_forced_for_no_other_engine_of_the_process(
    monkeypatch: pytest.MonkeyPatch,
    protocol: str,
    users: str | None,
    wanted: str | None,
    code: int,
) -> None:
    seen: list[str | None] = []

    class TransferEngine:
        def initialize(self, *arguments: str) -> int:
            seen.append(os.environ.get(FORCE_TCP))
            return code

    monkeypatch.delenv(FORCE_TCP, raising=False)
    if users is not None:
        monkeypatch.setenv(FORCE_TCP, users)
    wheel = SimpleNamespace(TransferEngine=TransferEngine)
    monkeypatch.setattr(mooncake_engine, "_engine_wheel", lambda: wheel)
    engine = SharedEngine(protocol)
    if code:
        with pytest.raises(StoreUnreachable):
            engine.open("127.0.0.1")
    else:
        engine.open("127.0.0.1")
    assert seen == [wanted]
    assert os.environ.get(FORCE_TCP) == users
