"""The process that is the wire between two hosts: frames pass through it, late, or not at all.

Kernels without `netem` have no other way to lose and delay frames. The process lives in a network
namespace of its own with two interfaces. It forwards frames unchanged (`PACKET_VNET_HDR`): without
filling in checksums or cutting large segments, as an interface would. It receives `Weather` from a
pipe, and ends when the pipe closes.
"""

import contextlib
import heapq
import itertools
import select
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from random import Random

from tests.support.namespaces import enter
from tests.support.orphans import end_with_parent

ETH_P_ALL = 3
SOL_PACKET = 263
PACKET_VNET_HDR = 15
SO_RCVBUFFORCE = 33
BUFFER_BYTES = 32 << 20
MAX_FRAME_BYTES = 70_000
FRAMES_AT_A_TIME = 256
MAX_HELD = 20_000  # frames that are late; beyond it they are lost, as in a router


@dataclass(frozen=True, slots=True)
class Weather:
    """Conditions on the wire that apply to each frame."""

    delay_s: float = 0.0
    loss: float = 0.0  # part of the frames
    is_cut: bool = False


@dataclass(slots=True)
class Wire:
    """Frames in transit on the wire; `due` yields the frames that have arrived."""

    chance: Random
    weather: Weather = field(default_factory=Weather)
    _held: list[tuple[float, int, int, bytes]] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def put_in(self, end: int, frame: bytes, now: float) -> None:
        """A frame for the other end, 0 or 1."""
        lost = self.weather.is_cut or self.chance.random() < self.weather.loss
        if not lost and len(self._held) < MAX_HELD:
            entry = (now + self.weather.delay_s, next(self._numbers), end, frame)
            heapq.heappush(self._held, entry)

    def due(self, now: float) -> Iterator[tuple[int, bytes]]:
        """Ends and frames, in the order of their arrival."""
        while self._held and self._held[0][0] <= now:
            _, _, end, frame = heapq.heappop(self._held)
            if not self.weather.is_cut:
                yield end, frame

    def next_due(self) -> float | None:
        """When the next frame arrives."""
        return self._held[0][0] if self._held else None


def run(namespace: str, interfaces: tuple[str, str], orders: Connection, seed: int) -> None:
    """The process from start to end; says True when frames pass."""
    end_with_parent()
    enter(namespace)
    ends = [_open(name) for name in interfaces]
    wire = Wire(Random(seed))
    orders.send(True)
    while True:
        next_due = wire.next_due()
        timeout_s = None if next_due is None else max(0.0, next_due - time.monotonic())
        watched: list[Connection | socket.socket] = [orders, *ends]
        ready, _, _ = select.select(watched, [], [], timeout_s)
        if orders in ready:
            try:
                wire.weather = orders.recv()
            except EOFError:
                return
        for number, end in enumerate(ends):
            if end in ready:
                for frame in _frames(end):
                    wire.put_in(1 - number, frame, time.monotonic())
        for number, frame in wire.due(time.monotonic()):
            # No room, or the interface is down: lost, as on any wire.
            with contextlib.suppress(OSError):
                ends[number].send(frame)


def _open(interface: str) -> socket.socket:
    end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
    end.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    end.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, BUFFER_BYTES)
    end.bind((interface, ETH_P_ALL))
    end.setblocking(False)
    return end


def _frames(end: socket.socket) -> Iterator[bytes]:
    """Yield received frames, without the frames sent from this end."""
    for _ in range(FRAMES_AT_A_TIME):
        try:
            frame, address = end.recvfrom(MAX_FRAME_BYTES)
        except OSError:  # nothing more, or the interface went down
            return
        if address[2] != socket.PACKET_OUTGOING:
            yield frame
