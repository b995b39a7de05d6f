"""`kvpool try` as one types it, over scripted engines: what it asks, prints, stops and removes.

A package `vllm` of a few lines stands before the real one: its server is a scripted engine, whose
pool is a directory beside the store's.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.support.processes import is_alive
from vllm_kvpool.cli import main
from vllm_kvpool.cli.common.start_line import without_option

ROOT = Path(__file__).parents[2]
LIMIT_S = 120.0
SERVER = """
import json, os, sys
from pathlib import Path
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--port")
parser.add_argument("--kv-transfer-config")
parser.add_argument("--fails-at", default="")
parser.add_argument("--max-model-len", default="2048")
given, _ = parser.parse_known_args()
side = "pool" if given.kv_transfer_config else "none"
with Path(os.environ["STARTED"]).open("a") as file:
    file.write(f"{os.getpid()} {side}\\n")
if given.fails_at == side:
    print("ValueError: the scripted engine does not start")
    sys.exit(1)
sys.argv = ["engine", "--port", given.port, "--enable-prompt-tokens-details"]
sys.argv += ["--max-model-len", given.max_model_len, "--prefill-tokens-per-s", "20000"]
if given.kv_transfer_config:
    extra = json.loads(given.kv_transfer_config)["kv_connector_extra_config"]
    Path(os.environ["STARTED"]).with_name("config.json").write_text(json.dumps(extra))
    sys.argv += ["--pool", os.environ["SCRIPTED_POOL"]]
else:
    sys.argv += ["--pool", "none"]
from tests.support.scripted_engine import main
main()
"""


class Command:
    """`kvpool try` over scripted engines; `start` begins it, nothing of it outlives `close`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._started = directory / "started"
        self._started.touch()
        self.temporary = directory / "tmp"
        package = directory / "path" / "vllm" / "entrypoints" / "openai"
        for each in (self.temporary, package, directory / "scripted"):
            each.mkdir(parents=True)
        for each in (package, package.parent, package.parent.parent):
            (each / "__init__.py").touch()
        (package / "api_server.py").write_text(SERVER)
        self._processes: list[subprocess.Popen[str]] = []

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "vllm_kvpool", "try", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.directory,
            env={
                **os.environ,
                "PYTHONPATH": f"{self.directory / 'path'}:{ROOT}",
                "TMPDIR": str(self.temporary),
                "STARTED": str(self._started),
                "SCRIPTED_POOL": str(self.directory / "scripted"),
            },
        )
        self._processes.append(process)
        return process

    def run(self, *arguments: str) -> tuple[int, str, str]:
        """Return the command's status, its stdout and its stderr."""
        process = self.start(*arguments)
        output, errors = process.communicate(timeout=LIMIT_S)
        return process.returncode, output, errors

    def engines(self) -> list[tuple[int, str]]:
        """Return the process and the side of each engine that was started."""
        lines = map(str.split, self._started.read_text().splitlines())
        return [(int(pid), side) for pid, side in lines]

    def assert_nothing_is_left(self) -> None:
        assert [each for each in self.engines() if is_alive(each[0])] == []
        assert list(self.temporary.iterdir()) == []

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()
        for pid, _ in self.engines():
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Command]:
    command = Command(tmp_path)
    yield command
    command.close()


def test_try_of_conversations_finds_them_after_the_restart_in_the_pool_alone(
    command: Command,
) -> None:
    status, output, errors = command.run("model", "--json", "--", "--seed", "1")
    assert status == 0, errors
    found = json.loads(output)
    rows = {row["kind"]: row for row in found["rows"]}
    shares = {kind: (row["without"]["found"], row["pool"]["found"]) for kind, row in rows.items()}
    assert shares["new"] == (0, 0)
    assert min(shares["seen by this engine"]) > 0.9
    assert shares["seen before a restart"][0] == 0
    assert shares["seen before a restart"][1] > 0.8
    assert [side for _, side in command.engines()] == ["none", "pool"] * 2
    assert [row["requests"] for row in rows.values()] == [8, 16, 8]
    assert [turn["first"] for turn in found["turns"]] == ["no pool", "pool"] * 16
    assert all(advice in errors for advice in found["advice"])
    assert "--seed 1" in found["commands"]["pool"]
    assert "prompt 32 of 32" in errors
    command.assert_nothing_is_left()


def test_try_of_a_trace_replays_each_request(command: Command) -> None:
    trace = command.directory / "trace.jsonl"
    lines = [
        {"timestamp": 0, "input_length": 512 * n, "output_length": 4, "hash_ids": [*range(n)]}
        for n in (1, 2, 5, 2, 3)
    ]
    trace.write_text("".join(f"{json.dumps(each)}\n" for each in lines))
    status, output, errors = command.run("model", "--trace", str(trace), "--json")
    assert status == 0, errors
    found = json.loads(output)
    assert [each["prompt_tokens"] for each in found["turns"]] == [512, 1024, 1024, 1536]
    assert [each["known_tokens"] for each in found["turns"]] == [0, 512, 1024, 1024]
    assert "seen before a restart" in errors
    assert "1 requests of the trace are left out: longer than --max-model-len 2048" in errors


def test_try_with_a_store_leaves_its_directory_as_it_is(command: Command) -> None:
    store = command.directory / "mine"
    store.mkdir()
    (store / "notes.txt").write_text("mine")
    url = f"file://{store}?size=1GiB"
    status, _, errors = command.run("model", "--store", url)
    assert status == 0, errors
    assert (store / "notes.txt").read_text() == "mine"
    assert json.loads((command.directory / "config.json").read_text()) == {"store": [url]}
    command.assert_nothing_is_left()


def test_try_with_a_transfer_config_gives_it_to_one_engine(command: Command) -> None:
    extra = {"store": "host://1GiB", "chunk_tokens": 128}
    config = {
        "kv_connector": "KVPoolConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }
    given = ("--kv-transfer-config", json.dumps(config))
    status, output, errors = command.run("model", "--json", "--", *given)
    assert status == 0, errors
    assert json.loads((command.directory / "config.json").read_text()) == extra
    assert [side for _, side in command.engines()] == ["none", "pool"] * 2
    found = json.loads(output)
    assert (found["setup"]["chunk_tokens"], found["setup"]["has_stores"]) == (128, False)


@pytest.mark.parametrize("side", ["none", "pool"])
def test_try_with_an_engine_that_ends_while_starting_shows_its_log(
    command: Command, side: str
) -> None:
    status, output, errors = command.run("model", "--", "--fails-at", side)
    assert (status, output) == (1, "")
    assert "ended while it started" in errors
    assert "First error in it: ValueError: the scripted engine does not start" in errors
    command.assert_nothing_is_left()


def test_try_with_an_engine_that_dies_while_asked_ends_with_its_log(command: Command) -> None:
    process = command.start("model")
    wait(lambda: len(command.engines()) == 2, process)
    read_until(process, "prompt 3 of 32")
    os.kill(command.engines()[1][0], signal.SIGKILL)
    _, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1
    assert "Error: a request to the engine failed" in errors
    command.assert_nothing_is_left()


@pytest.mark.parametrize(
    ("number", "line"),
    [
        (signal.SIGTERM, "no pool: starting"),
        (signal.SIGINT, " pool: starting"),
        (signal.SIGTERM, "prompt 3 of 32"),
        (signal.SIGHUP, "prompt 27 of 32"),
    ],
)
def test_try_ended_by_a_signal_stops_its_engines(
    command: Command, number: signal.Signals, line: str
) -> None:
    process = command.start("model")
    read_until(process, line)
    process.send_signal(number)
    process.communicate(timeout=LIMIT_S)
    assert process.returncode != 0
    command.assert_nothing_is_left()


def read_until(process: subprocess.Popen[str], words: str) -> None:
    assert process.stderr is not None
    assert any(words in line for line in iter(process.stderr.readline, ""))


def wait(is_true: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    while not is_true():
        assert process.poll() is None
        time.sleep(0.05)


WRONG: dict[str, tuple[Sequence[str], str]] = {
    "no such directory": (("/no/model",), "there is no directory /no/model"),
    "store that is none": (("model", "--store", "flie:///x"), "did you mean 'file'"),
    "store that cannot be made": (
        ("model", "--store", "file:///proc/kvpool?size=1GiB"),
        "file:///proc/kvpool",
    ),
    "no trace": (("model", "--trace", "/no/trace"), "--trace /no/trace: No such file"),
    "port": (("model", "--", "--port=80"), "--port behind --"),
    "parts of a pool": (
        ("model", "--", "--kv-transfer-config.kv_role", "kv_both"),
        "in one piece, as JSON",
    ),
    "store twice": (
        ("model", "--store", "host://1GiB", "--", "--kv-transfer-config", "{}"),
        "not both",
    ),
    "other connector": (
        ("model", "--", "--kv-transfer-config", '{"kv_connector": "NixlConnector"}'),
        "names no KVPoolConnector",
    ),
    "bucket without a region": (("model", "--store", "s3://bucket"), "region="),
}


@pytest.mark.parametrize(("arguments", "words"), WRONG.values(), ids=WRONG)
def test_try_with_wrong_input_says_so_before_an_engine_starts(
    arguments: Sequence[str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("an engine was started")

    monkeypatch.setattr("vllm_kvpool.cli.try_model.measure", fail)
    result = CliRunner().invoke(main, ["try", *arguments])
    assert result.exit_code in (1, 2), result.output
    assert words in result.output
    assert "Traceback" not in result.output


def test_try_without_vllm_says_where_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_kvpool.cli.commands.try_model.find_spec", lambda name: None)
    assert "vLLM's environment" in CliRunner().invoke(main, ["try", "model"]).output


@pytest.mark.parametrize(
    ("words", "left"),
    [
        (["--a", "1", "--kv-transfer-config", "{}", "--b"], ["--a", "1", "--b"]),
        (["--kv_transfer_config={}", "--b"], ["--b"]),
        (["--kv-transfer-config"], []),
        (["--a"], ["--a"]),
    ],
)
def test_without_option_drops_it_in_each_form(words: list[str], left: list[str]) -> None:
    assert without_option(words, "--kv-transfer-config") == left
