"""`kvpool serve`: what it answers from stores, and its HTTP with the client."""

import asyncio
import json
import re
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import msgspec
import pytest
from click.testing import CliRunner

from tests.support.buffers import make_buffer
from tests.support.faults import Fault, FaultyStore
from tests.support.memory_store import MemoryStore
from tests.support.models import add_tokenizer
from vllm_kvpool.cli import main
from vllm_kvpool.cli.common.prompt import as_text, presence
from vllm_kvpool.cli.common.stores import NamedStore, opened
from vllm_kvpool.cli.common.tokenizer import tokenize
from vllm_kvpool.cli.inspect import contents
from vllm_kvpool.cli.serve import (
    DECODED_TIMES,
    LIMITS,
    LIST_EVERY_S,
    MAX_BODY_BYTES,
    MAX_DECODED_BYTES,
    STATS_EVERY_S,
    LookupApi,
    LookupServer,
    guarded_stores,
    serve,
)
from vllm_kvpool.client import MAX_PROMPT_TOKENS, LookupClient, LookupRequest, ServeError
from vllm_kvpool.config import read_config
from vllm_kvpool.errors import ConfigError, StoreError
from vllm_kvpool.identity.chunk_hash import ChunkChain, RequestIdentity
from vllm_kvpool.identity.keys import Namespace, make_namespace, manifest_key
from vllm_kvpool.layout.description import described
from vllm_kvpool.layout.topology import AttentionWindow, LayerGroup, Topology
from vllm_kvpool.router.dataplane.http_server import ServerLimits
from vllm_kvpool.router.dataplane.origins import Origins
from vllm_kvpool.scheduler.prefix_search import CellNames
from vllm_kvpool.storage.base import ChunkRef, PutOutcome, Store
from vllm_kvpool.storage.contents.manifest import Manifest, write_manifest
from vllm_kvpool.storage.eviction import Shares
from vllm_kvpool.storage.file.store import FileStore
from vllm_kvpool.storage.guarded import CallTimeouts, GuardedStore
from vllm_kvpool.storage.tiers import tier_specs

NAMESPACE = make_namespace("model", "a" * 12)
CHUNK_TOKENS = 64
TOKENS = [n % 1000 for n in range(CHUNK_TOKENS * 8 + 5)]
FULL = LayerGroup(Topology(num_heads=2, tp_size=1, stages=((0, 4),), layer_span=2), 64)
WINDOW = LayerGroup(
    Topology(num_heads=2, tp_size=1, stages=((0, 4),), layer_span=2, layer_group="window"),
    64,
    AttentionWindow(sliding=CHUNK_TOKENS),
)
STATE = LayerGroup(
    Topology(num_heads=2, tp_size=1, stages=((0, 4),), layer_span=2, layer_group="window"),
    64,
    is_state=True,
)
START_S = 30.0
NO_ENGINE = "http://127.0.0.1:9"


def memory_store() -> MemoryStore:
    return MemoryStore("", 10 << 20)


def put(store: Store, keys: Sequence[str], contents: Sequence[bytes]) -> None:
    buffers = []
    for content in contents:
        buffer = make_buffer(len(content))
        buffer.view[:] = content
        buffers.append(buffer)
    assert set(store.put(keys, buffers, [ChunkRef("")] * len(keys))) == {PutOutcome.STORED}


def put_manifest(
    store: Store, groups: Sequence[LayerGroup] = (FULL,), namespace: Namespace = NAMESPACE
) -> None:
    values = {"chunk_tokens": CHUNK_TOKENS}
    manifest = Manifest(namespace, namespace, "", values, described(groups))
    put(store, [manifest_key(namespace)], [write_manifest(manifest)])


def hashes(tokens: Sequence[int] = TOKENS, salt: str = "") -> list[bytes]:
    chain = ChunkChain(CHUNK_TOKENS, RequestIdentity(cache_salt=salt))
    chain.extend(tokens)
    return chain.hashes


def put_chunks(
    store: Store,
    chunks: range,
    group: int = 0,
    salt: str = "",
    namespace: Namespace = NAMESPACE,
) -> None:
    names = CellNames(namespace, (FULL, WINDOW))
    keys = [key for i in chunks for key in names.of_chunk(hashes(salt=salt)[i], group)]
    put(store, keys, [bytes(100)] * len(keys))


def covered(api: LookupApi, **prompt: object) -> tuple[int, list[int]]:
    answer = api.lookup(LookupRequest(namespace=NAMESPACE, **(prompt or {"tokens": TOKENS})))
    assert (answer.namespace, answer.chunk_tokens) == (NAMESPACE, CHUNK_TOKENS)
    return answer.covered_tokens, [each.covered_tokens for each in answer.tiers]


def test_tiers_are_covered_each_and_together() -> None:
    near, far = memory_store(), memory_store()
    put_manifest(far)
    put_chunks(near, range(4, 6))
    put_chunks(far, range(5))
    api = LookupApi([NamedStore("memory://near", near), NamedStore("memory://far", far)])
    assert covered(api) == (6 * CHUNK_TOKENS, [0, 5 * CHUNK_TOKENS])
    assert covered(api, tokens=TOKENS, cache_salt="x") == (0, [0, 0])
    assert covered(api, tokens=[]) == (0, [0, 0])


def test_layers_with_windows_need_only_the_last_chunks() -> None:
    store = memory_store()
    put_manifest(store, (FULL, WINDOW))
    put_chunks(store, range(6))
    put_chunks(store, range(3, 5), group=1)
    assert covered(LookupApi([NamedStore("memory://", store)])) == (5 * CHUNK_TOKENS, [320])


def test_recurrent_states_cut_it_to_a_boundary_that_has_them() -> None:
    store = memory_store()
    put_manifest(store, (FULL, STATE))
    put_chunks(store, range(6))
    put_chunks(store, range(3, 4), group=1)
    api = LookupApi([NamedStore("memory://", store)])
    assert covered(api) == (4 * CHUNK_TOKENS, [4 * CHUNK_TOKENS])
    held = presence([NamedStore("memory://", store)], api._manifest(NAMESPACE), TOKENS)
    assert held.usable_tokens == 4 * CHUNK_TOKENS
    assert held.states_after_tokens == {"window": (4 * CHUNK_TOKENS,)}
    assert {each.kind for each in held.chunks} == {""}
    assert "recurrent states of window are stored after 256 tokens" in as_text(held)


def test_a_store_that_is_away_is_named_and_the_others_answer() -> None:
    near, far = memory_store(), memory_store()
    put_manifest(near)
    put_chunks(near, range(3))
    away = FaultyStore(far)
    away.inject(Fault.UNREACHABLE)
    stores = [NamedStore("memory://far", away), NamedStore("memory://near", near)]
    api = LookupApi(stores)
    answer = api.lookup(LookupRequest(namespace=NAMESPACE, tokens=TOKENS))
    assert [bool(each.error) for each in answer.tiers] == [True, False]
    assert answer.covered_tokens == 3 * CHUNK_TOKENS
    assert [bool(each) for each in api.health()["stores"].values()] == [True, False]
    with pytest.raises(StoreError, match="memory://far"):
        LookupApi(stores[:1]).lookup(LookupRequest(namespace=NAMESPACE, tokens=TOKENS))


def test_a_prompt_is_given_in_one_form_that_can_be_read(tmp_path: Path) -> None:
    store = memory_store()
    put_manifest(store)
    model = str(add_tokenizer(tmp_path))
    api = LookupApi([NamedStore("memory://", store)], model)
    text = "Which river flows through the town? " * 50
    answer = api.lookup(LookupRequest(namespace=NAMESPACE, text=text))
    assert answer.tokens == len(tokenize(text, model))
    without = LookupApi([NamedStore("memory://", store)])
    with pytest.raises(ConfigError, match="--tokenizer"):
        covered(without, messages=[])
    with pytest.raises(ConfigError, match="one of"):
        covered(without, tokens=[1], text="a")
    with pytest.raises(ConfigError, match="no namespace 'other'"):
        without.lookup(LookupRequest(namespace="other", tokens=[1]))


def test_a_model_is_looked_up_in_the_namespace_of_its_that_has_most() -> None:
    store, now = memory_store(), [0.0]
    most, other = make_namespace("model", "b" * 12), make_namespace("model-large", "c" * 12)
    for namespace in (NAMESPACE, most, other):
        put_manifest(store, namespace=namespace)
    put_chunks(store, range(2))
    put_chunks(store, range(3), namespace=most)
    put_chunks(store, range(5), namespace=other)
    models = {"served": (NAMESPACE[:-3],), "gone": ("nowhere@fmt:",)}
    stores = [NamedStore("memory://", store)]
    api = LookupApi(stores, clock=lambda: now[0], models=models)

    def found(model: str) -> tuple[str, int]:
        answer = api.lookup(LookupRequest(model=model, tokens=TOKENS))
        return answer.namespace, answer.covered_tokens

    assert found("org/model") == (most, 3 * CHUNK_TOKENS)
    assert found("served") == (NAMESPACE, 2 * CHUNK_TOKENS)
    for name in ("adapter", "", "/", "mod", "\ud800"):
        assert found(name) == ("", 0)
    with pytest.raises(ConfigError, match="no namespace 'nowhere@fmt:'"):
        found("gone")
    new = make_namespace("adapter", "d" * 12)
    put_manifest(store, namespace=new)
    put_chunks(store, range(1), namespace=new)
    assert found("adapter") == ("", 0)
    now[0] += LIST_EVERY_S
    assert found("adapter") == (new, CHUNK_TOKENS)
    for request in (
        LookupRequest(tokens=TOKENS),
        LookupRequest(namespace=NAMESPACE, model="model", tokens=TOKENS),
    ):
        with pytest.raises(ConfigError, match="one of namespace and model"):
            api.lookup(request)


def test_while_namespaces_are_listed_others_go_by_the_list_before() -> None:
    inner, now = memory_store(), [0.0]
    put_manifest(inner)
    put_chunks(inner, range(2))
    store = FaultyStore(inner)
    api = LookupApi([NamedStore("memory://", store)], clock=lambda: now[0])
    request = LookupRequest(model="model", tokens=TOKENS)
    assert api.lookup(request).covered_tokens == 2 * CHUNK_TOKENS
    now[0] += LIST_EVERY_S
    store.inject(Fault.BLOCKED, "namespaces")
    with ThreadPoolExecutor(1) as thread:
        lists = thread.submit(api.lookup, request)
        assert store.entered.wait(START_S)
        assert api.lookup(request).covered_tokens == 2 * CHUNK_TOKENS
        assert not lists.done()
        store.release()
        assert lists.result(START_S).covered_tokens == 2 * CHUNK_TOKENS


def test_a_store_that_is_away_hides_its_models_only() -> None:
    near, away = memory_store(), FaultyStore(memory_store())
    put_manifest(near)
    put_chunks(near, range(1))
    away.inject(Fault.UNREACHABLE)
    stores = [NamedStore("memory://away", away), NamedStore("memory://near", near)]
    request = LookupRequest(model="model", tokens=TOKENS)
    assert LookupApi(stores).lookup(request).covered_tokens == CHUNK_TOKENS
    with pytest.raises(StoreError, match="memory://away"):
        LookupApi(stores[:1]).lookup(request)


def test_a_chat_is_rendered_with_its_tools_and_for_its_model(tmp_path: Path) -> None:
    """A client's template arguments cannot override arguments of the call that renders the chat."""
    store = memory_store()
    put_manifest(store)
    model = add_tokenizer(tmp_path)
    config = json.loads((model / "tokenizer_config.json").read_text())
    config["chat_template"] = "{{ tools[0].name }} {{ style }} {{ messages[0].content }}"
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    api = LookupApi([NamedStore("memory://", store)], str(model))
    ours = {"tokenize": False, "return_tensors": "pt", "chat_template": "x", "conversation": 1}
    request = LookupRequest(
        model="model",
        messages=[{"role": "user", "content": "Which?"}],
        tools=[{"name": "river"}],
        chat_template_kwargs={"style": "brief", **ours},
    )
    assert api.lookup(request).tokens == len(tokenize("river brief Which?", str(model)))


def test_stats_are_listed_once_in_a_while() -> None:
    store, now = memory_store(), [0.0]
    put_manifest(store)
    api = LookupApi([NamedStore("memory://", store)], clock=lambda: now[0])
    first = api.stats()
    put_chunks(store, range(2))
    assert api.stats() == first
    now[0] += STATS_EVERY_S
    assert api.stats() != first


class Unlisted:
    """A store that has cells and cannot list them, as Mooncake."""

    def __init__(self) -> None:
        self.inner = memory_store()
        self.capabilities = self.inner.capabilities
        self.exists, self.close = self.inner.exists, self.inner.close


def test_a_store_that_cannot_list_says_so() -> None:
    guard = GuardedStore(Unlisted, memory_store().capabilities, "x", CallTimeouts(call_s=START_S))
    [content] = LookupApi([NamedStore("x://", guard)]).stats()
    guard.close()
    assert (content["namespaces"], "cannot list" in content["why"]) == (None, True)


@contextmanager
def running(url: str, *more: str) -> Iterator[str]:
    """Run `kvpool serve` for a store in another process; its URL. At the end it is sent SIGTERM and
    has to exit with 0."""
    serves = [sys.executable, "-m", "vllm_kvpool", "serve", "--port", "0", "--store", url]
    command = [*serves, *more, "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert select.select([process.stdout], [], [], START_S)[0], "it has not started"
            yield json.loads(process.stdout.readline())["url"]
            process.terminate()
            assert process.wait(START_S) == 0
        finally:
            process.kill()


def test_the_client_asks_over_http(tmp_path: Path) -> None:
    store = FileStore(str(tmp_path / "pool"), 100 << 20)
    put_manifest(store)
    put_chunks(store, range(3))
    store.close()
    url = f"file://{tmp_path}/pool?size=100MiB"
    with running(url, "--model", f"alias={NAMESPACE}") as served:
        client = LookupClient(served)
        answer = client.lookup(LookupRequest(model="alias", tokens=TOKENS))
        assert (answer.namespace, answer.covered_tokens) == (NAMESPACE, 3 * CHUNK_TOKENS)
        answer = client.lookup(LookupRequest(namespace="model", tokens=TOKENS))
        assert answer.covered_tokens == 3 * CHUNK_TOKENS
        assert [each.store for each in answer.tiers] == [url]
        assert client.stats()[0]["namespaces"][0]["namespace"] == NAMESPACE
        assert client.health() == {"status": "ok", "stores": {url: ""}}
        for name in (
            "other",
            "x" * 5000,
            f"../{'x' * 900}@fmt:{'0' * 12}",
            "a@\n\0",
            "@",
            "é@fmt:1",
        ):
            with pytest.raises(ServeError, match="no namespace") as unknown:
                client.lookup(LookupRequest(namespace=name, tokens=TOKENS))
            assert unknown.value.status == 400
        for body in BAD_BODIES:
            status, why = refusal(f"{served}/lookup", body)
            assert (status, bool(why)) == (400, True), body[:40]
        for path, body, expected in (
            *(("/", None, 404), ("/lookup", None, 405), ("/stats", b"{}", 405)),
            *(("/lookup", b" " * (MAX_BODY_BYTES + 1), 413),),
        ):
            status, why = refusal(served + path, body)
            assert (status, path in why) == (expected, True)
        assert client.health()["status"] == "ok"
    with pytest.raises(ServeError, match="refused") as away:
        client.health()
    assert away.value.status == 0


BAD_BODIES = (
    *(b"", b"{", b"[]", b"null", b"\xff", b'{"x": 1}', b'{"namespace": "model"}'),
    *(b'{"namespace": 1, "tokens": []}', b'{"namespace": "model", "tokens": [-1]}'),
    *(b'{"namespace": "model", "tokens": [4294967296]}', b'{"namespace": "model", "tokens": "a"}'),
    *(b'{"namespace": "model", "tokens": [1], "text": "a"}', b'{"namespace": "", "tokens": [1]}'),
    *(b'{"namespace": "model", "hashes": []}', b'{"namespace": "model", "text": "a"}'),
    b'{"namespace": "model", "messages": ' + b"[" * 100_000,
    b'{"namespace": "model", "tokens": [' + b"1," * (MAX_PROMPT_TOKENS + 1) + b"1]}",
    b'{"namespace": "model", "tokens": [1], "cache_salt": "\\ud800"}',
)


def refusal(url: str, body: bytes | None) -> tuple[int, str]:
    """The status of a request that is refused, and its `error`."""
    with pytest.raises(HTTPError) as refused:
        urlopen(Request(url, body, {"Content-Type": "application/json"}), timeout=START_S)
    with refused.value as answer:
        assert answer.headers["Content-Type"] == "application/json"
        return answer.code, json.load(answer)["error"]


def test_clients_that_go_or_ask_at_once_leave_the_service_as_it_is(tmp_path: Path) -> None:
    store = FileStore(str(tmp_path / "pool"), 100 << 20)
    put_manifest(store)
    put_chunks(store, range(3))
    store.close()
    url = f"file://{tmp_path}/pool?size=100MiB"
    with running(url, "--tokenizer", NO_ENGINE) as served:
        address = urlsplit(served)
        for _ in range(20):
            with socket.create_connection((address.hostname, address.port)) as gone:
                gone.sendall(
                    b"POST /lookup HTTP/1.1\r\nHost: localhost\r\n"
                    b"Content-Type: application/json\r\nContent-Length: 99\r\n\r\n{"
                )
        client = LookupClient(served)
        with pytest.raises(ServeError, match=NO_ENGINE):
            client.lookup(LookupRequest(namespace="model", text="a"))
        request = LookupRequest(namespace="model", tokens=TOKENS)
        with ThreadPoolExecutor(32) as threads:
            answers = list(threads.map(lambda _: client.lookup(request), range(200)))
        assert {each.covered_tokens for each in answers} == {3 * CHUNK_TOKENS}


def test_what_hangs_leaves_lookups_by_tokens_and_health_alone(tmp_path: Path) -> None:
    """Texts that an engine does not tokenize, and listings of a store that does not answer."""
    store = memory_store()
    put_manifest(store)
    slow = FaultyStore(store)
    slow.inject(Fault.BLOCKED, "usage")
    with socket.create_server(("127.0.0.1", 0), backlog=64) as silent:
        engine = f"http://127.0.0.1:{silent.getsockname()[1]}"
        api = LookupApi([NamedStore("memory://", slow)], engine)
        with served_here(api) as url, ThreadPoolExecutor(60) as threads:
            client = LookupClient(url, timeout_s=START_S)
            text = LookupRequest(namespace=NAMESPACE, text="a")
            waiting = [threads.submit(client.lookup, text) for _ in range(20)]
            waiting += [threads.submit(client.stats) for _ in range(20)]
            assert slow.entered.wait(START_S)
            for _ in range(5):
                assert client.health()["status"] == "ok"
                client.lookup(LookupRequest(namespace=NAMESPACE, tokens=TOKENS))
            assert not any(each.done() for each in waiting)
            slow.release()
            silent.close()
            for each in waiting[:20]:
                assert isinstance(error := each.exception(START_S), ServeError)
                assert (error.status, "--tokenizer" in str(error)) == (503, True)
            assert all(each.result(START_S) for each in waiting[20:])


@pytest.mark.parametrize(("missing_bytes", "status"), [(0, 200), (1, 503)])
def test_bodies_over_the_limit_of_all_are_refused(missing_bytes: int, status: int) -> None:
    """A list of empty objects takes 30 times its JSON: 16 such bodies at a time took gigabytes."""
    assert LIMITS.max_bodies_bytes * DECODED_TIMES == MAX_DECODED_BYTES
    store = memory_store()
    put_manifest(store)
    body = msgspec.json.encode(LookupRequest(namespace=NAMESPACE, tokens=TOKENS))
    limits = replace(LIMITS, max_bodies_bytes=len(body) - missing_bytes)
    with served_here(LookupApi([NamedStore("memory://", store)]), limits) as url:
        asked = Request(f"{url}/lookup", body, OWN)
        try:
            with urlopen(asked, timeout=START_S) as answer:
                assert answer.status == status
        except HTTPError as refused:
            with refused as answer:
                assert answer.code == status


@pytest.mark.parametrize(("sent", "answer"), [(b"", b""), (b"{", b"HTTP/1.1 408")])
def test_connection_that_sends_no_whole_request_is_closed(sent: bytes, answer: bytes) -> None:
    """A connection that sent nothing stayed open, and 256 of them kept all others out."""
    with served_here(LookupApi([]), replace(LIMITS, read_timeout_s=0.1)) as url:
        host, _, port = url.removeprefix("http://").partition(":")
        head = f"POST /lookup HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        head += "Content-Length: 100\r\n\r\n"
        with socket.create_connection((host, int(port)), timeout=START_S) as client:
            client.sendall(head.encode() + sent if sent else b"")
            assert client.recv(1 << 16).startswith(answer)
            while client.recv(1 << 16):
                pass


@contextmanager
def served_here(api: LookupApi, limits: ServerLimits = LIMITS) -> Iterator[str]:
    """The service in a thread of this process."""
    origins = Origins(option="--allowed-host", listens_at="127.0.0.1")
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    http = LookupServer(api, origins, limits).http
    port = asyncio.run_coroutine_threadsafe(http.start("127.0.0.1", 0), loop).result(START_S)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        asyncio.run_coroutine_threadsafe(http.stop(START_S), loop).result(START_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(START_S)
        loop.close()


OWN: dict[str, str] = {"Content-Type": "application/json"}
FOREIGN: dict[str, tuple[dict[str, str], int]] = {
    "another page": (OWN | {"Origin": "http://evil.example"}, 403),
    "a frame without origin": (OWN | {"Origin": "null"}, 403),
    "a rebound name": (OWN | {"Host": "evil.example:8200"}, 403),
    "a rebound page": (OWN | {"Host": "evil.example", "Origin": "http://evil.example"}, 403),
    "text": ({"Content-Type": "text/plain"}, 415),
    "a form": ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
}
"""Headers that a browser may send for a foreign web page, and the status of the refusal."""


@pytest.mark.parametrize("name", FOREIGN)
def test_requests_of_web_pages_are_refused(name: str) -> None:
    """A page had an engine fetch an image of its choice, by a chat that it sent as text."""
    headers, status = FOREIGN[name]
    store = memory_store()
    put_manifest(store)
    body = LookupRequest(namespace=NAMESPACE, tokens=[1])
    with served_here(LookupApi([NamedStore("memory://", store)])) as url:
        for path in ("/lookup", "/stats", "/healthz"):
            data = msgspec.json.encode(body) if path == "/lookup" else None
            if status == 415 and data is None:
                continue
            with pytest.raises(HTTPError) as refused:
                urlopen(Request(url + path, data, headers), timeout=START_S)
            with refused.value as answer:
                assert (answer.code, "error" in json.load(answer)) == (status, True)
        asked = Request(f"{url}/lookup", msgspec.json.encode(body), OWN)
        with urlopen(asked, timeout=START_S) as answer:
            assert answer.status == 200


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", "malformed"),
        (b'HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{"a":"b"}', "namespace"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\n{", "IncompleteRead"),
        (b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 3\r\n\r\n<p>", "502 Bad Gateway"),
        (b"SSH-2.0-x\r\n", "SSH"),
        (b"", "closed|reset"),
    ],
)
def test_whatever_answers_instead_is_a_serve_error(answer: bytes, says: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def reply() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(answer)
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(1 << 16):  # what is unread at the close resets a connection
                    pass

        thread = threading.Thread(target=reply)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(ServeError, match=says):
            LookupClient(url, START_S).lookup(LookupRequest(namespace="m", tokens=[1]))
        thread.join(START_S)


def test_an_address_that_is_none_is_a_serve_error() -> None:
    for url in ("127.0.0.1:8200", "nowhere", "http://[", ""):
        with pytest.raises(ServeError, match=re.escape(f"{url}/healthz: ")):
            LookupClient(url).health()


def test_stats_have_the_shares_of_tenants(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/pool?size=100MiB"
    store = FileStore(str(tmp_path / "pool"), 100 << 20, shares=Shares.TENANT)
    put_manifest(store)
    keys = list(CellNames(NAMESPACE, (FULL,)).of_chunk(hashes()[0]))
    buffers = [make_buffer(100)] * len(keys)
    store.put(keys, buffers, [ChunkRef("c", tenant="search")] * len(keys))
    store.close()
    [spec] = tier_specs(read_config({"store": [url]})).stores
    [guarded] = guarded_stores([spec])
    [content] = LookupApi([guarded]).stats()
    guarded.store.close()
    with opened([spec]) as stores:
        assert [content] == contents(stores)
    shares = {each["owner"]: each["cells"] for each in content["shares"]}
    assert shares == {"search": len(keys), "-": 0}  # nobody's manifest


def test_an_address_that_cannot_be_had_is_named() -> None:
    api = LookupApi([])
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--host 127.0.0.1 --port {port}: .*address already"):
            serve(api, "127.0.0.1", port)
    with pytest.raises(ConfigError, match=r"--host nowhere\.invalid --port 0: "):
        serve(api, "nowhere.invalid", 0)


def test_a_sigterm_as_soon_as_it_listens_is_kept() -> None:
    serve(LookupApi([]), "127.0.0.1", 0, lambda url: signal.raise_signal(signal.SIGTERM))


@pytest.mark.parametrize(
    ("path", "tokenizer", "said"),
    [("", True, "--tokenizer: {}: "), ("/absent", False, "there is no directory {}/absent")],
)
def test_what_cannot_work_ends_it(tmp_path: Path, path: str, tokenizer: bool, said: str) -> None:
    """The tokenizer is loaded at the start: the first request would wait seconds for it."""
    options = ["--store", f"file://{tmp_path}{path}"]
    options += ["--tokenizer", str(tmp_path)] if tokenizer else []
    done = CliRunner().invoke(main, ["serve", *options])
    assert done.exit_code == 1
    assert said.format(tmp_path) in done.output
