"""`kvpool top`."""

import contextlib
import itertools
import json

import click
import msgspec

from vllm_kvpool.cli.common.command import LONGEST_S, Command, Seconds, extra
from vllm_kvpool.cli.common.tables import is_on_terminal, show_live


@click.command("top", cls=Command)
@click.argument("engines", nargs=-1, required=True)
@click.option("--every", default=2.0, show_default=True, type=Seconds(0.1, LONGEST_S))
@click.option("--count", type=click.IntRange(1), help="End after so many intervals.")
@click.option("--json", "as_json", is_flag=True, help="Print a line of JSON for each interval.")
def top_command(engines: tuple[str, ...], every: float, count: int | None, as_json: bool) -> None:
    """Show what the pool does in engines right now.

    ENGINES are the URLs of their servers. Exits with 1 if none could be read at the end.
    """
    with extra("top"):
        from vllm_kvpool.cli import top
        from vllm_kvpool.cli.common.engine_metrics import check_url
    for url in engines:
        check_url(url)
    last: list[top.EngineState] = []
    states = itertools.islice(top.watch(engines, every), count)
    with contextlib.suppress(KeyboardInterrupt):
        if as_json or not is_on_terminal():
            for last in states:
                words = "\n".join(table.as_text() for table in top.tables(last))
                click.echo(json.dumps(msgspec.to_builtins(last)) if as_json else words)
        else:
            show_live(top.tables(last := each) for each in states)
    if last and all(each.error for each in last):
        raise SystemExit(1)
