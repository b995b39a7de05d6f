"""`kvpool init`: what it writes is what engines and the router read."""

import json
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from vllm_kvpool.cli import main
from vllm_kvpool.config import pool_options, read_config
from vllm_kvpool.router.config import load_config
from vllm_kvpool.sides import VLLM_SHUTDOWN_S
from vllm_kvpool.storage.tiers import tier_specs

STORES = ("host://1GiB", "file:///nvme/kvpool?size=10GiB")
ENGINES = ("--prefill", "http://a:8000", "--decode", "http://b:8000", "--decode", "http://c:8000")


def init(directory: Path, *options: str, typed: str | None = None) -> Result:
    stores = [word for url in STORES for word in ("--store", url)]
    return CliRunner().invoke(main, ["init", str(directory), *stores, *options], input=typed)


def test_an_engine_and_a_router_read_what_is_written(tmp_path: Path) -> None:
    result = init(tmp_path / "new", "--model", "org/model", *ENGINES)
    assert result.exit_code == 0, result.output
    options = pool_options((tmp_path / "new" / "pool.json").read_text())
    assert options is not None
    specs = tier_specs(read_config(options, env={}))
    assert (specs.host.nbytes, [spec.scheme for spec in specs.stores]) == (1 << 30, ["file"])
    config = load_config(tmp_path / "new" / "router.toml")
    assert [(each.id, each.role) for each in config.replicas] == [
        ("prefill-0", "prefill"),
        ("decode-0", "decode"),
        ("decode-1", "decode"),
    ]
    assert "kvpool router --config" in result.output


def test_the_engine_s_script_says_what_vllm_gets(tmp_path: Path) -> None:
    model = "/models/it's one"
    init(tmp_path, "--model", model, "--tensor-parallel-size", "2")
    fake = tmp_path / "bin" / "python"
    fake.parent.mkdir()
    fake.write_text('#!/bin/sh\nfor each in "$@"; do printf "%s\\0" "$each"; done\n')
    fake.chmod(0o755)
    arguments = subprocess.run(
        [str(tmp_path / "engine.sh"), "--port", "8001"],
        env={"PATH": f"{fake.parent}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    ).stdout.split("\0")
    assert arguments[1:5] == [
        "vllm.entrypoints.openai.api_server",
        "--model",
        model,
        *arguments[4:5],
    ]
    assert arguments[4:6] == ["--tensor-parallel-size", "2"]
    assert arguments[6] == "--shutdown-timeout"
    assert int(arguments[7]) > VLLM_SHUTDOWN_S, "or vLLM kills an engine that still saves"
    assert json.loads(arguments[9])["kv_connector"] == "KVPoolConnector"
    assert arguments[10:12] == ["--port", "8001"]
    assert not (tmp_path / "router.toml").exists()


def test_it_asks_for_the_model_and_replaces_nothing(tmp_path: Path) -> None:
    asked = init(tmp_path, typed="org/model\n")
    assert asked.exit_code == 0, asked.output
    assert "--model org/model" in (tmp_path / "engine.sh").read_text()
    again = init(tmp_path, "--model", "other")
    assert (again.exit_code, "--force" in again.output) == (1, True)
    assert "org/model" in (tmp_path / "engine.sh").read_text()
    forced = init(tmp_path, "--model", "other", "--force", "--json")
    assert json.loads(forced.output) == [str(tmp_path / n) for n in ("pool.json", "engine.sh")]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ((), "give --model"),
        (("--model", " "), "--model is empty"),
        (("--model", "m", "--tensor-parallel-size", "0"), "0 is not in the range"),
        (("--model", "m", "--tensor-parallel-size", "-3"), "-3 is not in the range"),
        (("--model", "m", "--prefill", "foo", "--decode", "http://b:1"), "'foo' is no URL"),
        (("--model", "m", "--store", ""), "it is empty"),
    ],
)
def test_what_nothing_can_be_started_with_is_not_written(
    options: tuple[str, ...], says: str, tmp_path: Path
) -> None:
    result = CliRunner().invoke(main, ["init", str(tmp_path / "new"), *options])
    assert result.exit_code != 0
    assert says in result.output
    assert not (tmp_path / "new").exists()


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = CliRunner().invoke(main, ["init", str(tmp_path / "file" / "x"), "--model", "m"])
    assert (result.exit_code, "cannot be written" in result.output) == (1, True)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--store", "fil:///x"), "fil"),
        (("--prefill", "http://a:8000"), "belong together"),
        (("--prefill", "a:8000", "--decode", "http://b"), "is no URL of an engine"),
    ],
)
def test_what_cannot_work_is_said_and_nothing_written(
    tmp_path: Path, options: tuple[str, ...], words: str
) -> None:
    result = init(tmp_path / "new", "--model", "m", *options)
    assert (result.exit_code, words in result.output) == (1, True), result.output
    assert not (tmp_path / "new").exists()
