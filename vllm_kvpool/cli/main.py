"""The command `kvpool`: a table of its commands, each imported when it runs."""

from importlib import import_module
from typing import Any, NamedTuple, cast

import click

from vllm_kvpool.cli.common.command import HELP_OPTIONS
from vllm_kvpool.errors import ConfigError, StoreError


class Entry(NamedTuple):
    """A command as `kvpool --help` lists it, without an import of its module."""

    module: str
    """Below `vllm_kvpool.cli.commands`; the command is `<name>_command` there."""
    summary: str
    """The first sentence of the command's help."""


COMMANDS = {
    "doctor": Entry("doctor", "Check this machine, its stores and engines."),
    "explain": Entry("explain", "Say why nothing is found, or nothing is shared."),
    "inspect": Entry("inspect", "Show what stores hold, by namespace."),
    "pin": Entry("retention", "Protect a stored prompt from eviction for a time."),
    "prefetch": Entry("prefetch", "Bring the cells of a prompt into the files of this host."),
    "purge": Entry("retention", "Remove the cells of NAMESPACES from stores."),
    "router": Entry("router", "Serve many engines that share a pool at one address."),
    "serve": Entry("serve", "Answer over HTTP what stores have of a prompt."),
    "top": Entry("top", "Show what the pool does in engines right now."),
    "try": Entry("try_model", "Measure a model with and without the pool, and say what to set."),
}


class _Commands(click.Group):
    """The commands of the table; their errors of configuration and stores become messages."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        entry = COMMANDS.get(name)
        if entry is None:
            return None
        module = import_module(f"vllm_kvpool.cli.commands.{entry.module}")
        return cast("click.Command", getattr(module, f"{name}_command"))

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands by the table: help must not wait for their imports."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.summary) for name, entry in COMMANDS.items()])

    def main(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().main(*args, **kwargs)
        except OSError as error:  # such as a full disk behind the output
            raise SystemExit(f"Error: {error}") from None

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (ConfigError, StoreError) as error:
            raise click.ClickException(str(error)) from None


@click.group(cls=_Commands, context_settings=HELP_OPTIONS)
@click.version_option(package_name="vllm-kvpool", prog_name="kvpool")
def main() -> None:
    """Tools around a pool of KV cache: what is in it, why engines share nothing, the router."""
