"""`s3://bucket/prefix`: cells as objects of an S3 service.

Owns two clients of one bucket; knows no urls (url.py). Where a cell is: s3_answers.py.
Any thread may call. A call runs an event loop of its own in the caller's thread, with at most
`MAX_TRANSFERS` or `MAX_HEADS` requests at a time, for `call_timeout_s` at most; when it returns,
nothing of it goes on, so its buffers are neither read nor written any more.
The client repeats requests that a server turns away for now, and goes on with a body that broke
off where it broke off. Puts of unknown outcome and objects that changed are dealt with here.

The first writer of a key wins, by a conditional put. In two cases we look and then put, and of
two writers at the same moment the last wins: with a service that does not know `If-None-Match`
(tried at open), and for objects above `SINGLE_PUT_BYTES`, which go in parts. An upload in parts
that breaks is aborted; one that a call's time cuts off is left to the bucket's lifecycle rules.
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

from obstore.exceptions import BaseError

from vllm_kvpool.errors import ConfigError, StoreError, StoreUnreachable
from vllm_kvpool.storage.base import Buffer, Capabilities, ChunkRef, GetOutcome, PutOutcome
from vllm_kvpool.storage.s3_answers import Kind, Trouble, folder_of, object_name, trouble_of
from vllm_kvpool.storage.s3_call import MAX_DELETE_KEYS, Call, Clients, Work, make_client, settle

if TYPE_CHECKING:
    from vllm_kvpool.storage.url import S3Options

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_TRANSFERS = 16  # requests with a body, of one call at a time
MAX_HEADS = 64
READ_TIMEOUT_S = 2.0  # without a byte; what is left is asked again
LET_GO_S = 0.02  # see close
CALL_TIMEOUT_S = 5.0  # and what the bytes and keys of a call take at
MIN_BYTES_PER_S = 8 << 20
MIN_KEYS_PER_S = 100

CAPABILITIES = Capabilities(
    name="s3",
    durable=True,
    remote=True,
    parallel_gets=2,  # one waits for first bytes while the other's arrive
    parallel_puts=2,
)

MARKER = "marker"  # tells at open whether conditional puts work
ABSENT = "absent"  # never put; tells at open whether an absent object is seen to be absent


def call_timeout_s(num_keys: int, nbytes: int) -> float:
    """How long a call may take in all."""
    return CALL_TIMEOUT_S + num_keys / MIN_KEYS_PER_S + nbytes / MIN_BYTES_PER_S


class S3Store:
    """See the module docstring. `uniform` gives numbers in [0, 1), for backoff."""

    def __init__(self, options: "S3Options", uniform: Callable[[], float] = random.random) -> None:
        """Takes up to three times `CALL_TIMEOUT_S`.

        Raises ConfigError if bucket or credentials cannot work, StoreUnreachable if no server does.
        """
        self._where = f"s3://{options.bucket}"
        if options.endpoint:
            self._where += f" at {options.endpoint}"
        self._root = f"{options.prefix}/v1".lstrip("/")
        self._uniform = uniform
        try:
            self._clients: Clients | None = Clients(
                make_client(options, {"read_timeout": timedelta(seconds=READ_TIMEOUT_S)}),
                make_client(options, {"timeout": timedelta(hours=1)}),
            )
        except BaseError as error:
            raise ConfigError(f"{self._where}: {trouble_of(error).text}") from None
        try:
            self._check_access()
            self._conditional = self._try_conditional_puts()
        except (StoreError, ConfigError):
            self.close()
            raise

    @property
    def capabilities(self) -> Capabilities:
        return CAPABILITIES

    def register(self, buffer: Buffer) -> None:
        """Nothing to do: bodies are copied."""

    def unregister(self, buffer: Buffer) -> None:
        """See `register`."""

    def exists(self, keys: Sequence[str]) -> list[bool]:
        return self._present([object_name(self._root, key) for key in keys])

    def put(
        self, keys: Sequence[str], buffers: Sequence[Buffer], chunks: Sequence[ChunkRef]
    ) -> list[PutOutcome]:
        assert len(keys) == len(buffers) == len(chunks), (len(keys), len(buffers), len(chunks))
        # Nothing orders two requests, so of a key that comes twice only the first is put.
        firsts: dict[str, Buffer] = {}
        for key, buffer in zip(keys, buffers, strict=True):
            firsts.setdefault(key, buffer)
        results = self._run(
            lambda call: (
                call.put(object_name(self._root, key), b.view, self._conditional, self._uniform)
                for key, b in firsts.items()
            ),
            call_timeout_s(len(firsts), sum(b.nbytes for b in firsts.values())),
        )
        self._raise_if_all_lost(results)
        outcomes: dict[str, PutOutcome] = dict(
            zip(firsts, (_or(PutOutcome.FAILED, r) for r in results), strict=True)
        )
        return [outcomes[key] for key in keys]

    def get(self, keys: Sequence[str], buffers: Sequence[Buffer]) -> list[GetOutcome]:
        assert len(keys) == len(buffers), (len(keys), len(buffers))
        results = self._run(
            lambda call: (
                call.get(object_name(self._root, key), buffer.view)
                for key, buffer in zip(keys, buffers, strict=True)
            ),
            call_timeout_s(len(keys), sum(buffer.nbytes for buffer in buffers)),
        )
        self._raise_if_all_lost(results)
        return [_or(GetOutcome.FAILED, result) for result in results]

    def remove(self, keys: Sequence[str]) -> int:
        names = [object_name(self._root, key) for key in dict.fromkeys(keys)]
        # A delete does not say what was there.
        there = [name for name, found in zip(names, self._present(names), strict=True) if found]
        for start in range(0, len(there), MAX_DELETE_KEYS):
            self._delete(there[start : start + MAX_DELETE_KEYS])
        return len(there)

    def remove_namespace(self, namespace: str) -> int:
        """`MAX_DELETE_KEYS` objects may take `CALL_TIMEOUT_S` twice."""
        folder = f"{self._root}/{folder_of(namespace)}"
        num_removed = 0
        names = self._names_after(folder, None)
        while names:
            self._delete(names)
            num_removed += len(names)
            names = self._names_after(folder, names[-1])
        return num_removed

    def close(self) -> None:
        assert self._clients is not None, "closed twice"
        self._clients = None  # a call that is still under way has its own
        # After an answer the client's threads want the GIL once more; an interpreter that ends
        # meanwhile is aborted: https://github.com/PyO3/pyo3-async-runtimes/issues/40
        time.sleep(LET_GO_S)

    def _check_access(self) -> None:
        """An object that is not there must be seen not to be there."""
        absent, view = f"{self._root}/{ABSENT}", memoryview(bytearray(1))
        [result] = self._run(lambda call: [call.get(absent, view)], CALL_TIMEOUT_S)
        self._raise_at_open(result)

    def _try_conditional_puts(self) -> bool:
        """Whether the service refuses to put an object a second time; what it cannot do is said."""
        result = self._put_marker(conditional=True)
        if result is PutOutcome.STORED:
            result = self._put_marker(conditional=True)
        if isinstance(result, PutOutcome) and result is not PutOutcome.STORED:
            return True
        if isinstance(result, Trouble):
            if result.kind is Kind.REFUSED:
                logger.warning(
                    "%s: no saves, for nothing can be put (%s)", self._where, result.text
                )
                return True
            if result.kind is Kind.OWN:
                result = self._put_marker(conditional=False)
            self._raise_at_open(result)
        logger.warning("%s knows no conditional put: of two writers, the last wins", self._where)
        return False

    def _put_marker(self, conditional: bool) -> PutOutcome | Trouble:
        marker, view = f"{self._root}/{MARKER}", memoryview(b"beside the cells of vllm-kvpool")
        [result] = self._run(
            lambda call: [call.put(marker, view, conditional, self._uniform)], CALL_TIMEOUT_S
        )
        return result

    def _raise_at_open(self, result: T | Trouble) -> None:
        if isinstance(result, Trouble):
            if result.kind is Kind.UNREACHABLE:
                raise StoreUnreachable(f"{self._where}: {result.text}")
            raise ConfigError(
                f"{self._where}: {result.text}; check the name of the bucket, region= and "
                "endpoint=, and that the credentials may s3:GetObject, s3:PutObject, "
                "s3:DeleteObject and s3:ListBucket"
            )

    def _present(self, names: Sequence[str]) -> list[bool]:
        results = self._run(
            lambda call: map(call.size, names), call_timeout_s(len(names), 0), MAX_HEADS
        )
        self._raise_if_any_lost(results)
        return [size is not None for size in results]

    def _names_after(self, folder: str, name: str | None) -> list[str]:
        return self._one(lambda call: call.names_after(folder, name))

    def _delete(self, names: list[str]) -> None:
        self._one(lambda call: call.delete(names))

    def _one(self, work: Callable[[Call], Work[T]]) -> T:
        """Do one thing; StoreError if it fails."""
        results = self._run(lambda call: [work(call)], CALL_TIMEOUT_S)
        self._raise_if_any_lost(results)
        [result] = results
        assert not isinstance(result, Trouble)
        return result

    def _run(
        self,
        works: Callable[[Call], Iterable[Work[T]]],
        timeout_s: float,
        max_requests: int = MAX_TRANSFERS,
    ) -> list[T | Trouble]:
        clients = self._clients
        if clients is None:
            raise StoreError(f"{self._where} is closed")

        async def all_of_it() -> list[T | Trouble]:
            return await settle(works(Call(clients, max_requests)), timeout_s)

        with asyncio.Runner() as runner:
            return runner.run(all_of_it())

    def _raise_if_any_lost(self, results: Sequence[T | Trouble]) -> None:
        for trouble in results:
            if isinstance(trouble, Trouble):
                lost = trouble.kind is Kind.UNREACHABLE
                raise (StoreUnreachable if lost else StoreError)(f"{self._where}: {trouble.text}")

    def _raise_if_all_lost(self, results: Sequence[T | Trouble]) -> None:
        """Where nothing is known about any key; a trouble that is a key's own is its outcome."""
        if all(isinstance(result, Trouble) and result.kind is not Kind.OWN for result in results):
            self._raise_if_any_lost(results)


def _or(failed: T, result: T | Trouble) -> T:
    return failed if isinstance(result, Trouble) else result
