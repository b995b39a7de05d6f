"""The requests of one call to an S3 service: clients, repeats, parts, and how they end.

Everything here runs in the event loop of its call (s3.py), and ends with it. The client repeats
requests that a server turns away for now, and goes on with a body that broke off where it broke
off; puts of unknown outcome and objects that changed while they were read are dealt with here.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError
from obstore.store import S3Store as Client

from vllm_kvpool.storage.base import GetOutcome, PutOutcome
from vllm_kvpool.storage.s3_answers import Kind, Trouble, trouble_of

if TYPE_CHECKING:
    from obstore import GetResult
    from obstore.store import ClientConfig, RetryConfig, S3Config

    from vllm_kvpool.storage.url import S3Options

logger = logging.getLogger(__name__)

T = TypeVar("T")
Work = Coroutine[Any, Any, T]

MAX_DELETE_KEYS = 1000  # of one request; the service's own limit
PART_BYTES = 4 << 20  # of one ranged get
SINGLE_PUT_BYTES = 32 << 20
UPLOAD_PART_BYTES = 8 << 20  # the service wants at least 5 MiB
MAX_UPLOAD_PARTS = 4  # of one object at a time
CONNECT_TIMEOUT_S = 2.0
MAX_RETRIES = 5  # by the client, of one request
RETRY_TIMEOUT_S = 4.0
BACKOFF_S = 0.05  # at first, doubled each time, times a random part
MAX_BACKOFF_S = 1.0
PUT_ATTEMPTS = 3
VERSION_ATTEMPTS = 3  # an object that was replaced while it was read is read again
GIVE_UP_AFTER = 4  # requests in a row without an answer: the rest would wait for as long

NO_SUCH_RANGE = 416


def make_client(options: "S3Options", client_options: "ClientConfig") -> Client:
    """A client; credentials are read from the environment by the client itself."""
    config: S3Config = {
        "region": options.region,
        "virtual_hosted_style_request": not options.path_style,
    }
    if options.endpoint:
        scheme, _, host = options.endpoint.partition("://")
        host = host if options.path_style else f"{options.bucket}.{host}"
        # Not `endpoint`, which an AWS_ENDPOINT_URL_S3 of the environment would override.
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
    reader: Client
    writer: Client  # a put hears nothing until all is sent: only its call's time bounds it


class Call:
    """The requests of one call: so many at a time, and none once the server is lost.

    Its methods raise Trouble. Lives in the event loop of its call.
    """

    def __init__(self, clients: Clients, max_requests: int) -> None:
        self._reader, self._writer = clients
        self._slots = asyncio.Semaphore(max_requests)
        self._num_lost = 0  # requests without answer, in a row
        self._max_lost = 1  # more, once there was an answer
        self._lost: Trouble | None = None  # set while they are too many

    @contextlib.asynccontextmanager
    async def _request(self, *, even_if_lost: bool = False) -> AsyncIterator[None]:
        """A request's place. Of the client's errors it lets through those that are answers."""
        async with self._slots:
            if self._lost is not None and not even_if_lost:
                raise self._lost
            try:
                yield
            except (BaseError, OSError) as error:
                trouble = trouble_of(error)
                self._count(trouble)
                answers = (FileNotFoundError, AlreadyExistsError, PreconditionError)
                if isinstance(error, answers) and trouble.kind is Kind.OWN:
                    raise
                raise trouble from None  # the client's own words may name a key id
            self._count(None)

    def _count(self, trouble: Trouble | None) -> None:
        if trouble is None or trouble.kind is not Kind.UNREACHABLE:
            self._num_lost, self._max_lost, self._lost = 0, GIVE_UP_AFTER, None
            return
        self._num_lost += 1
        if self._num_lost >= self._max_lost:
            self._lost = trouble

    async def size(self, name: str, *, even_if_lost: bool = False) -> int | None:
        """Bytes of an object, None if there is none."""
        try:
            async with self._request(even_if_lost=even_if_lost):
                return (await obstore.head_async(self._reader, name))["size"]
        except FileNotFoundError:
            return None

    async def get(self, name: str, view: memoryview) -> GetOutcome:
        for _ in range(VERSION_ATTEMPTS):
            try:
                return await self._get_version(name, view)
            except FileNotFoundError:
                return GetOutcome.MISSING
            except PreconditionError:
                continue
            except Trouble as trouble:
                if trouble.status != NO_SUCH_RANGE:
                    raise
                return GetOutcome.WRONG_SIZE  # an empty object has no first byte
        raise Trouble(Kind.OWN, f"{name} was replaced {VERSION_ATTEMPTS} times while it was read")

    async def _get_version(self, name: str, view: memoryview) -> GetOutcome:
        """Read an object whole; PreconditionError if it is replaced meanwhile."""
        rest: set[asyncio.Task[None]] = set()
        try:
            async with self._request():
                first = await obstore.get_async(
                    self._reader, name, options={"range": (0, min(view.nbytes, PART_BYTES))}
                )
                if first.meta["size"] != view.nbytes:
                    return GetOutcome.WRONG_SIZE
                for start in range(PART_BYTES, view.nbytes, PART_BYTES):
                    part = self._get_part(name, first.meta["e_tag"], view, start)
                    rest.add(asyncio.ensure_future(part))
                await _fill(view[:PART_BYTES], first)
            await asyncio.gather(*rest)
        finally:
            await _stop(rest)
        return GetOutcome.OK

    async def _get_part(self, name: str, e_tag: str | None, view: memoryview, start: int) -> None:
        part = view[start : start + PART_BYTES]
        async with self._request():
            result = await obstore.get_async(
                self._reader,
                name,
                options={"range": (start, start + part.nbytes), "if_match": e_tag},
            )
            if e_tag is None or result.meta["e_tag"] != e_tag:
                raise PreconditionError(f"{name} has changed")
            await _fill(part, result)

    async def put(
        self, name: str, view: memoryview, conditional: bool, uniform: Callable[[], float]
    ) -> PutOutcome:
        """Put an object if there is none; a put that may or may not have worked is looked after."""
        single = view.nbytes <= SINGLE_PUT_BYTES
        conditional = conditional and single
        for attempt in range(PUT_ATTEMPTS):
            try:
                if not conditional and await self.size(name) is not None:
                    return PutOutcome.EXISTED
                await self._put_bytes(name, view, conditional, single)
                return PutOutcome.STORED
            except AlreadyExistsError:
                return PutOutcome.EXISTED
            except Trouble as trouble:
                if trouble.kind is Kind.FULL:
                    return PutOutcome.FULL
                if trouble.kind is not Kind.UNREACHABLE or attempt == PUT_ATTEMPTS - 1:
                    raise
            # It may be there: ours, whose answer was lost, or another's.
            if await self.size(name, even_if_lost=True) is not None:
                return PutOutcome.EXISTED
            await asyncio.sleep(min(MAX_BACKOFF_S, BACKOFF_S * 2**attempt) * uniform())
        raise AssertionError("the last attempt returns or raises")

    async def _put_bytes(
        self, name: str, view: memoryview, conditional: bool, single: bool
    ) -> None:
        async with self._request():
            await obstore.put_async(
                self._writer,
                name,
                bytes(view),  # a copy, for the client may be sending when the call has given up
                mode="create" if conditional else "overwrite",
                use_multipart=not single,
                chunk_size=UPLOAD_PART_BYTES,
                max_concurrency=MAX_UPLOAD_PARTS,
            )

    async def names_after(self, folder: str, name: str | None) -> list[str]:
        """The next names of a folder in order, at most `MAX_DELETE_KEYS`."""
        async with self._request():
            pages = obstore.list(
                self._reader, f"{folder}/", offset=name, chunk_size=MAX_DELETE_KEYS
            )
            async for page in pages:
                return [meta["path"] for meta in page]
        return []

    async def delete(self, names: list[str]) -> None:
        async with self._request():
            await obstore.delete_async(self._reader, names)


async def _fill(view: memoryview, result: "GetResult") -> None:
    """Take a body that is as long as the buffer; of a longer one, no more than shows it."""
    pieces = result.stream(min_chunk_size=view.nbytes + 1)
    body = memoryview(await anext(aiter(pieces), b""))
    if body.nbytes != view.nbytes:
        found = f"{body.nbytes} bytes" if body.nbytes < view.nbytes else "more"
        raise Trouble(Kind.OWN, f"{found} came where {view.nbytes} bytes were asked for")
    view[:] = body


async def _stop(tasks: "set[asyncio.Task[T]]") -> None:
    """Cancel tasks and wait until they are gone."""
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)


async def settle(works: Iterable[Work[T]], timeout_s: float) -> list[T | Trouble]:
    """Do all at once; each one's result or why there is none. None of them goes on after it."""
    tasks = [asyncio.ensure_future(work) for work in works]
    late: set[asyncio.Task[T]] = set()
    if tasks:
        _, late = await asyncio.wait(tasks, timeout=timeout_s)
    await _stop(late)
    results: list[T | Trouble] = []
    for task in tasks:
        try:
            results.append(task.result())
        except Trouble as trouble:
            results.append(replace(trouble))  # without the traceback, which would hold buffers
        except (BaseError, OSError) as error:  # an answer that its question cannot have
            results.append(trouble_of(error))
        except asyncio.CancelledError:
            results.append(Trouble(Kind.UNREACHABLE, f"not done within {timeout_s:.1f} s"))
    return results
