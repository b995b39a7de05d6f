"""The commands of `kvpool`, imported."""

import click

from vllm_kvpool.cli import main
from vllm_kvpool.cli.main import COMMANDS


def all_commands() -> dict[str, click.Command]:
    """Return every command by its name."""
    with click.Context(main) as context:
        found = {name: main.get_command(context, name) for name in COMMANDS}
    return {name: command for name, command in found.items() if command is not None}
