import re
import shlex
import subprocess
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from vllm_kvpool.router.config import LaunchConfig
from vllm_kvpool.router.control.settings import HostConfig
from vllm_kvpool.router.ops.commands import (
    ENGINE_PLACEHOLDERS,
    HOST_PLACEHOLDERS,
    command_on,
    engine_command,
    launch_errors,
    template_error,
)
from vllm_kvpool.router.ops.state_file import EngineRecord

HERE = HostConfig(name="here")
LAUNCH = LaunchConfig(model="org/model")
SSH = HostConfig(name="far", address="10.0.0.2", command=("ssh", "{host}", "{command}"))
DOCKER = HostConfig(name="box", command=("docker", "exec", "c1", "{command...}"))
ARGUMENTS = st.lists(
    st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=12),
    min_size=1,
    max_size=6,
)


def started(host: HostConfig = HERE, stop_timeout_s: float = 60.0, **options: Any) -> list[str]:
    """The command of an engine at a host, with these options of `[launch]`."""
    engine = EngineRecord(
        replica_id="r1",
        host=host.name,
        port=8001,
        role="prefill",
        log_path="r1.log",
        stop_timeout_s=stop_timeout_s,
    )
    return engine_command(replace(LAUNCH, **options), host, engine)


def test_the_default_command_starts_vllm_with_the_pool_and_time_to_drain() -> None:
    assert started(args=("--max-model-len", "512"), stop_timeout_s=45.0) == [
        *("vllm", "serve", "org/model", "--host", "127.0.0.1", "--port", "8001"),
        *("--shutdown-timeout", "35"),
        *("--kv-transfer-config", '{"kv_connector":"KVPoolConnector","kv_role":"kv_both"}'),
        *("--max-model-len", "512"),
    ]
    assert template_error(LAUNCH.command, ENGINE_PLACEHOLDERS) == ""


@pytest.mark.parametrize(("stop_s", "shutdown_s"), [(60.0, 50), (10.5, 0), (0.0, 0), (11.9, 1)])
def test_an_engine_keeps_some_of_its_time_to_stop_for_its_exit(
    stop_s: float, shutdown_s: int
) -> None:
    assert started(stop_timeout_s=stop_s, command=("{shutdown_timeout_s}",)) == [str(shutdown_s)]


def test_values_are_put_in_wherever_they_stand_and_json_is_left_alone() -> None:
    template = ("{model}:{port}", "--x={role}", '{"a":{},"b":{"c":1}}', "{extra...}", "{ no name }")
    assert template_error(template, ENGINE_PLACEHOLDERS) == ""
    assert started(command=template, args=("y", "z w")) == [
        *("org/model:8001", "--x=prefill", '{"a":{},"b":{"c":1}}', "y", "z w", "{ no name }"),
    ]


def test_what_is_put_in_is_not_read_again() -> None:
    assert started(command=("{model}", "{port}"), model="{role}") == ["{role}", "8001"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["vllm", "{modle}", "{port}"], r"unknown \{modle\}; did you mean 'model'"),
        (["vllm", "--port={prot}"], r"did you mean 'port'"),
        (["vllm", "{kv-transfer-config}", "{port}"], "did you mean 'kv_transfer_config'"),
        (["vllm", "{extra}", "{port}"], r"did you mean 'extra...'"),
        (["vllm", "{0}", "{port}"], r"unknown \{0\}; known are: extra"),
        (["vllm", "x{extra...}", "{port}"], r"must be one of its own, not a part of 'x\{extra"),
        (["vllm", "serve"], r"\{port\} is missing"),
        ([], r"\{port\} is missing"),
    ],
)
def test_mistakes_in_a_template_are_named(arguments: list[str], said: str) -> None:
    assert re.search(said, template_error(arguments, ENGINE_PLACEHOLDERS))


def test_a_host_that_would_not_run_the_command_is_refused() -> None:
    error = template_error(["ssh", "{host}"], HOST_PLACEHOLDERS)
    assert error == "{command} or {command...} is missing"


@given(ARGUMENTS)
def test_a_shell_at_the_other_end_of_ssh_finds_the_same_arguments(arguments: list[str]) -> None:
    *before, joined = command_on(SSH, arguments)
    assert before == ["ssh", "10.0.0.2"]
    assert shlex.split(joined) == arguments
    assert command_on(DOCKER, arguments) == ("docker", "exec", "c1", *arguments)
    assert command_on(HERE, arguments) == tuple(arguments)


def test_what_ssh_is_given_passes_a_real_shell() -> None:
    arguments = ["printf", "%s|", "a b", "$HOME", '{"k":"it\'s"}', "`x`", "", "back\\slash", "*"]
    joined = command_on(SSH, arguments)[-1]
    printed = subprocess.run(["sh", "-c", joined], capture_output=True, text=True, check=True)
    assert printed.stdout.split("|")[:-1] == arguments[2:]


def test_an_environment_goes_with_the_command() -> None:
    host = HostConfig(name="here", env={"A": "1 2", "B": ""})
    assert started(host, command=("x",)) == ["env", "A=1 2", "B=", "x"]


def test_configuration_that_would_not_reach_the_engine_is_named() -> None:
    given = LaunchConfig(command=("vllm", "{port}"), args=("x",))
    assert list(launch_errors(given)) == [
        "[launch] command: {extra...} is missing, so args are lost"
    ]


@pytest.mark.parametrize(
    "given", [LaunchConfig(args=("x",)), LaunchConfig(command=("vllm", "{port}"))]
)
def test_configuration_that_reaches_the_engine_is_accepted(given: LaunchConfig) -> None:
    assert list(launch_errors(given)) == []
