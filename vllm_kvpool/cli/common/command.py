"""The parts that all commands have in common. Imports nothing slow: `kvpool --help` needs it."""

import contextlib
import math
import os
import sys
from collections.abc import Iterator
from typing import Any

import click
from click.core import ParameterSource

from vllm_kvpool.errors import ConfigError

LONGEST_S = 366 * 86_400.0  # threads cannot wait for centuries
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
HELP_OPTIONS = {"help_option_names": ["-h", "--help"]}


class Command(click.Command):
    """A command that refuses an empty value.

    A shell passes an empty value for an unset variable: `purge --tenant "$TENANT"` must not mean
    all tenants.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse as click does, then refuse empty values of options and arguments."""
        rest = super().parse_args(ctx, args)
        if ctx.resilient_parsing:  # a shell completes the line
            return rest
        for name, param in ((each.name or "", each) for each in self.params if each.nargs == 1):
            value = ctx.params.get(name)
            is_typed = ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE
            if is_typed and "" in (value if isinstance(value, tuple) else (value,)):
                raise click.BadParameter("it is empty; give a value, or leave it out", ctx, param)
        return rest


class Seconds(click.FloatRange):
    """Seconds that a thread can wait."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Return the seconds; NaN is refused like a number out of range."""
        seconds = float(super().convert(value, param, ctx))
        if math.isnan(seconds):
            self.fail(f"{value} is no number of seconds", param, ctx)
        return seconds


def hide_native_logs() -> None:
    """Discard what native libraries write to file descriptor 2; Python's stderr stays.

    Mooncake's client writes dozens of lines there, also without any fault; its own option leaves
    its errors, which the command reports in its own words. Does nothing if the user has set
    `MC_LOG_LEVEL`, or if stderr is closed or replaced. Call before logging is configured.
    """
    from vllm_kvpool.config import environment  # not for --help

    stderr = sys.stderr
    if stderr is not sys.__stderr__ or stderr is None or "MC_LOG_LEVEL" in environment():
        return
    stderr.flush()
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1, errors="backslashreplace")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.close(nowhere)


@contextlib.contextmanager
def extra(name: str) -> Iterator[None]:
    """Import modules that an extra of the package installs.

    Raises:
        ConfigError: A module is missing; the text names the command that installs the extra.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error}; run: pip install 'vllm-kvpool[{name}]'") from None
