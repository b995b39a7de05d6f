"""configs/systemd: units that start what there is, and give it the time that it takes to end."""

import configparser
import json
import re
import shlex
from pathlib import Path

import pytest

from tests.support.commands import all_commands
from vllm_kvpool.config import read_config

FOLDER = Path(__file__).parent.parent / "configs" / "systemd"
UNITS = sorted(FOLDER.glob("*.service"))
README = (FOLDER / "README.md").read_text()


def unit(path: Path) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None, strict=True)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    # systemd continues a line after a backslash.
    parser.read_string(re.sub(r"\\\n\s*", "", path.read_text()))
    return parser


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_a_unit_comes_back_and_has_no_rights_that_it_can_do_without(path: Path) -> None:
    service = unit(path)["Service"]
    assert service["Restart"] == "always"
    assert service["User"] == "kvpool"
    assert service["NoNewPrivileges"] == service["ProtectHome"] == "yes"
    assert service["ProtectSystem"] == "strict"
    assert unit(path)["Install"]["WantedBy"] == "multi-user.target"
    assert path.stem.rstrip("@") in README


def test_an_engine_has_more_time_to_end_than_its_requests() -> None:
    service = unit(FOLDER / "vllm-engine@.service")["Service"]
    words = shlex.split(service["ExecStart"])
    granted = int(words[words.index("--shutdown-timeout") + 1])
    assert int(service["TimeoutStopSec"]) >= granted + 20


def test_the_variables_of_an_engine_are_those_of_the_document() -> None:
    start = unit(FOLDER / "vllm-engine@.service")["Service"]["ExecStart"]
    used = set(re.findall(r"\$\{?([A-Z_]+)\}?", start))
    given = dict(re.findall(r"^([A-Z_]+)=(.*)$", README, re.MULTILINE))
    assert used == set(given)
    (config,) = shlex.split(given["KV_TRANSFER_CONFIG"])
    assert json.loads(config)["kv_connector"] == "KVPoolConnector"
    read_config(json.loads(config).get("kv_connector_extra_config", {}), env={})


def test_the_router_is_started_and_checked_with_options_that_it_has() -> None:
    service = unit(FOLDER / "kvpool-router.service")["Service"]
    options = {option for each in all_commands()["router"].params for option in each.opts}
    for line in (service["ExecStart"], service["ExecStartPre"]):
        used = {word for word in shlex.split(line) if word.startswith("--")}
        assert used <= options
    assert service["KillMode"] == "process"
    assert service["ExecReload"] == "/bin/kill -HUP $MAINPID"
