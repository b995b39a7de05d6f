import shlex
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_kvpool.errors import ConfigError
from vllm_kvpool.router.config import LaunchConfig
from vllm_kvpool.router.ops.commands import (
    ENGINE_PLACEHOLDERS,
    HOST_PLACEHOLDERS,
    CommandTemplate,
    LaunchHost,
    LaunchSpec,
    check_launch,
    read_template,
)

HERE = LaunchHost(name="here")
LAUNCH = LaunchConfig()
SSH = read_template("hosts.command", ["ssh", "{host}", "{command}"], HOST_PLACEHOLDERS)
DOCKER = read_template("hosts.command", ["docker", "exec", "c1", "{command...}"], HOST_PLACEHOLDERS)
ARGUMENTS = st.lists(
    st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=12),
    min_size=1,
    max_size=6,
)


def spec(**changes: object) -> LaunchSpec:
    return LaunchSpec(
        **{  # type: ignore[arg-type]
            "replica_id": "r1",
            "host": HERE,
            "port": 8001,
            "role": "prefill",
            "model": "org/model",
            "log_path": Path("r1.log"),
            "template": CommandTemplate(LAUNCH.command),
            "kv_transfer_config": LAUNCH.kv_transfer_config,
            "extra": (),
            "environment": {},
            "stop_timeout_s": LAUNCH.stop_timeout_s,
            **changes,
        }
    )


def test_the_default_command_starts_vllm_with_the_pool_and_time_to_drain() -> None:
    command = spec(extra=("--max-model-len", "512"), stop_timeout_s=45.0).command()
    assert command == (
        *("vllm", "serve", "org/model", "--host", "127.0.0.1", "--port", "8001"),
        *("--shutdown-timeout", "35"),
        *("--kv-transfer-config", '{"kv_connector":"KVPoolConnector","kv_role":"kv_both"}'),
        *("--max-model-len", "512"),
    )
    read_template("launch.command", LAUNCH.command, ENGINE_PLACEHOLDERS)


@pytest.mark.parametrize(("stop_s", "shutdown_s"), [(60.0, 50), (10.5, 0), (0.0, 0), (11.9, 1)])
def test_an_engine_keeps_some_of_its_time_to_stop_for_its_exit(
    stop_s: float, shutdown_s: int
) -> None:
    assert spec(stop_timeout_s=stop_s).shutdown_timeout_s == shutdown_s


def test_values_are_put_in_wherever_they_stand_and_json_is_left_alone() -> None:
    template = read_template(
        "launch.command",
        ["{model}:{port}", "--x={role}", '{"a":{},"b":{"c":1}}', "{extra...}", "{ not a name }"],
        ENGINE_PLACEHOLDERS,
    )
    assert spec(template=template, extra=("y", "z w")).command() == (
        *("org/model:8001", "--x=prefill", '{"a":{},"b":{"c":1}}', "y", "z w", "{ not a name }"),
    )


def test_what_is_put_in_is_not_read_again() -> None:
    template = read_template("launch.command", ["{model}", "{port}"], ENGINE_PLACEHOLDERS)
    assert spec(template=template, model="{role}").command() == ("{role}", "8001")


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
        ([], "is a list of arguments"),
        (["vllm", 3, "{port}"], "is a list of arguments"),
    ],
)
def test_mistakes_in_a_template_are_named(arguments: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=f"launch.command: .*{said}"):
        read_template("launch.command", arguments, ENGINE_PLACEHOLDERS)


def test_a_host_that_would_not_run_the_command_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"\{command\} or \{command...\} is missing"):
        read_template("hosts.command", ["ssh", "{host}"], HOST_PLACEHOLDERS)


@given(ARGUMENTS)
def test_a_shell_at_the_other_end_of_ssh_finds_the_same_arguments(arguments: list[str]) -> None:
    host = LaunchHost(name="far", address="10.0.0.2", prefix=SSH)
    *before, joined = host.command(arguments)
    assert before == ["ssh", "10.0.0.2"]
    assert shlex.split(joined) == arguments
    assert LaunchHost(name="box", prefix=DOCKER).command(arguments) == (
        *("docker", "exec", "c1"),
        *arguments,
    )
    assert HERE.command(arguments) == tuple(arguments)


def test_what_ssh_is_given_passes_a_real_shell() -> None:
    arguments = ["printf", "%s|", "a b", "$HOME", '{"k":"it\'s"}', "`x`", "", "back\\slash", "*"]
    joined = LaunchHost(name="far", prefix=SSH).command(arguments)[-1]
    printed = subprocess.run(["sh", "-c", joined], capture_output=True, text=True, check=True)
    assert printed.stdout.split("|")[:-1] == arguments[2:]


def test_an_environment_goes_with_the_command() -> None:
    command = spec(environment={"A": "1 2", "B": ""}, template=CommandTemplate(("x",))).command()
    assert command == ("env", "A=1 2", "B=", "x")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"extra": ("x",)}, "extra arguments are lost"),
    ],
)
def test_configuration_that_would_not_reach_the_engine_is_named(
    changes: dict[str, object], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        check_launch(spec(**{"template": CommandTemplate(("vllm", "{port}")), **changes}))


def test_configuration_that_reaches_the_engine_is_accepted() -> None:
    check_launch(spec(extra=("x",)))
    check_launch(spec(template=CommandTemplate(("vllm", "{port}"))))
