"""Processes that are forked from one that has imported vLLM; here, something small of its name."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.nursery import Forked, Nursery, NurseryError, needs_new_python

LIMIT_S = 20.0
VLLM = """
import atexit, ctypes, os
print("imported", flush=True)
libc = ctypes.CDLL(None)
libc.strdup.restype = ctypes.c_void_p
text = ctypes.c_void_p(libc.strdup(b"libraries end"))
def work(pipe):
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
    from vllm.distributed.utils import USE_SCHED_YIELD
    polls = (USE_SCHED_YIELD, SpinCondition().busy_loop_s)
    pipe.send((os.getppid(), os.environ["WHOSE"], os.sched_getaffinity(0), polls))
__version__ = "of " + os.environ["WHOSE"]
class LLM:
    def __init__(self, **arguments):
        print("started by", os.environ["WHOSE"], flush=True)
        from vllm.model_executor.models.registry import _run_in_subprocess as look
        told = {"group": os.getpgid(0), "looked in": look(os.getpid)}
        self.reset_prefix_cache = lambda: {**arguments, **os.environ, **told}
        self.sleep = os._exit
        self.llm_engine = self.engine_core = self
        self.shutdown = lambda: print("stopped", flush=True)
        self.wake_up = lambda tags: start_rank()
        atexit.register(print, "at exit")
        libc["__cxa_atexit"](libc.perror, text, None)
def start_rank():
    from vllm.v1.executor.multiproc_executor import get_mp_context
    context = get_mp_context()
    told, tell = context.Pipe(duplex=False)
    rank = context.Process(target=work, args=(tell,), daemon=True)
    rank.start()
    parent, whose, cores, polls = told.recv()
    rank.join()
    return [parent == os.getpid(), whose, sorted(cores), polls, rank.exitcode]
"""


SHM_BROADCAST = """
class SpinCondition:
    def __init__(self, busy_loop_s=1):
        self.busy_loop_s = busy_loop_s
"""


class Rig:
    """A nursery, its log, and one log of all its engines."""

    def __init__(self, directory: Path, vllm: str = VLLM) -> None:
        executor = directory / "vllm" / "v1" / "executor"
        executor.mkdir(parents=True)
        (directory / "vllm" / "__init__.py").write_text(vllm)
        (executor / "multiproc_executor.py").write_text("get_mp_context = None")
        communicators = directory / "vllm" / "distributed" / "device_communicators"
        communicators.mkdir(parents=True)
        (communicators.parent / "utils.py").write_text("USE_SCHED_YIELD = True")
        (communicators / "shm_broadcast.py").write_text(SHM_BROADCAST)
        (communicators / "cpu_communicator.py").write_text("class CpuCommunicator: pass")
        models = directory / "vllm" / "model_executor" / "models"
        models.mkdir(parents=True)
        (models / "registry.py").write_text("_run_in_subprocess = None")
        platforms = directory / "vllm" / "platforms"
        platforms.mkdir()
        (platforms / "cpu.py").write_text("class CpuPlatform: pass")
        self.log_path = directory / "log"
        self.log = self.log_path.open("wb")
        self.engines_log_path = directory / "engines.log"
        self.engines_log = self.engines_log_path.open("wb")
        self.env = {**os.environ, "PYTHONPATH": str(directory), "WHOSE": "the nursery"}
        self.nursery = self.connect()
        assert self.nursery.started is not None
        self.process = self.nursery.started
        self.replies: dict[int, int] = {}

    def connect(self) -> Nursery:
        address = f"\0kvpool-test-{self.log_path.parent}"
        return Nursery(address, Path(sys.executable), self.env, self.log)

    def fork(self, whose: str, nursery: Nursery | None = None, **env_too: str) -> Forked:
        nursery = nursery or self.nursery
        replies, write = os.pipe()
        env = {**self.env, "WHOSE": whose, **env_too}
        try:
            forked = nursery.fork(env, self.engines_log, write, time.monotonic() + LIMIT_S)
        finally:
            os.close(write)
        self.replies[forked.pid] = replies
        return forked

    def call(self, forked: Forked, op: str, argument: object) -> object:
        forked.stdin.write(json.dumps([op, argument]).encode() + b"\n")
        forked.stdin.flush()
        line = b""
        while not line.endswith(b"\n"):
            data = os.read(self.replies[forked.pid], 1 << 20)
            assert data, "it has ended"
            line += data
        outcome, value = json.loads(line)
        assert outcome == "ok", value
        return value

    def close(self) -> None:
        self.nursery.close()
        self.process.wait(LIMIT_S)
        for replies in self.replies.values():
            os.close(replies)
        self.log.close()
        self.engines_log.close()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    rig.close()


def test_engines_are_forked_with_an_environment_and_a_group_of_their_own(rig: Rig) -> None:
    engines = [rig.fork(whose) for whose in ("one", "two")]
    for engine, whose in zip(engines, ("one", "two"), strict=True):
        rig.call(engine, "start", {"seed": 7})
        told = rig.call(engine, "reset_prefix_cache", None)
        assert isinstance(told, dict)
        assert (told["WHOSE"], told["seed"], told["group"]) == (whose, 7, engine.pid)
        assert told["looked in"] == engine.pid, "a model's class is looked at in a new Python"
        assert engine.poll() is None
    for engine in engines:
        engine.stdin.close()
        assert engine.wait(LIMIT_S) == engine.poll() == 0
    assert rig.log_path.read_text() == "imported\n", "once, and nothing else was printed there"
    lines = rig.engines_log_path.read_text().splitlines()
    ends = ["stopped", "at exit", "libraries end: Success"]
    assert lines == ["started by one", "started by two", *ends, *ends]


def test_an_engine_may_end_without_its_teardown(rig: Rig) -> None:
    engine = rig.fork("one")
    rig.call(engine, "start", {})
    rig.call(engine, "skip_teardown", None)
    engine.stdin.close()
    assert engine.wait(LIMIT_S) == 0
    lines = rig.engines_log_path.read_text().splitlines()
    assert lines == ["started by one", "stopped", "at exit"]


@pytest.mark.parametrize("binding", ["GOMP_CPU_AFFINITY", "OMP_PLACES"])
def test_ranks_are_forked_from_their_engine_and_bound_to_its_cores(rig: Rig, binding: str) -> None:
    """They poll for orders but briefly, and do not yield their core meanwhile."""
    core = max(os.sched_getaffinity(0))
    engine = rig.fork("one", **{binding: f"{{{core}}}" if binding == "OMP_PLACES" else f"{core}"})
    rig.call(engine, "start", {})
    assert rig.call(engine, "wake_up", None) == [True, "one", [core], [False, 0.02], 0]
    engine.stdin.close()
    assert engine.wait(LIMIT_S) == 0


def test_how_an_engine_has_ended_is_told(rig: Rig) -> None:
    killed, failed, lives = rig.fork("one"), rig.fork("two"), rig.fork("three")
    os.killpg(killed.pid, signal.SIGKILL)
    assert killed.wait(LIMIT_S) == -signal.SIGKILL
    rig.call(failed, "start", {})
    failed.stdin.write(b'["sleep", 3]\n')
    failed.stdin.flush()
    assert failed.wait(LIMIT_S) == 3
    with pytest.raises(subprocess.TimeoutExpired):
        lives.wait(0.01)
    lives.stdin.close()
    assert lives.wait(LIMIT_S) == 0
    for ended in (killed, failed):
        ended.stdin.close()


def test_an_engine_ends_by_itself_when_its_nursery_is_killed(rig: Rig) -> None:
    engines = [rig.fork("one"), rig.fork("two")]
    rig.process.kill()
    for engine in engines:
        # Whoever would tell how it ends is gone, and nobody else holds that end: as if killed.
        assert engine.wait(LIMIT_S) == -signal.SIGKILL
    with pytest.raises(NurseryError):
        rig.fork("three")
    for engine in engines:
        rig.call(engine, "start", {})
        engine.stdin.close()
        assert not os.read(rig.replies[engine.pid], 1), "it still lives"


def test_all_of_a_run_order_from_one_and_it_ends_with_the_last(rig: Rig) -> None:
    others = [rig.connect(), rig.connect()]
    assert [other.started for other in others] == [None, None]
    engines = [rig.fork(whose, other) for whose, other in zip(("one", "two"), others, strict=True)]
    rig.nursery.close()
    others[0].close()
    assert others[1].alive
    engines.append(rig.fork("three", others[1]))
    others[1].close()
    assert not others[1].alive
    assert rig.process.wait(LIMIT_S) == 0
    for engine in engines:
        rig.call(engine, "start", {})
        engine.stdin.close()
        assert not os.read(rig.replies[engine.pid], 1), "it still lives"
    assert rig.log_path.read_text() == "imported\n"


def test_a_new_one_is_started_where_it_has_ended(rig: Rig) -> None:
    rig.process.kill()
    rig.process.wait(LIMIT_S)
    assert not rig.nursery.alive
    again = rig.connect()
    assert again.started is not None
    engine = rig.fork("one", again)
    engine.stdin.close()
    assert engine.wait(LIMIT_S) == 0
    again.close()
    assert again.started.wait(LIMIT_S) == 0


def test_a_failed_import_is_an_error_at_once(tmp_path: Path) -> None:
    rig = Rig(tmp_path, "raise ImportError('no such thing')")
    with pytest.raises(NurseryError):
        rig.fork("one")
    rig.close()
    assert "no such thing" in rig.log_path.read_text()


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, False),
        ({"KVPOOL_FAULTS": "/x", "VLLM_PLUGINS": "", "XDG_CACHE_HOME": "/x"}, False),
        ({"PYTHONHASHSEED": "1"}, True),
        ({"OMP_NUM_THREADS": "1"}, True),
    ],
)
def test_what_is_read_as_python_starts_needs_a_new_one(env: dict[str, str], expected: bool) -> None:
    assert needs_new_python(env) is expected
