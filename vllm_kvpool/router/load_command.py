"""`kvpool load`: a load from the command line, shown while it runs, kept as JSON and a picture."""

import tomllib
from collections.abc import Sequence
from pathlib import Path

import click
import msgspec
from rich.console import Console
from rich.live import Live

from vllm_kvpool.errors import ConfigError
from vllm_kvpool.router.load import Progress, Target, run_in_loop, run_load
from vllm_kvpool.router.load_stats import LoadResult
from vllm_kvpool.router.load_trace import LoadSpec, read_load_spec
from vllm_kvpool.router.load_view import line, render, report

LINE_EVERY_S = 1.0
VIEW_EVERY_S = 0.5

_PATH = click.Path(path_type=Path, dir_okay=False)


@click.command("load")
@click.argument("url")
@click.option("--trace", type=_PATH, help="TOML file with options of the load.")
@click.option("--set", "settings", multiple=True, metavar="NAME=VALUE", help="Such as rate=3.")
@click.option("--admin", default="", help="The router's admin address, to show its replicas.")
@click.option("--token-file", type=_PATH, help="Holds the token of the admin address.")
@click.option("--api-key", default="", envvar="OPENAI_API_KEY", help="Sent to the server.")
@click.option("--out", type=_PATH, default="load", help="Writes OUT.json and OUT.png.")
def load(
    url: str,
    trace: Path | None,
    settings: tuple[str, ...],
    admin: str,
    token_file: Path | None,
    api_key: str,
    out: Path,
) -> None:
    """Send a bursty load to the OpenAI server at URL, and keep what comes of it.

    Requests are sent when they are due, whether or not others have been answered; who is told to
    come later (429, 503) does not. Ctrl-C ends the load early.
    """
    try:
        spec = read_spec(trace, settings)
        token = token_file.read_text().strip() if token_file else ""
        out.parent.mkdir(parents=True, exist_ok=True)
        result = _run(spec, Target(url, api_key, admin, token))
        written = write(result, out)
    except (ConfigError, OSError) as error:
        raise click.ClickException(str(error)) from error
    click.echo(report(result))
    click.echo(f"written: {', '.join(str(path) for path in written)}")


def read_spec(trace: Path | None, settings: Sequence[str]) -> LoadSpec:
    """The load that a file and single options describe; these win. ConfigError names mistakes."""
    options: dict[str, object] = {}
    if trace is not None:
        try:
            options |= tomllib.loads(trace.read_text())
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{trace}: {error}") from error
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals:
            raise ConfigError(f"--set {setting}: NAME=VALUE is wanted")
        options[name.strip()] = value.strip()
    return read_load_spec(options)


def write(result: LoadResult, out: Path) -> tuple[Path, Path]:
    """Keep a load beside `out`: all requests and the summary as JSON, and the picture."""
    # Imported here, as it takes a second, before which the load should have begun.
    from vllm_kvpool.router.load_plot import write_plot

    data, picture = out.with_name(f"{out.name}.json"), out.with_name(f"{out.name}.png")
    data.write_bytes(msgspec.json.encode({"summary": result.summary(), "load": result}))
    write_plot(result, picture)
    return data, picture


def _run(spec: LoadSpec, target: Target) -> LoadResult:
    console = Console()
    if not console.is_terminal:
        return run_in_loop(
            lambda stop: run_load(
                spec,
                target,
                show=lambda progress: click.echo(line(progress)),
                show_every_s=LINE_EVERY_S,
                stop=stop,
            )
        )
    with Live(console=console, auto_refresh=False) as live:

        def show(progress: Progress) -> None:
            live.update(render(progress), refresh=True)

        return run_in_loop(
            lambda stop: run_load(spec, target, show=show, show_every_s=VIEW_EVERY_S, stop=stop)
        )
