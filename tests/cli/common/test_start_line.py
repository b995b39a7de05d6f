"""Options read from the words of an engine's start line, without vLLM."""

import pytest

from vllm_kvpool.cli.common.start_line import engine_arguments, option_of, transfer_config
from vllm_kvpool.errors import ConfigError


@pytest.mark.parametrize(
    "words",
    [
        ["vllm", "serve", "m", "--seed", "1"],
        ["serve", "--model", "m", "--seed", "1"],
        ["python", "-m", "vllm.entrypoints.openai.api_server", "--model", "m", "--seed", "1"],
        ["--model", "m", "--seed", "1"],
    ],
)
def test_the_engine_s_part_of_a_line(words: list[str]) -> None:
    assert engine_arguments(words) == ["--model", "m", "--seed", "1"]
    assert engine_arguments(["vllm", "serve"]) == []


def test_words_that_start_no_engine_are_named() -> None:
    with pytest.raises(ConfigError, match=r"^'python server\.py' is no start line; expected vllm"):
        engine_arguments(["python", "server.py"])


def test_an_option_of_a_start_line() -> None:
    words = ["vllm", "serve", "m", "--a", "1", "--b={}", "--a_b", "2", "--d"]
    names = ("--a", "--b", "--a-b", "--c", "--d")
    assert [option_of(words, name) for name in names] == ["1", "{}", "2", None, None]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "has no --kv-transfer-config: such an engine has no pool; add"),
        (["--kv-transfer-confg", "{}"], "has no --kv-transfer-config"),
        (["--config", "engine.yaml"], "name them with --store"),
        (["--kv_transfer_config.kv_connector", "KVPoolConnector"], "name them with --store"),
    ],
)
def test_a_line_whose_words_name_no_store(arguments: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        transfer_config(["--model", "m", *arguments])
