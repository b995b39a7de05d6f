"""Objects that the embedding benchmark puts into child processes: who sends, and who receives.

Ours are workers with their control ports, and the connection that a scheduler has to them; vLLM's
are the worker of its Mooncake connector and the inbox of its scheduler. No engine, no model.
Times are of the machine's monotonic clock, which all its processes share.
"""

import hashlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from benchmarks.common import late, wait_until
from vllm_kvpool.config import EmbedsConfig, Transport
from vllm_kvpool.embeds.dataplane.tensors import as_bytes
from vllm_kvpool.embeds.protocol.messages import Expect, ItemNews, PeerRole, Push
from vllm_kvpool.embeds.scheduler import FIRST_WEIGHTS
from vllm_kvpool.embeds.worker import EmbedsWorker, WorkerIdentity
from vllm_kvpool.embeds.worker_channel import WorkerChannel

HOST = "127.0.0.1"
UP_TIMEOUT_S = 30.0
WORD_TIMEOUT_S = 1.0
IN_TREE_IMPORTED = ("vllm.config", "vllm.distributed.ec_transfer.ec_connector.base")
"""Most of what vLLM's worker imports; not Mooncake, whose library reads its process's variables."""


@dataclass(frozen=True)
class Batch:
    """Items of one size, sent at once."""

    name: str
    items: int
    rows: int
    row_bytes: int

    @property
    def names(self) -> list[str]:
        return [f"{self.name} {i}" for i in range(self.items)]

    @property
    def shape(self) -> tuple[int, int]:
        """Of an item's tensor, of bfloat16."""
        return self.rows, self.row_bytes // torch.bfloat16.itemsize

    @property
    def item_bytes(self) -> int:
        return self.rows * self.row_bytes

    @property
    def nbytes(self) -> int:
        return self.items * self.item_bytes


@dataclass(frozen=True)
class Received:
    """What a receiver says of a batch."""

    at: float
    """When the last item could be used."""
    peak_landing_bytes: float = 0.0
    rss_growth_bytes: int = 0
    """Of the process, at most, since there was the window and no item."""


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.blake2b(as_bytes(tensor).data).hexdigest()


class Sources:
    """Encoders' outputs, a tensor of its own for each item; made once for each size."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, int], list[torch.Tensor]] = {}

    def of(self, batch: Batch) -> list[torch.Tensor]:
        made = self._made.setdefault(batch.shape, [])
        while len(made) < batch.items:
            seeded = torch.Generator().manual_seed(len(made))
            words = torch.empty((batch.rows, batch.row_bytes // 8), dtype=torch.int64)
            made.append(words.random_(generator=seeded).view(torch.bfloat16))
        return made[: batch.items]

    def digest(self, batch: Batch) -> str:
        """Of its last item."""
        return _digest(self.of(batch)[-1])


class Costed:
    """A process whose own time can be asked for."""

    def cpu_s(self) -> float:
        """Of all its threads, since it was started."""
        return time.process_time()

    def plain_copy_cpu_s(self, nbytes: int, piece_bytes: int) -> float:
        """What it takes to copy so many bytes in and out of a window of so many, and no more."""
        source = np.ones(nbytes, np.uint8)
        target, window = np.zeros(nbytes, np.uint8), np.zeros(piece_bytes, np.uint8)
        began = time.process_time()
        for start in range(0, nbytes, piece_bytes):
            piece = window[: min(piece_bytes, nbytes - start)]
            np.copyto(piece, source[start : start + piece.nbytes])
            np.copyto(target[start : start + piece.nbytes], piece)
        return time.process_time() - began


class _Engine(Costed):
    """A worker and a scheduler's connection to it."""

    def __init__(self, role: PeerRole, port: int, transport: str, options: dict[str, Any]) -> None:
        self.endpoint = f"tcp://{HOST}:{port}"
        endpoints = (self.endpoint,)
        config = EmbedsConfig(transport=Transport(transport), **options)
        identity = WorkerIdentity(role, "model", 0, endpoints, endpoints, HOST)
        self._worker = EmbedsWorker(config, identity)
        self._links = WorkerChannel(endpoints, [self._worker.scheduler_token])
        wait_until(self._is_up, UP_TIMEOUT_S)

    def _is_up(self) -> bool:
        self._links.poll()
        return self._links.are_up


class Sender(_Engine):
    """An encoder's worker."""

    def __init__(self, port: int, transport: str, options: dict[str, Any]) -> None:
        super().__init__(PeerRole.PRODUCER, port, transport, options)
        self._sources = Sources()

    def prepare(self, batch: Batch) -> str:
        return self._sources.digest(batch)

    def send(self, batch: Batch, to: str) -> float:
        """When the encoder's outputs were there, and it was known who gets them."""
        self._links.poll()
        sources = self._sources.of(batch)
        start = time.monotonic()
        for name, tensor in zip(batch.names, sources, strict=True):
            self._links.send(Push(name, (to,)))
            self._worker.produced(name, tensor, FIRST_WEIGHTS)
        self._links.flush()
        return start


class Receiver(_Engine):
    """A language engine's worker. Items are taken, and let go of, as soon as they are there."""

    def __init__(self, port: int, transport: str, options: dict[str, Any]) -> None:
        super().__init__(PeerRole.CONSUMER, port, transport, options)
        self._order = 0
        self._rss_at_start = reset_peak_rss()

    def receive(self, batches: Sequence[Batch], limit_s: float) -> Received:
        """Until every item could be used."""
        reset_peak_rss()
        waiting = self._expect(batches, limit_s)
        deadline, peak = time.monotonic() + limit_s, 0.0
        while waiting:
            for said in self._links.poll(WORD_TIMEOUT_S):
                news = said.body
                if isinstance(news, ItemNews) and news.digest and news.mm_hash in waiting:
                    assert self._worker.take(news.mm_hash) is not None
                    waiting.discard(news.mm_hash)
            peak = max(peak, self.levels()["landing_bytes"])
            if time.monotonic() > deadline:
                raise late(limit_s)
        return Received(time.monotonic(), peak, peak_rss() - self._rss_at_start)

    def digest(self, batch: Batch, limit_s: float) -> str:
        """Of the bytes of an item, the only one of its batch, that have arrived."""
        name, deadline = batch.names[-1], time.monotonic() + limit_s
        waiting = self._expect([batch], limit_s)
        while time.monotonic() < deadline:
            for said in self._links.poll(WORD_TIMEOUT_S):
                news = said.body
                if isinstance(news, ItemNews) and news.digest and news.mm_hash in waiting:
                    tensor = self._worker.take(news.mm_hash)
                    if news.mm_hash == name and tensor is not None:
                        return _digest(tensor)
        raise late(limit_s)

    def _expect(self, batches: Sequence[Batch], patience_s: float) -> set[str]:
        names = [(name, batch.rows) for batch in batches for name in batch.names]
        for name, rows in names:
            self._order += 1
            self._links.send(Expect(name, self._order, (), rows, patience_s, is_pushed=True))
        self._links.flush()
        return {name for name, _ in names}

    def levels(self) -> dict[str, float]:
        """The consumer's gauges."""
        consumer = self._worker._consumer
        assert consumer is not None
        return consumer.gauges()

    def rounds(self) -> float:
        """So far."""
        consumer = self._worker._consumer
        assert consumer is not None
        return consumer.counts["rounds"]


def peak_rss() -> int:
    """Bytes, since the last reset."""
    return _status("VmHWM")


def reset_peak_rss() -> int:
    """Bytes that are resident now."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) << 10
    raise AssertionError(name)


def _intree_worker(role: str, port: int, pool_bytes: int, is_pooled: bool) -> Any:
    """vLLM's worker over TCP on host memory, from the part of a configuration that it reads."""
    os.environ["VLLM_HOST_IP"] = HOST
    os.environ["MC_FORCE_TCP"] = "1"
    if is_pooled:
        os.environ["MC_TCP_ENABLE_CONNECTION_POOL"] = "1"
    from vllm.config.ec_transfer import ECTransferConfig
    from vllm.distributed.ec_transfer.ec_connector.mooncake.worker import ECMooncakeWorker

    transfer = ECTransferConfig(
        ec_connector="ECMooncakeConnector",
        ec_role=role,  # type: ignore[arg-type]
        ec_ip=HOST,
        ec_port=port,
        ec_buffer_device="cpu",
        ec_buffer_size=pool_bytes,
        ec_connector_extra_config={"mooncake_protocol": "tcp"},
    )
    parallel = SimpleNamespace(
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        data_parallel_size=1,
        data_parallel_index=0,
    )
    config: Any = SimpleNamespace(ec_transfer_config=transfer, parallel_config=parallel)
    worker = ECMooncakeWorker(config)
    worker.start_services()
    return worker


def _intree_metadata(**fields: Any) -> Any:
    from vllm.distributed.ec_transfer.ec_connector.mooncake.metadata import (
        ECMooncakeConnectorMetadata,
    )

    return ECMooncakeConnectorMetadata(**fields)


class InTreeSender(Costed):
    """The worker of an encoder with vLLM's connector."""

    def __init__(self, port: int, pool_bytes: int, is_pooled: bool) -> None:
        self._worker = _intree_worker("ec_producer", port, pool_bytes, is_pooled)
        self._sources = Sources()

    def prepare(self, batch: Batch) -> str:
        return self._sources.digest(batch)

    def send(self, batch: Batch, to: str) -> float:
        """As of `Sender`: the specs of a step and its outputs, as the model runner gives them."""
        from vllm.distributed.ec_transfer.ec_connector.mooncake.metadata import ECMooncakePushSpec

        self._worker.build_connector_worker_meta()  # forget what has ended
        cache = dict(zip(batch.names, self._sources.of(batch), strict=True))
        start = time.monotonic()
        pushes = [
            ECMooncakePushSpec(name, batch.item_bytes, batch.shape, "bfloat16", to, name, name)
            for name in cache
        ]
        self._worker.start_save_caches(_intree_metadata(pushes=pushes), cache)
        self._worker.build_connector_worker_meta()
        return start


class InTreeReceiver(Costed):
    """The worker of a language engine with vLLM's connector, and its scheduler's inbox."""

    def __init__(self, port: int, pool_bytes: int, is_pooled: bool) -> None:
        self._worker = _intree_worker("ec_consumer", port, pool_bytes, is_pooled)
        from vllm.distributed.ec_transfer.ec_connector.mooncake.control import (
            ControlClient,
            EventInbox,
        )

        self._endpoint = f"tcp://{HOST}:{port}"
        self._inbox = EventInbox(ControlClient(10_000))
        self._inbox.drain(self._endpoint)
        assert self._inbox._socket is not None

    def receive(self, batches: Sequence[Batch], limit_s: float) -> Received:
        """As of `Receiver`."""
        self._arrive(batches, limit_s)
        return Received(time.monotonic())

    def digest(self, batch: Batch, limit_s: float) -> str:
        tensor = self._arrive([batch], limit_s)
        return _digest(tensor)

    def _arrive(self, batches: Sequence[Batch], limit_s: float) -> Any:
        waiting = {name for batch in batches for name in batch.names}
        deadline = time.monotonic() + limit_s
        while waiting:
            self._inbox._socket.poll(int(WORD_TIMEOUT_S * 1000))  # type: ignore[union-attr]
            for event in self._inbox.drain(self._endpoint):
                if event["ready"] and event["mm_hash"] in waiting:
                    tensor = self._load(event)
                    waiting.discard(event["mm_hash"])
            if time.monotonic() > deadline:
                raise late(limit_s)
        return tensor

    def _load(self, event: dict[str, Any]) -> Any:
        from vllm.distributed.ec_transfer.ec_connector.mooncake.metadata import ECMooncakeLoadSpec

        name, shape = event["mm_hash"], tuple(event["shape"])
        spec = ECMooncakeLoadSpec(
            name, event["nbytes"], shape, event["dtype"], event["transfer_id"]
        )
        cache: dict[str, Any] = {}
        self._worker.start_load_caches(_intree_metadata(loads=[spec]), cache)
        tensor = cache[name]
        # The engine frees it: its memory may be given to another item.
        self._worker.start_load_caches(_intree_metadata(freed=[name]), {})
        self._worker.build_connector_worker_meta()
        return tensor
