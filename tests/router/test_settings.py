"""What the parts are told out of the configuration."""

from pathlib import Path
from typing import Any

import pytest

from vllm_kvpool.errors import ConfigError
from vllm_kvpool.router.commands import Weights, WeightSource
from vllm_kvpool.router.config import RouterConfig, read_config
from vllm_kvpool.router.settings import controller_of, launch_hosts, launch_spec

HOST: dict[str, Any] = {"name": "big", "max_replicas": 4, "first_port": 9000}


def config(host: dict[str, Any] | None = None, **sections: Any) -> RouterConfig:
    return read_config({"launch": {"model": "m"}, "hosts": [{**HOST, **(host or {})}], **sections})


def test_the_controller_has_the_files_numbers() -> None:
    given = {
        "flow": {
            **{"prefill_tokens": 11, "prefill_requests": 12, "permits": 13, "decode_requests": 14},
            **{"headroom": 0.5, "max_attempts": 15, "max_lost": 16, "drain_timeout_s": 17.0},
            **{"split_tokens": 18, "hands_over": False},
        },
        "planner": {"live_takeover": False, "every_s": 3.0, "mode": "dry_run", "max_decode": 5},
    }
    controller = controller_of(config(**given))
    settings, scaling = controller.desk.settings, controller.scaling.settings
    budgets = settings.budgets
    assert (budgets.prefill_tokens, budgets.prefill_requests) == (11, 12)
    assert (budgets.permits, budgets.decode_requests, budgets.headroom) == (13, 14, 0.5)
    assert (settings.max_attempts, settings.max_lost) == (15, 16)
    assert (settings.drain_timeout_s, settings.split_tokens) == (17.0, 18)
    assert (settings.hands_over, settings.takes_over) == (False, False)
    assert (scaling.every_s, scaling.mode.value) == (3.0, "dry_run")
    assert scaling.limits.max_decode == 5
    assert [(each.name, each.first_port, each.slots) for each in scaling.hosts] == [
        ("big", 9000, 4)
    ]


def test_an_engine_is_started_as_the_file_says() -> None:
    given = config(
        {"env": {"A": "b"}, "command": ["ssh", "{host}", "{command}"], "address": "10.0.0.1"},
        launch={
            **{"model": "m", "args": ["--x"], "log_dir": "/logs", "stop_timeout_s": 9.0},
            "command": ["serve", "{model}", "--port={port}", "{extra...}"],
        },
    )
    hosts = launch_hosts(given)
    assert hosts["big"].address == "10.0.0.1"
    assert hosts["big"].prefix is not None
    spec = launch_spec(
        given, hosts["big"], replica_id="big-9001", port=9001, role="prefill", weights="disk"
    )
    assert (spec.replica_id, spec.port, spec.role, spec.model) == ("big-9001", 9001, "prefill", "m")
    assert spec.log_path == Path("/logs/big-9001.log")
    assert spec.environment == {"A": "b"}
    assert spec.extra == ("--x",)
    assert spec.stop_timeout_s == 9.0
    assert spec.template.names() == {"model", "port", "extra..."}


@pytest.mark.parametrize(
    ("source", "chosen", "weights"),
    [
        ("disk", "disk", Weights(source=WeightSource.DISK)),
        ("preload", "memory", Weights(source=WeightSource.PRELOAD)),
        ("preload", "disk", Weights(source=WeightSource.DISK)),
        ("host_memory", "memory", Weights(source=WeightSource.HOST_MEMORY)),
        ("peer", "peer", Weights(source=WeightSource.PEER, listen_port=7004, num_ranks=2)),
    ],
)
def test_where_weights_are_read(source: str, chosen: str, weights: Weights) -> None:
    given = config({"weight_source": source, "weights_port": 7000, "ranks": 2})
    host = launch_hosts(given)["big"]
    spec = launch_spec(given, host, replica_id="x", port=9002, role="decode", weights=chosen)
    assert spec.weights == weights


@pytest.mark.parametrize(
    ("host", "launch", "word"),
    [
        ({}, {"command": ["serve", "{modle}", "{port}"]}, "did you mean 'model'"),
        ({}, {"command": ["serve"]}, "{port} is missing"),
        ({}, {"command": []}, "list of arguments"),
        ({"command": ["ssh", "{host}"]}, {}, "{command}"),
        ({"command": ["ssh", "{hots}", "{command}"]}, {}, "did you mean 'host'"),
    ],
)
def test_commands_that_cannot_work(host: dict[str, Any], launch: dict[str, Any], word: str) -> None:
    given = config(host, launch={"model": "m", **launch})
    with pytest.raises(ConfigError, match=word.replace("{", "\\{")):
        launch_hosts(given)
