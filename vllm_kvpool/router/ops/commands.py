"""What an engine is started with: templates of commands, and what is put into them (pure).

A template is a list of arguments. `{name}` in it stands for a value; a placeholder of several
arguments stands alone in one. Braces around anything else, such as JSON, are left as they are.
A template is checked when the configuration is read, so that nothing can fail when it is used.
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from vllm_kvpool.errors import ConfigError, nearest

# What cannot be JSON: no quote, space, comma or colon between the braces.
PLACEHOLDER = re.compile(r"\{([^{}\s\"',:]+)\}")

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


@dataclass(frozen=True, slots=True)
class CommandTemplate:
    """Arguments with placeholders. Made by `read_template`, which checks them."""

    arguments: tuple[str, ...]

    def names(self) -> frozenset[str]:
        """The placeholders in it."""
        return frozenset(name for part in self.arguments for name in PLACEHOLDER.findall(part))

    def render(
        self, values: Mapping[str, str], lists: Mapping[str, Sequence[str]]
    ) -> tuple[str, ...]:
        """The arguments with everything put in."""
        rendered: list[str] = []
        for argument in self.arguments:
            whole = PLACEHOLDER.fullmatch(argument)
            if whole and whole[1] in lists:
                rendered.extend(lists[whole[1]])
            else:
                rendered.append(PLACEHOLDER.sub(lambda found: values[found[1]], argument))
        return tuple(rendered)


def read_template(
    option: str, arguments: Sequence[str], placeholders: Placeholders
) -> CommandTemplate:
    """A template as it stands in `option`; ConfigError says what is wrong with it."""
    template = CommandTemplate(tuple(arguments))
    if not arguments or not all(isinstance(argument, str) for argument in arguments):
        raise ConfigError(f"{option}: a command is a list of arguments, such as ['vllm', 'serve']")
    known = placeholders.values | placeholders.lists
    for argument in arguments:
        for name in PLACEHOLDER.findall(argument):
            if name not in known:
                raise ConfigError(f"{option}: unknown {{{name}}}; {nearest(name, known)}")
            if name in placeholders.lists and argument != f"{{{name}}}":
                raise ConfigError(
                    f"{option}: {{{name}}} stands for several arguments, so it must be "
                    f"one of its own, not a part of {argument!r}"
                )
    if template.names().isdisjoint(placeholders.one_of):
        wanted = " or ".join(f"{{{name}}}" for name in placeholders.one_of)
        raise ConfigError(f"{option}: {wanted} is missing")
    return template


DEFAULT_ENGINE_COMMAND = (
    *("vllm", "serve", "{model}", "--host", "{host}", "--port", "{port}"),
    *("--shutdown-timeout", "{shutdown_timeout_s}"),
    *("--kv-transfer-config", "{kv_transfer_config}", "{extra...}"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchHost:
    """A machine on which engines are started."""

    name: str
    address: str = "127.0.0.1"
    """Where its engines are reached; `{host}` in commands."""
    prefix: CommandTemplate | None = None
    """How a command is run there; None: it is this machine. In `{command}` the whole command is
    one argument, quoted for a shell (ssh); in `{command...}` it is one for each (docker exec)."""

    def command(self, arguments: Sequence[str]) -> tuple[str, ...]:
        """What is run here in order to run `arguments` there."""
        if self.prefix is None:
            return tuple(arguments)
        values = {"command": shlex.join(arguments), "host": self.address}
        return self.prefix.render(values, {"command...": arguments})


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSpec:
    """How to start one engine."""

    replica_id: str
    host: LaunchHost
    port: int
    role: str
    model: str
    log_path: Path
    """What it prints, on its host. A former one is kept beside it, as `.1`."""
    template: CommandTemplate
    kv_transfer_config: str
    extra: tuple[str, ...]
    environment: Mapping[str, str]
    """Added to what the engine inherits. Not for secrets: it is part of a command line."""
    stop_timeout_s: float
    """From SIGTERM to SIGKILL; it has `shutdown_timeout_s` of it to drain."""

    @property
    def shutdown_timeout_s(self) -> int:
        """Seconds in which the engine ends its requests after SIGTERM; 0: it aborts them."""
        return max(int(self.stop_timeout_s) - EXIT_MARGIN_S, 0)

    def command(self) -> tuple[str, ...]:
        """The engine's command, as it is run on its host."""
        values = {
            "host": self.host.address,
            "kv_transfer_config": self.kv_transfer_config,
            "model": self.model,
            "port": str(self.port),
            "replica_id": self.replica_id,
            "role": self.role,
            "shutdown_timeout_s": str(self.shutdown_timeout_s),
        }
        variables = [f"{name}={value}" for name, value in self.environment.items()]
        command = self.template.render(values, {"extra...": self.extra})
        return ("env", *variables, *command) if variables else command


def check_launch(spec: LaunchSpec) -> None:
    """ConfigError if a part of the configuration would not reach the engine."""
    names = spec.template.names()
    if spec.extra and "extra..." not in names:
        raise ConfigError("launch.command: {extra...} is missing, so extra arguments are lost")
    if "kv_transfer_config" in names:
        try:
            msgspec.json.decode(spec.kv_transfer_config, type=dict)
        except (msgspec.DecodeError, UnicodeError):
            raise ConfigError(
                "[launch] kv_transfer_config is no JSON object, so no engine would start; "
                f"it is {spec.kv_transfer_config!r}"
            ) from None
