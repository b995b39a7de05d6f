"""The process that has imported vLLM and forks into engines; `nursery.py` starts it.

Importing vLLM is most of what an engine's start costs. It is done here once, before any thread of
Python's is there that a fork would lose; each message of whoever connects is then an order for one
engine, with its environment and four file descriptors: standard input, output, replies and status.
The answer is the engine's process id; when it ends, its exit status is written to the last of the
four. The end of the last connection is the order to stop; engines that live then stop by the end of
their own input.
"""

import atexit
import contextlib
import gc
import importlib
import inspect
import json
import multiprocessing
import multiprocessing.context
import os
import select
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import engine_child

MOST_BYTES = 1 << 20  # of a message: an environment
NUM_FDS = 4
SPIN_S = 0.02  # `busy_loop_s`, the only default of `SpinCondition`
ENGINE_MODULES = (
    "vllm.entrypoints.serve.utils.api_utils",
    "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors",
    "vllm.model_executor.model_loader.base_loader",
    "vllm.model_executor.model_loader.default_loader",
    "vllm.model_executor.models.llama",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.v1.worker.cpu_worker",
    "vllm_kvpool.connector",
    "vllm_kvpool.storage.file.store",
)


@dataclass(frozen=True, slots=True)
class Order:
    """An order to fork an engine: its environment and its ends of pipes."""

    env: dict[str, str]
    stdin: int
    output: int
    replies: int
    status: int

    def close(self) -> None:
        for end in (self.stdin, self.output, self.replies):
            os.close(end)


class Nursery:
    """Single-threaded; in a forked process, nothing of it is left but the order."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._connections: set[socket.socket] = set()
        self._status_fds: dict[int, int] = {}
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake_write)

    def run(self) -> Order | None:
        """Fork an engine for each order; in the engine's process, return its order."""
        while True:
            waited_for = [self._wake_read, self._listener, *self._connections]
            ready = select.select(waited_for, [], [])[0]
            if self._wake_read in ready:
                os.read(self._wake_read, 4096)
                self._reap()
            # Before others are seen to go: with the last of them it stops.
            if self._listener in ready:
                self._connections.add(self._listener.accept()[0])
            for connection in self._connections.intersection(ready):
                message, fds, _, _ = socket.recv_fds(connection, MOST_BYTES, NUM_FDS)
                if message:
                    order = Order(json.loads(message), *fds)
                    pid = os.fork()
                    if pid == 0:
                        self._leave(connection)
                        return order
                    self._status_fds[pid] = order.status
                    order.close()
                else:
                    self._connections.remove(connection)
                    connection.close()
                    if not self._connections:
                        self._listener.close()
                        return None

    def _reap(self) -> None:
        for pid in list(self._status_fds):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                status_fd = self._status_fds.pop(pid)
                os.write(status_fd, str(os.waitstatus_to_exitcode(status)).encode())
                os.close(status_fd)

    def _leave(self, ordered_by: socket.socket) -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        # Not before it leads its own group, by which it can be killed.
        ordered_by.send(str(os.getpid()).encode())
        for open_socket in (self._listener, *self._connections):
            open_socket.close()
        for end in (self._wake_read, self._wake_write, *self._status_fds.values()):
            os.close(end)


class Rank(multiprocessing.context.ForkProcess):
    """A worker of an engine with several ranks, forked from the engine.

    OpenMP was told of one thread when the nursery started, so there is no team that a fork would
    lose; what it would read of a new Python's environment, the rank's core, is seen to here.
    """

    def run(self) -> None:
        cores = os.environ.get("GOMP_CPU_AFFINITY") or os.environ.get("OMP_PLACES", "")
        numbers = cores.strip("{}").replace(",", " ").split()
        if numbers:
            os.sched_setaffinity(0, {int(number) for number in numbers})
        super().run()


class ForkContext(multiprocessing.context.ForkContext):
    Process = Rank  # type: ignore[assignment]


def fork_ranks() -> None:
    """Have engines fork their ranks; on CPU vLLM starts a new Python for each."""
    from vllm.v1.executor import multiproc_executor

    multiproc_executor.get_mp_context = ForkContext


def import_all() -> None:
    """Import what an engine imports as it starts, and load the pool's compiled copy.

    Each engine would spend 2 s of a core on it.
    """
    for name in ENGINE_MODULES:
        with contextlib.suppress(ImportError):  # a release that has it elsewhere imports it later
            importlib.import_module(name)
    from vllm_kvpool.staging.copy_cpu import CpuCopier

    CpuCopier([]).warm_up()
    replace_triton_kernels()
    pin_nothing()


def replace_triton_kernels() -> None:
    """Have vLLM put its CPU kernels in the place of Triton's once, for all engines.

    Each rank would look through all modules for them, which takes a second. The search (0.32.0)
    fails at the functions of llvmlite's library, whose module is therefore taken out of its sight.
    """
    del sys.modules["llvmlite.binding.ffi"]
    from vllm.platforms.cpu import CpuPlatform

    if hasattr(CpuPlatform, "register_triton_kernel_overrides"):  # 0.27.1 replaces none
        CpuPlatform.register_triton_kernel_overrides()
        CpuPlatform.register_triton_kernel_overrides = classmethod(lambda cls: None)


def pin_nothing() -> None:
    """Have LoRA's metadata of vLLM 0.23.0 in ordinary memory: it is pinned on CPUs, too."""
    from vllm.lora.punica_wrapper import utils

    if "pin_memory" in inspect.signature(utils.async_tensor_h2d).parameters:
        utils.async_tensor_h2d.__defaults__ = (False,)


def look_at_models_here() -> None:
    """Have engines look at their model's class themselves; they import it anyway.

    What vLLM knows of a class it keeps in its cache directory. What is not there a new Python finds
    out, which imports vLLM for it.
    """
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda look: look()


def spin_briefly() -> None:
    """Have ranks that poll for orders leave the cores to others.

    Ranks poll for a second after each order and call `sched_yield` all the while, which costs a
    waiting test two cores. If the cores are busy, Linux 6.18 lets this starve every other process
    for up to a minute, whatever its priority. (Seen with a clock at nice -19 beside three busy
    loops.) Leases, sessions and time limits under test then run out. vLLM itself uses
    `time.sleep(0)` where a yield would keep the interpreter's lock.
    """
    from vllm.distributed import utils
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    SpinCondition.__init__.__defaults__ = (SPIN_S,)
    if utils.USE_SCHED_YIELD:  # an error where a release has no such switch
        utils.USE_SCHED_YIELD = False


def wait_in_sockets() -> None:
    """Have ranks exchange tensors over Gloo's sockets, as where they share no memory's name.

    In shared memory a rank polls until the other has come, for whole time slices where other
    engines have the cores: a test of two ranks took half as long again.
    """
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    CpuCommunicator._all_group_ranks_share_shm_group_name = lambda self: False


def share_groups_of_one() -> None:
    """Have a rank's groups of itself alone be one, which exchange nothing.

    vLLM makes two for each kind of parallelism, thirteen in all, and each has a thread of Gloo's
    that wakes a hundred times a second: with a dozen engines at hand, as much as half a core.
    """
    import torch.distributed

    made: dict[tuple[int, str | None], Any] = {}
    new_group = torch.distributed.new_group
    destroy = torch.distributed.destroy_process_group

    def shared_group(
        ranks: Sequence[int] | None = None,
        timeout: Any = None,
        backend: str | None = None,
        **more: Any,
    ) -> Any:
        if ranks is None or len(ranks) != 1:
            return new_group(ranks, timeout, backend, **more)
        key = (ranks[0], backend)
        if key not in made:
            made[key] = new_group(ranks, timeout, backend, **more)
        return made[key]

    def destroy_once(group: Any = None) -> None:
        if group is None or not any(group is each for each in made.values()):
            destroy(group)

    torch.distributed.new_group = shared_group
    torch.distributed.destroy_process_group = destroy_once


def become(order: Order) -> None:
    """Make of this process what a start with the order's environment would have made."""
    os.dup2(order.stdin, 0)
    os.dup2(order.output, 1)
    os.dup2(order.output, 2)
    os.close(order.stdin)
    os.close(order.output)
    os.close(order.status)
    os.environ.clear()
    os.environ.update(order.env)


class Ending:
    """The last exit handler: with `skips_teardown` the process is gone before the teardown."""

    def __init__(self) -> None:
        self.skips_teardown = False
        # The first to be registered is the last to be called.
        atexit.register(self._end)

    def _end(self) -> None:
        if self.skips_teardown:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)


def main(listener_fd: int) -> None:
    ending = Ending()
    engine_child.engine_class()
    import_all()
    fork_ranks()
    look_at_models_here()
    spin_briefly()
    wait_in_sockets()
    share_groups_of_one()
    # An engine's collections leave out what the import made: to go through all of it costs 0.4 s of
    # a core and copies its pages. vLLM would undo this to collect three times as a process ends.
    gc.freeze()
    gc.unfreeze = lambda: None
    order = Nursery(socket.socket(fileno=listener_fd)).run()
    if order is None:
        ending.skips_teardown = True
    else:
        become(order)
        ending.skips_teardown = engine_child.main(order.replies)


if __name__ == "__main__":
    main(int(sys.argv[1]))
