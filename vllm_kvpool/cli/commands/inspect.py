"""`kvpool inspect`."""

import sys

import click

from vllm_kvpool.cli import inspect
from vllm_kvpool.cli.common.command import Command, extra
from vllm_kvpool.cli.common.stores import StoreOptions, opened, store_options

PROGRESS_STEP = 1000  # chunks


@click.command("inspect", cls=Command)
@click.option(
    "--details",
    "in_detail",
    is_flag=True,
    help="Also hits, ages and pins by kind of layer, and the largest prefixes; reads a page of a "
    "file for each chunk, which takes minutes for a million.",
)
@click.option(
    "--engine",
    "engines",
    multiple=True,
    help="The URL of a running engine: also what its pool has loaded from each tier, and what its "
    "host memory holds; may be repeated.",
)
@store_options
def inspect_command(in_detail: bool, engines: tuple[str, ...], stores: StoreOptions) -> None:
    """Show what stores hold, by namespace.

    Hits of a store are the cells that engines have read of what is there now; only file:// counts
    them. Those of other tiers are counted by running engines: name them with --engine.
    """
    asked = []
    if engines:
        with extra("top"):
            from vllm_kvpool.cli.common.engine_metrics import scrape
        asked = [inspect.engine_tiers(url, scrape(url)) for url in engines]
    with opened(stores.tiers().stores if engines else stores.stores()) as each:
        found = inspect.contents(each)
        if in_detail:
            count = sum(row["chunks"] or 0 for one in found for row in one["namespaces"] or ())
            with click.progressbar(
                length=count, file=sys.stderr, label="chunks", update_min_steps=PROGRESS_STEP
            ) as bar:
                for one, store in zip(found, each, strict=True):
                    one |= inspect.details(store, lambda: bar.update(1))
    if stores.tiers().host.nbytes and not engines:
        found.insert(0, inspect.host_memory())
    found += asked
    stores.print(found, inspect.as_text(found))
