from pathlib import Path

import pytest

from vllm_kvpool.errors import ConfigError
from vllm_kvpool.router.ops.state_file import MAX_UNREADABLE, EngineRecord, StateFile


def record(replica_id: str, **changes: object) -> EngineRecord:
    return EngineRecord(
        **{  # type: ignore[arg-type]
            "replica_id": replica_id,
            "host": "here",
            "port": 8001,
            "role": "decode",
            "log_path": "r1.log",
            "stop_timeout_s": 60.0,
            **changes,
        }
    )


def test_the_next_router_reads_what_the_last_one_wrote(tmp_path: Path) -> None:
    path = tmp_path / "state" / "engines.json"
    state_file = StateFile(path)
    state_file.put(record("r1"))
    state_file.put(record("r2"))
    state_file.put(record("r1", role="prefill"))
    state_file.remove("r2")
    state_file.close()
    after = StateFile(path)
    assert dict(after.records) == {"r1": record("r1", role="prefill")}
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    after.close()


def test_no_two_routers_have_one_state(tmp_path: Path) -> None:
    first = StateFile(tmp_path / "engines.json")
    with pytest.raises(ConfigError, match="held by another router"):
        StateFile(tmp_path / "engines.json")
    first.close()
    StateFile(tmp_path / "engines.json").close()


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"version":2}', '{"version":1,"engines":[]}', '{"version":2,"engines":[3]}'],
)
def test_what_cannot_be_read_is_put_aside_and_said(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "engines.json"
    path.write_text(text)
    state_file = StateFile(path)
    assert dict(state_file.records) == {}
    assert (tmp_path / "engines.json.unreadable").read_text() == text
    assert "engines that a former router started are not known" in caplog.text
    state_file.close()


def test_a_write_that_was_cut_short_leaves_the_former_state(tmp_path: Path) -> None:
    path = tmp_path / "engines.json"
    state_file = StateFile(path)
    state_file.put(record("r1"))
    state_file.close()
    (tmp_path / "engines.json.new").write_text('{"version":1,"eng')
    after = StateFile(path)
    assert list(after.records) == ["r1"]
    after.put(record("r2"))
    after.close()


def test_no_file_beside_the_state_is_lost(tmp_path: Path) -> None:
    """Neither one that was there before, nor a state that was put aside before."""
    path = tmp_path / "engines.json"
    others = [tmp_path / f"engines.json.{end}" for end in ("new", "tmp", "unreadable")]
    for each in others:
        each.write_text("precious")
    for number in range(1, MAX_UNREADABLE):
        path.write_text(f"{number}")
        state_file = StateFile(path)
        state_file.put(record("r1"))
        state_file.close()
        assert (tmp_path / f"engines.json.unreadable{number}").read_text() == f"{number}"
    path.write_text("one more")
    with pytest.raises(ConfigError, match="kept from before"):
        StateFile(path)
    assert path.read_text() == "one more"
    assert {each.read_text() for each in others} == {"precious"}


def test_a_place_that_cannot_be_had_is_a_mistake_of_configuration(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"state_dir .* cannot be made"):
        StateFile(tmp_path / "file" / "engines.json")


def test_a_state_that_cannot_be_read_is_left_to_others(tmp_path: Path) -> None:
    path = tmp_path / "engines.json"
    path.mkdir()
    with pytest.raises(ConfigError, match="cannot be read") as failed:
        StateFile(path)
    path.rmdir()
    StateFile(path).close()  # the failure, which still is held, holds no lock
    assert failed.value is not None


def test_a_full_disk_does_not_stop_the_router(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state_file = StateFile(tmp_path / "state" / "engines.json")
    (tmp_path / "state").rename(tmp_path / "gone")  # stands for any OSError
    state_file.put(record("r1"))
    assert list(state_file.records) == ["r1"]
    assert "is not up to date" in caplog.text
    state_file.close()
