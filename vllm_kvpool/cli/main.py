"""The command `kvpool`."""

import json
import logging
from functools import partial
from pathlib import Path
from typing import TextIO

import click

from vllm_kvpool.cli import doctor as examining
from vllm_kvpool.cli import explain as explaining
from vllm_kvpool.cli import inspect as inspecting
from vllm_kvpool.cli.stores import named_specs, opened, store_options
from vllm_kvpool.errors import ConfigError, StoreError
from vllm_kvpool.identity.keys import namespace_of

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


@click.group()
@click.version_option(package_name="vllm-kvpool", prog_name="kvpool")
def main() -> None:
    """Tools around the pool: what is in it, why engines share nothing, the router of a cluster."""


@main.command()
@click.version_option(package_name="vllm-kvpool", prog_name="kvpool")
@click.option(
    "--config", "path", required=True, type=click.Path(path_type=Path), help="A TOML file."
)
@click.option("--check", is_flag=True, help="Say what is wrong with the file, and start nothing.")
@click.option(
    "--stop-engines", is_flag=True, help="End the engines that a router has left running."
)
@click.option(
    "--log-level",
    default="info",
    type=click.Choice(["debug", "info", "warning", "error"]),
    show_default=True,
)
def router(path: Path, check: bool, stop_engines: bool, log_level: str) -> None:
    """One address in front of many engines that share a pool."""
    # Here, and not above: other commands do without what the router needs.
    from vllm_kvpool.router.config import load_config
    from vllm_kvpool.router.ops import replicas
    from vllm_kvpool.router.run import admin_token, serve

    logging.basicConfig(level=log_level.upper(), format=LOG_FORMAT)
    try:
        config = load_config(path)
        if check:
            # One that is not there yet is written at the start.
            if config.admin.token_file and Path(config.admin.token_file).exists():
                admin_token(config)
            click.echo(f"{path} is valid")
        elif stop_engines:
            ended = replicas.stop_engines(config)
            click.echo(f"ended: {', '.join(ended) or 'none, as none ran'}")
        else:
            serve(config, partial(load_config, path))
    except ConfigError as error:
        raise click.ClickException(str(error)) from None


@main.command()
@click.option(
    "--kv-transfer-config", "given", required=True, help="What the engine is started with."
)
@click.option("--max-bytes", default=4 << 30, show_default=True, help="Bytes to move at most.")
@click.option("--max-seconds", default=600.0, show_default=True, help="It ends after so long.")
@click.option("--finish", is_flag=True, help="Complete what the input has named before it ended.")
def prefetch(given: str, max_bytes: int, max_seconds: float, finish: bool) -> None:
    """Bring cells into the files of this host; the router starts it and names them."""
    from vllm_kvpool.prefetch.command import run

    logging.basicConfig(level="INFO", format=LOG_FORMAT)
    try:
        run(given, max_bytes, max_seconds, finish=finish)
    except ConfigError as error:
        raise click.ClickException(str(error)) from None


@main.command()
@store_options
def inspect(given: str | None, urls: tuple[str, ...], as_json: bool) -> None:
    """Show what stores hold, by namespace: chunks, cells, bytes."""
    try:
        with opened(named_specs(urls, given).stores) as stores:
            found = inspecting.contents(stores)
    except (ConfigError, StoreError) as error:
        raise click.ClickException(str(error)) from None
    click.echo(json.dumps(found, indent=2) if as_json else inspecting.as_text(found))


@main.command()
@click.argument("namespaces", nargs=-1, required=True)
@click.option("--yes", is_flag=True, help="Do not ask.")
@store_options
def purge(
    namespaces: tuple[str, ...],
    yes: bool,
    given: str | None,
    urls: tuple[str, ...],
    as_json: bool,
) -> None:
    """Remove all cells of NAMESPACES from the stores, under their whole names.

    Engines that run may save new ones; what they have in host memory stays.
    """
    for name in namespaces:
        if namespace_of(f"{name}@") != name:
            raise click.UsageError(f"{name!r} is no namespace; `kvpool inspect` shows their names")
    try:
        specs = named_specs(urls, given).stores
        if not yes:
            where = ", ".join(spec.url for spec in specs)
            click.confirm(f"remove {', '.join(namespaces)} from {where}?", abort=True, err=True)
        with opened(specs, writable=True) as stores:
            removed = {
                each.url: {name: each.store.remove_namespace(name) for name in namespaces}
                for each in stores
            }
    except (ConfigError, StoreError) as error:
        raise click.ClickException(str(error)) from None
    if as_json:
        click.echo(json.dumps(removed, indent=2))
    for url, counts in removed.items() if not as_json else ():
        for name, count in counts.items():
            click.echo(f"{url}: {name}: {count} objects removed")


@main.command()
@store_options
def doctor(given: str | None, urls: tuple[str, ...], as_json: bool) -> None:
    """Check whether this machine can use the stores, and say what to do where it cannot.

    Exits with 1 if a check failed.
    """
    try:
        specs = named_specs(urls, given)
    except ConfigError as error:
        raise click.ClickException(str(error)) from None
    found = []
    for finding in examining.examine(specs):
        found.append(finding)
        if not as_json:
            click.echo(f"{finding.status.value:8}{finding.check}: {finding.text}")
    if as_json:
        click.echo(json.dumps([{**f._asdict(), "status": f.status.value} for f in found], indent=2))
    if any(finding.status is examining.Status.FAILED for finding in found):
        raise SystemExit(1)


@main.command()
@click.argument("namespaces", nargs=-1)
@click.option(
    "--tokens",
    "tokens",
    type=click.File(),
    help="A file with a prompt's token ids, a JSON list: show what is stored of it.",
)
@click.option("--cache-salt", default="", help="The salt of that prompt's request.")
@store_options
def explain(
    namespaces: tuple[str, ...],
    tokens: TextIO | None,
    cache_salt: str,
    given: str | None,
    urls: tuple[str, ...],
    as_json: bool,
) -> None:
    """Say why engines share nothing: the values in which their NAMESPACES differ.

    With --tokens and one namespace: which chunks of a prompt the stores hold, and how many tokens
    an engine of that namespace can load.

    An engine logs its namespace at the start, and the metric kvpool_info has it. The beginning of
    the name or of its digest will do. With one namespace it is compared with all others of its
    model, without any all of each model.
    """
    if len(namespaces) > 2 or (tokens is not None and len(namespaces) != 1):
        raise click.UsageError("give at most two namespaces, and one with --tokens")
    try:
        with opened(named_specs(urls, given).stores) as stores:
            if tokens is None:
                found = explaining.explanations(stores, namespaces)
                values, text = explaining.as_json(found), explaining.as_text(found)
            else:
                from vllm_kvpool.cli import prompt

                [name] = namespaces
                manifest = explaining.manifest_named(stores, name)
                held = prompt.presence(stores, manifest, prompt.read_tokens(tokens), cache_salt)
                values, text = [prompt.as_json(held)], prompt.as_text(held)
    except (ConfigError, StoreError) as error:
        raise click.ClickException(str(error)) from None
    click.echo(json.dumps(values, indent=2) if as_json else text)


if __name__ == "__main__":
    main()
