"""`s3://bucket/prefix`: cells as objects `{root}/{namespace, escaped}/{digest of the key}`.

Any thread may call. A call runs an event loop in its thread for `call_timeout_s` at most, and
nothing of it continues afterwards. A cell is one request. The client repeats requests that fail
temporarily and resumes bodies; puts of unknown outcome are handled here.

The first writer of a key wins, by a conditional put. Of two concurrent writers the last wins if the
service has no `If-None-Match` (tested at open).
"""

import asyncio
import contextlib
import hashlib
import logging
import random
import re
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError
from obstore.store import S3Store as Client

from vllm_kvpool.errors import ConfigError, StoreError, StoreUnreachable
from vllm_kvpool.identity.keys import Namespace, is_namespace, manifest_key, namespace_of
from vllm_kvpool.storage.base import (
    Buffer,
    Capabilities,
    ChunkRef,
    GetOutcome,
    NamespaceUsage,
    PutOutcome,
    Store,
)
from vllm_kvpool.storage.url import S3Options

if TYPE_CHECKING:
    from obstore import GetResult
    from obstore.store import ClientConfig, RetryConfig, S3Config

logger = logging.getLogger(__name__)

T = TypeVar("T")
Work = Coroutine[Any, Any, T]

MAX_TRANSFERS = 16  # concurrent requests with a body, of one call
MAX_HEADS = 64
READ_TIMEOUT_S = 2.0  # without a byte; the client then resumes the body
LET_GO_S = 0.02  # see `close`
CALL_TIMEOUT_S = 5.0  # plus the time for the bytes and keys of a call, at
MIN_BYTES_PER_S = 8 << 20
MIN_KEYS_PER_S = 100
LIST_S = 600.0  # for the objects of a namespace, listed for an operator
MAX_DELETE_KEYS = 1000  # of one request, the limit of S3
CONNECT_TIMEOUT_S = 2.0
MAX_RETRIES = 5  # by the client, of one request
RETRY_TIMEOUT_S = 4.0
BACKOFF_S = 0.05  # at first; doubled each time, with full jitter
MAX_BACKOFF_S = 1.0
PUT_ATTEMPTS = 3
GIVE_UP_AFTER = 4  # requests in a row without an answer; the rest fail at once

LISTS_REFUSED = (403, 501)  # statuses; 501 of a service without lists
NO_SUCH_RANGE = 416
PANIC = "PanicException"  # of Rust's runtime, as when it gets no threads; no `Exception`

NO_NAMESPACE = "other"  # an escaped namespace has "_40" in it
NOT_IMPLEMENTED = "501"
FULL_CODES = frozenset({"QuotaExceeded", "XMinioAdminBucketQuotaExceeded", "XMinioStorageFull"})
REFUSED_CODES = frozenset({"ExpiredToken", "InvalidToken", "NoSuchBucket"})

_ESCAPED = re.compile(r"[^A-Za-z0-9.-]")
_STATUS = re.compile(r"non-2xx status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w+)</Code>")
_REQUEST = re.compile(r"Error performing ([A-Z]+) (\w+://[^/\s]+)")
_CAUSE = re.compile(r'(?:message|error): "([^"]+)"')

CAPABILITIES = Capabilities(
    name="s3",
    durable=True,
    remote=True,
    parallel_gets=2,  # one waits for its first bytes while the other receives
    parallel_puts=2,
)

MARKER = "marker"  # an object that tests conditional puts at open
ABSENT = "absent"  # never put; tests the access at open


class ErrorScope(Enum):
    """The set of requests that would fail like this one."""

    UNREACHABLE = "unreachable"  # all for now: no answer, or a temporary error
    REFUSED = "refused"  # all: credentials, rights or the bucket are wrong
    FULL = "full"  # puts: the bucket is full
    OWN = "own"  # none


@dataclass(eq=False)
class S3Error(Exception):
    """The failure of a request; `text` never contains a secret."""

    scope: ErrorScope
    text: str
    status: int = 0  # 0 without an answer


def failure_of(error: Exception) -> S3Error:
    """Interpret a client's error, whose own text may quote key ids from the server's answer."""
    said = str(error)
    status, code = (found[1] if (found := p.search(said)) else "" for p in (_STATUS, _CODE))
    request = " ".join(found.groups()) if (found := _REQUEST.search(said)) else "request"
    if status:
        if code in FULL_CODES:
            scope = ErrorScope.FULL
        elif status in ("401", "403") or code in REFUSED_CODES:
            scope = ErrorScope.REFUSED
        elif status in ("408", "429") or (status[0] == "5" and status != NOT_IMPLEMENTED):
            scope = ErrorScope.UNREACHABLE
        else:
            scope = ErrorScope.OWN
        return S3Error(scope, f"{request}: {status} {code}".rstrip(), int(status))
    if "HTTP error" in said:
        causes = _CAUSE.findall(said)
        cause = causes[-1] if causes else "timed out" if "TimedOut" in said else "connection lost"
        return S3Error(ErrorScope.UNREACHABLE, f"{request}: {cause}")
    if "redirect" in said:
        return S3Error(
            ErrorScope.REFUSED, f"{request}: redirected, so the region may be wrong", 301
        )
    return S3Error(ErrorScope.OWN, f"{request}: not an answer of S3 ({type(error).__name__})")


def folder_of(namespace: str) -> str:
    """Return a unique name for a namespace that needs no escaping."""
    return _ESCAPED.sub(lambda found: f"_{ord(found[0]):02X}", namespace)


def namespace_of_folder(folder: str) -> str:
    """Return the namespace whose folder it is."""
    return re.sub("_([0-9A-F]{2})", lambda found: chr(int(found[1], 16)), folder)


def object_name(root: str, key: str) -> str:
    """Return the name of a key's object."""
    namespace = namespace_of(key)
    folder = NO_NAMESPACE if namespace is None else folder_of(namespace)
    return f"{root}/{folder}/{hashlib.blake2b(key.encode(), digest_size=32).hexdigest()}"


def make_client(options: S3Options, client_options: "ClientConfig") -> Client:
    """Return a client, which reads credentials from the environment itself."""
    config: S3Config = {
        "region": options.region,
        "virtual_hosted_style_request": not options.path_style,
    }
    if options.endpoint:
        scheme, _, host = options.endpoint.partition("://")
        host = host if options.path_style else f"{options.bucket}.{host}"
        # AWS_ENDPOINT_URL_S3 in the environment would override `endpoint`.
        config["aws_endpoint_url_s3"] = f"{scheme}://{host}"
        client_options["allow_http"] = scheme == "http"
    if options.anonymous:
        config["skip_signature"] = True
    retry: RetryConfig = {
        "max_retries": MAX_RETRIES,
        "retry_timeout": timedelta(seconds=RETRY_TIMEOUT_S),
        "backoff": {
            "init_backoff": timedelta(seconds=BACKOFF_S),
            "max_backoff": timedelta(seconds=MAX_BACKOFF_S),
            "base": 2,
        },
    }
    client_options["connect_timeout"] = timedelta(seconds=CONNECT_TIMEOUT_S)
    return Client(options.bucket, config=config, client_options=client_options, retry_config=retry)


class Clients(NamedTuple):
    """The two HTTP clients of one bucket."""

    reader: Client
    writer: Client  # without a read timeout, as a put receives nothing until all is sent


class Call:
    """The requests of one call: a bounded number at a time, none once the server is lost.

    Lives in the call's event loop. Methods raise S3Error.
    """

    def __init__(self, clients: Clients, max_requests: int) -> None:
        self._reader, self._writer = clients
        self._slots = asyncio.Semaphore(max_requests)
        self._num_lost = 0  # requests without answer, in a row
        self._max_lost = 1  # `GIVE_UP_AFTER` once there was an answer
        self._lost: S3Error | None = None  # the error of further requests

    @contextlib.asynccontextmanager
    async def _request(self, *, even_if_lost: bool = False) -> AsyncIterator[None]:
        """Wait for a slot; turn the client's errors into S3Error, except those that are answers."""
        async with self._slots:
            if self._lost is not None and not even_if_lost:
                raise self._lost
            try:
                yield
            except (BaseError, OSError) as error:
                failure = failure_of(error)
                self._count(failure)
                answers = (FileNotFoundError, AlreadyExistsError, PreconditionError)
                if isinstance(error, answers) and failure.scope is ErrorScope.OWN:
                    raise
                raise failure from None  # the client's own text may contain a key id
            self._count(None)

    def _count(self, failure: S3Error | None) -> None:
        if failure is None or failure.scope is not ErrorScope.UNREACHABLE:
            self._num_lost, self._max_lost, self._lost = 0, GIVE_UP_AFTER, None
            return
        self._num_lost += 1
        if self._num_lost >= self._max_lost:
            self._lost = failure

    async def size(self, name: str, *, even_if_lost: bool = False) -> int | None:
        """Return the bytes of an object, None if it is absent."""
        try:
            async with self._request(even_if_lost=even_if_lost):
                return (await obstore.head_async(self._reader, name))["size"]
        except FileNotFoundError:
            return None

    async def get(self, name: str, view: memoryview) -> GetOutcome:
        """Read an object into `view` if it has exactly that size."""
        try:
            async with self._request():
                # A range, so that the answer has the object's size beside that of its body.
                result = await obstore.get_async(
                    self._reader, name, options={"range": (0, view.nbytes)}
                )
                if result.meta["size"] != view.nbytes:
                    return GetOutcome.WRONG_SIZE
                await _fill(view, result)
                return GetOutcome.OK
        except FileNotFoundError:
            return GetOutcome.MISSING
        except S3Error as failure:
            if failure.status != NO_SUCH_RANGE:
                raise
            return GetOutcome.WRONG_SIZE  # the object is empty

    async def put(
        self, name: str, view: memoryview, conditional: bool, uniform: Callable[[], float]
    ) -> PutOutcome:
        """Put an object if it is absent; after a put of unknown outcome check whether it exists."""
        for attempt in range(PUT_ATTEMPTS):
            try:
                if not conditional and await self.size(name) is not None:
                    return PutOutcome.EXISTED
                async with self._request():
                    await obstore.put_async(
                        self._writer,
                        name,
                        bytes(view),  # the client may still send it after the call's time limit
                        mode="create" if conditional else "overwrite",
                        use_multipart=False,
                    )
                return PutOutcome.STORED
            except AlreadyExistsError:
                return PutOutcome.EXISTED
            except S3Error as failure:
                if failure.scope is ErrorScope.FULL:
                    return PutOutcome.FULL
                if failure.scope is not ErrorScope.UNREACHABLE or attempt == PUT_ATTEMPTS - 1:
                    raise
            # It may exist: this put's answer was lost, or another writer put it.
            if await self.size(name, even_if_lost=True) is not None:
                return PutOutcome.EXISTED
            await asyncio.sleep(min(MAX_BACKOFF_S, BACKOFF_S * 2**attempt) * uniform())
        raise AssertionError("the last attempt returns or raises")

    async def names_after(self, folder: str, name: str | None) -> list[str]:
        """Return up to `MAX_DELETE_KEYS` names of a folder after a name, in order."""
        async with self._request():
            pages = obstore.list(
                self._reader, f"{folder}/", offset=name, chunk_size=MAX_DELETE_KEYS
            )
            async for page in pages:
                return [meta["path"] for meta in page]
        return []

    async def folders(self, root: str) -> list[str]:
        """Return the names of the folders below a root."""
        async with self._request():
            found = await obstore.list_with_delimiter_async(self._reader, f"{root}/")
            return [path.rstrip("/").rpartition("/")[2] for path in found["common_prefixes"]]

    async def size_of_all(self, folder: str) -> tuple[int, int]:
        """Return the number of objects in a folder, and their bytes."""
        async with self._request():
            num_objects = nbytes = 0
            async for page in obstore.list(self._reader, f"{folder}/", chunk_size=MAX_DELETE_KEYS):
                num_objects += len(page)
                nbytes += sum(meta["size"] for meta in page)
            return num_objects, nbytes

    async def delete(self, names: list[str]) -> None:
        """Delete objects in one request; names that do not exist are no error."""
        async with self._request():
            await obstore.delete_async(self._reader, names)


async def _fill(view: memoryview, result: "GetResult") -> None:
    """Receive a body exactly as long as the buffer; S3Error for another length."""
    pieces = result.stream(min_chunk_size=view.nbytes + 1)
    body = memoryview(await anext(aiter(pieces), b""))
    if body.nbytes != view.nbytes:
        found = f"{body.nbytes} bytes" if body.nbytes < view.nbytes else "more"
        raise S3Error(
            ErrorScope.OWN, f"the server sent {found} where {view.nbytes} bytes were asked for"
        )
    view[:] = body


async def _stop(tasks: "set[asyncio.Task[T]]") -> None:
    """Cancel tasks and wait for their end."""
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)


async def run_all(works: Iterable[Work[T]], timeout_s: float) -> list[T | S3Error]:
    """Run all concurrently; the result or error of each. None continues afterwards."""
    tasks = [asyncio.ensure_future(work) for work in works]
    late: set[asyncio.Task[T]] = set()
    if tasks:
        _, late = await asyncio.wait(tasks, timeout=timeout_s)
    await _stop(late)
    results: list[T | S3Error] = []
    for task in tasks:
        try:
            results.append(task.result())
        except S3Error as failure:
            results.append(replace(failure))  # without its traceback, which refers to buffers
        except (BaseError, OSError) as error:  # an answer that does not fit its request
            results.append(failure_of(error))
        except asyncio.CancelledError:
            results.append(S3Error(ErrorScope.UNREACHABLE, f"no end within {timeout_s:.1f} s"))
    return results


def call_timeout_s(num_keys: int, nbytes: int) -> float:
    """Return the time limit of a call."""
    return CALL_TIMEOUT_S + num_keys / MIN_KEYS_PER_S + nbytes / MIN_BYTES_PER_S


class S3Store(Store):
    """A bucket; implements `Listing`, too. `uniform`: numbers in [0, 1), for backoff."""

    capabilities = CAPABILITIES

    def __init__(self, options: S3Options, uniform: Callable[[], float] = random.random) -> None:
        """Open the bucket, within five times `CALL_TIMEOUT_S`.

        ConfigError if bucket or credentials do not work, StoreUnreachable if no server answers.
        """
        self._where = f"s3://{options.bucket}"
        if options.endpoint:
            self._where += f" at {options.endpoint}"
        self._root = f"{options.prefix}/v1".lstrip("/")
        self._uniform = uniform
        try:
            self._clients = Clients(
                make_client(options, {"read_timeout": timedelta(seconds=READ_TIMEOUT_S)}),
                make_client(options, {"timeout": timedelta(hours=1)}),
            )
        except BaseError as error:
            raise ConfigError(f"{self._where}: {failure_of(error).text}") from None
        try:
            self._check_access()
            self._conditional = self._try_conditional_puts()
        except (StoreError, ConfigError):
            self.close()
            raise

    def exists(self, keys: Sequence[str]) -> list[bool]:
        """Return for each key whether its object exists, by one request a key."""
        return self._present([object_name(self._root, key) for key in keys])

    def put(
        self, keys: Sequence[str], buffers: Sequence[Buffer], chunks: Sequence[ChunkRef]
    ) -> list[PutOutcome]:
        """Put each key's object by one request, of equal keys only the first."""
        assert len(keys) == len(buffers) == len(chunks), (len(keys), len(buffers), len(chunks))
        # Requests are unordered, so of a key given twice only the first buffer is put.
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
        """Get each key's object by one request; StoreUnreachable if all are lost."""
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
        """Delete the objects that exist and return their number."""
        names = [object_name(self._root, key) for key in dict.fromkeys(keys)]
        # A delete does not tell what existed.
        there = [name for name, found in zip(names, self._present(names), strict=True) if found]
        for start in range(0, len(there), MAX_DELETE_KEYS):
            part = there[start : start + MAX_DELETE_KEYS]
            self._one(partial(Call.delete, names=part))
        return len(there)

    def remove_namespace(self, namespace: str) -> int:
        """Remove a namespace; `MAX_DELETE_KEYS` objects may take `CALL_TIMEOUT_S` twice."""
        folder = f"{self._root}/{folder_of(namespace)}"
        num_removed, last = 0, None
        while names := self._one(partial(Call.names_after, folder=folder, name=last)):
            self._one(partial(Call.delete, names=names))
            num_removed, last = num_removed + len(names), names[-1]
        return num_removed

    def namespaces(self) -> list[str]:
        """Return the namespaces that have an object, by listing folders."""
        folders = self._one(lambda call: call.folders(self._root))
        found = (namespace_of_folder(folder) for folder in folders if folder != NO_NAMESPACE)
        return [name for name in found if is_namespace(name)]

    def usage(self) -> list[NamespaceUsage]:
        """Return the usage; chunks are 0, as names of objects are digests of keys."""
        found = []
        for namespace in map(Namespace, self.namespaces()):
            folder = f"{self._root}/{folder_of(namespace)}"
            num_objects, nbytes = self._one(partial(Call.size_of_all, folder=folder), LIST_S)
            num_manifests = sum(self.exists([manifest_key(namespace)]))
            found.append(NamespaceUsage(namespace, 0, num_objects - num_manifests, nbytes))
        return found

    def close(self) -> None:
        """Wait until the client's threads have let go of the GIL."""
        # After an answer the client's threads take the GIL once more, which aborts an interpreter
        # that is ending: https://github.com/PyO3/pyo3-async-runtimes/issues/40
        time.sleep(LET_GO_S)

    def _check_access(self) -> None:
        """Raise ConfigError or StoreUnreachable unless an absent object is reported as absent.

        With the bucket's name in `endpoint` as well, gets and puts work and lists do not.
        """
        absent, view = f"{self._root}/{ABSENT}", memoryview(bytearray(1))
        self._raise_at_open(self._try(lambda call: call.get(absent, view)))
        listed = self._try(lambda call: call.names_after(absent, None))
        if isinstance(listed, S3Error) and listed.status in LISTS_REFUSED:
            logger.warning(
                "%s: resets, `kvpool purge` of a namespace, and `kvpool inspect` fail, as lists "
                "are refused: %s",
                self._where,
                listed.text,
            )
        else:
            self._raise_at_open(listed)

    def _try_conditional_puts(self) -> bool:
        """Return True if the service refuses a second conditional put of an object."""
        result = self._put_marker(conditional=True)
        if result is PutOutcome.STORED:
            result = self._put_marker(conditional=True)
        if isinstance(result, PutOutcome) and result is not PutOutcome.STORED:
            return True
        if isinstance(result, S3Error):
            if result.scope is ErrorScope.REFUSED:
                logger.warning(
                    "%s: cells are not saved, as puts are refused: %s", self._where, result.text
                )
                return True
            if result.scope is ErrorScope.OWN:
                result = self._put_marker(conditional=False)
            self._raise_at_open(result)
        logger.warning(
            "%s has no conditional puts: of two writers of a key the last wins", self._where
        )
        return False

    def _put_marker(self, conditional: bool) -> PutOutcome | S3Error:
        marker, view = f"{self._root}/{MARKER}", memoryview(b"beside the cells of vllm-kvpool")
        return self._try(lambda call: call.put(marker, view, conditional, self._uniform))

    def _try(self, work: Callable[[Call], Work[T]]) -> T | S3Error:
        [result] = self._run(lambda call: [work(call)], CALL_TIMEOUT_S)
        return result

    def _raise_at_open(self, result: T | S3Error) -> None:
        if isinstance(result, S3Error):
            if result.scope is ErrorScope.UNREACHABLE:
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

    def _one(self, work: Callable[[Call], Work[T]], timeout_s: float = CALL_TIMEOUT_S) -> T:
        """Run one piece of work; StoreError if it fails."""
        results = self._run(lambda call: [work(call)], timeout_s)
        self._raise_if_any_lost(results)
        [result] = results
        assert not isinstance(result, S3Error)
        return result

    def _run(
        self,
        works: Callable[[Call], Iterable[Work[T]]],
        timeout_s: float,
        max_requests: int = MAX_TRANSFERS,
    ) -> list[T | S3Error]:
        async def run() -> list[T | S3Error]:
            return await run_all(works(Call(self._clients, max_requests)), timeout_s)

        try:
            with asyncio.Runner() as runner:
                return runner.run(run())
        except BaseException as error:
            if type(error).__name__ != PANIC:
                raise
            text = f"{self._where}: the client has failed: {error}"
        raise StoreUnreachable(text)

    def _raise_if_any_lost(self, results: Sequence[T | S3Error]) -> None:
        for failure in results:
            if isinstance(failure, S3Error):
                lost = failure.scope is ErrorScope.UNREACHABLE
                raise (StoreUnreachable if lost else StoreError)(f"{self._where}: {failure.text}")

    def _raise_if_all_lost(self, results: Sequence[T | S3Error]) -> None:
        """Raise StoreError if nothing is known about any key."""
        if all(
            isinstance(result, S3Error) and result.scope is not ErrorScope.OWN for result in results
        ):
            self._raise_if_any_lost(results)


def _or(failed: T, result: T | S3Error) -> T:
    return failed if isinstance(result, S3Error) else result
