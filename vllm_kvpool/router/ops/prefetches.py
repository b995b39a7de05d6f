"""The processes that bring cells near, one on a host (see prefetch.py, which says when).

Owns each process from its start to its end, and the prompts queued for it. Runs in the router's
loop; nothing it does raises there: what fails is logged and counted, and no request knows of it.
A process ends when its input does, also one on another host, so none outlives the router.
"""

import asyncio
import logging
import os
import signal
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from vllm_kvpool.config import environment, read_config
from vllm_kvpool.identity.cell_names import Brought, ChunkNames
from vllm_kvpool.prefetch.route import pool_options, route_of, scheme_of
from vllm_kvpool.router.config import RouterConfig
from vllm_kvpool.router.control.fleet import Fleet
from vllm_kvpool.router.control.prefetch import Begin, Bring, End, HostPrefetches, KnownCells
from vllm_kvpool.router.ops.commands import (
    PREFETCH_PLACEHOLDERS,
    LaunchHost,
    in_environment,
    read_template,
)
from vllm_kvpool.router.ops.supervisor import open_log

log = logging.getLogger(__name__)

MAX_WAITING = 64  # prompts queued for one process; more are dropped
END_S = 5.0  # from the end of its input to SIGKILL
MAX_LINE_BYTES = 64 << 10
_decode = msgspec.json.Decoder(Brought).decode


@dataclass(frozen=True, slots=True)
class _Process:
    orders: asyncio.Queue[ChunkNames]
    is_over: asyncio.Event
    task: asyncio.Task[None]


def prefetch_commands(
    config: RouterConfig, hosts: Mapping[str, LaunchHost]
) -> dict[str, tuple[str, ...]]:
    """What is run to bring cells near, by host; none where nothing can be brought.

    ConfigError where the command cannot work.
    """
    launch = config.launch
    template = read_template(
        "[launch] prefetch_command", launch.prefetch_command, PREFETCH_PLACEHOLDERS
    )
    if not launch.prefetch_bytes or not config.planner.live_takeover:
        return {}
    values = {
        "kv_transfer_config": launch.kv_transfer_config,
        "max_bytes": str(launch.prefetch_bytes),
        "max_seconds": f"{launch.load_timeout_s:g}",
    }
    commands = {}
    for given in config.hosts:
        host = hosts[given.name]
        # What a process inherits on another host is not known here.
        inherited = environment() if host.prefix is None else {}
        if _can_bring(launch.kv_transfer_config, {**inherited, **given.env}):
            command = in_environment(given.env, template.render(values, {}))
            commands[given.name] = host.command(command)
    return commands


def _can_bring(kv_transfer_config: str, env: Mapping[str, str]) -> bool:
    """Whether engines' cells may lie in a far tier, and be brought into a near one."""
    try:
        options = pool_options(kv_transfer_config)
        urls = () if options is None else read_config(options, env).store_urls
    except ValueError as error:  # a ConfigError, too: engines will say so
        log.warning("nothing is prefetched: kv_transfer_config: %s", error)
        return False
    return route_of([scheme_of(url) for url in urls]) is not None


class Prefetches:
    """Owned by the loop. `commands`: what is run here for a host; none where nothing can be."""

    def __init__(self, commands: Mapping[str, Sequence[str]], log_dir: Path) -> None:
        self._commands = commands
        self._log_dir = log_dir
        self.known = KnownCells()
        self._plan = HostPrefetches(commands, self.known)
        self._running: dict[str, _Process] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self.counts: Counter[str] = Counter()
        """Processes `begun` and `failed`, and the sums of what they report."""

    @property
    def is_on(self) -> bool:
        """Whether anything may be brought anywhere."""
        return bool(self._commands)

    def look(self, fleet: Fleet) -> None:
        """Do what is due by now; to be called now and then."""
        for order in self._plan.look(fleet):
            match order:
                case Begin(host):
                    self._begin(host)
                case Bring(host, names):
                    self._bring(host, names)
                case End(host):
                    self._end(host)

    async def close(self) -> None:
        """End all, within `END_S`."""
        for host in list(self._running):
            self._end(host)
        if self._ending:
            await asyncio.wait(set(self._ending))

    def _begin(self, host: str) -> None:
        """Start one; one that is just ending there ends by itself."""
        orders: asyncio.Queue[ChunkNames] = asyncio.Queue(MAX_WAITING)
        is_over = asyncio.Event()
        task = asyncio.get_running_loop().create_task(self._live(host, orders, is_over))
        self._running[host] = _Process(orders, is_over, task)

    def _bring(self, host: str, names: ChunkNames) -> None:
        with suppress(asyncio.QueueFull):
            self._running[host].orders.put_nowait(names)

    def _end(self, host: str) -> None:
        process = self._running.pop(host, None)
        if process is not None:
            process.is_over.set()
            self._ending.add(process.task)
            process.task.add_done_callback(self._ending.discard)

    # One process

    async def _live(
        self, host: str, orders: asyncio.Queue[ChunkNames], is_over: asyncio.Event
    ) -> None:
        """A process's whole life; the top of its task."""
        self.counts["begun"] += 1
        try:
            code = await self._serve(host, orders, is_over)
            if code and not is_over.is_set():
                self.counts["failed"] += 1
                log.warning("host %s: the prefetch has ended with %d", host, code)
        except Exception as error:
            self.counts["failed"] += 1
            log.warning("host %s: no prefetch: %s", host, error)
        if not is_over.is_set():
            self._running.pop(host, None)
            self._plan.ended(host)

    async def _serve(
        self, host: str, orders: asyncio.Queue[ChunkNames], is_over: asyncio.Event
    ) -> int:
        """Its exit code."""
        with open_log(self._log_dir / f"{host}.prefetch.log") as file:
            process = await asyncio.create_subprocess_exec(
                *self._commands[host],
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=file,
                start_new_session=True,
                limit=MAX_LINE_BYTES,
            )
        assert process.stdin is not None
        assert process.stdout is not None
        tasks = [
            asyncio.create_task(self._tell(process.stdin, orders)),
            asyncio.create_task(self._listen(process.stdout)),
        ]
        over = asyncio.create_task(is_over.wait())
        ended = asyncio.create_task(process.wait())
        try:
            await asyncio.wait({over, ended}, return_when=asyncio.FIRST_COMPLETED)
            tasks[0].cancel()
            process.stdin.close()
            await asyncio.wait({ended, tasks[1]}, timeout=END_S)
        finally:
            for task in (*tasks, over, ended):
                task.cancel()
            if process.returncode is None:
                # Of one elsewhere this ends the connection; it ends by its input's end.
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        return process.returncode or 0

    async def _tell(self, stdin: asyncio.StreamWriter, orders: asyncio.Queue[ChunkNames]) -> None:
        with suppress(ConnectionError):
            while True:
                stdin.write(msgspec.json.encode(await orders.get()) + b"\n")
                await stdin.drain()

    async def _listen(self, stdout: asyncio.StreamReader) -> None:
        """Add up what it says; a host's greetings and the like are none of it."""
        while True:
            try:
                line = await stdout.readline()
            except ValueError:
                continue  # a line that is too long
            if not line:
                return
            with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                self.counts.update(msgspec.structs.asdict(_decode(line)))
