"""`kvpool serve`."""

import json
import logging
from collections.abc import Sequence

import click

from vllm_kvpool.cli.common.command import LOG_FORMAT, Command, extra
from vllm_kvpool.cli.common.stores import StoreOptions, store_options
from vllm_kvpool.cli.common.tokenizer import is_engine, tokenize
from vllm_kvpool.client import DEFAULT_PORT


@click.command("serve", cls=Command)
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen at.")
@click.option("--port", type=click.IntRange(0, 65_535), default=DEFAULT_PORT, show_default=True)
@click.option(
    "--tokenizer",
    help="For prompts given as text: URL of an engine or router, or a model's directory.",
)
@click.option(
    "--model",
    "models",
    multiple=True,
    metavar="NAME=NAMESPACE",
    help="A namespace of a model that engines serve under another name than its own, or whose "
    "store cannot list namespaces; may be repeated.",
)
@click.option(
    "--allowed-host",
    "hosts",
    multiple=True,
    metavar="NAME",
    help="A name by which it is reached, beside addresses and localhost; may be repeated. Without "
    "any, programs may use all names, unless it listens on loopback.",
)
@store_options
def serve_command(
    host: str,
    port: int,
    tokenizer: str | None,
    models: Sequence[str],
    hosts: Sequence[str],
    stores: StoreOptions,
) -> None:
    """Answer over HTTP what stores have of a prompt.

    POST /lookup, GET /stats, GET /healthz.
    """
    with extra("serve"):
        from vllm_kvpool.cli import serve
        from vllm_kvpool.router.dataplane.origins import is_host
    for name in hosts:
        if not is_host(name):
            raise click.UsageError(f"--allowed-host {name}: write a name, without scheme and port")
    by_model: dict[str, list[str]] = {}
    for given in models:
        name, equals, namespace = given.partition("=")
        if not (name and equals and namespace):
            raise click.UsageError(f"--model {given}: write NAME=NAMESPACE")
        by_model.setdefault(name, []).append(namespace)
    logging.basicConfig(level="INFO", format=LOG_FORMAT)
    guarded = serve.guarded_stores(stores.stores())

    def started(url: str) -> None:
        names = [each.url for each in guarded]
        where = {"url": url, "stores": names}
        click.echo(json.dumps(where) if stores.as_json else f"{url} serves {', '.join(names)}")

    try:
        if tokenizer is not None and not is_engine(tokenizer):
            tokenize("", tokenizer)  # the first request need not wait for its import
        api = serve.LookupApi(guarded, tokenizer, models=by_model)
        serve.serve(api, host, port, started, hosts)
    finally:
        for each in guarded:
            each.store.close()
