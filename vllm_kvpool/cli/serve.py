"""`kvpool serve`: an HTTP service that says what the pool has of a prompt.

It reads stores and changes none. One loop serves HTTP; store calls and tokenizers block threads.
What ranks have in host memory is not seen.
"""

import asyncio
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import msgspec

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
from vllm_kvpool.router.dataplane.headers import JSON, JSON_HEADERS
from vllm_kvpool.router.dataplane.http_server import (
    HttpRequest,
    HttpServer,
    Response,
    ServerLimits,
)
from vllm_kvpool.router.dataplane.origins import Origins
from vllm_kvpool.storage.backends import capabilities_of
from vllm_kvpool.storage.contents.manifest import Manifest
from vllm_kvpool.storage.guarded import CallTimeouts, GuardedStore
from vllm_kvpool.storage.url import StoreSpec

CALL_TIMEOUT_S = 5.0
OPEN_WAIT_S = 5.0
STATS_EVERY_S, LIST_EVERY_S = 10.0, 10.0
MAX_BODY_BYTES = 8 << 20
DECODED_TIMES = 32  # bytes of a decoded body, for each byte of its JSON: `[{},{},…]` takes most
MAX_DECODED_BYTES = 512 << 20  # of all requests
LIMITS = ServerLimits(
    max_body_bytes=MAX_BODY_BYTES,
    max_bodies_bytes=MAX_DECODED_BYTES // DECODED_TIMES,
    max_connections=256,
    read_timeout_s=30.0,
    write_timeout_s=30.0,
)
STOP_S = 30.0  # for requests to end
MAX_LOOKUPS, MAX_TEXTS = 16, 8  # at a time, by tokens and by text
MAX_MANIFESTS = 256
METHODS = {"/lookup": ("POST",), "/stats": ("GET", "HEAD"), "/healthz": ("GET", "HEAD")}
NO_MODELS: Mapping[str, Sequence[str]] = {}

_decode = msgspec.json.Decoder(LookupRequest).decode


def guarded_stores(specs: Sequence[StoreSpec]) -> list[NamedStore]:
    """Return the stores, open for reading; an unreachable store is opened once it can be.

    Raises ConfigError if a store can never work.
    """
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
        """Return the part of a prompt that the stores have.

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
            chunk_tokens=manifest.chunk_tokens,
            covered_tokens=covered,
            tiers=tiers,
        )

    def stats(self) -> list[dict[str, Any]]:
        """Return each store's contents as `kvpool inspect --json`, up to `STATS_EVERY_S` old."""
        with self._stats_lock:
            if self._clock() >= self._stats_until:
                self._stats = [self._content(each) for each in self._stores]
                self._stats_until = self._clock() + STATS_EVERY_S
            return self._stats

    def health(self) -> dict[str, Any]:
        """Return the service's status and each store's error, "" without one."""
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
        """Return the manifests of a model's namespaces, listed up to `LIST_EVERY_S` ago.

        Raises StoreError if no store can be asked.
        """
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
        """Return the tokens of the prompt."""
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
    """Return the first part of the namespaces of a model, given its name or directory."""
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


class LookupServer:
    """An HTTP server with the routes `POST /lookup`, `GET /stats` and `GET /healthz`.

    Lookups by text wait for tokenizers, and `/stats` for listings, each on threads of their own:
    lookups by tokens and `/healthz` do not wait for them. Owned by its loop.
    """

    def __init__(self, api: LookupApi, origins: Origins, limits: ServerLimits = LIMITS) -> None:
        self._api = api
        self._origins = origins
        self._lookups = ThreadPoolExecutor(MAX_LOOKUPS)
        self._texts = ThreadPoolExecutor(MAX_TEXTS)
        self._listings = ThreadPoolExecutor(1)
        self.http = HttpServer(limits, self._handle, check=self._check, refuse=_refuse)

    def _check(self, http: HttpRequest) -> Response | None:
        """Refuse a request before its body is read."""
        headers, methods = http.headers, METHODS.get(http.path)
        why = self._origins.refusal(headers.get("Host"), headers.get("Origin"))
        if why is not None:
            return _json({"error": why}, 403)
        if methods is None:
            return _refuse(404, "Not Found", http.path)
        if http.method not in methods:
            refusal = _refuse(405, f"use {methods[0]}, not {http.method}", http.path)
            return refusal._replace(headers={**JSON_HEADERS, "Allow": ", ".join(methods)})
        media_type = headers.get("Content-Type", "").partition(";")[0].strip().lower()
        if http.path == "/lookup" and media_type != JSON:
            return _refuse(415, f"send Content-Type: {JSON}", http.path)
        return None

    async def _handle(self, http: HttpRequest) -> None:
        in_thread = asyncio.get_running_loop().run_in_executor
        if http.path == "/healthz":
            http.respond(_json(await asyncio.to_thread(self._api.health)))
        elif http.path == "/stats":
            http.respond(_json(await in_thread(self._listings, self._api.stats)))
        else:
            http.respond(await self._lookup(http.body))

    async def _lookup(self, body: bytes) -> Response:
        in_thread = asyncio.get_running_loop().run_in_executor
        try:
            asked = await asyncio.to_thread(_decode, body)
            is_text = asked.text is not None or asked.messages is not None
            threads = self._texts if is_text else self._lookups
            return _json(await in_thread(threads, self._api.lookup, asked))
        except (TokenizerAway, StoreError) as error:
            return _json({"error": str(error)}, 503)
        except UNREADABLE as error:
            return _json({"error": str(error)}, 400)


def _json(value: Any, status: int = 200) -> Response:
    return Response(status, JSON_HEADERS, msgspec.json.encode(value))


def _refuse(status: int, why: str, path: str) -> Response:
    """Return the answer to a request that cannot be served, is no HTTP, or breaks a limit."""
    own = {
        408: f"the body has not come within {LIMITS.read_timeout_s:g} s",
        413: f"the body is larger than {MAX_BODY_BYTES} bytes",
        500: "the service has failed, its log says why",
        503: "too many large requests at a time, ask again later",
    }
    return _json({"error": f"{path}: {own.get(status, why)}"}, status)


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
    asyncio.run(_serve(api, host, port, started, hosts))


async def _serve(
    api: LookupApi, host: str, port: int, started: Callable[[str], None], hosts: Sequence[str]
) -> None:
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    origins = Origins(hosts, option="--allowed-host", listens_at=host)
    http = LookupServer(api, origins).http
    try:
        chosen = await http.start(host, port)
    except OSError as error:
        raise ConfigError(f"--host {host} --port {port}: {error.strerror or error}") from None
    started(f"http://{f'[{host}]' if ':' in host else host}:{chosen}")
    await stopped.wait()
    await http.stop(STOP_S)
