import os
import subprocess
from pathlib import Path

from tests.support.processes import process_of
from vllm_kvpool.router.ops.supervisor import (
    LOG_BYTES,
    EngineRecord,
    end_supervisor,
    log_text,
    open_log,
    rotate_log,
    supervisor_lives,
)


def record(pid: int | None, log_path: str = "none.log") -> EngineRecord:
    """Of an engine whose supervisor is a process of this machine."""
    supervisor = None if pid is None else process_of(pid)
    return EngineRecord(
        replica_id="r1",
        host="here",
        port=1,
        role="decode",
        launch_id="x",
        log_path=log_path,
        stop_timeout_s=1.0,
        kill_timeout_s=1.0,
        supervisor=supervisor,
    )


def test_a_supervisor_is_ended_once() -> None:
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as process:
        supervisor = record(process.pid)
        assert supervisor_lives(supervisor)
        end_supervisor(supervisor)
        assert process.wait(10) == -9
    assert not supervisor_lives(supervisor)
    end_supervisor(supervisor)
    assert not supervisor_lives(record(None))


def test_an_orphan_that_the_router_was_left_with_is_reaped() -> None:
    with subprocess.Popen(["true"]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        supervisor = record(process.pid)
        assert not supervisor_lives(supervisor)
        assert not Path(f"/proc/{process.pid}").exists()


def test_only_the_ends_of_a_log_are_read(tmp_path: Path) -> None:
    path = tmp_path / "r1.log"
    path.write_bytes(b"a" * LOG_BYTES + b"\xff" + b"z" * LOG_BYTES)
    entry = record(None, str(path))
    assert log_text(entry) == "a" * LOG_BYTES
    assert log_text(entry, from_end=True) == "z" * LOG_BYTES
    path.write_bytes(b"\xffb")
    assert log_text(entry, from_end=True) == "\ufffdb"
    path.unlink()
    assert log_text(entry) == ""


def test_a_log_is_rotated_while_an_engine_writes_it(tmp_path: Path) -> None:
    path = tmp_path / "one.log"
    with open_log(path) as engine:
        engine.write(b"x" * 100)
        engine.flush()
        rotate_log(path, max_bytes=100)
        assert path.stat().st_size == 100, "it may have so many"
        engine.write(b"y")
        engine.flush()
        rotate_log(path, max_bytes=100)
        engine.write(b"z")
    assert path.read_bytes() == b"z"
    assert (tmp_path / "one.log.1").read_bytes() == b"x" * 100 + b"y"
    rotate_log(tmp_path / "none.log")
