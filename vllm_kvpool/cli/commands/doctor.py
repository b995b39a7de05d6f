"""`kvpool doctor`."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import click

from vllm_kvpool.cli import doctor
from vllm_kvpool.cli.common.command import Command, extra
from vllm_kvpool.cli.common.start_line import engine_arguments, transfer_config
from vllm_kvpool.cli.common.stores import StoreOptions, opened, store_options
from vllm_kvpool.cli.doctor import Finding, Status


@click.command("doctor", cls=Command)
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
    if is_line and not stores.are_named:
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
    with extra("top"):
        from vllm_kvpool.cli import sharing
    with opened(specs.stores, skip=True) as stores:
        for url in urls:
            yield from sharing.examine_engine(url, stores)
        if arguments:
            yield from sharing.examine_start_line(arguments, stores)
