"""`kvpool serve`: an HTTP service that says what the pool has of a prompt.

It reads stores and changes none. Handlers run on starlette's threads and block there on store calls
and tokenizers. What ranks have in host memory is not seen.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from vllm_kvpool.cli import inspect as inspecting
from vllm_kvpool.cli.prompt import PromptNames, names_of
from vllm_kvpool.cli.stores import NamedStore, manifest_named, open_spec
from vllm_kvpool.cli.tokenizer import tokenize
from vllm_kvpool.client import LookupAnswer, LookupRequest, TierCoverage
from vllm_kvpool.errors import ConfigError, StoreError
from vllm_kvpool.storage.backends import capabilities_of
from vllm_kvpool.storage.guarded import CallTimeouts, GuardedStore
from vllm_kvpool.storage.manifest import Manifest
from vllm_kvpool.storage.url import StoreSpec

CALL_TIMEOUT_S = 5.0
OPEN_WAIT_S = 5.0
STATS_EVERY_S = 10.0
MAX_BODY_BYTES = 16 << 20
MAX_CONNECTIONS = 256
MAX_MANIFESTS = 256

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

    `tokenizer` is for prompts given as text, as in `tokenizer.py`.
    """

    def __init__(
        self,
        stores: Sequence[NamedStore],
        tokenizer: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stores = stores
        self._tokenizer = tokenizer
        self._clock = clock
        self._manifests: dict[str, Manifest] = {}  # by whole names, whose content never changes
        self._stats_lock = threading.Lock()  # so that stores are listed once at a time
        self._stats: list[dict[str, Any]] = []
        self._stats_until = float("-inf")

    def lookup(self, request: LookupRequest) -> LookupAnswer:
        """What the stores have of a prompt.

        ConfigError if the request names nothing that can be looked up, StoreError if no store can
        say what its namespace is.
        """
        manifest = self._manifest(request.namespace)
        names, num_tokens = self._names(request, manifest)
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
            tokens=num_tokens,
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

    def _names(self, request: LookupRequest, manifest: Manifest) -> tuple[PromptNames, int]:
        """The names of the prompt's cells, and how many tokens it has."""
        prompts = (request.tokens, request.text, request.messages, request.hashes)
        if sum(each is not None for each in prompts) != 1:
            raise ConfigError("give one of tokens, text, messages and hashes")
        if request.hashes is not None:
            hashes = tuple(map(bytes.fromhex, request.hashes))
            names = replace(names_of(manifest, ()), hashes=hashes)
            return names, len(hashes) * names.chunk_tokens
        tokens = request.tokens
        if tokens is None:
            if self._tokenizer is None:
                raise ConfigError("text and messages need `kvpool serve --tokenizer`")
            prompt = request.text if request.text is not None else request.messages
            assert prompt is not None
            tokens = tokenize(prompt, self._tokenizer)
        return names_of(manifest, tokens, request.cache_salt), len(tokens)


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


def application(api: LookupApi) -> Starlette:
    """The routes `POST /lookup`, `GET /stats` and `GET /healthz`."""

    async def lookup(request: Request) -> Response:
        body = bytearray()
        async for piece in request.stream():
            body += piece
            if len(body) > MAX_BODY_BYTES:
                return _json({"error": f"the body is larger than {MAX_BODY_BYTES} bytes"}, 413)
        try:
            return _json(await run_in_threadpool(api.lookup, _decode(body)))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ConfigError) as error:
            return _json({"error": str(error)}, 400)
        except StoreError as error:
            return _json({"error": str(error)}, 503)

    def stats(request: Request) -> Response:
        return _json(api.stats())

    def healthz(request: Request) -> Response:
        return _json(api.health())

    return Starlette(
        routes=[
            Route("/lookup", lookup, methods=["POST"]),
            Route("/stats", stats),
            Route("/healthz", healthz),
        ]
    )


def _json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def serve(
    api: LookupApi, host: str, port: int, started: Callable[[str], None] = lambda url: None
) -> None:
    """Serve until a signal ends the process; `started` gets the URL. Port 0 is any free one."""
    config = uvicorn.Config(
        application(api),
        host=host,
        port=port,
        limit_concurrency=MAX_CONNECTIONS,
        log_level="warning",
        access_log=False,
    )
    listener = config.bind_socket()
    listener.listen()  # so that who reads the URL can connect at once
    started(f"http://{host}:{listener.getsockname()[1]}")
    uvicorn.Server(config).run(sockets=[listener])
