"""The common part of both ends of the notices' channel: a thread, its sockets and its work."""

import logging
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue

from vllm_kvpool.errors import ProtocolError
from vllm_kvpool.handover.messages import Message, decode
from vllm_kvpool.metrics import MetricsRegistry
from vllm_kvpool.network.allowed_peers import Resolver
from vllm_kvpool.network.log_limit import LogLimit
from vllm_kvpool.network.transport_zmq import Frame, ZmqTransport

logger = logging.getLogger(__name__)

THREAD = "kvpool-notices"
RESOLVER = "kvpool-notices-resolve"
POLL_S = 5.0
JOIN_S = 0.5


class Channel:
    """The thread that owns one end's sockets and state; a subclass says what it does.

    `side` is the end's label in metrics. A bug ends the thread and with it every connection: then
    both ends go on without notices.
    """

    side = ""

    def __init__(
        self,
        sockets: ZmqTransport,
        registry: MetricsRegistry,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sockets = sockets
        self._registry = registry
        self._clock = clock
        self._log = LogLimit(logger)
        self._resolver = Resolver(
            RESOLVER,
            lambda name, addresses: self._post(lambda: self._resolved(name, addresses)),
            self._work_failed,
        )
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._is_closing = self._is_over = False
        self._thread = threading.Thread(target=self._run, name=THREAD, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Send queued frames, then end the thread and every connection.

        Any thread; a second call does nothing.
        """
        self._post(self._begin_close)
        self._thread.join(JOIN_S)

    def _post(self, work: Callable[[], None]) -> None:
        """Have the thread do something. Any thread; does not block."""
        if not self._is_over:  # else nobody takes it
            self._inbox.put(work)
            self._sockets.wake()

    # The thread

    def _run(self) -> None:
        try:
            while not self._is_closing:
                frames = self._sockets.poll(self._pause_s())
                self._work()
                for frame in frames:
                    self._take(frame)
                self._turn(self._clock())
                self._log.tick()
        except Exception:
            logger.exception("kvpool: notices: internal error; lookups poll the stores instead")
            self._registry.add("kvpool_failures", kind="notices")
        finally:
            self._is_over = True
            self._resolver.close()
            self._sockets.close()

    def _begin_close(self) -> None:
        self._is_closing = True

    def _work(self) -> None:
        while True:
            try:
                work = self._inbox.get_nowait()
            except Empty:
                return
            work()

    def _take(self, frame: Frame) -> None:
        peer = frame.link.endpoint or frame.address
        try:
            message = decode(frame.data)
        except ProtocolError as error:
            self._count("invalid")
            text = "kvpool: notices: %s sent what is ignored: %.300s"
            self._log.log(logging.WARNING, "invalid", peer, text, peer, str(error))
            return
        self._on_message(frame, message)

    def _on_message(self, frame: Frame, message: Message) -> None:
        raise NotImplementedError

    def _turn(self, now: float) -> None:
        raise NotImplementedError

    def _pause_s(self) -> float:
        return POLL_S

    def _resolved(self, name: str, addresses: tuple[str, ...]) -> None:
        raise NotImplementedError

    def _work_failed(self, thread: str, error: BaseException) -> None:
        text = "kvpool: %s: a name could not be resolved; its host is refused"
        self._log.log(logging.ERROR, "bug in resolver", "", text, thread, error=error)

    def _count(self, event: str, amount: int = 1) -> None:
        if amount:
            self._registry.add("kvpool_notices", amount, side=self.side, event=event)
