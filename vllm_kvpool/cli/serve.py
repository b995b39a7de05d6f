"""`kvpool serve`: an HTTP service that says what the pool has of a prompt.

It reads stores and changes none. Handlers run on starlette's threads and block there on store calls
and tokenizers. What ranks have in host memory is not seen.
"""

import asyncio
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from vllm_kvpool.cli import inspect as inspecting
from vllm_kvpool.cli.common.prompt import names_of
from vllm_kvpool.cli.common.stores import NamedStore, manifest_named, manifests, open_spec
from vllm_kvpool.cli.common.tokenizer import TokenizerAway, tokenize
from vllm_kvpool.client import LookupAnswer, LookupRequest, TierCoverage
from vllm_kvpool.errors import ConfigError, StoreError
from vllm_kvpool.identity.keys import (
    FORMAT_DIGEST_HEX,
    Namespace,
    make_namespace,
    name_of_model,
)
from vllm_kvpool.parsing import UNREADABLE
from vllm_kvpool.router.dataplane.origins import Origins
from vllm_kvpool.storage.backends import capabilities_of
from vllm_kvpool.storage.contents.manifest import Manifest
from vllm_kvpool.storage.guarded import CallTimeouts, GuardedStore
from vllm_kvpool.storage.url import StoreSpec

CALL_TIMEOUT_S = 5.0
OPEN_WAIT_S = 5.0
STATS_EVERY_S, LIST_EVERY_S = 10.0, 10.0
MAX_BODY_BYTES = 8 << 20
MAX_READ_BYTES = 4 * MAX_BODY_BYTES  # of a request that is refused
DECODED_TIMES = 32  # bytes of a decoded body, for each byte of its JSON: `[{},{},…]` takes most
MAX_DECODED_BYTES = 512 << 20  # of all requests
READ_TIMEOUT_S = 30.0  # of a body
MAX_CONNECTIONS = 256
MAX_LOOKUPS, MAX_TEXTS = 16, 8  # at a time, by tokens and by text; starlette has 40 threads
MAX_MANIFESTS = 256
JSON = "application/json"
NO_MODELS: Mapping[str, Sequence[str]] = {}

_decode = msgspec.json.Decoder(LookupRequest).decode


def guarded_stores(specs: Sequence[StoreSpec]) -> list[NamedStore]:
    """The stores, open for reading; one that cannot be reached is opened once it can. ConfigError
    if one can never work."""
    timeouts = CallTimeouts(call_s=CALL_TIMEOUT_S, answer_s=CALL_TIMEOUT_S)
    return [
        NamedStore(
            spec.url,
            GuardedStore(
                partial(open_spec, spec, writable=False),
                capabilities_of(spec),
                spec.scheme,
                timeouts,
                OPEN_WAIT_S,
            ),
        )
        for spec in specs
    ]


class LookupApi:
    """Answers requests from the stores. Any thread may call; calls block.

    `tokenizer` is for prompts given as text, as in `tokenizer.py`. `models`: namespaces by a
    model's name, for models that engines serve under another name than their own.
    """

    def __init__(
        self,
        stores: Sequence[NamedStore],
        tokenizer: str | None = None,
        clock: Callable[[], float] = time.monotonic,
        models: Mapping[str, Sequence[str]] = NO_MODELS,
    ) -> None:
        self._stores = stores
        self._tokenizer = tokenizer
        self._clock = clock
        self._models = models
        self._manifests: dict[str, Manifest] = {}  # by whole names, whose content never changes
        self._stats_lock = threading.Lock()  # so that stores are listed once at a time
        self._stats: list[dict[str, Any]] = []
        self._stats_until = float("-inf")
        self._listing_lock = threading.Lock()
        self._listed: list[Manifest] | None = None
        self._listed_until = float("-inf")

    def lookup(self, request: LookupRequest) -> LookupAnswer:
        """What the stores have of a prompt.

        ConfigError if the request names nothing that can be looked up, StoreError if no store can
        say what its namespace is.
        """
        prompts = (request.tokens, request.text, request.messages)
        if sum(each is not None for each in prompts) != 1:
            raise ConfigError("give one of tokens, text and messages")
        if (request.namespace is None) is (request.model is None):
            raise ConfigError("give one of namespace and model")
        if request.namespace is not None:
            those = [self._manifest(request.namespace)]
        else:
            assert request.model is not None
            those = self._of_model(request.model)
        if not those:
            return LookupAnswer(namespace="", tokens=0, chunk_tokens=0, covered_tokens=0, tiers=[])
        tokens = self._tokens(request)
        found = [self._coverage(request, each, tokens) for each in those]
        return max(found, key=lambda each: each.covered_tokens)

    def _coverage(
        self, request: LookupRequest, manifest: Manifest, tokens: Sequence[int]
    ) -> LookupAnswer:
        names = names_of(manifest, tokens, request.cache_salt or "")
        tiers, present = [], []
        for each in self._stores:
            tier = TierCoverage(store=each.url)
            try:
                tier.covered_tokens = names.covered_tokens(each.store.exists)
                present.append(each)
            except StoreError as error:
                tier.error = str(error)
            tiers.append(tier)
        covered = max((tier.covered_tokens for tier in tiers), default=0)
        if len(present) > 1:
            covered = max(covered, names.covered_tokens(partial(_exists_in_any, present)))
        return LookupAnswer(
            namespace=manifest.namespace,
            tokens=len(tokens),
            chunk_tokens=names.chunk_tokens,
            covered_tokens=covered,
            tiers=tiers,
        )

    def stats(self) -> list[dict[str, Any]]:
        """What each store holds, as `kvpool inspect --json`; up to `STATS_EVERY_S` old."""
        with self._stats_lock:
            if self._clock() >= self._stats_until:
                self._stats = [self._content(each) for each in self._stores]
                self._stats_until = self._clock() + STATS_EVERY_S
            return self._stats

    def health(self) -> dict[str, Any]:
        """That the service runs, and why a store cannot be reached; "" if it can."""
        return {"status": "ok", "stores": {each.url: _trouble(each) for each in self._stores}}

    def _content(self, each: NamedStore) -> dict[str, Any]:
        try:
            return inspecting.contents([each])[0]
        except StoreError as error:
            return {"store": each.url, "namespaces": None, "why": str(error)}

    def _manifest(self, name: str) -> Manifest:
        if name in self._manifests:
            return self._manifests[name]
        able, errors = [], []
        for each in self._stores:
            trouble = _trouble(each)
            able += [] if trouble else [each]
            errors += [f"{each.url}: {trouble}"] if trouble else []
        if not able:
            raise StoreError("; ".join(errors) or "no store")
        manifest = manifest_named(able, name)
        if manifest.namespace == name and len(self._manifests) < MAX_MANIFESTS:
            self._manifests[name] = manifest
        return manifest

    def _of_model(self, model: str) -> list[Manifest]:
        """Of its namespaces, as they were listed up to `LIST_EVERY_S` ago; StoreError if no store
        can be asked."""
        if named := self._models.get(model):
            return [self._manifest(each) for each in named]
        is_first, is_due = self._listed is None, self._clock() >= self._listed_until
        # While one lists them again, the others go by what was listed before.
        if is_due and self._listing_lock.acquire(blocking=is_first):
            try:
                if self._clock() >= self._listed_until:
                    self._listed = self._list_manifests()
                    self._listed_until = self._clock() + LIST_EVERY_S
            finally:
                self._listing_lock.release()
        head = names_begin(model)
        return [each for each in self._listed or () if each.namespace.startswith(head)]

    def _list_manifests(self) -> list[Manifest]:
        found: dict[Namespace, Manifest] = {}
        errors = []
        for each in self._stores:
            try:
                found |= manifests([each])
            except StoreError as error:
                errors.append(f"{each.url}: {error}")
        if len(errors) == len(self._stores):
            raise StoreError("; ".join(errors) or "no store")
        return [each for each in found.values() if each.cells][:MAX_MANIFESTS]

    def _tokens(self, request: LookupRequest) -> Sequence[int]:
        """Of the prompt."""
        if request.tokens is not None:
            return request.tokens
        if self._tokenizer is None:
            raise ConfigError("text and messages need `kvpool serve --tokenizer`")
        prompt = request.text if request.text is not None else request.messages
        assert prompt is not None
        of_chat = ("tools", "chat_template_kwargs") if request.messages is not None else ()
        beside = {name: getattr(request, name) for name in ("model", *of_chat)}
        given = {name: value for name, value in beside.items() if value is not None}
        return tokenize(prompt, self._tokenizer, given)


def names_begin(model: str) -> str:
    """How the namespaces begin of engines that are given a model by this name or directory."""
    return make_namespace(name_of_model(model), "0" * FORMAT_DIGEST_HEX).partition("@")[0] + "@"


def _trouble(each: NamedStore) -> str:
    try:
        each.store.exists(["kvpool-health"])
    except StoreError as error:
        return str(error)
    return ""


def _exists_in_any(stores: Sequence[NamedStore], keys: Sequence[str]) -> list[bool]:
    there = [False] * len(keys)
    for each in stores:
        missing = [i for i, has in enumerate(there) if not has]
        try:
            found = each.store.exists([keys[i] for i in missing])
        except StoreError:
            continue  # its own line says so
        for i, has in zip(missing, found, strict=True):
            there[i] = has
    return there


def application(api: LookupApi, origins: Origins) -> ASGIApp:
    """The routes `POST /lookup`, `GET /stats` and `GET /healthz`, for what `origins` takes.

    What waits for a tokenizer or a listing leaves threads to lookups by tokens and to `/healthz`.
    """
    lookups, texts, listings = map(asyncio.Semaphore, (MAX_LOOKUPS, MAX_TEXTS, 1))
    held_bytes = 0

    async def lookup(request: Request) -> Response:
        nonlocal held_bytes
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != JSON:
            raise HTTPException(415, f"send Content-Type: {JSON}")
        body, size = bytearray(), 0
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                async for piece in request.stream():
                    size += len(piece)
                    charge = len(piece) * DECODED_TIMES
                    if size <= MAX_BODY_BYTES and held_bytes + charge <= MAX_DECODED_BYTES:
                        body += piece
                        held_bytes += charge
                    elif size > MAX_READ_BYTES:
                        break  # else it is read to its end: who sends reads no answer yet
            if size > MAX_BODY_BYTES:
                raise HTTPException(413, f"the body is larger than {MAX_BODY_BYTES} bytes")
            if size > len(body):
                raise HTTPException(503, "too many large requests at a time, ask again later")
            asked = await run_in_threadpool(_decode, body)
            is_text = asked.text is not None or asked.messages is not None
            async with texts if is_text else lookups:
                return _json(await run_in_threadpool(api.lookup, asked))
        except ClientDisconnect:
            return Response()
        except TimeoutError:
            why = f"the body has not come within {READ_TIMEOUT_S:g} s"
            return _json({"error": why}, 408, {"Connection": "close"})
        except (TokenizerAway, StoreError) as error:
            return _json({"error": str(error)}, 503)
        except UNREADABLE as error:
            return _json({"error": str(error)}, 400)
        finally:
            held_bytes -= len(body) * DECODED_TIMES

    async def stats(request: Request) -> Response:
        async with listings:
            return _json(await run_in_threadpool(api.stats))

    def healthz(request: Request) -> Response:
        return _json(api.health())

    def refuse(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        why = {"error": f"{request.method} {request.url.path}: {error.detail}"}
        return _json(why, error.status_code, error.headers)

    routed = Starlette(
        routes=[
            Route("/lookup", lookup, methods=["POST"]),
            Route("/stats", stats),
            Route("/healthz", healthz),
        ],
        exception_handlers={HTTPException: refuse},
    )

    async def checked(scope: Scope, receive: Receive, send: Send) -> None:
        app: ASGIApp = routed
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            why = origins.refusal(headers.get("host"), headers.get("origin"))
            if len(headers.getlist("host")) > 1:
                why = "a request has one Host header"
            if why is not None:
                app = _json({"error": why}, 403)
        await app(scope, receive, send)

    return checked


def _json(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status, headers, media_type="application/json")


def serve(
    api: LookupApi,
    host: str,
    port: int,
    started: Callable[[str], None] = lambda url: None,
    hosts: Sequence[str] = (),
) -> None:
    """Serve until SIGTERM or SIGINT; `started` gets the URL. Port 0 is any free one.

    `hosts`: names by which it is reached, as in `Origins`. For the main thread. ConfigError if
    nothing can listen there.
    """
    config = uvicorn.Config(
        application(api, Origins(hosts, option="--allowed-host", listens_at=host)),
        host=host,
        port=port,
        limit_concurrency=MAX_CONNECTIONS,
        log_level="warning",
        access_log=False,
    )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family)
    except OSError as error:
        raise ConfigError(f"--host {host} --port {port}: {error.strerror or error}") from None
    server = uvicorn.Server(config)
    # uvicorn has this handler while it serves alone, and raises the signal again at its end.
    signal.signal(signal.SIGTERM, server.handle_exit)
    started(f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}")
    server.run(sockets=[listener])
