"""What the parts are told out of the configuration."""

from typing import Any

import pytest

from vllm_kvpool.errors import ConfigError
from vllm_kvpool.router.config import (
    RouterConfig,
    controller_of,
    read_config,
)
from vllm_kvpool.router.control.events import Mode
from vllm_kvpool.router.ops.commands import command_on, engine_command
from vllm_kvpool.router.ops.state_file import EngineRecord

HOST: dict[str, Any] = {"name": "big", "max_replicas": 4, "first_port": 9000}


def config(host: dict[str, Any] | None = None, **sections: Any) -> RouterConfig:
    return read_config({"launch": {"model": "m"}, "hosts": [{**HOST, **(host or {})}], **sections})


def test_the_controller_has_the_files_numbers() -> None:
    given: dict[str, dict[str, Any]] = {
        "flow": {"prefill_tokens": 11, "headroom": 0.5, "spills": False},
        "planner": {"live_takeover": False, "mode": "dry_run", "down_hold_s": 5.0},
        "overload": {"ttft_target_s": 7.0},
        "health": {"max_failures": 9},
    }
    controller = controller_of(config(**given))
    settings = controller.state.settings
    assert (settings.prefill_tokens, settings.headroom, settings.spills) == (11, 0.5, False)
    assert controller.scaling.mode is Mode.DRY_RUN
    assert controller.scaling._config.down_hold_s == 5.0
    assert not controller.lifecycle._takes_over
    assert controller.lifecycle._health.max_failures == 9
    assert controller.state.shedder.overdue_s == 14.0
    assert [each.name for each in controller.scaling._hosts] == ["big"]


def test_an_engine_is_started_as_the_file_says() -> None:
    given = config(
        {"env": {"A": "b"}, "command": ["ssh", "{host}", "{command}"], "address": "10.0.0.1"},
        launch={
            **{"model": "m", "args": ["--x"], "state_dir": "/state", "stop_timeout_s": 9.0},
            "command": ["serve", "{model}", "--port={port}", "{extra...}"],
        },
    )
    engine = EngineRecord(
        replica_id="big-9001",
        host="big",
        port=9001,
        role="prefill",
        log_path="/state/logs/big-9001.log",
        stop_timeout_s=given.launch.stop_timeout_s,
    )
    command = engine_command(given.launch, given.hosts[0], engine)
    assert command == ["env", "A=b", "serve", "m", "--port=9001", "--x"]
    assert command_on(given.hosts[0], command) == (
        *("ssh", "10.0.0.1"),
        "env A=b serve m --port=9001 --x",
    )


@pytest.mark.parametrize(
    ("host", "launch", "word"),
    [
        ({}, {"command": ["serve", "{modle}", "{port}"]}, "did you mean 'model'"),
        ({}, {"command": ["serve"]}, "{port} is missing"),
        ({}, {"command": []}, "{port} is missing"),
        ({}, {"kv_transfer_config": "{"}, "is no JSON object"),
        ({}, {"kv_transfer_config": "[]"}, "is no JSON object"),
        ({"command": ["ssh", "{host}"]}, {}, "{command}"),
        ({"command": ["ssh", "{hots}", "{command}"]}, {}, "did you mean 'host'"),
    ],
)
def test_commands_that_cannot_work(host: dict[str, Any], launch: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word.replace("{", "\\{")):
        config(host, launch={"model": "m", **launch})
