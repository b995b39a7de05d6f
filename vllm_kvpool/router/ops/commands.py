"""What an engine is started with: templates of commands, and what is put into them (pure).

A template is a list of arguments. `{name}` in it stands for a value; a placeholder of several
arguments stands alone in one. Braces around anything else, such as JSON, are left as they are.
A template is checked when the configuration is read, so that nothing can fail when it is used.
"""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from vllm_kvpool.config import pool_options
from vllm_kvpool.errors import nearest
from vllm_kvpool.parsing import UNREADABLE
from vllm_kvpool.router.control.settings import HostConfig
from vllm_kvpool.router.ops.state_file import EngineRecord

if TYPE_CHECKING:
    from vllm_kvpool.router.config import LaunchConfig

# What cannot be JSON: no quote, space, comma or colon between the braces.
PLACEHOLDER = re.compile(r"\{([^{}\s\"',:]+)\}")

STORE_VARIABLE = "KVPOOL_STORE"
"""The option `store` of an engine, in its environment."""
EXIT_MARGIN_S = 10
"""Of the time to stop, what an engine is left with after it has drained."""


@dataclass(frozen=True, slots=True)
class Placeholders:
    """What a template may, and one of which it must, name."""

    values: frozenset[str]
    lists: frozenset[str]
    one_of: tuple[str, ...]


ENGINE_PLACEHOLDERS = Placeholders(
    values=frozenset(
        {"host", "kv_transfer_config", "model", "port", "replica_id", "role", "shutdown_timeout_s"}
    ),
    lists=frozenset({"extra..."}),
    one_of=("port",),
)
HOST_PLACEHOLDERS = Placeholders(
    values=frozenset({"command", "host"}),
    lists=frozenset({"command..."}),
    one_of=("command", "command..."),
)


def _names(template: Sequence[str]) -> set[str]:
    """The placeholders in a template."""
    return {name for part in template for name in PLACEHOLDER.findall(part)}


def _render(
    template: Sequence[str], values: Mapping[str, str], lists: Mapping[str, Sequence[str]]
) -> tuple[str, ...]:
    """A template's arguments with everything put in."""
    rendered: list[str] = []
    for argument in template:
        whole = PLACEHOLDER.fullmatch(argument)
        if whole and whole[1] in lists:
            rendered.extend(lists[whole[1]])
        else:
            rendered.append(PLACEHOLDER.sub(lambda found: values[found[1]], argument))
    return tuple(rendered)


def template_error(template: Sequence[str], placeholders: Placeholders) -> str:
    """What is wrong with a template; "" if it can be used."""
    known = placeholders.values | placeholders.lists
    for argument in template:
        for name in PLACEHOLDER.findall(argument):
            if name not in known:
                return f"unknown {{{name}}}; {nearest(name, known)}"
            if name in placeholders.lists and argument != f"{{{name}}}":
                return (
                    f"{{{name}}} stands for several arguments, so it must be one of its own, not a "
                    f"part of {argument!r}"
                )
    if _names(template).isdisjoint(placeholders.one_of):
        wanted = " or ".join(f"{{{name}}}" for name in placeholders.one_of)
        return f"{wanted} is missing"
    return ""


DEFAULT_ENGINE_COMMAND = (
    *("vllm", "serve", "{model}", "--host", "{host}", "--port", "{port}"),
    *("--shutdown-timeout", "{shutdown_timeout_s}"),
    *("--kv-transfer-config", "{kv_transfer_config}", "{extra...}"),
)


def launch_errors(launch: "LaunchConfig") -> Iterator[str]:
    """What would keep an engine from being started, or not reach it."""
    if error := template_error(launch.command, ENGINE_PLACEHOLDERS):
        yield f"[launch] command: {error}"
    names = _names(launch.command)
    if launch.args and "extra..." not in names:
        yield "[launch] command: {extra...} is missing, so args are lost"
    if "kv_transfer_config" in names:
        try:
            msgspec.json.decode(launch.kv_transfer_config, type=dict)
        except UNREADABLE:
            yield (
                "[launch] kv_transfer_config is no JSON object, so no engine would start; "
                f"it is {launch.kv_transfer_config!r}"
            )


def store_errors(launch: "LaunchConfig", hosts: Sequence[HostConfig]) -> Iterator[str]:
    """Engines of several machines that would each keep files of their own: the default."""
    if len({each.address for each in hosts}) < 2 or "kv_transfer_config" not in _names(
        launch.command
    ):
        return
    try:
        options = pool_options(launch.kv_transfer_config)
    except ValueError:
        return  # `launch_errors` says so, or vLLM
    bare = [each.name for each in hosts if STORE_VARIABLE not in each.env]
    if options is not None and "store" not in options and bare:
        yield (
            f"[launch] kv_transfer_config names no store, so engines of the hosts "
            f"{', '.join(bare)} would share with none of another host; name a `store` that all "
            "hosts reach in its kv_connector_extra_config (mooncake://, s3://, or file:// on a "
            "file system that all hosts mount)"
        )


def engine_command(launch: "LaunchConfig", host: HostConfig, engine: EngineRecord) -> list[str]:
    """An engine's command, as it is run on its host."""
    values = {
        "host": host.address,
        "kv_transfer_config": launch.kv_transfer_config,
        "model": launch.model,
        "port": str(engine.port),
        "replica_id": engine.replica_id,
        "role": engine.role,
        # In which it ends its requests after SIGTERM; 0: it aborts them.
        "shutdown_timeout_s": str(max(int(engine.stop_timeout_s) - EXIT_MARGIN_S, 0)),
    }
    variables = [f"{name}={value}" for name, value in host.env.items()]
    command = _render(launch.command, values, {"extra...": launch.args})
    return ["env", *variables, *command] if variables else [*command]


def command_on(host: HostConfig, arguments: Sequence[str]) -> tuple[str, ...]:
    """What is run here in order to run `arguments` on a host.

    In `{command}` they are one argument, quoted for a shell (ssh); in `{command...}` each is one
    (docker exec).
    """
    if not host.command:
        return tuple(arguments)
    values = {"command": shlex.join(arguments), "host": host.address}
    return _render(host.command, values, {"command...": arguments})
