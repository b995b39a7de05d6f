"""Every option and argument of every command has an effect, seen from outside.

A row runs a command with the words of one option, and again without them or with other words
instead. What `shows` says is seen of the first run and not of the second. Seen is the exit status,
the output, and what the command leaves in the store; of `serve` the answers to requests as well.
"""

import contextlib
import io
import itertools
import json
import logging
import os
import re
import shlex
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, NamedTuple

import click
import pytest
from click.testing import CliRunner

from tests.prefetch.cells import sealed
from tests.support.buffers import make_buffer
from tests.support.commands import all_commands
from tests.support.engine_metrics import Engine, served
from tests.support.http_answers import http_server
from tests.support.server_process import free_ports
from vllm_kvpool.cli import main, top, try_report
from vllm_kvpool.cli.common import prompt
from vllm_kvpool.cli.try_model import Trial
from vllm_kvpool.identity.chunk_hash import tenant_of
from vllm_kvpool.identity.keys import (
    chunk_id_of_key,
    key_with_prefix,
    make_namespace,
    manifest_key,
)
from vllm_kvpool.layout.description import described
from vllm_kvpool.layout.topology import LayerGroup, Topology
from vllm_kvpool.storage.base import ChunkRef, PutOutcome
from vllm_kvpool.storage.contents.manifest import Manifest, write_manifest
from vllm_kvpool.storage.eviction import Shares
from vllm_kvpool.storage.file.store import FileStore, ReadOnlyFileStore

FIRST, SECOND = (make_namespace("model", digit * 12) for digit in "ab")
ALONE = make_namespace("other", "c" * 12)
TOKENS = list(range(70))
SALT = "a secret salt"
GROUP = LayerGroup(Topology(num_heads=2, tp_size=1, stages=((0, 4),), layer_span=4), 64)
SIZE_BYTES = 64 << 20
LIMIT_S = 60.0
PINNED_S = 3600.0
LONG_NS = 1800 * 10**9


class Case(NamedTuple):
    """A command line in two parts, and what the second part changes."""

    line: str
    option: str
    shows: str
    instead: str = ""
    """Words in the place of the option's in the second run."""


STORE = "--store {pool}"
PROMPT = "--tokens {tokens}"
TEXT = "--text {text} --tokenizer {tokenizer}"
CONFIG = "--kv-transfer-config {config}"
PURGE = f"{{first}} --yes {STORE}"
FETCH = f"--namespace {{first}} {PROMPT}"
FETCHES = f"--kv-transfer-config {{tiers}} {FETCH}"
SERVE = f"--port 0 {STORE}"
WHOLE = "64 tokens"
LEFT_OF_BOTH = "left: 8 of the prompt, 8 of the salted"

CASES = {
    " --version": Case("", "--version", "kvpool, version"),
    "doctor ENGINE": Case(STORE, "{engine}", "{engine}"),
    "doctor --store": Case("", STORE, "{pool}", instead="--store {other}"),
    "doctor --kv-transfer-config": Case("", CONFIG, "{pool}", instead="--store {other}"),
    "doctor --json": Case(STORE, "--json", '"status"'),
    "explain NAMESPACES": Case(STORE, "{alone}", "{alone}"),
    "explain --request": Case(
        "--log {log}", "--request cmpl-7", "256 were loaded", instead="--request cmpl-8"
    ),
    "explain --log": Case("--request cmpl-7", "--log {log}", "256 were loaded"),
    "explain --tokens": Case(f"{{first}} {STORE}", PROMPT, WHOLE),
    "explain --text": Case(f"{{first}} {STORE} --tokenizer {{tokenizer}}", "--text {text}", WHOLE),
    "explain --messages": Case(
        f"{{first}} {STORE} --tokenizer {{tokenizer}}", "--messages {messages}", WHOLE
    ),
    "explain --tokenizer": Case(
        f"{{first}} {STORE} --text {{text}}", "--tokenizer {tokenizer}", WHOLE
    ),
    "explain --cache-salt": Case(
        f"{{first}} {PROMPT} {STORE}", "--cache-salt unknown", "first 0 tokens"
    ),
    "explain --store": Case(f"{{first}} {PROMPT}", STORE, WHOLE, instead="--store {other}"),
    "explain --kv-transfer-config": Case(
        f"{{first}} {PROMPT}", CONFIG, WHOLE, instead="--store {other}"
    ),
    "explain --json": Case(f"{{first}} {PROMPT} {STORE}", "--json", '"usable_tokens": 64'),
    "inspect --details": Case(f"--json {STORE}", "--details", '"prefixes"'),
    "inspect --engine": Case(STORE, "--engine {engine}", "{engine}"),
    "inspect --store": Case("", STORE, "{first}", instead="--store {other}"),
    "inspect --kv-transfer-config": Case("", CONFIG, "{first}", instead="--store {other}"),
    "inspect --json": Case(STORE, "--json", '"namespaces"'),
    "pin NAMESPACE": Case(f"{PROMPT} --for 1h {STORE}", "{first}", "pinned: 4", instead="{second}"),
    "pin --tokens": Case(f"{{first}} --for 1h {STORE}", PROMPT, "pinned: 4"),
    "pin --text": Case(
        f"{{first}} --for 1h {STORE} --tokenizer {{tokenizer}}", "--text {text}", "pinned: 4"
    ),
    "pin --messages": Case(
        f"{{first}} --for 1h {STORE} --tokenizer {{tokenizer}}",
        "--messages {messages}",
        "pinned: 4",
    ),
    "pin --tokenizer": Case(
        f"{{first}} --for 1h {STORE} --text {{text}}", "--tokenizer {tokenizer}", "pinned: 4"
    ),
    "pin --cache-salt": Case(
        f"{{first}} --for 1h {PROMPT} {STORE}", "--cache-salt unknown", "pinned: 0"
    ),
    "pin --for": Case(f"{{first}} {PROMPT} {STORE}", "--for 1h", "pinned: 4", instead="--for 60s"),
    "pin --end": Case(
        f"{{first}} {PROMPT} --store {{pinned}}", "--end", "pinned: 0", instead="--for 1h"
    ),
    "pin --store": Case(f"{{first}} {PROMPT} --for 1h", STORE, "pinned: 4", "--store {other}"),
    "pin --kv-transfer-config": Case(
        f"{{first}} {PROMPT} --for 1h", CONFIG, "pinned: 4", instead="--store {other}"
    ),
    "pin --json": Case(f"{{first}} {PROMPT} --for 1h {STORE}", "--json", '"count"'),
    "prefetch --kv-transfer-config": Case(
        FETCH, "--kv-transfer-config {tiers}", "8 brought", "--kv-transfer-config {empty_tiers}"
    ),
    "prefetch --max-bytes": Case(FETCHES, "--max-bytes 1", " 1 brought"),
    "prefetch --max-seconds": Case(FETCHES, "--max-seconds 0", " 0 brought"),
    "prefetch --namespace": Case(
        f"--kv-transfer-config {{tiers}} {PROMPT}",
        "--namespace {first}",
        "8 brought",
        instead="--namespace {second}",
    ),
    "prefetch --tokens": Case(
        "--kv-transfer-config {tiers} --namespace {first}", PROMPT, "8 brought"
    ),
    "prefetch --text": Case(
        "--kv-transfer-config {tiers} --namespace {first} --tokenizer {tokenizer}",
        "--text {text}",
        "8 brought",
    ),
    "prefetch --messages": Case(
        "--kv-transfer-config {tiers} --namespace {first} --tokenizer {tokenizer}",
        "--messages {messages}",
        "8 brought",
    ),
    "prefetch --tokenizer": Case(
        "--kv-transfer-config {tiers} --namespace {first} --text {text}",
        "--tokenizer {tokenizer}",
        "8 brought",
    ),
    "prefetch --cache-salt": Case(FETCHES, "--cache-salt unknown", " 0 brought"),
    "prefetch --json": Case(FETCHES, "--json", '"brought": 8'),
    "purge NAMESPACES": Case(
        f"--yes {STORE}", "{first}", "left: 0 of the prompt", instead="{second}"
    ),
    "purge --yes": Case(f"{{first}} {STORE}", "--yes", "left: 0 of the prompt"),
    "purge --tokens": Case(PURGE, PROMPT, "left: 0 of the prompt, 8 of the salted"),
    "purge --text": Case(
        f"{PURGE} --tokenizer {{tokenizer}}",
        "--text {text}",
        "left: 0 of the prompt, 8 of the salted",
    ),
    "purge --messages": Case(
        f"{PURGE} --tokenizer {{tokenizer}}",
        "--messages {messages}",
        "left: 0 of the prompt, 8 of the salted",
    ),
    "purge --tokenizer": Case(
        f"{PURGE} --text {{text}}",
        "--tokenizer {tokenizer}",
        "left: 0 of the prompt, 8 of the salted",
    ),
    "purge --cache-salt": Case(
        f"{PURGE} {PROMPT}",
        "--cache-salt {salt}",
        "left: 8 of the prompt, 0 of the salted",
    ),
    "purge --older-than": Case(PURGE, "--older-than 1h", LEFT_OF_BOTH),
    "purge --tenant": Case(PURGE, "--tenant {tenant}", "left: 8 of the prompt, 0 of the salted"),
    "purge --store": Case(
        "{first} --yes", STORE, "left: 0 of the prompt", instead="--store {other}"
    ),
    "purge --kv-transfer-config": Case(
        "{first} --yes", CONFIG, "left: 0 of the prompt", instead="--store {other}"
    ),
    "purge --json": Case(PURGE, "--json", '"count": 17'),
    "router --version": Case("--config {router} --check", "--version", "kvpool, version"),
    "router --config": Case(
        "--check", "--config {router}", "{router} is valid", instead="--config {wrong_router}"
    ),
    "router --check": Case("--config {router}", "--check", "is valid"),
    "router --log-level": Case(
        "--config {router}", "--log-level warning", "WARNING", instead="--log-level error"
    ),
    "serve --host": Case(SERVE, "--host 127.0.0.2", "http://127.0.0.2:"),
    "serve --port": Case(STORE, "--port {port}", ":{port} serves", instead="--port 0"),
    "serve --tokenizer": Case(SERVE, "--tokenizer {tokenizer}", "text: 200 64 covered"),
    "serve --model": Case(SERVE, "--model alias={first}", "alias: 200 64 covered"),
    "serve --allowed-host": Case(SERVE, "--allowed-host pool.svc", "pool.svc: 200"),
    "serve --json": Case(SERVE, "--json", '"stores": ["{pool}"]'),
    "serve --store": Case("--port 0", STORE, "tokens: 200 64", instead="--store {other}"),
    "serve --kv-transfer-config": Case(
        "--port 0", CONFIG, "tokens: 200 64", instead="--store {other}"
    ),
    "top ENGINES": Case("--every 1 --count 1", "{engine}", "{engine}", "http://127.0.0.1:1"),
    "top --every": Case(
        "{engine} --count 1 --json", "--every 4", '"hit_tokens_per_s": 2.0', instead="--every 2"
    ),
    "top --count": Case("{engine} --every 1 --json", "--count 1", "1 lines", "--count 2"),
    "top --json": Case("{engine} --every 1 --count 1", "--json", '"hit_tokens_per_s"'),
    "try MODEL": Case(STORE, "first/model", "--model first/model", instead="second/model"),
    "try ENGINE": Case(f"first/model {STORE} --", "--seed 7", "--seed 7"),
    "try --store": Case("first/model", STORE, "{pool}"),
    "try --trace": Case(f"first/model {STORE}", "--trace {trace}", "2 requests of a trace"),
    "try --json": Case(f"first/model {STORE}", "--json", '"advice"'),
}


FILES = {
    "tokens": json.dumps(TOKENS),
    "text": "a prompt",
    "messages": '[{"role": "user", "content": "a prompt"}]',
    "log": "kvpool: request cmpl-7: prompt=1000 to_load=512 absent=488\n"
    "kvpool: request cmpl-7: loaded=256 load_failed=256\n"
    "kvpool: request cmpl-8: prompt=900 to_load=0 timed_out=900\n",
    "trace": 2 * '{"timestamp": 0, "input_length": 8, "output_length": 2, "hash_ids": [1]}\n',
    "wrong_router": "[frunt]\n",
}


class Names(dict[str, Any]):
    """Directories, files and servers that command lines name, each made when a line names it."""

    def __init__(self, path: Path, closing: contextlib.ExitStack) -> None:
        super().__init__(first=FIRST, second=SECOND, alone=ALONE, salt=SALT)
        self["tenant"] = tenant_of(SALT)
        self._path = path
        self._closing = closing

    def __missing__(self, name: str) -> Any:
        found = self[name] = self._make(name)
        return found

    def words(self, line: str) -> list[str]:
        """Return the words of a line."""
        return [each.format_map(self) for each in shlex.split(line)]

    def _make(self, name: str) -> Any:
        near = f"file://{self._path}/near?size={SIZE_BYTES}"
        if name in FILES:
            (self._path / name).write_text(FILES[name])
            return self._path / name
        if name in ("pool", "pinned", "other"):
            return self._store(name)
        if name == "config":
            return _transfer_config([self["pool"]])
        if name in ("tiers", "empty_tiers"):
            return _transfer_config([near, self["pool" if name == "tiers" else "other"]])
        if name == "tokenizer":
            answer = json.dumps({"tokens": TOKENS}).encode()
            return self._closing.enter_context(http_server(lambda path, body: (200, answer)))
        if name == "engine":
            engine = Engine()
            return self._closing.enter_context(served(engine, on_scrape=_work))
        if name == "port":
            return free_ports(1)[0]
        assert name == "router"
        taken = self._closing.enter_context(socket.create_server(("127.0.0.1", 0)))
        (self._path / name).write_text(
            f'[front]\nlisten = "127.0.0.1:{taken.getsockname()[1]}"\n'
            '[admin]\nlisten = "127.0.0.1:0"\n'
            '[[replicas]]\nurl = "http://127.0.0.1:9"\nrole = "decode"\n'
        )
        return self._path / name

    def _store(self, name: str) -> str:
        """Make a store with the cells of the prompt and of the salted one; `other` has none."""
        store = FileStore(str(self._path / name), SIZE_BYTES, shares=Shares.TENANT)
        for number, namespace in enumerate([ALONE] if name == "other" else [FIRST, SECOND]):
            values = {"chunk_tokens": 16, "engine": {"x": number}}
            manifest = Manifest(namespace, namespace, "", values, described([GROUP]))
            content = write_manifest(manifest)
            buffer = make_buffer(len(content))
            buffer.view[:] = content
            key = manifest_key(namespace)
            assert store.put([key], [buffer], [ChunkRef(key)]) == [PutOutcome.STORED]
        for salt in () if name == "other" else ("", SALT):
            sizes = cells_of(salt)
            buffers = [sealed(key, nbytes) for key, nbytes in sizes.items()]
            tenant = tenant_of(salt) if salt else ""
            refs = [ChunkRef(chunk_id_of_key(key), tenant=tenant) for key in sizes]
            assert set(store.put(list(sizes), buffers, refs)) == {PutOutcome.STORED}
        if name == "pinned":
            store.pin(list(cells_of("")), PINNED_S)
        store.close()
        return f"file://{self._path}/{name}?size={SIZE_BYTES}"

    def left(self) -> str:
        """Return what the stores hold of the prompt, and how much of it is pinned for long."""
        plain = salted = pinned = 0
        for name in self.keys() & {"pool", "pinned"}:
            store = ReadOnlyFileStore(str(self._path / name))
            plain += sum(store.exists(list(cells_of(""))))
            salted += sum(store.exists(list(cells_of(SALT))))
            later_ns = time.time_ns() + LONG_NS
            pinned += sum(each.pinned_until_ns > later_ns for each in store.chunks())
            store.close()
        return f"left: {plain} of the prompt, {salted} of the salted; pinned: {pinned}\n"


def _work(engine: Engine) -> None:
    engine.series("kvpool_hit_tokens").inc(8)


def _transfer_config(stores: Sequence[str]) -> str:
    role = {"kv_connector": "KVPoolConnector", "kv_role": "kv_both"}
    return json.dumps({**role, "kv_connector_extra_config": {"store": list(stores)}})


def cells_of(salt: str) -> dict[str, int]:
    """Return the keys of the prompt's cells and their sizes."""
    manifest = Manifest(FIRST, FIRST, "", {"chunk_tokens": 16}, described([GROUP]))
    cells = prompt.names_of(manifest, TOKENS, salt).cells()
    return {
        key_with_prefix(key_prefix, chunk): nbytes
        for chunk in cells.chunks
        for key_prefix, nbytes in cells.key_prefixes
    }


def test_every_option_of_every_command_has_a_row() -> None:
    commands = {"": main, **all_commands()}
    expected = {
        f"{name} {param.opts[0] if isinstance(param, click.Option) else (param.name or '').upper()}"
        for name, command in commands.items()
        for param in command.params
    }
    assert expected == CASES.keys()


@pytest.fixture
def seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., str]]:
    """Return a function that runs a command line, and what is seen of it."""
    with contextlib.ExitStack() as closing:
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.setattr("vllm_kvpool.prefetch.FAR", ("file",))  # for a network
        monkeypatch.setattr("vllm_kvpool.prefetch.BATCH_CELLS", 1)
        monkeypatch.setattr("vllm_kvpool.cli.try_model.measure", _measured)
        monkeypatch.setattr("vllm_kvpool.cli.top.watch", _watched)
        closing.callback(logging.root.setLevel, logging.root.level)
        numbers = itertools.count()

        def run(command: str, line: str, shows: str) -> tuple[str, str]:
            path = tmp_path / f"run{next(numbers)}"
            path.mkdir()
            names = Names(path, closing)
            assert names["pool"]
            words = [*command.split(), *names.words(line)]
            if command == "serve":
                text = _served(words)
            else:
                with monkeypatch.context() as patched:  # basicConfig leaves handlers as they are
                    patched.setattr(logging.root, "handlers", [])
                    result = CliRunner().invoke(main, words)
                text = f"exit {result.exit_code}\n{result.output}"
            text += f"{sum(each.startswith('[{') for each in text.splitlines())} lines\n"
            return text + names.left(), shows.format_map(names)

        yield run


def _measured(
    trial: Trial, directory: Path, say: Callable[[str], None]
) -> tuple[list[try_report.TriedPrompt], try_report.PoolCounts]:
    """Tell of a trial, without its engines."""
    say(f"{len(trial.trace)} requests of a trace")
    answer = try_report.TimedAnswer(ttft_s=1.0, tokens_per_s=None, found_tokens=0)
    turns = [try_report.TriedPrompt(try_report.Kind.NEW, 8, 0, without=answer, pool=answer)]
    return turns, try_report.PoolCounts(saved_tokens=8)


def _watched(urls: Sequence[str], every_s: float) -> Iterator[list[top.EngineState]]:
    """Watch engines by a clock that nobody waits for."""
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    return WATCH(urls, every_s, clock=lambda: now[0], sleep=sleep)


WATCH = top.watch


class _Started(io.StringIO):
    """The output of `serve`, that tells when it has the URL."""

    def __init__(self) -> None:
        super().__init__()
        self.listens = threading.Event()

    def write(self, text: str) -> int:
        count = super().write(text)
        if "http" in self.getvalue():
            self.listens.set()
        return count


def _served(words: Sequence[str]) -> str:
    """Run `serve` until it has answered, and return its output and answers."""
    out = _Started()

    def ask() -> list[str]:
        try:
            assert out.listens.wait(LIMIT_S)
            [address] = re.findall(r"http://([\d.]+:\d+)", out.getvalue())
            return list(_answers(address))
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    with ThreadPoolExecutor(1) as threads, contextlib.redirect_stdout(out):
        asked = threads.submit(ask)
        try:
            main.main(list(words), standalone_mode=False)
        finally:
            out.listens.set()
        return "\n".join([out.getvalue(), *asked.result(), ""])


def _answers(address: str) -> Iterator[str]:
    asked: dict[str, dict[str, Any]] = {
        "tokens": {"namespace": FIRST, "tokens": TOKENS},
        "text": {"namespace": FIRST, "text": "a prompt"},
        "alias": {"model": "alias", "tokens": TOKENS},
    }
    with contextlib.closing(HTTPConnection(address, timeout=LIMIT_S)) as connection:
        for name, body in asked.items():
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/lookup", json.dumps(body), headers)
            answer = connection.getresponse()
            found = json.loads(answer.read())
            yield f"{name}: {answer.status} {found.get('covered_tokens')} covered"
        connection.request("GET", "/healthz", headers={"Host": "pool.svc"})
        yield f"pool.svc: {connection.getresponse().status}"


@pytest.mark.parametrize("name", CASES)
def test_option_changes_what_is_seen(name: str, seen: Callable[..., tuple[str, str]]) -> None:
    case = CASES[name]
    command = name.split(" ")[0]
    text, shows = seen(command, f"{case.line} {case.option}", case.shows)
    assert shows in text
    text, shows = seen(command, f"{case.line} {case.instead}", case.shows)
    assert shows not in text
