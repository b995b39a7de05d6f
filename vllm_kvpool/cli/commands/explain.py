"""`kvpool explain`."""

from typing import TextIO

import click

from vllm_kvpool.cli import explain
from vllm_kvpool.cli.common import prompt
from vllm_kvpool.cli.common.command import Command
from vllm_kvpool.cli.common.stores import StoreOptions, manifest_named, opened, store_options
from vllm_kvpool.cli.common.tokenizer import PromptOptions, prompt_options


@click.command("explain", cls=Command)
@click.argument("namespaces", nargs=-1)
@click.option("--request", "request_id", help="A request that has run: its id or a part of it.")
@click.option(
    "--log",
    type=click.File(errors="replace"),
    help="For --request: the engine's log, or - for stdin.",
)
@prompt_options
@store_options
def explain_command(
    namespaces: tuple[str, ...],
    request_id: str | None,
    log: TextIO | None,
    given: PromptOptions,
    stores: StoreOptions,
) -> None:
    """Say why nothing is found, or nothing is shared.

    With two NAMESPACES: the values in which they differ, and what to change. With one: the same for
    each other one of its model. Without any: for all of each model.

    With a prompt and one namespace: which of its chunks the stores hold, and how many tokens an
    engine of that namespace can load.

    With --request and --log: why its tokens were loaded from the pool or not, by the log of an
    engine that has log_requests=true.

    An engine logs its namespace at the start, and the metric kvpool_info has it. The beginning of
    the name or of its digest is enough.
    """
    if len(namespaces) > 2 or (given.is_given and len(namespaces) != 1):
        raise click.UsageError("give at most two namespaces, and one with a prompt")
    if (request_id is None) != (log is None):
        raise click.UsageError("--request and --log belong together")
    if given.cache_salt and not given.is_given:
        raise click.UsageError("--cache-salt is for a prompt: --tokens, --text or --messages")
    tokens = given.tokens()
    if request_id is not None and log is not None:
        if namespaces or tokens is not None or stores.are_named:
            raise click.UsageError("--request is explained by --log alone; leave the rest out")
        logged = explain.reports(log, request_id)
        stores.print(logged, explain.requests_text(logged))
        return
    with opened(stores.stores()) as each:
        if tokens is None:
            found = explain.explanations(each, namespaces)
            words = explain.explanations_text(found, each)
            stores.print(explain.explanations_json(found), words)
            if stores.as_json and not found:
                click.echo(words, err=True)
        else:
            manifest = manifest_named(each, namespaces[0])
            held = prompt.presence(each, manifest, tokens, given.cache_salt)
            stores.print([held], prompt.as_text(held))
