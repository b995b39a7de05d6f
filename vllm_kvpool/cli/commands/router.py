"""`kvpool router`."""

import logging
from functools import partial
from pathlib import Path

import click

from vllm_kvpool.cli.common.command import LOG_FORMAT, Command, extra


@click.command("router", cls=Command)
@click.version_option(package_name="vllm-kvpool", prog_name="kvpool")
@click.option("--config", "given", required=True, type=click.Path(), help="A TOML file.")
@click.option("--check", is_flag=True, help="Say what is wrong with the file, and start nothing.")
@click.option(
    "--log-level",
    default="info",
    type=click.Choice(["debug", "info", "warning", "error"]),
    show_default=True,
)
def router_command(given: str, check: bool, log_level: str) -> None:
    """Serve many engines that share a pool at one address."""
    # Here, and not above: other commands do without what the router needs.
    with extra("router"):
        from vllm_kvpool.router.config import load_config, reload_config
        from vllm_kvpool.router.run import admin_token, serve

    logging.basicConfig(level=log_level.upper(), format=LOG_FORMAT)
    path = Path(given)
    config = load_config(path)
    if check:
        # One that is not there yet is written at the start.
        if config.admin.token_file and Path(config.admin.token_file).exists():
            admin_token(config)
        click.echo(f"{path} is valid")
    else:
        serve(config, partial(reload_config, path))
