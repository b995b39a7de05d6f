"""The command `kvpool`."""

import contextlib
import itertools
import json
import logging
import math
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import click
import msgspec
from click.core import ParameterSource

from vllm_kvpool.cli import doctor, explain, inspect, retention
from vllm_kvpool.cli.common import prompt
from vllm_kvpool.cli.common.start_line import engine_arguments, transfer_config
from vllm_kvpool.cli.common.stores import (
    NamedStore,
    StoreOptions,
    manifest_named,
    opened,
    store_options,
)
from vllm_kvpool.cli.common.tables import is_on_terminal, show_live, size_text
from vllm_kvpool.cli.common.tokenizer import (
    PromptOptions,
    is_engine,
    prompt_options,
    tokenize,
)
from vllm_kvpool.cli.doctor import Finding, Status
from vllm_kvpool.cli.retention import StoreAnswer
from vllm_kvpool.client import DEFAULT_PORT
from vllm_kvpool.config import read_engine_config
from vllm_kvpool.errors import ConfigError, StoreError
from vllm_kvpool.identity.chunk_hash import tenant_of
from vllm_kvpool.identity.keys import is_namespace
from vllm_kvpool.sizes import parse_size

PROGRESS_STEP = 1000  # chunks
LONGEST_S = 366 * 86_400.0  # threads cannot wait for centuries
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class _Command(click.Command):
    """A command that refuses an empty value, as an unset variable of a shell leaves it: `purge
    --tenant "$TENANT"` must not mean all tenants."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        rest = super().parse_args(ctx, args)
        if ctx.resilient_parsing:  # a shell completes the line
            return rest
        for name, param in ((each.name or "", each) for each in self.params if each.nargs == 1):
            value = ctx.params.get(name)
            is_typed = ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE
            if is_typed and "" in (value if isinstance(value, tuple) else (value,)):
                raise click.BadParameter("it is empty; give a value, or leave it out", ctx, param)
        return rest


class _Seconds(click.FloatRange):
    """Seconds that a thread can wait."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        seconds = float(super().convert(value, param, ctx))
        if math.isnan(seconds):
            self.fail(f"{value} is no number of seconds", param, ctx)
        return seconds


class _Commands(click.Group):
    """Commands whose errors of configuration and of stores are shown as messages."""

    command_class = _Command

    def main(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().main(*args, **kwargs)
        except OSError as error:  # such as a full disk behind the output
            raise SystemExit(f"Error: {error}") from None

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (ConfigError, StoreError) as error:
            raise click.ClickException(str(error)) from None


@contextlib.contextmanager
def _extra(name: str) -> Iterator[None]:
    """Import what an extra of the package brings; ConfigError, with what to install."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error}; run: pip install vllm-kvpool[{name}]") from None


@click.group(cls=_Commands)
@click.version_option(package_name="vllm-kvpool", prog_name="kvpool")
def main() -> None:
    """Tools around a pool of KV cache: what is in it, why engines share nothing, the router."""


@main.command("router")
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
    """One address in front of many engines that share a pool."""
    # Here, and not above: other commands do without what the router needs.
    with _extra("router"):
        from vllm_kvpool.router.config import load_config, reload_config
        from vllm_kvpool.router.process import serve
        from vllm_kvpool.router.run import admin_token

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


@main.command("prefetch")
@click.option(
    "--kv-transfer-config", "pool", required=True, help="What the engine is started with."
)
@click.option("--max-bytes", "size", default="4GiB", show_default=True, help="To move at most.")
@click.option(
    "--max-seconds",
    default=600.0,
    show_default=True,
    type=_Seconds(0, LONGEST_S),
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
    """Bring the cells of a prompt into the files of this host."""
    from vllm_kvpool.prefetch import bring, chosen, near_share
    from vllm_kvpool.storage.backends import open_store

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
                lambda batch: bar.update(batch.brought + batch.near + batch.missing),
            )
        words = (
            f"{len(cells.chunks)} chunks, {num_cells} cells: {done.brought} brought "
            f"({size_text(done.nbytes)}), {done.near} were here, {done.missing} not found, "
            f"{done.bad} damaged, {done.unkept} not kept"
        )
        click.echo(json.dumps(msgspec.to_builtins(done)) if as_json else words)
        if not has_ended:  # a thread hangs in a store
            sys.stdout.flush()
            os._exit(0)


@main.command("inspect")
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
        with _extra("top"):
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


def _keys_of(
    stores: Sequence[NamedStore], namespace: str, tokens: Sequence[int], cache_salt: str
) -> list[str]:
    manifest = manifest_named(stores, namespace)
    return prompt.names_of(manifest, tokens, cache_salt).keys()


def _print(answers: Sequence[StoreAnswer], stores: StoreOptions) -> None:
    """Exits with 1 if no store could do it."""
    stores.print(answers, retention.as_text(answers))
    if answers and all(each.num is None for each in answers):
        raise SystemExit(1)


@main.command("serve")
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
    with _extra("serve"):
        from vllm_kvpool.cli import serve
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


@main.command("purge")
@click.argument("namespaces", nargs=-1, required=True)
@click.option("--yes", is_flag=True, help="Do not ask.")
@prompt_options
@click.option("--older-than", "age", help="Only cells written longer ago: 90s, 30m, 12h, 7d, 2w.")
@click.option(
    "--tenant", default="", help="Only cells of this tenant, as `kvpool inspect` shows it."
)
@store_options
def purge_command(
    namespaces: tuple[str, ...],
    yes: bool,
    given: PromptOptions,
    age: str | None,
    tenant: str,
    stores: StoreOptions,
) -> None:
    """Remove the cells of NAMESPACES from stores.

    NAMESPACES are whole names. Without other options all of their cells are removed; with a prompt
    those of it, with --cache-salt or --tenant alone those of its requests, with --older-than those
    written longer ago. Engines that run may save new ones; what they have in host memory stays.
    """
    for name in namespaces:
        if not is_namespace(name):
            raise click.UsageError(f"{name!r} is no namespace; `kvpool inspect` shows their names")
    tokens, salt = given.tokens(), given.cache_salt
    if tokens is not None and (age is not None or len(namespaces) != 1):
        raise click.UsageError("a prompt needs one namespace, and no --older-than")
    if [bool(salt and tokens is None), bool(tenant), age is not None].count(True) > 1:
        raise click.UsageError("give one of --cache-salt, --tenant and --older-than")
    if tenant and tokens is not None:
        raise click.UsageError("give a prompt or --tenant")
    age_s = None if age is None else retention.parse_duration_s(age)
    specs = stores.stores()
    if not yes:
        what = ", ".join(namespaces)
        what = what if tokens is None else f"a prompt of {what}"
        what = f"what has the given salt of {what}" if salt else what
        what = f"what is {tenant}'s of {what}" if tenant else what
        what = what if age is None else f"what is older than {age} of {what}"
        where = ", ".join(spec.url for spec in specs)
        click.confirm(f"remove {what} from {where}?", abort=True, err=True)
    with opened(specs, writable=True) as each:
        if tokens is not None:
            answers = retention.remove(each, _keys_of(each, namespaces[0], tokens, salt))
        elif salt or tenant:
            answers = retention.remove_tenant(each, namespaces, tenant or tenant_of(salt))
        elif age_s is not None:
            answers = retention.remove_older(each, namespaces, age_s)
        else:
            answers = retention.remove_namespaces(each, namespaces)
    _print(answers, stores)


@main.command("pin")
@click.argument("namespace")
@prompt_options
@click.option("--for", "duration", help="How long: 90s, 30m, 12h, 7d, 2w.")
@click.option("--end", is_flag=True, help="End the prompt's pins.")
@store_options
def pin_command(
    namespace: str,
    given: PromptOptions,
    duration: str | None,
    end: bool,
    stores: StoreOptions,
) -> None:
    """Protect a stored prompt from eviction for a time.

    The beginning of NAMESPACE or of its digest is enough. What is not stored yet is not pinned.
    """
    if (duration is None) != end:
        raise click.UsageError("give --for or --end")
    tokens = given.tokens()
    if tokens is None:
        raise click.UsageError("give a prompt: --tokens, --text or --messages")
    seconds = 0.0 if duration is None else retention.parse_duration_s(duration)
    with opened(stores.stores(), writable=True) as each:
        answers = retention.pin(each, _keys_of(each, namespace, tokens, given.cache_salt), seconds)
    _print(answers, stores)


@main.command("doctor")
@click.argument("engine", nargs=-1)
@store_options
def doctor_command(engine: tuple[str, ...], stores: StoreOptions) -> None:
    """Check this machine, its stores and engines.

    Each line says what was checked, how it went, and what to do where it failed. With ENGINE also
    what it shares with others and what not, with the option to change: the URL of a running engine,
    or its start line behind --, whose stores are then meant:

        kvpool doctor -- vllm serve MODEL --kv-transfer-config '{...}'

    Exits with 1 if a check failed.
    """
    is_line = bool(engine) and "://" not in engine[0]
    if is_line and len(engine) == 1:
        raise click.UsageError(
            f"{engine[0]!r} is neither http://HOST:PORT nor a start line such as vllm serve MODEL"
        )
    arguments = engine_arguments(engine) if is_line else ()
    if is_line and not stores.urls and stores.kv_transfer_config is None:
        stores = replace(stores, kv_transfer_config=transfer_config(arguments))
    found = []
    for finding in _findings(stores, () if is_line else engine, arguments):
        found.append(finding)
        if not stores.as_json:
            click.echo(f"{finding.status.value:8}{finding.check}: {finding.text}")
    if stores.as_json:
        stores.print(found, "")
    if any(finding.status is Status.FAILED for finding in found):
        raise SystemExit(1)


def _findings(
    given: StoreOptions, urls: Sequence[str], arguments: Sequence[str]
) -> Iterator[Finding]:
    specs = given.tiers()
    yield from doctor.examine_machine(given.config(), specs)
    for spec in specs.stores:
        yield from doctor.examine_store(spec)
    if not (urls or arguments):
        return
    with _extra("top"):
        from vllm_kvpool.cli import sharing
    with opened(specs.stores, skip=True) as stores:
        for url in urls:
            yield from sharing.examine_engine(url, stores)
        if arguments:
            yield from sharing.examine_start_line(arguments, stores)


@main.command("top")
@click.argument("engines", nargs=-1, required=True)
@click.option("--every", default=2.0, show_default=True, type=_Seconds(0.1, LONGEST_S))
@click.option("--count", type=click.IntRange(1), help="End after so many intervals.")
@click.option("--json", "as_json", is_flag=True, help="Print a line of JSON for each interval.")
def top_command(engines: tuple[str, ...], every: float, count: int | None, as_json: bool) -> None:
    """Show what the pool does in engines right now.

    ENGINES are the URLs of their servers. Exits with 1 if none could be read at the end.
    """
    with _extra("top"):
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


@main.command("explain")
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
    if request_id is not None and log is not None:
        logged = explain.reports(log, request_id)
        stores.print(logged, explain.requests_text(logged))
        return
    tokens = given.tokens()
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
