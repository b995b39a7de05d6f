import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator

import pytest

from tests.support.processes import process_of, session
from vllm_kvpool.router.ops.commands import LaunchHost
from vllm_kvpool.router.ops.supervisor import (
    MARK,
    Marks,
    Presence,
    Process,
    Signal,
    describe_code,
    is_there,
    last_lines,
    parse_stat,
    read_marks,
    read_presence,
    signal_command,
)

STAT = "41 (a) b (c)) S 1 41 41 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 5397147 31 3"
HERE = LaunchHost(name="here")
BOUND_S = 10.0


def ask(process: Process, sent: Signal = Signal.NONE) -> Presence:
    command = signal_command(HERE, process, sent)
    done = subprocess.run(command, capture_output=True, text=True, timeout=BOUND_S, check=True)
    assert done.stderr == ""
    return read_presence(done.stdout)


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A session of its own with a child in it, both asleep."""
    script = "sleep 60 & echo; wait"
    with subprocess.Popen(
        ["sh", "-c", script], start_new_session=True, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout
        process.stdout.readline()
        yield process
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def wait_until_empty(pid: int) -> None:
    deadline = time.monotonic() + BOUND_S
    while session(pid):
        assert time.monotonic() < deadline, session(pid)
        time.sleep(0.01)


def test_the_name_of_a_program_cannot_shift_what_is_read() -> None:
    assert parse_stat(STAT) == ("S", 5397147)
    with pytest.raises(ValueError, match="no line"):
        parse_stat("41 (x) S 1")


@pytest.mark.parametrize(
    ("process", "line", "there"),
    [
        (Process("boot", 41, 5397147), STAT, True),
        (Process("boot", 41, 5397146), STAT, False),  # the pid is used again
        (Process("other", 41, 5397147), STAT, False),  # the machine was restarted
        (Process("boot", 41, 5397147), STAT.replace(") S", ") Z"), False),
        (Process("boot", 41, 5397147), None, False),
    ],
)
def test_a_process_is_known_by_more_than_its_pid(
    process: Process, line: str | None, there: bool
) -> None:
    assert is_there(process, "boot", line) is there


def test_a_live_process_is_there_and_left_alone(sleeper: subprocess.Popen[bytes]) -> None:
    assert ask(process_of(sleeper.pid)) is Presence.ALIVE
    assert len(session(sleeper.pid)) == 2


def test_term_goes_to_the_engine_alone(sleeper: subprocess.Popen[bytes]) -> None:
    process = process_of(sleeper.pid)
    assert ask(process, Signal.TERM) is Presence.ALIVE
    assert sleeper.wait(BOUND_S) == -15
    assert len(session(sleeper.pid)) == 1
    assert ask(process) is Presence.GONE


def test_kill_goes_to_its_whole_session(sleeper: subprocess.Popen[bytes]) -> None:
    ask(process_of(sleeper.pid), Signal.KILL)
    assert sleeper.wait(BOUND_S) == -9
    wait_until_empty(sleeper.pid)


def test_kill_finds_what_a_dead_engine_has_left(sleeper: subprocess.Popen[bytes]) -> None:
    process = process_of(sleeper.pid)
    sleeper.kill()
    sleeper.wait(BOUND_S)
    assert len(session(sleeper.pid)) == 1
    assert ask(process, Signal.KILL) is Presence.GONE
    wait_until_empty(sleeper.pid)


def test_an_engine_that_nobody_has_reaped_is_gone() -> None:
    with subprocess.Popen(["true"]) as ended:
        process = process_of(ended.pid)
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
        assert ask(process) is Presence.GONE


@pytest.mark.parametrize("sent", Signal)
@pytest.mark.parametrize("changes", [{"start_ticks": 1}, {"boot_id": "other"}])
def test_a_namesake_is_left_alone(
    sleeper: subprocess.Popen[bytes], sent: Signal, changes: dict[str, object]
) -> None:
    real = process_of(sleeper.pid)
    fields = {name: getattr(real, name) for name in real.__struct_fields__}
    assert ask(Process(**{**fields, **changes}), sent) is Presence.GONE
    assert len(session(sleeper.pid)) == 2


@pytest.mark.parametrize(
    ("printed", "presence"),
    [
        (f"Welcome!\n{MARK} alive\nlogout\n", Presence.ALIVE),
        (f"{MARK} gone\n", Presence.GONE),
        ("gone\n", Presence.UNKNOWN),
        ("", Presence.UNKNOWN),
        (f"{MARK} maybe\n", Presence.UNKNOWN),
    ],
)
def test_answers_are_found_among_what_hosts_print(printed: str, presence: Presence) -> None:
    assert read_presence(printed) is presence


def test_marks_are_read_among_what_engines_print() -> None:
    text = (
        f"Welcome to far\n{MARK} id1 supervisor boot {STAT}\n"
        f"{MARK} id2 engine boot {STAT}\n{MARK} id1 engine far {STAT}\n"
        f"INFO starting\n{MARK} id1 exit 143\n"
    )
    supervisor, engine = Process("boot", 41, 5397147), Process("far", 41, 5397147)
    assert read_marks(text, "id1") == Marks(supervisor, engine, 143)
    assert read_marks(text, "id3") == Marks()
    assert last_lines(text, 5) == ("Welcome to far", "INFO starting")
    assert last_lines(text, 1) == ("INFO starting",)


def test_a_mark_that_is_not_whole_yet_is_not_read() -> None:
    whole = f"{MARK} id1 supervisor boot {STAT}\n"
    for end in range(len(whole)):
        assert read_marks(whole[:end], "id1") == Marks()


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (None, "exit code unknown"),
        (1, "exit code 1"),
        (137, "ended by SIGKILL"),
        (255, "exit code 255"),
    ],
)
def test_exit_codes_in_words(code: int | None, words: str) -> None:
    assert describe_code(code) == words
