"""The command `kvpool`."""

import logging
from pathlib import Path

import click

from vllm_kvpool.errors import ConfigError
from vllm_kvpool.router.load_command import load

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


@click.group()
def main() -> None:
    """Tools around the pool: the router of a disaggregated deployment."""


@main.command()
@click.option(
    "--config", "path", required=True, type=click.Path(path_type=Path), help="A TOML file."
)
@click.option("--check", is_flag=True, help="Say whether the file will do, and start nothing.")
@click.option(
    "--log-level",
    default="info",
    type=click.Choice(["debug", "info", "warning", "error"]),
    show_default=True,
)
def router(path: Path, check: bool, log_level: str) -> None:
    """One address in front of many engines that share a pool."""
    # Here, and not above: other commands do without what the router needs.
    from vllm_kvpool.router.config import load_config
    from vllm_kvpool.router.run import serve
    from vllm_kvpool.router.settings import controller_of, launch_hosts

    logging.basicConfig(level=log_level.upper(), format=LOG_FORMAT)
    try:
        config = load_config(path)
        controller_of(config)
        launch_hosts(config)
        if check:
            click.echo(f"{path} will do")
            return
        serve(config)
    except ConfigError as error:
        raise click.ClickException(str(error)) from None


main.add_command(load)


if __name__ == "__main__":
    main()
