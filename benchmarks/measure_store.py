"""How fast stores are from this machine, by the size of a cell.

    python benchmarks/measure_store.py --store URL [--namespace NAMESPACE] [--bytes 64MiB] [--json]

Cells are put and read as engines do it: in batches, by as many calls at once as the store likes.
For `file://` the plain medium stands beside it: one file, written and read by as many threads, past
the page cache where the file system allows that. Both sides take turns. With a namespace of an
engine it also says which chunk and span suit the engine's model.

The cells have a namespace of their own, which is removed; a full store may evict others for them.
"""

import contextlib
import os
import secrets
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Self

import click
import msgspec

from vllm_kvpool.cli.common.stores import StoreOptions, manifest_named, opened
from vllm_kvpool.cli.common.tables import TextTable, size_text, texts, time_text
from vllm_kvpool.errors import StoreError
from vllm_kvpool.identity.keys import make_namespace
from vllm_kvpool.layout.description import from_description
from vllm_kvpool.sizes import parse_size
from vllm_kvpool.storage.base import Buffer, ChunkRef, GetOutcome, PutOutcome, Store, map_buffer
from vllm_kvpool.storage.contents.manifest import Manifest
from vllm_kvpool.storage.url import FileOptions, StoreSpec

SIZES = tuple(1 << bits for bits in range(14, 24, 2))  # 16 KiB to 4 MiB
BATCH_BYTES = 16 << 20
MAX_BATCH_CELLS = 64
MAX_CELLS = 512
ROUNDS = 3
STORE_SHARE = 8  # at most an eighth of a store is filled, so that little is evicted
NUM_SINGLES = 16  # calls whose times are taken one by one
NEARLY = 0.9  # of the best bandwidth: larger cells gain little
CHUNK_TOKENS = (64, 128, 256, 512, 1024)


class SizeResult(msgspec.Struct, frozen=True):
    """Medians over rounds for cells of one size: bytes a second, and seconds of a call."""

    cell_bytes: int
    put_bytes_per_s: float
    get_bytes_per_s: float
    put_one_s: float
    get_one_s: float
    exists_s: float
    """Of one call for as many keys as there are cells in a batch."""
    plain_write_bytes_per_s: float | None = None
    plain_read_bytes_per_s: float | None = None


class StoreResult(msgspec.Struct, frozen=True):
    """A store's results by size; `plain` says what the plain medium is, "" for none."""

    store: str
    plain: str
    sizes: list[SizeResult]

    @property
    def good_cell_bytes(self) -> int:
        """The smallest size that reads at `NEARLY` of the best bandwidth."""
        best = max(each.get_bytes_per_s for each in self.sizes)
        good = [each for each in self.sizes if each.get_bytes_per_s >= NEARLY * best]
        return min(each.cell_bytes for each in good)


class _Cells:
    """Cells of one size in registered memory, and their keys in a namespace of their own, which is
    removed at the end of the `with`."""

    def __init__(self, store: Store, buffers: Sequence[Buffer]) -> None:
        self._store = store
        self._buffers = buffers
        self._namespace = make_namespace("kvpool-measured", secrets.token_hex(6))
        prefix = f"{self._namespace}@dcp0of1@head:0@layers:0-1@"
        self._keys = [f"{prefix}{secrets.token_hex(20)}" for _ in buffers]
        per_batch = max(1, min(MAX_BATCH_CELLS, BATCH_BYTES // buffers[0].nbytes))
        self.batches = [slice(i, i + per_batch) for i in range(0, len(buffers), per_batch)]
        self.singles = [slice(i, i + 1) for i in range(min(NUM_SINGLES, len(buffers)))]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._store.remove_namespace(self._namespace)

    def put(self, which: slice) -> None:
        keys = self._keys[which]
        outcomes = self._store.put(keys, self._buffers[which], [ChunkRef(key) for key in keys])
        if any(each not in (PutOutcome.STORED, PutOutcome.EXISTED) for each in outcomes):
            raise StoreError("the store did not take all cells: is it full?")

    def get(self, which: slice) -> None:
        outcomes = self._store.get(self._keys[which], self._buffers[which])
        if any(each is not GetOutcome.OK for each in outcomes):
            raise StoreError("cells were gone before they were read: the store is too small")

    def exists(self) -> None:
        self._store.exists(self._keys[self.batches[0]])


@contextlib.contextmanager
def _plain_file(directory: str) -> Iterator[tuple[int, str]]:
    """A new file in a directory, unlinked at once: its descriptor, and its name in the results."""
    handle, path = tempfile.mkstemp(dir=directory, prefix="kvpool-measured-")
    os.close(handle)
    try:
        file, how = os.open(path, os.O_RDWR | os.O_DIRECT), "O_DIRECT"
    except OSError:
        file, how = os.open(path, os.O_RDWR), "through the page cache"
    os.unlink(path)
    try:
        yield file, f"one file, {how}"
    finally:
        os.close(file)


def measure_store(
    spec: StoreSpec,
    store: Store,
    total_bytes: int,
    sizes: Sequence[int],
    progress: Callable[[], None] = lambda: None,
) -> StoreResult:
    """Measure one store; StoreError if it takes or keeps no cells. Its cells are removed again.

    Of each size there are up to `total_bytes` of cells at a time. `progress` is called after each.
    """
    if isinstance(spec.options, FileOptions):
        total_bytes = min(total_bytes, spec.options.size_bytes // STORE_SHARE)
    memory = map_buffer(max(total_bytes, max(sizes)))
    memory.view[:] = secrets.token_bytes(memory.nbytes)
    store.register(memory)
    directory = spec.options.path if isinstance(spec.options, FileOptions) else None
    results, plain = [], ""
    for cell_bytes in sizes:
        num_cells = max(1, min(MAX_CELLS, total_bytes // cell_bytes))
        result, medium = _measure_size(store, memory, cell_bytes, num_cells, directory)
        results.append(result)
        plain = medium or plain
        progress()
    store.unregister(memory)
    return StoreResult(spec.url, plain, results)


def _measure_size(
    store: Store, memory: Buffer, cell_bytes: int, num_cells: int, directory: str | None
) -> tuple[SizeResult, str]:
    """The results for cells of one size, and what the plain medium is, "" for none."""
    parallel_puts = store.capabilities.parallel_puts
    parallel_gets = store.capabilities.parallel_gets
    starts = range(0, num_cells * cell_bytes, cell_bytes)
    buffers = [memory.part(start, start + cell_bytes) for start in starts]
    measured: defaultdict[str, list[float]] = defaultdict(list)
    medium = ""

    def rate(name: str, threads: int, call: Callable[[Any], None], pieces: Sequence[Any]) -> None:
        seconds = _at_once(threads, call, pieces)
        measured[f"{name}_bytes_per_s"].append(num_cells * cell_bytes / seconds)

    for _ in range(ROUNDS):
        with _Cells(store, buffers) as cells:
            rate("put", parallel_puts, cells.put, cells.batches)
            rate("get", parallel_gets, cells.get, cells.batches)
            for one in cells.singles:
                measured["get_one_s"].append(_seconds(partial(cells.get, one)))
                measured["exists_s"].append(_seconds(cells.exists))
        with _Cells(store, buffers[:NUM_SINGLES]) as cells:
            for one in cells.singles:
                measured["put_one_s"].append(_seconds(partial(cells.put, one)))
        if directory is not None:
            with _plain_file(directory) as (file, medium):
                places = list(zip(buffers, starts, strict=True))
                rate("plain_write", parallel_puts, partial(_write, file), places)
                rate("plain_read", parallel_gets, partial(_read, file), places)
    medians = {name: statistics.median(values) for name, values in measured.items()}
    return SizeResult(cell_bytes=cell_bytes, **medians), medium


def _write(file: int, place: tuple[Buffer, int]) -> None:
    os.pwrite(file, place[0].view, place[1])


def _read(file: int, place: tuple[Buffer, int]) -> None:
    os.preadv(file, [place[0].view], place[1])


def _at_once(threads: int, call: Callable[[Any], None], pieces: Sequence[Any]) -> float:
    """The seconds that calls take on so many threads."""
    with ThreadPoolExecutor(max(1, threads)) as pool:
        began = time.perf_counter()
        for done in [pool.submit(call, piece) for piece in pieces]:
            done.result()
        return time.perf_counter() - began


def _seconds(call: Callable[[], None]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


class CellChoice(msgspec.Struct, frozen=True):
    """A chunk and a span of layers, and the size that they give a cell of one layer group."""

    kind: str
    chunk_tokens: int
    layer_span: int
    cell_bytes: int


def choices(manifest: Manifest, good_bytes: int) -> list[CellChoice]:
    """For each layer group, the smallest chunk for each span whose cells reach a size (pure).

    Spans are the engine's own, and all layers of a pipeline stage.
    """
    found = []
    for group in from_description(manifest.cells):
        if group.is_state or group.tail_tokens:
            continue  # as large, whatever the chunk
        spans = group.topology.all_spans()
        heads = 1 if group.topology.per_head else group.topology.heads_per_rank
        longest = max(stop - start for start, stop in group.topology.stages)
        for layers in sorted({max(len(span) for span in spans), longest}):
            row = heads * layers * group.row_bytes // group.tokens_per_row
            fitting = [tokens for tokens in CHUNK_TOKENS if tokens * row >= good_bytes]
            tokens = fitting[0] if fitting else CHUNK_TOKENS[-1]
            found.append(CellChoice(group.name, tokens, layers, tokens * row))
    return found


def tables(result: StoreResult, chosen: Sequence[CellChoice]) -> list[TextTable]:
    """A store's results for people; `chosen` are for the size that its results recommend."""
    columns = ["cell", "put", "get", "put one", "get one", "exists"]
    columns += ["plain write", "plain read"] if result.plain else []
    rows = []
    for each in result.sizes:
        rates = [each.put_bytes_per_s, each.get_bytes_per_s]
        plain = [each.plain_write_bytes_per_s, each.plain_read_bytes_per_s]
        rows.append(
            [
                size_text(each.cell_bytes),
                *(f"{size_text(rate)}/s" for rate in rates),
                *map(time_text, (each.put_one_s, each.get_one_s, each.exists_s)),
                *(f"{size_text(rate)}/s" for rate in plain if rate is not None),
            ]
        )
    title = f"{result.store}{f' (plain: {result.plain})' if result.plain else ''}"
    good = size_text(result.good_cell_bytes)
    shown = [TextTable(title, tuple(columns), texts(rows))]
    if chosen:
        lines = [
            [c.kind or "-", c.chunk_tokens, c.layer_span, size_text(c.cell_bytes)] for c in chosen
        ]
        advice = f"cells of {good} read at {NEARLY:.0%} of the best; the smallest chunks for that"
        names = ("layers of kind", "chunk_tokens", "layer_span", "cell")
        shown.append(TextTable(advice, names, texts(lines)))
    return shown


@click.command()
@click.option("--namespace", help="Of an engine: also say what chunk and span suit its model.")
@click.option("--bytes", "size", default="64MiB", show_default=True, help="Stored at a time.")
@click.option("--store", "urls", multiple=True, required=True, help="URL; may be repeated.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def main(namespace: str | None, size: str, urls: Sequence[str], as_json: bool) -> None:
    """Measure how fast stores are from this machine."""
    stores = StoreOptions(None, urls, as_json)
    results, shown = [], []
    specs = stores.stores()
    num_bytes = parse_size(size, "--bytes")
    with (
        opened(specs, writable=True) as every,
        click.progressbar(length=len(every) * len(SIZES), file=sys.stderr, label="sizes") as bar,
    ):
        manifest = manifest_named(every, namespace) if namespace else None
        for spec, each in zip(specs, every, strict=True):
            result = measure_store(spec, each.store, num_bytes, SIZES, lambda: bar.update(1))
            chosen = choices(manifest, result.good_cell_bytes) if manifest else []
            results.append(result)
            shown += tables(result, chosen)
    stores.print(results, "\n".join(table.as_text() for table in shown))


if __name__ == "__main__":
    main()
