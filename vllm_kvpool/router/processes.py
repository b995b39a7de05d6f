"""The router's processes: one, or a supervisor with a controller's process and workers.

As process 1 of a container a router that starts engines has a supervisor, too: it reaps what they
leave behind.

The supervisor decides nothing and serves nothing. It is forked from before anything runs in it, and
holds the listening sockets: connections that a dead process had not accepted wait for the next one.
"""

import asyncio
import contextlib
import errno
import gc
import logging
import math
import os
import resource
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from vllm_kvpool.errors import ConfigError
from vllm_kvpool.router.config import BODY_COPIES, RouterConfig, listen_address
from vllm_kvpool.router.control.rates import Rates
from vllm_kvpool.router.dataplane.control_client import ControlClient
from vllm_kvpool.router.dataplane.data_plane import DataPlane, upstream_of
from vllm_kvpool.router.dataplane.messages import MessageConnection, ToWorker
from vllm_kvpool.router.ops.tenants import Tenants
from vllm_kvpool.router.run import Served, admin_token, serve_router, until_stopped

log = logging.getLogger(__name__)

SPARE_FILES = 512
BAD_CONFIG = 78
"""EX_CONFIG: exit code of a process that cannot start as it is configured."""
RESTART_S = 0.5
"""A process that has lived for less is started again after so long."""
REAP_S = 1.0
PULSE_S = 0.5
"""Each process says so often that its loop turns."""
MAX_MISSED = 10
"""Looks of REAP_S in which a process has said nothing, until it counts as hung. Looks are counted,
not seconds: a machine that was paused has stopped the supervisor as well."""
GC_THRESHOLD = 10_000
"""New objects until the youngest are searched for cycles; Python's 700 are those of one request."""
STOP_S = 10.0
"""Beside `front.shutdown_timeout_s`, until a process that should end is killed."""
RECONNECT_S = 0.02
SERVING = b"!"
"""What a process says once, when it has started; between, it says that it has not hung."""
_SIGNALS = {signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP}


def allow_connections(max_connections: int) -> int:
    """Let the process have so many of clients, and as many to engines; how many files it may have.

    What the system does not allow is said in the log: further connections will then be refused.
    """
    wanted = 2 * max_connections + SPARE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return soft
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < wanted:
        log.warning(
            "%d open files are allowed, %d connections may need %d; raise the limit (ulimit -n)",
            *(allowed, max_connections, wanted),
        )
    return allowed


def serve(config: RouterConfig, read: Callable[[], RouterConfig]) -> None:
    """Run a router until SIGINT or SIGTERM; ConfigError if it cannot start.

    On SIGHUP replicas (by `read`) and keys are read again.
    """
    allow_connections(config.front.max_connections)
    if config.front.workers > 1 or (config.hosts and os.getpid() == 1):
        with contextlib.closing(Supervisor(config, read)) as supervisor:
            supervisor.run()
    else:
        _run(serve_router(config, read))


def _run(main: Coroutine[Any, Any, None]) -> None:
    new_loop = None
    with contextlib.suppress(ImportError):
        import uvloop

        new_loop = uvloop.new_event_loop
    # A request makes a thousand objects: those there are from the start are not looked at again.
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(main)


async def _pulsing(main: Coroutine[Any, Any, None], pulse: int) -> None:
    """Run while the descriptor `pulse` is written to, as often as PULSE_S says."""
    loop = asyncio.get_running_loop()

    def beat() -> None:
        with contextlib.suppress(OSError):  # it is full, or the supervisor has ended
            os.write(pulse, b".")
        loop.call_later(PULSE_S, beat)

    beat()
    await main


def bind(listen: str) -> list[socket.socket]:
    """Sockets that listen at an address for one worker, beside those of others; ConfigError."""
    host, port = listen_address(listen)
    sockets: list[socket.socket] = []
    try:
        found = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        for family, address in dict.fromkeys((each[0], each[4]) for each in found):
            try:
                made = socket.create_server(address, family=family, reuse_port=True)
            except OSError as error:
                if error.errno == errno.EAFNOSUPPORT and len(found) > 1:
                    continue  # this machine has no IPv6
                raise
            sockets.append(made)
    except OSError as error:
        for each in sockets:
            each.close()
        raise ConfigError(f"cannot listen at {listen}: {error}") from None
    return sockets


class Worker:
    """A data plane, and a connection to the controller's process.

    Owned by its loop; `start`, then `stop`. Listens at `sockets`; `name` is its life's own.
    """

    def __init__(
        self, config: RouterConfig, name: str, control_path: Path, sockets: Sequence[socket.socket]
    ) -> None:
        front = config.front
        share = replace(
            front,
            max_connections=math.ceil(front.max_connections / front.workers),
            max_bodies_bytes=max(
                BODY_COPIES * front.max_body_bytes, front.max_bodies_bytes // front.workers
            ),
        )
        config = replace(config, front=share)
        self._control_path = control_path
        self._sockets = sockets
        self._upstream = upstream_of(config)
        rate = Rates().tokens_per_byte
        self.control = ControlClient(name, front.max_wait_s, rate, time.monotonic)
        self.data_plane = DataPlane(
            config,
            self.control,
            self._upstream,
            Tenants.of_file(front.keys_file),
            name=f"{name}-",
        )
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listen, and look for the controller. OSError, ConfigError."""
        await self.data_plane.start(self._sockets)
        self._task = asyncio.create_task(self._stay_connected())

    async def stop(self) -> None:
        """Refuse what comes, let end what runs, for a while."""
        await self.data_plane.stop()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        await self._upstream.close()

    async def _stay_connected(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                _, connection = await loop.create_unix_connection(
                    lambda: MessageConnection(ToWorker, self.control.receive),
                    str(self._control_path),
                )
            except OSError:
                await asyncio.sleep(RECONNECT_S)
                continue
            self.control.connected(connection.send)
            try:
                await connection.ended
                log.warning("the controller is away: requests wait, answers go on")
            finally:
                self.control.lost()
                connection.close()


@dataclass(slots=True)
class _Process:
    """One that should run; `pid` is 0 while it does not."""

    name: str
    main: Callable[[str, Callable[[], object]], Coroutine[Any, Any, None]]
    """Takes the name of the present life, and what it calls once it serves."""
    pid: int = 0
    num_lives: int = 0
    has_served: bool = False
    """In any life."""
    began: float = 0.0
    due: float = 0.0
    """When it is started again."""
    pulse: int = -1
    """What it writes to is read here."""
    num_missed: int = 0
    """Looks since it has said something."""

    def hear(self) -> bool:
        """Whether it has said something since."""
        try:
            said = os.read(self.pulse, 1 << 10)
        except BlockingIOError:
            return False
        self.has_served = self.has_served or SERVING in said
        return bool(said)


class _Signals:
    """The signals of `_SIGNALS` that this process receives until `close`. The main thread's.

    Python's `sigtimedwait` gives one that nobody has sent where the process was paused (SIGSTOP,
    `docker pause`, a debugger) beyond the end of its wait.
    """

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._before = {
            number: signal.signal(number, lambda number, frame: None) for number in _SIGNALS
        }

    def wait(self, timeout_s: float) -> set[int]:
        """The signals since the last call; waits for one, at most `timeout_s`."""
        if not select.select([self._read], [], [], timeout_s)[0]:
            return set()
        return set(os.read(self._read, 1 << 10))

    def fork(self) -> int:
        """As `os.fork`; signals of the child are held back until it has called `close`."""
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        pid = os.fork()
        if pid:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        return pid

    def close(self) -> None:
        """Restore the handlers of before."""
        signal.set_wakeup_fd(-1)
        for number, before in self._before.items():
            signal.signal(number, before)
        os.close(self._read)
        os.close(self._write)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)


class Supervisor:
    """Starts the processes, and again those that die. `run`, then `close`."""

    def __init__(self, config: RouterConfig, read: Callable[[], RouterConfig]) -> None:
        """ConfigError where the router cannot listen."""
        if not (config.admin.token or config.admin.token_file):
            # One for all lives of the controller's process.
            admin = replace(config.admin, token=admin_token(config))
            config = replace(config, admin=admin)
            read = partial(_read_with, read, admin.token)
        self._config = config
        self._life = os.pipe()
        """Its write end is the supervisor's alone, so processes see its death."""
        self._folder = Path(tempfile.mkdtemp(prefix="kvpool-router-"))
        control_path = self._folder / "control"
        self._control = socket.socket(socket.AF_UNIX)
        self._control.bind(str(control_path))
        self._control.listen()
        self._sockets: list[list[socket.socket]] = []
        self._is_stopping = False
        self._look_due = 0.0
        self._processes = [_Process("controller", partial(self._controller, read))]
        if config.front.workers == 1:
            return  # the controller's process serves clients
        for number in range(1, config.front.workers + 1):
            try:
                sockets = bind(self._listen())
            except ConfigError:
                self.close()
                raise
            self._sockets.append(sockets)
            worker = partial(self._worker, control_path, sockets)
            self._processes.append(_Process(f"worker{number}", worker))

    @property
    def front_port(self) -> int:
        """Where clients come in."""
        return int(self._sockets[0][0].getsockname()[1])

    def _listen(self) -> str:
        """The address, with the port that the first worker was given."""
        listen = self._config.front.listen
        return f"{listen.rpartition(':')[0]}:{self.front_port}" if self._sockets else listen

    def _controller(
        self, read: Callable[[], RouterConfig], name: str, serving: Callable[[], object]
    ) -> Coroutine[Any, Any, None]:
        workers = self._control if self._sockets else None
        return serve_router(self._config, read, workers, self._life[0], serving)

    async def _worker(
        self,
        control_path: Path,
        sockets: list[socket.socket],
        name: str,
        serving: Callable[[], object],
    ) -> None:
        def make() -> Served:
            worker = Worker(self._config, name, control_path, sockets)
            return Served(worker.start, worker.stop, worker.data_plane.reloads())

        await until_stopped(make, self._life[0], serving)

    def run(self) -> None:
        """Until SIGINT or SIGTERM; ConfigError where a process cannot start at all."""
        with contextlib.closing(_Signals()) as signals:
            try:
                if self._sockets:
                    log.info("clients: port %d, %d workers", self.front_port, len(self._sockets))
                self._watch(signals)
            finally:
                self._is_stopping = True
                workers = self._processes[1:]
                # Workers first: what they serve still needs the controller.
                for group in (workers, self._processes[:1]):
                    self._stop(group, signals)

    def close(self) -> None:
        """Give up the sockets."""
        for each in (self._control, *(each for group in self._sockets for each in group)):
            each.close()
        for descriptor in self._life:
            os.close(descriptor)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _watch(self, signals: _Signals) -> None:
        while True:
            now = time.monotonic()
            for each in self._processes:
                if not each.pid and each.due <= now:
                    self._start(each, signals)
            if now >= self._look_due:
                self._look_due = now + REAP_S
                self._end_hung()
            dues = (each.due for each in self._processes if not each.pid)
            wait_s = min((max(0.0, due - now) for due in dues), default=REAP_S)
            found = signals.wait(min(REAP_S, wait_s))
            if found & {signal.SIGTERM, signal.SIGINT}:
                return
            if signal.SIGHUP in found:
                self._kill(self._processes, signal.SIGHUP)
            self._reap()

    def _end_hung(self) -> None:
        for each in self._processes:
            if not each.pid:
                continue
            each.num_missed = 0 if each.hear() else each.num_missed + 1
            if each.num_missed == MAX_MISSED:
                log.error("%s has hung for %d s: it is killed", each.name, MAX_MISSED * REAP_S)
                self._kill([each], signal.SIGKILL)

    def _start(self, process: _Process, signals: _Signals) -> None:
        process.num_lives += 1
        process.began = time.monotonic()
        process.pulse, pulse = os.pipe()
        process.num_missed = 0
        os.set_blocking(process.pulse, False)
        os.set_blocking(pulse, False)
        process.pid = signals.fork()
        if process.pid:
            os.close(pulse)
            log.info("%s: started, process %d", process.name, process.pid)
            return
        code = 1
        try:
            os.close(self._life[1])
            signals.close()
            serving = partial(os.write, pulse, SERVING)
            name = f"{process.name}.{process.num_lives}"
            _run(_pulsing(process.main(name, serving), pulse))
            code = 0
        except ConfigError as error:
            log.error("%s: %s", process.name, error)
            code = BAD_CONFIG
        except BaseException:
            log.exception("%s has failed", process.name)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = ended
                for each in self._processes:
                    if each.pid == pid:
                        self._ended(each, os.waitstatus_to_exitcode(status))

    def _ended(self, process: _Process, code: int) -> None:
        process.pid = 0
        process.hear()
        os.close(process.pulse)
        if self._is_stopping:
            return
        now = time.monotonic()
        is_young = now - process.began < RESTART_S
        process.due = now + RESTART_S if is_young else now
        if code == BAD_CONFIG and not process.has_served:
            raise ConfigError(f"the {process.name} process cannot start; see the log")
        log.error("%s has ended with exit code %d; it is started again", process.name, code)

    def _stop(self, processes: list[_Process], signals: _Signals) -> None:
        self._kill(processes, signal.SIGTERM)
        end = time.monotonic() + self._config.front.shutdown_timeout_s + STOP_S
        self._reap()
        while any(each.pid for each in processes):
            left_s = end - time.monotonic()
            if left_s <= 0:
                names = ", ".join(each.name for each in processes if each.pid)
                log.error("%s: not ended in time (front.shutdown_timeout_s), killed", names)
                self._kill(processes, signal.SIGKILL)
                end += STOP_S
            signals.wait(min(1.0, max(0.0, left_s)))
            self._reap()

    def _kill(self, processes: list[_Process], number: signal.Signals) -> None:
        for each in processes:
            if each.pid:
                os.kill(each.pid, number)


def _read_with(read: Callable[[], RouterConfig], token: str) -> RouterConfig:
    config = read()
    return replace(config, admin=replace(config.admin, token=token))
