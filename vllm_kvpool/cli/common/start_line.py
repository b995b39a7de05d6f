"""The start line of an engine, as words, read without vLLM, whose import takes seconds."""

from collections.abc import Sequence

from vllm_kvpool.errors import ConfigError

TRANSFER_CONFIG = "--kv-transfer-config"


def engine_arguments(words: Sequence[str]) -> list[str]:
    """Return the options in `vllm serve MODEL …` or `python -m vllm.entrypoints.… --model MODEL …`.

    Raises ConfigError for other words.
    """
    words = list(words)
    for i, word in enumerate(words):
        if word == "serve":
            rest = words[i + 1 :]
            return ["--model", *rest] if rest and not rest[0].startswith("-") else rest
        if word.startswith("-") and word != "-m":
            return words[i:]
    raise ConfigError(
        f"{' '.join(words)!r} is no start line; expected vllm serve MODEL, or "
        "python -m vllm.entrypoints.openai.api_server --model MODEL, with options"
    )


def transfer_config(arguments: Sequence[str]) -> str:
    """Return the value of `--kv-transfer-config` among an engine's options.

    Raises ConfigError without it.
    """
    given = option_of(arguments, TRANSFER_CONFIG)
    if given is not None:
        return given
    names = [_name(each) for each in arguments]
    if "--config" in names or any(each.startswith(f"{TRANSFER_CONFIG}.") for each in names):
        raise ConfigError(
            f"the start line has {TRANSFER_CONFIG} in parts or in the file of --config, where "
            "doctor does not look for stores: name them with --store before the --"
        )
    raise ConfigError(
        f"the start line has no {TRANSFER_CONFIG}: such an engine has no pool; add "
        f'{TRANSFER_CONFIG} \'{{"kv_connector":"KVPoolConnector","kv_role":"kv_both"}}\''
    )


def option_of(words: Sequence[str], option: str) -> str | None:
    """Return the value of an option among words, as `--option value` or `--option=value`.

    `_` in the option's name counts as `-`, as in vLLM.
    """
    for i, word in enumerate(words):
        if _name(word) != option:
            continue
        _, equals, value = word.partition("=")
        if equals:
            return value
        if i + 1 < len(words):
            return words[i + 1]
    return None


def without_option(words: Sequence[str], option: str) -> list[str]:
    """Return the words without an option and its value, in each form that `option_of` reads."""
    rest, left = list(words), []
    while rest:
        word = rest.pop(0)
        if _name(word) != option:
            left.append(word)
        elif "=" not in word and rest:
            rest.pop(0)
    return left


def _name(word: str) -> str:
    return word.partition("=")[0].replace("_", "-")
