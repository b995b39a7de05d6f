"""What the benchmarks share: command line, tables, targets, interleaved repeats, child processes.

A result is one JSON object: `rows` (the table), `targets` (a ratio or a time against what is
wanted), `notes` (what a reader must know). `run_all.py` gathers them.
"""

import argparse
import contextlib
import gc
import json
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self, TypeVar

from benchmarks.limits import Meter
from tests.support.namespaces import enter
from vllm_kvpool.cli.try_report import percentile as percentile

T = TypeVar("T")

FORKED = multiprocessing.get_context("forkserver")
"""Processes are forked from one that has imported the script and what it preloads.

All are killed with the script (`forks.py`)."""

Row = dict[str, object]

POLL_S = 0.0005
READY_TIMEOUT_S = 90.0
CALL_TIMEOUT_S = 60.0
END_TIMEOUT_S = 5.0
LOG_TAIL_BYTES = 4_000
LIMITED_BY = "limited by"
_SHARE = re.compile(r"(?<![a-z])p(?:50|99)(?!\d)")


@dataclass
class Target:
    """One line of what is wanted: `value` must be at least, or at most, `wanted`.

    `reached` False where no value could be measured.
    """

    what: str
    value: float | None
    wanted: float
    at_least: bool
    unit: str = "x"

    @property
    def reached(self) -> bool:
        if self.value is None:
            return False
        return self.value >= self.wanted if self.at_least else self.value <= self.wanted

    def __str__(self) -> str:
        sign = "at least" if self.at_least else "at most"
        value = "not measured" if self.value is None else f"{self.value:.3g} {self.unit}"
        verdict = "pass" if self.reached else "MISS"
        return f"{verdict}  {self.what}: {value} ({sign} {self.wanted:g} {self.unit})"


@dataclass
class Result:
    """What one benchmark has to say."""

    rows: list[Row] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def show(self) -> None:
        print_table(self.rows)
        for target in self.targets:
            print(target)
        for note in self.notes:
            print(f"note: {note}")

    def plain(self) -> dict[str, object]:
        targets = [asdict(t) | {"reached": t.reached, "text": str(t)} for t in self.targets]
        return {"rows": self.rows, "targets": targets, "notes": self.notes}


def print_table(rows: Sequence[Mapping[str, object]]) -> None:
    """Columns in the order in which rows first name them; numbers with three digits."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [names, *([cell_text(row.get(name, "")) for name in names] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(names))]
    for line in lines:
        cells = zip(line, widths, strict=True)
        print("  ".join(text.ljust(width) for text, width in cells).rstrip(), flush=True)


def cell_text(value: object) -> str:
    """A table cell: times and rates with three digits, everything else as it is."""
    if not isinstance(value, float):
        return str(value)
    short = f"{value:.3g}"
    return f"{float(short):.0f}" if abs(value) >= 1000 else short


def run_script(
    doc: str | None,
    measure: Callable[..., Result] | None = None,
    preload: Sequence[str] = (),
    **options: str,
) -> None:
    """The command line of every benchmark: `[--json FILE] [--quick]`, and its own options.

    Without `measure` the script has several benchmarks, functions `bench_NAME`, and is told a name.
    `options` has the help of each; `measure(quick, **options)` is given its text, "" without. Rows
    that do not say what they were limited by are given what all of it was limited by. `preload`
    names modules that children use and the script does not import.
    """
    # Without it, vLLM's block hashes begin with a random one in each process.
    os.environ["PYTHONHASHSEED"] = "0"
    script = f"benchmarks.{Path(sys.argv[0]).stem}"
    FORKED.set_forkserver_preload(["benchmarks.forks", script, *preload])
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="also write the results here")
    parser.add_argument("--quick", action="store_true", help="fewer repeats; to see that it runs")
    for name, text in options.items():
        parser.add_argument(f"--{name}", default="", help=text)
    if measure is None:
        own = vars(sys.modules["__main__"]).items()
        several = {
            name.removeprefix("bench_"): each for name, each in own if name.startswith("bench_")
        }
        parser.add_argument("name", choices=several, help="which benchmark")
    args = parser.parse_args()
    chosen: Any = measure or several[args.name]
    # As at an interrupt, servers and directories are cleared away.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    meter = Meter()
    with meter.of("all"):
        result = chosen(args.quick, **{name: getattr(args, name) for name in options})
    for row in result.rows:
        row.setdefault(LIMITED_BY, meter.limited_by("all"))
        assert not missing(row), f"a row without {missing(row)}: {row}"
    result.show()
    if args.json:
        args.json.write_text(json.dumps(result.plain(), indent=1) + "\n")
    sys.stdout.flush()
    # A native client that could not be closed has been seen to crash the interpreter's exit.
    os._exit(0)


def interleaved(
    actions: Mapping[str, Callable[[], T]], repeats: int, meter: Meter | None = None
) -> dict[str, list[T]]:
    """What each action returns (its seconds), one of each in turn, so that load hits all alike.

    A meter counts what each used, by its name.
    """
    results: dict[str, list[T]] = {name: [] for name in actions}
    for _ in range(repeats):
        for name, action in actions.items():
            with meter.of(name) if meter else contextlib.nullcontext():
                results[name].append(action())
    return results


def spread(name: str, unit: str, values: Sequence[float]) -> Row:
    """Columns of one latency: its mean, p50 and p99, of values in this unit."""
    columns = {
        "mean": sum(values) / len(values),
        "p50": percentile(values, 0.5),
        "p99": percentile(values, 0.99),
    }
    return {f"{name} {what} {unit}".strip(): value for what, value in columns.items()}


def missing(row: Row) -> list[str]:
    """Columns that a row of results should have besides: the mean and the p99 of each latency, and
    what limited it."""
    wanted = {LIMITED_BY}
    for name in row:
        if len(_SHARE.findall(name)) == 1:  # two are a ratio
            wanted |= {_SHARE.sub("mean", name), _SHARE.sub("p99", name)}
    return sorted(wanted - row.keys())


def wait_until(done: Callable[[], bool], timeout_s: float, poll_s: float = POLL_S) -> float:
    """Poll until `done`; the seconds that took. DidNotFinish after `timeout_s`."""
    start = time.perf_counter()
    while not done():
        if time.perf_counter() - start > timeout_s:
            raise late(timeout_s)
        time.sleep(poll_s)
    return time.perf_counter() - start


class DidNotFinish(Exception):
    """What was measured did not come to a good end: its only argument says how."""


def late(limit_s: float) -> DidNotFinish:
    """It took longer than it was allowed to."""
    return DidNotFinish(f"no end in {limit_s:g} s")


class ChildError(RuntimeError):
    """A child process raised or died; carries its traceback or the end of its log."""


def become(log: str, env: Mapping[str, str]) -> None:
    """Make of a forked process what a start with these variables would have made."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(env)
    config = sys.modules.get("torch._dynamo.config")
    if config is not None and env.get("TORCH_COMPILE_DISABLE") == "1":
        config.disable = True  # type: ignore[attr-defined]  # read from the environment on import


def _serve(
    connection: Connection,
    log: str,
    env: Mapping[str, str],
    namespace: str,
    make: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    """The child: build the object, then call its methods as told, until told no more."""
    become(log, env)
    try:
        if namespace:
            enter(namespace)
        target: Any = make(*args)
        gc.collect()
        gc.freeze()  # as vLLM's engine process does when it has started
        connection.send(("ok", None))
        while (call := connection.recv()) is not None:
            connection.send(_answer(target, call))
    except EOFError:
        pass  # the parent is gone
    except BaseException:
        with contextlib.suppress(OSError):
            connection.send(("error", traceback.format_exc()))
    # Threads may hang in native calls; nothing of this process is worth an orderly exit.
    os._exit(0)


def _answer(target: Any, call: tuple[str, tuple[Any, ...]]) -> tuple[str, Any]:
    name, args = call
    try:
        method = OF_EVERY_CHILD.get(name) or getattr(target, name)
        return "ok", method(*args)
    except DidNotFinish as error:
        return "unfinished", str(error)
    except Exception:  # the top of a child process: it becomes the parent's report
        return "error", traceback.format_exc()


# What every child answers, whatever object it holds.
OF_EVERY_CHILD = {"cpu_seconds": time.process_time}


class Child:
    """An object in a process of its own; `call` has its methods called. Not thread-safe.

    `env` are variables that it finds beside ours, `namespace` the network namespace it lives in.
    """

    def __init__(
        self,
        make: Callable[..., Any],
        *args: Any,
        env: Mapping[str, str] | None = None,
        namespace: str = "",
    ) -> None:
        self._connection, theirs = FORKED.Pipe()
        self._log = tempfile.NamedTemporaryFile(prefix="bench-", suffix=".log")  # noqa: SIM115 - ours
        arguments = (theirs, self._log.name, env or {}, namespace, make, args)
        self._process = FORKED.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        theirs.close()
        self._ready = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.end()

    def wait_ready(self) -> Self:
        """Until the object is made; several children may be started before."""
        if not self._ready:
            self._receive(READY_TIMEOUT_S)
            self._ready = True
        return self

    def call(self, name: str, *args: Any, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        """The method's result. DidNotFinish if it does not come in time; the child then ends."""
        self.begin(name, *args)
        return self.finish(timeout_s)

    def cpu_seconds(self) -> float:
        """Processor time of all threads of the child so far, in seconds."""
        return float(self.call("cpu_seconds"))

    def begin(self, name: str, *args: Any) -> None:
        """Have a method called; `finish` comes next."""
        self.wait_ready()
        self._connection.send((name, args))

    def finish(self, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        """The result of what was begun; as `call`."""
        return self._receive(timeout_s)

    def _receive(self, timeout_s: float) -> Any:
        if not self._connection.poll(timeout_s):
            self.end(orderly=False)
            raise late(timeout_s)
        try:
            kind, value = self._connection.recv()
        except EOFError:
            raise ChildError(f"the child process died:\n{self._log_tail()}") from None
        if kind == "unfinished":
            raise DidNotFinish(value)
        if kind == "error":
            raise ChildError(f"{value}\n--- end of its log ---\n{self._log_tail()}")
        return value

    def _log_tail(self) -> str:
        return Path(self._log.name).read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace")

    def end(self, *, orderly: bool = True) -> None:
        """Let the process end, or kill it."""
        if orderly:
            with contextlib.suppress(OSError):
                self._connection.send(None)
            self._process.join(END_TIMEOUT_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(END_TIMEOUT_S)


@contextlib.contextmanager
def children(*made: Child) -> Iterator[None]:
    """End them all, whatever happens."""
    try:
        for child in made:
            child.wait_ready()
        yield
    finally:
        for child in made:
            child.end()
