"""Creation of the transfer engine that a process shares, with a fake Mooncake wheel."""

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


@pytest.mark.parametrize(("protocol", "is_told"), [("tcp", False), ("rdma", True)])
def test_an_engine_that_does_not_use_its_protocol_is_told(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    protocol: str,
    is_told: bool,
) -> None:
    """Embeddings over protocol=rdma on a host without RDMA go over TCP."""
    native = SimpleNamespace(initialize=lambda *arguments: 0)
    wheel = SimpleNamespace(TransferEngine=lambda: native)
    monkeypatch.setattr(mooncake_engine, "_engine_wheel", lambda: wheel)
    monkeypatch.setenv(FORCE_TCP, "1")  # as if there were no device
    with caplog.at_level("INFO"):
        SharedEngine(protocol).open("127.0.0.1")
    assert "transport tcp" in caplog.text
    assert any(each.levelname == "WARNING" for each in caplog.records) == is_told
