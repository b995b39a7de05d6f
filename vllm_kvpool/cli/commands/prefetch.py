"""`kvpool prefetch`."""

import contextlib
import json
import logging
import os
import sys

import click
import msgspec

from vllm_kvpool.cli.common import prompt
from vllm_kvpool.cli.common.command import LOG_FORMAT, LONGEST_S, Command, Seconds, hide_native_logs
from vllm_kvpool.cli.common.stores import manifest_named, opened
from vllm_kvpool.cli.common.tables import size_text
from vllm_kvpool.cli.common.tokenizer import PromptOptions, prompt_options
from vllm_kvpool.config import read_engine_config
from vllm_kvpool.prefetch import bring, chosen, near_share
from vllm_kvpool.sizes import parse_size
from vllm_kvpool.storage.backends import open_store


@click.command("prefetch", cls=Command)
@click.option(
    "--kv-transfer-config", "pool", required=True, help="What the engine is started with."
)
@click.option("--max-bytes", "size", default="4GiB", show_default=True, help="To move at most.")
@click.option(
    "--max-seconds",
    default=600.0,
    show_default=True,
    type=Seconds(0, LONGEST_S),
    help="It ends after so long.",
)
@click.option("--namespace", required=True, help="Of the prompt, as in `kvpool explain`.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@prompt_options
def prefetch_command(
    pool: str,
    size: str,
    max_seconds: float,
    namespace: str,
    as_json: bool,
    given: PromptOptions,
) -> None:
    """Bring the cells of a prompt into the files of this host.

    Exits with 1 if a store fails to read or write cells, or still hangs 2 s after --max-seconds.
    Files without room are no failure.
    """
    hide_native_logs()
    logging.basicConfig(level="INFO", format=LOG_FORMAT)
    max_bytes = parse_size(size, "--max-bytes")
    tokens = given.tokens()
    if tokens is None:
        raise click.UsageError("name a prompt: --tokens, --text or --messages")
    near, far = chosen(read_engine_config(pool))
    with opened(far) as stores, contextlib.closing(open_store(near, segment=False)) as files:
        manifest = manifest_named(stores, namespace)
        cells = prompt.names_of(manifest, tokens, given.cache_salt).cells()
        num_cells = len(cells.chunks) * len(cells.key_prefixes)
        with click.progressbar(length=num_cells, file=sys.stderr, label="cells") as bar:
            done, has_ended = bring(
                files,
                [each.store for each in stores],
                cells,
                near_share(near, max_bytes),
                max_seconds,
                lambda batch: bar.update(batch.num_cells),
            )
        words = (
            f"{len(cells.chunks)} chunks, {num_cells} cells: {done.brought} brought "
            f"({size_text(done.nbytes)}), {done.near} were here, {done.missing} not found, "
            f"{done.failed} not read: a store failed, {done.bad} damaged, "
            f"{done.unkept} not kept, {done.unwritten} not written: the files failed"
        )
        click.echo(json.dumps(msgspec.to_builtins(done)) if as_json else words)
        if not has_ended:  # a thread hangs in a store
            sys.stdout.flush()
            os._exit(1)
    if done.failed or done.unwritten:
        raise SystemExit(1)
