from pathlib import Path

import pytest

from vllm_kvpool.errors import ConfigError
from vllm_kvpool.router.ops.ledger import EngineRecord, Ledger
from vllm_kvpool.router.ops.processes import Process


def record(replica_id: str, **changes: object) -> EngineRecord:
    return EngineRecord(
        **{  # type: ignore[arg-type]
            "replica_id": replica_id,
            "host": "here",
            "port": 8001,
            "role": "decode",
            "launch_id": "a1",
            "log_path": "r1.log",
            "stop_timeout_s": 60.0,
            "kill_timeout_s": 10.0,
            "engine": Process("boot", 41, 5),
            **changes,
        }
    )


def test_the_next_router_reads_what_the_last_one_wrote(tmp_path: Path) -> None:
    path = tmp_path / "state" / "engines.json"
    ledger = Ledger(path)
    ledger.put(record("r1"))
    ledger.put(record("r2"))
    ledger.put(record("r1", role="prefill"))
    ledger.remove("r2")
    ledger.close()
    after = Ledger(path)
    assert dict(after.records) == {"r1": record("r1", role="prefill")}
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    after.close()


def test_no_two_routers_have_one_state(tmp_path: Path) -> None:
    first = Ledger(tmp_path / "engines.json")
    with pytest.raises(ConfigError, match="held by another router"):
        Ledger(tmp_path / "engines.json")
    first.close()
    Ledger(tmp_path / "engines.json").close()


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"version":1}', '{"version":2,"engines":[]}', '{"version":1,"engines":[3]}'],
)
def test_what_cannot_be_read_is_put_aside_and_said(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "engines.json"
    path.write_text(text)
    ledger = Ledger(path)
    assert dict(ledger.records) == {}
    assert (tmp_path / "engines.json.unreadable").read_text() == text
    assert "engines of a former router are not known" in caplog.text
    ledger.close()


def test_a_write_that_was_cut_short_leaves_the_former_state(tmp_path: Path) -> None:
    path = tmp_path / "engines.json"
    ledger = Ledger(path)
    ledger.put(record("r1"))
    ledger.close()
    (tmp_path / "engines.json.new").write_text('{"version":1,"eng')
    after = Ledger(path)
    assert list(after.records) == ["r1"]
    after.put(record("r2"))
    after.close()


def test_a_place_that_cannot_be_had_is_a_mistake_of_configuration(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be kept in"):
        Ledger(tmp_path / "file" / "engines.json")


def test_a_state_that_cannot_be_read_is_left_to_others(tmp_path: Path) -> None:
    path = tmp_path / "engines.json"
    path.mkdir()
    with pytest.raises(ConfigError, match="cannot be read") as failed:
        Ledger(path)
    path.rmdir()
    Ledger(path).close()  # the failure, which still is held, holds no lock
    assert failed.value is not None


def test_a_full_disk_does_not_stop_the_router(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ledger = Ledger(tmp_path / "engines.json")
    (tmp_path / "engines.json.new").mkdir()  # stands for any OSError
    ledger.put(record("r1"))
    assert list(ledger.records) == ["r1"]
    assert "is not up to date" in caplog.text
    ledger.close()
