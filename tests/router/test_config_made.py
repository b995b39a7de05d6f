"""What the parts are told out of the configuration."""

from dataclasses import replace
from typing import Any

import pytest

from tests.support.router_sections import SECTIONS
from vllm_kvpool.errors import ConfigError
from vllm_kvpool.router.config import (
    RouterConfig,
    controller_of,
    read_config,
)
from vllm_kvpool.router.control.controller import Controller
from vllm_kvpool.router.ops.commands import command_on, engine_command
from vllm_kvpool.router.ops.state_file import EngineRecord

HOST: dict[str, Any] = {"name": "big", "max_replicas": 4, "first_port": 9000}


def config(host: dict[str, Any] | None = None, **sections: Any) -> RouterConfig:
    return read_config({"launch": {"model": "m"}, "hosts": [{**HOST, **(host or {})}], **sections})


def test_the_controller_has_the_files_numbers() -> None:
    given: dict[str, dict[str, Any]] = {
        "flow": {
            **{"prefill_tokens": 11, "decode_requests": 14, "headroom": 0.5, "spills": False},
            **{"max_attempts": 15, "max_lost": 16, "resume_within_s": 18.0},
            **{"drain_timeout_s": 17.0, "hands_over": False},
        },
        "planner": {
            **{"live_takeover": False, "mode": "dry_run", "min_prefill": 2, "min_decode": 3},
            **{"queue_target_s": 4.0, "down_hold_s": 5.0, "standby_ttl_s": 6.0},
        },
        "overload": {"lock_at": 0.9, "ttft_target_s": 7.0, "max_queue": 8},
        "health": {"max_failures": 9, "quarantine_s": 10.0},
    }
    controller = controller_of(config(**given))
    settings, scaling = controller.state.settings, controller.scaling.settings
    made = {
        "flow": {
            name: getattr(settings if hasattr(settings, name) else settings.budgets, name)
            for name in given["flow"]
        },
        "planner": {
            name: getattr(scaling if hasattr(scaling, name) else scaling.limits, name)
            for name in given["planner"].keys() - {"live_takeover"}
        }
        | {"live_takeover": settings.takes_over, "mode": scaling.mode.value},
        "overload": {
            "lock_at": controller.state.overload._limits.lock_at,
            "ttft_target_s": controller.state.shedder._limits.ttft_target_s,
            "max_queue": controller.state.shedder._limits.max_queued_requests,
        },
        "health": {
            "max_failures": controller.lifecycle._limits.failures,
            "quarantine_s": controller.lifecycle._limits.first_quarantine_s,
        },
    }
    assert made == given
    sections = {name: set(SECTIONS[name].__struct_fields__) for name in given}
    sections["flow"].remove("lookup_url")
    sections["health"] -= {"every_s", "timeout_s", "failures"}  # of monitors
    assert {name: set(options) for name, options in given.items()} == sections
    assert [(each.name, each.first_port, each.slots) for each in scaling.hosts] == [
        ("big", 9000, 4)
    ]


def test_a_number_has_one_default() -> None:
    """Without options, and as a part of the controller that is made by itself."""
    made, alone = controller_of(config()), Controller()
    assert made.state.settings == alone.state.settings
    for part in ("overload", "shedder"):
        assert getattr(made.state, part)._limits == getattr(alone.state, part)._limits
    assert made.lifecycle._limits == alone.lifecycle._limits
    scaling = made.scaling.settings
    assert replace(scaling, hosts=()) == alone.scaling.settings


@pytest.mark.parametrize(("lock_at", "is_told"), [(0.94, True), (0.96, False)])
def test_locks_that_ordinary_work_would_set_are_told(
    lock_at: float, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    controller_of(config(overload={"lock_at": lock_at}, flow={"headroom": 0.95}))
    assert ("run half empty" in caplog.text) is is_told


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
