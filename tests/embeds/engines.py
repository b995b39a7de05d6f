"""Engines without a model: workers, sockets, windows and schedulers' sides are real."""

import contextlib
import time
from collections.abc import Callable

import torch

from tests.embeds.invariants import describe
from tests.support.server_process import free_ports
from vllm_kvpool.config import EmbedsConfig, Transport
from vllm_kvpool.embeds.availability import EmbedsRequest, Feature
from vllm_kvpool.embeds.machines.session import HeartbeatPolicy
from vllm_kvpool.embeds.params import Delivery
from vllm_kvpool.embeds.protocol.messages import PeerRole
from vllm_kvpool.embeds.scheduler import EmbedsScheduler, EngineRole, workers_lost_s
from vllm_kvpool.embeds.worker import EmbedsWorker, WorkerIdentity
from vllm_kvpool.embeds.worker_channel import WorkerChannel
from vllm_kvpool.network.transport_zmq import read_keys

PATIENCE_S = 20.0
MAX_PAUSE_S = 0.01  # between two looks, where it takes long: a look costs as much as a round


class Engine:
    """An embeddings engine: its scheduler's side and a worker for each rank."""

    def __init__(
        self,
        role: PeerRole,
        *,
        ranks: int = 1,
        ports: list[int] | None = None,
        fingerprint: str = "model",
        configs: list[EmbedsConfig] | None = None,
        **options: object,
    ) -> None:
        self.ports = ports or free_ports(ranks)
        endpoints = tuple(f"tcp://127.0.0.1:{port}" for port in self.ports)
        self.endpoint = endpoints[0]
        base = {"transport": Transport.LOCAL, "heartbeat_s": 0.3, **options}
        configs = configs or [EmbedsConfig(**base) for _ in range(ranks)]  # type: ignore[arg-type]
        self.workers: list[EmbedsWorker] = []
        # Whatever fails, nothing stays open: it would fail a test that has nothing to do with it.
        with contextlib.ExitStack() as undo:
            for rank, config in enumerate(configs):
                identity = WorkerIdentity(
                    role, fingerprint, rank, endpoints, endpoints, "127.0.0.1"
                )
                self.workers.append(EmbedsWorker(config, identity))
                undo.callback(self.workers[-1].close)
            self.scheduler = EmbedsScheduler(
                WorkerChannel(
                    endpoints,
                    [worker.scheduler_token for worker in self.workers],
                    read_keys(configs[0].curve_dir),
                    HeartbeatPolicy(configs[0].heartbeat_s, configs[0].heartbeat_max_failures),
                ),
                EngineRole(
                    is_producer=role is not PeerRole.CONSUMER,
                    is_consumer=role is not PeerRole.PRODUCER,
                    has_peers=bool(configs[0].peers),
                    retain_bytes=configs[0].nbytes("retain_bytes"),
                    max_step_tokens=1 << 20,
                    own_endpoint=self.endpoint,
                    workers_lost_s=workers_lost_s(configs[0]),
                ),
                lambda version: f"{fingerprint}/{version}",
            )
            undo.pop_all()
        self.requests: dict[str, EmbedsRequest] = {}

    def request(
        self, request_id: str, *items: tuple[str, int], has_media: bool = False, **where: object
    ) -> EmbedsRequest:
        """A request for items of so many rows."""
        features, at = [], 0
        for mm_hash, rows in items:
            features.append(Feature(mm_hash, at, at + rows, rows, has_media))
            at += rows
        delivery = Delivery(**{"is_sent": True, **where})  # type: ignore[arg-type]
        view = self.requests[request_id] = EmbedsRequest(request_id, tuple(features), delivery)
        return view

    def awaits(self, view: EmbedsRequest) -> None:
        """A request waits for items that are not here, and the workers have been told so."""
        # Before they have answered the first greeting, they are told nothing.
        wait_for(lambda: not self.may_go(view) and self.scheduler._channel.are_up)

    def may_go(self, view: EmbedsRequest) -> bool:
        """Run one step and return True if the request may be scheduled in it."""
        may_go = self.scheduler.ensure(view, 0)
        self.scheduler.plan((), **BUSY)
        return may_go

    def encode(self, mm_hash: str, tensor: torch.Tensor, *, to: tuple[str, ...] = ()) -> None:
        """An encoder computes an item for a request naming consumers."""
        view = self.request(f"encode {mm_hash}", (mm_hash, len(tensor)), consumers=to)
        wait_for(lambda: self.may_go(view))
        self.workers[0].produced(mm_hash, tensor, self.scheduler.plan((), **BUSY).weights)

    def get(self, mm_hash: str) -> list[torch.Tensor]:
        """Load an item that `ensure` has said is there: each rank's tensor."""
        assert self.scheduler.has(mm_hash)
        self.scheduler.allocated(mm_hash)
        (load,) = self.scheduler.plan((), **BUSY).loads
        tensors = [worker.take(load.name) for worker in self.workers]
        assert all(each is not None for each in tensors)
        return tensors  # type: ignore[return-value]

    def receive(
        self, mm_hash: str, rows: int, request_id: str = "", **where: object
    ) -> list[torch.Tensor]:
        """A request waits for an item and loads it."""
        view = self.request(request_id or f"use {mm_hash}", (mm_hash, rows), **where)
        wait_for(lambda: self.may_go(view), lambda: self.describe(mm_hash))
        tensors = self.get(mm_hash)
        self.scheduler.finished(view)
        self.scheduler.plan((mm_hash,), **BUSY)
        return tensors

    def describe(self, mm_hash: str) -> str:
        """Return the state of an item in each worker's consumer."""
        return "; ".join(
            describe(worker._consumer, mm_hash) for worker in self.workers if worker._consumer
        )

    def counts(self, rank: int = 0) -> dict[str, float]:
        """Return the counters of a worker's consumer and producer."""
        worker, found = self.workers[rank], {}
        for machine in (worker._consumer, worker._producer):
            found.update(machine.counts if machine is not None else {})
        return found

    def gauges(self, rank: int = 0) -> dict[str, float]:
        """Return the gauges of a worker's consumer and producer."""
        worker, found = self.workers[rank], {}
        for machine in (worker._consumer, worker._producer):
            found.update(machine.gauges() if machine is not None else {})
        return found

    def close(self) -> None:
        """End it in order; all of it, also where the end of one part fails."""
        with contextlib.ExitStack() as ends:
            ends.callback(self.scheduler.close)
            for worker in reversed(self.workers):
                ends.callback(worker.close)

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


BUSY = {"is_idle": False, "idle_wait_s": 0.0}


def wait_for(
    condition: Callable[[], bool],
    describe: Callable[[], str] = lambda: "",
    patience_s: float = PATIENCE_S,
) -> None:
    """Until something real has happened."""
    deadline = time.monotonic() + patience_s
    pause_s = 0.001
    while not condition():
        assert time.monotonic() < deadline, f"still waiting: {describe()}"
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.05, MAX_PAUSE_S)


def embeddings(rows: int, width: int = 64, seed: int = 0) -> torch.Tensor:
    """An encoder's output."""
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))
