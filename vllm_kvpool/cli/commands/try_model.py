"""`kvpool try`."""

import contextlib
import json
import os
import shlex
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import quote

import click
import msgspec

from vllm_kvpool.cli.common.command import Command, extra, hide_native_logs
from vllm_kvpool.cli.common.start_line import option_of
from vllm_kvpool.config import DEFAULT_STORE_SIZE
from vllm_kvpool.errors import ConfigError

CHOSEN = ("--model", "--host", "--port", "--uds", "--api-key", "--ssl-keyfile", "--config")
"""Options of `vllm serve` that the command sets, or that would hide the engines from it."""


@click.command("try", cls=Command)
@click.argument("model")
@click.argument("engine", nargs=-1)
@click.option(
    "--store",
    "urls",
    multiple=True,
    help="The URL of a store; may be repeated, nearest first. Default: files in a temporary "
    "directory, removed at the end.",
)
@click.option("--trace", help="Replay a trace of Mooncake's format instead of conversations.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON; the report goes to stderr.")
def try_command(
    model: str,
    engine: Sequence[str],
    urls: Sequence[str],
    trace: str | None,
    as_json: bool,
) -> None:
    """Measure a model with and without the pool, and say what to set.

    Starts two engines of MODEL on this machine at the same time. Options of vllm serve follow --:

        kvpool try MODEL --store file:///nvme/kvpool -- --gpu-memory-utilization 0.4

    The engine with the pool gets the --kv-transfer-config behind the --, or one that names the
    stores. Takes minutes; progress goes to stderr.
    """
    hide_native_logs()
    _check_input(model, engine)
    with extra("top"):
        from vllm_kvpool.cli import try_model, try_report, try_workload
    requests = [] if trace is None else try_workload.read_trace(trace)
    began = time.monotonic()

    def say(text: str) -> None:
        click.echo(f"[{time.monotonic() - began:4.0f} s] {text}", err=True)

    with (
        _exits_by_signal(),
        tempfile.TemporaryDirectory(prefix="kvpool-try-") as directory,
    ):
        pool = Path(directory, "pool")
        pool.mkdir()
        own_store = f"file://{quote(str(pool))}?size={DEFAULT_STORE_SIZE}"
        arguments, transfer_config = try_model.split_pool(engine, urls, own_store)
        setup = try_model.examine_pool(transfer_config, say)
        trial = try_model.Trial(model, arguments, transfer_config, setup.chunk_tokens, requests)
        commands = {side: shlex.join(trial.command(side, 0)) for side in try_model.SIDES}
        for side, command in commands.items():
            say(f"{side}: {command}")
        turns, counts = try_model.measure(trial, Path(directory), say)
    rows = try_report.rows_of(turns)
    advice = try_report.advice(rows, counts, setup)
    click.echo(try_report.as_text(rows, advice), err=as_json)
    if as_json:
        found = {"commands": commands, "rows": rows, "advice": advice, "setup": setup}
        found |= {"counts": counts, "turns": turns}
        click.echo(json.dumps(msgspec.to_builtins(found), indent=2))


def _check_input(model: str, engine: Sequence[str]) -> None:
    if find_spec("vllm") is None:
        raise ConfigError("vLLM is not installed here: install kvpool into vLLM's environment")
    if model.startswith((".", "/", "~")) and not os.path.isdir(model):
        raise ConfigError(f"there is no directory {model}; give a model's directory, or its name")
    for option in CHOSEN:
        if option_of(engine, option) is not None:
            raise ConfigError(f"{option} behind --: kvpool try starts and asks its own engines")


@contextlib.contextmanager
def _exits_by_signal() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the command as Ctrl-C does: engines stop, files are removed."""

    def leave(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGHUP)}
    for each, handler in before.items():
        if handler is not signal.SIG_IGN:  # of nohup
            signal.signal(each, leave)
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
